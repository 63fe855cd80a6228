"""The command on a CPU: what it refuses, what it writes, and that a wrong engine is caught."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from maxvision.bench import models
from maxvision.bench.__main__ import main, parser
from maxvision.bench.ceilings import Ceilings
from maxvision.bench.engines import peers
from maxvision.bench.inputs import Images
from maxvision.bench.references import NETWORKS, reference_model, subject
from maxvision.bench.stand import Cell, Stand
from maxvision.bench.workers import Lost, Worker
from maxvision.bridge import convert
from maxvision.bridge.sources import TorchModel
from maxvision.common import memory
from maxvision.common.errors import ArgumentError
from tests.graphs import reference

KEYS = {"model", "dtype", "batch", "device", "engine", "p50_ms", "images_per_s", "max_rel_err"}
TINY = {"layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Writes a ResNet of two blocks for pictures of 32 px."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return reference.save(
        reference.resnet(**TINY, num_labels=6),
        folder,
        {**reference.PREPROCESS, "size": {"shortest_edge": 32}, "crop_pct": 1.0},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["models", "--models", "nothing", "--device", "cpu"],
            "--models nothing.*: there is no such model; name resnet-18, ",
        ),
        (["models", "--dtypes", "int3", "--device", "cpu"], "dtypes must be of float32, .* 'int3'"),
        (["models", "--dtypes", "float16", "--device", "cpu"], "runs on a GPU only"),
        (["models", "--dtypes", "bf16", "--device", "cpu"], "'bf16'; did you mean bfloat16"),
        (["profile", "--device", "cpu"], "profile needs a GPU, because MAX does not record"),
        (["compile", "--target", "sm_90a", "--out", "x", "--dtypes", "int3"], "dtypes must be of"),
        (
            ["models", "--models", "resnet-18", "--device", "cpu", "--precompiled", "none"],
            "--precompiled none: resnet-18-float32.mef is not .* bench compile$",
        ),
        (
            ["models", "--device", "cpu", "--against", "caffe"],
            "--against must be of torch-eager, .* but has 'caffe'",
        ),
        (
            ["models", "--device", "cpu", "--threads", "99999"],
            r"--threads 99999: only \d+ cores are available",
        ),
        (
            ["models", "--device", "cpu", "--json", "none/such.json"],
            "its folder does not exist; choose another place",
        ),
    ],
)
def test_mistakes_get_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert re.search(message, said), said


@pytest.mark.skipif(memory.resident() is None, reason="no /proc/self/status here")
def test_a_peak_outlives_its_memory_until_it_is_forgotten() -> None:
    """In a process of its own: of this one Linux may take memory at any time."""
    code = """
from maxvision.common import memory
memory.forget_peak()
before = memory.peak()
b"1" * (64 << 20)
print(memory.peak() - before)
memory.forget_peak()
print(memory.peak() - before)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True
    )
    with_it, without = map(int, done.stdout.split())
    assert with_it > 60 << 20
    assert without < 30 << 20


@pytest.mark.parametrize("batches", ["0", "1,x", "", "-1"])
def test_batches_are_numbers(capsys: pytest.CaptureFixture[str], batches: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["models", "--batches", batches])
    assert "--batches takes whole numbers of at least 1" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "maxvision.bench.models", raising=False)
    monkeypatch.delitem(sys.modules, "maxvision.bench.ceilings", raising=False)
    assert main(["models", "--device", "cpu"]) == 2
    assert "needs the package torch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    images = Images(1, (32, 32), np.zeros(3, np.float32), np.ones(3, np.float32), gpu=False)
    make = peers(reference_model("resnet-18"), images, "float32")[name]
    with pytest.raises(ArgumentError, match=rf"needs the package {name}; run .*peers"):
        make()


@pytest.mark.filterwarnings("ignore")  # of tracing, and of the exporter's age
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_runtime_answers_as_torch_does(tiny: str, name: str) -> None:
    pytest.importorskip(name)
    pytest.importorskip("onnx")
    images = Images(2, (32, 32), np.zeros(3, np.float32), np.full(3, 64, np.float32), gpu=False)
    network = reference_model(tiny)
    engine = peers(network, images, "float32")[name]()
    for turn in (1, 0):
        with torch.inference_mode():
            truth = network(images.tensor(turn, torch.float32)).logits.numpy()
        assert models.relative([engine.answer(turn)], [truth]) < 1e-5
    engine.close()


