"""A program becomes a MAX graph: each op is one typed function of graphs/nodes.py.

Ops that compute nothing are MAX's own (``MOVES``), but for permutes. So are a few that have
no kernel here (``OTHERS``), and ops on integers and truth values (``INTEGERS``).
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from max.driver import accelerator_api, accelerator_architecture_name
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, KernelLibrary, TensorType, TensorValue, ops

from maxvision.common.errors import ArgumentError
from maxvision.graphs import float64, nodes, passes
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import Constants
from maxvision.graphs.elementwise import BETWEEN, ELEMENTWISE, expression, values_of
from maxvision.graphs.parameters import Filter, Parameters, wide
from maxvision.graphs.program import Node, Program
from maxvision.graphs.quantize import STORED, Grid, Rounding
from maxvision.graphs.shapes import MOST_AXES, pair

MOVES = ("reshape", "permute", "slice", "concat", "expand", "pad", "gather", "cast")
"""Ops that compute nothing; MAX moves the numbers, where they have to move at all.

Floats are permuted by a kernel of ours."""
OTHERS = ("attention_bias", "batch_norm", "cumsum")
"""Ops that MAX's own kernels compute."""


class Canonical(Mapping[str, np.ndarray]):
    """A program's constants as graphs/arrange.py takes them.

    Filters are [R, S, C, F], linear weights [in, out], all others vectors.
    """

    def __init__(self, constants: Constants, program: Program) -> None:
        self.plain = self._constants = constants
        self._names = program.constants
        self.shapes = {
            name: _canonical_shape(program.types[name].shape) for name in program.constants
        }

    def __getitem__(self, name: str) -> np.ndarray:
        """Makes a constant."""
        value = self._constants[name]
        return value.T if value.ndim == 2 else _canonical(value)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._constants)

    def __len__(self) -> int:
        return len(self._constants)


def _canonical(value: np.ndarray) -> np.ndarray:
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.reshape(-1)


def _canonical_shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return shape[::-1]
    return _canonical(np.broadcast_to(np.int8(0), shape)).shape


def lower(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    device: DeviceRef,
    *,
    formats: Mapping[str, str] | None = None,
    off: Collection[str] = (),
    dtype: str = "float32",
    tf32: bool = True,
    kernels: KernelLibrary | None = None,
    extensions: Sequence[Any] = (),
) -> tuple[Graph, Parameters, Program]:
    """Rewrites a program for a device, and builds its graph.

    Args:
        program: A plain one, with inputs of the dtypes that it will be given.
        tensors: Its weights, as the checkpoint stores them; none is read but sparse ones.
        device: Where the graph runs.
        formats: The layers that run sparse, and the format of each.
        off: Passes to leave out (graphs/passes).
        dtype: Of filters; activations have that of the program's values.
        tf32: Whether products of float32 may be rounded to TF32 on a GPU.
        kernels: The ops as a library that is loaded already; so are extensions.
        extensions: The ops as paths.

    Returns:
        The graph, the weights that it asks for, and the program as it was rewritten.

    Raises:
        ArgumentError: If activations have another dtype than filters.
    """
    final = passes.run(program, backend(device, dtype, formats), off)
    for node in final.nodes:
        computes = final.types[node.output].dtype
        wanted = node.dtype or dtype
        constant = node.op in ("conv2d", "linear") and node.inputs[1] in final.constants
        if constant and not node.at_load and computes != wanted:
            raise ArgumentError(
                f"{program.name}: {node.name} computes in {computes} but its filter would be"
                f" {wanted}; make the two the same (Program.retyped, Lowering.dtype)"
            )
    weights = bind([final], tensors, device, dtype, tf32)
    types = [
        TensorType(DType[t.dtype], nodes.dims(t.shape), device=device)
        for t in final.inputs.values()
    ]
    with Graph(
        program.name,
        input_types=types,
        custom_extensions=list(extensions),
        kernel_library=kernels,
    ) as graph:
        graph.output(*emit(final, [x.tensor for x in graph.inputs], weights))
    return graph, weights, final


