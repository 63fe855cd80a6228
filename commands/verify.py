"""Compares the graph of a model, stage by stage, with transformers running the same weights.

Torch and transformers are needed here only. A checkpoint in another format than Hugging Face's is
renamed first, and torch folds nothing: its batch norms run as they were trained.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.runtime.preprocess import Preprocess
from maxvision.weights.checkpoint import identify, interpret
from maxvision.weights.convert import convert
from maxvision.weights.layout import Array, Shape
from maxvision.weights.reference import references
from maxvision.weights.source import Source, find

BOUND = 1e-5  # of float32: the largest difference over the largest value
BATCH = 2


@dataclass(frozen=True)
class Comparison:
    """Holds how far one output is from the reference's.

    Attributes:
        output: ``"stage 1"``, ..., ``"logits"``.
        shape: Its shape, activations NHWC.
        largest: The largest absolute value of the reference.
        error: The largest absolute difference.
    """

    output: str
    shape: Shape
    largest: float
    error: float

    @property
    def relative(self) -> float:
        """The error over the largest value."""
        return self.error / self.largest if self.largest else self.error

    @property
    def within(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.relative <= BOUND


def verify(
    name: str, device: str, seed: int = 0, progress: Callable[[str], None] | None = None
) -> list[Comparison]:
    """Runs a model and its reference on the same random float32 images.

    Args:
        name: The model, as for ``weights.load``.
        device: Where the graph runs: ``"cpu"``, ``"gpu:0"``, ....
        seed: Of the images, which are normally distributed as normalised ones about are.
        progress: Called with a sentence before each step that takes time.

    Raises:
        ModelError: If the model does not load, or torch or transformers is missing.
    """
    found = find(name, progress=progress)
    checkpoint = interpret(found)
    prepared = Preprocess.from_config(checkpoint.preprocess)
    shape = (BATCH, prepared.height, prepared.width, checkpoint.channels)
    pixels = np.random.default_rng(seed).standard_normal(shape, np.float32)
    expected = _reference(found, pixels)

    from maxvision.runtime import load

    model = load(name, device=device, dtype="float32", progress=progress)
    if progress:
        progress(f"running {name}; to compile its stages may take another minute")
    computed = [*model.stages(pixels), model(pixels)]
    outputs = [f"stage {i + 1}" for i in range(len(expected) - 1)] + ["logits"]
    return [
        _compare(output, ours, theirs)
        for output, ours, theirs in zip(outputs, computed, expected, strict=True)
    ]


def _compare(output: str, ours: Array, theirs: Array) -> Comparison:
    if ours.shape != theirs.shape:
        return Comparison(f"{output} {ours.shape}", theirs.shape, 0.0, float("nan"))
    error = np.abs(ours.astype(np.float64) - theirs).max()
    return Comparison(output, theirs.shape, float(np.abs(theirs).max()), float(error))


@references("weights verify")
def _reference(found: Source, pixels: Array) -> list[Array]:
    """Runs transformers: each stage as NHWC, then the logits."""
    import torch
    import transformers
    from transformers.utils import logging

    family, _, _ = identify(found)
    kind: Any = next((getattr(transformers, n, None) for n in family.architectures), None)
    if kind is None:
        raise ModelError(
            f"{found.name}: transformers, the reference, has no network of the family"
            f" {family.name}; compare it with its own reference instead"
        )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        convert(found, folder)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            out = model(torch.from_numpy(pixels).permute(0, 3, 1, 2), output_hidden_states=True)
    stages = out.hidden_states[family.first_stage :]
    return [stage.permute(0, 2, 3, 1).numpy() for stage in stages] + [out.logits.numpy()]
