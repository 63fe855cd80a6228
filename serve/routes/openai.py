"""``/v1``: classify, embeddings and models, in the shapes of OpenAI's API."""

from __future__ import annotations

import base64
import json
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from serve.answers import Function
from serve.core import Image, Service, Timing
from serve.errors import Refusal
from serve.requests import files_of, media_type, read_body, read_form, service_of, unless_gone

router = APIRouter(prefix="/v1", tags=["images"])


class ClassifyOptions(BaseModel):
    """What may be asked beside the images, in every form of the body."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="The served model's name; may be left out.")
    top_k: int = Field(5, ge=1, description="Classes to name, the likeliest first.")
    function_to_apply: Function = Field("softmax", description="What makes scores of logits.")


class ClassifyRequest(ClassifyOptions):
    """Images and what is asked of them."""

    images: list[str] = Field(
        min_length=1, description="Files in base64, or data: URLs of them.", examples=[["/9j/4AA…"]]
    )


class EmbeddingsRequest(BaseModel):
    """Images whose features are asked for; other fields of OpenAI's clients are ignored."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    input: str | list[str] = Field(description="Files in base64, or data: URLs of them.")
    encoding_format: Literal["float", "base64"] = "float"


class PredictionOut(BaseModel):
    """One class of an image's answer."""

    label: str
    class_id: int
    score: float


class ImageOut(BaseModel):
    """One image's answer."""

    index: int
    predictions: list[PredictionOut]


class UsageOut(BaseModel):
    """What the request took; of several images the longest."""

    decode_ms: float
    queue_ms: float
    inference_ms: float
    total_ms: float
    batch: int


class ClassifyAnswer(BaseModel):
    """The images' answers, in their order."""

    object: Literal["list"] = "list"
    model: str
    data: list[ImageOut]
    usage: UsageOut


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    request_id: str


