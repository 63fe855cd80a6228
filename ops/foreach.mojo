"""One expression of many tensors, in one launch: y_i = expression(x_i0, x_i1, ...) of each member i.

All tensors of a member have one shape, and members have shapes of their own; operand by operand all
members have the same dtype. A training step casts hundreds of weights and gradients, and updates
hundreds of statistics: small tensors, of which each took a launch. Bound by memory; where all members
together are small, by the launch.

A table of the members goes to the kernel among its arguments, of which there may be 4 KB, so it bounds
their number. Members are cut into chunks. A GPU's block takes one, and searches the table for whose
it is. It computes vectors of 16 bytes, and what is left behind them number by number; so it computes
all of a member of which a tensor lies unaligned, as those of a graph's inputs may. A CPU's cores take
chunks in turn.
"""

from extensibility import Input, Output, TensorTuple, TileTensorable, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .expression import inputs_of, is_expression, split
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import CHECKED, I64, Data, Global, widened
from .parallel import over_cores
from .pointwise import BYTE, MOST, PIECE, Sources, evaluated, in_memory, narrowest, part_cpu, widest

comptime ROOM = 4000
"""Bytes of the table of members; graphs/elementwise.py counts with it, too."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime REGISTERS = 64
"""What a thread's numbers may take before they are computed with."""


