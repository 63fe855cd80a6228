"""The notebooks run as they stand, and are stored without what a run leaves in them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from maxvision import torch_ops
from maxvision.bridge import parts
from tests.graphs.interpret import Interpreted

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAID = {
    "tour": [
        "resnet-cifar10 on cpu in float32",
        "98.28%  cat",
        "stage 3: (1, 4, 4, 160)",
        " ms a picture",
        "the same answer: True",
        "conv2d_shortcut(",
        "shortcut",
    ],
    "levels": [
        " threads",
        "turned over",
        "aten::copy_",
        "the same: True",
        "in steps",
        "aten::mul",
        "error: ",
        "maxvision",
    ],
}
"""What the cells of a notebook print, among other things."""


def cells(name: str, kind: str) -> list[str]:
    found = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@pytest.mark.parametrize("name", SAID)
def test_it_is_a_clean_notebook(name: str) -> None:
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert set(cell) == wanted and isinstance(cell["source"], list)


@pytest.mark.parametrize("name", SAID)
def test_its_links_lead_somewhere(name: str) -> None:
    text = "".join(cells(name, "markdown"))
    links = [each.partition(")")[0] for each in text.split("](")[1:]]
    assert links and all((EXAMPLES / link).exists() for link in links)


@pytest.mark.parametrize("name", SAID)
def test_its_cells_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, in the folder that Jupyter starts it in; other tests compile the same.

    The course's op of ours is interpreted: it would be compiled for this notebook alone.
    """
    if name == "levels" and not find_spec("triton"):
        pytest.skip("NOT RUN: the notebook levels.ipynb needs the package triton")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if name == "levels":
        monkeypatch.setattr(parts, "Executor", Interpreted)
        monkeypatch.setattr(Interpreted, "made", [], raising=False)
        for held in ("made", "ready"):
            monkeypatch.setattr(torch_ops.layer_norm, held, {})
    names: dict[str, object] = {"__name__": "__main__"}
    said = []
    for number, code in enumerate(cells(name, "code")):
        exec(compile(code, f"{name}.ipynb, cell {number}", "exec"), names)
        said.append(capsys.readouterr().out)
    for text, wanted in zip(said, SAID[name], strict=True):
        assert wanted in text
    assert not list(EXAMPLES.glob("**/.ipynb_checkpoints"))
