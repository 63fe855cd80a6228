"""The page of results: every form of record that there is, and figures that can be recomputed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from maxvision.bench import report
from maxvision.bench.__main__ import main

FACTS = {
    "cpu": "Some CPU, 2 cores", "gpu": "NVIDIA H200, 580.1, 1980 MHz", "commit": "abc1234",
    "date": "2026-11-22", "max": "26.7.0", "torch": "2.13.0", "cudnn": 91900,
    "command": "maxvision bench models --json new.json",
    "ceilings": {"bfloat16": {"tflops_per_s": 700.0, "gb_per_s": 4300.0}},
}  # fmt: skip


def network(engine: str, batch: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "model": "resnet-50", "dtype": "bfloat16", "batch": batch, "device": "gpu:0",
        "engine": engine, "p50_ms": ms, "p90_ms": ms, "p99_ms": ms,
        "tflops_per_s": 8.2 * batch / ms, "share_of_roofline": 0.5, "memory_mb": 300,
        "max_rel_err": 0.004, "joules_per_batch": 0.1 * batch, "passed": True, **more,
    }  # fmt: skip


def layer(us: float, peer: float | None, count: int, **more: Any) -> dict[str, Any]:
    found = {
        "model": "resnet-50", "dtype": "bfloat16", "batch": 32, "engine": "maxvision",
        "layer": "3x3/1 64 at 56x56", "op": "conv2d_add", "epilogue": "add_relu", "count": count,
        "us": us, "tflops_per_s": 100.0, "gb_per_s": 1000.0, "share_of_roofline": 0.3,
        "kernel": [{"name": "gemm_hopper_128x64x4_add_relu_bfloat16 1726", "blocks": 264}],
        "passed": True, **more,
    }  # fmt: skip
    return {**found, "peer_us": peer} if peer else found


LOST = {
    "model": "resnet-50", "dtype": "bfloat16", "batch": 32, "engine": "torch-compile",
    "passed": False, "lost": "its process ended with SIGABRT",
}  # fmt: skip
RECORDS = [
    network("maxvision", 1, 0.25), network("torch-compile", 1, 0.4), network("torch-eager", 1, 0.9),
    network("maxvision", 32, 1.5), network("torch-eager", 32, 3.0), LOST,
    network("torch-wrong", 32, 0.1, passed=False),
    layer(10.0, 12.0, 3), layer(4.0, None, 2, op="relu", tflops_per_s=0.0, epilogue=""),
]  # fmt: skip


def write(path: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"environment": facts, "records": records}))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    results, out = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    out.mkdir()
    return results, out


def page(folders: tuple[Path, Path], *more: str) -> str:
    results, out = folders
    assert main(["report", "--results", str(results), "--out", str(out), *more]) == 0
    return (out / "performance.md").read_text()


def test_the_page_holds_every_figure(folders: tuple[Path, Path]) -> None:
    write(folders[0] / "new.json", FACTS, RECORDS)
    write(folders[0] / "old.json", {**FACTS, "date": "2026-11-20"}, RECORDS[:2])
    write(folders[0] / "profile.json", FACTS, [{"engine": "maxvision", "place": 0, "us": 3.0}])
    text = page(folders, "--no-plots")
    assert "## NVIDIA H200, 2026-11-22" in text
    assert (
        "`maxvision bench models --json new.json`: commit abc1234, driver 580.1, MAX 26.7.0,"
        in text
    )
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| resnet-50")]
    assert len(rows) == 7
    assert rows[0][3:8] == ["**maxvision**", "0.2500", "0.2500", "0.2500", "4,000"]
    assert "**0.62** |" in " | ".join(rows[0])  # of the best, not of the mean
    # A wrong peer is no peer, however fast, and neither is one that was lost.
    assert "**0.50**" in " | ".join(rows[3])
    assert "lost: its process ended with SIGABRT" in text and "wrong result" in text
    assert "| 3x3/1 64 at 56x56 | conv2d add_relu | 3 | 10.0 | 12.0 | 0.83 | 100 | 30% |" in text
    assert "`gemm_hopper_128x64x4_add_relu_bfloat16`" in text
    assert "| all |  | 3 | 30.0 | 36.0 | 0.83 |" in text
    assert "- `old.json`, NVIDIA H200: measured again since." in text
    assert "- `profile.json`: no network and no layer in it." in text
    assert "![" not in text


def test_older_forms_are_read(folders: tuple[Path, Path]) -> None:
    cpu = {"cpu": "Some CPU, 2 cores", "gpu": "none", "date": "2026-11-21"}
    old = {"layer": "7x7/2", "count": 2, "batch": 1, "ours_ms": 1.5, "torch_ms": 3.0}
    write(folders[0] / "layers.json", cpu, [{**old, "gflops_per_s": 155.0}])
    model = {"model": "cvt-13", "dtype": "float32", "batch": 1, "engine": "maxvision"}
    gpu = [
        {"case": "conv2d", "passed": True},
        {**model, "p50_ms": 2, "torch_eager_graph_p50_ms": 4},
    ]
    write(folders[0] / "gpu.json", {**FACTS, "ceilings": {}}, gpu)
    text = page(folders, "--no-plots")
    assert "| 7x7/2 | conv2d | 2 | 1,500 | 3,000 | 0.50 | 0.155 |" in text
    assert "| cvt-13 | float32 | 1 | torch-eager-graph | 4.000 |" in text and "**0.50**" in text


def test_the_committed_results_can_be_shown(folders: tuple[Path, Path]) -> None:
    committed = sorted((report.ROOT / "bench/results").glob("*.json"))
    for path in committed:
        (folders[0] / path.name).write_text(path.read_text())
    text = page(folders, "--no-plots")
    assert committed and all(path.name in text for path in committed)


def test_nothing_yet(folders: tuple[Path, Path]) -> None:
    assert "Nothing has been measured yet." in page(folders, "--no-plots")


def test_plots(folders: tuple[Path, Path]) -> None:
    pytest.importorskip("matplotlib")
    write(folders[0] / "new.json", FACTS, RECORDS)
    text = page(folders)
    names = re.findall(r"!\[[^]]*\]\((.*?)\)", text)
    assert names == [f"performance-new-{kind}.svg" for kind in ("latency", "ratios", "roofline")]
    first = [(folders[1] / name).read_bytes() for name in names]
    assert all(b"<svg" in drawn for drawn in first)
    assert b"torch-compile" in first[0] and b"2.00" in first[1]
    page(folders)
    assert first == [(folders[1] / name).read_bytes() for name in names]


@pytest.mark.parametrize("content", ["", "[]", '{"records": []}', '{"environment": 3}'])
def test_a_broken_file_is_named(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (folders[0] / "x.json").write_text(content)
    assert main(["report", "--results", str(folders[0]), "--out", str(folders[1])]) == 2
    assert re.search(r"^error: .*x\.json expects a JSON object", capsys.readouterr().err)
    assert main(["report", "--results", "nowhere"]) == 2
    assert "report expects a folder but nowhere is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(0.25, "ms", "0.2500"), (41.917, "ms", "41.92"), (1234.5, "ms", "1,234"), (12.0, "", "12.0"),
     (0.155, "", "0.155"), (0, "", "0"), (None, "", "")],
)  # fmt: skip
def test_numbers(value: float | None, unit: str, said: str) -> None:
    assert report.number(value, unit) == said
