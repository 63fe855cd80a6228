"""A network's weights, handed out by name inside a graph and bound when the model loads.

The compiled graph holds names and shapes only, so that two checkpoints of one architecture
share one compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from max.driver import Buffer, Device, accelerator_api
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, ops

from graphs import arrange
from graphs.errors import ModelError


@dataclass(frozen=True)
class Filter:
    """A convolution's or a linear layer's weights inside a graph, arranged for its device.

    Attributes:
        shape: R, S, C (of one group), F.
        groups: Groups of channels.
        bias: float32 [F].
        dense: The arranged filter, flat; None if sparse.
        rows: Values, columns and row starts of the compressed rows; None if dense.
        fragments: The filter as the fused stem reads it, flat; the other two are None.
        tf32: Whether a GPU may round float32 to TF32 for its products.
    """

    shape: tuple[int, int, int, int]
    groups: int
    bias: TensorValue
    dense: TensorValue | None = None
    rows: tuple[TensorValue, TensorValue, TensorValue] | None = None
    fragments: TensorValue | None = None
    tf32: bool = True

    @property
    def dtype(self) -> DType:
        """The dtype that the filter computes in."""
        values = [self.dense, self.fragments, *(self.rows or ())]
        return next(value.dtype for value in values if value is not None)


class Parameters:
    """Weights by name, for one device and dtype.

    Filters are [R, S, C, F] float32, linear weights [in, out], all others vectors; see
    ``parameters()`` of graphs/resnet.py and graphs/cvt.py for the names. ``tf32`` tells whether a
    GPU may round float32 to TF32 for products.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        device: DeviceRef,
        dtype: DType,
        prefix: str = "",
        *,
        tf32: bool = True,
    ) -> None:
        self.tensors = tensors
        self.device = device
        self.dtype = dtype
        self.prefix = prefix
        self.tf32 = tf32
        self.bound: dict[str, tuple[np.ndarray, DType]] = {}

    def at(self, prefix: str) -> Parameters:
        """Narrows to the names that begin with ``prefix`` and a dot."""
        inner = Parameters(
            self.tensors, self.device, self.dtype, f"{self.prefix}{prefix}.", tf32=self.tf32
        )
        inner.bound = self.bound
        return inner

    def has(self, name: str) -> bool:
        """Tells whether there is a weight called ``name``."""
        return self.prefix + name in self.tensors

    def filter(self, name: str, groups: int = 1, *, sparse: bool = False) -> Filter:
        """Returns ``name.filter`` (or the linear ``name.weight``) with ``name.bias``.

        A missing bias is zeros. With ``sparse`` the filter is kept as compressed rows.
        """
        key = f"{name}.filter" if self.has(f"{name}.filter") else f"{name}.weight"
        filters = self._tensor(key)
        if filters.ndim == 2:
            filters = filters[None, None]
        bias_key = f"{name}.bias"
        bias = self._tensor(bias_key) if self.has(bias_key) else np.zeros(filters.shape[3])
        bias_value = self._bind(bias_key, bias, DType.float32)
        shape = filters.shape
        if sparse:
            values, columns, starts = arrange.compressed_rows(filters, groups)
            if not values.size:  # MAX binds no empty buffer; no row reads this one
                values, columns = np.zeros(1, filters.dtype), np.zeros(1, np.int32)
            rows = (
                self._bind(f"{key}.values", values, self.dtype),
                self._bind(f"{key}.columns", columns, DType.int32),
                self._bind(f"{key}.row_starts", starts, DType.int32),
            )
            return Filter(shape, groups, bias_value, rows=rows)
        if arrange.is_depthwise(shape, groups):
            arranged = filters.reshape(-1)
        elif self.device.is_cpu():
            arranged = arrange.panels(filters, groups)
        else:
            arranged = arrange.filter_major(filters)
        dense = self._bind(key, arranged, self.dtype)
        return Filter(shape, groups, bias_value, dense=dense, tf32=self.tf32)

    def stem(self, name: str, stride: int) -> Filter:
        """Returns ``filter(name)`` for a stem: as the fused one reads it if the device has it."""
        filters = self._tensor(f"{name}.filter")
        fused = (
            not self.device.is_cpu()
            and accelerator_api() == "cuda"
            and self.dtype in (DType.bfloat16, DType.float16)
            and arrange.has_stem(filters.shape, stride)
        )
        if not fused:
            return self.filter(name)
        bias = self._bind(f"{name}.bias", self._tensor(f"{name}.bias"), DType.float32)
        fragments = self._bind(f"{name}.filter", arrange.stem_fragments(filters), self.dtype)
        return Filter(filters.shape, 1, bias, fragments=fragments)

    def levels(self, x: TensorValue) -> tuple[TensorValue, TensorValue] | None:
        """Returns mean and scale of uint8 pixels x; others are normalised already: None."""
        if x.dtype != DType.uint8:
            return None
        return self.vector("pixels.mean"), self.vector("pixels.scale")

    def vector(self, name: str, dtype: DType = DType.float32) -> TensorValue:
        """Returns the vector ``name``: layer norm's weights, a class token, a pixel mean."""
        return self._bind(name, self._tensor(name), dtype)

    def registry(self, device: Device) -> dict[str, Buffer]:
        """Makes the weights that the graph asked for, on ``device``, for ``session.init``."""
        return {name: _buffer(*bound).to(device) for name, bound in self.bound.items()}

    def _tensor(self, name: str) -> np.ndarray:
        try:
            return self.tensors[self.prefix + name]
        except KeyError:
            raise ModelError(f"the graph expects the weight {self.prefix}{name}") from None

    def _bind(self, name: str, array: np.ndarray, dtype: DType) -> TensorValue:
        full = self.prefix + name
        self.bound[full] = (array, dtype)
        return ops.constant_external(full, TensorType(dtype, array.shape, device=self.device))


def _buffer(array: np.ndarray, dtype: DType) -> Buffer:
    """Copies ``array`` into a buffer of ``dtype``, rounding to nearest even."""
    if dtype == DType.bfloat16:
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return Buffer.from_numpy(rounded.astype(np.uint16)).view(DType.bfloat16)
    return Buffer.from_numpy(np.ascontiguousarray(array, dtype.to_numpy()))
