"""ResNet-50's layers on a CPU, ours beside torch's: ``python -m bench.layers [--batch N]``.

Every distinct convolution of the network at 224 px, and its pools and classifier, float32, all
cores. All layers are one graph, each with a batch of its own: a layer is timed by giving the
others a batch of 0, and the time of a run where all are empty is taken off. torch gets the same
work in channels_last, its fastest layout for most of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.environment import environment
from graphs import nodes
from graphs.parameters import Parameters
from graphs.resnet import RESNETS


@dataclass(frozen=True)
class Layer:
    """A layer of the network: how often it occurs, its input's side and channels, its filter."""

    count: int
    side: int
    c: int
    f: int
    kernel: int
    stride: int
    then: str = "relu"

    @property
    def name(self) -> str:
        """Names the layer as the papers do."""
        return f"{self.kernel}x{self.kernel}/{self.stride} {self.c}-{self.f} at {self.side}"

    @property
    def out(self) -> int:
        """Side of the output, px."""
        return (self.side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def flops(self) -> int:
        """Floating-point operations for one image: two for each multiply-accumulate."""
        return 2 * self.out**2 * self.kernel**2 * self.c * self.f


@dataclass(frozen=True)
class Row:
    """What was measured of a layer, ms a batch."""

    layer: str
    count: int
    batch: int
    ours_ms: float
    torch_ms: float
    gflops_per_s: float


def resnet50_layers() -> list[Layer]:
    """Lists the distinct convolutions of ResNet-50 at 224 px."""
    spec = RESNETS["resnet50"]
    layers = [Layer(1, 224, 3, 64, 7, 2)]
    side, c = 56, spec.stem_width
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        stride, inner = spec.stage_stride(i), width // 4
        layers += [
            Layer(1, side, c, inner, 1, 1),
            Layer(1, side, inner, inner, 3, stride),
            Layer(1, side, c, width, 1, stride, "none"),
        ]
        side //= stride
        layers += [
            Layer(depth, side, inner, width, 1, 1, "add_relu"),
            Layer(depth - 1, side, width, inner, 1, 1),
            Layer(depth - 1, side, inner, inner, 3, 1),
        ]
        c = width
    return layers


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = measure(resnet50_layers(), options.batch)
    print_table(rows)
    if options.json:
        record = {"environment": environment(), "records": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(layers: list[Layer], batch: int) -> list[Row]:
    """Compiles all the layers into one graph, and times each of them and torch's."""
    rng = np.random.default_rng(0)
    shapes: list[list[tuple[int, ...]]] = []
    types, weights = [], {}
    for i, layer in enumerate(layers):
        inputs = [(layer.side, layer.side, layer.c)]
        if layer.then == "add_relu":
            inputs.append((layer.out, layer.out, layer.f))
        shapes.append(inputs)
        types += [TensorType(DType.float32, [f"n{i}", *s], device=DeviceRef.CPU()) for s in inputs]
        shape = (layer.kernel, layer.kernel, layer.c, layer.f)
        scale = (layer.kernel**2 * layer.c) ** -0.5
        weights[f"{i}.filter"] = (rng.standard_normal(shape) * scale).astype(np.float32)
        weights[f"{i}.bias"] = rng.standard_normal(layer.f).astype(np.float32)

    parameters = Parameters(weights, DeviceRef.CPU(), DType.float32)
    with Graph("layers", input_types=types, custom_extensions=[nodes.OPS]) as graph:
        values = iter(value.tensor for value in graph.inputs)
        outputs = []
        for i, layer in enumerate(layers):
            x, *residual = [next(values) for _ in shapes[i]]
            outputs.append(
                nodes.conv2d(
                    x,
                    parameters.filter(str(i)),
                    stride=layer.stride,
                    padding=layer.kernel // 2,
                    epilogue=layer.then,
                    residual=residual[0] if residual else None,
                )
            )
        graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    model = session.init(session.compile(graph), weights_registry=parameters.registry(CPU()))

    empty = [[np.zeros((0, *s), np.float32) for s in inputs] for inputs in shapes]

    def run(inputs: list[list[np.ndarray]]) -> Callable[[], Any]:
        flat = [array for part in inputs for array in part]
        return lambda: model.execute(*flat)

    overhead = best(run(empty))
    rows = []
    for i, layer in enumerate(track(layers, "measuring", transient=True)):
        full = [rng.standard_normal((batch, *s)).astype(np.float32) for s in shapes[i]]
        ours = best(run([*empty[:i], full, *empty[i + 1 :]])) - overhead
        theirs = best(torch_layer(layer, full, weights[f"{i}.filter"], weights[f"{i}.bias"]))
        rows.append(
            Row(layer.name, layer.count, batch, ours, theirs, batch * layer.flops / ours / 1e6)
        )
    return rows


def torch_layer(
    layer: Layer, inputs: list[np.ndarray], filters: np.ndarray, bias: np.ndarray
) -> Callable[[], Any]:
    """Makes the same work for torch, channels_last."""
    x, *residual = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in inputs)
    w = torch.from_numpy(filters).permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    b = torch.from_numpy(bias)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        y = F.conv2d(x, w, b, stride=layer.stride, padding=layer.kernel // 2)
        for r in residual:
            y += r
        return y if layer.then == "none" else y.relu_()

    return run


def best(step: Callable[[], Any], seconds: float = 0.3) -> float:
    """Times ``step`` repeatedly for about ``seconds``; the median of the faster half, in ms."""
    step()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(sorted(samples)[: (len(samples) + 1) // 2])


def print_table(rows: list[Row]) -> None:
    """Prints a row for each layer, and the network's sum."""
    table = Table("layer", title=f"ResNet-50's convolutions, float32, batch {rows[0].batch}")
    for heading in ("times", "ours, ms", "torch, ms", "ours / torch", "GFLOP/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.layer,
            str(row.count),
            f"{row.ours_ms:.3f}",
            f"{row.torch_ms:.3f}",
            f"{row.ours_ms / row.torch_ms:.2f}",
            f"{row.gflops_per_s:.0f}",
        )
    ours = sum(row.count * row.ours_ms for row in rows)
    theirs = sum(row.count * row.torch_ms for row in rows)
    table.add_row("all", "", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
