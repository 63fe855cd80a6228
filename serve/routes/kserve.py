"""KServe's V2 protocol with Triton's extensions: classification, and tensors as bytes.

A model has two inputs, of which a request gives one: ``image``, files as BYTES [N], or ``pixels``,
UINT8 or FP32 [N, H, W, 3], as the model takes them. Its outputs are ``logits`` and
``probabilities``, FP32 [N, classes].
"""

from __future__ import annotations

import json
import math
import struct
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from maxvision.serve.answers import Function, rank, score
from maxvision.serve.core import Card, Image, Service
from maxvision.serve.errors import Refusal
from maxvision.serve.limits import too_many_images
from maxvision.serve.models import Models
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

router = APIRouter(prefix="/v2", tags=["KServe v2, Triton"])

LENGTH = "inference-header-content-length"
"""The header that says how much of a body is JSON; behind it are tensors as bytes."""

VERSION = "1"
PLATFORM = "max"
OUTPUTS: dict[str, Function] = {"logits": "none", "probabilities": "softmax"}
MOST_OUTPUTS = 4
EXTENSIONS = (
    "classification",
    "binary_tensor_data",
    "model_repository",
    "model_configuration",
    "statistics",
)
_TYPES = {"UINT8": "<u1", "FP32": "<f4"}


class InputParameters(msgspec.Struct, frozen=True):
    """What is said of an input; other parameters are skipped, here and below."""

    binary_data_size: int | None = None


class InputTensor(msgspec.Struct):
    """A tensor of a request; ``data`` stays text until its shape is known to be right."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = msgspec.Raw()


class OutputParameters(msgspec.Struct, frozen=True):
    """How an output is wanted: as bytes, and with how many classes by name, 0 for none."""

    binary_data: bool | None = None
    classification: Annotated[int, msgspec.Meta(ge=0)] = 0


class OutputTensor(msgspec.Struct):
    """What is asked of an output."""

    name: str
    parameters: OutputParameters = OutputParameters()


class RequestParameters(msgspec.Struct, frozen=True):
    """How all outputs are wanted."""

    binary_data_output: bool = False


class InferRequest(msgspec.Struct):
    """A request, or its part that is JSON."""

    inputs: list[InputTensor]
    id: str = ""
    parameters: RequestParameters = RequestParameters()
    outputs: list[OutputTensor] = []


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
    return {
        "name": "maxvision",
        "version": VERSION,
        "extensions": list(EXTENSIONS),
    }


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
    if len(asked.outputs) > MOST_OUTPUTS:
        raise _wrong(f"outputs: {len(asked.outputs)} are too many; ask for at most {MOST_OUTPUTS}")
    for each in asked.outputs:
        if each.name not in OUTPUTS:
            raise _wrong(
                f"outputs: there is no {each.name[:40]!r}; ask for logits or probabilities"
            )
    made = await unless_gone(request, service.infer(images))
    return _answer(service.card, asked, made.logits)


@router.get(
    "/models/stats",
    summary="Count what the models have done",
    responses=errors(PlainError, 401),
)
async def statistics(request: Request) -> dict[str, Any]:
    """Counts as ``/v2/models/{model}/stats`` does."""
    return {"model_stats": [_statistics(each) for each in models_of(request)]}


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
    return {"model_stats": [_statistics(service)]}


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
    service = _serving(request, model, version)
    return _config(service)


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
    except msgspec.ValidationError as wrong:
        raise _wrong(str(wrong)[0].lower() + str(wrong)[1:300]) from None
    except (ValueError, RecursionError):
        raise not_json() from None
    return [row(each) for each in models if each.ready or not asked.ready]


def row(service: Service) -> dict[str, str]:
    """Makes a model's row of the index."""
    made = {"name": service.card.name, "version": VERSION, "state": "READY", "reason": ""}
    if service.ready:
        return made
    reason = "the model is being made ready, or the server ends" if service.loaded else "unloaded"
    return made | {"state": "UNAVAILABLE", "reason": reason}


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
    await change(models_of(request), model, True)
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
    await change(models_of(request), model, False)
    return Response()


async def change(models: Models, model: str, loaded: bool) -> None:
    """Loads or unloads a model.

    Raises:
        Refusal: 400, if clients may not do that; 404 if there is no such model; 503 if it cannot be
            loaded.
    """
    models.find(model)
    if models.change is None:
        raise _wrong(
            f"the model {model} is loaded as long as this server runs; start it with"
            " --model-control-mode explicit to load and unload models"
        )
    await models.change(model, loaded)


@router.get(
    "/models/{model:path}",
    summary="Describe a model",
    responses=errors(PlainError, 401, 404, 503),
)
@router.get("/models/{model:path}/versions/{version}", include_in_schema=False)
async def metadata(model: str, request: Request, version: str = VERSION) -> dict[str, Any]:
    """Names inputs and outputs, with their shapes."""
    service = _serving(request, model, version)
    classes = len(service.card.labels)
    return {
        "name": model,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1, 1]},
            {"name": "pixels", "datatype": "UINT8", "shape": [-1, *_picture(service.card)]},
        ],
        "outputs": [{"name": n, "datatype": "FP32", "shape": [-1, classes]} for n in OUTPUTS],
    }


