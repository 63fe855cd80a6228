"""Which sums of a product a thread holds.

A warpgroup's sums of 64 x N lie in its threads so (PTX ISA 8.0, section 9.7.14.5.1, figure of D):
thread 4 a + b of warp d holds, of every eight columns, 2 b and 2 b + 1, of rows 16 d + a and
16 d + a + 8. The sums of a thread are numbered

    4 j + 2 half + e     row 16 d + a + 8 half, column 8 j + 2 b + e

and its pairs of neighbouring columns 2 j + half.

The sums of a warp that works alone, by mma.sync, are those of warp 0.

`load_16x16` and `store_16x16` copy numbers of 16 bits between shared memory and the threads that
hold such sums, 16 rows x 16 columns of each warp at a time (ldmatrix, stmatrix). There they lie as
the copy engine leaves them: in boxes of 64 rows of 128 bytes, swizzled.
"""

from max.gpu.primitives import warp
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..operands import F32, WHOLE, Data
from .mma import ROWS
from .ptx import shared_load2, shared_load4, shared_load_matrices, shared_store_matrices
from .shared import ROW, WARP, WARPGROUP, swizzle

comptime Sums[columns: Int, dtype: DType = F32] = StaticTuple[Scalar[dtype], columns // 2]
"""A thread's sums of 64 x `columns`.

Parameters:
    columns: Of the product, all told.
    dtype: Of the sums: `SUM` of the factors' dtype.
"""


struct Fragment(TrivialRegisterPassable):
    """A thread's place in its warpgroup's sums."""

    var t: Int32
    """The thread, counted from the block's first warpgroup; or the lane of a warp that works alone."""
    var _group: Int32
    """The warpgroup."""

    @always_inline
    def __init__(out self, t: Int32):
        """Finds a thread's place; all threads of its warp do so together.

        The compiler takes what is shuffled from one lane as uniform, so what derives from it, such as a
        consumer's stages and their descriptors, stays in uniform registers. Derived from t // 128 it
        would be computed in each lane, and moved to uniform registers before each product.

        Args:
            t: The thread, counted from the block's first warpgroup.
        """
        self.t, self._group = t, warp.shuffle_idx(t // Int32(WARPGROUP), 0)

    @always_inline
    def __init__(out self, *, lane: Int32):
        """Finds a thread's place in a warp that works alone, as in group 0.

        Args:
            lane: The thread's number in its warp.
        """
        self.t, self._group = lane, 0

    @always_inline
    def group(self) -> Int32:
        """Numbers the warpgroup.

        Returns:
            From 0 on.
        """
        return self._group

    @always_inline
    def leads(self) -> Bool:
        """Tells whether the thread is the one that speaks for its warpgroup.

        Returns:
            True for its first.
        """
        return self.t % Int32(WARPGROUP) == 0

    @always_inline
    def warp(self) -> Int32:
        """Numbers the warp in its warpgroup.

        Returns:
            From 0 to 3.
        """
        return self.t % Int32(WARPGROUP) // Int32(WARP)

    @always_inline
    def lane(self) -> Int32:
        """Numbers the thread in its warp.

        Returns:
            From 0 to 31.
        """
        return self.t % Int32(WARP)

    @always_inline
    def row(self) -> Int32:
        """Gives the first of the thread's two rows; the other is 8 further on.

        Returns:
            From 0 to 55.
        """
        return self.warp() * 16 + self.lane() // 4

    @always_inline
    def column(self) -> Int32:
        """Gives the first of the thread's two neighbouring columns of every eight.

        Returns:
            0, 2, 4 or 6.
        """
        return self.t % 4 * 2


@always_inline
def bias_of_columns[columns: Int, *, twice: Bool = False](bias: UInt32) -> Sums[columns]:
    """Begins sums with the bias of their columns, in shared memory.

    Parameters:
        columns: Of the product.
        twice: Whether each pair of numbers lies there twice, so that one load brings four sums.

    Args:
        bias: Address of the thread's first column's.

    Returns:
        What products are to be added to.
    """
    var sums = Sums[columns](fill=0)
    comptime for j in range(columns // 8):
        var of: SIMD[F32, 4]
        comptime if twice:
            of = shared_load4(bias + UInt32(64 * j))
        else:
            var two = shared_load2(bias + UInt32(32 * j))
            of = two.join(two)
        comptime for i in range(4):
            sums[4 * j + i] = of[i]
    return sums


@always_inline
def bias_of_columns[columns: Int](bias: Data[F32]) -> Sums[columns]:
    """Begins sums with the bias of their columns, in global memory.

    Parameters:
        columns: Of the product.

    Args:
        bias: From the thread's first column on.

    Returns:
        What products are to be added to.
    """
    var sums = Sums[columns](fill=0)
    comptime for j in range(columns // 8):
        var two = bias.unsafe_load[width=2, alignment=8](8 * j)
        comptime for i in range(4):
            sums[4 * j + i] = two[i % 2]
    return sums


@always_inline
def bias_of_rows[columns: Int](bias: SIMD[F32, 2]) -> Sums[columns]:
    """Begins sums with the bias of their rows.

    Parameters:
        columns: Of the product.

    Args:
        bias: Of the thread's two rows.

    Returns:
        What products are to be added to.
    """
    var sums = Sums[columns](fill=0)
    comptime for i in range(columns // 2):
        sums[i] = bias[i // 2 % 2]
    return sums


@always_inline
def pair[
    dtype: DType, count: Int, //, j: Int, half: Int
](sums: StaticTuple[Scalar[dtype], count]) -> SIMD[F32, 2]:
    """Takes the sums of two neighbouring columns.

    Parameters:
        dtype: Of the sums.
        count: Sums of the thread.
        j: Which eight columns.
        half: Which of the thread's two rows.

    Args:
        sums: Of the thread.

    Returns:
        Both, as float32: of integers above 2^24 rounded.
    """
    comptime i = 4 * j + 2 * half
    return SIMD[F32, 2](sums[i].cast[F32](), sums[i + 1].cast[F32]())


@always_inline
def quad[
    dtype: DType, count: Int, //, k: Int, half: Int
](sums: StaticTuple[Scalar[dtype], count]) -> SIMD[F32, 4]:
    """Takes the sums of sixteen columns that a thread has of a row: neighbours, if B is in quads.

    So results of 8 bits leave 4 at a time. Column 8 j + 2 b + e of B in quads stands for the filter
    4 b + 2 e + j of each sixteen. Where filters are the rows of A, in the same order, a thread's two
    rows are neighbours.

    Parameters:
        dtype: Of the sums.
        count: Sums of the thread.
        k: Which sixteen columns.
        half: Which of the thread's two rows.

    Args:
        sums: Of the thread.

    Returns:
        All four, as float32.
    """
    return pair[2 * k, half](sums).interleave(pair[2 * k + 1, half](sums))


comptime COARSE = 16
"""What products of `rescaled` are multiples of, as integers."""


@always_inline
def rescaled[
    dtype: DType, count: Int, //
](
    sums: StaticTuple[Scalar[dtype], count], at: Fragment, factors: Data[F32], f0: Int32, f: Int32
) -> StaticTuple[Scalar[dtype], count]:
    """Multiplies each column of sums by a factor, B being in quads; integers are rounded to sixteens.

    Parameters:
        dtype: Of the sums.
        count: Sums of the thread: half of the columns.

    Args:
        sums: Of the thread.
        at: Its place.
        factors: One of each filter, in their order [F].
        f0: The first column's filter.
        f: F; of other columns any number may come.

    Returns:
        The products. Integers have to be below 2^26.
    """
    comptime assert count % 8 == 0, "rescaled: quads are of sixteen columns"
    var products = StaticTuple[Scalar[dtype], count](fill=0)
    comptime for k in range(count // 8):
        # Of columns behind the last filter anything is right; a branch would hold the loads up.
        var first = min(f0 + Int32(16 * k) + at.column() * 2, f - 4)
        var of = factors.unsafe_load[width=4, alignment=16](Int(first))
        comptime for half in range(2):
            var v = quad[k, half](sums)
            var y: SIMD[dtype, 4]
            comptime if dtype.is_integral():
                # A sum with WHOLE rounds: conversions are a quarter as fast.
                var bits = bitcast[DType.int32, 4](v.fma(of * (1 / COARSE), WHOLE))
                y = ((bits - bitcast[DType.int32, 1](WHOLE)) * COARSE).cast[dtype]()
            else:
                y = (v * of).cast[dtype]()
            comptime for i in range(4):
                products[8 * k + i % 2 * 4 + 2 * half + i // 2] = y[i]
    return products


@always_inline
def sums_16x16[count: Int, //, k: Int](sums: StaticTuple[Float32, count]) -> SIMD[F32, 8]:
    """Takes the sums of sixteen columns.

    Parameters:
        count: Sums of the thread.
        k: Which sixteen columns.

    Args:
        sums: Of the thread.

    Returns:
        All eight, in their order.
    """
    var taken = SIMD[F32, 8](0)
    comptime for i in range(8):
        taken[i] = sums[8 * k + i]
    return taken


@always_inline
def load_16x16[dtype: DType, k: Int](rows: UInt32, at: Fragment) -> SIMD[dtype, 8]:
    """Loads numbers of sixteen columns from where the thread has sums.

    Parameters:
        dtype: Of 16 bits.
        k: Which sixteen columns.

    Args:
        rows: The warpgroup's 64 rows, in boxes.
        at: The thread's place.

    Returns:
        Eight numbers, in the order of the sums.
    """
    comptime assert size_of[dtype]() == 2, "load_16x16: numbers have 16 bits"
    return bitcast[dtype, 8](shared_load_matrices(row_16x16[k](rows, at)))


@always_inline
def store_16x16[k: Int](rows: UInt32, at: Fragment, value: SIMD[_, 8]):
    """Stores what `load_16x16` loads.

    Parameters:
        k: Which sixteen columns.

    Args:
        rows: The warpgroup's 64 rows, in boxes.
        at: The thread's place.
        value: Eight numbers of 16 bits, in the order of the sums.
    """
    comptime assert size_of[value.dtype]() == 2, "store_16x16: numbers have 16 bits"
    shared_store_matrices(row_16x16[k](rows, at), bitcast[DType.uint32, 4](value))


@always_inline
def row_16x16[k: Int](rows: UInt32, at: Fragment) -> UInt32:
    """Finds the 16 bytes of a row that a lane names to ldmatrix and stmatrix.

    Lanes 0 to 15 name the rows' first eight columns, the others the next eight: lane i row i % 16.

    Parameters:
        k: Which sixteen columns.

    Args:
        rows: The warpgroup's 64 rows, in boxes.
        at: The thread's place.

    Returns:
        Their address.
    """
    var row = UInt32(at.warp() * 16 + at.lane() % 16)
    var byte = UInt32(k % 4 * 32) + UInt32(at.lane() // 16 * 16)
    return rows + UInt32(k // 4 * ROWS * ROW) + row * UInt32(ROW) + swizzle(byte, row)
