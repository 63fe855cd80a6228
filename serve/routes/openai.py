"""``/v1``: classify, embeddings and models, in the shapes of OpenAI's API."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from maxvision.serve.answers import Function
from maxvision.serve.core import Image, Service
from maxvision.serve.models import Models
from maxvision.serve.requests import (
    files_of,
    media_type,
    models_of,
    read_body,
    read_form,
    service_at,
    unless_gone,
)
from maxvision.serve.routes.common import (
    ALIASES,
    ERRORS,
    EXAMPLE,
    RAW,
    ErrorAnswer,
    InputRequest,
    as_json,
    as_schema,
    body,
    errors,
    invalid,
    parse,
    read_input,
    unexpected,
    usage,
)

router = APIRouter(prefix="/v1", tags=["images"])


class ClassifyOptions(BaseModel):
    """What may be asked beside the images, in every form of the body."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="A served model; the first one if left out.")
    top_k: int = Field(5, ge=1, description="Classes to name, the likeliest first.")
    function_to_apply: Function = Field("softmax", description="What makes scores of logits.")


class ClassifyRequest(ClassifyOptions):
    """Images and what is asked of them."""

    images: list[str] = Field(min_length=1, description="Files in base64, or data: URLs of them.")


class EmbeddingsRequest(InputRequest):
    """Images whose features are asked for; other fields of OpenAI's clients are ignored."""

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


_FORM = {
    "multipart/form-data": {
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
}
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
    openapi_extra={
        "parameters": _QUERY,
        **body(as_schema(ClassifyRequest, images=[EXAMPLE], top_k=3) | _FORM, raw=True),
    },
)
async def classify(request: Request) -> Any:
    """Names the likeliest classes of each image.

    The images come as JSON, as files of a form, or one as the body itself; beside a body of bytes
    the options are query parameters.
    """
    images, asked = await _read(request, models_of(request))
    service = models_of(request).find(asked.model)
    answers = await unless_gone(
        request, service.classify(images, asked.top_k, asked.function_to_apply)
    )
    return as_json(
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
    openapi_extra=body(as_schema(EmbeddingsRequest, input=EXAMPLE)),
)
async def embeddings(request: Request) -> Any:
    """Gives the pooled features that the classifier reads, for each image."""
    service, asked, images = await read_input(request, EmbeddingsRequest)
    made = await unless_gone(request, service.embed(images))
    vectors = [np.ascontiguousarray(row, "<f4") for row in made.features]
    as_text = asked.encoding_format == "base64"
    return as_json(
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
    """Lists the models that are served."""
    models = models_of(request)
    return {"object": "list", "data": [_card(models, each) for each in models]}


@router.get("/models/{model:path}", summary="Describe a model", responses=errors(ErrorAnswer, 404))
async def model(model: str, request: Request) -> dict[str, Any]:
    """Describes a model that is served."""
    return _card(models_of(request), service_at(request, model))


async def _read(request: Request, models: Models) -> tuple[list[Image], ClassifyOptions]:
    kind = media_type(request)
    if kind == "application/json":
        asked = await parse(models, ClassifyRequest, await read_body(request, models))
        return list(asked.images), asked
    if kind == "multipart/form-data":
        form = await read_form(request.headers, await read_body(request, models), models)
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        return list(await files_of(form)), _options(fields)
    if kind in RAW or kind in ALIASES:
        options = _options(dict(request.query_params))
        return [await read_body(request, models, models.find(options.model))], options
    raise unexpected("application/json, multipart/form-data or an image type", kind)


def _options(fields: dict[str, str]) -> ClassifyOptions:
    try:
        return ClassifyOptions.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from None


def _card(models: Models, service: Service) -> dict[str, Any]:
    return {
        "id": service.card.name,
        "object": "model",
        "created": models.created,
        "owned_by": "maxvision",
    }
