"""Torch modules and ONNX files as models of ours: converted, checked, written down.

fast = maxvision.convert(module, example)
fast = maxvision.convert("model.onnx")
fast(x)
print(fast.report)
fast.save("my-model")
fast = Converted.load("my-model")  # without torch
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from max.driver import Device
from max.graph import DeviceRef

from maxvision.bridge import check
from maxvision.bridge.coverage import Coverage, coverage
from maxvision.bridge.importer import Missing, Traced
from maxvision.bridge.model import Model, pictures_of
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.common.folder import new_folder
from maxvision.graphs import passes as rewriting
from maxvision.graphs.lower import backend
from maxvision.graphs.program import Program, computing_in
from maxvision.runtime.devices import find_device, find_dtype
from maxvision.runtime.executor import Executor, Lowering
from maxvision.weights.convert import write_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Report:
    """What became of a model.

    Attributes:
        name: Of the model.
        coverage: What runs it.
        differences: How far outputs and stages are from the source's; empty if not compared.
        cost: What comparing took, in the source's framework and on our kernels; None if nothing was
            compared.
        bytes: Of the weights.
    """

    name: str
    coverage: Coverage
    differences: list[check.Difference] = field(default_factory=list)
    cost: check.Cost | None = None
    bytes: int = 0

    @property
    def within(self) -> bool:
        """Whether every error is within its bound."""
        return all(each.within for each in self.differences)

    @property
    def worst(self) -> check.Difference:
        """The difference that is the largest part, or multiple, of its bound."""
        return max(self.differences, key=lambda each: each.error / each.bound)

    def __str__(self) -> str:
        found = self.coverage
        lines = [
            f"{self.name}: {found.macs / 1e9:.2f} GMAC, {self.bytes / 1e6:.1f} MB of weights",
            f"  our kernels     {_counted(found.kernels)}",
            f"  MAX's kernels   {_counted(found.others) or 'none'}{self._share()}",
            f"  fused away      {found.fused} ops",
        ]
        for each in self.differences:
            told = "" if each.within else f"  beyond the bound of {each.bound:.0e}"
            lines.append(f"  {each.error:8.1e}  {each.name}{told}")
        if self.cost:
            parts = [f"{name} {value:.2f} s" for name, value in self.cost.seconds.items()]
            lines.append(f"  one run of the batch: {', '.join(parts)}")
            parts = [f"{name} {value / 1e6:,.0f} MB" for name, value in self.cost.memory.items()]
            if parts:
                lines.append(f"  memory that it took: {', '.join(parts)}")
        return "\n".join(lines)

    def _share(self) -> str:
        if not self.coverage.others or self.cost is None:
            return ""
        return f": none of the multiplications, {self.cost.others:.1%} of the time"


def _counted(ops: Mapping[str, int]) -> str:
    ordered = sorted(ops.items(), key=lambda item: -item[1])
    return ", ".join(f"{op} {count}" if count > 1 else op for op, count in ordered)


def missing_error(name: str, missing: Sequence[Missing]) -> ModelError:
    """Names every op that a model has and we have not, each once, with its first line."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in missing:
        found.setdefault((each.op, each.why), []).append(each.origin)
    told = "; ".join(
        f"{op} ({why}), {len(places)} times, first at {places[0] or 'an unknown line'}"
        for (op, why), places in found.items()
    )
    return ModelError(f"{name} cannot be converted: {told}; replace these ops in the model")


