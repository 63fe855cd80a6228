"""Windows where x and the filters come through rings of their own: the steps of K, and the producer.

A stage of x holds a box of pixels for all taps of 128 bytes of channels (pixel_box.mojo), or the pixels
of one tap.

    StepCounter      the steps of K that a block multiplies: all of its part, counted
    StepList         the same, where some are left out: a list in shared memory
    ring_stages      how many stages of x and of the filters shared memory has room for
    produce_pixels   the producer of x

K goes through the taps of 128 bytes of channels, then on to the next channels: `multiply_steps` of
mainloop.mojo is the consumers' loop.
"""

from max.gpu.primitives.grid_controls import wait_on_dependent_grids
from std.bit import pop_count
from std.math import ceildiv
from std.sys import size_of

from .conv import Conv, load_pixels
from .pipeline import Pipeline
from .pixel_box import BOX_ROWS, PixelBox, Taps
from .ptx import ballot, cluster_wait, shared_load, shared_store
from .scheduler import Share
from .shared import ROW
from .tma import TileLoader


@fieldwise_init
struct Reads(TrivialRegisterPassable):
    """What a step of K reads of x, in 4 bytes."""

    var bits: UInt32
    """Of a box its number in bits 16 to 31, bytes to the tap's first row below; of a tap its row in bits 24
    to 31, its column in 16 to 23, its channels below."""

    @staticmethod
    @always_inline
    def box(number: Int32, row: Int32) -> Self:
        """Describes a tap of a box.

        Args:
            number: Of the box, counted from the block's first.
            row: Of the box, at which the tap's rows begin.

        Returns:
            The step's.
        """
        comptime assert BOX_ROWS * ROW <= 1 << 16, "Reads: bytes of a box take 16 bits"
        return Self(UInt32(number << 16 | row * Int32(ROW)))

    @staticmethod
    @always_inline
    def tap(chunk: Int32, r: Int32, s: Int32) -> Self:
        """Describes the pixels of a tap.

        Args:
            chunk: Channels, in steps of 128 bytes.
            r: Row of the tap.
            s: Column of the tap.

        Returns:
            The step's.
        """
        return Self(UInt32(chunk | s << 16 | r << 24))

    @always_inline
    def number(self) -> Int32:
        """Gives the number of the box.

        Returns:
            Counted from the block's first.
        """
        return Int32(self.bits >> 16)

    @always_inline
    def shift(self) -> UInt32:
        """Gives the place of the tap's rows in the box.

        Returns:
            In bytes.
        """
        return self.bits & 0xFFFF

    @always_inline
    def chunk(self) -> Int32:
        """Gives the channels of a tap's pixels.

        Returns:
            In steps of 128 bytes.
        """
        return Int32(self.bits & 0xFFFF)

    @always_inline
    def r(self) -> Int32:
        """Gives the row of a tap.

        Returns:
            In the window.
        """
        return Int32(self.bits >> 24)

    @always_inline
    def s(self) -> Int32:
        """Gives the column of a tap.

        Returns:
            In the window.
        """
        return Int32(self.bits >> 16 & 0xFF)


trait Steps(TrivialRegisterPassable):
    """The steps of K that a block multiplies, one after another."""

    def first_chunk(self, conv: Conv) -> Int32:
        """Finds the channels of the first step of the block's part of K.

        Args:
            conv: Sizes.

        Returns:
            In steps of 128 bytes.
        """
        ...

    def count(self) -> Int32:
        """Counts the steps.

        Returns:
            How many.
        """
        ...

    def boxes(self) -> Int32:
        """Counts the boxes that the steps read, and those between them.

        Returns:
            From the block's first channels to the last that are read.
        """
        ...

    def reads(self, k: Int32) -> Reads:
        """Tells what the next step reads.

        Args:
            k: Its number: of the first 0, then 1, 2, ...

        Returns:
            Of x.
        """
        ...

    def advance(mut self):
        """Goes on to the step after."""
        ...


