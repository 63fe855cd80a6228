"""The MLP of a transformer block, the layer norm before it and the sum around it, one launch.

    z[n, t, c] = x[n, t, c] + bias2[c] + sum_k h[n, t, k] w2[k, c]
    h[n, t, k] = gelu(bias1[k] + sum_c norm(x)[n, t, c] w1[c, k])

Wu et al. 2021, section 3; on Hopper, in 16 bits. The norm has the moments of the tokens, and its weight and bias are part
of w1 and bias1 (hopper/moments.mojo). Where ops/gemm/chain.mojo does not take it, it is two launches,
and the hidden layer between them has room in another output, which is not to be read.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from .epilogue import Epilogue
from .gemm.chain import ChainTensors, ChainVectors, try_chain
from .gemm.gpu import gemm
from .gemm.layer import Layer
from .geometry import Geometry
from .hopper.moments import Norm
from .operands import F32, Batch, Operands, data
from .target import IS_HOPPER


@register("layernorm_mlp")
struct LayernormMlp:
    """Adds the MLP of the normalised tokens x[N, T, C] to them."""

    @staticmethod
    def execute[
        target: StaticString, c: Int
    ](
        z: OutputTensor[rank=3, ...],
        h: OutputTensor[dtype=z.dtype, rank=3, ...],
        x: InputTensor[dtype=z.dtype, rank=3, ...],
        moments: InputTensor[dtype=F32, rank=4, ...],
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
            c: C.

        Args:
            z: Result [N, T, C].
            h: Room for the hidden layer [N, T, K].
            x: Tokens [N, T, C].
            moments: Of the tokens [N, T, C / 32, 2].
            w1: [K, C], flat, as graphs/arrange.py lays it out for a GPU; so is w2. The weights
                of w1 for each hidden number add up to 0.
            bias1: [K].
            w2: [C, K].
            bias2: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu" and IS_HOPPER, "layernorm_mlp: only Hopper has it as one op"
        comptime assert z.dtype.is_half_float(), "layernorm_mlp: tokens are of 16 bits"
        if z.size() == 0:
            return
        var m = z.size() // c
        var k = h.shape()[2]
        var norm = Norm(data(moments), c, data(eps)[unsafe_offset=0])
        if try_chain[z.dtype, "layernorm_mlp", c, c](
            m,
            k,
            ChainTensors[z.dtype](data(x), data(w1), data(w2), data(z), data(x), data(x), data(w1)),
            ChainVectors[](data(bias1), data(bias2), norm.moments),
            ctx,
            norm.eps,
        ):
            return
        comptime first = Layer(h.static_spec, x.static_spec, w1.static_spec, aligned=True)
        comptime second = Layer(z.static_spec, h.static_spec, w2.static_spec, aligned=True)
        gemm[z.dtype, Epilogue("gelu", normalizes=True), True, False, first](
            Geometry(rows=m, depth=c, columns=k),
            Operands[z.dtype](data(x), data(w1), data(bias1), data(x), data(h)),
            Batch(),
            ctx,
            norm=norm,
        )
        gemm[z.dtype, Epilogue("add"), True, False, second](
            Geometry(rows=m, depth=k, columns=c),
            Operands[z.dtype](data(h), data(w2), data(bias2), data(x), data(z)),
            Batch(),
            ctx,
        )
