"""The command ``maxvision inspect``: show and check what ``maxvision compile`` wrote."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxvision.common.arguments import Parser
from maxvision.common.console import exit_code
from maxvision.common.errors import ModelError

_HELP = """\
Show what a folder that maxvision compile wrote holds, and check its files against their
checksums."""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision inspect", description=_HELP)
    made.add_argument("folder", metavar="DIR", type=Path, help="that maxvision compile wrote")
    made.add_argument(
        "--program", action="store_true", help="print the network as it was compiled, an op a line"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _inspect(options), options, "maxvision inspect")


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
        "needs": ", ".join(found.target.features),
        "dtype": f"{found.dtype} by TF32" if found.tf32 else found.dtype,
        "sparse": f"{found.sparse.mode}: {found.sparse.told or 'not pruned'}",
        "8 bits": found.target.told_bytes(found.program.in_bytes),
        "compiled with": ", ".join(f"{name} {v}" for name, v in found.versions.items()),
    }
    for name, file in found.files.items():
        rows[name] = f"{file['bytes']:,} bytes, as written"
    for name, text in rows.items():
        if text:
            print(f"{name:24} {text}")
    if options.program:
        print(f"\n{found.program}")
    return 0
