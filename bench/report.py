"""``maxvision bench report``: docs/performance.md, its tables and plots, from bench/results.

A section a file of results, the newest first. A file whose every cell was measured again later on
the same device is only listed, and so is one that holds nothing to show. What was measured of
pruned networks goes into docs/sparsity.md (bench/curves.py).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxvision.bench import curves
from maxvision.common.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent
PAGE = "performance.md"
OURS = "maxvision"
HEAD = """\
# Performance

Made by `maxvision bench report` from [bench/results](../bench/results); do not edit. Times are
medians. Ratios are the result: ours over the best of the others in the same run, so less than 1
is faster. How it is measured: `maxvision bench --help`, and `method` in each file.
"""
Record = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """A file of results.

    Attributes:
        path: Where it lies.
        facts: Its environment.
        models: Records of whole networks, an engine each.
        layers: Records of layers.
        sparse: Records of pruned networks and sparse layers.
        other: How many records are none of these.
    """

    path: Path
    facts: Record
    models: list[Record]
    layers: list[Record]
    sparse: list[Record]
    other: int

    @property
    def device(self) -> str:
        """Names what was measured."""
        gpu = str(self.facts.get("gpu", "none")).split(",")[0]
        records = [*self.models, *self.layers, *self.sparse]
        on_host = bool(records) and all(record.get("device") == "cpu" for record in records)
        return str(self.facts.get("cpu", "unknown")) if on_host or gpu == "none" else gpu

    @property
    def date(self) -> str:
        """Gives the day."""
        return str(self.facts.get("date", ""))

    @property
    def cells(self) -> set[tuple[Any, ...]]:
        """Names what it holds."""
        keys = ("model", "dtype", "batch")
        return {
            (self.device, kind, *(r[key] for key in keys))
            for kind, records in (("models", self.models), ("layers", self.layers))
            for r in records
        }


def run(options: argparse.Namespace) -> int:
    """Writes the page and its plots."""
    for folder in (options.results, options.out):
        if not folder.is_dir():
            raise ArgumentError(f"report expects a folder but {folder} is none")
    found = sorted(
        (read(path) for path in sorted(options.results.glob("*.json"))),
        key=lambda each: (each.date, each.path.name),
        reverse=True,
    )
    plots = {} if options.no_plots else draw(found, options.out)
    page = options.out / PAGE
    page.write_text(markdown(found, plots, options.results))
    pages = [page, *fill_curves(found, options)]
    for path in (*pages, *(options.out / name for names in plots.values() for name in names)):
        print(path)
    return 0


def fill_curves(found: list[Results], options: argparse.Namespace) -> list[Path]:
    """Writes the generated part of docs/sparsity.md, if the page is there; returns its files."""
    page = options.out / curves.PAGE
    if not page.is_file():
        return []
    parts: list[str] = []
    files = [page]
    for each in found:
        if not each.sparse:
            continue
        link = f"[{each.path.name}](../bench/{options.results.name}/{each.path.name})"
        source = f"`{each.facts['command']}`, commit {each.facts.get('commit', 'unknown')}: {link}"
        parts += curves.section(each.sparse, f"{each.device}, {each.date}", source)
        swept = len({r["density"] for r in each.sparse if r["kind"] == "sparse layer"}) > 2
        if swept and not options.no_plots:
            name = f"sparsity-{each.path.stem}.svg"
            with plotting():
                save(curves.curves(each.sparse), options.out / name)
            files.append(options.out / name)
            parts.append(f"![Gain against the share of zeros]({name})")
        if any("accuracy" in r for r in each.sparse) and not options.no_plots:
            name = f"sparsity-{each.path.stem}-accuracy.svg"
            with plotting():
                save(curves.trade(each.sparse), options.out / name)
            files.append(options.out / name)
            parts.append(f"![Accuracy against gain]({name})")
    page.write_text(curves.fill(page.read_text(), parts))
    return files


def read(path: Path) -> Results:
    """Reads a file, of older forms too.

    Raises:
        ArgumentError: If it is no file of results.
    """
    try:
        content = json.loads(path.read_text())
        facts, records = dict(content["environment"]), list(content["records"])
    except (ValueError, KeyError, TypeError):
        raise ArgumentError(
            f"{path} expects a JSON object with an environment and records; remove or mend it"
        ) from None
    models: list[Record] = []
    layers: list[Record] = []
    sparse: list[Record] = []
    other = 0
    for record in records:
        if str(record.get("kind", "")).startswith("sparse"):
            sparse.append(record)
        elif "server" in record:  # of bench serve; docs/serving.md shows them
            other += 1
        elif {"layer", "us", "count"} <= set(record):
            layers.append(record)
        elif "p50_ms" in record or ("engine" in record and record.get("passed") is False):
            models.append(record)
            if peer := record.get("torch_eager_graph_p50_ms"):  # as tests/gpu.py writes them
                models.append({**record, "engine": "torch-eager-graph", "p50_ms": peer})
        elif {"layer", "ours_ms", "torch_ms"} <= set(record):  # of bench/layers.py, which is gone
            us, peer = record["ours_ms"] * 1e3, record["torch_ms"] * 1e3
            layers.append(
                {
                    **record, "model": "resnet-50", "dtype": "float32", "op": "conv2d",
                    "us": us, "peer_us": peer, "tflops_per_s": record["gflops_per_s"] / 1e3,
                }
            )  # fmt: skip
        else:
            other += 1
    return Results(path, facts, models, layers, sparse, other)


def markdown(found: list[Results], plots: dict[Path, list[str]], folder: Path) -> str:
    """Writes the page."""
    parts, seen, rest = [HEAD], set[tuple[Any, ...]](), []
    for each in found:
        if not each.cells and each.sparse:
            rest.append(f"- `{each.path.name}`, {each.device}: in [{curves.PAGE}]({curves.PAGE}).")
        elif not each.cells:
            rest.append(f"- `{each.path.name}`: no network and no layer in it.")
        elif each.cells <= seen:
            rest.append(f"- `{each.path.name}`, {each.device}: measured again since.")
        else:
            parts += section(each, folder)
            parts += [f"![{name}]({name})" for name in plots.get(each.path, ())]
        seen |= each.cells
    if not seen:
        parts.append("Nothing has been measured yet.")
    if rest:
        parts.append("## Not shown\n\n" + "\n".join(rest))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(each: Results, folder: Path) -> Iterator[str]:
    """Writes what one file holds."""
    facts = each.facts
    yield f"## {each.device}, {each.date}"
    told = [f"commit {facts.get('commit', 'unknown')}"]
    driver = str(facts.get("gpu", "")).split(",")[1:2]
    told += [f"driver {driver[0].strip()}"] if driver else []
    told += [
        f"{name} {facts[key]}"
        for name, key in (("MAX", "max"), ("torch", "torch"), ("cuDNN", "cudnn"), ("on", "cpu"))
        if key in facts and facts[key] != each.device
    ]
    if "load" in facts and str(facts.get("gpu", "none")) == "none":
        told.append(f"load average before {facts['load'][0]:g}")
    command = f"`{facts['command']}`: " if "command" in facts else ""
    link = f"[{each.path.name}](../bench/{folder.name}/{each.path.name})"
    yield f"{command}{', '.join(told)}. {link}"
    if each.models:
        yield models_table(each.models)
    for key, records in grouped(each.layers, "model", "dtype", "batch").items():
        model, dtype, batch = key
        yield f"### Layers of {model}, {dtype}, batch {batch}\n\n{layers_table(records)}"
    for dtype, limits in facts.get("ceilings", {}).items():
        yield (
            f"The machine's ceilings in {dtype}, through torch: {limits['tflops_per_s']:g} TFLOP/s,"
            f" {limits['gb_per_s']:,.0f} GB/s."
        )


def grouped(records: list[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Groups records by some of their values, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in keys)].append(record)
    return dict(groups)


def models_table(records: list[Record]) -> str:
    """Writes a row an engine and cell."""
    rows = []
    for cell, engines in grouped(records, "model", "dtype", "batch").items():
        ratio = of_best_peer(engines)
        for r in engines:
            name = f"**{r['engine']}**" if r["engine"] == OURS else r["engine"]
            energy = r.get("joules_per_batch")
            rows.append(
                [
                    *map(str, cell),
                    name,
                    *(number(r.get(f"p{p}_ms"), "ms") for p in (50, 90, 99)),
                    f"{r['batch'] / r['p50_ms'] * 1e3:,.0f}" if "p50_ms" in r else "",
                    number(r.get("tflops_per_s")),
                    percent(r.get("share_of_roofline")),
                    number(energy and energy / r["batch"]),
                    number(r.get("memory_mb")),
                    number(r["setup_s"] + r.get("load_s", 0) if "setup_s" in r else None),
                    f"{r['max_rel_err']:.0e}" if "max_rel_err" in r else "",
                    f"**{ratio:.2f}**" if ratio and r["engine"] == OURS else "",
                    "" if right(r) else f"lost: {r['lost']}" if "lost" in r else "wrong result",
                ]
            )
    head = ["model", "dtype", "batch", "engine", "p50 ms", "p90", "p99", "images/s", "TFLOP/s",
            "of roofline", "J/image", "MB", "set-up s", "error", "of best", ""]  # fmt: skip
    return table(head, rows)


def layers_table(records: list[Record]) -> str:
    """Writes a row a layer, and their sum."""
    rows = []
    for r in records:
        op = f"{r['op'].removesuffix('_add')} {r.get('epilogue', '')}".strip()
        kernel = ", ".join(k["name"].rpartition(" ")[0] or k["name"] for k in r.get("kernel", ()))
        peer = r.get("peer_us")
        rows.append(
            [
                r["layer"],
                op,
                str(r["count"]),
                number(r["us"]),
                number(peer),
                f"{r['us'] / peer:.2f}" if peer else "",
                number(r.get("tflops_per_s") or None),
                percent(r.get("share_of_roofline")),
                f"`{kernel}`" if kernel else "",
            ]
        )
    both = [r for r in records if r.get("peer_us")]
    if both:
        us, peer = (sum(r["count"] * r[key] for r in both) for key in ("us", "peer_us"))
        count = str(sum(r["count"] for r in both))
        rows.append(["all", "", count, number(us), number(peer), f"{us / peer:.2f}", "", "", ""])
    head = ["layer", "op", "times", "ours, µs", "torch, µs", "ratio", "TFLOP/s", "of roofline",
            "kernel"]  # fmt: skip
    return table(head, rows)


def of_best_peer(engines: list[Record]) -> float | None:
    """Divides our time by the shortest of the others; None if one is missing."""
    times = {r["engine"]: r["p50_ms"] for r in engines if right(r)}
    others = [time for name, time in times.items() if name != OURS]
    return times[OURS] / min(others) if OURS in times and others else None


def right(record: Record) -> bool:
    """Tells whether an engine gave right results and was timed."""
    return "p50_ms" in record and record.get("passed") is not False


def table(head: list[str], rows: list[list[str]]) -> str:
    """Writes a table without its empty columns."""
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in keep], ["---"] * len(keep), *([r[i] for i in keep] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None, unit: str = "") -> str:
    """Writes three digits, or four of a time in ms; nothing for None."""
    if value is None:
        return ""
    digits = 4 if unit == "ms" else 3
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(value: float | None) -> str:
    """Writes a share; nothing for None."""
    return "" if value is None else f"{value:.0%}"


def plotting() -> AbstractContextManager[None]:
    """Sets how plots look, the same on every machine."""
    import matplotlib

    matplotlib.use("svg")
    style: dict[Any, Any] = {
        "svg.hashsalt": "maxvision", "svg.fonttype": "none", "font.size": 9, "axes.grid": True,
        "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
        "figure.constrained_layout.use": True, "savefig.facecolor": "white",
    }  # fmt: skip
    return matplotlib.rc_context(style)


def save(figure: Any, path: Path) -> None:
    """Writes a plot without the day."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw(found: list[Results], out: Path) -> dict[Path, list[str]]:
    """Draws the plots of every file; returns their names."""
    names: dict[Path, list[str]] = {}
    with plotting():
        for each in found:
            batches = {r["batch"] for r in each.models if right(r)}
            ratio = any(of_best_peer(e) for e in cells(each))
            for kind, plot, wanted in (
                ("latency", latency, len(batches) > 1),
                ("ratios", ratios, ratio),
                ("roofline", roofline, bool(points(each))),
            ):
                if wanted:
                    name = f"performance-{each.path.stem}-{kind}.svg"
                    save(plot(each), out / name)
                    names.setdefault(each.path, []).append(name)
    return names