struct Members[count: Int](Copyable, KernelArgument):
    """Where the tensors of the members lie, and which chunks are theirs.

    Parameters:
        count: Inputs of a member.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""
    comptime MOST = ROOM // (8 * (Self.count + 2))
    """How many members there may be."""

    var there: Int32
    """How many there are."""
    var chunks: Int32
    """Chunks of all of them."""
    var starts: Array[Int32, Self.MOST]
    """Chunks of the members before each."""
    var lengths: Array[Int32, Self.MOST]
    """Numbers of a tensor of each."""
    var y: Array[Data[BYTE], Self.MOST]
    """The result of each."""
    var x: Array[Sources[Self.count], Self.MOST]
    """The inputs of each."""

    def __init__(out self, any: Data[BYTE]):
        """Begins with no member.

        Args:
            any: Any pointer.
        """
        self.there, self.chunks = 0, 0
        self.starts = Array[Int32, Self.MOST](fill=0)
        self.lengths = Array[Int32, Self.MOST](fill=0)
        self.y = Array[Data[BYTE], Self.MOST](fill=any)
        self.x = Array[Sources[Self.count], Self.MOST](fill=Sources[Self.count](fill=any))

    def add(mut self, y: Data[BYTE], x: Sources[Self.count], length: Int, chunk: Int) raises:
        """Adds a member.

        Args:
            y: Its result.
            x: Its inputs.
            length: Numbers of each of them; there may be none.
            chunk: Numbers of a chunk.

        Raises:
            If there are too many.
        """
        if length >= 1 << 31:
            raise Error("foreach: expects fewer than 2^31 numbers but has ", length)
        var member = Int(self.there)
        self.y[member], self.x[member] = y, x
        self.starts[member], self.lengths[member] = self.chunks, Int32(length)
        self.there += 1
        self.chunks += Int32(ceildiv(length, chunk))

    @always_inline
    def member(self, chunk: Int32) -> Int:
        """Finds whose a chunk is.

        Args:
            chunk: Its number, less than `chunks`.

        Returns:
            The last member that begins with it or before; so none that is empty.
        """
        var low, high = Int32(0), self.there - 1
        while low < high:
            var middle = (low + high + 1) // 2
            if self.starts[Int(middle)] <= chunk:
                low = middle
            else:
                high = middle - 1
        return Int(low)


# CPU


def foreach_cpu[
    dtype: DType, expression: StaticString, dtypes: List[DType]
](members: Members[len(dtypes)]):
    """Computes chunks on all cores.

    Parameters:
        dtype: Of the results: float32, bfloat16, float64, int64, or uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.

    Args:
        members: The tensors, in chunks of `PIECE` numbers.
    """
    comptime count = len(dtypes)

    def task(chunk: Int) {imm}:
        var member = members.member(Int32(chunk))
        var first = (chunk - Int(members.starts[member])) * PIECE
        var y = rebind[Data[dtype]](members.y[member].unsafe_bitcast[Scalar[dtype]]())
        var x = members.x[member]
        comptime for i in range(count):
            x[i] = x[i].unsafe_offset(first * size_of[dtypes[i]]())
        part_cpu[expression, dtypes, False](
            y.unsafe_offset(first),
            x,
            StaticTuple[Bool, count](fill=True),
            min(PIECE, Int(members.lengths[member]) - first),
        )

    over_cores(task, Int(members.chunks))


# GPU


def pieces_of(width: Int, count: Int) -> Int:
    """Chooses how many vectors a thread loads before it computes: as many as its registers hold.

    Args:
        width: Numbers of a vector.
        count: Inputs.

    Returns:
        From 1 to 4.
    """
    return min(4, max(1, REGISTERS // (width * count)))


@__name(t"foreach_{dtype}")
@__llvm_arg_metadata(members, `nvvm.grid_constant`)
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def foreach_kernel[
    dtype: DType, expression: StaticString, dtypes: List[DType]
](members: Members[len(dtypes)]):
    """Computes a chunk in each block.

    Parameters:
        dtype: Of the results; uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.

    Args:
        members: The tensors, in chunks of as much as `pieces_of` lets a block's threads compute.
    """
    comptime wide = 16 // narrowest(dtype, dtypes)
    comptime chunk = THREADS * wide * pieces_of(wide, len(dtypes))
    var number = Int32(block_idx.x)
    var member = members.member(number)
    var first = Int(number - members.starts[member]) * chunk
    var length = min(chunk, Int(members.lengths[member]) - first)
    var y = Int(members.y[member])
    var aligned = y % 16 == 0
    y += first * size_of[dtype]()
    var x = StaticTuple[Int, len(dtypes)](fill=0)
    comptime for i in range(len(dtypes)):
        x[i] = Int(members.x[member][i])
        aligned &= x[i] % 16 == 0
        x[i] += first * size_of[dtypes[i]]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var done = 0
    if aligned:
        done = length // wide * wide
        _compute[dtype, expression, dtypes, wide](y, x, 0, done)
    _compute[dtype, expression, dtypes, 1](y, x, done, length)


@always_inline
def _compute[
    dtype: DType, expression: StaticString, dtypes: List[DType], width: Int
](y: Int, x: StaticTuple[Int, len(dtypes)], start: Int, stop: Int):
    """Computes the numbers from one to another of tensors at some addresses, by vectors.

    A thread loads several before it computes. What it lacks is the first vector again: with a branch
    around each load, loads would wait for one another.
    """
    comptime count = len(dtypes)
    comptime work = widest(dtype, dtypes)
    comptime pieces = pieces_of(width, count)
    for at in range(start, stop, pieces * THREADS * width):
        var first = at + Int(thread_idx.x) * width
        var values = Array[Array[SIMD[work, width], count], pieces](
            fill=Array[SIMD[work, width], count](fill=0)
        )
        comptime for piece in range(pieces):
            var place = first + piece * THREADS * width
            comptime for i in range(count):
                comptime source = dtypes[i]
                comptime bytes = min(16, width * size_of[source]())
                var numbers = Global[source](unsafe_from_address=x[i])
                values[piece][i] = widened[work](
                    numbers.unsafe_offset(place if place < stop else start).unsafe_load[
                        width=width, alignment=bytes
                    ]()
                )
        comptime for piece in range(pieces):
            var place = first + piece * THREADS * width
            if place < stop:
                comptime bytes = min(16, width * size_of[dtype]())
                var to = Global[dtype](unsafe_from_address=y).unsafe_offset(place)
                to.unsafe_store[alignment=bytes](evaluated[dtype, expression](values[piece]))


@no_inline  # once, not for each node of a graph
def foreach_gpu[
    dtype: DType, expression: StaticString, dtypes: List[DType]
](members: Members[len(dtypes)], ctx: DeviceContext) raises:
    """Enqueues an expression of all members.

    Parameters:
        dtype: Of the results; uint8 for masks.
        expression: What is computed.
        dtypes: Of the inputs.

    Args:
        members: The tensors, in the kernel's chunks; there is one.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[foreach_kernel[dtype, expression, dtypes]](
        ctx, members, grid_dim=Int(members.chunks), block_dim=THREADS
    )


