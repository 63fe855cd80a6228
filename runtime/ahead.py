"""Compiles a model ahead of time, on any machine, into a folder that runs without the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from max.dtype import DType
from max.graph import DeviceRef

from maxvision import weights
from maxvision.common import __version__
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.common.folder import new_folder
from maxvision.graphs import passes as rewriting
from maxvision.graphs.target import Target
from maxvision.runtime import artifact, nvjpeg
from maxvision.runtime.artifact import Package
from maxvision.runtime.classifier import choose_sparse, network, weights_of
from maxvision.runtime.devices import find_dtype
from maxvision.runtime.executor import Lowering, compiled, compiled_ops
from maxvision.runtime.preprocess import Preprocess


def compile(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    target: str = "cpu",
    dtype: str = "auto",
    tf32: bool = True,
    sparse: str = "auto",
    revision: str | None = None,
    force: bool = False,
    passes: str = "all",
    progress: Callable[[str], None] | None = None,
) -> Package:
    """Compiles a model for ``target`` and writes ``folder``, which ``runtime.load`` runs.

    While it lasts, no model can run in this process.

    Args:
        source: A model, as ``runtime.load`` takes it.
        folder: What to write (runtime/artifact.py); it appears when it is complete.
        target: ``cpu``, this machine's; ``cpu:x86-64-v3`` or another kind of CPU; or a GPU that
            need not be here, such as ``sm_90a`` or ``gfx942``.
        dtype: Of activations and filters, as in ``runtime.load``; so is ``tf32``.
        tf32: Whether NVIDIA's tensor cores may round float32 to TF32.
        sparse: What runs pruned layers, as in ``runtime.load``.
        revision: Branch, tag or commit on the hub.
        force: Replace ``folder`` if it holds a compiled model.
        passes: How the network is rewritten, as in ``load``.
        progress: Called with a sentence before each step that takes time.

    Raises:
        ArgumentError: If an argument is wrong, or ``folder`` cannot be written.
        DeviceError: If the target's kernels do not take the dtype.
        ModelError: If the model cannot be read, or takes no pictures, or is asked to run sparse
            and is not pruned.
    """
    wanted, off = Target.parse(target), rewriting.parse(passes)
    if artifact.is_here(source):
        raise ModelError(f"{source} is compiled already; run it as it is")
    checkpoint = weights.load(source, revision=revision, progress=progress)
    preprocess = Preprocess.from_config(checkpoint.preprocess)
    if checkpoint.channels != len(preprocess.mean):
        raise ModelError(
            f"{checkpoint.name}: pictures have {len(preprocess.mean)} channels but the model takes"
            f" {checkpoint.channels}, which cannot be compiled ahead of time; use runtime.load"
        )
    size = (preprocess.height, preprocess.width)

    def replaces(existing: Path) -> bool:
        if force and not artifact.is_here(existing):
            raise ArgumentError(
                f"{existing}: --force replaces compiled models only, not this one; choose"
                " another folder"
            )
        return force

    def starting() -> None:
        if progress:
            progress(f"compiling {checkpoint.name} for {wanted.name}; it may take a minute")

    path = Path(folder)
    with new_folder(path, "the model", replaces) as draft, wanted.device() as device:
        kind = find_dtype(dtype, device)
        rounds = tf32 and kind == DType.float32 and wanted.api == "cuda"
        choice = choose_sparse(checkpoint, sparse, wanted, kind, size, tf32=tf32)

        program = network(checkpoint, size, kind.name)
        lowering = Lowering(kind.name, rounds, choice.formats, off)
        mef, parameters, final = compiled(
            program,
            weights_of(checkpoint),
            device,
            lowering,
            target=wanted,
            starting=starting,
        )
        resample = None
        if wanted.api == "cuda":
            place = DeviceRef.from_device(device)
            resample = compiled_ops(partial(nvjpeg.graph, place, max(size)), device, wanted)
        artifact.write(
            draft,
            name=checkpoint.name,
            program=final,
            target=wanted,
            dtype=kind,
            tf32=rounds,
            sparse=choice.short,
            graph=mef,
            weights=parameters.bound,
            labels=checkpoint.labels,
            preprocess=checkpoint.preprocess,
            versions={"maxvision": __version__},
            resample=resample,
        )
    return artifact.read(path)
