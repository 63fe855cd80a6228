"""ResNet (He et al. 2015, arXiv:1512.03385)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxvision.graphs.net import Net, Value

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
            raise ValueError(f"resnet: block must be 'basic' or 'bottleneck' but is {self.block!r}")
        if len(self.depths) != len(self.widths) or not self.depths:
            raise ValueError(
                f"resnet: depths {self.depths} and widths {self.widths} must have one entry a stage"
            )
        if min(self.depths + self.widths) < 1:
            raise ValueError(
                f"resnet: depths {self.depths} and widths {self.widths} must be numbers above 0"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any], classes: int) -> ResNetSpec:
        """Reads a Hugging Face ``ResNetConfig`` dictionary (missing keys take its defaults).

        Raises:
            ValueError: If the configuration asks for what this graph does not compute.
        """
        activation = config.get("hidden_act", "relu")
        if activation != "relu":
            raise ValueError(f"resnet: hidden_act must be 'relu' but is {activation!r}")
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

    def to_config(self) -> dict[str, Any]:
        """Describes it as a ``ResNetConfig`` does."""
        return {
            "layer_type": self.block,
            "depths": list(self.depths),
            "hidden_sizes": list(self.widths),
            "embedding_size": self.stem_width,
            "hidden_act": "relu",
            "downsample_in_bottleneck": self.stride_on_1x1,
            "downsample_in_first_stage": self.downsample_first_stage,
        }

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


def resnet(spec: ResNetSpec, net: Net, x: Value) -> None:
    """Writes the network down on images x[N, C, H, W]."""
    x = net.relu(conv(net, x, "stem", spec.stem_width, 7, stride=2))  # 112 px squared
    x = net.max_pool2d(x, 3, stride=2, padding=1)
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for j in range(depth):  # 56, 28, 14, 7
            with net.at(f"stages.{i}.{j}"):
                x = block(spec, net, x, width, spec.stage_stride(i) if j == 0 else 1)
        net.output(f"stages.{i}", x)
    x = net.flatten(net.avg_pool2d(x))
    net.output("features", x)
    net.output("logits", net.linear(x, "head", spec.classes))


def block(spec: ResNetSpec, net: Net, x: Value, width: int, stride: int) -> Value:
    """Adds a residual block: two 3x3, or 1x1, 3x3 and 1x1 (figure 5)."""
    if spec.block == "basic":
        y = net.relu(conv(net, x, "conv1", width, 3, stride=stride))
        y = conv(net, y, "conv2", width, 3)
    else:
        first, second = (stride, 1) if spec.stride_on_1x1 else (1, stride)
        y = net.relu(conv(net, x, "conv1", width // 4, 1, stride=first))
        y = net.relu(conv(net, y, "conv2", width // 4, 3, stride=second))
        y = conv(net, y, "conv3", width, 1)
    if stride != 1 or x.size(1) != width:  # option B of section 3.3
        x = conv(net, x, "shortcut", width, 1, stride=stride)
    return net.relu(y + x)


def conv(net: Net, x: Value, layer: str, width: int, kernel: int, stride: int = 1) -> Value:
    """Adds a convolution that keeps the size but for its stride, and its batch norm."""
    x = net.conv2d(x, layer, width, kernel, stride=stride, padding=kernel // 2, bias=False)
    return net.batch_norm(x, f"{layer}.batchnorm")
