"""The epilogue of ops/epilogue.mojo on a CPU against float64: int32 sums, with and without 8 bits.

tests/ops/test_targets.py builds this file and runs it; it raises an error if a result is off.
"""

from std.math import erf, sqrt
from std.memory import Layout, alloc
from std.utils.numerics import isnan, nan

from ops.epilogue import Epilogue, Output
from ops.operands import F32, Affine, Data, Scales

comptime ROWS = 5
"""Rows of sums."""
comptime COLUMNS = 43
"""Channels: two vectors of 16 and a part of one."""
comptime PITCH = COLUMNS + 5
"""F: what lies between the rows has to stay."""


def room[dtype: DType](count: Int) -> Data[dtype]:
    """Takes memory, never given back.

    Parameters:
        dtype: Of the numbers.

    Args:
        count: How many.

    Returns:
        The memory, filled with 77.
    """
    var memory = alloc(Layout[Scalar[dtype]](count=count))
    var numbers = rebind[Data[dtype]](memory.unsafe_ptr())
    _ = memory^.unsafe_leak()
    for i in range(count):
        numbers[unsafe_offset=i] = 77
    return numbers


def noise(mut state: UInt32) -> Float64:
    """Draws a number from -1 to 1.

    Args:
        state: Of the generator.

    Returns:
        The number.
    """
    state = state * 1664525 + 1013904223
    return Float64(Int(state >> 8)) / (1 << 23) - 1


def activated[epilogue: Epilogue](v: Float64) -> Float64:
    """Activates in float64.

    Parameters:
        epilogue: Has the activation.

    Args:
        v: A sum.

    Returns:
        The result.
    """
    comptime if epilogue.gelu:
        return v / 2 * (1 + erf(v / sqrt(Float64(2))))
    elif epilogue.relu:
        return v if isnan(v) else max(v, 0)
    return v


def check[
    dtype: DType, added: DType, epilogue: Epilogue
](residual_is: Affine, y_is: Affine, rounded_is: Affine = Affine(1, 0)) raises:
    """Takes rows of random sums through an epilogue with scales.

    Parameters:
        dtype: Of y.
        added: Of the residual.
        epilogue: The epilogue.

    Args:
        residual_is: What the residual stands for.
        y_is: What y stands for.
        rounded_is: What integers of scale * sum + bias stand for, if the epilogue rounds these.

    Raises:
        If a result differs from float64's by more than rounding.
    """
    var state = UInt32(1)
    var sums = room[DType.int32](ROWS * COLUMNS)
    var scale, bias = room[F32](PITCH), room[F32](PITCH)
    var residual, y = room[added](ROWS * PITCH), room[dtype](ROWS * PITCH)
    for f in range(COLUMNS):
        scale[unsafe_offset=f] = Float32(1e-5 * (2 + noise(state)))
        bias[unsafe_offset=f] = Float32(noise(state))
    bias[unsafe_offset=7] = nan[F32]()
    for m in range(ROWS):
        for f in range(COLUMNS):
            # Some fall far beyond what 8 bits hold.
            sums[unsafe_offset=m * COLUMNS + f] = Int32(noise(state) * (1e5 if f % 9 else 1e8))
            var number = noise(state)
            comptime if added.is_integral():
                number = Float64(Int(number * 100 + 100 if added == DType.uint8 else number * 100))
            residual[unsafe_offset=m * PITCH + f] = number.cast[added]()
    var output = Output[epilogue, added](
        bias,
        residual,
        y,
        scales=Scales(scale, residual_is),
        rounded_is=rounded_is,
        y_is=y_is,
    )
    for m in range(ROWS):
        output.finish_row(sums.unsafe_offset(m * COLUMNS), 0, m * PITCH, COLUMNS)

    for m in range(ROWS):
        for f in range(PITCH):
            var got = y[unsafe_offset=m * PITCH + f].cast[DType.float64]()
            if f >= COLUMNS:
                if got != 77:
                    raise Error(t"{dtype} {epilogue.name}: wrote {got} beyond the row")
                continue
            var number = residual[unsafe_offset=m * PITCH + f].cast[DType.float64]()
            var product = Float64(Int(sums[unsafe_offset=m * COLUMNS + f]))
            product *= scale[unsafe_offset=f].cast[DType.float64]()
            var v = product + bias[unsafe_offset=f].cast[DType.float64]()
            comptime if epilogue.rounds:
                var step, zero = Float64(rounded_is.scale), Float64(rounded_is.zero)
                var least = (v / step - 1e-3).__round__() + zero
                if least != (v / step + 1e-3).__round__() + zero:
                    continue  # float32 may round to either
                v = (min(max(least, 0), 255) - zero) * step if not isnan(v) else -zero * step
            comptime if epilogue.joins:
                v += (number - Float64(residual_is.zero)) * Float64(residual_is.scale)
            var want = activated[epilogue](v)
            var bound = 2e-7 * (abs(product) + 3)  # of float32
            comptime if dtype.is_integral():
                # In the middle between two integers, float32 may round to either.
                var exact = want / Float64(y_is.scale)
                bound /= Float64(y_is.scale)
                var low = (exact - bound).__round__() + Float64(y_is.zero)
                var high = (exact + bound).__round__() + Float64(y_is.zero)
                comptime least = Float64(Int(Scalar[dtype].MIN))
                comptime most = Float64(Int(Scalar[dtype].MAX))
                if isnan(want):
                    low = high = 0
                if not min(max(low, least), most) <= got <= min(max(high, least), most):
                    raise Error(t"{dtype} {epilogue.name}: {got} at {m}, {f} instead of {low}")
            else:
                if isnan(want) != isnan(got) or abs(got - want) > bound:
                    raise Error(t"{dtype} {epilogue.name}: {got} at {m}, {f} instead of {want}")


