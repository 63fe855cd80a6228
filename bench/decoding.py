"""Other ways to decode, beside Pillow's: ``python -m maxvision.bench.decoding FOLDER``.

Each picture of a folder is classified as it is decoded exactly, and in the other way: ``fast`` or
``gpu``. With ``--times 2`` each is first made twice as large in both directions (Lanczos, JPEG of
quality 90), so that a folder of small pictures says something of large ones.

``gpu`` is measured too: decoding alone, and the whole way from files to labels, as ``run_graph.py``
goes it, with as many pictures as ``--pictures`` says, of which there may be fewer files.
"""

from __future__ import annotations

import argparse
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from PIL import Image

from maxvision.bench import records
from maxvision.bench.environment import environment
from maxvision.common.arguments import DEFAULT_MODEL, whole
from maxvision.common.errors import ImageError, UserError
from maxvision.runtime import jpeg, resample
from maxvision.runtime.classifier import Classifier, load
from maxvision.runtime.collect import collect
from maxvision.runtime.jpeg import Jpeg, Picture
from maxvision.runtime.pipeline import (
    BATCHES,
    MANY,
    READERS,
    Find,
    Item,
    Pipeline,
    Times,
    start_readers,
)
from maxvision.runtime.predictions import softmax
from maxvision.runtime.preprocess import Preprocess, read_image
from maxvision.runtime.reading import Reader

