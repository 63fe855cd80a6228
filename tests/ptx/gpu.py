"""Runs launches on a GPU in the interpreter's place: what the tests demand of one holds for both.

    mojo build --target-accelerator sm_90a -I . -o kernels tests/ptx/kernels.mojo
    pytest tests/ptx --gpu --kernels kernels

The driver compiles the PTX of each kernel, so the machine with the GPU needs no Mojo. A launch has
the bytes and maps that the interpreter has; a test whose kernel was changed to be wrong is skipped.
A process of its own talks to the GPU: after a launch that fails, or does not end, it is replaced.
CUDA's driver API, by ctypes: its sections on virtual memory, execution and tensor maps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from .machine import MAP_BYTES, Launch, Tensors
from .memory import SLOT
from .tensormaps import Im2col, Tiled

Array = np.ndarray[Any, np.dtype[Any]]
SECONDS = 20
"""What a launch may take, with its kernel's compilation."""
SLOTS = 512
"""Arrays of a launch at most: each has 4 GiB of addresses, and as much memory as it needs."""
GRANULE = 2 << 20
"""Bytes that memory is mapped in."""
PINNED, DEVICE, READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, _LOCATION_TYPE_DEVICE and _ACCESS_FLAGS_PROT_READWRITE."""
MOST_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
CLUSTER = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
SWIZZLES = {16: 0, 64: 2, 128: 3}
"""CUtensorMapSwizzle, by bytes of a row."""
TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
"""CUtensorMapDataType of unsigned integers: maps move bits."""


@dataclass
class Map:
    """The arguments of cuTensorMapEncodeTiled or -Im2col, the last axis first."""

    address: int
    type: int
    swizzle: int
    sizes: list[int]
    strides: list[int]
    """Bytes, but of the last axis."""
    box: list[int]
    """Of a tile; [] else."""
    corners: tuple[list[int], list[int]]
    """Lower and upper, of windows."""
    column: tuple[int, int]
    """Channels and pixels of a copy, of windows."""
    steps: list[int]
    """Numbers from one that is read to the next."""

    @staticmethod
    def of(map: Tiled | Im2col, address: int, array: Array) -> Map:
        """Describes a map of an array that lies at an address."""
        sizes, strides = [*array.shape[::-1]], [*array.strides[-2::-1]]
        front = address, TYPES[array.itemsize], SWIZZLES[map.row], sizes, strides
        if isinstance(map, Tiled):
            return Map(*front, [*map.box[::-1]], ([], []), (0, 0), [1] * len(sizes))
        corners, column = ([*map.lower], [*map.upper]), (map.channels, map.pixels)
        return Map(*front, [], corners, column, [1, *map.stride, 1])


@dataclass
class Job:
    """A launch, as it is sent to the process."""

    name: str
    text: str
    parameters: list[bytes]
    maps: list[Map | None]
    tensors: dict[int, Array]
    """Bytes, by slot."""
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    cluster: int


class Gpu:
    """The first GPU, and the process that talks to it."""

    def __init__(self) -> None:
        """Starts the process.

        Raises:
            RuntimeError: If there is no GPU.
        """
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        Tensors.base = self._receive()

    def _receive(self) -> Any:
        try:
            answer = self.pipe.recv() if self.pipe.poll(SECONDS) else "it does not end"
        except EOFError:
            answer = "the GPU's process has ended"
        if isinstance(answer, str):
            self.process.kill()
            raise RuntimeError(answer)
        return answer

    def run(self, launch: Launch) -> None:
        """Runs all blocks; arrays and maps then hold what they have stored.

        Raises:
            RuntimeError: If the driver refuses the launch, or it does not end.
        """
        kernel, tensors = launch.kernel, launch.tensors
        if not kernel.text:
            pytest.skip("a kernel that was changed to be wrong is for the interpreter")
        tensors.settle()
        lent: dict[int, tuple[int, Array]] = {}
        maps = [_described(each, tensors, lent) if each else None for each in launch.maps]
        job = Job(
            kernel.name,
            kernel.text,
            list(launch.parameters),
            maps,
            {slot: buffer.bytes for slot, buffer in tensors.slots.items()},
            launch.grid,
            launch.threads,
            launch.shared_bytes,
            launch.cluster,
        )
        self.pipe.send(job)
        try:
            for slot, data in self._receive().items():
                tensors.slots[slot].bytes[:] = data
        except RuntimeError as error:
            self._start()
            raise RuntimeError(f"{kernel.name}: {error}") from None
        for address, array in lent.values():
            if array.flags.writeable:
                array[...] = tensors.array(address, array)
            del tensors.slots[address // SLOT]


def _described(map: Tiled | Im2col, tensors: Tensors, lent: dict[int, tuple[int, Array]]) -> Map:
    """Describes a map; its array is lent to the tensors if it is not among them."""
    array = map.tensor
    for slot, buffer in tensors.slots.items():
        at = array.ctypes.data - buffer.bytes.ctypes.data
        if 0 <= at < len(buffer.bytes):
            return Map.of(map, slot * SLOT + at, array)
    if id(array) not in lent:
        lent[id(array)] = tensors.add(array), array
    return Map.of(map, lent[id(array)][0], np.ascontiguousarray(array))


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


def serve(pipe: Connection) -> None:
    """Opens the GPU, sends the first address of tensors, and runs the jobs that come.

    An answer is what each tensor then holds, or a sentence; after that one the GPU is of no use.
    """
    try:
        driver = _Driver()
        pipe.send(driver.base)
        while True:
            pipe.send(driver.run(pipe.recv()))
    except (OSError, RuntimeError) as error:
        pipe.send(str(error))


class _Driver:
    """CUDA's driver, its first GPU, and the kernels that are compiled."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[str, ctypes.c_void_p] = {}
        device, context, base = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.location = _Location(DEVICE, device.value)
        room, zero = ctypes.c_size_t((SLOTS + 1) * SLOT), ctypes.c_uint64(0)
        self("cuMemAddressReserve", ctypes.byref(base), room, zero, zero, zero)
        self.base = -(-base.value // SLOT) * SLOT

    def __call__(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")

    def run(self, job: Job) -> dict[int, Array]:
        handles = {slot: self.map(slot, data) for slot, data in job.tensors.items()}
        self.enqueue(job)
        self("cuCtxSynchronize")
        for slot, (handle, size) in handles.items():
            at, data = ctypes.c_uint64(slot * SLOT), job.tensors[slot]
            self("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), at, _size(data.nbytes))
            self("cuMemUnmap", at, _size(size))
            self("cuMemRelease", handle)
        return job.tensors

    def map(self, slot: int, data: Array) -> tuple[ctypes.c_uint64, int]:
        """Maps memory for a slot and copies its bytes in; those behind them are NaN."""
        at, zero = ctypes.c_uint64(slot * SLOT), ctypes.c_uint64(0)
        size = -(-max(data.nbytes, 1) // GRANULE) * GRANULE
        kind = _Allocation(PINNED, 0, self.location)
        access = _Access(self.location, READ_WRITE)
        handle = ctypes.c_uint64()
        self("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(kind), zero)
        self("cuMemMap", at, _size(size), _size(0), handle, zero)
        self("cuMemSetAccess", at, _size(size), ctypes.byref(access), _size(1))
        self("cuMemsetD8_v2", at, ctypes.c_ubyte(0xFF), _size(size))
        self("cuMemcpyHtoD_v2", at, ctypes.c_void_p(data.ctypes.data), _size(data.nbytes))
        return handle, size

    def encode(self, to: ctypes.c_void_p, map: Map) -> None:
        def array(kind: Any, numbers: Sequence[int]) -> Any:
            return (kind * max(len(numbers), 1))(*numbers)

        front = [to, map.type, len(map.sizes), ctypes.c_uint64(map.address)]
        front += [array(ctypes.c_uint64, map.sizes), array(ctypes.c_uint64, map.strides)]
        back = [array(ctypes.c_uint, map.steps), 0, map.swizzle, 0, 0]
        if map.box:
            self("cuTensorMapEncodeTiled", *front, array(ctypes.c_uint, map.box), *back)
        else:
            corners = [array(ctypes.c_int, each) for each in map.corners]
            self("cuTensorMapEncodeIm2col", *front, *corners, *map.column, *back)

    def enqueue(self, job: Job) -> None:
        room = np.zeros(MAP_BYTES * (len(job.maps) + 1), np.uint8)
        room = room[-room.ctypes.data % 64 :][: MAP_BYTES * len(job.maps)]
        for i, each in enumerate(job.maps):
            if each:
                self.encode(ctypes.c_void_p(room.ctypes.data + i * MAP_BYTES), each)
        if job.maps:
            job.parameters[0] = room.tobytes()
        rooms = [(ctypes.c_ubyte * len(each))(*each) for each in job.parameters]
        pointers = (ctypes.c_void_p * len(rooms))(*map(ctypes.addressof, rooms))
        attribute = _Attribute(CLUSTER, 0, (job.cluster, 1, 1))
        block, attributes = (job.threads, 1, 1), ctypes.pointer(attribute)
        clusters = int(job.cluster > 1)
        config = _Config(job.grid, block, job.shared_bytes, None, attributes, clusters)
        function = self.function(job)
        self("cuFuncSetAttribute", function, MOST_SHARED, job.shared_bytes)
        self("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def function(self, job: Job) -> ctypes.c_void_p:
        if job.text not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            text, name = (ctypes.c_char_p(each.encode()) for each in (job.text, job.name))
            self("cuModuleLoadData", ctypes.byref(module), text)
            self("cuModuleGetFunction", ctypes.byref(function), module, name)
            self.functions[job.text] = function
        return self.functions[job.text]


def _size(bytes: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(bytes)
