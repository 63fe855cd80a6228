"""What a JPEG's header says, read in microseconds, and whether a GPU should decode the file.

A GPU's decoder is made for what cameras and data sets have: baseline, 8 bits, grey or YCbCr, in
one scan. What is not, or odd in any way, is read by Pillow, which also says what is wrong with it.
So is what ops/resample.mojo does not resize.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from maxvision.common.pictures import MAX_PIXELS
from maxvision.runtime.preprocess import LARGE, Pixels, Preprocess, Source

File: TypeAlias = "bytes | npt.NDArray[np.uint8]"
"""The bytes of a file."""

TAPS = 64
"""Pixels along an axis that make one, at most; ops/resample.mojo has room for as many."""
SUPPORT = {Image.Resampling.BICUBIC: 2, Image.Resampling.BILINEAR: 1}
"""How far the filters that it has reach, px."""

_TALL = 100  # times as high as wide: Pillow 12.2 resizes taller pictures in another order
_NO_LENGTH = (0x01, *range(0xD0, 0xD9))
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE, _EXTENDED = 0xC0, 0xC1
_SCAN, _END = 0xDA, b"\xff\xd9"
_JFIF, _APP1, _ADOBE = 0xE0, 0xE1, 0xEE
_ORIENTATION = 0x0112
_SAMPLINGS = ((0x11,), (0x11,) * 3, (0x21, 0x11, 0x11), (0x22, 0x11, 0x11), (0x12, 0x11, 0x11))
"""Grey, 4:4:4, 4:2:2, 4:2:0 and 4:4:0, as the sampling factors of the components."""


@dataclass(frozen=True, eq=False)
class Jpeg:
    """A file that a GPU's decoder takes.

    Attributes:
        file: Its bytes.
        height: Of the picture as it is stored, px.
        width: Likewise.
        orientation: How it is made upright, 1 to 8 as EXIF counts.
    """

    file: File
    height: int
    width: int
    orientation: int = 1

    @property
    def upright(self) -> tuple[int, int]:
        """Height and width once it is upright."""
        size = self.height, self.width
        return size if self.orientation < 5 else size[::-1]


Picture: TypeAlias = "Jpeg | Pixels"
"""A file to decode, or pixels [H, W, 3] that were prepared on the CPU."""


def pixels(file: bytes) -> int:
    """Counts the pixels of a JPEG whose scans are neither progressive nor lossless; 0 of others."""
    try:
        for kind, start, _ in _segments(file):
            if kind in _FRAMES:
                height, width = struct.unpack_from(">HH", file, start + 1)
                return height * width if kind in (_BASELINE, _EXTENDED) else 0
    except (struct.error, IndexError):
        pass
    return 0


def takes(preprocess: Preprocess) -> bool:
    """Tells whether a GPU may prepare pictures for a model."""
    return preprocess.resample in SUPPORT and not preprocess.fast


def find(source: Source | Exception, preprocess: Preprocess) -> Jpeg | None:
    """Opens a file, or takes its bytes, as ``read`` does; None if it is none, such as a pipe."""
    file = source if isinstance(source, bytes) else _file(source)
    return read(file, preprocess) if file is not None else None


def find_all(sources: Sequence[Source | Exception], preprocess: Preprocess) -> list[Jpeg | None]:
    """Opens several, see ``find``."""
    return [find(source, preprocess) for source in sources]


def _file(source: Source | Exception) -> bytes | None:
    """Reads a file by the system's own calls, which take less time than ``open``."""
    if isinstance(source, (str, os.PathLike)):
        with suppress(OSError, ValueError):
            about = os.stat(source)
            if stat.S_ISREG(about.st_mode):
                number = os.open(source, os.O_RDONLY)
                try:
                    return os.read(number, about.st_size)
                finally:
                    os.close(number)
    return None


def read(file: bytes, preprocess: Preprocess) -> Jpeg | None:
    """Reads the header of a file; None if Pillow should have it.

    Files that are cut off are Pillow's too. One that is damaged further in is not found here.

    Args:
        file: Its bytes.
        preprocess: What ``takes`` says yes to.
    """
    try:
        found = _read(file)
    except (struct.error, IndexError):
        return None
    return found if found and _is_resized(found, preprocess) else None


def _is_resized(picture: Jpeg, preprocess: Preprocess) -> bool:
    """Tells whether ops/resample.mojo resizes a picture as Pillow does."""
    size, scaled = picture.upright, preprocess.scaled(*picture.upright)
    most = max(old / new for old, new in zip(size, scaled, strict=True))
    taps = 2 * SUPPORT[preprocess.resample] * max(most, 1.0) + 1
    large = size[0] * size[1] > MAX_PIXELS or scaled[0] * scaled[1] > LARGE
    return taps <= TAPS and not large and size[0] <= _TALL * size[1]


def _read(file: bytes) -> Jpeg | None:
    height = width = components = 0
    ids, transform, exif = b"", None, None
    has_jfif = has_xmp = False
    for kind, start, end in _segments(file):
        if kind == _JFIF:
            has_jfif |= file[start : start + 5] == b"JFIF\0"
        elif kind == _APP1 and file[start : start + 6] == b"Exif\0\0":
            exif = exif or file[start + 6 : end]
        elif kind == _APP1:
            has_xmp |= b"tiff:Orientation" in file[start:end]
        elif kind == _ADOBE and file[start : start + 5] == b"Adobe":
            transform = file[start + 11]
        elif kind in _FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", file, start)
            ids = file[start + 6 : end : 3]
            sampling = tuple(file[start + 7 : end : 3])
            if kind != _BASELINE or bits != 8 or sampling not in _SAMPLINGS or not height * width:
                return None
        elif kind == _SCAN:
            whole = file[start] == components and file.rfind(_END, end) >= 0
            coloured = components == 1 or has_jfif or transform == 1 or ids == b"\1\2\3"
            if not (whole and components and coloured and transform in (None, 1)):
                return None
            orientation = _orientation(exif) if exif else 0
            if orientation is None or (not orientation and has_xmp):  # which may say it, too
                return None
            return Jpeg(file, height, width, orientation or 1)
    return None


def _segments(file: bytes) -> Iterator[tuple[int, int, int]]:
    """Walks over a header: each segment's kind, where its content begins, and where it ends."""
    at = 2
    while file[:2] == b"\xff\xd8" and at + 4 <= len(file) and file[at] == 0xFF:
        kind = file[at + 1]
        if kind == 0xFF or kind in _NO_LENGTH:
            return
        end = at + 2 + int.from_bytes(file[at + 2 : at + 4], "big")
        yield kind, at + 4, end
        at = end


def _orientation(exif: bytes) -> int | None:
    """Reads the orientation of EXIF: 1 to 8; 0 if it says none, None if it is not understood."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return None
    (at,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, numbers, value = struct.unpack_from(f"{order}HHIH", exif, entry)
        if tag == _ORIENTATION:
            return value if (kind, numbers) == (3, 1) and 1 <= value <= 8 else None
    return 0
