"""Reductions read expressions of several values; several become one launch (ops/reduce).

Norms by the batch and the gradients of norms reduce what is computed of values of full size. To
write this down and to read it again would move most of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import (
    BETWEEN,
    MOST_TERMS,
    MOST_VALUES,
    REDUCTIONS,
    is_truth,
)
from maxvision.graphs.passes.elementwise import is_expression, text
from maxvision.graphs.passes.finish import MOST_WORDS, finished
from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.shapes import MOST_AXES, broadcast, lies
from maxvision.graphs.types import Size, at_batch

COSTLY = frozenset(
    "gelu gelu_tanh silu sigmoid tanh mish softplus elu exp log erf sin cos pow".split()
)
"""Ops that are not computed twice: a CPU takes longer for them than for what they read."""
SMALL = 16
"""How many times larger the whole is than what counts as nothing beside it."""
APART = 32
"""How far apart in a program reductions may be that become one."""


def reductions(program: Program, backend: Backend) -> Program:
    """Lets reductions read expressions, where less memory is read and written for it.

    An expression goes into all that reads it, reductions and other expressions, if what these read
    in its place is no more than what is written and read of it; or into reductions alone, if each
    reads less. Behind ``pointwise``, which makes one node of those that have one reader. On a GPU,
    where each launch takes its time, their kernels compute what stands behind them, too.
    """
    program = _together(_Taking(program).run())
    return finished(program) if backend.is_gpu else program


class _Taking:
    """Puts expressions into what reads them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = {node.output: node for node in program.nodes}
        self.readers = {value: {n.output for n in users} for value, users in program.users.items()}
        self.kept = {*program.outputs.values()}

    def run(self) -> Program:
        marked = self.marked()
        before = dict(self.nodes)
        for name in [node.output for node in self.program.nodes if node.output in marked]:
            self.take(self.nodes[name])
        same = self.nodes == before
        return self.program if same else rebuilt(self.program, [*self.nodes.values()])

    def marked(self) -> set[str]:
        """Finds the expressions that reductions read, directly or through others."""
        found: set[str] = set()
        for node in reversed(self.program.nodes):
            if (node.op in REDUCTIONS and not node.at_load) or node.output in found:
                for value in node.inputs:
                    source = self.program.producers.get(value)
                    if source and self.fits(source) and self.whole(node) == self.shape(value):
                        found.add(value)
        return found

    def take(self, under: Node) -> None:
        """Puts an expression into all that reads it, or into reductions, or nowhere."""
        value, read = under.output, _large(self.program, under)
        readers = [self.nodes[name] for name in self.readers.get(value, ())]
        made = {reader.output: self.joined(reader, under) for reader in readers}
        more = {  # bytes that each would read in the place of this
            reader.output: sum(read[each] for each in read if each not in reader.inputs)
            for reader in readers
        }
        size = _bytes(self.program, value)
        cheap = len(readers) == 1 or COSTLY.isdisjoint(text(under).split(" "))
        if value not in self.kept and readers and cheap and all(made.values()):
            whole = sum(more.values()) <= sum(read.values()) + size * (1 + len(readers))
        else:
            whole = False
        for reader in readers:
            new = made[reader.output]
            less = cheap and reader.op in REDUCTIONS and more[reader.output] < size
            if new and (whole or less):
                if whole and reader is readers[0]:
                    new = replace(new, layers=(*under.layers, *new.layers))
                self.put(reader, new)

    def put(self, old: Node, new: Node) -> None:
        """Puts a node in the place of another one of the same output."""
        for value in old.inputs:
            self.readers[value].discard(old.output)
        for value in new.inputs:
            self.readers.setdefault(value, set()).add(new.output)
        self.nodes[old.output] = new

    def fits(self, node: Node) -> bool:
        """Tells whether a node is an expression of floats that may go into another one."""
        if not is_expression(node):
            return False
        types = self.program.types
        dtypes = {types[value].dtype for value in node.inputs}
        return (
            all("float" in dtype or dtype == "bool" for dtype in dtypes)
            and dtypes != {"bool"}
            and not self.program.constants.issuperset(node.inputs)
        )

    def joined(self, reader: Node, under: Node) -> Node | None:
        """Puts an expression in the place of its result; nothing if no kernel computes this."""
        types, value = self.program.types, under.output
        if (
            reader.at_load
            or reader.dtype != under.dtype
            or self.whole(reader) != self.shape(value)
            or not (reader.op in REDUCTIONS or self.fits(reader))
        ):
            return None
        words: list[str] = []
        inner = _named(text(under), under.inputs)
        for word in _named(text(reader), reader.inputs):
            words += inner if word == f"x{value}" else [word]
        expression, inputs = _numbered(words)
        given = [types[each] for each in inputs]
        narrow = {each.dtype for each in given} - {"bool", "float32"}
        if len(inputs) > MOST_VALUES or len(words) > MOST_WORDS or len(narrow) > 1:
            return None
        dtype = types[reader.output].dtype
        if reader.op in REDUCTIONS:
            if "float" not in dtype or lies(given, reader.attributes["axes"]) is None:  # type: ignore[arg-type]
                return None
            made = reader.with_attributes(expression=expression, dtype=dtype)
            return replace(made, inputs=inputs)
        if len(self.shape(value)) > MOST_AXES or is_truth(expression) != (dtype == "bool"):
            return None
        attributes = {"expression": expression} | ({} if dtype == "bool" else {"dtype": dtype})
        return replace(reader, op="pointwise", inputs=inputs, attributes=attributes)

    def shape(self, value: str) -> tuple[Size, ...]:
        return self.program.types[value].shape

    def whole(self, node: Node) -> tuple[Size, ...]:
        """Gives the shape of what is computed, or of what is reduced."""
        if node.op in REDUCTIONS:
            return broadcast(node.op, *(self.program.types[value] for value in node.inputs))
        return self.shape(node.output)


