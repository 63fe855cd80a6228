"""Quantised programs: what is rounded, what becomes of it on a device, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.graph import ops as graph_ops

from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs import nodes, passes
from maxvision.graphs.arrange import CHAINS
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import (
    EVALUATE,
    e4m3,
    e4m3_bits,
    filter_scales,
    quantized_filter,
)
from maxvision.graphs.net import Net, Value
from maxvision.graphs.parameters import Parameters, buffer
from maxvision.graphs.passes import eight_bit
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.quantize import CONFIG, KINDS, Float8, Grid, Quantization, places, quantized
from maxvision.graphs.shapes import sides
from maxvision.graphs.types import BATCH, FLOAT8
from maxvision.runtime import cache
from maxvision.runtime.calibrate import Seen, rounded, watched
from maxvision.runtime.executor import Executor
from tests.graphs.interpret import inputs, interpret, weights
from tests.graphs.nets import attend

ON = Backend("cpu", "float32")
HOPPER = Backend("cuda", "float32", architecture="sm_90a")


def block(net: Net, x: Value, name: str, filters: int, stride: int = 1) -> Value:
    """A residual block of two convolutions with batch norms, and a shortcut where it has to be."""
    with net.at(name):
        y = net.batch_norm(net.conv2d(x, "one", filters, 3, stride=stride, padding=1), "one.norm")
        y = net.batch_norm(net.conv2d(net.relu(y), "two", filters, 3, padding=1), "two.norm")
        if stride > 1:
            x = net.batch_norm(net.conv2d(x, "shortcut", filters, 1, stride=stride), "short.norm")
        return net.relu(y + x)


def residual(width: int = 8) -> Program:
    """A small ResNet: pixels, a stem, two blocks, a classifier."""
    net = Net("residual")
    x = net.relu(net.conv2d(net.input("x", (BATCH, 3, 9, 8)), "stem", width, 3, padding=1))
    x = block(net, block(net, x, "a", width), "b", 2 * width, stride=2)
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 5))
    return net.program()


def tokens(width: int = 8) -> Program:
    """A norm and an MLP with a residual, of tokens."""
    net = Net("tokens")
    x = net.input("x", (BATCH, 5, width))
    y = net.gelu(net.linear(net.layer_norm(x, "norm"), "up", 2 * width))
    y = x + net.linear(y, "down", width)
    net.output("logits", net.linear(net.op("mean", [y], axes=(1,)), "head", 3))
    return net.program()


def calibrated(program: Program, dtype: str = "int8") -> Program:
    """Quantises all that may be, by what the values are on the tests' inputs."""
    values, layers = places(program, dtype=dtype)
    found = interpret(watched(program, values), inputs(program), weights(program))
    seen = {name: found[f"value.{name}"] for name in values}
    grids = {name: KINDS[dtype].of(each.min(), each.max()) for name, each in seen.items()}
    return quantized(program, Quantization(grids, tuple(layers), dtype))


def ops(program: Program) -> list[str]:
    return [node.op for node in program.nodes if not node.at_load]


@pytest.mark.parametrize(
    ("dtype", "on"),
    [("int8", ON), ("int8", HOPPER), (FLOAT8, HOPPER)],
    ids=["cpu", "hopper", "fp8"],
)
@pytest.mark.parametrize("write", [residual, tokens])
def test_it_means_the_same_in_8_bits(
    write: Callable[[int], Program], dtype: str, on: Backend
) -> None:
    program = calibrated(write(16), dtype)
    final = passes.run(program, on)
    assert any("quantized" in op for op in ops(final))
    assert Program.from_json(final.to_json()) == final
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors)["logits"] for each in (program, final))
    np.testing.assert_allclose(after, before, 1e-9, 1e-9)
    plain = interpret(write(16), given, tensors)["logits"]
    most = 0.05 if dtype == "int8" else 0.1
    assert 0 < np.abs(before - plain).max() < most * np.abs(plain).max()


def test_a_residual_network_stays_in_bytes_between_stem_and_pool() -> None:
    final = passes.run(calibrated(residual()), ON)
    moves = ("reshape", "permute")
    assert [op for op in ops(final) if op not in moves] == [
        "conv2d", "pointwise",  # stored as bytes
        *["quantized_conv2d"] * 4, "pointwise",  # the last block's residual, in float32
        "quantized_conv2d", "avg_pool2d", "linear",
    ]  # fmt: skip
    kinds = [final.types[node.output].dtype for node in final.nodes if "quantized" in node.op]
    assert kinds == ["uint8"] * 4 + ["float32"]


def test_linear_layers_read_bytes() -> None:
    final = passes.run(calibrated(tokens()), ON)
    assert ops(final).count("quantized_linear") == 2
    up = next(node for node in final.nodes if node.op == "quantized_linear")
    assert up.attributes["epilogue"] == "gelu" and up.attributes["dtype"] == "uint8"


def test_on_hopper_results_are_stored_by_what_saturates() -> None:
    final = passes.run(calibrated(residual(16)), HOPPER)
    found = [node for node in final.nodes if node.op == "quantized_conv2d"]
    assert [node.attributes.get("epilogue", "none") for node in found] == [
        "none", "add", "none", "none", "add_relu",  # the last is read in floats
    ]  # fmt: skip
    assert [final.types[node.output].dtype for node in found] == ["uint8"] * 4 + ["float32"]
    final = passes.run(calibrated(tokens(16)), HOPPER)
    found = [node for node in final.nodes if node.op == "quantized_linear"]
    assert [final.types[node.output].dtype for node in found] == ["uint8", "float32"]
    assert found[0].attributes["epilogue"] == "gelu"
    assert ops(final).count("pointwise") == 0 and ops(final)[0] == "layer_norm"


def test_on_hopper_floats_of_8_bits_are_rectified_before_they_are_stored() -> None:
    final = passes.run(calibrated(residual(16), FLOAT8), HOPPER)
    running = [
        node for node in final.nodes if not node.at_load and node.op not in eight_bit.KEEPING
    ]
    found = [(n.op, n.attributes.get("epilogue", ""), final.types[n.output].dtype) for n in running]
    conv = "quantized_conv2d"
    assert found == [
        ("conv2d", "relu", "float32"), ("pointwise", "", FLOAT8),
        (conv, "relu", FLOAT8), (conv, "add_relu", FLOAT8), (conv, "relu", FLOAT8),
        (conv, "", FLOAT8), ("pointwise", "", "float32"), (conv, "add_relu", "float32"),
        ("avg_pool2d", "", "float32"), ("linear", "", "float32"),
    ]  # fmt: skip
    assert not any("low" in name for node in running for name in node.attributes)
    gelu, down = (
        node
        for node in passes.run(calibrated(tokens(16), FLOAT8), HOPPER).nodes
        if node.op == "quantized_linear"
    )
    assert (gelu.attributes["epilogue"], gelu.attributes["dtype"]) == ("gelu", FLOAT8)
    assert down.attributes["epilogue"] == "add"


