"""The passes that read what is written out: activations, layer norms, biases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from maxvision.graphs.net import Net, Value
from tests.graphs import nets
from tests.graphs.test_passes import CPU, both, ops

Write = Callable[[Net, Value], Value]


def _number(net: Net, op: str, x: Value, number: float) -> Value:
    return net.op(op, [x], other=number)


def _erf(net: Net, x: Value, by: str = "div") -> Value:
    scaled = _number(net, by, x, math.sqrt(2) if by == "div" else 0.70710678)
    return _number(net, "add", net.op("erf", [scaled]), 1.0)


def gelu(net: Net, x: Value) -> Value:
    return _number(net, "mul", net.op("mul", [x, _erf(net, x)]), 0.5)


def gelu_half_first(net: Net, x: Value) -> Value:
    return net.op("mul", [_number(net, "mul", x, 0.5), _erf(net, x, "mul")])


def gelu_half_last(net: Net, x: Value) -> Value:
    return net.op("mul", [_number(net, "div", _erf(net, x), 2.0), x])


def gelu_tanh(net: Net, x: Value, cube: str = "pow") -> Value:
    third = _number(net, "pow", x, 3.0)
    if cube == "mul":
        third = net.op("mul", [net.op("mul", [x, x]), x])
    inner = net.add(x, _number(net, "mul", third, 0.044715))
    tanh = net.op("tanh", [_number(net, "mul", inner, math.sqrt(2 / math.pi))])
    return net.op("mul", [_number(net, "mul", x, 0.5), _number(net, "add", tanh, 1.0)])


def gelu_tanh_by_products(net: Net, x: Value) -> Value:
    return gelu_tanh(net, x, "mul")


def silu(net: Net, x: Value) -> Value:
    return net.op("mul", [net.op("sigmoid", [x]), x])


def _gate(net: Net, x: Value) -> Value:
    return net.op("clamp", [_number(net, "add", x, 3.0)], min=0.0, max=6.0)


def hardswish(net: Net, x: Value) -> Value:
    return _number(net, "div", net.op("mul", [x, _gate(net, x)]), 6.0)


def hardswish_of_a_hardsigmoid(net: Net, x: Value) -> Value:
    return net.op("mul", [x, net.op("hardsigmoid", [x])])


def hardswish_of_quotients(net: Net, x: Value) -> Value:
    return net.op("mul", [x, _number(net, "div", _gate(net, x), 6.0)])


def hardsigmoid(net: Net, x: Value) -> Value:
    return _number(net, "div", _gate(net, x), 6.0)


def mish(net: Net, x: Value) -> Value:
    return net.op("mul", [x, net.op("tanh", [net.op("softplus", [x])])])


@pytest.mark.parametrize(
    ("write", "op"),
    [
        (gelu, "gelu"), (gelu_half_first, "gelu"), (gelu_half_last, "gelu"),
        (gelu_tanh, "gelu_tanh"), (gelu_tanh_by_products, "gelu_tanh"), (silu, "silu"),
        (hardswish, "hardswish"), (hardswish_of_a_hardsigmoid, "hardswish"),
        (hardswish_of_quotients, "hardswish"), (hardsigmoid, "hardsigmoid"), (mish, "mish"),
    ],
)  # fmt: skip
def test_an_activation_that_is_written_out_is_one_op(write: Write, op: str) -> None:
    _, after = both("written_out", nets.program(write, 4, 6), CPU)
    assert ops(after) == {op: 1}


def almost_gelu(net: Net, x: Value) -> Value:
    return _number(net, "mul", net.op("mul", [x, _erf(net, x)]), 0.6)


def gelu_of_another_scale(net: Net, x: Value) -> Value:
    total = _number(net, "add", net.op("erf", [_number(net, "div", x, 1.4)]), 1.0)
    return _number(net, "mul", net.op("mul", [x, total]), 0.5)


def gelu_of_two(net: Net, x: Value) -> Value:
    other = net.relu(x)
    return _number(net, "mul", net.op("mul", [other, _erf(net, x)]), 0.5)


def gated_by_another(net: Net, x: Value) -> Value:
    return net.op("mul", [net.op("sigmoid", [net.relu(x)]), x])


@pytest.mark.parametrize(
    "write", [almost_gelu, gelu_of_another_scale, gelu_of_two, gated_by_another]
)
def test_what_is_almost_an_activation_stays(write: Write) -> None:
    before, after = both("written_out", nets.program(write, 4, 6), CPU)
    assert after == before


def norm(
    net: Net,
    x: Value,
    axis: int = 2,
    *,
    square: str = "pow",
    root: str = "div",
    twice: bool = False,
    eps: float = 1e-6,
) -> Value:
    """Writes a layer norm out over an axis of x."""
    c, behind = x.size(axis), len(x.shape) - 1 - axis
    weight, bias = (net.weight(f"norm.{part}", c, *[1] * behind) for part in ("weight", "bias"))
    mean = net.op("mean", [x], axes=(axis,), keepdim=True)
    centred = net.op("sub", [x, mean])
    again = net.op("sub", [x, mean]) if twice else centred
    power = net.op("mul", [again, again])
    if square == "pow":
        power = _number(net, "pow", again, 2.0)
    total = _number(net, "add", net.op("mean", [power], axes=(axis,), keepdim=True), eps)
    if root == "div":
        y = net.op("div", [centred, net.op("sqrt", [total])])
    elif root == "rsqrt":
        y = net.op("mul", [centred, net.op("rsqrt", [total])])
    else:
        y = net.op("mul", [net.op("reciprocal", [net.op("sqrt", [total])]), centred])
    return net.add(net.op("mul", [weight, y]), bias)


@pytest.mark.parametrize("root", ["div", "rsqrt", "reciprocal"])
@pytest.mark.parametrize(("square", "twice"), [("pow", False), ("mul", False), ("pow", True)])
def test_a_layer_norm_that_is_written_out_is_one_op(square: str, twice: bool, root: str) -> None:
    program = nets.program(lambda n, x: norm(n, x, square=square, twice=twice, root=root), 4, 6)
    _, after = both("written_out", program, CPU)
    assert ops(after) == {"layer_norm": 1}
    (node,) = (each for each in after.nodes if each.op == "layer_norm")
    assert node.attributes["eps"] == 1e-6


def rms(net: Net, x: Value, *, square: str, root: str, axis: int = 2) -> Value:
    """Writes T5's norm out."""
    power = _number(net, "pow", x, 2.0) if square == "pow" else net.op("mul", [x, x])
    total = _number(net, "add", net.op("mean", [power], axes=(axis,), keepdim=True), 1e-6)
    weight = (
        net.weight("norm.weight", 1, x.size(2)) if root == "div" else net.weight("w", x.size(2))
    )
    if root == "div":
        return net.op("mul", [net.op("div", [x, net.op("sqrt", [total])]), weight])
    return net.op("mul", [weight, net.op("mul", [x, net.op("rsqrt", [total])])])


