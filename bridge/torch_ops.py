"""Our kernels as ops of torch, with gradients: ``torch.ops.maxvision.…``.

    from maxvision import torch_ops

    y = torch_ops.linear(x, weight, bias, activation="gelu")
    y.sum().backward()
    net = nn.Sequential(torch_ops.Linear(16, 32), nn.Tanh(), torch_ops.Linear(32, 4))

Each op is a function of torch that says what it means. From it follow, when the op is called on
tensors that it has not seen the like of, a program of both its ways (bridge/parts.py):

- forward, ``maxvision::NAME``: the function, taken apart into ATen ops;
- backward, ``maxvision::NAME_backward``: its gradients by torch.autograd, taken apart likewise. Of
  the forward pass only inputs are saved, and what the gradients need of it is computed again.

A program is compiled for the dtypes, shapes, order of strides, settings and device of its inputs,
and kept in the process, and in the cache of all graphs. It takes any batch of two or more: sums and
products may run over a batch that is not known, other ops have it as their first axis (``_free``).
What does not fit that, as a softmax across images, is compiled for each batch.

The kernels compute in float32, bfloat16 and float16; in float64 on a CPU, where torch's gradcheck
passes for each op that has gradients. Gradients of gradients are not there.

The layers are torch's, computed by these ops; bridge/optimizers.py has the optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from maxvision.bridge.attention import attend, autocast
from maxvision.bridge.optimizers import (
    SGD,
    Adam,
    AdamW,
    adam_,
    adam_settings,
    sgd_,
    sgd_settings,
)
from maxvision.bridge.refusal import refusal
from maxvision.common.errors import ArgumentError, ModelError, UserError

__all__ = ["SGD", "Adam", "AdamW", "adam_", "adam_settings", "refusal", "sgd_", "sgd_settings"]

_SCHEMA = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "float | None": "float?",
    "int": "int", "bool": "bool", "str": "str", "Pair": "int[2]",
}  # fmt: skip
"""What an argument's annotation is in torch's schemas."""
Pair = tuple[int, ...]
"""Down and across; one number is both."""
LIKES = 4096
"""Kinds of arguments for which an op remembers what computes them."""


# --- ops of the table: forward, backward, and what each is compiled to -------------------------


@dataclass
class Op:
    """An op of torch that a function of torch means.

    Attributes:
        means: The function: tensors and settings in, a tensor or several out.
        batch: The tensors whose first axis is the batch.
        made: What was compiled, by what it is for.
        ready: The same by dtypes, shapes, strides, devices and settings, which calls look up.
    """

    means: Callable[..., Any]
    batch: Sequence[str]
    made: dict[Any, _Compiled] = field(default_factory=dict, repr=False)
    ready: dict[Any, _Compiled] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.name = self.means.__name__
        self.signature = inspect.signature(self.means)
        parameters = self.signature.parameters
        self._defaults = {name: each.default for name, each in parameters.items()}
        self._pairs = [name for name, each in parameters.items() if each.annotation == "Pair"]
        self.tensors = [name for name, each in parameters.items() if "Tensor" in each.annotation]
        self._lock = threading.Lock()
        self._register()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the op; under autocast floats are cast to its dtype first."""
        given = self.bound(args, kwargs)
        first = given[self.tensors[0]]
        if not isinstance(first, Tensor):
            raise TypeError(
                f"torch_ops.{self.name}: {self.tensors[0]} is a {type(first).__name__}; give a"
                " tensor of torch"
            )
        device = first.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            given = {
                name: autocast(x, dtype) if isinstance(x, Tensor) else x
                for name, x in given.items()
            }
        return self.forward(*given.values())

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Gives all arguments by name; one number becomes a pair where that is wanted."""
        named = dict(zip(self._defaults, args, strict=False))
        found = {**self._defaults, **named, **kwargs}
        known = len(named) == len(args) and len(found) == len(self._defaults)
        missing = any(x is inspect.Parameter.empty for x in found.values())
        if not known or missing or any(name in named for name in kwargs):
            self.signature.bind(*args, **kwargs)  # says what is wrong
        for name in self._pairs:
            if isinstance(found[name], int):
                found[name] = [found[name]] * 2
        return found

    def _register(self) -> None:
        several = "tuple" in self.signature.return_annotation
        count = self.signature.return_annotation.count("Tensor")
        given = ", ".join(map(_declared, self.signature.parameters.values()))
        plain = ", ".join(_declared(each, False) for each in self.signature.parameters.values())
        returned = f"({', '.join(['Tensor'] * count)})" if several else "Tensor"
        self.forward: Any = torch.library.custom_op(
            f"maxvision::{self.name}", self._run, mutates_args=(), schema=f"({given}) -> {returned}"
        )
        self.backward: Any = torch.library.custom_op(
            f"maxvision::{self.name}_backward", self._run_backward, mutates_args=(),
            schema=f"(Tensor?[] dy, bool[] wanted, {plain}) -> Tensor[]",
        )  # fmt: skip
        self.forward.register_fake(lambda *args: self.meant(args))
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)

    @property
    def called(self) -> frozenset[str]:
        """The ops of ours that the programs call which were compiled so far."""
        return frozenset().union(*(made.called for made in self.made.values() if made))

    def meant(self, args: Sequence[Any]) -> Any:
        """Computes by torch, outputs without holes."""
        with torch.no_grad():
            found = self.means(*args)
        return tuple(map(_dense, found)) if isinstance(found, tuple) else _dense(found)

    def gradients(self, dy: Sequence[Tensor | None], wanted: Sequence[bool], args: Any) -> Any:
        """Computes by torch the gradients of the tensors that are wanted."""
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            fresh = [x.detach() if isinstance(x, Tensor) else x for x in args]
            at = [i for i, name in enumerate(self.signature.parameters) if name in self.tensors]
            asked = [fresh[i].requires_grad_() for i, yes in zip(at, wanted, strict=True) if yes]
            found = self.means(*fresh)
            pairs = zip(found if isinstance(found, tuple) else [found], dy, strict=True)
            kept = [(y, slope) for y, slope in pairs if slope is not None and y.requires_grad]
            outputs, slopes = zip(*kept, strict=True) if kept else ((), ())
            made = (
                torch.autograd.grad(outputs, asked, slopes, allow_unused=True)
                if kept
                else [None] * len(asked)
            )
        return [
            _laid(torch.zeros_like(x), _order(x)) if slope is None else _laid(slope, _order(x))
            for x, slope in zip(asked, made, strict=True)
        ]

    def _fake_backward(self, dy: Any, wanted: Any, *args: Any) -> list[Tensor]:
        return [
            _empty_like(args[list(self.signature.parameters).index(name)])
            for name, yes in zip(self.tensors, wanted, strict=True)
            if yes
        ]

    def _whole(self, args: Sequence[Any]) -> list[Any]:
        """Adds the defaults that torch leaves out at the end."""
        rest = list(self.signature.parameters.values())[len(args) :]
        return [*args, *(list(x) if isinstance(x := each.default, tuple) else x for each in rest)]

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        inputs = self._whole(inputs)
        ctx.set_materialize_grads(False)
        ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.settings = [None if isinstance(x, Tensor) else x for x in inputs]

    def _differentiate(self, ctx: Any, *dy: Any) -> Any:
        held = iter(ctx.saved_tensors)
        args = [
            next(held) if yes else x for yes, x in zip(ctx.is_tensor, ctx.settings, strict=True)
        ]
        needed = dict(zip(self.signature.parameters, ctx.needs_input_grad, strict=False))
        wanted = [needed.get(name, False) for name in self.tensors]
        found = iter(self.backward(list(dy), wanted, *args))
        return tuple(next(found) if yes else None for yes in needed.values())

    def _run(self, *args: Any) -> Any:
        given = self._whole(args)
        found = self._found("", self.meant, given, given)
        return tuple(found) if "tuple" in self.signature.return_annotation else found[0]

    def _run_backward(self, dy: Any, wanted: Any, *args: Any) -> list[Tensor]:
        if not any(wanted) or all(each is None for each in dy):
            return [torch.zeros_like(x) for x in self._fake_backward(dy, wanted, *args)]

        def computed(given: list[Any]) -> Any:
            return self.gradients(given[: len(dy)], wanted, given[len(dy) :])

        return self._found(f"_backward{''.join(map(str, map(int, wanted)))}", computed,
                           [*dy, *args], list(args))  # fmt: skip

    def _found(
        self, way: str, computed: Callable[[list[Any]], Any], given: list[Any], args: list[Any]
    ) -> list[Tensor]:
        """Computes one way on our kernels, which are compiled if need be."""
        like = (way, *map(_described, given))
        made = self.ready.get(like)
        if made is None:
            if len(self.ready) >= LIKES:
                self.ready.clear()
            made = self.ready[like] = self._fitting(way, computed, given, args)
        return made([x for x in given if isinstance(x, Tensor)])

    def _fitting(
        self, way: str, computed: Callable[[list[Any]], Any], given: list[Any], args: list[Any]
    ) -> _Compiled:
        """Finds what was compiled for such arguments, or compiles it."""
        self._check(given)
        importlib.import_module("max.graph")  # the thread that imports it ends its context at exit
        named = zip(self.signature.parameters, args, strict=True)
        held = [isinstance(x, Tensor) and name in self.batch for name, x in named]
        sizes = {_images_of(x) for x, yes in zip(args, held, strict=True) if yes}
        first = sizes.pop() if len(sizes) == 1 else None
        slopes = [isinstance(x, Tensor) and _images_of(x) == first for x in given[: -len(args)]]
        batched = [*slopes, *held]
        keys = [(way, *(_key(x, False) for x in given))]
        if first is not None and first > 1:  # a batch of any size is tried first
            flags = zip(given, batched, strict=True)
            keys.insert(0, (way, *(_key(x, yes) for x, yes in flags)))
        with self._lock:
            for key in keys:
                if key not in self.made:
                    shares = batched if key is not keys[-1] else [False] * len(given)
                    with ThreadPoolExecutor(1) as aside:  # where torch is in no mode
                        task = aside.submit(self._compile, way, computed, given, shares)
                        self.made[key] = task.result()
                if made := self.made[key]:
                    break
        return made

    def _compile(
        self, way: str, computed: Callable[[list[Any]], Any], given: list[Any], batched: Any
    ) -> Any:
        """Compiles one way; gives None if it does not take any batch as it should."""
        try:
            with _quiet():
                graph = _traced(computed, given, batched)
        except Exception as error:  # what torch says of arguments
            if any(batched):
                return None
            from maxvision.bridge.exported import first_line

            raise ArgumentError(f"torch_ops.{self.name}: {first_line(error)}") from error
        if why := _unequal(graph):
            raise TypeError(f"torch_ops.{self.name}: {why}")
        floats = (x for x in given if isinstance(x, Tensor) and x.is_floating_point())
        tensors = zip(given, batched, strict=True)
        shares = [yes for x, yes in tensors if isinstance(x, Tensor)]
        return _Compiled.of(f"maxvision::{self.name}{way}", graph, next(floats), shares)

    def _check(self, given: Sequence[Any]) -> None:
        """Makes sure that the tensors are of dtypes that kernels take, and in one place."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        if why := refusal(*tensors):
            raise (TypeError if why.startswith("a tensor is") else ModelError)(
                f"torch_ops.{self.name}: {why}"
            )
        if not any(x.is_floating_point() for x in tensors):
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            raise TypeError(
                f"torch_ops.{self.name}: a tensor is {dtype}, and it computes in float32, bfloat16"
                " and float16; call float()"
            )


