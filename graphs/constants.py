"""The values that a program computes when the model loads, in numpy, each when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxvision.graphs.program import Node, Program
from maxvision.graphs.types import FLOAT8

Array = NDArray[Any]

MOST_BIAS = 1e30
"""The largest finite number that is added to scores: beyond it kernels take it for infinity."""


class Constants(Mapping[str, Array]):
    """The weights of a program and what is made of them, by name; nothing is kept.

    So a model loads in little more memory than its weights take in the end.

    Args:
        program: Where the names come from.
        tensors: Its weights, as the checkpoint stores them; each is read when it is asked for.
    """

    def __init__(self, program: Program, tensors: Mapping[str, Array]) -> None:
        self._program = program
        self._tensors = tensors

    def __getitem__(self, name: str) -> Array:
        """Computes a value."""
        node = self._program.producers.get(name)
        if node is None:
            return self._tensors[name]
        if not node.at_load:
            raise KeyError(name)
        given = [self[value] if value else None for value in node.inputs]
        made = np.asarray(EVALUATE[node.op](*given, **node.attributes))
        wanted = self._program.types[name].dtype
        if node.op in ROUNDED and wanted in ("float32", "float64"):
            made = made.astype(wanted, copy=False)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._program.constants))

    def __len__(self) -> int:
        return len(self._program.constants)

    def layer_weight(self, node: Node) -> str:
        """Names the weight of a layer from which its filter is made: before anything is folded."""
        name = node.inputs[1]
        while (maker := self._program.producers.get(name)) is not None:
            name = maker.inputs[0]
        return name


def batch_norm_scale(weight: Array, var: Array, *, eps: float) -> Array:
    """Computes weight / sqrt(var + eps) in float64; NaN where the variance is negative."""
    with np.errstate(invalid="ignore"):
        scale: Array = weight.astype(np.float64) / np.sqrt(var.astype(np.float64) + eps)
    return scale


def batch_norm_shift(bias: Array, mean: Array, scale: Array, before: Array | None = None) -> Array:
    """Computes bias + (before - mean) * scale; ``before`` is the convolution's own bias."""
    moved = mean.astype(np.float64)
    if before is not None:
        moved = moved - before
    shift: Array = bias.astype(np.float64) - moved * scale
    return shift


