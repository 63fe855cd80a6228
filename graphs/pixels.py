"""A network of images as one of pictures: what is put before and behind a plain program."""

from __future__ import annotations

from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.types import Type

MEAN, SCALE = "pixels.mean", "pixels.scale"
"""The weights that normalise: 1 / the standard deviation is the scale."""


def from_pixels(program: Program, pixels: str, dtype: str) -> Program:
    """Makes a program take pixels [N, H, W, C], and give images as [N, H, W, C].

    Args:
        program: A network of images [N, C, H, W].
        pixels: ``uint8`` levels, which are normalised by ``MEAN`` and ``SCALE``, or ``float32``,
            normalised already.
        dtype: Of activations.
    """
    (image,) = program.inputs
    n, c, h, w = program.inputs[image].shape
    name = "pixels"
    weights, before = dict(program.weights), []
    if pixels == "uint8":
        weights |= {MEAN: Type((c,)), SCALE: Type((c,))}
        before.append(Node("normalize", (name, MEAN, SCALE), ("pixels.x",), {"dtype": dtype}))
    elif dtype != pixels:
        before.append(Node("cast", (name,), ("pixels.x",), {"dtype": dtype}))
    last = before[-1].output if before else name
    before.append(Node("permute", (last,), (image,), {"axes": (0, 3, 1, 2)}))
    behind: list[Node] = []
    outputs: dict[str, str] = {}
    for output, value in program.outputs.items():
        if len(program.types[value].shape) == 4:
            last = f"{value}.last"
            if last not in (node.output for node in behind):  # a value may be two outputs
                behind.append(Node("permute", (value,), (last,), {"axes": (0, 2, 3, 1)}))
            value = last
        outputs[output] = value
    return rebuilt(
        program,
        [*before, *program.nodes, *behind],
        inputs={name: Type((n, h, w, c), pixels)},
        weights=weights,
        outputs=outputs,
        known=dtype == program.inputs[image].dtype,
    )
