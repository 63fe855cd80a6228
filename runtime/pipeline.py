"""Classifies ever so many images: decoding on all cores, the model, and what follows overlap.

Decoding threads work ahead of the model by two batches, one thread keeps the model busy, and the
caller writes what has been answered. So the slowest of the three sets the pace, and only so many
images are in memory.

Where the GPU decodes, these threads read files, several at a time, and two threads keep it busy: it
decodes one batch while the network runs the other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from maxvision.common.errors import ImageError
from maxvision.common.host import cores
from maxvision.runtime.preprocess import Source

if TYPE_CHECKING:
    from maxvision.runtime import Classifier, Prediction
    from maxvision.runtime.jpeg import Picture

    Ran: TypeAlias = tuple[list[np.ndarray | ImageError], list[list[Prediction] | None]]
    """The logits of each picture or its error; and of those without one the likeliest classes,
    None where logits are not finite."""

FILES = 16
"""That a thread reads at a time, where the GPU decodes: handing each over would cost as much."""
READERS = 2
"""Threads that read there. More of them wait for the interpreter, which each read gives away."""
BATCHES = 2
"""That are under way there."""

MANY = 2000
"""Images for which it pays to import what resizes by vectors."""

_T = TypeVar("_T")
_R = TypeVar("_R")


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
    """Seconds spent.

    Attributes:
        preprocessing: Of all images together, on however many threads.
        images: Those that were read.
        runs: The model's, each with its batch size.
        last: What ran last, and what it was read from, as ``Classifier.run`` takes it.
        all: Of all answers, from the first image to the last.
        first: ``time.perf_counter()`` at the first answer.
    """

    preprocessing: float = 0.0
    images: int = 0
    runs: list[tuple[int, float]] = field(default_factory=list)
    last: tuple[list[Picture], list[Source]] | None = None
    all: float = 0.0
    first: float = 0.0


def answers(
    model: Classifier, items: Sequence[Item], top_k: int, times: Times, workers: int | None = None
) -> Generator[list[Answer], None, None]:
    """Answers for ``items``, in order, a batch at a time.

    An image that cannot be read is answered with its error and does not hold up the others.

    Args:
        model: What runs them.
        items: The images.
        top_k: Classes to name.
        times: Adds up what was measured.
        workers: Threads that decode; one a core if None.
    """
    workers = min(workers or cores(), len(items) or 1)
    if model.decoder is not None:
        workers = min(workers, READERS)
    if len(items) >= MANY:
        model.resize_by_vectors()
    size = model.batch_size
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    together, runners = (1, 1) if model.decoder is None else (FILES, BATCHES)

    def read(some: Sequence[Item]) -> tuple[list[Picture | ImageError], float]:
        start = time.perf_counter()
        found: list[Picture | ImageError] = []
        for item in some:
            try:
                if isinstance(item.source, ImageError):
                    raise item.source
                found.append(model.read(item.source))
            except ImageError as error:
                found.append(error)
        return found, time.perf_counter() - start

    def run(pictures: list[Picture], sources: list[Source]) -> Ran:
        start = time.perf_counter()
        rows = model.run(pictures, sources)
        times.runs.append((len(pictures), time.perf_counter() - start))
        good = [row for row in rows if not isinstance(row, ImageError)]
        if not good:
            return rows, []
        logits = np.stack(good)
        with np.errstate(invalid="ignore"):
            predictions = model.predictions(logits, top_k)
        finite = np.isfinite(logits).all(axis=1).tolist()
        return rows, [best if ok else None for best, ok in zip(predictions, finite, strict=True)]

    readers = ThreadPoolExecutor(workers, "decode", _step_back if model.device == "cpu" else None)
    runner = ThreadPoolExecutor(runners, "model")
    running: deque[tuple[Sequence[Item], list[Picture | ImageError], Future[Ran] | None]] = deque()
    try:
        pieces = [part[i : i + together] for part in parts for i in range(0, len(part), together)]
        images = _ahead(readers, read, pieces, (1 + runners) * size // together + workers)
        for part in parts:
            loaded: list[Picture | ImageError] = []
            while len(loaded) < len(part):
                found, seconds = next(images)
                loaded += found
                times.preprocessing += seconds
            pictures: list[Picture] = []
            sources: list[Source] = []
            for item, image in zip(part, loaded, strict=True):
                if not isinstance(image, ImageError) and not isinstance(item.source, ImageError):
                    pictures.append(image)
                    sources.append(item.source)
            future = None
            if pictures:
                times.images += len(pictures)
                times.last = pictures, sources
                future = runner.submit(run, pictures, sources)
            running.append((part, loaded, future))
            if len(running) > 1 + runners:
                yield _finish(model, *running.popleft())
        while running:
            yield _finish(model, *running.popleft())
    finally:
        for pool in (readers, runner):
            pool.shutdown(wait=False, cancel_futures=True)


def _step_back() -> None:
    """Lets the model's threads go first: each waits for the slowest, so one that is held up costs.

    It is Linux that gives every thread a priority of its own.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _ahead(
    pool: ThreadPoolExecutor, function: Callable[[_T], _R], items: Sequence[_T], limit: int
) -> Iterator[_R]:
    """Maps like ``pool.map``, but has at most ``limit`` results begun and not taken."""
    begun: deque[Future[_R]] = deque()
    for item in items:
        begun.append(pool.submit(function, item))
        if len(begun) == limit:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _finish(
    model: Classifier,
    items: Sequence[Item],
    loaded: Sequence[Picture | ImageError],
    future: Future[Ran] | None,
) -> list[Answer]:
    """Waits for the logits of a batch and makes an answer of each image."""
    rows, predictions = future.result() if future else ([], [])
    logits, best = iter(rows), iter(predictions)
    done = []
    for item, image in zip(items, loaded, strict=True):
        row = image if isinstance(image, ImageError) else next(logits)
        if isinstance(row, ImageError):
            done.append(Answer(item.name, str(row)))
            continue
        likeliest = next(best)
        if likeliest is not None:
            done.append(Answer(item.name, None, likeliest, row))
        else:
            done.append(
                Answer(
                    item.name,
                    f"{item.name}: {model.name} gave NaN or infinity in {model.dtype}; try"
                    " --dtype float32, or check the weights",
                )
            )
    return done
