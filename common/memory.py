"""What a process holds of a CPU's memory, as Linux counts it, and may hold."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def limit() -> int:
    """Counts the bytes that this process may have: the machine's, or its container's."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no cgroup (v2), or "max"
        return min(whole, int(_CONTAINER.read_text()))
    return whole


def resident() -> int | None:
    """Reads how many bytes of memory this process has now; None elsewhere than on Linux."""
    return _read("VmRSS")


def peak() -> int | None:
    """Reads how many bytes of memory it has had at most since ``forget_peak``; None likewise."""
    return _read("VmHWM")


def give_back() -> None:
    """Gives freed memory back to the system, of which glibc keeps some tens of MB for reuse."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Lets ``peak`` begin anew."""
    if _RESET.exists():
        _RESET.write_text("5")


def _read(name: str) -> int | None:
    found = _STATUS.exists() and re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(), re.M)
    return int(found[1]) * 1024 if found else None
