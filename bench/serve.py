"""``maxvision bench serve``: our server under load, LitServe in the same run, replicas on Ray.

Both get the same pictures from the same senders, and every answer is checked: its best class and
its score are those that torch computes in float32. Three figures say what bounds them: what the
senders reach against servers that do nothing, what decoding alone reaches on these cores, and the
CPU time that a server takes for an image.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import numpy as np
from PIL import Image

from maxvision.bench import load, records, summaries
from maxvision.bench.compile import compiled_note
from maxvision.bench.environment import environment
from maxvision.bench.references import NETWORKS, find_artifact, reference_model
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError
from maxvision.common.host import cores
from maxvision.runtime import resample
from maxvision.runtime.predictions import softmax
from maxvision.runtime.preprocess import Preprocess
from maxvision.weights.source import BUNDLED

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
QUALITY = 90
SETTLED = 0.6
"""Seconds after which a server's figures are those of all that it has answered."""


def run(options: argparse.Namespace) -> int:
    """Measures every server under every load; 1 if an answer was wrong."""
    records.check_path(options.json)
    with tempfile.TemporaryDirectory() as folder:
        stage = _Stage(options, Path(folder))
        return stage.run()


@dataclass(frozen=True)
class Started:
    """A server that answers.

    Attributes:
        url: Of its route.
        pid: Of its first process, if it was started here.
        settings: What it was told.
    """

    url: str
    pid: int | None
    settings: dict[str, Any]


