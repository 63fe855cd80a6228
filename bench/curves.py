"""Speed against zeros: records of sparse layers become rows with a break-even point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median_high

from maxvision.bench.tables import Record, grouped, number
from maxvision.graphs.sparsity import Row

SHOWN = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Shares of zeros that the tables have a column for."""
FORMATS = {"unstructured": ("steps", "tiles"), "2:4": ("two_four",), "64x64": ("blocks",)}
"""The formats that are shown of each pattern of zeros; others suit a few layers by chance."""
OTHERS = {"exact_us": "dense without TF32", "cudnn_us": "cuDNN"}
"""Times beside which a sparse layer is shown, if they were measured."""


def parts(records: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Names the layers of each model, batch and format; those of a CPU have one format."""
    found = [each for each in records if each["kind"] == "sparse layer"]
    keys = ("model", "dtype", "batch", "pattern", "format")
    for (model, dtype, batch, pattern, format), group in grouped(found, *keys).items():
        if format in FORMATS.get(pattern, (format,)):
            kernel = f", {pattern} zeros as {format}" if format else ""
            yield f"Layers of {model}, {dtype}, batch {batch}{kernel}", group


def layers(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Puts the densities of each layer together; a model's own layers have one density each."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["layer"], record["names"][0]), []).append(record)
    yield from found.values()


def to_row(records: Sequence[Record], dense: str = "dense_p10_us") -> Row:
    """Puts the densities of one layer, batch and format together; ``dense`` is the time to beat.

    Of several records of one density the first counts: zeros at random come before patterns. More
    zeros never take longer: where they did, another program ran, and the time with fewer counts.
    """
    first = records[0]
    sizes = ("kernel", "stride", "channels", "filters", "pixels", "batch")
    sparse = {r["density"]: r["sparse_p10_us"] for r in reversed(records)}
    densities = sorted(sparse, reverse=True)
    times = accumulate((sparse[density] for density in densities), min)
    return Row(
        **{key: first[key] for key in sizes},
        dense_us=median_high(r[dense] for r in records),
        sparse_us=tuple(sorted(zip(densities, times, strict=True))),
        format=first.get("format", Row.format),
    )


HEAD = ["layer", "times", "dense, µs", *OTHERS.values(), "break-even", "zeros", "sparse, µs",
        "of dense", *map("{:.0%}".format, SHOWN), ""]  # fmt: skip


def line(records: Sequence[Record]) -> list[str]:
    """Writes one layer: the break-even point, and how many times as fast at shares of zeros."""
    row = to_row(records)
    zeros = [1 - density for density, _ in row.sparse_us]
    even, least, most = row.break_even(), min(zeros), max(zeros)
    gains = [
        f"{row.gain(1 - share):.2f}" if least - 1e-9 <= share <= most + 1e-9 else ""
        for share in SHOWN
    ]
    said = f"{1 - even:.0%}" if even else "none"
    if even == row.sparse_us[-1][0]:
        said = f"below {least:.0%}"
    alone = len(zeros) == 1  # as the model's own layers are, which have no curve
    density, us = row.sparse_us[0]
    own = [f"{1 - density:.3g}", number(us), f"{row.dense_us / us:.2f}"]
    return [
        records[0]["layer"],
        str(records[0]["count"]),
        number(row.dense_us),
        *(number(records[0].get(key)) for key in OTHERS),
        *(["", *own, *[""] * len(SHOWN)] if alone else [said, "", "", "", *gains]),
        "" if all(r["passed"] for r in records) else "WRONG",
    ]


def zeros_of(network: Record) -> float:
    """Tells the share of zeros in a network's pruned layers."""
    return float(network["zeros"] if "zeros" in network else 1 - (network["density"] or 1))
