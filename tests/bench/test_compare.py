"""Functions of one's own are compared and profiled: what is counted, and what is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxvision import torch_ops
from maxvision.bench import levels, report
from maxvision.bench.__main__ import main
from maxvision.bench.ceilings import Ceilings
from maxvision.bench.compare import code_lines, compare, profile
from maxvision.bridge import parts
from maxvision.common.errors import ArgumentError
from tests.graphs.interpret import Interpreted

SHORT: dict[str, Any] = {"seconds": 0.001, "roofline": False}


def two_steps(x: Tensor, weight: Tensor) -> Tensor:
    """A product.

    And a sum.
    """
    y = x @ weight  # which is a launch

    return helped(y)


def helped(y: Tensor) -> Tensor:
    return y + 1


def in_one(x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(torch.ones(1), x, weight)


ARGS = torch.randn(6, 4), torch.randn(4, 5)


def test_launches_bytes_and_flops_are_counted(tmp_path: Path, capsys: Any) -> None:
    found = compare({"two": two_steps, "one": in_one}, ARGS, **SHORT)
    two, one = found.records
    assert (two["launches"], one["launches"]) == (2, 2)  # the ones are made, too
    assert two["moved_mb"] == (24 + 20 + 30 + 30 + 30) * 4 / 1e6
    assert two["memory_mb"] == pytest.approx(2 * 30 * 4 / 1e6, abs=2e-5)  # and the number 1
    assert (two["lines"], two["passed"]) == (5, True) and 0 <= two["error"] < 1e-6
    flops = 2 * 6 * 4 * 5
    assert two["tflops_per_s"] == pytest.approx(flops / two["p50_ms"] / 1e9, rel=1e-3)
    found.show("Two ways")
    said = capsys.readouterr().out
    assert "Two ways" in said and "p50 ms" in said
    found.plot(tmp_path / "two.svg")
    assert "two" in (tmp_path / "two.svg").read_text()


def test_gradients_are_compared() -> None:
    def halved(x: Tensor, weight: Tensor) -> Tensor:
        y = two_steps(x, weight)
        return y / 2 + (y / 2).detach()

    found = compare({"two": two_steps, "halved": halved}, ARGS, **SHORT)
    assert found.records[1]["passed"]
    both = compare({"two": two_steps, "halved": halved}, ARGS, backward=True, **SHORT)
    assert not both.records[1]["passed"] and both.records[1]["error"] == pytest.approx(0.5)


def test_a_wrong_result_and_nan_are_told(capsys: Any) -> None:
    ways = {"two": two_steps, "nan": lambda x, weight: two_steps(x, weight) * float("nan")}
    found = compare(ways, ARGS, **SHORT)
    assert not found.records[1]["passed"]
    found.show()
    assert "WRONG" in capsys.readouterr().out


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="with a tensor among them"):
        compare({"two": two_steps}, (), **SHORT)
    with pytest.raises(ArgumentError, match=r"less gives \[\(5, 5\)\], and the first one \[\(6"):
        compare({"two": two_steps, "less": lambda x, w: two_steps(x, w)[1:]}, ARGS, **SHORT)
    with pytest.raises(ArgumentError, match=r"narrow does not take float64 \(RuntimeError"):
        compare({"narrow": lambda x, w: x @ torch.ones(4, 4)}, ARGS, **SHORT)
    found = compare({"two": two_steps}, ARGS, **SHORT)
    with pytest.raises(ArgumentError, match="choose another place"):
        found.plot(tmp_path / "nowhere/two.svg")


def test_sixteen_bits_may_err_as_torch_does() -> None:
    args = [x.bfloat16() for x in ARGS]
    found = compare({"two": two_steps, "one": in_one_of_any, "third": off}, args, **SHORT)
    assert [r["passed"] for r in found.records] == [True, True, False]
    assert found.records[0]["error"] > 1e-4


def in_one_of_any(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float() + 1).to(x.dtype)


def off(x: Tensor, weight: Tensor) -> Tensor:
    return two_steps(x, weight) * 1.1


def test_programs_of_ours_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    for each in torch_ops.TABLE.values():
        for held in ("made", "ready"):
            monkeypatch.setattr(each, held, {})
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)
    norm = lambda *given: F.layer_norm(given[0], (8,), *given[1:])  # noqa: E731
    found = compare({"torch": norm, "ours": torch_ops.layer_norm}, (x, weight, bias), **SHORT)
    ours = found.records[1]
    assert (ours["launches"], ours["memory_mb"], ours["passed"]) == (1, None, True)
    assert ours["moved_mb"] == pytest.approx((2 * 3 * 5 * 8 + 2 * 8) * 4 / 1e6, rel=1e-3)


def test_lines_are_of_what_compilers_were_given() -> None:
    assert code_lines(two_steps) == code_lines(torch.compile(two_steps)) == 5
    assert code_lines(torch.jit.trace(helped, ARGS[0])) is None
    assert code_lines(torch_ops.relu) == 3


def test_a_call_is_profiled(tmp_path: Path, capsys: Any) -> None:
    found = profile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8), runs=2)
    names = {name: count for name, count, _ in found.rows}
    assert names["aten::gelu"] == 1 and "aten::addmm" in names
    assert [us for *_, us in found.rows] == sorted((us for *_, us in found.rows), reverse=True)
    found.show()
    assert "aten::addmm" in capsys.readouterr().out
    found.plot(tmp_path / "where.png")
    assert (tmp_path / "where.png").read_bytes()[1:4] == b"PNG"


def test_a_cpus_levels_interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU too, and before bench levels imports triton."""
    monkeypatch.delenv("TRITON_INTERPRET")  # which tests/conftest.py sets
    seen: list[tuple[str, str | None]] = []

    def loaded(name: str) -> Any:
        seen.append((name, os.environ.get("TRITON_INTERPRET")))
        return SimpleNamespace(run=lambda options: 0)

    monkeypatch.setattr("importlib.import_module", loaded)
    assert main(["levels", "--device", "gpu"]) == main(["levels", "--device", "cpu"]) == 0
    assert seen == [("maxvision.bench.levels", None), ("maxvision.bench.levels", "1")]


