"""Prints what the commands measured: a table for each kind of record, without torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from maxvision.bench import curves, tables
from maxvision.bench.launches import Launch, by_kernel
from maxvision.bench.tables import Record, grouped, number, percent

_NETWORKS = (
    "model", "dtype", "batch", "engine", "p50 ms", "p90", "p99", "p10", "CPU p10", "images/s",
    "TFLOP/s", "of roofline", "to device", "to host", "request p50", "J/image", "MHz", "MB",
    "set-up s", "error", "ours is", "",
)  # fmt: skip


def networks(records: Sequence[Record]) -> None:
    """Prints a row an engine, with our time over its; over the best peer's in our own."""
    rows = []
    for cell in grouped(records, "model", "dtype", "batch").values():
        right = {r["engine"]: r["p50_ms"] for r in cell if r["passed"] and "p50_ms" in r}
        ours = right.pop("maxvision", None)
        for r in cell:
            batch, joules = r["batch"], r.get("joules_per_batch")
            peer = min(right.values(), default=None) if r["engine"] == "maxvision" else None
            peer = right.get(r["engine"], peer)
            error = r.get("max_rel_err")
            requests = r.get("request", {})
            rows.append([
                r["model"], f"{r['dtype']}{' by TF32' * r.get('tf32', False)}", str(batch),
                r["engine"], *(number(r.get(f"p{p}_ms"), "ms") for p in (50, 90, 99, 10)),
                number(r.get("cpu_p10_ms"), "ms"),
                number(1e3 * batch / r["p50_ms"] if "p50_ms" in r else None),
                number(r.get("tflops_per_s")), percent(r.get("share_of_roofline")),
                *(number(r.get(f"{way}_ms"), "ms") for way in ("host_to_device", "device_to_host")),
                number(requests.get("p50_ms"), "ms"), number(joules and joules / batch),
                str(r.get("sm_mhz", "")), number(r.get("memory_mb")),
                number(r["setup_s"] + r.get("load_s", 0) if "setup_s" in r else None),
                "" if error is None else f"{error:.1e}",
                f"{ours / peer:.2f} x" if ours and peer else "",
                f"LOST: {r['lost']}" if "lost" in r else "" if r["passed"] else "WRONG",
            ])  # fmt: skip
    tables.show("Networks; ours over the best peer in our own rows", _NETWORKS, rows, left=4)


def levels(records: Sequence[Record]) -> None:
    """Prints a table for each block and model, a row a level."""
    for (block, dtype, both), cell in grouped(records, "block", "dtype", "backward").items():
        comparison(f"{block}, {dtype}, {'forward and backward' if both else 'forward'}", cell)


def comparison(title: str, records: Sequence[Record]) -> None:
    """Prints a row for each implementation."""
    head = ("", "p50 ms", "p10", "p90", "MB", "launches", "their ms", "moved MB", "TFLOP/s",
            "of roofline", "lines", "error", "")  # fmt: skip
    rows = [
        [
            r["implementation"], *(number(r.get(f"p{p}_ms"), "ms") for p in (50, 10, 90)),
            number(r["memory_mb"]), str(r["launches"] or ""), number(r.get("launches_ms"), "ms"),
            *(number(r.get(name)) for name in ("moved_mb", "tflops_per_s")),
            percent(r.get("share_of_roofline")),
            str(r["lines"] or ""), f"{r['error']:.0e}", "" if r["passed"] else "WRONG",
        ]
        for r in records
    ]  # fmt: skip
    tables.show(title, head, rows)


