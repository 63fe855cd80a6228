"""ResNet-50's layers on a CPU, ours beside torch's: ``python -m bench.layers [--batch N]``.

Every distinct convolution of the network at 224 px, float32, all cores. A layer is a graph of its
own, so the first run compiles for some minutes; what a run of a graph costs by itself counts, as
a call of torch does. torch gets the same work in channels_last, its fastest layout for most.
"""

from __future__ import annotations

import argparse
import functools
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
from max.engine import Model as Executable
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
    def inputs(self) -> list[tuple[int, int, int]]:
        """Shapes of what it reads, without the batch: the activations, and the residual."""
        shapes = [(self.side, self.side, self.c)]
        if self.then == "add_relu":
            shapes.append((self.out, self.out, self.f))
        return shapes

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
    """Compiles each layer, then times it and torch's."""
    rng = np.random.default_rng(0)
    models = [compile_layer(layer, rng) for layer in track(layers, "compiling", transient=True)]
    rows = []
    for layer, (model, filters, bias) in track(
        list(zip(layers, models, strict=True)), "measuring", transient=True
    ):
        inputs = [rng.standard_normal((batch, *s)).astype(np.float32) for s in layer.inputs]
        ours = typical(functools.partial(model.execute, *inputs))
        theirs = typical(torch_layer(layer, inputs, filters, bias))
        rows.append(
            Row(layer.name, layer.count, batch, ours, theirs, batch * layer.flops / ours / 1e6)
        )
    return rows


def compile_layer(
    layer: Layer, rng: np.random.Generator
) -> tuple[Executable, np.ndarray, np.ndarray]:
    """Builds and loads a graph of one layer; returns it with its filter and bias."""
    shape = (layer.kernel, layer.kernel, layer.c, layer.f)
    filters = rng.standard_normal(shape).astype(np.float32) * (layer.kernel**2 * layer.c) ** -0.5
    bias = rng.standard_normal(layer.f).astype(np.float32)
    cpu = DeviceRef.CPU()
    parameters = Parameters({"w.filter": filters, "w.bias": bias}, cpu, DType.float32)
    types = [TensorType(DType.float32, ["batch", *s], device=cpu) for s in layer.inputs]
    with Graph("layer", input_types=types, custom_extensions=[nodes.OPS]) as graph:
        x, *residual = (value.tensor for value in graph.inputs)
        y = nodes.conv2d(
            x,
            parameters.filter("w"),
            stride=layer.stride,
            padding=layer.kernel // 2,
            epilogue=layer.then,
            residual=residual[0] if residual else None,
        )
        graph.output(y)
    session = InferenceSession(devices=[CPU()])
    compiled = session.compile(graph)
    return session.init(compiled, weights_registry=parameters.registry(CPU())), filters, bias


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


def typical(step: Callable[[], Any], seconds: float = 0.3) -> float:
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
