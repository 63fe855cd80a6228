"""Every op against torch in float64, on a CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.graphs import nodes
from maxvision.graphs.arrange import has_stem
from maxvision.graphs.parameters import Parameters
from maxvision.runtime import cache
from tests.ops.cases import (
    CASES as SHARED,
)
from tests.ops.cases import (
    EPILOGUES,
    ON_CPU,
    TORCH,
    Case,
    build_graph,
    check,
    conv,
    dense,
    draw,
    poisoned,
    pool,
    product,
)
from tests.ops.eager import Trace, compile_ops

CASES = SHARED + ON_CPU
# A sparse convolution on a CPU is float32 only.
NARROW = [case for case in CASES if not case.name.startswith("sparse")]
# What takes no time; tests/gpu.py runs all with NaN and infinity.
SMALL = [case for case in CASES if sum(map(math.prod, case.inputs)) < 50_000]
# What takes a second and more, of three images.
LARGE = [case for case in CASES if sum(map(math.prod, case.inputs)) >= 100_000]
# Of what a CPU compiles anew and of which it runs the same code for another case: by night.
NIGHTLY = {  # depths of a head
    *(f"attention {depth}" for depth in (6, 16, 20, 36, 48, 60, 72, 80, 128, 160)),
    *(f"attention {depth} with a bias" for depth in (6, 48, 80, 96, 128, 256)),
    *(f"attention many heads of {depth}" for depth in (20, 36, 80, 88, 128)),
    *(f"attention_grad {name}" for name in ("32 one tile", "96", "bias of all heads, causal")),
    "attention many heads of 128, one tile",
    "attention many queries of 128",
    *(  # composed of what others have
        f"pointwise x0 {op}: (3, 33)"
        for op in (
            "hardsigmoid", "softplus", "-1.5 inf clamp", "0.1 leaky_relu", "1.5 elu", "log",
            "reciprocal", "cos", "floor", "3.0 pow", "1e-05 sub",
        )
    ),
    *(f"pointwise x0 x1 {op}: (3, 7) (3, 7)" for op in ("minimum", "ne", "le", "ge")),
    "pointwise x0 x1 div: (50, 3)",
    # an epilogue of products whose function has a pointwise case
    "bmm hardswish", "linear mish", "linear add_gelu_tanh", "conv2d epilogue add_gelu",
    "conv2d epilogue add_0.1 leaky_relu",
    # a pointwise case whose function is an epilogue, or a part of another case's expression
    "pointwise x0 0.0 6.0 clamp: (3, 33)", "pointwise x0 relu: (3, 33)",
    "pointwise x0 neg abs: (3, 33)", "pointwise x0 sqrt: (3, 33)",
    "pointwise x0 x1 maximum: (3, 7) (3, 7)", "pointwise x0 x1 eq: (3, 7) (3, 7)",
    "pointwise x0 x1 add: (3, 7) (3, 7)",
}  # fmt: skip
# Of the ops that widen bfloat16 to float32, what runs in it by day.
ROUNDED = {
    "pointwise x0 silu: (3, 33)",
    "pointwise x0 x1 mul x2 sub x3 gt x4 0.0 where x5 mul x6 add x7 mul:"
    " (5, 16) (5, 1) (1, 16) (1, 1)",
    "pointwise masks",
    "foreach masks",
    "reduce sum (129, 130) (1,)",
    "reduce sum of x0 ; x0 x1 x2 sub mul: (1200, 72) (1200, 72) (1,)",
    "reduce amax (6, 5, 40) (1, 2)",
    "reduce sum and x0 ; x1 x2 mul ; x1 x2 mul x2 mul tanh ; x0 x2 mul:"
    " (30, 40) (30, 40) (1, 40) (1,)",
    "roll (6, 33) (-8,) (1,)",
    "concat 3 (5, 7, 96) (5, 7, 32)",
    "concat x0 x1 mul x2 add relu: (5, 7, 96) (5, 7, 32)",
    "group_norm (14, 14, 256) 32 relu",
    "squeeze_excite (7, 9) 256 16 relu sigmoid add_relu",
}
# The others: computed in float32 as there, but for the load and the store.
WIDENED = {
    *(
        case.name
        for case in NARROW
        if case.name.split()[0]
        in ("pointwise", "foreach", "reduce", "roll", "concat", "group_norm", "squeeze_excite")
        and case.name not in ROUNDED
    ),
    *(f"conv2d epilogue {name}" for name in ("gelu", "0.0 6.0 clamp")),
}
# What a CPU compiles anew for another epilogue, depth, rank or kernel: by day in float32, while
# another case runs the same code in bfloat16.
VARIED = {
    *(f"bmm {name}" for name in ("odd", "tiles transposed", "add_relu")),
    *(f"conv2d depthwise {name}" for name in ("silu", "add", "5x5/2 below")),
    *(f"attention {name}" for name in ("1", "256", "causal, fewer queries", "causal, fewer keys")),
    *(f"attention {name}" for name in ("24 with a bias", "causal with a bias", "24 scale 0")),
    *(f"attention {name}{depth}" for name in ("", "many heads of ") for depth in (24, 96)),
    *(f"attention many {name}" for name in ("heads of 96, one tile", "queries of 96")),
    *(case.name for case in NARROW if case.name.startswith("permute") and len(case.inputs[0]) > 3),
    *(f"depthwise_qkv {name}" for name in ("kernel 5", "1 x 1")),
    "avgpool inside", "avg_pool2d_grad inside",
    "conv2d epilogue silu", "stem_conv2d silu", "stem_conv2d floats", "conv2d 1x1 of 88",
    *(f"conv2d depthwise {name} strips" for name in ("3x3", "7x7")),
    *(f"gather_rows {name}" for name in ("norm", "of a row", "add", "many", "copy", "odd copy")),
    "pointwise masks", "concat 3 (5, 7, 96) (5, 7, 32)",
    *(f"attention {name}" for name in ("32", "sharp")),
    *(f"attention many heads of 32{name}" for name in ("", ", one tile")),
    "attention many queries of 32",
    *(f"attention {name}" for name in ("windows", "windows of all heads", "a row for all")),
    "attention many windows",
    *(f"attention_grad {name}" for name in ("20", "causal", "causal, fewer keys")),
    *(f"attention_grad {name}" for name in ("bias", "a row for all")),
}  # fmt: skip
BY_NIGHT = {DType.float32: NIGHTLY, DType.bfloat16: NIGHTLY | WIDENED | VARIED}


Run = Callable[[Case, DType, int], torch.Tensor]
"""Computes a case at a dtype for a batch."""


def by_day(dtype: DType, cases: Sequence[Case], batches: Sequence[int] = (1, 3)) -> list[Any]:
    """Pairs cases and batches; by night only NIGHTLY's run, and several images of what is large."""
    return [
        pytest.param(
            case,
            batch,
            id=f"{case.name}-{batch}",
            marks=[pytest.mark.nightly]
            if case.name in BY_NIGHT[dtype] or (batch > 1 and case in LARGE)
            else [],
        )
        for case in cases
        for batch in batches
    ]


