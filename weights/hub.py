"""Downloads a model from the Hugging Face hub into its cache, once."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from maxvision.common.errors import ModelError
from maxvision.weights.files import read_json

_DESCRIPTION = ("config.json", "preprocessor_config.json")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


def download(
    repo: str, revision: str | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """Returns the folder of ``repo`` in the hub's cache, downloading what is not there.

    A model that is in the cache is used as it is, without asking the hub. Safetensors are
    preferred, pickles the fallback. ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` work as
    everywhere. Progress bars appear if stderr is a terminal.

    Raises:
        ModelError: If the model does not exist, is gated, or cannot be downloaded.
    """
    for local in (True, False):
        if not local and progress is not None:
            progress(f"downloading {repo} from the Hugging Face hub")
        for weights in (_SAFETENSORS, _PICKLES):
            folder = _snapshot(repo, revision, [*_DESCRIPTION, *weights], local)
            if folder is not None and _complete(folder, local):
                return folder
    raise ModelError(
        f"{repo}: the repository on the Hugging Face hub has neither model.safetensors nor"
        " pytorch_model.bin; use another model"
    )


def _snapshot(repo: str, revision: str | None, patterns: list[str], local: bool) -> Path | None:
    """Returns the cached folder of ``repo``, after downloading if not ``local``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _quiet_unless_terminal():
            return Path(
                snapshot_download(
                    repo, revision=revision, allow_patterns=patterns, local_files_only=local
                )
            )
    except LocalEntryNotFoundError as error:
        if local:
            return None
        raise ModelError(_sentence(repo, error)) from None
    except Exception as error:  # of the HTTP client, the file system, the download accelerator
        raise ModelError(_sentence(repo, error)) from None


@contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _complete(folder: Path, described: bool) -> bool:
    """Returns whether ``folder`` has its weights (and its config.json, if it must)."""
    if described and not (folder / "config.json").is_file():
        return False
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return True
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map", {}).values()
            return all((folder / str(shard)).is_file() for shard in shards)
    return False


def _sentence(repo: str, error: Exception) -> str:
    """Says what went wrong and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = "the Hugging Face hub"
    if isinstance(error, GatedRepoError):
        return (
            f"{repo}: {hub} asks for a licence first; accept it on the model's page, set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo}: {hub} has no such model; check the spelling, or set HF_TOKEN if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo}: the model on {hub} has no such revision; check its spelling"
    if isinstance(error, HFValidationError):
        return f"{repo}: this is not an id of {hub}; write it as owner/name"
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return f"{repo}: HF_HUB_OFFLINE is set and the model is not in the cache; unset it once"
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return f"{repo}: the disk is full; free some space or set HF_HOME to another disk"
    if isinstance(error, PermissionError):
        return f"{repo}: the cache of {hub} cannot be written; set HF_HOME to a folder of yours"
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    reason = re.sub(r"^Got: (\w+: )?(\[.*?\] )?", "", reason)
    return f"{repo}: {hub} cannot be reached ({reason}); check the network, or use a local folder"
