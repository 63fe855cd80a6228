"""Names of ResNet's tensors in Hugging Face's, torchvision's, timm's and SparseML's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from maxvision.graphs.resnet import ResNetSpec, resnet
from maxvision.weights.family import Family, Format, Pictures
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


# Relatives, by a key that only they have: name, what they compute besides, key.
_RELATIVES = (
    ("a ResNet-D", "average pooling in shortcuts", r"layer\d+\.\d+\.downsample\.1\.weight"),
    ("a ResNet-C", "stem of several convolutions", r"conv1\.0\.weight"),
    ("an SE-ResNet", "squeeze-and-excitation", r"layer\d+\.\d+\.(se|se_module)\.fc1\.weight"),
    ("an ECA-ResNet", "channel attention", r"layer\d+\.\d+\.(se|eca)\.conv\.weight"),
    ("a ResNeSt", "split attention", r"layer\d+\.\d+\.conv2\.fc1\.weight"),
    ("an SKNet", "selective kernels", r"layer\d+\.\d+\.conv\d\.paths\.0\.conv\.weight"),
    ("a Res2Net", "3x3 convolutions in steps", r"layer\d+\.\d+\.convs\.0\.weight"),
    ("an antialiased ResNet", "blur pooling", r"layer\d+\.\d+\..*\.filt"),
)


def _unlike(shapes: Mapping[str, Shape]) -> str | None:
    """Tells a ResNeXt, a ResNet-D, ... by the names and shapes of torchvision's and timm's."""
    found: list[tuple[str, str, str]] = []  # name, what it computes besides, key
    for name, what, pattern in _RELATIVES:
        keys = (key for key, shape in shapes.items() if len(shape) > 1)  # no batch norm's
        key = next((key for key in keys if re.fullmatch(pattern, key)), None)
        if key is not None:
            found.append((name, what, key))
    groups, widening = _groups(shapes), _widening(shapes)
    if groups > 1:
        found.append(
            ("a ResNeXt", f"grouped convolutions of {groups} groups", "layer1.0.conv2.weight")
        )
    elif widening > 1:
        what = f"3x3 convolutions {widening} times as wide as a ResNet's"
        found.append(("a Wide ResNet", what, "layer1.0.conv2.weight"))
    if "bn1.weight" in shapes and not any(key.endswith("running_mean") for key in shapes):
        found.append(("a ResNet without batch norms", "norms without running_mean", "bn1.weight"))
    if shapes.get("conv1.weight", ())[2:] == (3, 3):
        found.append(("a ResNet for small images", "stem of one 3x3", "conv1.weight"))
    if not found:
        return None
    names = [name for name, _, _ in found]
    if "a ResNet-D" in names and "a ResNet-C" in names:
        names.remove("a ResNet-C")  # D has C's stem
    *rest, last = [f"{what} ({key!r})" for _, what, key in found]
    listed = f"{', '.join(rest)} and {last}" if rest else last
    return f"this is {' and '.join(names)}, whose {listed} cannot run"


def _groups(shapes: Mapping[str, Shape]) -> int:
    """Counts the groups of the first block's 3x3: channels that come over channels it takes."""
    one, two = (shapes.get(f"layer1.0.conv{i}.weight", ()) for i in (1, 2))
    if len(one) != 4 or len(two) != 4 or one[0] != two[0] or not two[1] or one[0] % two[1]:
        return 1
    return one[0] // two[1]


def _widening(shapes: Mapping[str, Shape]) -> int:
    """Tells how many quarters of its output's channels a bottleneck has in its middle."""
    keys = [key for key in shapes if re.fullmatch(r"layer\d+\.\d+\.conv3\.weight", key)]
    shares = {
        4 * shapes[key][1] / shapes[key][0]
        for key in keys
        if len(shapes[key]) == 4 and shapes[key][0]
    }
    (share,) = shares if len(shares) == 1 else {1.0}
    return int(share) if share.is_integer() else 1


def _bilinear(_: ResNetSpec) -> Pictures:
    return Pictures(resample="bilinear")


# timm's ResNets that differ in numbers only. Others have another stem, pooling or activation, some
# of it invisible in the tensors (resnetaa50, resnetblur50).
TIMM = ("resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200")

FAMILY = Family(
    name="resnet",
    read=ResNetSpec.from_config,
    write=resnet,
    formats=(
        Format("Hugging Face ResNet", _hugging_face()),
        Format("torchvision or timm ResNet", _torchvision(), _infer, _bilinear, TIMM, _unlike),
        # SparseML's own ResNets v1; masks are in the weights already.
        Format("SparseML ResNet", _sparseml(), _infer, _bilinear),
    ),
    architectures=("ResNetForImageClassification",),
    dense=("stem", "head"),
    first_stage=1,  # behind that of the stem
)
