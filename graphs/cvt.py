"""CvT (Wu et al. 2021, arXiv:2103.15808)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxvision.graphs.net import Net, Value
from maxvision.graphs.types import Size

Shape = tuple[int, ...]

_KEYS: dict[str, tuple[str, Any]] = {  # ours -> the configuration's, with its default
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
                    f"{where} must have a width that its {stage.heads} heads divide"
                    f" but has {stage.width}"
                )
            if 2 * stage.padding_q != stage.kernel_qkv - 1:
                raise ValueError(
                    f"{where} must have a query projection that keeps the size, but kernel_qkv="
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
        columns = {ours: config.get(key, default) for ours, (key, default) in _KEYS.items()}
        count = len(columns["depth"])
        for ours, column in columns.items():
            if len(column) < count:
                raise ValueError(
                    f"cvt: {_KEYS[ours][0]} must have an entry for each of {count} stages"
                    f" but has {len(column)}"
                )
        for key, value in (("qkv_projection_method", "dw_bn"), ("stride_q", 1)):
            others = [v for v in config.get(key, ())[:count] if v != value]
            if others:
                raise ValueError(f"cvt: {key} must be {value!r} in every stage but has {others}")
        return cls(
            stages=tuple(
                CvtStage(**{ours: column[i] for ours, column in columns.items()})
                for i in range(count)
            ),
            channels=config.get("num_channels", 3),
            classes=classes,
        )

    def to_config(self) -> dict[str, Any]:
        """Describes it as a ``CvtConfig`` does."""
        count = len(self.stages)
        return {
            **{key: [getattr(s, ours) for s in self.stages] for ours, (key, _) in _KEYS.items()},
            "stride_q": [1] * count,
            "qkv_projection_method": ["dw_bn"] * count,
            "drop_rate": [0.0] * count,
            "attention_drop_rate": [0.0] * count,
            "drop_path_rate": [0.0] * count,
        }


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


def cvt(spec: CvtSpec, net: Net, x: Value) -> None:
    """Writes the network down on images x[N, C, H, W]."""
    for i, stage in enumerate(spec.stages):  # 56, 28, 14 px squared
        with net.at(f"stages.{i}"):
            x = net.conv2d(
                x, "embed", stage.width, stage.patch, stride=stage.stride, padding=stage.padding
            )
            n, c, *size = x.shape
            x = net.layer_norm(net.channels_last(x), "embed.norm", spec.eps)
            tokens = net.reshape(x, n, x.size(1) * x.size(2), c)
            if stage.cls_token:
                token = net.expand(net.weight("cls_token", 1, 1, stage.width), n, 1, c)
                tokens = net.concat([token, tokens], axis=1)
            for j in range(stage.depth):
                with net.at(j):
                    tokens = block(spec, stage, net, tokens, size)
            last = net.reshape(without_class(net, stage, tokens), n, *size, c)
            x = net.channels_first(last)
        net.output(f"stages.{i}", x)
    if stage.cls_token:
        x = net.layer_norm(net.reshape(net.slice(tokens, 1, 0, 1), n, c), "norm", spec.eps)
    else:
        x = net.channels_first(net.layer_norm(last, "norm", spec.eps))
        x = net.flatten(net.avg_pool2d(x))
    net.output("features", x)
    net.output("logits", net.linear(x, "head", spec.classes))


def block(spec: CvtSpec, stage: CvtStage, net: Net, x: Value, size: Sequence[Size]) -> Value:
    """Adds a convolutional transformer block (figure 2b) to the tokens [N, T, C]."""
    x = x + attend(stage, net, net.layer_norm(x, "norm1", spec.eps), size)
    y = net.layer_norm(x, "norm2", spec.eps)
    y = net.gelu(net.linear(y, "mlp.fc1", stage.hidden))
    return x + net.linear(y, "mlp.fc2", stage.width)


def attend(stage: CvtStage, net: Net, x: Value, size: Sequence[Size]) -> Value:
    """Attends over the tokens [N, T, C] by convolutional projections (section 3.2)."""
    n, c = x.shape[0], stage.width
    image = net.channels_first(net.reshape(without_class(net, stage, x), n, *size, c))
    token = [net.slice(x, 1, 0, 1)] if stage.cls_token else []
    heads = []
    for part in ("query", "key", "value"):
        stride = 1 if part == "query" else stage.stride_kv
        padding = stage.padding_q if part == "query" else stage.padding_kv
        with net.at("attention"):
            y = net.conv2d(
                image, f"{part}.conv", c, stage.kernel_qkv,
                stride=stride, padding=padding, groups=c, bias=False,
            )  # fmt: skip
            y = net.channels_last(net.batch_norm(y, f"{part}.conv.batchnorm"))
            y = net.reshape(y, n, y.size(1) * y.size(2), c)
            y = net.concat([*token, y], axis=1) if token else y
            y = net.linear(y, part, c, bias=stage.qkv_bias)
        y = net.reshape(y, n, y.size(1), stage.heads, c // stage.heads)
        heads.append(net.permute(y, 0, 2, 1, 3))
    # The paper's code scales by the width of the tokens, not of a head; so does transformers.
    query, key, value = heads
    y = net.scaled_dot_product_attention(query, key, value, scale=c**-0.5)
    y = net.reshape(net.permute(y, 0, 2, 1, 3), n, x.size(1), c)
    with net.at("attention"):
        return net.linear(y, "output", c)


def without_class(net: Net, stage: CvtStage, tokens: Value) -> Value:
    """Leaves the class token [N, 0] away, where the stage has one."""
    return net.slice(tokens, 1, 1, tokens.size(1)) if stage.cls_token else tokens
