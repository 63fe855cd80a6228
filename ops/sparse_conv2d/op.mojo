"""Sparse convolution: registration, checks and the choice of a kernel.

conv2d with the nonzeros of the filter, ordered for the device by graphs/arrange.py. Row i holds
values[starts[i] : starts[i + 1]] at its columns, which ascend; a row may be empty. Groups need
nothing here: columns name the channels of x itself.

GPU: steps, of 128 bytes of channels of one tap. Row (tile * steps + step) * TILE + f is filter f of
a tile there, a column (uint8) its channel in the step.
CPU: a stream. The channels are divided into even parts (a multiple of 16 each, but the last); row
part * F + f is filter f there, a column (int32) is (c * R + r) * S + s with c the channel in its
part.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..operands import F32, Data, Operands, data
from .cpu import Stream, sparse_conv2d_cpu
from .gpu import sparse_conv2d_gpu


@always_inline
def _sparse_conv2d[
    dtype: DType, //, target: StaticString, name: StaticString
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data,
    row_starts: Data[DType.int32],
    rows: Int,
    ctx: DeviceContext,
) raises:
    comptime assert Epilogue.known[
        name
    ](), "sparse_conv2d: there is no such epilogue; ops/epilogue.mojo says what there is"
    if g.pixels() == 0:
        return
    comptime if target == "cpu":
        comptime assert dtype == F32, "sparse_conv2d: a CPU expects float32"
        var stream = Stream(
            rebind[Data[F32]](o.w), rebind[Data[DType.int32]](columns), row_starts, rows // g.f
        )
        sparse_conv2d_cpu[Epilogue(name)](g, rebind[Operands[F32]](o), stream)
    else:
        sparse_conv2d_gpu[dtype, Epilogue(name)](
            g, o, rebind[Data[DType.uint8]](columns), row_starts, ctx
        )


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
        columns: InputTensor[rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: One that does not add (ops/epilogue.mojo).

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            values: Nonzeros, row by row.
            columns: Of each, ascending in a row; int32 on a CPU, uint8 on a GPU.
            row_starts: Where each row's nonzeros begin, and where the last one's end.
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
            row_starts.size() - 1,
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
        columns: InputTensor[rank=1, ...],
        row_starts: InputTensor[dtype=DType.int32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: One that adds (ops/epilogue.mojo).

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            values: Nonzeros, row by row.
            columns: Of each, ascending in a row; int32 on a CPU, uint8 on a GPU.
            row_starts: Where each row's nonzeros begin, and where the last one's end.
            bias: [F].
            residual: [N, P, Q, F].
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue(epilogue).adds, "sparse_conv2d: the epilogue must be one that adds"
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
            row_starts.size() - 1,
            ctx,
        )
