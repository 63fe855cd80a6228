"""What is read off programs: layers, their partners, multiplications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.cvt import CVTS
from maxvision.graphs.layers import Layer, bytes_at_once, keeps_images_apart, layers, macs
from maxvision.graphs.net import Net, Value
from maxvision.graphs.program import Program
from maxvision.graphs.resnet import RESNETS
from maxvision.graphs.types import BATCH
from maxvision.weights.family import known
from tests.graphs import nets
from tests.graphs.interpret import inputs, interpret, weights

RESNET = known()["resnet"].program(RESNETS["resnet50"], (224, 224))
CVT = known()["cvt"].program(CVTS["cvt-13"], (224, 224))


def test_the_layers_of_resnet_50() -> None:
    found = {each.name: each for each in layers(RESNET)}
    assert len(found) == 54
    assert found["stem"] == Layer("stem", 7, 2, 3, 64, (112, 112))
    assert found["stages.1.0.conv2"] == Layer("stages.1.0.conv2", 3, 2, 128, 128, (28, 28))
    assert found["head"] == Layer("head", 1, 1, 2048, 1000, (1, 1))
    assert found["stem"].title() == "7x7/2 3-64 at 12544 px"
    assert found["stages.1.0.conv2"].title() == "3x3/2 128 at 784 px"
    assert round(sum(each.weights for each in found.values()) / 1e6, 1) == 25.5
    assert sum(each.macs for each in found.values()) == macs(RESNET) == 4_089_184_256


def test_the_layers_of_cvt_13() -> None:
    found = {each.name: each for each in layers(CVT)}
    query = found["stages.2.9.attention.query.conv"]
    assert (query.groups, query.channels, query.weights) == (384, 384, 9 * 384)
    assert found["stages.2.0.mlp.fc1"].size == (1, 197)
    assert found["stages.2.0.attention.key"].size == (1, 50)


def test_a_device_makes_partners() -> None:
    gpu = passes.run(RESNET, Backend("cuda", "bfloat16"))
    partners = {each.name: each.partner for each in layers(RESNET, gpu) if each.partner}
    assert partners["stages.0.0.conv3"] == "stages.0.0.shortcut"
    assert partners["stages.0.1.conv3"] == "stages.0.2.conv1"
    assert all(partners[other] == name for name, other in partners.items())
    assert len(partners) == 2 * (4 + 4)
    cpu = passes.run(RESNET, Backend("cpu", "float32"))
    assert sum(bool(each.partner) for each in layers(RESNET, cpu)) == 2 * 4
    assert not any(each.partner for each in layers(RESNET))


def test_the_bytes_of_a_node_count_its_images_and_not_its_weights() -> None:
    wide = 56 * 56 * 256 * 4  # what the first stage adds up, in float32
    assert bytes_at_once(RESNET) == 3 * wide
    fused = passes.run(RESNET, Backend("cpu", "float32"))
    # The sum is a convolution's now, which reads 64 channels.
    assert bytes_at_once(fused) == 2 * wide + wide // 4


def test_weights_that_are_computed_of_activations_are_no_layers() -> None:
    net = Net("net")
    x, filters = net.input("x", (BATCH, 3, 6, 6)), net.input("filters", (4, 3, 3, 3))
    net.output("y", net.op("conv2d", [x, filters]))
    assert layers(net.program()) == []


@pytest.mark.parametrize("name", ["resnet basic", "resnet odd", "cvt", "cvt odd", "vit", "gated"])
def test_multiplications_are_those_that_torch_counts(name: str) -> None:
    write, shape = nets.NETS[name]
    program: Program = nets.program(write, *shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        interpret(program, inputs(program, batch=1), weights(program))
    assert 2 * macs(program) == counter.get_total_flops()


def test_gradients_of_filters_count() -> None:
    net = Net("net")
    x, dy = net.input("x", (BATCH, 6, 8, 9)), net.input("dy", (BATCH, 4, 6, 9))
    net.output("dw", net.op("conv2d_weight_grad", [x, dy], kernel=(3, 1)))
    program = net.program()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        interpret(program, inputs(program, batch=1), {})
    assert 2 * macs(program) == counter.get_total_flops() == 2 * (4 * 6 * 9) * (6 * 3 * 1)
    assert not keeps_images_apart(program)


def test_attention_and_its_gradients_count() -> None:
    net = Net("net")
    q, k, v = (net.input(name, (BATCH, size, 24)) for name, size in (("q", 6), ("k", 9), ("v", 9)))
    settings: dict[str, Any] = {"heads": 2, "scale": 0.5}
    y, kept = net.several("attention", [q, k, v], logsumexp=True, **settings)
    net.output("y", y)
    assert macs(net.program()) == 2 * 6 * 9 * 24
    net.output("dq", net.several("attention_grad", [q, k, v, y, q, kept], **settings)[0])
    assert macs(net.program()) == 7 * 6 * 9 * 24


def test_products_count() -> None:
    net = Net("net")
    x = net.input("x", (BATCH, 5, 7))
    net.output("y", net.op("matmul", [x, x], transpose_b=True))
    assert macs(net.program()) == 5 * 5 * 7


def test_the_batch_may_be_any_axis() -> None:
    net = Net("sequences")
    x = net.permute(net.input("x", (BATCH, 5, 8)), 1, 0, 2)
    net.output("y", net.linear(x, "a", 6))
    program = net.program()
    assert [each.size for each in layers(program)] == [(1, 5)]
    assert macs(program) == 5 * 8 * 6


def test_images_stay_apart_unless_rows_before_the_batch_stay_merged() -> None:
    def apart(write: Callable[[Net, Value], Value]) -> bool:
        net = Net("net")
        x = net.input("x", (BATCH, 6, 4))
        net.output("y", write(net, x))
        return keeps_images_apart(net.program())

    def turned(net: Net, x: Value) -> Value:
        return net.permute(x, 1, 0, 2)

    def merged(net: Net, x: Value) -> Value:
        return net.relu(net.reshape(turned(net, x), "6*batch", 4))

    assert keeps_images_apart(RESNET) and keeps_images_apart(CVT)
    assert apart(lambda net, x: net.reshape(x, BATCH, 24))
    assert apart(lambda net, x: net.reshape(x, "2*batch", 3, 4))  # windows of an image
    assert apart(lambda net, x: net.reshape(turned(net, x), 6, "2*batch", 2))
    assert apart(lambda net, x: turned(net, net.reshape(merged(net, x), 6, BATCH, 4)))
    assert apart(lambda net, x: net.reshape(merged(net, x), 2, 3, BATCH, 4))
    assert not apart(merged)
    assert not apart(lambda net, x: net.reshape(merged(net, x), BATCH, 6, 4))
    assert not apart(lambda net, x: net.reshape(turned(net, x), BATCH, 24))
    rows = ("6*batch", 4)
    assert not apart(lambda net, x: net.op("add", [merged(net, x), net.reshape(x, *rows)]))
