"""KServe's V2 protocol over HTTP with Triton's extensions: classification, tensors as bytes.

``serve.tensors`` has what does not depend on HTTP.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from maxvision.serve import tensors
from maxvision.serve.core import Card, Image, Service
from maxvision.serve.errors import Refusal
from maxvision.serve.requests import media_type, models_of, read_body, service_at, unless_gone
from maxvision.serve.routes.common import (
    EXAMPLE,
    PlainError,
    as_json,
    body,
    errors,
    not_json,
    unexpected,
)
from maxvision.serve.tensors import OUTPUTS, VERSION, InferRequest, OutputTensor, wrong

router = APIRouter(prefix="/v2", tags=["KServe v2, Triton"])

LENGTH = "inference-header-content-length"
"""The header that says how much of a body is JSON; behind it are tensors as bytes."""


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_TEXT = {"type": "string"}
_TENSOR = {
    "name": _TEXT,
    "shape": {"type": "array", "items": {"type": "integer"}},
    "datatype": {"enum": ["BYTES", "UINT8", "FP32"]},
    "parameters": {"type": "object"},
    "data": {"type": "array", "items": {}},
}
_REQUEST = _object(
    ["inputs"],
    id=_TEXT,
    parameters={"type": "object"},
    inputs={
        "type": "array",
        "minItems": 1,
        "maxItems": 1,
        "items": _object(
            ["name", "shape", "datatype"], **_TENSOR | {"name": {"enum": ["image", "pixels"]}}
        ),
    },
    outputs={
        "type": "array",
        "items": _object(
            ["name"],
            name={"enum": list(OUTPUTS)},
            parameters={
                "type": "object",
                "properties": {
                    "classification": {"type": "integer", "minimum": 1},
                    "binary_data": {"type": "boolean"},
                },
            },
        ),
    },
)
_ANSWER = _object(
    ["model_name", "model_version", "outputs"],
    model_name=_TEXT,
    model_version=_TEXT,
    id=_TEXT,
    outputs={"type": "array", "items": _object(["name", "shape", "datatype"], **_TENSOR)},
)
_EXAMPLE = {
    "inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [EXAMPLE]}],
    "outputs": [{"name": "probabilities", "parameters": {"classification": 3}}],
}


@router.get("", summary="Describe the server")
async def server() -> dict[str, Any]:
    """Names the server and the extensions of the protocol that it speaks."""
    return tensors.described()


@router.get("/health/live", summary="Is the server alive?")
async def live() -> dict[str, bool]:
    """Answers as long as the server does."""
    return {"live": True}


@router.get(
    "/health/ready",
    summary="Would a picture be classified now?",
    responses=errors(PlainError, 503),
)
async def ready(request: Request) -> dict[str, bool]:
    """Answers as ``/ready`` does."""
    models_of(request).check_ready(1)
    return {"ready": True}


@router.get(
    "/models/{model:path}/ready",
    summary="Would this model classify a picture now?",
    responses=errors(PlainError, 401, 404, 503),
)
@router.get("/models/{model:path}/versions/{version}/ready", include_in_schema=False)
async def model_ready(model: str, request: Request, version: str = VERSION) -> dict[str, Any]:
    """Answers as ``/ready`` does, for the model that is served."""
    service = _serving(request, model, version)
    service.check_ready(1)
    return {"name": model, "ready": True}


@router.post(
    "/models/{model:path}/infer",
    summary="Classify images or pixels",
    responses={
        200: {
            "description": "The outputs that were asked for, else all.",
            "content": {"application/json": {"schema": _ANSWER}},
        },
        **errors(PlainError),
    },
    response_class=Response,
    openapi_extra=body({"application/json": {"schema": _REQUEST, "example": _EXAMPLE}}),
)
@router.post("/models/{model:path}/versions/{version}/infer", include_in_schema=False)
async def infer(model: str, request: Request, version: str = VERSION) -> Response:
    """Gives logits, probabilities, or the likeliest classes of them, as "score:index:label".

    Files come as the BYTES input ``image``, in base64 within JSON; pixels as the UINT8 or FP32
    input ``pixels``, whole levels from 0 to 255, at the size that the model's description names.
    With the header Inference-Header-Content-Length, JSON of that length comes first and the input
    as bytes behind it; ``binary_data`` asks for an output in the same way.
    """
    service = _serving(request, model, version)
    kind = media_type(request)
    if kind not in ("", "application/json", "application/octet-stream"):
        raise unexpected("application/json or application/octet-stream", kind)
    sent = await read_body(request, models_of(request), service)
    asked, images = await service.in_thread(_read, service, request.headers.get(LENGTH), sent)
    tensors.check_outputs(asked.outputs)
    made = await unless_gone(request, service.infer(images))
    return _answer(service.card, asked, made.logits)


@router.get(
    "/models/stats",
    summary="Count what the models have done",
    responses=errors(PlainError, 401),
)
async def statistics(request: Request) -> dict[str, Any]:
    """Counts as ``/v2/models/{model}/stats`` does."""
    return {"model_stats": [tensors.statistics(each) for each in models_of(request)]}


@router.get(
    "/models/{model:path}/stats",
    summary="Count what a model has done",
    responses=errors(PlainError, 401, 404),
)
@router.get("/models/{model:path}/versions/{version}/stats", include_in_schema=False)
async def model_statistics(model: str, request: Request, version: str = VERSION) -> dict[str, Any]:
    """Counts images, batches, requests and the time that they took, since the server started.

    ``success``, ``fail`` count requests; ``queue``, ``compute_input`` (decoding) and
    ``compute_infer`` images. ``/metrics`` has the same figures as histograms.
    """
    service = _serving(request, model, version)
    return {"model_stats": [tensors.statistics(service)]}


@router.get(
    "/models/{model:path}/config",
    summary="Configure a model, as Triton would",
    responses=errors(PlainError, 401, 404),
)
@router.get("/models/{model:path}/versions/{version}/config", include_in_schema=False)
async def config(model: str, request: Request, version: str = VERSION) -> dict[str, Any]:
    """Gives the model's configuration in the form of Triton's ``config.pbtxt``, as JSON.

    ``dims`` leave the batch out. A request gives one of the inputs, so both are optional.
    """
    return tensors.config(_serving(request, model, version))


class IndexRequest(msgspec.Struct):
    """Which models are asked for: those that are ready, or all."""

    ready: bool = False


@router.post(
    "/repository/index",
    summary="List the models",
    responses=errors(PlainError, 400, 401, 408, 413, 415, 429),
    openapi_extra={
        "requestBody": {
            "content": {
                "application/json": {
                    "schema": _object([], ready={"type": "boolean"}),
                    "example": {"ready": True},
                }
            }
        }
    },
)
async def index(request: Request) -> list[dict[str, str]]:
    """Lists the models that are served, and whether they are ready."""
    models = models_of(request)
    sent = await read_body(request, models, images=False)
    try:
        asked = msgspec.json.decode(sent, type=IndexRequest) if sent.strip() else IndexRequest()
    except msgspec.ValidationError as found:
        raise wrong(str(found)[0].lower() + str(found)[1:300]) from None
    except (ValueError, RecursionError):
        raise not_json() from None
    return [tensors.row(each) for each in models if each.ready or not asked.ready]


@router.post(
    "/repository/models/{model:path}/load",
    summary="Load a model that was unloaded",
    responses=errors(PlainError, 400, 401, 404, 503),
)
async def load(model: str, request: Request) -> Response:
    """Answers once the model is ready; a configuration, which Triton takes too, is not read.

    Raises:
        Refusal: 400, if clients may not do that; 404 if there is no such model; 503 if its process
            ends before it is ready.
    """
    await tensors.change(models_of(request), model, True)
    return Response()


@router.post(
    "/repository/models/{model:path}/unload",
    summary="Unload a model",
    responses=errors(PlainError, 400, 401, 404),
)
async def unload(model: str, request: Request) -> Response:
    """Answers once the requests that the model had are answered and its process has ended.

    Raises:
        Refusal: 400, if clients may not do that; 404 if there is no such model.
    """
    await tensors.change(models_of(request), model, False)
    return Response()


@router.get(
    "/models/{model:path}",
    summary="Describe a model",
    responses=errors(PlainError, 401, 404, 503),
)
@router.get("/models/{model:path}/versions/{version}", include_in_schema=False)
async def metadata(model: str, request: Request, version: str = VERSION) -> dict[str, Any]:
    """Names inputs and outputs, with their shapes."""
    return tensors.metadata(_serving(request, model, version))


def error(refusal: Refusal) -> dict[str, Any]:
    """Makes the JSON of a refusal."""
    return {"error": refusal.message}


def _serving(request: Request, model: str, version: str) -> Service:
    """Finds a model by its name and version."""
    service = service_at(request, model)
    tensors.check_version(version)
    return service


# --- a body becomes images --------------------------------------------------------------------


def _read(service: Service, length: str | None, body: bytes) -> tuple[InferRequest, list[Image]]:
    head, rest = body, b""
    if length is not None:
        if not (length.isascii() and length.isdecimal()) or int(length[:18]) > len(body):
            raise wrong(
                "the header Inference-Header-Content-Length must be a number of at most"
                f" {len(body)}, the bytes of the body"
            )
        head, rest = body[: int(length)], body[int(length) :]
    try:
        asked = msgspec.json.decode(head, type=InferRequest)
    except msgspec.ValidationError as found:
        raise wrong(str(found)[0].lower() + str(found)[1:300]) from None
    except (ValueError, RecursionError):
        raise not_json() from None
    if len(asked.inputs) != 1:
        raise wrong(f"inputs: there are {len(asked.inputs)}; send one, image or pixels")
    tensor = asked.inputs[0]
    size = tensor.parameters.binary_data_size
    if size is not None:
        if size != len(rest):
            raise wrong(
                f"{tensor.name}: binary_data_size must be {len(rest)}, the bytes behind the JSON,"
                f" but is {size}"
            )
    elif rest:
        raise wrong(
            f"{tensor.name}: bytes follow the JSON but binary_data_size is missing; set it to"
            f" {len(rest)}"
        )
    return asked, tensors.images_of(service, tensor, rest if size is not None else None)


# --- logits become an answer ------------------------------------------------------------------


def _answer(card: Card, asked: InferRequest, logits: list[np.ndarray]) -> Response:
    outputs: list[dict[str, Any]] = []
    tail = []
    wanted = asked.outputs or [OutputTensor(name) for name in OUTPUTS]
    for each, made in zip(wanted, tensors.outputs_of(card, wanted, logits), strict=True):
        output: dict[str, Any] = {"name": made.name, "datatype": made.datatype, "shape": made.shape}
        binary = each.parameters.binary_data
        if asked.parameters.binary_data_output if binary is None else binary:
            tail.append(made.raw())
            output["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            texts = made.datatype == "BYTES"
            output["data"] = made.values if texts else made.values.ravel().tolist()
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": card.name, "model_version": VERSION, "outputs": outputs}
    if asked.id:
        answer["id"] = asked.id
    if not tail:
        return as_json(answer)
    head = json.dumps(answer, separators=(",", ":")).encode()
    return Response(
        b"".join([head, *tail]),
        media_type="application/octet-stream",
        headers={LENGTH: str(len(head))},
    )