def is_empty(y: torch.Tensor) -> bool:
    """Tells whether a result is one of no images: without numbers, or the sum over none of them."""
    return 0 in y.shape or not y.any()


@pytest.fixture(scope="module")
def chosen(pytestconfig: pytest.Config) -> dict[DType, list[Case]]:
    """Lists the cases that run now, by dtype."""
    every = pytestconfig.getoption("--all")
    return {
        dtype: [case for case in cases if every or case.name not in BY_NIGHT[dtype]]
        for dtype, cases in ((DType.float32, CASES), (DType.bfloat16, NARROW))
    }


@pytest.fixture(scope="module")
def run(chosen: dict[DType, list[Case]], pytestconfig: pytest.Config) -> Run:
    """Compiles the ops of these cases, and of the random ones."""
    traces = {
        (case.name, dtype): Trace(case, dtype) for dtype, cases in chosen.items() for case in cases
    }
    drawn = kinds(EPILOGUES if pytestconfig.getoption("--all") else COMMON)
    executables = compile_ops([*traces.values(), *(Trace(case, DType.float32) for case in drawn)])

    def run(case: Case, dtype: DType, batch: int) -> torch.Tensor:
        trace = traces.get((case.name, dtype)) or Trace(case, dtype)
        return trace.run(executables, draw([case], batch, dtype, CPU()))

    return run


@pytest.mark.parametrize(("case", "batch"), by_day(DType.float32, CASES))
def test_equals_torch(run: Run, case: Case, batch: int) -> None:
    check(case, run(case, DType.float32, batch), batch, torch.float32)


@pytest.mark.parametrize(("case", "batch"), by_day(DType.bfloat16, NARROW))
def test_equals_torch_in_bfloat16(run: Run, case: Case, batch: int) -> None:
    check(case, run(case, DType.bfloat16, batch), batch, torch.bfloat16)


