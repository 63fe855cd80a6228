"""Steps of optimizers on our kernels: all parameters of a network in one launch.

    optimizer = torch_ops.AdamW(net.parameters(), lr=1e-3)

The classes are torch's, with another ``step``: they have its settings, its ``state_dict`` and its
schedulers. The ops ``sgd_`` and ``adam_`` take lists of tensors, which they change in place.

A kernel (ops/optimizer.mojo) is told where the tensors lie, and gets the settings of each parameter
as numbers. It is compiled once for a dtype and a device: for all networks, groups of parameters,
steps and learning rates.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from maxvision.bridge.refusal import misplaced
from maxvision.common.errors import ArgumentError

CHUNK = 4096
"""Numbers that the kernel updates at a time (ops/optimizer.mojo)."""
STATES = 3
"""Of a parameter, at most."""
SETTINGS = 10
"""Numbers that a step takes of each parameter."""
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float64),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""What parameters may be."""


# --- ops ---------------------------------------------------------------------------------------


def sgd_settings(
    lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
    nesterov: bool = False, maximize: bool = False, first: bool = False,
) -> list[float]:  # fmt: skip
    """Gives the numbers of a parameter's step of ``sgd_``; see torch.optim.SGD.

    Args:
        lr: The learning rate.
        momentum: How much of the momentum stays.
        dampening: How much of the gradient does not get into it.
        weight_decay: How much of the parameter is added to the gradient.
        nesterov: Whether to look ahead.
        maximize: Whether to climb.
        first: Whether there has been no step: then the momentum is 0, and gets all of the gradient.
    """
    keep, take = (0.0, 1.0) if first else (momentum, 1 - dampening)
    sign, look = -1.0 if maximize else 1.0, momentum if nesterov else 0.0
    return [lr, sign, weight_decay, keep, take, look, *[0.0] * (SETTINGS - 6)]


def adam_settings(
    step: float, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 0.0, decoupled: bool = True, maximize: bool = False,
) -> list[float]:  # fmt: skip
    """Gives the numbers of a parameter's step of ``adam_``; see torch.optim.Adam.

    Args:
        step: Which step it is, from 1 on.
        lr: The learning rate.
        betas: How much stays of the mean gradient, and of that of its squares.
        eps: Added to what is divided by.
        weight_decay: How much of the parameter is taken away.
        decoupled: Whether from it, times ``lr``, as AdamW has it, rather than by the gradient.
        maximize: Whether to climb.
    """
    one, two = betas
    size, root = lr / (1 - one**step), (1 - two**step) ** -0.5
    decay, shrink = (0.0, lr * weight_decay) if decoupled else (weight_decay, 0.0)
    sign = -1.0 if maximize else 1.0
    return [size, sign, decay, shrink, one, 1 - one, two, 1 - two, root, eps]


@torch.library.custom_op(
    "maxvision::sgd_", mutates_args=("params", "momenta"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momenta, Tensor settings) -> ()",
)  # fmt: skip
def sgd_(
    params: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], settings: Tensor
) -> None:
    """Takes a step of stochastic gradient descent with each parameter, in one launch.

    Args:
        params: What is changed: of one dtype, on one device, without holes in their memory.
        grads: Their gradients, in their shapes and dtype.
        momenta: Their momenta, like them; zeros before the first step. An empty list if there are
            none.
        settings: A row of ``sgd_settings`` for each, or one for all; on any device.

    Raises:
        ArgumentError: If they do not go together.
    """
    _step("sgd_", {"params": params, "grads": grads, "momenta": momenta}, settings)


@torch.library.custom_op(
    "maxvision::adam_", mutates_args=("params", "means", "squares", "largest"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor(d!)[] largest, Tensor settings) -> ()",
)  # fmt: skip
def adam_(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor],
    squares: Sequence[Tensor], largest: Sequence[Tensor], settings: Tensor,
) -> None:  # fmt: skip
    """Takes a step of Adam with each parameter, in one launch.

    Args:
        params: What is changed: of one dtype, on one device, without holes in their memory.
        grads: Their gradients, in their shapes and dtype.
        means: The mean gradients, like them; zeros before the first step.
        squares: Those of the gradients' squares, likewise.
        largest: The largest of these, for amsgrad; an empty list otherwise.
        settings: A row of ``adam_settings`` for each, or one for all; on any device.

    Raises:
        ArgumentError: If they do not go together.
    """
    given = {"params": params, "grads": grads, "means": means, "squares": squares}
    _step("adam_", {**given, "largest": largest}, settings)


@sgd_.register_fake
@adam_.register_fake
def _(*_: Any) -> None:
    return None


