"""A family that no file of this project names: classified, pruned, packed, served and timed.

Everything runs in processes of its own, as a user's commands do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import third_family
from tests.serve.started import serving

ROOT = third_family.ROOT
CAT = ROOT / "examples" / "cat.jpg"
Maxvision = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> third_family.Installed:
    return third_family.install(tmp_path_factory.mktemp("third"))


@pytest.fixture(scope="module")
def maxvision(installed: third_family.Installed) -> Maxvision:
    """Runs a command where the family's package is installed; gives what it prints."""

    def run(*arguments: str | Path, known: bool = True) -> str:
        environment = third_family.environment(installed.site) if known else None
        command = [sys.executable, "-m", "maxvision", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def answer(installed: third_family.Installed, maxvision: Maxvision) -> dict[str, object]:
    """Says what the model says of a picture."""
    line = json.loads(maxvision(CAT, "--model", installed.model, "--device", "cpu", "--json"))
    assert line["predictions"][0]["label"] in third_family.LABELS
    return line["predictions"][0]  # type: ignore[no-any-return]


def test_it_is_packed_and_runs_where_nobody_knows_it(
    installed: third_family.Installed,
    maxvision: Maxvision,
    answer: dict[str, object],
    tmp_path: Path,
) -> None:
    packed = tmp_path / "packed"
    assert "convnet for cpu" in maxvision("compile", installed.model, "-o", packed)
    said = maxvision("inspect", packed, "--program", known=False)
    assert "(convnet, 10 classes)" in said and "epilogue=relu" in said
    line = json.loads(maxvision(CAT, "--model", packed, "--json", known=False))
    assert line["predictions"][0] == answer


def test_it_is_compiled_for_a_gpu(
    installed: third_family.Installed, maxvision: Maxvision, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    target = ["--target", "sm_90a", "--dtype", "bfloat16"]
    assert "for sm_90a, bfloat16" in maxvision("compile", installed.model, "-o", packed, *target)
    assert "sm_90a" in maxvision("inspect", packed, known=False)


def test_it_is_pruned(
    installed: third_family.Installed, maxvision: Maxvision, tmp_path: Path
) -> None:
    pruned = tmp_path / "pruned"
    said = maxvision("weights", "prune", installed.model, "--sparsity", "0.5", "-o", pruned)
    assert "weights of" in said and "50.0%" in said
    line = maxvision(CAT, "--model", pruned, "--device", "cpu", "--sparse", "never", "--json")
    assert json.loads(line)["predictions"]


def test_it_is_served(
    installed: third_family.Installed, answer: dict[str, object], tmp_path: Path
) -> None:
    argv = ["-m", "maxvision", "serve", "--model", str(installed.model), "--device", "cpu"]
    environment = third_family.environment(installed.site)
    with serving([*argv, "--port", "0", "--no-embeddings"], tmp_path / "log", **environment) as at:
        given = {"Content-Type": "image/jpeg"}
        said = at.client.post("/v1/classify", content=CAT.read_bytes(), headers=given).json()
        assert at.client.get("/v1/models").status_code == 200
    assert answer["label"] in json.dumps(said)


@pytest.mark.nightly  # by day bench times a family of ours
def test_it_is_timed(
    installed: third_family.Installed, maxvision: Maxvision, tmp_path: Path
) -> None:
    records = tmp_path / "times.json"
    maxvision(
        "bench", "models", "--models", installed.model, "--device", "cpu", "--batches", "1",
        "--seconds", "0.1", "--no-peers", "--no-energy", "--json", records,
    )  # fmt: skip
    (record,) = json.loads(records.read_text())["records"]
    assert record["engine"] == "maxvision" and record["passed"] and record["p50_ms"] > 0
