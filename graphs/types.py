"""The type of a value: its shape and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

FLOAT8 = "float8_e4m3fn"
"""Floats of a sign, 4 bits of exponent and 3 of mantissa, without infinity (arXiv:2209.05433)."""
HALVES = frozenset(("bfloat16", "float16"))
"""The floats of 16 bits."""
FLOATS = frozenset(("float32", "bfloat16", "float16"))
"""The floats that a GPU computes."""
EIGHT_BITS = ("uint8", FLOAT8)
"""In which quantised activations are stored."""

BATCH = "batch"
"""The symbolic size of a batch."""

Size = int | str
"""A size: a number, the name of one that is not known yet, or a multiple of that: ``64*batch``."""


def split(size: Size) -> tuple[int, str]:
    """Divides a size into a number and a name: (64, "batch"), (1, "batch"), (64, "")."""
    if isinstance(size, int):
        return size, ""
    number, times, name = size.partition("*")
    return (int(number), name) if times else (1, size)


def multiple(number: int, name: str) -> Size:
    """Makes a size of what ``split`` gives."""
    return (name if number == 1 else f"{number}*{name}") if name else number


def part(size: Size, parts: int) -> Size:
    """Divides a size by a divisor of its number."""
    number, name = split(size)
    return multiple(number // parts, name)


def at_batch(size: Size, batch: int) -> int:
    """Gives the number that a size is, where its name stands for ``batch``."""
    number, name = split(size)
    return number * batch if name else number


def product(sizes: Iterable[Size]) -> Size:
    """Multiplies sizes, one of them named at most.

    Raises:
        ValueError: If two are.
    """
    parts = [split(size) for size in sizes]
    names = [name for _, name in parts if name]
    if len(names) > 1:
        raise ValueError(f"the sizes {' and '.join(names)} are both unknown")
    return multiple(math.prod(number for number, _ in parts), names[0] if names else "")


class Type(NamedTuple):
    """The shape of a value, sizes known or named, and its dtype by its name in numpy or MAX."""

    shape: tuple[Size, ...]
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        """How many vectors of the last axis an image of the batch has; 0 where no size says so."""
        parts = [split(size) for size in self.shape[:-1]]
        if [name for _, name in parts if name] != [BATCH]:
            return 0
        return math.prod(number for number, _ in parts)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
