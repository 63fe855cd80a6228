"""``maxvision bench sparse``: dense and sparse convolutions, layer by layer and whole networks.

Each distinct convolution of a network runs as its dense kernel and as its sparse one, on the same
weights, bias and activation included, after both gave the same result. Both run in turn, round
after round; on a CPU the time of a call that computes next to nothing is taken off both, as a
network is one call. Without ``--densities`` the weights are the model's own, so that a pruned model
is measured as it is; with them each layer is drawn at random at every density. A network runs as
``--sparse never``, ``auto`` and ``always`` compile it, in turn too; with ``--densities`` all its
layers but the first and the last have that density, at random. Times are medians; ``p10`` are lower
deciles, what other programs disturb least, and what gains and break-even points are made of. With
``--data`` networks also classify its pictures as ``auto`` runs them: accuracy against speed.

``--table`` writes what ``auto`` looks up: graphs/breakeven/DEVICE-DTYPE.json. ``--target
cpu:x86-64-v3`` measures layers as code for such a CPU runs them on this one, which has more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, Module, TensorType

from maxvision.bench import accuracy, curves, kernels, summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.engines import TORCH
from maxvision.bench.kernels import Case
from maxvision.bench.records import write
from maxvision.bench.references import checkpoint, find_artifact, precision
from maxvision.bench.timing import Clock, HostClock, MaxClock, rounded, sample
from maxvision.common.errors import ArgumentError, DeviceError, ModelError
from maxvision.graphs import nodes, sparsity
from maxvision.graphs.layers import Layer, layers
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.target import Target
from maxvision.runtime import cache
from maxvision.runtime.classifier import Classifier, build
from maxvision.runtime.devices import DTYPES, find_dtype
from maxvision.runtime.executor import Unchecked
from maxvision.runtime.preprocess import Preprocess
from maxvision.weights import Checkpoint
from maxvision.weights.layout import Stored

DENSITIES = (0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01)
"""Those of a table, unless others are asked for."""
ROUNDS = 6
CLOSE = {DType.float32: 1e-4, DType.bfloat16: 3e-2, DType.float16: 4e-3}
"""Largest difference of dense and sparse over the largest value."""


COMPARED = ("never", "auto", "always")
"""How networks are compiled; gains are over the first."""


def run(options: argparse.Namespace) -> int:
    """Measures what was asked for, prints it, and writes records and tables."""
    device, facts = begin(options, __doc__)
    target = chosen(options, device)
    if options.target:
        facts["cpu"] += kept_to(target, Target.of(device))
    densities = options.densities or (DENSITIES if options.table else None)
    if options.data:
        accuracy.check(options.data)
    if options.data and densities:
        raise ArgumentError(
            "--data does not go with --densities: random zeros leave no accuracy to measure"
        )
    if options.precompiled and (densities or options.layers):
        raise ArgumentError(
            "--precompiled holds whole networks; add --no-layers and omit --densities"
        )
    models = [checkpoint(name) for name in options.models]
    place = "cpu" if device.is_host else f"gpu:{device.id}"
    records: list[dict[str, Any]] = []
    for dtype in dtypes(options, gpu=not device.is_host):
        kind = find_dtype(dtype, device)
        if device.is_host and kind != DType.float32:
            raise DeviceError(f"bench sparse runs in float32 on a CPU, not in {dtype}")
        begun = len(records)

        def keep(model: Checkpoint, found: Iterator[dict[str, Any]], dtype: str = dtype) -> None:
            begun = len(records)
            cell = {"model": model.name, "dtype": dtype, "device": place, "engine": "maxvision"}
            for record in found:
                records.append({**cell, **record})
                if options.json:
                    write(options.json, facts, records)
            summaries.sparse(records[begun:])

        for model in models if options.layers else ():
            layers = layers_of(model)
            cases = list(drawn(layers, densities) if densities else own(model, layers))
            if device.is_host:
                keep(model, measure_layers(cases, device, kind, options, target))
                continue
            if densities and kind != DType.float32:  # patterns have kernels for 16 bits
                cases += [each for full in drawn(layers, (1,)) for each in kernels.patterned(full)]
            program = options.program
            keep(model, kernels.measure(cases, options.batches, target, kind, program))
        if options.table:  # before the networks, which then are as auto chooses
            write_table(records[begun:], target, dtype, facts)
            if not device.is_host and kind == DType.float32:
                write_table(records[begun:], target, f"{dtype}-exact", facts, "exact_us")
            sparsity.read_table.cache_clear()
        for name, model in zip(options.models, models, strict=True):
            if options.network:
                keep(model, measure_networks(name, model, densities, device, kind, options))
    return 0 if all(record["passed"] for record in records) else FAILED


def chosen(options: argparse.Namespace, device: Device) -> Target:
    """Finds what layers are compiled for: the device, or a kind of CPU that has less than it.

    Raises:
        ArgumentError: If that is no CPU, or networks are asked for, which the device's code runs.
        DeviceError: If this CPU has not all that is needed.
    """
    if not options.target:
        return Target.of(device)
    target = Target.parse(options.target)
    if target.api != "cpu" or not device.is_host or options.network:
        raise ArgumentError("--target takes a kind of CPU, with --device cpu and --no-network")
    target.open()
    return target


def kept_to(target: Target, here: Target) -> str:
    """Says which of a CPU's instructions code for ``target`` runs."""
    without = " without its AVX-512" * ("avx512f" in {*here.features} - {*target.features})
    return f", as {target.name.removeprefix('cpu:')}{without}"


