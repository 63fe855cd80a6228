"""The MLP of a transformer block, the layer norm before it and the sum around it, one launch.

    z[n, t, c] = x[n, t, c] + bias2[c] + sum_k h[n, t, k] w2[k, c]
    h[n, t, k] = gelu(bias1[k] + sum_c norm(x)[n, t, c] w1[c, k])

Wu et al. 2021, section 3. Where ops/gemm/chain.mojo does not take it, it is three launches, whose
results in between have room in two more outputs; what those hold is not to be read.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from .epilogue import Epilogue
from .gemm.chain import ChainTensors, ChainVectors, try_chain
from .gemm.gpu import gemm
from .geometry import Geometry
from .layernorm import NormSizes, NormTensors, layernorm_gpu
from .operands import F32, Batch, Operands, data
from .target import IS_HOPPER


@register("layernorm_mlp")
struct LayernormMlp:
    """Adds the MLP of the normalised tokens x[N, T, C] to them."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool, c: Int
    ](
        z: OutputTensor[rank=3, ...],
        tokens: OutputTensor[dtype=z.dtype, rank=3, ...],
        h: OutputTensor[dtype=z.dtype, rank=3, ...],
        x: InputTensor[dtype=z.dtype, rank=3, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        w1: InputTensor[dtype=z.dtype, rank=1, ...],
        bias1: InputTensor[dtype=F32, rank=1, ...],
        w2: InputTensor[dtype=z.dtype, rank=1, ...],
        bias2: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            tf32: Whether it may round float32 to TF32 for the products.
            aligned: As of bmm, for both products.
            c: C.

        Args:
            z: Result [N, T, C].
            tokens: Room for the normalised tokens [N, T, C].
            h: Room for the hidden layer [N, T, K].
            x: Tokens [N, T, C].
            weight: Of the layer norm [C].
            bias: Of the layer norm [C].
            w1: [K, C], flat, as graphs/arrange.py lays it out for a GPU; so is w2.
            bias1: [K].
            w2: [C, K].
            bias2: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "layernorm_mlp: a CPU runs separate ops"
        if z.size() == 0:
            return
        var m = z.size() // c
        var k = h.shape()[2]
        var epsilon = data(eps)[unsafe_offset=0]
        comptime if IS_HOPPER and z.dtype.is_half_float():
            if try_chain[z.dtype, "layernorm_mlp", c, c](
                m,
                k,
                ChainTensors[z.dtype](
                    data(x), data(w1), data(w2), data(z), data(x), data(x), data(w1)
                ),
                ChainVectors[](data(bias1), data(bias2), data(weight), data(bias)),
                ctx,
                epsilon,
            ):
                return
        layernorm_gpu(
            NormTensors[z.dtype](x=data(x), weight=data(weight), bias=data(bias), y=data(tokens)),
            NormSizes(rows=m, columns=c, stride=c, eps=epsilon),
            ctx,
        )
        gemm[z.dtype, Epilogue("gelu"), True, tf32, aligned](
            Geometry(rows=m, depth=c, columns=k),
            Operands[z.dtype](data(tokens), data(w1), data(bias1), data(tokens), data(h)),
            Batch(),
            ctx,
        )
        gemm[z.dtype, Epilogue("add"), True, tf32, aligned](
            Geometry(rows=m, depth=k, columns=c),
            Operands[z.dtype](data(h), data(w2), data(bias2), data(x), data(z)),
            Batch(),
            ctx,
        )
