"""Programs compiled as the graphs of one module: a compilation costs 12 s whatever it holds."""

from __future__ import annotations

from typing import Any

from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, Module, TensorType

from maxvision.graphs import nodes, passes
from maxvision.graphs.lower import backend, bind, emit
from maxvision.runtime.cache import library
from tests.graphs.interpret import Interpreted


class Late(Interpreted):
    """Stands for an executor: interpreted until ``compile_together``, compiled from then on."""

    executed: Executable | None = None

    def execute(self, *buffers: Buffer) -> list[Buffer]:
        """Computes the outputs."""
        return self.executed.execute(*buffers) if self.executed else super().execute(*buffers)


def compile_together(made: list[Any], dtype: str) -> None:
    """Compiles programs that were interpreted so far."""
    device, place = CPU(), DeviceRef.CPU()
    module, registry = Module(), {}
    for number, each in enumerate(made):
        final = passes.run(each.program, backend(place, dtype))
        weights = bind([final], each.tensors, place, dtype)
        weights.suffix = f".{number}"
        types = [
            TensorType(DType[t.dtype], nodes.dims(t.shape), place) for t in final.inputs.values()
        ]
        with Graph(
            f"program_{number}",
            input_types=types,
            custom_extensions=[library(gpu=False)],
            module=module,
        ) as graph:
            graph.output(*emit(final, [x.tensor for x in graph.inputs], weights))
        registry.update(weights.registry(device))
    session = InferenceSession(devices=[device])
    compiled = session.compile(module, custom_extensions=[library(gpu=False)])
    models = session.init_all(compiled, weights_registry=registry)
    for number, each in enumerate(made):
        each.executed = models[f"program_{number}"]
