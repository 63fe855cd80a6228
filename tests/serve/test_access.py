"""The access log: a line a request, whoever speaks, and nothing in it that is a secret."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from maxvision.common.console import Unbuffered  # noqa: E402
from maxvision.runtime.preprocess import Preprocess  # noqa: E402
from maxvision.serve import access  # noqa: E402
from maxvision.serve.access import LONGEST, AccessLog, Entry  # noqa: E402
from maxvision.serve.app import make_app  # noqa: E402
from maxvision.serve.core import Card  # noqa: E402
from maxvision.serve.images import Decoder  # noqa: E402
from maxvision.serve.instances import Instances  # noqa: E402
from maxvision.serve.models import Models  # noqa: E402
from maxvision.serve.options import Options, parse  # noqa: E402
from maxvision.serve.protocol import http_server  # noqa: E402
from maxvision.serve.remote import Remote, Result  # noqa: E402
from tests.serve.dialects import MODEL, calls  # noqa: E402
from tests.serve.started import Server, picture  # noqa: E402

LABELS = [f"class {i}" for i in range(10)]
KEY = "a-secret-key"
COMMON = re.compile(r'(\S+) - - \[([^]]+)\] "([^"]*)" (\d{3}) (\d+)((?: \w+=\S+)*)')


class Model(Remote):
    """A model's process that is always there and knows nothing."""

    def __init__(self) -> None:
        super().__init__(b"model", 8)
        self.ready = True

    async def submit(self, id: str, pixels: np.ndarray, features: bool = False) -> Result:
        return Result(np.zeros(len(LABELS), np.float32), None, 1.5, 2.5, 4)


def served(*argv: str) -> tuple[Models, Any]:
    """Makes a service and its app, as a server has them behind its port."""
    options: Options = parse(["--model", MODEL, "--api-key", KEY, *argv], {})
    card = Card(MODEL, LABELS, Preprocess(32, 32, 36), False, "resnet", "cpu", "float32")
    models = Models(options)
    models.add(card, options, Instances([Model()]), Decoder(card.preprocess, 10**6, 1), 64)
    config = http_server(make_app(models)).config
    config.load()
    return models, config.loaded_app


@pytest.fixture
def written() -> Iterator[tuple[int, Any]]:
    """A pipe's end to write to, and what reads all that was written."""
    reading, writing = os.pipe()

    def read() -> str:
        os.set_blocking(reading, False)
        return os.read(reading, 10**6).decode()

    yield writing, read
    os.close(reading)
    os.close(writing)


