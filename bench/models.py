"""``maxvision bench models``: whole networks, ours beside torch's, in one run.

Every engine of a cell (model, dtype, batch) is checked first and then timed in turn, round after
round, so that clocks and heat are the same for all. Each has a process of its own, which waits
while another one's turn is; if it crashes, its cell is lost and nothing else. ``compute`` is what
the device takes for one run, between two marks around each of many that are enqueued back to back;
a fresh input is copied into place before each, outside the marks, from a ring of random inputs
larger than twice the L2 cache. A ``request`` is what a caller waits for: host array in, host array
out, one at a time. On a CPU a rest goes before each turn, in which the threads of the engine before
stop spinning.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from maxvision.bench import summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.ceilings import Ceilings, ceilings
from maxvision.bench.engines import THROUGH, TORCH, UNGUARDED, peer_names
from maxvision.bench.inputs import Inputs
from maxvision.bench.onnx_files import is_quantised, unrounded
from maxvision.bench.records import write
from maxvision.bench.references import find_artifact, precision, reference_model, subject
from maxvision.bench.stand import CHECKED, Cell, Stand
from maxvision.bench.tf32 import RoundedProducts, allow_tf32
from maxvision.bench.timing import percentiles, rest, rounded
from maxvision.bench.torchnet import TorchNet
from maxvision.bench.workers import Lost, Worker
from maxvision.common.errors import ArgumentError
from maxvision.graphs.layers import macs
from maxvision.runtime.devices import find_dtype

ROUNDS = 4
CPU_ROUNDS = 12
"""On a CPU, where other programs take turns too: the shorter, the more alike for all engines."""
EPS = 64 * float(np.finfo(np.float32).eps)
CHUNK = 64
"""Images at a time through the float32 reference."""


class Callee(Protocol):
    """Passes calls on to a ``Stand``."""

    @property
    def alive(self) -> bool:
        """Whether it can be called."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method."""

    def stop(self) -> None:
        """Ends it."""


def run(options: argparse.Namespace, start: Callable[[], Callee] = lambda: Worker(Stand)) -> int:
    """Measures everything that was asked for, prints it and writes it after every cell."""
    device, facts = begin(options, __doc__)
    gpu = not device.is_host
    allocator = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_"
    facts["allocator"] = {k: v for k, v in os.environ.items() if k.startswith(allocator)}
    if gpu:
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    names = dtypes(options, gpu)
    for dtype in names:
        find_dtype(dtype, device)
    references = {name: reference_model(name) for name in options.models}
    for name in options.models if options.precompiled else ():
        for dtype in names:
            find_artifact(options.precompiled, name, precision(dtype, options.tf32))
    engines = ["maxvision", *_peers(options, gpu)]
    callees: dict[str, Callee] = {}
    records: list[dict[str, Any]] = []
    try:
        for name, reference in references.items():
            what = subject(name, reference)
            for dtype in names:
                limits = ceilings(dtype, gpu)
                facts["ceilings"].setdefault(dtype, limits.record())
                for batch in options.batches:
                    inputs = what.inputs(batch, gpu)
                    place = "cpu" if device.is_host else f"gpu:{device.id}"
                    cell = Cell(
                        name,
                        dtype,
                        inputs,
                        place,
                        options.precompiled,
                        options.tf32,
                        options.sparse,
                    )
                    for engine in engines:
                        if engine not in callees or not callees[engine].alive:
                            callees[engine] = start()
                    operations = 2.0 * macs(what.program) * batch
                    found = list(measure(cell, reference, callees, operations, limits, options))
                    records += found
                    summaries.networks(found)
                    if options.json:
                        write(options.json, facts, records)
    finally:
        for callee in callees.values():
            callee.stop()
    bad = [r for r in records if not r["passed"] and ("lost" not in r or r["engine"] == engines[0])]
    return FAILED if bad else 0


def _peers(options: argparse.Namespace, gpu: bool) -> list[str]:
    """Names the peers that were asked for.

    Raises:
        ArgumentError: If one is none.
    """
    names = peer_names(gpu, options.autotune) if options.peers else []
    if options.against is None:
        return names
    known = [*names, THROUGH, UNGUARDED] if names else []
    for name in options.against:
        if name not in known:
            raise ArgumentError(f"--against must be of {', '.join(known)} but has {name!r}")
    return [name for name in known if name in options.against]


