"""Where an engine is made, asked and timed: one at a time, by calls that a process can pass on."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxvision.bench import power
from maxvision.bench.engines import ours, peers
from maxvision.bench.inputs import Inputs
from maxvision.bench.ours import Engine
from maxvision.bench.references import our_executor, reference_model
from maxvision.bench.tf32 import allow_tf32
from maxvision.bench.timing import HostClock, rounded, sample
from maxvision.common import memory
from maxvision.runtime.devices import DTYPES, find_device
from maxvision.runtime.executor import Executor

CHECKED = (1, 0)
"""Batches of the host's ring; an engine is set up with batch 0, and might have kept its answer."""
FEWEST = 3
"""Requests of a round."""


@dataclass(frozen=True)
class Cell:
    """What is measured of every engine.

    Attributes:
        model: As ``--models`` names it.
        dtype: Of activations and filters.
        inputs: What it runs on.
        device: As ``--device`` names it.
        precompiled: Folder of compiled graphs.
        tf32: Whether float32 may be multiplied as TF32 on a GPU.
        sparse: What runs pruned layers of ours: ``auto``, ``always`` or ``never``.
    """

    model: str
    dtype: str
    inputs: Inputs
    device: str
    precompiled: Path | None = None
    tf32: bool = False
    sparse: str = "auto"


class Stand:
    """Holds one engine at a time, and our model for the next batch size."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._ours: dict[tuple[str, str], Executor] = {}
        self._turns = itertools.count()
        self._bare = memory.resident() or 0

    def open(self, name: str, cell: Cell) -> dict[str, Any]:
        """Makes an engine; says how long that took, s, and what it holds of a GPU's memory."""
        self.close()
        allow_tf32(cell.tf32)
        record: dict[str, Any] = {}
        reference = reference_model(cell.model)
        start = time.perf_counter()
        if name == "maxvision":
            device = find_device(cell.device)
            key = (cell.model, cell.dtype)
            if key not in self._ours:
                self._ours.clear()
                dtype = DTYPES[cell.dtype]
                self._ours[key] = our_executor(
                    cell.model,
                    reference,
                    device,
                    dtype,
                    cell.precompiled,
                    tf32=cell.tf32,
                    sparse=cell.sparse,
                )
                record["load_s"] = rounded(time.perf_counter() - start, 3)
                start = time.perf_counter()
            self._engine = ours(self._ours[key], device, cell.inputs)
        else:
            self._engine = peers(reference, cell.inputs, cell.dtype)[name]()
        held = self._engine.memory
        record["setup_s"] = rounded(time.perf_counter() - start, 3)
        record["memory_mb"] = held and round(held / 1e6)
        return record

    @property
    def engine(self) -> Engine:
        """The engine that was opened."""
        assert self._engine
        return self._engine

    def answers(self) -> list[np.ndarray]:
        """Answers the batches that are checked."""
        return [self.engine.answer(turn) for turn in CHECKED]

    def sample(self, seconds: float) -> dict[str, list[float]]:
        """Times the network, the copies at both its ends and whole requests, ms.

        On a CPU also what the network costs it, all threads together (``cpu``), and the most memory
        that the process had meanwhile beyond what it began with (``memory``, bytes).
        """
        engine, turns = self.engine, self._turns
        memory.forget_peak()
        spent: list[float] = []

        def feed() -> None:
            engine.feed(next(turns))

        def upload() -> None:
            engine.upload(next(turns))

        def compute() -> None:
            start = time.process_time()
            engine.compute()
            spent.append((time.process_time() - start) * 1e3)

        step = compute if isinstance(engine.clock, HostClock) else engine.compute
        found = {
            "compute": sample(engine.clock, step, 0.7 * seconds, feed),
            "cpu": spent,
            "up": sample(engine.clock, upload, 0.05 * seconds),
            "down": sample(engine.clock, engine.download, 0.05 * seconds),
        }
        requests: list[float] = []
        end = time.perf_counter() + 0.2 * seconds
        while time.perf_counter() < end or len(requests) < FEWEST:
            start = time.perf_counter()
            engine.answer(next(turns))
            requests.append((time.perf_counter() - start) * 1e3)
        peak = memory.peak()
        on_host = isinstance(engine.clock, HostClock)
        found["memory"] = [] if peak is None or not on_host else [peak - self._bare]
        return {**found, "request": requests}

    def energy(self, index: int) -> dict[str, float]:
        """Runs for a second and reads GPU ``index``'s meter; empty if there is none."""

        def step() -> None:
            self.engine.feed(next(self._turns))
            self.engine.compute()

        found = power.load(step, self.engine.clock.wait, index)
        if found is None:
            return {}
        return {
            "joules_per_batch": rounded(found.watts / found.runs_per_s),
            "watts": round(found.watts),
            "sm_mhz": round(found.sm_mhz),
        }

    def close(self) -> None:
        """Gives the engine's memory back."""
        if self._engine:
            self._engine.close()
        self._engine = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