struct StepCounter(Steps):
    """All steps of a block's part of K, counted: nothing is looked up."""

    var share: Share
    """The block's part of K."""
    var chunk: Int32
    """Channels of the next step, in steps of 128 bytes."""
    var taps: Taps
    """Its tap; the shift is the part of `Reads` that depends on it."""
    var base: UInt32
    """The part of `Reads` that depends on the channels."""
    var base_step: UInt32
    """What that grows by from channels to the next."""

    @always_inline
    def __init__(out self, share: Share, conv: Conv, box: PixelBox[_]):
        """Begins at the first step.

        Args:
            share: The block's part of K.
            conv: Sizes.
            box: What steps read.
        """
        self.share = share
        self.chunk = Int32(UInt32(share.begin) // UInt32(conv.taps))
        self.base, self.base_step = 0, Reads.box(1, 0).bits
        var tap_step = Reads.box(0, 1).bits
        var row_step = Reads.box(0, box.width - conv.s).bits
        if not box.all_taps():
            self.base, self.base_step = Reads.tap(self.chunk, 0, 0).bits, Reads.tap(1, 0, 0).bits
            tap_step = Reads.tap(0, 0, 1).bits
            row_step = Reads.tap(0, 1, 0).bits - Reads.tap(0, 0, conv.s).bits
        self.taps = Taps(
            count=conv.taps,
            columns=conv.s,
            tap_step=tap_step,
            row_step=row_step,
            tap=share.begin - self.chunk * conv.taps,
        )

    @always_inline
    def first_chunk(self, conv: Conv) -> Int32:
        """Finds the channels of the first step of the block's part of K.

        Args:
            conv: Sizes.

        Returns:
            In steps of 128 bytes.
        """
        return Int32(UInt32(self.share.begin) // UInt32(conv.taps))

    @always_inline
    def count(self) -> Int32:
        """Counts the steps.

        Returns:
            How many.
        """
        return self.share.count()

    @always_inline
    def boxes(self) -> Int32:
        """Counts the boxes that the steps read.

        Returns:
            How many.
        """
        var taps = UInt32(self.taps.count)
        var last = UInt32(self.share.end - 1) // taps
        return Int32(last - UInt32(self.share.begin) // taps) + 1

    @always_inline
    def reads(self, k: Int32) -> Reads:
        """Tells what the next step reads.

        Args:
            k: Its number.

        Returns:
            Of x.
        """
        return Reads(self.base + self.taps.shift)

    @always_inline
    def advance(mut self):
        """Goes on to the step after."""
        self.taps.advance()
        if self.taps.begins():
            self.chunk += 1
            self.base += self.base_step


@fieldwise_init
struct StepList(Steps):
    """The steps of K that a block multiplies: a list in shared memory.

    A step whose filters are all zeros is not listed; a warp makes the list by a `StepWriter`.
    """

    var data: UInt32
    """Address of how many there are; for each its number, from the block's first, and `Reads`."""
    var share: Share
    """The block's part of K."""

    @staticmethod
    def bytes(count: Int) -> Int:
        """Counts the bytes of a list.

        Args:
            count: Steps of a block at most.

        Returns:
            Of shared memory.
        """
        return 4 + 8 * count

    @always_inline
    def first_chunk(self, conv: Conv) -> Int32:
        """Finds the channels of the block's first step.

        Args:
            conv: Sizes.

        Returns:
            In steps of 128 bytes.
        """
        return self.share.begin // conv.taps

    @always_inline
    def count(self) -> Int32:
        """Counts the steps that are listed.

        Returns:
            How many.
        """
        return Int32(shared_load(self.data))

    @always_inline
    def number(self, k: Int32) -> Int32:
        """Looks a step up.

        Args:
            k: Which of those that are listed.

        Returns:
            Its number, from the block's first.
        """
        return Int32(shared_load(self.data + 4 + 8 * UInt32(k)))

    @always_inline
    def reads(self, k: Int32) -> Reads:
        """Looks up what a step reads.

        Args:
            k: Which of those that are listed.

        Returns:
            Of x.
        """
        return Reads(shared_load(self.data + 8 + 8 * UInt32(k)))

    @always_inline
    def advance(mut self):
        """Does nothing: the list is looked up by number."""
        pass

    @always_inline
    def boxes(self) -> Int32:
        """Counts the boxes that the steps read, and those between them.

        Returns:
            From the block's first channels to the last that are read.
        """
        var count = self.count()
        return self.reads(count - 1).number() + 1 if count > 0 else Int32(0)


struct StepWriter(TrivialRegisterPassable):
    """Lists steps, by a warp: a step by each lane at a time."""

    var steps: StepList
    """The list."""
    var chunk: Int32
    """Channels of the block's first step."""
    var length: UInt32
    """Steps that are listed so far."""

    @always_inline
    def __init__(out self, steps: StepList, conv: Conv):
        """Begins with none.

        Args:
            steps: The list.
            conv: Sizes.
        """
        self.steps, self.chunk, self.length = steps, steps.first_chunk(conv), 0

    @always_inline
    def append(mut self, lane: Int32, number: Int32, listed: Bool, conv: Conv, box: PixelBox[_]):
        """Lists the lanes' steps, in the lanes' order.

        Args:
            lane: Of the warp; all of them call this.
            number: The lane's step, from the block's first.
            listed: Whether the lane has a step to list.
            conv: Sizes.
            box: What steps read.
        """
        var all = ballot(listed)
        if listed:
            var step = self.steps.share.begin + number
            var chunk = step // conv.taps
            var tap = step - chunk * conv.taps
            var r = tap // conv.s
            var s = tap - r * conv.s
            var reads = Reads.tap(chunk, r, s)
            if box.all_taps():
                reads = Reads.box(chunk - self.chunk, r * box.width + s)
            var before = all & ((UInt32(1) << UInt32(lane)) - 1)
            var at = self.steps.data + 4 + 8 * (self.length + UInt32(pop_count(before)))
            shared_store(at, UInt32(number))
            shared_store(at + 4, reads.bits)
        self.length += UInt32(pop_count(all))

    @always_inline
    def finish(self, lane: Int32):
        """Ends the list.

        Args:
            lane: Of the warp.
        """
        if lane == 0:
            shared_store(self.steps.data, self.length)


@always_inline
def produce_pixels[
    dtype: DType, *, split: Bool
](
    x: TileLoader,
    at_start: Pipeline,
    steps_at_start: Some[Steps],
    conv: Conv,
    box: PixelBox[_],
    tile: Int32,
):
    """Fills the ring of x, by one thread, once the kernel ahead is done.

    Parameters:
        dtype: Of x.
        split: Whether the blocks of a cluster share the tile.

    Args:
        x: The activations, of `box_map`.
        at_start: The ring.
        steps_at_start: The steps of K.
        conv: Sizes.
        box: What a stage holds.
        tile: Number of the tile of pixels.
    """
    comptime WIDTH = Int32(ROW // size_of[dtype]())
    x.prefetch_descriptor()
    var first = box.first(conv, tile)
    var corner = conv.corner(first)
    var steps = steps_at_start
    var chunk = steps.first_chunk(conv)
    var count = steps.boxes() if box.all_taps() else steps.count()
    var pipeline = at_start
    var expected = pipeline.expect_first(UInt32(box.loads), count)
    wait_on_dependent_grids()

    for i in range(count):
        var to = pipeline.stage()
        var full = pipeline.barrier()
        if i >= expected:
            comptime if split:
                if i == expected:
                    cluster_wait()  # consumers are there; see resident.mojo
            pipeline.acquire()
            pipeline.expect(UInt32(box.loads))
        if box.all_taps():
            x.load(to, full, (chunk + i) * WIDTH, corner.w, corner.h, first.n)
        else:
            var reads = steps.reads(i)
            load_pixels(
                x,
                to,
                full,
                conv,
                first,
                corner,
                channel=reads.chunk() * WIDTH,
                r=reads.r(),
                s=reads.s(),
            )
        pipeline.advance()
        steps.advance()


# The host's side


def ring_stages(
    box: PixelBox[_], *, taps: Int, chunks: Int, splits: Int, filters: Int, least: Int, room: Int
) -> Tuple[Int, Int]:
    """Divides shared memory between the rings of x and of the filters.

    Args:
        box: What a stage of x holds.
        taps: Of a window.
        chunks: Steps of 128 bytes over the channels.
        splits: Blocks that share a tile.
        filters: Bytes of a stage of filters.
        least: Stages of filters before there is room for a second box.
        room: Bytes to be divided.

    Returns:
        Stages of x, at least one: as many as of the filters, unless they are boxes; and of the
        filters, at most a block's steps.
    """
    var share = ceildiv(taps * chunks, splits)
    var x_bytes = Int(box.bytes) + Pipeline.BARRIERS
    var w_bytes = filters + Pipeline.BARRIERS
    if not box.all_taps():
        var stages = max(1, min(share, room // (x_bytes + w_bytes)))
        return stages, stages
    var boxes = 1 if splits == chunks else min(3, ceildiv(share - 1, taps) + 1)
    while boxes > 1 and boxes * x_bytes + least * w_bytes > room:
        boxes -= 1
    return boxes, max(1, min(share, (room - boxes * x_bytes) // w_bytes))
