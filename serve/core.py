"""What a server does, without HTTP: images in, answers out. Every dialect calls this.

``await service.classify([jpeg, png], top_k=3)`` and ``await service.embed([jpeg])`` are all that
a route needs; a ``Refusal`` that they raise is answered as it is.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from graphs.preprocess import Preprocess
from graphs.session import Prediction
from serve.answers import Function, rank
from serve.errors import Refusal, not_ready
from serve.images import Decoder
from serve.limits import Admission, too_many_images
from serve.media import Fetcher, is_url
from serve.metrics import Metrics
from serve.options import Options

if TYPE_CHECKING:
    from serve.supervisor import Result, Supervisor

T = TypeVar("T")

Image: TypeAlias = "bytes | str | np.ndarray"
"""A file's bytes; base64 of them, a data: URL or an allowed URL; or the pixels, uint8 [H, W, 3]."""

BODIES = 8
"""Largest bodies that may be held at once; smaller ones as many as are as large together."""

request_id: ContextVar[str] = ContextVar("request_id")
"""The request that is being answered; the app sets it, and logs and errors name it."""


@dataclass(frozen=True)
class Timing:
    """What a request took, in ms; of several images the longest of each.

    Attributes:
        decode_ms: Decoding and preprocessing, with the wait for a thread.
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


@dataclass(frozen=True)
class Answers:
    """The classes of each image, and what they took."""

    predictions: list[list[Prediction]]
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
    """

    name: str
    labels: list[str]
    preprocess: Preprocess
    embeds: bool
    family: str
    device: str
    dtype: str


class Service:
    """A model that is served, with its bounds and its figures.

    Attributes:
        card: What is known of the model.
        options: What the server was told.
        admission: Counts the images that are under way.
        bodies: Counts the bytes of requests that are held.
        metrics: The figures.
        active: Requests under way, probes of health aside.
        draining: Whether the server is about to end and takes nothing new.
        created: When it began, in seconds since 1970.
    """

    def __init__(
        self, card: Card, options: Options, supervisor: Supervisor, decoder: Decoder, queue: int
    ) -> None:
        self.card = card
        self.options = options
        self.admission = Admission(queue)
        self.bodies = Admission(max(BODIES * options.max_body_bytes, 2**28))
        self.metrics = Metrics(card.name)
        self.draining = False
        self.active = 0
        self.created = int(time.time())
        self._supervisor = supervisor
        self._decoder = decoder
        self._fetcher = Fetcher(options.allow_media_domain, options.max_body_bytes)
        self.metrics.in_flight.set_function(lambda: self.admission.held)
        self.metrics.ready.set_function(lambda: self.ready)
        self.metrics.batch_limit.set_function(lambda: supervisor.batch_limit)
        self.metrics.starts.set_function(lambda: supervisor.starts)

    @property
    def ready(self) -> bool:
        """Whether a picture would be classified: the model's process lives and has run one."""
        return self._supervisor.ready and not self.draining

    async def classify(
        self, images: Sequence[Image], top_k: int = 5, function: Function = "softmax"
    ) -> Answers:
        """Classifies images; cancelled, it leaves them out of the next batch.

        Raises:
            Refusal: If an image, or their number, is not right, if there is no room, if the model
                is not ready or fails.
        """
        if top_k < 1:
            raise Refusal(400, "invalid_request", f"top_k expects at least 1 but is {top_k}")
        results, timing = await self._infer(images)
        labels = self.card.labels
        return Answers([rank(r.logits, labels, top_k, function) for r in results], timing)

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

    def check_room(self) -> None:
        """Refuses early: before a body is read.

        Raises:
            Refusal: 503 or 429, if no image would be taken now.
        """
        if not self.ready:
            raise not_ready()
        self.admission.check()

    def check_model(self, name: str | None) -> None:
        """Compares the model that a request names, if it names one.

        Raises:
            Refusal: 404, if it is another.
        """
        if name is not None and name != self.card.name:
            raise Refusal(
                404, "model_not_found", f"the model {self.card.name} is served here, no other"
            )

    async def _infer(
        self, images: Sequence[Image], features: bool = False
    ) -> tuple[list[Result], Timing]:
        if not images:
            raise Refusal(400, "no_image", "at least one image was expected but none came")
        if len(images) > self.options.max_images_per_request:
            raise too_many_images(len(images), self.options.max_images_per_request)
        if not self.ready:
            raise not_ready()
        begun = time.perf_counter()
        request = request_id.get(None) or uuid.uuid4().hex
        with self.admission.take(len(images)):
            tasks = [
                asyncio.ensure_future(self._one(image, f"{request}.{i}", i, len(images), features))
                for i, image in enumerate(images)
            ]
            try:
                done = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one that failed is enough to refuse the request
                    task.cancel()
        total = time.perf_counter() - begun
        results = [result for result, _ in done]
        self._record(done, total)
        return results, Timing(
            decode_ms=1e3 * max(seconds for _, seconds in done),
            queue_ms=max(r.queue_ms for r in results),
            inference_ms=max(r.inference_ms for r in results),
            total_ms=1e3 * total,
            batch=max(r.batch for r in results),
        )

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
                pixels = await self._decoder.run(self._decoder, image)
            except Refusal as refusal:
                if of > 1:
                    refusal.message = f"image {index}: {refusal.message}"
                raise
        seconds = time.perf_counter() - begun
        return await self._supervisor.submit(id, pixels, features), seconds

    def _checked(self, pixels: np.ndarray) -> np.ndarray:
        shape = (self.card.preprocess.height, self.card.preprocess.width, 3)
        if pixels.shape != shape or pixels.dtype != np.uint8:
            raise Refusal(
                400,
                "invalid_pixels",
                f"pixels expect uint8 {list(shape)} but are {pixels.dtype} {list(pixels.shape)}",
            )
        return np.ascontiguousarray(pixels)

    def _record(self, done: Sequence[tuple[Result, float]], total: float) -> None:
        metrics = self.metrics
        metrics.images.inc(len(done))
        metrics.total.observe(total)
        for result, seconds in done:
            metrics.decode.observe(seconds)
            metrics.queue.observe(result.queue_ms / 1e3)
            metrics.inference.observe(result.inference_ms / 1e3)
            metrics.batch.observe(result.batch)
