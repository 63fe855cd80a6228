"""Every rule of bridge/aten.py: a small module, traced, means the same as in torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxvision.bridge import aten
from maxvision.bridge.exported import TorchReference, trace
from maxvision.bridge.importer import Traced
from maxvision.graphs.program import Program
from tests.graphs.interpret import interpret

TRACED, RUN = 2, 5
"""The batch that a module is traced with, and the one that it is run with."""

IMAGE, LINE, TOKENS, ROWS = (6, 9, 8), (6, 10), (7, 8), (8,)
"""Shapes behind the batch."""


@dataclass(frozen=True)
class Case:
    """A module, or a function of tensors, and what it is given.

    Attributes:
        name: Of the case.
        module: Takes one tensor for each of ``shapes``.
        shapes: Of the inputs behind the batch.
        draw: Makes an input of its shape; normal numbers if left out.
    """

    name: str
    module: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor] | None = None

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(len(self.name))
        draw = self.draw or (lambda shape, random: torch.randn(shape, generator=random))
        return tuple(draw((batch, *shape), random) for shape in self.shapes)


class Function(nn.Module):
    """A function as a module; ``held`` are its tensors: parameters if they are floats."""

    def __init__(self, function: Callable[..., Any], **held: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in held.items():
            if tensor.is_floating_point():
                setattr(self, name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.names = list(held)

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given, *(getattr(self, name) for name in self.names))


def positive(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=random) * 3 + 0.1


def whole(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draws few different numbers, so that some are equal."""
    return torch.randint(-2, 3, shape, generator=random).float()


def ids(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randint(0, 11, shape, generator=random)


CASES: list[Case] = []


def case(
    name: str, module: nn.Module | Callable[..., Any], *shapes: tuple[int, ...],
    draw: Any = None, **held: Tensor,
) -> None:  # fmt: skip
    """Adds a case; images if no shapes are named. Its parameters and statistics are random."""
    made = module if isinstance(module, nn.Module) else Function(module, **held)
    random = torch.Generator().manual_seed(len(CASES))
    for key, value in made.state_dict().items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 2, generator=random)
        elif value.is_floating_point() and key not in held:
            value.normal_(0, 0.5, generator=random)
    assert name not in (each.name for each in CASES)
    CASES.append(Case(name, made.eval(), shapes or (IMAGE,), draw))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# --- elementwise -------------------------------------------------------------------------------

for activation in (
    nn.ReLU(), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.Mish(),
    nn.GELU(), nn.GELU("tanh"), nn.ReLU6(), nn.Hardtanh(-0.3, 0.7), nn.LeakyReLU(0.2), nn.ELU(0.7),
    nn.SELU(), nn.CELU(1.0), nn.Softplus(), nn.LogSigmoid(), nn.Softsign(), nn.Tanhshrink(),
    nn.PReLU(), nn.PReLU(6), nn.Hardshrink(), nn.Softshrink(), nn.Threshold(0.1, -2.0),
    nn.CELU(0.7), nn.Softplus(beta=2.0), nn.Softplus(beta=2.0, threshold=5.0),
):  # fmt: skip
    case(str(activation), activation)

for op in ("neg", "abs", "erf", "sin", "cos", "floor", "exp", "square", "sign", "expm1"):
    case(op, getattr(torch, op))
for op in ("log", "sqrt", "rsqrt", "reciprocal", "log2"):
    case(op, getattr(torch, op), draw=positive)

case("clamp", lambda x: x.clamp(-0.5, 0.5))
case("clamp from below", lambda x: x.clamp(min=-0.5))
case("clamp from above", lambda x: x.clamp(max=0.5))
case("clamp_min", lambda x: torch.clamp_min(x, 0.1))
case("clamp_max", lambda x: torch.clamp_max(x, 0.1))
case("clamp by tensors", lambda x, a, b: x.clamp(a, b), a=drawn(8) - 1, b=drawn(8) + 2)
case("prelu of rows", nn.PReLU(8), ROWS)

for op in ("add", "sub", "mul", "maximum", "minimum"):
    case(f"{op} of two", getattr(torch, op), IMAGE, IMAGE)
    case(f"{op} of a parameter", getattr(torch, op), a=drawn(6, 1, 1))
