"""Several models in one server: each by its name, with limits and figures of its own."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
httpx = pytest.importorskip("httpx")

from maxvision.serve.options import Options, parse  # noqa: E402
from tests.serve import faulty  # noqa: E402
from tests.serve.started import ROOT, Server, picture, serving  # noqa: E402
from tests.serve.test_start import refuses  # noqa: E402

CAT = (ROOT / "examples/cat.jpg").read_bytes()
TEXT = base64.b64encode(CAT).decode()
JPEG, PNG = {"Content-Type": "image/jpeg"}, {"Content-Type": "image/png"}
IMAGES, QUEUES, BATCHES = 4, {"first": 12, "second": 6}, {"first": 4, "second": 2}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same model twice, which takes one graph; the second calls its classes otherwise."""
    folder = tmp_path_factory.mktemp("models")
    config = json.loads((ROOT / "weights/bundled/resnet-cifar10/config.json").read_text())
    first = [config["id2label"][str(i)] for i in range(10)]
    for name, labels in (("first", first), ("second", [f"other {each}" for each in first])):
        (folder / name).write_text("\n".join(labels))
    argv = ["-m", "tests.serve.faulty", "--device=cpu", "--port=0", "--no-embeddings"]
    argv += ["--model-control-mode=explicit", f"--front-processes={request.param}"]
    argv += [f"--max-images-per-request={IMAGES}", "--max-batch-delay-ms=5"]
    for name in ("first", "second"):
        argv += [
            "--model=resnet-cifar10",
            f"--served-model-name={name}",
            f"--labels={folder}/{name}",
        ]
        argv += [f"--max-queue-size={QUEUES[name]}", f"--max-batch-size={BATCHES[name]}"]
    with serving(argv, folder / "log") as started:
        yield started


def post(server: Server, path: str, **sent: Any) -> httpx.Response:
    """Asks on a connection of its own, which goes to the front that has the fewest."""
    return httpx.post(f"{server.url}{path}", timeout=60, **sent)


def classify(server: Server, model: str | None, data: bytes = CAT) -> httpx.Response:
    where = {"model": model} if model else {}
    return post(server, "/v1/classify", content=data, headers=JPEG, params=where)


def test_all_are_listed(server: Server) -> None:
    get = server.client.get
    assert [each["id"] for each in get("/v1/models").json()["data"]] == ["first", "second"]
    assert get("/v1/models/second").json()["id"] == "second"
    assert [each["model"] for each in get("/version").json()["models"]] == ["first", "second"]
    index = server.client.post("/v2/repository/index").json()
    assert [(each["name"], each["state"]) for each in index] == [
        ("first", "READY"), ("second", "READY"),
    ]  # fmt: skip
    for name, batch in BATCHES.items():
        config = get(f"/v2/models/{name}/config").json()
        assert config["name"] == name
        assert config["dynamic_batching"]["preferred_batch_size"] == [batch]
        assert server.metric("maxvision_batch_limit", f'"{name}"') == batch


@pytest.mark.parametrize(("model", "label"), [("first", "cat"), ("second", "other cat")])
def test_every_dialect_finds_a_model_by_its_name(server: Server, model: str, label: str) -> None:
    files = {"shape": [1], "datatype": "BYTES", "name": "image", "data": [TEXT]}
    asked = {"name": "probabilities", "parameters": {"classification": 1}}
    before = server.metric("maxvision_images_total", f'"{model}"')
    for answer in (
        classify(server, model),
        post(server, "/v1/classify", json={"model": model, "images": [TEXT]}),
        post(server, "/v1/classify", data={"model": model}, files={"images": CAT}),
        post(server, f"/models/{model}", content=CAT, headers=JPEG),
        post(server, f"/v2/models/{model}/infer", json={"inputs": [files], "outputs": [asked]}),
        post(server, "/classify", json={"model": model, "input": TEXT}),
    ):
        assert answer.status_code == 200, answer.text
        assert f'{label}"' in answer.text.replace(f":{label}", label), answer.text
        assert ("other " in answer.text) == (model == "second")
    assert server.metric("maxvision_images_total", f'"{model}"') == before + 6
    (counted,) = server.client.get(f"/v2/models/{model}/stats").json()["model_stats"]
    assert counted["inference_count"] == before + 6
    all_of_them = server.client.get("/v2/models/stats").json()["model_stats"]
    assert [each["name"] for each in all_of_them] == ["first", "second"]
    server.until(lambda: f"model={model} " in server.log.read_text(), "a line of the log", 5)


def test_without_a_name_it_is_the_first(server: Server) -> None:
    for answer in (
        classify(server, None),
        post(server, "/", content=CAT, headers=JPEG),
        post(server, "/classify", json={"input": TEXT}),
    ):
        assert answer.status_code == 200
        assert "cat" in answer.text and "other" not in answer.text


def test_a_model_that_is_not_there(server: Server) -> None:
    files = {"shape": [1], "datatype": "BYTES", "name": "image", "data": [TEXT]}
    for answer in (
        classify(server, "third"),
        post(server, "/v1/classify", json={"model": "third", "images": [TEXT]}),
        post(server, "/models/third", content=CAT, headers=JPEG),
        post(server, "/v2/models/third/infer", json={"inputs": [files]}),
        post(server, "/classify", json={"model": "third", "input": TEXT}),
        post(server, "/v1/embeddings", json={"model": "third", "input": TEXT}),
        post(server, "/v2/repository/models/third/load"),
        server.client.get("/v2/models/third"),
    ):
        assert answer.status_code == 404, answer.text
        assert "there is no model 'third'; first and second are served" in answer.text


