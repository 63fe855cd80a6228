"""Quantises a model by pictures: chooses grids, finds the layers that hurt, and checks the result.

``maxvision quantize`` is its command. The rounding itself is graphs/quantize.py's, what is measured
runtime/calibrate.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from max.driver import CPU

from maxvision.common.arguments import meant
from maxvision.common.errors import ArgumentError, ImageError, ModelError
from maxvision.common.folder import new_folder
from maxvision.graphs.program import Program
from maxvision.graphs.quantize import CONFIG, KINDS, Quantization, places, quantized
from maxvision.runtime.calibrate import METHODS, compared, errors, ranges, watched
from maxvision.runtime.classifier import network, weights_of
from maxvision.runtime.collect import collect
from maxvision.runtime.executor import Executor
from maxvision.runtime.preprocess import Preprocess, load_batch
from maxvision.weights.checkpoint import Checkpoint, interpret
from maxvision.weights.convert import hugging_face_tensors, write
from maxvision.weights.source import Source

IMAGES = 128
"""Pictures that are read, unless it is said."""
AGREE = 0.98
"""Share of pictures whose first label has to stay, unless it is said."""
BATCH = 8
"""Pictures that run together."""
ROUNDS = 6
"""How often layers are taken out before it is given up."""
SHARE = 0.05
"""Share of the layers that are taken out at a time."""


@dataclass(frozen=True)
class LayerError:
    """What rounding a layer costs.

    Attributes:
        name: The layer's.
        error: The root mean square error of its result, over that of the result, where only its
            own input and weights are rounded.
        kept: Why it is not rounded: ``asked``, ``hurts``, or nothing if it is.
    """

    name: str
    error: float
    kept: str = ""


@dataclass(frozen=True)
class Report:
    """What became of a model.

    Attributes:
        layers: Each layer that may be rounded, in the network's order.
        images: How many pictures were read.
        agree: The share of them with the first label of the float32 network.
        cosine: The mean cosine of a picture's logits and those of the float32 network.
        logits: The root mean square error of the logits, over their standard deviation.
    """

    layers: tuple[LayerError, ...]
    images: int
    agree: float
    cosine: float
    logits: float


def quantize(
    found: Source,
    folder: Path,
    pictures: Sequence[str],
    *,
    dtype: str = "int8",
    method: str = "max",
    keep: Sequence[str] = (),
    agree: float = AGREE,
    images: int = IMAGES,
    pixels: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """Writes a model whose convolutions and linear layers are products of 8 bits.

    The folder is what ``weights convert`` writes, weights in float32; config.json says under
    ``maxvision_quantization`` what is rounded to what. Weights are rounded when the model loads.

    Args:
        found: The model.
        folder: Where to write; it appears when it is complete.
        pictures: Files and folders of pictures, like those that the model will see.
        dtype: Of the weights: ``int8``, or ``float8_e4m3fn``, in which Hopper alone computes.
        method: How the range of a value is chosen (``calibrate.METHODS``).
        keep: Layers to leave in float32, with * for any part.
        agree: The share of pictures whose first label has to stay; layers that hurt most are left
            in float32 until it does.
        images: How many pictures are read, spread evenly over all.
        pixels: Round the normalised pixels, too: a gain on a CPU, a loss on a GPU.
        force: Replace ``folder`` if it is there.
        progress: Called with a sentence before each step that takes time.

    Raises:
        ArgumentError: If an argument is wrong, there is no picture, or ``agree`` cannot be met.
        ModelError: If the model does not load, is quantised already, or classifies no pictures.
    """
    if method not in METHODS:
        raise ArgumentError(f"the method must be one of {', '.join(METHODS)} but is {method!r}")
    if dtype not in KINDS:
        raise ArgumentError(f"the dtype must be one of {', '.join(KINDS)} but is {dtype!r}")
    if pixels and dtype != "int8":
        raise ArgumentError("the layer that reads pixels runs in int8 only; leave out --pixels")
    if CONFIG in (found.config or {}):
        raise ModelError(f"{found.name} is quantised already; take the model that it was made of")
    checkpoint = interpret(found)
    with new_folder(folder, "the model", lambda _: force) as new:
        how, report = measured(
            checkpoint, pictures, method, keep, agree, images, progress, pixels=pixels, dtype=dtype
        )
        notes = {
            **how.to_config(),
            "of": found.name,
            "method": method,
            "images": report.images,
            "agreement": round(report.agree, 6),
            "cosine": round(report.cosine, 6),
        }
        write(new, found, checkpoint, hugging_face_tensors(found), {CONFIG: notes})
    return report


def measured(
    checkpoint: Checkpoint,
    pictures: Sequence[str],
    method: str,
    keep: Sequence[str],
    agree: float,
    images: int,
    progress: Callable[[str], None],
    *,
    pixels: bool = False,
    dtype: str = "int8",
) -> tuple[Quantization, Report]:
    """Chooses what is rounded; see ``quantize``."""
    program, tensors = network(checkpoint, checkpoint.size, "float32"), weights_of(checkpoint)
    values, layers = places(checkpoint.program(checkpoint.size).keep(["logits"]), pixels, dtype)
    if not layers:
        sizes = "4 channels" if dtype == "int8" else "16 channels and filters"
        raise ModelError(
            f"{checkpoint.name}: no layer can be quantised; it takes convolutions in one group and"
            f" linear layers, of a multiple of {sizes}"
        )
    asked = _matching(layers, keep)
    batches = _batches(checkpoint, pictures, images, progress)

    def compiled(what: str, program: Program) -> Executor:
        progress(f"compiling {what}")
        return Executor.compile(program, tensors, CPU())

    run = compiled("the network", watched(program, values))
    progress(f"running it on {sum(map(len, batches))} pictures")
    seen, plain = ranges(run, values, batches)
    grids = {name: each.grid(method, KINDS[dtype]) for name, each in seen.items()}
    whole = Quantization(grids, tuple(layers), dtype)
    twice, names = compared(program, whole)
    run = compiled("each layer twice, rounded and not", twice)
    progress("measuring what rounding each layer costs")
    cost = errors(run, names, batches)
    hurting: list[str] = []
    worst = sorted((each for each in names if each not in asked), key=lambda each: -cost[each])
    share = math.ceil(len(names) * SHARE)
    for turn in range(ROUNDS):
        how = whole.without([*asked, *hurting])
        if not how.layers:
            break
        run = compiled("the quantised network", quantized(program, how))
        progress("comparing the answers")
        logits = np.concatenate([run(batch)[0] for batch in batches])
        same, cosine, error = _compared(plain, logits)
        if same >= agree:
            rows = tuple(
                LayerError(
                    each,
                    cost.get(each, math.nan),
                    "asked" if each in asked else "hurts" if each in hurting else "",
                )
                for each in layers
            )
            return how, Report(rows, len(plain), same, cosine, error)
        hurting = worst[: (turn + 1) * share]
        progress(f"{same:.1%} of the labels stay: leaving {len(hurting)} layers in float32")
    raise ArgumentError(
        f"{checkpoint.name}: only {same:.1%} of the first labels stay, and {agree:.1%} are asked,"
        f" with {len(hurting)} layers in float32; try another --method, more pictures, or a lower"
        " --agree"
    )


def _compared(plain: np.ndarray, logits: np.ndarray) -> tuple[float, float, float]:
    """Compares logits [N, classes]: share of equal labels, mean cosine, relative error."""
    norms = np.linalg.norm(plain, axis=1) * np.linalg.norm(logits, axis=1)
    cosine = (plain * logits).sum(1) / np.maximum(norms, np.finfo(np.float32).tiny)
    spread = max(float(plain.std()), float(np.finfo(np.float32).tiny))
    error = float(np.sqrt(np.square(plain - logits).mean())) / spread
    return float((plain.argmax(1) == logits.argmax(1)).mean()), float(cosine.mean()), error


def _matching(layers: Sequence[str], patterns: Sequence[str]) -> list[str]:
    found = []
    for pattern in patterns:
        some = [each for each in layers if fnmatchcase(each, pattern)]
        if not some:
            raise ArgumentError(
                f"--keep: there is no layer {pattern!r} that would be quantised"
                f"{meant(pattern, layers)}"
            )
        found += some
    return list(dict.fromkeys(found))


def _batches(
    checkpoint: Checkpoint, pictures: Sequence[str], images: int, progress: Callable[[str], None]
) -> list[np.ndarray]:
    """Reads pictures, uint8 [N, H, W, C] each; those that cannot be read are left out."""
    sources = [item.source for item in collect(pictures)]
    step = max(1, len(sources) / max(1, images))
    some = [sources[int(i * step)] for i in range(min(images, len(sources)))]
    progress(f"reading {len(some)} pictures")
    prepare = Preprocess.from_config(checkpoint.preprocess)
    readable = [each for each in some if not isinstance(each, ImageError)]
    pixels = [each for each in load_batch(readable, prepare) if not isinstance(each, ImageError)]
    if not pixels:
        raise ArgumentError(
            f"--calibrate {' '.join(pictures)}: there is no picture that can be read; give a folder"
            " of pictures like those that the model will see"
        )
    return [np.stack(pixels[i : i + BATCH]) for i in range(0, len(pixels), BATCH)]