case("div of two", torch.div, IMAGE, IMAGE, draw=positive)
case("pow of two", torch.pow, IMAGE, IMAGE, draw=positive)
for op in ("eq", "ne", "lt", "le", "gt", "ge"):
    compare = getattr(torch, op)
    case(
        f"{op} of two",
        lambda a, b, f=compare: torch.where(f(a, b), a, -b),
        IMAGE,
        IMAGE,
        draw=whole,
    )
    case(f"{op} of a number", lambda x, f=compare: f(x, 1.0).float() * x, draw=whole)
    case(f"{op} of a scalar", lambda x, c, f=compare: f(c, x) * x, draw=whole, c=torch.tensor(1.0))
case("numbers on the right", lambda x: (x + 2) * 3 - 1.5)
case("numbers on the left", lambda x: 2 - (1 + 3 * x))
case("a number by a value", lambda x: 2 / x, draw=positive)
case("a value by a number", lambda x: x / 4)
case("powers", lambda x: x**2 + x**3 + x**0.5 + x**-1, draw=positive)
case("alpha", lambda a, b: torch.add(a, b, alpha=3) + torch.sub(a, b, alpha=0.5), IMAGE, IMAGE)
case("rsub with alpha", lambda x: torch.rsub(x, 2.0, alpha=3.0))
case("a scalar parameter", lambda x, s: s * x + s, s=torch.tensor(0.3))
case("a scalar parameter on the left", lambda x, s: s - x, s=torch.tensor(0.3))
case("nothing changes", lambda x: (x * 1 + 0) / 1 - 0 + F.dropout(x, 0.5, False))
case("where of numbers", lambda x: torch.where(x > 0, x, torch.tensor(-1.0)))
case("masked_fill", lambda x: x.masked_fill(x < 0, 0.25))
case("not", lambda x: torch.where(~(x > 0), x, x * 2))
case("and, or", lambda x: torch.where((x > 0) & (x < 1) | (x < -1), x, x * 2))
case("casts", lambda x: x.double().float() + x.to(torch.float16).float() * 0 + (x > 0).int() * x)
case("copies", lambda x: x.clone().contiguous().detach() + torch.zeros_like(x))
case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), IMAGE, IMAGE, IMAGE)
case("lerp", lambda x, a: torch.lerp(x, a, 0.3), IMAGE, IMAGE)


# --- layers ------------------------------------------------------------------------------------

case("conv2d", nn.Conv2d(6, 4, 3, 2, 1))
case("conv2d without bias", nn.Conv2d(6, 4, (1, 3), (2, 1), (0, 1), bias=False))
case("conv2d dilated, in groups", nn.Conv2d(6, 9, 3, padding=2, dilation=2, groups=3))
case("conv2d depthwise", nn.Conv2d(6, 6, 5, padding=2, groups=6))
case("conv2d same", nn.Conv2d(6, 4, 3, padding="same"))
case("conv2d same, uneven", nn.Conv2d(6, 4, (2, 4), padding="same", dilation=(1, 3)))
case("conv2d valid", nn.Conv2d(6, 4, 3, padding="valid"))
for mode in ("zeros", "reflect", "replicate", "circular"):
    case(f"conv2d padded by {mode}", nn.Conv2d(6, 4, 3, padding=(1, 2), padding_mode=mode))
case(
    "conv2d standardised",
    lambda x, w: F.conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) * 2),
    w=drawn(4, 6, 3, 3),
)
case("conv1d", nn.Conv1d(6, 4, 3, 2, 1, dilation=2), LINE)
case("conv1d in groups", nn.Conv1d(6, 6, 3, padding="same", groups=6, bias=False), LINE)
case("transposed", nn.ConvTranspose2d(6, 4, 2, 2))
case("transposed by 1", nn.ConvTranspose2d(6, 4, 3))
case(
    "transposed, all settings",
    nn.ConvTranspose2d(6, 4, 3, (2, 3), (2, 1), (1, 2), 2, dilation=(2, 3)),
)
case(
    "transposed, dilated",
    nn.ConvTranspose2d(6, 8, (3, 2), 2, (3, 0), groups=2, bias=False, dilation=3),
)
case("transposed line", nn.ConvTranspose1d(6, 4, 3, 2, 1, 1), LINE)

