"""The process: what the machine lends it, and how it ends."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from maxvision.common.errors import ArgumentError

HOME = Path(os.path.abspath(__file__)).parents[2]  # not resolved: common/ is a link in a checkout
"""The folder that holds the package, from which ``python -m maxvision...`` runs."""
THREADS = "MAXVISION_THREADS"
"""The user's own limit, in the environment, for this process and those that it starts."""
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """Counts the cores that this process may use: the least of three limits.

    They are its affinity (``taskset``, cpusets), the quota of CPU time of its container or unit, in
    whole cores (``docker run --cpus``, ``CPUQuota=``), and ``MAXVISION_THREADS``.

    Raises:
        ArgumentError: If that is not a whole number from 1 on.
    """
    given = os.environ.get(THREADS, "")
    if given and not (given.isdecimal() and int(given)):
        raise ArgumentError(f"{THREADS} must be a whole number from 1 on but is {given!r}")
    return min(_lent(), int(given or sys.maxsize))


def use_cores(count: int) -> None:
    """Keeps this process, and those that it starts from here on, to so many cores.

    Call it before a device is opened.

    Raises:
        ArgumentError: If there are not as many.
    """
    if count > (lent := _lent()):
        kind = "cores that" if lent > 1 else "core that"
        raise ArgumentError(f"takes at most the {lent} {kind} this process may use, not {count}")
    os.environ[THREADS] = str(count)


def _lent() -> int:
    """Counts the cores that the system lets this process use."""
    affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    return max(1, int(min(count, _quota())))


@cache
def _quota() -> float:
    """Reads the least quota of CPU time, in cores, of the control groups of this process."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    for folder, files in _groups():
        with suppress(OSError, ValueError):  # no such file, or "max"
            text = " ".join((folder / name).read_text() for name in files)
            quota, period = map(int, text.split())
            if quota > 0:  # -1 is none
                yield quota / period


def _groups() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the folders of this process's control groups, and those of the groups around them.

    With each come the files that have its quota and period: those of version 2 or 1 of cgroups.
    """
    with suppress(OSError):  # elsewhere than on Linux
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = PurePosixPath(path.lstrip("/"))
            for each in (group, *group.parents):  # in a container only the last may be there
                if not controllers:
                    yield _CGROUPS / each, ("cpu.max",)
                elif "cpu" in controllers.split(","):
                    yield _CGROUPS / "cpu" / each, ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def python(module: str, *arguments: str) -> dict[str, Any]:
    """Says how ``subprocess`` starts a module of ours: ``args``, ``cwd`` and ``env``.

    It imports from where this process does. A worker of Ray has what its driver imports from, not
    what its interpreter would.
    """
    return {
        "args": (sys.executable, "-m", module, *arguments),
        "cwd": HOME,
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    }


def reason(error: OSError) -> str:
    """Says why the system refused, as a sentence goes on: "the disk is full"."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return error.strerror or str(error)


def leave(code: int) -> NoReturn:
    """Ends the program at once with an exit code.

    Threads of MAX that are still at work, after a compilation say, abort an orderly exit of Python.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # a full disk may have the log; None if closed
            stream.flush()
    os._exit(code)