def bridge(records: Sequence[Record]) -> None:
    """Prints a row for each op and way, with our time over the faster one of torch's."""
    rows = []
    for (op, dtype, both), cell in grouped(records, "op", "dtype", "backward").items():
        by = {r["implementation"]: r for r in cell}
        own, times = by["maxvision"], [by[n].get("p50_ms") for n in ("torch", "torch-compile")]
        ms = own.get("p50_ms")
        known = [each for each in times if each]
        rows.append([
            op, dtype, "both" if both else "forward",
            *(number(each, "ms") for each in (*times, ms)),
            f"{ms / min(known):.2f}" if ms and known else "",
            number(own.get("tflops_per_s")), percent(own.get("share_of_roofline")),
            str(own["kernel_lines"]), number(own.get("gflops_per_s_per_line")),
            f"{own['error']:.0e}", "" if own["passed"] else "WRONG",
        ])  # fmt: skip
    head = ("op", "dtype", "way", "torch ms", "torch-compile", "maxvision", "of the faster",
            "TFLOP/s", "of roofline", "kernel lines", "GFLOP/s a line", "error", "")  # fmt: skip
    tables.show("Ops, called from torch", head, rows)


def training(records: Sequence[Record]) -> None:
    """Prints a row an engine, with our time over its."""
    rows = []
    for cell in grouped(records, "model", "dtype", "batch").values():
        ours = next((r["p50_ms"] for r in cell if r["engine"] == "maxvision"), None)
        for r in cell:
            rows.append([
                r["model"], r["dtype"], str(r["batch"]), r["engine"],
                *(number(r[f"p{p}_ms"], "ms") for p in (50, 90)), number(r["images_per_s"]),
                number(r["tflops_per_s"]), number((r["memory_bytes"] or 0) / 1e6),
                f"{r['error']:.1e}",
                f"{ours / r['p50_ms']:.2f} x" if ours and r["engine"] != "maxvision" else "",
                "" if r["passed"] else "WRONG",
            ])  # fmt: skip
    heads = ["model", "dtype", "batch", "engine", "p50 ms", "p90", "images/s", "TFLOP/s", "MB",
             "error", "ours over", ""]  # fmt: skip
    tables.show("Steps of training", heads, rows, left=4)


def course(records: Sequence[Record]) -> None:
    """Prints what each network's training came to, and how long it took."""
    rows = []
    for (network, engine), run in grouped(records, "network", "engine").items():
        last = run[-1]
        right = next((r["accuracy"] for r in reversed(run) if "accuracy" in r), None)
        shown = f"{100 * right:.2f} %" if right is not None else ""
        rows.append([network, engine, str(last["epoch"]), f"{last['loss']:.4f}", shown,
                     number(last["seconds"])])  # fmt: skip
    heads = ["network", "engine", "epochs", "loss", "accuracy", "seconds"]
    tables.show("Training", heads, rows, left=2)


def ops(rows: Sequence[Record]) -> None:
    """Prints a row a layer in the network's order, and their sum."""
    first = rows[0]
    title = f"{first['model']}, {first['dtype']}, batch {first['batch']}, {first['device']}"
    table = Table("layer", "op", title=title, title_justify="left")
    gpu = any("kernel" in row for row in rows)
    for heading in ("times", "us", "torch us", "ours is", "TFLOP/s", "GB/s", "roofline", "error"):
        table.add_column(heading, justify="right")
    if gpu:
        table.add_column("kernel")
    for row in rows:
        kernel = ", ".join(f"{k['name']} in {k['blocks']}" for k in row.get("kernel", ()))
        table.add_row(
            f"{row['layer']}",
            f"{row['op']} {row['epilogue']}".removesuffix(" none").strip(),
            str(row["count"]),
            f"{row['us']:.2f}",
            f"{row['peer_us']:.2f}" if "peer_us" in row else "",
            f"{row['of_peer']:.2f} x" if "of_peer" in row else "",
            f"{row['tflops_per_s']:.3g}" if row["tflops_per_s"] else "",
            f"{row['gb_per_s']:,.0f}",
            f"{row['share_of_roofline']:.0%}",
            ("" if row["passed"] else "WRONG ") + f"{row.get('max_rel_err', 0):.0e}",
            *([kernel] if gpu else []),
        )
    both = [row for row in rows if "peer_us" in row]
    ours, theirs = (sum(row["count"] * row[key] for row in both) for key in ("us", "peer_us"))
    if theirs:
        count = str(sum(row["count"] for row in both))
        sums = (f"{ours:,.1f}", f"{theirs:,.1f}", f"{ours / theirs:.2f} x")
        table.add_row("all that torch has", "", count, *sums)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def sparse(records: Sequence[Record]) -> None:
    """Prints the layers, a table a model, batch and format, and the networks."""
    for title, group in curves.parts(records):
        tables.show(title, curves.HEAD, map(curves.line, curves.layers(group)))
    rows = []
    for r in (each for each in records if each["kind"] == "sparse network"):
        formats = sorted((r.get("formats") or {}).items())
        rows.append([
            r["model"], f"{curves.zeros_of(r):.3g}", str(r["batch"]), r["sparse"],
            ", ".join(f"{count} {name}" for name, count in formats) or str(r["sparse_layers"]),
            f"{r['accuracy']:.2%}" if "accuracy" in r else "",
            f"{r['weight_bytes'] / 1e6:.2f}" if "weight_bytes" in r else "",
            number(r["ms"], "ms"), number(r["p10_ms"], "ms"), f"{r['gain']:.2f}",
            "" if r["passed"] else "WRONG",
        ])  # fmt: skip
    head = ("model", "zeros", "batch", "--sparse", "sparse layers", "top-1", "weights, MB", "ms",
            "p10", "of dense", "")  # fmt: skip
    if rows:
        first = records[0]
        tables.show(f"Networks, {first['dtype']}, {first['device']}", head, rows)


