"""What a spec describes, whichever family it is of: its weights, its layers, its graph."""

from __future__ import annotations

from typing import TypeAlias

from max.graph import TensorValue

from maxvision.graphs import cvt, resnet
from maxvision.graphs.convolution import Convolution
from maxvision.graphs.cvt import CvtSpec
from maxvision.graphs.outputs import Outputs
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.resnet import ResNetSpec

Spec: TypeAlias = ResNetSpec | CvtSpec


def parameters(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Lists every weight of the network: its name and shape."""
    return cvt.parameters(spec) if isinstance(spec, CvtSpec) else resnet.parameters(spec)


def convolutions(spec: Spec, size: tuple[int, int]) -> list[Convolution]:
    """Lists the convolutions and linear layers of the network, on images of ``size`` px."""
    if isinstance(spec, CvtSpec):
        return cvt.convolutions(spec, size)
    return resnet.convolutions(spec, size)


def network(spec: Spec, x: TensorValue, weights: Parameters) -> Outputs:
    """Builds the network on pixels x[N, H, W, C]: uint8 levels, or normalised already."""
    return (
        cvt.cvt(spec, x, weights) if isinstance(spec, CvtSpec) else resnet.resnet(spec, x, weights)
    )