class Converted:
    """A model on our kernels: takes tensors of torch or numpy, and gives the same kind.

    Attributes:
        program: What it computes, in torch's terms.
        tensors: Its weights by name.
        report: What was fused, and how far it is from the source.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, np.ndarray],
        executor: Executor,
        report: Report,
        described: _Described,
    ) -> None:
        self.program = program
        self.tensors = tensors
        self.report = report
        self._executor = executor
        self._described = described

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        device: str = "auto",
        passes: str = "all",
        tf32: bool = True,
        progress: Callable[[str], None] = lambda _: None,
    ) -> Converted:
        """Loads any model that ``save`` or ``maxvision convert`` wrote; torch is not needed.

        Args:
            folder: What was written.
            dtype: See ``convert``; so are the others.
            device: See ``dtype``.
            passes: See ``dtype``.
            tf32: See ``dtype``.
            progress: See ``dtype``.

        Raises:
            ModelError: If there is no such folder, or it is not whole.
            DeviceError: If the device or the dtype is not to be had.
        """
        from maxvision.weights.checkpoint import converted_tensors
        from maxvision.weights.source import find as find_folder

        found = find_folder(folder)
        if found.program is None:
            raise ModelError(
                f"{found.name}: maxvision convert did not write this; run it with maxvision.load"
            )
        tensors = converted_tensors(found, found.program)
        config = dict(found.config or {})
        outputs = config.get("outputs") or [*found.program.outputs]
        off, place = rewriting.parse(passes), find_device(device)
        kind = find_dtype(dtype, place).name
        told = _report(found.name, found.program, outputs, tensors, place, kind, off)
        progress("compiling it, which may take a minute")
        lowering = Lowering(kind, tf32, off=off)
        executor = _executor(found.program.keep(outputs), tensors, place, lowering)
        return cls(found.program, tensors, executor, told, (config, found.preprocess))

    def __repr__(self) -> str:
        return f"Converted({self.program.signature})"

    def __call__(self, *inputs: Any) -> Any:
        """Computes the outputs of a batch of any size: one, or a tuple in the module's order."""
        wanted = [*self._executor.program.inputs.values()]
        arrays = [
            np.ascontiguousarray(each.detach().cpu().numpy() if _is_tensor(each) else each)
            for each in inputs
        ]
        for i, (array, each) in enumerate(zip(arrays, wanted, strict=False)):
            if each.dtype == "float32" or np.can_cast(array.dtype, each.dtype):
                arrays[i] = array.astype(each.dtype)
        found: list[Any] = self._executor(*arrays)
        if any(_is_tensor(each) for each in inputs):
            import torch

            found = [torch.from_numpy(each) for each in found]
        return found[0] if len(found) == 1 else tuple(found)

    def save(self, folder: Path | str, force: bool = False) -> None:
        """Writes a folder that ``maxvision --model`` and ``load`` take.

        Raises:
            ArgumentError: If ``folder`` is there, or cannot be written.
        """
        with new_folder(Path(folder), "the model", lambda _: force) as new:
            _write(new, self._described, self.program, self.tensors)


_Described = tuple[dict[str, Any], dict[str, Any] | None]
"""A model's config.json, and its preprocessor_config.json if it takes pictures."""


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def write(folder: Path, model: Model, traced: Traced) -> None:
    """Writes a converted model into ``folder``, which is there and empty.

    Raises:
        OSError: If it cannot be written.
    """
    assert traced.program is not None
    _write(folder, _describe(model, traced), traced.program, traced.tensors)


