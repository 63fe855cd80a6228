"""A layer norm between two products, without a launch of its own.

    y[m, f] = act(norm(x)[m] w[f] + bias[f]),   norm(x)[m] = (x[m] - mean[m]) rstd[m]
            = act(rstd[m] x[m] w[f] + bias[f]),   since sum_c w[f, c] = 0

The product that makes x leaves the moments of its rows (`RowSums`), and the one behind it
multiplies x as it is: its epilogue scales each row by rstd (`RowNorm`). Weight and bias of the norm
are part of w and bias, and the weights of a filter add up to 0 (`norm_filter` of graphs/constants.py).

The moments are the sums of each 32 columns and of their squares, [M, C / 32, 2] in float32. So whoever has 32
columns of a row needs nobody else's. A variance is the mean of the squares less the square of the
mean. Where a row's mean is 1,000 deviations away from 0, nothing is left of it; but there numbers of 16
bits have lost most of their digits, too.
"""

from max.gpu.primitives import warp
from max.gpu.sync import syncwarp
from std.math import rsqrt
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ..functions import relu
from ..kernel_argument import KernelArgument
from ..operands import F32, Data
from ..rows import over_lanes
from .accumulator import Fragment, load_16x16
from .ptx import mma_sync

comptime GROUP = 32
"""Columns whose moments are together."""
comptime LOADS = 3
"""Groups of a row that a thread loads at a time; four threads have a row."""


@fieldwise_init
struct RowNorm(TrivialRegisterPassable):
    """The norm of a thread's two rows: scale * x + shift."""

    var scale: SIMD[F32, 2]
    """1 / sqrt(variance + eps)."""
    var shift: SIMD[F32, 2]
    """-mean * scale."""


