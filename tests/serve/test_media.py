"""Images by URL: who may be asked, and what may come back. No network is used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

httpcore = pytest.importorskip("httpcore")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.serve.errors import Refusal  # noqa: E402
from maxvision.serve.media import Fetcher, Guarded, is_public  # noqa: E402


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def fetch(url: str, *answers: bytes, hosts: tuple[str, ...] = ("a.org", "b.org")) -> bytes:
    backend = Answers([bytes(each) for each in answers])
    return asyncio.run(Fetcher(hosts, 100, backend)(url))


class Answers(httpcore.AsyncNetworkBackend):
    """Gives one prepared answer a connection."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers

    async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        return httpcore.AsyncMockStream([self._answers.pop(0), b""])


def test_an_image_is_fetched() -> None:
    assert fetch("http://a.org/cat.jpg", answer(b"cat")) == b"cat"


@pytest.mark.parametrize(
    "url",
    [
        "http://c.org/", "http://sub.a.org/", "http://a.org.c.org/", "http://a.org@c.org/",
        "http://u:p@a.org/", "http://a.org:22/", "ftp://a.org/", "file:///etc/passwd",
        "gopher://a.org/", "http://[::1", "http://127.0.0.1/", "https://a.org:80/",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(Refusal, match="does not fetch from that URL") as caught:
        fetch(url)
    assert caught.value.code == "url_not_allowed"
    assert "--allow-media-domain" in str(caught.value)


def test_redirects_are_checked() -> None:
    def to(url: str) -> bytes:
        return answer(b"", "302 Found", f"Location: {url}")

    assert fetch("http://a.org/x", to("http://b.org/y"), answer(b"cat")) == b"cat"
    with pytest.raises(Refusal, match="does not fetch from that URL"):
        fetch("http://a.org/x", to("http://169.254.169.254/latest"), answer(b"secret"))
    with pytest.raises(Refusal, match="could not be had"):
        fetch("http://a.org/x", *[to(f"http://{host}.org/") for host in "babab"])


@pytest.mark.parametrize(
    "came", [answer(b"", "404 Not Found"), b"nonsense\r\n\r\n", b"", answer(b"x")[:-1]]
)
def test_what_does_not_come_is_told(came: bytes) -> None:
    with pytest.raises(Refusal, match="could not be had"):
        fetch("http://a.org/cat.jpg", came)


def test_a_large_image_is_cut_short() -> None:
    with pytest.raises(Refusal, match="larger than 100 bytes"):
        fetch("http://a.org/cat.jpg", answer(bytes(101)))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("0.0.0.0", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("::1", False),
        ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("::", False),
    ],
)  # fmt: skip
def test_addresses_are_told_apart(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], []], ids=["local", "mixed", "none"]
)
def test_hosts_with_a_private_address_are_not_connected_to(
    monkeypatch: pytest.MonkeyPatch, found: list[str]
) -> None:
    async def connect() -> None:
        async def look_up(host: str, port: int, **_: Any) -> list[Any]:
            return [(None, None, None, "", (address, port)) for address in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        await Guarded().connect_tcp("a.org", 80)

    with pytest.raises(OSError, match="not public"):
        asyncio.run(connect())
