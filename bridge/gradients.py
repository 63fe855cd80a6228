"""What the ATen ops of training are in a program: norms by the batch's statistics, backward ops.

The rules are added to those of bridge/aten.py; ops that torch takes apart into others need none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.fx import Node

import maxvision.bridge.attention  # noqa: F401  registers ops that have rules here
from maxvision.bridge import aten as forward
from maxvision.bridge import rules
from maxvision.bridge.aten import rule
from maxvision.bridge.importer import Importer, Unsupported
from maxvision.graphs.net import Value
from maxvision.graphs.shapes import wide
from maxvision.graphs.types import product

aten = torch.ops.aten


def decompositions() -> Any:
    """Gives torch's table of decompositions without those of ops that have a rule."""
    table = forward.decompositions()
    for op in (*KEPT, *_resizing_ops()):
        table.pop(op, None)
    return table


KEPT = (
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default,
    aten.embedding_dense_backward.default, aten.gelu_backward.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default,
)  # fmt: skip
"""Ops that torch would take apart, and that have a rule here."""


_PLAIN = dict(forward.RULES)
"""The rules for inference, which some of those here take the place of, and call."""


for _name in ("add", "sub", "mul", "div"):
    _op = getattr(aten, _name)
    rule(_op.Scalar)(lambda *given, _same=_PLAIN[_op.Tensor], **named: _same(*given, **named))


@rule(aten.as_strided.default)
def _as_strided(
    imp: Importer, node: Node, x: Value, size: Any, stride: Any, offset: int | None = 0
) -> Value:
    """Reads all of a tensor's memory as it lies there, with other axes."""
    held = node.args[0].meta["val"]  # type: ignore[union-attr]
    if offset:
        raise Unsupported("a part of a tensor's memory")
    lies = rules.in_memory(imp, x, held.stride())
    return rules.from_memory(imp, lies, size, stride)


@rule(aten.as_strided_scatter.default)
def _as_strided_scatter(
    imp: Importer, node: Node, x: Any, onto: Any, size: Any, stride: Any, offset: int | None = 0
) -> Value:
    """Fills all of a tensor's memory."""
    whole = node.meta["val"]
    if offset or math.prod(size) != whole.numel():
        raise Unsupported("a part of a tensor's memory")
    lies = rules.in_memory(imp, imp.value(onto), stride)
    return rules.from_memory(imp, lies, whole.shape, whole.stride())


@rule(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, mean: Any, var: Any,
    training: bool, momentum: float, eps: float,
) -> list[Any]:  # fmt: skip
    """Norms by the batch's own statistics: y, these, and the running statistics afterwards."""
    if not training:
        raise Unsupported("a batch norm in eval mode while it is trained")
    net = imp.net
    count = math.prod(x.size(axis) for axis in range(len(x.shape)) if axis != 1)
    y, middle, inverse, spread = _normed_by_channel(imp, x, weight, bias, eps)
    unbiased = net.op("mul", [spread], other=count / max(1, count - 1))
    running = [
        net.op("add", [
            net.op("mul", [imp.value(held)], other=1.0 - momentum),
            net.op("mul", [now], other=float(momentum)),
        ])
        for held, now in ((mean, middle), (var, unbiased))
    ]  # fmt: skip
    return [y, middle, inverse, *running]


