"""Classifies folders and Parquet files of images into Parquet, on every device of a Ray cluster.

    maxvision batch photos/ shards/ -o answers --model microsoft/resnet-50

The answers are a folder of Parquet files, each written as a whole and named by the images that are
in it: what is there is done, and the same command goes on with the rest. See docs/serving.md.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxvision.common.errors import ArgumentError, ImageError, ModelError, UserError
from maxvision.runtime.pipeline import MANY, Answer, Item, Pipeline, Times, batched
from maxvision.runtime.preprocess import Source
from maxvision.runtime.results import record, schema, utf8
from maxvision.serve.cores import claim
from maxvision.serve.worker import prepare

UNITS = 8
"""Units of work for each worker at least, where there are as many files of answers."""
PARTS = 32
"""Files of answers of a unit at most: what a worker that dies has answered of it is done again."""
AHEAD = 2
"""Units that a worker has at a time: it reads the next one while the last images of one run."""


@dataclass(frozen=True)
class Files:
    """Image files to answer for."""

    names: list[str]
    sources: list[Source | ImageError]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Group:
    """A row group of a Parquet file to answer for.

    Attributes:
        name: What the user called the file.
        path: Where it is.
        index: Of the row group.
        first: Its first row in the file.
        rows: How many it has.
        done: Rows of the file that are answered.
    """

    name: str
    path: str
    index: int
    first: int
    rows: int
    done: frozenset[int]

    def __len__(self) -> int:
        return self.rows - len(self.done)


def classify(args: argparse.Namespace) -> int:
    """Answers for all of ``args.images`` and returns the exit code: 1 if some failed, else 0."""
    for name in args.images:  # before anything that takes long
        if name != "-" and not os.path.exists(name):
            raise ArgumentError(f"{name}: there is no such file or folder; check the path")
    import ray.data  # noqa: F401  a Python without it is told before the model is read

    device = args.device
    if device.startswith("gpu:"):
        raise ArgumentError(f"--device {device}: Ray chooses the GPU of each model; use gpu or cpu")
    if device == "auto":
        from max.driver import accelerator_count

        device = "gpu" if accelerator_count() else "cpu"
    _check(args, device)
    folder = Path(args.output).absolute()
    _begin(folder, args)
    known, failed = _answered(folder)
    before = len(known)
    files, groups = _files(args, known), list(_groups(args, known))
    images = 0
    begun, ended = math.inf, 0.0
    for row in _run(args, device, str(folder), files, groups) if files or groups else ():
        if row["error"]:
            raise ModelError(row["error"])
        images += row["images"]
        failed += row["failed"]
        begun, ended = min(begun, row["begun"]), max(ended, row["ended"])
    earlier = f", {before:,} before" if before else ""
    told = [f"{images:,} image{'s' * (images != 1)} answered{earlier}"]
    told.append(f"{failed:,} {'has' if failed == 1 else 'have'} an error")
    if images:
        seconds = max(ended - begun, 1e-3)
        told.append(f"answering took {seconds:,.1f} s, {images / seconds:,.0f} images/s")
    print(*told, args.output, sep="; ")
    return 1 if failed else 0


def _run(
    args: argparse.Namespace, device: str, folder: str, files: Files, groups: Sequence[Group]
) -> Iterator[dict[str, Any]]:
    """Hands work to models on the cluster's devices; yields what ``_Worker`` returns of each."""
    import ray.data

    instances = _instances(args, device)
    needs = {"num_cpus": args.cores, "num_gpus": 1 / instances if device == "gpu" else 0}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(log_to_driver=False, logging_level="error")
    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
        workers = args.workers or _room(ray.cluster_resources(), needs)
        work: list[Files | Group] = [*_units(files, args.rows, workers), *groups]
        workers = min(workers, len(work))
        share = sum(map(len, work)) // workers
        settings = {
            **vars(args),
            "device": device,
            "instances": instances,
            "output": folder,
            "share": share,
        }
        rows = [{"unit": pickle.dumps(unit)} for unit in work]
        units = ray.data.from_items(rows, override_num_blocks=min(len(rows), 10_000))
        answered = units.map(
            _Worker,
            fn_constructor_args=(settings,),
            compute=ray.data.ActorPoolStrategy(
                min_size=1,
                max_size=workers,
                initial_size=workers,
                max_tasks_in_flight_per_actor=AHEAD + 1,  # one waits at the worker
                max_concurrent_calls_per_actor=AHEAD,
                enable_true_multi_threading=True,
            ),
            **needs,
        )
        yield from answered.iter_rows()
    finally:
        ray.shutdown()


