"""``maxvision bench compile``: graphs for a GPU that is elsewhere, one file a model and dtype."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from max.driver import Device
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module

from maxvision.bench.environment import environment
from maxvision.bench.layers import COPIES, distinct, layer_module, network_nodes
from maxvision.bench.references import artifact, load, precision
from maxvision.common.errors import ArgumentError
from maxvision.graphs import nodes
from maxvision.graphs.target import Target
from maxvision.runtime.preprocess import Preprocess
from maxvision.runtime.session import DTYPES, build, choose_sparse

NOTE = "compiled.json"


def compiled_note(folder: Path | None) -> dict[str, Any]:
    """Reads what was noted beside compiled graphs; it stands in for an unknown commit."""
    if folder is None or not (folder / NOTE).is_file():
        return {}
    note = json.loads((folder / NOTE).read_text())
    return {"compiled": note, "commit": note["commit"]}


def run(options: argparse.Namespace) -> int:
    """Compiles, and notes beside the files what they took, the commit and the versions.

    A graph that is in MAX's cache takes seconds only.
    """
    for name in options.dtypes:
        if name not in DTYPES:
            raise ArgumentError(f"dtypes expects {', '.join(DTYPES)} but has {name!r}")
    with Target.parse(options.target).device() as device:
        return _compile(options, device)


def _compile(options: argparse.Namespace, device: Device) -> int:
    place = DeviceRef.from_device(device)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = dict(compiled_note(options.out).get("compiled", {}).get("seconds", {}))

    def export(path: Path, graph: Graph | Module) -> None:
        start = time.perf_counter()
        session = InferenceSession(devices=[device])
        extensions = [nodes.OPS] if isinstance(graph, Module) else None  # a graph names its own
        session.compile(graph, custom_extensions=extensions).export_mef(path)
        seconds[path.name] = round(time.perf_counter() - start, 1)
        print(f"{path}: {seconds[path.name]:.0f} s", flush=True)
        note = {"target": options.target, **environment(), "seconds": seconds}
        (options.out / NOTE).write_text(json.dumps(note, indent=1) + "\n")

    for name in options.models:
        model = load(name)
        prepare = Preprocess.from_config(model.preprocess)
        size = (prepare.height, prepare.width)
        for dtype in options.dtypes:
            kind, tf32 = DTYPES[dtype], options.tf32
            target = Target.parse(options.target)
            file = precision(dtype, tf32)
            for mode in options.sparse:
                asked = target, kind, size, options.batch_size
                sparse = choose_sparse(model, mode, *asked, tf32=tf32).formats
                graph, _ = build(model, place, kind, size=size, tf32=tf32, sparse=sparse)
                export(artifact(options.out, name, file, mode), graph)
            if options.layers:
                layers = distinct(network_nodes(model, place, kind, size, tf32=tf32))
                module, *_ = layer_module(list(layers), place, kind, COPIES)
                export(artifact(options.out, name, file, "layers"), module)
    return 0
