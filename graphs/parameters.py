"""A network's weights, handed out by name inside a graph and bound when the model loads.

The compiled graph holds names and shapes only, so that two checkpoints of one architecture
share one compilation. Building the graph reads no weight but a sparse one: each is made, arranged
and handed over when the model loads, one after the other.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops

from maxvision.common import memory
from maxvision.common.errors import ModelError
from maxvision.graphs import arrange, formats
from maxvision.graphs.arrange import rounded
from maxvision.graphs.constants import filter_scales, quantized_filter
from maxvision.graphs.quantize import STEPS, Grid, Rounding, rescales

ALIGNMENT = 64
"""Where a weight begins in a CPU's memory: at a multiple of this many bytes, a cache line."""


SUMS = 2**26
"""How large a sum may become that ``rescaled`` of ops/hopper/accumulator.mojo gives."""
HELD = 8 << 20
"""Bytes of weights that are made before what that took is given back to the system."""


def wide(dtype: DType) -> DType:
    """Gives the dtype of biases, and of sums: float64 of float64, else float32."""
    return DType.float64 if dtype == DType.float64 else DType.float32


@dataclass(frozen=True)
class Filter:
    """A convolution's or a linear layer's weights inside a graph, arranged for its device.

    Attributes:
        shape: R, S, C (of one group), F.
        groups: Groups of channels.
        bias: float32 [F]; float64 where the filter is.
        dtype: What the filter computes in.
        dense: The arranged filter, flat; None if sparse.
        rows: The nonzeros as their op reads them (graphs/formats.py); None if dense.
        fragments: The filter as the fused stem reads it, flat; the other two are None.
        tf32: Whether a GPU may round float32 to TF32 for its products.
        format: How the nonzeros lie (graphs/formats.py); nothing if dense.
        constant: Whether it is a weight, which no other op writes.
    """

    shape: tuple[int, int, int, int]
    groups: int
    bias: TensorValue
    dtype: DType
    dense: TensorValue | None = None
    rows: tuple[TensorValue, ...] | None = None
    fragments: TensorValue | None = None
    tf32: bool = True
    format: str = ""
    constant: bool = True


@dataclass(frozen=True)
class Bound:
    """A weight that a graph asks for.

    Attributes:
        make: Makes its values, arranged for the device.
        shape: The shape of these.
        dtype: What they are rounded to.
    """

    make: Callable[[], np.ndarray]
    shape: tuple[int, ...]
    dtype: DType

    @property
    def bytes(self) -> int:
        """Counts the bytes of ``array``."""
        return math.prod(self.shape) * self.dtype.size_in_bytes

    def array(self) -> np.ndarray:
        """Makes the values in ``dtype``, C-contiguous; some as their bits, as ``rounded`` does."""
        return rounded(self.make(), self.dtype)


