"""The FastAPI app: routes, and what every request goes through.

A dialect is a module of ``serve.routes`` with a ``router``, listed in ``ROUTERS``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from maxvision.serve.access import Entry
from maxvision.serve.core import Work, request_id, work
from maxvision.serve.errors import Refusal, ending
from maxvision.serve.models import Models
from maxvision.serve.requests import HELD, models_of
from maxvision.serve.routes import huggingface, kserve, openai, page, state, vllm
from maxvision.serve.routes.common import ErrorAnswer, PlainError, invalid

log = logging.getLogger("maxvision.serve")

ROUTERS = (
    openai.router,
    huggingface.router,
    kserve.router,
    vllm.router,
    state.router,
    page.router,
)

OFTEN = {("POST", "/v1/classify"): openai.classify}
"""Endpoints that the gate calls itself: FastAPI, whose layers take their time, describes them.

They take the request alone, raise nothing but ``Refusal``, and give a response.
"""

PROBES = ("/health", "/ready", "/ping", "/v2/health/live", "/v2/health/ready")
"""What needs no key, and is answered while the server drains."""

PAGES = page.PATHS
"""What a browser shows before anybody could give it the key; it says nothing of the model."""

ID = "maxvision.id"
"""The scope's key for a request's id, if who calls the app has given it one and answers with it."""

LINGER = 2.0
"""Seconds for which a body that nobody wants is read on, so that its sender sees the answer."""


def make_app(models: Models) -> FastAPI:
    """Makes the app of some models."""
    app = FastAPI(
        title="maxvision",
        description=f"Image classification by {models.names}.",
        version="1",
        docs_url=None,  # page.py has our own, which loads nothing from elsewhere
        redoc_url=None,
    )
    app.state.models = models
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Gate, models=models)
    if proxies := models.options.forwarded_allow_ips:
        hosts = ["*"] if "*" in proxies else list(proxies)
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=hosts)  # before the gate
    app.add_exception_handler(Refusal, _refuse)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.openapi = lambda: _describe(app, models.options.api_key is not None)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI, guarded: bool) -> dict[str, Any]:
    """Describes the routes as they are: errors in their shapes, and the key if one is asked for."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        made["info"]["x-model"] = app.state.models.first.card.name
        schemas = made["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for shape in (ErrorAnswer, PlainError):
            schemas.setdefault(shape.__name__, shape.model_json_schema())
        if guarded:
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)  # ``_invalid`` answers 400
                if guarded and not _is_open(method.upper(), path):
                    operation["security"] = [{"key": []}]
        app.openapi_schema = made
    return app.openapi_schema


def _is_open(method: str, path: str) -> bool:
    return path in PROBES or (path in PAGES and method in ("GET", "HEAD"))


def error_of(path: str, refusal: Refusal, id: str) -> dict[str, Any]:
    """Makes the JSON of a refusal, in the shape of the dialect that is spoken at a path."""
    if path == "/" or path.startswith("/models/"):
        return huggingface.error(refusal)
    if path == "/v2" or path.startswith("/v2/"):
        return kserve.error(refusal)
    return refusal.body(id)


class Gate:
    """Gives every request an id, asks for the key, counts, and turns faults into answers."""

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app = app
        self._models = models
        key = models.options.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._models, scope, receive, send)
        request_id.set(exchange.id)
        doing = None
        if self._models.access.on:
            doing = Work()
            work.set(doing)
        probe = scope["path"] in PROBES
        board = self._models.board
        board.add(board.REQUESTS, not probe)
        try:
            if not probe:
                self._check(scope)
            app = self._app
            if endpoint := OFTEN.get((scope["method"], scope["path"])):
                app = await endpoint(Request(scope, exchange.receive))
            await app(scope, exchange.receive, exchange.send)
        except Refusal as refusal:
            await exchange.answer(refusal)
        except Exception:
            log.exception("request %s failed", exchange.id)
            await exchange.answer(
                Refusal(500, "internal_error", "the server failed; its log has it by request_id")
            )
        finally:
            board.add(board.REQUESTS, -(not probe))
            self._models.bodies.free(scope.get(HELD, 0))
            if doing is not None:
                exchange.log(doing)

    def _check(self, scope: Scope) -> None:
        guarded = self._key is not None and not _is_open(scope["method"], scope["path"])
        if guarded and not self._known(scope):
            raise Refusal(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; send this server's key as KEY in the header"
                " Authorization: Bearer KEY",
            )
        if self._models.draining:
            raise ending()

    def _known(self, scope: Scope) -> bool:
        assert self._key is not None
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
            elif name == b"x-api-key":
                given = value
        return hmac.compare_digest(given, self._key)


