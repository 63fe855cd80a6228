"""Elementwise ops in a row become one expression, which is one launch (ops/pointwise.mojo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from maxvision.graphs.backend import Backend
from maxvision.graphs.elementwise import (
    ELEMENTWISE,
    MOST_PARTS,
    MOST_VALUES,
    MOST_VECTORS,
    REDUCTIONS,
    expression,
)
from maxvision.graphs.passes import moves
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.quantize import STORED
from maxvision.graphs.shapes import MOST_AXES, infer
from maxvision.graphs.types import Type, product

NORMS = {"layer_norm": 1, "layer_norm_grad": 2}
"""Norms that read and write any floats, and how many of their inputs are no weights."""
SMALL = 1 << 13
"""Numbers of a value, as of a batch's statistics, that is computed wherever it is read."""


def pointwise(program: Program, _: Backend) -> Program:
    """Fuses trees of elementwise ops, and batch norms that no convolution took.

    A value goes into an expression if it has the shape of the result, and nobody else reads it or
    it is small. Of a batch norm, scale and shift are computed when the model loads.
    """
    return _Fusion(program).run()


def casts(program: Program, backend: Backend) -> Program:
    """Makes a cast between floats part of the op before it, or of what is behind it.

    Expressions, reductions and layer norms compute in float32, whatever they read, and whatever
    they write. Where moves stand between the cast and such an op, they change places.
    """
    program = moves.widened(program, partial(_reads, program, backend))
    program = moves.narrowed(program, partial(_gives, backend))
    rewrite = Rewrite(program)
    for node in program.nodes:
        read = NORMS.get(node.op, len(node.inputs))
        inputs = tuple(_before_cast(program, value) for value in node.inputs[:read])
        inputs += node.inputs[read:]
        if not node.at_load and inputs != node.inputs and _mixes(program, backend, node, inputs):
            rewrite.replace([node], _computing(program, replace(node, inputs=inputs)))
    program = rewrite.done()
    rewrite = Rewrite(program)
    for node in program.nodes:
        source = program.producers.get(node.inputs[0]) if is_cast(program, node) else None
        if (
            source is not None
            and not source.at_load
            and _gives(backend, source, program.types[node.output].dtype)
            and not rewrite.has(source)
            and program.only_user(source.output) is node
            and "float" in program.types[source.output].dtype
        ):
            outputs = (*node.outputs, *source.outputs[1:])
            made = _computing(program, replace(source, outputs=outputs))
            rewrite.replace([source, node], made, place=source)
    return rewrite.done()


def is_cast(program: Program, node: Node | None) -> bool:
    """Tells whether a node casts floats to other floats."""
    if node is None or node.op != "cast":
        return False
    return all("float" in program.types[v].dtype for v in (node.inputs[0], node.output))


def _before_cast(program: Program, value: str) -> str:
    """Gives what a value was before it was cast to float32."""
    cast = program.producers.get(value)
    wide = value and program.types[value].dtype == "float32"
    return cast.inputs[0] if cast and wide and is_cast(program, cast) else value


def _takes(program: Program, backend: Backend, node: Node, values: Sequence[str]) -> bool:
    """Tells whether a node is a norm whose kernels take values of these dtypes."""
    dtypes = (program.types[value].dtype for value in values)
    return node.op in NORMS and _norms(backend).issuperset(dtypes)


def _norms(backend: Backend) -> set[str]:
    """Names the dtypes that the kernels of norms read and write."""
    return {"float32", "bfloat16", *(["float16"] if backend.is_gpu else [])}


def _gives(backend: Backend, node: Node, dtype: str) -> bool:
    """Tells whether a node can round its first output to another dtype of floats."""
    return is_expression(node) or (node.op in NORMS and dtype in _norms(backend))


def _reads(program: Program, backend: Backend, node: Node, value: str, narrow: str) -> bool:
    """Tells whether a node computes the same of what a value was before a cast to float32."""
    read = NORMS.get(node.op, len(node.inputs))
    inputs = [narrow if each == value else _before_cast(program, each) for each in node.inputs]
    return (
        value not in node.inputs[read:]
        and not node.at_load
        and _mixes(program, backend, node, (*inputs[:read], *node.inputs[read:]))
    )


def is_expression(node: Node) -> bool:
    """Tells whether a node computes each number by itself, whenever the program runs."""
    return not node.at_load and (node.op in ELEMENTWISE or node.op == "pointwise")


def _mixes(program: Program, backend: Backend, node: Node, inputs: Sequence[str]) -> bool:
    """Tells whether an op computes the same of inputs some of which have 16 bits."""
    kinds = {program.types[value].dtype for value in inputs if value} - {"bool", "float32"}
    if len(kinds) != 1:
        return False
    if node.op in NORMS:
        return _takes(program, backend, node, inputs[: NORMS[node.op]])
    return node.op in REDUCTIONS or (
        is_expression(node) and len(program.types[node.output].shape) <= MOST_AXES
    )