def backend(device: DeviceRef, dtype: str, formats: Mapping[str, str] | None = None) -> Backend:
    """Says what passes know of a device; a GPU that is not there is of no kind."""
    if device.is_cpu():
        return Backend("cpu", dtype, formats or {})
    api = accelerator_api()
    if api not in ("cuda", "hip"):
        return Backend("gpu", dtype, formats or {})
    return Backend(api, dtype, formats or {}, accelerator_architecture_name())


def bind(
    programs: Sequence[Program],
    tensors: Mapping[str, np.ndarray],
    device: DeviceRef,
    dtype: str,
    tf32: bool = True,
) -> Parameters:
    """Makes the weights that graphs of rewritten programs ask for; see ``lower``."""
    parts = [Canonical(Constants(program, tensors), program) for program in programs]
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    plain: Any = ChainMap(*(part.plain for part in parts))  # type: ignore[arg-type]
    return Parameters(
        ChainMap(*parts),  # type: ignore[arg-type]
        device,
        DType[dtype],
        shapes=shapes,
        plain=plain,
        plain_shapes={n: p.types[n].shape for p in programs for n in p.constants},  # type: ignore[misc]
        tf32=tf32,
    )


def emit(program: Program, inputs: Sequence[TensorValue], weights: Parameters) -> list[TensorValue]:
    """Adds a program's ops to the graph that is being built; returns its outputs."""
    values = dict(zip(program.inputs, inputs, strict=True))
    for node in program.nodes:
        if not node.at_load:
            given = _Given(program, node, values, weights)
            made = EMIT[node.op](given, **node.attributes)
            results = [made] if isinstance(made, TensorValue) else made
            values.update(zip(node.outputs, results, strict=True))
    return [
        values[name] if name in values
        else weights.constant(name, DType[program.types[name].dtype])
        for name in program.outputs.values()
    ]  # fmt: skip


class _Given:
    """The inputs of a node, in the graph."""

    def __init__(
        self,
        program: Program,
        node: Node,
        values: Mapping[str, TensorValue],
        weights: Parameters,
    ) -> None:
        self._program = program
        self._node = node
        self._values = values
        self.weights = weights

    def value(self, i: int, dtype: str = "") -> TensorValue:
        """Gives an activation, or a constant as one: by default in the dtype of those beside it."""
        name = self._node.inputs[i]
        if name in self._values:
            return self._values[name]
        return self.weights.constant(name, DType[dtype or self._dtype(name)])

    def _dtype(self, constant: str) -> str:
        """Names what a constant is rounded to: the dtype of the activations beside it."""
        kinds = [self._program.types[name].dtype for name in (constant, *self._node.inputs) if name]
        if not kinds[0].startswith("float"):
            return kinds[0]
        beside = [
            self._program.types[name].dtype
            for name in (*self._node.inputs, self._node.output)
            if name and name not in self._program.constants
        ]
        return next(kind for kind in beside if "float" in kind)

    def shapes(self) -> list[list[Dim]]:
        """Gives the shapes of the outputs."""
        return [nodes.dims(self._program.types[name].shape) for name in self._node.outputs]

    def optional(self, i: int) -> TensorValue | None:
        """Gives an input that may be absent."""
        return self.value(i) if len(self._node.inputs) > i and self._node.inputs[i] else None

    def name(self, i: int) -> str:
        """Names an input; nothing if it is absent."""
        return self._node.inputs[i] if len(self._node.inputs) > i else ""

    def vector(self, i: int, dtype: DType | None = None) -> TensorValue:
        """Gives a vector: a constant, or a value, as weights are in training."""
        if (name := self.name(i)) in self._values:
            value = self._values[name]
            return ops.cast(value, dtype or wide(value.dtype))
        return self.weights.vector(name, dtype)

    def layer(self, i: int, groups: int = 1, format: str = "") -> Filter:
        """Gives a filter and the bias behind it."""
        weights = self.weights.computing(self._node.dtype)
        return weights.layer(self.name(i), self.name(i + 1), groups, format)

    def computed_filter(self, i: int, groups: int, **layout: Any) -> Filter:
        """Gives a filter that is a value, and the constant bias behind it if there is one."""
        bias = self.vector(i + 1) if self.name(i + 1) else None
        tf32 = self.weights.tf32
        return nodes.computed_filter(self.value(i), bias, groups, tf32=tf32, **layout)

    def filter(self, i: int) -> TensorValue:
        """Gives a filter that is a value, as it lies."""
        return self.value(i)

    def is_constant(self, i: int) -> bool:
        """Tells whether an input is a weight, or made of weights."""
        return self.name(i) in self._program.constants

    def few(self, i: int) -> bool:
        """Tells whether an image is one row of an input, but many of what the program is given."""
        given = self._program.inputs.values()
        return self._program.types[self.name(i)].rows == 1 and any(each.rows > 1 for each in given)

    def dtype(self, i: int) -> str:
        """Names the dtype of an input."""
        return self._program.types[self.name(i)].dtype

    @property
    def result(self) -> DType:
        """The dtype of the output."""
        return DType[self._program.types[self._node.output].dtype]

    @property
    def values(self) -> list[TensorValue]:
        """All of them."""
        return [self.value(i) for i in range(len(self._node.inputs))]

    @property
    def numbers(self) -> list[TensorValue]:
        """All of them, constants in float32 whatever the others are, but float64."""
        types = [self._program.types[name].dtype for name in self._node.inputs]
        kind = "float64" if "float64" in types else "float32"
        return [self.value(i, kind if "float" in t else "") for i, t in enumerate(types)]

    @property
    def floats(self) -> bool:
        """Whether there are floats among them."""
        return any("float" in self._program.types[name].dtype for name in self._node.inputs)


