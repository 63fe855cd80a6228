"""A plain ConvNet, as another package adds it to maxvision: the project itself does not know it.

Each layer is a convolution with a bias, its batch norm, relu and a max pool that halves the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxvision.graphs.net import Net, Value
from maxvision.weights.family import Family, Format
from maxvision.weights.modules import COUNTERS, batchnorm, conv, filters, linear


@dataclass(frozen=True)
class ConvNetSpec:
    """Describes a ConvNet: the channels behind each layer, those of the image, the classes."""

    widths: tuple[int, ...] = (16, 32)
    channels: int = 3
    classes: int = 10

    def to_config(self) -> dict[str, Any]:
        """Describes it as config.json does."""
        return {"widths": list(self.widths)}


def read(config: dict[str, Any], classes: int) -> ConvNetSpec:
    """Reads config.json."""
    return ConvNetSpec(tuple(config["widths"]), config.get("num_channels", 3), classes)


def infer(shapes: Mapping[str, tuple[int, ...]], classes: int) -> ConvNetSpec:
    """Reads the widths off the filters."""
    count = sum(name.endswith(".batchnorm.var") for name in shapes)
    layers = [filters(shapes, f"convs.{i}.weight", (1, 1, 3, 3)) for i in range(count)]
    return ConvNetSpec(tuple(layer[0] for layer in layers), layers[0][1], classes)


def write(spec: ConvNetSpec, net: Net, x: Value) -> None:
    """Writes the network down on images x[N, C, H, W]."""
    for i, width in enumerate(spec.widths):
        x = net.conv2d(x, f"convs.{i}", width, 3, padding=1)
        x = net.relu(net.batch_norm(x, f"convs.{i}.batchnorm"))
        x = net.max_pool2d(x, 2, stride=2)
        net.output(f"stages.{i}", x)
    x = net.flatten(net.avg_pool2d(x))
    net.output("features", x)
    net.output("logits", net.linear(x, "head", spec.classes))


RULES = [
    *conv(r"convs\.(\d+)", r"convs.\1", bias=True),
    *batchnorm(r"norms\.(\d+)", r"convs.\1.batchnorm"),
    *linear("fc", "head"),
    COUNTERS,
]

FAMILY = Family(
    name="convnet",
    read=read,
    write=write,
    formats=(Format("ConvNet", RULES), Format("bare ConvNet", RULES, infer)),
    dense=("convs.0", "head"),
)
