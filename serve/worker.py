"""The model's process: batches what comes, runs it, reports. Nothing of HTTP, nothing of MAX Serve.

``Runner`` is the model, ``Batcher`` decides what runs when. serve/engine.py puts the batcher into
MAX Serve's worker, as its scheduler.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maxvision.runtime.jpeg import Jpeg, Picture
from maxvision.serve.quarantine import Quarantine
from maxvision.serve.wire import READY, SERVER, Job, Report

log = logging.getLogger("maxvision.serve")

BEAT = 0.25
"""Seconds after which the process says that it is alive, if there is nothing else to say."""

PATIENCE = 2.5
"""Least seconds of silence that mean that it hangs."""

DECODING = 2
"""Batches that are decoded, or wait for it, at most."""

SMALL = 4
"""Images of a batch that need no thread, which takes time to wake, if nothing else is to do."""

UNSOUND = 3
"""Exit code of a process whose model fails with a picture that it has answered before."""

_MEMORY = re.compile(r"out.of.memory|failed to allocate", re.IGNORECASE)


def end_with_parent() -> None:
    """Lets this process end when its parent does, whatever it waits for then.

    It may be an event of multiprocessing's, whose other side was killed while it waited: for ever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing has not started this process"

    def watch() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def is_memory(error: Exception) -> bool:
    """Tells whether an error is for want of memory."""
    return isinstance(error, MemoryError) or bool(_MEMORY.search(str(error)))


class Classifier(Protocol):
    """What a server needs of ``runtime.classifier.Classifier``; ``decoder`` only if it has one."""

    preprocess: Any

    def prepare(self, batch: int) -> None:
        """Makes ready for batches of up to ``batch`` images."""

    def __call__(self, pixels: Any) -> np.ndarray:
        """Computes logits."""

    def features(self, pixels: Any) -> Any:
        """Computes logits and features."""


def prepare(model: Classifier, batch: int) -> None:
    """Makes a model ready for batches of each size up to ``batch``, as far as memory goes."""
    try:
        model.prepare(batch)
    except Exception as error:
        if not is_memory(error):
            raise
        log.warning("no memory for every size of batches: some run as larger ones")


class Runner:
    """A model, ready to run: its graphs are compiled here, as compiling would hold up requests.

    Args:
        model: What computes.
        embeds: Whether ``features`` will be asked for, which takes a graph of its own.

    Attributes:
        decoding: Seconds that its decoder was at work.
    """

    def __init__(self, model: Classifier, embeds: bool) -> None:
        self.decoding = 0.0
        self._model = model
        self._embeds = embeds
        shape = 1, model.preprocess.height, model.preprocess.width, 3
        self._thread = ThreadPoolExecutor(1, "decode")
        self._known = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        self._answer = np.empty(0, np.float32)

    def warm(self, batch: int) -> float:
        """Makes ready for batches up to ``batch``; returns the seconds that a full one took."""
        if self._embeds:
            self.features(self._blank(1))
        self(self._blank(1))
        prepare(self._model, batch)
        self(self._blank(batch))  # a CPU's first run is slower than those to come
        begun = time.perf_counter()
        self(self._blank(batch))
        taken = time.perf_counter() - begun
        self._answer = self(self._known)
        return taken

    def sound(self) -> bool:
        """Tells whether the model still answers a picture as it did when it was made ready.

        It does not after an error that stays with the device: a kernel's wrong address ends all
        that its process may ask of a GPU.
        """
        try:
            logits = self(self._known)
        except Exception:
            return False
        if not np.isfinite(self._answer).all():  # it never could answer that one
            return True
        slack = 0.05 * float(np.abs(self._answer).max())
        return bool((np.abs(logits - self._answer) <= slack).all())  # false for NaN

    def decode(self, images: Sequence[Picture], at_once: bool = False) -> Future[Any] | None:
        """Begins to decode a batch, on a thread; nothing if there is no file, or no decoder.

        With ``at_once`` it is decoded on the calling thread, which is sooner.
        """
        decoder = getattr(self._model, "decoder", None)
        if decoder is None or not any(isinstance(image, Jpeg) for image in images):
            return None
        if not at_once:
            return self._thread.submit(self._timed, decoder, images)
        made: Future[Any] = Future()
        try:
            made.set_result(self._timed(decoder, images))
        except Exception as error:
            made.set_exception(error)
        return made

    def _timed(self, decoder: Any, images: Sequence[Picture]) -> Any:
        begun = time.monotonic()
        try:
            return decoder(images)
        finally:
            self.decoding += time.monotonic() - begun

    @contextmanager
    def pixels(
        self, images: Sequence[Picture], decoding: Future[Any] | None
    ) -> Iterator[tuple[Any, list[int]]]:
        """Makes the pixels of a batch while the block runs.

        Args:
            images: It.
            decoding: What ``decode`` has begun.

        Yields:
            What the model computes of, and which images are not in it as they cannot be decoded.
        """
        if decoding is None:
            left = [image for image in images if isinstance(image, np.ndarray)]
            files = [i for i, image in enumerate(images) if isinstance(image, Jpeg)]
            yield np.stack(left) if left else (), files
            return
        with decoding.result() as batch:
            for i in batch.refused:
                batch.replace(i, None)
            yield batch, batch.refused

    def __call__(self, pixels: Any) -> np.ndarray:
        """Computes the logits [N, classes] of pixels [N, H, W, C]."""
        return self._model(pixels)

    def features(self, pixels: Any) -> tuple[np.ndarray, np.ndarray]:
        """Computes logits and pooled features [N, C]."""
        result = self._model.features(pixels)
        return result.logits, result.features

    def _blank(self, batch: int) -> np.ndarray:
        shape = self._model.preprocess.height, self._model.preprocess.width, 3
        return np.zeros((batch, *shape), np.uint8)


