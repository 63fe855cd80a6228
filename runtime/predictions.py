"""Logits become named and scored classes. Nothing of MAX is imported here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prediction:
    """One class of an image's answer: its name, its index, its probability."""

    label: str
    class_id: int
    score: float


def softmax(logits: np.ndarray) -> np.ndarray:
    """Makes float64 probabilities of logits [..., classes]."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    probabilities: np.ndarray = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities
