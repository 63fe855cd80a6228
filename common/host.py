"""The process: what the machine lends it, and how it ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

HOME = Path(os.path.abspath(__file__)).parents[2]  # not resolved: common/ is a link in a checkout
"""The folder that holds the package, from which ``python -m maxvision...`` runs."""


def cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave(code: int) -> NoReturn:
    """Ends the program at once with an exit code.

    Threads of MAX that are still at work, after a compilation say, abort an orderly exit of Python.
    """
    sys.stdout.flush()
    with suppress(OSError):  # a full disk may have the log
        sys.stderr.flush()
    os._exit(code)