def scale_filter(filters: Array, scale: Array) -> Array:
    """Multiplies a filter [F, C, R, S], or linear weights, by a scale [F], rounded once."""
    scaled = np.empty(filters.shape, np.result_type(filters, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(
            filters,
            scale.reshape(-1, *(1,) * (filters.ndim - 1)),
            out=scaled,
            dtype=np.float64,
            casting="same_kind",
        )
    return scaled


def norm_filter(filters: Array, weight: Array, *, to: str) -> Array:
    """Multiplies linear weights [F, C] by a norm's weight [C], less a constant of each filter.

    Rows that are normalised add up to 0, so taking a constant from a filter changes no product
    with them. The constant is chosen so that the weights, rounded to a dtype of 16 bits, nearly add
    up to 0 as well. Then rows need not be centred before the product: it does not depend on their
    mean. Gives [F, C] in float32, numbers of the dtype ``to``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        exact = filters.astype(np.float64) * weight
        centred = (exact - exact.mean(1, keepdims=True)).astype(np.float32)
        level = np.zeros((len(centred), 1))
        for _ in range(3):  # a fourth time would not leave less
            found = halves(centred - level.astype(np.float32), to)
            rest = found.sum(1, dtype=np.float64, keepdims=True)
            level += rest / found.shape[1]
        # The smallest weights take what is left: they are rounded to the finest steps.
        for _ in range(2):
            least = np.abs(found).argmin(1)[:, None]
            before = np.take_along_axis(found, least, 1)
            after = halves(before - rest.astype(np.float32), to)
            np.put_along_axis(found, least, after, 1)
            rest += after.astype(np.float64) - before
    return found


def halves(x: Array, to: str) -> Array:
    """Rounds float32 of any shape to bfloat16 or float16, to nearest even; gives float32."""
    if to == "float16":
        return x.astype(np.float16).astype(np.float32)
    found = (bfloat16_bits(x).astype(np.uint32) << 16).view(np.float32)
    return np.where(np.isnan(x), x, found)


def bfloat16_bits(x: Array) -> Array:
    """Gives the bits of float32 rounded to bfloat16, to nearest even, in uint16; not of NaN."""
    bits = x.view(np.uint32)
    upper: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return upper


def norm_shift(filters: Array, bias: Array, before: Array | None = None) -> Array:
    """Computes what a norm's bias [C] becomes behind linear weights [F, C], plus their own bias."""
    with np.errstate(over="ignore", invalid="ignore"):
        shift: Array = filters.astype(np.float64) @ bias.astype(np.float64)
        return shift if before is None else shift + before


LEVELS = {"int8": 127, FLOAT8: 448}
"""The largest number in 8 bits of a filter whose scale is its own; the least is its negative."""


def e4m3(x: Array) -> Array:
    """Rounds to the numbers of ``FLOAT8``, to nearest even; NaN stays, and beyond 448 is 448.

    Numbers have 4 significant bits, and are multiples of 2^-9.
    """
    bounded = np.clip(x, -LEVELS[FLOAT8], LEVELS[FLOAT8])
    _, exponent = np.frexp(bounded)  # of a number from 0.5 to 1
    step = np.ldexp(bounded.dtype.type(1), np.maximum(exponent - 4, -9))
    rounded: Array = np.rint(bounded / step) * step
    return rounded


def e4m3_bits(x: Array) -> NDArray[np.uint8]:
    """Rounds to ``FLOAT8``, and gives the bits: of NaN 0x7f."""
    rounded = e4m3(x)
    size = np.abs(rounded)
    mantissa, exponent = np.frexp(size)  # from 0.5 to 1
    # Bits count up from 0 in steps of 2^-9, and from 2^-6 on in eighths of the power of 2.
    bits = np.where(size < 2.0**-6, size * 2**9, 8 * (exponent + 6) + 16 * mantissa - 8)
    bits = np.where(np.isnan(rounded), 0x7F, bits).astype(np.uint8)
    return bits | (np.signbit(rounded).astype(np.uint8) << 7)


def filter_scales(filters: Array, to: str = "int8") -> Array:
    """Computes what 1 in 8 bits stands for, for each filter of [F, ...], in float64.

    A filter's largest number, of either sign, is that of ``LEVELS``; one of zeros has 1.
    """
    largest: Array = np.abs(filters.reshape(len(filters), -1)).max(1, initial=0).astype(np.float64)
    return np.where(largest > 0, largest, LEVELS[to]) / LEVELS[to]


def quantized_filter(filters: Array, scales: Array | None = None, to: str = "int8") -> Array:
    """Rounds filters [F, ...] to int8, or to numbers of ``FLOAT8``, to nearest even.

    Args:
        filters: The filters.
        scales: What 1 of each stands for [F], of either sign; ``filter_scales`` if None.
        to: To what they are rounded.
    """
    by_filter = filter_scales(filters, to) if scales is None else scales.astype(np.float64)
    by_filter = np.where(by_filter == 0, np.inf, by_filter)  # of zeros, since a norm's weight is 0
    divided = filters / by_filter.reshape(-1, *(1,) * (filters.ndim - 1))
    if to == FLOAT8:
        return e4m3(divided).astype(np.float32)
    return np.clip(np.rint(divided), -128, 127).astype(np.int8)


def fake_quantize_filter(filters: Array, scales: Array | None = None, *, to: str = "int8") -> Array:
    """Rounds filters [F, ...] as ``quantized_filter``, and gives what the numbers stand for."""
    by_filter = filter_scales(filters, to) if scales is None else scales.astype(np.float64)
    whole = quantized_filter(filters, by_filter, to)
    rounded: Array = (whole * by_filter.reshape(-1, *(1,) * (filters.ndim - 1))).astype(np.float32)
    return rounded


def attention_bias(mask: Array, *, heads: int, queries: int, keys: int) -> Array:
    """Lays a mask out as graphs/shapes.py says; finite numbers stay finite, padding is zeros."""
    if mask.dtype == np.bool_:
        added = np.where(mask, np.float32(0), np.float32(-np.inf))
    else:
        added = np.where(np.isinf(mask), mask, np.clip(mask, -MOST_BIAS, MOST_BIAS))
    p, h, t, _ = sides = ((1,) * 4 + mask.shape)[-4:]
    shape = p, h, queries if h != 1 else t, keys
    rows = np.broadcast_to(added.reshape(sides), shape).reshape(p, h * shape[2], keys)
    padded: Array = np.pad(rows, ((0, 0), (0, 0), (0, keys % 2)))
    return padded.astype(np.float64 if mask.dtype == np.float64 else np.float32)


def bytes_mean(mean: Array, scale: Array, *, step: float, low: float) -> Array:
    """Computes the mean by which ``normalize`` gives levels as bytes: (x - it) * scale / step."""
    found: Array = mean.astype(np.float64) + low * step / scale.astype(np.float64)
    return found.astype(np.float32)


EVALUATE: dict[str, Callable[..., Array]] = {
    "attention_bias": attention_bias,
    "batch_norm_scale": batch_norm_scale,
    "batch_norm_shift": batch_norm_shift,
    "scale_filter": scale_filter,
    "norm_filter": norm_filter,
    "norm_shift": norm_shift,
    "fake_quantize_filter": fake_quantize_filter,
    "bytes_mean": bytes_mean,
    "bytes_scale": lambda scale, *, step: (scale / np.float64(step)).astype(np.float32),
    "full": lambda *, shape, value: np.full(shape, value, np.float32),
    "add": np.add,
    "mul": np.multiply,
    "relu": lambda x: np.maximum(x, 0),
    "reshape": lambda x, *, shape: x.reshape(shape),
    "permute": lambda x, *, axes: x.transpose(axes),
    "roll": lambda x, *, shifts, axes: np.roll(x, shifts, axes),
    "slice": lambda x, *, axis, start, stop: x.take(range(start, stop), axis),
    "concat": lambda *parts, axis: np.concatenate(parts, axis),
    "expand": lambda x, *, shape: np.broadcast_to(x, shape),
    "pad": lambda x, *, pads, value=0.0: np.pad(
        x, list(zip(pads[::2], pads[1::2], strict=True)), constant_values=value
    ),
}
"""How ops are computed of weights."""
ROUNDED = ("batch_norm_shift", "scale_filter", "norm_shift")
"""What is rounded to the dtype of its value, once; the scale before it stays in float64."""
