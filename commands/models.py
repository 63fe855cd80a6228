"""What ``--list-models`` prints: models here, and those of the hub that are known to work."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

from rich.table import Table

from maxvision.common.console import console
from maxvision.graphs.layers import macs
from maxvision.runtime.preprocess import Preprocess
from maxvision.weights import source
from maxvision.weights.catalog import HUB, PACKAGED, Row, trained
from maxvision.weights.checkpoint import interpret


def list_models(as_json: bool) -> int:
    """Prints the known models as a table or as JSON Lines. Returns 0."""
    ours = bundled()
    rows = [*packaged(), *ours, *HUB]
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps({**asdict(row), "bundled": row in ours}) + "\n")
        sys.stdout.flush()
        return 0
    table = Table(
        caption="top-1: of ImageNet as published (ResNet: He et al. 2015, 10 crops; others: their"
        " authors); of CIFAR-10, as measured, if bundled"
    )
    for name in "family", "--model", "parameters", "FLOPs", "top-1":
        table.add_column(name, justify="left" if name in ("family", "--model") else "right")
    for row in rows:
        accuracy = "" if row.top1 is None else f"{row.top1:.1%}"
        table.add_row(row.family, row.name, _si(row.parameters), _si(row.flops), accuracy)
    console(sys.stdout).print(table)
    return 0


def bundled() -> list[Row]:
    """Describes the bundled models; their accuracy is the one that their model cards state."""
    rows = []
    for name in source.bundled():
        card = source.BUNDLED / name / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        top1 = re.search(r"type: accuracy\s+value: ([\d.]+)", text)  # of the model-index
        rows.append(_row(name, float(top1[1]) if top1 else None, "its model card" if top1 else ""))
    return rows


def packaged() -> list[Row]:
    """Describes the models that installed packages bring."""
    return [
        _row(name, each.top1, each.source)
        for name, each in PACKAGED.items()
        if source.is_installed(each)
    ]


def _row(name: str, top1: float | None, where: str) -> Row:
    found = source.find(name)
    checkpoint = interpret(found)
    size = Preprocess.from_config(checkpoint.preprocess).height
    return Row(
        checkpoint.family,
        name,
        trained(found.state),
        size,
        macs(checkpoint.program((size, size))),
        top1,
        where,
    )


def _si(number: float) -> str:
    """Writes a count with three digits: 25.6 M, 4.09 G."""
    for power, unit in (9, " G"), (6, " M"), (3, " k"):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{unit}"
    return f"{number:.3g}"
