"""Keeps a model's process running, and hands images to it.

MAX Serve ends with its worker. Here the server stays: it starts another process, says 503 until
that has run a picture, and keeps its port, its metrics and the requests that are being read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from serve import engine
from serve.engine import Link, Spec
from serve.errors import Refusal, failed, not_ready
from serve.wire import Job, Report

log = logging.getLogger("maxvision.serve")

LONGEST_PAUSE = 30.0
"""Seconds between two starts at most, of a process that ends again and again."""


@dataclass(frozen=True)
class Result:
    """What the model says of an image.

    Attributes:
        logits: float32 [classes].
        features: float32 [C], if wanted.
        queue_ms: Time until its batch began.
        inference_ms: Time of its batch.
        batch: Images of its batch.
    """

    logits: np.ndarray
    features: np.ndarray | None
    queue_ms: float
    inference_ms: float
    batch: int


class Supervisor:
    """A model's process that is started anew when it ends or hangs.

    Attributes:
        ready: Whether the process that runs now has run a picture, through its queues.
        starts: How often a process was started.
        batch_limit: Images that run together at most, as the process says.
    """

    def __init__(self, spec: Spec, settings: engine.Settings, blank: np.ndarray) -> None:
        self.ready = False
        self.starts = 0
        self.batch_limit = spec.max_batch_size
        self._spec = spec
        self._settings = settings
        self._blank = blank
        self._link: Link | None = None
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._heard = 0.0
        self._patience = 60.0
        self._pid = 0

    async def run(self) -> None:
        """Keeps a process running until this is cancelled.

        Raises:
            WorkerEnded: If the first process ends before it is ready.
        """
        pause = 0.0
        while True:
            self.starts += 1
            was_ready = False
            try:
                async with engine.worker(self._spec, self._settings) as link:
                    try:
                        was_ready = await self._serve(link)
                    finally:
                        was_ready = was_ready or self.ready
                        self._end()
            except engine.WorkerEnded as ended:
                log.error("the model's process has ended: %s", ended)
                if self.starts == 1 and not was_ready:
                    raise
            pause = 0.0 if was_ready else min(LONGEST_PAUSE, 2 * pause + 0.5)
            await asyncio.sleep(pause)

    async def submit(self, id: str, pixels: np.ndarray, features: bool = False) -> Result:
        """Lets the model look at pixels [H, W, C]; if this is cancelled the model need not.

        Raises:
            Refusal: If the process is not ready or ends meanwhile, or the model fails.
        """
        if not self.ready:
            raise not_ready()
        return await self._submit(Job(id, pixels, time.monotonic(), features))

    async def _submit(self, job: Job) -> Result:
        link = self._link
        if link is None:
            raise not_ready()
        future = asyncio.get_running_loop().create_future()
        self._waiting[job.id] = future
        try:
            await link.send(job)
            return await future
        except asyncio.CancelledError:
            if link is self._link:
                with suppress(Exception):
                    link.cancel([job.id])
            raise
        finally:
            self._waiting.pop(job.id, None)

    async def _serve(self, link: Link) -> bool:
        """Routes reports until the process ends; true, to say that it was ready."""
        self._link = link
        self._heard = time.monotonic()
        tasks = [asyncio.ensure_future(self._listen(link)), asyncio.ensure_future(self._watch())]
        try:
            await self._submit(Job("ready", self._blank, time.monotonic()))
            self.ready = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return True

    async def _listen(self, link: Link) -> None:
        while True:
            report = await link.report()
            self._heard = time.monotonic()
            self._pid, self._patience = report.pid, report.patience
            self.batch_limit = report.batch_limit
            self._route(report)

    def _route(self, report: Report) -> None:
        for i, id in enumerate(report.ids):
            future = self._waiting.get(id)
            if future is not None and not future.done():
                assert report.logits is not None
                rich = None if report.features is None else report.features[i]
                future.set_result(
                    Result(
                        report.logits[i],
                        rich,
                        report.queue_ms[i],
                        report.inference_ms,
                        len(report.ids),
                    )
                )
        for id in report.failed:
            self._fail(id, failed())

    async def _watch(self) -> None:
        """Kills a process that is silent for too long, which ends ``engine.worker``'s block."""
        while True:
            await asyncio.sleep(0.25)
            if self._pid and time.monotonic() - self._heard > self._patience:
                log.error("the model's process hangs and is killed")
                self._kill()
                await asyncio.sleep(2)  # its end is noticed sooner, and cancels this
                raise engine.WorkerEnded(TimeoutError("it hangs"))

    def _end(self) -> None:
        """Kills what is left of the process, and lets nobody wait for it."""
        self.ready = False
        self._link = None
        self._kill()
        self._pid = 0
        for id in list(self._waiting):
            self._fail(id, not_ready())

    def _kill(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _fail(self, id: str, refusal: Refusal) -> None:
        future = self._waiting.get(id)
        if future is not None and not future.done():
            future.set_exception(refusal)
