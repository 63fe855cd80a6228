"""One of several processes that speak HTTP on one port: ``-m maxvision.serve.front FD``.

The server's own process (``serve.fronts``) starts it, with a socket on which it sends the settings,
then accepted connections one by one, and word of the model's process. Nothing of MAX is imported
here: a front starts in a second and weighs 150 MB.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from maxvision.common.host import leave
from maxvision.serve.core import Card
from maxvision.serve.options import Options

MESSAGE = 2**17
"""Bytes of a message at most."""


@dataclass(frozen=True)
class Hello:
    """What a front is told first, with the board's descriptor.

    Attributes:
        card: What is known of the model.
        options: What the server was told.
        queue: Images that may be under way in all fronts.
        rows: Of the board.
        row: That of this front.
        threads: That decode, here.
    """

    card: Card
    options: Options
    queue: int
    rows: int
    row: int
    threads: int


@dataclass(frozen=True)
class State:
    """What a front is told whenever it changes.

    Attributes:
        address: Of the model's process, None if there is none or it is not ready.
        starts: How often such a process was started.
        batch_limit: Images that run together at most.
        draining: Whether the server is about to end.
    """

    address: str | None = None
    starts: int = 0
    batch_limit: int = 0
    draining: bool = False


class Front:
    """Serves the connections that come through ``channel``, until that is closed."""

    def __init__(self, channel: socket.socket) -> None:
        from maxvision.serve.app import make_app
        from maxvision.serve.core import Service
        from maxvision.serve.images import Decoder
        from maxvision.serve.limits import Board
        from maxvision.serve.protocol import http_server
        from maxvision.serve.remote import Remote

        data, (fd,), *_ = socket.recv_fds(channel, MESSAGE, 1)
        hello: Hello = pickle.loads(data)
        logging.getLogger("maxvision").setLevel(hello.options.log_level.upper())
        channel.setblocking(False)
        self._channel = channel
        self._board = Board(hello.rows, hello.row, fd)
        self._remote = Remote(f"front-{hello.row}-{os.getpid()}".encode())
        options = hello.options
        decoder = Decoder(hello.card.preprocess, options.max_pixels, hello.threads)
        self._service = Service(
            hello.card, options, self._remote, decoder, hello.queue, self._board
        )
        self._http = http_server(make_app(self._service))
        self._http.handle_exit = lambda *_: None

    async def run(self) -> None:
        """Serves until the server says that it is over, or is gone."""
        loop = asyncio.get_running_loop()
        config = self._http.config
        config.load()
        board = self._board

        class Counted(config.http_protocol_class):  # type: ignore[name-defined]
            def connection_lost(self, error: Exception | None) -> None:
                board.add(board.CLOSED, 1)
                super().connection_lost(error)

        def protocol() -> Any:
            return Counted(config=config, server_state=self._http.server_state, app_state={})

        self._protocol = protocol
        self._connecting: set[asyncio.Task[Any]] = set()
        loop.add_reader(self._channel.fileno(), self._read)
        board.add(board.UP, 1)
        await self._http.serve(sockets=[])
        self._service.close()

    def _read(self) -> None:
        while True:
            try:
                data, fds, *_ = socket.recv_fds(self._channel, MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if fds:
                self._connect(socket.socket(fileno=fds[0]))
            elif data:
                self._hear(pickle.loads(data))
            else:
                asyncio.get_running_loop().remove_reader(self._channel.fileno())
                self._http.should_exit = True
                return

    def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._connected(loop, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it is gone already
            connection.close()
            self._board.add(self._board.CLOSED, 1)

    def _hear(self, state: State) -> None:
        self._service.draining = state.draining
        self._remote.starts = state.starts
        self._remote.batch_limit = state.batch_limit
        if state.address != self._remote.address:
            self._remote.ready = state.address is not None
            self._remote.connect(state.address)


def main() -> None:
    """Runs a front on the socket that the command line names."""
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when it is over
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    front = Front(socket.socket(fileno=int(sys.argv[1])))
    uvloop.run(front.run())
    leave(0)


if __name__ == "__main__":
    main()
