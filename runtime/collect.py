"""The images that a command line names: files, folders, standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from maxvision.common.errors import ImageError
from maxvision.common.pictures import EXTENSIONS
from maxvision.runtime.pipeline import Item
from maxvision.runtime.preprocess import Source, read_image


def collect(arguments: Sequence[str]) -> list[Item]:
    """Lists the images that the arguments name: files, folders (in name order), ``-`` for stdin."""
    items: list[Item] = []
    for argument in arguments:
        if argument == "-":
            items.append(Item("-", _stdin()))
        elif os.path.isdir(argument):
            items.extend(_folder(argument))
        else:
            items.append(Item(argument, _file(argument)))
    return items


def _file(path: str) -> Source | ImageError:
    """Says at once that a file is not there: a model may take a minute to compile."""
    if not os.path.exists(path):
        try:
            read_image(path)
        except ImageError as error:
            return error
    return path


def _stdin() -> Source | ImageError:
    try:
        if sys.stdin is None or sys.stdin.isatty():
            raise ImageError(
                "-: no image comes on standard input; pipe one in, as in curl ... | maxvision -"
            )
        data = sys.stdin.buffer.read()
        if not data:
            raise ImageError("-: standard input is empty; check the command before the pipe")
        return read_image(data, name="-")
    except ImageError as error:
        return error


def _folder(folder: str) -> list[Item]:
    found: list[tuple[list[str], Item]] = []

    def refuse(error: OSError) -> None:
        path = error.filename or folder
        problem = f"{path}: the folder cannot be read ({error.strerror});"
        found.append(_sorted(path, ImageError(f"{problem} check its permissions")))

    folders = [folder]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError as error:
            refuse(error)
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS and (
                entry.is_file(follow_symlinks=False) or entry.is_symlink()  # a pipe would hang
            ):
                found.append(_sorted(entry.path, entry.path))
    if not found:
        problem = f"{folder}: the folder holds no images;"
        found.append(_sorted(folder, ImageError(f"{problem} check the path")))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _sorted(path: str, source: Source | ImageError) -> tuple[list[str], Item]:
    return path.split(os.sep), Item(path, source)