@pytest.mark.parametrize(
    ("epilogue", "grid", "found"),
    [
        ("relu", Grid(0.1, 0), "none"),
        ("add_relu", Grid(0.1, -3), "add_relu"),
        ("0.0 6.0 clamp", Grid(6 / 255, 0), "none"),
        ("add_0.0 6.0 clamp", Grid(5 / 255, 0), "add"),
        ("0.0 6.0 clamp", Grid(7 / 255, 0), "0.0 6.0 clamp"),
        ("silu", Grid(0.1, 0), "silu"),
        ("add_relu", Float8(0.1), "add_relu"),
        ("-50.0 50.0 clamp", Float8(0.1), "none"),
        ("-40.0 50.0 clamp", Float8(0.1), "-40.0 50.0 clamp"),
    ],
)
def test_an_activation_that_bounds_no_more_than_saturation_goes(
    epilogue: str, grid: Grid, found: str
) -> None:
    node = Node("conv2d", ("x", "w"), ("y",), {"epilogue": epilogue})
    assert eight_bit.saturating(node, grid) == found


@pytest.mark.parametrize(
    "on",
    [
        Backend("cuda", "bfloat16", architecture="sm_80"),
        Backend("hip", "bfloat16", architecture="gfx942"),
        Backend("cpu", "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", KINDS)
def test_others_round_in_floats(on: Backend, dtype: str) -> None:
    assert not any("quantized" in op for op in ops(passes.run(calibrated(residual(16), dtype), on)))


def test_a_cpu_rounds_to_floats_of_8_bits_in_floats() -> None:
    program = calibrated(residual(16), FLOAT8)
    final = passes.run(program, ON)
    assert not any("quantized" in op for op in ops(final)) and "fake_quantize" in ops(final)
    assert {dtype for _, dtype in final.types.values()} == {"float32"}


def test_a_compiled_network_rounds_to_floats_of_8_bits() -> None:
    """As the interpreter, on a CPU; a sum in float32 may round to the next one."""
    program = calibrated(residual(16), FLOAT8)
    (x,), tensors = inputs(program), weights(program)
    (found,) = Executor.compile(program, tensors, CPU())(x)
    wanted, plain = (interpret(p, [x], tensors)["logits"] for p in (program, residual(16)))
    most = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 0.002 * most < np.abs(plain - wanted).max()


@pytest.mark.parametrize(
    ("channels", "filters", "low", "padding", "taken"),
    [
        (16, 32, 0.0, 1, True),
        (16, 32, -99.0, 0, True),
        (16, 32, -99.0, 1, False),  # the copy engine pads with 0, which stands for something else
        (24, 32, 0.0, 1, False),
        (16, 24, 0.0, 1, False),
    ],
)
def test_what_hopper_takes(
    channels: int, filters: int, low: float, padding: int, taken: bool
) -> None:
    net = Net("layer")
    x = net.op("permute", [net.input("x", (BATCH, 9, 8, channels))], axes=(0, 3, 1, 2))
    x = net.op("fake_quantize", [x], scale=0.03, low=low, high=low + 255)
    weight = net.op("fake_quantize_filter", [net.weight("w", filters, channels, 3, 3)])
    y = net.op("conv2d", [x, weight], "layer", padding=padding)
    net.output("y", net.op("permute", [y], axes=(0, 2, 3, 1)))
    assert ("quantized_conv2d" in ops(passes.run(net.program(), HOPPER))) is taken


def test_hopper_gets_floats_of_8_bits() -> None:
    import torch

    rng = np.random.default_rng(0)
    f, k = 32, 48
    tensors = {
        "w": rng.standard_normal((k, f)).astype(np.float32),
        "b": rng.standard_normal(f).astype(np.float32),
    }
    of_x, added, result = Float8(0.03), Float8(0.4), Float8(0.9)
    with Graph("hopper", input_types=[]):
        parameters = Parameters(tensors, DeviceRef.GPU(), DType.bfloat16)
        filter, _, numbers = parameters.quantized("w", "b", 1, of_x, added, result)
        assert filter.dtype == DType.float8_e4m3fn
        filters, product, bias = (each.array() for each in parameters.bound.values())
        (kind,) = {each.dtype for each in parameters.bound.values()} - {DType.float32}
    assert filters.dtype == np.uint8 and buffer(filters, kind).dtype == DType.float8_e4m3fn
    w = torch.from_numpy(tensors["w"].T).double()
    steps = w.abs().amax(1, keepdim=True) / 448
    whole = (w / steps).to(torch.float8_e4m3fn)
    rows = np.empty((f, k), np.uint8)
    rows[quads_of(f)] = filters.reshape(f, k)
    np.testing.assert_array_equal(rows, whole.view(torch.uint8).numpy())
    assert numbers == [0, added.scale / result.scale, 0, 1, 0]
    np.testing.assert_allclose(product, steps.numpy().ravel() * (0.03 / 0.9), 1e-6)
    np.testing.assert_allclose(bias, tensors["b"] / 0.9, 1e-6)


def quads_of(f: int) -> np.ndarray:
    """Lists which filter is where, of results of 8 bits."""
    sixteen = np.arange(16).reshape(8, 2).T.reshape(-1)
    return np.arange(f).reshape(-1, 16)[:, sixteen].reshape(-1)


def test_hopper_adds_zero_points_to_the_bias() -> None:
    rng = np.random.default_rng(0)
    f, k = 32, 48
    whole = rng.integers(-127, 128, (k, f))
    whole[0] = 127
    scales = rng.uniform(0.01, 0.02, f)
    tensors = {"w": (whole * scales).astype(np.float32), "b": rng.standard_normal(f)}
    x, residual = rng.integers(0, 256, (9, k)), rng.integers(0, 256, (9, f))
    of_x, added, result = Grid(0.03, -7), Grid(0.4, -100), Grid(0.9, -130)
    with Graph("hopper", input_types=[]):
        parameters = Parameters(tensors, DeviceRef.GPU(), DType.bfloat16)
        _, _, numbers = parameters.quantized("w", "b", 1, of_x, added, result)
        held = [each.array().astype(np.float64) for each in parameters.bound.values()]
    filter, product, bias = held
    rows = np.empty((f, k))
    rows[quads_of(f)] = filter.reshape(f, k)
    np.testing.assert_array_equal(rows, whole.T)
    got = x @ rows.T * product + bias + numbers[1] * residual
    y = ((x - 7) * 0.03) @ (whole * scales) + tensors["b"] + (residual - 100) * 0.4
    np.testing.assert_allclose(got, y / 0.9 + 130, 1e-5, 1e-3)
    assert numbers[:1] + numbers[2:] == [0, 0, 1, 0]


def bottlenecks(width: int = 64, following: int = 64, bias: bool = True, stem: int = 32) -> Program:
    """A stem, a block with a shortcut, two without, and one of a stride; a classifier."""
    net = Net("bottlenecks")
    x = net.relu(net.conv2d(net.input("x", (BATCH, 3, 6, 5)), "stem", stem, 3, padding=1))
    for i, (c, stride) in enumerate(((width, 1), (width, 1), (width, 1), (following, 2))):
        with net.at(i):
            y = net.relu(net.conv2d(x, "one", c, 1, bias=bias))
            y = net.relu(net.conv2d(y, "two", c, 3, stride=stride, padding=1, bias=bias))
            y = net.conv2d(y, "three", 80, 1, bias=bias)
            if not i or stride > 1:
                x = net.conv2d(x, "shortcut", 80, 1, stride=stride, bias=bias)
            x = net.relu(y + x)
    x = net.relu(net.conv2d(x, "last", 16, 1))
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 5))
    return net.program()


