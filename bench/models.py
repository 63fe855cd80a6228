"""``python -m bench models``: whole networks, ours beside torch's, in one process and run.

Every engine of a cell (model, dtype, batch) is checked first and then timed in turn, round after
round, so that clocks and heat are the same for all. ``compute`` is what the device takes for one
run, between two marks around each of many that are enqueued back to back; a fresh input is copied
into place before each, outside the marks, from a ring of random images larger than twice the L2
cache. A ``request`` is what a caller waits for: host array in, host array out, one at a time.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from max.driver import Device
from rich.console import Console
from rich.table import Table

from bench import power
from bench.__main__ import FAILED, dtypes
from bench.ceilings import Ceilings, ceilings
from bench.compile import NOTE
from bench.engines import TORCH, Engine, Images, Maxvision, peers
from bench.environment import environment
from bench.references import our_model, reference_model
from bench.timing import percentiles, rounded, sample
from graphs.session import DTYPES, Model, find_device, find_dtype
from weights.macs import macs

ROUNDS = 4
CHECKED = (1, 0)
"""Batches of the host's ring; an engine is set up with batch 0, and might have kept its answer."""

EPS = 64 * float(np.finfo(np.float32).eps)
CHUNK = 64
"""Images at a time through the float32 reference."""


def run(options: argparse.Namespace) -> int:
    """Measures everything that was asked for, prints it and writes it."""
    device = find_device(options.device)
    gpu = not device.is_host
    if gpu and not torch.cuda.is_available():
        sys.stderr.write("error: bench models expects a torch with CUDA on a GPU\n")
        return 2
    records: list[dict[str, Any]] = []
    facts: dict[str, Any] = {**environment(), **_compiled(options.precompiled)}
    facts["method"] = " ".join((__doc__ or "").split("\n\n", 1)[1].split())
    facts["tf32"] = options.tf32
    if gpu:
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    facts["ceilings"] = {}
    names = dtypes(options, gpu)
    for dtype in names:
        find_dtype(dtype, device)
    for name in options.models:
        reference = reference_model(name)
        for dtype in names:
            _tf32(options.tf32)
            if dtype not in facts["ceilings"]:
                facts["ceilings"][dtype] = ceilings(dtype, gpu)
            ours = our_model(name, reference, device, DTYPES[dtype], options.precompiled)
            for batch in options.batches:
                found = list(measure(name, reference, ours, device, batch, options, facts))
                records += found
                print_cell(found)
                if options.json:
                    write(options.json, facts, records)
            del ours
            gc.collect()
    return 0 if all(record["passed"] for record in records) else FAILED


