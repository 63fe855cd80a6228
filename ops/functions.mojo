"""Functions of float32, to a few units in the last place, with torch's NaN and infinity.

Those of `std.math` are rougher on a GPU (exp2 of a rounded product, log2 near 1), and on a CPU exp
and tanh lose NaN and exp gives no infinity. These serve vectors of any width on both. Clamps are
selects: `min` and `max` drop NaN.
"""

from std.math import copysign, exp, exp2, floor
from std.memory import bitcast
from std.sys import CompilationTarget, is_gpu, is_nvidia_gpu
from std.sys.intrinsics import llvm_intrinsic
from std.utils.numerics import inf, isinf, isnan, nan

from .operands import F32

comptime LOG2_E: Float32 = 1.44269504
"""1 / ln 2."""
comptime LOG2_E_LOW: Float32 = 1.925963033500e-8
"""The rest of 1 / ln 2."""
comptime LN_2_HIGH: Float32 = 0.693359375
"""The first bits of ln 2: its product with an exponent is exact."""
comptime LN_2_LOW: Float32 = -2.12194440e-4
"""The rest of ln 2."""
comptime ROUNDER: Float32 = 12582912
"""1.5 * 2^23: a number that is added to it is rounded, and stands in the lowest bits."""
comptime EXP: List[Float32] = [
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
]
"""(exp(r) - 1 - r) / r^2 for |r| up to ln(2) / 2 (Cephes, expf)."""
comptime LOG: List[Float32] = [
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
]
"""(log(1 + r) - r + r^2 / 2) / r^3 for 1 + r between sqrt(1/2) and sqrt(2) (Cephes, logf)."""
comptime SIN: List[Float32] = [-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1]
"""(sin(r) - r) / r^3, a polynomial in r^2 for |r| up to pi / 4 (Cephes, sinf)."""
comptime COS: List[Float32] = [2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2]
"""(cos(r) - 1 + r^2 / 2) / r^4, likewise."""


