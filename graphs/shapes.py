"""The ops of a program: what each takes, and the types of what it gives.

``infer`` checks an op and computes the types of its outputs; the program, the passes and the nodes
of a MAX graph (graphs/nodes.py) all ask it. Images are [N, C, H, W], or [N, H, W, C] where an op
has ``layout="NHWC"``; filters are [F, C, R, S], C of one group; linear weights [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from maxvision.common.errors import ArgumentError
from maxvision.graphs.elementwise import (
    BETWEEN,
    ELEMENTWISE,
    MOST_ENDS,
    MOST_RESULTS,
    MOST_TERMS,
    MOST_VALUES,
    MOST_VECTORS,
    REDUCTIONS,
    activation,
    is_truth,
    joining,
    most_members,
    values_of,
)
from maxvision.graphs.types import EIGHT_BITS, FLOAT8, FLOATS, HALVES, Size, Type, product, split

MOST_AXES = 6
"""Axes of what an expression gives and a permute takes (ops/pointwise.mojo, ops/permute.mojo)."""
MOST_ROW_AXES = 4
"""Axes that rows are permuted by (ops/gather_rows.mojo)."""
MOST_DEPTH = 256
"""Channels of a head that attention's plain GPU kernel has room for in shared memory."""
MOST_BYTE_DEPTH = 128
"""Channels of a head that attention's kernels for tensor cores take, which can store 8 bits."""

Pair = int | tuple[int, int]
Window = tuple[int, int]
Sides = tuple[int, int, int, int]
"""The zeros above an image, left of it, below it and right of it."""
Padding = Pair | Sides


