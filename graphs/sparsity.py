"""Which layers of a pruned network run as sparse convolutions.

``auto`` looks each pruned layer up in a table of measurements (graphs/breakeven/*.json, made by
``maxvision bench sparse --table``): a row is one convolution on one image size and batch, with the
time of its dense kernel and the times of its sparse one, in one format, at several densities. A
layer is sparse if at its own density the sparse kernel takes at most 1 / MARGIN of the dense one's
time: at every batch that was measured, since one graph runs all of them, or, where the number of
images that run together was asked for, at the batch nearest to it. What was not measured takes the
worst of the rows within a factor of two in channels, filters and pixels, kernel and stride alike.
Two layers that one dense kernel computes together are both sparse, or neither; on a GPU linear
layers over tokens, of which dense kernels compute several, stay dense.

The tables are of one machine each: a kind of vector unit, or a GPU. On another one ``auto`` has
nothing to go by, and runs dense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType

from maxvision.common.errors import ArgumentError, DeviceError, ModelError
from maxvision.graphs.formats import general
from maxvision.graphs.layers import Layer
from maxvision.graphs.target import Target, base

MODES = ("auto", "always", "never")
TABLES = Path(__file__).with_name("breakeven")
PRUNED = 0.1
"""Share of zeros from which on a layer counts as pruned; dead channels of a dense one give 7 %."""
MARGIN = 1.05
"""How much faster than dense the table must say that sparse is."""
ALIKE = 2.0
"""Largest ratio of sizes between a layer and a row that stands for it."""


@dataclass(frozen=True)
class Row:
    """What was measured of one convolution at one batch size.

    Attributes:
        kernel: R and S; so is ``stride`` a number for both.
        stride: Pixels between windows.
        channels: C.
        filters: F.
        pixels: P * Q of one image.
        batch: Images.
        dense_us: Time of the dense kernel, µs.
        sparse_us: Time of the sparse one, µs, and the density it was measured at, ascending.
        format: Of the sparse filter (graphs/formats.py).
    """

    kernel: int
    stride: int
    channels: int
    filters: int
    pixels: int
    batch: int
    dense_us: float
    sparse_us: tuple[tuple[float, float], ...]
    format: str = "stream"

    @property
    def macs(self) -> int:
        """Counts the multiply-accumulates of one image."""
        return self.kernel**2 * self.channels * self.filters * self.pixels

    def gain(self, density: float) -> float:
        """Divides the dense kernel's time by the sparse one's at ``density``.

        Between two measurements the time is linear in the density. Below the first it is that of
        the first; beyond the last it goes on growing.
        """
        densities, times = zip(*self.sparse_us, strict=True)
        if density > densities[-1]:
            return self.dense_us / (times[-1] * density / densities[-1])
        return self.dense_us / float(np.interp(density, densities, times))

    def break_even(self) -> float:
        """Gives the largest density at which sparse is at least as fast; 0 if at none."""
        densities, times = zip(*self.sparse_us, strict=True)
        last = 0.0
        for low, high in zip(range(len(times)), range(1, len(times) + 1), strict=True):
            if times[low] > self.dense_us:
                break
            last = densities[low]
            if high < len(times) and times[high] > self.dense_us:
                slope = (times[high] - times[low]) / (densities[high] - densities[low])
                last += (self.dense_us - times[low]) / slope
        return last

    def distance(self, layer: Layer, format: str) -> float | None:
        """Tells how far the row is from ``layer``, 0 if it is its own; None if too far."""
        if (self.kernel, self.stride, self.format) != (layer.kernel, layer.stride, format):
            return None
        pairs = (
            (self.channels, layer.channels),
            (self.filters, layer.filters),
            (self.pixels, layer.pixels),
        )
        apart = [abs(math.log2(ours / theirs)) for ours, theirs in pairs]
        return sum(apart) if max(apart) <= math.log2(ALIKE) else None


@dataclass(frozen=True)
class Table:
    """The measurements of one kind of device in one dtype.

    Attributes:
        device: As `table_name` calls it.
        dtype: Of activations and filters.
        measured: The machine, its cores, the day, the commit and the command.
        rows: The measurements.
    """

    device: str
    dtype: str
    measured: Mapping[str, Any]
    rows: tuple[Row, ...]

    def find(self, layer: Layer, format: str) -> list[Row]:
        """Finds the rows of ``layer``, or else all that stand for it; perhaps none."""
        distances = [(row.distance(layer, format), row) for row in self.rows]
        near = [(apart, row) for apart, row in distances if apart is not None]
        return [row for apart, row in near if apart == 0] or [row for _, row in near]

    def gain(
        self, layer: Layer, format: str, density: float, batch: int | None = None
    ) -> float | None:
        """Gives the least gain of ``layer``; None if nothing stands for it.

        That is of all batches, or of those that were measured nearest to ``batch``.
        """
        rows = self.find(layer, format)
        if batch and rows:
            apart = [abs(math.log2(row.batch / batch)) for row in rows]
            rows = [row for row, far in zip(rows, apart, strict=True) if far == min(apart)]
        return min((row.gain(density) for row in rows), default=None)

    def best(
        self, layer: Layer, kinds: Sequence[str], density: float, batch: int | None
    ) -> tuple[str, float | None]:
        """Finds the format of the largest gain, and that gain; the first if none was measured."""
        gains = {kind: self.gain(layer, kind, density, batch) for kind in kinds}
        return max(gains.items(), key=lambda each: each[1] or 0.0)

    def estimate(self, verdicts: Sequence[Verdict], batch: int) -> tuple[float, float]:
        """Adds up the times of the layers that it knows, at one batch size.

        Rows that stand for a layer are scaled by its multiply-accumulates.

        Returns:
            All dense, and as chosen, µs; 0 and 0 if it knows none.
        """
        dense = chosen = 0.0
        for each in verdicts:
            rows = [row for row in self.find(each.layer, each.format) if row.batch == batch]
            if rows:
                row = min(rows, key=lambda row: row.distance(each.layer, each.format) or 0.0)
                time = row.dense_us * each.layer.macs / row.macs
                dense += time
                chosen += time / row.gain(1 - each.zeros) if each.sparse else time
        return dense, chosen


@dataclass(frozen=True)
class Verdict:
    """What runs one layer.

    Attributes:
        layer: The layer.
        zeros: Share of zeros.
        sparse: Whether it runs as a sparse convolution.
        gain: How many times as fast as dense the table says sparse is; None if it does not.
        why: Why it is dense, or nothing.
        format: How its nonzeros would lie in memory (graphs/formats.py).
    """

    layer: Layer
    zeros: float
    sparse: bool
    gain: float | None = None
    why: str = ""
    format: str = "stream"

    @property
    def pruned(self) -> bool:
        """Whether it has enough zeros to count."""
        return self.zeros >= PRUNED


@dataclass(frozen=True)
class Chosen:
    """A `Choice` in short.

    Attributes:
        mode: ``auto``, ``always`` or ``never``.
        layers: Those that run sparse, sorted.
        told: What was chosen, in a few words; nothing of a model that is not pruned.
    """

    mode: str
    layers: tuple[str, ...]
    told: str


@dataclass(frozen=True)
class Choice:
    """What runs the layers of a network.

    Attributes:
        mode: ``auto``, ``always`` or ``never``.
        verdicts: Every layer's.
        note: Why none of the pruned ones is sparse, where one reason holds for all; or nothing.
    """

    mode: str
    verdicts: tuple[Verdict, ...]
    note: str = ""

    @property
    def layers(self) -> frozenset[str]:
        """Names the layers that run sparse."""
        return frozenset(self.formats)

    @property
    def formats(self) -> dict[str, str]:
        """Gives the format of each layer that runs sparse."""
        return {each.layer.name: each.format for each in self.verdicts if each.sparse}

    @property
    def short(self) -> Chosen:
        """Puts it in short."""
        return Chosen(self.mode, tuple(sorted(self.layers)), self._told())

    def _told(self) -> str:
        pruned = sum(each.pruned for each in self.verdicts)
        if self.layers:
            return f"{len(self.layers)} of {pruned} pruned layers sparse"
        note = self.note or "as no sparse layer would be faster"
        return f"pruned, runs dense {note}" if pruned else ""


def check_mode(mode: str) -> None:
    """Compares a mode with ``MODES``.

    Raises:
        ArgumentError: If it is none of them.
    """
    if mode not in MODES:
        raise ArgumentError(f"sparse must be one of {', '.join(MODES)} but is {mode!r}")


def choose(
    name: str,
    layers: Sequence[Layer],
    zeros: Mapping[str, float],
    mode: str,
    target: Target,
    dtype: DType,
    *,
    tf32: bool = True,
    formats_of: Callable[[Layer], Sequence[str]] | None = None,
    batch: int | None = None,
) -> Choice:
    """Chooses what runs each layer.

    Args:
        name: What a message calls the model.
        layers: Of the network.
        zeros: Share of zeros by layer.
        mode: One of ``MODES``.
        target: What the graph is for.
        dtype: Of activations and filters.
        tf32: Whether a GPU may round float32 to TF32 for dense products.
        formats_of: Finds the formats that suit a pruned layer, of which the fastest is taken, or
            the first where that is not known; the device's general one if None.
        batch: Images that will run together; any number of them if None.

    Raises:
        ArgumentError: If there is no such mode.
        DeviceError: If ``always`` is asked of a device that has no sparse kernel for the dtype.
        ModelError: If ``always`` is asked of a model without a pruned layer.
    """
    check_mode(mode)
    kinds: dict[str, Sequence[str]] = {each.name: (general(target.api),) for each in layers}
    if formats_of and mode != "never":
        pruned = [each for each in layers if zeros[each.name] >= PRUNED and not _depthwise(each)]
        kinds |= {each.name: formats_of(each) for each in pruned}
    if mode == "always":
        return _all(name, layers, zeros, kinds, target, dtype, tf32, batch)
    if mode == "never":
        return _none(mode, layers, zeros, "as asked for")
    kind = precision(target, dtype, tf32)
    table = None if _unable(target, dtype) else load_table(target, kind)
    if table is None:
        where = f"{'a CPU' if target.api == 'cpu' else target.name} in {kind}"
        return _none(mode, layers, zeros, f"because there is no break-even table for {where}")
    verdicts = {
        each.name: _weigh(each, zeros[each.name], kinds[each.name], table, batch) for each in layers
    }
    for each in verdicts.values():
        tied = each.layer.partner
        other = verdicts.get(tied)
        if each.sparse and other and not other.sparse:
            why = f"one dense kernel computes it with {tied}"
            verdicts[each.layer.name] = replace(each, sparse=False, why=why)
        elif each.sparse and target.api != "cpu" and each.layer.size[0] == 1:
            why = "one dense kernel computes it with others"
            verdicts[each.layer.name] = replace(each, sparse=False, why=why)
    return Choice(mode, tuple(verdicts.values()))


def _all(
    name: str,
    layers: Sequence[Layer],
    zeros: Mapping[str, float],
    kinds: Mapping[str, Sequence[str]],
    target: Target,
    dtype: DType,
    tf32: bool,
    batch: int | None,
) -> Choice:
    if problem := _unable(target, dtype):
        raise DeviceError(f"{name}: sparse always needs {problem}; use that, or sparse auto")
    table = load_table(target, precision(target, dtype, tf32))
    verdicts = []
    for each in layers:
        share, format, gain = zeros[each.name], kinds[each.name][0], None
        sparse = share >= PRUNED and not _depthwise(each)
        if table and sparse:
            format, gain = table.best(each, kinds[each.name], 1 - share, batch)
        why = "" if sparse else "depthwise" if _depthwise(each) else "not pruned"
        verdicts.append(Verdict(each, share, sparse, gain, why, format))
    if not any(each.sparse for each in verdicts):
        raise ModelError(
            f"{name}: the model is not pruned: no layer has {PRUNED:.0%} zeros; prune it with"
            " maxvision weights prune, or omit --sparse"
        )
    return Choice("always", tuple(verdicts))


def _none(mode: str, layers: Sequence[Layer], zeros: Mapping[str, float], note: str) -> Choice:
    return Choice(mode, tuple(Verdict(each, zeros[each.name], False) for each in layers), note)


def _weigh(
    layer: Layer, zeros: float, kinds: Sequence[str], table: Table, batch: int | None
) -> Verdict:
    if zeros < PRUNED:
        return Verdict(layer, zeros, False, why="not pruned")
    if _depthwise(layer):
        return Verdict(layer, zeros, False, why="depthwise")
    format, gain = table.best(layer, kinds, 1 - zeros, batch)
    if gain is None:
        return Verdict(layer, zeros, False, why="no such layer was measured", format=format)
    why = "" if gain >= MARGIN else "dense is faster, or as fast"
    return Verdict(layer, zeros, gain >= MARGIN, gain, why, format)


def _depthwise(layer: Layer) -> bool:
    return layer.groups > 1


def _unable(target: Target, dtype: DType) -> str:
    """Says what a device's sparse kernels take if not ``dtype``; nothing if they do."""
    if target.api == "cpu" and dtype != DType.float32:
        return f"float32 on a CPU but the dtype is {dtype.name}"
    return ""


