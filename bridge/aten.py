"""What each ATen op is in a program: a table of short functions.

A rule takes the importer (bridge/exported.py), the node, and the op's arguments: values of the
program, tensors that are known, sizes and numbers. It gives a value, or a list of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.nn import functional as F

from maxvision.bridge import rules
from maxvision.bridge.fx import module_of, type_of
from maxvision.bridge.importer import PROBES, Importer, Known, Unsupported
from maxvision.graphs.net import Value
from maxvision.graphs.types import Size, at_batch, product

aten = torch.ops.aten


KEPT = (
    aten.conv1d.default, aten.conv2d.default, aten.conv_transpose2d.input, aten.linear.default,
    aten.matmul.default, aten.layer_norm.default, aten.group_norm.default, aten.rms_norm.default,
    aten.scaled_dot_product_attention.default, aten.silu.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.softmax.int, aten.log_softmax.int, aten.pad.default,
    aten.roll.default, aten.im2col.default, aten.col2im.default, aten.mish.default,
    aten.leaky_relu.default, aten.elu.default, aten.prelu.default, aten.softplus.default,
    aten.hardtanh.default, aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.vec, aten.stack.default, aten.adaptive_avg_pool2d.default,
    aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.lstm.input,
    aten.instance_norm.default, aten.upsample_nearest2d.default,
    aten._adaptive_avg_pool2d.default, aten.log_sigmoid.default, aten.celu.default,
    aten._upsample_nearest_exact2d.vec, aten.index_add.default,
)  # fmt: skip
"""Ops that torch would take apart, and that are one here."""

SHAPE_ONLY = (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.empty_like.default,
)  # fmt: skip
"""Ops that read the shape of a tensor, and none of its numbers."""


def decompositions() -> Any:
    """Gives torch's table of decompositions without ``KEPT``."""
    table = torch.export.default_decompositions()
    for op in KEPT:
        table.pop(op, None)
    return table


RULES: dict[Any, Callable[..., Any]] = {}
"""The rule of each op."""


