"""ONNX files that are quantised already: products of 8 bits, the same numbers, and sentences."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX files are read by the package onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from maxvision.bridge.convert import convert, missing_error  # noqa: E402
from maxvision.bridge.importer import Traced  # noqa: E402
from maxvision.bridge.onnx_file import OnnxReference, read  # noqa: E402
from maxvision.commands.convert import main  # noqa: E402
from maxvision.graphs import passes  # noqa: E402
from maxvision.graphs.backend import Backend  # noqa: E402
from maxvision.graphs.constants import Constants, quantized_filter  # noqa: E402
from tests.graphs.interpret import interpret  # noqa: E402

ON = Backend("cpu", "float32")


class File:
    """A file in the making, as onnxruntime's quantiser writes it (QDQ)."""

    def __init__(self, activations: str = "uint8", opset: int = 13) -> None:
        self.activations = activations
        self.opset = opset
        self.held: list[Any] = []
        self.nodes: list[Any] = []
        self.random = np.random.default_rng(0)
        self.scales: dict[str, float] = {}
        self.integers: dict[str, np.ndarray] = {}

    def constant(self, name: str, value: Any) -> str:
        self.held.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def rounded(self, x: str, scale: float, zero: int) -> str:
        """Rounds a value to 8 bits; ``zero`` is that of uint8."""
        point = np.uint8(zero) if self.activations == "uint8" else np.int8(zero - 128)
        numbers = [
            self.constant(f"{x}_scale", np.float32(scale)),
            self.constant(f"{x}_zero_point", point),
        ]
        y = self.node("DequantizeLinear", self.node("QuantizeLinear", x, *numbers), *numbers)
        self.scales[y] = scale
        return y

    def layer(self, op: str, x: str, name: str, shape: tuple[int, ...], **more: Any) -> str:
        """Multiplies by weights of integers, whose largest is not 127 in all filters."""
        f = shape[0]
        whole = self.random.integers(-127, 128, shape)
        whole[0] = self.random.integers(-60, 61, shape[1:])
        whole[-1] = 0
        scales = self.random.uniform(0.5, 1, f) * 0.7 / (73 * np.sqrt(np.prod(shape[1:])))
        scales = scales.astype(np.float32)
        if more.pop("per_tensor", False):
            scales = scales[:1]
        self.integers[name] = whole
        weights = self.node(
            "DequantizeLinear",
            self.constant(f"{name}.weight_quantized", whole.astype(np.int8)),
            self.constant(f"{name}.weight_scale", scales if len(scales) > 1 else scales[0]),
            self.constant(
                f"{name}.weight_zero", np.zeros(scales.shape if len(scales) > 1 else (), np.int8)
            ),
            **({"axis": 0} if len(scales) > 1 else {}),
        )
        bias = self.node(
            "DequantizeLinear",
            self.constant(f"{name}.bias_quantized", self.random.integers(-9999, 9999, f, np.int32)),
            self.constant(
                f"{name}.bias_scale",
                np.broadcast_to(scales, f) * np.float32(self.scales.get(x, 0.02)),
            ),
            axis=0,
        )
        return self.node(op, x, weights, bias, **more)

    def save(self, path: Path, last: str, shape: tuple[Any, ...] = ("n", 3, 17, 16)) -> Path:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        y = onnx.ValueInfoProto(name=last)
        graph = helper.make_graph(self.nodes, "net", [x], [y], self.held)
        opset = [helper.make_opsetid("", self.opset)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
        return path


def network(path: Path, activations: str) -> tuple[Path, File]:
    """Writes a small ResNet: a stem, a pool, a block, a depthwise layer and a classifier."""
    file = File(activations)
    x = file.rounded("x", 0.0307, 127)
    x = file.rounded(file.layer("Conv", x, "stem", (16, 3, 3, 3), pads=[1] * 4), 0.0203, 0)
    x = file.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = file.rounded(x, 0.0203, 0)
    file.scales[x] = 0.0203
    y = file.rounded(file.layer("Conv", x, "a", (24, 16, 3, 3), pads=[1] * 4), 0.0101, 0)
    y = file.rounded(file.layer("Conv", y, "b", (16, 24, 1, 1), per_tensor=True), 0.0157, 121)
    x = file.rounded(file.node("Add", y, x), 0.0203, 0)
    x = file.layer("Conv", x, "depthwise", (16, 1, 3, 3), group=16, pads=[1] * 4)
    x = file.rounded(x, 0.0211, 90)
    x = file.rounded(file.node("GlobalAveragePool", x), 0.0053, 99)
    x = file.rounded(file.node("Flatten", x), 0.0053, 99)
    x = file.rounded(file.layer("Gemm", x, "head", (5, 16), transB=1), 0.004, 101)
    return file.save(path, x), file


def traced(path: Path) -> Traced:
    found = read(path).trace()
    assert found.program is not None, missing_error("the file", found.missing)
    return found


def test_a_quantised_file_means_the_same_in_integers(tmp_path: Path) -> None:
    """In float64 too: a logit differs by a step at most, and few do."""
    path, _ = network(tmp_path / "net.onnx", "uint8")
    converted = convert(path, device="cpu")
    assert converted.report.within
    assert converted.report.coverage.kernels["quantized_conv2d"] == 3  # all but the stem
    assert converted.report.coverage.kernels["quantized_linear"] == 1
    images = np.random.default_rng(1).standard_normal((32, 3, 17, 16)).astype(np.float32)
    exact = OnnxReference(read(path).module, ["logits"], {})([images], [], "float64")["logits"]
    apart = np.abs(converted(images) - exact) / 0.004
    assert apart.max() <= 1 + 1e-3 and (apart < 1e-3).mean() > 0.98
    assert len(np.unique(exact)) > 30


def test_signed_activations_are_unsigned_ones_with_another_zero_point(tmp_path: Path) -> None:
    unsigned, signed = (
        traced(network(tmp_path / f"{name}.onnx", name)[0]) for name in ("uint8", "int8")
    )
    assert unsigned.program and signed.program
    assert [n.attributes for n in unsigned.program.nodes] == [
        n.attributes for n in signed.program.nodes
    ]


def test_all_between_the_layers_is_bytes(tmp_path: Path) -> None:
    found = traced(network(tmp_path / "net.onnx", "uint8")[0])
    assert found.program is not None
    final = passes.run(found.program.keep(found.outputs), ON)
    made = [(n.op, final.types[n.output].dtype) for n in final.nodes if not n.at_load]
    moves = ("permute", "reshape")
    assert [each for each in made if each[0] not in moves] == [
        ("fake_quantize", "float32"), ("conv2d", "float32"), ("pointwise", "uint8"),
        ("max_pool2d", "uint8"), ("quantized_conv2d", "uint8"),
        ("quantized_conv2d", "uint8"),  # with the sum
        ("quantized_conv2d", "uint8"), ("pointwise", "float32"), ("avg_pool2d", "float32"),
        ("pointwise", "uint8"), ("quantized_linear", "uint8"), ("pointwise", "float32"),
    ]  # fmt: skip
    images = np.random.default_rng(1).standard_normal((2, 3, 17, 16)).astype(np.float32)
    before, after = (
        interpret(each, [images], found.tensors)["logits"] for each in (found.program, final)
    )
    np.testing.assert_allclose(after, before, 1e-9, 1e-9)


def test_integers_of_weights_stay(tmp_path: Path) -> None:
    path, file = network(tmp_path / "net.onnx", "uint8")
    found = traced(path)
    assert found.program is not None and not found.notes
    final = passes.run(found.program.keep(found.outputs), ON)
    constants = Constants(final, found.tensors)
    met = {}
    for node in final.nodes:
        if node.op.startswith("quantized"):
            weights, steps = (constants[node.inputs[i]] for i in (1, 4))
            met[node.layers[0]] = quantized_filter(weights, steps)
    assert {*met} == {"a", "b", "depthwise", "head"}
    for layer, whole in met.items():
        np.testing.assert_array_equal(whole, file.integers[layer])


def test_a_batch_norm_behind_integers_scales_what_they_stand_for(tmp_path: Path) -> None:
    """Factors of a norm may be negative, or 0."""
    file = File()
    y = file.layer("Conv", file.rounded("x", 0.03, 127), "conv", (16, 4, 3, 3))
    factors = np.array([1, -1, 0, 2] * 4, np.float32)
    ones = np.ones(16, np.float32)
    given = [factors, 0.1 * factors, 0 * ones, ones]
    y = file.node(
        "BatchNormalization", y, *(file.constant(f"n{i}", v) for i, v in enumerate(given))
    )
    path = file.save(tmp_path / "norm.onnx", file.rounded(y, 0.02, 128), ("n", 4, 8, 8))
    found = traced(path)
    assert found.program is not None
    final = passes.run(found.program, ON)
    assert "quantized_conv2d" in [node.op for node in final.nodes]
    images = np.random.default_rng(1).standard_normal((2, 4, 8, 8)).astype(np.float32)
    before, after = (interpret(each, [images], found.tensors) for each in (found.program, final))
    for name in before:
        np.testing.assert_allclose(after[name], before[name], 1e-9, 1e-9)


def weights(file: File, x: str, scale: Any, zero: Any, **attributes: Any) -> str:
    """Multiplies by 8 x 8 weights of integers with these numbers."""
    kind = np.asarray(zero).dtype
    whole = file.random.integers(-100 if kind == np.int8 else 0, 100, (8, 8)).astype(kind)
    given = [file.constant("w", whole), file.constant("ws", scale), file.constant("wz", zero)]
    return file.node("MatMul", x, file.node("DequantizeLinear", *given, **attributes))


@pytest.mark.parametrize(
    ("zero", "scale", "attributes", "note"),
    [
        (np.int8(0), np.float32(0.01), {}, ""),
        (np.uint8(0), np.float32(0.01), {}, ""),  # 0 to 99 are int8 as well
        (np.int8(-90), np.float32(0.01), {}, "its weights have a zero point"),
        (
            np.zeros(8, np.int8), np.linspace(0.01, 0.02, 8, dtype=np.float32), {"axis": 0},
            "its weights have other scales than one for each filter",
        ),
    ],
    ids=["int8", "uint8", "zero point", "by input"],
)  # fmt: skip
def test_weights_that_are_no_int8_stay_floats(
    zero: Any, scale: Any, attributes: dict[str, Any], note: str, tmp_path: Path
) -> None:
    file = File()
    y = weights(file, file.rounded("x", 0.03, 127), scale, zero, **attributes)
    path = file.save(tmp_path / "net.onnx", y, ("n", 8))
    found = traced(path)
    assert found.program is not None
    assert [each.partition(" runs in floats: ")[2] for each in found.notes] == [note] * bool(note)
    final = passes.run(found.program, ON)
    assert ("quantized_linear" in [node.op for node in final.nodes]) is not bool(note)
    rows = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    want = OnnxReference(read(path).module, found.outputs, {})([rows], [], "float64")
    (name,) = found.outputs
    got = interpret(final, [rows], found.tensors)[name]
    np.testing.assert_allclose(got, want[name], 1e-5, 1e-6)


def by_channel(file: File) -> str:
    zeros, scales = file.constant("z", np.zeros(8, np.uint8)), file.constant("s", np.ones(8, "f"))
    return file.node("QuantizeLinear", "x", scales, zeros, axis=1)


def other_levels(file: File) -> str:
    one, two = (file.constant(name, np.float32(n)) for name, n in (("one", 1), ("two", 2)))
    return file.node("DequantizeLinear", file.node("QuantizeLinear", "x", one), two)


def sum_of_integers(file: File) -> str:
    q = file.node("QuantizeLinear", "x", file.constant("one", np.float32(1)))
    return file.node("Add", q, q)


def fp8(file: File) -> str:
    zero = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0])
    file.held.append(zero)
    return file.node("QuantizeLinear", "x", file.constant("one", np.float32(1)), "z")


