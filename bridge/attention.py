"""Attention that stays whole while it is trained: an op of torch each way, no matrix of scores.

torch takes attention apart in another way on each device, and in training into products whose
scores it keeps; many models write these out themselves. ``attend`` calls a pair of ops in the place
of either, which graphs keep as they are: forward keeps the logarithm of the sum of each query's
exponentials, backward computes the scores again from it, a tile at a time (Dao 2023,
arXiv:2307.08691). Rules of bridge/gradients.py make them
``attention`` and ``attention_grad``; where torch has to run them, it computes what is below.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from maxvision.graphs.shapes import MOST_DEPTH

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends as torch's scaled_dot_product_attention, by ops that stay whole if they can."""
    rest: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (autocast(x, dtype) for x in (q, k, v))
        attn_mask = None if attn_mask is None else autocast(attn_mask, dtype)
    if not _stays(q, k, v, attn_mask, dropout_p, scale):
        y: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **rest)
        return y
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    y, _ = torch.ops.maxvision._attention_logsumexp(q, k, v, attn_mask, is_causal, factor)
    return y


def autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts floats, as autocast does."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _stays(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> bool:
    """Tells whether attention is trained as one op each way.

    It is not where something is dropped or the mask is trained, nor where heads share keys, or have
    other values than keys.
    """
    rank = q.ndim == k.ndim == v.ndim == 4
    fits = rank and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and k.shape == v.shape
    if not fits or not 1 <= q.shape[3] <= MOST_DEPTH or k.shape[2] < 1 or dropout:
        return False
    if (
        (scale is not None and scale < 0)
        or not q.dtype == k.dtype == v.dtype
        or q.dtype not in DTYPES
    ):
        return False
    if mask is not None and (mask.requires_grad or mask.ndim > 4):
        return False
    if mask is not None and mask.ndim == 4 and mask.shape[0] not in (1, q.shape[0]):
        return False
    return torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))


