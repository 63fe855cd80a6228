"""A graph of TorchDynamo with gradients: its steps forward and backward on our kernels.

AOTAutograd writes both down as graphs of ATen ops, which take the weights as inputs, as these
change from step to step. Each is cut as a graph for inference is (bridge/parts.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from maxvision.bridge import attention, gradients
from maxvision.bridge.parts import (
    LAST,
    Explanation,
    as_torch_has_them,
    at_once,
    cut,
    leave,
    load,
    may_lie_last,
)
from maxvision.bridge.tensors import device_of
from maxvision.common.errors import ModelError


def trained(
    graph: fx.GraphModule,
    example: Sequence[Any],
    told: Explanation,
    *,
    run: bool,
    only: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with gradients.

    Args:
        graph: The graph, whose weights are among its inputs.
        example: Its inputs.
        told: Where to say what became of it.
        run: Whether it shall run, or only be looked at.
        only: The kinds of ops that our kernels may compute; see ``cut``.

    Raises:
        ModelError: If sizes of its inputs change.
    """
    if any(isinstance(each, torch.SymInt) for each in example):
        raise ModelError("sizes change from step to step; give torch.compile dynamic=False")
    if only is None or "attention" in only:
        graph = attention.whole(graph)
    compiler = partial(_compiled, told=told, run=run, only=only)
    either = compiler if run else lambda module, _: _boxed(module)
    # What attention saves has a rule here, and so has what resizes images.
    with sdpa_kernel(SDPBackend.MATH), gradients.resizing_whole():
        made: Callable[..., Any] = aot_autograd(
            fw_compiler=either,
            bw_compiler=either,
            inference_compiler=compiler,
            decompositions=gradients.decompositions(),
            partition_fn=partial(_partitioned, look=None if run else compiler),
        )(graph, example)
    return made


def _partitioned(
    joint: fx.GraphModule, *given: Any, look: Callable[..., Any] | None, **named: Any
) -> Any:
    """Divides a graph of both ways, so that little is saved in between.

    AOTAutograd has the way back compiled when it is first taken; ``look`` sees both now.
    """
    gradients.lean(joint.graph)
    gradients.masks_of_batch_norms(joint.graph)
    forward, backward = min_cut_rematerialization_partition(joint, *given, **named)
    _keep_as_kernels_have_it(forward, backward, named["num_fwd_outputs"])
    if look is not None:
        for each in (forward, backward):
            look(each, [node.meta["val"] for node in each.graph.find_nodes(op="placeholder")])
    return forward, backward


def _keep_as_kernels_have_it(
    forward: fx.GraphModule, backward: fx.GraphModule, results: int
) -> None:
    """Marks the images that are kept for the way back, which nobody else sees."""
    (last,) = forward.graph.find_nodes(op="output")
    made: Any = last.args[0]
    readers = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for node in made[results:]:
        if may_lie_last(node) and node.op == "call_function" and node not in made[:results]:
            for each in (node, readers[node.name]):
                each.meta[LAST] = True


def _compiled(
    module: fx.GraphModule,
    example: Sequence[Any],
    *,
    told: Explanation,
    run: bool,
    only: Collection[str] | None,
) -> Callable[..., Any]:
    whole = fx.GraphModule(module, copy.deepcopy(module.graph))  # torch runs the other
    places = {each.device for each in example if isinstance(each, Tensor)}
    try:
        device = device_of(places.pop() if places else torch.device("cpu"))
        with (
            _disable_current_modes(),
            torch._guards.tracing(None),
        ):  # constants are computed, not traced
            pieces = at_once() if run else 1
            found, parts = cut(whole, {}, device, told, exact=True, only=only, pieces=pieces)
            if run:
                load(parts)
    except Exception as error:  # the way back is compiled when nobody else can catch it
        leave(told, error, run=run)
        gradients.with_saved(module)
        as_torch_has_them(module)
        return _boxed(module)
    for each in (module, found, *found.children()):
        if isinstance(each, fx.GraphModule):
            gradients.with_saved(each)
    return _boxed(found if run else module)


def _boxed(module: fx.GraphModule) -> Callable[..., Any]:
    """Takes the inputs as one list, which it empties: what nobody needs any more is freed."""

    def call(inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return module(*given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
