"""Which pictures are read, and how large they may be: the same everywhere, defined here."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """Describes a format of pictures.

    Attributes:
        name: As people write it; in upper case it is Pillow's name.
        media_type: What HTTP calls it.
        extensions: Of its files, in lower case.
    """

    name: str
    media_type: str
    extensions: tuple[str, ...]


FORMATS = (
    Format("JPEG", "image/jpeg", (".jpg", ".jpeg", ".jpe", ".jfif")),
    Format("PNG", "image/png", (".png", ".apng")),
    Format("WebP", "image/webp", (".webp",)),
    Format("GIF", "image/gif", (".gif",)),
    Format("BMP", "image/bmp", (".bmp",)),
    Format("TIFF", "image/tiff", (".tif", ".tiff")),
)
"""The formats that are read; Pillow's many others stay closed to input."""

EXTENSIONS = frozenset(extension for each in FORMATS for extension in each.extensions)

MAX_PIXELS = 100_000_000
"""Pixels of the largest picture that is decoded, by its header; 300 MB as RGB."""


def names(word: str) -> str:
    """Lists the formats in a sentence: ``names("or")`` is "JPEG, PNG, ..., BMP or TIFF"."""
    *most, last = (each.name for each in FORMATS)
    return f"{', '.join(most)} {word} {last}"