case("linear", nn.Linear(8, 5))
case("linear without bias", nn.Linear(8, 5, bias=False), ROWS)
case("linear of computed weights", lambda x, w: F.linear(x, F.normalize(w)), w=drawn(5, 8))
case("product with what is transposed", lambda x, y: x @ y.mT, TOKENS, (3, 8))
case("mm", torch.mm, ROWS, w=drawn(8, 5))
case("bilinear product", lambda x, w: x @ w, TOKENS, w=drawn(8, 5))
case("weights on the left", lambda x, w: w @ x, TOKENS, w=drawn(5, 7))
case("weights on the left of rows", lambda x, w: (w @ x.t()).t(), ROWS, w=drawn(5, 8))
case("stacked weights", lambda x, w: x.unsqueeze(1) @ w, TOKENS, w=drawn(3, 8, 5))
case("product of values", torch.matmul, (7, 8), (8, 5))
case("product of heads", torch.matmul, (2, 7, 8), (2, 8, 5))
case("product that broadcasts", lambda a, b: a @ b.unsqueeze(1), (2, 7, 8), (8, 5))
case(
    "product of flat heads",
    lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, (-1, 2)),
    (2, 7, 8),
    (2, 8, 5),
)
case("a row by a parameter", lambda x, w: x @ w, ROWS, w=drawn(8))
case("addmm", lambda x, b, w: torch.addmm(b, x, w), ROWS, b=drawn(5), w=drawn(8, 5))
case(
    "addmm, scaled",
    lambda x, b, w: torch.addmm(b, x, w, beta=0.5, alpha=2),
    ROWS,
    b=drawn(5),
    w=drawn(8, 5),
)
case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), (7, 5), (7, 8), (8, 5))
case(
    "baddbmm of no bias",
    lambda c, a, b: torch.baddbmm(c, a, b, beta=0, alpha=2),
    (7, 5),
    (7, 8),
    (8, 5),
)
case("einsum", lambda a, b: torch.einsum("nchw,nkc->nkhw", a, b), IMAGE, (3, 6))
case("einsum with weights", lambda x, w: torch.einsum("nchw,ck->nkhw", x, w), w=drawn(6, 4))

case("batch norm", nn.BatchNorm2d(6, eps=1e-3))
case("batch norm without weights", nn.BatchNorm2d(6, affine=False))
case("batch norm of a line", nn.BatchNorm1d(6), LINE)
case("batch norm of rows", nn.BatchNorm1d(8), ROWS)
case("layer norm", nn.LayerNorm(8, eps=1e-6))
case("layer norm without weights", nn.LayerNorm(8, elementwise_affine=False))
case("layer norm without bias", nn.LayerNorm(8, bias=False))
case("layer norm over axes", nn.LayerNorm((6, 9, 8)))
case(
    "layer norm of channels",
    lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (6,), w).permute(0, 3, 1, 2),
    w=drawn(6),
)
case("rms norm", nn.RMSNorm(8))
case("rms norm with eps", nn.RMSNorm(8, eps=1e-3, elementwise_affine=False))
case("rms norm over axes", nn.RMSNorm((9, 8)))
case("group norm", nn.GroupNorm(3, 6, eps=1e-3))
case("group norm of one group", nn.GroupNorm(1, 6, affine=False))
case("instance norm", nn.InstanceNorm2d(6, affine=True))
case("instance norm with statistics", nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
case("local response norm", nn.LocalResponseNorm(3))
case("normalize", lambda x: F.normalize(x, dim=1) + F.normalize(x, p=1, dim=-1))
case("normalize by the largest", lambda x: F.normalize(x, p=float("inf"), dim=-1))
case("weight norm", nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)))


# --- attention ---------------------------------------------------------------------------------

