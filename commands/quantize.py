"""The command ``maxvision quantize``: a model whose layers compute in 8 bits."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxvision.common.arguments import MODEL, Parser, names, number, whole
from maxvision.common.console import exit_code, working

if TYPE_CHECKING:
    from maxvision.runtime.quantize import Report

METHODS = ("max", "percentile", "mse")
"""What runtime/calibrate.py takes; to import it takes too long for --help."""
DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""What config.json calls them."""

_HELP = """\
Quantise a model: its convolutions and linear layers multiply 8-bit integers, or 8-bit floats.

Pictures like those that the model will see are run through it, to choose a scale and a zero point
for the input of each layer; weights have a scale for each filter. Layers that change the answers
too much are left in float32. The layer that reads pixels (see --pixels), the classifier, and
convolutions in groups that are not depthwise stay as they are. The folder that is written is a
model like any other: for classify, serve, compile, time. A CPU, an H100 and an H200 compute its
layers in 8 bits; other GPUs give the same answers in floats, no faster than before.

With --dtype fp8 the numbers are floats of 8 bits, float8_e4m3fn, without zero points. Only an H100
and an H200 compute in them, and only layers that these take are rounded."""

_EXAMPLES = """\
examples:
  maxvision quantize microsoft/resnet-50 --calibrate photos/ -o resnet-50-int8
  maxvision quantize ./my-model --calibrate a.jpg b.jpg --method mse -o my-model-int8
  maxvision quantize ./my-model --calibrate photos/ --keep 'stages.3.*,head' -o my-model-int8

exit codes: 0 done; 2 a wrong model or argument, or answers that change too much"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision quantize", description=_HELP, epilog=_EXAMPLES)
    add = made.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--calibrate", metavar="PICTURES", nargs="+", required=True,
        help="files and folders of pictures like those that the model will see")  # fmt: skip
    add("-o", "--output", metavar="DIR", type=Path, required=True)
    add("--dtype", choices=DTYPES, default="int8",
        help="of activations and weights; fp8 is for an H100 or H200 (default: int8)")  # fmt: skip
    add("--method", choices=METHODS, default="max",
        help="the range of a layer's input: max, all that was seen; percentile, 99.99%% of it; mse,"
        " the one with the smallest mean squared error (default: max)")  # fmt: skip
    add("--keep", type=names, metavar="A,B", default=(),
        help="layers to leave in float32, with * for any part")  # fmt: skip
    add("--agree", type=number(0, 1), default=0.98, metavar="SHARE",
        help="of the pictures, how many have to keep their first label; layers are left in float32"
        " until they do (default: 0.98)")  # fmt: skip
    add("--images", type=whole(1, 100_000), default=128, metavar="N",
        help="pictures to read, spread evenly over all (default: 128)")  # fmt: skip
    add("--pixels", action="store_true",
        help="round the normalised pixels too, so that the first convolution runs in 8 bits: faster"
        " on a CPU, slower on a GPU")  # fmt: skip
    made.add_shared("revision")
    add("--force", action="store_true", help="replace DIR if it is there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _run(options), options, "maxvision quantize")


def _run(options: argparse.Namespace) -> int:
    from maxvision.common.errors import ModelError
    from maxvision.runtime.artifact import is_here
    from maxvision.runtime.quantize import quantize
    from maxvision.weights.source import find

    if is_here(options.model):
        raise ModelError(
            f"{options.model} is a compiled model and not a checkpoint; name the checkpoint that it"
            " was compiled from"
        )
    start = time.perf_counter()
    with working(f"quantising {options.model}") as say:
        report = quantize(
            find(options.model, options.revision, say),
            options.output,
            options.calibrate,
            dtype=DTYPES[options.dtype],
            method=options.method,
            keep=options.keep,
            agree=options.agree,
            images=options.images,
            pixels=options.pixels,
            force=options.force,
            progress=say,
        )
    _show(report)
    kept = sum(bool(each.kept) for each in report.layers)
    print(
        f"wrote {options.output} in {time.perf_counter() - start:.0f} s:"
        f" {len(report.layers) - kept} layers in {options.dtype}, {kept} in float32;"
        f" {report.agree:.1%} of {report.images} pictures keep their label, mean cosine of the"
        f" logits {report.cosine:.4f}"
    )
    return 0


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What rounding each layer alone costs", title_justify="left")
    table.add_column("layer", overflow="fold")
    table.add_column("relative error", justify="right")
    table.add_column("")
    for each in report.layers:
        told = {"": "", "asked": "float32, as asked", "hurts": "float32, it hurts"}[each.kept]
        table.add_row(each.name, "" if math.isnan(each.error) else f"{each.error:.2%}", told)
    Console(stderr=True).print(table)
