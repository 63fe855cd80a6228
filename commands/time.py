"""The command ``maxvision time``: a model's latency, throughput, memory and start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxvision.common.arguments import (
    DEFAULT_MODEL,
    MODEL,
    Parser,
    counts,
    number,
    whole,
)
from maxvision.common.console import exit_code

_HELP = """\
Measure how fast a model runs here: latency with its percentiles, images a second, memory, and how
long it takes to be ready. It runs on random images and needs no more than classifying does; to
compare with other engines, see maxvision bench."""

_EXAMPLES = """\
examples:
  maxvision time microsoft/resnet-50 --batch-size 1,32
  maxvision time ./resnet-50-h200 --device gpu:0 --duration 10 --json latency.json
  maxvision time resnet-cifar10 --iterations 100 --json - | python -m json.tool

what is timed, each run by itself, warm:
  compute         the network alone, its input on the device already
  request         array in, array out: what a caller waits for
  copy to device, copy to host         on a GPU, from and to pinned memory

exit codes: 0 done; 2 a wrong model, device or argument; the message says what to do"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision time", description=_HELP, epilog=_EXAMPLES)
    add = made.add_argument
    add("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL",
        help=f"{MODEL} (default: %(default)s)")  # fmt: skip
    made.add_shared("revision", "device", "dtype", "tf32", "sparse", "threads", "passes")
    add("--batch-size", type=counts, default=[1], metavar="N,M",
        help="images that run together; several are measured in turn (default: 1); --sparse auto"
        " chooses for the size if there is one")  # fmt: skip
    add("--warm-up", type=number(0, 3600), default=1.0, metavar="S",
        help="seconds to run before anything is timed (default: 1)")  # fmt: skip
    long = made.add_mutually_exclusive_group()
    long.add_argument("--duration", type=number(0.01, 3600), default=5.0, metavar="S",
        help="seconds to measure each batch size (default: 5)")  # fmt: skip
    long.add_argument("--iterations", type=whole(1, 1_000_000), metavar="N",
        help="runs to time, instead of a duration")  # fmt: skip
    add("--kernels", type=whole(1, 10_000), metavar="N",
        help="on a GPU: name the N kernels that take longest; needs torch with CUDA")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every figure; - is standard output")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _time(options), options, "maxvision time")


def _time(options: argparse.Namespace) -> int:
    from maxvision.bench.latency import run

    return run(options)
