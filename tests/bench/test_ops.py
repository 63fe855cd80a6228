"""Layers of a small CvT on a CPU: checked, timed beside torch, and a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.bench import ops
from maxvision.bench.__main__ import main
from maxvision.bench.ceilings import Ceilings
from maxvision.bench.layers import Layer, Operand, distinct, listed, network_nodes, sizes
from maxvision.bench.references import checkpoint, reference_model
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.shapes import infer
from maxvision.graphs.types import Type
from maxvision.runtime.classifier import network
from tests.graphs import reference
from tests.graphs.interpret import OPS

ROWS, MOMENTS = ("batch", 5, 64), ("batch", 5, 2, 2)
HOPPER = Backend("cuda", "bfloat16", architecture="sm_90a")
UNCOUNTED = ("normalize", "layer_norm", "layernorm_first", "class_token")  # no products in them
CVT = {
    "num_channels": 3, "embed_dim": [32], "num_heads": [2], "depth": [1], "patch_sizes": [7],
    "patch_stride": [4], "patch_padding": [2], "cls_token": [True], "mlp_ratio": [2.0],
    "attention_drop_rate": [0.0], "drop_rate": [0.0], "drop_path_rate": [0.0], "qkv_bias": [True],
    "qkv_projection_method": ["dw_bn"], "kernel_qkv": [3], "padding_kv": [1], "stride_kv": [2],
    "padding_q": [1], "stride_q": [1],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """Measures every layer; the head's product is compared with another one's answer."""
    folder = tmp_path_factory.mktemp("ops")
    preprocess = {**reference.PREPROCESS, "size": {"shortest_edge": 32}, "crop_pct": 1.0}
    model = reference.save(reference.cvt(**CVT, num_labels=6), folder / "small", preprocess)
    path = folder / "layers.json"

    def linear(layer: Any, x: Any, w: Any, whole: bool) -> torch.Tensor:
        y = ops._linear(layer, x, w, whole)
        return y + 1 if layer.title() == "32-6" else y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "ceilings", lambda *_: Ceilings(1e11, 1e10))
        patch.setitem(ops.OPERATORS, "linear", ops.Operator("linear", linear))
        arguments = ["--device", "cpu", "--models", model, "--batches", "3", "--seconds", "0.01"]
        code = main(["ops", *arguments, "--json", str(path)])
    return code, path.read_text()


@pytest.mark.nightly
def test_every_layer_is_right_and_timed(run: tuple[int, str]) -> None:
    code, text = run
    records = json.loads(text)["records"]
    assert sum(r["count"] for r in records) == len({name for r in records for name in r["names"]})
    assert {r["op"] for r in records} == {
        "normalize", "conv2d", "layer_norm", "class_token", "linear", "attention",
        "layernorm_first", "depthwise_qkv", "qkv_linear",
    }  # fmt: skip
    for r in records:
        assert r["passed"] == (r["names"] != ["head"]), r
        assert r["us"] > 0 and r["peer_us"] > 0
        assert r["of_peer"] == pytest.approx(r["us"] / r["peer_us"], rel=0.01)
        assert r["share_of_roofline"] == pytest.approx(r["floor_us"] / r["us"], rel=0.01)
        assert r["tflops_per_s"] > 0 or r["op"] in UNCOUNTED
    assert code == 1  # as the head was made wrong


@pytest.mark.nightly
def test_the_products_are_counted_by_hand(run: tuple[int, str]) -> None:
    by_name = {name: r for r in json.loads(run[1])["records"] for name in r["names"]}
    embed = by_name["stages.0.embed"]  # 32 px in strides of 4: 8 x 8
    flops = 2 * 3 * 64 * 49 * 3 * 32
    assert embed["tflops_per_s"] == pytest.approx(flops / embed["us"] / 1e6, rel=0.01)
    attention = by_name["stages.0.0.attention"]  # 65 queries, 17 keys
    flops = 4 * 3 * 65 * 17 * 32
    assert attention["tflops_per_s"] == pytest.approx(flops / attention["us"] / 1e6, rel=0.01)
    norm = by_name["stages.0.0.norm2"]
    moved = 4 * (2 * 3 * 65 * 32 + 64)
    assert norm["gb_per_s"] == pytest.approx(moved / norm["us"] / 1e3, rel=0.01)
    assert norm["bound"] == "memory"


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50", "cvt-13"])
def test_torch_has_every_layer_of_a_gpu(name: str) -> None:
    """The fused ops too, which a CPU does not run: torch's results have the shapes of ours."""
    model = checkpoint(name, reference_model(name))
    found = distinct(network_nodes(model, DeviceRef.GPU(), DType.bfloat16, (224, 224)))
    found |= distinct(
        listed(passes.run(network(model, (224, 224), "bfloat16"), HOPPER), "bfloat16")
    )
    rng = np.random.default_rng(0)
    for layer in found:
        operator = ops.OPERATORS[layer.op]
        weights = {k: ops._weight(a, "cpu", torch.float32) for k, a in layer.weights(rng).items()}
        values = [x.float() for x in ops._values(layer, 1, "cpu", seed=0)]
        values = operator.prepare(layer, values, weights, torch.float32)
        with torch.inference_mode():
            results = operator.run(layer, values, weights, True)
            operator.run(layer, values, weights, False)
        results = results if isinstance(results, tuple) else (results,)
        assert [tuple(y.shape) for y in results] == [sizes(y, 1) for y in layer.outputs], layer.op
    fused = {
        "resnet-18": {"conv2d_shortcut"},
        "resnet-50": {
            "conv2d_chain",
            "conv2d_shortcut_chain",
            "stem_maxpool_conv2d",
            "conv2d_mean",
        },
        "cvt-13": {
            "attention_linear",
            "linear_moments",
            "normed_linear",
            "layernorm_mlp",
            "qkv_linear",
            "layernorm_first",
        },
    }
    assert fused[name] <= {layer.op for layer in found}


