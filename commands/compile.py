"""The command ``maxvision compile``: compile a model ahead of time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from maxvision.common.arguments import Parser
from maxvision.common.console import exit_code, working

_HELP = """\
Compile a model into a folder that holds everything it runs on: the graph for one kind of device,
the weights, the labels, the preprocessing. It starts at once, and needs neither the compiler nor
the checkpoint. The device need not be here."""

_EXAMPLES = """\
examples:
  maxvision compile microsoft/resnet-50 --target sm_90a --dtype bfloat16 -o resnet-50-h100
  maxvision compile ./my-cvt --target cpu:x86-64-v3 -o my-cvt-x86
  maxvision inspect resnet-50-h100
  maxvision cat.jpg --model ./resnet-50-h100          where such a GPU is

targets:
  cpu                    this machine's CPU, and those that have all its instruction sets
  cpu:x86-64-v3          any CPU with AVX2; -v4: AVX-512; -v2 and generic: slow
  cpu:neoverse-n1        on Arm: any CPU with dotprod; cpu:neoverse-v1: with i8mm and SVE
  sm_80, sm_86, sm_89    NVIDIA A100; RTX 30, A10; RTX 40, L4, L40
  sm_90a, sm_100a, sm_120a             H100, H200; B200; RTX 50
  gfx90a, gfx942, gfx950               AMD MI200, MI300, MI350

exit codes: 0 done; 2 a wrong model, target or argument; the message says what to do"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision compile", description=_HELP, epilog=_EXAMPLES)
    made.add_argument(
        "model", metavar="MODEL", help="a bundled model's name, a hub id, a folder or a file"
    )
    made.add_argument("--target", default="cpu", metavar="T", help="see below (default: cpu)")
    made.add_shared("dtype", "tf32", "sparse", "passes", "revision")
    made.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="to write")
    made.add_argument(
        "--force", action="store_true", help="replace DIR if it holds a compiled model"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _compile(options), options, "maxvision compile")


def _compile(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with working(f"loading {options.model}") as say:
        from maxvision.runtime.ahead import compile

        made = compile(
            options.model,
            options.output,
            target=options.target,
            dtype=options.dtype,
            tf32=options.tf32,
            sparse=options.sparse,
            passes=options.passes,
            revision=options.revision,
            force=options.force,
            progress=say,
        )
    size = sum(file["bytes"] for file in made.files.values()) / 1e6
    told = f"; {made.sparse.told}" if made.sparse.told else ""
    print(
        f"wrote {options.output} in {time.perf_counter() - start:.1f} s: {made.name} for"
        f" {made.target.name}, {made.dtype}, {size:.1f} MB{told}"
    )
    return 0
