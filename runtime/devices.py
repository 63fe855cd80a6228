"""Devices and dtypes by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from max.driver import CPU, Accelerator, Device, accelerator_count
from max.dtype import DType
from max.graph import DeviceRef

from maxvision.common.arguments import meant
from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.common.host import cores
from maxvision.graphs import nodes

DTYPES = {
    "float32": DType.float32,
    "bfloat16": DType.bfloat16,
    "float16": DType.float16,
}

POOL = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
"""MAX's setting of the share of a GPU's memory that it takes at the first recording: 90 if unset.

It is read when the device is opened.
"""
SHARED = 80
"""Percent that several processes take together: what decodes pictures is not of MAX's share."""


def find_device(name: str) -> Device:
    """Opens the device called ``auto``, ``cpu``, ``gpu`` or ``gpu:N``.

    Raises:
        ArgumentError: If it is none of these.
        DeviceError: If there is no such GPU.
    """
    kind, index = parse_device(name)
    _start_threads()
    count = accelerator_count()
    if kind == "cpu" or (kind == "auto" and count == 0):
        return CPU()
    if count == 0:
        raise DeviceError(
            "device gpu: MAX finds no GPU that it supports on this machine;"
            " use cpu, or check the driver with nvidia-smi or rocm-smi"
        )
    if (index or 0) >= count:
        raise DeviceError(
            f"device {name}: this machine has {count} GPU{'s' * (count > 1)} only; use gpu:0"
            + f" to gpu:{count - 1}" * (count > 1)
        )
    return Accelerator(index or 0)


@cache
def _start_threads() -> None:
    """Has MAX start as many threads as ``cores`` counts.

    MAX starts one for each core that the process may run on, the first time that a session is made,
    and knows no quota. So the process may run on as many cores meanwhile; then its threads go where
    there is room. Within a quota more threads would wait for each other at the end of each loop,
    while Linux holds one of them back until the next period of 100 ms.
    """
    if hasattr(os, "sched_setaffinity"):
        free = os.sched_getaffinity(0)
        if (count := cores()) < len(free):
            from max.engine import InferenceSession  # 0.1 s

            with _only(set(sorted(free)[:count]), free):
                InferenceSession(devices=[CPU()])


@contextmanager
def _only(few: set[int], free: set[int]) -> Iterator[None]:
    """Keeps this thread to a few cores, and lets it and the threads that it started go after."""
    os.sched_setaffinity(0, few)
    try:
        yield
    finally:
        held = True
        while held:  # until no thread is new
            held = False
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(ProcessLookupError):  # it has ended
                    if os.sched_getaffinity(thread) == few:
                        os.sched_setaffinity(thread, free)
                        held = True


def share_gpu(count: int) -> None:
    """Lets ``count`` processes have a GPU: this one and those that it starts take a part of it.

    The user's own setting of ``POOL`` stays.
    """
    if count > 1:
        os.environ.setdefault(POOL, str(SHARED // count))


def parse_device(name: str) -> tuple[str, int | None]:
    """Reads ``auto``, ``cpu``, ``gpu`` or ``gpu:N``: the kind, and N.

    Raises:
        ArgumentError: If it is none of these.
    """
    kind, colon, index = name.partition(":")
    if kind not in ("auto", "cpu", "gpu") or (colon and (kind != "gpu" or not index.isdecimal())):
        raise ArgumentError(
            f"device must be auto, cpu, gpu or gpu:N but is {name!r}"
            f"{meant(name, ('auto', 'cpu', 'gpu'))}"
        )
    return kind, int(index) if index else None


def find_dtype(name: str, device: Device) -> DType:
    """Looks up the dtype called ``auto``, ``float32``, ``bfloat16`` or ``float16``.

    Raises:
        ArgumentError: If it is none of these.
        DeviceError: If the device's kernels do not take it.
    """
    if name == "auto":
        return DType.float32
    if name not in DTYPES:
        raise ArgumentError(
            f"dtype must be auto, {', '.join(DTYPES)} but is {name!r}{meant(name, DTYPES)}"
        )
    if not nodes.supported(DTYPES[name], DeviceRef.from_device(device)):
        raise DeviceError(f"dtype {name} runs on a GPU only; use float32 or bfloat16 on a CPU")
    return DTYPES[name]
