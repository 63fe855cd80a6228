"""CvT (Wu et al. 2021, arXiv:2103.15808) as a graph of maxvision ops.

Activations are NHWC, so tokens ``[N, H*W, C]`` and feature maps ``[N, H, W, C]`` are the same
memory. The batch norm of the convolutional projections is folded at weight import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from max.graph import TensorValue

from maxvision.graphs.convolution import Convolution, windows
from maxvision.graphs.nodes import (
    attention,
    avgpool,
    class_token,
    conv2d,
    depthwise_qkv,
    layernorm,
    layernorm_first,
    layernorm_mlp,
    linear,
    qkv_linear,
    stem_layernorm,
)
from maxvision.graphs.outputs import Outputs
from maxvision.graphs.parameters import Parameters

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CvtStage:
    """Describes one stage the way table 2 of the paper does.

    Attributes:
        patch: Kernel of the convolutional token embedding, with its stride and padding.
        stride: See ``patch``.
        padding: See ``patch``.
        width: Channels of the tokens.
        heads: Attention heads.
        depth: Transformer blocks.
        mlp_ratio: Hidden width of the MLP over ``width``.
        qkv_bias: Whether the query, key and value projections have a bias.
        cls_token: Whether a class token joins the stage's tokens.
        kernel_qkv: Kernel of the depthwise convolutional projections.
        padding_q: Padding of the query's (its stride is 1).
        padding_kv: Padding of the key's and the value's.
        stride_kv: Stride of the key's and the value's.
    """

    patch: int
    stride: int
    padding: int
    width: int
    heads: int
    depth: int
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    cls_token: bool = False
    kernel_qkv: int = 3
    padding_q: int = 1
    padding_kv: int = 1
    stride_kv: int = 2

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return int(self.width * self.mlp_ratio)


@dataclass(frozen=True)
class CvtSpec:
    """Describes a CvT: its stages, the image's channels, the classes, layer norm's epsilons."""

    stages: tuple[CvtStage, ...]
    channels: int = 3
    classes: int = 1000
    eps: float = 1e-5  # torch's default; transformers ignores layer_norm_eps here, and so do we

    def __post_init__(self) -> None:
        for i, stage in enumerate(self.stages):
            where = f"cvt: stage {i}"
            if stage.width % stage.heads:
                raise ValueError(
                    f"{where} expects a width that its {stage.heads} heads divide"
                    f" but has {stage.width}"
                )
            if 2 * stage.padding_q != stage.kernel_qkv - 1:
                raise ValueError(
                    f"{where} expects a query projection that keeps the size, but kernel_qkv="
                    f"{stage.kernel_qkv} with padding_q={stage.padding_q} does not"
                )
            if stage.cls_token and stage.width != self.stages[-1].width:
                raise ValueError(
                    f"{where} has a class token of the last stage's width"
                    f" {self.stages[-1].width} but tokens of width {stage.width}"
                )

    @classmethod
    def from_config(cls, config: dict[str, Any], classes: int) -> CvtSpec:
        """Reads a Hugging Face ``CvtConfig`` dictionary (missing keys take its defaults).

        Raises:
            ValueError: If the configuration asks for what this graph does not compute.
        """
        keys = {  # ours -> the configuration's, with its default
            "patch": ("patch_sizes", (7, 3, 3)),
            "stride": ("patch_stride", (4, 2, 2)),
            "padding": ("patch_padding", (2, 1, 1)),
            "width": ("embed_dim", (64, 192, 384)),
            "heads": ("num_heads", (1, 3, 6)),
            "depth": ("depth", (1, 2, 10)),
            "mlp_ratio": ("mlp_ratio", (4.0, 4.0, 4.0)),
            "qkv_bias": ("qkv_bias", (True, True, True)),
            "cls_token": ("cls_token", (False, False, True)),
            "kernel_qkv": ("kernel_qkv", (3, 3, 3)),
            "padding_q": ("padding_q", (1, 1, 1)),
            "padding_kv": ("padding_kv", (1, 1, 1)),
            "stride_kv": ("stride_kv", (2, 2, 2)),
        }
        columns = {ours: config.get(key, default) for ours, (key, default) in keys.items()}
        count = len(columns["depth"])
        for ours, column in columns.items():
            if len(column) < count:
                raise ValueError(
                    f"cvt: {keys[ours][0]} expects an entry for each of {count} stages"
                    f" but has {len(column)}"
                )
        for key, value in (("qkv_projection_method", "dw_bn"), ("stride_q", 1)):
            others = [v for v in config.get(key, ())[:count] if v != value]
            if others:
                raise ValueError(f"cvt: {key} expects {value!r} in every stage but has {others}")
        return cls(
            stages=tuple(
                CvtStage(**{ours: column[i] for ours, column in columns.items()})
                for i in range(count)
            ),
            channels=config.get("num_channels", 3),
            classes=classes,
        )


def _cvt(widths: Shape, heads: Shape, depths: Shape) -> CvtSpec:
    """Builds one column of table 2: 7x7/4 then 3x3/2 embeddings, the class token last."""
    return CvtSpec(
        (
            CvtStage(7, 4, 2, widths[0], heads[0], depths[0]),
            CvtStage(3, 2, 1, widths[1], heads[1], depths[1]),
            CvtStage(3, 2, 1, widths[2], heads[2], depths[2], cls_token=True),
        )
    )


CVTS = {  # Wu et al. 2021, table 2
    "cvt-13": _cvt((64, 192, 384), (1, 3, 6), (1, 2, 10)),
    "cvt-21": _cvt((64, 192, 384), (1, 3, 6), (1, 4, 16)),
    "cvt-w24": _cvt((192, 768, 1024), (3, 12, 16), (2, 2, 20)),
}


def parameters(spec: CvtSpec) -> dict[str, Shape]:
    """Lists every weight of the network: its name and shape.

    Filters are ``[R, S, C, F]`` (depthwise ``[R, S, 1, F]``), linear weights ``[in, out]``,
    biases, layer norm's weights and the class token vectors.
    """
    shapes: dict[str, Shape] = {}

    def conv(name: str, kernel: int, c: int, f: int) -> None:
        shapes[f"{name}.filter"] = (kernel, kernel, c, f)
        shapes[f"{name}.bias"] = (f,)

    def linear(name: str, c: int, f: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (c, f)
        if bias:
            shapes[f"{name}.bias"] = (f,)

    def norm(name: str, c: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (c,)

    c = spec.channels
    for i, stage in enumerate(spec.stages):
        f = stage.width
        conv(f"stages.{i}.embed", stage.patch, c, f)
        norm(f"stages.{i}.embed.norm", f)
        if stage.cls_token:
            shapes[f"stages.{i}.cls_token"] = (f,)
        for j in range(stage.depth):
            name = f"stages.{i}.{j}"
            norm(f"{name}.norm1", f)
            for part in ("query", "key", "value"):
                conv(f"{name}.attention.{part}.conv", stage.kernel_qkv, 1, f)
                linear(f"{name}.attention.{part}", f, f, stage.qkv_bias)
            linear(f"{name}.attention.output", f, f)
            norm(f"{name}.norm2", f)
            linear(f"{name}.mlp.fc1", f, stage.hidden)
            linear(f"{name}.mlp.fc2", stage.hidden, f)
        c = f
    norm("norm", c)
    linear("head", c, spec.classes)
    return shapes


def convolutions(spec: CvtSpec, size: tuple[int, int]) -> list[Convolution]:
    """Lists every convolution and linear layer, on images of ``size`` px, in the graph's order."""
    found: list[Convolution] = []
    c = spec.channels
    for i, stage in enumerate(spec.stages):
        f, taps = stage.width, stage.kernel_qkv
        size = windows(size, stage.patch, stage.stride, stage.padding)
        found.append(Convolution(f"stages.{i}.embed", stage.patch, stage.stride, c, f, size))
        reduced = windows(size, taps, stage.stride_kv, stage.padding_kv)
        tokens = (1, math.prod(size) + stage.cls_token)
        keys = (1, math.prod(reduced) + stage.cls_token)
        for j in range(stage.depth):
            name = f"stages.{i}.{j}"
            for part, stride, image, row in (
                ("query", 1, size, tokens),
                ("key", stage.stride_kv, reduced, keys),
                ("value", stage.stride_kv, reduced, keys),
            ):
                linear = f"{name}.attention.{part}"
                found += [
                    Convolution(f"{linear}.conv", taps, stride, f, f, image, groups=f),
                    Convolution(linear, 1, 1, f, f, row),
                ]
            found += [
                Convolution(f"{name}.attention.output", 1, 1, f, f, tokens),
                Convolution(f"{name}.mlp.fc1", 1, 1, f, stage.hidden, tokens),
                Convolution(f"{name}.mlp.fc2", 1, 1, stage.hidden, f, tokens),
            ]
        c = f
    found.append(Convolution("head", 1, 1, c, spec.classes, (1, 1)))
    return found


