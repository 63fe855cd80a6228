"""Tells the checkpoint formats apart, and finds a network's shape.

A Hugging Face checkpoint has a config.json that decides. The others have only tensors, whose shapes
the family reads (weights/families).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxvision.common.errors import ModelError
from maxvision.weights.family import Format, formats, known, names
from maxvision.weights.layout import Array
from maxvision.weights.rules import rename

# What timm's config.json may say without another network.
_HARMLESS = {"num_classes", "in_chans", "drop_rate", "drop_path_rate", "drop_block_rate"}
_PLAIN = {"global_pool": "avg", "output_stride": 32}


def recognise(tensors: Mapping[str, Array], config: Mapping[str, Any] | None, where: str) -> Format:
    """Tells which format a checkpoint is in, by its config.json or else by its tensors' names.

    Raises:
        ModelError: If it is in none, or has no classifier.
    """
    found = _by_names(tensors, where) if config is None else _by_config(config, where)
    heads = [found.key("head.weight"), found.key("head.bias")]
    if not any(key in tensors for key in heads):
        raise ModelError(
            f"{where}: expected a classifier, {heads[0]!r}, but has none (a backbone without a"
            " head?); use a checkpoint for image classification"
        )
    return found


def _by_config(config: Mapping[str, Any], where: str) -> Format:
    family, architecture = config.get("model_type"), config.get("architecture")
    if isinstance(family, str) and family in known():
        return known()[family].formats[0]
    if family is None and architecture is not None:
        timm = {name: form for form in formats() for name in form.timm}
        if architecture not in timm:
            raise ModelError(
                f"{where}: expected one of timm's plain ResNets ({', '.join(timm)}) but config.json"
                f" has the architecture {architecture!r}; use one of them"
            )
        given = config.get("model_args")
        arguments = given if isinstance(given, dict) else {}
        changed = sorted(
            key
            for key, value in {"global_pool": config.get("global_pool"), **arguments}.items()
            if key not in _HARMLESS and value not in (None, _PLAIN.get(key))
        )
        if changed:
            raise ModelError(
                f"{where}: expected timm's {architecture} as it is but config.json changes"
                f" {', '.join(changed)}; use a checkpoint without that"
            )
        return timm[architecture]
    raise ModelError(
        f"{where}: expected a model_type of {names()} in config.json but it has {family!r};"
        " no other family runs here"
    )


def _by_names(tensors: Mapping[str, Array], where: str) -> Format:
    shares = [(len(rename(form.rules, tensors)), form) for form in formats()]
    matched, found = max(shares, key=lambda share: share[0])
    if not matched:
        given = ", ".join(repr(key) for key in list(tensors)[:3]) or "none at all"
        raise ModelError(
            f"{where}: expected a checkpoint in one of the formats"
            f" {', '.join(form.title for form in formats())} but its tensors are {given}; the"
            f" families that run here are {names()}"
        )
    if found.has_config:
        raise ModelError(
            f"{where}: expected a config.json beside a {found.title} checkpoint but there is none;"
            " put the model's config.json into the same folder"
        )
    return found


def specify(
    found: Format, tensors: Mapping[str, Array], config: Mapping[str, Any] | None, where: str
) -> Any:
    """Describes the network: from config.json in Hugging Face's formats, else from the tensors.

    What the tensors leave open takes the default of the family, for the rules to report on.

    Raises:
        ModelError: If config.json asks for what the graphs do not compute.
    """
    shapes = {weight: tensors[key].shape for key, weight in rename(found.rules, tensors).items()}
    shapes = {weight: shape for weight, shape in shapes.items() if shape}
    head = shapes.get("head.weight") or shapes.get("head.bias") or (1,)
    try:
        if found.infer:
            return found.infer(shapes, head[0])
        return known()[found.family].read(dict(config or {}), head[0])
    except ValueError as error:
        raise ModelError(f"{where}: {error}; use another checkpoint") from None
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ModelError(
            f"{where}: expected the configuration of a {found.family} but config.json has a value"
            f" of another kind ({error}); repair config.json"
        ) from None
