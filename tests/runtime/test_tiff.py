"""A TIFF costs no more memory and time than the picture that it declares."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from maxvision.common.errors import ImageError, TooLargeError
from maxvision.runtime import tiff
from maxvision.runtime.preprocess import open_image, read_image

DEFLATE = 8
Entry = tuple[int, int, int, int]  # tag, type, count, value


def written(*entries: Entry, data: bytes = b"", big: bool = False, order: str = "<") -> bytes:
    """A grey TIFF of one pixel; the value of an offset counts from the data's beginning."""
    every = [(256, 4, 1, 1), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, DEFLATE), (262, 3, 1, 1)]
    every = sorted([*every, *entries], key=lambda entry: entry[0])
    mark = b"II" if order == "<" else b"MM"
    head = struct.pack(f"{order}2sHHHQ" if big else f"{order}2sHI",
                       *((mark, 43, 8, 0, 16) if big else (mark, 42, 8)))  # fmt: skip
    body = struct.pack(f"{order}Q" if big else f"{order}H", len(every))
    start = len(head) + len(body) + len(every) * (20 if big else 12) + (8 if big else 4)
    for tag, kind, count, value in every:
        place = value + start if tag in (273, 324) or count > 1 else value
        if kind == 3 and count == 1:
            field = struct.pack(f"{order}HH", place, 0) + bytes(4 * big)
        elif kind == 4 and count == 1:
            field = struct.pack(f"{order}I", place) + bytes(4 * big)
        else:
            field = struct.pack(f"{order}Q" if big else f"{order}I", place)
        body += struct.pack(f"{order}HHQ" if big else f"{order}HHI", tag, kind, count) + field
    return head + body + bytes(8 if big else 4) + data


def tiled(side: int, **more: object) -> bytes:
    """One pixel in a tile of ``side`` x ``side``: a thousandth of its size, deflated."""
    data = zlib.compress(bytes(side * side), 9)
    entries = [(322, 4, 1, side), (323, 4, 1, side), (324, 4, 1, 0), (325, 4, 1, len(data))]
    return written(*entries, data=data, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_what_programs_write_is_read(order: str, big: bool) -> None:
    data = tiled(16, big=big, order=order)
    assert tiff.tile_pixels(io.BytesIO(data)) == 256
    assert read_image(data).size == (1, 1)
    stripped = io.BytesIO()
    Image.new("L", (300, 700)).save(stripped, "TIFF", compression="tiff_lzw", tiffinfo={278: 1})
    assert tiff.tile_pixels(stripped) == 0


def test_a_tile_is_as_large_as_a_picture_may_be() -> None:
    with pytest.raises(TooLargeError, match="tiles of 100,020,001 pixels"):
        open_image(io.BytesIO(tiled(10_001)))
    with pytest.raises(TooLargeError, match="tiles of 256 pixels, and the limit is 255"):
        open_image(io.BytesIO(tiled(16)), max_pixels=255)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda: written((322, 4, 1, 9), (322, 4, 1, 16)), "the tag 322 occurs twice"),
        (lambda: written((273, 4, 10**6, 0)), "1,000,000 strips or tiles"),
        (lambda: written((279, 4, 2, 0), data=struct.pack("<II", 90, 90)), "overlap"),
        (lambda: written((273, 4, 9, 0)), "directory is cut off"),
        (lambda: written((322, 5, 1, 0)), "no whole numbers"),
        (lambda: b"II*\0" + struct.pack("<IH", 8, 65535), "65,535 entries"),
        (lambda: b"II+\0" + bytes(4) + struct.pack("<Q", 2**63), "directory is cut off"),
        (lambda: b"MM\0*", "directory is cut off"),
        (lambda: tiled(16, big=True, order=">"), "header is not one"),
        (lambda: b"II\0*" + tiled(16)[4:], "header is not one"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_program_writes_is_refused(damage: Callable[[], bytes], says: str) -> None:
    with pytest.raises(ImageError, match=says):
        read_image(damage())


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damage_of_any_kind_is_told() -> None:
    """Bytes change where libtiff reads most: in the directory, and in what is compressed."""
    pick = random.Random(0)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 97, 3), np.uint8))
    files = []
    for compression in ("raw", "packbits", "tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        file = io.BytesIO()
        photo.save(file, "TIFF", compression=compression)
        files.append(file.getvalue())
    read = 0
    for _ in range(1500):
        data = bytearray(pick.choice(files))
        directory = int.from_bytes(data[4:8], "little")
        for _ in range(pick.randrange(1, 6)):
            low, high = (8, len(data)) if pick.random() < 0.4 else (directory, directory + 140)
            data[pick.randrange(low, min(high, len(data)))] = pick.choice(
                [0, 1, 127, 255, pick.randrange(256)]
            )
        with suppress(ImageError):
            read += bool(read_image(bytes(data)))
    assert 0 < read < 1500
