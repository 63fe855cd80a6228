"""Reads what ``torch.save`` wrote, without torch: maps the file, and describes tensors in it.

There are two formats. Since torch 1.6 a checkpoint is a zip archive: ``data.pkl`` is the object,
and ``data/KEY`` the numbers of each storage, uncompressed. Before, it was five pickles in a row
(magic number, version, system, object, keys of the storages), and then for each storage its length
and numbers. Code: torch/serialization.py. Pickles are read by `unpickle`, which runs nothing.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from maxvision.common.errors import ModelError
from maxvision.weights.layout import Array
from maxvision.weights.state import DTYPES, Mapped, State, reason, widen
from maxvision.weights.unpickle import (
    ITEMSIZES,
    DamagedError,
    ForbiddenError,
    Other,
    PickleError,
    Sparse,
    Storage,
    Strided,
    load,
)

_NESTS = (  # where training checkpoints keep the weights; those that were averaged come first
    *("state_dict_ema", "model_ema", "ema_state_dict"),
    *("state_dict", "model", "model_state", "model_state_dict", "net", "module"),
)
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the format before 1.6
_ENTRY = struct.Struct("<4s5H3L2H")  # a file's header in a zip archive
_PLAIN = 0x8 | 0x800  # its flags: sizes behind the data, a name in UTF-8
_ORDERS = {b"little": False, b"big": True}
_DIMENSIONS, _EXTENT = 32, 1 << 48  # numpy's limit, and more than any tensor has
_DENSE = 1 << 30  # numbers that the sparse tensors of a file may have when they are dense
_SHARED = 4  # tensors of a file that may be the same numbers, in the mean
_NAME = 80  # characters of a name that a message shows

_SAVE = "save the weights alone, with torch.save(model.state_dict(), 'weights.pth')"


@dataclass(frozen=True)
class _File:
    """A checkpoint, and where the numbers of each storage are.

    Attributes:
        mapped: The file.
        content: The object that was saved.
        places: First byte and length of each storage, by key.
        order: ``"<"`` or ``">"``, how numbers lie in memory.
    """

    mapped: Mapped
    content: object
    places: Mapping[str, tuple[int, int]]
    order: Literal["<", ">"] = "<"


def read(path: Path) -> State:
    """Reads a state dict, at the top or where training checkpoints keep it.

    Of weights and their moving average, the average is taken. Tensors stay in the file, whichever
    device they were saved from; sparse ones are made dense.

    Raises:
        ModelError: If the file is damaged, or holds more or other things than a state dict.
    """
    try:
        mapped = Mapped(path)
        file = _read_zip(mapped) if mapped.data[:2] == b"PK" else _read_stream(mapped)
        tensors = _state_dict(file.content)
        state = State({}, {}, [mapped])
        dense = shared = 0
        for key, tensor in tensors.items():
            name = key[:_NAME]
            if isinstance(tensor, Sparse):
                _check(name, tensor.shape)
                dense += math.prod(tensor.shape)
                if dense > _DENSE:
                    raise PickleError(f"{name!r} is sparse and too large to be made dense")
                state.tensors[key] = _densify(name, tensor, file)
                state.dtypes[key] = tensor.parts[-1].dtype
            else:
                array = _array(name, tensor, file)
                shared += array.nbytes
                if shared > _SHARED * mapped.size:
                    raise PickleError("its tensors are the same numbers too often")
                state.add(key, tensor.dtype, array)
    except OSError as error:
        raise ModelError(f"{path}: the checkpoint cannot be read ({reason(error)})") from None
    except PickleError as error:
        raise ModelError(
            f"{path}: this cannot be read as a state dict (names to tensors): {error}; {_SAVE}"
        ) from None
    except Exception:  # a file is damaged in as many ways as it can be written
        raise ModelError(
            f"{path}: this cannot be read as a state dict (names to tensors): it is damaged or cut"
            " off; download it again"
        ) from None
    return state


# --- the two formats --------------------------------------------------------------------------


def _read_zip(mapped: Mapped) -> _File:
    """Reads the object of an archive; each record is where both of its headers say."""
    with zipfile.ZipFile(cast("IO[bytes]", mapped.data)) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names):
        raise PickleError("its archive has two records of one name")
    roots = [name[: -len("data.pkl")] for name in names if name.split("/")[-1] == "data.pkl"]
    if len(roots) != 1:
        raise PickleError(f"its archive has {len(roots) or 'no'} records data.pkl")
    (root,) = roots
    if f"{root}constants.pkl" in names:
        raise PickleError("it is a TorchScript program")
    records = {
        entry.filename.removeprefix(root): entry
        for entry in entries
        if entry.filename.startswith(root)
    }
    begin, size = _place(mapped, records["data.pkl"])
    pickled = mapped.data[begin : begin + size]
    if records["data.pkl"].CRC not in (0, zlib.crc32(pickled)):  # torch can be told to leave it out
        raise PickleError("the checksum of data.pkl is another")
    storages: dict[str, Storage] = {}
    stream = io.BytesIO(pickled)
    content = load(stream, storages)
    if stream.tell() != size:
        raise PickleError("something follows the end of data.pkl")
    big = False
    if "byteorder" in records:
        begin, size = _place(mapped, records["byteorder"])
        big = _ORDERS[mapped.data[begin : begin + size]]
    missing = next((key for key in storages if f"data/{key}" not in records), None)
    if missing is not None:
        raise PickleError(f"its archive has no record {f'data/{missing}'[:_NAME]!r}")
    places = {key: _place(mapped, records[f"data/{key}"]) for key in storages}
    return _File(mapped, content, places, ">" if big else "<")


def _place(mapped: Mapped, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Returns the first byte of a record and its length."""
    start = entry.header_offset + _ENTRY.size
    header = _ENTRY.unpack(mapped.data[entry.header_offset : start])
    name = entry.filename[:_NAME]
    mark, _, flags, method, _, _, _, _, _, named, extra = header
    encoding = "utf-8" if entry.flag_bits & 0x800 else "cp437"
    stored = mapped.data[start : start + named]
    if mark != b"PK\3\4" or stored != entry.orig_filename.encode(encoding):
        raise PickleError(f"its archive has another record in the place of {name!r}")
    if (flags | entry.flag_bits) & ~_PLAIN:
        raise PickleError(f"the record {name!r} is encrypted or patched")
    if method or entry.compress_type or entry.compress_size != entry.file_size:
        raise PickleError(f"the record {name!r} is compressed, which torch never does")
    begin = start + named + extra
    if begin + entry.file_size > mapped.size:
        raise DamagedError
    return begin, entry.file_size