def rule(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the rule of ops."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return add


def _shape(node: Node) -> tuple[Size, ...]:
    """Gives the shape that torch found for a node."""
    return type_of(node.meta["val"]).shape


# --- elementwise -------------------------------------------------------------------------------

_UNARY: dict[str, tuple[Any, ...]] = {
    "relu": (aten.relu.default,), "silu": (aten.silu.default,), "sigmoid": (aten.sigmoid.default,),
    "tanh": (aten.tanh.default,), "hardswish": (aten.hardswish.default,),
    "hardsigmoid": (aten.hardsigmoid.default,), "mish": (aten.mish.default,),
    "exp": (aten.exp.default,), "log": (aten.log.default,), "sqrt": (aten.sqrt.default,),
    "rsqrt": (aten.rsqrt.default,), "reciprocal": (aten.reciprocal.default,),
    "neg": (aten.neg.default,), "abs": (aten.abs.default,), "erf": (aten.erf.default,),
    "sin": (aten.sin.default,), "cos": (aten.cos.default,), "floor": (aten.floor.default,),
}  # fmt: skip

for _name, _ops in _UNARY.items():
    rule(*_ops)(lambda imp, node, x, _name=_name, **_: imp.net.op(_name, [x]))


@rule(aten.gelu.default)
def _gelu(imp: Importer, node: Node, x: Value, approximate: str = "none") -> Value:
    return imp.net.op("gelu" if approximate == "none" else "gelu_tanh", [x])


@rule(aten.hardtanh.default)
def _hardtanh(imp: Importer, node: Node, x: Value, low: float = -1.0, high: float = 1.0) -> Value:
    return rules.clamp(imp, x, low, high)


@rule(aten.clamp.default)
def _clamp(imp: Importer, node: Node, x: Value, min: Any = None, max: Any = None) -> Value:
    return rules.clamp(imp, x, min, max)


@rule(aten.clamp.Tensor)
def _clamp_tensor(imp: Importer, node: Node, x: Value, low: Any = None, high: Any = None) -> Value:
    y = x if low is None else rules.binary(imp, "maximum", x, low)
    return y if high is None else rules.binary(imp, "minimum", y, high)


@rule(aten.leaky_relu.default)
def _leaky_relu(imp: Importer, node: Node, x: Value, slope: float = 0.01) -> Value:
    return imp.net.op("leaky_relu", [x], slope=float(slope))


@rule(aten.elu.default)
def _elu(
    imp: Importer,
    node: Node,
    x: Value,
    alpha: float = 1.0,
    scale: float = 1,
    input_scale: float = 1,
) -> Value:
    if input_scale != 1:
        raise Unsupported(f"input_scale {input_scale}")
    y = imp.net.op("elu", [x], alpha=float(alpha))
    return y if scale == 1 else imp.net.op("mul", [y], other=float(scale))


@rule(aten.celu.default)
def _celu(imp: Importer, node: Node, x: Value, alpha: float = 1.0) -> Value:
    y = imp.net.op("elu", [rules.binary(imp, "mul", x, 1 / alpha)])
    return rules.binary(imp, "mul", y, float(alpha))


@rule(aten.softplus.default)
def _softplus(imp: Importer, node: Node, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = rules.binary(imp, "mul", x, float(beta))
    y = rules.binary(imp, "mul", imp.net.op("softplus", [scaled]), 1 / beta)
    if threshold >= 20:  # there the two are the same in float32
        return y
    return imp.net.op("where", [imp.net.op("gt", [scaled], other=float(threshold)), x, y])


@rule(aten.log_sigmoid.default)
def _log_sigmoid(imp: Importer, node: Node, x: Value) -> Value:
    return imp.net.op("neg", [imp.net.op("softplus", [imp.net.op("neg", [x])])])


@rule(aten.sign.default)
def _sign(imp: Importer, node: Node, x: Value) -> Value:
    above, below = (imp.net.op(op, [x], other=0.0) for op in ("gt", "lt"))
    return imp.net.op("sub", [rules.floats(imp, above), rules.floats(imp, below)])


@rule(aten.log2.default)
def _log2(imp: Importer, node: Node, x: Value) -> Value:
    return imp.net.op("mul", [imp.net.op("log", [x])], other=1 / math.log(2))


@rule(aten.expm1.default)
def _expm1(imp: Importer, node: Node, x: Value) -> Value:
    """Computes exp(x) - 1 as tanh(x / 2) (exp(x) + 1), which loses nothing near 0."""
    half = imp.net.op("tanh", [imp.net.op("mul", [x], other=0.5)])
    return imp.net.op("mul", [half, imp.net.op("add", [imp.net.op("exp", [x])], other=1.0)])


@rule(aten.prelu.default)
def _prelu(imp: Importer, node: Node, x: Value, slope: Known) -> Value:
    weight = imp.weight(slope)
    shape = (weight.size(0), *(1 for _ in x.shape[2:]))
    return imp.net.op("prelu", [x, imp.net.reshape(weight, *shape)])


_BINARY: dict[str, tuple[Any, ...]] = {
    "add": (aten.add.Tensor,), "sub": (aten.sub.Tensor,),
    "mul": (aten.mul.Tensor,), "div": (aten.div.Tensor,),
    "pow": (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor),
    "maximum": (aten.maximum.default,), "minimum": (aten.minimum.default,),
    "eq": (aten.eq.Tensor, aten.eq.Scalar), "ne": (aten.ne.Tensor, aten.ne.Scalar),
    "lt": (aten.lt.Tensor, aten.lt.Scalar), "le": (aten.le.Tensor, aten.le.Scalar),
    "gt": (aten.gt.Tensor, aten.gt.Scalar), "ge": (aten.ge.Tensor, aten.ge.Scalar),
}  # fmt: skip


def _add_binary(op: str) -> Callable[..., Value]:
    def binary(
        imp: Importer, node: Node, a: Any, b: Any, *, alpha: float = 1, **rest: Any
    ) -> Value:
        if rest.get("rounding_mode"):
            raise Unsupported(f"rounding_mode {rest['rounding_mode']}")
        if isinstance(b, str) or isinstance(a, str):
            raise Unsupported("the batch as a number")
        if alpha != 1:
            b = b * alpha if isinstance(b, (int, float)) else rules.binary(imp, "mul", b, alpha)
        return rules.binary(imp, op, a, b)

    return binary


for _name, _ops in _BINARY.items():
    rule(*_ops)(_add_binary(_name))


@rule(aten.where.self)
def _where(imp: Importer, node: Node, condition: Any, a: Any, b: Any) -> Value:
    return rules.where(imp, condition, a, b)


@rule(aten.logical_not.default, aten.bitwise_not.default)
def _not(imp: Importer, node: Node, x: Value) -> Value:
    return rules.logic(imp, "not", x)


@rule(aten.logical_and.default, aten.bitwise_and.Tensor)
def _and(imp: Importer, node: Node, a: Any, b: Any) -> Value:
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Known) and all(bool(each.all()) for each in y.values):
            return rules.spread(imp, imp.value(x), _shape(node))
    return rules.logic(imp, "and", a, b)


@rule(aten.logical_or.default, aten.bitwise_or.Tensor)
def _or(imp: Importer, node: Node, a: Any, b: Any) -> Value:
    return rules.logic(imp, "or", a, b)


@rule(aten.clone.default, aten.alias.default)
def _same(imp: Importer, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return x


@rule(aten.copy.default)
def _copy(imp: Importer, node: Node, onto: Any, x: Any, *_: Any) -> Value:
    return rules.spread(imp, imp.value(x), _shape(node))


@rule(aten._to_copy.default)
def _cast(imp: Importer, node: Node, x: Value, dtype: Any = None, **rest: Any) -> Value:
    wanted = str(node.meta["val"].dtype).removeprefix("torch.")
    floats = all("float" in each for each in (x.type.dtype, wanted))
    if wanted == x.type.dtype or (floats and not imp.exact):
        return x
    return imp.net.op("cast", [x], dtype=wanted)


@rule(aten._assert_tensor_metadata.default)
def _nothing(imp: Importer, node: Node, *_: Any, **__: Any) -> None:
    return None


# --- layers ------------------------------------------------------------------------------------


def _layer(imp: Importer, node: Node, weight: Any, bias: Any) -> tuple[str, list[Value]]:
    return imp.layer(module_of(node), weight, bias)


@rule(aten.conv2d.default)
def _conv2d(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any = None, stride: Any = (1, 1),
    padding: Any = (0, 0), dilation: Any = (1, 1), groups: int = 1,
) -> Value:  # fmt: skip
    window = rules.window(stride, padding, dilation)
    if isinstance(weight, Value):
        y = imp.net.op("conv2d", [x, weight], **window, groups=groups)
        return y if bias is None else rules.binary(imp, "add", y, rules.by_channel(imp, bias))
    layer, weights = _layer(imp, node, weight, bias)
    return imp.net.op("conv2d", [x, *weights], layer, **window, groups=groups)


@rule(aten.convolution.default)
def _convolution(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    if transposed:
        if len(x.shape) == 4 and isinstance(weight, Value):  # the gradient of a convolution's input
            window = {**rules.window(stride, padding, dilation), "groups": groups}
            size = _shape(node)[2:]
            y = imp.net.op("conv2d_input_grad", [x, weight], size=size, **window)
            return y if bias is None else rules.binary(imp, "add", y, rules.by_channel(imp, bias))
        if len(x.shape) != 3:
            raise Unsupported("a transposed convolution of other than images")
        y = _conv_transpose2d(
            imp, node, rules.image(x), imp.applied(weight, lambda w: w.unsqueeze(2)), bias,
            (1, *_one(stride)), (0, *_one(padding)), (0, *_one(output_padding)), groups,
            (1, *_one(dilation)),
        )  # fmt: skip
        return imp.net.reshape(y, *_shape(node))
    if len(x.shape) == 3:
        return _conv1d(imp, node, x, weight, bias, stride, padding, dilation, groups)
    if len(x.shape) != 4:
        raise Unsupported("a convolution of other than images")
    return _conv2d(imp, node, x, weight, bias, stride, padding, dilation, groups)


@rule(aten.conv1d.default)
def _conv1d(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any = None, stride: Any = (1,),
    padding: Any = (0,), dilation: Any = (1,), groups: int = 1,
) -> Value:  # fmt: skip
    if isinstance(weight, Value):
        lifted: Any = rules.image(weight)
    else:
        lifted = imp.applied(weight, lambda w: w.unsqueeze(2))
    y = _conv2d(
        imp, node, rules.image(x), lifted, bias, (1, *_one(stride)), (0, *_one(padding)),
        (1, *_one(dilation)), groups,
    )  # fmt: skip
    return imp.net.reshape(y, *_shape(node))


@rule(aten.conv_transpose2d.input)
def _conv_transpose2d(
    imp: Importer, node: Node, x: Value, weight: Known, bias: Any = None, stride: Any = (1, 1),
    padding: Any = (0, 0), output_padding: Any = (0, 0), groups: int = 1, dilation: Any = (1, 1),
) -> Value:  # fmt: skip
    (pr, ps), (mr, ms) = _two(padding), _two(output_padding)
    return rules.conv_transpose2d(
        imp, module_of(node), x, weight, bias, stride=_two(stride), dilation=_two(dilation),
        pads=(pr, ps, pr - mr, ps - ms), groups=groups,
    )  # fmt: skip


@rule(aten.linear.default)
def _linear(imp: Importer, node: Node, x: Any, weight: Any, bias: Any = None) -> Value:
    if isinstance(weight, Value):
        return _with_bias(imp, _matmul(imp, node, x, rules.transposed(imp, weight)), bias)
    layer, weights = _layer(imp, node, weight, bias)
    if isinstance(x, Value) and len(x.shape) == 1:
        raise Unsupported("a vector in the place of a batch")
    return imp.net.op("linear", [imp.value(x), *weights], layer)


def _with_bias(imp: Importer, y: Value, bias: Any) -> Value:
    return y if bias is None else rules.binary(imp, "add", y, bias)


@rule(aten.addmm.default)
def _addmm(
    imp: Importer, node: Node, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1
) -> Value:
    y = rules.binary(imp, "mul", _matmul(imp, node, x, weight), alpha)
    return y if beta == 0 else _with_bias(imp, y, rules.binary(imp, "mul", imp.value(bias), beta))


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(imp: Importer, node: Node, a: Any, b: Any) -> Value:
    return rules.matmul(imp, module_of(node), a, b)


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, mean: Any, var: Any,
    momentum: float, eps: float,
) -> list[Any]:  # fmt: skip
    given = (weight, bias, mean, var)
    return [rules.batch_norm(imp, module_of(node), x, *given, eps=eps), None, None]


@rule(aten.layer_norm.default)
def _layer_norm(
    imp: Importer, node: Node, x: Value, shape: list[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn: bool = True,
) -> Value:  # fmt: skip
    return rules.layer_norm(imp, module_of(node), x, len(shape), weight, bias, eps)


@rule(aten.native_layer_norm.default)
def _native_layer_norm(
    imp: Importer, node: Node, x: Value, shape: list[int], weight: Any, bias: Any, eps: float
) -> list[Any]:
    return [_layer_norm(imp, node, x, shape, weight, bias, eps), None, None]


@rule(aten.native_group_norm.default)
def _native_group_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, n: Any, c: int, size: int,
    groups: int, eps: float,
) -> list[Any]:  # fmt: skip
    return [_group_norm(imp, node, x, groups, weight, bias, eps), None, None]


@rule(aten.rms_norm.default)
def _rms_norm(
    imp: Importer, node: Node, x: Value, shape: list[int], weight: Any = None, eps: Any = None
) -> Value:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    flat = imp.net.reshape(x, *x.shape[: -len(shape)], math.prod(shape)) if len(shape) > 1 else x
    y = imp.net.op("rms_norm", [flat, rules.affine(imp, shape, weight, None)[0]], eps=float(eps))
    return imp.net.reshape(y, *x.shape) if len(shape) > 1 else y


@rule(aten.group_norm.default)
def _group_norm(
    imp: Importer, node: Node, x: Value, groups: int, weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn: bool = True,
) -> Value:  # fmt: skip
    return rules.group_norm(imp, module_of(node), x, groups, weight, bias, eps)


@rule(aten.instance_norm.default)
def _instance_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, mean: Any, var: Any,
    use_input: bool, momentum: float, eps: float, cudnn: bool = True,
) -> Value:  # fmt: skip
    if not use_input:
        return _batch_norm(imp, node, x, weight, bias, mean, var, momentum, eps)[0]
    return _group_norm(imp, node, x, x.size(1), weight, bias, eps)


@rule(aten.scaled_dot_product_attention.default)
def attention(
    imp: Importer, node: Node, q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    """Attends; a query that sees no key gets zeros, as torch gives them."""
    q, k, v = (imp.value(each) for each in (q, k, v))
    if enable_gqa and (len(q.shape) == 3 or k.size(-3) > 1):
        k, v = (_shared(imp, each, q.size(-3)) for each in (k, v))
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    rank, net = len(q.shape), imp.net
    shapes = [each.shape for each in (q, k, v)]
    if rank == 3:
        q, k, v = (net.reshape(x, x.shape[0], 1, *x.shape[1:]) for x in (q, k, v))
    elif rank > 4:
        q, k, v = (net.reshape(x, product(x.shape[:-3]), *x.shape[-3:]) for x in (q, k, v))
    found = mask_value(imp, mask)
    if k.size(1) == v.size(1) == 1 < q.size(1):
        if found is None and not causal:  # multi-query: those of all heads are one's
            q = net.reshape(q, q.shape[0], 1, q.size(1) * q.size(2), q.size(3))
        else:
            k, v = (_shared(imp, each, q.size(1)) for each in (k, v))
    if found is not None and rank == len(found.shape) == 3:
        found = net.reshape(found, found.shape[0], 1, *found.shape[1:])
    elif found is not None and rank > 4 and len(found.shape) > 3:
        whole = rules.spread(imp, found, (*shapes[0][:-3], *found.shape[-3:]))
        found = net.reshape(whole, product(shapes[0][:-3]), *found.shape[-3:])
    more: dict[str, Any] = {"causal": True} if causal else {}
    given = [q, k, v] if found is None else [q, k, v, found]
    y = net.op("scaled_dot_product_attention", given, scale=scale, **more)
    if found is not None and isinstance(mask, Value):
        y = net.op("where", [_sees(imp, found), y], other=0.0)
    shape = (*shapes[0][:-1], shapes[2][-1])
    return y if y.shape == shape else net.reshape(y, *shape)


def _sees(imp: Importer, mask: Value) -> Value:
    """Tells which queries see a key: torch gives zeros for the others."""
    truth = mask.type.dtype == "bool"
    largest = rules.reduced(imp, "amax", rules.floats(imp, mask), [-1], True)
    return imp.net.op("gt", [largest], other=0.0 if truth else -math.inf)


def _shared(imp: Importer, x: Value, heads: int) -> Value:
    """Repeats each head [.., heads, T, D] for the queries that share it."""
    *leading, held, t, d = x.shape
    many = imp.net.expand(
        imp.net.reshape(x, *leading, held, 1, t, d), *leading, held, heads // int(held), t, d
    )
    return imp.net.reshape(many, *leading, heads, t, d)


def mask_value(imp: Importer, mask: Any) -> Value | None:
    """Makes a value of a mask; one that hides nothing and adds nothing is none."""
    if mask is None:
        return None
    if isinstance(mask, Known):
        truth = mask.values[0].dtype == torch.bool
        if all(bool(each.all() if truth else not each.any()) for each in mask.values):
            return None
    return imp.value(mask)


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(imp: Importer, node: Node, x: Value, axis: int, *_: Any, **__: Any) -> Value:
    return rules.on_last(imp, "softmax", [x], axis)


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(imp: Importer, node: Node, x: Value, axis: int, *_: Any, **__: Any) -> Value:
    return rules.on_last(imp, "log_softmax", [x], axis)


# --- windows -----------------------------------------------------------------------------------


_two = rules.two


def _one(value: Any) -> tuple[int]:
    return (value,) if isinstance(value, int) else (value[0],)


@rule(aten.max_pool2d_with_indices.default)
def _max_pool2d(
    imp: Importer, node: Node, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False,
) -> list[Any]:  # fmt: skip
    window = {
        "kernel": _two(kernel), "stride": _two(stride or kernel), "padding": _two(padding),
        "dilation": _two(dilation),
    }  # fmt: skip
    more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
    return [imp.net.op("max_pool2d", [x], **rules.plain(window), **more), None]


@rule(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool2d(imp: Importer, node: Node, x: Value, size: Any) -> list[Any]:
    held, into = (x.size(2), x.size(3)), _two(size)
    if any(a % b for a, b in zip(held, into, strict=True)):
        raise Unsupported(f"{held[0]} x {held[1]} px in windows of unlike sizes")
    window = dict.fromkeys(("kernel", "stride"), (held[0] // into[0], held[1] // into[1]))
    return [imp.net.op("max_pool2d", [x], **rules.plain(window)), None]


@rule(aten.avg_pool2d.default)
def _avg_pool2d(
    imp: Importer, node: Node, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
) -> Value:  # fmt: skip
    if divisor_override is not None:
        if ceil_mode:
            raise Unsupported("divisor_override and ceil_mode")
        y = _avg_pool2d(imp, node, x, kernel, stride, padding)
        return rules.binary(imp, "mul", y, math.prod(_two(kernel)) / divisor_override)
    kernel, stride = _two(kernel), _two(stride or kernel)
    if kernel == stride == (1, 1) and _two(padding) == (0, 0):  # each pixel by itself
        return x
    if ceil_mode and _two(padding) == (0, 0):  # what hangs over the edge does not count
        kernel = min(kernel[0], x.size(2)), min(kernel[1], x.size(3))
    window = {"kernel": kernel, "stride": stride, "padding": _two(padding)}
    more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
    if not count_include_pad:
        more["count_include_pad"] = False
    return imp.net.op("avg_pool2d", [x], **rules.plain(window), **more)


@rule(aten.avg_pool1d.default)
def _avg_pool1d(
    imp: Importer, node: Node, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> Value:  # fmt: skip
    y = _avg_pool2d(
        imp, node, rules.image(x), (1, *_one(kernel)), (1, *_one(stride or kernel)),
        (0, *_one(padding)), ceil_mode, count_include_pad,
    )  # fmt: skip
    return imp.net.reshape(y, *_shape(node))


@rule(aten.avg_pool3d.default)
def _avg_pool3d(
    imp: Importer, node: Node, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
) -> Value:  # fmt: skip
    """Pools along the first of three axes, as a local response norm does."""
    windows = [list(each) for each in (kernel, stride or kernel, padding or (0, 0, 0))]
    if [each[1:] for each in windows] != [[1, 1], [1, 1], [0, 0]]:
        raise Unsupported("windows of three axes")
    n, c, d, h, w = x.shape
    image = imp.net.reshape(x, n, c, d, product((h, w)))
    sides = [(each[0], plain) for each, plain in zip(windows, (1, 1, 0), strict=True)]
    y = _avg_pool2d(imp, node, image, *sides, ceil_mode, count_include_pad, divisor_override)
    return imp.net.reshape(y, *_shape(node))


@rule(aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(imp: Importer, node: Node, x: Value, size: Any) -> Value:
    held, into = (x.size(2), x.size(3)), _two([int(each) for each in _shape(node)[2:]])
    if into == held:  # VGG's, of pictures of the size that it was trained for
        return x
    if into == (1, 1):
        return imp.net.avg_pool2d(x)
    if not any(a % b for a, b in zip(held, into, strict=True)):
        kernel = held[0] // into[0], held[1] // into[1]
        return _avg_pool2d(imp, node, x, kernel)
    return rules.separable(imp, x, *(averages(a, b) for a, b in zip(held, into, strict=True)))


@rule(aten.adaptive_avg_pool1d.default)
def _adaptive_avg_pool1d(imp: Importer, node: Node, x: Value, size: Any) -> Value:
    length, into = x.size(-1), _one(size)[0]
    if length % into:
        return imp.net.op("linear", [x, imp.constant(averages(length, into))])
    return _avg_pool1d(imp, node, x, (length // into,))


def averages(length: int, into: int) -> torch.Tensor:
    """Gives the matrix [into, length] of an adaptive pool along a line."""
    return F.adaptive_avg_pool1d(torch.eye(length), into).t().contiguous()


_REDUCTIONS = {
    "mean": aten.mean.dim, "sum": aten.sum.dim_IntList, "amax": aten.amax.default,
    "amin": aten.amin.default,
}  # fmt: skip


for _name, _op in _REDUCTIONS.items():
    rule(_op)(
        lambda imp, node, x, axes=(), keepdim=False, _name=_name, **_: _reduced(
            imp, node, _name, x, axes, keepdim
        )
    )


def _reduced(imp: Importer, node: Node, op: str, x: Value, axes: Any, keepdim: bool) -> Value:
    """Reduces axes; truth values are counted as floats, since MAX reduces numbers alone."""
    y = rules.reduced(imp, op, rules.floats(imp, x) if x.type.dtype == "bool" else x, axes, keepdim)
    return _cast(imp, node, y) if x.type.dtype == "bool" else y


for _name, _op in {"amax": aten.max.dim, "amin": aten.min.dim}.items():  # and indices
    rule(_op)(
        lambda imp, node, x, axis, keepdim=False, _name=_name: [
            rules.reduced(imp, _name, x, [axis], keepdim), None
        ]
    )  # fmt: skip


@rule(aten.var.correction)
def _var(
    imp: Importer,
    node: Node,
    x: Value,
    axes: Any = None,
    *,
    correction: Any = 1,
    keepdim: bool = False,
) -> Value:
    rank = len(x.shape)
    wanted = [rules.axis_of(x, a) for a in (axes or range(rank))]
    count = math.prod(x.size(a) for a in wanted)
    centred = imp.net.op("sub", [x, rules.reduced(imp, "mean", x, wanted, True)])
    total = rules.reduced(imp, "sum", imp.net.op("mul", [centred, centred]), wanted, keepdim)
    return imp.net.op("mul", [total], other=1 / (count - (1 if correction is None else correction)))


@rule(aten.linalg_vector_norm.default)
def _vector_norm(
    imp: Importer, node: Node, x: Value, order: float = 2, axes: Any = None, keepdim: bool = False,
    **_: Any,
) -> Value:  # fmt: skip
    if order in (1, math.inf):
        op = "sum" if order == 1 else "amax"
        return rules.reduced(imp, op, imp.net.op("abs", [x]), axes, keepdim)
    if order != 2:
        raise Unsupported(f"the norm of order {order}")
    square = imp.net.op("mul", [x, x])
    return imp.net.op("sqrt", [rules.reduced(imp, "sum", square, axes, keepdim)])


@rule(aten.cumsum.default)
def _cumsum(imp: Importer, node: Node, x: Value, axis: int, **_: Any) -> Value:
    return imp.net.op("cumsum", [x], axis=rules.axis_of(x, axis))


# --- resizing: a product with a matrix along each axis -----------------------------------------


def _scales(size: Any, scales: Any) -> tuple[Any, Any]:
    """Gives the factors of height and width: those that torch was given, or none."""
    if len(scales) == 1:  # of .vec, which has them only where it has no size
        return (None, None) if scales[0] is None else (scales[0][0], scales[0][1])
    return (*scales, None, None)[:2]


@rule(
    aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact2d.default,
)  # fmt: skip
def _nearest(imp: Importer, node: Node, x: Value, size: Any, *scales: Any) -> Value:
    into, factors = _shape(node)[2:], _scales(size, scales)
    op = node.target.overloadpacket.default  # type: ignore[union-attr]
    orders = []
    for held, out, factor in zip((x.size(2), x.size(3)), into, factors, strict=True):
        line = torch.arange(held).float().reshape(1, 1, held, 1)
        orders.append(op(line, [out, 1], factor, None).flatten().long())
    times = [len(order) // int(held) for order, held in zip(orders, x.shape[2:], strict=True)]
    whole = (torch.arange(x.size(2 + i)).repeat_interleave(times[i]) for i in range(2))
    if all(torch.equal(a, b) for a, b in zip(orders, whole, strict=True)):
        return rules.enlarged(imp, x, (times[0], times[1]))
    for axis, order in zip((2, 3), orders, strict=True):
        x = rules.picked(imp, x, axis, order)
    return x


@rule(
    aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.vec,
    aten._upsample_bicubic2d_aa.default,
)  # fmt: skip
def _interpolate(
    imp: Importer, node: Node, x: Value, size: Any, corners: bool, *scales: Any
) -> Value:
    op = node.target.overloadpacket.default  # type: ignore[union-attr]
    given = (x.size(2), x.size(3)), _shape(node)[2:], _scales(size, scales)
    return rules.separable(imp, x, *resizing(op, *given, corners))


def resizing(op: Any, held: Any, into: Any, scales: Any, *corners: bool) -> list[torch.Tensor]:
    """Gives what an op that resizes images does to their columns and to their rows.

    Args:
        op: Of torch.
        held: Height and width, px.
        into: What they become.
        scales: The factors, or None.
        corners: The setting align_corners of ops that have it.

    Returns:
        Two matrices [into, held].
    """
    made = []
    for long, out, factor in zip(held, into, scales, strict=True):
        lines = torch.eye(long).reshape(1, 1, long, long)
        made.append(op(lines, [out, long], *corners, factor, None)[0, 0])
    return made


# --- movement ----------------------------------------------------------------------------------


@rule(aten.view.default, aten.squeeze.dims, aten.unsqueeze.default)
def _reshape(imp: Importer, node: Node, x: Value, *_: Any) -> Value:
    return rules.reshaped(imp, x, _shape(node))


@rule(aten.permute.default)
def _permute(imp: Importer, node: Node, x: Value, axes: list[int]) -> Value:
    return imp.net.permute(x, *(rules.axis_of(x, a) for a in axes))


@rule(aten.expand.default)
def _expand(imp: Importer, node: Node, x: Value, *_: Any, **__: Any) -> Value:
    return rules.spread(imp, x, _shape(node))


@rule(aten.repeat.default)
def _repeat(imp: Importer, node: Node, x: Value, times: list[Any]) -> Value:
    return rules.tiled(imp, x, times, _shape(node))


@rule(aten.slice.Tensor)
def _slice(
    imp: Importer, node: Node, x: Value, axis: int = 0, start: Any = None, stop: Any = None,
    step: int = 1,
) -> Value | Known:  # fmt: skip
    axis = rules.axis_of(x, axis)
    if _shape(node) == x.shape and step == 1:
        return x
    if isinstance(x.shape[axis], str):
        raise Unsupported("a slice of the batch")
    begin, end, _ = slice(start, stop).indices(x.size(axis))
    if end <= begin:
        return imp.empty()
    return imp.net.slice(x, axis, begin, end, step)


@rule(aten.select.int)
def _select(imp: Importer, node: Node, x: Value, axis: int, index: int) -> Value:
    axis = rules.axis_of(x, axis)
    if isinstance(x.shape[axis], str):
        raise Unsupported("one image of the batch")
    index %= x.size(axis)
    y = imp.net.slice(x, axis, index, index + 1) if x.size(axis) > 1 else x
    return imp.net.reshape(y, *_shape(node))


@rule(aten.split_with_sizes.default)
def _split(imp: Importer, node: Node, x: Value, _: Any, axis: int = 0) -> list[Value]:
    axis = rules.axis_of(x, axis)
    return rules.cut(imp, x, axis, [int(each.shape[axis]) for each in node.meta["val"]])


@rule(aten.cat.default)
def _cat(imp: Importer, node: Node, parts: list[Any], axis: int = 0) -> Value:
    if imp.exact:  # torch takes the widest dtype
        parts = [_cast(imp, node, imp.value(each)) for each in parts]
    return rules.joined(imp, parts, axis)


@rule(aten.stack.default)
def _stack(imp: Importer, node: Node, parts: list[Any], axis: int = 0) -> Value:
    axis %= len(node.meta["val"].shape)
    values = []
    for part in parts:
        value = imp.value(part)
        values.append(imp.net.reshape(value, *value.shape[:axis], 1, *value.shape[axis:]))
    return imp.net.concat(values, axis)


@rule(aten.slice_scatter.default)
def _slice_scatter(
    imp: Importer, node: Node, x: Any, source: Any, axis: int = 0, start: Any = None,
    stop: Any = None, step: int = 1,
) -> Value:  # fmt: skip
    x, source = imp.value(x), imp.value(source)
    axis = rules.axis_of(x, axis)
    wanted = tuple(source.shape[axis] if a == axis else size for a, size in enumerate(x.shape))
    source = rules.spread(imp, source, wanted)
    if isinstance(x.shape[axis], str) or x.shape[axis] == source.shape[axis]:
        return source
    begin, end, _ = slice(start, stop).indices(x.size(axis))
    if step != 1:
        order = torch.arange(x.size(axis))
        order[begin:end:step] = x.size(axis) + torch.arange(source.size(axis))
        return rules.picked(imp, imp.net.concat([x, source], axis), axis, order)
    parts = [imp.net.slice(x, axis, 0, begin)] if begin else []
    parts.append(source)
    if end < x.size(axis):
        parts.append(imp.net.slice(x, axis, end, x.size(axis)))
    return imp.net.concat(parts, axis)


@rule(aten.constant_pad_nd.default)
def _constant_pad(imp: Importer, node: Node, x: Value, pads: list[int], value: float = 0) -> Value:
    return rules.padded(imp, x, pads, float(value))


@rule(aten.pad.default)
def _pad(
    imp: Importer, node: Node, x: Value, pads: list[int], mode: str = "constant", value: Any = None
) -> Value:
    if not any(pads):
        return x
    if mode == "constant":
        return rules.padded(imp, x, pads, float(value or 0))
    return rules.mirrored(imp, x, pads, _MODES[mode])


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
"""The modes of padding, as numpy calls them."""


@rule(aten.roll.default)
def _roll(imp: Importer, node: Node, x: Value, shifts: list[int], axes: list[int] = []) -> Value:  # noqa: B006
    if not axes:
        raise Unsupported("all axes as one")
    by_axis: dict[int, int] = {}
    for shift, axis in zip(shifts, axes, strict=True):
        axis = rules.axis_of(x, axis)
        by_axis[axis] = (by_axis.get(axis, 0) + shift) % x.size(axis)
    turns = sorted((axis, shift) for axis, shift in by_axis.items() if shift)
    for i in range(0, len(turns), 2):  # the op takes two at a time
        some, by = zip(*turns[i : i + 2], strict=True)
        x = imp.net.op("roll", [x], shifts=by, axes=some)
    return x


@rule(aten.flip.default)
def _flip(imp: Importer, node: Node, x: Value, axes: list[int]) -> Value:
    for axis in axes:
        x = rules.picked(imp, x, rules.axis_of(x, axis), np.arange(x.size(axis))[::-1])
    return x


@rule(aten.index_select.default)
def _index_select(imp: Importer, node: Node, x: Any, axis: int, indices: Any) -> Value:
    x = imp.value(x)
    return imp.net.op("gather", [x, imp.value(indices)], axis=rules.axis_of(x, axis))


@rule(aten.embedding.default)
def _embedding(imp: Importer, node: Node, table: Any, indices: Any, *_: Any) -> Value:
    table = table if isinstance(table, Value) else imp.weight(table)
    return imp.net.op("gather", [table, imp.value(indices)], axis=0)


@rule(aten.gather.default)
def _gather(imp: Importer, node: Node, x: Any, axis: int, indices: Any, **_: Any) -> Value | Known:
    if isinstance(x, Known) and len({n for each in x.values for n in each.unique().tolist()}) == 1:
        return _filled(x.values[0].flatten()[0], _shape(node))
    x, indices = imp.value(x), imp.value(indices)
    axis = rules.axis_of(x, axis)
    for a, size in enumerate(indices.shape):
        if a != axis and size != x.shape[a]:
            x = imp.net.slice(x, a, 0, indices.size(a))
    rows = _unspread(imp, node.args[2], axis)
    if rows is not None and rows.shape[:axis] == x.shape[:axis]:
        index = imp.net.reshape(rows, *rows.shape[: axis + 1])
        return rules.taken(imp, x, axis, index, axis > 0)
    last = len(x.shape) - 1
    order = [a for a in range(last + 1) if a != axis] + [axis]
    y = rules.taken(imp, imp.net.permute(x, *order), last, imp.net.permute(indices, *order), True)
    return imp.net.permute(y, *(order.index(a) for a in range(last + 1)))


def _unspread(imp: Any, node: Any, axis: int) -> Value | None:
    """Gives what indices were expanded from, if all behind an axis are the same."""
    while isinstance(node, Node) and node.target is aten.expand.default:
        node = node.args[0]
        found = imp.value(imp.env[node])
        if all(size == 1 for size in found.shape[axis + 1 :]):
            return found
    return None


def _filled(number: torch.Tensor, shape: tuple[Size, ...]) -> Known:
    """Makes a tensor of one number."""
    several = any(isinstance(size, str) for size in shape)
    sizes = [[at_batch(size, n) for size in shape] for n in PROBES[: 1 + several]]
    return Known(tuple(number.expand(each).contiguous() for each in sizes))


@rule(aten.scatter_add.default)
def _scatter_add(imp: Importer, node: Node, x: Any, axis: int, indices: Any, values: Any) -> Value:
    x, indices, values = (imp.value(each) for each in (x, indices, values))
    for a, size in enumerate(indices.shape):  # of the values as many count as there are indices
        if size != values.shape[a]:
            values = imp.net.slice(values, a, 0, indices.size(a))
    axis = rules.axis_of(x, axis)
    rows = _unspread(imp, node.args[2], axis)
    if rows is not None and rows.shape[: axis + 1] == indices.shape[: axis + 1]:
        indices = rows
    return rules.scattered(imp, x, axis, indices, values)


@rule(aten.scatter_reduce.two)
def _scatter_reduce(
    imp: Importer, node: Node, x: Any, axis: int, indices: Any, values: Any, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    if reduce != "sum" or not include_self:
        raise Unsupported(f"reduce={reduce!r}, include_self={include_self}")
    return _scatter_add(imp, node, x, axis, indices, values)


@rule(aten.index_add.default)
def _index_add(
    imp: Importer, node: Node, x: Any, axis: int, indices: Any, values: Any, *, alpha: float = 1
) -> Value:
    x, indices = imp.value(x), imp.value(indices)
    axis = rules.axis_of(x, axis)
    along = [indices.shape[0] if a == axis else 1 for a in range(len(x.shape))]
    values = rules.binary(imp, "mul", imp.value(values), alpha)
    return rules.scattered(imp, x, axis, imp.net.reshape(indices, *along), values)


@rule(aten.index_put.default)
def _index_put(
    imp: Importer, node: Node, x: Any, indices: list[Any], values: Any, accumulate: bool = False
) -> Value:
    if not accumulate:
        raise Unsupported("numbers that take the place of others")
    shape = _shape(node)
    x, axis, index, own = _indexed(imp, imp.value(x), indices)
    index = imp.value(index)
    front, places, behind = x.shape[:axis], index.shape[own:], x.shape[axis + 1 :]
    values = rules.spread(imp, imp.value(values), (*front, *places, *behind))
    values = rules.reshaped(imp, values, (*front, product(places), *behind))
    lead = front if own else [1] * axis
    index = imp.net.reshape(index, *lead, product(places), *[1] * len(behind))
    return rules.reshaped(imp, rules.scattered(imp, x, axis, index, values), shape)


@rule(aten.index.Tensor)
def _index(imp: Importer, node: Node, x: Any, indices: list[Any]) -> Value:
    x, axis, index, own = _indexed(imp, imp.value(x), indices)
    return rules.reshaped(imp, rules.taken(imp, x, axis, imp.value(index), own), _shape(node))


def _indexed(imp: Importer, x: Value, indices: list[Any]) -> tuple[Value, int, Any, bool]:
    """Makes one index of several.

    Returns:
        x, its indexed axes as one; the axis; its index; and whether that begins with the batch,
        for each image of which it is another.
    """
    axes = [a for a, index in enumerate(indices) if index is not None]
    given = [indices[a] for a in axes]
    if axes != [*range(axes[0], axes[0] + len(axes))]:
        raise Unsupported("indices of axes that are not neighbours")
    rank = max(_rank(each) for each in given)
    images = len(given) > 1 and axes[0] == 0 and _is_every_image(given[0], rank)
    if images:
        axes, given = axes[1:], given[1:]
    index = given[0]
    if len(given) > 1:
        if not all(isinstance(each, Known) and len(each.values) == 1 for each in given):
            raise Unsupported("several indices that hang on the input")
        sizes = [x.size(a) for a in axes]
        index = 0
        for each, size in zip(given, sizes, strict=True):
            index = index * size + each.values[0] % size
        x = imp.net.reshape(x, *x.shape[: axes[0]], math.prod(sizes), *x.shape[axes[-1] + 1 :])
        index = Known((index,))
    elif isinstance(index, Known) and index.values[0].dtype != torch.bool:
        index = imp.applied(index, lambda i: i % x.size(axes[0]))  # those below 0
    if images and isinstance(index, Known) and len(index.values) == 1 and _rank(index) == rank:
        index = imp.applied(index, lambda i: i[0])
    index = imp.value(index)
    if index.type.dtype == "bool":
        raise Unsupported("a mask as an index")
    own = images and len(index.shape) == rank and index.shape[0] == x.shape[0]
    if images and not own and len(index.shape) == rank:  # the same for all images
        index = imp.net.reshape(index, *index.shape[1:])
    return x, axes[0], index, own


def _rank(index: Any) -> int:
    return len(index.shape) if isinstance(index, Value) else index.values[0].ndim


def _is_every_image(index: Any, rank: int) -> bool:
    """Tells whether an index names the images of the batch in their order, along its first axis."""
    return (
        isinstance(index, Known)
        and len(index.values) == len(PROBES)
        and all(
            each.ndim == rank
            and each.shape[0] == each.numel() == batch
            and torch.equal(each.flatten(), torch.arange(batch))
            for each, batch in zip(index.values, PROBES, strict=True)
        )
    )


@rule(aten.unfold.default)
def _unfold(imp: Importer, node: Node, x: Value, axis: int, size: int, step: int) -> Value:
    axis = rules.axis_of(x, axis)
    count = (x.size(axis) - size) // step + 1
    order = torch.arange(count)[:, None] * step + torch.arange(size)
    y = rules.picked(imp, x, axis, order)  # the window behind its number
    axes = [a for a in range(len(y.shape)) if a != axis + 1]
    return imp.net.permute(y, *axes, axis + 1)


@rule(aten.im2col.default)
def _im2col(
    imp: Importer, node: Node, x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Value:
    (r, s), (dr, ds), (pr, ps), (tr, ts) = map(_two, (kernel, dilation, padding, stride))
    net, (n, c, *_) = imp.net, x.shape
    x = rules.padded(imp, x, [ps, ps, pr, pr])
    p = (x.size(2) - dr * (r - 1) - 1) // tr + 1
    q = (x.size(3) - ds * (s - 1) - 1) // ts + 1
    taps = []
    for i in range(r):
        for j in range(s):
            y = x
            for axis, first, count, step in ((2, i * dr, p, tr), (3, j * ds, q, ts)):
                y = net.slice(y, axis, first, first + (count - 1) * step + 1, step)
            taps.append(net.reshape(y, n, c, 1, p * q))
    return net.reshape(net.concat(taps, 2), *_shape(node))


@rule(aten.col2im.default)
def _col2im(
    imp: Importer, node: Node, x: Value, size: Any, kernel: Any, dilation: Any, padding: Any,
    stride: Any,
) -> Value:  # fmt: skip
    (h, w), (r, s), (dr, ds) = map(_two, (size, kernel, dilation))
    (pr, ps), (tr, ts) = map(_two, (padding, stride))
    net, n = imp.net, x.shape[0]
    c = x.size(1) // (r * s)
    p, q = (h + 2 * pr - dr * (r - 1) - 1) // tr + 1, (w + 2 * ps - ds * (s - 1) - 1) // ts + 1
    taps, total = net.reshape(x, n, c, r * s, p, q), None
    for i in range(r):
        for j in range(s):
            tap = net.reshape(net.slice(taps, 2, i * s + j, i * s + j + 1), n, c, p, 1, q, 1)
            if tr > 1 or ts > 1:
                tap = net.op("pad", [tap], pads=(0, 0, 0, 0, 0, 0, 0, tr - 1, 0, 0, 0, ts - 1))
            tap = net.reshape(tap, n, c, p * tr, q * ts)
            tap = rules.padded(
                imp, tap,
                [j * ds - ps, w + ps - j * ds - q * ts, i * dr - pr, h + pr - i * dr - p * tr],
            )  # fmt: skip
            total = tap if total is None else net.add(total, tap)
    assert total is not None
    return total


@rule(aten.lstm.input)
def _lstm(
    imp: Importer, node: Node, x: Value, state: list[Any], weights: list[Any], has_biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> list[Any]:  # fmt: skip
    net, each = imp.net, 4 if has_biases else 2
    if any(isinstance(h, Value) or any(bool(v.any()) for v in h.values) for h in state):
        raise Unsupported("a first state other than 0")
    if len(weights) != each * layers * (1 + bidirectional):
        raise Unsupported("a projection")
    if not batch_first:
        x = net.permute(x, 1, 0, 2)
    for layer in range(layers):
        ends = []
        for turned in range(1 + bidirectional):
            at = (layer * (1 + bidirectional) + turned) * each
            given = weights[at : at + each]
            *states, _ = rules.lstm(imp, module_of(node), x, given, bool(turned))
            ends.append(net.concat(states, 1))
        x = net.concat(ends, 2) if bidirectional else ends[0]
    return [x if batch_first else net.permute(x, 1, 0, 2), None, None]
