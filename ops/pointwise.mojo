"""Elementwise ops of any number, in one launch: y = expression(x0, x1, ...), which broadcast.

`expression` is graphs/elementwise.py's, evaluated by expression.mojo in float32 and rounded once.
Axes beside each other that every input has, or lacks, count as one. So tensors of one shape are one
long row; rows of C go with a vector [C]; images [N, H * W, C] with gates [N, 1, C]. The vectors run
along the last of these axes, where an input moves on or repeats one number. Bound by memory.

A CPU gives each core some thousand numbers at a time. A GPU gives each thread 16 bytes of the
result, or one number where rows are no multiple of that.
"""

from extensibility import InputTensor, ManagedTensorSlice, OutputTensor, register
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import unsafe_stack_allocation
from std.sys import simd_width_of, size_of
from std.sys.intrinsics import masked_load, masked_store
from std.utils.static_tuple import StaticTuple

from .expression import evaluate, inputs_of, is_expression, split
from .kernel_argument import KernelArgument
from .operands import F32, ON_CPU, Data, data, narrowed, widened
from .parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a CPU's vector."""
comptime PIECE = 8192
"""Numbers that are worth a task of their own."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime MOST = 6
"""Inputs of the op."""
comptime AXES = 6
"""Axes of the result."""
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
    var steps: StaticTuple[StaticTuple[Int64, AXES], Self.count]
    """Numbers from one to the next of such an axis, input by input; 0 where it repeats."""
    var moves: StaticTuple[Bool, Self.count]
    """Whether an input moves on along a row, rather than repeat one number."""

    def __init__(out self):
        """Begins with one row of one number."""
        self.inner, self.rows, self.axes = 1, 1, 0
        self.sizes = StaticTuple[UInt32, AXES](fill=1)
        self.steps = StaticTuple[StaticTuple[Int64, AXES], Self.count](
            fill=StaticTuple[Int64, AXES](fill=0)
        )
        self.moves = StaticTuple[Bool, Self.count](fill=True)

    @always_inline
    def row[index: Int](self, number: UInt32) -> Int64:
        """Finds where a row of an input begins.

        Parameters:
            index: Which input.

        Args:
            number: Of the row.

        Returns:
            Numbers to skip.
        """
        var rest = number
        var at = Int64(0)
        comptime for axis in range(AXES):  # an index at run time would put the sizes in memory
            if axis < Int(self.axes) - 1:
                var whole = rest // self.sizes[axis]
                at += Int64(rest - whole * self.sizes[axis]) * self.steps[index][axis]
                rest = whole
            elif axis == Int(self.axes) - 1:
                at += Int64(rest) * self.steps[index][axis]
        return at


comptime Sources[count: Int] = StaticTuple[Data[BYTE], count]
"""Where inputs of several dtypes lie.

Parameters:
    count: Inputs.
"""


# CPU


@always_inline
def _part[
    dtype: DType, //, expression: StaticString, dtypes: List[DType], repeats: Bool
](
    y: Data[dtype],
    sources: Sources[len(dtypes)],
    moves: StaticTuple[Bool, len(dtypes)],
    length: Int,
):
    """Computes part of a row. If an input repeats one number, vectors of it are made first."""
    comptime count = len(dtypes)
    comptime ROOM = WIDTH * 4
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
    var values = Array[SIMD[F32, WIDTH], count](fill=0)
    var whole = length // WIDTH * WIDTH
    for at in range(0, whole, WIDTH):
        comptime for i in range(count):
            comptime source = dtypes[i]
            var numbers = from_[i].unsafe_bitcast[Scalar[source]]()
            var place = at * steps[i] if repeats else at
            values[i] = widened(numbers.unsafe_load[width=WIDTH](place))
        y.unsafe_store(at, _evaluated[dtype, expression](values))
    if whole < length:
        var left = iota[DType.int32, WIDTH]().lt(Int32(length - whole))
        comptime for i in range(count):
            comptime source = dtypes[i]
            var numbers = from_[i].unsafe_bitcast[Scalar[source]]().unsafe_offset(whole * steps[i])
            values[i] = widened(masked_load[WIDTH](numbers, left, SIMD[source, WIDTH](0)))
        var value = _evaluated[dtype, expression](values)
        masked_store(value, y.unsafe_offset(whole), left)


@always_inline
def _evaluated[
    width: SIMDLength, count: Int, //, dtype: DType, expression: StaticString
](values: Array[SIMD[F32, width], count]) -> SIMD[dtype, width]:
    """Evaluates an expression, and rounds it to a dtype; a byte is a mask's."""
    comptime narrow = dtype.is_half_float()
    var value = evaluate[expression, narrow=narrow](values)
    comptime if dtype == BYTE:
        return value.ne(0).cast[dtype]()
    else:
        return narrowed[dtype](value)