def test_takes_an_empty_batch(run: Run, chosen: dict[DType, list[Case]]) -> None:
    for dtype, cases in chosen.items():
        for case in cases:
            assert is_empty(run(case, dtype, 0)), case.name


@pytest.mark.parametrize(("case", "batch"), by_day(DType.float32, SMALL, [3]))
def test_nan_and_infinity_are_torchs(
    run: Run, chosen: dict[DType, list[Case]], case: Case, batch: int
) -> None:
    poison = poisoned(case)
    for dtype in (dtype for dtype, cases in chosen.items() if case in cases):
        check(poison, run(poison, dtype, batch), batch, TORCH[dtype])


IN_FLOAT64 = (
    "conv2d", "conv2d_input_grad", "conv2d_weight_grad", "bmm", "linear", "maxpool", "avgpool",
    "max_pool2d_grad", "avg_pool2d_grad", "reduce", "pointwise", "foreach", "softmax",
    "log_softmax",
)  # fmt: skip
"""What begins the names of cases that a CPU computes in float64."""


@pytest.mark.nightly
def test_equals_torch_in_float64() -> None:
    cases = [case for case in CASES if case.name.split()[0] in IN_FLOAT64]
    traces = [Trace(case, DType.float64) for case in cases]
    executables = compile_ops(traces)
    for case, trace in zip(cases, traces, strict=True):
        for one, batch in ((case, 1), (case, 3), (poisoned(case), 3)):
            if one is case or case in SMALL:
                y = trace.run(executables, draw([one], batch, DType.float64, CPU()))
                check(one, y, batch, torch.float64)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "cases"), [(DType.float32, CASES), (DType.bfloat16, NARROW)], ids=["f32", "bf16"]
)
def test_known_sizes_equal_torch(dtype: DType, cases: list[Case]) -> None:
    """As a network has them: one graph of all cases, compiled for their sizes."""
    graph, parameters = build_graph(cases, DeviceRef.CPU(), dtype)
    session = InferenceSession(devices=[CPU()])
    registry = {k: v for w in parameters for k, v in w.registry(CPU()).items()}
    executable = session.init(session.compile(graph), weights_registry=registry)
    for batch in (0, 1, 3):
        outputs = executable.execute(*draw(cases, batch, dtype, CPU()))
        for case, output in zip(cases, outputs, strict=True):
            if batch:
                check(case, torch.from_dlpack(output), batch, TORCH[dtype])
            else:
                assert is_empty(torch.from_dlpack(output)), case.name


def test_names_are_unique() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert names >= NIGHTLY | WIDENED | VARIED | ROUNDED, "no case has this name"


def test_the_check_can_fail() -> None:
    case = CASES[0]
    inputs, weights = case.data(1)
    right = case.reference(
        {k: torch.from_numpy(v) for k, v in weights.items()}, *map(torch.from_numpy, inputs)
    )
    check(case, right, 1, torch.float32)
    for wrong in (right * 1.0001, right.roll(1, dims=2), right * torch.nan):
        with pytest.raises(AssertionError):
            check(case, wrong, 1, torch.float32)


COMMON = ("none", "gelu", "add_relu")
"""Epilogues that are drawn by day."""


@st.composite
def convs(draw: st.DrawFn, common: Sequence[str]) -> Case:
    """Draws a convolution of awkward shape whose window fits its image."""
    groups = draw(st.sampled_from([1, 1, 2, 3, 7]))
    c, f = (groups * draw(st.integers(1, 40)) for _ in range(2))
    kernel = draw(st.tuples(*[st.integers(1, 5)] * 2))
    dilation = draw(st.tuples(*[st.integers(1, 3)] * 2))
    padding = draw(st.tuples(*[st.integers(0, 4)] * 2))
    stride = draw(st.tuples(*[st.integers(1, 4)] * 2))
    size = tuple(
        max(1, d * (k - 1) + 1 - 2 * p) + draw(st.integers(0, 9))
        for d, k, p in zip(dilation, kernel, padding, strict=True)
    )
    sparsity = draw(st.sampled_from([None, None, 0.9]))
    then = draw(st.sampled_from(common))
    name = f"{size} {c} {f} {kernel} {stride} {padding} {dilation} {groups} {then} {sparsity}"
    return conv(
        name, size, c, f, kernel, stride=stride, padding=padding, dilation=dilation,
        groups=groups, then=then, sparsity=sparsity,
    )  # fmt: skip


