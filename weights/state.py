"""What a checkpoint file holds: a state dict, whose tensors are mapped and read late."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.weights.layout import Array

DTYPES = {  # torch's name -> numpy's; bfloat16 as its bits
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
}


@dataclass(frozen=True)
class State:
    """Holds a state dict: tensors by key, and the name of the dtype each is stored in.

    Attributes:
        tensors: Arrays, memory-mapped where the file allows; bfloat16 is widened to float32.
        dtypes: The stored dtype of each, such as ``"bfloat16"``.
        maps: The files that are mapped.
    """

    tensors: dict[str, Array]
    dtypes: dict[str, str]
    maps: list[Mapped] = field(default_factory=list)

    def add(self, key: str, dtype: str, array: Array) -> None:
        """Adds a tensor; bfloat16, given as its bits, is widened."""
        self.dtypes[key] = dtype
        self.tensors[key] = widen(array) if dtype == "bfloat16" else array

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Makes sure that the mapped files are whole; lets what was read leave memory again.

        Raises:
            ModelError: If a file has changed since it was mapped.
        """
        for mapped in self.maps:
            mapped.check()
        try:
            yield
        finally:
            for mapped in self.maps:
                mapped.data.madvise(mmap.MADV_DONTNEED)


class Mapped:
    """A file in memory as far as it is read; what is written there stays in this process."""

    def __init__(self, path: Path) -> None:
        """Maps a file.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is empty.
        """
        self._path = path
        self._file = path.open("rb")
        self._stamp = self._stat()
        if not self.size:
            raise ValueError("it is empty or cut off")
        self.data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def size(self) -> int:
        """Counts the bytes of the file."""
        return self._stamp[0]

    def check(self) -> None:
        """Makes sure that the file is what was mapped: reading beyond its end would be fatal.

        Raises:
            ModelError: If it has changed.
        """
        if self._stat() != self._stamp:
            raise ModelError(
                f"{self._path}: the file has been overwritten since it was loaded; load the model"
                " again"
            )

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns


def widen(bits: Array) -> Array:
    """Turns bfloat16 given as uint16 into float32: its upper half."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def reason(error: Exception) -> str:
    """Says in a few words why reading failed."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return str(error) or "it is damaged"
