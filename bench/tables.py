"""The tables that the commands print: Markdown, with columns aligned for a terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Prints a table without its empty columns; all but the first ``left`` go to the right."""
    rows = list(rows)
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    wide = {i: max(len(row[i]) for row in [head, *rows]) for i in keep}

    def line(row: Sequence[str]) -> str:
        cells = (row[i].ljust(wide[i]) if i < left else row[i].rjust(wide[i]) for i in keep)
        return f"| {' | '.join(cells)} |"

    rule = ["-" * wide.get(i, 0) if i < left else f"{'-' * (wide.get(i, 1) - 1)}:"
            for i in range(len(head))]  # fmt: skip
    print(f"\n{title}\n", *map(line, [head, rule, *rows]), sep="\n", flush=True)


def grouped(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Groups records by some of their values, in the order of their first."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record.get(key, "") for key in keys)].append(record)
    return dict(groups)


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
