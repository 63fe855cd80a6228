"""Counts the multiply-accumulates of a network from its spec."""

from __future__ import annotations

from maxvision.graphs.convolution import windows
from maxvision.graphs.cvt import CvtSpec
from maxvision.graphs.networks import Spec, convolutions


def macs(spec: Spec, size: int) -> int:
    """Counts the multiply-accumulates of one image of ``size`` px squared.

    Convolutions, linear layers and attention's two products count; norms, activations, pooling
    and softmax do not, as in torch's FlopCounterMode (which counts two FLOPs for each).
    """
    of_layers = sum(each.macs for each in convolutions(spec, (size, size)))
    return of_layers + (_attention(spec, size) if isinstance(spec, CvtSpec) else 0)


def _attention(spec: CvtSpec, size: int) -> int:
    total, image = 0, (size, size)
    for stage in spec.stages:
        image = h, w = windows(image, stage.patch, stage.stride, stage.padding)
        rows, columns = windows(image, stage.kernel_qkv, stage.stride_kv, stage.padding_kv)
        queries, keys = h * w + stage.cls_token, rows * columns + stage.cls_token
        total += stage.depth * 2 * queries * keys * stage.width
    return total
