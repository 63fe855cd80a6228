"""Classifies folders of any size: decoding on all cores, the model, and what follows overlap.

Decoding threads work ahead of the model by two batches, one thread keeps the model busy, and the
caller writes what has been answered. So the slowest of the three sets the pace, and only so many
images are in memory.

Where the GPU decodes, two batches of files are read at a time, and two threads keep the GPU busy:
it decodes one batch while the network runs the other. Pillow decodes what the GPU does not take, on
all cores.

    with Pipeline(model, len(items)) as pipeline:
        for batch in pipeline.answers(items, 5, Times()):
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
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

    Loaded: TypeAlias = tuple["Item", Picture | ImageError, float]
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


class Pipeline:
    """Answers for images with a model, by threads and processes that last until ``close``.

    Several threads may call ``answers``; a call reads its first images as soon as the one before
    has handed its last ones to the model, so that the model has no pause.

    Args:
        model: What runs the images.
        images: About how many there will be, in all calls. If ``MANY``, it pays to start processes
            that read for a GPU, and to import what resizes by vectors.
        workers: Threads that decode; one a core if None.
        readers: What ``start_readers`` gave before the model was loaded; without it processes that
            are needed start now, and do not read for the first 0.4 s.
    """

    def __init__(
        self,
        model: Classifier,
        images: int,
        workers: int | None = None,
        readers: Sequence[Reader] = (),
    ) -> None:
        self._model = model
        self._many = images >= MANY
        self._workers = workers or cores()
        self._runners = 1 if model.decoder is None else BATCHES
        self._ahead = 1 + self._runners + READERS
        if self._many and model.decoder is None:
            model.resize_by_vectors()
        behind = _step_back if model.device == "cpu" else None
        self._decoders = ThreadPoolExecutor(self._workers, "decode", behind)
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._runner = ThreadPoolExecutor(self._runners, "model")
        slots = self._ahead + 1 + self._runners  # read ahead, in hand, in the model or next
        if self._many and model.decoder is not None:
            readers = readers or start_readers()
        else:
            for each in readers:
                each.close()
            readers = ()
        self._files = _Files(model, readers, 2 * slots)  # of two calls
        if self._many:
            gc.collect()  # what loading left behind must not stay
            gc.freeze()  # or passes over MAX's modules, of 0.1 s, would hold up batches
        self._turn = threading.Lock()
        self._left: list[Running] = []  # by the call before

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends threads and processes; what has not begun is left out."""
        for pool in (self._readers, self._decoders, self._runner):
            pool.shutdown(wait=False, cancel_futures=True)
        self._files.close()

    def answers(
        self, items: Iterable[Item], top_k: int, times: Times
    ) -> Generator[list[Answer], None, None]:
        """Answers for ``items``, in order, a batch at a time.

        An image that cannot be read is answered with its error and does not hold up the others.
        Close what is not exhausted: another call waits for it.

        Args:
            items: The images; few are taken ahead of their answers.
            top_k: Classes to name.
            times: Adds up what was measured.
        """
        model = self._model
        running: deque[tuple[list[Loaded], Running | None]] = deque()
        with self._turn:
            try:
                for part in batched(self._load(items), model.batch_size):
                    running.append((part, self._start(part, times)))
                    if len(running) > 1 + self._runners:
                        wait(self._left)  # what they read stays in memory for one more call
                        yield _finish(model, top_k, *running.popleft())
            finally:
                wait(self._left)
                self._left = [future for _, future in running if future]
        while running:
            yield _finish(model, top_k, *running.popleft())

    def _load(self, items: Iterable[Item]) -> Iterator[Loaded]:
        """Reads images, ahead of those that are taken."""
        size = self._model.batch_size
        if self._model.decoder is None:
            return _ahead(self._decoders, self._read, items, 2 * size + self._workers)
        fetched = _ahead(self._readers, self._fetch, batched(items, size), self._ahead)
        return map(_result, chain.from_iterable(fetched))

    def _read(self, item: Item) -> Loaded:
        start = time.perf_counter()
        image: Picture | ImageError
        try:
            if isinstance(item.source, ImageError):
                raise item.source
            image = self._model.read(item.source)
        except ImageError as error:
            image = error
        return item, image, time.perf_counter() - start

    def _fetch(self, part: Sequence[Item]) -> list[Loaded | Future[Loaded]]:
        """Finds the files of a batch that the GPU decodes, and has the others decoded."""
        start = time.perf_counter()
        with self._files.lent() as find:
            found = find([item.source for item in part])
        if self._many and None in found:
            self._model.resize_by_vectors()
        each = (time.perf_counter() - start) / len(part)
        return [
            self._decoders.submit(self._read, item) if image is None else (item, image, each)
            for item, image in zip(part, found, strict=True)
        ]

    def _start(self, part: Sequence[Loaded], times: Times) -> Running | None:
        """Hands the pictures of a batch to the model, if there are any."""
        pictures: list[Picture] = []
        sources: list[Source] = []
        for item, image, seconds in part:
            times.preprocessing += seconds
            if not isinstance(image, ImageError) and not isinstance(item.source, ImageError):
                pictures.append(image)
                sources.append(item.source)
        if not pictures:
            return None
        times.images += len(pictures)
        times.last = pictures, sources
        return self._runner.submit(self._run, pictures, sources, times)

    def _run(
        self, pictures: list[Picture], sources: list[Source], times: Times
    ) -> list[np.ndarray | ImageError]:
        start = time.perf_counter()
        rows = self._model.run(pictures, sources)
        times.runs.append((len(pictures), time.perf_counter() - start))
        return rows


def batched(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Groups items by ``size``; the last group may have fewer."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def start_readers() -> list[Reader]:
    """Starts processes that read for a GPU that decodes; none where there is no room for them."""
    made: list[Reader] = []
    with suppress(OSError):  # no memory, or no more processes
        for _ in range(READERS):
            made.append(Reader())
    return made


class _Files:
    """What finds JPEGs for the GPU, for several threads.

    Args:
        model: For which.
        processes: That read, one for each thread; this process reads if there are none.
        slots: See ``Reader.begin``.
    """

    def __init__(self, model: Classifier, processes: Sequence[Reader], slots: int) -> None:
        self._processes = processes
        for process in processes:
            process.begin(model.preprocess, model.batch_size, slots)
        self._model = model
        self._idle: SimpleQueue[Find] = SimpleQueue()
        finds: Sequence[Find] = processes or [self._find] * READERS
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
    pool: ThreadPoolExecutor, function: Callable[[_T], _R], items: Iterable[_T], limit: int
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
    model: Classifier, top_k: int, part: Sequence[Loaded], future: Running | None
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
    for item, image, _ in part:
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