# Op


@register("foreach")
struct Foreach:
    """Computes an expression of x0, x1, ... of each member."""

    @staticmethod
    def execute[
        Results: TypeList[Trait=TileTensorable & Output, ...],
        Inputs: TypeList[Trait=TileTensorable & Input, ...],
        //,
        target: StaticString,
        expression: StaticString,
    ](y: TensorTuple[*Results], x: TensorTuple[*Inputs], ctx: DeviceContext) raises:
        """Runs the op.

        Parameters:
            Results: Types of the results, of one dtype.
            Inputs: Types of the inputs.
            target: "cpu" or "gpu".
            expression: What is computed (graphs/elementwise.py).

        Args:
            y: The result of each member; bool takes what is not 0 as true.
            x: The inputs of the first member, in their order, then those of the second, and so on, each
                in the shape of the member's result.
            ctx: The device.

        Raises:
            If there are too many numbers, or the launch fails.
        """
        comptime assert is_expression(split(expression), MOST), "foreach: no expression of x0 to x7"
        comptime dtypes = _dtypes[Inputs, inputs_of(expression)]()
        comptime count = len(dtypes)
        comptime assert len(Inputs) == count * len(
            Results
        ), "foreach: expects inputs of each member"
        comptime assert len(Results) <= Members[count].MOST, "foreach: expects fewer members"
        comptime dtype = in_memory(Results[0].dtype)
        comptime for i in range(len(Results)):
            comptime assert in_memory(Results[i].dtype) == dtype, "foreach: expects one dtype"
        comptime for i in range(len(Inputs)):
            comptime assert (
                in_memory(Inputs[i].dtype) == dtypes[i % count]
            ), "foreach: expects the dtypes of the first member"
        comptime assert (
            target != "cpu" or dtype == BYTE or dtype == I64 or CHECKED[dtype]
        ), "foreach: a CPU expects float32, bfloat16, float64 or int64"
        comptime wide = 16 // narrowest(dtype, dtypes)
        comptime chunk = PIECE if target == "cpu" else THREADS * wide * pieces_of(wide, count)
        var members = Members[count](_bytes(y[0]))
        comptime for member in range(len(Results)):
            var sources = Sources[count](fill=_bytes(y[0]))
            comptime for i in range(count):
                sources[i] = _bytes(x[member * count + i])
            var length = y[member].to_tile_tensor().num_elements()
            members.add(_bytes(y[member]), sources, length, chunk)
        if members.chunks == 0:
            return
        comptime if target == "cpu":
            foreach_cpu[dtype, expression, dtypes](members)
        else:
            foreach_gpu[dtype, expression, dtypes](members, ctx)


def _dtypes[Inputs: TypeList[Trait=TileTensorable & Input, ...], count: Int]() -> List[DType]:
    """Lists the dtypes of a member's inputs, as they lie in memory."""
    var found = List[DType]()
    comptime for i in range(count):
        found.append(in_memory(Inputs[i].dtype))
    return found^


@always_inline
def _bytes[Kind: TileTensorable, //](tensor: Kind) -> Data[BYTE]:
    """Takes the memory of an op's tensor, of whichever dtype and rank."""
    var first = tensor.to_tile_tensor().ptr.unsafe_mut_cast[True]()
    return rebind[Data[BYTE]](first.unsafe_bitcast[UInt8]())
