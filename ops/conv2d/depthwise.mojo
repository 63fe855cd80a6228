"""Depthwise convolution on a GPU: y[n, p, q, c] = act(bias[c] + sum_rs x[n, h, w, c] w[r, s, c]).

With h = p * stride - pad + r and w = q * stride - pad + s; x[N, H, W, C], w[R, S, C], y[N, P, Q, C].
A filter that is computed is read as it lies, w[C, R, S], through shared memory (depthwise_lanes.mojo).
A thread computes a few channels of neighbouring pixels of a row. It walks along each row of the
window once, so a number of x that several of its pixels share is read once, and a row's weights,
widened to float32, serve all of them. Neighbouring threads have neighbouring channels: a warp reads
and writes whole lines of memory. For windows of 3 x 3 and 5 x 5 with stride 1 or 2, and of 7 x 7
with stride 1, which are unrolled; a simpler kernel takes all others, and channels that are no
multiple of 4. Bound by memory for 3 x 3, by the issue of instructions for 7 x 7, and by latency at
batch 1.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.collections import OptionalReg
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..depthwise_lanes import PITCH, Lane, lane_blocks, takes_unrolled
from ..device import Device
from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..launch import launch
from ..operands import F32, Operands, Shared, widened

comptime THREADS = 256
"""Threads of a block of the simple kernel."""
comptime BLOCK = 128
"""Threads of a block of the other: few, so that small images have blocks for all multiprocessors."""
comptime WIDE = 4
"""Channels of a thread of it."""
comptime NARROW = 2
"""Channels where threads are so few that a 7 x 7 window's latency counts (H200, 2026-11-23: 5 us, 8 if wide)."""


def run(stride: Int) -> Int:
    """Gives how many neighbouring pixels a thread computes.

    Args:
        stride: Of the window.

    Returns:
        7 with stride 1, which divides the rows of images of 224 pixels at every stage; else 4.
    """
    return 7 if stride == 1 else 4


def resident[dtype: DType](stride: Int) -> Int:
    """Gives how many blocks a multiprocessor shall hold, which bounds the registers.

    It has to be said: otherwise ptxas has the loads of a row take turns in the same registers, each
    waiting for the one before it.

    Parameters:
        dtype: Of x.

    Args:
        stride: Of the window.

    Returns:
        The blocks; fewer with float32, whose loads are wider.
    """
    return (4 if stride == 1 else 5) - Int(dtype == F32)


comptime NAME[lies: Bool] = "depthwise_lying" if lies else "depthwise"
"""What begins the kernels' names.

Parameters:
    lies: Whether filters lie as training has them.
"""


