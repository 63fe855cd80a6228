"""``maxvision bench profile``: where the time of one run goes, kernel by kernel.

CUPTI sees every kernel of the process, ours and torch's, inside a replayed graph too;
torch.profiler hands its records over. Runs are replayed one at a time; a kernel's time is the mean
over them, by its place in the launch order, and so is what it adds to the run. Kernels of ours are
named after the layer that they compute. On a CPU there is no such record: ``bench ops`` times the
layers there.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from max.driver import Device
from max.dtype import DType
from max.graph import DeviceRef
from rich.console import Console
from rich.table import Table

from maxvision.bench.__main__ import dtypes
from maxvision.bench.attribution import Recorded, attribute
from maxvision.bench.compile import compiled_note
from maxvision.bench.engines import Engine, Images, Maxvision, peer_names, peers
from maxvision.bench.environment import environment
from maxvision.bench.layers import network_nodes
from maxvision.bench.records import check_path, write
from maxvision.bench.references import checkpoint, our_model, reference_model
from maxvision.bench.tf32 import allow_tf32
from maxvision.bench.timing import rounded
from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.runtime.devices import DTYPES, find_device, find_dtype
from maxvision.runtime.preprocess import Preprocess

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


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


def run(options: argparse.Namespace) -> int:
    """Profiles every model, dtype and batch that was asked for."""
    device = find_device(options.device)
    if device.is_host:
        raise DeviceError(
            "bench profile needs a GPU, because MAX does not record the time of each node on a CPU;"
            " use bench ops --device cpu, which times each layer"
        )
    if not torch.cuda.is_available():
        raise DeviceError("bench profile needs a torch with CUDA, whose profiler reads CUPTI")
    check_path(options.json)
    check_path(options.trace)
    records: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for name in options.models:
        reference = reference_model(name)
        for dtype in dtypes(options, gpu=True):
            find_dtype(dtype, device)
            for batch in options.batches:
                engine = _engine(name, reference, dtype, batch, device, options)
                launches = launches_of(engine.compute, engine.clock.wait, options.runs)
                title = f"{options.engine}: {name}, {dtype}, batch {batch}"
                if options.engine == "maxvision":
                    launches = named(launches, name, reference, DTYPES[dtype], device)
                show(launches, title, options.rows)
                for launch in launches:
                    records.append(
                        {
                            "model": Path(name).name, "dtype": dtype, "batch": batch,
                            "engine": options.engine, **asdict(launch),
                        }
                    )  # fmt: skip
                events += trace(launches, title, len(events))
                engine.close()
    if options.trace:
        options.trace.write_text(json.dumps({"traceEvents": events}) + "\n")
    if options.json:
        write(options.json, {**environment(), **compiled_note(options.precompiled)}, records)
    return 0


def _engine(
    name: str, reference: Any, dtype: str, batch: int, device: Device, options: argparse.Namespace
) -> Engine:
    prepare = Preprocess.from_config(checkpoint(name, reference).preprocess)
    images = Images.of(prepare, batch, gpu=True)
    if options.engine == "maxvision":
        ours = our_model(
            name, reference, device, DTYPES[dtype], options.precompiled, tf32=options.tf32
        )
        return Maxvision(ours, device, images)
    names = peer_names(gpu=True, autotune=True)
    if options.engine not in names:
        raise ArgumentError(
            f"--engine must be maxvision, {', '.join(names)} but is {options.engine!r}"
        )
    allow_tf32(options.tf32)
    return peers(reference, images, dtype)[options.engine]()


def named(
    launches: list[Launch], name: str, reference: Any, dtype: DType, device: Device
) -> list[Launch]:
    """Names the node of our graph that each launch is of, if they can be told."""
    model = checkpoint(name, reference)
    prepare = Preprocess.from_config(model.preprocess)
    place, size = DeviceRef.from_device(device), (prepare.height, prepare.width)
    nodes = network_nodes(model, place, dtype, size)
    shapes = [(str(launch.grid), str(launch.block)) for launch in launches]
    recorded = [Recorded(x.symbol, shape) for x, shape in zip(launches, shapes, strict=True)]
    names = attribute(recorded, nodes)
    if names is None:
        sys.stderr.write(
            f"layers are not named: {len(launches)} launches do not fit the graph's {len(nodes)}"
            " nodes; was it compiled from this commit?\n"
        )
        return launches
    return [replace(x, layer=layer) for x, layer in zip(launches, names, strict=True)]


def launches_of(step: Callable[[], Any], wait: Callable[[], Any], runs: int) -> list[Launch]:
    """Records ``runs`` runs and averages each launch over them."""
    for _ in range(3):
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
            f"bench profile: CUPTI recorded {len(found)} launches, which are not {runs} equal runs;"
            " run it again"
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


def trace(launches: list[Launch], title: str, thread: int) -> list[dict[str, Any]]:
    """Makes Chrome trace events of an average run, in a row of their own."""
    row = {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": title}}
    return [row] + [
        {
            "name": launch.layer or launch.name, "ph": "X", "pid": 0, "tid": thread,
            "ts": launch.start_us, "dur": launch.us, "args": asdict(launch),
        }
        for launch in launches
    ]  # fmt: skip


def show(launches: list[Launch], title: str, rows: int) -> None:
    """Prints the launches, those that add most to the run first, then their sum by name."""
    span = sum(launch.adds_us for launch in launches)
    idle = sum(max(0.0, launch.adds_us - launch.us) for launch in launches)
    console = Console(width=None if Console().is_terminal else 180)
    table = Table("place", "layer", "kernel", title=title, title_justify="left")
    for heading in ("us", "adds us", "share", "grid", "block", "registers", "shared bytes"):
        table.add_column(heading, justify="right")
    for launch in sorted(launches, key=lambda launch: -launch.adds_us)[: rows or None]:
        table.add_row(
            str(launch.place),
            launch.layer,
            launch.name,
            f"{launch.us:.2f}",
            f"{launch.adds_us:.2f}",
            f"{launch.adds_us / span:.1%}",
            "x".join(map(str, launch.grid or [])),
            "x".join(map(str, launch.block or [])),
            "" if launch.registers is None else str(launch.registers),
            "" if launch.shared_bytes is None else str(launch.shared_bytes),
        )
    console.print(table)
    sums: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        sums[launch.name].append(launch.adds_us)
    table = Table("kernel", title="by kernel", title_justify="left")
    for heading in ("launches", "adds us", "share"):
        table.add_column(heading, justify="right")
    for name, times in sorted(sums.items(), key=lambda item: -sum(item[1])):
        table.add_row(name, str(len(times)), f"{sum(times):.2f}", f"{sum(times) / span:.1%}")
    console.print(table)
    console.print(
        f"{len(launches)} launches in {span:.1f} us, as recorded;"
        f" nothing runs in {idle / span:.1%} of it\n"
    )
