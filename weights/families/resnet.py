"""Names of ResNet's tensors in Hugging Face's, torchvision's, timm's and SparseML's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from maxvision.graphs.resnet import ResNetSpec, resnet
from maxvision.weights.family import Family, Format
from maxvision.weights.layout import Shape
from maxvision.weights.modules import COUNTERS, batchnorm, conv, depths, filters, first, linear
from maxvision.weights.rules import Rules


def _hugging_face() -> Rules:
    def layer(module: str, target: str) -> Rules:
        return [
            *conv(rf"{module}\.convolution", target),
            *batchnorm(rf"{module}\.normalization", f"{target}.batchnorm"),
        ]

    block, target = r"resnet\.encoder\.stages\.(\d+)\.layers\.(\d+)", r"stages.\1.\2"
    return [
        *layer(r"resnet\.embedder\.embedder", "stem"),
        *layer(rf"{block}\.layer\.0", f"{target}.conv1"),
        *layer(rf"{block}\.layer\.1", f"{target}.conv2"),
        *layer(rf"{block}\.layer\.2", f"{target}.conv3"),
        *layer(rf"{block}\.shortcut", f"{target}.shortcut"),
        *linear(r"classifier\.1", "head"),
        COUNTERS,
    ]


def _torchvision() -> Rules:
    def stage(number: int) -> Rules:
        block, target = rf"layer{number}\.(\d+)", rf"stages.{number - 1}.\1"
        return [
            rule
            for i in (1, 2, 3)
            for rule in (
                *conv(rf"{block}\.conv{i}", f"{target}.conv{i}"),
                *batchnorm(rf"{block}\.bn{i}", f"{target}.conv{i}.batchnorm"),
            )
        ] + [
            *conv(rf"{block}\.downsample\.0", f"{target}.shortcut"),
            *batchnorm(rf"{block}\.downsample\.1", f"{target}.shortcut.batchnorm"),
        ]

    return [
        *conv("conv1", "stem"),
        *batchnorm("bn1", "stem.batchnorm"),
        *stage(1),
        *stage(2),
        *stage(3),
        *stage(4),
        *linear("fc", "head"),
        COUNTERS,
    ]


def _sparseml() -> Rules:
    block, target = r"sections\.(\d+)\.(\d+)", r"stages.\1.\2"
    return [
        *conv(r"input\.conv", "stem"),
        *batchnorm(r"input\.bn", "stem.batchnorm"),
        *[
            rule
            for i in (1, 2, 3)
            for rule in (
                *conv(rf"{block}\.conv{i}", f"{target}.conv{i}"),
                *batchnorm(rf"{block}\.bn{i}", f"{target}.conv{i}.batchnorm"),
            )
        ],
        *conv(rf"{block}\.identity\.conv", f"{target}.shortcut"),
        *batchnorm(rf"{block}\.identity\.bn", f"{target}.shortcut.batchnorm"),
        *linear(r"classifier\.fc", "head"),
        COUNTERS,
    ]


def _infer(shapes: Mapping[str, Shape], classes: int) -> ResNetSpec:
    """Counts blocks and widths; the stride is on the 3x3 ("v1.5") wherever no config says it."""
    bottleneck = "stages.0.0.conv3.weight" in shapes
    last = "conv3" if bottleneck else "conv2"
    blocks = depths(shapes)
    stem = filters(shapes, "stem.weight", (64, 3, 7, 7))
    return ResNetSpec(
        block="bottleneck" if bottleneck else "basic",
        depths=blocks,
        widths=tuple(first(shapes, f"stages.{i}.0.{last}.weight") for i in range(len(blocks))),
        stem_width=stem[0],
        channels=stem[1],
        classes=classes,
    )


# timm's ResNets that differ in numbers only. Others have another stem, pooling or activation, some
# of it invisible in the tensors (resnetaa50, resnetblur50).
TIMM = ("resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200")

FAMILY = Family(
    name="resnet",
    read=ResNetSpec.from_config,
    write=resnet,
    formats=(
        Format("Hugging Face ResNet", _hugging_face()),
        Format("torchvision or timm ResNet", _torchvision(), _infer, "bilinear", TIMM),
        # SparseML's own ResNets v1; masks are in the weights already.
        Format("SparseML ResNet", _sparseml(), _infer, "bilinear"),
    ),
    architectures=("ResNetForImageClassification",),
    dense=("stem", "head"),
    first_stage=1,  # behind that of the stem
)
