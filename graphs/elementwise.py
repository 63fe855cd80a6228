"""The ops that compute each number by itself: one row each, in torch's terms.

An expression writes several of them down as one, in postfix order: ``x0``, ``x1``, ... are values,
numbers are themselves, and an op takes what stands before it. ``x0 x1 add 0.0 6.0 clamp`` is
ReLU6(x0 + x1). ops/pointwise.mojo computes an expression in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxvision.common.errors import ArgumentError


@dataclass(frozen=True)
class Elementwise:
    """An op.

    Attributes:
        values: How many it takes; they broadcast as torch's do.
        settings: The attributes that follow them in an expression, with their defaults.
        truth: Whether it gives truth values.
    """

    values: int = 1
    settings: Mapping[str, float] | None = None
    truth: bool = False


ELEMENTWISE: dict[str, Elementwise] = {
    # activations
    "relu": Elementwise(),
    "gelu": Elementwise(),  # the exact one, by erf
    "gelu_tanh": Elementwise(),
    "gelu_grad": Elementwise(),  # the derivative of the exact one
    "silu": Elementwise(),
    "sigmoid": Elementwise(),
    "tanh": Elementwise(),
    "hardswish": Elementwise(),
    "hardsigmoid": Elementwise(),
    "mish": Elementwise(),
    "softplus": Elementwise(),
    "clamp": Elementwise(settings={"min": -math.inf, "max": math.inf}),  # ReLU6 and hardtanh too
    "leaky_relu": Elementwise(settings={"slope": 0.01}),
    "elu": Elementwise(settings={"alpha": 1.0}),
    "prelu": Elementwise(2),  # x and its slope
    # functions
    "exp": Elementwise(),
    "log": Elementwise(),
    "sqrt": Elementwise(),
    "rsqrt": Elementwise(),
    "reciprocal": Elementwise(),
    "neg": Elementwise(),
    "abs": Elementwise(),
    "erf": Elementwise(),
    "sin": Elementwise(),
    "cos": Elementwise(),
    "floor": Elementwise(),
    "round": Elementwise(),  # to nearest, ties to even
    "e4m3": Elementwise(),  # to floats of 8 bits, float8_e4m3fn, likewise; at most 448
    "fake_quantize": Elementwise(settings={"scale": 1.0, "low": -128.0, "high": 127.0}),
    # arithmetic
    "add": Elementwise(2),
    "sub": Elementwise(2),
    "mul": Elementwise(2),
    "div": Elementwise(2),
    "pow": Elementwise(2),
    "maximum": Elementwise(2),
    "minimum": Elementwise(2),
    # comparisons
    "eq": Elementwise(2, truth=True),
    "ne": Elementwise(2, truth=True),
    "lt": Elementwise(2, truth=True),
    "le": Elementwise(2, truth=True),
    "gt": Elementwise(2, truth=True),
    "ge": Elementwise(2, truth=True),
    "where": Elementwise(3),
}
"""The ops by name. Of two values the second may be a number, the attribute ``other``."""


def expression(op: str, attributes: Mapping[str, Any]) -> str:
    """Writes an op down as an expression of ``x0``, ``x1``, ..."""
    row = ELEMENTWISE[op]
    if op == "fake_quantize" and "to" in attributes:
        scale = float(attributes["scale"])
        return f"x0 {1 / scale!r} mul e4m3 {scale!r} mul"
    if op == "fake_quantize":
        scale, low, high = (float(attributes.get(n, v)) for n, v in (row.settings or {}).items())
        return f"x0 {1 / scale!r} mul round {low!r} {high!r} clamp {scale!r} mul"
    given = row.values - ("other" in attributes)
    tokens = [f"x{i}" for i in range(given)]
    if "other" in attributes:
        tokens.append(repr(float(attributes["other"])))
    settings = row.settings or {}
    tokens += [repr(float(attributes.get(name, value))) for name, value in settings.items()]
    return " ".join([*tokens, op])


JOINS = ("add", "mul")
"""How the epilogue of a product joins a residual."""
REDUCTIONS = ("sum", "mean", "amax", "amin")
"""Ops that leave one number of several; like expressions they compute in float32."""
BETWEEN = " ; "
"""What stands between the expressions that are reduced in one launch (ops/reduce)."""
MOST_TERMS = 3
"""How many these may be."""
MOST_RESULTS = 6
"""How many expressions of what is left, and of vectors, may follow them in the same launch."""
MOST_ENDS = 6
"""How many vectors these may have."""
MOST_VALUES = 8
"""How many values an expression of ops/pointwise.mojo or ops/reduce may have."""
MOST_PARTS = 8
"""How many values ops/concat.mojo puts together in one launch."""
MOST_VECTORS = 3
"""How many vectors an expression may have that it computes on the way."""


def most_members(values: int) -> int:
    """Counts the members that one launch of ops/foreach.mojo takes, each with some values.

    As many as its table has room for: an address of each tensor, and two numbers of 4 bytes.
    """
    return 4000 // (8 * (values + 2))


def values_of(expression: str) -> int:
    """Counts the values of an expression; checks it.

    Raises:
        ArgumentError: If a word is unknown, or an op lacks what it takes.
    """
    count = depth = 0
    for word in expression.split(" "):
        if word[:1] == "x" and word[1:].isdigit():
            count = max(count, int(word[1:]) + 1)
        elif word in ELEMENTWISE:
            takes = arity(word)
            if takes > depth:
                raise ArgumentError(f"pointwise: {word} of {expression!r} expects {takes} values")
            depth -= takes
        elif not _is_number(word):
            raise ArgumentError(f"pointwise: {expression!r} has {word!r}, which is no op")
        depth += 1
    if depth != 1:
        raise ArgumentError(f"pointwise: {expression!r} leaves {depth} results")
    return count


def activation(epilogue: str) -> str:
    """Gives an epilogue's op of one value, an expression without its ``x0``; "" if it has none.

    Epilogues are ``none``, ``add`` and ``mul``, which add a residual to the product and multiply it
    by one, and ops of one value with their settings before them: alone; behind ``add_``, of the
    sum; or behind ``mul_``, of the residual. So ``silu``, ``add_0.0 6.0 clamp``, ``mul_silu``.

    Raises:
        ArgumentError: If there is no such epilogue.
    """
    if epilogue in ("none", *JOINS):
        return ""
    found = epilogue.removeprefix(f"{joining(epilogue)}_")
    *numbers, op = found.split(" ")
    row = ELEMENTWISE.get(op)
    fits = row and row.values == 1 and len(numbers) == arity(op) - 1
    if not fits or not all(map(_is_number, numbers)):
        raise ArgumentError(
            f"epilogue must be none, add, mul, an op of one value such as relu or '0.0 6.0 clamp',"
            f" or that behind add_ or mul_, but is {epilogue!r}"
        )
    return found


def joining(epilogue: str) -> str:
    """Tells how an epilogue joins a residual: ``add``, ``mul``, or "" if it has none."""
    first = epilogue.split("_")[0]
    return first if first in JOINS else ""


def label(epilogue: str) -> str:
    """Names an epilogue without its settings, as kernels' symbols do: ``add_clamp``."""
    found, how = activation(epilogue).split(" ")[-1], joining(epilogue)
    return f"{how}_{found}" if how and found else found or epilogue


def arity(op: str) -> int:
    """Counts what an op takes in an expression, its settings too."""
    row = ELEMENTWISE[op]
    return row.values + len(row.settings or {})


def is_truth(expression: str) -> bool:
    """Tells whether an expression gives truth values."""
    last = expression.split(" ")[-1]
    return last in ELEMENTWISE and ELEMENTWISE[last].truth


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