def precision(target: Target, dtype: DType, tf32: bool) -> str:
    """Names the dtype of a table: ``float32-exact`` is a GPU's without TF32."""
    exact = dtype == DType.float32 and not tf32 and target.api == "cuda"
    return f"{dtype.name}-exact" if exact else dtype.name


def load_table(target: Target, dtype: str) -> Table | None:
    """Reads the table of a device and dtype, if there is one; float16 takes as long as bfloat16."""
    dtype = "bfloat16" if dtype == "float16" else dtype
    return read_table(TABLES / table_name(target, dtype))


def table_name(target: Target, dtype: str) -> str:
    """Names the file of a device's table: a CPU by its vectors, a GPU by its architecture."""
    device = base(target.name)  # a driver may call sm_90a sm_90
    if target.api == "cpu":
        vectors = [kind for kind in ("avx512f", "avx2", "asimd") if kind in target.features]
        device = f"cpu-{vectors[0] if vectors else target.machine}"
    return f"{device}-{dtype}.json"


@cache
def read_table(path: Path) -> Table | None:
    """Reads a table, or returns None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    rows = []
    for row in content["rows"]:
        sparse = tuple((float(density), float(us)) for density, us in sorted(row.pop("sparse_us")))
        rows.append(Row(**row, sparse_us=sparse))
    return Table(content["device"], content["dtype"], content["measured"], tuple(rows))
