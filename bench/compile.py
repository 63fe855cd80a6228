"""``maxvision bench compile``: graphs for a GPU that is elsewhere, one file a model and dtype."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Device
from max.engine import InferenceSession
from max.graph import DeviceRef, Module

from maxvision.bench.__main__ import dtypes
from maxvision.bench.environment import environment
from maxvision.bench.layers import COPIES, distinct, layer_module, lowered
from maxvision.bench.references import artifact, precision, subject
from maxvision.bench.served import EDGE, RESAMPLE
from maxvision.graphs.program import Program
from maxvision.graphs.target import Target
from maxvision.runtime import cache, nvjpeg
from maxvision.runtime.classifier import choose_sparse
from maxvision.runtime.devices import DTYPES
from maxvision.runtime.executor import Lowering, compiled, compiled_ops

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
    dtypes(options, gpu=True)
    with Target.parse(options.target).device() as device:
        return _compile(options, device)


def _compile(options: argparse.Namespace, device: Device) -> int:
    place, target = DeviceRef.from_device(device), Target.parse(options.target)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = dict(compiled_note(options.out).get("compiled", {}).get("seconds", {}))

    def export(path: Path, compile: Callable[[], bytes]) -> None:
        start = time.perf_counter()
        path.write_bytes(compile())
        seconds[path.name] = round(time.perf_counter() - start, 1)
        print(f"{path}: {seconds[path.name]:.0f} s", flush=True)
        note = {"target": options.target, **environment(), "seconds": seconds}
        (options.out / NOTE).write_text(json.dumps(note, indent=1) + "\n")

    if target.api == "cuda":  # for served.load and --decode gpu
        resample = partial(nvjpeg.graph, place, EDGE)
        export(options.out / RESAMPLE, partial(compiled_ops, resample, device, target))
    for name in options.models:
        what = subject(name)
        for dtype in options.dtypes:
            kind, tf32 = DTYPES[dtype], options.tf32
            file = precision(dtype, tf32)
            program, tensors = what.computing_in(dtype)
            for mode in options.sparse:
                sparse: Mapping[str, str] = {}
                if what.checkpoint:
                    asked = target, kind, what.checkpoint.size, options.batch_size
                    sparse = choose_sparse(what.checkpoint, mode, *asked, tf32=tf32).formats
                lowering = Lowering(dtype, tf32, sparse)
                export(
                    artifact(options.out, name, file, mode),
                    partial(mef, program, tensors, device, lowering, target),
                )
            if options.layers:
                layers = distinct(lowered(program, place, kind, tf32=tf32))
                module, *_ = layer_module(list(layers), place, kind, COPIES, tf32=tf32)
                export(
                    artifact(options.out, name, file, "layers"), partial(exported, module, device)
                )
    return 0


def mef(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    device: Device,
    lowering: Lowering,
    target: Target,
) -> bytes:
    """Compiles a program, or finds what it compiled to before."""
    return compiled(program, tensors, device, lowering, target=target)[0]


def exported(module: Module, device: Device) -> bytes:
    """Compiles the graphs of a module."""
    library = cache.library(gpu=not device.is_host)
    made = InferenceSession(devices=[device]).compile(module, custom_extensions=[library])
    with tempfile.TemporaryDirectory() as folder:
        made.export_mef(Path(folder) / "module.mef")
        return (Path(folder) / "module.mef").read_bytes()
