"""Fills a model's weights from a checkpoint by declared rules, strictly.

Every key of the checkpoint matches exactly one `Rule` or `Ignore`, every weight of the model is
filled exactly once, and everything that is wrong is reported in one message.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from maxvision.common.errors import ModelError
from maxvision.weights.layout import Array, Shape, is_finite

LISTED = 8  # problems of one kind that a message shows before "and N more"


@dataclass(frozen=True)
class Rule:
    r"""Maps the checkpoint keys that match ``pattern`` to weights named by ``target``.

    A pattern is literal text (dots escaped) and plain groups such as ``(\d+)`` or ``(a|b)``, each
    used once in the target, so that `key` can read the rule backwards.

    Attributes:
        pattern: Regular expression for the whole key.
        target: The weight's name, with ``\1`` for the first group.
    """

    pattern: str
    target: str

    @cached_property
    def _forward(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    @cached_property
    def _ending(self) -> str:
        """The literal text behind the last group, which tells most keys apart at once."""
        return self.pattern.rpartition(")")[2].replace("\\", "")

    @cached_property
    def _backward(self) -> re.Pattern[str]:
        groups = re.findall(r"\([^()]*\)", self.pattern)
        return re.compile(
            "".join(
                f"(?P<group{piece}>{groups[int(piece) - 1][1:]}" if i % 2 else re.escape(piece)
                for i, piece in enumerate(self._pieces)
            )
        )

    @cached_property
    def _pieces(self) -> list[str]:
        """The target as literal, number, literal, number, ..., literal."""
        return re.split(r"\\(\d)", self.target)

    def weight(self, key: str) -> str | None:
        """Returns the weight that ``key`` holds, or None if this rule does not match it."""
        match = key.endswith(self._ending) and self._forward.fullmatch(key)
        if not match:
            return None
        pieces = enumerate(self._pieces)
        return "".join(match[int(piece)] if i % 2 else piece for i, piece in pieces)

    def key(self, weight: str) -> str | None:
        """Returns the key that holds ``weight``, or None if this rule does not fill it."""
        match = self._backward.fullmatch(weight)
        if match is None:
            return None
        numbers = iter(range(1, 10))
        key = re.sub(r"\([^()]*\)", lambda _: match[f"group{next(numbers)}"], self.pattern)
        return key.replace("\\", "")


@dataclass(frozen=True)
class Ignore:
    """Names the checkpoint keys that no weight needs, and why."""

    pattern: str
    why: str

    def matches(self, key: str) -> bool:
        """Returns whether this entry covers ``key``."""
        return re.fullmatch(self.pattern, key) is not None


Rules = Sequence[Rule | Ignore]


def key_for(rules: Rules, weight: str) -> str:
    """Returns the checkpoint key that ``rules`` read ``weight`` from (or its own name)."""
    keys = (rule.key(weight) for rule in rules if isinstance(rule, Rule))
    return next((key for key in keys if key is not None), weight)


def rename(rules: Rules, tensors: Iterable[str]) -> dict[str, str]:
    """Maps the keys that a rule matches to weight names; other keys are left out."""
    names = {}
    for key in tensors:
        for rule in rules:
            if isinstance(rule, Rule) and (weight := rule.weight(key)) is not None:
                names[key] = weight
    return names


def apply(
    rules: Rules,
    tensors: Mapping[str, Array],
    expected: Mapping[str, Shape],
    where: str,
    *,
    configured: bool = True,
) -> dict[str, Array]:
    """Fills every weight of ``expected`` (name to shape) from ``tensors``.

    Args:
        rules: The format's rules.
        tensors: The checkpoint's state dict.
        expected: Every weight to fill, with its shape.
        where: What the message starts with, such as the checkpoint's name.
        configured: Whether a config.json told what to expect, which may be what is wrong.

    Returns:
        The weights: tensors of ``tensors``.

    Raises:
        ModelError: Listing every missing, unexpected, misshapen, ambiguous and non-finite tensor.
    """
    filled: dict[str, Array] = {}
    source: dict[str, str] = {}
    unexpected: list[str] = []
    misshapen: list[str] = []
    ambiguous: list[str] = []
    not_finite: list[str] = []

    for key, stored in tensors.items():
        matches = [r for r in rules if (r.matches(key) if isinstance(r, Ignore) else r.weight(key))]
        if len(matches) > 1:
            ambiguous.append(f"{key!r} matches " + " and ".join(repr(r.pattern) for r in matches))
            continue
        rule = matches[0] if matches else None
        if isinstance(rule, Ignore):
            continue
        weight = rule.weight(key) if rule else None
        if rule is None or weight is None or weight not in expected:
            unexpected.append(key)
            continue
        if weight in source:
            ambiguous.append(f"{weight!r} is filled by {source[weight]!r} and {key!r}")
            continue
        source[weight] = key
        shape = expected[weight]
        if stored.shape != shape:
            misshapen.append(f"{key!r} expects {list(shape)} but is {list(stored.shape)}")
        elif not is_finite(stored):
            not_finite.append(repr(key))
        else:
            filled[weight] = stored

    missing = [key_for(rules, weight) for weight in expected if weight not in source]
    problems = [
        _listing("missing", [f"{key!r}{_near(key, unexpected)}" for key in missing]),
        _listing("unexpected", [f"{key!r}{_near(key, missing)}" for key in unexpected]),
        _listing("misshapen", misshapen),
        _listing("ambiguous", ambiguous),
        _listing("with NaN or infinity", not_finite),
    ]
    if any(problems):
        raise ModelError(
            f"{where}: the tensors are not those of this architecture, one for each weight:"
            f" {'; '.join(filter(None, problems))}; give a checkpoint of this architecture"
            + (", or correct its config.json" if configured else "")
        )
    return filled


def _near(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _listing(kind: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f", and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return f"{len(items)} {kind}: {', '.join(items[:LISTED])}{more}"
