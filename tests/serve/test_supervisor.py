"""When a model's process counts as one that hangs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.serve import engine, supervisor
from maxvision.serve.supervisor import TICK, Supervisor, waits


@pytest.fixture
def silent() -> Iterator[Supervisor]:
    """Has a process that says nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    spec = engine.Spec(lambda: None, "cpu", 1, 0.0, False)  # type: ignore[arg-type, return-value]
    made = Supervisor(spec, engine.settings("error"), np.zeros((1, 1, 3), np.uint8))
    made._pid, made._patience = process.pid, 2 * TICK
    try:
        yield made
    finally:
        process.kill()
        process.wait()


def alive(made: Supervisor) -> bool:
    return ") Z " not in Path(f"/proc/{made._pid}/stat").read_text()


def test_one_that_is_silent_is_killed(silent: Supervisor) -> None:
    with pytest.raises(engine.WorkerEnded, match="hangs"):
        asyncio.run(silent._watch())
    assert not alive(silent)


def test_one_that_has_no_core_is_waited_for(
    silent: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "waits", lambda pid: {"1": time.monotonic()})
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(silent._watch(), 6 * TICK))
    assert alive(silent)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux says it, if built to")
def test_the_wait_for_a_core_is_read() -> None:
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    argv = [sys.executable, "-c", busy]
    two = [subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for each in two:
            assert each.stdout and each.stdout.readline()
        end = time.monotonic() + 30
        while min(max(waits(each.pid).values()) for each in two) < 0.1:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        for each in two:
            each.kill()
            each.communicate()
    assert waits(2**22) == {}
