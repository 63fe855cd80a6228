"""The gradient of a depthwise convolution's input on a GPU: dx[n, h, w, c] = sum_rs dy[n, p, q, c] filter[c, r, s].

Over the taps for which there is a pixel p * stride = h + pad - r * dilation of dy, and q likewise;
dx[N, H, W, C], dy[N, P, Q, C]. The filter is read as training has it, [C, R, S].

A thread computes 16 bytes of channels of a patch of dx: RUN pixels of as many neighbouring rows as the
stride has. Rows begin where the stride divides h + pad, so what a patch sees of dy are whole rows of
taps: each number is loaded once, and serves all pixels and taps that meet it. The filters of a block's
channels are copied to shared memory, tap by tap. Neighbouring threads have neighbouring channels, whole
lines of memory, and the threads behind them the patches below, which see some of the same rows: L1
serves these. For windows of 3 x 3, 5 x 5 and 7 x 7 with a stride of 1 or 2, whose rows of taps are
unrolled; a simpler kernel takes all others, and channels that are no multiple of 16 bytes. Bound by memory
for 3 x 3, by the issue of instructions for larger windows. Sums are float32, rounded once.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .depthwise_lanes import PITCH, Lane, lane_blocks, takes_unrolled
from .geometry import Geometry
from .launch import launch
from .operands import ALIGN, F32, Data, data, narrowed, widened

comptime THREADS = 128
"""Threads of a block."""
comptime RUN = 4
"""Neighbouring pixels of a row that a thread computes; the strides that are unrolled divide it."""
comptime NARROW = 4
"""Channels of a thread of the simple kernel."""


def resident(kernel: Int, stride: Int) -> Int:
    """Gives how many blocks a multiprocessor shall hold, which bounds the registers.

    Args:
        kernel: R and S.
        stride: Down and across.

    Returns:
        The blocks; fewer where a thread has more of dy, or of dx, at a time.
    """
    return 4 if kernel * stride <= 6 else 3


def depthwise_input_grad_gpu[
    dtype: DType, //
](dx: Data[dtype], dy: Data[dtype], filter: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    """Enqueues the gradient.

    Parameters:
        dtype: Of the tensors.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the convolution's result [N, P, Q, C].
        filter: [C, R, S].
        g: Sizes of the convolution.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime WIDTH = 16 // size_of[dtype]()
    if takes_unrolled(g) and g.c % WIDTH == 0:
        comptime for kernel in [3, 5, 7]:
            comptime for stride in [1, 2]:
                if g.r == kernel and g.stride_h == stride:
                    _enqueue_patches[kernel, stride](dx, dy, filter, g, ctx)
                    return
    if g.c % NARROW == 0:
        _enqueue_pixels[NARROW](dx, dy, filter, g, ctx)
    else:
        _enqueue_pixels[1](dx, dy, filter, g, ctx)


@always_inline
def _patches[stride: Int](g: Geometry) -> Tuple[Int, Int]:
    """Counts the patches down and across an image."""
    return (ceildiv(g.pad_h % stride + g.h, stride), ceildiv(g.pad_w % stride + g.w, RUN))


