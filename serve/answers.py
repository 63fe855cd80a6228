"""Logits become named and scored classes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from graphs.session import Prediction

Function: TypeAlias = Literal["softmax", "sigmoid", "none"]


def rank(
    logits: np.ndarray, labels: list[str], top_k: int, function: Function = "softmax"
) -> list[Prediction]:
    """Names the likeliest classes of logits [classes], the likeliest first.

    The softmax is that of ``graphs.session.Model.predictions``, bit by bit; ``none`` scores by the
    logit itself.
    """
    if function == "softmax":
        shifted = np.exp(logits - logits.max(), dtype=np.float64)
        scores = shifted / shifted.sum()
    elif function == "sigmoid":
        halves = 0.5 * logits.astype(np.float64)
        scores = 0.5 * (1 + np.tanh(halves))
    else:
        scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")[:top_k]
    return [Prediction(labels[i], int(i), float(scores[i])) for i in order]
