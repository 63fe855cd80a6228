"""Drives a server over HTTP from several processes: what arrives when, and what it came to.

A closed loop keeps a number of requests under way. An open loop sends at random moments, as many
independent users do (Poisson), whether or not earlier answers have come; a latency counts from the
moment at which its request was due, so that a server that stalls is not spared.
"""

from __future__ import annotations

import asyncio
import collections
import multiprocessing
import os
import re
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

CONNECTIONS = 1024
"""Connections of a process in an open loop at most; what is due beyond them waits, and counts."""

WARM = 1.0
"""Seconds of a load that are not measured, ahead of those that are."""

PATIENCE = 2.0
"""Seconds that an open loop waits for answers after its end; what has none then is counted."""

BROKEN, UNANSWERED = 0, -1


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes:
        url: Of the route.
        bodies: Requests' bodies, sent in turn.
        answers: What must be found in the answer of each: the class and the score.
        kind: Their content type.
        seconds: That are measured, after ``WARM`` that are not.
        concurrency: Requests under way, of a closed loop.
        rate: Requests a second, of an open loop; 0 for a closed one.
        processes: That send.
    """

    url: str
    bodies: list[bytes]
    answers: list[tuple[int, float]]
    kind: str
    seconds: float
    concurrency: int = 1
    rate: float = 0.0
    processes: int = 1


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        seconds: That were measured.
        latencies: Of right answers, s.
        statuses: How many answers had each status, ``BROKEN`` connections and ``UNANSWERED``
            requests of an open loop among them.
        wrong: Answers with another class, or another score, than expected.
        late: By how much requests of an open loop were sent late, s, at the worst.
    """

    seconds: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    wrong: int = 0
    late: float = 0.0


def drive(plan: Plan) -> Outcome:
    """Sends what the plan says."""
    context = multiprocessing.get_context("spawn")
    count = max(1, min(plan.processes, plan.concurrency if not plan.rate else plan.processes))
    begin = time.time() + 0.5 + 0.2 * count
    with context.Pool(count) as pool:
        parts = pool.starmap(_run, [(plan, i, count, begin) for i in range(count)])
    whole = Outcome(plan.seconds)
    for part in parts:
        whole.latencies.extend(part.latencies)
        whole.statuses.update(part.statuses)
        whole.wrong += part.wrong
        whole.late = max(whole.late, part.late)
    return whole


def figures(outcome: Outcome, slo_ms: float) -> dict[str, Any]:
    """Sums an outcome up: throughput, goodput within the SLO, latencies in ms, statuses."""
    ms = 1e3 * np.array(outcome.latencies)
    found: dict[str, Any] = {
        "requests_per_s": round(len(ms) / outcome.seconds, 2),
        "goodput_per_s": round(int((ms <= slo_ms).sum()) / outcome.seconds, 2),
        "statuses": {str(status): n for status, n in sorted(outcome.statuses.items())},
        "wrong": outcome.wrong,
    }
    if len(ms):
        for p in (50, 90, 99, 99.9):
            found[f"p{p:g}_ms"] = round(float(np.percentile(ms, p)), 3)
    if outcome.late:
        found["sent_late_ms"] = round(1e3 * outcome.late, 3)
    return found


def _run(plan: Plan, index: int, of: int, begin: float) -> Outcome:
    import uvloop

    return uvloop.run(_Sender(plan, index, of, begin).run())