def operators(file: File) -> str:
    given = [file.constant("one", np.float32(1)), file.constant("zero", np.uint8(0))]
    q = file.node("QuantizeLinear", "x", *given)
    weights = file.constant("w", np.ones((8, 8), np.uint8))
    return file.node("QLinearMatMul", q, *given, weights, *given, *given)


def dynamic(file: File) -> str:
    return file.node("DynamicQuantizeLinear", "x")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (by_channel, "activations with more than one scale; quantise them per tensor"),
        (other_levels, "another scale or zero point than QuantizeLinear has"),
        (sum_of_integers, "it computes with the integers of QuantizeLinear"),
        (fp8, "activations in float8_e4m3fn; quantise them to uint8 or int8"),
        (operators, r"QLinearMatMul \(there is no such op here; quantise the model statically"),
        (dynamic, "quantise the model statically, with QuantizeLinear and DequantizeLinear"),
    ],
)
def test_what_is_not_taken_is_told(
    make: Callable[[File], str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = File(opset=21)
    path = file.save(tmp_path / "net.onnx", make(file), ("n", 8))
    assert main([str(path), "--dry-run"]) == 2
    assert re.search(told, " ".join(capsys.readouterr().err.split()))


def test_what_onnxruntime_quantises(tmp_path: Path) -> None:
    """Its own tool, where it is installed: pip install '.[peers]'."""
    runtime = pytest.importorskip("onnxruntime", reason="pip install '.[peers]'")
    quantization = pytest.importorskip("onnxruntime.quantization")
    file = File()
    shapes = {"stem": (16, 3, 3, 3), "conv": (16, 16, 3, 3), "head": (5, 16)}
    named = {
        name: file.constant(f"{name}.weight", 0.2 * file.random.standard_normal(s).astype("f"))
        for name, s in shapes.items()
    }
    x = file.node("Relu", file.node("Conv", "x", named["stem"], pads=[1] * 4))
    x = file.node("Relu", file.node("Add", file.node("Conv", x, named["conv"], pads=[1] * 4), x))
    x = file.node("Flatten", file.node("GlobalAveragePool", x))
    plain = file.save(tmp_path / "plain.onnx", file.node("Gemm", x, named["head"], transB=1))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            random = np.random.default_rng(0)
            self.left = [random.standard_normal((4, 3, 17, 16)).astype("f") for _ in range(2)]

        def get_next(self) -> Any:
            return {"x": self.left.pop()} if self.left else None

    images = np.random.default_rng(1).standard_normal((8, 3, 17, 16)).astype(np.float32)
    for kind in (quantization.QuantType.QUInt8, quantization.QuantType.QInt8):
        path = tmp_path / f"{kind}.onnx"
        quantization.quantize_static(
            plain, path, Reader(), per_channel=True, activation_type=kind,
            quant_format=quantization.QuantFormat.QDQ,
        )  # fmt: skip
        found = traced(path)
        assert found.program is not None and not found.notes
        final = passes.run(found.program.keep(found.outputs), ON)
        assert sum(node.op.startswith("quantized") for node in final.nodes) == 2
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        want = session.run(None, {"x": images})[0]
        got = interpret(final, [images], found.tensors)["logits"]
        levels = np.unique(np.abs(want[want != 0]))
        assert np.abs(got - want).max() <= 1.001 * np.diff(levels, prepend=0).max()
