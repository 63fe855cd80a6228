"""The command on a CPU: what it refuses, what it writes, and that a wrong engine is caught."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU

from bench import models
from bench.__main__ import main
from bench.ceilings import Ceilings
from bench.engines import Images
from bench.references import NETWORKS, our_model, reference_model
from graphs.errors import ArgumentError
from graphs.session import DTYPES
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
            "models expects resnet-18, .* 'noth",
        ),
        (["models", "--dtypes", "int3", "--device", "cpu"], "dtypes expects float32, .* 'int3'"),
        (["models", "--dtypes", "bfloat16", "--device", "cpu"], "runs on a GPU only"),
        (["models", "--device", "tpu"], "device expects auto, cpu, gpu or gpu:N but is 'tpu'"),
        (["profile", "--device", "cpu"], "profile expects a GPU, because MAX records no time"),
        (["compile", "--target", "sm_90a", "--out", "x", "--dtypes", "int3"], "dtypes expects"),
        (
            ["models", "--models", "resnet-18", "--device", "cpu", "--precompiled", "none"],
            "precompiled expects resnet-18-float32.mef in none .* bench compile",
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


@pytest.mark.parametrize("batches", ["0", "1,x", "", "-1"])
def test_batches_are_numbers(capsys: pytest.CaptureFixture[str], batches: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["models", "--batches", batches])
    assert "expects numbers of at least 1" in capsys.readouterr().err


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bench.models", raising=False)
    monkeypatch.delitem(sys.modules, "bench.ceilings", raising=False)
    assert main(["models", "--device", "cpu"]) == 2
    assert "expects the package torch" in capsys.readouterr().err


def test_a_run_writes_what_the_report_reads(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "ceilings", lambda *_: Ceilings(1e11, 1e10))
    monkeypatch.setattr(models, "peers", only_eager)
    path = tmp_path / "figures.json"
    arguments = ["--models", tiny, "--device", "cpu", "--batches", "1,2", "--seconds", "0.05"]
    assert main(["models", *arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {"cpu", "gpu", "commit", "max", "torch", "method", "ceilings"} <= set(
        written["environment"]
    )
    records = written["records"]
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
        assert record["max_rel_err"] < 1e-5
        assert {"p50_ms", "p90_ms", "p99_ms"} == set(record["request"])
    ratio = records[0]["p50_ms"] / records[1]["p50_ms"]
    assert records[0]["of_best_peer"] == pytest.approx(ratio, rel=0.01)


def only_eager(*arguments: Any, **options: Any) -> dict[str, Any]:
    """The peers without torch.compile, which takes a C++ compiler and its time."""
    from bench.engines import peers

    found = peers(*arguments, **options)
    return {name: make for name, make in found.items() if name == "torch-eager"}


def test_an_engine_that_keeps_its_first_answer_is_caught(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch.compile does when it folds the input it was compiled with into a constant."""
    options = argparse.Namespace(peers=True, autotune=False, seconds=0.05, energy=False)
    network = reference_model(tiny)
    ours = our_model(tiny, network, CPU(), DTYPES["float32"])

    def stuck(reference: Any, images: Images, dtype: str, **_: Any) -> dict[str, Any]:
        (made,) = only_eager(reference, images, dtype).values()

        def make() -> Any:
            engine = made()
            first = engine.answer(0)
            engine.answer = lambda turn: first
            return engine

        return {"torch-eager": make}

    monkeypatch.setattr(models, "peers", stuck)
    facts = {"ceilings": {"float32": Ceilings(1e11, 1e10)}}
    mine, peer = models.measure(tiny, network, ours, CPU(), 2, options, facts)
    assert mine["passed"] and not peer["passed"]
    assert "p50_ms" not in peer and "of_best_peer" not in mine
    models.print_cell([mine, peer])
    assert "WRONG" in capsys.readouterr().out


def test_nan_is_an_error() -> None:
    truth = [np.ones((1, 2)), np.ones((1, 2))]
    assert models.relative([np.ones((1, 2)), np.array([[1, 1.5]])], truth) == 0.5
    assert not models.relative([np.ones((1, 2)), np.array([[1, np.nan]])], truth) <= 1


def test_the_random_networks_are_the_same_at_every_call() -> None:
    one, other = (reference_model("resnet-18").state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ArgumentError, match=r"models expects resnet-18.* but is 'vit'"):
        reference_model("vit")
    assert set(NETWORKS) >= {"resnet-18", "resnet-50", "cvt-13"}


def test_traffic_counts_outputs_twice_and_weights_once() -> None:
    network = reference_model("resnet-18")
    one, two = (models.traffic(network, (224, 224), batch, 2) for batch in (1, 2))
    weights = 2 * sum(
        weight.numel()
        for layer in network.modules()
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear)
        for weight in layer.parameters()
    )
    assert two - one == one - weights
    assert one - weights == pytest.approx(4 * 2.48e6 + 224 * 224 * 3, rel=0.01)
