"""A network that torch exports becomes the program that we write by hand: every fusion finds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from maxvision.bridge.exported import trace
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.cvt import CVTS, cvt
from maxvision.graphs.net import Net, Value
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Node, Program
from maxvision.graphs.resnet import RESNETS, ResNetSpec, resnet
from maxvision.graphs.types import BATCH

HOPPER = Backend("cuda", "bfloat16", architecture="sm_90a")
BACKENDS = (
    Backend("cpu", "float32"), Backend("cuda", "bfloat16"), Backend("cuda", "float32"),
    Backend("hip", "float16"), HOPPER,
)  # fmt: skip


def normal(program: Program) -> Program:
    """Names values in the order in which they come; what makes a weight stands before its use."""
    names = {"": "", **{name: f"x{i}" for i, name in enumerate(program.inputs)}}
    nodes: list[Node] = []

    def put(node: Node) -> None:
        for value in node.inputs:
            if value not in names and value in program.producers:
                put(program.producers[value])
            names.setdefault(value, f"v{len(names)}")
        for value in node.outputs:
            names[value] = f"v{len(names)}"
        given, made = (tuple(names[v] for v in each) for each in (node.inputs, node.outputs))
        attributes = dict(sorted(node.attributes.items()))
        nodes.append(Node(node.op, given, made, attributes, at_load=node.at_load))

    for node in program.nodes:
        if not node.at_load:
            put(node)
    return replace(
        program,
        name="",
        inputs={names[name]: each for name, each in program.inputs.items()},
        weights={names[name]: each for name, each in program.weights.items()},
        nodes=tuple(nodes),
        outputs={name: names[value] for name, value in program.outputs.items()},
        types={names[name]: each for name, each in program.types.items()},
    )


class Block(nn.Module):
    """A residual block (He et al. 2015, figure 5)."""

    def __init__(self, spec: ResNetSpec, channels: int, width: int, stride: int) -> None:
        super().__init__()
        inner = width // 4 if spec.block == "bottleneck" else width
        sizes = [(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, width, 1, 1)]
        if spec.block == "basic":
            sizes = [(channels, width, 3, stride), (width, width, 3, 1)]
        self.layers = nn.ModuleList(normed(*size) for size in sizes)
        plain = stride == 1 and channels == width
        self.shortcut = nn.Identity() if plain else normed(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = layer(y).relu()
        return (self.layers[-1](y) + self.shortcut(x)).relu()


def normed(channels: int, width: int, kernel: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width))


def torch_resnet(spec: ResNetSpec, pool: nn.Module) -> nn.Module:
    stem = [normed(3, spec.stem_width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks, channels = [], spec.stem_width
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for j in range(depth):
            blocks.append(Block(spec, channels, width, 1 if j else spec.stage_stride(i)))
            channels = width
    return nn.Sequential(*stem, *blocks, pool, nn.Linear(channels, spec.classes))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


STAGES = CVTS["cvt-13"].stages
CVT = replace(CVTS["cvt-13"], stages=(*STAGES[:2], replace(STAGES[2], depth=3)))  # of 10 blocks


class Logits(nn.Module):
    """A model of transformers that gives its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def torch_cvt() -> nn.Module:
    config = transformers.CvtConfig(num_labels=1000, depth=[stage.depth for stage in CVT.stages])
    return Logits(transformers.CvtForImageClassification(config))


def pooled() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


Write = Callable[[Any, Net, Value], None]
NETWORKS: dict[str, tuple[Write, Any, Callable[[], nn.Module]]] = {
    "resnet50": (
        resnet, RESNETS["resnet50"], lambda: torch_resnet(RESNETS["resnet50"], pooled())
    ),
    "resnet18, pooled by a mean": (
        resnet, RESNETS["resnet18"], lambda: torch_resnet(RESNETS["resnet18"], Mean())
    ),
    "cvt-6": (cvt, CVT, torch_cvt),
}  # fmt: skip


@functools.cache
def pair(name: str) -> tuple[Program, Program]:
    """Gives a network as we write it, and as torch exports it."""
    write, spec, module = NETWORKS[name]
    net = Net(name)
    write(spec, net, net.input("x", (BATCH, 3, 224, 224)))
    found = trace(module().eval(), (torch.zeros(2, 3, 224, 224),), names=["x"])
    assert found.program is not None, found.missing
    return net.program().keep(["logits"]), found.program


@pytest.mark.parametrize("pixels", [False, True], ids=["normalised", "pixels"])
@pytest.mark.parametrize(
    ("name", "on"),
    [
        pytest.param(name, on, id=f"{name}-{on.architecture or on.api}-{on.dtype}")
        for name in NETWORKS
        for on in BACKENDS
        # Where nothing fuses them, transformers convolves the keys before the queries.
        if (name, on.api) != ("cvt-6", "hip")
    ],
)
def test_the_programs_are_equal(name: str, on: Backend, pixels: bool) -> None:
    ours, theirs = (
        from_pixels(each, "uint8", on.dtype) if pixels else each.retyped({"x": on.dtype})
        for each in pair(name)
    )
    ours, theirs = passes.run(ours, on), passes.run(theirs, on)
    assert normal(ours).difference(normal(theirs)) == ""


def test_every_fusion_takes_part() -> None:
    found = set()
    for name in NETWORKS:
        program = from_pixels(pair(name)[1], "uint8", "bfloat16")
        found |= {node.op for node in passes.run(program, HOPPER).nodes}
    assert found >= {
        "stem_maxpool_conv2d", "stem_layernorm", "conv2d_shortcut", "conv2d_chain",
        "conv2d_shortcut_chain", "attention",
        "qkv_linear", "depthwise_qkv", "linear_moments", "normed_linear", "layernorm_mlp",
        "class_token", "layernorm_first",
    }  # fmt: skip