@rule(aten.native_layer_norm.default)
def _layer_norm(
    imp: Importer, node: Node, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Any]:
    """Norms the last axes: y, and the mean and the inverse deviation, if anything reads them."""
    net, axes = imp.net, list(range(len(x.shape) - len(shape), len(x.shape)))
    given = x
    known = not any(isinstance(each, Value) for each in (weight, bias))
    if not any(user.args[1] for user in node.users):
        if known:
            y, *_ = _PLAIN[aten.native_layer_norm.default](imp, node, x, shape, weight, bias, eps)
            return [y, None, None]
        vectors = (
            imp.constant(torch.full([math.prod(shape)], fill)) if each is None
            else _as_one(imp.value(each), shape)
            for each, fill in ((weight, 1.0), (bias, 0.0))
        )  # fmt: skip
        y = net.op("layer_norm", [_as_one(x, shape), *vectors], eps=float(eps))
        return [net.reshape(y, *x.shape), None, None]
    y, middle, inverse, _ = _normed(imp, _widened(imp, x), axes, eps)
    if known:
        y, *_ = _PLAIN[aten.native_layer_norm.default](imp, node, x, shape, weight, bias, eps)
        return [y, middle, inverse]
    y = y if weight is None else net.op("mul", [y, imp.value(weight)])
    y = y if bias is None else net.op("add", [y, imp.value(bias)])
    return [rules.cast(imp, y, given.type.dtype), middle, inverse]


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    imp: Importer, node: Node, dy: Any, x: Any, shape: Sequence[int], middle: Any, eps: Any,
    weight: Any, bias: Any, wanted: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gives the gradients of x, of the weight and of the bias; ``lean`` says eps."""
    if middle is not None:
        raise Unsupported("the gradient of a layer norm that is not in its graph")
    dy, x = imp.value(dy), imp.value(x)
    given = [_as_one(dy, shape), _as_one(x, shape)]
    if weight is not None:
        given.append(_as_one(imp.value(weight), shape))
    dx, *vectors = imp.net.several("layer_norm_grad", given, eps=float(eps))
    found = [imp.net.reshape(dx, *x.shape), *(imp.net.reshape(v, *shape) for v in vectors)]
    return [each if asked else None for each, asked in zip(found, wanted, strict=True)]


def _as_one(x: Value, shape: Sequence[int]) -> Value:
    """Makes one axis of the last ones, which have a shape."""
    if len(shape) == 1:
        return x
    return x.net.reshape(x, *x.shape[: len(x.shape) - len(shape)], math.prod(shape))


@rule(aten.native_group_norm.default)
def _group_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, n: Any, c: int, size: int,
    groups: int, eps: float,
) -> list[Any]:  # fmt: skip
    """Norms groups of channels: y, and means and inverse deviations, if anything reads them."""
    net, given = imp.net, x.type.dtype
    whole = net.reshape(_widened(imp, x), x.shape[0], groups, c // groups * size)
    y, middle, inverse, _ = _normed(imp, whole, [2], eps)
    if all(each is None or not isinstance(each, Value) for each in (weight, bias)):
        sizes = (n, c, size, groups, eps)
        y, *_ = _PLAIN[aten.native_group_norm.default](imp, node, x, weight, bias, *sizes)
    else:
        y = rules.cast(imp, _by_channel(imp, net.reshape(y, *x.shape), weight, bias), given)
    return [y, *(net.reshape(each, x.shape[0], groups) for each in (middle, inverse))]


@rule(aten._native_batch_norm_legit.no_stats)
def _batch_norm_alone(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, training: bool, momentum: float,
    eps: float,
) -> list[Any]:  # fmt: skip
    """Norms by the batch's statistics, which are not kept: y, the means, inverse deviations."""
    return _normed_by_channel(imp, x, weight, bias, eps)[:3]


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    imp: Importer, node: Node, dy: Value, x: Any, weight: Any, mean: Any, var: Any, middle: Any,
    inverse: Any, training: bool, eps: float, wanted: Sequence[bool],
) -> list[Value]:  # fmt: skip
    """Gives the gradients of x, of the weight and of the bias, from two sums by channel.

    That of x is a sum of dy, x and 1, each times a number by channel (Ioffe and Szegedy 2015,
    section 3, with its terms put together).
    """
    net, x = imp.net, imp.value(x)
    rank, axes = len(x.shape), [a for a in range(len(x.shape)) if a != 1]
    wide_dy, wide_x = _widened(imp, dy), _widened(imp, x)
    if training:
        middle, inverse = (_widened(imp, imp.value(each)) for each in (middle, inverse))
    else:
        middle, held = (_widened(imp, imp.value(each)) for each in (mean, var))
        inverse = net.op("rsqrt", [net.op("add", [held], other=float(eps))])
    centred = net.op("sub", [wide_x, rules.by_channel(imp, middle, rank)])
    total, along = (
        rules.reduced(imp, "sum", each, axes, False)
        for each in (wide_dy, net.op("mul", [wide_dy, centred]))
    )
    dweight = net.op("mul", [along, inverse])
    scale = inverse if weight is None else net.op("mul", [inverse, imp.value(weight)])
    dx = net.op("mul", [wide_dy, rules.by_channel(imp, scale, rank)])
    if training:
        share = net.op("mul", [scale], other=-1.0 / math.prod(x.size(axis) for axis in axes))
        slope = net.op("mul", [net.op("mul", [dweight, inverse]), share])
        shift = net.op("sub", [net.op("mul", [total, share]), net.op("mul", [middle, slope])])
        part = net.op("mul", [wide_x, rules.by_channel(imp, slope, rank)])
        dx = net.op("add", [dx, net.op("add", [part, rules.by_channel(imp, shift, rank)])])
    return [rules.cast(imp, dx, x.type.dtype), dweight, total]


