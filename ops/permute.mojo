"""Axes in another order: y[i_0, ..., i_n] = x[i at its axis], the numbers as they are.

Axes of size 1 are dropped and axes that stay neighbours are joined. Then one of two kernels runs:

- The last axis stays the last: rows are copied, in the widest pieces, of up to 16 bytes, that they
  divide into. So are single numbers where one of the two axes below is short.
- It moves: x holds matrices [P, Q], y holds them as [Q, P], and other axes number the matrices. A
  block takes a tile of 128 bytes along P and 64 numbers along Q through shared memory. Where numbers
  have 2 bytes, a thread pairs two rows of x, so that a word of shared memory is the same in y.

Bound by memory. A CPU copies rows too, and turns tiles of W x W numbers around in W registers: it
interleaves vector i with vector i + W / 2, log2 W times.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.runtime.asyncrt import parallelism_level
from std.bit import log2_floor
from std.math import ceildiv
from std.memory import bitcast, unsafe_memcpy, unsafe_stack_allocation
from std.sys import simd_width_of, size_of
from std.utils.static_tuple import StaticTuple

from .device import Device
from .division import quotient, reciprocal
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import U32, Data, data
from .parallel import over_cores

comptime AXES = 6
"""Axes of a tensor, at most."""
comptime THREADS = 256
"""Threads of a block."""
comptime PIECES = 4
"""Pieces of rows that a thread copies, at most."""
comptime FEW = 8
"""Numbers of an axis that are too few for tiles."""
comptime TILE = 64
"""Numbers of a tile along Q."""
comptime ROW = 128
"""Bytes of a tile along P."""
comptime LANES = 8
"""Lanes of a warp along Q while a tile is read; the other four are along P."""
comptime PIECE = 4096
"""Numbers that a task on a CPU copies, at least."""


struct Joined(TrivialRegisterPassable):
    """The axes of a permute, the last one of y first: none of size 1, and neighbours are one."""

    var sizes: StaticTuple[Int, AXES]
    """Indices of an axis."""
    var x: StaticTuple[Int, AXES]
    """From one index of an axis to the next in x."""
    var y: StaticTuple[Int, AXES]
    """The same in y."""
    var count: Int
    """How many axes there are."""
    var last_of_x: Int
    """Which axis is x's last."""
    var numbers: Int
    """Of the whole tensor."""

    def __init__(out self, sizes: StaticTuple[Int, AXES], steps: StaticTuple[Int, AXES]):
        """Joins axes.

        Args:
            sizes: Of y, the last axis first; no size is 0, and those of axes that are not there are
                1.
            steps: From one number of such an axis to the next in x.
        """
        self.sizes = StaticTuple[Int, AXES](fill=1)
        self.x = StaticTuple[Int, AXES](fill=1)
        self.y = StaticTuple[Int, AXES](fill=1)
        self.count, self.last_of_x, self.numbers = 0, 0, 1
        for axis in range(AXES):
            var size, step = sizes[axis], steps[axis]
            if size == 1:
                continue
            var last = self.count - 1
            if last >= 0 and self.sizes[last] * self.x[last] == step:
                self.sizes[last] *= size
            else:
                self.sizes[self.count], self.x[self.count] = size, step
                self.y[self.count] = self.numbers
                if step == 1:
                    self.last_of_x = self.count
                self.count += 1
            self.numbers *= size

    def of(self, number: Int, first: Int) -> Tuple[Int, Int]:
        """Finds where something lies that the axes from one on number, but for x's last axis.

        Args:
            number: Of it.
            first: The axis; from 1 on.

        Returns:
            What to skip in x, and in y.
        """
        var left, in_x, in_y = number, 0, 0
        for axis in range(first, self.count):
            if axis == self.last_of_x:
                continue
            var index: Int
            left, index = divmod(left, self.sizes[axis])
            in_x += index * self.x[axis]
            in_y += index * self.y[axis]
        return in_x, in_y