class _Exchange:
    """One request and its answer, as they pass the gate."""

    def __init__(self, models: Models, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = scope.get(ID) or uuid.uuid4().hex
        self._models = models
        self._receive = receive
        self._send = send
        self._scope = scope
        self._read = not any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        self._status = 0
        self._size = 0
        self._begun = time.perf_counter()

    async def receive(self) -> Message:
        """Passes a message on."""
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._read = True
        return message

    async def send(self, message: Message) -> None:
        """Passes an answer on, with the id; reads what is left of the body before its end."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = list(message.get("headers", ()))
            if ID not in self._scope:
                message["headers"].append((b"x-request-id", self.id.encode()))
            if not self._read or self._models.draining:
                message["headers"].append((b"connection", b"close"))
            self._models.metrics.requests.labels(str(self._status)).inc()
        else:
            self._size += len(message.get("body", b""))
        if message["type"] == "http.response.body" and not (
            message.get("more_body", False) or self._read
        ):
            await self._send({**message, "more_body": True})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(), LINGER)
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def answer(self, refusal: Refusal) -> None:
        """Answers with an error, if nothing was answered yet."""
        if self._status:
            return
        self._models.metrics.rejected.labels(refusal.code).inc()
        body = json.dumps(error_of(self._scope["path"], refusal, self.id)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **refusal.headers(),
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})

    def log(self, work: Work) -> None:
        """Writes the line of the access log."""
        scope, timing = self._scope, work.timing
        client = scope.get("client")
        self._models.access.add(
            Entry(
                client=client[0] if client else None,
                method=scope["method"],
                path=scope.get("raw_path", b"").decode("latin-1"),
                version=scope["http_version"],
                status=self._status or 499,
                size=self._size,
                ms=1e3 * (time.perf_counter() - self._begun),
                id=self.id,
                images=work.images,
                model=work.model,
                batch=timing.batch if timing else None,
                decode_ms=timing.decode_ms if timing else None,
                queue_ms=timing.queue_ms if timing else None,
                inference_ms=timing.inference_ms if timing else None,
            )
        )

    async def _discard(self) -> None:
        while not self._read:
            await self.receive()


async def _refuse(request: Request, error: Any) -> Response:
    models_of(request).metrics.rejected.labels(error.code).inc()
    body = error_of(request.scope["path"], error, request_id.get(""))
    return JSONResponse(body, error.status, headers=error.headers())


async def _http(request: Request, error: Any) -> Response:
    if error.status_code not in (404, 405):
        refusal = Refusal(
            error.status_code, "invalid_request", "the request is not right; see /docs"
        )
        return await _refuse(request, refusal)
    if not (methods := _methods(request)):
        refusal = Refusal(404, "not_found", "there is no such route; /docs lists them")
        return await _refuse(request, refusal)
    refusal = Refusal(
        405, "method_not_allowed", "this route takes another method; /docs lists them"
    )
    response = await _refuse(request, refusal)
    response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def _methods(request: Request) -> set[str]:
    """Lists the methods that a path takes, if a model that it names is served.

    The router alone cannot tell: a model's name may have slashes, so that ``/v2/models/M/nothing``
    is the description of a model ``M/nothing`` to it.
    """
    found: set[str] = set()
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, Route) and (match := route.path_regex.match(request.url.path)):
            model = match.groupdict().get("model")
            if model is None or model in models_of(request):
                found |= route.methods or set()
    return found


async def _invalid(request: Request, error: Any) -> Response:
    return await _refuse(request, invalid(error.errors()))
