"""Squeeze and excitation of images: registration and checks; hopper.mojo has the kernel."""

from extensibility import InputTensor, ManagedTensorSlice, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..operands import F32, data
from ..target import IS_HOPPER
from .config import WIDTH, SqueezeTensors
from .hopper import squeeze_excite_gpu


@always_inline
def _squeeze_excite[
    dtype: DType,
    //,
    target: StaticString,
    activation: StaticString,
    gate: StaticString,
    epilogue: StaticString,
](
    o: SqueezeTensors[dtype],
    x: ManagedTensorSlice,
    squeeze: ManagedTensorSlice,
    ctx: DeviceContext,
) raises:
    comptime assert (
        target == "gpu" and IS_HOPPER
    ), "squeeze_excite: expects a Hopper GPU; others compute its ops one by one"
    comptime assert (
        Epilogue.known(activation) and Epilogue.known(gate) and Epilogue.known(epilogue)
    ), "squeeze_excite: there is no such epilogue; ops/epilogue.mojo says what there is"
    comptime assert (
        not Epilogue(activation).adds and not Epilogue(gate).adds
    ), "squeeze_excite: expects an activation and a gate that do not add"
    var shape = x.shape()
    if shape[3] % WIDTH != 0:
        raise Error("squeeze_excite: expects a multiple of ", WIDTH, " channels but has ", shape[3])
    if x.size() > 0:
        squeeze_excite_gpu[dtype, Epilogue(activation), Epilogue(gate), Epilogue(epilogue)](
            o, shape[0], shape[1] * shape[2], shape[3], squeeze.shape()[0], ctx
        )


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
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        squeeze: InputTensor[dtype=y.dtype, rank=2, ...],
        squeeze_bias: InputTensor[dtype=F32, rank=1, ...],
        excite: InputTensor[dtype=y.dtype, rank=2, ...],
        excite_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            activation: Between the products; of epilogue.mojo, so are the next two.
            gate: Behind the second product.
            epilogue: What the gated images go through; one that does not add.

        Args:
            y: Result [N, H, W, C].
            x: Images [N, H, W, C].
            squeeze: Weights of the first product [K, C].
            squeeze_bias: [K].
            excite: Weights of the second product [K, C].
            excite_bias: [C].
            ctx: The device.

        Raises:
            If C is no multiple of 8, or the launch fails.
        """
        comptime assert not Epilogue(
            epilogue
        ).adds, "squeeze_excite: squeeze_excite_add takes the residual"
        _squeeze_excite[target, activation, gate, epilogue](
            SqueezeTensors[y.dtype](
                x=data(x),
                squeeze=data(squeeze),
                squeeze_bias=data(squeeze_bias),
                excite=data(excite),
                excite_bias=data(excite_bias),
                residual=data(x),
                y=data(y),
            ),
            x,
            squeeze,
            ctx,
        )


@register("squeeze_excite_add")
struct SqueezeExciteAdd:
    """Multiplies images by their gates, and adds residual[N, H, W, C]."""

    @staticmethod
    def execute[
        target: StaticString,
        activation: StaticString,
        gate: StaticString,
        epilogue: StaticString,
    ](
        y: OutputTensor[rank=4, ...],
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
            target: "gpu".
            activation: Between the products; of epilogue.mojo, so are the next two.
            gate: Behind the second product.
            epilogue: What the gated images go through; one that adds.

        Args:
            y: Result [N, H, W, C].
            x: Images [N, H, W, C].
            squeeze: Weights of the first product [K, C].
            squeeze_bias: [K].
            excite: Weights of the second product [K, C].
            excite_bias: [C].
            residual: [N, H, W, C].
            ctx: The device.

        Raises:
            If C is no multiple of 8, or the launch fails.
        """
        comptime assert Epilogue(
            epilogue
        ).adds, "squeeze_excite_add: the epilogue must be one that adds"
        _squeeze_excite[target, activation, gate, epilogue](
            SqueezeTensors[y.dtype](
                x=data(x),
                squeeze=data(squeeze),
                squeeze_bias=data(squeeze_bias),
                excite=data(excite),
                excite_bias=data(excite_bias),
                residual=data(residual),
                y=data(y),
            ),
            x,
            squeeze,
            ctx,
        )
