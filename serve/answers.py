"""Logits become named and scored classes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from maxvision.runtime.predictions import Prediction, softmax

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
    some = np.arange(len(scores))
    if top_k < len(scores):  # sort only what may be among them, in the order of a full sort
        some = np.flatnonzero(scores >= np.partition(scores, -top_k)[-top_k])
    order = some[np.argsort(-scores[some], kind="stable")[:top_k]]
    return [Prediction(labels[i], int(i), float(scores[i])) for i in order]
