"""What the rules of both importers share, on values of the program and arrays of numpy.

bridge/aten.py and bridge/onnx_ops.py say what each op of torch and of ONNX is; both call these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxvision.bridge.importer import Importer, Known, Unsupported, array, known_weight
from maxvision.graphs.net import Value
from maxvision.graphs.shapes import broadcast
from maxvision.graphs.types import Size, product


def axis_of(x: Value, axis: int) -> int:
    """Counts an axis from the front."""
    return axis % max(len(x.shape), 1)


# --- elementwise -------------------------------------------------------------------------------

_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_NOTHING = {"add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1}
"""The numbers that change nothing on the right."""


def binary(imp: Importer, op: str, a: Any, b: Any) -> Value:
    """Adds an op of two values, or of a value and a number."""
    net = imp.net
    a, b = (_number(each) if _is_single(each) else each for each in (a, b))
    if isinstance(b, (int, float)) and (op in ("div", "pow") or b % 1):
        a = floats(imp, imp.value(a))  # what torch makes of integers then
    if isinstance(b, (int, float)):
        if _NOTHING.get(op) == b:
            return imp.value(a)
        return net.op(op, [imp.value(a)], other=float(b))
    if isinstance(a, (int, float)):
        b = imp.value(b)
        if op in ("add", "mul", "maximum", "minimum", "eq", "ne"):
            return binary(imp, op, b, a)
        if op in _TURNED:
            return binary(imp, _TURNED[op], b, a)
        if op == "sub":
            return binary(imp, "add", net.op("neg", [b]), a)
        if op == "div":
            return binary(imp, "mul", net.op("reciprocal", [b]), a)
        raise Unsupported("a number on the left")
    a, b = imp.value(a), imp.value(b)
    if a.type.dtype != b.type.dtype:
        a, b = _alike(imp, floats(imp, a), floats(imp, b))
    return net.op(op, [a, b])


def _alike(imp: Importer, *given: Value) -> list[Value]:
    """Casts floats to the widest dtype of those that have axes, as torch does."""
    dtypes = {each.type.dtype for each in [x for x in given if x.shape] or given}
    widest = dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"
    return [cast(imp, each, widest) for each in given]


def cast(imp: Importer, x: Value, dtype: str) -> Value:
    """Casts a value where values keep their dtypes."""
    return x if not imp.exact or x.type.dtype == dtype else imp.net.op("cast", [x], dtype=dtype)


def where(imp: Importer, condition: Any, a: Any, b: Any) -> Value:
    """Chooses between floats, one of which may be a number of the expression, or between others."""
    net, given = imp.net, [imp.value(condition)]
    first, second = (isinstance(each, Value) and "float" in each.type.dtype for each in (a, b))
    if second and _is_single(a) and not first:
        return net.op("pointwise", [*given, b], expression=f"x0 {_number(a)!r} x1 where")
    if first and _is_single(b) and not second:
        return net.op("where", [*given, a], other=_number(b))
    return net.op("where", [*given, imp.value(a), imp.value(b)])


def floats(imp: Importer, x: Value) -> Value:
    """Makes floats of integers and truth values."""
    return x if "float" in x.type.dtype else imp.net.op("cast", [x], dtype=imp.floats)


def logic(imp: Importer, op: str, *given: Any) -> Value:
    """Computes ``not``, ``and`` or ``or`` of truth values."""
    values = [imp.value(each) for each in given]
    if any(each.type.dtype != "bool" for each in values):
        raise Unsupported("logic on numbers")
    numbers = [floats(imp, each) for each in values]
    if op == "not":
        return imp.net.op("eq", numbers, other=0.0)
    return imp.net.op("gt", [imp.net.op({"and": "mul", "or": "add"}[op], numbers)], other=0.0)


def _is_single(x: Any) -> bool:
    return isinstance(x, Known) and len(x.values) == 1 and x.values[0].ndim == 0


def _number(x: Known) -> float:
    return float(x.values[0])


def clamp(imp: Importer, x: Value, low: float | None, high: float | None) -> Value:
    """Keeps numbers within limits, if there are any."""
    limits: dict[str, Any] = {}
    limits |= {} if low is None else {"min": float(low)}
    limits |= {} if high is None else {"max": float(high)}
    return imp.net.op("clamp", [x], **limits) if limits else x


# --- lines as images ---------------------------------------------------------------------------


def image(x: Value) -> Value:
    """Makes images of lines [N, C, L]: their height is 1."""
    return x.net.reshape(x, *image_of(x.shape)) if len(x.shape) == 3 else x


def image_of(shape: Sequence[Size]) -> Sequence[Size]:
    """Gives the shape of ``image``."""
    return shape if len(shape) == 4 else (*shape[:2], 1, shape[2])


# --- layers ------------------------------------------------------------------------------------


def conv_transpose2d(
    imp: Importer,
    module: str,
    x: Value,
    weight: Any,
    bias: Any,
    *,
    stride: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Value:
    """Convolves with the filter turned over, zeros between the pixels.

    Args:
        imp: The importer.
        module: What to call the layer if its weight is no parameter of the source.
        x: Images [N, C, H, W].
        weight: Of the shape [C, F / groups, R, S].
        bias: Of the shape [F], or None.
        stride: Down and across; so is ``dilation``.
        pads: What is cut off above, left, below and right of the result; what comes around it
            where a number is below 0.
        dilation: See ``stride``.
        groups: Of channels.
    """
    c, h, w = x.size(1), x.size(2), x.size(3)
    r, s = known_weight(weight).values[0].shape[2:]
    net = imp.net
    if max(stride) > 1:
        x = net.reshape(x, x.shape[0], c, h, 1, w, 1)
        x = net.op("pad", [x], pads=(0, 0, 0, 0, 0, 0, 0, stride[0] - 1, 0, 0, 0, stride[1] - 1))
        x = net.reshape(x, x.shape[0], c, h * stride[0], w * stride[1])
    ends = [d * (k - 1) for d, k in zip(dilation, (r, s), strict=True)]
    top, left = (end - pad for end, pad in zip(ends, pads[:2], strict=True))
    bottom, right = (
        end - pad - (step - 1) for end, pad, step in zip(ends, pads[2:], stride, strict=True)
    )
    x = padded(imp, x, [left, right, top, bottom])

    def turned(filters: Any) -> np.ndarray:
        whole = array(filters)
        split = whole.reshape(groups, -1, *whole.shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(split.reshape(-1, *split.shape[2:])[:, :, ::-1, ::-1])

    layer, weights = imp.layer(module, imp.applied(weight, turned), bias)
    window = plain({"stride": (1, 1), "padding": (0, 0), "dilation": (dilation[0], dilation[1])})
    return net.op("conv2d", [x, *weights], layer, **window, groups=groups)


def matmul(imp: Importer, module: str, a: Any, b: Any) -> Value:
    """Multiplies two values, or a value and a matrix, which makes it a linear layer."""
    net = imp.net
    if is_matrix(b) and isinstance(a, Value) and len(a.shape) > 1:
        turned = imp.applied(b, lambda w: np.ascontiguousarray(array(w).T))
        layer, weights = imp.layer(module, turned)
        return net.op("linear", [a, *weights], layer)
    if isinstance(b, Known) and len(b.values) == 1 and b.values[0].ndim == 1:
        layer, weights = imp.layer(module, imp.applied(b, lambda w: array(w)[None]))
        y = net.op("linear", [imp.value(a), *weights], layer)
        return net.reshape(y, *y.shape[:-1])
    if is_matrix(a) and len(b.shape) >= 2:
        layer, weights = imp.layer(module, a)
        return transposed(imp, net.op("linear", [transposed(imp, b), *weights], layer))
    a, b = imp.value(a), imp.value(b)
    if len(a.shape) == 1 or len(b.shape) == 1:
        raise Unsupported("a vector in a product")
    leading = broadcast("matmul", *(each.type._replace(shape=each.shape[:-2]) for each in (a, b)))
    a = spread(imp, a, (*leading, *a.shape[-2:]))
    if any(size != 1 for size in b.shape[:-2]):
        b = spread(imp, b, (*leading, *b.shape[-2:]))
    return net.op("matmul", [a, b])


def is_matrix(x: Any) -> bool:
    """Tells whether something is a matrix that no input decides."""
    return isinstance(x, Known) and len(x.values) == 1 and x.values[0].ndim == 2


def batch_norm(imp: Importer, module: str, x: Value, *given: Any, eps: float) -> Value:
    """Adds a batch norm of x[N, C, ...]; ``given`` are weight, bias, mean and variance."""
    c = x.size(1)
    fills = (1.0, 0.0, 0.0, 1.0)
    weights = [
        imp.constant(np.full(c, fill, np.float32)) if each is None else imp.weight(each)
        for each, fill in zip(given, fills, strict=True)
    ]
    image = x
    if len(x.shape) != 4:
        image = imp.net.reshape(x, x.shape[0], c, 1, product(x.shape[2:]))
    y = imp.net.op("batch_norm", [image, *weights], module, eps=float(eps))
    return imp.net.reshape(y, *x.shape) if y.shape != x.shape else y


def layer_norm(
    imp: Importer, module: str, x: Value, axes: int, weight: Any, bias: Any, eps: float
) -> Value:
    """Norms the last ``axes`` axes of x as one."""
    shape = [x.size(i) for i in range(len(x.shape) - axes, len(x.shape))]
    flat = imp.net.reshape(x, *x.shape[:-axes], math.prod(shape)) if axes > 1 else x
    weights = affine(imp, shape, weight, bias)
    y = imp.net.op("layer_norm", [flat, *weights], module, eps=float(eps))
    return imp.net.reshape(y, *x.shape) if axes > 1 else y


def group_norm(
    imp: Importer, module: str, x: Value, groups: int, weight: Any, bias: Any, eps: float
) -> Value:
    """Norms groups of the channels of x[N, C, ...]."""
    weights = affine(imp, [x.size(1)], weight, bias)
    return imp.net.op("group_norm", [x, *weights], module, groups=groups, eps=float(eps))


def affine(imp: Importer, shape: Sequence[int], weight: Any, bias: Any) -> list[Value]:
    """Gives the weight and bias of a norm as vectors; ones and zeros if there are none."""
    size = math.prod(shape)
    found = []
    for given, fill in ((weight, 1.0), (bias, 0.0)):
        if given is None:
            found.append(imp.constant(np.full(size, fill, np.float32)))
        elif isinstance(given, Known) and tuple(given.values[0].shape) != (size,):
            found.append(imp.weight(imp.applied(given, lambda w: array(w).reshape(size))))
        else:
            found.append(imp.weight(given))
    return found


def on_last(imp: Importer, op: str, values: Sequence[Value], axis: int) -> Value:
    """Adds an op of the last axis, on another one, of values of one shape."""
    axis, last = axis_of(values[0], axis), len(values[0].shape) - 1
    if axis == last:
        return imp.net.op(op, values)
    axes = [a for a in range(last + 1) if a != axis] + [axis]
    back = [axes.index(a) for a in range(last + 1)]
    return imp.net.permute(imp.net.op(op, [imp.net.permute(x, *axes) for x in values]), *back)


def lstm(
    imp: Importer, module: str, x: Value, weights: Sequence[Any], backwards: bool = False
) -> list[Value]:
    """Writes each step of a recurrent layer down (Hochreiter and Schmidhuber 1997).

    Args:
        imp: The importer.
        module: What to call its layers if their weights are no parameters of the source.
        x: Tokens [N, T, C].
        weights: [4 H, C] and [4 H, H], and perhaps the bias [4 H] of each, the gates in torch's
            order: input, forget, cell, output.
        backwards: Whether it begins with the last token.

    Returns:
        The states h[N, 1, H] behind each token, in the order of the tokens, and the last c.
    """
    net = imp.net
    biases = weights[2:] if len(weights) > 2 else (None, None)
    name, given = imp.layer(module, weights[0], biases[0])
    gates = net.op("linear", [x, *given], name)  # of all steps
    name, recurrent = imp.layer(module, weights[1], biases[1])
    h = c = None
    outs: list[Value] = []
    steps = x.size(1)
    for step in range(steps - 1, -1, -1) if backwards else range(steps):
        gate = net.slice(gates, 1, step, step + 1) if steps > 1 else gates
        if h is not None:
            gate = net.add(gate, net.op("linear", [h, *recurrent], name))
        elif len(recurrent) > 1:
            gate = net.add(gate, recurrent[1])
        width = gate.size(2) // 4
        i, f, g, o = (net.slice(gate, 2, k * width, (k + 1) * width) for k in range(4))
        new = net.op("mul", [net.op("sigmoid", [i]), net.op("tanh", [g])])
        if c is not None:
            new = net.add(new, net.op("mul", [net.op("sigmoid", [f]), c]))
        c = new
        h = net.op("mul", [net.op("sigmoid", [o]), net.op("tanh", [c])])
        outs.append(h)
    assert c is not None
    return [*(outs[::-1] if backwards else outs), c]


def reduced(imp: Importer, op: str, x: Value, axes: Any, keepdim: bool) -> Value:
    """Reduces axes; all if none are named. The batch only where gradients of weights are."""
    rank = len(x.shape)
    axes = tuple(sorted(axis_of(x, a) for a in (axes or range(rank))))
    if not imp.exact and any(isinstance(x.shape[a], str) for a in axes):
        raise Unsupported("a reduction over the batch")
    if all(x.shape[a] == 1 for a in axes):
        return (
            x if keepdim else reshaped(imp, x, [s for a, s in enumerate(x.shape) if a not in axes])
        )
    if op == "mean" and axes == (2, 3) and rank == 4:
        y = imp.net.avg_pool2d(x)
        return y if keepdim else imp.net.reshape(y, *x.shape[:2])
    more: dict[str, Any] = {"keepdim": True} if keepdim else {}
    return imp.net.op(op, [x], axes=axes, **more)


def two(value: Any) -> tuple[int, int]:
    """Makes a pair of what torch takes for one."""
    if isinstance(value, int):
        return value, value
    return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])


def window(stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    """Writes a convolution's window down; see ``plain``."""
    return plain({"stride": two(stride), "padding": two(padding), "dilation": two(dilation)})


