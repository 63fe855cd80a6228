"""Programs of several inputs, outputs and dtypes; what is compiled once; what does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from max.graph import DeviceRef

from maxvision.common import memory
from maxvision.common.errors import ArgumentError
from maxvision.common.host import HOME
from maxvision.graphs.net import Net
from maxvision.graphs.program import Program
from maxvision.graphs.target import Target
from maxvision.graphs.types import BATCH
from maxvision.runtime import cache, executor
from maxvision.runtime.executor import Executor, Lowering, Unchecked

RNG = np.random.default_rng(0)
TENSORS = {
    "head.weight": RNG.standard_normal((5, 8), np.float32),
    "head.bias": RNG.standard_normal(5, np.float32),
}


def program() -> Program:
    net = Net("several")
    a, b = (net.input(name, (BATCH, 8)) for name in "ab")
    c = net.input("c", (BATCH, 4), "int32")
    net.output("head", net.relu(net.linear(a, "head", 5)))
    net.output("sum", a + b)
    net.output("turned", net.concat([net.slice(c, 1, 2, 4), net.slice(c, 1, 0, 2)], axis=1))
    return net.program()


def arrays(count: int) -> list[np.ndarray]:
    a, b = RNG.standard_normal((2, count, 8), np.float32)
    return [a, b, RNG.integers(-9, 9, (count, 4), np.int32)]


def refused(*_: object) -> None:
    raise AssertionError("it was compiled before")


@pytest.fixture(scope="module")
def apart() -> bool:
    """Compiles in a process of its own; whether that left the program in the cache."""
    graph, *_ = Lowering().build(program(), TENSORS, DeviceRef.CPU(), Unchecked())
    with pytest.MonkeyPatch.context() as patch:
        if cache._folder() is not None:
            patch.setattr(executor.InferenceSession, "compile", refused)
        Executor.compile(program(), TENSORS, CPU(), apart=True)
    return not cache.lacks(cache.key(graph, Target.of(CPU())))


@pytest.fixture(scope="module")
def several(apart: bool) -> Executor:
    return Executor.compile(program(), TENSORS, CPU())


def test_a_process_of_its_own_compiles_into_the_cache(apart: bool) -> None:
    assert apart


def test_a_process_that_fails_is_no_error(
    several: Executor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(executor.cache, "lacks", lambda name: True)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    caplog.set_level("DEBUG", "maxvision")
    Executor.compile(program(), TENSORS, CPU(), apart=True)
    assert "a process that compiles ended with 3: no memory" in caplog.text


AGAIN = """
from tests.runtime.test_executor import CPU, TENSORS, Executor, cache, program
from maxvision.common import memory
cache.find = lambda name: None  # MAX's own cache has the kernels
before = memory.resident()
for _ in range(2):
    Executor.compile(program(), TENSORS, CPU())