SHORTCUT, CHAIN = "quantized_conv2d_shortcut", "quantized_conv2d_chain"
BOTH = "quantized_conv2d_shortcut_chain"


def unfused(program: Program) -> Program:
    return passes.run(program, HOPPER, {"shortcut", "chain"})


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("c", "f", "stem", "found"),
    [*((*each, 32, (2, 2, 0)) for each in CHAINS), (64, 64, 64, (1, 2, 1))],
)
@pytest.mark.parametrize("bias", [True, False])
def test_on_hopper_bottlenecks_are_shortcuts_and_chains_of_8_bits(
    dtype: str, c: int, f: int, stem: int, found: tuple[int, int, int], bias: bool
) -> None:
    program = calibrated(bottlenecks(c, f, bias, stem), dtype)
    final, apart = passes.run(program, HOPPER), unfused(program)
    assert Program.from_json(final.to_json()) == final
    assert tuple(ops(final).count(op) for op in (SHORTCUT, CHAIN, BOTH)) == found
    assert {SHORTCUT, CHAIN, BOTH}.isdisjoint(ops(apart)) and final.in_bytes == apart.in_bytes == 15
    kinds = {final.types[v].dtype for n in final.nodes if n.op in (SHORTCUT, CHAIN, BOTH)
             for v in n.outputs}  # fmt: skip
    assert kinds == {KINDS[dtype](1.0, *[0][: dtype == "int8"]).stored}
    ends = [n.attributes["epilogue"] for n in final.nodes if n.op == SHORTCUT]
    assert ends == ["none" if dtype == "int8" else "relu"] * found[0]
    given, tensors = inputs(program), weights(program)
    before, between, after = (
        interpret(each, given, tensors)["logits"] for each in (program, apart, final)
    )
    np.testing.assert_allclose(between, before, 1e-9, 1e-9)
    # What differs is that a shortcut's result is not rounded.
    most = 0.03 if dtype == "int8" else 0.1
    assert 0 < np.abs(after - before).max() < most * np.abs(before).max()
    shortcuts = {n.output for n in program.nodes if str(n.layers).count("shortcut")}
    assert len(shortcuts) == 2
    plain = without_rounding(program, shortcuts)
    np.testing.assert_allclose(interpret(plain, given, tensors)["logits"], after, 1e-9, 1e-9)


def without_rounding(program: Program, values: set[str]) -> Program:
    """Leaves out what rounds some values."""
    gone = {n.output: n.inputs[0] for n in program.nodes
            if n.op == "fake_quantize" and n.inputs[0] in values}  # fmt: skip
    kept = [
        replace(node, inputs=tuple(gone.get(value, value) for value in node.inputs))
        for node in program.nodes
        if node.output not in gone
    ]
    return rebuilt(program, kept)


def made_by(program: Program, node: Node) -> list[str]:
    """Lists the ops whose results a node reads."""
    return [program.producers[x].op for x in node.inputs if x in program.producers]


@pytest.mark.parametrize("dtype", KINDS)
def test_what_a_chain_reads_and_gives_may_lie_around_zero(dtype: str) -> None:
    """Levels that are no rectified ones have no relu before them: of integers a chain has none."""
    net, kind = Net("linear"), KINDS[dtype]
    x = net.op("fake_quantize", [net.input("x", (BATCH, 64, 4, 3))], **around(kind, 0.03))
    beside = net.op("fake_quantize", [net.input("beside", (BATCH, 80, 4, 3))], **around(kind, 0.02))
    to = {} if dtype == "int8" else {"to": dtype}
    end = net.relu if dtype == FLOAT8 else (lambda y: y)
    for name, (f, c), scale in (("one", (80, 64), 0.05), ("two", (64, 80), 0.04)):
        weight = net.op("fake_quantize_filter", [net.weight(f"{name}.weight", f, c, 1, 1)], **to)
        y = net.op("conv2d", [x, weight], name)
        y = end(y + beside) if name == "one" else end(y)
        x = net.op("fake_quantize", [y], **around(kind, scale))
    last = net.op("fake_quantize_filter", [net.weight("last.weight", 16, 64, 1, 1)], **to)
    net.output("y", net.op("conv2d", [x, last], "last"))
    program = net.program()
    final = passes.run(program, HOPPER)
    assert ops(final).count(CHAIN) == 1
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors)["y"] for each in (program, final))
    np.testing.assert_allclose(after, before, 1e-9, 1e-9)


def around(kind: type[Grid] | type[Float8], scale: float) -> dict[str, Any]:
    return dict((Grid(scale, -131) if kind is Grid else Float8(scale / 2)).attributes)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("why", "shortcuts", "chains"),
    [("widths", 2, 0), ("a float", 1, 1), ("a reader", 1, 3), ("pass", 0, 0)],
)
def test_8_bits_that_are_not_fused(why: str, shortcuts: int, chains: int, dtype: str) -> None:
    program = calibrated(bottlenecks(*((80, 80) if why == "widths" else (64, 64))), dtype)
    if why == "a float":  # what the last two blocks give is not rounded
        sums = [n.output for n in program.nodes if n.op == "relu" and "add" in made_by(program, n)]
        program = without_rounding(program, set(sums[-2:]))
    if why == "a reader":
        value = next(n.output for n in program.nodes if n.layers == ("0.shortcut",))
        program = replace(program, outputs={**program.outputs, "seen": value})
    off = {"shortcut", "chain"} if why == "pass" else set[str]()
    final = passes.run(program, HOPPER, off)
    assert (ops(final).count(SHORTCUT), ops(final).count(CHAIN)) == (shortcuts, chains)
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors)["logits"] for each in (program, final))
    assert np.abs(after - before).max() < 0.1 * np.abs(before).max()


