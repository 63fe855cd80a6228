"""Squeeze and excitation (Hu et al. 2018, arXiv:1709.01507) of images x[N, P, C].

    m[n, c] = mean_p x[n, p, c]
    h[n, k] = activation(sum_c squeeze[k, c] m[n, c] + squeeze_bias[k])
    g[n, c] = gate(sum_k excite[k, c] h[n, k] + excite_bias[c])
    y[n, p, c] = epilogue(x[n, p, c] * g[n, c])

All of it is float32 and rounded once. Bound by memory: x is read twice, the second time from shared
memory or a cache where it fits there.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..operands import F32, ON_CPU, data
from ..target import IS_HOPPER
from .config import WIDTH, SqueezeTensors
from .cpu import squeeze_excite_cpu
from .gpu import squeeze_excite_gpu


@register("squeeze_excite")
struct SqueezeExcite:
    """Multiplies images by gates, which two products of their means give."""

    @staticmethod
    def execute[
        target: StaticString,
        activation: StaticString,
        gate: StaticString,
        epilogue: StaticString,
    ](
        y: OutputTensor[rank=4, ...],
        room: OutputTensor[dtype=F32, rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        squeeze: InputTensor[dtype=y.dtype, rank=2, ...],
        squeeze_bias: InputTensor[dtype=F32, rank=1, ...],
        excite: InputTensor[dtype=y.dtype, rank=2, ...],
        excite_bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            activation: Between the products; of epilogue.mojo, so are the next two.
            gate: Behind the second product.
            epilogue: What the gated images go through.

        Args:
            y: Result [N, H, W, C].
            room: On a CPU [N, K + some times C], which nobody else reads.
            x: Images [N, H, W, C].
            squeeze: Weights of the first product [K, C].
            squeeze_bias: [K].
            excite: Weights of the second product [K, C].
            excite_bias: [C].
            residual: [N, H, W, C]; x if the epilogue does not add.
            ctx: The device.

        Raises:
            If C is no multiple of 8, or the launch fails.
        """
        comptime assert (
            target == "cpu" or IS_HOPPER
        ), "squeeze_excite: expects a CPU or a Hopper GPU; others compute its ops one by one"
        comptime assert (
            Epilogue.known[activation]() and Epilogue.known[gate]() and Epilogue.known[epilogue]()
        ), "squeeze_excite: there is no such epilogue; ops/epilogue.mojo says what there is"
        comptime act = Epilogue(activation)
        comptime gates = Epilogue(gate)
        comptime end = Epilogue(epilogue)
        comptime assert (
            not act.joins and not gates.joins
        ), "squeeze_excite: expects an activation and a gate that do not add"
        var images, channels, hidden = x.shape()[0], x.shape()[3], squeeze.shape()[0]
        var pixels = x.shape()[1] * x.shape()[2]
        if channels % WIDTH != 0:
            raise Error(
                "squeeze_excite: expects a multiple of ", WIDTH, " channels but has ", channels
            )
        if x.size() == 0:
            return
        var o = SqueezeTensors[y.dtype](
            x=data(x),
            squeeze=data(squeeze),
            squeeze_bias=data(squeeze_bias),
            excite=data(excite),
            excite_bias=data(excite_bias),
            residual=data(residual),
            y=data(y),
        )
        comptime if target == "cpu":
            comptime assert ON_CPU[y.dtype], "squeeze_excite: a CPU expects float32 or bfloat16"
            squeeze_excite_cpu[act, gates, end](
                o, images, pixels, channels, hidden, data(room), room.shape()[1]
            )
        else:
            squeeze_excite_gpu[y.dtype, act, gates, end](o, images, pixels, channels, hidden, ctx)