def cvt(spec: CvtSpec, x: TensorValue, w: Parameters) -> Outputs:
    """Builds the network on pixels x[N, H, W, C]: uint8 levels, or normalised already."""
    stages = []
    tokens = x
    for i, stage in enumerate(spec.stages):  # 56, 28, 14 squared
        at = w.at(f"stages.{i}")
        stride, padding = stage.stride, stage.padding
        if i == 0:
            weight, bias = at.vector("embed.norm.weight"), at.vector("embed.norm.bias")
            x = stem_layernorm(
                x, at.stem("embed", stride), w.levels(x), weight, bias, spec.eps,
                stride=stride, padding=padding,
            )  # fmt: skip
        else:
            x = conv2d(x, at.filter("embed"), stride=stride, padding=padding)
            x = norm(x, at, "embed.norm", spec)
        n, h, width, c = x.shape
        tokens = x.reshape((n, h * width, c))
        if stage.cls_token:
            tokens = class_token(tokens, at.vector("cls_token", tokens.dtype))
        for j in range(stage.depth):
            tokens = block(spec, stage, tokens, at.at(str(j)), int(h), int(width))
        x = image(tokens, stage, int(h), int(width))
        stages.append(x)
    if spec.stages[-1].cls_token:
        last = layernorm_first(tokens, w.vector("norm.weight"), w.vector("norm.bias"), spec.eps)
    else:
        last = avgpool(norm(x, w, "norm", spec)).reshape((x.shape[0], x.shape[3]))
    return Outputs(linear(last, w.filter("head")), last, stages)


