"""Files of answers: what stands in them, going on after a stop, and what is refused."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxvision.common.errors import ArgumentError
from maxvision.runtime import results
from maxvision.runtime.pipeline import Answer
from maxvision.runtime.results import open_results

try:  # before another test has MAX open a session: see runtime/results.py
    from pyarrow import parquet
except ImportError:
    parquet = None

FORMATS = [
    ".csv",
    ".jsonl",
    pytest.param(
        ".parquet", marks=pytest.mark.skipif(not parquet, reason="NO PYARROW to test with")
    ),
]


def answer(i: int) -> Answer:
    name = {2: 'a "quoted", name\nin two lines.jpg', 5: "caf\udce9 ü.jpg"}.get(i, f"{i}.jpg")
    if i % 4 == 3:
        return Answer(name, f"{name}: no picture, at all")
    labels = [SimpleNamespace(label=f"l{k}, ü", class_id=k, score=0.123456789) for k in range(2)]
    best: Any = labels
    return Answer(name, None, best, np.array([0.1, i], np.float32))


def write(path: Path, numbers: range, resume: bool = False, **changes: Any) -> set[str]:
    """Writes answers in two batches as the program does, and returns what was there before."""
    options = {"model": "mödel", "top_k": 2, "logits": path.suffix != ".csv", **changes}
    results.check(str(path), resume)
    writer = open_results(str(path), resume=resume, **options)
    left = [each for i in numbers if results.utf8((each := answer(i)).name) not in writer.done]
    for batch in (left[:3], left[3:]):
        writer.write(batch)
    writer.close()
    return writer.done


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / f"answers{request.param}"


def test_what_is_written(path: Path) -> None:
    assert write(path, range(8)) == set()
    rows = read(path)
    assert [row["image"] for row in rows] == [results.utf8(answer(i).name) for i in range(8)]
    good, bad = rows[1], rows[3]
    assert bad["error"] == "3.jpg: no picture, at all" and good["model"] == "mödel"
    if path.suffix == ".csv":
        assert good["label_2"] == "l1, ü" and good["class_1"] == "0" and good["error"] == ""
        assert good["score_1"] == "0.123457" and bad["label_1"] == ""
        return
    assert good["predictions"][1] == {"label": "l1, ü", "class_id": 1, "score": 0.123457}
    assert np.allclose(good["logits"], [0.1, 1]) and not bad.get("predictions")
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_a_second_run_goes_on(path: Path) -> None:
    whole = path.with_stem("whole")
    write(whole, range(8))
    write(path, range(5))
    assert len(write(path, range(8), resume=True)) == 5
    assert read(path) == read(whole)
    assert len(write(path, range(8), resume=True)) == 8
    assert read(path) == read(whole)


def test_to_go_on_with_nothing_is_to_begin(path: Path) -> None:
    assert write(path, range(4), resume=True) == set()
    assert len(read(path)) == 4


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_a_kill_at_any_byte_costs_one_image(tmp_path: Path, ending: str) -> None:
    path, whole = tmp_path / f"answers{ending}", tmp_path / f"whole{ending}"
    write(whole, range(4))
    content = whole.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        write(path, range(4), resume=True)
        assert path.read_bytes() == content, f"{cut} bytes were there"


def test_a_new_file_only(path: Path) -> None:
    write(path, range(2))
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"exists already; continue it with --resume"):
        write(path, range(8))
    assert path.read_bytes() == before


def test_answers_of_another_run(path: Path) -> None:
    write(path, range(2))
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"it holds those of mödel; choose another name"):
        write(path, range(8), resume=True, model="other")
    if path.suffix != ".jsonl":
        changes = {"top_k": 3} if path.suffix == ".csv" else {"logits": False}
        with pytest.raises(ArgumentError, match=r"it holds other columns"):
            write(path, range(8), resume=True, **changes)
    assert path.read_bytes() == before
    for content in (b"something\nelse\n", b"\xff\n", b"{}\n[]\n"):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"it holds (something else|other columns)"):
            write(path, range(8), resume=True)
        assert path.read_bytes() == content
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_places_that_cannot_be_written(path: Path) -> None:
    with pytest.raises(ArgumentError, match="its folder does not exist; choose another place"):
        results.check(str(path.parent / "none" / path.name), False)
    path.mkdir()
    with pytest.raises(ArgumentError, match="this is a folder"):
        results.check(str(path), False)
    with pytest.raises(ArgumentError, match=r"cannot be opened|holds something else"):
        write_unchecked(path)
    pipe, link = path.with_name("pipe"), path.with_name(f"link{path.suffix}")
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for resume in (False, True):
        with pytest.raises(ArgumentError, match="this is not a regular file; choose another"):
            results.check(str(link), resume)


def write_unchecked(path: Path) -> None:
    if path.suffix == ".parquet":
        path = Path("/dev/null/answers.parquet")
    open_results(str(path), "m", 1, False, False)


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match=r"need the package pyarrow.*run .*parquet.*, or choos"):
        results.check(str(tmp_path / "a.parquet"), False)
