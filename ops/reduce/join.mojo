"""How two numbers become one: what a reduction does again and again."""

from std.math import isnan
from std.utils.numerics import inf, neg_inf

from ..operands import F32


@always_inline
def joined[
    width: SIMDLength, //, kind: StaticString
](a: SIMD[F32, width], b: SIMD[F32, width]) -> SIMD[F32, width]:
    """Adds two numbers, or takes one of them.

    Parameters:
        width: Lanes.
        kind: How numbers are joined: sum, amax or amin.

    Args:
        a: What there is so far.
        b: What comes to it.

    Returns:
        The sum, or the larger or the smaller one; NaN if one is.
    """
    comptime if kind == "amax":
        return (b.gt(a) | isnan(b)).select(b, a)
    elif kind == "amin":
        return (b.lt(a) | isnan(b)).select(b, a)
    else:
        return a + b


@always_inline
def nothing[kind: StaticString]() -> Float32:
    """Gives what changes no other number when it is joined.

    Parameters:
        kind: How numbers are joined: sum, amax or amin.

    Returns:
        0, or an infinity.
    """
    comptime if kind == "amax":
        return neg_inf[F32]()
    elif kind == "amin":
        return inf[F32]()
    else:
        return 0


@always_inline
def over_vector[width: Int, //, kind: StaticString](value: SIMD[F32, width]) -> Float32:
    """Joins the lanes of a vector.

    Parameters:
        width: Lanes.
        kind: How numbers are joined: sum, amax or amin.

    Args:
        value: The vector.

    Returns:
        One number.
    """
    comptime if kind == "sum":
        return value.reduce_add()
    else:
        var found = value[0]
        comptime for i in range(1, width):
            found = joined[kind](found, value[i])
        return found
