"""A torch module becomes a program: exported, decomposed, op by op.

    found = trace(module, (torch.zeros(2, 3, 224, 224),))
    found.program, found.tensors

``torch.export`` gives a graph of ATen ops, which bridge/walker.py walks.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_map

from maxvision.bridge import aten
from maxvision.bridge.fx import type_of
from maxvision.bridge.importer import AT, Known, Traced
from maxvision.bridge.walker import Walker, paths
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs.net import Value
from maxvision.graphs.types import BATCH

MOST = 4096
"""The largest batch that is asked of torch.export."""


def export(module: torch.nn.Module, example: Sequence[Tensor]) -> ExportedProgram:
    """Exports a module with a dynamic batch, the first axis of every input; decomposes its ops.

    Raises:
        ModelError: If torch cannot.
    """
    if any(each.ndim == 0 or len(each) != len(example[0]) for each in example):
        raise ArgumentError("the example inputs expect one batch, their first axis, for all")
    exported = isinstance(module, torch.fx.GraphModule)  # a .pt2 file, whose batch has bounds
    batch: Any = Dim.AUTO if exported else Dim(BATCH, min=1, max=MOST)
    shapes: Any = tuple({0: batch} for _ in example)
    if _starred(module):
        shapes = (shapes,)
    module = module if exported else module.eval()
    errors: list[Exception] = []
    for strict in (False, True):  # the second reads the code: len(x) is the batch there, no number
        try:
            with _uncached(module):
                whole = decomposed(module, example, shapes, strict)
            if _keeps_batch(whole):
                return whole
            errors.append(ValueError("its code takes one batch alone, or reads across it"))
        except Exception as error:  # whatever the module's own code raises
            errors.append(error)
    raise ModelError(
        f"{type(module).__name__}: torch.export cannot trace it ({first_line(errors[0])}); see"
        " https://docs.pytorch.org/docs/stable/export.html for what a module has to keep to"
    ) from errors[0]


def decomposed(
    module: torch.nn.Module, example: Sequence[Tensor], shapes: Any, strict: bool = False
) -> ExportedProgram:
    """Exports a module for inference, and takes apart the ops that are none here.

    Args:
        module: The module.
        example: Its inputs.
        shapes: Their dynamic sizes, as torch.export takes them.
        strict: Whether to read the module's code.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of is torch's own code
        whole = torch.export.export(module, tuple(example), dynamic_shapes=shapes, strict=strict)
        return whole.run_decompositions(aten.decompositions())


@contextmanager
def _uncached(module: torch.nn.Module) -> Iterator[None]:
    """Makes models of transformers return no keys and values for tokens to come."""
    configs: list[Any] = [getattr(each, "config", None) for each in module.modules()]
    cached = [each for each in configs if getattr(each, "use_cache", False) is True]
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True


def _keeps_batch(whole: ExportedProgram) -> bool:
    """Tells whether every input still has any batch: code that is read may settle on one."""
    inputs = [
        node.meta["val"]
        for node in whole.graph.find_nodes(op="placeholder")
        if node.name in whole.graph_signature.user_inputs
    ]
    return all(isinstance(type_of(x).shape[0], str) for x in inputs if isinstance(x, Tensor))


def _starred(module: torch.nn.Module) -> bool:
    """Tells whether ``forward`` takes all inputs as one ``*args``."""
    import inspect

    kinds = [each.kind for each in inspect.signature(module.forward).parameters.values()]
    return kinds[:1] == [inspect.Parameter.VAR_POSITIONAL]


