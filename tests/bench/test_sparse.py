"""Pruned networks, measured: what is a case, the tables that are written and shown."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType

from maxvision import weights
from maxvision.bench import accuracy, curves, sparse, summaries
from maxvision.bench.__main__ import main, parser
from maxvision.commands.weights import main as weights_command
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs import sparsity
from maxvision.graphs.layers import layers as layers_of
from maxvision.graphs.target import Target
from tests.graphs import reference
from tests.runtime.test_classifier import PREPROCESS, SMALL

FACTS = {"cpu": "Some CPU, 2 cores", "gpu": "none", "commit": "abc", "date": "2026-11-22",
         "command": "maxvision bench sparse", "ceilings": {}}  # fmt: skip


def layer(density: float, us: float, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "kind": "sparse layer", "model": "net", "dtype": "float32", "device": "cpu",
        "batch": batch, "layer": "3x3/1 64 at 1024 px", "kernel": 3, "stride": 1,
        "channels": 64, "filters": 64, "pixels": 1024, "count": 2, "names": ["a", "b"],
        "density": density, "dense_us": 101.0, "sparse_us": us + 1, "dense_p10_us": 100.0,
        "sparse_p10_us": us, "gain": 100.0 / us, "passed": True, **more,
    }  # fmt: skip


NETWORK = {
    "kind": "sparse network", "model": "net", "dtype": "float32", "device": "cpu", "batch": 1,
    "sparse": "auto", "density": None, "told": "2 of 3 pruned layers sparse", "sparse_layers": 2,
    "ms": 1.5, "p10_ms": 1.4, "gain": 1.8, "passed": True, "zeros": 0.9, "accuracy": 0.905,
    "formats": {"tiles": 2}, "weight_bytes": 1_230_000,
}  # fmt: skip
DENSE = {**NETWORK, "sparse": "never", "zeros": 0.0, "gain": 1.0, "formats": {}, "sparse_layers": 0}
RECORDS = [layer(0.5, 160.0), layer(0.2, 80.0), layer(0.1, 40.0), DENSE, NETWORK]


def test_options() -> None:
    options = parser().parse_args(["sparse", "--model", "x", "--densities", "0.5,1"])
    assert (options.models, options.densities, options.batches) == (["x"], [0.5, 1.0], [1, 16])
    for wrong in ("0", "1.5", "nan", "x", ""):
        with pytest.raises(SystemExit):
            parser().parse_args(["sparse", "--densities", wrong])


def test_layers_are_drawn_at_their_density_with_nested_zeros() -> None:
    model = weights.load("resnet-cifar10")
    layers = layers_of(model.program((128, 128)))
    cases = list(sparse.drawn(layers, (0.5, 0.1)))
    assert {name for case in cases for name in case.names} == {each.name for each in layers}
    for wide, narrow in zip(cases[::2], cases[1::2], strict=True):
        assert np.mean(wide.filters != 0) == pytest.approx(0.5, abs=0.01)
        assert np.mean(narrow.filters != 0) == pytest.approx(0.1, abs=0.01)
        assert not (narrow.filters * (wide.filters == 0)).any()


def test_a_pruned_models_own_layers(tmp_path: Path) -> None:
    out = str(tmp_path / "pruned")
    arguments = ["prune", "resnet-cifar10", "--sparsity", "0.8", "--scope", "layer", "-o", out]
    assert weights_command(arguments) == 0
    model = weights.load(out)
    layers = layers_of(model.program((128, 128)))
    names = [name for case in sparse.own(model, layers) for name in case.names]
    assert sorted(names) == sorted({each.name for each in layers} - {"stem", "head"})
    with pytest.raises(ModelError, match="the model is not pruned"):
        list(sparse.own(weights.load("resnet-cifar10"), layers))


def test_the_table_is_what_auto_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsity, "TABLES", tmp_path)
    target = Target.of(CPU())
    wrong = layer(0.05, 1.0, passed=False)
    sparse.write_table([*RECORDS, wrong, layer(0.1, 90.0, 16)], target, "float32", FACTS)
    sparsity.read_table.cache_clear()
    table = sparsity.load_table(target, "float32")
    assert table and [row.batch for row in table.rows] == [1, 16]
    assert table.rows[0].sparse_us == ((0.1, 40.0), (0.2, 80.0), (0.5, 160.0))
    assert table.rows[0].dense_us == 100.0 and table.measured["command"] == FACTS["command"]
    with pytest.raises(ArgumentError, match="--table needs layers, and none was measured"):
        sparse.write_table([NETWORK], target, "float32", FACTS)
    sparsity.read_table.cache_clear()


def test_more_zeros_never_take_longer() -> None:
    row = curves.to_row([layer(0.5, 100.0), layer(0.3, 190.0), layer(0.2, 60.0), layer(0.1, 70.0)])
    assert row.sparse_us == ((0.1, 60.0), (0.2, 60.0), (0.3, 100.0), (0.5, 100.0))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--target", "sm_90a", "--no-network"], "--target takes a kind of CPU"),
        (["--target", "cpu:generic"], "and --no-network"),
        (["--target", "cpu:z80", "--no-network"], "target must be one of cpu, "),
    ],
)
def test_a_target_is_a_lesser_cpu(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sparse", "--models", "resnet-cifar10", "--device", "cpu", *argv]) == 2
    assert says in capsys.readouterr().err


def test_what_a_lesser_cpu_lacks_is_told() -> None:
    here = Target("cpu", "cpu", "x86_64", ("avx2", "avx512f"))
    less = Target("cpu:x86-64-v3", "cpu", "x86_64", ("avx2",))
    assert sparse.kept_to(less, here) == ", as x86-64-v3 without its AVX-512"
    assert sparse.kept_to(less, less) == ", as x86-64-v3"


def test_the_tables_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    summaries.sparse([*RECORDS, layer(0.05, 30.0, batch=4, passed=False)])
    said = capsys.readouterr().out.split("\n\n")
    assert said[0] == "\nLayers of net, float32, batch 1"
    row = [cell.strip() for cell in said[1].splitlines()[2].split("|")]
    even = 1 - (0.2 + 0.3 * 20 / 80)  # where 80 to 160 us reach 100
    assert row[1:5] == ["3x3/1 64 at 1024 px", "2", "100", f"{even:.0%}"]
    assert row[5:] == ["0.62", "0.94", "1.25", "2.50", ""]
    alone = [cell.strip() for cell in said[3].splitlines()[2].split("|")]
    assert alone[4:] == ["0.95", "30.0", "3.33", "WRONG", ""]
    assert said[4] == "Networks, float32, cpu"
    networks = [[cell.strip() for cell in line.split("|")] for line in said[5].splitlines()[2:]]
    assert [each[2:-1] for each in networks] == [
        ["0", "1", "never", "0", "90.50%", "1.23", "1.500", "1.400", "1.00"],
        ["0.9", "1", "auto", "2 tiles", "90.50%", "1.23", "1.500", "1.400", "1.80"],
    ]


@pytest.mark.nightly
def test_both_kernels_give_the_same_and_are_timed() -> None:
    model = weights.load("resnet-cifar10")
    layers = [each for each in layers_of(model.program((128, 128))) if "stages.3" in each.name]
    cases = list(sparse.drawn(layers, (0.1,)))
    options = argparse.Namespace(batches=[2], seconds=0.01)
    found = list(sparse.measure_layers(cases, CPU(), DType.float32, options, Target.of(CPU())))
    assert [tuple(r["names"]) for r in found] == [case.names for case in cases]
    for record in found:
        assert record["passed"] and record["difference"] < 1e-5
        assert record["dense_us"] > 0 and record["sparse_us"] > 0
    missing = Path("no", "such", "model")
    assert main(["sparse", "--model", str(missing), "--device", "cpu"]) == 2


def test_data_are_pictures_of_the_models_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.npz"
    argv = ["sparse", "--models", "resnet-cifar10", "--device", "cpu", "--no-layers"]
    for content in (None, b"nothing"):
        if content:
            path.write_bytes(content)
        assert main([*argv, "--data", str(path)]) == 2
        assert "is not an npz file with the arrays jpeg, offset" in capsys.readouterr().err
    np.savez(path, jpeg=np.zeros(1, np.uint8), offset=[0, 1], label=[0], names=["unicorn"])
    assert main([*argv, "--data", str(path), "--densities", "0.5"]) == 2
    assert "--data does not go with --densities" in capsys.readouterr().err
    model = SimpleNamespace(name="net", labels=["cat"])
    with pytest.raises(ArgumentError, match="net has no class 'unicorn'; use"):
        list(accuracy.correct(model, path))  # type: ignore[arg-type]


@pytest.mark.nightly
def test_networks_that_were_compiled_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiles the graphs of tests/graphs/test_sparsity.py."""
    dense = reference.save(reference.resnet(0, **SMALL), tmp_path / "dense", PREPROCESS)
    monkeypatch.chdir(tmp_path)
    assert weights_command(["prune", dense, "--sparsity", "0.9", "-o", "net"]) == 0
    options = ["--models", "net", "--dtypes", "float32"]
    run = ["sparse", *options, "--device", "cpu", "--batches", "1,2", "--seconds", "0.02"]
    run += ["--precompiled", "made", "--json", "found.json"]
    capsys.readouterr()
    assert main(run) == 2
    assert "--precompiled holds whole networks; add --no-layers" in capsys.readouterr().err
    assert main([*run, "--no-layers"]) == 2
    expected = "--precompiled made: net-float32-never.mef is not .* compile --sparse never"
    assert re.search(expected, capsys.readouterr().err)
    modes = ["--target", "cpu", "--sparse", "never,auto,always", "--out", "made"]
    assert main(["compile", *options, *modes]) == 0
    assert main([*run, "--no-layers"]) == 0
    records = json.loads(Path("found.json").read_text())["records"]
    assert [(r["batch"], r["sparse"]) for r in records] == [
        (batch, mode) for batch in (1, 2) for mode in sparse.COMPARED
    ]
    held = {r["sparse"]: r["weight_bytes"] for r in records}
    weights_of = weights.load("net").tensors.values()
    assert held["never"] >= 4 * sum(math.prod(each.shape) for each in weights_of)
    for record in records:
        assert record["passed"] and record["ms"] > 0 and record["zeros"] == 0.9
        layers = sum(record["formats"].values())
        assert layers == record["sparse_layers"] == (5 if record["sparse"] == "always" else layers)
