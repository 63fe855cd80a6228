"""Bytes that no client would send: broken, cut, endless and dripped requests, by a seed."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable

PICTURE = bytes.fromhex("47494638376108000800")  # the beginning of a GIF
PATHS = ("/", "/classify", "/v1/classify", "/v1/embeddings", "/models/resnet-cifar10",
         "/v2/models/resnet-cifar10/infer", "/health", "/metrics", "/v1/models/x", "/docs",
         "/nothing", "/ping", "/v2/repository/index", "/v2/models/resnet-cifar10/stats",
         "/../../etc/passwd", "/%2e%2e/%00", "//", "*", "http://x/y")  # fmt: skip
KINDS = ("application/json", "image/jpeg", "multipart/form-data; boundary=x", "text/plain", "",
         "multipart/form-data", "application/json; charset=\xff")  # fmt: skip
BODIES = (b"", b"{", b"{}", b'{"images": ["aGk="]}', b"[" * 5000, b"\0" * 300, PICTURE,
          b"--x\r\n", b"\xff\xfe" * 50)  # fmt: skip

Pieces = list[bytes]


def request(pick: random.Random, *, framed: bool = True) -> bytes:
    """Makes a request that HTTP allows; without a frame its body is left to the caller."""
    method = pick.choice(["GET", "POST", "POST", "PUT", "HEAD", "OPTIONS", "DELETE"])
    body = pick.choice(BODIES) if framed else b""
    head = [f"{method} {pick.choice(PATHS)} HTTP/1.1", "Host: x"]
    head.append(f"Content-Type: {pick.choice(KINDS)}")
    if framed:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode("latin-1") + b"\r\n" * (2 if framed else 1) + body


def garbage(pick: random.Random) -> Pieces:
    return [pick.randbytes(pick.randrange(1, 3000))]


def half(pick: random.Random) -> Pieces:
    whole = request(pick)
    return [whole[: pick.randrange(len(whole))]]


def mutated(pick: random.Random) -> Pieces:
    data = bytearray(request(pick))
    for _ in range(pick.randrange(1, 8)):
        at = pick.randrange(len(data))
        what = pick.randrange(4)
        if what == 0:
            data[at] = pick.randrange(256)
        elif what == 1:
            del data[at : at + pick.randrange(1, 20)]
        elif what == 2:
            data[at:at] = pick.choice([b"\r\n", b"\0", b"\n", b" ", b":", b"\xff", b"\r"])
        else:
            data[at:at] = data[at : at + 50]
        data = data or bytearray(b"G")
    return [bytes(data)]


def headers(pick: random.Random) -> Pieces:
    start = request(pick, framed=False)
    size = pick.choice([70_000, 400_000, 2_000_000])
    line = pick.choice([b"X: " + b"a" * size, b"a" * size, b"X: y\r\n" * (size // 6)])
    return [start, line, b"\r\n\r\n"]


def target(pick: random.Random) -> Pieces:
    size = pick.choice([10_000, 300_000])
    return [
        b"GET /" + pick.choice([b"a", b"%41", b"/", b"?", b"\xc3"]) * size,
        b" HTTP/1.1\r\n\r\n",
    ]


def chunks(pick: random.Random) -> Pieces:
    start = request(pick, framed=False) + b"Transfer-Encoding: chunked\r\n\r\n"
    return [start, *(
        pick.choice([b"5\r\nhello\r\n", b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"5\r\nhel",
                     b"5;" + b"x" * 90_000 + b"\r\nhello\r\n", b"0\r\nX: " + b"y" * 90_000,
                     b"0\r\nX-API-Key: z\r\n\r\n", b"5\nhello\n", b"0\r\n\r\n"])
        for _ in range(pick.randrange(1, 5))
    )]  # fmt: skip


def lengths(pick: random.Random) -> Pieces:
    start = request(pick, framed=False)
    length = pick.choice([b"0", b"3", b"99", b"-1", b"+5", b"x", b"", b"9" * 30, b"5, 5", b"\xb2"])
    more = pick.choice([b"", b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n"])
    return [start + b"Content-Length: " + length + b"\r\n" + more + b"\r\n", b"hello"]


def protocols(pick: random.Random) -> Pieces:
    return [pick.choice([
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\n", b"GET / HTTP/1.0\r\n\r\n", b"\r\n" * 500,
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /v1/classify HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
        b"\x05\x01\x00", b"\x80\x80\x01\x03\x01", b"EHLO x\r\n",
    ])]  # fmt: skip


def pipelined(pick: random.Random) -> Pieces:
    return [b"".join(request(pick) for _ in range(pick.randrange(2, 40)))]


def dripped(pick: random.Random) -> Pieces:
    whole = request(pick)
    return [whole[i : i + 1] for i in range(min(len(whole), 150))]


ATTACKS: tuple[Callable[[random.Random], Pieces], ...] = (
    garbage, half, mutated, headers, target, chunks, lengths, protocols, pipelined, dripped,
)  # fmt: skip


def send(address: tuple[str, int], pieces: Pieces, patience: float = 0.3) -> bytes:
    """Sends pieces, each in a packet of its own, and reads what comes until it is quiet."""
    got = b""
    with socket.create_connection(address, timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                connection.sendall(piece)
                if len(pieces) > 10:
                    time.sleep(0.001)
            connection.settimeout(patience)
            while data := connection.recv(65536):
                got += data
        except (TimeoutError, ConnectionError):
            pass  # it is quiet, or has closed
    return got


def statuses(answer: bytes) -> list[int]:
    """Reads the statuses of all answers of a connection."""
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) [\w -]*\r\n", answer)]


def attack(address: tuple[str, int], seed: int) -> tuple[str, list[int]]:
    """Sends what belongs to a seed; returns its kind and the statuses that came."""
    pick = random.Random(seed)
    kind = ATTACKS[seed % len(ATTACKS)]
    return kind.__name__, statuses(send(address, kind(pick)))