HEADS = ((2, 5, 4), (2, 7, 4), (2, 7, 3))
attend = F.scaled_dot_product_attention
case("attention", attend, *HEADS)
case("attention, scaled", lambda q, k, v: attend(q, k, v, scale=0.3), *HEADS)
case("attention, causal", lambda q, k, v: attend(q, k, v, is_causal=True), *HEADS)
case("attention of one head", attend, (5, 4), (7, 4), (7, 3))
case("attention of windows", attend, (3, 2, 5, 4), (3, 2, 7, 4), (3, 2, 7, 3))
case("attention with a bias", lambda q, k, v, m: attend(q, k, v, m), *HEADS, m=drawn(1, 2, 5, 7))
case("attention with a bias of all", lambda q, k, v, m: attend(q, k, v, m), *HEADS, m=drawn(5, 7))
case(
    "attention with a mask",
    lambda q, k, v, m: attend(q, k, v, m),
    *HEADS,
    m=torch.arange(7)[None] <= torch.arange(5)[:, None],
)
case(
    "attention with a mask of all",
    lambda q, k, v: attend(q, k, v, torch.ones(5, 7, dtype=torch.bool)),
    *HEADS,
)
case("attention with a bias of nothing", lambda q, k, v: attend(q, k, v, torch.zeros(5, 7)), *HEADS)
case(
    "attention with a mask of the batch",
    lambda q, k, v: attend(q, k, v, q.new_ones(q.shape[0], 1, 5, 7, dtype=torch.bool).tril()),
    *HEADS,
)
case("attention with a bias that is computed", attend, *HEADS, (2, 5, 7))
case(
    "attention with a mask that is computed",
    lambda q, k, v, m: attend(q, k, v, m > -1.5),
    *HEADS,
    (1, 5, 7),
    draw=whole,
)
case(
    "attention of queries that see nothing",
    lambda q, k, v, m: attend(q, k, v, m > 1),
    *HEADS,
    (1, 5, 7),
    draw=whole,
)
case(
    "a mask of all and another",
    lambda x: x.masked_fill((x > 0) & torch.ones(8, dtype=torch.bool), 2.0),
)
case(
    "attention of one head with a bias",
    lambda q, k, v, m: attend(q, k, v, m),
    (5, 4),
    (7, 4),
    (7, 3),
    m=drawn(1, 5, 7),
)
case(
    "attention of windows with a bias",
    lambda q, k, v, m: attend(q, k, v, m),
    (3, 2, 5, 4),
    (3, 2, 7, 4),
    (3, 2, 7, 3),
    m=drawn(3, 2, 5, 7),
)
case(
    "attention of grouped queries",
    lambda q, k, v: attend(q, k, v, enable_gqa=True),
    (4, 5, 4),
    (2, 7, 4),
    (2, 7, 3),
)
case("attention of heads that share keys", attend, (2, 5, 4), (1, 7, 4), (1, 7, 3))
case(
    "attention of heads that share keys, with a bias",
    attend,
    (2, 5, 4),
    (1, 7, 4),
    (1, 7, 3),
    (2, 5, 7),
)
case(
    "multi-head attention",
    nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
    TOKENS,
)