def error(refusal: Refusal) -> dict[str, Any]:
    """Makes the JSON of a refusal."""
    return {"error": refusal.message}


def _serving(request: Request, model: str, version: str) -> Service:
    """Finds a model by its name and version."""
    service = service_at(request, model)
    if version != VERSION:
        raise Refusal(404, "model_not_found", f"version {VERSION} is served here, no other")
    return service


def _picture(card: Card) -> tuple[int, int, int]:
    return card.preprocess.height, card.preprocess.width, 3


def _wrong(message: str) -> Refusal:
    return Refusal(400, "invalid_request", message)


# --- what Triton's clients ask of a model ---------------------------------------------------


def _config(service: Service) -> dict[str, Any]:
    card, options = service.card, service.options
    inputs = [
        _tensor("image", "TYPE_STRING", [1], format="FORMAT_NONE", optional=True),
        _tensor("pixels", "TYPE_UINT8", list(_picture(card)), format="FORMAT_NHWC", optional=True),
    ]
    kind, _, number = card.device.partition(":")
    group = {"name": card.name, "kind": f"KIND_{kind.upper()}", "count": 1}
    return {
        "name": card.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        "max_batch_size": options.max_images_per_request,
        "input": inputs,
        "output": [_tensor(name, "TYPE_FP32", [len(card.labels)]) for name in OUTPUTS],
        "dynamic_batching": {
            "preferred_batch_size": [service.batch_limit],
            "max_queue_delay_microseconds": round(1e3 * options.max_batch_delay_ms),
        },
        "instance_group": [group | {"gpus": [int(number)] if number else []}],
    }


def _tensor(name: str, data_type: str, dims: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims, **more}


def _statistics(service: Service) -> dict[str, Any]:
    found = service.totals()

    def took(name: str) -> dict[str, int]:
        seconds = found.get(f"{name}_seconds_sum", 0.0)
        return {"count": round(found.get(f"{name}_seconds_count", 0)), "ns": round(1e9 * seconds)}

    nothing = {"count": 0, "ns": 0}  # a cache that is not there
    return {
        "name": service.card.name,
        "version": VERSION,
        "last_inference": round(1e3 * found.get("last_inference_timestamp_seconds", 0)),
        "inference_count": round(found.get("images_total", 0)),
        "execution_count": round(found.get("batches_total", 0)),
        "inference_stats": {
            "success": took("total"),
            "fail": took("failed"),
            "queue": took("queue"),
            "compute_input": took("decode"),
            "compute_infer": took("inference"),
            "compute_output": took("inference") | {"ns": 0},  # not measured apart
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],  # /metrics has the sizes
    }


# --- a body becomes images --------------------------------------------------------------------


def _read(service: Service, length: str | None, body: bytes) -> tuple[InferRequest, list[Image]]:
    head, rest = body, b""
    if length is not None:
        if not (length.isascii() and length.isdecimal()) or int(length[:18]) > len(body):
            raise _wrong(
                "the header Inference-Header-Content-Length must be a number of at most"
                f" {len(body)}, the bytes of the body"
            )
        head, rest = body[: int(length)], body[int(length) :]
    try:
        asked = msgspec.json.decode(head, type=InferRequest)
    except msgspec.ValidationError as wrong:
        raise _wrong(str(wrong)[0].lower() + str(wrong)[1:300]) from None
    except (ValueError, RecursionError):
        raise not_json() from None
    if len(asked.inputs) != 1:
        raise _wrong(f"inputs: there are {len(asked.inputs)}; send one, image or pixels")
    tensor = asked.inputs[0]
    size = tensor.parameters.binary_data_size
    if size is not None:
        if size != len(rest):
            raise _wrong(
                f"{tensor.name}: binary_data_size must be {len(rest)}, the bytes behind the JSON,"
                f" but is {size}"
            )
    elif rest:
        raise _wrong(
            f"{tensor.name}: bytes follow the JSON but binary_data_size is missing; set it to"
            f" {len(rest)}"
        )
    data = rest if size is not None else None
    if tensor.name == "image" and tensor.datatype == "BYTES":
        return asked, _files(tensor, data)
    if tensor.name == "pixels" and tensor.datatype in _TYPES:
        return asked, _pixels(tensor, data, service)
    raise _wrong(
        f"inputs: there is no {tensor.name[:40]!r} of the datatype {tensor.datatype[:40]!r}; send"
        " image as BYTES, or pixels as UINT8 or FP32"
    )