def test_a_cpu_has_no_shortcuts_and_chains_of_8_bits() -> None:
    final = passes.run(calibrated(bottlenecks()), ON)
    assert "quantized_conv2d" in ops(final) and {SHORTCUT, CHAIN}.isdisjoint(ops(final))


SIDES: dict[str, tuple[Any, Any, Any]] = {
    "zero points": (Grid(0.03, -7), Grid(0.02, -131), Grid(0.9, -100)),
    "no zero points": (Grid(0.02, 0), Grid(0.05, 0), Grid(1.5, 0)),
    "a far finer shortcut": (Grid(0.03, -7), Grid(1e-4, -9), Grid(0.9, -100)),
    "floats": (Float8(0.03), Float8(0.2), Float8(0.9)),
}
"""What the 8 bits stand for of what two convolutions read, and of their sum."""


@pytest.mark.parametrize("steps", ["", "named"])
@pytest.mark.parametrize("name", SIDES)
def test_sums_of_a_shortcut_are_those_of_two_convolutions(name: str, steps: str) -> None:
    """As Hopper's kernel computes them: of integers first sums are multiples of the second's."""
    import torch

    rng, f, depths = np.random.default_rng(0), 32, (48, 80)
    *grids, result = SIDES[name]
    floats = isinstance(result, Float8)
    tensors: dict[str, np.ndarray] = {}
    for i, k in enumerate(depths):
        tensors[f"{i}.w"] = (rng.standard_normal((k, f)) * 0.1).astype(np.float32)
        tensors[f"{i}.b"] = rng.standard_normal(f).astype(np.float32)
        signs = rng.choice([-1, 1], f)
        tensors[f"{i}.s"] = signs * rng.uniform(0.9, 1.1, f) * (0.3 / (448 if floats else 127))
    named = ("0.s", "1.s") if steps else ("", "")
    with Graph("hopper", input_types=[]):
        parameters = Parameters(tensors, DeviceRef.GPU(), DType.bfloat16)
        parameters.quantized_shortcut(("0.w", "1.w"), ("0.b", "1.b"), tuple(grids), result, named)
        held = [each.array() for each in parameters.bound.values()]
    first_rows, first_bias, second_rows, second_bias, product, first = held
    x = [rng.integers(0, 256, (9, k)) if not floats else e4m3(8 * rng.standard_normal((9, k)))
         for k in depths]  # fmt: skip
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    rows = []
    for held_rows, k in ((first_rows, depths[0]), (second_rows, depths[1])):
        unquad = np.empty((f, k))
        unquad[quads_of(f)] = (numbers[held_rows] if floats else held_rows).reshape(f, k)
        rows.append(unquad)
    sums = [each @ row.T for each, row in zip(x, rows, strict=True)]
    if not floats:
        bound = 255 * np.abs(rows[0]).sum(1) * np.abs(first)
        assert (bound <= 2**26 * (1 + 1e-6)).all()
        coarse = name == "a far finer shortcut"
        assert (np.abs(rows[1]).max() < 100) == coarse
    got = (sums[0] * first + sums[1]) * product + first_bias + second_bias
    want = np.zeros((9, f))
    for i, grid in enumerate(grids):
        w = tensors[f"{i}.w"].T
        by_filter = tensors[f"{i}.s"] if steps else filter_scales(w, result.factor)
        whole = quantized_filter(w, by_filter, result.factor).astype(np.float64)
        want += ((x[i] + grid.low) * grid.scale) @ (whole * by_filter[:, None]).T
        want += tensors[f"{i}.b"]
    np.testing.assert_allclose(got, want / result.scale - result.low, 2e-6, 2e-3)


def pooled(width: int = 16, last: int = 8) -> Program:
    """A network of pixels [N, 33, 20, 3] in uint8: a stem, a pool, a convolution, a classifier."""
    net = Net("pooled")
    x = net.input("x", (BATCH, 3, 33, 20))
    x = net.relu(net.conv2d(x, "stem", width, 7, stride=2, padding=3))
    x = net.relu(net.conv2d(net.max_pool2d(x, 3, stride=2, padding=1), "a", last, 1))
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 5))
    return net.program()


def with_pixels(write: Callable[[], Program]) -> Program:
    plain = write()
    values, layers = places(plain, pixels=True)
    assert "x" in values and "stem" in layers
    program = from_pixels(plain, "uint8", "float32")
    how = Quantization({name: Grid(0.02, -115) for name in values}, tuple(layers))
    return quantized(program, how)


IN_16_BITS = Backend("cuda", "bfloat16", architecture="sm_90a")


@pytest.mark.parametrize(
    ("plain", "op"), [(pooled(32, 16), "stem_maxpool"), (residual(16), "stem_conv2d")]
)
def test_on_hopper_a_stem_stores_bytes(plain: Program, op: str) -> None:
    program = calibrated(from_pixels(plain, "uint8", "bfloat16"))
    final = passes.run(program, IN_16_BITS)
    assert Program.from_json(final.to_json()) == final
    stem, layer, *_ = [node for node in final.nodes if not node.at_load]
    assert (stem.op, layer.op) == (op, "quantized_conv2d") and stem.layers == ("stem",)
    assert final.types[stem.output].dtype == "uint8" and layer.inputs[0] == stem.output
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors)["logits"] for each in (program, final))
    np.testing.assert_allclose(after, before, 1e-9, 1e-9)
    older = passes.run(program, Backend("cuda", "bfloat16", architecture="sm_80"))
    assert older.types[next(n for n in older.nodes if n.op == op).output].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "low", "scale", "seen", "taken"),
    [
        ("relu", 0.0, 0.03, "", True),
        ("relu6", 0.0, 6 / 255, "", True),
        ("relu6", 0.0, 7 / 255, "", False),  # levels beyond the clamp
        ("silu", 0.0, 0.03, "", False),
        ("relu", -9.0, 0.03, "", False),
        ("relu", 0.0, 0.03, "before", False),  # what is not rounded is an output
        ("relu", 0.0, 0.03, "behind", True),
    ],
)
def test_stems_that_store_bytes(
    name: str, low: float, scale: float, seen: str, taken: bool
) -> None:
    net = Net("rounded")
    x = net.conv2d(net.input("x", (BATCH, 3, 9, 8)), "stem", 16, 3, padding=1)
    x = getattr(net, name)(x) if hasattr(net, name) else net.op(name, [x])
    if seen == "before":
        net.output("seen", x)
    x = net.op("fake_quantize", [x], scale=scale, low=low, high=low + 255)
    if seen == "behind":
        net.output("seen", x)
    weight = net.op("fake_quantize_filter", [net.weight("w", 16, 16, 1, 1)])
    net.output("y", net.op("conv2d", [x, weight], "layer"))
    program = from_pixels(net.program(), "uint8", "bfloat16")
    final = passes.run(program, IN_16_BITS)
    stem = next(node for node in final.nodes if node.op == "stem_conv2d")
    assert "quantized_conv2d" in ops(final)
    assert ops(final).count("pointwise") == (not taken) + (seen == "behind")
    assert final.types[stem.output].dtype == ("uint8" if taken else "bfloat16")
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors) for each in (program, final))
    for output, want in before.items():
        np.testing.assert_allclose(after[output], want, 1e-9, 1e-9)


