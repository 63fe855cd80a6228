"""The processes that read JPEGs: what they find, and what becomes of what they do not."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maxvision.common.errors import ImageError
from maxvision.runtime import jpeg, reading
from maxvision.runtime.preprocess import Preprocess, Source
from maxvision.runtime.reading import Reader

PLAIN = Preprocess(64, 64, 72)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    made.begin(PLAIN, batch=4, slots=2)
    made.wait()
    yield made
    made.close()


def saved(folder: Path, count: int, kind: str = "JPEG") -> list[Source]:
    """Writes pictures, each larger than the one before."""
    paths: list[Source] = []
    for i in range(count):
        file = io.BytesIO()
        Image.new("RGB", (40 + i, 48), (i, 0, 0)).save(file, kind)
        paths.append(str(folder / f"{i}.{kind}"))
        Path(str(paths[-1])).write_bytes(file.getvalue())
    return paths


def test_files_are_as_this_process_reads_them(reader: Reader, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    odd: list[Source | Exception] = [
        *saved(tmp_path, 1, "PNG"), tmp_path / "none.jpg", str(pipe), "a\0b", io.BytesIO(),
        ImageError(),
    ]  # fmt: skip
    some = saved(tmp_path, 3)
    given = [*some, *odd, Path(str(some[0])), Path(str(some[1])).read_bytes()]
    found = reader(given)
    expected = jpeg.find_all(given, PLAIN)
    assert [each is None for each in found] == [False] * 3 + [True] * len(odd) + [False] * 2
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None and theirs is not None:
            assert bytes(ours.file) == theirs.file
            assert (ours.height, ours.width) == (theirs.height, theirs.width)


def test_files_stay_until_their_slot_comes_again(reader: Reader, tmp_path: Path) -> None:
    first, second, third = saved(tmp_path, 3)
    (one,), (two,) = reader([first]), reader([second])
    assert one and two and one.width == 40 and two.width == 41
    before = bytes(one.file)
    (three,) = reader([third])
    assert three and bytes(one.file) != before and bytes(two.file) == Path(str(second)).read_bytes()


def test_what_has_no_room_is_for_others(reader: Reader, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8)
    large = tmp_path / "large.jpg"
    Image.fromarray(noise).save(large, quality=100)
    assert 2 * reading.ROOM < large.stat().st_size < 4 * reading.ROOM
    small = saved(tmp_path, 1)
    found = reader([str(large), str(large), *small])
    assert [each is None for each in found] == [False, True, False]


def test_paths_are_relative_to_this_processs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    reader = Reader()
    reader.begin(PLAIN, batch=1, slots=1)
    reader.wait()
    assert reader(["0.JPEG"]) != [None]
    reader.close()


def test_this_process_reads_where_none_has_started_or_one_has_ended(tmp_path: Path) -> None:
    paths = saved(tmp_path, 2)
    reader = Reader()
    reader.begin(PLAIN, batch=4, slots=2)
    assert [each and each.width for each in reader(paths)] == [40, 41]
    reader.wait()
    reader.close()
    for _ in range(2):
        assert [each and each.width for each in reader(paths)] == [40, 41]