def _files(tensor: InputTensor, data: bytes | None) -> list[Image]:
    count = tensor.shape[0] if tensor.shape else 0
    if tensor.shape not in ([count], [count, 1]):
        raise _wrong(f"image: shape must be [N] but is {_short(tensor.shape)}")
    files: list[Image]
    if data is not None:
        files = list(_split(data))
    else:
        texts = _decoded(tensor, list[str | tuple[str]], "a list of texts")
        files = [each if isinstance(each, str) else each[0] for each in texts]
    if len(files) != count:
        raise _wrong(f"image: shape says {count} files but data has {len(files)}")
    return files


def _split(data: bytes) -> list[bytes]:
    """Splits BYTES that each have their length before them, as 4 bytes, the lowest first."""
    files, at = [], 0
    while at < len(data):
        end = at + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, at)[0]
        if end > len(data):
            raise _wrong(
                "image: the data is cut off; send the length of each file before it, as 4 bytes"
            )
        files.append(data[at + 4 : end])
        at = end
    return files


def _pixels(tensor: InputTensor, data: bytes | None, service: Service) -> list[Image]:
    picture = _picture(service.card)
    limit = service.options.max_images_per_request
    if len(tensor.shape) != 4 or tuple(tensor.shape[1:]) != picture or tensor.shape[0] < 1:
        wanted = ", ".join(map(str, picture))
        raise _wrong(f"pixels: shape must be [N, {wanted}] but is {_short(tensor.shape)}")
    if tensor.shape[0] > limit:
        raise too_many_images(tensor.shape[0], limit)
    count = math.prod(tensor.shape)
    kind = np.dtype(_TYPES[tensor.datatype])
    if data is not None:
        if len(data) != count * kind.itemsize:
            raise _wrong(
                f"pixels: {len(data)} bytes came but {_short(tensor.shape)} of {tensor.datatype}"
                f" needs {count * kind.itemsize}"
            )
        values = np.frombuffer(data, kind)
    else:
        values = _numbers(tensor, count)
    if tensor.datatype == "FP32" or values.dtype != np.uint8:
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.uint8)
        if not np.array_equal(whole, values):
            raise _wrong(
                "pixels: some values are not whole levels from 0 to 255; send them as they are"
                " decoded, because the model normalises them itself"
            )
        values = whole
    return list(values.reshape(tensor.shape))


def _numbers(tensor: InputTensor, count: int) -> np.ndarray:
    """Reads numbers, flat or nested, once their count is known to be right."""
    text = bytes(tensor.data)
    wrong = _wrong(f"pixels: data must have {count} numbers, as its shape says")
    if text.count(b",") != count - 1:
        raise wrong
    try:
        values = np.asarray(_decoded(tensor, list[Any], "a list"))
    except (ValueError, OverflowError):
        raise wrong from None
    if values.size != count or values.dtype.kind not in "iuf":
        raise wrong
    if tensor.datatype == "UINT8" and values.dtype.kind == "f":
        raise _wrong("pixels: the datatype is UINT8 but data has floats; send whole numbers")
    return values


def _decoded(tensor: InputTensor, kind: Any, called: str) -> Any:
    try:
        return msgspec.json.decode(bytes(tensor.data), type=kind)
    except (ValueError, RecursionError):
        raise _wrong(f"{tensor.name}: data must be {called}") from None


def _short(shape: list[int]) -> str:
    return str(shape[:6])[:60]


# --- logits become an answer ------------------------------------------------------------------


def _answer(card: Card, asked: InferRequest, logits: list[np.ndarray]) -> Response:
    outputs: list[dict[str, Any]] = []
    tail = []
    for wanted in asked.outputs or [OutputTensor(name) for name in OUTPUTS]:
        function, classes = OUTPUTS[wanted.name], wanted.parameters.classification
        binary = wanted.parameters.binary_data
        if binary is None:
            binary = asked.parameters.binary_data_output
        values: Any
        if classes:
            values = [
                f"{p.score:.6f}:{p.class_id}:{p.label}"
                for row in logits
                for p in rank(row, card.labels, classes, function)
            ]
            shape = [len(logits), min(classes, len(card.labels))]
        else:
            values = np.stack([score(row, function) for row in logits]).astype("<f4")
            shape = list(values.shape)
        output: dict[str, Any] = {
            "name": wanted.name,
            "datatype": "BYTES" if classes else "FP32",
            "shape": shape,
        }
        if binary:
            data = b"".join(map(_counted, values)) if classes else values.tobytes()
            output["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            output["data"] = values if classes else values.ravel().tolist()
        outputs.append(output)
    made: dict[str, Any] = {"model_name": card.name, "model_version": VERSION, "outputs": outputs}
    if asked.id:
        made["id"] = asked.id
    if not tail:
        return as_json(made)
    head = json.dumps(made, separators=(",", ":")).encode()
    return Response(
        b"".join([head, *tail]),
        media_type="application/octet-stream",
        headers={LENGTH: str(len(head))},
    )


def _counted(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