def test_each_has_its_own_queue(server: Server) -> None:
    slow = [base64.b64encode(picture(faulty.SLOW)).decode()] * 2
    with ThreadPoolExecutor(8) as pool:
        asked = {"model": "second", "images": slow}
        many = [pool.submit(post, server, "/v1/classify", json=asked) for _ in range(6)]
        server.until(
            lambda: server.metric("maxvision_images_in_flight", '"second"') >= 4, "slow images", 10
        )
        assert classify(server, "first").status_code == 200
        statuses = [each.result().status_code for each in many]
    assert 429 in statuses and 1 <= statuses.count(200) <= QUEUES["second"]
    server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "the end of all", 10)


def test_one_that_ends_leaves_the_other(server: Server) -> None:
    starts = server.metric("maxvision_worker_starts", '"second"')
    answer = classify(server, "second", picture(faulty.EXIT))
    assert answer.status_code == 503
    assert not server.ready()
    assert classify(server, "first").status_code == 200
    assert server.client.get("/v2/models/first/ready").status_code == 200
    assert server.client.get("/v2/models/second/ready").status_code == 503
    server.until(server.ready, "readiness")
    assert classify(server, "second").status_code == 200
    assert server.metric("maxvision_worker_starts", '"second"') == starts + 1
    assert server.metric("maxvision_worker_starts", '"first"') == 1


def test_a_model_is_unloaded_and_loaded(server: Server) -> None:
    """What it has under way is answered first; its process ends."""
    workers = len(server.children("spawn_main"))
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(classify, server, "second", picture(faulty.SLOW))
        server.until(
            lambda: server.metric("maxvision_images_in_flight", '"second"') == 1, "a slow image", 10
        )
        begun = time.monotonic()
        assert post(server, "/v2/repository/models/second/unload").status_code == 200
        assert time.monotonic() - begun > 0.1
        assert slow.result().status_code == 200
    server.until(lambda: len(server.children("spawn_main")) == workers - 1, "its end", 10)
    for answer in (
        classify(server, "second"),
        post(server, "/models/second", content=CAT, headers=JPEG),
        server.client.get("/v2/models/second/ready"),
    ):
        assert answer.status_code == 503
        assert "second is not loaded; POST /v2/repository/models/second/load" in answer.text
        assert "retry-after" not in answer.headers
    rows = server.client.post("/v2/repository/index").json()
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("READY", ""), ("UNAVAILABLE", "unloaded"),
    ]  # fmt: skip
    assert len(server.client.post("/v2/repository/index", json={"ready": True}).json()) == 1
    assert server.ready()  # by those that are loaded
    assert classify(server, "first").status_code == 200
    assert post(server, "/v2/repository/models/second/unload").status_code == 200  # once more
    for _ in range(2):
        assert post(server, "/v2/repository/models/second/load", json={}).status_code == 200
        assert classify(server, "second").status_code == 200
    assert len(server.children("spawn_main")) == workers


def test_tritonclient_unloads_and_loads(server: Server) -> None:
    http = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
    address = server.url.removeprefix("http://")
    with http.InferenceServerClient(address, network_timeout=60) as client:
        client.unload_model("first")
        assert not client.is_model_ready("first") and client.is_model_ready("second")
        client.load_model("first")
        assert client.is_model_ready("first")
        with pytest.raises(http.InferenceServerException, match="there is no model 'third'"):
            client.load_model("third")


def test_a_model_killed_while_nobody_asks_is_back_after_loading(server: Server) -> None:
    """Loading what is loaded waits until it is ready."""
    os.kill(server.worker(), signal.SIGKILL)
    server.until(lambda: not server.ready(), "unreadiness", 10)
    for name in ("first", "second"):
        assert post(server, f"/v2/repository/models/{name}/load").status_code == 200
    assert server.ready()


def test_sigterm_ends_all(server: Server) -> None:
    """The last one: it ends the server."""
    assert server.stop() == 0
    assert not server.children("spawn_main")


# --- options ----------------------------------------------------------------------------------


def test_options_are_said_once_or_for_each() -> None:
    argv = [
        "--model=a",
        "--model=b",
        "--max-batch-size=8",
        "--max-batch-size=9",
        "--dtype=bfloat16",
    ]
    first, second = parse(argv, {}).models
    assert (first.model, first.max_batch_size, first.dtype) == ("a", 8, "bfloat16")
    assert (second.model, second.max_batch_size, second.dtype) == ("b", 9, "bfloat16")
    assert first.max_batch_delay_ms == second.max_batch_delay_ms == Options.max_batch_delay_ms
    both = {"MAXVISION_MODEL": "a,b", "MAXVISION_DEVICE": "cpu,gpu:1"}
    assert [(each.model, each.device) for each in parse([], both).models] == [
        ("a", "cpu"), ("b", "gpu:1"),
    ]  # fmt: skip
    assert [each.model for each in parse(["--model=c", "--device=cpu"], both).models] == ["c"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--device=cpu", "--device=gpu"], "--device is there 2 times and --model 1 time; say it"),
        (["--model=a", "--model=b", "--served-model-name=x"], "must be said for each --model"),
        (["--max-queue-size=99", "--max-queue-size=3"], "--max-queue-size must be at least"),
    ],
)
def test_mistakes_are_told(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(argv, {})
    assert says in capsys.readouterr().err


def test_two_of_a_name_are_told() -> None:
    argv = ["--model=resnet-cifar10", "--model=resnet-cifar10", "--device=cpu", "--port=0"]
    refuses("serve", argv, "two models are called resnet-cifar10; say --served-model-name for each")
