"""Each pass: where it applies, where it must not, and that no program means anything else after."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from max.dtype import DType

from maxvision.common.errors import ArgumentError
from maxvision.graphs import passes, shapes
from maxvision.graphs.arrange import (
    CHAINS,
    MLPS,
    PROJECTED,
    PROJECTED_DEPTH,
    SHORTCUT_CHAINS,
    WIDE_CHAINS,
    is_aligned,
)
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import Constants
from maxvision.graphs.cvt import CVTS
from maxvision.graphs.elementwise import MOST_RESULTS, most_members
from maxvision.graphs.net import Net, Value
from maxvision.graphs.passes import PASSES, align, foreach, fuse, norms
from maxvision.graphs.passes.heads import stores_bytes
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Node, Program
from maxvision.graphs.quantize import Float8, Grid, Rounding
from maxvision.graphs.resnet import RESNETS
from maxvision.graphs.types import BATCH, FLOAT8
from tests.graphs import nets
from tests.graphs.interpret import inputs, interpret, weights

CPU, CUDA, HIP = Backend("cpu", "float32"), Backend("cuda", "bfloat16"), Backend("hip", "float16")
HOPPER = Backend("cuda", "bfloat16", architecture="sm_90a")
HOPPER16, HOPPER32 = (replace(HOPPER, dtype=each) for each in ("float16", "float32"))
BACKENDS = {"cpu": CPU, "cuda": CUDA, "hip": HIP}
Write = Callable[[Net, Value], Any]


def kept(program: Program, backend: Backend, names: Iterable[str] = PASSES) -> Program:
    """Rewrites a program; every pass has to keep what it means, and every op what it takes."""
    tensors, given = weights(program), inputs(program)
    wanted, types = interpret(program, given, tensors), ends(program)
    for name in names:
        after = PASSES[name](program, backend)
        read = Program.from_json(after.to_json())
        assert read == after, f"{name}: {read.difference(after)}"
        assert ends(after) == types, name
        if after != program:
            found = interpret(after, given, tensors)
            for output, want in wanted.items():
                scale = 1e-9 * max(1, np.abs(want).max())
                np.testing.assert_allclose(found[output], want, 1e-7, scale, err_msg=name)
        program = after
    return program


def ends(program: Program) -> dict[str, Any]:
    return {name: program.types[value] for name, value in program.outputs.items()}


def ops(program: Program) -> Counter[str]:
    return Counter(node.op for node in program.nodes if not node.at_load)


def both(name: str, program: Program, backend: Backend) -> tuple[Program, Program]:
    """Runs a pass behind those before it: the program before and after."""
    names = list(PASSES)
    before = kept(program, backend, names[: names.index(name)])
    return before, kept(before, backend, [name])


# --- every network, every device ---------------------------------------------------------------


@pytest.mark.parametrize("api", BACKENDS)
@pytest.mark.parametrize("pixels", ["", "uint8", "float32"])
@pytest.mark.parametrize("name", nets.NETS)
def test_a_network_means_the_same_after_each_pass(name: str, api: str, pixels: str) -> None:
    write, shape = nets.NETS[name]
    program, backend = nets.program(write, *shape), BACKENDS[api]
    if pixels:
        program = from_pixels(program, pixels, backend.dtype)
    else:
        program = program.retyped(dict.fromkeys(program.inputs, backend.dtype))
    final = kept(program, backend)
    assert passes.run(program, backend) == final
    if not pixels:
        kept(final, backend)  # a second time, there is little to do


@pytest.mark.parametrize("off", PASSES)
@pytest.mark.parametrize("name", ["resnet basic", "resnet wide", "cvt", "vit"])
def test_the_others_keep_the_meaning_where_one_pass_is_left_out(name: str, off: str) -> None:
    write, shape = nets.NETS[name]
    program = from_pixels(nets.program(write, *shape), "uint8", "bfloat16")
    assert passes.run(program, CUDA, {off}) == kept(program, CUDA, [n for n in PASSES if n != off])


def test_with_all_passes_left_out_nothing_changes() -> None:
    write, shape = nets.NETS["cvt"]
    program = nets.program(write, *shape)
    assert passes.run(program, CUDA, set(PASSES)) == program


def has_weights(program: Program, node: Node, on: Backend) -> bool:
    """``norms._has_weights`` of any sizes."""
    kinds = {program.types[value].dtype for value in (node.inputs[0], node.output)}
    constant = program.constants.issuperset(filter(None, node.inputs[1:3]))
    return kinds == {on.dtype} and constant and not node.at_load and not node.dtype


@pytest.fixture
def any_width() -> Iterator[None]:
    """Lets kernels of few widths take the small ones of random networks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "CHAINS", tuple((c, f) for c in (2, 4, 6) for f in (2, 4, 6)))
        widths = ((c, s, f) for c in (2, 4, 6) for s in (2, 4, 6) for f in (2, 4, 6))
        patch.setattr(fuse, "SHORTCUT_CHAINS", tuple(widths))
        patch.setattr(norms, "MLPS", (2, 6))
        for module in (norms, shapes):
            patch.setattr(module, "MOMENTS", 2)
        patch.setattr(norms, "_has_weights", has_weights)
        patch.setattr(fuse, "has_stem", lambda shape, stride, alone=False: True)
        patch.setattr(fuse, "has_squeeze", lambda channels, hidden, on_cpu: True)
        patch.setattr(align, "LEAST", 2)
        patch.setattr(align, "pays", lambda edges, gained: gained > 0)
        yield


@pytest.mark.usefixtures("any_width")
@settings(
    max_examples=120, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 14),
    backend=st.sampled_from([CPU, CUDA, HIP, HOPPER, Backend("cuda", "float32")]),
    pixels=st.sampled_from(["", "", "uint8", "float32"]),
    order=st.one_of(
        st.just(list(PASSES)), st.permutations(list(PASSES)), st.lists(st.sampled_from([*PASSES]))
    ),
)
def test_random_networks_mean_the_same_after_any_passes_in_any_order(
    seed: int, steps: int, backend: Backend, pixels: str, order: list[str]
) -> None:
    program = nets.Random(random.Random(seed)).program(steps)
    if pixels:
        program = from_pixels(program, pixels, backend.dtype)
    kept(program, backend, order)


def test_random_networks_meet_every_op(any_width: None) -> None:
    found: Counter[str] = Counter()
    for seed in range(400):
        program = nets.Random(random.Random(seed)).program(10)
        backend = (CPU, CUDA, HOPPER)[seed % 3]
        found += ops(passes.run(from_pixels(program, "uint8", backend.dtype), backend))
    fused = {
        "attention", "layernorm_first", "class_token", "qkv_linear", "depthwise_qkv",
        "conv2d_shortcut", "conv2d_chain", "conv2d_shortcut_chain", "layernorm_mlp",
        "stem_maxpool", "stem_layernorm",
        "stem_conv2d", "squeeze_excite", "row_moments", "linear_moments", "normed_linear",
    }  # fmt: skip
    assert fused <= set(found)


# --- where a pass applies ------------------------------------------------------------------------


