"""Files of answers: CSV, JSON Lines, Parquet; written batch by batch, gone on with after a stop.

JSON Lines holds an object an image, the same as ``--json`` prints, and Parquet the same fields as
columns. CSV holds a row an image: its name, the model, the error, and label, class and score of
each rank.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError
from maxvision.common.folder import no_place
from maxvision.common.text import utf8
from maxvision.runtime.pipeline import Answer

FORMATS = (".csv", ".jsonl", ".parquet")


class Writer(Protocol):
    """A file of answers.

    Attributes:
        done: Names of the images that the file had before.
    """

    done: set[str]

    def write(self, answers: Sequence[Answer]) -> None:
        """Adds a batch, which a stop of the program then leaves in the file."""

    def close(self) -> None:
        """Completes the file."""


def open_results(path: str, model: str, top_k: int, logits: bool, resume: bool) -> Writer:
    """Opens a file by its ending: ``.csv``, ``.jsonl`` or ``.parquet``.

    Args:
        path: Where to.
        model: Its name stands beside every answer.
        top_k: How many classes an image gets.
        logits: Add the model's raw output; not for CSV.
        resume: Go on with the file if it is there.

    Raises:
        ArgumentError: If it cannot be written, or holds the answers of another run.
    """
    kinds: dict[str, Callable[..., Writer]] = {
        ".csv": _Csv,
        ".jsonl": _JsonLines,
        ".parquet": _Parquet,
    }
    try:
        return kinds[Path(path).suffix.lower()](Path(path), model, top_k, logits, resume)
    except OSError as error:
        raise ArgumentError(
            f"--output {path}: the file cannot be opened ({error.strerror}); choose another place"
        ) from None


def check(path: str, resume: bool) -> None:
    """Makes sure that ``path`` may be written, before a model is loaded.

    Raises:
        ArgumentError: If it may not, or what writes it is not installed.
    """
    if Path(path).suffix.lower() == ".parquet":
        _pyarrow()
    if why := no_place(path):
        raise ArgumentError(f"--output {path}: {why}; choose another place")
    if os.path.exists(path) and os.path.getsize(path) and not resume:
        raise ArgumentError(
            f"--output {path}: the file exists already; continue it with --resume, or choose"
            " another name"
        )


def record(answer: Answer, model: str, logits: bool) -> dict[str, Any]:
    """Describes an answer in JSON's terms: what a line of ``--json`` holds."""
    line: dict[str, Any] = {"image": utf8(answer.name)}
    if answer.error is not None:
        line["error"] = utf8(answer.error)
        return line
    line["model"] = utf8(model)
    line["predictions"] = [
        {"label": utf8(p.label), "class_id": p.class_id, "score": _short(p.score)}
        for p in answer.predictions
    ]
    if logits and answer.logits is not None:
        # A float32 as its shortest decimal: 0.1, not the 0.10000000149011612 of a float64.
        line["logits"] = [float(str(x)) for x in answer.logits]
    return line


def json_line(answer: Answer, model: str, logits: bool) -> str:
    """Writes ``record`` as a line."""
    return json.dumps(record(answer, model, logits), allow_nan=False) + "\n"


def schema(logits: bool) -> Any:
    """Describes ``record`` in Parquet's terms: a ``pyarrow.Schema``."""
    pa = _pyarrow()
    prediction = {"label": pa.string(), "class_id": pa.int32(), "score": pa.float64()}
    columns = {
        "image": pa.string(),
        "model": pa.string(),
        "error": pa.string(),
        "predictions": pa.list_(pa.struct(prediction)),
    }
    return pa.schema(columns | ({"logits": pa.list_(pa.float32())} if logits else {}))


def _short(score: float) -> float:
    return float(f"{score:.6g}")