TABLE: dict[str, Op] = {}
"""All ops by name."""


def op(*batch: str) -> Callable[[Callable[..., Any]], Op]:
    """Makes an op of a function; ``batch`` names the tensors that begin with the batch."""

    def make(means: Callable[..., Any]) -> Op:
        made = Op(means, batch or (next(iter(inspect.signature(means).parameters)),))
        TABLE[made.name] = made
        functools.update_wrapper(made, means)
        return made

    return make


def _declared(parameter: inspect.Parameter, default: bool = True) -> str:
    """Writes an argument down as torch's schemas do."""
    text = f"{_SCHEMA[parameter.annotation]} {parameter.name}"
    value = parameter.default
    if value is inspect.Parameter.empty or not default:
        return text
    if isinstance(value, str):
        return f'{text}="{value}"'
    return f"{text}={list(value) if isinstance(value, tuple) else value}"


def _dense(y: Tensor) -> Tensor:
    """Gives a tensor whose memory has neither holes nor numbers that count twice."""
    return y if is_non_overlapping_and_dense_or_false(y) else y.contiguous()


def _laid(y: Tensor, order: tuple[int, ...]) -> Tensor:
    """Gives a tensor that lies densely, its axes in an order."""
    return y.permute(order).contiguous().permute([order.index(axis) for axis in range(y.ndim)])