struct Norm(KernelArgument, TrivialRegisterPassable):
    """The moments of a matrix's rows, and what is added to their variance."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var moments: Data[F32]
    """[M, C / 32, 2]."""
    var groups: Int32
    """C / 32."""
    var eps: Float32
    """Added to the variance."""

    def __init__(out self, moments: Data[F32], columns: Int, eps: Float32 = 0):
        """Names the tensor.

        Args:
            moments: Of the rows.
            columns: C, a multiple of 32.
            eps: Added to the variance.
        """
        self.moments, self.groups, self.eps = moments, Int32(columns // GROUP), eps


struct RowMoments(TrivialRegisterPassable):
    """A thread's part of the moments of its two rows: of every fourth group.

    The first of them are loaded ahead of the products, and added up behind them.
    """

    var low: Int32
    """The first row."""
    var high: Int32
    """The second row."""
    var found: StaticTuple[SIMD[F32, 2], 2 * LOADS]
    """Sum and sum of squares of a group of both rows, then of the next group."""

    @always_inline
    def __init__(out self):
        """Has none."""
        self.low = self.high = 0
        self.found = StaticTuple[SIMD[F32, 2], 2 * LOADS](fill=SIMD[F32, 2](0))

    @always_inline
    def __init__(out self, norm: Norm, at: Fragment, low: Int32, high: Int32):
        """Starts loading.

        Args:
            norm: Where from.
            at: The thread's place.
            low: The first row, one that there is.
            high: The second row, likewise.
        """
        self.low, self.high = low, high
        self.found = StaticTuple[SIMD[F32, 2], 2 * LOADS](fill=SIMD[F32, 2](0))
        self._load(norm, at.t % 4)

    @always_inline
    def __init__(out self, norm: Norm, at: Fragment, *, row: Int32, rows: Int32):
        """Starts loading those of a row and the one 8 further on, or of the last row.

        Args:
            norm: Where from.
            at: The thread's place.
            row: The thread's first row of x.
            rows: Of x.
        """
        var low = min(row, rows - 1)
        self = Self(norm, at, low, min(low + 8, rows - 1))

    @always_inline
    def _load(mut self, norm: Norm, first: Int32):
        """Loads groups from `first` on; of those that are not there zeros."""
        comptime for i in range(LOADS):
            var group = first + Int32(4 * i)
            self.found[2 * i] = SIMD[F32, 2](0)
            self.found[2 * i + 1] = SIMD[F32, 2](0)
            if group < norm.groups:
                var low = 2 * (Int(self.low) * Int(norm.groups) + Int(group))
                var high = 2 * (Int(self.high) * Int(norm.groups) + Int(group))
                self.found[2 * i] = norm.moments.unsafe_load[width=2, alignment=8](low)
                self.found[2 * i + 1] = norm.moments.unsafe_load[width=2, alignment=8](high)

    @always_inline
    def norm(self, norm: Norm, at: Fragment) -> RowNorm:
        """Adds up; all threads of a warp call this.

        Args:
            norm: Where the moments come from.
            at: The thread's place.

        Returns:
            The norm of both rows.
        """
        var own = self
        var low = SIMD[F32, 2](0)
        var high = SIMD[F32, 2](0)
        for first in range(at.t % 4, norm.groups + at.t % 4, Int32(4 * LOADS)):
            if first >= Int32(4 * LOADS):
                own._load(norm, first)
            comptime for i in range(LOADS):
                low += own.found[2 * i]
                high += own.found[2 * i + 1]
        var each = 1 / (Float32(norm.groups) * GROUP)
        var mean = SIMD[F32, 2](over_lanes[4](low[0]), over_lanes[4](high[0])) * each
        var squares = SIMD[F32, 2](over_lanes[4](low[1]), over_lanes[4](high[1])) * each
        var variance = relu((-mean).fma(mean, squares))  # which rounding may make negative
        var scale = rsqrt(variance + norm.eps)
        return RowNorm(scale, -mean * scale)


struct RowSums(TrivialRegisterPassable):
    """The moments of a thread's two rows that it will store: of every fourth group of the tile.

    So the four threads of a row store 32 bytes that follow one another.
    """

    var low: SIMD[F32, 2]
    """Sum and sum of squares of the first row."""
    var high: SIMD[F32, 2]
    """Of the second row."""

    @always_inline
    def __init__(out self):
        """Begins with none."""
        self.low = self.high = SIMD[F32, 2](0)

    @always_inline
    def add[
        dtype: DType, //, group: Int
    ](mut self, at: Fragment, first: SIMD[dtype, 8], second: SIMD[dtype, 8]):
        """Takes the sums of a group; all threads of a warp call this.

        A warp has 16 rows. The numbers lie as mma.sync has its left side. Times a matrix of ones they
        give sums. Times themselves, as the right side, they give the squares on the diagonal.

        Parameters:
            dtype: Of the numbers.
            group: Which of the tile's, one after the other.

        Args:
            at: The thread's place.
            first: What it has of the group's first 16 columns (`load_16x16`).
            second: Of the others.
        """
        comptime assert dtype.is_half_float(), "RowSums: results have 16 bits"
        comptime Two = SIMD[DType.uint32, 2]
        comptime one = bitcast[DType.uint32, 1](SIMD[dtype, 2](1))
        var sums = SIMD[F32, 4](0)
        var squares = SIMD[F32, 4](0)  # of the warp's first eight rows with all
        var more = SIMD[F32, 4](0)  # of its others
        comptime for k in range(2):
            var a = bitcast[DType.uint32, 4](second if k else first)
            sums = mma_sync[dtype](a, Two(one, one), sums)
            squares = mma_sync[dtype](a, Two(a[0], a[2]), squares)
            more = mma_sync[dtype](a, Two(a[1], a[3]), more)
        # Of a row's four threads one has its square: that of the column with the row's number.
        var row = at.lane() // 4
        var has = UInt32(at.lane() - at.t % 4 + row // 2)
        var odd = row % 2 == 1
        var low = warp.shuffle_idx(squares[1] if odd else squares[0], has)
        var high = warp.shuffle_idx(more[3] if odd else more[2], has)
        if at.t % 4 == Int32(group % 4):
            self.low = SIMD[F32, 2](sums[0], low)
            self.high = SIMD[F32, 2](sums[2], high)

    @always_inline
    def take[dtype: DType, count: Int, *, last: Int](mut self, rows: UInt32, at: Fragment):
        """Takes the sums of groups of results in shared memory, which the warp has stored there.

        Parameters:
            dtype: Of the results.
            count: How many groups, four at most.
            last: Which of the tile's the last of them is.

        Args:
            rows: The warpgroup's 64 rows, in boxes.
            at: The thread's place.
        """
        comptime assert (
            last + 1
        ) % count == 0 and 4 % count == 0, "RowSums: four are stored at a time"
        syncwarp()
        comptime for i in range(count):
            self.add[last + 1 - count + i](
                at, load_16x16[dtype, 2 * i](rows, at), load_16x16[dtype, 2 * i + 1](rows, at)
            )

    @always_inline
    def store[group: Int](self, norm: Norm, at: Fragment, *, low: Int32, high: Int32, f0: Int32):
        """Stores the moments that were taken since the last multiple of four groups.

        Parameters:
            group: The last of them.

        Args:
            norm: Where to.
            at: The thread's place.
            low: The first row; nothing is stored of one below 0.
            high: The second row, likewise.
            f0: The tile's first column; nothing is stored of groups that are not there.
        """
        var own = f0 // Int32(GROUP) + Int32(group - group % 4) + at.t % 4
        if at.t % 4 <= Int32(group % 4) and own < norm.groups:
            comptime for half in range(2):
                var row = high if half else low
                if row >= 0:
                    norm.moments.unsafe_store[alignment=8](
                        2 * (Int(row) * Int(norm.groups) + Int(own)),
                        self.high if half else self.low,
                    )


@always_inline
def leave_moments[
    dtype: DType, count: Int, //
](
    results: Array[SIMD[dtype, 8], count],
    norm: Norm,
    at: Fragment,
    *,
    low: Int32,
    high: Int32,
    f0: Int32 = 0,
):
    """Stores the moments of results in registers; all threads of a warp call this.

    Parameters:
        dtype: Of the results.
        count: Sixteens of columns, an even number.

    Args:
        results: Of the thread, in sixteens of columns.
        norm: Where to.
        at: The thread's place.
        low: The first row; nothing is stored of one below 0.
        high: The second row, likewise.
        f0: The first column.
    """
    comptime assert count % 2 == 0, "leave_moments: a group has two sixteens of columns"
    var row_sums = RowSums()
    comptime for group in range(count // 2):
        row_sums.add[group](at, results[2 * group], results[2 * group + 1])
        comptime if group % 4 == 3 or group == count // 2 - 1:
            row_sums.store[group](norm, at, low=low, high=high, f0=f0)
