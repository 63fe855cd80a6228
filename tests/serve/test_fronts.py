"""Several processes that speak HTTP on one port: one server to its clients."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from tests.serve import faulty  # noqa: E402
from tests.serve.started import ROOT, Server, picture, serving  # noqa: E402

FRONTS, QUEUE, CONNECTIONS = 2, 8, 80
CAT = (ROOT / "examples/cat.jpg").read_bytes()
JPEG = {"Content-Type": "image/jpeg"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = [
        "-m", "tests.serve.faulty", "--model", "resnet-cifar10", "--device", "cpu", "--port", "0",
        f"--front-processes={FRONTS}", f"--max-queue-size={QUEUE}", "--max-batch-size=4",
        "--max-images-per-request=4", "--no-embeddings", f"--max-connections={CONNECTIONS}",
    ]  # fmt: skip
    with serving(argv, tmp_path_factory.mktemp("fronts") / "log") as started:
        started.until(lambda: len(fronts(started)) == FRONTS, "fronts")
        yield started


def test_a_front_imports_nothing_of_max() -> None:
    names = "front, app, core, images, limits, remote, server"
    code = f"import sys; from maxvision.serve import {names}; print('max' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def fronts(server: Server) -> list[int]:
    return server.children("maxvision.serve.front")


def ended(pid: int) -> bool:
    """Tells whether all threads of a process have ended; the last of them closes its files."""
    return not Path(f"/proc/{pid}").exists()


def post(server: Server, data: bytes = CAT) -> httpx.Response:
    """Asks on a connection of its own, which goes to the front that has the fewest."""
    return httpx.post(f"{server.url}/v1/classify", content=data, headers=JPEG, timeout=30)


def test_connections_are_shared_out_and_figures_added_up(server: Server) -> None:
    before = server.metric("maxvision_images_total")
    clients = [httpx.Client(base_url=server.url) for _ in range(2 * FRONTS)]
    for client in clients:
        answer = client.post("/v1/classify", content=CAT, headers=JPEG)
        assert answer.json()["data"][0]["predictions"][0]["label"] == "cat"
    for client in clients:  # whichever front is asked knows of all
        text = client.get("/metrics").text
        total = re.search(r"^maxvision_images_total\{.*\} ([\d.]+)", text, re.M)
        assert total and float(total[1]) == before + len(clients)
        (stats,) = client.get("/v2/models/stats").json()["model_stats"]
        assert stats["inference_count"] == before + len(clients)
        assert 1 <= stats["execution_count"] <= stats["inference_count"]
        assert time.time() - 600 < stats["last_inference"] / 1e3 < time.time() + 1
        client.close()
    line = "POST /v1/classify HTTP/1.1"
    server.until(lambda: server.log.read_text().count(line) >= len(clients), "lines of all", 10)


def test_too_much_is_counted_over_all(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    data = picture(faulty.SLOW)
    request = (
        b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
        b"Content-Length: %d\r\n\r\n" % len(data)
    ) + data
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in range(3 * QUEUE)]
    for client in clients:
        client.sendall(request)
    answers = [client.recv(4096) for client in clients]
    for client in clients:
        client.close()
    statuses = [int(answer[9:12]) for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= QUEUE - FRONTS
    assert all(b"retry-after" in answer.lower() for answer in answers if b" 429 " in answer[:14])
    server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "end of all")
    assert post(server).status_code == 200


def test_slow_and_half_sent_requests_cost_others_nothing(server: Server) -> None:
    """More of them than images may be under way; some of their clients leave."""
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n"
    slow = [socket.create_connection((host, int(port)), timeout=10) for _ in range(6 * QUEUE)]
    for i, connection in enumerate(slow):
        connection.sendall((head + b"Content-Length: %d\r\n\r\n" % len(CAT) + CAT[:999])[: 40 * i])
    for connection in slow[::3]:
        connection.close()
    assert [post(server).status_code for _ in range(QUEUE)] == [200] * QUEUE
    last = slow[-1]  # one that goes on gets its answer
    last.sendall(CAT[999:])
    assert last.recv(20).startswith(b"HTTP/1.1 200 ")
    for connection in slow:
        connection.close()
    server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "end of all")


def test_connections_too_many_are_refused(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS + 20)]
    server.until(lambda: len(answered(idle)) >= 20, "refusals")
    refused = [connection.recv(4096) for connection in answered(idle)]
    assert len(refused) <= 24  # those of other tests are open too
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in answer
    for connection in idle:
        connection.close()
    server.until(lambda: post(server).status_code == 200, "answers")
    assert server.metric("maxvision_rejected_total{", "too_many_connections") >= len(refused)


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    return select.select(connections, [], [], 0)[0]


def test_a_front_that_ends_is_started_anew(server: Server) -> None:
    begun = set(fronts(server))
    lost = min(begun)
    os.kill(lost, signal.SIGKILL)
    server.until(lambda: ended(lost), "its end", 5)
    assert post(server).status_code == 200  # by the other one, or by its successor
    server.until(lambda: len(set(fronts(server)) - {lost}) == FRONTS, "another front")
    server.client.close()
    server.client = httpx.Client(base_url=server.url, timeout=30)
    server.until(lambda: post(server).status_code == 200, "answers")
    assert server.metric("maxvision_images_in_flight") == 0


def test_a_worker_that_ends_is_told_to_all(server: Server) -> None:
    os.kill(server.worker(), signal.SIGKILL)
    with httpx.Client(base_url=server.url) as one, httpx.Client(base_url=server.url) as other:
        for client in (one, other):
            server.until(lambda c=client: c.get("/ready").status_code == 503, "unreadiness", 5)
            assert client.get("/health").status_code == 200
        for client in (one, other):
            server.until(lambda c=client: c.get("/ready").status_code == 200, "readiness")
    assert post(server).status_code == 200


def test_sigterm_lets_the_requests_of_all_end(server: Server) -> None:
    """The last one: it ends the server."""
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(post, server, picture(faulty.SLOW)) for _ in range(4)]
        server.until(lambda: server.metric("maxvision_images_in_flight") == 4, "slow requests")
        server.process.send_signal(signal.SIGTERM)
        assert [answer.result().status_code for answer in slow] == [200] * 4
    assert server.process.wait(20) == 0
    assert not fronts(server)