def enqueue_depthwise[
    dtype: DType, epilogue: Epilogue, lies: Bool = False
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues a depthwise convolution.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the sums go through.
        lies: Whether the filter lies as training has it.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[R, S, C], or w[C, R, S] if it lies so.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    if takes_unrolled(g) and g.c % WIDE == 0:
        comptime for kernel in [3, 5, 7]:
            comptime for stride in [1, 2]:
                comptime if kernel < 7 or stride == 1:
                    if g.r == kernel and g.stride_h == stride:
                        comptime if kernel == 7 and not lies:
                            if _threads[stride, WIDE](g) < 2 * BLOCK * Device(ctx).multiprocessors:
                                _enqueue_run[dtype, epilogue, lies, kernel, stride, NARROW](
                                    g, o, ctx
                                )
                                return
                        _enqueue_run[dtype, epilogue, lies, kernel, stride, WIDE](g, o, ctx)
                        return
    if g.c % 4 == 0:
        _enqueue_simple[dtype, epilogue, lies, 4](g, o, ctx)
    else:
        _enqueue_simple[dtype, epilogue, lies, 1](g, o, ctx)


def _threads[stride: Int, wide: Int](g: Geometry) -> Int:
    return g.n * g.p * ceildiv(g.q, run(stride)) * (g.c // wide)


def _enqueue_run[
    dtype: DType, epilogue: Epilogue, lies: Bool, kernel: Int, stride: Int, wide: Int
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    var blocks = ceildiv(_threads[stride, wide](g), BLOCK)
    comptime if lies:
        blocks = lane_blocks[dtype, wide, BLOCK](
            channels=g.c, pieces=g.n * g.p * ceildiv(g.q, run(stride))
        )
    launch[depthwise_run_kernel[dtype, epilogue, lies, kernel, stride, wide]](
        ctx,
        o,
        g,
        grid_dim=blocks,
        block_dim=BLOCK,
    )


@__name(t"{NAME[lies]}_{kernel}x{kernel}_{stride}x{wide}_{epilogue.label()}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK)),
    `nvvm.minctasm`=SIMDLength(resident[dtype](stride)),
)
def depthwise_run_kernel[
    dtype: DType, epilogue: Epilogue, lies: Bool, kernel: Int, stride: Int, wide: Int
](o: Operands[dtype], g: Geometry):
    """Computes y[n, p, q : q + run(stride), c : c + wide] in each thread.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the sums go through.
        lies: Whether the filter lies as training has it.
        kernel: R and S.
        stride: Down and across.
        wide: Channels of a thread.

    Args:
        o: Tensors; the filter is w[R, S, C], or w[C, R, S] if it lies so.
        g: Sizes; `wide` divides C.
    """
    comptime RUN = run(stride)
    comptime COLUMNS = (RUN - 1) * stride + kernel
    comptime ALIGN = wide * size_of[dtype]()
    var vectors = UInt32(g.c // wide)
    var runs = UInt32(ceildiv(g.q, RUN))
    var index = UInt32(block_idx.x) * UInt32(BLOCK) + UInt32(thread_idx.x)
    var strip = index // vectors
    var c = Int32(index - strip * vectors) * Int32(wide)
    var filters = OptionalReg[Shared[dtype]](None)
    comptime if lies:
        var lane = Lane[dtype, wide, BLOCK](Int32(g.c))
        strip, c = lane.piece, lane.c
        wait_on_dependent_grids()
        launch_dependent_grids()
        filters = lane.filters[kernel * kernel](o.w)
        if lane.idle:
            return
    var row = strip // runs
    var q = Int32(strip - row * runs) * Int32(RUN)
    var n = row // UInt32(g.p)
    var p = Int32(row - n * UInt32(g.p))
    if Int(n) >= g.n:
        return
    var bias = o.bias.unsafe_load[width=wide, alignment=wide * size_of[F32]()](c)
    var sums = Array[SIMD[F32, wide], RUN](fill=bias)
    var channels = Int32(g.c)
    var pitch = Int32(g.w) * channels
    var h0 = p * Int32(stride) - Int32(g.pad_h)
    var w0 = q * Int32(stride) - Int32(g.pad_w)
    # What lies left or right of the image is read at its edge and dropped: no load waits for a branch.
    var inside = Array[Bool, COLUMNS](uninitialized=True)
    var columns = Array[Int32, COLUMNS](uninitialized=True)
    comptime for column in range(COLUMNS):
        var w = w0 + Int32(column)
        inside[column] = w >= 0 and w < Int32(g.w)
        columns[column] = w * channels if inside[column] else 0
    var image = o.x.unsafe_offset(Int(n) * g.h * g.w * g.c + Int(c))
    comptime if not lies:
        wait_on_dependent_grids()
        launch_dependent_grids()
    # Rows are not unrolled, or the loads of all of them would be held in registers at a time.
    for r in range(kernel):
        var h = h0 + Int32(r)
        if h < 0 or h >= Int32(g.h):
            continue
        var taps = o.w.unsafe_offset(Int32(r * kernel) * channels + c)
        var line = image.unsafe_offset(h * pitch)
        var weights = Array[SIMD[F32, wide], kernel](uninitialized=True)
        comptime for s in range(kernel):
            comptime if lies:
                weights[s] = widened(
                    filters.value().unsafe_load[width=wide, alignment=ALIGN](
                        (r * kernel + s) * PITCH[dtype, wide]
                    )
                )
            else:
                weights[s] = widened(
                    taps.unsafe_load[width=wide, alignment=ALIGN](Int32(s) * channels)
                )
        var loaded = Array[SIMD[dtype, wide], COLUMNS](uninitialized=True)
        comptime for column in range(COLUMNS):
            loaded[column] = line.unsafe_load[width=wide, alignment=ALIGN](columns[column])
        comptime for column in range(COLUMNS):
            var value = widened(loaded[column] if inside[column] else SIMD[dtype, wide](0))
            comptime for i in range(RUN):
                comptime s = column - i * stride
                comptime if 0 <= s and s < kernel:
                    sums[i] = value.fma(weights[s], sums[i])
    var output = Output[epilogue](o)
    comptime for i in range(RUN):
        if Int(q) + i < g.q:
            output.store(sums[i], (Int(row) * g.q + Int(q) + i) * g.c + Int(c))


def _enqueue_simple[
    dtype: DType, epilogue: Epilogue, lies: Bool, width: Int
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    ctx.enqueue_function[depthwise_kernel[dtype, epilogue, lies, width]](
        o,
        g,
        grid_dim=ceildiv(g.pixels() * g.c // width, THREADS),
        block_dim=THREADS,
    )


@__name(t"{NAME[lies]}_{width}_{epilogue.label()}_{dtype}")
def depthwise_kernel[
    dtype: DType, epilogue: Epilogue, lies: Bool, width: Int
](o: Operands[dtype], g: Geometry):
    """Computes y[n, p, q, c : c + width] in each thread.

    Parameters:
        dtype: Of x, the filter and y.
        epilogue: What the accumulator goes through.
        lies: Whether the filter lies as training has it.
        width: Channels of a thread; divides C.

    Args:
        o: Tensors; the filter is w[R, S, C], or w[C, R, S] if it lies so.
        g: Sizes.
    """
    comptime align = width * size_of[dtype]()
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var pixel = index // (g.c // width)
    var c = (index - pixel * (g.c // width)) * width
    if pixel >= g.pixels():
        return
    var row = pixel // g.q
    var q = pixel - row * g.q
    var n = row // g.p
    var p = row - n * g.p
    var acc = o.bias.unsafe_load[width=width](c)
    for r in range(g.r):
        var h = p * g.stride_h - g.pad_h + r * g.dilation_h
        if h < 0 or h >= g.h:
            continue
        for s in range(g.s):
            var w = q * g.stride_w - g.pad_w + s * g.dilation_w
            if w < 0 or w >= g.w:
                continue
            var at = ((n * g.h + h) * g.w + w) * g.c + c
            var value = o.x.unsafe_load[width=width, alignment=align](at).cast[F32]()
            var tap = SIMD[dtype, width](0)
            comptime if lies:
                comptime for i in range(width):
                    tap[i] = o.w[unsafe_offset=((c + i) * g.r + r) * g.s + s]
            else:
                tap = o.w.unsafe_load[width=width, alignment=align]((r * g.s + s) * g.c + c)
            acc = value.fma(tap.cast[F32](), acc)
    Output[epilogue](o).store(acc, pixel * g.c + c)
