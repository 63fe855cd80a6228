"""Reads a request within its bounds, and notices when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from maxvision.serve.core import Service
from maxvision.serve.errors import Refusal
from maxvision.serve.limits import too_many_images
from maxvision.serve.models import Models

T = TypeVar("T")

UNWATCHED = 0.02
"""Seconds for which nobody notices that a client has left."""

HELD = "maxvision.held"
"""Where a request's scope has the bytes of its body that are held, which the gate gives back."""


def models_of(request: Request) -> Models:
    """Finds what the app serves."""
    models: Models = request.app.state.models
    return models


def service_at(request: Request, model: str) -> Service:
    """Finds what a path names.

    Raises:
        HTTPException: 404, if a model is served whose name the path goes on behind: what is missing
            is the route.
        Refusal: 404, if there is no such model.
    """
    models = models_of(request)
    if model not in models and any(
        model[:end] in models for end, sign in enumerate(model) if sign == "/"
    ):
        raise HTTPException(404)
    return models.find(model)


def media_type(request: Request) -> str:
    """Reads the content type, without its parameters, in lower case; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(
    request: Request, models: Models, service: Service | None = None, *, images: bool = True
) -> bytes:
    """Reads the body, if there is room for what it asks; its bytes count until the answer is sent.

    Args:
        request: Whose body.
        models: Whose bounds.
        service: The model that it is for, if that is known before it is read.
        images: Whether it asks for images to be classified.

    Raises:
        Refusal: 429 or 503 before it is read, if it is of images; 429 as soon as all bodies
            together are too large; 413 if it is too large itself, by its header or by count; 415 if
            it is compressed; 408 if it does not come in time.
    """
    if images:
        (service or models).check_room()
    limit = models.options.max_body_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(
            415,
            "encoding_not_supported",
            "the body is compressed; send it without Content-Encoding",
        )
    too_large = Refusal(
        413,
        "body_too_large",
        f"the body is larger than {limit:,} bytes; send fewer or smaller images",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit):
        raise too_large

    async def read() -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            models.bodies.add(len(chunk))
            request.scope[HELD] = size
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    try:
        with interrupted() as interrupt:
            late = asyncio.get_running_loop().call_later(models.options.body_timeout, interrupt)
            try:
                return await read()
            finally:
                late.cancel()
    except asyncio.TimeoutError:
        raise Refusal(
            408,
            "body_timeout",
            f"the body did not arrive within {models.options.body_timeout:g} s; send it faster",
        ) from None
    except ClientDisconnect:
        raise gone() from None


async def read_form(headers: Headers, body: bytes, models: Models) -> FormData:
    """Parses a multipart body, in memory: no file is written.

    Raises:
        Refusal: If it is damaged or holds too many parts.
    """
    limit = models.options.max_images_per_request

    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = _InMemory(headers, stream(), max_files=limit, max_fields=16)  # type: ignore[arg-type]
    try:
        return await parser.parse()
    except MultiPartException as error:
        if "files" in error.message:
            raise too_many_images(limit + 1, limit) from None
        raise _bad_form() from None
    except Exception:
        raise _bad_form() from None


def _bad_form() -> Refusal:
    return Refusal(
        400,
        "invalid_form",
        "the form is cut off or malformed; send a whole multipart/form-data body",
    )


class _InMemory(MultiPartParser):
    spool_max_size = 2**62


async def files_of(form: FormData) -> list[bytes]:
    """Reads every file of a form, in its order, whatever the field's name."""
    return [await value.read() for _, value in form.multi_items() if isinstance(value, UploadFile)]


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """Waits for an answer, and cancels it if the client, whose body was read, leaves.

    Nobody looks before ``UNWATCHED`` has passed: to do so takes a task.

    Raises:
        Refusal: 499, which nobody sees, if it does.
    """
    watch: asyncio.Future[None] | None = None

    def begin() -> None:
        nonlocal watch
        watch = asyncio.ensure_future(_disconnect(request))
        watch.add_done_callback(lambda done: None if done.cancelled() else interrupt())

    later = asyncio.get_running_loop().call_later(UNWATCHED, begin)
    try:
        with interrupted() as interrupt:
            return await answer
    except asyncio.TimeoutError:
        raise gone() from None
    finally:
        later.cancel()
        if watch is not None:
            watch.cancel()


@contextmanager
def interrupted() -> Iterator[Callable[[], None]]:
    """Gives a function that ends the block with ``asyncio.TimeoutError``, without another task."""
    task = asyncio.current_task()
    assert task is not None
    state = "running"

    def interrupt() -> None:
        nonlocal state
        if state == "running":
            state = "interrupted"
            task.cancel()

    try:
        yield interrupt
    except asyncio.CancelledError:
        if state != "interrupted":
            raise
        if hasattr(task, "uncancel") and task.uncancel():
            raise  # somebody else has cancelled it too
        raise asyncio.TimeoutError from None
    finally:
        state = "done"


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def gone() -> Refusal:
    """Says that the client has left."""
    return Refusal(499, "client_left", "the client has left")