@pytest.mark.parametrize("write", [pooled, residual])
def test_the_first_layer_reads_bytes_of_pixels(write: Callable[[], Program]) -> None:
    program = with_pixels(write)
    final = passes.run(program, ON)
    first = [(n.op, final.types[n.output].dtype) for n in final.nodes if not n.at_load][:3]
    second = "max_pool2d" if write is pooled else "quantized_conv2d"
    assert first == [(op, "uint8") for op in ("normalize", "quantized_conv2d", second)]
    given, tensors = inputs(program), weights(program)
    before, after = (interpret(each, given, tensors)["logits"] for each in (program, final))
    np.testing.assert_allclose(after, before, 1e-9, 1e-9)
    hopper = passes.run(program, HOPPER)
    np.testing.assert_allclose(interpret(hopper, given, tensors)["logits"], before, 1e-9, 1e-9)


def test_inputs_are_rounded_where_a_network_takes_images() -> None:
    """As in config.json's network; there the images have no node before them."""
    plain = pooled()
    values, layers = places(plain, pixels=True)
    how = Quantization(dict.fromkeys(values, Grid(0.02, -115)), tuple(layers))
    program = quantized(plain, how)
    assert program.nodes[0].op == "fake_quantize_filter"  # what runs at load comes first
    rounding = next(node for node in program.nodes if node.op == "fake_quantize")
    assert rounding.inputs == ("x",)
    assert next(n for n in program.nodes if n.layers == ("stem",)).inputs[0] == rounding.output


def test_pixels_become_the_levels_that_they_are_rounded_to() -> None:
    """All 256 of each channel, normalised as ImageNet's; a max pool of bytes too."""
    import torch
    from torch.nn import functional as F

    mean = np.array([0.485, 0.456, 0.406, 0.5]) * 255
    scale = 1 / (np.array([0.229, 0.224, 0.225, 0.2]) * 255)
    device, grids = DeviceRef.CPU(), [Grid(4.75 / 255, -114), Grid(0.031, -70), Grid(0.011, -255)]
    sizes = [(16, 16), (1, 1), (3, 7)]
    kinds = [(c, h, w) for c in (1, 3, 4) for h, w in sizes]
    random = np.random.default_rng(0)
    given = [random.integers(0, 256, (2, h, w, c), np.uint8) for c, h, w in kinds]
    for x in given[::3]:
        x[0] = np.arange(256).reshape(16, 16, 1)
    image = random.integers(0, 256, (2, 9, 8, 83), np.uint8)  # vectors of 64 and of 16, and 3 more
    with Graph(
        "bytes",
        input_types=[TensorType(DType.uint8, x.shape, device) for x in given],
        custom_extensions=[cache.library(frozenset({"normalize", "maxpool"}), gpu=False)],
    ) as graph:
        outputs = []
        for x in graph.inputs:
            for grid in grids:
                c = int(x.tensor.shape[3])
                whole = (m.astype(np.float32) for m in (mean[:c], scale[:c]))
                levels, step = whole
                at = EVALUATE["bytes_mean"](levels, step, step=grid.scale, low=grid.low)
                by = EVALUATE["bytes_scale"](step, step=grid.scale)
                constants = [
                    graph_ops.constant(each, DType.float32, device=device) for each in (at, by)
                ]
                outputs.append(nodes.normalize(x.tensor, *constants, DType.uint8, 4))
        wide = graph_ops.constant(image, DType.uint8, device=device)
        outputs.append(nodes.maxpool(wide, kernel=3, stride=2, padding=1))
        graph.output(*outputs)
    model = InferenceSession(devices=[CPU()]).load(graph)
    *found, pooled = (each.to_numpy() for each in model.execute(*given))
    images = torch.from_numpy(image).permute(0, 3, 1, 2).double()
    want = F.max_pool2d(images, 3, 2, 1).permute(0, 2, 3, 1).numpy()
    assert pooled.dtype == np.uint8 and (pooled == want).all()
    for i, x in enumerate(given):
        c = x.shape[3]
        for grid, y in zip(grids, found[len(grids) * i : len(grids) * (i + 1)], strict=True):
            assert y.shape == (*x.shape[:3], 4) and not y[..., c:].any()
            means, scales = (m[:c].astype(np.float32).astype(np.float64) for m in (mean, scale))
            exact = (x - means) * scales / grid.scale - grid.low
            ties = np.abs(exact - np.floor(exact) - 0.5) < 1e-4
            want = np.clip(np.rint(exact), 0, 255)
            assert (y[..., :c] == want)[~ties].all() and ties.mean() < 0.02


def test_numbers_are_rounded_to_floats_of_8_bits_as_torch_does() -> None:
    """All of them, what lies midway between two and beside that, and others; NaN and infinity."""
    import torch

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.unique(every[np.isfinite(every)])
    middles = (finite[1:] + finite[:-1]) / 2
    random = np.random.default_rng(0)
    drawn = random.standard_normal(10_000) * 2.0 ** random.integers(-14, 10, 10_000)
    beside = [np.nextafter(middles, np.float32(side)) for side in (np.inf, -np.inf)]
    ends = np.float32([448, 463, 464, 465, 1e30, np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40])
    x = np.concatenate([every, middles, *beside, drawn, ends]).astype(np.float32)
    want = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(e4m3(x), want.float().numpy())
    bits, known = want.view(torch.uint8).numpy(), ~np.isnan(x)
    np.testing.assert_array_equal(e4m3_bits(x)[known], bits[known])
    assert set(e4m3_bits(x)[~known] & 0x7F) == {0x7F}


def test_filters_are_rounded_to_floats_of_8_bits() -> None:
    import torch

    w = np.random.default_rng(0).standard_normal((7, 5, 3, 3)).astype(np.float32)
    w[3] = 0
    largest = torch.from_numpy(w).double().abs().amax((1, 2, 3))
    scales = torch.where(largest > 0, largest, 448).div(448)[:, None, None, None]
    want = (torch.from_numpy(w) / scales).to(torch.float8_e4m3fn).double() * scales
    rounded_filter = EVALUATE["fake_quantize_filter"]
    np.testing.assert_allclose(rounded_filter(w, to=FLOAT8), want.numpy(), 1e-7)
    named = rounded_filter(w, np.full(7, 0.5), to=FLOAT8)
    want = (torch.from_numpy(w) * 2).to(torch.float8_e4m3fn).float() / 2
    np.testing.assert_array_equal(named, want.numpy())


