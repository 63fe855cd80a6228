"""The plots of files of results, the same on every machine."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxvision.bench import curves
from maxvision.bench.records import check_path
from maxvision.bench.tables import Record, grouped

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "maxvision", "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
    "figure.constrained_layout.use": True, "savefig.facecolor": "white",
}  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Writes a figure, as an SVG or what its name ends with.

    Raises:
        ArgumentError: If it cannot be written.
    """
    check_path(path)
    facts = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata=facts)


def bars(
    labels: Sequence[str], values: Sequence[float], unit: str, form: str = "{:.2f}",
    colours: Sequence[str] | str = "tab:blue",
) -> Figure:  # fmt: skip
    """Draws a bar for each value, the first on top."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 0.8 + 0.22 * len(values)))
        axes = figure.subplots()
        drawn = axes.barh(labels, values, color=colours, height=0.7)
        axes.bar_label(drawn, [form.format(value) for value in values], padding=3)
        axes.invert_yaxis()
        axes.set(xlabel=unit)
        axes.margins(x=0.1)
    return figure


def draw(stem: str, records: Sequence[Record], out: Path) -> list[Path]:
    """Draws what ``records`` hold as STEM-KIND.svg; returns the files."""
    matplotlib.use("svg")
    drawn = []
    with matplotlib.rc_context(STYLE):
        for plot in ratios, gains, accuracy, levels, bridge, course:
            if figure := plot(records):
                drawn.append(out / f"{stem}-{plot.__name__}.svg")
                save(figure, drawn[-1])
    return drawn


def ratios(records: Sequence[Record]) -> Figure | None:
    """Draws every engine's time over ours, a bar each."""
    timed = [r for r in records if "engine" in r and "p50_ms" in r and r.get("passed")]
    labels, values = [], []
    for cell in grouped(timed, "model", "dtype", "batch").values():
        ours = next((r["p50_ms"] for r in cell if r["engine"] == "maxvision"), None)
        for r in cell if ours else ():
            if r["engine"] != "maxvision":
                labels.append(f"{r['model']}, {r['dtype']}, batch {r['batch']}: {r['engine']}")
                values.append(r["p50_ms"] / ours)
    return _over_ours(labels, values)


def bridge(records: Sequence[Record]) -> Figure | None:
    """Draws torch's times over ours, op by op, forward and both ways."""
    labels, values = [], []
    called = [r for r in records if {"op", "implementation"} <= set(r)]
    for (op, dtype, both), cell in grouped(called, "op", "dtype", "backward").items():
        by = {r["implementation"]: r.get("p50_ms") for r in cell}
        for name in ("torch", "torch-compile"):
            theirs, own = by.get(name), by.get("maxvision")
            if theirs and own:
                labels.append(f"{op}, {dtype}, {'both ways' if both else 'forward'}: {name}")
                values.append(theirs / own)
    return _over_ours(labels, values)


def _over_ours(labels: Sequence[str], values: Sequence[float]) -> Figure | None:
    """Draws times over ours, a bar each."""
    if not values:
        return None
    colours = ["tab:green" if value >= 1 else "tab:red" for value in values]
    unit = "time over maxvision's: beyond 1 maxvision is faster"
    figure = bars(labels, values, unit, colours=colours)
    figure.axes[0].axvline(1, color="black", linewidth=1)
    return figure


def _grid(panels: int, most: int, size: tuple[float, float]) -> tuple[Figure, Sequence[Axes]]:
    """Makes a figure of panels of a size, at most so many in a row; what is left over is empty."""
    wide = min(most, panels)
    high = math.ceil(panels / wide)
    figure = Figure(figsize=(size[0] * wide, size[1] * high))
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for each in axes[panels:]:
        each.set_axis_off()
    return figure, axes[:panels]


