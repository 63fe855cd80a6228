"""The ops as typed functions on graph values; each adds one of our ops, or says otherwise.

Shapes are checked and inferred by graphs/shapes.py, as those of programs are; dtypes here.

Activations are NHWC (feature maps) or [..., C] (tokens), in one dtype: float32 or bfloat16 on a
CPU (sparse convolutions float32); float32, bfloat16 or float16 on a GPU. Biases and layer norm's
weights are float32, and every kernel accumulates in float32. A CPU takes float64 too, to check
gradients by, in the ops of ``CHECKED``; biases and sums are float64 then. Unless ``tf32`` is False,
NVIDIA's tensor cores round float32 to TF32 (10 bits of mantissa) before they multiply. The batch
may be symbolic, all other sizes are known.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, SymbolicDim, TensorType, TensorValue, ops

from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.graphs import arrange, formats, shapes
from maxvision.graphs.constants import MOST_BIAS
from maxvision.graphs.elementwise import (
    BETWEEN,
    MOST_ENDS,
    MOST_PARTS,
    MOST_RESULTS,
    MOST_TERMS,
    MOST_VALUES,
    MOST_VECTORS,
)
from maxvision.graphs.parameters import Filter, wide
from maxvision.graphs.shapes import MOST_AXES, MOST_ROW_AXES, Padding, Pair
from maxvision.graphs.types import EIGHT_BITS, Size, Type, at_batch, part, product, split

OPS = Path(__file__).resolve().parent.parent / "ops"
"""The Mojo package, for ``Graph(custom_extensions=[OPS])``."""

PARTS = 8
"""Parts of an image that a CPU's cores add up in ``squeeze_excite``, at most."""
GRADIENT_ROOM = 1 << 23
"""Sums that the parts of a ``conv2d_weight_grad`` have on a GPU at most: 32 MB, of its L2."""
GRADIENT_PARTS = 264
"""Parts of its pixels at most: two for each multiprocessor of an H200."""
NORM_PARTS = 264
"""Parts of the rows of a ``layer_norm_grad`` at least, for short rows four times as many."""
NORM_ROOM = 1 << 20
"""Sums that more parts than these may have: 4 MB."""
REDUCED_ALONE = 1 << 20
"""Numbers below which a GPU reduces an axis in one launch."""
REDUCED_IMAGES = 16
"""What a batch is taken for there that is not known."""
REDUCE_BLOCKS = 512
"""Blocks that reduce an axis in parts, at most: enough for all that the memory gives."""
GPU_DTYPES = (DType.float32, DType.bfloat16, DType.float16)
CPU_DTYPES = (DType.float32, DType.bfloat16)
CHECKED = frozenset((
    "arrange_filter", "conv2d", "conv2d_weight_grad", "bmm", "maxpool", "avgpool",
    "max_pool2d_grad", "avg_pool2d_grad", "reduce", "reduce_terms", "reduce_results",
    "pointwise", "foreach", "softmax", "log_softmax", "softmax_grad", "scatter_add",
))  # fmt: skip
"""The ops that a CPU computes in float64 too; graphs/float64.py writes others out in them."""


