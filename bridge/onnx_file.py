"""An ONNX file becomes a program, node by node; torch is not needed.

    model = read(Path("model.onnx"))
    traced = model.trace()

bridge/onnx_ops.py says what each operator is here. What no input decides is computed once, by
ONNX's reference evaluator, and becomes a weight. The first axis of every input is the batch. A file
for single images is taken for one of any batch, where no operator mixes what would be images.
The package onnx is imported here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maxvision.bridge import onnx_ops
from maxvision.bridge.importer import (
    AT,
    PROBES,
    Importer,
    Known,
    Missing,
    Traced,
    Unsupported,
)
from maxvision.bridge.model import Model, pictures_of
from maxvision.bridge.onnx_ops import OnnxNode, Rounded
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs.net import Value
from maxvision.graphs.types import BATCH, Size, at_batch

try:
    import onnx
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_19
except ImportError as error:
    raise ModelError(
        f"ONNX files need the package onnx, which cannot be imported ({error}); {way_to('onnx')}"
    ) from None

OLDEST = 13
"""The first version of ONNX's operators that is read."""
_OURS = ("", "ai.onnx")
_FLOATS = {
    helper.np_dtype_to_tensor_dtype(np.dtype(d)): d for d in ("float16", "float32", "float64")
}


@dataclass(frozen=True)
class Input:
    """An input of a file.

    Attributes:
        name: Its name.
        shape: Its sizes, the first one the batch.
        dtype: Of numpy; floats of any size are float32 here.
        stored: The dtype in the file.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    stored: str


@dataclass(frozen=True)
class OnnxFile:
    """A file that was read.

    Attributes:
        proto: What it holds.
        inputs: Its inputs, without the weights.
        fixed: Whether it is for single images.
        opset: The version of its operators.
    """

    proto: Any
    inputs: tuple[Input, ...]
    fixed: bool
    opset: int


class OnnxModel(Model):
    """An ONNX file, and what is known of its inputs."""

    def trace(self) -> Traced:
        """Makes a program of it."""
        return OnnxImporter(self.module, self.name).run()


# --- the file ------------------------------------------------------------------------------------


def read(path: Path, size: int | None = None) -> OnnxModel:
    """Reads a file.

    Args:
        path: Where it is.
        size: Edge of the pictures, px, if the file leaves it open.

    Raises:
        ModelError: If it is no ONNX file, is too old, or a part of it is missing.
        ArgumentError: If it leaves a size open that ``size`` does not give, or the other way.
    """
    proto = _loaded(path)
    opset = max((each.version for each in proto.opset_import if each.domain in _OURS), default=0)
    if opset < OLDEST:
        raise ModelError(
            f"{path}: it has opset {opset}, and {OLDEST} or later is needed; convert it in Python:"
            f" onnx.save(onnx.version_converter.convert_version(onnx.load({str(path)!r}),"
            f" {OLDEST}), 'new.onnx')"
        )
    if proto.functions:
        from onnx import inliner

        proto = inliner.inline_local_functions(proto)
    held = {each.name for each in proto.graph.initializer}
    given = [each for each in proto.graph.input if each.name not in held]
    if not given:
        raise ModelError(f"{path}: it has no input, so there is nothing to compute")
    inputs, batches = [], set()
    for each in given:
        found, batch = _input(path, each, size)
        inputs.append(found)
        batches.add(batch)
    if numbers := sorted(n for n in batches if n > 1):
        raise ModelError(
            f"{path}: its batch is fixed at {numbers[0]}; export it with a dynamic first axis"
        )
    _check_size(path, inputs, size)
    file = OnnxFile(proto, tuple(inputs), batches == {1}, opset)
    described, note = pictures_of(inputs), ""
    if described:
        note = (
            "an ONNX file does not say how pictures are normalised: ImageNet's mean and deviation"
            " were taken; preprocessor_config.json holds them"
        )
    names = tuple(each.name for each in inputs)
    return OnnxModel(path.stem, file, _example(inputs), names, described, note=note)


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception:  # protobuf's
        proto = None
    if proto is None or not proto.graph.node or not proto.opset_import:
        raise ModelError(f"{path}: this is not an ONNX file")
    parts = {
        entry.value
        for tensor in proto.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    if gone := sorted(part for part in parts if not (path.parent / part).is_file()):
        raise ModelError(
            f"{path}: its weights are in {', '.join(gone)}, which is not beside it; copy it there"
        )
    if parts:
        try:
            onnx.load_external_data_for_model(proto, str(path.parent))
        except Exception as error:  # a file that is too short, or leads elsewhere
            raise ModelError(
                f"{path}: its weights in {', '.join(sorted(parts))} cannot be read ({error})"
            ) from None
    return proto


def _input(path: Path, given: Any, size: int | None) -> tuple[Input, int]:
    """Describes an input; returns its batch in the file too, 0 if that is open."""
    kind = given.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in kind.shape.dim]
    told = ", ".join(
        str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in kind.shape.dim
    )
    if not dims:
        raise ModelError(f"{path}: the input {given.name} has no batch; its shape is not known")
    batch, sizes = dims[0], dims[1:]
    if len(sizes) == 3 and size is not None:
        sizes = [sizes[0] or 3, sizes[1] or size, sizes[2] or size]
    if 0 in sizes:
        way = (
            "give it with --size, or size= in Python"
            if len(sizes) == 3 and size is None
            else "export the file with known sizes"
        )
        raise ArgumentError(f"{path}: the input {given.name} [{told}] leaves its size open; {way}")
    stored = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    dtype = "float32" if kind.elem_type in _FLOATS else stored
    return Input(given.name, (BATCH, *sizes), dtype, stored), batch


def _check_size(path: Path, inputs: Sequence[Input], size: int | None) -> None:
    images = [each.shape[2:] for each in inputs if len(each.shape) == 4]
    if size is not None and (size, size) not in images:
        sizes = " or ".join(" x ".join(map(str, each)) for each in images) or "no pictures"
        raise ArgumentError(f"{path}: it takes {sizes} px and no others; leave --size out")


def _example(inputs: Iterable[Input]) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    made = []
    for each in inputs:
        shape = [2, *(int(size) for size in each.shape[1:])]
        if each.dtype == "float32":
            made.append(random.standard_normal(shape).astype(np.float32))
        else:
            made.append(random.integers(0, 2, shape).astype(each.dtype))
    return tuple(made)


# --- the program ---------------------------------------------------------------------------------


class OnnxImporter(Importer):
    """Walks the nodes of a file; ``env`` holds what each tensor is."""

    def __init__(self, file: OnnxFile, name: str) -> None:
        self.held = {each.name for each in file.proto.graph.initializer}
        super().__init__(name, set(self.held))
        self.file = file
        self.before: dict[str, tuple[str, ...]] = {}  # what weights were called, and what they are
        self.env: dict[str, Any] = {"": None}
        self.sources: dict[str, tuple[str, str]] = {}  # by a module: its last value, and tensor

    def run(self) -> Traced:
        """Walks the graph."""
        graph = self.file.proto.graph
        for each in self.file.inputs:
            self.env[each.name] = self.net.input(each.name, each.shape, each.dtype)
        self.walk(graph)
        outputs = [] if self.missing else self.finish(graph)
        return self.traced(outputs, self.sources, partial(OnnxReference, self.file))

    def walk(self, graph: Any) -> None:
        """Translates the nodes of a graph, or of one in it."""
        for tensor in graph.initializer:
            self.env[tensor.name] = Known((numpy_helper.to_array(tensor),), tensor.name)
        for node in graph.node:
            self.net.origin = node.name
            try:
                found = self.call(node)
            except (Unsupported, ArgumentError) as why:
                self.miss(node, str(why))
                found = []
            several = found if isinstance(found, (list, tuple)) else [found]
            for name, value in zip(node.output, several, strict=False):
                self.env[name] = value
            self.note(node)

    def call(self, node: Any) -> Any:
        """Gives what a node's outputs are: computed if they are known, else by an op."""
        known = node.domain in _OURS
        if any(name not in self.env for name in node.input):  # of a node that is missing
            if not known or not (node.op_type in onnx_ops.RULES or node.op_type in _HERE):
                raise Unsupported("there is no such op here")
            return []
        given = [self.env[name] for name in node.input]
        values = [each for each in given if isinstance(each, Value | Rounded)]
        settings = {each.name: _setting(each) for each in node.attribute}
        if known and node.op_type == "Identity":
            return given
        if known and node.op_type in ("Shape", "Size") and values:
            x = given[0].value if isinstance(given[0], Rounded) else given[0]
            return self.shape(node.op_type, x, **settings)
        if known and node.op_type == "If" and isinstance(given[0], Known):
            return self.branch(given[0], **settings)
        nested = any(each.type == onnx.AttributeProto.GRAPH for each in node.attribute)
        if known and not values and not nested:
            found = self.compute(node, given)
            if node.op_type == "DequantizeLinear" and len(found[0].values) == 1:
                name = self.restored(node)
                return onnx_ops.dequantized(given[0], found[0], given[1], name, **settings)
            return found
        rule = onnx_ops.RULES.get(node.op_type) if known else None
        if rule is None:
            more = "" if "Linear" not in node.op_type and "Integer" not in node.op_type else _AS_QDQ
            raise Unsupported(f"there is no such op here{more}")
        described = OnnxNode(
            node.op_type, self.module(node), len(node.output), self.file.opset, self.file.fixed
        )
        try:
            return onnx_ops.applied(rule, self, described, given, settings)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise Unsupported(f"inputs or attributes that are unknown ({error})") from None

    def miss(self, node: Any, why: str) -> None:
        """Notes a node that cannot be translated; what it gives is in ``env`` no more."""
        op = node.op_type if node.domain in _OURS else f"{node.domain}.{node.op_type}"
        self.missing.append(Missing(op, why, node.name or (node.output[0] if node.output else "")))

    def note(self, node: Any) -> None:
        """Remembers what leaves the modules, which are the stages to compare."""
        value = self.env.get(node.output[0]) if node.output else None
        if not isinstance(value, Value) or not value.type.dtype.startswith("float"):
            return
        if not value.shape or not isinstance(value.shape[0], str):
            return
        for path in _paths(node.name)[:2]:
            self.sources.pop(path, None)
            self.sources[path] = (value.name, node.output[0])

    def module(self, node: Any) -> str:
        """Names the module that a node is from; if its name says nothing, its weight does."""
        paths = _paths(node.name)
        if paths:
            return paths[-1]
        weights = [self.env[name] for name in node.input if isinstance(self.env[name], Known)]
        name = next((each.name for each in weights if each.name), "")
        return name.removesuffix(".weight") or node.name

    def restored(self, node: Any) -> str:
        """Names weights as before they were quantised, if onnxruntime did that; else not at all."""
        inputs, name = tuple(node.input), node.input[0].removesuffix("_quantized")
        if name == node.input[0] or self.before.setdefault(name, inputs) != inputs:
            return ""
        return "" if name in self.held else name

    # --- constants -------------------------------------------------------------------------------

    def shape(self, op: str, x: Value, start: int = 0, end: int | None = None) -> Known:
        """Gives the shape of a value, for each batch of ``PROBES`` if it hangs on that."""
        sizes = x.shape[start:end] if op == "Shape" else x.shape
        batches = (1,) if self.file.fixed else PROBES
        found = []
        for batch in batches:
            numbers = [at_batch(size, batch) for size in sizes]
            found.append(np.array(numbers if op == "Shape" else math.prod(numbers), np.int64))
        return _folded(found)

    def compute(self, node: Any, given: Sequence[Known | None]) -> list[Known]:
        """Computes a node whose values no input decides."""
        count = max((len(each.values) for each in given if each), default=1)
        found: list[Any] = []
        for i in range(count):
            feeds = {
                name: each.values[min(i, len(each.values) - 1)]
                for name, each in zip(node.input, given, strict=True)
                if each is not None
            }
            try:
                runner = evaluator(_alone(node, self.file.proto))
                found.append(runner.run(None, feeds))
            except Exception as error:  # whatever ONNX's own code raises
                raise Unsupported(f"ONNX cannot compute it ({error})") from None
        return [_folded([np.asarray(each[k]) for each in found]) for k in range(len(found[0]))]

    def branch(self, condition: Known, then_branch: Any, else_branch: Any) -> list[Any]:
        """Walks the branch that is taken, if that is known."""
        truths = {bool(np.all(value)) for value in condition.values}
        if len(truths) > 1:
            raise Unsupported("a branch that hangs on the batch")
        graph = then_branch if truths.pop() else else_branch
        self.walk(graph)
        if any(each.name not in self.env for each in graph.output):
            return []
        return [self.env[each.name] for each in graph.output]

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, graph: Any) -> list[str]:
        """Names the outputs: logits if it is a single matrix, else as the file does.

        Of a file that ends with a softmax, the logits are what that is of, an output more.
        """
        names = []
        for each in graph.output:
            value = self.value(self.env[each.name])
            name = each.name
            if len(graph.output) == 1 and len(value.shape) == 2:
                name = "logits"
                last = next(node for node in graph.node if each.name in node.output)
                before = self.env[last.input[0]] if last.op_type == "Softmax" else None
                if isinstance(before, Value):
                    self.net.output(name, before)
                    name = "probabilities"
            self.net.output(name, value)
            names.append(name)
        return names


