"""Chooses Hopper's tiles by measurement: ``python -m maxvision.ops.gemm.tune`` writes tuning.mojo.

Times every tile (tune.mojo) on every product of products.txt at several batch sizes, takes the
fastest, drops the rows that their neighbours imply, and writes the rest as the table that the
kernels look their tile up in. Says how well the table predicts products that it does not hold.
There is a table for 16 bits; ``--table int8`` makes the one for 8 bits, ``--table shortcuts`` the
one for sums of two products in 16 bits.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from max.driver import accelerator_architecture_name, accelerator_count

from maxvision.common.errors import ArgumentError, DeviceError, UserError
from maxvision.ops import measure

MODULE = "gemm.tune"
PRODUCTS = Path(__file__).with_name("products.txt")
TABLE = Path(__file__).with_name("tuning.mojo")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
FEWER = (1, 8, 32, 128)
"""Batch sizes of the products behind the second comment of products.txt."""
OF_BYTES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of the others in 8 bits."""
SLACK = 1.03
"""How much slower than its best tile a product may run for its row to be dropped."""
CLOSE, NEAR = 1.2, 0.95
"""Of products without a row so many, at least, have to run within so much of their best tile."""
WIDEST = 128
"""Rows and columns of the tiles that are counted."""
MULTIPROCESSORS = 132
"""Of the GPU that is measured: an H100 or H200."""
COOPERATIVE = range(5)
"""The tiles of hopper.mojo without split-K, as a row's config."""
FIRST_PINGPONG = 12
"""The first tile of pingpong.mojo, as a row's config; it takes no residual."""
PINGPONG_STEPS = (6, 10)
"""Steps of K that each of its tiles takes at most."""
COSTS = {"relu": "none", "add_relu": "add", "gelu": "gelu"}
"""What tune.mojo times, and the epilogue of a row: relu costs nothing."""


class Kind(NamedTuple):
    """A table: what encloses its rows, what measures them, and the channels of a step of K."""

    begin: str
    end: str
    function: str
    step: int
    batches: tuple[tuple[int, ...], ...]
    """For each part of products.txt."""


KINDS = {
    "bfloat16": Kind(
        "# rows: ops/gemm/tune.py", "# end of rows", "program", 64, (BATCHES, FEWER, ())
    ),
    "int8": Kind(
        "# rows of bytes: ops/gemm/tune.py", "# end of bytes", "program_of_bytes", 128,
        (OF_BYTES, FEWER, ()),
    ),
    "shortcuts": Kind(
        "# rows of shortcuts: ops/gemm/tune.py", "# end of shortcuts", "program_of_shortcuts", 64,
        ((), (), BATCHES),
    ),
}  # fmt: skip
"""The tables, by what is timed for them."""
HALF, BYTES, SHORTCUTS = KINDS.values()


class Layer(NamedTuple):
    """A square convolution, or a matrix product as one of 1 x 1 px.

    What is added may be a convolution of 1 x 1 px: of ``beside`` channels, ``apart`` px apart.
    """

    images: int
    side: int
    channels: int
    filters: int
    kernel: int = 1
    stride: int = 1
    epilogue: str = "relu"
    beside: int = 0
    apart: int = 1


class Product(NamedTuple):
    """What the table is looked up by; the epilogue is none, add or gelu."""

    pixels: int
    filters: int
    steps: int
    epilogue: str


class Tile(NamedTuple):
    """A row's config as ops/gemm/tuning.mojo counts them, and the blocks that share a tile."""

    config: int
    splits: int


Times = dict[Product, dict[Tile, float]]


def layers(kind: Kind = HALF) -> list[Layer]:
    """Lists the products of products.txt at their batch sizes, each once; those that it takes."""
    found = []
    _, *parts = PRODUCTS.read_text().split("# ")
    for part, batches in zip(parts, kind.batches, strict=True):
        for line in part.splitlines()[1:]:
            layer = layer_of(line.split())
            if kind is not BYTES or layer.channels % 16 == layer.filters % 16 == 0:
                found += [layer._replace(images=batch * layer.images) for batch in batches]
    return list(dict.fromkeys(found))


def layer_of(words: Sequence[str]) -> Layer:
    """Reads the words of a line: six numbers, the epilogue, and two of a second source if any.

    Raises:
        TypeError: If there are more.
        ValueError: If a number is none, or there are fewer.
    """
    images, side, channels, filters, kernel, stride = map(int, words[:6])
    more = map(int, words[7:])
    return Layer(images, side, channels, filters, kernel, stride, words[6], *more)