def _computing(program: Program, node: Node) -> Node:
    """Makes a node give its output in the dtype that this has, whatever it reads."""
    dtype = program.types[node.output].dtype
    if dtype == "bool":
        return node
    if node.op in REDUCTIONS or node.op in NORMS:
        return node.with_attributes(dtype=dtype)
    return replace(node, op="pointwise", attributes={"expression": text(node), "dtype": dtype})


def concat_pointwise(program: Program, _: Backend) -> Program:
    """Computes an expression while values are put together: they are read and written once.

    Where nothing else reads the concat, which is along the last axis, and all else in the
    expression are constants by channel: a batch norm and a ReLU in a dense block.
    """
    rewrite = Rewrite(program)
    for node in program.nodes:
        for value in dict.fromkeys(node.inputs):
            concat = program.producers.get(value)
            if concat and concat.op == "concat" and program.only_user(value) is node:
                if fused := _with_expression(program, concat, node):
                    rewrite.replace([concat, node], fused)
                break
    return rewrite.done()


def _with_expression(program: Program, concat: Node, node: Node) -> Node | None:
    """Makes one node of a concat and of what computes an expression of it, if one kernel does."""
    types, value = program.types, concat.output
    shape = types[value].shape
    vectors = list(dict.fromkeys(each for each in node.inputs if each != value))
    if (
        (node.op not in ELEMENTWISE and node.op != "pointwise")
        or node.at_load
        or types[node.output] != types[value]
        or "float" not in types[value].dtype
        or any(types[each].dtype != types[value].dtype for each in concat.inputs)
        or "expression" in concat.attributes
        or concat.attributes["axis"] != len(shape) - 1
        or len(concat.inputs) > MOST_PARTS
        or len(vectors) > MOST_VECTORS
        or not program.constants.issuperset(vectors)
        or any(types[each].shape != shape[-1:] for each in vectors)
        or any("float" not in types[each].dtype for each in vectors)
    ):
        return None
    names = {each: f"x{i}" for i, each in enumerate([value, *vectors])}
    words = (
        names[node.inputs[int(word[1:])]] if word[0] == "x" else word
        for word in text(node).split(" ")
    )
    return Node(
        "concat",
        (*concat.inputs, *vectors),
        node.outputs,
        {**concat.attributes, "expression": " ".join(words)},
        (*concat.layers, *node.layers),
    )


def text(node: Node) -> str:
    """Gives the expression that a node computes, or those that it reduces; a cast's is ``x0``."""
    if node.op in (*REDUCTIONS, "cast"):
        return str(node.attributes.get("expression", "x0"))
    return str(node.attributes.get("expression") or expression(node.op, node.attributes))


@dataclass(frozen=True)
class _Read:
    """What an expression reads: a value, or the ``scale`` or ``shift`` of a batch norm's result."""

    value: str
    part: str = ""


@dataclass(frozen=True)
class _Tree:
    """An expression.

    Attributes:
        words: In postfix order.
        nodes: What it is made of, the root first.
    """

    words: tuple[str | _Read, ...]
    nodes: tuple[Node, ...]

    @property
    def reads(self) -> list[_Read]:
        """What it reads, each once."""
        return list(dict.fromkeys(word for word in self.words if isinstance(word, _Read)))

    def text(self) -> str:
        """Writes it down."""
        reads = self.reads
        words = (f"x{reads.index(w)}" if isinstance(w, _Read) else w for w in self.words)
        return " ".join(words)

    def joined(self, read: _Read, under: _Tree) -> _Tree:
        """Puts another expression in the place of a value."""
        place = self.words.index(read)
        words = (*self.words[:place], *under.words, *self.words[place + 1 :])
        return _Tree(words, self.nodes + under.nodes)


