"""The process: what the machine lends it, and how it ends."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

HOME = Path(os.path.abspath(__file__)).parents[2]  # not resolved: common/ is a link in a checkout
"""The folder that holds the package, from which ``python -m maxvision...`` runs."""


def cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
