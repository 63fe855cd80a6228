"""Names of ResNet's tensors in Hugging Face's, torchvision's, timm's and SparseML's checkpoints."""

from __future__ import annotations

from maxvision.weights.modules import COUNTERS, batchnorm, conv, linear
from maxvision.weights.rules import Rules

NORMALISED = r"stem|.*\.conv\d|.*\.shortcut"  # the convolutions that a batch norm follows


def _hugging_face() -> Rules:
    def layer(module: str, target: str) -> Rules:
        return [
            *conv(rf"{module}\.convolution", target),
            *batchnorm(rf"{module}\.normalization", target),
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
                *batchnorm(rf"{block}\.bn{i}", f"{target}.conv{i}"),
            )
        ] + [
            *conv(rf"{block}\.downsample\.0", f"{target}.shortcut"),
            *batchnorm(rf"{block}\.downsample\.1", f"{target}.shortcut"),
        ]

    return [
        *conv("conv1", "stem"),
        *batchnorm("bn1", "stem"),
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
        *batchnorm(r"input\.bn", "stem"),
        *[
            rule
            for i in (1, 2, 3)
            for rule in (
                *conv(rf"{block}\.conv{i}", f"{target}.conv{i}"),
                *batchnorm(rf"{block}\.bn{i}", f"{target}.conv{i}"),
            )
        ],
        *conv(rf"{block}\.identity\.conv", f"{target}.shortcut"),
        *batchnorm(rf"{block}\.identity\.bn", f"{target}.shortcut"),
        *linear(r"classifier\.fc", "head"),
        COUNTERS,
    ]


HUGGING_FACE = _hugging_face()
TORCHVISION = _torchvision()  # timm's plain ResNets have the same names
SPARSEML = _sparseml()  # of its own ResNets v1; masks are in the weights already
