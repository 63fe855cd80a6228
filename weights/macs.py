"""Counts the multiply-accumulates of a network from its spec."""

from __future__ import annotations

from graphs import cvt, resnet
from graphs.convolution import windows
from graphs.cvt import CvtSpec
from weights.formats import Spec


def macs(spec: Spec, size: int) -> int:
    """Counts the multiply-accumulates of one image of ``size`` px squared.

    Convolutions, linear layers and attention's two products count; norms, activations, pooling
    and softmax do not, as in torch's FlopCounterMode (which counts two FLOPs for each).
    """
    if isinstance(spec, CvtSpec):
        of_layers = cvt.convolutions(spec, (size, size))
        return sum(each.macs for each in of_layers) + _attention(spec, size)
    return sum(each.macs for each in resnet.convolutions(spec, (size, size)))


def _attention(spec: CvtSpec, size: int) -> int:
    total, image = 0, (size, size)
    for stage in spec.stages:
        image = h, w = windows(image, stage.patch, stage.stride, stage.padding)
        rows, columns = windows(image, stage.kernel_qkv, stage.stride_kv, stage.padding_kv)
        queries, keys = h * w + stage.cls_token, rows * columns + stage.cls_token
        total += stage.depth * 2 * queries * keys * stage.width
    return total
