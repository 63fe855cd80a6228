"""Small models of random weights, and their tensors under other formats' names.

The renaming here is written apart from the rules in weights/families, as plain substitutions on
Hugging Face's names, so that a wrong rule there cannot be repeated here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CvtConfig,
    CvtForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

State = dict[str, torch.Tensor]


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fills every parameter and statistic: fresh batch norms would hide folding mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.3, generator=generator)


def resnet(block: str = "basic", **changes: Any) -> ResNetForImageClassification:
    """Makes a four-stage ResNet with 5 classes."""
    config = ResNetConfig(
        layer_type=block,
        depths=[1, 2, 1, 1],
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32] if block == "basic" else [16, 32, 48, 64],
        **{"id2label": {i: f"label {i}" for i in range(5)}, **changes},
    )
    model = ResNetForImageClassification(config).eval()
    randomise(model)
    return model


def cvt(**changes: Any) -> CvtForImageClassification:
    """Makes a three-stage CvT with 5 classes, its heads 64 wide as in the paper."""
    config = CvtConfig(
        **{
            "embed_dim": [64, 64, 128],
            "num_heads": [1, 1, 2],
            "depth": [1, 2, 3],  # transformers needs more than i in stage i
            "mlp_ratio": [2.0, 2.0, 2.0],
            "id2label": {i: f"label {i}" for i in range(5)},
            **changes,
        }
    )
    model = CvtForImageClassification(config).eval()
    randomise(model)
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Writes a model as transformers does."""
    model.save_pretrained(folder, **options)
    return folder


def torchvision_names(model: ResNetForImageClassification) -> State:
    """Gives a ResNet's tensors the names that torchvision and timm use."""

    def rename(key: str) -> str:
        key = key.removeprefix("resnet.").replace("classifier.1.", "fc.")
        key = key.replace("embedder.embedder.convolution", "conv1")
        key = key.replace("embedder.embedder.normalization", "bn1")
        key = key.replace("shortcut.convolution", "downsample.0")
        key = key.replace("shortcut.normalization", "downsample.1")
        key = re.sub(
            r"encoder\.stages\.(\d)\.layers\.(\d+)",
            lambda match: f"layer{int(match[1]) + 1}.{match[2]}",
            key,
        )
        key = re.sub(r"layer\.(\d)\.convolution", lambda m: f"conv{int(m[1]) + 1}", key)
        return re.sub(r"layer\.(\d)\.normalization", lambda m: f"bn{int(m[1]) + 1}", key)

    return {rename(key): tensor for key, tensor in model.state_dict().items()}


def sparseml_names(model: ResNetForImageClassification) -> State:
    """Gives a ResNet's tensors the names of SparseML's own ResNets."""

    def rename(key: str) -> str:
        key = key.replace("downsample.0", "identity.conv").replace("downsample.1", "identity.bn")
        key = re.sub(r"^layer(\d)", lambda match: f"sections.{int(match[1]) - 1}", key)
        key = re.sub(r"^(conv|bn)1", r"input.\1", key)
        return re.sub(r"^fc", "classifier.fc", key)

    return {rename(key): tensor for key, tensor in torchvision_names(model).items()}


def original_cvt_names(model: CvtForImageClassification) -> State:
    """Gives a CvT's tensors the names of github.com/microsoft/CvT."""
    substitutions = (
        (r"cvt\.encoder\.stages\.", "stage"),
        (r"embedding\.convolution_embeddings\.projection", "patch_embed.proj"),
        (r"embedding\.convolution_embeddings\.normalization", "patch_embed.norm"),
        (r"\.layers\.", ".blocks."),
        (r"convolution_projection_(.)\w*\.convolution_projection", r"conv_proj_\1"),
        (r"attention\.attention\.conv_proj", "attn.conv_proj"),
        (r"(conv_proj_.)\.convolution", r"\1.conv"),
        (r"(conv_proj_.)\.normalization", r"\1.bn"),
        (r"attention\.attention\.projection_(.)\w*", r"attn.proj_\1"),
        (r"attention\.output\.dense", "attn.proj"),
        (r"intermediate\.dense", "mlp.fc1"),
        (r"output\.dense", "mlp.fc2"),
        (r"layernorm_before", "norm1"),
        (r"layernorm_after", "norm2"),
        (r"^layernorm", "norm"),
        (r"^classifier", "head"),
    )

    def rename(key: str) -> str:
        for pattern, replacement in substitutions:
            key = re.sub(pattern, replacement, key)
        return key

    return {rename(key): tensor for key, tensor in model.state_dict().items()}