def _empty_like(x: Tensor) -> Tensor:
    """Makes a dense tensor with the shape and order of another one: that of a gradient."""
    order = _order(x)
    lies = x.new_empty([x.shape[axis] for axis in order])
    return lies.permute([order.index(axis) for axis in range(x.ndim)])


def _key(x: Any, batched: bool) -> Any:
    """Says what a program has to know of an argument."""
    if not isinstance(x, Tensor):
        return tuple(x) if isinstance(x, list) else (type(x), x)
    return x.dtype, tuple(x.shape[batched:]), x.ndim, _order(x), x.device


def _described(x: Any) -> Any:
    """Says all that a program could have to know of an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.layout, x.device
    return tuple(x) if isinstance(x, list) else (type(x), x)


# --- tracing and compiling ---------------------------------------------------------------------


def _traced(
    computed: Callable[[list[Any]], Any], given: list[Any], batched: Sequence[bool]
) -> fx.GraphModule:
    """Takes a computation apart into ATen ops, of tensors like those that are given.

    They are on a CPU, whatever computes later: torch differentiates what lies on a GPU in a thread
    of its own, which waits for this one where gradients are compiled.
    """
    from maxvision.bridge import aten, gradients

    aten.RULES[torch.ops.maxvision._attend.default] = aten.attention
    at = [i for i, x in enumerate(given) if isinstance(x, Tensor)]

    def on_tensors(*tensors: Tensor) -> list[Tensor]:
        whole = list(given)
        for i, x in zip(at, tensors, strict=True):
            whole[i] = x
        found = computed(whole)
        return [*found] if isinstance(found, (list, tuple)) else [found]

    fakes = _fakes([given[i] for i in at], [batched[i] for i in at])
    joint = make_fx(on_tensors, tracing_mode="symbolic")(*fakes)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    plain = make_fx(
        torch.func.functionalize(joint, remove="mutations"),
        tracing_mode="symbolic",
        decomposition_table=gradients.decompositions(),
    )(*fakes)
    gradients.lean(plain.graph)
    return plain


def _unequal(graph: fx.GraphModule) -> str:
    """Says which dtypes one product has, as torch itself refuses them; nothing if it is one."""
    from maxvision.bridge.parts import is_product

    for node in graph.graph.nodes:
        if is_product(node.target):
            factors = [x.meta["val"] for x in node.args[:3] if isinstance(x, fx.Node)]
            kinds = sorted({str(x.dtype).removeprefix("torch.") for x in factors})
            if len(kinds) > 1:
                return (
                    f"a tensor is {kinds[0]} and another {kinds[1]}, which are multiplied; make"
                    " them one dtype, or call it under torch.autocast"
                )
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from logging tracebacks of what it also raises."""
    log = logging.getLogger(fake_tensor.__name__)
    log.addFilter(_refused)
    try:
        yield
    finally:
        log.removeFilter(_refused)


