"""Convolutions of 8-bit numbers on a CPU against plain integers, exactly.

tests/ops/test_targets.py builds this file for several CPUs, and runs it, under qemu for Arm's: so it
calls the kernel of one core, which needs no more of Mojo's runtime than memory. It raises an error
if a result is off.
"""

from std.math import ceildiv
from std.memory import Layout, alloc
from std.utils import IndexList

from ops.dot import I8, U8
from ops.epilogue import Epilogue
from ops.gemm.cpu import PANEL, gemm_block, panel_size
from ops.geometry import Geometry
from ops.operands import F32, Data, Levels, Operands

comptime IMAGES = 2
"""Images of a batch."""


def room[dtype: DType](count: Int) -> Data[dtype]:
    """Takes memory, never given back.

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
    return start


def noise(i: Int) -> Int:
    """Draws the i-th random number (splitmix64).

    Args:
        i: Which.

    Returns:
        From 0 to 255.
    """
    var z = UInt64(i) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return Int((z >> 31) & 255)


def wrong(
    size: Tuple[Int, Int],
    channels: Tuple[Int, Int],
    kernel: Int,
    stride: Int,
    padding: Tuple[Int, Int],
    zero: Int,
    extreme: Bool,
) -> Int:
    """Counts the results of a convolution that differ from plain integers.

    Args:
        size: Height and width of the images.
        channels: C, a multiple of 4, and F.
        kernel: Height and width of the window.
        stride: Pixels from one window to the next.
        padding: Pixels before and behind the image.
        zero: What the activations store 0 as.
        extreme: Whether all numbers are 0 or 255, and -128 or 127, most of one sign: sums of two
            products would saturate 16 bits.

    Returns:
        How many.
    """
    var h, w = size
    var c, f = channels
    var before, behind = padding
    var p = (h + before + behind - kernel) // stride + 1
    var q = (w + before + behind - kernel) // stride + 1
    var window = room[DType.int64](9)
    var numbers = [kernel, kernel, stride, stride, before, before, 1, 1, 1]
    for i in range(9):
        window[unsafe_offset=i] = Int64(numbers[i])
    var g = Geometry(IndexList[4](IMAGES, h, w, c), IndexList[4](IMAGES, p, q, f), window)

    var x = room[U8](IMAGES * h * w * c)
    for i in range(IMAGES * h * w * c):
        var drawn = noise(i)
        x[unsafe_offset=i] = UInt8((255 if drawn > 20 else 0) if extreme else drawn)
    var depth = g.depth()
    var filter = room[I8](depth * f)
    for i in range(depth * f):
        var drawn = noise(i + 99991)
        var sign = drawn > 20 if i % f % 2 else drawn < 20
        filter[unsafe_offset=i] = Int8((127 if sign else -128) if extreme else drawn - 128)

    # As `byte_panels` of graphs/arrange.py.
    var panels, pitch = ceildiv(f, PANEL), panel_size[U8](g)
    var packed = room[I8](panels * pitch)
    for column in range(panels * PANEL):
        var panel = packed.unsafe_offset(column // PANEL * pitch)
        var at = column % PANEL
        var sum = Int32(0)
        for k in range(depth):
            var value = filter[unsafe_offset=k * f + column] if column < f else Int8(0)
            panel[unsafe_offset=((1 + k // 4) * PANEL + at) * 4 + k % 4] = value
            sum += Int32(value)
        panel.unsafe_bitcast[Int32]()[unsafe_offset=at] = sum

    var product, bias = room[F32](f), room[F32](f)
    for i in range(f):
        product[unsafe_offset=i], bias[unsafe_offset=i] = 1, 0
    var y = room[F32](g.pixels() * f)
    var o = Operands[U8, F32, I8](x, packed, bias, y, y)
    var levels = Levels(product, zero=Int32(zero))
    for panel in range(panels):
        var column = panel * PANEL
        gemm_block[Epilogue("none", scales=True)](
            g,
            o.shifted(w=panel * pitch),
            levels,
            0,
            g.pixels(),
            0,
            column,
            min(PANEL, f - column),
        )

    var found = 0
    for pixel in range(g.pixels()):
        var n, place = divmod(pixel, p * q)
        var i, j = divmod(place, q)
        for column in range(f):
            var sum = 0
            for k in range(depth):
                var tap, channel = divmod(k, c)
                var row = i * stride - before + tap // kernel
                var col = j * stride - before + tap % kernel
                if 0 <= row < h and 0 <= col < w:
                    var value = x[unsafe_offset=((n * h + row) * w + col) * c + channel]
                    sum += (Int(value) - zero) * Int(filter[unsafe_offset=k * f + column])
            found += Int(y[unsafe_offset=pixel * f + column] != Int32(sum).cast[F32]())
    return found


def main() raises:
    """Checks sizes that fill no tile, steps of K that end early, and zero points.

    Raises:
        If a result is off.
    """
    var found = 0
    for zero in [0, 1, 128, 255]:
        for extreme in [False, True]:
            found += wrong((7, 5), (4, 70), 3, 1, (1, 1), zero, extreme)
            found += wrong((8, 7), (12, 33), 3, 2, (0, 1), zero, extreme)
            found += wrong((3, 3), (132, 5), 1, 1, (0, 0), zero, extreme)
            found += wrong((5, 4), (4200, 3), 1, 1, (0, 0), zero, extreme)
            found += wrong((9, 6), (8, 17), 5, 2, (2, 1), zero, extreme)
    if found:
        raise Error(found, " results differ from plain integers")