def test_of_floats_of_8_bits_what_hopper_multiplies_is_rounded() -> None:
    net = Net("layers")
    x = net.conv2d(net.input("x", (BATCH, 3, 9, 8)), "stem", 32, 1)
    for name, filters, groups in [("whole", 32, 1), ("depthwise", 32, 32), ("odd", 24, 1)]:
        x = net.conv2d(net.relu(x), name, filters, 3, padding=1, groups=groups)
    x = net.conv2d(net.relu(net.conv2d(net.relu(x), "of odd", 16, 1)), "last", 48, 1)
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(net.relu(x))), "head", 5))
    program = net.program()
    assert places(program, dtype=FLOAT8)[1] == ["whole", "last"]
    assert places(program)[1] == ["whole", "depthwise", "odd", "of odd", "last"]


def transformer(width: int, hidden: int) -> Program:
    """Two blocks of attention and an MLP, and a convolution of what they give."""
    net = Net("transformer")
    tokens = net.layer_norm(net.linear(net.input("x", (BATCH, 16, 64)), "begin", width), "norm")
    for i in range(2):
        with net.at(f"block.{i}"):
            y = attend(net, [net.layer_norm(tokens, "norm1")] * 3, 2)
            tokens = tokens + net.linear(y, "out", width)
            y = net.gelu(net.linear(net.layer_norm(tokens, "norm2"), "up", hidden))
            tokens = tokens + net.linear(y, "down", width)
    image = net.channels_first(net.reshape(tokens, BATCH, 4, 4, width))
    x = net.relu(net.conv2d(image, "end", 32, 3, padding=1))
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 3))
    return net.program()


@pytest.mark.parametrize(
    ("width", "wide"), [(96, {"out", "up", "down"}), (64, set())], ids=["wide", "one op"]
)
def test_of_floats_of_8_bits_what_is_faster_in_16_stays(width: int, wide: set[str]) -> None:
    layers = places(transformer(width, 4 * width), dtype=FLOAT8)[1]
    assert {layer.split(".")[-1] for layer in layers} - {"q", "k", "v"} == wide
    assert len(layers) == 2 * (3 + len(wide))  # neither "end", which reads a sum, nor "begin"
    assert "end" in places(transformer(width, 4 * width))[1]


def test_what_reads_a_rounded_sum_is_rounded() -> None:
    net = Net("sums")
    x = net.relu(net.conv2d(net.input("x", (BATCH, 3, 9, 8)), "stem", 32, 1))
    for i in range(3):
        y = net.relu(net.conv2d(x, f"{i}.one", 64, 1))
        x = net.conv2d(y, f"{i}.two", 32, 1) + x
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 5))
    found = places(net.program(), dtype=FLOAT8)[1]
    assert found == [f"{i}.{name}" for i in range(3) for name in ("one", "two")]


def test_pixels_the_classifier_and_small_layers_stay() -> None:
    values, layers = places(residual())
    assert layers == ["a.one", "a.two", "b.one", "b.two", "b.shortcut"]
    assert len(values) == 5  # what four blocks' layers read, and the shortcut's result


def test_a_layer_that_is_kept_reads_what_was_not_rounded() -> None:
    program = residual()
    values, layers = places(program)
    how = Quantization(dict.fromkeys(values, Grid(0.1, 0)), tuple(layers)).without(["a.two"])
    made = {node.layers: node for node in quantized(program, how).nodes if node.layers}
    assert made["a.two",].inputs == next(n for n in program.nodes if n.layers == ("a.two",)).inputs
    assert made["b.one",].inputs[0].endswith(".rounded")


def test_a_grid_has_zero_and_all_that_was_seen() -> None:
    assert Grid.of(0.0, 2.55) == pytest.approx((0.01, 0))
    assert Grid.of(3.0, 5.1) == Grid(5.1 / 255, 0)
    assert Grid.of(0.0, 0.0) == Grid(1.0, 0)
    grid = Grid.of(-1.0, 3.0)
    assert grid.low == -64 and -1.01 < grid.scale * grid.low < -0.99
    assert Float8.of(-448.0, 3.0) == Float8(1.0) == Float8.of(0.0, 0.0)
    assert Float8.of(0.0, 44.8).scale == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", KINDS)
def test_methods_choose_ranges(dtype: str) -> None:
    seen = Seen()
    numbers = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    seen.add(np.append(numbers, np.float32(100)))
    kind = KINDS[dtype]
    scales = {method: seen.grid(method, kind).scale for method in ("max", "percentile", "mse")}
    assert scales["percentile"] < 0.1 * scales["max"]
    assert scales["mse"] < scales["max"] or (dtype == FLOAT8 and scales["mse"] == scales["max"])
    (samples,) = seen.samples
    errors = [
        float(np.square(rounded(samples, seen.grid(method, kind)) - samples).mean())
        for method in ("max", "mse")
    ]
    assert errors[1] <= errors[0]


def test_config_json_holds_it() -> None:
    how = Quantization({"x": Grid(0.125, -3)}, ("a", "b"))
    assert how.to_config() == {"dtype": "int8", "values": {"x": [0.125, -3]}, "layers": ["a", "b"]}
    assert Quantization.from_config({CONFIG: how.to_config()}, "m") == how
    how = Quantization({"x": Float8(0.125)}, ("a", "b"), FLOAT8)
    assert how.to_config() == {"dtype": FLOAT8, "values": {"x": [0.125]}, "layers": ["a", "b"]}
    found = Quantization.from_config({CONFIG: how.to_config()}, "m")
    assert found == how and isinstance(found.values["x"], Float8)
    assert Quantization.from_config({}, "m") is None is Quantization.from_config(None, "m")


@pytest.mark.parametrize(
    "wrong",
    [
        3, {}, {"values": {}, "layers": []}, {"values": {"x": 1}, "layers": [], "dtype": "int8"},
        {"values": {"x": [0.0, 0]}, "layers": [], "dtype": "int8"},
        {"values": {"x": [1.0, 5]}, "layers": [], "dtype": "int8"},
        {"values": {}, "layers": [], "dtype": "int4"},
        {"values": {"x": [1.0, 0]}, "layers": [], "dtype": FLOAT8},
        {"values": {"x": [-1.0]}, "layers": [], "dtype": FLOAT8},
        {"values": {"x": [1.0]}, "layers": [], "dtype": "int8"},
    ],
)  # fmt: skip
def test_a_wrong_config_json_is_told(wrong: Any) -> None:
    with pytest.raises(ModelError, match=r"m: maxvision_quantization in config.json .* again"):
        Quantization.from_config({CONFIG: wrong}, "m")