def whole(graph: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph of TorchDynamo, in which attention may stay whole."""
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    made.meta.update(graph.meta)
    op = F.scaled_dot_product_attention
    for node in made.graph.find_nodes(op="call_function", target=op):
        names = {"query": "q", "key": "k", "value": "v"}
        node.kwargs = {names.get(name, name): value for name, value in node.kwargs.items()}
        node.target = attend
    for node in [*made.graph.nodes]:
        if _calls(node, F.softmax, torch.softmax, "softmax"):
            _join(made.graph, node)
    made.recompile()
    return made


class _Product(NamedTuple):
    """A product of matrices [N, heads, ...] in a graph: of a and b, or of a and b turned."""

    a: fx.Node
    b: fx.Node
    turned: bool

    def second(self, graph: fx.Graph, *, turned: bool) -> fx.Node:
        """Gives b as it is multiplied, or turned."""
        if turned == self.turned:
            return self.b
        y = graph.call_method("transpose", (self.b, -2, -1))
        y.meta["example_value"] = _example(self.b).mT
        return y


def _join(graph: fx.Graph, softmax: fx.Node) -> None:
    """Puts ``attend`` in the place of two products that are written out around a softmax."""
    scores: Any = softmax.args[0]
    mask: Any = None
    scale: Any = 1.0
    if _calls(scores, operator.add, operator.iadd, torch.add, "add") and not scores.kwargs:
        scores, mask = scores.args
    if _calls(scores, operator.mul, operator.imul, torch.mul, "mul"):
        scores, scale = scores.args
    elif _calls(scores, operator.truediv, torch.div, "div") and not scores.kwargs:
        scores, number = scores.args
        scale = 1 / number if isinstance(number, (int, float)) and number else math.nan
    y: Any = _reader(softmax)
    while _calls(y, "to") or (_calls(y, F.dropout) and not _drops(y)):
        y = _reader(y)
    first, last = _product(scores), _product(y)
    if not (first and last) or _axis(softmax) not in (-1, 3):
        return
    if not isinstance(scale, (int, float)) or not (mask is None or isinstance(mask, fx.Node)):
        return
    with graph.inserting_before(y):
        given = [first.a, first.second(graph, turned=True), last.second(graph, turned=False)]
        q, k, v, held = (_example(each) for each in (*given, mask))
        known = all(isinstance(x, Tensor) for x in (q, k, v))
        if mask is not None:  # truth values count as 0 and 1 here, they hide nothing
            known &= isinstance(held, Tensor) and held.is_floating_point()
        if known and _stays(q, k, v, held, 0.0, scale):
            made = graph.call_function(attend, (*given, mask), {"scale": float(scale)})
            made.meta.update(y.meta)
            y.replace_all_uses_with(made)
            _forget(graph, y)


def _forget(graph: fx.Graph, node: fx.Node) -> None:
    """Erases a node that nothing reads any more, and so on; others may change what they take."""
    if node.op.startswith("call_") and not node.users:
        inputs = node.all_input_nodes
        graph.erase_node(node)
        for each in inputs:
            _forget(graph, each)


def _calls(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Tells whether a node calls one of some functions, or methods by name."""
    return isinstance(node, fx.Node) and node.op.startswith("call_") and node.target in targets


def _example(node: fx.Node | None) -> Any:
    return None if node is None else node.meta.get("example_value")


def _reader(node: fx.Node) -> fx.Node | None:
    """Gives the node that alone reads a value."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _axis(softmax: fx.Node) -> Any:
    return softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)


def _drops(dropout: fx.Node) -> bool:
    given = dict(zip(("input", "p", "training"), dropout.args, strict=False))
    given.update(dropout.kwargs)
    return bool(given.get("p", 0.5) and given.get("training", True))


def _product(node: fx.Node | None) -> _Product | None:
    """Reads a product of matrices: a matmul, or an einsum such as bhlk,bhtk->bhlt."""
    args: Any = () if node is None else node.args
    if _calls(node, torch.functional.einsum, torch.einsum):
        text, *given = args
        given = [*given[0]] if isinstance(given[0], (list, tuple)) else given
        axes = r"(\w)(\w)(\w)(\w),\1\2(\w)(\w)->\1\2\3(\w)"
        found = re.fullmatch(axes, str(text).replace(" ", ""))
        if found:
            joined, *second, last = found.groups()[3:]
            if {joined, last} == {*second} and joined != last:
                return _Product(given[0], given[1], turned=second[1] == joined)
        return None
    if not _calls(node, operator.matmul, torch.matmul, "matmul"):
        return None
    a, b = args[:2]
    return _Product(a, b, turned=False)


@torch.library.custom_op(
    "maxvision::_attention_logsumexp", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) "
    "-> (Tensor, Tensor)",
)  # fmt: skip
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends; gives the logarithms of the sums of exponentials [N, heads, T], too."""
    y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)
    return _by_tokens(y), _scores(q, k, mask, causal, scale).logsumexp(-1)


@torch.library.custom_op(
    "maxvision::_attention_logsumexp_backward", mutates_args=(),
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor logsumexp, Tensor? mask, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gives the gradients of q, k and v; none of a query that sees no key."""
    bound = logsumexp.unsqueeze(-1)
    seen = bound > -torch.inf
    p = torch.where(seen, (_scores(q, k, mask, causal, scale) - bound).exp(), 0.0)
    wide_dy, wide_y, wide_v = map(_wide, (dy, y, v))
    delta = torch.where(seen, (wide_dy * wide_y).sum(-1, keepdim=True), 0.0)
    ds = (p * (wide_dy @ wide_v.mT - delta) * scale).to(q.dtype)
    return _by_tokens(ds @ k), _by_tokens(ds.mT @ q), _by_tokens(p.to(q.dtype).mT @ dy)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Computes scores in float32, or float64; those that are hidden are minus infinity."""
    scores = _wide(q) @ _wide(k).mT * scale
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask
    if causal:
        scores = scores.masked_fill(
            ~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), -torch.inf
        )
    return scores


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_tokens(x: Tensor) -> Tensor:
    """Lays [N, heads, T, D] out as [N, T, heads, D], as linear layers have it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _like(x: Tensor) -> Tensor:
    n, heads, t, d = x.shape
    return x.new_empty(n, t, heads, d).transpose(1, 2)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), _wide(q.new_empty(q.shape[:-1]))


@_backward.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _differentiate(ctx: Any, dy: Tensor, _: Any) -> Any:
    q, k, v, mask, y, kept = ctx.saved_tensors
    op = torch.ops.maxvision._attention_logsumexp_backward
    return *op(dy, q, k, v, y, kept, mask, ctx.causal, ctx.scale), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
