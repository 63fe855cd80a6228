"""Our server, for bench serve: with a graph that was compiled elsewhere, or a model that is none.

python -m maxvision.bench.served GRAPH.mef --model DIR --dtype bfloat16 ...
python -m maxvision.bench.served nothing --model DIR ...
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from maxvision import weights
from maxvision.common.host import leave
from maxvision.runtime.classifier import Classifier
from maxvision.runtime.devices import DTYPES, find_device
from maxvision.runtime.preprocess import Preprocess

EDGE = 224
"""Of the pictures of the networks that are measured, px."""
RESAMPLE = f"resample-{EDGE}.mef"
"""What ``bench compile`` makes of ``runtime.nvjpeg.graph``, beside the networks' graphs."""


def load(source: str, graph: Path, dtype: str, device: str, **options: Any) -> Classifier:
    """Loads a model's weights and takes its graph from a file."""
    model = Classifier(
        weights.load(source), find_device(device), DTYPES[dtype], tf32=options["tf32"]
    )
    model.adopt(graph)
    resample = graph.with_name(RESAMPLE)
    model.choose_decoder(options["decode"], resample.read_bytes() if resample.is_file() else None)
    return model


class Nothing:
    """A model that costs nothing: it answers every picture with the same logits."""

    def __init__(self, source: str, **options: Any) -> None:
        known = weights.load(source)
        self.preprocess = Preprocess.from_config(known.preprocess)
        self.labels = known.labels
        self.logits = np.linspace(1, 0, len(known.labels), dtype=np.float32)

    def prepare(self, batch: int) -> None:
        """Has nothing to make ready."""

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Gives float32 [N, classes]: class 0 is the likeliest."""
        return np.broadcast_to(self.logits, (len(pixels), len(self.logits)))

    def features(self, pixels: np.ndarray) -> Any:
        """Raises: the server has no route for features then."""
        raise NotImplementedError


if __name__ == "__main__":
    from maxvision.bench import served  # by its name, which the model's process imports
    from maxvision.serve.options import parse
    from maxvision.serve.server import run

    graph, *argv = sys.argv[1:]
    made = (
        served.Nothing if graph == "nothing" else functools.partial(served.load, graph=Path(graph))
    )
    leave(run(parse([*argv, "--no-embeddings"]), load=made))
