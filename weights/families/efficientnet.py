"""Names of EfficientNet-Lite's tensors in EfficientNet-PyTorch's checkpoints, and in our own.

EfficientNet-PyTorch (github.com/lukemelas) and its Lite forks store the weights that Google
published: batch norms add 1e-3 to the variance, convolutions are padded as in TensorFlow, and
pixels are (level - 127) / 128.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

from maxvision.graphs.efficientnet import (
    BASE,
    EFFICIENTNETS,
    EfficientNetSpec,
    Stage,
    efficientnet,
)
from maxvision.weights.family import Family, Format, Pictures
from maxvision.weights.layout import Shape
from maxvision.weights.modules import COUNTERS, batchnorm, conv, filters, first, linear
from maxvision.weights.rules import Rules


def _hugging_face() -> Rules:
    """As transformers' EfficientNet, which has no Lite variants; ``convert`` writes it."""
    encoder, target = r"efficientnet\.encoder", r"blocks.\1"
    block = rf"{encoder}\.blocks\.(\d+)"

    def layer(module: str, norm: str, target: str) -> Rules:
        return [*conv(module, target), *batchnorm(norm, f"{target}.batchnorm")]

    return [
        *layer(
            r"efficientnet\.embeddings\.convolution", r"efficientnet\.embeddings\.batchnorm", "stem"
        ),
        *layer(
            rf"{block}\.expansion\.expand_conv",
            rf"{block}\.expansion\.expand_bn",
            f"{target}.expand",
        ),
        *layer(
            rf"{block}\.depthwise_conv\.depthwise_conv",
            rf"{block}\.depthwise_conv\.depthwise_norm",
            f"{target}.depthwise",
        ),
        *layer(
            rf"{block}\.projection\.project_conv",
            rf"{block}\.projection\.project_bn",
            f"{target}.project",
        ),
        *layer(rf"{encoder}\.top_conv", rf"{encoder}\.top_bn", "top"),
        *linear("classifier", "head"),
        COUNTERS,
    ]


def _pytorch() -> Rules:
    block, target = r"_blocks\.(\d+)", r"blocks.\1"

    def layer(module: str, norm: str, target: str) -> Rules:
        return [*conv(module, target), *batchnorm(norm, f"{target}.batchnorm")]

    return [
        *layer("_conv_stem", "_bn0", "stem"),
        *layer(rf"{block}\._expand_conv", rf"{block}\._bn0", f"{target}.expand"),
        *layer(rf"{block}\._depthwise_conv", rf"{block}\._bn1", f"{target}.depthwise"),
        *layer(rf"{block}\._project_conv", rf"{block}\._bn2", f"{target}.project"),
        *layer("_conv_head", "_bn1", "top"),
        *linear("_fc", "head"),
        COUNTERS,
    ]


def _infer(shapes: Mapping[str, Shape], classes: int) -> EfficientNetSpec:
    """Reads the blocks' windows and widths; strides are the table's, which no shape tells."""
    stem = filters(shapes, "stem.weight", (32, 3, 3, 3))
    count = 1 + max(
        (int(m[1]) for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))), default=-1
    )
    blocks, before = [], stem[0]
    for i in range(count):
        wide, _, kernel, _ = filters(shapes, f"blocks.{i}.depthwise.weight", (before, 1, 3, 3))
        width = first(shapes, f"blocks.{i}.project.weight")
        blocks.append((width, kernel, wide // max(before, 1)))
        before = width
    # A stage is a run of blocks of one width.
    runs = [list(run) for _, run in groupby(blocks, key=lambda each: each[0])]
    if len(runs) != len(BASE):
        raise ValueError(
            f"efficientnet: the blocks must form {len(BASE)} stages of one width each, but form"
            f" {len(runs)}"
        )
    stages = tuple(
        Stage(run[0][1], row.stride, run[0][2], run[0][0], len(run))
        for row, run in zip(BASE, runs, strict=True)
    )
    sizes = (known.size for known in EFFICIENTNETS.values() if known.stages == stages)
    return EfficientNetSpec(
        stages,
        stem_width=stem[0],
        features=first(shapes, "top.weight"),
        size=next(sizes, 224),
        channels=stem[1],
        classes=classes,
    )


def _unlike(shapes: Mapping[str, Shape]) -> str | None:
    """Tells an EfficientNet that is no Lite variant by its squeeze-and-excitation."""
    key = next(
        (key for key in shapes if re.search(r"\._se_reduce\.|\.squeeze_excite\.", key)), None
    )
    if key is None:
        return None
    return f"this is an EfficientNet whose squeeze-and-excitation ({key!r}) cannot run"


def _pictures(spec: EfficientNetSpec) -> Pictures:
    """Prepares pictures as Google's code does: 32 px more than are cut out, levels - 127 by 128."""
    return Pictures(
        spec.size, spec.size + 32, "bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3
    )


FAMILY = Family(
    name="efficientnet",
    read=EfficientNetSpec.from_config,
    write=efficientnet,
    formats=(
        Format("Hugging Face EfficientNet", _hugging_face(), pictures=_pictures, unlike=_unlike),
        Format(
            "EfficientNet-PyTorch's EfficientNet-Lite",
            _pytorch(),
            _infer,
            pictures=_pictures,
            unlike=_unlike,
        ),
    ),
    dense=("stem", "head"),
)
