"""Top-1 accuracy of a model: ``python -m maxvision.bench.accuracy MODEL --data test.npz``.

The data is an npz of encoded pictures: ``jpeg`` (all bytes, one after the other), ``offset``
[count + 1], ``label`` [count] and ``names`` [classes]. The bundled models' cards quote what this
prints for the 10,000 test pictures of CIFAR-10.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import track

from maxvision.common.arguments import SPARSE
from maxvision.common.errors import ArgumentError, ImageError, UserError
from maxvision.runtime.classifier import Classifier, load
from maxvision.runtime.preprocess import load_batch


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="as for run_graph.py")
    parser.add_argument("--data", type=Path, required=True, metavar="NPZ")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sparse", default="auto", choices=SPARSE)
    options = parser.parse_args()
    how = {key: getattr(options, key) for key in ("device", "dtype", "sparse")}
    try:
        check(options.data)
        model = load(options.model, **how)
        right = [each for batch in correct(model, options.data, progress=True) for each in batch]
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print(
        f"{model.name} on {model.device}, {model.dtype}: top-1 {np.mean(right):.4f}"
        f" ({sum(right)} of {len(right)})"
    )


def correct(
    model: Classifier, data: Path, count: int | None = None, *, progress: bool = False
) -> Iterator[list[bool]]:
    """Classifies the first ``count`` pictures of ``data``; tells batch by batch which were right.

    ``check`` tells beforehand whether ``data`` is such a file.

    Raises:
        ArgumentError: If the model lacks one of the classes.
        ImageError: If a picture cannot be read.
    """
    stored = np.load(data)
    blob, offsets, labels = stored["jpeg"], stored["offset"], stored["label"]
    names = [str(name) for name in stored["names"]]
    if unknown := [name for name in names if name not in model.labels]:
        raise ArgumentError(
            f"{data}: {model.name} has no class {unknown[0]!r}; use the data that the model was"
            " trained for"
        )
    ids = [model.labels.index(name) for name in names]
    starts = range(0, count or len(labels), 64)
    for start in track(starts, "classifying", disable=not progress, transient=True):
        several = range(start, min(start + 64, count or len(labels)))
        pixels = []
        pictures = [blob[offsets[i] : offsets[i + 1]].tobytes() for i in several]
        for picture in load_batch(pictures, model.preprocess):
            if isinstance(picture, ImageError):
                raise picture
            pixels.append(picture)
        found = model(np.stack(pixels)).argmax(axis=1)
        yield [bool(answer == ids[labels[i]]) for i, answer in zip(several, found, strict=True)]


def check(data: Path) -> None:
    """Finds out whether ``data`` holds pictures.

    Raises:
        ArgumentError: If it is no npz file, or one without what ``correct`` needs.
    """
    try:
        with np.load(data) as stored:
            found = set(stored.files)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError):
        found = set()
    if not {"jpeg", "offset", "label", "names"} <= found:
        raise ArgumentError(
            f"{data} is not an npz file with the arrays jpeg, offset, label and names"
        )


if __name__ == "__main__":
    main()
