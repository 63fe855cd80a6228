"""``python -m bench compile``: graphs for a GPU that is elsewhere, one file a model and dtype."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import max.driver as driver
from max.engine import InferenceSession
from max.graph import DeviceRef

from bench.environment import environment
from bench.layers import COPIES, distinct, layer_module, network_nodes
from bench.references import artifact, checkpoint, reference_model
from graphs import nodes
from graphs.errors import ArgumentError
from graphs.preprocess import Preprocess
from graphs.session import DTYPES, build

NOTE = "compiled.json"


def compiled_note(folder: Path | None) -> dict[str, Any]:
    """Reads what was noted beside compiled graphs; it stands in for an unknown commit."""
    if folder is None or not (folder / NOTE).is_file():
        return {}
    note = json.loads((folder / NOTE).read_text())
    return {"compiled": note, "commit": note["commit"]}


def run(options: argparse.Namespace) -> int:
    """Compiles, and notes the commit and versions beside the files."""
    for name in options.dtypes:
        if name not in DTYPES:
            raise ArgumentError(f"dtypes expects {', '.join(DTYPES)} but has {name!r}")
    driver.set_virtual_device_api("hip" if options.target.startswith("gfx") else "cuda")
    driver.set_virtual_device_target_arch(options.target)
    driver.set_virtual_device_count(1)
    device = driver.Accelerator()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        model = checkpoint(name, reference_model(name))
        prepare = Preprocess.from_config(model.preprocess)
        size = (prepare.height, prepare.width)
        for dtype in options.dtypes:
            start = time.perf_counter()
            graph, _ = build(model, DeviceRef.from_device(device), DTYPES[dtype], size=size)
            path = artifact(options.out, name, dtype)
            InferenceSession(devices=[device]).compile(graph).export_mef(path)
            print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
            if options.layers:
                start = time.perf_counter()
                place = DeviceRef.from_device(device)
                layers = distinct(network_nodes(model, place, DTYPES[dtype], size))
                module, *_ = layer_module(list(layers), place, DTYPES[dtype], COPIES)
                path = artifact(options.out, name, f"{dtype}-layers")
                session = InferenceSession(devices=[device])
                session.compile(module, custom_extensions=[nodes.OPS]).export_mef(path)
                print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
    note = {"target": options.target, **environment()}
    (options.out / NOTE).write_text(json.dumps(note, indent=1) + "\n")
    return 0
