"""A Ray cluster on this machine: two replicas of one core behind a port, and batches of images.

script/bootstrap ray test && python -m pytest tests/serve/test_ray.py

Ray is not in the extra ``test``: it is 575 MB, and these tests take minutes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="not in '.[test]': pip install '.[ray]' (575 MB), minutes to run")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
from pyarrow import parquet  # noqa: E402

from maxvision.bench.rayed import Cluster  # noqa: E402
from maxvision.commands import batch  # noqa: E402
from maxvision.common.errors import ArgumentError, ModelError  # noqa: E402
from maxvision.serve.app import PAGES, ROUTERS  # noqa: E402
from maxvision.serve.ray_app import app, decoding, read  # noqa: E402
from tests.serve.conftest import EXAMPLES  # noqa: E402
from tests.serve.dialects import MODEL, calls  # noqa: E402
from tests.serve.started import ROOT, children  # noqa: E402

CAT = (ROOT / "examples/cat.jpg").read_bytes()
JPEG = {"Content-Type": "image/jpeg"}
BIN = Path(sys.executable).parent
SECONDS = 400.0
"""For a cluster of two busy cores to do anything."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets are in it
    started = Cluster(folder, cpus=3, patience=SECONDS)
    try:
        started.deploy(model=MODEL, device="cpu", replicas=2, surge=50)
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def two(cluster: Cluster) -> Cluster:
    """The cluster with two replicas and two models that are ready, whatever a test before did."""
    cluster.until(lambda: cluster.answering(2), "two replicas that answer")
    return cluster


@pytest.fixture
def client(two: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=two.url, timeout=SECONDS) as client:
        yield client


def best(expected: list[list[dict]]) -> dict[str, str]:
    """Finds the label of each example."""
    return {path.name: known[0]["label"] for path, known in zip(EXAMPLES, expected, strict=True)}


@contextmanager
def load(cluster: Cluster, label: str, clients: int = 3) -> Iterator[Counter[str]]:
    """Keeps asking for the cat; counts what is answered."""
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=cluster.url, timeout=SECONDS) as client:
            while not stop.wait(0.1):  # a new replica needs the cores too
                try:
                    answer = client.post("/v1/classify", content=CAT, headers=JPEG)
                    body = answer.json()
                    if answer.status_code == 200:
                        seen[body["data"][0]["predictions"][0]["label"]] += 1
                    else:
                        seen[answer.text] += 1
                except Exception as error:
                    seen[repr(error)] += 1

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        cluster.until(lambda: seen[label] > 10, "answers")
        yield seen
        before = seen[label]
        cluster.until(lambda: seen[label] > before + 20, "answers")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- serving ----------------------------------------------------------------------------------


