"""``maxvision bench ops``: each distinct layer of a network, ours beside torch's, in one run.

A layer is a node of the compiled graph, taken out of it. On a GPU four of it run one after another
in one captured graph, each on weights and activations of its own; a layer's time is a quarter of
the graph's, and what fits into the caches stays there, for both sides. torch's operator runs in a
graph of the same making: cuDNN's convolution, cuBLAS's product, the fused attention, alone, without
the bias, the residual and the activation that ours computes too. On a CPU both run one at a time,
calls included, with a rest before each turn. Ours is checked first, and both are timed in turn,
round after round.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession, read
from max.engine import Model as Executable
from max.graph import DeviceRef

from maxvision.bench import summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.ceilings import Ceilings, ceilings
from maxvision.bench.engines import TORCH, captured
from maxvision.bench.launches import launches_of, short
from maxvision.bench.layers import (
    COPIES,
    NORMED,
    Layer,
    distinct,
    layer_module,
    network_nodes,
    sizes,
)
from maxvision.bench.records import write
from maxvision.bench.references import checkpoint, find_artifact, precision, reference_model
from maxvision.bench.tf32 import RoundedProducts
from maxvision.bench.timing import (
    Clock,
    HostClock,
    MaxClock,
    TorchClock,
    percentiles,
    rest,
    rounded,
    sample,
)
from maxvision.bench.torchnet import FUNCTIONS
from maxvision.graphs.elementwise import ELEMENTWISE, activation
from maxvision.graphs.shapes import MOMENTS, sides
from maxvision.runtime import cache
from maxvision.runtime.devices import DTYPES, find_dtype
from maxvision.runtime.preprocess import Preprocess

REPEATS = 4
"""Times that a graph is replayed between two marks on a GPU, so that they weigh less."""
ROUNDS = 4
CHECKED = 8
"""Images of a batch that are compared with float32."""
EPS = 64 * float(np.finfo(np.float32).eps)

Tensors = list[torch.Tensor]
Weights = dict[int, torch.Tensor]


@dataclass
class Network:
    """The layers of a network, compiled.

    Attributes:
        layers: Each with the names of its nodes.
        executables: A graph a layer.
        weights: Of each layer and copy, as ``Layer.weights`` draws them.
    """

    layers: dict[Layer, list[str]]
    executables: list[Executable]
    weights: list[list[dict[int, np.ndarray]]]


def run(options: argparse.Namespace) -> int:
    """Measures every layer that was asked for, prints a table and writes the records."""
    device, facts = begin(options, __doc__)
    gpu = not device.is_host
    torch.backends.cudnn.benchmark = True
    records: list[dict[str, Any]] = []
    for name in options.models:
        for dtype in dtypes(options, gpu):
            find_dtype(dtype, device)
            found = network(name, DTYPES[dtype], device, options.precompiled, options.tf32)
            limits = ceilings(dtype, gpu)
            facts["ceilings"][dtype] = limits.record()
            for batch in options.batches:
                cell = {"model": Path(name).name, "dtype": dtype, "batch": batch}
                cell["device"] = "cpu" if device.is_host else f"gpu:{device.id}"
                rows = []
                for i in range(len(found.layers)):
                    rows.append({**cell, **measure(found, i, device, batch, limits, options)})
                    if options.json:
                        write(options.json, facts, records + rows)
                records += rows
                summaries.ops(rows)
            del found
            gc.collect()
    return 0 if all(record["passed"] for record in records) else FAILED


def network(
    name: str, dtype: DType, device: Device, precompiled: Path | None, tf32: bool
) -> Network:
    """Takes a network apart and compiles its layers, or reads them from ``precompiled``.

    Raises:
        ArgumentError: If the folder lacks them.
    """
    what = precision(dtype.name, tf32)
    path = precompiled and find_artifact(precompiled, name, what, "layers")
    copies = 1 if device.is_host else COPIES
    model = checkpoint(name, reference_model(name))
    prepare = Preprocess.from_config(model.preprocess)
    place, size = DeviceRef.from_device(device), (prepare.height, prepare.width)
    layers = distinct(network_nodes(model, place, dtype, size, tf32=tf32))
    module, parameters, weights = layer_module(list(layers), place, dtype, copies, tf32=tf32)
    session = InferenceSession(devices=[device])
    library = [] if path else [cache.library(gpu=not device.is_host)]
    compiled = read(path) if path else session.compile(module, custom_extensions=library)
    models = session.init_all(compiled, weights_registry=parameters.registry(device))
    return Network(layers, [models[f"layer{i}"] for i in range(len(layers))], weights)


def measure(
    found: Network,
    index: int,
    device: Device,
    batch: int,
    limits: Ceilings,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Checks and times one layer."""
    gpu = not device.is_host
    place = "cuda" if gpu else "cpu"
    layer, names = list(found.layers.items())[index]
    copies = len(found.weights[index])
    dtype = TORCH[layer.dtype]
    values = [_values(layer, batch, place, seed) for seed in range(copies)]
    record: dict[str, Any] = {
        "engine": "maxvision", "layer": layer.title(), "op": layer.op, "tf32": layer.by_tf32,
        "epilogue": layer.epilogue,
        "count": len(names), "names": names,
    }  # fmt: skip
    executable = found.executables[index]
    inputs = [Buffer.from_dlpack(x) for copy in values for x in copy]
    if gpu:
        torch.cuda.synchronize()  # MAX works in a queue of its own
    outputs = executable.execute(*inputs)
    if gpu:
        del outputs
        outputs = executable.capture(batch, *inputs)

    repeats = REPEATS if gpu else 1

    def ours() -> None:
        for _ in range(repeats):
            if gpu:
                executable.replay(batch, *inputs)
            else:
                executable.execute(*inputs)

    ours()
    clock: Clock = MaxClock(device) if gpu else HostClock()
    clock.wait()
    each = len(layer.outputs)
    last = copies - 1
    results = outputs[last * each :]
    got = [torch.from_dlpack(y)[:CHECKED].float().cpu() for y in results]
    record |= _check(layer, got, values[last], found.weights[index][last], dtype)
    timed: dict[str, tuple[Clock, Callable[[], Any]]] = {"ours": (clock, ours)}
    operator = OPERATORS.get(layer.op) if options.peers else None
    if operator:
        try:
            theirs = _peer(operator, layer, values, found.weights[index], dtype)
            theirs()
            timed["theirs"] = (
                TorchClock() if gpu else HostClock(),
                lambda: [theirs() for _ in range(repeats)],
            )
        except RuntimeError as problem:  # out of memory, or nothing for the shape
            reason = str(problem).partition("\n")[0]
            sys.stderr.write(f"torch's {operator.name} is left out at {layer.title()}: {reason}\n")
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for name, (ticks, step) in itertools.chain(*[timed.items()] * ROUNDS):
        if not gpu:
            rest()
        samples[name] += sample(ticks, step, options.seconds / ROUNDS)
    spent = {name: percentiles(times) for name, times in samples.items()}
    runs = copies * repeats
    ms = spent["ours"]["p50_ms"] / runs
    flops, moved = layer.flops(batch), layer.traffic(batch)
    floor = limits.floor(flops, moved)
    record |= {
        "us": rounded(ms * 1e3),
        "p90_us": rounded(spent["ours"]["p90_ms"] / runs * 1e3),
        "tflops_per_s": rounded(flops / ms / 1e9),
        "gb_per_s": rounded(moved / ms / 1e6),
        "floor_us": rounded(floor * 1e3),
        "bound": "compute" if floor > limits.floor(0, moved) else "memory",
        "share_of_roofline": rounded(floor / ms, 3),
    }
    if operator and "theirs" in spent:
        peer = spent["theirs"]["p50_ms"] / runs
        record |= {
            "peer": operator.name,
            "peer_us": rounded(peer * 1e3),
            "of_peer": rounded(ms / peer, 3),
        }
    if gpu:
        for key, pair in zip(("kernel", "peer_kernel"), timed.values(), strict=False):
            record[key] = _kernels(*pair, runs)
        executable.release_captured_graph(batch)
        del outputs, values, inputs, timed
        torch.cuda.empty_cache()
    return record