struct Axes(KernelArgument, TrivialRegisterPassable):
    """Axes whose indices number something, the last one first, and where that lies in x and y."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: StaticTuple[Int64, AXES]
    """From one index of an axis to the next in x."""
    var y: StaticTuple[Int64, AXES]
    """The same in y."""
    var sizes: StaticTuple[UInt32, AXES]
    """Indices of an axis; fewer than 2^31."""
    var factors: StaticTuple[UInt32, AXES]
    """What division by a size multiplies by (division.mojo)."""
    var shifts: StaticTuple[UInt32, AXES]
    """And what it shifts by then."""
    var count: Int32
    """How many axes there are."""

    def __init__(out self):
        """Begins without an axis."""
        self.x = StaticTuple[Int64, AXES](fill=0)
        self.y = StaticTuple[Int64, AXES](fill=0)
        self.sizes = StaticTuple[UInt32, AXES](fill=1)
        self.factors = StaticTuple[UInt32, AXES](fill=1)
        self.shifts = StaticTuple[UInt32, AXES](fill=0)
        self.count = 0

    def add(mut self, size: Int, x: Int, y: Int):
        """Adds an axis.

        Args:
            size: Of it.
            x: From one index to the next in x.
            y: The same in y.
        """
        var axis = Int(self.count)
        self.x[axis], self.y[axis], self.sizes[axis] = Int64(x), Int64(y), UInt32(size)
        self.factors[axis], self.shifts[axis] = reciprocal(size)
        self.count += 1

    @always_inline
    def quotient[axis: Int](self, number: UInt32) -> UInt32:
        """Divides by the size of an axis.

        Parameters:
            axis: Which.

        Args:
            number: Less than 2^31.

        Returns:
            The quotient.
        """
        return quotient(number, self.factors[axis], self.shifts[axis])

    @always_inline
    def of[first: Int = 0](self, number: UInt32) -> Tuple[Int64, Int64]:
        """Finds where something lies.

        Parameters:
            first: The axis to begin with.

        Args:
            number: Of it; less than 2^31.

        Returns:
            What to skip in x, and in y.
        """
        var rest = number
        var x, y = Int64(0), Int64(0)
        comptime for axis in range(first, AXES):  # an index at run time would put these in memory
            if axis < Int(self.count):
                var index = rest
                if axis < Int(self.count) - 1:
                    var whole = self.quotient[axis](rest)
                    index = rest - whole * self.sizes[axis]
                    rest = whole
                x += Int64(index) * self.x[axis]
                y += Int64(index) * self.y[axis]
        return x, y


# The last axis stays


@__name(t"permute_rows_{word}x{width}")
def rows_kernel[word: DType, width: Int](x: Data[word], y: Data[word], axes: Axes, count: UInt32):
    """Copies pieces of rows, up to `PIECES` of them in each thread.

    Parameters:
        word: What a piece is made of.
        width: Words of a piece.

    Args:
        x: The tensor.
        y: The result.
        axes: Of pieces, in the order of y.
        count: How many pieces there are.
    """
    comptime bytes = width * size_of[word]()
    var first = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    var step = UInt32(grid_dim.x) * THREADS
    wait_on_dependent_grids()
    launch_dependent_grids()
    if first + (PIECES - 1) * step < count:
        var held = Array[SIMD[word, width], PIECES](fill=0)
        comptime for i in range(PIECES):
            var at = Int(axes.of(first + UInt32(i) * step)[0]) * width
            held[i] = x.unsafe_load[width=width, alignment=bytes](at)
        comptime for i in range(PIECES):
            y.unsafe_store[alignment=bytes](Int(first + UInt32(i) * step) * width, held[i])
    else:  # no branch around each of several loads: they would wait for one another
        for piece in range(first, count, step):
            var at = Int(axes.of(piece)[0]) * width
            var value = x.unsafe_load[width=width, alignment=bytes](at)
            y.unsafe_store[alignment=bytes](Int(piece) * width, value)


def _enqueue_rows[
    word: DType, width: Int
](x: Data[word], y: Data[word], axes: Axes, count: Int, ctx: DeviceContext) raises:
    """Enqueues copies of pieces: several a thread if all multiprocessors are full without."""
    if count >= 1 << 31:
        raise Error("permute: expects fewer than 2^31 pieces of rows but has ", count)
    var full = Device(ctx).multiprocessors * 2048
    var pieces = PIECES if count >= PIECES * full else 1
    launch[rows_kernel[word, width]](
        ctx,
        x,
        y,
        axes,
        UInt32(count),
        grid_dim=ceildiv(count, THREADS * pieces),
        block_dim=THREADS,
    )


# The last axis moves


@__name(t"permute_tiles_{bits}")
def tiles_kernel[
    bits: DType
](
    x: Data[bits],
    y: Data[bits],
    axes: Axes,
    rows: UInt32,
    columns: UInt32,
    wide_x: UInt32,
    wide_y: UInt32,
    shift: UInt32,
):
    """Turns over a tile of a matrix in each block.

    In shared memory a tile is 64 rows of y, of 32 words. Groups of 4 words lie in another place in
    each row of 8, by which lanes meet in no bank: neither those that write a column, nor those that
    read a row.

    Parameters:
        bits: `uint16` or `uint32`, whatever the numbers are.

    Args:
        x: Matrices [rows, columns].
        y: Matrices [columns, rows].
        axes: Of tiles: those along the rows, those along the columns, those that number matrices.
            The first two have the tiles' number as their size, but are stepped number by number.
        rows: Of a matrix in x.
        columns: Of a matrix in x.
        wide_x: Numbers that are read at once, a power of two; they divide the columns.
        wide_y: Numbers that are written at once, a power of two; they divide the rows.
        shift: Logarithm of `wide_x`.
    """
    comptime size = size_of[bits]()
    comptime pack = 4 // size
    comptime logs = 4 if size == 2 else 3
    var tile = unsafe_stack_allocation[
        TILE * ROW // 4, UInt32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var t = UInt32(thread_idx.x)
    var block = UInt32(block_idx.x)
    var rest = axes.quotient[0](block)
    var number = axes.quotient[1](rest)
    var p0 = (block - rest * axes.sizes[0]) * UInt32(ROW // size)
    var q0 = (rest - number * axes.sizes[1]) * TILE
    var skip = axes.of[2](number)
    wait_on_dependent_grids()
    launch_dependent_grids()

    var lane = t % LANES
    var within = t // LANES % 4
    var group = t // 32
    # What lies outside of the matrix is read at its edge, and not stored: with a branch around each
    # load, loads would wait for one another.
    var source = Array[Data[bits], pack](fill=x)
    comptime for j in range(pack):
        var p = min(p0 + (4 * group + within) * UInt32(pack) + UInt32(j), rows - 1)
        source[j] = x.unsafe_offset(Int(skip[0] + Int64(p) * axes.x[0]))
    comptime for log in range(logs):
        comptime width = 1 << log
        if wide_x & UInt32(width):  # equality would become a table of jumps
            comptime bytes = width * size
            comptime rounds = TILE // (LANES * width)
            var held = Array[SIMD[bits, width], rounds * pack](fill=0)
            comptime for i in range(rounds):
                var q = q0 + (UInt32(i * LANES) + lane) * UInt32(width)
                var at = Int(min(q, columns - UInt32(width)))
                comptime for j in range(pack):
                    held[i * pack + j] = source[j].unsafe_load[width=width, alignment=bytes](at)
            comptime for i in range(rounds):
                var words: SIMD[U32, width]
                comptime if pack == 1:
                    words = bitcast[U32, width](held[i])
                else:
                    words = held[2 * i].cast[U32]() | (held[2 * i + 1].cast[U32]() << 16)
                var q = (UInt32(i * LANES) + lane) * UInt32(width)
                comptime for k in range(width):
                    var at = (q + UInt32(k)) * (ROW // 4) + 4 * (group ^ lane) + within
                    tile[unsafe_offset=Int(at)] = words[k]
    barrier()

    comptime for log in range(logs):
        comptime width = 1 << log
        if wide_y & UInt32(width):
            comptime bytes = width * size
            comptime across = ROW // bytes
            var column = t % UInt32(across) * UInt32(bytes)
            var p_out = p0 + column // UInt32(size)
            var to = y.unsafe_offset(Int(skip[1] + Int64(p_out)))
            comptime for i in range(TILE * across // THREADS):
                var q = t // UInt32(across) + UInt32(i * (THREADS // across))
                var place = (column // 16) ^ ((q >> shift) % LANES)
                var at = q * ROW + place * 16 + column % 16
                var numbers = tile.unsafe_bitcast[Scalar[bits]]().unsafe_load[
                    width=width, alignment=bytes
                ](Int(at) // size)
                if q0 + q < columns and p_out < rows:
                    to.unsafe_store[alignment=bytes](Int(Int64(q0 + q) * axes.y[1]), numbers)


def _enqueue_tiles[
    bits: DType
](x: Data[bits], y: Data[bits], axes: Axes, rows: Int, columns: Int, ctx: DeviceContext) raises:
    """Enqueues one block for each tile; see `tiles_kernel`."""
    var tiles = 1
    for axis in range(Int(axes.count)):
        tiles *= Int(axes.sizes[axis])
    var shift = _wide(x, columns)
    launch[tiles_kernel[bits]](
        ctx,
        x,
        y,
        axes,
        UInt32(rows),
        UInt32(columns),
        UInt32(1 << shift),
        UInt32(1 << _wide(y, rows)),
        UInt32(shift),
        grid_dim=tiles,
        block_dim=THREADS,
    )


# CPU


@always_inline
def transposed[
    dtype: DType, side: SIMDLength, //
](rows: Array[SIMD[dtype, side], side]) -> Array[SIMD[dtype, side], side]:
    """Transposes a tile, by interleaving rows half a tile apart as often as it can be halved.

    Parameters:
        dtype: Of the numbers.
        side: Of the tile; a power of two.

    Args:
        rows: The tile.

    Returns:
        Its columns.
    """
    var now = rows.copy()
    comptime for _ in range(log2_floor(Int(side))):
        var then = now.copy()
        comptime for i in range(side // 2):
            var both = now[i].interleave(now[i + side // 2])
            then[2 * i] = both.slice[side]()
            then[2 * i + 1] = both.slice[side, offset=side]()
        now = then^
    return now^


@no_inline
def permute_cpu[bits: DType](x: Data[bits], y: Data[bits], axes: Joined):
    """Permutes on all cores.

    Parameters:
        bits: An unsigned integer of the numbers' size.

    Args:
        x: The tensor, dense.
        y: The result.
        axes: Where the numbers are.
    """
    var length, tiled = axes.sizes[0], axes.last_of_x > 0
    var columns = axes.sizes[axes.last_of_x]
    # A unit is a row of y, or tiles beside each other that give `SIDE` rows of it.
    comptime SIDE = min(simd_width_of[bits](), 16)
    var across = ceildiv(columns, SIDE)
    var units = axes.numbers // length
    if tiled:
        units = units // columns * across
    var share = max(
        ceildiv(PIECE, axes.numbers // units), ceildiv(units, 4 * parallelism_level(None))
    )

    def task(index: Int) {imm}:
        var first, last = index * share, min(index * share + share, units)
        if tiled:
            for unit in range(first, last):
                var matrix, column = divmod(unit, across)
                var in_x, in_y = axes.of(matrix, 1)
                _turn_over[bits, SIDE](
                    x.unsafe_offset(in_x), y.unsafe_offset(in_y), axes, column * SIDE
                )
            return
        var row = first
        while row < last:
            var outer, at = divmod(row, axes.sizes[1])
            var count = min(axes.sizes[1] - at, last - row)
            var source = x.unsafe_offset(axes.of(outer, 2)[0])
            for i in range(count):
                unsafe_memcpy(
                    dest=y.unsafe_offset((row + i) * length),
                    src=source.unsafe_offset((at + i) * axes.x[1]),
                    count=length,
                )
            row += count

    over_cores(task, ceildiv(units, share))


@no_inline
def _turn_over[bits: DType, side: Int](x: Data[bits], y: Data[bits], axes: Joined, first: Int):
    """Turns `side` columns of a matrix of x into rows of y, from `first` on."""
    var rows, columns = axes.sizes[0], axes.sizes[axes.last_of_x]
    var in_x, in_y = axes.x[0], axes.y[axes.last_of_x]
    if rows < side or columns < side:
        for column in range(first, min(first + side, columns)):
            for row in range(rows):
                y[unsafe_offset=column * in_y + row] = x[unsafe_offset=row * in_x + column]
        return
    # The last tile ends with the last row or column: some numbers are copied twice.
    var column = min(first, columns - side)
    for tile in range(0, rows, side):
        var row = min(tile, rows - side)
        var held = Array[SIMD[bits, side], side](fill=0)
        comptime for i in range(side):
            held[i] = x.unsafe_load[width=side]((row + i) * in_x + column)
        var turned = transposed(held)
        comptime for i in range(side):
            y.unsafe_store((column + i) * in_y + row, turned[i])


# Op


def _wide[bits: DType, //](tensor: Data[bits], length: Int) -> Int:
    """Gives the logarithm of the numbers of the widest vector that rows of a length divide into."""
    var log = 0
    while (size_of[bits]() << log) < 16:
        var twice = 2 << log
        if length % twice or Int(tensor) % (twice * size_of[bits]()):
            break
        log += 1
    return log


def permute_gpu[bits: DType](x: Data[bits], y: Data[bits], axes: Joined, ctx: DeviceContext) raises:
    """Enqueues a permute.

    Parameters:
        bits: `uint16` or `uint32`, whatever the numbers are.

    Args:
        x: The tensor, dense.
        y: The result.
        axes: Where the numbers are.
        ctx: The GPU.

    Raises:
        If there are too many numbers, or the launch fails.
    """
    var rows, columns = axes.sizes[0], axes.sizes[axes.last_of_x]
    if axes.last_of_x > 0 and min(rows, columns) >= FEW:
        var tiles = Axes()
        tiles.add(ceildiv(rows, ROW // size_of[bits]()), axes.x[0], 1)
        tiles.add(ceildiv(columns, TILE), 1, axes.y[axes.last_of_x])
        for axis in range(1, axes.count):
            if axis != axes.last_of_x:
                tiles.add(axes.sizes[axis], axes.x[axis], axes.y[axis])
        _enqueue_tiles(x, y, tiles, rows, columns, ctx)
        return

    var log = 0 if axes.last_of_x > 0 else min(_wide(x, rows), _wide(y, rows))
    var pieces = Axes()
    if rows >> log > 1:
        pieces.add(rows >> log, axes.x[0], 0)
    for axis in range(1, axes.count):
        pieces.add(axes.sizes[axis], axes.x[axis] >> log, 0)
    comptime for i in range(4 if size_of[bits]() == 2 else 3):
        if log == i:
            comptime bytes = size_of[bits]() << i
            comptime word = bits if bytes < 4 else U32
            comptime width = bytes // size_of[word]()
            _enqueue_rows[word, width](
                rebind[Data[word]](x.unsafe_bitcast[Scalar[word]]()),
                rebind[Data[word]](y.unsafe_bitcast[Scalar[word]]()),
                pieces,
                axes.numbers >> log,
                ctx,
            )


@register("permute")
struct Permute:
    """Lays the axes of a tensor out in another order."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        order: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: The result, of up to 6 axes.
            x: The tensor, in a dtype of 2 or 4 bytes.
            order: The axis of x that each axis of y is, in host memory.
            ctx: The device.

        Raises:
            If there are too many numbers, or a launch fails.
        """
        comptime assert y.rank <= AXES, "permute: expects at most 6 axes"
        comptime size = size_of[y.dtype]()
        comptime assert size == 2 or size == 4, "permute: expects numbers of 2 or 4 bytes"
        if y.size() == 0:
            return
        var sizes = StaticTuple[Int, AXES](fill=1)
        var steps = StaticTuple[Int, AXES](fill=0)
        var axes = data(order)
        for axis in range(y.rank):
            var from_ = Int(axes[unsafe_offset=y.rank - 1 - axis])
            sizes[axis] = y.shape()[y.rank - 1 - axis]
            steps[axis] = 1
            for inner in range(from_ + 1, y.rank):
                steps[axis] *= x.shape()[inner]
        comptime bits = DType.uint16 if size == 2 else U32
        var source = rebind[Data[bits]](data(x).unsafe_bitcast[Scalar[bits]]())
        var result = rebind[Data[bits]](data(y).unsafe_bitcast[Scalar[bits]]())
        comptime if target == "cpu":
            permute_cpu[bits](source, result, Joined(sizes, steps))
        else:
            permute_gpu[bits](source, result, Joined(sizes, steps), ctx)
