"""Keeps several processes that speak HTTP on one port, and one that computes.

This process accepts connections and hands each to the front that has the fewest; the kernel's own
way to share a port (SO_REUSEPORT) draws lots, and loses what waits for a process that ends. A front
that ends takes its own connections with it, and is started anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from maxvision.common.host import HOME
from maxvision.serve.errors import Refusal
from maxvision.serve.front import MESSAGE, Change, Changed, Hello, State
from maxvision.serve.limits import Board, longer

log = logging.getLogger("maxvision.serve")

ACCEPTS = 64
"""Connections that are accepted in a row before something else has its turn."""


class Fronts:
    """The fronts of a server.

    Args:
        hello: What each is told, but for its row.
        listening: Where connections come in.
        change: Loads a model (True) or unloads it (False), by its name.
    """

    def __init__(
        self,
        hello: Hello,
        listening: socket.socket,
        change: Callable[[str, bool], Awaitable[None]],
    ) -> None:
        self.board = Board(hello.rows, models=len(hello.cards))
        self._change = change
        self._changes: set[asyncio.Task[None]] = set()
        self._hello = hello
        self._listening = listening
        self._channels: dict[int, socket.socket] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._sent = [0] * hello.rows
        self._state = State()
        self._ending = False
        self._accepting = False
        self._figures = tempfile.TemporaryDirectory(
            prefix="maxvision-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )

    @property
    def up(self) -> bool:
        """Whether all of them take connections."""
        return all(self.board.all(Board.UP))

    def tell(self, **changes: Any) -> None:
        """Tells all of them what has changed, of ``State``."""
        self._state = replace(self._state, **changes)
        said = pickle.dumps(self._state)
        for row, channel in self._channels.items():
            if not self._send(channel, said):
                self._processes[row].kill()

    async def run(self) -> None:
        """Keeps them running until ``end``."""
        accepting = asyncio.ensure_future(self._accept_always())
        try:
            await asyncio.gather(*(self._keep(row) for row in range(self._hello.rows)))
        finally:
            accepting.cancel()
            self._figures.cleanup()

    def end(self, force: bool) -> None:
        """Accepts nothing more and lets them end, or with ``force`` kills them."""
        self._ending = True
        self._accept_when(False)
        for row, channel in self._channels.items():
            self._close(channel)
            if force:
                self._processes[row].kill()

    async def _keep(self, row: int) -> None:
        pause = 0.0
        while not self._ending:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            said = os.memfd_create("maxvision")  # a message has no room for many labels
            with open(said, "wb") as file:
                pickle.dump(replace(self._hello, row=row), file)
                file.flush()
                file.seek(0)
                socket.send_fds(ours, [b"h"], [self.board.fd, said])
            self._send(ours, pickle.dumps(self._state))
            command = (sys.executable, "-m", "maxvision.serve.front", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                cwd=HOME,
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._figures.name},
                start_new_session=True,  # Ctrl-C is the server's to act upon
            )
            theirs.close()
            self._sent[row] = 0
            self._channels[row], self._processes[row] = ours, process
            if self._ending:
                ours.close()
            else:
                loop = asyncio.get_running_loop()
                loop.add_reader(ours.fileno(), self._receive, ours)
            code = await process.wait()
            was_up = self.board.all(Board.UP)[row]
            self._close(self._channels.pop(row))
            self.board.clear(row)
            if not self._ending:
                log.error("a front has ended with %s and is started anew", code)
                pause = 0.0 if was_up else longer(pause)
                await asyncio.sleep(pause)

    async def _accept_always(self) -> None:
        """Accepts while there is somebody to hand a connection to."""
        while not self._ending:
            self._accept_when(any(self.board.all(Board.UP)))
            await asyncio.sleep(0.02 if not self._accepting else 0.25)

    def _accept_when(self, wanted: bool) -> None:
        loop = asyncio.get_running_loop()
        if wanted and not self._accepting:
            loop.add_reader(self._listening.fileno(), self._accept)
        elif self._accepting and not wanted:
            loop.remove_reader(self._listening.fileno())
        self._accepting = wanted

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError:  # no file or memory is left: they wait
                self._accept_when(False)
                return
            with connection:
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """Hands a connection to the front that has the fewest, or closes it if none takes it."""
        up, closed = self.board.all(Board.UP), self.board.all(Board.CLOSED)
        rows = [row for row in self._channels if up[row]]
        for row in sorted(rows, key=lambda row: self._sent[row] - closed[row]):
            if self._send(self._channels[row], b"c", connection.fileno()):
                self._sent[row] += 1
                return

    def _receive(self, channel: socket.socket) -> None:
        """Reads what a front wishes; it may have been taken over, so nothing is unpickled."""
        try:
            data = channel.recv(MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            return
        with suppress(msgspec.MsgspecError):
            wish = msgspec.json.decode(data, type=Change)
            task = asyncio.ensure_future(self._grant(channel, wish))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)

    async def _grant(self, channel: socket.socket, wish: Change) -> None:
        changed = Changed(wish.number)
        try:
            await self._change(wish.model, wish.loaded)
        except Refusal as refusal:
            changed = replace(changed, refused=(refusal.status, refusal.code, refusal.message))
        self._send(channel, pickle.dumps(changed))

    @staticmethod
    def _close(channel: socket.socket) -> None:
        if channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()

    def _send(self, channel: socket.socket, data: bytes, *fds: int) -> bool:
        """Sends a message if the front still reads; one that does not is as good as gone."""
        try:
            if fds:
                socket.send_fds(channel, [data], fds)
            else:
                channel.send(data)
        except OSError:
            return False
        return True
