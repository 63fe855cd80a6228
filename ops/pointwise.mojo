"""Elementwise ops of any number, in one launch: y = expression(x0, x1, ...), which broadcast.

`expression` is graphs/elementwise.py's, evaluated by expression.mojo in float32, or float64 where a
CPU reads or gives that, and rounded once.
Axes beside each other that every input has, or lacks, count as one. So tensors of one shape are one
long row; rows of C go with a vector [C]; images [N, H * W, C] with gates [N, 1, C]. The vectors run
along the last of these axes, where an input moves on or repeats one number. Bound by memory.

A CPU gives each core some thousand numbers at a time. A GPU's thread computes vectors of 16 bytes, or
single numbers where rows are no multiple of that. Of large tensors it takes up to four, which lie apart by
a part of the outermost axis: so an input lies at even steps and is divided for once, and what lies along
rows alone is loaded once. All loads stand before the arithmetic.
"""

from extensibility import InputTensor, ManagedTensorSlice, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import simd_width_of, size_of
from std.sys.intrinsics import masked_load, masked_store
from std.utils.static_tuple import StaticTuple

from .device import Device
from .division import quotient, reciprocal
from .expression import evaluate, inputs_of, is_expression, is_truth, split
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import CHECKED, F32, F64, I64, U32, Data, data, narrowed, widened
from .parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a CPU's vector."""
comptime PIECE = 8192
"""Numbers that are worth a task of their own."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime MOST = 8
"""Inputs of the op."""
comptime AXES = 6
"""Axes of the result."""
comptime FULL = 2048
"""Threads that fill a multiprocessor."""
comptime WORDS = 12
"""Registers that the vectors of one thread may take before they are computed with, by four."""
comptime BYTE = DType.uint8
"""What pointers to tensors of several dtypes have in common, and how masks lie in memory."""


struct Broadcast[count: Int](KernelArgument, TrivialRegisterPassable):
    """How the axes of several inputs lie to those of the result, the last one first.

    Parameters:
        count: Inputs.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var inner: Int64
    """Numbers of a row."""
    var rows: Int64
    """How many there are."""
    var axes: Int32
    """Axes that number the rows."""
    var sizes: StaticTuple[UInt32, AXES]
    """Sizes of these."""
    var factors: StaticTuple[UInt32, AXES]
    """What division by a size multiplies by (division.mojo); 0 along the last axis and behind it."""
    var shifts: StaticTuple[UInt32, AXES]
    """And what it shifts by then; 31 there, which leaves 0."""
    var steps: StaticTuple[StaticTuple[Int64, AXES], Self.count]
    """Numbers from one to the next of such an axis, input by input; 0 where it repeats."""
    var moves: StaticTuple[Bool, Self.count]
    """Whether an input moves on along a row, rather than repeat one number."""

    def __init__(out self):
        """Begins with one row of one number."""
        self.inner, self.rows, self.axes = 1, 1, 0
        self.sizes = StaticTuple[UInt32, AXES](fill=1)
        self.factors = StaticTuple[UInt32, AXES](fill=0)
        self.shifts = StaticTuple[UInt32, AXES](fill=31)
        self.steps = StaticTuple[StaticTuple[Int64, AXES], Self.count](
            fill=StaticTuple[Int64, AXES](fill=0)
        )
        self.moves = StaticTuple[Bool, Self.count](fill=True)

    @always_inline
    def row[most: Int = AXES](self, number: UInt32) -> StaticTuple[Int64, Self.count]:
        """Finds where a row of each input begins.

        Parameters:
            most: Axes that may number the rows: each takes instructions, whether it is there or not.

        Args:
            number: Of the row; less than 2^31.

        Returns:
            Numbers to skip, input by input.
        """
        var rest = number
        var found = StaticTuple[Int64, Self.count](fill=0)
        comptime for axis in range(most):  # an index at run time would put the sizes in memory
            rest = self._add[axis](rest, found)
        return found

    @always_inline
    def _add[axis: Int](self, number: UInt32, mut found: StaticTuple[Int64, Self.count]) -> UInt32:
        """Steps along an axis; returns what numbers the axes after it."""
        var rest = quotient(number, self.factors[axis], self.shifts[axis])
        var index = Int64(number - rest * self.sizes[axis])
        comptime for i in range(Self.count):
            found[i] += index * self.steps[i][axis]
        return rest