class Weighing(nn.Module):
    """Attention that returns its weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)


case("multi-head attention with weights", Weighing(), TOKENS)
case("softmax", lambda x: x.softmax(-1) + x.softmax(1))
case("log_softmax", lambda x: x.log_softmax(-1) + x.log_softmax(1))
case("softmax of a dtype", lambda x: F.softmax(x, -1, dtype=torch.float32))
case("logsumexp", lambda x: x.logsumexp(1))


# --- windows -----------------------------------------------------------------------------------

case("max pool", nn.MaxPool2d(3, 2, 1))
case("max pool, ceil", nn.MaxPool2d((3, 2), (2, 3), (1, 0), ceil_mode=True))
case("max pool, dilated", nn.MaxPool2d(2, 1, dilation=2))
case("max pool of lines", nn.MaxPool1d(3, 2, 1), LINE)
case(
    "adaptive max pool",
    lambda x: F.adaptive_max_pool2d(x, 1) + F.adaptive_max_pool2d(x, (3, 2)).amax((2, 3), True),
)
case("avg pool", nn.AvgPool2d(3, 2, 1))
case("avg pool, ceil, no pads", nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False))
case("avg pool, divided", nn.AvgPool2d(2, divisor_override=3))
case("avg pool of lines", nn.AvgPool1d(3, 2, 1), LINE)
case("adaptive avg pool of all", nn.AdaptiveAvgPool2d(1))
case("adaptive avg pool, even", nn.AdaptiveAvgPool2d((3, 4)))
case("adaptive avg pool, uneven", nn.AdaptiveAvgPool2d((2, 3)))
case("adaptive avg pool, larger", nn.AdaptiveAvgPool2d((12, 7)))
case(
    "avg pools of a pixel each",
    lambda x: F.avg_pool2d(F.adaptive_avg_pool2d(x, (9, 8)), 1, 1).relu(),
)
case("adaptive avg pool of lines", nn.AdaptiveAvgPool1d(5), LINE)
case("adaptive avg pool of lines, uneven", nn.AdaptiveAvgPool1d(4), LINE)
for op in ("mean", "sum", "amax", "amin"):
    reduce = getattr(torch, op)
    case(f"{op} of an axis", lambda x, f=reduce: f(x, dim=-2))
    case(f"{op} of axes, kept", lambda x, f=reduce: f(x, dim=(1, -1), keepdim=True))
case("mean of the image", lambda x: x.flatten(1).mean(1) + x.mean((2, 3)).sum(1))
case("max of an axis", lambda x: x.max(1).values + x.max(1, keepdim=True).values.squeeze(1))
case("min of an axis", lambda x: x.min(1).values)
case("var", lambda x: x.var((2, 3)) + x.var(1, unbiased=False, keepdim=True).mean((2, 3)))
case("std", lambda x: x.std(1))
case("norms", lambda x: x.norm(dim=1) + x.norm(p=1, dim=1) + torch.linalg.vector_norm(x, dim=1))
case("cumsum", lambda x: x.cumsum(1) + x.cumsum(-1))


# --- resizing ----------------------------------------------------------------------------------

for size in ((18, 16), (7, 11)):
    case(f"nearest to {size}", lambda x, s=size: F.interpolate(x, s))
    for mode in ("bilinear", "bicubic"):
        for corners in (False, True):
            settings: dict[str, Any] = {"mode": mode, "align_corners": corners}
            case(
                f"{mode} to {size}, {corners}",
                lambda x, s=size, o=settings: F.interpolate(x, s, **o),
            )
        case(
            f"{mode} to {size}, smooth",
            lambda x, s=size, m=mode: F.interpolate(x, s, mode=m, antialias=True),
        )
case("nearest by a factor", nn.Upsample(scale_factor=2))
case("nearest by an odd factor", lambda x: F.interpolate(x, scale_factor=(2.07, 1.6)))
case("nearest, exact", lambda x: F.interpolate(x, (13, 5), mode="nearest-exact"))
case("bilinear by a factor", nn.Upsample(scale_factor=1.7, mode="bilinear"))
case(
    "bilinear by a rounded factor",
    lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True),
)
case("pixel shuffle", nn.PixelShuffle(2), (8, 3, 4))
case("pixel unshuffle", nn.PixelUnshuffle(2), (2, 6, 4))
case("channel shuffle", nn.ChannelShuffle(3))


# --- movement ----------------------------------------------------------------------------------

case(
    "views",
    lambda x: x.reshape(x.shape[0], 3, -1).view(-1, 3, 144).flatten(1).unflatten(1, (6, 72)),
)
case("views of many", lambda x: x.reshape(-1, 8).view(-1, 6, 9, 8))
case(
    "squeeze",
    lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(-1).squeeze().unsqueeze(2).squeeze((2,)),
)
case("permute", lambda x: x.permute(0, -1, 1, 2).transpose(1, -2).movedim(1, 3))
case("transpose", lambda x: x.t().t() * 2, ROWS)
case(
    "expand", lambda x, t: torch.cat([t.expand(x.shape[0], -1, -1), x], 1), TOKENS, t=drawn(1, 2, 8)
)
case("expand as", lambda x: x[:, :1].expand_as(x) + x.mean(1, True).expand(-1, 6, -1, -1))
case("expand by an axis", lambda x: x[:, None].expand(-1, 3, -1), ROWS)
case("repeat", lambda x: x.repeat(1, 2, 1, 3))
case("repeat of one", lambda x: x[:, :1].repeat(1, 4, 1, 1) + x.mean(1, True).repeat(1, 4, 1, 1))
case("repeat by an axis", lambda x: x.unsqueeze(1).repeat(1, 3, 1), ROWS)
case(
    "repeat of a parameter",
    lambda x, t: torch.cat([x, t.repeat(x.shape[0], 1, 1)], 1),
    TOKENS,
    t=drawn(1, 2, 8),
)
case("repeat_interleave", lambda x: x.repeat_interleave(3, dim=1))
case("tile", lambda x: x.tile(1, 2))
case("slice", lambda x: x[:, 1:-1, ::2, 3:] + x[:, 1:-1, ::2, -5:])
case("slice of nothing", lambda x: torch.cat([x[:, 2:2], x, x[:, :0]], 1))
case("slices to the end", lambda x: x[:, : x.shape[1]] + x[:, -100:100])
case("select", lambda x: x[:, 0] + x[:, -1] + x.select(1, 2))
case("narrow", lambda x: x.narrow(1, 2, 3))
case("split", lambda x: sum(x.split(2, 1)) + torch.cat(x.split([1, 5], 1), 1).chunk(3, 1)[1])
case("split of one", lambda x: x.split(6, 1)[0])
case("chunk, uneven", lambda x: torch.cat(x.chunk(4, -2)[::-1], -2))
case("unbind", lambda x: torch.stack(x.unbind(1)[::-1], -1) + x.unbind(1)[0].unsqueeze(-1))
case("cat", lambda a, b: torch.cat([a, b, a], -1), IMAGE, (6, 9, 3))
case(
    "cat with a parameter",
    lambda x, w: torch.cat([x, w.expand(x.shape[0], -1, -1)], 1),
    TOKENS,
    w=drawn(1, 3, 8),
)
case("cat of one", lambda x: torch.cat([x], 1))
case(
    "stack",
    lambda a, b: torch.stack([a, b], 1).sum(1) + torch.stack((a, b), -1).amax(-1),
    IMAGE,
    IMAGE,
)
case("roll", lambda x: x.roll((1, -2), (2, 3)).roll(9, 2).roll(3, -1))
case("roll of all", lambda x: x.flatten(1).roll(5, 1).view_as(x))
case("flip", lambda x: x.flip(1, -1) + x.flip(-2))
case("index", lambda x, i: x[:, :, i], i=torch.tensor([3, 0, -1, 3]))
case("index by a table", lambda x, i: x[:, i], i=torch.tensor([[3, 0], [5, 1]]))
case(
    "index by two",
    lambda x, i, j: x[:, :, i, j],
    i=torch.tensor([[3], [-1]]),
    j=torch.tensor([0, 2, -8]),
)
case("index_select", lambda x, i: x.index_select(-1, i), i=torch.tensor([3, 0, 3]))
case(
    "a table of biases",
    lambda x, t, i: x + t[i.view(-1)].view(7, 8),
    TOKENS,
    t=drawn(5),
    i=torch.arange(56).view(7, 8) % 5,
)
case("embedding", nn.Embedding(11, 4), (7,), draw=ids)


def graph(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Draws nodes [9, 4], and 12 places among 9 or [9, 3] among 4."""
    if shape == (9, 4):
        return torch.randn(shape, generator=random)
    return torch.randint(0, 4 if len(shape) > 1 else 9, shape, generator=random)


