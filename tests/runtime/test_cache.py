"""The cache of compiled graphs: what tells two apart, and what a damaged or missing one gets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from maxvision.common.errors import ModelError
from maxvision.graphs import nodes
from maxvision.graphs.target import Target
from maxvision.runtime import cache
from maxvision.runtime.executor import Unchecked

CPU = Target("cpu", "cpu", "x86_64", ("avx2",))


class Compiled:
    """Stands in for a ``CompiledModel``."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def export_mef(self, path: Path) -> None:
        path.write_bytes(self.content)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "max_cache_dir", lambda: tmp_path)
    return tmp_path / "maxvision"


def graph(channels: int = 4) -> Graph:
    image = TensorType(DType.float32, ["batch", channels], DeviceRef.CPU())
    with Graph("small", input_types=[image], kernel_library=Unchecked()) as made:
        made.output(nodes.relu(made.inputs[0].tensor))
    return made


def stored(content: bytes, name: str = "a" * 64) -> bytes:
    compiled: Any = Compiled(content)
    return cache.store(name, compiled)


def test_what_was_compiled_is_found_again(folder: Path) -> None:
    calls: list[int] = []

    def compile() -> Any:
        calls.append(1)
        return Compiled(b"mef")

    for _ in range(3):
        assert cache.compiled(graph(), CPU, compile) == b"mef"
    assert calls == [1]
    assert cache.compiled(graph(5), CPU, compile) == b"mef" and len(calls) == 2


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return cache.key(graph(), CPU)

    first = key()
    assert key() == first
    others = {
        cache.key(graph(8), CPU),
        cache.key(graph(), Target("cpu", "cpu", "x86_64", ())),
        cache.key(graph(), Target("sm_90a", "cuda", "x86_64", ("avx2",))),
    }
    with monkeypatch.context() as patch:
        patch.setenv("MODULAR_DEBUG", "nan-check")
        others.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "max_version", "99")
        others.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_sources", lambda ops, gpu: "other kernels")
        others.add(key())
    assert len(others - {first}) == 6
    monkeypatch.setenv("MODULAR_CACHE_DIR", "/elsewhere")
    assert key() == first


def test_sources_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "OPS", tmp_path)
    monkeypatch.setattr(cache, "modules", cache.modules.__wrapped__)
    (tmp_path / "sub").mkdir()
    for name, text in (
        ("__init__.mojo", "from .a import *\nfrom .sub import *\n"),
        ("a.mojo", ""),
        ("sub/__init__.mojo", "from .b import x\n"),
        ("sub/b.mojo", ""),
        ("c.mojo", ""),
    ):
        (tmp_path / name).write_text(text)
    digests = {cache._sources.__wrapped__(None, True)}
    for name, text in (
        ("a.mojo", "x"),
        ("sub/b.mojo", "from ..c import x\n"),
        ("c.mojo", "x"),
        ("d.mojo", "x"),  # which nothing imports
    ):
        (tmp_path / name).write_text(text)
        digests.add(cache._sources.__wrapped__(None, True))
    assert len(digests) == 4


def places(ops: cache.Ops, gpu: bool) -> set[str]:
    return {place.as_posix() for place in cache.modules(ops, gpu)}


def test_a_gpu_has_all_ops_and_a_cpu_none_of_its_kernels() -> None:
    every = {path.relative_to(cache.OPS).as_posix() for path in cache.OPS.rglob("*.mojo")}
    measuring = {name for name in every if name.endswith(("measure.mojo", "tune.mojo"))}
    without = {name for name in every if name.endswith("no_gpu.mojo")}
    for_a_gpu, for_a_cpu = places(None, True), places(None, False)
    assert for_a_gpu == every - without - measuring
    assert {"gemm/cpu.mojo", "attention/op.mojo"} < for_a_cpu - {"no_gpu.mojo"} < for_a_gpu
    kernels = {"gpu.mojo", "gemm/hopper.mojo", "conv2d/chain.mojo", "mlp.mojo", "stem/op.mojo"}
    assert not kernels & for_a_cpu
    sources = cache.modules(None, False)
    assert sources[Path("gemm/gpu.mojo")] == (cache.OPS / "gemm/no_gpu.mojo").read_bytes()


def test_a_library_has_the_modules_of_the_ops_that_are_called() -> None:
    ops = frozenset({"conv2d", "maxpool"})
    few = places(ops, False)
    assert {"conv2d/op.mojo", "pool.mojo", "gemm/cpu.mojo"} < few < places(None, False)
    assert not {"attention/op.mojo", "reduce/op.mojo"} & few
    assert "stem/op.mojo" not in places(ops, True) < places(None, True)
    assert {"gpu.mojo", "stem/op.mojo"} < places(frozenset({"stem_conv2d"}), True)
    assert places(frozenset(), False) == {"__init__.mojo"}


