"""ONNX files: read, converted and run without torch; each mistake gets a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX files are read by the package onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from maxvision.bridge import onnx_file  # noqa: E402
from maxvision.bridge.convert import convert, find, translated  # noqa: E402
from maxvision.bridge.onnx_file import read  # noqa: E402
from maxvision.commands.convert import main  # noqa: E402
from maxvision.common.errors import ArgumentError, ModelError  # noqa: E402
from maxvision.runtime.classifier import load  # noqa: E402
from maxvision.weights import checkpoint  # noqa: E402
from maxvision.weights.family import MEAN, STD  # noqa: E402

SIZE = 12


def network(batch: Any = "n", size: Any = SIZE, *, probabilities: bool = False) -> Any:
    """Makes a small classifier whose nodes are named as torch's exporter names them."""
    random = np.random.default_rng(0)

    def held(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)

    def node(op: str, name: str, inputs: list[str], output: str, **more: Any) -> Any:
        return helper.make_node(op, inputs, [output], name=f"{name}/{op}", **more)

    weights = [
        held("stem.weight", 4, 3, 3, 3), held("stem.bias", 4), held("onnx::MatMul_7", 4, 6),
        held("layers.0.fc.bias", 6), held("head.weight", 5, 6), held("head.bias", 5),
    ]  # fmt: skip
    nodes = [
        node("Conv", "/stem", ["x", "stem.weight", "stem.bias"], "a", pads=[1, 1, 1, 1]),
        node("Relu", "/act", ["a"], "b"),
        node("GlobalAveragePool", "/pool", ["b"], "c"),
        node("Flatten", "/flatten", ["c"], "d"),
        node("MatMul", "/layers.0/fc", ["d", "onnx::MatMul_7"], "e"),
        node("Add", "/layers.0/fc", ["e", "layers.0.fc.bias"], "f"),
        node("Gemm", "/head", ["f", "head.weight", "head.bias"], "logits", transB=1),
    ]
    last = "logits"
    if probabilities:
        nodes.append(node("Softmax", "/softmax", ["logits"], "p"))
        last = "p"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, size, size])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, [batch, 5])
    return model(helper.make_graph(nodes, "net", [x], [y], weights))


