"""Products by tiles on a CPU against float64: for machines that have no Python.

tests/ops/test_targets.py builds this file for several CPUs, and runs what this machine can. It
prints the kernel that multiplies bfloat16, and raises an error if a result is off. In 8 bits
results are exact, and where there is no AMX the same tiles are multiplied by vectors.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, bitcast
from std.sys import size_of

from ops.dot import U8
from ops.epilogue import Epilogue
from ops.gemm.cpu import PANEL
from ops.gemm.tiles import (
    BLOCK,
    COLUMNS,
    HAS_PAIRS,
    RIGHT,
    SIDE,
    STEP,
    TILE,
    amx_granted,
    depth_of,
    gemm,
)
from ops.geometry import Geometry
from ops.operands import BF16, F32, Data, Levels, Operands

comptime ZERO = 7
"""What the activations store their 0 as in 8 bits."""


def room[dtype: DType](count: Int) -> Data[dtype]:
    """Takes memory, never given back, at a multiple of 64 bytes.

    Parameters:
        dtype: Of the numbers.

    Args:
        count: How many.

    Returns:
        The memory.
    """
    var memory = alloc(Layout[Scalar[dtype]](count=count + 64))
    var start = rebind[Data[dtype]](memory.unsafe_ptr())
    _ = memory^.unsafe_leak()
    return start.unsafe_offset(-Int(start) % 64 // size_of[dtype]())


def noise[dtype: DType](count: Int, seed: UInt32) -> Data[dtype]:
    """Draws numbers from -1 to 1, or all integers of 8 bits.

    Parameters:
        dtype: What they are rounded to.

    Args:
        count: How many.
        seed: Of the generator.

    Returns:
        The numbers.
    """
    var numbers = room[dtype](count)
    var state = seed
    for i in range(count):
        state = state * 1664525 + 1013904223
        comptime if dtype.is_integral():
            numbers[unsafe_offset=i] = bitcast[dtype, 1](UInt8(state >> 24))
        else:
            numbers[unsafe_offset=i] = (Float32(Int(state >> 8)) / (1 << 23) - 1).cast[dtype]()
    return numbers


def packed[dtype: DType](w: Data[RIGHT[dtype]], g: Geometry) -> Data[RIGHT[dtype]]:
    """Packs filters as `tiles` and `byte_panels` of graphs/arrange.py do.

    Parameters:
        dtype: Of the activations.

    Args:
        w: Filters [R, S, C, F].
        g: Sizes.

    Returns:
        Panels.
    """
    comptime right = RIGHT[dtype]
    comptime wide = COLUMNS[dtype]
    var depth = depth_of[dtype](g)
    var rows = depth if dtype == BF16 else depth + 4
    var panels = room[right](ceildiv(g.f, wide) * rows * wide)
    for i in range(ceildiv(g.f, wide) * rows * wide):
        panels[unsafe_offset=i] = 0
    for f in range(g.f):
        var sum: Int32 = 0
        for k in range(g.depth()):
            var at: Int
            comptime if dtype == BF16:
                var r, rest = divmod(k, g.s * g.c)
                var deep = r * (depth // g.r) + rest
                var tile = (f // BLOCK * (depth // STEP) + deep // STEP) * 2 + f % BLOCK // SIDE
                at = tile * TILE + deep % STEP // 2 * STEP + f % SIDE * 2 + deep % 2
            else:
                at = f // PANEL * rows * PANEL + (1 + k // 4) * 4 * PANEL + f % PANEL * 4 + k % 4
            var number = w[unsafe_offset=k * g.f + f]
            panels[unsafe_offset=at] = number
            sum += number.cast[DType.int32]()
        comptime if dtype == U8:
            var at = f // PANEL * rows * PANEL + f % PANEL * 4
            panels.unsafe_offset(at).unsafe_bitcast[Int32]()[unsafe_offset=0] = sum
    return panels


def check(n: Int, h: Int, c: Int, r: Int, stride: Int, pad: Int, f: Int) raises:
    """Convolves x[N, H, H, C] by R x R windows, adds a residual and rectifies; also in 8 bits.

    Args:
        n: N.
        h: H.
        c: C.
        r: R.
        stride: Pixels between windows.
        pad: Zeros around the image.
        f: F.

    Raises:
        If a result differs from float64's by more than it is rounded.
    """
    var g = Geometry(rows=1, depth=1, columns=1)
    g.n, g.h, g.w, g.c, g.r, g.s, g.f = n, h, h, c, r, r, f
    g.stride_h = g.stride_w = stride
    g.pad_h = g.pad_w = pad
    g.p = g.q = (h + 2 * pad - r) // stride + 1
    _check[BF16](g)
    if c % 4 == 0:
        _check[U8](g)


def _check[dtype: DType](g: Geometry) raises:
    comptime right = RIGHT[dtype]
    comptime out = BF16 if dtype == BF16 else F32
    var x = noise[dtype](g.n * g.h * g.w * g.c, 1)
    var w = noise[right](g.depth() * g.f, 2)
    var bias = noise[F32](g.f, 3)
    var scale = room[F32](g.f)
    for f in range(g.f):
        scale[unsafe_offset=f] = 1
    var residual = noise[out](g.pixels() * g.f, 4)
    var y = noise[out](g.pixels() * g.f, 5)
    var zero = 0 if dtype == BF16 else ZERO
    comptime epilogue = Epilogue("add_relu", scales=dtype == U8)
    var levels = Levels(scale, zero=Int32(zero))
    gemm[epilogue](g, Operands[dtype, out, right](x, packed[dtype](w, g), bias, residual, y), levels)
    for m in range(g.pixels()):
        var image, pixel = divmod(m, g.p * g.q)
        var p, q = divmod(pixel, g.q)
        for j in range(g.f):
            var sum = Float64(bias[unsafe_offset=j]) + Float64(residual[unsafe_offset=m * g.f + j])
            var size = abs(sum)
            for tap in range(g.r * g.s):
                var row = p * g.stride_h - g.pad_h + tap // g.s
                var column = q * g.stride_w - g.pad_w + tap % g.s
                if row < 0 or row >= g.h or column < 0 or column >= g.w:
                    continue
                for k in range(g.c):
                    var at = ((image * g.h + row) * g.w + column) * g.c + k
                    var term = Float64(x[unsafe_offset=at]) - Float64(zero)
                    term *= Float64(w[unsafe_offset=(tap * g.c + k) * g.f + j])
                    sum += term
                    size += abs(term)
            var wanted = max(sum, 0)
            var ours = Float64(y[unsafe_offset=m * g.f + j])
            var bound = wanted / 256 + size * 1e-6 if dtype == BF16 else 1e-6 * (wanted + 1)
            if not (abs(ours - wanted) <= bound):  # NaN is off, too
                raise Error(
                    t"{dtype}, {g.n} x {g.h}^2 x {g.c}, {g.r}x{g.s}/{g.stride_h}, {g.f} filters:"
                    t" y[{image}, {p}, {q}, {j}] is {ours}, not {wanted}"
                )


def main() raises:
    """Checks each way to lay the left side out, at sizes around those of tiles.

    Raises:
        If a result is off.
    """
    print("AMX" if amx_granted() else "AVX-512 BF16" if HAS_PAIRS else "float32")
    for h in [1, 3, 4, 5, 8, 9]:  # as it lies: 1 to 81 pixels
        check(1, h, 64, 1, 1, 0, 70)
    check(3, 1, 96, 1, 1, 0, 100)
    check(1, 9, 64, 3, 1, 1, 40)  # planes
    check(2, 7, 128, 3, 1, 1, 512)
    check(2, 20, 64, 3, 2, 1, 256)
    check(2, 10, 32, 1, 2, 0, 96)
    check(2, 10, 64, 1, 2, 0, 96)
    check(2, 10, 32, 2, 3, 0, 33)
    check(2, 12, 64, 5, 2, 2, 64)
    check(2, 39, 3, 7, 2, 3, 64)  # patches
    check(2, 39, 4, 7, 2, 3, 64)
    check(2, 39, 3, 7, 4, 2, 64)
    check(1, 9, 20, 4, 1, 2, 70)
    check(2, 9, 48, 1, 1, 0, 31)
    check(1, 3, 20, 1, 2, 0, 7)
    check(2, 6, 36, 3, 1, 1, 130)
