"""A graph's nodes get their names, and recorded launches find their nodes in any order."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.bench.attribution import OURS, Recorded, attribute, symbols
from maxvision.bench.layers import Named, distinct, layer_module, listed, network_nodes
from maxvision.bench.references import checkpoint, reference_model
from maxvision.graphs import passes
from maxvision.graphs.layers import layers as described
from maxvision.graphs.layers import macs
from maxvision.graphs.net import Net, Value
from maxvision.graphs.program import Program
from maxvision.graphs.quantize import KINDS
from maxvision.graphs.types import FLOAT8
from maxvision.runtime.classifier import network as whole
from tests.graphs import nets
from tests.graphs.test_quantize import HOPPER, bottlenecks, calibrated
from tests.ops.cases import EPILOGUES

OTHERS = {
    "max_pool2d": "pool_max_8", "avg_pool2d": "pool_mean_8",
    "class_token": "class_token_layernorm_16x3",
    "conv2d_shortcut_chain": "conv2d_chain_hopper_128x64and64x64x8",
}  # fmt: skip
"""Ops whose kernels are called otherwise."""


PLACES = {"cpu": DeviceRef.CPU(), "gpu": DeviceRef.GPU()}  # to build a graph takes no device


@pytest.fixture(
    scope="module",
    params=[
        "resnet-18 cpu",
        "resnet-50 gpu",
        "resnet-50 hopper",
        "cvt-13 cpu",
        "cvt-13 gpu",
        "cvt-13 hopper",
    ],
)
def network(request: pytest.FixtureRequest) -> tuple[Any, list[Named]]:
    name, _, place = request.param.partition(" ")
    model = checkpoint(name, reference_model(name))
    if place == "hopper":
        return model, on_hopper(whole(model, (224, 224), "bfloat16"))
    return model, network_nodes(model, PLACES[place], DType.float32, (224, 224))


def on_hopper(program: Program) -> list[Named]:
    """Lists the ops of a program in bfloat16 as they are lowered for a Hopper that is not here."""
    return listed(passes.run(program, replace(HOPPER, dtype="bfloat16")), "bfloat16")


def test_names_are_those_of_the_weights(network: tuple[Any, list[Named]]) -> None:
    model, nodes = network
    names = Counter(node.name for node in nodes)
    assert max(names.values()) == 1
    mlps = {name.removesuffix("layernorm_mlp") for name in names if name.endswith("_mlp")}
    parts = {f"{block}{part}" for block in mlps for part in ("norm2", "mlp.fc1", "mlp.fc2")}
    heads = {name.removesuffix("depthwise_qkv") for name in names if name.endswith("_qkv")}
    convs = [f"attention.{part}.conv" for part in ("query", "key", "value")]
    parts |= {f"{block}{part}" for block in heads for part in ("norm1", *convs)}
    parts |= {part for name in names for part in name.split(" + ")}
    parts |= {f"{node.name}.norm" for node in nodes if node.layer.op == "stem_layernorm"}
    together = {node.name for node in nodes if node.name.endswith(("_shortcut", "_linear"))}
    for weight in model.tensors:
        name = weight if weight.endswith("cls_token") else weight.rpartition(".")[0]
        name = name.removesuffix(".batchnorm")
        block = name.rpartition(".")[0]
        assert name in parts or any(each.startswith(block) for each in together), weight


def test_layers_add_up_to_the_network(network: tuple[Any, list[Named]]) -> None:
    model, nodes = network
    layers = distinct(nodes)
    assert sum(map(len, layers.values())) == len(nodes)
    total = sum(layer.flops(3) * len(names) for layer, names in layers.items())
    assert total == 2 * 3 * macs(model.program((224, 224)))


def symbol(node: Named) -> str:
    op, epilogue = node.layer.op.replace("layer_norm", "layernorm"), node.layer.epilogue
    if op in OTHERS:
        return f"{OTHERS[op]}_bfloat16_17266de5"
    fused = {
        "conv2d_shortcut": "relu_1x2", "qkv_linear": "none_3x1",
        "conv2d_mean": f"{epilogue}_mean",
        "linear_moments": "add_moments_1x1", "normed_linear": f"norm_{epilogue}_1x1",
    }  # fmt: skip
    if op in ("conv2d", "linear", *fused):
        kind = fused.get(op, f"{epilogue}_1x1")
        return f"gemm_hopper_128x64x4_{kind}_bfloat16_17266de5"
    return f"{op.removesuffix('_first')}_bfloat16_17266de5"


def recorded(node: Named, fused: bool = True) -> list[Recorded]:
    """What a node launches: one kernel, or several where the fused one is not to be had."""
    apart = {
        "conv2d_chain": ["gemm_cores_add_relu", "gemm_cores_relu"],
        "conv2d_shortcut_chain": ["gemm_cores_none", "gemm_cores_add_relu", "gemm_cores_relu"],
        "conv2d_shortcut": ["gemm_cores_none", "gemm_cores_add_relu"],
        "stem_maxpool_conv2d": ["stem_maxpool_hopper", "gemm_hopper_128x64x4_relu_1x1"],
        "layernorm_mlp": ["gemm_resident_64x64_norm_gelu", "gemm_resident_64x64_add"],
        "attention_linear": ["attention_flash_64_1x4", "gemm_resident_64x32_add_moments"],
        "qkv_linear": ["gemm_cores_none"] * 3,
        "conv2d_mean": [f"gemm_cores_{node.layer.epilogue}", "reduce_sum_8x8_1_x0"],
    }
    shape = node.layer.outputs[0].shape
    if fused or node.layer.op not in apart:
        return [Recorded(symbol(node), shape)]
    kernels = apart[node.layer.op]
    return [Recorded(f"{kernel}_bfloat16_17266de5", shape) for kernel in kernels]


def shuffled(nodes: list[Named], seed: int) -> list[int]:
    """An order in which a node comes after those that it reads from, and no other rule holds."""
    rng, left, order = random.Random(seed), set(range(len(nodes))), []
    while left:
        ready = [i for i in sorted(left) if nodes[i].after.isdisjoint(left)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_launches_find_their_nodes(
    network: tuple[Any, list[Named]], seed: int, fused: bool
) -> None:
    _, nodes = network
    order = [(i, each) for i in shuffled(nodes, seed) for each in recorded(nodes[i], fused)]
    order.insert(0, (-1, Recorded("Memcpy DtoD (Device -> Device)", ())))
    names = attribute([each for _, each in order], nodes)
    assert names is not None and names.pop(0) == ""
    # Nodes that cannot be told apart, such as key and value, may change places.
    layers = {node.name: node.layer for node in nodes}
    assert [layers[name] for name in names] == [nodes[i].layer for i, _ in order[1:]]
    assert set(names) == set(layers)


@pytest.mark.parametrize(
    ("symbol", "epilogue"),
    [
        ("gemm_hopper_64x32x8split_none_1x1_bfloat16_44630a41", "none"),
        ("gemm_hopper_128x128x6overlap_add_relu_1x1_float32_2d37c457", "add_relu"),
        ("gemm_resident_64x32split_add_relu_bfloat16_44630a41", "add_relu"),
        ("gemm_turned_64x232_add_relu_bfloat16_44630a41", "add_relu"),
        ("gemm_resident_64x32_add_relu_mean_bfloat16_44630a41", ""),
        ("gemm_mma_128x64x3_relu_float16_2d37c457", "relu"),
        ("gemm_cores_gelu_bfloat16_2d37c457", "gelu"),
        ("gemm_gemv_none_bfloat16_45d8ff14", "none"),
        ("depthwise_3x3_1x4_add_bfloat16_2d37c457", "add"),
    ],
)
def test_a_symbol_tells_the_epilogue(symbol: str, epilogue: str) -> None:
    for name in EPILOGUES:
        ((pattern,),) = symbols("conv2d", name)
        assert bool(pattern.fullmatch(symbol)) == (name == epilogue), name
    ((pattern,), _) = symbols("conv2d_shortcut")
    assert not pattern.fullmatch(symbol)


@pytest.mark.parametrize(
    ("symbol", "op", "epilogue"),
    [
        ("gemm_resident_64x32_add_moments_bfloat16_44630a41", "linear_moments", "none"),
        ("gemm_hopper_128x128x4_add_moments_1x1_float16_2d37c457", "linear_moments", "none"),
        ("attention_linear_hopper_64x384x3x6_bfloat16_44630a41", "attention_linear", "none"),
        ("attention_hopper_64_3x64x12_bfloat16_44630a41", "attention", "none"),
        ("gemm_hopper_192x128x5overlap_norm_gelu_1x1_bfloat16_2d37c457", "normed_linear", "gelu"),
        ("gemm_pingpong_3x64x192_norm_gelu_bfloat16_2d37c457", "normed_linear", "gelu"),
        ("gemm_resident_64x64split_norm_none_bfloat16_44630a41", "normed_linear", "none"),
        ("gemm_resident_64x64_norm_clamp_float16_44630a41", "normed_linear", "0.0 6.0 clamp"),
        ("row_moments_bfloat16_44630a41", "row_moments", "none"),
        ("layernorm_mlp_hopper_128x64x64x4_bfloat16_44630a41", "layernorm_mlp", "none"),
    ],
)
def test_a_symbol_tells_a_norm_between_layers(symbol: str, op: str, epilogue: str) -> None:
    found = {
        (other, end)
        for other in ("linear", "conv2d", "linear_moments", "normed_linear", "row_moments",
                      "layernorm_mlp", "qkv_linear", "attention", "attention_linear")
        for end in EPILOGUES
        if any(len(way) == 1 and way[0].fullmatch(symbol) for way in symbols(other, end))
    }  # fmt: skip
    ends = [epilogue] if op == "normed_linear" else EPILOGUES  # others' are always the same
    assert found == {(op, end) for end in ends}
    assert OURS.match(symbol)


BYTES = {  # symbols, as ops/gemm names kernels, and what they are of
    "gemm_hopper_128x64x6_scale_add_1x1_uint8xint8_44630a41": ("quantized_conv2d", "add"),
    "gemm_hopper_64x32x4row64_scale_none_1x1_uint8xint8_to_bfloat16_2d37c457": (
        "quantized_conv2d", "none",
    ),
    "gemm_turned_64x232row64_scale_none_uint8xint8_44630a41": ("quantized_conv2d", "none"),
    "gemm_turned_128x116_scale_add_relu_float8_e4m3fn_44630a41": ("quantized_conv2d", "add_relu"),
    "gemm_pingpong_3x64x128_scale_gelu_float8_e4m3fn_44630a41": ("quantized_conv2d", "gelu"),
    "gemm_pingpong_3x64x128_scale_none_3x1_float8_e4m3fn_to_bfloat16_44630a41": (
        "quantized_qkv_linear", "none",
    ),
    "gemm_hopper_64x64x6_scale_none_3x1_uint8xint8_to_bfloat16_44630a41": (
        "quantized_qkv_linear", "none",
    ),
    "gemm_hopper_128x128x4overlap_scale_none_1x2_uint8xint8_44630a41": (
        "quantized_conv2d_shortcut", "none",
    ),
    "gemm_hopper_128x64x6split_scale_relu_1x2_float8_e4m3fn_2d37c457": (
        "quantized_conv2d_shortcut", "relu",
    ),
    "conv2d_chain_hopper_128x64x64x4_uint8xint8_17266de5": ("quantized_conv2d_chain", "none"),
    "conv2d_chain_hopper_192x128x128x3_float8_e4m3fn_17266de5": ("quantized_conv2d_chain", "none"),
}  # fmt: skip


@pytest.mark.parametrize("symbol", BYTES)
def test_a_symbol_of_8_bits_tells_the_op(symbol: str) -> None:
    wide = ("conv2d", "conv2d_shortcut", "linear", "qkv_linear")
    bytes = ("conv2d", "conv2d_shortcut", "conv2d_chain", "qkv_linear")
    for op in (*(f"quantized_{name}" for name in bytes), *wide):
        for epilogue in ("none", "relu", "gelu", "add", "add_relu"):
            found = any(len(way) == 1 and way[0].fullmatch(symbol) for way in symbols(op, epilogue))
            of, end = BYTES[symbol]
            any_end = of.endswith(("chain", "qkv_linear"))  # which have one epilogue
            assert found == (op == of and (any_end or epilogue == end)), (op, epilogue)


@pytest.fixture(scope="module", params=KINDS)
def in_bytes(request: pytest.FixtureRequest) -> tuple[Program, list[Named]]:
    """A network of bottlenecks for Hopper: with shortcuts and chains of 8 bits."""
    program = calibrated(bottlenecks(), request.param)
    final = passes.run(program, HOPPER)
    return program, listed(final, "bfloat16")


def byte_launches(node: Named, fused: bool) -> list[Recorded]:
    layer, shape = node.layer, node.layer.outputs[0].shape
    kind = "uint8xint8" if layer.values[0].dtype == "uint8" else FLOAT8
    ends = ("add", "none") if kind == "uint8xint8" else ("add_relu", "relu")
    names = {
        "quantized_conv2d": [f"gemm_hopper_64x32x4_scale_{layer.epilogue}_1x1_{kind}"],
        "quantized_conv2d_shortcut": [f"gemm_hopper_64x32x4_scale_{layer.epilogue}_1x2_{kind}"],
        "quantized_conv2d_chain": [f"conv2d_chain_hopper_64x64x64x4_{kind}"]
        if fused
        else [f"gemm_hopper_64x32x4_scale_{end}_1x1_{kind}" for end in ends],
    }
    if layer.op not in names:
        return recorded(node)
    turned = not fused and layer.op == "quantized_conv2d" and layer.filters()[0][2] > 1
    found = [f"gemm_turned_64x232_scale_{layer.epilogue}_{kind}"] if turned else names[layer.op]
    return [Recorded(f"{name}_17266de5", shape) for name in found]


@pytest.mark.parametrize("fused", [True, False])
def test_launches_of_8_bits_find_their_nodes(
    in_bytes: tuple[Program, list[Named]], fused: bool
) -> None:
    _, nodes = in_bytes
    order = [(i, each) for i in shuffled(nodes, 0) for each in byte_launches(nodes[i], fused)]
    names = attribute([each for _, each in order], nodes)
    assert names is not None
    layers = {node.name: node.layer for node in nodes}
    assert [layers[name] for name in names] == [nodes[i].layer for i, _ in order]
    assert "0.quantized_conv2d_shortcut" in names and "1.three + 2.one" in names


def test_layers_of_8_bits_are_described(in_bytes: tuple[Program, list[Named]]) -> None:
    program, nodes = in_bytes
    layers = distinct(nodes)
    titles = {layer.title() for layer in layers if layer.op.startswith("quantized")}
    assert titles == {
        "1x1/1 32-64 at 6x5", "3x3/1 64 at 6x5", "3x3/2 64 at 6x5", "1x1/1 64-80 and 32 at 6x5",
        "1x1/1 64-80 and 80 at 3x3", "1x1/1 80-64 at 6x5", "1x1/1 64-80-64 at 6x5",
        "1x1/1 80-16 at 3x3",
    }  # fmt: skip
    total = sum(layer.flops(3) * len(names) for layer, names in layers.items())
    assert total == 2 * 3 * macs(program)
    chain = next(layer for layer in layers if layer.op == "quantized_conv2d_chain")
    moved = 3 * 30 * (64 + 80 + 80 + 64) + 2 * 64 * 80  # and biases, float32
    assert chain.traffic(3) == moved + 4 * (80 + 64)
    drawn = chain.weights(np.random.default_rng(0))
    assert {i: drawn[i].shape for i in drawn} == {
        1: (80, 64, 1, 1), 2: (80,), 4: (64, 80, 1, 1), 5: (64,)
    }  # fmt: skip
    final = passes.run(program, HOPPER)
    partners = {each.name: each.partner for each in described(program, final)}
    assert partners["1.three"] == "2.one" and partners["0.shortcut"] == "0.three"


def block(net: Net, x: Value) -> Value:
    """A transformer's block, behind which an MLP of tokens that a layer of another kind made."""
    x = x + net.linear(net.relu(x), "attention.proj", 64)
    with net.at("mlp"):
        y = net.layer_norm(x, "norm", 1e-6)
        x = x + net.linear(net.op("silu", [net.linear(y, "fc1", 96)]), "fc2", 64)
    x = net.op("softmax", [x])
    with net.at("other"):
        y = net.gelu(net.linear(net.layer_norm(x, "norm"), "fc1", 128))
        return x + net.linear(y, "fc2", 64)