comptime Sources[count: Int] = StaticTuple[Data[BYTE], count]
"""Where inputs of several dtypes lie.

Parameters:
    count: Inputs.
"""


# CPU


@always_inline
def part_cpu[
    dtype: DType, //, expression: StaticString, dtypes: List[DType], repeats: Bool
](
    y: Data[dtype],
    sources: Sources[len(dtypes)],
    moves: StaticTuple[Bool, len(dtypes)],
    length: Int,
):
    """Computes part of a row. If an input repeats one number, vectors of it are made first.

    Parameters:
        dtype: Of the result.
        expression: What is computed.
        dtypes: Of the inputs.
        repeats: Whether an input repeats one number.

    Args:
        y: The part.
        sources: The same part of the inputs.
        moves: Whether an input moves on along the row.
        length: Numbers of the part.
    """
    comptime count = len(dtypes)
    comptime ROOM = WIDTH * size_of[widest(dtype, dtypes)]()
    var vectors = unsafe_stack_allocation[count * ROOM if repeats else 1, UInt8, alignment=64]()
    var from_ = sources
    var steps = StaticTuple[Int, count](fill=1)
    comptime if repeats:
        comptime for i in range(count):
            comptime source = dtypes[i]
            if not moves[i]:
                var vector = rebind[Data[BYTE]](vectors.unsafe_offset(i * ROOM))
                var number = sources[i].unsafe_bitcast[Scalar[source]]()[unsafe_offset=0]
                vector.unsafe_bitcast[Scalar[source]]().unsafe_store(SIMD[source, WIDTH](number))
                from_[i], steps[i] = vector, 0
    comptime wide = widest(dtype, dtypes)
    var values = Array[SIMD[wide, WIDTH], count](fill=0)
    var whole = length // WIDTH * WIDTH
    for at in range(0, whole, WIDTH):
        comptime for i in range(count):
            comptime source = dtypes[i]
            var numbers = from_[i].unsafe_bitcast[Scalar[source]]()
            var place = at * steps[i] if repeats else at
            values[i] = widened[wide](numbers.unsafe_load[width=WIDTH](place))
        y.unsafe_store(at, evaluated[dtype, expression](values))
    if whole < length:
        var left = iota[DType.int32, WIDTH]().lt(Int32(length - whole))
        comptime for i in range(count):
            comptime source = dtypes[i]
            var numbers = from_[i].unsafe_bitcast[Scalar[source]]().unsafe_offset(whole * steps[i])
            values[i] = widened[wide](masked_load[WIDTH](numbers, left, SIMD[source, WIDTH](0)))
        var value = evaluated[dtype, expression](values)
        masked_store(value, y.unsafe_offset(whole), left)


def widest(dtype: DType, dtypes: List[DType]) -> DType:
    """Chooses what an expression is computed in.

    Args:
        dtype: Of the result.
        dtypes: Of the inputs.

    Returns:
        Int64 of counters; float64, on a CPU, if one of them is; or else float32.
    """
    if dtype == I64:
        return I64
    return F64 if dtype == F64 or F64 in dtypes else F32


@always_inline
def evaluated[
    wide: DType, width: SIMDLength, count: Int, //, dtype: DType, expression: StaticString
](values: Array[SIMD[wide, width], count]) -> SIMD[dtype, width]:
    """Evaluates an expression, and rounds it to a dtype.

    Parameters:
        wide: In which it is evaluated (`widest`).
        width: Lanes.
        count: How many values there are.
        dtype: Of the result; uint8 of a comparison is a mask.
        expression: What is computed.

    Args:
        values: What `x0`, `x1`, ... stand for.

    Returns:
        The result.
    """
    comptime narrow = dtype.is_half_float()
    var value = evaluate[expression, narrow=narrow](values)
    comptime if dtype == BYTE and is_truth(expression):
        return value.ne(0).cast[dtype]()
    elif dtype == I64:
        return value.cast[dtype]()
    else:
        return narrowed[dtype](value)


