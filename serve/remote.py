"""The model's process, as a process that decodes sees it. Nothing of MAX is imported here."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from maxvision.runtime.jpeg import Picture
from maxvision.serve.errors import Refusal, failed, not_ready, quarantined
from maxvision.serve.wire import Job, Link, Report


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


class Undecoded(Exception):
    """The model's process cannot decode the file that it got."""


class Remote:
    """A model's process, for a process that decodes: hands images over, matches the answers.

    Attributes:
        ready: Whether the model's process has run a picture.
        starts: How often such a process was started.
        batch_limit: Images that run together at most, as it says.
        busy: Seconds that it did not wait for work, as the server's process was told last.
        decoding: Seconds that its decoder was at work, likewise.
        address: Where it listens, None if there is none.
    """

    def __init__(self, identity: bytes, batch_limit: int = 0) -> None:
        self.ready = False
        self.starts = 0
        self.batch_limit = batch_limit
        self.busy = self.decoding = 0.0
        self.address: str | None = None
        self._identity = identity
        self._link: Link | None = None
        self._waiting: dict[str, asyncio.Future[Result]] = {}

    @property
    def waiting(self) -> int:
        """How many images of this sender are under way."""
        return len(self._waiting)

    def connect(self, address: str | None) -> None:
        """Links to another process, or to none; whoever waits for the one before is refused."""
        if self._link:
            self._link.close()
            self._link = None
        for id in list(self._waiting):
            self._fail(id, not_ready())
        self.address = address
        if address:
            self._link = Link(address, self._identity, self._heard)

    async def submit(self, id: str, image: Picture, features: bool = False) -> Result:
        """Lets the model look at pixels [H, W, C] or a file; if this is cancelled it need not.

        Raises:
            Undecoded: If the file cannot be decoded there.
            Refusal: If the process is not ready or ends meanwhile, the model fails, or the process
                has ended twice while it ran this image.
        """
        if not self.ready:
            raise not_ready()
        return await self._submit(Job(id, image, time.monotonic(), features))

    async def _submit(self, job: Job) -> Result:
        link = self._link
        if link is None:
            raise not_ready()
        future = asyncio.get_running_loop().create_future()
        self._waiting[job.id] = future
        try:
            link.send(job)
            return await future
        except asyncio.CancelledError:
            if link is self._link:
                link.cancel([job.id])
            raise
        finally:
            self._waiting.pop(job.id, None)

    def _heard(self, report: Report) -> None:
        self.batch_limit = report.batch_limit
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
                        report.batch,
                    )
                )
        for id in report.failed:
            self._fail(id, failed())
        for id in report.quarantined:
            self._fail(id, quarantined())
        for id in report.undecoded:
            self._fail(id, Undecoded())

    def _fail(self, id: str, error: Refusal | Undecoded) -> None:
        future = self._waiting.get(id)
        if future is not None and not future.done():
            future.set_exception(error)
