"""Sparse convolution: registration, checks and the choice of a kernel.

conv2d with the filter in compressed rows: row f holds values[row_starts[f] : row_starts[f + 1]]
at columns (r * S + s) * C + c, ascending. Groups need nothing here: their columns name the
channels of x itself. A row may be empty.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..operands import F32, Data, Operands, data
from .cpu import sparse_conv2d_cpu
from .gpu import sparse_conv2d_gpu


@always_inline
def _sparse_conv2d[
    dtype: DType, //, target: StaticString, name: StaticString
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.int32],
    row_starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    comptime assert Epilogue.known(
        name
    ), "sparse_conv2d: epilogue expects none, relu, gelu, add or add_relu"
    if g.pixels() == 0:
        return
    comptime if target == "cpu":
        comptime assert dtype == F32, "sparse_conv2d: a CPU expects float32"
        sparse_conv2d_cpu[Epilogue(name)](g, rebind[Operands[F32]](o), columns, row_starts)
    else:
        sparse_conv2d_gpu[dtype, Epilogue(name)](g, o, columns, row_starts, ctx)


@register("sparse_conv2d")
struct SparseConv2d:
    """Convolves x[N, H, W, C] into y[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        values: InputTensor[dtype=y.dtype, rank=1, ...],
        columns: InputTensor[dtype=DType.int32, rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: "none", "relu" or "gelu".

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            values: Nonzeros, filter by filter.
            columns: (r * S + s) * C + c of each, ascending in a filter.
            row_starts: [F + 1], where each filter's nonzeros begin.
            bias: [F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert not Epilogue(
            epilogue
        ).adds, "sparse_conv2d: sparse_conv2d_add takes the residual"
        _sparse_conv2d[target, epilogue](
            Geometry(x.shape(), y.shape(), data(window)),
            Operands[y.dtype](
                data(x),
                data(values),
                data(bias),
                data(x),
                data(y),
            ),
            data(columns),
            data(row_starts),
            ctx,
        )


@register("sparse_conv2d_add")
struct SparseConv2dAdd:
    """Convolves and adds residual[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        values: InputTensor[dtype=y.dtype, rank=1, ...],
        columns: InputTensor[dtype=DType.int32, rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: "add" or "add_relu".

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            values: Nonzeros, filter by filter.
            columns: (r * S + s) * C + c of each, ascending in a filter.
            row_starts: [F + 1], where each filter's nonzeros begin.
            bias: [F].
            residual: [N, P, Q, F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue(
            epilogue
        ).adds, "sparse_conv2d: an epilogue that adds is expected here"
        _sparse_conv2d[target, epilogue](
            Geometry(x.shape(), y.shape(), data(window)),
            Operands[y.dtype](
                data(x),
                data(values),
                data(bias),
                data(residual),
                data(y),
            ),
            data(columns),
            data(row_starts),
            ctx,
        )