def _peer(
    operator: Operator,
    layer: Layer,
    values: list[Tensors],
    weights: list[dict[int, np.ndarray]],
    dtype: torch.dtype,
) -> Callable[[], Any]:
    """Makes torch's run of all copies of a layer, captured on a GPU."""
    place = values[0][0].device.type
    placed = [{name: _weight(a, place, dtype) for name, a in copy.items()} for copy in weights]
    ready = [operator.prepare(layer, x, w, dtype) for x, w in zip(values, placed, strict=True)]

    @torch.inference_mode()
    def run() -> list[Any]:
        return [operator.run(layer, x, w, False) for x, w in zip(ready, placed, strict=True)]

    return captured(run) if place == "cuda" else run


def _kernels(clock: Clock, step: Callable[[], Any], runs: int) -> list[dict[str, Any]]:
    """Names the kernels of a layer, with the blocks of each: the tile is in the name of ours."""
    found = launches_of(step, clock.wait, 1)
    return [
        {"name": short(each.symbol), "blocks": each.grid and int(np.prod(each.grid))}
        for each in found[: len(found) // runs]
    ]


def _values(layer: Layer, batch: int, place: str, seed: int) -> Tensors:
    random = torch.Generator(place).manual_seed(seed)
    found = []
    for each in layer.values:
        shape = sizes(each, batch)
        if each.dtype == "uint8":
            x = torch.randint(0, 256, shape, generator=random, device=place, dtype=torch.uint8)
        else:
            x = torch.randn(shape, generator=random, device=place, dtype=TORCH[each.dtype])
        found.append(x)
    if layer.op in NORMED:
        found[1] = _row_moments(layer, found, {}, True)
    return found


def _weight(array: np.ndarray, place: str, dtype: torch.dtype) -> torch.Tensor:
    """Makes torch's weight; filters lie channels last."""
    made = torch.from_numpy(array).to(place, dtype)
    return made.contiguous(memory_format=torch.channels_last) if made.ndim == 4 else made


@torch.inference_mode()
def _check(
    layer: Layer,
    got: Tensors,
    values: Tensors,
    weights: dict[int, np.ndarray],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Compares the first images with torch in float32, or float64, from the same rounded numbers.

    Twice the error that torch itself makes at the layer's dtype is allowed.
    """
    operator = OPERATORS.get(layer.op)
    if operator is None:
        return {"passed": True}
    place = values[0].device.type

    def answer(at: torch.dtype) -> Tensors:
        rounded_first = {
            name: _weight(array, place, torch.float32 if array.ndim == 1 else dtype).to(at)
            for name, array in weights.items()
        }
        few = [x[:CHECKED] for x in values]
        ready = operator.prepare(layer, few, rounded_first, at)
        ready = [x.to(at) if x.is_floating_point() else x for x in ready]
        found = operator.run(layer, ready, rounded_first, True)
        return [y.double().cpu() for y in (found if isinstance(found, tuple) else (found,))]

    truth = answer(torch.float64 if dtype == torch.float32 else torch.float32)
    with RoundedProducts() if layer.by_tf32 else contextlib.nullcontext():
        plain = answer(dtype)
    error, theirs = _relative(got, truth), _relative(plain, truth)
    return {
        "max_rel_err": rounded(error),
        "torch_rel_err": rounded(theirs),
        "passed": bool(error <= 2 * theirs + EPS),  # NaN is not
    }


def _relative(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    return max(
        float((a.reshape(b.shape) - b).abs().max() / b.abs().max())
        for a, b in zip(got, truth, strict=True)
    )


# torch's side. ``whole`` adds what ours computes and the timed operator leaves out.


def _nchw(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2)


def _ended(layer: Layer, y: torch.Tensor, residual: Tensors) -> torch.Tensor:
    """Adds the residual and the activation of an epilogue."""
    for each in residual:
        y = y + each
    return _activated(layer.epilogue, y)


def _activated(epilogue: str, y: torch.Tensor) -> torch.Tensor:
    *numbers, op = activation(epilogue).split(" ")
    if not op:
        return y
    settings = dict(zip(ELEMENTWISE[op].settings or {}, map(float, numbers), strict=True))
    return FUNCTIONS[op](settings)(y)


def _bias(w: Weights, place: int, whole: bool) -> torch.Tensor | None:
    return w.get(place) if whole else None


def _conv2d(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    window = {name: layer.setting(name, 1) for name in ("stride", "dilation", "groups")}
    top, left, bottom, right = sides(layer.setting("padding", 0))
    image, padding = _nchw(x[0]), (top, left)
    if (top, left) != (bottom, right):
        image, padding = F.pad(image, (left, right, top, bottom)), (0, 0)
    y = F.conv2d(image, w[1], _bias(w, 2, whole), padding=padding, **window).permute(0, 2, 3, 1)
    return _ended(layer, y, x[1:]) if whole else y


def _shortcut(layer: Layer, x: Tensors, w: Weights, whole: bool) -> Any:
    padding, stride = layer.setting("padding"), layer.setting("stride")
    y = F.conv2d(_nchw(x[0]), w[1], _bias(w, 2, whole), 1, padding)
    beside = F.conv2d(_nchw(x[1]), w[4], _bias(w, 5, whole), stride)
    return F.relu(y + beside).permute(0, 2, 3, 1) if whole else (y, beside)


def _chain(_: Layer, x: Tensors, w: Weights, whole: bool) -> tuple[torch.Tensor, ...]:
    h = F.conv2d(_nchw(x[0]), w[1], _bias(w, 2, whole))
    return _followed(F.relu(h + _nchw(x[1])) if whole else h, w, 4, whole)


def _shortcut_chain(_: Layer, x: Tensors, w: Weights, whole: bool) -> tuple[torch.Tensor, ...]:
    h = F.conv2d(_nchw(x[0]), w[1], _bias(w, 2, whole))
    h = h + F.conv2d(_nchw(x[1]), w[4], _bias(w, 5, whole))
    return _followed(F.relu(h) if whole else h, w, 6, whole)


def _followed(
    h: torch.Tensor, w: Weights, place: int, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolves h[N, C, P, Q] by the 1 x 1 at a place, and gives both as images [N, P, Q, ...]."""
    z = F.conv2d(h, w[place], _bias(w, place + 1, whole))
    return h.permute(0, 2, 3, 1), (F.relu(z) if whole else z).permute(0, 2, 3, 1)


def _conv2d_mean(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    return _conv2d(layer, x, w, whole).mean((1, 2), keepdim=layer.setting("keepdim"))


def _row_moments(_: Layer, x: Tensors, __: Weights, ___: bool) -> torch.Tensor:
    groups = x[0].unflatten(-1, (-1, MOMENTS))
    groups = groups if groups.dtype == torch.float64 else groups.float()
    return torch.stack([groups.sum(-1), groups.square().sum(-1)], -1)


def _linear_moments(layer: Layer, x: Tensors, w: Weights, whole: bool) -> Any:
    y = F.linear(x[0], w[1], _bias(w, 2, whole))
    if not whole:
        return y
    y = x[1] + y
    return y, _row_moments(layer, [y], w, whole)


def _normed_linear(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    """Norms x without a weight and a bias, which are part of those of the product."""
    y = F.layer_norm(x[0], x[0].shape[-1:], eps=layer.setting("eps", 1e-5))
    y = F.linear(y, w[2], _bias(w, 3, whole))
    return _ended(layer, y, []) if whole else y


def _mlp(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    h = _normed_linear(layer, x, w, whole)
    z = F.linear(F.gelu(h), w[4], _bias(w, 5, whole))
    return x[0] + z if whole else z


def _squeeze_excite(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    y = x[0].mean((1, 2))
    for place, name in ((1, "activation"), (3, "gate")):
        y = F.linear(y, w[place].flatten(1), _bias(w, place + 1, whole))
        y = _activated(layer.setting(name), y)
    y = x[0] * y[:, None, None]
    return _ended(layer, y, x[1:]) if whole else y


def _qkv_linear(_: Layer, x: Tensors, w: Weights, whole: bool) -> tuple[torch.Tensor, ...]:
    places = zip(x, (3, 5, 7), strict=True)
    return tuple(F.linear(each, w[i], _bias(w, i + 1, whole)) for each, i in places)


def _layernorm_first(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    return _layernorm(layer, [x[0][:, 0]], w, whole)


def _linear(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    y = F.linear(x[0], w[1], _bias(w, 2, whole))
    return _ended(layer, y, x[1:]) if whole else y


def _attention(layer: Layer, x: Tensors, _: Weights, whole: bool) -> torch.Tensor:
    heads, scale = layer.setting("heads"), layer.setting("scale")
    q, k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in x)
    y = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return y.transpose(1, 2).flatten(2) if whole else y


def _attention_linear(layer: Layer, x: Tensors, w: Weights, whole: bool) -> Any:
    attended, behind = _attention(layer, x[:3], w, True), {i - 2: w[i] for i in w}
    return _linear_moments(layer, [attended, x[3]], behind, whole)


def _layernorm(layer: Layer, x: Tensors, w: Weights, _: bool) -> torch.Tensor:
    return F.layer_norm(x[0], x[0].shape[-1:], w[1], w[2], layer.setting("eps", 1e-5))


def _stem(layer: Layer, x: Tensors, w: Weights, whole: bool) -> Any:
    """Takes pixels that are normalised already."""
    window = layer.setting("stride"), layer.setting("padding")
    y = F.conv2d(_nchw(x[0]), w[3], _bias(w, 4, whole), *window)
    if layer.op.startswith("stem_maxpool"):
        y = F.max_pool2d(F.relu(y) if whole else y, 3, 2, 1)
        if layer.op == "stem_maxpool_conv2d":
            return _followed(y, w, 5, whole)
        return y.permute(0, 2, 3, 1)
    y = y.permute(0, 2, 3, 1)
    if layer.op == "stem_conv2d":
        return _ended(layer, y, []) if whole else y
    return F.layer_norm(y, y.shape[-1:], w[5], w[6], layer.setting("eps", 1e-5))


def _qkv(layer: Layer, x: Tensors, w: Weights, whole: bool) -> tuple[torch.Tensor, ...]:
    token = int(layer.setting("class_token"))
    y = _layernorm(layer, x, w, whole)
    image = _nchw(y[:, token:].unflatten(1, layer.setting("size")))
    found = []
    for i, part in ((3, "q"), (5, "kv"), (7, "kv")):
        stride = layer.setting(f"stride_{part}", 1)
        padding = layer.setting(f"padding_{part}")
        z = F.conv2d(image, w[i], _bias(w, i + 1, whole), stride, padding, groups=y.shape[-1])
        z = z.permute(0, 2, 3, 1)
        found.append(torch.cat([y[:, :token], z.flatten(1, 2)], 1) if whole else z)
    return tuple(found)


def _clamp(layer: Layer, x: Tensors, _: Weights, __: bool) -> torch.Tensor:
    return x[0].clamp(layer.setting("min"), layer.setting("max"))


def _pool(layer: Layer, x: Tensors, _: Weights, __: bool) -> torch.Tensor:
    pool = F.max_pool2d if layer.op == "max_pool2d" else F.avg_pool2d
    kernel, stride, padding = (layer.setting(name) for name in ("kernel", "stride", "padding"))
    return pool(_nchw(x[0]), kernel, stride, padding).permute(0, 2, 3, 1)


def _normalize(layer: Layer, x: Tensors, w: Weights, _: bool) -> torch.Tensor:
    return ((x[0] - w[1]) * w[2]).to(TORCH[layer.outputs[0].dtype])


def _token(layer: Layer, x: Tensors, w: Weights, whole: bool) -> torch.Tensor:
    y = _layernorm(layer, x, {1: w[2], 2: w[3]}, whole) if 2 in w else x[0]
    return torch.cat([w[1].expand(len(y), 1, -1).to(y.dtype), y], 1)


def _as_it_is(_: Layer, x: Tensors, __: Weights, ___: torch.dtype) -> Tensors:
    return x


def _normalised(_: Layer, x: Tensors, w: Weights, dtype: torch.dtype) -> Tensors:
    return [((x[0].float() - w[1].float()) * w[2].float()).to(dtype)]


@dataclass(frozen=True)
class Operator:
    """torch's version of a layer.

    Attributes:
        name: Of what is timed.
        run: Computes it, of values as ours takes them, NHWC.
        prepare: Makes the values that it takes, outside the time.
    """

    name: str
    run: Callable[[Layer, Tensors, Weights, bool], Any]
    prepare: Callable[[Layer, Tensors, Weights, torch.dtype], Tensors] = _as_it_is


OPERATORS = {
    "conv2d": Operator("conv2d", _conv2d),
    "linear": Operator("linear", _linear),
    "conv2d_shortcut": Operator("2 conv2d", _shortcut),
    "conv2d_chain": Operator("2 conv2d", _chain),
    "conv2d_shortcut_chain": Operator("3 conv2d", _shortcut_chain),
    "conv2d_mean": Operator("conv2d, mean", _conv2d_mean),
    "row_moments": Operator("2 sum", _row_moments),
    "linear_moments": Operator("linear", _linear_moments),
    "normed_linear": Operator("layer_norm, linear", _normed_linear),
    "layernorm_mlp": Operator("layer_norm, 2 linear, gelu", _mlp),
    "squeeze_excite": Operator("mean, 2 linear, mul", _squeeze_excite),
    "qkv_linear": Operator("3 linear", _qkv_linear),
    "layernorm_first": Operator("layer_norm", _layernorm_first),
    "attention": Operator("scaled_dot_product_attention", _attention),
    "attention_linear": Operator("scaled_dot_product_attention, linear", _attention_linear),
    "layer_norm": Operator("layer_norm", _layernorm),
    "stem_maxpool": Operator("conv2d, max_pool2d", _stem, _normalised),
    "stem_maxpool_conv2d": Operator("2 conv2d, max_pool2d", _stem, _normalised),
    "stem_layernorm": Operator("conv2d, layer_norm", _stem, _normalised),
    "stem_conv2d": Operator("conv2d", _stem, _normalised),
    "depthwise_qkv": Operator("layer_norm, 3 conv2d", _qkv),
    "clamp": Operator("clamp", _clamp),
    "max_pool2d": Operator("max_pool2d", _pool),
    "avg_pool2d": Operator("avg_pool2d", _pool),
    "normalize": Operator("sub, mul", _normalize),
    "class_token": Operator("cat, perhaps of a layer_norm", _token),
}
