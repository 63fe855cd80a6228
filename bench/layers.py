"""What a network is made of: the nodes of its compiled graph, by name, and the distinct layers.

Both are read off the graph that is compiled, so that what is measured as a layer is what runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType, ops

from maxvision.graphs.parameters import Parameters
from maxvision.runtime.session import Unchecked, build
from maxvision.weights import Checkpoint

COPIES = 4
"""Nodes of a layer's graph on a GPU."""

INSIDE = ("filter", "weight", "bias")
"""Last parts of the names of a layer's own weights."""


class Operand(NamedTuple):
    """What a node reads or gives.

    Attributes:
        kind: ``value`` for activations, ``weight``, or ``setting`` for numbers in the graph.
        dtype: Of its numbers.
        shape: Sizes, the batch as its name.
        numbers: Of a setting.
    """

    kind: str
    dtype: DType
    shape: tuple[int | str, ...]
    numbers: tuple[float, ...] = ()

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Gives the shape at a batch size."""
        return tuple(batch if isinstance(size, str) else size for size in self.shape)

    def bytes(self, batch: int) -> int:
        """Counts the bytes at a batch size."""
        return math.prod(self.sizes(batch)) * self.dtype.size_in_bytes


@dataclass(frozen=True)
class Layer:
    """A node without its name: nodes of one layer take the same time.

    Attributes:
        op: As it is registered.
        parameters: Of the op, by name.
        inputs: In the op's order.
        outputs: Likewise; see ``results``.
    """

    op: str
    parameters: tuple[tuple[str, Any], ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def values(self) -> list[Operand]:
        """The activations that it reads."""
        return [each for each in self.inputs if each.kind == "value"]

    @property
    def results(self) -> tuple[Operand, ...]:
        """The outputs that are read; an MLP's others are room for what is in between."""
        return self.outputs[:1] if self.op == "layernorm_mlp" else self.outputs

    def setting(self, index: int = -1) -> tuple[int, ...]:
        """Gives the integers of a setting."""
        return tuple(int(number) for number in self.inputs[index].numbers)

    @property
    def window(self) -> tuple[int, ...]:
        """Gives the nine numbers of ops/geometry.mojo."""
        if self.op == "conv2d_chain":
            return 1, 1, 1, 1, 0, 0, 1, 1, 1
        return self.setting(-2 if self.op == "conv2d_shortcut" else -1)

    def parameter(self, name: str) -> Any:
        """Gives a parameter."""
        return dict(self.parameters)[name]

    @property
    def by_tf32(self) -> bool:
        """Whether its products may be rounded to TF32."""
        return bool(dict(self.parameters).get("tf32", False))

    def title(self) -> str:
        """Describes it as the papers do: window, channels, sizes."""
        x, y = self.values[0].shape, self.outputs[0].shape
        window = ""
        if self.op.startswith(("conv2d", "sparse_conv2d", "maxpool", "avgpool", "stem")):
            r, s, stride = self.window[:3]
            window = f"{r}x{s}/{stride} "
        channels = f"{x[-1]}-{y[-1]}" if x[-1] != y[-1] else f"{x[-1]}"
        if self.op == "conv2d_chain":
            channels += f"-{self.outputs[1].shape[-1]}"
        if self.op == "layernorm_mlp":
            channels = f"{x[-1]}-{self.outputs[2].shape[-1]}-{y[-1]}"
        if self.op == "conv2d_shortcut":
            channels += f" and {self.values[1].shape[-1]}"
        at = "x".join(str(size) for size in x[1:-1])
        return f"{window}{channels}{f' at {at}' if at else ''}"

    def filter(self, index: int) -> tuple[int, ...] | None:
        """Gives R, S, C, F of an input that is a filter; its bias is the next input."""
        if index < 0 or self.inputs[index].kind != "weight":
            return None
        c, f = (int(each.shape[-1]) for each in (self.values[0], self.outputs[0]))
        if self.op in ("conv2d", "conv2d_add", "conv2d_shortcut") and index == 1:
            r, s, *_, groups = self.window
            return r, s, c // groups, f
        if self.op == "conv2d_shortcut" and index == 4:
            return 1, 1, int(self.values[1].shape[-1]), f
        if self.op == "conv2d_chain" and index in (1, 4):
            return 1, 1, *((c, f) if index == 1 else (f, int(self.outputs[1].shape[-1])))
        if self.op == "layernorm_mlp" and index in (3, 5):
            k = int(self.outputs[2].shape[-1])
            return 1, 1, *((c, k) if index == 3 else (k, f))
        products = {"bmm": (1,), "bmm_add": (1,), "qkv_linear": (3, 5, 7)}
        if index in products.get(self.op, ()):
            return 1, 1, c, f
        if self.op in ("stem_maxpool", "stem_layernorm") and index == 3:
            r, s = self.window[:2]
            return r, s, c, f
        if self.op == "depthwise_qkv" and index in (3, 5, 7):
            return self.parameter("kernel"), self.parameter("kernel"), 1, f
        return None

    def weights(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws weights: ``<index>.filter`` [R, S, C, F] with ``.bias``, or ``<index>``."""
        found: dict[str, np.ndarray] = {}
        for j, each in enumerate(self.inputs):
            if shape := self.filter(j):
                scale = math.prod(shape[:3]) ** -0.5
                found[f"{j}.filter"] = rng.standard_normal(shape, np.float32) * np.float32(scale)
            elif self.filter(j - 1):
                found[f"{j - 1}.bias"] = rng.standard_normal(each.sizes(1), np.float32)
            elif each.kind == "weight":
                found[str(j)] = rng.uniform(0.5, 1.5, each.sizes(1)).astype(np.float32)
        return found

    def operands(self, values: Iterator[Any], parameters: Parameters) -> list[Any]:
        """Puts its inputs together in a graph, weights laid out as the network lays them out."""
        found: list[Any] = []
        for j, each in enumerate(self.inputs):
            if len(found) > j:
                continue  # a bias, which came with its filter
            if each.kind == "value":
                found.append(next(values))
            elif each.kind == "setting":
                array = np.array(each.numbers, each.dtype.to_numpy()).reshape(each.sizes(1))
                found.append(ops.constant(array, each.dtype, device=DeviceRef.CPU()))
            elif shape := self.filter(j):
                if self.op.startswith("stem"):
                    made = parameters.stem(str(j), self.parameter("stride"))
                    arranged = made.fragments
                else:
                    groups = self.window[-1] if self.op.startswith("conv2d") else 1
                    groups = shape[3] if self.op == "depthwise_qkv" else groups
                    made = parameters.filter(str(j), groups)
                    arranged = made.dense
                found += [arranged, made.bias]
            else:
                found.append(parameters.vector(str(j), each.dtype))
        return found

    def flops(self, batch: int) -> float:
        """Counts the operations of its matrix products, two a multiply-accumulate."""
        y = self.outputs[0].sizes(batch)
        if self.op in ("conv2d_chain", "layernorm_mlp"):
            filters = [shape for j in range(len(self.inputs)) if (shape := self.filter(j))]
            return sum(2.0 * math.prod(y[:-1]) * c * f for *_, c, f in filters)
        if self.op.startswith(("conv2d", "sparse_conv2d")):
            r, s, *_, groups = self.window
            depth = r * s * self.values[0].sizes(batch)[-1] / groups
            if self.op == "conv2d_shortcut":
                depth += self.values[1].sizes(batch)[-1]
            return 2.0 * math.prod(y) * depth
        if self.op.startswith("stem"):
            r, s, stride, _, pad = self.window[:5]
            n, h, w, c = self.values[0].sizes(batch)
            p, q = ((side + 2 * pad - tap) // stride + 1 for side, tap in ((h, r), (w, s)))
            return 2.0 * n * p * q * r * s * c * y[-1]
        if self.op.startswith("bmm") or self.op == "qkv_linear":
            results = sum(math.prod(each.sizes(batch)) for each in self.outputs)
            return 2.0 * results * self.values[0].sizes(batch)[-1]
        if self.op == "attention":
            return 4.0 * math.prod(y) * self.values[1].sizes(batch)[1]
        if self.op == "depthwise_qkv":
            taps, token = self.parameter("kernel") ** 2, self.setting()[0]
            sizes = [each.sizes(batch) for each in self.outputs]
            return sum(2.0 * taps * n * (tokens - token) * c for n, tokens, c in sizes)
        return 0.0

    def traffic(self, batch: int) -> int:
        """Counts the bytes of everything that it reads and writes, once."""
        moved = [each for each in self.inputs if each.kind != "setting"]
        if self.op == "layernorm_first":  # which reads as much as it writes
            moved[0] = self.outputs[0]
        return sum(each.bytes(batch) for each in (*moved, *self.results))


class Node(NamedTuple):
    """A node of a graph.

    Attributes:
        name: Of its weights, as graphs/*.py call them; of its neighbours if it has none.
        layer: What it computes.
        after: The nodes that it reads from, by their places in the graph.
    """

    name: str
    layer: Layer
    after: frozenset[int]


def network_nodes(
    checkpoint: Checkpoint,
    device: DeviceRef,
    dtype: DType,
    size: tuple[int, int],
    *,
    tf32: bool = True,
) -> list[Node]:
    """Lists the nodes of a checkpoint's network as it is compiled for a device."""
    graph, _ = build(checkpoint, device, dtype, size=size, tf32=tf32, kernels=Unchecked())
    return nodes(graph)


def nodes(graph: Graph) -> list[Node]:
    """Lists the nodes of a graph that are ops of ours, in its order."""
    found: list[Node] = []
    sources: dict[Any, frozenset[int]] = {}  # of each value, the nodes that it comes from
    body = graph.module.mlir_module.body  # kernels' declarations too, once it was compiled
    (top,) = (op for op in body if type(op).__name__ == "GraphOp" and op.sym_name == graph.name)
    for op in top.regions[0].front:
        read = [getattr(x, "value", x) for x in op.operands]  # an OpOperand, of some ops
        before = frozenset[int]().union(*(sources.get(x, frozenset()) for x in read))
        if type(op).__name__ == "CustomOp":
            before = frozenset({_node(op, before, found)})
        for value in op.results:
            sources[value] = before
    return found


def _node(op: Any, before: frozenset[int], found: list[Node]) -> int:
    truth = {"true": True, "false": False}
    parameters = tuple((name, truth.get(x.asm, x.value)) for name, x in op.parameters.value)
    inputs = tuple(_operand(value) for value in op.operands)
    outputs = tuple(_operand(value, kind="value") for value in op.results)
    names = [
        value.owner.name
        for value, each in zip(op.operands, inputs, strict=True)
        if each.kind == "weight"
    ]
    layer = Layer(op.symbol, parameters, inputs, outputs)
    found.append(
        Node(_name(op.symbol, names, [found[i].name for i in sorted(before)]), layer, before)
    )
    return len(found) - 1


def _operand(value: Any, kind: str = "") -> Operand:
    owner = type(value.owner).__name__
    kinds = {"ConstantExternalOp": "weight", "ConstantOp": "setting"}
    kind = kind or kinds.get(owner, "value")
    found = TensorType.from_mlir(value.type)
    shape = tuple(int(d) if str(d).isdecimal() else str(d) for d in found.shape)
    numbers: tuple[float, ...] = ()
    if kind == "setting":
        listed = re.search(r"<([^<>]*)>", str(value.owner.value))
        assert listed, value.owner.value
        numbers = tuple(float(word) for word in listed[1].split(","))
    return Operand(kind, found.dtype, shape, numbers)


def _name(op: str, weights: list[str], before: list[str]) -> str:
    """Names a node by its weights, or by the nodes before it."""
    own = [name for name in weights if not name.startswith("pixels.")]
    if not own:
        common = _common(before) if len(before) > 1 else "".join(before).rpartition(".")[0]
        return common if common.rpartition(".")[2] == op else op
    stems = [stem if last in INSIDE else name for name in own for stem, _, last in [_split(name)]]
    if op == "conv2d_chain":  # of two blocks
        return " + ".join(dict.fromkeys(stems))
    common = _common(stems)
    return common if common in stems else _joined(common, op)


def _split(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


def _common(names: Sequence[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _joined(prefix: str, op: str) -> str:
    return prefix if prefix.rpartition(".")[2] == op else f"{prefix}.{op}".lstrip(".")


def distinct(found: Sequence[Node]) -> dict[Layer, list[str]]:
    """Groups nodes by what they compute, in the order of their first."""
    layers: dict[Layer, list[str]] = {}
    for node in found:
        layers.setdefault(node.layer, []).append(node.name)
    return layers


def layer_module(
    layers: Sequence[Layer], device: DeviceRef, dtype: DType, copies: int
) -> tuple[Module, Parameters, list[list[dict[str, np.ndarray]]]]:
    """Builds a graph for each layer: ``copies`` nodes side by side, every one on its own tensors.

    Returns:
        The module, whose graph ``layer<i>`` takes the values of one copy after another; what binds
        the weights; and for each layer and copy the weights as ``Layer.weights`` names them.
    """
    rng = np.random.default_rng(0)
    drawn = [[layer.weights(rng) for _ in range(copies)] for layer in layers]
    named = {
        f"layer{i}.{copy}.{name}": array
        for i, each in enumerate(drawn)
        for copy, arrays in enumerate(each)
        for name, array in arrays.items()
    }
    parameters = Parameters(named, device, dtype)
    module = Module()
    for i, layer in enumerate(layers):
        types = [TensorType(v.dtype, v.shape, device=device) for v in layer.values]
        with Graph(
            f"layer{i}", input_types=types * copies, kernel_library=Unchecked(), module=module
        ) as graph:
            values = iter(graph.inputs)
            outs = [TensorType(y.dtype, y.shape, device=device) for y in layer.outputs]
            results: list[Any] = []
            for copy in range(copies):
                operands = layer.operands(values, parameters.at(f"layer{i}.{copy}"))
                results += ops.custom(
                    layer.op,
                    device=device,
                    values=operands,
                    out_types=outs,
                    parameters=dict(layer.parameters),
                )
            graph.output(*results)
    return module, parameters, drawn
