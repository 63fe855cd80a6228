"""Where a request's CPU time goes: ``maxvision bench serve --stages``.

One process speaks HTTP to itself: uvicorn's protocol with a transport that is a list, the app, the
decoder, the socket to a model's process with the batcher behind it, on a thread; the network alone
is missing (``served.Nothing``). Nothing waits for another process, so that CPU time is all there
is. A stage is what a request takes with it less what one takes without it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
from uvicorn.server import ServerState

from maxvision.bench.served import Nothing
from maxvision.runtime.jpeg import Picture
from maxvision.runtime.preprocess import Preprocess, read_image
from maxvision.serve import quarantine
from maxvision.serve.access import AccessLog
from maxvision.serve.app import make_app
from maxvision.serve.core import Card
from maxvision.serve.images import Decoder
from maxvision.serve.instances import Instances
from maxvision.serve.limits import Board
from maxvision.serve.models import Models
from maxvision.serve.options import Options
from maxvision.serve.protocol import http_server
from maxvision.serve.remote import Remote, Result
from maxvision.serve.wire import Inbox, forget, new_address
from maxvision.serve.worker import Batcher, Runner

T = TypeVar("T")

ROUNDS = 5
"""Each stage is measured in so many parts, in turn with the others; the least of them counts."""


class _Transport(asyncio.Transport):
    """A connection whose other end keeps nothing but whether an answer has come."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.answered = asyncio.Event()
        self.sent = bytearray()

    def write(self, data: Any) -> None:
        """Takes a piece of an answer."""
        self.sent += data
        head, end, body = self.sent.partition(b"\r\n\r\n")
        if end:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            if len(body) >= length:
                self.answered.set()

    def is_closing(self) -> bool:
        """Tells that it is open."""
        return False

    def pause_reading(self) -> None:
        """Goes on: whoever sends waits for the answer."""

    def resume_reading(self) -> None:
        """Goes on."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Has no buffer."""


class _Known(Remote):
    """A model's process that answers at once, in this one."""

    def __init__(self, logits: np.ndarray) -> None:
        super().__init__(b"known")
        self.ready = True
        self._result = Result(logits, None, 0.0, 0.0, 1)

    async def submit(self, id: str, image: Picture, features: bool = False) -> Result:
        """Gives the same for every image."""
        return self._result


class _Blank(Decoder):
    """Gives the same pixels for every picture."""

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__(preprocess, 2**20, 1)
        self._pixels = np.zeros((preprocess.height, preprocess.width, 3), np.uint8)

    def __call__(self, image: bytes | str) -> np.ndarray:
        """Decodes nothing."""
        return self._pixels


def measure(source: str, files: list[bytes], seconds: float) -> dict[str, float]:
    """Measures the stages of a request with a JPEG as its body, by ``files`` in turn.

    Returns:
        Milliseconds of CPU time of each stage, of one core.
    """
    import uvloop

    return uvloop.run(_measure(source, files, seconds))


async def _measure(source: str, files: list[bytes], seconds: float) -> dict[str, float]:
    model = Nothing(source)
    card = Card("m", model.labels, model.preprocess, False, "none", "cpu", "float32")
    options = Options(access_log="json")

    def served(remote: Remote, decoder: Decoder) -> Models:
        models = Models(options, Board(2))  # of two fronts: the app decodes
        models.access = AccessLog(options.access_log, os.open(os.devnull, os.O_WRONLY))
        models.add(card, options, Instances([remote]), decoder, 64)
        return models

    decoder, blank = Decoder(model.preprocess, options.max_pixels, 1), _Blank(model.preprocess)
    known, http = _Known(model.logits), served(_Known(model.logits), blank)
    answered = await http.first.classify([files[0]])
    http.first.classify = lambda *_: _at_once(answered)  # type: ignore[method-assign]
    address = new_address()
    stop = threading.Event()
    thread = threading.Thread(target=_serve, args=(model, address, stop))
    thread.start()
    remote = Remote(b"front", 8)
    remote.connect(address)
    remote.ready = True
    steps: dict[str, Callable[[bytes], Awaitable[Any]]] = {
        "HTTP": _requests(http),
        "core": _requests(served(known, blank)),
        "queue and copies": _requests(served(remote, blank)),
        "decode": lambda file: _at_once(read_image(file)),
        "decode and resize": lambda file: _at_once(decoder(file)),
    }
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            best[name] = min(best[name], await _time(step, files, seconds / ROUNDS))
    stop.set()
    thread.join()
    remote.connect(None)
    forget(address)
    return {
        "HTTP and JSON": best["HTTP"],
        "limits, figures, ranking": best["core"] - best["HTTP"],
        "decode": best["decode"],
        "resize": best["decode and resize"] - best["decode"],
        "queue and copies": best["queue and copies"] - best["core"],
    }


async def _at_once(result: T) -> T:
    return result


def _requests(models: Models) -> Callable[[bytes], Awaitable[None]]:
    """Opens a connection to an app; gives what sends a picture on it and waits for the answer."""
    config = http_server(make_app(models)).config
    config.load()
    connection = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    transport = _Transport()
    connection.connection_made(transport)

    async def request(file: bytes) -> None:
        head = (
            "POST /v1/classify HTTP/1.1\r\nHost: localhost:8000\r\nContent-Type: image/jpeg\r\n"
            f"Content-Length: {len(file)}\r\n\r\n"
        )
        transport.sent.clear()
        transport.answered.clear()
        connection.data_received(head.encode() + file)
        await transport.answered.wait()
        assert transport.sent.startswith(b"HTTP/1.1 200 "), transport.sent

    return request


def _serve(model: Nothing, address: str, stop: threading.Event) -> None:
    """Is the model's process, on a thread: a batch is what one request has."""
    inbox = Inbox(address)
    guard = quarantine.Quarantine(quarantine.memory())
    batcher = Batcher(Runner(model, False), inbox, 8, 0.0, 0.01, guard)
    while not stop.is_set():
        batcher.step()


async def _time(
    step: Callable[[bytes], Awaitable[Any]], files: list[bytes], seconds: float
) -> float:
    """Returns the milliseconds of CPU time that a step takes for a file."""
    for file in files:
        await step(file)
    count, end = 0, time.perf_counter() + seconds
    begun = time.process_time()
    while time.perf_counter() < end:
        await step(files[count % len(files)])
        count += 1
    return 1e3 * (time.process_time() - begun) / count
