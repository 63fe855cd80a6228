"""What a figure was measured on: it goes into every file of bench/results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maxvision.common.host import cores

HELD_BY = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""What holds torch and OpenVINO to an older instruction set."""
PACKAGES = ("max", "mojo-compiler", "torch", "transformers", "onnxruntime", "openvino")


def environment() -> dict[str, Any]:
    """Names the machine and how busy it is, the versions, the commit, the command and the day."""
    held = {name: os.environ[name] for name in HELD_BY if name in os.environ}
    query = ("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader")
    return {
        "cpu": f"{_cpu()}, {cores()} core{'s' * (cores() > 1)}",
        "gpu": _output(*query) or "none",
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "load": [round(each, 2) for each in os.getloadavg()],
        "command": _command(),
        **({"variables": held} if held else {}),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _command() -> str:
    """Gives the command line; of paths, in lists too, only the names, the same on every machine."""
    program, *arguments = sys.argv or [""]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(program).stem
    lists = (word.split(",") for word in arguments)
    names = (",".join(path.rpartition("/")[2] for path in paths) for paths in lists)
    return " ".join(["python -m", module, *names])


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip().partition("\n")[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
