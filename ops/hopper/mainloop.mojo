"""The loop over K of a consumer: wait for a stage, multiply it, release it.

CUTLASS calls this a collective mainloop (sm90_mma_tma_gmma_ss_warpspecialized).
"""

from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)

from .accumulator import Sums
from .mma import ROWS, Matrix, mma
from .pipeline import Pipeline
from .shared import ROW
from .store import Storing


@always_inline
def multiply_stages[
    results: Int,
    sum: DType,
    //,
    dtype: DType,
    columns: Int,
    *,
    overlap: Bool,
    turned: Bool = False,
    turned_a: Bool = False,
    right: DType = dtype,
    row: Int = ROW,
    apart: Bool = False,
    each: Int = 1,
](
    mut pipeline: Pipeline,
    mut storing: Storing[results],
    steps: Int32,
    *,
    a: UInt32,
    b: UInt32,
    leads: Bool,
    start: Sums[columns, sum],
) -> Sums[columns, sum]:
    """Sums the products of a tile, A[64, K] B[K, columns] by a warpgroup.

    Parameters:
        results: Stages that a result takes.
        sum: Of the sums: `SUM`.
        dtype: Of the factors.
        columns: Of B.
        overlap: Whether a stage's products are issued before those of the last one are done: it is
            released later, so the ring has to be longer.
        turned: Whether B lies turned over: boxes of 64 rows of K, by 64 columns of 16 bits.
        turned_a: Whether A does: a box of 64 rows of K, by its 64 rows.
        right: Of B, where it is not A's.
        row: Bytes of K of a stage.
        apart: Whether A lies outside the ring, the 64 rows of a step behind those of the last.
        each: Which stages of the ring are the warpgroup's: every one, every second, and so on.

    Args:
        pipeline: The ring of stages; goes on by `steps` of the warpgroup's.
        storing: The result of the tile before; its stages are released under the first products.
        steps: Stages of the tile.
        a: Where the warpgroup's A lies in a stage, or the address of its first step's.
        b: Where B lies in a stage.
        leads: Whether the thread speaks for its warpgroup.
        start: What the products are added to.

    Returns:
        The thread's sums.
    """
    var sums = start
    var before = pipeline.index
    for i in range(steps):
        pipeline.wait()
        wgmma_fence_aligned()
        var beside = Matrix[row](pipeline.stage() + b, pitch=64 * ROW if turned else 16)
        var left = a + UInt32(i) * UInt32(ROWS * row) if apart else pipeline.stage() + a
        sums = mma[dtype, columns, turned=turned, turned_a=turned_a, right=right](
            Matrix[row](left), beside, sums
        )
        wgmma_commit_group_sync()
        if i == 0 and leads:
            storing.release(pipeline)
        comptime if overlap:
            if i > 0:
                wgmma_wait_group_sync[1]()
                if leads:
                    pipeline.release(before)
            before = pipeline.index
        else:
            wgmma_wait_group_sync[0]()
            if leads:
                pipeline.release()
        comptime if each == 1:
            pipeline.advance()  # without a division
        else:
            pipeline.advance(UInt32(each))
    comptime if overlap:
        wgmma_wait_group_sync[0]()
        if leads and steps > 0:
            pipeline.release(before)
    if leads and steps == 0:
        storing.release(pipeline)
    return sums
