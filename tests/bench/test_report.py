"""The report: every form of record that there is, and figures that can be recomputed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from maxvision.bench import plots, report, tables
from maxvision.bench.__main__ import main

RESULTS = sorted((Path(__file__).resolve().parents[2] / "bench/results").glob("*.json"))
FACTS = {
    "cpu": "Some CPU, 2 cores", "gpu": "NVIDIA H200, 580.1, 1980 MHz", "commit": "abc1234",
    "date": "2026-11-22", "max": "26.7.0", "torch": "2.13.0", "note": "Quiet.",
    "command": "maxvision bench models --json new.json",
    "ceilings": {"bfloat16": {"tflops_per_s": 700.0, "gb_per_s": 4300.0}},
}  # fmt: skip
CELL = {"model": "resnet-50", "dtype": "bfloat16", "device": "gpu:0"}


def network(engine: str, batch: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        **CELL, "batch": batch, "engine": engine, "p50_ms": ms, "p90_ms": ms, "p99_ms": ms,
        "images_per_s": 1e3 * batch / ms, "tflops_per_s": 8.2 * batch / ms, "memory_mb": 300,
        "max_rel_err": 0.004, "joules_per_batch": 0.1 * batch, "passed": True, **more,
    }  # fmt: skip


LAYER = {
    **CELL, "batch": 32, "engine": "maxvision", "layer": "3x3/1 64 at 56x56", "op": "conv2d_add",
    "epilogue": "add_relu", "count": 3, "us": 10.0, "peer_us": 12.0, "of_peer": 0.83,
    "tflops_per_s": 100.0, "gb_per_s": 1000.0, "share_of_roofline": 0.3, "passed": True,
    "kernel": [{"name": "gemm_hopper_128x64x4_add_relu_bfloat16 1726", "blocks": 264}],
}  # fmt: skip
LAUNCH = {
    **CELL, "batch": 1, "engine": "maxvision", "place": 0, "name": "gemm", "symbol": "gemm_1",
    "us": 3.0, "adds_us": 2.5, "start_us": 0.0, "grid": [2, 1, 1], "block": [128, 1, 1],
    "registers": 32, "shared_bytes": 0, "layer": "stem",
}  # fmt: skip
SERVED = {
    "server": "maxvision", "body": "bytes", "loop": "closed", "concurrency": 8, "p50_ms": 1.5,
    "requests_per_s": 1234.5, "goodput_per_s": 1200.0, "statuses": {"200": 99}, "wrong": 0,
}  # fmt: skip
LOST = {
    **CELL, "batch": 32, "engine": "torch-compile", "passed": False,
    "lost": "its process ended with SIGABRT",
}  # fmt: skip
RECORDS = [
    network("maxvision", 1, 0.25), network("torch-compile", 1, 0.4), network("torch-eager", 1, 0.9),
    network("maxvision", 32, 1.5), network("torch-eager", 32, 3.0), LOST,
    network("torch-wrong", 32, 0.1, passed=False),
    LAYER, LAUNCH, SERVED, {"case": "conv2d", "passed": True, "max_rel_err": 0.00123456},
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new.json"
    path.write_text(json.dumps({"environment": FACTS, "records": RECORDS}))
    return path


def test_a_report_needs_no_torch(file: Path) -> None:
    """Of any kind of record: the tables are read where nothing was measured."""
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from maxvision.bench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    files = [file, *RESULTS]
    kinds = {kind for path in files for kind in report.by_kind(report.read(path)[1])}
    assert kinds - {""} | {"latency"} == {*report.SHOW, "ops", "profile"}
    argv = [sys.executable, "-c", code, "report", *map(str, files)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^# (.*)", done.stdout, re.M) == [path.name for path in files]


def test_a_file_is_shown_whole(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# new.json\n\nNVIDIA H200, 580.1, 1980 MHz; Some CPU, 2 cores;")
    for told in ("commit abc1234; MAX 26.7.0", "`maxvision bench models --json new.json`",
                 "bfloat16, through torch: 700 TFLOP/s, 4,300 GB/s", "Quiet."):  # fmt: skip
        assert told in said
    lines = [line for line in said.splitlines() if line.startswith("| resnet-50")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0][3:8] == ["maxvision", "0.2500", "0.2500", "0.2500", "4,000"]
    # Of the best, not of the mean; a wrong peer is no peer, however fast, nor is one that was lost.
    assert [row[-2] for row in rows] == ["0.62 x", "0.62 x", "0.28 x", "0.50 x", "0.50 x", "", ""]
    assert rows[5][-1] == "LOST: its process ended with SIGABRT" and rows[6][-1] == "WRONG"
    assert "3x3/1 64 at 56x56" in said and "0.83 x" in said
    assert "stem" in said and "1 launches in 2.5 us" in said
    assert "closed 8" in said and "1,234" in said and "200:99" in said
    assert "| conv2d |   True |    0.001235 |" in said


def test_what_maxvision_time_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("min", "mean", "p50", "p90", "p95", "p99", "max")
    times = {"runs": 9, **{f"{name}_ms": 1.25 for name in names}}
    record = {"batch": 2, "compute": times, "request": times, "host_mb": 300, "device_mb": None}
    path = tmp_path / "time.json"
    path.write_text(json.dumps({"environment": FACTS, "records": [record]}))
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Times in ms" in said and "1.250" in said and "{" not in said


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_committed_results_can_be_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    said = capsys.readouterr().out
    assert said.startswith(f"# {path.name}\n") and len(said.splitlines()) > min(9, len(records))


def test_plots(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", str(file), "--plots", str(tmp_path)]) == 0
    drawn = tmp_path / "new-ratios.svg"
    assert str(drawn) in capsys.readouterr().out
    first = drawn.read_bytes()
    assert b"torch-compile" in first and b"2.00" in first and b"torch-wrong" not in first
    plots.draw("new", RECORDS, tmp_path)
    assert first == drawn.read_bytes()


def test_the_course_of_a_training_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As weights/bundled/train.py --curves writes it, of two networks after one batch."""
    pytest.importorskip("matplotlib", reason="A TRAINING RUN'S PLOT IS NOT TESTED: no matplotlib")
    script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "weights/bundled/train.py"))
    path = tmp_path / "run.json"
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    curves = script["Curves"](path, "maxvision", images, torch.tensor([0, 1, 1]))
    for folder in ("one", "two"):
        last = torch.nn.Linear(3 * script["SIDE"] ** 2, 2)
        with torch.no_grad():
            last.weight.zero_()
            last.bias.copy_(torch.tensor([0.0, 1.0]))
        network = torch.nn.Sequential(torch.nn.Flatten(), last)
        mean = AveragedModel(Logits(network))
        learner = SimpleNamespace(folder=folder, losses=[torch.tensor(1.5)] * 2, mean=mean)
        curves.add(learner, 1, 2.5, marked=False)
        curves.add(learner, 2, 5.0, marked=True)
        assert mean.training
    assert main(["report", str(path), "--plots", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\| two +\| maxvision +\| +2 \| 1\.5000 \| +66\.67 % \| +5\.00 \|", said), (
        said
    )
    drawn = (tmp_path / "run-course.svg").read_text()
    assert "one" in drawn and "accuracy" in drawn and "maxvision" in drawn


class Logits(torch.nn.Module):
    """Gives what a model of transformers does."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.network(x))


def test_labels_of_an_axis_do_not_overlap() -> None:
    pytest.importorskip("matplotlib", reason="THE PLOTS' LABELS ARE NOT TESTED: no matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    records = report.read(RESULTS[0].with_name("2026-11-23-h200-sparse-bfloat16.json"))[1]
    figure = plots.gains(records)
    assert figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
            places = [*axis.get_majorticklocs(), *axis.get_minorticklocs()]
            low, high = sorted(axis.get_view_interval())
            boxes = [
                label.get_window_extent()
                for label, at in zip(labels, places, strict=True)
                if label.get_text() and low <= at <= high
            ]
            assert len(boxes) >= 3, axes.get_title()
            for i, box in enumerate(boxes):
                assert not any(map(box.overlaps, boxes[i + 1 :])), axes.get_title()


def test_the_plots_of_the_docs_are_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = RESULTS[0].parents[2] / "docs"
    text = "".join(path.read_text() for path in docs.glob("*.md"))
    shown = set(re.findall(r"\]\(plots/(.*?)\)", text))
    assert shown == {path.name for path in (docs / "plots").iterdir()}
    for path in RESULTS:
        if any(name.startswith(f"{path.stem}-") for name in shown):
            plots.draw(path.stem, report.read(path)[1], tmp_path)
    assert shown <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("content", [None, "", "[]", '{"records": []}', '{"environment": 3}'])
def test_a_broken_file_is_named(
    file: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    assert main(["report", str(file)]) == 2
    said = capsys.readouterr().err
    assert re.search(r"^error: .*new\.json is not a file that maxvision bench", said)


def test_plots_need_a_folder(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(file), "--plots", "nowhere"]) == 2
    assert "--plots nowhere: there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(0.25, "ms", "0.2500"), (41.917, "ms", "41.92"), (1234.5, "ms", "1,234"), (12.0, "", "12.0"),
     (0.155, "", "0.155"), (0, "", "0"), (None, "", "")],
)  # fmt: skip
def test_numbers(value: float | None, unit: str, said: str) -> None:
    assert tables.number(value, unit) == said
