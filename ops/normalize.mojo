"""Pixels to activations: y[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c].

x holds levels 0 to 255 (uint8), or anything else that the caller has normalised otherwise; mean and
scale are in levels. Three channels fill no vector, so images are one long row: a CPU repeats mean
and scale until they fill C vectors, and a thread of a GPU takes 16 numbers and looks each one's mean
and scale up. Bound by memory.

On a CPU y may be uint8, rounded to nearest even and saturated, with more channels than x: the others
are 0. So the first convolution of a quantised network reads four channels (gemm/cpu.mojo).
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import simd_width_of

from .dot import U8
from .launch import launch
from .operands import F32, Data, data, narrowed
from .parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a CPU's vector."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime SHARE = 16
"""Numbers of a thread."""


@register("normalize")
struct Normalize:
    """Normalises images x[N, H, W, C] channel by channel, in float32."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[rank=4, ...],
        mean: InputTensor[dtype=F32, rank=1, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, H, W, C]; in uint8 it may have more channels.
            x: Levels [N, H, W, C].
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime if target == "cpu" and y.dtype == U8:
            var pixels = y.size() // max(y.shape()[3], 1)
            _to_bytes(
                rebind[Data[U8]](data(y)),
                data(x),
                data(mean),
                data(scale),
                pixels,
                x.shape()[3],
                y.shape()[3],
            )
        elif target == "cpu":
            _over_rows(data(y), data(x), data(mean), data(scale), y.size(), y.shape()[3])
        else:
            if y.size() > 0:
                normalize_gpu(
                    data(y), data(x), data(mean), data(scale), y.size(), y.shape()[3], ctx
                )


# GPU


@__name(t"normalize_{source}_{dtype}")
def normalize_kernel[
    dtype: DType, source: DType
](
    y: Data[dtype],
    x: Data[source],
    mean: Data[F32],
    scale: Data[F32],
    size: Int64,
    channels: UInt32,
):
    """Normalises `SHARE` numbers in each thread.

    Parameters:
        dtype: Of the result.
        source: Of the levels.

    Args:
        y: The result.
        x: The levels.
        mean: Of each channel.
        scale: Of each channel.
        size: Numbers in all.
        channels: C.
    """
    launch_dependent_grids()
    var at = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) * SHARE
    if at >= Int(size):
        return
    var c = UInt32(at % Int(channels))
    var means = SIMD[F32, SHARE]()
    var scales = SIMD[F32, SHARE]()
    comptime for i in range(SHARE):
        means[i] = mean[unsafe_offset=Int(c)]
        scales[i] = scale[unsafe_offset=Int(c)]
        c = UInt32(0) if c + 1 == channels else c + 1
    wait_on_dependent_grids()
    if at + SHARE <= Int(size) and Int(x) % 16 == 0:  # a caller may give part of a buffer
        var levels = x.unsafe_load[width=SHARE, alignment=16](at).cast[F32]()
        y.unsafe_store[alignment=16](at, narrowed[dtype]((levels - means) * scales))
    else:
        comptime for i in range(SHARE):
            if at + i < Int(size):
                var level = x[unsafe_offset=at + i].cast[F32]()
                y[unsafe_offset=at + i] = narrowed[dtype]((level - means[i]) * scales[i])


def normalize_gpu[
    dtype: DType, source: DType
](
    y: Data[dtype],
    x: Data[source],
    mean: Data[F32],
    scale: Data[F32],
    size: Int,
    channels: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the op.

    Parameters:
        dtype: Of the result.
        source: Of the levels.

    Args:
        y: The result.
        x: The levels.
        mean: Of each channel.
        scale: Of each channel.
        size: Numbers in all.
        channels: C.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[normalize_kernel[dtype, source]](
        ctx,
        y,
        x,
        mean,
        scale,
        Int64(size),
        UInt32(channels),
        grid_dim=ceildiv(size, SHARE * THREADS),
        block_dim=THREADS,
    )


# CPU


def _over_rows[
    dtype: DType, source: DType
](y: Data[dtype], x: Data[source], mean: Data[F32], scale: Data[F32], size: Int, channels: Int,):
    """Normalises `size` numbers on all cores."""
    if size == 0:
        return
    var period = channels * WIDTH
    var memory = alloc(Layout[Float32](count=2 * period))
    var means = rebind[Data[F32]](memory.unsafe_ptr())
    var scales = means.unsafe_offset(period)
    for i in range(period):
        means[unsafe_offset=i] = mean[unsafe_offset=i % channels]
        scales[unsafe_offset=i] = scale[unsafe_offset=i % channels]
    var block = ceildiv(ceildiv(size, 4 * parallelism_level(None)), period) * period

    @always_inline
    def part[width: Int](at: Int, phase: Int) {imm}:
        var level = x.unsafe_load[width=width](at).cast[F32]()
        var value = level - means.unsafe_load[width=width](phase)
        y.unsafe_store(at, narrowed[dtype](value * scales.unsafe_load[width=width](phase)))

    def task(index: Int) {imm}:
        var end = min((index + 1) * block, size)
        var at = index * block
        while at + period <= end:
            for phase in range(0, period, WIDTH):
                part[WIDTH](at + phase, phase)
            at += period
        for phase in range(end - at):
            part[1](at + phase, phase)

    over_cores(task, ceildiv(size, block))
    dealloc(memory^)


def _to_bytes[
    source: DType
](
    y: Data[U8],
    x: Data[source],
    mean: Data[F32],
    scale: Data[F32],
    pixels: Int,
    channels: Int,
    room: Int,
):
    """Normalises `pixels` of `channels` numbers on all cores, into `room` of uint8 each."""
    if pixels == 0:
        return
    comptime PIXELS = 4
    comptime LANES = 4 * PIXELS
    var means, scales = SIMD[F32, LANES](0), SIMD[F32, LANES](0)
    var vectors = channels == 3 and room == 4
    if vectors:
        comptime for i in range(LANES):
            comptime if i % 4 < 3:
                means[i] = mean[unsafe_offset=i % 4]
                scales[i] = scale[unsafe_offset=i % 4]
    var block = ceildiv(ceildiv(pixels, 4 * parallelism_level(None)), PIXELS) * PIXELS

    def task(index: Int) {imm}:
        var end = min((index + 1) * block, pixels)
        var pixel = index * block
        # A load of 16 numbers has those of the pixel behind; the last ones have none.
        while vectors and pixel + PIXELS < end:
            var levels = x.unsafe_load[width=LANES](pixel * 3)
            var spread = levels.shuffle[0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0]()
            y.unsafe_store(pixel * 4, narrowed[U8]((spread.cast[F32]() - means) * scales))
            pixel += PIXELS
        while pixel < end:
            for c in range(room):
                var value = UInt8(0)
                if c < channels:
                    var level = x[unsafe_offset=pixel * channels + c].cast[F32]()
                    value = narrowed[U8]((level - mean[unsafe_offset=c]) * scale[unsafe_offset=c])
                y[unsafe_offset=pixel * room + c] = value
            pixel += 1

    over_cores(task, ceildiv(pixels, block))
