"""Convolutions in bfloat16 on a CPU against float64: for machines that have no Python.

tests/ops/test_targets.py builds this file for several CPUs, and runs what this machine can. It
prints the kernel that multiplies, and raises an error if a result is off.
"""

from std.math import ceildiv
from std.memory import Layout, alloc

from ops.epilogue import Epilogue
from ops.gemm.bf16 import BLOCK, HAS_PAIRS, SIDE, STEP, TILE, amx_granted, depth_of, gemm
from ops.geometry import Geometry
from ops.operands import BF16, F32, Data, Operands


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
    comptime size = 2 if dtype == BF16 else 4
    return start.unsafe_offset(-Int(start) % 64 // size)


def noise[dtype: DType](count: Int, seed: UInt32) -> Data[dtype]:
    """Draws numbers from -1 to 1.

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
        numbers[unsafe_offset=i] = (Float32(Int(state >> 8)) / (1 << 23) - 1).cast[dtype]()
    return numbers


def packed(w: Data[BF16], g: Geometry) -> Data[BF16]:
    """Packs filters as `tiles` of graphs/arrange.py does.

    Args:
        w: Filters [R, S, C, F].
        g: Sizes.

    Returns:
        Panels.
    """
    var steps = depth_of(g) // STEP
    var panels = room[BF16](ceildiv(g.f, BLOCK) * steps * 2 * TILE)
    for i in range(ceildiv(g.f, BLOCK) * steps * 2 * TILE):
        panels[unsafe_offset=i] = 0
    for k in range(g.depth()):
        var r, rest = divmod(k, g.s * g.c)
        var deep = r * (depth_of(g) // g.r) + rest
        for f in range(g.f):
            var tile = (f // BLOCK * steps + deep // STEP) * 2 + f % BLOCK // SIDE
            var at = tile * TILE + deep % STEP // 2 * STEP + f % SIDE * 2 + deep % 2
            panels[unsafe_offset=at] = w[unsafe_offset=k * g.f + f]
    return panels


def check(n: Int, h: Int, c: Int, r: Int, stride: Int, pad: Int, f: Int) raises:
    """Convolves x[N, H, H, C] by R x R windows, adds a residual and rectifies.

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
    var x = noise[BF16](n * h * h * c, 1)
    var w = noise[BF16](g.depth() * f, 2)
    var bias = noise[F32](f, 3)
    var residual = noise[BF16](g.pixels() * f, 4)
    var y = noise[BF16](g.pixels() * f, 5)
    gemm[Epilogue("add_relu")](g, Operands[BF16](x, packed(w, g), bias, residual, y))
    for m in range(g.pixels()):
        var image, pixel = divmod(m, g.p * g.q)
        var p, q = divmod(pixel, g.q)
        for j in range(f):
            var sum = Float64(bias[unsafe_offset=j]) + Float64(residual[unsafe_offset=m * f + j])
            var size = abs(sum)
            for tap in range(r * r):
                var row = p * stride - pad + tap // r
                var column = q * stride - pad + tap % r
                if row < 0 or row >= h or column < 0 or column >= h:
                    continue
                for k in range(c):
                    var term = Float64(x[unsafe_offset=((image * h + row) * h + column) * c + k])
                    term *= Float64(w[unsafe_offset=(tap * c + k) * f + j])
                    sum += term
                    size += abs(term)
            var right = max(sum, 0)
            var ours = Float64(y[unsafe_offset=m * f + j])
            if not (abs(ours - right) <= right / 256 + size * 1e-6):  # NaN is off, too
                raise Error(
                    t"{n} x {h}^2 x {c}, {r}x{r}/{stride}, {f} filters: y[{image}, {p}, {q}, {j}]"
                    t" is {ours}, not {right}"
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
    check(2, 10, 32, 2, 3, 0, 33)
    check(2, 12, 32, 5, 2, 2, 64)
    check(2, 39, 3, 7, 2, 3, 64)  # rows
    check(2, 39, 3, 7, 4, 2, 64)
    check(1, 9, 20, 4, 1, 2, 70)
    check(2, 9, 48, 1, 1, 0, 31)
    check(1, 3, 20, 1, 2, 0, 7)