def product(layer: Layer, kind: Kind = HALF) -> Product:
    """Finds the sizes of a layer's matrix product."""
    out = (layer.side + 2 * (layer.kernel // 2) - layer.kernel) // layer.stride + 1
    steps = layer.kernel**2 * -(-layer.channels // kind.step) + -(-layer.beside // kind.step)
    return Product(layer.images * out**2, layer.filters, steps, COSTS[layer.epilogue])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m maxvision.ops.gemm.tune", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--from", dest="sweep", type=Path, metavar="FILE", help="read a sweep instead of measuring"
    )
    parser.add_argument("--on", metavar="'DATE, GPU'", help="where a sweep is from, if it says not")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="keep what was measured")
    parser.add_argument(
        "--check", action="store_true", help="compare with the table that is there, write nothing"
    )
    parser.add_argument(
        "--table", choices=KINDS, default="bfloat16", help="what is multiplied (default: bfloat16)"
    )
    parser.add_argument(
        "--program", type=Path, metavar="FILE", help="only build what measures, for sm_90a"
    )
    try:
        return run(parser.parse_args(arguments))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def run(options: argparse.Namespace) -> int:
    """Measures, or reads a sweep, and writes or checks the table."""
    kind = KINDS[options.table]
    lines = [" ".join(map(str, layer)) for layer in layers(kind)]
    if options.program:
        measure.build(MODULE, options.program, "sm_90a", kind.function)
        listed = options.program.with_suffix(".layers")
        listed.write_text("".join(f"{line}\n" for line in lines))
        print(
            f"on a Hopper GPU run {options.program.name} {listed.name} > sweep.txt;"
            f" then pass sweep.txt to --from here, with --table {options.table}"
        )
        return 0
    if options.sweep:
        try:
            text = options.sweep.read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ArgumentError(
                f"--from {options.sweep}: the sweep cannot be read ({problem})"
            ) from None
    else:
        here = accelerator_architecture_name() if accelerator_count() else "none"
        if here != "sm_90a":
            raise DeviceError(f"tune needs a Hopper GPU, sm_90a, but this machine has {here}")
        text = measure.run(MODULE, lines, function=kind.function)
        if options.raw:
            options.raw.write_text(text)
    times = read(text, kind)
    if not times:
        raise ArgumentError(
            f"{options.sweep or 'what was measured'} has no lines 'row ...'; give a sweep"
        )
    table = condense(times)
    before = TABLE.read_text()
    after = with_rows(before, times, table, options.on or origin(text), kind)
    losses = unseen(times)
    near = sum(loss <= CLOSE for loss in losses) / len(losses)
    print(
        f"{len(table)} rows for {len(times)} products; of products left out of the table"
        f" {near:.0%} run within 20 % of their best tile, the worst {losses[-1]:.2f} times"
    )
    if options.check:
        same = rows_of(before, kind) == rows_of(after, kind)
        print(f"{TABLE.name} holds {'these' if same else 'other'} rows")
        return 0 if same and near >= NEAR else 1
    if near < NEAR:
        print(f"the nearest row is a bad guess too often: {TABLE.name} stays as it is")
        return 1
    TABLE.write_text(after)
    return 0


def read(text: str, kind: Kind = HALF) -> Times:
    """Reads what tune.mojo printed.

    Raises:
        ArgumentError: If a line is none, or a tile computed something else than the CUDA cores.
    """
    times: Times = defaultdict(dict)
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] != "row":
            continue
        try:
            layer = layer_of(words[1:-4])
            tile = Tile(int(words[-4]), int(words[-3]))
            took, error = float(words[-2]), float(words[-1])
        except (ValueError, TypeError, IndexError):
            raise ArgumentError(
                f"a row of a sweep must have fourteen words but this is {line!r}"
            ) from None
        if not error < 0.004:  # half an ulp of bfloat16
            raise ArgumentError(
                f"a row of a sweep must have an error below 0.004 but this is {line!r}"
            )
        found = times[product(layer, kind)]
        found[tile] = min(took, found.get(tile, math.inf))
    return times


def log2(number: int) -> int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    whole = number.bit_length() - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


