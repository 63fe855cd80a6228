"""The notebook runs as it stands, and is stored without what a run leaves in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CELLS = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_is_a_clean_notebook() -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        assert set(cell) == wanted and isinstance(cell["source"], list)


def test_its_links_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = [each.partition(")")[0] for each in text.split("](")[1:]]
    assert links and all((EXAMPLES / link).exists() for link in links)


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process, in the folder that Jupyter starts it in; other tests compile the same."""
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, object] = {"__name__": "__main__"}
    said = []
    for number, code in enumerate(CODE):
        exec(compile(code, f"tour.ipynb, cell {number}", "exec"), names)
        said.append(capsys.readouterr().out)
    for text, wanted in zip(
        said,
        [
            "resnet-cifar10 on cpu in float32",
            "98.28%  cat",
            "stage 3: (1, 4, 4, 160)",
            " ms a picture",
            "the same answer: True",
            "conv2d_shortcut(",
            "shortcut",
        ],
        strict=True,
    ):
        assert wanted in text
    assert not list(EXAMPLES.glob("**/.ipynb_checkpoints"))
