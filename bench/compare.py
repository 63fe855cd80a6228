"""Helpers to measure functions of your own: ``compare`` several ways, ``profile`` one.

    from maxvision.bench.compare import compare, profile

    found = compare({"eager": f, "compiled": torch.compile(f)}, (x, weight), backward=True)
    found.show()
    found.plot("compared.svg")
    profile(model, x).show()

Times are medians of individual calls between two marks (bench/timing.py). What a launch moves is
counted, not measured: all that it is given and gives, once. On a GPU launches are those that CUPTI
records, and TFLOP/s and the share of the roofline are of the time that these take: in a small call
the host takes longer. On a CPU they are of the call, and launches are the ops that torch
dispatches, but views, and the kernels of the programs that Inductor and maxvision wrote; beside
such programs, other ops are not counted.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
from max.graph import DeviceRef
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from maxvision.bench import summaries, tables
from maxvision.bench.ceilings import ceilings
from maxvision.bench.launches import launches_of
from maxvision.bench.layers import listed
from maxvision.bench.tables import Record, number, percent
from maxvision.bench.timing import Clock, HostClock, TorchClock, percentiles, rest, rounded, sample
from maxvision.bridge.parts import Part
from maxvision.common.errors import ArgumentError
from maxvision.graphs import passes
from maxvision.graphs.lower import backend
from maxvision.graphs.types import BATCH

ROUNDS = 3
"""In which all are timed in turn."""
limits = functools.cache(ceilings)  # a second for each dtype
BOUND = 2.0
"""How many times the first implementation's error another one's may be."""
EPS = 8
"""And how many times the dtype's epsilon may come to it: the first one may be exact."""


@dataclass(frozen=True)
class Comparison:
    """What implementations of one function take.

    Attributes:
        records: One for each: ``implementation``, ``p50_ms`` and other percentiles, ``memory_mb``
            beyond what it is given, ``launches``, what they take on a GPU as ``launches_ms``,
            ``moved_mb``, ``tflops_per_s``, ``share_of_roofline``, ``lines`` of code, ``error`` and
            ``passed``; None is unknown. The error is the largest from the first one in float64, as
            a part of the largest number.
    """

    records: list[Record]

    def show(self, title: str = "Implementations") -> None:
        """Prints a table."""
        summaries.comparison(title, self.records)

    def plot(self, path: str | Path) -> None:
        """Draws a bar for each time.

        Raises:
            ArgumentError: If the file cannot be written.
        """
        timed = [r for r in self.records if r.get("p50_ms")]
        names = [r["implementation"] for r in timed]
        _drawn(path, names, [r["p50_ms"] for r in timed], "ms", "{:.3g}")


@dataclass(frozen=True)
class Profile:
    """Where the time of one call goes.

    Attributes:
        rows: A name, how often it runs in a call, and what it takes in µs, the largest first:
            kernels on a GPU, torch's ops without those that they call on a CPU.
    """

    rows: list[tuple[str, float, float]]

    def show(self, title: str = "Where the time goes", rows: int = 20) -> None:
        """Prints a table of the largest."""
        total = sum(us for _, _, us in self.rows)
        cells = [
            [name, f"{count:g}", number(us), percent(us / total)]
            for name, count, us in self.rows[:rows]
        ]
        tables.show(title, ("", "launches", "us", "share"), cells)

    def plot(self, path: str | Path, rows: int = 12) -> None:
        """Draws a bar for each of the largest; raises as ``Comparison.plot`` does."""
        names, _, times = zip(*self.rows[:rows], strict=True)
        _drawn(path, names, times, "µs of a call", "{:.3g}")


def _drawn(
    path: str | Path, names: Sequence[str], values: Sequence[float], unit: str, form: str
) -> None:
    from maxvision.bench import plots

    plots.save(plots.bars(names, values, unit, form), Path(path))


