"""Activations and norms that are written out in smaller ops become one op each.

Exporters and hand-written modules spell them: GELU as x * 0.5 * (1 + erf(x / sqrt(2))), SiLU as
x * sigmoid(x), a layer norm by means, a difference, a square and a root, T5's RMS norm by the last
three. As one op they run in one launch, and as the epilogue of the product before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from maxvision.graphs.backend import Backend
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.types import Size


def written_out(program: Program, _: Backend) -> Program:
    """Finds activations, then layer norms, then RMS norms, which are parts of layer norms too."""
    return _rms_norms(_norms(_activations(program)))


def _is_near(value: float, wanted: float) -> bool:
    """Tells whether a number is another one, as closely as float32 tells."""
    return math.isclose(value, wanted, rel_tol=1e-6)


@dataclass(frozen=True)
class _Product:
    """A number times values.

    Attributes:
        number: The number.
        factors: The values, in no order.
    """

    number: float
    factors: tuple[str, ...]


class _Finder:
    """Reads the ops that give a value."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def made(self, value: str, *ops: str) -> Node | None:
        """Gives the node that makes a value, if it is of one of some ops and of this program."""
        node = self.program.producers.get(value)
        return node if node is not None and node.op in ops and not node.at_load else None

    def plus(self, value: str) -> tuple[str, float] | None:
        """Reads a value plus a number."""
        node = self.made(value, "add", "sub")
        if node is None or "other" not in node.attributes:
            return None
        number = _other(node)
        return node.inputs[0], number if node.op == "add" else -number

    def product(self, value: str, depth: int = 4) -> _Product:
        """Reads a value as a product of numbers and values; by itself it is the only factor."""
        node = self.made(value, "mul", "div", "neg") if depth else None
        if node is None:
            return _Product(1.0, (value,))
        first = self.product(node.inputs[0], depth - 1)
        if node.op == "neg":
            return _Product(-first.number, first.factors)
        if "other" in node.attributes:
            number = _other(node)
            if node.op == "div" and number == 0:
                return _Product(1.0, (value,))
            number = number if node.op == "mul" else 1 / number
            return _Product(first.number * number, first.factors)
        if node.op == "div":
            return _Product(1.0, (value,))
        second = self.product(node.inputs[1], depth - 1)
        return _Product(first.number * second.number, first.factors + second.factors)


def _other(node: Node) -> float:
    return float(node.attributes["other"])  # type: ignore[arg-type]


# --- activations ---------------------------------------------------------------------------------


def _activations(program: Program) -> Program:
    rewrite, find = Rewrite(program), _Finder(program)
    for node in program.nodes:
        if node.op not in ("mul", "div") or node.at_load:
            continue
        found = _activation(find, find.product(node.output))
        if found:
            op, x = found
            if program.types[x] == program.types[node.output]:
                rewrite.replace([node], Node(op, (x,), node.outputs))
    return rewrite.done()


def _activation(find: _Finder, product: _Product) -> tuple[str, str] | None:
    """Names the activation that a product is, and what it is of."""
    number, factors = product.number, product.factors
    if len(factors) == 1 and _is_near(number, 1 / 6):
        x = _gate(find, factors[0])
        return ("hardsigmoid", x) if x else None
    if len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        if _is_near(number, 0.5):
            if (x,) == _erf_of(find, gate):
                return "gelu", x
            if _tanh_of(find, gate) == x:
                return "gelu_tanh", x
        if _is_near(number, 1 / 6) and _gate(find, gate) == x:
            return "hardswish", x
        if number == 1:
            for op, activation in (("sigmoid", "silu"), ("hardsigmoid", "hardswish")):
                made = find.made(gate, op)
                if made and made.inputs[0] == x:
                    return activation, x
            tanh = find.made(gate, "tanh")
            soft = tanh and find.made(tanh.inputs[0], "softplus")
            if soft and soft.inputs[0] == x:
                return "mish", x
    return None


def _gate(find: _Finder, value: str) -> str | None:
    """Reads clamp(x + 3, 0, 6)."""
    clamp = find.made(value, "clamp")
    if clamp is None or (clamp.attributes.get("min"), clamp.attributes.get("max")) != (0.0, 6.0):
        return None
    found = find.plus(clamp.inputs[0])
    return found[0] if found and found[1] == 3 else None


