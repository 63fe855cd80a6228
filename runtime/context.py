"""Compiles in a context of MLIR that goes afterwards, with all that the compiler left in it.

MAX has one context for the life of a process, where a compilation leaves hundreds of MB. It also
keeps, for the next graph, what it has read of a package of ops.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from max import mlir
from max._mlir_context import default_mlir_context
from max.graph import KernelLibrary

from maxvision.common import memory


def _entered() -> mlir.Context:
    """Gives the context that this thread has entered, or else the process's."""
    return mlir.Context.current or default_mlir_context()


for _asks in ("max.graph.graph", "max.graph.ops.custom"):  # for the process's, in any thread
    import_module(_asks).default_mlir_context = _entered  # type: ignore[attr-defined]


class OwnKernels(KernelLibrary):
    """Ops of one context; MAX's class shares them among all graphs, whatever their contexts."""

    def verify_custom_op(self, custom_op: Any) -> None:
        """Checks that a node calls an op as it is declared."""
        self._analysis.verify_custom_op(custom_op)


@contextmanager
def passing() -> Iterator[None]:
    """Has this thread build and compile graphs in a context that ends with the block.

    Give these graphs ``OwnKernels``. Only what is compiled may outlive the block.
    """
    with mlir.Context():
        yield
    gc.collect()  # graphs lie in cycles
    memory.give_back()