COMPARED = 1000
"""Pictures that are compared at most, and classified with the CPU beside the GPU."""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of JPEGs")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--decode", choices=("fast", "gpu"), default="fast")
    parser.add_argument("--times", type=int, default=1, metavar="N")
    parser.add_argument("--pictures", type=whole(1, 10**7), default=20_000, metavar="N")
    parser.add_argument("--batch-size", type=whole(1, 4096), default=128, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, too")
    parser.add_argument("--make", type=whole(1, 10**7), metavar="N",
        help="only write N JPEGs of 500 x 375 into the folder, 47 kB each")  # fmt: skip
    options = parser.parse_args()
    if options.make:
        make(Path(options.folder), options.make)
        return
    try:
        if options.json:
            records.check_path(options.json)
        on_gpu = options.decode == "gpu"
        model = load(
            options.model,
            device=options.device,
            dtype=options.dtype,
            batch_size=options.batch_size if on_gpu else None,
            decode="gpu" if on_gpu else "cpu",
        )
        files = list(itertools.islice(enlarged(options.folder, options.times), COMPARED))
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    found = on_the_gpu(model, files, options) if on_gpu else fast(model, files, parser)
    if options.json:
        facts = environment() | {"model": model.name, "dtype": model.dtype, "device": model.device}
        records.write(options.json, facts, found)


def make(folder: Path, count: int) -> None:
    """Writes JPEGs, 64 different ones."""
    from maxvision.bench.serve import pictures

    folder.mkdir(parents=True, exist_ok=True)
    files = pictures(500, 375, min(count, 64))
    for i in range(count):
        (folder / f"{i:06}.jpg").write_bytes(files[i % len(files)])


def fast(
    model: Classifier, files: list[bytes], parser: argparse.ArgumentParser
) -> list[dict[str, Any]]:
    """Compares labels, scores and levels, and the CPU time of a picture."""
    exact, scaled_down = model.preprocess, replace(model.preprocess, fast=True)
    files = [file for file in files if scaled(file, scaled_down)]
    if not files:
        shortest = scaled_down.shortest
        parser.exit(2, f"error: no picture is large enough, {shortest} pixels; use --times\n")
    before, after = ([prepare(file, each) for file in files] for each in (exact, scaled_down))
    found = compared(model, before, after)
    taken = [1e3 * cpu(files, each) for each in (exact, scaled_down)]
    print(f"{taken[0]:.2f} ms of CPU a picture became {taken[1]:.2f}")
    return [{**found, "cpu_ms_exact": taken[0], "cpu_ms": taken[1]}]


def on_the_gpu(
    model: Classifier, files: list[bytes], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Compares labels, scores and levels, and measures pictures a second."""
    assert model.decoder is not None
    model.prepare(model.batch_size)
    pictures = [jpeg.read(file, model.preprocess) for file in files]
    taken = [i for i, picture in enumerate(pictures) if picture is not None]
    print(f"the GPU takes {len(taken)} of {len(files)} pictures")
    if not taken:
        return []
    some = [each for each in pictures if each is not None]
    found = [compared(model, [model.preprocess(files[i]) for i in taken], decoded(model, some))]
    for size in sorted({1, 8, 64, model.batch_size}):
        found.append(decoding_alone(model, some, size))
    items = [item for item in collect([options.folder]) if not isinstance(item.source, ImageError)]
    many = list(itertools.islice(itertools.cycle(items), options.pictures))
    found += [reading_alone(model, many, processes) for processes in (0, READERS)]
    found.append({"decode": "gpu", **from_files(model, many)})
    model.choose_decoder("cpu")
    found.append({"decode": "cpu", **from_files(model, many[:COMPARED])})
    return found


def decoded(model: Classifier, pictures: Sequence[Jpeg]) -> list[np.ndarray]:
    """Gives the pixels that the GPU makes of files."""
    assert model.decoder is not None
    made: list[np.ndarray] = []
    for start in range(0, len(pictures), model.batch_size):
        with model.decoder(pictures[start : start + model.batch_size]) as batch:
            assert not batch.refused, "the decoder refuses some"
            pixels = Buffer(DType.uint8, batch.shape, model.place)
            batch.write(pixels)
            made.extend(pixels.to(CPU()).to_numpy().copy())
    return made


def decoding_alone(
    model: Classifier, pictures: Sequence[Picture], size: int, seconds: float = 3.0
) -> dict[str, Any]:
    """Decodes and prepares batches of a size, without a network: from two threads, from one."""
    decoder = model.decoder
    assert decoder is not None
    batches = itertools.cycle(
        [list(itertools.islice(itertools.cycle(pictures), i, i + size)) for i in range(0, 64, 8)]
    )
    end = time.perf_counter() + seconds

    def run(_: int) -> int:
        pixels = Buffer(DType.uint8, (size, *decoder.shape), model.place)
        count = 0
        while time.perf_counter() < end:
            with decoder(next(batches)) as batch:
                batch.write(pixels)
            model.place.default_queue.record_event().synchronize()
            count += size
        return count

    begun = time.perf_counter()
    with ThreadPoolExecutor(BATCHES) as pool:
        rate = sum(pool.map(run, range(BATCHES))) / (time.perf_counter() - begun)
    end = time.perf_counter() + seconds / 3
    begun = time.perf_counter()
    count = run(0)
    ms = 1e3 * size * (time.perf_counter() - begun) / count
    print(f"decoding alone, {size} at a time: {rate:,.0f} pictures/s, {ms:.2f} ms", flush=True)
    return {"alone": size, "pictures_per_s": round(rate, 1), "ms": round(ms, 3)}


def reading_alone(model: Classifier, items: Sequence[Item], processes: int) -> dict[str, Any]:
    """Reads files and their headers, which nothing decodes, in processes; or here, if 0."""
    sources, size = [item.source for item in items], model.batch_size
    batches = [sources[at : at + size] for at in range(0, len(sources), size)]
    readers = [Reader() for _ in range(processes)]
    for each in readers:
        each.begin(model.preprocess, size, 2)
        each.wait()
    finds: Sequence[Find] = readers or [partial(jpeg.find_all, preprocess=model.preprocess)]

    def read(number: int) -> int:
        found = (finds[number](each) for each in batches[number :: len(finds)])
        return sum(each is not None for some in found for each in some)

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(finds)) as pool:
        rate = sum(pool.map(read, range(len(finds)))) / (time.perf_counter() - begun)
    for each in readers:
        each.close()
    print(f"reading alone, {processes} processes: {rate:,.0f} pictures/s", flush=True)
    return {"reading": processes, "pictures_per_s": round(rate, 1)}


def from_files(model: Classifier, items: Sequence[Item]) -> dict[str, Any]:
    """Goes from files to labels, as ``run_graph.py`` does.

    Processes that read are there already: that starts them before it loads the model.
    """
    times = Times()
    readers = start_readers() if model.decoder and len(items) >= MANY else []
    for each in readers:
        each.wait()
    begun = time.perf_counter()
    with Pipeline(model, len(items), readers=readers) as pipeline:
        batches = pipeline.answers(items, 5, times)
        wrong = sum(answer.error is not None for batch in batches for answer in batch)
    seconds = time.perf_counter() - begun
    rate = len(items) / seconds
    where = "the GPU" if model.decoder else "the CPU"
    print(
        f"{len(items):,} files to labels, decoded on {where}, {model.batch_size} at a time:"
        f" {rate:,.0f} pictures/s, {wrong} with an error; reading took"
        f" {1e3 * times.preprocessing / len(items):.2f} ms a picture, of a thread",
        flush=True,
    )
    return {"files": len(items), "pictures_per_s": round(rate, 1), "errors": wrong}


def compared(
    model: Classifier, before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Compares what a model says of pixels that were made in two ways."""

    def scores(pixels: Sequence[np.ndarray]) -> list[np.ndarray]:
        size = model.batch_size
        parts = [np.stack(pixels[at : at + size]) for at in range(0, len(pixels), size)]
        return [softmax(row) for part in parts for row in model(part)]

    rows = list(zip(scores(before), scores(after), strict=True))
    same = sum(a.argmax() == b.argmax() for a, b in rows)
    moved = max(float(np.abs(a - b).max()) for a, b in rows)
    apart = np.abs(np.stack(before).astype(int) - np.stack(after))
    beyond = float((apart > 1).mean())
    print(
        f"{model.name}: {same} of {len(before)} labels are equal, scores move by at most"
        f" {moved:.3f}, levels by {apart.mean():.2f} on average and {apart.max()} at most;"
        f" {100 * beyond:.2f} % of them by more than one",
        flush=True,
    )
    return {
        "pictures": len(before),
        "equal_labels": int(same),
        "largest_score_difference": moved,
        "mean_level_difference": float(apart.mean()),
        "largest_level_difference": int(apart.max()),
        "beyond_one_level": beyond,
    }


def enlarged(folder: str, times: int) -> Iterator[bytes]:
    """Reads the pictures of a folder, made larger."""
    for item in collect([folder]):
        if isinstance(item.source, ImageError):
            raise item.source
        if times == 1:
            with open(str(item.source), "rb") as file:
                yield file.read()
            continue
        picture = read_image(item.source)
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