def measure(
    name: str,
    reference: Any,
    ours: Model,
    device: Device,
    batch: int,
    options: argparse.Namespace,
    facts: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Measures one cell: a record an engine, ours first."""
    dtype, gpu = ours.dtype, not device.is_host
    images = Images.of(ours.preprocess, batch, gpu)
    limits: Ceilings = facts["ceilings"][dtype]
    truth = [_logits(reference, images, turn, torch.float32) for turn in CHECKED]
    plain = [_logits(reference, images, turn, TORCH[dtype]) for turn in CHECKED]
    eager = relative(plain, truth)
    flops = 2.0 * macs(ours.spec, images.size[0]) * batch
    floor = limits.floor(flops, traffic(reference, images.size, batch, TORCH[dtype].itemsize))
    makers: dict[str, Any] = {"maxvision": lambda: Maxvision(ours, device, images)}
    if options.peers:
        makers |= peers(reference, images, dtype, autotune=options.autotune)
    engines: list[Engine] = []
    records: dict[str, dict[str, Any]] = {}
    for engine_name, make in makers.items():
        record: dict[str, Any] = {
            "model": Path(name).name, "dtype": dtype, "batch": batch,
            "device": ours.device, "engine": engine_name,
        }  # fmt: skip
        start = time.perf_counter()
        try:
            engine = make()
        except Exception as problem:
            if engine_name == "maxvision":
                raise
            reason = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            sys.stderr.write(f"{engine_name} is left out: {reason}\n")
            continue
        record["setup_s"] = rounded(time.perf_counter() - start, 3)
        error = relative([engine.answer(turn) for turn in CHECKED], truth)
        record["max_rel_err"] = rounded(error)
        record["torch_rel_err"] = rounded(eager)
        record["memory_mb"] = engine.memory and round(engine.memory / 1e6)
        times = 2 if engine_name == "maxvision" else 4
        allowed = times * eager + EPS
        record["passed"] = bool(error <= allowed)  # NaN is not
        records[engine_name] = record
        if record["passed"]:
            engines.append(engine)
    samples = _rounds(engines, options.seconds)
    for engine in engines:
        record = records[engine.name]
        record |= samples[engine.name]
        middle = record["p50_ms"]
        record["images_per_s"] = rounded(batch / middle * 1e3)
        record["tflops_per_s"] = rounded(flops / middle / 1e9)
        record["floor_ms"] = rounded(floor)
        record["share_of_roofline"] = rounded(floor / middle, 3)
        if gpu and options.energy:
            record |= _energy(engine, device.id)
        # Memory that another engine took over would show only now.
        error = relative([engine.answer(turn) for turn in CHECKED], truth)
        record["passed"] &= bool(error <= 2 * record["max_rel_err"] + EPS)
    for engine in engines:
        engine.close()
    del engines
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    best = min(
        (r["p50_ms"] for n, r in records.items() if n != "maxvision" and r["passed"]),
        default=None,
    )
    if best and records["maxvision"]["passed"]:
        records["maxvision"]["of_best_peer"] = rounded(records["maxvision"]["p50_ms"] / best, 3)
    yield from records.values()


def _rounds(engines: list[Engine], seconds: float) -> dict[str, dict[str, Any]]:
    """Times the engines in turn, ``ROUNDS`` times, and sums each one's samples up."""
    samples = {engine.name: Samples() for engine in engines}
    for _ in range(ROUNDS):
        for engine in engines:
            samples[engine.name].add(engine, seconds / ROUNDS)
    return {name: found.record() for name, found in samples.items()}


@dataclass
class Samples:
    """Times of one engine, ms: the network, the copies at both its ends, whole requests."""

    compute: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)
    turns: Iterator[int] = field(default_factory=itertools.count)

    def add(self, engine: Engine, seconds: float) -> None:
        """Takes samples for about ``seconds``."""

        def feed() -> None:
            engine.feed(next(self.turns))

        def upload() -> None:
            engine.upload(next(self.turns))

        self.compute += sample(engine.clock, engine.compute, 0.7 * seconds, feed)
        self.up += sample(engine.clock, upload, 0.05 * seconds)
        self.down += sample(engine.clock, engine.download, 0.05 * seconds)
        end = time.perf_counter() + 0.2 * seconds
        while time.perf_counter() < end or len(self.request) < 3:
            start = time.perf_counter()
            engine.answer(next(self.turns))
            self.request.append((time.perf_counter() - start) * 1e3)

    def record(self) -> dict[str, Any]:
        """Sums the samples up, as the JSON names them."""
        return {
            **percentiles(self.compute),
            "samples": len(self.compute),
            "host_to_device_ms": percentiles(self.up)["p50_ms"],
            "device_to_host_ms": percentiles(self.down)["p50_ms"],
            "request": percentiles(self.request),
        }


def _energy(engine: Engine, index: int) -> dict[str, float]:
    turns = itertools.count()

    def step() -> None:
        engine.feed(next(turns))
        engine.compute()

    found = power.load(step, engine.clock.wait, index)
    if found is None:
        return {}
    return {
        "joules_per_batch": rounded(found.watts / found.runs_per_s),
        "watts": round(found.watts),
        "sm_mhz": round(found.sm_mhz),
    }


