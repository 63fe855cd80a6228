"""The kernels under NVIDIA's compute-sanitizer: ``python -m tests.sanitize --json FILE``.

Needs a GPU, torch with CUDA, transformers, and on PATH compute-sanitizer 2026.4, of pip's
nvidia-cuda-sanitizer-api 13.5. Runs every op of tests/ops/cases.py, ResNet-50 and CvT-13 under

    memcheck   with an allocation for each tensor, padding behind it, and the copy engine checked
    racecheck  what threads and the copy engine do to shared memory in no order
    synccheck  barriers that not all threads come to
    nan        without the tool, in memory full of NaN: nothing may be read that nobody wrote.
               initcheck cannot tell: it reports written memory, too (the copy engine's stores)

Exits with 1 if anything is found, or if memcheck misses an image that ends too early. The graphs
may be compiled elsewhere: ``python -m tests.gpu --compile sm_90a --compiled DIR``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType

from maxvision.bench.environment import environment
from maxvision.bench.records import check_path, write
from maxvision.bench.references import our_executor, reference_model
from maxvision.common.host import leave
from maxvision.runtime.executor import Executor
from maxvision.runtime.replay import Execution, float32
from tests import gpu
from tests.ops.cases import draw

TOOLS = {
    "memcheck": ["--padding=4096", "--check-tensor-ops=yes"],
    "racecheck": [],
    "synccheck": [],
}
"""The tools of compute-sanitizer, and their options."""
COMMON = [
    "--target-processes=application-only",
    "--launch-timeout=120",
    "--report-api-errors=no",  # MAX asks for a kernel's parameters until there are no more
    "--print-limit=100",
]
NAN = "nan"
END = "ran to the end"
SHORT = "short image"
"""What memcheck has to find: three images of which there is one."""
MODELS = ("resnet-50", "cvt-13")
BATCHES = {"memcheck": (1, 2, 3, 5, 8, 13, 32, 64), NAN: (1, 3, 16, 64)}
"""Images of the networks' batches; others are slow."""
FEW = (1, 3)
ALLOCATOR = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
FENCE = re.compile(
    r"=+ Error: Race reported between Write access at (sparse_conv2d_two_four_\w+)\+.*\n"
    r"(?:=+ +and Read access at \1\+.*\n)+=+ \n"
)
"""A fence that this kernel does without: ops/sparse_conv2d/two_four.mojo says why."""
SPOILING = 6
"""Runs at a time that fill memory with NaN."""
WITHIN = 20 << 30
"""Bytes of the host's memory that a run within a tool may take, whose work is a core's: racecheck
took 14 GB, and of sixteen at a time in 128 GB five were killed."""

LIMIT = 300
"""Seconds that a run may take: the longest took 138 on an H200, sixteen at a time."""

Outputs = Callable[[int], list[np.ndarray]]


