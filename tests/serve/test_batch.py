"""The worker of ``maxvision batch`` without Ray; tests/serve/test_ray.py has it with Ray."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="not installed: pip install '.[parquet]'")

from pyarrow import parquet  # noqa: E402

from maxvision.commands import batch as command  # noqa: E402
from maxvision.runtime import classifier, pipeline, reading  # noqa: E402
from maxvision.serve import batch  # noqa: E402
from maxvision.serve.batch import AHEAD, PARTS, UNITS, Files, Group  # noqa: E402
from tests.runtime.standin import decoding  # noqa: E402
from tests.serve.conftest import EXAMPLES  # noqa: E402

MODEL = "resnet-cifar10"
ROWS = 4


@pytest.fixture(scope="module")
def model() -> classifier.Classifier:
    return decoding(MODEL, batch_size=3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, model: classifier.Classifier) -> Iterator[Make]:
    """Makes workers whose model decodes as one on a GPU does, in this process."""
    monkeypatch.setattr(classifier, "load", lambda *_, **__: model)
    monkeypatch.setattr(batch, "claim", lambda _: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    workers: list[batch._Worker] = []

    def make(args: argparse.Namespace, share: int = 1) -> batch._Worker:
        workers.append(batch._Worker({**vars(args), "share": share}))
        return workers[-1]

    yield make
    for each in workers:
        each._pipeline.close()


Make = Callable[..., batch._Worker]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of 23 pictures, of which one in the middle cannot be read, and one looks as if."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(23):
        data = EXAMPLES[i % len(EXAMPLES)].read_bytes()
        (folder / f"{i:02}.jpg").write_bytes(data)
    (folder / "09.jpg").write_bytes(b"no picture")
    return folder


def options(tmp_path: Path, *images: Path) -> argparse.Namespace:
    argv = [*map(str, images), "-o", str(tmp_path / "out"), "--model", MODEL, f"--rows={ROWS}"]
    (tmp_path / "out").mkdir(exist_ok=True)
    return command.parser().parse_args([*argv, "--device=cpu", "--cores=2"])


def rest(args: argparse.Namespace) -> Files:
    return batch._files(args, batch._answered(Path(args.output))[0])


def row(unit: Files | Group) -> dict[str, Any]:
    return {"unit": pickle.dumps(unit)}


def parts(args: argparse.Namespace) -> dict[str, list[str]]:
    """The names in each file of answers."""
    found = Path(args.output).glob("part-*.parquet")
    return {path.name: parquet.read_table(path)["image"].to_pylist() for path in found}


def test_a_unit_is_written_in_parts(made: Make, tmp_path: Path, images: Path) -> None:
    args = options(tmp_path, images)
    unit = rest(args)
    done = made(args)(row(unit))
    assert (done["images"], done["failed"], done["error"]) == (23, 1, "")
    assert 0 < done["begun"] <= done["ended"]
    assert sorted(parts(args).values()) == [
        unit.names[start : start + ROWS] for start in range(0, 23, ROWS)
    ]
    rows = parquet.read_table(args.output).to_pylist()
    assert {each["image"] for each in rows if each["error"]} == {str(images / "09.jpg")}
    assert all(len(each["predictions"]) == 5 for each in rows if not each["error"])


def test_what_a_stop_in_the_middle_of_a_unit_leaves_is_gone_on_with(
    made: Make,
    model: classifier.Classifier,
    tmp_path: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = options(tmp_path, images)
    unit, worker = rest(args), made(args)
    run = model.run

    def failing(pictures: Any, sources: Any) -> Any:
        if str(images / "15.jpg") in sources:
            raise RuntimeError("the GPU is lost")
        return run(pictures, sources)

    with monkeypatch.context() as patched:
        patched.setattr(model, "run", failing)
        with pytest.raises(RuntimeError, match="lost"):
            worker(row(unit))
    before = parts(args)
    assert sorted(before.values()) == [unit.names[at : at + ROWS] for at in (0, 4, 8)]
    left = rest(args)
    assert left.names == unit.names[12:]
    assert worker(row(left))["images"] == 11
    assert before.items() <= parts(args).items()
    assert Counter(name for names in parts(args).values() for name in names) == Counter(unit.names)
    assert not rest(args)


def test_a_unit_that_is_done_again_is_written_over(
    made: Make, tmp_path: Path, images: Path
) -> None:
    args = options(tmp_path, images)
    unit, worker = rest(args), made(args)
    worker(row(unit))
    before = parts(args)
    assert worker(row(unit))["images"] == 23 and parts(args) == before


def test_a_row_group_is_written_in_parts(made: Make, tmp_path: Path) -> None:
    good = {"bytes": EXAMPLES[0].read_bytes()}
    rows = [*[good] * 70, None, {"bytes": b"hello"}, *[good] * 8]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"image": rows}), path, row_group_size=75)
    args = options(tmp_path, path)
    known = {f"{path}#{i}" for i in (0, 2, 66)}
    first, second = batch._groups(args, known)
    assert (len(first), len(second)) == (72, 5)
    worker = made(args)
    assert [worker(row(each))["failed"] for each in (first, second)] == [2, 0]
    expected = [f"{path}#{i}" for i in range(80) if f"{path}#{i}" not in known]
    found = parts(args).values()
    assert Counter(name for names in found for name in names) == Counter(expected)
    assert Counter(map(len, found)) == {ROWS: 19, 1: 1}


def test_units_of_much_work_stream_through_processes_that_read(
    made: Make, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = options(tmp_path, images)
    read: list[int] = []
    asked = reading.Reader._asked

    def counted(reader: reading.Reader, sources: Any) -> Any:
        read.append(len(sources))
        return asked(reader, sources)

    monkeypatch.setattr(reading.Reader, "_asked", counted)
    worker = made(args, pipeline.MANY)
    processes = worker._pipeline._files._processes
    assert len(processes) == pipeline.READERS
    for each in processes:
        each.wait()
    unit = rest(args)
    halves = [Files(unit.names[at:][:12], unit.sources[at:][:12]) for at in (0, 12)]
    with ThreadPoolExecutor(AHEAD) as threads:
        done = list(threads.map(worker, map(row, halves)))
    assert [each["images"] for each in done] == [12, 11] and sum(read) == 23
    assert Counter(name for names in parts(args).values() for name in names) == Counter(unit.names)
    rows = parquet.read_table(args.output).to_pylist()
    assert [each["image"] for each in rows if each["error"]] == [str(images / "09.jpg")]
    assert not made(args, pipeline.MANY - 1)._pipeline._files._processes


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_calls_of_other_threads_run_on_the_cores_that_were_claimed(
    made: Make,
    model: classifier.Classifier,
    tmp_path: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, seen, run = {min(os.sched_getaffinity(0))}, [], model.run

    def running(pictures: Any, sources: Any) -> Any:
        seen.append(os.sched_getaffinity(0))
        return run(pictures, sources)

    monkeypatch.setattr(model, "run", running)
    monkeypatch.setattr(batch, "claim", lambda _: os.sched_setaffinity(0, mine))
    args = options(tmp_path, images)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        worker = first.submit(made, args).result()
        second.submit(worker, row(rest(args))).result()
    assert seen and all(each == mine for each in seen)


@pytest.mark.parametrize(
    ("files", "rows", "workers", "size"),
    [
        (0, 512, 1, 0),
        (10, 512, 4, 512),
        (20_000, 512, 1, 4 * 512),
        (20_000, 512, 8, 512),
        (10**6, 512, 2, PARTS * 512),
        (100, 1, 3, 4),
        (100, 1000, 2, 1000),
    ],
)
def test_units(files: int, rows: int, workers: int, size: int) -> None:
    names = [str(i) for i in range(files)]
    units = list(batch._units(Files(names, list(names)), rows, workers))
    assert [name for each in units for name in each.names] == names
    assert all(each.names == each.sources for each in units)
    assert {len(each) for each in units[:-1]} <= {size}
    if files >= UNITS * workers * rows:
        assert len(units) >= UNITS * workers


def test_the_last_line(
    made: Make,
    tmp_path: Path,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray's part is played by one worker; its clock says how long it took."""
    args = options(tmp_path, images)
    (tmp_path / "out").rmdir()
    for name in ("ray", "ray.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    runs: list[int] = []

    def run(args: argparse.Namespace, _: str, __: str, files: Files, ___: Any) -> Iterator[Any]:
        worker = made(args)
        for i, unit in enumerate(batch._units(files, ROWS, 1)):
            runs.append(len(unit))
            yield {**worker(row(unit)), "begun": 1000.0 + i, "ended": 1001.5 + i}

    monkeypatch.setattr(batch, "_run", run)
    assert batch.classify(args) == 1 and runs == [4, 4, 4, 4, 4, 3]
    said = "23 images answered; 1 has an error; answering took 6.5 s, 4 images/s"
    assert capsys.readouterr().out == f"{said}; {args.output}\n"
    first = next(name for name, names in parts(args).items() if str(images / "00.jpg") in names)
    Path(args.output, first).unlink()
    assert batch.classify(args) == 1
    said = "4 images answered, 19 before; 1 has an error; answering took 1.5 s, 3 images/s"
    assert capsys.readouterr().out == f"{said}; {args.output}\n"
    assert batch.classify(args) == 1 and len(runs) == 7
    said = "0 images answered, 23 before; 1 has an error"
    assert capsys.readouterr().out == f"{said}; {args.output}\n"
