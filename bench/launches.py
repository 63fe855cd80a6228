"""The kernels that a run launches on a GPU, and what each takes.

CUPTI sees every kernel of the process, ours and torch's, inside a replayed graph too;
torch.profiler hands its records over. MAX alone has no such record.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxvision.bench.timing import rounded
from maxvision.common.errors import DeviceError

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
WARM = 12
"""Runs before those that count: by then ours are recorded wherever torch puts their inputs."""


@dataclass(frozen=True)
class Launch:
    """One launch of a run.

    Attributes:
        place: In the launch order, from 0.
        name: Short.
        symbol: As the device's code calls it.
        us: Mean over the runs.
        adds_us: From the end of all before to its own; kernels may overlap. Mean over the runs.
        start_us: Since the first launch of its run, mean over the runs.
        grid: Blocks, or None for a copy.
        block: Threads, likewise.
        registers: A thread.
        shared_bytes: A block.
        layer: The node of our graph that it was launched for; empty if none or unknown.
    """

    place: int
    name: str
    symbol: str
    us: float
    adds_us: float
    start_us: float
    grid: list[int] | None
    block: list[int] | None
    registers: int | None
    shared_bytes: int | None
    layer: str = ""


def launches_of(step: Callable[[], Any], wait: Callable[[], Any], runs: int) -> list[Launch]:
    """Records ``runs`` runs and averages each launch over them."""
    import torch

    for _ in range(WARM):
        step()
    wait()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(runs):
            step()
            wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        return launches(json.loads(path.read_text()), runs)


def launches(trace: dict[str, Any], runs: int) -> list[Launch]:
    """Averages the launches of a Chrome trace of ``runs`` like runs.

    Raises:
        DeviceError: If the runs did not launch the same kernels.
    """
    found = sorted(
        (event for event in trace["traceEvents"] if event.get("cat") in KINDS),
        key=lambda event: event["ts"],
    )
    each, rest = divmod(len(found), runs)
    columns = [found[place::each] for place in range(each)] if each and not rest else []
    if not columns or any(len({event["name"] for event in column}) > 1 for column in columns):
        raise DeviceError(
            f"CUPTI recorded {len(found)} launches, which are not {runs} equal runs; run it again,"
            " with nothing else in this process on the GPU"
        )
    starts = [event["ts"] for event in columns[0]]
    ends = list(starts)  # of each run, so far
    result = []
    for place, column in enumerate(columns):
        args = column[0].get("args", {})
        offsets = (event["ts"] - start for event, start in zip(column, starts, strict=True))
        later = [max(end, x["ts"] + x["dur"]) for end, x in zip(ends, column, strict=True)]
        adds = statistics.mean(b - a for a, b in zip(ends, later, strict=True))
        ends = later
        result.append(
            Launch(
                place,
                short(column[0]["name"]),
                column[0]["name"],
                rounded(statistics.mean(event["dur"] for event in column), 5),
                round(adds, 3),
                round(statistics.mean(offsets), 3),
                args.get("grid"),
                args.get("block"),
                args.get("registers per thread"),
                args.get("shared memory"),
            )
        )
    return result


def short(symbol: str) -> str:
    """Shortens the name of a kernel to what a reader needs.

    A Mojo kernel without ``@__name`` is called by two hashes, of which four digits stay; C++ keeps
    its last name, without namespaces and arguments.
    """
    if unnamed := re.fullmatch(r"mojo_pkg_[0-9a-f]+_([0-9a-f]{4})[0-9a-f]*", symbol):
        return f"unnamed {unnamed[1]}"
    if hashed := re.fullmatch(r"(\w+?)_([0-9a-f]{4})[0-9a-f]{4,}", symbol):
        return f"{hashed[1]} {hashed[2]}"
    name = symbol.removeprefix("void ")
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    outer = re.split(r"[<(]", name)[0].rpartition("::")[2] or name
    if outer == "Kernel" and "<" in name:  # CUTLASS names what it runs in the argument
        outer = re.split(r"[<>,(]", name)[1].rpartition("::")[2]
    return outer[:60]


def by_kernel(launches: list[Launch]) -> list[tuple[str, int, float]]:
    """Sums up the launches of each kernel.

    Returns:
        Its name, how often it is launched, and what that adds to a run in µs; the largest first.
    """
    sums: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        sums[launch.name].append(launch.adds_us)
    rows = [(name, len(times), sum(times)) for name, times in sums.items()]
    return sorted(rows, key=lambda row: -row[2])
