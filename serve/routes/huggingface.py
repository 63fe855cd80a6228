"""Hugging Face's image classification, as ``InferenceClient(model=URL)`` and its API speak it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response

from maxvision.runtime.predictions import Prediction
from maxvision.serve.answers import Function
from maxvision.serve.core import Image, Service
from maxvision.serve.errors import Refusal
from maxvision.serve.requests import media_type, models_of, read_body, service_at, unless_gone
from maxvision.serve.routes.common import (
    ALIASES,
    EXAMPLE,
    RAW,
    PlainError,
    as_json,
    body,
    errors,
    parse,
    unexpected,
)

router = APIRouter(tags=["Hugging Face"])

UNSAID = ("", "application/x-www-form-urlencoded")
"""What clients of Hugging Face send a picture as if they do not say what it is, curl among them."""


class Parameters(BaseModel):
    """What may be asked beside the images."""

    model_config = ConfigDict(extra="forbid")

    top_k: int | None = Field(None, ge=1, description="Classes to name; 5 if left out.")
    function_to_apply: Function | None = Field(None, description="softmax if left out.")


class TaskRequest(BaseModel):
    """Images and what is asked of them; other fields, such as options, are ignored."""

    inputs: str | list[str] = Field(description="Files in base64, or data: URLs of them.")
    parameters: Parameters | None = None


class LabelOut(BaseModel):
    """One class of an image's answer."""

    label: str
    score: float


class TaskAnswer(RootModel[list[LabelOut] | list[list[LabelOut]]]):
    """The classes of the image; of a list of images a list of them."""


_ROUTE: dict[str, Any] = {
    "summary": "Classify an image",
    "response_model": TaskAnswer,
    "responses": errors(PlainError),
    "openapi_extra": body(
        {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["inputs"],
                    "properties": {
                        "inputs": TaskRequest.model_json_schema()["properties"]["inputs"],
                        "parameters": Parameters.model_json_schema(),
                    },
                },
                "example": {"inputs": EXAMPLE, "parameters": {"top_k": 3}},
            }
        },
        raw=True,
    ),
}


@router.post("/", **_ROUTE)
async def task(request: Request) -> Response:
    """Names the likeliest classes of an image, or of each of a list."""
    return await _classify(request, models_of(request).first)


@router.post("/models/{model:path}", **_ROUTE)
async def task_of_model(model: str, request: Request) -> Response:
    """Names the likeliest classes of an image, or of each of a list; the path names the model."""
    service = service_at(request, model)
    return await _classify(request, service)


def error(refusal: Refusal) -> dict[str, Any]:
    """Makes the JSON of a refusal."""
    made: dict[str, Any] = {"error": refusal.message}
    if refusal.status == 503 and refusal.retry_after is not None:
        made["estimated_time"] = float(refusal.retry_after)  # its clients wait for so long
    return made


async def _classify(request: Request, service: Service) -> Response:
    kind, models = media_type(request), models_of(request)
    parameters = Parameters.model_validate({})
    images: list[Image]
    single = True
    if kind == "application/json":
        asked = await parse(models, TaskRequest, await read_body(request, models, service))
        parameters = asked.parameters or parameters
        single = isinstance(asked.inputs, str)
        images = [asked.inputs] if single else list(asked.inputs)
    elif kind in (*RAW, *ALIASES, *UNSAID):
        images = [await read_body(request, models, service)]
    else:
        raise unexpected("application/json or an image type", kind)
    top_k, function = parameters.top_k or 5, parameters.function_to_apply or "softmax"
    answers = await unless_gone(request, service.classify(images, top_k, function))
    made = [[_label(p) for p in predictions] for predictions in answers.predictions]
    return as_json(made[0] if single else made)


def _label(prediction: Prediction) -> dict[str, Any]:
    return {"label": prediction.label, "score": prediction.score}
