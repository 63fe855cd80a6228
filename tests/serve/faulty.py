"""A server whose model fails when a picture's colour says so: ``python -m tests.serve.faulty``.

Every batch is written to the file ``FAULTY_LOG`` names, as a line of its pictures' colours.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from maxvision.common.errors import DeviceError
from maxvision.common.host import leave
from maxvision.runtime import classifier

RAISE, SLOW, EXIT, HANG, MEMORY, NAN, BREAK = ((1, 2, i) for i in range(3, 10))
SLOW_SECONDS = 0.5


class Faulty:
    """The bundled model, but for pictures of some colours."""

    def __init__(self, model: classifier.Classifier) -> None:
        self._model = model
        self._broken = False
        self.preprocess = model.preprocess

    def prepare(self, batch: int) -> None:
        self._model.prepare(batch)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        colours = [tuple(int(level) for level in picture[0, 0]) for picture in pixels]
        if "FAULTY_LOG" in os.environ:
            with open(os.environ["FAULTY_LOG"], "a") as file:
                print(*("/".join(map(str, colour)) for colour in colours), file=file)
        if SLOW in colours:
            time.sleep(SLOW_SECONDS)
        if RAISE in colours:
            raise RuntimeError(f"a fault in {__file__}")
        if EXIT in colours:
            os._exit(9)
        if HANG in colours:
            time.sleep(3600)
        self._broken = self._broken or BREAK in colours
        if self._broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        if MEMORY in colours and len(colours) > 2:
            raise ValueError("CUDA_ERROR_OUT_OF_MEMORY")
        logits = self._model(pixels)
        logits[[colour == NAN for colour in colours]] = np.nan
        return logits

    def features(self, pixels: np.ndarray) -> Any:
        return self._model.features(pixels)


def load(source: str, **options: Any) -> Faulty:
    if "FAULTY_START" in os.environ:
        raise DeviceError("the device is on holiday; wait")
    return Faulty(classifier.load(source, **options))


if __name__ == "__main__":
    from maxvision.serve.options import parse
    from maxvision.serve.server import run
    from tests.serve import faulty  # by its name, which the model's process imports

    leave(run(parse(sys.argv[1:]), load=faulty.load))
