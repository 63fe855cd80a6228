"""The functions of gpu.mojo where there are no kernels for GPUs: nothing may instantiate them."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from .attention.config import Attention
from .attention.mask import Mask, MaskSizes, MaskTensors
from .depthwise_qkv.config import QkvOperands, QkvSizes
from .epilogue import Epilogue
from .geometry import Geometry
from .group_norm.config import GroupNormSizes, GroupNormTensors
from .operands import Batch, Data, Operands
from .squeeze_excite.config import SqueezeTensors

comptime REASON = "these ops were compiled for a CPU; a GPU's graph takes the folder ops itself"
"""What whoever instantiates one is told."""


@doc_hidden
def attention_gpu[
    dtype: DType, depth: Int, mask: Mask
](o: Attention[dtype], tensors: MaskTensors[dtype], sizes: MaskSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON


@doc_hidden
def conv2d_gpu[
    dtype: DType, epilogue: Epilogue, tf32: Bool, depthwise: Bool, aligned: Bool
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    comptime assert False, REASON


@doc_hidden
def depthwise_qkv_gpu[
    dtype: DType, kernel: Int
](o: QkvOperands[dtype], g: QkvSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_gpu[
    dtype: DType, epilogue: Epilogue, k_major: Bool, tf32: Bool, aligned: Bool
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext, *, constant: Bool,) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_group_gpu[
    dtype: DType, products: Int, tf32: Bool, aligned: Bool
](
    sizes: Array[Geometry, products], operands: Array[Operands[dtype], products], ctx: DeviceContext
) raises:
    comptime assert False, REASON


@doc_hidden
def gemm_shortcut_gpu[
    dtype: DType, tf32: Bool, aligned: Bool
](
    g: Geometry, o: Operands[dtype], beside: Geometry, more: Operands[dtype], ctx: DeviceContext
) raises:
    comptime assert False, REASON


@doc_hidden
def group_norm_gpu[
    dtype: DType, epilogue: Epilogue
](o: GroupNormTensors[dtype], g: GroupNormSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON


@doc_hidden
def reduce_gpu[
    dtype: DType, kind: StaticString
](
    x: Data[dtype],
    y: Data[dtype],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON


@doc_hidden
def sparse_conv2d_gpu[
    dtype: DType, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.uint8],
    starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON


@doc_hidden
def squeeze_excite_gpu[
    dtype: DType, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](
    o: SqueezeTensors[dtype],
    images: Int,
    pixels: Int,
    channels: Int,
    hidden: Int,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