def main() -> int:
    """Runs everything and writes the records, or one thing, within a tool."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the records go")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="graphs compiled elsewhere")
    parser.add_argument("--precision", choices=gpu.PRECISIONS, default="bfloat16")
    parser.add_argument("--inside", nargs=2, metavar=("TOOL", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(*options.inside, options.precision, options.compiled)
    if not options.json:
        parser.error("name the file to write with --json FILE")
    if not shutil.which("compute-sanitizer"):
        parser.error(
            "compute-sanitizer is not on PATH; pip install"
            " nvidia-cuda-sanitizer-api puts it into nvidia/cu13/compute-sanitizer"
        )
    check_path(options.json)
    run = partial(outside, chosen=options.precision, folder=options.compiled)
    things = [*gpu.PARTS, *MODELS]
    within = [*product(TOOLS, things), ("memcheck", SHORT)]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = environment()
    records = []
    for jobs, workers in (
        (within, max(1, min(os.cpu_count() or 1, memory // WITHIN))),
        ([(NAN, each) for each in things], SPOILING),
    ):
        with ThreadPoolExecutor(workers) as pool:
            for record, log in pool.map(lambda job: run(*job), jobs):
                records.append(record)
                write(options.json, facts, records)
                print(record, flush=True)
                if not record["passed"]:
                    print(log[:4000], flush=True)
    return 0 if all(record["passed"] for record in records) else 1


def outside(tool: str, what: str, chosen: str, folder: Path | None) -> tuple[dict[str, Any], str]:
    """Runs one thing within a tool; returns its record and what was printed."""
    command = [sys.executable, "-m", "tests.sanitize", "--inside", tool, what]
    command += ["--precision", chosen, *(["--compiled", str(folder)] if folder else [])]
    percent = "20"
    if tool in TOOLS:
        command = ["compute-sanitizer", f"--tool={tool}", *TOOLS[tool], *COMMON, *command]
        percent = "0"  # no pool: an address between two tensors is nobody's
    env = {**os.environ, ALLOCATOR: percent, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            printed = process.communicate(timeout=LIMIT)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool, and what it runs
            printed = process.communicate()[0].decode(errors="replace")
            printed += f"\nstopped after {LIMIT} s\n"
    log, excused = FENCE.subn("", printed)
    summary = FOUND.search(log)
    found = int(summary[1]) - excused if summary else None
    if what == SHORT:
        passed = "Invalid __global__ read" in log
    else:
        passed = END in log and (tool == NAN or found == 0)
    record = {"tool": tool, "what": what, "precision": chosen, "found": found, "excused": excused}
    return {**record, "passed": passed, "seconds": round(time.perf_counter() - begun, 1)}, log


def inside(tool: str, what: str, chosen: str, folder: Path | None) -> int:
    """Runs one thing; within a tool, unless that is ``nan``."""
    device = Accelerator()
    dtype, tf32 = gpu.PRECISIONS[chosen]

    def network(name: str) -> Executor:
        return our_executor(name, reference_model(name), device, dtype, folder, tf32=tf32)

    if what == SHORT:
        return run_short(network(MODELS[0]))
    if what in gpu.PARTS:
        run, batches = ops(device, dtype, tf32, folder, what), gpu.BATCHES
    else:
        run, batches = running(network(what), device), BATCHES.get(tool, FEW)
    for batch in batches:
        before = run(batch)
        if tool == NAN:
            spoil(device)
            after = run(batch)
            different = [
                i
                for i, (a, b) in enumerate(zip(before, after, strict=True))
                if not np.array_equal(a, b, equal_nan=True)  # as log and pow give
            ]
            if different:
                print(f"{what} of batch {batch}: outputs {different} read what nobody wrote")
                return 1
    print(END)
    return 0


def ops(device: Device, dtype: DType, tf32: bool, folder: Path | None, part: str) -> Outputs:
    """Loads a graph of cases; returns what runs it."""
    cases, executable = gpu.load_cases(device, dtype, tf32, folder, part)

    def run(batch: int) -> list[np.ndarray]:
        inputs = draw(cases, batch, dtype, device)
        return [float32(y.to(CPU())) for y in executable.execute(*inputs)]

    return run


def running(model: Executor, device: Device) -> Outputs:
    """Returns what runs a network, kernel by kernel, on the same images each time."""
    shape = max(max(BATCHES.values())), *gpu.SIZE, 3
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    execution = Execution(model.executable, device)

    def run(batch: int) -> list[np.ndarray]:
        execution.upload(pixels[:batch])
        execution.run()
        return execution.result()

    return run


def run_short(model: Executor) -> int:
    """Says of one image that it is three, which memcheck has to notice."""
    image = torch.zeros((1, *gpu.SIZE, 3), dtype=torch.uint8, device="cuda")
    three = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (3, *image.shape[1:]),
            "typestr": "|u1",
            "data": (image.data_ptr(), False),
            "version": 3,
        }
    )
    said = torch.as_tensor(three, device="cuda")
    model.executable.execute(Buffer.from_dlpack(said))
    torch.cuda.synchronize()
    return 0


def spoil(device: Device) -> None:
    """Fills memory that is free with NaN, whatever size is asked for next.

    Raises:
        AssertionError: If what is allocated next holds something else.
    """
    sizes = {1 << 28: 20, 1 << 24: 40, 1 << 20: 60, 1 << 16: 60, 1 << 12: 60, 512: 200}
    held = [
        Buffer.from_numpy(np.full(size, 255, np.uint8)).to(device)
        for size, count in sizes.items()
        for _ in range(count)
    ]
    device.synchronize()
    del held
    for size in sizes:
        fresh = Buffer(DType.uint8, (size,), device).to(CPU()).to_numpy()
        assert (fresh == 255).all(), f"{size} bytes are not all NaN"


if __name__ == "__main__":
    leave(main())
