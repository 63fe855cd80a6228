"""Compiling ahead of time: the folder runs alone, without the compiler, and says what it is not.

It is compiled from the bundled ResNet for this machine's CPU, which other tests compile too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxvision import runtime
from maxvision.commands import compile as compiling
from maxvision.commands import inspect as inspecting
from maxvision.commands import weights as weights_command
from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.errors import ArgumentError, DeviceError, ModelError
from maxvision.graphs.target import Target, cpu_features
from maxvision.runtime import ahead
from maxvision.runtime import artifact as package

ROOT = Path(__file__).resolve().parents[2]
MODEL = "resnet-cifar10"
CAT = ROOT / "examples" / "cat.jpg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ahead") / "deep" / "model"
    ahead.compile(MODEL, made)
    return made


def test_it_answers_as_the_model_does(folder: Path) -> None:
    packed, model = runtime.load(str(folder), batch_size=2), runtime.load(MODEL, device="cpu")
    assert (packed.name, packed.family, packed.device) == (MODEL, "resnet", "cpu")
    assert (packed.dtype, packed.batch_size, packed.channels) == ("float32", 2, 3)
    assert packed.labels == model.labels and packed.preprocess == model.preprocess
    pixels = np.random.default_rng(0).integers(0, 256, (3, 128, 128, 3), np.uint8)
    assert np.array_equal(packed(pixels), model(pixels))
    assert packed.classify(CAT) == model.classify(CAT)


def test_labels_in_place_of_the_models(folder: Path) -> None:
    packed = runtime.load(str(folder), labels=[f"kind {i}" for i in range(10)])
    assert packed.classify(CAT, top_k=1)[0].label == "kind 3"
    said = f"Classifier({MODEL!r}, resnet, 10 classes, 128 x 128 px, float32 on cpu)"
    assert repr(packed) == said
    with pytest.raises(ArgumentError, match=f"labels: there are 1 but {MODEL} has 10 classes"):
        runtime.load(str(folder), labels=["kind"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["inspect"], "look into it with maxvision inspect {}"),
        (["verify"], "name the checkpoint that it was compiled from"),
        (["convert", "-o", "new"], "name the checkpoint that it was compiled from"),
    ],
)
def test_it_is_no_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert weights_command.main([argv[0], str(folder), *argv[1:]]) == 2
    out, err = capsys.readouterr()
    said = f"error: {folder} is a compiled model and not a checkpoint; {says.format(folder)}\n"
    assert (out, err) == ("", said)


def test_it_holds_what_it_says_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "graph.mef", "manifest.json", "preprocessor_config.json", "program.json",
        "weights.safetensors",
    ]  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    found = package.read(folder)
    assert found.target == Target.parse("cpu") and found.target.features == cpu_features()


def test_what_it_was_not_compiled_for(folder: Path) -> None:
    packed = runtime.load(str(folder))
    others: list[tuple[Any, Any]] = [
        (packed, np.zeros((1, 128, 128, 3), np.float32)),
        (packed, np.zeros((1, 64, 128, 3), np.uint8)),
        (packed.features, np.zeros((1, 128, 128, 3), np.uint8)),
    ]
    for call, pixels in others:
        with pytest.raises(ArgumentError, match=r"uint8 pixels \[N, 128, 128, 3\] and nothing els"):
            call(pixels)
    with pytest.raises(DeviceError, match="was compiled for cpu but device is gpu; omit --device"):
        runtime.load(str(folder), device="gpu")
    with pytest.raises(DeviceError, match="was compiled in float32 but dtype is bfloat16"):
        runtime.load(str(folder), dtype="bfloat16")
    with pytest.raises(ArgumentError, match="device must be auto"):
        runtime.load(str(folder), device="tpu")
    with pytest.raises(ArgumentError, match="is compiled already and has no revision"):
        runtime.load(str(folder), revision="v1")
    with pytest.raises(ModelError, match="compiled already; run it as it is"):
        ahead.compile(folder, folder.parent / "other")


def test_folders_in_the_way(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    ahead.compile(MODEL, taken)  # empty: nobody misses it
    before = (taken / "manifest.json").stat().st_ino
    with pytest.raises(ArgumentError, match=r"exists already and is not empty; .*--force"):
        ahead.compile(MODEL, taken)
    assert (taken / "manifest.json").stat().st_ino == before
    ahead.compile(MODEL, taken, force=True)
    assert (taken / "manifest.json").stat().st_ino != before
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    (tmp_path / "file").touch()
    for name in ("photos", "file"):
        with pytest.raises(ArgumentError, match="--force replaces compiled models only"):
            ahead.compile(MODEL, tmp_path / name, force=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "photos", "taken"]
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package, "_write_weights", full)
    with pytest.raises(ArgumentError, match="the model cannot be written: the disk is full"):
        ahead.compile(MODEL, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"target": "tpu"}, ArgumentError, "target must be one of cpu, .* but is 'tpu'"),
        ({"dtype": "float16"}, DeviceError, "dtype float16 runs on a GPU only"),
        (
            {"source": "no-such-model"},
            ModelError,
            "no-such-model: there is no bundled model",
        ),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, arguments: dict[str, str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ahead.compile(**{"source": MODEL, "folder": tmp_path / "model", **arguments})  # type: ignore
    assert not list(tmp_path.iterdir())


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_it_runs_without_the_compiler_the_cache_and_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    bare = {"MODULAR_MOJO_MAX_DRIVER_PATH": "/dev/null", "MODULAR_CACHE_DIR": str(tmp_path / "c")}
    done = program("run_graph.py", str(CAT), "--model", str(moved), "--json", **bare)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["model"] == MODEL and line["predictions"][0]["label"] == "cat"
    done = program("run_graph.py", str(CAT), **bare)
    assert done.returncode == 2
    assert "\nerror: compiling needs the compiler of the package max" in done.stderr
    assert done.stderr.startswith(f"compiling {DEFAULT_MODEL} for cpu, this time only; it may take")


def test_nothing_that_only_compiling_needs_is_imported(folder: Path) -> None:
    code = (
        "import sys\nfrom maxvision import run_graph\n"
        f"run_graph.main([{str(CAT)!r}, '--model', {str(folder)!r}, '--json'])\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'huggingface_hub'}\n"
        "heavy |= {'maxvision.runtime.ahead'}\n"
        "sys.exit(f'imported {found}' if (found := heavy & set(sys.modules)) else 0)"
    )
    done = program("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(tmp_path / "model")
    assert compiling.main([MODEL, "-o", made]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"wrote {made} in [\d.]+ s: {MODEL} for cpu, float32, \d\.\d MB\n", said)
    assert inspecting.main([made]) == 0
    said = capsys.readouterr().out
    assert "weights.safetensors" in said and f"{MODEL} (resnet, 10 classes)" in said
    assert compiling.main([MODEL, "-o", made]) == 2
    assert capsys.readouterr().err.startswith(f"error: {made} exists already and is not empty")
    assert inspecting.main([str(tmp_path)]) == 2
    assert "is not a folder that maxvision compile wrote" in capsys.readouterr().err
    (tmp_path / "model" / "graph.mef").write_bytes(b"")
    assert inspecting.main([made]) == 2
    assert "graph.mef has 0 bytes" in capsys.readouterr().err


def test_the_program_ends_well(tmp_path: Path) -> None:
    done = program("-m", "maxvision", "compile", MODEL, "-o", str(tmp_path / "model"))
    assert done.returncode == 0
    assert re.fullmatch(r"(compiling .* for cpu; it may take a minute\n)?", done.stderr)
    assert program("-m", "maxvision", "compile", MODEL).returncode == 2
    assert "targets:" in program("-m", "maxvision", "compile", "--help").stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("target", "dtype"),
    [("cpu:x86-64-v3", "float32"), ("sm_90a", "bfloat16"), ("gfx942", "float16")],
)
def test_other_targets(tmp_path: Path, target: str, dtype: str) -> None:
    made = tmp_path / "model"
    arguments = ["compile", MODEL, "-o", str(made), "--target", target, "--dtype", dtype]
    done = program("-m", "maxvision", *arguments)
    assert done.returncode == 0, done.stderr
    package.read(made).verify()
    if target.startswith("cpu"):
        assert runtime.load(str(made)).classify(CAT)[0].label == "cat"
