"""What an op does to its accumulator before the one store: the fused epilogues.

    none      y = alpha * acc + bias
    relu      y = max(alpha * acc + bias, 0)
    gelu      y = g(alpha * acc + bias),  g(v) = v / 2 * (1 + erf(v / sqrt(2)))
    add       y = alpha * acc + bias + residual
    add_relu  y = max(alpha * acc + bias + residual, 0)

All of it in float32; the result is rounded once, to the output's dtype.
"""

from std.math import exp, exp2
from std.sys import CompilationTarget, is_gpu
from std.sys.intrinsics import llvm_intrinsic

from .operands import BF16, F32

comptime LN_2 = 0.69314718055994530942
"""The natural logarithm of 2."""
comptime LOG2_TAIL: List[Float32] = [
    -4.7330931e-04,
    7.0845573e-03,
    -5.1827382e-02,
    -4.5999244e-01,
    -1.1507878,
    -1.0000377,
]
"""The base-2 logarithm of the normal distribution's tail P(X > a), a polynomial of degree 5 in a.

Fitted on [0, 6] by Lawson's iteration for the least largest error of a * P(X > a), which is 5e-7;
beyond, it falls to -inf as the logarithm does.
"""
comptime LOG2_TAIL_NARROW: List[Float32] = [
    -2.4873953e-02,
    -4.9885349e-01,
    -1.1292197,
    -1.0035367,
]
"""The same of degree 3, to 5.5e-5."""


@always_inline
def relu[width: SIMDLength](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes max(v, 0), in one instruction.

    Parameters:
        width: Lanes.

    Args:
        v: Any number in each lane.

    Returns:
        The greater one; NaN for NaN, which `max` would turn into 0.
    """
    comptime if CompilationTarget.is_x86():
        # maxps takes the second of two that do not compare.
        return v.lt(0).select(SIMD[F32, width](0), v)
    else:
        return llvm_intrinsic["llvm.maximum", SIMD[F32, width]](v, SIMD[F32, width](0))


@always_inline
def gelu[
    width: SIMDLength, //, log2_tail: List[Float32] = LOG2_TAIL
](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the exact GELU (Hendrycks and Gimpel 2016, section 2), to 5e-7 absolutely.

    v P(X < v) = max(v, 0) - |v| P(X > |v|), by one exponential and few multiplications: the
    epilogue of CvT's widest layers issues as many instructions as all the rest of the kernel.

    Parameters:
        width: Lanes.
        log2_tail: The polynomial.

    Args:
        v: Any number in each lane.

    Returns:
        The GELU of each lane; NaN for -inf and NaN, as in torch.
    """
    # |v|, at most 64 where v > 0: infinity times the tail's 0 is NaN.
    var a = max(-v, min(v, 64))
    comptime first = log2_tail[0]
    var tail = SIMD[F32, width](first)
    comptime for i in range(1, len(log2_tail)):
        comptime coefficient = log2_tail[i]
        tail = tail.fma(a, coefficient)
    comptime if is_gpu():
        return (-a).fma(exp2(tail), relu(v))
    else:  # where exp2 is good to 3e-6 only
        return (-a).fma(exp(tail * LN_2), relu(v))


comptime REACH: Float32 = 4.41
"""Beyond it the GELU is 0 or v, to 3e-5; the polynomial gives P(X < -REACH) < 0."""
comptime HALF_TAIL: List[Float32] = [
    3.5694288e-11,
    -3.7540486e-09,
    1.7408473e-07,
    -4.7248682e-06,
    8.4293017e-05,
    -1.0549926e-03,
    9.6430285e-03,
    -6.6076428e-02,
    3.9876160e-01,
]
"""(P(X < v) - 1/2) / v, a polynomial of degree 8 in v^2.

Fitted as LOG2_TAIL on [0, 4.4], for the least largest error of v * P(X < v), which is 3e-5.
"""


@always_inline
def gelu_narrow[width: SIMDLength](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the exact GELU to 5.5e-5 absolutely, enough for bfloat16: fewer instructions.

    Parameters:
        width: Lanes.

    Args:
        v: Any number in each lane.

    Returns:
        The GELU of each lane; NaN for -inf and NaN, as in torch.
    """
    comptime if is_gpu():  # where an exponential is one instruction
        return gelu[log2_tail=LOG2_TAIL_NARROW](v)
    var inside = max(min(v, REACH), -REACH)
    var square = inside * inside
    comptime coefficients = HALF_TAIL
    comptime first = coefficients[0]
    var slope = SIMD[F32, width](first)
    comptime for i in range(1, len(coefficients)):
        comptime coefficient = coefficients[i]
        slope = slope.fma(square, coefficient)
    return v * max(inside.fma(slope, 0.5), 0)


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

    def label(self) -> String:
        """Names the epilogue for a profiler, as a part of a kernel's symbol.

        Returns:
            What `known` lists.
        """
        if self.adds:
            return "add_relu" if self.relu else "add"
        return "relu" if self.relu else "gelu" if self.gelu else "none"

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
    else:
        return v


@always_inline
def apply[
    width: SIMDLength, //, epilogue: Epilogue, dtype: DType
](
    sum: SIMD[F32, width],
    alpha: Float32,
    bias: SIMD[F32, width],
    residual: SIMD[F32, width] = 0,
) -> SIMD[F32, width]:
    """Computes act(alpha * sum + bias + residual).

    Parameters:
        width: Lanes.
        epilogue: The epilogue.
        dtype: What the result is rounded to.

    Args:
        sum: The accumulator.
        alpha: Scale of the product.
        bias: Of each lane.
        residual: Of each lane; counts if the epilogue adds.

    Returns:
        The result, before it is rounded.
    """
    var value = sum.fma(SIMD[F32, width](alpha), bias)
    comptime if epilogue.adds:
        value += residual
    return activate[epilogue, dtype](value)