@cache
def features(p: Product) -> tuple[int, ...]:
    """Gives what tiles depend on, in logarithms: as ops/gemm/tuning.mojo, for the measured GPU."""
    columns = -(-p.filters // WIDEST)
    padding = log2(columns * WIDEST) - log2(p.filters)
    tiles = log2(-(-p.pixels // WIDEST) * columns)
    sizes = 2 * log2(p.pixels), 4 * log2(p.filters), 2 * log2(p.steps), 2 * tiles, 4 * padding
    return *sizes, *(idle(-(-p.pixels // 192) * -(-p.filters // f)) for f in (192, 128))


def idle(tiles: int) -> int:
    """Compares the tiles that fit into all turns of the multiprocessors with those there are."""
    return log2(-(-tiles // MULTIPROCESSORS) * MULTIPROCESSORS) - log2(tiles)


def distance(a: Product, b: Product) -> int:
    """Tells how unlike two products are."""
    unlike = sum(abs(p - q) for p, q in zip(features(a), features(b), strict=True))
    return unlike + 256 * (a.epilogue != b.epilogue)


def look_up(table: dict[Product, Tile], wanted: Product) -> Tile:
    """Takes the tile of the nearest row that takes the product."""
    rows = sorted(table, key=lambda row: (distance(row, wanted), -row.pixels, row))
    return next(table[row] for row in rows if takes(table[row], wanted))


def takes(tile: Tile, p: Product) -> bool:
    """Tells whether a product has steps for a tile's splits, and is one that the tile computes."""
    number = tile.config - FIRST_PINGPONG
    fits = number < 0 or (p.epilogue != "add" and p.steps <= PINGPONG_STEPS[number])
    return fits and tile.splits <= p.steps


def condense(times: Times) -> dict[Product, Tile]:
    """Chooses rows until every product runs within SLACK of its best tile."""
    best = {p: min(found, key=found.__getitem__) for p, found in times.items()}
    largest = max(times, key=lambda p: p[0])
    table = {largest: best[largest]}
    while True:
        loss = {p: slowdown(times[p], look_up(table, p)) for p in sorted(times)}
        worst = max(loss, key=loss.__getitem__)
        if loss[worst] <= SLACK or worst in table:
            return dict(sorted(table.items()))
        table[worst] = best[worst]


def slowdown(found: dict[Tile, float], tile: Tile) -> float:
    """Divides the time of a tile by the best one's; infinite if it was not timed."""
    return found.get(tile, math.inf) / min(found.values())


def unseen(times: Times) -> list[float]:
    """Measures the table on each product in turn, without that product's own rows."""
    best = {p: min(found, key=found.__getitem__) for p, found in times.items()}
    losses = []
    for wanted in times:
        others = {p: tile for p, tile in best.items() if p != wanted}
        losses.append(slowdown(times[wanted], look_up(others, wanted)))
    return sorted(losses)


def origin(text: str) -> str:
    """Tells where and when a sweep was measured, which its first line says.

    Raises:
        ArgumentError: If it does not.
    """
    first = text.partition("\n")[0]
    if not first.startswith("# "):
        raise ArgumentError(
            'the sweep does not begin with a line "# GPU"; say where it is from with'
            ' --on "DATE, GPU"'
        )
    return f"{time.strftime('%Y-%m-%d')}, {first[2:].strip()}"


def with_rows(
    text: str, times: Times, table: dict[Product, Tile], about: str, kind: Kind = HALF
) -> str:
    """Puts other rows into the text of ops/gemm/tuning.mojo."""
    rows = []
    for p, tile in table.items():
        values = f'{p.pixels}, {p.filters}, {p.steps}, "{p.epilogue}", {tile.config}, {tile.splits}'
        if kind is BYTES and tile.config >= FIRST_PINGPONG:
            values += f", {cooperative(times[p])}"
        rows.append(f"    Row({values}),  # {times[p][tile]:.2f}")
    head, rest = text.split(kind.begin)
    body = "\n".join(rows)
    return f"{head}{kind.begin}, {about}\n{body}\n    {kind.end}{rest.split(kind.end)[1]}"


def cooperative(found: dict[Tile, float]) -> int:
    """Chooses the fastest tile of hopper.mojo that no cluster shares: for what takes no other."""
    own = {tile.config: us for tile, us in found.items() if tile.config in COOPERATIVE}
    return min(own, key=own.__getitem__)


def rows_of(text: str, kind: Kind = HALF) -> list[str]:
    """Lists the rows of a table in the text of ops/gemm/tuning.mojo."""
    return text.split(kind.begin)[1].split(kind.end)[0].splitlines()[1:]


if __name__ == "__main__":
    sys.exit(main())
