"""Which keys a query sees, and what is added to its scores.

    y = softmax(scale * q k^T + bias) v, over the keys that the query sees

A query does not see a key whose mask is zero, nor, where attention is causal, one that comes after
it: such scores are minus infinity. A query that sees no key becomes NaN, as in torch.

A kernel takes a `Mask` at compile time; of `MaskTensors` and `MaskSizes` it reads what that names.
"""

from std.memory import bitcast
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ..hopper.accumulator import Fragment, pair
from ..hopper.ptx import ballot
from ..hopper.shared import WARP
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, widened
from .config import LOG2_E


struct Mask(TrivialRegisterPassable):
    """What is done to the scores: a compile-time value."""

    var bias: Bool
    """Whether numbers are added to them."""
    var keys: Bool
    """Whether each image has a mask of its keys."""
    var causal: Bool
    """Whether a query sees no keys after it."""

    def __init__(out self, *, bias: Bool = False, keys: Bool = False, causal: Bool = False):
        """Names the parts.

        Args:
            bias: Whether numbers are added to the scores.
            keys: Whether each image has a mask of its keys.
            causal: Whether a query sees no keys after it.
        """
        self.bias, self.keys, self.causal = bias, keys, causal

    def label(self) -> String:
        """Names the mask, as a part of a kernel's symbol.

        Returns:
            What it does, each followed by `_`.
        """
        var label = String("bias_") if self.bias else String()
        label += "keys_" if self.keys else ""
        return label + ("causal_" if self.causal else "")

    @always_inline
    def reads(self) -> Bool:
        """Tells whether there is anything to read.

        Returns:
            False if the mask follows from the sizes.
        """
        return self.bias or self.keys


struct MaskTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """What masks read.

    Parameters:
        dtype: Of the bias, and of q, k and v.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bias: Data[Self.dtype]
    """Rows of S numbers, as `MaskSizes` says; any pointer if there is none."""
    var keys: Data[DType.uint8]
    """[N, S]: 0 for keys that are not seen; any pointer if there is none."""

    def __init__(out self, bias: Data[Self.dtype], keys: Data[DType.uint8]):
        """Names the tensors.

        Args:
            bias: Added to scores.
            keys: Mask of keys.
        """
        self.bias, self.keys = bias, keys


struct MaskSizes(KernelArgument, TrivialRegisterPassable):
    """Where a bias lies, and where the diagonal is."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var image: Int64
    """Numbers of bias from an image to the next; 0 if all have the same."""
    var head: Int64
    """Numbers of bias from a head to the next; 0 if all have the same."""
    var row: Int32
    """Numbers of bias from a query to the next, at least S; even, as the others are."""
    var diagonal: Int32
    """The last key that query 0 sees, where attention is causal: 0 in torch, or S - T."""

    def __init__(
        out self, *, image: Int64 = 0, head: Int64 = 0, row: Int32 = 0, diagonal: Int32 = 0
    ):
        """Names the sizes.

        Args:
            image: Numbers of bias from an image to the next.
            head: Numbers of bias from a head to the next.
            row: Numbers of bias from a query to the next.
            diagonal: The last key that query 0 sees.
        """
        self.image, self.head, self.row, self.diagonal = image, head, row, diagonal

    @always_inline
    def tiles[mask: Mask, keys: Int](self, query: Int32, tiles: Int32) -> Int32:
        """Counts the tiles of keys that queries see.

        Parameters:
            mask: What is done to the scores.
            keys: Of a tile.

        Args:
            query: The last of them.
            tiles: How many there are.

        Returns:
            From the first tile to the last that is seen; one at least.
        """
        comptime if mask.causal:
            return min(tiles, max(query + self.diagonal, 0) // Int32(keys) + 1)
        return tiles


comptime BiasPairs[keys: Int] = StaticTuple[UInt32, keys // 4]
"""What a thread adds to its scores of a tile, in pairs of neighbouring keys.

Parameters:
    keys: Of the tile.
"""


struct TileMask[dtype: DType, mask: Mask, keys: Int](TrivialRegisterPassable):
    """A thread's view of the masks of a tile of 64 queries.

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
        sizes: MaskSizes,
        at: Fragment,
        *,
        n: Int32,
        head: Int32,
        first: Int32,
        t: Int32,
        s: Int32,
    ):
        """Finds the tile's.

        Args:
            tensors: Bias and masks.
            sizes: Where they lie.
            at: The thread's place.
            n: Image.
            head: Head.
            first: The tile's first query.
            t: Queries of an image.
            s: Keys of an image.
        """
        var query = first + at.row()
        self.at, self.s, self.row, self.queries = at, s, sizes.row, t - query
        self.last = query + sizes.diagonal
        self.bias, self.seen = tensors.bias, tensors.keys
        comptime if Self.mask.bias:
            var place = Int(n) * Int(sizes.image) + Int(head) * Int(sizes.head)
            place += Int(query) * Int(sizes.row) + Int(at.column())
            self.bias = self.bias.unsafe_offset(place)
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
    def apply(
        self,
        mut scores: StaticTuple[Float32, Self.keys // 2],
        bias: BiasPairs[Self.keys],
        first: Int32,
        scale: Float32,
    ):
        """Adds the bias, and makes scores of keys that are not seen minus infinity.

        With a bias the scores are scaled, for powers of two, and are not to be scaled again.

        Args:
            scores: Of the thread.
            bias: What `load_bias` has read.
            first: The tile's first key.
            scale: Scales the scores, for powers of two.
        """
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