class _Connection(asyncio.Protocol):
    """A connection that is kept: one request at a time."""

    def __init__(self) -> None:
        self.open = True
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._data = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._data[:end]).lower()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._data) < size or self._answer is None:
            return
        answer, self._answer = self._answer, None
        body = bytes(self._data[end + 4 : size])
        del self._data[:size]
        if b"\r\nconnection: close" in head:
            self.open = False
            self._transport.close()
        if not answer.done():
            answer.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._answer and not self._answer.done():
            self._answer.set_result((BROKEN, b""))

    def request(self, data: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answer


class _Sender:
    def __init__(self, plan: Plan, index: int, of: int, begin: float) -> None:
        self._plan = plan
        self._index = index
        self._of = of
        self._begin = begin
        parts = urlsplit(plan.url)
        self._where = (parts.hostname or "localhost", parts.port or 80)
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: {plan.kind}\r\n"
        )
        self._requests = [
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in plan.bodies
        ]
        self._idle: list[_Connection] = []
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._out = Outcome()

    async def run(self) -> Outcome:
        """Waits for the common beginning, warms up for a second, and measures."""
        rng = np.random.default_rng(self._index)
        await asyncio.sleep(self._begin - time.time())
        self._from = time.perf_counter() + WARM
        self._to = self._from + self._plan.seconds
        if self._plan.rate:
            await self._open_loop(rng)
        else:
            share = range(self._index, self._plan.concurrency, self._of)
            await asyncio.gather(*(self._closed_loop(int(rng.integers(1 << 30))) for _ in share))
        return self._out

    async def _closed_loop(self, turn: int) -> None:
        while time.perf_counter() < self._to:
            await self._one(turn, time.perf_counter())
            turn += 1

    async def _open_loop(self, rng: np.random.Generator) -> None:
        due = time.perf_counter()
        tasks = set()
        turn = int(rng.integers(1 << 30))
        while due < self._to:
            due += rng.exponential(self._of / self._plan.rate)
            wait = due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            elif due > self._from:
                self._out.late = max(self._out.late, -wait)
            turn += 1
            task = asyncio.ensure_future(self._one(turn, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        _, unanswered = await asyncio.wait(tasks, timeout=PATIENCE)
        for task in unanswered:
            task.cancel()
        if unanswered:
            self._out.statuses[UNANSWERED] += len(unanswered)

    async def _one(self, turn: int, due: float) -> None:
        turn %= len(self._requests)
        async with self._free:
            while self._idle and not self._idle[-1].open:
                self._idle.pop()
            try:
                if self._idle:
                    connection = self._idle.pop()
                else:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(_Connection, *self._where)
                status, body = await connection.request(self._requests[turn])
                if connection.open:
                    self._idle.append(connection)
            except OSError:
                status, body = BROKEN, b""
        end = time.perf_counter()
        if not self._from <= due < self._to:
            return
        self._out.statuses[status] += 1
        if status == 200:
            if right(body, self._plan.answers[turn]):
                self._out.latencies.append(end - due)
            else:
                self._out.wrong += 1
        else:
            await asyncio.sleep(0.01 if not self._plan.rate else 0)


_BEST = re.compile(rb'"class_id": ?(\d+), ?"score": ?([\d.e+-]+)')


def right(body: bytes, answer: tuple[int, float], tolerance: float = 0.1) -> bool:
    """Tells whether an answer's best class is the expected one, with about its score."""
    found = _BEST.search(body)
    return (
        found is not None
        and int(found[1]) == answer[0]
        and abs(float(found[2]) - answer[1]) <= tolerance * answer[1] + 1e-3
    )


def null_server(port: int, answer: bytes) -> None:
    """Answers every request with the same, in this process, until it is ended."""
    import socket

    import uvloop

    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()

    class Null(asyncio.Protocol):
        def __init__(self) -> None:
            self._left = 0

        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            if not self._left:
                end = data.find(b"\r\n\r\n")
                length = re.search(rb"[Cc]ontent-[Ll]ength: (\d+)", data[:end])
                assert length
                self._left = int(length[1]) + end + 4
            self._left -= len(data)
            if not self._left:
                self._transport.write(head + answer)

    async def serve() -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", port))
        server = await asyncio.get_running_loop().create_server(Null, sock=listening, backlog=2048)
        await server.serve_forever()

    uvloop.run(serve())


def ceiling(plan: Plan, servers: int) -> Outcome:
    """Drives servers that do nothing: what the senders could reach at most."""
    import socket

    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        best = b'{"class_id":%d,"score":%f}' % plan.answers[0]
        started = [
            context.Process(target=null_server, args=(port, best), daemon=True)
            for _ in range(servers)
        ]
        for process in started:
            process.start()
        try:
            _wait(port)
            url = f"http://127.0.0.1:{port}/"
            same = [plan.answers[0]] * len(plan.bodies)
            return drive(
                Plan(url, plan.bodies, same, plan.kind, plan.seconds, 64, 0.0, plan.processes)
            )
        finally:
            for process in started:
                process.kill()


def _wait(port: int) -> None:
    import socket

    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the null server did not start")


def decode_ceiling(files: list[bytes], prepare: Any, processes: int, seconds: float) -> float:
    """Decodes and preprocesses in as many processes, and nothing else; images a second."""
    context = multiprocessing.get_context("spawn")
    begin = time.time() + 1 + 0.3 * processes
    with context.Pool(processes) as pool:
        counts = pool.starmap(_decode, [(files, prepare, begin, seconds)] * processes)
    return sum(counts) / seconds


def _decode(files: list[bytes], prepare: Any, begin: float, seconds: float) -> int:
    prepare(files[0])
    time.sleep(max(0.0, begin - time.time()))
    count = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        prepare(files[count % len(files)])
        count += 1
    return count


def cpu_seconds(root: int) -> dict[str, float]:
    """Tells the CPU time of each thread of a process and of all it started that still run.

    Returns:
        Seconds by the process's number and the thread's.
    """
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                parents[int(name)] = int(_stat(Path("/proc", name))[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    spent = {}
    for pid in family:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):  # it has ended
                fields = _stat(thread)
                ticks = int(fields[11]) + int(fields[12])
                spent[f"{pid}.{thread.name}"] = ticks / os.sysconf("SC_CLK_TCK")
    return spent


def _stat(folder: Path) -> list[str]:
    """Reads what Linux knows of a process or a thread, from its state on (proc(5))."""
    return (folder / "stat").read_text().rpartition(")")[2].split()
