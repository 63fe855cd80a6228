"""What an op does to its accumulator before the one store: the fused epilogues.

    none      y = alpha * acc + bias
    relu      y = max(alpha * acc + bias, 0)
    gelu      y = g(alpha * acc + bias),  g(v) = v / 2 * (1 + erf(v / sqrt(2)))
    add       y = alpha * acc + bias + residual
    add_relu  y = max(alpha * acc + bias + residual, 0)

With `scales`, each filter has a scale in the place of alpha, and the residual one of its own: so
numbers of 8 bits are multiplied, added and made (`Scales` of operands.mojo).

In the place of relu may be any op of one value of graphs/elementwise.py, its settings before it:
`silu`, `add_0.0 6.0 clamp`. All of it in float32; the result is rounded once, to the output's dtype.
"""

from .expression import evaluate_words, is_expression, split
from .functions import gelu, gelu_narrow, relu
from .operands import BF16, F32


struct Epilogue(TrivialRegisterPassable):
    """One of the fused epilogues above, as a compile-time value."""

    var name: StaticString
    """As graphs/nodes.py passes it; see `known`."""
    var adds: Bool
    """Whether the residual is added."""
    var relu: Bool
    """Whether the result is rectified."""
    var gelu: Bool
    """Whether the result goes through a GELU."""
    var scales: Bool
    """Whether each filter's sum, and the residual, have scales."""

    def __init__(out self, name: StaticString, *, scales: Bool = False):
        """Looks an epilogue up.

        Args:
            name: As graphs/nodes.py passes it; see `known`.
            scales: Whether each filter's sum, and the residual, have scales.
        """
        self.name, self.scales = name, scales
        self.adds = name.startswith("add")
        self.relu = name == "relu" or name == "add_relu"
        self.gelu = name == "gelu" or name == "add_gelu"

    def words(self) -> List[String]:
        """Writes the activation down as an expression of the sum, x0.

        Returns:
            Its words; `x0` alone if there is no activation.
        """
        var found: List[String] = ["x0"]
        if self.name != "none" and self.name != "add":
            found.extend(split(self.name))
            if self.adds:
                var first = String(found[1].removeprefix("add_"))
                found[1] = first^
        return found^

    def label(self) -> String:
        """Names the epilogue for a profiler, as a part of a kernel's symbol.

        Returns:
            The name without settings: `add_clamp`, `scale_add_clamp`.
        """
        var words = self.words()
        var scale = "scale_" if self.scales else ""
        if len(words) == 1:
            return String(scale, "add" if self.adds else "none")
        return String(scale, "add_" if self.adds else "", words[len(words) - 1])

    @staticmethod
    def known[name: StaticString]() -> Bool:
        """Tells whether there is an epilogue of that name.

        Parameters:
            name: Any name.

        Returns:
            True for none and add, and for an op of one value, alone or behind `add_`.
        """
        # Reading an expression costs the compiler 1 s, so the usual names are told apart first.
        comptime if Self(name).usual():
            return True
        else:
            return is_expression(Self(name).words(), 1)

    def usual(self) -> Bool:
        """Tells whether the epilogue is one of those in the table above.

        Returns:
            False for the ops of graphs/elementwise.py.
        """
        return self.relu or self.gelu or self.name == "none" or self.name == "add"


@always_inline
def activate[
    width: SIMDLength, //, epilogue: Epilogue, dtype: DType
](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Applies the epilogue's activation.

    Parameters:
        width: Lanes.
        epilogue: The epilogue.
        dtype: What the result is rounded to.

    Args:
        v: The sum alpha * acc + bias, and the residual if the epilogue adds.

    Returns:
        The result, before it is rounded.
    """
    comptime if epilogue.relu:
        return relu(v)
    elif epilogue.gelu:
        comptime if dtype == BF16:
            return gelu_narrow(v)
        else:
            return gelu(v)
    elif epilogue.usual():
        return v
    else:
        return evaluate_words[epilogue.words(), narrow=dtype.is_half_float()]([v])


@always_inline
def apply[
    width: SIMDLength, //, epilogue: Epilogue, dtype: DType
](
    sum: SIMD[F32, width],
    alpha: SIMD[F32, width],
    bias: SIMD[F32, width],
    residual: SIMD[F32, width] = 0,
    residual_scale: Float32 = 1,
) -> SIMD[F32, width]:
    """Computes act(alpha * sum + bias + residual), the residual scaled if the epilogue scales.

    Parameters:
        width: Lanes.
        epilogue: The epilogue.
        dtype: What the result is rounded to.

    Args:
        sum: The accumulator.
        alpha: Scale of the product: one number, or that of each lane.
        bias: Of each lane.
        residual: Of each lane; counts if the epilogue adds.
        residual_scale: Of the residual; counts if the epilogue scales.

    Returns:
        The result, before it is rounded.
    """
    var value = sum.fma(alpha, bias)
    comptime if epilogue.adds and epilogue.scales:
        value = residual.fma(SIMD[F32, width](residual_scale), value)
    elif epilogue.adds:
        value += residual
    return activate[epilogue, dtype](value)
