"""A Ray cluster on this machine: two replicas of one core behind a port, and batches of images.

pip install -e '.[ray,test]' && python -m pytest tests/serve/test_ray.py

Ray is not in the extra ``test``: it is 575 MB, and these tests take minutes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="not in '.[test]': pip install '.[ray]' (575 MB), minutes to run")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
from pyarrow import parquet  # noqa: E402

from graphs.errors import ArgumentError  # noqa: E402
from serve import batch  # noqa: E402
from serve.app import PAGES, ROUTERS  # noqa: E402
from serve.ray_app import app, read  # noqa: E402
from tests.serve.conftest import EXAMPLES  # noqa: E402
from tests.serve.dialects import MODEL, calls  # noqa: E402
from tests.serve.started import ROOT  # noqa: E402

CAT = (ROOT / "examples/cat.jpg").read_bytes()
JPEG = {"Content-Type": "image/jpeg"}
BIN = Path(sys.executable).parent
SECONDS = 400.0
"""For a cluster of two busy cores to do anything."""


class Cluster:
    """A head node of its own, as an operator starts it, with the app deployed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, gcs, dashboard, *others = ports(6)
        self.token = secrets.token_hex(32)
        names = ("HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP")
        self.environ = {
            **os.environ,
            **settings(),
            **{f"RAY_SERVE_{n}_PORT": str(p) for n, p in zip(names, others, strict=True)},
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": f"127.0.0.1:{gcs}",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else Ray ends a proxy that is late
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        }
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        self.log = folder / "head.log"
        argv = [
            BIN / "ray", "start", "--head", "--block", "--num-cpus=3", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1", f"--port={gcs}", f"--dashboard-port={dashboard}",
            f"--temp-dir={folder}", "--object-store-memory=100000000",
        ]  # fmt: skip
        environ = {k: v for k, v in self.environ.items() if k != "RAY_ADDRESS"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, env=environ)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=SECONDS)
        self.until(lambda: "block forever" in self.log.read_text(), "start")

    def deploy(self, **args: Any) -> None:
        config = {
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {"name": "a", "route_prefix": "/", "import_path": "serve.ray_app:app", "args": args}
            ],
        }
        path = self.folder / "deploy.yaml"
        path.write_text(json.dumps(config))
        argv = [BIN / "serve", "deploy", "-a", self.dashboard, path]
        done = subprocess.run(argv, cwd=ROOT, env=self.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def replicas(self) -> set[int]:
        """Finds the processes of the replicas that run, if the deployment is as it should be."""
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=30)
        for found in answer.json().get("applications", {}).values():
            assert found["status"] != "DEPLOY_FAILED", found["message"]
            for deployment in found["deployments"].values():
                states = {
                    replica.get("pid"): replica["state"] for replica in deployment["replicas"]
                }
                if found["status"] == "RUNNING" and set(states.values()) == {"RUNNING"}:
                    return set(states)
        return set()

    def answering(self) -> bool:
        """Tells whether requests reach two replicas, by when each began."""
        ask = self.client.get
        began = {ask("/v1/models").json()["data"][0]["created"] for _ in range(8)}
        return len(self.replicas()) == len(began) == 2

    def metrics(self) -> str:
        return self.client.get("/metrics").text

    def said(self) -> list[str]:
        """Reads what the replicas have warned of."""
        files = (self.folder / "session_latest/logs").glob("worker-*.err")
        return re.findall(r".*(?:WARNING|ERROR): .*", "".join(path.read_text() for path in files))

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + SECONDS
        while not (met := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"no {what}: {self.said()}"
            time.sleep(0.2)
        return met

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


def ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


def settings() -> dict[str, str]:
    """Reads contrib/ray.env as a shell does."""
    argv = ["bash", "-c", "set -a; . contrib/ray.env; env -0"]
    done = subprocess.run(argv, cwd=ROOT, env={}, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.split("\0") if line.startswith("RAY_")]
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets are in it
    started = Cluster(folder)
    try:
        started.deploy(model="resnet-cifar10", device="cpu", replicas=2, surge=50)
        started.until(lambda: len(started.replicas()) == 2, "two replicas")
        yield started
    finally:
        started.close()
        shutil.rmtree(folder, ignore_errors=True)


def best(expected: list[list[dict]]) -> dict[str, str]:
    """Finds the label of each example."""
    return {path.name: known[0]["label"] for path, known in zip(EXAMPLES, expected, strict=True)}


@contextmanager
def load(cluster: Cluster, label: str, clients: int = 3) -> Iterator[Counter[str]]:
    """Keeps asking for the cat; counts what is answered."""
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=cluster.client.base_url, timeout=SECONDS) as client:
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


