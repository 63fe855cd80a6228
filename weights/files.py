"""Reads checkpoint files into numpy: safetensors memory-mapped, torch's pickles through torch."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.weights.layout import Array

SAFETENSORS = (".safetensors",)
PICKLES = (".bin", ".pth", ".pt")

_DTYPES = {  # safetensors' name -> torch's and numpy's; bfloat16 is widened on reading
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "|i1"),
    "U8": ("uint8", "|u1"),
    "BOOL": ("bool", "|b1"),
}
_NESTS = ("state_dict", "model", "model_state", "model_state_dict", "net", "module")
_WRAPPERS = ("module.", "_orig_mod.")  # DataParallel, torch.compile


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
                f"{self._path.name}: expected the file as it was when it was loaded but it has"
                " been overwritten; load the model again"
            )

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns


def read_file(path: Path) -> State:
    """Reads a ``.safetensors``, ``.bin``, ``.pth`` or ``.pt`` file.

    Raises:
        ModelError: If it is damaged, is no state dict, or needs torch and there is none.
    """
    if path.suffix in SAFETENSORS:
        return _unwrap_keys(_read_safetensors(path))
    if path.suffix in PICKLES:
        return _unwrap_keys(_read_pickle(path))
    raise ModelError(
        f"{path.name}: expected a checkpoint ending in {', '.join(SAFETENSORS + PICKLES)}"
        f" but it ends in {path.suffix or 'nothing'!r}; rename or convert it"
    )


def read_shards(index: Path) -> State:
    """Reads every file that ``*.index.json`` names into one state dict.

    Raises:
        ModelError: If the index is damaged or a shard is missing.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index.name}: expected a 'weight_map' of tensors to files but has none; download the"
            " model again"
        )
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / Path(name).name).is_file()]
    if missing:
        raise ModelError(
            f"{index.name}: expected the files {', '.join(names)} beside it but"
            f" {', '.join(missing)} is missing; download the model again"
        )
    state = State({}, {})
    for name in names:
        shard = read_file(index.parent / Path(name).name)
        state.tensors.update(shard.tensors)
        state.dtypes.update(shard.dtypes)
        state.maps.extend(shard.maps)
    return state


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        ModelError: If it cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name}: expected JSON but {reason(error)}; repair it") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path.name}: expected a JSON object but it holds a {type(content).__name__};"
            " repair it"
        )
    return content


def _read_safetensors(path: Path) -> State:
    """Maps a safetensors file; bfloat16 is widened."""
    state = State({}, {})
    try:
        mapped, tensors = map_safetensors(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path.name}: expected a safetensors file but {reason(error)}; download it again"
        ) from None
    except KeyError as error:
        raise ModelError(
            f"{path.name}: expected tensors of {', '.join(name for name, _ in _DTYPES.values())}"
            f" but one has {error}; convert it to one of them"
        ) from None
    state.maps.append(mapped)
    for key, (dtype, array) in tensors.items():
        state.dtypes[key] = dtype
        state.tensors[key] = _widen(array) if dtype == "bfloat16" else array
    return state


def map_safetensors(path: Path) -> tuple[Mapped, dict[str, tuple[str, Array]]]:
    """Maps a safetensors file: length of the header, header in JSON, data.

    Format: github.com/huggingface/safetensors.

    Returns:
        The mapped file; the dtype's name and the array of each tensor, bfloat16 as its bits.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged.
        KeyError: If a tensor has an unknown dtype.
    """
    file = Mapped(path)
    data, size = file.data, file.size
    if size < 8:
        raise ValueError("it is empty or cut off")
    (length,) = struct.unpack("<Q", data[:8])
    if length > size - 8:
        raise ValueError("its header is cut off")
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    try:
        header.pop("__metadata__", None)
        for key, entry in header.items():
            kind, (begin, end) = str(entry["dtype"]), entry["data_offsets"]
            name, code = _DTYPES[kind]
            begin, end, dtype = begin + 8 + length, end + 8 + length, np.dtype(code)
            shape = tuple(entry["shape"])
            count = math.prod(shape)
            if not 8 + length <= begin <= end <= size or count * dtype.itemsize != end - begin:
                raise ValueError("its data is cut off")
            tensors[key] = (name, np.frombuffer(data, dtype, count, begin).reshape(shape))
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error) or "its header is damaged") from None
    return file, tensors


def _widen(bits: Array) -> Array:
    """Turns bfloat16 given as uint16 into float32: its upper half."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def _read_pickle(path: Path) -> State:
    """Reads a state dict through torch, which never runs what the pickle asks to run."""
    try:
        import torch
    except ImportError:
        raise ModelError(
            f"{path.name}: expected torch to be installed, which {path.suffix} files need, but it"
            f" is not; run `maxvision weights convert {path.name} -o DIR` where torch is, and use"
            " DIR here"
        ) from None
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise ModelError(f"{path.name}: expected a checkpoint but {reason(error)}") from None
    except Exception as error:  # unpickling fails in as many ways as a pickle can be written
        unsafe = "weights_only" in str(error) or "Unsupported" in str(error)
        raise ModelError(
            f"{path.name}: expected a state dict (names to tensors) but it"
            + (" holds other objects too, which could run code" if unsafe else " cannot be read")
            + "; save it with torch.save(model.state_dict(), ...)"
        ) from None
    tensors = _state_dict(content, torch.Tensor)
    if tensors is None:
        raise ModelError(
            f"{path.name}: expected a state dict (names to tensors) but it holds a"
            f" {type(content).__name__}; save it with torch.save(model.state_dict(), ...)"
        )
    state = State({}, {})
    for key, tensor in tensors.items():
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        narrow = dense.dtype == torch.bfloat16 or dense.is_quantized
        state.tensors[key] = (dense.float() if narrow else dense).numpy()
        state.dtypes[key] = str(tensor.dtype).removeprefix("torch.")
    return state


def _state_dict(content: Any, tensor: type) -> dict[str, Any] | None:
    """Finds the names and tensors in what a checkpoint holds, or returns None.

    Training checkpoints keep them under one of a few keys, beside an optimiser and counters.
    """
    if not isinstance(content, Mapping):
        return None
    for nest in _NESTS:
        if isinstance(content.get(nest), Mapping):
            return _state_dict(content[nest], tensor)
    if content and all(isinstance(k, str) and isinstance(v, tensor) for k, v in content.items()):
        return dict(content)
    return None


def _unwrap_keys(state: State) -> State:
    """Drops the prefix that a wrapper around the model gave to every key."""
    for prefix in _WRAPPERS:
        if state.tensors and all(key.startswith(prefix) for key in state.tensors):
            return _unwrap_keys(
                State(
                    {key.removeprefix(prefix): value for key, value in state.tensors.items()},
                    {key.removeprefix(prefix): value for key, value in state.dtypes.items()},
                    state.maps,
                )
            )
    return state


def reason(error: Exception) -> str:
    """Says in a few words why reading failed."""
    if isinstance(error, OSError):
        return f"reading it failed ({error.strerror or error})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not ({error.msg} at line {error.lineno})"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return str(error) or "it is damaged"
