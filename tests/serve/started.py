"""Starts servers as a user does, on a free port, and reads what they print."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A server's process and where it listens.

    Attributes:
        client: Knows the address and the key.
        url: Of the server.
        log: What it writes.
    """

    def __init__(
        self, argv: list[str], log: Path, key: str | None, folder: Path = ROOT, **environ: str
    ) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                argv, cwd=folder, stdout=file, stderr=file, env={**os.environ, **environ}
            )
        printed = re.compile(r"http://[\w.]+:(\d+)")
        try:
            found = self.until(lambda: printed.search(log.read_text()), "address")
        except BaseException:
            self.process.kill()
            raise
        self.url = f"http://127.0.0.1:{found[1]}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def until(self, condition, what: str, seconds: float = 90):  # type: ignore[no-untyped-def]
        """Waits for a condition and returns it."""
        end = time.monotonic() + seconds
        while not (met := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"no {what}: {self.log.read_text()}"
            time.sleep(0.02)
        return met

    def ready(self) -> bool:
        return self.client.get("/ready").status_code == 200

    def worker(self) -> int:
        """Finds the model's process."""
        found = self.children("spawn_main")
        assert found, "no process of the model"
        return found[0]

    def children(self, command: str) -> list[int]:
        """Finds the processes that the server has started whose command line holds a text."""
        return children(self.process.pid, command)

    def metric(self, line: str, label: str = "") -> float:
        """Reads a figure by the beginning of its line and what else is in it."""
        text = self.client.get("/metrics").text
        return sum(
            float(each.rpartition(" ")[2])
            for each in text.splitlines()
            if each.startswith(line) and label in each
        )

    def stop(self) -> int:
        """Sends SIGTERM and waits for the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def children(process: int, command: str) -> list[int]:
    """Finds the processes that one has started whose command line holds a text.

    One that has ended has no command line, even if nobody has asked for its code yet.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"\) \w (\d+)", (folder / "stat").read_text())
            line = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if parent and int(parent[1]) == process and command in line:
            found.append(int(folder.name))
    return sorted(found)


@contextmanager
def serving(
    argv: list[str],
    log: Path,
    key: str | None = None,
    python: str | Path = sys.executable,
    folder: Path = ROOT,
    **environ: str,
) -> Iterator[Server]:
    """Runs a server, with an interpreter and in a folder, until the block ends."""
    server = Server([str(python), *argv], log, key, folder, **environ)
    try:
        server.until(server.ready, "readiness", 300)  # a cold cache: it compiles
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


def answers_of(files: Sequence[Path]) -> list[list[dict]]:
    """Asks run_graph.py for the predictions of pictures."""
    command = [sys.executable, "run_graph.py", *map(str, files)]
    command += ["--model", "resnet-cifar10", "--json", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [json.loads(line)["predictions"] for line in done.stdout.splitlines()]


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (128, 128)) -> bytes:
    """Makes a PNG of one colour, which the model's preprocessing leaves as it is."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()
