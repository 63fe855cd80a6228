"""Up to four tensors one behind the other along an axis: y = concat(x0, x1, ...).

Axes before that one are rows; a row of y is a row of each input in turn. A CPU copies rows on all
cores. A GPU gives each thread 16 bytes of the result, or one number where a row of an input is no
multiple of that. Bound by memory.
"""

from extensibility import InputTensor, ManagedTensorSlice, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .kernel_argument import KernelArgument
from .operands import Data, data
from .parallel import over_cores

comptime MOST = 4
"""Inputs of the op."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime PIECE = 16384
"""Numbers that are worth a task of their own on a CPU."""


struct ConcatTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors, and how long their rows are.

    Parameters:
        dtype: Of all.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var y: Data[Self.dtype]
    """The result."""
    var x: StaticTuple[Data[Self.dtype], MOST]
    """The inputs."""
    var starts: StaticTuple[Int64, MOST + 1]
    """Where each input's numbers begin in a row of y, and where the last one's end."""

    def __init__(out self, y: Data[Self.dtype]):
        """Begins with no input.

        Args:
            y: The result.
        """
        self.y = y
        self.x = StaticTuple[Data[Self.dtype], MOST](fill=y)
        self.starts = StaticTuple[Int64, MOST + 1](fill=0)

    @always_inline
    def length(self) -> Int:
        """Counts the numbers of a row of y.

        Returns:
            Those of all inputs.
        """
        return Int(self.starts[MOST])


def concat_cpu[dtype: DType](tensors: ConcatTensors[dtype], rows: Int):
    """Copies rows on all cores.

    Parameters:
        dtype: Of the tensors.

    Args:
        tensors: The tensors.
        rows: How many rows there are.
    """
    var length = tensors.length()
    var share = max(ceildiv(PIECE, length), ceildiv(rows, 4 * parallelism_level(None)))

    def task(index: Int) {imm}:
        for row in range(index * share, min(index * share + share, rows)):
            comptime for i in range(MOST):
                var count = Int(tensors.starts[i + 1] - tensors.starts[i])
                var to = tensors.y.unsafe_offset(row * length + Int(tensors.starts[i]))
                var from_ = tensors.x[i].unsafe_offset(row * count)
                unsafe_memcpy(dest=to, src=from_, count=count)

    over_cores(task, ceildiv(rows, share))


@__name(t"concat_{width}_{dtype}")
def concat_kernel[
    dtype: DType, width: Int
](tensors: ConcatTensors[dtype], vectors: Int64, per_row: UInt32):
    """Copies `width` numbers in each thread.

    Parameters:
        dtype: Of the tensors.
        width: 16 bytes of numbers, or 1.

    Args:
        tensors: The tensors.
        vectors: What there is to copy.
        per_row: Vectors of a row of y.
    """
    comptime bytes = width * size_of[dtype]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var vector = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    if vector >= Int(vectors):
        return
    var row = vector // Int(per_row)
    var column = (vector - row * Int(per_row)) * width
    comptime for i in range(MOST):
        var start, end = Int(tensors.starts[i]), Int(tensors.starts[i + 1])
        if start <= column and column < end:
            var at = row * (end - start) + column - start
            var value = tensors.x[i].unsafe_load[width=width, alignment=bytes](at)
            tensors.y.unsafe_store[alignment=bytes](vector * width, value)


def concat_gpu[dtype: DType](tensors: ConcatTensors[dtype], rows: Int, ctx: DeviceContext) raises:
    """Enqueues the copies.

    Parameters:
        dtype: Of the tensors.

    Args:
        tensors: The tensors.
        rows: How many rows there are.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    var fits = True
    comptime for i in range(MOST):
        fits &= Int(tensors.starts[i + 1]) % wide == 0
    comptime for width in [wide, 1]:
        if fits == (width == wide):
            var per_row = tensors.length() // width
            ctx.enqueue_function[concat_kernel[dtype, width]](
                tensors,
                Int64(rows * per_row),
                UInt32(per_row),
                grid_dim=ceildiv(rows * per_row, THREADS),
                block_dim=THREADS,
                attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
            )


@register("concat")
struct Concat:
    """Puts tensors one behind the other along an axis."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int, count: Int
    ](
        y: OutputTensor,
        x0: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x1: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x2: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x3: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            axis: Along which.
            count: Inputs that count; of the others nothing is read.

        Args:
            y: The result.
            x0: The first input.
            x1: The second.
            x2: The third.
            x3: The fourth.
            ctx: The device.

        Raises:
            If the launch fails.
        """
        comptime assert 0 <= axis < y.rank, "concat: there is no such axis"
        comptime assert 1 <= count <= MOST, "concat: takes up to four inputs"
        if y.size() == 0:
            return
        var tensors = ConcatTensors[y.dtype](data(y))
        tensors.x[0], tensors.x[1] = data(x0), data(x1)
        tensors.x[2], tensors.x[3] = data(x2), data(x3)
        var lengths = StaticTuple[Int, MOST](fill=0)
        lengths[0], lengths[1] = _length[axis](x0), _length[axis](x1)
        lengths[2], lengths[3] = _length[axis](x2), _length[axis](x3)
        comptime for i in range(MOST):
            var length = lengths[i] if i < count else 0
            tensors.starts[i + 1] = tensors.starts[i] + Int64(length)
        var rows = y.size() // tensors.length()
        comptime if target == "cpu":
            concat_cpu(tensors, rows)
        else:
            concat_gpu(tensors, rows, ctx)


@always_inline
def _length[axis: Int](x: ManagedTensorSlice) -> Int:
    """Counts the numbers from an axis on."""
    var length = 1
    comptime for i in range(axis, x.rank):
        length *= x.shape()[i]
    return length
