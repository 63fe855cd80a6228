"""Expressions of elementwise ops in postfix order, such as `x0 x1 add 0.0 6.0 clamp`.

graphs/elementwise.py has the grammar and lists the ops. An expression is a compile-time text: what
runs is straight code on vectors of float32, or of float64 on a CPU.
"""

from std.math import erf, floor, rsqrt, sqrt
from std.utils.numerics import inf, nan

from .functions import (
    LOG2_TAIL_ALONE_NARROW,
    at_least,
    at_most,
    exponential,
    exponential_minus_1,
    gelu,
    gelu_grad,
    gelu_tanh,
    greater,
    lesser,
    logarithm,
    mish,
    power,
    relu,
    sigmoid,
    sigmoid_narrow,
    sine,
    softplus,
    tanh,
    to_e4m3,
)
from .functions64 import exponential_minus_1_64, power64, unary64
from .operands import F32, F64


@always_inline
def evaluate[
    dtype: DType,
    width: SIMDLength,
    count: Int,
    //,
    expression: StaticString,
    *,
    narrow: Bool = False,
](values: Array[SIMD[dtype, width], count]) -> SIMD[dtype, width]:
    """Evaluates an expression.

    Parameters:
        dtype: Float32, or float64 on a CPU.
        width: Lanes.
        count: How many values there are.
        expression: Of `x0`, `x1`, ..., numbers and ops.
        narrow: Whether the result is rounded to 16 bits: some ops then take fewer instructions.

    Args:
        values: What `x0`, `x1`, ... stand for.

    Returns:
        The result; 1 and 0 for true and false.
    """
    return evaluate_words[split(expression), narrow=narrow](values)


@always_inline
def evaluate_words[
    dtype: DType, width: SIMDLength, count: Int, //, words: List[String], *, narrow: Bool = False
](values: Array[SIMD[dtype, width], count]) -> SIMD[dtype, width]:
    """Evaluates an expression whose words stand apart.

    Parameters:
        dtype: Float32, or float64 on a CPU.
        width: Lanes.
        count: How many values there are.
        words: `x0`, `x1`, ..., numbers and ops.
        narrow: Whether the result is rounded to 16 bits.

    Args:
        values: What `x0`, `x1`, ... stand for.

    Returns:
        The result; 1 and 0 for true and false.
    """
    comptime depth = _depths(words)
    # As small as it goes: what fills a long array is a loop, for which it would lie in memory.
    var stack = Array[SIMD[dtype, width], _most(depth) + 1](fill=0)
    comptime for i in range(len(words)):
        comptime word = words[i]
        comptime top = depth[i]  # where the result of this word goes
        comptime if _is_value(word):
            comptime index = Int(_number(String(word.removeprefix("x"))))
            stack[top] = values[index]
        elif _is_number(word):
            comptime number = Scalar[dtype](_number(word))
            stack[top] = number
        else:
            comptime arity = _arity(word)
            comptime if arity == 1:
                stack[top] = _unary[word, narrow](stack[top])
            elif word == "clamp":
                comptime low = Scalar[dtype](_number(words[i - 2]))
                comptime high = Scalar[dtype](_number(words[i - 1]))
                var value = stack[top]
                comptime if low != -inf[dtype]():
                    value = at_least(value, low)
                comptime if high != inf[dtype]():
                    value = at_most(value, high)
                stack[top] = value
            elif word == "pow" and _is_number(words[i - 1]):
                comptime exponent = _number(words[i - 1])
                stack[top] = _power_of[exponent](stack[top])
            elif word == "where":
                stack[top] = stack[top].ne(0).select(stack[top + 1], stack[top + 2])
            else:
                stack[top] = _binary[word](stack[top], stack[top + 1])
    return stack[0]


def is_truth(expression: StaticString) -> Bool:
    """Tells whether an expression gives truth values: its last word compares.

    Args:
        expression: Any.

    Returns:
        As `is_truth` of graphs/elementwise.py does.
    """
    var words = split(expression)
    return words[len(words) - 1] in ["eq", "ne", "lt", "le", "gt", "ge"]


comptime UNARY: List[String] = [
    "relu",
    "gelu",
    "gelu_grad",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "hardswish",
    "hardsigmoid",
    "mish",
    "softplus",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "neg",
    "abs",
    "erf",
    "sin",
    "cos",
    "floor",
    "round",
    "e4m3",
]
"""The ops that take one value."""
comptime BINARY: List[String] = [
    "leaky_relu",
    "elu",
    "prelu",
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
]
"""Those that take two, or a value and a number."""


