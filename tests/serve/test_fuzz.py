"""Nothing that is sent makes the server fail: short; ``python -m tests.serve.fuzz`` goes on."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from unittest import mock

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("httpx")

from tests.serve import attacks, fuzz
from tests.serve.started import Server, picture

EXAMPLES, ATTACKS = 15, 200
BODY_TIMEOUT = 2.0  # of the server ``plain``


def test_requests_by_the_description(plain: Server) -> None:
    pytest.importorskip("schemathesis", reason="pip install '.[test]'")
    for operation in fuzz.operations(plain):
        fuzz.try_operation(operation, EXAMPLES, seed=1)
    fuzz.check(plain)


def test_bytes_on_the_socket(plain: Server) -> None:
    seen = fuzz.try_sockets(plain, range(ATTACKS))
    for kind in attacks.ATTACKS:
        assert any(each.startswith(f"{kind.__name__} ") for each in seen)
    assert seen["headers 431"]


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_heads_that_do_not_end_cost_nothing(plain: Server) -> None:
    """Many idle and half-sent heads: others are answered, and they are closed in time."""
    with ExitStack() as stack:
        held = []
        for i in range(200):
            connection = stack.enter_context(socket.create_connection(address(plain), timeout=20))
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nX" * (i % 2))
            held.append(connection)
        begun = time.monotonic()
        answer = plain.client.post("/", content=picture((7, 7, 7)))
        assert answer.status_code == 200
        for i, connection in enumerate(held):
            got = connection.recv(1000)
            assert got.startswith(b"HTTP/1.1 408 ") if i % 2 else got == b""
        assert time.monotonic() - begun < 5 * BODY_TIMEOUT


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"GET /health HTTP/1.1\r\nX: ", b"a"),
        (b"", b"\r\n"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n", b"a"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a"),
    ],
    ids=["head", "empty lines", "body", "chunks", "trailer"],
)
def test_a_drip_ends(plain: Server, start: bytes, drop: bytes) -> None:
    begun = time.monotonic()
    with socket.create_connection(address(plain), timeout=0.1) as connection:
        connection.sendall(start)
        while time.monotonic() - begun < 4 * BODY_TIMEOUT:
            try:
                connection.sendall(drop)
                if (got := connection.recv(1000)) or not got:
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it drips on")
    assert time.monotonic() - begun > 0.9 * BODY_TIMEOUT


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["head", "trailer"],
)
def test_a_flood_is_cut(plain: Server, start: bytes) -> None:
    sent = 0
    with socket.create_connection(address(plain), timeout=10) as connection:
        connection.sendall(start)
        try:
            while sent < 2**26:
                sent += connection.send(bytes(b"a" * 65536))
        except ConnectionError:
            pass
    assert sent < 2**24
    fuzz.check(plain)


def test_nothing_is_written_after_the_end() -> None:
    """The app of a request is not done when what follows the request is no HTTP."""
    import uvicorn
    from uvicorn.server import ServerState

    from maxvision.serve.protocol import protocol

    async def app(scope: dict, receive: object, send) -> None:  # type: ignore[no-untyped-def]
        head = {"type": "http.response.start", "status": 200, "headers": []}
        await send(head)
        await send({"type": "http.response.body", "body": b"late"})

    async def run() -> tuple[list[bytes], object]:
        closing = []
        transport = mock.Mock()
        transport.get_extra_info.return_value = None
        transport.close.side_effect = lambda: closing.append(True)
        transport.is_closing.side_effect = lambda: bool(closing)
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        made = protocol(1.0, 9, lambda *_: None)(
            config=config, server_state=ServerState(), app_state={}
        )
        made.connection_made(transport)
        made.data_received(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        await asyncio.gather(*made.tasks)
        written = [each.args[0] for each in transport.write.call_args_list]
        made.connection_lost(None)
        return written, closing

    written, closing = asyncio.run(run())
    assert [each[:13] for each in written] == [b"HTTP/1.1 400 "]
    assert closing
