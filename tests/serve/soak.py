"""Soaks a server in good and bad requests: ``python -m tests.serve.soak --requests 100000``.

A tenth of them is bad, in every way that a test knows. Every good one has to be answered with the
classes that run_graph.py names, every bad one with its 4xx, and memory has to stay where it was
after the first tenth. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageOps

from tests.serve import attacks
from tests.serve.conftest import EXAMPLES
from tests.serve.dialects import JSON, MODEL, Call, calls
from tests.serve.started import ROOT, Server, answers_of, serving

BAD = 0.1  # of all requests
PICTURES = 40
DRIFT = 0.05  # of memory, after the first tenth
SAMPLES = 200  # of memory, in a run
PATIENCE = 60.0  # s that an answer may take
ARGV = ["-m", "serve", "--model", MODEL, "--device", "cpu", "--port", "0", "--no-embeddings"]


@dataclass
class Findings:
    """What a soak has found.

    Attributes:
        good: Good requests that were answered rightly, by dialect.
        bad: Bad requests that were answered rightly, by kind.
        wrong: What was not, in words.
        memory: Resident bytes of all processes of the server, over time.
        first: How many of ``memory`` belong to the first tenth.
        seconds: What it took.
    """

    good: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    first: int = 0
    seconds: float = 0.0

    @property
    def drift(self) -> float:
        """The largest change of memory after the first tenth, as a share of what it was then."""
        start = self.memory[self.first]
        return max((abs(each - start) / start for each in self.memory[self.first :]), default=0)

    def __str__(self) -> str:
        good, bad = sum(self.good.values()), sum(self.bad.values())
        start, end = self.memory[self.first], self.memory[-1]
        lines = [
            f"{good + bad + len(self.wrong):,} requests in {self.seconds:.0f} s: {good:,} good ones"
            f" and {bad:,} bad ones answered rightly, {len(self.wrong)} not",
            f"memory: {start / 2**20:.0f} MiB after the first tenth, {end / 2**20:.0f} MiB at the"
            f" end, never further from it than {100 * self.drift:.1f} %",
            *(f"  {count:8,}  {name}" for name, count in sorted(self.good.items())),
            *(f"  {count:8,}  bad: {name}" for name, count in sorted(self.bad.items())),
            *self.wrong[:20],
        ]
        return "\n".join(lines)


def pictures(folder: Path, seed: int) -> list[Path]:
    """Makes small pictures of the examples: parts, mirrored and turned."""
    pick = random.Random(seed)
    made = []
    for i in range(PICTURES):
        image = Image.open(EXAMPLES[i % len(EXAMPLES)]).convert("RGB")
        size = pick.randrange(100, min(image.size))
        left, top = (pick.randrange(side - size + 1) for side in image.size)
        part = image.crop((left, top, left + size, top + size)).resize((140, 140))
        part = ImageOps.mirror(part) if pick.random() < 0.5 else part
        made.append(folder / f"{i}.{('jpg', 'png', 'webp')[i % 3]}")
        part.save(made[-1])
    return made


def labels() -> list[str]:
    """Reads the names of the model's classes."""
    config = json.loads((ROOT / "weights/bundled" / MODEL / "config.json").read_text())
    return [name for _, name in sorted((int(i), name) for i, name in config["id2label"].items())]


