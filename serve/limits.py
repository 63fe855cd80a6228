"""How much may be under way at once, over all processes of a server."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from maxvision.serve.errors import Refusal, overloaded

LONGEST_PAUSE = 30.0
"""Seconds between two starts at most, of a process that ends again and again."""


class Board:
    """Numbers that the processes of a server share: a row a process, which alone writes it.

    Args:
        rows: How many processes there are.
        row: That of this process.
        fd: Of the memory, if another process has made it.
        models: How many there are; the images of the i-th are the number ``IMAGES + i``.
    """

    BYTES, REQUESTS, CLOSED, UP, IMAGES = range(5)  # UP: whether the process takes connections

    def __init__(self, rows: int = 1, row: int = 0, fd: int | None = None, models: int = 1) -> None:
        self._count = self.IMAGES + models
        size = 8 * rows * self._count
        if fd is None:
            fd = os.memfd_create("maxvision")
            os.ftruncate(fd, size)
        self.fd = fd
        self.rows = rows
        self._row = row
        self._cells = memoryview(mmap.mmap(fd, size)).cast("q")

    def add(self, what: int, amount: int) -> None:
        """Adds to a number of this process."""
        self._cells[what * self.rows + self._row] += amount

    def all(self, what: int) -> list[int]:
        """Reads a number of each process."""
        return self._cells[what * self.rows : (what + 1) * self.rows].tolist()

    def clear(self, row: int) -> None:
        """Forgets a process that has ended."""
        for what in range(self._count):
            self._cells[what * self.rows + row] = 0


class Admission:
    """Counts what is under way, and refuses what would be too much, at once.

    Attributes:
        limit: How much may be under way.

    Args:
        limit: See above.
        board: Where it is counted.
        what: As which of its numbers.
    """

    def __init__(self, limit: int, board: Board | None = None, what: int = Board.IMAGES) -> None:
        self.limit = limit
        self._board = board or Board()
        self._what = what

    @property
    def held(self) -> int:
        """How much is under way, in all processes."""
        return sum(self._board.all(self._what))

    def check(self, amount: int = 1) -> None:
        """Raises what ``add`` would.

        Raises:
            Refusal: 429, if there is no room for ``amount``.
        """
        if self.held + amount > self.limit:
            raise overloaded()

    def add(self, amount: int) -> None:
        """Holds room for ``amount``; two processes that ask at once may both be refused.

        Raises:
            Refusal: 429, if there is none.
        """
        self._board.add(self._what, amount)
        if self.held > self.limit:
            self._board.add(self._what, -amount)
            raise overloaded()

    def free(self, amount: int) -> None:
        """Gives room back."""
        self._board.add(self._what, -amount)

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Holds room for ``amount`` while the block runs.

        Raises:
            Refusal: 429, if there is none.
        """
        self.add(amount)
        try:
            yield
        finally:
            self.free(amount)


def longer(pause: float) -> float:
    """Doubles the seconds to wait before a process that has failed again is started anew."""
    return min(LONGEST_PAUSE, 2 * pause + 0.5)


def open_files(wanted: int) -> int:
    """Asks for room for open files, and returns how many this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def too_many_images(count: int, limit: int) -> Refusal:
    """Says that a request holds more images than it may."""
    return Refusal(
        413,
        "too_many_images",
        f"the request has {count} images but may have at most {limit}; send several requests",
    )
