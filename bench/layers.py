"""What a network is made of on a device: the ops of its program, by name, and the distinct layers.

Both are read off the program as it is lowered, so that what is measured as a layer is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from maxvision.graphs import passes
from maxvision.graphs.constants import EVALUATE
from maxvision.graphs.lower import backend, bind, emit
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.program import Attribute, Node, Program, made
from maxvision.graphs.types import Type, at_batch
from maxvision.runtime.classifier import network
from maxvision.runtime.executor import Unchecked
from maxvision.weights import Checkpoint

COPIES = 4
"""Ops of a layer's graph on a GPU."""
MOVES = ("reshape", "permute", "slice", "concat", "expand", "cast")
"""Ops that compute nothing."""
FILTERS = {
    "conv2d": (1,),
    "linear": (1,),
    "conv2d_shortcut": (1, 4),
    "conv2d_chain": (1, 4),
    "conv2d_shortcut_chain": (1, 4, 6),
    "conv2d_mean": (1,),
    "quantized_conv2d": (1,),
    "quantized_linear": (1,),
    "quantized_conv2d_shortcut": (1, 4),
    "quantized_conv2d_chain": (1, 4),
    "quantized_conv2d_shortcut_chain": (1, 4, 6),
    "qkv_linear": (3, 5, 7),
    "quantized_qkv_linear": (3, 5, 7),
    "linear_moments": (1,),
    "attention_linear": (3,),
    "normed_linear": (2,),
    "layernorm_mlp": (2, 4),
    "squeeze_excite": (1, 3),
    "depthwise_qkv": (3, 5, 7),
    "stem_maxpool": (3,),
    "stem_maxpool_conv2d": (3, 5),
    "stem_layernorm": (3,),
    "stem_conv2d": (3,),
}
"""Which inputs of an op are filters or linear weights; the bias of each is the next one."""
NORMED = ("normed_linear", "layernorm_mlp")
"""Ops that read moments behind x, then weights that a norm is part of."""


class Operand(NamedTuple):
    """What an op reads: its type, and whether it is a weight."""

    type: Type
    is_weight: bool


def sizes(given: Type, batch: int) -> tuple[int, ...]:
    """Gives a shape at a batch size."""
    return tuple(at_batch(size, batch) for size in given.shape)


def size(given: Type, batch: int) -> int:
    """Counts the bytes of a value at a batch size."""
    return math.prod(sizes(given, batch)) * DType[given.dtype].size_in_bytes


