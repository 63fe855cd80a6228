"""Sums of each 32 columns of a row, and of their squares, for a norm that later products apply.

    moments[m, i] = sum_j x[m, 32 i + j], sum_j x[m, 32 i + j]^2,   j < 32

What `linear_moments` has with its result (hopper/moments.mojo), for tokens that come from elsewhere.
A thread reads 16 bytes. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv

from .hopper.moments import GROUP
from .launch import launch
from .operands import F32, Data, data, widened
from .rows import over_lanes

comptime THREADS = 256
"""Threads of a block."""
comptime WIDTH = 8
"""Numbers that a thread reads."""


@register("row_moments")
struct RowMoments:
    """Measures the rows of x[..., C], of 16 bits."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        moments: OutputTensor[dtype=F32, ...],
        x: InputTensor[dtype=dtype, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            dtype: Of x.

        Args:
            moments: [..., C / 32, 2].
            x: [..., C], C a multiple of 32.
            ctx: The device.

        Raises:
            If the launch fails.
        """
        comptime assert target != "cpu", "row_moments: a CPU runs a layer norm"
        comptime assert dtype.is_half_float(), "row_moments: rows are of 16 bits"
        if x.size() == 0:
            return
        row_moments_gpu(data(x), data(moments), x.size(), ctx)


def row_moments_gpu[
    dtype: DType
](x: Data[dtype], moments: Data[F32], size: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Of x.

    Args:
        x: Rows of a multiple of 32 numbers.
        moments: Of each 32.
        size: Numbers of x.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[row_moments_kernel[dtype]](
        ctx,
        x,
        moments,
        Int64(size // WIDTH),
        grid_dim=ceildiv(size // WIDTH, THREADS),
        block_dim=THREADS,
    )


@__name(t"row_moments_{dtype}")
def row_moments_kernel[dtype: DType](x: Data[dtype], moments: Data[F32], count: Int64):
    """Adds up 8 numbers a thread, and those of four threads.

    Parameters:
        dtype: Of x.

    Args:
        x: Rows of a multiple of 32 numbers.
        moments: Of each 32.
        count: Eighths of all numbers.
    """
    comptime LANES = GROUP // WIDTH
    var i = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    wait_on_dependent_grids()
    launch_dependent_grids()
    var v = SIMD[F32, WIDTH](0)
    if i < Int(count):
        v = widened(x.unsafe_load[width=WIDTH, alignment=16](i * WIDTH))
    var sum = over_lanes[LANES](v.reduce_add())
    var squares = over_lanes[LANES]((v * v).reduce_add())
    if i < Int(count) and i % LANES == 0:
        moments.unsafe_store[alignment=8](2 * (i // LANES), SIMD[F32, 2](sum, squares))
