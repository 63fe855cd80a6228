"""A Ray cluster on this machine, as an operator starts one, for bench serve and the tests.

Its head node and what is deployed take contrib/ray.env, and ports of their own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxvision.common.errors import UserError

if TYPE_CHECKING:
    from ray import serve as ray_serve

ROOT = Path(__file__).resolve().parents[1]


class Cluster:
    """A head node, until ``close``.

    Args:
        folder: Of its files; its path has to be short, for there are sockets in it.
        cpus: How many cores it counts, whatever the machine has.
        gpus: Likewise.
        patience: Seconds for anything.
        **environ: Variables beside those of contrib/ray.env.

    Attributes:
        url: Where HAProxy answers, once something is deployed.
        environ: The environment of commands that join it.
        process: ``ray start --block``.
        log: What that has said.
    """

    def __init__(
        self, folder: Path, cpus: int, gpus: int = 0, patience: float = 300.0, **environ: str
    ) -> None:
        self.log = folder / "head.log"
        self._folder = folder
        self._patience = patience
        self._port, gcs, dashboard, metrics, stats, fallback = ports(6)
        self.url = f"http://127.0.0.1:{self._port}"
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        self._token = secrets.token_hex(32)
        self.environ = {
            **os.environ,
            **settings(),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "RAY_AUTH_TOKEN": self._token,
            "RAY_ADDRESS": f"127.0.0.1:{gcs}",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else Ray ends a proxy that is late
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
            **environ,
        }
        self._start(gcs, dashboard, cpus, gpus)

    def deploy(self, builder: str = "maxvision.serve.ray_app:app", **given: Any) -> None:
        """Deploys an application, or changes the one that is deployed.

        Args:
            builder: Builds it.
            **given: What ``builder`` takes.

        Raises:
            UserError: If Ray does not take it.
        """
        config = {
            "http_options": {"host": "127.0.0.1", "port": self._port},
            "applications": [
                {"name": "a", "route_prefix": "/", "import_path": builder, "args": given}
            ],
        }
        path = self._folder / "deploy.yaml"
        path.write_text(json.dumps(config))
        argv = [*_SERVE, "deploy", "-a", self._dashboard, str(path)]
        done = subprocess.run(argv, cwd=ROOT, env=self.environ, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"serve deploy: {done.stderr[-2000:]}")

    def replicas(self) -> set[int]:
        """Finds the processes of the replicas, if all run and the application is as it was told.

        Raises:
            UserError: If it cannot be.
        """
        request = urllib.request.Request(
            f"{self._dashboard}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self._token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            applications = json.load(answer)["applications"]
        for found in applications.values():
            if found["status"] == "DEPLOY_FAILED":
                raise UserError(f"serve deploy: {found['message'][-2000:]}")
            for deployment in found["deployments"].values():
                states = {each.get("pid"): each["state"] for each in deployment["replicas"]}
                if found["status"] == "RUNNING" and set(states.values()) == {"RUNNING"}:
                    return set(states)
        return set()

    def answering(self, count: int) -> bool:
        """Tells whether requests reach ``count`` replicas, each with a model that is ready."""
        if len(self.replicas()) != count:
            return False
        said = [self.metrics() for _ in range(4 * count)]
        began = {re.findall(r"^maxvision_images_created.* (\S+)$", each, re.M)[0] for each in said}
        return len(began) == count and all("maxvision_ready 1.0\n" in each for each in said)

    def metrics(self) -> str:
        """Reads the figures of whichever replica answers."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=self._patience) as answer:
            return str(answer.read(), "utf-8")

    def said(self) -> list[str]:
        """Reads what the replicas have warned of."""
        files = (self._folder / "session_latest/logs").glob("worker-*.err")
        return re.findall(r".*(?:WARNING|ERROR): .*", "".join(path.read_text() for path in files))

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for a condition, and returns what it gave; no answer is as good as a false one.

        Raises:
            UserError: If it is not met in time, or the head node has ended.
        """
        end = time.monotonic() + self._patience
        while True:
            with contextlib.suppress(OSError):
                if met := condition():
                    return met
            if self.process.poll() is not None or time.monotonic() > end:
                log = self.log.read_text()[-2000:]
                raise UserError(f"no {what}: {self.said()[-20:]}\n{log}")
            time.sleep(0.2)

    def close(self) -> None:
        """Ends the node and all that runs on it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    def _start(self, gcs: int, dashboard: int, cpus: int, gpus: int) -> None:
        argv = [
            *_RAY, "start", "--head", "--block", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
            "--disable-usage-stats", "--node-ip-address=127.0.0.1", f"--port={gcs}",
            f"--dashboard-port={dashboard}", f"--temp-dir={self._folder}",
            "--object-store-memory=100000000",
        ]  # fmt: skip
        environ = {k: v for k, v in self.environ.items() if k != "RAY_ADDRESS"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, env=environ)
        try:
            self.until(lambda: "block forever" in self.log.read_text(), "start of Ray")
        except BaseException:
            self.close()
            raise


_RAY, _SERVE = (
    [sys.executable, "-m", name] for name in ("ray.scripts.scripts", "ray.serve.scripts")
)


def ports(count: int) -> list[int]:
    """Finds free ports."""
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


def app(given: Mapping[str, Any]) -> ray_serve.Application:
    """Builds ``serve.ray_app``'s application with a ``graph`` that was compiled elsewhere."""
    from maxvision.bench import served
    from maxvision.serve import ray_app

    rest = dict(given)
    graph = Path(rest.pop("graph"))
    return ray_app.build(rest, functools.partial(served.load, graph=graph))
