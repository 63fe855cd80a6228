"""Logits become named and scored classes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from maxvision.runtime.predictions import Prediction, likeliest, softmax

Function: TypeAlias = Literal["softmax", "sigmoid", "none"]


def score(logits: np.ndarray, function: Function = "softmax") -> np.ndarray:
    """Makes float64 scores of logits [classes].

    The softmax is that of ``Classifier.predictions``; ``none`` scores by the logit itself.
    """
    if function == "softmax":
        return softmax(logits)
    if function == "sigmoid":
        halves = 0.5 * logits.astype(np.float64)
        return 0.5 * (1 + np.tanh(halves))
    return logits.astype(np.float64)


def rank(
    logits: np.ndarray, labels: list[str], top_k: int, function: Function = "softmax"
) -> list[Prediction]:
    """Names the likeliest classes of logits [classes], the likeliest first (see ``score``)."""
    scores = score(logits, function)
    (order,) = likeliest(scores[None], top_k)
    return [Prediction(labels[i], int(i), float(scores[i])) for i in order]
