"""Rows that only change their place, as those of windows do, are read where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from max.dtype import DType

from maxvision.graphs.backend import Backend
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.shapes import MOST_ROW_AXES
from maxvision.graphs.types import Size, split
from maxvision.graphs.views import View

MOVES = ("roll", "reshape", "permute")
"""The ops that give rows another order."""
MOST_BYTES = 2048
"""Bytes of a row that a GPU's kernel takes."""


def rows(program: Program, on: Backend) -> Program:
    """Norms rows, adds them up, or both, as it gives them another place, in one op.

    Swin (Liu et al. 2021, arXiv:2103.14030) norms an image, rolls it and cuts it into windows; puts
    windows together, rolls that back, adds it to the image and norms the sum: two ops then. A roll
    and a permute alone are one. CvT norms tokens and puts a class token before them.
    """
    return _Rows(program, on).run()


@dataclass(frozen=True)
class _Order:
    """A roll of an image of rows and a permute of its axes, one after the other.

    Attributes:
        size: Rows down and across the image that is rolled.
        shifts: How far it is.
        shape: The axes of an image's rows before the permute.
        axes: How they are permuted.
        rolls_first: Whether the permute comes behind the roll.
    """

    size: tuple[int, int]
    shifts: tuple[int, int]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    rolls_first: bool

    @property
    def attributes(self) -> dict[str, Attribute]:
        """What ``gather_rows`` is told."""
        return {
            "size": self.size,
            "shifts": self.shifts,
            "shape": self.shape,
            "axes": self.axes,
            "rolls_first": self.rolls_first,
        }