class Inbox(Protocol):
    """Where jobs and cancellations come from, and reports go to; see ``serve.wire.Inbox``."""

    def wait(self, seconds: float) -> None:
        """Returns as soon as something has come, or ``wake`` is called; at the latest in time."""

    def wake(self) -> None:
        """Ends ``wait``, from any thread."""

    def take(self) -> Job | list[str]:
        """Takes a job, or ids that nobody waits for; raises ``queue.Empty`` if there is neither."""

    def report(self, report: Report, front: bytes) -> None:
        """Sends a report to who sent the jobs."""


@dataclass
class _Begun:
    """A batch whose files are decoded.

    Attributes:
        jobs: Its images.
        noted: Lets the quarantine know of them until it is left.
        decoding: Comes with what is decoded, if anything is.
    """

    jobs: list[Job]
    noted: ExitStack
    decoding: Future[Any] | None

    @property
    def is_decoded(self) -> bool:
        """Tells whether the model can run it."""
        return self.decoding is None or self.decoding.done()


class Batcher:
    """Runs images together.

    A batch starts when it is full, or when its first image has waited for ``delay``. Images that
    were cancelled before are left out. A batch that fails is run image by image, so that only
    those fail which do it alone; but where the model fails with what it knows, too, the process
    ends, and another takes its place. One for which memory is short is halved, and so are those to
    come. An image that may have ended the process before runs alone.

    Where the device decodes, a thread does so with a batch while the one before runs. A full batch
    may wait for the thread, so that it is never idle; one that is not gathers images until then,
    unless those of the other kind, with features or without, came last.

    Args:
        runner: The model, warm.
        inbox: Where work comes from.
        limit: Images that run together at most.
        delay: Seconds that the first of them waits for others.
        seconds: What a full batch takes.
        quarantine: Knows which images to run alone, or not at all.
    """

    def __init__(
        self,
        runner: Runner,
        inbox: Inbox,
        limit: int,
        delay: float,
        seconds: float,
        quarantine: Quarantine,
    ) -> None:
        self.limit = limit
        self._runner = runner
        self._inbox = inbox
        self._delay = delay
        self._patience = max(PATIENCE, 10 * seconds)
        self._plain: dict[str, Job] = {}  # in the order of their coming
        self._rich: dict[str, Job] = {}  # those that want features
        self._alone: dict[str, Job] = {}  # those that are suspected
        self._begun: deque[_Begun] = deque()  # in the order in which they are decoded
        self._quarantine = quarantine
        self._since, self._idle = time.monotonic(), 0.0
        self._last = 0.0  # when it was to say that it lives
        self._progress = 0.0  # when no batch was begun, or one was decoded

    def step(self) -> None:
        """Waits for something to do, at most for a beat, and does it."""
        begun = time.monotonic()
        self._inbox.wait(self._due())
        self._idle += time.monotonic() - begun
        self._take()
        while due := [jobs for jobs in (self._plain, self._rich) if self._wait(jobs) <= 0]:
            jobs = max(due, key=self._age)
            self._begin([jobs.pop(id) for id in list(jobs)[: self.limit]])
        if self._is_decoded:
            self._finish(self._begun.popleft())
            self._progress = time.monotonic()
        if self._alone and not self._begun:
            self._run([self._alone.pop(next(iter(self._alone)))])
        self._beat()

    def _beat(self) -> None:
        """Says that the process lives, unless the thread that decodes may hang."""
        now = time.monotonic()
        if not self._begun:
            self._progress = now
        if now - self._last >= BEAT:
            self._last = now
            if now - self._progress <= BEAT:
                self._report()

    def _due(self) -> float:
        """Returns the seconds until something is due: a batch or a beat."""
        if self._is_decoded or (self._alone and not self._begun):
            return 0.0
        beat = BEAT - (time.monotonic() - self._last)
        return max(0.0, min(beat, self._wait(self._plain), self._wait(self._rich)))

    @property
    def _is_decoded(self) -> bool:
        """Tells whether the model can run the first batch that was begun."""
        return bool(self._begun) and self._begun[0].is_decoded

    def _wait(self, jobs: dict[str, Job]) -> float:
        """Returns the seconds until some jobs are a batch; infinite if something comes first."""
        if not jobs or self._alone:
            return math.inf
        full = len(jobs) >= self.limit
        decoding = [batch.jobs[0].features for batch in self._begun if not batch.is_decoded]
        others = bool(decoding) and decoding[-1] != next(iter(jobs.values())).features
        if len(decoding) >= (DECODING if full or others else 1):
            return math.inf
        return 0.0 if full else self._delay - self._age(jobs)

    @staticmethod
    def _age(jobs: dict[str, Job]) -> float:
        return time.monotonic() - next(iter(jobs.values())).sent

    def _take(self) -> None:
        try:
            while True:
                came = self._inbox.take()
                if isinstance(came, Job):
                    self._add(came)
                else:
                    for id in came:
                        for jobs in (self._plain, self._rich, self._alone):
                            jobs.pop(id, None)
        except queue.Empty:
            pass

    def _add(self, job: Job) -> None:
        ends = 0 if job.id == READY else self._quarantine.ends(job.image)
        if ends > 1:
            log.error("request %s: the process has ended twice with its image", job.id)
            self._report(job.front, quarantined=[job.id])
        elif ends:
            self._alone[job.id] = job
        else:
            (self._rich if job.features else self._plain)[job.id] = job

    def _begin(self, jobs: list[Job]) -> None:
        """Lets the thread decode a batch; one without files, or a small one, runs at once."""
        idle = len(jobs) <= SMALL and not (self._begun or self._plain or self._rich)
        batch = self._decode(jobs, at_once=idle)
        if idle or batch.decoding is None:
            self._finish(batch)
        else:
            self._begun.append(batch)
            batch.decoding.add_done_callback(lambda _: self._inbox.wake())

    def _decode(self, jobs: list[Job], at_once: bool = False) -> _Begun:
        noted = ExitStack()
        seen = [job.image for job in jobs if job.id != READY]
        noted.enter_context(self._quarantine.running(seen))
        return _Begun(jobs, noted, self._runner.decode([job.image for job in jobs], at_once))

    def _run(self, jobs: list[Job]) -> None:
        """Runs a batch now; what has begun comes first, as it has the decoder's memory."""
        while self._begun:
            self._finish(self._begun.popleft())
        self._finish(self._decode(jobs))

    def _finish(self, batch: _Begun) -> None:
        """Runs a batch and reports it; in parts if it cannot be run as a whole."""
        begun, jobs, features = time.monotonic(), batch.jobs, None
        try:
            images = [job.image for job in jobs]
            making = self._runner.pixels(images, batch.decoding)
            with batch.noted, making as (pixels, undecoded):
                if len(undecoded) == len(jobs):
                    logits = np.empty((0, 0), np.float32)
                elif jobs[0].features:
                    logits, features = self._runner.features(pixels)
                else:
                    logits = self._runner(pixels)
            if len(logits) != len(jobs) - len(undecoded) or not np.isfinite(logits).all():
                raise ValueError("the model gave no finite number for each class")
        except Exception as error:
            self._retry(jobs, error)
            return
        for i in reversed(undecoded):
            job = jobs.pop(i)
            self._report(job.front, undecoded=[job.id])
        taken = 1e3 * (time.monotonic() - begun)
        fronts: dict[bytes, list[int]] = {}
        for row, job in enumerate(jobs):
            fronts.setdefault(job.front, []).append(row)
        for front, rows in fronts.items():
            self._report(
                front,
                batch=len(jobs),
                ids=[jobs[row].id for row in rows],
                queue_ms=[1e3 * (begun - jobs[row].sent) for row in rows],
                inference_ms=taken,
                logits=logits[rows],
                features=None if features is None else features[rows],
            )

    def _retry(self, jobs: list[Job], error: Exception) -> None:
        memory = is_memory(error)
        if not memory and not self._runner.sound():
            log.critical("the model fails with every picture: its process ends", exc_info=error)
            with self._quarantine.running([job.image for job in jobs if job.id != READY]):
                os._exit(UNSOUND)
        if len(jobs) == 1:
            log.error("request %s: the model failed", jobs[0].id, exc_info=error)
            self._report(jobs[0].front, failed=[jobs[0].id])
            return
        size = len(jobs) // 2 if memory else 1
        if memory:
            self.limit = min(self.limit, size)
            log.warning("no memory for %d images; up to %d run together", len(jobs), self.limit)
        else:
            log.warning("a batch of %d failed and is run image by image", len(jobs))
        for start in range(0, len(jobs), size):
            self._run(jobs[start : start + size])

    def _report(self, front: bytes = SERVER, **done: Any) -> None:
        now = time.monotonic()
        if front == SERVER:
            self._last = now
        report = Report(
            pid=os.getpid(),
            patience=self._patience,
            batch_limit=self.limit,
            busy=now - self._since - self._idle,
            decoding=self._runner.decoding,
            **done,
        )
        self._inbox.report(report, front)