class ErrorAnswer(BaseModel):
    """A refusal."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "An image or an argument is not right.",
        401: "The key is missing or wrong.",
        404: "Another model was named.",
        408: "The body did not come in time.",
        413: "The body, an image or the number of images is too large.",
        415: "The content type or the encoding is not taken.",
        429: "As many images as may be are under way; see Retry-After.",
        500: "The model failed on an image.",
        503: "The model is being made ready, or the server ends; see Retry-After.",
    }.items()
}
"""For the description of a route that takes images."""

_BINARY = {"schema": {"type": "string", "format": "binary"}}
RAW = ("image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif")
_ALIASES = ("image/jpg", "image/pjpeg", "image/x-ms-bmp", "application/octet-stream")


def _body(schema: type[BaseModel], *, multipart: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "application/json": {
            "schema": schema.model_json_schema(ref_template="#/components/schemas/{model}")
        }
    }
    if multipart:
        content["multipart/form-data"] = {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {
                    "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                    "model": {"type": "string"},
                    "top_k": {"type": "integer", "minimum": 1, "default": 5},
                    "function_to_apply": {
                        "enum": ["softmax", "sigmoid", "none"],
                        "default": "softmax",
                    },
                },
            }
        }
        content |= dict.fromkeys(RAW, _BINARY)
    return {"requestBody": {"required": True, "content": content}}


_QUERY = [
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {"name": "top_k", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 5}},
    {
        "name": "function_to_apply",
        "in": "query",
        "schema": {"enum": ["softmax", "sigmoid", "none"], "default": "softmax"},
    },
]


@router.post(
    "/classify",
    summary="Classify images",
    response_model=ClassifyAnswer,
    responses=ERRORS,
    openapi_extra={"parameters": _QUERY, **_body(ClassifyRequest, multipart=True)},
)
async def classify(request: Request) -> Any:
    """Names the likeliest classes of each image.

    The images come as JSON, as files of a form, or one as the body itself; beside a body of bytes
    the options are query parameters.
    """
    service = service_of(request)
    images, asked = await _read(request, service)
    service.check_model(asked.model)
    answers = await unless_gone(
        request, service.classify(images, asked.top_k, asked.function_to_apply)
    )
    return _json(
        {
            "object": "list",
            "model": service.card.name,
            "data": [
                {"index": i, "predictions": [vars(p) for p in predictions]}
                for i, predictions in enumerate(answers.predictions)
            ],
            "usage": usage(answers.timing),
        }
    )


@router.post(
    "/embeddings",
    summary="Embed images",
    responses=ERRORS,
    openapi_extra=_body(EmbeddingsRequest, multipart=False),
)
async def embeddings(request: Request) -> Any:
    """Gives the pooled features that the classifier reads, for each image."""
    service = service_of(request)
    _expect(request, "application/json")
    body = await read_body(request, service)
    asked = await parse(service, EmbeddingsRequest, body)
    service.check_model(asked.model)
    images: list[Image] = [asked.input] if isinstance(asked.input, str) else list(asked.input)
    made = await unless_gone(request, service.embed(images))
    vectors = [np.ascontiguousarray(row, "<f4") for row in made.features]
    as_text = asked.encoding_format == "base64"
    return _json(
        {
            "object": "list",
            "model": service.card.name,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": base64.b64encode(v.tobytes()).decode() if as_text else v.tolist(),
                }
                for i, v in enumerate(vectors)
            ],
            "usage": {"prompt_tokens": 0, "total_tokens": 0, **usage(made.timing)},
        }
    )


@router.get("/models", summary="List the models")
async def models(request: Request) -> dict[str, Any]:
    """Lists the one model that is served."""
    return {"object": "list", "data": [_card(service_of(request))]}


@router.get("/models/{model:path}", summary="Describe a model", responses={404: ERRORS[404]})
async def model(model: str, request: Request) -> dict[str, Any]:
    """Describes the model that is served."""
    service = service_of(request)
    service.check_model(model)
    return _card(service)


def usage(timing: Timing) -> dict[str, float]:
    """Rounds what a request took to µs."""
    return {name: round(value, 3) for name, value in vars(timing).items()}


async def parse(service: Service, schema: type[Any], body: bytes) -> Any:
    """Reads JSON by a schema, on a thread if it is long.

    Raises:
        Refusal: If it is broken, or not of the schema.
    """
    try:
        if len(body) > 65536:
            return await service.in_thread(schema.model_validate_json, body)
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise Refusal(400, "invalid_json", "the body was expected to be JSON") from None
        text = first["msg"][0].lower() + first["msg"][1:]
        message = f"{where}: {text}" if where else text
        raise Refusal(400, "invalid_request", message) from None


async def _read(request: Request, service: Service) -> tuple[list[Image], ClassifyOptions]:
    kind = media_type(request)
    if kind == "application/json":
        asked = await parse(service, ClassifyRequest, await read_body(request, service))
        return list(asked.images), asked
    if kind == "multipart/form-data":
        form = await read_form(request.headers, await read_body(request, service), service)
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        return list(await files_of(form)), _options(fields)
    if kind in RAW or kind in _ALIASES:
        options = _options(dict(request.query_params))
        return [await read_body(request, service)], options
    raise _unexpected("application/json, multipart/form-data or an image type", kind)


def _options(fields: dict[str, str]) -> ClassifyOptions:
    try:
        return ClassifyOptions.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refusal(400, "invalid_request", f"{where}: {first['msg'].lower()}") from None


def _expect(request: Request, kind: str) -> None:
    if media_type(request) != kind:
        raise _unexpected(kind, media_type(request))


def _unexpected(wanted: str, came: str) -> Refusal:
    what = "another" if came else "none"
    return Refusal(
        415,
        "content_type_not_supported",
        f"a Content-Type of {wanted} was expected but {what} came",
    )


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.card.name,
        "object": "model",
        "created": service.created,
        "owned_by": "maxvision",
    }


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")
