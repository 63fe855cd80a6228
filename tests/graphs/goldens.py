"""What the bundled models say of the example pictures: ``python -m tests.graphs.goldens``.

The command runs transformers in float64 with its own preprocessing, and writes goldens.json: the
five largest logits of each picture, and the versions that made them. Run it when a bundled model
or an example changes; test_classifier.py compares.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers

from maxvision.weights import bundled
from tests.graphs import reference

FILE = Path(__file__).with_name("goldens.json")
EXAMPLES = reference.ROOT / "examples"
BUNDLED = reference.ROOT / "weights" / "bundled"


def digest(name: str) -> str:
    """Tells a bundled model's weights apart from others."""
    return hashlib.sha256((BUNDLED / name / "model.safetensors").read_bytes()).hexdigest()


def make(name: str) -> dict[str, Any]:
    """Runs a bundled model on the examples."""
    model = transformers.AutoModelForImageClassification.from_pretrained(BUNDLED / name).double()
    pictures = sorted(EXAMPLES.glob("*.jpg"))
    config = json.loads((BUNDLED / name / "preprocessor_config.json").read_text())
    logits = reference.run(model.eval(), reference.processed(pictures, config)).logits
    top = (-logits).argsort(1)[:, :5]
    return {
        "sha256": digest(name),
        "logits": {
            picture.name: {model.config.id2label[i]: round(row[i], 6) for i in best.tolist()}
            for picture, row, best in zip(pictures, logits, top, strict=True)
        },
    }


if __name__ == "__main__":
    versions = {p: version(p) for p in ("torch", "transformers", "pillow", "numpy")}
    made = {name: make(name) for name in bundled()}
    FILE.write_text(json.dumps({"made with": versions, "models": made}, indent=2) + "\n")
    print(f"{FILE}: {', '.join(made) or 'no bundled model'}")