def relative(got: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The largest difference over the largest value, of the worst batch; NaN if there is one."""
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, truth, strict=True)]
    return float(np.max(errors))


@torch.inference_mode()
def _logits(reference: Any, images: Images, turn: int, dtype: torch.dtype) -> np.ndarray:
    """Runs a batch of the host's ring eagerly; float32 without TF32."""
    place = "cuda" if images.gpu else "cpu"
    allowed = torch.backends.cuda.matmul.allow_tf32
    if dtype == torch.float32:
        _tf32(False)
    x = images.pixels(turn, dtype)
    module = reference.to(place, dtype)
    parts = [module(part.to(place)).logits.float().cpu() for part in x.split(CHUNK)]
    reference.to("cpu", torch.float32)
    _tf32(allowed)
    return torch.cat(parts).numpy()


def _tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@torch.inference_mode()
def traffic(reference: Any, size: tuple[int, int], batch: int, itemsize: int) -> float:
    """Counts the bytes that a batch has to move at least, if nothing but layers' outputs does.

    Each output of a convolution or linear layer is written and read once, the image is read as
    one byte a value, and every weight is read once.
    """
    outputs = 0

    def count(_: Any, __: Any, output: torch.Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    layers = [m for m in reference.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    channels = getattr(reference.config, "num_channels", 3)
    reference(torch.zeros(1, channels, *size))
    for hook in hooks:
        hook.remove()
    held = sum(weight.numel() for layer in layers for weight in layer.parameters())
    image = channels * size[0] * size[1]
    return float(batch * (2 * outputs * itemsize + image) + held * itemsize)


def _compiled(folder: Path | None) -> dict[str, Any]:
    """Reads what ``bench compile`` noted, which stands in for a commit that is not known here."""
    if folder is None or not (folder / NOTE).is_file():
        return {}
    note = json.loads((folder / NOTE).read_text())
    return {"compiled": note, "commit": note["commit"]}


def write(path: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Writes what is known so far, a record a line."""
    shown = {
        **facts,
        "ceilings": {dtype: limits.record() for dtype, limits in facts["ceilings"].items()},
    }
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f'{{"environment": {json.dumps(shown)},\n"records": [\n{lines}\n]}}\n')


def print_cell(records: list[dict[str, Any]]) -> None:
    """Prints a row an engine."""
    first = records[0]
    title = f"{first['model']}, {first['dtype']}, batch {first['batch']}, {first['device']}"
    table = Table("engine", title=title, title_justify="left")
    for heading in (
        "p50 ms", "p90", "p99", "images/s", "TFLOP/s", "roofline", "to device", "to host",
        "request p50", "J", "MHz", "MB", "error", "ours is",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    ours = first.get("p50_ms")
    for record in records:
        if not record["passed"]:
            table.add_row(record["engine"], *[""] * 12, f"{record['max_rel_err']:.1e}", "WRONG")
            continue
        ratio = f"{ours / record['p50_ms']:.2f} x" if ours else ""
        table.add_row(
            record["engine"],
            *(f"{record[f'p{p}_ms']:.3f}" for p in (50, 90, 99)),
            f"{record['images_per_s']:,.0f}",
            f"{record['tflops_per_s']:.4g}",
            f"{record['share_of_roofline']:.0%}",
            f"{record['host_to_device_ms']:.3f}",
            f"{record['device_to_host_ms']:.3f}",
            f"{record['request']['p50_ms']:.3f}",
            f"{record['joules_per_batch']:.3g}" if "joules_per_batch" in record else "",
            str(record.get("sm_mhz", "")),
            str(record["memory_mb"] or ""),
            f"{record['max_rel_err']:.1e}",
            "" if record["engine"] == "maxvision" else ratio,
        )
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    if "of_best_peer" in first:
        console.print(f"ours takes {first['of_best_peer']:.2f} times the best peer's time\n")
