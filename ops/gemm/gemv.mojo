"""A linear layer of one or two rows on Hopper: weights wait in registers for the kernel ahead.

    y[m, f] = act(sum_k x[m, k] w[f, k] + bias[f])

    x[M, K]   activations
    w[F, K]   weights
    y[M, F]   result

A classifier's head at batch 1 is a product of a matrix and a vector (GEMV), which leaves tensor cores
little to do. A warp computes `TOGETHER` filters of a row. Each lane loads 16 of every 512 bytes of
these filters into registers as soon as the block begins, while the kernel ahead still runs
(programmatic dependent launch). After the wait it loads the same part of x, sums up in float32, and the
lanes add their sums. There is no shared memory and no barrier.

Bound by latency: of the launch, of x from the second-level cache, and of the shuffles.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..hopper.shared import WARP
from ..launch import launch
from ..operands import F32, Data, Operands, widened
from ..rows import over_lanes

comptime TOGETHER = 2
"""Filters of a warp."""
comptime WARPS = 4
"""Warps of a block."""
comptime BLOCKS = 4
"""Blocks that a multiprocessor holds at least.

It bounds the registers, and without it ptxas uses fewer: it puts loads of x off until others have come.
"""
comptime VECTOR = 8
"""Numbers that a lane loads at a time: 16 bytes."""
comptime VECTORS = 8
"""Vectors of a row that a lane holds at most."""
comptime DEPTH = VECTORS * WARP * VECTOR
"""K at most: 2,048."""
comptime ROWS = 2
"""Rows at most: with 4 the tiles of resident.mojo take as long (H200, 2026-11-28)."""


def has_gemv[dtype: DType, epilogue: Epilogue]() -> Bool:
    """Tells whether there is a kernel.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the sums go through.

    Returns:
        True in 16 bits, without a residual and without moments of rows.
    """
    return dtype.is_half_float() and not (epilogue.joins or epilogue.normed())


def takes_gemv(g: Geometry) -> Bool:
    """Tells whether the kernel takes a product, and is the fastest.

    Args:
        g: Sizes that the copy engine takes (`takes` of hopper/conv.mojo).

    Returns:
        True for few rows, and a K that the registers hold.
    """
    return g.plain() and g.pixels() <= ROWS and g.c <= DEPTH


@always_inline
def _vector[dtype: DType, //, v: Int](row: Data[dtype], depth: Int32) -> SIMD[dtype, VECTOR]:
    """Loads this lane's vector among the v-th 32 of a row of K numbers; zeros beyond its end."""
    var k = (Int32(thread_idx.x) % Int32(WARP) + Int32(v * WARP)) * Int32(VECTOR)
    if k >= depth:
        return 0
    return row.unsafe_load[width=VECTOR, alignment=16](Int(k))


@always_inline
def _packed[dtype: DType, //](vector: SIMD[dtype, VECTOR]) -> SIMD[dtype, VECTOR]:
    """Gives a vector as it is, so that LLVM does not widen it where it is loaded, to twice the registers."""
    var pairs = bitcast[DType.uint32, VECTOR // 2](vector)
    comptime for i in range(VECTOR // 2):
        pairs[i] = inlined_assembly["", UInt32, constraints="=r,0"](pairs[i])
    return bitcast[dtype, VECTOR](pairs)


@__name(t"gemm_gemv_{epilogue.label()}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * WARP)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def gemv_kernel[dtype: DType, epilogue: Epilogue](o: Operands[dtype], depth: Int32, filters: Int32):
    """Computes some filters of a row in each warp; block_idx.y is the row.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the sums go through.

    Args:
        o: The tensors.
        depth: K.
        filters: F, a multiple of those of a warp.
    """
    var index = Int32(block_idx.x) * Int32(WARPS) + Int32(thread_idx.x) // Int32(WARP)
    var f = index * Int32(TOGETHER)
    if f >= filters:
        return
    var w = Array[SIMD[dtype, VECTOR], TOGETHER * VECTORS](uninitialized=True)
    comptime for i in range(TOGETHER):
        var row = o.w.unsafe_offset(Int(f + Int32(i)) * Int(depth))
        comptime for v in range(VECTORS):
            w[i * VECTORS + v] = _vector[v=v](row, depth)
    launch_dependent_grids()
    wait_on_dependent_grids()

    var output = Output[epilogue](o)
    var bias = output.channels[TOGETHER](Int(f)).bias
    var row = o.x.unsafe_offset(Int(block_idx.y) * Int(depth))
    var x = Array[SIMD[dtype, VECTOR], VECTORS](uninitialized=True)
    comptime for v in range(VECTORS):
        x[v] = _vector[v=v](row, depth)

    # Sums begin with the bias: where it is added last, ptxas loads it last, behind the shuffles.
    var leads = Int32(thread_idx.x) % Int32(WARP) == 0
    var products = Array[SIMD[F32, VECTOR], TOGETHER](fill=0)
    comptime for i in range(TOGETHER):
        products[i][0] = bias[i] if leads else 0
    comptime for v in range(VECTORS):
        if Int32(v * WARP * VECTOR) < depth:
            comptime for i in range(TOGETHER):
                products[i] = widened(_packed(x[v])).fma(
                    widened(_packed(w[i * VECTORS + v])), products[i]
                )
    var sums = SIMD[F32, TOGETHER](0)
    comptime for i in range(TOGETHER):
        sums[i] = over_lanes[WARP](products[i].reduce_add())
    if leads:
        output.end(sums, Int(f), Int(block_idx.y) * Int(filters) + Int(f))


def gemv[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues a product by weights, which no kernel writes.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the sums go through.

    Args:
        g: Sizes that `takes_gemv` takes.
        o: The tensors; alpha is 1.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[gemv_kernel[dtype, epilogue]](
        ctx,
        o,
        Int32(g.c),
        Int32(g.f),
        grid_dim=(ceildiv(g.f, WARPS * TOGETHER), g.pixels()),
        block_dim=WARPS * WARP,
    )