NODES, EDGES = (9, 4), (12,)
FIXED = torch.tensor([0, 3, 3, 8, 1, 0, 5, 3, 2, 2, 7, 8])


def rows(i: Tensor) -> Tensor:
    return i[..., None].expand(-1, -1, 4)


def every(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])[:, None]


case("gather of rows", lambda x, i: x.gather(1, rows(i)), NODES, EDGES, draw=graph)
case("gather of numbers", lambda x, i: x.gather(2, i), NODES, (9, 3), draw=graph)
case("gather of fewer", lambda x, i: x.gather(2, i[:, :5]), NODES, (9, 3), draw=graph)
case(
    "gather of equal numbers",
    lambda x, i: x[:, 0] + torch.ones(1, 9).expand(x.shape[0], -1).gather(1, i)[:, :4],
    NODES,
    EDGES,
    draw=graph,
)
case("index of each image", lambda x, i: x[every(x), i], NODES, EDGES, draw=graph)
case("index of all images", lambda x, i: x[every(x), i], NODES, i=FIXED)
case("index of all in order", lambda x: x[every(x), torch.arange(9)[None]], NODES)
case(
    "scatter_add",
    lambda x, i: x.scatter_add(1, rows(i)[:, :6], x.repeat(1, 2, 1)),
    NODES,
    EDGES,
    draw=graph,
)
case(
    "scatter_reduce",
    lambda x, i: x.scatter_reduce(2, i, 2 * x[..., :3], "sum"),
    NODES,
    (9, 3),
    draw=graph,
)
case(
    "index_add", lambda x, i: torch.zeros_like(x).index_add(1, i, x[:, i], alpha=2), NODES, i=FIXED
)
case(
    "index_put",
    lambda x, i: x.index_put((every(x), i), x[:, FIXED], True),
    NODES,
    EDGES,
    draw=graph,
)
case(
    "index_put of all",
    lambda x: x.index_put((every(x), FIXED), x[:, FIXED], accumulate=True),
    NODES,
)
case("integers", lambda x: x[:, 0] / 2 + (x[:, 1] * 0.5 > 2) + (2 * x[:, 2] + 1), EDGES, draw=ids)
for mode in ("constant", "reflect", "replicate", "circular"):
    case(f"pad by {mode}", lambda x, m=mode: F.pad(x, (1, 2, 3, 0), mode=m))
    case(f"pad of a line by {mode}", lambda x, m=mode: F.pad(x, (3, 1), mode=m), LINE)
