"""The type of a value: its shape and dtype."""

from __future__ import annotations

from typing import NamedTuple

BATCH = "batch"
"""The symbolic size of a batch."""

Size = int | str


class Type(NamedTuple):
    """The shape of a value, sizes known or named, and its dtype by its name in numpy or MAX."""

    shape: tuple[Size, ...]
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"
