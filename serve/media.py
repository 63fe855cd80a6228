"""Fetches images by URL, from hosts that the operator allowed and from public addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from maxvision.serve.errors import Refusal

REDIRECTS = 3
SECONDS = 10.0
"""Time for an image, redirects included."""

_FAILURES = (
    OSError,
    ValueError,
    asyncio.TimeoutError,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


def is_url(text: str) -> bool:
    """Tells a URL from base64 and data: URLs."""
    return _URL.match(text[:32]) is not None


class Fetcher:
    """Fetches images.

    Every redirect is checked as the first URL is. A host's address is looked up once, checked and
    connected to, so that a second look-up cannot give another; proxies are not used.

    Args:
        hosts: The hosts that may be named, exactly; in lower case.
        max_bytes: Of an image.
        backend: Makes connections.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        max_bytes: int,
        backend: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._hosts = frozenset(hosts)
        self._max_bytes = max_bytes
        self._backend = backend or Guarded()

    async def __call__(self, url: str) -> bytes:
        """Fetches an image.

        Raises:
            Refusal: If it may not or cannot be had. It does not say which of the two a host that
                is allowed has done, so that nothing is learnt about networks behind the server.
        """
        try:
            return await asyncio.wait_for(self._follow(url), SECONDS)
        except _FAILURES:
            raise _unfetched() from None

    def check(self, url: str) -> None:
        """Compares a URL with what is allowed.

        Raises:
            Refusal: If it is not http or https, on its usual port, without a name and password, of
                an allowed host.
        """
        try:
            parts = urlsplit(url)
            allowed = (
                parts.scheme in ("http", "https")
                and parts.hostname in self._hosts
                and parts.port in (None, 443 if parts.scheme == "https" else 80)
                and parts.username is parts.password is None
            )
        except ValueError:
            allowed = False
        if not allowed:
            raise Refusal(
                400,
                "url_not_allowed",
                "this server does not fetch from that URL; send the image's bytes in base64, or a"
                " URL of a host that --allow-media-domain HOST allows",
            )

    async def _follow(self, url: str) -> bytes:
        async with httpcore.AsyncConnectionPool(network_backend=self._backend) as pool:
            for _ in range(REDIRECTS + 1):
                self.check(url)
                async with pool.stream("GET", url, headers={"Accept": "image/*"}) as answer:
                    headers = {name.lower(): value for name, value in answer.headers}
                    if answer.status in (301, 302, 303, 307, 308):
                        url = urljoin(url, headers.get(b"location", b"").decode("ascii"))
                        continue
                    if answer.status != 200:
                        raise _unfetched()
                    return await self._read(answer)
        raise _unfetched()

    async def _read(self, answer: httpcore.Response) -> bytes:
        data = bytearray()
        async for chunk in answer.aiter_stream():
            data += chunk
            if len(data) > self._max_bytes:
                raise Refusal(
                    413,
                    "body_too_large",
                    f"the image at the URL is larger than {self._max_bytes:,} bytes; scale it down",
                )
        return bytes(data)


class Guarded(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        """Looks a host up and connects to its first address, if all of them are public.

        Raises:
            OSError: If one is not, or there is none.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(map(is_public, addresses)):
            raise OSError("an address that is not public")
        return await self._inner.connect_tcp(addresses[0], port, *args, **options)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)


def is_public(address: str) -> bool:
    """Tells whether an address is one of the internet: not local, private, reserved or many's."""
    read = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(read, "ipv4_mapped", None) or getattr(read, "sixtofour", None)
    if inner is not None:
        return is_public(str(inner))
    nat64 = ipaddress.ip_network("64:ff9b::/96")
    if read.version == 6 and read in nat64:
        return is_public(str(ipaddress.IPv4Address(int(read) & 0xFFFFFFFF)))
    return read.is_global and not read.is_multicast


def _unfetched() -> Refusal:
    return Refusal(
        400, "url_not_fetched", "the image at the URL could not be had; send its bytes instead"
    )
