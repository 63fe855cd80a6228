"""Small ops of the same expression become one op, which is one launch (ops/foreach.mojo).

A training step begins with casts of all weights, and ends with casts of all gradients and with new
statistics of all batch norms. On a GPU each of these some hundred ops took a launch of 2 µs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import most_members
from maxvision.graphs.passes.elementwise import is_cast, is_expression, text
from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.types import FLOATS

LARGEST = 1 << 21
"""Numbers of a value that is computed at another time, at most.

Caches have forgotten it then, and to read more from memory takes longer than a launch.
"""
OF_INTEGERS = frozenset(("add", "sub", "mul"))
"""The ops that int64 are computed by."""


@dataclass(frozen=True)
class _Kind:
    """What ops have in common that become one.

    Attributes:
        expression: What they compute.
        dtypes: Of their inputs, and of their result.
        layer: What they compute in where others do in less (``Node.dtype``).
    """

    expression: str
    dtypes: tuple[str, ...]
    layer: str


def foreach(program: Program, backend: Backend) -> Program:
    """Computes an expression of many values in one op, on a GPU.

    Either the ops read nothing but inputs of the program, and are computed first, or nothing but
    the caller reads what they give, and they are computed last. So no group needs what needs it.
    """
    if not backend.is_gpu:
        return program
    given, ends = _views_of_inputs(program), _views_for_the_caller(program)
    first: dict[_Kind, list[Node]] = {}
    last: dict[_Kind, list[Node]] = {}
    for node in program.nodes:
        if kind := _kind(program, node):
            if given.issuperset(node.inputs):
                first.setdefault(kind, []).append(node)
            elif node.output in ends:
                last.setdefault(kind, []).append(node)
    start, end = _together(first), _together(last)
    if not start and not end:
        return program
    gone = {value for node in start + end for value in node.outputs}
    rest = [node for node in program.nodes if node.output not in gone]
    ahead = [node for node in rest if node.output in given]
    behind = [node for node in rest if node.op == "reshape" and node.output in ends - given]
    moved = {node.output for node in (*ahead, *behind)}
    between = [node for node in rest if node.output not in moved]
    return rebuilt(program, [*ahead, *start, *between, *end, *behind])


def _views_of_inputs(program: Program) -> set[str]:
    """Names the inputs, and what reshapes give of them."""
    found = set(program.inputs)
    for node in program.nodes:
        if node.op == "reshape" and node.inputs[0] in found:
            found.add(node.output)
    return found


def _views_for_the_caller(program: Program) -> set[str]:
    """Names the outputs that nothing reads, or reshapes for other such outputs alone."""
    found: set[str] = set()
    for node in reversed(program.nodes):
        users = program.users.get(node.output, ())
        if all(user.op == "reshape" and user.output in found for user in users):
            found.add(node.output)
    return found


def _kind(program: Program, node: Node) -> _Kind | None:
    """Gives what ops have in common that become one; nothing if an op is not of this sort."""
    if node.at_load or not (is_expression(node) or is_cast(program, node)):
        return None
    types = [program.types[value] for value in (*node.inputs, node.output)]
    shape, dtypes = types[-1].shape, [each.dtype for each in types]
    kinds = set(dtypes)
    if (
        any(each.shape != shape for each in types)
        or not all(isinstance(size, int) for size in shape)
        or prod(map(int, shape)) > LARGEST
        or not program.constants.isdisjoint(node.inputs)
    ):
        return None
    if kinds == {"int64"}:
        computes = node.op in OF_INTEGERS
    else:
        computes = kinds <= FLOATS | {"bool"} and set(dtypes[:-1]) != {"bool"}
    return _Kind(text(node), tuple(dtypes), node.dtype) if computes else None


def _together(kinds: Mapping[_Kind, Sequence[Node]]) -> list[Node]:
    """Makes one op of several of a kind, or some where these are more than a launch takes."""
    found = []
    for kind, nodes in kinds.items():
        launches = ceil(len(nodes) / most_members(len(nodes[0].inputs)))
        size = ceil(len(nodes) / launches)
        *_, dtype = kind.dtypes
        attributes = {"expression": kind.expression} | ({"dtype": dtype} if dtype != "bool" else {})
        for i in range(0, len(nodes) if len(nodes) > 1 else 0, size):
            some = nodes[i : i + size]
            found.append(
                Node(
                    "foreach",
                    tuple(value for node in some for value in node.inputs),
                    tuple(node.output for node in some),
                    attributes,
                    tuple(layer for node in some for layer in node.layers),
                    next((node.origin for node in some if node.origin), ""),
                    dtype=kind.layer,
                )
            )
    return found
