"""Writes a quantised network down: a plain program that rounds what its products read.

``quantized`` puts a ``fake_quantize`` behind values and a ``fake_quantize_filter`` behind weights.
The program means the same on every device; where one has products of 8-bit integers, the pass
``eight_bit`` makes them of these (graphs/passes/eight_bit.py). Activations have one scale and one
zero point, weights a scale for each filter: Jacob et al. 2018 (arXiv:1712.05877), and
Krishnamoorthi 2018 (arXiv:1806.08342), section 3. Or both are floats of 8 bits, which need no zero
point: Micikevicius et al. 2022 (arXiv:2209.05433). ``Grid`` and ``Float8`` are the two kinds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.graphs.arrange import MLPS
from maxvision.graphs.constants import LEVELS, Array, e4m3
from maxvision.graphs.elementwise import activation
from maxvision.graphs.program import Attribute, Node, Program, free, rebuilt
from maxvision.graphs.types import FLOAT8

STEPS = 255
"""From the least integer of activations to the largest."""
MOVES = ("reshape", "permute", "slice")
"""Ops that give numbers of what they read."""
GROUP = 4
"""Channels that kernels multiply at once (ops/dot.mojo)."""
ROW = 16
"""Of what channels and filters are a multiple in products of ``FLOAT8``, which Hopper alone has."""
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

    @classmethod
    def made(cls, scale: float, low: float) -> Grid:
        """Makes one of the numbers that config.json and attributes of nodes have."""
        return cls(float(scale), int(low))

    @classmethod
    def read(cls, node: Node) -> Grid | None:
        """Gives the integers that a node rounds to; nothing if it does not, or to more or fewer."""
        if node.op != "fake_quantize" or "low" not in node.attributes:
            return None
        scale, low = (float(node.attributes[name]) for name in ("scale", "low"))  # type: ignore[arg-type]
        found = cls(scale, int(low))
        return found if found.attributes == node.attributes else None

    @property
    def attributes(self) -> dict[str, Attribute]:
        """What a ``fake_quantize`` to these integers has."""
        low = float(self.low)
        return {"scale": self.scale, "low": low, "high": low + STEPS}

    @property
    def is_sound(self) -> bool:
        """Whether there are such integers."""
        return 0 < self.scale < float("inf") and -STEPS <= self.low <= 0

    @property
    def stored(self) -> str:
        """In what activations are stored."""
        return "uint8"

    @property
    def factor(self) -> str:
        """In what the weights are that they are multiplied by."""
        return "int8"

    @property
    def bounds(self) -> tuple[float, float]:
        """The least number and the largest."""
        return self.scale * self.low, self.scale * (self.low + STEPS)

    @property
    def commuting(self) -> tuple[str, ...]:
        """The activations that give the same of what is stored: none with a zero point."""
        return ()

    @property
    def storing(self) -> tuple[str, dict[str, float]]:
        """How a float ``x0`` is stored: an expression, and the numbers ``x1``, ... in it."""
        return "x0 x1 mul round x2 add", {"inverse": 1 / self.scale, "zero": float(-self.low)}

    @classmethod
    def stored_by(cls, expression: str, numbers: Sequence[float]) -> Grid | None:
        """Gives the integers as which an expression stores ``x0``; nothing if it does not."""
        if expression != cls.made(1.0, 0).storing[0]:
            return None
        inverse, zero = numbers
        return cls(1 / inverse, -round(zero))

    @property
    def standing(self) -> tuple[str, dict[str, float]]:
        """What a stored ``x0`` stands for, likewise."""
        return "x0 x1 add x2 mul", {"low": float(self.low), "scale": self.scale}

    def nearest(self, steps: Array) -> Array:
        """Rounds numbers that are divided by the scale."""
        found: Array = np.clip(np.rint(steps), self.low, self.low + STEPS)
        return found


class Float8(NamedTuple):
    """The floats of 8 bits that activations are rounded to: scale * those of ``FLOAT8``.

    Its methods and properties are those of ``Grid``.

    Attributes:
        scale: What 1 stands for.
    """

    scale: float

    @classmethod
    def of(cls, least: float, largest: float) -> Float8:
        """Makes those whose largest number, of either sign, is that of two."""
        return cls(max(abs(float(least)), abs(float(largest))) / LEVELS[FLOAT8] or 1.0)

    @classmethod
    def made(cls, scale: float) -> Float8:
        """See ``Grid.made``."""
        return cls(float(scale))

    @classmethod
    def read(cls, node: Node) -> Float8 | None:
        """Gives the floats that a node rounds to; nothing if it does not."""
        if node.op != "fake_quantize" or node.attributes.get("to") != FLOAT8:
            return None
        return cls(float(node.attributes["scale"]))  # type: ignore[arg-type]

    @property
    def attributes(self) -> dict[str, Attribute]:
        """What a ``fake_quantize`` to these floats has."""
        return {"scale": self.scale, "to": FLOAT8}

    @property
    def is_sound(self) -> bool:
        """Whether there are such floats."""
        return 0 < self.scale < float("inf")

    @property
    def low(self) -> int:
        """The zero point's negative: there is none."""
        return 0

    @property
    def stored(self) -> str:
        """In what activations are stored."""
        return FLOAT8

    @property
    def factor(self) -> str:
        """In what the weights are that they are multiplied by."""
        return FLOAT8

    @property
    def bounds(self) -> tuple[float, float]:
        """The least number and the largest."""
        return -LEVELS[FLOAT8] * self.scale, LEVELS[FLOAT8] * self.scale

    @property
    def commuting(self) -> tuple[str, ...]:
        """See ``Grid.commuting``."""
        return ("relu",)

    @property
    def storing(self) -> tuple[str, dict[str, float]]:
        """See ``Grid.storing``."""
        return "x0 x1 mul", {"inverse": 1 / self.scale}

    @classmethod
    def stored_by(cls, expression: str, numbers: Sequence[float]) -> Float8 | None:
        """See ``Grid.stored_by``."""
        return cls(1 / numbers[0]) if expression == cls.made(1.0).storing[0] else None

    @property
    def standing(self) -> tuple[str, dict[str, float]]:
        """See ``Grid.standing``."""
        return "x0 x1 mul", {"scale": self.scale}

    def nearest(self, steps: Array) -> Array:
        """Rounds numbers that are divided by the scale."""
        return e4m3(steps)


