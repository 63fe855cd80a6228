"""``bench bridge``: what it refuses, counts and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from maxvision.bench import plots, report, summaries
from maxvision.bench.__main__ import main
from maxvision.bench.bridge import OPS, WAYS, code_lines
from maxvision.bench.tables import Record
from maxvision.bridge import torch_ops


def records() -> list[Record]:
    found = []
    for way, ms in zip(WAYS, (2.0, 1.0, 0.5), strict=True):
        record: Record = {"op": "bmm", "dtype": "float32", "backward": True, "implementation": way}
        record |= {"p50_ms": ms, "tflops_per_s": 1.0, "error": 1e-7, "passed": True}
        more = {"kernel_lines": 500, "gflops_per_s_per_line": 2.0} if way == "maxvision" else {}
        found.append(record | more)
    return found


def test_its_table_and_plot(tmp_path: Path, capsys: Any) -> None:
    assert set(report.by_kind(records())) == {"bridge"}
    summaries.bridge(records())
    printed = capsys.readouterr().out
    assert "both" in printed and "0.50" in printed and "500" in printed
    (file,) = plots.draw("some", records(), tmp_path)
    assert file.name == "some-bridge.svg"


def test_an_op_that_it_does_not_know(capsys: Any) -> None:
    assert main(["bridge", "--device", "cpu", "--ops", "conv3d"]) == 2
    assert "--ops must be of conv2d, " in capsys.readouterr().err


@pytest.mark.parametrize("name", OPS)
def test_both_sides_mean_the_same(name: str) -> None:
    assert name in torch_ops.TABLE
    what = OPS[name]
    with FakeTensorMode():
        tensors = [torch.empty(shape) for shape in what.shapes(2)]
        assert what.torch(*tensors).shape == what.ours(*tensors).shape


def test_lines_are_those_that_a_device_compiles() -> None:
    softmax = frozenset({"softmax"})
    few = code_lines(softmax, gpu=False)
    assert 300 < few < code_lines(frozenset({"softmax", "conv2d"}), gpu=False)
    assert few < code_lines(softmax, gpu=True)
