"""What each ONNX operator is in a program: a table of short functions.

A rule takes the importer (bridge/onnx_file.py), the node, and the operator's inputs, None for one
that is left out, with its attributes by name. Inputs are values of the program or arrays that are
known. It gives a value, or a list of them. https://onnx.ai/onnx/operators describes the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxvision.bridge import rules
from maxvision.bridge.importer import Importer, Known, Unsupported, array, known_weight, size_from
from maxvision.bridge.resizing import matrix
from maxvision.graphs.net import Value
from maxvision.graphs.shapes import broadcast
from maxvision.graphs.types import BATCH, Size, Type, multiple, product, split


@dataclass(frozen=True)
class OnnxNode:
    """A node of an ONNX graph, without its tensors.

    Attributes:
        op: The operator.
        module: The module that it is from, as its name says; its weight's name if it says nothing.
        outputs: How many it gives.
        opset: The version of ONNX's operators.
        fixed: Whether the file is for single images, and the batch takes the place of that 1.
    """

    op: str
    module: str = ""
    outputs: int = 1
    opset: int = 13
    fixed: bool = False


RULES: dict[str, Callable[..., Any]] = {}
"""The rule of each operator."""


def _rule(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return add


def _integers(given: Any, what: str) -> list[int]:
    """Gives the numbers of a tensor that has to be known, and the same for every batch."""
    if not isinstance(given, Known) or len(given.values) > 1:
        raise Unsupported(f"{what} that hang on the input")
    return [int(n) for n in np.ravel(given.values[0])]


def _number(given: Any, what: str) -> float:
    if not isinstance(given, Known) or len(given.values) > 1 or given.values[0].size != 1:
        raise Unsupported(f"{what} that hangs on the input")
    return float(np.ravel(given.values[0])[0])


# --- elementwise -------------------------------------------------------------------------------

_UNARY = {
    "Relu": "relu", "Sigmoid": "sigmoid", "HardSwish": "hardswish", "Tanh": "tanh", "Erf": "erf",
    "Mish": "mish", "Softplus": "softplus", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
    "Neg": "neg", "Abs": "abs", "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos",
    "Floor": "floor",
}  # fmt: skip

for _name, _op in _UNARY.items():
    _rule(_name)(lambda imp, node, x, _op=_op: imp.net.op(_op, [x]))


@_rule("Gelu")
def _gelu(imp: Importer, node: OnnxNode, x: Value, approximate: str = "none") -> Value:
    return imp.net.op("gelu" if approximate == "none" else "gelu_tanh", [x])


@_rule("Swish")
def _swish(imp: Importer, node: OnnxNode, x: Value, alpha: float = 1.0) -> Value:
    if alpha == 1:
        return imp.net.op("silu", [x])
    return imp.net.op("mul", [x, imp.net.op("sigmoid", [rules.binary(imp, "mul", x, alpha)])])


@_rule("LeakyRelu")
def _leaky_relu(imp: Importer, node: OnnxNode, x: Value, alpha: float = 0.01) -> Value:
    return imp.net.op("leaky_relu", [x], slope=float(alpha))


@_rule("Elu")
def _elu(imp: Importer, node: OnnxNode, x: Value, alpha: float = 1.0) -> Value:
    return imp.net.op("elu", [x], alpha=float(alpha))


@_rule("PRelu")
def _prelu(imp: Importer, node: OnnxNode, x: Value, slope: Any) -> Value:
    return imp.net.op("prelu", [x, imp.value(slope)])


@_rule("HardSigmoid")
def _hardsigmoid(
    imp: Importer, node: OnnxNode, x: Value, alpha: float = 0.2, beta: float = 0.5
) -> Value:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return imp.net.op("hardsigmoid", [x])
    y = rules.binary(imp, "add", rules.binary(imp, "mul", x, float(alpha)), float(beta))
    return rules.clamp(imp, y, 0.0, 1.0)


@_rule("Clip")
def _clip(imp: Importer, node: OnnxNode, x: Value, low: Any = None, high: Any = None) -> Value:
    limits = (None if each is None else _number(each, "a limit") for each in (low, high))
    return rules.clamp(imp, x, *limits)


_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Pow": "pow", "Equal": "eq",
    "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge",
}  # fmt: skip
_SEVERAL = {"Max": "maximum", "Min": "minimum", "Sum": "add", "Mean": "add"}


def _binary(imp: Importer, op: str, a: Any, b: Any) -> Value:
    """Adds an op of two; an array of one number, such as [[2]], is that number."""
    a, b = _as_number(a, b), _as_number(b, a)
    types = [each.type.dtype for each in (a, b) if isinstance(each, Value)]
    if op == "div" and not any("float" in dtype for dtype in types):
        raise Unsupported("a division of integers")
    return rules.binary(imp, op, a, b)


def _as_number(x: Any, beside: Any) -> Any:
    if isinstance(x, Known) and len(x.values) == 1 and isinstance(beside, Value):
        value = x.values[0]
        if value.size == 1 and value.ndim <= len(beside.shape) and value.dtype != bool:
            return Known((value.reshape(()),), x.name)
    return x


for _name, _op in _BINARY.items():
    _rule(_name)(lambda imp, node, a, b, _op=_op: _binary(imp, _op, a, b))


@_rule(*_SEVERAL)
def _several(imp: Importer, node: OnnxNode, *given: Any) -> Value:
    y, *rest = given
    for each in rest:
        y = _binary(imp, _SEVERAL[node.op], y, each)
    return rules.binary(imp, "div", y, len(given)) if node.op == "Mean" else imp.value(y)


@_rule("Where")
def _where(imp: Importer, node: OnnxNode, condition: Any, a: Any, b: Any) -> Value:
    return rules.where(imp, condition, a, b)


@_rule("Not", "And", "Or")
def _logic(imp: Importer, node: OnnxNode, *given: Any) -> Value:
    return rules.logic(imp, node.op.lower(), *given)


@_rule("Dropout")
def _dropout(
    imp: Importer, node: OnnxNode, x: Value, ratio: Any = None, training: Any = None, seed: int = 0
) -> list[Any]:
    if training is not None and _number(training, "the training mode"):
        raise Unsupported("training")
    return [x, None]


@_rule("Cast", "CastLike")
def _cast(
    imp: Importer, node: OnnxNode, x: Value, like: Any = None, to: str = "", **_: Any
) -> Value:
    if like is not None:
        to = like.type.dtype if isinstance(like, Value) else like.values[0].dtype.name
    if to == x.type.dtype or (x.type.dtype.startswith("float") and "float" in to):
        return x  # all activations have one dtype here
    return imp.net.op("cast", [x], dtype="float32" if "float" in to else to)


# --- 8-bit integers ----------------------------------------------------------------------------

_LEVELS = ("uint8", "int8", "uint16", "int16")
"""What activations may be rounded to."""


@dataclass(frozen=True)
class Rounded:
    """What QuantizeLinear gives: integers.

    Attributes:
        value: What they stand for.
        scale: What 1 stands for.
        zero: What stands for 0.
        dtype: Of the integers.
    """

    value: Value
    scale: float
    zero: int
    dtype: str


def _grid(scale: Any, zero: Any, dtype: str, settings: Mapping[str, Any]) -> tuple[float, int, str]:
    """Reads the scale and the zero point of activations, and the dtype of their integers."""
    if settings.get("block_size") or (isinstance(scale, Known) and scale.values[0].size != 1):
        raise Unsupported(
            "activations with more than one scale; quantise them per tensor, weights per channel"
        )
    point = 0 if zero is None else _number(zero, "a zero point")
    name = dtype or ("uint8" if zero is None else zero.values[0].dtype.name)
    if name not in _LEVELS:
        raise Unsupported(f"activations in {name}; quantise them to uint8 or int8")
    return _number(scale, "a scale"), int(point), name


@_rule("QuantizeLinear")
def _quantize_linear(
    imp: Importer, node: OnnxNode, x: Value, scale: Any, zero: Any = None, axis: int = 1,
    output_dtype: str = "", saturate: int = 1, **settings: Any,
) -> Rounded:  # fmt: skip
    step, point, dtype = _grid(scale, zero, output_dtype, settings)
    ends = np.iinfo(dtype)
    low, high = float(int(ends.min) - point), float(int(ends.max) - point)
    y = imp.net.op("fake_quantize", [x], scale=step, low=low, high=high)
    return Rounded(y, step, point, dtype)


@_rule("DequantizeLinear")
def _dequantize_linear(
    imp: Importer, node: OnnxNode, x: Any, scale: Any, zero: Any = None, axis: int = 1,
    output_dtype: str = "", **settings: Any,
) -> Value:  # fmt: skip
    if not isinstance(x, Rounded):
        raise Unsupported("integers that are not from QuantizeLinear")
    if _grid(scale, zero, x.dtype, settings) != (x.scale, x.zero, x.dtype):
        raise Unsupported("another scale or zero point than QuantizeLinear has")
    return x.value


_KEEPING = ("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "MaxPool")
"""Operators that give numbers of their input, whatever these stand for."""


def applied(
    rule: Callable[..., Any],
    imp: Importer,
    node: OnnxNode,
    given: Sequence[Any],
    settings: Mapping[str, Any],
) -> Any:
    """Applies the rule of an operator; one that only moves integers gives such.

    Raises:
        Unsupported: If it computes with integers, or the rule says so.
    """
    integers = [each for each in given if isinstance(each, Rounded)]
    if not integers or node.op == "DequantizeLinear":
        return rule(imp, node, *given, **settings)
    if node.op not in _KEEPING or integers != [given[0]]:
        raise Unsupported("it computes with the integers of QuantizeLinear")
    made = rule(imp, node, integers[0].value, *given[1:], **settings)
    if isinstance(made, list):
        return [replace(integers[0], value=made[0]), *made[1:]]
    return replace(integers[0], value=made)


def dequantized(
    given: Known, found: Known, scale: Known, name: str, axis: int = 1, **settings: Any
) -> Known:
    """Gives weights that DequantizeLinear computed, and what 1 stands for in them.

    Args:
        given: The integers.
        found: What they stand for.
        scale: Their scales, for each of an axis, or one.
        name: What to call them.
        axis: The axis.
        settings: Other attributes of the operator.
    """
    (values,), steps = found.values, np.asarray(scale.values[0], np.float32)
    if given.values[0].dtype not in (np.int8, np.uint8) or settings.get("block_size"):
        return Known((values,), name)
    if steps.size > 1:
        steps = steps.reshape([-1 if a == axis % values.ndim else 1 for a in range(values.ndim)])
    return Known((values,), name, np.broadcast_to(steps.reshape(steps.shape or (1,)), values.shape))


# --- layers ------------------------------------------------------------------------------------


def _line(x: Value, y: Value) -> Value:
    """Makes lines of images again if ``x`` is lines."""
    return y.net.reshape(y, *y.shape[:2], y.shape[3]) if len(x.shape) == 3 else y


@dataclass(frozen=True)
class _Window:
    """A window that moves over images; of lines it has the height 1.

    Attributes:
        kernel: Its height and width; so are stride and dilation.
        stride: See ``kernel``.
        dilation: See ``kernel``.
        pads: What comes above, left, below and right of the image.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int, int, int]

    @property
    def even(self) -> bool:
        """Whether there is as much before as behind the image."""
        return self.pads[:2] == self.pads[2:]

    @property
    def is_torchs(self) -> bool:
        """Whether torch's pools take the padding: even, and half the kernel at most."""
        return self.even and all(
            2 * p <= k for p, k in zip(self.pads, self.kernel * 2, strict=True)
        )

    def settings(self) -> dict[str, Any]:
        """Gives stride, padding and dilation as ops take them."""
        padding: Any = self.pads[:2]
        found = rules.plain({"stride": self.stride, "padding": padding, "dilation": self.dilation})
        return found if self.even else {**found, "padding": self.pads}


