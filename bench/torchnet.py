"""A network of ours in torch, for families that transformers lacks: its program, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn import grad

from maxvision.common.errors import ArgumentError
from maxvision.graphs.constants import fake_quantize_filter
from maxvision.graphs.elementwise import ELEMENTWISE
from maxvision.graphs.program import Node, Program, rebuilt
from maxvision.graphs.shapes import pair, sides
from maxvision.graphs.types import at_batch


class Output(NamedTuple):
    """What the network gives, as transformers' classifiers do; not always logits."""

    logits: torch.Tensor


class Source(NamedTuple):
    """What a network was made of."""

    program: Program
    tensors: Mapping[str, np.ndarray]

    def __deepcopy__(self, _: Any) -> Source:
        """Gives itself: nobody changes it."""
        return self


class TorchNet(torch.nn.Module):
    """Runs a plain program of one input, such as images [N, C, H, W], and one output.

    Args:
        program: The program.
        tensors: Its weights.

    Attributes:
        source: Program and weights.

    Raises:
        ArgumentError: If the program has an op that is not written here.
    """

    def __init__(self, program: Program, tensors: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.source = Source(program, tensors)
        program, tensors = _with_rounded_filters(program, tensors)
        self._steps: list[tuple[str, tuple[str, ...], Callable[..., torch.Tensor], Any]] = []
        for i, node in enumerate(program.nodes):
            values = tuple(name for name in node.inputs if name and name not in program.weights)
            layer = self.layer(program, node, tensors)
            step: Callable[..., torch.Tensor]
            if layer is not None:
                self.add_module(str(i), layer)
                step = layer
            elif node.op not in FUNCTIONS:
                raise ArgumentError(f"bench has no {node.op} in torch, which {node.name} is")
            else:
                loose = [name for name in node.inputs if name in program.weights]
                for name in loose:
                    self.register_buffer(_plain(name), torch.from_numpy(tensors[name]))
                values = tuple(node.inputs)
                step = self.function(node)
            self._steps.append((node.output, values, step, node.attributes.get("shape")))
        (self._input,) = program.inputs
        (self._output,) = program.outputs.values()

    def layer(
        self, program: Program, node: Node, tensors: Mapping[str, np.ndarray]
    ) -> torch.nn.Module | None:
        """Makes torch's module of an op with weights of its own; nothing of another."""
        return _layer(program, node, tensors)

    def function(self, node: Node) -> Callable[..., torch.Tensor]:
        """Makes the function of an op without such weights."""
        return FUNCTIONS[node.op](dict(node.attributes))

    def forward(self, x: torch.Tensor) -> Output:
        """Computes the output."""
        values = {self._input: x}
        batch = len(x)
        for output, names, step, shape in self._steps:
            given = [values[n] if n in values else getattr(self, _plain(n)) for n in names]
            more = [] if shape is None else [[at_batch(size, batch) for size in shape]]
            values[output] = step(*given, *more)
        return Output(values[self._output])


def _plain(name: str) -> str:
    return f"weight:{name.replace('.', ':')}"


def _with_rounded_filters(
    program: Program, tensors: Mapping[str, np.ndarray]
) -> tuple[Program, Mapping[str, np.ndarray]]:
    """Rounds filters that a quantised program rounds, once and for all."""
    rounding = [node for node in program.nodes if node.op == "fake_quantize_filter"]
    rounded = {node.output: node.inputs for node in rounding}
    to = {node.inputs[0]: str(node.attributes.get("to", "int8")) for node in rounding}
    nodes = [
        replace(node, inputs=tuple(rounded.get(name, (name,))[0] for name in node.inputs))
        for node in program.nodes
        if node.output not in rounded
    ]
    made = {
        name: fake_quantize_filter(tensors[name], *(tensors[each] for each in scale), to=to[name])
        for name, *scale in rounded.values()
    }
    return (rebuilt(program, nodes), {**tensors, **made}) if rounded else (program, tensors)


def _layer(program: Program, node: Node, held: Mapping[str, np.ndarray]) -> torch.nn.Module | None:
    """Makes torch's module of an op with weights of its own."""
    given, named = node.attributes, [name for name in node.inputs[1:] if name in program.weights]
    tensors = [torch.from_numpy(np.ascontiguousarray(held[n])) for n in named]
    made: Any
    if node.op == "conv2d" and named:
        f, c, r, s = tensors[0].shape
        groups = int(given.get("groups", 1))  # type: ignore[arg-type]
        top, left, bottom, right = sides(given.get("padding", 0))
        even = (top, left) == (bottom, right)
        made = torch.nn.Conv2d(
            c * groups,
            f,
            (r, s),
            pair(given.get("stride", 1)),
            (top, left) if even else 0,
            pair(given.get("dilation", 1)),
            groups,
            bias=len(tensors) > 1,
        )
        if not even:
            zeros = torch.nn.ZeroPad2d((left, right, top, bottom))
            made.register_forward_pre_hook(lambda _, x: zeros(x[0]))
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


def _elementwise(op: str) -> Callable[[dict[str, Any]], Callable[..., torch.Tensor]]:
    """Computes an op of graphs/elementwise.py; a number takes the place of the second value."""
    function = ELEMENTS.get(op) or getattr(torch, op)

    def bound(given: dict[str, Any]) -> Callable[..., torch.Tensor]:
        settings = {name: value for name, value in given.items() if name != "other"}
        if "other" not in given:
            return lambda *x: function(*x, **settings)
        return lambda x: function(x, torch.as_tensor(given["other"], dtype=x.dtype), **settings)

    return bound


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to floats of 8 bits, those beyond the largest to that."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda a: lambda x: function(x, dim=a["axes"], keepdim=a.get("keepdim", False))


def _pad(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    pads, value = a["pads"], a.get("value", 0.0)
    around = [n for axis in reversed(range(len(pads) // 2)) for n in pads[2 * axis : 2 * axis + 2]]
    return lambda x: F.pad(x, around, value=value)


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


def _gather(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def gather(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if batch := a.get("batch_axes", 0):
            places = indices.flatten(batch).reshape(
                *x.shape[:batch], -1, *[1] * (x.ndim - batch - 1)
            )
            shape = (*x.shape[:batch], places.shape[batch], *x.shape[batch + 1 :])
            y = x.gather(batch, places.long().expand(shape))
            return y.unflatten(batch, indices.shape[batch:])
        y = x.index_select(a["axis"], indices.flatten())
        return y.unflatten(a["axis"], indices.shape) if indices.ndim > 1 else y

    return gather


def _slice(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    whole = [slice(None)] * a["axis"] + [slice(a["start"], a["stop"], a.get("step", 1))]
    return lambda x: x[tuple(whole)]


def _weight_grad(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    top, left, bottom, right = sides(a.get("padding", 0))
    window = {name: a[name] for name in ("stride", "dilation", "groups") if name in a}

    def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        shape = (dy.shape[1], x.shape[1] // a.get("groups", 1), *pair(a["kernel"]))
        return grad.conv2d_weight(F.pad(x, (left, right, top, bottom)), shape, dy, **window)

    return gradient


def _input_grad(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    top, left, bottom, right = sides(a.get("padding", 0))
    window = {name: a[name] for name in ("stride", "dilation", "groups") if name in a}
    h, w = pair(a["size"])

    def gradient(dy: torch.Tensor, filter: torch.Tensor) -> torch.Tensor:
        channels = filter.shape[1] * a.get("groups", 1)
        shape = (len(dy), channels, top + h + bottom, left + w + right)
        dx = torch.nn.grad.conv2d_input(shape, filter, dy, **window)
        return F.pad(dx, (-left, -right, -top, -bottom))

    return gradient


def _max_pool_grad(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    kernel, stride = a["kernel"], a.get("stride", a["kernel"])
    window = [pair(each) for each in (kernel, stride, a.get("padding", 0), a.get("dilation", 1))]
    rest = (*window, a.get("ceil_mode", False))

    def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        _, indices = torch.ops.aten.max_pool2d_with_indices(x, *rest)
        return torch.ops.aten.max_pool2d_with_indices_backward(dy, x, *rest, indices)

    return gradient


def _avg_pool_grad(a: dict[str, Any]) -> Callable[..., torch.Tensor]:
    kernel, stride = a["kernel"], a.get("stride", a["kernel"])
    window = [pair(each) for each in (kernel, stride, a.get("padding", 0))]
    rest = (*window, a.get("ceil_mode", False), a.get("count_include_pad", True), None)

    def gradient(dy: torch.Tensor) -> torch.Tensor:
        x = dy.new_empty(*dy.shape[:2], *pair(a["size"]))
        return torch.ops.aten.avg_pool2d_backward(dy, x, *rest)

    return gradient


ELEMENTS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_grad": lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "softplus": F.softplus,
    "clamp": lambda x, *, min=None, max=None: x.clamp(min, max),
    "leaky_relu": lambda x, *, slope=0.01: F.leaky_relu(x, slope),
    "elu": lambda x, *, alpha=1.0: F.elu(x, alpha),
    "prelu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "where": lambda seen, x, y: torch.where(seen.bool(), x, y),
    "fake_quantize": lambda x, scale, low=0, high=0, to="": (
        (_e4m3(x * (1 / scale)) if to else (x * (1 / scale)).round().clamp(low, high)) * scale
    ),
    "e4m3": lambda x: _e4m3(x),
}
"""The elementwise ops that torch calls otherwise, or has elsewhere, than ``torch.<name>``."""


def _repeated(mask: torch.Tensor, images: int) -> torch.Tensor:
    """Repeats a mask of windows for the windows of each image."""
    again = images // len(mask) if mask.ndim == 4 and len(mask) > 1 else 1
    return mask.repeat(again, 1, 1, 1) if again > 1 else mask


FUNCTIONS: dict[str, Callable[[dict[str, Any]], Callable[..., torch.Tensor]]] = {
    **{op: _elementwise(op) for op in ELEMENTWISE},
    "softmax": lambda _: lambda x: x.softmax(-1),
    "log_softmax": lambda _: lambda x: x.log_softmax(-1),
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "amax": _reduction(torch.amax),
    "amin": _reduction(torch.amin),
    "cumsum": lambda a: lambda x: x.cumsum(a["axis"]),
    "roll": lambda a: lambda x: x.roll(a["shifts"], a["axes"]),
    "group_norm": lambda a: lambda x, w, b: F.group_norm(x, a["groups"], w, b, a["eps"]),
    "rms_norm": lambda a: lambda x, w: F.rms_norm(x, w.shape, w, a["eps"]),
    "conv2d_input_grad": _input_grad,
    "conv2d_weight_grad": _weight_grad,
    "max_pool2d_grad": _max_pool_grad,
    "avg_pool2d_grad": _avg_pool_grad,
    "matmul": lambda a: (
        lambda x, y: (x @ (y.mT if a.get("transpose_b") else y)) * a.get("alpha", 1.0)
    ),
    "pad": _pad,
    "gather": _gather,
    "scatter_add": lambda a: lambda x, indices, y: x.scatter_add(a["axis"], indices.long(), y),
    "cast": lambda a: lambda x: x.to(getattr(torch, a["dtype"])),
    "max_pool2d": lambda a: lambda x: F.max_pool2d(x, a["kernel"], **_without(a, "kernel")),
    "avg_pool2d": lambda a: (
        lambda x: F.avg_pool2d(x, a.get("kernel") or x.shape[2:], **_without(a, "kernel"))
    ),
    "scaled_dot_product_attention": lambda a: (
        lambda q, k, v, mask=None: F.scaled_dot_product_attention(
            q,
            k,
            v,
            None if mask is None else _repeated(mask, len(q)),
            is_causal=a.get("causal", False),
            scale=a["scale"],
        )
    ),
    "reshape": lambda _: lambda x, shape: x.reshape(shape),
    "permute": lambda a: lambda x: x.permute(a["axes"]),
    "slice": _slice,
    "concat": lambda a: (
        lambda *x: torch.cat(
            [y.expand(x[-1].shape[0], *y.shape[1:]) for y in x] if a["axis"] else x, a["axis"]
        )
    ),
    "expand": lambda _: lambda x, shape: x.expand(shape),
}
"""How ops without weights of their own are computed, by their attributes.

Two take a shape besides. A value without a batch is repeated where others have one.
"""
