"""Reads checkpoint files into numpy, memory-mapped: safetensors, and what torch.save wrote."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.weights.layout import Array
from maxvision.weights.state import DTYPES, Mapped, State, reason

SAFETENSORS = (".safetensors",)
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pth.tar")

_DTYPES = {  # safetensors' name -> torch's
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "BOOL": "bool",
}
# DataParallel, torch.compile, Lightning modules
_WRAPPERS = ("module.", "_orig_mod.", "model.")


def ending(path: Path) -> str:
    """Returns the ending of a checkpoint's name, such as ``.pth.tar``; nothing if it has none."""
    known = (each for each in SAFETENSORS + PICKLES if path.name.endswith(each))
    return max(known, key=len, default="")


def read_file(path: Path) -> State:
    """Reads a file whose name ends as one of ``SAFETENSORS`` or ``PICKLES`` does.

    Raises:
        ModelError: If it is damaged or is no state dict.
    """
    return _unwrap_keys(_read(path))


def _read(path: Path) -> State:
    if ending(path) in SAFETENSORS:
        return _read_safetensors(path)
    if ending(path) in PICKLES:
        from maxvision.weights import torch_file

        return torch_file.read(path)
    raise ModelError(
        f"{path}: the name of a checkpoint must end in {', '.join(SAFETENSORS + PICKLES)}"
        f" but this one ends in {path.suffix or 'nothing'!r}; rename or convert it"
    )


def read_shards(index: Path) -> State:
    """Reads every file that ``*.index.json`` names into one state dict.

    Raises:
        ModelError: If the index is damaged or a shard is missing.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: there is no 'weight_map' of tensors to files in it; download the model again"
        )
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / Path(name).name).is_file()]
    if missing:
        raise ModelError(
            f"{index}: the index names {', '.join(names)} but beside it"
            f" {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; download the"
            " model again"
        )
    state = State({}, {})
    for name in names:
        shard = _read(index.parent / Path(name).name)
        state.tensors.update(shard.tensors)
        state.dtypes.update(shard.dtypes)
        state.maps.extend(shard.maps)
    return _unwrap_keys(state)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        ModelError: If it cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: this cannot be read as JSON ({reason(error)}); repair it"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: the JSON must be an object but is a {type(content).__name__}; repair it"
        )
    return content


def _read_safetensors(path: Path) -> State:
    """Maps a safetensors file; bfloat16 is widened."""
    state = State({}, {})
    try:
        mapped, tensors = map_safetensors(path)
        for dtype, _ in tensors.values():
            if dtype not in DTYPES:  # floats of 8 bits, which only compiled models have
                raise KeyError(dtype)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path}: this cannot be read as a safetensors file ({reason(error)}); download it"
            " again"
        ) from None
    except KeyError as error:
        raise ModelError(
            f"{path}: a tensor has the dtype {error}, which is not read; convert it to one of"
            f" {', '.join(DTYPES)}"
        ) from None
    state.maps.append(mapped)
    for key, (dtype, array) in tensors.items():
        state.add(key, dtype, array)
    return state


def map_safetensors(path: Path) -> tuple[Mapped, dict[str, tuple[str, Array]]]:
    """Maps a safetensors file: length of the header, header in JSON, data.

    Format: github.com/huggingface/safetensors.

    Returns:
        The mapped file; the dtype's name and the array of each tensor, bfloat16 as its bits, and so
        floats of 8 bits.

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
            name = _DTYPES[kind]
            begin, end, dtype = (
                begin + 8 + length,
                end + 8 + length,
                np.dtype(DTYPES.get(name, "|u1")),
            )
            shape = tuple(entry["shape"])
            count = math.prod(shape)
            if not 8 + length <= begin <= end <= size or count * dtype.itemsize != end - begin:
                raise ValueError("its data is cut off")
            tensors[key] = (name, np.frombuffer(data, dtype, count, begin).reshape(shape))
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error) or "its header is damaged") from None
    return file, tensors


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
