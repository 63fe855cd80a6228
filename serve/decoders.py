"""Processes that decode, beside one that speaks HTTP alone: ``maxvision serve.decoders FD``.

Pillow releases the interpreter while it decodes, but a thread needs it again and again, and each
time waits for the one that answers requests: many threads of one process decode little more than
one. So a replica of Ray (``serve.ray_app``) decodes in processes, to each of which it has a socket:
images go there one by one, and pixels or refusals come back in the same order. The kernel tells
either side when the other has ended, in whatever way. Nothing that comes back is unpickled: these
processes are the ones that read what strangers sent.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

import msgspec
import numpy as np

from maxvision.common.errors import ModelError
from maxvision.common.host import leave, python
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve.errors import Refusal, not_ready, undecoded
from maxvision.serve.images import Decoder, is_small
from maxvision.serve.limits import longer

log = logging.getLogger("maxvision.serve")

PATIENCE = 60.0
"""Seconds that a process may take for an image before it is killed."""

START = 300.0
"""Seconds that it may take for its start, for which a machine may have no core left."""

TICK = 0.5
"""Seconds between two looks at that."""

_HEAD = struct.Struct("<?Q")
"""Before each message its size, and whether it is text (an image), or a refusal (an answer)."""

_pack = msgspec.msgpack.Encoder().encode
_refusal = msgspec.msgpack.Decoder(tuple[int, str, str, float | None]).decode


class Decoders(Decoder):
    """Processes that decode while ``keep`` runs; and a thread, for what is not a picture.

    Each has one image, and a second behind it if the first is small: so a large one holds up none
    while another process is free. What more there is waits here, in the order of its coming.

    Args:
        preprocess: Turns a picture into the pixels that the model takes.
        max_pixels: Pixels of a picture, counted by its header before it is decoded.
        count: How many processes.
    """

    def __init__(self, preprocess: Preprocess, max_pixels: int, count: int) -> None:
        super().__init__(preprocess, max_pixels, threads=1)
        self.ready = False
        self._count = count
        self._hello = pickle.dumps((preprocess, max_pixels))
        self._shape = (preprocess.height, preprocess.width, 3)
        self._processes: list[_Process] = []
        self._queue: deque[_Image] = deque()

    async def decode(self, image: bytes | str) -> np.ndarray:
        """Decodes an image in a process, see ``Decoder.__call__``.

        Raises:
            Refusal: What ``Decoder`` raises; 500 if the process ends with this image; 503 if none
                can be started.
        """
        if not self.ready:
            raise not_ready()
        asked = _Image(image)
        self._queue.append(asked)
        self._hand_out()
        try:
            return await asked.answer
        except asyncio.CancelledError:
            with suppress(ValueError):  # a process has it, and its answer will be dropped
                self._queue.remove(asked)
            raise

    async def keep(self) -> None:
        """Keeps the processes running until this is cancelled, and then ends them.

        Raises:
            ModelError: If one of the first ends before it can decode.
        """
        rows = [asyncio.ensure_future(self._keep()) for _ in range(self._count)]
        try:
            await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()
            await asyncio.wait(rows)
            self.ready = False
            self._refuse()

    async def _keep(self) -> None:
        begun, pause = False, 0.0
        while True:
            process = _Process(self._hello, self._shape, self._moved)
            self._processes.append(process)
            try:
                await process.ended()
            finally:
                self._processes.remove(process)
                code = process.close()
                self._take_back(process)
            log.error("a process that decodes has ended with %s", code)
            if process.up:
                begun, pause = True, 0.0
            elif begun:
                pause = longer(pause)
                self.ready = any(each.up for each in self._processes)
                if not self.ready:
                    self._refuse()
            else:
                raise ModelError(
                    f"a process that decodes ended with {code} as it started; the log says why"
                )
            self._hand_out()
            await asyncio.sleep(pause)

    def _moved(self) -> None:
        """Is called when a process can decode, and when it has."""
        self.ready = self.ready or all(each.up for each in self._processes)
        self._hand_out()

    def _hand_out(self) -> None:
        """Hands images to the processes that have the fewest."""
        while self._queue:
            free = [each for each in self._processes if each.takes]
            if not free:
                return
            min(free, key=lambda each: len(each.images)).take(self._queue.popleft())

    def _take_back(self, process: _Process) -> None:
        """Fails the image with which a process has ended; others are for those that are left."""
        images = process.images
        if process.decodes:
            images.popleft().fail(undecoded())
        self._queue.extendleft(image for image in reversed(images) if not image.answer.done())

    def _refuse(self) -> None:
        while self._queue:
            self._queue.popleft().fail(not_ready())


class _Image:
    """An image that somebody waits for."""

    def __init__(self, image: bytes | str) -> None:
        self.text = isinstance(image, str)  # which is base64; JSON may hold half a surrogate pair
        self.data = image.encode("utf-8", "surrogatepass") if isinstance(image, str) else image
        self.small = is_small(image)
        self.answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()

    def fail(self, refusal: Refusal) -> None:
        """Refuses it, if somebody still waits."""
        if not self.answer.done():
            self.answer.set_exception(refusal)


class _Process:
    """One that decodes, as the event loop sees it.

    Attributes:
        up: Whether it can decode.
        images: What it was given and has not answered; it decodes the first of them.
    """

    def __init__(
        self, hello: bytes, shape: tuple[int, int, int], moved: Callable[[], None]
    ) -> None:
        self.up = False
        self.images: deque[_Image] = deque()
        self._shape = shape
        self._moved = moved
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._since = time.monotonic()
        self._unsent: deque[memoryview] = deque()
        self._blocked = False
        self._head = bytearray(_HEAD.size)
        self._body: np.ndarray | None = None
        self._room = memoryview(self._head)
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                **python("maxvision.serve.decoders", str(number)), pass_fds=[number]
            )
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._send(False, hello)

    @property
    def takes(self) -> bool:
        """Whether it should have another image."""
        return self.up and (not self.images or (len(self.images) == 1 and self.images[0].small))

    @property
    def decodes(self) -> bool:
        """Whether it has its first image as a whole."""
        return len(self._unsent) < 2 * len(self.images) - 1

    def take(self, image: _Image) -> None:
        """Hands an image over."""
        if not self.images:
            self._since = time.monotonic()
        self.images.append(image)
        self._send(image.text, image.data)

    async def ended(self) -> None:
        """Waits until it has ended; one that takes too long for something is killed."""
        while not self._gone.done():
            await asyncio.wait({self._gone}, timeout=TICK)
            taken = time.monotonic() - self._since
            if taken > (PATIENCE if self.up else START) and (self.images or not self.up):
                log.error("a process that decodes hangs and is killed")
                self._process.kill()

    def close(self) -> int:
        """Ends it, if it has not; returns its exit code."""
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._process.kill()
        return self._process.wait()

    def _send(self, flag: bool, data: bytes) -> None:
        self._unsent += (memoryview(_HEAD.pack(flag, len(data))), memoryview(data))
        if not self._blocked:
            self._flush()

    def _flush(self) -> None:
        """Sends what can be sent now, and the rest when there is room."""
        blocked = False
        try:
            while self._unsent:
                sent = self._socket.sendmsg(self._unsent)
                while self._unsent and sent >= len(self._unsent[0]):
                    sent -= len(self._unsent.popleft())
                if self._unsent:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            blocked = True
        except OSError:  # it has ended, as ``_receive`` will find
            pass
        if blocked and not self._blocked:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        elif self._blocked and not blocked:
            self._loop.remove_writer(self._socket.fileno())
        self._blocked = blocked

    def _receive(self) -> None:
        """Reads what has come, up to the end of one answer."""
        while True:
            try:
                count = self._socket.recv_into(self._room)
            except BlockingIOError:
                return
            except OSError:  # it has ended, and left something unread
                count = 0
            if not count:
                self._loop.remove_reader(self._socket.fileno())
                self._gone.set_result(None)
                return
            self._room = self._room[count:]
            if self._room:
                return
            refused, size = _HEAD.unpack(self._head)
            if self._body is None and size:
                self._body = np.empty(size, np.uint8)
                self._room = self._body.data
                continue
            body, self._body = self._body, None
            self._room = memoryview(self._head)
            self._heard(refused, body)
            return

    def _heard(self, refused: bool, body: np.ndarray | None) -> None:
        self._since = time.monotonic()
        if body is None:
            self.up = True
        elif refused:
            self.images.popleft().fail(Refusal(*_refusal(body.data)))
        else:
            image = self.images.popleft()
            if not image.answer.done():
                image.answer.set_result(body.reshape(self._shape))
        self._moved()


def main() -> None:
    """Decodes what comes through the socket that the command line names, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when it is over
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = socket.socket(fileno=int(sys.argv[1]))
    coming = channel.makefile("rb")
    with suppress(OSError, EOFError):
        preprocess, max_pixels = pickle.loads(_take(coming)[1])
        decoder = Decoder(preprocess, max_pixels, threads=1)
        channel.sendall(_HEAD.pack(False, 0))
        while True:
            channel.sendall(_answer(decoder, *_take(coming)))
    leave(0)


def _take(coming: BinaryIO) -> tuple[bool, bytes]:
    """Reads a message: whether it is text, and its bytes."""
    head = coming.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise EOFError
    text, size = _HEAD.unpack(head)
    data = coming.read(size)
    if len(data) < size:
        raise EOFError
    return text, data


def _answer(decoder: Decoder, text: bool, data: bytes) -> bytes:
    """Makes the message that answers an image."""
    try:
        pixels = decoder(data.decode("utf-8", "surrogatepass") if text else data)
        return _HEAD.pack(False, pixels.nbytes) + pixels.tobytes()
    except Refusal as refusal:
        told = refusal
    except Exception:
        log.exception("an image could not be decoded")
        told = undecoded()
    said = _pack((told.status, told.code, told.message, told.retry_after))
    return _HEAD.pack(True, len(said)) + said


if __name__ == "__main__":
    main()