def _window(x: Value, kernel: Sequence[int], given: Mapping[str, Any]) -> _Window:
    """Reads the window of a convolution or a pool of x[N, C, L] or x[N, C, H, W]."""
    rank = len(x.shape) - 2
    if rank not in (1, 2) or len(kernel) != rank:
        raise Unsupported(f"windows of {rank} dimensions")
    taps, stride, dilation = (
        tuple(each)
        for each in (
            kernel,
            given.get("strides") or [1] * rank,
            given.get("dilations") or [1] * rank,
        )
    )
    mode = given.get("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads: tuple[int, ...] = tuple(given.get("pads") or [0] * 2 * rank)
    else:
        sizes = [x.size(2 + i) for i in range(rank)]
        pads = _same_pads(mode, sizes, taps, stride, dilation)
    if rank == 1:
        taps, stride, dilation = (1, *taps), (1, *stride), (1, *dilation)
        pads = (0, pads[0], 0, pads[1])
    return _Window(taps, stride, dilation, pads)  # type: ignore[arg-type]


def _same_pads(
    mode: str,
    sizes: Sequence[int],
    taps: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """Chooses the padding of ``auto_pad``: ceil(size / stride) windows, or none."""
    before, behind = [], []
    for size, tap, stride, dilation in zip(sizes, taps, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (tap - 1) + 1 - size, 0)
        total = 0 if mode == "VALID" else total
        first = -(-total // 2) if mode == "SAME_LOWER" else total // 2
        before.append(first)
        behind.append(total - first)
    return (*before, *behind)


def _lifted(imp: Importer, weight: Known) -> Known:
    """Makes a filter of images of one of lines."""
    if weight.values[0].ndim != 3:
        return weight
    return imp.applied(weight, lambda w: w[:, :, None])


@_rule("Conv")
def _conv(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, bias: Any = None, group: int = 1,
    kernel_shape: Any = None, **window: Any,
) -> Value:  # fmt: skip
    weight = known_weight(weight)
    found = _window(x, weight.values[0].shape[2:], window)
    layer, weights = imp.layer(node.module, _lifted(imp, weight), bias)
    y = imp.net.op("conv2d", [rules.image(x), *weights], layer, **found.settings(), groups=group)
    return _line(x, y)


@_rule("ConvTranspose")
def _conv_transpose(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, bias: Any = None, group: int = 1,
    kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None,
    auto_pad: str = "NOTSET", **window: Any,
) -> Value:  # fmt: skip
    weight = known_weight(weight)
    taps = weight.values[0].shape[2:]
    rank = len(taps)
    more = [*(output_padding or [0] * rank)]
    if output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        strides = window.get("strides") or [1] * rank
        dilations = window.get("dilations") or [1] * rank
        sizes = [x.size(2 + i) for i in range(rank)]
        wanted = output_shape or [n * s for n, s in zip(sizes, strides, strict=True)]
        total = [
            s * (n - 1) + m + d * (k - 1) + 1 - out
            for s, n, m, d, k, out in zip(
                strides, sizes, more, dilations, taps, wanted, strict=True
            )
        ]
        first = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
        window["pads"] = [*first, *(t - f for t, f in zip(total, first, strict=True))]
    found = _window(x, taps, window)
    extra = (0, *more) if rank == 1 else tuple(more)
    pads = (*found.pads[:2], *(p - m for p, m in zip(found.pads[2:], extra, strict=True)))
    y = rules.conv_transpose2d(
        imp, node.module, rules.image(x), _lifted(imp, weight), bias, stride=found.stride,
        pads=pads, dilation=found.dilation, groups=group,
    )  # fmt: skip
    return _line(x, y)


@_rule("Gemm")
def _gemm(
    imp: Importer, node: OnnxNode, a: Any, b: Any, c: Any = None, alpha: float = 1.0,
    beta: float = 1.0, transA: int = 0, transB: int = 0,
) -> Value:  # fmt: skip
    if isinstance(a, Value) and transA:
        a = rules.transposed(imp, a)
    elif transA:
        a = imp.applied(a, np.transpose)
    if isinstance(c, Known) and beta != 1:
        c = imp.applied(c, lambda v: v * np.float32(beta))
    elif c is not None and beta != 1:
        c = rules.binary(imp, "mul", c, beta)
    if isinstance(a, Value) and rules.is_matrix(b):
        if not transB:
            b = imp.applied(b, np.transpose)
        if alpha != 1:
            b = imp.applied(b, lambda w: w * np.float32(alpha))
        f = b.values[0].shape[0]
        bias = None
        if isinstance(c, Known) and len(c.values) == 1 and c.values[0].size in (1, f):
            if c.values[0].shape != (f,):
                c = imp.applied(c, lambda v: np.broadcast_to(np.ravel(v), (f,)))
            bias, c = c, None
        layer, weights = imp.layer(node.module, b, bias)
        y = imp.net.op("linear", [a, *weights], layer)
    else:
        if transB:
            b = rules.transposed(imp, b) if isinstance(b, Value) else imp.applied(b, np.transpose)
        y = rules.binary(imp, "mul", rules.matmul(imp, node.module, a, b), alpha)
    return y if c is None else _binary(imp, "add", y, c)


@_rule("MatMul")
def _matmul(imp: Importer, node: OnnxNode, a: Any, b: Any) -> Value:
    return rules.matmul(imp, node.module, a, b)


@_rule("Einsum")
def _einsum(imp: Importer, node: OnnxNode, *given: Any, equation: str) -> Value:
    """Computes a sum over the products of two values: axes are put in order and multiplied."""
    sides, _, out = equation.replace(" ", "").partition("->")
    names = sides.split(",")
    plain = out and "." not in equation and all(len(set(n)) == len(n) for n in (*names, out))
    if len(given) != 2 or not plain:
        raise Unsupported(f"the equation {equation}")
    first, second = names
    shared = [n for n in first if n in second and n in out]
    summed = [n for n in first if n in second and n not in out]
    rows, columns = ([n for n in a if n not in b] for a, b in ((first, second), (second, first)))
    if any(n not in out for n in (*rows, *columns)):
        raise Unsupported(f"the equation {equation}")
    sizes: dict[str, Size] = {}
    for name, each in zip(names, given, strict=True):
        shape = each.shape if isinstance(each, Value) else each.values[0].shape
        sizes |= dict(zip(name, shape, strict=True))

    def grouped(each: Any, name: str, *parts: list[str]) -> Any:
        axes = [name.index(n) for part in (shared, *parts) for n in part]
        shape = [sizes[n] for n in shared] + [product(sizes[n] for n in part) for part in parts]
        if isinstance(each, Known):
            return imp.applied(each, lambda w: np.transpose(w, axes).reshape(shape))
        return rules.reshaped(imp, imp.net.permute(each, *axes), shape)

    a, b = grouped(given[0], first, rows, summed), grouped(given[1], second, summed, columns)
    y = rules.matmul(imp, node.module, a, b)
    made = [*shared, *rows, *columns]
    y = rules.reshaped(imp, y, [sizes[n] for n in made])
    return imp.net.permute(y, *(made.index(n) for n in out))


@_rule("BatchNormalization")
def _batch_norm(
    imp: Importer, node: OnnxNode, x: Value, *given: Any, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 0,
) -> Value:  # fmt: skip
    if training_mode:
        raise Unsupported("training")
    return rules.batch_norm(imp, node.module, x, *given, eps=epsilon)


@_rule("InstanceNormalization")
def _instance_norm(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, bias: Any, epsilon: float = 1e-5
) -> Value:
    return rules.group_norm(imp, node.module, x, x.size(1), weight, bias, epsilon)


@_rule("GroupNormalization")
def _group_norm(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, bias: Any, num_groups: int,
    epsilon: float = 1e-5, stash_type: int = 1,
) -> Value:  # fmt: skip
    each = x.size(1) // num_groups
    if node.opset < 21:  # one number a group
        weight, bias = (imp.applied(w, lambda v: np.repeat(v, each)) for w in (weight, bias))
    return rules.group_norm(imp, node.module, x, num_groups, weight, bias, epsilon)


@_rule("LayerNormalization")
def _layer_norm(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, bias: Any = None, axis: int = -1,
    epsilon: float = 1e-5, stash_type: int = 1,
) -> list[Any]:  # fmt: skip
    axes = len(x.shape) - rules.axis_of(x, axis)
    weight, bias = (_over(x, each, axes) for each in (weight, bias))
    return [rules.layer_norm(imp, node.module, x, axes, weight, bias, epsilon), None, None]


def _over(x: Value, given: Any, axes: int) -> Any:
    """Broadcasts a norm's weight to the axes that are normed."""
    if not isinstance(given, Known):
        return given
    shape = tuple(x.size(i) for i in range(len(x.shape) - axes, len(x.shape)))
    if given.values[0].shape == shape:
        return given
    return Known(tuple(np.broadcast_to(w, shape) for w in given.values))


@_rule("RMSNormalization")
def _rms_norm(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, axis: int = -1, epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Value:  # fmt: skip
    if rules.axis_of(x, axis) != len(x.shape) - 1:
        raise Unsupported("a norm over several axes")
    weights = rules.affine(imp, [x.size(-1)], _over(x, weight, 1), None)
    return imp.net.op("rms_norm", [x, weights[0]], eps=float(epsilon))


_SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}


@_rule(*_SOFTMAX)
def _softmax(imp: Importer, node: OnnxNode, x: Value, axis: int = -1) -> Value:
    return rules.on_last(imp, _SOFTMAX[node.op], [x], axis)


@_rule("LSTM")
def _lstm(
    imp: Importer, node: OnnxNode, x: Value, weight: Any, recurrent: Any, bias: Any = None,
    lengths: Any = None, h: Any = None, c: Any = None, peepholes: Any = None, hidden_size: int = 0,
    direction: str = "forward", layout: int = 0, **rest: Any,
) -> list[Value]:  # fmt: skip
    if rest or peepholes is not None:
        raise Unsupported(f"{', '.join(rest) or 'peepholes'}")
    if lengths is not None:
        raise Unsupported("sequences of unlike lengths")
    if any(s is not None and (isinstance(s, Value) or any(map(np.any, s.values))) for s in (h, c)):
        raise Unsupported("a first state other than 0")
    net = imp.net
    x = x if layout else net.permute(x, 1, 0, 2)

    def gates(given: Any, direction: int, half: int | None = None) -> Known:
        def ordered(rows: Any) -> np.ndarray:
            of = array(rows)[direction]
            i, o, f, g = np.split(of if half is None else np.split(of, 2)[half], 4)
            return np.concatenate([i, f, g, o])  # torch's order

        return imp.applied(given, ordered)

    ends: list[list[Value]] = []
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    for number, turned in enumerate(backwards):
        given = [gates(w, number) for w in (weight, recurrent)]
        if bias is not None:
            given += [gates(bias, number, half) for half in (0, 1)]
        ends.append(rules.lstm(imp, node.module, x, given, turned))
    n, t, size = x.shape[0], x.size(1), hidden_size
    whole = [net.reshape(net.concat(end[:-1], 1), n, t, 1, size) for end in ends]
    first = [end[0] if turned else end[-2] for end, turned in zip(ends, backwards, strict=True)]
    y = net.concat(whole, 2) if len(whole) > 1 else whole[0]  # N, T, directions, H
    states = [net.concat(s, 1) if len(s) > 1 else s[0] for s in (first, [e[-1] for e in ends])]
    if layout:
        return [y, *states]
    return [net.permute(y, 1, 2, 0, 3), *(net.permute(s, 1, 0, 2) for s in states)]


# --- windows -----------------------------------------------------------------------------------


def _counts(x: Value, window: _Window, ceil_mode: int) -> tuple[int, int]:
    """Counts the windows down and across; none begins behind the image."""
    out = []
    for i in range(2):
        size, step = x.size(2 + i), window.stride[i]
        first = window.pads[i]
        room = size + first + window.pads[2 + i] - window.dilation[i] * (window.kernel[i] - 1) - 1
        count = (room + (step - 1 if ceil_mode else 0)) // step + 1
        out.append(count - 1 if ceil_mode and (count - 1) * step >= size + first else count)
    return out[0], out[1]


@_rule("MaxPool")
def _max_pool(
    imp: Importer, node: OnnxNode, x: Value, kernel_shape: Any, ceil_mode: int = 0,
    storage_order: int = 0, **given: Any,
) -> list[Any]:  # fmt: skip
    window, image = _window(x, kernel_shape, given), rules.image(x)
    settings = rules.plain({"kernel": window.kernel})
    if window.is_torchs:
        more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
        y = imp.net.op("max_pool2d", [image], **settings, **window.settings(), **more)
    else:
        around, counts = [0] * 8, _counts(image, window, ceil_mode)
        for i in range(2):
            reach = (counts[i] - 1) * window.stride[i] + window.dilation[i] * (window.kernel[i] - 1)
            behind = reach + 1 - image.size(2 + i) - window.pads[i]
            around[4 + 2 * i : 6 + 2 * i] = window.pads[i], max(behind, 0)
        wide = imp.net.op("pad", [image], pads=tuple(around), value=-math.inf)
        settings |= rules.plain({"stride": window.stride, "dilation": window.dilation})
        y = imp.net.op("max_pool2d", [wide], **settings, padding=0)
    return [_line(x, y), None]


@_rule("AveragePool")
def _average_pool(
    imp: Importer, node: OnnxNode, x: Value, kernel_shape: Any, ceil_mode: int = 0,
    count_include_pad: int = 0, **given: Any,
) -> Value:  # fmt: skip
    window, image = _window(x, kernel_shape, given), rules.image(x)
    if window.is_torchs and window.dilation == (1, 1):
        settings = rules.plain({"kernel": window.kernel}) | window.settings()
        settings.pop("dilation", None)
        more: dict[str, Any] = {"ceil_mode": True} if ceil_mode else {}
        if not count_include_pad and (any(window.pads) or ceil_mode):
            more["count_include_pad"] = False
        y = imp.net.op("avg_pool2d", [image], **settings, **more)
    else:
        counts = _counts(image, window, ceil_mode)
        sides = [
            _averages(image.size(2 + i), counts[i], window, i, bool(count_include_pad))
            for i in range(2)
        ]
        y = rules.separable(imp, image, *sides)
    return _line(x, y)


def _averages(size: int, count: int, window: _Window, i: int, padded: bool) -> np.ndarray:
    """Makes the matrix of what a pool does to a line of pixels."""
    made = np.zeros((count, size))
    first, behind = window.pads[i], window.pads[2 + i]
    for row in range(count):
        begin = row * window.stride[i] - first
        taps = begin + window.dilation[i] * np.arange(window.kernel[i])
        inside = taps[(taps >= 0) & (taps < size)]
        counted = (taps < size + behind).sum() if padded else len(inside)
        made[row, inside] = 1 / max(counted, 1)
    return made


@_rule("GlobalAveragePool")
def _global_average_pool(imp: Importer, node: OnnxNode, x: Value) -> Value:
    image = rules.image(x)
    size = (image.size(2), image.size(3))
    y = imp.net.op("avg_pool2d", [image], **rules.plain({"kernel": size, "stride": size}))
    return _line(x, y)


@_rule("GlobalMaxPool")
def _global_max_pool(imp: Importer, node: OnnxNode, x: Value) -> Value:
    return rules.reduced(imp, "amax", x, range(2, len(x.shape)), True)


_REDUCTIONS = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin"}


@_rule(*_REDUCTIONS, "ReduceL1", "ReduceL2", "ReduceSumSquare")
def _reduce(
    imp: Importer, node: OnnxNode, x: Value, among: Any = None, axes: Any = None, keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Value:  # fmt: skip
    if among is not None:
        axes = _integers(among, "axes")
    if not axes and noop_with_empty_axes:
        return x
    if node.op == "ReduceL1":
        x = imp.net.op("abs", [x])
    elif node.op in ("ReduceL2", "ReduceSumSquare"):
        x = imp.net.op("mul", [x, x])
    y = rules.reduced(imp, _REDUCTIONS.get(node.op, "sum"), x, axes, bool(keepdims))
    return imp.net.op("sqrt", [y]) if node.op == "ReduceL2" else y


@_rule("LpNormalization")
def _lp_norm(imp: Importer, node: OnnxNode, x: Value, axis: int = -1, p: int = 2) -> Value:
    square = imp.net.op("mul", [x, x]) if p == 2 else imp.net.op("abs", [x])
    total = rules.reduced(imp, "sum", square, [axis], True)
    return imp.net.op("div", [x, imp.net.op("sqrt", [total]) if p == 2 else total])


@_rule("CumSum")
def _cumsum(
    imp: Importer, node: OnnxNode, x: Value, axis: Any, exclusive: int = 0, reverse: int = 0
) -> Value:
    if exclusive or reverse:
        raise Unsupported("a sum that is exclusive or reversed")
    return imp.net.op("cumsum", [x], axis=rules.axis_of(x, *_integers(axis, "the axis")))


@_rule("Resize")
def _resize(
    imp: Importer, node: OnnxNode, x: Value, roi: Any = None, scales: Any = None, sizes: Any = None,
    axes: Any = None, keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest", **how: Any,
) -> Value:  # fmt: skip
    if len(x.shape) not in (3, 4) or keep_aspect_ratio_policy != "stretch":
        raise Unsupported("other than images, stretched")
    rank = len(x.shape)
    chosen = [rules.axis_of(x, a) for a in axes] if axes else [*range(rank)]
    factors: list[float] = [1.0] * rank
    wanted: list[Size] = [*x.shape]
    given = scales if sizes is None else sizes
    if not isinstance(given, Known):
        raise Unsupported("a size that hangs on the input")
    for place, axis in enumerate(chosen):
        number = given.values[0].reshape(-1)[place]
        if axis < 2:
            held = 1 if node.fixed and isinstance(x.shape[axis], str) else x.shape[axis]
            if (number != 1) if sizes is None else (_sizes(sizes)[place] != held):
                raise Unsupported("other than images, stretched")
            continue
        size = x.size(axis)
        factors[axis] = float(number) if sizes is None else float(number) / size
        wanted[axis] = math.floor(size * factors[axis]) if sizes is None else int(number)
    image = rules.image(x)
    lengths, factors = (
        [*rules.image_of(wanted)],
        factors if rank == 4 else [1.0, 1.0, 1.0, factors[2]],
    )
    made = [matrix(mode, image.size(a), int(lengths[a]), factors[a], **how) for a in (2, 3)]
    times = tuple(m.shape[0] // m.shape[1] for m in made)
    repeats = [
        k > 0 and np.array_equal(m, np.repeat(np.eye(m.shape[1]), k, 0))
        for m, k in zip(made, times, strict=True)
    ]
    if all(repeats):
        y = image if times == (1, 1) else rules.enlarged(imp, image, (times[0], times[1]))
    else:
        y = rules.separable(imp, image, *made)
    return _line(x, y)


# --- movement ----------------------------------------------------------------------------------


def _sizes(given: Any) -> list[Size]:
    """Reads a shape that is known, perhaps but for the batch."""
    if not isinstance(given, Known):
        raise Unsupported("a shape that hangs on the numbers of the input")
    several = [[int(n) for n in np.ravel(each)] for each in given.values]
    found: list[Size] = []
    for sizes in zip(*several, strict=True):
        size = size_from(sizes)
        if size is None:
            raise Unsupported("a size that is no multiple of the batch")
        found.append(size)
    return found


@_rule("Reshape")
def _reshape(imp: Importer, node: OnnxNode, x: Value, shape: Any, allowzero: int = 0) -> Value:
    sizes = _sizes(shape)
    sizes = [x.shape[i] if s == 0 and not allowzero else s for i, s in enumerate(sizes)]
    return rules.reshaped(imp, x, _filled(node, x.shape, sizes))


def _filled(node: OnnxNode, before: Sequence[Size], after: list[Size]) -> list[Size]:
    """Puts the size in the place of -1, and of a file for one image the batch in that of a 1."""
    if node.fixed and not any(isinstance(s, str) for s in after):
        return _batched(before, [int(s) for s in after])
    if -1 not in after:
        return after
    (number, name), (known, named) = (
        split(product(sizes)) for sizes in (before, [s for s in after if s != -1])
    )
    if not known or number % known or (named and not name):
        raise Unsupported("a shape that does not fit")
    return [multiple(number // known, name if not named else "") if s == -1 else s for s in after]


def _batched(before: Sequence[Size], after: list[int]) -> list[Size]:
    """Finds where the batch goes in the shape of a single image: to where its axis begins."""
    sizes = [split(size) for size in before]
    total = math.prod(number for number, _ in sizes)
    known = math.prod(size for size in after if size != -1)
    found: list[Size] = [total // known if size == -1 and known else size for size in after]
    names = [axis for axis, (_, name) in enumerate(sizes) if name]
    if not names:
        return found
    (axis,) = names
    ahead = math.prod(number for number, _ in sizes[:axis])
    fits = [i for i in range(len(found)) if math.prod(found[:i]) == ahead]
    if not fits:
        raise Unsupported("a shape that mixes images; export the file with a dynamic batch")
    same = tuple(found[:axis]) == tuple(before[:axis]) and axis in fits
    place = axis if same else fits[0]
    found[place] = multiple(int(found[place]), BATCH)
    return found


@_rule("Flatten")
def _flatten(imp: Importer, node: OnnxNode, x: Value, axis: int = 1) -> Value:
    axis = axis if axis == len(x.shape) else rules.axis_of(x, axis)
    return rules.reshaped(imp, x, (product(x.shape[:axis]), product(x.shape[axis:])))


@_rule("Transpose")
def _transpose(imp: Importer, node: OnnxNode, x: Value, perm: Any = None) -> Value:
    return imp.net.permute(x, *(perm or reversed(range(len(x.shape)))))


@_rule("Squeeze")
def _squeeze(imp: Importer, node: OnnxNode, x: Value, axes: Any = None) -> Value:
    if axes is None:
        if node.fixed:
            raise Unsupported("axes that are not named")
        chosen = [a for a, size in enumerate(x.shape) if size == 1]
    else:
        chosen = [rules.axis_of(x, a) for a in _integers(axes, "axes")]
    if any(x.shape[a] != 1 for a in chosen):
        raise Unsupported("the batch is squeezed; export the file with a dynamic batch")
    return rules.reshaped(imp, x, [s for a, s in enumerate(x.shape) if a not in chosen])


@_rule("Unsqueeze")
def _unsqueeze(imp: Importer, node: OnnxNode, x: Value, axes: Any) -> Value:
    new = _integers(axes, "axes")
    rank = len(x.shape) + len(new)
    chosen, left = {a % rank for a in new}, list(x.shape)
    return imp.net.reshape(x, *(1 if a in chosen else left.pop(0) for a in range(rank)))


@_rule("Expand")
def _expand(imp: Importer, node: OnnxNode, x: Value, shape: Any) -> Value:
    wanted = Type(tuple(_sizes(shape)))
    return rules.spread(imp, x, broadcast("Expand", x.type, wanted))


@_rule("Tile")
def _tile(imp: Importer, node: OnnxNode, x: Value, repeats: Any) -> Value:
    times = _sizes(repeats)
    shape = [product(pair) for pair in zip(x.shape, times, strict=True)]
    return rules.tiled(imp, x, times, shape)


@_rule("Concat")
def _concat(imp: Importer, node: OnnxNode, *parts: Any, axis: int) -> Value:
    return rules.joined(imp, parts, axis)


@_rule("Split")
def _split(
    imp: Importer, node: OnnxNode, x: Value, sizes: Any = None, axis: int = 0, num_outputs: int = 0
) -> list[Value]:
    axis = rules.axis_of(x, axis)
    if isinstance(x.shape[axis], str):
        raise Unsupported("a split of the batch")
    if sizes is not None:
        return rules.cut(imp, x, axis, _integers(sizes, "sizes"))
    each = -(-x.size(axis) // node.outputs)
    begins = range(0, x.size(axis), each)
    return rules.cut(imp, x, axis, [min(each, x.size(axis) - begin) for begin in begins])


@_rule("Slice")
def _slice(
    imp: Importer, node: OnnxNode, x: Value, starts: Any, ends: Any, axes: Any = None,
    steps: Any = None,
) -> Value | Known:  # fmt: skip
    several = [_integers(each, "limits") for each in (starts, ends)]
    count = len(several[0])
    chosen = [*range(count)] if axes is None else _integers(axes, "axes")
    strides = [1] * count if steps is None else _integers(steps, "steps")
    for axis, begin, end, step in zip(chosen, *several, strides, strict=True):
        axis = rules.axis_of(x, axis)
        if isinstance(x.shape[axis], str):
            if begin == 0 and step == 1 and end >= 2**31 - 1:
                continue
            raise Unsupported("a slice of the batch")
        order = range(*slice(begin, end, step).indices(x.size(axis)))
        if not order:
            return imp.empty()
        if step < 0:
            x = rules.picked(imp, x, axis, np.array(order))
        elif order != range(x.size(axis)):
            x = imp.net.slice(x, axis, order.start, order.stop, step)
    return x


@_rule("Gather")
def _gather(imp: Importer, node: OnnxNode, x: Any, indices: Any, axis: int = 0) -> Value:
    x = imp.value(x)
    axis = rules.axis_of(x, axis)
    if isinstance(x.shape[axis], str):
        raise Unsupported("one image of the batch; export the file with a dynamic batch")
    if isinstance(indices, Known) and len(indices.values) == 1:
        order = indices.values[0] % x.size(axis)
        if order.ndim == 0:
            index = int(order)
            y = imp.net.slice(x, axis, index, index + 1) if x.size(axis) > 1 else x
            return imp.net.reshape(y, *(s for a, s in enumerate(y.shape) if a != axis))
        return rules.picked(imp, x, axis, order)
    return imp.net.op("gather", [x, imp.value(indices)], axis=axis)


@_rule("Pad")
def _pad(
    imp: Importer, node: OnnxNode, x: Value, pads: Any, value: Any = None, axes: Any = None,
    mode: str = "constant",
) -> Value:  # fmt: skip
    rank, given = len(x.shape), _integers(pads, "pads")
    chosen = (
        [*range(rank)] if axes is None else [rules.axis_of(x, a) for a in _integers(axes, "axes")]
    )
    around = [0] * (2 * rank)  # the last axis first, as rules.padded takes it
    for place, axis in enumerate(chosen):
        at = 2 * (rank - 1 - axis)
        around[at : at + 2] = given[place], given[place + len(chosen)]
    if mode == "constant":
        return rules.padded(imp, x, around, 0.0 if value is None else _number(value, "a value"))
    return rules.mirrored(imp, x, around, mode)


@_rule("DepthToSpace")
def _depth_to_space(
    imp: Importer, node: OnnxNode, x: Value, blocksize: int, mode: str = "DCR"
) -> Value:
    (n, c, h, w), net, b = x.shape, imp.net, blocksize
    c = x.size(1) // b**2
    if mode == "DCR":
        y = net.permute(net.reshape(x, n, b, b, c, h, w), 0, 3, 4, 1, 5, 2)
    else:
        y = net.permute(net.reshape(x, n, c, b, b, h, w), 0, 1, 4, 2, 5, 3)
    return net.reshape(y, n, c, x.size(2) * b, x.size(3) * b)


@_rule("SpaceToDepth")
def _space_to_depth(imp: Importer, node: OnnxNode, x: Value, blocksize: int) -> Value:
    net, n, b = imp.net, x.shape[0], blocksize
    c, h, w = x.size(1), x.size(2) // b, x.size(3) // b
    y = net.permute(net.reshape(x, n, c, h, b, w, b), 0, 3, 5, 1, 2, 4)
    return net.reshape(y, n, c * b**2, h, w)
