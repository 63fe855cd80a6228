"""The ops as typed functions on graph values: every shape and dtype check lives here.

Activations are NHWC (feature maps) or [..., C] (tokens), in one dtype: float32 or bfloat16 on a
CPU (sparse convolutions float32); float32, bfloat16 or float16 on a GPU. Biases and layer norm's
weights are float32, and every kernel accumulates in float32. Unless ``tf32`` is False, NVIDIA's
tensor cores round float32 to TF32 (10 bits of mantissa) before they multiply. The batch may be
symbolic, all other sizes are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import accelerator_api
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorType, TensorValue, ops

from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.graphs import formats
from maxvision.graphs.arrange import CHAINS, MLPS
from maxvision.graphs.parameters import Filter

OPS = Path(__file__).resolve().parent.parent / "ops"
"""The Mojo package, for ``Graph(custom_extensions=[OPS])``."""

EPILOGUES = ("none", "relu", "gelu", "add", "add_relu")
GPU_DTYPES = (DType.float32, DType.bfloat16, DType.float16)
CPU_DTYPES = (DType.float32, DType.bfloat16)

MOST_DEPTH = 256
"""Channels of a head that attention's plain GPU kernel has room for in shared memory."""

Pair = int | tuple[int, int]


def conv2d(
    x: TensorValue,
    filter: Filter,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Convolves x[N, H, W, C] into [N, P, Q, F], as torch's conv2d does.

    Args:
        x: The activations.
        filter: The weights; sparse ones run as the op of their format.
        stride: Pixels between windows, one number or (height, width); so are the next two.
        padding: Zeros on each side.
        dilation: Pixels between the taps of a window.
        epilogue: ``none``, ``relu``, ``gelu`` (exact), ``add``, ``add_relu``.
        residual: [N, P, Q, F] for the two that add.

    Raises:
        ArgumentError: If shapes, epilogue or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    name: str = "conv2d"
    parameters: dict[str, Any] = {"tf32": _tf32(x, filter.tf32)}
    if filter.format in formats.PACKED:
        name, parameters = "sparse_conv2d_packed", {"format": filter.format}
    elif filter.format:
        name, parameters = "sparse_conv2d", {}
    h, w, c = _sizes(name, x, "x[N, H, W, C]")
    r, s, filter_c, f = filter.shape
    if c != filter_c * filter.groups:
        raise ArgumentError(
            f"{name}: filter w[R, S, C, F] expects C={filter_c * filter.groups}"
            f" but input x[N, H, W, C] has C={c}"
        )
    window, p, q = _window(name, (h, w), (r, s), stride, padding, dilation, filter.groups)
    out = TensorType(x.dtype, [x.shape[0], p, q, f], device=x.device)
    weights = [*(filter.rows or [filter.dense]), filter.bias]
    return _fused(name, x, weights, residual, [window], out, epilogue, parameters)


def conv2d_shortcut(
    x: TensorValue,
    filter: Filter,
    source: TensorValue,
    shortcut: Filter,
    *,
    padding: Pair = 0,
    stride: Pair = 1,
) -> TensorValue:
    """Ends a residual block that changes its shape: relu(conv2d(x) + conv2d(source)).

    It is one launch, and on a GPU the shortcut's result is never stored.

    Args:
        x: The activations [N, H, W, C]; the stride is 1.
        filter: Their filter.
        source: What came into the block [N, H', W', C'].
        shortcut: Its 1 x 1 filter.
        padding: Zeros on each side of x.
        stride: Pixels between the windows of ``source``.

    Raises:
        ArgumentError: If shapes or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    fused = (
        filter.dense is not None
        and shortcut.dense is not None
        and filter.groups == shortcut.groups == 1
    )
    if not fused:
        residual = conv2d(source, shortcut, stride=stride)
        return conv2d(x, filter, padding=padding, epilogue="add_relu", residual=residual)
    name = "conv2d_shortcut"
    f = filter.shape[3]
    if shortcut.shape[:2] != (1, 1) or shortcut.shape[3] != f:
        raise ArgumentError(
            f"{name}: expects a shortcut [1, 1, C, {f}] but it is {list(shortcut.shape)}"
        )
    windows, sizes = [], []
    for value, weight, step, pad in (x, filter, 1, padding), (source, shortcut, stride, 0):
        h, w, c = _sizes(name, value, "x[N, H, W, C]")
        if c != weight.shape[2]:
            raise ArgumentError(
                f"{name}: filter w[R, S, C, F] expects C={weight.shape[2]} but its input has C={c}"
            )
        window, p, q = _window(name, (h, w), weight.shape[:2], step, pad, 1, 1)
        windows.append(window)
        sizes.append((p, q))
    if sizes[0] != sizes[1]:
        raise ArgumentError(
            f"{name}: expects a shortcut of {list(sizes[0])} px but it gives {list(sizes[1])}"
        )
    values = [x, filter.dense, filter.bias, source, shortcut.dense, shortcut.bias, *windows]
    out = TensorType(x.dtype, [x.shape[0], *sizes[0], f], device=x.device)
    return _custom(name, values, out, {"tf32": _tf32(x, filter.tf32 and shortcut.tf32)})


def conv2d_chain(
    x: TensorValue, filter: Filter, residual: TensorValue, following: Filter
) -> tuple[TensorValue, TensorValue]:
    """Ends a residual block and begins the next: h = relu(conv2d(x) + residual), relu(conv2d(h)).

    On a GPU it is one launch for some widths, which does not read h again.

    Args:
        x: The activations [N, H, W, C].
        filter: Their filter of 1 x 1.
        residual: What came into the block [N, H, W, K].
        following: The next block's first filter, of 1 x 1 and without a stride.

    Returns:
        h[N, H, W, K], and the next block's first activations [N, H, W, F].

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    c, f = filter.shape[2], following.shape[3]
    fused = (
        not x.device.is_cpu()
        and filter.dense is not None
        and following.dense is not None
        and filter.groups == following.groups == 1
        and filter.shape[:2] == following.shape[:2] == (1, 1)
        and (c, f) in CHAINS
    )
    if not fused:
        h = conv2d(x, filter, epilogue="add_relu", residual=residual)
        return h, conv2d(h, following, epilogue="relu")
    name = "conv2d_chain"
    *size, x_c = _sizes(name, x, "x[N, H, W, C]")
    k = filter.shape[3]
    if x_c != c:
        raise ArgumentError(
            f"{name}: filter w[1, 1, C, K] expects C={c} but input x[N, H, W, C] has C={x_c}"
        )
    if following.shape[2] != k:
        raise ArgumentError(
            f"{name}: expects a following filter [1, 1, {k}, F] but it is {list(following.shape)}"
        )
    out = TensorType(x.dtype, [x.shape[0], *size, k], device=x.device)
    if list(residual.shape) != list(out.shape):
        raise ArgumentError(
            f"{name}: residual expects the output's shape {list(out.shape)}"
            f" but has {list(residual.shape)}"
        )
    values = [x, filter.dense, filter.bias, residual, following.dense, following.bias]
    after = TensorType(x.dtype, [x.shape[0], *size, f], device=x.device)
    tf32 = _tf32(x, filter.tf32 and following.tf32)
    h, z = _customs(name, values, [out, after], {"tf32": tf32, "c": c, "f": f})
    return h, z


def linear(
    x: TensorValue,
    weight: Filter,
    *,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Multiplies x[..., C] by a linear layer's weights into [..., F]: bmm with one b for all.

    Sparse weights run as ``sparse_conv2d``; then x is [N, ..., C].

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    c = _static("linear", x.shape[-1], "C of x[..., C]")
    if c != weight.shape[2]:
        raise ArgumentError(
            f"linear: weight [C, F] expects C={weight.shape[2]} but input x[..., C] has C={c}"
        )
    if weight.dense is None:
        return _sparse_linear(x, weight, epilogue, residual)
    layout = "packed" if x.device.is_cpu() else "nk"
    out = TensorType(x.dtype, [*x.shape[:-1], weight.shape[3]], device=x.device)
    weights, scale = [weight.dense, weight.bias], _host([1.0], DType.float32)
    parameters = {"layout": layout, "tf32": _tf32(x, weight.tf32)}
    return _fused("bmm", x, weights, residual, [scale], out, epilogue, parameters)


def _sparse_linear(
    x: TensorValue, weight: Filter, epilogue: str, residual: TensorValue | None
) -> TensorValue:
    """Multiplies x[N, ..., C] as a sparse convolution of 1 x 1, each of N an image of one row."""
    between = [_static("linear", dim, "every size but N of x[N, ..., C]") for dim in x.shape[1:-1]]
    count = math.prod(between)

    def image(value: TensorValue) -> TensorValue:
        return value.reshape((value.shape[0], 1, count, value.shape[-1]))

    residual = None if residual is None else image(residual)
    y = conv2d(image(x), weight, epilogue=epilogue, residual=residual)
    return y.reshape((x.shape[0], *between, weight.shape[3]))


def qkv_linear(
    tokens: tuple[TensorValue, TensorValue, TensorValue], weights: tuple[Filter, Filter, Filter]
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Multiplies query, key and value tokens by their weights: ``linear`` thrice, in one launch.

    Args:
        tokens: [N, T, C], [N, S, C] and [N, S, C].
        weights: Dense ones [C, F].

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    name = "qkv_linear"
    c, f = weights[0].shape[2:]
    for y, weight in zip(tokens, weights, strict=True):
        if y.rank != 3 or _static(name, y.shape[2], "C of tokens[N, T, C]") != c:
            raise ArgumentError(f"{name}: expects tokens [N, T, {c}] but one is {list(y.shape)}")
        if tuple(weight.shape) != (1, 1, c, f):
            raise ArgumentError(
                f"{name}: expects weights [{c}, {f}] but one is {list(weight.shape[2:])}"
            )
    if list(tokens[1].shape) != list(tokens[2].shape):
        raise ArgumentError(
            f"{name}: expects as many keys as values but has {tokens[1].shape[1]} and"
            f" {tokens[2].shape[1]}"
        )
    dense = [weight.dense for weight in weights if weight.dense is not None]
    if len(dense) < 3:
        q, k, v = (linear(y, weight) for y, weight in zip(tokens, weights, strict=True))
        return q, k, v
    values = list(tokens)
    for matrix, weight in zip(dense, weights, strict=True):
        values += [matrix, weight.bias]
    types = [TensorType(y.dtype, [*y.shape[:2], f], device=y.device) for y in tokens]
    tf32 = _tf32(tokens[0], all(weight.tf32 for weight in weights))
    q, k, v = _customs(name, values, types, {"tf32": tf32})
    return q, k, v


def bmm(
    a: TensorValue,
    b: TensorValue,
    *,
    alpha: float = 1.0,
    transpose_b: bool = False,
    bias: TensorValue | None = None,
    epilogue: str = "none",
    residual: TensorValue | None = None,
    tf32: bool = True,
) -> TensorValue:
    """Computes act(alpha * a @ b + bias + residual) for a[..., M, K] and b[..., K, N].

    Args:
        a: Rank 2 or more.
        b: The same leading sizes as ``a``, or none (or 1s): one b for the whole batch.
        alpha: Scales the product, before bias and residual.
        transpose_b: b is [..., N, K].
        bias: float32 [N].
        epilogue: ``none``, ``relu``, ``gelu`` (exact), ``add``, ``add_relu``.
        residual: [..., M, N] for the two that add.
        tf32: Whether a GPU may round float32 to TF32.

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    if a.rank < 2 or b.rank < 2:
        raise ArgumentError(
            f"bmm: a[..., M, K] and b expect rank 2 or more but have {a.rank} and {b.rank}"
        )
    k = _static("bmm", a.shape[-1], "K of a[..., M, K]")
    b_k, b_n = b.shape[-1 if transpose_b else -2], b.shape[-2 if transpose_b else -1]
    n = _static("bmm", b_n, "N of b")
    if b_k != k:
        raise ArgumentError(f"bmm: a[..., M, K] has K={k} but b has K={b_k}")
    shared = all(dim == 1 for dim in b.shape[:-2])
    if not shared and list(b.shape[:-2]) != list(a.shape[:-2]):
        raise ArgumentError(
            f"bmm: b expects the batch {list(a.shape[:-2])} of a, or 1,"
            f" but has {list(b.shape[:-2])}"
        )
    if bias is None:
        bias = _zeros(n, a.device)
    out = TensorType(a.dtype, [*a.shape[:-1], n], device=a.device)
    return _fused(
        "bmm",
        a,
        [b, bias],
        residual,
        [_host([alpha], DType.float32)],
        out,
        epilogue,
        {"layout": "nk" if transpose_b else "kn", "tf32": _tf32(a, tf32)},
    )


def maxpool(
    x: TensorValue,
    kernel: Pair,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> TensorValue:
    """Takes maxima over windows of x[N, H, W, C], as torch's max_pool2d does (stride: kernel).

    Raises:
        ArgumentError: If the geometry does not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    return _pool("maxpool", x, kernel, stride, padding, dilation, ceil_mode, {})


def avgpool(
    x: TensorValue,
    kernel: Pair | None = None,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> TensorValue:
    """Averages windows of x[N, H, W, C], as torch's avg_pool2d does; no kernel: the whole image.

    Raises:
        ArgumentError: If the geometry does not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    if kernel is None:
        h, w, _ = _sizes("avgpool", x, "x[N, H, W, C]")
        kernel = (h, w)
    counts = {"padding_counts": count_include_pad}
    return _pool("avgpool", x, kernel, stride, padding, 1, ceil_mode, counts)


def relu(x: TensorValue) -> TensorValue:
    """Computes max(x, 0) of any shape.

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("relu", [x], x.type)


def gelu(x: TensorValue) -> TensorValue:
    """Computes the exact (erf) GELU of any shape.

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("gelu", [x], x.type)


def softmax(x: TensorValue) -> TensorValue:
    """Computes the softmax along the last axis of x[..., C].

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("softmax", [x], x.type)


def log_softmax(x: TensorValue) -> TensorValue:
    """Computes the logarithm of the softmax along the last axis of x[..., C].

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("log_softmax", [x], x.type)


def layernorm(
    x: TensorValue, weight: TensorValue, bias: TensorValue, eps: float = 1e-5
) -> TensorValue:
    """Normalises the last axis of x[..., C]; weight and bias are float32 [C].

    Raises:
        ArgumentError: If weight or bias is not [C].
        DeviceError: If the device has no kernel for the dtype.
    """
    _check_norm("layernorm", x.shape[-1], weight, bias)
    return _custom("layernorm", [x, weight, bias, _host([eps], DType.float32)], x.type)


def layernorm_first(
    x: TensorValue, weight: TensorValue, bias: TensorValue, eps: float = 1e-5
) -> TensorValue:
    """Normalises the first token of each image of x[N, T, C]: [N, C]; see ``layernorm``."""
    name = "layernorm_first"
    if x.rank != 3 or x.shape[1] == 0:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has {list(x.shape)}")
    _check_norm(name, x.shape[2], weight, bias)
    out = TensorType(x.dtype, [x.shape[0], x.shape[2]], device=x.device)
    return _custom(name, [x, weight, bias, _host([eps], DType.float32)], out)


def layernorm_mlp(
    x: TensorValue,
    norm: tuple[TensorValue, TensorValue],
    weights: tuple[Filter, Filter],
    eps: float = 1e-5,
) -> TensorValue:
    """Computes x + linear(gelu(linear(layernorm(x)))) of tokens x[N, T, C].

    On a GPU it is one launch for some widths, and the hidden layer is never stored.

    Args:
        x: The tokens.
        norm: Weight and bias of the layer norm, float32 [C].
        weights: Of the linear layers, [C, K] and [K, C].
        eps: Added to the variance.

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    name = "layernorm_mlp"
    if x.rank != 3:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has {list(x.shape)}")
    c = _static(name, x.shape[2], "C of x[N, T, C]")
    _check_norm(name, c, *norm)
    first, second = weights
    k = first.shape[3]
    if tuple(first.shape) != (1, 1, c, k) or tuple(second.shape) != (1, 1, k, c):
        raise ArgumentError(
            f"{name}: expects weights [{c}, K] and [K, {c}]"
            f" but has {list(first.shape[2:])} and {list(second.shape[2:])}"
        )
    if x.device.is_cpu() or c not in MLPS or first.dense is None or second.dense is None:
        y = linear(layernorm(x, *norm, eps), first, epilogue="gelu")
        return linear(y, second, epilogue="add", residual=x)
    values = [x, *norm, first.dense, first.bias, second.dense, second.bias]
    values.append(_host([eps], DType.float32))
    hidden = TensorType(x.dtype, [*x.shape[:2], k], device=x.device)
    parameters = {"tf32": _tf32(x, first.tf32 and second.tf32), "c": c}
    return _customs(name, values, [x.type, x.type, hidden], parameters)[0]


def attention(
    q: TensorValue, k: TensorValue, v: TensorValue, heads: int, *, scale: float | None = None
) -> TensorValue:
    """Attends from q[N, T, C] to k[N, S, C] and v[N, S, C], the heads side by side in C.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        heads: How many heads C holds.
        scale: Scales the scores before the softmax; by default (C / heads) ** -0.5.

    Raises:
        ArgumentError: If shapes, heads or scale do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    for name, value in (("q[N, T, C]", q), ("k[N, S, C]", k), ("v[N, S, C]", v)):
        if value.rank != 3:
            raise ArgumentError(f"attention: expects {name} but it has rank {value.rank}")
    n, _, _ = q.shape
    c = _static("attention", q.shape[2], "C of q[N, T, C]")
    s = _static("attention", k.shape[1], "S of k[N, S, C]")
    for name, value in (("k", k), ("v", v)):
        if list(value.shape) != [n, s, c]:
            raise ArgumentError(
                f"attention: {name} expects the shape {[n, s, c]} of q's N, k's S and q's C"
                f" but has {list(value.shape)}"
            )
    if heads < 1 or c % heads:
        raise ArgumentError(f"attention: expects heads that divide C={c} but has {heads}")
    if s < 1:
        raise ArgumentError("attention: expects at least one key but has S=0")
    depth = c // heads
    if depth > MOST_DEPTH:
        raise ArgumentError(
            f"attention: expects heads of at most {MOST_DEPTH} channels but they have {depth}"
        )
    scale = depth**-0.5 if scale is None else scale
    if not scale >= 0:
        raise ArgumentError(f"attention: expects a scale of at least 0 but it is {scale}")
    values = [q, k, v, _host([scale], DType.float32)]
    return _custom("attention", values, q.type, {"depth": depth})


def normalize(
    pixels: TensorValue, mean: TensorValue, scale: TensorValue, dtype: DType
) -> TensorValue:
    """Computes (pixels[N, H, W, C] - mean[C]) * scale[C] in float32, as ``dtype``.

    Raises:
        ArgumentError: If mean or scale is not [C].
        DeviceError: If the device has no kernel for the dtype.
    """
    _, _, c = _sizes("normalize", pixels, "pixels[N, H, W, C]")
    _check_levels("normalize", c, mean, scale)
    out = TensorType(dtype, pixels.shape, device=pixels.device)
    return _custom("normalize", [pixels, mean, scale], out)


def stem_maxpool(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    *,
    stride: int,
    padding: int,
) -> TensorValue:
    """Computes a ResNet's stem: maxpool(conv2d(normalize(x), relu), 3, stride=2, padding=1).

    One kernel if the filter is ``Parameters.stem``'s for a device that has it, else three.

    Args:
        x: Pixels [N, H, W, C]: uint8 levels, or floats that are normalised already.
        filter: The weights; the result has their dtype.
        levels: Mean and scale [C] of uint8 levels; None for floats.
        stride: Pixels between windows of the convolution.
        padding: Zeros on each side of the normalised image.

    Raises:
        ArgumentError: If shapes or geometry do not fit, or levels are missing or too many.
        DeviceError: If the device has no kernel for the dtype.
    """
    fused = _stem("stem_maxpool", x, filter, levels, stride, padding)
    if fused is None:
        x = conv2d(
            _pixels(x, filter, levels), filter, stride=stride, padding=padding, epilogue="relu"
        )
        return maxpool(x, 3, stride=2, padding=1)
    values, window, parameters, p, q = fused
    _, p, q = _window("stem_maxpool", (p, q), (3, 3), 2, 1, 1, 1)
    out = TensorType(filter.dtype, [x.shape[0], p, q, filter.shape[3]], device=x.device)
    return _custom("stem_maxpool", [*values, window], out, parameters)


def stem_layernorm(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    weight: TensorValue,
    bias: TensorValue,
    eps: float = 1e-5,
    *,
    stride: int,
    padding: int,
) -> TensorValue:
    """Computes a CvT's first embedding: layernorm(conv2d(normalize(x)), weight, bias, eps).

    See ``stem_maxpool``; the result is [N, P, Q, F].

    Raises:
        ArgumentError: If shapes or geometry do not fit, or levels are missing or too many.
        DeviceError: If the device has no kernel for the dtype.
    """
    name = "stem_layernorm"
    _check_norm(name, filter.shape[3], weight, bias)
    fused = _stem(name, x, filter, levels, stride, padding)
    if fused is None:
        x = conv2d(_pixels(x, filter, levels), filter, stride=stride, padding=padding)
        return layernorm(x, weight, bias, eps)
    values, window, parameters, p, q = fused
    out = TensorType(filter.dtype, [x.shape[0], p, q, filter.shape[3]], device=x.device)
    values += [weight, bias, _host([eps], DType.float32), window]
    return _custom(name, values, out, parameters)


def depthwise_qkv(
    x: TensorValue,
    size: tuple[int, int],
    norm: tuple[TensorValue, TensorValue],
    filters: tuple[Filter, Filter, Filter],
    *,
    eps: float = 1e-5,
    padding_q: int = 1,
    padding_kv: int = 1,
    stride_kv: int = 2,
    class_token: bool = False,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Normalises tokens and convolves them, channel by channel, into query, key and value.

    The class token, if there is one, is normalised and passes by the convolutions. One kernel
    for odd windows of up to 5, on a CPU, and on an NVIDIA GPU if C is a multiple of 16 bytes;
    else several.

    Args:
        x: [N, H * W, C], or [N, 1 + H * W, C] with a class token first.
        size: H and W.
        norm: Weight and bias of the layer norm, float32 [C].
        filters: Depthwise ones [R, S, 1, C] of the query, the key and the value.
        eps: Added to the variance.
        padding_q: Zeros around the normalised tokens for the query, whose stride is 1.
        padding_kv: The same for key and value.
        stride_kv: Tokens between the windows of key and value.
        class_token: Whether there is one.

    Returns:
        Query [N, T, C], key and value [N, T', C].

    Raises:
        ArgumentError: If shapes or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    name = "depthwise_qkv"
    if x.rank != 3:
        raise ArgumentError(f"{name}: expects tokens x[N, T, C] but x has rank {x.rank}")
    tokens, c = (_static(name, dim, "T and C of x[N, T, C]") for dim in x.shape[1:])
    if tokens != size[0] * size[1] + class_token:
        raise ArgumentError(
            f"{name}: expects {size[0]} * {size[1]}{' + 1' * class_token} tokens"
            f" but x[N, T, C] has T={tokens}"
        )
    _check_norm(name, c, *norm)
    kernel = filters[0].shape[0]
    for filter in filters:
        if filter.shape != (kernel, kernel, 1, c) or filter.groups != c:
            raise ArgumentError(
                f"{name}: expects depthwise filters [{kernel}, {kernel}, 1, {c}]"
                f" but one is {list(filter.shape)} in {filter.groups} groups"
            )
    if 2 * padding_q != kernel - 1:
        raise ArgumentError(
            f"{name}: expects a padding_q that keeps the size, {(kernel - 1) / 2:g},"
            f" but it is {padding_q}"
        )
    _, p, q = _window(name, size, (kernel, kernel), stride_kv, padding_kv, 1, 1)
    wide = 16 // x.dtype.size_in_bytes
    fits = accelerator_api() == "cuda" and c % wide == 0 and c <= 128 * wide
    fused = (
        (x.device.is_cpu() or fits)
        and kernel in (1, 3, 5)
        and 2 * padding_kv < kernel
        and all(filter.dense is not None for filter in filters)
    )
    if not fused:
        y = layernorm(x, *norm, eps)
        image = (y[:, 1:] if class_token else y).reshape((x.shape[0], *size, c))
        outputs = []
        for filter, stride, padding in zip(
            filters, (1, stride_kv, stride_kv), (padding_q, padding_kv, padding_kv), strict=True
        ):
            out = conv2d(image, filter, stride=stride, padding=padding)
            out = out.reshape((x.shape[0], out.shape[1] * out.shape[2], c))
            outputs.append(ops.concat([y[:, :1], out], axis=1) if class_token else out)
        return outputs[0], outputs[1], outputs[2]
    window = [int(class_token), *size, kernel, padding_q, padding_kv, stride_kv]
    values = [x, *norm]
    for filter in filters:
        values += [filter.dense, filter.bias]
    values += [_host([eps], DType.float32), _host(window, DType.int64)]
    keys = TensorType(x.dtype, [x.shape[0], p * q + class_token, c], device=x.device)
    results = _customs(name, values, [x.type, keys, keys], {"kernel": kernel})
    return results[0], results[1], results[2]


def class_token(tokens: TensorValue, token: TensorValue) -> TensorValue:
    """Puts token[C] before the tokens [N, T, C] of each image: [N, T + 1, C].

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    if tokens.rank != 3 or list(token.shape) != [tokens.shape[2]]:
        raise ArgumentError(
            f"class_token: expects tokens [N, T, C] and a token [C]"
            f" but has {list(tokens.shape)} and {list(token.shape)}"
        )
    n, t, c = tokens.shape
    out = TensorType(tokens.dtype, [n, t + 1, c], device=tokens.device)
    return _custom("class_token", [tokens, token], out)


def supported(dtype: DType, device: DeviceRef) -> bool:
    """Tells whether the ops compute in ``dtype`` on ``device``."""
    return dtype in _dtypes(device)


def _dtypes(device: DeviceRef) -> tuple[DType, ...]:
    return CPU_DTYPES if device.is_cpu() else GPU_DTYPES


def _tf32(x: TensorValue, allowed: bool) -> bool:
    """Tells whether a product may round to TF32; what cannot is one instance of a kernel."""
    return allowed and x.dtype == DType.float32 and not x.device.is_cpu()


def _fused(
    name: str,
    x: TensorValue,
    weights: Sequence[Any],
    residual: TensorValue | None,
    settings: Sequence[TensorValue],
    out: TensorType,
    epilogue: str,
    parameters: Mapping[str, Any] | None = None,
) -> TensorValue:
    """Adds a node with an epilogue; the ones that add are an op of their own with a residual."""
    if epilogue not in EPILOGUES:
        raise ArgumentError(
            f"{name}: epilogue expects one of {', '.join(EPILOGUES)} but is {epilogue!r}"
        )
    adds = epilogue.startswith("add")
    if adds != (residual is not None):
        raise ArgumentError(
            f"{name}: epilogue {epilogue!r} expects {'a' if adds else 'no'} residual"
        )
    inputs = [x, *weights]
    if residual is not None:
        if list(residual.shape) != list(out.shape):
            raise ArgumentError(
                f"{name}: residual expects the output's shape {list(out.shape)}"
                f" but has {list(residual.shape)}"
            )
        inputs.append(residual)
    parameters = {"epilogue": epilogue, **(parameters or {})}
    return _custom(f"{name}_add" if adds else name, [*inputs, *settings], out, parameters)


def _stem(
    name: str,
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    stride: int,
    padding: int,
) -> tuple[list[TensorValue], TensorValue, dict[str, int], int, int] | None:
    """Checks a stem; gives the fused op's inputs, its window, its parameters, and P and Q."""
    h, w, c = _sizes(name, x, "x[N, H, W, C]")
    r, s, filter_c, _ = filter.shape
    if c != filter_c:
        raise ArgumentError(
            f"{name}: filter w[R, S, C, F] expects C={filter_c} but input x[N, H, W, C] has C={c}"
        )
    if (levels is not None) != (x.dtype == DType.uint8):
        expects = "mean and scale of" if levels is None else "no levels with"
        raise ArgumentError(f"{name}: expects {expects} {x.dtype.name} pixels")
    window, p, q = _window(name, (h, w), (r, s), stride, padding, 1, 1)
    if filter.fragments is None:
        return None
    mean, scale = levels or (_zeros(c, x.device), _zeros(c, x.device))
    _check_levels(name, c, mean, scale)
    values = [x, mean, scale, filter.fragments, filter.bias]
    return values, window, {"c": c, "r": r, "s": s, "stride": stride}, p, q


def _pixels(
    x: TensorValue, filter: Filter, levels: tuple[TensorValue, TensorValue] | None
) -> TensorValue:
    """Makes activations of pixels."""
    return x.cast(filter.dtype) if levels is None else normalize(x, *levels, filter.dtype)


def _check_levels(name: str, c: int, mean: TensorValue, scale: TensorValue) -> None:
    for part, value in (("mean", mean), ("scale", scale)):
        if list(value.shape) != [c]:
            raise ArgumentError(
                f"{name}: {part} expects the shape [{c}] of pixels[N, H, W, C]"
                f" but has {list(value.shape)}"
            )


def _check_norm(name: str, c: Dim | int, weight: TensorValue, bias: TensorValue) -> None:
    for part, value in (("weight", weight), ("bias", bias)):
        if list(value.shape) != [c]:
            raise ArgumentError(
                f"{name}: {part} expects the shape [{c}] of x[..., C] but has {list(value.shape)}"
            )


def _pool(
    name: str,
    x: TensorValue,
    kernel: Pair,
    stride: Pair | None,
    padding: Pair,
    dilation: Pair,
    ceil_mode: bool,
    parameters: Mapping[str, Any],
) -> TensorValue:
    h, w, c = _sizes(name, x, "x[N, H, W, C]")
    taps = _pair(kernel)
    for side, pad in zip(taps, _pair(padding), strict=True):
        if 2 * pad > side:
            raise ArgumentError(
                f"{name}: padding expects at most half the kernel {side} but is {pad}"
            )
    window, p, q = _window(
        name, (h, w), taps, kernel if stride is None else stride, padding, dilation, 1, ceil_mode
    )
    out = TensorType(x.dtype, [x.shape[0], p, q, c], device=x.device)
    return _custom(name, [x, window], out, parameters)


def _window(
    name: str,
    size: tuple[int, int],
    taps: tuple[int, int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    ceil_mode: bool = False,
) -> tuple[TensorValue, int, int]:
    """Computes the output's P and Q, and the nine numbers of ops/geometry.mojo."""
    strides, pads, dilations = _pair(stride), _pair(padding), _pair(dilation)
    if min(taps + strides + dilations) < 1 or min(pads) < 0:
        raise ArgumentError(
            f"{name}: expects kernel, stride and dilation of at least 1 and padding of at least 0"
            f" but has {taps}, {strides}, {dilations} and {pads}"
        )
    out = []
    for length, tap, step, pad, spread in zip(size, taps, strides, pads, dilations, strict=True):
        room = length + 2 * pad - spread * (tap - 1) - 1
        if room < 0:
            raise ArgumentError(
                f"{name}: expects an input of at least {spread * (tap - 1) + 1 - 2 * pad} px"
                f" but has {length}"
            )
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= length + pad:
            count -= 1  # a window has to begin inside the image or its left padding
        out.append(count)
    numbers = [*taps, *strides, *pads, *dilations, groups]
    return _host(numbers, DType.int64), out[0], out[1]


def _custom(
    name: str,
    values: Sequence[Any],
    out: TensorType,
    parameters: Mapping[str, Any] | None = None,
) -> TensorValue:
    return _customs(name, values, [out], parameters)[0]


def _customs(
    name: str,
    values: Sequence[Any],
    outs: Sequence[TensorType],
    parameters: Mapping[str, Any] | None = None,
) -> list[TensorValue]:
    out = outs[0]
    takes = _dtypes(out.device)
    if out.device.is_cpu() and name.startswith("sparse"):
        takes = takes[:1]
    if out.dtype not in takes:
        raise DeviceError(
            f"{name}: a {'CPU' if out.device.is_cpu() else 'GPU'} expects"
            f" {', '.join(d.name for d in takes)} but the dtype is {out.dtype.name}"
        )
    results = ops.custom(
        name, device=out.device, values=values, out_types=outs, parameters=parameters
    )
    return [result.tensor for result in results]


def _host(numbers: Sequence[float], dtype: DType) -> TensorValue:
    """Makes a constant that a kernel's launch code reads: it stays in host memory."""
    return ops.constant(np.array(numbers, dtype.to_numpy()), dtype, device=DeviceRef.CPU())


def _zeros(count: int, device: DeviceRef) -> TensorValue:
    return ops.constant(np.zeros(count, np.float32), DType.float32, device=device)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _static(name: str, dim: Dim, what: str) -> int:
    if not isinstance(dim, StaticDim):
        raise ArgumentError(f"{name}: expects a known {what} but it is {dim}")
    return int(dim)


def _sizes(name: str, x: TensorValue, what: str) -> tuple[int, int, int]:
    if x.rank != 4:
        raise ArgumentError(f"{name}: expects {what} but x has rank {x.rank}")
    h, w, c = (_static(name, dim, what) for dim in x.shape[1:])
    return h, w, c
