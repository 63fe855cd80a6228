"""Products of uint8 by int8 on a CPU, ops/gemm/cpu.mojo, against the same integers one by one.

tests/ops/test_targets.py builds this file and runs it; it raises an error if a number differs. The
sums are exact, and what follows them is computed vector by vector here, so results are equal to the
bit however the kernel packs them.
"""

from std.math import ceildiv
from std.memory import Layout, alloc
from std.utils import IndexList

from ops.conv2d.cpu import conv2d_cpu
from ops.dot import I8, I32, U8
from ops.epilogue import Epilogue, Output
from ops.gemm.cpu import PANEL, panel_size
from ops.geometry import Geometry
from ops.operands import F32, Affine, Data, Levels, Operands

comptime ZERO = 7
"""What x's 0 is stored as."""


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


def noise(mut state: UInt32, least: Int, most: Int) -> Int:
    """Draws an integer.

    Args:
        state: Of the generator.
        least: The least that it may be.
        most: The largest.

    Returns:
        The integer.
    """
    state = state * 1664525 + 1013904223
    return least + Int(state >> 8) % (most - least + 1)


def geometry(
    n: Int, h: Int, w: Int, c: Int, f: Int, kernel: Int, stride: Int, pad: Int
) -> Geometry:
    """Describes a convolution with a square window.

    Args:
        n: Images.
        h: Input height.
        w: Input width.
        c: Channels.
        f: Filters.
        kernel: R and S.
        stride: Both ways.
        pad: On all sides.

    Returns:
        Its sizes.
    """
    var window = room[DType.int64](9)
    var numbers = [kernel, kernel, stride, stride, pad, pad, 1, 1, 1]
    for i in range(9):
        window[unsafe_offset=i] = Int64(numbers[i])
    var p, q = (h + 2 * pad - kernel) // stride + 1, (w + 2 * pad - kernel) // stride + 1
    return Geometry(IndexList[4](n, h, w, c), IndexList[4](n, p, q, f), window)


def check[out: DType, epilogue: Epilogue](g: Geometry) raises:
    """Convolves random integers.

    Parameters:
        out: Of the result.
        epilogue: What the sums go through.

    Args:
        g: Sizes.

    Raises:
        If a result is another.
    """
    var state = UInt32(g.c + g.f)
    var x = room[U8](g.n * g.h * g.w * g.c)
    for i in range(g.n * g.h * g.w * g.c):
        x[unsafe_offset=i] = UInt8(noise(state, 0, 255))
    var depth = g.depth()
    var filters = room[I8](g.f * depth)  # [F, R, S, C]
    for i in range(g.f * depth):
        filters[unsafe_offset=i] = Int8(noise(state, -127, 127))
    var size = panel_size[U8](g)
    var panels = room[I8](ceildiv(g.f, PANEL) * size)
    for f in range(ceildiv(g.f, PANEL) * PANEL):
        var panel = panels.unsafe_offset(f // PANEL * size)
        var total = 0
        for k in range(depth):
            var number = filters[unsafe_offset=f * depth + k] if f < g.f else Int8(0)
            panel[unsafe_offset=(4 + k // 4 * 4) * PANEL + f % PANEL * 4 + k % 4] = number
            total += Int(number)
        panel.unsafe_bitcast[Int32]()[unsafe_offset=f % PANEL] = Int32(total)
    var bias, product = room[F32](g.f), room[F32](g.f)
    for f in range(g.f):
        bias[unsafe_offset=f] = Float32(noise(state, -99, 99)) / 64
        product[unsafe_offset=f] = Float32(noise(state, 50, 99)) * 1e-6
    var count = g.pixels() * g.f
    var residual, y, wanted = room[out](count), room[out](count), room[out](count)
    for i in range(count):
        residual[unsafe_offset=i] = Scalar[out](noise(state, 0, 255))
    var levels = Levels(
        product,
        residual=Affine(0.02, 117),
        rounded=Affine(0.017, 131),
        result=Affine(0.013, 9),
        zero=ZERO,
    )

    var o = Operands[U8, out, I8](x, panels, bias, residual, y)
    conv2d_cpu[epilogue, 0](g, o, levels)

    o.y = wanted
    var output = Output[epilogue](o, levels)
    var sums = room[I32](g.f)
    for pixel in range(g.pixels()):
        var n, place = divmod(pixel, g.p * g.q)
        var p, q = divmod(place, g.q)
        for f in range(g.f):
            var sum = 0
            for r in range(g.r):
                for s in range(g.s):
                    var h, w = p * g.stride_h - g.pad_h + r, q * g.stride_w - g.pad_w + s
                    if 0 <= h < g.h and 0 <= w < g.w:
                        var source = x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c)
                        var filter = filters.unsafe_offset(((f * g.r + r) * g.s + s) * g.c)
                        for c in range(g.c):
                            var number = Int(source[unsafe_offset=c]) - ZERO
                            sum += number * Int(filter[unsafe_offset=c])
            sums[unsafe_offset=f] = Int32(sum)
        output.finish_row(sums, 0, pixel * g.f, g.f)
    for i in range(count):
        if y[unsafe_offset=i] != wanted[unsafe_offset=i]:
            raise Error(
                t"{g.r}x{g.s}/{g.stride_h} {g.c}->{g.f} at {g.p}x{g.q}: {y[unsafe_offset=i]} at"
                t" pixel {i // g.f}, filter {i % g.f} instead of {wanted[unsafe_offset=i]}"
            )


def main() raises:
    """Checks products of 8 bits.

    Raises:
        If a result is another.
    """
    comptime add = Epilogue("add_relu", scales=True)
    comptime rounds = Epilogue("add", scales=True, rounds=True)
    # Blocks of tiles of 6, 5 and fewer pixels, panels that are cut off, edges, shares of K.
    for g in [
        geometry(1, 7, 7, 64, 64, 3, 1, 1),
        geometry(2, 9, 14, 32, 80, 3, 1, 1),
        geometry(1, 23, 19, 4, 64, 7, 2, 3),
        geometry(3, 5, 1, 64, 130, 1, 1, 0),
        geometry(1, 13, 15, 128, 64, 1, 2, 0),
        geometry(1, 3, 4, 16, 16, 5, 1, 2),
        geometry(1, 4, 6, 512, 65, 3, 1, 1),
        geometry(1, 1, 1, 8, 7, 1, 1, 0),
    ]:
        check[U8, Epilogue("none", scales=True)](g)
        check[U8, add](g)
        check[U8, rounds](g)
        check[F32, add](g)
