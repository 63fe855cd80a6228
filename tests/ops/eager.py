"""Runs cases op by op, by compiled ops that know no size.

MAX compiles each node of a graph for itself, half a second each, even if it is another's twin. Here
an op is compiled once for its parameters and the dtypes and ranks of its tensors, and serves every
case: all sizes are symbolic, as the ops take them from the tensors at run time anyway. The ops are
graphs of one module, since a compilation takes 12 s whatever it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.engine import Model as Executable
from max.graph import DeviceRef, Dim, Graph, Module, StaticDim, TensorType, TensorValue, ops

from maxvision.graphs.parameters import Parameters
from maxvision.runtime.cache import library
from tests.ops.cases import Case

Kind = tuple[DType, int]
"""Dtype and rank."""


@dataclass(frozen=True)
class Op:
    """What is compiled."""

    name: str
    parameters: tuple[tuple[str, Any], ...]
    inputs: tuple[Kind, ...]
    outputs: tuple[Kind, ...]

    def add_to(self, module: Module, name: str) -> None:
        """Adds a graph of one node. More inputs, of rank 1, are as long as the outputs' sizes."""
        here = DeviceRef.CPU()
        numbers = itertools.count()
        inputs, outputs = (
            [TensorType(dtype, [f"d{next(numbers)}" for _ in range(rank)], here)
             for dtype, rank in kinds]
            for kinds in (self.inputs, self.outputs)
        )  # fmt: skip
        sizes = [TensorType(DType.uint8, [dim], here) for out in outputs for dim in out.shape]
        with Graph(
            name,
            input_types=[*inputs, *sizes],
            custom_extensions=[library(gpu=False)],
            module=module,
        ) as graph:
            values = graph.inputs[: len(inputs)]
            parameters = dict(self.parameters)
            results = ops.custom(self.name, here, values, outputs, parameters=parameters)
            graph.output(*results)


@dataclass(frozen=True)
class Node:
    """An op between tensors of a case; none gives one another order, shape or dtype."""

    op: Op | None
    inputs: Sequence[TensorValue]
    outputs: Sequence[TensorValue]
    axes: Sequence[int] = ()