def compare(
    implementations: Mapping[str, Callable[..., Any]],
    args: Sequence[Any],
    *,
    backward: bool = False,
    seconds: float = 0.5,
    untimed: Sequence[str] = (),
    roofline: bool = True,
) -> Comparison:
    """Measures functions that compute the same.

    Args:
        implementations: By name. The first one takes float64, too: no result and no gradient of
            another may be more than twice as far from it as the first one in the dtype of ``args``.
        args: What each takes; tensors are all on one device.
        backward: Whether the gradients of all floats are computed too.
        seconds: To time each.
        untimed: Implementations of which everything but the time is told.
        roofline: Whether to measure the machine's ceilings, which takes a second or more.

    Raises:
        ArgumentError: If there is no implementation, no tensor among ``args``, the first one takes
            no float64, or results have other shapes than its own.
    """
    tensors = [x for x in tree_leaves(list(args)) if isinstance(x, Tensor)]
    if not implementations or not tensors:
        raise ArgumentError("compare takes implementations, and arguments with a tensor among them")
    gpu = tensors[0].is_cuda
    kind = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
    clock: Clock = TorchClock() if gpu else HostClock()
    steps = {name: _step(function, args, backward) for name, function in implementations.items()}
    first = next(iter(steps))
    wanted = steps[first]()
    exact = _exact(first, implementations[first], args, backward)
    own = _errors(first, wanted, exact)
    flops = _flops(steps[first])
    whole = _bytes(tensors) + _bytes(wanted)  # gradients are results, too
    dtype = str(kind).removeprefix("torch.")
    floor = limits(dtype, gpu).floor(flops, whole) if roofline else None
    records = []
    for name, step in steps.items():
        with _counted() as counts:
            found = step()
        errors = _errors(name, found, exact)
        bounds = [BOUND * each + EPS * torch.finfo(kind).eps for each in own]
        worst = max(errors, key=lambda each: (math.isnan(each), each), default=0.0)
        record: Record = {"implementation": name, "error": rounded(worst)}
        record["passed"] = all(a <= b for a, b in zip(errors, bounds, strict=True))
        if not counts.inductors and not counts.ours:  # beside torch.compile no mode may be active
            with _counted() as counts, _Ops(counts):
                step()
        record["launches"], record["launches_ms"] = counts.launches, None
        if gpu:
            launched = launches_of(step, clock.wait, 3)
            record["launches"] = len(launched)
            record["launches_ms"] = rounded(sum(each.us for each in launched) / 1e3)
        record["moved_mb"] = rounded(counts.bytes / 1e6) if counts.bytes else None
        record["memory_mb"] = None if counts.ours else _memory(step, gpu)
        record["lines"] = code_lines(implementations[name])
        records.append(record)
    timed = {name: step for name, step in steps.items() if name not in untimed}
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, step in timed.items():
            if not gpu:
                rest()
            samples[name] += sample(clock, step, seconds / ROUNDS)
    for record in records:
        if times := samples.get(record["implementation"]):
            record |= percentiles(times, (10, 50, 90))
            ms = record["launches_ms"] or record["p50_ms"]
            record["tflops_per_s"] = rounded(flops / ms / 1e9) if flops else None
            record["share_of_roofline"] = rounded(floor / ms) if floor is not None else None
    return Comparison(records)


