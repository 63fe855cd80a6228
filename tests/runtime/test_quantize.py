"""Quantising a model by pictures, its networks run by the interpreter: nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from PIL import Image

from maxvision import weights
from maxvision.commands import quantize as command
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.quantize import CONFIG
from maxvision.graphs.types import FLOAT8
from maxvision.runtime import quantize as module
from maxvision.runtime.classifier import network, weights_of
from maxvision.runtime.executor import Executor
from maxvision.runtime.quantize import Report, quantize
from maxvision.weights.convert import write_files
from maxvision.weights.source import find
from tests.graphs.interpret import Interpreted
from tests.graphs.interpret import weights as drawn
from tests.graphs.test_quantize import residual

PREPROCESS = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 9, "width": 8},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    program = residual()
    write_files(folder, {"model_type": "program"}, PREPROCESS, drawn(program), program)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    program = residual(16)
    write_files(folder, {"model_type": "program"}, PREPROCESS, drawn(program), program)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for i in range(20):
        pixels = random.integers(0, 256, (9, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    (folder / "broken.jpg").write_bytes(b"no picture")
    return str(folder)


@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_a_model_is_quantised_and_loads(
    method: str, model: Path, pictures: str, tmp_path: Path
) -> None:
    said: list[str] = []
    to = tmp_path / "int8"
    report = quantize(
        find(str(model)), to, [pictures], method=method, agree=0.9, progress=said.append
    )
    assert isinstance(report, Report) and report.images == 20 and report.agree >= 0.9
    assert report.cosine > 0.99 and report.logits < 0.1
    assert [each.name for each in report.layers] == [
        "a.one", "a.two", "b.one", "b.two", "b.shortcut"
    ]  # fmt: skip
    assert all(0 < each.error < 0.05 and not each.kept for each in report.layers)
    assert any("compiling the quantised network" in line for line in said)
    checkpoint = weights.load(str(to))
    program = checkpoint.program(checkpoint.size)
    assert sum(node.op == "fake_quantize_filter" for node in program.nodes) == 5
    notes = json.loads((to / "config.json").read_text())[CONFIG]
    assert (notes["method"], notes["images"], notes["dtype"]) == (method, 20, "int8")
    plain = weights.load(str(model))
    assert set(plain.tensors) == set(checkpoint.tensors)
    with pytest.raises(ModelError, match="is quantised already; take the model"):
        quantize(find(str(to)), tmp_path / "again", [pictures])


@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_a_model_is_quantised_to_floats_of_8_bits(
    method: str, wide: Path, pictures: str, tmp_path: Path
) -> None:
    to = tmp_path / "fp8"
    report = quantize(
        find(str(wide)), to, [pictures], dtype=FLOAT8, method=method, keep=["b.one"], agree=0.5
    )
    assert report.cosine > 0.99 and report.logits < 0.2
    assert [each.kept for each in report.layers] == ["", "", "asked", "", ""]
    assert all(0 < each.error < 0.1 for each in report.layers if not each.kept)
    notes = json.loads((to / "config.json").read_text())[CONFIG]
    assert notes["dtype"] == FLOAT8 and all(len(scale) == 1 for scale in notes["values"].values())
    checkpoint = weights.load(str(to))
    program = network(checkpoint, checkpoint.size, "bfloat16")
    final = passes.run(program, Backend("cuda", "bfloat16", architecture="sm_90a"))
    found = [final.types[node.output].dtype for node in final.nodes if "quantized" in node.op]
    assert found == [FLOAT8, "bfloat16", FLOAT8, "bfloat16"]  # b.one reads a.two's as it is
    with pytest.raises(ModelError, match="is quantised already; take the model"):
        quantize(find(str(to)), tmp_path / "again", [pictures])


def test_what_no_kernel_multiplies_in_floats_of_8_bits_is_told(
    pictures: str, tmp_path: Path
) -> None:
    program = residual(12)
    write_files(tmp_path, {"model_type": "program"}, PREPROCESS, drawn(program), program)
    with pytest.raises(ModelError, match="linear layers, of a multiple of 16 channels and filters"):
        quantize(find(str(tmp_path)), tmp_path / "fp8", [pictures], dtype=FLOAT8)


def test_pixels_are_rounded_if_that_is_asked(model: Path, pictures: str, tmp_path: Path) -> None:
    to = tmp_path / "int8"
    report = quantize(find(str(model)), to, [pictures], pixels=True, agree=0.9)
    assert report.layers[0].name == "stem" and 0 < report.layers[0].error < 0.05
    checkpoint = weights.load(str(to))
    program = network(checkpoint, checkpoint.size, "float32")
    final = passes.run(program, Backend("cpu", "float32"))
    running = [node for node in final.nodes if not node.at_load]
    assert [node.op for node in running[:2]] == ["normalize", "quantized_conv2d"]
    assert final.types[running[0].output].shape[3] == 4


def test_layers_are_kept(model: Path, pictures: str, tmp_path: Path) -> None:
    report = quantize(
        find(str(model)), tmp_path / "int8", [pictures], keep=["b.*"], agree=0.5, images=7
    )
    assert report.images == 7
    assert [each.kept for each in report.layers] == ["", "", "asked", "asked", "asked"]
    checkpoint = weights.load(str(tmp_path / "int8"))
    program = checkpoint.program(checkpoint.size)
    assert sum(node.op == "fake_quantize_filter" for node in program.nodes) == 2


def test_layers_that_hurt_are_left_out(
    model: Path, pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stay only where the worst two layers are in floats."""
    found = []

    def compared(plain: np.ndarray, logits: np.ndarray) -> tuple[float, float, float]:
        found.append(logits)
        return (0.5 if len(found) < 3 else 1.0), 0.9, 0.1

    monkeypatch.setattr(module, "_compared", compared)
    report = quantize(find(str(model)), tmp_path / "int8", [pictures])
    hurt = [each for each in report.layers if each.kept]
    assert [each.kept for each in hurt] == ["hurts"] * 2
    assert min(each.error for each in hurt) >= max(
        each.error for each in report.layers if not each.kept
    )
    assert not np.array_equal(found[0], found[2])


