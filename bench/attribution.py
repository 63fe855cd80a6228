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

from maxvision.bench.layers import Layer, Named
from maxvision.graphs.elementwise import ELEMENTWISE, label
from maxvision.graphs.formats import PACKED

STEPS = 200_000
"""Tries before an assignment is given up."""
OURS = re.compile(
    r"(gemm|conv2d|depthwise|stem|attention|layernorm|layer_norm_grad|rms_norm|group_norm|reduce"
    r"|(concat_)?pointwise|foreach|pool|normalize|roll|squeeze_excite|token_linear|gather_rows"
    r"|row_moments|class_token|optimizer_step)_"
)
"""Begins of symbols that are no kernel of MAX's own."""
BYTES = "(uint8xint8|float8_e4m3fn)"
"""The factors of 8 bits that Hopper multiplies."""


def _gemm(epilogue: str, shape: str = "1x1") -> str:
    """Describes a GEMM's symbol; ``shape`` is products x sources, which only Hopper's names."""
    fused = f"_{shape}" if shape != "1x1" else "(_1x1)?"
    kernel = r"(gemm_[a-z]+(_\d[0-9a-z]*)?|depthwise(_lying)?(_\d[0-9a-z]*)+)"
    return rf"{kernel}_{epilogue}{fused}_(bfloat16|float16|float32)_\w+"


def _byte_gemm(epilogue: str, shape: str = "1x1", *, kinds: str = BYTES) -> str:
    """Describes the symbol of a GEMM of 8-bit numbers; ``shape`` is as in ``_gemm``."""
    fused = f"_{shape}" if shape != "1x1" else "(_1x1)?"
    return rf"gemm_[a-z]+_\d[0-9a-z]*_scale_{epilogue}{fused}_{kinds}_\w+"


def symbols(op: str, epilogue: str = "none", format: str = "") -> list[list[re.Pattern[str]]]:
    """Describes the kernels of an op: the symbols of one after another, in each way to run it.

    Args:
        op: As programs call it.
        epilogue: Of a product.
        format: Of a sparse filter.
    """
    op, epilogue = {"layer_norm": "layernorm"}.get(op, op), label(epilogue)
    ways = [[rf"{op}_\w+"]]
    if format:
        kernel = rf"{format}_\w+_" if format in PACKED else ""
        ways = [[rf"sparse_conv2d_{kernel}{epilogue}_(bfloat16|float16|float32)_\w+"]]
    elif op in ("conv2d", "linear", "matmul"):
        ways = [[_gemm(epilogue)]]
    elif op == "linear_moments":
        ways = [[_gemm("add_moments")]]
    elif op == "normed_linear":
        ways = [[_gemm(f"norm_{epilogue}")]]
    elif op in ("quantized_conv2d", "quantized_linear"):
        ways = [[_byte_gemm(epilogue)]]
    elif op == "quantized_qkv_linear":
        ways = [[_byte_gemm("none", "3x1")]]
    elif op == "quantized_conv2d_shortcut":
        ways = [[_byte_gemm(epilogue, "1x2")]]
    elif op == "quantized_conv2d_chain":
        ends = [("add", "none", "uint8xint8"), ("add_relu", "relu", "float8_e4m3fn")]
        ways = [[rf"conv2d_chain_hopper_\d+x\d+x\d[0-9a-z]*_{BYTES}_\w+"]]
        ways += [[_byte_gemm(each, kinds=kinds) for each in pair] for *pair, kinds in ends]
    elif op == "quantized_conv2d_shortcut_chain":
        ways = [[rf"conv2d_chain_hopper_\d+x\d+and\d[0-9a-z]*_{BYTES}_\w+"]]
        ways += [[_byte_gemm(each, "1x2"), _byte_gemm(each)] for each in ("none", "relu")]
    elif op == "token_linear":
        ways = [[rf"token_linear_\w+_{epilogue}_(bfloat16|float16)_\w+"]]
    elif op == "conv2d_shortcut":
        ways = [[_gemm("relu", "1x2")], [_gemm("none"), _gemm("add_relu")]]
    elif op == "conv2d_chain":
        ways = [[r"conv2d_chain_(?!hopper_\d+x\d+and)\w+"], [_gemm("add_relu"), _gemm("relu")]]
    elif op == "conv2d_shortcut_chain":
        ways = [[r"conv2d_chain_hopper_\d+x\d+and\w+_(bfloat16|float16)_\w+"]]
        ways += [[_gemm("relu", "1x2"), _gemm("relu")]]
        ways += [[_gemm("none"), _gemm("add_relu"), _gemm("relu")]]
    elif op == "stem_maxpool":
        ways = [[r"stem_maxpool_(?!conv2d)\w+"]]
    elif op == "stem_maxpool_conv2d":
        ways += [[r"stem_maxpool_(?!conv2d)\w+", _gemm("relu")]]
    elif op == "conv2d_mean":
        ways = [[_gemm(f"{epilogue}_mean")], [_gemm(epilogue), r"reduce_sum_\w+"]]
    elif op == "layernorm_mlp":
        ways += [[_gemm("norm_gelu"), _gemm("add")]]
    elif op == "qkv_linear":
        ways = [[_gemm("none", "3x1")], [_gemm("none")] * 3]
    elif op in ("log_softmax", "layernorm_first"):
        ways = [[r"(softmax|layernorm)_(?!mlp)\w+"]]
    elif op == "avg_pool2d":
        ways = [[r"reduce_sum_\w+"], [r"pool_mean_\w+"]]
    elif op == "max_pool2d":
        ways = [[r"pool_max_\w+"]]
    elif op == "max_pool2d_grad":
        ways = [[r"pool_place_\w+", r"max_pool2d_grad_\w+"]]
    elif op in ("sum", "mean", "amax", "amin"):
        ways = [[rf"reduce_{'sum' if op == 'mean' else op}_\w+"]]
    elif op == "reduce_results":  # the parts of many rows are reduced before
        ways = [[r"reduce_\w+_gives\w+"], [r"reduce_(?!\w+_gives)\w+", r"reduce_\w+_gives\w+"]]
    elif op == "attention":
        ways = [[r"attention_(?!grad|linear)\w+"]]
    elif op == "attention_linear":
        ways += [[r"attention_(?!grad|linear)\w+", _gemm("add_moments")]]
    elif op == "layer_norm_grad":
        ways = [[r"layer_norm_grad_(?!add)\w+", r"layer_norm_grad_add_\w+"]]
    elif op == "attention_grad":
        ways = [[rf"attention_grad_(plain_)?{side}_\w+" for side in ("queries", "keys")]]
    elif op == "conv2d_weight_grad":
        sums = r"conv2d_weight_grad_(?!add)\w+"
        ways = [[sums], [sums, r"conv2d_weight_grad_add_\w+"]]
    elif op == "group_norm":
        ways = [[r"group_norm_moments_\w+", rf"group_norm_{epilogue}_\w+"]]
    elif op in ELEMENTWISE:
        ways = [[r"pointwise_\w+"]]
    elif op == "concat":  # with an expression; without one it is no node that computes
        ways = [[r"concat_pointwise_\w+"]]
    return [[re.compile(symbol) for symbol in way] for way in ways]