NORMS = {  # their layers' inputs, whether each is a weight, and their settings
    "row_moments": ([(ROWS, False)], {}),
    "linear_moments": (
        [(ROWS, False), ((64, 64), True), ((64,), True), (ROWS, False)], {},
    ),
    "attention_linear": (
        [*[(ROWS, False)] * 3, ((64, 64), True), ((64,), True), (ROWS, False)],
        {"heads": 4, "scale": 0.3},
    ),
    "normed_linear": (
        [(ROWS, False), (MOMENTS, False), ((24, 64), True), ((24,), True)],
        {"epilogue": "gelu", "eps": 1e-3},
    ),
    "layernorm_mlp": (
        [(ROWS, False), (MOMENTS, False), ((24, 64), True), ((24,), True), ((64, 24), True),
         ((64,), True)], {"eps": 1e-3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", NORMS)
def test_torch_norms_between_layers(op: str) -> None:
    """By what is given as moments a program computes the same as torch's norm."""
    shapes, settings = NORMS[op]
    inputs = [
        Operand(Type(shape, "float32" if weight or shape == MOMENTS else "bfloat16"), weight)
        for shape, weight in shapes
    ]
    outputs = infer(op, [each.type for each in inputs], settings)
    layer = Layer(op, (*settings.items(),), (*inputs,), (*outputs,), "bfloat16")
    drawn = layer.weights(np.random.default_rng(0))
    weights = {k: torch.from_numpy(a).double() for k, a in drawn.items()}
    values = [x.double() for x in ops._values(layer, 2, "cpu", seed=0)]
    found = ops.OPERATORS[op].run(layer, values, weights, True)
    given = iter(values)
    every = [weights[i] if each.is_weight else next(given) for i, each in enumerate(inputs)]
    wanted = OPS[op](*every, **settings)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    alone = ops.OPERATORS[op].run(layer, values, weights, False)
    assert op == "row_moments" or alone.shape == (2, 5, outputs[0].shape[-1])


def test_torch_squeezes_and_excites() -> None:
    """No network of the bench has it; its results are compared with what programs mean."""
    rng, image = np.random.default_rng(0), Type(("batch", 4, 5, 16), "bfloat16")
    inputs: list[Operand] = [Operand(image, False)]
    inputs += [Operand(Type(shape), True) for shape in ((3, 16, 1, 1), (3,), (16, 3, 1, 1), (16,))]
    settings = {"activation": "silu", "gate": "hardsigmoid", "epilogue": "add_relu"}
    layer = Layer("squeeze_excite", (*settings.items(),), (*inputs, inputs[0]), (image,))
    weights = {k: torch.from_numpy(a).double() for k, a in layer.weights(rng).items()}
    x, residual = (torch.from_numpy(rng.standard_normal((2, 4, 5, 16))) for _ in range(2))
    found = ops.OPERATORS[layer.op].run(layer, [x, residual], weights, True)
    wanted = OPS["squeeze_excite"](x, *(weights[i] for i in range(1, 5)), residual, **settings)
    torch.testing.assert_close(found, wanted)
    assert layer.flops(2) == 2 * 2 * 2 * 3 * 16


def test_layers_that_were_not_compiled_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--models", "resnet-18", "--device", "cpu", "--precompiled", str(tmp_path)]
    assert main(["ops", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --precompiled")
    assert said.endswith("make it with maxvision bench compile --layers\n")
