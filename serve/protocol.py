"""Servers: uvicorn's, with bounds that it lacks, how long and how large a head may be; gRPC's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from maxvision.serve.access import Entry
from maxvision.serve.errors import Refusal, too_many_connections
from maxvision.serve.limits import open_files

log = logging.getLogger("maxvision.serve")

FILES = 256
"""Files that a process may need beside its connections."""

HEAD_BYTES = 65536
"""Bytes that may come without a head's end or a piece of a body among them: heads, trailers."""

GRACE = 1.0
"""Seconds for which the last answers of gRPC are sent; calls were waited for before."""

LINGER = 1.0
"""Seconds for which a connection too many is read on, so that its client sees the answer."""


Refused: TypeAlias = Callable[[Refusal, "str | None", int], None]


class Protocol(HttpToolsProtocol):
    """Reads the requests of one connection.

    Attributes:
        seconds: What a head may take, from the connection's beginning or its own first byte.
        most: Connections that this process may hold.
        refused: Is called with what is refused here, where no app counts and logs it, with the
            client's address and the bytes of the answer's body.
    """

    seconds = 30.0
    most = 4096
    refused: Refused = staticmethod(lambda *_: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._heading = True
        self._begun = False
        self._surplus = False
        self._quiet = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first head, unless it is one connection too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._surplus = True
            self._write(too_many_connections())
            self._timer = self.loop.call_later(LINGER, transport.close)
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, if not too much came without anything in it."""
        if self.transport.is_closing() or self._surplus:
            return
        if self._heading:
            self._arm()
        self._quiet += len(data)
        super().data_received(data)
        if self._quiet > HEAD_BYTES:
            self._end(
                Refusal(
                    431,
                    "head_too_large",
                    f"the head is larger than {HEAD_BYTES:,} bytes; send fewer or shorter headers",
                )
            )

    def on_message_begin(self) -> None:
        """Notes that a head has begun."""
        super().on_message_begin()
        self._heading = self._begun = True
        self._arm()

    def on_headers_complete(self) -> None:
        """Hands the request to the app."""
        self._heading = self._begun = False
        self._quiet = 0
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hands a piece of a body to the app."""
        self._quiet = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expects another head."""
        self._heading = True
        self._quiet = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP."""
        self._end(
            Refusal(400, "invalid_http", "the request is not valid HTTP/1.1; check the client")
        )

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._answering():
            self._arm()
        elif self._begun:
            message = f"the head did not arrive within {self.seconds:g} s; send it faster"
            self._end(Refusal(408, "head_timeout", message))
        else:
            self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self, refusal: Refusal) -> None:
        """Closes the connection, with an answer if none is under way."""
        if self.transport.is_closing():
            return
        if not self._answering() or not self.cycle.response_started:
            self._write(refusal)
        self.transport.close()
        if self._answering():  # its app must not write any more, and learns that it need not
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _write(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.body("")).encode()
        self.refused(refusal, self.client[0] if self.client else None, len(body))
        status = HTTPStatus(refusal.status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **refusal.headers(),
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)


def protocol(seconds: float, connections: int, refused: Refused) -> type[Protocol]:
    """Makes a protocol with its bounds; see the attributes of ``Protocol``."""
    bounds = {"seconds": seconds, "most": connections, "refused": staticmethod(refused)}
    return type("Protocol", (Protocol,), bounds)


def http_server(app: Any) -> Any:
    """Makes a uvicorn server of an app."""
    models = app.state.models
    options = models.options
    share = -(-options.max_connections // models.board.rows)
    connections = min(share, open_files(share + FILES) - FILES)
    if connections < share:
        log.warning("room for %d files: %d connections at most", connections + FILES, connections)

    def refused(refusal: Refusal, client: str | None, size: int) -> None:
        models.metrics.rejected.labels(refusal.code).inc()
        models.access.add(Entry(client, refusal.status, size))

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            http=protocol(options.body_timeout, connections, refused),
            proxy_headers=False,  # the app believes what it was told to
            log_level="error",  # what is not HTTP is no line each
            ws="none",
            timeout_keep_alive=120,
            timeout_graceful_shutdown=5,
        )
    )


@asynccontextmanager
async def over_grpc(models: Any) -> AsyncIterator[None]:
    """Answers over gRPC, too, while the block runs, if the options say so."""
    if (port := models.options.grpc_port) is None:
        yield
        return
    from maxvision.serve import rpc

    server = await rpc.start(models, models.options.host, port)
    try:
        yield
    finally:
        await server.stop(GRACE)