def _refused(record: logging.LogRecord) -> bool:
    return record.levelno != logging.ERROR


def _fakes(tensors: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """Makes tensors without numbers, dense and ordered like others; the batch is a symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    batch: Any = None
    if firsts := [x.shape[0] for x, yes in zip(tensors, batched, strict=True) if yes]:
        open_size: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        batch = mode.from_tensor(torch.empty(firsts[0]), symbolic_context=open_size).shape[0]
    made = []
    for x, yes in zip(tensors, batched, strict=True):
        sizes = [batch if yes and axis == 0 else size for axis, size in enumerate(x.shape)]
        with mode:
            like = torch.empty(sizes, dtype=x.dtype)
            made.append(_laid(like, _order(x)))
    return made


def _images_of(x: Tensor) -> int | None:
    """Counts the images of a tensor whose outermost axis, in memory too, they are."""
    return x.shape[0] if x.ndim and _order(x)[0] == 0 else None


def _order(x: Tensor) -> tuple[int, ...]:
    """Gives the axes in the order in which they lie in memory."""
    return tuple(sorted(range(x.ndim), key=lambda axis: -x.stride()[axis]))


class _Compiled:
    """One way of an op as a program."""

    def __init__(self, part: Any) -> None:
        self._part = part

    @classmethod
    def of(
        cls, name: str, graph: fx.GraphModule, like: Tensor, shares: Sequence[bool]
    ) -> _Compiled | None:
        """Compiles a graph; gives None if it should take any batch, and does not.

        Args:
            name: Of the op, for errors.
            graph: Of ATen ops.
            like: A tensor on the device, of the dtype in which it computes.
            shares: Which of its inputs begin with the batch; none if it need not take any.

        Raises:
            ModelError: If ops of it have no rule.
        """
        from maxvision.bridge import parts
        from maxvision.bridge.tensors import device_of
        from maxvision.graphs.types import BATCH

        batched = any(shares)
        try:
            missing = parts.missing(graph)
        except UserError:
            if batched:
                return None
            raise
        if missing and not batched:
            lines = ", ".join(f"{each.op} ({each.why})" for each in missing)
            raise ModelError(f"{name} has no kernels for {lines}")
        if missing:
            return None
        inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        part = parts.Part(graph, inputs, {}, like.dtype, device_of(like.device), True)
        firsts = [x.shape[:1] == (BATCH,) for x in part.program.inputs.values()]
        if batched and (firsts != [shares[i] for i in part.taken] or not _free(part.program)):
            return None
        part.load()
        return cls(part)

    @property
    def called(self) -> frozenset[str]:
        """The ops of ours that it calls."""
        found: frozenset[str] = self._part.called
        return found

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the outputs, none of which shares memory with an input or another."""
        found = self._part(*(tensors[i] for i in self._part.taken))
        seen = {x.untyped_storage().data_ptr() for x in tensors}
        owned = []
        for y in found:
            place = y.untyped_storage().data_ptr()
            owned.append(y.clone() if place in seen else y)
            seen.add(place)
        return owned


def _free(program: Any) -> bool:
    """Tells whether a program has the batch where kernels take a size that is not known.

    That is the first axis of what is computed. Sums over it, and products whose sums run over it,
    are given it anywhere, as the gradients of weights are; moves may put it there.
    """
    from maxvision.graphs.lower import MOVES

    def ahead(value: str) -> bool:
        return all(isinstance(size, int) for size in program.types[value].shape[1:])

    sums = ("sum", "mean", "amax", "amin", "matmul")
    return all(map(ahead, [*program.inputs, *program.outputs.values()])) and all(
        all(map(ahead, node.outputs))
        and (node.op in sums or all(ahead(value) for value in node.inputs if value))
        for node in program.nodes
        if node.op not in MOVES
    )


# --- the table ---------------------------------------------------------------------------------


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation](x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # fmt: skip
"""What comes behind a layer."""


@op("x", "residual")
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1), groups: int = 1,
    activation: str = "none",
) -> Tensor:  # fmt: skip
    """Convolves images, adds a residual, activates."""
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _activated(y if residual is None else y + residual, activation)


