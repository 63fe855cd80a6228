"""How blocks that share a tile by its steps (stream-K) hand on their sums: by way of global memory.

A block leaves the sums of at most one tile that another block finishes (scheduler.mojo), in a place
of its own, and sets a flag; the block that finishes the tile waits for the flag, clears it, and adds
the sums, always in the same order. A flag that is set is a number that memory which nobody has
written does not hold, so nobody has to clear flags ahead of a launch.
"""

from max.gpu import block_idx

from ..kernel_argument import KernelArgument
from .accumulator import Fragment, Sums
from .ptx import flag_acquire, flag_release, global_load4, global_store4, sync_threads
from .scheduler import Share
from .shared import WARPGROUP

comptime SET = UInt64(0xA5C3_96E1_7B2D_48F9)
"""A flag that is set."""


struct Partials[columns: Int, groups: Int](KernelArgument, TrivialRegisterPassable):
    """The places of all blocks.

    Parameters:
        columns: Of the tile.
        groups: Consumers, of 64 rows each.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""
    comptime GROUP = WARPGROUP * Self.columns // 2 * 4
    """Bytes of the sums of a consumer."""

    var data: UInt64
    """Address of the flags of all blocks, and then of their sums, in global memory."""
    var blocks: Int32
    """Blocks of the launch."""

    def __init__(out self, data: UInt64, blocks: Int):
        """Takes memory.

        Args:
            data: Address of `bytes(blocks)` bytes, a multiple of 16.
            blocks: Of the launch.
        """
        self.data, self.blocks = data, Int32(blocks)

    @staticmethod
    def bytes(blocks: Int) -> Int:
        """Counts the bytes that a launch needs.

        Args:
            blocks: Of the launch.

        Returns:
            16 for the flag of each consumer, and its sums.
        """
        return blocks * Self.groups * (16 + Self.GROUP)

    @always_inline
    def _flag(self, place: Int32) -> UInt64:
        return self.data + 16 * UInt64(place)

    @always_inline
    def _sums(self, place: Int32, at: Fragment) -> UInt64:
        var first = self._flag(self.blocks * Int32(Self.groups))
        var thread = UInt64(at.t % Int32(WARPGROUP))
        return first + UInt64(place) * UInt64(Self.GROUP) + 16 * thread

    @always_inline
    def leave(self, at: Fragment, sums: Sums[Self.columns]):
        """Leaves a consumer's sums for the block that finishes the tile.

        Args:
            at: The thread's place.
            sums: Of the thread.
        """
        var place = Int32(block_idx.x) * Int32(Self.groups) + at.group()
        var to = self._sums(place, at)
        comptime for j in range(Self.columns // 8):
            var four = SIMD[DType.float32, 4](
                sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]
            )
            global_store4(to + UInt64(j * WARPGROUP * 16), four)
        sync_threads(UInt32(at.group()) + 1, UInt32(WARPGROUP))
        if at.leads():
            flag_release(self._flag(place), SET)

    @always_inline
    def add(self, at: Fragment, mut sums: Sums[Self.columns], helpers: Share):
        """Adds what other blocks have left of the tile.

        Args:
            at: The thread's place.
            sums: Of the thread.
            helpers: The other blocks.
        """
        for block in range(helpers.begin, helpers.end):
            var place = block * Int32(Self.groups) + at.group()
            if at.leads():
                while flag_acquire(self._flag(place)) != SET:
                    pass
                flag_release(self._flag(place), 0)
            sync_threads(UInt32(at.group()) + 1, UInt32(WARPGROUP))
            var source = self._sums(place, at)
            comptime for j in range(Self.columns // 8):
                var four = global_load4(source + UInt64(j * WARPGROUP * 16))
                comptime for e in range(4):
                    sums[4 * j + e] += four[e]
