"""Kernels compile for GPUs and CPUs that are not here.

By day some ops for sm_90a at bfloat16, and the products in bfloat16 and of 8 bits and the epilogues
of integers run on this CPU. Every night all ops, at all dtypes and for other GPUs too, and the
products for AMD, sm_80 and other CPUs, which have kernels of their own. That of sm_80 also runs in
tests/ptx, compiled for sm_90a; those of Arm run under qemu.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxvision.graphs.target import Target, cpu_features

OTHERS = ("sm_80", "sm_89", "gfx942")


@pytest.mark.parametrize(
    "arguments",
    [
        ["sm_90a"],
        *(pytest.param([x, "--all"], marks=pytest.mark.nightly) for x in ("sm_90a", *OTHERS)),
    ],
    ids=" ".join,
)
def test_compiles_for(arguments: list[str], pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "tests.ops.compile_target", *arguments]
    print(output(command, pytestconfig.rootpath), end="")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(x, marks=pytest.mark.nightly) for x in OTHERS],
)
def test_products_compile_for(
    architecture: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    target = f"--target-accelerator={architecture}"
    command = ["mojo", "build", target, "-I", ".", "-o", str(tmp_path / "products")]
    output([*command, "tests/ops/products.mojo"], pytestconfig.rootpath)
    built = (tmp_path / "products").read_bytes()
    if architecture.startswith("sm_"):  # which keep the assembly's text
        for kind in (b"k16.row.col.f32.bf16", b"k16.row.col.f32.f16", b"k8.row.col.f32.tf32"):
            assert b"mma.sync.aligned.m16n8" + kind in built, "not on tensor cores"


x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86-64")
BF16 = {  # what multiplies pairs of bfloat16; Linux may refuse AMX, so the other is there too
    "x86-64-v3": set(),
    "znver4": {"vdpbf16ps"},
    "sapphirerapids": {"vdpbf16ps", "tdpbf16ps"},
}


@x86
@pytest.mark.nightly
@pytest.mark.parametrize("cpu", BF16)
def test_bfloat16_products_on_a_cpu(cpu: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assembly = assembly_for(cpu, "tile_products", tmp_path, pytestconfig.rootpath)
    assert {name for name in ("vdpbf16ps", "tdpbf16ps") if name in assembly} == BF16[cpu]


on_cpus = pytest.mark.parametrize(
    "cpu", [None, pytest.param("x86-64-v3", marks=[x86, pytest.mark.nightly])]
)


@on_cpus
def test_bfloat16_products_equal_float64(
    cpu: str | None, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    kernel = run_for(cpu, "tile_products", tmp_path, pytestconfig.rootpath).strip()
    assert kernel in (["float32"] if cpu else ["AMX", "AVX-512 BF16", "float32"])


@on_cpus
def test_epilogues_equal_float64(
    cpu: str | None, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    run_for(cpu, "epilogues", tmp_path, pytestconfig.rootpath)


@on_cpus
def test_byte_products_equal_integers(
    cpu: str | None, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    run_for(cpu, "byte_products", tmp_path, pytestconfig.rootpath)


@on_cpus
def test_results_of_bytes_are_exact(
    cpu: str | None, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    run_for(cpu, "byte_results", tmp_path, pytestconfig.rootpath)


def test_a_layer_has_every_tile_that_it_may_get(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    tiles = float(run_for(None, "tuned_tiles", tmp_path, pytestconfig.rootpath))
    assert tiles < 6, "of 13: most are compiled for nothing"


BYTES = {  # what adds the products of four bytes to a sum
    "x86-64-v3": "vpmaddwd",
    "alderlake": "{vex}\tvpdpbusd",
    "sapphirerapids": "vpdpbusd",
}


@x86
@pytest.mark.nightly
@pytest.mark.parametrize("cpu", BYTES)
def test_byte_products_on_a_cpu(cpu: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assembly = assembly_for(cpu, "byte_products", tmp_path, pytestconfig.rootpath)
    found = next(name for name in BYTES.values() if name in assembly)
    assert found == BYTES[cpu]


ARM = {  # the instruction, and what qemu stands in for
    "cortex-a72": ("saddlp", "cortex-a72"),
    "neoverse-n1": ("sdot", "neoverse-n1"),
    "neoverse-v1": ("usdot", "max"),
}
RUNTIME = """\
#include <stdlib.h>
void *KGEN_CompilerRT_AlignedAlloc(size_t to, size_t size) {
  return aligned_alloc(to, size + -size % to);
}
void KGEN_CompilerRT_AlignedFree(void *memory) { free(memory); }
#define UNUSED(name) void *KGEN_CompilerRT_##name(void) { return 0; }
UNUSED(AsyncRT_GetCurrentCPUDevice) UNUSED(AsyncRT_GetOrCreateCPUDevice)
UNUSED(AsyncRT_ReleaseCPUDevice) UNUSED(DestroyGlobals) UNUSED(GetOrCreateGlobal)
UNUSED(PrintStackTraceOnFault) UNUSED(SetArgV) UNUSED(GetStackTrace)
"""
"""What a program without threads needs of Mojo's runtime, which is not here for other CPUs."""


@pytest.mark.nightly
@pytest.mark.skipif(
    not (shutil.which("qemu-aarch64-static") and shutil.which("aarch64-linux-gnu-gcc")),
    reason="needs Debian's qemu-user-static and gcc-aarch64-linux-gnu",
)
@pytest.mark.parametrize("cpu", ARM)
def test_byte_products_on_arm(cpu: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    instruction, emulated = ARM[cpu]
    target = ["--target-triple", "aarch64-unknown-linux-gnu", "--target-cpu", cpu, "-I", "."]
    for kind, name in (("asm", "products.s"), ("object", "products.o")):
        command = ["mojo", "build", *target, "--emit", kind, "-o", str(tmp_path / name)]
        output([*command, "tests/ops/byte_products.mojo"], pytestconfig.rootpath)
    assert f"\t{instruction}\t" in (tmp_path / "products.s").read_text()
    (tmp_path / "runtime.c").write_text(RUNTIME)
    link = "aarch64-linux-gnu-gcc -static -o products products.o runtime.c -lm"
    output(link.split(), tmp_path)
    output(["qemu-aarch64-static", "-cpu", emulated, str(tmp_path / "products")], tmp_path)


def run_for(cpu: str | None, program: str, folder: Path, root: Path) -> str:
    """Builds a program beside this file for a CPU, runs it and gives what it prints."""
    if cpu and not set(Target.parse(f"cpu:{cpu}").features) <= set(cpu_features()):
        pytest.skip(f"this CPU does not run code for {cpu}")
    target = ["--target-cpu", cpu] if cpu else []
    command = ["mojo", "build", *target, "-I", ".", f"tests/ops/{program}.mojo"]
    output([*command, "-o", str(folder / program)], root)
    return output([str(folder / program)], root)


def assembly_for(cpu: str, program: str, folder: Path, root: Path) -> str:
    """Compiles a program beside this file for a CPU that may be another and gives its assembly."""
    command = ["mojo", "build", "--target-cpu", cpu, "-I", ".", f"tests/ops/{program}.mojo"]
    output([*command, "--emit", "asm", "-o", str(folder / "assembly.s")], root)
    return (folder / "assembly.s").read_text()


def output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
