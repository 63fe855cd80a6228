"""That every tile that a product may get is compiled: for the products of ops/gemm/products.txt.

At the batch sizes that are looked at, the choice is the one from all rows. Prints how many tiles a
product of 16 bits has compiled, on average.
"""

from ops.device import Device
from ops.epilogue import Epilogue
from ops.gemm.layer import Layer
from ops.gemm.tuning import (
    BYTE_ROWS,
    CONFIGS,
    FIRST_TURNED,
    IMAGES,
    LARGEST,
    MULTIPROCESSORS,
    ROWS,
    Row,
    WIDEST,
    alike,
    choose,
    chosen,
    chosen_alike,
    chosen_of_bytes,
    narrowed,
    reached,
)
from ops.geometry import Geometry
from ops.hopper.shared import ROW
from std.math import ceildiv

comptime LARGEST_COLUMNS = CONFIGS[LARGEST].columns
"""Columns of the largest tile."""
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


def check[table: List[Row]](layer: Layer, width: Int, epilogue: Epilogue) raises -> Int:
    """Checks a layer at many batch sizes, on GPUs of several sizes.

    Parameters:
        table: ROWS or BYTE_ROWS.

    Args:
        layer: The layer.
        width: Channels of a step of K.
        epilogue: What its sums go through.

    Returns:
        How many tiles are compiled.

    Raises:
        If a tile is not compiled, or is another than that from all rows.
    """
    var rows = reached[table](layer, width, epilogue)
    var all = reached[table](Layer(few=layer.few), width, epilogue)
    var more = ceildiv(layer.beside, width)
    for multiprocessors in [78, 114, 132, 160]:
        var device = Device(multiprocessors=multiprocessors)
        for images in range(1, 400):
            var g = Geometry(
                rows=images * layer.pixels, depth=layer.channels, columns=layer.filters
            )
            g.r = layer.taps
            var row = choose(rows, g, width, epilogue, device, more)
            if layer.beside:
                for widest in [WIDEST, LARGEST_COLUMNS]:
                    if not chosen_alike(narrowed(alike(row), widest).config, rows, widest):
                        raise Error("no tile of two sources for ", images, " of ", layer.pixels)
            elif width == ROW:
                for narrow in [False, True]:
                    var config = (alike(row) if narrow else row).config
                    if not chosen_of_bytes(config, rows, epilogue, narrow):
                        raise Error("no tile of 8 bits for ", images, " of ", layer.pixels)
            elif not chosen(row.config, rows, epilogue, windows=False):
                raise Error("no tile for ", images, " of ", layer.pixels)
            if multiprocessors == MULTIPROCESSORS and images in materialize[IMAGES]():
                if not same(row, choose(all, g, width, epilogue, device, more)):
                    raise Error("another tile for ", images, " of ", layer.pixels)
    var tiles = 0
    for i in range(FIRST_TURNED):
        tiles += Int(chosen(i, rows, epilogue, windows=False))
    return tiles


def main() raises:
    """Checks all products.

    Raises:
        If a tile is missing.
    """
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
        var added = String(words[6]).startswith("add")
        var gelu = String(words[6]).endswith("gelu")
        for kind in range(4):
            var epilogue = Epilogue("add") if added else Epilogue("gelu") if gelu else Epilogue(
                "relu"
            )
            if kind == 1:
                epilogue = Epilogue("add", measures=True)
            elif kind == 2:
                epilogue = Epilogue("gelu", normalizes=True)
            elif kind == 3:
                layer.beside = BESIDE
            var found = check[ROWS](layer, ROW // 2, epilogue)
            if kind == 0:
                count += 1
                tiles += found
                layer.few = True
                _ = check[ROWS](layer, ROW // 2, epilogue)
                layer.few = False
            if kind in (0, 3) and layer.channels % 16 == 0 and layer.filters % 16 == 0:
                _ = check[BYTE_ROWS](layer, ROW, epilogue)
    print(Float64(tiles) / Float64(count))
