"""Measures what a network's values are on pictures, and what rounding its layers costs.

Two networks are compiled for that: one that gives the values that may be rounded, and one that
computes each layer twice, rounded and not, from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from maxvision.common.errors import ArgumentError
from maxvision.graphs.program import Attribute, Node, Program, free, rebuilt
from maxvision.graphs.quantize import Grid, Quantization, Rounding

METHODS = ("max", "percentile", "mse")
"""How a value's range is chosen: all of it, all but its tails, or the least mean squared error."""
PERCENTILE = 99.99
"""Percent of the numbers that ``percentile`` keeps."""
SAMPLES = 1 << 15
"""Numbers of a value that are kept of each batch, evenly spread."""
RANGES = 60
"""How many ``mse`` tries."""

Array = NDArray[np.float32]
Run = Callable[..., list[np.ndarray]]


@dataclass
class Seen:
    """What was seen of a value.

    Attributes:
        least: The least number.
        largest: The largest.
        samples: Some of all, from each batch.
    """

    least: float = np.inf
    largest: float = -np.inf
    samples: list[Array] = field(default_factory=list)

    def add(self, value: np.ndarray) -> None:
        """Adds a batch."""
        flat = value.reshape(-1)
        self.least = min(self.least, float(flat.min()))
        self.largest = max(self.largest, float(flat.max()))
        self.samples.append(flat[:: -(-len(flat) // SAMPLES)].copy())

    def grid(self, method: str, kind: type[Rounding] = Grid) -> Rounding:
        """Chooses the numbers of 8 bits for it; see ``METHODS``."""
        whole = kind.of(self.least, self.largest)
        if method == "max" or not self.samples:
            return whole
        numbers = np.concatenate(self.samples)
        if method == "percentile":
            rest = (100 - PERCENTILE) / (1 if self.least >= 0 else 2)
            low = 0.0 if self.least >= 0 else float(np.percentile(numbers, rest))
            return kind.of(low, float(np.percentile(numbers, 100 - rest)))
        shares = np.linspace(1.0, 0.2, RANGES)
        grids = [kind.of(self.least * share, self.largest * share) for share in shares]
        return min(grids, key=lambda grid: _error(numbers, grid))


def _error(numbers: Array, grid: Rounding) -> float:
    return float(np.square(rounded(numbers, grid) - numbers, dtype=np.float64).mean())


def rounded(numbers: Array, grid: Rounding) -> Array:
    """Rounds numbers to a grid, as ``fake_quantize`` does."""
    whole = grid.nearest(numbers * np.float32(1 / grid.scale))
    found: Array = whole * np.float32(grid.scale)
    return found


def watched(program: Program, values: Iterable[str]) -> Program:
    """Makes a program give values beside its outputs."""
    named = {f"value.{name}": name for name in values}
    return rebuilt(program, program.nodes, outputs={**program.outputs, **named})


def ranges(
    run: Run, values: Sequence[str], batches: Iterable[np.ndarray]
) -> tuple[dict[str, Seen], Array]:
    """Runs a network of ``watched`` on batches of its input.

    Returns:
        What was seen of each value, and the first output of all batches.

    Raises:
        ArgumentError: If a value is not finite.
    """
    seen = {name: Seen() for name in values}
    first = []
    for batch in batches:
        found = run(batch)
        first.append(found[0])
        for (name, each), value in zip(seen.items(), found[-len(seen) :], strict=True):
            each.add(value)
            if not np.isfinite(each.least) or not np.isfinite(each.largest):
                raise ArgumentError(f"{name} is NaN or infinite on these pictures; check the model")
    return seen, np.concatenate(first)


def compared(program: Program, how: Quantization) -> tuple[Program, list[str]]:
    """Makes a program give what rounding each layer alone costs; returns the layers too.

    For each layer there are two outputs [N]: the mean squares of the layer's result, and of the
    difference that rounding its input and weights makes to it.
    """
    taken = set(program.types)
    nodes: list[Node] = []
    outputs: dict[str, str] = {}
    layers: list[str] = []
    for node in program.nodes:
        nodes.append(node)
        layer = next((each for each in node.layers if each in how.layers), "")
        if not layer or node.inputs[0] not in how.values:
            continue
        layers.append(layer)

        def add(op: str, inputs: tuple[str, ...], **attributes: Attribute) -> str:
            name = free(taken, f"{op}.{len(taken)}")
            at_load = op == "fake_quantize_filter"
            nodes.append(Node(op, inputs, (name,), attributes, at_load=at_load))
            return name

        grid = how.values[node.inputs[0]]
        x = add("fake_quantize", (node.inputs[0],), **grid.attributes)
        weight = add("fake_quantize_filter", (node.inputs[1],), **how.filter_attributes)
        again = free(taken, f"{node.output}.again")
        nodes.append(replace(node, inputs=(x, weight, *node.inputs[2:]), outputs=(again,)))
        apart = add("sub", (again, node.output))
        axes = tuple(range(1, len(program.types[node.output].shape)))
        for what, value in (("signal", node.output), ("error", apart)):
            squares = add("mul", (value, value))
            outputs[f"{layer}.{what}"] = add("mean", (squares,), axes=axes)
    return rebuilt(program, nodes, outputs=outputs), layers


def errors(run: Run, layers: Iterable[str], batches: Iterable[np.ndarray]) -> dict[str, float]:
    """Runs a network of ``compared``: the relative error of each layer, a root of mean squares."""
    sums: NDArray[np.float64] | int = 0
    for batch in batches:
        sums = sums + np.array([value.sum(dtype=np.float64) for value in run(batch)])
    signal, error = np.asarray(sums).reshape(-1, 2).T
    found = np.sqrt(error / np.maximum(signal, np.finfo(np.float64).tiny))
    return dict(zip(layers, map(float, found), strict=True))