def test_every_op_is_in_a_library_for_it_alone() -> None:
    """An op with a kernel for a CPU is in a CPU's, whatever other ops a graph calls."""
    for source in sorted(nodes.OPS.rglob("*.mojo")):
        text = source.read_text()
        place = source.relative_to(nodes.OPS)
        for op in re.findall(r'^@register\("(\w+)"\)', text, re.MULTILINE):
            assert place in cache.modules(frozenset({op}), True), op
            if 'target == "cpu"' in text:
                assert place in cache.modules(frozenset({op}), False), op


def test_a_library_of_all_ops_is_taken_if_it_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def precompile(command: list[str], **_: Any) -> Any:
        Path(command[-1]).write_bytes(b"ops")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(cache, "subprocess_run_mojo", precompile)
    stored(b"mef")
    few = cache.library(frozenset({"conv2d"}), gpu=False)
    whole = cache.library(gpu=False)
    assert few != whole and few == cache.library(frozenset({"conv2d"}), gpu=False)
    assert cache.library(frozenset({"maxpool"}), gpu=False) == whole


def test_the_ops_of_a_graph_are_found_in_its_text() -> None:
    assert cache.called(str(graph())) == {"pointwise"}
    image = TensorType(DType.float32, ["batch", 8, 8, 4], DeviceRef.CPU())
    with Graph("two", input_types=[image], kernel_library=Unchecked()) as other:
        x = nodes.maxpool(other.inputs[0].tensor, kernel=2, stride=2)
        other.output(nodes.relu(x))
    assert cache.called(str(other)) == {"maxpool", "pointwise"}


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_not_found(folder: Path, damage: bytes | None) -> None:
    name = "a" * 64
    assert stored(b"mef" * 100) == b"mef" * 100 == cache.find(name)
    path = folder / f"{name}.mef"
    path.write_bytes(path.read_bytes()[:-1] + b"x" if damage is None else damage)
    assert cache.find(name) is None
    stored(b"again")
    assert cache.find(name) == b"again"


def test_the_least_recently_used_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 3)
    for i in range(3):
        stored(b"mef", str(i))
        os.utime(folder / f"{i}.mef", (i, i))
    assert cache.find("0")
    stored(b"mef", "3")
    assert sorted(path.stem for path in folder.iterdir()) == ["0", "2", "3"]


@pytest.mark.parametrize("parent", [None, Path("/dev/null")])
def test_without_a_cache(monkeypatch: pytest.MonkeyPatch, parent: Path | None) -> None:
    monkeypatch.setattr(cache, "max_cache_dir", lambda: parent)
    assert stored(b"mef") == b"mef"
    assert cache.find("a" * 64) is None
    assert cache.library(gpu=False) == cache.OPS


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODULAR_MOJO_MAX_DRIVER_PATH", "/dev/null")
    with pytest.raises(ModelError, match=r"compiler .* is not here; .*, or use .*compile"):
        cache.library(gpu=False)


FAILED = RuntimeError("Failed to compile the model.")
FAILED.__cause__ = RuntimeError("Graph compilation failed:\nerror: 'rank' exceeds 8\n")


@pytest.mark.parametrize(
    ("free", "error", "says"),
    [
        (0, RuntimeError("Failed to compile"), "full; free some space, or set MODULAR_CACHE_DIR"),
        (0, ModelError("no compiler"), "no compiler"),
        (
            1 << 40,
            RuntimeError("Failed to compile"),
            r"MAX cannot .* \(Failed to compile\); .*--debug",
        ),
        (1 << 40, RuntimeError(), "MAX cannot compile the graph"),
        (1 << 40, FAILED, r"g: MAX cannot compile the graph \('rank' exceeds 8\)"),
        (
            1 << 40,
            RuntimeError(
                "mojo precompile ops: a.mojo:1:2: warning: odd\na.mojo:3:4: error: wrong\n  ^"
            ),
            r"MAX cannot compile the graph \(wrong\)",
        ),
        (1 << 40, TypeError("a type"), "a type"),
    ],
)
def test_a_full_disk_and_a_graph_that_does_not_compile_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, error: Exception, says: str
) -> None:
    def compile() -> Any:
        raise error

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with Graph("g", input_types=[TensorType(DType.float32, [1], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0])
    with pytest.raises(TypeError if isinstance(error, TypeError) else ModelError, match=says):
        cache.compiled(graph, CPU, compile)


def test_nothing_is_beside_a_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX reads the folder of a library while it compiles, and drafts come and go."""

    def precompile(command: list[str], **_: Any) -> Any:
        draft = Path(command[-1])
        assert draft.parent.parent == folder
        draft.write_bytes(b"ops")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(cache, "subprocess_run_mojo", precompile)
    stored(b"mef")
    path = cache.library(gpu=False)
    assert path.read_bytes() == b"ops" and [*path.parent.iterdir()] == [path]
    assert path.parent != folder