def pointwise_cpu[
    dtype: DType, //, expression: StaticString, dtypes: List[DType]
](y: Data[dtype], sources: Sources[len(dtypes)], axes: Broadcast[len(dtypes)]):
    """Computes an expression on all cores.

    Parameters:
        dtype: Of the result: float32, bfloat16, or uint8 for masks.
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
            comptime for i in range(len(dtypes)):
                var skip = Int(axes.row[i](UInt32(row))) + (start if axes.moves[i] else 0)
                from_[i] = from_[i].unsafe_offset(skip * size_of[dtypes[i]]())
            # Whole rows up to the end of the first axis that numbers them.
            var run = 1
            if parts == 1:
                run = min(stop - piece, Int(axes.sizes[0]) - row % Int(axes.sizes[0]))
            for _ in range(run):
                if repeats:
                    _part[expression, dtypes, True](to, from_, axes.moves, count)
                else:
                    _part[expression, dtypes, False](to, from_, axes.moves, count)
                to = to.unsafe_offset(inner)
                comptime for i in range(len(dtypes)):
                    var skip = Int(axes.steps[i][0]) * size_of[dtypes[i]]()
                    from_[i] = from_[i].unsafe_offset(skip)
            piece += run

    over_cores(task, ceildiv(pieces, share))


# GPU


@__name(t"pointwise_{width}_{dtype}")
def pointwise_kernel[
    dtype: DType, expression: StaticString, dtypes: List[DType], width: Int
](
    y: Data[dtype],
    sources: Sources[len(dtypes)],
    axes: Broadcast[len(dtypes)],
    vectors: UInt32,
    per_row: UInt32,
):
    """Computes `width` numbers of an expression in each thread.

    Parameters:
        dtype: Of the result; uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.
        width: 16 bytes of numbers, or 1.

    Args:
        y: The result.
        sources: The inputs.
        axes: How they broadcast.
        vectors: What there is to compute.
        per_row: Vectors of a row.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var vector = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    if vector >= vectors:
        return
    var row = UInt32(0) if axes.axes == 0 else vector // per_row
    var column = Int(vector - row * per_row) * width
    var values = Array[SIMD[F32, width], len(dtypes)](fill=0)
    comptime for i in range(len(dtypes)):
        comptime source = dtypes[i]
        var numbers = (
            sources[i].unsafe_bitcast[Scalar[source]]().unsafe_offset(Int(axes.row[i](row)))
        )
        if axes.moves[i]:
            comptime bytes = min(16, width * size_of[source]())
            values[i] = widened(numbers.unsafe_load[width=width, alignment=bytes](column))
        else:
            values[i] = widened(numbers[unsafe_offset=0])
    comptime bytes = min(16, width * size_of[dtype]())
    y.unsafe_store[alignment=bytes](Int(vector) * width, _evaluated[dtype, expression](values))