def cells(each: Results) -> list[list[Record]]:
    """Groups the networks' records by cell, those that can be shown."""
    shown = [r for r in each.models if right(r)]
    return list(grouped(shown, "model", "dtype", "batch").values())


def latency(each: Results) -> Any:
    """Draws time an image against batch, a line an engine."""
    from matplotlib.figure import Figure

    networks = grouped([r for r in each.models if right(r)], "model", "dtype")
    wide, high = min(3, len(networks)), -(-len(networks) // 3)
    figure = Figure(figsize=(4.2 * wide, 3.2 * high))
    panels = figure.subplots(high, wide, squeeze=False).flat
    for axes in panels[len(networks) :]:
        axes.set_axis_off()
    for axes, (title, records) in zip(panels, networks.items(), strict=False):
        for (engine,), line in grouped(records, "engine").items():
            batch = [r["batch"] for r in line]
            time = [r["p50_ms"] / r["batch"] for r in line]
            ours = {"linewidth": 2.5, "color": "black"} if engine == OURS else {"linewidth": 1}
            axes.loglog(batch, time, marker="o", markersize=4, label=engine, **ours)
        ticks = sorted({r["batch"] for r in records})
        axes.set(title=", ".join(title), xlabel="batch", ylabel="ms an image", xticks=ticks)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        plain(axes)
    return figure


def plain(axes: Any) -> None:
    """Finishes logarithmic axes: numbers as one writes them."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="both", labelsize=7)
    axes.legend(frameon=False)


def ratios(each: Results) -> Any:
    """Draws every engine's time over ours, a bar each."""
    from matplotlib.figure import Figure

    labels, values, colours = [], [], []
    for cell in cells(each):
        ours = next((r["p50_ms"] for r in cell if r["engine"] == OURS), None)
        for r in cell if ours else ():
            if r["engine"] != OURS:
                value = r["p50_ms"] / ours
                labels.append(f"{r['model']}, {r['dtype']}, batch {r['batch']}: {r['engine']}")
                values.append(value)
                colours.append("tab:green" if value >= 1 else "tab:red")
    figure = Figure(figsize=(8, 0.8 + 0.22 * len(values)))
    axes = figure.subplots()
    bars = axes.barh(labels, values, color=colours, height=0.7)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="time over maxvision's: beyond 1 maxvision is faster")
    axes.margins(x=0.1)
    return figure


