"""Processes that read JPEGs for a GPU that decodes them: ``maxvision.runtime.reading FD FD``.

To read a file and its header takes 35 us of a Python thread (an H100's host, docs/serving.md), and
the threads that feed the GPU wait for Python's lock meanwhile. So processes read, into memory that
they share with this one, a batch at a time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TypeAlias

import numpy as np

from maxvision.common.host import leave, python
from maxvision.runtime import jpeg
from maxvision.runtime.jpeg import Jpeg
from maxvision.runtime.preprocess import Preprocess, Source

ROOM = 512 << 10
"""Bytes of a slot for each file of a batch; files that no longer fit in are read elsewhere."""

Found: TypeAlias = "tuple[int, int, int, int, int] | None"
"""Where a file begins in its slot, its bytes, height, width and orientation; None of others."""


class Reader:
    """A process that reads; for one thread at a time.

    It starts at once, and can read after ``begin``. Until it has started, and where it has ended,
    ``__call__`` reads by itself.
    """

    def __init__(self) -> None:
        self._up = False
        self._channel, theirs = Pipe()
        self._shared = os.fdopen(os.memfd_create("maxvision"), "w+b")
        numbers = theirs.fileno(), self._shared.fileno()
        try:
            self._process = subprocess.Popen(
                **python("maxvision.runtime.reading", *map(str, numbers)),
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()

    def begin(self, preprocess: Preprocess, batch: int, slots: int) -> None:
        """Says what it will read.

        Args:
            preprocess: Of the model; see ``jpeg.find``.
            batch: Files at a time, at most.
            slots: Batches whose files stay in memory. That of a call is used again ``slots`` calls
                later.
        """
        self._preprocess = preprocess
        self._room = batch * ROOM
        self._turns = itertools.cycle(range(slots))
        with self._shared as shared:
            shared.truncate(slots * self._room)  # pages that nobody writes take no memory
            self._memory = np.frombuffer(mmap.mmap(shared.fileno(), 0), np.uint8)
        with suppress(OSError):  # it has ended
            self._channel.send((os.getcwd(), preprocess, self._room))

    def __call__(self, sources: Sequence[Source | Exception]) -> list[Jpeg | None]:
        """Reads files.

        Returns:
            Each; None for one to read elsewhere: one that Pillow should have, that is no file, or
            for which the slot has no room.
        """
        with suppress(OSError, EOFError):
            if self._up or self._channel.poll():
                self.wait()
                return self._asked(sources)
        return jpeg.find_all(sources, self._preprocess)

    def wait(self) -> None:
        """Waits until it has started.

        Raises:
            EOFError: If it could not; or OSError.
        """
        self._up = self._up or self._channel.recv()

    def _asked(self, sources: Sequence[Source | Exception]) -> list[Jpeg | None]:
        start = next(self._turns) * self._room
        paths = [os.fspath(s) if isinstance(s, (str, os.PathLike)) else None for s in sources]
        self._channel.send((start, paths))
        found: list[Found] = self._channel.recv()
        made: list[Jpeg | None] = []
        for source, each in zip(sources, found, strict=True):
            if each is not None:
                at, size, *about = each
                made.append(Jpeg(self._memory[start + at : start + at + size], *about))
            else:
                given = isinstance(source, bytes)
                made.append(jpeg.find(source, self._preprocess) if given else None)
        return made

    def close(self) -> None:
        """Ends the process; what it has read stays. A call that waits for it reads by itself."""
        self._shared.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Reads what is asked for through the first file descriptor, into the memory of the second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks says when it is over
    channel, shared = Connection(int(sys.argv[1])), int(sys.argv[2])
    with suppress(OSError, EOFError):
        channel.send(True)
        folder, preprocess, room = channel.recv()
        memory = memoryview(mmap.mmap(shared, os.fstat(shared).st_size))
        os.chdir(folder)
        while True:
            start, paths = channel.recv()
            channel.send(_read(paths, memory[start : start + room], preprocess))
    leave(0)


def _read(paths: Sequence[str | None], memory: memoryview, preprocess: Preprocess) -> list[Found]:
    found: list[Found] = []
    at = 0
    for path in paths:
        each = None if path is None else jpeg.find(path, preprocess)
        if each is None or at + len(each.file) > len(memory):
            found.append(None)
            continue
        size = len(each.file)
        memory[at : at + size] = bytes(each.file)
        found.append((at, size, each.height, each.width, each.orientation))
        at += size
    return found


if __name__ == "__main__":
    main()
