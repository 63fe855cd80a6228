"""Classifies ever so many images: decoding on all cores, the model, and what follows overlap.

Decoding threads work ahead of the model by two batches, one thread keeps the model busy, and the
caller writes what has been answered. So the slowest of the three sets the pace, and only so many
images are in memory.
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
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from maxvision.common.errors import ImageError
from maxvision.common.host import cores
from maxvision.runtime.preprocess import Pixels, Source

if TYPE_CHECKING:
    from maxvision.runtime import Classifier, Prediction

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
        pixels: What ran last, [N, H, W, C].
        all: Of all answers, from the first image to the last.
        first: ``time.perf_counter()`` at the first answer.
    """

    preprocessing: float = 0.0
    images: int = 0
    runs: list[tuple[int, float]] = field(default_factory=list)
    pixels: Pixels | None = None
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
    size = model.batch_size

    def read(item: Item) -> tuple[Pixels | ImageError, float]:
        start = time.perf_counter()
        try:
            if isinstance(item.source, ImageError):
                return item.source, 0.0
            return model.preprocess(item.source), time.perf_counter() - start
        except ImageError as error:
            return error, 0.0

    def run(pixels: Pixels) -> npt.NDArray[np.float32]:
        start = time.perf_counter()
        logits: npt.NDArray[np.float32] = model(pixels)
        times.runs.append((len(pixels), time.perf_counter() - start))
        return logits

    readers = ThreadPoolExecutor(workers, "decode", _step_back if model.device == "cpu" else None)
    runner = ThreadPoolExecutor(1, "model")
    running: deque[tuple[list[Item], list[Pixels | ImageError], Future | None]] = deque()
    try:
        images = _ahead(readers, read, items, 2 * size + workers)
        for start in range(0, len(items), size):
            part = list(items[start : start + size])
            loaded = []
            for _ in part:
                image, seconds = next(images)
                loaded.append(image)
                times.preprocessing += seconds
            good = [image for image in loaded if not isinstance(image, ImageError)]
            future = None
            if good:
                times.images += len(good)
                times.pixels = np.stack(good)
                future = runner.submit(run, times.pixels)
            running.append((part, loaded, future))
            if len(running) > 2:
                yield _finish(model, *running.popleft(), top_k)
        while running:
            yield _finish(model, *running.popleft(), top_k)
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
    loaded: Sequence[Pixels | ImageError],
    future: Future[npt.NDArray[np.float32]] | None,
    top_k: int,
) -> list[Answer]:
    """Waits for the logits of a batch and makes an answer of each image."""
    logits = future.result() if future else np.empty((0, 0), np.float32)
    with np.errstate(invalid="ignore"):  # logits that are not finite become an error below
        predictions = model.predictions(logits, top_k) if future else []
    rows = iter(zip(logits, predictions, strict=True))
    done = []
    for item, image in zip(items, loaded, strict=True):
        if isinstance(image, ImageError):
            done.append(Answer(item.name, str(image)))
            continue
        row, best = next(rows)
        if np.isfinite(row).all():
            done.append(Answer(item.name, None, best, row))
        else:
            done.append(
                Answer(
                    item.name,
                    f"{item.name}: {model.name} gave NaN or infinity in {model.dtype}; try"
                    " --dtype float32, or check the weights",
                )
            )
    return done
