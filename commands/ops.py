"""The command ``maxvision ops``: our Mojo ops as a package, for other programs or for ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxvision.common.arguments import Parser, names
from maxvision.common.console import exit_code, working
from maxvision.common.errors import ModelError

PACKAGE = "maxvision_ops.mojoc"
"""What is written into a folder."""

_HELP = """\
Compile our Mojo ops into a package. Any program with the same version of MAX loads it, without
maxvision: in graphs by custom_extensions, and from torch by CustomOpLibrary."""

_EXAMPLES = """\
examples:
  maxvision ops build -o kernels
  maxvision ops build -o kernels --ops conv2d,softmax --cpu
  maxvision ops cache --cpu            # in an image: the first start of any model is shorter

  Graph("mine", forward, types, custom_extensions=[Path("kernels/maxvision_ops.mojoc")])
  CustomOpLibrary(Path("kernels/maxvision_ops.mojoc")).softmax(y, x)

exit codes: 0 done; 2 a wrong argument; the message says what to do"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision ops", description=_HELP, epilog=_EXAMPLES)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    summary = "Write the package"
    build: Any = commands.add_parser(
        "build",
        help=summary,
        description=f"{summary}, {PACKAGE}, and print the names of the ops in it. What each takes"
        " is in its file in maxvision/ops.",
    )
    build.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="to write")
    build.add_argument("--ops", type=names, metavar="A,B",
        help="those to compile, with others of the same file (default: all)")  # fmt: skip
    build.add_argument("--cpu", action="store_true",
        help="no kernels for GPUs; it takes less than half of the time")  # fmt: skip
    build.set_defaults(run=_build)
    summary = "Compile all ops into MAX's cache"
    cache: Any = commands.add_parser(
        "cache",
        help=summary,
        description=f"{summary}, where the first start of a model finds them. It compiles the ops"
        " of its network otherwise, some 3 s.",
    )
    cache.add_argument("--cpu", action="store_true", help="for models that run on a CPU")
    cache.set_defaults(run=_cache)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: options.run(options), options, "maxvision ops")


def _build(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    path = options.output / PACKAGE
    with working("compiling ops"):
        from maxvision.runtime.cache import build

        chosen = None if options.ops is None else frozenset(options.ops)
        found = build(path, chosen, gpu=not options.cpu)
    took, size = time.perf_counter() - start, path.stat().st_size / 1e6
    print(f"wrote {path} in {took:.1f} s: {len(found)} ops, {size:.1f} MB")
    for name in found:
        print(f"  {name}")
    return 0


def _cache(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    with working("compiling ops"):
        from maxvision.graphs.nodes import OPS
        from maxvision.runtime.cache import library

        path = library(gpu=not options.cpu)
        if path == OPS:
            raise ModelError("there is no cache: its folder cannot be written (MODULAR_CACHE_DIR)")
    print(f"all ops are in {path}, after {time.perf_counter() - start:.1f} s")
    return 0
