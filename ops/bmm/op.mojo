"""Batched matrix product: registration, checks and the choice of a kernel.

    y[i, m, n] = act(alpha * sum_k a[i, m, k] b[i, k, n] + bias[n] + residual[i, m, n])

`layout` says how b lies in memory: "kn" is b[B, K, N], "nk" is b[B, N, K] (transposed: the keys
of attention, torch's linear weights), "packed" are the panels of graphs/arrange.py (a CPU's
linear layers). A batch of one b serves every a.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.gpu import gemm as gemm_gpu
from ..geometry import Data, Geometry
from .cpu import bmm_cpu


@always_inline
def _bmm[
    target: StaticString, dtype: DType, name: StaticString, layout: StaticString
](
    y_size: Int,
    b_size: Int,
    k: Int,
    n: Int,
    m: Int,
    a: Data[dtype],
    b: Data[dtype],
    bias: Data[DType.float32],
    residual: Data[dtype],
    y: Data[dtype],
    alpha: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert Epilogue.known(name), "bmm: epilogue expects none, relu, gelu, add or add_relu"
    comptime assert layout == "kn" or layout == "nk" or layout == "packed", "bmm: unknown layout"
    comptime epilogue = Epilogue(name)
    if y_size == 0:
        return
    var batch = y_size // (m * n)
    var b_step = k * n if layout != "packed" and b_size > k * n else 0
    comptime if target == "cpu":
        comptime assert dtype == DType.float32, "bmm: a CPU expects float32"
        comptime F32 = Data[DType.float32]
        bmm_cpu[epilogue, layout](
            batch, m, k, n, rebind[F32](a), rebind[F32](b), b_step, bias, rebind[F32](residual),
            rebind[F32](y), alpha,
        )
    else:
        comptime assert layout != "packed", "bmm: panels are a CPU's; a GPU expects kn or nk"
        # One b for all: the batch is more rows of one product.
        var products = batch if b_step else 1
        var rows = m if b_step else batch * m
        var steps: Array[Int, 4] = [m * k, b_step, m * n, 0]
        gemm_gpu[dtype, epilogue, layout == "nk"](
            Geometry(rows=rows, depth=k, columns=n), products, a, b, bias, residual, y, alpha,
            steps, ctx,
        )


@register("bmm")
struct Bmm:
    """Multiplies a[..., M, K] by b into y[..., M, N]; epilogue none, relu or gelu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, layout: StaticString
    ](
        y: OutputTensor,
        a: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        b: InputTensor[dtype=y.dtype, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        alpha: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op; `alpha` is one number in host memory."""
        comptime assert not Epilogue(epilogue).adds, "bmm: bmm_add takes the residual"
        _bmm[target, y.dtype, epilogue, layout](
            y.size(), b.size(), a.shape()[a.rank - 1], y.shape()[y.rank - 1],
            a.shape()[a.rank - 2], a.unsafe_ptr(), b.unsafe_ptr(), bias.unsafe_ptr(), a.unsafe_ptr(),
            y.unsafe_ptr(), alpha.unsafe_ptr()[unsafe_offset=0], ctx,
        )


@register("bmm_add")
struct BmmAdd:
    """Multiplies and adds residual[..., M, N]; epilogue add or add_relu."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, layout: StaticString
    ](
        y: OutputTensor,
        a: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        b: InputTensor[dtype=y.dtype, ...],
        bias: InputTensor[dtype=DType.float32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        alpha: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op; `alpha` is one number in host memory."""
        comptime assert Epilogue(epilogue).adds, "bmm: bmm_add expects add or add_relu"
        _bmm[target, y.dtype, epilogue, layout](
            y.size(), b.size(), a.shape()[a.rank - 1], y.shape()[y.rank - 1],
            a.shape()[a.rank - 2], a.unsafe_ptr(), b.unsafe_ptr(), bias.unsafe_ptr(), residual.unsafe_ptr(),
            y.unsafe_ptr(), alpha.unsafe_ptr()[unsafe_offset=0], ctx,
        )
