"""Power and clocks while something runs, as nvidia-smi reads them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INTERVAL_MS = 50
SETTLE_S = 0.4


@dataclass(frozen=True)
class Load:
    """What a steady load took: watts, MHz, and runs a second."""

    watts: float
    sm_mhz: float
    runs_per_s: float


def load(
    step: Callable[[], Any], wait: Callable[[], Any], index: int, seconds: float = 1.0
) -> Load | None:
    """Repeats ``step`` for about ``seconds`` and reads the meter; None if there is no reading.

    The meter averages over some time itself, so the first readings are left out.
    """
    if not shutil.which("nvidia-smi"):
        return None
    command = [
        "nvidia-smi", f"--id={index}", "--query-gpu=power.draw.instant,clocks.sm",
        "--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}",
    ]  # fmt: skip
    _spin(step, wait, SETTLE_S)
    meter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    runs, took = _spin(step, wait, seconds)
    meter.terminate()
    text, _ = meter.communicate()
    readings = []
    for line in text.splitlines():
        try:
            watts, mhz = map(float, line.split(","))
        except ValueError:  # "[N/A]", or a line cut short
            continue
        readings.append((watts, mhz))
    if not readings:
        return None
    watts, mhz = (statistics.mean(column) for column in zip(*readings, strict=True))
    return Load(watts, mhz, runs / took)


def _spin(step: Callable[[], Any], wait: Callable[[], Any], seconds: float) -> tuple[int, float]:
    start, runs = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < seconds:
        for _ in range(4):
            step()
        wait()
        runs += 4
    return runs, took
