"""What is known when the model loads is computed then, once."""

from __future__ import annotations

from dataclasses import replace

from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import EVALUATE
from maxvision.graphs.program import Node, Program, Rewrite, rebuilt


def constants(program: Program, _: Backend) -> Program:
    """Runs ops that read weights alone when the model loads."""
    known = set(program.constants)
    nodes = []
    for node in program.nodes:
        sizes = [size for value in node.outputs for size in program.types[value].shape]
        folds = all(name in known for name in node.inputs if name) and node.op in EVALUATE
        if folds and all(isinstance(size, int) for size in sizes):
            known.update(node.outputs)
            node = replace(node, at_load=True)
        nodes.append(node)
    return rebuilt(program, nodes)


def batch_norm(program: Program, _: Backend) -> Program:
    """Folds a batch norm into the convolution before it.

    With s = weight / sqrt(var + eps), computed in float64: filter' = filter * s over the output
    channels, bias' = bias + (the convolution's bias - mean) * s.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    for norm in program.nodes:
        conv = program.producers.get(norm.inputs[0])
        if (
            norm.op != "batch_norm"
            or conv is None
            or conv.op != "conv2d"
            or conv.attributes.get("epilogue", "none") != "none"
            or program.only_user(conv.output) is not norm
            or not program.constants.issuperset(filter(None, (*conv.inputs[1:], *norm.inputs[1:])))
        ):
            continue
        x, filters, before = (*conv.inputs, "")[:3]
        weight, bias, mean, var = norm.inputs[1:]
        scale, scaled, shift = (
            _free(taken, f"{conv.name}.{part}") for part in ("scale", "filter", "bias")
        )
        eps = norm.attributes.get("eps", 1e-5)
        given = (bias, mean, scale, before) if before else (bias, mean, scale)
        rewrite.replace(
            [conv, norm],
            Node("batch_norm_scale", (weight, var), (scale,), {"eps": eps}, at_load=True),
            Node("scale_filter", (filters, scale), (scaled,), at_load=True),
            Node("batch_norm_shift", given, (shift,), at_load=True),
            replace(conv, inputs=(x, scaled, shift), outputs=norm.outputs),
        )
    return rewrite.done()


def _free(taken: set[str], name: str) -> str:
    """Takes a name that no value has; a layer that is used twice comes twice."""
    while name in taken:
        name += ".folded"
    taken.add(name)
    return name