def points(each: Results) -> list[Record]:
    """Lists the layers with products whose place under the roof is known."""
    return [
        r
        for r in each.layers
        if r.get("tflops_per_s") and r.get("gb_per_s") and r["dtype"] in each.facts["ceilings"]
    ]


def roofline(each: Results) -> Any:
    """Draws operations a second against operations a byte, a dot a layer, under the roof."""
    from matplotlib.figure import Figure

    panels = grouped(points(each), "model", "dtype", "batch")
    figure = Figure(figsize=(5, 3.4 * len(panels)))
    for axes, (title, records) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        limits = each.facts["ceilings"][title[1]]
        flops, moved = limits["tflops_per_s"], limits["gb_per_s"] / 1e3
        x = [1e3 * r["tflops_per_s"] / r["gb_per_s"] for r in records]
        ends = [min(*x, flops / moved) / 2, flops / moved, max(*x, flops / moved) * 2]
        axes.loglog(ends, [min(flops, moved * end) for end in ends], color="black", linewidth=1)
        axes.scatter(x, [r["tflops_per_s"] for r in records], s=14, label=OURS, zorder=3)
        timed = [(a, r) for a, r in zip(x, records, strict=True) if r.get("peer_us")]
        peer = [r["tflops_per_s"] * r["us"] / r["peer_us"] for _, r in timed]
        axes.scatter([a for a, _ in timed], peer, s=14, marker="x", label="torch", zorder=2)
        name = f"{title[0]}, {title[1]}, batch {title[2]}"
        axes.set(title=name, xlabel="operations a byte", ylabel="TFLOP/s")
        plain(axes)
    return figure
