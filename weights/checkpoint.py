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
from maxvision.graphs.quantize import Quantization, quantized
from maxvision.weights import metadata
from maxvision.weights.family import Family, Format
from maxvision.weights.formats import recognise, specify
from maxvision.weights.layout import Stored, is_finite
from maxvision.weights.rules import Rule, apply
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
    if found.program is not None:
        return _converted(found, found.program)
    family, form, spec = identify(found)
    preprocess = metadata.preprocess(form, spec, found.preprocess, found.config, found.name)
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
        program=_rounded(write, found, size),
        tensors=tensors,
        labels=metadata.labels(
            repr(form.key("head.weight")), found.config, spec.classes, found.name
        ),
        preprocess=preprocess,
        spec=spec,
    )


def _converted(found: Source, program: Program) -> Checkpoint:
    """Makes a checkpoint of a folder that ``maxvision convert`` wrote.

    Raises:
        ModelError: If it classifies no pictures, or its weights are not the program's.
    """
    inputs, logits = list(program.inputs.values()), program.outputs.get("logits", "")
    images = len(inputs) == 1 and len(inputs[0].shape) == 4
    if not images or not logits or len(program.types[logits].shape) != 2 or not found.preprocess:
        takes = ", ".join(map(str, inputs))
        gives = ", ".join(f"{name} {program.types[v]}" for name, v in program.outputs.items())
        raise ModelError(
            f"{found.name}: this model does not classify pictures, it takes {takes} and gives"
            f" {gives}; run it with maxvision.Converted.load in Python"
        )
    tensors = converted_tensors(found, program)
    _, channels, height, width = inputs[0].shape
    classes = program.shape(logits)[0]

    def sized(size: tuple[int, int]) -> Program:
        if size != (height, width):
            raise ModelError(
                f"{found.name} was converted for pictures of {height} x {width} px, not"
                f" {size[0]} x {size[1]}; convert it again with --size"
            )
        return program

    return Checkpoint(
        name=found.name,
        family=program.name,
        channels=int(channels),
        size=(int(height), int(width)),
        program=_rounded(sized, found, (int(height), int(width))),
        tensors=tensors,
        labels=metadata.labels("logits", found.config, classes, found.name),
        preprocess=dict(found.preprocess),
    )


def _rounded(
    write: Callable[[tuple[int, int]], Program], found: Source, size: tuple[int, int]
) -> Callable[[tuple[int, int]], Program]:
    """Makes what writes a network round what config.json says, if ``maxvision quantize`` wrote it.

    Raises:
        ModelError: If that does not fit the network.
    """
    how = Quantization.from_config(found.config, found.name)
    if how is None:
        return write
    rounded = cache(lambda size: quantized(write(size), how))
    rounded(size)
    return rounded


def converted_tensors(found: Source, program: Program) -> Stored:
    """Gives the weights of a folder that ``maxvision convert`` wrote.

    Raises:
        ModelError: If they are not the program's.
    """
    shapes = {name: tensor.shape for name, tensor in found.state.tensors.items()}
    wrong = [
        f"{name} is {shapes.get(name, 'missing')} but should be {wanted}"
        for name, wanted in program.weights.items()
        if shapes.get(name) != wanted.shape
    ]
    if wrong:
        raise ModelError(f"{found.name}: {'; '.join(wrong[:3])}; convert the model again")
    parts = {name: found.state.tensors[name] for name in program.weights}
    tensors = Stored(parts, found.state.reading)
    check_norms(program, tensors, found.name)
    return tensors


def identify(found: Source) -> tuple[Family, Format, Any]:
    """Tells the family and the format of what was found, and the network's shape.

    A model that ``maxvision convert`` wrote is a family of its own.

    Raises:
        ModelError: If it is of no known family.
    """
    tensors, config = found.state.tensors, found.config
    if found.program is not None:
        family = _own(found.program)
        return family, family.formats[0], found.program.signature
    family, form = recognise(tensors, config, found.name)
    return family, form, specify(family, form, tensors, config, found.name)


def _own(program: Program) -> Family:
    """Makes a family of one network, whose weights have their own names; its ends stay dense."""
    named = [layer for node in program.nodes for layer in node.layers]

    def write(spec: Any, net: Any, x: Any) -> None:
        raise NotImplementedError("a converted model has a program already")

    return Family(
        name=program.name,
        read=lambda config, classes: program.signature,
        write=write,
        formats=(Format("converted model", [Rule(r"(.+)", r"\1")]),),
        dense=(named[0], named[-1]) if named else (),
    )


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
