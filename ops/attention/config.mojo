"""What the attention kernels are given: tensors, sizes, and how a launch is divided."""

from std.utils.static_tuple import StaticTuple

from ..kernel_argument import KernelArgument
from ..operands import Affine, Data

comptime LOG2_E = Float32(1.4426950408889634)
"""Exponentials are powers of two: exp(x) = 2^(x log2 e)."""

comptime LN_2 = Float32(0.6931471805599453)
"""And logarithms are those to the base of two: log(x) = ln 2 log2(x)."""

comptime LOWEST = Float32(-1e36)
"""Where the running maximum of a row's scores starts. It is finite, so that rows whose first keys all
score -inf, as masked ones do, come to no inf - inf; a row of -inf alone gives 0 / 0, as in torch."""


comptime Standing[dtype: DType, out: DType] = StaticTuple[Affine, 0 if out == dtype else 1]
"""What 8 bits of a result stand for: kernels that store other numbers receive nothing.

Parameters:
    dtype: Of q, k and v.
    out: Of y.
"""


@always_inline
def affine[count: Int, //](result: StaticTuple[Affine, count]) -> Affine:
    """Gives what a result stands for.

    Parameters:
        count: Of `Standing`.

    Args:
        result: What 8 bits stand for.

    Returns:
        That; other floats stand for themselves.
    """
    comptime if count == 0:
        return Affine(1, 0)
    else:
        return result[0]


struct Attention[dtype: DType, out: DType = dtype](KernelArgument, TrivialRegisterPassable):
    """The tensors and sizes of y = softmax(scale * q k^T) v, head by head.

    Parameters:
        dtype: Of q, k and v.
        out: Of y: theirs, or of 8 bits.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var q: Data[Self.dtype]
    """Queries q[N, T, C], the heads side by side in C."""
    var k: Data[Self.dtype]
    """Keys k[N, S, C]."""
    var v: Data[Self.dtype]
    """Values v[N, S, C]."""
    var y: Data[Self.out]
    """Result y[N, T, C]."""
    var n: Int32
    """Images."""
    var t: Int32
    """Queries of an image."""
    var s: Int32
    """Keys of an image, at least 1."""
    var c: Int32
    """Channels of all heads."""
    var heads: Int32
    """Heads."""
    var scale: Float32
    """Scales the scores; positive."""
    var result: Standing[Self.dtype, Self.out]
    """What 8 bits of y stand for."""

    def __init__(
        out self,
        q: Data[Self.dtype],
        k: Data[Self.dtype],
        v: Data[Self.dtype],
        y: Data[Self.out],
        *,
        n: Int,
        t: Int,
        s: Int,
        c: Int,
        heads: Int,
        scale: Float32,
        result: Affine = Affine(1, 0),
    ):
        """Names tensors and sizes.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            y: Result.
            n: Images.
            t: Queries of an image.
            s: Keys of an image.
            c: Channels.
            heads: Heads.
            scale: Scale of the scores, at least 0; for 0 there is a number whose products with
                scores vanish beside 1, since 0 times the -inf of a masked score is NaN.
            result: What 8 bits of y stand for; not read if y is of other floats.
        """
        self.q, self.k, self.v, self.y = q, k, v, y
        self.n, self.t, self.s, self.c = Int32(n), Int32(t), Int32(s), Int32(c)
        self.heads = Int32(heads)
        self.scale = max(scale, 1e-37)
        self.result = Standing[Self.dtype, Self.out](fill=result)