def profile(model: Callable[..., Any], *args: Any, runs: int = 10) -> Profile:
    """Finds out where the time of a call goes.

    Args:
        model: A module or function.
        args: What it takes.
        runs: Calls to average over.
    """
    if any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves(list(args))):
        from maxvision.bench.launches import by_kernel

        found = by_kernel(launches_of(lambda: model(*args), torch.cuda.synchronize, runs))
        return Profile([(name, count, us) for name, count, us in found])
    for _ in range(3):
        model(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(runs):
            model(*args)
    rows = [
        (event.key, event.count / runs, event.self_cpu_time_total / runs)
        for event in recorded.key_averages()
        if event.self_cpu_time_total
    ]
    return Profile(sorted(rows, key=lambda row: -row[2]))


# --- what one call is -----------------------------------------------------------------------------


def _step(
    function: Callable[..., Any], args: Sequence[Any], backward: bool
) -> Callable[[], list[Tensor]]:
    """Makes a call of a function: it gives the results, then the gradients if asked for."""
    fresh = [
        x.detach().requires_grad_()
        if backward and isinstance(x, Tensor) and x.is_floating_point() else x
        for x in args
    ]  # fmt: skip
    asked = [x for x in fresh if isinstance(x, Tensor) and x.requires_grad]
    if isinstance(function, nn.Module) and backward:
        asked += [x for x in function.parameters() if x.requires_grad]
    slopes: list[Tensor] = []

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            # torch's counter of FLOPs hooks what modules are given, and no leaf lets it
            given = [x.view_as(x) if isinstance(x, Tensor) else x for x in fresh]
            found = [y for y in tree_leaves(function(*given)) if isinstance(y, Tensor)]
        if not backward:
            return found
        if not slopes:
            random = torch.Generator(found[0].device).manual_seed(0)
            slopes.extend(
                torch.randn(y.shape, generator=random, device=y.device).to(y.dtype) for y in found
            )
        gradients = torch.autograd.grad(found, asked, slopes)
        return [*(y.detach() for y in found), *gradients]

    return step


def _exact(
    name: str, function: Callable[..., Any], args: Sequence[Any], backward: bool
) -> list[Tensor]:
    """Computes results and gradients in float64."""
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
    wide = [
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args
    ]  # fmt: skip
    try:
        return _step(function, wide, backward)()
    except Exception as error:  # whatever a function raises
        raise ArgumentError(
            f"{name} does not take float64 ({type(error).__name__}: {error}), by which the others"
            " are judged; put an implementation first that does"
        ) from error


def _errors(name: str, found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Gives the largest error of each tensor, as a part of its largest number."""
    shapes = [[tuple(x.shape) for x in each] for each in (found, exact)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(f"{name} gives {shapes[0]}, and the first one {shapes[1]}")
    return [
        float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-30))
        for x, y in zip(found, exact, strict=True)
        if y.numel()
    ]


def _flops(step: Callable[[], Any]) -> float:
    """Counts what products and convolutions multiply and add."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        step()
    return float(counter.get_total_flops())


def _memory(step: Callable[[], Any], gpu: bool) -> float:
    """Measures the most memory that a call takes of torch, MB."""
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return rounded((torch.cuda.max_memory_allocated() - before) / 1e6)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as recorded:
        step()
    held, most = 0, 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return rounded(most / 1e6)


def _bytes(values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(values) if isinstance(x, Tensor))


# --- launches and bytes -------------------------------------------------------------------------


@dataclass
class _Counts:
    """What was launched.

    Attributes:
        launches: How many.
        bytes: That they were given and gave.
        inductors: Whether a program of Inductor ran.
        ours: Whether a program of ours ran.
        inside: Whether a kernel of Triton is interpreted, whose ops are none of the call's.
    """

    launches: int = 0
    bytes: int = 0
    inductors: bool = False
    ours: bool = False
    inside: bool = False

    def add(self, launches: int, moved: int) -> None:
        """Adds launches."""
        self.launches += launches
        self.bytes += moved


class _Ops(TorchDispatchMode):
    """Counts the ops that torch dispatches, but views and what only reserves memory."""

    def __init__(self, counts: _Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch."""
        found = func(*args, **(kwargs or {}))
        named = func.namespace == "aten" and not func.name().startswith(
            ("aten::empty", "aten::new_empty")
        )
        if (
            named
            and not self._counts.inside
            and not func.is_view
            and "_unsafe_view" not in func.name()
        ):
            self._counts.add(1, _bytes([args, kwargs, found]))
        return found


@contextmanager
def _counted() -> Iterator[_Counts]:
    """Counts kernels of Triton, of Inductor's programs and of ours."""
    counts = _Counts()
    with ExitStack() as stack:

        def part(module: nn.Module, given: Any) -> None:
            if isinstance(module, Part):
                counts.ours = True
                counts.add(*_of_part(module, given))

        stack.callback(register_module_forward_pre_hook(part).remove)
        from torch._inductor.output_code import CompiledFxGraph

        run = CompiledFxGraph.__call__

        def graph(self: Any, inputs: Any) -> Any:
            counts.inductors = True
            counts.add(*_of_inductor(self))
            return run(self, inputs)

        stack.enter_context(mock.patch.object(CompiledFxGraph, "__call__", graph))
        for owner, name in _triton():
            stack.enter_context(mock.patch.object(owner, name, _triton_launch(owner, name, counts)))
        yield counts


def _of_part(part: Part, given: Any) -> tuple[int, int]:
    """Counts the launches of a program of ours."""
    place = DeviceRef.from_device(part._device)
    final = passes.run(part.program, backend(place, part._dtype))
    types = zip(given, part.program.inputs.values(), strict=True)
    batch = next((len(x) for x, kind in types if kind.shape[:1] == (BATCH,)), 1)
    layers = [each.layer for each in listed(final, part._dtype)]
    return len(layers), sum(layer.traffic(batch) for layer in layers)


_KERNEL = re.compile(
    r"^ +(?:buf\d+ = )?(?:\w*fused\w*(?:\.run)?|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.M
)


def _of_inductor(graph: Any) -> tuple[int, int]:
    """Counts the launches of a graph of Inductor, by the code that it wrote."""
    code = graph.source_code
    deltas = graph.metrics_deltas
    return len(_KERNEL.findall(code[code.rfind("def call") :])), deltas.num_bytes_accessed


def _triton() -> Iterator[tuple[Any, str]]:
    """Gives what launches kernels of Triton, if it is there."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    yield InterpretedFunction, "run"
    yield JITFunction, "run"


def _triton_launch(owner: Any, name: str, counts: _Counts) -> Any:
    run = getattr(owner, name)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.add(1, _bytes([args, kwargs]))
        counts.inside = True
        try:
            return run(self, *args, **kwargs)
        finally:
            counts.inside = False

    return launch


# --- lines of code ------------------------------------------------------------------------------


def code_lines(function: Any) -> int | None:
    """Counts the lines of code of a function and what it calls in its own package.

    Comments, docstrings and empty lines do not count; None if there is no source in Python. Of an
    op of ours that is what it means, in torch; its kernels are in ops/.
    """
    found: set[Any] = set()
    function = _plain(function)
    if not hasattr(function, "__module__"):
        return None
    _collect(function, function.__module__.rpartition(".")[0], found)
    try:
        return sum(_lines(inspect.getsource(each)) for each in found) or None
    except (OSError, TypeError, tokenize.TokenError, IndentationError):
        return None


def _plain(function: Any) -> Any:
    """Takes what compilers put around a function away."""
    if isinstance(function, nn.Module):
        return type(function)
    for name in ("_torchdynamo_orig_callable", "__wrapped__", "fn"):
        while inner := getattr(function, name, None):
            function = inner
    return function


def _collect(thing: Any, package: str, found: set[Any]) -> None:
    thing = _plain(thing)
    inside = inspect.isfunction(thing) or inspect.isclass(thing)
    if not inside or thing in found or not thing.__module__.startswith(package):
        return
    found.add(thing)
    parts = (
        [thing]
        if inspect.isfunction(thing)
        else [getattr(x, "__func__", x) for x in vars(thing).values()]
    )
    for part in filter(inspect.isfunction, parts):
        for name in _names(part.__code__):
            _collect(part.__globals__.get(name), package, found)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _lines(source: str) -> int:
    """Counts the lines of a source that hold code."""
    source = inspect.cleandoc(source) if source[:1].isspace() else source
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    held, fresh = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in skipped:
            fresh |= token.type == tokenize.NEWLINE
            continue
        if not (fresh and token.type == tokenize.STRING):  # a docstring
            held.update(range(token.start[0], token.end[0] + 1))
        fresh = False
    return len(held)
