"""Kernels compile for GPUs that are not here.

Every op for sm_90a, and with ALL_TARGETS=1 for the others; always the products, which have a kernel
of their own there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = ("sm_80", "sm_89", "gfx942")
more = pytest.mark.skipif(not os.environ.get("ALL_TARGETS"), reason="ALL_TARGETS=1 compiles it")


@pytest.mark.parametrize(
    "architecture", ["sm_90a", *(pytest.param(name, marks=more) for name in OTHERS)]
)
def test_compiles_for(architecture: str, pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "tests.ops.compile_target", architecture]
    print(output(command, pytestconfig.rootpath), end="")


@pytest.mark.parametrize("architecture", OTHERS)
def test_products_compile_for(
    architecture: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    target = f"--target-accelerator={architecture}"
    command = ["mojo", "build", target, "-I", ".", "-o", str(tmp_path / "products")]
    output([*command, "tests/ops/products.mojo"], pytestconfig.rootpath)
    built = (tmp_path / "products").read_bytes()
    if architecture.startswith("sm_"):  # which keep the assembly's text
        for kind in (b"k16.row.col.f32.bf16", b"k16.row.col.f32.f16", b"k8.row.col.f32.tf32"):
            assert b"mma.sync.aligned.m16n8" + kind in built, "not on tensor cores"


def output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