def first_line(error: BaseException) -> str:
    """Gives the first paragraph of what an error of torch says, in one line."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text.split("\n\n")[0])[:300]


def trace(
    module: torch.nn.Module, example: Sequence[Tensor], name: str = "", names: Sequence[str] = ()
) -> Traced:
    """Makes a program of a module.

    Args:
        module: In eval mode; its parameters are float32.
        example: One tensor an input, each of a batch of at least 2.
        name: What to call the program; the module's class if nothing.
        names: What to call the inputs; their names in ``forward`` if none are given.

    Raises:
        ModelError: If torch.export cannot trace the module.
    """
    return translate(export(module, example), name or type(module).__name__, names)


def translate(whole: ExportedProgram, name: str, names: Sequence[str] = ()) -> Traced:
    """Makes a program of what torch.export gave; see ``trace``."""
    return Exported(whole, name).run(names)


class Exported(Walker):
    """Walks an exported graph."""

    def __init__(self, whole: ExportedProgram, name: str) -> None:
        super().__init__(name, set(whole.state_dict))
        self.whole = whole

    def run(self, names: Sequence[str]) -> Traced:
        """Walks the graph; ``names`` are those of the inputs."""
        specs = self.whole.graph_signature.input_specs
        given = list(names)
        last: Node | None = None
        with torch.no_grad():
            for node, spec in zip(
                self.whole.graph.find_nodes(op="placeholder"), specs, strict=False
            ):
                self.place(node, spec, given)
            for node in self.whole.graph.nodes:
                if node.op == "output":
                    last = node
                elif node.op != "placeholder":
                    self.visit(node, self.whole.graph_module)
            assert last is not None
            outputs = self.finish(last)
        return self.traced(outputs, self.points(), partial(TorchReference, self.whole))

    def place(self, node: Node, spec: Any, names: list[str]) -> None:
        """Puts an input, a parameter or a buffer into ``env``."""
        if spec.kind.name == "USER_INPUT":
            if node.meta.get("val") is None:
                self.env[node] = None
                return
            kind = type_of(node.meta["val"])
            label = names.pop(0) if names else node.name
            self.env[node] = self.net.input(label, kind.shape, kind.dtype)
            return
        if spec.target in self.whole.state_dict:
            value = self.whole.state_dict[spec.target]
        else:
            value = self.whole.constants[spec.target]
        self.env[node] = Known((value.detach(),), spec.target)

    # --- the end -------------------------------------------------------------------------------

    def finish(self, last: Node) -> list[str]:
        """Names the outputs: logits if it is a single matrix, else as the module does."""
        returned = self.given(last.args[0])
        specs = self.whole.graph_signature.output_specs
        found = [
            (spec, v)
            for spec, v in zip(specs, returned, strict=True)
            if spec.kind.name == "USER_OUTPUT"
        ]
        values = [value for _, value in found]
        labels = _labels(self.whole, len(values))
        names = []
        for label, value in zip(labels, values, strict=True):
            if value is None or not isinstance(value, (Value, Known)):
                continue
            made = self.value(value)
            if len(values) == 1 and len(made.shape) == 2:
                label = "logits"
            self.net.output(label, made)
            names.append(label)
        return names

    def points(self) -> dict[str, tuple[str, str]]:
        """Finds what leaves the children and grandchildren of the module: its stages."""
        found: dict[str, tuple[str, str]] = {}
        for node in self.whole.graph.nodes:
            value = self.env.get(node) if node.op == "call_function" else None
            if not isinstance(value, Value) or not value.type.dtype.startswith("float"):
                continue
            for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                if path and path.count(".") <= 1:
                    found.pop(path, None)
                    found[path] = (value.name, node.name)
        return found


def _labels(whole: ExportedProgram, count: int) -> list[str]:
    """Names the outputs by where they stand in what the module returns."""
    from torch.utils._pytree import tree_unflatten

    assert whole.call_spec.out_spec is not None
    tree = tree_unflatten(list(range(count)), whole.call_spec.out_spec)
    found = {number: ".".join(path) or "output" for path, number in paths(tree)}
    labels = [found[number] for number in range(count)]
    return [f"output_{label}" if label.isdigit() else label for label in labels]


# --- what torch computes itself ------------------------------------------------------------------


class TorchReference:
    """Runs an exported graph in torch.

    Args:
        whole: The graph.
        outputs: What its outputs are called, in their order.
        nodes: The name of the node for each path of a module.
    """

    name = "torch"

    def __init__(
        self, whole: ExportedProgram, outputs: Sequence[str], nodes: Mapping[str, str]
    ) -> None:
        self.exported = whole
        self._outputs = outputs
        self._nodes = nodes

    def __call__(
        self, inputs: Sequence[Any], points: Collection[str], dtype: str = "float32"
    ) -> dict[str, np.ndarray]:
        """Computes the outputs, and the values that leave some modules."""
        wanted: dict[str, list[str]] = {}
        for path in points:
            wanted.setdefault(self._nodes[path], []).append(f"{AT}{path}")
        kind = getattr(torch, dtype)
        left = [torch.as_tensor(each) for each in inputs]
        state = {**self.exported.constants, **self.exported.state_dict}
        given = []
        for spec in self.exported.graph_signature.input_specs:
            value = left.pop(0) if spec.kind.name == "USER_INPUT" else state[spec.target]
            given.append(_cast(value, kind) if isinstance(value, Tensor) else value)
        graph = self.exported.graph_module
        watching = _Watching(copy.deepcopy(graph) if dtype != "float32" else graph, wanted, kind)
        with torch.no_grad():
            returned = watching.run(*given)
        specs = self.exported.graph_signature.output_specs
        outputs = [
            value
            for spec, value in zip(specs, returned, strict=True)
            if spec.kind.name == "USER_OUTPUT" and isinstance(value, Tensor)
        ]
        found = dict(zip(self._outputs, outputs, strict=True)) | watching.kept
        return {name: _array(value.detach()) for name, value in found.items()}


def _array(tensor: Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


PRODUCTS = {
    torch.ops.aten.linear, torch.ops.aten.matmul, torch.ops.aten.mm, torch.ops.aten.bmm,
    torch.ops.aten.addmm, torch.ops.aten.conv1d, torch.ops.aten.conv2d,
    torch.ops.aten.convolution, torch.ops.aten.scaled_dot_product_attention,
}  # fmt: skip
"""Operators whose tensors must be of one dtype."""


class _Watching(torch.fx.Interpreter):
    """Runs an exported graph in a dtype, and keeps the values of some of its nodes.

    A graph of float32 names that dtype where the module casts to it, and asserts it. In float64
    that becomes float64; in 16 bits it stays, and products round what comes to them, as the module
    itself does.
    """

    def __init__(
        self, module: torch.fx.GraphModule, wanted: Mapping[str, list[str]], dtype: torch.dtype
    ) -> None:
        super().__init__(module)
        self.wanted = wanted
        self.dtype = dtype
        self.kept: dict[str, Tensor] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(target, "overloadpacket", None)
        if packet is torch.ops.aten._assert_tensor_metadata:
            return None

        def in_dtype(value: Any) -> Any:
            if isinstance(value, Tensor):
                return _cast(value, self.dtype) if packet in PRODUCTS else value
            return self.dtype if value == torch.float32 and self.dtype == torch.float64 else value

        if self.dtype != torch.float32:
            args, kwargs = tree_map(in_dtype, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        for name in self.wanted.get(n.name, ()):
            self.kept[name] = found[0] if isinstance(found, (tuple, list)) else found
        return found
