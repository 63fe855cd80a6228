"""Up to eight tensors one behind the other along an axis: y = expression(concat(x0, x1, ...), v0, ...).

Axes before that one are rows; a row of y is a row of each input in turn. The expression is `x0`, which
copies, or of a concat along the last axis and of float32 vectors [C], such as a batch norm and a ReLU in
a dense block: `x0 x1 mul x2 add relu`. Then no other launch reads and writes all of it again.

A CPU takes rows on all cores. A GPU's thread takes vectors of 16 bytes, or single numbers where a row of
an input is no multiple of that: of large tensors up to four, whose rows lie an even step apart, so that
they are of one input, and what the expression reads by channel is loaded once. Bound by memory.
"""

from extensibility import InputTensor, ManagedTensorSlice, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .division import quotient, reciprocal
from .expression import inputs_of, is_expression, split
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import F32, Data, data
from .parallel import over_cores
from .pointwise import (
    BYTE,
    U32,
    Sources,
    evaluated,
    from_words,
    load_words,
    part_cpu,
    pieces_for,
    store_words,
)

comptime MOST = 8
"""Inputs of the op."""
comptime VECTORS = 3
"""Vectors of an expression."""
comptime COPY: StaticString = "x0"
"""The expression that leaves the numbers as they are."""
comptime PIECES = 4
"""Vectors of a GPU's thread, at most."""
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
    var vectors: StaticTuple[Data[F32], VECTORS]
    """What the expression reads besides: a number for each of a row of y."""
    var starts: StaticTuple[Int64, MOST + 1]
    """Where each input's numbers begin in a row of y, and where the last one's end."""

    def __init__(out self, y: Data[Self.dtype], vectors: StaticTuple[Data[F32], VECTORS]):
        """Begins with no input.

        Args:
            y: The result.
            vectors: The expression's.
        """
        self.y = y
        self.vectors = vectors
        self.x = StaticTuple[Data[Self.dtype], MOST](fill=y)
        self.starts = StaticTuple[Int64, MOST + 1](fill=0)

    @always_inline
    def length(self) -> Int:
        """Counts the numbers of a row of y.

        Returns:
            Those of all inputs.
        """
        return Int(self.starts[MOST])


def concat_cpu[dtype: DType, expression: StaticString](tensors: ConcatTensors[dtype], rows: Int):
    """Takes rows on all cores.

    Parameters:
        dtype: Of the tensors.
        expression: What is computed of a number.

    Args:
        tensors: The tensors.
        rows: How many rows there are.
    """
    comptime dtypes = _dtypes(dtype, expression)
    var length = tensors.length()
    var share = max(ceildiv(PIECE, length), ceildiv(rows, 4 * parallelism_level(None)))

    def task(index: Int) {imm}:
        for row in range(index * share, min(index * share + share, rows)):
            comptime for i in range(MOST):
                var start = Int(tensors.starts[i])
                var count = Int(tensors.starts[i + 1]) - start
                var to = tensors.y.unsafe_offset(row * length + start)
                var from_ = tensors.x[i].unsafe_offset(row * count)
                comptime if expression == COPY:
                    unsafe_memcpy(dest=to, src=from_, count=count)
                else:
                    var sources = Sources[len(dtypes)](
                        fill=rebind[Data[BYTE]](from_.unsafe_bitcast[UInt8]())
                    )
                    comptime for j in range(1, len(dtypes)):
                        var vector = tensors.vectors[j - 1].unsafe_offset(start)
                        sources[j] = rebind[Data[BYTE]](vector.unsafe_bitcast[UInt8]())
                    part_cpu[expression, dtypes, False](
                        to, sources, StaticTuple[Bool, len(dtypes)](fill=True), count
                    )

    over_cores(task, ceildiv(rows, share))


def _dtypes(dtype: DType, expression: StaticString) -> List[DType]:
    """Lists the dtypes of what an expression reads."""
    var found: List[DType] = [dtype]
    for _ in range(1, inputs_of(expression)):
        found.append(F32)
    return found^


