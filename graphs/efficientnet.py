"""EfficientNet-Lite (Tan and Le 2019, arXiv:1905.11946; tensorflow/tpu, efficientnet/lite).

The Lite variants have ReLU6 in place of swish and no squeeze-and-excitation; the stem, the last
1x1 and the depth of the first and last stage do not grow with the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from maxvision.graphs.net import Net, Value
from maxvision.graphs.shapes import same_padding


@dataclass(frozen=True)
class Stage:
    """Describes a stage the way table 1 of the paper does.

    Attributes:
        kernel: Window of the depthwise convolutions.
        stride: Of the first block's.
        expansion: How many times as many channels a block has in its middle.
        width: Output channels.
        depth: Blocks.
    """

    kernel: int
    stride: int
    expansion: int
    width: int
    depth: int


BASE = (  # Tan and Le 2019, table 1
    Stage(3, 1, 1, 16, 1),
    Stage(3, 2, 6, 24, 2),
    Stage(5, 2, 6, 40, 2),
    Stage(3, 2, 6, 80, 3),
    Stage(5, 1, 6, 112, 3),
    Stage(5, 2, 6, 192, 4),
    Stage(3, 1, 6, 320, 1),
)


@dataclass(frozen=True)
class EfficientNetSpec:
    """Describes an EfficientNet-Lite.

    Attributes:
        stages: Its stages.
        stem_width: Output channels of the 3x3 stem.
        features: Output channels of the 1x1 behind the stages.
        size: Side of the images that it was trained for, px.
        channels: Channels of the input image.
        classes: Number of logits.
        eps: Added to the variance by the batch norms.
    """

    stages: tuple[Stage, ...] = BASE
    stem_width: int = 32
    features: int = 1280
    size: int = 224
    channels: int = 3
    classes: int = 1000
    eps: float = 1e-3

    @classmethod
    def scaled(cls, width: float, depth: float, size: int) -> EfficientNetSpec:
        """Makes the table's network ``width`` times as wide and ``depth`` times as deep."""
        last = len(BASE) - 1
        stages = tuple(
            Stage(
                stage.kernel,
                stage.stride,
                stage.expansion,
                _eights(width * stage.width),
                stage.depth if i in (0, last) else math.ceil(depth * stage.depth),
            )
            for i, stage in enumerate(BASE)
        )
        return cls(stages, size=size)

    @classmethod
    def from_config(cls, config: dict[str, Any], classes: int) -> EfficientNetSpec:
        """Reads a Hugging Face ``EfficientNetConfig`` dictionary of a Lite variant.

        Raises:
            ValueError: If the configuration asks for what this graph does not compute.
        """
        squeeze, activation = config.get("squeeze_expansion_ratio"), config.get("hidden_act")
        if squeeze != 0 or activation != "relu6":
            raise ValueError(
                "efficientnet: only Lite variants run, with squeeze_expansion_ratio 0 and"
                f" hidden_act 'relu6', but here they are {squeeze} and {activation!r}"
            )
        scales = [config.get(f"{name}_coefficient", 1) for name in ("width", "depth")]
        if scales != [1, 1]:
            raise ValueError(
                "efficientnet: out_channels and num_block_repeats must be the network's own, with"
                f" coefficients of 1, but these are {scales[0]} and {scales[1]}"
            )
        names = ("kernel_sizes", "strides", "expand_ratios", "out_channels", "num_block_repeats")
        rows = zip(*(config[name] for name in names), strict=True)
        return cls(
            tuple(Stage(*row) for row in rows),
            stem_width=config.get("stem_channels", 32),
            features=config["hidden_dim"],
            size=config["image_size"],
            channels=config.get("num_channels", 3),
            classes=classes,
            eps=config.get("batch_norm_eps", 1e-3),
        )

    def to_config(self) -> dict[str, Any]:
        """Describes it as an ``EfficientNetConfig`` does, with its own widths and depths."""
        return {
            "kernel_sizes": [stage.kernel for stage in self.stages],
            "strides": [stage.stride for stage in self.stages],
            "expand_ratios": [stage.expansion for stage in self.stages],
            "out_channels": [stage.width for stage in self.stages],
            "num_block_repeats": [stage.depth for stage in self.stages],
            "width_coefficient": 1,
            "depth_coefficient": 1,
            "stem_channels": self.stem_width,
            "hidden_dim": self.features,
            "image_size": self.size,
            "hidden_act": "relu6",
            "squeeze_expansion_ratio": 0,
            "batch_norm_eps": self.eps,
        }


def _eights(width: float) -> int:
    """Rounds channels to a multiple of 8, by no more than a tenth down."""
    near = max(8, int(width + 4) // 8 * 8)
    return near if near >= 0.9 * width else near + 8


EFFICIENTNETS = {  # widths, depths and sizes of github.com/tensorflow/tpu, efficientnet/lite
    "efficientnet-lite0": EfficientNetSpec.scaled(1.0, 1.0, 224),
    "efficientnet-lite1": EfficientNetSpec.scaled(1.0, 1.1, 240),
    "efficientnet-lite2": EfficientNetSpec.scaled(1.1, 1.2, 260),
    "efficientnet-lite3": EfficientNetSpec.scaled(1.2, 1.4, 280),
    "efficientnet-lite4": EfficientNetSpec.scaled(1.4, 1.8, 300),
}


def efficientnet(spec: EfficientNetSpec, net: Net, x: Value) -> None:
    """Writes the network down on images x[N, C, H, W]; sizes are those of 224 px."""
    x = net.relu6(conv(spec, net, x, "stem", spec.stem_width, 3, stride=2))  # 112 px squared
    number = 0
    for i, stage in enumerate(spec.stages):  # 112, 56, 28, 14, 14, 7, 7
        for j in range(stage.depth):
            with net.at(f"blocks.{number}"):
                x = block(spec, net, x, stage, stage.stride if j == 0 else 1)
            number += 1
        net.output(f"stages.{i}", x)
    x = net.relu6(conv(spec, net, x, "top", spec.features, 1))
    x = net.flatten(net.avg_pool2d(x))
    net.output("features", x)
    net.output("logits", net.linear(x, "head", spec.classes))


def block(spec: EfficientNetSpec, net: Net, x: Value, stage: Stage, stride: int) -> Value:
    """Adds an inverted residual block: 1x1 wider, depthwise, 1x1 narrower (MBConv)."""
    y, wide = x, stage.expansion * x.size(1)
    if stage.expansion > 1:
        y = net.relu6(conv(spec, net, y, "expand", wide, 1))
    y = net.relu6(conv(spec, net, y, "depthwise", wide, stage.kernel, stride, groups=wide))
    y = conv(spec, net, y, "project", stage.width, 1)
    return x + y if y.shape == x.shape and stride == 1 else y


def conv(
    spec: EfficientNetSpec,
    net: Net,
    x: Value,
    layer: str,
    width: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
) -> Value:
    """Adds a convolution padded as in TensorFlow ("SAME"), and its batch norm."""
    padding = same_padding((x.size(2), x.size(3)), kernel, stride)
    x = net.conv2d(
        x, layer, width, kernel, stride=stride, padding=padding, groups=groups, bias=False
    )
    return net.batch_norm(x, f"{layer}.batchnorm", spec.eps)
