"""Processes that decode for a server that is one process."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.common.errors import ModelError
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve import decoders
from maxvision.serve.decoders import Decoders
from maxvision.serve.errors import Refusal
from maxvision.serve.images import Decoder, is_small
from tests.runtime.test_tiff import tiled
from tests.serve.started import ROOT, children, picture

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")

CAT = (ROOT / "examples/cat.jpg").read_bytes()
RED, BLUE = picture((200, 10, 10)), picture((10, 10, 200))  # PNGs: none waits behind one
PREPROCESS, PIXELS = Preprocess(), 2_000_000
LONG = 300.0
"""Seconds for a machine that is busy otherwise to do anything."""


@asynccontextmanager
async def running(count: int) -> AsyncIterator[Decoders]:
    """Processes that can decode."""
    made = Decoders(PREPROCESS, PIXELS, count)
    keeping = asyncio.ensure_future(made.keep())
    try:
        await until(lambda: made.ready or keeping.done())
        yield made
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        made.close()
        assert not pids()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LONG))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def pids(parent: int | None = None) -> list[int]:
    """Finds the processes that decode for another, those that have ended not among them."""
    return children(parent or os.getpid(), "maxvision.serve.decoders")


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_text())
    return False


def saved_as(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(CAT)).save(file, kind, **options)
    return file.getvalue()


WIDE = picture((0, 0, 0), (2001, 1000))
GOOD = [
    CAT,
    saved_as("PNG"),
    saved_as("WEBP"),
    saved_as("TIFF", compression="tiff_lzw"),
    saved_as("JPEG", progressive=True),
    base64.b64encode(CAT).decode(),
    "data:image/jpeg;base64," + base64.b64encode(CAT).decode(),
]
BAD: list[bytes | str] = [
    b"", "", b"hello", CAT[:2000], CAT[:100], b"II*\0 a TIFF", WIDE, "no base64", "\ud800", "é",
    "data:text/html,x", tiled(2000),
]  # fmt: skip


def test_it_imports_nothing_of_max() -> None:
    code = "import sys; from maxvision.serve import decoders; print('max' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_pixels_and_refusals_are_those_of_a_thread() -> None:
    plain = Decoder(PREPROCESS, PIXELS, 1)

    async def test() -> None:
        async with running(2) as made:
            noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), np.uint8)
            large = io.BytesIO()  # 6 MB: more than a socket takes at once
            Image.fromarray(noise).save(large, "PNG", compress_level=0)
            good = [*GOOD, large.getvalue()]
            for image, pixels in zip(
                good, await asyncio.gather(*map(made.decode, good)), strict=True
            ):
                assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous
                np.testing.assert_array_equal(pixels, plain(image))
            told = await asyncio.gather(*map(made.decode, BAD), return_exceptions=True)
            for image, refusal in zip(BAD, told, strict=True):
                with pytest.raises(Refusal) as expected:
                    plain(image)
                assert isinstance(refusal, Refusal)
                assert vars(refusal) == vars(expected.value)
            assert await made.run(len, "text") == 4

    run(test())
    plain.close()


def test_one_that_dies_fails_its_image_alone() -> None:
    """The image that waits behind it, in a process or not, is decoded by another."""

    async def test() -> None:
        async with running(1) as made:
            (victim,) = pids()
            os.kill(victim, signal.SIGSTOP)
            assert is_small(CAT)
            lost, behind, waiting = (
                asyncio.ensure_future(made.decode(image)) for image in (CAT, CAT, RED)
            )
            await asyncio.sleep(0)  # they are handed over
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(Refusal, match="the process that decodes") as refusal:
                await lost
            assert (refusal.value.status, refusal.value.code) == (500, "decoding_failed")
            assert (await behind).any() and (await waiting).any()
            assert len(pids()) == 1 and victim not in pids()

    run(test())


def test_a_slow_image_holds_up_no_other_while_a_process_is_free() -> None:
    async def test() -> None:
        async with running(2) as made:
            for pid in pids():
                os.kill(pid, signal.SIGSTOP)
            slow = [asyncio.ensure_future(made.decode(image)) for image in (RED, BLUE)]
            others = [asyncio.ensure_future(made.decode(CAT)) for _ in range(10)]
            await asyncio.sleep(0)
            os.kill(pids()[0], signal.SIGCONT)
            await asyncio.gather(*others)
            assert [each.done() for each in slow].count(True) == 1
            os.kill(pids()[1], signal.SIGCONT)
            await asyncio.gather(*slow)

    run(test())


def test_who_leaves_costs_others_nothing() -> None:
    async def test() -> None:
        async with running(1) as made:
            (pid,) = pids()
            os.kill(pid, signal.SIGSTOP)
            asked = [asyncio.ensure_future(made.decode(image)) for image in (RED, BLUE, CAT)]
            await asyncio.sleep(0)
            for each in asked[:2]:  # one is in the process, the other waits
                each.cancel()
            await asyncio.wait(asked[:2])
            os.kill(pid, signal.SIGCONT)
            plain = Decoder(PREPROCESS, PIXELS, 1)
            np.testing.assert_array_equal(await asked[2], plain(CAT))
            np.testing.assert_array_equal(await made.decode(RED), plain(RED))
            plain.close()

    run(test())


def test_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running(1) as made:
            os.kill(pids()[0], signal.SIGSTOP)
            monkeypatch.setattr(decoders, "PATIENCE", 0.1)
            with pytest.raises(Refusal, match="ended with it"):
                await made.decode(RED)
            monkeypatch.setattr(decoders, "PATIENCE", LONG)
            assert (await made.decode(RED)).any()

    run(test())


def test_a_start_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends it; a later one is tried again, and nobody waits meanwhile."""

    async def test() -> None:
        real = sys.executable
        async with running(1) as made:
            os.kill(pids()[0], signal.SIGSTOP)
            lost, waiting = (asyncio.ensure_future(made.decode(image)) for image in (RED, BLUE))
            await asyncio.sleep(0)
            monkeypatch.setattr(sys, "executable", "/bin/false")
            os.kill(pids()[0], signal.SIGKILL)
            told = await asyncio.gather(lost, waiting, return_exceptions=True)
            assert [each.status for each in told] == [500, 503]  # type: ignore[union-attr]
            assert not made.ready
            with pytest.raises(Refusal, match="try again later"):
                await made.decode(RED)
            monkeypatch.setattr(sys, "executable", real)
            await until(lambda: made.ready)
            assert (await made.decode(RED)).any()
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ModelError, match="ended with 1 as it started"):
            await Decoders(PREPROCESS, PIXELS, 2).keep()

    run(test())


PARENT = """
import asyncio
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve.decoders import Decoders

async def main():
    made = Decoders(Preprocess(), 1000, 2)
    asyncio.ensure_future(made.keep())
    while not made.ready:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_they_end_with_their_parent() -> None:
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout and parent.stdout.readline() == "ready\n"
        decoding = pids(parent.pid)
        assert len(decoding) == 2
        parent.kill()
    end = time.monotonic() + LONG
    while any(map(is_running, decoding)):
        assert time.monotonic() < end
        time.sleep(0.01)