def _read_stream(mapped: Mapped) -> _File:
    """Reads the format before torch 1.6; its numbers are little-endian on any machine."""
    data, file = mapped.data, cast("IO[bytes]", mapped.data)
    if data[257:262] == b"ustar":
        raise PickleError("it is a tar archive, torch's format until 2017, which is not read here")
    try:
        magic = load(file)
    except ForbiddenError:
        raise
    except (PickleError, DamagedError):
        magic = None
    if magic != _MAGIC:
        raise PickleError("torch.save did not write it")
    if load(file) != _VERSION:
        raise PickleError("it has another version of torch's format before 1.6")
    load(file)  # the system that wrote it
    storages: dict[str, Storage] = {}
    content = load(file, storages)
    keys = load(file)
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise PickleError("the storages at its end are not those of its tensors")
    places = {}
    begin = data.tell()
    for key in map(str, keys):
        (count,) = struct.unpack("<q", data[begin : begin + 8])
        size = count * ITEMSIZES[storages[key].dtype]
        places[key] = begin + 8, size
        begin += 8 + size
        if count != storages[key].count or begin > mapped.size:
            raise DamagedError
    if begin != mapped.size:
        raise PickleError("something follows the end of its tensors")
    return _File(mapped, content, places)


# --- what it holds ----------------------------------------------------------------------------


