"""Several processes that run one model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from maxvision.runtime.devices import POOL, share_gpu  # noqa: E402
from maxvision.serve import engine  # noqa: E402
from maxvision.serve.errors import Refusal  # noqa: E402
from maxvision.serve.instances import Instances  # noqa: E402
from maxvision.serve.remote import Remote, Result  # noqa: E402
from maxvision.serve.supervisor import Supervisor, Supervisors  # noqa: E402
from tests.serve import faulty  # noqa: E402
from tests.serve.started import Server, picture, serving  # noqa: E402

BLANK = np.zeros((1, 1, 3), np.uint8)
PNG = {"Content-Type": "image/png"}


class Waits(Remote):
    """A process that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(b"front")
        self.ready = True

    async def submit(self, id: str, image: object, features: bool = False) -> Result:
        self._waiting[id] = asyncio.get_running_loop().create_future()
        return await self._waiting[id]


def test_an_image_goes_to_the_process_with_the_fewest() -> None:
    async def main() -> list[list[str]]:
        members = [Waits(), Waits(), Waits()]
        members[1].ready = False
        tasks = [asyncio.ensure_future(Instances(members).submit(str(i), BLANK)) for i in range(3)]
        await asyncio.sleep(0)
        members[1].ready = True
        tasks += [asyncio.ensure_future(Instances(members).submit("late", BLANK))]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return [list(each._waiting) for each in members]

    assert asyncio.run(main()) == [["0", "2"], ["late"], ["1"]]


def test_no_process_is_a_refusal() -> None:
    members = [Waits(), Waits()]
    for each in members:
        each.ready = False
    with pytest.raises(Refusal) as caught:
        asyncio.run(Instances(members).submit("1", BLANK))
    assert caught.value.status == 503


class Told(Supervisor):
    """Is ready, or ends, when it is told to."""

    def __init__(self) -> None:
        spec = engine.Spec(lambda: None, "cpu", 1, 0.0, False)  # type: ignore[arg-type, return-value]
        super().__init__(spec, engine.settings("error"), BLANK)
        self.patient: bool | None = None
        self.cancelled = False
        self.end = asyncio.Event()

    async def run(self, patient: bool = False) -> None:
        self.patient = patient
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise engine.WorkerEnded(RuntimeError("no such layer"))


def test_the_others_start_when_the_first_is_ready() -> None:
    async def main() -> None:
        members = [Told(), Told(), Told()]
        running = asyncio.ensure_future(Supervisors(members).run())
        await asyncio.sleep(0.3)
        assert [each.patient for each in members] == [False, None, None]
        members[0].ready = True
        await asyncio.sleep(0.5)
        assert [each.patient for each in members] == [False, True, True]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert all(each.cancelled for each in members)

    asyncio.run(main())


def test_a_model_that_cannot_run_is_told() -> None:
    async def main() -> None:
        members = [Told(), Told()]
        members[0].end.set()
        with pytest.raises(engine.WorkerEnded, match="no such layer"):
            await Supervisors(members).run()
        assert members[1].patient is None, "not even begun"

    asyncio.run(main())


@pytest.mark.parametrize(("count", "share"), [(0, None), (1, None), (2, "40"), (3, "26")])
def test_processes_share_a_gpus_memory(
    count: int, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POOL, "")  # which is undone to what it was
    monkeypatch.delenv(POOL)
    share_gpu(count)
    assert os.environ.get(POOL) == share
    monkeypatch.setenv(POOL, "7")
    share_gpu(count)
    assert os.environ[POOL] == "7", "the user's own"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = [
        "-m", "tests.serve.faulty", "--model", "resnet-cifar10", "--device", "cpu", "--port", "0",
        "--instances=2", "--front-processes=2", "--max-batch-size=1", "--no-embeddings",
    ]  # fmt: skip
    with serving(argv, tmp_path_factory.mktemp("instances") / "log") as started:
        started.until(lambda: up(started) == 2, "second process")
        yield started


def up(server: Server) -> float:
    return server.metric("maxvision_instances_ready{")


def slow(server: Server) -> int:
    data = picture(faulty.SLOW)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        return int(client.post("/v1/classify", content=data, headers=PNG).status_code)


def test_both_work_at_once(two: Server) -> None:
    """Batches of one take half a second each; on two processes eight take two seconds."""
    with ThreadPoolExecutor(8) as pool:
        begun = time.monotonic()
        assert list(pool.map(slow, [two] * 8)) == [200] * 8
        taken = time.monotonic() - begun
    assert 4 * faulty.SLOW_SECONDS <= taken < 7 * faulty.SLOW_SECONDS
    assert two.metric("maxvision_instances{") == 2
    config = two.client.get("/v2/models/resnet-cifar10/config").json()
    assert config["instance_group"][0]["count"] == 2


def test_one_that_ends_stops_nobody(two: Server) -> None:
    first, second = two.children("spawn_main")
    starts = two.metric("maxvision_worker_starts")
    worked = 8 * faulty.SLOW_SECONDS  # in test_both_work_at_once
    two.until(lambda: two.metric("maxvision_worker_busy_seconds{") >= worked, "news of work", 10)
    for pid in (first, second):
        os.kill(pid, signal.SIGKILL)
        two.until(lambda: up(two) == 1, "news of its end", 10)
        assert two.ready()
        assert slow(two) == 200
        two.until(lambda: up(two) == 2, "another one")
    assert not {first, second} & set(two.children("spawn_main"))
    assert two.metric("maxvision_worker_starts") == starts + 2
    assert two.metric("maxvision_worker_busy_seconds{") >= worked  # also of those that ended