def test_norms_between_layers_are_described() -> None:
    program = nets.program(block, 5, 64).retyped({"x": "bfloat16"})
    nodes = on_hopper(program)
    assert [(node.name, node.layer.op, node.layer.title()) for node in nodes[1:]] == [
        ("attention.proj", "linear_moments", "64 at 5"),
        ("mlp.fc1", "normed_linear", "64-96 at 5"),
        ("mlp.fc2", "linear", "96-64 at 5"),
        ("softmax", "softmax", "64 at 5"),
        ("other.norm", "row_moments", "64-2 at 5"),
        ("other.layernorm_mlp", "layernorm_mlp", "64-128-64 at 5"),
    ]
    assert sum(node.layer.flops(3) for node in nodes) == 2 * 3 * macs(program)
    _, measured, normed, _, _, moments, mlp = (node.layer for node in nodes)
    rows, groups = 3 * 5, 2 * 2 * 4  # the bytes of a row's moments
    assert measured.traffic(3) == rows * (2 * 3 * 64 + groups) + 2 * 64 * 64 + 4 * 64
    assert normed.traffic(3) == rows * (2 * (64 + 96) + groups) + 2 * 96 * 64 + 4 * 96
    assert moments.traffic(3) == rows * (2 * 64 + groups)
    assert mlp.traffic(3) == rows * (2 * 2 * 64 + groups) + 2 * 2 * 128 * 64 + 4 * (128 + 64)


