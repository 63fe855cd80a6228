"""Compiles a program into the cache: the process of ``executor.compiled(apart=True)``.

    python -m maxvision.runtime.compile_worker < JOB

It is a command, as ``multiprocessing`` would run the user's script once more.
"""

from __future__ import annotations

import pickle
import sys

from maxvision.common.host import leave
from maxvision.runtime.executor import compiled


def main() -> int:
    """Compiles what standard input has."""
    program, tensors, index, target, lowering = pickle.load(sys.stdin.buffer)
    with target.device(index) as device:
        compiled(program, tensors, device, lowering, target=target)
    return 0


if __name__ == "__main__":
    leave(main())