def measure(
    cell: Cell,
    reference: Any,
    callees: dict[str, Callee],
    flops: float,
    limits: Ceilings,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Measures one cell: a record an engine, ours first.

    An engine that raises or whose process ends is lost for this cell: its record says why.
    """
    inputs, dtype = cell.inputs, cell.dtype
    truth = [_logits(reference, inputs, turn, torch.float32) for turn in CHECKED]
    tf32 = cell.tf32 and inputs.gpu and dtype == "float32"
    with RoundedProducts() if tf32 else contextlib.nullcontext():
        plain = [_logits(reference, inputs, turn, TORCH[dtype]) for turn in CHECKED]
    eager = max(relative(plain, truth), rounding(reference, inputs, truth))
    size = TORCH[dtype].itemsize
    first = inputs.tensor(0, torch.float32)[:1]
    floor = limits.floor(flops, traffic(reference, first, inputs.batch, size))
    records: dict[str, dict[str, Any]] = {}
    left = dict(callees)

    def each(step: Callable[[str, Callee], None], together: bool = False) -> None:
        """Does a step with every engine that is left, one after another or all at once."""

        def attempt(name: str) -> None:
            try:
                step(name, left[name])
            except Lost as problem:
                records[name] |= {"passed": False, "lost": str(problem)}
                sys.stderr.write(f"{name} is lost: {problem}\n")
                left.pop(name).stop()  # what a GPU's error leaves behind is of no use

        if not together:
            for name in list(left):
                attempt(name)
            return
        with ThreadPoolExecutor(len(left)) as pool:
            try:
                list(pool.map(attempt, list(left)))
            except KeyboardInterrupt:
                for callee in callees.values():
                    callee.stop()
                raise

    def opened(name: str, callee: Callee) -> None:
        records[name] = {
            "model": Path(cell.model).name, "dtype": dtype, "batch": inputs.batch,
            "device": cell.device, "engine": name, "tf32": tf32,
        }  # fmt: skip
        bare = replace(cell, inputs=inputs.fresh())
        records[name] |= callee.call("open", name, bare)
        error = relative(callee.call("answers"), truth)
        allowed = (2 if name == "maxvision" else 4) * eager + EPS
        records[name] |= {
            "max_rel_err": rounded(error),
            "torch_rel_err": rounded(eager),
            "passed": bool(error <= allowed),  # NaN is not
        }
        if not records[name]["passed"]:
            callee.call("close")
            left.pop(name)

    samples: dict[str, dict[str, list[float]]] = {}
    rounds = ROUNDS if inputs.gpu else CPU_ROUNDS

    def sampled(name: str, callee: Callee) -> None:
        if not inputs.gpu:
            rest()
        for kind, times in callee.call("sample", options.seconds / rounds).items():
            samples.setdefault(name, {}).setdefault(kind, []).extend(times)

    def ended(name: str, callee: Callee) -> None:
        record, times = records[name], samples[name]
        record |= {**percentiles(times["compute"]), "samples": len(times["compute"])}
        middle = record["p50_ms"]
        if times["cpu"]:
            record |= lowest(times)
        if times["memory"]:
            record["memory_mb"] = round(max(times["memory"]) / 1e6)
        record |= {
            "host_to_device_ms": percentiles(times["up"])["p50_ms"],
            "device_to_host_ms": percentiles(times["down"])["p50_ms"],
            "request": percentiles(times["request"]),
            "images_per_s": rounded(inputs.batch / middle * 1e3),
            "tflops_per_s": rounded(flops / middle / 1e9),
            "floor_ms": rounded(floor),
            "share_of_roofline": rounded(floor / middle, 3),
        }
        if inputs.gpu and options.energy:
            record |= callee.call("energy", int(cell.device.partition(":")[2] or 0))
        # Memory that another engine took over would show only now.
        error = relative(callee.call("answers"), truth)
        record["passed"] &= bool(error <= 2 * record["max_rel_err"] + EPS)
        callee.call("close")

    each(opened, together=inputs.gpu or options.together)
    for _ in range(rounds):
        each(sampled)
    each(ended)
    ours = records["maxvision"]
    others = [r for r in records.values() if r is not ours and r["passed"]]
    if others and ours["passed"]:
        for figure, name in ("p50_ms", "of_best_peer"), ("p10_ms", "of_best_peer_p10"):
            if figure in ours:
                best = min(record[figure] for record in others)
                ours[name] = rounded(ours[figure] / best, 3)
    yield from records.values()


def rounding(reference: Any, inputs: Inputs, truth: list[np.ndarray]) -> float:
    """Returns how far rounding to 8 bits moves the answers of a quantised model; 0 of others.

    Two engines that are right may be twice as far apart, since either is as far from the answers
    that are not rounded: what lies between two levels goes to one or the other, and this spreads
    from layer to layer.
    """
    if not isinstance(reference, TorchNet) or not is_quantised(reference.source.program):
        return 0.0
    plain = TorchNet(unrounded(reference.source.program), reference.source.tensors).eval()
    return relative([_logits(plain, inputs, turn, torch.float32) for turn in CHECKED], truth)


def lowest(times: dict[str, list[float]]) -> dict[str, float]:
    """Gives the lower deciles of wall and CPU time, ms: what other programs disturb least."""
    return {
        "p10_ms": rounded(float(np.percentile(times["compute"], 10))),
        "cpu_p10_ms": rounded(float(np.percentile(times["cpu"], 10))),
    }


def relative(got: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The largest difference over the largest value, of the worst batch; NaN if there is one."""
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, truth, strict=True)]
    return float(np.max(errors))


@torch.inference_mode()
def _logits(reference: Any, inputs: Inputs, turn: int, dtype: torch.dtype) -> np.ndarray:
    """Runs a batch of the host's ring eagerly; float32 without TF32."""
    place = "cuda" if inputs.gpu else "cpu"
    allowed = torch.backends.cuda.matmul.allow_tf32
    if dtype == torch.float32:
        allow_tf32(False)
    x = inputs.tensor(turn, dtype)
    module = copy.deepcopy(reference).to(place, dtype)  # or 16 bits would be left of its weights
    parts = [module(part.to(place)).logits.float().cpu() for part in x.split(CHUNK)]
    del module
    if inputs.gpu:
        torch.cuda.empty_cache()
    allow_tf32(allowed)
    return torch.cat(parts).numpy()


@torch.inference_mode()
def traffic(reference: Any, first: torch.Tensor, batch: int, itemsize: int) -> float:
    """Counts the bytes that a batch has to move at least, if nothing but layers' outputs does.

    Each output of a convolution or linear layer is written and read once, the input, of which
    ``first`` is one image, is read as one byte a value, and every weight is read once.
    """
    outputs = 0

    def count(_: Any, __: Any, output: torch.Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    layers = [m for m in reference.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    reference(first)
    for hook in hooks:
        hook.remove()
    held = sum(weight.numel() for layer in layers for weight in layer.parameters())
    return float(batch * (2 * outputs * itemsize + first.numel()) + held * itemsize)