def layers_of(model: Checkpoint) -> list[Layer]:
    """Lists a model's layers, on images as its preprocessor makes them."""
    prepare = Preprocess.from_config(model.preprocess)
    return layers(model.program((prepare.height, prepare.width)))


def kinds(layers: Sequence[Layer]) -> dict[Layer, list[str]]:
    """Groups the layers that have a sparse kernel by all but their names."""
    found: dict[Layer, list[str]] = {}
    for layer in layers:
        if layer.groups == 1:
            found.setdefault(replace(layer, name="", partner=""), []).append(layer.name)
    return found


def drawn(layers: Sequence[Layer], densities: Sequence[float]) -> Iterator[Case]:
    """Draws each kind of layer at each density."""
    rng = np.random.default_rng(0)
    for layer, names in kinds(layers).items():
        shape = (layer.kernel, layer.kernel, layer.channels, layer.filters)
        filters = rng.standard_normal(shape, np.float32) / np.float32(math.prod(shape[:3]) ** 0.5)
        order = rng.random(shape, np.float32)
        for density in densities:
            kept = filters * (order < np.quantile(order, density))
            named = replace(layer, name=names[0])
            yield Case(named, tuple(names), density, kept, "unstructured")


def own(model: Checkpoint, layers: Sequence[Layer]) -> Iterator[Case]:
    """Takes the pruned layers of a model, those of one kind and density (in percent) once.

    Raises:
        ModelError: If there are none.
    """
    zeros = {layer.name: model.zeros(layer.name) for layer in layers}
    found: dict[tuple[Layer, int], list[str]] = {}
    for layer, names in kinds(layers).items():
        for name in names:
            if zeros[name] >= sparsity.PRUNED:
                found.setdefault((layer, round(100 * zeros[name])), []).append(name)
    if not found:
        raise ModelError(
            f"{model.name}: the model is not pruned, no layer has"
            f" {sparsity.PRUNED:.0%} zeros; prune it with maxvision weights prune, or give"
            " --densities"
        )
    for (layer, _), names in found.items():
        shape = (layer.filters, layer.channels, layer.kernel, layer.kernel)
        filters = model.tensors[f"{names[0]}.weight"].reshape(shape).transpose(2, 3, 1, 0)
        density = np.count_nonzero(filters) / max(filters.size, 1)
        yield Case(replace(layer, name=names[0]), tuple(names), density, filters)


def measure_layers(
    cases: Sequence[Case], device: Device, dtype: DType, options: argparse.Namespace, target: Target
) -> Iterator[dict[str, Any]]:
    """Compiles all cases at once, and measures one after the other."""
    *models, (nothing, _) = compile_cases(cases, device, dtype, target)
    clock: Clock = HostClock() if device.is_host else MaxClock(device)
    empty = [Buffer.from_numpy(np.zeros((1, 1, 1, 1), np.float32)).to(device)]
    for batch in options.batches:
        for case, pair in zip(cases, models, strict=True):
            x = _input(case.layer, batch, dtype, device)
            found = [_result(each, x) for each in pair]
            apart = _apart(*found)
            steps = [_step(each, x, device) for each in pair]
            if device.is_host:
                steps.append(_step(nothing, empty, device))
            dense, sparse, *call = in_turn(clock, steps, options.seconds)
            p50, p10 = ([_us(times, p) for times in (dense, sparse, *call)] for p in (50, 10))
            for figures in p50, p10:
                idle = figures[2] if call else 0.0
                figures[:2] = [rounded(max(us - idle, 0.1)) for us in figures[:2]]
            yield {
                **case.about(batch),
                "dense_us": p50[0], "sparse_us": p50[1],
                "dense_p10_us": p10[0], "sparse_p10_us": p10[1],
                "call_us": p50[2] if call else 0.0, "gain": rounded(p10[0] / p10[1], 3),
                "difference": rounded(apart), "passed": bool(apart <= CLOSE[dtype]),
            }  # fmt: skip


