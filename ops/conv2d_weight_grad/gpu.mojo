"""The gradient of a convolution's filters on a GPU: dw[f, j] = sum_m dy[m, f] x[row(m, j)].

A GEMM of F filters by R S C columns j = (r, s, c) whose K are the pixels m. There are many more pixels
than results, so they are divided into parts too, whose float32 sums a second kernel adds up in their
order and rounds: the result does not depend on how blocks run. hopper.mojo multiplies 16-bit numbers
by wgmma; for all else there is the kernel of this file.

That kernel: a block of 256 threads computes 64 filters x 64 columns of a part, each thread 4 x 4, from
16 pixels at a time in shared memory. CUDA cores and float32 throughout, whatever the dtype of the
tensors, so it runs on every GPU. Bound by the FMA units.

Depthwise, a block sums one tap of 32 channels, neighbouring threads neighbouring channels; its warps
take turns at the pixels. Bound by the cache, from which dy is read once for each tap.
"""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from ..device import Device
from ..geometry import Geometry
from ..launch import launch
from ..operands import F32, Data, narrowed, widened
from .tensors import WeightGrad

comptime THREADS = 256
"""Threads of a block."""
comptime TILE = 64
"""Filters, and columns, of a block."""
comptime DEPTH = 16
"""Pixels of a stage."""
comptime PITCH = TILE + 4
"""Floats from one pixel to the next in shared memory; 4 more than needed, against conflicts."""
comptime LEAST = 16 * DEPTH
"""Pixels of a part at least."""
comptime CHANNELS = 32
"""Channels of a block of the depthwise kernel."""
comptime WARPS = THREADS // CHANNELS
"""Pixels that it takes at a time."""


