"""Who is blamed for a process's end."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.runtime.jpeg import Jpeg
from maxvision.serve import quarantine
from maxvision.serve.quarantine import Quarantine

POISON, INNOCENT, OTHER = (np.full((16, 16, 3), level, np.uint8) for level in (6, 7, 8))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A server whose model's process ends when it runs poison."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.memory = quarantine.memory()
        self.process = Quarantine(self.memory, self.clock)
        self.ended: list = []  # blocks that are never left

    def run(self, *images: np.ndarray) -> None:
        block = self.process.running(images)
        block.__enter__()
        if any(image is POISON for image in images):
            self.ended.append(block)
            self.process = Quarantine(self.memory, self.clock)
        else:
            block.__exit__(None, None, None)

    def ends(self, *images: np.ndarray) -> list[int]:
        return [self.process.ends(image) for image in images]


def test_a_batch_is_suspected_and_one_image_found() -> None:
    server = Server()
    server.run(INNOCENT, OTHER)
    assert server.ends(POISON, INNOCENT, OTHER) == [0, 0, 0]
    server.run(INNOCENT, POISON)
    assert server.ends(POISON, INNOCENT, OTHER) == [1, 1, 0]
    server.run(INNOCENT)
    server.run(POISON)
    assert server.ends(POISON, INNOCENT, OTHER) == [2, 0, 0]
    server.clock.now += quarantine.SECONDS + 1
    assert server.ends(POISON, INNOCENT, OTHER) == [0, 0, 0]


def test_what_is_known_outlives_processes() -> None:
    server = Server()
    for _ in range(2):
        server.run(POISON)
    for _ in range(3):
        server.process = Quarantine(server.memory, server.clock)  # killed while it ran nothing
        assert server.ends(POISON, INNOCENT) == [2, 0]
        server.run(INNOCENT)


def test_an_image_that_raises_is_innocent() -> None:
    server = Server()
    server.run(INNOCENT, POISON)
    with pytest.raises(ValueError, match="x"), server.process.running([INNOCENT]):
        raise ValueError("x")
    assert server.ends(INNOCENT, POISON) == [0, 1]


def test_memory_is_bounded() -> None:
    server = Server()
    images = [np.full((8, 8, 3), 0, np.uint8) for _ in range(5000)]
    for i, image in enumerate(images):
        image[0, 0] = i % 256, i // 256, 1
    server.run(*images, POISON)
    assert sum(server.ends(*images)) == quarantine.MOST
    assert server.ends(images[4095], images[0]) == [1, 0]


def test_files_are_recognised() -> None:
    server = Server()
    poison, other = (Jpeg(bytes(range(256)) * n, 8, 8) for n in (9, 10))
    server.ended.append(block := server.process.running([poison, other]))
    block.__enter__()
    server.process = Quarantine(server.memory, server.clock)
    again = Jpeg(np.frombuffer(poison.file, np.uint8), 8, 8)
    assert server.process.ends(again) == server.process.ends(other) == 1
    assert server.process.ends(Jpeg(bytes(3000), 8, 8)) == server.process.ends(INNOCENT) == 0
