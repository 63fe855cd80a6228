"""Names of CvT's tensors in Hugging Face's checkpoints and in the original release's.

The original code (github.com/microsoft/CvT) takes x * sigmoid(1.702 x) for the MLP's GELU;
transformers takes the exact one, also for weights converted from there, and so does this project.
"""

from __future__ import annotations

from maxvision.weights.layout import token
from maxvision.weights.modules import COUNTERS, batchnorm, conv, layernorm, linear
from maxvision.weights.rules import Rule, Rules

NORMALISED = r".*\.attention\.(query|key|value)\.conv"  # the convolutions a batch norm follows


def _hugging_face() -> Rules:
    stage, block = r"cvt\.encoder\.stages\.(\d+)", r"cvt\.encoder\.stages\.(\d+)\.layers\.(\d+)"
    embedding = rf"{stage}\.embedding\.convolution_embeddings"

    def projection(part: str) -> Rules:
        module = rf"{block}\.attention\.attention"
        convolution = rf"{module}\.convolution_projection_{part}\.convolution_projection"
        target = rf"stages.\1.\2.attention.{part}"
        return [
            *conv(rf"{convolution}\.convolution", f"{target}.conv"),
            *batchnorm(rf"{convolution}\.normalization", f"{target}.conv"),
            *linear(rf"{module}\.projection_{part}", target),
        ]

    return [
        *conv(rf"{embedding}\.projection", r"stages.\1.embed"),
        Rule(rf"{embedding}\.projection\.bias", r"stages.\1.embed.bias"),
        *layernorm(rf"{embedding}\.normalization", r"stages.\1.embed.norm"),
        Rule(rf"{stage}\.cls_token", r"stages.\1.cls_token", token),
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
            *batchnorm(rf"{block}\.attn\.conv_proj_{letter}\.bn", f"{target}.conv"),
            *linear(rf"{block}\.attn\.proj_{letter}", target),
        ]

    return [
        *conv(rf"{stage}\.patch_embed\.proj", r"stages.\1.embed"),
        Rule(rf"{stage}\.patch_embed\.proj\.bias", r"stages.\1.embed.bias"),
        *layernorm(rf"{stage}\.patch_embed\.norm", r"stages.\1.embed.norm"),
        Rule(rf"{stage}\.cls_token", r"stages.\1.cls_token", token),
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


HUGGING_FACE = _hugging_face()
ORIGINAL = _original()