def launches(found: Sequence[Launch], title: str, rows: int) -> None:
    """Prints the launches, those that add most to the run first, then their sum by name."""
    span = sum(launch.adds_us for launch in found)
    idle = sum(max(0.0, launch.adds_us - launch.us) for launch in found)
    console = Console(width=None if Console().is_terminal else 180)
    table = Table("place", "layer", "kernel", title=title, title_justify="left")
    for heading in ("us", "adds us", "share", "grid", "block", "registers", "shared bytes"):
        table.add_column(heading, justify="right")
    for launch in sorted(found, key=lambda launch: -launch.adds_us)[: rows or None]:
        table.add_row(
            str(launch.place),
            launch.layer,
            launch.name,
            f"{launch.us:.2f}",
            f"{launch.adds_us:.2f}",
            f"{launch.adds_us / span:.1%}",
            "x".join(map(str, launch.grid or [])),
            "x".join(map(str, launch.block or [])),
            "" if launch.registers is None else str(launch.registers),
            "" if launch.shared_bytes is None else str(launch.shared_bytes),
        )
    console.print(table)
    table = Table("kernel", title="by kernel", title_justify="left")
    for heading in ("launches", "adds us", "share"):
        table.add_column(heading, justify="right")
    for name, count, time in by_kernel(list(found)):
        table.add_row(name, str(count), f"{time:.2f}", f"{time / span:.1%}")
    console.print(table)
    console.print(
        f"{len(found)} launches in {span:.1f} us, as recorded;"
        f" nothing runs in {idle / span:.1%} of it\n"
    )


_SERVERS = ("server", "body", "load", "requests/s", "goodput", "p50 ms", "p90", "p99", "p99.9",
        "cores", "thread", "worker", "decoder", "CPU ms", "times", "statuses")  # fmt: skip


def servers(records: Sequence[Record]) -> None:
    """Prints a row a server and load."""
    rows = [
        [
            r["server"], r["body"], f"{r['loop']} {r.get('rate') or r.get('concurrency'):g}",
            number(r["requests_per_s"]), number(r["goodput_per_s"]),
            *(number(r.get(f"p{p}_ms")) for p in (50, 90, 99, 99.9)),
            *(str(r.get(key, "")) for key in ("cpu_cores", "busiest_thread")),
            *(str(r.get(key, "")) for key in ("worker_busy", "decoder_busy")),
            *(str(r.get(key, "")) for key in ("cpu_ms_per_request", "times")),
            " ".join(f"{k}:{v}" for k, v in r["statuses"].items()),
        ]
        for r in records
    ]  # fmt: skip
    tables.show("Servers", _SERVERS, rows, left=3)
