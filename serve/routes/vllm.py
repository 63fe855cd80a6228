"""vLLM's ``/classify``, with images where vLLM has texts."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from maxvision.serve.answers import Function, score
from maxvision.serve.core import request_id
from maxvision.serve.requests import unless_gone
from maxvision.serve.routes.common import (
    ERRORS,
    EXAMPLE,
    InputRequest,
    as_json,
    as_schema,
    body,
    read_input,
    usage,
)

router = APIRouter(tags=["vLLM"])


class PoolingRequest(InputRequest):
    """Images to classify; what vLLM asks of texts is ignored."""

    use_activation: bool | None = Field(None, description="False for logits and no softmax.")


class ClassesOut(BaseModel):
    """One image's answer: the likeliest label, and a number for each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class TokensOut(BaseModel):
    """No tokens, and what the request took; of several images the longest."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    decode_ms: float
    queue_ms: float
    inference_ms: float
    total_ms: float
    batch: int


class PoolingAnswer(BaseModel):
    """The images' answers, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassesOut]
    usage: TokensOut


@router.post(
    "/classify",
    summary="Classify images",
    response_model=PoolingAnswer,
    responses=ERRORS,
    openapi_extra=body(as_schema(PoolingRequest, input=f"data:image/gif;base64,{EXAMPLE}")),
)
async def classify(request: Request) -> Response:
    """Gives the probability of each class, for each image."""
    service, asked, images = await read_input(request, PoolingRequest)
    made = await unless_gone(request, service.infer(images))
    function: Function = "none" if asked.use_activation is False else "softmax"
    labels = service.card.labels
    return as_json(
        {
            "id": f"classify-{request_id.get()}",
            "object": "list",
            "created": int(time.time()),
            "model": service.card.name,
            "data": [
                {
                    "index": i,
                    "label": labels[int(np.argmax(row))],
                    "probs": score(row, function).tolist(),
                    "num_classes": len(labels),
                }
                for i, row in enumerate(made.logits)
            ],
            "usage": {
                "prompt_tokens": 0,
                "total_tokens": 0,
                "completion_tokens": 0,
                **usage(made.timing),
            },
        }
    )
