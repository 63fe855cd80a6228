"""Writes a quantised network down: a plain program that rounds what its products read.

``quantized`` puts a ``fake_quantize`` behind values and a ``fake_quantize_filter`` behind weights.
The program means the same on every device; where one has products of 8-bit integers, the pass
``eight_bit`` makes them of these (graphs/passes/eight_bit.py). Activations have one scale and one
zero point, weights a scale for each filter: Jacob et al. 2018 (arXiv:1712.05877), and
Krishnamoorthi 2018 (arXiv:1806.08342), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from maxvision.common.errors import ModelError
from maxvision.graphs.program import Attribute, Node, Program, free, rebuilt

STEPS = 255
"""From the least integer of activations to the largest."""
GROUP = 4
"""Channels that kernels multiply at once (ops/dot.mojo)."""
CONFIG = "maxvision_quantization"
"""What config.json calls it; transformers, which knows nothing of it, runs the model in floats."""


class Grid(NamedTuple):
    """The integers that activations are rounded to: scale * (low, low + 1, ..., low + 255).

    Attributes:
        scale: What one step stands for.
        low: The least integer, from -255 to 0.
    """

    scale: float
    low: int

    @classmethod
    def of(cls, least: float, largest: float) -> Grid:
        """Makes the finest grid that holds 0 and all between two numbers."""
        least, largest = min(float(least), 0.0), max(float(largest), 0.0)
        scale = (largest - least) / STEPS
        if not scale:
            return cls(1.0, 0)
        return cls(scale, max(-STEPS, round(least / scale)))

    @property
    def attributes(self) -> dict[str, Attribute]:
        """What a ``fake_quantize`` to these integers has."""
        low = float(self.low)
        return {"scale": self.scale, "low": low, "high": low + STEPS}

    @classmethod
    def read(cls, node: Node) -> Grid | None:
        """Gives the integers that a node rounds to; nothing if it does not, or to more or fewer."""
        if node.op != "fake_quantize":
            return None
        scale, low = (float(node.attributes[name]) for name in ("scale", "low"))  # type: ignore[arg-type]
        found = cls(scale, int(low))
        return found if found.attributes == node.attributes else None


@dataclass(frozen=True)
class Quantization:
    """What of a network is rounded.

    Attributes:
        values: The grid of each value that products read, and of residuals.
        layers: The products whose weights are rounded.
        dtype: ``int8``.
    """

    values: Mapping[str, Grid]
    layers: tuple[str, ...]
    dtype: str = "int8"

    def without(self, layers: Sequence[str]) -> Quantization:
        """Leaves layers as they are."""
        return replace(self, layers=tuple(each for each in self.layers if each not in layers))

    def to_config(self) -> dict[str, Any]:
        """Describes it as config.json has it, under ``CONFIG``."""
        return {
            "dtype": self.dtype,
            "values": {name: list(grid) for name, grid in self.values.items()},
            "layers": list(self.layers),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, where: str) -> Quantization | None:
        """Reads what ``to_config`` wrote; nothing if a config.json has none.

        Raises:
            ModelError: If it cannot be read.
        """
        found = (config or {}).get(CONFIG)
        if found is None:
            return None
        try:
            values = {name: Grid(float(s), int(low)) for name, (s, low) in found["values"].items()}
            layers, dtype = tuple(map(str, found["layers"])), str(found["dtype"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{where}: {CONFIG} in config.json cannot be read ({error!r}); run maxvision"
                " quantize again"
            ) from None
        if dtype != "int8" or any(
            not 0 < grid.scale < float("inf") or not -STEPS <= grid.low <= 0
            for grid in values.values()
        ):
            raise ModelError(
                f"{where}: {CONFIG} in config.json has a scale, zero point or dtype that is none;"
                " run maxvision quantize again"
            )
        return cls(values, layers, dtype)


def places(program: Program, pixels: bool = False) -> tuple[list[str], list[str]]:
    """Finds what may be rounded: the values that products read, and residuals; these products.

    A product is a convolution or linear layer with weights. What reads pixels stays as it is, and
    so does what gives an output, a convolution of one pixel, as in squeeze and excite, and one in
    groups that is not depthwise.

    Args:
        program: The network.
        pixels: Whether what reads pixels is rounded, too: a convolution in one group.
    """
    values: dict[str, None] = {}
    layers: list[str] = []
    for node in program.nodes:
        if _is_product(program, node) or (pixels and _reads_pixels(program, node)):
            values[node.inputs[0]] = None
            layers += node.layers
    for node in program.nodes:
        if node.op == "add" and len(node.inputs) == 2:
            first, second = (_made_by_product(program, value, layers) for value in node.inputs)
            if first and second and values.keys().isdisjoint(node.inputs):
                values[node.inputs[1]] = None
    return list(values), layers


def _is_product(program: Program, node: Node) -> bool:
    if node.op not in ("conv2d", "linear") or not node.layers or node.at_load:
        return False
    x, weight = node.inputs[:2]
    if weight not in program.weights or x in program.inputs or x in program.constants:
        return False
    if node.output in program.outputs.values():
        return False
    if node.op == "linear":
        return program.types[weight].shape[1] % GROUP == 0
    f, c, *_ = program.types[weight].shape
    if program.types[x].shape[2:] == (1, 1):
        return False
    groups = node.attributes.get("groups", 1)
    return c % GROUP == 0 if groups == 1 else c == 1 and f == groups


def _reads_pixels(program: Program, node: Node) -> bool:
    """Tells whether a convolution in one group reads the images that a network takes."""
    return (
        node.op == "conv2d"
        and bool(node.layers)
        and node.inputs[0] in program.inputs
        and node.inputs[1] in program.weights
        and node.attributes.get("groups", 1) == 1
    )


def _made_by_product(program: Program, value: str, layers: Sequence[str]) -> bool:
    """Tells whether a product among ``layers`` makes a value, a batch norm behind it or not."""
    node = program.producers.get(value)
    if node and node.op == "batch_norm":
        node = program.producers.get(node.inputs[0])
    return node is not None and any(layer in layers for layer in node.layers)


def quantized(program: Program, how: Quantization) -> Program:
    """Rounds what products read, and their weights.

    Raises:
        ModelError: If the program has no such value or layer.
    """
    known, layers = {layer for node in program.nodes for layer in node.layers}, set(how.layers)
    gone = [name for name in how.values if name not in program.types]
    gone += [layer for layer in how.layers if layer not in known]
    if gone:
        raise ModelError(
            f"{program.name}: {CONFIG} in config.json names {', '.join(gone[:3])}, which the"
            " network does not have; run maxvision quantize again"
        )
    taken = set(program.types)
    rounded: dict[str, str] = {}
    nodes: list[Node] = []
    for value in (each for each in program.inputs if each in how.values):
        rounded[value] = free(taken, f"{value}.rounded")
        attributes = how.values[value].attributes
        nodes.append(Node("fake_quantize", (value,), (rounded[value],), attributes))
    products = {node.output for node in program.nodes if not layers.isdisjoint(node.layers)}
    read = {node.inputs[0] for node in program.nodes if node.output in products}
    for node in program.nodes:
        product = node.output in products
        reads = 1 if product else 2 if node.op == "add" else 0
        inputs = [rounded.get(value, value) for value in node.inputs[:reads]]
        inputs += node.inputs[reads:]
        if product and inputs[0] != node.inputs[0]:
            weight = free(taken, f"{inputs[1]}.rounded")
            nodes.append(Node("fake_quantize_filter", (inputs[1],), (weight,), at_load=True))
            inputs[1] = weight
        nodes.append(replace(node, inputs=tuple(inputs)))
        for value in node.outputs:
            if value in how.values and (value in read or _is_residual(program, value, how)):
                rounded[value] = free(taken, f"{value}.rounded")
                attributes = how.values[value].attributes
                nodes.append(Node("fake_quantize", (value,), (rounded[value],), attributes))
    return rebuilt(program, nodes)


def _is_residual(program: Program, value: str, how: Quantization) -> bool:
    """Tells whether a value that no product reads is added to what one made."""
    return any(
        user.op == "add"
        and any(
            other != value and _made_by_product(program, other, how.layers) for other in user.inputs
        )
        for user in program.users.get(value, ())
    )
