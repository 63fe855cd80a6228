"""Axes that Hopper's copy engine does not take are padded, through all ops that keep them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from max.dtype import DType

from maxvision.graphs.arrange import is_aligned
from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import activation
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free, rebuilt
from maxvision.graphs.types import product, split

MULTIPLE = 8
"""What a padded axis is a multiple of: 16 bytes of 16-bit floats."""
LEAST = 64
"""The smallest axis that is padded; so one grows by less than an eighth."""
FINITE = frozenset(
    "relu gelu gelu_tanh silu sigmoid tanh hardswish hardsigmoid mish softplus clamp leaky_relu elu"
    " prelu neg abs erf sin cos floor add sub mul maximum minimum".split()
)
"""Elementwise ops that give finite numbers for all finite ones, but for an overflow."""
NORMS = ("layer_norm", "rms_norm")
ROWS = (*NORMS, "softmax")
"""Ops that compute the rows of the last axis, each by itself."""


def align(program: Program, on: Backend) -> Program:
    """Pads axes of linear layers to a multiple of 8, for Hopper's tensor cores in 16 bits.

    The copy engine takes rows of a multiple of 16 bytes, which 196 tokens or a hidden layer of 1365
    are not. Such an axis is padded where it begins and cut where it ends. In between it
    stays padded, through permutes, elementwise ops, norms of another axis and linear layers. This
    is done where it takes fewer pads and cuts than there are linear layers to gain.

    Weights that contract the axis get columns of zeros, so that the padding adds nothing to a sum.
    Weights that make the axis get rows of zeros. The padding begins as zeros, and stays finite: in
    front of ops that may give infinity or NaN, such as a division, the axis is cut.

    Where a hidden layer holds infinity or NaN, zeros times it make the padding NaN, and then every
    sum over the axis in that image: an infinity may become NaN. Other images stay as they are.
    Padding that overflows where nothing else does has the same effect; in float16 that may happen.

    The pass runs behind the fusions, so that it prevents none of them, and before ``pointwise``,
    whose expressions hide what is computed.
    """
    if not on.is_hopper:
        return program
    found = _Alignment(_norms_of_tokens(program), on)
    return _Padding(found).run() if found.chosen else program


def _norms_of_tokens(program: Program) -> Program:
    """Norms tokens instead of the image, where the image is reshaped to tokens beside its norm.

    Then one pad of these tokens does for both.
    """
    rewrite = Rewrite(program)
    order = {node.output: i for i, node in enumerate(program.nodes)}
    for norm in program.nodes:
        after = program.only_user(norm.output)
        if norm.op != "layer_norm" or after is None or after.op != "reshape":
            continue
        image, tokens = norm.inputs[0], program.types[after.output]
        beside = [
            each
            for each in program.users[image]
            if each.op == "reshape" and program.types[each.output] == tokens
        ]
        if not beside or tokens.shape[-1] != program.types[image].shape[-1]:
            continue
        held = beside[0]
        if order[held.output] > order[norm.output] and not rewrite.has(held):
            rewrite.replace([held], held, place=norm)
        inputs = (held.output, *norm.inputs[1:])
        rewrite.replace(
            [norm, after], replace(norm, inputs=inputs, outputs=after.outputs), place=norm
        )
    return rewrite.done()


Axis = tuple[str, int]
"""A value and one of its axes."""


@dataclass(frozen=True)
class _Kept:
    """An axis that an op keeps, or contracts.

    Attributes:
        inputs: Which axis it is of each input that has it, by the input's place.
        output: Which it is of the output; None if it is contracted.
    """

    inputs: Mapping[int, int]
    output: int | None


def _kept(program: Program, node: Node) -> Iterator[_Kept]:
    """Finds the axes along which an op may be padded, all but the batch and those of size 1."""
    if node.at_load or len(node.outputs) > 1:
        return
    given, shape = node.attributes, program.types[node.output].shape
    shapes = [program.types[name].shape if name else () for name in node.inputs]
    if node.op == "linear":
        yield from _of_linear(program, node)
    elif node.op == "permute":
        axes: tuple[int, ...] = given["axes"]  # type: ignore[assignment]
        yield from (_Kept({0: axis}, i) for i, axis in enumerate(axes))
    elif node.op == "reshape":
        held = shapes[0]
        for i, size in enumerate(shape):
            for a, same in enumerate(held):
                if size == same != 1 and product(shape[:i]) == product(held[:a]):
                    yield _Kept({0: a}, i)
    elif node.op in ROWS:
        eps = given.get("eps", 1e-5)
        if node.op not in NORMS or (isinstance(eps, float) and eps > 0):
            yield from (_Kept({0: axis}, axis) for axis in range(len(shape) - 1))
    elif _is_finite(node) or _is_cast(program, node):
        for i, size in enumerate(shape):
            places = {n: i - len(shape) + len(held) for n, held in enumerate(shapes)}
            yield _Kept(
                {n: a for n, a in places.items() if a >= 0 and shapes[n][a] == size != 1}, i
            )


def _of_linear(program: Program, node: Node) -> Iterator[_Kept]:
    bias, residual = (*node.inputs[2:], "", "")[:2]
    last = len(program.types[node.inputs[0]].shape) - 1
    added = {3} if residual else set()
    ends = activation(str(node.attributes.get("epilogue", "none"))).split(" ")[-1]
    if _is_dense(program, node):
        yield _Kept({0: last, 1: 1}, None)
    if ends and ends not in FINITE:
        return
    if _is_dense(program, node):
        vector = {2: 0} if bias else {}
        yield _Kept({1: 0, **vector, **dict.fromkeys(added, last)}, last)
    yield from (_Kept(dict.fromkeys({0, *added}, axis), axis) for axis in range(last))


def _is_dense(program: Program, node: Node) -> bool:
    """Tells whether a linear layer multiplies an activation by a weight that has no format."""
    return (
        node.op == "linear"
        and not node.attributes.get("format")
        and program.constants.issuperset(filter(None, node.inputs[1:3]))
        and node.inputs[0] not in program.constants
    )


def _is_finite(node: Node) -> bool:
    other = node.attributes.get("other", 0)
    return node.op in FINITE and isinstance(other, (int, float)) and math.isfinite(other)


def _is_cast(program: Program, node: Node) -> bool:
    kinds = [program.types[name].dtype for name in (node.inputs[0], node.output)]
    return node.op == "cast" and all("float" in kind for kind in kinds)


def pays(edges: int, gained: float) -> bool:
    """Tells whether so many pads and cuts are few for the linear layers that gain from them."""
    return edges < gained


class _Alignment:
    """The regions of axes that are padded together, and which of them are."""

    def __init__(self, program: Program, on: Backend) -> None:
        self.program = program
        self.on = on
        self.parents: dict[Axis, Axis] = {}
        self.kept: dict[str, list[_Kept]] = {}  # by the node's output
        for node in program.nodes:
            self.kept[node.output] = found = []
            for kept in _kept(program, node):
                axes = self.axes(node, kept)
                if axes and all(self.may_grow(axis) for axis in axes):
                    found.append(kept)
                    for axis in axes:
                        self.parents[self.region(axis)] = self.region(axes[0])
        self.chosen = self.choose()

    def axes(self, node: Node, kept: _Kept) -> list[Axis]:
        """Lists an axis as that of each value that has it; weights are padded by themselves."""
        named = [(node.inputs[n], axis) for n, axis in kept.inputs.items()]
        held = [axis for axis in named if axis[0] not in self.program.constants]
        return held if kept.output is None else [*held, (node.output, kept.output)]

    def may_grow(self, axis: Axis) -> bool:
        """Tells whether an axis is no multiple, and long enough to pad."""
        size = self.program.types[axis[0]].shape[axis[1]]
        return isinstance(size, int) and size >= LEAST and size % MULTIPLE > 0

    def region(self, axis: Axis) -> Axis:
        """Names the region of an axis by one of its axes."""
        while (parent := self.parents.setdefault(axis, axis)) != axis:
            axis = parent
        return axis

    def regions(self, node: Node) -> dict[Axis, list[_Kept]]:
        """Gives the axes that a node keeps, by their regions."""
        found: dict[Axis, list[_Kept]] = {}
        for kept in self.kept[node.output]:
            found.setdefault(self.region(self.axes(node, kept)[0]), []).append(kept)
        return found

    def choose(self) -> set[Axis]:
        """Chooses the regions that pay.

        A layer that needs two counts half for each. The region that pays least is dropped first:
        layers that need it no longer count for the others.
        """
        needs = [found for node in self.program.nodes if (found := self.needs(node))]
        chosen = {region for each in needs for region in each}
        edges = dict.fromkeys(sorted(chosen), 0)
        for region in self.edges():
            if region in edges:
                edges[region] += 1
        while chosen:
            gained = [each for each in needs if each <= chosen]
            gains = {
                region: sum(1 / len(each) for each in gained if region in each)
                for region in edges
                if region in chosen
            }
            worst = min(gains, key=lambda region: gains[region] - edges[region])
            if pays(edges[worst], gains[worst]):
                break
            chosen.remove(worst)
        return chosen

    def needs(self, node: Node) -> set[Axis]:
        """Gives the regions to pad for a linear layer to run on Hopper's tensor cores.

        There are none if it does so already, or cannot, or has one row an image: too little work
        to gain.
        """
        if not _is_dense(self.program, node):
            return set()
        dtype = DType[node.dtype or self.on.dtype]
        f, k = self.program.shape(node.inputs[1])
        shape = self.program.types[node.output].shape
        rows = math.prod(split(size)[0] for size in shape[:-1])
        if dtype.size_in_bytes != 2 or rows == 1 or is_aligned((1, 1, k, f), dtype):
            return set()
        ends = [axis for axis, size in ((1, k), (0, f)) if size % MULTIPLE]
        found = [
            region
            for region, each in self.regions(node).items()
            for kept in each
            if kept.inputs.get(1) in ends
        ]
        return set(found) if len(found) == len(ends) else set()

    def edges(self) -> Iterator[Axis]:
        """Names the region of each axis that has to be padded or cut."""
        program, made, cut = self.program, set[Axis](), set[Axis]()
        for node in program.nodes:
            for kept in self.kept[node.output]:
                if kept.output is not None:
                    made.add((node.output, kept.output))
            for n, value in enumerate(node.inputs):
                axes = {kept.inputs.get(n) for kept in self.kept[node.output]}
                shape = program.types[value].shape if value else ()
                cut |= {(value, axis) for axis in range(len(shape)) if axis not in axes}
        for value in program.outputs.values():
            cut |= {(value, axis) for axis in range(len(program.types[value].shape))}
        for axis in list(self.parents):
            if axis not in made or axis in cut:
                yield self.region(axis)


class _Padding:
    """Writes a program with some of its axes padded."""

    def __init__(self, alignment: _Alignment) -> None:
        self.alignment = alignment
        self.program = alignment.program
        self.nodes: list[Node] = []
        self.taken = set(self.program.types)
        self.made: dict[str, frozenset[int]] = {}  # the axes that are padded as a value is made
        self.names: dict[tuple[str, frozenset[int]], str] = {}  # with these axes padded

    def run(self) -> Program:
        """Writes it."""
        for node in self.program.nodes:
            self.place(node)
        for value in self.program.outputs.values():
            self.padded(value, frozenset())
        return rebuilt(self.program, self.nodes)

    def place(self, node: Node) -> None:
        """Puts a node down, on the padded axes that it keeps."""
        chosen = self.alignment.chosen
        kept = [
            each
            for region, found in self.alignment.regions(node).items()
            if region in chosen
            for each in found
        ]
        inputs = tuple(
            self.padded(value, frozenset(each.inputs[n] for each in kept if n in each.inputs))
            for n, value in enumerate(node.inputs)
        )
        grown = frozenset(each.output for each in kept if each.output is not None)
        if not grown:
            self.nodes.append(replace(node, inputs=inputs))
            return
        name = self.name(node.output, grown)
        self.made[node.output] = grown
        if node.op == "reshape":
            sizes = enumerate(self.program.types[node.output].shape)
            shape = (
                s + -s % MULTIPLE if a in grown and isinstance(s, int) else s for a, s in sizes
            )
            node = node.with_attributes(shape=tuple(shape))
        self.nodes.append(replace(node, inputs=inputs, outputs=(name,)))

    def padded(self, value: str, axes: frozenset[int]) -> str:
        """Names a value with these axes padded, and no others; makes it if it is not there."""
        made = self.made.get(value, frozenset())
        if not value or axes == made or (value, axes) in self.names:
            return self.names.get((value, axes), value)
        held, name = self.names.get((value, made), value), self.name(value, axes)
        steps: list[tuple[str, Mapping[str, Attribute]]] = []
        for axis in sorted(made - axes):
            size = self.program.types[value].shape[axis]
            steps.append(("slice", {"axis": axis, "start": 0, "stop": size}))
        if new := axes - made:
            sizes = enumerate(self.program.types[value].shape)
            more = (-s % MULTIPLE if a in new and isinstance(s, int) else 0 for a, s in sizes)
            pads = tuple(n for each in more for n in (0, each))
            steps.append(("pad", {"pads": pads}))
        for i, (op, attributes) in enumerate(steps, 1):
            after = name if i == len(steps) else free(self.taken, f"{value}.{op}")
            at_load = value in self.program.constants
            self.nodes.append(Node(op, (held,), (after,), attributes, at_load=at_load))
            held = after
        return name

    def name(self, value: str, axes: frozenset[int]) -> str:
        """Takes a name for a value with these axes padded: its own if there are none."""
        name = free(self.taken, f"{value}.padded") if axes else value
        self.names[value, axes] = name
        return name
