"""JPEGs that the model's process decodes: with a decoder on the CPU in nvImageCodec's place."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from PIL import Image  # noqa: E402

from maxvision.runtime import classifier  # noqa: E402
from tests.serve.started import ROOT, Server, picture, serving  # noqa: E402

EXAMPLES = sorted((ROOT / "examples").glob("*.jpg"))
CAT = (ROOT / "examples/cat.jpg").read_bytes()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoding") / "decoded"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    argv = [
        "-m", "tests.serve.decoding", "--model", "resnet-cifar10", "--device", "cpu", "--port", "0",
        "--front-processes=2", "--max-batch-size=4", "--no-embeddings", "--max-pixels=1000000",
    ]  # fmt: skip
    with serving(argv, log.parent / "log", DECODED_LOG=str(log)) as started:
        yield started


def decoded(log: Path) -> int:
    return sum(map(int, log.read_text().split()))


def scores(answer: httpx.Response) -> dict[str, float]:
    assert answer.status_code == 200, answer.text
    return {each["label"]: each["score"] for each in answer.json()["data"][0]["predictions"]}


def post(server: Server, data: bytes, kind: str = "image/jpeg") -> httpx.Response:
    return server.client.post("/v1/classify", content=data, headers={"Content-Type": kind})


def test_answers_are_those_of_the_cpu(server: Server, log: Path) -> None:
    model = classifier.load("resnet-cifar10", device="cpu", decode="cpu")
    before, files = decoded(log), [path.read_bytes() for path in EXAMPLES]
    with ThreadPoolExecutor(len(files)) as pool:
        answers = list(pool.map(lambda file: post(server, file), files))
    for file, answer in zip(files, answers, strict=True):
        expected = {each.label: each.score for each in model.classify(file)}
        assert scores(answer) == pytest.approx(expected, abs=1e-6)
    assert decoded(log) == before + len(files)
    encoded = base64.b64encode(CAT).decode()
    body = {"images": [encoded, f"data:image/jpeg;base64,{encoded}"]}
    text = server.client.post("/v1/classify", json=body)
    cat = answers[EXAMPLES.index(ROOT / "examples/cat.jpg")]
    assert scores(text) == pytest.approx(scores(cat))
    assert decoded(log) == before + len(files) + 2


def test_other_pictures_are_decoded_by_the_fronts(server: Server, log: Path) -> None:
    before = decoded(log)
    image = Image.open(io.BytesIO(CAT))
    for form, how in (("PNG", {}), ("JPEG", {"progressive": True}), ("WEBP", {})):
        file = io.BytesIO()
        image.save(file, form, **how)
        assert next(iter(scores(post(server, file.getvalue(), f"image/{form.lower()}")))) == "cat"
    cut_off = post(server, CAT[: len(CAT) // 2])
    assert cut_off.status_code == 400 and "cut off or damaged" in cut_off.text
    large = io.BytesIO()
    Image.new("RGB", (1100, 1000)).save(large, "JPEG")
    assert post(server, large.getvalue()).status_code == 413
    assert post(server, picture((1, 2, 3))).status_code == 200
    assert decoded(log) == before


def test_what_turns_out_damaged_is_told_by_the_front(server: Server, log: Path) -> None:
    """Its header and its end are whole: it comes back, and Pillow says what is wrong with it."""
    before = decoded(log)
    scan = CAT.index(b"\xff\xda")
    damaged = CAT[: scan + 12] + b"\xff\xc0\0\0" * 40 + CAT[-2:]
    good = np.full((80, 80, 3), 200, np.uint8)
    file = io.BytesIO()
    Image.fromarray(good).save(file, "JPEG")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda data: post(server, data), [damaged, file.getvalue()] * 2))
    assert [answer.status_code for answer in answers] == [400, 200, 400, 200]
    assert "cut off or damaged" in answers[0].text
    assert decoded(log) == before + 4
    assert server.metric("maxvision_worker_starts") == 1


def test_it_tells_for_how_long_it_was_busy(server: Server) -> None:
    names = "maxvision_worker_busy_seconds", "maxvision_decoder_busy_seconds"
    before = [server.metric(name) for name in names]
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with ThreadPoolExecutor(4) as pool:
            assert all(x.status_code == 200 for x in pool.map(lambda _: post(server, CAT), "1234"))
        worker, decoder = (server.metric(name) - x for name, x in zip(names, before, strict=True))
        if worker > 0.05 and decoder > 0.01:
            return
    raise AssertionError(f"after 20 s the worker was busy for {worker} s, the decoder {decoder}")