def pointwise_cpu[
    dtype: DType, //, expression: StaticString, dtypes: List[DType]
](y: Data[dtype], sources: Sources[len(dtypes)], axes: Broadcast[len(dtypes)]):
    """Computes an expression on all cores.

    Parameters:
        dtype: Of the result: float32, bfloat16, float64, or uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.

    Args:
        y: The result.
        sources: The inputs.
        axes: How they broadcast.
    """
    var inner = Int(axes.inner)
    var parts = ceildiv(inner, PIECE)
    var length = ceildiv(ceildiv(inner, parts), WIDTH) * WIDTH
    var pieces = Int(axes.rows) * parts
    var share = max(ceildiv(PIECE, length), ceildiv(pieces, 8 * parallelism_level(None)))
    var repeats = False
    comptime for i in range(len(dtypes)):
        repeats |= not axes.moves[i]

    def task(index: Int) {imm}:
        var piece = index * share
        var stop = min(piece + share, pieces)
        while piece < stop:
            var row = piece // parts
            var start = (piece - row * parts) * length
            var count = min(length, inner - start)
            var to = y.unsafe_offset(row * inner + start)
            var from_ = sources
            var at = axes.row(UInt32(row))
            comptime for i in range(len(dtypes)):
                var skip = Int(at[i]) + (start if axes.moves[i] else 0)
                from_[i] = from_[i].unsafe_offset(skip * size_of[dtypes[i]]())
            # Whole rows up to the end of the first axis that numbers them.
            var run = 1
            if parts == 1:
                run = min(stop - piece, Int(axes.sizes[0]) - row % Int(axes.sizes[0]))
            for _ in range(run):
                if repeats:
                    part_cpu[expression, dtypes, True](to, from_, axes.moves, count)
                else:
                    part_cpu[expression, dtypes, False](to, from_, axes.moves, count)
                to = to.unsafe_offset(inner)
                comptime for i in range(len(dtypes)):
                    var skip = Int(axes.steps[i][0]) * size_of[dtypes[i]]()
                    from_[i] = from_[i].unsafe_offset(skip)
            piece += run

    over_cores(task, ceildiv(pieces, share))


# GPU


