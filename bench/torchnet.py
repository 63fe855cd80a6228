"""A network of ours in torch, for families that transformers lacks: its program, op by op."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from maxvision.common.errors import ArgumentError
from maxvision.graphs.program import Node, Program
from maxvision.graphs.shapes import pair
from maxvision.weights import Checkpoint


class Output(NamedTuple):
    """What the network gives, as transformers' classifiers do."""

    logits: torch.Tensor


class TorchNet(torch.nn.Module):
    """Runs the plain program of a checkpoint on images [N, C, H, W] of the size it prepares.

    Raises:
        ArgumentError: If the program has an op that is not written here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        program = checkpoint.program(checkpoint.size).keep(["logits"])
        self.config = SimpleNamespace(num_channels=checkpoint.channels)
        self._steps: list[tuple[str, tuple[str, ...], Callable[..., torch.Tensor]]] = []
        for i, node in enumerate(program.nodes):
            values = tuple(name for name in node.inputs if name and name not in program.weights)
            layer = _layer(program, node, checkpoint)
            step: Callable[..., torch.Tensor]
            if layer is not None:
                self.add_module(str(i), layer)
                step = layer
            elif node.op not in FUNCTIONS:
                raise ArgumentError(f"bench has no {node.op} in torch, which {node.name} is")
            else:
                loose = [name for name in node.inputs if name in program.weights]
                for name in loose:
                    self.register_buffer(_plain(name), torch.from_numpy(checkpoint.tensors[name]))
                values = tuple(node.inputs)
                step = FUNCTIONS[node.op](dict(node.attributes))
            self._steps.append((node.output, values, step))
        (self._input,) = program.inputs
        self._output = program.outputs["logits"]

    def forward(self, pixel_values: torch.Tensor) -> Output:
        """Computes the logits."""
        values = {self._input: pixel_values}
        for output, names, step in self._steps:
            given = [values[n] if n in values else getattr(self, _plain(n)) for n in names]
            values[output] = step(*given)
        return Output(values[self._output])


def _plain(name: str) -> str:
    return f"weight:{name.replace('.', ':')}"


def _layer(program: Program, node: Node, checkpoint: Checkpoint) -> torch.nn.Module | None:
    """Makes torch's module of an op with weights of its own."""
    given, named = node.attributes, [name for name in node.inputs[1:] if name in program.weights]
    tensors = [torch.from_numpy(np.ascontiguousarray(checkpoint.tensors[n])) for n in named]
    made: Any
    if node.op == "conv2d" and named:
        f, c, r, s = tensors[0].shape
        groups = int(given.get("groups", 1))  # type: ignore[arg-type]
        made = torch.nn.Conv2d(
            c * groups,
            f,
            (r, s),
            pair(given.get("stride", 1)),
            pair(given.get("padding", 0)),
            pair(given.get("dilation", 1)),
            groups,
            bias=len(tensors) > 1,
        )
    elif node.op == "linear" and named:
        f, c = tensors[0].shape
        made = torch.nn.Linear(c, f, len(tensors) > 1)
    elif node.op == "batch_norm":
        made = torch.nn.BatchNorm2d(len(tensors[0]), float(given.get("eps", 1e-5)))  # type: ignore[arg-type]
        made.running_mean, made.running_var = tensors[2:]
    elif node.op == "layer_norm":
        made = torch.nn.LayerNorm(len(tensors[0]), float(given.get("eps", 1e-5)))  # type: ignore[arg-type]
    else:
        return None
    for name, tensor in zip(("weight", "bias"), tensors, strict=False):
        setattr(made, name, torch.nn.Parameter(tensor, requires_grad=False))
    module: torch.nn.Module = made.eval()
    return module


def _sizes(x: torch.Tensor, shape: Any) -> list[int]:
    return [len(x) if isinstance(size, str) else size for size in shape]


FUNCTIONS: dict[str, Callable[[dict[str, Any]], Callable[..., torch.Tensor]]] = {
    "relu": lambda _: F.relu,
    "gelu": lambda _: F.gelu,
    "softmax": lambda _: lambda x: x.softmax(-1),
    "log_softmax": lambda _: lambda x: x.log_softmax(-1),
    "add": lambda _: torch.add,
    "mul": lambda _: torch.mul,
    "max_pool2d": lambda a: (
        lambda x: F.max_pool2d(
            x, a["kernel"], a.get("stride"), a.get("padding", 0), a.get("dilation", 1)
        )
    ),
    "avg_pool2d": lambda a: (
        lambda x: F.avg_pool2d(
            x, a.get("kernel") or x.shape[2:], a.get("stride"), a.get("padding", 0)
        )
    ),
    "scaled_dot_product_attention": lambda a: (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=a["scale"])
    ),
    "reshape": lambda a: lambda x: x.reshape(_sizes(x, a["shape"])),
    "permute": lambda a: lambda x: x.permute(a["axes"]),
    "slice": lambda a: lambda x: x.narrow(a["axis"], a["start"], a["stop"] - a["start"]),
    "concat": lambda a: (
        lambda *x: torch.cat(
            [y.expand(x[-1].shape[0], *y.shape[1:]) for y in x] if a["axis"] else x, a["axis"]
        )
    ),
    "expand": lambda a: lambda x: x.expand(*(-1 if isinstance(n, str) else n for n in a["shape"])),
}
"""How ops without weights of their own are computed, by their attributes.

A size that is the batch stays what it is; a value without one is repeated where others have it.
"""
