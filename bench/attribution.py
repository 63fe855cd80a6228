"""Which node of a graph a recorded kernel was launched for.

MAX launches the nodes of a graph in an order of its own, in which a node comes after those that it
reads from, and a profiler tells no more than a kernel's symbol and grid. Ours carry op and epilogue
in their symbols (``@__name``), nodes of one layer launch the same kernel on the same grid, and that
leaves one assignment, up to layers that are alike in all of it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from bench.layers import Layer, Node

STEPS = 200_000
"""Tries before an assignment is given up."""
_GEMM = r"(gemm_[a-z]+(_\d[0-9a-z]*)?|depthwise)_{epilogue}_(bfloat16|float16|float32)_\w+"
_ELEMENTWISE = r"mogg_for_?each_\w+"
SYMBOLS = {
    "conv2d": _GEMM,
    "conv2d_add": _GEMM,
    "bmm": _GEMM,
    "bmm_add": _GEMM,
    "sparse_conv2d": r"sparse_conv2d_{epilogue}_(bfloat16|float16|float32)_\w+",
    "sparse_conv2d_add": r"sparse_conv2d_{epilogue}_(bfloat16|float16|float32)_\w+",
    "log_softmax": r"softmax_\w+",
    "avgpool": rf"avgpool_\w+|{_ELEMENTWISE}",
    **dict.fromkeys(("relu", "gelu", "normalize", "class_token", "maxpool"), _ELEMENTWISE),
}
"""The symbols of an op's kernels; of the others they begin with its name."""


class Recorded(NamedTuple):
    """What is known of a launch: its symbol, and its grid and block."""

    symbol: str
    shape: Hashable


def symbols(layer: Layer) -> re.Pattern[str]:
    """Describes the symbols of a layer's kernel."""
    pattern = SYMBOLS.get(layer.op, rf"{layer.op}_\w+")
    return re.compile(pattern.replace("{epilogue}", dict(layer.parameters).get("epilogue", "")))


def attribute(launches: Sequence[Recorded], nodes: Sequence[Node]) -> list[str] | None:
    """Finds each launch's node; MAX's own kernels (a copy, a slice) belong to none.

    Returns:
        A name a launch, empty for MAX's own; None if the launches are not those of the nodes.
    """
    patterns = [symbols(node.layer) for node in nodes]
    takes = {
        symbol: [i for i, pattern in enumerate(patterns) if pattern.fullmatch(symbol)]
        for symbol in {launch.symbol for launch in launches}
    }
    known: dict[Layer, Recorded] = {}
    done: set[int] = set()
    # A choice a launch: what is left to try, what was taken, and the layer that it settled.
    stack: list[tuple[list[int | None], int | None, Layer | None]] = []

    def options(launch: Recorded) -> list[int | None]:
        ready: dict[Layer, int] = {}  # of layers that are alike the first will do
        for i in takes[launch.symbol]:
            layer = nodes[i].layer
            if i not in done and nodes[i].after <= done and known.get(layer, launch) == launch:
                ready.setdefault(layer, i)
        foreign = not takes[launch.symbol] or re.match(_ELEMENTWISE, launch.symbol)
        return [*([None] if foreign else []), *reversed(ready.values())]  # popped from the end

    left = options(launches[0]) if launches else []
    for _ in range(STEPS):
        if left and len(stack) < len(launches):
            taken = left.pop()
            settled = None
            if taken is not None:
                layer = nodes[taken].layer
                settled = None if layer in known else layer
                known[layer] = launches[len(stack)]
                done.add(taken)
            stack.append((left, taken, settled))
            if len(stack) == len(launches):
                if len(done) == len(nodes):
                    return ["" if i is None else nodes[i].name for _, i, _ in stack]
                left = []
            else:
                left = options(launches[len(stack)])
        else:
            if not stack:
                return None
            left, taken, settled = stack.pop()
            if taken is not None:
                done.remove(taken)
            if settled is not None:
                del known[settled]
    return None