def computed_filter(
    w: TensorValue,
    bias: TensorValue | None = None,
    groups: int = 1,
    *,
    layout: str = "NCHW",
    turned: bool = False,
    tf32: bool = True,
) -> Filter:
    """Makes a filter of a value, in place of weights that were laid out when the model loaded.

    Args:
        w: [F, C / groups, R, S]; or [F, R, S, C / groups].
        bias: float32, or float64 as w [F]; zeros if there is none.
        groups: Groups of channels.
        layout: ``NCHW`` or ``NHWC``: which of the two w is.
        turned: Whether it is for ``conv2d_input_grad``.
        tf32: Whether a GPU may round float32 to TF32.

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    f, c, r, s = map(int, shapes.fcrs(_type(w), layout))
    shape = (r, s, f // groups, c * groups) if turned else (r, s, c, f)
    form, size = arrange.arrangement(shape, groups, w.device.is_cpu(), w.dtype)
    if not w.device.is_cpu():
        form = "filter_major"  # kernels read depthwise ones so, too, if they are computed
    if form == "filter_major" and (layout == "NHWC" or c == 1) and not turned:
        dense = w.reshape((size,))
    else:
        parameters = {"form": form, "channels_last": layout == "NHWC", "turned": turned}
        given = [w, _host([f, c, r, s, groups], DType.int64)]
        dense = _custom("arrange_filter", given, [Type((size,), w.dtype.name)], parameters)[0]
    bias = _zeros(shape[3], w.device, wide(w.dtype)) if bias is None else bias
    return Filter(shape, groups, bias, w.dtype, dense=dense, tf32=tf32, constant=False)


def conv2d(
    x: TensorValue,
    filter: Filter,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Convolves x[N, H, W, C] into [N, P, Q, F], as torch's conv2d does.

    Args:
        x: The activations.
        filter: The weights; sparse ones run as the op of their format.
        stride: Pixels between windows, one number or (height, width); so are the next two.
        padding: Zeros on each side; four numbers are those above, left, below and right.
        dilation: Pixels between the taps of a window.
        epilogue: ``none``, ``add``, ``relu``, ``add_relu``, ``0.0 6.0 clamp``, ...
            (``activation`` of graphs/elementwise.py).
        residual: [N, P, Q, F] for those that add.

    Raises:
        ArgumentError: If shapes, epilogue or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    name, groups = "conv2d", filter.groups
    parameters: dict[str, Any] = {}
    if filter.format in formats.PACKED:
        name, parameters = "sparse_conv2d_packed", {"format": filter.format}
    elif filter.format:
        name = "sparse_conv2d"
    else:
        parameters = {
            "tf32": _tf32(x, filter.tf32),
            "members": arrange.members(
                filter.shape, groups, x.device.is_cpu() and x.dtype == DType.float32
            ),
            "aligned": _aligned(
                x, filter, groups=groups, stride=stride, padding=padding, dilation=dilation
            ),
            "windows": _has_windows(x, filter, stride, dilation),
            "constant": filter.constant,
        }
    out = shapes.conv2d(
        _type(x), _filter(filter), None, _optional(residual),
        stride=stride, padding=padding, dilation=dilation, groups=groups,
        epilogue=epilogue, layout="NHWC", name=name,
    )  # fmt: skip
    window = _window(filter.shape[:2], stride, padding, dilation, groups)
    weights = [*(filter.rows or [filter.dense]), filter.bias]
    return _fused(name, x, weights, residual, [window], out, epilogue, parameters)


def conv2d_input_grad(
    dy: TensorValue,
    w: TensorValue,
    size: tuple[int, int],
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    filter_layout: str = "NCHW",
    tf32: bool = True,
) -> TensorValue:
    """Computes the gradient of x[N, H, W, C] from that of conv2d(x, w), dy[N, P, Q, F].

    Of a depthwise convolution a GPU has a kernel for it. Else it is a convolution too, of the
    filter turned around. With a stride, pixels of x whose places differ by it see the same taps:
    those of each such phase are a convolution, and phases that see no tap are zeros.

    Args:
        dy: The gradient of the result.
        w: The filter, as ``computed_filter`` takes it.
        size: H and W.
        stride: Of the convolution; so are the next three.
        padding: See ``stride``.
        dilation: See ``stride``.
        groups: See ``stride``.
        filter_layout: Of w.
        tf32: Whether a GPU may round float32 to TF32.

    Raises:
        ArgumentError: If shapes or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    f, c, r, s = map(int, shapes.fcrs(_type(w), filter_layout))
    if arrange.is_depthwise((r, s, c, f), groups) and not dy.device.is_cpu():
        out = shapes.conv2d_input_grad(
            _type(dy), _type(w), size=size,
            stride=stride, padding=padding, dilation=dilation, groups=groups,
            layout="NHWC", filter_layout=filter_layout,
        )  # fmt: skip
        window = _window((r, s), stride, padding, dilation, groups)
        return _custom("depthwise_input_grad", [dy, w, window], [out])[0]
    steps, apart, before = shapes.pair(stride), shapes.pair(dilation), shapes.sides(padding)[:2]
    across = [_phases(*each) for each in zip(size, (r, s), steps, before, apart, strict=True)]
    rows, columns = (-(-s // step) for s, step in zip(size, steps, strict=True))
    parts: list[TensorValue | None] = []
    for down, right in itertools.product(*across):
        if not (down.taps and right.taps):
            parts.append(None)
            continue
        seen = [slice(None)] * 4
        first = 1 if filter_layout == "NHWC" else 2
        seen[first : first + 2] = down.slice, right.slice
        taps = w if (r, s) == (down.taps, right.taps) else w[tuple(seen)]
        filter = computed_filter(taps, None, groups, layout=filter_layout, turned=True, tf32=tf32)
        sides = [down.pad, right.pad]
        for phase, held, length in zip((down, right), dy.shape[1:3], (rows, columns), strict=True):
            sides.append(length + phase.reach - int(held) - phase.pad)
        part = _cut(dy, [min(each, 0) for each in sides])
        above, left, below, after = (max(each, 0) for each in sides)
        parts.append(
            conv2d(
                part,
                filter,
                padding=(above, left, below, after),
                dilation=(down.apart, right.apart),
            )
        )
    dx = _interleaved(parts, steps)
    return _cut(dx, [0, 0, size[0] - rows * steps[0], size[1] - columns * steps[1]])


@dataclass(frozen=True)
class _Phase:
    """Which taps the pixels see whose places are the same modulo the stride, down or across.

    Attributes:
        first: The first of them.
        taps: How many there are.
        step: From one to the next.
        apart: Pixels of dy from one to the next.
        pad: Zeros before dy.
    """

    first: int
    taps: int
    step: int
    apart: int
    pad: int

    @property
    def slice(self) -> slice:
        """The taps."""
        return slice(self.first, None, self.step)

    @property
    def reach(self) -> int:
        """Pixels from the first tap to the last."""
        return (self.taps - 1) * self.apart


def _phases(size: int, kernel: int, stride: int, before: int, dilation: int) -> list[_Phase]:
    """Lists the phases of an axis: pixel h sees tap r where stride divides h + before - r * d."""
    found = []
    every = stride // math.gcd(stride, dilation)  # taps of a phase are so many apart
    for place in range(stride):
        seen = [
            r for r in range(min(kernel, every)) if (place + before - r * dilation) % stride == 0
        ]
        first = seen[0] if seen else 0
        taps = len(range(first, kernel, every)) if seen else 0
        apart = every * dilation // stride
        last = (place + before - first * dilation) // stride
        found.append(_Phase(first, taps, every, apart, (taps - 1) * apart - last))
    return found


def _interleaved(parts: Sequence[TensorValue | None], steps: tuple[int, int]) -> TensorValue:
    """Puts pixels of phases in their places: those of one are ``steps`` apart; None are zeros."""
    there = [part for part in parts if part is not None]
    if len(parts) == 1:
        return there[0]
    n, h, w, c = there[0].shape
    if len(there) == 1:
        down, right = divmod(next(i for i, p in enumerate(parts) if p is not None), steps[1])
        apart = there[0].reshape((n, h, 1, w, 1, c))
        around = [0, 0, 0, 0, down, steps[0] - 1 - down, 0, 0, right, steps[1] - 1 - right, 0, 0]
        y = ops.pad(apart, around)
    else:
        if len(there) < len(parts):
            zero = ops.broadcast_to(
                ops.constant(0, there[0].dtype, there[0].device), there[0].shape
            )
            there = [zero if part is None else part for part in parts]
        y = ops.concat([part.reshape((n, h, w, 1, c)) for part in there], 3)
        y = permute(y.reshape((n, h, w, *steps, c)), (0, 1, 3, 2, 4, 5))
    return y.reshape((n, int(h) * steps[0], int(w) * steps[1], c))


def _cut(x: TensorValue, sides: Sequence[int]) -> TensorValue:
    """Cuts off pixels of x[N, H, W, C] above, left, below and right: as many as each is below 0."""
    for axis in (1, 2):
        first, last = -sides[axis - 1], int(x.shape[axis]) + sides[axis + 1]
        if (first, last) != (0, int(x.shape[axis])):
            x = x[tuple(slice(first, last) if a == axis else slice(None) for a in range(4))]
    return x


def conv2d_weight_grad(
    x: TensorValue,
    dy: TensorValue,
    kernel: Pair,
    *,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    tf32: bool = True,
) -> TensorValue:
    """Computes the gradient of a convolution's filter: [F, R, S, C / groups].

    That of a linear layer's weights is the same, of tokens as [N, T, 1, C] and a kernel of 1.

    Args:
        x: What was convolved [N, H, W, C].
        dy: The gradient of the result [N, P, Q, F].
        kernel: R and S.
        stride: Pixels between windows, one number or (height, width); so are the next two.
        padding: Zeros on each side; four numbers are those above, left, below and right.
        dilation: Pixels between the taps of a window.
        groups: Groups of channels.
        tf32: Whether float32 may be rounded to TF32 on a GPU.

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.conv2d_weight_grad(
        _type(x), _type(dy), kernel=kernel,
        stride=stride, padding=padding, dilation=dilation, groups=groups, layout="NHWC",
    )  # fmt: skip
    size = math.prod(map(int, out.shape))
    parts = 0 if x.device.is_cpu() else max(1, min(GRADIENT_ROOM // max(size, 1), GRADIENT_PARTS))
    room = Type((parts, size), "float32")
    window = _window(shapes.pair(kernel), stride, padding, dilation, groups)
    depthwise = 1 < groups == int(x.shape[-1]) == int(dy.shape[-1])
    parameters = {"tf32": _tf32(x, tf32), "depthwise": depthwise}
    return _custom("conv2d_weight_grad", [x, dy, window], [out, room], parameters)[0]


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

    On Hopper it is one launch, and the shortcut's result is never stored.

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
    out = shapes.conv2d_shortcut(
        _type(x), _filter(filter), None, _type(source), _filter(shortcut), None,
        padding=padding, stride=stride,
    )  # fmt: skip
    windows = [_window(filter.shape[:2], 1, padding), _window((1, 1), stride)]
    values = [x, filter.dense, filter.bias, source, shortcut.dense, shortcut.bias, *windows]
    aligned = _aligned(x, filter, padding=padding) and _aligned(x, shortcut, stride=stride)
    parameters = {"tf32": _tf32(x, filter.tf32 and shortcut.tf32), "aligned": aligned}
    return _custom("conv2d_shortcut", values, [out], parameters)[0]


def conv2d_chain(
    x: TensorValue, filter: Filter, residual: TensorValue, following: Filter
) -> tuple[TensorValue, TensorValue]:
    """Ends a residual block and begins the next: h = relu(conv2d(x) + residual), relu(conv2d(h)).

    On a GPU, for the widths of ``arrange.CHAINS``; h is not read again.

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
    outs = shapes.conv2d_chain(
        _type(x), _filter(filter), None, _type(residual), _filter(following), None
    )
    c, f = filter.shape[2], following.shape[3]
    values = [x, filter.dense, filter.bias, residual, following.dense, following.bias]
    parameters = {
        "tf32": _tf32(x, filter.tf32 and following.tf32),
        "aligned": _aligned(x, filter) and _aligned(x, following),
    }
    h, z = _custom("conv2d_chain", values, outs, {**parameters, "c": c, "f": f})
    return h, z


def conv2d_shortcut_chain(
    x: TensorValue,
    filter: Filter,
    source: TensorValue,
    shortcut: Filter,
    following: Filter,
) -> tuple[TensorValue, TensorValue]:
    """Ends a residual block that changes its width and begins the next, as ``conv2d_chain``.

    On a GPU, for the widths of ``arrange.SHORTCUT_CHAINS``.

    Args:
        x: The activations [N, H, W, C].
        filter: Their filter of 1 x 1.
        source: What came into the block [N, H, W, S].
        shortcut: Its filter of 1 x 1, without a stride.
        following: The next block's first filter, likewise.

    Returns:
        h[N, H, W, K], and the next block's first activations [N, H, W, F].

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    filters = filter, shortcut, following
    outs = shapes.conv2d_shortcut_chain(
        _type(x), _filter(filter), None, _type(source), _filter(shortcut), None,
        _filter(following), None,
    )  # fmt: skip
    c, s, f = filter.shape[2], shortcut.shape[2], following.shape[3]
    values = [x, filter.dense, filter.bias, source, shortcut.dense, shortcut.bias]
    values += [following.dense, following.bias]
    parameters = {
        "tf32": _tf32(x, all(each.tf32 for each in filters)),
        "aligned": all(_aligned(x, each) for each in filters),
    }
    widths = {"c": c, "s": s, "f": f}
    h, z = _custom("conv2d_shortcut_chain", values, outs, {**parameters, **widths})
    return h, z


def conv2d_mean(
    x: TensorValue,
    filter: Filter,
    *,
    epilogue: str = "none",
    residual: TensorValue | None = None,
    keepdim: bool = True,
) -> TensorValue:
    """Computes the mean of each image of ``conv2d``; on Hopper, in 16 bits.

    Of one image of up to ``arrange.POOLED`` pixels in one launch, which does not store them.

    Args:
        x: The activations [N, H, W, C].
        filter: Of 1 x 1, of sizes that the copy engine takes (``arrange.is_aligned``).
        epilogue: As of ``conv2d``.
        residual: [N, H, W, F] for those that add.
        keepdim: Whether the result is [N, 1, 1, F], or [N, F].

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    given = _type(x), _filter(filter), None, _optional(residual)
    out = shapes.conv2d_mean(*given, epilogue=epilogue, keepdim=keepdim)
    if not arrange.is_aligned(filter.shape, x.dtype):
        raise ArgumentError(
            f"conv2d_mean: expects channels of a multiple of 8 but has {filter.shape[2:]}"
        )
    images = shapes.conv2d(*given, epilogue=epilogue, layout="NHWC")  # room for what is averaged
    means = Type((out.shape[0], out.shape[-1]), out.dtype)
    values = [x, filter.dense, filter.bias, x if residual is None else residual]
    y, _ = _custom("conv2d_mean", values, [means, images], {"epilogue": epilogue})
    return y.reshape(dims(out.shape))


def linear(
    x: TensorValue,
    weight: Filter,
    *,
    epilogue: str = "none",
    residual: TensorValue | None = None,
    few: bool = False,
) -> TensorValue:
    """Multiplies x[..., C] by a linear layer's weights into [..., F]: bmm with one b for all.

    Sparse weights run as ``sparse_conv2d``; then x is [N, ..., C]. ``few``: whether a batch has few
    rows, so that a GPU needs no kernels for many.

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.linear(_type(x), _matrix(weight), None, _optional(residual), epilogue=epilogue)
    if weight.dense is None:
        return as_images(conv2d, x, residual, filter=weight, epilogue=epilogue)
    layout = "packed" if x.device.is_cpu() else "nk"
    weights, scale = [weight.dense, weight.bias], _host([1.0], wide(x.dtype))
    parameters = {
        "layout": layout,
        "tf32": _tf32(x, weight.tf32),
        "constant": True,
        "aligned": _aligned(x, weight),
        "few": few and not x.device.is_cpu(),
    }
    return _fused("bmm", x, weights, residual, [scale], out, epilogue, parameters)


def quantized_conv2d(
    x: TensorValue,
    filter: Filter,
    product: TensorValue,
    *,
    scales: Sequence[float],
    dtype: str,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Convolves x[N, H, W, C] of 8 bits into [N, P, Q, F], as ops/conv2d/quantized.mojo says.

    Args:
        x: The activations; C of a group is a multiple of 4, or the convolution is depthwise. On
            Hopper C is a multiple of 16 in one group, and so is F of a result in 8 bits.
        filter: The weights, in int8, or as x in float8_e4m3fn: ``Parameters.quantized`` gives them,
            and the next two.
        product: What a sum of each filter stands for, float32 [F].
        scales: What x's 0 is stored as; scale and zero point of the residual, of the result, and
            on a CPU perhaps of what is rounded before the residual is added.
        dtype: Of the result, and the residual: x's, or that of the other activations.
        stride: See ``conv2d``; so are the others.
        padding: See ``stride``.
        dilation: See ``stride``.
        epilogue: See ``stride``.
        residual: See ``stride``.

    Raises:
        ArgumentError: If shapes, dtypes, epilogue or geometry do not fit.
    """
    groups = filter.groups
    out = shapes.quantized_conv2d(
        _type(x), _filter(filter), None, _optional(residual), scale=1.0, low=0.0, dtype=dtype,
        stride=stride, padding=padding, dilation=dilation, groups=groups, epilogue=epilogue,
    )  # fmt: skip
    window = _window(filter.shape[:2], stride, padding, dilation, groups)
    weights, given = [filter.dense, product, filter.bias], _host(scales, DType.float32)
    parameters = {
        "members": int(arrange.is_depthwise(filter.shape, groups)),
        "narrow": dtype == x.dtype.name and _is_narrow(filter),
        "windows": _has_windows(x, filter, stride, dilation),
        "rounds": len(scales) > 5,
    }
    settings = [window, given]
    return _fused("quantized_conv2d", x, weights, residual, settings, out, epilogue, parameters)


def _has_windows(x: TensorValue, filter: Filter, stride: Pair, dilation: Pair) -> bool:
    """Tells whether a GPU needs the kernels that read the taps of a window from one copy of x."""
    near = shapes.pair(stride) == shapes.pair(dilation) == (1, 1)
    return not x.device.is_cpu() and near and filter.shape[:2] != (1, 1)


def _is_narrow(*filters: Filter) -> bool:
    """Tells whether the channels of filters leave half of Hopper's step of 128 bytes empty."""
    return all(0 < each.shape[2] % arrange.ROW <= arrange.ROW // 2 for each in filters)


def quantized_conv2d_shortcut(
    x: TensorValue,
    source: TensorValue,
    filters: tuple[Filter, Filter],
    product: TensorValue,
    first: TensorValue,
    *,
    padding: Pair = 0,
    stride: Pair = 1,
    epilogue: str = "none",
) -> TensorValue:
    """Ends a residual block that changes its shape, on Hopper, in 8 bits, as ``conv2d_shortcut``.

    Args:
        x: The activations [N, H, W, C] of uint8, or float8_e4m3fn; the stride is 1.
        source: What came into the block [N, H', W', C'], likewise.
        filters: Of both; ``Parameters.quantized_shortcut`` gives them, and the next two.
        product: What a sum of the source stands for, float32 [F].
        first: What a sum of x is in those of the source, float32 [F].
        padding: Zeros on each side of x.
        stride: Pixels between the windows of ``source``.
        epilogue: What the sum goes through; it does not add.

    Raises:
        ArgumentError: If shapes, dtypes or geometry do not fit.
    """
    filter, shortcut = filters
    out = shapes.quantized_conv2d_shortcut(
        _type(x), _filter(filter), None, _type(source), _filter(shortcut), None,
        scale=1.0, source_scale=1.0, result_scale=1.0,
        padding=padding, stride=stride, epilogue=epilogue,
    )  # fmt: skip
    windows = [_window(filter.shape[:2], 1, padding), _window((1, 1), stride)]
    scales = [product, first, filter.bias, shortcut.bias]
    values = [x, filter.dense, source, shortcut.dense, *scales, *windows]
    parameters = {"epilogue": epilogue, "narrow": _is_narrow(*filters)}
    return _custom("quantized_conv2d_shortcut", values, [out], parameters)[0]


def quantized_conv2d_chain(
    x: TensorValue,
    filters: tuple[Filter, Filter],
    products: tuple[TensorValue, TensorValue],
    residual: TensorValue,
    *,
    residual_scale: float,
) -> tuple[TensorValue, TensorValue]:
    """Ends a residual block and begins the next, on Hopper, in 8 bits, as ``conv2d_chain``.

    Results in uint8 are rectified by what they stand for.

    Args:
        x: The activations [N, H, W, C] of uint8, or float8_e4m3fn.
        filters: Of both; ``Parameters.quantized`` gives them, and the next.
        products: What a sum of each filter stands for, float32 [K] and [F].
        residual: What came into the block [N, H, W, K], likewise.
        residual_scale: What a step of it is in those of h.

    Returns:
        h[N, H, W, K], and the next block's first activations [N, H, W, F].

    Raises:
        ArgumentError: If shapes or dtypes do not fit.
    """
    first, second = filters
    outs = shapes.quantized_conv2d_chain(
        _type(x), _filter(first), None, _type(residual), _filter(second), None,
        scale=1.0, residual_scale=1.0, result_scale=1.0, next_scale=1.0,
    )  # fmt: skip
    c, f = first.shape[2], second.shape[3]
    weights = [first.dense, products[0], first.bias, residual]
    following = [second.dense, products[1], second.bias, _host([residual_scale], DType.float32)]
    parameters = {"narrow": _is_narrow(first), "c": c, "f": f}
    values = [x, *weights, *following]
    h, z = _custom("quantized_conv2d_chain", values, outs, parameters)
    return h, z


def quantized_conv2d_shortcut_chain(
    x: TensorValue,
    source: TensorValue,
    filters: tuple[Filter, Filter, Filter],
    product: TensorValue,
    first: TensorValue,
    following: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    """Ends a residual block that changes its width and begins the next, on Hopper, in 8 bits.

    Args:
        x: As ``quantized_conv2d_shortcut`` has it, of a 1 x 1 filter; so are source, product and
            first.
        source: See ``x``; its stride is 1.
        filters: Its two, and the next block's first.
        product: See ``x``.
        first: See ``x``.
        following: What a sum of the last filter stands for, float32 [F].

    Returns:
        h[N, H, W, K], and the next block's first activations [N, H, W, F].

    Raises:
        ArgumentError: If shapes or dtypes do not fit.
    """
    filter, shortcut, last = filters
    outs = shapes.quantized_conv2d_shortcut_chain(
        _type(x), _filter(filter), None, _type(source), _filter(shortcut), None,
        _filter(last), None, scale=1.0, source_scale=1.0, result_scale=1.0, next_scale=1.0,
    )  # fmt: skip
    c, s, f = filter.shape[2], shortcut.shape[2], last.shape[3]
    sums = [product, first, filter.bias, shortcut.bias, last.dense, following, last.bias]
    parameters = {"narrow": _is_narrow(filter, shortcut), "c": c, "s": s, "f": f}
    values = [x, filter.dense, source, shortcut.dense, *sums]
    h, z = _custom("quantized_conv2d_shortcut_chain", values, outs, parameters)
    return h, z


def as_images(
    op: Callable[..., TensorValue], x: TensorValue, residual: TensorValue | None, **settings: Any
) -> TensorValue:
    """Takes tokens x[N, ..., C] through a 1 x 1 convolution, each of N an image of one row."""
    _, *between, _ = _type(x).shape
    if not all(isinstance(size, int) for size in between):
        raise ArgumentError(f"linear: expects every size but N of x[N, ..., C] but has {x.shape}")
    count = math.prod(between)

    def image(value: TensorValue) -> TensorValue:
        return value.reshape((value.shape[0], 1, count, value.shape[-1]))

    residual = None if residual is None else image(residual)
    y = op(image(x), residual=residual, **settings)
    return y.reshape((x.shape[0], *between, y.shape[3]))


def linear_moments(
    x: TensorValue, weight: Filter, residual: TensorValue
) -> tuple[TensorValue, TensorValue]:
    """Computes ``linear`` of x[..., C] + residual, and its moments by row; on Hopper, in 16 bits.

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    outs = shapes.linear_moments(_type(x), _matrix(weight), None, _type(residual))
    values = [x, weight.dense, weight.bias, residual]
    y, moments = _custom("linear_moments", values, outs)
    return y, moments


def normed_linear(
    x: TensorValue,
    moments: TensorValue,
    weight: Filter,
    *,
    epilogue: str = "none",
    eps: float = 1e-5,
) -> TensorValue:
    """Computes act(linear(layer_norm(x))); on Hopper, in 16 bits.

    Args:
        x: [..., C].
        moments: Of its rows, as ``linear_moments`` gives them.
        weight: Linear weights, the norm's weight and bias in them; each filter's add up to 0.
        epilogue: What the sums go through; it does not add.
        eps: Added to the variance.

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.normed_linear(_type(x), _type(moments), _matrix(weight), None, epilogue=epilogue)
    values = [x, moments, weight.dense, weight.bias, _host([eps], DType.float32)]
    return _custom("normed_linear", values, [out], {"epilogue": epilogue})[0]


def token_linear(
    x: TensorValue,
    weight: Filter,
    *,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Multiplies the tokens of x[N, T, C] by a linear layer's weights into [N, F, C].

    On Hopper, in 16 bits; no token is transposed.

    Args:
        x: The tokens; C is a multiple of 8.
        weight: [K, F]; K is T rounded up to a multiple of 8.
        epilogue: See ``conv2d``.
        residual: [N, F, C] for those that add.

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.token_linear(
        _type(x), _matrix(weight), None, _optional(residual), epilogue=epilogue
    )
    weights = [weight.dense, weight.bias]
    return _fused("token_linear", x, weights, residual, [], out, epilogue, {})


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
    types = [_type(each) for each in tokens]
    given: list[Type | None] = [*types]
    values = list(tokens)
    for weight in weights:
        given += [_matrix(weight), None]
        values += [weight.dense, weight.bias]
    outs = shapes.qkv_linear(*given)
    parameters = {
        "tf32": _tf32(tokens[0], all(weight.tf32 for weight in weights)),
        "aligned": _aligned(tokens[0], weights[0]),
    }
    q, k, v = _custom("qkv_linear", values, outs, parameters)
    return q, k, v


def quantized_qkv_linear(
    tokens: tuple[TensorValue, TensorValue, TensorValue],
    weights: tuple[Filter, Filter, Filter],
    products: tuple[TensorValue, TensorValue, TensorValue],
    *,
    dtype: str,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Multiplies tokens of 8 bits as ``qkv_linear`` does those of floats, on Hopper.

    Args:
        tokens: As ``qkv_linear`` has them; C is a multiple of 16.
        weights: As ``quantized_conv2d`` has its filter; so is the product of each.
        products: See ``weights``.
        dtype: Of the results: a float.

    Raises:
        ArgumentError: If shapes or dtypes do not fit.
    """
    given: list[Type | None] = [*map(_type, tokens)]
    values = list(tokens)
    for weight, scales in zip(weights, products, strict=True):
        given += [_matrix(weight), None]
        values += [weight.dense, scales, weight.bias]
    outs = shapes.quantized_qkv_linear(*given, q_scale=1.0, k_scale=1.0, v_scale=1.0, dtype=dtype)
    q, k, v = _custom("quantized_qkv_linear", values, outs)
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
        bias: float32, or float64 as a [N].
        epilogue: See ``conv2d``.
        residual: [..., M, N] for those that add.
        tf32: Whether a GPU may round float32 to TF32.

    Raises:
        ArgumentError: If shapes or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.matmul(
        _type(a), _type(b), _optional(bias), _optional(residual),
        alpha=alpha, transpose_b=transpose_b, epilogue=epilogue,
    )  # fmt: skip
    if bias is None:
        bias = _zeros(int(out.shape[-1]), a.device, wide(a.dtype))
    parameters = {
        "layout": "nk" if transpose_b else "kn",
        "tf32": _tf32(a, tf32),
        "constant": False,
        "aligned": transpose_b and _is_aligned_matrix(b),
        "few": False,
    }
    scale = _host([alpha], wide(a.dtype))
    return _fused("bmm", a, [b, bias], residual, [scale], out, epilogue, parameters)


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
    stride = kernel if stride is None else stride
    out = shapes.max_pool2d(
        _type(x), kernel=kernel, stride=stride, padding=padding, dilation=dilation,
        ceil_mode=ceil_mode, layout="NHWC",
    )  # fmt: skip
    window = _window(shapes.pair(kernel), stride, padding, dilation)
    return _custom("maxpool", [x, window], [out])[0]


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
    out = shapes.avg_pool2d(
        _type(x), kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, layout="NHWC"
    )
    size = int(x.shape[1]), int(x.shape[2])
    if kernel is None or (shapes.pair(kernel) == size and shapes.pair(padding) == (0, 0)):
        return reduce("mean", x, (1, 2), keepdim=True)
    window = _window(shapes.pair(kernel), kernel if stride is None else stride, padding)
    return _custom("avgpool", [x, window], [out], {"padding_counts": count_include_pad})[0]


def max_pool2d_grad(
    x: TensorValue,
    dy: TensorValue,
    kernel: Pair,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> TensorValue:
    """Computes the gradient of x[N, H, W, C] from that of maxpool(x), dy[N, P, Q, C].

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    stride = kernel if stride is None else stride
    out = shapes.max_pool2d_grad(
        _type(x), _type(dy), kernel=kernel, stride=stride, padding=padding, dilation=dilation,
        ceil_mode=ceil_mode, layout="NHWC",
    )  # fmt: skip
    window = _window(shapes.pair(kernel), stride, padding, dilation)
    sides = zip(shapes.pair(kernel), shapes.pair(dilation), strict=True)
    covered = math.prod((taps - 1) * spread + 1 for taps, spread in sides)
    places = Type(_type(dy).shape, "uint8" if covered <= 256 else "int32")
    return _custom("max_pool2d_grad", [x, dy, window], [out, places])[0]


def avg_pool2d_grad(
    dy: TensorValue,
    size: Pair,
    kernel: Pair,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> TensorValue:
    """Computes the gradient of x[N, H, W, C] from that of avgpool(x), dy[N, P, Q, C].

    Args:
        dy: The gradient of the result.
        size: H and W.
        kernel: Of the pooling; so are those that follow.
        stride: See ``kernel``.
        padding: See ``kernel``.
        ceil_mode: See ``kernel``.
        count_include_pad: See ``kernel``.

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    stride = kernel if stride is None else stride
    out = shapes.avg_pool2d_grad(
        _type(dy), size=size, kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode,
        layout="NHWC",
    )  # fmt: skip
    window = _window(shapes.pair(kernel), stride, padding)
    parameters = {"padding_counts": count_include_pad}
    return _custom("avg_pool2d_grad", [dy, window], [out], parameters)[0]


def reduce(
    kind: str, x: TensorValue, axes: Sequence[int], keepdim: bool = False, dtype: str = ""
) -> TensorValue:
    """Reduces axes to one number each, as torch's op of that name does; NaN goes through.

    Axes that are not beside each other are permuted first.

    Args:
        kind: ``sum``, ``mean``, ``amax`` or ``amin``.
        x: Of any shape.
        axes: Those that go.
        keepdim: Whether a size of 1 is left of each.
        dtype: Of the result: that of x, or float32.

    Raises:
        ArgumentError: If there is no such axis.
        DeviceError: If the device has no kernel for the dtype.
    """
    (out,) = shapes.reduction(_type(x), axes=tuple(axes), keepdim=keepdim, dtype=dtype)
    sizes = _type(x).shape
    wide = [axis for axis in sorted(axes) if sizes[axis] != 1] or [min(axes)]
    first, last = wide[0], wide[-1]
    between = [a for a in range(first, last) if a not in axes and sizes[a] != 1]
    if between:
        kept = [a for a in range(len(sizes)) if a not in wide]
        x = permute(x, [*kept, *wide])
        sizes = tuple(sizes[a] for a in (*kept, *wide))
        first, last = len(kept), len(sizes) - 1
    shape = [product(sizes[:first]), product(sizes[first : last + 1]), product(sizes[last + 1 :])]
    if (parts := _parts(x, shape)) > 1:
        parted = dims([parts, part(shape[1], parts), shape[2]])
        x = reduce(kind, x.reshape(parted), [1], dtype="float32")
        shape = [1, parts, shape[2]]
    rows = Type((shape[0], shape[2]), out.dtype)
    y = _custom("reduce", [x.reshape(dims(shape))], [rows], {"kind": kind})[0]
    return y.reshape(dims(out.shape))


def _parts(x: TensorValue, shape: Sequence[Size]) -> int:
    """Counts the parts in which a GPU reduces the middle one of three axes, and then these.

    A block reduces columns of its own. Few of them, of millions of rows as of a batch of images,
    would keep few multiprocessors busy, and it takes all to load what the memory gives.
    """
    outer, reduced, inner = shape
    if x.device.is_cpu() or outer != 1 or not isinstance(inner, int) or inner >= 2 * REDUCE_BLOCKS:
        return 1
    if at_batch(reduced, REDUCED_IMAGES) * inner < REDUCED_ALONE:
        return 1
    most = REDUCE_BLOCKS // -(-inner // 256)
    known, _ = split(reduced)  # a batch that is not known is in every part
    return max(n for n in range(1, most + 1) if known % n == 0)


def reduce_terms(
    kind: str,
    expression: str,
    values: Sequence[TensorValue],
    axes: Sequence[int],
    keepdim: bool = False,
    dtype: str = "",
) -> list[TensorValue]:
    """Reduces axes of expressions of values that broadcast, in one launch.

    Args:
        kind: ``sum``, ``mean``, ``amax`` or ``amin``.
        expression: Of ``x0``, ``x1``, ... in postfix order, or several with `` ; `` between them.
        values: See ``pointwise``.
        axes: Those that go, of the shape to which the values broadcast.
        keepdim: Whether a size of 1 is left of each.
        dtype: Of the results: that of the activations, or float32.

    Returns:
        A result for each expression.

    Raises:
        ArgumentError: If the expressions or the shapes do not fit (shapes.lies).
        DeviceError: If the device has no kernel for the dtype.
    """
    types = [_type(value) for value in values]
    outs = shapes.reduction(
        *types, axes=tuple(axes), keepdim=keepdim, dtype=dtype, expression=expression
    )
    terms = _Terms.of(kind, expression, values, axes).last()
    made = terms.reduced([outs[0].dtype] * len(outs))
    return [y.reshape(dims(out.shape)) for y, out in zip(made, outs, strict=True)]


def reduce_results(
    kind: str,
    expression: str,
    values: Sequence[TensorValue],
    axes: Sequence[int],
    results: str,
    vectors: Sequence[TensorValue],
    dtypes: Sequence[str],
    keepdim: bool = False,
    first: Collection[int] = (),
) -> list[TensorValue]:
    """Reduces axes of expressions, and computes others of what is left, in the same launch.

    Args:
        kind: ``sum``, ``mean``, ``amax`` or ``amin``.
        expression: What is reduced; see ``reduce_terms``.
        values: See ``reduce_terms``.
        axes: Those that go, of the shape to which the values broadcast.
        results: Expressions of what is left, ``x0``, ``x1``, ..., and of the vectors, numbered
            behind that, with `` ; `` between them.
        vectors: Floats, each as many as a result has.
        dtypes: Of the results.
        keepdim: Whether a size of 1 is left of each axis.
        first: Which of values and vectors have the shape of the whole, and are read at its first
            place along the axes; before these there is no other axis.

    Raises:
        ArgumentError: If the expressions or the shapes do not fit.
        DeviceError: If the device has no kernel for a dtype.
    """
    types = [_type(each) for each in (*values, *vectors)]
    outs = shapes.reduce_results(
        *types, kind=kind, axes=tuple(axes), keepdim=keepdim, expression=expression,
        results=results, dtypes=tuple(dtypes), first=tuple(first),
    )  # fmt: skip
    terms = _Terms.of(kind, expression, values, axes, first).last()
    made = terms.finished(results, vectors, dtypes)
    return [y.reshape(dims(out.shape)) for y, out in zip(made, outs, strict=True)]


@dataclass(frozen=True)
class _Terms:
    """Expressions of values whose second of three axes is reduced in one launch.

    Attributes:
        kind: What is left of the axis.
        expression: What is reduced.
        values: What it is computed of.
        lies: The axes along which each value moves (shapes.lies).
        sizes: Of the three axes.
    """

    kind: str
    expression: str
    values: Sequence[TensorValue]
    lies: Sequence[str]
    sizes: Sequence[Size]

    @classmethod
    def of(
        cls,
        kind: str,
        expression: str,
        values: Sequence[TensorValue],
        axes: Sequence[int],
        first: Collection[int] = (),
    ) -> _Terms:
        """Joins the axes of values to three; of those in ``first`` the first row is read.

        Raises:
            ArgumentError: If they are not three.
        """
        types = [_type(value) for value in values]
        lies = shapes.lies(types, axes)
        if lies is None:
            raise ArgumentError(
                f"reduce: {', '.join(map(str, types))} are not values of three axes, the second of"
                f" which is the axes {tuple(axes)}"
            )
        lies = ["i" if i in first else letters for i, letters in enumerate(lies)]
        groups = shapes.around(shapes.broadcast("reduce", *types), axes)
        return cls(kind, expression, values, lies, [product(group) for group in groups])

    def last(self) -> _Terms:
        """Reduces parts of the axis, if there are any; gives what is left to reduce."""
        before, between, behind = self.sizes
        if (parts := _parts(self.values[0], self.sizes)) == 1:
            return self
        lies = [letters.replace("o", "").replace("r", "or") for letters in self.lies]
        sizes = (parts, part(between, parts), behind)
        count = len(self.expression.split(BETWEEN))
        made = replace(self, lies=lies, sizes=sizes).reduced(["float32"] * count)
        each = BETWEEN.join(f"x{i}" for i in range(count))
        return _Terms(self.kind, each, made, ["ori"] * count, (before, parts, behind))

    def reduced(self, dtypes: Sequence[str]) -> list[TensorValue]:
        """Gives what is left of the axis, [outer, inner], in these dtypes."""
        return self._launched("reduce_terms", dtypes, MOST_TERMS, [], {})

    def finished(
        self, results: str, vectors: Sequence[TensorValue], dtypes: Sequence[str]
    ) -> list[TensorValue]:
        """Gives expressions of that, and of vectors."""
        rest = [self.values[0]] * (MOST_ENDS - len(vectors))  # the op reads none of them
        ends, parameters = [*vectors, *rest], {"results": results}
        return self._launched("reduce_results", dtypes, MOST_RESULTS, ends, parameters)

    def _launched(
        self,
        name: str,
        dtypes: Sequence[str],
        most: int,
        ends: Sequence[TensorValue],
        parameters: Mapping[str, Any],
    ) -> list[TensorValue]:
        outer, rows, inner = self.sizes
        outs = [Type((outer, inner), dtype) for dtype in dtypes]
        nothing = [Type((1, 1), dtypes[0])] * (most - len(outs))  # where no result goes
        rest = [self.values[0]] * (MOST_VALUES - len(self.values))  # the op reads none of them
        given = [*self.values, *rest, *ends, _lengths([rows])]
        whole = {"kind": self.kind, "expression": self.expression, "lies": " ".join(self.lies)}
        return _custom(name, given, [*outs, *nothing], {**whole, **parameters})[: len(outs)]


def pointwise(expression: str, values: Sequence[TensorValue], dtype: str = "") -> TensorValue:
    """Computes an expression (graphs/elementwise.py) of values that broadcast, in one launch.

    Args:
        expression: Of ``x0``, ``x1``, ... in postfix order, computed in float32 or float64.
        values: Activations of one dtype; float32 and bool may be among those of another.
        dtype: Of the result; that of the activations if it is not said.

    Returns:
        Of the dtype; bool if the expression ends in a comparison.

    Raises:
        ArgumentError: If the expression or the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.pointwise(*map(_type, values), expression=expression, dtype=dtype)
    rest = [values[0]] * (MOST_VALUES - len(values))  # the op reads none of them
    return _custom("pointwise", [*values, *rest], [out], {"expression": expression})[0]


def foreach(expression: str, values: Sequence[TensorValue], dtype: str = "") -> list[TensorValue]:
    """Computes an expression (graphs/elementwise.py) of each of several members, in one launch.

    Args:
        expression: Of ``x0``, ``x1``, ...; of int64 it is computed in that.
        values: Those of the first member, then those of the second, and so on. A member's have one
            shape, and dtypes are those of the first member.
        dtype: See ``pointwise``; ``int64`` for int64.

    Returns:
        One of each member.

    Raises:
        ArgumentError: If the expression or the shapes do not fit, or there are too many members.
        DeviceError: If the device has no kernel for the dtype.
    """
    outs = shapes.foreach(*map(_type, values), expression=expression, dtype=dtype)
    return _custom("foreach", values, outs, {"expression": expression})


def permute(x: TensorValue, axes: Sequence[int]) -> TensorValue:
    """Lays axes out in another order, as torch's permute does and makes it contiguous.

    A reshape where only axes of size 1 change places. MAX's own kernel runs for masks, integers,
    float64 and more than six axes.

    Args:
        x: Of any shape.
        axes: The axis of ``x`` that each axis of the result is.

    Raises:
        ArgumentError: If an axis is missing, or named twice.
    """
    out = shapes.permute(_type(x), axes=tuple(axes))
    moved = [axis for axis in axes if x.shape[axis] != 1]
    if moved == sorted(moved):
        return x.reshape(dims(out.shape))
    if x.dtype not in _dtypes(x.device) or x.rank > MOST_AXES:
        return x.permute(list(axes))
    return _custom("permute", [x, _host(axes, DType.int64)], [out])[0]


def roll(x: TensorValue, shifts: Sequence[int], axes: Sequence[int]) -> TensorValue:
    """Turns axes around, as torch's roll does: y[i] = x[(i - shift) mod the size].

    MAX's own ops cut and join what our ops do not compute, such as integers.

    Args:
        x: Of any shape.
        shifts: How far, for each axis.
        axes: One or two, in order.

    Raises:
        ArgumentError: If there is no such axis.
    """
    out = shapes.roll(_type(x), shifts=tuple(shifts), axes=tuple(axes))
    if not supported(x.dtype, x.device):
        for shift, axis in zip(shifts, axes, strict=True):
            lengths = [shift % int(x.shape[axis])]
            lengths.insert(0, int(x.shape[axis]) - lengths[0])
            x = ops.concat(list(reversed(ops.split(x, lengths, axis))), axis)
        return x
    turns = [number for turn in zip(axes, shifts, strict=True) for number in turn]
    turns = [axes[0], 0, *turns][-4:]
    return _custom("roll", [x, _host(turns, DType.int64)], [out])[0]


def scatter_add(x: TensorValue, index: TensorValue, values: TensorValue, axis: int) -> TensorValue:
    """Adds values to the places of an axis that an index names, in the order of the values.

    MAX's own op adds integers.

    Args:
        x: Of any shape.
        index: Integers: the shape of the values, or that up to the axis, if whole rows are added.
        values: Of x's shape, but for that axis.
        axis: Which.

    Returns:
        The sums, of x's shape: floats as float32, and float64 as that.

    Raises:
        ArgumentError: If the shapes do not fit.
    """
    out = shapes.scatter_add(_type(x), _type(index), _type(values), axis=axis)
    if not x.dtype.is_float():
        if index.rank < values.rank:
            ends = [1] * (values.rank - index.rank)
            index = ops.broadcast_to(index.reshape([*index.shape, *ends]), values.shape)
        return ops.scatter_add(x, values, index, axis=axis)
    x, values = (each.cast(DType[out.dtype]) for each in (x, values))
    held, added = (_type(value).shape for value in (x, values))
    each = index.rank == values.rank and axis < values.rank - 1
    sizes = _lengths([held[axis], product(held[axis + 1 :]), added[axis], int(each)])
    sums = Type(out.shape, shapes.wide(out.dtype))
    return _custom("scatter_add", [x, index, values, sizes], [sums])[0]


def gather_rows(
    x: TensorValue,
    *,
    size: tuple[int, int],
    shifts: tuple[int, int],
    shape: Sequence[int],
    axes: Sequence[int],
    rolls_first: bool,
    onto: TensorValue | None = None,
    norm: tuple[TensorValue, TensorValue] | None = None,
    eps: float = 1e-5,
) -> list[TensorValue]:
    """Gives rows of x[N, R, C] another order, adds them to others, norms them, or both.

    The order is a roll of an image of rows and a permute of their axes, one after the other.

    Args:
        x: The rows.
        size: Rows down and across the image that is rolled.
        shifts: How far it is, as torch's roll has it.
        shape: The axes that the rows are permuted by.
        axes: How they are.
        rolls_first: Whether the permute comes behind the roll.
        onto: What the rows are added to [N, R, C].
        norm: Weight and bias of a layer norm, float32 [C].
        eps: Added to the variance.

    Returns:
        The result; before it the sum, if that is normed.

    Raises:
        ArgumentError: If shapes or the order do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    vectors = norm or (None, None)
    outs = shapes.gather_rows(
        _type(x), _optional(onto), *map(_optional, vectors), size=size, shifts=shifts,
        shape=tuple(shape), axes=tuple(axes), rolls_first=rolls_first,
    )  # fmt: skip
    steps = [math.prod(shape[axis + 1 :]) for axis in axes][::-1]
    lengths, rest = [shape[axis] for axis in axes][::-1], MOST_ROW_AXES - len(axes)
    order = [*size, *shifts, rolls_first, *lengths, *[1] * rest, *steps, *[0] * rest]
    nothing = Type((1, 1, 1), outs[0].dtype)  # where no sum goes
    vectors = norm or (_zeros(1, x.device),) * 2
    values = [x, x if onto is None else onto, *vectors, _host(order, DType.int64)]
    values.append(_host([eps], DType.float32))
    parameters = {"adds": onto is not None, "norms": norm is not None}
    y, total = _custom("gather_rows", values, [outs[-1], *outs[:-1], nothing][:2], parameters)
    return [total, y] if len(outs) > 1 else [y]


def relu(x: TensorValue) -> TensorValue:
    """Computes max(x, 0) of any shape.

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return pointwise("x0 relu", [x])


def softmax(x: TensorValue) -> TensorValue:
    """Computes the softmax along the last axis of x[..., C].

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("softmax", [x], [_type(x)])[0]


def log_softmax(x: TensorValue) -> TensorValue:
    """Computes the logarithm of the softmax along the last axis of x[..., C].

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("log_softmax", [x], [_type(x)])[0]


def softmax_grad(dy: TensorValue, y: TensorValue) -> TensorValue:
    """Computes the gradient of softmax(x) by x from that of y[..., C], the softmax.

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    return _custom("softmax_grad", [dy, y], [shapes.softmax_grad(_type(dy), _type(y))])[0]


def layernorm(
    x: TensorValue, weight: TensorValue, bias: TensorValue, eps: float = 1e-5, *, dtype: str = ""
) -> TensorValue:
    """Normalises the last axis of x[..., C]; weight and bias are float32 [C].

    Args:
        x: The activations.
        weight: Of each column.
        bias: Of each column.
        eps: Added to the variance.
        dtype: Of the result: that of x if it is not said.

    Raises:
        ArgumentError: If weight or bias is not [C].
        DeviceError: If the device has no kernel for a dtype.
    """
    out = shapes.layer_norm(_type(x), _type(weight), _type(bias), dtype=dtype)
    _takes("layernorm", x.device, x.dtype)
    return _custom("layernorm", [x, weight, bias, _host([eps], DType.float32)], [out])[0]


def layer_norm_grad(
    dy: TensorValue,
    x: TensorValue,
    weight: TensorValue | None = None,
    eps: float = 1e-5,
    *,
    dtype: str = "",
) -> list[TensorValue]:
    """Gives the gradients of ``layernorm`` by x, by its weight and by its bias.

    The mean and the deviation of each row are computed again.

    Args:
        dy: The gradient of the result [..., C].
        x: What was normalised [..., C]; its dtype may be another one.
        weight: float32 [C]; ones if there is none.
        eps: Added to the variance.
        dtype: Of the gradient of x: that of x if it is not said.

    Returns:
        That of x [..., C], and those of the weight and of the bias, float32 [C].

    Raises:
        ArgumentError: If dy has not the shape of x, or weight is not [C].
        DeviceError: If the device has no kernel for a dtype.
    """
    outs = shapes.layer_norm_grad(_type(dy), _type(x), _optional(weight), eps=eps, dtype=dtype)
    c = int(x.shape[-1])
    if weight is None:
        weight = ops.constant(np.ones(c, np.float32), DType.float32, x.device)
    parts = max(NORM_PARTS, min(4 * NORM_PARTS, NORM_ROOM // max(2 * c, 1)))
    _takes("layer_norm_grad", x.device, dy.dtype, x.dtype)
    values = [dy, x, weight, _host([eps], DType.float32)]
    return _custom("layer_norm_grad", values, [*outs, Type((parts, 2, c))])[:3]


def rms_norm(x: TensorValue, weight: TensorValue, eps: float = 1e-5) -> TensorValue:
    """Divides the last axis of x[..., C] by its root mean square; weight is float32 [C].

    Raises:
        ArgumentError: If weight is not [C].
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.rms_norm(_type(x), _type(weight))
    return _custom("rms_norm", [x, weight, _host([eps], DType.float32)], [out])[0]


def group_norm(
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue,
    groups: int,
    eps: float = 1e-5,
    *,
    epilogue: str = "none",
) -> TensorValue:
    """Normalises groups of channels of each image x[N, ..., C], as torch's group_norm does.

    Args:
        x: The activations, channels last.
        weight: float32 [C].
        bias: float32 [C].
        groups: Of neighbouring channels, as many each.
        eps: Added to the variance.
        epilogue: ``none`` or an activation; see ``conv2d``.

    Raises:
        ArgumentError: If weight, bias, groups or epilogue do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.group_norm(
        _type(x), _type(weight), _type(bias), groups=groups, eps=eps, epilogue=epilogue,
        layout="NHWC",
    )  # fmt: skip
    n, *size, c = out.shape
    pixels = product(size)
    members = int(c) // groups
    # Parts of a group: of 256 numbers at least, and as many as a GPU's kernels need at any width.
    parts = 64 if isinstance(pixels, str) else min(64, pixels * members // 256)
    rows = Type((n, pixels, c), out.dtype)
    partials = Type((n, groups, max(parts, math.ceil(members / 32)), 3))
    values = [x.reshape(dims(rows.shape)), weight, bias, _host([eps], DType.float32)]
    y, _ = _custom("group_norm", values, [rows, partials], {"epilogue": epilogue})
    return y.reshape(dims(out.shape))


def layernorm_first(
    x: TensorValue, weight: TensorValue, bias: TensorValue, eps: float = 1e-5
) -> TensorValue:
    """Normalises the first token of each image of x[N, T, C]: [N, C]; see ``layernorm``."""
    out = shapes.layernorm_first(_type(x), _type(weight), _type(bias))
    return _custom("layernorm_first", [x, weight, bias, _host([eps], DType.float32)], [out])[0]


def layernorm_mlp(
    x: TensorValue,
    moments: TensorValue,
    weights: tuple[Filter, Filter],
    eps: float = 1e-5,
) -> TensorValue:
    """Computes x + linear(gelu(linear(layernorm(x)))) of tokens x[N, T, C]; on Hopper, in 16 bits.

    For the widths of ``arrange.MLPS``; with many tokens the hidden layer is never stored.

    Args:
        x: The tokens.
        moments: Of each, as ``linear_moments`` or ``row_moments`` gives them.
        weights: Of the linear layers, [C, K] and [K, C]; the norm's are part of the first, whose
            filters add up to 0 each.
        eps: Added to the variance.

    Raises:
        ArgumentError: If shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    first, second = weights
    out = shapes.layernorm_mlp(
        _type(x), _type(moments), _matrix(first), None, _matrix(second), None
    )
    hidden = Type((*out.shape[:2], first.shape[3]), out.dtype)
    values = [x, moments, first.dense, first.bias, second.dense, second.bias]
    values.append(_host([eps], DType.float32))
    return _custom("layernorm_mlp", values, [out, hidden], {"c": int(out.shape[2])})[0]


def row_moments(x: TensorValue) -> TensorValue:
    """Computes the moments of the rows of x[..., C], of 16 bits, as ``linear_moments`` has them.

    Raises:
        ArgumentError: If C is no multiple of 32.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.row_moments(_type(x))
    _takes("row_moments", x.device, x.dtype)
    return _custom("row_moments", [x], [out], {"dtype": x.dtype})[0]


def squeeze_excite(
    x: TensorValue,
    squeeze: tuple[TensorValue, TensorValue],
    excite: tuple[TensorValue, TensorValue],
    *,
    activation: str,
    gate: str,
    epilogue: str = "none",
    residual: TensorValue | None = None,
) -> TensorValue:
    """Computes x * gate(excite(activation(squeeze(mean of x)))) of images x[N, H, W, C].

    On a CPU, and on Hopper in 16 bits, if C is a multiple of 8 (``arrange.has_squeeze``).

    Args:
        x: The images.
        squeeze: Weights [K, C] and bias, float32 [K], of the first product.
        excite: Weights [K, C] and bias, float32 [C], of the second.
        activation: Between the products: ``none``, ``relu``, ...; see ``conv2d``.
        gate: Behind the second.
        epilogue: What the gated images go through; see ``conv2d``.
        residual: [N, H, W, C] for those that add.

    Raises:
        ArgumentError: If shapes or epilogues do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    (first, first_bias), (second, second_bias) = squeeze, excite
    turned = Type(_type(second).shape[::-1])
    out = shapes.squeeze_excite(
        _type(x), _type(first), _type(first_bias), turned, _type(second_bias), _optional(residual),
        activation=activation, gate=gate, epilogue=epilogue,
    )  # fmt: skip
    n, *_, c = out.shape
    k = turned.shape[1]
    room = Type((n, int(k) + PARTS * int(c)) if x.device.is_cpu() else (1, 1))
    added = x if residual is None else residual  # x is not read again
    values = [x, first, first_bias, second, second_bias, added]
    parameters = {"activation": activation, "gate": gate, "epilogue": epilogue}
    return _custom("squeeze_excite", values, [out, room], parameters)[0]


def attention(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    heads: int,
    *,
    scale: float | None = None,
    bias: TensorValue | None = None,
    causal: bool = False,
    dtype: str = "",
    result_scale: float = 1.0,
    result_low: float = 0.0,
) -> TensorValue:
    """Attends from q[N, T, C] to k[N, S, C] and v[N, S, C], the heads side by side in C.

    A query whose scores are all minus infinity becomes NaN, as softmax does.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        heads: How many heads C holds.
        scale: Scales the scores before the softmax; by default (C / heads) ** -0.5.
        bias: Added to the scores then, as ``shapes.attention_bias`` lays it out.
        causal: Whether query t sees only the keys up to t.
        dtype: Of the result: q's, or on Hopper uint8 or float8_e4m3fn, rounded and saturated.
        result_scale: What one step of a result in 8 bits stands for.
        result_low: The least step of uint8, stored as 0 (and so is NaN): from -255 to 0.

    Raises:
        ArgumentError: If shapes, heads, scales or the result's dtype do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    types = _type(q), _type(k), _type(v)
    if scale is None:
        scale = (int(q.shape[-1]) / heads) ** -0.5 if heads > 0 else 1.0
    out = shapes.attention(
        *types, _optional(bias), heads=heads, scale=scale, causal=causal, dtype=dtype,
        result_scale=result_scale, result_low=result_low,
    )  # fmt: skip
    if dtype and q.device.is_cpu():
        raise DeviceError(f"attention: a CPU stores q's dtype, not {dtype}, as Hopper can")
    scales = _host([scale, result_scale, -result_low], DType.float32)
    values = [q, k, v, *([] if bias is None else [bias]), scales]
    parameters = {"depth": int(q.shape[2]) // heads, "causal": causal}
    return _custom("attention" if bias is None else "attention_bias", values, out, parameters)[0]


def attention_linear(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    weight: Filter,
    residual: TensorValue,
    heads: int,
    *,
    scale: float,
) -> tuple[TensorValue, TensorValue]:
    """Computes ``linear_moments`` of ``attention``; on Hopper, in 16 bits.

    In heads of ``arrange.PROJECTED_DEPTH`` channels. With many queries, and C and keys as in
    ``PROJECTED``, the attention's result is never stored.

    Args:
        q: The queries [N, T, C].
        k: The keys [N, S, C].
        v: The values [N, S, C].
        weight: Of the linear layer, [C, C].
        residual: Added to its result [N, T, C].
        heads: How many heads C holds.
        scale: Scales the scores before the softmax.

    Returns:
        The sum, and the moments of its rows.

    Raises:
        ArgumentError: If shapes, heads or scale do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    types = _type(q), _type(k), _type(v), _matrix(weight), None, _type(residual)
    outs = shapes.attention_linear(*types, heads=heads, scale=scale)
    wanted, depth = arrange.PROJECTED_DEPTH, int(q.shape[2]) // heads
    if depth != wanted:
        raise ArgumentError(
            f"attention_linear: expects heads of {wanted} channels but they have {depth}"
        )
    values = [q, k, v, weight.dense, weight.bias, residual, _host([scale], DType.float32)]
    attended = _type(q)  # room for what attention gives
    y, moments, _ = _custom("attention_linear", values, [*outs, attended], {"heads": heads})
    return y, moments


def attention_logsumexp(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    heads: int,
    *,
    scale: float,
    bias: TensorValue | None = None,
    causal: bool = False,
) -> list[TensorValue]:
    """Attends as ``attention`` does; gives the logarithms of the sums of exponentials, too.

    They are [N, heads, T], float32, -inf for a query that sees no key.
    """
    types = _type(q), _type(k), _type(v), _optional(bias)
    settings: dict[str, Any] = {"heads": heads, "scale": scale, "causal": causal}
    outs = shapes.attention(*types, logsumexp=True, **settings)
    values = [q, k, v, q if bias is None else bias, _host([scale, 1.0, 0.0], DType.float32)]
    return _custom("attention_logsumexp", values, outs, _trained(q, heads, bias, causal))


def attention_grad(
    q: TensorValue,
    k: TensorValue,
    v: TensorValue,
    y: TensorValue,
    dy: TensorValue,
    logsumexp: TensorValue,
    heads: int,
    *,
    scale: float,
    bias: TensorValue | None = None,
    causal: bool = False,
) -> list[TensorValue]:
    """Gives the gradients of ``attention_logsumexp`` by q, k and v.

    The scores are computed again, a tile at a time (Dao 2023, arXiv:2307.08691). A query that sees
    no key has no gradients.

    Args:
        q: The queries [N, T, C].
        k: The keys [N, S, C].
        v: The values [N, S, C].
        y: The result [N, T, C].
        dy: Its gradient.
        logsumexp: The other result [N, heads, T].
        heads: How many heads C holds.
        scale: As in ``attention``, and so the rest.
        bias: Added to the scores.
        causal: Whether query t sees only the keys up to t.

    Raises:
        ArgumentError: If shapes, heads or scale do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    given = [q, k, v, y, dy, logsumexp]
    settings: dict[str, Any] = {"heads": heads, "scale": scale, "causal": causal}
    outs = shapes.infer("attention_grad", [*map(_type, given), _optional(bias)], settings)
    room = _type(logsumexp) if q.device.is_gpu() else Type((1, 1, 1), "float32")
    values = [*given, q if bias is None else bias, _host([scale], DType.float32)]
    return _custom("attention_grad", values, [*outs, room], _trained(q, heads, bias, causal))[:3]


def _trained(
    q: TensorValue, heads: int, bias: TensorValue | None, causal: bool
) -> dict[str, int | bool]:
    """Gives the parameters of attention while it is trained."""
    return {"depth": int(q.shape[2]) // heads, "causal": causal, "biased": bias is not None}


def attention_bias(
    mask: TensorValue, dtype: DType, *, heads: int, queries: int, keys: int
) -> TensorValue:
    """Lays a mask out as ``attention`` takes it, by MAX's own kernels; see ``shapes``."""
    out = shapes.attention_bias(_type(mask), heads=heads, queries=queries, keys=keys)
    if mask.dtype == DType.bool:
        never = ops.constant(-math.inf, DType.float32, mask.device)
        mask = ops.where(mask, ops.constant(0, DType.float32, mask.device), never)
    else:  # finite numbers stay finite where kernels multiply them
        mask = mask.cast(dtype)
        if dtype != DType.float16:
            least = ops.constant(-MOST_BIAS, dtype, mask.device)
            infinite = ops.equal(mask, ops.constant(-math.inf, dtype, mask.device))
            mask = ops.where(ops.greater(least, mask) & ~infinite, least, mask)
    mask = mask.cast(dtype)
    p, h, t, s = [1] * (4 - mask.rank) + list(mask.shape)
    mask = mask.reshape((p, h, t, s))
    shape = [p, h, queries if h != 1 else t, keys]
    if [t, s] != shape[2:]:
        mask = ops.broadcast_to(mask, shape)
    mask = mask.reshape((p, int(out.shape[1]), keys))
    return ops.pad(mask, [0, 0, 0, 0, 0, 1]) if keys % 2 else mask


def normalize(
    pixels: TensorValue, mean: TensorValue, scale: TensorValue, dtype: DType, channels: int = 0
) -> TensorValue:
    """Computes (pixels[N, H, W, C] - mean[C]) * scale[C] in float32, as ``dtype``.

    Args:
        pixels: The pixels.
        mean: Of each channel.
        scale: Of each channel.
        dtype: Of the result; uint8 on a CPU: rounded to nearest even, and saturated.
        channels: Of the result in uint8, if it has more than C; the others are 0.

    Raises:
        ArgumentError: If mean or scale is not [C].
        DeviceError: If the device has no kernel for the dtype.
    """
    types = (_type(each) for each in (pixels, mean, scale))
    out = shapes.normalize(*types, dtype=dtype.name, channels=channels)
    return _custom("normalize", [pixels, mean, scale], [out])[0]


def optimizer_step(places: TensorValue, settings: TensorValue, dtype: DType) -> TensorValue:
    """Takes a step of SGD or Adam with parameters that lie where ``places`` says, in place.

    Args:
        places: int64 [T, 7]: for each parameter the addresses of itself, of its gradient and of
            three states, 0 for those that are not there; its numbers; the chunks of those before.
        settings: float32, or float64 as the parameters [T, 10]; ops/optimizer.mojo says which.
        dtype: Of the parameters.

    Returns:
        Nothing that counts, [1]: the graph has to give it.
    """
    done = Type((1,))
    return _custom("optimizer_step", [places, settings], [done], {"dtype": dtype})[0]


def resample(places: TensorValue, edge: int) -> TensorValue:
    """Turns, resizes and crops pictures that lie where ``places`` says, into pixels that do, too.

    Args:
        places: int64 [N, 13]; ops/resample.mojo says what of.
        edge: The longer one of the pixels.

    Returns:
        Nothing that counts, [1]: the graph has to give it.
    """
    return _custom("resample", [places, _host([edge], DType.int64)], [Type((1,))])[0]


def stem_maxpool(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    *,
    stride: int,
    padding: int,
    dtype: str = "",
) -> TensorValue:
    """Computes a ResNet's stem: maxpool(conv2d(normalize(x), relu), 3, stride=2, padding=1).

    On an NVIDIA GPU, in 16 bits; the filter is ``Parameters.fragments``.

    Args:
        x: Pixels [N, H, W, C]: uint8 levels, or floats that are normalised already.
        filter: The weights; the result has their dtype.
        levels: Mean and scale [C] of uint8 levels; None for floats.
        stride: Pixels between windows of the convolution.
        padding: Zeros on each side of the normalised image.
        dtype: Of the result, if it is another: uint8, to which it is rounded.

    Raises:
        ArgumentError: If shapes or geometry do not fit, or levels are missing or too many.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.stem_maxpool(
        _type(x), *_levels(levels), _filter(filter), None,
        stride=stride, padding=padding, dtype=dtype or filter.dtype.name,
    )  # fmt: skip
    values, parameters = _stem(x, filter, levels, stride)
    window = _window(filter.shape[:2], stride, padding)
    return _custom("stem_maxpool", [*values, window], [out], parameters)[0]


def stem_maxpool_conv2d(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    following: Filter,
    *,
    stride: int,
    padding: int,
) -> tuple[TensorValue, TensorValue]:
    """Computes a ResNet's stem and the first convolution behind it: y, and relu(conv2d(y)).

    See ``stem_maxpool``; y is not read again.

    Args:
        x: Pixels [N, H, W, C]: uint8 levels, or floats that are normalised already.
        filter: The weights of the stem; the results have their dtype.
        levels: Mean and scale [C] of uint8 levels; None for floats.
        following: The next filter, of 1 x 1 and without a stride.
        stride: Pixels between windows of the first convolution.
        padding: Zeros on each side of the normalised image.

    Returns:
        y[N, P, Q, F], and what follows [N, P, Q, G].

    Raises:
        ArgumentError: If shapes or geometry do not fit, or levels are missing or too many.
        DeviceError: If the device has no kernel for the dtype.
    """
    outs = shapes.stem_maxpool_conv2d(
        _type(x), *_levels(levels), _filter(filter), None, _filter(following), None,
        stride=stride, padding=padding, dtype=filter.dtype.name,
    )  # fmt: skip
    values, parameters = _stem(x, filter, levels, stride)
    window = _window(filter.shape[:2], stride, padding)
    parameters["aligned"] = arrange.is_aligned(following.shape, following.dtype)
    values += [following.dense, following.bias, window]
    y, z = _custom("stem_maxpool_conv2d", values, outs, parameters)
    return y, z


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
    out = shapes.stem_layernorm(
        _type(x), *_levels(levels), _filter(filter), None, _type(weight), _type(bias),
        stride=stride, padding=padding, dtype=filter.dtype.name,
    )  # fmt: skip
    values, parameters = _stem(x, filter, levels, stride)
    window = _window(filter.shape[:2], stride, padding)
    values += [weight, bias, _host([eps], DType.float32), window]
    return _custom("stem_layernorm", values, [out], parameters)[0]


def stem_conv2d(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    *,
    stride: int,
    padding: int,
    epilogue: str = "none",
    dtype: str = "",
) -> TensorValue:
    """Computes an EfficientNet's stem: act(conv2d(normalize(x))), of an activation or none.

    See ``stem_maxpool``; the result is [N, P, Q, F].

    Raises:
        ArgumentError: If shapes or geometry do not fit, or levels are missing or too many.
        DeviceError: If the device has no kernel for the dtype.
    """
    out = shapes.stem_conv2d(
        _type(x), *_levels(levels), _filter(filter), None,
        stride=stride, padding=padding, dtype=dtype or filter.dtype.name, epilogue=epilogue,
    )  # fmt: skip
    values, parameters = _stem(x, filter, levels, stride)
    window = _window(filter.shape[:2], stride, padding)
    parameters["epilogue"] = epilogue
    return _custom("stem_conv2d", [*values, window], [out], parameters)[0]


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
    dtype: str = "",
    scales: Sequence[float] = (1.0, 0.0) * 3,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Normalises tokens and convolves them, channel by channel, into query, key and value.

    The class token, if there is one, is normalised and passes by the convolutions. For odd windows
    of up to 5, on a CPU, and on an NVIDIA GPU if C is a multiple of 16 bytes.

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
        dtype: Of the results: uint8 or float8_e4m3fn, on Hopper; x's if it is empty.
        scales: Of results in 8 bits scale and zero point of query, key and value.

    Returns:
        Query [N, T, C], key and value [N, T', C].

    Raises:
        ArgumentError: If shapes or geometry do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    kernel = filters[0].shape[0]
    outs = shapes.depthwise_qkv(
        _type(x), _type(norm[0]), _type(norm[1]),
        *(part for each in filters for part in (_filter(each), None)),
        size=size, kernel=kernel, padding_q=padding_q, padding_kv=padding_kv,
        stride_kv=stride_kv, class_token=class_token, dtype=dtype,
    )  # fmt: skip
    values = [x, *norm]
    for filter in filters:
        values += [filter.dense, filter.bias]
    window = [int(class_token), *size, kernel, padding_q, padding_kv, stride_kv]
    values += [_host([eps, *scales], DType.float32), _host(window, DType.int64)]
    q, k, v = _custom("depthwise_qkv", values, outs, {"kernel": kernel})
    return q, k, v


def class_token(
    tokens: TensorValue,
    token: TensorValue,
    norm: tuple[TensorValue, TensorValue] | None = None,
    eps: float = 1e-5,
) -> TensorValue:
    """Puts token[C] before the tokens [N, T, C] of each image, or their norm: [N, T + 1, C].

    Args:
        tokens: The others.
        token: Of all images, in their dtype.
        norm: Weight and bias of a layer norm of the others, float32 [C].
        eps: Added to the variance.

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype.
    """
    vectors = norm or (None, None)
    out = shapes.class_token(_type(tokens), _type(token), *map(_optional, vectors))
    vectors = norm or (_zeros(1, tokens.device),) * 2
    values = [tokens, token, *vectors, _host([eps], DType.float32)]
    return _custom("class_token", values, [out], {"norms": norm is not None})[0]


def concat(
    values: Sequence[TensorValue],
    axis: int,
    expression: str = "x0",
    vectors: Sequence[TensorValue] = (),
) -> TensorValue:
    """Puts tensors one behind the other along an axis, and computes an expression of that.

    More than eight go in several launches. MAX's own op copies what our ops do not compute, such as
    integers; of dozens of values it makes kernels that take its compiler gigabytes.

    Args:
        values: Tensors of one dtype.
        axis: Along which; the last one if there are vectors.
        expression: Of the concat, ``x0``, and of the vectors, ``x1``, ...
        vectors: Up to three, [C], in float32.

    Raises:
        ArgumentError: If the shapes do not fit.
        DeviceError: If the device has no kernel for the dtype and there is an expression.
    """
    axis %= len(values[0].shape)
    if expression == "x0" and not supported(values[0].dtype, values[0].device):
        return ops.concat(list(values), axis=axis)
    while len(values) > MOST_PARTS:
        parts = [values[i : i + MOST_PARTS] for i in range(0, len(values), MOST_PARTS)]
        values = [concat(part, axis) if len(part) > 1 else part[0] for part in parts]
    given = [*values, *vectors]
    out = shapes.concat(*map(_type, given), axis=axis, expression=expression)
    inputs = [*values, *[values[0]] * (MOST_PARTS - len(values))]
    inputs += [*vectors, *[values[0]] * (MOST_VECTORS - len(vectors))]  # not read
    return _custom("concat", inputs, [out], {"axis": axis, "expression": expression})[0]


def supported(dtype: DType, device: DeviceRef) -> bool:
    """Tells whether all ops compute in ``dtype`` on ``device``."""
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
    out: Type,
    epilogue: str,
    parameters: Mapping[str, Any],
) -> TensorValue:
    """Adds a node with an epilogue; where it does not add, x stands for the residual, not read."""
    inputs = [x, *weights, x if residual is None else residual, *settings]
    return _custom(name, inputs, [out], {"epilogue": epilogue, **parameters})[0]


def _stem(
    x: TensorValue,
    filter: Filter,
    levels: tuple[TensorValue, TensorValue] | None,
    stride: int,
) -> tuple[list[Any], dict[str, Any]]:
    """Gives a stem's inputs but for its window, and its parameters."""
    r, s, c, _ = filter.shape
    mean, scale = levels or (_zeros(c, x.device), _zeros(c, x.device))
    values = [x, mean, scale, filter.fragments, filter.bias]
    return values, {"c": c, "r": r, "s": s, "stride": stride}


def _levels(levels: tuple[TensorValue, TensorValue] | None) -> tuple[Type | None, Type | None]:
    return (_type(levels[0]), _type(levels[1])) if levels else (None, None)


def _window(
    taps: tuple[int, int],
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> TensorValue:
    """Gives the nine numbers of ops/geometry.mojo; the padding below and right is not among them.

    It follows from the sizes of the output.
    """
    pairs = (shapes.pair(each) for each in (stride, padding, dilation))
    return _host([*taps, *(number for each in pairs for number in each), groups], DType.int64)


def _aligned(x: TensorValue, filter: Filter, **window: Any) -> bool:
    """Tells whether a GPU needs only the kernels for aligned sizes."""
    return not x.device.is_cpu() and arrange.is_aligned(filter.shape, x.dtype, **window)


def _is_aligned_matrix(b: TensorValue) -> bool:
    """Tells the same of a product by b, if it is one matrix [N, K] for all."""
    sizes = [int(size) for size in b.shape if isinstance(size, StaticDim)]
    known = b.rank == len(sizes) == 2
    return known and not b.device.is_cpu() and arrange.is_aligned((1, 1, *sizes[::-1]), b.dtype)


def _custom(
    name: str,
    values: Sequence[Any],
    outs: Sequence[Type],
    parameters: Mapping[str, Any] | None = None,
) -> list[TensorValue]:
    """Adds an op, on the device of its first input.

    Raises:
        DeviceError: If the device has no kernel for the dtype.
    """
    device, dtype = values[0].device, DType[outs[0].dtype]
    if dtype.name in (*EIGHT_BITS, "bool"):  # levels and masks: what they were computed of counts
        kinds = [value.dtype for value in values if value.dtype.name not in EIGHT_BITS]
        dtype = next((kind for kind in kinds if kind.is_float()), DType.float32)
    _takes(name, device, dtype)
    types = [TensorType(DType[out.dtype], dims(out.shape), device=device) for out in outs]
    results = ops.custom(name, device=device, values=values, out_types=types, parameters=parameters)
    return [result.tensor for result in results]


def _takes(name: str, device: DeviceRef, *dtypes: DType) -> None:
    """Checks that an op has kernels for dtypes.

    Raises:
        DeviceError: If the device has none for one of them.
    """
    takes = _dtypes(device)
    if device.is_cpu() and name.startswith("sparse"):
        takes = takes[:1]
    if device.is_cpu() and name in CHECKED:
        takes = (*takes, DType.float64)
    if name == "foreach":
        takes = (*takes, DType.int64)
    for dtype in dtypes:
        if dtype not in takes:
            raise DeviceError(
                f"{name}: on a {'CPU' if device.is_cpu() else 'GPU'} the dtype must be one of"
                f" {', '.join(d.name for d in takes)} but is {dtype.name}"
            )


def _lengths(sizes: Sequence[Size]) -> TensorValue:
    """Gives sizes to an op as int64 in host memory; those of the batch are known when it runs."""
    known = [size for size in sizes if isinstance(size, int)]
    return (
        _host(known, DType.int64) if len(known) == len(sizes) else ops.shape_to_tensor(dims(sizes))
    )


def _optional(value: TensorValue | None) -> Type | None:
    return None if value is None else _type(value)


def _type(value: TensorValue) -> Type:
    """Types a value of a graph as programs do."""
    return Type(tuple(_size(dim) for dim in value.shape), value.dtype.name)


def dims(shape: Iterable[Size]) -> list[Dim]:
    """Writes a shape as MAX does; a multiple needs a graph around it."""
    found = []
    for number, name in map(split, shape):
        dim = Dim(name) if name else Dim(number)
        found.append(dim * number if name and number != 1 else dim)
    return found


def _size(dim: Dim) -> Size:
    """Reads what ``dims`` wrote; MAX writes a multiple as ``Dim('batch') * Dim(64)``."""
    if isinstance(dim, (StaticDim, SymbolicDim)):
        return int(dim) if isinstance(dim, StaticDim) else str(dim)
    parts = re.findall(r"Dim\(('?)(\w+)'?\)", repr(dim))
    return product([part if quote else int(part) for quote, part in parts])


def _filter(filter: Filter) -> Type:
    r, s, c, f = filter.shape
    return Type((f, c, r, s))


def _matrix(weight: Filter) -> Type:
    _, _, c, f = weight.shape
    return Type((f, c))


def _host(numbers: Sequence[float], dtype: DType) -> TensorValue:
    """Makes a constant that a kernel's launch code reads: it stays in host memory."""
    return ops.constant(np.array(numbers, dtype.to_numpy()), dtype, device=DeviceRef.CPU())


def _zeros(count: int, device: DeviceRef, dtype: DType = DType.float32) -> TensorValue:
    return ops.constant(np.zeros(count, dtype.to_numpy()), dtype, device=device)
