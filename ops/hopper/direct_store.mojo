"""Stores sums from registers to global memory: results are not staged in shared memory.

That takes more instructions, but saves the staging and its barriers, which pays for one small tile a block.
The bias is in shared memory, and `pool_pairs` adds up through it.

    Outputs, finish_pairs   pair by pair
    pool_pairs              the same, but the mean of the tile's rows is stored in place of these
    store_rows              8 numbers a thread at a time, which neighbours exchange first
"""

from max.gpu.primitives import warp
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Channels, Epilogue, apply
from ..operands import F32, Data, narrowed, stored
from .accumulator import Fragment, pair
from .epilogue import EpilogueTensors
from .moments import GROUP, RowNorm, RowSums
from .ptx import shared_load2, shared_load_float, shared_store_float, sync_threads
from .scheduler import Share
from .shared import WARP, WARPGROUP


@always_inline
def store_rows[
    dtype: DType, columns: Int
](
    y: Data[dtype],
    at: Fragment,
    sums: StaticTuple[Float32, _],
    scale: SIMD[F32, 2],
    *,
    row: Int32,
    rows: Int32,
    column: Int32,
    pitch: Int32,
    zero: Float32 = 0,
):
    """Stores 64 rows of sums in global memory, 8 numbers a thread at a time.

    Of every 32 columns the four threads of a row hold 2 of each eight; they exchange them, so that
    each stores 8 neighbours: those of both rows at once if numbers have 8 bits.

    Parameters:
        dtype: Of the result, 16 bits or 8.
        columns: How many, a multiple of 32.

    Args:
        y: The result, a matrix.
        at: The thread's place.
        sums: Of the thread.
        scale: Of each of the thread's two rows.
        row: The first row of y.
        rows: How many rows are to be stored; all if 64 or more.
        column: The first column of y, a multiple of 8.
        pitch: Columns of y, a multiple of 8.
        zero: Zero point of a result of integers; floats have none.
    """
    comptime assert (
        size_of[dtype]() <= 2 and columns % 32 == 0
    ), "store_rows: 32 of 16 bits, or of 8"
    var b = at.t % 4
    comptime if size_of[dtype]() == 1:
        comptime for k in range(columns // 32):
            var r = SIMD[DType.uint32, 4](0)
            comptime for j in range(4):
                var low = pair[4 * k + j, 0](sums) * scale[0]
                var high = pair[4 * k + j, 1](sums) * scale[1]
                r[j] = bitcast[DType.uint32, 1](stored[dtype](low.join(high), zero))
            var eights = bitcast[DType.uint16, 8](_turned(r, b)).deinterleave()
            comptime for half in range(2):
                if at.row() + Int32(8 * half) < rows:
                    var to = (
                        Int(row + at.row() + Int32(8 * half)) * Int(pitch)
                        + Int(column)
                        + Int(32 * k)
                        + Int(8 * b)
                    )
                    y.unsafe_offset(to).unsafe_bitcast[UInt16]().unsafe_store[alignment=8](
                        0, eights[half]
                    )
        return
    comptime for half in range(2):
        comptime for k in range(columns // 32):
            var r = SIMD[DType.uint32, 4](0)
            comptime for j in range(4):
                var scaled = pair[4 * k + j, half](sums) * scale[half]
                r[j] = bitcast[DType.uint32, 1](scaled.cast[dtype]())
            r = _turned(r, b)
            if at.row() + Int32(8 * half) < rows:
                var to = (
                    Int(row + at.row() + Int32(8 * half)) * Int(pitch)
                    + Int(column)
                    + Int(32 * k)
                    + Int(8 * b)
                )
                y.unsafe_offset(to).unsafe_bitcast[UInt32]().unsafe_store[alignment=16](0, r)


@always_inline
def _turned(square: SIMD[DType.uint32, 4], b: Int32) -> SIMD[DType.uint32, 4]:
    """Turns over a 4 x 4 square: four neighbouring threads, this one the b-th, hold a row each."""
    var r = square
    var odd = b & 1 != 0
    var upper = b & 2 != 0
    comptime for j in range(0, 4, 2):
        var got = warp.shuffle_xor(r[j] if odd else r[j + 1], 1)
        if odd:
            r[j] = got
        else:
            r[j + 1] = got
    comptime for j in range(2):
        var got = warp.shuffle_xor(r[j] if upper else r[j + 2], 2)
        if upper:
            r[j] = got
        else:
            r[j + 2] = got
    return r


struct Outputs[count: Int](TrivialRegisterPassable):
    """Where in y[M, F] the pairs of sums belong that a thread stores straight from its registers.

    Parameters:
        count: Pairs at most.
    """

    var low: Int32
    """The pixel of the thread's first row; -1 if there is none."""
    var high: Int32
    """The pixel of its second row, likewise."""
    var f0: Int32
    """The tile's first filter."""
    var filters: Int32
    """F."""
    var column: Int32
    """The thread's first column."""
    var pairs: Share
    """Those that the thread stores, as accumulator.mojo numbers them."""

    @always_inline
    def __init__(
        out self,
        at: Fragment,
        *,
        low: Int32,
        high: Int32,
        f0: Int32,
        filters: Int32,
        pairs: Share,
    ):
        """Takes the thread's place.

        Args:
            at: The place.
            low: Pixel of its first row; -1 if there is none.
            high: Pixel of its second row, likewise.
            f0: The tile's first filter.
            filters: F.
            pairs: Those that the thread stores: all, or a block's part of those of a cluster.
        """
        self.low, self.high, self.f0, self.filters = low, high, f0, filters
        self.column, self.pairs = at.column(), pairs

    @always_inline
    def column_of(self, i: Int) -> Int32:
        """Finds the first column of a pair.

        Args:
            i: Which of those that the thread stores.

        Returns:
            In the tile.
        """
        return ((self.pairs.begin + Int32(i)) & ~1) * 4 + self.column

    @always_inline
    def is_high(self, i: Int) -> Bool:
        """Tells in which of the thread's two rows a pair is.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Whether it is in the second.
        """
        return (self.pairs.begin + Int32(i)) & 1 == 1

    @always_inline
    def pixel_of(self, i: Int) -> Int32:
        """Finds the pixel of a pair.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Its number; -1 if there is none.
        """
        return self.high if self.is_high(i) else self.low

    @always_inline
    def stores(self, i: Int) -> Bool:
        """Tells whether a pair is one of y.

        Args:
            i: Which, below `count`.

        Returns:
            False beyond its edges, and beyond the pairs that the thread stores.
        """
        return (
            Int32(i) < self.pairs.count()
            and self.pixel_of(i) >= 0
            and self.f0 + self.column_of(i) < self.filters
        )

    @always_inline
    def place(self, i: Int) -> Int:
        """Finds a pair in y.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Where it begins.
        """
        return Int(self.pixel_of(i)) * Int(self.filters) + Int(self.f0 + self.column_of(i))

    @always_inline
    def load_residual[
        dtype: DType, epilogue: Epilogue, //
    ](self, tensors: EpilogueTensors[dtype, epilogue, 1]) -> StaticTuple[
        SIMD[dtype, 2], Self.count
    ]:
        """Reads the residual ahead: before its sums are there.

        Parameters:
            dtype: Of the residual.
            epilogue: What the sums go through; without a residual nothing is read.

        Args:
            tensors: Of the product.

        Returns:
            Of each pair.
        """
        var residual = StaticTuple[SIMD[dtype, 2], Self.count](fill=SIMD[dtype, 2](0))
        comptime if epilogue.joins:
            comptime for i in range(Self.count):
                if self.stores(i):
                    residual[i] = tensors.residual[0].unsafe_load[
                        width=2, alignment=2 * size_of[dtype]()
                    ](self.place(i))
        return residual


@always_inline
def finish_pairs[
    dtype: DType, epilogue: Epilogue, count: Int, //
](
    to: Outputs[count],
    at: Fragment,
    tensors: EpilogueTensors[dtype, epilogue, 1],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: StaticTuple[SIMD[dtype, 2], count],
    norm: RowNorm,
):
    """Finishes pairs of sums and stores them in y.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        count: Pairs at most.

    Args:
        to: Where they belong.
        at: The thread's place.
        tensors: Of the product.
        sums: Of the pairs.
        alpha: Scale of the product.
        bias: Address in shared memory of the bias of the tile's first filter.
        residual: What `Outputs.load_residual` has read.
        norm: Of the thread's two rows, if the epilogue normalises.
    """
    comptime PAIRS = 2 * GROUP // 8
    """Pairs of a thread in a group of columns."""
    comptime assert (
        not epilogue.measures or count % PAIRS == 0
    ), "finish_pairs: moments are those of whole groups of columns"
    var group = StaticTuple[SIMD[dtype, 2], PAIRS](fill=SIMD[dtype, 2](0))
    var row_sums = RowSums()
    comptime for i in range(count):
        var stores = to.stores(i)
        if stores or epilogue.measures:  # whose threads meet
            var y = _finished[epilogue, i](to, sums, alpha, bias, residual[i], norm)
            if stores:
                tensors.y[0].unsafe_store[alignment=2 * size_of[dtype]()](to.place(i), y)
            comptime if epilogue.measures:
                group[i % PAIRS] = y
                comptime if i % PAIRS == PAIRS - 1:
                    comptime n = i // PAIRS
                    row_sums.add[n](
                        at,
                        group[0].join(group[1]).join(group[2].join(group[3])),
                        group[4].join(group[5]).join(group[6].join(group[7])),
                    )
                    comptime if n % 4 == 3 or i == count - 1:
                        # Rows that are not there are below 0.
                        row_sums.store[n](
                            tensors.norm[0],
                            at,
                            low=to.low,
                            high=to.high,
                            f0=to.f0 + to.column_of(0) - to.column,
                        )


@always_inline
def _finished[
    dtype: DType, //, epilogue: Epilogue, i: Int
](
    to: Outputs[_],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: SIMD[dtype, 2],
    norm: RowNorm,
) -> SIMD[dtype, 2]:
    """Takes a pair of sums through the epilogue, as `finish_pairs` names things."""
    var of = Channels[2](alpha, shared_load2(bias + 4 * UInt32(to.column_of(i))))
    comptime if epilogue.normalizes:
        of.scale = SIMD[F32, 2](norm.scale[1] if to.is_high(i) else norm.scale[0])
    return apply[epilogue, dtype](
        SIMD[F32, 2](sums[2 * i], sums[2 * i + 1]), of, residual.cast[F32]()
    ).cast[dtype]()


@always_inline
def pool_pairs[
    dtype: DType, epilogue: Epilogue, count: Int, //
](
    to: Outputs[count],
    at: Fragment,
    tensors: EpilogueTensors[dtype, epilogue, 1],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: StaticTuple[SIMD[dtype, 2], count],
    room: UInt32,
    rows: Int32,
):
    """Finishes pairs of sums, as `finish_pairs` does, and stores the mean of their rows: y[F].

    Each result is rounded to the dtype first, as if it were stored and read again. A warp adds up its 16 rows:
    at each of three steps its lanes halve both the rows and the columns that they have. Then the warps
    meet in shared memory. All threads of one warpgroup call this; it has all rows of the product.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        count: Pairs of a thread: all of its tile.

    Args:
        to: Which of them are in the result; its first row is that of the product.
        at: The thread's place.
        tensors: Of the product.
        sums: Of the pairs.
        alpha: Scale of the product.
        bias: Address in shared memory of the bias of the tile's first filter.
        residual: What `Outputs.load_residual` has read.
        room: Address in shared memory of 4 floats for each column.
        rows: Of the product, 64 at most.
    """
    comptime COLUMNS = 4 * count
    comptime LEFT = count // 8
    """Columns of a lane in the end."""
    comptime assert count % 8 == 0, "pool_pairs: each of 8 lanes has some of the columns in the end"
    comptime assert COLUMNS <= WARPGROUP, "pool_pairs: a thread stores a column"
    var found = StaticTuple[Float32, count](fill=0)
    comptime for j in range(count // 2):
        var pair = SIMD[F32, 2](0)
        comptime for i in range(2 * j, 2 * j + 2):
            var y = _finished[epilogue, i](to, sums, alpha, bias, residual[i], RowNorm(0, 0))
            pair += y.cast[F32]() if to.stores(i) else SIMD[F32, 2](0)
        found[2 * j], found[2 * j + 1] = pair[0], pair[1]
    comptime for step in range(3):
        comptime half = count >> (step + 1)
        comptime distance = 16 >> step
        var upper = at.lane() & Int32(distance) != 0
        comptime for i in range(half):
            var low, high = found[i], found[i + half]
            var other = warp.shuffle_xor(low if upper else high, UInt32(distance))
            found[i] = (high if upper else low) + other
    comptime for i in range(LEFT):
        var n = at.lane() // 4 * Int32(LEFT) + Int32(i)  # of the thread's columns, as they began
        var column = n // 2 * 8 + to.column + n % 2
        shared_store_float(room + 4 * UInt32(at.warp() * Int32(COLUMNS) + column), found[i])
    sync_threads(1, UInt32(WARPGROUP))
    if at.t < Int32(COLUMNS) and to.f0 + at.t < to.filters:
        var sum = Float32(0)
        comptime for i in range(WARPGROUP // WARP):
            sum += shared_load_float(room + 4 * UInt32(Int32(i * COLUMNS) + at.t))
        var mean = narrowed[dtype](sum / Float32(rows))
        tensors.y[0].unsafe_store(Int(to.f0 + at.t), mean)
