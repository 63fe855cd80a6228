"""What `run_graph.py` does with its parsed arguments: collects images, classifies, prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphs.errors import ArgumentError, ImageError
from graphs.preprocess import EXTENSIONS, Pixels, Source, load_batch, read_image

if TYPE_CHECKING:
    from graphs import Model, Prediction


@dataclass(frozen=True)
class Item:
    """One image to answer for: what the user called it, and where it is or why it is not."""

    name: str
    source: Source | ImageError


@dataclass(frozen=True)
class Answer:
    """What is known of an image in the end: its predictions and logits, or an error."""

    name: str
    error: str | None = None
    predictions: Sequence[Prediction] = ()
    logits: npt.NDArray[np.float32] | None = None


@dataclass
class Times:
    """Seconds spent: preprocessing, on how many images, and each run with its batch size."""

    preprocessing: float = 0.0
    images: int = 0
    runs: list[tuple[int, float]] = field(default_factory=list)


def classify(args: argparse.Namespace) -> int:
    """Answers for all of ``args.images`` and returns the exit code: 1 if some failed, else 0."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what matters of them is an ImageError
    from graphs import load

    if isinstance(sys.stdout, io.TextIOWrapper):  # no label may break a terminal that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    items = collect(args.images)
    source = args.model or _default_model()
    with working(f"loading {source}") as say:
        model = load(
            source,
            device=args.device,
            dtype=args.dtype,
            tf32=args.tf32,
            batch_size=args.batch_size,
            revision=args.revision,
            progress=say,
        )
    size = model.batch_size
    show: Callable[[Answer], None]
    if args.json:
        show = _json_lines(model.name, args.logits)
    else:
        show = _compact() if len(items) > 1 else _table()
    times, failed, pixels = Times(), 0, None
    for start, stop in pairwise([*range(0, len(items), size), len(items)]):
        done = f"classifying {stop:,} of {len(items):,}" if len(items) > 1 else "classifying"
        with working(done):
            pixels, answers = answer(model, items[start:stop], args.top_k, times)
        for each in answers:
            show(each)
            failed += each.error is not None
        sys.stdout.flush()
    if len(times.runs) == 1 and not args.json and pixels is not None:
        _run(model, pixels, times)  # for the time of a warm run
    _console(sys.stderr if args.json else sys.stdout).print(
        _summary(model, times), style="dim", soft_wrap=True
    )
    if failed and len(items) > 1:
        complain(f"{failed:,} of {len(items):,} images failed", kind="")
    return 1 if failed else 0


def answer(
    model: Model, items: Sequence[Item], top_k: int, times: Times
) -> tuple[Pixels | None, list[Answer]]:
    """Classifies one batch. An image that cannot be read does not hold up the others.

    Returns:
        The array that ran ``[N, H, W, 3]``, None if nothing could be read; and an answer an item.
    """
    start = time.perf_counter()
    readable = [item.source for item in items if not isinstance(item.source, ImageError)]
    loaded = iter(load_batch(readable, model.preprocess))
    read = [x if isinstance(x := item.source, ImageError) else next(loaded) for item in items]
    good = [each for each in read if not isinstance(each, ImageError)]
    pixels = np.stack(good) if good else None
    times.preprocessing += time.perf_counter() - start
    times.images += len(good)
    if pixels is None:
        return None, [Answer(item.name, str(each)) for item, each in zip(items, read, strict=True)]

    logits = _run(model, pixels, times)
    with np.errstate(invalid="ignore"):  # logits that are not finite become an error below
        rows = iter(zip(logits, model.predictions(logits, top_k), strict=True))
    answers = []
    for item, each in zip(items, read, strict=True):
        if isinstance(each, ImageError):
            answers.append(Answer(item.name, str(each)))
            continue
        row, predictions = next(rows)
        if np.isfinite(row).all():
            answers.append(Answer(item.name, None, predictions, row))
        else:
            answers.append(
                Answer(
                    item.name,
                    f"{item.name}: finite logits were expected but {model.name} gave NaN or"
                    f" infinity in {model.dtype}; try --dtype float32 or check the weights",
                )
            )
    return pixels, answers


def _run(model: Model, pixels: Pixels, times: Times) -> npt.NDArray[np.float32]:
    start = time.perf_counter()
    logits: npt.NDArray[np.float32] = model(pixels)
    times.runs.append((len(pixels), time.perf_counter() - start))
    return logits


def collect(arguments: Sequence[str]) -> list[Item]:
    """Lists the images that the arguments name: files, folders (in name order), ``-`` for stdin."""
    items: list[Item] = []
    for argument in arguments:
        if argument == "-":
            items.append(Item("-", _stdin()))
        elif os.path.isdir(argument):
            items.extend(_folder(argument))
        else:
            items.append(Item(argument, argument))
    return items


def _stdin() -> Source | ImageError:
    try:
        if sys.stdin is None or sys.stdin.isatty():
            raise ImageError(
                "-: an image on standard input was expected but nothing is piped in; pipe one in"
            )
        return read_image(sys.stdin.buffer.read(), name="-")
    except ImageError as error:
        return error


def _folder(folder: str) -> list[Item]:
    found: list[tuple[list[str], Item]] = []

    def refuse(error: OSError) -> None:
        path = error.filename or folder
        problem = f"{path}: a folder was expected but it cannot be read ({error.strerror});"
        found.append(_sorted(path, ImageError(f"{problem} check its permissions")))

    for path, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith("."):
                image = os.path.join(path, name)
                found.append(_sorted(image, image))
    if not found:
        problem = f"{folder}: a folder with images was expected but none is in it;"
        found.append(_sorted(folder, ImageError(f"{problem} check the path")))
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def _sorted(path: str, source: Source | ImageError) -> tuple[list[str], Item]:
    return path.split(os.sep), Item(path, source)


