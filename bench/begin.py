"""How a measurement begins: its device, and the facts that stand above its records."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from max.driver import Device

from maxvision.bench.compile import compiled_note
from maxvision.bench.environment import environment
from maxvision.bench.records import check_path
from maxvision.bench.tf32 import allow_tf32
from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.runtime.devices import find_device


def begin(options: argparse.Namespace, doc: str | None) -> tuple[Device, dict[str, Any]]:
    """Opens the device, and collects what is known before anything runs.

    Args:
        options: Of ``maxvision bench models`` or ``ops``.
        doc: The command's docstring, whose second paragraph on is the method.

    Raises:
        ArgumentError: If the records could not be written, or there are not that many cores.
        DeviceError: If there is no such device, or torch cannot use it.
    """
    if options.threads:
        _keep_to(options.threads)
    device = find_device(options.device)
    if not device.is_host and not torch.cuda.is_available():
        raise DeviceError(
            f"bench {options.command} needs a torch with CUDA on a GPU, and this torch has none"
        )
    check_path(options.json)
    allow_tf32(options.tf32)
    facts: dict[str, Any] = {**environment(), **compiled_note(options.precompiled)}
    facts["method"] = " ".join((doc or "").split("\n\n", 1)[1].split())
    facts["tf32"], facts["ceilings"] = options.tf32, {}
    return device, facts


def _keep_to(cores: int) -> None:
    """Keeps this process, and those that it starts, to so many cores: as many threads have all."""
    free = sorted(os.sched_getaffinity(0))
    if len(free) < cores:
        raise ArgumentError(f"--threads {cores}: only {len(free)} cores are available")
    os.sched_setaffinity(0, free[:cores])