class Trace:
    """What a case adds to a graph.

    Args:
        case: The case.
        dtype: Of its activations and filters.

    Attributes:
        nodes: The ops, in order.
    """

    def __init__(self, case: Case, dtype: DType) -> None:
        here = DeviceRef.CPU()
        self.nodes: list[Node] = []
        self.constants: dict[Any, torch.Tensor] = {}
        self.weights: dict[Any, str] = {}
        self.concatenated: dict[Any, tuple[Sequence[TensorValue], int]] = {}
        self.parameters = Parameters(case.data(1)[1], here, dtype)
        kind = DType.uint8 if case.levels else dtype
        types = [TensorType(kind, ["batch", *shape], here) for shape in case.inputs]
        recorders = (
            self._custom, self._constant, self._constant_external, self._concat, self._reshape,
            self._permute, self._cast,
        )  # fmt: skip
        with ExitStack() as stack:
            extensions = [library(gpu=False)]
            graph = stack.enter_context(
                Graph("case", input_types=types, custom_extensions=extensions)
            )
            for recorder in recorders:
                name = recorder.__name__[1:]
                recording = partial(recorder, getattr(ops, name))
                stack.enter_context(mock.patch.object(ops, name, recording))
            self.inputs = [value.tensor for value in graph.inputs]
            self.output = case.build(self.parameters, *self.inputs)

    def _custom(
        self,
        custom: Callable[..., list[Any]],
        name: str,
        device: DeviceRef,
        values: Sequence[TensorValue],
        out_types: Sequence[TensorType],
        parameters: dict[str, Any] | None = None,
    ) -> list[Any]:
        results = custom(name, device, values, out_types, parameters=parameters)
        inputs = tuple((value.dtype, value.rank) for value in values)
        outputs = tuple((out.dtype, out.rank) for out in out_types)
        op = Op(name, tuple(sorted((parameters or {}).items())), inputs, outputs)
        self.nodes.append(Node(op, values, [result.tensor for result in results]))
        return results

    def _constant(
        self, constant: Callable[..., TensorValue], value: np.ndarray, *more: Any, **named: Any
    ) -> TensorValue:
        result = constant(value, *more, **named)
        self.constants[result.to_mlir()] = torch.from_numpy(value)
        return result

    def _constant_external(
        self, constant_external: Callable[..., TensorValue], name: str, *more: Any
    ) -> TensorValue:
        result = constant_external(name, *more)
        self.weights[result.to_mlir()] = name
        return result

    def _concat(
        self, concat: Callable[..., TensorValue], values: Sequence[TensorValue], axis: int
    ) -> TensorValue:
        result = concat(values, axis)
        self.concatenated[result.to_mlir()] = values, axis
        return result

    def _reshape(
        self, reshape: Callable[..., TensorValue], x: TensorValue, shape: Any
    ) -> TensorValue:
        result = reshape(x, shape)
        self.nodes.append(Node(None, [x], [result]))
        return result

    def _permute(
        self, permute: Callable[..., TensorValue], x: TensorValue, axes: list[int]
    ) -> TensorValue:
        result = permute(x, axes)
        self.nodes.append(Node(None, [x], [result], axes))
        return result

    def _cast(self, cast: Callable[..., TensorValue], x: TensorValue, dtype: DType) -> TensorValue:
        result = cast(x, dtype)
        self.nodes.append(Node(None, [x], [result]))
        return result

    def run(self, executables: dict[Op, Executable], given: Sequence[Buffer]) -> torch.Tensor:
        """Computes the case's output for a batch of inputs."""
        batch = given[0].shape[0]
        registry = self.parameters.registry(CPU())
        tensors: dict[Any, Buffer] = {
            **{at: Buffer.from_dlpack(value) for at, value in self.constants.items()},
            **{at: registry[name] for at, name in self.weights.items()},
        }
        tensors.update(zip((value.to_mlir() for value in self.inputs), given, strict=True))
        for node in self.nodes:
            sizes = [_length(dim, batch) for value in node.outputs for dim in value.shape]
            inputs = [tensors[value.to_mlir()] for value in node.inputs]
            if node.axes:
                moved = torch.from_dlpack(inputs[0]).permute(*node.axes).contiguous()
                results = [Buffer.from_dlpack(moved)]
            elif node.op is None:
                found = inputs[0].view(inputs[0].dtype, sizes)
                results = [_cast(found, node.outputs[0].dtype)]
            else:
                results = executables[node.op].execute(*inputs, *map(_zeros, sizes))
            tensors.update(zip((v.to_mlir() for v in node.outputs), results, strict=True))
        output = self.output.to_mlir()
        values, axis = self.concatenated.get(output, ([self.output], 0))
        parts = [torch.from_dlpack(tensors[value.to_mlir()]) for value in values]
        return torch.cat(parts, axis)


def _cast(x: Buffer, dtype: DType) -> Buffer:
    return (
        x
        if x.dtype == dtype
        else Buffer.from_dlpack(torch.from_dlpack(x).to(getattr(torch, dtype.name)))
    )


def _length(dim: Dim, batch: int) -> int:
    """Evaluates a size: a number, or a multiple of the batch."""
    numbers = [part for part in str(dim).split(" * ") if part.isdecimal()]
    factor = 1 if isinstance(dim, StaticDim) else batch
    return factor * math.prod(map(int, numbers))


@cache
def _zeros(count: int) -> Buffer:
    return Buffer.from_numpy(np.zeros(count, np.uint8))


def compile_ops(traces: Iterable[Trace]) -> dict[Op, Executable]:
    """Compiles the ops of the cases."""
    names = {node.op: "" for trace in traces for node in trace.nodes if node.op}
    module = Module()
    for i, op in enumerate(names):
        names[op] = f"{op.name}_{i}"
        op.add_to(module, names[op])
    session = InferenceSession(devices=[CPU()])
    compiled = session.compile(module, custom_extensions=[library(gpu=False)])
    executables = session.init_all(compiled)
    return {op: executables[name] for op, name in names.items()}
