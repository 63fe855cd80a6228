"""Chooses Hopper's tiles by measurement: ``python -m bench tune`` writes ops/gemm/tuning.mojo.

Times every tile (bench/tune.mojo) on every product of the networks at several batch sizes, takes
the fastest, drops the rows that their neighbours imply, and writes the rest as the table that the
kernels look their tile up in. Says how well the table predicts products that it does not hold.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench.environment import environment
from graphs.cvt import CVTS
from graphs.resnet import RESNETS

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "ops" / "gemm" / "tuning.mojo"
BEGIN, END = "# rows: python -m bench tune", "# end of rows"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
SLACK = 1.03
"""How much slower than its best tile a product may run for its row to be dropped."""
STEP = 64
"""Channels of a step of K, in 16 bits."""


class Layer(NamedTuple):
    """A square convolution, or a matrix product as one of 1 x 1 px."""

    images: int
    side: int
    channels: int
    filters: int
    kernel: int = 1
    stride: int = 1
    epilogue: str = "relu"


class Product(NamedTuple):
    """What the table is looked up by."""

    pixels: int
    filters: int
    steps: int
    adds: bool


class Tile(NamedTuple):
    """An index in CONFIGS of ops/gemm/tuning.mojo, and the blocks that share a tile."""

    config: int
    splits: int


Times = dict[Product, dict[Tile, float]]


def layers(batch: int) -> list[Layer]:
    """Lists the products of ResNet-18, ResNet-50 and CvT-13 at 224 px but the stems'."""
    found = []
    for name in ("resnet18", "resnet50"):
        spec = RESNETS[name]
        side, c = 56, spec.stem_width
        for i, width in enumerate(spec.widths):
            stride = spec.stage_stride(i)
            out = side // stride
            if spec.block == "basic":
                found += [
                    Layer(batch, side, c, width, 3, stride),
                    Layer(batch, out, width, width, 3),
                    Layer(batch, out, width, width, 3, 1, "add_relu"),
                ]
            else:
                inner = width // 4
                found += [
                    Layer(batch, side, c, inner),
                    Layer(batch, side, inner, inner, 3, stride),
                    Layer(batch, out, inner, width, 1, 1, "add_relu"),
                    Layer(batch, out, width, inner),
                    Layer(batch, out, inner, inner, 3),
                ]
            found.append(Layer(batch, side, c, width, 1, stride))
            side, c = out, width
        found.append(Layer(batch, 1, c, spec.classes))
    side, c = 224, 3
    for stage in CVTS["cvt-13"].stages:
        if c > 3:
            found.append(Layer(batch, side, c, stage.width, stage.patch, stage.stride))
        side, c = side // stage.stride, stage.width
        tokens = side**2 + stage.cls_token
        keys = (-(-side // stage.stride_kv)) ** 2 + stage.cls_token
        found += [
            Layer(batch * tokens, 1, c, c),
            Layer(batch * keys, 1, c, c),
            Layer(batch * tokens, 1, c, c, 1, 1, "add_relu"),
            Layer(batch * tokens, 1, c, stage.hidden),
            Layer(batch * tokens, 1, stage.hidden, c, 1, 1, "add_relu"),
        ]
    found.append(Layer(batch, 1, c, 1000))
    return list(dict.fromkeys(found))


def product(layer: Layer) -> Product:
    """Finds the sizes of a layer's matrix product."""
    out = (layer.side + 2 * (layer.kernel // 2) - layer.kernel) // layer.stride + 1
    steps = layer.kernel**2 * -(-layer.channels // STEP)
    return Product(layer.images * out**2, layer.filters, steps, layer.epilogue.startswith("add"))


def measure() -> str:
    """Builds bench/tune.mojo and runs it on this machine's GPU; returns what it prints.

    Raises:
        subprocess.CalledProcessError: If it cannot be built or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed, program = Path(folder) / "layers.txt", Path(folder) / "tune"
        write_layers(listed)
        build = ["mojo", "build", "-I", str(ROOT), str(ROOT / "bench" / "tune.mojo")]
        subprocess.run([*build, "-o", str(program)], check=True)
        done = subprocess.run([str(program), str(listed)], check=True, capture_output=True)
    return done.stdout.decode()


def write_layers(path: Path) -> None:
    """Writes the lines that bench/tune.mojo reads."""
    every = dict.fromkeys(layer for batch in BATCHES for layer in layers(batch))
    path.write_text("".join(" ".join(map(str, layer)) + "\n" for layer in every))


def read(text: str) -> Times:
    """Reads what bench/tune.mojo printed.

    Raises:
        ValueError: If a tile computed something else than the CUDA-core kernel.
    """
    times: Times = defaultdict(dict)
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] != "row":
            continue
        n, side, c, f, kernel, stride = (int(word) for word in words[1:7])
        layer = Layer(n, side, c, f, kernel, stride, words[7])
        tile, time, error = Tile(int(words[8]), int(words[9])), float(words[10]), float(words[11])
        if not error < 0.004:  # half an ulp of bfloat16
            raise ValueError(f"tune: {line!r} expects an error below 0.004")
        found = times[product(layer)]
        found[tile] = min(time, found.get(tile, math.inf))
    return times


def log2(number: int) -> int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    whole = number.bit_length() - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


def distance(a: Product, b: Product) -> int:
    """Tells how unlike two products are; the same number as in ops/gemm/tuning.mojo."""
    unlike = sum(abs(log2(p) - log2(q)) for p, q in zip(a[:3], b[:3], strict=True))
    return unlike + 128 * (a.adds != b.adds)


def look_up(table: dict[Product, Tile], wanted: Product) -> Tile:
    """Takes the tile of the nearest row whose splits the product has steps for."""
    rows = sorted(table, key=lambda row: (distance(row, wanted), -row.pixels))
    return next(table[row] for row in rows if table[row].splits <= wanted.steps)


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


def write(times: Times) -> str:
    """Replaces the rows of ops/gemm/tuning.mojo; returns a sentence about them."""
    table = condense(times)
    rows = [
        f"    Row({p.pixels}, {p.filters}, {p.steps}, {p.adds}, {tile.config}, {tile.splits}),"
        f"  # {times[p][tile]:.2f}"
        for p, tile in table.items()
    ]
    text = TABLE.read_text()
    head, rest = text.split(BEGIN)
    about = f", {environment()['date']}, {environment()['gpu'].split(',')[0]}"
    body = "\n".join(rows)
    TABLE.write_text(f"{head}{BEGIN}{about}\n{body}\n    {END}{rest.split(END)[1]}")
    losses = unseen(times)
    near = sum(loss <= 1.2 for loss in losses) / len(losses)
    return (
        f"{len(table)} rows for {len(times)} products; of products left out of the table"
        f" {near:.0%} run within 20 % of their best tile, the worst {losses[-1]:.2f} times"
    )