@st.composite
def others(draw: st.DrawFn, common: Sequence[str]) -> Case:
    """Draws a product, a linear layer or a pool of awkward shape."""
    m, k, n, b = (draw(st.integers(1, 99)) for _ in range(4))
    then = draw(st.sampled_from(common))
    kind = draw(st.sampled_from(["bmm", "linear", "maxpool", "avgpool"]))
    if kind == "bmm":
        transpose, heads = draw(st.booleans()), b % 4 + 1
        other = (heads, n, k) if transpose else (heads, k, n)
        return product(f"{m} {other} {then}", (heads, m, k), other, transpose=transpose, then=then)
    if kind == "linear":
        return dense(f"{m} {k} {n} {then}", (m, k), n, then)
    kernel = draw(st.tuples(*[st.integers(1, 4)] * 2))
    padding = tuple(draw(st.integers(0, side // 2)) for side in kernel)
    stride = draw(st.tuples(*[st.integers(1, 4)] * 2))
    ceil = draw(st.booleans())
    size = (m % 13 + kernel[0], k % 13 + kernel[1])
    name = f"{kind} {size} {n} {kernel} {stride} {padding} {ceil}"
    return pool(name, size, n, kernel, stride=stride, padding=padding, ceil_mode=ceil)


def kinds(common: Sequence[str]) -> list[Case]:
    """Lists one case of each op and epilogue that are drawn."""
    return [
        *(conv(f"kind {then}", (3, 3), 4, 4, (1, 1), then=then) for then in common),
        *(conv(f"kind {x} sparse", (3, 3), 4, 4, (1, 1), then=x, sparsity=0.9) for x in common),
        *(conv(f"kind {x} depthwise", (3, 3), 4, 4, (1, 1), then=x, groups=4) for x in common),
        *(
            product(f"kind {then} {flip}", (1, 4, 4), (1, 4, 4), then=then, transpose=flip)
            for then in common
            for flip in (False, True)
        ),
        *(dense(f"kind dense {then}", (4, 4), 4, then) for then in common),
    ]


awkward = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@awkward
@given(convs(COMMON) | others(COMMON))
def test_awkward_shapes_equal_torch(run: Run, case: Case) -> None:
    compare(run, case)


@pytest.mark.nightly
@awkward
@given(convs(EPILOGUES) | others(EPILOGUES))
def test_awkward_shapes_of_every_epilogue_equal_torch(run: Run, case: Case) -> None:
    compare(run, case)


def compare(run: Run, case: Case) -> None:
    """Checks a random case; of few numbers all may be small, and a GELU's error is absolute."""
    absolute = 5e-7 if "gelu" in case.name else 0.0  # as ops/functions.mojo says
    check(case, run(case, DType.float32, 2), 2, torch.float32, absolute=absolute)


def graph_of(
    *shapes: Sequence[int | str],
    dtype: DType = DType.float32,
    device: DeviceRef | None = None,
) -> Graph:
    place = device or DeviceRef.CPU()
    types = [TensorType(dtype, shape, device=place) for shape in shapes]
    library = cache.library(gpu=place.is_gpu())
    return Graph("errors", input_types=types, custom_extensions=[library])


def weights(device: DeviceRef | None = None, **shapes: tuple[int, ...]) -> Parameters:
    arrays = {name.replace("_", "."): np.zeros(shape) for name, shape in shapes.items()}
    return Parameters(arrays, device or DeviceRef.CPU(), DType.float32)


def test_errors_name_the_shapes() -> None:
    with graph_of(["n", 8, 8, 3], ["n", 7, 7, 16]) as graph:
        x, residual = (value.tensor for value in graph.inputs)
        w = weights(w_filter=(3, 3, 4, 16), v_filter=(3, 3, 3, 16), l_weight=(5, 6))
        with pytest.raises(ArgumentError, match=r"expects C=4 but input x\[N, H, W, C\] has C=3"):
            nodes.conv2d(x, w.filter("w"))
        v = w.filter("v")
        with pytest.raises(ArgumentError, match=r"residual expects .*6.*6.* but has .*7.*7"):
            nodes.conv2d(x, v, epilogue="add", residual=residual)
        with pytest.raises(ArgumentError, match="epilogue 'add' expects a residual"):
            nodes.conv2d(x, v, epilogue="add")
        with pytest.raises(ArgumentError, match="epilogue 'relu' expects no residual"):
            nodes.conv2d(x, v, epilogue="relu", residual=residual)
        with pytest.raises(ArgumentError, match=r"epilogue must be none, add.* but is 'swish'"):
            nodes.conv2d(x, v, epilogue="swish")
        with pytest.raises(ArgumentError, match="at least 17 px but has 8"):
            nodes.conv2d(x, v, dilation=8)
        with pytest.raises(ArgumentError, match="stride and dilation of at least 1"):
            nodes.conv2d(x, v, stride=0)
        with pytest.raises(ArgumentError, match="at most half the kernel 3 but is 2"):
            nodes.maxpool(x, 3, padding=2)
        with pytest.raises(ArgumentError, match=r"expects C=5 but .* has C=3"):
            nodes.linear(x, w.filter("l"))
        with pytest.raises(ArgumentError, match="K=3 but b has K=16"):
            nodes.bmm(x, residual, transpose_b=True)


def test_errors_of_reductions_and_group_norms_name_the_shapes() -> None:
    with graph_of(["n", 8, 8, 12]) as graph:
        x = graph.inputs[0].tensor
        w = weights(weight=(12,), bias=(11,))
        weight, few = w.vector("weight"), w.vector("bias")
        with pytest.raises(ArgumentError, match=r"axes \(4,\) to reduce are not those of \[n, 8"):
            nodes.reduce("sum", x, (4,))
        image, one = ("sum", "x0", [x], (0, 1, 2)), ["float32"]
        with pytest.raises(ArgumentError, match=r"expects vectors of 12 numbers but has .*11"):
            nodes.reduce_results(*image, "x0 x1 mul", [few], one)
        with pytest.raises(
            ArgumentError, match=r"at most 6 expressions of floats, of 1 values, but"
        ):
            nodes.reduce_results(*image, "x0 x1 mul", [], one)
        with pytest.raises(ArgumentError, match=r"no first place along the axes \(1, 2\)"):
            nodes.reduce_results("sum", "x0", [x], (1, 2), "x0 x1 mul", [x], one, first=[1])
        with pytest.raises(ArgumentError, match="groups that divide C=12 but has 5"):
            nodes.group_norm(x, weight, weight, 5)
        with pytest.raises(ArgumentError, match=r"group_norm: bias expects .*12.* but has .*11"):
            nodes.group_norm(x, weight, few, 3)
        with pytest.raises(ArgumentError, match="an activation as its epilogue, not 'add'"):
            nodes.group_norm(x, weight, weight, 3, epilogue="add")
        with pytest.raises(ArgumentError, match=r"weight expects .*12.* but has .*11"):
            nodes.rms_norm(x, few)


def test_errors_of_a_stem() -> None:
    with graph_of(["n", 8, 8, 3], ["n", 8, 8, 4]) as graph:
        x, four = (value.tensor for value in graph.inputs)
        w = weights(w_filter=(7, 7, 3, 16), mean=(3,), scale=(2,), weight=(16,), bias=(15,))
        filter, levels = w.filter("w"), (w.vector("mean"), w.vector("scale"))
        geometry = {"stride": 2, "padding": 3}
        with pytest.raises(ArgumentError, match=r"stem_maxpool: .* expects C=3 but .* has C=4"):
            nodes.stem_maxpool(four, filter, None, **geometry)
        with pytest.raises(ArgumentError, match="expects no levels with float32 pixels"):
            nodes.stem_maxpool(x, filter, levels, **geometry)
        with pytest.raises(ArgumentError, match="at least 7 px but has"):
            nodes.stem_maxpool(x[:, :3], filter, None, stride=2, padding=0)
        with pytest.raises(ArgumentError, match=r"bias expects the shape .*16.* but has .*15"):
            nodes.stem_layernorm(x, filter, None, w.vector("weight"), w.vector("bias"), **geometry)
        with pytest.raises(ArgumentError, match="expects mean and scale of uint8 pixels"):
            nodes.stem_maxpool(x.cast(DType.uint8), filter, None, **geometry)
        with pytest.raises(ArgumentError, match=r"scale expects the shape .*3.* but has .*2"):
            nodes.stem_maxpool(x.cast(DType.uint8), filter, levels, **geometry)
        with pytest.raises(ArgumentError, match="an activation as its epilogue, not 'add_relu'"):
            nodes.stem_conv2d(x, filter, None, epilogue="add_relu", **geometry)


def test_the_fused_stem_is_for_filters_that_fit() -> None:
    assert has_stem((7, 7, 3, 64), 2) and has_stem((7, 7, 3, 192), 4)
    assert has_stem((3, 3, 3, 16), 2, alone=True) and has_stem((3, 3, 3, 64), 1)
    assert not has_stem((3, 3, 3, 12), 2, alone=True)  # 8 filters of a lane
    for shape, stride in (
        ((7, 7, 3, 48), 2),  # warps of 32 filters
        ((7, 7, 3, 288), 2),  # a block's warps
        ((7, 7, 3, 64), 1),  # registers: windows at odd numbers take a channel more
        ((7, 7, 5, 64), 2),  # channels
        ((7, 7, 4, 64), 2),  # registers
        ((13, 3, 1, 64), 2),  # rows
    ):
        assert not has_stem(shape, stride)


def test_errors_of_attention_name_the_shapes() -> None:
    shapes = (["n", 9, 12], ["n", 4, 12], ["n", 5, 12], ["n", 4, 600], ["n", 0, 12])
    with graph_of(*shapes) as graph:
        q, k, other, wide, none = (value.tensor for value in graph.inputs)
        with pytest.raises(ArgumentError, match=r"v expects the shape .*4.*12.* but has .*5.*12"):
            nodes.attention(q, k, other, 2)
        with pytest.raises(ArgumentError, match="heads that divide C=12 but has 5"):
            nodes.attention(q, k, k, 5)
        with pytest.raises(ArgumentError, match="at most 256 channels but they have 600"):
            nodes.attention(wide, wide, wide, 1)
        with pytest.raises(ArgumentError, match="at least one key"):
            nodes.attention(q, none, none, 2)
        with pytest.raises(ArgumentError, match="a scale of at least 0 but it is -1"):
            nodes.attention(q, k, k, 2, scale=-1)
        half = q.cast(DType.bfloat16)
        with pytest.raises(DeviceError, match="attention: a CPU stores q's dtype, not uint8"):
            nodes.attention(half, half, half, 1, dtype="uint8")
        with pytest.raises(
            ArgumentError, match=r"attention_grad: dy expects the shape \[.*but has"
        ):
            nodes.attention_grad(q, k, k, q, k, k, 2, scale=1.0)


def test_errors_of_norms_between_layers_name_the_shapes() -> None:
    shapes = (["n", 9, 64], ["n", 9, 2, 2], ["n", 9, 64, 1], ["n", 9, 40])
    with graph_of(*shapes) as graph:
        x, moments, other, narrow = (value.tensor for value in graph.inputs)
        w = weights(a_weight=(64, 32), b_weight=(64, 40), c_weight=(40, 32))
        a, b, c = (w.filter(name) for name in "abc")
        with pytest.raises(ArgumentError, match=r"rows of a multiple of 32 but has 40"):
            nodes.row_moments(narrow)
        with pytest.raises(ArgumentError, match=r"expects C=40 but input x\[..., C\] has C=64"):
            nodes.linear_moments(x, c, x)
        with pytest.raises(ArgumentError, match=r"residual expects .*9, 32.* but has .*9, 64"):
            nodes.linear_moments(x, a, x)
        with pytest.raises(ArgumentError, match=r"rows of a multiple of 32 but has 40"):
            nodes.linear_moments(x, b, narrow)
        with pytest.raises(ArgumentError, match=r"expects C=40 but input x\[..., C\] has C=64"):
            nodes.normed_linear(x, moments, c)
        with pytest.raises(ArgumentError, match=r"moments .* of \[n, 9, 64\] but has .*9, 64, 1"):
            nodes.normed_linear(x, other, a)
        with pytest.raises(ArgumentError, match="epilogue 'add' expects a residual"):
            nodes.normed_linear(x, moments, a, epilogue="add")
        with pytest.raises(ArgumentError, match=r"epilogue must be none, add.* but is 'swish'"):
            nodes.normed_linear(x, moments, a, epilogue="swish")


def test_errors_of_attention_linear_name_the_shapes() -> None:
    with graph_of(["n", 9, 384], ["n", 5, 384], ["n", 9, 64]) as graph:
        q, k, narrow = (value.tensor for value in graph.inputs)
        w = weights(a_weight=(384, 384), b_weight=(384, 64))
        a, b = w.filter("a"), w.filter("b")
        with pytest.raises(ArgumentError, match="heads of 64 channels but they have 32"):
            nodes.attention_linear(q, k, k, a, q, 12, scale=1.0)
        with pytest.raises(ArgumentError, match=r"k expects the shape \[n, 9, 64\]"):
            nodes.attention_linear(narrow, q, q, a, q, 1, scale=1.0)
        with pytest.raises(ArgumentError, match=r"residual expects .*9, 64.* but has .*9, 384"):
            nodes.attention_linear(q, k, k, b, q, 6, scale=1.0)


def test_errors_of_layernorm_mlp_name_the_shapes() -> None:
    with graph_of(["n", 9, 64], ["n", 64], ["n", 9, 2, 2], ["n", 8, 2, 2]) as graph:
        x, flat, moments, other = (value.tensor for value in graph.inputs)
        w = weights(a_weight=(64, 20), b_weight=(20, 64))
        a, b = w.filter("a"), w.filter("b")
        with pytest.raises(ArgumentError, match=r"tokens x\[N, T, C\] but x has .*64"):
            nodes.layernorm_mlp(flat, moments, (a, b))
        with pytest.raises(
            ArgumentError, match=r"moments .* of \[n, 9, 64\] but has \[n, 8, 2, 2\]"
        ):
            nodes.layernorm_mlp(x, other, (a, b))
        with pytest.raises(ArgumentError, match=r"\[64, K\] and \[K, 64\] but has \[20, 64\]"):
            nodes.layernorm_mlp(x, moments, (b, a))


def test_errors_of_squeeze_excite_name_the_shapes() -> None:
    with graph_of(["n", 3, 5, 16], ["n", 16]) as graph:
        x, flat = (value.tensor for value in graph.inputs)
        w = weights(a_weight=(1, 1, 16, 4), b_weight=(1, 1, 4, 16))
        a, b = w.matrix("a.weight"), w.matrix("b.weight", by_input=True)
        ends = {"activation": "relu", "gate": "sigmoid"}
        with pytest.raises(ArgumentError, match=r"expects x\[N, H, W, C\] but x has rank 2"):
            nodes.squeeze_excite(flat, a, b, **ends)
        with pytest.raises(ArgumentError, match=r"\[16, K\] and \[K, 16\] .* has \[4, 16\]"):
            nodes.squeeze_excite(x, w.matrix("b.weight"), b, **ends)
        with pytest.raises(ArgumentError, match=r"bias expects the shape \[4\] but has \[16\]"):
            nodes.squeeze_excite(x, (a[0], b[1]), b, **ends)
        with pytest.raises(ArgumentError, match="an activation as its epilogue, not 'add'"):
            nodes.squeeze_excite(x, a, b, activation="add", gate="sigmoid")
        with pytest.raises(ArgumentError, match="'add_relu' expects a residual"):
            nodes.squeeze_excite(x, a, b, **ends, epilogue="add_relu")


def test_only_axes_that_move_are_permuted() -> None:
    """By our kernel, or by MAX's where there are too many axes."""
    for device in (DeviceRef.GPU(), DeviceRef.CPU()):
        with graph_of(["n", 1, 5, 6], device=device) as graph:
            x = graph.inputs[0].tensor
            with pytest.raises(ArgumentError, match=r"\(0, 1, 2, 2\) must name each axis"):
                nodes.permute(x, (0, 1, 2, 2))
            still, moved = nodes.permute(x, (1, 0, 2, 3)), nodes.permute(x, (0, 2, 1, 3))
            assert [*map(str, still.shape)] == ["1", "n", "5", "6"]
            assert [*map(str, nodes.permute(moved, (3, 0, 1, 2)).shape)] == ["6", "n", "5", "1"]
            graph.output(still)
        assert str(graph).count('symbol = "permute"') == 1
    with graph_of(["n", 2, 2, 2, 2, 2, 2], device=DeviceRef.GPU()) as graph:
        graph.output(nodes.permute(graph.inputs[0].tensor, (6, 5, 4, 3, 2, 1, 0)))
    assert "transpose" in str(graph)


@pytest.mark.parametrize(
    ("rows", "launches"), [(100, ["reduce_results"]), (20_000, ["reduce_terms", "reduce_results"])]
)
def test_the_last_launch_computes_what_stands_behind_sums(rows: int, launches: list[str]) -> None:
    """Of many rows this is the second one, which reads the first row of x, too."""
    with graph_of([2, rows, 64], [64], device=DeviceRef.GPU()) as graph:
        x, w = (value.tensor for value in graph.inputs)
        y, z = nodes.reduce_results(
            "mean", "x0 x1 sub", [x, x], (0, 1), "x0 x1 mul ; x0 x2 add", [w, x],
            ["float32", "bfloat16"], first=[1, 3],
        )  # fmt: skip
        graph.output(y, z)
    assert (y.dtype, z.dtype) == (DType.float32, DType.bfloat16)
    assert [*map(str, y.shape)] == [*map(str, z.shape)] == ["64"]
    lines = [line for line in str(graph).splitlines() if "symbol = " in line]
    assert re.findall(r'symbol = "(\w+)"', str(graph)) == launches
    assert 'lies = "ori i"' in lines[0]


def test_errors_of_conv2d_mean_name_the_shapes() -> None:
    with graph_of(["n", 7, 7, 64], ["n", 7, 7, 24], device=DeviceRef.GPU()) as graph:
        x, residual = (value.tensor for value in graph.inputs)
        w = weights(DeviceRef.GPU(), a_weight=(64, 32), b_weight=(64, 20))
        a, b = w.filter("a"), w.filter("b")
        with pytest.raises(ArgumentError, match=r"shape .*7.*7.*32.* but has .*7.*7.*24"):
            nodes.conv2d_mean(x, a, epilogue="add", residual=residual)
        with pytest.raises(ArgumentError, match=r"a multiple of 8 but has \(64, 20\)"):
            nodes.conv2d_mean(x, b)


@pytest.mark.parametrize(("rows", "launches"), [(100, 1), (3136, 2)])
def test_a_batch_that_is_not_known_is_reduced_in_parts(rows: int, launches: int) -> None:
    with graph_of(["n", rows, 64], device=DeviceRef.GPU()) as graph:
        (y,) = nodes.reduce_terms("sum", "x0", [graph.inputs[0].tensor], (0, 1))
        graph.output(y)
    assert [*map(str, y.shape)] == ["64"]
    assert re.findall(r'symbol = "(\w+)"', str(graph)) == ["reduce_terms"] * launches


def test_errors_of_conv2d_chain_name_the_shapes() -> None:
    shapes = (["n", 4, 4, 64], ["n", 4, 4, 256], ["n", 4, 4, 32], ["n", 4, 5, 256])
    with graph_of(*shapes, device=DeviceRef.GPU()) as graph:
        x, residual, narrow, other = (value.tensor for value in graph.inputs)
        w = weights(DeviceRef.GPU(), a_weight=(64, 256), b_weight=(256, 64), wrong_weight=(128, 64))
        a, b, wrong = w.filter("a"), w.filter("b"), w.filter("wrong")
        with pytest.raises(ArgumentError, match=r"expects C=64 but input .* has C=32"):
            nodes.conv2d_chain(narrow, a, residual, b)
        with pytest.raises(ArgumentError, match=r"filter \[1, 1, 256, F\] but it is .*128"):
            nodes.conv2d_chain(x, a, residual, wrong)
        with pytest.raises(ArgumentError, match=r"shape .*4.*4.*256.* but has .*4.*5.*256"):
            nodes.conv2d_chain(x, a, other, b)


def test_errors_of_qkv_linear_name_the_shapes() -> None:
    with graph_of(["n", 9, 12], ["n", 4, 12], ["n", 5, 12], ["n", 4, 8]) as graph:
        q, k, other, narrow = (value.tensor for value in graph.inputs)
        w = weights(q_weight=(12, 8), k_weight=(12, 8), v_weight=(12, 16))
        a, b, wide = (w.filter(name) for name in "qkv")
        with pytest.raises(ArgumentError, match="as many keys as values but has 4 and 5"):
            nodes.qkv_linear((q, k, other), (a, b, b))
        with pytest.raises(ArgumentError, match=r"tokens \[N, T, 12\] but one is .*4.*8"):
            nodes.qkv_linear((q, k, narrow), (a, b, b))
        with pytest.raises(ArgumentError, match=r"weights \[12, 8\] but one is \[12, 16\]"):
            nodes.qkv_linear((q, k, k), (a, b, wide))


def test_errors_name_the_dtypes_of_a_cpu() -> None:
    expects = "on a CPU the dtype must be one of float32, bfloat16, float64 but is float16"
    with (
        graph_of(["n", 4], dtype=DType.float16) as graph,
        pytest.raises(DeviceError, match=expects),
    ):
        nodes.relu(graph.inputs[0].tensor)
    filters = {"w.filter": np.ones((1, 1, 3, 4))}
    w = Parameters(filters, DeviceRef.CPU(), DType.bfloat16)
    expects = "sparse_conv2d: on a CPU the dtype must be one of float32 but is bfloat16"
    with (
        graph_of(["n", 8, 8, 3], dtype=DType.bfloat16) as graph,
        pytest.raises(DeviceError, match=expects),
    ):
        nodes.conv2d(graph.inputs[0].tensor, w.filter("w", sparse=True))