class _Lines:
    """A text file of whole records; what a killed program left of its last one is dropped."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.done: set[str] = set()
        self._file = path.open("a" if resume else "w", encoding="utf-8", newline="")
        self._path, self._resume = path, resume

    def _lines(self) -> list[str]:
        """Returns the whole lines that are there."""
        content = self._path.read_bytes() if self._resume else b""
        try:
            text = content[: content.rfind(b"\n") + 1].decode()
        except UnicodeDecodeError:
            raise self._other("something else") from None
        return list(io.StringIO(text, newline=""))

    def _keep(self, lines: Sequence[str]) -> None:
        """Drops what follows these lines."""
        if not self._resume:
            return
        self._file.truncate(sum(len(line.encode()) for line in lines))
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """See ``Writer``."""
        self._file.close()

    def _other(self, what: str) -> ArgumentError:
        self._file.close()
        return ArgumentError(
            f"--output {self._path}: this run cannot continue the file, because it holds {what};"
            " choose another name"
        )


class _JsonLines(_Lines):
    def __init__(self, path: Path, model: str, top_k: int, logits: bool, resume: bool) -> None:
        super().__init__(path, resume)
        self._model, self._logits = model, logits
        lines = self._lines()
        for line in lines:
            try:
                found = json.loads(line)
                self.done.add(found["image"])
                other = found.get("model", utf8(model))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise self._other("something else") from None
            if other != utf8(model):
                raise self._other(f"those of {other}")
        self._keep(lines)

    def write(self, answers: Sequence[Answer]) -> None:
        """See ``Writer``."""
        self._file.writelines(json_line(each, self._model, self._logits) for each in answers)
        self._file.flush()


class _Csv(_Lines):
    def __init__(self, path: Path, model: str, top_k: int, logits: bool, resume: bool) -> None:
        super().__init__(path, resume)
        self._model, self._top_k = utf8(model), top_k
        ranks = (f"{name}_{i}" for i in range(1, top_k + 1) for name in ("label", "class", "score"))
        header = ["image", "model", "error", *ranks]
        lines = self._lines()
        reader = csv.reader(lines)
        rows, ends = [], [0]
        for row in reader:
            rows.append(row)
            ends.append(reader.line_num)
        if rows and len(rows[-1]) < len(header):  # cut off in a name of two lines
            rows.pop()
            ends.pop()
        if lines and (rows[:1] != [header] or any(len(row) != len(header) for row in rows)):
            raise self._other(f"other columns ({lines[0].strip()[:80]})")
        for row in rows[1:]:
            if row[1] not in ("", self._model):
                raise self._other(f"those of {row[1]}")
            self.done.add(row[0])
        self._keep(lines[: ends[-1]])
        self._rows = csv.writer(self._file, lineterminator="\n")
        if not rows:
            self._rows.writerow(header)

    def write(self, answers: Sequence[Answer]) -> None:
        """See ``Writer``."""
        for each in answers:
            found = record(each, self._model, logits=False)
            best = [value for p in found.get("predictions", ()) for value in p.values()]
            row = [found["image"], found.get("model", ""), found.get("error", ""), *best]
            self._rows.writerow(row + [""] * (3 + 3 * self._top_k - len(row)))
        self._file.flush()


class _Parquet:
    """Parquet is complete only when it is closed: it is written beside, and then put in place."""

    def __init__(self, path: Path, model: str, top_k: int, logits: bool, resume: bool) -> None:
        pa = _pyarrow()
        from pyarrow import parquet

        self.done: set[str] = set()
        self._model, self._logits = model, logits
        self._path, self._draft = path, path.with_name(f".{path.name}.part")
        self._schema = schema(logits)
        self._group: list[dict[str, Any]] = []
        old = None
        if resume and path.exists() and path.stat().st_size:
            try:
                old = parquet.ParquetFile(path)
            except pa.ArrowInvalid:
                raise self._other("something else") from None
            if old.schema_arrow != self._schema:
                raise self._other("other columns")
        self._writer = parquet.ParquetWriter(self._draft, self._schema)
        if old is not None:
            for batch in old.iter_batches():
                models = set(batch.column("model").to_pylist()) - {None, utf8(model)}
                if models:
                    self._abandon()
                    raise self._other(f"those of {models.pop()}")
                self.done.update(batch.column("image").to_pylist())
                self._writer.write_batch(batch)

    def write(self, answers: Sequence[Answer]) -> None:
        """See ``Writer``; a row group is 10,000 rows or more."""
        self._group += (record(each, self._model, self._logits) for each in answers)
        if len(self._group) >= 10_000:
            self._flush()

    def close(self) -> None:
        """See ``Writer``."""
        self._flush()
        self._writer.close()
        self._draft.replace(self._path)

    def _flush(self) -> None:
        if self._group:
            table = _pyarrow().Table.from_pylist(self._group, schema=self._schema)
            self._writer.write_table(table)
            self._group.clear()

    def _abandon(self) -> None:
        self._writer.close()
        with suppress(OSError):
            self._draft.unlink()

    def _other(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"--output {self._path}: this run cannot continue the file, because it holds {what};"
            " choose another name"
        )


def _pyarrow() -> Any:
    """Imports pyarrow. Once MAX has opened a session it is too late: Parquet's reader crashes."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ArgumentError(
            "--output: Parquet files need the package pyarrow, which is not installed;"
            f" {way_to('parquet')}, or choose .csv or .jsonl"
        ) from None
    return pyarrow
