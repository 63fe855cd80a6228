"""What operators and balancers ask: health, readiness, figures."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from maxvision.serve.requests import models_of
from maxvision.serve.routes.common import ErrorAnswer, errors

router = APIRouter(tags=["state"])


@router.get("/health", summary="Is the server alive?")
async def health() -> dict[str, str]:
    """Answers as long as the server does."""
    return {"status": "alive"}


@router.get(
    "/ready",
    summary="Would a picture be classified now?",
    responses={503: {"description": "The model's process is being started, or the server ends."}},
)
async def ready(request: Request) -> dict[str, str]:
    """Answers 200 if the model's process lives and has run a picture, else 503."""
    models_of(request).check_ready(1)
    return {"status": "ready"}


@router.get(
    "/ping",
    summary="Would a picture be classified now? (SageMaker, TorchServe)",
    responses=errors(ErrorAnswer, 503),
)
async def ping(request: Request) -> dict[str, str]:
    """Answers as ``/ready`` does, in TorchServe's words."""
    models_of(request).check_ready(1)
    return {"status": "Healthy"}


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response)
async def metrics(request: Request) -> Response:
    """Shows queue, decode, inference and total times, batch sizes, refusals."""
    text, kind = models_of(request).metrics.render()
    return Response(text, media_type=kind)


@router.get("/version", summary="Versions")
async def version(request: Request) -> JSONResponse:
    """Names the version of MAX and the first model, its device and dtype; and all models."""
    models = [
        {
            "model": each.card.name,
            "family": each.card.family,
            "device": each.card.device,
            "dtype": each.card.dtype,
        }
        for each in models_of(request)
    ]
    return JSONResponse({"max": metadata.version("max"), **models[0], "models": models})