def split(expression: StaticString) -> List[String]:
    """Takes an expression apart.

    Args:
        expression: Any text.

    Returns:
        Its words.
    """
    var found = List[String]()
    for word in expression.split(" "):
        found.append(String(word))
    return found^


def _is_value(word: String) -> Bool:
    return word.startswith("x")


def _is_number(word: String) -> Bool:
    var first = String(word.removeprefix("-"))
    return first == "inf" or first == "nan" or (first.byte_length() > 0 and _digit(first, 0) < 10)


def _digit(word: String, at: Int) -> Int:
    """Gives a digit, and 10 or more for anything else."""
    var byte = Int(word.as_bytes()[at])
    return byte - 48 if byte >= 48 else 10 + byte


def _number(word: String) -> Float64:
    """Reads a number as Python writes it: `-0.5`, `1e-05`, `inf`."""
    var text = String(word.removeprefix("-"))
    var sign = Float64(-1) if text.byte_length() < word.byte_length() else Float64(1)
    if text == "inf":
        return sign * inf[DType.float64]()
    if text == "nan":
        return nan[DType.float64]()
    var mantissa = Float64(0)
    var exponent = 0
    var behind = False
    var at = 0
    while at < text.byte_length():
        var digit = _digit(text, at)
        at += 1
        if digit < 10:
            mantissa = mantissa * 10 + Float64(digit)
            exponent -= Int(behind)
        elif digit == 10 + 46:
            behind = True
        else:  # e
            var down = _digit(text, at) == 10 + 45
            var written = 0
            for i in range(at, text.byte_length()):
                if _digit(text, i) < 10:
                    written = 10 * written + _digit(text, i)
            exponent += -written if down else written
            break
    var power = Float64(1)
    for _ in range(abs(exponent)):
        power *= 10
    return sign * (mantissa / power if exponent < 0 else mantissa * power)


def _arity(word: String) -> Int:
    """Counts what an op takes; 0 where there is no such op."""
    if word in materialize[UNARY]():
        return 1
    if word in materialize[BINARY]():
        return 2
    return 3 if word == "clamp" or word == "where" else 0


def _depths(words: List[String]) -> List[Int]:
    """Finds where on the stack the result of each word goes."""
    var depth = 0
    var found = List[Int]()
    for word in words:
        if not _is_value(word) and not _is_number(word):
            depth -= _arity(word)
        found.append(depth)
        depth += 1
    return found^


def _most(numbers: List[Int]) -> Int:
    """Gives the largest of some numbers that are not negative."""
    var found = 0
    for each in numbers:
        found = max(found, each)
    return found


def is_expression(words: List[String], values: Int) -> Bool:
    """Tells whether words are an expression of so many values.

    Args:
        words: Any words.
        values: How many there are: x0, x1, ...

    Returns:
        Whether every word is known and one result is left.
    """
    var depth = 0
    for word in words:
        if _is_value(word):
            if Int(_number(String(word.removeprefix("x")))) >= values:
                return False
        elif not _is_number(word):
            if _arity(word) == 0 or _arity(word) > depth:
                return False
            depth -= _arity(word)
        depth += 1
    return depth == 1


def inputs_of(expression: StaticString) -> Int:
    """Counts the values of an expression.

    Args:
        expression: An expression of x0, x1, ...

    Returns:
        One more than the highest number.
    """
    var count = 1
    for word in split(expression):
        if _is_value(word):
            count = max(count, Int(_number(String(word.removeprefix("x")))) + 1)
    return count


