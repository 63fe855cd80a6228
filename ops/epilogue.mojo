"""What an op does to its accumulator before the one store: the fused epilogues.

    none      y = alpha * acc + bias
    relu      y = max(alpha * acc + bias, 0)
    gelu      y = g(alpha * acc + bias),  g(v) = v / 2 * (1 + erf(v / sqrt(2)))
    add       y = alpha * acc + bias + residual
    add_relu  y = max(alpha * acc + bias + residual, 0)

All of it in float32; the result is rounded once, to the output's dtype.
"""

from std.math import erf

comptime SQRT_HALF = 0.70710678118654752440


@always_inline
def gelu[width: SIMDLength](v: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """Returns the exact GELU (Hendrycks and Gimpel 2016, section 2) of each lane."""
    return 0.5 * v * (1 + erf(v * SQRT_HALF))


struct Epilogue(TrivialRegisterPassable):
    """One of the fused epilogues above, as a compile-time value."""

    var adds: Bool
    var relu: Bool
    var gelu: Bool

    def __init__(out self, name: StaticString):
        """Looks an epilogue up by the name that graphs/nodes.py passes."""
        self.adds = name == "add" or name == "add_relu"
        self.relu = name == "relu" or name == "add_relu"
        self.gelu = name == "gelu"

    @staticmethod
    def known(name: StaticString) -> Bool:
        """Tells whether `name` is one of the epilogues."""
        return (
            name == "none"
            or name == "relu"
            or name == "gelu"
            or name == "add"
            or name == "add_relu"
        )


@always_inline
def activate[
    width: SIMDLength, //, epilogue: Epilogue
](v: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
    """Applies the epilogue's activation to `alpha * acc + bias (+ residual)`."""
    comptime if epilogue.relu:
        return max(v, 0)
    elif epilogue.gelu:
        return gelu(v)
    else:
        return v
