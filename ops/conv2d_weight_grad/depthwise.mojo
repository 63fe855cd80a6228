"""The gradient of depthwise filters on a GPU: dw[c, r, s] = sum_npq dy[n, p, q, c] x[n, h, w, c].

With h = p * stride - pad + r * dilation, and w likewise; x[N, H, W, C], dy[N, P, Q, C], dw[C, R, S].
A thread has four channels, and all taps of a 3 x 3 window or a row of those of a larger one: float32 sums
in registers. It takes one run after the other, 7 neighbouring pixels of a row of dy. These are loaded
once, and so is what each row of taps sees of x, which neighbouring pixels share. Neighbouring threads
have neighbouring channels and read whole lines of memory; the threads behind them take the same run of
the next rows, whose windows overlap: L1 serves what several of them see. A block adds up the sums of its
threads through shared memory and leaves those of its part of the runs in the room, which `add_parts` adds
up. Both orders are fixed.

Rows of 3, 5 and 7 taps are unrolled, with a stride of 1 or 2 (7: of 1). For all other windows, and for
channels that are no multiple of 4, a thread has four taps of a row, and takes a pixel at a time. Bound by
memory and the issue of instructions alike for 3 x 3, by the latter for larger windows.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, clamp
from std.memory import unsafe_stack_allocation
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..geometry import Geometry
from ..launch import launch
from ..operands import ALIGN, F32, Data, widened
from .parts import Part, add_parts
from .tensors import WeightGrad

comptime THREADS = 256
"""Threads of a block."""
comptime RESIDENT = 2
"""Blocks that a multiprocessor shall hold, which bounds the registers."""
comptime LANES = 16
"""Vectors of channels of a block at most: 128 bytes of 16-bit numbers."""
comptime WIDE = 4
"""Channels of a vector."""
comptime RUN = 7
"""Neighbouring pixels of a run; it divides the rows of images of 224 pixels at every stage."""


@fieldwise_init
struct Taps(TrivialRegisterPassable):
    """The taps that a block sums, and how it takes the pixels."""

    comptime ANY = Self(1, 4, 0)
    """For every window: part of a row of taps."""
    comptime KNOWN = [Self(3, 3, 1), Self(3, 3, 2), Self(1, 5, 1), Self(1, 5, 2), Self(1, 7, 1)]
    """Whole rows of taps, which are unrolled."""

    var rows: Int
    """Rows of taps."""
    var across: Int
    """Taps of each."""
    var stride: Int
    """Pixels of x from one window to the next, across; 0 if known at run time only."""

    def run(self) -> Int:
        """Gives how many pixels are unrolled.

        Returns:
            Those of a run, or one.
        """
        return RUN if self.stride > 0 else 1

    def takes(self, g: Geometry) -> Bool:
        """Tells whether a block can have them of a window.

        Args:
            g: Sizes of the convolution.

        Returns:
            True if rows are as long, and the stride is the same.
        """
        return g.s == self.across and g.stride_w == self.stride and g.dilation_w == 1


def weight_grad_depthwise[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Enqueues the gradient of depthwise filters.

    Parameters:
        dtype: Of the tensors.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
        most: Parts of the pixels for which there is room.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    if g.c % WIDE > 0:
        _enqueue[Taps.ANY, 1](g, o, most, ctx)
        return
    comptime for i in range(len(Taps.KNOWN)):
        comptime taps = Taps.KNOWN[i]
        if taps.takes(g):
            _enqueue[taps, WIDE](g, o, most, ctx)
            return
    _enqueue[Taps.ANY, WIDE](g, o, most, ctx)


def _enqueue[
    dtype: DType, //, taps: Taps, width: Int
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    var vectors = g.c // width
    var columns = ceildiv(vectors, LANES)
    var lanes = ceildiv(vectors, columns)
    var groups = ceildiv(g.r, taps.rows) * ceildiv(g.s, taps.across)
    var wanted = RESIDENT * Device(ctx).multiprocessors // (columns * groups)
    var runs = g.n * g.p * ceildiv(g.q, RUN)
    var parts = max(1, min(min(wanted, most), ceildiv(runs, THREADS // lanes)))
    launch[depthwise_kernel[dtype, taps, width]](
        ctx, o, g, Int32(lanes), grid_dim=(columns, groups, parts), block_dim=THREADS
    )
    add_parts(o, g.c * g.r * g.s, parts, ctx)


@always_inline
def _inside[columns: Int, neighbours: Bool](w0: Int32, g: Geometry) -> UInt32:
    """Tells which columns are inside of the image, in a bit each.

    Parameters:
        columns: How many there are; fewer than 32.
        neighbours: Whether they are neighbours; else they are as far apart as taps.

    Args:
        w0: The first.
        g: Sizes of the convolution.

    Returns:
        The bits.
    """
    comptime if neighbours:
        var before = (UInt32(1) << UInt32(clamp(-w0, 0, 31))) - 1
        return ((UInt32(1) << UInt32(clamp(Int32(g.w) - w0, 0, 31))) - 1) & ~before
    var bits = UInt32(0)
    comptime for column in range(columns):
        var w = w0 + Int32(column) * Int32(g.dilation_w)
        bits |= UInt32(UInt32(w) < UInt32(g.w)) << UInt32(column)
    return bits


@always_inline
def _has(bits: UInt32, column: Int) -> Bool:
    return bits & (UInt32(1) << UInt32(column)) != 0


@always_inline
def _add_run[
    dtype: DType, //, taps: Taps, width: Int, run: Int
](
    mut sums: Array[SIMD[F32, width], taps.rows * taps.across],
    image: Data[dtype],
    dy: Data[dtype],
    h0: Int32,
    w0: Int32,
    g: Geometry,
):
    """Adds the products of neighbouring pixels.

    Parameters:
        dtype: Of x and dy.
        taps: Of the block.
        width: Channels.
        run: Pixels.

    Args:
        sums: Of each tap.
        image: x[n, 0, 0, c].
        dy: The first pixel.
        h0: Row that the first tap sees of it.
        w0: Column that it sees.
        g: Sizes of the convolution.
    """
    comptime COLUMNS = (run - 1) * taps.stride + taps.across
    comptime ALIGNED = ALIGN[dtype, width]
    var channels = Int32(g.c)
    var step = channels * (1 if taps.stride > 0 else Int32(g.dilation_w))
    var inside = _inside[COLUMNS, taps.stride > 0](w0, g)
    var gradient = Array[SIMD[F32, width], run](uninitialized=True)
    comptime for i in range(run):
        gradient[i] = widened(dy.unsafe_load[width=width, alignment=ALIGNED](Int32(i) * channels))
    # What lies outside of the image is read at an edge and dropped: no load waits for a branch.
    comptime for r in range(taps.rows):
        var h = h0 + Int32(r) * Int32(g.dilation_h)
        var there = UInt32(h) < UInt32(g.h)
        var edge = (h if there else 0) * Int32(g.w) * channels
        var first = edge + w0 * channels
        var bits = inside if there else 0
        var loaded = Array[SIMD[dtype, width], COLUMNS](uninitialized=True)
        comptime for column in range(COLUMNS):
            var at = first + Int32(column) * step if _has(bits, column) else edge
            loaded[column] = image.unsafe_load[width=width, alignment=ALIGNED](at)
        comptime for column in range(COLUMNS):
            var met = loaded[column] if _has(bits, column) else SIMD[dtype, width](0)
            var value = widened(met)
            comptime for i in range(run):
                comptime s = column - i * taps.stride
                comptime if 0 <= s and s < taps.across:
                    comptime tap = r * taps.across + s
                    sums[tap] = gradient[i].fma(value, sums[tap])


@__name(t"conv2d_weight_grad_depthwise_{taps.rows}x{taps.across}_{taps.stride}x{width}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(RESIDENT),
)
def depthwise_kernel[
    dtype: DType, taps: Taps, width: Int
](o: WeightGrad[dtype], g: Geometry, lanes: Int32):
    """Sums a part of the pixels for some taps of a block's channels, into the room.

    Parameters:
        dtype: Of the tensors.
        taps: Those of a block; the grid's y numbers the blocks that share a window.
        width: Channels of a thread; it divides C.

    Args:
        o: Tensors.
        g: Sizes of the convolution.
        lanes: Vectors of channels of a block.
    """
    var walkers = Int32(THREADS) // lanes
    var walker = Int32(thread_idx.x) // lanes
    var lane = Int32(thread_idx.x) - walker * lanes
    var first = Int32(block_idx.x) * lanes  # vector of the block
    var c = (first + lane) * Int32(width)
    var row, part_of_row = divmod(Int32(block_idx.y), ceildiv(Int32(g.s), Int32(taps.across)))
    var r0 = row * Int32(taps.rows)
    var s0 = part_of_row * Int32(taps.across)
    var sums = Array[SIMD[F32, width], taps.rows * taps.across](fill=0)
    # Walkers that are neighbours take the same run of rows that are neighbours.
    var runs = ceildiv(UInt32(g.q), UInt32(RUN))
    var part = Part(g.n * g.p * Int(runs))
    wait_on_dependent_grids()
    launch_dependent_grids()
    if walker < walkers and c < Int32(g.c):
        for number in range(UInt32(part.first) + UInt32(walker), UInt32(part.end), UInt32(walkers)):
            var of = number // UInt32(g.p)
            var p = Int32(number - of * UInt32(g.p))
            var n = of // runs
            var q = Int32(of - n * runs) * Int32(RUN)
            var image = o.x.unsafe_offset(Int(n) * g.h * g.w * g.c + Int(c))
            var h0 = p * Int32(g.stride_h) - Int32(g.pad_h) + r0 * Int32(g.dilation_h)
            var w0 = q * Int32(g.stride_w) - Int32(g.pad_w) + s0 * Int32(g.dilation_w)
            var dy = o.dy.unsafe_offset(((Int(n) * g.p + Int(p)) * g.q + Int(q)) * g.c + Int(c))
            var pixels = min(Int32(RUN), Int32(g.q) - q)
            comptime if taps.stride > 0:
                if pixels == Int32(RUN):
                    _add_run[taps, width, RUN](sums, image, dy, h0, w0, g)
                    continue
            for _ in range(pixels):
                _add_run[taps, width, 1](sums, image, dy, h0, w0, g)
                dy = dy.unsafe_offset(g.c)
                w0 += Int32(g.stride_w)

    # One row of taps after the other.
    comptime ROW = taps.across * width
    var shared = unsafe_stack_allocation[
        THREADS * ROW, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var channels = lanes * Int32(width)
    var count = channels * Int32(taps.across)
    var room = o.room.unsafe_offset(part.number * g.c * g.r * g.s)
    comptime for r in range(taps.rows):
        if walker < walkers:
            comptime for s in range(taps.across):
                shared.unsafe_store[alignment=ALIGN[F32, width]](
                    walker * count + Int32(s) * channels + lane * Int32(width),
                    sums[r * taps.across + s],
                )
        barrier()
        for number in range(Int32(thread_idx.x), count, Int32(THREADS)):
            var sum = Float32(0)
            for other in range(walkers):
                sum += shared[unsafe_offset=other * count + number]
            var s, channel = divmod(number, channels)
            channel += first * Int32(width)
            s += s0
            if channel < Int32(g.c) and r0 + Int32(r) < Int32(g.r) and s < Int32(g.s):
                var tap = (r0 + Int32(r)) * Int32(g.s) + s
                room[unsafe_offset=Int(channel) * g.r * g.s + Int(tap)] = sum
        barrier()
