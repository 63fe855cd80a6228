"""Tells the checkpoint formats apart, and reads a network's shape off its tensors.

A Hugging Face checkpoint has a config.json that decides. The others have only tensors:

- torchvision's, timm's and SparseML's ResNets: depths, widths, block and classes are counted; the
  stride is on the 3x3 ("v1.5"), as in all three.
- The original CvT: depths, widths and classes are counted; heads are 64 wide and the embeddings'
  strides and paddings are those of the paper's table 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxvision.common.errors import ModelError
from maxvision.graphs.cvt import CvtSpec, CvtStage
from maxvision.graphs.networks import Spec
from maxvision.graphs.resnet import ResNetSpec
from maxvision.weights import cvt, resnet
from maxvision.weights.layout import Array, Shape
from maxvision.weights.rules import Rules, key_for, rename

HEAD_WIDTH = 64  # of every CvT in the paper


@dataclass(frozen=True)
class Format:
    """Describes one way to store one family.

    Attributes:
        title: What a message calls it.
        family: ``"resnet"`` or ``"cvt"``.
        rules: Its name map.
        normalised: The convolutions that a batch norm follows, as a pattern.
        hugging_face: Whether a config.json must describe it.
    """

    title: str
    family: str
    rules: Rules
    normalised: str
    hugging_face: bool

    def key(self, weight: str) -> str:
        """Returns the checkpoint key of ``weight``."""
        return key_for(self.rules, weight)


HUGGING_FACE = {
    "resnet": Format("Hugging Face ResNet", "resnet", resnet.HUGGING_FACE, resnet.NORMALISED, True),
    "cvt": Format("Hugging Face CvT", "cvt", cvt.HUGGING_FACE, cvt.NORMALISED, True),
}
TORCHVISION = Format(
    "torchvision or timm ResNet", "resnet", resnet.TORCHVISION, resnet.NORMALISED, False
)
SPARSEML = Format("SparseML ResNet", "resnet", resnet.SPARSEML, resnet.NORMALISED, False)
ORIGINAL = Format("original CvT", "cvt", cvt.ORIGINAL, cvt.NORMALISED, False)
FORMATS = (*HUGGING_FACE.values(), TORCHVISION, SPARSEML, ORIGINAL)

# timm's ResNets that differ in numbers only. Others have another stem, pooling or activation, some
# of it invisible in the tensors (resnetaa50, resnetblur50).
TIMM = ("resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200")

_HARMLESS = {"num_classes", "in_chans", "drop_rate", "drop_path_rate", "drop_block_rate"}
_PLAIN = {"global_pool": "avg", "output_stride": 32}


def recognise(tensors: Mapping[str, Array], config: Mapping[str, Any] | None, where: str) -> Format:
    """Tells which format a checkpoint is in, by its config.json or else by its tensors' names.

    Raises:
        ModelError: If it is in none, or has no classifier.
    """
    found = _by_names(tensors, where) if config is None else _by_config(config, where)
    heads = [found.key("head.weight"), found.key("head.bias")]
    if not any(key in tensors for key in heads):
        raise ModelError(
            f"{where}: expected a classifier, {heads[0]!r}, but has none (a backbone without a"
            " head?); use a checkpoint for image classification"
        )
    return found


def _by_config(config: Mapping[str, Any], where: str) -> Format:
    family, architecture = config.get("model_type"), config.get("architecture")
    if isinstance(family, str) and family in HUGGING_FACE:
        return HUGGING_FACE[family]
    if family is None and architecture is not None:
        if architecture not in TIMM:
            raise ModelError(
                f"{where}: expected one of timm's plain ResNets ({', '.join(TIMM)}) but config.json"
                f" has the architecture {architecture!r}; use one of them"
            )
        given = config.get("model_args")
        arguments = given if isinstance(given, dict) else {}
        changed = sorted(
            key
            for key, value in {"global_pool": config.get("global_pool"), **arguments}.items()
            if key not in _HARMLESS and value not in (None, _PLAIN.get(key))
        )
        if changed:
            raise ModelError(
                f"{where}: expected timm's {architecture} as it is but config.json changes"
                f" {', '.join(changed)}; use a checkpoint without that"
            )
        return TORCHVISION
    raise ModelError(
        f"{where}: expected the model_type 'resnet' or 'cvt' in config.json but it has {family!r};"
        " ResNet and CvT are the two families that run here"
    )


def _by_names(tensors: Mapping[str, Array], where: str) -> Format:
    shares = [(len(rename(f.rules, tensors)), f) for f in FORMATS]
    matched, found = max(shares, key=lambda share: share[0])
    if not matched:
        names = ", ".join(repr(key) for key in list(tensors)[:3]) or "none at all"
        raise ModelError(
            f"{where}: expected a checkpoint in one of the formats"
            f" {', '.join(f.title for f in FORMATS)} but its tensors are {names}; ResNet and CvT"
            " are the two families that run here"
        )
    if found.hugging_face:
        raise ModelError(
            f"{where}: expected a config.json beside a {found.title} checkpoint but there is none;"
            " put the model's config.json into the same folder"
        )
    return found


def specify(
    found: Format, tensors: Mapping[str, Array], config: Mapping[str, Any] | None, where: str
) -> Spec:
    """Describes the network: from config.json in Hugging Face's formats, else from the tensors.

    What the tensors leave open takes the default of the family, for the rules to report on.

    Raises:
        ModelError: If config.json asks for what the graphs do not compute.
    """
    shapes = {weight: tensors[key].shape for key, weight in rename(found.rules, tensors).items()}
    shapes = {w: s for w, s in shapes.items() if len(s) == 4 or (s and not w.endswith(".filter"))}
    classes = _first(shapes, "head.weight" if "head.weight" in shapes else "head.bias")
    try:
        if not found.hugging_face:
            infer = _infer_resnet if found.family == "resnet" else _infer_cvt
            return infer(shapes, classes)
        spec = ResNetSpec if found.family == "resnet" else CvtSpec
        return spec.from_config(dict(config or {}), classes)
    except ValueError as error:
        raise ModelError(f"{where}: {error}; use another checkpoint") from None
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(
            f"{where}: expected the configuration of a {found.family} but config.json has a value"
            f" of another kind ({error}); repair config.json"
        ) from None


def _infer_resnet(shapes: Mapping[str, Shape], classes: int) -> ResNetSpec:
    bottleneck = "stages.0.0.conv3.filter" in shapes
    last = "conv3" if bottleneck else "conv2"
    depths = _depths(shapes)
    stem = shapes.get("stem.filter", (64, 3, 7, 7))
    return ResNetSpec(
        block="bottleneck" if bottleneck else "basic",
        depths=depths,
        widths=tuple(_first(shapes, f"stages.{i}.0.{last}.filter") for i in range(len(depths))),
        stem_width=stem[0],
        channels=stem[1],
        classes=classes,
    )


def _infer_cvt(shapes: Mapping[str, Shape], classes: int) -> CvtSpec:
    def stage(i: int, depth: int) -> CvtStage:
        width, _, patch, _ = _embedding(shapes, i)
        if width % HEAD_WIDTH:
            raise ValueError(
                f"cvt: stage {i} expects a multiple of {HEAD_WIDTH} channels, for heads of that"
                f" width, but has {width}"
            )
        kernel = shapes.get(f"stages.{i}.0.attention.query.conv.filter", (width, 1, 3, 3))[-1]
        return CvtStage(
            patch=patch,
            stride=2 if i else 4,
            padding=1 if i else 2,
            width=width,
            heads=width // HEAD_WIDTH,
            depth=depth,
            mlp_ratio=_first(shapes, f"stages.{i}.0.mlp.fc1.weight") / width,
            qkv_bias=f"stages.{i}.0.attention.query.bias" in shapes,
            cls_token=f"stages.{i}.cls_token" in shapes,
            kernel_qkv=kernel,
            padding_q=kernel // 2,
            padding_kv=kernel // 2,
        )

    stages = tuple(stage(i, depth) for i, depth in enumerate(_depths(shapes)))
    return CvtSpec(stages, channels=_embedding(shapes, 0)[1], classes=classes)


def _embedding(shapes: Mapping[str, Shape], stage: int) -> Shape:
    return shapes.get(f"stages.{stage}.embed.filter", (HEAD_WIDTH, 3, 3, 3))


def _depths(shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Counts the blocks of each stage."""
    blocks = {
        (int(match[1]), int(match[2]))
        for match in (re.match(r"stages\.(\d+)\.(\d+)\.", name) for name in shapes)
        if match
    }
    stages = len({stage for stage, _ in blocks})
    return tuple(len([block for stage, block in blocks if stage == i]) for i in range(stages))


def _first(shapes: Mapping[str, Shape], weight: str) -> int:
    """Returns the first dimension of what is stored for ``weight``, or 1 if it is missing."""
    return shapes.get(weight, (1,))[0]
