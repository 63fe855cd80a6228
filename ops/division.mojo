"""Division by numbers that a launch knows, as kernels do it: by a product and a shift.

From Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994,
figure 4.1.
"""

from std.bit import log2_ceil


def reciprocal(size: Int) -> Tuple[UInt32, UInt32]:
    """Finds what division by a size takes.

    Args:
        size: From 1 to 2^31.

    Returns:
        The factor and the shift of `quotient`.
    """
    var shift = log2_ceil(UInt64(size))
    var power = UInt64(1) << shift
    return UInt32(((power - UInt64(size)) << 32) // UInt64(size) + 1), UInt32(shift)


@always_inline
def quotient(number: UInt32, factor: UInt32, shift: UInt32) -> UInt32:
    """Divides by a size.

    Args:
        number: Less than 2^31.
        factor: See `reciprocal`.
        shift: See `reciprocal`.

    Returns:
        The quotient.
    """
    var high = UInt32((UInt64(number) * UInt64(factor)) >> 32)
    return (high + number) >> shift