def _state_dict(content: object) -> dict[str, Strided | Sparse]:
    """Finds the names and tensors in what a checkpoint holds.

    Training checkpoints keep them under one of a few keys, beside an optimiser and counters;
    torch's AveragedModel adds how often it averaged.
    """
    for _ in range(4):  # {"model": {"state_dict": ...}}
        if not isinstance(content, dict):
            break
        nests = (content[nest] for nest in _NESTS if nest in content)
        inner = next((each for each in nests if each and isinstance(each, dict)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict) or not content:
        raise PickleError(f"it holds {_kind(content)}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Strided | Sparse):
            name = repr(key[:_NAME]) if isinstance(key, str) else "a key that is no text"
            raise PickleError(f"{name} in it is {_kind(value)}")
    averaged = {key: value for key, value in content.items() if key != "n_averaged"}
    return averaged if all(key.startswith("module.") for key in averaged) else content


def _kind(value: object) -> str:
    if isinstance(value, Strided | Sparse):
        return "a tensor"
    if value in (None, {}):
        return "None" if value is None else "an empty dict"
    name = "object" if isinstance(value, Other) else type(value).__name__.lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _check(key: str, shape: tuple[int, ...], *more: tuple[int, ...]) -> None:
    """Makes sure that sizes, and strides and offsets if they are given, are possible."""
    numbers = [n for each in (shape, *more) for n in each]
    if len(shape) > _DIMENSIONS or not all(0 <= n < _EXTENT for n in numbers):
        raise PickleError(f"{key!r} has an impossible shape")


def _array(key: str, tensor: Strided, file: _File) -> Array:
    """Makes an array of the file's memory; every number that it sees is in the tensor's storage."""
    storage, code = tensor.storage, DTYPES.get(tensor.dtype)
    if storage is None:
        raise PickleError(f"{key!r} has no numbers (it was on the device meta)")
    if code is None or tensor.pending:
        what = "a negation that is not done" if code else tensor.dtype
        raise PickleError(
            f"{key!r} is {what}, and the dtypes that run here are {', '.join(DTYPES)}"
        )
    shape, steps = tensor.shape, tensor.strides
    _check(key, shape, steps, (tensor.offset,))
    dtype = np.dtype(code).newbyteorder(file.order)
    start, size = file.places[storage.key]
    stored = ITEMSIZES[storage.dtype]
    if (storage.begin + storage.count) * stored > size:
        raise DamagedError
    count, room = math.prod(shape), storage.count * stored // dtype.itemsize
    if not count:
        return np.empty(shape, dtype)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if count > room or last >= room:
        raise PickleError(f"{key!r} needs more than the {room} numbers that are stored for it")
    array: Array = np.ndarray(
        shape,
        dtype,
        file.mapped.data,
        start + storage.begin * stored + tensor.offset * dtype.itemsize,
        [step * dtype.itemsize if n > 1 else 0 for n, step in zip(shape, steps, strict=True)],
    )
    return array


def _densify(key: str, tensor: Sparse, file: _File) -> Array:
    """Makes a sparse tensor dense, bfloat16 widened; equal indices add up."""
    *indices, values = (_array(key, part, file) for part in tensor.parts)
    if tensor.parts[-1].dtype == "bfloat16":
        values = widen(values)
    dense = np.zeros(tensor.shape, values.dtype.newbyteorder("="))
    try:
        if tensor.layout == "torch.sparse_coo":
            (places,) = indices
            _within(places, np.array(dense.shape[: len(places)])[:, None])
            np.add.at(dense, tuple(places), values)
            return dense
        bounds, second = indices
        first = _rows(bounds, len(values))
        blocks = values if values.ndim == 3 else values[:, None, None]
        if tensor.layout in ("torch.sparse_csc", "torch.sparse_bsc"):
            first, second = second, first
        elif tensor.layout not in ("torch.sparse_csr", "torch.sparse_bsr"):
            raise PickleError(f"{key!r} has the layout {tensor.layout[:_NAME]!r}")
        (rows, columns), (down, across) = dense.shape, blocks.shape[1:]
        grid = dense.reshape(rows // down, down, columns // across, across).swapaxes(1, 2)
        _within(first, grid.shape[0])
        _within(second, grid.shape[1])
        np.add.at(grid, (first, second), blocks)
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(f"{key!r} has indices that do not fit its shape") from None
    return dense


def _rows(bounds: Array, values: int) -> Array:
    """Returns the row of each value; ``bounds`` counts the values in front of a row."""
    counts = np.diff(bounds)
    if bounds[0] or bounds[-1] != values or (counts < 0).any():
        raise IndexError
    return np.repeat(np.arange(len(counts)), counts)


def _within(indices: Array, sizes: Any) -> None:
    if ((indices < 0) | (indices >= sizes)).any():
        raise IndexError
