"""Layer norms between two linear layers become part of both: on Hopper, in 16 bits."""

from __future__ import annotations

from dataclasses import replace

from maxvision.graphs.arrange import MLPS
from maxvision.graphs.backend import Backend
from maxvision.graphs.program import Node, Program, Rewrite, free
from maxvision.graphs.shapes import MOMENTS
from maxvision.graphs.types import HALVES

EPS = 1e-5
"""What a layer norm adds to the variance unless it says otherwise."""
LONGEST = 1024
"""Channels of the product before a norm at most. With few rows and more channels, clusters share K,
and a block finishes fewer columns than have their moments together (ops/hopper/moments.mojo)."""


def norms(program: Program, on: Backend) -> Program:
    """Leaves a norm's moments with the product before it, and norms in the products behind it.

    The product before it adds a residual, as in a transformer; all that is behind it are products.
    Weight and bias of the norm go into theirs. Where tokens come from elsewhere, an op measures
    them if an MLP follows that ``mlp`` makes one op of.
    """
    if not on.is_hopper or on.dtype not in HALVES:
        return program
    rewrite, taken = Rewrite(program), set(program.types)
    for norm in program.nodes:
        x = norm.inputs[0] if norm.op == "layer_norm" else ""
        before, behind = program.producers.get(x), program.users.get(norm.output, ())
        measured = before and _is_measured(program, before, on) and not rewrite.has(before)
        if (
            not x
            or not behind
            or norm.output in program.outputs.values()
            or not program.constants.issuperset(norm.inputs[1:])
            or not all(_is_product(program, each, norm.output, on) for each in behind)
            or not (measured or is_mlp(program, behind[0], x, on))
        ):
            continue
        moments = free(taken, f"{x}.moments")
        if before and measured:
            outputs = (x, moments)
            new = Node("linear_moments", before.inputs, outputs, {}, before.layers, before.origin)
            rewrite.replace([before], new)
            rewrite.replace([norm])
        else:
            rewrite.replace([norm], Node("row_moments", (x,), (moments,), layers=norm.layers))
        for each in behind:
            rewrite.replace([each], *_normed(program, norm, each, moments, on, taken))
    return rewrite.done()


def _normed(
    program: Program, norm: Node, linear: Node, moments: str, on: Backend, taken: set[str]
) -> list[Node]:
    """Makes the product of a norm, and its weights."""
    weight, bias = (*linear.inputs, "")[1:3]
    folded, shift = (free(taken, f"{linear.name}.{part}") for part in ("normed", "shift"))
    given = (weight, norm.inputs[2], bias) if bias else (weight, norm.inputs[2])
    attributes = {"to": on.dtype}
    return [
        Node("norm_filter", (weight, norm.inputs[1]), (folded,), attributes, at_load=True),
        Node("norm_shift", given, (shift,), at_load=True),
        replace(
            linear.with_attributes(eps=norm.attributes.get("eps", EPS)),
            op="normed_linear",
            inputs=(norm.inputs[0], moments, folded, shift),
            layers=(*norm.layers, *linear.layers),
        ),
    ]


def is_mlp(program: Program, first: Node, x: str, on: Backend) -> bool:
    """Tells whether a product and the one behind it are an MLP of tokens x that ``mlp`` fuses."""
    second = program.only_user(first.output)
    return (
        first.attributes.get("epilogue") == "gelu"
        and second is not None
        and second.op == "linear"
        and second.attributes.get("epilogue") == "add"
        and not second.attributes.get("format")
        and _has_weights(program, second, on)
        and second.inputs[3] == x
        and len(program.types[x].shape) == 3
        and program.shape(x)[1] in MLPS
    )


def _is_measured(program: Program, node: Node, on: Backend) -> bool:
    """Tells whether a product can leave the moments of its result's rows.

    The second one of an MLP that ``mlp`` makes one op of cannot.
    """
    first = program.producers.get(node.inputs[0])
    return (
        node.op == "linear"
        and node.attributes.get("epilogue") == "add"
        and not node.attributes.get("format")
        and _has_weights(program, node, on)
        and program.shape(node.inputs[1])[0] % MOMENTS == 0
        and program.shape(node.inputs[1])[1] <= LONGEST
        and not (first and is_mlp(program, first, node.inputs[3], on))
    )


def _is_product(program: Program, node: Node, x: str, on: Backend) -> bool:
    """Tells whether a node is a product of x and weights, and adds nothing."""
    return (
        node.op == "linear"
        and node.inputs[0] == x
        and not any(node.inputs[3:])
        and not node.attributes.get("format")
        and _has_weights(program, node, on)
    )


def _has_weights(program: Program, node: Node, on: Backend) -> bool:
    """Tells whether a linear layer has weights, of sizes that the copy engine takes."""
    weights = [value for value in node.inputs[1:3] if value]
    if node.at_load or node.dtype or not program.constants.issuperset(weights):
        return False
    kinds = {program.types[node.inputs[0]].dtype, program.types[node.output].dtype}
    return kinds == {on.dtype} and all(size % 8 == 0 for size in program.shape(weights[0]))
