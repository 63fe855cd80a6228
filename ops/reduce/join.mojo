"""How two numbers become one: what a reduction does again and again."""

from std.math import isnan
from std.utils.numerics import inf, neg_inf

from ..operands import F32


@always_inline
def joined[
    dtype: DType, width: SIMDLength, //, kind: StaticString
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Adds two numbers, or takes one of them.

    Parameters:
        dtype: Float32, or float64 on a CPU.
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
def nothing[kind: StaticString, dtype: DType = F32]() -> Scalar[dtype]:
    """Gives what changes no other number when it is joined.

    Parameters:
        kind: How numbers are joined: sum, amax or amin.
        dtype: Of the numbers.

    Returns:
        0, or an infinity.
    """
    comptime if kind == "amax":
        return neg_inf[dtype]()
    elif kind == "amin":
        return inf[dtype]()
    else:
        return 0


@always_inline
def over_vector[
    dtype: DType, width: Int, //, kind: StaticString
](value: SIMD[dtype, width]) -> Scalar[dtype]:
    """Joins the lanes of a vector.

    Parameters:
        dtype: Of the numbers.
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
