"""``maxvision bench profile``: where the time of one run goes, kernel by kernel.

Runs are replayed one at a time (bench/launches.py); a kernel's time is the mean over them, by its
place in the launch order, and so is what it adds to the run. Kernels of ours are named after the
layer that they compute. On a CPU there is no such record: ``bench ops`` times the layers there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from max.driver import Device
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.bench import summaries
from maxvision.bench.__main__ import dtypes
from maxvision.bench.attribution import Recorded, attribute
from maxvision.bench.compile import compiled_note
from maxvision.bench.engines import ours, peer_names, peers
from maxvision.bench.environment import environment
from maxvision.bench.launches import Launch, launches_of
from maxvision.bench.layers import lowered
from maxvision.bench.ours import Engine
from maxvision.bench.records import check_path, write
from maxvision.bench.references import our_executor, reference_model, subject
from maxvision.bench.tf32 import allow_tf32
from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.runtime.devices import DTYPES, find_device, find_dtype


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
                summaries.launches(launches, title, options.rows)
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
    inputs = subject(name, reference).inputs(batch, True)
    if options.engine == "maxvision":
        executor = our_executor(
            name, reference, device, DTYPES[dtype], options.precompiled, tf32=options.tf32
        )
        return ours(executor, device, inputs)
    names = peer_names(gpu=True, autotune=True)
    if options.engine not in names:
        raise ArgumentError(
            f"--engine must be maxvision, {', '.join(names)} but is {options.engine!r}"
        )
    allow_tf32(options.tf32)
    return peers(reference, inputs, dtype)[options.engine]()


def named(
    launches: list[Launch], name: str, reference: Any, dtype: DType, device: Device
) -> list[Launch]:
    """Names the node of our graph that each launch is of, if they can be told."""
    place = DeviceRef.from_device(device)
    program, _ = subject(name, reference).computing_in(dtype.name)
    nodes = lowered(program, place, dtype)
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
