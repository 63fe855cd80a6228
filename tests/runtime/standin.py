"""What decodes in nvImageCodec's place where there is no GPU: Pillow, into memory of the host."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial

import numpy as np
from max.driver import CPU
from max.graph import DeviceRef
from PIL import Image

from maxvision.runtime import classifier, executor, nvjpeg
from maxvision.runtime.jpeg import File
from maxvision.runtime.nvjpeg import Decoded, Decoder


class Pillow:
    """Decodes as nvImageCodec does: as stored; nothing of a file that ends too early.

    Attributes:
        calls: Files of each call.
        kept: What was decoded, by the number of the batch.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.kept: dict[int, list[np.ndarray]] = {}

    def open(self, file: File) -> File:
        return file

    def locate(self, image: Decoded | None) -> Decoded | None:
        return image

    def decode(self, files: Sequence[File], batch: int) -> list[Decoded | None]:
        self.calls.append(len(files))
        for old in self.kept.get(batch, []):
            old[:] = 99  # whoever still reads them is wrong
        kept = self.kept[batch] = []
        found: list[Decoded | None] = []
        for file in files:
            try:
                kept.append(np.array(Image.open(io.BytesIO(bytes(file))).convert("RGB")))
            except OSError:
                found.append(None)
                continue
            found.append(Decoded(kept[-1].ctypes.data, *kept[-1].shape[:2]))
        return found


def decoding(name: str, batch_size: int) -> classifier.Classifier:
    """Loads a model on the CPU that decodes as one on a GPU does, by ``Pillow``."""
    made = classifier.load(name, device="cpu", decode="cpu", batch_size=batch_size)
    edge = max(made.preprocess.height, made.preprocess.width)
    build = partial(nvjpeg.graph, DeviceRef.CPU(), edge)
    made.decoder = Decoder(CPU(), made.preprocess, executor.load(build, CPU()), Pillow())
    return made