@always_inline
def polynomial[
    width: SIMDLength, //, coefficients: List[Float32]
](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Evaluates a polynomial by Horner's rule.

    Parameters:
        width: Lanes.
        coefficients: The highest power's first.

    Args:
        x: Where.

    Returns:
        Its values.
    """
    comptime first = coefficients[0]
    var sum = SIMD[F32, width](first)
    comptime for i in range(1, len(coefficients)):
        comptime coefficient = coefficients[i]
        sum = sum.fma(x, coefficient)
    return sum


@always_inline
def at_least[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], low: Scalar[dtype]) -> SIMD[dtype, width]:
    """Raises what is below a number.

    Parameters:
        dtype: Of the numbers.
        width: Lanes.

    Args:
        x: Any numbers.
        low: The least that is left.

    Returns:
        The greater of both; NaN for NaN.
    """
    return x.lt(low).select(SIMD[dtype, width](low), x)


@always_inline
def at_most[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], high: Scalar[dtype]) -> SIMD[dtype, width]:
    """Lowers what is above a number.

    Parameters:
        dtype: Of the numbers.
        width: Lanes.

    Args:
        x: Any numbers.
        high: The most that is left.

    Returns:
        The lesser of both; NaN for NaN.
    """
    return x.gt(high).select(SIMD[dtype, width](high), x)


@always_inline
def greater[
    dtype: DType, width: SIMDLength, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Takes the greater of two numbers, lane by lane.

    Parameters:
        dtype: Of the numbers.
        width: Lanes.

    Args:
        a: Any numbers.
        b: Others.

    Returns:
        The greater; NaN if one of them is.
    """
    return (b.gt(a) | isnan(b)).select(b, a)


@always_inline
def lesser[
    dtype: DType, width: SIMDLength, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Takes the lesser of two numbers, lane by lane.

    Parameters:
        dtype: Of the numbers.
        width: Lanes.

    Args:
        a: Any numbers.
        b: Others.

    Returns:
        The lesser; NaN if one of them is.
    """
    return (b.lt(a) | isnan(b)).select(b, a)


@always_inline
def _power_of_2[width: SIMDLength](exponent: SIMD[DType.int32, width]) -> SIMD[F32, width]:
    return bitcast[F32, width]((exponent + 127) << 23)


@always_inline
def exponential[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes e^x.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The exponentials; below 2^-126 perhaps 0.
    """
    comptime if is_gpu():
        # 2^n 2^r: exp2 is exact of n, and good to 2 units of r.
        var n = at_least(at_most((x * LOG2_E + ROUNDER) - ROUNDER, 127), -126)
        var r = x.fma(SIMD[F32, width](LOG2_E), -n)
        # The low part of the product counts as long as there is one.
        r = isinf(x).select(r, x.fma(SIMD[F32, width](LOG2_E_LOW), r))
        return exp2(r) * exp2(n)
    else:
        var inside = at_least(at_most(x, 89), -104)
        var shifted = inside.fma(SIMD[F32, width](LOG2_E), SIMD[F32, width](ROUNDER))
        var n = shifted - ROUNDER
        var r = n.fma(SIMD[F32, width](-LN_2_HIGH), inside)
        r = n.fma(SIMD[F32, width](-LN_2_LOW), r)
        var value = polynomial[EXP](r).fma(r * r, r) + 1
        # In two steps, as 2^128 is no float32.
        var exponent = bitcast[DType.int32, width](shifted) - 0x4B400000
        var half = exponent >> 1
        return value * _power_of_2(half) * _power_of_2(exponent - half)


@always_inline
def exponential_minus_1[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes e^x - 1 for x up to 0, small ones to their last bits.

    Parameters:
        width: Lanes.

    Args:
        x: Numbers up to 0, or NaN.

    Returns:
        The differences.
    """
    var inside = at_least(x, -30)
    var shifted = inside.fma(SIMD[F32, width](LOG2_E), SIMD[F32, width](ROUNDER))
    var n = shifted - ROUNDER
    var r = n.fma(SIMD[F32, width](-LN_2_HIGH), inside)
    r = n.fma(SIMD[F32, width](-LN_2_LOW), r)
    var scale = _power_of_2(bitcast[DType.int32, width](shifted) - 0x4B400000)
    return polynomial[EXP](r).fma(r * r, r).fma(scale, scale - 1)


@always_inline
def logarithm[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the natural logarithm.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The logarithms; -inf for 0, NaN for what is below.
    """
    comptime SMALL: Float32 = 1.17549435e-38
    var small = x.lt(SMALL)  # denormals have no exponent of their own
    var bits = bitcast[DType.int32, width](small.select(x * 8388608, x))
    # The mantissa between sqrt(1/2) and sqrt(2).
    var above = bits - 0x3F3504F3
    var n = (above >> 23).cast[F32]() - small.select(SIMD[F32, width](23), SIMD[F32, width](0))
    var r = bitcast[F32, width]((above & 0x7FFFFF) + 0x3F3504F3) - 1
    var square = r * r
    var low = n.fma(SIMD[F32, width](LN_2_LOW), polynomial[LOG](r) * r * square)
    low = square.fma(SIMD[F32, width](-0.5), low)
    var value = n.fma(SIMD[F32, width](LN_2_HIGH), r + low)
    value = x.eq(0).select(SIMD[F32, width](-inf[F32]()), value)
    value = x.lt(0).select(SIMD[F32, width](nan[F32]()), value)
    return (isnan(x) | x.eq(inf[F32]())).select(x, value)


@always_inline
def logarithm_of_1_plus[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes log(1 + x) for x from 0 to 1, small ones to their last bits.

    Parameters:
        width: Lanes.

    Args:
        x: Numbers from 0 to 1, or NaN.

    Returns:
        The logarithms.
    """
    var sum = 1 + x
    return logarithm(sum) + (x - (sum - 1)) / sum


@always_inline
def sigmoid[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes 1 / (1 + e^-x).

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        Numbers from 0 to 1.
    """
    return 1 / (1 + exponential(-x))


@always_inline
def sigmoid_narrow[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes 1 / (1 + e^-x) to 1e-5 relatively, enough for 16 bits: on a GPU in two instructions.

    Below -87 it may be 0.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        Numbers from 0 to 1.
    """
    comptime if is_nvidia_gpu():
        var all = 1 + exp2(x * -LOG2_E)
        var value = SIMD[F32, width]()
        comptime for i in range(width):
            value[i] = llvm_intrinsic["llvm.nvvm.rcp.approx.ftz.f", Float32](all[i])
        return value
    else:
        return sigmoid(x)


@always_inline
def tanh[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the hyperbolic tangent.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        Numbers from -1 to 1.
    """
    var u = exponential_minus_1(-2 * abs(x))
    var value = -u / (2 + u)
    return x.lt(0).select(-value, x.eq(0).select(x, value))


@always_inline
def softplus[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes log(1 + e^x).

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The logarithms.
    """
    return at_least(x, 0) + logarithm_of_1_plus(exponential(-abs(x)))


@always_inline
def gelu_tanh[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the GELU by tanh: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        The GELU of each lane; NaN for -inf, as in torch.
    """
    comptime SLOPE: Float32 = -1.5957691216057308  # -2 sqrt(2 / pi)
    comptime BEND: Float32 = SLOPE * 0.044715
    var inside = x * (x * x).fma(SIMD[F32, width](BEND), SIMD[F32, width](SLOPE))
    return x / (1 + exponential(inside))


@always_inline
def mish[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes x tanh(log(1 + e^x)) (Misra 2019, arXiv:1908.08681).

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.

    Returns:
        Mish of each lane; NaN for -inf, as in torch.
    """
    var e = exponential(at_most(x, 20))
    var n = e * (e + 2)
    return x.gt(20).select(x, x * (n / (n + 2)))


comptime E4M3_LARGEST: Float32 = 448
"""The largest number of float8_e4m3fn."""


@always_inline
def to_e4m3[width: SIMDLength](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Rounds to the numbers of float8_e4m3fn, to nearest even: 4 significant bits, multiples of 2^-9.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers; beyond the largest they become that.

    Returns:
        The nearest numbers, in float32; NaN for NaN.
    """
    comptime LEAST: UInt32 = 0x3C800000  # 2^-6, below which they lie as far apart as above
    comptime ROUNDS: UInt32 = (20 << 23) + 0x400000  # times 1.5 * 2^20
    var size = at_most(abs(x), E4M3_LARGEST)
    var power = max(
        bitcast[DType.uint32, width](size) & 0x7F800000, SIMD[DType.uint32, width](LEAST)
    )
    # Beside that number they lie as far apart as around x.
    var rounder = bitcast[F32, width](power + ROUNDS)
    return copysign((size + rounder) - rounder, x)


@always_inline
def _quadrant[
    width: SIMDLength
](x: SIMD[F32, width]) -> Tuple[SIMD[DType.int32, width], SIMD[F32, width]]:
    """Takes multiples of pi / 2 off, in float64, which has the bits for |x| up to 2^31."""
    comptime WIDE = SIMD[DType.float64, width]
    var n = floor(x.cast[DType.float64]() * 0.63661977236758134308 + 0.5)
    var r = n.fma(WIDE(-1.5707963267948966192), x.cast[DType.float64]())
    r = n.fma(WIDE(-6.123233995736766036e-17), r)
    # Beyond, nothing is known of the phase: 0 for finite numbers, NaN for the others.
    var known = abs(x).lt(1e15)
    var whole = known.select(n, WIDE(0)).cast[DType.int64]()
    return (whole & 3).cast[DType.int32](), known.select(r.cast[F32](), x - x)


@always_inline
def sine[width: SIMDLength](x: SIMD[F32, width], turn: Int32 = 0) -> SIMD[F32, width]:
    """Computes sin(x + turn pi / 2): with a turn of 1, the cosine.

    Parameters:
        width: Lanes.

    Args:
        x: Numbers up to 2^31 in size; of larger ones the phase is rounded, beyond 1e15 it is 0.
        turn: Quarters of a turn.

    Returns:
        Numbers from -1 to 1; NaN for infinity.
    """
    var reduced = _quadrant(x)
    var quadrant, r = reduced[0] + turn, reduced[1]
    var square = r * r
    var sin = (polynomial[SIN](square) * square).fma(r, r)
    var cos = (polynomial[COS](square) * square).fma(square, square.fma(-0.5, 1))
    var value = (quadrant & 1).eq(0).select(sin, cos)
    return (quadrant & 2).eq(0).select(value, -value)


@always_inline
def power[width: SIMDLength](x: SIMD[F32, width], y: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes x^y as C's pow does: NaN for a negative x and a y that is no whole number.

    The logarithm is a float64: y times it may be 128, of which float32 keeps 16 bits of fraction.

    Parameters:
        width: Lanes.

    Args:
        x: Any numbers.
        y: Any numbers.

    Returns:
        The powers.
    """
    comptime WIDE = SIMD[DType.float64, width]
    comptime ONE = SIMD[F32, width](1)
    var size = abs(x)
    var small = size.lt(1.17549435e-38)
    var bits = bitcast[DType.int32, width](small.select(size * 8388608, size))
    var above = bits - 0x3F3504F3
    var n = (above >> 23).cast[DType.float64]() - small.select(WIDE(23), WIDE(0))
    var mantissa = bitcast[F32, width]((above & 0x7FFFFF) + 0x3F3504F3).cast[DType.float64]()
    # log(m) = 2 artanh(s), a series in s^2 of at most 0.03.
    var s = (mantissa - 1) / (mantissa + 1)
    var square = s * s
    var sum = WIDE(1.0 / 15)
    comptime for i in range(7):
        comptime term = Float64(1) / Float64(13 - 2 * i)
        sum = sum.fma(square, WIDE(term))
    var logarithm = (s * sum).fma(WIDE(2.8853900817779268), n)
    logarithm = size.eq(0).select(WIDE(-inf[DType.float64]()), logarithm)
    logarithm = (isnan(x) | isinf(x)).select(size.cast[DType.float64](), logarithm)

    var exponent = y.cast[DType.float64]() * logarithm
    exponent = exponent.gt(150).select(WIDE(150), exponent)
    exponent = exponent.lt(-160).select(WIDE(-160), exponent)
    var whole = floor(exponent + 0.5)
    var rest = ((exponent - whole) * 0.69314718055994530942).cast[F32]()
    var value = polynomial[EXP](rest).fma(rest * rest, rest) + 1
    var count = isnan(whole).select(WIDE(0), whole).cast[DType.int32]()
    var half = count >> 1
    value *= _power_of_2(half) * ONE
    value *= _power_of_2(count - half)

    var is_whole = floor(y).eq(y)
    var is_odd = is_whole & floor(y * 0.5).ne(y * 0.5)
    var negative = bitcast[DType.int32, width](x).lt(0)
    value = (negative & is_odd).select(-value, value)
    value = (x.lt(0) & ~isinf(x) & ~is_whole).select(SIMD[F32, width](nan[F32]()), value)
    return (y.eq(0) | x.eq(1) | (size.eq(1) & isinf(y))).select(ONE, value)


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
comptime LOG2_TAIL_ALONE: List[Float32] = [
    -5.1886876e-04,
    7.3872501e-03,
    -5.2538097e-02,
    -4.5927663e-01,
    -1.1510832,
    -1.0000008,
]
"""The same of degree 5 for the least largest error of P(X > a) alone, which is 3e-7."""
comptime LOG2_TAIL_ALONE_NARROW: List[Float32] = [
    -3.1412698e-02,
    -4.7894602e-01,
    -1.1455865,
    -1.0002167,
]
"""That of degree 3, to 7.5e-5."""


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
    return (-a).fma(_tail[log2_tail](a), relu(v))


@always_inline
def _tail[width: SIMDLength, //, log2_tail: List[Float32]](a: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes P(X > a) for a >= 0."""
    comptime first = log2_tail[0]
    var tail = SIMD[F32, width](first)
    comptime for i in range(1, len(log2_tail)):
        comptime coefficient = log2_tail[i]
        tail = tail.fma(a, coefficient)
    comptime if is_gpu():
        return exp2(tail)
    else:  # where exp2 is good to 3e-6 only
        return exp(tail * LN_2)


@always_inline
def gelu_grad[
    width: SIMDLength, //, log2_tail: List[Float32] = LOG2_TAIL_ALONE
](v: SIMD[F32, width]) -> SIMD[F32, width]:
    """Computes the derivative of the exact GELU, P(X < v) + v p(v), p the normal density.

    Parameters:
        width: Lanes.
        log2_tail: The polynomial: of LOG2_TAIL_ALONE_NARROW it is good to 8e-5.

    Args:
        v: Any number in each lane.

    Returns:
        The slope in each lane, to 5e-7 absolutely; NaN for infinity and NaN, as in torch.
    """
    comptime DENSITY: Float32 = 0.3989422804014327  # 1 / sqrt(2 pi)
    var beyond = 0.5 - _tail[log2_tail](max(-v, min(v, 64)))
    var below = 0.5 + copysign(beyond, v)
    return (v * DENSITY).fma(exponential(v * v * -0.5), below)


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
