"""What comes with the tensors: labels, and how an image is prepared.

Preprocessing is described by the dictionary of a Hugging Face ``preprocessor_config.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from maxvision.common.errors import ArgumentError, ModelError
from maxvision.weights.family import MEAN, STD, Format, Pictures

_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


def labels(head: str, config: Mapping[str, Any] | None, classes: int, where: str) -> list[str]:
    """Lists the name of each class in order; ``head`` is what has so many outputs.

    Names come from config.json; without any, ImageNet's for 1,000 classes, else "class 0", ....

    Raises:
        ModelError: If config.json names more or fewer classes than the classifier has.
    """
    key, names = _named(config or {}, where)
    if names is None:
        return imagenet() if classes == 1000 else [f"class {i}" for i in range(classes)]
    if len(names) != classes:
        raise ModelError(
            f"{where}: {key} in config.json has {len(names)} labels but"
            f" {head} has {classes} outputs; correct config.json"
        )
    return names


def read_labels(source: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """Reads the names of a model's classes, in order, that a user gives in place of the model's.

    Args:
        source: A text file with one label a line; a ``.json`` file with a list, with a dictionary
            such as ``{"0": "cat", "1": "dog"}``, or with such a dictionary as ``id2label``, as in
            a config.json; or the labels themselves.

    Raises:
        ArgumentError: If the file cannot be read or holds something else.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _texts(list(source), "labels")
    path = Path(source).expanduser()
    where = f"labels {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(
            f"{where}: the file cannot be read ({error.strerror}); check the path"
        ) from None
    except UnicodeDecodeError:
        raise ArgumentError(
            f"{where}: this is not a text file; give one with a label on each line, or a .json file"
        ) from None
    if not text.strip():
        raise ArgumentError(f"{where}: the file is empty; write a label on each line")
    if path.suffix.lower() != ".json":
        return _texts([line.strip() for line in text.rstrip().split("\n")], where)
    try:
        given = json.loads(text)
        given = given.get("id2label", given) if isinstance(given, dict) else given
        if isinstance(given, dict):
            by_class = {int(number): name for number, name in given.items()}
            given = [by_class[i] for i in range(len(by_class))]
    except (ValueError, KeyError, RecursionError):
        given = None
    if not isinstance(given, list):
        raise ArgumentError(
            f'{where}: the file must hold a JSON list of labels, or {{"0": "cat", "1": "dog"}} with'
            " every class from 0 on"
        )
    return _texts(given, where)


def match_labels(given: list[str], labels: list[str], name: str) -> list[str]:
    """Gives the labels that take the place of a model's.

    Raises:
        ArgumentError: If they are more or fewer than the model's.
    """
    if len(given) != len(labels):
        raise ArgumentError(
            f"labels: there are {len(given):,} but {name} has {len(labels):,} classes; give one"
            " label for each class, in their order"
        )
    return given


def _texts(labels: list[Any], where: str) -> list[str]:
    for number, label in enumerate(labels):
        if not isinstance(label, str) or not label:
            raise ArgumentError(
                f"{where}: the label of class {number} is {label!r}; give every class a name"
            )
    return labels


def _named(config: Mapping[str, Any], where: str) -> tuple[str, list[str] | None]:
    """Returns where config.json keeps the labels, and the labels."""
    if config.get("id2label") is not None:
        return "id2label", _ordered("id2label", config["id2label"], where)
    names = config.get("label_names")  # timm's
    if names is None:
        return "", None
    described = config.get("label_descriptions") or {}
    return "label_names", [
        str(described.get(name, name)) for name in _ordered("label_names", names, where)
    ]


def _ordered(key: str, names: Any, where: str) -> list[str]:
    if isinstance(names, list):
        return [str(name) for name in names]
    try:
        by_class = {int(number): str(name) for number, name in names.items()}
        return [by_class[i] for i in range(len(by_class))]
    except (AttributeError, ValueError, KeyError):
        raise ModelError(
            f"{where}: {key} in config.json must name the classes 0, 1, 2, ... without a gap;"
            " correct config.json"
        ) from None


@cache
def _imagenet() -> tuple[str, ...]:
    text = Path(__file__).with_name("imagenet.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def imagenet() -> list[str]:
    """Lists the 1,000 classes of ImageNet-1k in their usual order."""
    return list(_imagenet())


def preprocess(
    found: Format,
    spec: Any,
    given: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    where: str,
) -> dict[str, Any]:
    """Describes how an image is prepared for the network of a spec.

    That is ``given`` (a preprocessor_config.json) if there is one; timm's ``pretrained_cfg``,
    translated; or what the format says, by default ImageNet's mean and deviation, 224 px cut from
    256 px.
    """
    if given is not None:
        return dict(given)
    if config is not None and not found.has_config:
        return _timm(config.get("pretrained_cfg") or config, where)
    return _square(found.pictures(spec))


def size(preprocess: Mapping[str, Any]) -> tuple[int, int]:
    """Gives the height and width of the images that come of a description, px; 224 if it is bad."""
    for key in ("crop_size", "size"):
        given = preprocess.get(key)
        edges = given if isinstance(given, Mapping) else {"shortest_edge": given}
        height = edges.get("height", edges.get("shortest_edge"))
        width = edges.get("width", height)
        if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
            return height, width
    return 224, 224


def _square(pictures: Pictures) -> dict[str, Any]:
    edges = pictures.edge, pictures.edge
    return cropped(edges, pictures.resized, pictures.resample, pictures.mean, pictures.std)


def cropped(
    size: tuple[int, int],
    resized: int,
    resample: str,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> dict[str, Any]:
    """Describes that a picture is resized, cut out of the middle, and normalised.

    Args:
        size: Height and width that are cut out, px.
        resized: Shorter side before that, px.
        resample: ``nearest``, ``lanczos``, ``bilinear``, ``bicubic``, ``box`` or ``hamming``.
        mean: Of each channel, 1 is white; so is std.
        std: See ``mean``.
    """
    height, width = size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": resized},
        "resample": _RESAMPLE[resample],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def _timm(cfg: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translates timm's ``pretrained_cfg``.

    Raises:
        ModelError: If it asks for anything but a square cut out of the middle.
    """
    try:
        _, height, width = cfg.get("input_size", (3, 224, 224))
        interpolation, mode = cfg.get("interpolation", "bilinear"), cfg.get("crop_mode", "center")
        if height != width or mode not in ("center", None) or interpolation not in _RESAMPLE:
            raise ValueError(f"a {mode} crop of {height}x{width} px, {interpolation}")
        levels = {name: tuple(cfg[name]) for name in ("mean", "std") if name in cfg}
        resized = int(width / cfg.get("crop_pct", 0.875))
        described = _square(Pictures(width, resized, interpolation, **levels))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"{where}: 'pretrained_cfg' in config.json asks for {error}, and only a square center"
            " crop is supported; add a preprocessor_config.json"
        ) from None
    return described
