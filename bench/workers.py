"""An object in a process of its own: what crashes there is lost, and nothing else is."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_S = 1800
"""How long a call may take; max-autotune takes minutes."""


class Lost(Exception):
    """Why a call gave no answer: what it raised, or how its process ended."""


class Worker:
    """Calls the methods of an object that a process of its own made.

    Args:
        make: Makes the object, there; a function or class of a module.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._mine, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make))
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._process.is_alive()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method and waits for what it returns.

        Raises:
            Lost: If it raises, if the process ends, or if it takes longer than ``PATIENCE_S``.
        """
        try:
            self._mine.send((method, arguments))
            if not self._mine.poll(PATIENCE_S):
                raise Lost(f"{method} took longer than {PATIENCE_S} s")
            problem, result = self._mine.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise Lost(f"its process ended with {_ending(self._process.exitcode)}") from None
        if problem:
            raise Lost(problem)
        return result

    def stop(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self._mine.close()
        self._process.join(3)
        self._process.kill()
        self._process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    made = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            made = made or make()
            answer: tuple[str | None, Any] = (None, getattr(made, method)(*arguments))
        except Exception as problem:
            answer = (f"{type(problem).__name__}: {problem}".partition("\n")[0], None)
        connection.send(answer)
