"""What a process holds of a CPU's memory, as Linux counts it; nothing is known elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Reads how many bytes of memory this process has now."""
    return _read("VmRSS")


def peak() -> int | None:
    """Reads how many bytes of memory it has had at most since ``forget_peak``."""
    return _read("VmHWM")


def forget_peak() -> None:
    """Lets ``peak`` begin anew."""
    if _RESET.exists():
        _RESET.write_text("5")


def _read(name: str) -> int | None:
    found = _STATUS.exists() and re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(), re.M)
    return int(found[1]) * 1024 if found else None