def test_what_the_network_lacks_is_told() -> None:
    with pytest.raises(ModelError, match="names nowhere, which the network does not have"):
        quantized(residual(), Quantization({}, ("nowhere",)))


CONVOLUTIONS: list[dict[str, Any]] = [
    {"size": (7, 6), "c": 20, "f": 70, "r": 3, "padding": 1, "zero": 13},
    {"size": (9, 5), "c": 64, "f": 16, "r": 3, "stride": 2, "padding": 1, "zero": 255, "out": 7},
    {"size": (5, 5), "c": 4, "f": 3, "r": 1, "zero": 0, "epilogue": "relu", "out": 0},
    {"size": (4, 7), "c": 8, "f": 64, "r": 1, "zero": 128, "epilogue": "add_relu", "out": 30},
    {"size": (4, 4), "c": 12, "f": 65, "r": 1, "zero": 3, "epilogue": "add"},
    {"size": (7, 9), "c": 16, "f": 83, "r": 1, "zero": 3, "epilogue": "add_relu", "out": 9,
     "rounded": 131},
    {"size": (7, 7), "c": 12, "f": 64, "r": 3, "zero": 3, "epilogue": "add_relu", "out": 77,
     "rounded": 0},
    {"size": (6, 6), "c": 520, "f": 9, "r": 3, "padding": 1, "zero": 100, "groups": 1},
    {"size": (6, 5), "c": 24, "f": 6, "r": 3, "padding": 1, "zero": 9, "groups": 3, "out": 99},
    {"size": (9, 15), "c": 40, "f": 40, "r": 3, "padding": 1, "zero": 31, "groups": 40, "out": 9,
     "epilogue": "relu"},
    {"size": (5, 5), "c": 18, "f": 18, "r": 5, "stride": 2, "padding": 2, "zero": 0, "groups": 18,
     "epilogue": "add"},
    {"size": (8, 8), "c": 8, "f": 8, "r": 3, "padding": 2, "dilation": 2, "zero": 77,
     "epilogue": "silu", "out": 50},
    {"size": (8, 8), "c": 32, "f": 32, "r": 3, "padding": 1, "zero": 71, "groups": 32,
     "epilogue": "add"},
    {"size": (8, 8), "c": 32, "f": 32, "r": 3, "padding": 1, "zero": 71, "groups": 32, "out": 3},
    # Depthwise in 8 bits: all windows, two rows of a quad, steps of 64, 32 and 16 channels, edges.
    {"size": (7, 9), "c": 100, "f": 100, "r": 3, "padding": 1, "zero": 255, "groups": 100, "out": 8,
     "n": 3},
    {"size": (8, 6), "c": 212, "f": 212, "r": 3, "stride": 2, "padding": (0, 0, 1, 1), "zero": 128,
     "groups": 212, "out": 4, "n": 1},
    {"size": (11, 7), "c": 84, "f": 84, "r": 5, "padding": 2, "zero": 128, "groups": 84, "out": 40},
    {"size": (10, 13), "c": 49, "f": 49, "r": 5, "stride": 2, "padding": 2, "zero": 255,
     "groups": 49, "epilogue": "add", "out": 60},
    {"size": (2, 9), "c": 72, "f": 72, "r": 7, "padding": (3, 1, 4, 4), "zero": 200, "groups": 72,
     "out": 90},
]  # fmt: skip