def _check(args: argparse.Namespace, device: str) -> None:
    """Finds most mistakes before a cluster is at work.

    Raises:
        ModelError: If there is no such model, or it cannot be read.
        DeviceError: If a CPU does not take the dtype.
    """
    from max.driver import CPU

    from maxvision import weights
    from maxvision.runtime import artifact as package
    from maxvision.runtime import devices

    if package.is_here(args.model):
        package.read(args.model)
    else:
        weights.load(args.model, revision=args.revision)
        if device == "cpu":
            devices.find_dtype(args.dtype, CPU())


def _instances(args: argparse.Namespace, device: str) -> int:
    """Chooses how many models share a GPU: one process cannot keep up with a GPU's decoder."""
    from maxvision.runtime import nvjpeg

    asked: int | None = args.instances
    return asked or (2 if nvjpeg.possible(args.decode, device) else 1)


def _room(have: dict[str, float], needs: dict[str, float]) -> int:
    room = int(min(have.get(name[4:-1].upper(), 0) // n for name, n in needs.items() if n))
    if not room:
        raise ArgumentError(
            f"a model needs {needs['num_cpus']} cores and {needs['num_gpus']:g} GPUs of one node"
            f" but the cluster has {have.get('CPU', 0):g} cores and {have.get('GPU', 0):g} GPUs;"
            " change --cores or --device"
        )
    return room


# --- what is to be done -----------------------------------------------------------------------


def _begin(folder: Path, args: argparse.Namespace) -> None:
    """Makes the folder; notes what it holds, or compares with what it was begun with.

    Raises:
        ArgumentError: If it is of another run, or cannot be written.
    """
    names = ("model", "revision", "dtype", "tf32", "decode", "top_k", "logits", "column")
    asked = {name: getattr(args, name) for name in names}
    note = folder / "_run.json"  # readers of Parquet skip what begins with _ or a dot
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            if any(folder.iterdir()):
                raise ArgumentError(
                    f"--output {args.output}: the folder holds files that this command did not"
                    " write; choose another name"
                )
            draft = folder / "._run.json"
            draft.write_text(json.dumps(asked, indent=1) + "\n")
            draft.replace(note)
            return
        begun = json.loads(note.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--output {args.output}: the folder cannot be used"
            f" ({getattr(error, 'strerror', None) or error}); choose another place"
        ) from None
    for name, value in asked.items():
        if begun.get(name) != value:
            raise ArgumentError(
                f"--output {args.output}: was begun with {name} {begun.get(name)} but {name} is"
                f" {value}; go on with the same, or choose another name"
            )


def _answered(folder: Path) -> tuple[set[str], int]:
    """Reads which images have an answer, and how many of them an error."""
    from pyarrow import parquet

    names: set[str] = set()
    failed = 0
    for path in folder.glob("part-*.parquet"):
        table = parquet.read_table(path, columns=["image", "error"])
        names.update(table.column("image").to_pylist())
        failed += len(table) - table.column("error").null_count
    return names, failed


def _files(args: argparse.Namespace, done: set[str]) -> Files:
    """Lists what is not in ``done``, and adds it there: an image that is named twice is one."""
    from maxvision.runtime.collect import collect

    names: list[str] = []
    sources: list[Source | ImageError] = []
    for argument in args.images:
        if argument == "-":
            raise ArgumentError(
                "-: maxvision batch does not read standard input; name files and folders, or use"
                " maxvision classify -"
            )
        items = [] if _is_parquet(argument) else collect([argument])
        for item in items:
            if utf8(item.name) in done or (item.name == argument and _parquets(argument)):
                continue  # answered, or a folder that has Parquet files and no image
            done.add(utf8(item.name))
            names.append(item.name)
            known = isinstance(item.source, ImageError)
            sources.append(item.source if known else os.path.abspath(str(item.source)))
    return Files(names, sources)


def _units(files: Files, rows: int, workers: int) -> Iterator[Files]:
    """Shares files out to workers.

    A unit is as large as ``PARTS`` allows while there are ``UNITS`` for each worker, so that all
    end at about the same time. It is never less than one file of answers.

    Args:
        files: All of them.
        rows: Images of a file of answers.
        workers: How many there are.
    """
    size = rows * min(PARTS, max(1, len(files) // (rows * workers * UNITS)))
    for start in range(0, len(files), size):
        stop = start + size
        yield Files(files.names[start:stop], files.sources[start:stop])


def _groups(args: argparse.Namespace, done: set[str]) -> Iterator[Group]:
    import pyarrow as pa
    from pyarrow import parquet

    answered: dict[str, set[int]] = {}
    for each in done:
        file, _, row = each.rpartition("#")
        if file and row.isdecimal():
            answered.setdefault(file, set()).add(int(row))
    names = [name for each in args.images for name in _parquets(each)]
    for name in dict.fromkeys(names):
        try:
            shard = parquet.ParquetFile(name)
        except (OSError, pa.ArrowInvalid) as error:
            raise ArgumentError(
                f"{name}: the file cannot be read as Parquet ({error}); check it, or leave it out"
            ) from None
        if args.column not in shard.schema_arrow.names:
            raise ArgumentError(
                f"{name}: there is no column {args.column}; choose one of"
                f" {', '.join(shard.schema_arrow.names)} with --column"
            )
        first = 0
        for index in range(shard.num_row_groups):
            rows = range(first, first + shard.metadata.row_group(index).num_rows)
            known = answered.get(utf8(name), set()).intersection(rows)
            if len(known) < len(rows):
                whole = os.path.abspath(name)
                yield Group(name, whole, index, first, len(rows), frozenset(known))
            first = rows.stop


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet") and not os.path.isdir(path)


def _parquets(path: str) -> list[str]:
    if os.path.isdir(path):
        return sorted(str(each) for each in Path(path).rglob("*.parquet") if each.is_file())
    return [path] if _is_parquet(path) else []


# --- one model, in a process of its own -------------------------------------------------------


class _Worker:
    """Answers for images and writes the answers; several threads may call it.

    Args:
        settings: The command line, with absolute paths; and ``share``, about how many images a
            worker answers for.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import pyarrow.parquet  # noqa: F401  before MAX, see runtime/results.py

        from maxvision.runtime.classifier import load
        from maxvision.runtime.devices import share_gpu

        self._args = args = argparse.Namespace(**settings)
        self._cores: set[int] = set()
        if args.device == "cpu":
            claim(args.cores)
            self._cores = os.sched_getaffinity(0)
        else:
            share_gpu(args.instances)
        self._error = ""  # not raised: Ray would tell it in a hundred lines
        try:
            self._model = load(
                args.model,
                device=args.device,
                dtype=args.dtype,
                tf32=args.tf32,
                decode=args.decode,
                batch_size=args.batch_size,
                revision=args.revision,
            )
            self._pipeline = Pipeline(self._model, args.share, args.cores)
            if args.share >= MANY and args.device == "gpu":
                prepare(self._model, self._model.batch_size)
        except UserError as error:
            self._error = str(error)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answers for a unit of work.

        Returns:
            ``images`` and ``failed``, how many; ``begun`` and ``ended``, ``time.time()``;
            ``error``, why there is no model, or empty.
        """
        begun = time.time()
        images = failed = 0
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of Ray's thread, and of those that it starts
        if not self._error:
            for done in self._answers(pickle.loads(row["unit"])):
                self._write(done)
                images += len(done)
                failed += sum(each.error is not None for each in done)
        counts = {"images": images, "failed": failed, "error": self._error}
        return {**counts, "begun": begun, "ended": time.time()}

    def _answers(self, unit: Files | Group) -> Iterator[list[Answer]]:
        """Answers for a unit of work, a file of answers at a time."""
        items = _open(unit) if isinstance(unit, Files) else self._read(unit)
        with closing(self._pipeline.answers(items, self._args.top_k, Times())) as batches:
            done = map(_named, itertools.chain.from_iterable(batches))
            yield from batched(done, self._args.rows)

    def _read(self, group: Group) -> Iterator[Item]:
        from pyarrow import parquet

        column = self._args.column
        row = group.first
        with parquet.ParquetFile(group.path) as file:
            for batch in file.iter_batches(64, row_groups=[group.index], columns=[column]):
                for value in batch.column(0).to_pylist():
                    if row not in group.done:
                        yield _item(f"{group.name}#{row}", value)
                    row += 1

    def _write(self, done: Sequence[Answer]) -> None:
        """Writes a file that is there as a whole or not at all, the same if it is written again."""
        import pyarrow as pa
        from pyarrow import parquet

        args = self._args
        rows = [record(each, self._model.name, args.logits) for each in done]
        names = "\n".join(each["image"] for each in rows)
        path = Path(args.output, f"part-{hashlib.sha256(names.encode()).hexdigest()[:24]}.parquet")
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema(args.logits)), draft)
        draft.replace(path)


def _open(files: Files) -> Iterator[Item]:
    return map(Item, files.names, files.sources)


def _item(name: str, value: Any) -> Item:
    data = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(data, bytes):
        return Item(name, data)
    what = "empty" if data is None else f"of the type {type(data).__name__}"
    return Item(name, ImageError(f"{name}: the value is {what}; store an image file's bytes"))


def _named(answer: Answer) -> Answer:
    """Calls an image of bytes by its name in its error."""
    if answer.error is None or not answer.error.startswith("image: "):
        return answer
    return replace(answer, error=f"{answer.name}: {answer.error[7:]}")