def levels(records: Sequence[Record]) -> Figure | None:
    """Draws how many times as fast as level 1 each level is: a panel a block or model.

    That is by p10, and on a GPU by what its launches take.
    """
    timed = [r for r in records if r.get("level") and r.get("p10_ms")]
    panels = grouped(timed, "block")
    if not panels:
        return None
    figure, all_axes = _grid(len(panels), 3, (3.4, 1.9))
    for axes, ((block,), group) in zip(all_axes, panels.items(), strict=True):
        times = [r.get("launches_ms") or r["p10_ms"] for r in group]
        values = [times[0] / each for each in times]
        drawn = axes.barh([r["implementation"] for r in group], values, height=0.7)
        axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        axes.set(title=block, xlabel="times as fast as level 1")
        axes.margins(x=0.2)
    return figure


def course(records: Sequence[Record]) -> Figure | None:
    """Draws accuracy and loss by epoch: a column a network, a line an engine."""
    networks = grouped([r for r in records if {"network", "epoch"} <= set(r)], "network")
    if not networks:
        return None
    figure, all_axes = _grid(2 * len(networks), len(networks), (4.4, 2.6))
    for i, key in enumerate(("accuracy", "loss")):
        for axes, ((network,), group) in zip(
            all_axes[i * len(networks) :], networks.items(), strict=False
        ):
            for (engine,), run in grouped(group, "engine").items():
                known = [r for r in run if key in r]
                axes.plot([r["epoch"] for r in known], [r[key] for r in known], ".-", label=engine)
            axes.set(title=network, xlabel="epoch", ylabel=key)
            axes.legend()
    return figure


def gains(records: Sequence[Record]) -> Figure | None:
    """Draws gain against the share of zeros: a panel a model and batch, a line a layer."""
    sparse = [r for r in records if r.get("kind") == "sparse layer"]
    panels = {
        title: [each for each in curves.layers(group) if len(each) > 1]
        for title, group in curves.parts(sparse)
    }
    panels = {title: layers for title, layers in panels.items() if layers and "64x64" not in title}
    if not panels:
        return None
    figure, all_axes = _grid(len(panels), 2, (5.2, 4))
    for axes, (title, layers) in zip(all_axes, panels.items(), strict=True):
        named = set[str]()
        for row in map(curves.to_row, layers):
            kind = f"{row.kernel}x{row.kernel}"
            label: dict[str, Any] = {} if kind in named else {"label": kind}
            named.add(kind)
            axes.plot(
                [1 - density for density, _ in row.sparse_us],
                [row.dense_us / us for _, us in row.sparse_us],
                color={1: "tab:blue", 3: "tab:orange"}.get(row.kernel, "tab:green"),
                linewidth=1, marker=".", alpha=0.7, **label,
            )  # fmt: skip
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.45), max(high, 2.2))  # at least the ticks 0.5, 1 and 2
        axes.yaxis.set_major_formatter("{x:g}")
        title = title.removeprefix("Layers of ")
        axes.set(title=title, xlabel="share of zeros", ylabel="times as fast as dense")
        axes.legend(frameon=False)
    return figure


def accuracy(records: Sequence[Record]) -> Figure | None:
    """Draws accuracy against gain: a panel a batch, a line an architecture from dense on."""
    measured = [r for r in records if {"accuracy", "gain"} <= set(r)]
    if not measured:
        return None
    panels = grouped(measured, "batch")
    figure = Figure(figsize=(5.2 * len(panels), 4))
    all_axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, ((batch,), group) in zip(all_axes, panels.items(), strict=True):
        lines: dict[str, list[Record]] = {}
        for record in sorted(group, key=curves.zeros_of):
            lines.setdefault(re.sub(r"-p\d+$", "", record["model"]), []).append(record)
        for name, line in lines.items():
            x, y = [r["gain"] for r in line], [100 * r["accuracy"] for r in line]
            axes.plot(x, y, linewidth=1, marker=".", label=name)
            for r, *place in zip(line, x, y, strict=True):
                axes.annotate(f" {curves.zeros_of(r):.0%}", place, fontsize=7)
        title = f"batch {batch}, {measured[0]['dtype']}"
        axes.set(title=title, xlabel="times as fast as dense", ylabel="top-1, %")
        axes.legend(frameon=False)
    return figure
