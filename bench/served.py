"""Our server, for bench serve, with a graph that was compiled elsewhere.

python -m maxvision.bench.served GRAPH.mef --model DIR --dtype bfloat16 ...
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from maxvision import weights
from maxvision.common.host import leave
from maxvision.runtime.classifier import Classifier
from maxvision.runtime.devices import DTYPES, find_device


def load(source: str, graph: Path, dtype: str, device: str, **options: Any) -> Classifier:
    """Loads a model's weights and takes its graph from a file."""
    model = Classifier(
        weights.load(source), find_device(device), DTYPES[dtype], tf32=options["tf32"]
    )
    model.adopt(graph)
    return model


if __name__ == "__main__":
    from maxvision.bench import served  # by its name, which the model's process imports
    from maxvision.serve.options import parse
    from maxvision.serve.server import run

    options = parse([*sys.argv[2:], "--no-embeddings"])
    leave(run(options, load=functools.partial(served.load, graph=Path(sys.argv[1]))))
