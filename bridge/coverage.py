"""What runs a program: which of its ops are our kernels, and which MAX's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from maxvision.graphs.layers import macs
from maxvision.graphs.lower import INTEGERS, MOVES, OTHERS
from maxvision.graphs.program import Node, Program


@dataclass(frozen=True)
class Coverage:
    """How a program is computed.

    Attributes:
        macs: Multiply-accumulates of an image; all of them are in our kernels.
        kernels: How often each of our ops comes.
        others: How often MAX's own kernels compute an op; those on integers are among them.
        moves: How often numbers are moved, and nothing computed.
        fused: How many ops of the plain program are part of another one.
    """

    macs: int
    kernels: Counter[str]
    others: Counter[str]
    moves: Counter[str]
    fused: int


def others_of(final: Program) -> list[Node]:
    """Lists the ops that MAX's own kernels compute of a program as it is rewritten for a device."""

    def of_integers(node: Node) -> bool:
        types = [final.types[name].dtype for name in node.inputs if name]
        return node.op in INTEGERS and not any("float" in each for each in types)

    run = (node for node in final.nodes if not node.at_load)
    return [node for node in run if node.op in OTHERS or of_integers(node)]


def coverage(plain: Program, final: Program) -> Coverage:
    """Reads it off a program, and the same as it is rewritten for a device."""

    def count(program: Program) -> Counter[str]:
        return Counter(node.op for node in program.nodes if not node.at_load)

    found = count(final)
    before = count(plain)
    computing = sum(n for op, n in before.items() if op not in MOVES)
    others = Counter(node.op for node in others_of(final))
    kernels = Counter({op: n for op, n in found.items() if op not in (*MOVES, *OTHERS)}) - others
    moves = Counter({op: n for op, n in found.items() if op in MOVES})
    left = sum(kernels.values()) + sum(others.values())
    return Coverage(macs(plain), kernels, others, moves, max(0, computing - left))
