"""What a server does, without HTTP: images in, answers out. Every dialect calls this.

``await service.classify([jpeg, png], top_k=3)`` and ``await service.embed([jpeg])`` are all that
a route needs; a ``Refusal`` that they raise is answered as it is.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from maxvision.runtime.predictions import Prediction
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve.answers import Function, rank
from maxvision.serve.errors import Refusal, not_loaded, not_ready
from maxvision.serve.images import SMALL, Decoder, is_small, unwrap
from maxvision.serve.instances import Instances
from maxvision.serve.limits import Admission, Board, too_many_images
from maxvision.serve.media import Fetcher, is_url
from maxvision.serve.metrics import Metrics
from maxvision.serve.options import Options
from maxvision.serve.remote import Result, Undecoded

T = TypeVar("T")

Image: TypeAlias = "bytes | str | np.ndarray"
"""A file's bytes; base64 of them, a data: URL or an allowed URL; or the pixels, uint8 [H, W, 3]."""

request_id: ContextVar[str] = ContextVar("request_id")
"""The request that is being answered; the app sets it, and logs and errors name it."""


@dataclass(frozen=True)
class Timing:
    """What a request took, in ms; of several images the longest of each.

    Attributes:
        decode_ms: Decoding and preprocessing, with the wait for a thread or process.
        queue_ms: Wait for the batch.
        inference_ms: The batch.
        total_ms: All of it.
        batch: Images of the batch.
    """

    decode_ms: float
    queue_ms: float
    inference_ms: float
    total_ms: float
    batch: int


@dataclass
class Work:
    """What a request has asked of the model, for the access log.

    Attributes:
        images: How many it has.
        timing: What they took, once they are answered.
        model: Which one has answered them.
    """

    images: int = 0
    timing: Timing | None = None
    model: str | None = None


work: ContextVar[Work] = ContextVar("work")
"""That of the request that is being answered, if the app wants to know."""


@dataclass(frozen=True)
class Answers:
    """The classes of each image, and what they took."""

    predictions: list[list[Prediction]]
    timing: Timing


@dataclass(frozen=True)
class Logits:
    """The logits float32 [classes] of each image, and what they took."""

    logits: list[np.ndarray]
    timing: Timing


@dataclass(frozen=True)
class Embeddings:
    """The pooled features float32 [C] of each image, and what they took."""

    features: list[np.ndarray]
    timing: Timing


@dataclass(frozen=True)
class Card:
    """What is known of a model without running it.

    Attributes:
        name: What clients call it.
        labels: A name for each class.
        preprocess: Turns an image into the pixels that it takes.
        embeds: Whether it gives features.
        family: ``resnet`` or ``cvt``.
        device: ``cpu`` or ``gpu:N``.
        dtype: Of activations and filters.
        decodes: Whether its process decodes JPEGs, on its GPU.
    """

    name: str
    labels: list[str]
    preprocess: Preprocess
    embeds: bool
    family: str
    device: str
    dtype: str
    decodes: bool = False