def test_the_routes_are_those_of_the_single_server(client: httpx.Client) -> None:
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    described = client.get("/openapi.json").json()["paths"]
    assert set(described) == {route.path_format for route in routes if route.include_in_schema}
    for path in (*PAGES, "/health", "/ready", "/metrics", "/version", "/v1/models", "/v2"):
        assert client.get(path).status_code == 200, path
    refused = client.post("/v1/classify", content=b"hello", headers=JPEG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")
    assert refused.headers.get_list("x-request-id") == [refused.json()["error"]["request_id"]]
    named = {**JPEG, "X-Request-ID": "mine"}
    refused = client.post("/v1/classify", content=b"hello", headers=named)
    assert refused.headers.get_list("x-request-id") == ["mine"]
    assert refused.json()["error"]["request_id"] == "mine"


def test_every_dialect_gives_what_run_graph_gives(
    client: httpx.Client, expected: list[list[dict]]
) -> None:
    config = json.loads((ROOT / "weights/bundled" / MODEL / "config.json").read_text())
    labels = [label for _, label in sorted((int(i), v) for i, v in config["id2label"].items())]
    for path, predictions in zip(EXAMPLES, expected, strict=True):
        for name, call in calls(path.read_bytes(), labels).items():
            answer = client.post(call.path, content=call.body, headers=call.headers)
            assert answer.status_code == 200, f"{name}: {answer.text}"
            got = call.read(answer.json())
            assert [label for label, _ in got] == [p["label"] for p in predictions], name
            wanted = [p["score"] for p in predictions]
            tolerance = 10.0**-call.digits
            assert [score for _, score in got] == pytest.approx(wanted, rel=1e-5, abs=tolerance)
    asked = {"input": base64.b64encode(CAT).decode()}
    embedded = client.post("/v1/embeddings", json=asked).json()
    assert len(embedded["data"][0]["embedding"]) > 1


def test_a_replica_that_dies_is_not_noticed(two: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    victim = min(two.replicas())
    with load(two, label) as seen:
        os.kill(victim, signal.SIGKILL)
        two.until(lambda: len(two.replicas() - {victim}) == 2, "a new replica")
    assert set(seen) == {label}, (seen, two.said())


def test_a_model_that_dies_is_not_noticed(two: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    with load(two, label) as seen:
        os.kill(model_of(min(two.replicas())), signal.SIGKILL)  # its replica says 503 meanwhile
        two.until(
            lambda: re.search(r"maxvision_worker_starts\{.*\} 2.0\n", two.metrics()), "a new model"
        )
        two.until(lambda: two.answering(2), "two models")
    assert set(seen) == {label}, (seen, two.said())


def model_of(replica: int) -> int:
    """Finds the model's process of a replica."""
    (found,) = children(replica, "spawn_main")
    return found


def test_an_update_is_not_noticed(two: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    before = two.replicas()

    def updated() -> bool:
        now = two.replicas()
        return len(now) == 2 and not now & before

    with load(two, label) as seen:
        two.deploy(model=MODEL, device="cpu", replicas=2, surge=50, max_batch_size=3)
        two.until(updated, "two new replicas")
    assert set(seen) == {label}, (seen, two.said())
    assert re.search(r"maxvision_batch_limit\{.*\} 3.0\n", two.metrics())


def test_more_work_starts_another_replica(two: Cluster, expected: list[list[dict]]) -> None:
    """A batch is one image, so that a few clients are much work."""
    label = best(expected)["cat.jpg"]
    one = {"model": MODEL, "device": "cpu", "max_batch_size": 1, "replicas": 1, "surge": 100}
    two.deploy(**one)
    two.until(lambda: two.answering(1), "one replica")
    two.deploy(**one, max_replicas=2)
    with load(two, label, clients=12) as seen:
        two.until(lambda: len(two.replicas()) == 2, "another replica")
        two.until(lambda: two.answering(2), "answers of both")
    assert set(seen) == {label}, (seen, two.said())


def test_processes_decode_and_are_started_anew(
    cluster: Cluster, expected: list[list[dict]]
) -> None:
    label = best(expected)["cat.jpg"]
    cluster.deploy(model=MODEL, device="cpu", cores=2, decode_threads=2)
    cluster.until(lambda: cluster.answering(1), "one replica")
    (replica,) = cluster.replicas()
    begun = set(children(replica, "maxvision.serve.decoders"))
    assert len(begun) == 2
    with load(cluster, label) as seen:
        for process in begun:
            os.kill(process, signal.SIGKILL)
        cluster.until(
            lambda: len(set(children(replica, "maxvision.serve.decoders")) - begun) == 2, "new ones"
        )
    assert all('"decoding_failed"' in each for each in set(seen) - {label}), seen
    assert seen.total() - seen[label] <= 2 * len(begun)
    left = [Path(f"/proc/{process}") for process in children(replica, "maxvision.serve.decoders")]
    os.kill(replica, signal.SIGKILL)
    cluster.until(lambda: not any(each.exists() for each in left), "their end")
    cluster.until(lambda: cluster.answering(1), "another replica")


@pytest.mark.parametrize(
    ("given", "cores", "count"),
    [
        ({"device": "gpu"}, 10, 9),
        ({"device": "gpu"}, 1, 0),
        ({"device": "cpu"}, 4, 0),
        ({"device": "cpu", "decode_threads": 2}, 4, 2),
        ({"device": "gpu", "decode_threads": 4}, 2, 4),
    ],
)
def test_cores_decode(given: dict[str, Any], cores: int, count: int) -> None:
    assert decoding(read({"model": "m", **given}), cores) == count


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "x", "port": 1}, "port: address and port are Ray's"),
        ({"model": "x", "front_processes": 2}, "front_processes: connections are Ray's"),
        ({"model": "x", "grpc_port": 8001}, "grpc_port: connections are Ray's"),
        ({"model": ["x", "y"]}, "a replica has one model; deploy an application for each"),
        ({"model": "x", "replicas": 0}, "replicas must be a whole number of at least 1"),
        ({"model": "x", "replicas": 3, "max_replicas": "2"}, "at least replicas (3)"),
        ({"model": "x", "max_batch_size": "many"}, "a whole number from 1 to 4096"),
        ({"model": "x", "maximum": 2}, "there is no argument maximum"),
        ({"replcas": 2}, "there is no argument replcas; did you mean replicas?"),
        ({"max-batch-sise": 2}, "did you mean max_batch_size?"),
        ({"model": "x", "device": "gpu:1"}, "device gpu:1: Ray chooses the GPU"),
        (
            {"model": MODEL, "device": "cpu", "replicas_per_gpu": 2},
            "replicas_per_gpu is for device",
        ),
    ],
)
def test_mistakes_are_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(says)):
        app(given)


