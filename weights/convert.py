"""Writes a checkpoint as a Hugging Face folder, which this project and transformers load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from maxvision.common.errors import ArgumentError
from maxvision.common.folder import new_folder
from maxvision.graphs.program import Program
from maxvision.weights.checkpoint import Checkpoint, identify, interpret
from maxvision.weights.family import find as find_family
from maxvision.weights.layout import Array, Stored
from maxvision.weights.rules import rename
from maxvision.weights.source import Source


def convert(found: Source, folder: Path, force: bool = False) -> None:
    """Writes ``found`` into a new ``folder``: config.json, model.safetensors, preprocessing.

    Tensors keep their values: they are renamed and widened to float32, and pruning masks are
    multiplied in; batch norms stay unfolded. The folder appears when it is complete, or not.

    Args:
        found: The model.
        folder: Where to write.
        force: Replace ``folder`` if it is there.

    Raises:
        ArgumentError: If ``folder`` is there, or cannot be written, or there is nothing to convert.
        ModelError: If the model does not load.
    """
    if found.program is not None:
        raise ArgumentError(f"{found.name} is converted already, and transformers cannot load it")
    checkpoint = interpret(found)  # refuses what would not load again
    with new_folder(folder, "the model", lambda _: force) as new:
        write(new, found, checkpoint, hugging_face_tensors(found))


def write(
    folder: Path,
    found: Source,
    checkpoint: Checkpoint,
    tensors: dict[str, Array],
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model into ``folder``, which is there and empty.

    Args:
        folder: Where to write.
        found: The model; its own config.json is kept if it is Hugging Face's.
        checkpoint: What `interpret` made of it.
        tensors: Under Hugging Face's keys.
        notes: What config.json says besides.

    Raises:
        OSError: If it cannot be written.
    """
    config = found.config if found.config and "model_type" in found.config else None
    config = config or configuration(checkpoint)
    write_files(folder, {**config, **(notes or {})}, checkpoint.preprocess, tensors, found.program)


def write_files(
    folder: Path,
    config: Mapping[str, Any],
    preprocess: Mapping[str, Any] | None,
    tensors: dict[str, Array],
    program: Program | None = None,
) -> None:
    """Writes the files of a model's folder.

    Args:
        folder: Where to write.
        config: config.json.
        preprocess: preprocessor_config.json, if there is one.
        tensors: model.safetensors.
        program: program.json, of a model that was converted.

    Raises:
        OSError: If they cannot be written.
    """
    _write_json(folder / "config.json", config)
    if preprocess is not None:
        _write_json(folder / "preprocessor_config.json", preprocess)
    if program is not None:
        (folder / "program.json").write_text(program.to_json(), encoding="utf-8")
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None


def hugging_face_tensors(found: Source) -> dict[str, Array]:
    """Renames a checkpoint's tensors to Hugging Face's keys, widened to float32."""
    family, form, _ = identify(found)
    target = family.formats[0]
    stored = Stored(found.state.tensors, found.state.reading)
    tensors = {
        target.key(weight): stored[key]
        for key, weight in rename(form.rules, found.state.tensors).items()
    }
    if found.program is not None:
        return tensors
    counters = [key.replace("running_var", "num_batches_tracked") for key in tensors]
    return tensors | {
        key: np.zeros((), np.int64) for key in counters if key.endswith("num_batches_tracked")
    }


def configuration(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describes a network as a Hugging Face config.json does."""
    family = find_family(checkpoint.family)
    return {
        "model_type": checkpoint.family,
        "architectures": list(family.architectures) if family else [],
        "id2label": {str(i): label for i, label in enumerate(checkpoint.labels)},
        "label2id": {label: i for i, label in enumerate(checkpoint.labels)},
        "dtype": "float32",
        "num_channels": checkpoint.channels,
        **checkpoint.spec.to_config(),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