def _describe(model: Model, traced: Traced) -> _Described:
    """Says what is known of a model besides its program; ``outputs`` are those of the source."""
    config: dict[str, Any] = {"model_type": "program", "name": model.name}
    config["outputs"] = traced.outputs
    if model.labels:
        config["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
    return config, model.preprocess or None


def _write(
    folder: Path, described: _Described, program: Program, tensors: Mapping[str, np.ndarray]
) -> None:
    held = {name: np.ascontiguousarray(tensors[name]) for name in program.weights}
    write_files(folder, *described, held, program)


def with_parts(traced: Traced) -> Traced:
    """Gives a classifier's program the outputs that ours have: features, and stages of images."""
    program = traced.program
    assert program is not None
    if "logits" not in program.outputs:
        return traced
    outputs = dict(program.outputs)
    head = program.producers[outputs["logits"]]
    while head.op == "fake_quantize":
        head = program.producers[head.inputs[0]]
    if head.op == "linear" and len(program.types[head.inputs[0]].shape) == 2:
        outputs["features"] = head.inputs[0]
    for number, value in enumerate(_stages(traced, program)):
        outputs[f"stages.{number}"] = value
    return replace(traced, program=replace(program, outputs=outputs))


def _stages(traced: Traced, program: Program) -> list[str]:
    """Finds the stages: values of images that leave the modules of one numbered list."""
    lists: dict[str, list[str]] = {}
    for path, value in traced.points.items():
        base = path.rstrip("0123456789")
        if base != path and value in program.types and len(program.types[value].shape) == 4:
            lists.setdefault(base, []).append(value)
    sized = [each for each in lists.values() if 2 <= len(each) <= 8]
    return min(sized, key=lambda each: abs(len(each) - 4)) if sized else []


def translated(model: Model, keep: Sequence[str] = ()) -> Traced:
    """Makes a program of a model; ``keep`` names layers that stay in float32 (``Program.kept``).

    Raises:
        ArgumentError: If there is no such layer.
        ModelError: If its framework cannot say what it computes, or it has ops that we have not:
            all are named.
    """
    traced = model.trace()
    if traced.missing:
        raise missing_error(model.name, traced.missing)
    traced = with_parts(traced)
    assert traced.program is not None
    return replace(traced, program=traced.program.kept(keep)) if keep else traced


def report(
    model: Model, traced: Traced, device: str, dtype: str, off: Collection[str] = ()
) -> Report:
    """Says what would run the outputs of a model; nothing is compared yet."""
    assert traced.program is not None
    place = find_device(device)
    return _report(model.name, traced.program, traced.outputs, traced.tensors, place, dtype, off)


def _report(
    name: str,
    program: Program,
    outputs: Sequence[str],
    tensors: Mapping[str, np.ndarray],
    place: Device,
    dtype: str,
    off: Collection[str],
) -> Report:
    whole = program.keep(outputs)
    found = coverage(whole, rewriting.run(whole, backend(DeviceRef.from_device(place), dtype), off))
    return Report(name, found, bytes=sum(tensors[each].nbytes for each in program.weights))


def compared(
    told: Report,
    model: Model,
    traced: Traced,
    device: str,
    off: Collection[str] = (),
    *,
    dtype: str = "float32",
    stages: bool = True,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Adds to a report how far outputs and stages are from the source's.

    Args:
        told: The report.
        model: Whose example inputs are taken.
        traced: Its program and reference.
        device: Where the program runs.
        off: Passes to leave out.
        dtype: What both compute in; products of float32 are exact.
        stages: Whether to compare the stages too.
        tolerance: See ``convert``; so is ``progress``.
        progress: See ``tolerance``.
    """
    found, cost = check.compare(
        traced, model.example, find_device(device), stages=stages, tolerance=tolerance,
        lowering=Lowering(dtype, tf32=False, off=off), progress=progress,
    )  # fmt: skip
    return replace(told, differences=found, cost=cost)


def find(source: str | os.PathLike[str], *, random: bool = False, size: int | None = None) -> Model:
    """Finds the model that a name stands for: an ONNX file, or what bridge/sources.py lists.

    Args:
        source: The name or path.
        random: Draw a torch module's weights instead of loading trained ones.
        size: Edge of the pictures, px; the model's own if None.

    Raises:
        ModelError: If there is none, or its library is missing.
        ArgumentError: If it is of no known kind.
    """
    name = os.fspath(source)
    if name.lower().endswith(".onnx"):
        from maxvision.bridge import onnx_file

        if random:
            raise ArgumentError(f"{name}: an ONNX file has its own weights; leave --random out")
        return onnx_file.read(Path(name).expanduser(), size)
    from maxvision.bridge import sources

    return sources.find(name, random=random, size=size)


def _module(module: Any, example: Any) -> Model:
    """Describes a torch module and its example inputs."""
    from maxvision.bridge.sources import TorchModel

    if example is None:
        raise ArgumentError("convert: a torch module needs example inputs: (module, example)")
    inputs = (example,) if _is_tensor(example) else tuple(example)
    if not inputs or len(inputs[0]) < 2:
        raise ArgumentError("convert: the example inputs expect a batch of at least 2")
    return TorchModel(type(module).__name__, module, inputs, (), pictures_of(inputs))


def convert(
    source: torch.nn.Module | str | os.PathLike[str],
    example: Tensor | Sequence[Tensor] | None = None,
    *,
    dtype: str = "float32",
    device: str = "auto",
    passes: str = "all",
    tf32: bool = True,
    keep: Sequence[str] = (),
    check_it: bool = True,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Converted:
    """Puts a model onto our kernels.

    Args:
        source: Any module that torch.export can trace, with parameters in float32, or a name:
            ``model.onnx``, ``timm/convnext_tiny``, what ``maxvision convert`` takes.
        example: Of a module: one tensor an input, or a single tensor; the first axis is the batch,
            at least 2.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu``, ``gpu``, ``gpu:N`` or ``auto``.
        passes: How the program is rewritten; see ``load``.
        tf32: Whether NVIDIA's tensor cores may round float32 to TF32.
        keep: Layers, or modules with all in them, that compute in float32 where ``dtype`` is
            narrower; ``*`` stands for anything.
        check_it: Compare outputs and stages with the source, in float32.
        tolerance: The largest relative error that passes; 1e-5, or twice the source's own, if None.
        progress: Called with a sentence before each step.

    Raises:
        ArgumentError: If there is no layer to keep, or no such pass.
        ModelError: If it cannot be converted, or an error is beyond the bound.
        DeviceError: If the device or the dtype is not to be had.
    """
    named = isinstance(source, (str, os.PathLike))
    model = find(source) if named else _module(source, example)  # type: ignore[arg-type]
    progress("tracing it")
    traced = translated(model, keep)
    assert traced.program is not None
    off = rewriting.parse(passes)
    place = find_device(device)
    kind = find_dtype(dtype, place)
    told = report(model, traced, device, kind.name, off)
    if check_it:
        told = compared(told, model, traced, device, off, tolerance=tolerance, progress=progress)
        if not told.within:
            worst = told.worst
            raise ModelError(
                f"{model.name}: {worst.name} differs from the source's by {worst.error:.1e} of the"
                f" largest value, beyond {worst.bound:.0e}; find the guilty pass with passes=, or"
                " raise tolerance="
            )
    progress("compiling it, which may take a minute")
    lowering = Lowering(kind.name, tf32, off=off)
    executor = _executor(traced.program.keep(traced.outputs), traced.tensors, place, lowering)
    return Converted(traced.program, traced.tensors, executor, told, _describe(model, traced))


def _executor(
    program: Program, tensors: Mapping[str, np.ndarray], place: Device, lowering: Lowering
) -> Executor:
    return Executor.compile(computing_in(program, lowering.dtype), tensors, place, lowering)
