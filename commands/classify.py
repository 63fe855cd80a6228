"""What `run_graph.py` does with its parsed arguments: collects images, classifies, prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.console import complain, console, progress_bar, working
from maxvision.common.errors import ArgumentError, ImageError
from maxvision.common.text import clean, utf8
from maxvision.runtime import results
from maxvision.runtime.collect import collect
from maxvision.runtime.pipeline import MANY, Answer, Item, Pipeline, Times, start_readers
from maxvision.runtime.results import json_line, open_results

if TYPE_CHECKING:
    from maxvision.runtime import Classifier
    from maxvision.runtime.reading import Reader


def classify(args: argparse.Namespace, started: float) -> int:
    """Answers for all of ``args.images`` and returns the exit code: 1 if some failed, else 0.

    Args:
        args: The command line.
        started: ``time.perf_counter()`` when the program began.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what matters of them is an ImageError
    from maxvision.runtime import load

    start_up = {"imports": time.perf_counter() - started}
    if isinstance(sys.stdout, io.TextIOWrapper):  # no label may break a terminal that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    if args.output:
        results.check(args.output, args.resume)
    source = DEFAULT_MODEL if args.model is None else args.model
    items = collect(args.images)
    if missing := _missing(items):
        for each in missing:
            if args.json:
                print(end=json_line(each, source, args.logits))
            else:
                complain(str(each.error))
        return 1
    readers = _readers(args, len(items))
    with working(f"loading {source}") as say:
        model = load(
            source,
            device=args.device,
            dtype=args.dtype,
            tf32=args.tf32,
            decode=args.decode,
            sparse=args.sparse,
            batch_size=args.batch_size,
            revision=args.revision,
            labels=args.labels,
            passes=args.passes,
            progress=say,
        )
    times = Times()
    writer = None
    if args.output:
        writer = open_results(args.output, model.name, args.top_k, args.logits, args.resume)
        items = [item for item in items if utf8(item.name) not in writer.done]
        if not items:
            complain(f"nothing is left to do: {args.output} holds every answer", kind="")
    quiet = args.json or args.output
    show = _shower(args, model.name, len(items))
    tally = Tally(len(items), len(writer.done) if writer else 0)
    scrolls = not args.output and sys.stdout.isatty()
    start = time.perf_counter()
    try:
        with (
            _counting(tally, not scrolls) as count,
            Pipeline(model, len(items), readers=readers) as pipeline,
        ):
            for batch in pipeline.answers(items, args.top_k, times):
                if writer:
                    _saved(args.output, partial(writer.write, batch))
                times.first = times.first or time.perf_counter()
                tally.add(batch)
                for each in batch:
                    show(each)
                sys.stdout.flush()
                count()
            times.all = time.perf_counter() - start
        if writer:
            _saved(args.output, writer.close)
    except BaseException as error:
        if writer:
            with contextlib.suppress(OSError):
                writer.close()
        if isinstance(error, KeyboardInterrupt) and len(items) > 1:
            complain(tally.interrupted(args.output), kind="")
        raise
    if len(times.runs) == 1 and not quiet and times.last is not None:
        begun = time.perf_counter()
        model.run(*times.last)  # for the time of a warm run
        times.runs.append((len(times.last[0]), time.perf_counter() - begun))
    summary = [_summary(model, times, tally)]
    if args.timing and times.runs:
        parts = start_up | model.seconds | {"first run": times.runs[0][1]}
        listed = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
        summary.append(f"first answer after {times.first - started:.2f} s: {listed}")
    for line in summary:
        console(sys.stderr if quiet else sys.stdout).print(line, style="dim", soft_wrap=True)
    if tally.failed and tally.total > 1:
        where = f"; {args.output} says why" if writer else ""
        complain(f"{tally.failed:,} of {tally.total:,} images failed{where}", kind="")
    return 1 if tally.failed else 0


def _readers(args: argparse.Namespace, images: int) -> list[Reader]:
    """Starts processes that read while the model is loaded, if a GPU may decode for it."""
    if images < MANY:
        return []
    from max.driver import accelerator_count

    from maxvision.runtime import nvjpeg

    wanted = nvjpeg.possible(args.decode, args.device) and accelerator_count()
    return start_readers() if wanted else []


