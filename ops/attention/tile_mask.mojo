"""The masks of a thread's scores, where these lie in registers as tensor cores leave them."""

from std.memory import bitcast
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ..hopper.accumulator import Fragment, pair
from ..hopper.ptx import ballot
from ..hopper.shared import WARP
from ..operands import F32, Data, widened
from .config import LOG2_E
from .mask import Mask, MaskTensors

comptime BiasPairs[keys: Int] = StaticTuple[UInt32, keys // 4]
"""What a thread adds to its scores of a tile, in pairs of neighbouring keys.

Parameters:
    keys: Of the tile.
"""


struct TileMask[dtype: DType, mask: Mask, keys: Int](TrivialRegisterPassable):
    """A thread's view of the masks of its two rows of a fragment of scores.

    Parameters:
        dtype: Of the bias.
        mask: What is done to the scores.
        keys: Of a tile of keys.
    """

    var bias: Data[Self.dtype]
    """Of the thread's first query and first key."""
    var row: Int32
    """Numbers of bias from a query to the next."""
    var queries: Int32
    """Queries from the thread's first to the last of all."""
    var seen: Data[DType.uint8]
    """Of the image's first key."""
    var last: Int32
    """The last key that the thread's first query sees, where attention is causal."""
    var at: Fragment
    """The thread's place."""
    var s: Int32
    """Keys of an image."""

    @always_inline
    def __init__(
        out self,
        tensors: MaskTensors[Self.dtype],
        at: Fragment,
        *,
        n: Int32,
        head: Int32,
        query: Int32,
        t: Int32,
        s: Int32,
    ):
        """Finds the thread's.

        Args:
            tensors: Bias and masks.
            at: The thread's place.
            n: Image.
            head: Head.
            query: The thread's first query; the other is 8 further on.
            t: Queries of an image.
            s: Keys of an image.
        """
        self.at, self.s, self.row, self.queries = at, s, tensors.sizes.row, t - query
        self.last = query + tensors.sizes.diagonal
        self.bias, self.seen = tensors.bias, tensors.keys
        comptime if Self.mask.bias:
            var place = tensors.sizes.place(Int(n), Int(head), Int(query))
            self.bias = self.bias.unsafe_offset(place + Int(at.column()))
        comptime if Self.mask.keys:
            self.seen = self.seen.unsafe_offset(Int(n) * Int(s))

    @always_inline
    def load_bias(self, first: Int32) -> BiasPairs[Self.keys]:
        """Reads the bias ahead: before the scores are there.

        Args:
            first: The tile's first key.

        Returns:
            Numbered as `pair` numbers the scores' pairs: 2 j + half.
        """
        var pairs = BiasPairs[Self.keys](fill=0)
        comptime if Self.mask.bias:
            var keys = self.s - first - self.at.column()
            comptime for half in range(2):
                # As numbers, not as conditions: those of all pairs would be kept.
                var count = keys if self.queries > Int32(8 * half) else Int32(0)
                var row = self.bias.unsafe_offset(Int(first) + Int(Int32(8 * half) * self.row))
                comptime for j in range(Self.keys // 8):
                    if Int32(8 * j) < count:
                        var two = row.unsafe_load[width=2, alignment=4](8 * j)
                        pairs[2 * j + half] = bitcast[DType.uint32, 1](two)
        return pairs

    @always_inline
    def apply[
        count: Int, //
    ](
        self,
        mut scores: StaticTuple[Float32, count],
        bias: BiasPairs[Self.keys],
        first: Int32,
        scale: Float32,
    ):
        """Adds the bias, and makes scores of keys that are not seen minus infinity.

        With a bias the scores are scaled, for powers of two, and are not to be scaled again.

        Parameters:
            count: Scores of the thread: of half as many keys, those of a tile.

        Args:
            scores: Of the thread.
            bias: What `load_bias` has read.
            first: The tile's first key.
            scale: Scales the scores, for powers of two.
        """
        comptime assert 2 * count == Self.keys, "attention: masks are of whole tiles"
        comptime if Self.mask.bias:
            comptime for j in range(Self.keys // 8):
                comptime for half in range(2):
                    var added = widened(bitcast[Self.dtype, 2](bias[2 * j + half])) * LOG2_E
                    var sum = pair[j, half](scores).fma(SIMD[F32, 2](scale), added)
                    comptime for e in range(2):
                        scores[4 * j + 2 * half + e] = sum[e]
        comptime if Self.mask.keys:
            var words = self._seen(first)
            comptime for i in range(Self.keys // 2):
                comptime key = i // 4 * 8 + i % 2
                if words[key // WARP] & UInt32(1 << key % WARP) == 0:
                    scores[i] = neg_inf[F32]()
        comptime if Self.mask.causal:
            # All of a warp's queries see the tile's last key, or it looks key by key.
            if first + Int32(Self.keys - 1) > self.last - self.at.lane() // 4:
                var last = self.last - first - self.at.column()
                comptime for i in range(Self.keys // 2):
                    if Int32(i // 4 * 8 + i % 2 - i // 2 % 2 * 8) > last:
                        scores[i] = neg_inf[F32]()

    @always_inline
    def _seen(self, first: Int32) -> StaticTuple[UInt32, (Self.keys + WARP - 1) // WARP]:
        """Collects the mask of a tile's keys, a bit each, from the thread's first key on."""
        comptime COUNT = (Self.keys + WARP - 1) // WARP
        var words = StaticTuple[UInt32, COUNT](fill=0)
        comptime for i in range(COUNT):
            var key = first + Int32(i * WARP) + self.at.lane()
            var seen = False
            if key < self.s:
                seen = self.seen.unsafe_load(Int(key)) != 0
            words[i] = ballot(seen) >> UInt32(self.at.column())
        return words
