"""Programs as MAX graphs: any pass may be left out, and the answers on a CPU are torch's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from maxvision.graphs import nodes, passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import Constants, norm_filter
from maxvision.graphs.cvt import CvtStage
from maxvision.graphs.elementwise import ELEMENTWISE
from maxvision.graphs.lower import EMIT, OTHERS, Canonical, backend, bind, emit, lower
from maxvision.graphs.net import Net, Value
from maxvision.graphs.nodes import dims
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.passes import PASSES
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Program
from maxvision.graphs.shapes import OPS
from maxvision.graphs.types import BATCH, FLOAT8
from maxvision.runtime import cache
from maxvision.runtime.executor import Unchecked
from tests.graphs import nets
from tests.graphs.interpret import inputs, interpret, weights

BOUND = 1e-5  # of float32: the largest difference over the largest number
HERE = DeviceRef.CPU()
TINY = {  # a compilation takes as long as there are ops in all variants
    "resnet": from_pixels(
        nets.program(nets.resnet_of("basic", (1,), (6,), 4, 3, False, True, 3), 3, 12, 16).keep(
            ["logits"]
        ),
        "uint8",
        "float32",
    ),
    "cvt": from_pixels(
        nets.program(
            nets.cvt_of(CvtStage(3, 2, 1, 8, 2, 1, cls_token=True), classes=3), 3, 8, 10
        ).keep(["logits"]),
        "uint8",
        "float32",
    ),
}


def shared(net: Net, x: Value) -> None:
    """Uses one filter twice, with a bias and without; adds weights that are filters as well."""
    weight, bias = net.weight("a.weight", 3, 3, 1, 1), net.weight("a.bias", 3)
    net.output("biased", net.op("conv2d", [x, weight, bias]))
    net.output("plain", net.op("conv2d", [x, weight]))
    tokens = net.permute(net.reshape(x, BATCH, 3, x.size(2) * x.size(3)), 0, 2, 1)
    net.output("added", net.op("add", [tokens, net.weight("b", x.size(2) * x.size(3), 3)]))


STRIDED: tuple[tuple[str, Any, Any, dict[str, Any]], ...] = (
    ("3x3/2", (8, 10), (2, 3, 3), {"stride": 2, "padding": 1}),
    ("1x1/2", (7, 10), (2, 1, 1), {"stride": 2}),
    ("uneven", (9, 19), (2, 3, 5), {"stride": (2, 3), "padding": (2, 1), "dilation": (3, 2)}),
    ("depthwise", (7, 9), (1, 3, 3), {"stride": 2, "padding": 1, "groups": 3}),
)
"""Gradients of inputs by phases: their names, sizes, filters and windows."""


def strange(net: Net, x: Value) -> None:
    """Calls what no network of ours does."""
    y = net.op("cast", [x], dtype="float32")
    net.output("log", net.op("log_softmax", [y]))
    soft = net.op("softmax", [net.slice(y, 2, 1, 3)])
    net.output("soft", soft)
    net.output("softmax's gradient", net.op("softmax_grad", [net.relu(soft), soft]))
    net.output("product", net.op("matmul", [y, y], alpha=0.5, transpose_b=True))
    net.output("mean", net.avg_pool2d(net.max_pool2d(x, 2, stride=(1, 2)), (2, 1)))
    net.output("raw", net.op("avg_pool2d", [x]))
    net.output("norm", net.relu(net.batch_norm(x, "norm")))
    gradient = net.op("conv2d_weight_grad", [x, y], kernel=3, padding=1)
    net.output("gradient", gradient)
    net.output("computed", net.op("conv2d", [x, gradient], padding=1))
    turned = net.op("conv2d_input_grad", [y, net.weight("turned", 3, 2, 2, 2)], size=(5, 6))
    net.output("turned", turned)
    for name, size, shape, window in STRIDED:
        filter = net.weight(name, 3, *shape)
        net.output(f"dx {name}", net.op("conv2d_input_grad", [y, filter], size=size, **window))
    scale, tokens = net.weight("scale", x.size(3)), net.relu(y)
    for name, value in zip(
        ("x", "weight", "bias"), net.several("layer_norm_grad", [y, tokens, scale]), strict=True
    ):
        net.output(f"norm's gradient {name}", value)
    members = [y, tokens, gradient, gradient]
    for name, value in zip(
        "ab", net.several("foreach", members, expression="x0 x1 mul"), strict=True
    ):
        net.output(f"product {name}", value)
    net.output("largest", net.op("max_pool2d_grad", [x, y], kernel=3, stride=1, padding=1))
    net.output("shared", net.op("avg_pool2d_grad", [y], size=(9, 10), kernel=2))
    shapes = (2, 3, 7), (7,), (7,)
    image, *vectors = (net.weight(f"v{i}", *shape) for i, shape in enumerate(shapes))
    ends = "x1 x0 x0 mul sub 1e-05 add rsqrt x2 mul", "x3 x0 x4 add x2 mul sub", "x0 x4 add"
    for name, value in zip(
        ("scale", "shift", "mean"),
        net.several(
            "reduce_results", [image, image, *vectors, image], kind="mean", axes=(0, 1),
            first=(1, 4), expression="x0 x1 sub ; x0 x1 sub x0 x1 sub mul",
            results=" ; ".join(ends), dtypes=("float32",) * 3,
        ), strict=True,
    ):  # fmt: skip
        net.output(f"norm's {name}", value)
    net.output("attended", net.scaled_dot_product_attention(y, y, y))


def rounded(net: Net, x: Value) -> None:
    """Multiplies rounded values by rounded weights."""
    y = net.relu(net.conv2d(x, "stem", 8, 1))
    y = net.op("fake_quantize", [y], scale=0.02, low=0.0, high=255.0)
    filter = net.op("fake_quantize_filter", [net.weight("filter", 8, 8, 3, 3)])
    net.output("conv", net.relu(net.op("conv2d", [y, filter], "conv", padding=1)))
    tokens = net.permute(net.reshape(y, BATCH, 8, x.size(2) * x.size(3)), 0, 2, 1)
    y = net.op("fake_quantize", [net.layer_norm(tokens, "norm")], scale=0.03, low=-99.0, high=156.0)
    weight = net.op("fake_quantize_filter", [net.weight("weight", 5, 8)])
    net.output("linear", net.op("linear", [y, weight], "linear"))
    y = net.op("fake_quantize", [x], scale=0.011, to=FLOAT8)
    filter = net.op("fake_quantize_filter", [net.weight("floats", 8, x.size(1), 3, 3)], to=FLOAT8)
    net.output("floats", net.op("conv2d", [y, filter], "floats"))


def masked(net: Net, x: Value) -> None:
    """Attends with masks that are weights, that are computed, and that follow from the sizes."""
    c, size = x.size(1), x.size(2) * x.size(3)
    tokens = net.slice(net.permute(net.reshape(x, BATCH, c, size), 0, 2, 1), 1, 0, size - 1)
    t = size - 1
    heads = net.permute(net.reshape(tokens, BATCH, t, 1, c), 0, 2, 1, 3)
    row = net.reshape(net.slice(tokens, 2, 0, 1), BATCH, 1, 1, t)
    for name, mask in {"weight": net.weight("mask", 1, 1, t, t), "keys": row}.items():
        y = net.scaled_dot_product_attention(heads, heads, heads, mask=mask)
        net.output(name, net.reshape(net.permute(y, 0, 2, 1, 3), BATCH, t, c))
    net.output("causal", net.scaled_dot_product_attention(heads, heads, heads, causal=True))
    packed = net.linear(tokens, "packed", 3 * c)
    parts = [net.slice(packed, 2, i * c, i * c + c) for i in range(3)]
    parts = [net.permute(net.reshape(y, BATCH, t, c, 1), 0, 2, 1, 3) for y in parts]
    y = net.scaled_dot_product_attention(*parts)
    net.output("packed", net.reshape(net.permute(y, 0, 2, 1, 3), BATCH, t, c))
    bias = net.op("attention_bias", [net.weight("mask", 1, 1, t, t)], heads=1, queries=t, keys=t)
    settings: dict[str, Any] = {"heads": 1, "scale": 0.5, "causal": True}
    y, kept = net.several("attention", [tokens] * 3 + [bias], logsumexp=True, **settings)
    given = [tokens, tokens, tokens, y, net.relu(tokens), kept, bias]
    for name, value in zip("qkv", net.several("attention_grad", given, **settings), strict=True):
        net.output(f"gradient {name}", value)
    net.output("kept", kept)


def imported(net: Net, x: Value) -> None:
    """Calls what networks of torch and ONNX do, and ours do not."""
    for op in ("sum", "mean", "amax", "amin"):
        net.output(op, net.op(op, [x], axes=(1, 3)))
    net.output("cumsum", net.op("cumsum", [x], axis=2))
    net.output("roll", net.op("roll", [x], shifts=(1, -2), axes=(1, 3)))
    net.output("pad", net.op("pad", [x], pads=(0, 0, 0, 0, 1, 0, 0, 2), value=0.5))
    ends = net.op("where", [net.op("gt", [net.op("cumsum", [x], axis=3)], other=0.0), x, x])
    chosen = net.op("clamp", [net.weight("chosen", 4)], min=0.0, max=2.0)
    index = net.op("cast", [chosen], dtype="int32")
    net.output("gather", net.op("gather", [x, index], axis=1))
    places = net.op("add", [index], other=1.0)
    own = net.expand(net.reshape(places, 1, 4), BATCH, 4)
    net.output("roll of integers", net.op("roll", [own], shifts=(-1,), axes=(1,)))
    rows = net.permute(x, 0, 2, 1, 3)
    net.output("own", net.op("gather", [rows, own], axis=1, batch_axes=1))
    full = net.expand(net.reshape(places, 1, 1, 4, 1), *x.shape)
    net.output("scattered", net.op("scatter_add", [x, full, x], axis=2))
    net.output(
        "rows scattered", net.op("scatter_add", [rows, own, net.slice(rows, 1, 0, 4)], axis=1)
    )
    net.output("integers scattered", net.op("scatter_add", [own, own, own], axis=1))
    weights = [net.weight(f"group.{part}", x.size(1)) for part in ("weight", "bias")]
    net.output("group", net.op("group_norm", [ends, *weights], groups=1, eps=1e-5))
    net.output("rms", net.op("rms_norm", [x, net.weight("rms.weight", x.size(3))], eps=1e-5))
    net.output("expand", net.expand(net.weight("token", 1, 1, x.size(3)), BATCH, 2, x.size(3)))


@dataclass(frozen=True)
class Variant:
    """A program, and the passes that are left out; whether it runs every night alone."""

    name: str
    plain: Program
    off: Collection[str]
    nightly: bool = False

    @property
    def final(self) -> Program:
        return passes.run(self.plain, backend(HERE, "float32"), self.off)


def variants() -> list[Variant]:
    """Lists what runs: each network with all passes, with each left out, and with none.

    Those without a pass or any, and what repeats the ops of others, take minutes to compile: every
    day they are interpreted, every night they run.
    """
    found = []
    for name, program in TINY.items():
        found += [Variant(f"{name} without {off}", program, {off}, True) for off in PASSES]
        found += [Variant(f"{name} with all", program, ())]
        found += [Variant(f"{name} with none", program, set(PASSES), True)]
    some = {
        "constants": nets.constants,
        "gated": nets.gated,
        "dense": nets.dense,
        "excited": nets.excited,
        "rounded": rounded,
    }
    for name, write in some.items():
        found += [Variant(name, nets.program(write, 3, 4, 5), (), name == "gated")]
    for name, write in {"shared filter": shared, "strange": strange, "imported": imported}.items():
        found += [Variant(name, nets.program(write, 3, 4, 5), set(PASSES))]
    found.append(Variant("swin", nets.program(nets.swin, 3, 8, 24), ()))
    for name, off in {"masked": (), "masked with none": set(PASSES)}.items():
        found += [Variant(name, nets.program(masked, 3, 3, 4), off, bool(off))]
    return found


VARIANTS = variants()


@pytest.fixture(scope="module")
def answers(pytestconfig: pytest.Config) -> dict[str, dict[str, np.ndarray]]:
    """Runs the variants in one graph: a compilation each would take minutes; equal ones once."""
    chosen: dict[str, Variant] = {}
    for variant in VARIANTS:
        if not variant.nightly or pytestconfig.getoption("--all"):
            chosen.setdefault(str(variant.final), variant)
    types, given = [], []
    for each in chosen.values():
        ((shape, dtype),) = each.plain.inputs.values()
        types.append(TensorType(DType[dtype], shape, device=HERE))
        given += inputs(each.plain)
    registry: dict[str, Buffer] = {}
    library = cache.library(gpu=False)
    with Graph("variants", input_types=types, custom_extensions=[library]) as graph:
        outputs = []
        for i, (each, x) in enumerate(zip(chosen.values(), graph.inputs, strict=True)):
            final = each.final
            constants = Canonical(Constants(final, weights(each.plain)), final)
            tensors = {f"{i}.{name}": value for name, value in constants.items()}
            names = {name: f"{i}.{name}" for name in final.constants}
            parameters = Parameters(
                tensors,
                HERE,
                DType.float32,
                plain={full: constants.plain[name] for name, full in names.items()},
                plain_shapes={full: final.types[name].shape for name, full in names.items()},  # type: ignore[misc]
            ).at(str(i))
            outputs += emit(final, [x.tensor], parameters)
            registry |= parameters.registry(CPU())
        graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    executable: Any = session.init(session.compile(graph), weights_registry=registry)
    results = iter(executable.execute(*given))
    found = {
        key: {output: next(results).to_numpy() for output in each.plain.outputs}
        for key, each in chosen.items()
    }
    assert next(results, None) is None
    return found


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.nightly] if each.nightly else [])
        for each in VARIANTS
    ],
)
def test_the_answers_are_torchs(
    answers: dict[str, dict[str, np.ndarray]], variant: Variant
) -> None:
    wanted = interpret(variant.plain, inputs(variant.plain), weights(variant.plain))
    found = answers[str(variant.final)]
    for name, want in wanted.items():
        assert found[name].shape == want.shape
        error = np.abs(found[name] - want).max() / np.abs(want).max()
        assert error <= BOUND, f"{name}: the error is {error:.3g}"


@pytest.mark.parametrize("variant", VARIANTS, ids=[each.name for each in VARIANTS])
def test_the_rewritten_program_means_the_same(variant: Variant) -> None:
    given, tensors = inputs(variant.plain), weights(variant.plain)
    wanted = interpret(variant.plain, given, tensors)
    found = interpret(variant.final, given, tensors)
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, 1e-6, 1e-7 * np.abs(want).max())


def test_the_variants_run_every_op_of_a_cpu() -> None:
    daily = [each.final for each in VARIANTS if not each.nightly]
    ran = {node.op for final in daily for node in final.nodes if not node.at_load}
    gpu = {"conv2d_chain", "layernorm_mlp", "stem_maxpool", "stem_layernorm", "stem_conv2d"}
    gpu |= {
        "conv2d_shortcut_chain",
        "token_linear",
        "quantized_conv2d_chain",
        "quantized_conv2d_shortcut",
    }
    gpu |= {"quantized_conv2d_shortcut_chain", "quantized_qkv_linear", "row_moments"}
    gpu |= {"linear_moments", "normed_linear", "attention_linear", "stem_maxpool_conv2d"}
    gpu |= {"conv2d_mean"}
    assert ran | set(ELEMENTWISE) == set(EMIT) - gpu  # tests/ops has those that differ in a word
    assert set(OTHERS) <= ran


def test_every_op_that_is_no_weights_can_be_lowered() -> None:
    at_load = {"batch_norm_scale", "batch_norm_shift", "scale_filter"}
    at_load |= {"bytes_mean", "bytes_scale", "fake_quantize_filter", "full"}
    at_load |= {"norm_filter", "norm_shift"}
    assert set(EMIT) == set(OPS) - at_load


def layer_of_values(net: Net, x: Value) -> None:
    """A linear layer whose weights are values [F, C], and the gradient of what it reads."""
    w = net.input("w", (24, 16))
    y = net.op("matmul", [x, net.permute(w, 1, 0)]) + net.input("b", (24,))
    net.output("y", y)
    net.output("dx", net.op("matmul", [y, w]))


def on_hopper(network: Any, *shape: int, dtype: str = "float32") -> list[tuple[str, str]]:
    """Lists the ops of a graph for Hopper: names, and as written; its weights may be values."""
    gpu, on = DeviceRef.GPU(), Backend("cuda", dtype, architecture="sm_90a")
    final = passes.run(nets.program(network, *shape).retyped({"x": dtype}), on)
    types = [TensorType(DType[t.dtype], dims(t.shape), gpu) for t in final.inputs.values()]
    with Graph("values", input_types=types, kernel_library=Unchecked()) as graph:
        graph.output(*emit(final, [x.tensor for x in graph.inputs], bind([final], {}, gpu, dtype)))
    lines = [line for line in str(graph).splitlines() if "symbol = " in line]
    return [(re.findall(r'symbol = "(\w+)"', line)[0], line) for line in lines]


def test_products_of_values_need_no_kernels_but_hoppers() -> None:
    found = on_hopper(layer_of_values, 64, 16)
    products = [line for name, line in found if name == "bmm"]
    assert len(products) == 2 and len(found) == 3  # and a permute
    for line in products:
        assert {"aligned = true", "constant = false", 'layout = "nk"'} <= set(
            re.findall(r'\w+ = (?:true|false|"nk")', line)
        )


def classified(net: Net, x: Value) -> Value:
    y = net.relu(net.conv2d(net.relu(net.conv2d(x, "narrow", 16, 1)), "wide", 16, 3, padding=1))
    net.output("head", net.linear(net.flatten(net.avg_pool2d(y)), "head", 8))
    return net.linear(net.relu(net.linear(x, "rows", 16)), "rows2", 8)


def test_kernels_are_compiled_for_windows_and_for_the_rows_that_there_are() -> None:
    ops = on_hopper(classified, 16, 8, 16)

    def told(op: str, parameter: str) -> list[bool]:
        lines = [line for name, line in ops if name == op]
        return [f"{parameter} = true" in line for line in lines]

    assert told("conv2d", "windows") == [False, True]
    assert sorted(told("bmm", "few")) == [False, False, True]


def around_a_norm(net: Net, x: Value) -> Value:
    """A residual that is normed for another layer, as between the halves of a transformer."""
    x = x + net.linear(net.relu(x), "proj", 32)
    return net.gelu(net.linear(net.layer_norm(x, "norm", 1e-6), "fc1", 40))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_of_a_norm_are_in_those_of_the_layer_behind(dtype: str) -> None:
    (_, _), (first, _), (second, line) = on_hopper(around_a_norm, 5, 32, dtype=dtype)
    assert (first, second) == ("linear_moments", "normed_linear")
    assert 'epilogue = "gelu"' in line
    gpu, on = DeviceRef.GPU(), Backend("cuda", dtype, architecture="sm_90a")
    final = passes.run(nets.program(around_a_norm, 5, 32).retyped({"x": dtype}), on)
    tensors = weights(final)
    bound = bind([final], tensors, gpu, dtype)
    (node,) = (node for node in final.nodes if node.op == "normed_linear")
    _, _, weight, bias = node.inputs
    with Graph("values", input_types=[]):
        filter = bound.layer(weight, bias)
    assert filter.shape == (1, 1, 32, 40)
    found = {name: each.array() for name, each in bound.bound.items()}
    rows = torch.from_numpy(found[weight])
    if dtype == "bfloat16":  # of which numpy has the bits
        rows = rows.view(torch.bfloat16)
    rows = rows.double().reshape(40, 32)
    exact = {name: torch.from_numpy(each).double() for name, each in tensors.items()}
    wanted = norm_filter(tensors["fc1.weight"], tensors["norm.weight"], to=dtype)
    assert torch.equal(rows, torch.from_numpy(wanted).double())
    assert rows.sum(1).abs().max() < 1e-5
    shift = exact["fc1.weight"] @ exact["norm.bias"] + exact["fc1.bias"]
    np.testing.assert_allclose(found[bias], shift.float(), 1e-6, 1e-6)


def projected(net: Net, x: Value) -> None:
    """A depthwise_qkv that stores 8 bits."""
    given = [x, net.weight("w", 8), net.weight("b", 8)]
    for part in "qkv":
        given += [net.weight(f"{part}.weight", 8, 1, 3, 3), net.weight(f"{part}.bias", 8)]
    of = {"q_scale": 0.5, "q_low": -3.0, "v_scale": 0.25}
    window = {"size": (3, 4), "kernel": 3, "padding_q": 1, "padding_kv": 1, "stride_kv": 2}
    q, *_ = net.several("depthwise_qkv", given, class_token=True, dtype="uint8", **window, **of)
    net.output("q", q)


def test_projections_in_8_bits_get_their_scales_and_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    host, given = nodes._host, []
    monkeypatch.setattr(nodes, "_host", lambda x, dtype: given.append([*x]) or host(x, dtype))
    ((name, line),) = on_hopper(projected, 13, 8, dtype="bfloat16")
    assert name == "depthwise_qkv" and len(re.findall(r"<\[batch, \d+, 8\], ui8", line)) == 3
    assert given[0] == [1e-5, 0.5, 3.0, 1.0, 0.0, 0.25, 0.0]


def depthwise_of_values(net: Net, x: Value) -> None:
    """A depthwise convolution whose filters are values, and the gradient of what it reads."""
    w, window = net.input("w", (8, 1, 3, 3)), {"stride": 2, "padding": 1, "groups": 8}
    y = net.op("conv2d", [x, w], **window)
    net.output("dx", net.op("conv2d_input_grad", [y, w], size=(9, 10), **window))


def test_depthwise_filters_are_read_as_they_lie() -> None:
    found = [name for name, _ in on_hopper(depthwise_of_values, 8, 9, 10)]
    assert sorted(found) == ["conv2d", "depthwise_input_grad", "permute", "permute"]


def sum_of_images(net: Net, x: Value) -> None:
    """A sum over images and pixels, by channel."""
    net.output("sum", net.op("sum", [x], axes=(0, 1, 2)))


def squares_of_images(net: Net, x: Value) -> None:
    """A sum of an expression of x, over images and pixels, by channel."""
    net.output("squares", net.op("sum", [net.op("mul", [x, x])], axes=(0, 1, 2)))


@pytest.mark.parametrize(
    ("sums", "op"), [(sum_of_images, "reduce"), (squares_of_images, "reduce_terms")]
)
def test_sums_over_a_batch_that_is_not_known_are_in_parts(sums: Any, op: str) -> None:
    assert [name for name, _ in on_hopper(sums, 64, 64, 64)] == [op, op]


@pytest.mark.parametrize("off", [(), set(PASSES)])
def test_lowering_asks_for_the_weights_that_its_program_reads(off: Collection[str]) -> None:
    plain = TINY["cvt"]
    graph, parameters, final = lower(plain, {}, HERE, off=off, kernels=Unchecked())
    assert final == passes.run(plain, backend(HERE, "float32"), off)
    read = {value for node in final.nodes if not node.at_load for value in node.inputs}
    asked = read & final.constants
    bound = {name.removesuffix(".float32") for name in parameters.bound}  # of constants as they are
    zeros = bound - asked
    assert asked <= bound
    assert all(name.endswith(".bias") and name not in final.constants for name in zeros)
    assert [list(each.type.shape) for each in graph.inputs] == [[BATCH, 8, 10, 3]]