def _erf_of(find: _Finder, value: str) -> tuple[str, ...]:
    """Reads 1 + erf(x / sqrt(2))."""
    found = find.plus(value)
    erf = find.made(found[0], "erf") if found and found[1] == 1 else None
    inner = find.product(erf.inputs[0]) if erf else None
    return inner.factors if inner and _is_near(inner.number, math.sqrt(0.5)) else ()


def _tanh_of(find: _Finder, value: str) -> str | None:
    """Reads 1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))."""
    found = find.plus(value)
    tanh = find.made(found[0], "tanh") if found and found[1] == 1 else None
    inner = find.product(tanh.inputs[0]) if tanh else None
    if not inner or len(inner.factors) != 1 or not _is_near(inner.number, math.sqrt(2 / math.pi)):
        return None
    total = find.made(inner.factors[0], "add")
    if total is None or len(total.inputs) != 2:
        return None
    for x, cubic in (total.inputs, total.inputs[::-1]):
        cube = find.product(cubic)
        if _is_near(cube.number, 0.044715) and _is_cube(find, cube.factors, x):
            return x
    return None


def _is_cube(find: _Finder, factors: tuple[str, ...], x: str) -> bool:
    if factors == (x, x, x):
        return True
    power = find.made(factors[0], "pow") if len(factors) == 1 else None
    return power is not None and power.inputs == (x,) and _other(power) == 3


# --- norms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Normed:
    """(x - mean) / sqrt(variance + eps) over an axis; or x / sqrt(mean square + eps)."""

    x: str
    axis: int
    eps: float


def _norms(program: Program) -> Program:
    rewrite, find, taken = Rewrite(program), _Finder(program), set(program.types)
    for node in program.nodes:
        if node.op != "add" or len(node.inputs) != 2 or node.at_load:
            continue
        for scaled, bias in (node.inputs, node.inputs[::-1]):
            product = find.made(scaled, "mul")
            if product is None or bias not in program.constants or len(product.inputs) != 2:
                continue
            found = None
            for value, weight in (product.inputs, product.inputs[::-1]):
                if weight in program.constants and (found := _normed(find, value)):
                    break
            if found is None:
                continue
            if all(_is_along(program, each, found) for each in (weight, bias)):
                rewrite.replace([node], *_layer_norm(program, node, found, (weight, bias), taken))
                break
    return rewrite.done()


def _rms_norms(program: Program) -> Program:
    rewrite, find, taken = Rewrite(program), _Finder(program), set(program.types)
    for node in program.nodes:
        if node.op != "mul" or len(node.inputs) != 2 or node.at_load:
            continue
        for value, weight in (node.inputs, node.inputs[::-1]):
            found = _scaled(find, value) if weight in program.constants else None
            if found is None or not _is_along(program, weight, found):
                continue
            if program.types[found.x] == program.types[node.output]:
                vector = _vector(program, weight, taken)
                inputs = (found.x, vector[-1].output if vector else weight)
                norm = Node("rms_norm", inputs, node.outputs, {"eps": found.eps})
                rewrite.replace([node], *vector, norm)
                break
    return rewrite.done()


def _scaled(find: _Finder, value: str) -> _Normed | None:
    """Reads what an RMS norm over the last axis multiplies by its weight."""
    for x, root in _quotients(find, value):
        total = find.plus(root)
        mean = find.made(total[0], "mean") if total else None
        if mean is None or total is None or not total[1] > 0:
            continue
        last = len(find.program.types[x].shape) - 1
        over_last = mean.attributes["axes"] == (last,) and mean.attributes.get("keepdim")
        if over_last and _squared(find, mean.inputs[0]) == x:
            return _Normed(x, last, total[1])
    return None


def _normed(find: _Finder, value: str) -> _Normed | None:
    """Reads what a layer norm scales and shifts."""
    for centred, root in _quotients(find, value):
        total = find.plus(root)
        spread = find.made(total[0], "mean") if total else None
        if spread is None or total is None or not total[1] > 0:
            continue
        x = _centred(find, centred)
        if x is None or _square(find, spread.inputs[0]) not in (centred, ("same", x)):
            continue
        mean = find.made(find.program.producers[centred].inputs[1], "mean")
        if mean is None or mean.inputs != (x,):
            continue
        axes = mean.attributes["axes"]
        same = spread.attributes == mean.attributes and mean.attributes.get("keepdim")
        if same and isinstance(axes, tuple) and len(axes) == 1:
            return _Normed(x, int(axes[0]), total[1])
    return None