def test_our_backend_is_a_peer_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SimpleNamespace(peers=True, against=["torch-maxvision"], autotune=False)
    assert models._peers(asked, gpu=True) == ["torch-maxvision"]
    asked.against = None
    assert "torch-maxvision" not in models._peers(asked, gpu=True)
    ran = []

    def compiled(call: Any, *, backend: str, dynamic: bool, options: Any) -> Any:
        ran.append((backend, options))
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    images = Images(1, (32, 32), np.zeros(3, np.float32), np.ones(3, np.float32), gpu=False)
    found = peers(reference_model("resnet-18"), images, "float32")
    for name in ("torch-maxvision", "torch-maxvision-unguarded"):
        assert found[name]().answer(0).shape == (1, 1000)
    unguarded = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    assert ran == [("maxvision", None), ("maxvision", unguarded)]


def test_a_runtime_refuses_what_it_does_not_compute_in() -> None:
    images = Images(1, (32, 32), np.zeros(3, np.float32), np.ones(3, np.float32), gpu=False)
    made = peers(reference_model("resnet-18"), images, "float16")
    for name in ("onnxruntime", "openvino"):
        with pytest.raises(ArgumentError, match="but dtype is float16"):
            made[name]()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the measurement of the ceilings, and torch.compile, which takes a C++ compiler."""
    monkeypatch.setattr(models, "ceilings", lambda *_: Ceilings(1e11, 1e10))
    monkeypatch.setattr(models, "peer_names", lambda *_: ["torch-eager"])


class Here:
    """A ``Worker`` without a process."""

    alive = True

    def __init__(self, stand: Any) -> None:
        self.stand = stand

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.stand, method)(*arguments)

    def stop(self) -> None:
        self.stand.close()


class Stuck(Stand):
    """Makes peers that keep their first answer, as torch.compile does of an input that it folds."""

    def open(self, name: str, cell: Cell) -> dict[str, Any]:
        record = super().open(name, cell)
        if name != "maxvision":
            first = self.engine.answer(0)
            self.engine.answer = lambda turn: first  # type: ignore[method-assign]
        return record


class Dying(Stand):
    """Loses its peers: their process ends without a word, or raises."""

    def open(self, name: str, cell: Cell) -> dict[str, Any]:
        return {} if name == "torch-eager" else super().open(name, cell)

    def answers(self) -> list[np.ndarray]:
        if self._engine is None:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().answers()


def options_of(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["models", "--device", "cpu", "--seconds", "0.05", *arguments])


@pytest.mark.usefixtures("limits")
def test_a_run_writes_what_the_report_reads(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ("--models", tiny, "--batches", "1,2", "--json", str(path))
    options = options_of(*arguments, "--together")
    assert models.run(options, lambda: Here(Stand())) == 0
    written = json.loads(path.read_text())
    assert {"cpu", "gpu", "commit", "max", "torch", "method", "ceilings"} <= set(
        written["environment"]
    )
    records = written["records"]
    assert all(0 < r["p10_ms"] <= r["p50_ms"] and r["cpu_p10_ms"] > 0 for r in records)
    assert [(r["engine"], r["batch"]) for r in records] == [
        (engine, batch) for batch in (1, 2) for engine in ("maxvision", "torch-eager")
    ]
    for record in records:
        assert set(record) >= KEYS and record["passed"]
        assert record["model"] == "tiny" and record["dtype"] == "float32"
        assert 0 < record["p50_ms"] <= record["p90_ms"] <= record["p99_ms"]
        assert record["images_per_s"] == pytest.approx(
            record["batch"] / record["p50_ms"] * 1e3, rel=1e-3
        )
        assert record["max_rel_err"] < 1e-5 and record["setup_s"] >= 0
        assert record["memory_mb"] is not None or memory.resident() is None
        assert {"p50_ms", "p90_ms", "p99_ms"} == set(record["request"])
    ratio = records[0]["p50_ms"] / records[1]["p50_ms"]
    assert records[0]["of_best_peer"] == pytest.approx(ratio, rel=0.01)
    assert "load_s" in records[0] and "load_s" not in records[2]


@pytest.mark.nightly  # by day test_a_run_writes_what_the_report_reads runs the same networks
@pytest.mark.usefixtures("limits")
def test_an_engine_that_keeps_its_first_answer_is_caught(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = options_of("--models", tiny, "--batches", "2", "--json", str(path))
    assert models.run(options, lambda: Here(Stuck())) == 1
    mine, peer = json.loads(path.read_text())["records"]
    assert mine["passed"] and not peer["passed"]
    assert "p50_ms" not in peer and "of_best_peer" not in mine
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.usefixtures("limits")
def test_a_peer_that_crashes_takes_nothing_with_it(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peer's process dies in each cell, and is started anew."""
    path = tmp_path / "figures.json"
    options = options_of("--models", tiny, "--batches", "1,2", "--json", str(path))
    started: list[models.Callee] = []

    def start() -> models.Callee:
        started.append(Worker(Dying) if started else Here(Stand()))
        return started[-1]

    assert models.run(options, start) == 0
    assert len(started) == 3
    records = json.loads(path.read_text())["records"]
    assert len(records) == 4
    for mine, peer in (records[:2], records[2:]):
        assert mine["passed"] and mine["p50_ms"] > 0
        assert not peer["passed"] and peer["lost"] == "its process ended with SIGSEGV"
    said = capsys.readouterr()
    assert said.out.count("LOST") == 2 and "torch-eager is lost: its process" in said.err


