"""What a client sends becomes pixels, on threads: Pillow releases the interpreter."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from maxvision.common.errors import ImageError, TooLargeError
from maxvision.runtime import jpeg
from maxvision.runtime.preprocess import Preprocess, open_image
from maxvision.runtime.resample import prepare
from maxvision.serve.errors import Refusal

_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+|application/octet-stream)?(?:;[\w.+=-]+)*,", re.I)

SMALL = 2**20
"""Bytes and pixels of a picture that is decoded in the event loop, where there are several."""

T = TypeVar("T")


class Decoder:
    """Threads that decode and preprocess.

    Attributes:
        ready: Whether a picture would be decoded.
        on_gpu: See below.

    Args:
        preprocess: Turns a picture into the pixels that the model takes.
        max_pixels: Pixels of a picture, counted by its header before it is decoded; and of all
            pictures that are decoded at once, but for those of up to ``SMALL``.
        threads: How many.
        beside: One of another model of this process, whose threads and pixels it shares.
        on_gpu: Whether the model's process decodes the files that ``file`` gives.
    """

    def __init__(
        self,
        preprocess: Preprocess,
        max_pixels: int,
        threads: int,
        beside: Decoder | None = None,
        on_gpu: bool = False,
    ) -> None:
        self.ready = True
        self.on_gpu = on_gpu
        self._preprocess = preprocess
        self._max_pixels = max_pixels
        self._room: _Room = beside._room if beside else _Room(max_pixels)
        self._pool: ThreadPoolExecutor = (
            beside._pool if beside else ThreadPoolExecutor(threads, thread_name_prefix="decode")
        )
        Image.preinit()  # or the first picture would wait for Pillow's readers to be imported
        prepare(preprocess, Image.new("RGB", (500, 375)))  # or it would wait for numba
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # max_pixels says it
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # of damaged files

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def decode(self, image: bytes | str) -> np.ndarray:
        """Decodes an image on a thread, see ``__call__``."""
        return await self.run(self, image)

    def __call__(self, image: bytes | str) -> np.ndarray:
        """Decodes an image, on the calling thread.

        Args:
            image: A file's bytes, base64 of them, or a data: URL.

        Returns:
            uint8 [H, W, C], the same as run_graph.py's.

        Raises:
            Refusal: 400, if it is no picture of ``common.pictures.FORMATS`` or damaged; 413, if it
                is too large.
        """
        data = unwrap(image) if isinstance(image, str) else image
        try:
            with (
                open_image(io.BytesIO(data), max_pixels=self._max_pixels) as picture,
                self._room.take(picture.width * picture.height),
            ):
                return prepare(self._preprocess, picture)
        except ImageError as error:
            message = str(error).removeprefix("image: ")
            if isinstance(error, TooLargeError):
                raise Refusal(413, "image_too_large", message) from None
            raise _bad(message) from None

    def file(self, image: bytes | str) -> jpeg.Jpeg | None:
        """Gives what the model's process decodes; None if this one has to.

        Args:
            image: As ``__call__`` takes it.

        Raises:
            Refusal: If it is text and neither base64 nor a data: URL.
        """
        if not self.on_gpu:
            return None
        found = jpeg.read(unwrap(image) if isinstance(image, str) else image, self._preprocess)
        within = found is not None and found.height * found.width <= self._max_pixels
        return found if within else None

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Room:
    """Pixels that threads decode at once: large pictures one after another, small ones at will."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._freed = threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Waits until there is room for a picture, and holds it while the block runs."""
        held = pixels if pixels > SMALL else 0
        with self._freed:
            self._freed.wait_for(lambda: not held or self._left >= held)
            self._left -= held
        try:
            yield
        finally:
            with self._freed:
                self._left += held
                self._freed.notify_all()


def is_small(image: bytes | str) -> bool:
    """Tells whether decoding takes but a few ms: to hand it to a thread costs nearly as much.

    Only a JPEG's frame header is read; Pillow refuses a file that has another behind it.
    """
    return isinstance(image, bytes) and len(image) <= SMALL and 0 < jpeg.pixels(image) <= SMALL


def unwrap(text: str) -> bytes:
    """Decodes base64, or a data: URL of it.

    Raises:
        Refusal: If it is neither.
    """
    if text[:5].lower() == "data:":
        head = _DATA_URL.match(text[:256])
        if head is None or not head[0].lower().endswith(";base64,"):
            raise _bad("the data: URL is not an image in base64; check its beginning")
        text = text[head.end() :]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad("the text is not base64; send an image file in base64") from None


def _bad(message: str) -> Refusal:
    return Refusal(400, "invalid_image", message)
