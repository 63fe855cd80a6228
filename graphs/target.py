"""What a graph is compiled for: a CPU, this one or a kind of them, or a GPU that may be elsewhere.

Code for a CPU runs on every other that has the instructions it was compiled with. They are noted
as /proc/cpuinfo calls them, and compared before such code runs: a CPU that lacks one would kill
the process.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import max.driver as driver
from max.driver import CPU, Accelerator, Device

from maxvision.common.arguments import meant
from maxvision.common.errors import ArgumentError, DeviceError

GPUS = tuple("sm_80 sm_86 sm_89 sm_90a sm_100a sm_120a gfx90a gfx942 gfx950".split())
"""GPUs that a ResNet was compiled for; MAX's compiler crashes at some others."""

_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3".split()
_V3 = [*_V2, *"abm avx avx2 bmi1 bmi2 f16c fma movbe".split()]
_V4 = [*_V3, *"avx512bw avx512cd avx512dq avx512f avx512vl".split()]
_AMX = """avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vpopcntdq avx512ifma
    avx512vbmi avx_vnni adx aes amx_bf16 amx_int8 amx_tile gfni pclmulqdq sha_ni vaes vpclmulqdq"""
_N1 = "aes asimd asimddp asimdhp asimdrdm atomics crc32 fp fphp lrcpc pmull sha1 sha2".split()
_V1 = """asimdfhm bf16 dcpop fcma flagm i8mm ilrcpc jscvt sha3 sha512 sm3 sm4 sve svebf16 svei8mm
    uscat"""
_KINDS: dict[str, dict[str, list[str]]] = {
    # The levels of the psABI, and the first CPU with AMX.
    "x86_64": {
        "generic": [],
        "x86-64-v2": _V2,
        "x86-64-v3": _V3,
        "x86-64-v4": _V4,
        "sapphirerapids": [*_V4, *_AMX.split()],
    },
    # The first servers with dotprod (Graviton 2, Ampere Altra) and with i8mm (Graviton 3).
    "aarch64": {"generic": [], "neoverse-n1": _N1, "neoverse-v1": [*_N1, *_V1.split()]},
}
_BYTES = (  # what multiplies 8-bit integers where a CPU has all of some flags (ops/dot.mojo)
    ("tdpbusd (AMX)", {"amx_int8", "amx_tile"}),
    ("vpdpbusd (AVX-512 VNNI)", {"avx512_vnni", "avx512f"}),
    ("vpdpbusd (AVX-VNNI)", {"avx_vnni"}),
    ("vpmaddwd, pairs of 16 bits (AVX2)", {"avx2"}),
    ("usdot (i8mm)", {"i8mm"}),
    ("sdot (dotprod)", {"asimddp"}),
    ("pairs of 16 bits", set[str]()),
)
_X86_CODE = re.compile(  # flags that stand for instructions a compiler may choose
    r"(sse|avx|amx|bmi|fma|vaes|vpcl|sha|sm[34]$)\w*"
    r"|abm|adx|aes|cx16|f16c|gfni|lahf_lm|lzcnt|movbe|movdir\w*|pclmulqdq|pni|popcnt|ssse3|tbm|xop"
)