def _default_model() -> str:
    from weights import bundled

    names = bundled()
    if not names:
        raise ArgumentError("--model: a bundled model was expected but none is here; name one")
    return next((name for name in names if "resnet" in name), names[0])


# --- printing ---------------------------------------------------------------------------------


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # and not rich's SystemExit(1)


def _console(stream: Any) -> Console:
    # Not a terminal: nothing wraps or is cut short, whoever reads it wants the lines whole.
    width = None if stream.isatty() else 10_000
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def _utf8(text: str) -> str:
    r"""Writes the bytes of a file name that are no UTF-8 (in Python, lone surrogates) as \udc.."""
    return text.encode("utf-8", "backslashreplace").decode()


def _clean(text: str) -> str:
    r"""Writes control characters as \x.. too: a terminal would obey them."""
    text = _utf8(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(message: str, kind: str = "error: ") -> None:
    """Writes one line to standard error."""
    text = Text(kind, style="bold red").append(_clean(message), style="default not bold")
    _console(sys.stderr).print(text, soft_wrap=True)


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, and that it is, while standard error is a terminal.

    Yields:
        A function that changes the message.
    """
    if not sys.stderr.isatty():  # rich alone would also obey FORCE_COLOR
        yield lambda _: None
        return
    with _console(sys.stderr).status(Text(_clean(message))) as status:
        yield lambda text: status.update(Text(_clean(text)))


def _json_lines(model: str, logits: bool) -> Callable[[Answer], None]:
    def show(each: Answer) -> None:
        line: dict[str, Any] = {"image": _utf8(each.name)}
        if each.error is not None:
            line["error"] = _utf8(each.error)
        else:
            line["model"] = _utf8(model)
            line["predictions"] = [
                {"label": _utf8(p.label), "class_id": p.class_id, "score": _score(p.score)}
                for p in each.predictions
            ]
            if logits and each.logits is not None:
                # A float32 as its shortest decimal: 0.1, not the 0.10000000149011612 of a float64.
                line["logits"] = [float(str(x)) for x in each.logits]
        sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")

    return show


def _score(score: float) -> float:
    return float(f"{score:.6g}")


def _table() -> Callable[[Answer], None]:
    console = _console(sys.stdout)

    def show(each: Answer) -> None:
        if each.error is not None:
            return complain(each.error)
        console.print(Text(_clean(each.name), style="bold"), soft_wrap=True)
        table = Table()
        table.add_column("rank", justify="right")
        table.add_column("label", overflow="fold")
        table.add_column("score", justify="right")
        for rank, prediction in enumerate(each.predictions, 1):
            style = "bold" if rank == 1 else ""
            score = f"{prediction.score:.4f}"
            table.add_row(str(rank), Text(_clean(prediction.label)), score, style=style)
        console.print(table)

    return show


def _compact() -> Callable[[Answer], None]:
    console = _console(sys.stdout)

    def show(each: Answer) -> None:
        if each.error is not None:
            return complain(each.error)
        line = Text(_clean(each.name) + "  ")
        for rank, prediction in enumerate(each.predictions):
            line.append(" | " if rank else "", style="dim")
            line.append(_clean(prediction.label), style="" if rank else "bold")
            line.append(f" {prediction.score:.4f}", style="cyan")
        console.print(line, soft_wrap=True)

    return show


def _summary(model: Model, times: Times) -> str:
    precision = "float32 by TF32" if model.tf32 else model.dtype
    parts = [f"{_clean(model.name)} on {model.device}, {precision}"]
    if times.runs:
        first, seconds = times.runs[0]
        parts.append(f"preprocessing {_ms(times.preprocessing / times.images)} an image")
        of = f" of {first} images" if first > 1 else ""
        parts.append(f"first run{of} {_ms(seconds)}")
        warm = [run for images, run in times.runs[1:] if images == first]
        if warm:
            parts.append(f"warm run {_ms(statistics.median(warm))}")
    return "; ".join(parts)


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    digits = max(0, 2 - int(math.log10(max(ms, 1e-2)) // 1))
    return f"{ms:,.{digits}f} ms"


def list_models(args: argparse.Namespace) -> int:
    """Prints the bundled models and the hub's that are known to work. Returns 0."""
    from weights.catalog import BUNDLED, HUB

    rows = [*BUNDLED, *HUB]
    if args.json:
        for row in rows:
            sys.stdout.write(json.dumps({**asdict(row), "bundled": row in BUNDLED}) + "\n")
        sys.stdout.flush()
        return 0
    table = Table(
        caption="top-1: of ImageNet as published (ResNet: He et al. 2015, 10 crops; CvT: its"
        " authors); of CIFAR-10, as measured, if bundled"
    )
    for name in "family", "--model", "parameters", "FLOPs", "top-1":
        table.add_column(name, justify="left" if name in ("family", "--model") else "right")
    for row in rows:
        accuracy = "" if row.top1 is None else f"{row.top1:.1%}"
        table.add_row(row.family, row.name, _si(row.parameters), _si(row.flops), accuracy)
    _console(sys.stdout).print(table)
    return 0


def _si(number: float) -> str:
    """Writes a count with three digits: 25.6 M, 4.09 G."""
    for power, unit in (9, " G"), (6, " M"), (3, " k"):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{unit}"
    return f"{number:.3g}"