Rounding: TypeAlias = Grid | Float8
"""What 8 bits stand for."""
KINDS: dict[str, type[Grid] | type[Float8]] = {"int8": Grid, FLOAT8: Float8}
"""Of activations, by the dtype of the weights that they are multiplied by: config.json's."""
STORED: dict[str, type[Grid] | type[Float8]] = {"uint8": Grid, FLOAT8: Float8}
"""By the dtype in which activations are stored."""


def rescales(epilogue: str, result: Rounding | None) -> bool:
    """Tells whether Hopper's kernels divide a result by its scale behind an activation.

    Elsewhere the scale divides what comes before. See ``rescales`` of ops/epilogue.mojo.
    """
    return result is not None and activation(epilogue) not in ("", *result.commuting)


def rounding_of(node: Node) -> Rounding | None:
    """Gives what a node rounds to; nothing if it does not, or to something else than 8 bits."""
    return Grid.read(node) or Float8.read(node)


@dataclass(frozen=True)
class Quantization:
    """What of a network is rounded.

    Attributes:
        values: What each value that products read is rounded to, and residuals.
        layers: The products whose weights are rounded.
        dtype: To which these are; one of ``KINDS``, as which the values are.
    """

    values: Mapping[str, Rounding]
    layers: tuple[str, ...]
    dtype: str = "int8"

    def without(self, layers: Sequence[str]) -> Quantization:
        """Leaves layers as they are."""
        return replace(self, layers=tuple(each for each in self.layers if each not in layers))

    @property
    def filter_attributes(self) -> dict[str, Attribute]:
        """What a ``fake_quantize_filter`` of its layers has."""
        return {} if self.dtype == "int8" else {"to": self.dtype}

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
            layers, dtype = tuple(map(str, found["layers"])), str(found["dtype"])
            kind = KINDS.get(dtype, Grid)
            values = {name: kind.made(*numbers) for name, numbers in found["values"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{where}: {CONFIG} in config.json cannot be read ({error!r}); run maxvision"
                " quantize again"
            ) from None
        if dtype not in KINDS or not all(grid.is_sound for grid in values.values()):
            raise ModelError(
                f"{where}: {CONFIG} in config.json has a scale, zero point or dtype that is none;"
                " run maxvision quantize again"
            )
        return cls(values, layers, dtype)


def places(
    program: Program, pixels: bool = False, dtype: str = "int8"
) -> tuple[list[str], list[str]]:
    """Finds what may be rounded: the values that products read, and residuals; these products.

    A product is a convolution or linear layer with weights. What reads pixels stays as it is, and
    so does what gives an output, a convolution of one pixel, as in squeeze and excite, and one in
    groups that is not depthwise. Of ``FLOAT8`` only what Hopper multiplies is rounded, as no other
    device does: no depthwise convolutions, and channels and filters by sixteens. Nor is what it
    computes faster in 16 bits: MLPs that are one op, and what reads a sum that is not rounded.

    Args:
        program: The network.
        pixels: Whether what reads pixels is rounded, too: a convolution in one group.
        dtype: To which weights are rounded.
    """
    products = [
        node
        for node in program.nodes
        if _is_product(program, node, dtype) or (pixels and _reads_pixels(program, node))
    ]
    if dtype == FLOAT8:
        read = {node.inputs[0] for node in products}
        products = [node for node in products if not _is_faster_in_16_bits(program, node, read)]
    values = dict.fromkeys(node.inputs[0] for node in products)
    layers = [layer for node in products for layer in node.layers]
    for node in program.nodes:
        if node.op == "add" and len(node.inputs) == 2:
            first, second = (_made_by_product(program, value, layers) for value in node.inputs)
            if first and second and values.keys().isdisjoint(node.inputs):
                values[node.inputs[1]] = None
    return list(values), layers


def _is_product(program: Program, node: Node, dtype: str) -> bool:
    if node.op not in ("conv2d", "linear") or not node.layers or node.at_load:
        return False
    x, weight = node.inputs[:2]
    if weight not in program.weights or x in program.inputs or x in program.constants:
        return False
    if node.output in program.outputs.values():
        return False
    f, c, *_ = program.types[weight].shape
    groups = node.attributes.get("groups", 1)
    if dtype == FLOAT8 and (groups != 1 or c % ROW or f % ROW):
        return False
    if node.op == "linear":
        return c % GROUP == 0
    if program.types[x].shape[2:] == (1, 1):
        return False
    return c % GROUP == 0 if groups == 1 else c == 1 and f == groups


def _is_faster_in_16_bits(program: Program, node: Node, read: Collection[str]) -> bool:
    """Tells whether Hopper takes longer for a layer in 8 bits, what ``read`` names being rounded.

    A sum in a transformer stays in 16 bits, as norms and other sums read it: to round it takes a
    launch. Both embeddings of CvT-13 take 224 us so at batch 256, and 176 in 16 bits (H200). Before
    an MLP that is one op stands a layer that leaves the moments of its rows (passes/norms.py).
    """
    before, following = _producer(program, node.inputs[0]), program.only_user(node.output)
    if before is not None and before.op == "add":
        sums = [_producer(program, value) for value in before.inputs]
        return any(made and made.op == "add" and made.output not in read for made in sums)
    f, c, *_ = program.types[node.inputs[1]].shape
    if node.op != "linear" or following is None:
        return False
    after = program.users.get(following.output, ())
    normed = following.op == "add" and any(user.op == "layer_norm" for user in after)
    from_gelu = before is not None and before.op == "gelu"
    return (following.op == "gelu" and c in MLPS) or (f in MLPS and (from_gelu or normed))


def _producer(program: Program, value: str) -> Node | None:
    """Finds what made a value that moves have given another shape and place since."""
    node = program.producers.get(value)
    while node and node.op in MOVES:
        node = program.producers.get(node.inputs[0])
    return node


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
            to = how.filter_attributes
            nodes.append(Node("fake_quantize_filter", (inputs[1],), (weight,), to, at_load=True))
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
