"""What is known when the model loads is computed then; what is computed twice, once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import EVALUATE
from maxvision.graphs.program import Node, Program, Rewrite, free, rebuilt


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


def common(program: Program, _: Backend) -> Program:
    """Computes once what several ops compute of the same, such as each layer of a mask.

    Where ops only say how numbers lie, other passes look for the one beside its layer.
    """
    names: dict[str, str] = {}
    made: dict[Any, tuple[str, ...]] = {}
    nodes, ends = [], set(program.outputs.values())
    for node in program.nodes:
        node = replace(node, inputs=tuple(names.get(value, value) for value in node.inputs))
        key = node.op, node.inputs, tuple(sorted(node.attributes.items()))
        if node.layers or node.at_load or node.op in _VIEWS or not ends.isdisjoint(node.outputs):
            nodes.append(node)
        elif key in made:
            names.update(zip(node.outputs, made[key], strict=True))
        else:
            made[key] = node.outputs
            nodes.append(node)
    return rebuilt(program, nodes)


_VIEWS = ("reshape", "permute", "slice", "expand", "concat")


def bias(program: Program, _: Backend) -> Program:
    """Takes a vector that is added to each channel of a product for its bias.

    It is a constant, or in training a value behind a product of values.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    for node in program.nodes:
        if node.op != "add" or len(node.inputs) != 2 or node.at_load:
            continue
        for value, added in (node.inputs, node.inputs[::-1]):
            product = program.producers.get(value)
            if product is None or not _takes_bias(program, product, node, added):
                continue
            held, new = _as_float32(program, added), []
            shape = program.types[held].shape
            if len(shape) > 1:
                vector = free(taken, f"{product.name}.bias")
                flat = {"shape": (math.prod(map(int, shape)),)}
                at_load = held in program.constants
                new.append(Node("reshape", (held,), (vector,), flat, at_load=at_load))
                held = vector
            inputs = (*product.inputs[:2], held)
            rewrite.replace(
                [product, node], *new, replace(product, inputs=inputs, outputs=node.outputs)
            )
            break
    return rewrite.done()


def _as_float32(program: Program, vector: str) -> str:
    """Gives a vector as it was before it was rounded to 16 bits, or reshaped.

    Kernels add biases in float32: a cast would be a launch, for fewer digits.
    """
    types, node = program.types, program.producers.get(vector)
    while node is not None and not node.at_load:
        kinds = [types[value].dtype for value in (node.inputs[0], node.output)]
        rounds = node.op == "cast" and kinds in (["float32", "bfloat16"], ["float32", "float16"])
        if not rounds and node.op != "reshape":
            break
        vector = node.inputs[0]
        node = program.producers.get(vector)
    return vector


def _takes_bias(program: Program, product: Node, add: Node, added: str) -> bool:
    """Tells whether ``add`` gives a number to each channel of a product that has no bias.

    A product of matrices takes one if it has one second matrix for all; others are attention's.
    """
    if product.op not in ("linear", "conv2d", "matmul") or product.at_load:
        return False
    second = product.inputs[1]
    if any(product.inputs[2:]) or (
        product.op == "matmul" and len(program.types[second].shape) != 2
    ):
        return False
    of_values = product.op == "matmul" or second not in program.constants
    if added not in program.constants and not of_values:
        return False
    out, held = program.types[product.output].shape, program.types[added].shape
    last = product.op != "conv2d" or product.attributes.get("layout") == "NHWC"
    channels = out[-1] if last else out[1]
    behind = 0 if last else len(out) - 2
    place = len(held) - 1 - behind
    return (
        product.attributes.get("epilogue", "none") == "none"
        and program.only_user(product.output) is add
        and program.types[add.output] == program.types[product.output]
        and "float" in program.types[added].dtype
        and place >= 0
        and held[place] == channels
        and all(size == 1 for axis, size in enumerate(held) if axis != place)
    )


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
            free(taken, f"{conv.name}.{part}") for part in ("scale", "filter", "bias")
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


def scale(program: Program, _: Backend) -> Program:
    """Folds a constant for each channel behind a convolution or linear layer into its weights.

    LayerScale is one (Touvron et al. 2021, arXiv:2103.17239). Images have their channels last.
    """
    rewrite, taken = Rewrite(program), set(program.types)
    for node in program.nodes:
        if node.op != "mul" or len(node.inputs) != 2 or node.at_load:
            continue
        for value, factor in (node.inputs, node.inputs[::-1]):
            product = program.producers.get(value)
            if product is None or not _takes_scale(program, product, node, factor):
                continue
            x, weight, bias = (*product.inputs, "", "")[:3]
            channels = program.types[value].shape[-1]
            vector, scaled, shift = (
                free(taken, f"{product.name}.{part}") for part in ("scale", "scaled", "shift")
            )
            at_load = [
                Node("reshape", (factor,), (vector,), {"shape": (channels,)}, at_load=True),
                Node("scale_filter", (weight, vector), (scaled,), at_load=True),
            ]
            inputs: tuple[str, ...] = (x, scaled)
            if bias:
                at_load.append(Node("mul", (bias, vector), (shift,), at_load=True))
                inputs = (x, scaled, shift)
            new = replace(product, inputs=inputs, outputs=node.outputs)
            rewrite.replace([product, node], *at_load, new)
            break
    return rewrite.done()


def _takes_scale(program: Program, product: Node, mul: Node, factor: str) -> bool:
    """Tells whether ``mul`` multiplies all channels of a product by constants, and nothing else."""
    given, out = product.attributes, program.types[product.output].shape
    by_channel = program.types[factor].shape
    return (
        (product.op == "linear" or (product.op == "conv2d" and given.get("layout") == "NHWC"))
        and not product.at_load
        and given.get("epilogue", "none") == "none"
        and program.constants.issuperset([factor, *filter(None, product.inputs[1:])])
        and program.only_user(product.output) is mul
        and len(by_channel) <= len(out)
        and by_channel[-1:] == out[-1:]
        and all(size == 1 for size in by_channel[:-1])
    )