print(memory.resident() - before)
"""


@pytest.mark.skipif(memory.resident() is None, reason="only Linux tells what a process holds")
def test_a_process_that_compiles_gives_back_what_the_compiler_took(several: Executor) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    left = subprocess.check_output([sys.executable, "-c", AGAIN], cwd=HOME, env=environment)
    assert int(left) < 100e6  # 45 MB, most of them MAX's own code; 158 MB in MAX's own context


@pytest.mark.parametrize("count", [0, 1, 5])
def test_it_computes_every_output_in_its_dtype(several: Executor, count: int) -> None:
    a, b, c = given = arrays(count)
    head, sum_, turned = several(*given)
    expected = np.maximum(a @ TENSORS["head.weight"].T + TENSORS["head.bias"], 0)
    np.testing.assert_allclose(head, expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(sum_, a + b) and sum_.dtype == np.float32
    assert np.array_equal(turned, np.roll(c, 2, axis=1)) and turned.dtype == np.int32


def test_an_output_may_be_a_constant() -> None:
    net = Net("constant")
    net.output("x", net.input("x", (BATCH, 8)))
    net.output("bias", net.weight("head.bias", 5))
    graph, weights, _ = Lowering().build(net.program(), TENSORS, DeviceRef.CPU(), Unchecked())
    assert [list(map(str, each.shape)) for each in graph.output_types] == [["batch", "8"], ["5"]]
    (bound,) = weights.bound.values()
    assert np.array_equal(bound.array(), TENSORS["head.bias"])


def test_what_it_gives_is_the_callers(several: Executor) -> None:
    a, b, c = arrays(1)
    _, first, _ = several(a, b, c)
    kept = first.copy()
    several(a + 1, b, c)
    assert np.array_equal(first, kept)


def test_it_compiles_once(several: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    if cache._folder() is None:
        pytest.skip("NO CACHE can be written here")
    monkeypatch.setattr(executor.InferenceSession, "compile", refused)
    other = {name: -tensor for name, tensor in TENSORS.items()}
    again = Executor.compile(program(), other, CPU())
    a, b, c = arrays(2)
    expected = np.maximum(-(a @ TENSORS["head.weight"].T + TENSORS["head.bias"]), 0)
    np.testing.assert_allclose(again(a, b, c)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: (a, b), r"several takes 3 inputs \(a, b, c\) but got 2"),
        (lambda a, b, c: (a[:, :7], b, c), r"a is float32\[2, 7\] but has to be float32\[batch, 8"),
        (lambda a, b, c: (a, b[0], c), r"b is float32\[8\] but has to be float32\[batch, 8\]"),
        (lambda a, b, c: (a, b[:1], c), r"b is float32\[1, 8\] but has to be"),
        (
            lambda a, b, c: (None, b, c),
            r"a has to be a numpy array of float32\[batch, 8\], not None",
        ),
        (lambda a, b, c: (a, b, c * 1.0), r"c is float64\[2, 4\] but has to be int32\[batch, 4\]"),
    ],
)
def test_inputs_that_do_not_fit(
    several: Executor, change: Callable[..., tuple[np.ndarray, ...]], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        several(*change(*arrays(2)))


def test_weights_that_do_not_fit_are_named_together() -> None:
    wrong: dict[str, Any] = {"head.weight": np.zeros((8, 5), np.float32), "head.bias": [0.0] * 5}
    said = (
        r"several: head.weight is float32\[8, 5\] but has to be float32\[5, 8\];"
        " head.bias has to be a numpy array, not list"
    )
    with pytest.raises(ArgumentError, match=said):
        Executor.compile(program(), wrong, CPU())
    with pytest.raises(ArgumentError, match=r"several: head.bias float32\[5\] is missing"):
        Executor.compile(program(), {"head.weight": TENSORS["head.weight"]}, CPU())


def test_a_compilation_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor.cache, "compiled", lambda graph, target, compile: compile())
    monkeypatch.setattr(executor.cache, "library", lambda ops, gpu: 1 / 0)  # what begins one
    caplog.set_level("INFO", "maxvision")
    with pytest.raises(ZeroDivisionError):
        Executor.compile(program(), TENSORS, CPU())
    assert "compiling several for cpu" in caplog.text


def test_filters_have_the_dtype_of_activations() -> None:
    with pytest.raises(ArgumentError, match="head computes in float32 but its filter would be bf"):
        Executor.compile(program(), TENSORS, CPU(), Lowering("bfloat16"))


@pytest.mark.nightly  # by day test_replay.py runs what has no batch
def test_without_a_batch_it_runs_as_a_whole() -> None:
    net = Net("whole")
    x = net.input("x", (2, 3, 4))
    net.output("turned", net.permute(x, 2, 0, 1))
    run = Executor.compile(net.program(), {}, CPU(), Lowering(off=("channels_last",)))
    given = RNG.standard_normal((2, 3, 4), np.float32)
    assert np.array_equal(run(given)[0], given.transpose(2, 0, 1))
