"""Every op compiles for GPUs that are not here: sm_90a always, the others with ALL_TARGETS=1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

more = pytest.mark.skipif(not os.environ.get("ALL_TARGETS"), reason="ALL_TARGETS=1 compiles it")


@pytest.mark.parametrize(
    "architecture",
    ["sm_90a", *(pytest.param(name, marks=more) for name in ("sm_80", "sm_89", "gfx942"))],
)
def test_compiles_for(architecture: str, pytestconfig: pytest.Config) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_target", architecture],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout, end="")