def _step(op: str, lists: dict[str, Sequence[Tensor]], settings: Tensor) -> None:
    """Takes a step: tells the kernel where everything lies."""
    params, grads, *states = lists.values()
    if not params:
        return
    if why := _unfit(lists, settings):
        raise ArgumentError(f"torch_ops.{op}: {why}")
    grads = [_like(g, p) for g, p in zip(grads, params, strict=True)]
    places = np.zeros((len(params), 4 + STATES), np.int64)
    for i, tensors in enumerate([params, grads, *states]):
        if tensors:
            places[:, i] = [x.data_ptr() for x in tensors]
    sizes = np.array([x.numel() for x in params])
    places[:, -2] = sizes
    places[1:, -1] = np.cumsum(-(-sizes // CHUNK))[:-1]
    dtype, device = params[0].dtype, params[0].device
    rows = settings.detach().expand(len(params), SETTINGS).to(device, _settings_of(dtype))
    _kernel(dtype, device)(torch.from_numpy(places).to(device), rows.contiguous())


def _unfit(lists: dict[str, Sequence[Tensor]], settings: Tensor) -> str:
    """Says why tensors do not go together; nothing if they do."""
    params = lists["params"]
    first, count = params[0], len(params)
    if why := refused(first):
        return why
    if settings.shape not in ((SETTINGS,), (1, SETTINGS), (count, SETTINGS)):
        return f"settings is {list(settings.shape)} but has to be [{count}, {SETTINGS}]"
    kinds = [_kind(x) for x in params]
    for name, tensors in lists.items():
        if len(tensors) != count and (tensors or name not in ("momenta", "largest")):
            return f"there are {len(tensors)} {name} of {count} params"
        if tensors is not params and [_kind(x) for x in tensors] == kinds:
            continue  # what follows takes long
        for i, (x, p) in enumerate(zip(tensors, params, strict=False)):
            if why := _unlike(x, p, first, name, i):
                return why
    return ""


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.device, x.layout, x.shape, x.stride() if x.layout == torch.strided else None


def _unlike(x: Tensor, p: Tensor, first: Tensor, name: str, i: int) -> str:
    """Says why a tensor does not go with its parameter, and that with the first; or nothing."""
    if x.dtype != first.dtype or x.device != first.device:
        other = f"{first.dtype} on {first.device}".removeprefix("torch.")
        what = f"{x.dtype} on {x.device}".removeprefix("torch.")
        return f"{name}[{i}] is {what} but params[0] is {other}"
    if x.shape != p.shape:
        return f"{name}[{i}] is {list(x.shape)} but params[{i}] is {list(p.shape)}"
    if x.layout != torch.strided:
        return f"{name}[{i}] is sparse"
    if x is p and not _dense(x):
        return f"params[{i}] has holes in its memory"
    if name not in ("params", "grads") and not _alike(x, p):
        return f"{name}[{i}] has strides {x.stride()} but params[{i}] has {p.stride()}"
    return ""


def refused(x: Tensor) -> str:
    """Says why no kernel takes a parameter; nothing if one does."""
    if why := misplaced(x.device, x):
        return why
    if x.dtype not in (takes := DTYPES[x.device.type]):
        names = [str(each).removeprefix("torch.") for each in (x.dtype, *takes)]
        where = "CPU" if x.device.type == "cpu" else "GPU"
        return f"a parameter is {names[0]}, and steps on a {where} are in {', '.join(names[1:])}"
    return ""


def _dense(p: Tensor) -> bool:
    """Tells whether a parameter's memory has neither holes nor numbers that count twice."""
    last = p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return p.is_contiguous() or last or bool(is_non_overlapping_and_dense_or_false(p))


def _alike(x: Tensor, p: Tensor) -> bool:
    """Tells whether numbers of a tensor lie as those of a parameter, of its shape, do."""
    return x.stride() == p.stride() or (x.is_contiguous() and p.is_contiguous())


def _like(x: Tensor, p: Tensor) -> Tensor:
    """Lays a tensor as a parameter of its shape lies."""
    return x if _alike(x, p) else torch.empty_like(p).copy_(x)


def _settings_of(dtype: torch.dtype) -> torch.dtype:
    """Names the dtype in which the kernel takes settings."""
    return dtype if dtype == torch.float64 else torch.float32


@functools.cache
def _kernel(dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """Compiles the step, or finds it in the cache."""
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType

    from maxvision.bridge.tensors import InPlace, device_of
    from maxvision.graphs import nodes
    from maxvision.runtime.executor import load

    where = device_of(device)
    place = DeviceRef.from_device(where)
    of, numbers = (DType[str(x).removeprefix("torch.")] for x in (dtype, _settings_of(dtype)))
    types = [
        TensorType(DType.int64, ["tensors", 4 + STATES], device=place),
        TensorType(numbers, ["tensors", SETTINGS], device=place),
    ]

    def build(**ops: Any) -> Graph:
        with Graph("optimizer_step", input_types=types, **ops) as graph:
            places, settings = (x.tensor for x in graph.inputs)
            graph.output(nodes.optimizer_step(places, settings, of))
        return graph

    return InPlace(load(build, where), where, most=0)


# --- optimizers --------------------------------------------------------------------------------


class _Ours(torch.optim.Optimizer):
    """An optimizer of torch whose steps are taken by our kernels, or by torch, with one warning.

    Attributes:
        uses_maxvision: Whether the last step was taken by our kernels, or the first one will.
    """

    uses_maxvision = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step, as torch's optimizer does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.param_groups]
        if why := self._unfit(groups):
            if self.uses_maxvision:
                self.uses_maxvision = False
                warnings.warn(f"{type(self).__name__} is left to torch: {why}", stacklevel=3)
            super().step()
            return loss
        self.uses_maxvision = True
        told: dict[Any, list[Any]] = {}
        for group, params in groups:
            states, settings = self._of(group, params)
            for each in zip(params, settings, *states, strict=True):
                told.setdefault((each[0].dtype, each[0].device, len(states)), []).append(each)
        for several in told.values():
            columns = [list(column) for column in zip(*several, strict=True)]
            params, settings, *states = columns
            rows = torch.tensor(settings, dtype=torch.float64)
            self._take(params, [p.grad for p in params], states, rows)
        return loss

    def _unfit(self, groups: Sequence[tuple[Any, list[Tensor]]]) -> str:
        """Says why our kernels cannot take the step."""
        kinds = {}
        for group, params in groups:
            for setting in ("differentiable", "capturable", "fused", "foreach"):
                if group.get(setting):
                    return f"it is to be {setting}"
            for p in params:
                kinds[p.dtype, p.device] = p
                if p.grad is not None and p.grad.layout != torch.strided:
                    return "a gradient is sparse"
                if not _dense(p):
                    return "a parameter has holes in its memory"
        return next((why for p in kinds.values() if (why := refused(p))), "")

    def _of(
        self, group: Any, params: Sequence[Tensor]
    ) -> tuple[list[list[Tensor]], list[list[float]]]:
        """Gives states of parameters, a list for each kind, and the settings of each parameter."""
        raise NotImplementedError

    def _take(self, params: Any, grads: Any, states: Any, settings: Tensor) -> None:
        """Takes a step with parameters that have as many states."""
        raise NotImplementedError

    def _states(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """Gives a state of each parameter, zeros at first, laid as the parameter is."""
        found = []
        for p in params:
            state = self.state[p]
            if (held := state.get(name)) is None or not _alike(held, p):
                state[name] = torch.zeros_like(p) if held is None else _like(held, p)
            found.append(state[name])
        return found


class SGD(_Ours, torch.optim.SGD):
    """torch.optim.SGD whose step is one launch for all parameters."""

    def _of(self, group: Any, params: Any) -> tuple[list[list[Tensor]], list[list[float]]]:
        named = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
        given = {name: group[name] for name in named}
        rows = [sgd_settings(float(group["lr"]), **given, first=first) for first in (False, True)]
        settings = [rows[self.state[p].get("momentum_buffer") is None] for p in params]
        return [self._states("momentum_buffer", params)] if group["momentum"] else [], settings

    def _take(self, params: Any, grads: Any, states: Any, settings: Tensor) -> None:
        sgd_(params, grads, states[0] if states else [], settings)


class _OfMoments(_Ours):
    """What Adam and AdamW have in common."""

    def _of(self, group: Any, params: Any) -> tuple[list[list[Tensor]], list[list[float]]]:
        if not params:
            return [], []
        held = [self.state[p] for p in params]
        for state in held:
            step = state.get("step", 0.0)
            if not isinstance(step, Tensor) or step.device.type != "cpu":
                state["step"] = torch.tensor(float(step))
        steps = [state["step"] for state in held]
        torch._foreach_add_(steps, torch.ones(()))
        counts = torch.stack(steps).tolist()
        lr, betas = float(group["lr"]), (float(group["betas"][0]), float(group["betas"][1]))
        decoupled = group.get("decoupled_weight_decay", isinstance(self, torch.optim.AdamW))
        more = group["eps"], group["weight_decay"], bool(decoupled), group["maximize"]
        rows = {count: adam_settings(count, lr, betas, *more) for count in {*counts}}
        names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]
        return [self._states(name, params) for name in names], [rows[count] for count in counts]

    def _take(self, params: Any, grads: Any, states: Any, settings: Tensor) -> None:
        adam_(params, grads, states[0], states[1], states[2] if len(states) > 2 else [], settings)


class Adam(_OfMoments, torch.optim.Adam):
    """torch.optim.Adam whose step is one launch for all parameters."""


class AdamW(_OfMoments, torch.optim.AdamW):
    """torch.optim.AdamW whose step is one launch for all parameters."""
