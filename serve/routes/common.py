"""What the dialects share: bodies read by a schema, answers as JSON, and their description."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from maxvision.common.pictures import FORMATS
from maxvision.serve.core import Image, Service, Timing
from maxvision.serve.errors import Refusal
from maxvision.serve.models import Models
from maxvision.serve.requests import media_type, models_of, read_body

EXAMPLE = "R0lGODdhCAAIAIEAADyM3Ch4KAAAAAAAACwAAAAACAAIAAAIFQABCBxIsKDBgwgJBljIsKHDhwwDAgA7"
"""A picture of 8 x 8 pixels, a GIF in base64: the examples of the description can be sent."""

RAW = tuple(each.media_type for each in FORMATS)
ALIASES = ("image/jpg", "image/pjpeg", "image/x-ms-bmp", "image/tif", "application/octet-stream")


class InputRequest(BaseModel):
    """A model and images, as OpenAI calls them; other fields are ignored."""

    model: str | None = Field(None, description="A served model; the first one if left out.")
    input: str | list[str] = Field(description="Files in base64, or data: URLs of them.")


Asked = TypeVar("Asked", bound=InputRequest)


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    code: str
    request_id: str


class ErrorAnswer(BaseModel):
    """A refusal."""

    error: ErrorBody


class PlainError(BaseModel):
    """A refusal in one sentence; the header X-Request-ID names it in the log."""

    error: str


_STATUS = {
    400: "An image or an argument is not right.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body, an image or the number of images is too large.",
    415: "The content type or the encoding is not taken.",
    429: "As many images as may be are under way; see Retry-After.",
    500: "The model failed on an image.",
    503: "The model is being made ready, or the server ends; see Retry-After.",
}


def errors(shape: type[BaseModel], *only: int) -> dict[int | str, dict[str, Any]]:
    """Describes the refusals of a route: all that one with images has, or some."""
    return {
        status: {"model": shape, "description": text}
        for status, text in _STATUS.items()
        if not only or status in only
    }


ERRORS = errors(ErrorAnswer)


def body(content: dict[str, Any], *, raw: bool = False) -> dict[str, Any]:
    """Describes a route's body: what a content type holds, and pictures as they are."""
    if raw:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content = content | dict.fromkeys(RAW, binary)
    return {"requestBody": {"required": True, "content": content}}


def as_schema(schema: type[BaseModel], **example: Any) -> dict[str, Any]:
    """Describes JSON of a schema, with an example of it."""
    made = schema.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"application/json": {"schema": made, "example": example}}


def as_json(content: Any) -> Response:
    """Answers JSON."""
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def usage(timing: Timing) -> dict[str, float]:
    """Rounds what a request took to µs."""
    return {name: round(value, 3) for name, value in vars(timing).items()}


async def parse(models: Models, schema: type[Any], body: bytes) -> Any:
    """Reads JSON by a schema, on a thread if it is long.

    Raises:
        Refusal: If it is broken, or not of the schema.
    """
    try:
        if len(body) > 65536:
            return await models.in_thread(schema.model_validate_json, body)
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from None


async def read_input(request: Request, schema: type[Asked]) -> tuple[Service, Asked, list[Image]]:
    """Reads JSON of a schema, the model that it names and the images that it holds.

    Raises:
        Refusal: 415, if the content type is another; 404, if it names no model that is served;
            400, if it is no such JSON.
    """
    if media_type(request) != "application/json":
        raise unexpected("application/json", media_type(request))
    models = models_of(request)
    asked: Asked = await parse(models, schema, await read_body(request, models))
    images: list[Image] = [asked.input] if isinstance(asked.input, str) else list(asked.input)
    return models.find(asked.model), asked, images


def invalid(errors: Sequence[Any]) -> Refusal:
    """Turns the first of pydantic's errors into a sentence."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return not_json()
    where = ".".join(str(part) for part in first["loc"])
    text = first["msg"][0].lower() + first["msg"][1:]
    return Refusal(400, "invalid_request", f"{where}: {text}" if where else text)


def not_json() -> Refusal:
    """Says that a body is no JSON."""
    return Refusal(400, "invalid_json", "the body is not valid JSON; /docs has an example")


def unexpected(wanted: str, came: str) -> Refusal:
    """Says which content type is taken in place of the one that came, if one did."""
    what = f"the Content-Type is {came[:60]!r}" if came else "there is no Content-Type"
    return Refusal(
        415,
        "content_type_not_supported",
        f"{what}; set the header Content-Type to {wanted}",
    )