@rule(aten.gelu_backward.default)
def _gelu_backward(
    imp: Importer, node: Node, dy: Value, x: Any, approximate: str = "none"
) -> Value:
    """Computes dy times the derivative of gelu, of the exact one or of its tanh form."""
    if approximate == "none":
        return rules.binary(imp, "mul", dy, imp.net.op("gelu_grad", [imp.value(x)]))
    a = math.sqrt(2 / math.pi)
    inner = f"x1 x1 x1 mul x1 mul 0.044715 mul add {a!r} mul tanh"
    more = f"x1 x1 mul {3 * 0.044715!r} mul 1.0 add {a / 2!r} mul x1 mul"
    slope = f"{inner} 1.0 add 0.5 mul 1.0 {inner} {inner} mul sub {more} mul add"
    given = [dy, imp.value(x)]
    return imp.net.op("pointwise", given, expression=f"x0 {slope} mul", dtype=dy.type.dtype)


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_frozen(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, mean: Any, var: Any,
    momentum: float, eps: float,
) -> list[Any]:  # fmt: skip
    """Norms by running statistics, which stay as they are."""
    if not any(isinstance(each, Value) for each in (weight, bias, mean, var)):
        plain = _PLAIN[aten._native_batch_norm_legit_no_training.default]
        found: list[Any] = plain(imp, node, x, weight, bias, mean, var, momentum, eps)
        return found
    net, rank = imp.net, len(x.shape)
    inverse = net.op("rsqrt", [net.op("add", [imp.value(var)], other=float(eps))])
    centred = net.op("sub", [_widened(imp, x), rules.by_channel(imp, mean, rank)])
    y = net.op("mul", [centred, rules.by_channel(imp, inverse, rank)])
    return [rules.cast(imp, _by_channel(imp, y, weight, bias), x.type.dtype), None, None]


def _normed(imp: Importer, x: Value, axes: Sequence[int], eps: float) -> list[Value]:
    """Norms by the mean and variance along axes: y, means, inverse deviations and variances."""
    net = imp.net
    middle = rules.reduced(imp, "mean", x, axes, True)
    centred = net.op("sub", [x, middle])
    spread = rules.reduced(imp, "mean", net.op("mul", [centred, centred]), axes, True)
    inverse = net.op("rsqrt", [net.op("add", [spread], other=float(eps))])
    return [net.op("mul", [centred, inverse]), middle, inverse, spread]