def _quotients(find: _Finder, value: str) -> Iterator[tuple[str, str]]:
    """Reads a / sqrt(b), a * rsqrt(b) and a * (1 / sqrt(b))."""
    node = find.made(value, "div", "mul")
    if node is None or len(node.inputs) != 2:
        return
    if node.op == "div":
        root = find.made(node.inputs[1], "sqrt")
        if root:
            yield node.inputs[0], root.inputs[0]
        return
    for a, b in (node.inputs, node.inputs[::-1]):
        inverse = find.made(b, "rsqrt", "reciprocal")
        root = find.made(inverse.inputs[0], "sqrt") if inverse else None
        if inverse and inverse.op == "rsqrt":
            yield a, inverse.inputs[0]
        elif root:
            yield a, root.inputs[0]


def _centred(find: _Finder, value: str) -> str | None:
    """Reads x - mean(x)."""
    node = find.made(value, "sub")
    if node is None or len(node.inputs) != 2:
        return None
    mean = find.made(node.inputs[1], "mean")
    return node.inputs[0] if mean and mean.inputs[0] == node.inputs[0] else None


def _squared(find: _Finder, value: str) -> str | None:
    """Reads d * d or d ** 2."""
    node = find.made(value, "pow", "mul")
    if node is None:
        return None
    if node.op == "pow":
        found = "other" in node.attributes and _other(node) == 2
    else:
        found = len(node.inputs) == 2 and node.inputs[0] == node.inputs[1]
    return node.inputs[0] if found else None


def _square(find: _Finder, value: str) -> str | tuple[str, str] | None:
    """Reads a square: d, or ("same", x) of x - mean(x), which a module may compute twice."""
    d = _squared(find, value)
    x = _centred(find, d) if d else None
    return d if x is None else ("same", x)


def _is_along(program: Program, constant: str, found: _Normed) -> bool:
    """Tells whether a constant has a number for each place of the axis that is normed."""
    shape = program.types[found.x].shape
    held = program.types[constant].shape
    wanted: tuple[Size, ...] = (shape[found.axis], *(1 for _ in shape[found.axis + 1 :]))
    return held[len(held) - len(wanted) :] == wanted and all(
        size == 1 for size in held[: len(held) - len(wanted)]
    )


def _vector(program: Program, constant: str, taken: set[str]) -> list[Node]:
    """Makes a constant of several axes, all but one of them 1, a vector; nothing if it is one."""
    shape = program.types[constant].shape
    if len(shape) == 1:
        return []
    attributes: dict[str, Attribute] = {"shape": (math.prod(shape),)}
    name = free(taken, f"{constant}.vector")
    return [Node("reshape", (constant,), (name,), attributes, at_load=True)]


def _layer_norm(
    program: Program, last: Node, found: _Normed, parameters: tuple[str, str], taken: set[str]
) -> list[Node]:
    """Makes the nodes of a layer norm; its axis becomes the last one for it."""
    nodes: list[Node] = []

    def add(op: str, inputs: tuple[str, ...], name: str, **attributes: Attribute) -> str:
        nodes.append(Node(op, inputs, (name,), attributes))
        return name

    shape = program.types[found.x].shape
    rank, vectors = len(shape), []
    for each in parameters:
        nodes += (made := _vector(program, each, taken))
        vectors.append(made[-1].output if made else each)
    if found.axis == rank - 1:
        add("layer_norm", (found.x, *vectors), last.output, eps=found.eps)
        return nodes
    axes = [axis for axis in range(rank) if axis != found.axis] + [found.axis]
    back = tuple(axes.index(axis) for axis in range(rank))
    turned = add("permute", (found.x,), free(taken, f"{last.output}.turned"), axes=tuple(axes))
    normed = free(taken, f"{last.output}.normed")
    add("layer_norm", (turned, *vectors), normed, eps=found.eps)
    add("permute", (normed,), last.output, axes=back)
    return nodes