struct Threads[count: Int](KernelArgument, TrivialRegisterPassable):
    """The vectors of a GPU's threads: the first of each, and even steps on from it.

    Parameters:
        count: Inputs.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var vectors: UInt32
    """What there is to compute."""
    var step: UInt32
    """Vectors from one of a thread to its next: threads that have a first one."""
    var per_row: UInt32
    """Vectors of a row."""
    var factor: UInt32
    """What division by that multiplies by (division.mojo)."""
    var shift: UInt32
    """And what it shifts by then."""
    var strides: StaticTuple[Int64, Self.count]
    """Numbers from one vector of a thread to its next, input by input."""

    def __init__(
        out self, axes: Broadcast[Self.count], width: Int, pieces: Int, once: List[Bool]
    ) raises:
        """Deals the vectors out.

        Args:
            axes: How the inputs lie.
            width: Numbers of a vector.
            pieces: Vectors of a thread, at most.
            once: The inputs of which a thread loads one vector, whatever its number of them.

        Raises:
            If there are too many.
        """
        var per_row = Int(axes.inner) // width
        var vectors = Int(axes.rows) * per_row
        if vectors >= 1 << 31:
            raise Error("pointwise: expects fewer than 2^31 vectors but has ", vectors)
        var outer = Int(axes.axes) - 1
        var size = per_row if outer < 0 else Int(axes.sizes[outer])
        var share = ceildiv(size, pieces)
        self.strides = StaticTuple[Int64, Self.count](fill=0)
        for _ in range(2):
            var even = True
            comptime for i in range(Self.count):
                self.strides[i] = (
                    Int64(share * width) if axes.moves[i] else 0
                ) if outer < 0 else Int64(share) * axes.steps[i][outer]
                even &= self.strides[i] == 0 or not once[i]
            if even:
                break
            share = size  # one vector a thread
        self.vectors, self.step = UInt32(vectors), UInt32(vectors // size * share)
        self.per_row = UInt32(per_row)
        self.factor, self.shift = reciprocal(per_row)


@__name(t"pointwise_{width}_{dtype}")
def pointwise_kernel[
    dtype: DType, expression: StaticString, dtypes: List[DType], width: Int, most: Int
](
    y: Data[dtype],
    sources: Sources[len(dtypes)],
    axes: Broadcast[len(dtypes)],
    threads: Threads[len(dtypes)],
):
    """Computes up to `pieces_of` vectors in each thread.

    Parameters:
        dtype: Of the result; uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.
        width: 16 bytes of numbers, or 1.
        most: Axes that may number the rows.

    Args:
        y: The result.
        sources: The inputs.
        axes: How they broadcast.
        threads: Which vectors a thread computes.
    """
    comptime count = len(dtypes)
    comptime pieces = pieces_of(dtype, dtypes)
    comptime once = loaded_once(dtype, dtypes)
    var vector = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var row = quotient(vector, threads.factor, threads.shift)
    var column = Int(vector - row * threads.per_row) * width
    var starts = axes.row[most](row)
    wait_on_dependent_grids()
    launch_dependent_grids()
    if vector >= threads.step:
        return

    # What a thread lacks is its first vector again: with a branch around each load, loads would
    # wait for one another.
    var there = Array[Bool, pieces](fill=True)
    var at = vector
    comptime for piece in range(1, pieces):
        at += threads.step
        there[piece] = there[piece - 1] and at < threads.vectors
    var held = Array[SIMD[U32, 4], pieces * count](fill=0)
    var values = Array[SIMD[F32, width], count](fill=0)
    var moves = True
    comptime for i in range(count):
        moves &= axes.moves[i]
    comptime for way in range(2):
        if moves == (way == 0):
            comptime for kind in range(2):
                comptime for i in range(count):
                    comptime source = dtypes[i]
                    comptime if once[i] == (kind == 1):
                        var numbers = (
                            sources[i]
                            .unsafe_bitcast[Scalar[source]]()
                            .unsafe_offset(Int(starts[i]))
                        )
                        if way == 0 or axes.moves[i]:
                            numbers = numbers.unsafe_offset(column)
                            comptime if once[i]:
                                comptime bytes = min(16, width * size_of[source]())
                                values[i] = widened(
                                    numbers.unsafe_load[width=width, alignment=bytes]()
                                )
                            else:
                                comptime for piece in range(pieces):
                                    var skip = piece * Int(threads.strides[i])
                                    held[piece * count + i] = load_words[width](
                                        numbers.unsafe_offset(skip if there[piece] else 0)
                                    )
                        else:
                            comptime if once[i]:
                                values[i] = widened(numbers[unsafe_offset=0])
                            else:
                                comptime for piece in range(pieces):
                                    var skip = piece * Int(threads.strides[i])
                                    var number = numbers[unsafe_offset=skip if there[piece] else 0]
                                    held[piece * count + i] = as_words(SIMD[source, width](number))

    # The compiler unrolls this where the expression is short. A vector leaves at the front.
    for _ in range(pieces):
        comptime for i in range(count):
            comptime if not once[i]:
                values[i] = from_words[dtypes[i], width](held[i])
        comptime for i in range((pieces - 1) * count):
            held[i] = held[i + count]
        comptime bytes = min(16, width * size_of[dtype]())
        y.unsafe_store[alignment=bytes](Int(vector) * width, evaluated[dtype, expression](values))
        vector += threads.step
        if vector >= threads.vectors:
            return


@always_inline
def load_words[dtype: DType, //, width: Int](numbers: Data[dtype]) -> SIMD[U32, 4]:
    """Loads a vector of up to 16 bytes into registers, and does not wait for it.

    Parameters:
        dtype: Of the numbers.
        width: How many there are.

    Args:
        numbers: A whole vector.

    Returns:
        The bytes of the vector.
    """
    comptime bytes = width * size_of[dtype]()
    comptime if bytes < 4:
        return as_words(numbers.unsafe_load[width=width]())
    else:
        comptime words = bytes // 4
        var found = SIMD[U32, 4](0)
        var loaded = numbers.unsafe_bitcast[UInt32]().unsafe_load[width=words, alignment=bytes]()
        comptime for i in range(words):
            found[i] = loaded[i]
        return found


@always_inline
def store_words[dtype: DType, //, width: Int](numbers: Data[dtype], words: SIMD[U32, 4]):
    """Stores a vector of up to 16 bytes.

    Parameters:
        dtype: Of the numbers.
        width: How many there are.

    Args:
        numbers: Where to.
        words: The bytes of the vector.
    """
    comptime bytes = width * size_of[dtype]()
    comptime if bytes == 1:
        numbers.unsafe_bitcast[UInt8]().unsafe_store(words[0].cast[DType.uint8]())
    elif bytes == 2:
        numbers.unsafe_bitcast[UInt16]().unsafe_store(words[0].cast[DType.uint16]())
    else:
        var some = SIMD[U32, bytes // 4](0)
        comptime for i in range(bytes // 4):
            some[i] = words[i]
        numbers.unsafe_bitcast[UInt32]().unsafe_store[alignment=bytes](some)


@always_inline
def as_words[dtype: DType, width: Int, //](value: SIMD[dtype, width]) -> SIMD[U32, 4]:
    """Lays a vector of up to 16 bytes in registers.

    Parameters:
        dtype: Of the vector.
        width: Its length.

    Args:
        value: The vector.

    Returns:
        Its bytes.
    """
    comptime bytes = width * size_of[dtype]()
    var found = SIMD[U32, 4](0)
    comptime if bytes == 1:
        found[0] = UInt32(bitcast[DType.uint8, 1](value))
    elif bytes == 2:
        found[0] = UInt32(bitcast[DType.uint16, 1](value))
    else:
        var words = bitcast[U32, bytes // 4](value)
        comptime for i in range(bytes // 4):
            found[i] = words[i]
    return found


@always_inline
def from_words[dtype: DType, width: Int](words: SIMD[U32, 4]) -> SIMD[F32, width]:
    """Widens what `as_words` gave.

    Parameters:
        dtype: Of the vector.
        width: Its length.

    Args:
        words: Its bytes.

    Returns:
        Its numbers.
    """
    comptime bytes = width * size_of[dtype]()
    comptime if bytes == 1:
        return widened(bitcast[dtype, width](words[0].cast[DType.uint8]()))
    elif bytes == 2:
        return widened(bitcast[dtype, width](words[0].cast[DType.uint16]()))
    else:
        var some = SIMD[U32, bytes // 4](0)
        comptime for i in range(bytes // 4):
            some[i] = words[i]
        return widened(bitcast[dtype, width](some))


@no_inline  # once, not for each node of a graph
def pointwise_gpu[
    dtype: DType, //, expression: StaticString, dtypes: List[DType], most: Int = AXES
](
    y: Data[dtype],
    sources: Sources[len(dtypes)],
    axes: Broadcast[len(dtypes)],
    ctx: DeviceContext,
) raises:
    """Enqueues an expression.

    Parameters:
        dtype: Of the result; uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.
        most: Axes that may number the rows.

    Args:
        y: The result.
        sources: The inputs.
        axes: How they broadcast.
        ctx: The GPU.

    Raises:
        If the launch fails, or there are too many numbers.
    """
    comptime wide = 16 // narrowest(dtype, dtypes)
    comptime once = loaded_once(dtype, dtypes)
    var fits = Int(axes.inner) % wide == 0
    comptime for width in [wide, 1]:
        if fits == (width == wide):
            var vectors = Int(axes.rows) * Int(axes.inner) // width
            comptime limit = pieces_of(dtype, dtypes)
            var pieces = pieces_for(vectors, limit, ctx)
            var threads = Threads[len(dtypes)](axes, width, pieces, materialize[once]())
            launch[pointwise_kernel[dtype, expression, dtypes, width, most]](
                ctx,
                y,
                sources,
                axes,
                threads,
                grid_dim=ceildiv(Int(threads.step), THREADS),
                block_dim=THREADS,
            )


def pieces_for(vectors: Int, most: Int, ctx: DeviceContext) raises -> Int:
    """Chooses how many vectors a thread takes: several if the GPU is full without.

    Args:
        vectors: What there is.
        most: Vectors of a thread, at most.
        ctx: The GPU.

    Returns:
        From 1 to `most`.

    Raises:
        If the driver does not say what the GPU has.
    """
    return max(1, min(most, vectors // (Device(ctx).multiprocessors * FULL)))


def pieces_of(dtype: DType, dtypes: List[DType]) -> Int:
    """Chooses how many vectors a thread takes at most: as many as its registers hold.

    Args:
        dtype: Of the result.
        dtypes: Of the inputs.

    Returns:
        4, 2 or 1.
    """
    var words = 0
    var once = loaded_once(dtype, dtypes)
    for i in range(len(dtypes)):
        words += 0 if once[i] else 4
    return 4 if words <= WORDS else 2 if words <= 2 * WORDS else 1


def loaded_once(dtype: DType, dtypes: List[DType]) -> List[Bool]:
    """Tells of which inputs a thread loads one vector: float32 beside 16 bits, as constants are.

    Args:
        dtype: Of the result.
        dtypes: Of the inputs.

    Returns:
        A truth value for each input.
    """
    var found = List[Bool]()
    for each in dtypes:
        found.append(each == F32 and narrowest(dtype, dtypes) == 2)
    return found^


def narrowest(dtype: DType, dtypes: List[DType]) -> Int:
    """Gives the bytes of a number of the narrowest tensor that holds no masks.

    Args:
        dtype: Of the result.
        dtypes: Of the inputs.

    Returns:
        2, 4 or 8; 4 if all are masks.
    """
    var bytes = 8 if dtype == I64 else 4 if dtype == BYTE or dtype == F32 else 2
    for each in dtypes:
        if each != BYTE and each != F32 and each != I64:
            bytes = 2
    return bytes


# Op


@no_inline  # once, not for each node of a graph
def _axes[
    count: Int
](y: StaticTuple[Int, AXES], sizes: StaticTuple[StaticTuple[Int, AXES], count]) raises -> Broadcast[
    count
]:
    """Joins the axes that lie alike in every input; all sizes are the last axis first."""
    var found = Broadcast[count]()
    var inner = True
    var open = False
    var lies = StaticTuple[Bool, count](fill=True)
    var step = StaticTuple[Int64, count](fill=1)
    for axis in range(AXES):
        var size = y[axis]
        if size == 1:
            continue
        var same = True
        comptime for i in range(count):
            same &= lies[i] == (sizes[i][axis] != 1)
        if not open or not same:
            comptime for i in range(count):
                lies[i] = sizes[i][axis] != 1
            if open:
                inner = False
            open = True
            if inner:
                found.moves = lies
            else:
                comptime for i in range(count):
                    var steps = found.steps[i]
                    steps[Int(found.axes)] = step[i] if lies[i] else 0
                    found.steps[i] = steps
                found.axes += 1
        if inner:
            found.inner *= Int64(size)
        else:
            found.sizes[Int(found.axes) - 1] *= UInt32(size)
            found.rows *= Int64(size)
        comptime for i in range(count):
            if lies[i]:
                step[i] *= Int64(size)
    if found.rows >= 1 << 31:
        raise Error("pointwise: expects fewer than 2^31 rows but has ", found.rows)
    for axis in range(Int(found.axes) - 1):
        found.factors[axis], found.shifts[axis] = reciprocal(Int(found.sizes[axis]))
    return found


@register("pointwise")
struct Pointwise:
    """Computes an expression of x0, x1, ..., which broadcast as torch's do."""

    @staticmethod
    def execute[
        target: StaticString, expression: StaticString
    ](
        y: OutputTensor,
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            expression: What is computed (graphs/elementwise.py).

        Args:
            y: The result, of up to 6 axes; bool takes what is not 0 as true.
            x0: A value of the result's dtype, float32 or bool, of no more axes.
            x1: Another one; of those that the expression does not name nothing is read.
            x2: See `x1`.
            x3: See `x1`.
            x4: See `x1`.
            x5: See `x1`.
            x6: See `x1`.
            x7: See `x1`.
            ctx: The device.

        Raises:
            If there are too many rows, or a launch fails.
        """
        comptime assert is_expression(
            split(expression), MOST
        ), "pointwise: no expression of x0 to x7"
        comptime assert y.rank <= AXES, "pointwise: expects a result of at most 6 axes"
        comptime all: List[DType] = [
            x0.dtype,
            x1.dtype,
            x2.dtype,
            x3.dtype,
            x4.dtype,
            x5.dtype,
            x6.dtype,
            x7.dtype,
        ]
        comptime dtypes = in_memory(all, inputs_of(expression))
        comptime count = len(dtypes)
        comptime result = in_memory(y.dtype)
        comptime assert (
            target != "cpu" or result == BYTE or CHECKED[result]
        ), "pointwise: a CPU expects float32, bfloat16 or float64"
        if y.size() == 0:
            return
        var sources = StaticTuple[Data[BYTE], MOST](fill=bytes_of(x0))
        sources[1], sources[2], sources[3] = bytes_of(x1), bytes_of(x2), bytes_of(x3)
        sources[4], sources[5], sources[6] = bytes_of(x4), bytes_of(x5), bytes_of(x6)
        sources[7] = bytes_of(x7)
        var sizes = StaticTuple[StaticTuple[Int, AXES], MOST](fill=_sizes(x0))
        sizes[1], sizes[2], sizes[3] = _sizes(x1), _sizes(x2), _sizes(x3)
        sizes[4], sizes[5], sizes[6], sizes[7] = _sizes(x4), _sizes(x5), _sizes(x6), _sizes(x7)
        var used = Sources[count](fill=sources[0])
        var shapes = StaticTuple[StaticTuple[Int, AXES], count](fill=sizes[0])
        comptime for i in range(count):
            used[i], shapes[i] = sources[i], sizes[i]
        var axes = _axes(_sizes(y), shapes)
        var to = rebind[Data[result]](data(y).unsafe_bitcast[Scalar[result]]())
        comptime if target == "cpu":
            pointwise_cpu[expression, dtypes](to, used, axes)
        else:
            comptime most = AXES if y.rank > 4 else 3  # one kernel for tokens and images
            pointwise_gpu[expression, dtypes, most](to, used, axes, ctx)


def in_memory(dtype: DType) -> DType:
    """Names what numbers of a dtype are in memory.

    Args:
        dtype: Any.

    Returns:
        It; masks are bytes.
    """
    return BYTE if dtype == DType.bool else dtype


def in_memory(dtypes: List[DType], count: Int) -> List[DType]:
    """Lists the dtypes of the inputs that are used, as they lie in memory.

    Args:
        dtypes: Of all inputs.
        count: Inputs that are used.

    Returns:
        The first so many; masks are bytes.
    """
    var found = List[DType]()
    for i in range(count):
        found.append(in_memory(dtypes[i]))
    return found^


@always_inline
def bytes_of(tensor: ManagedTensorSlice) -> Data[BYTE]:
    """Takes the memory of an op's tensor, of whichever dtype.

    Args:
        tensor: Any.

    Returns:
        Its first byte.
    """
    return rebind[Data[BYTE]](data(tensor).unsafe_bitcast[UInt8]())


@always_inline
def _sizes(tensor: ManagedTensorSlice) -> StaticTuple[Int, AXES]:
    """Lists the sizes of a tensor, the last axis first; 1 for those that it lacks."""
    var found = StaticTuple[Int, AXES](fill=1)
    comptime for axis in range(min(tensor.rank, AXES)):
        found[axis] = tensor.shape()[tensor.rank - 1 - axis]
    return found