def _named(expression: str, inputs: Sequence[str]) -> list[str]:
    """Takes an expression apart, with its values by their names."""
    words = expression.split(" ")
    return [f"x{inputs[int(w[1:])]}" if w[:1] == "x" else w for w in words]


def _numbered(words: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Writes an expression down; its values become inputs."""
    words = list(words)
    inputs = list(dict.fromkeys(word[1:] for word in words if word[:1] == "x"))
    found = (f"x{inputs.index(word[1:])}" if word[:1] == "x" else word for word in words)
    return " ".join(found), tuple(inputs)


def _bytes(program: Program, value: str) -> int:
    """Counts the bytes of a value, of one image."""
    kind = program.types[value]
    wide = {"bool": 1, "bfloat16": 2, "float16": 2}.get(kind.dtype, 4)
    return wide * prod(at_batch(size, 1) for size in kind.shape)


def _large(program: Program, node: Node) -> dict[str, int]:
    """Gives the bytes of what an expression reads, but for vectors and other small values."""
    limit = _bytes(program, node.output) // SMALL
    sizes = {value: _bytes(program, value) for value in node.inputs}
    return {value: size for value, size in sizes.items() if size > limit}


def _together(program: Program) -> Program:
    """Makes one node of reductions of the same axes that read a value of full size together."""
    nodes, changed = [*program.nodes], False
    for i, first in enumerate(nodes):
        for j in range(i + 1, min(i + APART, len(nodes)) if first.op in REDUCTIONS else 0):
            if (new := _merged(program, first, nodes[j])) and not _reads(nodes[i : j + 1]):
                nodes[i] = first = new
                nodes[j] = replace(nodes[j], op="")
                changed = True
    if not changed:
        return program
    return rebuilt(program, _ordered([node for node in nodes if node.op]))


def _merged(program: Program, first: Node, second: Node) -> Node | None:
    """Makes one node of two reductions, if one launch computes both."""
    types = program.types
    if (
        first.op != second.op
        or first.at_load
        or second.at_load
        or first.dtype != second.dtype
        or types[first.output] != types[second.output]
        or "float" not in types[first.output].dtype
        or any(first.attributes.get(n) != second.attributes.get(n) for n in ("axes", "keepdim"))
        or len(first.outputs) + len(second.outputs) > MOST_TERMS
    ):
        return None
    sides = [broadcast(n.op, *(types[value] for value in n.inputs)) for n in (first, second)]
    words = [
        *_named(text(first), first.inputs),
        BETWEEN.strip(),
        *_named(text(second), second.inputs),
    ]
    expression, inputs = _numbered(words)
    given = [types[value] for value in inputs]
    shared = set(first.inputs) & set(second.inputs)
    whole = any(types[value].shape == sides[0] for value in shared)
    narrow = {each.dtype for each in given} - {"bool", "float32"}
    if (
        sides[0] != sides[1]
        or not whole
        or len(inputs) > MOST_VALUES
        or len(narrow) > 1
        or lies(given, first.attributes["axes"]) is None  # type: ignore[arg-type]
    ):
        return None
    made = first.with_attributes(expression=expression, dtype=types[first.output].dtype)
    layers = (*first.layers, *second.layers)
    return replace(made, inputs=inputs, outputs=(*first.outputs, *second.outputs), layers=layers)


def _reads(nodes: Sequence[Node]) -> bool:
    """Tells whether the last of some nodes needs the first one."""
    needed = set(nodes[-1].inputs)
    for node in reversed(nodes[:-1]):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            if node is nodes[0]:
                return True
    return False


def _ordered(nodes: Sequence[Node]) -> list[Node]:
    """Puts each node behind those that it reads from."""
    made_by = {value: node for node in nodes for value in node.outputs}
    done: set[str] = set()
    found: list[Node] = []
    for start in nodes:
        left = [start]
        while left:
            node = left[-1]
            before = [made_by[v] for v in node.inputs if v in made_by]
            missing = [each for each in before if each.output not in done]
            left += missing
            if not missing:
                left.pop()
                if node.output not in done:
                    done.add(node.output)
                    found.append(node)
    return found
