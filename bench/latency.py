"""What ``maxvision time`` measures: a model's latency, throughput, memory and start.

It needs what running a model needs, and no torch. Every figure is of individual runs of a warm
model: ``compute`` is the network alone, its input on the device already, and ``request`` is what a
caller waits for, host array in, host array out. On a GPU both copies are timed too, and runs are
enqueued back to back between events of the device's queue (bench/timing.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from max.driver import Device

from maxvision.bench import tables
from maxvision.bench.environment import environment
from maxvision.bench.launches import by_kernel, launches_of
from maxvision.bench.ours import HOST_RING, Maxvision, pictures
from maxvision.bench.records import check_path, write
from maxvision.bench.tables import number
from maxvision.bench.timing import HostClock, rounded, sample, summary
from maxvision.common import __version__, memory
from maxvision.common.console import working
from maxvision.common.errors import DeviceError
from maxvision.runtime import load
from maxvision.runtime.devices import find_device
from maxvision.runtime.executor import Executor

SHARES = {"compute": 0.6, "request": 0.3, "host_to_device": 0.05, "device_to_host": 0.05}
"""Of the time for a batch size."""
NAMES = {"host_to_device": "copy to device", "device_to_host": "copy to host"}
TRACED = 10
"""Runs that kernels' times are averaged over."""

