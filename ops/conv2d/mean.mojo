"""The end of a network's last block and the mean of its images: a convolution of 1 x 1, one launch.

    y[n, f] = sum_pq act(bias[f] + residual[n, p, q, f] + sum_c x[n, p, q, c] w[c, f]) / (P Q)

With one image of up to 64 pixels a block has all pixels of its filters, and only their mean is stored
(`pools` of ops/epilogue.mojo). Else it is two launches, and the convolution's result between them has
room in another output, which is not to be read. Each result is rounded before it is added up, so both
ways give the same up to the order of the sum.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..epilogue import Epilogue
from ..gemm.resident import resident_gemm
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..hopper.shared import ROW
from ..hopper.tile import TileConfig
from ..operands import F32, Operands, data
from ..pointwise import bytes_of
from ..reduce.gpu import reduce_gpu
from ..reduce.results import Finish, Results
from ..reduce.values import Terms
from ..target import IS_HOPPER
from .gpu import conv2d_gpu

comptime TILE = TileConfig(groups=1, columns=32)
"""The tile of all pixels of an image."""
comptime STEPS = 16
"""Steps of K of such a tile at most; more of them are faster where a cluster shares them."""


@register("conv2d_mean")
struct Conv2dMean:
    """Convolves x[N, P, Q, C] into images [N, P, Q, F], and averages each of them."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        images: OutputTensor[dtype=y.dtype, rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        filter: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).

        Args:
            y: Result [N, F].
            images: Room for what is averaged [N, P, Q, F].
            x: Activations [N, P, Q, C]; C and F are multiples of 8.
            filter: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for a GPU.
            bias: [F].
            residual: [N, P, Q, F]; x if the epilogue does not add.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu" and IS_HOPPER, "conv2d_mean: only Hopper has it as one op"
        if y.size() == 0:
            return
        comptime dtype = y.dtype
        var n, f = y.shape()[0], y.shape()[1]
        var pixels = images.shape()[1] * images.shape()[2]
        var g = Geometry(rows=n * pixels, depth=x.shape()[3], columns=f)
        var o = Operands[dtype](data(x), data(filter), data(bias), data(residual), data(images))
        if n == 1 and pixels <= TILE.rows() and ceildiv(g.c * size_of[dtype](), ROW) <= STEPS:
            o.y = data(y)
            resident_gemm[Epilogue(epilogue, pools=True), TILE]([g], [o], 1, ctx)
            return
        comptime layer = Layer(images.static_spec, x.static_spec, filter.static_spec, aligned=True)
        conv2d_gpu[dtype, Epilogue(epilogue), False, layer](g, o, ctx)
        comptime terms = Terms(dtype)
        comptime finish = Finish(dtype, 1)
        reduce_gpu["sum", terms](
            {fill = bytes_of(images)},
            Results[finish](Results[finish].Tensors(fill=bytes_of(y))),
            n,
            pixels,
            f,
            Float32(pixels),
            ctx,
        )
