"""Sparse kernels on a GPU: which are measured, on what, and what is noted; the GPU is played."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType

from maxvision import weights
from maxvision.bench import kernels, sparse, summaries
from maxvision.common.errors import DeviceError
from maxvision.graphs.layers import layers as layers_of
from maxvision.graphs.target import Target

HOPPER = Target.parse("sm_90a")
PROGRAM = """#!{python}
import pathlib, sys
print("# Some GPU")
for i, line in enumerate(open(sys.argv[1])):
    kernel, dtype, n, side, c, f, k, stride, folder = line.split()
    size = int(c) * int(f) * int(k) ** 2 * {{"bfloat16": 2, "float32": 4}}[dtype]
    assert (pathlib.Path(folder) / "dense").stat().st_size == size
    assert kernel in ("dense", "exact") or (pathlib.Path(folder) / "1").stat().st_size
    print("row", i, 10.0 if kernel == "dense" else 4.0, 0.5 if kernel == "two_four" else 1e-5)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(kernels, "cudnn_us", lambda *_: 9.0)
    return path


def cases() -> list[kernels.Case]:
    layers = layers_of(weights.load("resnet-cifar10").program((128, 128)))
    drawn = list(sparse.drawn(layers, (0.5, 0.1)))
    return drawn + [each for full in sparse.drawn(layers, (1,)) for each in kernels.patterned(full)]


def test_every_format_is_measured_beside_dense(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = cases()
    records = list(kernels.measure(drawn, (1, 8), HOPPER, DType.bfloat16, program))
    taken = [r for r in records if r["channels"] > 3 and r["filters"] % 8 == 0]
    formats = {(r["pattern"], r["format"]): r["suited"] for r in taken}
    assert formats == {
        ("unstructured", "tiles"): True, ("unstructured", "steps"): False,
        ("2:4", "two_four"): True, ("2:4", "tiles"): True,
        ("64x64", "blocks"): True, ("64x64", "tiles"): True,
    }  # fmt: skip
    assert all(r["passed"] == (r["format"] != "two_four") for r in records)
    assert {(r["dense_us"], r["sparse_us"], r["gain"]) for r in records} == {(10, 4, 2.5)}
    summaries.sparse(
        [{**r, "model": "net", "dtype": "bfloat16"} for r in records if r["batch"] == 1]
    )
    said = capsys.readouterr().out
    assert "Layers of net, bfloat16, batch 1, unstructured zeros as tiles\n" in said
    assert "cuDNN" in said and "2.50" in said and "WRONG" in said


def test_float32_has_a_dense_kernel_more(program: Path) -> None:
    drawn = [case for case in cases() if case.pattern == "unstructured"]
    records = list(kernels.measure(drawn, (1,), HOPPER, DType.float32, program))
    assert {(r["format"], r["suited"], r["exact_us"]) for r in records} == {("steps", True, 4.0)}


def test_blocks_and_fours_are_what_they_say() -> None:
    for case in cases():
        share = np.mean(case.filters != 0)
        assert share == pytest.approx(case.density, abs=0.02)
        if case.pattern == "2:4":
            r, s, c, f = case.filters.shape
            fours = np.count_nonzero(case.filters.reshape(r, s, c // 4, 4, f), axis=3)
            assert fours.max() <= 2


def test_a_program_that_fails_is_told(program: Path) -> None:
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such GPU')\n")
    with pytest.raises(DeviceError, match="measure failed on the GPU: no such GPU"):
        list(kernels.measure(cases()[:1], (1,), HOPPER, DType.bfloat16, program))
