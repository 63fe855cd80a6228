"""A server whose model decodes JPEGs, by a decoder on the CPU: ``python -m tests.serve.decoding``.

The files of each batch are written to the file ``DECODED_LOG`` names, as a line with their number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from maxvision.common.host import leave
from maxvision.runtime import classifier, nvjpeg
from maxvision.runtime.jpeg import File
from maxvision.runtime.nvjpeg import Decoded
from tests.runtime.standin import Pillow


class Logged(Pillow):
    """Notes what it decodes."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def decode(self, files: Sequence[File], batch: int) -> list[Decoded | None]:
        with open(os.environ["DECODED_LOG"], "a") as file:
            print(len(files), file=file)
        return super().decode(files, batch)


def chosen(decode: str, *_: Any) -> bool:
    return decode in ("auto", "gpu")


nvjpeg.NvImageCodec = Logged  # type: ignore[assignment, misc]  # in the model's process, too
nvjpeg.chosen = chosen


def load(source: str, **options: Any) -> classifier.Classifier:
    return classifier.load(source, **options)


if __name__ == "__main__":
    from maxvision.serve.options import parse
    from maxvision.serve.server import run
    from tests.serve import decoding  # by its name, which the model's process imports

    leave(run(parse(sys.argv[1:]), load=decoding.load))