def conv2d_weight_grad_gpu[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Enqueues the gradient.

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
    if g.depthwise():
        enqueue_depthwise(g, o, most, ctx)
    else:
        enqueue_portable(g, o, most, ctx)


def enqueue_portable[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel for CUDA cores, which takes every convolution.

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
    var columns = ceildiv(g.depth(), TILE)
    var rows = ceildiv(g.group_f(), TILE) * g.groups
    var wanted = ceildiv(4 * Device(ctx).multiprocessors, columns * rows)
    var parts = max(1, min(min(wanted, most), ceildiv(g.pixels(), LEAST)))
    ctx.enqueue_function[weight_grad_kernel[dtype]](
        o, g, grid_dim=(columns, rows, parts), block_dim=THREADS
    )
    add_parts(o, g.f * g.depth(), parts, ctx)


@__name(t"conv2d_weight_grad_cores_{dtype}")
def weight_grad_kernel[dtype: DType](o: WeightGrad[dtype], g: Geometry):
    """Sums a part of the pixels for a tile of dw, into the room.

    Parameters:
        dtype: Of the tensors.

    Args:
        o: Tensors.
        g: Sizes of the convolution.
    """
    var rows = unsafe_stack_allocation[
        DEPTH * PITCH, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var columns = unsafe_stack_allocation[
        DEPTH * PITCH, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var t = Int(thread_idx.x)
    var tiles = ceildiv(g.group_f(), TILE)
    var group, tile = divmod(Int(block_idx.y), tiles)
    var f0 = tile * TILE
    var j0 = Int(block_idx.x) * TILE
    var part = Part(g.pixels())
    # What this thread loads: four numbers side by side of one pixel of a stage, of dy and of x.
    var pixel, place = divmod(t, TILE // 4)
    place *= 4
    var filters = g.group_f() - f0 - place
    var gradient = o.dy.unsafe_offset(group * g.group_f() + f0 + place)
    var taps = Array[_Tap, 4](uninitialized=True)
    comptime for i in range(4):
        taps[i] = _Tap(g, group, j0 + place + i)
    # What it computes: four filters x four columns.
    var row, column = divmod(t, TILE // 4)
    var sums = Array[SIMD[F32, 4], 4](fill=0)
    for first in range(part.first, part.end, DEPTH):
        var m = first + pixel
        var a = SIMD[F32, 4](0)
        var b = SIMD[F32, 4](0)
        if m < part.end:
            var line, q = divmod(m, g.q)
            var n, p = divmod(line, g.p)
            comptime for i in range(4):
                if i < filters:
                    a[i] = widened(gradient[unsafe_offset=m * g.f + i])
                b[i] = taps[i].load(g, o.x, n, p, q)
        barrier()
        rows.unsafe_store[alignment=16](pixel * PITCH + place, a)
        columns.unsafe_store[alignment=16](pixel * PITCH + place, b)
        barrier()
        comptime for k in range(DEPTH):
            var left = rows.unsafe_load[width=4, alignment=16](k * PITCH + 4 * row)
            var right = columns.unsafe_load[width=4, alignment=16](k * PITCH + 4 * column)
            comptime for i in range(4):
                sums[i] = SIMD[F32, 4](left[i]).fma(right, sums[i])
    var to = o.room.unsafe_offset(part.number * g.f * g.depth())
    comptime for i in range(4):
        var f = f0 + 4 * row + i
        if f < g.group_f():
            comptime for j in range(4):
                var at = j0 + 4 * column + j
                if at < g.depth():
                    to[unsafe_offset=(group * g.group_f() + f) * g.depth() + at] = sums[i][j]


struct Part(TrivialRegisterPassable):
    """The block's part of the pixels, or of something else; the grid's z numbers them."""

    var number: Int
    """Which."""
    var first: Int
    """The first pixel."""
    var end: Int
    """One beyond the last."""

    @always_inline
    def __init__(out self, count: Int):
        """Divides as evenly as it goes.

        Args:
            count: Of all pixels.
        """
        self.number = Int(block_idx.z)
        var parts = Int(grid_dim.z)
        self.first = count * self.number // parts
        self.end = count * (self.number + 1) // parts


struct _Tap(TrivialRegisterPassable):
    """What a column of dw sees of a pixel: a tap of the window, and a channel."""

    var h: Int
    """Rows from the first pixel to what the tap sees of it; negative in the padding."""
    var w: Int
    """Columns."""
    var c: Int
    """The channel; negative if there is no such column."""

    @always_inline
    def __init__(out self, g: Geometry, group: Int, column: Int):
        var tap, c = divmod(column, g.group_c())
        var r, s = divmod(tap, g.s)
        self.h = r * g.dilation_h - g.pad_h
        self.w = s * g.dilation_w - g.pad_w
        self.c = group * g.group_c() + c if column < g.depth() else -1

    @always_inline
    def load[dtype: DType](self, g: Geometry, x: Data[dtype], n: Int, p: Int, q: Int) -> Float32:
        """Loads the number that a pixel meets."""
        var h = p * g.stride_h + self.h
        var w = q * g.stride_w + self.w
        if self.c < 0 or h < 0 or h >= g.h or w < 0 or w >= g.w:
            return 0
        return widened(x[unsafe_offset=((n * g.h + h) * g.w + w) * g.c + self.c])


def enqueue_depthwise[
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
    var taps = g.r * g.s
    var blocks = ceildiv(g.c, CHANNELS) * taps
    var wanted = ceildiv(8 * Device(ctx).multiprocessors, blocks)
    var parts = max(1, min(min(wanted, most), ceildiv(g.pixels(), LEAST)))
    ctx.enqueue_function[depthwise_kernel[dtype]](
        o, g, grid_dim=(ceildiv(g.c, CHANNELS), taps, parts), block_dim=THREADS
    )
    add_parts(o, g.c * taps, parts, ctx)


@__name(t"conv2d_weight_grad_depthwise_{dtype}")
def depthwise_kernel[dtype: DType](o: WeightGrad[dtype], g: Geometry):
    """Sums a part of the pixels for a tap of 32 channels, into the room.

    Parameters:
        dtype: Of the tensors.

    Args:
        o: Tensors.
        g: Sizes of the convolution.
    """
    var left = unsafe_stack_allocation[THREADS, Float32, address_space=AddressSpace.SHARED]()
    var warp, lane = divmod(Int(thread_idx.x), CHANNELS)
    var c = Int(block_idx.x) * CHANNELS + lane
    var number = Int(block_idx.y)
    var part = Part(g.pixels())
    var sum = Float32(0)
    if c < g.c:
        var tap = _Tap(g, c, number)  # of a group of one channel
        for m in range(part.first + warp, part.end, WARPS):
            var line, q = divmod(m, g.q)
            var n, p = divmod(line, g.p)
            sum += widened(o.dy[unsafe_offset=m * g.c + c]) * tap.load(g, o.x, n, p, q)
    left[unsafe_offset=Int(thread_idx.x)] = sum
    barrier()
    if warp == 0 and c < g.c:
        for other in range(1, WARPS):
            sum += left[unsafe_offset=other * CHANNELS + lane]
        var taps = g.r * g.s
        o.room[unsafe_offset=(part.number * g.c + c) * taps + number] = sum


def add_parts[
    dtype: DType, //
](o: WeightGrad[dtype], size: Int, parts: Int, ctx: DeviceContext) raises:
    """Enqueues the sum of the parts, rounded into dw.

    Parameters:
        dtype: Of dw.

    Args:
        o: Tensors; the room has the parts.
        size: Numbers of dw.
        parts: How many there are.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime for width in [4, 1]:
        if width == 1 or size % 4 == 0:
            launch[add_parts_kernel[dtype, width]](
                ctx,
                o,
                Int64(size),
                Int32(parts),
                grid_dim=ceildiv(size // width, THREADS),
                block_dim=THREADS,
            )
            return


@__name(t"conv2d_weight_grad_add_{width}_{dtype}")
def add_parts_kernel[dtype: DType, width: Int](o: WeightGrad[dtype], size: Int64, parts: Int32):
    """Adds up the parts of a few numbers in each thread.

    Parameters:
        dtype: Of dw.
        width: Numbers of a thread.

    Args:
        o: Tensors.
        size: Numbers of dw.
        parts: How many parts there are.
    """
    var at = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) * width
    wait_on_dependent_grids()
    launch_dependent_grids()
    if at < Int(size):
        var sum = SIMD[F32, width](0)
        var source = o.room.unsafe_offset(at)
        for part in range(parts):
            sum += source.unsafe_load[width=width, alignment=4 * width](Int(part) * Int(size))
        o.dw.unsafe_store(at, narrowed[dtype](sum))
