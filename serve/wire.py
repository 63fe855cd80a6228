"""What travels between the processes that decode and the model's, and the sockets that carry it.

The model's process has one ZeroMQ ROUTER socket; every process that decodes has a DEALER, by whose
identity it is answered. So they come and go, and none knows of another. Arrays are frames of their
own: Python copies pixels once, into the batch.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np
import zmq

from maxvision.runtime.jpeg import Jpeg, Picture

SERVER = b"server"
"""The identity of the process that started the model's, which is told that it is alive."""

READY = "ready"
"""The id of the picture that shows whether the process is ready."""


class Job(msgspec.Struct):
    """One image for the model.

    Attributes:
        id: The request's, and the image's place in it.
        image: Pixels uint8 [H, W, C], as ``Preprocess`` gives them; or a file that it decodes.
        sent: When, by the monotonic clock, which the processes of a machine share.
        features: Whether the pooled features are wanted too.
        front: The identity of who sent it.
    """

    id: str
    image: Picture
    sent: float
    features: bool = False
    front: bytes = SERVER


class Report(msgspec.Struct):
    """What the model's process has done; without ids only that it is alive.

    Attributes:
        pid: Its process.
        patience: Seconds that it may be silent, by the time of its largest batch.
        batch_limit: Images that it runs together at most, now.
        busy: Seconds that it did not wait for work, since it began to take any.
        decoding: Seconds that its decoder was at work, or waited for the GPU or for Python.
        batch: Images of a batch that was run.
        ids: Those of them that the receiver sent.
        queue_ms: What each of them waited for the batch.
        inference_ms: What the batch took.
        failed: The images that the model failed on.
        undecoded: The files that it could not decode: whoever sent them sends pixels.
        quarantined: Those that it does not run, see ``serve.quarantine``.
        logits: float32 [ids, classes].
        features: float32 [ids, C], if wanted.
    """

    pid: int
    patience: float
    batch_limit: int
    busy: float = 0.0
    decoding: float = 0.0
    batch: int = 0
    ids: list[str] = []
    queue_ms: list[float] = []
    inference_ms: float = 0.0
    failed: list[str] = []
    undecoded: list[str] = []
    quarantined: list[str] = []
    logits: np.ndarray | None = None
    features: np.ndarray | None = None


class _Head(msgspec.Struct, array_like=True):
    """A job without its pixels or file; without a shape, the ids that nobody waits for any more.

    ``orientation`` is of a file, whose picture has ``shape``; 0 stands for pixels.
    """

    ids: list[str]
    shape: tuple[int, ...] = ()
    sent: float = 0.0
    features: bool = False
    orientation: int = 0


_pack = msgspec.msgpack.Encoder().encode
_head = msgspec.msgpack.Decoder(_Head).decode
_report = msgspec.msgpack.Decoder(Report).decode


def new_address() -> str:
    """Makes up an address that no other server has; a path in the folder for temporary files."""
    name = f"maxvision-{uuid.uuid4().hex[:16]}"
    path = os.path.join(tempfile.gettempdir(), name)
    return "ipc://" + (path if len(path) < zmq.IPC_PATH_MAX_LEN else f"/tmp/{name}")


def forget(address: str) -> None:
    """Removes the file of an address, which a process that was killed leaves."""
    with suppress(OSError):
        os.unlink(address.removeprefix("ipc://"))


def _socket(kind: int) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, 0)  # admission bounds what is under way
    made.setsockopt(zmq.RCVHWM, 0)
    return made


class Link:
    """An end of a process that decodes, in its event loop.

    Args:
        address: Of the model's process.
        identity: What it answers to, of its own for each process.
        heard: Is called with every report.
    """

    def __init__(self, address: str, identity: bytes, heard: Callable[[Report], None]) -> None:
        self._socket = _socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._receive)
        self._loop.call_soon(self._receive)

    def send(self, job: Job) -> None:
        """Hands an image over; its pixels must stay as they are."""
        image, told = job.image, (job.sent, job.features)
        if isinstance(image, Jpeg):
            head = _Head([job.id], (image.height, image.width), *told, image.orientation)
            self._send([_pack(head), np.frombuffer(image.file, np.uint8).data])
        else:
            self._send([_pack(_Head([job.id], image.shape, *told)), image.data])

    def cancel(self, ids: list[str]) -> None:
        """Says that nobody waits for these images any more."""
        self._send([_pack(_Head(ids))])

    def close(self) -> None:
        """Closes the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _send(self, frames: list[bytes | memoryview]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._receive()  # sending may swallow the sign that something has come

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            report = _report(frames[0])
            for name, frame in zip(("logits", "features"), frames[1:], strict=False):
                setattr(report, name, np.frombuffer(frame, np.float32).reshape(len(report.ids), -1))
            self._heard(report)


class Inbox:
    """The end of the model's process."""

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(address)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for each in (self._socket, self._woken):
            self._poller.register(each, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Returns as soon as something has come or ``wake`` is called, at the latest in time.

        Args:
            seconds: Until then; whole ms.
        """
        if any(each == self._woken for each, _ in self._poller.poll(math.ceil(seconds * 1e3))):
            os.eventfd_read(self._woken)

    def wake(self) -> None:
        """Ends ``wait``, from any thread."""
        os.eventfd_write(self._woken, 1)

    def take(self) -> Job | list[str]:
        """Takes a job, or ids that nobody waits for; raises ``queue.Empty`` if there is neither."""
        try:
            front = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            raise queue.Empty from None
        head = _head(self._socket.recv(zmq.NOBLOCK))
        if not head.shape:
            return head.ids
        data = np.frombuffer(self._socket.recv(zmq.NOBLOCK, copy=False).buffer, np.uint8)
        image: Picture
        if head.orientation:
            height, width = head.shape
            image = Jpeg(data, height, width, head.orientation)
        else:
            image = data.reshape(head.shape)
        return Job(head.ids[0], image, head.sent, head.features, front)

    def report(self, report: Report, front: bytes) -> None:
        """Sends a report; nothing happens if who should get it is gone."""
        arrays = [a for a in (report.logits, report.features) if a is not None]
        report.logits = report.features = None
        frames = [a.astype(np.float32, copy=False).tobytes() for a in arrays]
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([front, _pack(report), *frames])