def _layouts(op: Callable[..., TensorValue]) -> Callable[..., TensorValue]:
    """Takes images of either layout: [N, C, H, W] are permuted before an op, and back behind it."""

    def emit(given: _Given, *, layout: str = "NCHW", **attributes: Any) -> TensorValue:
        if layout == "NHWC":
            return op(given, **attributes)
        y = op(_Permuted(given), **attributes)
        return nodes.permute(y, [0, 3, 1, 2])

    return emit


class _Permuted:
    """The inputs of a node with images as [N, H, W, C]."""

    def __init__(self, given: _Given) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def value(self, i: int) -> TensorValue:
        return nodes.permute(self._given.value(i), [0, 2, 3, 1])

    def computed_filter(self, i: int, *settings: Any, **layout: Any) -> Filter:
        return self._given.computed_filter(i, *settings, **layout)

    def filter(self, i: int) -> TensorValue:
        return self._given.value(i)

    def optional(self, i: int) -> TensorValue | None:
        value = self._given.optional(i)
        return None if value is None else nodes.permute(value, [0, 2, 3, 1])


@_layouts
def _conv2d(
    given: _Given,
    *,
    groups: int = 1,
    format: str = "",
    epilogue: str = "none",
    filter_layout: str = "NCHW",
    **window: Any,
) -> TensorValue:
    if given.is_constant(1):
        filter = given.layer(1, groups, format)
    else:
        filter = given.computed_filter(1, groups, layout=filter_layout)
    residual = given.optional(3)
    return nodes.conv2d(given.value(0), filter, epilogue=epilogue, residual=residual, **window)


@_layouts
def _conv2d_input_grad(given: _Given, *, size: Any, **window: Any) -> TensorValue:
    tf32 = given.weights.tf32
    return nodes.conv2d_input_grad(given.value(0), given.filter(1), pair(size), tf32=tf32, **window)


@_layouts
def _conv2d_weight_grad(given: _Given, *, kernel: Any, **window: Any) -> TensorValue:
    x, dy, tf32 = given.value(0), given.value(1), given.weights.tf32
    return nodes.conv2d_weight_grad(x, dy, kernel, tf32=tf32, **window)


@_layouts
def _batch_norm(given: _Given, *, eps: float = 1e-5) -> TensorValue:
    weight, bias, mean, var = (given.vector(i) for i in range(1, 5))
    x = given.value(0)
    scale = weight * ops.rsqrt(var + eps)
    return (x.cast(wide(x.dtype)) * scale + (bias - mean * scale)).cast(x.dtype)


def _linear(given: _Given, *, format: str = "", epilogue: str = "none") -> TensorValue:
    weight = given.layer(1, format=format)
    return nodes.linear(
        given.value(0), weight, epilogue=epilogue, residual=given.optional(3), few=given.few(0)
    )


