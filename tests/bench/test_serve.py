"""What drives a server: it notices wrong answers, counts what fails, times from the due moment."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("uvloop")

from maxvision.bench import load
from maxvision.bench.__main__ import main

ANSWER = b'{"class_id":3,"score":0.5}'


@contextmanager
def server(handle: Callable[[int], tuple[int, float, bytes]]) -> Iterator[str]:
    """Answers the nth request with a status, after some seconds, with a body."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    place: list[int] = []
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                count += 1
                status, seconds, body = handle(count)
                await asyncio.sleep(seconds)
                size = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(size.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        place.append(listening.sockets[0].getsockname()[1])
        started.set()
        await asyncio.Event().wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    started.wait()
    yield f"http://127.0.0.1:{place[0]}/v1/classify"


def plan(url: str) -> load.Plan:
    return load.Plan(url, [b"a", b"b"], [(3, 0.5), (3, 0.5)], "image/jpeg", 0.5)


def test_wrong_answers_and_refusals_are_counted() -> None:
    kinds = [
        (200, 0.002, ANSWER), (200, 0.002, ANSWER.replace(b"3", b"4")),
        (200, 0.002, ANSWER.replace(b"0.5", b"0.9")), (429, 0.002, b"{}"),
    ]  # fmt: skip
    with server(lambda n: kinds[n % 4]) as url:
        found = load.drive(replace(plan(url), concurrency=2))
    assert set(found.statuses) == {200, 429}
    assert found.wrong == pytest.approx(2 * len(found.latencies), abs=4)
    assert found.wrong + len(found.latencies) == found.statuses[200]


def test_a_stall_counts_for_all_that_were_due() -> None:
    with server(lambda n: (200, 0.0, ANSWER)) as url:
        quick = load.figures(load.drive(replace(plan(url), rate=100)), 50)
    assert 20 < quick["statuses"]["200"] < 90
    with server(lambda n: (200, 10.0, ANSWER)) as url:
        stalled = load.figures(load.drive(replace(plan(url), rate=20)), 50)
    assert stalled["requests_per_s"] == stalled["goodput_per_s"] == 0
    assert stalled["statuses"]["-1"] > 0


@pytest.mark.nightly  # by day a stand-in is driven, and tests/serve asks our server
def test_a_server_of_ours_is_driven(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    argv = [
        "serve", "--model", "resnet-cifar10", "--servers", "maxvision", "--bodies", "bytes",
        "--concurrency", "2", "--seconds", "1", "--pictures", "2", "--json", str(file),
    ]  # fmt: skip
    assert main(argv) == 0
    found = json.loads(file.read_text())
    (record,) = found["records"]
    assert record["statuses"] == {"200": record["statuses"]["200"]}
    assert record["wrong"] == 0 < record["p50_ms"] <= record["p99_ms"]
    assert found["environment"]["senders_reach_per_s"] > record["requests_per_s"]
    assert 0 < record["busiest_thread"] <= record["cpu_cores"]


def test_cpu_time_is_told_by_thread() -> None:
    end = threading.Event()
    idle = threading.Thread(target=end.wait)
    idle.start()
    while time.thread_time() < 0.2:  # of this thread
        pass
    spent = load.cpu_seconds(os.getpid())
    end.set()
    here, there = (f"{os.getpid()}.{id}" for id in (threading.get_native_id(), idle.native_id))
    assert spent[here] >= 0.15
    assert spent[there] < 0.05


def test_a_request_is_taken_apart() -> None:
    pytest.importorskip("numba")
    from maxvision.bench import stages
    from maxvision.bench.serve import pictures

    found = stages.measure("resnet-cifar10", pictures(500, 375, 2), 0.5)
    assert list(found) == [
        "HTTP and JSON", "limits, figures, ranking", "decode", "resize", "queue and copies",
    ]  # fmt: skip
    assert 0.2 < found["decode"] < 20
    assert all(0 < value < 20 for value in found.values())