def block(
    spec: CvtSpec, stage: CvtStage, x: TensorValue, w: Parameters, height: int, width: int
) -> TensorValue:
    """Adds a convolutional transformer block (figure 2b) to the tokens [N, T, C]."""
    y = attend(spec, stage, x, w, (height, width))
    x = linear(y, w.filter("attention.output"), epilogue="add", residual=x)
    norm2 = w.vector("norm2.weight"), w.vector("norm2.bias")
    return layernorm_mlp(x, norm2, (w.filter("mlp.fc1"), w.filter("mlp.fc2")), spec.eps)


def attend(
    spec: CvtSpec, stage: CvtStage, x: TensorValue, w: Parameters, size: tuple[int, int]
) -> TensorValue:
    """Attends over the normalised tokens [N, T, C] by convolutional projections (section 3.2)."""
    parts = [f"attention.{part}" for part in ("query", "key", "value")]
    query, key, value = (w.filter(f"{part}.conv", groups=stage.width) for part in parts)
    local = depthwise_qkv(
        x,
        size,
        (w.vector("norm1.weight"), w.vector("norm1.bias")),
        (query, key, value),
        eps=spec.eps,
        padding_q=stage.padding_q,
        padding_kv=stage.padding_kv,
        stride_kv=stage.stride_kv,
        class_token=stage.cls_token,
    )
    query, key, value = (w.filter(part) for part in parts)
    q, k, v = qkv_linear(local, (query, key, value))
    # The paper's code scales by the width of the tokens, not of a head; so does transformers.
    return attention(q, k, v, stage.heads, scale=stage.width**-0.5)


def norm(x: TensorValue, w: Parameters, name: str, spec: CvtSpec) -> TensorValue:
    """Normalises the last axis with the layer norm called ``name``."""
    return layernorm(x, w.vector(f"{name}.weight"), w.vector(f"{name}.bias"), spec.eps)


def image(tokens: TensorValue, stage: CvtStage, height: int, width: int) -> TensorValue:
    """Lays tokens [N, T, C] out as [N, height, width, C], the class token left away."""
    if stage.cls_token:
        tokens = tokens[:, 1:]
    return tokens.reshape((tokens.shape[0], height, width, stage.width))
