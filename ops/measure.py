"""Builds and runs programs that time kernels alone (ops/measure.mojo).

A program is the function ``program`` of a module of the ops; what has ``main`` cannot be one of
them, so it is written where it is built.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from maxvision.common.errors import ArgumentError, DeviceError

OPS = Path(__file__).resolve().parent
MAIN = """\
from ops.{} import {} as program


def main() raises:
    program()
"""


def build(module: str, program: Path, target: str = "", function: str = "program") -> None:
    """Builds a program of a module, for a GPU that is elsewhere if a target is named.

    Raises:
        ArgumentError: If it cannot be built.
    """
    beside = Path(sys.executable).with_name("mojo")
    mojo = str(beside) if beside.is_file() else "mojo"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "main.mojo")
        source.write_text(MAIN.format(module, function))
        command = [mojo, "build", "-I", str(OPS.parent), str(source), "-o", str(program)]
        if target:
            command += ["--target-accelerator", target]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            raise ArgumentError(f"mojo cannot build {program} of ops.{module}: {problem}") from None


def run(
    module: str, lines: Iterable[str], program: Path | None = None, function: str = "program"
) -> str:
    """Runs a program over lines and returns what it prints; builds it first if it is None.

    Raises:
        ArgumentError: If it cannot be built.
        DeviceError: If it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "lines.txt")
        listed.write_text("".join(f"{line}\n" for line in lines))
        if program is None:
            program = Path(folder, "program")
            build(module, program, function=function)
        done = subprocess.run([program.resolve(), listed], capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"ops.{module} failed on the GPU: {done.stderr.strip()[-300:]}")
    return done.stdout
