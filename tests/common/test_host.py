"""How many cores a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxvision.common import host
from maxvision.common.errors import ArgumentError

ALL = 16


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(ALL)), raising=False)
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setenv(host.THREADS, "")
    host._quota.cache_clear()
    yield
    host._quota.cache_clear()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, ALL, id="no control groups"),
        pytest.param({"membership": "0::/"}, ALL, id="the machine itself"),
        pytest.param({"membership": "0::/", "cpu.max": "max 100000"}, ALL, id="no quota"),
        pytest.param({"membership": "0::/", "cpu.max": "400000 100000"}, 4, id="a container"),
        pytest.param({"membership": "0::/", "cpu.max": "250000 100000"}, 2, id="whole cores"),
        pytest.param({"membership": "0::/", "cpu.max": "50000 100000"}, 1, id="half a core"),
        pytest.param({"membership": "0::/", "cpu.max": "9900000 100000"}, ALL, id="a large quota"),
        pytest.param(
            {
                "membership": "0::/system.slice/maxvision.service",
                "system.slice/cpu.max": "300000 100000",
                "system.slice/maxvision.service/cpu.max": "600000 100000",
            },
            3,
            id="the least of a unit's and its slice's",
        ),
        pytest.param(
            {
                "membership": "5:memory:/x\n4:cpu,cpuacct:/docker/1f\n0::/",
                "cpu/cpu.cfs_quota_us": "500000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            5,
            id="a container of version 1",
        ),
        pytest.param(
            {
                "membership": "4:cpu:/",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            ALL,
            id="no quota of version 1",
        ),
    ],
)
def test_a_quota_is_kept(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    write(tmp_path, files)
    assert host.cores() == cores


def test_the_users_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    host.use_cores(3)
    assert host.cores() == 3
    host.use_cores(ALL)  # what was said last
    assert host.cores() == ALL
    with pytest.raises(ArgumentError, match="the 16 cores that this process may use"):
        host.use_cores(ALL + 1)
    monkeypatch.setenv(host.THREADS, "64")  # of the environment: for machines of any size
    assert host.cores() == ALL
    for wrong in ("0", "-1", "2.5", "all"):
        monkeypatch.setenv(host.THREADS, wrong)
        with pytest.raises(ArgumentError, match="MAXVISION_THREADS must be a whole number from 1"):
            host.cores()
