"""Tells the checkpoint formats apart, and finds a network's shape.

A Hugging Face checkpoint has a config.json that decides. The others have only tensors, whose shapes
the family reads (weights/families).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxvision.common.errors import ModelError
from maxvision.weights.family import Family, Format, find, formats, names
from maxvision.weights.layout import Array
from maxvision.weights.rules import rename

# What timm's config.json may say without another network.
_HARMLESS = {"num_classes", "in_chans", "drop_rate", "drop_path_rate", "drop_block_rate"}
_PLAIN = {"global_pool": "avg", "output_stride": 32}


def recognise(
    tensors: Mapping[str, Array], config: Mapping[str, Any] | None, where: str
) -> tuple[Family, Format]:
    """Tells the family and format of a checkpoint, by config.json or else by its tensors' names.

    Raises:
        ModelError: If it is in none, is a relative that does not run here, or has no classifier.
    """
    family, form = _by_names(tensors, where) if config is None else _by_config(config, where)
    if form.unlike:
        other = form.unlike({key: tensor.shape for key, tensor in tensors.items()})
        if other:
            raise ModelError(f"{where}: {other} here; use another checkpoint")
    heads = [form.key("head.weight"), form.key("head.bias")]
    if not any(key in tensors for key in heads):
        raise ModelError(
            f"{where}: there is no classifier, {heads[0]!r} (a backbone without a head?); use a"
            " checkpoint for image classification"
        )
    return family, form


def _by_config(config: Mapping[str, Any], where: str) -> tuple[Family, Format]:
    named, architecture = config.get("model_type"), config.get("architecture")
    family = find(named) if isinstance(named, str) else None
    if family:
        return family, family.formats[0]
    if named is None and architecture is not None:
        timm = {name: (family, form) for family, form in formats() for name in form.timm}
        if architecture not in timm:
            raise ModelError(
                f"{where}: config.json has timm's architecture {architecture!r}, but of timm's only"
                f" {', '.join(timm)} run here; use one of them"
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
                f"{where}: config.json changes {', '.join(changed)} of timm's {architecture}, which"
                " runs here only as it is; use a checkpoint without that"
            )
        return timm[architecture]
    given = "has no model_type" if named is None else f"has the model_type {named!r}"
    raise ModelError(
        f"{where}: config.json {given}, but the families that run here are {names()}; use a"
        " checkpoint of one of them"
    )


def _by_names(tensors: Mapping[str, Array], where: str) -> tuple[Family, Format]:
    """Takes the format that knows the most tensors; of equal ones one that needs no config.json."""
    shares = [(len(rename(form.rules, tensors)), not form.has_config) for _, form in formats()]
    best = max(shares)
    family, form = formats()[shares.index(best)]
    if not best[0]:
        given = ", ".join(repr(key) for key in list(tensors)[:3]) or "none at all"
        raise ModelError(
            f"{where}: this is not a checkpoint in one of the formats"
            f" {', '.join(form.title for _, form in formats())}: its tensors are {given}; the"
            f" families that run here are {names()}"
        )
    if form.has_config:
        raise ModelError(
            f"{where}: a {form.title} checkpoint needs a config.json beside it but there is none;"
            " put the model's config.json into the same folder"
        )
    return family, form


def specify(
    family: Family,
    form: Format,
    tensors: Mapping[str, Array],
    config: Mapping[str, Any] | None,
    where: str,
) -> Any:
    """Describes the network: from config.json where the format has one, else from the tensors.

    What the tensors leave open takes the default of the family, for the rules to report on.

    Raises:
        ModelError: If config.json asks for what the graphs do not compute.
    """
    heads = (tensors.get(form.key(f"head.{part}")) for part in ("weight", "bias"))
    classes = next((each.shape[0] for each in heads if each is not None and each.ndim), 1)
    try:
        if form.infer:
            renamed = rename(form.rules, tensors).items()
            shapes = {weight: tensors[key].shape for key, weight in renamed if tensors[key].ndim}
            return form.infer(shapes, classes)
        return family.read(dict(config or {}), classes)
    except ValueError as error:
        raise ModelError(f"{where}: {error}; use another checkpoint") from None
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        if form.infer:
            raise ModelError(
                f"{where}: the tensors do not have the shapes of a {form.title} ({error!r}); use"
                " another checkpoint"
            ) from None
        missing = isinstance(error, KeyError)
        wrong = f"has no {error}" if missing else f"has a value of another kind ({error})"
        raise ModelError(
            f"{where}: config.json does not describe a {family.name}: it {wrong}; repair it"
        ) from None
