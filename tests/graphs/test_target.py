"""Targets: their names, which devices run what was compiled for them, and what others are told."""

from __future__ import annotations

import platform
import re
from types import SimpleNamespace

import max.driver as driver
import pytest
from max.driver import CPU

from maxvision.common.errors import ArgumentError, DeviceError
from maxvision.graphs import target
from maxvision.graphs.target import GPUS, Target, cpu_features

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86-64")


@pytest.mark.parametrize("name", ["cpu", "cpu:generic", *GPUS])
def test_targets_have_names(name: str) -> None:
    wanted = Target.parse(name)
    assert wanted.name == name and wanted.machine == platform.machine()
    assert wanted.api == {"c": "cpu", "s": "cuda", "g": "hip"}[name[0]]
    assert wanted.features == (cpu_features() if name == "cpu" else ())


@pytest.mark.parametrize(
    "name", ["", "tpu", "cpu:", "cpu:native", "cpu:nonsense", "sm_77", "SM_90"]
)
def test_targets_that_are_none(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"target must be one of cpu, .*sm_90a.* but is '{name}'"
    ):
        Target.parse(name)


@x86
def test_kinds_of_cpus_contain_each_other() -> None:
    needs = [set(Target.parse(f"cpu:x86-64-v{i}").features) for i in (2, 3, 4)]
    assert needs[0] < needs[1] < needs[2]
    assert "avx2" in needs[1] and "avx512f" in needs[2] - needs[1]
    amx = set(Target.parse("cpu:sapphirerapids").features)
    assert needs[2] < amx and {"amx_bf16", "amx_tile"} <= amx - needs[2]


@pytest.mark.parametrize(
    ("machine", "name", "told"),
    [
        ("x86_64", "cpu:sapphirerapids", r"tdpbusd \(AMX\)"),
        ("x86_64", "cpu:x86-64-v4", "vpmaddwd"),
        ("x86_64", "cpu:x86-64-v3", r"vpmaddwd, pairs of 16 bits \(AVX2\)"),
        ("x86_64", "cpu:generic", "pairs of 16 bits"),
        ("aarch64", "cpu:neoverse-v1", "usdot"),
        ("aarch64", "cpu:neoverse-n1", "sdot"),
        ("x86_64", "sm_90a", "wgmma"),
    ],
)
def test_targets_say_what_multiplies_bytes(
    monkeypatch: pytest.MonkeyPatch, machine: str, name: str, told: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    wanted = Target.parse(name)
    assert re.match(f"53 layers, by {told}", wanted.told_bytes(53))
    assert not wanted.told_bytes(0)


def test_this_machine_runs_what_is_compiled_for_it() -> None:
    assert Target.parse("cpu") == Target.of(CPU())
    assert Target.parse("cpu").open().is_host
    assert Target.parse("cpu:generic").open().is_host


@x86
def test_a_cpu_that_lacks_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Target.parse("cpu:x86-64-v4")
    older = Target.parse("cpu:x86-64-v3").features
    monkeypatch.setattr(target, "cpu_features", lambda: older)
    with pytest.raises(DeviceError, match=r"a CPU with avx512bw, .*--target cpu:x86-64-v3"):
        wanted.open()
    with pytest.raises(DeviceError, match=r"a CPU with .*amx_bf16, .*--target cpu:x86-64-v3"):
        Target.parse("cpu:sapphirerapids").open()
    assert Target.parse("cpu:x86-64-v3").open().is_host


def test_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Target.parse("cpu")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(DeviceError, match=r"compiled on \w+ but this machine is riscv64"):
        wanted.open()


@pytest.mark.parametrize(
    ("gpus", "index", "found"),
    [
        (["sm_90a"], None, 0),
        (["sm_90"], None, 0),
        (["sm_80", "sm_90a"], None, 1),
        (["sm_90a", "sm_90a"], 1, 1),
        ([], None, "this machine has no GPU; .*--target cpu"),
        (["sm_80"], None, "the GPU of this machine is sm_80; .*--target sm_80"),
        (["sm_90a", "sm_80"], 1, "gpu:1 is sm_80; .*--target sm_80"),
        (["sm_100"], None, "machine is sm_100; .*--target sm_100a"),
        (["sm_75"], None, "machine is sm_75; .*--target cpu"),
        (["sm_90a"], 3, "there is no gpu:3; "),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], index: int | None, found: int | str
) -> None:
    monkeypatch.setattr(driver, "accelerator_count", lambda: len(gpus))
    monkeypatch.setattr(
        target,
        "Accelerator",
        lambda i: SimpleNamespace(id=i, api="cuda", architecture_name=gpus[i]),
    )
    wanted = Target.parse("sm_90a")
    if isinstance(found, int):
        assert wanted.open(index).id == found
        return
    with pytest.raises(DeviceError, match=rf"compiled for the GPU sm_90a but .*{found}"):
        wanted.open(index)


def test_a_suffix_that_a_driver_leaves_out_is_added() -> None:
    with Target("sm_90", "cuda", "x86_64", ()).device(1) as device:
        assert (device.architecture_name, device.id) == ("sm_90a", 1)


@pytest.mark.parametrize("name", ["cpu", "cpu:generic", "sm_90a", "gfx942"])
def test_a_device_that_is_not_here_leaves_the_process_as_it_was(name: str) -> None:
    with Target.parse(name).device() as device:
        assert device.api == Target.parse(name).api
        assert driver.is_virtual_device_mode() == (device.api != "cpu")
        if device.api != "cpu":
            assert device.architecture_name == name
            assert driver.get_virtual_cpu_target() == "generic"
    assert not driver.is_virtual_device_mode() and not driver.get_virtual_cpu_target()
    assert driver.accelerator_api() == "cpu" or driver.accelerator_count()
