"""Sparse convolution: registration, checks and the choice of a kernel.

conv2d with the filter in compressed rows: row f holds values[row_starts[f] : row_starts[f + 1]]
at columns (r * S + s) * C + c, ascending. Groups need nothing here: their columns name the
channels of x itself. A row may be empty.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..geometry import Data, Geometry
from .cpu import sparse_conv2d_cpu
from .gpu import sparse_conv2d_gpu


@always_inline
def _sparse_conv2d[
    target: StaticString, dtype: DType, name: StaticString
](
    g: Geometry,
    x: Data[dtype],
    values: Data[dtype],
    columns: Data[DType.int32],
    row_starts: Data[DType.int32],
    bias: Data[DType.float32],
    residual: Data[dtype],
    y: Data[dtype],
    ctx: DeviceContext,
) raises:
    comptime assert Epilogue.known(
        name
    ), "sparse_conv2d: epilogue expects none, relu, gelu, add or add_relu"
    comptime epilogue = Epilogue(name)
    if g.pixels() == 0:
        return
    comptime if target == "cpu":
        comptime assert dtype == DType.float32, "sparse_conv2d: a CPU expects float32"
        comptime F32 = Data[DType.float32]
        sparse_conv2d_cpu[epilogue](
            g, rebind[F32](x), rebind[F32](values), columns, row_starts, bias,
            rebind[F32](residual), rebind[F32](y),
        )
    else:
        sparse_conv2d_gpu[dtype, epilogue](
            g, x, values, columns, row_starts, bias, residual, y, ctx
        )


@register("sparse_conv2d")
struct SparseConv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F]; epilogue none, relu or gelu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        values: InputTensor[dtype=y.dtype, rank=1, ...],
        columns: InputTensor[dtype=DType.int32, rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op. `window` is geometry.mojo's."""
        comptime assert not Epilogue(epilogue).adds, "sparse_conv2d_add takes the residual"
        _sparse_conv2d[target, y.dtype, epilogue](
            Geometry(x.shape(), y.shape(), window.unsafe_ptr()),
            x.unsafe_ptr(), values.unsafe_ptr(), columns.unsafe_ptr(), row_starts.unsafe_ptr(),
            bias.unsafe_ptr(), x.unsafe_ptr(), y.unsafe_ptr(), ctx,
        )


@register("sparse_conv2d_add")
struct SparseConv2dAdd:
    """Convolves and adds residual[N, P, Q, F]; epilogue add or add_relu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        values: InputTensor[dtype=y.dtype, rank=1, ...],
        columns: InputTensor[dtype=DType.int32, rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op. `window` is geometry.mojo's."""
        comptime assert Epilogue(epilogue).adds, "sparse_conv2d_add expects add or add_relu"
        _sparse_conv2d[target, y.dtype, epilogue](
            Geometry(x.shape(), y.shape(), window.unsafe_ptr()),
            x.unsafe_ptr(), values.unsafe_ptr(), columns.unsafe_ptr(), row_starts.unsafe_ptr(),
            bias.unsafe_ptr(), residual.unsafe_ptr(), y.unsafe_ptr(), ctx,
        )
