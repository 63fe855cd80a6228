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
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            values: Nonzeros, row by row.
            columns: Of each, ascending in a row; int32 on a CPU, uint8 on a GPU.
            row_starts: Where each row's nonzeros begin, and where the last one's end.
            bias: [F].
            residual: [N, P, Q, F]; x if the epilogue does not add.
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue.known[
            epilogue
        ](), "sparse_conv2d: there is no such epilogue; ops/epilogue.mojo says what there is"
        var g = Geometry(x.shape(), y.shape(), data(window))
        var o = Operands[y.dtype](data(x), data(values), data(bias), data(residual), data(y))
        if g.pixels() == 0:
            return
        comptime if target == "cpu":
            comptime assert y.dtype == F32, "sparse_conv2d: a CPU expects float32"
            var stream = Stream(
                rebind[Data[F32]](o.w),
                rebind[Data[DType.int32]](data(columns)),
                data(row_starts),
                (row_starts.size() - 1) // g.f,
            )
            sparse_conv2d_cpu[Epilogue(epilogue)](g, rebind[Operands[F32]](o), stream)
        else:
            sparse_conv2d_gpu[y.dtype, Epilogue(epilogue)](
                g, o, rebind[Data[DType.uint8]](data(columns)), data(row_starts), ctx
            )