def infer(op: str, given: Sequence[Type | None], attributes: Mapping[str, Any]) -> list[Type]:
    """Computes the types of an op's outputs.

    Args:
        op: Its name.
        given: The types of its inputs; None for one that is absent.
        attributes: Its settings.

    Raises:
        ArgumentError: If there is no such op, or it does not take these.
    """
    if op not in OPS:
        raise ArgumentError(f"{op}: there is no such op; graphs/shapes.py lists them")
    try:
        found = OPS[op](*given, **attributes)
        return [found] if isinstance(found, Type) else list(found)
    except (TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        inputs = ", ".join(str(each) if each else "-" for each in given)
        raise ArgumentError(f"{op}: does not take {inputs} with {attributes} ({error})") from error


def pair(value: Any) -> Window:
    """Makes a pair (height, width) of one number for both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def sides(padding: Any) -> Sides:
    """Gives a padding on all four sides."""
    top, left = pair(padding)
    four = not isinstance(padding, int) and len(padding) == 4
    return (top, left, padding[2], padding[3]) if four else (top, left, top, left)


def same_padding(size: Window, kernel: int, stride: int) -> Padding:
    """Chooses the zeros with which the output has ceil(size / stride) px, as TensorFlow does.

    An odd number of them puts the one too many below and right.
    """
    totals = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in size]
    top, left = (total // 2 for total in totals)
    bottom, right = totals[0] - top, totals[1] - left
    return (top, left) if (top, left) == (bottom, right) else (top, left, bottom, right)


def windows(
    name: str,
    size: Window,
    taps: Window,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Window:
    """Counts the windows down and across an image of ``size`` px, as torch does.

    Raises:
        ArgumentError: If the geometry does not fit.
    """
    strides, pads, dilations = pair(stride), sides(padding), pair(dilation)
    if min(taps + strides + dilations) < 1 or min(pads) < 0:
        raise ArgumentError(
            f"{name}: expects kernel, stride and dilation of at least 1 and padding of at least 0"
            f" but has {taps}, {strides}, {dilations} and {padding}"
        )
    out = []
    for i, (length, tap, step, spread) in enumerate(
        zip(size, taps, strides, dilations, strict=True)
    ):
        pad, behind = pads[i], pads[i + 2]
        room = length + pad + behind - spread * (tap - 1) - 1
        if room < 0:
            raise ArgumentError(
                f"{name}: expects an input of at least {spread * (tap - 1) + 1 - pad - behind} px"
                f" but has {length}"
            )
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= length + pad:
            count -= 1  # a window has to begin inside the image or its left padding
        out.append(count)
    return out[0], out[1]


def channels_last(x: Type) -> Type:
    """Permutes [N, C, H, W] to [N, H, W, C]."""
    n, c, h, w = x.shape
    return x._replace(shape=(n, h, w, c))


def channels_first(x: Type) -> Type:
    """Permutes [N, H, W, C] to [N, C, H, W]."""
    n, h, w, c = x.shape
    return x._replace(shape=(n, c, h, w))


def _image(name: str, x: Type, layout: str = "NHWC") -> tuple[Size, int, int, int]:
    """Gives N, H, W and C of an image."""
    if len(x.shape) != 4:
        raise ArgumentError(f"{name}: expects x[N, H, W, C] but x has rank {len(x.shape)}")
    n, h, w, c = x.shape if layout == "NHWC" else channels_last(x).shape
    return n, *(_known(name, size, "x[N, H, W, C]") for size in (h, w, c))  # type: ignore[return-value]


def _known(name: str, size: Size, what: str) -> int:
    if not isinstance(size, int):
        raise ArgumentError(f"{name}: the size of {what} must be known but is {size}")
    return size


def _as(x: Type, shape: Sequence[Size], layout: str = "NHWC") -> Type:
    found = Type(tuple(shape), x.dtype)
    return found if layout == "NHWC" else channels_first(found)


def _epilogue(name: str, epilogue: str, residual: Type | None, out: Type) -> None:
    try:
        activation(epilogue)
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error}") from None
    joins = bool(joining(epilogue))
    if joins != (residual is not None):
        raise ArgumentError(
            f"{name}: epilogue {epilogue!r} expects {'a' if joins else 'no'} residual"
        )
    if residual is not None and residual.shape != out.shape:
        raise ArgumentError(
            f"{name}: residual expects the output's shape {_list(out)} but has {_list(residual)}"
        )


def _activation(name: str, epilogue: str, out: Type) -> None:
    if joining(epilogue):
        raise ArgumentError(f"{name}: expects an activation as its epilogue, not {epilogue!r}")
    _epilogue(name, epilogue, None, out)


def _list(x: Type) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


def conv2d(
    x: Type,
    filter: Type,
    bias: Type | None = None,
    residual: Type | None = None,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    epilogue: str = "none",
    layout: str = "NCHW",
    filter_layout: str = "NCHW",
    format: str = "",
    name: str = "conv2d",
) -> Type:
    """Types torch's conv2d, then act(. + residual); ``format`` is that of a sparse filter.

    The padding may differ from side to side: (above, left, below, right). A filter that is computed
    may lie as [F, R, S, C]: its layout is NHWC then.
    """
    n, h, w, c = _image(name, x, layout)
    f, filter_c, r, s = (_known(name, size, "filter") for size in fcrs(filter, filter_layout))
    if c != filter_c * groups:
        raise ArgumentError(
            f"{name}: filter w[R, S, C, F] expects C={filter_c * groups}"
            f" but input x[N, H, W, C] has C={c}"
        )
    p, q = windows(name, (h, w), (r, s), stride, padding, dilation)
    out = _as(x, (n, p, q, f), layout)
    if bias is not None:
        _vectors(name, f, bias=bias)
    _epilogue(name, epilogue, residual, out)
    return out


def fcrs(filter: Type, layout: str) -> Sequence[Size]:
    """Gives the sizes of a filter as F, C / groups, R, S; it may lie as [F, R, S, C / groups]."""
    f, *rest = filter.shape
    return filter.shape if layout == "NCHW" else (f, rest[2], *rest[:2])


def conv2d_input_grad(
    dy: Type,
    filter: Type,
    *,
    size: Pair,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    layout: str = "NCHW",
    filter_layout: str = "NCHW",
) -> Type:
    """Types the gradient of x, of ``size`` px, from that of conv2d(x, filter)."""
    name = "conv2d_input_grad"
    n, p, q, f = _image(name, dy, layout)
    filters, c, r, s = (_known(name, each, "filter") for each in fcrs(filter, filter_layout))
    if filters != f or windows(name, pair(size), (r, s), stride, padding, dilation) != (p, q):
        raise ArgumentError(
            f"{name}: dy {_list(dy)} does not fit a filter {_list(filter)} and"
            f" {list(pair(size))} px"
        )
    return _as(dy, (n, *pair(size), c * groups), layout)


def conv2d_weight_grad(
    x: Type,
    dy: Type,
    *,
    kernel: Pair,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    layout: str = "NCHW",
) -> Type:
    """Types the gradient of a convolution's filter: [F, C / groups, R, S], as torch has it.

    With ``layout="NHWC"`` images are so, and the result is [F, R, S, C / groups].
    """
    name = "conv2d_weight_grad"
    n, h, w, c = _image(name, x, layout)
    rows, p, q, f = _image(name, dy, layout)
    if c % groups or f % groups:
        raise ArgumentError(
            f"{name}: expects C and F of a multiple of {groups} groups but has {c} and {f}"
        )
    r, s = pair(kernel)
    out = windows(name, (h, w), (r, s), stride, padding, dilation)
    if n != rows or out != (p, q):
        raise ArgumentError(
            f"{name}: expects dy[N, P, Q, F] of {n} images of {list(out)} px"
            f" but it has {rows} of {[p, q]} px"
        )
    return _as(x, (f, r, s, c // groups), layout)


def conv2d_shortcut(
    x: Type,
    filter: Type,
    bias: Type | None,
    source: Type,
    shortcut: Type,
    shortcut_bias: Type | None,
    *,
    padding: Pair = 0,
    stride: Pair = 1,
) -> Type:
    """Types relu(conv2d(x, filter, padding) + conv2d(source, shortcut, stride)), in NHWC."""
    name, f = "conv2d_shortcut", filter.shape[0]
    if shortcut.shape[2:] != (1, 1) or shortcut.shape[0] != f:
        raise ArgumentError(
            f"{name}: expects a shortcut [1, 1, C, {f}] but it is {_rscf(shortcut)}"
        )
    out = conv2d(x, filter, bias, padding=padding, layout="NHWC", name=name)
    other = conv2d(source, shortcut, shortcut_bias, stride=stride, layout="NHWC", name=name)
    if out.shape[1:3] != other.shape[1:3]:
        raise ArgumentError(
            f"{name}: expects a shortcut of {list(out.shape[1:3])} px"
            f" but it gives {list(other.shape[1:3])}"
        )
    return out


def _rscf(filter: Type) -> list[Size]:
    f, c, r, s = filter.shape
    return [r, s, c, f]


def conv2d_chain(
    x: Type,
    filter: Type,
    bias: Type | None,
    residual: Type,
    following: Type,
    following_bias: Type | None,
) -> tuple[Type, Type]:
    """Types h = relu(conv2d(x, filter) + residual) and relu(conv2d(h, following)), 1 x 1, NHWC."""
    name, k = "conv2d_chain", filter.shape[0]
    if following.shape[1] != k:
        raise ArgumentError(
            f"{name}: expects a following filter [1, 1, {k}, F] but it is {_rscf(following)}"
        )
    h = conv2d(x, filter, bias, residual, epilogue="add_relu", layout="NHWC", name=name)
    return h, conv2d(h, following, following_bias, layout="NHWC", name=name)


def conv2d_shortcut_chain(
    x: Type,
    filter: Type,
    bias: Type | None,
    source: Type,
    shortcut: Type,
    shortcut_bias: Type | None,
    following: Type,
    following_bias: Type | None,
) -> tuple[Type, Type]:
    """Types h = relu(conv2d(x, filter) + conv2d(source, shortcut)) and relu(conv2d(h, following)).

    All 1 x 1, in NHWC.
    """
    h = conv2d_shortcut(x, filter, bias, source, shortcut, shortcut_bias)
    name = "conv2d_shortcut_chain"
    return h, conv2d(h, following, following_bias, layout="NHWC", name=name)


def conv2d_mean(
    x: Type,
    filter: Type,
    bias: Type | None = None,
    residual: Type | None = None,
    *,
    epilogue: str = "none",
    keepdim: bool = True,
) -> Type:
    """Types the mean of each image of act(conv2d(x, filter) + residual), 1 x 1, in NHWC."""
    name = "conv2d_mean"
    if filter.shape[2:] != (1, 1):
        raise ArgumentError(f"{name}: expects a filter [1, 1, C, F] but it is {_rscf(filter)}")
    y = conv2d(x, filter, bias, residual, epilogue=epilogue, layout="NHWC", name=name)
    return reduction(y, axes=(1, 2), keepdim=keepdim)[0]


def linear(
    x: Type,
    weight: Type,
    bias: Type | None = None,
    residual: Type | None = None,
    *,
    epilogue: str = "none",
    format: str = "",
) -> Type:
    """Types torch's linear of x[..., C], then act(. + residual)."""
    c = _known("linear", x.shape[-1], "C of x[..., C]")
    f, weight_c = weight.shape
    if c != weight_c:
        raise ArgumentError(
            f"linear: weight [C, F] expects C={weight_c} but input x[..., C] has C={c}"
        )
    out = Type((*x.shape[:-1], f), x.dtype)
    if bias is not None:
        _vectors("linear", f, bias=bias)
    _epilogue("linear", epilogue, residual, out)
    return out


MOMENTS = 32
"""Columns of a row whose moments are together (ops/hopper/moments.mojo)."""


def row_moments(x: Type) -> Type:
    """Types the sums of each 32 columns of the rows of x[..., C], and of their squares."""
    c = _known("row_moments", x.shape[-1], "C of x[..., C]")
    if c % MOMENTS:
        raise ArgumentError(f"row_moments: expects rows of a multiple of {MOMENTS} but has {c}")
    return Type((*x.shape[:-1], c // MOMENTS, 2), "float32")


def linear_moments(x: Type, weight: Type, bias: Type | None, residual: Type) -> tuple[Type, Type]:
    """Types ``linear`` of x[..., C] + residual, and ``row_moments`` of that."""
    out = linear(x, weight, bias, residual, epilogue="add")
    return out, row_moments(out)


def _moments(name: str, x: Type, moments: Type) -> None:
    if moments != row_moments(x):
        raise ArgumentError(
            f"{name}: expects moments [..., C / {MOMENTS}, 2] of {_list(x)}"
            f" but has {_list(moments)}"
        )


def normed_linear(
    x: Type,
    moments: Type,
    weight: Type,
    bias: Type | None,
    *,
    epilogue: str = "none",
    eps: float = 1e-5,
) -> Type:
    """Types act(linear(layer_norm(x))), from x[..., C] and the moments of its rows."""
    out = linear(x, weight, bias, epilogue=epilogue)
    _moments("normed_linear", x, moments)
    return out


def token_linear(
    x: Type,
    weight: Type,
    bias: Type | None = None,
    residual: Type | None = None,
    *,
    epilogue: str = "none",
) -> Type:
    """Types torch's linear along the tokens of x[N, T, C], then act(. + residual): [N, F, C].

    Rows of the weight [F, T] are filled up with zeros to a multiple of 8.
    """
    name = "token_linear"
    if len(x.shape) != 3:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has {_list(x)}")
    n, tokens, c = x.shape
    t, (f, k) = _known(name, tokens, "T of x[N, T, C]"), weight.shape
    if k != t + -t % 8:
        raise ArgumentError(
            f"{name}: expects a weight [F, {t + -t % 8}] for {t} tokens but has {_list(weight)}"
        )
    if _known(name, c, "C of x[N, T, C]") % 8:
        raise ArgumentError(f"{name}: expects channels of a multiple of 8 but has {c}")
    out = Type((n, f, c), x.dtype)
    if bias is not None:
        _vectors(name, f, bias=bias)
    _epilogue(name, epilogue, residual, out)
    return out


def quantized(name: str, op: Callable[..., Type]) -> Callable[..., Type]:
    """Types a product of x in uint8, which stands for scale * (x + low), or in float8_e4m3fn.

    So do the residual and the result where ``dtype`` is that; a wider float stands for itself.
    There ``rounded_scale`` and ``rounded_low`` are of the integers to which the product is rounded
    before the residual is added, unless the former is 0. ``steps`` are what 1 of each filter stands
    for, as in ``fake_quantize_filter``.
    """

    def typed(
        x: Type,
        filter: Type,
        bias: Type | None = None,
        residual: Type | None = None,
        steps: Type | None = None,
        *,
        scale: float,
        low: float = 0.0,
        residual_scale: float = 1.0,
        residual_low: float = 0.0,
        result_scale: float = 1.0,
        result_low: float = 0.0,
        rounded_scale: float = 0.0,
        rounded_low: float = 0.0,
        dtype: str = "float32",
        **rest: Any,
    ) -> Type:
        if x.dtype not in EIGHT_BITS:
            raise ArgumentError(f"{name}: expects x in uint8 or {FLOAT8} but has {x.dtype}")
        if dtype not in FLOATS and dtype != x.dtype:
            raise ArgumentError(f"{name}: gives floats or {x.dtype}, not {dtype}")
        if residual is not None and residual.dtype != dtype:
            raise ArgumentError(f"{name}: expects a residual in {dtype} but has {residual.dtype}")
        if rounded_scale and (residual is None or dtype != "uint8"):
            raise ArgumentError(f"{name}: rounds what a residual is added to in uint8 only")
        _steps(name, filter.shape[0], steps)
        return op(x, filter, bias, residual, **rest)._replace(dtype=dtype)

    return typed


def _steps(name: str, f: Size, *found: Type | None) -> None:
    """Refuses steps that are not one for each of F filters; they may be left out."""
    for steps in found:
        if steps is not None:
            _vectors(name, f, steps=steps)


def _of_bytes(name: str, x: Type, other: Type) -> None:
    """Refuses inputs that are not of the same 8 bits."""
    if x.dtype not in EIGHT_BITS or other.dtype != x.dtype:
        raise ArgumentError(
            f"{name}: expects both inputs in uint8, or in {FLOAT8}, but has {x.dtype} and"
            f" {other.dtype}"
        )


quantized_conv2d = quantized(
    "quantized_conv2d", partial(conv2d, layout="NHWC", name="quantized_conv2d")
)
quantized_linear = quantized("quantized_linear", linear)


def quantized_conv2d_chain(
    x: Type,
    filter: Type,
    bias: Type | None,
    residual: Type,
    following: Type,
    following_bias: Type | None,
    steps: Type | None = None,
    following_steps: Type | None = None,
    *,
    scale: float,
    residual_scale: float,
    result_scale: float,
    next_scale: float,
    low: float = 0.0,
    residual_low: float = 0.0,
    result_low: float = 0.0,
    next_low: float = 0.0,
) -> tuple[Type, Type]:
    """Types h = relu(conv2d(x, filter) + residual) and relu(conv2d(h, following)) of 8 bits, 1 x 1.

    Numbers are as in ``quantized``; images in NHWC.
    """
    name = "quantized_conv2d_chain"
    _of_bytes(name, x, residual)
    _steps(name, filter.shape[0], steps)
    _steps(name, following.shape[0], following_steps)
    return conv2d_chain(x, filter, bias, residual, following, following_bias)


def quantized_conv2d_shortcut(
    x: Type,
    filter: Type,
    bias: Type | None,
    source: Type,
    shortcut: Type,
    shortcut_bias: Type | None,
    steps: Type | None = None,
    shortcut_steps: Type | None = None,
    *,
    scale: float,
    source_scale: float,
    result_scale: float,
    low: float = 0.0,
    source_low: float = 0.0,
    result_low: float = 0.0,
    padding: Pair = 0,
    stride: Pair = 1,
    epilogue: str = "none",
) -> Type:
    """Types act(conv2d(x, filter, padding) + conv2d(source, shortcut, stride)) of 8 bits, in NHWC.

    Numbers are as in ``quantized``.
    """
    name = "quantized_conv2d_shortcut"
    _of_bytes(name, x, source)
    _steps(name, filter.shape[0], steps, shortcut_steps)
    both = x, filter, bias, source, shortcut, shortcut_bias
    out = conv2d_shortcut(*both, padding=padding, stride=stride)
    _epilogue(name, epilogue, None, out)
    return out


def quantized_conv2d_shortcut_chain(
    x: Type,
    filter: Type,
    bias: Type | None,
    source: Type,
    shortcut: Type,
    shortcut_bias: Type | None,
    following: Type,
    following_bias: Type | None,
    steps: Type | None = None,
    shortcut_steps: Type | None = None,
    following_steps: Type | None = None,
    *,
    scale: float,
    source_scale: float,
    result_scale: float,
    next_scale: float,
    low: float = 0.0,
    source_low: float = 0.0,
    result_low: float = 0.0,
    next_low: float = 0.0,
) -> tuple[Type, Type]:
    """Types h = relu(conv2d(x, filter) + conv2d(source, shortcut)) and relu(conv2d(h, following)).

    All in 8 bits, 1 x 1, as ``quantized_conv2d_shortcut`` and ``quantized_conv2d_chain``.
    """
    first = x, filter, bias, source, shortcut, shortcut_bias, steps, shortcut_steps
    h = quantized_conv2d_shortcut(
        *first, scale=scale, source_scale=source_scale, result_scale=result_scale
    )
    name, f = "quantized_conv2d_shortcut_chain", following.shape[0]
    _steps(name, f, following_steps)
    return h, conv2d(h, following, following_bias, layout="NHWC", name=name)


def qkv_linear(*given: Type | None) -> tuple[Type, ...]:
    """Types ``linear`` thrice: tokens of query, key and value, then the weight and bias of each."""
    name, tokens, weights = "qkv_linear", given[:3], given[3:9:2]
    assert weights[0] is not None
    f, c = weights[0].shape
    for y, weight in zip(tokens, weights, strict=True):
        assert y is not None and weight is not None
        if len(y.shape) != 3 or _known(name, y.shape[2], "C of tokens[N, T, C]") != c:
            raise ArgumentError(f"{name}: expects tokens [N, T, {c}] but one is {_list(y)}")
        if weight.shape != (f, c):
            raise ArgumentError(
                f"{name}: expects weights [{c}, {f}] but one is {list(weight.shape[::-1])}"
            )
    _, k, v = tokens
    assert k is not None and v is not None
    if k.shape != v.shape:
        raise ArgumentError(
            f"{name}: expects as many keys as values but has {k.shape[1]} and {v.shape[1]}"
        )
    return tuple(Type((*y.shape[:2], f), y.dtype) for y in tokens if y is not None)


def quantized_qkv_linear(
    *given: Type | None,
    q_scale: float,
    k_scale: float,
    v_scale: float,
    q_low: float = 0.0,
    k_low: float = 0.0,
    v_low: float = 0.0,
    dtype: str = "float32",
) -> tuple[Type, ...]:
    """Types ``quantized_linear`` thrice: as ``qkv_linear``, then the steps of each."""
    name, tokens, steps = "quantized_qkv_linear", given[:3], given[9:12]
    found = qkv_linear(*given[:9])
    for x in tokens[1:]:
        assert x is not None and tokens[0] is not None
        _of_bytes(name, tokens[0], x)
    if dtype not in FLOATS:
        raise ArgumentError(f"{name}: gives floats, not {dtype}")
    _steps(name, found[0].shape[2], *steps)
    return tuple(y._replace(dtype=dtype) for y in found)


def matmul(
    a: Type,
    b: Type,
    bias: Type | None = None,
    residual: Type | None = None,
    *,
    alpha: float = 1.0,
    transpose_b: bool = False,
    epilogue: str = "none",
) -> Type:
    """Types act(alpha * a @ b + bias + residual) for a[..., M, K] and b[..., K, N]."""
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ArgumentError(
            f"bmm: a[..., M, K] and b expect rank 2 or more but have {len(a.shape)} and"
            f" {len(b.shape)}"
        )
    k = a.shape[-1]
    b_k, b_n = b.shape[-1 if transpose_b else -2], b.shape[-2 if transpose_b else -1]
    n = _known("bmm", b_n, "N of b")
    if b_k != k:
        raise ArgumentError(f"bmm: a[..., M, K] has K={k} but b has K={b_k}")
    shared = all(size == 1 for size in b.shape[:-2])
    if not shared and b.shape[:-2] != a.shape[:-2]:
        raise ArgumentError(
            f"bmm: b expects the batch {list(a.shape[:-2])} of a, or 1,"
            f" but has {list(b.shape[:-2])}"
        )
    out = Type((*a.shape[:-1], n), a.dtype)
    if bias is not None:
        _vectors("bmm", n, bias=bias)
    _epilogue("bmm", epilogue, residual, out)
    return out


def batch_norm(
    x: Type,
    weight: Type,
    bias: Type,
    mean: Type,
    var: Type,
    *,
    eps: float = 1e-5,
    layout: str = "NCHW",
) -> Type:
    """Types (x - mean) / sqrt(var + eps) * weight + bias, by channel."""
    *_, c = _image("batch_norm", x, layout)
    _vectors("batch_norm", c, weight=weight, bias=bias, mean=mean, var=var)
    return x


def max_pool2d(x: Type, *, name: str = "maxpool", **window: Any) -> Type:
    """Types torch's max_pool2d; so does ``avg_pool2d`` torch's."""
    return _pool(name, x, **window)


def avg_pool2d(
    x: Type, *, kernel: Pair | None = None, count_include_pad: bool = True, **window: Any
) -> Type:
    """Types torch's avg_pool2d; without a kernel it is the whole image."""
    if kernel is None:
        _, h, w, _ = _image("avgpool", x, window.get("layout", "NCHW"))
        kernel = (h, w)
    return _pool("avgpool", x, kernel=kernel, **window)


def max_pool2d_grad(x: Type, dy: Type, *, layout: str = "NCHW", **window: Any) -> Type:
    """Types the gradient of x, from that of max_pool2d(x)."""
    name = "max_pool2d_grad"
    _gradient(name, dy, _pool(name, x, layout=layout, **window))
    return x


def avg_pool2d_grad(
    dy: Type,
    *,
    size: Pair,
    count_include_pad: bool = True,
    layout: str = "NCHW",
    **window: Any,
) -> Type:
    """Types the gradient of x, of ``size`` px, from that of avg_pool2d(x)."""
    name = "avg_pool2d_grad"
    n, _, _, c = _image(name, dy, layout)
    x = _as(dy, (n, *pair(size), c), layout)
    _gradient(name, dy, _pool(name, x, layout=layout, **window))
    return x


def _gradient(name: str, dy: Type, y: Type) -> None:
    if dy.shape != y.shape:
        raise ArgumentError(f"{name}: expects dy of the shape {_list(y)} but it has {_list(dy)}")


def _pool(
    name: str,
    x: Type,
    *,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    layout: str = "NCHW",
) -> Type:
    n, h, w, c = _image(name, x, layout)
    taps = pair(kernel)
    for side, pad in zip(taps, pair(padding), strict=True):
        if 2 * pad > side:
            raise ArgumentError(
                f"{name}: padding must be at most half the kernel {side} but is {pad}"
            )
    step = kernel if stride is None else stride
    p, q = windows(name, (h, w), taps, step, padding, dilation, ceil_mode)
    return _as(x, (n, p, q, c), layout)


def unary(x: Type, **_: Any) -> Type:
    """Types what changes no shape."""
    return x


def broadcast(name: str, *given: Type) -> tuple[Size, ...]:
    """Gives the shape that several values broadcast to, as numpy does."""
    shape: list[Size] = []
    longest = max(len(x.shape) for x in given)
    sides = [(1,) * (longest - len(x.shape)) + x.shape for x in given]
    for sizes in zip(*sides, strict=True):
        found = {size for size in sizes if size != 1}
        if len(found) > 1:
            shapes = ", ".join(map(str, given))
            raise ArgumentError(f"{name}: the shapes {shapes} do not broadcast")
        shape.append(found.pop() if found else 1)
    return tuple(shape)


def elementwise(name: str) -> Callable[..., Type]:
    """Types an op of graphs/elementwise.py."""
    row = ELEMENTWISE[name]

    def typed(*given: Type, other: float | None = None, **settings: float) -> Type:
        if len(given) + (other is not None) != row.values:
            raise TypeError(f"it takes {row.values} values")
        if unknown := set(settings) - set(row.settings or {}):
            raise TypeError(f"it has no setting {', '.join(sorted(unknown))}")
        dtype = "bool" if row.truth else _narrower(*given[name == "where" :])
        return Type(broadcast(name, *given), dtype)

    return typed


def fake_quantize(x: Type, *, to: str = "", **settings: float) -> Type:
    """Types x rounded to integers times a scale, or ``to`` float8_e4m3fn times one."""
    if to not in ("", FLOAT8) or (to and settings.keys() != {"scale"}):
        raise ArgumentError(f"fake_quantize: rounds to integers, or to {FLOAT8} by a scale alone")
    return elementwise("fake_quantize")(x, **settings)


def pointwise(*given: Type, expression: str, dtype: str = "") -> Type:
    """Types an expression of values that broadcast (graphs/elementwise.py), of any ``dtype``."""
    count = values_of(expression)
    if not count == len(given) <= MOST_VALUES:
        raise ArgumentError(
            f"pointwise: expects the {count} values of {expression!r}, at most {MOST_VALUES},"
            f" but has {len(given)}"
        )
    shape = broadcast("pointwise", *given)
    if len(shape) > MOST_AXES:
        raise ArgumentError(f"pointwise: expects at most {MOST_AXES} axes but has {len(shape)}")
    numbers = [each for each in given if each.dtype != "bool"]
    if not numbers:
        raise ArgumentError(f"pointwise: {expression!r} expects a value that is no mask")
    return Type(shape, "bool" if is_truth(expression) else dtype or _narrower(*numbers))


def foreach(*given: Type, expression: str, dtype: str = "") -> list[Type]:
    """Types an expression of each member; the values of one, of one shape, are behind another's."""
    count = values_of(expression)
    if len(given) % count or not 0 < len(given) // count <= most_members(count):
        raise ArgumentError(
            f"foreach: expects the {count} values of {expression!r} of each of 1 to"
            f" {most_members(count)} members but has {len(given)} values"
        )
    members = [given[i : i + count] for i in range(0, len(given), count)]
    found = [pointwise(*values, expression=expression, dtype=dtype) for values in members]
    for values, result in zip(members, found, strict=True):
        if any(each.shape != result.shape for each in values):
            raise ArgumentError(
                f"foreach: a member's values have one shape but are {', '.join(map(str, values))}"
            )
        if any(a.dtype != b.dtype for a, b in zip(values, members[0], strict=True)):
            raise ArgumentError(
                f"foreach: expects the dtypes of {', '.join(map(str, members[0]))} but has"
                f" {', '.join(map(str, values))}"
            )
    return found


def layer_norm(x: Type, weight: Type, bias: Type, *, eps: float = 1e-5, dtype: str = "") -> Type:
    """Types torch's layer_norm over the last axis of x[..., C], of any ``dtype``."""
    _norm("layernorm", x.shape[-1], weight, bias)
    return Type(x.shape, dtype or x.dtype)


def softmax_grad(dy: Type, y: Type) -> Type:
    """Types the gradient of softmax(x) by x from that of y[..., C], the softmax."""
    _gradient("softmax_grad", dy, y)
    return y


def layer_norm_grad(
    dy: Type, x: Type, weight: Type | None = None, *, eps: float = 1e-5, dtype: str = ""
) -> list[Type]:
    """Types the gradients of layer_norm(x) by x, of any ``dtype``, by its weight and its bias."""
    name = "layer_norm_grad"
    if not x.shape:
        raise ArgumentError(f"{name}: expects x[..., C] but x is one number")
    _gradient(name, dy, x)
    c = _known(name, x.shape[-1], "C of x[..., C]")
    if weight is not None:
        _vectors(name, c, " of x[..., C]", weight=weight)
    vector = Type((c,), wide(x.dtype))
    return [Type(x.shape, dtype or x.dtype), vector, vector]


def rms_norm(x: Type, weight: Type, *, eps: float = 1e-5) -> Type:
    """Types torch's rms_norm over the last axis of x[..., C]."""
    _vectors("rms_norm", x.shape[-1], " of x[..., C]", weight=weight)
    return x


def group_norm(
    x: Type,
    weight: Type,
    bias: Type,
    *,
    groups: int,
    eps: float = 1e-5,
    epilogue: str = "none",
    layout: str = "NCHW",
) -> Type:
    """Types torch's group_norm of x[N, C, ...]: each group of channels by its own mean.

    With ``layout="NHWC"`` x is [N, ..., C].
    """
    if len(x.shape) < 2:
        raise ArgumentError(f"group_norm: expects x[N, C, ...] but x has {_list(x)}")
    c = _known("group_norm", x.shape[-1 if layout == "NHWC" else 1], "C of x[N, C, ...]")
    _vectors("group_norm", c, " of x[N, C, ...]", weight=weight, bias=bias)
    if groups < 1 or c % groups:
        raise ArgumentError(f"group_norm: expects groups that divide C={c} but has {groups}")
    _activation("group_norm", epilogue, x)
    return x


def layernorm_first(x: Type, weight: Type, bias: Type, *, eps: float = 1e-5) -> Type:
    """Types the layer norm of the first token of each image of x[N, T, C]: [N, C]."""
    if len(x.shape) != 3 or x.shape[1] == 0:
        raise ArgumentError(f"layernorm_first: expects tokens x[N, T, C] but x has {_list(x)}")
    _norm("layernorm_first", x.shape[2], weight, bias)
    return Type((x.shape[0], x.shape[2]), x.dtype)


def gather_rows(
    x: Type,
    onto: Type | None = None,
    weight: Type | None = None,
    bias: Type | None = None,
    *,
    size: Window,
    shifts: Window,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    rolls_first: bool,
    eps: float = 1e-5,
) -> tuple[Type, ...]:
    """Types rows of x[N, R, C] in another order, what they are added to, and the layer norm of it.

    Args:
        x: The rows.
        onto: What they are added to, if they are.
        weight: Of the norm, if there is one.
        bias: Of the norm.
        size: Rows down and across the image that is rolled: R in all.
        shifts: How far it is.
        shape: The axes that the rows are permuted by: R in all.
        axes: How they are.
        rolls_first: Whether the permute comes behind the roll.
        eps: Added to the variance.

    Returns:
        The result; before it the sum, if that is normed.
    """
    name = "gather_rows"
    if len(x.shape) != 3:
        raise ArgumentError(f"{name}: expects rows x[N, R, C] but x has {_list(x)}")
    count = x.shape[1]
    if not count == math.prod(size) == math.prod(shape):
        raise ArgumentError(f"{name}: {list(size)} and {list(shape)} are not {count} rows")
    if sorted(axes) != list(range(len(shape))) or len(shape) > MOST_ROW_AXES:
        raise ArgumentError(f"{name}: axes {axes} must name each of {list(shape)}, 4 at most")
    if onto is not None and onto != x:
        raise ArgumentError(f"{name}: expects to add to {_list(x)} but has {_list(onto)}")
    if weight is not None and bias is not None:
        _norm(name, x.shape[2], weight, bias)
    return (x, x) if onto and weight else (x,)


def layernorm_mlp(
    x: Type,
    moments: Type,
    first: Type,
    first_bias: Type | None,
    second: Type,
    second_bias: Type | None,
    *,
    eps: float = 1e-5,
) -> Type:
    """Types x + linear(gelu(linear(layer_norm(x)))) of tokens x[N, T, C] and their moments."""
    name = "layernorm_mlp"
    if len(x.shape) != 3:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has {_list(x)}")
    c = _known(name, x.shape[2], "C of x[N, T, C]")
    k = first.shape[0]
    if first.shape != (k, c) or second.shape != (c, k):
        raise ArgumentError(
            f"{name}: expects weights [{c}, K] and [K, {c}]"
            f" but has {list(first.shape[::-1])} and {list(second.shape[::-1])}"
        )
    _moments(name, x, moments)
    return x


def squeeze_excite(
    x: Type,
    squeeze: Type,
    squeeze_bias: Type | None,
    excite: Type,
    excite_bias: Type | None,
    residual: Type | None = None,
    *,
    activation: str,
    gate: str,
    epilogue: str = "none",
) -> Type:
    """Types x * gate(excite(activation(squeeze(mean of x)))) of images x[N, H, W, C].

    Squeeze and excite are products, by weights [out, in] or [out, in, 1, 1].
    """
    name = "squeeze_excite"
    *_, c = _image(name, x)
    k = squeeze.shape[0]
    sides = [weight.shape + (1,) * (4 - len(weight.shape)) for weight in (squeeze, excite)]
    if sides != [(k, c, 1, 1), (c, k, 1, 1)]:
        raise ArgumentError(
            f"{name}: expects weights [{c}, K] and [K, {c}] of x[N, H, W, C]"
            f" but has {list(squeeze.shape[1::-1])} and {list(excite.shape[1::-1])}"
        )
    for size, bias in ((k, squeeze_bias), (c, excite_bias)):
        if bias is not None:
            _vectors(name, size, bias=bias)
    _activation(name, activation, x)
    _activation(name, gate, x)
    _epilogue(name, epilogue, residual, x)
    return x


def _vectors(name: str, size: Size, of: str = "", **parts: Type) -> None:
    """Checks that each part is a vector; ``of`` says where its size comes from."""
    for part, value in parts.items():
        if value.shape != (size,):
            raise ArgumentError(
                f"{name}: {part} expects the shape [{size}]{of} but has {_list(value)}"
            )


def _norm(name: str, c: Size, weight: Type, bias: Type) -> None:
    _vectors(name, c, " of x[..., C]", weight=weight, bias=bias)


def attention(
    q: Type,
    k: Type,
    v: Type,
    bias: Type | None = None,
    *,
    heads: int,
    scale: float,
    causal: bool = False,
    logsumexp: bool = False,
    dtype: str = "",
    result_scale: float = 1.0,
    result_low: float = 0.0,
) -> list[Type]:
    """Types attention from q[N, T, C] to k and v[N, S, C], the heads side by side in C.

    The bias is what ``attention_bias`` gives. With ``logsumexp`` a second output is the logarithm
    of the sum of each query's exponentials [N, heads, T], -inf for a query that sees no key. With a
    ``dtype`` of 8 bits the result is stored so, as in ``quantized``; see ``attends_to_bytes``.
    """
    for name, value in (("q[N, T, C]", q), ("k[N, S, C]", k), ("v[N, S, C]", v)):
        if len(value.shape) != 3:
            raise ArgumentError(f"attention: expects {name} but it has rank {len(value.shape)}")
    n = q.shape[0]
    c = _known("attention", q.shape[2], "C of q[N, T, C]")
    s = _known("attention", k.shape[1], "S of k[N, S, C]")
    for name, value in (("k", k), ("v", v)):
        if value.shape != (n, s, c):
            raise ArgumentError(
                f"attention: {name} expects the shape {_list(Type((n, s, c)))} of q's N, k's S and"
                f" q's C but has {_list(value)}"
            )
    if heads < 1 or c % heads:
        raise ArgumentError(f"attention: expects heads that divide C={c} but has {heads}")
    if s < 1:
        raise ArgumentError("attention: expects at least one key but has S=0")
    if c // heads > MOST_DEPTH:
        raise ArgumentError(
            f"attention: expects heads of at most {MOST_DEPTH} channels but they have {c // heads}"
        )
    if not scale >= 0:
        raise ArgumentError(f"attention: expects a scale of at least 0 but it is {scale}")
    if bias is not None:
        t = _known("attention", q.shape[1], "T of q[N, T, C]")
        rows = {1, t, heads * t}
        fits = len(bias.shape) == 3 and bias.shape[1] in rows and bias.shape[2] == s + s % 2
        if not fits or not repeats(bias.shape[0], n):
            raise ArgumentError(
                f"attention: expects a bias [P, rows, {s + s % 2}] with P that divides N={n} and"
                f" {', '.join(map(str, sorted(rows)))} rows but it has {_list(bias)}"
            )
    _stored("attention", dtype, result_scale, result_low)
    if dtype and logsumexp:
        raise ArgumentError(f"attention: with logsumexp the result is in q's dtype, not {dtype}")
    if dtype and not attends_to_bytes(q, heads):
        raise ArgumentError(
            f"attention: gives {dtype} of 16 bits and heads of 4, 8, ... {MOST_BYTE_DEPTH} channels"
            f" but q is {q.dtype} and heads have {c // heads}"
        )
    y = q._replace(dtype=dtype or q.dtype)
    return [y, Type((n, heads, q.shape[1]), wide(q.dtype))] if logsumexp else [y]


def attends_to_bytes(q: Type, heads: int) -> bool:
    """Tells whether Hopper has a kernel of ``attention`` that stores its result in 8 bits."""
    depth = _known("attention", q.shape[2], "C of q[N, T, C]") // heads
    return q.dtype in HALVES and depth % 4 == 0 and depth <= MOST_BYTE_DEPTH


def _stored(name: str, dtype: str, scale: float, low: float) -> None:
    """Refuses a result whose numbers are not those of 8 bits, or have another dtype.

    ``Grid`` and ``Float8`` of graphs/quantize.py say what ``scale`` and ``low`` are.
    """
    if dtype not in ("", *EIGHT_BITS):
        raise ArgumentError(f"{name}: gives q's dtype, or {' or '.join(EIGHT_BITS)}, not {dtype}")
    if not dtype and (scale, low) != (1, 0):
        raise ArgumentError(f"{name}: only a result in 8 bits has a scale or a least number")
    if not 0 < scale < math.inf:
        raise ArgumentError(f"{name}: expects a result_scale above 0 but it is {scale}")
    least = -255 if dtype == "uint8" else 0
    if not least <= low <= 0 or low % 1:
        raise ArgumentError(
            f"{name}: expects a whole result_low from {least} to 0 of {dtype} but it is {low}"
        )


def attention_linear(
    q: Type,
    k: Type,
    v: Type,
    weight: Type,
    bias: Type | None,
    residual: Type,
    *,
    heads: int,
    scale: float,
) -> tuple[Type, Type]:
    """Types ``linear_moments`` of what ``attention`` of q, k and v gives."""
    (attended,) = attention(q, k, v, heads=heads, scale=scale)
    return linear_moments(attended, weight, bias, residual)


def attention_grad(
    q: Type,
    k: Type,
    v: Type,
    y: Type,
    dy: Type,
    logsumexp: Type,
    bias: Type | None = None,
    **attributes: Any,
) -> list[Type]:
    """Types the gradients of ``attention`` by q, k and v, of its outputs and the gradient of y.

    A query that sees no key has none, whatever y is.
    """
    y_type, sums = attention(q, k, v, bias, logsumexp=True, **attributes)
    for name, value, wanted in (
        ("y", y, y_type),
        ("dy", dy, y_type),
        ("logsumexp", logsumexp, sums),
    ):
        if value.shape != wanted.shape:
            raise ArgumentError(
                f"attention_grad: {name} expects the shape {_list(wanted)} but has {_list(value)}"
            )
    return [q, k, v]


def repeats(period: Size, size: Size) -> bool:
    """Tells whether something of a known ``period``, or of that size, comes to ``size`` again."""
    if isinstance(period, int):
        return period > 0 and split(size)[0] % period == 0
    return period == size


def attention_bias(mask: Type, *, heads: int, queries: int, keys: int) -> Type:
    """Types what the kernels of attention add to scores, for a mask that broadcasts to them.

    It is [P, heads * T, S], [P, T, S] for all heads, or [P, 1, S] for all queries too, S of an even
    length: image n has rows n % P. A mask is added, or true for the keys that are seen.
    """
    name = "attention_bias"
    if len(mask.shape) > 4:
        raise ArgumentError(f"{name}: expects a mask of rank 4 at most but it is {_list(mask)}")
    p, h, t, s = ((1,) * 4 + mask.shape)[-4:]
    if h not in (1, heads) or t not in (1, queries) or s not in (1, keys):
        raise ArgumentError(
            f"{name}: expects a mask that broadcasts to [N, {heads}, {queries}, {keys}]"
            f" but it is {_list(mask)}"
        )
    rows = heads * queries if h != 1 else queries if t != 1 else 1
    return Type((p, rows, keys + keys % 2), "float32" if mask.dtype == "bool" else mask.dtype)


def scaled_dot_product_attention(
    q: Type, k: Type, v: Type, mask: Type | None = None, *, scale: float, causal: bool = False
) -> Type:
    """Types torch's attention of q[N, heads, T, D], k[N, heads, S, D] and v[N, heads, S, E].

    A mask is added to the scores, or true for the keys that are seen. It broadcasts to
    [N, heads, T, S]; its first size may also divide N, as that of windows does: then image n has
    mask n % P.
    """
    name = "scaled_dot_product_attention"
    fits = len(q.shape) == len(k.shape) == len(v.shape) == 4
    if not fits or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise ArgumentError(
            f"{name}: expects q[N, heads, T, D], k[N, heads, S, D] and v[N, heads, S, E] but has"
            f" {_list(q)}, {_list(k)} and {_list(v)}"
        )
    if mask is not None:
        scores = (*q.shape[:3], k.shape[2])
        sides = ((1,) * 4 + mask.shape)[-4:]
        broadcasts = all(a in (1, b) for a, b in zip(sides[1:], scores[1:], strict=True))
        if len(mask.shape) > 4 or not broadcasts or not repeats(sides[0], scores[0]):
            raise ArgumentError(
                f"{name}: expects a mask that broadcasts to {_list(Type(scores))}, or repeats along"
                f" the first axis, but it is {_list(mask)}"
            )
    return Type((*q.shape[:3], v.shape[3]), q.dtype)


def normalize(
    pixels: Type, mean: Type, scale: Type, *, dtype: str = "float32", channels: int = 0
) -> Type:
    """Types (pixels[N, H, W, C] - mean[C]) * scale[C] as ``dtype``.

    Of uint8 there may be more ``channels``.
    """
    *rest, c = _image("normalize", pixels)
    _levels("normalize", c, mean, scale)
    if channels and (dtype != "uint8" or channels < _known("normalize", c, "C of pixels")):
        raise ArgumentError(f"normalize: {channels} channels of {dtype} do not hold {c}")
    return Type((*rest, channels or c), dtype)


def bytes_mean(mean: Type, scale: Type, *, step: float, low: float) -> Type:
    """Types the mean by which ``normalize`` gives levels: mean + low * step / scale."""
    return mean


def bytes_scale(scale: Type, *, step: float) -> Type:
    """Types the scale by which it does: scale / step."""
    return scale


def _levels(name: str, c: Size, mean: Type, scale: Type) -> None:
    _vectors(name, c, " of pixels[N, H, W, C]", mean=mean, scale=scale)


def stem(
    name: str,
    x: Type,
    mean: Type | None,
    scale: Type | None,
    filter: Type,
    bias: Type | None,
    *,
    stride: int,
    padding: int,
    dtype: str = "float32",
) -> Type:
    """Types conv2d(normalize(x)) of pixels x[N, H, W, C]: uint8 levels, or floats as they are."""
    if (mean is not None) != (x.dtype == "uint8"):
        expects = "mean and scale of" if mean is None else "no levels with"
        raise ArgumentError(f"{name}: expects {expects} {x.dtype} pixels")
    *_, c = _image(name, x)
    if c != filter.shape[1]:
        raise ArgumentError(
            f"{name}: filter w[R, S, C, F] expects C={filter.shape[1]}"
            f" but input x[N, H, W, C] has C={c}"
        )
    if mean is not None and scale is not None:
        _levels(name, c, mean, scale)
    out = conv2d(x, filter, bias, stride=stride, padding=padding, layout="NHWC", name=name)
    return out._replace(dtype=dtype)


def stem_maxpool(*given: Any, **attributes: Any) -> Type:
    """Types maxpool(relu(conv2d(normalize(x))), 3, stride=2, padding=1); see ``stem``."""
    out = stem("stem_maxpool", *given, **attributes)
    return _pool("stem_maxpool", out, kernel=3, stride=2, padding=1, layout="NHWC")


def stem_maxpool_conv2d(*given: Any, **attributes: Any) -> tuple[Type, Type]:
    """Types y = stem_maxpool(x), and relu(conv2d(y)) of a filter of 1 x 1 and its bias behind."""
    *inputs, following, following_bias = given
    name, f = "stem_maxpool_conv2d", inputs[3].shape[0]
    if following.shape[1:] != (f, 1, 1):
        raise ArgumentError(
            f"{name}: expects a following filter [1, 1, {f}, F] but it is {_rscf(following)}"
        )
    y = stem_maxpool(*inputs, **attributes)
    return y, conv2d(y, following, following_bias, layout="NHWC", name=name)


def stem_layernorm(*given: Any, eps: float = 1e-5, **attributes: Any) -> Type:
    """Types layer_norm(conv2d(normalize(x))); see ``stem``, then the norm's weight and bias."""
    *inputs, weight, bias = given
    _norm("stem_layernorm", inputs[3].shape[0], weight, bias)
    return stem("stem_layernorm", *inputs, **attributes)


def stem_conv2d(*given: Any, epilogue: str = "none", **attributes: Any) -> Type:
    """Types act(conv2d(normalize(x))) of an activation; see ``stem``."""
    out = stem("stem_conv2d", *given, **attributes)
    _activation("stem_conv2d", epilogue, out)
    return out


def depthwise_qkv(
    x: Type,
    weight: Type,
    bias: Type,
    *filters: Type | None,
    size: Window,
    kernel: int,
    padding_q: int = 1,
    padding_kv: int = 1,
    stride_kv: int = 2,
    class_token: bool = False,
    eps: float = 1e-5,
    dtype: str = "",
    q_scale: float = 1.0,
    q_low: float = 0.0,
    k_scale: float = 1.0,
    k_low: float = 0.0,
    v_scale: float = 1.0,
    v_low: float = 0.0,
) -> tuple[Type, Type, Type]:
    """Types three depthwise convolutions of normalised tokens x[N, T, C], each then as tokens.

    They are stored in x's dtype, or in 8 bits if ``dtype`` says so, as ``quantized`` does.
    """
    name = "depthwise_qkv"
    if dtype not in ("", *EIGHT_BITS):
        raise ArgumentError(f"{name}: stores x's dtype, uint8 or {FLOAT8}, not {dtype}")
    if len(x.shape) != 3:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has rank {len(x.shape)}")
    tokens, c = (_known(name, size, "T and C of x[N, T, C]") for size in x.shape[1:])
    if tokens != size[0] * size[1] + class_token:
        raise ArgumentError(
            f"{name}: expects {size[0]} * {size[1]}{' + 1' * class_token} tokens"
            f" but x[N, T, C] has T={tokens}"
        )
    _norm(name, c, weight, bias)
    for each in filters[::2]:
        if each is None or each.shape != (c, 1, kernel, kernel):
            raise ArgumentError(
                f"{name}: expects depthwise filters [{kernel}, {kernel}, 1, {c}]"
                f" but one is {each and _rscf(each)}"
            )
    if 2 * padding_q != kernel - 1:
        raise ArgumentError(
            f"{name}: expects a padding_q that keeps the size, {(kernel - 1) / 2:g},"
            f" but it is {padding_q}"
        )
    p, q = windows(name, size, (kernel, kernel), stride_kv, padding_kv)
    stored = dtype or x.dtype
    keys = Type((x.shape[0], p * q + class_token, c), stored)
    return x._replace(dtype=stored), keys, keys


def class_token(
    tokens: Type,
    token: Type,
    weight: Type | None = None,
    bias: Type | None = None,
    *,
    eps: float = 1e-5,
) -> Type:
    """Types token[C] before the tokens [N, T, C] of each image, or before their layer norm."""
    if len(tokens.shape) != 3 or math.prod(map(int, token.shape)) != tokens.shape[2]:
        raise ArgumentError(
            f"class_token: expects tokens [N, T, C] and a token [C]"
            f" but has {_list(tokens)} and {_list(token)}"
        )
    n, t, c = tokens.shape
    if weight is not None and bias is not None:
        _norm("class_token", c, weight, bias)
    return Type((n, _known("class_token", t, "T") + 1, c), tokens.dtype)


def reshape(x: Type, *, shape: tuple[Size, ...]) -> Type:
    """Types the same numbers in another shape."""
    if product(x.shape) != product(shape):
        raise ArgumentError(
            f"reshape: {_list(Type(shape))} must have as many numbers as {_list(x)}"
        )
    return Type(tuple(shape), x.dtype)


def permute(x: Type, *, axes: tuple[int, ...]) -> Type:
    """Types torch's permute."""
    if sorted(axes) != list(range(len(x.shape))):
        raise ArgumentError(f"permute: {axes} must name each axis of {_list(x)} once")
    return Type(tuple(x.shape[axis] for axis in axes), x.dtype)


def roll(x: Type, *, shifts: tuple[int, ...], axes: tuple[int, ...]) -> Type:
    """Types torch's roll of one or two axes, which are in order."""
    if len(shifts) != len(axes) or len(axes) not in (1, 2) or sorted(set(axes)) != list(axes):
        raise ArgumentError(f"roll: expects one or two axes in order but has {axes} by {shifts}")
    for axis in axes:
        _known("roll", x.shape[axis], f"axis {axis}")
    return x


def slice_(x: Type, *, axis: int, start: int, stop: int, step: int = 1) -> Type:
    """Types x[start:stop:step] along an axis."""
    length = _known("slice", x.shape[axis], f"axis {axis}")
    if not 0 <= start < stop <= length or step < 1:
        part = f"{start}:{stop}" if step == 1 else f"{start}:{stop}:{step}"
        raise ArgumentError(f"slice: {part} is not within the {length} of an axis")
    shape = list(x.shape)
    shape[axis] = (stop - start + step - 1) // step
    return Type(tuple(shape), x.dtype)


def pad(x: Type, *, pads: tuple[int, ...], value: float = 0.0) -> Type:
    """Types x with a constant around it; ``pads`` is before and behind, axis by axis."""
    if len(pads) != 2 * len(x.shape) or min(pads, default=0) < 0:
        raise ArgumentError(f"pad: {pads} does not say what comes around {_list(x)}")
    shape = []
    for axis, size in enumerate(x.shape):
        more = pads[2 * axis] + pads[2 * axis + 1]
        shape.append(_known("pad", size, f"axis {axis}") + more if more else size)
    return Type(tuple(shape), x.dtype)


def gather(x: Type, indices: Type, *, axis: int, batch_axes: int = 0) -> Type:
    """Types torch's index_select for indices of any shape, which takes the place of the axis.

    With ``batch_axes``, all that stand before the axis, the indices of each batch are its own.
    """
    if not indices.dtype.startswith("int"):
        raise ArgumentError(f"gather: expects integers as indices but they are {indices.dtype}")
    if batch_axes not in (0, axis) or x.shape[:batch_axes] != indices.shape[:batch_axes]:
        raise ArgumentError(
            f"gather: expects indices with the axes of {_list(x)} before axis {axis} or none of"
            f" them but has {batch_axes} and {_list(indices)}"
        )
    return Type((*x.shape[:axis], *indices.shape[batch_axes:], *x.shape[axis + 1 :]), x.dtype)


def scatter_add(x: Type, indices: Type, values: Type, *, axis: int) -> Type:
    """Types torch's scatter_add: x, and each of the values added where its index says.

    Or indices have the axes up to that one, and each adds all that is behind it.
    """
    if not indices.dtype.startswith("int"):
        raise ArgumentError(f"scatter_add: expects integers as indices, not {indices.dtype}")
    sides = [[size for a, size in enumerate(y.shape) if a != axis] for y in (x, values)]
    whole = indices.shape in (values.shape, values.shape[: axis + 1])
    if not whole or sides[0] != sides[1]:
        raise ArgumentError(
            f"scatter_add: expects values and indices of x's shape but for axis {axis} but x is"
            f" {x}, the indices {indices} and the values {values}"
        )
    return Type(x.shape, _narrower(x, values))


def reduction(
    *given: Type,
    axes: tuple[int, ...],
    keepdim: bool = False,
    dtype: str = "",
    expression: str = "x0",
) -> list[Type]:
    """Types what leaves one number of several axes: their sum, mean, largest or smallest.

    What is reduced is an expression of values that broadcast, or several, which ``;`` tells apart.
    """
    texts = expression.split(BETWEEN)
    count = max(map(values_of, texts))
    if not count == len(given) <= MOST_VALUES or len(texts) > MOST_TERMS:
        raise ArgumentError(
            f"reduction: expects the {count} values of {expression!r}, at most {MOST_VALUES}, and"
            f" at most {MOST_TERMS} results but has {len(given)} values"
        )
    x = Type(broadcast("reduction", *given), given[0].dtype)
    if not axes or len(set(axes)) < len(axes) or not all(0 <= a < len(x.shape) for a in axes):
        raise ArgumentError(f"the axes {axes} to reduce are not those of {_list(x)}")
    kept = [1 if a in axes else size for a, size in enumerate(x.shape)]
    if not keepdim:
        kept = [size for a, size in enumerate(kept) if a not in axes]
    numbers = [each for each in given if each.dtype != "bool"] or [*given]
    return [Type(tuple(kept), dtype or _narrower(*numbers))] * len(texts)


def reduce_results(
    *given: Type,
    kind: str,
    axes: tuple[int, ...],
    results: str,
    dtypes: tuple[str, ...],
    expression: str = "x0",
    keepdim: bool = False,
    first: tuple[int, ...] = (),
) -> list[Type]:
    """Types expressions of what a reduction leaves, and of vectors of that size behind its values.

    Those in ``first`` have the shape of the whole, and are read at its first place along the axes.
    """
    texts = results.split(BETWEEN)
    count = max(map(values_of, expression.split(BETWEEN)))
    left = reduction(*given[:count], axes=axes, keepdim=keepdim, expression=expression)
    vectors = given[count:]
    read = len(left) + len(vectors)
    if (
        kind not in REDUCTIONS
        or not len(texts) == len(dtypes) <= MOST_RESULTS
        or len(vectors) > MOST_ENDS
        or any(values_of(text) > read or is_truth(text) for text in texts)
        or not all("float" in dtype for dtype in (*dtypes, *(v.dtype for v in vectors)))
    ):
        raise ArgumentError(
            f"reduce_results: expects a sum, mean, amax or amin, at most {MOST_ENDS} vectors of"
            f" floats, and at most {MOST_RESULTS} expressions of floats, of {read} values, but has"
            f" {kind}, {len(vectors)} vectors and {results!r} as {', '.join(dtypes)}"
        )
    whole = broadcast("reduce_results", *given[:count])
    for i, each in enumerate(given):
        if i in first and (each.shape != whole or product(around(whole, axes)[0]) != 1):
            raise ArgumentError(
                f"reduce_results: no first place along the axes {axes} of {_list(Type(whole))} is"
                f" one of {_list(each)}"
            )
        if i in first and not _known("reduce_results", product(whole), "what is reduced"):
            raise ArgumentError(f"reduce_results: {_list(each)} has no first place")
        if i >= count and i not in first and product(each.shape) != product(left[0].shape):
            raise ArgumentError(
                f"reduce_results: expects vectors of {product(left[0].shape)} numbers but has"
                f" {_list(each)}"
            )
    return [Type(left[0].shape, dtype) for dtype in dtypes]


def around(
    shape: tuple[Size, ...], axes: Sequence[int]
) -> tuple[tuple[Size, ...], tuple[Size, ...], tuple[Size, ...]]:
    """Gives the sizes before the axes, from the first to the last of them, and behind them."""
    wide = [axis for axis in sorted(axes) if shape[axis] != 1] or [min(axes)]
    return shape[: wide[0]], shape[wide[0] : wide[-1] + 1], shape[wide[-1] + 1 :]


def lies(given: Sequence[Type], axes: Sequence[int]) -> list[str] | None:
    """Says how values lie where they are reduced together (ops/reduce/values.mojo).

    The axes of the whole, to which they broadcast, are those before the reduced ones, these, and
    those behind: o, r and i.

    Args:
        given: The types of the values.
        axes: Those of the whole that are reduced.

    Returns:
        For each value the letters of the axes along which it moves, or ``-``; nothing where the
        kernel does not take them, as these are not three axes, or a value has part of one.
    """
    whole = broadcast("reduction", *given)
    parts = around(whole, axes)
    if product(size for a, size in enumerate(whole) if a in axes) != product(parts[1]):
        return None
    found = []
    for x in given:
        sizes = (1,) * (len(whole) - len(x.shape)) + x.shape
        letters, start = "", 0
        for letter, group in zip("ori", parts, strict=True):
            part = sizes[start : start + len(group)]
            start += len(group)
            if any(size != 1 for size in part):
                if part != group:
                    return None
                letters += letter
        found.append("ori" if sizes == whole else letters or "-")
    return found


def cumsum(x: Type, *, axis: int) -> Type:
    """Types torch's cumsum."""
    _known("cumsum", x.shape[axis], f"axis {axis}")
    return x


def concat(*values: Type, axis: int, expression: str = "x0") -> Type:
    """Types values one behind the other along an axis, and an expression of that and of vectors."""
    count = len(values) - values_of(expression) + 1
    given, vectors = values[:count], values[count:]
    if not given or len(vectors) > MOST_VECTORS or is_truth(expression):
        raise ArgumentError(
            f"concat: expects values and the vectors of {expression!r}, at most {MOST_VECTORS},"
            f" but has {len(values)} inputs"
        )
    shape = list(given[0].shape)
    for other in given[1:]:
        sides = zip(shape, other.shape, strict=True)
        if any(ours != theirs for i, (ours, theirs) in enumerate(sides) if i != axis):
            raise ArgumentError(f"concat: {_list(given[0])} does not fit {_list(other)}")
    shape[axis] = sum(_known("concat", each.shape[axis], f"axis {axis}") for each in given)
    for vector in vectors:
        if axis != len(shape) - 1 or vector.shape != (shape[axis],):
            raise ArgumentError(
                f"concat: expects vectors of {shape[axis]} along the last axis but has"
                f" {_list(vector)}, axis {axis}"
            )
    return Type(tuple(shape), _narrower(*given))


def expand(x: Type, *, shape: tuple[Size, ...]) -> Type:
    """Types torch's expand: sizes of 1 repeated."""
    if len(x.shape) != len(shape) or any(
        a not in (1, b) for a, b in zip(x.shape, shape, strict=True)
    ):
        raise ArgumentError(f"expand: {_list(x)} does not expand to {_list(Type(shape))}")
    return Type(tuple(shape), x.dtype)


def cast(x: Type, *, dtype: str) -> Type:
    """Types the same numbers in another dtype."""
    return Type(x.shape, dtype)


def batch_norm_scale(weight: Type, var: Type, *, eps: float) -> Type:
    """Types weight / sqrt(var + eps)."""
    return Type(weight.shape, wide(weight.dtype))


def batch_norm_shift(bias: Type, mean: Type, scale: Type, before: Type | None = None) -> Type:
    """Types bias + (before - mean) * scale: the bias of a convolution with its batch norm."""
    return Type(bias.shape, wide(bias.dtype))


def scale_filter(filter: Type, scale: Type) -> Type:
    """Types a filter [F, C, R, S] times a scale [F]."""
    return Type(filter.shape, wide(filter.dtype))


def norm_filter(filter: Type, weight: Type, *, to: str) -> Type:
    """Types linear weights [F, C] times a norm's weight [C], centred and rounded ``to`` 16 bits."""
    if to not in HALVES:
        raise ArgumentError(f"norm_filter: rounds to bfloat16 or float16, not {to!r}")
    _vectors("norm_filter", filter.shape[1], weight=weight)
    return Type(filter.shape, "float32")


def norm_shift(filter: Type, bias: Type, before: Type | None = None) -> Type:
    """Types linear weights [F, C] times a norm's bias [C], and their own bias added: [F]."""
    _vectors("norm_shift", filter.shape[1], bias=bias)
    return Type(filter.shape[:1], "float32")


def fake_quantize_filter(filter: Type, scale: Type | None = None, *, to: str = "int8") -> Type:
    """Types a filter [F, ...] rounded to 8 bits, for each of F by a scale of [F].

    If that is left out, the largest number of a filter, of either sign, is 127; 448 if they are
    rounded ``to`` float8_e4m3fn.
    """
    if to not in ("int8", FLOAT8):
        raise ArgumentError(f"fake_quantize_filter: rounds to int8 or {FLOAT8}, not {to!r}")
    if scale is not None:
        _vectors("fake_quantize_filter", filter.shape[0], scale=scale)
    return filter


def full(*, shape: tuple[int, ...], value: float) -> Type:
    """Types a constant of one number, in float32."""
    return Type(tuple(shape), "float32")


def wide(dtype: str) -> str:
    """Names what statistics of values are in: float64 of float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def _narrower(*given: Type) -> str:
    """Names the dtype of what is computed of several: weights, in float32, follow the others."""
    order = ("float64", "bfloat16", "float16", "float32")
    dtypes = {each.dtype for each in given}
    if len(dtypes) > 1 and not dtypes <= set(order):
        raise ArgumentError(f"the values must have one dtype but have {', '.join(sorted(dtypes))}")
    return min(dtypes, key=order.index) if len(dtypes) > 1 else dtypes.pop()


OPS: dict[str, Callable[..., Any]] = {
    # plain
    "conv2d": conv2d,
    "conv2d_input_grad": conv2d_input_grad,
    "conv2d_weight_grad": conv2d_weight_grad,
    "batch_norm": batch_norm,
    "linear": linear,
    "matmul": matmul,
    **{name: elementwise(name) for name in ELEMENTWISE},
    "fake_quantize": fake_quantize,
    "softmax": unary,
    "log_softmax": unary,
    "softmax_grad": softmax_grad,
    "max_pool2d": max_pool2d,
    "avg_pool2d": avg_pool2d,
    "max_pool2d_grad": max_pool2d_grad,
    "avg_pool2d_grad": avg_pool2d_grad,
    "layer_norm": layer_norm,
    "layer_norm_grad": layer_norm_grad,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "sum": reduction,
    "mean": reduction,
    "amax": reduction,
    "amin": reduction,
    "cumsum": cumsum,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "normalize": normalize,
    "reshape": reshape,
    "permute": permute,
    "roll": roll,
    "slice": slice_,
    "pad": pad,
    "gather": gather,
    "scatter_add": scatter_add,
    "concat": concat,
    "expand": expand,
    "cast": cast,
    # at load
    "batch_norm_scale": batch_norm_scale,
    "batch_norm_shift": batch_norm_shift,
    "scale_filter": scale_filter,
    "norm_filter": norm_filter,
    "norm_shift": norm_shift,
    "fake_quantize_filter": fake_quantize_filter,
    "bytes_mean": bytes_mean,
    "bytes_scale": bytes_scale,
    "full": full,
    # fused
    "pointwise": pointwise,
    "foreach": foreach,
    "reduce_results": reduce_results,
    "conv2d_shortcut": conv2d_shortcut,
    "conv2d_chain": conv2d_chain,
    "conv2d_shortcut_chain": conv2d_shortcut_chain,
    "conv2d_mean": conv2d_mean,
    "quantized_conv2d": quantized_conv2d,
    "quantized_conv2d_chain": quantized_conv2d_chain,
    "quantized_conv2d_shortcut": quantized_conv2d_shortcut,
    "quantized_conv2d_shortcut_chain": quantized_conv2d_shortcut_chain,
    "quantized_linear": quantized_linear,
    "qkv_linear": qkv_linear,
    "quantized_qkv_linear": quantized_qkv_linear,
    "row_moments": row_moments,
    "linear_moments": linear_moments,
    "normed_linear": normed_linear,
    "token_linear": token_linear,
    "attention": attention,
    "attention_bias": attention_bias,
    "attention_linear": attention_linear,
    "attention_grad": attention_grad,
    "layernorm_first": layernorm_first,
    "gather_rows": gather_rows,
    "layernorm_mlp": layernorm_mlp,
    "squeeze_excite": squeeze_excite,
    "depthwise_qkv": depthwise_qkv,
    "class_token": class_token,
    "stem_maxpool": stem_maxpool,
    "stem_maxpool_conv2d": stem_maxpool_conv2d,
    "stem_layernorm": stem_layernorm,
    "stem_conv2d": stem_conv2d,
}
"""Every op: plain ones, which networks are written in; what folds weights; what passes make."""