class Shared:
    """What the models of a server share; ``serve.models.Models`` finds them by name.

    Attributes:
        board: What is under way, in numbers that the processes of a server share.
        metrics: The figures.
        draining: Whether the server is about to end and takes nothing new.
        count: How many models there are so far.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.metrics = Metrics()
        self.draining = False
        self.count = 0


class Service:
    """A model that is served, with its bounds and its figures.

    Attributes:
        card: What is known of the model.
        options: What the server was told of it.
        admission: Counts the images that are under way.
        metrics: The figures.
        shared: What the models of the server share.
        instances: The processes that run the model.

    Args:
        card: See above.
        options: See above.
        instances: See above.
        decoder: Makes the pixels that it takes.
        queue: Images that may be under way.
        shared: See above.
    """

    def __init__(
        self,
        card: Card,
        options: Options,
        instances: Instances,
        decoder: Decoder,
        queue: int,
        shared: Shared,
    ) -> None:
        self.card = card
        self.options = options
        self.admission = Admission(queue, shared.board, Board.IMAGES + shared.count)
        shared.count += 1
        self.metrics = shared.metrics.of(
            card.name,
            {
                "images_in_flight": (lambda: self.admission.held, "Images under way."),
                "ready": (lambda: self.ready, "1 if a picture would be classified."),
                "batch_limit": (lambda: self.batch_limit, "Images that run together at most."),
                "instances": (lambda: len(instances.members), "Processes that run the model."),
                "instances_ready": (lambda: instances.up, "Those that have run a picture."),
                "worker_starts": (lambda: instances.starts, "Starts of such processes."),
                "worker_busy_seconds": (
                    lambda: instances.busy,
                    "Seconds of these processes, added up, that they did not wait for work.",
                ),
                "decoder_busy_seconds": (
                    lambda: instances.decoding,
                    "Seconds of these processes, added up, that their decoders were at work.",
                ),
            },
        )
        self.shared = shared
        self._number = itertools.count()  # of images: a client may use a request's id again
        self.instances = instances
        self._decoder = decoder
        self._inline = shared.board.rows > 1
        self._fetcher = Fetcher(options.allow_media_domain, options.max_body_bytes)

    @property
    def ready(self) -> bool:
        """Whether a picture would be classified: a process of the model lives and has run one."""
        return (
            self.instances.ready
            and self._decoder.ready
            and self.instances.loaded
            and not self.shared.draining
        )

    @property
    def loaded(self) -> bool:
        """Whether a picture is to be classified, as soon as a process of the model is ready."""
        return self.instances.loaded

    @property
    def batch_limit(self) -> int:
        """Images that run together at most."""
        return self.instances.batch_limit

    async def classify(
        self, images: Sequence[Image], top_k: int = 5, function: Function = "softmax"
    ) -> Answers:
        """Classifies images; cancelled, it leaves them out of the next batch.

        Raises:
            Refusal: If an image, or their number, is not right, if there is no room, if the model
                is not ready or fails.
        """
        if top_k < 1:
            raise Refusal(400, "invalid_request", f"top_k must be at least 1 but is {top_k}")
        made = await self.infer(images)
        labels = self.card.labels
        return Answers([rank(row, labels, top_k, function) for row in made.logits], made.timing)

    async def infer(self, images: Sequence[Image]) -> Logits:
        """Computes the logits of each image (see ``classify``)."""
        results, timing = await self._infer(images)
        return Logits([r.logits for r in results], timing)

    async def embed(self, images: Sequence[Image]) -> Embeddings:
        """Computes what the classifier reads, for each image (see ``classify``)."""
        if not self.card.embeds:
            raise Refusal(
                400,
                "no_features",
                "this server gives labels alone: it was started with --no-embeddings, or with a"
                " model that was compiled ahead of time",
            )
        results, timing = await self._infer(images, features=True)
        return Embeddings([r.features for r in results if r.features is not None], timing)

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function on a decoding thread, so that it does not hold up other requests."""
        return await self._decoder.run(function, *args)

    def totals(self) -> dict[str, float]:
        """Reads the model's figures, see ``Metrics.totals``."""
        return self.shared.metrics.totals(self.card.name)

    def close(self) -> None:
        """Lets the threads that decode end."""
        self._decoder.close()

    def check_ready(self, retry_after: float = 5) -> None:
        """Refuses while no picture would be classified, for some seconds.

        Raises:
            Refusal: 503.
        """
        if not self.instances.loaded:
            raise not_loaded(self.card.name)
        if not self.ready:
            raise not_ready(retry_after)

    def check_room(self) -> None:
        """Refuses early: before a body is read.

        Raises:
            Refusal: 503 or 429, if no image would be taken now.
        """
        self.check_ready()
        self.admission.check()

    async def _infer(
        self, images: Sequence[Image], features: bool = False
    ) -> tuple[list[Result], Timing]:
        if not images:
            raise Refusal(400, "no_image", "the request has no image; send at least one")
        if len(images) > self.options.max_images_per_request:
            raise too_many_images(len(images), self.options.max_images_per_request)
        self.check_ready()
        begun = time.perf_counter()
        doing = work.get(None)
        if doing is not None:
            doing.images = len(images)
        request = request_id.get(None) or uuid.uuid4().hex
        try:
            with self.admission.take(len(images)):
                each = [
                    self._one(image, f"{request}.{next(self._number)}", i, len(images), features)
                    for i, image in enumerate(images)
                ]
                done = [await each[0]] if len(each) == 1 else await _together(each)
        except Refusal:
            self.metrics.failed.observe(time.perf_counter() - begun)
            raise
        total = time.perf_counter() - begun
        results = [result for result, _ in done]
        self._record(done, total)
        timing = Timing(
            decode_ms=1e3 * max(seconds for _, seconds in done),
            queue_ms=max(r.queue_ms for r in results),
            inference_ms=max(r.inference_ms for r in results),
            total_ms=1e3 * total,
            batch=max(r.batch for r in results),
        )
        if doing is not None:
            doing.timing, doing.model = timing, self.card.name
        return results, timing

    async def _one(
        self, image: Image, id: str, index: int, of: int, features: bool
    ) -> tuple[Result, float]:
        begun = time.perf_counter()
        if isinstance(image, np.ndarray):
            pixels = self._checked(image)
        else:
            try:
                if isinstance(image, str) and is_url(image):
                    image = await self._fetcher(image)
                if self._decoder.on_gpu:
                    small = len(image) <= SMALL
                    file = self._decoder.file
                    found = file(image) if small else await self._decoder.run(file, image)
                    if found is not None:
                        seconds = time.perf_counter() - begun
                        with suppress(Undecoded):
                            return await self.instances.submit(id, found, features), seconds
                inline = of == 1 and self._inline and len(image) <= SMALL
                if inline and isinstance(image, str):
                    image = unwrap(image)
                if inline and is_small(image):
                    pixels = self._decoder(image)
                else:
                    pixels = await self._decoder.decode(image)
            except Refusal as refusal:
                if of > 1:
                    refusal.message = f"image {index}: {refusal.message}"
                raise
        seconds = time.perf_counter() - begun
        return await self.instances.submit(id, pixels, features), seconds

    def _checked(self, pixels: np.ndarray) -> np.ndarray:
        shape = (self.card.preprocess.height, self.card.preprocess.width, 3)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise Refusal(
                400,
                "invalid_pixels",
                f"pixels must be uint8 {list(shape)} but are {pixels.dtype} {list(pixels.shape)}",
            )
        return np.ascontiguousarray(pixels)

    def _record(self, done: Sequence[tuple[Result, float]], total: float) -> None:
        metrics = self.metrics
        metrics.images.inc(len(done))
        metrics.total.observe(total)
        metrics.last.set_to_current_time()
        for result, seconds in done:
            metrics.batches.inc(1 / result.batch)
            metrics.decode.observe(seconds)
            metrics.queue.observe(result.queue_ms / 1e3)
            metrics.inference.observe(result.inference_ms / 1e3)
            metrics.batch.observe(result.batch)


async def _together(each: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines at once; one that fails is enough to end all."""
    tasks = [asyncio.ensure_future(one) for one in each]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
