"""The pages for a browser: ``/`` classifies pictures, ``/docs`` shows what all routes are.

Their files are in serve/page. They load nothing from elsewhere, and their policy forbids it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter()

_FOLDER = Path(__file__).resolve().parents[1] / "page"
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/page/style.css": "style.css",
    "/page/common.js": "common.js",
    "/page/index.js": "index.js",
    "/page/docs.js": "docs.js",
    "/favicon.ico": "icon.svg",
}

PATHS = tuple(_FILES)

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Only this server's own files, and pictures that the user chose."""


class _File:
    """A file that is answered as it was when the server started."""

    def __init__(self, name: str) -> None:
        path = _FOLDER / name
        self._body = path.read_bytes()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "Content-Type": f"{_KINDS[path.suffix]}; charset=utf-8",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": self._tag,
        }

    async def answer(self, request: Request) -> Response:
        """Answers the file, or 304 if the browser has it."""
        if request.headers.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


for _path, _name in _FILES.items():
    router.add_route(_path, _File(_name).answer, methods=["GET"], include_in_schema=False)