def check_ties(zero: Float32) raises:
    """Rounds halves: to even numbers, before the zero is added.

    Args:
        zero: The integer that stands for 0.

    Raises:
        If one is rounded elsewhere.
    """
    var sums, y = room[DType.int32](16), room[DType.uint8](16)
    var one, nothing = room[F32](16), room[F32](16)
    for i in range(16):
        sums[unsafe_offset=i] = Int32(2 * i + 1)
        one[unsafe_offset=i], nothing[unsafe_offset=i] = 1, 0
    Output[Epilogue("none", scales=True)](
        nothing, y, y, scales=Scales(one), y_is=Affine(2, zero)
    ).finish_row(sums, 0, 0, 16)
    for i in range(16):
        var want = (i + 1) // 2 * 2 + Int(zero)  # of i + 0.5
        if Int(y[unsafe_offset=i]) != want:
            raise Error(t"{i}.5 became {y[unsafe_offset=i]} instead of {want}")


def main() raises:
    """Checks what kernels of 8 bits need.

    Raises:
        If a result is off.
    """
    comptime add = Epilogue("add", scales=True)
    comptime add_relu = Epilogue("add_relu", scales=True)
    comptime gelu = Epilogue("gelu", scales=True)
    comptime U8 = DType.uint8
    comptime S8 = DType.int8
    check[F32, F32, add](Affine(1, 0), Affine(1, 0))
    check[F32, U8, add_relu](Affine(0.02, 117), Affine(1, 0))
    check[U8, F32, add](Affine(1, 0), Affine(0.03, 131))
    check[U8, U8, add_relu](Affine(0.02, 117), Affine(0.013, 0))
    check[U8, U8, gelu](Affine(1, 0), Affine(0.01, 17))
    comptime rounds = Epilogue("add_relu", scales=True, rounds=True)
    check[U8, U8, rounds](Affine(0.02, 117), Affine(0.013, 9), Affine(0.017, 131))
    check[S8, S8, add](Affine(0.02, 0), Affine(0.03, -5))
    check_ties(0)
    check_ties(3)
