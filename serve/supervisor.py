"""Keeps a model's processes running, and hands images to them.

MAX Serve ends with its worker. Here the server stays: it starts another process, says 503 until
that has run a picture, and keeps its port, its metrics and the requests that are being read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from maxvision.serve import engine
from maxvision.serve.engine import Spec
from maxvision.serve.instances import Instances
from maxvision.serve.limits import longer
from maxvision.serve.remote import Remote
from maxvision.serve.wire import READY, SERVER, Job, Report

log = logging.getLogger("maxvision.serve")

NEWS = 0.1
"""Seconds for which a process was busy and that others are told of."""

TICK = 0.25
"""Seconds between two looks at a process."""


class Supervisor(Remote):
    """A model's process that is started anew when it ends or hangs.

    Args:
        spec: What it runs.
        settings: MAX's.
        blank: Pixels [H, W, C] of the picture that shows whether it is ready.

    Attributes:
        changed: Is called when ``ready`` or ``batch_limit`` has changed, and after each ``NEWS``
            seconds that the process was busy.
    """

    def __init__(self, spec: Spec, settings: engine.Settings, blank: np.ndarray) -> None:
        super().__init__(SERVER, spec.max_batch_size)
        self.changed: Callable[[], None] = lambda: None
        self._spec = spec
        self._settings = settings
        self._blank = blank
        self._last = 0.0
        self._patience = 60.0
        self._pid = 0
        self._told = 0.0  # of what the process was busy
        self._past = 0.0, 0.0  # for how long its predecessors were busy, and decoded

    async def run(self, patient: bool = False) -> None:
        """Keeps a process running until this is cancelled.

        Args:
            patient: Whether a first process that cannot run the model is followed by others, too.

        Raises:
            WorkerEnded: If it is not, and ends before it is ready.
        """
        pause, first = 0.0, not patient
        while True:
            self.starts += 1
            was_ready = False
            try:
                async with engine.worker(self._spec, self._settings) as address:
                    try:
                        was_ready = await self._serve(address)
                    finally:
                        was_ready = was_ready or self.ready
                        self._end()
            except engine.WorkerEnded as ended:
                log.error("the model's process has ended: %s", ended)
                if first and not was_ready:
                    raise
            first = False
            pause = 0.0 if was_ready else longer(pause)
            await asyncio.sleep(pause)

    async def _serve(self, address: str) -> bool:
        """Watches the process until it ends; true, to say that it was ready."""
        self.connect(address)
        self._last = time.monotonic()
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._submit(Job(READY, self._blank, time.monotonic()))
            self.ready = True
            self.changed()
            await watch
        finally:
            watch.cancel()
        return True

    def _heard(self, report: Report) -> None:
        self._last = time.monotonic()
        self._pid, self._patience = report.pid, report.patience
        limit = self.batch_limit
        super()._heard(report)
        busy, decoding = self._past
        self.busy, self.decoding = busy + report.busy, decoding + report.decoding
        if self.batch_limit != limit or self.busy - self._told >= NEWS:
            self._told = self.busy
            self.changed()

    async def _watch(self) -> None:
        """Kills a process that is silent for too long, which ends ``engine.worker``'s block.

        Time for which it could run but had no core does not count: on a machine that is too busy
        it is late, and the next one would be later.
        """
        heard, ticks, begun = self._last, 0, waits(self._pid)
        while True:
            await asyncio.sleep(TICK)
            if heard != self._last or not self._pid:
                heard, ticks, begun = self._last, 0, waits(self._pid)
                continue
            ticks += 1
            waited = waits(self._pid)
            late = max((waited[id] - begun.get(id, waited[id]) for id in waited), default=0.0)
            if TICK * ticks - late > self._patience:
                log.error("the model's process hangs and is killed")
                self._kill()
                await asyncio.sleep(2)  # its end is noticed sooner, and cancels this
                raise engine.WorkerEnded(TimeoutError("it hangs"))

    def _end(self) -> None:
        """Kills what is left of the process, and lets nobody wait for it."""
        self.ready = False
        self._kill()
        self._pid = 0
        self._past = self.busy, self.decoding
        self.connect(None)
        self.changed()

    def _kill(self) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Supervisors(Instances):
    """Keeps the processes of a model running.

    Args:
        members: Each keeps one.

    Attributes:
        changed: See ``on_change``.
    """

    members: Sequence[Supervisor]

    def __init__(self, members: Sequence[Supervisor]) -> None:
        super().__init__(members)
        self.changed: Callable[[], None] = lambda: None

    def on_change(self, changed: Callable[[], None]) -> None:
        """Lets a function be called when there is news of a process, or ``loaded`` has changed."""
        self.changed = changed
        for each in self.members:
            each.changed = changed

    async def run(self) -> None:
        """Keeps the processes running until this is cancelled.

        The first one compiles the model, if that is not in the cache; the others start then.

        Raises:
            WorkerEnded: If the first one ends before it is ready.
        """
        first, *others = self.members
        keeping = [asyncio.ensure_future(first.run())]
        try:
            while not first.ready and not keeping[0].done():
                await asyncio.wait(keeping, timeout=TICK)
            if first.ready:
                keeping += [asyncio.ensure_future(each.run(patient=True)) for each in others]
            await asyncio.gather(*keeping)
        finally:
            for each in keeping:
                each.cancel()
            await asyncio.wait(keeping)


def waits(pid: int) -> dict[str, float]:
    """Reads for how many seconds each thread of a process has been ready to run and had no core."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            found[thread.parent.name] = int(thread.read_text().split()[1]) / 1e9
    return found
