"""The access log: a line a request on standard output, as text or JSON.

Text is the Common Log Format, and behind it what else is known, as ``name=value``.

Lines are made where requests are answered and written by a thread, ten times a second: a terminal
or a pipe that nobody reads holds up no request, and only its lines are lost.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from maxvision.common.console import Unbuffered

STYLES = ("text", "json", "off")

PERIOD = 0.1
"""Seconds between two writes."""

MOST_LINES = 100_000
"""Lines that wait to be written; later ones are lost until there is room."""

LONGEST = 256
"""Characters of a path or an address that are logged."""

_ODD = re.compile(r'[^\x21-\x7e]|["\\]')


@dataclass
class Entry:
    """Describes a request and its answer.

    Attributes:
        client: Address that asked, None if it is unknown.
        method: Of HTTP; None, as ``path`` is, for what is not HTTP.
        path: As the client sent it, without its query, which may hold a secret.
        version: Of HTTP.
        status: That was answered; 499 if the client had left.
        size: Bytes of the answer's body.
        ms: From the end of the request's head to the end of the answer; None for what is not HTTP.
        id: As X-Request-ID has it.
        model: That looked at its images, None if none did.
        images: How many it had, 0 if it never came to them.
        batch: Images of the largest batch that they were in.
        decode_ms: See ``core.Timing``, as the next two.
        queue_ms: See ``decode_ms``.
        inference_ms: See ``decode_ms``.
    """

    client: str | None
    status: int
    size: int
    method: str | None = None
    path: str | None = None
    version: str | None = None
    ms: float | None = None
    id: str | None = None
    model: str | None = None
    images: int = 0
    batch: int | None = None
    decode_ms: float | None = None
    queue_ms: float | None = None
    inference_ms: float | None = None


class AccessLog:
    """Writes a line an entry.

    Args:
        style: ``text``, ``json`` or ``off``.
        fd: Where to.

    Attributes:
        on: Whether anything is written.
    """

    def __init__(self, style: str = "text", fd: int = 1) -> None:
        self.on = style != "off"
        self._format = _as_json if style == "json" else _as_text
        self._out = Unbuffered(fd)
        self._lines: deque[str] = deque()
        self._time = "%Y-%m-%dT%H:%M:%SZ" if style == "json" else "%d/%b/%Y:%H:%M:%S +0000"
        self._some = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._second = (-1, "")

    def add(self, entry: Entry) -> None:
        """Logs a request that was answered just now."""
        if not self.on or len(self._lines) >= MOST_LINES:
            return
        self._lines.append(self._format(entry, self._now()))
        if not self._some.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="access", daemon=True)
                self._thread.start()
            self._some.set()

    def close(self) -> None:
        """Writes what is left, if that takes less than a second."""
        self._closed.set()
        self._some.set()
        if self._thread is not None:
            self._thread.join(1)

    def _now(self) -> str:
        second = int(time.time())
        if second != self._second[0]:
            self._second = (second, time.strftime(self._time, time.gmtime(second)))
        return self._second[1]

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._closed.wait(PERIOD)
            self._some.clear()
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            self._out.write("".join(lines))
            if self._closed.is_set() and not self._lines:
                return


def _as_text(entry: Entry, now: str) -> str:
    request = "-"
    if entry.method is not None:
        request = f"{entry.method} {_plain(entry.path or '-')} HTTP/{entry.version}"
    line = f'{_plain(entry.client or "-")} - - [{now}] "{request}" {entry.status} {entry.size}'
    if entry.ms is not None:
        line += f" ms={entry.ms:.1f}"
    if entry.id:
        line += f" id={entry.id}"
    if entry.images:
        line += f" images={entry.images}"
    if entry.model is not None:
        line += (
            f" model={_plain(entry.model)} batch={entry.batch} decode_ms={entry.decode_ms:.1f}"
            f" queue_ms={entry.queue_ms:.1f} inference_ms={entry.inference_ms:.1f}"
        )
    return line + "\n"


def _as_json(entry: Entry, now: str) -> str:
    made: dict[str, Any] = {"time": now}
    for name, value in vars(entry).items():
        if value is not None:
            made[name] = round(value, 3) if isinstance(value, float) else value
    for name in ("client", "path"):
        if name in made:
            made[name] = made[name][:LONGEST]
    return json.dumps(made, separators=(",", ":")) + "\n"


def _plain(text: str) -> str:
    """Makes a word of what came from outside: no spaces, no quotes, no escapes, not too long."""
    return _ODD.sub(lambda odd: f"\\x{ord(odd[0]):02x}", text[:LONGEST])