@pytest.mark.parametrize("root", ["div", "rsqrt"])
@pytest.mark.parametrize("square", ["pow", "mul"])
def test_an_rms_norm_that_is_written_out_is_one_op(square: str, root: str) -> None:
    program = nets.program(lambda n, x: rms(n, x, square=square, root=root), 4, 6)
    _, after = both("written_out", program, CPU)
    assert ops(after) == {"rms_norm": 1}
    (node,) = (each for each in after.nodes if each.op == "rms_norm")
    assert node.attributes["eps"] == 1e-6


def test_an_rms_norm_of_another_axis_stays() -> None:
    program = nets.program(lambda n, x: rms(n, x, square="pow", root="rsqrt", axis=1), 4, 6)
    before, after = both("written_out", program, CPU)
    assert after == before


def test_a_layer_norm_without_a_bias_is_an_rms_norm_of_what_is_centred() -> None:
    def write(net: Net, x: Value) -> Value:
        mean = net.op("mean", [x], axes=(2,), keepdim=True)
        return rms(net, net.op("sub", [x, mean]), square="pow", root="rsqrt")

    _, after = both("written_out", nets.program(write, 4, 6), CPU)
    assert ops(after) == {"mean": 1, "sub": 1, "rms_norm": 1}


def test_a_layer_norm_of_channels_is_one_op_between_permutes() -> None:
    _, after = both("written_out", nets.program(lambda n, x: norm(n, x, 1), 6, 5, 4), CPU)
    assert ops(after) == Counter({"permute": 2, "layer_norm": 1})


