"""The end of a residual block and the begin of the next: two convolutions of 1 x 1, one launch.

    h[n, p, q, k] = relu(bias[k] + residual[n, p, q, k] + sum_c x[n, p, q, c] w[c, k])
    z[n, p, q, f] = relu(next_bias[f] + sum_k h[n, p, q, k] v[k, f])

He et al. 2015, figure 5, right. The second convolution takes h from shared memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.chain import ChainTensors, ChainVectors, try_chain
from ..geometry import Geometry
from ..operands import F32, Operands, data
from ..target import IS_HOPPER
from .gpu import conv2d_gpu


@register("conv2d_chain")
struct Conv2dChain:
    """Convolves x[N, P, Q, C] into h[N, P, Q, K], adds and rectifies, and h into z[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool, c: Int, f: Int
    ](
        h: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=h.dtype, rank=4, ...],
        x: InputTensor[dtype=h.dtype, rank=4, ...],
        filter: InputTensor[dtype=h.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=h.dtype, rank=4, ...],
        next: InputTensor[dtype=h.dtype, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            tf32: Whether it may round float32 to TF32 for the products.
            aligned: As of conv2d, for both convolutions.
            c: C.
            f: F.

        Args:
            h: What the block gives [N, P, Q, K].
            z: The next block's first activations [N, P, Q, F].
            x: Activations [N, P, Q, C].
            filter: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for the device.
            bias: [K].
            residual: What came into the block [N, P, Q, K].
            next: The next block's 1 x 1 filter, flat, laid out alike.
            next_bias: [F].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "conv2d_chain: a CPU runs two convolutions"
        if h.size() == 0:
            return
        var k = h.shape()[3]
        var m = h.size() // k
        comptime if IS_HOPPER and h.dtype.is_half_float():
            if try_chain[h.dtype, "conv2d_chain", c, f](
                m,
                k,
                ChainTensors[h.dtype](
                    data(x), data(filter), data(next), data(z), data(residual), data(h)
                ),
                ChainVectors(data(bias), data(next_bias), data(bias), data(bias)),
                ctx,
            ):
                return
        conv2d_gpu[h.dtype, Epilogue("add_relu"), tf32, aligned=aligned](
            Geometry(rows=m, depth=c, columns=k),
            Operands[h.dtype](data(x), data(filter), data(bias), data(residual), data(h)),
            ctx,
        )
        conv2d_gpu[h.dtype, Epilogue("relu"), tf32, aligned=aligned](
            Geometry(rows=m, depth=k, columns=f),
            Operands[h.dtype](data(h), data(next), data(next_bias), data(h), data(z)),
            ctx,
        )
