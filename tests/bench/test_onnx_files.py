"""Quantised programs as ONNX files: the same integers, and what each runtime needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx", reason="torch's exporter needs the package onnx")
from onnx import numpy_helper  # noqa: E402

from maxvision.bench import models  # noqa: E402
from maxvision.bench.engines import peers  # noqa: E402
from maxvision.bench.inputs import Images  # noqa: E402
from maxvision.bench.onnx_files import unrounded, write  # noqa: E402
from maxvision.bench.torchnet import TorchNet  # noqa: E402
from maxvision.bridge import onnx_file  # noqa: E402
from maxvision.common.errors import ArgumentError  # noqa: E402
from maxvision.graphs.constants import quantized_filter  # noqa: E402
from maxvision.graphs.program import Program  # noqa: E402
from maxvision.graphs.types import FLOAT8  # noqa: E402
from tests.graphs.interpret import inputs, interpret, weights  # noqa: E402
from tests.graphs.test_quantize import calibrated, residual, tokens  # noqa: E402


def written(path: Path, program: Program, every_sum: bool = False) -> Path:
    net = TorchNet(program, float32(program)).eval()
    write(path, net, torch.from_numpy(inputs(program, batch=1)[0]).float(), every_sum=every_sum)
    return path


def float32(program: Program) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32) for name, value in weights(program).items()}


@pytest.mark.parametrize("write_program", [residual, tokens])
def test_a_file_has_the_integers_of_the_program(write_program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Batch norms are folded, some with negative factors; scales of filters stay positive."""
    program = calibrated(write_program(8))
    path = written(tmp_path / "net.onnx", program)
    file = onnx.load(path)
    held = {each.name: numpy_helper.to_array(each) for each in file.graph.initializer}
    made = {node.output[0]: node for node in file.graph.node}
    products = [n for n in file.graph.node if n.op_type in ("Conv", "MatMul", "Gemm")]
    integers = []
    for node in products:
        x, weight = (made.get(name) for name in node.input[:2])
        if x is None or x.op_type != "DequantizeLinear":
            continue
        while weight is not None and weight.op_type == "Transpose":
            weight = made.get(weight.input[0])
        assert weight is not None and weight.op_type == "DequantizeLinear"
        integers.append(held[weight.input[0]])
        assert integers[-1].dtype == np.int8 and (held[weight.input[1]] > 0).all()
    rounded = [n for n in program.nodes if n.op == "fake_quantize_filter"]
    assert len(integers) == len(rounded) > 1
    given = float32(program)
    for node, found in zip(rounded, integers, strict=True):
        want = quantized_filter(given[node.inputs[0]])
        np.testing.assert_array_equal(np.abs(found), np.abs(want))
    (x,) = inputs(program, batch=1)
    (got,) = onnx_file.evaluator(file).run(None, {"x": x.astype(np.float32)})
    want = interpret(program, [x], given)["logits"]
    np.testing.assert_allclose(got, want, 1e-4, 1e-4 * np.abs(want).max())
    back = onnx_file.read(path).trace()
    assert back.program is not None
    again = interpret(back.program, [x], back.tensors)["logits"]
    np.testing.assert_allclose(again, want, 1e-5, 1e-5 * np.abs(want).max())


def test_onnxruntime_gets_convolutions_that_are_rounded(tmp_path: Path) -> None:
    program = calibrated(residual(8))
    loose = {}
    for every in (False, True):
        file = onnx.load(written(tmp_path / f"{every}.onnx", program, every))
        users: dict[str, list[str]] = {}
        for node in file.graph.node:
            for name in node.input:
                users.setdefault(name, []).append(node.op_type)
        convolutions = [n for n in file.graph.node if n.op_type == "Conv"][1:]  # but the stem
        ends = [users[node.output[0]] for node in convolutions]
        loose[every] = sum("Add" in each for each in ends)
    assert loose == {False: 2, True: 0}


def test_bounds_stay_where_rounding_goes() -> None:
    program = calibrated(residual(8))
    plain = unrounded(program)
    assert not any("quantize" in node.op for node in plain.nodes)
    given, tensors = inputs(program), weights(program)
    found, want = (interpret(each, given, tensors)["logits"] for each in (plain, residual(8)))
    step = np.abs(want).max() / 255  # values at their bounds are rounded inwards by half a level
    np.testing.assert_allclose(found, want, 0, step)


def test_floats_of_8_bits_are_bounded_and_have_no_file(tmp_path: Path) -> None:
    program = calibrated(residual(16), FLOAT8)
    given, tensors = inputs(program), weights(program)
    plains = unrounded(program), residual(16)
    found, want = (interpret(each, given, tensors)["logits"] for each in plains)
    np.testing.assert_allclose(found, want, 1e-9)
    network = TorchNet(program, tensors).eval()
    with pytest.raises(ArgumentError, match="residual rounds to float8_e4m3fn, which no engine"):
        write(tmp_path / "fp8.onnx", network, torch.from_numpy(given[0]))


@pytest.mark.filterwarnings("ignore")  # of tracing, and of the exporter's age
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_runtime_multiplies_the_same_integers(name: str) -> None:
    pytest.importorskip(name)
    program = calibrated(residual(8))
    network = TorchNet(program, float32(program)).eval()
    mean, std = np.full(3, 100, np.float32), np.full(3, 64, np.float32)
    images = Images(2, (9, 8), mean, std, gpu=False)
    truth = []
    engine = peers(network, images, "float32")[name]()
    for turn in models.CHECKED:
        with torch.inference_mode():
            truth.append(network(images.tensor(turn, torch.float32)).logits.numpy())
    noise = models.rounding(network, images, truth)
    answers = [engine.answer(turn) for turn in models.CHECKED]
    assert 0 < noise < 0.1 and models.relative(answers, truth) <= 2 * noise
    engine.close()
