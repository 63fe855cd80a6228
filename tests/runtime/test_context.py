"""A context of MLIR for one compilation: who builds graphs in it, and what is left of it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from max import mlir
from max._mlir_context import default_mlir_context
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

from maxvision.graphs import nodes
from maxvision.runtime import context
from maxvision.runtime.context import passing
from maxvision.runtime.executor import Unchecked


def graph() -> Graph:
    """Builds a graph that calls an op of ours with a parameter."""
    x = TensorType(DType.float32, ["batch", 4], DeviceRef.CPU())
    with Graph("small", input_types=[x], kernel_library=Unchecked()) as made:
        made.output(nodes.relu(made.inputs[0].tensor))
    return made


def context_of(made: Graph) -> mlir.Context:
    return made.module.mlir_module.context


def test_only_the_thread_that_compiles_has_it() -> None:
    with ThreadPoolExecutor(1) as another, passing():
        here, there = graph(), another.submit(graph).result()
        assert context_of(here) is mlir.Context.current is not default_mlir_context()
        assert context_of(there) is default_mlir_context()
    assert context_of(graph()) is default_mlir_context()


def test_freed_memory_goes_back_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(context.memory, "give_back", lambda: seen.append(left()))
    with passing():
        left = weakref.ref(mlir.Context.current)
        circle: list[object] = [graph()]
        circle.append(circle)
        del circle
    assert seen == [None]


def test_it_goes_with_the_last_graph_that_was_built_in_it() -> None:
    with passing():
        made, left = graph(), weakref.ref(mlir.Context.current)
    assert str(made) == str(graph()) and left() is not None
    del made
    gc.collect()
    assert left() is None
