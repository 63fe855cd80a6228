"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..no_gpu import REASON
from ..operands import Batch, Operands, Scales
from .layer import Layer


@doc_hidden
def gemm[
    dtype: DType,
    epilogue: Epilogue,
    k_major: Bool,
    tf32: Bool,
    layer: Layer = Layer(),
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext, *, constant: Bool,) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_bytes[
    dtype: DType,
    right: DType,
    out: DType,
    epilogue: Epilogue,
    narrow: Bool,
    layer: Layer = Layer(),
](g: Geometry, o: Operands[dtype, out, right], scales: Scales, ctx: DeviceContext) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_bytes_shortcut[
    dtype: DType, right: DType, epilogue: Epilogue, narrow: Bool, layer: Layer = Layer()
](
    g: Geometry,
    o: Operands[dtype, dtype, right],
    beside: Geometry,
    more: Operands[dtype, dtype, right],
    scales: Scales,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_group[
    dtype: DType, products: Int, tf32: Bool, layer: Layer = Layer()
](
    sizes: Array[Geometry, products], operands: Array[Operands[dtype], products], ctx: DeviceContext
) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_bytes_group[
    dtype: DType, right: DType, out: DType, products: Int, layer: Layer = Layer()
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype, out, right], products],
    scales: Array[Scales, products],
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_shortcut[
    dtype: DType, tf32: Bool, layer: Layer = Layer()
](
    g: Geometry, o: Operands[dtype], beside: Geometry, more: Operands[dtype], ctx: DeviceContext
) raises:
    comptime assert False, REASON