def no_parameters(net: Net, x: Value) -> Value:
    mean = net.op("mean", [x], axes=(2,), keepdim=True)
    centred = net.op("sub", [x, mean])
    power = net.op("mean", [_number(net, "pow", centred, 2.0)], axes=(2,), keepdim=True)
    return net.op("div", [centred, net.op("sqrt", [_number(net, "add", power, 1e-5)])])


def two_axes(net: Net, x: Value) -> Value:
    mean = net.op("mean", [x], axes=(1, 2), keepdim=True)
    centred = net.op("sub", [x, mean])
    power = net.op("mean", [_number(net, "pow", centred, 2.0)], axes=(1, 2), keepdim=True)
    y = net.op("div", [centred, net.op("sqrt", [_number(net, "add", power, 1e-5)])])
    return net.add(net.op("mul", [y, net.weight("weight", 6)]), net.weight("bias", 6))


def another_scale(net: Net, x: Value) -> Value:
    mean = net.op("mean", [x], axes=(2,), keepdim=True)
    centred = net.op("sub", [x, mean])
    power = net.op("mean", [_number(net, "pow", x, 2.0)], axes=(2,), keepdim=True)
    y = net.op("div", [centred, net.op("sqrt", [_number(net, "add", power, 1e-5)])])
    return net.add(net.op("mul", [y, net.weight("weight", 6)]), net.weight("bias", 6))


@pytest.mark.parametrize("write", [no_parameters, two_axes, another_scale])
def test_what_is_almost_a_layer_norm_stays(write: Write) -> None:
    before, after = both("written_out", nets.program(write, 4, 6), CPU)
    assert after == before


def linear_then_add(net: Net, x: Value) -> Value:
    return net.add(net.linear(x, "layer", 5, bias=False), net.weight("added", 5))


def add_then_linear(net: Net, x: Value) -> Value:
    return net.add(net.weight("added", 1, 1, 5), net.linear(x, "layer", 5, bias=False))


@pytest.mark.parametrize("write", [linear_then_add, add_then_linear])
def test_a_constant_behind_a_linear_layer_is_its_bias(write: Write) -> None:
    _, after = both("bias", nets.program(write, 4, 6), CPU)
    assert ops(after) == {"linear": 1}


def test_a_constant_by_channel_behind_a_convolution_is_its_bias() -> None:
    def write(net: Net, x: Value) -> Value:
        return net.add(net.conv2d(x, "conv", 5, 3, bias=False), net.weight("added", 5, 1, 1))

    _, after = both("bias", nets.program(write, 3, 6, 6), CPU)
    assert ops(after) == {"conv2d": 1}


def with_bias(net: Net, x: Value) -> Value:
    return net.add(net.linear(x, "layer", 5), net.weight("added", 5))


def by_token(net: Net, x: Value) -> Value:
    return net.add(net.linear(x, "layer", 5, bias=False), net.weight("added", 4, 5))


def one_for_all(net: Net, x: Value) -> Value:
    return net.add(net.linear(x, "layer", 5, bias=False), net.weight("added", 1))


def read_twice(net: Net, x: Value) -> Value:
    y = net.linear(x, "layer", 5, bias=False)
    return net.op("mul", [net.add(y, net.weight("added", 5)), y])


@pytest.mark.parametrize("write", [with_bias, by_token, one_for_all, read_twice])
def test_what_is_no_bias_stays(write: Write) -> None:
    before, after = both("bias", nets.program(write, 4, 6), CPU)
    assert after == before