def test_integers_are_multiplied_exactly() -> None:
    """All numbers of activations and weights at their limits among them; saturation too."""
    random, device = np.random.default_rng(0), DeviceRef.CPU()
    tensors: dict[str, np.ndarray] = {}
    given: list[np.ndarray] = []
    wanted = []
    parameters = Parameters(tensors, device, DType.float32)
    for i, case in enumerate(CONVOLUTIONS):
        groups, r = case.get("groups", 1), case["r"]
        whole = random.integers(-127, 128, (r, r, case["c"] // groups, case["f"]))
        whole[0, 0, 0, :] = 127  # so that a filter's scale is what follows
        scales = random.uniform(0.001, 0.002, case["f"])
        tensors[f"{i}.weight"] = (whole * scales).astype(np.float32)
        tensors[f"{i}.bias"] = random.standard_normal(case["f"]).astype(np.float32)
        x = random.integers(0, 256, (case.get("n", 2), *case["size"], case["c"]), np.uint8)
        x[0, 0] = 255
        given.append(x)
        wanted.append(_exact(case, x, whole, scales, tensors[f"{i}.bias"], random, given))
    types = [
        TensorType(DType.uint8 if x.dtype == np.uint8 else DType.float32, x.shape, device)
        for x in given
    ]
    with Graph(
        "quantized",
        input_types=types,
        custom_extensions=[cache.library(frozenset({"quantized_conv2d"}), gpu=False)],
    ) as graph:
        left, outputs = [x.tensor for x in graph.inputs], []
        for i, case in enumerate(CONVOLUTIONS):
            x, adds = left.pop(0), case.get("epilogue", "none").startswith("add")
            filter, product, scales = parameters.quantized(
                f"{i}.weight",
                f"{i}.bias",
                case.get("groups", 1),
                Grid(0.01, -case["zero"]),
                Grid(0.02, -5),
                Grid(0.03, -case.get("out", 0)),
                Grid(BETWEEN, -case["rounded"]) if "rounded" in case else None,
            )
            y = nodes.quantized_conv2d(
                x,
                filter,
                product,
                scales=scales,
                dtype="uint8" if "out" in case else "float32",
                residual=left.pop(0) if adds else None,
                **{k: v for k, v in case.items() if k in _WINDOW},
            )
            outputs.append(y)
        graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    model = session.load(graph, weights_registry=parameters.registry(CPU()))
    ends: set[int] = set()
    for case, y, want in zip(CONVOLUTIONS, model.execute(*given), wanted, strict=True):
        found = y.to_numpy()
        if "out" not in case:
            np.testing.assert_allclose(found, want, 2e-6, 2e-6 * np.abs(want).max())
            continue
        known = ~np.isnan(want)
        assert found.dtype == np.uint8 and known.mean() > 0.99
        found, want = found[known], want[known]
        ties = np.abs(want - np.floor(want) - 0.5) < 1e-3
        whole = np.clip(np.rint(want), 0, 255)
        ends |= set(found.ravel().tolist()) & {0, 255}
        assert (found == whole)[~ties].all() and np.abs(found - whole).max() <= 1
    assert ends == {0, 255}, "nothing saturates"


_WINDOW = ("stride", "padding", "dilation", "epilogue")
BETWEEN = 0.003
"""A step of what a residual is added to, where that is rounded."""


def _exact(
    case: dict[str, Any],
    x: np.ndarray,
    whole: np.ndarray,
    scales: np.ndarray,
    bias: np.ndarray,
    random: np.random.Generator,
    given: list[np.ndarray],
) -> np.ndarray:
    """Computes a case in float64, before its result is rounded; draws its residual.

    Where what it is added to may be rounded to either of two integers, the result is NaN.
    """
    import torch
    from torch.nn import functional as F

    images = torch.from_numpy(x.astype(np.float64) - case["zero"]).permute(0, 3, 1, 2)
    window = {k: v for k, v in case.items() if k in ("stride", "dilation", "groups")}
    top, left, bottom, right = sides(case.get("padding", 0))
    images = F.pad(images, (left, right, top, bottom))
    filters = torch.from_numpy(whole.astype(np.float64)).permute(3, 2, 0, 1)
    sums = F.conv2d(images, filters, **window).permute(0, 2, 3, 1).numpy()
    y = sums * (scales * 0.01) + bias
    epilogue = case.get("epilogue", "none")
    if "rounded" in case:
        exact, zero = y / BETWEEN, case["rounded"]
        steps = np.clip(np.rint(exact), -zero, 255 - zero)
        assert {*np.unique(steps)} >= {-zero, 255 - zero}, "nothing saturates"
        ties = np.abs(exact - np.floor(exact) - 0.5) < 1e-3
        y = np.where(ties, np.nan, steps * BETWEEN)
    if epilogue.startswith("add"):
        if "out" in case:
            beside = random.integers(0, 256, y.shape, np.uint8)
            y = y + (beside - 5.0) * 0.02
        else:
            beside = random.standard_normal(y.shape).astype(np.float32)
            y = y + beside * 0.02
        given.append(beside)
    if "relu" in epilogue:
        y = np.maximum(y, 0)
    if epilogue == "silu":
        y = y / (1 + np.exp(-y))
    return y / 0.03 + case["out"] if "out" in case else y


def test_a_sum_in_a_convolution_is_that_of_a_launch_of_its_own() -> None:
    """To the last bit: with these levels half of the sums lie between two integers."""
    net, random = Net("sums"), np.random.default_rng(0)
    step = float(np.float32(0.0201))
    shapes = {"x": (16, 24, 25), "beside": (84, 24, 25)}
    x, beside = (
        net.op(
            "fake_quantize", [net.input(name, (BATCH, *shape))], scale=step, low=-99.0, high=156.0
        )
        for name, shape in shapes.items()
    )
    drawn = 0.2 * random.standard_normal((84, 16, 1, 1)).astype(np.float32)
    tensors = {f"{name}.weight": drawn for name in ("inside", "apart")}
    tensors["other.weight"] = np.ones((4, 84, 1, 1), np.float32)
    weight_of_other = net.op("fake_quantize_filter", [net.weight("other.weight", 4, 84, 1, 1)])
    for name in ("inside", "apart"):
        weight = net.op("fake_quantize_filter", [net.weight(f"{name}.weight", *drawn.shape)])
        y = net.op("conv2d", [x, weight], name)
        y = net.op("fake_quantize", [y], scale=step, low=-131.0, high=124.0)
        if name == "apart":  # read by another, too, so that it is stored
            net.output("other", net.op("conv2d", [y, weight_of_other], "other"))
        y = net.relu(y + beside)
        net.output(name, net.op("fake_quantize", [y], scale=2 * step, low=-60.0, high=195.0))
    program = net.program()
    final = passes.run(program, ON)
    products = [node for node in final.nodes if node.op == "quantized_conv2d"]
    assert sum("rounded_scale" in node.attributes for node in products) == 1
    assert [node.op for node in final.nodes].count("pointwise") == 4
    run = Executor.compile(program, tensors, CPU())
    given = [random.standard_normal((2, *shape)).astype(np.float32) for shape in shapes.values()]
    found = dict(zip(program.outputs, run(*given), strict=True))
    levels = found["apart"] / (2 * step)
    assert len(np.unique(levels)) > 50 and np.array_equal(found["inside"], found["apart"])


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("kind", [Grid, Float8])
def test_projections_stored_in_8_bits_stand_for_what_they_would_be_rounded_to(
    kind: type[Grid] | type[Float8], token: bool
) -> None:
    grids = {n: kind.of(-1.5, 1 + i) for i, n in enumerate("qkv")}
    net = Net("projections")
    given = [net.input("x", (BATCH, 12 + token, 8)), net.weight("w", 8), net.weight("b", 8)]
    for n in grids:
        given += [net.weight(f"{n}.w", 8, 1, 3, 3), net.weight(f"{n}.b", 8)]
    window = {"size": (3, 4), "kernel": 3, "padding_q": 1, "padding_kv": 1, "stride_kv": 2}
    parts = {n: {f"{n}_scale": of.scale, f"{n}_low": float(of.low)} for n, of in grids.items()}
    numbers = {name: number for each in parts.values() for name, number in each.items()}
    plain = net.several("depthwise_qkv", given, class_token=token, **window)
    stored = net.several(
        "depthwise_qkv", given, class_token=token, dtype=grids["q"].stored, **window, **numbers
    )
    for n, y, levels in zip(grids, plain, stored, strict=True):
        net.output(n, net.op("fake_quantize", [y], **grids[n].attributes))
        net.output(f"{n} in 8 bits", levels)
    program = net.program()
    found = interpret(program, inputs(program), weights(program))
    for n, of in grids.items():
        np.testing.assert_array_equal((found[f"{n} in 8 bits"] + of.low) * of.scale, found[n])


def test_what_is_no_byte_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="quantized_linear: expects x in uint8 or float8_e4m3fn but"
    ):
        from maxvision.graphs.shapes import infer
        from maxvision.graphs.types import Type

        infer("quantized_linear", [Type((2, 4)), Type((3, 4))], {"scale": 1.0, "low": 0.0})
    with pytest.raises(ArgumentError, match="quantized_linear: gives floats or float8_e4m3fn, not"):
        floats = {"scale": 1.0, "dtype": "uint8"}
        infer("quantized_linear", [Type((2, 4), FLOAT8), Type((3, 4))], floats)
    with pytest.raises(ArgumentError, match="fake_quantize: rounds to integers, or to float8_e4m3"):
        infer("fake_quantize", [Type((2, 4))], {"scale": 1.0, "low": 0.0, "to": FLOAT8})
    with pytest.raises(
        ArgumentError, match="fake_quantize_filter: rounds to int8 or float8_e4m3fn"
    ):
        infer("fake_quantize_filter", [Type((2, 4))], {"to": "uint8"})
    with pytest.raises(ArgumentError, match="quantized_linear: rounds what a residual is added to"):
        rounds = {"scale": 1.0, "low": 0.0, "rounded_scale": 1.0, "dtype": "uint8"}
        infer("quantized_linear", [Type((2, 4), "uint8"), Type((3, 4))], rounds)
