"""Which keys a query sees, and what is added to its scores.

    y = softmax(scale * q k^T + bias) v, over the keys that the query sees

A query does not see a key whose mask is zero, nor, where attention is causal, one that comes after
it: such scores are minus infinity. A query that sees no key becomes NaN, as in torch.

A kernel takes a `Mask` at compile time, and reads of `MaskTensors` what that names.
"""

from ..functions import logarithm
from ..kernel_argument import KernelArgument
from ..operands import F32, Data
from .config import LN_2


struct Mask(TrivialRegisterPassable):
    """What is done to the scores: a compile-time value."""

    var bias: Bool
    """Whether numbers are added to them."""
    var keys: Bool
    """Whether each image has a mask of its keys."""
    var causal: Bool
    """Whether a query sees no keys after it."""
    var logsumexp: Bool
    """Whether the logarithm of the sum of each query's exponentials is kept, for gradients."""

    def __init__(
        out self,
        *,
        bias: Bool = False,
        keys: Bool = False,
        causal: Bool = False,
        logsumexp: Bool = False,
    ):
        """Names the parts.

        Args:
            bias: Whether numbers are added to the scores.
            keys: Whether each image has a mask of its keys.
            causal: Whether a query sees no keys after it.
            logsumexp: Whether the logarithm of the sum of each query's exponentials is kept.
        """
        self.bias, self.keys, self.causal = bias, keys, causal
        self.logsumexp = logsumexp

    def label(self) -> String:
        """Names the mask, as a part of a kernel's symbol.

        Returns:
            What it does, each followed by `_`.
        """
        var label = String("bias_") if self.bias else String()
        label += "keys_" if self.keys else ""
        label += "causal_" if self.causal else ""
        return label + ("logsumexp_" if self.logsumexp else "")

    @always_inline
    def some(self) -> Bool:
        """Tells whether anything is done.

        Returns:
            False if the scores stay as they are.
        """
        return self.bias or self.keys or self.causal

    @always_inline
    def reads(self) -> Bool:
        """Tells whether there is anything to read.

        Returns:
            False if the mask follows from the sizes.
        """
        return self.bias or self.keys


@fieldwise_init
struct MaskTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """What masks read, and where what is kept of the scores goes.

    Parameters:
        dtype: Of the bias, and of q, k and v.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bias: Data[Self.dtype]
    """Rows of S numbers, as `MaskSizes` says; any pointer if there is none."""
    var keys: Data[DType.uint8]
    """[N, S]: 0 for keys that are not seen; any pointer if there is none."""
    var logsumexp: Data[F32]
    """Logarithms of sums of exponentials [N, heads, T]; any pointer if they are not kept."""
    var sizes: MaskSizes
    """Where the bias lies, and where the diagonal is."""

    def __init__(
        out self,
        bias: Data[Self.dtype],
        logsumexp: Optional[Data[F32]] = None,
        *,
        sizes: MaskSizes = MaskSizes(),
    ):
        """Names a bias, or a pointer from which nothing is read, and what is kept.

        Args:
            bias: Added to scores.
            logsumexp: Logarithms of sums of exponentials, if they are kept.
            sizes: Where the bias lies, and where the diagonal is.
        """
        self.bias, self.keys = bias, rebind[Data[DType.uint8]](bias.unsafe_bitcast[UInt8]())
        self.logsumexp = logsumexp.or_else(rebind[Data[F32]](bias.unsafe_bitcast[Float32]()))
        self.sizes = sizes

    @always_inline
    def keep(self, place: Int, top: Float32, sum: Float32):
        """Keeps the logarithm of a query's sum of exponentials; -inf if it sees no key.

        Args:
            place: Queries before it, of all heads and images.
            top: Its highest score, times the logarithm of e to the base of 2.
            sum: Its sum of powers of two of the scores below that.
        """
        self.logsumexp[unsafe_offset=place] = top.fma(LN_2, logarithm(sum))


struct MaskSizes(KernelArgument, TrivialRegisterPassable):
    """Where a bias lies, and where the diagonal is."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var image: Int32
    """Numbers of bias from an image to the next; 0 if all have the same."""
    var images: Int32
    """How many images have a bias of their own; after them it begins again, as for windows."""
    var head: Int64
    """Numbers of bias from a head to the next; 0 if all have the same."""
    var row: Int32
    """Numbers of bias from a query to the next, at least S; 0 if all have the same. On a GPU it is
    even, as the others are."""
    var diagonal: Int32
    """The last key that query 0 sees, where attention is causal: 0 in torch, or S - T."""

    def __init__(
        out self,
        *,
        image: Int = 0,
        images: Int = 1,
        head: Int = 0,
        row: Int = 0,
        diagonal: Int = 0,
    ):
        """Names the sizes.

        Args:
            image: Numbers of bias from an image to the next.
            images: How many images have a bias of their own.
            head: Numbers of bias from a head to the next.
            row: Numbers of bias from a query to the next.
            diagonal: The last key that query 0 sees.
        """
        self.image, self.images, self.head = Int32(image), Int32(images), Int64(head)
        self.row, self.diagonal = Int32(row), Int32(diagonal)

    @always_inline
    def place(self, n: Int, head: Int, query: Int) -> Int:
        """Finds a query's bias.

        Args:
            n: Image.
            head: Head.
            query: Query of the image.

        Returns:
            Numbers of bias before those of its first key.
        """
        var image = Int32(n) % self.images
        return Int(image) * Int(self.image) + head * Int(self.head) + query * Int(self.row)

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
