"""That every tile that a product may get is compiled: for the products of ops/gemm/products.txt.

At the batch sizes that are looked at, the choice is the one from all rows. Prints how many tiles a
product of 16 bits has compiled, on average. And that no tile asks the copy engine for more pixels than a
copy brings.
"""

from ops.device import Device
from ops.epilogue import Epilogue
from ops.gemm.layer import Layer
from ops.gemm.tuning import (
    Family,
    IMAGES,
    MULTIPROCESSORS,
    Row,
    choose,
    chosen,
    reached,
)
from ops.geometry import Geometry
from ops.hopper.pixel_box import COPIED, PixelBox
from std.bit import pop_count

comptime BESIDE = 192
"""Channels of a second source."""


def same(a: Row, b: Row) -> Bool:
    """Tells whether rows have the same tile and splits.

    Args:
        a: A row.
        b: Another.

    Returns:
        Whether they have.
    """
    return a.config == b.config and a.splits == b.splits


def check(family: Family) raises -> Int:
    """Checks a family at many batch sizes, on GPUs of several sizes.

    Args:
        family: The products; their sizes are known.

    Returns:
        How many tiles are compiled.

    Raises:
        If a tile is not compiled, or is another than that from all rows.
    """
    var layer = family.layer
    var rows = reached(family)
    var tiles = chosen(rows, family)
    var every = family
    every.layer = Layer(few=layer.few)
    var all = reached(every)
    for multiprocessors in [78, 114, 132, 160]:
        var device = Device(multiprocessors=multiprocessors)
        for images in range(1, 400):
            var g = Geometry(
                rows=images * layer.pixels, depth=layer.channels, columns=layer.filters
            )
            g.r = layer.taps
            var row = choose(rows, g, family, device, layer.beside)
            if not tiles >> row.config & 1:
                raise Error("no tile for ", images, " of ", layer.pixels)
            if multiprocessors == MULTIPROCESSORS and images in materialize[IMAGES]():
                if not same(row, choose(all, g, every, device, layer.beside)):
                    raise Error("another tile for ", images, " of ", layer.pixels)
    return pop_count(tiles)


def check_box[rows: Int]() raises:
    """Checks the boxes of tall windows whose results are one pixel wide.

    Parameters:
        rows: Of a tile of the product.

    Raises:
        If a copy brings less than a box has.
    """
    var g = Geometry(rows=rows, depth=64, columns=64)
    for r in range(2, 129):
        g.r, g.h = r, g.p + r - 1
        var box = PixelBox[rows](g)
        if box.all_taps() and Int(box.height) + r - 1 > COPIED:
            raise Error(t"a copy of {Int(box.height) + r - 1} pixels, by a window of {r} rows")


def main() raises:
    """Checks all products.

    Raises:
        If a tile is missing, or a box is too large.
    """
    comptime for rows in [64, 128, 200, 232, 240]:
        check_box[rows]()
    var text: String
    with open("ops/gemm/products.txt", "r") as file:
        text = file.read()
    var count, tiles = 0, 0
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        var words = line.split()
        var side, kernel, stride = Int(words[1]), Int(words[4]), Int(words[5])
        var layer = Layer()
        layer.channels, layer.filters, layer.taps = Int(words[2]), Int(words[3]), kernel * kernel
        layer.pixels = Int(words[0]) * ((side + 2 * (kernel // 2) - kernel) // stride + 1) ** 2
        if len(words) > 7:
            layer.beside = Int(words[7])
            _ = check(Family(layer, 2, Epilogue("relu"), sources=2))
            continue
        var added = String(words[6]).startswith("add")
        var gelu = String(words[6]).endswith("gelu")
        var epilogue = Epilogue("add") if added else Epilogue("gelu") if gelu else Epilogue("relu")
        tiles += check(Family(layer, 2, epilogue))
        count += 1
        _ = check(Family(layer, 2, Epilogue("add", measures=True)))
        _ = check(Family(layer, 2, Epilogue("gelu", normalizes=True)))
        layer.few = True
        _ = check(Family(layer, 2, epilogue))
        layer.few = False
        var two = layer
        two.beside = BESIDE
        _ = check(Family(two, 2, epilogue, sources=2))
        if layer.channels % 16 == 0 and layer.filters % 16 == 0:
            for narrow in [False, True]:
                _ = check(Family(layer, 1, epilogue, narrow=narrow))
            for scales in [False, True]:
                epilogue.scales = scales
                _ = check(Family(two, 1, epilogue, sources=2))
    print(Float64(tiles) / Float64(count))
