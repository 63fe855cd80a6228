"""Functions of float64 on a CPU, by the C library: for gradients that are checked, not for speed.

Those of `std.math` lose NaN (tanh), or half of the bits (exp, and powers).
"""

from std.math import cos, erf, expm1, floor, log, log1p, sin, sqrt
from std.sys.intrinsics import llvm_intrinsic
from std.utils.numerics import isnan

from .functions import to_e4m3
from .operands import F32, F64


@always_inline
def exponential64[width: SIMDLength](x: SIMD[F64, width]) -> SIMD[F64, width]:
    """Computes e^x.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The exponentials.
    """
    return llvm_intrinsic["llvm.exp", SIMD[F64, width]](x)


@always_inline
def unary64[width: SIMDLength, //, op: String](x: SIMD[F64, width]) -> SIMD[F64, width]:
    """Computes an op of one value.

    Parameters:
        width: Lanes.
        op: One of `UNARY` of expression.mojo.

    Args:
        x: Any numbers.

    Returns:
        What torch computes.
    """
    comptime ZERO = SIMD[F64, width](0)
    comptime if op == "relu":
        return x.lt(0).select(ZERO, x)
    elif op == "gelu":
        return x * 0.5 * (1 + erf(x * 0.70710678118654752440))
    elif op == "gelu_grad":
        var below = 0.5 * (1 + erf(x * 0.70710678118654752440))
        return below + x * exponential64(x * x * -0.5) * 0.39894228040143267794
    elif op == "gelu_tanh":
        var inside = (x * x).fma(SIMD[F64, width](0.044715), SIMD[F64, width](1)) * x
        return x / (1 + exponential64(inside * -1.5957691216057307117))  # 2 sqrt(2 / pi)
    elif op == "silu":
        return x / (1 + exponential64(-x))
    elif op == "sigmoid":
        return 1 / (1 + exponential64(-x))
    elif op == "tanh":
        var u = expm1(-2 * abs(x))
        var size = -u / (2 + u)
        return isnan(x).select(x, x.lt(0).select(-size, size))
    elif op == "hardswish" or op == "hardsigmoid":
        var y = _within(x + 3, 6) / 6
        comptime if op == "hardswish":
            return x * y
        else:
            return y
    elif op == "mish":
        var e = exponential64(x.gt(20).select(SIMD[F64, width](20), x))
        var n = e * (e + 2)
        return x.gt(20).select(x, x * (n / (n + 2)))
    elif op == "softplus":
        return isnan(x).select(x, x.gt(0).select(x, ZERO) + log1p(exponential64(-abs(x))))
    elif op == "exp":
        return exponential64(x)
    elif op == "log":
        return log(x)
    elif op == "sqrt":
        return sqrt(x)
    elif op == "rsqrt":
        return 1 / sqrt(x)
    elif op == "reciprocal":
        return 1 / x
    elif op == "neg":
        return -x
    elif op == "abs":
        return abs(x)
    elif op == "erf":
        return isnan(x).select(x, erf(x))
    elif op == "sin":
        return sin(x)
    elif op == "cos":
        return cos(x)
    elif op == "floor":
        return floor(x)
    elif op == "e4m3":
        return to_e4m3(x.cast[F32]()).cast[F64]()
    else:
        comptime assert op == "round", "no such op of one value"
        return x.__round__()


@always_inline
def _within[width: SIMDLength](x: SIMD[F64, width], high: Float64) -> SIMD[F64, width]:
    """Clamps to numbers from 0 to `high`; NaN for NaN."""
    var least = x.lt(0).select(SIMD[F64, width](0), x)
    return least.gt(high).select(SIMD[F64, width](high), least)


@always_inline
def power64[width: SIMDLength](x: SIMD[F64, width], y: SIMD[F64, width]) -> SIMD[F64, width]:
    """Computes x^y as C's pow does.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.
        y: Any numbers.

    Returns:
        The powers.
    """
    return llvm_intrinsic["llvm.pow", SIMD[F64, width]](x, y)


@always_inline
def exponential_minus_1_64[width: SIMDLength](x: SIMD[F64, width]) -> SIMD[F64, width]:
    """Computes e^x - 1, small ones to their last bits.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The differences.
    """
    return expm1(x)
