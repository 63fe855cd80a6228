"""Casts and moves change places, so that moves read and write 16 bits instead of 32.

Rounding commutes with moves exactly: the numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from maxvision.graphs.program import Node, Program, free, rebuilt
from maxvision.graphs.types import HALVES

MOVES = frozenset(("reshape", "permute", "slice", "concat", "expand", "roll"))
"""Ops that give numbers of what they read, and no others."""

Gives = Callable[[Node, str], bool]
"""Tells whether a node that gives float32 can give another dtype instead."""
Takes = Callable[[Node, str, str], bool]
"""Tells whether a node computes the same if it reads the third in place of the second."""


def narrowed(program: Program, gives: Gives) -> Program:
    """Moves casts from float32 to 16 bits ahead of the moves before them.

    They go up as far as all that read a value round it so, and no launch is added. Casts of a value
    to the same dtype become one, and one of what had as many bits before it was widened goes.
    """
    return _Narrowing(program, gives).run()


def is_move(node: Node) -> bool:
    """Tells whether a node moves numbers whenever the program runs."""
    return node.op in MOVES and not node.at_load and "expression" not in node.attributes


def _widened(program: Program) -> dict[str, str]:
    """Gives what was cast to float32, by the result."""
    types = program.types
    return {
        node.output: node.inputs[0]
        for node in program.nodes
        if node.op == "cast"
        and not node.at_load
        and types[node.output].dtype == "float32"
        and types[node.inputs[0]].dtype in HALVES
        and node.inputs[0] not in program.constants
    }


class _Narrowing:
    """Casts that are moved.

    Attributes:
        wide: What was cast to float32, by the result.
        casts: The name of each value in 16 bits, where a cast gives it.
        joined: The casts that go, or are put elsewhere: what they read, and their dtype.
    """

    def __init__(self, program: Program, gives: Gives) -> None:
        self.program, self.gives = program, gives
        self.ends = set(program.outputs.values())
        self.wide = _widened(program)
        self.casts: dict[tuple[str, str], str] = {}
        self.joined: dict[str, tuple[str, str]] = {}
        found = [node for node in program.nodes if self.narrows(node)]
        for node in sorted(found, key=lambda node: node.output not in self.ends):
            key = node.inputs[0], program.types[node.output].dtype
            before = self.before(*key)
            if before and (node.output not in self.ends or self.is_inner(before)):
                self.casts[key] = before
                self.joined[node.output] = key
                if node.output in self.ends:
                    self.ends.add(before)
            elif not before and (key not in self.casts or node.output not in self.ends):
                self.casts.setdefault(key, node.output)
                self.joined[node.output] = key

    def is_inner(self, value: str) -> bool:
        """Tells whether a value can become an output of the program, which it is not yet."""
        source = self.program.producers.get(value)
        return source is not None and value not in self.ends and not self.narrows(source)

    def narrows(self, node: Node) -> bool:
        """Tells whether a node rounds float32 to 16 bits."""
        if node.op != "cast" or node.at_load or node.inputs[0] in self.program.constants:
            return False
        kinds = [self.program.types[value].dtype for value in (node.inputs[0], node.output)]
        return kinds[0] == "float32" and kinds[1] in HALVES

    def before(self, value: str, dtype: str) -> str:
        """Names what a value was before it was cast to float32, if that has this dtype."""
        source = self.wide.get(value, "")
        return source if source and self.program.types[source].dtype == dtype else ""

    def run(self) -> Program:
        moved = self.moved()
        if not moved and all(self.casts[key] == name for name, key in self.joined.items()):
            return self.program
        nodes = list(self.written(moved))
        outputs = {name: self.current(value) for name, value in self.program.outputs.items()}
        return rebuilt(self.program, nodes, outputs=outputs)

    def moved(self) -> dict[str, str]:
        """Finds the moves to make in 16 bits: what they give, and its dtype."""
        kept: set[str] = set()
        while True:
            moved = self.rounded(kept)
            dear = {value for value, dtype in moved.items() if not self.pays(value, dtype, moved)}
            if not dear:
                return moved
            kept |= dear

    def rounded(self, kept: set[str]) -> dict[str, str]:
        """Finds the moves of which all that is read is rounded; ``kept`` stay as they are."""
        moved: dict[str, str] = {}
        for node in reversed(self.program.nodes):
            if (
                is_move(node)
                and node.output not in kept
                and self.program.constants.isdisjoint(node.inputs)
                and (dtype := self.rounds(node.output, moved))
            ):
                moved[node.output] = dtype
        return moved

    def rounds(self, value: str, moved: dict[str, str]) -> str:
        """Names the dtype to which all that read a value round it, if they do."""
        if value in self.ends:
            return ""
        found = {
            self.joined[node.output][1] if node.output in self.joined else moved.get(node.output)
            for node in self.program.users.get(value, ())
        }
        return (found.pop() or "") if len(found) == 1 else ""

    def pays(self, value: str, dtype: str, moved: dict[str, str]) -> bool:
        """Tells whether a move can be made in 16 bits without a launch more, or a larger cast."""
        given = self.program.producers[value].inputs
        if self.program.producers[value].op == "slice":
            return self.is_free(given[0], dtype, moved)
        casts = [each for each in {*given} if not self.is_given(each, dtype, moved)]
        return len(casts) <= 1

    def is_free(self, value: str, dtype: str, moved: dict[str, str]) -> bool:
        """Tells whether a value takes no cast in 16 bits, nor do those that it is made of."""
        if value in moved:
            given = self.program.producers[value].inputs
            return all(self.is_free(each, dtype, moved) for each in given)
        return self.is_given(value, dtype, moved)

    def is_given(self, value: str, dtype: str, moved: dict[str, str]) -> bool:
        """Tells whether a value is there in 16 bits without a cast of its own."""
        if value in moved or self.before(value, dtype) or (value, dtype) in self.casts:
            return True
        source = self.program.producers.get(value)
        return (
            source is not None
            and source.output == value
            and self.rounds(value, moved) == dtype
            and self.gives(source, dtype)
        )

    def current(self, value: str) -> str:
        """Names what stands for a value in the new program."""
        while value in self.joined and self.casts[self.joined[value]] != value:
            value = self.casts[self.joined[value]]
        return value

    def written(self, moved: dict[str, str]) -> Iterator[Node]:
        """Gives the nodes of the new program."""
        program, taken, there = self.program, set(self.program.types), set[tuple[str, str]]()

        def ready(value: str, dtype: str) -> Iterator[Node]:
            key = value, dtype
            if before := self.before(*key):
                self.casts[key] = before
            elif value not in moved and key not in there:
                there.add(key)
                yield Node("cast", (value,), (name(*key),), {"dtype": dtype})

        def name(value: str, dtype: str) -> str:
            if (value, dtype) not in self.casts:
                self.casts[value, dtype] = free(taken, f"{value}.narrow")
            return self.casts[value, dtype]

        for node in program.nodes:
            if node.output in self.joined:
                yield from ready(*self.joined[node.output])
            elif node.output in moved:
                dtype = moved[node.output]
                for value in node.inputs:
                    yield from ready(value, dtype)
                inputs = tuple(self.current(name(value, dtype)) for value in node.inputs)
                yield replace(node, inputs=inputs, outputs=(name(node.output, dtype),))
            else:
                inputs = tuple(self.current(value) for value in node.inputs)
                yield node if inputs == node.inputs else replace(node, inputs=inputs)


def widened(program: Program, takes: Takes) -> Program:
    """Moves casts from 16 bits to float32 behind the moves of their results.

    There ops that read 16 bits as well do without them.
    """
    wide, ends = _widened(program), set(program.outputs.values())
    taken, nodes = set(program.types), list[Node]()

    @cache
    def is_free(value: str, source: str) -> bool:
        """Tells whether nothing needs a value in float32."""
        return value not in ends and all(
            is_free(node.output, source)
            if is_move(node)
            else takes(node, value, source) or is_back(node, source)
            for node in program.users.get(value, ())
        )

    def is_back(node: Node, source: str) -> bool:
        """Tells whether a node makes a value again what it was before it was cast."""
        return node.op == "cast" and program.types[node.output].dtype == program.types[source].dtype

    roots = dict(wide)  # what was cast, before it was moved
    for node in program.nodes:
        given = [wide.get(value, "") for value in node.inputs]
        if (
            is_move(node)
            and all(given)
            and len({program.types[roots[value]].dtype for value in node.inputs}) == 1
            and (
                is_free(node.output, roots[node.inputs[0]])
                or (
                    node.op != "expand"
                    and all(program.only_user(value) is node for value in node.inputs)
                )
            )
        ):
            narrow = free(taken, f"{node.output}.narrow")
            wide[node.output], roots[node.output] = narrow, roots[node.inputs[0]]
            nodes.append(replace(node, inputs=tuple(given), outputs=(narrow,)))
            node = Node("cast", (narrow,), node.outputs, {"dtype": "float32"})
        nodes.append(node)
    return rebuilt(program, nodes) if len(nodes) > len(program.nodes) else program
