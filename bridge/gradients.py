"""What the ATen ops of training are in a program: norms by the batch's statistics, backward ops.

The rules are added to those of bridge/aten.py; ops that torch takes apart into others need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from maxvision.bridge import aten as forward
from maxvision.bridge import rules
from maxvision.bridge.aten import rule
from maxvision.bridge.fx import module_of
from maxvision.bridge.importer import Importer, Unsupported
from maxvision.graphs.net import Value

aten = torch.ops.aten


def decompositions() -> Any:
    """Gives torch's table of decompositions without those of ops that have a rule."""
    table = forward.decompositions()
    for op in KEPT:
        table.pop(op, None)
    return table


KEPT = (aten.native_layer_norm.default, aten._native_batch_norm_legit_functional.default)
"""Ops that torch would take apart, and whose statistics have a rule here."""


@rule(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    imp: Importer, node: Node, x: Value, weight: Any, bias: Any, mean: Any, var: Any,
    training: bool, momentum: float, eps: float,
) -> list[Any]:  # fmt: skip
    """Norms by the batch's own statistics: y, these, and the running statistics afterwards."""
    if not training:
        raise Unsupported("a batch norm in eval mode while it is trained")
    net, axes, given = imp.net, [0, *range(2, len(x.shape))], x.type.dtype
    x = _cast(imp, x, "float32")
    count = 1
    for axis in axes:
        count *= x.size(axis)
    middle = rules.reduced(imp, "mean", x, axes, True)
    centred = net.op("sub", [x, middle])
    spread = rules.reduced(imp, "mean", net.op("mul", [centred, centred]), axes, True)
    inverse = net.op("rsqrt", [net.op("add", [spread], other=float(eps))])
    y = net.op("mul", [centred, inverse])
    if weight is not None:
        y = net.op("mul", [y, rules.by_channel(imp, weight, len(x.shape))])
    if bias is not None:
        y = net.op("add", [y, rules.by_channel(imp, bias, len(x.shape))])
    flat = [net.reshape(each, x.shape[1]) for each in (middle, inverse, spread)]
    unbiased = net.op("mul", [flat[2]], other=count / max(1, count - 1))
    running = [
        net.op("add", [
            net.op("mul", [imp.value(held)], other=1.0 - momentum),
            net.op("mul", [now], other=float(momentum)),
        ])
        for held, now in ((mean, flat[0]), (var, unbiased))
    ]  # fmt: skip
    return [_cast(imp, y, given), flat[0], flat[1], *running]


@rule(aten.native_layer_norm.default)
def _layer_norm(
    imp: Importer, node: Node, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Any]:
    """Norms the last axes: y, and the mean and the inverse deviation, if anything reads them."""
    net, axes = imp.net, list(range(len(x.shape) - len(shape), len(x.shape)))
    given, wide = x, _cast(imp, x, "float32")
    middle = rules.reduced(imp, "mean", wide, axes, True)
    centred = net.op("sub", [wide, middle])
    spread = rules.reduced(imp, "mean", net.op("mul", [centred, centred]), axes, True)
    inverse = net.op("rsqrt", [net.op("add", [spread], other=float(eps))])
    if all(each is None or not isinstance(each, Value) for each in (weight, bias)):
        y = rules.layer_norm(imp, module_of(node), x, len(shape), weight, bias, eps)
        return [y, middle, inverse]
    y = net.op("mul", [centred, inverse])
    y = y if weight is None else net.op("mul", [y, imp.value(weight)])
    y = y if bias is None else net.op("add", [y, imp.value(bias)])
    return [_cast(imp, y, given.type.dtype), middle, inverse]


def _cast(imp: Importer, x: Value, dtype: str) -> Value:
    """Casts a value where values keep their dtypes."""
    return x if not imp.exact or x.type.dtype == dtype else imp.net.op("cast", [x], dtype=dtype)


@rule(aten.convolution_backward.default)
def _convolution_backward(
    imp: Importer, node: Node, dy: Value, x: Any, weight: Any, bias_sizes: Any, stride: Any,
    padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    wanted: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gives the gradients of x, of the filter and of the bias: those that are wanted."""
    if transposed or len(dy.shape) != 4:
        raise Unsupported("the gradient of a transposed convolution, or of other than images")
    x, weight = imp.value(x), imp.value(weight)
    window = {**rules.window(stride, padding, dilation), "groups": groups}
    found: list[Any] = [None, None, None]
    if wanted[0]:
        size = (x.size(2), x.size(3))
        found[0] = imp.net.op("conv2d_input_grad", [dy, weight], size=size, **window)
    if wanted[1]:
        kernel = (weight.size(2), weight.size(3))
        found[1] = imp.net.op("conv2d_weight_grad", [x, dy], kernel=kernel, **window)
    if wanted[2]:
        found[2] = rules.reduced(imp, "sum", dy, [0, 2, 3], False)
    return found


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


@rule(aten.any.dim)
def _any(imp: Importer, node: Node, x: Value, axis: int, keepdim: bool = False) -> Value:
    largest = rules.reduced(imp, "amax", rules.floats(imp, x), [axis], keepdim)
    return imp.net.op("gt", [largest], other=0.0)


@rule(aten._softmax_backward_data.default)
def _softmax_backward(imp: Importer, node: Node, dy: Value, y: Any, axis: int, dtype: Any) -> Value:
    """Computes y * (dy - sum(y * dy))."""
    y = imp.value(y)
    total = rules.reduced(imp, "sum", imp.net.op("mul", [y, dy]), [axis], True)
    return imp.net.op("mul", [y, imp.net.op("sub", [dy, total])])


def without_indices(graph: torch.fx.Graph) -> None:
    """Leaves out the places of maxima that torch saves for the way back: x has them too."""
    for node in graph.find_nodes(
        op="call_function", target=aten.max_pool2d_with_indices_backward.default
    ):
        node.args = (*node.args[:-1], None)
    graph.eliminate_dead_code()
