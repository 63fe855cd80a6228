"""How a result leaves shared memory by the copy engine, and when that memory may be written again.

A consumer, a warpgroup, goes

    finish_rows or finish_columns   the result lies in boxes in shared memory
    store_boxes                     all of it is visible to the copy engine, and the first thread stores
                                    it: groups of stores are a thread's own, so it alone can wait for them

and a place is written again in one of two ways:

    a stage of a ring    the producer brings a residual there, or nothing (`load_residual`); the result
                         takes its place, and the first thread releases the stage, late: all stages
                         of a tile at once (`Storing`), or each before the next (`StoringStage`)
    boxes of its own     the first thread waits for its stores, and the others for it (`BoxRing`)

CUTLASS: sm90_epilogue_tma_warpspecialized, PipelineTmaStore; PTX ISA 8.0: cp.async.bulk.wait_group.
"""

from std.sys import size_of

from .barrier import Barrier
from .mma import ROWS
from .pipeline import Pipeline
from .ptx import fence_async, stores_commit, stores_read, sync_threads
from .shared import ROW, WARPGROUP
from .tma import TileLoader, TileStore


@always_inline
def sync_writes(barrier: UInt32, threads: Int = WARPGROUP):
    """Has threads meet, after which the copy engine and wgmma see what they wrote.

    Args:
        barrier: One of `sync_threads`.
        threads: How many meet there; all of them call this.
    """
    fence_async()
    sync_threads(barrier, UInt32(threads))


@always_inline
def store_boxes[
    dtype: DType, columns: Int, *, rows: Int = ROWS, bytes: Int = ROW, images: Bool = False
](
    y: TileStore,
    at: UInt32,
    column: Int32,
    row: Int32,
    image: Int32 = 0,
    *,
    barrier: UInt32,
    leads: Bool,
    before: StoringStage = StoringStage(),
):
    """Starts storing a result, as one group, once all of it is written; by all of a consumer's threads.

    Parameters:
        dtype: Of the result.
        columns: Of the result, in boxes side by side.
        rows: Of the result.
        bytes: Of a row of a box.
        images: Whether y has them, and so rank 3.

    Args:
        y: Where to.
        at: The first box in shared memory; the others follow.
        column: The result's first in y.
        row: Likewise.
        image: Likewise, if there are images.
        barrier: At which the consumer meets.
        leads: Whether the thread stores.
        before: The stage of the result before, which it releases.
    """
    sync_writes(barrier)
    if leads:
        before.release()
        comptime WIDTH = bytes // size_of[dtype]()
        comptime for j in range(columns // WIDTH):
            var box = at + UInt32(j * rows * bytes)
            var x = column + Int32(j * WIDTH)
            comptime if images:
                y.store(box, x, row, image)
            else:
                y.store(box, x, row)
        stores_commit()


@always_inline
def load_residual[
    dtype: DType,
    columns: Int,
    *,
    joins: Bool,
    groups: Int = 1,
    rows: Int = ROWS,
    bytes: Int = ROW,
    images: Bool = False,
](mut pipeline: Pipeline, residual: TileLoader, column: Int32, row: Int32, image: Int32 = 0):
    """Gives consumers the next stage for their results; by the producer.

    Parameters:
        dtype: Of the residual.
        columns: Of a consumer's result, in boxes side by side.
        joins: Whether there is a residual; if not, the stage holds nothing.
        groups: Consumers; their rows follow one another.
        rows: Of each one's result.
        bytes: Of a row of a box.
        images: Whether the residual has them, and so rank 3.

    Args:
        pipeline: The ring; goes on by a stage.
        residual: Where from.
        column: The results' first in the residual.
        row: Likewise.
        image: Likewise, if there are images.
    """
    comptime WIDTH = bytes // size_of[dtype]()
    comptime BOXES = columns // WIDTH
    pipeline.acquire()
    comptime if joins:
        pipeline.expect(UInt32(groups * BOXES * rows * bytes))
        comptime for i in range(groups):
            comptime for j in range(BOXES):
                var to = pipeline.stage() + UInt32((i * BOXES + j) * rows * bytes)
                var x = column + Int32(j * WIDTH)
                var y = row + Int32(i * rows)
                comptime if images:
                    residual.load(to, pipeline.barrier(), x, y, image)
                else:
                    residual.load(to, pipeline.barrier(), x, y)
    else:
        pipeline.commit()
    pipeline.advance()


struct Storing[count: Int](TrivialRegisterPassable):
    """The stages from which the copy engine still stores a result.

    A consumer's first thread releases them late, under the next tile's first products.

    Parameters:
        count: How many stages a result takes.
    """

    var first: UInt32
    """Index of the first, plus 1; 0 if there are none."""

    @always_inline
    def __init__(out self):
        """Begins with none."""
        self.first = 0

    @always_inline
    def begin(mut self, pipeline: Pipeline):
        """Notes that `count` stages, from the current one on, are being stored.

        Args:
            pipeline: Where the consumer is.
        """
        self.first = pipeline.index + 1

    @always_inline
    def release(mut self, pipeline: Pipeline):
        """Gives the stages back, once the copy engine has read them.

        Args:
            pipeline: Of the stages.
        """
        if self.first != 0:
            stores_read()
            comptime for i in range(Self.count):
                pipeline.release((self.first - 1 + UInt32(i)) % pipeline.stages)
            self.first = 0


struct StoringStage(TrivialRegisterPassable):
    """The stage, of any ring, from which the copy engine still stores a result.

    For a consumer that stores a stage at a time: its first thread releases each before the next.
    """

    var empty: UInt32
    """Address of the stage's `empty`; 0 if there is none."""

    @always_inline
    def __init__(out self):
        """Begins with none."""
        self.empty = 0

    @always_inline
    def begin(mut self, pipeline: Pipeline):
        """Notes that the next stage is being stored.

        Args:
            pipeline: Where the consumer is.
        """
        self.empty = pipeline.empty + 8 * pipeline.index

    @always_inline
    def release(self):
        """Gives the stage back, once the copy engine has read it."""
        if self.empty != 0:
            stores_read()
            Barrier(self.empty).arrive()


struct BoxRing[most: Int](TrivialRegisterPassable):
    """Boxes of a warpgroup's own, from which its results leave in turns.

    No mbarrier is needed: the warpgroup's first thread waits for its stores, then all its threads meet.

    Parameters:
        most: Boxes at most.
    """

    var data: UInt32
    """Address of the first."""
    var bytes: UInt32
    """From a box to the next."""
    var boxes: Int32
    """How many there are."""
    var index: Int32
    """The box that is next."""

    @always_inline
    def __init__(out self, data: UInt32, *, boxes: Int32, bytes: UInt32):
        """Begins at the first box.

        Args:
            data: Address of the boxes.
            boxes: How many there are.
            bytes: From a box to the next.
        """
        self.data, self.bytes, self.boxes, self.index = data, bytes, boxes, 0

    @always_inline
    def acquire(mut self, barrier: UInt32, leads: Bool) -> UInt32:
        """Waits until the copy engine has read what the next box held, and goes on by it.

        Args:
            barrier: At which the warpgroup meets; all of its threads call this.
            leads: Whether the thread stores the results, one box a group.

        Returns:
            The box's address.
        """
        var box = self.data + UInt32(self.index) * self.bytes
        self.index = self.index + 1 if self.index + 1 < self.boxes else 0
        if leads:
            comptime for i in range(Self.most):
                if self.boxes == Int32(i + 1):
                    stores_read[i]()
        sync_threads(barrier, UInt32(WARPGROUP))
        return box