case("pad with a number", lambda x: F.pad(x, (0, 0, 1, 0, 2, 3), value=-1.5))
case("pad below 0", lambda x: F.pad(x, (-1, 2, 1, -3)))
case("pad by nothing", lambda x: F.pad(x, (0, 0)))
case("unfold", lambda x: x.unfold(2, 3, 2).unfold(3, 4, 4))
case("im2col", nn.Unfold((3, 2), (1, 2), (1, 0), (2, 3)))
case("col2im", nn.Fold((7, 8), (3, 2), (1, 2), (1, 1), (2, 1)), (24, 32))
case("fold of an unfold", lambda x: F.fold(F.unfold(x, 3, padding=1), (9, 8), 3, padding=1))


def assigned(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = x[:, 2:4]
    y[:, -1:] = 1.5
    y[:, 2, 3:] = x[:, 0, 3:]
    return y


def painted(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, ::2] = 0
    return y


def masked(x: Tensor) -> Tensor:
    """Numbers windows, as Swin does."""
    mask = torch.zeros(1, 9, 8, 1)
    for number, rows in enumerate((slice(0, 4), slice(4, 9))):
        mask[:, rows] = number
    return x + mask.permute(0, 3, 1, 2)


case("slices assigned", assigned)
case("every other row assigned", painted)
case("a mask in the making", masked)
case("copy_", lambda x: torch.empty_like(x).copy_(x[:, :1]))
case(
    "tensors like another",
    lambda x: (
        x
        + x.new_zeros(x.shape[0], 1, 1, 1)
        + x.new_full((8,), 2.0)
        + torch.full_like(x, 0.5)
        + x.new_ones(8)
        + torch.ones_like(x)
        + torch.zeros_like(x.new_empty(8))  # what is empty may hold NaN
    ),
)
case("numbers of the shape", lambda x: x + torch.arange(x.shape[-1]) / x.shape[-2])
case(
    "a position table, resized",
    lambda x, p: x + F.interpolate(p, x.shape[2:], mode="bicubic"),
    p=drawn(1, 6, 4, 4),
)
case(
    "a constant for each image",
    lambda x: torch.cat([x, torch.linspace(0, 1, 8).expand(x.shape[0], 1, 8)], 1),
    TOKENS,
)
case(
    "a grid",
    lambda x: (
        x + torch.stack(torch.meshgrid(torch.arange(9.0), torch.arange(8.0), indexing="ij")).sum(0)
    ),
)


class Lstm(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 5, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


case("lstm", Lstm(batch_first=True), TOKENS)
case(
    "lstm of two layers, both ways",
    Lstm(num_layers=2, bidirectional=True, batch_first=True),
    TOKENS,
)
case(
    "lstm without biases, steps first",
    nn.Sequential(
        Permute := type("Permute", (nn.Module,), {"forward": lambda self, x: x.transpose(0, 1)})(),
        Lstm(bias=False),
        Permute,
    ),
    TOKENS,
)


# --- what torch has decomposed before, as in a .pt2 file ----------------------------------------

ATEN = torch.ops.aten
case("decomposed softmax", lambda x: ATEN._softmax(x, 1, False) + ATEN._log_softmax(x, -1, False))
case("decomposed pool", lambda x: ATEN._adaptive_avg_pool2d(x, [3, 4]))
case("decomposed view", lambda x: ATEN._unsafe_view(x, [-1, 6, 72]))
case("decomposed nearest", lambda x: ATEN.upsample_nearest2d(x, [18, 11], None, None))
case("decomposed nearest, exact", lambda x: ATEN._upsample_nearest_exact2d(x, [18, 11], None, None))
case("decomposed bilinear", lambda x: ATEN.upsample_bilinear2d(x, [15, 11], False, 1.7, 1.45))
case("decomposed bicubic", lambda x: ATEN.upsample_bicubic2d(x, [15, 11], True, None, None))
case("decomposed bilinear, smooth", lambda x: ATEN._upsample_bilinear2d_aa(x, [5, 11], False))
case("decomposed bicubic, smooth", lambda x: ATEN._upsample_bicubic2d_aa(x, [5, 11], False))
case(
    "decomposed layer norm",
    lambda x, w, b: ATEN.native_layer_norm(x, [8], w, b, 1e-5)[0],
    w=drawn(8),
    b=drawn(8),
)
case(
    "decomposed group norm",
    lambda x, w, b: ATEN.native_group_norm(x, w, b, x.shape[0], 6, 72, 2, 1e-5)[0],
    w=drawn(6),
    b=drawn(6),
)
case(
    "logic",
    lambda x: torch.where(
        torch.logical_and(x > 0, x < 1).logical_or(x < -1).logical_not(), x, 2 * x
    ),
)


# --- the tests ---------------------------------------------------------------------------------


TOGETHER = 24
"""Cases that are traced as one module: what torch.export costs, it costs once."""


class Together(nn.Module):
    """Runs cases side by side; gives the outputs of each as a list."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.counts = [len(each.shapes) for each in cases]
        self.cases = nn.ModuleDict({each.name.replace(".", "_"): each.module for each in cases})

    def forward(self, *given: Tensor) -> list[list[Tensor]]:
        rest, found = list(given), []
        for count, module in zip(self.counts, self.cases.values(), strict=True):
            found.append(outputs(module(*rest[:count])))
            rest = rest[count:]
        return found


def outputs(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


@functools.cache
def traced(group: int) -> tuple[Traced, list[int]]:
    """Traces some cases; gives how many outputs each has, too."""
    chosen = CASES[group * TOGETHER : (group + 1) * TOGETHER]
    given = [each.inputs(TRACED) for each in chosen]
    with torch.no_grad():
        counts = [len(outputs(each.module(*x))) for each, x in zip(chosen, given, strict=True)]
    return trace(Together(chosen), [x for inputs in given for x in inputs]), counts


@functools.cache
def computed(group: int) -> list[list[np.ndarray]]:
    """Computes all outputs of the cases of a group."""
    chosen = CASES[group * TOGETHER : (group + 1) * TOGETHER]
    found, counts = traced(group)
    assert found.program is not None, "\n".join(map(str, found.missing))
    program = Program.from_json(found.program.to_json())
    given = [x.numpy() for each in chosen for x in each.inputs(RUN)]
    made = iter(interpret(program, given, found.tensors).values())
    return [[next(made) for _ in range(count)] for count in counts]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[each.name for each in CASES])
def test_a_module_means_the_same(number: int) -> None:
    each = CASES[number]
    given = [x.double() if x.is_floating_point() else x for x in each.inputs(RUN)]
    with torch.no_grad():
        wanted = outputs(copy.deepcopy(each.module).double()(*given))
    made = computed(number // TOGETHER)[number % TOGETHER]
    for one, want in zip(made, wanted, strict=True):
        assert one.shape == want.shape
        np.testing.assert_allclose(one, want.numpy(), 1e-6, 1e-6 * float(want.abs().max()))


def test_every_rule_has_a_case() -> None:
    met = set()
    for group in range(-(-len(CASES) // TOGETHER)):
        reference = traced(group)[0].reference
        assert isinstance(reference, TorchReference)
        nodes = reference.exported.graph.nodes
        met |= {node.target for node in nodes if node.op == "call_function"}
    inference = {
        op
        for op, each in aten.RULES.items()
        if each.__module__ == aten.__name__ and op.namespace != "maxvision"
    }
    assert inference <= met, inference - met


def test_what_torch_keeps_whole_has_a_rule() -> None:
    assert set(aten.KEPT) <= set(aten.RULES), set(aten.KEPT) - set(aten.RULES)
