"""Tensors as checkpoints hold them: read late, compared, masks multiplied in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]
Reading = Callable[[], AbstractContextManager[None]]


class Stored(Mapping[str, Array]):
    """The weights of a model by name, as the checkpoint stores them.

    Each is read when it is asked for, in memory of its own: floats as float32.
    """

    def __init__(self, parts: Mapping[str, Array], reading: Reading = nullcontext) -> None:
        """Keeps tensors, which must stay as they are; ``reading`` makes a context to read them."""
        self._parts = parts
        self._reading = reading
        self._zeros: dict[str, float] = {}

    def __getitem__(self, name: str) -> Array:
        """Reads a weight."""
        with self._reading():
            part = self._parts[name]
            return np.array(part, np.float32 if part.dtype.kind == "f" else None, order="C")

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def zeros(self, name: str) -> float:
        """Tells the share of zeros of a weight, without a copy of it."""
        if name not in self._zeros:
            with self._reading():
                self._zeros[name] = share_of_zeros(self._parts[name])
        return self._zeros[name]

    def largest(self, name: str) -> Array:
        """Finds the largest magnitude of each filter [F, ...], without a copy of them."""
        with self._reading():
            filters = self._parts[name]
            self._zeros[name] = share_of_zeros(filters)  # while it is in memory
            rest = tuple(range(1, filters.ndim))
            found: Array = np.maximum(filters.max(rest), -filters.min(rest))
            return found


def share_of_zeros(array: Array) -> float:
    """Tells the share of zeros of an array; numpy counts truth values faster than floats."""
    return 1 - float(np.count_nonzero(array != 0)) / max(array.size, 1)


def is_finite(array: Array) -> bool:
    """Tells whether an array, as float32, has neither NaN nor infinity; no copy of it is made."""
    if not array.size:
        return True
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.array([array.min(), array.max()], np.float32)).all())


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
