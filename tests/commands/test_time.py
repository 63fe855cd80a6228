"""``maxvision time``: what it measures, prints and writes, and that it needs no torch.

The model is the bundled one, which other tests compile too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from maxvision.bench import latency
from maxvision.bench.timing import HostClock
from maxvision.commands.time import main

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"runs", "min_ms", "mean_ms", "p50_ms", "p90_ms", "p95_ms", "p99_ms", "max_ms"}


def test_it_needs_what_classifying_needs(tmp_path: Path) -> None:
    """It is run where neither torch nor transformers can be imported."""
    code = (
        "import sys\nsys.modules |= dict.fromkeys(('torch', 'transformers', 'matplotlib'))\n"
        "from maxvision.commands.time import main\n"
        "sys.exit(main(['resnet-cifar10', '--device=cpu', '--batch-size=1,3', '--iterations=4',"
        " '--warm-up=0', '--json', sys.argv[1]]))"
    )
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    facts, records = found["environment"], found["records"]
    assert (facts["model"], facts["device"], facts["dtype"]) == ("resnet-cifar10", "cpu", "float32")
    assert facts["image"] == [128, 128, 3] and {"weights", "load"} <= set(facts["ready_s"])
    assert [record["batch"] for record in records] == [1, 3]
    for record in records:
        for kind in "compute", "request":
            times = record[kind]
            assert set(times) == FIGURES and times["runs"] == 4
            ordered = [times[f"{name}_ms"] for name in ("min", "p50", "p90", "p95", "p99", "max")]
            assert ordered == sorted(ordered) and ordered[0] > 0
            assert times["min_ms"] <= times["mean_ms"] <= times["max_ms"]
        rate = 1e3 * record["batch"] / record["compute"]["p50_ms"]
        assert record["images_per_s"] == pytest.approx(rate, rel=1e-3)
        assert record["host_mb"] is None or record["host_mb"] > 50
        assert record["device_mb"] is None and "host_to_device" not in record
    for part in ("model ", "device ", "dtype ", "versions ", "ready ", "median", "p95", "images/s"):
        assert part in done.stdout
    assert len(re.findall(r"^\| [13] +\| (?:compute|request) ", done.stdout, re.M)) == 4


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Takes the place of a model; gives what it was asked for."""
    asked: dict[str, Any] = {}
    model = SimpleNamespace(
        name="m", device="gpu:1", dtype="float32", tf32=True, channels=3, seconds={"load": 0.5},
        preprocess=SimpleNamespace(height=2, width=4), sparse=SimpleNamespace(told="1 of 2 sparse"),
        in_bytes="53 layers, by wgmma", executor=lambda: None,
        place=SimpleNamespace(is_host=False),
    )  # fmt: skip

    def load(source: str, **options: Any) -> Any:
        asked.update(source=source, **options)
        return model

    monkeypatch.setattr(latency, "load", load)
    monkeypatch.setattr(latency, "find_device", lambda name: SimpleNamespace(is_host=name == "cpu"))
    monkeypatch.setattr(latency, "Maxvision", Engine)
    return asked


class Engine:
    """Takes the place of our engine on a GPU; counts what it is told to do."""

    made: ClassVar[list[Engine]] = []
    memory = 3_000_000

    def __init__(self, executor: Any, device: Any, host: list[np.ndarray]) -> None:
        self.clock = HostClock()
        self.shape = host[0].shape
        self.calls: list[str] = []
        self.closed = False
        Engine.made.append(self)

    def feed(self, turn: int) -> None:
        self.calls.append("feed")

    def upload(self, turn: int) -> None:
        self.calls.append("upload")

    def compute(self) -> None:
        assert self.calls[-1] == "feed", "every run has an input of its own"
        self.calls.append("compute")

    def download(self) -> None:
        self.calls.append("download")

    def answer(self, turn: int) -> None:
        self.calls.append("answer")

    def close(self) -> None:
        self.closed = True


def test_on_a_gpu_the_copies_are_timed_too(
    loaded: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["./m", "--batch-size", "2", "--iterations", "5", "--warm-up", "0", "--json", "-"]
    assert main([*argv, "--no-tf32", "--sparse", "never", "--passes=-stem"]) == 0
    loaded.pop("progress")
    assert loaded == {
        "source": "./m", "device": "auto", "dtype": "auto", "tf32": False, "sparse": "never",
        "batch_size": 2, "revision": None, "passes": "-stem",
    }  # fmt: skip
    out, err = capsys.readouterr()
    (record,) = json.loads(out)["records"]
    assert {"compute", "request", "host_to_device", "device_to_host"} <= set(record)
    assert record["device_mb"] == 3 and record["host_to_device"]["runs"] == 5
    assert "copy to device" in err and "float32 by TF32" in err and "1 of 2 sparse" in err
    assert "8 bits    53 layers, by wgmma" in err
    engine = Engine.made.pop()
    assert engine.shape == (2, 2, 4, 3) and engine.closed
    assert {name: engine.calls.count(name) for name in ("upload", "download", "answer")} == {
        "upload": 7, "download": 7, "answer": 7,  # of which the first of each chunk is not timed
    }  # fmt: skip


def test_several_sizes_leave_it_open_what_sparse_chooses_for(loaded: dict[str, Any]) -> None:
    assert main(["--batch-size", "1,2", "--duration", "0.01", "--warm-up", "0"]) == 0
    assert loaded["batch_size"] is None


def test_the_kernels_that_take_longest(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "_check_kernels", lambda _: None)
    monkeypatch.setattr(latency, "launches_of", lambda *_: [])
    rows = [("gemm", 3, 20.0), ("relu", 1, 2.0)]
    monkeypatch.setattr(latency, "by_kernel", lambda _: rows)
    assert main(["--kernels", "1", "--iterations", "1", "--warm-up", "0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\| gemm +\| +3 \| 20\.0 \|", out) and "relu" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--kernels", "3", "--device", "cpu"], "--kernels needs a GPU: MAX records no time"),
        (["--json", "none/such.json"], "none/such.json: its folder does not exist; choose another"),
        (["no-such-model", "--device", "cpu"], "no-such-model: there is no bundled model"),
        (["--batch-size", "0"], "--batch-size takes whole numbers of at least 1"),
        (["--duration", "1", "--iterations", "2"], "not allowed with argument"),
        (["--iter", "2"], "there is no option --iter; did you mean --iterations?"),
    ],
)
def test_mistakes(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(argv)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and said in capsys.readouterr().err


def test_kernels_need_torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "find_device", lambda name: SimpleNamespace(is_host=False))
    monkeypatch.setattr(latency.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(latency.DeviceError, match="--kernels needs a torch with CUDA"):
        latency._check_kernels(Namespace(kernels=3, device="auto"))
    latency._check_kernels(Namespace(kernels=None, device="auto"))