class _Fusion:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.taken = set(program.types)

    def run(self) -> Program:
        rewrite = Rewrite(self.program)
        within: set[str] = set()
        for node in reversed(self.program.nodes):  # a tree begins at its root
            if node.output not in within and self.fits(node):
                tree = self.grown(node)
                if len(tree.nodes) > 1 or node.op == "batch_norm":
                    within.update(self.owned(tree))
                    rewrite.replace([node], *self.written(tree))
        return rewrite.done()

    def fits(self, node: Node) -> bool:
        """Tells whether a node may be part of an expression."""
        types, constants = self.program.types, self.program.constants
        if node.at_load or len(types[node.output].shape) > MOST_AXES:
            return False
        if node.op == "batch_norm":
            return node.inputs[0] not in constants and constants.issuperset(node.inputs[1:])
        if node.op not in ELEMENTWISE and node.op != "pointwise":
            return False
        dtypes = {types[value].dtype for value in node.inputs}
        bytes_too = STORED if node.op == "pointwise" else ()  # levels, as eight_bit reads them
        return (
            all("float" in dtype or dtype == "bool" or dtype in bytes_too for dtype in dtypes)
            and dtypes != {"bool"}
            and not constants.issuperset(node.inputs)
        )

    def grown(self, root: Node) -> _Tree:
        """Grows a tree from its root as far as it may."""
        tree, left = self.leaf(root), True
        while left:
            left = False
            for read in tree.reads:
                under = self.program.producers.get(read.value)
                if under and not read.part and self.joins(tree, read, under):
                    larger = tree.joined(read, self.leaf(under))
                    if self.is_typed_as(larger, root):
                        tree, left = larger, True
                        break
        return tree

    def joins(self, tree: _Tree, read: _Read, under: Node) -> bool:
        """Tells whether what gives a value may become part of the tree that reads it."""
        types, root = self.program.types, tree.nodes[0]
        return (
            types[read.value].dtype not in STORED  # to which it is rounded
            and (self.program.only_user(read.value) in tree.nodes or self.is_small(read.value))
            and tree.words.count(read) == 1
            and types[read.value].shape == types[root.output].shape
            and self.fits(under)
        )

    def owned(self, tree: _Tree) -> set[str]:
        """Names what no other node needs of what a tree computes on the way."""
        found = {tree.nodes[0].output}
        for node in tree.nodes[1:]:  # each behind what reads it
            user = self.program.only_user(node.output)
            if user is not None and user.output in found:
                found.add(node.output)
        return found

    def is_small(self, value: str) -> bool:
        """Tells whether it takes a launch longer to give a value than to compute it twice."""
        count = product(self.program.types[value].shape)
        return isinstance(count, int) and count <= SMALL

    def is_typed_as(self, tree: _Tree, root: Node) -> bool:
        """Tells whether a tree has few enough values, and the type of its root's result."""
        reads = tree.reads
        if len(reads) > MOST_VALUES:
            return False
        vector = Type((1,))
        types = [vector if read.part else self.program.types[read.value] for read in reads]
        dtype = self.dtype(tree)
        (found,) = infer("pointwise", types, {"expression": tree.text(), "dtype": dtype})
        return found == self.program.types[root.output]

    def dtype(self, tree: _Tree) -> str:
        """Names what a tree gives, where its node says it or what it reads does not tell."""
        types, root = self.program.types, tree.nodes[0]
        own = types[root.output].dtype
        read = {types[each.value].dtype for each in tree.reads if not each.part}
        if "uint8" in read or ("float" in own and len({*read, own} - {"bool"}) > 1):
            return own
        return str(root.attributes.get("dtype", ""))

    def leaf(self, node: Node) -> _Tree:
        """Writes one op down."""
        if node.op == "batch_norm":
            scale, shift = (_Read(node.output, part) for part in ("scale", "shift"))
            return _Tree((_Read(node.inputs[0]), scale, "mul", shift, "add"), (node,))
        words = (
            _Read(node.inputs[int(w[1:])]) if w[0] == "x" else w for w in text(node).split(" ")
        )
        return _Tree(tuple(words), (node,))

    def written(self, tree: _Tree) -> list[Node]:
        """Makes the nodes of a tree: those that run at load, and its own."""
        made: list[Node] = []
        names: dict[_Read, str] = {}
        for node in tree.nodes:
            if node.op == "batch_norm":
                names |= self.parameters(node, made)
        order = {node.output: i for i, node in enumerate(self.program.nodes)}
        nodes = sorted(tree.nodes, key=lambda node: order[node.output])
        inputs = tuple(names.get(read, read.value) for read in tree.reads)
        layers = tuple(layer for node in nodes for layer in node.layers)
        attributes: dict[str, Attribute] = {"expression": tree.text()}
        if dtype := self.dtype(tree):
            attributes["dtype"] = dtype
        return [*made, Node("pointwise", inputs, tree.nodes[0].outputs, attributes, layers)]

    def parameters(self, norm: Node, made: list[Node]) -> dict[_Read, str]:
        """Names the scale and the shift of a batch norm, and adds what makes them."""
        weight, bias, mean, var = norm.inputs[1:]
        scale, shift = (free(self.taken, f"{norm.name}.{part}") for part in ("scale", "shift"))
        eps = norm.attributes.get("eps", 1e-5)
        made += [
            Node("batch_norm_scale", (weight, var), (scale,), {"eps": eps}, at_load=True),
            Node("batch_norm_shift", (bias, mean, scale), (shift,), at_load=True),
        ]
        if norm.attributes.get("layout", "NCHW") == "NCHW":
            shape = (*self.program.types[weight].shape, 1, 1)
            flat, (scale, shift) = (scale, shift), (free(self.taken, n) for n in (scale, shift))
            made += [
                Node("reshape", (before,), (after,), {"shape": shape}, at_load=True)
                for before, after in zip(flat, (scale, shift), strict=True)
            ]
        return {_Read(norm.output, "scale"): scale, _Read(norm.output, "shift"): shift}
