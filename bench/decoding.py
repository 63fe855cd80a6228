"""What ``--decode fast`` changes: ``python -m maxvision.bench.decoding FOLDER``.

Each picture of a folder is classified as it is decoded exactly, and fast. With ``--times 2`` each
is first made twice as large in both directions (Lanczos, JPEG of quality 90), so that a folder of
small pictures says something of large ones.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from PIL import Image

from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.common.errors import ImageError, UserError
from maxvision.runtime.classifier import load
from maxvision.runtime.collect import collect
from maxvision.runtime.predictions import softmax
from maxvision.runtime.preprocess import Preprocess, read_image
from maxvision.serve import resample


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of JPEGs")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=1, metavar="N")
    options = parser.parse_args()
    try:
        model = load(options.model, device=options.device)
        exact, fast = model.preprocess, replace(model.preprocess, fast=True)
        files = [file for file in enlarged(options.folder, options.times) if scaled(file, fast)]
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    if not files:
        parser.exit(2, f"error: no picture is large enough, {fast.shortest} pixels; use --times\n")
    before, after = ([prepare(file, each) for file in files] for each in (exact, fast))
    scores = [[softmax(row) for row in model(np.stack(each))] for each in (before, after)]
    same = sum(a.argmax() == b.argmax() for a, b in zip(*scores, strict=True))
    moved = max(float(np.abs(a - b).max()) for a, b in zip(*scores, strict=True))
    apart = np.abs(np.stack(before).astype(int) - np.stack(after))
    taken = [1e3 * cpu(files, each) for each in (exact, fast)]
    print(
        f"{model.name}: {same} of {len(files)} labels are equal, scores move by at most"
        f" {moved:.3f}, levels by {apart.mean():.2f} on average and {apart.max()} at most;"
        f" {taken[0]:.2f} ms of CPU a picture became {taken[1]:.2f}"
    )


def enlarged(folder: str, times: int) -> Iterator[bytes]:
    """Reads the pictures of a folder, made larger."""
    for item in collect([folder]):
        if isinstance(item.source, ImageError):
            raise item.source
        picture = read_image(item.source)
        if times == 1:
            with open(str(item.source), "rb") as file:
                yield file.read()
            continue
        size = picture.width * times, picture.height * times
        made = io.BytesIO()
        picture.resize(size, Image.Resampling.LANCZOS).save(made, "JPEG", quality=90)
        yield made.getvalue()


def scaled(file: bytes, fast: Preprocess) -> bool:
    """Tells whether a picture is decoded at a fraction of its size."""
    return read_image(file, shortest=fast.shortest).size != read_image(file).size


def prepare(file: bytes, preprocess: Preprocess) -> np.ndarray:
    """Decodes as a server does."""
    return resample.prepare(preprocess, Image.open(io.BytesIO(file)))


def cpu(files: list[bytes], preprocess: Preprocess) -> float:
    """Returns the seconds of CPU time that a picture takes, the least of three rounds."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        for file in files:
            prepare(file, preprocess)
        taken.append((time.process_time() - begun) / len(files))
    return min(taken)


if __name__ == "__main__":
    main()
