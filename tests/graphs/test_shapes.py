"""The types of what ops give: those of torch, and mistakes told in a sentence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from maxvision.common.errors import ArgumentError
from maxvision.graphs.passes import PASSES
from maxvision.graphs.shapes import MOST_DEPTH, OPS, infer, windows
from maxvision.graphs.types import BATCH, FLOAT8, Type
from tests.graphs import interpret, nets

SEEDED = settings(derandomize=True, deadline=None)
X = Type((BATCH, 6, 8, 9))
TOKENS = Type((BATCH, 5, 4))
HALVES = TOKENS._replace(dtype="bfloat16")
HEADED = {"heads": 1, "scale": 1.0}


def one(op: str, *given: Type | None, **attributes: Any) -> Type:
    (found,) = infer(op, given, attributes)
    return found


# --- as torch has it -----------------------------------------------------------------------------


@SEEDED
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_windows_are_those_of_torchs_convolution(**window: tuple[int, int]) -> None:
    size, taps = window.pop("size"), window.pop("taps")
    x, filter = torch.zeros(1, 1, *size), torch.zeros(1, 1, *taps)
    try:
        wanted = tuple(F.conv2d(x, filter, **window).shape[2:])  # type: ignore[arg-type]
    except RuntimeError:
        with pytest.raises(ArgumentError, match=r"^a: expects an input of at least \d+ px but has"):
            windows("a", size, taps, **window)
    else:
        assert windows("a", size, taps, **window) == wanted


@SEEDED
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 5),
    padding=st.integers(0, 2),
    ceil_mode=st.booleans(),
    op=st.sampled_from(["max_pool2d", "avg_pool2d"]),
)
def test_pools_are_torchs(size: tuple[int, int], op: str, **window: Any) -> None:
    assume(2 * window["padding"] <= window["kernel"])
    if window["ceil_mode"]:  # torch lets a window be larger than the padded image; we do not
        assume(min(size) + 2 * window["padding"] >= window["kernel"])
    x = torch.zeros(1, 2, *size)
    arguments = {name: value for name, value in window.items() if name != "kernel"}
    try:
        wanted = tuple(getattr(F, op)(x, window["kernel"], **arguments).shape)
    except RuntimeError:
        with pytest.raises(ArgumentError):
            one(op, Type((1, 2, *size)), **window)
        return
    assert one(op, Type((1, 2, *size)), **window).shape == wanted
    n, c, h, w = wanted
    assert one(op, Type((1, *size, 2)), layout="NHWC", **window).shape == (n, h, w, c)


@SEEDED
@given(st.data())
def test_broadcasting_is_numpys(data: st.DataObject) -> None:
    sizes = st.lists(st.sampled_from([1, 1, 2, 3]), max_size=4)
    a, b = data.draw(sizes), data.draw(sizes)
    try:
        wanted = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        with pytest.raises(ArgumentError, match="do not broadcast"):
            one("add", Type(tuple(a)), Type(tuple(b)))
    else:
        assert one("mul", Type(tuple(a)), Type(tuple(b))).shape == wanted


@pytest.mark.parametrize("name", nets.NETS)
def test_the_types_of_networks_are_those_of_torchs_results(name: str) -> None:
    """``interpret`` compares the shape of each value with its type."""
    write, shape = nets.NETS[name]
    program = nets.program(write, *shape)
    interpret.interpret(program, interpret.inputs(program, batch=3), interpret.weights(program))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (one("conv2d", X, Type((4, 3, 3, 1)), groups=2, padding=(1, 0)), (BATCH, 4, 8, 9)),
        (
            one(
                "conv2d_weight_grad",
                X,
                Type((BATCH, 4, 8, 4)),
                kernel=(3, 2),
                stride=(1, 2),
                padding=(1, 0),
                groups=2,
            ),
            (4, 3, 3, 2),
        ),
        (
            one("conv2d_weight_grad", X, Type((BATCH, 6, 8, 4)), kernel=1, layout="NHWC"),
            (4, 1, 1, 9),
        ),
        (
            one(
                "conv2d_input_grad",
                Type((BATCH, 4, 8, 4)),
                Type((4, 3, 3, 2)),
                size=(8, 9),
                stride=(1, 2),
                padding=(1, 0),
                groups=2,
            ),
            (BATCH, 6, 8, 9),
        ),
        (infer("layer_norm_grad", [TOKENS, TOKENS, Type((4,))], {})[0], TOKENS.shape),
        (one("softmax_grad", TOKENS, TOKENS), TOKENS.shape),
        (one("max_pool2d_grad", X, Type((BATCH, 6, 4, 5)), kernel=3, stride=2, padding=1), X.shape),
        (
            one(
                "avg_pool2d_grad",
                Type((BATCH, 4, 5, 6)),
                size=(8, 9),
                kernel=2,
                ceil_mode=True,
                layout="NHWC",
            ),
            (BATCH, 8, 9, 6),
        ),
        (one("linear", TOKENS, Type((7, 4))), (BATCH, 5, 7)),
        (one("linear", TOKENS, Type((4, 4)), None, TOKENS, epilogue="add"), (BATCH, 5, 4)),
        (one("matmul", TOKENS, TOKENS, transpose_b=True), (BATCH, 5, 5)),
        (one("matmul", TOKENS, Type((4, 3))), (BATCH, 5, 3)),
        (one("avg_pool2d", X), (BATCH, 6, 1, 1)),
        (one("reshape", X, shape=(BATCH, 432)), (BATCH, 432)),
        (one("permute", X, axes=(3, 0, 1, 2)), (9, BATCH, 6, 8)),
        (one("slice", X, axis=2, start=3, stop=8), (BATCH, 6, 5, 9)),
        (one("concat", TOKENS, TOKENS, axis=2), (BATCH, 5, 8)),
        (one("concat", TOKENS, Type((4,)), axis=2, expression="x0 x1 add"), (BATCH, 5, 4)),
        (one("expand", Type((1, 1, 4)), shape=(BATCH, 5, 4)), (BATCH, 5, 4)),
        (one("class_token", TOKENS, Type((1, 1, 4))), (BATCH, 6, 4)),
        (one("class_token", TOKENS, Type((4,)), Type((4,)), Type((4,))), (BATCH, 6, 4)),
        (one("layernorm_first", TOKENS, Type((4,)), Type((4,))), (BATCH, 4)),
    ],
)
def test_types(found: Type, wanted: tuple[int | str, ...]) -> None:
    assert found == Type(wanted)


def test_weights_follow_the_dtype_of_activations() -> None:
    half = TOKENS._replace(dtype="bfloat16")
    assert one("add", half, Type((5, 4))).dtype == "bfloat16"
    assert one("concat", Type((BATCH, 1, 4)), half, axis=1).dtype == "bfloat16"
    assert one("linear", half, Type((7, 4))).dtype == "bfloat16"
    with pytest.raises(
        ArgumentError, match="the values must have one dtype but have float32, uint8"
    ):
        one("add", TOKENS, TOKENS._replace(dtype="uint8"))


# --- mistakes ------------------------------------------------------------------------------------

HEADS = Type((BATCH, 2, 5, 4))
F33 = Type((4, 6, 3, 3))
F11 = Type((4, 6, 1, 1))
BYTES, FLOATS = (Type((BATCH, 8, 9, 6), dtype) for dtype in ("uint8", FLOAT8))
PIXELS = Type((BATCH, 8, 9, 6))
SHORTCUT = {"scale": 1.0, "source_scale": 1.0, "result_scale": 1.0}
CHAIN = {"scale": 1.0, "residual_scale": 1.0, "result_scale": 1.0, "next_scale": 1.0}
ROWS, MOMENTS = Type((BATCH, 5, 64), "bfloat16"), Type((BATCH, 5, 2, 2))
MISTAKES: dict[str, tuple[str, tuple[Type | None, ...], dict[str, Any]]] = {
    "there is no such op": ("conv3d", (X,), {}),
    r"filter w\[R, S, C, F\] expects C=6 but input x\[N, H, W, C\] has C=9": (
        "conv2d", (X, F33), {"layout": "NHWC"},
    ),
    "the size of filter must be known but is n": ("conv2d", (X, Type(("n", 6, 3, 3))), {}),
    r"bias expects the shape \[4\] but has \[5\]": ("conv2d", (X, F33, Type((5,))), {}),
    "epilogue must be none, add, mul, an op of one value .* but is 'swish'": (
        "conv2d", (X, F33), {"epilogue": "swish"},
    ),
    "epilogue 'add' expects a residual": ("conv2d", (X, F33), {"epilogue": "add"}),
    "epilogue 'none' expects no residual": ("conv2d", (X, F33, None, X), {}),
    "residual expects the output's shape": (
        "conv2d", (X, F33, None, X), {"epilogue": "add"},
    ),
    "expects kernel, stride and dilation of at least 1 and padding of at least 0": (
        "conv2d", (X, F33), {"stride": 0},
    ),
    r"expects x\[N, H, W, C\] but x has rank 3": ("conv2d", (TOKENS, F33), {}),
    "padding must be at most half the kernel 3 but is 2": (
        "max_pool2d", (X,), {"kernel": 3, "padding": 2},
    ),
    r"weight \[C, F\] expects C=5 but input x\[..., C\] has C=4": (
        "linear", (TOKENS, Type((7, 5))), {},
    ),
    "has K=4 but b has K=5": ("matmul", (TOKENS, TOKENS), {}),
    r"a\[..., M, K\] and b expect rank 2 or more": ("matmul", (TOKENS, Type((4,))), {}),
    r"weight expects the shape \[4\] of x\[..., C\] but has \[5\]": (
        "layer_norm", (TOKENS, Type((5,)), Type((4,))), {},
    ),
    r"softmax_grad: expects dy of the shape \[batch, 5, 4\] but it has \[batch, 5, 3\]": (
        "softmax_grad", (Type((BATCH, 5, 3)), TOKENS), {},
    ),
    r"layer_norm_grad: expects dy of the shape \[batch, 5, 4\] but it has \[batch, 5, 3\]": (
        "layer_norm_grad", (Type((BATCH, 5, 3)), TOKENS), {},
    ),
    r"layer_norm_grad: weight expects the shape \[4\] of x\[..., C\] but has \[5\]": (
        "layer_norm_grad", (TOKENS, TOKENS, Type((5,))), {},
    ),
    r"mean expects the shape \[6\]": (
        "batch_norm", (X, Type((6,)), Type((6,)), Type((5,)), Type((6,))), {},
    ),
    r"expects q\[N, heads, T, D\]": (
        "scaled_dot_product_attention", (HEADS, HEADS, TOKENS), {"scale": 1.0},
    ),
    "expects heads that divide C=4 but has 3": (
        "attention", (TOKENS, TOKENS, TOKENS), {"heads": 3, "scale": 1.0},
    ),
    "expects a scale of at least 0 but it is -1": (
        "attention", (TOKENS, TOKENS, TOKENS), {"heads": 1, "scale": -1.0},
    ),
    r"expects a mask that broadcasts to \[batch, 2, 5, 5\]": (
        "scaled_dot_product_attention", (HEADS,) * 3 + (Type((2, 1, 5, 5)),), {"scale": 1.0},
    ),
    r"expects a bias \[P, rows, 6\] with P that divides N=batch and 1, 5 rows": (
        "attention", (TOKENS, TOKENS, TOKENS, Type((1, 4, 6))), {"heads": 1, "scale": 1.0},
    ),
    r"expects a mask that broadcasts to \[N, 2, 5, 5\]": (
        "attention_bias", (Type((1, 3, 5, 5)),), {"heads": 2, "queries": 5, "keys": 5},
    ),
    "attention: gives q's dtype, or uint8 or float8_e4m3fn, not int8": (
        "attention", (HALVES,) * 3, {**HEADED, "dtype": "int8"},
    ),
    "attention: with logsumexp the result is in q's dtype, not uint8": (
        "attention", (HALVES,) * 3, {**HEADED, "dtype": "uint8", "logsumexp": True},
    ),
    "attention: gives uint8 of 16 bits and .* but q is float32 and heads have 4": (
        "attention", (TOKENS, TOKENS, TOKENS), {**HEADED, "dtype": "uint8"},
    ),
    "attention: gives float8_e4m3fn of .* but q is bfloat16 and heads have 132": (
        "attention", (Type((BATCH, 5, 132), "bfloat16"),) * 3, {**HEADED, "dtype": FLOAT8},
    ),
    "attention: gives uint8 of .* but q is bfloat16 and heads have 2": (
        "attention", (HALVES,) * 3, {"heads": 2, "scale": 1.0, "dtype": "uint8"},
    ),
    "attention: only a result in 8 bits has a scale or a least number": (
        "attention", (HALVES,) * 3, {**HEADED, "result_scale": 0.5},
    ),
    "attention: expects a result_scale above 0 but it is nan": (
        "attention", (HALVES,) * 3, {**HEADED, "dtype": "uint8", "result_scale": math.nan},
    ),
    "attention: expects a whole result_low from -255 to 0 of uint8 but it is 3": (
        "attention", (HALVES,) * 3, {**HEADED, "dtype": "uint8", "result_low": 3.0},
    ),
    "attention: expects a whole result_low from 0 to 0 of float8_e4m3fn but it is -1": (
        "attention", (HALVES,) * 3, {**HEADED, "dtype": FLOAT8, "result_low": -1.0},
    ),
    f"expects heads of at most {MOST_DEPTH} channels but they have 300": (
        "attention", (Type((BATCH, 5, 300)),) * 3, {"heads": 1, "scale": 1.0},
    ),
    r"expects dy\[N, P, Q, F\] of batch images of \[6, 7\] px but it has batch of \[8, 9\] px": (
        "conv2d_weight_grad", (X, X), {"kernel": 3},
    ),
    "expects C and F of a multiple of 4 groups but has 6 and 6": (
        "conv2d_weight_grad", (X, X), {"kernel": 1, "groups": 4},
    ),
    r"dy \[batch, 6, 8, 9\] does not fit a filter \[6, 4, 3, 3\] and \[8, 9\] px": (
        "conv2d_input_grad", (X, Type((6, 4, 3, 3))), {"size": (8, 9)},
    ),
    r"attention_grad: logsumexp expects the shape \[batch, 2, 5\] but has \[batch, 5, 4\]": (
        "attention_grad", (TOKENS,) * 6, {"heads": 2, "scale": 1.0},
    ),
    r"max_pool2d_grad: expects dy of the shape \[batch, 6, 4, 4\] but it has \[batch, 6, 8, 9\]": (
        "max_pool2d_grad", (X, X), {"kernel": 2},
    ),
    r"avg_pool2d_grad: expects dy of the shape \[batch, 6, 4, 5\] but it has \[batch, 6, 8, 9\]": (
        "avg_pool2d_grad", (X,), {"size": (9, 10), "kernel": 2},
    ),
    "must have as many numbers as": ("reshape", (X,), {"shape": (BATCH, 431)}),
    "must name each axis of": ("permute", (X,), {"axes": (0, 1, 2)}),
    "3:9 is not within the 8 of an axis": (
        "slice", (X,), {"axis": 2, "start": 3, "stop": 9},
    ),
    "does not fit": ("concat", (TOKENS, Type((BATCH, 6, 4))), {"axis": 2}),
    "does not expand to": ("expand", (TOKENS,), {"shape": (BATCH, 5, 8)}),
    r"mean and scale of uint8 pixels": (
        "stem_maxpool", (X._replace(dtype="uint8"), None, None, F33, None),
        {"stride": 1, "padding": 1},
    ),
    "no levels with float32 pixels": (
        "stem_maxpool", (X, Type((9,)), Type((9,)), F33, None), {"stride": 1, "padding": 1},
    ),
    r"conv2d_mean: expects a filter \[1, 1, C, F\] but it is \[3, 3, 6, 4\]": (
        "conv2d_mean", (Type((BATCH, 3, 5, 6)), F33), {},
    ),
    r"conv2d_mean: .* expects C=6 but .* has C=9": ("conv2d_mean", (X, F11), {}),
    r"expects a shortcut \[1, 1, C, 4\]": (
        "conv2d_shortcut", (X, F33, None, X, F33, None), {},
    ),
    "conv2d_shortcut_chain: filter .* expects C=9 but input .* has C=4": (
        "conv2d_shortcut_chain",
        (PIXELS, F11, None, PIXELS, F11, None, Type((5, 9, 1, 1)), None), {},
    ),
    r"stem_maxpool_conv2d: expects a following filter \[1, 1, 4, F\] but it is \[3, 3, 4, 4\]": (
        "stem_maxpool_conv2d", (X, None, None, F33, None, Type((4, 4, 3, 3)), None),
        {"stride": 1, "padding": 1},
    ),
    "quantized_conv2d_shortcut: expects both inputs in uint8, or in float8_e4m3fn, but": (
        "quantized_conv2d_shortcut", (X, F33, None, X, F11, None), SHORTCUT,
    ),
    "quantized_conv2d_shortcut: .* but has uint8 and float8_e4m3fn": (
        "quantized_conv2d_shortcut", (BYTES, F33, None, FLOATS, F11, None), SHORTCUT,
    ),
    r"quantized_conv2d_shortcut: steps expects the shape \[4\] but has \[5\]": (
        "quantized_conv2d_shortcut", (BYTES, F33, None, BYTES, F11, None, None, Type((5,))),
        {**SHORTCUT, "padding": 1},
    ),
    "quantized_conv2d_shortcut: epilogue 'add_relu' expects a residual": (
        "quantized_conv2d_shortcut", (BYTES, F33, None, BYTES, F11, None),
        {**SHORTCUT, "padding": 1, "epilogue": "add_relu"},
    ),
    "quantized_conv2d_chain: .* but has float8_e4m3fn and uint8": (
        "quantized_conv2d_chain", (FLOATS, F11, None, BYTES, F11, None), CHAIN,
    ),
    r"quantized_conv2d_chain: steps expects the shape \[4\] but has \[9\]": (
        "quantized_conv2d_chain",
        (BYTES, F11, None, BYTES, Type((9, 4, 1, 1)), None, Type((9,))), CHAIN,
    ),
    "quantized_conv2d_chain: does not take": (
        "quantized_conv2d_chain", (BYTES, F11, None, BYTES, F11, None), {"scale": 1.0},
    ),
    r"expects tokens \[N, T, C\] and a token \[C\]": ("class_token", (TOKENS, Type((3,))), {}),
    r"class_token: bias expects the shape \[4\]": (
        "class_token", (TOKENS, Type((4,)), Type((4,)), Type((3,))), {},
    ),
    r"expects 2 \* 2 \+ 1 tokens but x\[N, T, C\] has T=4": (
        "depthwise_qkv", (Type((BATCH, 4, 8)), Type((8,)), Type((8,))),
        {"size": (2, 2), "kernel": 3, "class_token": True},
    ),
    "depthwise_qkv: stores x's dtype, uint8 or float8_e4m3fn, not int8": (
        "depthwise_qkv", (Type((BATCH, 4, 8)), Type((8,)), Type((8,))),
        {"size": (2, 2), "kernel": 3, "dtype": "int8"},
    ),
    "expects the 2 values of 'x0 x1 add'": ("pointwise", (X,), {"expression": "x0 x1 add"}),
    "add of 'x0 add' expects 2 values": ("pointwise", (X,), {"expression": "x0 add"}),
    "has 'swish', which is no op": ("pointwise", (X,), {"expression": "x0 swish"}),
    "'x0 x0' leaves 2 results": ("pointwise", (X,), {"expression": "x0 x0"}),
    "a value that is no mask": (
        "pointwise", (Type((BATCH, 4), "bool"),), {"expression": "x0 relu"},
    ),
    "the 1 values of 'x0 relu' of each of 1 to 166 members but has 167 values": (
        "foreach", (X,) * 167, {"expression": "x0 relu"},
    ),
    "the 2 values of 'x0 x1 add' of each of 1 to 125 members but has 3 values": (
        "foreach", (X, X, X), {"expression": "x0 x1 add"},
    ),
    "foreach: a member's values have one shape": (
        "foreach", (X, Type((1,))), {"expression": "x0 x1 add"},
    ),
    "foreach: expects the dtypes of float32": (
        "foreach", (Type((4,)), Type((3,), "bfloat16")), {"expression": "x0 relu"},
    ),
    "at most 6 axes but has 7": ("pointwise", (Type((2,) * 7),), {"expression": "x0 relu"}),
    "relu: does not take": ("relu", (X, X), {}),
    r"conv2d: does not take .* with \{'strides': 2\}": ("conv2d", (X, F33), {"strides": 2}),
    "batch_norm: does not take": ("batch_norm", (X,), {}),
    "qkv_linear: does not take": ("qkv_linear", (TOKENS, TOKENS), {}),
    "quantized_qkv_linear: gives floats, not uint8": (
        "quantized_qkv_linear",
        (*(TOKENS._replace(dtype="uint8"),) * 3, *(Type((4, 4)), None) * 3),
        {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "dtype": "uint8"},
    ),
    "quantized_qkv_linear: expects both inputs in uint8, or in float8_e4m3fn": (
        "quantized_qkv_linear",
        (TOKENS._replace(dtype="uint8"), TOKENS, TOKENS, *(Type((4, 4)), None) * 3),
        {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0},
    ),
    r"a weight \[F, 8\] for 5 tokens but has \[3, 5\]": (
        "token_linear", (Type((BATCH, 5, 8)), Type((3, 5))), {},
    ),
    "channels of a multiple of 8 but has 4": ("token_linear", (TOKENS, Type((3, 8))), {}),
    r"tokens x\[N, T, C\] but x has \[batch, 6, 8, 9\]": ("token_linear", (X, Type((3, 8))), {}),
    r"residual expects the output's shape \[batch, 3, 8\]": (
        "token_linear", (Type((BATCH, 5, 8)), Type((3, 8)), None, Type((BATCH, 5, 8))),
        {"epilogue": "add"},
    ),
    "row_moments: expects rows of a multiple of 32 but has 4": ("row_moments", (TOKENS,), {}),
    "row_moments: the size of C of .* must be known but is 32\\*batch": (
        "row_moments", (Type((5, f"32*{BATCH}")),), {},
    ),
    "row_moments: expects rows of a multiple of 32 but has 40": (
        "linear_moments", (TOKENS, Type((40, 4)), None, Type((BATCH, 5, 40))), {},
    ),
    r"linear: residual expects the output's shape \[batch, 5, 32\]": (
        "linear_moments", (TOKENS, Type((32, 4)), None, TOKENS), {},
    ),
    "linear_moments: does not take": ("linear_moments", (TOKENS, Type((32, 4))), {}),
    r"normed_linear: expects moments \[..., C / 32, 2\] of .*5, 64\] but has \[batch, 5, 64\]": (
        "normed_linear", (ROWS, ROWS, Type((7, 64)), None), {},
    ),
    r"normed_linear: expects moments .* but has \[batch, 5, 2, 2\]": (
        "normed_linear",
        (ROWS, MOMENTS._replace(dtype="bfloat16"), Type((7, 64)), None), {},
    ),
    "row_moments: expects rows of a multiple of 32 but has 9": (
        "normed_linear", (X, MOMENTS, Type((7, 9)), None), {},
    ),
    "linear: epilogue 'add' expects a residual": (
        "normed_linear", (ROWS, MOMENTS, Type((7, 64)), None), {"epilogue": "add"},
    ),
    r"layernorm_mlp: expects moments .* but has \[batch, 5, 1, 2\]": (
        "layernorm_mlp",
        (ROWS, Type((BATCH, 5, 1, 2)), Type((9, 64)), None, Type((64, 9)), None), {},
    ),
    r"layernorm_mlp: expects weights \[64, K\] and \[K, 64\] but has \[64, 9\] and \[8, 64\]": (
        "layernorm_mlp",
        (ROWS, MOMENTS, Type((9, 64)), None, Type((64, 8)), None), {},
    ),
    r"layernorm_mlp: expects tokens x\[N, T, C\] but x has \[batch, 6, 8, 9\]": (
        "layernorm_mlp", (X, MOMENTS, Type((7, 9)), None, Type((9, 7)), None), {},
    ),
    "norm_filter: rounds to bfloat16 or float16, not 'float32'": (
        "norm_filter", (Type((7, 64)), Type((64,))), {"to": "float32"},
    ),
    r"norm_filter: weight expects the shape \[64\] but has \[7\]": (
        "norm_filter", (Type((7, 64)), Type((7,))), {"to": "float16"},
    ),
    r"norm_shift: bias expects the shape \[64\] but has \[7\]": (
        "norm_shift", (Type((7, 64)), Type((7,))), {},
    ),
    r"gather_rows: \[2, 3\] and \[5\] are not 5 rows": (
        "gather_rows", (TOKENS,),
        {"size": (2, 3), "shifts": (0, 0), "shape": (5,), "axes": (0,), "rolls_first": True},
    ),
    r"axes \(0, 0\) must name each of \[1, 5\]": (
        "gather_rows", (TOKENS,),
        {"size": (1, 5), "shifts": (0, 0), "shape": (1, 5), "axes": (0, 0), "rolls_first": True},
    ),
    r"gather_rows: expects to add to \[batch, 5, 4\]": (
        "gather_rows", (TOKENS, Type((BATCH, 5, 8))),
        {"size": (1, 5), "shifts": (0, 0), "shape": (5,), "axes": (0,), "rolls_first": True},
    ),
    "concat: expects vectors of 8 along the last axis": (
        "concat", (TOKENS, TOKENS, Type((4,))), {"axis": 2, "expression": "x0 x1 add"},
    ),
    "concat: expects values and the vectors of 'x0 x1 lt'": (
        "concat", (TOKENS, TOKENS, Type((8,))), {"axis": 2, "expression": "x0 x1 lt"},
    ),
    "concat: does not take": ("concat", (TOKENS, Type((BATCH, 5, 4, 1))), {"axis": 1}),
}  # fmt: skip


@pytest.mark.parametrize("x", [BYTES, FLOATS], ids=["uint8", "e4m3"])
def test_sums_and_chains_of_8_bits_are_stored_as_what_they_read(x: Type) -> None:
    image, steps = Type((BATCH, 8, 9, 4), x.dtype), Type((4,))
    given = (x, F33, None, Type((BATCH, 15, 17, 6), x.dtype), F11, steps, steps, steps)
    window = {"padding": 1, "stride": 2, "epilogue": "relu"}
    assert one("quantized_conv2d_shortcut", *given, **SHORTCUT, **window) == image
    following = Type((9, 4, 1, 1))
    chain = infer("quantized_conv2d_chain", (x, F11, steps, image, following, None), CHAIN)
    assert chain == [image, Type((BATCH, 8, 9, 9), x.dtype)]


def test_a_chain_gives_what_its_sum_is_and_what_follows() -> None:
    given = (PIXELS, F11, None, PIXELS, F11, Type((4,)), Type((9, 4, 1, 1)), None)
    h, z = infer("conv2d_shortcut_chain", given, {})
    assert (h, z) == (Type((BATCH, 8, 9, 4)), Type((BATCH, 8, 9, 9)))


def test_a_stem_with_a_convolution_gives_both() -> None:
    given = (PIXELS._replace(dtype="uint8"), Type((6,)), Type((6,)), Type((64, 6, 7, 7)), None)
    following = Type((32, 64, 1, 1))
    window = {"stride": 2, "padding": 3, "dtype": "bfloat16"}
    y, z = infer("stem_maxpool_conv2d", (*given, following, None), window)
    assert [y] == infer("stem_maxpool", given, window)
    assert z == y._replace(shape=(*y.shape[:3], 32))


def test_the_mean_of_a_convolution_is_one_pixel_or_none() -> None:
    x, y = Type((BATCH, 3, 5, 6), "float16"), Type((BATCH, 3, 5, 4), "float16")
    given = (x, F11, Type((4,)), y)
    assert one("conv2d_mean", *given, epilogue="add_relu") == Type((BATCH, 1, 1, 4), "float16")
    assert one("conv2d_mean", x, F11, keepdim=False) == Type((BATCH, 4), "float16")


@pytest.mark.parametrize("dtype", ["uint8", FLOAT8])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_attention_of_16_bits_can_give_8(kind: str, dtype: str) -> None:
    q, k = Type((BATCH, 5, 256), kind), Type((BATCH, 7, 256), kind)
    bias, low = Type((1, 5, 8), kind), -255.0 if dtype == "uint8" else 0.0
    settings = {"heads": 2, "scale": 1.0, "dtype": dtype, "result_scale": 0.1, "result_low": low}
    assert one("attention", q, k, k, **settings) == q._replace(dtype=dtype)
    assert one("attention", q, k, k, bias, causal=True, **settings) == q._replace(dtype=dtype)


@pytest.mark.parametrize("dtype", ["", "uint8", FLOAT8])
def test_projections_are_stored_as_what_is_asked_for(dtype: str) -> None:
    x, vector, filter = Type((BATCH, 13, 8), "bfloat16"), Type((8,)), Type((8, 1, 3, 3))
    given = (x, vector, vector, *(filter, vector) * 3)
    settings = {"size": (3, 4), "kernel": 3, "class_token": True, "q_scale": 0.5, "v_low": -3.0}
    q, *others = infer("depthwise_qkv", given, {**settings, "dtype": dtype})
    assert q == Type((BATCH, 13, 8), dtype or "bfloat16")
    assert others == [Type((BATCH, 5, 8), dtype or "bfloat16")] * 2


def test_moments_are_float32_and_those_of_groups_of_columns() -> None:
    assert one("row_moments", ROWS) == MOMENTS
    residual = Type((BATCH, 3, 5, 96), "float16")
    given = (Type((BATCH, 3, 5, 8), "float16"), Type((96, 8)), Type((96,)), residual)
    wanted = [residual, Type((BATCH, 3, 5, 3, 2))]
    assert infer("linear_moments", given, {}) == wanted
    weights = (Type((7, 64)), Type((7,)))
    y = one("normed_linear", ROWS, MOMENTS, *weights, epilogue="gelu", eps=1e-6)
    assert y == Type((BATCH, 5, 7), "bfloat16")
    assert one("layernorm_mlp", ROWS, MOMENTS, *weights, Type((64, 7)), None, eps=1e-6) == ROWS
    given = (ROWS, *[ROWS._replace(shape=(BATCH, 9, 64))] * 2, Type((32, 64)), None)
    sum_ = ROWS._replace(shape=(BATCH, 5, 32))
    wanted = [sum_, Type((BATCH, 5, 1, 2))]
    assert infer("attention_linear", (*given, sum_), {"heads": 2, "scale": 1.0}) == wanted


def test_what_a_norm_becomes_at_load_is_float32() -> None:
    filter, vector = Type((7, 64), "bfloat16"), Type((64,))
    assert one("norm_filter", filter, vector, to="float16") == Type((7, 64))
    assert one("norm_shift", filter, vector) == Type((7,))
    assert one("norm_shift", filter, vector, Type((7,))) == Type((7,))


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_told(said: str) -> None:
    op, inputs, attributes = MISTAKES[said]
    others = "bmm|maxpool|layernorm|linear|row_moments"
    with pytest.raises(ArgumentError, match=f"^({op}|{others})") as raised:
        infer(op, inputs, attributes)
    raised.match(said)


SIZES = st.sampled_from([1, 2, 4, BATCH])
ANY = st.one_of(
    st.none(), st.builds(Type, st.lists(SIZES, max_size=5).map(tuple), st.just("float32"))
)
VALUES = st.sampled_from([0, 1, 2, -1, 1.0, True, "NHWC", "add", (), (1, 2), (1, BATCH)])
NAMES = st.sampled_from(
    ["stride", "padding", "kernel", "groups", "epilogue", "axis", "axes", "shape", "start", "stop",
     "heads", "scale", "size", "eps", "layout", "dtype"]
)  # fmt: skip


@SEEDED
@given(st.sampled_from([*OPS]), st.lists(ANY, max_size=6), st.dictionaries(NAMES, VALUES))
def test_nothing_but_a_mistake_is_raised(
    op: str, given: list[Type | None], attributes: dict[str, Any]
) -> None:
    try:
        found = infer(op, given, attributes)
    except ArgumentError as problem:
        assert str(problem)
    else:
        assert all(isinstance(each, Type) for each in found)


def test_no_pass_is_called_as_an_op() -> None:
    assert not set(OPS) & set(PASSES) - {
        "attention",
        "batch_norm",
        "pointwise",
        "squeeze_excite",
        "foreach",
    }
