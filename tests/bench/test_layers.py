"""A graph's nodes get their names, and recorded launches find their nodes in any order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef

from bench.attribution import Recorded, attribute
from bench.layers import Node, distinct, network_nodes
from bench.references import checkpoint, reference_model
from weights.macs import macs

ELEMENTWISE = {"normalize", "maxpool", "class_token", "relu", "gelu"}


@pytest.fixture(scope="module", params=["resnet-18", "resnet-50", "cvt-13"])
def network(request: pytest.FixtureRequest) -> tuple[Any, list[Node]]:
    model = checkpoint(request.param, reference_model(request.param))
    return model, network_nodes(model, DeviceRef.CPU(), DType.float32, (224, 224))


def test_names_are_those_of_the_weights(network: tuple[Any, list[Node]]) -> None:
    model, nodes = network
    names = Counter(node.name for node in nodes)
    assert max(names.values()) == 1
    for weight in model.tensors:
        name = weight.rpartition(".")[0] if not weight.endswith("cls_token") else weight
        assert name in names, weight


def test_layers_add_up_to_the_network(network: tuple[Any, list[Node]]) -> None:
    model, nodes = network
    layers = distinct(nodes)
    assert sum(map(len, layers.values())) == len(nodes)
    total = sum(layer.flops(3) * len(names) for layer, names in layers.items())
    assert total == 2 * 3 * macs(model.spec, 224)


def symbol(node: Node) -> str:
    op, epilogue = node.layer.op.removesuffix("_add"), dict(node.layer.parameters).get("epilogue")
    if op in ELEMENTWISE:
        return "mogg_for_each_r4_w8_b256_gs_False_17266de5"
    if op in ("conv2d", "bmm"):
        return f"gemm_hopper_128x64x4_{epilogue}_bfloat16_17266de5"
    return f"{op}_bfloat16_17266de5"


def shuffled(nodes: list[Node], seed: int) -> list[int]:
    """An order in which a node comes after those that it reads from, and no other rule holds."""
    rng, left, order = random.Random(seed), set(range(len(nodes))), []
    while left:
        ready = [i for i in sorted(left) if nodes[i].after.isdisjoint(left)]
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("seed", range(3))
def test_launches_find_their_nodes(network: tuple[Any, list[Node]], seed: int) -> None:
    _, nodes = network
    order = shuffled(nodes, seed)
    launches = [Recorded(symbol(nodes[i]), nodes[i].layer.outputs[0].shape) for i in order]
    foreign = Recorded("Memcpy DtoD (Device -> Device)", ())
    launches.insert(5, foreign)
    names = attribute(launches, nodes)
    assert names is not None and names.pop(5) == ""
    # Nodes that cannot be told apart, such as key and value, may change places.
    assert [nodes[i].layer for i in order] == [
        next(node.layer for node in nodes if node.name == name) for name in names
    ]
    assert Counter(names) == Counter(node.name for node in nodes)


def test_other_launches_are_not_named(network: tuple[Any, list[Node]]) -> None:
    _, nodes = network
    launches = [Recorded(symbol(node), node.layer.outputs[0].shape) for node in nodes]
    assert attribute(launches[:-1], nodes) is None
    wrong = [launches[0]._replace(symbol="gemm_cores_gelu_bfloat16_17266de5"), *launches[1:]]
    assert attribute(wrong, nodes) is None
    assert attribute([], nodes) is None
