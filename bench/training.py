"""``maxvision bench training``: steps of training, ours beside torch's, in one run.

A step is a batch through the network, its loss and gradients, and an update of all weights by SGD
with momentum, in torch's fused form for every engine. Networks are channels last, under autocast
unless the dtype is float32. Each engine has a copy of the same weights. Before it is timed, the
gradients of its first step are compared with those of eager torch in float64: their error, over all
weights, may be at most twice that of eager torch in the same dtype. Then all are timed in turn,
round after round: a time is that between two marks around a step, of steps that are enqueued back
to back. Memory is what torch has reserved and what MAX has given away of its pool, the most while a
step is enqueued, looked at each ms; weights and optimizer are part of it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from max.driver import Device
from torch import Tensor, nn

from maxvision.bench import summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.engines import TORCH
from maxvision.bench.ours import given_away
from maxvision.bench.records import write
from maxvision.bench.references import checkpoint, reference_model
from maxvision.bench.timing import HostClock, TorchClock, percentiles, rest, rounded, sample
from maxvision.bridge import dynamo
from maxvision.bridge.tensors import place_of
from maxvision.common.errors import ArgumentError
from maxvision.graphs.layers import macs
from maxvision.graphs.program import Program

ROUNDS = 3
BOUND = 2.0
"""Our error may be at most this many times eager torch's in the same dtype."""
EPS = 1e-6
"""Plus this: eager torch's own may be almost nothing."""
RATE = 1e-4
"""Learning rate: small, so that weights are alike for all engines to the end."""
ENGINES = ("maxvision", "torch-compile", "torch")


class Trainer:
    """A copy of a network that one engine trains.

    Args:
        engine: One of ``ENGINES``.
        model: The network, in training mode.
        batch: Images [N, C, H, W] and the class of each.
        dtype: Of autocast; float32 is none, and in float64 all is computed, weights too.
    """

    def __init__(
        self, engine: str, model: nn.Module, batch: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        wide = dtype if dtype == torch.float64 else torch.float32
        self.model = copy.deepcopy(model).to(wide)
        self._x, self._labels = batch[0].to(wide), batch[1]
        self._mixed = dtype != wide
        self._dtype = dtype
        self._call: Callable[..., Any] = self.model
        if engine != "torch":
            backend: Any = dynamo.backend if engine == "maxvision" else "inductor"
            self._call = torch.compile(self.model, backend=backend, dynamic=False)
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE, 0.9, fused=True)

    def backward(self) -> Tensor:
        """Computes the loss and the gradients."""
        kind = self._dtype if self._mixed else None
        with torch.autocast(self._x.device.type, kind, enabled=self._mixed):
            found = self._call(self._x)
            logits = getattr(found, "logits", found)
            logits = logits.float() if self._mixed else logits
            loss = nn.functional.cross_entropy(logits, self._labels)
        loss.backward()
        return loss

    def step(self) -> None:
        """Trains on the batch once."""
        self._optimizer.zero_grad(set_to_none=True)
        self.backward()
        self._optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Gives the gradients of a step; the weights stay as they are."""
        self.backward()
        found = [p.grad.double().cpu() for p in self.model.parameters() if p.grad is not None]
        self._optimizer.zero_grad(set_to_none=True)
        return found


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Compares gradients in the Frobenius norm over all weights, relative."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    whole = sum(float(each.square().sum()) for each in wanted)
    return float((difference / whole) ** 0.5)


def run(options: argparse.Namespace) -> int:
    """Measures every model, dtype and batch that was asked for."""
    for each in options.engines:
        if each not in ENGINES:
            raise ArgumentError(f"--engines must be of {', '.join(ENGINES)} but has {each!r}")
    device, facts = begin(options, __doc__)
    gpu = not device.is_host
    if gpu:
        facts["cuda"], facts["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    records: list[dict[str, Any]] = []
    for name in options.models:
        model = reference_model(name)
        held = checkpoint(name, model)
        size = (options.size, options.size) if options.size else held.size
        program = held.program(size).keep(["logits"])
        for dtype in dtypes(options, gpu):
            for count in options.batches:
                found = _cell(
                    model.train(), name, TORCH[dtype], count, device, size, program, options
                )
                records += found
                summaries.training(found)
                if options.json:
                    write(options.json, facts, records)
    return 0 if all(each["passed"] for each in records) else FAILED


def _cell(
    model: nn.Module,
    name: str,
    dtype: torch.dtype,
    count: int,
    device: Device,
    size: tuple[int, int],
    program: Program,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    gpu, place = not device.is_host, place_of(device)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layout = torch.channels_last
    model = model.to(place).to(memory_format=layout)  # type: ignore[call-overload]
    (height, width), classes = size, int(program.types[program.outputs["logits"]].shape[-1])
    x = torch.randn(count, 3, height, width, device=place).to(memory_format=layout)
    batch = (x, torch.randint(0, classes, (count,), device=place))
    exact = Trainer("torch", model, batch, torch.float64).gradients()
    clock = TorchClock() if gpu else HostClock()
    found: dict[str, dict[str, Any]] = {}
    trainers: dict[str, Trainer] = {}
    for engine in ("torch", *(each for each in options.engines if each != "torch")):
        sys.stderr.write(f"{name}, {dtype}, batch {count}: {engine}\n")
        gc.collect()
        torch.cuda.empty_cache()  # what one engine has freed is no longer counted as held
        before = _taken(device) if gpu else 0
        trainers[engine] = Trainer(engine, model, batch, dtype)
        error = distance(trainers[engine].gradients(), exact)
        for _ in range(3):
            trainers[engine].step()
        most = _most(trainers[engine].step, device) - before if gpu else None
        clock.wait()
        bound = BOUND * found["torch"]["error"] + EPS if found else float("inf")
        found[engine] = {
            "model": name, "size": list(size), "dtype": str(dtype).removeprefix("torch."),
            "batch": count, "engine": engine, "error": rounded(error), "passed": error <= bound,
            "memory_bytes": most,
        }  # fmt: skip
    samples: dict[str, list[float]] = {engine: [] for engine in options.engines}
    for _ in range(ROUNDS):
        for engine in options.engines:
            if not gpu:
                rest()
            samples[engine] += sample(clock, trainers[engine].step, options.seconds / ROUNDS)
    operations = 6.0 * macs(program)  # forward, and two products back for each
    for engine, times in samples.items():
        found[engine] |= percentiles(times)
        ms = found[engine]["p50_ms"]
        found[engine] |= {
            "tflops_per_s": rounded(operations * count / ms / 1e9),
            "images_per_s": rounded(count / ms * 1e3),
        }
    return [found[engine] for engine in options.engines]


def _taken(device: Device) -> int:
    """Counts the bytes that torch has reserved on a GPU, and those that MAX has given away."""
    return given_away(device) + torch.cuda.memory_reserved(place_of(device))


def _most(step: Callable[[], object], device: Device) -> int:
    """Gives the most bytes that are taken while a step is enqueued, looked at each ms."""
    found, done = [_taken(device)], threading.Event()

    def watch() -> None:
        while not done.wait(1e-3):
            found.append(_taken(device))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        step()
    finally:
        done.set()
        watcher.join()
    return max(found)