_HERE = ("Identity", "Shape", "Size", "If", "Constant")
"""Operators that have no rule and are known."""
_AS_QDQ = "; quantise the model statically, with QuantizeLinear and DequantizeLinear (QDQ)"
"""What to do about operators on integers, such as QLinearConv."""


def _setting(attribute: Any) -> Any:
    """Gives the value of an attribute: texts as such, dtypes by their names."""
    value = helper.get_attribute_value(attribute)
    if attribute.name == "to":
        return helper.tensor_dtype_to_np_dtype(value).name
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [each.decode() if isinstance(each, bytes) else each for each in value]
    return value


def _paths(name: str) -> list[str]:
    """Names the modules around a node, from without: torch's exporter has them in its name.

    ``/layer1/layer1.0/conv1/Conv`` is of ``layer1.0.conv1``, which is in ``layer1.0``.
    """
    if not name.startswith("/"):
        return []
    found: list[str] = []
    path: list[str] = []
    for part in name[1:].split("/")[:-1]:
        if path and part.startswith(f"{path[-1]}."):
            path[-1] = part
        else:
            path.append(part)
        found.append(".".join(path))
    return found


def _alone(node: Any, whole: Any) -> Any:
    """Makes a file of one node."""
    inputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "constant", inputs, outputs)
    return helper.make_model(graph, opset_imports=whole.opset_import, ir_version=whole.ir_version)


