"""What a type checker knows of the Python API."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="THE TYPES OF THE API ARE NOT TESTED: pip install mypy")

ROOT = Path(__file__).resolve().parents[1]
SNIPPET = """\
from pathlib import Path
import numpy as np
from PIL import Image
from maxvision import load

model = load("resnet-cifar10", labels=["cat"])
names: list[str] = []
reveal_type(model)  # maxvision.runtime.classifier.Classifier
reveal_type(model.classify("cat.jpg"))  # list[Prediction]
reveal_type(model.classify(Path("cat.jpg"), top_k=3))  # list[Prediction]
reveal_type(model.classify(b"..."))  # list[Prediction]
reveal_type(model.classify(Image.new("L", (2, 2))))  # list[Prediction]
reveal_type(model.classify(np.zeros((2, 2), np.uint8)))  # list[Prediction]
reveal_type(model.classify(names))  # list[list[Prediction]]
reveal_type(model.classify(["cat.jpg", Path("dog.jpg"), b"..."]))  # list[list[Prediction]]
reveal_type(model.classify("cat.jpg")[0].label)  # str
model.classify(3)  # error: No overload variant
model.classify([3])  # error: List item 0 has incompatible type
model.classify("cat.jpg", topk=3)  # error: Unexpected keyword argument "topk"
"""


def test_mypy_knows_the_api(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context",
         "--config-file", ROOT / "pyproject.toml", tmp_path / "snippet.py"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        found = re.fullmatch(r".*?snippet\.py:(\d+): (.*)", line)
        assert found, done.stdout + done.stderr
        said.setdefault(int(found[1]), found[2])
    expected = {
        number: line.partition("  # ")[2]
        for number, line in enumerate(SNIPPET.splitlines(), 1)
        if "  # " in line
    }
    assert set(said) == set(expected), done.stdout
    for number, wanted in expected.items():
        got = said[number].replace("maxvision.runtime.predictions.", "")
        if not wanted.startswith("error"):
            wanted = f'note: Revealed type is "{wanted}"'
        assert got.startswith(wanted), f"{SNIPPET.splitlines()[number - 1]}: {got}"


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "maxvision/py.typed").is_file()  # PEP 561; tests/test_install.py finds it packed
