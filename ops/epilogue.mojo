"""What an op does to its accumulator before the one store: the fused epilogues.

    none      y = alpha * acc + bias
    relu      y = max(alpha * acc + bias, 0)
    gelu      y = g(alpha * acc + bias),  g(v) = v / 2 * (1 + erf(v / sqrt(2)))
    add       y = alpha * acc + bias + residual
    add_relu  y = max(alpha * acc + bias + residual, 0)

All of it in float32; the result is rounded once, to the output's dtype.
"""

from std.math import erf

from .operands import F32

comptime SQRT_HALF = 0.70710678118654752440
"""The square root of one half."""


@always_inline
def gelu[width: SIMDLength](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the exact GELU (Hendrycks and Gimpel 2016, section 2).

    Parameters:
        width: Lanes.

    Args:
        v: Any number in each lane.

    Returns:
        The GELU of each lane.
    """
    return 0.5 * v * (1 + erf(v * SQRT_HALF))


struct Epilogue(TrivialRegisterPassable):
    """One of the fused epilogues above, as a compile-time value."""

    var adds: Bool
    """Whether the residual is added."""
    var relu: Bool
    """Whether the result is rectified."""
    var gelu: Bool
    """Whether the result goes through a GELU."""

    def __init__(out self, name: StaticString):
        """Looks an epilogue up.

        Args:
            name: As graphs/nodes.py passes it; see `known`.
        """
        self.adds = name == "add" or name == "add_relu"
        self.relu = name == "relu" or name == "add_relu"
        self.gelu = name == "gelu"

    @staticmethod
    def known(name: StaticString) -> Bool:
        """Tells whether there is an epilogue of that name.

        Args:
            name: Any name.

        Returns:
            True for none, relu, gelu, add and add_relu.
        """
        return (
            name == "none"
            or name == "relu"
            or name == "gelu"
            or name == "add"
            or name == "add_relu"
        )


@always_inline
def activate[width: SIMDLength, //, epilogue: Epilogue](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Applies the epilogue's activation.

    Parameters:
        width: Lanes.
        epilogue: The epilogue.

    Args:
        v: The sum alpha * acc + bias, and the residual if the epilogue adds.

    Returns:
        The result, before it is rounded.
    """
    comptime if epilogue.relu:
        return max(v, 0)
    elif epilogue.gelu:
        return gelu(v)
    else:
        return v