@dataclass(frozen=True)
class Layer:
    """An op without its name: ops of one layer take the same time.

    Attributes:
        op: As programs call it.
        settings: Its attributes.
        inputs: In the op's order; None for one that is absent.
        outputs: Likewise.
        dtype: Of filters.
        by_tf32: Whether its products may be rounded to TF32.
    """

    op: str
    settings: tuple[tuple[str, Attribute], ...]
    inputs: tuple[Operand | None, ...]
    outputs: tuple[Type, ...]
    dtype: str = "float32"
    by_tf32: bool = False

    @property
    def values(self) -> list[Type]:
        """The activations that it reads."""
        return [each.type for each in self.inputs if each and not each.is_weight]

    @property
    def epilogue(self) -> str:
        """What a product ends with."""
        return str(self.setting("epilogue", "none"))

    @property
    def kind(self) -> str:
        """The op whose products it computes, in whatever numbers: 8 bits are no other layer."""
        return self.op.removeprefix("quantized_")

    def setting(self, name: str, default: Any = None) -> Any:
        """Gives an attribute."""
        return dict(self.settings).get(name, default)

    def filters(self) -> list[tuple[int, ...]]:
        """Gives the shape of each filter [F, C, R, S], linear weights as 1 x 1."""
        found = (self.inputs[i] for i in FILTERS.get(self.op, ()))
        shapes = (sizes(each.type, 0) for each in found if each)
        return [shape if len(shape) == 4 else (*shape, 1, 1) for shape in shapes]

    def title(self) -> str:
        """Describes it as the papers do: window, channels, sizes."""
        x, y = self.values[0].shape, self.outputs[0].shape
        window = ""
        if self.kind.startswith(("conv2d", "stem")):
            _, _, r, s = self.filters()[0]
            window = f"{r}x{s}/{_first(self.setting('stride', 1))} "
            if self.kind == "conv2d_shortcut":
                window = f"{r}x{s}/1 "
        elif self.op.endswith("pool2d"):
            r, s = _pair(self.setting("kernel"))
            window = f"{r}x{s}/{_first(self.setting('stride') or self.setting('kernel'))} "
        channels = f"{x[-1]}-{y[-1]}" if x[-1] != y[-1] else f"{x[-1]}"
        if self.kind.endswith("_chain") or self.kind == "stem_maxpool_conv2d":
            channels += f"-{self.outputs[1].shape[-1]}"
        if self.op in ("layernorm_mlp", "squeeze_excite"):
            channels = f"{x[-1]}-{self.filters()[0][0]}-{y[-1]}"
        if self.kind.startswith("conv2d_shortcut"):
            channels += f" and {self.values[1].shape[-1]}"
        at = "x".join(str(size) for size in x[1:-1])
        return f"{window}{channels}{f' at {at}' if at else ''}"

    def weights(self, rng: np.random.Generator) -> dict[int, np.ndarray]:
        """Draws the weights, by the places of the inputs, as checkpoints store them."""
        filters = FILTERS.get(self.op, ())
        found: dict[int, np.ndarray] = {}
        for i, each in enumerate(self.inputs):
            if not each or not each.is_weight:
                continue
            shape = sizes(each.type, 0)
            if i in filters:
                scale = np.float32(math.prod(shape[1:]) ** -0.5)
                found[i] = rng.standard_normal(shape, np.float32) * scale
            elif i - 1 in filters:
                found[i] = rng.standard_normal(shape, np.float32)
            else:
                found[i] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        if self.op in NORMED:
            whole = np.ones(found[2].shape[1], np.float32)
            found[2] = EVALUATE["norm_filter"](found[2], whole, to=self.dtype)
        return found

    def flops(self, batch: int) -> float:
        """Counts the operations of its matrix products, two a multiply-accumulate."""
        y = [math.prod(sizes(each, batch)) for each in self.outputs]
        filters = self.filters()
        depths = [math.prod(shape[1:]) for shape in filters]
        if self.kind in ("conv2d", "linear", "linear_moments", "normed_linear"):
            return 2.0 * y[0] * depths[0]
        if self.op == "conv2d_mean":
            return 2.0 * math.prod(sizes(self.values[0], batch)[:3]) * filters[0][0] * depths[0]
        if self.kind == "conv2d_shortcut":
            return 2.0 * y[0] * sum(depths)
        if self.kind == "conv2d_shortcut_chain":
            return 2.0 * (y[0] * sum(depths[:2]) + y[1] * depths[2])
        if self.kind in ("conv2d_chain", "qkv_linear"):
            return sum(2.0 * each * depth for each, depth in zip(y, depths, strict=False))
        if self.op == "layernorm_mlp":
            pixels = y[0] // filters[1][0]
            return sum(2.0 * pixels * f * c for f, c, _, _ in filters)
        if self.op == "squeeze_excite":
            images = sizes(self.outputs[0], batch)[0]
            return sum(2.0 * images * f * c for f, c, _, _ in filters)
        if self.op.startswith("stem"):
            n, h, w, _ = sizes(self.values[0], batch)
            _, _, r, s = filters[0]
            stride, pad = self.setting("stride"), self.setting("padding")
            p, q = ((side + 2 * pad - tap) // stride + 1 for side, tap in ((h, r), (w, s)))
            following = sum(2.0 * z * depth for z, depth in zip(y[1:], depths[1:], strict=True))
            return 2.0 * n * p * q * filters[0][0] * depths[0] + following
        if self.op == "attention":
            return 4.0 * y[0] * sizes(self.values[1], batch)[1]
        if self.op == "attention_linear":
            return y[0] * (4.0 * sizes(self.values[1], batch)[1] + 2.0 * depths[0])
        if self.op == "attention_grad":
            return 10.0 * y[0] * sizes(self.values[1], batch)[1]
        if self.op == "depthwise_qkv":
            taps, token = self.setting("kernel") ** 2, int(self.setting("class_token"))
            shapes = [sizes(each, batch) for each in self.outputs]
            return sum(2.0 * taps * n * (tokens - token) * c for n, tokens, c in shapes)
        if self.op == "matmul":
            return 2.0 * y[0] * sizes(self.values[0], batch)[-1]
        return 0.0

    def traffic(self, batch: int) -> int:
        """Counts the bytes of everything that it reads and writes, once."""
        filters = FILTERS.get(self.op, ())
        dtype = self.dtype if self.kind == self.op else "int8"  # floats of 8 bits are as small
        read = []
        for i, each in enumerate(self.inputs):
            if each:
                narrow = i in filters or (self.op, i) == ("class_token", 1)
                read.append(each.type._replace(dtype=dtype) if narrow else each.type)
        if self.op == "layernorm_first":  # which reads as much as it writes
            read[0] = self.outputs[0]
        return sum(size(each, batch) for each in (*read, *self.outputs))

    def program(self, copies: int, prefix: str) -> Program:
        """Puts so many of it side by side, each on values and weights of its own.

        Weights are called ``prefix.COPY.PLACE`` by the places of the inputs.
        """
        inputs: dict[str, Type] = {}
        weights: dict[str, Type] = {}
        nodes: list[Node] = []
        outputs: dict[str, str] = {}
        for copy in range(copies):
            names = []
            for i, each in enumerate(self.inputs):
                names.append(f"{prefix}.{copy}.{i}" if each else "")
                if each:
                    (weights if each.is_weight else inputs)[names[-1]] = each.type
            results = tuple(f"{prefix}.{copy}.y{i}" for i in range(len(self.outputs)))
            nodes.append(Node(self.op, tuple(names), results, dict(self.settings)))
            outputs |= {name: name for name in results}
        return made(prefix, inputs, weights, nodes, outputs)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _first(value: Any) -> int:
    return _pair(value)[0]


class Named(NamedTuple):
    """An op of a network.

    Attributes:
        name: Of its layers; of its neighbours if it has none.
        layer: What it computes.
        after: The ops that it reads from, by their places in the list.
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
) -> list[Named]:
    """Lists the ops of a checkpoint's network as they are lowered for a device."""
    return lowered(network(checkpoint, size, dtype.name), device, dtype, tf32=tf32)


def lowered(program: Program, device: DeviceRef, dtype: DType, *, tf32: bool = True) -> list[Named]:
    """Lists the ops of a plain program as they are lowered for a device."""
    rounds = tf32 and dtype == DType.float32 and device.is_gpu()
    return listed(passes.run(program, backend(device, dtype.name)), dtype.name, rounds)


def listed(program: Program, dtype: str, tf32: bool = False) -> list[Named]:
    """Lists the ops of a program that compute something, in its order."""
    found: list[Named] = []
    sources: dict[str, frozenset[int]] = {}  # of each value, the ops that it comes from
    for node in program.nodes:
        if node.at_load:
            continue
        before = frozenset[int]().union(*(sources.get(x, frozenset()) for x in node.inputs))
        if node.op not in MOVES or "expression" in node.attributes:
            inputs = tuple(
                Operand(program.types[x], x in program.constants) if x else None
                for x in node.inputs
            )
            outputs = tuple(program.types[value] for value in node.outputs)
            settings = tuple(sorted(node.attributes.items()))
            layer = Layer(node.op, settings, inputs, outputs, dtype, tf32)
            name = _name(node, [found[i].name for i in sorted(before)])
            found.append(Named(name, layer, before))
            before = frozenset({len(found) - 1})
        sources.update((value, before) for value in node.outputs)
    return found


def _name(node: Node, before: list[str]) -> str:
    """Names an op by its layers, or by the ops before it."""
    layers = [layer for layer in node.layers if not layer.startswith("pixels.")]
    if not layers:
        common = _common(before) if len(before) > 1 else "".join(before).rpartition(".")[0]
        return common if common.rpartition(".")[2] == node.op else node.op
    if node.op.endswith(("_chain", "maxpool_conv2d")):  # of two blocks
        return " + ".join(layers)
    if node.op == "normed_linear":  # the norm is part of others, too
        return layers[-1]
    common = _common(layers)
    if common in layers or common.rpartition(".")[2] == node.op:
        return common
    return f"{common}.{node.op}".lstrip(".")


def _common(names: Sequence[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def distinct(found: Sequence[Named]) -> dict[Layer, list[str]]:
    """Groups ops by what they compute, in the order of their first."""
    layers: dict[Layer, list[str]] = {}
    for each in found:
        layers.setdefault(each.layer, []).append(each.name)
    return layers


def layer_module(
    layers: Sequence[Layer], device: DeviceRef, dtype: DType, copies: int, *, tf32: bool = True
) -> tuple[Module, Parameters, list[list[dict[int, np.ndarray]]]]:
    """Builds a graph for each layer: ``copies`` ops side by side, every one on its own tensors.

    Returns:
        The module, whose graph ``layer<i>`` takes the values of one copy after another; what binds
        the weights; and for each layer and copy the weights as ``Layer.weights`` draws them.
    """
    rng = np.random.default_rng(0)
    drawn = [[layer.weights(rng) for _ in range(copies)] for layer in layers]
    tensors = {
        f"layer{i}.{copy}.{place}": array
        for i, each in enumerate(drawn)
        for copy, arrays in enumerate(each)
        for place, array in arrays.items()
    }
    programs = [layer.program(copies, f"layer{i}") for i, layer in enumerate(layers)]
    parameters = bind(programs, tensors, device, dtype.name, tf32)
    module = Module()
    for program in programs:
        types = [TensorType(DType[t.dtype], t.shape, device) for t in program.inputs.values()]
        with Graph(
            program.name, input_types=types, kernel_library=Unchecked(), module=module
        ) as graph:
            graph.output(*emit(program, [x.tensor for x in graph.inputs], parameters))
    return module, parameters, drawn