def _normed_by_channel(imp: Importer, x: Value, weight: Any, bias: Any, eps: float) -> list[Value]:
    """Norms channels by the batch: y as x, and by channel means, inverse deviations and variances.

    One pass over x sums its distances from its first pixel, and their squares. These are not much
    larger than the deviation, so their difference is exact; the squares of x itself would not be
    where the mean is far from 0 (Chan, Golub and LeVeque 1983, on shifted data).
    """
    net, wide, c = imp.net, _widened(imp, x), x.size(1)
    rank, axes = len(x.shape), [0, *range(2, len(x.shape))]
    pixels = net.reshape(net.permute(x, *axes, 1), product(x.shape[axis] for axis in axes), c)
    first = net.reshape(net.op("slice", [pixels], axis=0, start=0, stop=1), c)
    first = _widened(imp, first)
    apart = net.op("sub", [wide, rules.by_channel(imp, first, rank)])
    squared = net.op("mul", [apart, apart])
    near, spread = (rules.reduced(imp, "mean", each, axes, False) for each in (apart, squared))
    spread = net.op("sub", [spread, net.op("mul", [near, near])])
    spread = net.op("clamp", [spread], min=0.0)
    inverse = net.op("rsqrt", [net.op("add", [spread], other=float(eps))])
    middle = net.op("add", [first, near])
    scale = inverse if weight is None else net.op("mul", [inverse, imp.value(weight)])
    shift = net.op("mul", [middle, scale])
    shift = net.op("neg", [shift]) if bias is None else net.op("sub", [imp.value(bias), shift])
    y = net.op("mul", [wide, rules.by_channel(imp, scale, rank)])
    y = net.op("add", [y, rules.by_channel(imp, shift, rank)])
    return [rules.cast(imp, y, x.type.dtype), middle, inverse, spread]


def _by_channel(imp: Importer, y: Value, weight: Any, bias: Any) -> Value:
    """Scales and shifts channels, where there are weights for that."""
    for op, each in (("mul", weight), ("add", bias)):
        if each is not None:
            y = imp.net.op(op, [y, rules.by_channel(imp, each, len(y.shape))])
    return y


def _widened(imp: Importer, x: Value) -> Value:
    """Casts a value to what statistics of it are in."""
    return rules.cast(imp, x, wide(x.type.dtype))