def by_channel(imp: Importer, vector: Any, rank: int = 4) -> Value:
    """Lays a vector [C] out to broadcast to [N, C, ...]."""
    x = imp.value(vector)
    return imp.net.reshape(x, 1, x.shape[0], *(1 for _ in range(rank - 2)))


def plain(window: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Writes a window down as Net does: one number for two that are the same, no dilation of 1."""
    plain = {name: a if a == b else (a, b) for name, (a, b) in window.items()}
    return {name: value for name, value in plain.items() if (name, value) != ("dilation", 1)}


def separable(imp: Importer, x: Value, down: Any, across: Any) -> Value:
    """Resizes x[N, C, H, W]: what happens to a line of pixels is a matrix, the same for each.

    Args:
        imp: The importer.
        x: Images.
        down: A matrix [P, H] for the columns.
        across: A matrix [Q, W] for the rows.
    """
    net = imp.net
    y = net.permute(x, 0, 2, 1, 3)  # N, H, C, W
    y = net.op("linear", [y, imp.constant(np.ascontiguousarray(array(across)))])  # N, H, C, Q
    y = net.permute(y, 0, 3, 2, 1)  # N, Q, C, H
    y = net.op("linear", [y, imp.constant(np.ascontiguousarray(array(down)))])  # N, Q, C, P
    return net.permute(y, 0, 2, 3, 1)


def enlarged(imp: Importer, x: Value, times: tuple[int, int]) -> Value:
    """Repeats each pixel of x[N, C, H, W], down and across."""
    n, c, h, w = x.shape[0], x.size(1), x.size(2), x.size(3)
    r, s = times
    y = imp.net.expand(imp.net.reshape(x, n, c, h, 1, w, 1), n, c, h, r, w, s)
    return imp.net.reshape(y, n, c, h * r, w * s)


# --- movement ----------------------------------------------------------------------------------


def reshaped(imp: Importer, x: Value, shape: Sequence[Size]) -> Value:
    """Reshapes a value, unless it has the shape."""
    return x if x.shape == tuple(shape) else imp.net.reshape(x, *shape)


def in_memory(imp: Importer, x: Value, stride: Sequence[int]) -> Value:
    """Lays a tensor's numbers out in a row, as strides say that they lie in memory."""
    order = sorted(range(len(stride)), key=lambda axis: -stride[axis])
    _check_dense([x.size(axis) for axis in order], [stride[axis] for axis in order])
    y = x if order == sorted(order) else imp.net.permute(x, *order)
    return reshaped(imp, y, [math.prod(x.size(axis) for axis in order)])


def from_memory(imp: Importer, x: Value, size: Sequence[int], stride: Sequence[int]) -> Value:
    """Undoes ``in_memory``."""
    order = sorted(range(len(stride)), key=lambda axis: -stride[axis])
    sizes = [size[axis] for axis in order]
    _check_dense(sizes, [stride[axis] for axis in order])
    if math.prod(sizes) != x.size(0):
        raise Unsupported("a part of a tensor's memory")
    y = reshaped(imp, x, sizes)
    back = [order.index(axis) for axis in range(len(order))]
    return y if back == sorted(back) else imp.net.permute(y, *back)


def _check_dense(size: Sequence[int], stride: Sequence[int]) -> None:
    """Makes sure that axes, the outermost first, lie in memory without holes."""
    step = 1
    for length, apart in reversed(list(zip(size, stride, strict=True))):
        if length not in (0, 1) and apart != step:
            raise Unsupported("a tensor with holes in memory")
        step *= length


def spread(imp: Importer, x: Value, shape: Sequence[Size]) -> Value:
    """Broadcasts a value to a shape."""
    x = reshaped(imp, x, (*(1 for _ in range(len(shape) - len(x.shape))), *x.shape))
    return x if x.shape == tuple(shape) else imp.net.expand(x, *shape)


def tiled(imp: Importer, x: Value, times: Sequence[Any], shape: Sequence[Size]) -> Value:
    """Repeats a value along each axis, ``times`` as often, which makes ``shape`` of it."""
    full = (*(1 for _ in range(len(shape) - len(x.shape))), *x.shape)
    net = imp.net
    y = reshaped(imp, x, full)
    if all(1 in (size, count) for size, count in zip(full, times, strict=True)):
        return spread(imp, y, shape)
    split = [part for size in full for part in (1, size)]
    wide = [part for size, count in zip(full, times, strict=True) for part in (count, size)]
    return net.reshape(net.expand(net.reshape(y, *split), *wide), *shape)


def transposed(imp: Importer, x: Value) -> Value:
    """Swaps the last two axes."""
    axes = [*range(len(x.shape))]
    axes[-2:] = axes[-1], axes[-2]
    return imp.net.permute(x, *axes)


def cut(imp: Importer, x: Value, axis: int, sizes: Sequence[int]) -> list[Value]:
    """Cuts an axis into parts."""
    parts, start = [], 0
    for size in sizes:
        parts.append(imp.net.slice(x, axis, start, start + size) if size != x.size(axis) else x)
        start += size
    return parts


def joined(imp: Importer, parts: Sequence[Any], axis: int) -> Value:
    """Puts values one behind the other; a constant for all images is repeated."""
    held = [part for part in parts if isinstance(part, Value) or 0 not in part.values[0].shape]
    values = [imp.value(part) for part in held]
    axis = axis_of(values[0], axis)
    if any(isinstance(v.shape[axis], str) for v in values):
        raise Unsupported("batches put together")
    shape = [
        next((v.shape[a] for v in values if v.shape[a] != 1), 1)
        for a in range(len(values[0].shape))
    ]
    for i, v in enumerate(values):
        wanted = tuple(v.shape[axis] if a == axis else size for a, size in enumerate(shape))
        values[i] = spread(imp, v, wanted)
    return imp.net.concat(values, axis) if len(values) > 1 else values[0]


def picked(imp: Importer, x: Value, axis: int, order: Any) -> Value:
    """Takes the numbers of an axis in an order, an array or a tensor of any shape."""
    return imp.net.op("gather", [x, imp.constant(array(order).astype(np.int64))], axis=axis)


def taken(imp: Importer, x: Value, axis: int, index: Value, own: bool = False) -> Value:
    """Takes places of an axis; ``own`` says that every batch of the axes before has its own."""
    _within_images(x, axis)
    held = imp.tensors.get(index.name)
    if held is not None and np.array_equal(held.reshape(-1), np.arange(x.shape[axis])):
        return reshaped(imp, x, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    more: dict[str, Any] = {"batch_axes": axis} if own else {}
    return imp.net.op("gather", [x, index], axis=axis, **more)


def scattered(imp: Importer, x: Value, axis: int, index: Value, values: Value) -> Value:
    """Adds values to the places of an axis; the index is broadcast to them."""
    _within_images(x, axis)
    sizes = (*(1 for _ in range(len(values.shape) - len(index.shape))), *index.shape)
    wanted = values.shape
    if all(size == 1 for size in sizes[axis + 1 :]):  # one index for all that is behind the axis
        index, wanted = reshaped(imp, index, sizes[: axis + 1]), wanted[: axis + 1]
    index = spread(imp, index, wanted)
    return imp.net.op("scatter_add", [x, index, values], axis=axis)


def _within_images(x: Value, axis: int) -> None:
    if isinstance(x.shape[axis], str):
        raise Unsupported(f"axis {axis} of {x.type} is the batch")


def padded(imp: Importer, x: Value, pads: Sequence[int], value: float = 0.0) -> Value:
    """Pads, or cuts where a number is below 0; the last axis comes first, as in torch."""
    rank = len(x.shape)
    around = [0] * (2 * rank)
    for i in range(len(pads) // 2):
        axis = rank - 1 - i
        before, behind = pads[2 * i], pads[2 * i + 1]
        if min(before, behind) < 0:
            x = imp.net.slice(x, axis, max(-before, 0), x.size(axis) - max(-behind, 0))
        around[2 * axis : 2 * axis + 2] = max(before, 0), max(behind, 0)
    return imp.net.op("pad", [x], pads=tuple(around), value=value) if any(around) else x


def mirrored(imp: Importer, x: Value, pads: Sequence[int], mode: Any) -> Value:
    """Pads as numpy's ``reflect``, ``edge`` or ``wrap`` does; the last axis comes first."""
    for i, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        if before or behind:
            axis = len(x.shape) - 1 - i
            if min(before, behind) < 0:
                raise Unsupported(f"padding {mode} by less than 0")
            order = np.pad(np.arange(x.size(axis)), (before, behind), mode=mode)
            x = picked(imp, x, axis, order)
    return x