def lines_of(written: Any, *argv: str, client: str = "10.0.0.7", requests: Any) -> list[str]:
    """Sends requests to an app of its own, and returns the lines that it logs."""
    models, app = served(*argv)
    fd, read = written
    models.access._out = Unbuffered(fd)

    async def run() -> None:
        transport = httpx.ASGITransport(app=app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as session:
            session.headers["Authorization"] = f"Bearer {KEY}"
            for request in requests:
                await session.request(**request)

    asyncio.run(run())
    models.close()
    return read().splitlines()


PNG = picture((9, 8, 7))
DIALECTS = [
    {"method": "POST", "url": call.path, "content": call.body, "headers": call.headers}
    for call in calls(PNG, LABELS).values()
]


def test_every_dialect_is_logged_the_same(written: Any) -> None:
    lines = lines_of(written, "--access-log=json", requests=DIALECTS)
    assert len(lines) == len(DIALECTS)
    for line, request in zip(map(json.loads, lines), DIALECTS, strict=True):
        assert (line["client"], line["method"]) == ("10.0.0.7", "POST")
        assert (line["path"], line["status"]) == (request["url"], 200)
        assert (line["model"], line["images"], line["batch"]) == (MODEL, 1, 4)
        assert (line["queue_ms"], line["inference_ms"]) == (1.5, 2.5)
        assert line["size"] > 0 and 0 < line["decode_ms"] <= line["ms"] < 60_000
        assert re.fullmatch(r"[0-9a-f]{32}", line["id"])
        assert time.strptime(line["time"], "%Y-%m-%dT%H:%M:%SZ")


ERRORS = [
    ({"method": "POST", "url": "/v1/classify", "content": b"no picture"}, 415),
    ({"method": "POST", "url": "/", "content": b"no picture"}, 400),
    ({"method": "POST", "url": "/v2/models/other/infer", "json": {}}, 404),
    ({"method": "GET", "url": "/nothing"}, 404),
    ({"method": "PUT", "url": "/ready"}, 405),
    ({"method": "GET", "url": "/version", "headers": {"Authorization": "Bearer x"}}, 401),
]


def test_errors_are_logged_too(written: Any) -> None:
    lines = lines_of(written, requests=[request for request, _ in ERRORS])
    for line, (request, status) in zip(lines, ERRORS, strict=True):
        found = COMMON.fullmatch(line)
        assert found, line
        client, when, asked, said, size, more = found.groups()
        assert (client, int(said)) == ("10.0.0.7", status)
        assert asked == f"{request['method']} {request['url']} HTTP/1.1"
        assert int(size) > 20 and " ms=" in more and "model=" not in more
        assert time.strptime(when, "%d/%b/%Y:%H:%M:%S +0000")


def test_nothing_secret_is_logged(written: Any) -> None:
    text = base64.b64encode(PNG).decode()
    requests = [
        {"method": "POST", "url": f"/?api_key={KEY}", "content": PNG,
         "headers": {"Content-Type": "image/png", "X-API-Key": KEY, "Cookie": f"a={KEY}"}},
        {"method": "POST", "url": "/v1/classify", "json": {"images": [text]}},
    ]  # fmt: skip
    lines = lines_of(written, requests=requests)
    assert len(lines) == 2
    for line in lines:
        assert KEY not in line and text[:16] not in line and "api_key" not in line
        assert " 200 " in line


def test_a_client_writes_no_lines_of_its_own(written: Any) -> None:
    nasty = '/a%0a127.0.0.1%22"\\é' + "x" * 9999
    forged = {"X-Forwarded-For": '6.6.6.6" 200 1\x1b[2J'}
    requests = [{"method": "GET", "url": nasty, "headers": forged}]
    (line,) = lines_of(written, "--forwarded-allow-ips=*", requests=requests)
    assert COMMON.fullmatch(line), line
    assert "\x1b" not in line and len(line) < 6 * LONGEST


@pytest.mark.parametrize(
    ("argv", "client"),
    [
        ([], "10.0.0.7"),
        (["--forwarded-allow-ips=10.0.0.0/8"], "203.0.113.9"),
        (["--forwarded-allow-ips=10.0.0.7", "--forwarded-allow-ips=::1"], "203.0.113.9"),
        (["--forwarded-allow-ips=10.0.0.8"], "10.0.0.7"),
        (["--forwarded-allow-ips=*"], "6.6.6.6"),
    ],
)
def test_a_proxy_is_believed_if_it_is_trusted(written: Any, argv: list[str], client: str) -> None:
    header = {"X-Forwarded-For": "6.6.6.6, 203.0.113.9"}
    requests = [{"method": "GET", "url": "/health", "headers": header}]
    (line,) = lines_of(written, *argv, requests=requests)
    assert line.startswith(f"{client} - - ")


def test_it_can_be_off(capfd: pytest.CaptureFixture[str]) -> None:
    models, _ = served("--access-log=off")
    assert not models.access.on
    models.access.add(Entry("x", 200, 1))
    models.close()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("value", ["10.0.0.1/8", "localhost", ""])
def test_what_is_no_proxy_is_told(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(["--model", MODEL, f"--forwarded-allow-ips={value}"], {})
    assert stop.value.code == 2
    assert "neither an address nor a network" in capsys.readouterr().err


def test_proxies_come_from_the_environment() -> None:
    environ = {"MAXVISION_FORWARDED_ALLOW_IPS": "10.0.0.1,::1", "MAXVISION_ACCESS_LOG": "json"}
    options = parse(["--model", MODEL], environ)
    assert options.forwarded_allow_ips == ("10.0.0.1", "::1")
    assert options.access_log == "json"


def test_whoever_does_not_read_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is full: lines wait, then are lost, and the end comes in time."""
    monkeypatch.setattr(access, "MOST_LINES", 3000)
    reading, writing = os.pipe()
    log = AccessLog("json", writing)
    begun = time.monotonic()
    for _ in range(9000):
        log.add(Entry("10.0.0.7", 200, 1, "GET", "/health", "1.1", 1.0, "id"))
    log.close()
    assert time.monotonic() - begun < 20
    assert len(log._lines) <= 3000
    os.close(reading)  # its thread gets EPIPE, and ends


def test_a_real_server_logs(plain: Server) -> None:
    """What is no HTTP too; and images that were looked at."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "TIFF")
    headers = {"Content-Type": "image/tiff"}
    answer = plain.client.post("/v1/classify", content=file.getvalue(), headers=headers)
    assert answer.status_code == 200, answer.text
    host, port = plain.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    id = answer.headers["x-request-id"]

    def logged() -> list[str]:
        lines = plain.log.read_text().splitlines()
        ours = [i for i, line in enumerate(lines) if f"id={id} " in line]
        return lines[ours[0] :] if ours and any('"-" 400 ' in each for each in lines) else []

    line = plain.until(logged, "lines", 10)[0]
    found = COMMON.fullmatch(line)
    assert found and found[1] == "127.0.0.1" and found[3] == "POST /v1/classify HTTP/1.1"
    assert int(found[5]) == len(answer.content)
    assert f" images=1 model={MODEL} batch=1 " in line


def test_the_log_is_written_somewhere_else_than_errors(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        log = AccessLog("text", file.fileno())
        log.add(Entry(None, 431, 7))
        log.close()
    assert COMMON.fullmatch(path.read_text().rstrip("\n"))