@op()
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """Computes activation(x weight^T + bias)."""
    return _activated(F.linear(x, weight, bias), activation)


@op("a", "c")
def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0,
    transpose_a: bool = False, transpose_b: bool = False,
) -> Tensor:  # fmt: skip
    """Computes alpha a b + beta c of matrices."""
    y = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b) * alpha
    return y if c is None else y + c * beta


@op("a", "b", "c")
def gemm_batched(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0,
    transpose_a: bool = False, transpose_b: bool = False,
) -> Tensor:  # fmt: skip
    """Computes alpha a b + beta c of stacks of matrices."""
    y = (a.mT if transpose_a else a) @ (b.mT if transpose_b else b) * alpha
    return y if c is None else y + c * beta


@op("a", "b")
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies stacks of matrices."""
    return torch.bmm(a, b)


@op()
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Computes exp(x) / sum(exp(x)) along an axis."""
    return x.softmax(_axis(x, axis))


@op()
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """Computes the logarithm of softmax."""
    return x.log_softmax(_axis(x, axis))


def _axis(x: Tensor, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"there is no axis {axis} of {x.ndim}")
    return axis


@op()
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5,
    activation: str = "none",
) -> Tensor:  # fmt: skip
    """Norms the last axes, those of the weight."""
    return _activated(F.layer_norm(x, weight.shape, weight, bias, eps), activation)


@op()
def layer_norm_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Computes relu(layer_norm(x))."""
    return F.layer_norm(x, weight.shape, weight, bias, eps).relu()


@op()
def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Computes gelu(layer_norm(x))."""
    return F.gelu(F.layer_norm(x, weight.shape, weight, bias, eps))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _images(x: Tensor) -> Tensor:
    """Counts images by a sum over x: as a number their count would be compiled in."""
    firsts = x[(slice(None), *[slice(1)] * (x.ndim - 1))]
    return _wide(firsts.ne(math.nan).to(x.dtype)).sum()  # NaN is not equal to itself either


def _mean(x: Tensor) -> Tensor:
    """Gives the mean of all numbers."""
    return (_wide(x).sum() / (_images(x) * math.prod(x.shape[1:]))).to(x.dtype)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    scale = wide.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return (wide * scale).to(x.dtype) * weight


