"""The command ``maxvision compile``: compile a model ahead of time, look into what was compiled."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from maxvision.common.arguments import DTYPES, SPARSE
from maxvision.common.console import complain, working
from maxvision.common.errors import ModelError, UserError

_COMPILE = """\
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
  sm_80, sm_86, sm_89    NVIDIA A100; RTX 30, A10; RTX 40, L4, L40
  sm_90a, sm_100a, sm_120a             H100, H200; B200; RTX 50
  gfx90a, gfx942, gfx950               AMD MI200, MI300, MI350

exit codes: 0 done; 2 a wrong model, target or argument; the message says what to do"""

_INSPECT = """\
Show what a folder that maxvision compile wrote holds, and check its files against their
checksums."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="maxvision")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    compiling = commands.add_parser(
        "compile",
        description=_COMPILE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compiling.add_argument(
        "model", metavar="MODEL", help="a bundled model's name, a hub id, a folder or a file"
    )
    compiling.add_argument("--target", default="cpu", metavar="T", help="see below (default: cpu)")
    compiling.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="precision of the model (default: auto, float32)",
    )
    compiling.add_argument(
        "--no-tf32",
        dest="tf32",
        action="store_false",
        help="multiply float32 exactly on a GPU; by default NVIDIA's tensor cores round to TF32",
    )
    compiling.add_argument(
        "--sparse",
        default="auto",
        choices=SPARSE,
        help="what runs pruned layers: sparse convolutions where they were measured to be faster"
        " on such a device (auto), always, or never",
    )
    compiling.add_argument(
        "--passes",
        default="all",
        metavar="P",
        help="how the network is rewritten: all, none, -stem,-chain (all but these) or qkv,mlp",
    )
    compiling.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    compiling.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    compiling.add_argument(
        "--force", action="store_true", help="replace DIR if it holds a compiled model"
    )
    compiling.set_defaults(run=_compile)

    inspect = commands.add_parser("inspect", description=_INSPECT)
    inspect.add_argument("folder", metavar="DIR", type=Path)
    inspect.add_argument(
        "--program", action="store_true", help="print the network as it was compiled, an op a line"
    )
    inspect.set_defaults(run=_inspect)
    return parser


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


def _inspect(options: argparse.Namespace) -> int:
    from maxvision.runtime import artifact as package

    if not package.is_here(options.folder):
        raise ModelError(
            f"{options.folder} is not a folder that maxvision compile wrote; for a checkpoint use"
            " maxvision weights inspect"
        )
    found = package.read(options.folder)
    found.verify()
    rows = {
        "model": f"{found.name} ({found.family}, {len(found.labels):,} classes)",
        "target": f"{found.target.name} (on {found.target.machine})",
        "needs": ", ".join(found.target.features) or "nothing beyond that",
        "dtype": f"{found.dtype} by TF32" if found.tf32 else found.dtype,
        "sparse": f"{found.sparse.mode}: {found.sparse.told or 'not pruned'}",
        "compiled with": ", ".join(f"{name} {v}" for name, v in found.versions.items()),
    }
    for name, file in found.files.items():
        rows[name] = f"{file['bytes']:,} bytes, as written"
    for name, text in rows.items():
        print(f"{name:24} {text}")
    if options.program:
        print(f"\n{found.program}")
    return 0
