"""The FastAPI app: routes, and what every request goes through.

A dialect is a module of ``serve.routes`` with a ``router``, listed in ``ROUTERS``.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import uuid
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.core import Service, request_id
from serve.errors import Refusal, ending
from serve.requests import HELD
from serve.routes import openai, state

log = logging.getLogger("maxvision.serve")

ROUTERS = (state.router, openai.router)

OPEN = ("/health", "/ready")
"""What needs no key, and is answered while the server drains."""

LINGER = 2.0
"""Seconds for which a body that nobody wants is read on, so that its sender sees the answer."""


def make_app(service: Service) -> FastAPI:
    """Makes the app of a service."""
    app = FastAPI(
        title="maxvision",
        description=f"Image classification by {service.card.name}.",
        version="1",
    )
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(Refusal, _refuse)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


class Gate:
    """Gives every request an id, asks for the key, counts, and turns faults into answers."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        key = service.options.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._service, scope, receive, send)
        request_id.set(exchange.id)
        probe = scope["path"] in OPEN
        self._service.active += not probe
        try:
            if not probe:
                self._check(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except Refusal as refusal:
            await exchange.answer(refusal)
        except Exception:
            log.exception("request %s failed", exchange.id)
            await exchange.answer(
                Refusal(500, "internal_error", "the server failed; its log has it by request_id")
            )
        finally:
            self._service.active -= not probe
            self._service.bodies.held -= scope.get(HELD, 0)

    def _check(self, scope: Scope) -> None:
        if self._key is not None and not self._known(scope):
            raise Refusal(
                401,
                "invalid_api_key",
                "the header Authorization: Bearer KEY was expected, with this server's key",
            )
        if self._service.draining:
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

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = uuid.uuid4().hex
        self._service = service
        self._receive = receive
        self._send = send
        self._scope = scope
        self._read = not any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        self._status = 0

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
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if not self._read or self._service.draining:
                message["headers"].append((b"connection", b"close"))
            self._service.metrics.requests.labels(str(self._status)).inc()
        elif not message.get("more_body", False) and not self._read:
            await self._send({**message, "more_body": True})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._discard(), LINGER)
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def answer(self, refusal: Refusal) -> None:
        """Answers with an error, if nothing was answered yet."""
        if self._status:
            return
        self._service.metrics.rejected.labels(refusal.code).inc()
        body = json.dumps(refusal.body(self.id)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **refusal.headers(),
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})

    async def _discard(self) -> None:
        while not self._read:
            await self.receive()


async def _refuse(request: Request, error: Any) -> Response:
    request.app.state.service.metrics.rejected.labels(error.code).inc()
    body = error.body(request_id.get(""))
    return JSONResponse(body, error.status, headers=error.headers())


async def _http(request: Request, error: Any) -> Response:
    code, message = {
        404: ("not_found", "there is no such path; /docs lists them"),
        405: ("method_not_allowed", "this path takes another method; /docs lists them"),
    }.get(error.status_code, ("invalid_request", "the request is not right; see /docs"))
    refusal = Refusal(error.status_code, code, message)
    response = await _refuse(request, refusal)
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: Any) -> Response:
    return await _refuse(request, invalid(error.errors()))


def invalid(errors: list[Any]) -> Refusal:
    """Turns the first of pydantic's errors into a sentence."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return Refusal(400, "invalid_request", f"{where}: {first['msg'].lower()}")
