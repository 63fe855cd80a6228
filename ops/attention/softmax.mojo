"""From scores to sums of values, in registers: what attention kernels do with a tile of keys.

Scores lie where wgmma and mma.sync leave them (hopper/accumulator.mojo): a thread has some of two rows. Their
probabilities, rounded, are the left side of the product with the values.
"""

from max.gpu.primitives import warp
from std.math import exp2
from std.sys import inlined_assembly
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ..hopper.accumulator import pair
from ..hopper.ptx import packed
from ..operands import F32
from ..rows import over_lanes
from .config import LOWEST


struct Softmax(TrivialRegisterPassable):
    """The softmax of a thread's two rows of scores, tile after tile.

    The online softmax of Milakov and Gimelshein (2018, arXiv:1805.02867). Four threads share a row.
    """

    var scale: Float32
    """Scales the scores, for powers of two."""
    var highest: SIMD[F32, 2]
    """The rows' highest scores so far."""
    var sum: SIMD[F32, 2]
    """Sums of this thread's probabilities, which are not yet divided by the rows' sums."""

    @always_inline
    def __init__(out self, scale: Float32):
        """Begins before the first tile.

        Args:
            scale: Scales the scores, for powers of two.
        """
        self.scale = scale
        self.highest = SIMD[F32, 2](LOWEST)
        self.sum = SIMD[F32, 2](0)

    @always_inline
    def update[count: Int, //](mut self, mut scores: StaticTuple[Float32, count]) -> SIMD[F32, 2]:
        """Turns a tile's scores into powers of two below the rows' highest.

        Parameters:
            count: Scores of the thread.

        Args:
            scores: Of the thread.

        Returns:
            What sums of the tiles before are to be multiplied by.
        """
        var factor = SIMD[F32, 2](0)
        comptime for half in range(2):
            var highest = self.highest[half]
            comptime for j in range(count // 4):
                var two = pair[j, half](scores)
                highest = max(highest, max(two[0], two[1]))
            highest = max(highest, warp.shuffle_xor(highest, 1))
            highest = max(highest, warp.shuffle_xor(highest, 2))
            var shift = highest * self.scale
            factor[half] = exp2(self.highest[half].fma(self.scale, -shift))
            self.highest[half] = highest
            var sum = self.sum[half] * factor[half]
            comptime for j in range(count // 4):
                comptime for e in range(2):
                    comptime i = 4 * j + 2 * half + e
                    scores[i] = exp2(scores[i].fma(self.scale, -shift))
                    sum += scores[i]
            self.sum[half] = sum
        return factor

    @always_inline
    def inverse_sums(self, scale: Float32) -> SIMD[F32, 2]:
        """Divides 1 by the rows' sums and by what 1 stands for.

        Args:
            scale: The latter.

        Returns:
            Of the two rows.
        """
        return SIMD[F32, 2](
            reciprocal(over_lanes[4](self.sum[0]) * scale),
            reciprocal(over_lanes[4](self.sum[1]) * scale),
        )


@always_inline
def rescale[count: Int, //](mut sums: StaticTuple[Float32, count], factor: SIMD[F32, 2]):
    """Multiplies a thread's sums of two rows.

    Parameters:
        count: Sums of the thread.

    Args:
        sums: Of the thread.
        factor: Of each row.
    """
    comptime for i in range(count):
        sums[i] *= factor[i // 2 % 2]


@always_inline
def reciprocal(x: Float32) -> Float32:
    """Computes 1 / x to an ulp.

    Args:
        x: A number.

    Returns:
        Its reciprocal.
    """
    return inlined_assembly[
        "rcp.approx.ftz.f32 $0, $1;", Float32, constraints="=f,f", has_side_effect=False
    ](x)


@always_inline
def mask_keys[count: Int, //](mut scores: StaticTuple[Float32, count], column: Int32, keys: Int32):
    """Makes the scores of all but a tile's first keys minus infinity.

    Parameters:
        count: Scores of the thread: of half as many keys.

    Args:
        scores: Of the thread.
        column: The thread's first column.
        keys: How many of the tile's keys there are.
    """
    if keys < Int32(2 * count):
        comptime for i in range(count):
            if Int32(i // 4 * 8 + i % 2) + column >= keys:
                scores[i] = neg_inf[F32]()


@always_inline
def rounded[
    count: Int, //, dtype: DType
](scores: StaticTuple[Float32, count]) -> StaticTuple[UInt32, count // 2]:
    """Rounds probabilities, pair by pair, as a product takes them from registers.

    Parameters:
        count: Probabilities of the thread.
        dtype: Either bfloat16 or float16.

    Args:
        scores: The probabilities.

    Returns:
        Two in each register.
    """
    var p = StaticTuple[UInt32, count // 2](fill=0)
    comptime for i in range(count // 2):
        p[i] = packed[dtype](scores[2 * i], scores[2 * i + 1])
    return p