Record = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Measures every batch size that was asked for, prints the figures and writes them.

    Raises:
        ModelError: If the model cannot be found, read or run.
        DeviceError: If the device or the dtype is not to be had, or kernels cannot be timed.
        ArgumentError: If the file of figures cannot be written.
    """
    to_stdout = str(options.json) == "-"
    check_path(None if to_stdout else options.json)
    _check_kernels(options)
    batches = options.batch_size
    with working(f"loading {options.model}") as say:
        model = load(
            options.model,
            device=options.device,
            dtype=options.dtype,
            tf32=options.tf32,
            sparse=options.sparse,
            batch_size=batches[0] if len(batches) == 1 else None,
            revision=options.revision,
            passes=options.passes,
            progress=say,
        )
        device, executor = model.place, model.executor()
    shape = (model.preprocess.height, model.preprocess.width, model.channels)
    facts = {
        **environment(),
        "maxvision": __version__,
        "model": model.name,
        "device": model.device,
        "dtype": model.dtype,
        "tf32": model.tf32,
        "sparse": model.sparse.told,
        "in_bytes": model.in_bytes,
        "image": list(shape),
        "ready_s": {name: rounded(seconds, 3) for name, seconds in model.seconds.items()},
        "loading_peak_mb": _mb(memory.peak()),
    }
    records = []
    with redirect_stdout(sys.stderr if to_stdout else sys.stdout):
        print(*_head(facts), sep="\n")
        for batch in batches:
            with working(f"measuring batch {batch}"):
                records.append(measure(executor, device, (batch, *shape), options))
        show(records)
    if to_stdout:
        print(json.dumps({"environment": facts, "records": records}))
    elif options.json:
        write(options.json, facts, records)
    return 0


def _check_kernels(options: argparse.Namespace) -> None:
    """Makes sure, before a model is loaded, that kernels can be timed if they are to be."""
    if not options.kernels:
        return
    if find_device(options.device).is_host:
        raise DeviceError(
            "--kernels needs a GPU: MAX records no time of a kernel on a CPU; use maxvision bench"
            " ops --device cpu, which times each layer"
        )
    found = importlib.util.find_spec("torch") is not None
    if not (found and importlib.import_module("torch").cuda.is_available()):
        raise DeviceError(
            "--kernels needs a torch with CUDA, whose profiler reads the times of kernels; install"
            " it, or leave --kernels out"
        )


def measure(
    executor: Executor, device: Device, shape: tuple[int, ...], options: argparse.Namespace
) -> Record:
    """Measures one batch size.

    Args:
        executor: Runs the graph, of uint8 pixels to logits.
        device: Where it runs.
        shape: Of a batch: [N, H, W, C].
        options: How long: ``warm_up`` and ``duration`` in s, or ``iterations``; ``kernels``, how
            many to name.

    Returns:
        ``batch``, ``images_per_s``, the host's and the GPU's memory in MB, and times in ms by what
        was timed (``timing.summary``).
    """
    engine = Maxvision(executor, device, pictures(shape, HOST_RING))
    turns = itertools.count()

    def feed() -> None:
        engine.feed(next(turns))

    steps: dict[str, tuple[Any, Callable[[], Any], Callable[[], Any]]] = {
        "compute": (engine.clock, engine.compute, feed),
        "request": (HostClock(), lambda: engine.answer(next(turns)), lambda: None),
    }
    if not device.is_host:
        steps["host_to_device"] = (engine.clock, lambda: engine.upload(next(turns)), lambda: None)
        steps["device_to_host"] = (engine.clock, engine.download, lambda: None)
    try:
        sample(engine.clock, engine.compute, options.warm_up, feed)
        memory.forget_peak()
        times = {
            name: sample(clock, step, SHARES[name] * options.duration, before, options.iterations)
            for name, (clock, step, before) in steps.items()
        }
        record: Record = {
            "batch": shape[0],
            **{name: summary(each) for name, each in times.items()},
        }
        record["images_per_s"] = rounded(shape[0] / record["compute"]["p50_ms"] * 1e3)
        record["host_mb"], record["device_mb"] = _mb(memory.peak()), _mb(engine.memory)
        if options.kernels:
            rows = by_kernel(launches_of(engine.compute, engine.clock.wait, TRACED))
            record["kernels"] = [
                {"name": name, "launches": count, "us": round(us, 2)} for name, count, us in rows
            ][: options.kernels]
        return record
    finally:
        engine.close()


def _mb(size: int | None) -> int | None:
    return None if size is None else round(size / 1e6)


def _head(facts: Record) -> Iterator[str]:
    """Says what is measured, on what, and how long it took to be ready."""
    place = facts["cpu"] if facts["device"] == "cpu" else facts["gpu"]
    height, width, channels = facts["image"]
    rows = {
        "model": f"{facts['model']}, images of {height} x {width} x {channels}",
        "device": f"{facts['device']}: {place}",
        "dtype": f"{facts['dtype']} by TF32" if facts["tf32"] else facts["dtype"],
        "sparse": facts["sparse"],
        "8 bits": facts["in_bytes"],
        "versions": f"maxvision {facts['maxvision']}, MAX {facts.get('max')}, Python"
        f" {facts['python']}",
        "ready": f"in {sum(facts['ready_s'].values()):.2f} s ("
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in facts["ready_s"].items())
        + ")",
        "memory": f"{facts['loading_peak_mb']:,} MB at most while loading"
        if facts["loading_peak_mb"]
        else "",
    }
    yield from (f"{name:9} {text}" for name, text in rows.items() if text)


HEAD = ("batch", "what", "runs", "min", "mean", "median", "p90", "p95", "p99", "max", "images/s",
        "host MB", "GPU MB")  # fmt: skip


def show(records: Sequence[Record]) -> None:
    """Prints a row for everything that was timed, and the kernels if they were."""
    rows = []
    for record in records:
        for kind in (kind for kind in SHARES if kind in record):
            times, first = record[kind], kind == "compute"
            rate = record["batch"] / times["p50_ms"] * 1e3 if kind not in NAMES else None
            rows.append([
                str(record["batch"]), NAMES.get(kind, kind), str(times["runs"]),
                *(number(times[f"{name}_ms"], "ms")
                  for name in ("min", "mean", "p50", "p90", "p95", "p99", "max")),
                number(rate),
                number(record["host_mb"]) if first else "",
                number(record["device_mb"]) if first else "",
            ])  # fmt: skip
    tables.show("Times in ms", HEAD, rows, left=2)
    print(
        "\ncompute: the network alone, its input on the device; request: array in, array out, as a"
        " caller waits for it"
    )
    for record in records:
        if kernels := record.get("kernels"):
            total = record["compute"]["mean_ms"] * 1e3
            named = [
                [
                    each["name"],
                    str(each["launches"]),
                    f"{each['us']:.1f}",
                    f"{each['us'] / total:.0%}",
                ]
                for each in kernels
            ]
            title = f"Kernels at batch {record['batch']}"
            tables.show(title, ("kernel", "launches", "us", "of compute"), named)