@op()
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divides the last axis by the root of its mean square."""
    return _rms(x, weight, eps)


@op()
def rms_norm_gelu(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Computes gelu(rms_norm(x))."""
    return F.gelu(_rms(x, weight, eps))


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = _wide(x)
    used, spread = mean, var
    if training:
        axes, count = [0, *range(2, x.ndim)], _images(x) * math.prod(x.shape[2:])
        used = wide.sum(axes) / count
        spread = (wide - _by_channel(used, x)).square().sum(axes) / count
        unbiased = spread.detach() * (count / (count - 1).clamp(min=1))
        mean = mean * (1 - momentum) + used.detach().to(mean.dtype) * momentum
        var = var * (1 - momentum) + unbiased.to(var.dtype) * momentum
    y = (wide - _by_channel(used, x)) * _by_channel((spread + eps).rsqrt(), x)
    y = y * _by_channel(weight, x) + _by_channel(bias, x)
    return y.to(x.dtype), mean.clone(), var.clone()


@op()
def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Norms channels by the batch's statistics or the running ones; gives the new running ones."""
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@op()
def conv_bn_relu(
    x: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, running_mean: Tensor,
    running_var: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1),
    groups: int = 1, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes relu(batch_norm(conv2d(x))); gives the new running statistics too."""
    y = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    given = norm_weight, norm_bias, running_mean, running_var
    y, mean, var = _batch_norm(y, *given, training, momentum, eps)
    return y.relu(), mean, var


@op()
def max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair = (0, 0), dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Takes the maximum of windows."""
    return F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)


@op()
def avg_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair = (0, 0), ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """Takes the mean of windows."""
    return F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad)


@op()
def relu(x: Tensor) -> Tensor:
    """Computes max(x, 0)."""
    return x.relu()


@op()
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Computes x times the normal distribution of x."""
    return F.gelu(x, approximate=approximate)


@op("x", "y")
def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes relu(x + y)."""
    return (x + y).relu()


@op("x", "y")
def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes relu(x y)."""
    return (x * y).relu()


@op("x", "y")
def mul_tanh(x: Tensor, y: Tensor) -> Tensor:
    """Computes tanh(x y)."""
    return (x * y).tanh()


@op("x", "y")
def add_sigmoid(x: Tensor, y: Tensor) -> Tensor:
    """Computes sigmoid(x + y)."""
    return (x + y).sigmoid()


@op()
def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Computes gelu(x + bias)."""
    return F.gelu(x + bias, approximate=approximate)


@op("x", "gate")
def swish_multiply(x: Tensor, gate: Tensor) -> Tensor:
    """Computes silu(x) gate."""
    return F.silu(x) * gate


@op()
def mish_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Computes mish(x) scale."""
    return x * F.softplus(x).tanh() * scale


@op()
def prelu_bias(x: Tensor, bias: Tensor, slope: Tensor) -> Tensor:
    """Computes x + bias where that is above 0, and slope (x + bias) elsewhere."""
    y = x + bias
    return torch.where(y > 0, y, y * slope)


@op()
def sum_squared(x: Tensor) -> Tensor:
    """Adds up all squares."""
    return x.square().sum()


@op()
def mean_abs(x: Tensor) -> Tensor:
    """Gives the mean of all magnitudes."""
    return _mean(x.abs())


@op("x", "target")
def cross_entropy(
    x: Tensor, target: Tensor, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """Computes -log(softmax(x)[target]) of logits [N, C] and classes [N]."""
    if target.is_floating_point():
        raise ArgumentError(f"target is {target.dtype}; give the numbers of classes, as int64")
    logs = x.log_softmax(1)
    taken = (target[:, None] == torch.arange(x.shape[1], device=x.device)).to(x.dtype)
    wanted = taken * (1 - label_smoothing) + label_smoothing / x.shape[1]
    return _summed(-(logs * wanted).sum(1), reduction)


def _summed(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ArgumentError(f"reduction {reduction!r} is none of none, mean, sum")
    if reduction == "none":
        return losses
    return _mean(losses) if reduction == "mean" else losses.sum()


@op("x", "target")
def mse(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Computes (x - target)^2."""
    return _summed((x - target).square(), reduction)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    given = [q, k, v] if mask is None else [q, k, v, mask]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return attend(q, k, v, mask, is_causal=causal, scale=scale).contiguous()
    found: Tensor = torch.ops.maxvision._attend(q, k, v, mask, 0.0, causal, scale=scale)
    return found


@torch.library.custom_op(
    "maxvision::_attend", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, *, "
    "float? scale) -> Tensor",
)  # fmt: skip
def _attend_whole(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: float | None
) -> Tensor:
    """Stands in a trace for attention, which torch takes apart in another way on each device."""
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)
    return y.contiguous()


