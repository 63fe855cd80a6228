"""Writes a network down as a program, layer by layer, in torch's terms.

    net = Net("convnet")
    x = net.input("x", (BATCH, 3, 32, 32))
    x = net.relu(net.conv2d(x, "stem", 64, 3, padding=1))
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 10))
    program = net.program()

A layer's weights are called as the layer is: ``stem.weight``, ``stem.bias``. Images are
[N, C, H, W]; what is said of them is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from maxvision.common.errors import ArgumentError
from maxvision.graphs.program import Attribute, Node, Program, rebuilt
from maxvision.graphs.shapes import Padding, Pair, infer
from maxvision.graphs.types import Size, Type


@dataclass(frozen=True)
class Value:
    """What an op gives: its name in the program, and its type."""

    net: Net
    name: str
    type: Type

    @property
    def shape(self) -> tuple[Size, ...]:
        """Its sizes; the batch by its name."""
        return self.type.shape

    def size(self, axis: int) -> int:
        """Gives a size that is known.

        Raises:
            ArgumentError: If it is the batch.
        """
        found = self.shape[axis]
        if not isinstance(found, int):
            raise ArgumentError(f"axis {axis} of {self.type} is the batch")
        return found

    def __add__(self, other: Value) -> Value:
        """Adds two values."""
        return self.net.add(self, other)


class Net:
    """A program in the making."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: dict[str, Type] = {}
        self._weights: dict[str, Type] = {}
        self._types: dict[str, Type] = {}
        self._nodes: list[Node] = []
        self._outputs: dict[str, str] = {}
        self._prefix = ""
        self.origin = ""
        """Where the ops to come are from, such as a line of a torch module."""

    @contextmanager
    def at(self, part: str | int) -> Iterator[None]:
        """Puts ``part`` and a dot before the names of the layers inside."""
        before = self._prefix
        self._prefix = f"{before}{part}."
        yield
        self._prefix = before

    def input(self, name: str, shape: Sequence[Size], dtype: str = "float32") -> Value:
        """Adds an input."""
        self._inputs[name] = self._types[name] = Type(tuple(shape), dtype)
        return Value(self, name, self._types[name])

    def output(self, name: str, value: Value) -> None:
        """Makes a value an output; they keep the order of these calls."""
        self._outputs[self._prefix + name] = value.name

    def weight(self, name: str, *shape: int, dtype: str = "float32") -> Value:
        """Adds a weight, as the checkpoint stores it."""
        full = self._prefix + name
        self._weights[full] = self._types[full] = Type(shape, dtype)
        return Value(self, full, self._types[full])

    def program(self) -> Program:
        """Gives the program."""
        whole = Program(
            self.name, self._inputs, self._weights, tuple(self._nodes), self._outputs, self._types
        )
        return rebuilt(whole, whole.nodes)

    @property
    def nodes(self) -> Sequence[Node]:
        """What was added so far, in its order."""
        return self._nodes

    def op(
        self, op: str, inputs: Sequence[Value | None], layer: str = "", **attributes: Attribute
    ) -> Value:
        """Adds an op of one output; ``layer`` is its name, if it is one with weights."""
        (found,) = self.several(op, inputs, layer, **attributes)
        return found

    def several(
        self, op: str, inputs: Sequence[Value | None], layer: str = "", **attributes: Attribute
    ) -> list[Value]:
        """Adds an op; gives all of its outputs."""
        types = [value.type if value else None for value in inputs]
        made = []
        for found in infer(op, types, attributes):
            name = base = self._prefix + (layer or op)
            number = 1
            while name in self._types:
                number += 1
                name = f"{base}_{number}"
            self._types[name] = found
            made.append(Value(self, name, found))
        layers = (self._prefix + layer,) if layer else ()
        given = tuple(value.name if value else "" for value in inputs)
        outputs = tuple(value.name for value in made)
        self._nodes.append(Node(op, given, outputs, attributes, layers, self.origin))
        return made

    def has(self, name: str) -> bool:
        """Tells whether something has a name already."""
        return self._prefix + name in self._types

    def unknown(self, type: Type) -> Value:
        """Stands in for what no op gives, in a program that cannot be made."""
        name = f"unknown.{len(self._types)}"
        self._types[name] = type
        return Value(self, name, type)

    # --- layers --------------------------------------------------------------------------------

    def conv2d(
        self,
        x: Value,
        layer: str,
        filters: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: Padding = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> Value:
        """Adds a ``Conv2d`` with ``layer.weight`` [F, C, R, S] and perhaps ``layer.bias``.

        The padding may differ from side to side: (above, left, below, right).
        """
        shape = (filters, x.size(1) // groups, kernel, kernel)
        weights = [self.weight(f"{layer}.weight", *shape)]
        weights += [self.weight(f"{layer}.bias", filters)] if bias else []
        window = {"stride": stride, "padding": padding, "groups": groups}
        return self.op("conv2d", [x, *weights], layer, **window)

    def batch_norm(self, x: Value, layer: str, eps: float = 1e-5) -> Value:
        """Adds a ``BatchNorm2d`` with ``layer.weight``, ``bias``, ``mean`` and ``var``."""
        parts = ("weight", "bias", "mean", "var")
        weights = [self.weight(f"{layer}.{part}", x.size(1)) for part in parts]
        return self.op("batch_norm", [x, *weights], layer, eps=eps)

    def linear(self, x: Value, layer: str, filters: int, *, bias: bool = True) -> Value:
        """Adds a ``Linear`` with ``layer.weight`` [F, C] and perhaps ``layer.bias``."""
        weights = [self.weight(f"{layer}.weight", filters, x.size(-1))]
        weights += [self.weight(f"{layer}.bias", filters)] if bias else []
        return self.op("linear", [x, *weights], layer)

    def layer_norm(self, x: Value, layer: str, eps: float = 1e-5) -> Value:
        """Adds a ``LayerNorm`` over the last axis with ``layer.weight`` and ``layer.bias``."""
        weights = [self.weight(f"{layer}.{part}", x.size(-1)) for part in ("weight", "bias")]
        return self.op("layer_norm", [x, *weights], layer, eps=eps)

    # --- functions -----------------------------------------------------------------------------

    def add(self, a: Value, b: Value) -> Value:
        """Adds two values."""
        return self.op("add", [a, b])

    def relu(self, x: Value) -> Value:
        """Computes max(x, 0)."""
        return self.op("relu", [x])

    def gelu(self, x: Value) -> Value:
        """Computes the exact (erf) GELU."""
        return self.op("gelu", [x])

    def relu6(self, x: Value) -> Value:
        """Computes min(max(x, 0), 6)."""
        return self.op("clamp", [x], min=0.0, max=6.0)

    def max_pool2d(self, x: Value, kernel: Pair, *, stride: Pair, padding: Pair = 0) -> Value:
        """Takes maxima over windows."""
        return self.op("max_pool2d", [x], kernel=kernel, stride=stride, padding=padding)

    def avg_pool2d(
        self, x: Value, kernel: Pair | None = None, *, stride: Pair | None = None, padding: Pair = 0
    ) -> Value:
        """Averages windows; without a kernel the whole image."""
        kernel = (x.size(2), x.size(3)) if kernel is None else kernel
        stride = kernel if stride is None else stride
        return self.op("avg_pool2d", [x], kernel=kernel, stride=stride, padding=padding)

    def scaled_dot_product_attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        scale: float | None = None,
        *,
        mask: Value | None = None,
        causal: bool = False,
    ) -> Value:
        """Attends from q[N, heads, T, D] to k[N, heads, S, D] and v; the scale is 1 / sqrt(D)."""
        scale = q.size(3) ** -0.5 if scale is None else scale
        given = [q, k, v] if mask is None else [q, k, v, mask]
        name = "scaled_dot_product_attention"
        if causal:
            return self.op(name, given, scale=scale, causal=True)
        return self.op(name, given, scale=scale)

    def reshape(self, x: Value, *shape: Size) -> Value:
        """Gives the same numbers another shape."""
        return self.op("reshape", [x], shape=shape)

    def flatten(self, x: Value) -> Value:
        """Makes a vector of each image's numbers."""
        return self.reshape(x, x.shape[0], math.prod(x.size(i) for i in range(1, len(x.shape))))

    def permute(self, x: Value, *axes: int) -> Value:
        """Permutes the axes."""
        return self.op("permute", [x], axes=axes)

    def channels_last(self, x: Value) -> Value:
        """Permutes [N, C, H, W] to [N, H, W, C]."""
        return self.permute(x, 0, 2, 3, 1)

    def channels_first(self, x: Value) -> Value:
        """Permutes [N, H, W, C] to [N, C, H, W]."""
        return self.permute(x, 0, 3, 1, 2)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Takes start:stop:step of an axis."""
        more: dict[str, Attribute] = {"step": step} if step != 1 else {}
        return self.op("slice", [x], axis=axis, start=start, stop=stop, **more)  # type: ignore[arg-type]

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Puts values one behind the other."""
        return self.op("concat", values, axis=axis)

    def expand(self, x: Value, *shape: Size) -> Value:
        """Repeats sizes of 1."""
        return self.op("expand", [x], shape=shape)
