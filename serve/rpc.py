"""KServe's V2 protocol over gRPC, as Triton's clients speak it (``inference.proto``).

A call does what the HTTP route of the same purpose does: ``serve.core`` answers, ``serve.tensors``
reads and writes tensors, a refusal becomes a status of gRPC's. Each process that speaks HTTP has a
server of its own on the one port, among which the kernel shares connections out.
"""

from __future__ import annotations

import hmac
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from maxvision.serve import tensors
from maxvision.serve.access import Entry
from maxvision.serve.core import Image, Service, Work, request_id, work
from maxvision.serve.errors import Refusal, ending
from maxvision.serve.models import Models
from maxvision.serve.proto import INFERENCE
from maxvision.serve.tensors import VERSION, InputTensor, OutputParameters, OutputTensor, wrong

log = logging.getLogger("maxvision.serve")

CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""The statuses of HTTP's that are not INVALID_ARGUMENT."""

PROBES = ("ServerLive", "ServerReady")
"""What needs no key, and is answered while the server drains."""

SPARE = 64
"""Calls beyond the images that may be under way: those of no image, and those to be refused."""

Call: TypeAlias = Callable[[Models, Any], Awaitable[dict[str, Any]]]
"""Answers a request: gives the fields of the answer."""


async def start(models: Models, host: str, port: int) -> grpc.aio.Server:
    """Starts a server in the running loop, beside others on the same port.

    Raises:
        RuntimeError: If the port is not to be had.
    """
    most = sum(each.admission.limit for each in models) + SPARE
    made = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", models.options.max_body_bytes),
            ("grpc.max_send_message_length", -1),
        ],
        maximum_concurrent_rpcs=most,
    )
    handlers = {name: _handler(models, name, *classes) for name, classes in INFERENCE.calls.items()}
    made.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(INFERENCE.service, handlers),)
    )
    made.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await made.start()
    return made