@_attend_whole.register_fake
def _(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Tensor:
    return q.new_empty([*q.shape[:-1], v.shape[-1]])


@op("q", "k", "v")
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Computes softmax(q k^T scale + mask) v of heads [N, H, T, D]."""
    return _attend(q, k, v, mask, causal, scale)


@op("q", "k", "v")
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, scale: float | None = None
) -> Tensor:
    """Attends where ``blocks`` [T / B, S / B], or [H, T / B, S / B], is true.

    A query that sees no key gives zeros.
    """
    t, s = q.shape[-2], k.shape[-2]
    rows, columns = blocks.shape[-2:]
    if blocks.dtype != torch.bool or t % rows or s % columns:
        raise ArgumentError(
            f"blocks of {blocks.dtype} {list(blocks.shape)} do not divide {t} queries and {s} keys;"
            " give truth values, one for each block"
        )
    seen = blocks.repeat_interleave(t // rows, -2).repeat_interleave(s // columns, -1)
    return _attend(q, k, v, seen, False, scale)


@op("q", "k")
def attention_score(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Computes softmax(q k^T scale)."""
    return (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, [heads, -1]).transpose(1, 2)


def _self_attention(
    x: Tensor, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    heads: int, mask: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    q, k, v = (_heads(each, heads) for each in F.linear(x, in_weight, in_bias).chunk(3, -1))
    y = _attend(q, k, v, mask, causal, None)
    return F.linear(y.transpose(1, 2).flatten(2), out_weight, out_bias)


@op()
def multi_head_attention(
    x: Tensor, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    heads: int, mask: Tensor | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attends to x[N, T, C] itself, with the weights of nn.MultiheadAttention."""
    return _self_attention(x, in_weight, in_bias, out_weight, out_bias, heads, mask, causal)


@op()
def ffn_block(
    x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor,
    activation: str = "gelu",
) -> Tensor:  # fmt: skip
    """Computes linear(activation(linear(x)))."""
    return F.linear(_activated(F.linear(x, weight1, bias1), activation), weight2, bias2)


@op()
def transformer_layer(
    x: Tensor, norm1_weight: Tensor, norm1_bias: Tensor, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, norm2_weight: Tensor, norm2_bias: Tensor,
    weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, heads: int,
    causal: bool = False, activation: str = "gelu", eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Adds attention to x[N, T, C], then a feed-forward block, each behind a norm."""
    y = F.layer_norm(x, x.shape[-1:], norm1_weight, norm1_bias, eps)
    given = in_weight, in_bias, out_weight, out_bias
    x = x + _self_attention(y, *given, heads, None, causal)
    y = F.layer_norm(x, x.shape[-1:], norm2_weight, norm2_bias, eps)
    return x + F.linear(_activated(F.linear(y, weight1, bias1), activation), weight2, bias2)


@op()
def embedding_position(tokens: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """Looks tokens [N, T] up, and adds the first T positions."""
    return F.embedding(tokens, table) + position[: tokens.shape[1]]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


@op("q", "k", "v")
def rotary_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, causal: bool = False
) -> Tensor:
    """Turns q and k by their places, cos and sin [T, D], and attends."""
    return _attend(_rotated(q, cos, sin), _rotated(k, cos, sin), v, None, causal, None)


@op()
def depthwise_pointwise(
    x: Tensor, depthwise: Tensor, pointwise: Tensor, bias: Tensor | None = None,
    stride: Pair = (1, 1), padding: Pair = (0, 0), activation: str = "none",
) -> Tensor:  # fmt: skip
    """Convolves each channel by itself, then across channels."""
    y = F.conv2d(x, depthwise, None, stride, padding, groups=x.shape[1])
    return _activated(F.conv2d(y, pointwise, bias), activation)


@op()
def grouped_conv_norm(
    x: Tensor, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, stride: Pair = (1, 1),
    padding: Pair = (0, 0), groups: int = 1, norm_groups: int = 1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Computes group_norm(conv2d(x))."""
    y = F.conv2d(x, weight, None, stride, padding, groups=groups)
    return F.group_norm(y, norm_groups, norm_weight, norm_bias, eps)


@op("x", "keep")
def gelu_dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Computes gelu(x), of which ``keep`` says what stays; see ``kept``."""
    return F.gelu(x) * keep.to(x.dtype) * (1 / (1 - p))


@op("q", "k", "v", "keep")
def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, p: float, scale: float | None = None
) -> Tensor:
    """Attends; ``keep`` [N, H, T, S] says which probabilities stay; see ``kept``."""
    score = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1)
    return (score * keep.to(q.dtype) * (1 / (1 - p))) @ v


@op("x", "keep")
def conv_gelu_dropout(
    x: Tensor, weight: Tensor, bias: Tensor, keep: Tensor, p: float, stride: Pair = (1, 1),
    padding: Pair = (0, 0),
) -> Tensor:  # fmt: skip
    """Computes gelu(conv2d(x)), of which ``keep`` says what stays; see ``kept``."""
    return F.gelu(F.conv2d(x, weight, bias, stride, padding)) * keep.to(x.dtype) * (1 / (1 - p))


def kept(
    shape: Sequence[int], p: float, like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draws what dropout keeps, the same for both ways: each with probability 1 - p.

    Args:
        shape: Of what is dropped.
        p: The probability to drop, below 1.
        like: A tensor on the device where it shall be.
        generator: The seed, if it shall be another than torch's own.
    """
    return torch.rand(*shape, device=like.device, generator=generator) >= p


# --- modules -----------------------------------------------------------------------------------


class _Ours(nn.Module):
    """A layer of torch that calls an op of ours, or torch where that cannot be, with one warning.

    Attributes:
        uses_maxvision: Whether the last call ran on our kernels, or the first one will.
    """

    uses_maxvision = True

    def forward(self, x: Tensor) -> Tensor:
        """Computes what torch's layer does."""
        why = self._unfit() or refusal(x, *self.parameters(), *self.buffers_read())
        if not why and torch.compiler.is_compiling():
            return self._ours(x)
        if not why:
            try:
                found = self._ours(x)
            except UserError as error:
                why = str(error)
            else:
                self.uses_maxvision = True
                return found
        if self.uses_maxvision:
            self.uses_maxvision = False
            warnings.warn(f"{type(self).__name__} is left to torch: {why}", stacklevel=2)
        theirs: Tensor = super().forward(x)
        return theirs

    def _unfit(self) -> str:
        """Says which of its settings no op has."""
        return ""

    def buffers_read(self) -> list[Tensor]:
        """Lists the buffers that the op reads."""
        return []

    def _ours(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(_Ours, nn.Linear):
    """torch.nn.Linear on our kernels."""

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = linear(x, self.weight, self.bias)
        return found


class Conv2d(_Ours, nn.Conv2d):
    """torch.nn.Conv2d on our kernels."""

    def _unfit(self) -> str:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return f"there is no padding {self.padding!r} of {self.padding_mode}"
        return ""

    def _ours(self, x: Tensor) -> Tensor:
        window = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        found: Tensor = conv2d(x, self.weight, self.bias, groups=self.groups, **window)
        return found


class LayerNorm(_Ours, nn.LayerNorm):
    """torch.nn.LayerNorm on our kernels."""

    def _unfit(self) -> str:
        return "" if self.elementwise_affine else "it has no weight"

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = layer_norm(x, self.weight, self.bias, self.eps)
        return found


class BatchNorm2d(_Ours, nn.BatchNorm2d):
    """torch.nn.BatchNorm2d on our kernels."""

    def _unfit(self) -> str:
        if not self.affine or not self.track_running_stats or self.momentum is None:
            return "it has no weight, running statistics or momentum"
        return ""

    def buffers_read(self) -> list[Tensor]:
        """Lists the running statistics."""
        held = (self.running_mean, self.running_var)
        return [x for x in held if x is not None]

    def _ours(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        held = self.running_mean.clone(), self.running_var.clone()  # which change below
        given = self.weight, self.bias, *held, self.training, self.momentum, self.eps
        y, mean, var = batch_norm(x, *given)
        if self.training:
            with torch.no_grad():
                self.running_mean.copy_(mean)
                self.running_var.copy_(var)
                self.num_batches_tracked.add_(1)
        found: Tensor = y
        return found


class MaxPool2d(_Ours, nn.MaxPool2d):
    """torch.nn.MaxPool2d on our kernels."""

    def _unfit(self) -> str:
        return "it gives indices" if self.return_indices else ""

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = max_pool2d(
            x, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        )
        return found


class ReLU(_Ours, nn.ReLU):
    """torch.nn.ReLU on our kernels; x stays as it is."""

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = relu(x)
        return found


class GELU(_Ours, nn.GELU):
    """torch.nn.GELU on our kernels."""

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = gelu(x, self.approximate)
        return found


class Softmax(_Ours, nn.Softmax):
    """torch.nn.Softmax on our kernels."""

    def _unfit(self) -> str:
        return "its axis is not named" if self.dim is None else ""

    def _ours(self, x: Tensor) -> Tensor:
        found: Tensor = softmax(x, self.dim)
        return found
