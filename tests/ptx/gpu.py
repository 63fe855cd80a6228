"""Runs launches on a GPU in the interpreter's place: what the tests demand of one holds for both.

    mojo build --target-accelerator sm_90a -I . -o kernels tests/ptx/kernels.mojo
    pytest tests/ptx --gpu --kernels kernels

The driver compiles the PTX of each kernel, so the machine with the GPU needs no Mojo. A launch has
the addresses, maps and bytes that the interpreter has; a test whose kernel was changed to be wrong
is skipped. CUDA's driver API, by ctypes: sections 6.14 (virtual memory) and 6.28 (tensor maps).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from .machine import MAP_BYTES, Launch, Tensors
from .memory import GLOBAL, SLOT
from .tensormaps import Im2col, Tiled

Array = np.ndarray[Any, np.dtype[Any]]
SLOTS = 64
"""Arrays of a launch at most: each has 4 GiB of addresses, and as much memory as it needs."""
GRANULE = 2 << 20
"""Bytes that memory is mapped in."""
PINNED, DEVICE, READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, _LOCATION_TYPE_DEVICE and _ACCESS_FLAGS_PROT_READWRITE."""
MOST_SHARED, ANY_CLUSTER = 8, 13
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and _NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""
CLUSTER = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
SWIZZLES = {16: 0, 64: 2, 128: 3}
"""CUtensorMapSwizzle, by bytes of a row."""
TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
"""CUtensorMapDataType of unsigned integers: maps move bits."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class Gpu:
    """The first GPU, and the kernels it has compiled."""

    def __init__(self) -> None:
        """Opens the GPU, and reserves the addresses that the interpreter gives tensors.

        Raises:
            OSError: If there is no driver.
            RuntimeError: If there is no GPU.
        """
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[str, ctypes.c_void_p] = {}
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.location = _Location(DEVICE, device.value)
        base = ctypes.c_uint64()
        room = ctypes.c_size_t(SLOTS * SLOT)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(base),
            room,
            ctypes.c_size_t(0),
            ctypes.c_uint64(GLOBAL),
            ctypes.c_uint64(0),
        )
        if base.value != GLOBAL:
            raise RuntimeError(f"the GPU's driver does not give the addresses from {GLOBAL:#x} on")

    def run(self, launch: Launch) -> None:
        """Runs all blocks; arrays and maps then hold what they have stored."""
        if not launch.kernel.text:
            pytest.skip("a kernel that was changed to be wrong is for the interpreter")
        tensors = launch.tensors
        tensors.settle()
        maps, lent = self._maps(launch.maps, tensors)
        handles = {slot: self._map(slot, buffer.bytes) for slot, buffer in tensors.slots.items()}
        try:
            self._enqueue(launch, maps)
            self._call("cuCtxSynchronize")
            for slot, buffer in tensors.slots.items():
                to = ctypes.c_void_p(buffer.bytes.ctypes.data)
                size = ctypes.c_size_t(len(buffer.bytes))
                self._call("cuMemcpyDtoH_v2", to, ctypes.c_uint64(slot * SLOT), size)
        finally:
            for slot, (handle, size) in handles.items():
                self._call("cuMemUnmap", ctypes.c_uint64(slot * SLOT), ctypes.c_size_t(size))
                self._call("cuMemRelease", handle)
        for address, array in lent:
            if array.flags.writeable:
                array[...] = tensors.array(address, array)
            del tensors.slots[address // SLOT]

    def _map(self, slot: int, data: Array) -> tuple[ctypes.c_uint64, int]:
        """Maps memory for a slot and copies its bytes in; those behind them are NaN."""
        at = ctypes.c_uint64(slot * SLOT)
        size = -(-max(len(data), 1) // GRANULE) * GRANULE
        kind = _Allocation(PINNED, 0, self.location)
        access = _Access(self.location, READ_WRITE)
        handle, bytes, zero = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), bytes, ctypes.byref(kind), zero)
        self._call("cuMemMap", at, bytes, ctypes.c_size_t(0), handle, zero)
        self._call("cuMemSetAccess", at, bytes, ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemsetD8_v2", at, ctypes.c_ubyte(0xFF), bytes)
        source = ctypes.c_void_p(data.ctypes.data)
        self._call("cuMemcpyHtoD_v2", at, source, ctypes.c_size_t(len(data)))
        return handle, size

    def _maps(
        self, maps: Sequence[Tiled | Im2col | None], tensors: Tensors
    ) -> tuple[Array, list[tuple[int, Array]]]:
        """Encodes tensor maps; arrays that are not among the tensors are added, and given too."""
        room = np.zeros(MAP_BYTES * (len(maps) + 1), np.uint8)
        room = room[-room.ctypes.data % 64 :][: MAP_BYTES * len(maps)]
        lent: dict[int, tuple[int, Array]] = {}
        for i, each in enumerate(maps):
            if each is None:
                continue
            array = each.tensor
            address = _address(array, tensors)
            if address is None:
                if id(array) not in lent:
                    lent[id(array)] = tensors.add(array), array
                address = lent[id(array)][0]
                array = np.ascontiguousarray(array)
            to = ctypes.c_void_p(room.ctypes.data + i * MAP_BYTES)
            self._encode(to, each, address, array)
        return room, [*lent.values()]

    def _encode(self, to: ctypes.c_void_p, map: Tiled | Im2col, address: int, array: Array) -> None:
        rank, size = array.ndim, array.itemsize
        steps = [size]
        for length, step in zip(array.shape[:0:-1], array.strides[-2::-1], strict=True):
            steps.append(step if length > 1 or len(steps) == 1 else steps[-1] * length)
        dims = (ctypes.c_uint64 * rank)(*array.shape[::-1])
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*steps[1:])
        front = (ctypes.c_int(TYPES[size]), ctypes.c_uint(rank), ctypes.c_uint64(address))
        back = (ctypes.c_int(0), ctypes.c_int(SWIZZLES[map.row]), ctypes.c_int(0), ctypes.c_int(0))
        if isinstance(map, Tiled):
            box = (ctypes.c_uint * rank)(*map.box[::-1])
            every = (ctypes.c_uint * rank)(*[1] * rank)
            self._call("cuTensorMapEncodeTiled", to, *front, dims, strides, box, every, *back)
        else:
            lower = (ctypes.c_int * (rank - 2))(*map.lower)
            upper = (ctypes.c_int * (rank - 2))(*map.upper)
            every = (ctypes.c_uint * rank)(1, *map.stride, 1)
            middle = (ctypes.c_uint(map.channels), ctypes.c_uint(map.pixels), every)
            self._call(
                "cuTensorMapEncodeIm2col", to, *front, dims, strides, lower, upper, *middle, *back
            )

    def _enqueue(self, launch: Launch, maps: Array) -> None:
        parameters = [bytearray(each) for each in launch.parameters]
        if launch.maps:
            assert len(parameters[0]) == len(maps)
            parameters[0] = bytearray(maps.tobytes())
        rooms = [(ctypes.c_ubyte * max(len(each), 1))(*each) for each in parameters]
        pointers = (ctypes.c_void_p * len(rooms))(*map(ctypes.addressof, rooms))
        function = self._function(launch)
        shared = ctypes.c_int(launch.shared_bytes)
        self._call("cuFuncSetAttribute", function, MOST_SHARED, shared)
        attribute = _Attribute(CLUSTER, 0, (launch.cluster, 1, 1))
        config = _Config(
            launch.grid,
            (launch.threads, 1, 1),
            launch.shared_bytes,
            None,
            ctypes.pointer(attribute),
            int(launch.cluster > 1),
        )
        if launch.cluster > 8:
            self._call("cuFuncSetAttribute", function, ANY_CLUSTER, 1)
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _function(self, launch: Launch) -> ctypes.c_void_p:
        name = launch.kernel.name
        if name not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            text = ctypes.c_char_p(launch.kernel.text.encode())
            self._call("cuModuleLoadData", ctypes.byref(module), text)
            symbol = ctypes.c_char_p(name.encode())
            self._call("cuModuleGetFunction", ctypes.byref(function), module, symbol)
            self.functions[name] = function
        return self.functions[name]

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.driver, name)(*arguments):
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")


def _address(array: Array, tensors: Tensors) -> int | None:
    """Finds an array that is a view of global memory."""
    for slot, buffer in tensors.slots.items():
        at = array.ctypes.data - buffer.bytes.ctypes.data
        if 0 <= at < len(buffer.bytes):
            return slot * SLOT + at
    return None
