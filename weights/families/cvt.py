"""Names of CvT's tensors in Hugging Face's checkpoints and in the original release's.

The original code (github.com/microsoft/CvT) takes x * sigmoid(1.702 x) for the MLP's GELU;
transformers takes the exact one, also for weights converted from there, and so does this project.
"""

from __future__ import annotations

from collections.abc import Mapping

from maxvision.graphs.cvt import CvtSpec, CvtStage, cvt
from maxvision.weights.family import Family, Format
from maxvision.weights.layout import Shape
from maxvision.weights.modules import (
    COUNTERS,
    batchnorm,
    conv,
    depths,
    filters,
    first,
    layernorm,
    linear,
)
from maxvision.weights.rules import Rule, Rules

HEAD_WIDTH = 64  # of every CvT in the paper


def _hugging_face() -> Rules:
    stage, block = r"cvt\.encoder\.stages\.(\d+)", r"cvt\.encoder\.stages\.(\d+)\.layers\.(\d+)"
    embedding = rf"{stage}\.embedding\.convolution_embeddings"

    def projection(part: str) -> Rules:
        module = rf"{block}\.attention\.attention"
        convolution = rf"{module}\.convolution_projection_{part}\.convolution_projection"
        target = rf"stages.\1.\2.attention.{part}"
        return [
            *conv(rf"{convolution}\.convolution", f"{target}.conv"),
            *batchnorm(rf"{convolution}\.normalization", f"{target}.conv.batchnorm"),
            *linear(rf"{module}\.projection_{part}", target),
        ]

    return [
        *conv(rf"{embedding}\.projection", r"stages.\1.embed", bias=True),
        *layernorm(rf"{embedding}\.normalization", r"stages.\1.embed.norm"),
        Rule(rf"{stage}\.cls_token", r"stages.\1.cls_token"),
        *layernorm(rf"{block}\.layernorm_before", r"stages.\1.\2.norm1"),
        *projection("query"),
        *projection("key"),
        *projection("value"),
        *linear(rf"{block}\.attention\.output\.dense", r"stages.\1.\2.attention.output"),
        *layernorm(rf"{block}\.layernorm_after", r"stages.\1.\2.norm2"),
        *linear(rf"{block}\.intermediate\.dense", r"stages.\1.\2.mlp.fc1"),
        *linear(rf"{block}\.output\.dense", r"stages.\1.\2.mlp.fc2"),
        *layernorm("layernorm", "norm"),
        *linear("classifier", "head"),
        COUNTERS,
    ]


def _original() -> Rules:
    stage, block = r"stage(\d+)", r"stage(\d+)\.blocks\.(\d+)"

    def projection(letter: str, part: str) -> Rules:
        target = rf"stages.\1.\2.attention.{part}"
        return [
            *conv(rf"{block}\.attn\.conv_proj_{letter}\.conv", f"{target}.conv"),
            *batchnorm(rf"{block}\.attn\.conv_proj_{letter}\.bn", f"{target}.conv.batchnorm"),
            *linear(rf"{block}\.attn\.proj_{letter}", target),
        ]

    return [
        *conv(rf"{stage}\.patch_embed\.proj", r"stages.\1.embed", bias=True),
        *layernorm(rf"{stage}\.patch_embed\.norm", r"stages.\1.embed.norm"),
        Rule(rf"{stage}\.cls_token", r"stages.\1.cls_token"),
        *layernorm(rf"{block}\.norm1", r"stages.\1.\2.norm1"),
        *projection("q", "query"),
        *projection("k", "key"),
        *projection("v", "value"),
        *linear(rf"{block}\.attn\.proj", r"stages.\1.\2.attention.output"),
        *layernorm(rf"{block}\.norm2", r"stages.\1.\2.norm2"),
        *linear(rf"{block}\.mlp\.fc1", r"stages.\1.\2.mlp.fc1"),
        *linear(rf"{block}\.mlp\.fc2", r"stages.\1.\2.mlp.fc2"),
        *layernorm("norm", "norm"),
        *linear("head", "head"),
        COUNTERS,
    ]


def _infer(shapes: Mapping[str, Shape], classes: int) -> CvtSpec:
    """Counts blocks and widths; heads are 64 wide, embeddings as in the paper's table 2."""

    def stage(i: int, depth: int) -> CvtStage:
        width, _, patch, _ = _embedding(shapes, i)
        if width % HEAD_WIDTH:
            raise ValueError(
                f"cvt: stage {i} must have a multiple of {HEAD_WIDTH} channels, for heads of that"
                f" width, but has {width}"
            )
        kernel = filters(shapes, f"stages.{i}.0.attention.query.conv.weight", (width, 1, 3, 3))[-1]
        return CvtStage(
            patch=patch,
            stride=2 if i else 4,
            padding=1 if i else 2,
            width=width,
            heads=width // HEAD_WIDTH,
            depth=depth,
            mlp_ratio=first(shapes, f"stages.{i}.0.mlp.fc1.weight") / width,
            qkv_bias=f"stages.{i}.0.attention.query.bias" in shapes,
            cls_token=f"stages.{i}.cls_token" in shapes,
            kernel_qkv=kernel,
            padding_q=kernel // 2,
            padding_kv=kernel // 2,
        )

    stages = tuple(stage(i, depth) for i, depth in enumerate(depths(shapes)))
    return CvtSpec(stages, channels=_embedding(shapes, 0)[1], classes=classes)


def _embedding(shapes: Mapping[str, Shape], stage: int) -> Shape:
    return filters(shapes, f"stages.{stage}.embed.weight", (HEAD_WIDTH, 3, 3, 3))


FAMILY = Family(
    name="cvt",
    read=CvtSpec.from_config,
    write=cvt,
    formats=(
        Format("Hugging Face CvT", _hugging_face()),
        Format("original CvT", _original(), _infer),
    ),
    architectures=("CvtForImageClassification",),
    dense=("stages.0.embed", "head"),
)