class _Rows:
    def __init__(self, program: Program, on: Backend) -> None:
        self.program = program
        self.on = on
        self.rewrite = Rewrite(program)
        self.taken = set(program.types)

    def run(self) -> Program:
        """Rewrites norms first, then sums with the norm behind them, then what is left of rolls."""
        for node in self.program.nodes:
            if node.op == "layer_norm":
                self.norm(node)
                self.class_token(node)
        for node in self.program.nodes:
            if node.op == "add" and len(node.inputs) == 2 and not node.at_load:
                self.add(node)
        for node in self.program.nodes:
            if node.op == "roll" and not self.rewrite.has(node):
                self.roll(node)
        return self.rewrite.done()

    def norm(self, norm: Node) -> None:
        """Norms rows and then gives them another order, or the other way round."""
        moves, order = self.behind(norm.output)
        if order is None:
            moves, order = self.before(norm.inputs[0], norm)
        if order is None or not self.takes(moves[0].inputs[0], norm):
            return
        first, last = (norm, moves[-1]) if norm.output == moves[0].inputs[0] else (moves[0], norm)
        new = self.gathered(order, first.inputs[0], norm=norm, y=last.output)
        self.rewrite.replace([norm, *moves], *new, place=last)

    def class_token(self, norm: Node) -> None:
        """Norms tokens, or an image of them, and puts a class token before them."""
        types, x, gone = self.program.types, norm.inputs[0], [norm]
        while (node := self.program.only_user(gone[-1].output)) and node.op == "reshape":
            gone.append(node)
        if node is None or node.op != "class_token" or len(node.inputs) > 2:
            return
        tokens, token = node.inputs
        if (
            not self.takes(x, norm)
            or types[tokens].shape[-1] != self.channels(x)
            or not self.program.constants.issuperset(norm.inputs[1:])
        ):
            return
        flat = free(self.taken, f"{x}.rows") if len(gone) > 1 else x
        reshape = Node("reshape", (x,), (flat,), {"shape": types[tokens].shape})
        new = Node(
            "class_token",
            (flat, token, *norm.inputs[1:]),
            node.outputs,
            {"eps": norm.attributes.get("eps", 1e-5)},
            norm.layers,
        )
        self.rewrite.replace([*gone, node], *([reshape] if flat != x else []), new)

    def add(self, add: Node) -> None:
        """Adds rows in another order to others, and norms the sum if a norm is behind it."""
        types = self.program.types
        for value, onto in (add.inputs, add.inputs[::-1]):
            moves, order = self.before(value, add)
            if order is None or not self.takes(moves[0].inputs[0]) or self.rewrite.has(add):
                continue
            if {types[value], types[onto]} != {types[add.output]}:
                continue
            norm = self.norm_of(add.output)
            if norm and not self.takes(moves[0].inputs[0], norm):
                norm = None
            y = norm.output if norm else add.output
            total = add.output if norm else ""
            new = self.gathered(order, moves[0].inputs[0], onto=onto, norm=norm, total=total, y=y)
            self.rewrite.replace([*moves, add, *([norm] if norm else [])], *new, place=add)
            return

    def roll(self, roll: Node) -> None:
        """Rolls and permutes rows at once."""
        moves, order = self.behind(roll.inputs[0], roll)
        if order is None or not any(node.op == "permute" for node in moves):
            moves, order = self.before(roll.output, None)
        if order and self.takes(moves[0].inputs[0]) and any(node.op == "permute" for node in moves):
            new = self.gathered(order, moves[0].inputs[0], y=moves[-1].output)
            self.rewrite.replace(moves, *new)

    def takes(self, x: str, norm: Node | None = None) -> bool:
        """Tells whether the device has a kernel for the rows of x, and for a norm of them."""
        c, kind = self.channels(x), self.program.types[x].dtype
        if norm:
            y = self.program.types[norm.output]
            if (y.shape[-1], y.dtype) != (c, kind) or self.rewrite.has(norm):
                return False
        bytes = int(c) * DType[kind].size_in_bytes
        fits = not self.on.is_gpu or (bytes % 16 == 0 and bytes <= MOST_BYTES)
        return "float" in kind and x not in self.program.constants and fits

    def norm_of(self, value: str) -> Node | None:
        """Finds a layer norm of a value, or of a reshape that keeps its rows."""
        for node in self.program.users.get(value, ()):
            if node.op == "reshape" and self.channels(node.output) == self.channels(value):
                if (norm := self.norm_of(node.output)) is not None:
                    return norm
            elif node.op == "layer_norm" and not self.rewrite.has(node):
                return node
        return None

    def channels(self, value: str) -> Size:
        return self.program.types[value].shape[-1]

    # --- chains of moves -------------------------------------------------------------------------

    def behind(self, value: str, first: Node | None = None) -> tuple[list[Node], _Order | None]:
        """Finds the longest chain of moves that alone reads a value, and what it comes to."""
        moves: list[Node] = []
        node = first or self.program.only_user(value)
        while node is not None and node.op in MOVES and not self.rewrite.has(node):
            moves.append(node)
            node = self.program.only_user(node.output)
        while moves and (order := self.order(moves)) is None:
            moves.pop()
        return (moves, order) if moves else ([], None)

    def before(self, value: str, user: Node | None) -> tuple[list[Node], _Order | None]:
        """Finds the longest chain of moves that gives a value to one node alone."""
        moves: list[Node] = []
        node = self.program.producers.get(value)
        while node is not None and node.op in MOVES and not self.rewrite.has(node):
            if user is not None and self.program.only_user(node.output) is not user:
                break
            moves.insert(0, node)
            user, node = node, self.program.producers.get(node.inputs[0])
        while moves and (order := self.order(moves)) is None:
            moves.pop(0)
        return (moves, order) if moves else ([], None)

    def order(self, moves: Sequence[Node]) -> _Order | None:
        """Says what moves come to; None if they do not move whole rows, or do not move them."""
        program = self.program
        shape = program.types[moves[0].inputs[0]].shape
        c, rolls = shape[-1], [i for i, node in enumerate(moves) if node.op == "roll"]
        if len(rolls) > 1 or any(node.at_load for node in moves) or not isinstance(c, int):
            return None
        at = rolls[0] if rolls else len(moves)
        before, after = self.view(moves[:at], shape), None
        if rolls:
            after = self.view(moves[at + 1 :], program.types[moves[at].output].shape)
        else:
            after = View.of(program.types[moves[-1].output].shape)
        if before is None or after is None or not (before.keeps_order or after.keeps_order):
            return None
        parts = _rows_of(after if before.keeps_order else before, c)
        if parts is None:
            return None
        size: tuple[int, int] = (1, math.prod(parts[0]))
        shifts: tuple[int, int] = (0, 0)
        if rolls:
            roll = moves[at]
            held, turned = program.types[roll.output].shape, roll.attributes
            turns = dict(zip(turned["axes"], turned["shifts"], strict=True))  # type: ignore[arg-type]
            if len(held) != 4 or held[-1] != c or not set(turns) <= {1, 2}:
                return None
            size = int(held[1]), int(held[2])
            shifts = int(turns.get(1, 0)), int(turns.get(2, 0))
            if math.prod(size) != math.prod(parts[0]):
                return None
        elif before.keeps_order:
            return None
        return _Order(size, shifts, *parts, rolls_first=before.keeps_order)

    def view(self, moves: Sequence[Node], shape: Sequence[Size]) -> View | None:
        """Looks at a value through permutes and reshapes."""
        view: View | None = View.of(shape)
        for node in moves:
            given = node.attributes
            if view is not None and node.op == "permute":
                view = view.permuted(given["axes"])  # type: ignore[arg-type]
            elif view is not None:
                view = view.reshaped(given["shape"])  # type: ignore[arg-type]
        return view

    # --- the op ----------------------------------------------------------------------------------

    def gathered(
        self, order: _Order, x: str, *, onto: str = "", norm: Node | None = None, total: str = "",
        y: str,
    ) -> list[Node]:  # fmt: skip
        """Makes the op, on [N, R, C], and the reshapes around it."""
        types = self.program.types
        nodes: list[Node] = []
        n, count, c = types[x].shape[0], math.prod(order.size), types[x].shape[-1]
        flat = (split(n)[1], count, c)

        def reshaped(value: str) -> str:
            if not value or types[value].shape == flat:
                return value
            name = free(self.taken, f"{value}.rows")
            nodes.append(Node("reshape", (value,), (name,), {"shape": flat}))
            return name

        inputs = (reshaped(x), reshaped(onto), *(norm.inputs[1:] if norm else ("", "")))
        attributes = order.attributes
        if norm:
            attributes["eps"] = norm.attributes.get("eps", 1e-5)
        results = [value for value in (total, y) if value]
        names = [
            value if types[value].shape == flat else free(self.taken, f"{value}.rows")
            for value in results
        ]
        layers = norm.layers if norm else ()
        nodes.append(Node("gather_rows", inputs, tuple(names), attributes, layers))
        for value, name in zip(results, names, strict=True):
            if value != name:
                shape = {"shape": types[value].shape}
                nodes.append(Node("reshape", (name,), (value,), shape))
        return nodes


def _rows_of(view: View, c: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Gives the axes of an image's rows of ``c`` numbers, and how a view permutes them."""
    first, axes, _ = view.steps()
    numbers = [size for size in first if isinstance(size, int)]
    if len(numbers) != len(first) - 1 or first[0] in numbers or axes[0] != 0 or not numbers:
        return None  # images do not come first, or are of one number
    if axes[-1] != len(axes) - 1 or numbers[-1] % c:
        return None
    shape, order = [*numbers[:-1], numbers[-1] // c], [axis - 1 for axis in axes[1:]]
    if shape[-1] == 1 and len(shape) > 1:
        shape, order = shape[:-1], order[:-1]
    return (tuple(shape), tuple(order)) if len(shape) <= MOST_ROW_AXES else None
