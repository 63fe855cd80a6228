"""The gradient of a convolution's filters on a GPU: dw[f, j] = sum_m dy[m, f] x[row(m, j)].

A GEMM of F filters by R S C columns j = (r, s, c) whose K are the pixels m. There are many more pixels
than results, so they are divided into parts too, whose float32 sums a second kernel adds up in their
order and rounds: the result does not depend on how blocks run. hopper.mojo multiplies 16-bit numbers
by wgmma, mma.mojo by mma.sync what that does not take, and float32 as TF32; depthwise.mojo has filters
of one channel; for all else there is the kernel of this file.

That kernel: a block of 256 threads computes 64 filters x 64 columns of a part, each thread 4 x 4, from
16 pixels at a time in shared memory. CUDA cores and float32 throughout, whatever the dtype of the
tensors, so it runs on every GPU. Bound by the FMA units.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from ..device import Device
from ..geometry import Geometry
from ..hopper.conv import takes
from ..operands import F32, widened
from ..target import HAS_MMA, IS_HOPPER
from .depthwise import weight_grad_depthwise
from .hopper import weight_grad_hopper
from .mma import weight_grad_mma
from .parts import Part, Place, Tap, add_parts
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


def conv2d_weight_grad_gpu[
    dtype: DType, //, tf32: Bool, depthwise: Bool = False
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Enqueues the gradient.

    Parameters:
        dtype: Of the tensors.
        tf32: Whether float32 may be rounded to TF32 for the products.
        depthwise: Whether each filter is of one channel, and each channel has one.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
        most: Parts of the pixels for which there is room.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    comptime if depthwise:
        weight_grad_depthwise(g, o, most, ctx)
        return
    comptime if IS_HOPPER and dtype.is_half_float():
        if takes[dtype](g) and g.pixels() > 0:
            weight_grad_hopper(g, o, most, ctx)
            return
    comptime if HAS_MMA and (tf32 or dtype.is_half_float()):
        weight_grad_mma(g, o, most, ctx)
    else:
        weight_grad_portable(g, o, most, ctx)


def weight_grad_portable[
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
    var taps = Array[Tap, 4](uninitialized=True)
    comptime for i in range(4):
        taps[i] = Tap(g, group, j0 + place + i)
    # What it computes: four filters x four columns.
    var row, column = divmod(t, TILE // 4)
    var sums = Array[SIMD[F32, 4], 4](fill=0)
    for first in range(part.first, part.end, DEPTH):
        var m = first + pixel
        var a = SIMD[F32, 4](0)
        var b = SIMD[F32, 4](0)
        if m < part.end:
            var at = Place(g, m)
            comptime for i in range(4):
                if i < filters:
                    a[i] = widened(gradient[unsafe_offset=m * g.f + i])
                b[i] = widened(taps[i].load[1](g, o.x, at))
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
