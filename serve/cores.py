"""Cores of its own for each of several processes of one machine."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time

log = logging.getLogger("maxvision.serve")

SECONDS = 10.0
"""How long to wait for cores: the process that had them may be about to end."""


def claim(count: int) -> None:
    """Binds this thread, and what it starts from here on, to cores that no other process claimed.

    Ray counts cores and does not bind to them; models that run on the same ones wait for each
    other. A core is a locked file, which the kernel unlocks when the process ends. If too few are
    free, nothing is bound, and the log says so.

    Args:
        count: How many.
    """
    folder = os.path.join(tempfile.gettempdir(), f"maxvision-cores-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    mine: dict[int, int] = {}
    end = time.monotonic() + SECONDS
    while True:
        for core in sorted(os.sched_getaffinity(0) - set(mine)):
            if len(mine) == count:
                break
            file = os.open(os.path.join(folder, str(core)), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine[core] = file
            except BlockingIOError:
                os.close(file)
        if len(mine) == count:
            os.sched_setaffinity(0, mine)
            return
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    for file in mine.values():
        os.close(file)
    log.warning("too few cores are free to claim %d of them; this process shares all", count)
