"""``maxvision bench bridge``: ops of torch_ops, forward and backward, beside torch's own.

Each op runs eagerly in torch, through torch.compile, and on our kernels, all called from torch, so
that the cost of a call is part of the time. Results and gradients are compared with eager torch's
in float64. bench/compare.py says how times come about. Lines of kernel code are those of all Mojo
modules that the op's programs are compiled from for the device, without comments, docstrings and
empty lines; a module that several ops share counts for each of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maxvision.bench import summaries
from maxvision.bench.__main__ import FAILED, dtypes
from maxvision.bench.begin import begin
from maxvision.bench.compare import compare, limits
from maxvision.bench.engines import TORCH
from maxvision.bench.records import write
from maxvision.bridge import torch_ops as ours
from maxvision.bridge.tensors import place_of
from maxvision.common.errors import ArgumentError
from maxvision.runtime import cache

WAYS = ("torch", "torch-compile", "maxvision")
_LOOSE = re.compile(r'""".*?"""|^\s*#.*?$', re.DOTALL | re.MULTILINE)
"""Docstrings, and comments on lines of their own."""


@dataclass(frozen=True)
class Measured:
    """An op and what torch has for it.

    Attributes:
        torch: Torch's function of the tensors, written as one would.
        ours: The same by ``torch_ops``.
        shapes: Of the tensors, at a number of images; the first one is of activations, and so are
            others of its shape.
        images: Whether the first one is of images, which lie channels last.
    """

    torch: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    shapes: Callable[[int], list[tuple[int, ...]]]
    images: bool = False


def _trained(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _ours_trained(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    running = torch.zeros_like(weight), torch.ones_like(weight)
    found: Tensor = ours.batch_norm(x, weight, bias, *running, training=True)[0]
    return found


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _separable(x: Tensor, depthwise: Tensor, pointwise: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, depthwise, padding=1, groups=x.shape[1]), pointwise)


def _classes(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % x.shape[1]


OPS: dict[str, Measured] = {
    "conv2d": Measured(
        lambda x, w: F.relu(F.conv2d(x, w, padding=1)),
        lambda x, w: ours.conv2d(x, w, padding=1, activation="relu"),
        lambda n: [(n, 64, 56, 56), (64, 64, 3, 3)],
        images=True,
    ),
    "depthwise_pointwise": Measured(
        _separable,
        lambda x, d, p: ours.depthwise_pointwise(x, d, p, padding=1),
        lambda n: [(n, 96, 28, 28), (96, 1, 3, 3), (192, 96, 1, 1)],
        images=True,
    ),
    "batch_norm": Measured(
        _trained, _ours_trained, lambda n: [(n, 64, 56, 56), (64,), (64,)], images=True
    ),
    "max_pool2d": Measured(
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: ours.max_pool2d(x, 3, 2, 1),
        lambda n: [(n, 64, 112, 112)],
        images=True,
    ),
    "linear": Measured(
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda x, w, b: ours.linear(x, w, b, activation="gelu"),
        lambda n: [(n, 197, 384), (1536, 384), (1536,)],
    ),
    "bmm": Measured(torch.bmm, ours.bmm, lambda n: [(6 * n, 197, 64), (6 * n, 64, 197)]),
    "softmax": Measured(lambda x: x.softmax(-1), ours.softmax, lambda n: [(n, 6, 197, 197)]),
    "layer_norm": Measured(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        ours.layer_norm,
        lambda n: [(n, 197, 384), (384,), (384,)],
    ),
    "bias_gelu": Measured(
        lambda x, b: F.gelu(x + b), ours.bias_gelu, lambda n: [(n, 197, 1536), (1536,)]
    ),
    "swish_multiply": Measured(
        lambda x, gate: F.silu(x) * gate,
        ours.swish_multiply,
        lambda n: [(n, 197, 1536), (n, 197, 1536)],
    ),
    "attention": Measured(_attended, ours.attention, lambda n: [(n, 6, 197, 64)] * 3),
    "cross_entropy": Measured(
        lambda x: F.cross_entropy(x, _classes(x)),
        lambda x: ours.cross_entropy(x, _classes(x)),
        lambda n: [(32 * n, 1000)],
    ),
}
"""What is measured, at sizes of ResNet-50 and ViT-S/16."""


def run(options: argparse.Namespace) -> int:
    """Measures every op, dtype and way that was asked for."""
    for name in options.ops or ():
        if name not in OPS:
            raise ArgumentError(f"--ops must be of {', '.join(OPS)} but has {name!r}")
    device, facts = begin(options, __doc__)
    gpu = not device.is_host
    place = place_of(device)
    records: list[dict[str, Any]] = []
    for dtype in dtypes(options, gpu):
        facts["ceilings"][dtype] = limits(dtype, gpu).record()
        for name in options.ops or OPS:
            for backward in (False, True):
                sys.stderr.write(f"{name}, {dtype}, {'both ways' if backward else 'forward'}\n")
                found = _measured(name, dtype, options.size or (128 if gpu else 4), place,
                                  backward, options.seconds)  # fmt: skip
                for record in found:
                    record |= {"op": name, "dtype": dtype, "backward": backward}
                    if record["implementation"] == "maxvision":
                        record |= _per_line(name, record, gpu)
                records += found
                if options.json:
                    write(options.json, facts, records)
    summaries.bridge(records)
    return 0 if all(each["passed"] for each in records) else FAILED


def _measured(
    name: str, dtype: str, images: int, place: torch.device, backward: bool, seconds: float
) -> list[dict[str, Any]]:
    """Compares the ways of one op."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    what = OPS[name]
    tensors = []
    for i, shape in enumerate(what.shapes(images)):
        x = torch.randn(shape)
        if i and len(shape) > 1 and shape[0] != images:
            x /= float(torch.tensor(shape[1:]).prod()) ** 0.5  # weights
        x = x.to(place, TORCH[dtype])
        last = what.images and not i
        tensors.append(x.to(memory_format=torch.channels_last) if last else x)
    ways = dict(zip(WAYS, (what.torch, torch.compile(what.torch, dynamic=False), what.ours),
                    strict=True))  # fmt: skip
    return compare(ways, tensors, backward=backward, seconds=seconds).records


def _per_line(name: str, record: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """Counts the lines of the op's kernels, and what a line of them multiplies and adds."""
    lines = code_lines(ours.TABLE[name].called, gpu)
    rate = record.get("tflops_per_s")
    return {"kernel_lines": lines, "gflops_per_s_per_line": rate and round(1e3 * rate / lines, 3)}


def code_lines(ops: frozenset[str], gpu: bool) -> int:
    """Counts the lines of Mojo that ops are compiled from for a GPU, or for a CPU."""
    sources = [source.decode() for source in cache.modules(ops, gpu).values()]
    return sum(bool(line.strip()) for each in sources for line in _LOOSE.sub("", each).splitlines())
