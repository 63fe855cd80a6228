"""How a process's share of a machine becomes MAX's threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from maxvision.common import host

COUNT = """
import os, time
from contextlib import suppress
from pathlib import Path
from max.engine import InferenceSession
from maxvision.runtime.devices import find_device

def workers():
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # others end at any time
            if "Thread" in (task / "comm").read_text():
                found.append(os.sched_getaffinity(int(task.name)))
    return found

session = InferenceSession(devices=[find_device("cpu")])
time.sleep(0.5)  # until they have their names
free = os.sched_getaffinity(0)
print(len(workers()), len(free), all(each == free for each in workers()))
"""


@pytest.mark.skipif(host.cores() < 2, reason="there is one core")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="there is no /proc")
@pytest.mark.parametrize("threads", ["", "1"])
def test_max_has_as_many_threads_as_cores_are_lent(threads: str) -> None:
    """They are not kept to these cores: in containers side by side they would be the same ones."""
    environment = {**os.environ, host.THREADS: threads}
    command = [sys.executable, "-c", COUNT]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    cores = len(os.sched_getaffinity(0))
    assert said.stdout.split() == [threads or str(host.cores()), str(cores), "True"]
