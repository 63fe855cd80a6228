"""Turns torch's tensors into what the ops want, once, at import.

Filters become ``[R, S, C, F]``, linear weights ``[in, out]``; batch normalisation is folded into
the filter before it, in float64; torch's pruning masks are multiplied in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Reading = Callable[[], AbstractContextManager[None]]

BATCHNORM_EPS = 1e-5  # torch's default, which torchvision, timm, transformers and CvT all keep
BATCHNORM_PARTS = ("weight", "bias", "mean", "var")


@dataclass(frozen=True)
class Layout:
    """Describes how a stored tensor becomes a weight: leading ones dropped, axes permuted.

    Attributes:
        axes: The stored axis (counted after the dropped ones) behind each axis of the weight.
        ones: Leading axes of length 1 that the stored tensor has and the weight has not.
    """

    axes: Shape | None = None
    ones: int = 0

    def __call__(self, stored: Array) -> Array:
        """Returns the weight as a view of ``stored``."""
        weight = stored.reshape(stored.shape[self.ones :])
        return weight if self.axes is None else weight.transpose(self.axes)

    def stored(self, shape: Shape) -> Shape:
        """Returns the shape that a checkpoint stores for a weight of ``shape``."""
        if self.axes is not None:
            shape = tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))
        return (1,) * self.ones + shape


as_is = Layout()
oihw_to_rscf = Layout(axes=(2, 3, 1, 0))
out_in_to_in_out = Layout(axes=(1, 0))
token = Layout(ones=2)  # [1, 1, C] -> [C]


def unfold(weights: dict[str, Shape], normalised: str) -> dict[str, Shape]:
    """Lists what a checkpoint must hold for ``weights``: batch norms not folded yet.

    Args:
        weights: Every weight of the model and its shape, from ``graphs.*.parameters``.
        normalised: Regular expression of the convolutions that a batch norm follows.

    Returns:
        ``weights`` with ``<conv>.bias`` replaced by ``<conv>.batchnorm.{weight,bias,mean,var}``.
    """
    parts: dict[str, Shape] = {}
    for name, shape in weights.items():
        conv, _, kind = name.rpartition(".")
        if kind == "bias" and f"{conv}.filter" in weights and re.fullmatch(normalised, conv):
            parts |= {f"{conv}.batchnorm.{part}": shape for part in BATCHNORM_PARTS}
        else:
            parts[name] = shape
    return parts


class Folded(Mapping[str, Array]):
    """The weights of a model, each made when it is asked for: see `fold`.

    So a model loads in little more memory than its weights take in the end.

    Attributes:
        shapes: The shape of every weight.
    """

    def __init__(self, parts: dict[str, Array], reading: Reading) -> None:
        self._parts = parts
        self._reading = reading
        self._zeros: dict[str, float] = {}
        self.shapes: dict[str, Shape] = {
            name: value.shape for name, value in parts.items() if ".batchnorm." not in name
        }
        for name, value in parts.items():
            conv, var, _ = name.partition(".batchnorm.var")
            if var:
                self.shapes[f"{conv}.bias"] = value.shape

    def __getitem__(self, name: str) -> Array:
        """Makes a weight: float32, contiguous, in memory of its own."""
        conv, _, kind = name.rpartition(".")
        with self._reading():
            if f"{conv}.batchnorm.var" not in self._parts:
                return np.array(self._parts[name], np.float32, order="C")
            scale, shift = self._batchnorm(conv)
            if kind == "bias":
                return shift.astype(np.float32)
            filters = self._parts[name]
            weight = np.empty(filters.shape, np.float32)
            np.multiply(filters, scale, out=weight, dtype=np.float64, casting="same_kind")
            return weight

    def zeros(self, name: str) -> float:
        """Tells the share of zeros of a weight before it is folded, without making it."""
        if name not in self._zeros:
            with self._reading():
                self._zeros[name] = share_of_zeros(self._parts[name])
        return self._zeros[name]

    def finite(self, name: str) -> bool:
        """Tells whether a weight has neither NaN nor infinity, without making it."""
        conv, _, kind = name.rpartition(".")
        if kind != "filter" or f"{conv}.batchnorm.var" not in self._parts:
            return is_finite(self[name])
        with self._reading():
            filters = self._parts[name]
            self._zeros[name] = share_of_zeros(filters)  # while it is in memory
            largest = np.maximum(filters.max((0, 1, 2)), -filters.min((0, 1, 2)))
            with np.errstate(over="ignore"):
                return is_finite((largest * self._batchnorm(conv)[0]).astype(np.float32))

    def _batchnorm(self, conv: str) -> tuple[Array, Array]:
        weight, bias, mean, var = (
            self._parts[f"{conv}.batchnorm.{part}"].astype(np.float64) for part in BATCHNORM_PARTS
        )
        with np.errstate(invalid="ignore"):  # a negative variance gives NaN; the caller checks
            scale = weight / np.sqrt(var + BATCHNORM_EPS)
        return scale, bias - mean * scale

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def fold(parts: dict[str, Array], reading: Reading = nullcontext) -> Folded:
    """Folds every batch norm of ``parts`` (as listed by `unfold`) into its convolution.

    With s = weight / sqrt(var + eps), computed in float64:
    filter' = filter * s over the output channels, bias' = bias - mean * s.

    Args:
        parts: The tensors, which must stay as they are.
        reading: Makes a context in which ``parts`` may be read.
    """
    return Folded(parts, reading)


def share_of_zeros(array: Array) -> float:
    """Tells the share of zeros of an array; numpy counts truth values faster than floats."""
    return 1 - float(np.count_nonzero(array != 0)) / max(array.size, 1)


def is_finite(array: Array) -> bool:
    """Tells whether an array has neither NaN nor infinity, in no memory of its own."""
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def merge_masks(tensors: dict[str, Array]) -> dict[str, Array]:
    """Multiplies torch's pruning pairs ``X_orig``, ``X_mask`` into ``X``.

    Pairs of unequal shape, and halves of a pair, stay as they are, for the rules to report.
    """
    merged = dict(tensors)
    for key, original in tensors.items():
        name = key.removesuffix("_orig")
        mask = tensors.get(f"{name}_mask")
        if name != key and mask is not None and mask.shape == original.shape:
            merged[name] = merged.pop(key) * merged.pop(f"{name}_mask").astype(original.dtype)
    return merged