def bad_calls() -> dict[str, tuple[int, str, dict[str, str], bytes]]:
    """Makes a request of each bad kind: status, path, headers, body."""
    cat = (ROOT / "examples/cat.jpg").read_bytes()
    bomb = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(bomb, "PNG")
    jpeg, as_json = {"Content-Type": "image/jpeg"}, {"Content-Type": JSON}
    many = json.dumps({"images": [base64.b64encode(b"x").decode()] * 33}).encode()
    shape = {"name": "pixels", "shape": [1, 3, 9, 9], "datatype": "UINT8", "data": [1]}
    return {
        "text": (400, "/v1/classify", jpeg, b"hello"),
        "empty": (400, "/", jpeg, b""),
        "truncated": (400, "/v1/classify", jpeg, cat[: len(cat) // 2]),
        "bomb": (413, "/", {"Content-Type": "image/png"}, bomb.getvalue()),
        "too many": (413, "/v1/classify", as_json, many),
        "too large": (413, "/v1/classify", {**jpeg, "Content-Length": str(2**30)}, b""),
        "broken JSON": (400, "/classify", as_json, b'{"input": '),
        "broken base64": (400, "/", as_json, b'{"inputs": "!"}'),
        "wrong field": (400, "/v1/classify", as_json, b'{"images": ["aGk="], "top_k": 0}'),
        "wrong shape": (400, f"/v2/models/{MODEL}/infer", as_json,
                        json.dumps({"inputs": [shape]}).encode()),
        "wrong type": (415, "/v1/classify", {"Content-Type": "text/plain"}, cat),
        "compressed": (415, "/v1/classify", {**jpeg, "Content-Encoding": "gzip"}, cat),
        "unknown model": (404, "/models/other", jpeg, cat),
        "unknown path": (404, "/v1/nothing", jpeg, cat),
        "wrong method": (405, "/v2", as_json, b"{}"),
    }  # fmt: skip


class Client:
    """One connection after the other, one request at a time."""

    def __init__(self, server: Server) -> None:
        self.host, port = server.url.removeprefix("http://").split(":")
        self.port = int(port)
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Posts; returns the answer's status and body."""
        if self._ends is None:
            self._ends = await asyncio.open_connection(self.host, self.port)
        reader, writer = self._ends
        fields = {"Host": "x", "Content-Length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        given = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        answer = await reader.readexactly(int(given["content-length"]))
        if given.get("connection") == "close":
            self.close()
        return int(head.split()[1]), answer

    async def leave(self, path: str, headers: dict[str, str], body: bytes, sent: int) -> None:
        """Sends as much of a body as is said, and leaves."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"Content-Length: {len(body)}\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\n{length}{lines}\r\n".encode() + body[:sent])
        await writer.drain()
        writer.close()

    def close(self) -> None:
        """Leaves."""
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None


def resident(server: Server) -> int:
    """Counts the resident bytes of a server's processes."""
    pids, todo = [], [server.process.pid]
    while todo:
        pids.append(todo.pop())
        children = Path(f"/proc/{pids[-1]}/task/{pids[-1]}/children")
        todo += map(int, children.read_text().split())
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return 4096 * sum(pages)


class Soak:
    """A run of requests, of which several are under way."""

    def __init__(self, server: Server, requests: int, seconds: float, seed: int) -> None:
        self.findings = Findings()
        self._server = server
        self._requests = requests
        self._seconds = seconds
        self._pick = random.Random(seed)
        self._sent = 0
        self._begun = 0.0
        self._bad = bad_calls()
        with tempfile.TemporaryDirectory() as folder:
            files = [*EXAMPLES, *pictures(Path(folder), seed)]
            wanted = answers_of(files)
            self._good = [
                (name, call, answer)
                for file, answer in zip(files, wanted, strict=True)
                for name, call in calls(file.read_bytes(), labels()).items()
            ]

    async def run(self, clients: int) -> Findings:
        """Sends everything."""
        self._begun = time.monotonic()
        await asyncio.gather(*(self._client() for _ in range(clients)))
        self.findings.seconds = time.monotonic() - self._begun
        return self.findings

    def _progress(self) -> float:
        spent = (time.monotonic() - self._begun) / self._seconds
        return max(self._sent / self._requests, spent)

    async def _client(self) -> None:
        client = Client(self._server)
        while (progress := self._progress()) < 1:
            self._sent += 1
            if progress >= len(self.findings.memory) / SAMPLES:
                self.findings.memory.append(resident(self._server))
                if progress < BAD:
                    self.findings.first = len(self.findings.memory) - 1
            try:
                await asyncio.wait_for(self._one(client), PATIENCE)
            except Exception as error:
                self.findings.wrong.append(f"no answer: {error!r}")
                client.close()
        client.close()

    async def _one(self, client: Client) -> None:
        found = self.findings
        if self._pick.random() >= BAD:
            name, call, wanted = self._pick.choice(self._good)
            status, body = await client.ask(call.path, call.headers, call.body)
            if status == 200 and same(call, body, wanted):
                found.good[name] += 1
            else:
                found.wrong.append(f"{name}: {status} {body[:200]!r}")
            return
        kind = self._pick.choice([*self._bad, "leaves", "half a body", "socket"])
        if kind == "socket":
            address, seed = (client.host, client.port), self._pick.randrange(10**6)
            _, came = await asyncio.to_thread(attacks.attack, address, seed)
            if any(status >= 500 for status in came):
                found.wrong.append(f"attack {seed}: {came}")
                return
        elif kind in ("leaves", "half a body"):
            _, call, _ = self._pick.choice(self._good)
            sent = len(call.body) // (1 if kind == "leaves" else 2)
            await client.leave(call.path, call.headers, call.body, sent)
        else:
            wanted_status, path, headers, data = self._bad[kind]
            status, body = await client.ask(path, headers, data)
            if status != wanted_status:
                found.wrong.append(f"{kind}: {status} {body[:200]!r}")
                return
        found.bad[kind] += 1


def same(call: Call, body: bytes, wanted: list[dict]) -> bool:
    """Compares an answer with run_graph.py's: its classes, and their scores."""
    got = call.read(json.loads(body))
    return [label for label, _ in got] == [each["label"] for each in wanted] and all(
        math.isclose(score, each["score"], rel_tol=1e-4, abs_tol=10.0**-call.digits)
        for (_, score), each in zip(got, wanted, strict=True)
    )


def soak(requests: int, seconds: float, clients: int, seed: int, log: Path) -> Findings:
    """Starts a server and soaks it.

    Args:
        requests: How many are sent.
        seconds: After which it ends, if they are not all sent by then.
        clients: Requests that are under way at once.
        seed: Of pictures and of the requests' order.
        log: What the server writes.
    """
    with serving(ARGV, log) as server:
        found = asyncio.run(Soak(server, requests, seconds, seed).run(clients))
        server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "an end", 30)
        if server.metric("maxvision_worker_starts") != 1:
            found.wrong.append("the model's process was started again")
        if server.stop() != 0:
            found.wrong.append("the server did not end as it should")
    if "Traceback" in log.read_text():
        found.wrong.append(log.read_text()[-2000:])
    return found


def main() -> int:
    """Runs a soak and says what it found."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end earlier, after these")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = soak(**vars(options), log=Path(folder, "log"))
    print(found)
    return int(bool(found.wrong) or found.drift > DRIFT)


if __name__ == "__main__":
    sys.exit(main())
