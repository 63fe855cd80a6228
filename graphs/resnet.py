"""ResNet (He et al. 2015, arXiv:1512.03385) as a graph of maxvision ops.

Activations are NHWC. Batch normalisation is folded into the filters at weight import
(weights/layout.py), so every convolution here is filter, bias and an epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from max.graph import TensorValue

from maxvision.graphs.arrange import CHAINS
from maxvision.graphs.convolution import Convolution, windows
from maxvision.graphs.nodes import (
    avgpool,
    conv2d,
    conv2d_chain,
    conv2d_shortcut,
    linear,
    stem_maxpool,
)
from maxvision.graphs.outputs import Outputs
from maxvision.graphs.parameters import Parameters

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ResNetSpec:
    """Describes a ResNet the way table 1 of the paper does.

    Attributes:
        block: ``"basic"`` (two 3x3) or ``"bottleneck"`` (1x1, 3x3, 1x1; the middle has a quarter
            of the channels).
        depths: Blocks in each stage.
        widths: Output channels of each stage.
        stem_width: Output channels of the 7x7 stem.
        channels: Channels of the input image.
        stride_on_1x1: Put a bottleneck's stride on its first 1x1 (the paper, "v1") and not on
            its 3x3 (torchvision, "v1.5").
        downsample_first_stage: Give the first stage a stride of 2 as well.
        classes: Number of logits.
    """

    block: str = "bottleneck"
    depths: Shape = (3, 4, 6, 3)
    widths: Shape = (256, 512, 1024, 2048)
    stem_width: int = 64
    channels: int = 3
    stride_on_1x1: bool = False
    downsample_first_stage: bool = False
    classes: int = 1000

    def __post_init__(self) -> None:
        if self.block not in ("basic", "bottleneck"):
            raise ValueError(f"resnet: block expects 'basic' or 'bottleneck' but is {self.block!r}")
        if len(self.depths) != len(self.widths) or not self.depths:
            raise ValueError(
                f"resnet: depths {self.depths} and widths {self.widths} expect one entry a stage"
            )
        if min(self.depths + self.widths) < 1:
            raise ValueError(
                f"resnet: depths {self.depths} and widths {self.widths} expect numbers above 0"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any], classes: int) -> ResNetSpec:
        """Reads a Hugging Face ``ResNetConfig`` dictionary (missing keys take its defaults).

        Raises:
            ValueError: If the configuration asks for what this graph does not compute.
        """
        activation = config.get("hidden_act", "relu")
        if activation != "relu":
            raise ValueError(f"resnet: hidden_act expects 'relu' but is {activation!r}")
        return cls(
            block=config.get("layer_type", "bottleneck"),
            depths=tuple(config.get("depths", (3, 4, 6, 3))),
            widths=tuple(config.get("hidden_sizes", (256, 512, 1024, 2048))),
            stem_width=config.get("embedding_size", 64),
            channels=config.get("num_channels", 3),
            stride_on_1x1=config.get("downsample_in_bottleneck", False),
            downsample_first_stage=config.get("downsample_in_first_stage", False),
            classes=classes,
        )

    def stage_stride(self, stage: int) -> int:
        """Returns the stride of the first block of ``stage`` (0-based)."""
        return 2 if stage or self.downsample_first_stage else 1


RESNETS = {  # He et al. 2015, table 1; stride on the 3x3 (v1.5)
    "resnet18": ResNetSpec("basic", (2, 2, 2, 2), (64, 128, 256, 512)),
    "resnet34": ResNetSpec("basic", (3, 4, 6, 3), (64, 128, 256, 512)),
    "resnet50": ResNetSpec("bottleneck", (3, 4, 6, 3)),
    "resnet101": ResNetSpec("bottleneck", (3, 4, 23, 3)),
    "resnet152": ResNetSpec("bottleneck", (3, 8, 36, 3)),
}


def parameters(spec: ResNetSpec) -> dict[str, Shape]:
    """Lists every weight of the network: its name and shape.

    Filters are ``[R, S, C, F]``, linear weights ``[in, out]``, biases ``[F]``.
    """
    shapes: dict[str, Shape] = {}

    def conv(name: str, kernel: int, c: int, f: int) -> None:
        shapes[f"{name}.filter"] = (kernel, kernel, c, f)
        shapes[f"{name}.bias"] = (f,)

    conv("stem", 7, spec.channels, spec.stem_width)
    c = spec.stem_width
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for j in range(depth):
            name, stride = f"stages.{i}.{j}", spec.stage_stride(i) if j == 0 else 1
            if spec.block == "basic":
                conv(f"{name}.conv1", 3, c, width)
                conv(f"{name}.conv2", 3, width, width)
            else:
                inner = width // 4
                conv(f"{name}.conv1", 1, c, inner)
                conv(f"{name}.conv2", 3, inner, inner)
                conv(f"{name}.conv3", 1, inner, width)
            if stride != 1 or c != width:
                conv(f"{name}.shortcut", 1, c, width)
            c = width
    shapes["head.weight"] = (c, spec.classes)
    shapes["head.bias"] = (spec.classes,)
    return shapes


def convolutions(spec: ResNetSpec, size: tuple[int, int]) -> list[Convolution]:
    """Lists every convolution and linear layer, on images of ``size`` px, in the graph's order."""
    found: list[Convolution] = []

    def conv(
        name: str, kernel: int, stride: int, c: int, f: int, size: tuple[int, int], joins: str = ""
    ) -> tuple[int, int]:
        size = windows(size, kernel, stride, kernel // 2)
        found.append(Convolution(name, kernel, stride, c, f, size, partner=joins))
        return size

    def chain(inner: int) -> None:
        """Ties a block's last convolution and the next one's first where one op has both."""
        last, following = found[-2:]
        if not last.partner and (last.channels, inner) in CHAINS:
            found[-2:] = replace(last, chain=following.name), replace(following, chain=last.name)

    size = windows(conv("stem", 7, 2, spec.channels, spec.stem_width, size), 3, 2, 1)
    c = spec.stem_width
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for j in range(depth):
            name, stride = f"stages.{i}.{j}", spec.stage_stride(i) if j == 0 else 1
            before = size
            projected = stride != 1 or c != width
            shortcut = f"{name}.shortcut" if projected else ""
            if spec.block == "basic":
                size = conv(f"{name}.conv1", 3, stride, c, width, size)
                last = f"{name}.conv2"
                conv(last, 3, 1, width, width, size, shortcut)
            else:
                inner = width // 4
                first, second = (stride, 1) if spec.stride_on_1x1 else (1, stride)
                size = conv(f"{name}.conv1", 1, first, c, inner, size)
                if first == 1 and (i, j) != (0, 0):
                    chain(inner)
                size = conv(f"{name}.conv2", 3, second, inner, inner, size)
                last = f"{name}.conv3"
                conv(last, 1, 1, inner, width, size, shortcut)
            if projected:
                conv(shortcut, 1, stride, c, width, before, last)
            c = width
    found.append(Convolution("head", 1, 1, c, spec.classes, (1, 1)))
    return found


def resnet(spec: ResNetSpec, x: TensorValue, w: Parameters) -> Outputs:
    """Builds the network on pixels x[N, H, W, C]: uint8 levels, or normalised already."""
    x = stem_maxpool(x, w.stem("stem", 2), w.levels(x), stride=2, padding=3)  # 112, 56 squared
    stages: list[TensorValue] = []
    begun = None  # the block's first convolution, if the block before has computed it
    for i, depth in enumerate(spec.depths):  # 56, 28, 14, 7 squared
        for j in range(depth):
            at, stride = w.at(f"stages.{i}.{j}"), spec.stage_stride(i) if j == 0 else 1
            if spec.block == "basic":
                x = basic(x, at, stride)
            else:
                x, begun = bottleneck(spec, x, at, stride, begun, following(spec, w, i, j))
        stages.append(x)
    features = avgpool(x).reshape((x.shape[0], x.shape[3]))
    return Outputs(linear(features, w.filter("head")), features, stages)


def basic(x: TensorValue, w: Parameters, stride: int) -> TensorValue:
    """Adds a block of two 3x3 convolutions (figure 5, left)."""
    y = conv2d(x, w.filter("conv1"), stride=stride, padding=1, epilogue="relu")
    return join(x, y, w, "conv2", stride, padding=1)


def bottleneck(
    spec: ResNetSpec,
    x: TensorValue,
    w: Parameters,
    stride: int,
    begun: TensorValue | None,
    following: Parameters | None,
) -> tuple[TensorValue, TensorValue | None]:
    """Adds a block of 1x1, 3x3 and 1x1 (figure 5, right), and begins the following one."""
    first, second = (stride, 1) if spec.stride_on_1x1 else (1, stride)
    y = conv2d(x, w.filter("conv1"), stride=first, epilogue="relu") if begun is None else begun
    y = conv2d(y, w.filter("conv2"), stride=second, padding=1, epilogue="relu")
    if following is None or w.has("shortcut.filter"):
        return join(x, y, w, "conv3", stride), None
    return conv2d_chain(y, w.filter("conv3"), x, following.filter("conv1"))


def following(spec: ResNetSpec, w: Parameters, stage: int, block: int) -> Parameters | None:
    """Finds the weights of the block after this one, if its first 1x1 has no stride."""
    if block + 1 < spec.depths[stage]:
        return w.at(f"stages.{stage}.{block + 1}")
    if stage + 1 < len(spec.depths) and not spec.stride_on_1x1:
        return w.at(f"stages.{stage + 1}.0")
    return None


def join(
    x: TensorValue, y: TensorValue, w: Parameters, last: str, stride: int, padding: int = 0
) -> TensorValue:
    """Adds x to the last convolution of y, projected where the block changes its shape."""
    if w.has("shortcut.filter"):  # option B of section 3.3
        shortcut = w.filter("shortcut")
        return conv2d_shortcut(y, w.filter(last), x, shortcut, padding=padding, stride=stride)
    return conv2d(y, w.filter(last), padding=padding, epilogue="add_relu", residual=x)