class _Stage:
    """The pictures, the senders and what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._records: list[dict[str, Any]] = []
        self._facts = environment() | compiled_note(options.precompiled)
        self._cores = cores()
        self._wrong = 0
        width, height = options.size
        self._files = pictures(width, height, options.pictures)
        reference = reference_model(options.model)
        sizes = [len(file) for file in self._files]
        self._facts |= {
            "model": options.model,
            "pictures": f"{len(sizes)} JPEGs of {width} x {height}, quality {QUALITY},"
            f" {sum(sizes) // len(sizes):,} bytes",
            "senders": options.senders,
            "slo_ms": options.slo_ms,
        }
        self._source = self._saved(reference)
        from maxvision import weights

        self._prepare = Preprocess.from_config(weights.load(self._source).preprocess)
        self._answers = expected(reference, self._prepare, self._files)
        self._plan = load.Plan(
            "", self._files, self._answers, "image/jpeg", options.seconds,
            processes=options.senders,
        )  # fmt: skip

    def run(self) -> int:
        """Measures, prints and writes; returns the exit code."""
        options = self._options
        if options.stages:
            self._measure_stages()
            return 1 if self._wrong else 0
        if options.bounds:
            self._bounds()
        for name in options.servers:
            if name == "ray":
                self._measure_ray()
                continue
            with self._server(name) as server:
                kinds = ("bytes", "json") if name == "maxvision" else ("json",)
                for kind in [k for k in options.bodies if k in kinds]:
                    self._measure(name, server, kind)
        summaries.servers(self._records)
        return 1 if self._wrong else 0

    def _saved(self, reference: Any) -> str:
        name = self._options.model
        if name not in NETWORKS:
            return str(BUNDLED / name) if (BUNDLED / name).is_dir() else name
        folder = self._folder / name
        reference.save_pretrained(folder)
        return str(folder)

    def _bounds(self) -> None:
        options = self._options
        short = replace(self._plan, seconds=min(2.0, options.seconds))
        null = load.ceiling(short, max(1, self._cores - options.senders))
        found = load.figures(null, options.slo_ms)
        decode = functools.partial(resample.prepare, self._prepare)
        alone = load.decode_ceiling(self._files, decode, self._cores, short.seconds)
        self._facts |= {
            "senders_reach_per_s": found["requests_per_s"],
            "decoding_alone_per_s": round(alone, 1),
        }
        print(
            f"the senders reach {found['requests_per_s']:,.0f} requests/s against servers that do"
            f" nothing; decoding alone reaches {alone:,.0f} images/s on {self._cores} cores",
            flush=True,
        )

    def _measure_stages(self) -> None:
        """Takes a request apart, and compares the sum with a server whose model is none."""
        from maxvision.bench import stages
        from maxvision.bench.served import Nothing

        options = self._options
        found = stages.measure(self._source, self._files, options.seconds)
        answer = 0, float(softmax(Nothing(self._source).logits)[0])
        self._plan = replace(self._plan, answers=[answer] * len(self._files))
        with self._server("maxvision") as server:
            measured = self._measure("maxvision", server, "bytes")
        whole = min(record["cpu_ms_per_request"] for record in measured)
        found |= {"sockets and event loop": whole - sum(found.values()), "whole": whole}
        width, height = options.size
        print(
            f"CPU time of a request with a JPEG of {width} x {height}, in ms, without the network"
        )
        for name, value in found.items():
            print(f"  {name:<24}{value:6.3f}")
        self._facts["stages_ms"] = {name: round(value, 3) for name, value in found.items()}
        self._write()

    def _measure(self, name: str, server: Started, kind: str) -> list[dict[str, Any]]:
        plan = replace(self._plan, url=server.url)
        if kind == "json":
            bodies = [
                json.dumps({"images": [base64.b64encode(f).decode()]}).encode() for f in self._files
            ]
            plan = replace(plan, bodies=bodies, kind="application/json")
        self._check(plan, name)
        loads = [replace(plan, concurrency=c) for c in self._options.concurrency]
        loads += [replace(plan, rate=rate) for rate in self._options.rates]
        found = []
        for each in loads:
            before = load.cpu_seconds(server.pid) if server.pid else {}
            worked = _work(server.url) if name == "maxvision" else {}
            outcome, loaded = load.drive(each), each.seconds + load.WARM
            record = {
                "server": name,
                "body": kind,
                "loop": "open" if each.rate else "closed",
                "rate" if each.rate else "concurrency": each.rate or each.concurrency,
                **load.figures(outcome, self._options.slo_ms),
                "settings": server.settings,
            }
            if server.pid:
                after = load.cpu_seconds(server.pid)
                threads = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
                spent = sum(threads)
                record["cpu_cores"] = round(spent / loaded, 2)
                record["busiest_thread"] = round(max(threads, default=0.0) / loaded, 2)
                images = sum(outcome.statuses.values()) * loaded / each.seconds
                record["cpu_ms_per_request"] = round(1e3 * spent / max(1, images), 3)
            if worked:
                time.sleep(SETTLED)
                for what, seconds in _work(server.url).items():
                    record[what] = round((seconds - worked[what]) / loaded, 2)
            self._wrong += outcome.wrong
            found.append(record)
            self._records.append(record)
            print(json.dumps({k: v for k, v in record.items() if k != "settings"}), flush=True)
            self._write()
        return found

    def _write(self) -> None:
        if self._options.json:
            records.write(self._options.json, self._facts, self._records)

    def _measure_ray(self) -> None:
        """Measures one cluster with each number of replicas, and how many times the first it is."""
        from maxvision.bench.rayed import Cluster

        options = self._options
        builder, given = self._replica()
        told = {k: v for k, v in given.items() if k not in ("model", "graph")}
        most = max(options.replicas)
        gpus = most if options.device != "cpu" else 0
        first: dict[Any, float] = {}
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
            print("starting ray", flush=True)
            cluster = Cluster(Path(folder), most * given["cores"], gpus, options.patience)
            with contextlib.closing(cluster):
                for count in options.replicas:
                    begun = time.monotonic()
                    cluster.deploy(builder, **given, replicas=count)
                    cluster.until(functools.partial(cluster.answering, count), f"{count} replicas")
                    ready = round(time.monotonic() - begun, 1)
                    settings = {**told, "replicas": count, "ready_after_s": ready}
                    server = Started(f"{cluster.url}/v1/classify", cluster.process.pid, settings)
                    for kind in [k for k in options.bodies if k in ("bytes", "json")]:
                        for record in self._measure(f"ray x{count}", server, kind):
                            load_of = kind, record.get("rate"), record.get("concurrency")
                            reached = record["requests_per_s"]
                            record["times"] = round(reached / first.setdefault(load_of, reached), 3)
                self._write()
                if options.verbose:
                    print(*cluster.said()[-20:], sep="\n", flush=True)

    def _replica(self) -> tuple[str, dict[str, Any]]:
        """Names what builds the application, and what that is given."""
        options = self._options
        given: dict[str, Any] = {
            "model": self._source,
            "device": options.device,
            "dtype": self._dtype(),
            "cores": options.replica_cores,
            "no_embeddings": True,
        }
        for option in options.serve_options:
            name, _, value = option.lstrip("-").partition("=")
            given[name.replace("-", "_")] = value or True
        if not options.precompiled:
            return "maxvision.serve.ray_app:app", given
        graph = find_artifact(options.precompiled, options.model, given["dtype"])
        return "maxvision.bench.rayed:app", {**given, "graph": str(graph.absolute())}

    def _check(self, plan: load.Plan, name: str) -> None:
        """Asks for each picture once, before anything is measured."""
        for i, body in enumerate(plan.bodies):
            request = urllib.request.Request(plan.url, body, {"Content-Type": plan.kind})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read()
            except urllib.error.HTTPError as error:
                text = error.read()
            if not load.right(text, plan.answers[i]):
                raise ArgumentError(
                    f"{name}: picture {i} expected class and score {plan.answers[i]} but got"
                    f" {text[:300].decode()}"
                )

    @contextlib.contextmanager
    def _server(self, name: str) -> Iterator[Started]:
        options = self._options
        if options.url and name == "maxvision":
            yield Started(options.url.rstrip("/") + "/v1/classify", None, {"url": options.url})
            return
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        if name == "maxvision":
            argv, settings = self._ours(port)
        else:
            argv, settings = self._litserve(port)
        log = self._folder / f"{name}.log"
        print(f"starting {name}", flush=True)
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv], stdout=file, stderr=file, start_new_session=True
            )
        try:
            up = _all_up if name == "maxvision" else _answers
            begun = time.monotonic()
            while not up(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() - begun > options.patience:
                    raise ArgumentError(f"{name} did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            settings["ready_after_s"] = round(time.monotonic() - begun, 1)
            yield Started(f"http://127.0.0.1:{port}/v1/classify", process.pid, settings)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            said = log.read_text().strip()
            if said and options.verbose:
                print(said[-3000:], flush=True)

    def _ours(self, port: int) -> tuple[list[str], dict[str, Any]]:
        options = self._options
        dtype = self._dtype()
        told = [f"--dtype={dtype}", f"--device={options.device}", *options.serve_options]
        if options.stages:
            argv = ["maxvision.bench.served", "nothing"]
        elif options.precompiled:
            graph = find_artifact(options.precompiled, options.model, dtype)
            argv = ["maxvision.bench.served", str(graph)]
        else:
            argv = ["maxvision.serve", "--no-embeddings"]
        argv += [f"--model={self._source}", f"--port={port}", *told]
        return argv, {"options": " ".join(told)}

    def _dtype(self) -> str:
        return self._options.dtype or ("bfloat16" if self._options.device != "cpu" else "float32")

    def _litserve(self, port: int) -> tuple[list[str], dict[str, Any]]:
        if importlib.util.find_spec("litserve") is None:
            raise ArgumentError(f"bench serve needs the package litserve; {way_to('peers')}")
        gpu = self._options.device != "cpu"
        settings = {
            "model": self._options.model,
            "device": self._options.device,
            "batch": 64 if gpu else 8,
            "delay_ms": 2.0,
            "workers": max(1, self._cores // 4) if gpu else 1,
            "fronts": max(1, self._cores // 4) if gpu else 1,
            "compile": not gpu,
            "decode": "cpu",
        } | json.loads(self._options.litserve)
        return ["maxvision.bench.litserved", json.dumps({**settings, "port": port})], settings


def pictures(width: int, height: int, count: int) -> list[bytes]:
    """Makes JPEGs of a size out of the examples: different parts of them, scaled."""
    files = []
    sources = [Image.open(path).convert("RGB") for path in sorted(EXAMPLES.glob("*.jpg"))]
    for i in range(count):
        source = sources[i % len(sources)]
        inset = 8 * (i // len(sources))
        box = (inset, inset, source.width - inset, source.height - inset)
        file = io.BytesIO()
        source.crop(box).resize((width, height), Image.Resampling.LANCZOS).save(
            file, "JPEG", quality=QUALITY
        )
        files.append(file.getvalue())
    return files


def expected(reference: Any, prepare: Preprocess, files: list[bytes]) -> list[tuple[int, float]]:
    """Computes each picture's best class and its score, in torch and float32."""
    import torch

    pixels = torch.from_numpy(np.stack([prepare(file) for file in files])).float()
    x = ((pixels - torch.tensor(prepare.mean)) / torch.tensor(prepare.std)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        scores = reference.float().eval()(x).logits.softmax(-1)
    best = scores.max(-1)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _metrics(url: str) -> dict[str, float]:
    """Reads the figures of the model that our server has; none while it has no answer."""
    try:
        with urllib.request.urlopen(urljoin(url, "/metrics"), timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found = re.findall(r'^maxvision_(\w+)\{model="[^"]*"\} (\S+)$', text, re.M)
    return {name: float(value) for name, value in found}


def _work(url: str) -> dict[str, float]:
    """Reads for how long each process of the model and its decoder have worked, if told, s."""
    found = _metrics(url)
    return {
        f"{who}_busy": found[f"{who}_busy_seconds"] / found["instances"]
        for who in ("worker", "decoder")
        if f"{who}_busy_seconds" in found
    }


def _all_up(url: str) -> bool:
    """Tells whether all processes of our server's model have run a picture."""
    found = _metrics(url)
    return 0 < found.get("instances", 0) == found["instances_ready"]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