struct Threads(KernelArgument, TrivialRegisterPassable):
    """The vectors of a GPU's threads: the first of each, and even steps on from it."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var vectors: UInt32
    """What there is to compute."""
    var step: UInt32
    """Vectors from one of a thread to its next, whole rows: threads that have a first one."""
    var rows: UInt32
    """The same in rows."""
    var per_row: UInt32
    """Vectors of a row of y."""
    var factor: UInt32
    """What division by that multiplies by (division.mojo)."""
    var shift: UInt32
    """And what it shifts by then."""

    def __init__(out self, rows: Int, per_row: Int, pieces: Int) raises:
        """Deals the vectors out.

        Args:
            rows: Of y.
            per_row: Vectors of a row.
            pieces: Vectors of a thread, at most.

        Raises:
            If there are too many.
        """
        if rows * per_row >= 1 << 31:
            raise Error("concat: expects fewer than 2^31 vectors but has ", rows * per_row)
        self.vectors, self.per_row = UInt32(rows * per_row), UInt32(per_row)
        self.rows = UInt32(ceildiv(rows, pieces))
        self.step = self.rows * self.per_row
        self.factor, self.shift = reciprocal(per_row)


@__name(t"{name}_{width}_{dtype}")
def concat_kernel[
    dtype: DType, expression: StaticString, width: Int, name: StaticString
](tensors: ConcatTensors[dtype], threads: Threads):
    """Takes up to `PIECES` vectors in each thread.

    Parameters:
        dtype: Of the tensors.
        expression: What is computed of a number.
        width: 16 bytes of numbers, or 1.
        name: What the symbol begins with.

    Args:
        tensors: The tensors; `starts` counts vectors.
        threads: Which vectors a thread takes.
    """
    comptime bytes = width * size_of[dtype]()
    var vector = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var row = quotient(vector, threads.factor, threads.shift)
    var column = vector - row * threads.per_row
    var from_ = tensors.x[0]
    var start, length = UInt32(0), UInt32(tensors.starts[1])
    comptime for i in range(1, MOST):
        if column >= UInt32(tensors.starts[i]):
            from_ = tensors.x[i]
            start = UInt32(tensors.starts[i])
            length = UInt32(tensors.starts[i + 1]) - start
    var first = Int(Int64(row) * Int64(length) + Int64(column - start)) * width
    var stride = Int(Int64(threads.rows) * Int64(length)) * width
    wait_on_dependent_grids()
    launch_dependent_grids()
    if vector >= threads.step:
        return

    # What a thread lacks is its first vector again: with a branch around each load, loads would
    # wait for one another.
    var held = Array[SIMD[U32, 4], PIECES](fill=0)
    var there = True
    var at = vector
    comptime for piece in range(PIECES):
        var skip = first + piece * stride if there else first
        held[piece] = load_words[width](from_.unsafe_offset(skip))
        at += threads.step
        there = there and at < threads.vectors
    comptime count = inputs_of(expression)
    var values = Array[SIMD[F32, width], count](fill=0)
    comptime for i in range(1, count):
        var numbers = tensors.vectors[i - 1].unsafe_offset(Int(column) * width)
        values[i] = numbers.unsafe_load[width=width, alignment=min(16, width * 4)]()

    # The compiler unrolls this where the expression is short. A vector leaves at the front.
    for _ in range(PIECES):
        var to = tensors.y.unsafe_offset(Int(vector) * width)
        comptime if expression == COPY:
            store_words[width](to, held[0])
        else:
            values[0] = from_words[dtype, width](held[0])
            to.unsafe_store[alignment=bytes](evaluated[dtype, expression](values))
        comptime for piece in range(PIECES - 1):
            held[piece] = held[piece + 1]
        vector += threads.step
        if vector >= threads.vectors:
            return


@no_inline  # once, not for each node of a graph
def concat_gpu[
    dtype: DType, expression: StaticString
](tensors: ConcatTensors[dtype], rows: Int, ctx: DeviceContext) raises:
    """Enqueues a concat.

    Parameters:
        dtype: Of the tensors.
        expression: What is computed of a number.

    Args:
        tensors: The tensors.
        rows: How many rows there are.
        ctx: The GPU.

    Raises:
        If there are too many numbers, or the launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    comptime name: StaticString = "concat" if expression == COPY else "concat_pointwise"
    var fits = True
    comptime for i in range(MOST):
        fits &= Int(tensors.starts[i + 1]) % wide == 0
    comptime for width in [wide, 1]:
        if fits == (width == wide):
            var by_vectors = tensors
            comptime for i in range(MOST):
                by_vectors.starts[i + 1] = tensors.starts[i + 1] // Int64(width)
            var per_row = by_vectors.length()
            var pieces = pieces_for(rows * per_row, PIECES, ctx)
            var threads = Threads(rows, per_row, pieces)
            launch[concat_kernel[dtype, expression, width, name]](
                ctx,
                by_vectors,
                threads,
                grid_dim=ceildiv(Int(threads.step), THREADS),
                block_dim=THREADS,
            )