def pointwise_gpu[
    dtype: DType, //, expression: StaticString, dtypes: List[DType]
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

    Args:
        y: The result.
        sources: The inputs.
        axes: How they broadcast.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime wide = 16 // _narrowest(dtype, dtypes)
    var inner = Int(axes.inner)
    var fits = inner % wide == 0
    var per_row = inner // wide if fits else inner
    var vectors = Int(axes.rows) * per_row
    comptime for i in range(2):
        comptime width = wide if i == 0 else 1
        if fits == (i == 0):
            ctx.enqueue_function[pointwise_kernel[dtype, expression, dtypes, width]](
                y,
                sources,
                axes,
                UInt32(vectors),
                UInt32(per_row),
                grid_dim=ceildiv(vectors, THREADS),
                block_dim=THREADS,
                attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
            )


def _narrowest(dtype: DType, dtypes: List[DType]) -> Int:
    """Gives the bytes of a number of the narrowest tensor that holds no masks."""
    var bytes = 4 if dtype == BYTE or dtype == F32 else 2
    for each in dtypes:
        if each != BYTE and each != F32:
            bytes = 2
    return bytes


# Op


@always_inline
def _axes[
    count: Int
](y: ManagedTensorSlice, sizes: StaticTuple[StaticTuple[Int, AXES], count]) -> Broadcast[count]:
    """Joins the axes that lie alike in every input; `sizes` are the last axis first."""
    var found = Broadcast[count]()
    var inner = True
    var open = False
    var lies = StaticTuple[Bool, count](fill=True)
    var step = StaticTuple[Int64, count](fill=1)
    for axis in range(y.rank):
        var size = y.shape()[y.rank - 1 - axis]
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
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert is_expression(
            split(expression), MOST
        ), "pointwise: no expression of x0 to x5"
        comptime assert y.rank <= AXES, "pointwise: expects a result of at most 6 axes"
        comptime all: List[DType] = [x0.dtype, x1.dtype, x2.dtype, x3.dtype, x4.dtype, x5.dtype]
        comptime dtypes = _in_memory(all, inputs_of(expression))
        comptime count = len(dtypes)
        comptime result = BYTE if y.dtype == DType.bool else y.dtype
        comptime assert (
            target != "cpu" or result == BYTE or ON_CPU[result]
        ), "pointwise: a CPU expects float32 or bfloat16"
        if y.size() == 0:
            return
        var sources = StaticTuple[Data[BYTE], MOST](fill=_bytes(x0))
        sources[1], sources[2], sources[3] = _bytes(x1), _bytes(x2), _bytes(x3)
        sources[4], sources[5] = _bytes(x4), _bytes(x5)
        var sizes = StaticTuple[StaticTuple[Int, AXES], MOST](fill=_sizes(x0))
        sizes[1], sizes[2], sizes[3] = _sizes(x1), _sizes(x2), _sizes(x3)
        sizes[4], sizes[5] = _sizes(x4), _sizes(x5)
        var used = Sources[count](fill=sources[0])
        var shapes = StaticTuple[StaticTuple[Int, AXES], count](fill=sizes[0])
        comptime for i in range(count):
            used[i], shapes[i] = sources[i], sizes[i]
        var axes = _axes(y, shapes)
        var to = rebind[Data[result]](data(y).unsafe_bitcast[Scalar[result]]())
        comptime if target == "cpu":
            pointwise_cpu[expression, dtypes](to, used, axes)
        else:
            pointwise_gpu[expression, dtypes](to, used, axes, ctx)


def _in_memory(dtypes: List[DType], count: Int) -> List[DType]:
    """Lists the dtypes of the inputs that are used; masks are bytes."""
    var found = List[DType]()
    for i in range(count):
        found.append(BYTE if dtypes[i] == DType.bool else dtypes[i])
    return found^


@always_inline
def _bytes(tensor: ManagedTensorSlice) -> Data[BYTE]:
    return rebind[Data[BYTE]](data(tensor).unsafe_bitcast[UInt8]())


@always_inline
def _sizes(tensor: ManagedTensorSlice) -> StaticTuple[Int, AXES]:
    """Lists the sizes of a tensor, the last axis first; 1 for those that it lacks."""
    var found = StaticTuple[Int, AXES](fill=1)
    comptime for axis in range(min(tensor.rank, AXES)):
        found[axis] = tensor.shape()[tensor.rank - 1 - axis]
    return found