def test_a_call_tells_what_was_raised() -> None:
    worker = Worker(dict)
    assert worker.call("get", "key", 3) == 3
    with pytest.raises(Lost, match=r"KeyError: 'key'"):
        worker.call("__getitem__", "key")
    assert worker.alive
    worker.stop()
    assert not worker.alive


def test_nan_is_an_error() -> None:
    truth = [np.ones((1, 2)), np.ones((1, 2))]
    assert models.relative([np.ones((1, 2)), np.array([[1, 1.5]])], truth) == 0.5
    assert not models.relative([np.ones((1, 2)), np.array([[1, np.nan]])], truth) <= 1


def test_the_random_networks_are_the_same_at_every_call() -> None:
    one, other = (reference_model("resnet-18").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(
        ArgumentError, match=r"--models vit: there is no such model; name resnet-18"
    ):
        reference_model("vit")
    assert set(NETWORKS) >= {"resnet-18", "resnet-50", "cvt-13"}


class Texts(torch.nn.Module):
    """Looks tokens up and mixes their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(ids))


def converted(folder: Path, module: torch.nn.Module, *example: torch.Tensor) -> str:
    """Writes a module down as ``maxvision convert`` does, and compiles nothing."""
    model = TorchModel("network", module, example)
    folder.mkdir()
    convert.write(folder, model, convert.translated(model))
    return str(folder)


def test_a_network_of_texts_is_measured_on_tokens(tmp_path: Path) -> None:
    network = Texts().eval()
    name = converted(tmp_path / "texts", network, torch.zeros(2, 5, dtype=torch.int64))
    what, same = subject(name), reference_model(name)
    inputs = what.inputs(3, False)
    ids = inputs.tensor(1, torch.bfloat16)
    assert ids.shape == (3, 5) and ids.dtype == torch.int64 and 0 <= ids.min() < ids.max() < 20
    assert np.array_equal(inputs.fresh().host[1], ids)
    with torch.inference_mode():
        torch.testing.assert_close(same(ids).logits, network(ids))
    program, _ = what.computing_in("bfloat16")
    assert program.types[program.producers[program.outputs["output"]].inputs[0]].dtype == "bfloat16"


def test_other_inputs_than_pictures_and_texts_are_refused(tmp_path: Path) -> None:
    name = converted(tmp_path / "rows", torch.nn.Linear(4, 2).eval(), torch.zeros(2, 4))
    with pytest.raises(
        ArgumentError, match=r"rows: it takes float32\[batch, 4\]; bench models runs"
    ):
        subject(name)


def test_traffic_counts_outputs_twice_and_weights_once() -> None:
    network = reference_model("resnet-18")
    one, two = (models.traffic(network, torch.zeros(1, 3, 224, 224), batch, 2) for batch in (1, 2))
    weights = 2 * sum(
        weight.numel()
        for layer in network.modules()
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)
        for weight in layer.parameters()
    )
    assert two - one == one - weights
    assert one - weights == pytest.approx(4 * 2.48e6 + 224 * 224 * 3, rel=0.01)


def test_a_reference_keeps_its_weights() -> None:
    images = Images(1, (32, 32), np.zeros(3, np.float32), np.full(3, 64, np.float32), gpu=False)
    network = reference_model("resnet-18")
    before = models._logits(network, images, 0, torch.float32)
    models._logits(network, images, 0, torch.bfloat16)
    np.testing.assert_array_equal(models._logits(network, images, 0, torch.float32), before)
