"""What a TIFF's first directory may say, looked at before Pillow and libtiff read it.

The size that a TIFF declares bounds neither memory nor time: a picture of one pixel may be one tile
of a gigabyte, a million strips may all be the same bytes, and of a tag that occurs twice Pillow
takes the last and libtiff the first. No program writes such files.
"""

from __future__ import annotations

import math
import struct
from typing import IO

MOST_PIECES = 2**17
"""Strips or tiles of a picture: one of 100 megapixels in tiles of 32 x 32 has 97,656."""

MOST_TAGS = 4096
"""Entries of a directory."""

_NUMBERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}  # whole ones, by type
_WIDTH, _HEIGHT, _OFFSETS, _SIZES = 322, 323, (273, 324), (279, 325)


_READ = (b"II*\0", b"MM\0*", b"II+\0")
_MISREAD = (b"MM*\0", b"II\0*", b"MM\0+")  # which Pillow reads in another way than libtiff


def is_tiff(head: bytes) -> bool:
    """Tells whether the first four bytes are those of a TIFF, be they right or not."""
    return head in _READ or head in _MISREAD


def tile_pixels(file: IO[bytes]) -> int:
    """Checks the first directory of a TIFF, and returns the pixels of a tile, 0 without tiles.

    Raises:
        ValueError: If the directory is damaged, or says what no program writes.
    """
    try:
        return _tile_pixels(file)
    except struct.error:
        raise ValueError("its directory is cut off") from None


def _tile_pixels(file: IO[bytes]) -> int:
    end = file.seek(0, 2)

    def read(at: int, layout: str) -> tuple[int, ...]:
        file.seek(min(at, end))
        return struct.unpack(layout, file.read(struct.calcsize(layout)))

    file.seek(0)
    head = file.read(4)
    if head not in _READ:
        raise ValueError("its header is not one that TIFF or little-endian BigTIFF has")
    order = "<" if head[:2] == b"II" else ">"
    big = 43 in head[2:]
    (directory,) = read(8, f"{order}Q") if big else read(4, f"{order}I")
    (count,) = read(directory, f"{order}Q") if big else read(directory, f"{order}H")
    if count > MOST_TAGS:
        raise ValueError(f"its directory has {count:,} entries")
    first, step, room = (directory + 8, 20, 8) if big else (directory + 2, 12, 4)
    values: dict[int, tuple[int, ...]] = {}
    seen = set()
    for at in range(first, first + step * count, step):
        tag, kind, many = read(at, f"{order}HHQ" if big else f"{order}HHI")
        if tag in seen:
            raise ValueError(f"the tag {tag} occurs twice")
        seen.add(tag)
        if tag not in (_WIDTH, _HEIGHT, *_OFFSETS, *_SIZES):
            continue
        if many > MOST_PIECES:
            raise ValueError(f"it has {many:,} strips or tiles")
        if kind not in _NUMBERS:
            raise ValueError(f"the tag {tag} holds no whole numbers")
        layout = f"{order}{many}{_NUMBERS[kind]}"
        place = at + step - room
        if struct.calcsize(layout) > room:
            (place,) = read(place, f"{order}Q" if big else f"{order}I")
        values[tag] = read(place, layout)
    if any(sum(values.get(tag, ())) > end for tag in _SIZES):
        raise ValueError("its strips or tiles overlap")
    return math.prod(max(values.get(tag, (0,)), default=0) for tag in (_WIDTH, _HEIGHT))
