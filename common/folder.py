"""Folders that appear when they are complete, or not at all; and where a file may be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from maxvision.common.errors import ArgumentError


def no_place(path: str | Path) -> str:
    """Says why a file cannot be written to a path, "this is a folder"; nothing if it can.

    What is no regular file, a device or a pipe, is never read to go on with, nor replaced.
    """
    if os.path.isdir(path):
        return "this is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return "this is not a regular file"
    return "" if Path(path).resolve().parent.is_dir() else "its folder does not exist"


@contextmanager
def new_folder(
    folder: Path, content: str, replaces: Callable[[Path], bool] = lambda _: False
) -> Iterator[Path]:
    """Yields a folder to write into, which takes the place of ``folder`` in the end.

    Args:
        folder: Where to; its parents are made.
        content: What a message calls what is written, such as "the model".
        replaces: Tells whether a folder with something in it may be lost; an empty one may.

    Raises:
        ArgumentError: If ``folder`` must stay, or something cannot be written.
    """
    folder = folder.resolve()
    draft: Path | None = None
    try:
        taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
        if taken and not replaces(folder):
            raise ArgumentError(
                f"{folder} exists already and is not empty; choose another folder, or pass --force"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        new, old = draft / "new", draft / "old"
        new.mkdir()
        yield new
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except OSError as error:
        full = "No space left" in str(error)
        raise ArgumentError(
            f"{folder}: {content} cannot be written: "
            + ("the disk is full" if full else str(error))
            + "; nothing was written, choose another place"
        ) from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
