"""The other side of the comparison: transformers' models with random weights, on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.image_utils import load_image
from transformers.utils import logging

from maxvision.runtime import Features

logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MAXVISION_TEST_DATA", ROOT.parent / "shared" / "data"))
PREPROCESS: dict[str, Any] = {  # as microsoft/resnet-50 and microsoft/cvt-13 have it
    "image_processor_type": "ConvNextImageProcessor",
    "do_resize": True, "size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3,
    "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


def resnet(seed: int = 0, **config: Any) -> transformers.ResNetForImageClassification:
    """Makes a ResNet (ResNet-50 unless ``config`` says otherwise) of random weights."""
    made = transformers.ResNetConfig(**config)
    return randomise(transformers.ResNetForImageClassification(made), seed)


def cvt(seed: int = 0, **config: Any) -> transformers.CvtForImageClassification:
    """Makes a CvT (CvT-13 unless ``config`` says otherwise) of random weights."""
    return randomise(transformers.CvtForImageClassification(transformers.CvtConfig(**config)), seed)


def randomise(model: Any, seed: int) -> Any:
    """Fills every weight and statistic: fresh ones (0 and 1) would hide a wrong folding."""
    random = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if not value.is_floating_point():  # batch norm's counter
            continue
        if name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=random)
        elif name.endswith("weight") and value.ndim == 1:  # of a norm
            value.uniform_(0.5, 1.5, generator=random)
        elif name.endswith("weight"):
            value.normal_(0, value[0].numel() ** -0.5, generator=random)
        else:  # biases, running means, class tokens
            value.normal_(0, 0.1, generator=random)
    return model.eval()


@torch.no_grad()
def spread(model: Any, pixels: np.ndarray) -> None:
    """Makes a classifier that tells pictures apart: logits of mean 0, deviation 3 over ``pixels``.

    The features of random weights are nearly the same for all pictures; only the rest counts.
    """
    features = torch.from_numpy(run(model, pixels).features)
    layer = linear(model)
    layer.weight.normal_(generator=torch.Generator().manual_seed(0))
    layer.weight *= 3 / features.std(0).norm()
    layer.bias.copy_(-layer.weight @ features.mean(0))


def save(model: Any, folder: Path, preprocess: dict[str, Any] = PREPROCESS) -> str:
    """Writes the checkpoint into ``folder``, which it returns."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocess))
    return str(folder)


def linear(model: Any) -> torch.nn.Linear:
    """Returns the classifier's linear layer."""
    return next(m for m in model.classifier.modules() if isinstance(m, torch.nn.Linear))


@torch.inference_mode()
def run(model: Any, pixels: np.ndarray) -> Features:
    """Runs the model, at its dtype, on normalised pixels [N, H, W, C]; maps come back as NHWC."""
    features: list[np.ndarray] = []
    hook = linear(model).register_forward_pre_hook(lambda _, x: features.append(x[0].numpy()))
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(model.dtype)
    out = model(x, output_hidden_states=True)
    hook.remove()
    stages = out.hidden_states[1:] if model.config.model_type == "resnet" else out.hidden_states
    maps = [stage.permute(0, 2, 3, 1).numpy() for stage in stages]
    return Features(out.logits.numpy(), features[0], maps)


def processed(images: list[Path], config: dict[str, Any] = PREPROCESS) -> np.ndarray:
    """Prepares images with transformers: float32 [N, H, W, C]."""
    processor = transformers.ConvNextImageProcessorPil.from_dict(config)
    opened = [load_image(str(image)) for image in images]  # upright, RGB
    return processor(opened, return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