class Recorded(NamedTuple):
    """What is known of a launch: its symbol, and its grid and block."""

    symbol: str
    shape: Hashable


def attribute(launches: Sequence[Recorded], nodes: Sequence[Named]) -> list[str] | None:
    """Finds each launch's node; MAX's own kernels (a copy, a slice) belong to none.

    Returns:
        A name a launch, empty for MAX's own; None if the launches are not those of the nodes.
    """
    ways = [
        symbols(node.layer.op, node.layer.epilogue, node.layer.setting("format", ""))
        for node in nodes
    ]
    known: dict[Layer, Sequence[Recorded]] = {}
    done: set[int] = set()
    # A choice after another: what else could be tried, the node taken and its launches, and
    # whether it settled the layer.
    stack: list[tuple[list[tuple[int | None, int]], int | None, int, bool]] = []
    place = 0

    def options() -> list[tuple[int | None, int]]:
        """Lists the nodes, with their numbers of launches, that the next launches may be of."""
        ready: dict[Layer, list[tuple[int | None, int]]] = {}
        for i, node in enumerate(nodes):
            if i in done or not node.after <= done or node.layer in ready:
                continue  # of layers that are alike the first will do
            for way in ways[i]:
                some = launches[place : place + len(way)]
                if (
                    len(some) == len(way)
                    and known.get(node.layer, some) == some
                    and all(p.fullmatch(x.symbol) for p, x in zip(way, some, strict=True))
                ):
                    ready.setdefault(node.layer, []).append((i, len(way)))
        found = [option for several in ready.values() for option in several]
        ours = OURS.match(launches[place].symbol)
        return [*([] if ours else [(None, 1)]), *reversed(found)]  # popped from the end

    left = options() if launches else []
    for _ in range(STEPS):
        if left:
            taken, count = left.pop()
            settles = taken is not None and nodes[taken].layer not in known
            if taken is not None:
                known.setdefault(nodes[taken].layer, launches[place : place + count])
                done.add(taken)
            stack.append((left, taken, count, settles))
            place += count
            if place < len(launches):
                left = options()
            elif len(done) == len(nodes):
                names = (["" if i is None else nodes[i].name] * n for _, i, n, _ in stack)
                return [name for several in names for name in several]
            else:
                left = []
        elif stack:
            left, taken, count, settles = stack.pop()
            place -= count
            if taken is not None:
                done.remove(taken)
                if settles:
                    del known[nodes[taken].layer]
        else:
            return None
    return None
