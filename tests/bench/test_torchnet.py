"""A program in torch, op by op, is the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maxvision.bench.torchnet import FUNCTIONS, TorchNet
from maxvision.graphs.net import Net
from maxvision.graphs.types import BATCH, FLOAT8
from tests.graphs.interpret import inputs, interpret, weights


def test_gradients() -> None:
    net = Net("gradients")
    x, dy = net.input("x", (BATCH, 4, 9, 8)), net.input("dy", (BATCH, 6, 5, 4))
    window = {"stride": (2, 2), "padding": (1, 1, 1, 0), "groups": 2}
    filter = net.input("filter", (6, 2, 3, 3))
    dx = net.op("conv2d_input_grad", [dy, filter], size=(9, 8), **window)
    dw = net.op("conv2d_weight_grad", [x, dy], kernel=3, **window)
    pool: dict[str, Any] = {"kernel": 3, "stride": 2, "padding": 1}
    part = net.slice(dy, 1, 0, 4)
    most = net.op("max_pool2d_grad", [x, part], **pool)
    mean = net.op("avg_pool2d_grad", [part], size=(9, 8), count_include_pad=False, **pool)
    total = net.op("add", [net.op("mul", [dx, most]), mean])
    net.output("y", net.op("add", [total, net.op("mean", [dw], axes=(0, 1, 2, 3))]))
    program = net.program()
    given = inputs(program, batch=3)
    wanted = interpret(program, given, {})["y"]
    values = dict(zip(program.inputs, map(torch.from_numpy, given), strict=True))
    for node in program.nodes:
        step = FUNCTIONS[node.op](dict(node.attributes))
        values[node.output] = step(*(values[name] for name in node.inputs))
    found = values[program.outputs["y"]].numpy()
    np.testing.assert_allclose(found, wanted, 1e-4, 1e-4 * np.abs(wanted).max())


def test_ops_of_converted_models() -> None:
    net = Net("some")
    x = net.conv2d(net.input("x", (BATCH, 3, 8, 8)), "conv", 4, 3, padding=1)
    gate = net.op("sigmoid", [net.op("mean", [x], axes=(2, 3), keepdim=True)])
    x = net.op("mul", [net.op("silu", [x]), gate])
    x = net.op("pad", [net.slice(x, 3, 0, 8, 2)], pads=(0, 0, 0, 0, 0, 0, 2, 2))
    scale, shift = net.weight("scale", 4), net.weight("shift", 4)
    x = net.op("group_norm", [x, scale, shift], groups=2, eps=1e-5)
    x = net.reshape(x, f"4*{BATCH}", 64)  # windows
    x = net.op("clamp", [net.op("add", [x], other=1.0)], min=0.0, max=6.0)
    x = net.reshape(x, BATCH, 4, 64) + net.expand(net.weight("place", 1, 4, 64), BATCH, 4, 64)
    x = net.op("where", [net.op("gt", [x], other=0.5), x, net.op("neg", [x])])
    x = net.op("rms_norm", [x, net.weight("rms", 64)], eps=1e-6)
    x = net.op("matmul", [x, net.permute(x, 0, 2, 1)], alpha=0.5)
    net.output("logits", net.linear(net.op("amax", [x], axes=(2,)), "head", 5))
    program = net.program()
    (pixels,) = inputs(program, batch=3)
    with torch.no_grad():
        found = TorchNet(program, weights(program)).eval()(torch.from_numpy(pixels)).logits.numpy()
    wanted = interpret(program, [pixels], weights(program))["logits"]
    np.testing.assert_allclose(found, wanted, 1e-4, 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("to", ["int8", FLOAT8])
def test_a_quantised_program_rounds_its_filters(to: str) -> None:
    net = Net("quantised")
    settings: dict[str, Any] = (
        {"scale": 0.03, "low": -99.0, "high": 156.0} if to == "int8" else {"scale": 0.03, "to": to}
    )
    x = net.op("fake_quantize", [net.input("x", (BATCH, 4, 6, 5))], **settings)
    weight = net.op("fake_quantize_filter", [net.weight("conv.weight", 6, 4, 3, 3)], to=to)
    x = net.op("conv2d", [x, weight, net.weight("conv.bias", 6)], "conv", padding=1)
    net.output("logits", net.linear(net.op("mean", [x], axes=(2, 3)), "head", 5))
    program = net.program()
    (pixels,) = inputs(program, batch=3)
    with torch.no_grad():
        made = TorchNet(program, weights(program)).eval().double()
        found = made(torch.from_numpy(pixels).double()).logits.numpy()
    wanted = interpret(program, [pixels], weights(program))["logits"]
    np.testing.assert_allclose(found, wanted, 1e-6, 1e-6 * np.abs(wanted).max())