def _enqueue_patches[
    dtype: DType, //, kernel: Int, stride: Int
](dx: Data[dtype], dy: Data[dtype], filter: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    comptime WIDTH = 16 // size_of[dtype]()
    var rows, runs = _patches[stride](g)
    launch[patch_kernel[dtype, kernel, stride]](
        ctx,
        dx,
        dy,
        filter,
        g,
        grid_dim=lane_blocks[dtype, WIDTH, THREADS](channels=g.c, pieces=g.n * rows * runs),
        block_dim=THREADS,
    )


@__name(t"depthwise_input_grad_{kernel}x{kernel}_{stride}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(resident(kernel, stride)),
)
def patch_kernel[
    dtype: DType, kernel: Int, stride: Int
](dx: Data[dtype], dy: Data[dtype], filter: Data[dtype], g: Geometry):
    """Computes 16 bytes of channels of `stride` x `RUN` pixels in each thread.

    Parameters:
        dtype: Of the tensors.
        kernel: R and S.
        stride: Down and across.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the convolution's result [N, P, Q, C].
        filter: [C, R, S].
        g: Sizes of the convolution; C is a multiple of 16 bytes.
    """
    comptime WIDTH = 16 // size_of[dtype]()
    comptime ALIGNED = ALIGN[dtype, WIDTH]
    comptime BEFORE = (kernel - 1) // stride
    comptime COLUMNS = BEFORE + ceildiv(RUN, stride)
    # Neighbours take patches one below the other.
    var lane = Lane[dtype, WIDTH, THREADS](Int32(g.c))
    var rows, runs = _patches[stride](g)
    var strip, y = divmod(lane.piece, UInt32(rows))
    var n, x = divmod(strip, UInt32(runs))
    var p0 = Int32(g.pad_h // stride) + Int32(y)
    var q0 = Int32(g.pad_w // stride) + Int32(x) * Int32(RUN // stride)
    wait_on_dependent_grids()
    launch_dependent_grids()
    var taps = lane.filters[kernel * kernel](filter)
    if lane.idle or n >= UInt32(g.n):
        return
    var channels = Int32(g.c)
    # What lies left or right of dy is read at its edge and dropped: no load waits for a branch.
    var inside = Array[Bool, COLUMNS](uninitialized=True)
    var places = Array[Int32, COLUMNS](uninitialized=True)
    comptime for column in range(COLUMNS):
        var q = q0 + Int32(column - BEFORE)
        inside[column] = q >= 0 and q < Int32(g.q)
        places[column] = q * channels if inside[column] else 0
    var image = dy.unsafe_offset(Int(n) * g.p * g.q * g.c + Int(lane.c))
    var sums = Array[SIMD[F32, WIDTH], stride * RUN](fill=0)
    for k in range(ceildiv(kernel, stride)):
        var p = p0 - Int32(k)
        if p < 0 or p >= Int32(g.p):
            continue
        var line = image.unsafe_offset(p * Int32(g.q) * channels)
        var loaded = Array[SIMD[dtype, WIDTH], COLUMNS](uninitialized=True)
        comptime for column in range(COLUMNS):
            loaded[column] = line.unsafe_load[width=WIDTH, alignment=ALIGNED](places[column])
        var values = Array[SIMD[F32, WIDTH], COLUMNS](uninitialized=True)
        comptime for column in range(COLUMNS):
            values[column] = widened(loaded[column] if inside[column] else SIMD[dtype, WIDTH](0))
        comptime for row in range(stride):
            var r = k * stride + row
            if row == 0 or r < kernel:
                comptime for s in range(kernel):
                    var weights = widened(
                        taps.unsafe_load[width=WIDTH, alignment=ALIGNED](
                            (r * kernel + s) * PITCH[dtype, WIDTH]
                        )
                    )
                    comptime for i in range(RUN):
                        comptime if (i - s) % stride == 0:
                            comptime column = BEFORE + (i - s) // stride
                            sums[row * RUN + i] = values[column].fma(weights, sums[row * RUN + i])
    var h0 = p0 * Int32(stride) - Int32(g.pad_h)
    var w0 = q0 * Int32(stride) - Int32(g.pad_w)
    var to = dx.unsafe_offset(Int(n) * g.h * g.w * g.c + Int(lane.c))
    comptime for row in range(stride):
        var h = h0 + Int32(row)
        comptime for i in range(RUN):
            var w = w0 + Int32(i)
            if UInt32(h) < UInt32(g.h) and UInt32(w) < UInt32(g.w):
                to.unsafe_store[alignment=ALIGNED](
                    (h * Int32(g.w) + w) * channels, narrowed[dtype](sums[row * RUN + i])
                )


def _enqueue_pixels[
    dtype: DType, //, width: Int
](dx: Data[dtype], dy: Data[dtype], filter: Data[dtype], g: Geometry, ctx: DeviceContext) raises:
    launch[pixel_kernel[dtype, width]](
        ctx,
        dx,
        dy,
        filter,
        g,
        grid_dim=ceildiv(g.n * g.h * g.w * (g.c // width), THREADS),
        block_dim=THREADS,
    )


@always_inline
def _seen(place: Int, stride: Int, count: Int) -> Int:
    """Finds the pixel of dy that meets a tap.

    Args:
        place: h + pad - r * dilation, or as much across.
        stride: From one window to the next, px.
        count: P or Q.

    Returns:
        The pixel; -1 if there is none.
    """
    var at = place // stride
    return at if 0 <= place and at * stride == place and at < count else -1


@__name(t"depthwise_input_grad_{width}_{dtype}")
def pixel_kernel[
    dtype: DType, width: Int
](dx: Data[dtype], dy: Data[dtype], filter: Data[dtype], g: Geometry):
    """Computes dx[n, h, w, c : c + width] in each thread.

    Parameters:
        dtype: Of the tensors.
        width: Channels of a thread; divides C.

    Args:
        dx: Result [N, H, W, C].
        dy: The gradient of the convolution's result [N, P, Q, C].
        filter: [C, R, S].
        g: Sizes of the convolution.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    comptime ALIGNED = ALIGN[dtype, width]
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var pixel, vector = divmod(index, g.c // width)
    var row, w = divmod(pixel, g.w)
    var n, h = divmod(row, g.h)
    if n >= g.n:
        return
    var c = vector * width
    var filters = filter.unsafe_offset(c * g.r * g.s)
    var sum = SIMD[F32, width](0)
    for r in range(g.r):
        var p = _seen(h + g.pad_h - r * g.dilation_h, g.stride_h, g.p)
        if p < 0:
            continue
        for s in range(g.s):
            var q = _seen(w + g.pad_w - s * g.dilation_w, g.stride_w, g.q)
            if q < 0:
                continue
            var weights = SIMD[dtype, width](0)
            comptime for i in range(width):
                weights[i] = filters[unsafe_offset=(i * g.r + r) * g.s + s]
            var value = dy.unsafe_load[width=width, alignment=ALIGNED](
                ((n * g.p + p) * g.q + q) * g.c + c
            )
            sum = widened(value).fma(widened(weights), sum)
    dx.unsafe_store[alignment=ALIGNED](pixel * g.c + c, narrowed[dtype](sum))


@register("depthwise_input_grad")
struct DepthwiseInputGrad:
    """Computes the gradient of what a depthwise convolution convolved."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        dx: OutputTensor[rank=4, ...],
        dy: InputTensor[dtype=dx.dtype, rank=4, ...],
        filter: InputTensor[dtype=dx.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".

        Args:
            dx: Result [N, H, W, C].
            dy: The gradient of the convolution's result [N, P, Q, C].
            filter: [C, 1, R, S] or [C, R, S, 1], which lie alike.
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The GPU.

        Raises:
            If the launch fails.
        """
        comptime assert target == "gpu", "depthwise_input_grad: only GPUs have a kernel"
        var g = Geometry(dx.shape(), dy.shape(), data(window))
        if g.n * g.h * g.w * g.c > 0:
            depthwise_input_grad_gpu(data(dx), data(dy), data(filter), g, ctx)