def reserve(host: str, port: int) -> socket.socket:
    """Takes a port without listening, for servers that listen on it until this is closed.

    Raises:
        OSError: If it is not to be had.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as probe:  # or another server's port would be shared
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    taken = socket.socket(family, kind, proto)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken.bind(address)
    return taken


def _handler(models: Models, name: str, asked: Any, answered: Any) -> grpc.RpcMethodHandler:
    call = CALLS[name]

    async def handle(sent: bytes, context: grpc.aio.ServicerContext) -> Any:
        id, begun, probe = uuid.uuid4().hex, time.perf_counter(), name in PROBES
        request_id.set(id)
        doing = Work()
        work.set(doing)
        status, size = 499, 0  # unless it ends otherwise, the client has left
        models.board.add(models.board.REQUESTS, not probe)
        try:
            if not probe:
                _check(models, context)
            with models.bodies.take(len(sent)):
                made = answered(**await call(models, _parsed(asked, sent)))
            context.set_trailing_metadata((("x-request-id", id),))
            status, size = 200, made.ByteSize()
            return made
        except Refusal as refusal:
            status = refusal.status
            models.metrics.rejected.labels(refusal.code).inc()
            await context.abort(*_status(refusal, id))
        except Exception:
            status = 500
            log.exception("request %s failed", id)
            fault = Refusal(
                500, "internal_error", "the server failed; its log has it by request_id"
            )
            await context.abort(*_status(fault, id))
        finally:
            models.board.add(models.board.REQUESTS, -(not probe))
            models.metrics.requests.labels(str(status)).inc()
            if models.access.on:
                path = f"/{INFERENCE.service}/{name}"
                models.access.add(_entry(context, path, status, size, begun, id, doing))

    write = answered.SerializeToString
    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=write)


def _parsed(asked: Any, sent: bytes) -> Any:
    try:
        return asked.FromString(sent)
    except DecodeError:
        message = "the message is damaged, or another than inference.proto has; check the client"
        raise Refusal(400, "invalid_message", message) from None


def _check(models: Models, context: grpc.aio.ServicerContext) -> None:
    """Asks for the key, as ``authorization: Bearer KEY`` or ``x-api-key: KEY`` of the metadata."""
    if (key := models.options.api_key) is not None:
        sent = {name.lower(): value for name, value in context.invocation_metadata() or ()}
        kind, _, given = str(sent.get("authorization", "")).partition(" ")
        given = given.strip() if kind.lower() == "bearer" else str(sent.get("x-api-key", ""))
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Refusal(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; send this server's key as KEY in the metadata"
                " authorization: Bearer KEY",
            )
    if models.draining:
        raise ending()


def _status(refusal: Refusal, id: str) -> tuple[grpc.StatusCode, str, Any]:
    code = CODES.get(refusal.status, grpc.StatusCode.INVALID_ARGUMENT)
    trailing = [("x-request-id", id)]
    trailing += [(n.lower(), v) for n, v in refusal.headers().items() if n == "Retry-After"]
    return code, refusal.message, tuple(trailing)


def _entry(
    context: Any, path: str, status: int, size: int, begun: float, id: str, doing: Work
) -> Entry:
    peer = context.peer()  # ipv4:127.0.0.1:51234
    timing = doing.timing
    return Entry(
        client=peer.partition(":")[2].rpartition(":")[0].strip("[]") or None,
        method="POST",
        path=path,
        version="2",
        status=status,
        size=size,
        ms=1e3 * (time.perf_counter() - begun),
        id=id,
        images=doing.images,
        model=doing.model,
        batch=timing.batch if timing else None,
        decode_ms=timing.decode_ms if timing else None,
        queue_ms=timing.queue_ms if timing else None,
        inference_ms=timing.inference_ms if timing else None,
    )


# --- the calls --------------------------------------------------------------------------------


def _find(models: Models, name: str, version: str) -> Service:
    found = models.find(name)
    tensors.check_version(version or VERSION)
    return found


async def _live(models: Models, request: Any) -> dict[str, Any]:
    return {"live": True}


async def _ready(models: Models, request: Any) -> dict[str, Any]:
    return {"ready": models.ready}


async def _model_ready(models: Models, request: Any) -> dict[str, Any]:
    return {"ready": _find(models, request.name, request.version).ready}


async def _server(models: Models, request: Any) -> dict[str, Any]:
    return tensors.described()


async def _metadata(models: Models, request: Any) -> dict[str, Any]:
    return tensors.metadata(_find(models, request.name, request.version))


async def _config(models: Models, request: Any) -> dict[str, Any]:
    return {"config": tensors.config(_find(models, request.name, request.version))}


async def _statistics(models: Models, request: Any) -> dict[str, Any]:
    some = [_find(models, request.name, request.version)] if request.name else models
    return {"model_stats": [tensors.statistics(each) for each in some]}


async def _index(models: Models, request: Any) -> dict[str, Any]:
    return {"models": [tensors.row(each) for each in models if each.ready or not request.ready]}


async def _load(models: Models, request: Any) -> dict[str, Any]:
    await tensors.change(models, request.model_name, True)
    return {}


async def _unload(models: Models, request: Any) -> dict[str, Any]:
    await tensors.change(models, request.model_name, False)
    return {}


async def _infer(models: Models, request: Any) -> dict[str, Any]:
    service = _find(models, request.model_name, request.model_version)
    service.check_room()
    wanted = [_output(each) for each in request.outputs]
    tensors.check_outputs(wanted)
    images = await service.in_thread(_images, service, request)
    made = await service.infer(images)
    outputs = tensors.outputs_of(service.card, wanted, made.logits)
    return {
        "model_name": service.card.name,
        "model_version": VERSION,
        "id": request.id,
        "outputs": [{"name": o.name, "datatype": o.datatype, "shape": o.shape} for o in outputs],
        "raw_output_contents": [o.raw() for o in outputs],
    }


CALLS: dict[str, Call] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server,
    "ModelMetadata": _metadata,
    "ModelInfer": _infer,
    "ModelConfig": _config,
    "ModelStatistics": _statistics,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}


def _output(asked: Any) -> OutputTensor:
    classes = asked.parameters["classification"].int64_param if asked.parameters else 0
    if classes < 0:
        raise wrong(f"outputs: classification must be at least 0 but is {classes}")
    return OutputTensor(asked.name, OutputParameters(classification=classes))


def _images(service: Service, request: Any) -> list[Image]:
    """Reads the images of a call: raw, or typed."""
    if len(request.inputs) != 1:
        raise wrong(f"inputs: there are {len(request.inputs)}; send one, image or pixels")
    sent = request.inputs[0]
    tensor = InputTensor(sent.name, list(sent.shape), sent.datatype)
    raw = list(request.raw_input_contents)
    if len(raw) > 1 or (raw and sent.HasField("contents")):
        raise wrong(f"{sent.name[:40]}: the data is there more than once; send it once")
    return tensors.images_of(service, tensor, raw[0] if raw else _packed(sent))


def _packed(sent: Any) -> bytes:
    """Gives the bytes of typed contents."""
    contents = sent.contents
    if sent.datatype == "BYTES":
        return tensors.joined(contents.bytes_contents)
    if sent.datatype == "FP32":
        return np.asarray(contents.fp32_contents, "<f4").tobytes()
    levels = np.asarray(contents.uint_contents, np.uint32)
    if levels.size and levels.max() > 255:
        raise wrong("pixels: some values are not whole levels from 0 to 255")
    return levels.astype(np.uint8).tobytes()
