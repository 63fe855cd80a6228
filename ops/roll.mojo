"""One or two axes turned around: y[i, j] = x[(i - shift) mod I, (j - shift) mod J], torch's roll.

What lies behind the last of them is a row, which is copied as it is. A CPU copies rows on all
cores. A GPU gives each thread 16 bytes of the result, or one number where rows are no multiple of
that. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of

from .kernel_argument import KernelArgument
from .launch import launch
from .operands import Data, data
from .parallel import over_cores

comptime THREADS = 256
"""Threads of a GPU's block."""
comptime PIECE = 16384
"""Numbers that are worth a task of their own on a CPU."""


struct RollSizes(KernelArgument, TrivialRegisterPassable):
    """A tensor as [..., first, between, second, row], of which two axes are turned around."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var first: UInt32
    """Size of the first axis; 1 if only one is turned around."""
    var first_shift: UInt32
    """How far; less than the size."""
    var between: UInt32
    """What lies between the axes."""
    var second: UInt32
    """Size of the second axis."""
    var second_shift: UInt32
    """How far; less than the size."""
    var row: UInt32
    """Numbers behind it."""

    def __init__(
        out self,
        row: Int,
        second: Int,
        second_shift: Int,
        between: Int = 1,
        first: Int = 1,
        first_shift: Int = 0,
    ):
        """Sets the sizes.

        Args:
            row: Numbers behind the second axis.
            second: Its size.
            second_shift: How far it is turned; of any sign.
            between: What lies between the axes.
            first: Size of the first axis.
            first_shift: How far it is turned; of any sign.
        """
        self.first, self.first_shift = UInt32(first), UInt32(first_shift % first)
        self.second, self.second_shift = UInt32(second), UInt32(second_shift % second)
        self.between, self.row = UInt32(between), UInt32(row)

    @always_inline
    def source(self, row: UInt32) -> UInt32:
        """Finds the row of x that a row of y is.

        Args:
            row: Of y.

        Returns:
            The number of a row of x.
        """
        var outer = row // self.second
        var second = _turned(row - outer * self.second, self.second_shift, self.second)
        var at = outer // self.between
        var between = outer - at * self.between
        var image = at // self.first
        var first = _turned(at - image * self.first, self.first_shift, self.first)
        return ((image * self.first + first) * self.between + between) * self.second + second


@always_inline
def _turned(index: UInt32, shift: UInt32, size: UInt32) -> UInt32:
    return index - shift if index >= shift else index + (size - shift)


def roll_cpu[dtype: DType](y: Data[dtype], x: Data[dtype], rows: Int, sizes: RollSizes):
    """Copies rows on all cores.

    Parameters:
        dtype: Of the tensors.

    Args:
        y: The result.
        x: What is turned around.
        rows: How many rows there are.
        sizes: The axes.
    """
    var length = Int(sizes.row)
    var share = max(ceildiv(PIECE, length), ceildiv(rows, 4 * parallelism_level(None)))

    def task(index: Int) {imm}:
        for row in range(index * share, min(index * share + share, rows)):
            var to = y.unsafe_offset(row * length)
            var from_ = x.unsafe_offset(Int(sizes.source(UInt32(row))) * length)
            unsafe_memcpy(dest=to, src=from_, count=length)

    over_cores(task, ceildiv(rows, share))


@__name(t"roll_{width}_{dtype}")
def roll_kernel[
    dtype: DType, width: Int
](y: Data[dtype], x: Data[dtype], sizes: RollSizes, vectors: UInt32, per_row: UInt32):
    """Copies `width` numbers in each thread.

    Parameters:
        dtype: Of the tensors.
        width: 16 bytes of numbers, or 1.

    Args:
        y: The result.
        x: What is turned around.
        sizes: The axes.
        vectors: What there is to copy.
        per_row: Vectors of a row.
    """
    comptime bytes = width * size_of[dtype]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var vector = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    if vector >= vectors:
        return
    var row = vector // per_row
    var column = vector - row * per_row
    var at = Int(sizes.source(row)) * Int(per_row) + Int(column)
    var value = x.unsafe_load[width=width, alignment=bytes](at * width)
    y.unsafe_store[alignment=bytes](Int(vector) * width, value)


def roll_gpu[
    dtype: DType
](y: Data[dtype], x: Data[dtype], rows: Int, sizes: RollSizes, ctx: DeviceContext) raises:
    """Enqueues the copies.

    Parameters:
        dtype: Of the tensors.

    Args:
        y: The result.
        x: What is turned around.
        rows: How many rows there are.
        sizes: The axes.
        ctx: The GPU.

    Raises:
        If there are 2^31 pieces of 16 bytes, or the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    var length = Int(sizes.row)
    comptime for width in [wide, 1]:
        if (length % wide == 0) == (width == wide):
            var vectors = rows * (length // width)
            if vectors > Int(Int32.MAX):
                raise Error("roll: expects fewer than 2^31 pieces but has ", vectors)
            launch[roll_kernel[dtype, width]](
                ctx,
                y,
                x,
                sizes,
                UInt32(vectors),
                UInt32(length // width),
                grid_dim=ceildiv(vectors, THREADS),
                block_dim=THREADS,
            )


@register("roll")
struct Roll:
    """Turns one or two axes of a tensor around."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        turns: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: The result.
            x: What is turned around.
            turns: In host memory, the first axis, its shift, the second axis, which lies behind it,
                and its shift; the same axis twice, the first time by 0, if there is only one.
            ctx: The device.

        Raises:
            If the launch fails, or the tensor is too large.
        """
        if y.size() == 0:
            return
        var given = data(turns)
        var first, second = Int(given[unsafe_offset=0]), Int(given[unsafe_offset=2])
        var between, row = 1, 1
        for axis in range(y.rank):
            if first < axis and axis < second:
                between *= y.shape()[axis]
            if axis > second:
                row *= y.shape()[axis]
        var sizes = RollSizes(
            row,
            y.shape()[second],
            Int(given[unsafe_offset=3]),
            between,
            y.shape()[first] if first < second else 1,
            Int(given[unsafe_offset=1]),
        )
        var rows = y.size() // row
        comptime if target == "cpu":
            roll_cpu(data(y), data(x), rows, sizes)
        else:
            roll_gpu(data(y), data(x), rows, sizes, ctx)
