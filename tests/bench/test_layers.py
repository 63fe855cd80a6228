"""A graph's nodes get their names, and recorded launches find their nodes in any order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.bench.attribution import Recorded, attribute, symbols
from maxvision.bench.layers import Named, distinct, network_nodes
from maxvision.bench.references import checkpoint, reference_model
from maxvision.graphs.layers import macs
from tests.ops.cases import EPILOGUES

OTHERS = {
    "max_pool2d": "pool_max_8", "avg_pool2d": "pool_mean_8",
    "class_token": "mogg_for_each_r4_w8_b256_gs_False",
}  # fmt: skip
"""Ops whose kernels are called otherwise."""


PLACES = {"cpu": DeviceRef.CPU(), "gpu": DeviceRef.GPU()}  # to build a graph takes no device


@pytest.fixture(
    scope="module", params=["resnet-18 cpu", "resnet-50 gpu", "cvt-13 cpu", "cvt-13 gpu"]
)
def network(request: pytest.FixtureRequest) -> tuple[Any, list[Named]]:
    name, _, place = request.param.partition(" ")
    model = checkpoint(name, reference_model(name))
    return model, network_nodes(model, PLACES[place], DType.float32, (224, 224))


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
    fused = {"conv2d_shortcut": "relu_1x2", "qkv_linear": "none_3x1"}
    if op in ("conv2d", "linear", *fused):
        kind = fused.get(op, f"{epilogue}_1x1")
        return f"gemm_hopper_128x64x4_{kind}_bfloat16_17266de5"
    return f"{op.removesuffix('_first')}_bfloat16_17266de5"


def recorded(node: Named, fused: bool = True) -> list[Recorded]:
    """What a node launches: one kernel, or several where the fused one is not to be had."""
    apart = {
        "conv2d_chain": ["gemm_cores_add_relu", "gemm_cores_relu"],
        "conv2d_shortcut": ["gemm_cores_none", "gemm_cores_add_relu"],
        "layernorm_mlp": ["layernorm_8x1", "gemm_cores_gelu", "gemm_cores_add"],
        "qkv_linear": ["gemm_cores_none"] * 3,
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
        ("gemm_mma_128x64x3_relu_float16_2d37c457", "relu"),
        ("gemm_cores_gelu_bfloat16_2d37c457", "gelu"),
        ("depthwise_3x3_1x4_add_bfloat16_2d37c457", "add"),
    ],
)
def test_a_symbol_tells_the_epilogue(symbol: str, epilogue: str) -> None:
    for name in EPILOGUES:
        ((pattern,),) = symbols("conv2d", name)
        assert bool(pattern.fullmatch(symbol)) == (name == epilogue), name
    ((pattern,), _) = symbols("conv2d_shortcut")
    assert not pattern.fullmatch(symbol)


def test_other_launches_are_not_named(network: tuple[Any, list[Named]]) -> None:
    _, nodes = network
    launches = [each for node in nodes for each in recorded(node)]
    assert attribute(launches[:-1], nodes) is None
    wrong = [launches[0]._replace(symbol="gemm_cores_gelu_bfloat16_17266de5"), *launches[1:]]
    assert attribute(wrong, nodes) is None
    assert attribute([], nodes) is None