def model(graph: Any, opset: int = 17) -> Any:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def graph(nodes: list[Any], shape: list[Any], held: Any = ()) -> Any:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    return helper.make_graph(nodes, "net", [x], [onnx.ValueInfoProto(name="y")], list(held))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(network(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_weights_keep_their_names_and_layers_have_those_of_modules(path: Path) -> None:
    found = read(path).trace()
    assert found.program is not None
    assert set(found.tensors) == {
        "stem.weight", "stem.bias", "layers.0.fc.weight", "layers.0.fc.bias", "head.weight",
        "head.bias",
    }  # fmt: skip
    layers = [layer for node in found.program.nodes for layer in node.layers]
    assert layers == ["stem", "layers.0.fc", "head"]
    assert found.points["layers.0"] == found.points["layers.0.fc"]
    assert found.outputs == ["logits"]


def test_of_a_softmax_at_the_end_the_logits_are_known_too(tmp_path: Path) -> None:
    onnx.save(network(probabilities=True), tmp_path / "net.onnx")
    found = translated(read(tmp_path / "net.onnx"))
    assert found.program is not None
    assert list(found.program.outputs) == ["logits", "probabilities", "features"]
    assert found.outputs == ["probabilities"]


@pytest.mark.parametrize("batch", ["n", 1])
def test_the_reference_computes_outputs_and_stages(batch: Any, tmp_path: Path) -> None:
    onnx.save(network(batch), tmp_path / "net.onnx")
    found = read(tmp_path / "net.onnx")
    traced = found.trace()
    assert traced.reference is not None
    made = traced.reference(found.example, ["stem"])
    exact = traced.reference(found.example, ["stem"], "float64")
    assert made["at stem"].shape == (2, 4, SIZE, SIZE) and made["logits"].shape == (2, 5)
    for name, want in exact.items():
        assert want.dtype == np.float64 and made[name].dtype == np.float32
        np.testing.assert_allclose(made[name], want, 1e-5, 1e-5)
        assert not np.array_equal(made[name], want)


@pytest.mark.parametrize("batch", ["n", 1], ids=["any batch", "one image"])
def test_a_file_is_converted_saved_loaded_and_run(
    batch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = network(batch, probabilities=True)
    onnx.save(whole, tmp_path / "net.onnx")
    labels = tmp_path / "labels.txt"
    labels.write_text("ant\nbee\ncat\ndog\nemu\n")
    folder = tmp_path / "net"
    arguments = [str(tmp_path / "net.onnx"), "-o", str(folder), "--no-check"]
    assert main([*arguments, "--labels", str(labels)]) == 0
    assert "ImageNet's mean and deviation" in capsys.readouterr().out
    held = checkpoint.load(folder)
    assert held.labels == ["ant", "bee", "cat", "dog", "emu"] and held.size == (SIZE, SIZE)
    if batch == 1:  # its program is the same: no need to compile it again
        onnx.save(network("n", probabilities=True), tmp_path / "any.onnx")
        assert (
            translated(read(tmp_path / "any.onnx")).program.to_json().replace('"any"', '"net"')
            == (folder / "program.json").read_text()
        )
        return
    classifier = load(folder, device="cpu")
    levels = np.random.default_rng(1).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
    x = ((levels / 255 - MEAN) / STD).astype(np.float32)
    (wanted,) = ReferenceEvaluator(whole).run(None, {"x": x.transpose(0, 3, 1, 2)})
    logits = classifier(levels)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(odds / odds.sum(1, keepdims=True), wanted, 1e-5, 1e-6)


def test_torch_is_not_needed(path: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # its import fails
import maxvision
from maxvision.commands.convert import main
assert main([{str(path)!r}, "-o", {str(tmp_path / "made")!r}, "--no-check"]) == 0
from maxvision.weights import checkpoint
from maxvision.bridge.convert import find
find({str(path)!r}).trace().reference(find({str(path)!r}).example, ["stem"], "float64")
try:
    maxvision.convert({str(tmp_path / "none.onnx")!r})
except maxvision.ModelError as error:
    assert "no such file" in str(error)
print(checkpoint.load({str(tmp_path / "made")!r}).labels)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "class 4" in done.stdout


# --- mistakes ------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.onnx: there is no such file"):
        read(tmp_path / "none.onnx")


@pytest.mark.parametrize("content", [b"", b"hello, world", bytes(range(256)), b"\x08\x07"])
def test_a_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"bad\.onnx: this is not an ONNX file"):
        find(tmp_path / "bad.onnx")


def test_an_old_opset(tmp_path: Path) -> None:
    onnx.save(
        model(graph([helper.make_node("Relu", ["x"], ["y"])], ["n", 3]), 9), tmp_path / "o.onnx"
    )
    with pytest.raises(ModelError, match=r"opset 9, and 13 or later is needed; .*convert_version"):
        read(tmp_path / "o.onnx")


def test_weights_that_are_elsewhere(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    onnx.save(network(), target, save_as_external_data=True, location="net.data", size_threshold=0)
    assert translated(read(target)).program
    (tmp_path / "net.data").unlink()
    with pytest.raises(ModelError, match=r"its weights are in net\.data, which is not beside it"):
        read(target)


def test_all_operators_that_are_unknown_are_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("TopK", ["x", "k"], ["a", "i"], name="/top/TopK"),
        helper.make_node("NonZero", ["a"], ["b"], name="/found/NonZero"),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("FusedThing", ["c"], ["d"], domain="com.example"),
        helper.make_node("NonZero", ["d"], ["y"]),
    ]
    held = [numpy_helper.from_array(np.array([1]), "k")]
    onnx.save(model(graph(nodes, ["n", 3], held)), tmp_path / "odd.onnx")
    with pytest.raises(ModelError) as error:
        translated(read(tmp_path / "odd.onnx"))
    told = str(error.value)
    assert "TopK (there is no such op here), 1 times, first at /top/TopK" in told
    assert "NonZero (there is no such op here), 2 times, first at /found/NonZero" in told
    assert "com.example.FusedThing" in told and "Relu" not in told


def test_a_size_that_is_open(tmp_path: Path) -> None:
    onnx.save(network(size="side"), tmp_path / "net.onnx")
    with pytest.raises(ArgumentError, match=r"\[n, 3, side, side\] leaves its size open; give it"):
        read(tmp_path / "net.onnx")
    assert read(tmp_path / "net.onnx", 16).example[0].shape == (2, 3, 16, 16)


def test_a_size_that_is_not_the_files(path: Path) -> None:
    with pytest.raises(ArgumentError, match="it takes 12 x 12 px and no others; leave --size out"):
        read(path, 16)


def test_an_open_size_of_no_picture(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    onnx.save(model(graph(nodes, ["n", "length"])), tmp_path / "line.onnx")
    with pytest.raises(ArgumentError, match="export the file with known sizes"):
        read(tmp_path / "line.onnx")


def test_a_fixed_batch(tmp_path: Path) -> None:
    onnx.save(network(8), tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="its batch is fixed at 8; export it with a dynamic"):
        read(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gather", ["x", "zero"], ["y"], axis=0),
        helper.make_node("Squeeze", ["x", "axes"], ["y"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["y"]),
        helper.make_node("Concat", ["x", "x"], ["y"], axis=0),
    ],
    ids=lambda node: node.op_type,
)
def test_operators_that_mix_images(node: Any, tmp_path: Path) -> None:
    held = [
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.array([0]), "axes"),
    ]
    onnx.save(model(graph([node], [1, 3, 4], held)), tmp_path / "one.onnx")
    with pytest.raises(ModelError, match=f"one cannot be converted: {node.op_type} .*batch"):
        translated(read(tmp_path / "one.onnx"))


def test_random_weights_of_a_file(path: Path) -> None:
    with pytest.raises(ArgumentError, match="an ONNX file has its own weights"):
        find(path, random=True)


def test_what_classifies_nothing_says_so_when_it_is_loaded(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    onnx.save(model(graph(nodes, ["n", 3, 4, 4])), tmp_path / "relu.onnx")
    assert main([str(tmp_path / "relu.onnx"), "-o", str(tmp_path / "relu"), "--no-check"]) == 0
    with pytest.raises(ModelError, match="this model does not classify pictures"):
        checkpoint.load(tmp_path / "relu")


def test_a_module_without_example_inputs() -> None:
    with pytest.raises(ArgumentError, match="a torch module needs example inputs"):
        convert(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("/layer1/layer1.0/conv1/Conv", ["layer1", "layer1.0", "layer1.0.conv1"]),
        ("/Add_1", []),
        ("Conv_7", []),
        ("/blocks/blocks.0/blocks.0.1/Relu", ["blocks", "blocks.0", "blocks.0.1"]),
    ],
)
def test_the_modules_in_the_name_of_a_node(name: str, paths: list[str]) -> None:
    assert onnx_file._paths(name) == paths