def test_what_cannot_be_met_is_told(
    model: Path, pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_compared", lambda *_: (0.25, 0.9, 0.1))
    with pytest.raises(ArgumentError, match=r"only 25.0% of the first labels stay, and 98.0% are"):
        quantize(find(str(model)), tmp_path / "int8", [pictures])
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "entropy"}, "the method must be one of max, percentile, mse but is 'entropy'"),
        ({"dtype": "int4"}, "the dtype must be one of int8, float8_e4m3fn but is 'int4'"),
        ({"dtype": FLOAT8, "pixels": True}, "runs in int8 only; leave out --pixels"),
        ({"keep": ["a.oen"]}, "--keep: there is no layer 'a.oen' .*did you mean a.one"),
    ],
)
def test_a_wrong_setting_is_told(
    settings: dict[str, Any], said: str, model: Path, pictures: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=said):
        quantize(find(str(model)), tmp_path / "int8", [pictures], **settings)


def test_a_folder_without_pictures_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(
        ArgumentError, match=r"--calibrate .*: there is no picture that can be read"
    ):
        quantize(find(str(model)), tmp_path / "int8", [str(tmp_path)])


def test_the_command_prints_what_it_did(
    model: Path, pictures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--calibrate", pictures, "-o", str(tmp_path / "int8")]
    assert command.main([*arguments, "--agree", "0.5", "--keep", "b.two"]) == 0
    told = capsys.readouterr()
    assert "4 layers in int8, 1 in float32" in told.out and "of 20 pictures keep" in told.out
    assert "float32, as asked" in told.err and "reading 21 pictures" in told.err
    assert command.main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert command.METHODS == module.METHODS and {*command.DTYPES.values()} == {*module.KINDS}


def test_the_command_takes_floats_of_8_bits(
    wide: Path, pictures: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(wide), "--calibrate", pictures, "-o", str(tmp_path / "fp8"), "--dtype", "fp8"]
    assert command.main([*arguments, "--agree", "0.5"]) == 0
    assert "5 layers in fp8, 0 in float32" in capsys.readouterr().out
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())[CONFIG]["dtype"] == FLOAT8


@pytest.mark.nightly
def test_a_compiled_network_gives_what_the_interpreter_does(
    model: Path, pictures: str, tmp_path: Path
) -> None:
    quantize(find(str(model)), tmp_path / "int8", [pictures], agree=0.5, pixels=True)
    checkpoint = weights.load(str(tmp_path / "int8"))
    program, tensors = network(checkpoint, checkpoint.size, "float32"), weights_of(checkpoint)
    pixels = np.random.default_rng(1).integers(0, 256, (5, 9, 8, 3), np.uint8)
    compiled = Executor.compile(program, tensors, CPU())
    assert sum("quantized" in node.op for node in compiled.program.nodes) == 6
    (found,), (wanted,) = compiled(pixels), Interpreted(program, tensors)(pixels)
    # A sum in float32 may round to the next level.
    np.testing.assert_allclose(found, wanted, 0.01, 0.01 * np.abs(wanted).max())