@dataclass(frozen=True)
class Target:
    """What a graph is compiled for.

    Attributes:
        name: ``cpu``, ``cpu:x86-64-v3``, ``sm_90a``, ``gfx942``, ...
        api: ``cpu``, ``cuda`` or ``hip``.
        machine: Architecture of the CPU: ``x86_64`` or ``aarch64``.
        features: What that CPU must have, sorted.
    """

    name: str
    api: str
    machine: str
    features: tuple[str, ...]

    @classmethod
    def parse(cls, name: str) -> Target:
        """Reads the name of a target; ``cpu`` is this machine's, with all that it has.

        Raises:
            ArgumentError: If there is none of that name.
        """
        machine = platform.machine()
        kinds = _KINDS.get(machine, {})
        if name == "cpu":
            return cls(name, "cpu", machine, cpu_features())
        if name.startswith("cpu:") and name[4:] in kinds:
            return cls(name, "cpu", machine, tuple(sorted(kinds[name[4:]])))
        if name in GPUS:
            return cls(name, "hip" if name.startswith("gfx") else "cuda", machine, ())
        names = ["cpu", *(f"cpu:{kind}" for kind in kinds), *GPUS]
        raise ArgumentError(
            f"target must be one of {', '.join(names)} but is {name!r}{meant(name, names)}"
        )

    @classmethod
    def of(cls, device: Device) -> Target:
        """Describes a device of this machine, as a compilation here sees it."""
        name = "cpu" if device.is_host else device.architecture_name
        return cls(name, device.api, platform.machine(), cpu_features())

    def told_bytes(self, layers: int) -> str:
        """Says what multiplies the 8-bit integers of so many layers; nothing if there are none."""
        by = "wgmma"  # of Hopper: other GPUs have no such layers
        if self.api == "cpu":
            by = next(name for name, needed in _BYTES if needed <= set(self.features))
        return f"{layers} layers, by {by}" if layers else ""

    @contextmanager
    def device(self, index: int = 0) -> Iterator[Device]:
        """Gives a device to compile for. Until it ends, nothing can run in this process.

        Args:
            index: Which GPU it stands for.
        """
        if self.api == "cpu":
            driver.set_virtual_cpu_target(self.name.removeprefix("cpu").removeprefix(":"))
            try:
                yield CPU()
            finally:
                driver.set_virtual_cpu_target("")
            return
        driver.set_virtual_cpu_target("generic")  # it only launches
        driver.set_virtual_device_api(self.api)
        driver.set_virtual_device_target_arch(_whole(self.name))
        driver.set_virtual_device_count(index + 1)
        try:
            yield Accelerator(index)
        finally:
            driver.set_virtual_device_count(0)
            driver.set_virtual_cpu_target("")

    def open(self, index: int | None = None) -> Device:
        """Opens the device of this machine that runs what was compiled for this target.

        Args:
            index: Which GPU; the first that fits if None.

        Raises:
            DeviceError: If there is none.
        """
        machine = platform.machine()
        if self.machine != machine:
            raise DeviceError(
                f"this model was compiled on {self.machine} but this machine is {machine};"
                f" compile it on one of these"
            )
        if missing := sorted(set(self.features) - set(cpu_features())):
            raise DeviceError(
                f"this model was compiled for a CPU with {', '.join(missing)}, which this one has"
                f" not; compile it here, or with --target cpu:{_best(cpu_features(), machine)}"
            )
        if self.api == "cpu":
            return CPU()
        count = driver.accelerator_count()
        found = [Accelerator(i) for i in (range(count) if index is None else [index]) if i < count]
        for gpu in found:
            if gpu.api == self.api and base(gpu.architecture_name) == base(self.name):
                return gpu
        here = found[0].architecture_name if found else ""
        if found:
            there = f"{'the GPU of this machine' if index is None else f'gpu:{index}'} is {here}"
        else:
            there = "this machine has no GPU" if index is None else f"there is no gpu:{index}"
        again = _whole(here) if _whole(here) in GPUS else "cpu"
        raise DeviceError(
            f"this model was compiled for the GPU {self.name} but {there}; run it where"
            f" such a GPU is, or compile it with --target {again}"
        )


def base(architecture: str) -> str:
    """Drops the suffix of sm_90a, which a driver may leave out; gfx90a is another than gfx90."""
    return architecture.rstrip("af") if architecture.startswith("sm_") else architecture


def _whole(architecture: str) -> str:
    """Adds the suffix that a driver may leave out."""
    return next((name for name in GPUS if base(name) == base(architecture)), architecture)


def _best(features: tuple[str, ...], machine: str) -> str:
    """Names the most capable kind of CPU whose code runs with ``features``."""
    kinds = _KINDS.get(machine, {"generic": []})
    return [kind for kind, needed in kinds.items() if set(needed) <= set(features)][-1]


@cache
def cpu_features() -> tuple[str, ...]:
    """Lists the instruction sets of this machine's CPU, sorted; none where there is no /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = found[1].split() if found else []
    if platform.machine() == "x86_64":
        flags = [flag for flag in flags if _X86_CODE.fullmatch(flag)]
    return tuple(sorted(flags))