def _saved(output: str, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise ArgumentError(
            f"--output {output}: writing failed ({error.strerror or error}); free some space, then"
            " continue with --resume"
        ) from None


@dataclass
class Tally:
    """Counts the answers.

    Attributes:
        total: Images to answer for.
        before: Those that an earlier run answered for.
        done: Answers so far.
        failed: Those of them that are errors.
        last: The name of the last one.
    """

    total: int
    before: int = 0
    done: int = 0
    failed: int = 0
    last: str = ""

    def add(self, batch: Sequence[Answer]) -> None:
        """Counts a batch."""
        self.done += len(batch)
        self.failed += sum(each.error is not None for each in batch)
        self.last = batch[-1].name if batch else self.last

    def interrupted(self, output: str | None) -> str:
        """Says where a stopped run stands."""
        text = f"interrupted after {self.done + self.before:,} of {self.total + self.before:,}"
        if self.last:
            text += f" images, the last one {self.last}"
        return text + (f"; --resume goes on with {output}" if output else "")


def _missing(items: Sequence[Item]) -> list[Answer]:
    """Answers for the images if there is none to run a model for; nothing if there is one."""
    if any(not isinstance(item.source, ImageError) for item in items):
        return []
    return [Answer(item.name, str(item.source)) for item in items]


# --- printing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _counting(tally: Tally, shown: bool) -> Iterator[Callable[[], None]]:
    """Shows how far ``tally`` is, how fast, and how long yet, if ``shown`` on a terminal.

    Yields:
        A function to call after a batch.
    """
    if not (shown and sys.stderr.isatty() and tally.total > 1):
        yield lambda: None
        return
    text = TextColumn("{task.description}", markup=False)
    with progress_bar(text, BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("classifying", total=tally.total)
        start = time.perf_counter()

        def count() -> None:
            rate = tally.done / max(time.perf_counter() - start, 1e-3)
            failed = f", {tally.failed:,} failed" if tally.failed else ""
            said = f"classifying {tally.done:,} of {tally.total:,}, {rate:,.0f} images/s{failed}"
            first_or_last = not progress.tasks[task].completed or tally.done == tally.total
            progress.update(task, completed=tally.done, description=said, refresh=first_or_last)

        yield count


def _shower(args: argparse.Namespace, model: str, count: int) -> Callable[[Answer], None]:
    if args.output:
        return lambda _: None
    if args.json:
        return lambda each: print(end=json_line(each, model, args.logits))
    return _compact() if count > 1 else _table()


def _table() -> Callable[[Answer], None]:
    out = console(sys.stdout)

    def show(each: Answer) -> None:
        if each.error is not None:
            return complain(each.error)
        out.print(Text(clean(each.name), style="bold"), soft_wrap=True)
        table = Table()
        table.add_column("rank", justify="right")
        table.add_column("label", overflow="fold")
        table.add_column("score", justify="right")
        for rank, prediction in enumerate(each.predictions, 1):
            style = "bold" if rank == 1 else ""
            score = f"{prediction.score:.4f}"
            table.add_row(str(rank), Text(clean(prediction.label)), score, style=style)
        out.print(table)

    return show


def _compact() -> Callable[[Answer], None]:
    """Shows an answer as a line. Rich takes 0.1 ms for one, so it makes each style once."""
    out = console(sys.stdout)
    name = cache(clean)  # of the classes

    def marked(text: str, style: str) -> str:
        with out.capture() as made:
            out.print(Text(text, style=style), end="", soft_wrap=True)
        return made.get()

    bold, cyan, bar = marked("{}", "bold"), marked(" {:.4f}", "cyan"), marked(" | ", "dim")

    def show(each: Answer) -> None:
        if each.error is not None:
            return complain(each.error)
        classes = [
            ("{}" if rank else bold).format(name(known.label)) + cyan.format(known.score)
            for rank, known in enumerate(each.predictions)
        ]
        sys.stdout.write(f"{clean(each.name)}  {bar.join(classes)}\n")

    return show


def _summary(model: Classifier, times: Times, tally: Tally) -> str:
    precision = "float32 by TF32" if model.tf32 else model.dtype
    parts = [f"{clean(model.name)} on {model.device}, {precision}"]
    if model.sparse.told:
        parts.append(model.sparse.told)
    if tally.done > model.batch_size:
        rate = tally.done / max(times.all, 1e-6)
        parts.append(f"{tally.done:,} images in {times.all:,.1f} s, {rate:,.0f} images/s")
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
