"""Loads a checkpoint of any supported format: a network, and the weights that it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import EVALUATE, Constants
from maxvision.graphs.passes.fold import batch_norm
from maxvision.graphs.program import Program
from maxvision.weights import metadata
from maxvision.weights.family import Family, Format
from maxvision.weights.formats import recognise, specify
from maxvision.weights.layout import Stored, is_finite
from maxvision.weights.rules import apply
from maxvision.weights.source import Source, find


@dataclass(frozen=True)
class Checkpoint:
    """Holds everything that is needed to run a trained model.

    Attributes:
        name: What the user called it.
        family: What its network is called.
        channels: Of its images.
        size: Of the images that ``preprocess`` makes, px.
        program: Writes its network down for images of a size, px.
        tensors: Every weight of the program.
        labels: The name of each class.
        preprocess: How an image is prepared, as in a ``preprocessor_config.json``.
        spec: The network's shape, a row of its family's table.
    """

    name: str
    family: str
    channels: int
    size: tuple[int, int]
    program: Callable[[tuple[int, int]], Program]
    tensors: Stored
    labels: list[str]
    preprocess: dict[str, Any]
    spec: Any = None

    def zeros(self, layer: str) -> float:
        """Tells the share of zeros of a layer's weights."""
        return self.tensors.zeros(f"{layer}.weight")


def load(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Loads a model.

    Args:
        source: The name of a bundled model, a folder, a checkpoint file (``.safetensors``,
            ``.bin``, ``.pth``, ``.pt``, ``.ckpt``, ``.pth.tar``), or a Hugging Face hub id such as
            ``microsoft/resnet-50``. A name of several kinds is taken in this order.
        revision: Branch, tag or commit on the hub.
        progress: Called with a sentence before something slow, such as a download.

    Raises:
        ModelError: If there is no such model, it cannot be read, or its tensors are those of no
            known family; one message names everything that is wrong.
    """
    return interpret(find(source, revision, progress))


def interpret(found: Source) -> Checkpoint:
    """Makes a checkpoint of what was found.

    Raises:
        ModelError: See `load`.
    """
    family, form, spec = identify(found)
    preprocess = metadata.preprocess(form, found.preprocess, found.config, found.name)
    size = metadata.size(preprocess)
    write = cache(partial(family.program, spec))
    try:
        program = write(size)
    except Exception as error:  # whatever the numbers of a config.json lead to
        raise ModelError(
            f"{found.name}: config.json does not describe a {family.name} ({error}); correct it"
        ) from error
    shapes = {name: program.shape(name) for name in program.weights}
    with found.state.reading():
        parts = apply(
            form.rules,
            found.state.tensors,
            shapes,
            found.name,
            configured=found.config is not None,
        )
    tensors = Stored(parts, found.state.reading)
    check_norms(program, tensors, found.name)
    return Checkpoint(
        name=found.name,
        family=family.name,
        channels=spec.channels,
        size=size,
        program=write,
        tensors=tensors,
        labels=metadata.labels(form, found.config, spec.classes, found.name),
        preprocess=preprocess,
        spec=spec,
    )


def identify(found: Source) -> tuple[Family, Format, Any]:
    """Tells the family and the format of what was found, and the network's shape.

    Raises:
        ModelError: If it is of no known family.
    """
    tensors, config = found.state.tensors, found.config
    family, form = recognise(tensors, config, found.name)
    return family, form, specify(family, form, tensors, config, found.name)


def check_norms(program: Program, tensors: Stored, name: str) -> None:
    """Makes sure that batch norms give numbers, folded or not; no filter is copied for it.

    Raises:
        ModelError: If one gives NaN or infinity.
    """
    folded = batch_norm(program, Backend("cpu", "float32"))
    constants = Constants(folded, tensors)
    bad: dict[str, None] = {}
    for node in folded.nodes:
        if node.op == "scale_filter":
            weight, scale = node.inputs
            with np.errstate(over="ignore", invalid="ignore"):
                value = (tensors.largest(weight) * constants[scale]).astype(np.float32)
        elif node.op == "batch_norm_shift":
            value = constants[node.output]
        elif node.op == "batch_norm":
            _, weight, _, _, var = node.inputs
            scaled = EVALUATE["batch_norm_scale"]
            value = scaled(constants[weight], constants[var], **node.attributes)
        else:
            continue
        if not is_finite(value):
            bad[folded.users[node.output][0].name if node.at_load else node.name] = None
    if bad:
        raise ModelError(
            f"{name}: folding the batch norm of {', '.join(bad)} gives NaN or infinity (a negative"
            " variance?); use another checkpoint"
        )