@always_inline
def _unary[
    dtype: DType, width: SIMDLength, //, op: String, narrow: Bool
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    comptime if dtype == F64:
        return rebind[SIMD[dtype, width]](unary64[op](rebind[SIMD[F64, width]](x)))
    else:
        return rebind[SIMD[dtype, width]](_unary32[op, narrow](rebind[SIMD[F32, width]](x)))


@always_inline
def _unary32[
    width: SIMDLength, //, op: String, narrow: Bool
](x: SIMD[F32, width]) -> SIMD[F32, width]:
    comptime if op == "relu":
        return relu(x)
    elif op == "silu" and narrow:
        return x * sigmoid_narrow(x)
    elif op == "sigmoid" and narrow:
        return sigmoid_narrow(x)
    elif op == "gelu":
        return gelu(x)
    elif op == "gelu_grad" and narrow:
        return gelu_grad[log2_tail=LOG2_TAIL_ALONE_NARROW](x)
    elif op == "gelu_grad":
        return gelu_grad(x)
    elif op == "gelu_tanh":
        return gelu_tanh(x)
    elif op == "silu":
        return x / (1 + exponential(-x))
    elif op == "sigmoid":
        return sigmoid(x)
    elif op == "tanh":
        return tanh(x)
    elif op == "hardswish":
        return x * (at_most(at_least(x + 3, 0), 6) * SIXTH)
    elif op == "hardsigmoid":
        return at_most(at_least(x + 3, 0), 6) * SIXTH
    elif op == "mish":
        return mish(x)
    elif op == "softplus":
        return softplus(x)
    elif op == "exp":
        return exponential(x)
    elif op == "log":
        return logarithm(x)
    elif op == "sqrt":
        return sqrt(x)
    elif op == "rsqrt":
        return rsqrt(x)
    elif op == "reciprocal":
        return 1 / x
    elif op == "neg":
        return -x
    elif op == "abs":
        return abs(x)
    elif op == "erf":
        return erf(x)
    elif op == "sin":
        return sine(x)
    elif op == "cos":
        return sine(x, 1)
    elif op == "floor":
        return floor(x)
    elif op == "e4m3":
        return to_e4m3(x)
    else:
        comptime assert op == "round", "no such op of one value"
        return x.__round__()


comptime SIXTH: Float32 = 1.0 / 6
"""What hardswish and hardsigmoid end with."""


@always_inline
def _binary[
    dtype: DType, width: SIMDLength, //, op: String
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    comptime if op == "add":
        return a + b
    elif op == "sub":
        return a - b
    elif op == "mul":
        return a * b
    elif op == "div":
        return a / b
    elif op == "leaky_relu" or op == "prelu":
        return a.gt(0).select(a, a * b)
    elif op == "elu":
        return a.gt(0).select(a, b * _below_0(at_most(a, 0)))
    elif op == "pow":
        return _power(a, b)
    elif op == "maximum":
        return greater(a, b)
    elif op == "minimum":
        return lesser(a, b)
    else:
        return _compared[op](a, b).select(SIMD[dtype, width](1), SIMD[dtype, width](0))


@always_inline
def _compared[
    dtype: DType, width: SIMDLength, //, op: String
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[DType.bool, width]:
    comptime if op == "eq":
        return a.eq(b)
    elif op == "ne":
        return ~a.eq(b)
    elif op == "lt":
        return a.lt(b)
    elif op == "le":
        return a.le(b)
    elif op == "gt":
        return a.gt(b)
    else:
        comptime assert op == "ge", "no such op of two values"
        return a.ge(b)


@always_inline
def _power_of[
    dtype: DType, width: SIMDLength, //, exponent: Float64
](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Raises to a power that is known, by products where these do."""
    comptime if exponent == 0.5:
        return sqrt(x)
    elif exponent == -0.5:
        return rsqrt(x)
    elif exponent == -1:
        return 1 / x
    elif exponent == -2:
        return 1 / (x * x)
    elif exponent == 2:
        return x * x
    elif exponent == 3:
        return x * x * x
    else:
        return _power(x, SIMD[dtype, width](Scalar[dtype](exponent)))


@always_inline
def _power[
    dtype: DType, width: SIMDLength, //
](x: SIMD[dtype, width], y: SIMD[dtype, width]) -> SIMD[dtype, width]:
    comptime if dtype == F64:
        comptime V = SIMD[F64, width]
        return rebind[SIMD[dtype, width]](power64(rebind[V](x), rebind[V](y)))
    else:
        comptime V = SIMD[F32, width]
        return rebind[SIMD[dtype, width]](power(rebind[V](x), rebind[V](y)))


@always_inline
def _below_0[dtype: DType, width: SIMDLength, //](x: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Computes e^x - 1 for x up to 0."""
    comptime if dtype == F64:
        return rebind[SIMD[dtype, width]](exponential_minus_1_64(rebind[SIMD[F64, width]](x)))
    else:
        return rebind[SIMD[dtype, width]](exponential_minus_1(rebind[SIMD[F32, width]](x)))
