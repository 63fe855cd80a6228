"""Builds the kernels' PTX once for all tests and workers, and finds what runs it."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from .gpu import Gpu
from .machine import Launch
from .ptx import Kernel, parse, texts

Find = Callable[[str], Kernel]


@pytest.fixture(scope="session")
def find(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Find:
    """Gives a kernel by its symbol, without the hash at the symbol's end."""
    program = pytestconfig.getoption("kernels") or built(tmp_path_factory, pytestconfig)
    found = {}
    for text in texts(program):
        symbol = re.search(r"\.entry\s+(\w+)_[0-9a-f]{8}\(", text)
        assert symbol, text[:200]
        found[symbol.group(1)] = text
    parsed: dict[str, Kernel] = {}

    def by_name(name: str) -> Kernel:
        if name not in parsed:
            assert name in found, f"{name}: no such kernel; there are {', '.join(sorted(found))}"
            parsed[name] = parse(found[name])
        return parsed[name]

    return by_name


def built(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Builds the program that holds the kernels, or waits for the worker that does."""
    mojo = shutil.which("mojo") or shutil.which("mojo", path=Path(sys.executable).parent)
    if mojo is None:
        pytest.skip("NO GPU KERNEL IS RUN: there is no Mojo compiler")
    folder = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):
        folder = folder.parent  # xdist gives each worker a folder of its own in it
    program = folder / "kernels"
    with open(folder / "kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            source = Path(__file__).with_name("kernels.mojo")
            done = subprocess.run(
                [mojo, "build", "--target-accelerator", "sm_90a", "-I", ".", "-o", program, source],
                cwd=pytestconfig.rootpath,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="session", autouse=True)
def on_gpu(pytestconfig: pytest.Config) -> Iterator[None]:
    """Runs launches on the GPU, if --gpu says so."""
    if pytestconfig.getoption("gpu"):
        Launch.elsewhere = Gpu().run
    yield
    Launch.elsewhere = None


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