def compile_cases(
    cases: Sequence[Case], device: Device, dtype: DType, target: Target
) -> list[tuple[Executable, Executable]]:
    """Compiles the dense and the sparse graph of every case, all in one module.

    The last pair of graphs are one and the same, which computes the relu of one number.
    """
    place = DeviceRef.from_device(device)
    bias = np.random.default_rng(1)
    named = {f"case{i}.w.filter": case.filters for i, case in enumerate(cases)}
    for i, case in enumerate(cases):
        named[f"case{i}.w.bias"] = bias.standard_normal(case.layer.filters, np.float32)
    parameters = Parameters(named, place, dtype)
    module = Module()
    for i, case in enumerate(cases):
        layer = case.layer
        h, w = (side * layer.stride for side in layer.size)
        image = TensorType(dtype, ["batch", h, w, layer.channels], device=place)
        for kind in ("dense", "sparse"):
            with Graph(
                f"{kind}{i}", input_types=[image], kernel_library=Unchecked(), module=module
            ) as graph:
                filter = parameters.at(f"case{i}").filter("w", sparse=kind == "sparse")
                padding = layer.kernel // 2
                x = graph.inputs[0].tensor
                y = nodes.conv2d(x, filter, stride=layer.stride, padding=padding, epilogue="relu")
                graph.output(y)
    one = TensorType(DType.float32, [1, 1, 1, 1], device=place)
    with Graph("nothing", input_types=[one], kernel_library=Unchecked(), module=module) as graph:
        graph.output(nodes.relu(graph.inputs[0].tensor))
    with target.device() as alike:
        library = cache.library(gpu=not device.is_host)
        compiled = InferenceSession(devices=[alike]).compile(module, custom_extensions=[library])
    session = InferenceSession(devices=[device])
    models = session.init_all(compiled, weights_registry=parameters.registry(device))
    pairs = [(models[f"dense{i}"], models[f"sparse{i}"]) for i in range(len(cases))]
    return [*pairs, (models["nothing"], models["nothing"])]