def test_a_model_that_is_not_there_is_told_once() -> None:
    with pytest.raises(ModelError, match=r"^nope: "):
        app({"model": "nope"})


def test_arguments_become_options() -> None:
    hosts = ["a.org", "b.org"]
    options = read({"model": "m", "no_tf32": True, "allow_media_domain": hosts, "device": "cpu"})
    assert (options.tf32, options.allow_media_domain) == (False, ("a.org", "b.org"))
    assert read({"model": "m", "no_embeddings": "false", "device": "gpu"}).embeddings


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "gpu"}, 1),
        ({"device": "gpu", "replicas_per_gpu": 4}, 0.25),
    ],
)
def test_replicas_may_share_a_gpu(given: dict[str, Any], gpus: float) -> None:
    bound: Any = app({"model": MODEL, **given})
    assert bound._bound_deployment.ray_actor_options["num_gpus"] == gpus


# --- batches ----------------------------------------------------------------------------------


def answers_of(folder: Path) -> list[dict[str, Any]]:
    return parquet.read_table(folder).to_pylist()


def test_what_was_interrupted_goes_on(
    cluster: Cluster, tmp_path: Path, expected: list[list[dict]]
) -> None:
    labels = list(best(expected).values())
    images, shards, out = tmp_path / "images", tmp_path / "shards", tmp_path / "out"
    images.mkdir()
    shards.mkdir()
    of = {}  # an image's name: its label
    for i in range(60):
        path = images / f"{i:03}.jpg"
        shutil.copy(EXAMPLES[i % len(EXAMPLES)], path)
        of[str(path)] = labels[i % len(labels)]
    (images / "bad.jpg").write_bytes(CAT[:2000])
    of[str(images / "bad.jpg")] = None
    rows = [{"bytes": path.read_bytes()} for path in EXAMPLES] + [None, {"bytes": b"hello"}]
    parquet.write_table(pa.table({"image": rows}), shards / "a.parquet", row_group_size=2)
    for i in range(len(rows)):
        of[f"{shards / 'a.parquet'}#{i}"] = labels[i] if i < len(labels) else None

    argv = [
        sys.executable, "-m", "maxvision", "batch", str(images), str(shards), "-o", str(out),
        f"--model={MODEL}", "--rows=2", "--device=cpu", "--workers=1",
    ]  # fmt: skip
    process = subprocess.Popen(argv, cwd=ROOT, env=cluster.environ)
    cluster.until(lambda: list(out.glob("part-*")), "first answers")
    process.kill()
    process.wait()
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 0 < sum(len(parquet.read_table(out / name)) for name in first) < len(of)

    done = subprocess.run(argv, cwd=ROOT, env=cluster.environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert " before; 3 have an error; answering took " in done.stdout
    assert first.items() <= {p.name: p.stat().st_mtime_ns for p in out.glob("part-*")}.items()
    found = answers_of(out)
    assert Counter(row["image"] for row in found) == Counter(of.keys())
    for row in found:
        if of[row["image"]] is None:
            assert row["error"].startswith(f"{row['image']}: ")
        else:
            assert row["predictions"][0]["label"] == of[row["image"]]
    assert batch.main(argv[4:]) == 1  # nothing is left: no cluster is asked


def test_mistakes_of_a_batch_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    (tmp_path / "x.jpg").write_bytes(CAT)
    parquet.write_table(pa.table({"picture": [b""]}), tmp_path / "a.parquet")
    x, out, shard = str(tmp_path / "x.jpg"), str(tmp_path / "out"), str(tmp_path / "a.parquet")
    for argv, says in [
        ([x, "-o", out, "--model", "nope"], "nope: there is no bundled model"),
        ([x, "-o", out, "--dtype", "float16", "--device", "cpu"], "runs on a GPU only"),
        ([x, "-o", out, "--device", "gpu:1"], "--device gpu:1: Ray chooses the GPU"),
        (
            [x, "-o", str(tmp_path / "full")],
            "the folder holds files that this command did not write",
        ),
        ([shard, "-o", out], "there is no column image; choose one of picture with --column"),
        ([shard, "-o", out, "--top-k", "2"], "begun with top_k 5 but top_k is 2"),
    ]:
        assert batch.main(argv) == 2
        assert says in capsys.readouterr().err
