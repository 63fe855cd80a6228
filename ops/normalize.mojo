"""Pixels to activations: y[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c].

x holds levels 0 to 255 (uint8), or anything else that the caller has normalised otherwise; mean and
scale are in levels. Three channels fill no vector, so a CPU repeats mean and scale until they fill
C of them, and goes over an image as one long row. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import simd_width_of

from .operands import F32, Data, data, narrowed
from .parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""


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
            y: Result [N, H, W, C].
            x: Levels [N, H, W, C].
            mean: [C], in levels.
            scale: [C], one over the deviation in levels.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var means = data(mean)
        var scales = data(scale)
        comptime if target == "cpu":
            _over_rows(data(y), data(x), means, scales, y.size(), y.shape()[3])
            return

        def body[width: Int](at: Coord[...]) {var x, var means, var scales} -> SIMD[y.dtype, width]:
            var c = Int(at[3].value())
            var level = x.load[width](at).cast[F32]()
            var value = level - means.unsafe_load[width=width](c)
            return narrowed[y.dtype](value * scales.unsafe_load[width=width](c))

        foreach[target=target](body, y, ctx)


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