@rule(aten.convolution_backward.default)
def _convolution_backward(
    imp: Importer, node: Node, dy: Value, x: Any, weight: Any, bias_sizes: Any, stride: Any,
    padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    wanted: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gives the gradients of x, of the filter and of the bias: those that are wanted.

    A transposed convolution is the gradient of one's input, so its own are that convolution and
    the gradient of its filter.
    """
    x, weight = imp.value(x), imp.value(weight)
    shapes, line = (x.shape, weight.shape), len(dy.shape) == 3
    if line:  # images of a row
        dy, x, weight = map(rules.image, (dy, x, weight))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    if len(dy.shape) != 4:
        raise Unsupported("the gradient of a convolution of other than images")
    window = {**rules.window(stride, padding, dilation), "groups": groups}
    net = imp.net
    made: list[Any] = [None, None, None]
    if wanted[0] and transposed:
        made[0] = net.op("conv2d", [dy, weight], **window)
    elif wanted[0]:
        size = (x.size(2), x.size(3))
        made[0] = net.op("conv2d_input_grad", [dy, weight], size=size, **window)
    if wanted[1]:
        kernel = (weight.size(2), weight.size(3))
        pair = [dy, x] if transposed else [x, dy]
        made[1] = net.op("conv2d_weight_grad", pair, kernel=kernel, **window)
    if line:
        made[:2] = (
            each if each is None else net.reshape(each, *shape)
            for each, shape in zip(made[:2], shapes, strict=True)
        )  # fmt: skip
    if wanted[2]:
        made[2] = rules.reduced(imp, "sum", dy, [0, 2, 3], False)
    return made


@rule(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(
    imp: Importer, node: Node, dy: Value, x: Any, kernel: Any, stride: Any, padding: Any,
    dilation: Any, ceil_mode: bool, indices: Any,
) -> Value:  # fmt: skip
    """Gives each pixel the gradients of the windows whose first maximum it is."""
    window = rules.window(stride or kernel, padding, dilation)
    more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
    given = [imp.value(x), dy]
    return imp.net.op("max_pool2d_grad", given, kernel=rules.two(kernel), **window, **more)


@rule(aten.avg_pool2d_backward.default)
def _avg_pool2d_backward(
    imp: Importer, node: Node, dy: Value, x: Any, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool, count_include_pad: bool, divisor_override: Any,
) -> Value:  # fmt: skip
    """Gives each pixel its part of the gradients of the windows that average it."""
    kernel, size = rules.two(kernel), (x.size(2), x.size(3))
    stride = rules.two(stride or kernel)
    if divisor_override is not None:
        if ceil_mode or not count_include_pad:
            raise Unsupported("divisor_override and windows that are cut")
        dy = imp.net.op("mul", [dy], other=math.prod(kernel) / divisor_override)
    if ceil_mode and rules.two(padding) == (0, 0):  # what hangs over the edge does not count
        kernel = min(kernel[0], size[0]), min(kernel[1], size[1])
    window = rules.plain({"kernel": kernel, "stride": stride, "padding": rules.two(padding)})
    more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
    more |= {} if count_include_pad else {"count_include_pad": False}
    return imp.net.op("avg_pool2d_grad", [dy], size=size, **window, **more)


@rule(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool2d_backward(imp: Importer, node: Node, dy: Value, x: Any) -> Value:
    size, (p, q) = (x.size(2), x.size(3)), (dy.size(2), dy.size(3))
    if size[0] % p == size[1] % q == 0:
        window = rules.plain(dict.fromkeys(("kernel", "stride"), (size[0] // p, size[1] // q)))
        return imp.net.op("avg_pool2d_grad", [dy], size=size, **window)
    down, across = (forward.averages(a, b).t() for a, b in zip(size, (p, q), strict=True))
    return rules.separable(imp, dy, down, across)


@rule(aten.adaptive_max_pool2d_backward.default)
def _adaptive_max_pool2d_backward(
    imp: Importer, node: Node, dy: Value, x: Any, indices: Any
) -> Value:
    """Gives each pixel the gradients of the windows whose first maximum it is."""
    x = imp.value(x)
    held, into = (x.size(2), x.size(3)), (dy.size(2), dy.size(3))
    if any(a % b for a, b in zip(held, into, strict=True)):
        raise Unsupported(f"{held[0]} x {held[1]} px in windows of unlike sizes")
    window = dict.fromkeys(("kernel", "stride"), (held[0] // into[0], held[1] // into[1]))
    return imp.net.op("max_pool2d_grad", [x, dy], **rules.plain(window))


_RESIZING = {
    aten.upsample_nearest2d_backward.default: aten.upsample_nearest2d,
    aten._upsample_nearest_exact2d_backward.default: aten._upsample_nearest_exact2d,
    aten.upsample_bilinear2d_backward.default: aten.upsample_bilinear2d,
    aten.upsample_bicubic2d_backward.default: aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa_backward.default: aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa_backward.default: aten._upsample_bicubic2d_aa,
}
"""The ops that resize images, by their gradients'."""


@rule(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
def _resizing(imp: Importer, node: Node, *given: Any) -> Any:
    """Resizes images as inference does, where torch has not taken that apart."""
    return _PLAIN[aten.upsample_bilinear2d.vec](imp, node, *given)


@rule(*_RESIZING)
def _resizing_backward(
    imp: Importer, node: Node, dy: Value, into: Any, size: Sequence[int], *rest: Any
) -> Value:
    """Gives each pixel what it had a part in: the matrices of the op, turned."""
    op, scales = _RESIZING[node.target].default, (*rest, None, None)  # type: ignore[index]
    corners: tuple[bool, ...] = ()
    held = size[2:]
    if any(each.name == "align_corners" for each in op._schema.arguments):
        corners, scales = (bool(rest[0]),), scales[1:]
    matrices = forward.resizing(op, held, into, scales[:2], *corners)
    times = [long // short for long, short in zip(into, held, strict=True)]
    repeats = (torch.eye(n).repeat_interleave(by, 0) for n, by in zip(held, times, strict=True))
    if all(torch.equal(a, b) for a, b in zip(matrices, repeats, strict=True)):
        window = rules.plain(dict.fromkeys(("kernel", "stride"), (times[0], times[1])))
        mean = imp.net.op("avg_pool2d", [dy], **window)
        return imp.net.op("mul", [mean], other=float(math.prod(times)))
    return rules.separable(imp, dy, *(each.t() for each in matrices))


def _resizing_ops() -> list[Any]:
    return [getattr(op, name) for op in _RESIZING.values() for name in op.overloads()]


@contextmanager
def resizing_whole() -> Iterator[None]:
    """Keeps torch from taking resizing apart ahead of a trace, into gathers and scatters."""
    ops = _resizing_ops()
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    held = [(op, key, op.py_kernels.pop(key)) for op in ops for key in keys if key in op.py_kernels]
    for op in ops:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in held:
            op.py_kernels[key] = kernel
        for op in ops:
            op._dispatch_cache.clear()


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(
    imp: Importer, node: Node, dy: Value, indices: Any, rows: int, padding: int, by_count: bool
) -> Value:
    """Adds the gradients of tokens to the rows of the table that they are of."""
    if by_count:
        raise Unsupported("scale_grad_by_freq")
    index, c, net = imp.value(indices), dy.size(-1), imp.net
    count = product(dy.shape[:-1])
    tokens, index = net.reshape(dy, count, c), net.reshape(index, count, 1)
    if padding >= 0:
        tokens = net.op("where", [net.op("ne", [index], other=float(padding)), tokens], other=0.0)
    zeros = imp.constant(torch.zeros(rows, c))
    sums = rules.scattered(imp, zeros, 0, index, _widened(imp, tokens))
    return rules.cast(imp, sums, dy.type.dtype)


@rule(aten.scatter.value)
def _scatter_value(imp: Importer, node: Node, x: Any, axis: int, index: Any, value: float) -> Value:
    """Puts a number at one place of an axis, as the gradient of nll_loss does."""
    x, index = imp.value(x), imp.value(index)
    axis = rules.axis_of(x, axis)
    if index.shape != tuple(1 if a == axis else size for a, size in enumerate(x.shape)):
        raise Unsupported("several places of an axis")
    along = [-1 if a == axis else 1 for a in range(len(x.shape))]
    places = imp.constant(torch.arange(x.size(axis)).reshape(along))
    return imp.net.op("where", [imp.net.op("ne", [index, places]), x], other=float(value))


for _name, _op in {"mean": aten.mean, "amax": aten.max, "amin": aten.min}.items():
    rule(_op.default)(
        lambda imp, node, x, _name=_name, **_: rules.reduced(imp, _name, x, None, False)
    )


@rule(aten.log1p.default)
def _log1p(imp: Importer, node: Node, x: Value) -> Value:
    """Computes log(u) x / (u - 1) of u = 1 + x, which takes what u was rounded to into account."""
    net = imp.net
    u = net.op("add", [x], other=1.0)
    log, rest = net.op("log", [u]), net.op("sub", [u], other=1.0)
    y = net.op("mul", [log, net.op("div", [x, rest])])
    y = net.op("where", [net.op("eq", [rest], other=0.0), x, y])
    return net.op("where", [net.op("gt", [x], other=1.0), log, y])


@rule(aten.isnan.default)
def _isnan(imp: Importer, node: Node, x: Value) -> Value:
    return imp.net.op("ne", [x, x])


@rule(aten.any.dim)
def _any(imp: Importer, node: Node, x: Value, axis: int, keepdim: bool = False) -> Value:
    largest = rules.reduced(imp, "amax", rules.floats(imp, x), [axis], keepdim)
    return imp.net.op("gt", [largest], other=0.0)


@rule(aten._softmax_backward_data.default)
def _softmax_backward(imp: Importer, node: Node, dy: Value, y: Any, axis: int, dtype: Any) -> Value:
    y = imp.value(y)
    return rules.on_last(imp, "softmax_grad", [rules.cast(imp, dy, y.type.dtype), y], axis)


@rule(torch.ops.maxvision._attention_logsumexp.default)
def _attention(
    imp: Importer, node: Node, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float
) -> list[Value]:
    """Attends, tokens whose heads lie side by side; a query that sees no key gets zeros."""
    q, k, v = (imp.value(each) for each in (q, k, v))
    rest = _scores(imp, q, k, mask, causal, scale)
    y, kept = imp.net.several("attention", [_tokens(q), _tokens(k), _tokens(v), *rest.bias],
                              logsumexp=True, **rest.settings)  # fmt: skip
    y = _heads(y, q)
    if rest.mask is not None:
        seen = imp.net.op("gt", [kept], other=-math.inf)
        y = imp.net.op("where", [imp.net.reshape(seen, *kept.shape, 1), y], other=0.0)
    return [y, kept]


@rule(torch.ops.maxvision._attention_logsumexp_backward.default)
def _attention_backward(
    imp: Importer, node: Node, dy: Value, q: Any, k: Any, v: Any, y: Any, kept: Any, mask: Any,
    causal: bool, scale: float,
) -> list[Value]:  # fmt: skip
    q, k, v, y = (imp.value(each) for each in (q, k, v, y))
    rest = _scores(imp, q, k, mask, causal, scale)
    tokens = map(_tokens, (q, k, v, y, dy))
    given = [*tokens, imp.value(kept), *rest.bias]
    found = imp.net.several("attention_grad", given, **rest.settings)
    return [_heads(each, like) for each, like in zip(found, (q, k, v), strict=True)]


class _Scores(NamedTuple):
    """What is done to the scores of attention: a mask as kernels read it, if any, and settings."""

    mask: Value | None
    bias: list[Value]
    settings: dict[str, Any]


def _scores(imp: Importer, q: Value, k: Value, mask: Any, causal: bool, scale: float) -> _Scores:
    found = forward.mask_value(imp, mask)
    sizes: dict[str, Any] = {"heads": q.size(1), "queries": q.size(2), "keys": k.size(2)}
    bias = [] if found is None else [imp.net.op("attention_bias", [found], **sizes)]
    return _Scores(found, bias, {"heads": q.size(1), "scale": scale, "causal": causal})


def _tokens(x: Value) -> Value:
    """Lays heads [N, heads, T, D] side by side: [N, T, heads * D]."""
    n, heads, t, d = x.shape
    return x.net.reshape(x.net.permute(x, 0, 2, 1, 3), n, t, int(heads) * int(d))


def _heads(x: Value, like: Value) -> Value:
    """Gives tokens [N, T, heads * D] the axes of heads [N, heads, T, D]."""
    n, heads, _, d = like.shape
    return x.net.permute(x.net.reshape(x, n, x.shape[1], heads, d), 0, 2, 1, 3)


@rule(aten.detach.default)
def _detach(imp: Importer, node: Node, x: Value) -> Value:
    return x


def masks_of_batch_norms(graph: torch.fx.Graph) -> None:
    """Computes where a ReLU behind a batch norm is 0 from what was normed, which is read anyway.

    The way back reads that twice, for its sums and for the gradient; it read the ReLU's result as
    often, only for this.
    """
    for node in graph.find_nodes(op="call_function", target=aten.le.Scalar):
        relu = _behind_aliases(node.args[0])
        norm = _behind_aliases(relu.args[0]) if relu.target == aten.relu.default else relu
        if norm is relu or norm.target is not operator.getitem or norm.args[1] or node.args[1]:
            continue
        made: Any = norm.args[0]
        if made.target != aten._native_batch_norm_legit_functional.default or None in made.args[:3]:
            continue
        parts = {user.args[1]: user for user in made.users}
        x, weight, bias = made.args[:3]
        if not {1, 2} <= parts.keys() or parts[1].meta["val"].dtype != torch.float32:
            continue  # of a CPU, statistics are rounded as images are
        with graph.inserting_before(node):
            scale = _called(graph, aten.mul.Tensor, parts[2], weight)
            shift = _called(graph, aten.mul.Tensor, parts[1], scale)
            shift = _called(graph, aten.sub.Tensor, bias, shift)
            shape = [-1, *(1 for _ in x.meta["val"].shape[2:])]
            scale, shift = (_called(graph, aten.view.default, v, shape) for v in (scale, shift))
            narrow = x.meta["val"].dtype != torch.float32
            wide = _called(graph, aten._to_copy.default, x, dtype=torch.float32) if narrow else x
            scaled = _called(graph, aten.mul.Tensor, wide, scale)
            node.args = (_called(graph, aten.add.Tensor, scaled, shift), 0)


def _behind_aliases(node: Any) -> Node:
    while node.target in (aten.alias.default, aten.detach.default):
        node = node.args[0]
    found: Node = node
    return found


def _called(graph: torch.fx.Graph, op: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds a call to a graph, with what it gives."""
    node = graph.call_function(op, args, kwargs)
    values = (each.meta["val"] if isinstance(each, Node) else each for each in args)
    node.meta["val"] = op(*values, **kwargs)
    return node


def lean(graph: torch.fx.Graph) -> None:
    """Leaves out what torch saves for the way back and what rules do without.

    These are the places of maxima, which x has too, statistics of a batch that are not those by
    which it was normed, and those of a layer norm's rows, which its gradient computes again: eps is
    in the place of the inverse deviations then.
    """
    for node in _max_pools(graph):
        node.args = (*node.args[:-1], None)
    backward: Any = aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        if not node.args[7]:
            node.args = (*node.args[:5], None, None, *node.args[7:])
    for node in _layer_norms(graph):
        norm = _layer_norm_of(node.args[3])
        if norm is not None:
            node.args = (*node.args[:3], None, norm.args[4], *node.args[5:])
    graph.eliminate_dead_code()


def with_saved(module: torch.fx.GraphModule) -> None:
    """Finds what ``lean`` left out again where torch computes the way back, which needs it."""
    for node in _max_pools(module.graph):
        dy, *given, indices = node.args
        if indices is None:
            op: Any = aten.max_pool2d_with_indices.default
            if node.target == aten.adaptive_max_pool2d_backward.default:
                op = aten.adaptive_max_pool2d.default
                given.append(list(dy.meta["val"].shape[-2:]))  # type: ignore[union-attr]
            (places,) = _found_again(module.graph, node, op, given, [1])
            node.args = (*node.args[:-1], places)
    for node in _layer_norms(module.graph):
        dy, x, shape, middle, eps, weight, bias, wanted = node.args
        if middle is None:
            norm: Any = aten.native_layer_norm.default
            given = [x, shape, weight, bias, eps]
            saved = _found_again(module.graph, node, norm, given, [1, 2])
            node.args = (dy, x, shape, *saved, weight, bias, wanted)
    module.recompile()


def _found_again(
    graph: torch.fx.Graph, node: Node, op: Any, given: Sequence[Any], places: Sequence[int]
) -> list[Node]:
    """Computes an op of the way there ahead of a node, which reads some of its outputs."""
    with graph.inserting_before(node):
        made = graph.call_function(op, tuple(given))
        return [graph.call_function(operator.getitem, (made, place)) for place in places]


def _max_pools(graph: torch.fx.Graph) -> list[Node]:
    ops = aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward
    return [n for op in ops for n in graph.find_nodes(op="call_function", target=op.default)]


def _layer_norms(graph: torch.fx.Graph) -> list[Node]:
    op: Any = aten.native_layer_norm_backward.default
    return list(graph.find_nodes(op="call_function", target=op))


def _layer_norm_of(saved: Any) -> Node | None:
    """Gives the layer norm of which something is a result, if it is."""
    if not isinstance(saved, Node):
        return None
    norm: Any = _behind_aliases(saved)
    if norm.target is operator.getitem:
        norm = norm.args[0]
    return norm if norm.target == aten.native_layer_norm.default else None