def a_conv(net: Net, x: Value, name: str = "a", filters: int = 4, **rest: Any) -> Value:
    kernel = rest.pop("kernel", 3)
    return net.conv2d(x, name, filters, kernel, padding=rest.pop("padding", kernel // 2), **rest)


def raw(net: Net, x: Value, name: str, filters: int, kernel: int, **window: Any) -> Value:
    """Adds a convolution that says of its window what it must, as an importer may."""
    c = x.size(1) // window.get("groups", 1)
    weight = net.weight(f"{name}.weight", filters, c, kernel, kernel)
    return net.op("conv2d", [x, weight], name, **window)


def rounded(
    net: Net, x: Value, *, steps: int = 255, filters: bool = True, tell: Any = None, **window: Any
) -> Value:
    """Two convolutions that read rounded values, and have rounded filters, behind another."""
    x = net.relu(a_conv(net, x, "stem", x.size(1)))
    for name, low in ("one", -99.0), ("two", 0.0):
        x = net.op("fake_quantize", [x], scale=0.03, low=low, high=low + steps)
        weight = net.weight(f"{name}.weight", 8, x.size(1) // window.get("groups", 1), 3, 3)
        if filters:
            weight = net.op("fake_quantize_filter", [weight])
        x = net.relu(net.op("conv2d", [x, weight], name, padding=1, **window))
        x = tell(net, x) if tell and name == "one" else x
    return x


def rounded_sum(net: Net, x: Value, *, flip: bool = False, residual: str = "rounded") -> Value:
    """A convolution of rounded values, rounded, and added to these or to what they are made of."""
    plain = net.relu(a_conv(net, x, "stem", 16))
    x = net.op("fake_quantize", [plain], scale=0.03, low=0.0, high=255.0)
    weight = net.op("fake_quantize_filter", [net.weight("one.weight", 16, 16, 3, 3)])
    y = net.op("conv2d", [x, weight], "one", padding=1)
    y = net.op("fake_quantize", [y], scale=0.02, low=-99.0, high=156.0)
    beside = x if residual == "rounded" else plain
    y = net.op("clamp", [beside + y if flip else y + beside], min=0.1, max=1.5)
    return net.op("fake_quantize", [y], scale=0.01, low=-7.0, high=248.0)


def in_8_bits(net: Net, x: Value, name: str, to: str = FLOAT8, f: int = 0) -> Value:
    """A linear layer of rounded tokens."""
    grid = (
        {"scale": 0.03, "to": to} if to == FLOAT8 else {"scale": 0.03, "low": -99.0, "high": 156.0}
    )
    x = net.op("fake_quantize", [x], **grid)
    weight = net.weight(f"{name}.weight", f or x.size(2), x.size(2))
    weight = net.op("fake_quantize_filter", [weight], to=to)
    return net.op("linear", [x, weight], name)


def norm_in_8_bits(net: Net, x: Value, to: str = FLOAT8) -> Value:
    """A linear layer of rounded tokens behind a norm."""
    return in_8_bits(net, net.layer_norm(x, "norm"), "one", to)


def heads_in_8_bits(net: Net, x: Value, to: str = FLOAT8, width: int = 0) -> Value:
    """Attends by linear layers of rounded tokens; another reads what it gives."""
    parts = [split(net, in_8_bits(net, x, part, to, width), 2) for part in "qkv"]
    return in_8_bits(net, join(net, net.scaled_dot_product_attention(*parts)), "out", to)


def by_value(net: Net, x: Value, f: int = 24, **settings: Any) -> Value:
    """Multiplies tokens by a matrix that is a value [C, F], as weights are in training."""
    return net.op("matmul", [x, net.input("matrix", (x.shape[-1], f))], **settings)


def conv_by_value(net: Net, x: Value, f: int = 6) -> Value:
    """Convolves images by a filter and a bias that are values."""
    y = net.op("conv2d", [x, net.input("filter", (f, x.size(1), 3, 3))], padding=1)
    return y + net.reshape(net.input("vector", (f,)), 1, f, 1, 1)


def pool(net: Net, x: Value) -> Value:
    return net.max_pool2d(x, 3, stride=2, padding=1)


def grouped(net: Net, x: Value, groups: int) -> Value:
    """Norms groups of channels of x[N, C, ...]."""
    vectors = [net.weight(f"group.{part}", x.size(1)) for part in ("weight", "bias")]
    return net.op("group_norm", [x, *vectors], "group", groups=groups, eps=1e-5)


def last(net: Net, x: Value) -> Value:
    return net.permute(x, 0, 2, 3, 1)


def to_tokens(net: Net, x: Value) -> Value:
    return net.reshape(last(net, x), BATCH, x.size(2) * x.size(3), x.size(1))


def split(net: Net, x: Value, heads: int = 2) -> Value:
    return net.permute(net.reshape(x, BATCH, x.size(1), heads, x.size(2) // heads), 0, 2, 1, 3)


def join(net: Net, x: Value) -> Value:
    y = net.permute(x, 0, 2, 1, 3)
    return net.reshape(y, BATCH, y.size(1), y.size(2) * y.size(3))


def attended(net: Net, x: Value, heads: int = 2, scale: float | None = None) -> Value:
    return nets.attend(net, [x] * 3, heads, scale)


def token(net: Net, c: int, *shape: int, count: int = 1) -> Value:
    return net.expand(net.weight("token", *(shape or (1, 1, c))), BATCH, count, c)


def classed(net: Net, x: Value) -> Value:
    """Puts a class token before tokens, or before the pixels of an image [N, H, W, C]."""
    c = x.shape[-1]
    return net.concat(
        [token(net, c), net.reshape(x, BATCH, math.prod(map(int, x.shape[1:-1])), c)], 1
    )


def first(net: Net, x: Value, at: int = 0) -> Value:
    return net.reshape(net.slice(x, 1, at, at + 1), BATCH, x.size(2))


def gated(
    net: Net,
    x: Value,
    *,
    of: Value | None = None,
    mean: Callable[[Value], Value] | None = None,
    linear: bool = False,
    hidden: int = 5,
    between: Callable[[Value], Value] = lambda y: y,
    gates: Callable[[Value], Value] = lambda y: y,
    width: int = 0,
    flip: bool = False,
    **window: Any,
) -> Value:
    """Squeezes and excites the images of a convolution (Hu et al. 2018)."""
    x = a_conv(net, x, "before", 16)
    of, c = x if of is None else of, width or 16
    y = mean(of) if mean else net.op("mean", [of], axes=(2, 3), keepdim=not linear)
    if linear:
        y = net.linear(between(net.relu(net.linear(y, "squeeze", hidden))), "excite", c)
        y = net.reshape(gates(net.op("sigmoid", [y])), BATCH, c, 1, 1)
    else:
        y = net.conv2d(y, "squeeze", hidden, 1, **window)
        y = net.conv2d(between(net.op("silu", [y])), "excite", c, 1, bias=False)
        y = gates(net.op("hardsigmoid", [y]))
    return net.op("mul", [y, x] if flip else [x, y])


def projections(
    net: Net, x: Value, size: tuple[int, int] = (3, 4), *, kernel: int = 3, token: bool = False,
    stride: int = 2, biased: bool = False, padding: int = -1, seen: str = "",
    flatten: Callable[[Value], Value] | None = None, count: int = 3, swapped: bool = False,
    computed: bool = False, read: Callable[[Net, Value, str], Value] | None = None,
) -> Value:  # fmt: skip
    """Norms tokens [N, T, C] and convolves them three times; gives the sum of what it can."""
    c = x.size(2)
    y = net.layer_norm(x, "norm")
    if computed:
        scale = net.op("mean", [x], axes=(0, 1), keepdim=False)
        y = net.op("layer_norm", [x, scale, scale])
    one = net.slice(y, 1, 0, 1) if token else None
    rest = net.slice(y, 1, 1, x.size(1)) if token else y
    image = net.permute(net.reshape(rest, BATCH, *size, c), 0, 3, 1, 2)
    parts = []
    for i, name in enumerate("qkv"[:count]):
        z = net.conv2d(
            image, name, c, kernel, stride=stride if i else 1, groups=c, bias=biased,
            padding=padding if i and padding >= 0 else kernel // 2,
        )  # fmt: skip
        if seen == "conv" and not i:
            net.output("seen", z)
        z = last(net, z)
        z = flatten(z) if flatten else net.reshape(z, BATCH, z.size(1) * z.size(2), c)
        if one:
            z = net.concat([z, one] if swapped else [one, z], 1)
        z = read(net, z, f"{name}.read") if read else z
        net.output(name, z)
        parts.append(z)
    if seen in ("norm", "token", "rest"):
        net.output("seen", {"norm": y, "token": one, "rest": rest}[seen] or y)
    if seen == "norm as well":
        net.output("seen", net.relu(y))
    if seen == "token as well":
        assert one
        net.output("seen", net.relu(one))
    if seen == "image":
        net.output("seen", net.permute(image, 0, 2, 3, 1))
    return net.linear(parts[0], "end", 2)


def block(
    net: Net, x: Value, *, kernel: int = 3, stride: int = 2, flip: bool = False, end: str = "relu",
    size: int = 1, one: int = 0, two: Any = None, tell: Any = None, **shortcut: Any,
) -> Value:  # fmt: skip
    """Adds a residual block with a shortcut, in the settings of an importer."""
    y = net.relu(raw(net, x, "one", 4, 3, stride=one or stride, padding=1))
    y = raw(net, y, "two", 6, kernel, **(two or {"padding": kernel // 2}))
    if stride != 1 or shortcut:
        shortcut = {"stride": stride, **shortcut}
    x = raw(net, x, "shortcut", 6, size, **shortcut)
    x = tell(net, x) if tell else x
    y = x + y if flip else y + x
    return y if end == "none" else getattr(net, end)(y)


def tiles(net: Net, x: Value, stride: tuple[int, int] = (2, 4), **window: Any) -> Value:
    """Convolves patches of 2 x 4 pixels, or as the stride is: 2 x 2, 2 x 3, 1 x 1."""
    kernel = stride if stride in ((2, 2), (2, 3), (1, 1)) else (2, 4)
    weight = net.weight("tiles.weight", 6, x.size(1) // window.get("groups", 1), *kernel)
    return net.op("conv2d", [x, weight], "tiles", stride=stride, **window)


def dense_block(net: Net, x: Value) -> Value:
    values = [x]
    for i in range(17):
        together = net.op("concat", values, axis=1) if len(values) > 1 else x
        values.append(net.relu(raw(net, together, f"dense{i}", 2, 1)))
    return net.op("concat", values, axis=1)


def normed(net: Net, x: Value) -> Value:
    y = net.max_pool2d(x, 2, stride=2)
    return net.relu(net.batch_norm(net.concat([y, net.relu(y)], 1), "n"))


def links(
    net: Net, x: Value, c: int = 64, f: int = 64, *, end: str = "relu", follow: str = "relu",
    kernel: int = 1, stride: int = 1, **window: Any,
) -> Value:  # fmt: skip
    """Adds a block's last 1 x 1 convolution, its residual, and the next one's first."""
    y = net.relu(raw(net, x, "before", c, 1))
    y = getattr(net, end)(raw(net, y, "link", x.size(1), 1) + x)
    net.output("block", y)
    next = raw(net, y, "next", f, kernel, stride=stride, padding=kernel // 2, **window)
    return getattr(net, follow)(next)


def bottleneck(
    net: Net, x: Value, f: int = 64, *, kernel: int = 1, stride: int = 1, follow: str = "relu"
) -> Value:
    """Adds a block that ends in one sum with its shortcut, and the next one's first 1 x 1."""
    source = net.relu(raw(net, x, "before", 64, 1))
    y = net.relu(raw(net, x, "one", 64, 1, stride=stride))
    y = raw(net, y, "last", 80, kernel, padding=kernel // 2)
    y = net.relu(y + raw(net, source, "shortcut", 80, 1, stride=stride))
    net.output("block", y)
    return getattr(net, follow)(raw(net, y, "next", f, 1))


def mlp(net: Net, x: Value, *, between: str = "gelu", seen: str = "", **rest: Any) -> Value:
    """Adds an MLP with its norm to tokens, which a layer may have been added to."""
    c = x.size(-1)
    if rest.get("measured"):
        x = x + net.linear(net.relu(x), "proj", c)
    y = net.layer_norm(x, "norm")
    if seen == "norm":
        net.output("seen", net.relu(y))
    y = getattr(net, between)(net.linear(y, "fc1", 2 * c, bias=rest.get("bias", True)))
    if seen == "hidden":
        net.output("seen", y)
    y = net.linear(y, "fc2", c)
    if rest.get("elsewhere"):
        return net.relu(x) + y
    y = y + x if rest.get("flip") else x + y
    return net.relu(y) if rest.get("relu") else y


def projected(
    net: Net, x: Value, *, heads: int = 6, norm: bool = True, causal: bool = False,
    shown: bool = False,
) -> Value:  # fmt: skip
    """Adds attention and the layer behind it to tokens x, then what a layer gives of their norm."""
    t, c = x.size(1), x.size(2)
    heads = heads * c // 384
    q, k, v = (
        net.permute(net.reshape(net.linear(x, name, c), BATCH, t, heads, c // heads), 0, 2, 1, 3)
        for name in "qkv"
    )
    causes = {"causal": True} if causal else {}
    y = net.op("scaled_dot_product_attention", [q, k, v], scale=0.125, **causes)
    y = net.reshape(net.permute(y, 0, 2, 1, 3), BATCH, t, c)
    if shown:
        seen(net, y)
    y = x + net.linear(y, "proj", c)
    return net.linear(net.layer_norm(y, "norm"), "end", 8) if norm else net.op("relu", [y])


def averaged(
    net: Net, x: Value, *, c: int = 16, filters: int = 24, kernel: int = 1, stride: int = 1,
    mean: Callable[[Value], Value] | None = None, end: str = "relu",
) -> Value:  # fmt: skip
    """Ends a network: a convolution of images, what is added to it, an activation, their mean."""
    x = a_conv(net, x, "before", c)
    y = a_conv(net, x, "last", filters, kernel=kernel, stride=stride)
    y = y + net.conv2d(x, "beside", filters, kernel, stride=stride, padding=kernel // 2, groups=4)
    y = net.op(end, [y])
    return net.linear(net.flatten(mean(y) if mean else net.avg_pool2d(y)), "head", 8)


def around_a_norm(
    net: Net, x: Value, *names: str, k: int = 24, f: int = 40, bias: bool = True, end: str = "gelu",
    eps: float = 1e-5, between: str = "add", added: bool = False, seen: str = "",
    computed: str = "",
) -> Value:  # fmt: skip
    """Adds what a linear layer gives to x, norms the sum, and multiplies that by other layers.

    Args:
        net: The network.
        x: Of [..., C].
        names: Of the layers behind the norm; one if none are given.
        k: Channels of the layer before it.
        f: Filters of those behind it.
        bias: Whether layers have one.
        end: The op behind those.
        eps: Of the norm.
        between: ``add``; or another op of both, or of the sum; nothing for none.
        added: Whether the results of those behind are added to the sum.
        seen: What is an output as well: ``sum`` or ``norm``; or an op of the norm.
        computed: Whose weight is computed of values: ``proj``, ``norm`` or a layer behind it.
    """

    def weight(name: str, of: Value, *shape: int) -> Value:
        w = net.weight(f"{name}.weight", *shape)
        if name != computed:
            return w
        return w + net.op("mean", [of], axes=(*range(len(of.shape) - 1),))

    def linear(z: Value, name: str, filters: int, of: Value) -> Value:
        given = [weight(name, of, filters, of.size(-1))]
        given += [net.weight(f"{name}.bias", filters)] if bias else []
        return net.op("linear", [z, *given], name)

    c, y = x.size(-1), net.relu(net.linear(x, "into", k))
    y = linear(y, "proj", c, y)
    if between in ("add", "mul"):
        y = net.op(between, [x, y])
    elif between:
        y = net.op(between, [x + y])
    if seen == "sum":
        net.output("sum", y)
    parts = [weight("norm", y, c), net.weight("norm.bias", c)]
    z = net.op("layer_norm", [y, *parts], "norm", eps=eps)
    if seen not in ("", "sum"):
        net.output("seen", z if seen == "norm" else net.op(seen, [z]))
    for name in names or ("fc1",):
        found = linear(z, name, f, y)
        net.output(name, y + found if added else net.op(end, [found]))
    return net.op("tanh", [y])


def two_norms(net: Net, x: Value) -> None:
    """Norms a sum twice, for a layer each."""
    x = x + net.linear(net.relu(x), "proj", x.size(-1))
    for i in range(2):
        net.output(f"y{i}", net.linear(net.layer_norm(x, f"{i}.norm"), f"{i}.fc", 8))


def across(net: Net, x: Value, f: int = 9, **rest: Any) -> Value:
    """Multiplies tokens [N, T, C], weighs the result by channel, and adds it to them (ResMLP)."""
    y = net.linear(net.permute(x, 0, 2, 1), "tokens", f, **rest)
    return x + net.op("mul", [net.permute(y, 0, 2, 1), net.weight("scale", x.size(2))])


def in_float32(net: Net, x: Value) -> Value:
    """Squares the distance from the mean, in float32."""
    wide = net.op("cast", [x], dtype="float32")
    apart = net.op("sub", [wide, net.op("mean", [wide], axes=(2,), keepdim=True)])
    return net.op("cast", [net.op("mul", [apart, apart])], dtype="bfloat16")


def norm_in_float32(net: Net, x: Value) -> Value:
    """Norms in float32 as autocast has it, and adds the gradient of that."""
    wide = net.op("cast", [x], dtype="float32")
    y = net.op("cast", [net.layer_norm(wide, "norm")], dtype="bfloat16")
    dy = net.op("cast", [net.relu(y)], dtype="float32")
    dx, dweight, dbias = net.several("layer_norm_grad", [dy, wide, net.weight("scale", 4)])
    sums = net.op("cast", [dweight + dbias], dtype="bfloat16")
    return net.op("cast", [dx], dtype="bfloat16") + sums


def normed_by_its_own(net: Net, x: Value) -> Value:
    """Norms by the mean and the variance of what it norms."""
    apart = net.op("sub", [x, net.op("mean", [x], axes=(1,), keepdim=True)])
    spread = net.op("mean", [net.op("mul", [apart, apart])], axes=(1,), keepdim=True)
    return net.op("mul", [apart, net.op("rsqrt", [spread])])


def by_channel(net: Net, _: Value) -> Value:
    """Norms channels by the batch, in training, as bridge/gradients.py writes it."""
    x = net.input("image", (2, 6, 8), "bfloat16")  # training knows its batch
    weight, bias, kept_mean, kept_spread = (net.weight(name, 8) for name in "wbmv")
    wide = net.op("cast", [x], dtype="float32")
    first = net.reshape(net.slice(net.reshape(x, 12, 8), 0, 0, 1), 8)
    first = net.op("cast", [first], dtype="float32")
    apart = net.op("sub", [wide, first])
    near, spread = (
        net.reshape(net.op("mean", [each], axes=(0, 1), keepdim=True), 8)
        for each in (apart, net.op("mul", [apart, apart]))
    )
    spread = net.op("clamp", [net.op("sub", [spread, net.op("mul", [near, near])])], min=0.0)
    inverse, mean = net.op("rsqrt", [net.op("add", [spread], other=1e-5)]), first + near
    scale = net.op("mul", [inverse, weight])
    shift = net.op("sub", [bias, net.op("mul", [mean, scale])])
    for name, old, new in (("mean", kept_mean, mean), ("spread", kept_spread, spread)):
        part = net.op("mul", [new], other=0.1)
        net.output(f"kept {name}", net.op("mul", [old], other=0.9) + part)
    for name, value in (("mean", mean), ("inverse", inverse)):
        net.output(f"saved {name}", net.op("cast", [value], dtype="bfloat16"))
    return net.op("cast", [net.op("mul", [wide, scale]) + shift], dtype="bfloat16")


def gradient_by_channel(net: Net, _: Value) -> Value:
    """Computes the gradients of such a norm from what it saved."""
    dy, x = (net.input(name, (2, 6, 8), "bfloat16") for name in ("dy", "image"))
    mean, inverse = (net.input(name, (8,), "bfloat16") for name in ("mean", "inverse"))
    weight = net.input("weight", (8,))
    dy, x, mean, inverse = (net.op("cast", [v], dtype="float32") for v in (dy, x, mean, inverse))
    total, product = (
        net.reshape(net.op("sum", [each], axes=(0, 1), keepdim=True), 8)
        for each in (dy, net.op("mul", [dy, net.op("sub", [x, mean])]))
    )
    net.output("weight's gradient", net.op("mul", [product, inverse]))
    net.output("bias's gradient", total)
    scale = net.op("mul", [inverse, weight])
    share = net.op("mul", [scale], other=-1 / 12)
    slope = net.op("mul", [net.op("mul", [net.op("mul", [product, inverse]), inverse]), share])
    back = net.op("sub", [net.op("mul", [total, share]), net.op("mul", [mean, slope])])
    dx = net.op("mul", [dy, scale]) + (net.op("mul", [x, slope]) + back)
    return net.op("cast", [dx], dtype="bfloat16")


def behind(net: Net, x: Value, axes: tuple[int, ...] = (1,), op: str = "exp") -> Value:
    """Adds what is computed of a sum."""
    return x + net.op(op, [net.op("sum", [x], axes=axes, keepdim=True)])


def many_behind(net: Net, x: Value, count: int = 8) -> Value:
    """Gives more numbers of a sum than a launch does."""
    total = net.op("sum", [x], axes=(1,), keepdim=True)
    for i in range(count):
        net.output(f"output {i}", net.op("add", [total], other=i + 0.5))
    return x + net.op("exp", [total])


def apart_from(net: Net, _: Value, row: int = 0) -> Value:
    """Sums the distances from a row of tokens."""
    x = net.input("tokens", (2, 5, 4), "bfloat16")
    one = net.reshape(net.slice(net.reshape(x, 10, 4), 0, row, row + 1), 4)
    return x + net.op("sum", [net.op("sub", [x, one])], axes=(0, 1), keepdim=True)


def summed(net: Net, x: Value, axis: int = 1) -> Value:
    return net.op("sum", [x], axes=(axis,), keepdim=True)


def mixed(
    net: Net, x: Value, count: int = 3, hidden: int = 66, *, between: str = "gelu", tell: Any = None
) -> Value:
    """Adds MLPs of the last axis, each with its residual, and multiplies another axis in between.

    Args:
        net: The network.
        x: Of [N, C, T].
        count: How many.
        hidden: Width of the layers between two linear ones.
        between: The op that computes them.
        tell: Makes what the next one reads of the sum.
    """
    size = x.size(2)
    for i in range(count):
        y = net.op(between, [net.linear(x, f"{i}.fc1", hidden)])
        x = x + net.linear(y, f"{i}.fc2", size)
        y = net.linear(turn3(net.relu(x)), f"{i}.across", x.size(1))
        x = net.op("sub", [turn3(y), x])
        x = tell(net, x) if tell else x
    return x


def tokens_of_norms(net: Net, x: Value) -> Value:
    """Multiplies the tokens of an image and those of its norms, and adds them up."""
    image = last(net, net.max_pool2d(x, 1, stride=1))
    parts = [net.layer_norm(image, f"norm{i}") for i in range(2)]
    tokens = [net.reshape(y, BATCH, 99, 4) for y in (*parts, image)]
    return functools.reduce(
        net.add, [net.linear(turn3(y), f"across{i}", 99) for i, y in enumerate(tokens)]
    )


def turn3(x: Value) -> Value:
    return x.net.permute(x, 0, 2, 1)


def times(x: Value, number: float, op: str = "mul") -> Value:
    return x.net.op(op, [x], other=number)


def turn(x: Value) -> Value:
    """Turns the last two axes over."""
    return x.net.permute(x, 0, 1, 3, 2)


def written(
    net: Net, x: Value, *, turned: bool = False, product: Callable[..., Value] | None = None,
    **change: Callable[[Value], Value],
) -> Value:  # fmt: skip
    """Writes attention out; what makes its parts can be changed."""
    q, k, v = (split(net, net.linear(x, name, x.size(2))) for name in "qkv")
    q, k = (change.get(name, lambda y: y)(y) for name, y in (("q", q), ("k", k)))
    k = net.permute(net.permute(k, 0, 2, 1, 3), 0, 2, 3, 1) if turned else turn(k)
    y = product(q, k) if product else net.op("matmul", [q, k])
    y = change.get("scores", lambda y: y)(y)
    y = change.get("shares", lambda y: y)(net.op("softmax", [y]))
    return join(net, net.op("matmul", [y, v]))


def beside(net: Net, x: Value, *, masked: bool = False, shared: bool = False) -> Value:
    """Writes attention out in windows that have an axis of their own, as in transformers' Hiera."""
    t, c = x.size(1), x.size(2)
    parts = [
        net.permute(net.reshape(net.linear(x, name, c), BATCH, t // 2, 2, 2, c // 2), 0, 3, 2, 1, 4)
        for name in "qkv"
    ]
    q, k, v = parts
    if shared:
        k = net.weight("keys", 1, 1, 1, t // 2, c // 2)
    scores = net.op("matmul", [times(q, 0.5), net.permute(k, 0, 1, 2, 4, 3)])
    if masked:
        scores = net.add(scores, net.weight("mask", 2, 1, 1, t // 2))
    y = net.op("matmul", [net.op("softmax", [scores]), v])
    return net.reshape(net.permute(y, 0, 3, 2, 1, 4), BATCH, t, c)


WRITTEN = "matmul matmul softmax reshape reshape reshape reshape permute permute permute permute"
"""What attention that is written out consists of, and splitting and joining its heads."""


def unrolled(net: Net, x: Value, count: int = 3) -> Value:
    """Makes quarters of an image [N, 8, 8, C] images, again and again, as Hiera does."""
    images = 1
    for _ in range(count):
        _, h, w, c = x.shape
        x = net.reshape(x, f"{images}*{BATCH}" if images > 1 else BATCH, h // 2, 2, w // 2, 2, c)
        x, images = net.permute(x, 0, 2, 4, 1, 3, 5), 4 * images
        x = net.reshape(x, f"{images}*{BATCH}", h // 2, w // 2, c)
    return net.reshape(x, BATCH, 64, 2)


def as_scaled_image(n: Net, x: Value) -> Value:
    """Tokens [N, 24, 3] as images of 4 x 6, each channel times a number of its own."""
    image = n.reshape(n.permute(x, 0, 2, 1), BATCH, 3, 4, 6)
    return n.op("mul", [image, n.weight("scale", 3, 1, 1)])


def in_windows(net: Net, x: Value) -> Value:
    """Adds to an image what its windows give, as Swin does, and to that what its pixels give."""
    _, h, w, c = x.shape
    y = net.permute(net.reshape(x, BATCH, h // 2, 2, w // 4, 4, c), 0, 1, 3, 2, 4, 5)
    y = net.linear(net.reshape(y, f"{h * w // 8}*{BATCH}", 8, c), "window", c)
    y = net.permute(net.reshape(y, BATCH, h // 2, w // 4, 2, 4, c), 0, 1, 3, 2, 4, 5)
    z = x + net.reshape(y, BATCH, h, w, c)
    return z + net.linear(z, "pixel", c)


def windows_of(net: Net, x: Value, count: int = 3) -> Value:
    return net.reshape(x, f"{count}*{BATCH}", x.size(1) // count, x.size(2))


def heads_of(net: Net, x: Value, heads: int = 2) -> Value:
    n, t, _ = x.shape
    return net.permute(net.reshape(x, n, t, heads, x.size(2) // heads), 0, 2, 1, 3)


def joined(net: Net, y: Value) -> Value:
    y = net.permute(y, 0, 2, 1, 3)
    return net.reshape(y, y.shape[0], y.size(1), y.size(2) * y.size(3))


def windowed(net: Net, x: Value) -> Value:
    """Attends in windows as torchvision's and transformers' Swin do."""
    x = windows_of(net, x)
    q, k, v = (heads_of(net, net.linear(x, name, 4)) for name in "qkv")
    y = net.op("matmul", [q, turn(k)]) + net.weight("bias", 1, 2, 4, 4)
    shape = y.shape
    y = net.reshape(y, BATCH, 3, 2, 4, 4) + net.weight("mask", 1, 3, 1, 4, 4)
    y = net.op("softmax", [net.reshape(y, *shape)])
    return joined(net, net.op("matmul", [y, v]))


def expanded(net: Net, x: Value) -> Value:
    """Attends in windows as timm's Swin does."""
    x = windows_of(net, x)
    q, k, v = (heads_of(net, net.linear(x, name, 4)) for name in "qkv")
    mask = net.expand(net.reshape(net.weight("mask", 3, 4, 4), 1, 3, 1, 4, 4), BATCH, 3, 2, 4, 4)
    mask = net.weight("bias", 1, 2, 4, 4) + net.reshape(mask, x.shape[0], 2, 4, 4)
    return joined(net, net.scaled_dot_product_attention(q, k, v, mask=mask))


def packed(
    net: Net, x: Value, *, heads: int = 2, bias: bool = True, order: str = "parts",
    before: Callable[[Value], Value] = lambda y: y,
) -> Value:  # fmt: skip
    """Attends by query, key and value of one layer, as timm's ViT does, or in another order."""
    t, c = x.size(1), x.size(2)
    y = before(net.linear(x, "qkv", 3 * c, bias=bias))
    if order == "columns":
        parts = [split(net, net.slice(y, 2, i * c, i * c + c), heads) for i in range(3)]
    else:
        shape, axes = (3, heads, c // heads), (2, 0, 3, 1, 4)
        if order == "heads":
            shape, axes = (heads, 3, c // heads), (3, 0, 2, 1, 4)
        y = net.permute(net.reshape(y, BATCH, t, *shape), *axes)
        parts = [
            net.reshape(net.slice(y, 0, i, i + 1), BATCH, heads, t, c // heads) for i in range(3)
        ]
    return join(net, net.scaled_dot_product_attention(*parts))


def trained(net: Net, x: Value) -> None:
    """Casts weights, multiplies them, and casts what it gives, through reshapes; counts."""
    for i, f in enumerate((6, 1, 5)):
        w = narrow(net, net.reshape(net.input(f"w{i}", (f, 2, 8)), f, 16))
        gradient = net.op("matmul", [w, w], transpose_b=True)
        net.output(f"gradient {i}", net.reshape(wide(net, gradient), f * f))
        net.output(f"count {i}", net.op("add", [net.input(f"n{i}", (), "int64")], other=1.0))
        if i < 2:
            row = net.reshape(net.slice(w, 0, 0, 1), 16)
            net.output(f"row {i}", net.op("mul", [row, net.input(f"m{i}", (16,))]))
    net.output("x", x)


def several(net: Net, w: Value) -> None:
    """Multiplies each of two inputs by a value."""
    for i in range(2):
        net.output(f"y{i}", net.op("mul", [net.input(f"x{i}", (9,)), w]))


def between(net: Net, *names: str) -> None:
    """Computes an expression between two products, for each name."""
    for name in names:
        a = net.input(name, (4, 4))
        net.output(name, net.op("matmul", [net.op("exp", [net.op("matmul", [a, a])]), a]))


def seen(net: Net, x: Value) -> Value:
    """Makes a value an output as well."""
    net.output("seen", x)
    return x


def used(net: Net, x: Value) -> Value:
    """Uses a value elsewhere as well."""
    net.output("used", net.relu(x))
    return x


def of_image(net: Net, x: Value) -> Value:
    """Attends to heads that are split off an image [N, C, H, W]."""
    y = net.permute(net.reshape(x, BATCH, 6, 2, 12), 0, 2, 1, 3)
    return join(net, net.scaled_dot_product_attention(y, y, y))


def with_format(write: Write, *layers: str, backend: Backend = CPU) -> tuple[Backend, Write]:
    return Backend(backend.api, backend.dtype, dict.fromkeys(layers, "steps")), write


Case = tuple[str, Backend, Write, tuple[int, ...], str]
IMAGE, TOKENS = (3, 6, 8), (5, 4)


APPLIES: dict[str, Case] = {  # pass, device, network, shape, what goes -> what comes
    "weights added": (
        "constants", CPU, lambda n, x: x + (n.weight("a", 4) + n.weight("b", 4)), TOKENS,
        "add ->",
    ),
    "a weight computed in steps": (
        "constants", CPU,
        lambda n, x: x + n.relu(n.reshape(n.permute(n.weight("a", 2, 2), 1, 0), 4)), TOKENS,
        "permute reshape relu ->",
    ),
    "a norm behind a convolution": (
        "batch_norm", CPU, lambda n, x: n.batch_norm(a_conv(n, x), "n"), IMAGE, "batch_norm ->",
    ),
    "a norm behind one without a bias, in groups": (
        "batch_norm", CPU,
        lambda n, x: n.batch_norm(a_conv(n, x, groups=3, filters=6, bias=False), "n"), IMAGE,
        "batch_norm ->",
    ),
    "a norm whose epsilon goes without saying": (
        "batch_norm", CPU,
        lambda n, x: n.op(
            "batch_norm", [a_conv(n, x), *(n.weight(p, 4) for p in ("w", "b", "m", "var"))]
        ), IMAGE, "batch_norm ->",
    ),
    "heads": (
        "attention", CPU, attended, TOKENS,
        "reshape reshape reshape reshape permute permute permute permute"
        " scaled_dot_product_attention -> attention",
    ),
    "heads of one value": (
        "attention", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(*[split(n, n.relu(x))] * 3)), TOKENS,
        "reshape permute scaled_dot_product_attention permute reshape -> attention",
    ),
    "heads of an image": (
        "attention", CPU, of_image, (6, 4, 6),
        "reshape permute permute scaled_dot_product_attention -> attention",
    ),
    "heads that are not joined": (
        "attention", CPU, lambda n, x: n.scaled_dot_product_attention(*[split(n, x)] * 3), TOKENS,
        "scaled_dot_product_attention -> attention",
    ),
    "heads that are joined across": (
        "attention", CPU,
        lambda n, x: n.reshape(
            n.permute(n.scaled_dot_product_attention(*[split(n, x)] * 3), 0, 2, 1, 3), BATCH, 4, 5
        ), TOKENS,
        "scaled_dot_product_attention -> attention",
    ),
    "heads that are an output": (
        "attention", CPU,
        lambda n, x: join(n, seen(n, n.scaled_dot_product_attention(*[split(n, x)] * 3))), TOKENS,
        "scaled_dot_product_attention -> attention",
    ),
    "heads that another reads": (
        "attention", CPU,
        lambda n, x: join(
            n, n.scaled_dot_product_attention(split(n, x), used(n, split(n, x)), split(n, x))
        ), TOKENS,
        "reshape reshape reshape permute permute permute scaled_dot_product_attention"
        " -> attention",
    ),
    "heads of tokens that changed places": (
        "attention", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(*[n.reshape(x, BATCH, 2, 5, 2)] * 3)),
        TOKENS, "scaled_dot_product_attention -> attention",
    ),
    "a packed layer": (
        "attention", CPU, lambda n, x: packed(n, x), TOKENS,
        "reshape reshape reshape reshape reshape permute permute slice slice slice"
        " scaled_dot_product_attention -> linear linear attention",
    ),
    "a packed layer without a bias": (
        "attention", CPU, lambda n, x: packed(n, x, bias=False), TOKENS,
        "reshape reshape reshape reshape reshape permute permute slice slice slice"
        " scaled_dot_product_attention -> linear linear attention",
    ),
    "a packed layer whose columns are taken": (
        "attention", CPU, lambda n, x: packed(n, x, order="columns"), TOKENS,
        "slice slice slice reshape reshape reshape reshape permute permute permute permute"
        " scaled_dot_product_attention -> linear linear attention",
    ),
    "a packed layer, each head's parts together": (
        "attention", CPU, lambda n, x: packed(n, x, order="heads"), TOKENS,
        "reshape reshape reshape reshape reshape permute permute slice slice slice"
        " scaled_dot_product_attention -> linear linear attention",
    ),
    "a packed layer that runs sparse": (
        "attention", *with_format(lambda n, x: packed(n, x), "qkv"), TOKENS,
        "reshape reshape reshape reshape reshape permute permute"
        " scaled_dot_product_attention -> attention",
    ),
    "packed tokens of no layer": (
        "attention", CPU, lambda n, x: packed(n, x, before=n.relu), TOKENS,
        "reshape reshape reshape reshape reshape permute permute"
        " scaled_dot_product_attention -> attention",
    ),
    "a packed layer is multiplied in one op": (
        "qkv", CPU, lambda n, x: packed(n, x), TOKENS, "linear linear linear -> qkv_linear",
    ),
    **{
        f"attention written out, {what}": (
            "attention", CPU, lambda n, x, rest=rest: written(n, x, **rest(n)), TOKENS,
            f"{WRITTEN} {gone} -> attention",
        )
        for what, gone, rest in [
            ("keys turned over", "permute", lambda n: {}),
            ("keys split off turned over", "permute permute", lambda n: {"turned": True}),
            ("by a product that turns them over", "permute permute", lambda n: {
                "product": lambda q, k: n.op("matmul", [q, turn(k)], transpose_b=True)}),
            ("an alpha", "permute", lambda n: {
                "product": lambda q, k: n.op("matmul", [q, k], alpha=0.3)}),
            ("scores scaled", "permute mul", lambda n: {"scores": lambda y: times(y, 0.5)}),
            ("scores divided", "permute div", lambda n: {"scores": lambda y: times(y, 3.0, "div")}),
            ("queries scaled", "permute mul", lambda n: {"q": lambda y: times(y, 0.5)}),
            ("keys scaled", "permute mul", lambda n: {"k": lambda y: times(y, 0.5)}),
            ("all of them scaled", "permute mul mul div", lambda n: {
                "q": lambda y: times(y, 0.5), "k": lambda y: times(y, 0.7),
                "scores": lambda y: times(y, 0.9, "div")}),
            ("a bias", "permute mul add", lambda n: {
                "scores": lambda y: times(y, 0.5) + n.weight("bias", 2, 5, 5)}),
            ("two biases", "permute add add", lambda n: {
                "scores": lambda y: n.weight("a", 1, 2, 5, 5) + (y + n.weight("b", 5))}),
        ]
    },
    "attention written out, of no heads": (
        "attention", CPU,
        lambda n, x: n.op(
            "matmul", [n.op("softmax", [n.op("matmul", [x, x], transpose_b=True)]), x]
        ),
        TOKENS, "matmul matmul softmax -> attention reshape reshape permute",
    ),
    "attention written out, keys that are seen": (
        "attention", CPU,
        lambda n, x: written(n, x, scores=lambda y: n.op(
            "where", [n.input("seen", (BATCH, 1, 1, 5), "bool"), y], other=-np.inf
        )), TOKENS, f"{WRITTEN} permute where -> attention attention_bias",
    ),
    "attention written out, keys that are seen and a bias": (
        "attention", CPU,
        lambda n, x: written(n, x, scores=lambda y: n.op(
            "where", [n.input("seen", (5, 5), "bool"), y + n.weight("bias", 2, 1, 1)], other=-np.inf
        )), TOKENS, f"{WRITTEN} permute add -> attention attention_bias",
    ),
    "attention written out, windows": (
        "attention", CPU, lambda n, x: windowed(n, x), (12, 4),
        f"{WRITTEN} permute add add reshape reshape -> attention",
    ),
    "attention written out, windows beside heads": (
        "attention", CPU, beside, (12, 4),
        f"matmul matmul mul softmax -> attention {'permute ' * 3} {'reshape ' * 8}",
    ),
    "a mask of windows, expanded": (
        "attention", CPU, expanded, (12, 4),
        "add expand reshape reshape reshape reshape reshape permute permute permute permute"
        " scaled_dot_product_attention -> attention",
    ),
    "a mask for each image": (
        "attention", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(
            *[split(n, x)] * 3, mask=n.input("mask", (BATCH, 1, 1, 5)), causal=True
        )), TOKENS,
        "reshape reshape permute permute scaled_dot_product_attention"
        " -> attention attention_bias",
    ),
    "permutes to and fro": (
        "channels_last", CPU,
        lambda n, x: n.relu(n.permute(n.gelu(last(n, x)), 0, 3, 1, 2)), IMAGE,
        "permute permute ->",
    ),
    "an expression between permutes": (
        "channels_last", CPU,
        lambda n, x: n.permute(n.op(
            "pointwise", [n.op("gt", [(y := last(n, x))], other=0.0), y],
            expression="x0 0.0 x1 where",
        ), 0, 3, 1, 2), IMAGE,
        "permute permute ->",
    ),
    "tokens that are scaled and summed as images": (
        "channels_last", CPU, lambda n, x: n.op("sum", [as_scaled_image(n, x)], axes=(0, 2, 3)),
        (24, 3), "permute -> reshape",
    ),
    "permutes that would have ten axes together": (
        "channels_last", CPU, unrolled, (8, 8, 2), "reshape reshape reshape reshape permute ->",
    ),
    "windows, whose results are added to the image": (
        "channels_last", CPU, in_windows, (4, 8, 3), "->",
    ),
    "a group norm of tokens": (
        "channels_last", CPU,
        lambda n, x: n.permute(grouped(n, n.permute(x, 0, 2, 1), 2), 0, 2, 1), TOKENS,
        "permute permute ->",
    ),
    "a group norm between convolutions": (
        "channels_last", CPU,
        lambda n, x: pool(n, grouped(n, a_conv(n, x, "a", 6), 3)), IMAGE,
        "-> reshape permute reshape reshape permute reshape",
    ),
    "a class token": (
        "tokens", CPU, lambda n, x: n.concat([token(n, 4), x], 1), TOKENS,
        "expand concat -> class_token",
    ),
    "a class token with another use": (
        "tokens", CPU,
        lambda n, x: n.concat([(t := token(n, 4)), n.concat([x, t], 1)], 1), TOKENS,
        "concat -> class_token",
    ),
    "the norm of the first token": (
        "tokens", CPU, lambda n, x: n.layer_norm(first(n, x), "n"), TOKENS,
        "slice reshape layer_norm -> layernorm_first",
    ),
    "relu": ("epilogues", CPU, lambda n, x: n.relu(a_conv(n, x)), IMAGE, "relu ->"),
    "relu of a group norm": (
        "epilogues", CPU, lambda n, x: n.relu(grouped(n, x, 3)), IMAGE, "relu ->",
    ),
    "gelu": ("epilogues", CPU, lambda n, x: n.gelu(n.linear(x, "a", 3)), TOKENS, "gelu ->"),
    "an activation with settings": (
        "epilogues", CPU, lambda n, x: n.op("clamp", [a_conv(n, x)], min=0.0, max=6.0), IMAGE,
        "clamp ->",
    ),
    "a residual and an activation with a setting": (
        "epilogues", CPU, lambda n, x: n.op("leaky_relu", [x + n.linear(x, "a", 4)], slope=0.2),
        TOKENS, "add leaky_relu ->",
    ),
    "a residual": ("epilogues", CPU, lambda n, x: a_conv(n, x, filters=3) + x, IMAGE, "add ->"),
    "a residual of a product that is reshaped": (
        "epilogues", CPU, lambda n, x: n.relu(
            n.op("softmax", [n.reshape(x, BATCH, x.size(1), 2, 2)])
            + n.reshape(n.linear(x, "a", 4), BATCH, x.size(1), 2, 2)
        ), TOKENS, "relu add -> reshape",
    ),
    "a residual, swapped": (
        "epilogues", CPU, lambda n, x: x + a_conv(n, x, filters=3), IMAGE, "add ->",
    ),
    "a residual and relu": (
        "epilogues", CPU, lambda n, x: n.relu(x + n.linear(x, "a", 4)), TOKENS, "add relu ->",
    ),
    "a residual and gelu": (
        "epilogues", CPU, lambda n, x: n.gelu(x + n.linear(x, "a", 4)), TOKENS, "add gelu ->",
    ),
    "the sum of two products": (
        "epilogues", CPU, lambda n, x: n.relu(n.linear(x, "a", 3) + n.linear(x, "b", 3)), TOKENS,
        "add relu ->",
    ),
    "a sum of sums": (
        "epilogues", CPU,
        lambda n, x: n.linear(x, "a", 4) + x + n.linear(x, "b", 4) + n.relu(n.linear(x, "c", 4)),
        TOKENS, "add add relu ->",
    ),
    "a gate": (
        "epilogues", CPU, lambda n, x: n.op("mul", [n.linear(x, "a", 4), x]), TOKENS, "mul ->",
    ),
    "a gate's function of another product": (
        "epilogues", CPU,
        lambda n, x: n.op("mul", [n.op("silu", [n.linear(x, "a", 3)]), n.linear(x, "b", 3)]),
        TOKENS, "mul silu ->",
    ),
    "a product of activations": (
        "epilogues", CPU,
        lambda n, x: x + n.op("matmul", [n.op("matmul", [x, x], transpose_b=True), x]), TOKENS,
        "add ->",
    ),
    **{
        f"squeeze and excitation, {what}": (
            "squeeze_excite", HOPPER, write, IMAGE,
            f"mean conv2d conv2d mul {gone}-> squeeze_excite",
        )
        for what, write, gone in [
            ("as it is", gated, ""),
            ("swapped", lambda n, x: gated(n, x, flip=True), ""),
            ("read elsewhere", lambda n, x: used(n, gated(n, x)), ""),
            ("an output", lambda n, x: n.relu(seen(n, gated(n, x))), ""),
            ("and an activation", lambda n, x: n.relu(gated(n, x)), "relu "),
            ("and a residual",
             lambda n, x: gated(n, x) + n.max_pool2d(a_conv(n, x, "b", 16), 1, stride=1), "add "),
        ]
    },
    "squeeze and excitation on a CPU": (
        "squeeze_excite", CPU, gated, IMAGE, "mean conv2d conv2d mul -> squeeze_excite",
    ),
    "squeeze and excitation by an average pool": (
        "squeeze_excite", HOPPER, lambda n, x: gated(n, x, mean=n.avg_pool2d), IMAGE,
        "avg_pool2d conv2d conv2d mul -> squeeze_excite",
    ),
    "squeeze and excitation by a pool of a window as large": (
        "squeeze_excite", HOPPER,
        lambda n, x: gated(n, x, mean=lambda y: n.avg_pool2d(y, (6, 8))), IMAGE,
        "avg_pool2d conv2d conv2d mul -> squeeze_excite",
    ),
    "squeeze and excitation by linear layers": (
        "squeeze_excite", HOPPER, lambda n, x: gated(n, x, linear=True), IMAGE,
        "mean reshape linear linear reshape mul -> squeeze_excite",
    ),
    "squeeze and excitation, a residual and an activation": (
        "squeeze_excite", HOPPER,
        lambda n, x: n.relu(n.max_pool2d(a_conv(n, x, "b", 16), 1, stride=1) + gated(n, x)), IMAGE,
        "mean conv2d conv2d mul add relu -> squeeze_excite",
    ),
    "patches of 2 x 4": (
        "patches", CUDA, lambda n, x: n.relu(tiles(n, x)), IMAGE,
        "-> reshape reshape",
    ),
    "patches of whole steps, more of which fit together": (
        "patches", HIP, lambda n, x: tiles(n, x, stride=(2, 2)), (96, 6, 8),
        "-> reshape reshape",
    ),
    "a patch that is the whole image": (
        "patches", CUDA, lambda n, x: n.relu(tiles(n, x, stride=(1, 3))), (64, 2, 4),
        "-> reshape reshape",
    ),
    "values that stand together": (
        "concats", CPU, dense_block, IMAGE, "->",
    ),
    "rounded values and filters": (
        "eight_bit", CPU, rounded, (4, 5, 6),
        "fake_quantize fake_quantize conv2d conv2d"
        " -> pointwise quantized_conv2d quantized_conv2d",
    ),
    "rounded values that another reads before": (
        "eight_bit", CPU, lambda n, x: rounded(n, x, tell=used), (4, 5, 6),
        "fake_quantize fake_quantize conv2d conv2d"
        " -> pointwise pointwise quantized_conv2d quantized_conv2d",
    ),
    **{
        f"a rounded result that is added{', swapped' * flip}": (
            "eight_bit", CPU, lambda n, x, flip=flip: rounded_sum(n, x, flip=flip), (4, 5, 6),
            "fake_quantize fake_quantize fake_quantize conv2d add clamp"
            " -> pointwise pointwise quantized_conv2d",
        )
        for flip in (False, True)
    },
    "a rounded result that is added to what is not rounded": (
        "eight_bit", CPU, lambda n, x: rounded_sum(n, x, residual="plain"), (4, 5, 6),
        "fake_quantize fake_quantize conv2d -> pointwise pointwise quantized_conv2d",
    ),
    "a rounded result that is added, on Hopper": (
        "eight_bit", HOPPER, rounded_sum, (16, 5, 6),
        "fake_quantize fake_quantize conv2d -> pointwise pointwise pointwise quantized_conv2d",
    ),
    "a shortcut": ("shortcut", CPU, block, IMAGE, "conv2d conv2d -> conv2d_shortcut"),
    "a shortcut, swapped, behind a 1 x 1": (
        "shortcut", HIP, lambda n, x: block(n, x, flip=True, kernel=1, stride=1), IMAGE,
        "conv2d conv2d -> conv2d_shortcut",
    ),
    "a chain": ("chain", HIP, links, (80, 2, 3), "conv2d conv2d -> conv2d_chain"),
    "a wide chain": (
        "chain", HOPPER, lambda n, x: links(n, x, 256, 256), (80, 2, 3),
        "conv2d conv2d -> conv2d_chain",
    ),
    "a chain that begins with a shortcut": (
        "chain", HIP, bottleneck, (16, 2, 3), "conv2d_shortcut conv2d -> conv2d_shortcut_chain",
    ),
    "two that follow, of which one is chained": (
        "chain", CUDA,
        lambda n, x: n.output("a", links(n, x, 64, 128)) or n.relu(
            raw(n, Value(n, "relu_2", x.type), "b", 64, 1)
        ), (80, 2, 3), "conv2d conv2d -> conv2d_chain",
    ),
    "query, key and value": ("qkv", CPU, attended, TOKENS, "linear linear linear -> qkv_linear"),
    "query, key and value of other tokens": (
        "qkv", CPU, lambda n, x: nets.attend(n, [x, *[n.slice(x, 1, 1, 4)] * 2], 2), TOKENS,
        "linear linear linear -> qkv_linear",
    ),
    **{
        f"query, key and value of {to}": (
            "qkv", HOPPER, lambda n, x, to=to: heads_in_8_bits(n, x, to), (5, 32),
            "quantized_linear quantized_linear quantized_linear -> quantized_qkv_linear",
        )
        for to in (FLOAT8, "int8")
    },
    **{
        f"{what}, of which {to} is read": (
            "rounded", HOPPER, lambda n, x, write=write, to=to: write(n, x, to), (5, 32),
            "pointwise ->",
        )
        for what, write in (("a norm", norm_in_8_bits), ("an attention", heads_in_8_bits))
        for to in (FLOAT8, "int8")
    },
    **{
        f"projections{', and a token' * token}, of which 8 bits are read": (
            "rounded", HOPPER,
            lambda n, x, token=token: projections(
                n, x, token=token, read=lambda n, y, name: in_8_bits(n, y, name)
            ),
            (12 + token, 32), "pointwise pointwise pointwise ->",
        )
        for token in (False, True)
    },
    "projections": (
        "depthwise", CPU, projections, (12, 4),
        "layer_norm reshape reshape reshape reshape conv2d conv2d conv2d -> depthwise_qkv",
    ),
    "projections of 5 x 5 with a token, and biases": (
        "depthwise", CUDA,
        lambda n, x: projections(n, x, token=True, kernel=5, biased=True, stride=3), (13, 8),
        "slice slice layer_norm reshape reshape reshape reshape concat concat concat"
        " conv2d conv2d conv2d -> depthwise_qkv",
    ),
    "projections whose padding differs": (
        "depthwise", CPU, lambda n, x: projections(n, x, padding=0, stride=1), (12, 4),
        "layer_norm reshape reshape reshape reshape conv2d conv2d conv2d -> depthwise_qkv",
    ),
    "an MLP": ("mlp", HOPPER, mlp, (3, 64), "normed_linear linear -> layernorm_mlp"),
    "an MLP in float16, swapped, without a bias": (
        "mlp", HOPPER16, lambda n, x: mlp(n, x, flip=True, bias=False), (3, 192),
        "normed_linear linear -> layernorm_mlp",
    ),
    "an MLP behind a layer that measures": (
        "mlp", HOPPER, lambda n, x: mlp(n, x, measured=True), (3, 64),
        "normed_linear linear -> layernorm_mlp",
    ),
    "a norm before an MLP that will be one op": (
        "norms", HOPPER, mlp, (3, 192), "layer_norm linear -> row_moments normed_linear",
    ),
    "a norm between a layer and an MLP that will be one op": (
        "norms", HOPPER, lambda n, x: mlp(n, x, measured=True), (3, 192),
        "layer_norm linear linear -> linear_moments normed_linear",
    ),
    "mixed tokens of an odd number": (
        "align", HOPPER, lambda n, x: nets.mixer(n, x, 12), (3, 36, 36), "reshape -> pad slice",
    ),
    "tokens of an image and of two norms of it": (
        "align", HOPPER, tokens_of_norms, (4, 9, 11), "reshape reshape -> pad slice",
    ),
    "norms before windows and behind them": (
        "rows", CUDA, nets.swin, (3, 8, 24),
        "permute permute permute permute roll roll layer_norm layer_norm layer_norm layer_norm add"
        " add -> reshape reshape gather_rows gather_rows gather_rows gather_rows",
    ),
    "windows that are normed when they are put together": (
        "rows", CPU, lambda n, x: nets.swin(n, x, "behind"), (3, 8, 24),
        "permute permute permute roll roll layer_norm layer_norm -> gather_rows gather_rows"
        " gather_rows",
    ),
    "a norm of an image before a class token": (
        "rows", CUDA, lambda n, x: classed(n, n.layer_norm(x, "norm")), (4, 5, 24),
        "layer_norm ->",
    ),
    "a norm of tokens before a class token": (
        "rows", CPU, lambda n, x: classed(n, n.layer_norm(x, "norm", 1e-3)), TOKENS,
        "layer_norm ->",
    ),
    "mixed tokens": (
        "channels_last", HOPPER, nets.mixer, (3, 36, 36),
        "permute permute permute permute linear linear linear linear -> reshape reshape reshape"
        " token_linear token_linear token_linear token_linear",
    ),
    "tokens of a third axis, which are weighed by channel": (
        "channels_last", HOPPER, across, (9, 16), "permute permute linear -> token_linear",
    ),
    "a norm between linear layers": (
        "norms", HOPPER, around_a_norm, (5, 32),
        "linear layer_norm linear -> linear_moments normed_linear",
    ),
    "attention to few keys, and the layer behind it": (
        "projection", HOPPER, projected, (9, 384),
        "attention linear_moments -> attention_linear",
    ),
    "the mean of a convolution's images": (
        "means", HOPPER, averaged, IMAGE, "conv2d avg_pool2d -> conv2d_mean",
    ),
    "the mean of a convolution's images over axes": (
        "means", HOPPER16,
        lambda n, x: averaged(n, x, end="silu", mean=lambda y: n.op("mean", [y], axes=(2, 3))),
        IMAGE, "conv2d mean -> conv2d_mean",
    ),
    "the mean of a convolution's images, which keeps axes": (
        "means", HOPPER,
        lambda n, x: averaged(n, x, mean=lambda y: n.op("mean", [y], axes=(2, 3), keepdim=True)),
        IMAGE, "conv2d mean -> conv2d_mean",
    ),
    **{
        f"the mean of {what}": ("means", backend, write, size, "->")
        for what, backend, write, size in [
            ("images, on no Hopper", CUDA, averaged, IMAGE),
            ("images in float32", HOPPER32, averaged, IMAGE),
            ("images of 65 pixels", HOPPER, averaged, (3, 5, 13)),
            ("a window of 3 x 3", HOPPER, lambda n, x: averaged(n, x, kernel=3), IMAGE),
            ("a convolution with a stride", HOPPER,
             lambda n, x: averaged(n, x, stride=2), IMAGE),
            ("12 filters", HOPPER, lambda n, x: averaged(n, x, filters=12, c=12), IMAGE),
            ("images that are an output", HOPPER,
             lambda n, x: averaged(n, x, mean=lambda y: n.avg_pool2d(seen(n, y))), IMAGE),
            ("windows", HOPPER,
             lambda n, x: averaged(n, x, mean=lambda y: n.avg_pool2d(y, 2)), IMAGE),
            ("channels", HOPPER,
             lambda n, x: averaged(n, x, mean=lambda y: n.op("mean", [y], axes=(1, 2))), IMAGE),
        ]
    },
    "attention that a layer without a norm multiplies": (
        "projection", HOPPER, lambda n, x: projected(n, x, norm=False), (9, 384), "->",
    ),
    "attention to one key too many": (
        "projection", HOPPER, projected, (57, 384), "->",
    ),
    "attention of one head, and the layer behind it": (
        "projection", HOPPER, projected, (57, 64),
        "attention linear_moments -> attention_linear",
    ),
    "attention in heads of another depth": (
        "projection", HOPPER, lambda n, x: projected(n, x, heads=12), (9, 384), "->",
    ),
    "attention of another width": ("projection", HOPPER, projected, (9, 192), "->"),
    "causal attention, and the layer behind it": (
        "projection", HOPPER, lambda n, x: projected(n, x, causal=True), (9, 384), "->",
    ),
    "attention whose result is an output": (
        "projection", HOPPER, lambda n, x: projected(n, x, shown=True), (9, 384), "->",
    ),
    "a norm between linear layers in float16, without biases": (
        "norms", HOPPER16,
        lambda n, x: around_a_norm(n, x, bias=False, eps=1e-3, end="exp"), (5, 64),
        "linear layer_norm linear -> linear_moments normed_linear",
    ),
    "a norm that two layers read": (
        "norms", HOPPER, lambda n, x: around_a_norm(n, x, "gate", "up", end="silu"), (5, 96),
        "linear layer_norm linear linear -> linear_moments normed_linear normed_linear",
    ),
    "a norm of images that three layers read, and a sum that is an output": (
        "norms", HOPPER, lambda n, x: around_a_norm(n, x, *"qkv", seen="sum"), (3, 5, 32),
        "linear layer_norm linear linear linear"
        " -> linear_moments normed_linear normed_linear normed_linear",
    ),
    "a norm of one row an image, behind the longest of products": (
        "norms", HOPPER, lambda n, x: around_a_norm(n, x, k=1024), (32,),
        "linear layer_norm linear -> linear_moments normed_linear",
    ),
    "a norm between linear layers whose weights are computed at load": (
        "norms", HOPPER,
        lambda n, x: n.op("linear", [
            n.op("layer_norm", [
                x + n.op("linear", [n.relu(x), n.relu(n.weight("a", 32, 32))]),
                n.relu(n.weight("b", 32)), n.relu(n.weight("c", 32)),
            ]), n.relu(n.weight("d", 8, 32)), n.relu(n.weight("e", 8)),
        ]), (5, 32), "linear layer_norm linear -> linear_moments normed_linear",
    ),
    "two norms of a sum, of which one is part of layers": (
        "norms", HOPPER, two_norms, (5, 32),
        "linear layer_norm linear -> linear_moments normed_linear",
    ),
    "an odd axis and hidden layers, which need no pad": (
        "align", HOPPER, mixed, (4, 100), "-> pad slice",
    ),
    "an odd axis, and hidden layers that are not": (
        "align", HOPPER, lambda n, x: mixed(n, x, 2, 64), (4, 100), "-> pad slice",
    ),
    "an odd axis that is also an output": (
        "align", HOPPER, lambda n, x: mixed(n, seen(n, mixed(n, x))), (4, 100),
        "-> pad slice slice",
    ),
    "an odd axis beside weights": (
        "align", HOPPER,
        lambda n, x: mixed(n, x + n.weight("a", 4, 100), tell=lambda n, y: n.op(
            "mul", [n.weight("b", 4, 1), y + n.weight("c", 100)]
        )), (4, 100), "-> pad slice",
    ),
    "an odd axis between reshapes that keep it": (
        "align", HOPPER,
        lambda n, x: mixed(n, x, tell=lambda n, y: n.reshape(
            n.op("tanh", [n.reshape(y, BATCH, 2, 2, 100)]), BATCH, 4, 100
        )), (4, 100), "-> pad slice",
    ),
    "a chain of ops, one with a number, one with settings": (
        "pointwise", CPU,
        lambda n, x: n.op("clamp", [n.op("mul", [n.op("tanh", [x]), x])], min=0.0, max=6.0),
        TOKENS, "tanh mul clamp -> pointwise",
    ),
    "a mean and what is computed of it in float32": (
        "casts", CUDA, in_float32, TOKENS, "cast sub mul cast -> pointwise pointwise",
    ),
    "a layer norm in float32, and its gradient": (
        "casts", CUDA, norm_in_float32, TOKENS,
        "cast cast cast cast cast add -> pointwise",
    ),
    "an activation written out": (
        "written_out", CPU, lambda n, x: n.op("mul", [n.op("sigmoid", [x]), x]), TOKENS,
        "sigmoid mul -> silu",
    ),
    "a bias that is added": (
        "bias", CPU, lambda n, x: n.linear(x, "a", 4, bias=False) + n.weight("b", 4), TOKENS,
        "add ->",
    ),
    "a tree, and a vector that broadcasts": (
        "pointwise", CUDA,
        lambda n, x: n.op("mul", [n.op("tanh", [x]), n.op("exp", [x])]) + n.weight("v", 4), TOKENS,
        "tanh exp mul add -> pointwise",
    ),
    "a comparison, and what it chooses": (
        "pointwise", CPU,
        lambda n, x: n.op("where", [n.op("gt", [x], other=0.5), x, n.op("neg", [x])]), TOKENS,
        "gt neg where -> pointwise",
    ),
    "a comparison at the end": (
        "pointwise", CPU, lambda n, x: n.op("lt", [n.relu(x), n.op("abs", [x])]), TOKENS,
        "relu abs lt -> pointwise",
    ),
    "a norm of images, channels last": (
        "pointwise", CPU, lambda n, x: n.relu(n.batch_norm(n.max_pool2d(x, 2, stride=2), "n")),
        IMAGE, "batch_norm relu -> pointwise",
    ),
    "a norm alone": ("pointwise", CPU, lambda n, x: n.batch_norm(x, "n"), IMAGE,
                     "batch_norm -> pointwise"),
    "an activation that is written out": (  # tests/graphs/test_written.py has all of them
        "written_out", CPU, lambda n, x: n.op("mul", [n.op("sigmoid", [x]), x]), TOKENS,
        "sigmoid mul -> silu",
    ),
    "a vector added behind a linear layer": (
        "bias", CPU, lambda n, x: n.linear(x, "a", 6, bias=False) + n.weight("g", 6), TOKENS,
        "add ->",
    ),
    "a vector behind a product, both of values": (
        "bias", CPU, lambda n, x: by_value(n, x) + n.input("vector", (24,)), TOKENS, "add ->",
    ),
    "a vector behind a product that is scaled, on the left": (
        "bias", CPU, lambda n, x: n.input("vector", (1, 24)) + by_value(n, x, alpha=0.5), TOKENS,
        "add -> reshape",
    ),
    "a constant behind a product of values": (
        "bias", CPU, lambda n, x: by_value(n, x) + n.weight("b", 24), TOKENS, "add ->",
    ),
    "a vector behind a convolution, both of values": (
        "bias", CPU, conv_by_value, IMAGE, "add reshape ->",
    ),
    "a matrix [K, N] that is a value": (
        "channels_last", HOPPER32, by_value, (64, 16), "-> permute",
    ),
    "a matrix [N, K] that is a value": (
        "channels_last", HOPPER32,
        lambda n, x: n.op("matmul", [x, n.permute(n.input("matrix", (24, 16)), 1, 0)]), (64, 16),
        "permute ->",
    ),
    "a residual behind a product of values, and an activation": (
        "epilogues", HOPPER32,
        lambda n, x: n.relu(x + (by_value(n, x, 16) + n.input("vector", (16,)))), (64, 16),
        "add relu ->",
    ),
    "what two ops compute of the same": (
        "common", CPU,
        lambda n, x: n.op("softmax", [x]) + n.op("mul", [x, n.op("softmax", [x])]), TOKENS,
        "softmax ->",
    ),
    "a scale by channel behind a linear layer": (
        "scale", CPU, lambda n, x: n.op("mul", [n.linear(x, "a", 6), n.weight("g", 6)]), TOKENS,
        "mul ->",
    ),
    "a scale by channel behind a convolution, on the left": (
        "scale", CPU, lambda n, x: n.op("mul", [n.weight("g", 1, 4, 1, 1), a_conv(n, x)]), IMAGE,
        "mul ->",
    ),
    "a norm and an activation of images put together": (
        "concat_pointwise", CPU, normed, IMAGE, "pointwise ->",
    ),
    "an activation alone, of tokens put together": (
        "concat_pointwise", CUDA, lambda n, x: n.relu(n.concat([x, x, x], 2)), TOKENS,
        "relu ->",
    ),
    "a variance, and what is normed by it": (
        "reductions", CPU, normed_by_its_own, TOKENS, "sub mul mul -> pointwise",
    ),
    "two sums of the same": (
        "reductions", CPU,
        lambda n, x: summed(n, x) + summed(n, n.op("mul", [x, n.op("abs", [x])])), TOKENS,
        "sum pointwise ->",
    ),
    "a sum that needs another one": (
        "reductions", CPU, lambda n, x: summed(n, n.op("mul", [x, summed(n, x)])), TOKENS,
        "mul ->",
    ),
    "what stands behind a sum": ("reductions", CUDA, behind, TOKENS, "sum exp -> reduce_results"),
    "what stands behind a sum, and more that nothing waits for": (
        "reductions", CUDA, many_behind, TOKENS, "sum exp add add add add -> reduce_results",
    ),
    "a cast behind a sum": (
        "reductions", CUDA,
        lambda n, x: x + n.op("cast", [n.op("softmax", [
            n.op("cast", [summed(n, x)], dtype="float32")
        ])], dtype="bfloat16"), TOKENS, "cast ->",
    ),
    "distances from the first row": (
        "reductions", CUDA, apart_from, TOKENS, "reshape slice reshape sub sum -> reduce_results",
    ),
    "distances from another row": (
        "reductions", CUDA, lambda n, x: apart_from(n, x, 1), TOKENS, "sub ->",
    ),
    "a gradient behind a mask, which two sums and another expression read": (
        "reductions", CPU,
        lambda n, x: (
            (y := n.op("where", [n.op("gt", [x], other=0.0), x, x + n.weight("v", 4)]))
            + summed(n, y) + summed(n, n.op("mul", [x, y]))
        ), TOKENS, "pointwise mul sum ->",
    ),
    "what a training step casts and counts": (
        "foreach", CUDA, trained, TOKENS,
        "cast cast cast cast cast cast add add add mul mul -> foreach foreach foreach foreach",
    ),
    "at most eight values": (
        "pointwise", CPU,
        lambda n, x: functools.reduce(
            lambda y, i: y + n.weight(f"w{i}", 4), range(8), n.op("exp", [x])
        ), TOKENS, "exp add add add add add add add add -> pointwise pointwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APPLIES)
def test_it_applies(name: str) -> None:
    run, backend, write, shape, change = APPLIES[name]
    program = nets.program(write, *shape).retyped({"x": backend.dtype})
    before, after = both(run, program, backend)
    gone, come = change.split("->")
    found, wanted = ops(before), ops(after)
    assert (found - wanted, wanted - found) == (Counter(gone.split()), Counter(come.split()))
    layers = {layer for node in program.nodes for layer in node.layers}
    stays = {layer for node in after.nodes for layer in node.layers}
    folded = {node.layers[0] for node in program.nodes if node.op == "batch_norm" and node.layers}
    assert layers - folded <= stays, "a layer is forgotten"


@pytest.mark.parametrize("seed", range(24))
def test_rows_in_any_order_are_the_same(seed: int) -> None:
    """Rolls, windows and grids in a row, between norms and sums."""
    draw = random.Random(seed)

    def moved(net: Net, x: Value) -> Value:
        n, h, w, c = x.shape
        for kind in draw.choices(["roll", "windows", "turn"], k=draw.randint(1, 2)):
            if kind == "roll":
                axes = draw.choice([(1,), (2,), (1, 2)])
                shifts = tuple(draw.randint(-4, 4) for _ in axes)
                x = net.op("roll", [x], shifts=shifts, axes=axes)
            elif kind == "windows":
                order = draw.sample(range(1, 5), 4)
                x = net.permute(net.reshape(x, n, 2, h // 2, 3, w // 3, c), 0, *order, 5)
            else:
                x = net.permute(x, 0, 2, 1, 3)
            x = net.reshape(x, n, h, w, c)
        return x

    def write(net: Net, x: Value) -> Value:
        y = moved(net, net.layer_norm(x, "norm"))
        y = net.op("softmax", [y])
        z = x + moved(net, y)
        return net.op("softmax", [net.layer_norm(z, "behind")]) + z

    program = nets.program(write, 4, 6, 8).retyped({"x": "bfloat16"})
    found = kept(program, CUDA)
    assert (
        ops(found)["roll"] + ops(found)["permute"] < ops(program)["roll"] + ops(program)["permute"]
    )


def test_more_members_than_a_launch_takes_are_of_several() -> None:
    def write(net: Net, x: Value) -> None:
        for i in range(200):
            net.output(f"y{i}", wide(net, net.input(f"x{i}", (i % 3 + 1, 2), "bfloat16")))

    _, after = both("foreach", nets.program(write, *TOKENS), CUDA)
    assert [len(node.outputs) for node in after.nodes] == [100, 100]
    assert most_members(1) < 200 < 2 * most_members(1)


def test_what_is_large_is_computed_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach, "LARGEST", 16)
    _, after = both("foreach", nets.program(trained, *TOKENS), CUDA)
    made = [[after.types[v].shape for v in n.outputs] for n in after.nodes if n.op == "foreach"]
    assert made == [[(), (), ()], [(16,), (16,)]]


@pytest.mark.parametrize(
    ("write", "first", "results"), [(by_channel, ["image"] * 2, 6), (gradient_by_channel, [], 5)]
)
def test_a_batch_norm_in_training_is_two_ops(write: Write, first: list[str], results: int) -> None:
    """All that has one number a channel is computed by the reduction."""
    before, after = both("reductions", nets.program(write, *TOKENS), CUDA)
    assert sum(n for op, n in ops(before).items() if op != "reshape") >= 8
    assert {op: n for op, n in ops(after).items() if op != "reshape"} == {
        "reduce_results": 1, "pointwise": 1,
    }  # fmt: skip
    (node,) = (node for node in after.nodes if node.op == "reduce_results")
    assert [node.inputs[i] for i in node.attributes["first"]] == first  # type: ignore[index, union-attr]
    assert len(node.outputs) == results <= MOST_RESULTS


def test_what_stands_together_is_put_together_once() -> None:
    before, after = both("concats", nets.program(dense_block, *IMAGE), CPU)
    inputs = [[len(n.inputs) for n in p.nodes if n.op == "concat"] for p in (before, after)]
    assert inputs[0] == list(range(2, 19))
    assert inputs[1] == [*range(2, 9), *range(2, 9), 2, 3, 4]
    # Of those of 9 to 15 all read the one of 8, and of those of 16 to 18 the one of 15.
    first = [n.inputs[0] for n in after.nodes if n.op == "concat"]
    assert [len(set(some)) for some in (first[:7], first[7:14], first[14:])] == [1, 1, 1]


def test_every_pass_is_seen_to_apply() -> None:
    assert {case[0] for case in APPLIES.values()} | {"sparse", "stem", "stem_chain"} == set(PASSES)


# --- where it must not ---------------------------------------------------------------------------


def sdpa(net: Net, x: Value, q: int, k: int, v: int, **rest: Any) -> Value:
    """Attends from one head, with depths of ``q`` = ``k`` and ``v``."""
    parts = [split(net, net.linear(x, n, c), 1) for n, c in (("q", q), ("k", k), ("v", v))]
    return join(net, net.scaled_dot_product_attention(*parts, **rest))


def reordered(net: Net, x: Value, *axes: int, after: Any = None) -> Value:
    """Norms an image [N, H, W, C], and permutes it."""
    y = net.permute(net.layer_norm(x, "norm"), *axes)
    return after(net, y) if after else y


def scaled_twice(net: Net, x: Value) -> Value:
    """Scales a product of which another op reads too."""
    y = net.linear(x, "a", 4)
    return net.op("mul", [y, net.weight("g", 4)]) + y


def itself(net: Net, x: Value) -> Value:
    """Adds a 1 x 1 convolution to the 3 x 3 of its own result."""
    y = raw(net, x, "one", 4, 1)
    return net.relu(raw(net, y, "two", 4, 3, padding=1) + y)


def given_filters(net: Net, x: Value) -> Value:
    """Convolves with filters that are an input, and norms that."""
    y = net.op("conv2d", [x, net.input("filters", (4, 3, 3, 3))], "a", padding=1)
    return pool(net, net.relu(net.batch_norm(y, "n")))


def rows(x: Value) -> Value:
    """Makes rows of an image [N, H, W, C]: [N, H, W * C]."""
    return x.net.reshape(x, BATCH, x.size(1), x.size(2) * x.size(3))


def last_two(x: Value) -> Value:
    """Makes [N, C, H * W] of an image [N, H, W, C], without moving a number."""
    return x.net.reshape(x, BATCH, x.size(3), x.size(1) * x.size(2))


def no_convolutions(net: Net, x: Value) -> Value:
    """Norms tokens, and reads them as an image three times."""
    y = net.reshape(net.layer_norm(x, "norm"), BATCH, 3, 4, x.size(2))
    parts = [net.relu(y), net.gelu(y), net.op("softmax", [y])]
    parts = [net.reshape(each, BATCH, 12, x.size(2)) for each in parts]
    return parts[0] + parts[1] + parts[2]


REFUSES: dict[str, tuple[str, Backend, Write, tuple[int, ...]]] = {
    "an activation": ("constants", CPU, lambda n, x: x + n.weight("a", 4), TOKENS),
    "a size that is not known": ("constants", CPU, lambda n, x: x + token(n, 4, count=5), TOKENS),
    "rows: the channels move": ("rows", CPU, lambda n, x: reordered(n, x, 0, 1, 3, 2), IMAGE),
    "rows: the images move": ("rows", CPU, lambda n, x: reordered(n, x, 1, 0, 2, 3), IMAGE),
    "rows: another reads the norm": (
        "rows", CPU, lambda n, x: n.permute(used(n, n.layer_norm(x, "norm")), 0, 2, 1, 3), IMAGE,
    ),
    "rows: the channels are rolled": (
        "rows", CPU,
        lambda n, x: n.op("roll", [n.layer_norm(x, "norm")], shifts=(1,), axes=(3,)), IMAGE,
    ),
    "rows: of no multiple of 16 bytes": (
        "rows", CUDA, lambda n, x: reordered(n, x, 0, 2, 1, 3), (4, 5, 12),
    ),
    "rows: of more than 2 KB": (
        "rows", CUDA, lambda n, x: reordered(n, x, 0, 2, 1, 3), (2, 3, 1032),
    ),
    **{
        f"rows: a class token before {what}": ("rows", backend, write, shape)
        for what, backend, write, shape in [
            ("a norm that another reads", CPU,
             lambda n, x: classed(n, used(n, n.layer_norm(x, "norm"))), TOKENS),
            ("a norm whose rows are cut", CPU,
             lambda n, x: classed(n, n.reshape(n.layer_norm(x, "norm"), BATCH, 10, 2)), TOKENS),
            ("a norm of values", CPU,
             lambda n, x: classed(
                 n, n.op("layer_norm", [x, *[n.op("mean", [x], axes=(0, 1), keepdim=False)] * 2])
             ), TOKENS),
            ("rows of no multiple of 16 bytes", CUDA,
             lambda n, x: classed(n, n.layer_norm(x, "norm")), (5, 12)),
            ("rows of more than 2 KB", CUDA,
             lambda n, x: classed(n, n.layer_norm(x, "norm")), (2, 1032)),
        ]
    },
    "rows: a permute alone": ("rows", CPU, lambda n, x: n.permute(x, 0, 2, 1, 3), IMAGE),
    "batch_norm: another reads the convolution": (
        "batch_norm", CPU, lambda n, x: n.batch_norm(used(n, a_conv(n, x)), "n"), IMAGE,
    ),
    "batch_norm: the convolution is an output": (
        "batch_norm", CPU, lambda n, x: n.batch_norm(seen(n, a_conv(n, x)), "n"), IMAGE,
    ),
    "batch_norm: something is in between": (
        "batch_norm", CPU, lambda n, x: n.batch_norm(n.relu(a_conv(n, x)), "n"), IMAGE,
    ),
    "batch_norm: it comes first": ("batch_norm", CPU, lambda n, x: n.batch_norm(x, "n"), IMAGE),
    "batch_norm: filters are an input": ("batch_norm", CPU, given_filters, IMAGE),
    "attention: values of another depth": (
        "attention", CPU, lambda n, x: sdpa(n, x, 4, 4, 6), TOKENS,
    ),
    "attention: too deep heads": (
        "attention", CPU, lambda n, x: sdpa(n, x, 300, 300, 300), TOKENS,
    ),
    "attention: a scale below 0": (
        "attention", CPU, lambda n, x: sdpa(n, x, 4, 4, 4, scale=-1.0), TOKENS,
    ),
    "attention: a scale below 0, written out": (
        "attention", CPU, lambda n, x: written(n, x, scores=lambda y: times(y, -0.5)), TOKENS,
    ),
    "attention: what is added is scaled": (
        "attention", CPU,
        lambda n, x: written(n, x, scores=lambda y: times(y + n.weight("bias", 2, 5, 5), 0.5)),
        TOKENS,
    ),
    "attention: windows beside heads, with a mask": (
        "attention", CPU, lambda n, x: beside(n, x, masked=True), (12, 4),
    ),
    "attention: windows beside heads, of keys that all share": (
        "attention", CPU, lambda n, x: beside(n, x, shared=True), (12, 4),
    ),
    "attention: scores are read elsewhere": (
        "attention", CPU, lambda n, x: written(n, x, scores=lambda y: used(n, y)), TOKENS,
    ),
    "attention: probabilities are an output": (
        "attention", CPU, lambda n, x: written(n, x, shares=lambda y: seen(n, y)), TOKENS,
    ),
    "attention: scores pass through something else": (
        "attention", CPU, lambda n, x: written(n, x, scores=n.relu), TOKENS,
    ),
    "attention: the product has a bias of keys": (
        "attention", CPU,
        lambda n, x: written(n, x, product=lambda q, k: n.op(
            "matmul", [q, k, n.weight("bias", 5)]
        )), TOKENS,
    ),
    "bias: a value behind a linear layer of weights": (
        "bias", CPU, lambda n, x: n.linear(x, "a", 6, bias=False) + n.input("vector", (6,)), TOKENS,
    ),
    "bias: a vector behind a product of each image": (
        "bias", CPU,
        lambda n, x: n.op("matmul", [x, x], transpose_b=True) + n.input("vector", (5,)), TOKENS,
    ),
    "bias: the product is read elsewhere": (
        "bias", CPU, lambda n, x: used(n, by_value(n, x)) + n.input("vector", (24,)), TOKENS,
    ),
    "bias: rows of a product that are no vector": (
        "bias", CPU, lambda n, x: by_value(n, x) + n.input("rows", (5, 24)), TOKENS,
    ),
    **{
        f"channels_last: a matrix of values, {what}": ("channels_last", backend, write, shape)
        for what, backend, write, shape in [
            ("few rows", HOPPER32, by_value, (63, 16)),
            ("rows of a batch", HOPPER32, by_value, (16,)),
            ("on a CPU", CPU, by_value, (64, 16)),
            ("on another GPU", CUDA, by_value, (64, 16)),
            ("an odd K", HOPPER32, by_value, (64, 15)),
            ("an odd N", HOPPER32, lambda n, x: by_value(n, x, 20), (64, 16)),
            ("an odd K in 16 bits", HOPPER, by_value, (64, 12)),
            ("one for each image", HOPPER32,
             lambda n, x: n.op("matmul", [x, n.input("matrices", (BATCH, 16, 24))]), (64, 16)),
        ]
    },
    "attention: probabilities are scaled": (
        "attention", CPU, lambda n, x: written(n, x, shares=lambda y: times(y, 2.0)), TOKENS,
    ),
    "channels_last: no image": (
        "channels_last", CPU, lambda n, x: n.relu(n.layer_norm(x, "n")), TOKENS,
    ),
    "tokens: two class tokens": (
        "tokens", CPU, lambda n, x: n.concat([token(n, 4, count=2), x], 1), TOKENS,
    ),
    "tokens: a token of one number": (
        "tokens", CPU, lambda n, x: n.concat([token(n, 4, 1, 1, 1), x], 1), TOKENS,
    ),
    "tokens: a token behind others": (
        "tokens", CPU, lambda n, x: n.concat([x, token(n, 4)], 1), TOKENS,
    ),
    "tokens: beside the others": (
        "tokens", CPU, lambda n, x: n.concat([token(n, 4, count=5), x], 2), TOKENS,
    ),
    "tokens: three values": (
        "tokens", CPU, lambda n, x: n.concat([token(n, 4), x, x], 1), TOKENS,
    ),
    "tokens: a token that was computed": (
        "tokens", CPU,
        lambda n, x: n.concat([n.expand(n.slice(x, 1, 0, 1), BATCH, 1, 4), x], 1), TOKENS,
    ),
    "tokens: the norm of the second": (
        "tokens", CPU, lambda n, x: n.layer_norm(first(n, x, 1), "n"), TOKENS,
    ),
    "tokens: another reads the first": (
        "tokens", CPU, lambda n, x: n.layer_norm(used(n, first(n, x)), "n"), TOKENS,
    ),
    "tokens: the first is an output": (
        "tokens", CPU, lambda n, x: n.layer_norm(seen(n, first(n, x)), "n"), TOKENS,
    ),
    "tokens: the norm of a row of an image": (
        "tokens", CPU,
        lambda n, x: n.layer_norm(n.reshape(n.slice(x, 1, 0, 1), BATCH, 48), "n"), IMAGE,
    ),
    "epilogues: another reads the product": (
        "epilogues", CPU, lambda n, x: used(n, n.linear(x, "a", 4)) + x, TOKENS,
    ),
    "epilogues: the product is an output": (
        "epilogues", CPU, lambda n, x: n.gelu(seen(n, a_conv(n, x))), IMAGE,
    ),
    "scale: a product that another op reads": ("scale", CPU, scaled_twice, TOKENS),
    "scale: a scale by token": (
        "scale", CPU, lambda n, x: n.op("mul", [n.linear(x, "a", 4), n.weight("g", x.size(1), 1)]),
        TOKENS,
    ),
    "epilogues: a product is added to itself": (
        "epilogues", CPU, lambda n, x: (y := n.linear(x, "a", 4)) + y, TOKENS,
    ),
    "epilogues: the sum broadcasts the product": (
        "epilogues", CPU, lambda n, x: x + n.linear(n.slice(x, 1, 0, 1), "a", 4), TOKENS,
    ),
    "epilogues: a gate of rounded values": (
        "epilogues", CPU, lambda n, x: n.op("mul", [
            n.linear(n.op("fake_quantize", [x], scale=0.1), "a", 4), x,
        ]), TOKENS,
    ),
    "epilogues: the sum broadcasts the other": (
        "epilogues", CPU, lambda n, x: n.slice(x, 1, 0, 1) + n.linear(x, "a", 4), TOKENS,
    ),
    "epilogues: a weight is added": (
        "epilogues", CPU, lambda n, x: n.linear(x, "a", 4) + n.weight("b", 4), TOKENS,
    ),
    "epilogues: a group norm adds no residual": (
        "epilogues", CPU, lambda n, x: grouped(n, x, 3) + x, IMAGE,
    ),
    "epilogues: a norm is no product": (
        "epilogues", CPU, lambda n, x: n.relu(n.layer_norm(x, "a") + x), TOKENS,
    ),
    **{
        f"shortcut: {why}": ("shortcut", CPU, lambda n, x, rest=rest: block(n, x, **rest), IMAGE)
        for why, rest in {
            "of 3 x 3": {"size": 3, "padding": 1},
            "of groups": {"groups": 3},
            "it reads further apart": {"two": {"padding": 2, "dilation": 2}},
            "the last has groups": {"two": {"padding": 1, "groups": 2}},
            "the last has a stride": {"stride": 4, "one": 2, "two": {"padding": 1, "stride": 2}},
            "no relu": {"end": "none"},
            "gelu": {"end": "gelu"},
            "it is an output": {"tell": seen},
            "another reads it": {"tell": used},
        }.items()
    },
    "rounded: floats are read, too": (
        "rounded", HOPPER, lambda n, x: in_8_bits(n, used(n, n.layer_norm(x, "norm")), "one"),
        (5, 32),
    ),
    "rounded: another GPU": (
        "rounded", CUDA, norm_in_8_bits, (5, 32),
    ),
    "rounded: an attention in float32": ("rounded", HOPPER32, heads_in_8_bits, (5, 32)),
    "rounded: heads of many channels": (
        "rounded", HOPPER, lambda n, x: heads_in_8_bits(n, x, width=288), (5, 288),
    ),
    "shortcut: padded": (
        "shortcut", CPU,
        lambda n, x: n.relu(
            raw(n, x, "a", 4, 3, padding=2) + raw(n, x, "b", 4, 1, padding=1)
        ), IMAGE,
    ),
    "shortcut: what it gives is convolved too": ("shortcut", CPU, itself, IMAGE),
    "patches: a CPU": ("patches", CPU, tiles, IMAGE),
    "patches: as many steps, of channels that the copy engine takes": (
        "patches", CUDA, lambda n, x: tiles(n, x, stride=(2, 2)), (64, 6, 8),
    ),
    **{
        f"patches: {why}": ("patches", CUDA, lambda n, x, rest=rest: tiles(n, x, **rest), IMAGE)
        for why, rest in {
            "some are left out": {"stride": (3, 4)}, "they overlap": {"stride": (1, 4)},
            "padding": {"padding": (2, 4)}, "groups": {"groups": 3}, "1 x 1": {"stride": (1, 1)},
            "apart": {"dilation": (2, 1)}, "a rest at the edge": {"stride": (2, 3)},
        }.items()
    },
    "patches: sparse": ("patches", *with_format(tiles, "tiles", backend=CUDA), IMAGE),
    **{
        f"eight_bit: {why}": (
            "eight_bit", on, lambda n, x, rest=rest: rounded(n, x, **rest), (c, 5, 6)
        )
        for why, on, c, rest in (
            ("another GPU than Hopper", CUDA, 16, {}), ("too many steps", CPU, 4, {"steps": 256}),
            ("filters as they are", CPU, 4, {"filters": False}),
            ("groups of two", CPU, 4, {"groups": 4}),
        )
    },
    "shortcut: sparse": (
        "shortcut", *with_format(block, "shortcut"), IMAGE,
    ),
    "shortcut: the last is sparse": ("shortcut", *with_format(block, "two"), IMAGE),
    "chain: a CPU": ("chain", CPU, links, (80, 2, 3)),
    "chain: a shortcut on a CPU": ("chain", CPU, bottleneck, (16, 2, 3)),
    **{
        f"chain: a shortcut, {why}": (
            "chain", CUDA, lambda n, x, rest=rest: bottleneck(n, x, **rest), (16, 3, 4)
        )
        for why, rest in {
            "not in the table": {"f": 128}, "3 x 3": {"kernel": 3}, "a stride": {"stride": 2},
            "gelu follows": {"follow": "gelu"},
        }.items()
    },
    "chain: sparse": ("chain", *with_format(links, "link", backend=CUDA), (80, 2, 3)),
    "chain: the next is sparse": ("chain", *with_format(links, "next", backend=CUDA), (80, 2, 3)),
    **{
        f"chain: {why}": ("chain", CUDA, lambda n, x, rest=rest: links(n, x, **rest), (80, 3, 4))
        for why, rest in {
            "wide": {"f": 256}, "narrow": {"c": 32}, "not in the table": {"c": 128, "f": 64},
            "a stride": {"stride": 2}, "3 x 3": {"kernel": 3}, "groups": {"groups": 2},
            "gelu": {"end": "gelu"}, "gelu follows": {"follow": "gelu"},
        }.items()
    },
    "qkv: keys are values": (
        "qkv", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(*[split(n, n.linear(x, "a", 4))] * 3)),
        TOKENS,
    ),
    "qkv: another reads the keys": (
        "qkv", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(
            split(n, n.linear(x, "q", 4)), split(n, used(n, n.linear(x, "k", 4))),
            split(n, n.linear(x, "v", 4)),
        )), TOKENS,
    ),
    "qkv: not linear": (
        "qkv", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(
            split(n, n.linear(x, "q", 4)), split(n, n.relu(n.linear(x, "k", 4))), split(n, x)
        )), TOKENS,
    ),
    "qkv: of other widths": (
        "qkv", CPU,
        lambda n, x: join(n, n.scaled_dot_product_attention(
            split(n, n.linear(x, "q", 4)), split(n, n.linear(n.concat([x, x], 2), "k", 4)),
            split(n, n.linear(x, "v", 4)),
        )), TOKENS,
    ),
    "qkv: sparse": ("qkv", *with_format(attended, "v"), TOKENS),
    **{
        f"depthwise: {why}": (
            "depthwise", CPU, lambda n, x, rest=rest: projections(n, x, **rest),
            (12 + rest.get("token", False), 4),
        )
        for why, rest in {
            "the norm is an output": {"seen": "norm"},
            "its weight is computed": {"computed": True},
            "another reads the norm": {"seen": "norm as well"},
            "the image is an output": {"seen": "image"},
            "the token is an output": {"token": True, "seen": "token"},
            "the token goes elsewhere": {"token": True, "seen": "token as well"},
            "the rest is an output": {"token": True, "seen": "rest"},
            "a convolution is an output": {"seen": "conv"},
            "of 7 x 7": {"kernel": 7},
            "two of them": {"count": 2},
            "a wide padding": {"padding": 2},
            "the token comes last": {"token": True, "swapped": True},
            "rows stay": {"flatten": rows, "stride": 1},
            "nothing is flattened": {"flatten": last_two, "stride": 1},
        }.items()
    },
    "depthwise: no convolutions": ("depthwise", CPU, no_convolutions, (12, 4)),
    "depthwise: an AMD GPU": ("depthwise", HIP, projections, (12, 8)),
    "depthwise: an odd width": ("depthwise", CUDA, projections, (12, 12)),
    "depthwise: sparse": ("depthwise", *with_format(projections, "k"), (12, 4)),
    **{
        f"mlp: {why}": ("mlp", backend, mlp, (3, 64))
        for why, backend in {
            "a CPU": CPU, "no Hopper": CUDA, "AMD": HIP, "float32": HOPPER32,
            "a sparse layer": replace(HOPPER, formats={"fc1": "steps"}),
        }.items()
    },
    **{
        f"{name}: {why}": (
            name, on, lambda n, x, name=name, rest=rest: mlp(n, x, **{
                "measured": name == "mlp", **rest
            }), shape,
        )
        for name in ("norms", "mlp")
        for why, on, shape, rest in (
            ("an MLP of another width", HOPPER, (3, 128), {}),
            ("an MLP of images", HOPPER, (2, 64, 64), {}),
            ("an MLP of one row an image", HOPPER, (64,), {}),
            ("an MLP with an activation behind it", HOPPER, (3, 64), {"relu": True}),
            ("an MLP whose second layer is sparse", replace(HOPPER, formats={"fc2": "steps"}),
             (3, 64), {}),
            ("an MLP of relu", HOPPER, (3, 64), {"between": "relu"}),
            ("an MLP whose norm another op reads", HOPPER, (3, 64), {"seen": "norm"}),
            ("an MLP whose hidden layer is an output", HOPPER, (3, 64), {"seen": "hidden"}),
            ("an MLP of another residual", HOPPER, (3, 64), {"elsewhere": True}),
        )
    },
    **{
        f"align: {why}": ("align", backend, mixed, (4, 100))
        for why, backend in {
            "a CPU": CPU, "no Hopper": CUDA, "AMD": HIP,
            "float32": replace(HOPPER, dtype="float32"),
        }.items()
    },
    "align: a multiple": ("align", HOPPER, lambda n, x: mixed(n, x, 3, 72), (4, 96)),
    "align: too few numbers": ("align", HOPPER, lambda n, x: mixed(n, x, 3, 20), (4, 60)),
    **{
        f"align: {op}, which gives no finite numbers": (
            "align", HOPPER, lambda n, x, op=op: mixed(n, x, between=op), (4, 100)
        )
        for op in ("exp", "log", "sqrt", "rsqrt", "reciprocal")
    },
    "align: a division": (
        "align", HOPPER,
        lambda n, x: mixed(n, x, tell=lambda n, y: n.op("div", [y, n.op("abs", [x])])), (4, 100),
    ),
    "align: a softmax along it": (
        "align", HOPPER, lambda n, x: mixed(n, x, between="softmax"), (4, 100),
    ),
    "align: a norm along it": (
        "align", HOPPER,
        lambda n, x: mixed(n, x, tell=lambda n, y: n.layer_norm(y, f"n{len(n._weights)}")),
        (4, 100),
    ),
    "align: a norm of zeros": (
        "align", HOPPER,
        lambda n, x: mixed(
            n, x, tell=lambda n, y: turn3(n.layer_norm(turn3(y), f"n{len(n._weights)}", 0.0))
        ), (4, 100),
    ),
    "align: a number that is infinite": (
        "align", HOPPER,
        lambda n, x: mixed(n, x, tell=lambda n, y: n.op("maximum", [y], other=-np.inf)), (4, 100),
    ),
    "align: a head": ("align", HOPPER, lambda n, x: n.linear(x, "head", 1001), (4, 96)),
    "align: a head of what is cut": (
        "align", HOPPER, lambda n, x: n.linear(x, "head", 1001), (4, 100),
    ),
    "align: a hidden layer of one row an image": (
        "align", HOPPER, lambda n, x: n.linear(n.relu(n.linear(x, "a", 100)), "b", 8), (96,),
    ),
    **{
        f"norms: {why}": ("norms", backend, around_a_norm, (5, 32))
        for why, backend in {
            "a CPU": CPU, "no Hopper": CUDA, "AMD": HIP, "float32": HOPPER32,
            "an older GPU": replace(HOPPER, architecture="sm_89"),
            "a newer GPU": replace(HOPPER, architecture="sm_100a"),
            "a sparse layer before it": replace(HOPPER, formats={"proj": "steps"}),
            "a sparse layer behind it": replace(HOPPER, formats={"fc1": "steps"}),
        }.items()
    },
    **{
        f"norms: {why}": (
            "norms", HOPPER, lambda n, x, rest=rest: around_a_norm(n, x, *"ab", **rest), (5, 32)
        )
        for why, rest in {
            "the norm is an output": {"seen": "norm"},
            "another op reads the norm": {"seen": "exp"},
            "nothing is added before it": {"between": ""},
            "what is before it is multiplied": {"between": "mul"},
            "an activation before it": {"between": "relu"},
            "another op before it": {"between": "softmax"},
            "something is added behind it": {"added": True, "f": 32},
            "a product that clusters share": {"k": 1032},
            "an odd product before it": {"k": 20},
            "an odd product behind it": {"f": 36},
            "a weight before it is computed": {"computed": "proj"},
            "its weight is computed": {"computed": "norm"},
            "one of two weights behind it is computed": {"computed": "b"},
        }.items()
    },
    "norms: groups of columns that are not whole": ("norms", HOPPER, around_a_norm, (5, 48)),
    "norms: of what comes in": (
        "norms", HOPPER, lambda n, x: n.linear(n.layer_norm(x, "norm"), "a", 8), (5, 32),
    ),
    "norms: it is added behind a layer of its own": (
        "norms", HOPPER,
        lambda n, x: (
            y := n.layer_norm(x + n.linear(n.relu(x), "a", 32), "norm")
        ) + n.linear(y, "b", 32), (5, 32),
    ),
    "align: sparse": (
        "align", replace(HOPPER, formats={f"{i}.fc{j}": "steps" for i in range(3) for j in (1, 2)}),
        mixed, (4, 100),
    ),
    **{
        f"squeeze_excite: {what}": ("squeeze_excite", HOPPER, write, IMAGE)
        for what, write in [
            ("the gate is an output", lambda n, x: gated(n, x, gates=lambda y: seen(n, y))),
            ("hidden numbers are read elsewhere",
             lambda n, x: gated(n, x, between=lambda y: used(n, y))),
            ("something is in between",
             lambda n, x: gated(n, x, between=lambda y: n.op("softmax", [y]))),
            ("the mean is another image's", lambda n, x: gated(
                n, x, of=a_conv(n, x, "other", 16))),
            ("a mean of rows", lambda n, x: gated(
                n, x, mean=lambda y: n.op("mean", [y], axes=(2,), keepdim=True))),
            ("the largest number", lambda n, x: gated(
                n, x, mean=lambda y: n.op("amax", [y], axes=(2, 3), keepdim=True))),
            ("a pool of a part", lambda n, x: gated(
                n, x, mean=lambda y: n.avg_pool2d(n.slice(y, 2, 0, 5), (5, 8)))),
            ("one gate for all channels", lambda n, x: gated(n, x, width=1)),
            ("a padded product", lambda n, x: gated(
                n, x, padding=1, between=lambda y: n.max_pool2d(y, 3, stride=1))),
            ("products in groups", lambda n, x: gated(n, x, hidden=4, groups=2)),
            ("too many hidden numbers", lambda n, x: gated(n, x, hidden=2056)),
        ]
    },
    "squeeze_excite: channels that are no vectors": (
        "squeeze_excite", HOPPER,
        lambda n, x: n.op("mul", [y := a_conv(n, x, "a", 12), n.op("sigmoid", [n.conv2d(
            n.conv2d(n.op("mean", [y], axes=(2, 3), keepdim=True), "b", 3, 1), "c", 12, 1
        )])]), IMAGE,
    ),
    "squeeze_excite: float32": (
        "squeeze_excite", Backend("cuda", "float32", architecture="sm_90a"), gated, IMAGE,
    ),
    "squeeze_excite: an older GPU": (
        "squeeze_excite", Backend("cuda", "bfloat16", architecture="sm_89"), gated, IMAGE,
    ),
    "squeeze_excite: many weights on a CPU": (
        "squeeze_excite", CPU, lambda n, x: gated(n, x, hidden=2**14 + 1), IMAGE,
    ),
    "align: weights that are computed": (
        "align", HOPPER,
        lambda n, x: functools.reduce(
            lambda y, i: n.op("linear", [y, n.op("exp", [n.weight(f"{i}", 100, 100)])]), range(4), x
        ), (4, 100),
    ),
    "pointwise: one op": ("pointwise", CPU, lambda n, x: n.op("silu", [x]), TOKENS),
    "pointwise: another reads it": (
        "pointwise", CPU, lambda n, x: (y := n.op("exp", [x])) + n.linear(y, "a", 4), TOKENS,
    ),
    "pointwise: it is an output": (
        "pointwise", CPU, lambda n, x: n.relu(seen(n, n.op("exp", [x]))), TOKENS,
    ),
    "pointwise: it is read twice": (
        "pointwise", CPU, lambda n, x: n.op("mul", [(y := n.op("exp", [x])), y]), TOKENS,
    ),
    "concat_pointwise: another reads it": (
        "concat_pointwise", CPU,
        lambda n, x: n.relu(y := n.concat([x, x], 2)) + n.op("softmax", [y]), TOKENS,
    ),
    "concat_pointwise: it is an output": (
        "concat_pointwise", CPU, lambda n, x: n.relu(seen(n, n.concat([x, x], 2))), TOKENS,
    ),
    "concat_pointwise: along another axis": (
        "concat_pointwise", CPU, lambda n, x: n.relu(n.concat([x, x], 1)), TOKENS,
    ),
    "concat_pointwise: an activation beside it": (
        "concat_pointwise", CPU, lambda n, x: n.concat([x, x], 2) + n.concat([x, x], 2), TOKENS,
    ),
    "concat_pointwise: nine values": (
        "concat_pointwise", CPU, lambda n, x: n.relu(n.concat([x] * 9, 2)), TOKENS,
    ),
    "concat_pointwise: a number that repeats": (
        "concat_pointwise", CPU, lambda n, x: n.concat([x, x], 2) + n.weight("b", 1), TOKENS,
    ),
    "concat_pointwise: a truth value": (
        "concat_pointwise", CPU, lambda n, x: n.op("gt", [n.concat([x, x], 2)], other=0.5), TOKENS,
    ),
    "reductions: axes apart": (
        "reductions", CPU, lambda n, x: n.op("sum", [n.op("tanh", [x])], axes=(1, 3)), IMAGE,
    ),
    "reductions: a function that would be computed twice": (
        "reductions", CPU, lambda n, x: n.op("softmax", [y := n.op("exp", [x])]) + summed(n, y),
        TOKENS,
    ),
    "reductions: it is an output, and is as large as what it is made of": (
        "reductions", CPU, lambda n, x: summed(n, seen(n, n.relu(x))), TOKENS,
    ),
    "reductions: part of an axis moves": (
        "reductions", CPU,
        lambda n, x: n.op("sum", [x + n.slice(x, 2, 0, 1)], axes=(2, 3)), IMAGE,
    ),
    "reductions: sums over different axes": (
        "reductions", CPU, lambda n, x: summed(n, x) + summed(n, x, 2), TOKENS,
    ),
    "foreach: on a CPU": ("foreach", CPU, trained, TOKENS),
    "foreach: one alone": (
        "foreach", CUDA, lambda n, x: n.op("silu", [n.input("w", (4,))]), TOKENS,
    ),
    "foreach: a size is not known": (
        "foreach", CUDA,
        lambda n, x: seen(n, n.op("exp", [x])) and n.op("exp", [n.input("z", (BATCH, 9))]), TOKENS,
    ),
    "foreach: a weight": ("foreach", CUDA, lambda n, x: several(n, n.weight("w", 9)), TOKENS),
    "foreach: it broadcasts": (
        "foreach", CUDA, lambda n, x: several(n, n.input("w", (1,))), TOKENS,
    ),
    "foreach: others give what it reads, and read what it gives": (
        "foreach", CUDA, lambda n, x: between(n, "a", "b"), TOKENS,
    ),
    "reductions: what stands behind a sum, on a CPU": ("reductions", CPU, behind, TOKENS),
    "reductions: what stands behind a sum of a row": (
        "reductions", CUDA, lambda n, x: behind(n, x, (2,)), TOKENS,
    ),
    "reductions: an op that reads other numbers too": (
        "reductions", CUDA, lambda n, x: behind(n, x, op="softmax"), TOKENS,
    ),
    "reductions: a vector that is made of the sum": (
        "reductions", CUDA,
        lambda n, x: x + n.op("mul", [y := summed(n, x), n.op("softmax", [y])]), TOKENS,
    ),
    "reductions: one number for all": (
        "reductions", CUDA,
        lambda n, x: x + n.op("mul", [summed(n, x), n.input("number", (1,), "bfloat16")]), TOKENS,
    ),
    "pointwise: it broadcasts": (
        "pointwise", CPU, lambda n, x: x + n.op("exp", [n.slice(x, 1, 0, 1)]), TOKENS,
    ),
}  # fmt: skip


def test_an_expression_reads_each_value_once() -> None:
    def write(net: Net, x: Value) -> Value:
        return net.op("mul", [x, net.op("sigmoid", [net.op("mul", [x], other=1.702)])])

    _, after = both("pointwise", nets.program(write, *TOKENS), CPU)
    (node,) = after.nodes
    assert node.inputs == ("x",)
    assert node.attributes == {"expression": "x0 x0 1.702 mul sigmoid mul"}


@pytest.mark.parametrize("write", [nets.dense, nets.pre_activation])
@pytest.mark.parametrize("off", [(), ("channels_last",)])
def test_no_batch_norm_is_left(write: Write, off: tuple[str, ...]) -> None:
    final = kept(nets.program(write, 4, 6, 7), CPU, [name for name in PASSES if name not in off])
    assert {"batch_norm", "relu"}.isdisjoint(ops(final))
    assert ops(final)["pointwise"] > 0


@pytest.mark.parametrize("name", REFUSES)
def test_it_does_not_apply(name: str) -> None:
    run, backend, write, shape = REFUSES[name]
    program = nets.program(write, *shape)
    program = program.retyped(dict.fromkeys(program.inputs, backend.dtype))
    before, after = both(run, program, backend)
    assert before.difference(after) == ""


# --- linear layers of odd sizes ------------------------------------------------------------------


def unaligned(program: Program) -> list[str]:
    """Names the dense linear layers that run on older tensor cores."""
    found = [n for n in program.nodes if n.op == "linear" and not n.attributes.get("format")]
    shapes = [(n.output, program.shape(n.inputs[1])) for n in found]
    return [name for name, (f, k) in shapes if not is_aligned((1, 1, k, f), DType.bfloat16)]


def test_tokens_of_a_mixer_are_multiplied_where_they_lie() -> None:
    program = nets.program(nets.mixer, 3, 36, 36).retyped({"x": "bfloat16"})
    found = passes.run(program, HOPPER)
    ends = [n.attributes["epilogue"] for n in found.nodes if n.op == "token_linear"]
    assert ends == ["gelu", "add"] * 2
    assert unaligned(found) == ["head"]
    assert not {"pad", "slice"} & set(ops(found))
    assert ops(found)["permute"] == 1  # of the pixels


@pytest.mark.parametrize(
    ("on", "write", "c"),
    [
        (CPU, across, 16),
        (CUDA, across, 16),
        (replace(HOPPER, dtype="float32"), across, 16),
        (replace(HOPPER, formats={"tokens": "tiles"}), across, 16),
        (HOPPER, across, 12),
        (HOPPER, lambda n, x: n.linear(x, "tokens", 9), 16),
        (HOPPER, lambda n, x: n.op("linear", [turn3(x), n.input("w", (9, 9))]), 16),
    ],
)
def test_tokens_are_transposed_where_no_kernel_multiplies_them(
    on: Backend, write: Write, c: int
) -> None:
    program = nets.program(write, 9, c).retyped({"x": on.dtype})
    assert ops(kept(program, on, ["channels_last"]))["token_linear"] == 0


def test_no_linear_layer_of_tokens_is_left_unaligned() -> None:
    write = functools.partial(nets.mixer, c=12)
    program = nets.program(write, 3, 36, 36).retyped({"x": "bfloat16"})
    before, after = (passes.run(program, HOPPER, off) for off in ({"align"}, set()))
    assert len(unaligned(before)) == 9 and len(unaligned(after)) == 5
    counts = ops(after)
    assert (counts["pad"], counts["slice"]) == (1, 1)
    ends = [
        Counter(n.attributes.get("epilogue") for n in each.nodes if n.op == "linear")
        for each in (before, after)
    ]
    assert ends[0] == ends[1] and ends[1]["gelu"] == 4


def test_an_axis_is_padded_by_zeros_at_load() -> None:
    program = nets.program(mixed, 4, 100).retyped({"x": "bfloat16"})
    final, tensors = passes.run(program, HOPPER), weights(program)
    made = Constants(final, tensors)
    (first,) = (n for n in final.nodes if n.layers == ("0.fc1",))
    weight, bias = (made[name] for name in first.inputs[1:3])
    assert weight.shape == (72, 104) and bias.shape == (72,)
    np.testing.assert_array_equal(weight[:66, :100], tensors["0.fc1.weight"])
    assert not weight[66:].any() and not weight[:, 100:].any() and not bias[66:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("write", "shape", "place"),
    [(nets.mixer, (3, 36, 36), (1, 2, 35, 35)), (mixed, (4, 100), (1, 3, 99))],
)
def test_a_bad_number_stays_in_its_image(
    write: Write, shape: tuple[int, ...], place: tuple[int, ...], bad: float
) -> None:
    program = nets.program(write, *shape).retyped({"x": "bfloat16"})
    after, tensors = passes.run(program, HOPPER), weights(program)
    (images,) = inputs(program, batch=3)
    good = interpret(after, [images], tensors)["y"]
    images[place] = bad
    (wanted,) = interpret(program, [images], tensors).values()
    (found,) = interpret(after, [images], tensors).values()
    np.testing.assert_array_equal(found[[0, 2]], good[[0, 2]])
    np.testing.assert_allclose(found[[0, 2]], wanted[[0, 2]], 1e-7, 1e-9)
    np.testing.assert_array_equal(np.isfinite(found[1]), np.isfinite(wanted[1]))
    assert not np.isfinite(found[1]).all()


def test_layers_that_are_kept_in_float32_are_not_padded() -> None:
    program = nets.program(lambda n, x: mixed(n, x, 2, 64), 4, 100)
    whole = program.kept([node.layers[0] for node in program.nodes if node.layers])
    final = passes.run(whole.retyped({"x": "bfloat16"}), HOPPER)
    assert ops(final)["pad"] == 0 and ops(final)["linear"] == 6


# --- norms between linear layers -----------------------------------------------------------------


def pre_norm(net: Net, x: Value, blocks: int = 2) -> Value:
    """Attends to tokens by one layer for query, key and value, and has an MLP, as timm's ViT."""
    for i in range(blocks):
        with net.at(i):
            x = x + net.linear(packed(net, net.layer_norm(x, "norm1", 1e-6)), "proj", x.size(2))
            y = net.gelu(net.linear(net.layer_norm(x, "norm2", 1e-6), "fc1", 2 * x.size(2)))
            x = x + net.linear(y, "fc2", x.size(2))
    first = net.reshape(net.slice(x, 1, 0, 1), BATCH, x.size(2))
    return net.linear(net.layer_norm(first, "norm"), "head", 8)


def test_norms_of_a_transformer_are_part_of_its_layers() -> None:
    program = nets.program(pre_norm, 5, 32).retyped({"x": "bfloat16"})
    final = kept(program, HOPPER)
    measured = [node for node in final.nodes if node.op == "linear_moments"]
    normed = [node for node in final.nodes if node.op == "normed_linear"]
    assert [node.layers for node in measured] == [("0.proj",), ("1.proj",)]
    assert [(node.layers, node.attributes) for node in normed] == [
        ((f"{i}.norm2", f"{i}.fc1"), {"eps": 1e-6, "epilogue": "gelu"}) for i in range(2)
    ]
    for before, behind in zip(measured, normed, strict=True):
        assert behind.inputs[:2] == before.outputs
        assert final.types[before.outputs[1]] == ((BATCH, 5, 1, 2), "float32")
    assert ops(final)["qkv_linear"] == ops(final)["layer_norm"] == 2  # those before qkv
    kept(final, HOPPER)


@pytest.mark.parametrize("seed", range(16))
def test_norms_between_layers_are_part_of_them_after_any_passes(seed: int) -> None:
    """Residual layers with their norms at random, by passes in an order of chance."""
    draw = random.Random(seed)

    def write(net: Net, x: Value) -> Value:
        for i in range(3):
            with net.at(i):
                y = net.layer_norm(x, "norm", draw.choice([1e-5, 1e-6, 0.1]))
                names = "abc"[: draw.randint(1, 3)]
                bias = draw.random() < 0.5
                parts = [net.linear(y, name, draw.choice([32, 40]), bias=bias) for name in names]
                ends = [net.op(draw.choice(["gelu", "silu", "relu", "tanh"]), [z]) for z in parts]
                y = net.concat(ends, 2) if len(ends) > 1 else ends[0]
                y = net.linear(y, "out", x.size(2), bias=draw.random() < 0.5)
                y = net.op("mul", [y, net.weight("scale", x.size(2))]) if i % 2 else y
                x = x + y if draw.random() < 0.5 else y + x
                if draw.random() < 0.2:
                    net.output(f"seen {i}", x)
        return net.relu(net.linear(net.layer_norm(x, "norm"), "head", 8))

    order = draw.sample([*PASSES], len(PASSES)) if seed % 2 else list(PASSES)
    on = replace(HOPPER, dtype=draw.choice(["bfloat16", "float16"]))
    program = nets.program(write, 3, draw.choice([32, 96, 128])).retyped({"x": on.dtype})
    found = ops(kept(program, on, order))
    if not seed % 2:
        assert found["linear_moments"] == 3
        assert found["normed_linear"] == ops(program)["linear"] - found["linear"] - 3 >= 3
        kept(kept(program, on), on)


def test_a_norm_of_one_number_is_in_no_other_order() -> None:
    def write(net: Net, x: Value) -> Value:
        return net.reshape(net.layer_norm(x, "norm"), BATCH, 1, 1, 1, 1)

    assert ops(kept(nets.program(write, 1, 1, 1), CPU))["layer_norm"] == 1


def test_a_class_token_stands_before_one_norm() -> None:
    def write(net: Net, x: Value) -> Value:
        return classed(net, net.layer_norm(net.layer_norm(x, "one"), "two"))

    once = kept(nets.program(write, *TOKENS), CPU)
    assert ops(once) == {"layer_norm": 1, "class_token": 1}
    assert kept(once, CPU) == once


@pytest.mark.parametrize("layer", ["proj", "norm", "fc1"])
def test_norms_and_layers_that_are_kept_in_float32_stay(layer: str) -> None:
    plain = nets.program(around_a_norm, 5, 32)
    half = plain.retyped({"x": "bfloat16"})
    part = plain.kept([layer]).retyped({"x": "bfloat16"})
    for program, count in ((half, 1), (part, 0), (plain, 0)):
        final = kept(program, HOPPER)
        assert ops(final)["linear_moments"] == ops(final)["normed_linear"] == count


# --- sparse layers, and pixels -------------------------------------------------------------------


def test_sparse_layers_are_noted_and_take_epilogues() -> None:
    write, shape = nets.NETS["resnet basic"]
    formats = {"stages.0.0.conv2": "tiles", "head": "steps", "gone": "steps"}
    backend = Backend("cuda", "bfloat16", formats)
    program = nets.program(write, *shape).retyped({"x": "bfloat16"})
    final = kept(program, backend)
    found = {
        node.layers[0]: node.attributes for node in final.nodes if node.attributes.get("format")
    }
    assert {name: each["format"] for name, each in found.items()} == {
        "stages.0.0.conv2": "tiles", "head": "steps"
    }  # fmt: skip
    assert found["stages.0.0.conv2"]["epilogue"] == "add_relu"


@pytest.mark.parametrize(
    ("backend", "c", "f", "groups", "format"),
    [
        (HOPPER, 64, 128, 16, "blocks"),
        (HOPPER, 24, 24, 3, "blocks"),
        (HOPPER, 24, 24, 24, None),  # depthwise
        (HOPPER, 128, 32, 1, "blocks"),
        (HOPPER, 128, 40, 1, None),
        (HOPPER, 96, 32, 1, None),  # half a block
        (HOPPER, 12, 24, 3, None),  # not for the copy engine
        (replace(HOPPER, dtype="float32"), 64, 128, 16, None),
        (replace(HOPPER, formats={"a": "steps"}), 64, 128, 16, "steps"),
        (replace(HOPPER, architecture="sm_80"), 64, 128, 16, None),
        (CPU, 64, 128, 16, None),
    ],
)
def test_convolutions_in_groups_and_of_few_filters_are_of_blocks_on_hopper(
    backend: Backend, c: int, f: int, groups: int, format: str | None
) -> None:
    def write(net: Net, x: Value) -> Value:
        return net.relu(net.conv2d(x, "a", f, 3, groups=groups))

    program = nets.program(write, c, 5, 6).retyped({"x": backend.dtype})
    (node,) = (n for n in kept(program, backend).nodes if n.op == "conv2d")
    assert node.attributes.get("format") == format and node.attributes["epilogue"] == "relu"


def pixels_of(write: Write, pixels: str, dtype: str, *shape: int) -> Program:
    return from_pixels(nets.program(write, *shape), pixels, dtype)


def pooled(net: Net, x: Value, filters: int = 32, kernel: int = 3, **window: Any) -> Value:
    return pool(net, net.relu(raw(net, x, "stem", filters, kernel, **window)))


def normed(net: Net, x: Value) -> Value:
    y = net.layer_norm(last(net, a_conv(net, x, "stem", 32, stride=2)), "norm")
    return net.permute(y, 0, 3, 1, 2)


def activated(net: Net, x: Value) -> Value:
    return net.op("silu", [raw(net, x, "stem", 24, 3)])


STEMS = {
    "stem_maxpool": (pooled, ("stem",)),
    "stem_layernorm": (normed, ("stem", "norm")),
    "stem_conv2d": (activated, ("stem",)),
}


@pytest.mark.parametrize("pixels", ["uint8", "float32", "bfloat16"])
@pytest.mark.parametrize("op", STEMS)
def test_a_stem_is_one_op(op: str, pixels: str) -> None:
    write, layers = STEMS[op]
    before, after = both("stem", pixels_of(write, pixels, "bfloat16", 2, 7, 9), CUDA)
    assert len(ops(before)) == 1 + (write is not activated) + (pixels != "bfloat16")
    (node,) = after.nodes
    assert node.op == op and node.layers == layers
    assert node.attributes["dtype"] == "bfloat16"
    assert node.attributes.get("epilogue") == ("silu" if write is activated else None)


def pooled_as(pooling: str, **window: Any) -> Write:
    def write(net: Net, x: Value) -> Value:
        return net.op(pooling, [net.relu(raw(net, x, "stem", 32, 3))], **window)

    return write


def test_a_stem_keeps_its_norm_before_a_class_token() -> None:
    program = pixels_of(
        lambda n, x: classed(n, last(n, normed(n, x))), "uint8", "bfloat16", 2, 7, 9
    )
    assert ops(kept(program, CUDA)) == {"stem_layernorm": 1, "reshape": 1, "class_token": 1}


USUAL = {"kernel": 3, "stride": 2, "padding": 1}
NO_STEM: dict[str, Write] = {
    "a window that does not fit": lambda n, x: pooled(n, x, 32, 1, stride=5),
    "filters that a lane does not store": lambda n, x: pooled(n, x, 36),
    "dilated": lambda n, x: pooled(n, x, dilation=2),
    "in groups": lambda n, x: pooled(n, x, groups=2),
    "a stride across": lambda n, x: pooled(n, x, stride=(2, 1)),
    "a padding across": lambda n, x: pooled(n, x, padding=(0, 1)),
    "another reads the pixels": lambda n, x: pooled(n, used(n, x)),
    "not of pixels": lambda n, x: pooled(n, n.relu(x)),
}
"""No stem at all."""
ALONE: dict[str, Write] = {
    "filters that a warp does not take": lambda n, x: pooled(n, x, 40),
    "an average": pooled_as("avg_pool2d", **USUAL),
    "a pool of 2": pooled_as("max_pool2d", kernel=2),
    "a pool without padding": pooled_as("max_pool2d", kernel=3, stride=2),
    "a dilated pool": pooled_as("max_pool2d", **USUAL, dilation=2),
    "a pool rounded up": pooled_as("max_pool2d", **USUAL, ceil_mode=True),
    "no relu": lambda n, x: pool(n, raw(n, x, "stem", 32, 3)),
    "gelu": lambda n, x: pool(n, n.gelu(raw(n, x, "stem", 32, 3))),
    "relu is an output": lambda n, x: pool(n, seen(n, n.relu(raw(n, x, "stem", 32, 3)))),
    "relu before a norm": lambda n, x: n.layer_norm(
        last(n, n.relu(raw(n, x, "stem", 32, 3))), "norm"
    ),
}
"""A stem without the pool or the norm that follows."""


@pytest.mark.parametrize("name", ALONE)
def test_a_stem_leaves_what_it_does_not_know(name: str) -> None:
    program = pixels_of(ALONE[name], "uint8", "bfloat16", 2, 13, 16)
    before, after = both("stem", program, CUDA)
    assert after.nodes[0].op == "stem_conv2d"
    assert len(after.nodes) == len(before.nodes) - 1  # without the normalisation


@pytest.mark.parametrize("name", NO_STEM)
def test_no_stem(name: str) -> None:
    program = pixels_of(NO_STEM[name], "uint8", "bfloat16", 2, 13, 16)
    before, after = both("stem", program, CUDA)
    assert before.difference(after) == ""


@pytest.mark.parametrize(
    ("backend", "dtype", "formats"),
    [(CPU, "float32", {}), (HIP, "bfloat16", {}), (Backend("cuda", "float32"), "float32", {}),
     (CUDA, "float32", {}), (CUDA, "bfloat16", {"stem": "steps"})],
)  # fmt: skip
@pytest.mark.parametrize("pixels", ["uint8", "float32"])
def test_no_stem_on(backend: Backend, dtype: str, formats: dict[str, str], pixels: str) -> None:
    program = pixels_of(pooled, pixels, dtype, 2, 7, 9)
    before, after = both("stem", program, Backend(backend.api, backend.dtype, formats))
    assert before.difference(after) == ""


@pytest.mark.parametrize(
    ("pixels", "node"),
    [("uint8", ("cast", {"dtype": "bfloat16"})), ("float32", ("normalize", {"dtype": "bfloat16"}))],
)
def test_no_stem_of_levels_that_are_cast_or_floats_that_are_normalised(
    pixels: str, node: tuple[str, dict[str, Any]]
) -> None:
    net = Net("net")
    x = net.input("pixels", (BATCH, 7, 9, 2), pixels)
    levels = [net.weight("mean", 2), net.weight("scale", 2)] if node[0] == "normalize" else []
    x = net.permute(net.op(node[0], [x, *levels], **node[1]), 0, 3, 1, 2)
    net.output("y", pooled(net, x))
    before, after = both("stem", net.program(), CUDA)
    assert before.difference(after) == ""


def stem_and(
    net: Net, x: Value, window: int = 7, filters: int = 64, kernel: int = 1, **rest: Any
) -> Value:
    y = pooled(net, x, 64, window, stride=2, padding=window // 2)
    z = net.relu(raw(net, y, "next", filters, kernel, **rest))
    return used(net, z) + y if filters == 64 and not rest else z


@pytest.mark.parametrize(
    ("backend", "pixels", "width", "changes", "fused"),
    [
        (HOPPER, "uint8", 224, {}, True),
        (HOPPER16, "uint8", 224, {}, True),
        (replace(HOPPER, dtype="float32"), "uint8", 224, {}, False),
        (CUDA, "uint8", 224, {}, False),
        (HOPPER, "float32", 224, {}, False),
        (HOPPER, "uint8", 220, {}, False),
        (HOPPER, "uint8", 224, {"window": 5}, False),
        (HOPPER, "uint8", 224, {"filters": 32}, False),
        (HOPPER, "uint8", 224, {"kernel": 3, "padding": 1}, False),
        (HOPPER, "uint8", 224, {"stride": 2}, False),
    ],
)
def test_a_stem_and_the_first_convolution_are_one_op(
    backend: Backend, pixels: str, width: int, changes: dict[str, Any], fused: bool
) -> None:
    def write(net: Net, x: Value) -> Value:
        return stem_and(net, x, **changes)

    program = pixels_of(write, pixels, backend.dtype, 3, 9, width)
    before, after = both("stem_chain", program, backend)
    if not fused:
        assert after == before
        return
    gone = ops(before) - ops(after)
    assert gone == {"stem_maxpool": 1, "conv2d": 1}
    (node,) = (n for n in after.nodes if n.op == "stem_maxpool_conv2d")
    assert node.layers == ("stem", "next")


# --- what every network becomes ------------------------------------------------------------------


def counted(family: str, spec: Any, backend: Backend, pixels: str = "uint8") -> Counter[str]:
    from maxvision.weights.family import known

    program = known()[family].program(spec, (224, 224)).keep(["logits"])
    return ops(passes.run(from_pixels(program, pixels, backend.dtype), backend))


def test_resnet_50_on_nvidia() -> None:
    assert counted("resnet", RESNETS["resnet50"], CUDA) == {
        "stem_maxpool": 1, "conv2d": 53 - 1 - 6 - 3 - 16, "conv2d_shortcut": 3, "conv2d_chain": 8,
        "conv2d_shortcut_chain": 1, "avg_pool2d": 1, "reshape": 1, "linear": 1,
    }  # fmt: skip


def test_resnet_50_on_hopper() -> None:
    found = counted("resnet", RESNETS["resnet50"], HOPPER)
    assert found["stem_maxpool_conv2d"] == 1 and "stem_maxpool" not in found
    assert found["conv2d_shortcut_chain"] == 1
    assert found["conv2d_mean"] == 1 and "avg_pool2d" not in found


def test_resnet_50_on_a_cpu() -> None:
    assert counted("resnet", RESNETS["resnet50"], CPU) == {
        "normalize": 1, "conv2d": 53 - 8, "max_pool2d": 1, "conv2d_shortcut": 4, "avg_pool2d": 1,
        "reshape": 1, "linear": 1,
    }  # fmt: skip


def test_cvt_13_on_nvidia() -> None:
    found = counted("cvt", CVTS["cvt-13"], CUDA)
    assert found == {
        "stem_layernorm": 1, "conv2d": 2, "layer_norm": 1 + 13, "depthwise_qkv": 13,
        "qkv_linear": 13, "attention": 13, "linear": 13 + 2 * 13 + 1, "class_token": 1,
        "layernorm_first": 1, "reshape": found["reshape"],
    }  # fmt: skip
    assert found["reshape"] == 5  # images to tokens, and back twice: nothing is permuted


def test_cvt_13_on_hopper() -> None:
    found = counted("cvt", CVTS["cvt-13"], HOPPER)
    assert found == {
        "stem_layernorm": 1, "conv2d": 2, "layer_norm": 1, "depthwise_qkv": 13, "qkv_linear": 13,
        "attention": 2, "attention_linear": 11, "layernorm_mlp": 3, "linear_moments": 2,
        "normed_linear": 10,
        "linear": 10 + 1, "class_token": 1, "layernorm_first": 1, "reshape": found["reshape"],
    }  # fmt: skip


# --- --passes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "off"),
    [
        ("all", set()),
        ("", set()),
        ("none", set(PASSES)),
        ("-stem", {"stem"}),
        ("-stem, -chain", {"stem", "chain"}),
        ("all,-mlp", {"mlp"}),
        ("qkv,mlp", set(PASSES) - {"qkv", "mlp"}),
        ("qkv,mlp,-mlp", set(PASSES) - {"qkv"}),
        ("none,qkv", set(PASSES) - {"qkv"}),
    ],
)
def test_passes_are_asked_for_by_name(text: str, off: set[str]) -> None:
    assert passes.parse(text) == off


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chains", r"there is no pass 'chains'; did you mean chain\?"),
        ("all,-steam", r"there is no pass 'steam'; did you mean stem\?"),
        ("-all", "there is no pass 'all'; they are constants, written_out, .*, foreach"),
        ("xyzzy", "there is no pass 'xyzzy'; they are constants, .*, foreach"),
    ],
)
def test_a_pass_that_is_not_there(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"^--passes: {said}$"):
        passes.parse(text)


def test_the_table_names_every_pass_in_its_order() -> None:
    rows = [line.split("|")[1].strip() for line in (passes.__doc__ or "").splitlines()
            if line.startswith("| ")]  # fmt: skip
    assert rows[2:] == list(PASSES)


def test_widths_of_the_tables_are_those_of_the_tests() -> None:
    assert (64, 64) in CHAINS and (64, 128) in CHAINS and (128, 64) not in CHAINS
    assert WIDE_CHAINS == ((256, 256),) and SHORTCUT_CHAINS == ((64, 64, 64),)
    assert MLPS == (64, 192)
    assert (PROJECTED[384], PROJECTED_DEPTH) == (56, 64) and PROJECTED[64] >= 784


def squeezed(net: Net, x: Value) -> Value:
    """Squeeze and excitation (Hu et al. 2018) by a mean, a padded branch, and one that is cut."""
    c = x.size(1)
    y = net.op("mean", [x], axes=(2, 3), keepdim=True)
    y = net.op("sigmoid", [net.conv2d(net.relu(net.conv2d(y, "a", 2, 1)), "b", c, 1)])
    y = net.op("mul", [x, y])
    y = net.op("pad", [y], pads=(0, 0, 0, 0, 1, 0, 0, 1))
    y = net.conv2d(net.slice(y, 2, 1, y.size(2)), "c", c, 2)
    return net.op("amax", [y], axes=(2, 3))


def densely(net: Net, x: Value) -> Value:
    """Layers that read all before them (Huang et al. 2017), each normed, with a parameter."""
    for i in range(3):
        y = net.relu(net.batch_norm(x, f"{i}.norm"))
        y = net.conv2d(y, f"{i}.conv", 3, 3, padding=1)
        y = net.op("mul", [y, net.weight(f"{i}.scale", 3, 1, 1)])
        x = net.concat([x, y, net.slice(y, 1, 1, 3)], 1)
    return net.flatten(net.avg_pool2d(x))


def training(net: Net, x: Value) -> Value:
    """The gradient of a filter, and a step along it."""
    y = net.relu(net.conv2d(x, "a", 6, 3, stride=2, padding=1))
    dw = net.op("conv2d_weight_grad", [x, y], kernel=3, stride=2, padding=1)
    net.output("step", net.op("mul", [dw], other=0.5))
    return net.flatten(net.avg_pool2d(y))


def test_the_gradient_of_a_filter_reads_images_as_they_lie() -> None:
    final = kept(from_pixels(nets.program(training, 4, 6, 5), "uint8", "float32"), CPU)
    (gradient,) = (node for node in final.nodes if node.op == "conv2d_weight_grad")
    assert gradient.attributes["layout"] == "NHWC"
    assert [final.types[value].shape[1:] for value in gradient.inputs] == [(6, 5, 4), (3, 3, 6)]
    assert not ops(final)["permute"]  # the step is asked for with its channels last


def layer_in_training(net: Net, x: Value) -> Value:
    """A linear layer whose weights are values, under autocast: forward, and all gradients."""
    x, w, b = (
        net.op("cast", [value], dtype="bfloat16")
        for value in (x, net.input("w", (48, 32)), net.input("b", (48,)))
    )
    rows = net.reshape(x, "64*" + BATCH, 32)
    y = net.op("matmul", [rows, net.permute(w, 1, 0)]) + b
    residual = net.op("cast", [net.input("residual", (BATCH, 64, 48))], dtype="bfloat16")
    z = net.relu(net.reshape(y, BATCH, 64, 48) + residual)
    dy = net.reshape(z, "64*" + BATCH, 48)
    net.output("dx", net.reshape(net.op("matmul", [dy, w]), BATCH, 64, 32))
    net.output("dw", net.op("matmul", [net.permute(dy, 1, 0), rows]))
    return z


def test_attention_stores_bytes_on_hopper_where_a_kernel_does() -> None:
    def stores(backend: Backend, dtype: str = "bfloat16", depth: int = 20, **rest: Any) -> bool:
        net = Net("attention")
        tokens = net.input("tokens", (BATCH, 7, 3 * depth), dtype)
        attended = net.several("attention", [tokens] * 3, heads=3, scale=1.0, **rest)
        net.output("y", attended[0])
        return stores_bytes(net.program(), net.nodes[0], backend)

    assert stores(HOPPER) and stores(HOPPER16, "float16", 128)
    assert not any(map(stores, (CPU, CUDA, HIP)))
    assert not stores(HOPPER, "float32") and not stores(HOPPER, depth=132)
    assert not stores(HOPPER, depth=18) and not stores(HOPPER, logsumexp=True)


@pytest.mark.parametrize("grid", [Grid(0.01, -130), Float8(0.003)])
def test_attention_in_bytes_stands_for_what_is_rounded_behind_it(grid: Rounding) -> None:
    net = Net("attention")
    tokens = net.input("tokens", (BATCH, 7, 40), "bfloat16")
    settings: dict[str, Any] = {"heads": 2, "scale": 1.0}
    y = net.op("attention", [tokens] * 3, **settings)
    net.output("rounded", net.op("fake_quantize", [y], **grid.attributes))
    settings |= {"dtype": grid.stored, "result_scale": grid.scale, "result_low": float(grid.low)}
    y = net.op("attention", [tokens] * 3, **settings)
    expression = f"x0 {float(grid.low)} add {grid.scale} mul"
    net.output("stored", net.op("pointwise", [y], expression=expression, dtype="bfloat16"))
    program = net.program()
    found = interpret(program, inputs(program), weights(program))
    np.testing.assert_allclose(found["stored"], found["rounded"], 1e-12, 1e-12)


def test_a_layer_of_values_is_one_product_each_way_on_hopper() -> None:
    final = kept(nets.program(layer_in_training, 64, 32), HOPPER)
    forward, backward = (node for node in final.nodes if node.op == "matmul")
    assert forward.inputs[2] == "b"  # which is not rounded
    assert forward.attributes == {"transpose_b": True, "epilogue": "add_relu"}
    assert final.types[backward.inputs[1]].shape == (32, 48)
    assert backward.attributes == {"transpose_b": True}
    counts = ops(final)
    assert counts["conv2d_weight_grad"] == counts["permute"] == 1
    assert not counts["add"] + counts["pointwise"] + counts["relu"]


def pooling(net: Net, x: Value) -> Value:
    """The gradients of two pools, one behind the other."""
    y = net.relu(net.conv2d(x, "a", 8, 3, padding=1))
    dy = net.conv2d(net.max_pool2d(y, 2, stride=2), "b", 8, 1)
    dy = net.op("max_pool2d_grad", [y, dy], kernel=2, stride=2)
    dy = net.op(
        "avg_pool2d_grad", [dy], size=(15, 18), kernel=3, stride=3, padding=1, ceil_mode=True
    )
    return net.flatten(net.avg_pool2d(net.op("mul", [dy], other=0.5)))


def test_the_gradients_of_pools_read_images_as_they_lie() -> None:
    final = kept(from_pixels(nets.program(pooling, 4, 6, 7), "uint8", "float32"), CPU)
    found = {node.op: node for node in final.nodes if node.op.endswith("_grad")}
    largest = [final.types[value].shape[1:] for value in found["max_pool2d_grad"].inputs]
    assert largest == [(6, 7, 8), (3, 3, 8)]
    assert final.types[found["avg_pool2d_grad"].output].shape[1:] == (15, 18, 8)
    assert not ops(final)["permute"]


def narrow(net: Net, x: Value, dtype: str = "bfloat16") -> Value:
    return net.op("cast", [x], dtype=dtype)


def wide(net: Net, x: Value) -> Value:
    return net.op("cast", [x], dtype="float32")


def tokens_of_a_norm(net: Net, x: Value) -> Value:
    """Rounds the first token of a norm beside an image's, and all others as two products do."""
    y = net.layer_norm(net.relu(x), "norm")
    first, rest = (net.op("slice", [y], axis=1, start=a, stop=b) for a, b in ((0, 1), (1, 5)))
    image = wide(net, net.linear(narrow(net, net.permute(rest, 0, 1, 2)), "a", 4))
    joined = net.concat([first, image], axis=1)
    net.output("rows", net.linear(narrow(net, net.reshape(rest, BATCH, 2, 8)), "b", 8))
    net.output("again", net.linear(narrow(net, joined), "c", 4))
    return net.linear(narrow(net, joined), "d", 4)


def test_a_cast_goes_ahead_of_moves_into_a_norm_that_several_read() -> None:
    _, after = both("casts", nets.program(tokens_of_a_norm, 5, 4), CUDA)
    moves = [node for node in after.nodes if node.op in ("slice", "permute", "concat", "reshape")]
    assert {node.op for node in moves} >= {"slice", "concat", "reshape"}
    for node in moves:
        assert {after.types[v].dtype for v in (*node.inputs, *node.outputs)} == {"bfloat16"}, node
    (norm,) = (node for node in after.nodes if node.op == "layer_norm")
    assert norm.attributes["dtype"] == "bfloat16"
    assert not ops(after)["cast"]  # nor one of what had 16 bits before


def moved_between(
    net: Net, x: Value, *, seen: str = "", part: bool = False, to: str = "bfloat16"
) -> Value:
    """Rounds a product, turned, or a part of that."""
    y = net.linear(x, "a", 4)
    if seen == "product":
        net.output("seen", y)
    turned = net.permute(y, 0, 2, 1)
    if seen == "turned":
        net.output("seen", turned)
    if seen == "relu":
        net.output("seen", net.linear(turned, "c", 4))
    if part:
        turned = net.op("slice", [turned], axis=2, start=0, stop=2)
    net.output("other", net.relu(narrow(net, turned, to)))
    return narrow(net, turned)


@pytest.mark.parametrize(
    ("change", "dtypes"),
    [
        ({}, {"permute": "bfloat16"}),
        ({"seen": "product"}, {"permute": "bfloat16"}),
        ({"seen": "turned"}, {"permute": "float32"}),
        ({"seen": "relu"}, {"permute": "float32"}),
        ({"part": True}, {"permute": "float32", "slice": "float32"}),  # all of it costs more
        ({"to": "float16"}, {"permute": "float32"}),
    ],
)
def test_a_cast_goes_ahead_of_moves_that_nobody_needs_in_float32(
    change: dict[str, Any], dtypes: dict[str, str]
) -> None:
    program = nets.program(lambda net, x: moved_between(net, x, **change), 4, 4)
    after = kept(program, CUDA, ["casts"])
    moves = {node.op: after.types[node.output].dtype for node in after.nodes}
    assert {op: moves[op] for op in dtypes} == dtypes
    assert ops(after)["cast"] == (2 if change.get("to") else 1)


def test_identical_casts_become_one_but_for_outputs() -> None:
    def write(net: Net, x: Value) -> Value:
        net.output("first", narrow(net, x))
        for name in "ab":
            net.output(name, net.linear(narrow(net, x), name, 4))
        return narrow(net, x)

    after = kept(nets.program(write, 4), CUDA, ["casts"])
    assert ops(after)["cast"] == 2
    read = {node.inputs[0] for node in after.nodes if node.op == "linear"}
    assert read == {after.outputs["first"]}


def test_a_cast_to_float32_goes_behind_moves() -> None:
    def write(net: Net, x: Value) -> Value:
        x = narrow(net, x)
        moved = net.permute(net.reshape(wide(net, x), BATCH, 2, 3, 4), 0, 2, 1, 3)
        net.output("sum", net.op("sum", [moved], axes=(1,), keepdim=True))
        net.output("part", narrow(net, net.op("slice", [moved], axis=1, start=1, stop=3)))
        return net.op("mul", [moved, net.op("tanh", [moved])])

    after = kept(nets.program(write, 6, 4), CUDA, ["casts"])
    for node in after.nodes:
        if node.op in ("reshape", "permute", "slice"):
            assert after.types[node.output].dtype == "bfloat16"
    assert ops(after)["cast"] == 1  # the one to 16 bits


def test_a_cast_to_float32_stays_ahead_of_moves_where_float32_is_read_before_them() -> None:
    def write(net: Net, x: Value) -> Value:
        x = wide(net, narrow(net, x))
        net.output("a", net.linear(x, "a", 4))
        return net.linear(net.permute(x, 0, 2, 1), "b", 4)

    before = nets.program(write, 4, 4)
    assert kept(before, CUDA, ["casts"]) == before


@pytest.mark.parametrize("write", [squeezed, densely])
def test_no_image_is_permuted(write: Write) -> None:
    program = from_pixels(nets.program(write, 4, 6, 5), "uint8", "float32")
    assert "permute" not in ops(kept(program, CPU))
