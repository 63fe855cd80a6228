"""Instances of ops/gemm's kernels for tensor cores, to be compiled for a GPU that is not here.

tests/ops/test_targets.py builds this file; running it would multiply what memory holds.
"""

from max.gpu.host import DeviceContext
from std.sys import argv

from ops.epilogue import Epilogue
from ops.gemm.gpu import gemm
from ops.geometry import Geometry
from ops.operands import F32, Batch, Data, Operands


def multiply[
    dtype: DType, epilogue: Epilogue, k_major: Bool, tf32: Bool
](size: Int, ctx: DeviceContext) raises:
    """Enqueues a product of size x size numbers.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].
        tf32: Whether float32 may be rounded to TF32.

    Args:
        size: At run time, or kernels for other sizes would not be compiled.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var numbers = ctx.enqueue_create_buffer[dtype](size * size)
    var bias = ctx.enqueue_create_buffer[F32](size)
    var all = rebind[Data[dtype]](numbers.unsafe_ptr())
    gemm[dtype, epilogue, k_major, tf32](
        Geometry(rows=size, depth=size, columns=size),
        Operands[dtype](all, all, rebind[Data[F32]](bias.unsafe_ptr()), all, all),
        Batch(),
        ctx,
    )


def main() raises:
    """Enqueues a product for every branch over dtypes, layouts and epilogues.

    Raises:
        If a launch fails.
    """
    var ctx = DeviceContext()
    var size = len(argv())
    multiply[DType.bfloat16, Epilogue("add_relu"), True, False](size, ctx)
    multiply[DType.float16, Epilogue("gelu"), False, False](size, ctx)
    multiply[F32, Epilogue("none"), False, True](size, ctx)
    multiply[F32, Epilogue("none"), False, False](size, ctx)
    ctx.synchronize()
