"""Compares a program with the model that it came from: outputs, and every stage on the way.

What to compare with is a ``Reference`` (bridge/importer.py): torch, or what runs ONNX files. The
bound is that of float32: an error of 1e-5 of the largest value, or twice the reference's own error,
which is its distance from itself in float64, where that is larger. Where activations are rounded to
8 bits, what lies between two levels may go either way, so there it is a level of 255.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType

from maxvision.bridge.coverage import others_of
from maxvision.bridge.importer import AT, Traced
from maxvision.common import memory
from maxvision.graphs.passes import PASSES
from maxvision.graphs.program import Node, Program, computing_in, rebuilt
from maxvision.graphs.quantize import STEPS
from maxvision.graphs.types import at_batch
from maxvision.runtime.executor import Executor, Lowering

BOUND = 1e-5
"""The largest error of float32 that passes, as a share of the largest value."""
LEVEL = 1 / STEPS
"""The same of a program that rounds activations to 8 bits."""
MOST_STAGES = 24
"""Stages to compare; of more, some are left out."""
RUNS = 5
"""Runs of which the fastest counts."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from the reference's.

    Attributes:
        name: Of the output, or of the module that it leaves.
        shape: Of a batch of two.
        error: The largest difference, as a share of the largest value of the reference's.
        own: The same of its float32 and float64; 0 if it does not run in float64.
        bound: The largest error that passes.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    own: float
    bound: float

    @property
    def within(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Cost:
    """What comparing took.

    Attributes:
        seconds: In the reference's framework, to ``compile``, and on our kernels (``maxvision``).
        memory: The most bytes of host memory that these runs took beyond what was there, by the
            same names; empty where the system does not count them.
        others: What part of a run's time MAX's own kernels take; 0 if there are none.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    others: float = 0.0


def with_stages(traced: Traced) -> Program:
    """Gives a program whose stages are outputs too, called ``at <path of the module>``."""
    assert traced.program is not None
    program = traced.program.keep(traced.outputs)
    ends = set(program.outputs.values())
    points = {path: value for path, value in traced.points.items() if value not in ends}
    chosen: dict[str, str] = {}
    for path, value in points.items():
        if value in program.types and value not in chosen.values():
            chosen[f"{AT}{path}"] = value
    step = -(-len(chosen) // MOST_STAGES)
    kept = dict(list(chosen.items())[::-1][:: step or 1][::-1])
    return replace(program, outputs={**program.outputs, **kept})


def compare(
    traced: Traced,
    example: Sequence[Any],
    device: Device,
    *,
    stages: bool = True,
    tolerance: float | None = None,
    lowering: Lowering | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Difference], Cost]:
    """Runs a program and its reference on the same inputs.

    Args:
        traced: The program and its reference.
        example: The inputs.
        device: Where the program runs; the reference runs on the CPU.
        stages: Whether to compare the stages too.
        tolerance: The bound in place of the two above.
        lowering: How the program is compiled, and what both compute in; float32 and exact products
            if None.
        progress: Called with a sentence before each step.

    Returns:
        The differences, stages first, and what that cost.
    """
    reference = traced.reference
    assert traced.program is not None and reference is not None
    whole = with_stages(traced) if stages else traced.program.keep(traced.outputs)
    lowering = lowering or Lowering(tf32=False)
    seconds: dict[str, float] = {}
    held: dict[str, int] = {}

    @contextlib.contextmanager
    def told(name: str) -> Iterator[None]:
        memory.forget_peak()
        before, start = memory.resident(), time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start
        if before is not None and (peak := memory.peak()) is not None:
            held[name] = max(peak - before, 0)

    progress(f"running it in {reference.name}")
    points = [name[len(AT) :] for name in whole.outputs if name.startswith(AT)]
    with told(reference.name):
        wanted = reference(example, points, lowering.dtype)
    try:
        exact = reference(example, points, "float64")
    except Exception:  # a model that names float32 somewhere
        exact = {}
    progress("compiling it, which may take a minute")
    start = time.perf_counter()
    program = computing_in(whole, lowering.dtype)
    executor = Executor.compile(program, traced.tensors, device, lowering, images=0)
    seconds["compile"] = time.perf_counter() - start
    arrays = [np.asarray(each) for each in example]
    with told("maxvision"):
        found = executor(*arrays)
    rounds = any(node.op == "fake_quantize" for node in whole.nodes)
    least, made = LEVEL if rounds else BOUND, []
    for (name, _), array in zip(whole.outputs.items(), found, strict=True):
        want = wanted[name]
        best = exact.get(name, want)
        own = _error(want, best) if name in exact else 0.0
        bound = tolerance if tolerance is not None else max(least, 2 * own)
        made.append(Difference(name, array.shape, _error(array, best), own, bound))
    made.sort(key=lambda each: not each.name.startswith(AT))
    part = 0.0
    if others := others_of(executor.program):
        progress("timing MAX's own kernels alone")
        part = _others_alone(executor.program, others, traced.tensors, device, lowering)
        given = [Buffer.from_numpy(np.ascontiguousarray(each)).to(device) for each in arrays]
        part = min(part / _fastest(executor, given, device), 1.0)
    return made, Cost(seconds, held, part)


def _others_alone(
    final: Program,
    others: Sequence[Node],
    tensors: Mapping[str, np.ndarray],
    device: Device,
    lowering: Lowering,
) -> float:
    """Returns how many seconds some ops of a rewritten program take, of a batch of two."""
    nodes = [replace(node, outputs=tuple(f"{y} alone" for y in node.outputs)) for node in others]
    names = {x: None for node in nodes for x in node.inputs if x and x not in final.constants}
    inputs = {name: final.types[name] for name in names}
    at_load = (node for node in final.nodes if node.at_load)
    outputs = {node.output: node.output for node in nodes}
    alone = rebuilt(final, [*at_load, *nodes], inputs=inputs, outputs=outputs)
    executor = Executor.compile(alone, tensors, device, replace(lowering, off=PASSES), images=0)
    zeros = [
        Buffer.zeros([at_batch(size, 2) for size in shape], DType[dtype], device)
        for shape, dtype in inputs.values()
    ]
    return _fastest(executor, zeros, device)


def _fastest(executor: Executor, given: Sequence[Buffer], device: Device) -> float:
    """Returns the seconds of the fastest of some runs, of inputs that lie on the device."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        executor.executable.execute(*given)
        device.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape:
        return float("nan")
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    finite = np.isfinite(wanted)
    largest = np.abs(wanted[finite]).max(initial=0.0)
    error = np.abs(np.where(same, 0.0, found - wanted)).max(initial=0.0)
    return float(error / largest) if largest else float(error)
