"""``maxvision bench report FILE...``: the tables of files of results, and plots of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from maxvision.bench import latency, summaries, tables
from maxvision.bench.launches import Launch
from maxvision.bench.tables import Record, grouped
from maxvision.common.errors import ArgumentError

SHOW = {
    "models": summaries.networks,
    "serve": summaries.servers,
    "sparse": summaries.sparse,
    "latency": latency.show,
    "bridge": summaries.bridge,
    "levels": summaries.levels,
    "course": summaries.course,
}
VERSIONS = {"max": "MAX", "torch": "torch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


def run(options: argparse.Namespace) -> int:
    """Prints what the files hold, one after another, and draws what can be drawn."""
    if options.plots and not options.plots.is_dir():
        raise ArgumentError(f"--plots {options.plots}: there is no such folder; create it first")
    for path in options.files:
        facts, records = read(path)
        print(f"# {path.name}\n\n{about(facts)}")
        for kind, found in by_kind(records).items():
            show(kind, found)
        if options.plots:
            from maxvision.bench import plots

            for file in plots.draw(path.stem, records, options.plots):
                print(f"\n{file}")
        print()
    return 0


def read(path: Path) -> tuple[Record, list[Record]]:
    """Reads a file: its environment and its records.

    Raises:
        ArgumentError: If it is no file of results.
    """
    try:
        content = json.loads(path.read_text())
        return dict(content["environment"]), list(content["records"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ArgumentError(
            f"{path} is not a file that maxvision bench or time --json wrote: JSON with"
            " environment and records"
        ) from None


def about(facts: Record) -> str:
    """Says what was measured where, when and how."""
    machine = [facts[key] for key in ("gpu", "cpu") if facts.get(key, "none") != "none"]
    versions = [f"{name} {facts[key]}" for key, name in VERSIONS.items() if key in facts]
    made = f"{facts.get('date', 'on an unknown day')}, commit {facts.get('commit', 'unknown')}"
    lines = ["; ".join([*machine, made, ", ".join(versions)])]
    lines += [f"`{facts['command']}`"] if "command" in facts else []
    lines += [
        f"The machine's ceilings in {dtype}, through torch: {limits['tflops_per_s']:g} TFLOP/s,"
        f" {limits['gb_per_s']:,.0f} GB/s."
        for dtype, limits in facts.get("ceilings", {}).items()
    ]
    return "\n\n".join([*lines, *([facts["note"]] if "note" in facts else [])])


def by_kind(records: list[Record]) -> dict[str, list[Record]]:
    """Sorts records by the command that made them; "" is of none that there is today."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if "server" in record:
            kind = "serve"
        elif str(record.get("kind", "")).startswith("sparse"):
            kind = "sparse"
        elif {"compute", "request"} <= set(record):
            kind = "latency"
        elif {"level", "implementation"} <= set(record):
            kind = "levels"
        elif {"op", "implementation"} <= set(record):
            kind = "bridge"
        elif {"network", "epoch"} <= set(record):
            kind = "course"
        elif {"place", "adds_us"} <= set(record):
            kind = "profile"
        elif {"layer", "us", "count"} <= set(record):
            kind = "ops"
        elif "engine" in record:
            kind = "models"
        else:
            kind = ""
        found.setdefault(kind, []).append(record)
        if peer := record.get("torch_eager_graph_p50_ms"):  # as tests/gpu.py once wrote it
            found[kind].append({**record, "engine": "torch-eager-graph", "p50_ms": peer})
    return found


def show(kind: str, records: list[Record]) -> None:
    """Prints records as the command that made them does."""
    if not kind:
        for keys, group in grouped([{**r, "": tuple(r)} for r in records], "").items():
            rows = [[short(r[key]) for key in keys[0]] for r in group]
            tables.show("Records", keys[0], rows, left=0)
        return
    if kind == "ops":
        for group in grouped(records, "model", "dtype", "batch").values():
            summaries.ops(group)
    elif kind == "profile":
        names = [each.name for each in dataclasses.fields(Launch)]
        for cell, group in grouped(records, "engine", "model", "dtype", "batch").items():
            found = [Launch(**{name: r[name] for name in names}) for r in group]
            summaries.launches(found, "{}: {}, {}, batch {}".format(*cell), 0)
    else:
        SHOW[kind](records)


def short(value: Any) -> str:
    """Writes a value of any kind."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
