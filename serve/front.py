"""One of several processes that speak HTTP on one port: ``-m maxvision.serve.front FD``.

The server's own process (``serve.fronts``) starts it, with a socket on which it sends the settings,
then accepted connections one by one, and word of the models' processes; back goes which model
clients want loaded or unloaded. Nothing of MAX is imported here: a front starts in a second and
weighs 150 MB.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from maxvision.common.host import leave
from maxvision.serve.core import Card
from maxvision.serve.errors import Refusal, ending
from maxvision.serve.options import Options

MESSAGE = 2**17
"""Bytes of a message at most."""


@dataclass(frozen=True)
class Hello:
    """What a front is told first, with the board's descriptor.

    Attributes:
        cards: What is known of each model.
        options: What the server was told.
        queues: Images of each model that may be under way in all fronts.
        instances: Processes that run each model.
        rows: Of the board.
        row: That of this front.
        threads: That decode, here.
    """

    cards: tuple[Card, ...]
    options: Options
    queues: tuple[int, ...]
    instances: tuple[int, ...]
    rows: int
    row: int
    threads: int


@dataclass(frozen=True)
class ProcessState:
    """What a front is told of a process that runs a model.

    Attributes:
        address: Where it listens, None if there is none or it is not ready.
        starts: How often it was started.
        batch_limit: Images that run together at most.
        busy: See ``Remote``.
        decoding: See ``Remote``.
    """

    address: str | None
    starts: int
    batch_limit: int
    busy: float
    decoding: float


@dataclass(frozen=True)
class ModelState:
    """What a front is told of a model.

    Attributes:
        loaded: Whether there should be processes that run it.
        processes: Each of them.
    """

    loaded: bool
    processes: tuple[ProcessState, ...]


@dataclass(frozen=True)
class State:
    """What a front is told whenever it changes.

    Attributes:
        models: How each model is, by what clients call it.
        draining: Whether the server is about to end.
    """

    models: dict[str, ModelState] = field(default_factory=dict)
    draining: bool = False


class Change(msgspec.Struct):
    """What a front asks for: to load a model, or to unload it.

    Attributes:
        number: Of this wish, among those of the front.
        model: What clients call it.
        loaded: Whether it is to be loaded.
    """

    number: int
    model: str
    loaded: bool


@dataclass(frozen=True)
class Changed:
    """What came of a wish: status, code and message of a refusal, or nothing."""

    number: int
    refused: tuple[int, str, str] | None = None


class Front:
    """Serves the connections that come through ``channel``, until that is closed."""

    def __init__(self, channel: socket.socket) -> None:
        from maxvision.serve.app import make_app
        from maxvision.serve.images import Decoder
        from maxvision.serve.instances import Instances
        from maxvision.serve.limits import Board
        from maxvision.serve.models import Models
        from maxvision.serve.protocol import http_server
        from maxvision.serve.remote import Remote

        _, (fd, said), *_ = socket.recv_fds(channel, 1, 2)
        with open(said, "rb") as file:
            hello: Hello = pickle.load(file)
        logging.getLogger("maxvision").setLevel(hello.options.log_level.upper())
        channel.setblocking(False)
        self._channel = channel
        options = hello.options
        self._board = Board(hello.rows, hello.row, fd, len(hello.cards))
        self._models = Models(options, self._board)
        self._instances: dict[str, Instances] = {}
        decoder = None
        identity, threads = f"front-{hello.row}-{os.getpid()}".encode(), hello.threads
        for card, each, queue, count in zip(
            hello.cards, options.models, hello.queues, hello.instances, strict=True
        ):
            instances = Instances([Remote(identity) for _ in range(count)])
            self._instances[card.name] = instances
            decoder = Decoder(card.preprocess, options.max_pixels, threads, decoder, card.decodes)
            self._models.add(card, each, instances, decoder, queue)
        if options.model_control_mode == "explicit":
            self._models.change = self._change
        self._number = 0  # of wishes
        self._wishes: dict[int, asyncio.Future[None]] = {}
        self._http = http_server(make_app(self._models))
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
        from maxvision.serve.protocol import over_grpc

        async with over_grpc(self._models):
            await self._http.serve(sockets=[])
        self._models.close()

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

    def _hear(self, said: State | Changed) -> None:
        if isinstance(said, Changed):
            wish = self._wishes.pop(said.number)
            if wish.done():
                return
            if said.refused:
                wish.set_exception(Refusal(*said.refused))
            else:
                wish.set_result(None)
            return
        self._models.draining = said.draining
        for name, model in said.models.items():
            instances = self._instances[name]
            instances.loaded = model.loaded
            for remote, state in zip(instances.members, model.processes, strict=True):
                remote.starts = state.starts
                remote.batch_limit = state.batch_limit
                remote.busy, remote.decoding = state.busy, state.decoding
                if state.address != remote.address:
                    remote.ready = state.address is not None
                    remote.connect(state.address)

    async def _change(self, model: str, loaded: bool) -> None:
        """Asks the server's process to load or unload a model, and waits until it has.

        Raises:
            Refusal: If it cannot.
        """
        number = self._number = self._number + 1
        wish = self._wishes[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(msgspec.json.encode(Change(number, model, loaded)))
        except OSError:
            del self._wishes[number]
            raise ending() from None
        await wish


def main() -> None:
    """Runs a front on the socket that the command line names."""
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when it is over
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    front = Front(socket.socket(fileno=int(sys.argv[1])))
    gc.freeze()  # what stays needs no passes over it, which would hold up requests
    uvloop.run(front.run())
    leave(0)


if __name__ == "__main__":
    from maxvision.serve import front  # by its name, by which messages are told apart

    front.main()
