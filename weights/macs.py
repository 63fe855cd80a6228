"""Counts the multiply-accumulates of a network from its spec."""

from __future__ import annotations

from graphs.cvt import CvtSpec
from graphs.resnet import ResNetSpec
from weights.formats import Spec


def macs(spec: Spec, size: int) -> int:
    """Counts the multiply-accumulates of one image of ``size`` px squared.

    Convolutions, linear layers and attention's two products count; norms, activations, pooling
    and softmax do not, as in torch's FlopCounterMode (which counts two FLOPs for each).
    """
    return _cvt(spec, size) if isinstance(spec, CvtSpec) else _resnet(spec, size)


def _out(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def _resnet(spec: ResNetSpec, size: int) -> int:
    size = _out(size, 7, 2, 3)
    total = size**2 * 49 * spec.channels * spec.stem_width
    size = _out(size, 3, 2, 1)  # max pool
    c = spec.stem_width
    for i, (depth, width) in enumerate(zip(spec.depths, spec.widths, strict=True)):
        for j in range(depth):
            stride = spec.stage_stride(i) if j == 0 else 1
            before, size = size, _out(size, 3, stride, 1)
            if spec.block == "basic":
                total += size**2 * 9 * (c + width) * width
            else:
                inner, first = width // 4, size if spec.stride_on_1x1 else before
                total += first**2 * c * inner + size**2 * (9 * inner + width) * inner
            if stride != 1 or c != width:
                total += size**2 * c * width
            c = width
    return total + c * spec.classes


def _cvt(spec: CvtSpec, size: int) -> int:
    total, c = 0, spec.channels
    for stage in spec.stages:
        f, taps = stage.width, stage.kernel_qkv**2
        size = _out(size, stage.patch, stage.stride, stage.padding)
        total += size**2 * stage.patch**2 * c * f
        reduced = _out(size, stage.kernel_qkv, stage.stride_kv, stage.padding_kv)
        queries, keys = size**2 + stage.cls_token, reduced**2 + stage.cls_token
        projections = taps * f * (size**2 + 2 * reduced**2) + f * f * (queries + 2 * keys)
        attention = 2 * queries * keys * f
        dense = queries * f * (f + 2 * stage.hidden)  # the output's and the MLP's
        total += stage.depth * (projections + attention + dense)
        c = f
    return total + c * spec.classes