def test_the_routes_are_those_of_the_single_server(cluster: Cluster) -> None:
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    described = cluster.client.get("/openapi.json").json()["paths"]
    assert set(described) == {route.path_format for route in routes if route.include_in_schema}
    for path in (*PAGES, "/health", "/ready", "/metrics", "/version", "/v1/models", "/v2"):
        assert cluster.client.get(path).status_code == 200, path
    refused = cluster.client.post("/v1/classify", content=b"hello", headers=JPEG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")


def test_every_dialect_gives_what_run_graph_gives(
    cluster: Cluster, expected: list[list[dict]]
) -> None:
    config = json.loads((ROOT / "weights/bundled" / MODEL / "config.json").read_text())
    labels = [label for _, label in sorted((int(i), v) for i, v in config["id2label"].items())]
    for path, predictions in zip(EXAMPLES, expected, strict=True):
        for name, call in calls(path.read_bytes(), labels).items():
            answer = cluster.client.post(call.path, content=call.body, headers=call.headers)
            assert answer.status_code == 200, f"{name}: {answer.text}"
            got = call.read(answer.json())
            assert [label for label, _ in got] == [p["label"] for p in predictions], name
            wanted = [p["score"] for p in predictions]
            tolerance = 10.0**-call.digits
            assert [score for _, score in got] == pytest.approx(wanted, rel=1e-5, abs=tolerance)
    asked = {"input": base64.b64encode(CAT).decode()}
    embedded = cluster.client.post("/v1/embeddings", json=asked).json()
    assert len(embedded["data"][0]["embedding"]) > 1


def test_a_replica_that_dies_is_not_noticed(cluster: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    before = cluster.until(cluster.replicas, "replicas")
    victim = min(before)
    with load(cluster, label) as seen:
        os.kill(victim, signal.SIGKILL)
        cluster.until(lambda: len(cluster.replicas() - {victim}) == 2, "a new replica")
    assert set(seen) == {label}, (seen, cluster.said())


def test_a_model_that_dies_is_not_noticed(cluster: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    cluster.until(cluster.answering, "two replicas that answer")
    with load(cluster, label) as seen:
        os.kill(model_of(min(cluster.replicas())), signal.SIGKILL)  # its replica says 503 meanwhile
        cluster.until(lambda: "maxvision_worker_starts 2.0\n" in cluster.metrics(), "a new model")
    assert set(seen) == {label}, (seen, cluster.said())


def model_of(replica: int) -> int:
    """Finds the model's process of a replica."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"\) \w (\d+)", (folder / "stat").read_text())
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if parent and int(parent[1]) == replica and "spawn_main" in command:
            return int(folder.name)
    raise AssertionError("no process of the model")


def test_an_update_is_not_noticed(cluster: Cluster, expected: list[list[dict]]) -> None:
    label = best(expected)["cat.jpg"]
    before = cluster.until(cluster.replicas, "replicas")

    def updated() -> bool:
        now = cluster.replicas()
        return len(now) == 2 and not now & before

    cluster.until(cluster.answering, "two replicas that answer")
    with load(cluster, label) as seen:
        cluster.deploy(model="resnet-cifar10", device="cpu", replicas=2, surge=50, max_batch_size=3)
        cluster.until(updated, "two new replicas")
    assert set(seen) == {label}, (seen, cluster.said())
    assert "maxvision_batch_limit 3.0\n" in cluster.metrics()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a model was expected"),
        ({"model": "x", "port": 1}, "port: address and port are Ray's"),
        ({"model": "x", "front_processes": 2}, "front_processes: connections are Ray's"),
        ({"model": "x", "replicas": 0}, "replicas expects a whole number of at least 1"),
        ({"model": "x", "replicas": 3, "max_replicas": "2"}, "at least replicas (3)"),
        ({"model": "x", "max_batch_size": "many"}, "a whole number from 1 to 4096"),
        ({"model": "x", "maximum": 2}, "unrecognized arguments: --maximum=2"),
        ({"model": "x", "device": "gpu:1"}, "Ray says which GPU"),
    ],
)
def test_mistakes_are_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(says)):
        app(given)


def test_arguments_become_options() -> None:
    hosts = ["a.org", "b.org"]
    options = read({"model": "m", "no_tf32": True, "allow_media_domain": hosts, "device": "cpu"})
    assert (options.tf32, options.allow_media_domain) == (False, ("a.org", "b.org"))
    assert read({"model": "m", "no_embeddings": "false", "device": "gpu"}).embeddings


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
        sys.executable, "-m", "serve.batch", str(images), str(shards), "-o", str(out),
        "--rows=2", "--device=cpu", "--workers=1",
    ]  # fmt: skip
    process = subprocess.Popen(argv, cwd=ROOT, env=cluster.environ)
    cluster.until(lambda: list(out.glob("part-*")), "first answers")
    process.kill()
    process.wait()
    first = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 0 < sum(len(parquet.read_table(out / name)) for name in first) < len(of)

    done = subprocess.run(argv, cwd=ROOT, env=cluster.environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert " before; 3 have an error" in done.stdout
    assert first.items() <= {p.name: p.stat().st_mtime_ns for p in out.glob("part-*")}.items()
    found = answers_of(out)
    assert Counter(row["image"] for row in found) == Counter(of.keys())
    for row in found:
        if of[row["image"]] is None:
            assert row["error"].startswith(f"{row['image']}: ")
        else:
            assert row["predictions"][0]["label"] == of[row["image"]]
    assert batch.main(argv[3:]) == 1  # nothing is left: no cluster is asked


def test_mistakes_of_a_batch_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    parquet.write_table(pa.table({"picture": [b""]}), tmp_path / "a.parquet")
    out, shard = str(tmp_path / "out"), str(tmp_path / "a.parquet")
    for argv, says in [
        (["x", "-o", out, "--model", "nope"], "nope: expected a bundled model"),
        (["x", "-o", out, "--dtype", "float16", "--device", "cpu"], "runs on a GPU only"),
        (["x", "-o", out, "--device", "gpu:1"], "Ray says which GPU"),
        (["x", "-o", str(tmp_path / "full")], "it holds something else"),
        ([shard, "-o", out], "a column image was expected but there are picture"),
        ([shard, "-o", out, "--top-k", "2"], "begun with top_k 5 but top_k is 2"),
    ]:
        assert batch.main(argv) == 2
        assert says in capsys.readouterr().err
