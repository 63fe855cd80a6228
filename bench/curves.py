"""The generated part of docs/sparsity.md: speed against zeros, from bench/results.

It stands between two comments of the page, so that the text around it stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import median_high
from typing import Any

from maxvision.common.errors import ArgumentError
from maxvision.graphs.sparsity import Row

PAGE = "sparsity.md"
BEGIN = "<!-- made by maxvision bench report from bench/results: do not edit -->"
END = "<!-- end of what is made -->"
SHOWN = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Shares of zeros that the tables have a column for."""
FORMATS = {"unstructured": ("steps", "tiles"), "2:4": ("two_four",), "64x64": ("blocks",)}
"""The formats that are shown of each pattern of zeros."""

Record = dict[str, Any]


def fill(text: str, parts: Sequence[str]) -> str:
    """Puts ``parts`` between the comments of the page.

    Raises:
        ArgumentError: If the page lacks them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ArgumentError(f"docs/{PAGE} expects the lines {BEGIN!r} and {END!r}; put them back")
    made = "\n\n".join(part.strip() for part in parts) or "Nothing has been measured yet."
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def section(records: Sequence[Record], heading: str, source: str) -> Iterator[str]:
    """Writes what one file holds of sparse layers and networks."""
    from maxvision.bench.report import grouped, number, table

    yield f"### {heading}"
    yield source
    networks = [each for each in records if each["kind"] == "sparse network"]
    if networks:
        told = {"accuracy": "top-1", "weight_bytes": "weights, MB"}
        told = {key: name for key, name in told.items() if any(key in r for r in networks)}
        rows = [
            [
                r["model"], f"{zeros_of(r):.3g}",
                str(r["batch"]), r["sparse"], layers_of(r), *(shown(r, key) for key in told),
                number(r["ms"], "ms"), number(r["p10_ms"], "ms"), f"{r['gain']:.2f}",
            ]
            for r in networks
        ]  # fmt: skip
        head = ["model", "zeros", "batch", "--sparse", "sparse layers", *told.values()]
        head += ["ms", "p10", "of dense"]
        yield table(head, rows)
    layers = [each for each in records if each["kind"] == "sparse layer"]
    for (model, dtype, batch), group in grouped(layers, "model", "dtype", "batch").items():
        for (pattern, format), of_format in split(group).items():
            if pattern in FORMATS and format not in FORMATS[pattern]:
                continue  # the few layers that suit it by chance
            kernel = f", {pattern} zeros as `{format}`" if format else ""
            yield f"#### Layers of {model}, {dtype}, batch {batch}{kernel}"
            yield layers_table(of_format)


def zeros_of(network: Record) -> float:
    """Tells the share of zeros in a network's pruned layers."""
    return float(network["zeros"] if "zeros" in network else 1 - network["density"])


def layers_of(network: Record) -> str:
    """Counts a network's sparse layers, by format if that is known."""
    formats = network.get("formats") or {}
    named = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
    return named or str(network["sparse_layers"])


def shown(network: Record, key: str) -> str:
    """Writes the accuracy in percent, or bytes in MB; nothing if it was not measured."""
    if key not in network:
        return ""
    return f"{network[key]:.2%}" if key == "accuracy" else f"{network[key] / 1e6:.2f}"