class DequantizeLinear(DequantizeLinear_19):
    """The operator as it was before version 19, which onnx's evaluator lacks."""

    op_domain = ""

    def _run(
        self, x: Any, x_scale: Any, x_zero_point: Any = None, axis: int = 1, block_size: int = 0,
        output_dtype: int | None = None,
    ) -> Any:  # fmt: skip
        return super()._run(x, x_scale, x_zero_point, axis)


def evaluator(proto: Any) -> Any:
    """Makes what computes a file in numpy."""
    opset = max(each.version for each in proto.opset_import if each.domain in _OURS)
    return ReferenceEvaluator(proto, new_ops=[DequantizeLinear] if opset < 19 else None)


def _folded(found: list[np.ndarray]) -> Known:
    first, *rest = found
    nan = first.dtype.kind == "f"
    if all(first.shape == x.shape and np.array_equal(first, x, equal_nan=nan) for x in rest):
        return Known((first,))
    return Known(tuple(found))


# --- what ONNX computes itself -------------------------------------------------------------------


class OnnxReference:
    """Runs a file: by onnxruntime if it is installed, else by ONNX's own evaluator.

    Args:
        file: The file.
        outputs: What its outputs are called here.
        tensors: The tensor for each path of a module.
    """

    def __init__(self, file: OnnxFile, outputs: Sequence[str], tensors: dict[str, str]) -> None:
        self._file = file
        self._outputs = outputs
        self._tensors = tensors
        self._runtime = _runtime()
        self.name = "onnxruntime" if self._runtime else "onnx"

    def __call__(
        self, inputs: Sequence[Any], points: Collection[str], dtype: str = "float32"
    ) -> dict[str, np.ndarray]:
        """Computes the outputs, and the values that leave some modules."""
        if dtype not in ("float32", "float64"):
            raise ArgumentError(f"an ONNX file is not computed in {dtype}; compare in float32")
        double = dtype == "float64"
        proto = onnx.ModelProto()
        proto.CopyFrom(self._file.proto)
        there = {each.name for each in proto.graph.output}
        tensors = [each.name for each in proto.graph.output]
        for path in points:
            if self._tensors[path] not in there:
                there.add(self._tensors[path])
                proto.graph.output.append(onnx.ValueInfoProto(name=self._tensors[path]))
        asked = [*tensors, *(self._tensors[path] for path in points)]
        if double:
            _widen(proto)
        run = self._session(proto, None if double else self._runtime)
        feeds = {
            each.name: np.asarray(given).astype(
                "float64" if double and each.dtype == "float32" else each.stored
            )
            for each, given in zip(self._file.inputs, inputs, strict=True)
        }
        if self._file.fixed:
            batch = len(np.asarray(inputs[0]))
            single = [run(asked, {k: v[i : i + 1] for k, v in feeds.items()}) for i in range(batch)]
            found = [np.concatenate(each) for each in zip(*single, strict=True)]
        else:
            found = run(asked, feeds)
        names = [*self._outputs, *(f"{AT}{path}" for path in points)]
        wide = "float64" if double else "float32"
        return {
            name: value.astype(wide) if value.dtype.kind == "f" else value
            for name, value in zip(names, found, strict=True)
        }

    @staticmethod
    def _session(proto: Any, runtime: Any) -> Any:
        if runtime is None:
            return evaluator(proto).run
        return runtime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        ).run


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        return None
    return onnxruntime


def _widen(proto: Any) -> None:
    """Makes everything that is a float a float64."""
    double = onnx.TensorProto.DOUBLE

    def widened(tensor: Any) -> None:
        if tensor.data_type in _FLOATS:
            value = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    for tensor in proto.graph.initializer:
        widened(tensor)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in _FLOATS:
                attribute.i = double
            if attribute.type == onnx.AttributeProto.TENSOR:
                widened(attribute.t)
            if node.op_type == "Constant" and attribute.name == "value_float":
                value = numpy_helper.from_array(np.array(attribute.f, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", value))
    for each in (*proto.graph.input, *proto.graph.output):
        if each.type.tensor_type.elem_type in _FLOATS:
            each.type.tensor_type.elem_type = double
    del proto.graph.value_info[:]