def _grid(x: TensorValue, numbers: Mapping[str, float], what: str = "") -> Rounding:
    """Gives what 8 bits of x's dtype stand for: ``what`` of a node's attributes says it."""
    kind, unsaid = STORED[x.dtype.name], {"scale": 1.0, "low": 0.0}
    return kind.made(*(numbers.get(f"{what}{name}", unsaid[name]) for name in kind._fields))


def _quantized(
    given: _Given,
    *,
    rounded_scale: float = 0.0,
    rounded_low: float = 0.0,
    dtype: str = "float32",
    groups: int = 1,
    **attributes: Any,
) -> TensorValue:
    x, residual = given.value(0), given.optional(3)
    numbers, window = _numbers(attributes)
    stored, grid = dtype in STORED, partial(_grid, x, numbers)
    filter, product, scales = given.weights.quantized(
        given.name(1),
        given.name(2),
        groups,
        grid(),
        grid("residual_") if stored and residual is not None else None,
        grid("result_") if stored else None,
        Grid(rounded_scale, round(rounded_low)) if rounded_scale else None,
        given.name(4),
        str(window.get("epilogue", "none")),
    )
    rest = {"filter": filter, "product": product, "scales": scales, "dtype": dtype, **window}
    if x.rank == 4:
        return nodes.quantized_conv2d(x, residual=residual, **rest)
    return nodes.as_images(nodes.quantized_conv2d, x, residual, **rest)


def _quantized_qkv(given: _Given, *, dtype: str, **numbers: float) -> list[TensorValue]:
    tokens = given.value(0), given.value(1), given.value(2)
    made = [
        given.weights.quantized(
            given.name(3 + 2 * i), given.name(4 + 2 * i), 1, _grid(x, numbers, part),
            steps=given.name(9 + i),
        )
        for i, (x, part) in enumerate(zip(tokens, ("q_", "k_", "v_"), strict=True))
    ]  # fmt: skip
    weights, products, _ = zip(*made, strict=True)
    return [*nodes.quantized_qkv_linear(tokens, weights, products, dtype=dtype)]


