"""Loads a checkpoint of any supported format into the weights of a graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxvision.common.errors import ModelError
from maxvision.graphs.networks import Spec, parameters
from maxvision.weights import metadata
from maxvision.weights.formats import Format, recognise, specify
from maxvision.weights.layout import Folded, fold, share_of_zeros, unfold
from maxvision.weights.rules import apply
from maxvision.weights.source import Source, find


@dataclass(frozen=True)
class Checkpoint:
    """Holds everything that a graph needs to run a trained model.

    Attributes:
        name: What the user called it.
        family: ``"resnet"`` or ``"cvt"``.
        spec: The network's shape.
        tensors: Every weight of ``graphs.<family>.parameters(spec)``: float32, contiguous, batch
            norm folded, filters ``[R, S, C, F]``. Each is made anew whenever it is asked for.
        labels: The name of each class.
        preprocess: How an image is prepared, as in a ``preprocessor_config.json``.
    """

    name: str
    family: str
    spec: Spec
    tensors: Mapping[str, NDArray[np.float32]]
    labels: list[str]
    preprocess: dict[str, Any]

    def zeros(self, layer: str) -> float:
        """Tells the share of zeros of a convolution's filter or a linear layer's weights."""
        name = self._filter_name(layer)
        if isinstance(self.tensors, Folded):
            return self.tensors.zeros(name)
        return share_of_zeros(self.tensors[name])

    def filter(self, layer: str) -> np.ndarray:
        """Gives a convolution's filter [R, S, C, F], or a linear layer's weights [in, out]."""
        return np.asarray(self.tensors[self._filter_name(layer)])

    def _filter_name(self, layer: str) -> str:
        return f"{layer}.filter" if f"{layer}.filter" in self.tensors else f"{layer}.weight"


def load(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Loads a model.

    Args:
        source: The name of a bundled model, a folder, a checkpoint file (``.safetensors``,
            ``.bin``, ``.pth``, ``.pt``), or a Hugging Face hub id such as
            ``microsoft/resnet-50``. A name of several kinds is taken in this order.
        revision: Branch, tag or commit on the hub.
        progress: Called with a sentence before something slow, such as a download.

    Raises:
        ModelError: If there is no such model, it cannot be read, or its tensors are not those of
            a ResNet or a CvT; one message names everything that is wrong.
    """
    return interpret(find(source, revision, progress))


def interpret(found: Source) -> Checkpoint:
    """Makes a checkpoint of what was found.

    Raises:
        ModelError: See `load`.
    """
    form, spec = identify(found)
    with found.state.reading():
        parts = apply(
            form.rules,
            found.state.tensors,
            unfold(parameters(spec), form.normalised),
            found.name,
        )
    tensors = fold(parts, found.state.reading)
    bad = [name for name in tensors if not tensors.finite(name)]
    if bad:
        raise ModelError(
            f"{found.name}: expected finite weights but folding the batch norm of {', '.join(bad)}"
            " gives NaN or infinity (a negative variance?); use another checkpoint"
        )
    return Checkpoint(
        name=found.name,
        family=form.family,
        spec=spec,
        tensors=tensors,
        labels=metadata.labels(form, found.config, spec.classes, found.name),
        preprocess=metadata.preprocess(form, found.preprocess, found.config, found.name),
    )


def identify(found: Source) -> tuple[Format, Spec]:
    """Tells the format of what was found, and the network's shape.

    Raises:
        ModelError: If it is neither a ResNet nor a CvT.
    """
    tensors, config = found.state.tensors, found.config
    form = recognise(tensors, config, found.name)
    return form, specify(form, tensors, config, found.name)