def test_weights_behind_a_norm_are_drawn_as_it_leaves_them() -> None:
    nodes = on_hopper(nets.program(block, 5, 64).retyped({"x": "bfloat16"}))
    for op, places in {"normed_linear": {2, 3}, "layernorm_mlp": {2, 3, 4, 5}}.items():
        (layer,) = (node.layer for node in nodes if node.layer.op == op)
        drawn = layer.weights(np.random.default_rng(0))
        assert set(drawn) == places
        rounded = torch.from_numpy(drawn[2]).bfloat16()
        assert torch.equal(rounded.float(), torch.from_numpy(drawn[2]))
        assert rounded.double().sum(1).abs().max() < 1e-5
        assert [drawn[i].shape for i in (2, 3)] == [(len(rounded), 64), (len(rounded),)]
    module, parameters, _ = layer_module(
        [node.layer for node in nodes[1:]], PLACES["gpu"], DType.bfloat16, 2
    )
    found = re.findall(r'symbol = "(\w+)"', str(module.mlir_module))
    wanted = ["linear_moments", "normed_linear", "bmm", "softmax", "row_moments", "layernorm_mlp"]
    assert Counter(found) == dict.fromkeys(wanted, 2)
    assert {each.shape for name, each in parameters.bound.items() if name.endswith("1.3")} == {
        (96,), (128,)
    }  # fmt: skip


def test_other_launches_are_not_named(network: tuple[Any, list[Named]]) -> None:
    _, nodes = network
    launches = [each for node in nodes for each in recorded(node)]
    assert attribute(launches[:-1], nodes) is None
    wrong = [launches[0]._replace(symbol="gemm_cores_gelu_bfloat16_17266de5"), *launches[1:]]
    assert attribute(wrong, nodes) is None
    assert attribute([], nodes) is None