def split(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Parts records by pattern and format, of which those of a CPU have none."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.get("pattern", ""), record.get("format", "")), []).append(record)
    return found


def layers_table(records: Sequence[Record]) -> str:
    """Writes a row a layer: the break-even point and the gain at shares of zeros."""
    from maxvision.bench.report import grouped, number, table

    others = {"exact_us": "dense without TF32", "cudnn_us": "cuDNN"}
    others = {key: name for key, name in others.items() if records[0].get(key)}
    rows = []
    for (layer,), group in grouped(list(records), "layer").items():
        row = to_row(group)
        zeros = [1 - density for density, _ in row.sparse_us]
        even = row.break_even()
        least = min(zeros) if even == row.sparse_us[-1][0] else None
        rows.append(
            [
                layer,
                str(sum(count for (count,) in grouped(group, "count"))),
                number(row.dense_us),
                *(number(group[0][key]) for key in others),
                f"below {least:.0%}" if least else f"{1 - even:.0%}" if even else "none",
                *(
                    f"{row.gain(1 - share):.2f}"
                    if min(zeros) - 1e-9 <= share <= max(zeros) + 1e-9
                    else ""
                    for share in SHOWN
                ),
            ]
        )
    names = ["dense, µs", *others.values(), "break-even"]
    head = ["layer", "times", *names, *(f"{share:.0%}" for share in SHOWN)]
    return table(head, rows)


def to_row(records: Sequence[Record], dense: str = "dense_p10_us") -> Row:
    """Puts the densities of one layer, batch and format together; ``dense`` is the time to beat.

    Of several records of one density the first counts: zeros at random come before patterns.
    """
    first = records[0]
    sizes = ("kernel", "stride", "channels", "filters", "pixels", "batch")
    sparse = {r["density"]: r["sparse_p10_us"] for r in reversed(records)}
    return Row(
        **{key: first[key] for key in sizes},
        dense_us=median_high(r[dense] for r in records),
        sparse_us=tuple(sorted(sparse.items())),
        format=first.get("format", Row.format),
    )


def trade(records: Sequence[Record]) -> Any:
    """Draws accuracy against gain: a panel a batch, a line an architecture from dense on."""
    from matplotlib.figure import Figure

    from maxvision.bench.report import grouped

    measured = [r for r in records if "accuracy" in r]
    panels = grouped(measured, "batch")
    figure = Figure(figsize=(5.2 * len(panels), 4))
    all_axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, ((batch,), group) in zip(all_axes, panels.items(), strict=True):
        lines: dict[str, list[Record]] = {}
        for record in sorted(group, key=zeros_of):
            lines.setdefault(re.sub(r"-p\d+$", "", record["model"]), []).append(record)
        for name, line in lines.items():
            gains, scores = [r["gain"] for r in line], [100 * r["accuracy"] for r in line]
            axes.plot(gains, scores, linewidth=1, marker=".", label=name)
            for r, x, y in zip(line, gains, scores, strict=True):
                axes.annotate(f" {zeros_of(r):.0%}", (x, y), fontsize=7)
        title = f"batch {batch}, {measured[0]['dtype']}"
        axes.set(title=title, xlabel="times as fast as dense", ylabel="top-1, %")
        axes.legend(frameon=False)
    return figure


def curves(records: Sequence[Record]) -> Any:
    """Draws gain against the share of zeros: a panel a model and batch, a line a layer."""
    from matplotlib.figure import Figure

    from maxvision.bench.report import grouped

    layers = [each for each in records if each["kind"] == "sparse layer"]
    panels = {
        (model, f"{batch}, {dtype} {format}".rstrip() if format else batch): of_format
        for (model, dtype, batch), group in grouped(layers, "model", "dtype", "batch").items()
        for (pattern, format), of_format in split(group).items()
        if pattern in ("", "unstructured") and format in ("", *FORMATS["unstructured"])
    }
    wide = min(2, len(panels))
    high = math.ceil(len(panels) / wide)
    figure = Figure(figsize=(5.2 * wide, 4 * high))
    all_axes = figure.subplots(high, wide, squeeze=False).flat
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    colours = {1: "tab:blue", 3: "tab:orange"}
    for axes, ((model, batch), group) in zip(all_axes, panels.items(), strict=False):
        named = set[str]()
        for _, of_layer in grouped(group, "layer").items():
            row = to_row(of_layer)
            kind = f"{row.kernel}x{row.kernel}"
            zeros = [1 - density for density, _ in row.sparse_us]
            gains = [row.dense_us / us for _, us in row.sparse_us]
            label = {} if kind in named else {"label": kind}
            named.add(kind)
            colour = colours.get(row.kernel, "tab:green")
            axes.plot(zeros, gains, color=colour, linewidth=1, marker=".", alpha=0.7, **label)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        title = f"{model}, batch {batch}"
        axes.set(title=title, xlabel="share of zeros", ylabel="times as fast as dense")
        axes.legend(frameon=False)
    return figure
