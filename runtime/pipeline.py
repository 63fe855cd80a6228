"""Classifies folders of any size: decoding on all cores, the model, and what follows overlap.

Decoding threads work ahead of the model by two batches, one thread keeps the model busy, and the
caller writes what has been answered. So the slowest of the three sets the pace, and only so many
images are in memory.

Where the GPU decodes, two batches of files are read at a time, and two threads keep the GPU busy:
it decodes one batch while the network runs the other. Pillow decodes what the GPU does not take, on
all cores.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from maxvision.common.errors import ImageError
from maxvision.common.host import cores
from maxvision.runtime import jpeg
from maxvision.runtime.preprocess import Source
from maxvision.runtime.reading import Reader

if TYPE_CHECKING:
    from maxvision.runtime import Classifier, Prediction
    from maxvision.runtime.jpeg import Jpeg, Picture

    Loaded: TypeAlias = tuple[Picture | ImageError, float]
    """A picture or its error, and the seconds that reading took."""
    Running: TypeAlias = Future[list[np.ndarray | ImageError]]
    """The logits of each picture of a batch, or its error."""

Find: TypeAlias = "Callable[[Sequence[Source | ImageError]], list[Jpeg | None]]"
"""Finds those among files that the GPU decodes."""

READERS = 2
"""Batches that are read at a time, where the GPU decodes; of many images, by processes."""
BATCHES = 2
"""That the GPU decodes or runs at a time."""

MANY = 2000
"""Images for which it pays to start processes, and to import what resizes by vectors."""

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
    many = len(items) >= MANY
    if many and model.decoder is None:
        model.resize_by_vectors()
    size = model.batch_size
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    runners = 1 if model.decoder is None else BATCHES
    ahead = 1 + runners + READERS

    def read(item: Item) -> Loaded:
        start = time.perf_counter()
        image: Picture | ImageError
        try:
            if isinstance(item.source, ImageError):
                raise item.source
            image = model.read(item.source)
        except ImageError as error:
            image = error
        return image, time.perf_counter() - start

    def fetch(part: Sequence[Item]) -> list[Loaded | Future[Loaded]]:
        start = time.perf_counter()
        with files.lent() as find:
            found = find([item.source for item in part])
        if many and None in found:
            model.resize_by_vectors()
        each = (time.perf_counter() - start) / len(part)
        return [
            decoders.submit(read, item) if image is None else (image, each)
            for item, image in zip(part, found, strict=True)
        ]

    def run(pictures: list[Picture], sources: list[Source]) -> list[np.ndarray | ImageError]:
        start = time.perf_counter()
        rows = model.run(pictures, sources)
        times.runs.append((len(pictures), time.perf_counter() - start))
        return rows

    decoders = ThreadPoolExecutor(workers, "decode", _step_back if model.device == "cpu" else None)
    readers = ThreadPoolExecutor(READERS, "read")
    runner = ThreadPoolExecutor(runners, "model")
    slots = ahead + runners + 3  # read ahead, in hand, in the model, being answered
    files = _Files(model, READERS, slots if many else 0)
    running: deque[tuple[Sequence[Item], list[Picture | ImageError], Running | None]] = deque()
    try:
        if model.decoder is None:
            images = _ahead(decoders, read, items, 2 * size + workers)
        else:
            images = map(_result, chain.from_iterable(_ahead(readers, fetch, parts, ahead)))
        for part in parts:
            loaded: list[Picture | ImageError] = []
            pictures: list[Picture] = []
            sources: list[Source] = []
            for item, (image, seconds) in zip(part, images, strict=False):
                loaded.append(image)
                times.preprocessing += seconds
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
                yield _finish(model, top_k, *running.popleft())
        while running:
            yield _finish(model, top_k, *running.popleft())
    finally:
        for pool in (readers, decoders, runner):
            pool.shutdown(wait=False, cancel_futures=True)
        files.close()


class _Files:
    """What finds JPEGs for the GPU, for several threads.

    Args:
        model: For which.
        count: How many batches at a time.
        slots: See ``Reader``; 0 starts no process.
    """

    def __init__(self, model: Classifier, count: int, slots: int) -> None:
        self._processes: list[Reader] = []
        if model.decoder is not None and slots:
            with suppress(OSError):  # no memory, or no more processes
                for _ in range(count):
                    self._processes.append(Reader(model.preprocess, model.batch_size, slots))
        self._model = model
        self._idle: SimpleQueue[Find] = SimpleQueue()
        finds: Sequence[Find] = self._processes or [self._find] * count
        for each in finds:
            self._idle.put(each)

    @contextmanager
    def lent(self) -> Iterator[Find]:
        """Lends one of them."""
        find = self._idle.get()
        try:
            yield find
        finally:
            self._idle.put(find)

    def _find(self, sources: Sequence[Source | ImageError]) -> list[Jpeg | None]:
        return jpeg.find_all(sources, self._model.preprocess)

    def close(self) -> None:
        """Ends the processes."""
        for each in self._processes:
            each.close()


def _result(loaded: Loaded | Future[Loaded]) -> Loaded:
    return loaded.result() if isinstance(loaded, Future) else loaded


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
    top_k: int,
    items: Sequence[Item],
    loaded: Sequence[Picture | ImageError],
    future: Running | None,
) -> list[Answer]:
    """Waits for the logits of a batch and makes an answer of each image."""
    rows = future.result() if future else []
    good = [row for row in rows if not isinstance(row, ImageError)]
    logits = np.stack(good) if good else np.empty((0, 1), np.float32)
    with np.errstate(invalid="ignore"):
        predictions = model.predictions(logits, top_k) if good else []
    named = zip(predictions, np.isfinite(logits).all(axis=1).tolist(), strict=True)
    given = iter(rows)
    done = []
    for item, image in zip(items, loaded, strict=True):
        row = image if isinstance(image, ImageError) else next(given)
        if isinstance(row, ImageError):
            done.append(Answer(item.name, str(row)))
            continue
        likeliest, finite = next(named)
        if finite:
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