class Parameters:
    """Weights by name, for one device and dtype.

    Filters are [R, S, C, F] float32, linear weights [in, out], all others vectors.

    Args:
        tensors: The weights; one is made when it is asked for, perhaps.
        device: Where the graph runs.
        dtype: Of activations and filters.
        prefix: What the names here begin with in ``tensors``.
        shapes: The shapes of ``tensors``, if those are to be left alone while the graph is built.
        plain: The same tensors as the program has them, for ``constant``.
        plain_shapes: The shapes of ``plain``.
        tf32: Whether a GPU may round float32 to TF32 for products.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        device: DeviceRef,
        dtype: DType,
        prefix: str = "",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        plain: Mapping[str, np.ndarray] | None = None,
        plain_shapes: Mapping[str, tuple[int, ...]] | None = None,
        tf32: bool = True,
    ) -> None:
        self.tensors = tensors
        self.device = device
        self.dtype = dtype
        self.prefix = prefix
        self.shapes = shapes
        self.plain = plain or {}
        self.plain_shapes = plain_shapes or {}
        self.tf32 = tf32
        self.suffix = ""
        self.bound: dict[str, Bound] = {}

    def at(self, prefix: str) -> Parameters:
        """Narrows to the names that begin with ``prefix`` and a dot."""
        inner = copy.copy(self)
        inner.prefix = f"{self.prefix}{prefix}."
        return inner

    def computing(self, dtype: str) -> Parameters:
        """Gives the same weights for ops in a dtype of their own; nothing: in that of all."""
        if not dtype or DType[dtype] == self.dtype:
            return self
        inner = copy.copy(self)
        inner.dtype, inner.suffix = DType[dtype], f".{dtype}"
        return inner

    def has(self, name: str) -> bool:
        """Tells whether there is a weight called ``name``."""
        return self.prefix + name in self.tensors

    def filter(
        self, name: str, groups: int = 1, *, sparse: bool = False, format: str = ""
    ) -> Filter:
        """Returns ``name.filter`` (or the linear ``name.weight``) with ``name.bias``.

        A missing bias is zeros. With ``sparse``, only the filter's nonzeros are kept, in ``format``
        or else the device's general one.
        """
        key = f"{name}.filter" if self.has(f"{name}.filter") else f"{name}.weight"
        if sparse:
            format = format or formats.general("cpu" if self.device.is_cpu() else "gpu")
        return self.layer(key, f"{name}.bias", groups, format)

    def layer(self, filter: str, bias: str = "", groups: int = 1, format: str = "") -> Filter:
        """Returns a filter and a bias by their own names.

        Args:
            filter: [R, S, C, F], or linear weights [in, out].
            bias: [F]; zeros if there is none of that name.
            groups: Groups of channels.
            format: How the nonzeros of a sparse filter lie; nothing of a dense one.
        """
        shape = self._filter_shape(filter)
        given = self._bias(filter, bias, shape[3])
        if format:
            arrays = formats.arranged(format, self._filter(filter), groups, self.dtype)
            rows = tuple(
                self._bind(f"{filter}.{part}", lambda array=array: array, array.shape, kind)  # type: ignore[misc]
                for part, array, kind in arrays
            )
            if format in formats.PACKED:
                r, s, c, f = shape
                shape, groups = (r, s, c * groups, f), 1
            return Filter(shape, groups, given, self.dtype, rows=rows, format=format)
        form, size = arrange.arrangement(shape, groups, self.device.is_cpu(), self.dtype)
        make = arrange.ARRANGE[form]
        dense = self._bind(filter, lambda: make(self._filter(filter), groups), (size,), self.dtype)
        return Filter(shape, groups, given, self.dtype, dense=dense, tf32=self.tf32)

    def quantized(
        self,
        filter: str,
        bias: str,
        groups: int,
        x: Rounding,
        residual: Rounding | None = None,
        result: Rounding | None = None,
        rounded: Grid | None = None,
        steps: str = "",
        epilogue: str = "none",
    ) -> tuple[Filter, TensorValue, list[float]]:
        """Returns a filter in 8 bits and what ops/conv2d/quantized.mojo takes beside it.

        Args:
            filter: See ``layer``; so are bias and groups.
            bias: See ``filter``.
            groups: See ``filter``.
            x: What the integers of the activations stand for, or the floats of 8 bits.
            residual: Those of a residual; nothing if it is of wider floats.
            result: Those of the result; nothing if it is of wider floats.
            rounded: Those of what the residual is added to, on a CPU; nothing if it is not rounded.
            steps: Names what an integer of each filter stands for; nothing if that is its own.
            epilogue: What the sums go through.

        Returns:
            The filter; what a sum of each stands for, float32 [F]; and the op's ``scales``.
        """
        shape = self._filter_shape(filter)
        added, given = residual or Grid(1.0, 0), result or Grid(1.0, 0)
        to = x.factor

        def rows() -> tuple[np.ndarray, np.ndarray]:
            return self._rounded_rows(filter, steps, to)

        if not self.device.is_cpu():
            return self._quantized_on_hopper(filter, bias, rows, x, added, result, epilogue)
        depthwise = arrange.is_depthwise(shape, groups)
        size = math.prod(shape) if depthwise else arrange.byte_panels_size(shape, groups)

        def packed() -> np.ndarray:
            whole = rows()[0].transpose(1, 2, 3, 0)
            return whole.ravel() if depthwise else arrange.byte_panels(whole, groups)

        dense = self._bind(f"{filter}.int8", packed, (size,), DType.int8)
        product = self._bind(
            f"{filter}.product.{x.scale!r}",
            lambda: rows()[1] * x.scale,
            (shape[3],),
            DType.float32,
        )
        of = Filter(shape, groups, self._bias(filter, bias, shape[3]), DType.int8, dense=dense)
        numbers = [-x.low, added.scale, -added.low, given.scale, -given.low]
        return of, product, [*numbers, *((rounded.scale, -rounded.low) if rounded else ())]

    def _quantized_on_hopper(
        self,
        filter: str,
        bias: str,
        rows: Callable[[], tuple[np.ndarray, np.ndarray]],
        x: Rounding,
        added: Rounding,
        result: Rounding | None,
        epilogue: str,
    ) -> tuple[Filter, TensorValue, list[float]]:
        """Makes what the kernel for Hopper takes, which knows zeros only of a result it rescales.

        Of others the scale divides the rest and the bias. Zeros become a part of the bias: what
        those of x are multiplied by is the same for all windows, none of which reads padding.
        """
        shape, in_quads = self._filter_shape(filter), result is not None
        unit = Grid(1.0, 0)
        last = result if result and rescales(epilogue, result) else unit
        given = result if result and last is unit else unit
        key = f"{x.scale!r}.{x.low}.{added.scale!r}.{added.low}.{given.scale!r}.{given.low}"

        def packed() -> np.ndarray:
            whole = rows()[0]
            return (arrange.quads(whole) if in_quads else whole).ravel()

        def scales() -> np.ndarray:
            return rows()[1] * (x.scale / given.scale)

        def biases() -> np.ndarray:
            own = self._in_steps(bias, rows()[0], scales(), x, given)
            return own + (added.low * (added.scale / given.scale) - given.low)

        form = "quads" if in_quads else "rows"
        kind = DType[x.factor]
        dense = self._bind(f"{filter}.{kind.name}.{form}", packed, (math.prod(shape),), kind)
        product = self._bind(f"{filter}.product.{key}", scales, (shape[3],), DType.float32)
        of = self._bind(f"{filter}.bias.{key}", biases, (shape[3],), DType.float32)
        numbers = [0.0, added.scale / given.scale, 0.0, last.scale, float(-last.low)]
        return Filter(shape, 1, of, kind, dense=dense), product, numbers

    def quantized_shortcut(
        self,
        filters: tuple[str, str],
        biases: tuple[str, str],
        grids: tuple[Rounding, Rounding],
        result: Rounding,
        steps: tuple[str, str] = ("", ""),
    ) -> tuple[tuple[Filter, Filter], TensorValue, TensorValue]:
        """Returns two filters in 8 bits whose sums are added, and what Hopper's kernel reads.

        Sums of the first become multiples of what one of the second stands for. Where such integers
        would be too large, the second filter is rounded to coarser steps: finer ones than the
        first's have no say there.

        Args:
            filters: See ``layer``; so are biases.
            biases: See ``filters``.
            grids: What the 8 bits of the activations of each stand for.
            result: Those of the result.
            steps: See ``quantized``.

        Returns:
            The filters; what a sum of the second stands for, in steps of the result, float32 [F];
            and what one of the first is, in sums of the second.
        """
        shapes = [self._filter_shape(each) for each in filters]
        numbers = ".".join(f"{grid.scale!r}.{grid.low}" for grid in (*grids, result))
        to = result.factor
        key, kind = f"{filters[0]}.{filters[1]}.{numbers}", DType[to]

        @functools.cache
        def made() -> tuple[list[np.ndarray], list[np.ndarray]]:
            rows = [self._rounded_rows(filters[i], steps[i], to) for i in range(2)]
            (first, second), units = zip(*rows, strict=True)
            units = [unit * grid.scale for unit, grid in zip(units, grids, strict=True)]
            if not kind.is_integral():
                return [first, second], units
            most = np.abs(first.reshape(len(first), -1), dtype=np.int32).sum(1) * float(STEPS)
            least = np.abs(units[0]) * most / SUMS
            coarser = np.maximum(1, least / np.abs(units[1]))
            by_filter = coarser.reshape(-1, *(1,) * (second.ndim - 1))
            second = np.rint(second / by_filter).astype(np.int8)
            return [first, second], [units[0], units[1] * coarser]

        def packed(i: int) -> Callable[[], np.ndarray]:
            return lambda: arrange.quads(made()[0][i]).ravel()

        def bias(i: int) -> Callable[[], np.ndarray]:
            def make() -> np.ndarray:
                rows, units = made()[0][i], made()[1][i] / result.scale
                own = self._in_steps(biases[i], rows, units, grids[i], result)
                return own - (0 if i else result.low)

            return make

        f, found = shapes[0][3], list[Filter]()
        for i, shape in enumerate(shapes):
            size = (math.prod(shape),)
            dense = self._bind(f"{key}.{to}.{i}", packed(i), size, kind)
            added = self._bind(f"{key}.bias.{i}", bias(i), (f,), DType.float32)
            found.append(Filter(shape, 1, added, kind, dense=dense))
        product = self._bind(
            f"{key}.product", lambda: made()[1][1] / result.scale, (f,), DType.float32
        )
        first = self._bind(f"{key}.first", lambda: made()[1][0] / made()[1][1], (f,), DType.float32)
        return (found[0], found[1]), product, first

    def _in_steps(
        self, bias: str, rows: np.ndarray, units: np.ndarray, x: Rounding, result: Rounding
    ) -> np.ndarray:
        """Gives a bias in steps of a result, with what x's zero point adds to the sums [F].

        Args:
            bias: Its name; zeros if there is none.
            rows: The filter in 8 bits, [F, R, S, C].
            units: What a sum of each stands for, in steps of the result [F].
            x: What 8 bits of the activations stand for.
            result: Those of the result.
        """
        has_bias = bool(bias) and self.has(bias)
        own = self._tensor(bias) if has_bias else np.zeros(len(rows))
        sums = rows.reshape(len(rows), -1).sum(1, dtype=np.float64)
        return np.asarray(own / result.scale + x.low * units * sums)

    def _rounded_rows(self, filter: str, steps: str, to: str) -> tuple[np.ndarray, np.ndarray]:
        """Rounds a filter to 8 bits: [F, R, S, C], and what 1 of each stands for [F]."""
        values = self._filter(filter).transpose(3, 0, 1, 2)
        scales = self._tensor(steps).astype(np.float64) if steps else filter_scales(values, to)
        return quantized_filter(values, scales, to), scales

    def matrix(
        self, weight: str, bias: str = "", *, by_input: bool = False
    ) -> tuple[TensorValue, TensorValue]:
        """Returns a 1 x 1 filter or linear weights as [out, in], and a bias; see ``layer``.

        Args:
            weight: See ``filter`` of ``layer``.
            bias: See ``layer``.
            by_input: Whether they are [in, out] instead.
        """
        *_, inputs, outputs = self._filter_shape(weight)
        given = self._bias(weight, bias, outputs)
        if by_input:
            name, shape = f"{weight}.by_input", (inputs, outputs)
            return self._bind(name, lambda: self._filter(weight)[0, 0], shape, self.dtype), given
        name, shape = f"{weight}.by_output", (outputs, inputs)
        return self._bind(name, lambda: self._filter(weight)[0, 0].T, shape, self.dtype), given

    def fragments(self, filter: str, bias: str = "", *, stride: int) -> Filter:
        """Returns a filter as the fused stem of a stride reads it, and a bias; see ``layer``."""
        shape = self._filter_shape(filter)
        given = self._bias(filter, bias, shape[3])
        fragments = self._bind(
            filter,
            lambda: arrange.stem_fragments(self._filter(filter), stride),
            (arrange.stem_size(shape, stride),),
            self.dtype,
        )
        return Filter(shape, 1, given, self.dtype, fragments=fragments)

    def _bias(self, filter: str, bias: str, size: int) -> TensorValue:
        if bias and self.has(bias):
            return self.vector(bias)
        name = bias or f"{filter.removesuffix('.weight').removesuffix('.filter')}.bias"
        if self.has(name):  # another layer's, of the same filter
            name = f"{filter}.zeros"
        return self._bind(name, lambda: np.zeros(size), (size,), wide(self.dtype))

    def vector(self, name: str, dtype: DType | None = None) -> TensorValue:
        """Returns the vector ``name``: layer norm's weights, a class token, a pixel mean.

        It is float32, or float64 where filters are, unless its ``dtype`` is given.
        """
        return self._bind(
            name, lambda: self._tensor(name), self._shape(name), dtype or wide(self.dtype)
        )

    def constant(self, name: str, dtype: DType) -> TensorValue:
        """Returns the tensor ``name`` of any shape, laid out as the program has it."""
        shape = self._look_up(self.plain_shapes, name)
        return self._bind(
            f"{name}.{dtype.name}", lambda: self._look_up(self.plain, name), shape, dtype
        )

    def registry(self, device: Device) -> dict[str, Buffer]:
        """Makes the weights that the graph asked for, on ``device``, for ``session.init``."""
        if not device.is_host:
            return {name: buffer(w.array(), w.dtype).to(device) for name, w in self.bound.items()}
        room = np.empty(sum(_padded(w.bytes) for w in self.bound.values()) + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT  # one block: many of all sizes leave holes
        places = {}
        for name, weight in self.bound.items():
            places[name] = start
            start += _padded(weight.bytes)
        buffers: dict[str, Buffer] = {}
        made = 0
        # The largest first: what it takes to make them is free again when most of the room is used.
        for name, weight in sorted(self.bound.items(), key=lambda pair: -pair[1].bytes):
            array = weight.array()
            place = room[places[name] :][: array.nbytes].view(array.dtype).reshape(array.shape)
            place[...] = array
            buffers[name] = buffer(place, weight.dtype)
            del array
            made += weight.bytes
            if made >= HELD or len(buffers) == len(self.bound):
                memory.give_back()
                made = 0
        return buffers

    def _filter(self, name: str) -> np.ndarray:
        """Returns a filter [R, S, C, F], or linear weights [in, out] as a 1x1 one."""
        filters = self._tensor(name)
        return filters[None, None] if filters.ndim == 2 else filters

    def _filter_shape(self, name: str) -> tuple[int, int, int, int]:
        shape = self._shape(name)
        r, s, c, f = (1, 1, *shape) if len(shape) == 2 else shape
        return r, s, c, f

    def _tensor(self, name: str) -> np.ndarray:
        return self._look_up(self.tensors, name)

    def _shape(self, name: str) -> tuple[int, ...]:
        if self.shapes is None:
            return self._tensor(name).shape
        return self._look_up(self.shapes, name)

    def _look_up(self, table: Mapping[str, Any], name: str) -> Any:
        try:
            return table[self.prefix + name]
        except KeyError:
            raise ModelError(f"the weight {self.prefix}{name} is missing") from None

    def _bind(
        self, name: str, make: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: DType
    ) -> TensorValue:
        full = self.prefix + name + self.suffix
        self.bound[full] = Bound(make, shape, dtype)
        return ops.constant_external(full, TensorType(dtype, shape, device=self.device))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def buffer(array: np.ndarray, dtype: DType) -> Buffer:
    """Wraps what ``rounded`` gives, without a copy if the array may be written."""
    if dtype in (DType.bfloat16, DType.float8_e4m3fn):
        return Buffer.from_numpy(array).view(dtype)
    return Buffer.from_numpy(array)
