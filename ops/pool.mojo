"""Max and average pooling over x[N, H, W, C] into y[N, P, Q, C], torch's.

Vectors run over channels, so a window is R * S wide loads; bound by memory. Padding never wins
the maximum and NaN does. With ceil_mode (P and Q are the graph's) the last window may hang over
the padding: what hangs over counts for neither op. The average of a whole image on a GPU splits
the image over the rows of a block, which reads 16 bytes a thread.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv, isnan
from std.memory import unsafe_stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf

from .geometry import Geometry
from .operands import F32, Data, data, narrowed, widened


@register("maxpool")
struct MaxPool:
    """Takes the maximum of each window."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var g = Geometry(x.shape(), y.shape(), data(window))
        var source = data(x)

        def body[width: Int](at: Coord[...]) {var g, var source} -> SIMD[y.dtype, width]:
            var image = Int(at[0].value()) * g.h
            var h0 = Int(at[1].value()) * g.stride_h - g.pad_h
            var w0 = Int(at[2].value()) * g.stride_w - g.pad_w
            var best = SIMD[F32, width](neg_inf[F32]())
            for r in range(g.r):
                var h = h0 + r * g.dilation_h
                if h < 0 or h >= g.h:
                    continue
                for s in range(g.s):
                    var w = w0 + s * g.dilation_w
                    if w < 0 or w >= g.w:
                        continue
                    var value = widened(
                        source.unsafe_load[width=width](
                            ((image + h) * g.w + w) * g.c + Int(at[3].value())
                        )
                    )
                    best = (value.gt(best) | isnan(value)).select(value, best)
            return narrowed[y.dtype](best)

        foreach[target=target](body, y, ctx)


comptime SLICE = 32
"""Vectors of channels of a block that averages images."""
comptime PARTS = 8
"""Parts of an image that a block sums apart."""


@__name(t"avgpool_{dtype}")
def mean_kernel[dtype: DType](x: Data[dtype], y: Data[dtype], pixels: Int32, channels: Int32):
    """Averages the pixels of an image, 16 bytes of channels in each thread.

    Parameters:
        dtype: Of x and y.

    Args:
        x: [N, pixels, channels]; block_idx.y counts the images.
        y: [N, channels]; block_idx.x counts slices of 32 vectors.
        pixels: Of an image.
        channels: A multiple of 16 bytes of them.
    """
    comptime wide = 16 // size_of[dtype]()
    var slot = Int(thread_idx.x) % SLICE
    var part = Int(thread_idx.x) // SLICE
    var c = (Int(block_idx.x) * SLICE + slot) * wide
    var source = x.unsafe_offset(Int(block_idx.y) * Int(pixels) * Int(channels) + c)
    var sums = unsafe_stack_allocation[
        PARTS * SLICE * wide, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var sum = SIMD[F32, wide](0)
    if c < Int(channels):
        for p in range(part, Int(pixels), PARTS):
            sum += source.unsafe_load[width=wide, alignment=16](p * Int(channels)).cast[F32]()
    sums.unsafe_store[alignment=16](Int(thread_idx.x) * wide, sum)
    barrier()
    if part == 0 and c < Int(channels):
        for i in range(1, PARTS):
            sum += sums.unsafe_load[width=wide, alignment=16]((i * SLICE + slot) * wide)
        var to = Int(block_idx.y) * Int(channels) + c
        y.unsafe_store[alignment=16](to, (sum / Float32(pixels)).cast[dtype]())


@register("avgpool")
struct AvgPool:
    """Averages each window in float32; padding counts as in torch's count_include_pad."""

    @staticmethod
    def execute[
        target: StaticString, padding_counts: Bool
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            padding_counts: Whether zeros of the padding count in the average.

        Args:
            y: Result [N, P, Q, C].
            x: Activations [N, H, W, C].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var g = Geometry(x.shape(), y.shape(), data(window))
        var source = data(x)
        comptime if target != "cpu":
            comptime wide = 16 // size_of[y.dtype]()
            var whole = g.r == g.h and g.s == g.w and g.pad_h + g.pad_w == 0
            if whole and g.c % wide == 0 and 0 < g.n < 65536:
                ctx.enqueue_function[mean_kernel[y.dtype]](
                    source,
                    data(y),
                    Int32(g.h * g.w),
                    Int32(g.c),
                    grid_dim=(ceildiv(g.c, SLICE * wide), g.n),
                    block_dim=SLICE * PARTS,
                    attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
                )
                return

        def body[width: Int](at: Coord[...]) {var g, var source} -> SIMD[y.dtype, width]:
            var image = Int(at[0].value()) * g.h
            var h0 = Int(at[1].value()) * g.stride_h - g.pad_h
            var w0 = Int(at[2].value()) * g.stride_w - g.pad_w
            var top = max(h0, 0)
            var left = max(w0, 0)
            var bottom = min(h0 + g.r, g.h)
            var right = min(w0 + g.s, g.w)
            var sum = SIMD[F32, width](0)
            for h in range(top, bottom):
                for w in range(left, right):
                    var value = source.unsafe_load[width=width](
                        ((image + h) * g.w + w) * g.c + Int(at[3].value())
                    )
                    sum += widened(value)
            comptime if padding_counts:
                bottom = min(h0 + g.r, g.h + g.pad_h)
                right = min(w0 + g.s, g.w + g.pad_w)
                top = h0
                left = w0
            return narrowed[y.dtype](sum / Float32((bottom - top) * (right - left)))

        foreach[target=target](body, y, ctx)
