"""Tensors and sizes of depthwise_qkv."""

from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..kernel_argument import KernelArgument
from ..operands import F32, Affine, Data, stored, widened


struct QkvOperands[dtype: DType, out: DType = dtype](KernelArgument, TrivialRegisterPassable):
    """The tensors; see gpu.mojo for their shapes.

    Parameters:
        dtype: Of tokens and filters.
        out: Of query, key and value: the same, or one of 8 bits.
    """

    comptime STEPS = 3 if Self.out != Self.dtype else 0
    """How many steps there are: kernels that store no 8 bits receive none."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Tokens."""
    var weight: Data[F32]
    """The norm's weight."""
    var norm_bias: Data[F32]
    """The norm's bias."""
    var q_filter: Data[Self.dtype]
    """The query's filter."""
    var k_filter: Data[Self.dtype]
    """The key's filter."""
    var v_filter: Data[Self.dtype]
    """The value's filter."""
    var q_bias: Data[F32]
    """The query's bias."""
    var k_bias: Data[F32]
    """The key's bias."""
    var v_bias: Data[F32]
    """The value's bias."""
    var q: Data[Self.out]
    """Where the query goes."""
    var k: Data[Self.out]
    """Where the key goes."""
    var v: Data[Self.out]
    """Where the value goes."""
    var steps: StaticTuple[Affine, Self.STEPS]
    """Of query, key and value in 8 bits: reciprocals of their scales, and zeros."""

    def __init__(
        out self,
        *,
        x: Data[Self.dtype],
        norm: Tuple[Data[F32], Data[F32]],
        filters: Tuple[Data[Self.dtype], Data[Self.dtype], Data[Self.dtype]],
        biases: Tuple[Data[F32], Data[F32], Data[F32]],
        outputs: Tuple[Data[Self.out], Data[Self.out], Data[Self.out]],
        scales: Optional[Data[F32]] = None,
    ):
        """Names the tensors.

        Args:
            x: Tokens.
            norm: Weight and bias of the norm.
            filters: Of query, key and value.
            biases: Of query, key and value.
            outputs: Query, key and value.
            scales: Of outputs in 8 bits scale and zero of each: six numbers in host memory.
        """
        self.x = x
        self.weight, self.norm_bias = norm[0], norm[1]
        self.q_filter, self.k_filter, self.v_filter = filters[0], filters[1], filters[2]
        self.q_bias, self.k_bias, self.v_bias = biases[0], biases[1], biases[2]
        self.q, self.k, self.v = outputs[0], outputs[1], outputs[2]
        self.steps = StaticTuple[Affine, Self.STEPS](fill=Affine(1, 0))
        comptime for i in range(Self.STEPS):
            if scales:
                var scale = scales.value()[unsafe_offset=2 * i]
                self.steps[i] = Affine(1 / scale, scales.value()[unsafe_offset=2 * i + 1])

    @always_inline
    def stored[
        of: DType, width: SIMDLength, //, i: Int
    ](self, y: SIMD[of, width]) -> SIMD[Self.out, width]:
        """Rounds numbers to what is stored of them; in 8 bits saturated.

        Parameters:
            of: Of the numbers.
            width: How many.
            i: Whether they are of the query, 0, the key, 1, or the value, 2.

        Args:
            y: Sums in float32, or a class token that is rounded to the tokens' dtype.

        Returns:
            Integers `round(y / scale) + zero`, 0 for NaN; or floats, in 8 bits of `y / scale`.
        """
        comptime if Self.out == Self.dtype:
            return y.cast[Self.out]()
        else:
            return stored[Self.out](widened(y) * self.steps[i].scale, self.steps[i].zero)

    @always_inline
    def store_class_token[width: SIMDLength, //](self, c: Int, n: SIMD[Self.dtype, width]):
        """Stores channels of an image's class token, which none of the windows see, in all outputs.

        Parameters:
            width: How many channels.

        Args:
            c: The first of them.
            n: The normalised token.
        """
        comptime ALIGNMENT = Int(width) * size_of[Self.out]()
        self.q.unsafe_store[alignment=ALIGNMENT](c, self.stored[0](n))
        self.k.unsafe_store[alignment=ALIGNMENT](c, self.stored[1](n))
        self.v.unsafe_store[alignment=ALIGNMENT](c, self.stored[2](n))

    @always_inline
    def from_image(self, n: Int, g: QkvSizes) -> Self:
        """Moves on to an image.

        Args:
            n: Its number.
            g: Sizes.

        Returns:
            The operands from there on.
        """
        var o = self
        var queries = n * Int((g.h * g.w + g.first) * g.c)
        var keys = n * Int((g.p * g.q + g.first) * g.c)
        o.x, o.q = self.x.unsafe_offset(queries), self.q.unsafe_offset(queries)
        o.k, o.v = self.k.unsafe_offset(keys), self.v.unsafe_offset(keys)
        return o


struct QkvSizes(KernelArgument, TrivialRegisterPassable):
    """Sizes, all at run time."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var images: Int32
    """N."""
    var first: Int32
    """1 if a class token comes first, or 0."""
    var h: Int32
    """Height of the map of tokens."""
    var w: Int32
    """Width of the map of tokens."""
    var c: Int32
    """Channels."""
    var kernel: Int32
    """Taps of a side of the window."""
    var pad_q: Int32
    """Padding of the query's window."""
    var pad_kv: Int32
    """Padding of the key's and the value's."""
    var stride: Int32
    """Stride of the key's and the value's."""
    var p: Int32
    """Height of the maps of keys and values."""
    var q: Int32
    """Width of the maps of keys and values."""
    var rows: Int32
    """Height of a block's tile."""
    var columns: Int32
    """Width of a block's tile."""
    var parts: Int32
    """Blocks that share the channels of a tile, each of which normalises it."""
    var eps: Float32
    """Added to the variance."""

    def __init__(out self, images: Int, c: Int, window: Data[DType.int64], eps: Float32):
        """Takes the sizes apart.

        Args:
            images: N.
            c: Channels.
            window: Class token (0 or 1), H, W, side of the window, the query's padding, the
                keys' padding and stride: seven numbers in host memory.
            eps: Added to the variance.
        """
        self.images, self.c, self.eps = Int32(images), Int32(c), eps
        self.first = Int32(window[unsafe_offset=0])
        self.h, self.w = Int32(window[unsafe_offset=1]), Int32(window[unsafe_offset=2])
        self.kernel = Int32(window[unsafe_offset=3])
        self.pad_q = Int32(window[unsafe_offset=4])
        self.pad_kv = Int32(window[unsafe_offset=5])
        self.stride = Int32(window[unsafe_offset=6])
        self.p = (self.h + 2 * self.pad_kv - self.kernel) // self.stride + 1
        self.q = (self.w + 2 * self.pad_kv - self.kernel) // self.stride + 1
        self.rows = self.columns = 0
        self.parts = 1

    @always_inline
    def margin(self) -> Int32:
        """Counts the tokens above and left of a tile that its windows see.

        Returns:
            The larger padding.
        """
        return max(self.pad_q, self.pad_kv)

    @always_inline
    def tile_height(self) -> Int32:
        """Counts the rows of a tile and its margin.

        Returns:
            What all windows see that begin in the tile.
        """
        return self.rows + self._around()

    @always_inline
    def tile_width(self) -> Int32:
        """Counts the columns of a tile and its margin.

        Returns:
            What all windows see that begin in the tile.
        """
        return self.columns + self._around()

    @always_inline
    def pitch(self) -> Int32:
        """Counts the tokens that a tile and its margin take in shared memory.

        Returns:
            An odd number with room for the class token, and for the last strip's look past the tile.
        """
        return (self.tile_height() * self.tile_width() + 1) | 1

    @always_inline
    def _around(self) -> Int32:
        return self.kernel - 1 + self.margin() - min(self.pad_q, self.pad_kv)