def measure_networks(
    name: str,
    model: Checkpoint,
    densities: Sequence[float] | None,
    device: Device,
    dtype: DType,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Measures whole networks: dense, as ``auto`` chooses, and sparse, in turn.

    On a GPU they are replayed as CUDA graphs.
    """
    clock: Clock = HostClock() if device.is_host else MaxClock(device)
    for density in densities or (None,):
        source = model if density is None else thinned(model, density)
        zeros = share_pruned(source)
        modes = COMPARED if zeros else COMPARED[:1]
        made = {mode: compiled(name, source, mode, device, dtype, options) for mode in modes}
        told = {mode: weigh(source, each, device) for mode, each in made.items()}
        if options.data:
            mode = "auto" if "auto" in made else "never"
            batches = accuracy.correct(made[mode], options.data, progress=True)
            right = list(itertools.chain(*batches))
            told[mode] |= {"accuracy": float(np.mean(right)), "pictures": len(right)}
        rng = np.random.default_rng(0)
        for batch in options.batches:
            size = made["never"].preprocess
            shape = (batch, size.height, size.width, model.channels)
            levels = rng.integers(0, 256, shape, np.uint8)
            x = Buffer.from_numpy(levels).to(device)
            executables = [made[mode].executable() for mode in made]
            found = [_result(each, [x]) for each in executables]
            steps = [_step(each, [x], device) for each in executables]
            spent = in_turn(clock, steps, 4 * options.seconds)
            for i, (mode, each) in enumerate(made.items()):
                apart = _apart(found[0], found[i])
                yield {
                    "kind": "sparse network", "batch": batch, "sparse": mode,
                    "density": density, "zeros": rounded(zeros, 3), "told": each.sparse.told,
                    "sparse_layers": len(each.sparse.layers), **told[mode],
                    "ms": rounded(_us(spent[i], 50) / 1e3),
                    "p10_ms": rounded(_us(spent[i], 10) / 1e3),
                    "gain": rounded(_us(spent[0], 10) / _us(spent[i], 10), 3),
                    "difference": rounded(apart), "passed": bool(apart <= 4 * CLOSE[dtype]),
                }  # fmt: skip


def compiled(
    name: str,
    model: Checkpoint,
    mode: str,
    device: Device,
    dtype: DType,
    options: argparse.Namespace,
) -> Classifier:
    """Compiles a network for ``--sparse mode``, or reads it from ``--precompiled``."""
    tf32 = options.tf32
    made = Classifier(model, device, dtype, options.batch_size, tf32=tf32, sparse=mode)
    if options.precompiled:
        kind = precision(dtype.name, tf32)
        made.adopt(find_artifact(options.precompiled, name, kind, mode))
    return made


def weigh(source: Checkpoint, model: Classifier, device: Device) -> dict[str, Any]:
    """Counts the bytes that the weights of ``model`` take on the device, and layers by format."""
    place, kernels = DeviceRef.from_device(device), Unchecked()
    size = model.preprocess.height, model.preprocess.width
    _, parameters = build(
        source,
        place,
        DTYPES[model.dtype],
        size=size,
        tf32=model.tf32,
        sparse=model.formats,
        kernels=kernels,
    )
    return {
        "weight_bytes": sum(weight.bytes for weight in parameters.bound.values()),
        "formats": dict(Counter(model.formats.values())),
    }


def share_pruned(source: Checkpoint) -> float:
    """Tells the share of zeros in all layers that were pruned; 0 if none was."""
    sizes, zeros = 0.0, 0.0
    for layer in layers_of(source):
        share = source.zeros(layer.name)
        if share >= sparsity.PRUNED:
            size = layer.kernel**2 * layer.channels // layer.groups * layer.filters
            sizes, zeros = sizes + size, zeros + share * size
    return zeros / max(sizes, 1.0)


def thinned(model: Checkpoint, density: float) -> Checkpoint:
    """Sets weights of every layer but the first and the last to zero, at random."""
    rng = np.random.default_rng(0)
    names = {layer.name for layer in layers_of(model)[1:-1] if layer.groups == 1}
    tensors = {}
    for name, tensor in model.tensors.items():
        thin = name.removesuffix(".weight") in names
        tensors[name] = tensor * (rng.random(tensor.shape) < density) if thin else tensor
    return replace(model, tensors=Stored(tensors))


def in_turn(clock: Clock, steps: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Times each step for about ``seconds``, round after round, ms."""
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, times in zip(steps, samples, strict=True):
            times += sample(clock, step, seconds / ROUNDS)
    return samples


def _input(layer: Layer, batch: int, dtype: DType, device: Device) -> list[Buffer]:
    h, w = (side * layer.stride for side in layer.size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((batch, h, w, layer.channels), generator=generator).to(TORCH[dtype.name])
    return [Buffer.from_dlpack(x).to(device)]


def _result(executable: Executable, x: Sequence[Buffer]) -> np.ndarray:
    (y,) = executable.execute(*x)
    return torch.from_dlpack(y).float().cpu().numpy().copy()


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / np.abs(one).max())


def _step(executable: Executable, x: Sequence[Buffer], device: Device) -> Callable[[], Any]:
    if device.is_host:
        return lambda: executable.execute(*x)
    key = x[0].shape[0]
    executable.capture(key, *x)
    return lambda: executable.replay(key, *x)


def _us(times: Sequence[float], percentile: int) -> float:
    return rounded(float(np.percentile(times, percentile)) * 1e3)


def write_table(
    records: Sequence[dict[str, Any]],
    target: Target,
    dtype: str,
    facts: Mapping[str, Any],
    dense: str = "dense_p10_us",
) -> None:
    """Writes what ``--sparse auto`` looks up on such a device; ``dense`` is the time to beat."""
    keys = ("kernel", "stride", "channels", "filters", "pixels", "batch", "format")
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        layer = record["kind"] == "sparse layer" and record.get("suited", True)
        if layer and record["passed"]:
            cells.setdefault(tuple(map(record.get, keys)), []).append(record)
    if not cells:
        raise ArgumentError("--table needs layers, and none was measured; omit --no-layers")
    lines = [json.dumps(asdict(curves.to_row(cell, dense))) for cell in cells.values()]
    name = sparsity.table_name(target, dtype)
    device = name.removesuffix(f"-{dtype}.json")
    kept = ("cpu", "gpu", "commit", "date", "command")
    measured = {key: facts[key] for key in kept if key in facts}
    path = sparsity.TABLES / name
    text = ",\n".join(lines)
    head = f'"device": "{device}", "dtype": "{dtype}",\n"measured": {json.dumps(measured)},'
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{{head}\n"rows": [\n{text}\n]}}\n', encoding="utf-8")
    sys.stderr.write(f"wrote {path}\n")
