"""The loop over K of a consumer: wait for a stage, multiply it, release it.

With `overlap` the products of a stage are issued before those of the previous stage are waited for, and the
previous stage is released then. Without it each stage is finished before the next.

    multiply_stages   a stage has both sides of a step
    multiply_steps    x and the filters have rings of their own, and steps may share a box of pixels

They are two because a ring may have room for one box only, so `multiply_steps` waits for all products
of a box before it waits for the next box. Three GEMMs write their own loop: gemm/turned.mojo keeps
products in flight from box to box; gemm/pingpong.mojo signals the other consumer while its last products
run; in sparse_conv2d/two_four.mojo products read registers, which are held until the next step's are
issued. Attention, chains and the stem are no plain loops over K.

CUTLASS calls this a collective mainloop (sm90_mma_tma_gmma_ss_warpspecialized).
"""

from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)

from .accumulator import Fragment, Sums
from .mma import ROWS, Matrix, mma
from .pipeline import Pipeline
from .shared import ROW
from .pixel_box import PixelBox
from .store import Storing
from .window import Steps


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


@always_inline
def multiply_steps[
    dtype: DType, columns: Int
](
    x_at_start: Pipeline,
    w_at_start: Pipeline,
    steps_at_start: Some[Steps],
    count: Int32,
    box: PixelBox[_],
    at: Fragment,
    *,
    resident: Bool,
) -> Sums[columns]:
    """Multiplies the stages of x and of the filters, by all consumers.

    Parameters:
        dtype: Of x and the filters.
        columns: Filters of the tile.

    Args:
        x_at_start: The ring of x; a stage is a box, or the pixels of a step.
        w_at_start: The ring of the filters; a stage is that of a step.
        steps_at_start: The steps of K.
        count: How many there are: looked up before the kernel ahead is done.
        box: What a stage of x holds.
        at: The thread's place.
        resident: Whether the filters of all steps are there already, a stage of their own each.

    Returns:
        The sums, still in flight: the caller waits for all groups before it reads them. The last
        stages are not released.
    """
    var x = x_at_start
    var w = w_at_start
    var steps = steps_at_start
    x.data += UInt32(at.group() * Int32(ROWS * ROW))
    var leads = at.leads()
    var sums = Sums[columns](fill=0)
    var current = Int32(-1)
    var before = w.index
    for k in range(count):
        var shift = UInt32(0)
        if box.all_taps():
            var reads = steps.reads(k)
            shift = reads.shift()
            while current < reads.number():
                if current >= 0:
                    wgmma_wait_group_sync[0]()
                    if leads:
                        x.release()
                    x.advance()
                current += 1
                x.wait()
        else:
            x.follow(w)
            x.wait()
        if not resident:
            w.wait()
        wgmma_fence_aligned()
        sums = mma[dtype, columns](Matrix(x.stage() + shift), Matrix(w.stage()), sums)
        wgmma_commit_group_sync()
        if not resident:
            wgmma_wait_group_sync[1]()
            if leads and k > 0:
                w.release(before)
                if not box.all_taps():
                    x.release(before)
        before = w.index
        w.advance()
        steps.advance()
    return sums
