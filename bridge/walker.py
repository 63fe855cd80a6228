"""Walks a graph of ATen ops, and makes a program of it op by op.

bridge/aten.py says what each op is here. What no input decides is computed once, by torch, and
becomes a weight: position tables, masks, filters that are standardised.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from maxvision.bridge import aten
from maxvision.bridge.fx import origin, size_of, type_of
from maxvision.bridge.importer import PROBES, Importer, Known, Missing, Unsupported
from maxvision.common.errors import ArgumentError
from maxvision.graphs.net import Value
from maxvision.graphs.types import BATCH, Size, at_batch


class Walker(Importer):
    """A program in the making, of a graph of ATen ops.

    Attributes:
        env: What each node of the graph is.
        absent: The nodes that could not be translated, and why; ``missing`` lists the same.
    """

    def __init__(self, name: str, reserved: set[str]) -> None:
        super().__init__(name, reserved)
        self.env: dict[Node, Any] = {}
        self.absent: dict[Node, Missing] = {}

    def visit(self, node: Node, module: GraphModule) -> None:
        """Translates a node that is neither an input nor the output."""
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            self.env[node] = Known((constant.cpu() if isinstance(constant, Tensor) else constant,))
        elif node.op == "call_function":
            self.call(node)

    def call(self, node: Node) -> None:
        """Translates a node: computes it if it is known, else adds an op."""
        self.net.origin = origin(node)
        args, kwargs = self.given(node.args), self.given(node.kwargs)
        target = node.target
        if target is operator.getitem:
            self.env[node] = args[0][args[1]]
        elif _is_size(node.meta.get("val")):
            self.env[node] = size_of(node.meta["val"])
        elif target in aten.SHAPE_ONLY or not any(
            isinstance(x, Value) for x in _leaves((args, kwargs))
        ):
            self.env[node] = self.compute(node)
        elif (rule := aten.RULES.get(target)) is None:
            self.miss(node, "there is no such op here")
        else:
            try:
                self.env[node] = found = rule(self, node, *args, **kwargs)
                if isinstance(found, list) and any(found[i] is None for i in _read(node)):
                    raise Unsupported("a result that has no kernel is read")
            except (Unsupported, ArgumentError) as why:
                self.miss(node, str(why))

    def given(self, value: Any) -> Any:
        """Replaces the nodes of an argument by what they are."""
        if isinstance(value, Node):
            return self.env[value]
        if isinstance(value, (list, tuple)):
            return type(value)(self.given(each) for each in value)
        if isinstance(value, dict):
            return {key: self.given(each) for key, each in value.items()}
        return value

    def miss(self, node: Node, why: str) -> None:
        """Notes an op that cannot be translated, and goes on with the types that it gives."""
        self.absent[node] = Missing(str(node.target), why, self.net.origin)
        self.missing.append(self.absent[node])
        found = node.meta["val"]
        several = isinstance(found, (tuple, list))
        values = [
            self.net.unknown(type_of(each)) if isinstance(each, Tensor) else None
            for each in (found if several else [found])
        ]
        self.env[node] = values if several else values[0]

    def compute(self, node: Node) -> Any:
        """Computes a node whose values no input decides, by torch."""
        leaves = list(_leaves((self.given(node.args), self.given(node.kwargs))))
        hangs = any(
            isinstance(x, str) or (isinstance(x, Value) and _is_named(x.shape))
            or (isinstance(x, Known) and len(x.values) > 1)
            for x in leaves
        )  # fmt: skip
        found = []
        for i, batch in enumerate(PROBES if hangs else PROBES[:1]):
            args, kwargs = (
                _concrete(self.given(part), i, batch) for part in (node.args, node.kwargs)
            )
            kwargs.pop("device", None)
            found.append(node.target(*args, **kwargs))  # type: ignore[operator]
        first = found[0]
        if not isinstance(first, (tuple, list)):
            return _folded(found)
        return [_folded([each[i] for each in found]) for i in range(len(first))]


def paths(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Lists what containers hold, each behind the keys, fields and indices that lead to it."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    else:
        yield (), value
        return
    for key, part in items:
        yield from (((str(key), *path), leaf) for path, leaf in paths(part))


def _leaves(value: Any) -> Iterator[Any]:
    return (leaf for _, leaf in paths(value))


def _read(node: Node) -> Iterator[int]:
    """Lists which of a node's tensors others read."""
    for user in node.users:
        if user.target is operator.getitem and user.users:
            number: Any = user.args[1]
            if isinstance(node.meta["val"][number], Tensor):
                yield number


def _is_size(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool)


def _is_named(shape: Sequence[Size]) -> bool:
    return any(isinstance(size, str) for size in shape)


def _concrete(value: Any, probe: int, batch: int) -> Any:
    """Puts a batch in the place of its name, and tensors in that of what is known."""
    if isinstance(value, Known):
        return value.values[min(probe, len(value.values) - 1)]
    if isinstance(value, Value):  # only its shape counts
        shape = [at_batch(size, batch) for size in value.shape]
        return torch.empty(shape, dtype=getattr(torch, value.type.dtype))
    if isinstance(value, str) and value.endswith(BATCH):
        return at_batch(value, batch)
    if isinstance(value, (list, tuple)):
        return type(value)(_concrete(each, probe, batch) for each in value)
    if isinstance(value, dict):
        return {key: _concrete(each, probe, batch) for key, each in value.items()}
    return value


def _folded(found: list[Any]) -> Any:
    if not isinstance(found[0], Tensor):
        return found[0]
    if len(found) > 1 and found[0].shape == found[1].shape and _equal(*found):
        found = found[:1]
    return Known(tuple(found))


def _equal(a: Tensor, b: Tensor) -> bool:
    same = a == b
    if a.is_floating_point():
        same = same | (a.isnan() & b.isnan())
    return bool(same.all())