def _numbers(attributes: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Parts what numbers stand for from a node's other attributes."""
    numbers = {k: v for k, v in attributes.items() if k.endswith(("scale", "low"))}
    return numbers, {k: v for k, v in attributes.items() if k not in numbers}


def _sums(
    given: _Given, numbers: Mapping[str, float], steps: int
) -> tuple[tuple[Filter, Filter], TensorValue, TensorValue]:
    """Gives a shortcut's two filters, and what their sums stand for; names of steps begin there."""
    grid = partial(_grid, given.value(0), numbers)
    return given.weights.quantized_shortcut(
        (given.name(1), given.name(4)),
        (given.name(2), given.name(5)),
        (grid(), grid("source_")),
        grid("result_"),
        (given.name(steps), given.name(steps + 1)),
    )


def _following(
    given: _Given, numbers: Mapping[str, float], filter: int, steps: int
) -> tuple[Filter, TensorValue]:
    """Gives the filter behind a chain's first, and what its sums stand for."""
    grid = partial(_grid, given.value(0), numbers)
    name, bias = given.name(filter), given.name(filter + 1)
    found, product, _ = given.weights.quantized(
        name, bias, 1, grid("result_"), None, grid("next_"), steps=given.name(steps)
    )
    return found, product


def _quantized_shortcut(given: _Given, **attributes: Any) -> TensorValue:
    numbers, window = _numbers(attributes)
    sums = _sums(given, numbers, 6)
    return nodes.quantized_conv2d_shortcut(given.value(0), given.value(3), *sums, **window)


def _quantized_chain(given: _Given, **numbers: float) -> list[TensorValue]:
    x = given.value(0)
    grid = partial(_grid, x, numbers)
    first, product, scales = given.weights.quantized(
        given.name(1), given.name(2), 1, grid(), grid("residual_"), grid("result_"),
        steps=given.name(6),
    )  # fmt: skip
    second, following = _following(given, numbers, 4, 7)
    filters, products = (first, second), (product, following)
    return [
        *nodes.quantized_conv2d_chain(
            x, filters, products, given.value(3), residual_scale=scales[1]
        )
    ]


def _quantized_shortcut_chain(given: _Given, **numbers: float) -> list[TensorValue]:
    filters, product, first = _sums(given, numbers, 8)
    last, following = _following(given, numbers, 6, 10)
    x, source, all = given.value(0), given.value(3), (*filters, last)
    return [*nodes.quantized_conv2d_shortcut_chain(x, source, all, product, first, following)]


def _token_linear(given: _Given, *, epilogue: str = "none") -> TensorValue:
    residual = given.optional(3)
    return nodes.token_linear(given.value(0), given.layer(1), epilogue=epilogue, residual=residual)


def _matmul(given: _Given, **attributes: Any) -> TensorValue:
    bias, residual = (given.vector(2) if given.name(2) else None), given.optional(3)
    a, b = given.value(0), given.value(1)
    return nodes.bmm(a, b, bias=bias, residual=residual, tf32=given.weights.tf32, **attributes)


def _heads_attention(given: _Given, *, scale: float, causal: bool = False) -> TensorValue:
    q, k, v = (given.value(i) for i in range(3))
    tf32 = given.weights.tf32
    scores = nodes.bmm(q, k, alpha=scale, transpose_b=True, tf32=tf32)
    if (mask := given.optional(3)) is not None:
        scores = _masked(scores, mask, given.dtype(3) == "bool")
    if causal:
        t, s = (int(size) for size in scores.shape[2:])
        seen = np.tri(t, s, dtype=np.bool_)
        scores = _masked(scores, ops.constant(seen, DType.bool, scores.device), True)
    return nodes.bmm(nodes.softmax(scores), v, tf32=tf32)


def _masked(scores: TensorValue, mask: TensorValue, seen: bool) -> TensorValue:
    """Adds a mask to scores [N, heads, T, S], or hides the keys for which it is not true."""
    n, *rest = shape = scores.shape
    if mask.rank == 4 and mask.shape[0] not in (1, n):  # images take turns at it
        period = int(mask.shape[0])
        scores = scores.reshape([-1, period, *rest])
    if not seen:
        scores = scores + mask.cast(scores.dtype)
    else:
        true = mask if mask.dtype == DType.bool else ops.not_equal(mask, 0)
        never = ops.constant(-math.inf, scores.dtype, scores.device)
        scores = ops.where(true, scores, never)
    return scores.rebind(shape) if scores.rank == 4 else scores.reshape(shape)


def _attention(given: _Given, *, logsumexp: bool = False, **attributes: Any) -> Any:
    q, k, v = (given.value(i) for i in range(3))
    computed = _computed(q)
    op = computed.attention_logsumexp if logsumexp else computed.attention
    return op(q, k, v, bias=_scores_bias(given, 3), **attributes)


def _attention_grad(given: _Given, **attributes: Any) -> list[TensorValue]:
    values = [given.value(i) for i in range(6)]
    return _computed(values[0]).attention_grad(*values, bias=_scores_bias(given, 6), **attributes)


def _scores_bias(given: _Given, place: int) -> TensorValue | None:
    """Gives what is added to scores in the dtype of the queries, which kernels read."""
    bias = given.optional(place)
    return None if bias is None else bias.cast(given.value(0).dtype)


def _attention_bias(given: _Given, **attributes: Any) -> TensorValue:
    mask = given.value(0)
    return nodes.attention_bias(
        mask, DType.float32 if mask.dtype == DType.bool else mask.dtype, **attributes
    )


def _normalize(given: _Given, *, dtype: str, channels: int = 0) -> TensorValue:
    levels = given.vector(1), given.vector(2)
    return nodes.normalize(given.value(0), *levels, DType[dtype], channels)


def _stem(op: Callable[..., TensorValue]) -> Callable[..., TensorValue]:
    def emit(given: _Given, *, dtype: str, stride: int, **attributes: Any) -> TensorValue:
        filter = given.weights.fragments(given.name(3), given.name(4), stride=stride)
        levels = (given.vector(1), given.vector(2)) if given.name(1) else None
        norm = [given.vector(5), given.vector(6)] if given.name(5) else []
        if dtype == "uint8":
            attributes["dtype"] = dtype
        return op(given.value(0), filter, levels, *norm, stride=stride, **attributes)

    return emit


def _stem_and_conv2d(given: _Given, *, dtype: str, stride: int, padding: int) -> list[TensorValue]:
    filter = given.weights.fragments(given.name(3), given.name(4), stride=stride)
    levels = (given.vector(1), given.vector(2)) if given.name(1) else None
    return [
        *nodes.stem_maxpool_conv2d(
            given.value(0), filter, levels, given.layer(5), stride=stride, padding=padding
        )
    ]


def _slice(given: _Given, *, axis: int, start: int, stop: int, step: int = 1) -> TensorValue:
    x = given.value(0)
    whole: list[Any] = [slice(None)] * x.rank
    whole[axis] = slice(start, stop if stop != int(x.shape[axis]) else None, step)
    return x[tuple(whole)]


def _gather(given: _Given, *, axis: int, batch_axes: int = 0) -> TensorValue:
    x, indices = given.value(0), given.value(1)
    if not batch_axes:
        return ops.gather(x, indices, axis=axis)
    return ops.gather_nd(x, ops.unsqueeze(indices, -1), batch_dims=batch_axes)


def _scatter_add(given: _Given, *, axis: int) -> TensorValue:
    """Adds in float32, or in float64, as all sums are."""
    x, index, values = (given.value(i) for i in range(3))
    return nodes.scatter_add(x, index, values, axis).cast(given.result)


def _cast(given: _Given, *, dtype: str) -> TensorValue:
    """Casts; a GPU does so of floats at the speed of its memory, in our kernel."""
    x = given.value(0)
    floats = x.dtype.is_float() and "float" in dtype
    if x.device.is_gpu() and floats and x.rank <= MOST_AXES:
        return nodes.pointwise("x0", [x], dtype)
    return x.cast(DType[dtype])


def _pad(given: _Given, *, pads: tuple[int, ...], value: float = 0.0) -> TensorValue:
    return ops.pad(given.value(0), list(pads), value=value)


def _reduction(kind: str) -> Callable[..., Any]:
    """Reduces axes; MAX's own kernels do so of integers."""

    def emit(
        given: _Given, *, axes: tuple[int, ...], keepdim: bool = False, dtype: str = "",
        expression: str = "",
    ) -> Any:  # fmt: skip
        if expression:
            return nodes.reduce_terms(kind, expression, given.numbers, axes, keepdim, dtype)
        y = given.value(0)
        if given.floats:
            return nodes.reduce(kind, y, axes, keepdim, dtype)
        for axis in axes:
            y = INTEGERS[kind](y, axis=axis)
        return y if keepdim else y.reshape(given.shapes()[0])

    return emit


def _reduce_results(
    given: _Given, *, kind: str, axes: tuple[int, ...], results: str, dtypes: tuple[str, ...],
    expression: str = "x0", keepdim: bool = False, first: tuple[int, ...] = (),
) -> list[TensorValue]:  # fmt: skip
    count = max(map(values_of, expression.split(BETWEEN)))
    values, vectors = given.numbers[:count], given.numbers[count:]
    return nodes.reduce_results(
        kind, expression, values, axes, results, vectors, dtypes, keepdim, first
    )


def _group_norm(given: _Given, *, layout: str = "NCHW", **attributes: Any) -> TensorValue:
    x, vectors = given.value(0), (given.vector(1), given.vector(2))
    op = _computed(x).group_norm
    if layout == "NHWC" or x.rank == 2:
        return op(x, *vectors, **attributes)
    to_last, to_first = [0, *range(2, x.rank), 1], [0, x.rank - 1, *range(1, x.rank - 1)]
    y = op(nodes.permute(x, to_last), *vectors, **attributes)
    return nodes.permute(y, to_first)


def _depthwise(given: _Given, *, size: tuple[int, int], kernel: int, **attributes: Any) -> Any:
    c = int(given.value(0).shape[2])
    filters = given.layer(3, c), given.layer(5, c), given.layer(7, c)
    norm = (given.vector(1), given.vector(2))
    numbers, rest = _numbers(attributes)
    pairs = ((numbers.get(f"{n}_scale", 1.0), 0.0 - numbers.get(f"{n}_low", 0.0)) for n in "qkv")
    scales = [number for pair in pairs for number in pair]
    return nodes.depthwise_qkv(given.value(0), size, norm, filters, scales=scales, **rest)


def _shortcut(given: _Given, **window: Any) -> TensorValue:
    first, second = given.layer(1), given.layer(4)
    return nodes.conv2d_shortcut(given.value(0), first, given.value(3), second, **window)


def _squeeze_excite(given: _Given, **epilogues: Any) -> TensorValue:
    squeeze = given.weights.matrix(given.name(1), given.name(2))
    excite = given.weights.matrix(given.name(3), given.name(4), by_input=True)
    residual = given.optional(5)
    return nodes.squeeze_excite(given.value(0), squeeze, excite, residual=residual, **epilogues)


def _gather_rows(given: _Given, *, eps: float = 1e-5, **order: Any) -> list[TensorValue]:
    norm = (given.vector(2), given.vector(3)) if given.name(2) else None
    return nodes.gather_rows(given.value(0), onto=given.optional(1), norm=norm, eps=eps, **order)


def _class_token(given: _Given, *, eps: float = 1e-5) -> TensorValue:
    tokens = given.value(0)
    norm = (given.vector(2), given.vector(3)) if given.name(2) else None
    return nodes.class_token(tokens, given.vector(1, tokens.dtype), norm, eps)


def _concat(given: _Given, *, axis: int, expression: str = "x0") -> TensorValue:
    count = len(given.values) - values_of(expression) + 1
    vectors = [given.vector(i) for i in range(count, len(given.values))]
    return nodes.concat(given.values[:count], axis, expression, vectors)


def _norm(name: str, vectors: int = 2) -> Callable[..., TensorValue]:
    def emit(given: _Given, **attributes: Any) -> Any:
        x = given.value(0)
        weights = [given.vector(i) for i in range(1, 1 + vectors)]
        return getattr(_computed(x), name)(x, *weights, **attributes)

    return emit


def _layer_norm_grad(given: _Given, **attributes: Any) -> list[TensorValue]:
    dy, x = given.value(0), given.value(1)
    weight = given.vector(2) if given.name(2) else None
    made: list[TensorValue] = _computed(x).layer_norm_grad(dy, x, weight, **attributes)
    return made


def _computed(x: TensorValue) -> ModuleType:
    """Gives the module whose norms and attention take a value."""
    return float64 if x.dtype == DType.float64 else nodes


def _elementwise(name: str) -> Callable[..., TensorValue]:
    """Computes an op of graphs/elementwise.py; MAX's own kernels do so of integers."""

    def emit(given: _Given, **attributes: Any) -> TensorValue:
        if given.floats:
            return nodes.pointwise(expression(name, attributes), given.numbers)
        if name not in INTEGERS:
            raise ArgumentError(f"{name}: expects floats but has {given.value(0).dtype.name}")
        values: list[Any] = given.values
        if (other := attributes.pop("other", None)) is not None:
            values.append(ops.constant(int(other), values[-1].dtype, values[-1].device))
        return INTEGERS[name](*values, **attributes)

    return emit


INTEGERS: dict[str, Callable[..., TensorValue]] = {
    "neg": ops.negate,
    "abs": ops.abs,
    "add": ops.add,
    "sub": ops.sub,
    "mul": ops.mul,
    "maximum": ops.max,
    "minimum": ops.min,
    "eq": ops.equal,
    "ne": ops.not_equal,
    "lt": lambda a, b: ops.greater(b, a),
    "le": lambda a, b: ops.greater_equal(b, a),
    "gt": ops.greater,
    "ge": ops.greater_equal,
    "where": ops.where,
    "sum": ops.sum,
    "amax": ops.max,
    "amin": ops.min,
}
"""The ops that programs compute of integers and truth values, by MAX's own kernels."""


EMIT: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "conv2d_input_grad": _conv2d_input_grad,
    "conv2d_weight_grad": _conv2d_weight_grad,
    "batch_norm": _batch_norm,
    "linear": _linear,
    "matmul": _matmul,
    **{name: _elementwise(name) for name in ELEMENTWISE},
    "pointwise": lambda given, *, expression, dtype="": nodes.pointwise(
        expression, given.numbers, dtype
    ),
    "foreach": lambda given, *, expression, dtype="": nodes.foreach(
        expression, given.numbers, dtype
    ),
    "softmax": lambda given: nodes.softmax(given.value(0)),
    "log_softmax": lambda given: nodes.log_softmax(given.value(0)),
    "softmax_grad": lambda given: nodes.softmax_grad(given.value(0), given.value(1)),
    "max_pool2d": _layouts(lambda given, **window: nodes.maxpool(given.value(0), **window)),
    "avg_pool2d": _layouts(lambda given, **window: nodes.avgpool(given.value(0), **window)),
    "max_pool2d_grad": _layouts(
        lambda given, **window: nodes.max_pool2d_grad(given.value(0), given.value(1), **window)
    ),
    "avg_pool2d_grad": _layouts(
        lambda given, **window: nodes.avg_pool2d_grad(given.value(0), **window)
    ),
    "layer_norm": _norm("layernorm"),
    "layer_norm_grad": _layer_norm_grad,
    "layernorm_first": _norm("layernorm_first"),
    "scaled_dot_product_attention": _heads_attention,
    "attention": _attention,
    "attention_bias": _attention_bias,
    "attention_grad": _attention_grad,
    "attention_linear": lambda given, **rest: nodes.attention_linear(
        given.value(0), given.value(1), given.value(2), given.layer(3), given.value(5), **rest
    ),
    "normalize": _normalize,
    "reshape": lambda given, **_: given.value(0).reshape(given.shapes()[0]),
    "permute": lambda given, *, axes: nodes.permute(given.value(0), axes),
    "roll": lambda given, *, shifts, axes: nodes.roll(given.value(0), shifts, axes),
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
    "scatter_add": _scatter_add,
    **{kind: _reduction(kind) for kind in ("sum", "mean", "amax", "amin")},
    "reduce_results": _reduce_results,
    "cumsum": lambda given, *, axis: ops.cumsum(given.value(0), axis=axis),
    "rms_norm": _norm("rms_norm", 1),
    "group_norm": _group_norm,
    "concat": _concat,
    "expand": lambda given, **_: ops.broadcast_to(given.value(0), given.shapes()[0]),
    "cast": _cast,
    "conv2d_shortcut": _shortcut,
    "conv2d_chain": lambda given: nodes.conv2d_chain(
        given.value(0), given.layer(1), given.value(3), given.layer(4)
    ),
    "conv2d_shortcut_chain": lambda given: nodes.conv2d_shortcut_chain(
        given.value(0), given.layer(1), given.value(3), given.layer(4), given.layer(6)
    ),
    "conv2d_mean": lambda given, **rest: nodes.conv2d_mean(
        given.value(0), given.layer(1), residual=given.optional(3), **rest
    ),
    "quantized_conv2d": _quantized,
    "quantized_conv2d_chain": _quantized_chain,
    "quantized_conv2d_shortcut": _quantized_shortcut,
    "quantized_conv2d_shortcut_chain": _quantized_shortcut_chain,
    "quantized_linear": _quantized,
    "quantized_qkv_linear": _quantized_qkv,
    "qkv_linear": lambda given: nodes.qkv_linear(
        (given.value(0), given.value(1), given.value(2)),
        (given.layer(3), given.layer(5), given.layer(7)),
    ),
    "linear_moments": lambda given: nodes.linear_moments(
        given.value(0), given.layer(1), given.value(3)
    ),
    "normed_linear": lambda given, **rest: nodes.normed_linear(
        given.value(0), given.value(1), given.layer(2), **rest
    ),
    "token_linear": _token_linear,
    "gather_rows": _gather_rows,
    "layernorm_mlp": lambda given, **rest: nodes.layernorm_mlp(
        given.value(0),
        given.value(1),
        (given.layer(2), given.layer(4)),
        **rest,
    ),
    "row_moments": lambda given: nodes.row_moments(given.value(0)),
    "depthwise_qkv": _depthwise,
    "squeeze_excite": _squeeze_excite,
    "class_token": _class_token,
    "stem_maxpool": _stem(nodes.stem_maxpool),
    "stem_maxpool_conv2d": _stem_and_conv2d,
    "stem_layernorm": _stem(nodes.stem_layernorm),
    "stem_conv2d": _stem(nodes.stem_conv2d),
}
"""How each op is added to a graph."""