@register("concat")
struct Concat:
    """Puts tensors one behind the other along an axis, and computes an expression of that."""

    @staticmethod
    def execute[
        target: StaticString, axis: Int, expression: StaticString
    ](
        y: OutputTensor,
        x0: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x1: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x2: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x3: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x4: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x5: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x6: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        x7: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        v0: InputTensor,
        v1: InputTensor,
        v2: InputTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            axis: Along which.
            expression: `x0`, or an expression of the concat, `x0`, and of vectors, `x1` to `x3`; its
                axis is the last one then.

        Args:
            y: The result.
            x0: The first input. Of inputs behind those that fill y nothing is read: there may be fewer.
            x1: The second.
            x2: The third.
            x3: The fourth.
            x4: The fifth.
            x5: The sixth.
            x6: The seventh.
            x7: The eighth.
            v0: The first vector [C], in float32; of those that the expression does not name nothing
                is read.
            v1: The second.
            v2: The third.
            ctx: The device.

        Raises:
            If there are too many numbers, or the launch fails.
        """
        comptime assert 0 <= axis < y.rank, "concat: there is no such axis"
        comptime assert is_expression(
            split(expression), VECTORS + 1
        ), "concat: no expression of x0 to x3"
        comptime assert (
            expression == COPY or axis == y.rank - 1
        ), "concat: vectors lie along the last axis"
        comptime read = inputs_of(expression) - 1
        comptime assert (
            (read < 1 or v0.dtype == F32)
            and (read < 2 or v1.dtype == F32)
            and (read < 3 or v2.dtype == F32)
        ), "concat: expects vectors in float32"
        if y.size() == 0:
            return
        var vectors = StaticTuple[Data[F32], VECTORS](fill=_vector(v0))
        vectors[1], vectors[2] = _vector(v1), _vector(v2)
        var tensors = ConcatTensors[y.dtype](data(y), vectors)
        tensors.x[0], tensors.x[1] = data(x0), data(x1)
        tensors.x[2], tensors.x[3] = data(x2), data(x3)
        tensors.x[4], tensors.x[5] = data(x4), data(x5)
        tensors.x[6], tensors.x[7] = data(x6), data(x7)
        var lengths = StaticTuple[Int, MOST](fill=0)
        lengths[0], lengths[1] = _length[axis](x0), _length[axis](x1)
        lengths[2], lengths[3] = _length[axis](x2), _length[axis](x3)
        lengths[4], lengths[5] = _length[axis](x4), _length[axis](x5)
        lengths[6], lengths[7] = _length[axis](x6), _length[axis](x7)
        comptime for i in range(MOST):
            var left = _length[axis](y) - Int(tensors.starts[i])
            tensors.starts[i + 1] = tensors.starts[i] + Int64(min(lengths[i], left))
        var rows = y.size() // tensors.length()
        comptime if target == "cpu":
            concat_cpu[y.dtype, expression](tensors, rows)
        else:
            concat_gpu[y.dtype, expression](tensors, rows, ctx)


@always_inline
def _vector(tensor: ManagedTensorSlice) -> Data[F32]:
    return rebind[Data[F32]](data(tensor).unsafe_bitcast[Float32]())


@always_inline
def _length[axis: Int](x: ManagedTensorSlice) -> Int:
    """Counts the numbers from an axis on."""
    var length = 1
    comptime for i in range(axis, x.rank):
        length *= x.shape()[i]
    return length