def test_levels_are_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One block at the levels that compile nothing."""
    few = {"layer_norm": [torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)]}
    monkeypatch.setattr(levels, "_given", lambda name, size: few[name])
    monkeypatch.setattr(levels, "_count_inductor", lambda: None)
    limits = lambda dtype, gpu: Ceilings(1e12, 1e10)  # noqa: E731
    monkeypatch.setattr(levels, "ceilings", limits)
    monkeypatch.setattr(sys.modules[compare.__module__], "limits", limits)
    path = tmp_path / "levels.json"
    command = ["levels", "--device", "cpu", "--blocks", "layer_norm", "--levels", "2"]
    assert main([*command, "--seconds", "0.01", "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [r["implementation"] for r in records] == ["1 eager", "1 eager: in steps", "2 script"]
    assert all(r["passed"] and r["block"] == "layer_norm" for r in records)
    assert report.by_kind(records).keys() == {"levels"}
    capsys.readouterr()
    assert main(["report", str(path), "--plots", str(tmp_path)]) == 0
    assert "layer_norm, float32, forward" in capsys.readouterr().out
    assert "in steps" in (tmp_path / "levels-levels.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--blocks", "mpl"], "--blocks must be of layer_norm, mlp, "),
        (["--levels", "6"], "--levels must be of 1 to 5 but has 6"),
    ],
)
def test_what_there_is_not_is_told(arguments: list[str], told: str, capsys: Any) -> None:
    assert main(["levels", "--device", "cpu", *arguments]) == 2
    assert told in capsys.readouterr().err
