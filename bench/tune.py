"""Chooses Hopper's tiles by measurement: ``maxvision bench tune`` writes ops/gemm/tuning.mojo.

Times every tile (bench/tune.mojo) on every product of the networks at several batch sizes, takes
the fastest, drops the rows that their neighbours imply, and writes the rest as the table that the
kernels look their tile up in. Says how well the table predicts products that it does not hold.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.graphs.cvt import CVTS
from maxvision.graphs.resnet import RESNETS
from maxvision.runtime.session import find_device

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "ops" / "gemm" / "tuning.mojo"
BEGIN, END = "# rows: maxvision bench tune", "# end of rows"
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
SLACK = 1.03
"""How much slower than its best tile a product may run for its row to be dropped."""
CLOSE, NEAR = 1.2, 0.95
"""Of products without a row so many, at least, have to run within so much of their best tile."""
STEP = 64
"""Channels of a step of K, in 16 bits."""
COSTS = {"relu": "none", "add_relu": "add", "gelu": "gelu"}
"""What bench/tune.mojo times, and the epilogue of a row: relu costs nothing."""


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
    """What the table is looked up by; the epilogue is none, add or gelu."""

    pixels: int
    filters: int
    steps: int
    epilogue: str


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
            Layer(batch * tokens, 1, c, stage.hidden, 1, 1, "gelu"),
            Layer(batch * tokens, 1, stage.hidden, c, 1, 1, "add_relu"),
        ]
    found.append(Layer(batch, 1, c, 1000))
    return list(dict.fromkeys(found))


def product(layer: Layer) -> Product:
    """Finds the sizes of a layer's matrix product."""
    out = (layer.side + 2 * (layer.kernel // 2) - layer.kernel) // layer.stride + 1
    steps = layer.kernel**2 * -(-layer.channels // STEP)
    return Product(layer.images * out**2, layer.filters, steps, COSTS[layer.epilogue])


def run(options: argparse.Namespace) -> int:
    """Measures, or reads a sweep, and writes or checks the table."""
    if options.program:
        compile_program("tune", options.program, "sm_90a")
        listed = options.program.with_suffix(".layers")
        write_layers(listed)
        print(
            f"on a Hopper GPU run {options.program.name} {listed.name} > sweep.txt;"
            " then here maxvision bench tune --from sweep.txt"
        )
        return 0
    if options.sweep:
        try:
            text = options.sweep.read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ArgumentError(f"from expects a sweep but {options.sweep}: {problem}") from None
    else:
        text = measure()
        if options.raw:
            options.raw.write_text(text)
    times = read(text)
    if not times:
        raise ArgumentError(f"from expects lines 'row ...' of a sweep but {options.sweep} has none")
    table = condense(times)
    before = TABLE.read_text()
    after = with_rows(before, times, table, options.on or origin(text))
    losses = unseen(times)
    near = sum(loss <= CLOSE for loss in losses) / len(losses)
    print(
        f"{len(table)} rows for {len(times)} products; of products left out of the table"
        f" {near:.0%} run within 20 % of their best tile, the worst {losses[-1]:.2f} times"
    )
    if options.check:
        same = rows_of(before) == rows_of(after)
        print(f"{TABLE.name} holds {'these' if same else 'other'} rows")
        return 0 if same and near >= NEAR else 1
    if near < NEAR:
        print(f"the nearest row is a bad guess too often: {TABLE.name} stays as it is")
        return 1
    TABLE.write_text(after)
    return 0


def measure() -> str:
    """Builds bench/tune.mojo and runs it on this machine's GPU; returns what it prints.

    Raises:
        DeviceError: If the GPU is no Hopper, or the program fails.
    """
    device = find_device("gpu")
    if device.architecture_name != "sm_90a":
        raise DeviceError(
            f"bench tune expects a Hopper GPU, sm_90a, but this is {device.architecture_name}"
        )
    with tempfile.TemporaryDirectory() as folder:
        listed, program = Path(folder) / "layers.txt", Path(folder) / "tune"
        write_layers(listed)
        compile_program("tune", program)
        done = subprocess.run([program, listed], capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"bench tune failed on the GPU: {done.stderr.strip()[-200:]}")
    return done.stdout


def compile_program(name: str, program: Path, target: str = "") -> None:
    """Builds bench/NAME.mojo, for a GPU that is elsewhere if a target is named.

    Raises:
        ArgumentError: If it cannot be built.
    """
    beside = Path(sys.executable).with_name("mojo")
    source = str(ROOT / "bench" / f"{name}.mojo")
    mojo = str(beside) if beside.is_file() else "mojo"
    command = [mojo, "build", "-I", str(ROOT), source, "-o", str(program)]
    if target:
        command += ["--target-accelerator", target]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise ArgumentError(f"bench {name} expects mojo to build {program}: {problem}") from None


def write_layers(path: Path) -> None:
    """Writes the lines that bench/tune.mojo reads."""
    every = dict.fromkeys(layer for batch in BATCHES for layer in layers(batch))
    path.write_text("".join(" ".join(map(str, layer)) + "\n" for layer in every))


def read(text: str) -> Times:
    """Reads what bench/tune.mojo printed.

    Raises:
        ArgumentError: If a line is none, or a tile computed something else than the CUDA cores.
    """
    times: Times = defaultdict(dict)
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] != "row":
            continue
        try:
            n, side, c, f, kernel, stride = (int(word) for word in words[1:7])
            layer = Layer(n, side, c, f, kernel, stride, words[7])
            tile = Tile(int(words[8]), int(words[9]))
            took, error = float(words[10]), float(words[11])
        except (ValueError, IndexError):
            raise ArgumentError(f"a sweep expects twelve words a row but has {line!r}") from None
        if not error < 0.004:  # half an ulp of bfloat16
            raise ArgumentError(f"a sweep expects errors below 0.004 but has {line!r}")
        found = times[product(layer)]
        found[tile] = min(took, found.get(tile, math.inf))
    return times


def log2(number: int) -> int:
    """Approximates 256 times the logarithm, by a line between powers of two."""
    whole = number.bit_length() - 1
    return (whole << 8) + ((number - (1 << whole)) << 8 >> whole)


def distance(a: Product, b: Product) -> int:
    """Tells how unlike two products are; the same number as in ops/gemm/tuning.mojo."""
    unlike = sum(abs(log2(p) - log2(q)) for p, q in zip(a[:3], b[:3], strict=True))
    return unlike + 128 * (a.epilogue != b.epilogue)


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


def origin(text: str) -> str:
    """Tells where and when a sweep was measured, which its first line says.

    Raises:
        ArgumentError: If it does not.
    """
    first = text.partition("\n")[0]
    if not first.startswith("# "):
        raise ArgumentError(
            'from expects a sweep that begins with a line "# GPU", or --on "DATE, GPU"'
        )
    return f"{time.strftime('%Y-%m-%d')}, {first[2:].strip()}"


def with_rows(text: str, times: Times, table: dict[Product, Tile], about: str) -> str:
    """Puts other rows into the text of ops/gemm/tuning.mojo."""
    rows = []
    for p, tile in table.items():
        values = f'{p.pixels}, {p.filters}, {p.steps}, "{p.epilogue}", {tile.config}, {tile.splits}'
        rows.append(f"    Row({values}),  # {times[p][tile]:.2f}")
    head, rest = text.split(BEGIN)
    body = "\n".join(rows)
    return f"{head}{BEGIN}, {about}\n{body}\n    {END}{rest.split(END)[1]}"


def rows_of(text: str) -> list[str]:
    """Lists the rows of the text of ops/gemm/tuning.mojo."""
    return text.split(BEGIN)[1].split(END)[0].splitlines()[1:]
