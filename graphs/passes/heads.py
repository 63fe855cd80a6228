"""Attention becomes one op on tokens [N, T, C], whose heads lie side by side.

First, attention that is written out, softmax(scale * q k^T + mask) v, becomes
``scaled_dot_product_attention``; then that becomes ``attention``. Query, key and value are read
where they lie: split off tokens by a reshape and a permute, or off one packed product. A packed
linear layer becomes three, of parts of its weights that are taken when the model loads, and
``qkv`` multiplies them in one launch: three products of C columns are as many tiles as one of 3 C,
and no kernel of attention needs to know a pitch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maxvision.common.errors import ArgumentError
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import EVALUATE
from maxvision.graphs.passes import layout
from maxvision.graphs.program import Attribute, Node, Program, Rewrite
from maxvision.graphs.shapes import MOST_DEPTH, attends_to_bytes, infer
from maxvision.graphs.types import Size, Type, at_batch, product, split

ATTENTION = "scaled_dot_product_attention"
SPLIT = (0, 2, 1, 3)
"""How [N, T, heads, D] becomes [N, heads, T, D], and back."""
IMAGES = 5
"""A number of images with which views are tried; any above 1."""


def attention(program: Program, on: Backend) -> Program:
    """Attends to tokens [N, T, C] whose heads lie side by side: nothing is split or joined."""
    found = _recognised(program)
    if any(node.op == "softmax" for node in found.nodes):  # perhaps einsum hides the heads
        simpler = _recognised(layout.views(_unmerged(layout.views(found, on)), on))
        found = max(found, simpler, key=_count)
    return _fused(found, on)


def _count(program: Program) -> int:
    return sum(node.op == ATTENTION for node in program.nodes)


class _Writer:
    """Makes the nodes of one replacement.

    Args:
        program: Where they go.
        taken: The names that are taken; those of new values join them.
    """

    def __init__(self, program: Program, taken: set[str]) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self.types = dict(program.types)
        self.constants = set(program.constants)
        self._taken = taken

    def op(
        self,
        op: str,
        inputs: tuple[str, ...],
        output: str = "",
        layers: tuple[str, ...] = (),
        **attributes: Attribute,
    ) -> str:
        """Adds an op, at load if it can run then, and names its value.

        Raises:
            ArgumentError: If it does not take its inputs.
        """
        given = [self.types[name] if name else None for name in inputs]
        (found,) = infer(op, given, attributes)
        name = output or f"{inputs[0]}.{op}"
        while not output and name in self._taken:
            name += "_"
        known = op in EVALUATE and self.constants.issuperset(filter(None, inputs))
        at_load = known and all(isinstance(size, int) for size in found.shape)
        self.nodes.append(Node(op, inputs, (name,), attributes, layers, at_load=at_load))
        self.types[name] = found
        self._taken.add(name)
        if at_load:
            self.constants.add(name)
        return name

    def shape(self, value: str) -> tuple[Size, ...]:
        return self.types[value].shape

    def reshape(self, value: str, shape: tuple[Size, ...]) -> str:
        """Reshapes a value, unless it has the shape."""
        same = self.shape(value) == shape
        return value if same else self.op("reshape", (value,), shape=shape)


# --- attention that is written out ---------------------------------------------------------------


@dataclass
class _Scores:
    """What a softmax is taken of: scale * product + masks."""

    product: Node
    scale: float = 1.0
    added: list[tuple[str, tuple[Size, ...] | None]] = field(default_factory=list)
    """Masks, and the shape [b, windows, heads, T, S] to which one was added, if it was that."""
    seen: list[str] = field(default_factory=list)
    """Truth values; false ones make minus infinity."""
    moved: bool = False
    """Whether the product has other axes before the last two; then no mask is taken."""


def _unmerged(program: Program) -> Program:
    """Multiplies heads as [N, heads, T, D] that ``einsum`` or ``bmm`` have as [heads * N, T, D]."""
    rewrite, taken = Rewrite(program), set(program.types)
    for node in program.nodes:
        shape = program.types[node.output].shape
        number, name = split(shape[0]) if shape else (1, "")
        if not _is_matmul(node) or len(shape) != 3 or not name or number == 1:
            continue
        writer = _Writer(program, taken)
        wholes = []
        for value in node.inputs[:2]:
            held = program.types[value].shape
            if len(held) == 3 and held[0] == shape[0]:
                wholes.append(writer.op("reshape", (value,), shape=(name, number, *held[1:])))
        if len(wholes) == 2:
            given: dict[str, Any] = dict(node.attributes)
            y = writer.op("matmul", tuple(wholes), **given)
            writer.op("reshape", (y,), node.output, shape=shape)
            rewrite.replace([node], *writer.nodes)
    return rewrite.done()


def _recognised(program: Program) -> Program:
    """Finds attention that is written out."""
    rewrite, taken = Rewrite(program), set(program.types)
    for last in program.nodes:
        if not _is_matmul(last) or last.attributes.get("alpha", 1.0) != 1:
            continue
        softmax = _behind_casts(program, last.inputs[0])
        if softmax and _moves_images(program, softmax):
            softmax = _behind_casts(program, softmax.inputs[0])
        if softmax is None or softmax.op != "softmax":
            continue
        scores = _scores(program, softmax.inputs[0])
        if (
            scores is None
            or (scores.moved and (scores.added or scores.seen))
            or rewrite.has(last, scores.product)
        ):
            continue
        writer = _Writer(program, taken)
        if _write(writer, scores, last):
            rewrite.replace([last], *writer.nodes)
    return rewrite.done()


def _is_matmul(node: Node | None) -> bool:
    """Tells whether a node is a product of two values alone."""
    return (
        node is not None
        and node.op == "matmul"
        and not any(node.inputs[2:])
        and node.attributes.get("epilogue", "none") == "none"
    )


def _behind_casts(program: Program, value: str) -> Node | None:
    """Gives the node that makes a value, but for casts; none if others read it."""
    while True:
        node = program.producers.get(value)
        if node is None or node.at_load or program.only_user(value) is None:
            return None
        if node.op != "cast":
            return node
        value = node.inputs[0]


def _moves_images(program: Program, node: Node) -> bool:
    """Tells whether a node is a reshape that keeps the last two axes."""
    if node.op != "reshape":
        return False
    shapes = [program.types[value].shape for value in (node.inputs[0], node.output)]
    return min(map(len, shapes)) >= 2 and shapes[0][-2:] == shapes[1][-2:]


def _factor(node: Node | None) -> float | None:
    """Gives the number by which a node multiplies a value; none if it does something else."""
    if node is None or node.op not in ("mul", "div") or "other" not in node.attributes:
        return None
    other = float(node.attributes["other"])  # type: ignore[arg-type]
    return other if node.op == "mul" else 1 / other if other else None


def _scores(program: Program, value: str, scaled: bool = False) -> _Scores | None:
    """Follows scores back to the product of queries and keys."""
    node = _behind_casts(program, value)
    if node is None:
        return None
    if _is_matmul(node):
        return _Scores(node, float(node.attributes.get("alpha", 1.0)))  # type: ignore[arg-type]
    if (factor := _factor(node)) is not None:
        found = _scores(program, node.inputs[0], scaled=True)
        if found:
            found.scale *= factor
        return found
    shape = program.types[node.output].shape
    if _moves_images(program, node):
        if not scaled and len(shape) == 4 and (found := _windows(program, node)):
            return found
        if found := _scores(program, node.inputs[0], scaled):
            found.moved = True
        return found
    if scaled:
        return None  # what is added before is scaled with the product
    if node.op == "add" and len(node.inputs) == 2:
        for x, mask in (node.inputs, node.inputs[::-1]):
            if x != mask and program.types[x].shape == shape and (found := _scores(program, x)):
                found.added.append((mask, None))
                return found
    if node.op == "where" and node.attributes.get("other") == -math.inf:
        whole = program.types[node.inputs[1]].shape == shape
        if whole and (found := _scores(program, node.inputs[1])):
            found.seen.append(node.inputs[0])
            return found
    return None


def _windows(program: Program, back: Node) -> _Scores | None:
    """Finds a mask of windows, added to scores as [b, windows, heads, T, S] for a while."""
    add = _behind_casts(program, back.inputs[0])
    if add is None or add.op != "add" or len(add.inputs) != 2:
        return None
    shape = program.types[add.output].shape
    for x, mask in (add.inputs, add.inputs[::-1]):
        there = _behind_casts(program, x)
        if there is None or there.op != "reshape" or len(shape) != 5:
            continue
        same = program.types[there.inputs[0]].shape == program.types[back.output].shape
        if same and program.types[x].shape == shape and shape[2:] == program.shape(back.output):
            found = _scores(program, there.inputs[0])
            if found:
                found.added.append((mask, shape))
            return found
    return None


def _write(writer: _Writer, scores: _Scores, last: Node) -> bool:
    """Writes the op; tells whether it takes what was found."""
    program = writer.program
    q, scale = _unscaled(program, scores.product.inputs[0])
    k, turned, factor = _keys(program, scores.product)
    v = last.inputs[1]
    scale *= scores.scale * factor
    if not scale >= 0:
        return False
    try:
        if turned:
            k = _turned(writer, k)
        if last.attributes.get("transpose_b"):
            v = _turned(writer, v)
        whole = writer.shape(last.output)
        if len(whole) == 3:  # heads that are images, or images that are heads
            q, k, v = (_with_heads(writer, x) for x in (q, k, v))
        elif len(whole) > 4:  # windows beside the heads
            if scores.added or scores.seen:
                return False
            q, k, v = (_merged(writer, x, whole[:-2]) for x in (q, k, v))
        mask = _mask(writer, scores)
        inputs = (q, k, v, mask) if mask else (q, k, v)
        apart = len(whole) == 4  # the heads have an axis of their own
        y = writer.op(ATTENTION, inputs, last.output if apart else "", scale=scale)
        if not apart:
            writer.op("reshape", (y,), last.output, shape=whole)
    except ArgumentError:
        return False
    return writer.types[last.output].shape == program.types[last.output].shape


def _unscaled(program: Program, value: str) -> tuple[str, float]:
    """Takes the numbers away by which a value was multiplied."""
    scale = 1.0
    while (factor := _factor(node := program.producers.get(value))) is not None and node:
        value, scale = node.inputs[0], scale * factor
    return value, scale


def _keys(program: Program, matmul: Node) -> tuple[str, bool, float]:
    """Finds the keys of a product, whether [.., D, S] they still are, and their scale."""
    value, turned, scale = matmul.inputs[1], not matmul.attributes.get("transpose_b"), 1.0
    while True:
        value, factor = _unscaled(program, value)
        scale *= factor
        node = program.producers.get(value)
        rank = len(program.types[value].shape)
        if node is None or node.op != "permute" or node.attributes["axes"] != _last_two(rank):
            return value, turned, scale
        value, turned = node.inputs[0], not turned


def _last_two(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _turned(writer: _Writer, value: str) -> str:
    return writer.op("permute", (value,), axes=_last_two(len(writer.shape(value))))


def _with_heads(writer: _Writer, value: str) -> str:
    """Makes [N, heads, T, D] of [N * heads, T, D]; where N is not known apart, it is 1."""
    size, *rest = writer.shape(value)
    number, name = split(size)
    return writer.reshape(value, (name or 1, number, *rest))


def _merged(writer: _Writer, value: str, leading: tuple[Size, ...]) -> str:
    """Makes [N, heads, T, D] of [N, .., T, D].

    Raises:
        ArgumentError: If other axes than ``leading`` come first, as those of what is shared.
    """
    *held, t, d = writer.shape(value)
    if tuple(held) != leading:
        raise ArgumentError("keys that are shared")
    return writer.reshape(value, (held[0], product(held[1:]), t, d))


def _mask(writer: _Writer, scores: _Scores) -> str:
    """Adds up the masks; no name if there is none.

    Raises:
        ArgumentError: If they do not fit.
    """
    masks = []
    for value, windows in scores.added:
        mask = _shrunk(writer, value)
        if windows:  # [1, windows, .., T, S], as [windows, .., T, S]
            first, *sides = ((1,) * 5 + writer.shape(mask))[-5:]
            if first != 1:
                raise ArgumentError("a mask of images")
            mask = writer.reshape(mask, tuple(sides))
        masks.append(mask)
    if len(scores.seen) > 1:
        raise ArgumentError("only one mask of truth values is taken")
    if not masks:
        return scores.seen[0] if scores.seen else ""
    total = masks[0]
    for mask in masks[1:]:
        total = writer.op("add", (total, mask))
    if scores.seen:
        total = writer.op("where", (scores.seen[0], total), other=-math.inf)
    return total


def _shrunk(writer: _Writer, value: str) -> str:
    """Finds what a mask was expanded from: images and windows take turns at it."""
    node = writer.program.producers.get(value)
    if node is None or value in writer.constants:
        return value
    if node.op == "expand":
        return _shrunk(writer, node.inputs[0])
    if node.op == "cast" and writer.types[node.inputs[0]].dtype != "bool":
        return _shrunk(writer, node.inputs[0])
    if node.op == "add" and len(node.inputs) == 2:
        parts = tuple(_shrunk(writer, each) for each in node.inputs)
        if parts != node.inputs:
            return writer.op("add", parts)
    if node.op == "reshape":
        given, shape = writer.shape(node.inputs[0]), writer.shape(value)
        if len(given) == len(shape) + 1 and product(given[:2]) == shape[0]:
            inner = _shrunk(writer, node.inputs[0])
            first, *rest = sides = writer.shape(inner)
            known = first == 1 and len(sides) == len(given) and given[2:] == shape[1:]
            if known and isinstance(rest[0], int):
                return writer.reshape(inner, tuple(rest))
    return value


# --- attention on tokens -------------------------------------------------------------------------


def stores_bytes(program: Program, node: Node, on: Backend) -> bool:
    """Tells whether an ``attention`` can store its result in 8 bits: its attribute ``dtype``."""
    if not on.is_hopper or node.dtype or any(map(node.attributes.get, ("logsumexp", "dtype"))):
        return False
    heads = int(node.attributes["heads"])  # type: ignore[arg-type]
    return attends_to_bytes(program.types[node.inputs[0]], heads)


def _fused(program: Program, on: Backend) -> Program:
    """Makes ``attention`` of ``scaled_dot_product_attention``."""
    rewrite, taken = Rewrite(program), set(program.types)
    for node in program.nodes:
        if node.op != ATTENTION:
            continue
        q, k, v = (program.types[value].shape for value in node.inputs[:3])
        scale = node.attributes["scale"]
        # The op's softmax begins at the largest product, before it is scaled.
        fits = q[:2] == k[:2] and q[3] == v[3] and scale >= 0  # type: ignore[operator]
        if not fits or int(q[3]) > MOST_DEPTH or not isinstance(q[1], int):
            continue
        n, heads, t, d = q
        writer = _Writer(program, taken)
        tokens = {value: _tokens(writer, value, on) for value in dict.fromkeys(node.inputs[:3])}
        inputs = tuple(tokens[value] for value in node.inputs[:3])
        if any(node.inputs[3:]):
            inputs += (_bias(writer, node, (*q[:3], k[2])),)
        join = _joined(program, node)
        attributes: dict[str, Any] = {"heads": heads, **node.attributes}
        name = join[-1].output if join else ""
        name = writer.op("attention", inputs, name, **attributes)
        if not join:
            y = writer.op("reshape", (name,), shape=(n, t, heads, d))
            writer.op("permute", (y,), node.output, axes=SPLIT)
        rewrite.replace([node, *join], *writer.nodes)
    return rewrite.done()


def _joined(program: Program, node: Node) -> list[Node]:
    """Finds what joins heads [N, heads, T, D] to tokens: permute, reshape."""
    permute = program.only_user(node.output)
    if permute is None or permute.op != "permute" or permute.attributes["axes"] != SPLIT:
        return []
    reshape = program.only_user(permute.output)
    n, t, h, d = program.types[permute.output].shape
    if reshape is None or reshape.op != "reshape":
        return []
    same = program.types[reshape.output].shape == (n, t, product((h, d)))
    return [permute, reshape] if same else []


def _bias(writer: _Writer, node: Node, scores: tuple[Size, ...]) -> str:
    """Lays a mask out as the kernels read it."""
    mask = _shrunk(writer, node.inputs[3])
    given = [*(writer.types[value] for value in node.inputs[:3]), writer.types[mask]]
    try:
        infer(ATTENTION, given, node.attributes)
    except ArgumentError:
        mask = node.inputs[3]
    _, heads, t, s = scores
    sizes: dict[str, Any] = {"heads": heads, "queries": t, "keys": s}
    return writer.op("attention_bias", (mask,), **sizes)


@dataclass(frozen=True)
class _Place:
    """Where heads [N, heads, T, D] lie in tokens [N, T, F].

    Attributes:
        tokens: The value.
        width: F, channels of a token.
        first: The first channel of the first head.
        step: Channels from a head to the next.
    """

    tokens: str
    width: int
    first: int
    step: int


def _tokens(writer: _Writer, value: str, on: Backend) -> str:
    """Finds or makes the tokens [N, T, heads * D] of heads [N, heads, T, D]."""
    n, heads, t, d = writer.shape(value)
    assert isinstance(heads, int) and isinstance(d, int)
    shape = (n, t, heads * d)
    for place in _places(writer.program, value):
        whole = (n, t, place.width)
        if place.width == heads * d:
            return writer.reshape(place.tokens, shape)
        if (part := _part(writer, place, heads, d, on)) is not None:
            return writer.reshape(part, shape)
        if place.step == d:
            tokens = writer.reshape(place.tokens, whole)
            stop = place.first + heads * d
            return writer.op("slice", (tokens,), axis=2, start=place.first, stop=stop)
    joined = writer.op("permute", (value,), axes=SPLIT)
    return writer.op("reshape", (joined,), shape=shape)


def _places(program: Program, value: str) -> list[_Place]:
    """Lists the values in which heads lie as in tokens, the first of them first."""
    chain, root = list[Node](), value
    while (node := program.producers.get(root)) and node.op in ("reshape", "permute", "slice"):
        if node.at_load:
            break
        chain.insert(0, node)
        root = node.inputs[0]
    found = [_place(program, chain[i:]) for i in range(len(chain))]
    return [place for place in found if place]


def _place(program: Program, chain: list[Node]) -> _Place | None:
    """Follows heads back through reshapes, permutes and slices, by the strides that numpy finds."""
    root = chain[0].inputs[0]
    whole = heads = np.empty(_tried(program.types[root]), np.int8)  # nothing is written to it
    for node in chain:
        given = node.attributes
        if node.op == "permute":
            heads = heads.transpose(given["axes"])  # type: ignore[arg-type]
        elif node.op == "slice":
            index = [slice(None)] * heads.ndim
            index[given["axis"]] = slice(given["start"], given["stop"])  # type: ignore[index]
            heads = heads[tuple(index)]
        else:
            heads = heads.reshape(_tried(program.types[node.output]))
            if not np.may_share_memory(heads, whole):
                return None  # the numbers do not lie evenly
    n, count, t, d = heads.shape
    image, step, row, one = heads.strides
    first = heads.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    width = whole.size // (n * t)
    step = step if count > 1 else d
    even = (d == 1 or one == 1) and (t == 1 or row == width) and (n == 1 or image == t * width)
    inside = step >= d and first + (count - 1) * step + d <= width
    fits = even and inside and whole.size == n * t * width and width % count == 0
    # A token of which all is read is read in its order.
    if not fits or (width == count * d and step != d):
        return None
    return _Place(root, width, first, step)


def _tried(value: Type) -> tuple[int, ...]:
    """Gives the sizes of a value for some images."""
    return tuple(at_batch(size, IMAGES) for size in value.shape)


def _part(writer: _Writer, place: _Place, heads: int, d: int, on: Backend) -> str | None:
    """Multiplies by the rows of a packed linear layer's weights that make these heads."""
    program = writer.program
    linear = program.producers.get(place.tokens)
    if (
        linear is None
        or linear.op != "linear"
        or program.types[linear.output].shape[-1] != place.width
        or linear.inputs[1] not in program.constants
        or any(name not in program.constants for name in linear.inputs[2:3] if name)
        or linear.attributes.get("epilogue", "none") != "none"
        or linear.attributes.get("format")
        or not on.formats.keys().isdisjoint(linear.layers)
    ):
        return None

    def rows(name: str) -> str:
        """Takes the rows of the weight, or the numbers of the bias."""
        _, *rest = writer.shape(name)
        if place.step == d:
            stop = place.first + heads * d
            return writer.op("slice", (name,), axis=0, start=place.first, stop=stop)
        before, within = divmod(place.first, place.step)
        parts = writer.reshape(name, (place.width // place.step, place.step, *rest))
        if before or before + heads < place.width // place.step:
            parts = writer.op("slice", (parts,), axis=0, start=before, stop=before + heads)
        parts = writer.op("slice", (parts,), axis=1, start=within, stop=within + d)
        return writer.reshape(parts, (heads * d, *rest))

    if place.step != d and (place.width % place.step or place.first % place.step + d > place.step):
        return None
    x, weight, bias = (*linear.inputs, "")[:3]
    inputs = (x, rows(weight), rows(bias)) if bias else (x, rows(weight))
    return writer.op("linear", inputs, layers=linear.layers)
