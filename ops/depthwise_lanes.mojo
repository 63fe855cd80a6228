"""How a block of threads shares channels in kernels that read depthwise filters as they lie, w[C, R, S].

A block has lanes, neighbouring vectors of channels that are a line of memory at most, and behind each
of them walkers, which take different pixels. Then the filters of a block are few and side by side: it
copies them to shared memory tap by tap, [R, S, channels], where a thread reads those of its channels
as vectors.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from .geometry import Geometry
from .operands import Data, Shared

comptime LINE = 128
"""Bytes of channels of a block at most."""
comptime LANES[dtype: DType, width: Int] = LINE // (width * size_of[dtype]())
"""Lanes of a block at most.

Parameters:
    dtype: Of the channels.
    width: Channels of a vector.
"""
comptime PITCH[dtype: DType, width: Int] = (LANES[dtype, width] + 1) * width
"""Channels from one tap to the next in shared memory; a vector more than needed, against conflicts.

Parameters:
    dtype: Of the channels.
    width: Channels of a vector.
"""


def takes_unrolled(g: Geometry) -> Bool:
    """Tells whether kernels that unroll a window take a convolution.

    Args:
        g: Sizes.

    Returns:
        True if the window is square, and no tensor has more numbers than 32 bits count.
    """
    return g.square() and max(g.n * g.h * g.w, g.pixels()) * g.c < Int(Int32.MAX)


def lane_blocks[dtype: DType, width: Int, threads: Int](*, channels: Int, pieces: Int) -> Int:
    """Counts the blocks of a launch.

    Parameters:
        dtype: Of the channels.
        width: Channels of a vector; it divides all channels.
        threads: Of a block.

    Args:
        channels: C.
        pieces: What there is to compute of each vector of channels, a walker's each.

    Returns:
        The blocks.
    """
    var vectors = channels // width
    var columns = ceildiv(vectors, LANES[dtype, width])
    return columns * ceildiv(pieces, threads // ceildiv(vectors, columns))


struct Lane[dtype: DType, width: Int, threads: Int](TrivialRegisterPassable):
    """What a thread of a block computes.

    Parameters:
        dtype: Of the channels.
        width: Channels of a vector; it divides all channels.
        threads: Of a block.
    """

    var first: Int32
    """The block's first channel."""
    var channels: Int32
    """Channels of the block."""
    var c: Int32
    """The thread's first channel."""
    var piece: UInt32
    """Which of the pieces; walkers that are neighbours have neighbours."""
    var idle: Bool
    """Whether there is nothing for it to do."""

    @always_inline
    def __init__(out self, all: Int32):
        """Divides the channels.

        Args:
            all: How many there are.
        """
        var vectors = all // Int32(Self.width)
        var columns = ceildiv(vectors, Int32(LANES[Self.dtype, Self.width]))
        var lanes = ceildiv(vectors, columns)
        var walkers = Int32(Self.threads) // lanes
        var group, column = divmod(UInt32(block_idx.x), UInt32(columns))
        var walker, lane = divmod(UInt32(thread_idx.x), UInt32(lanes))
        self.first = Int32(column) * lanes * Int32(Self.width)
        self.channels = min(lanes * Int32(Self.width), all - self.first)
        self.c = self.first + Int32(lane) * Int32(Self.width)
        self.piece = group * UInt32(walkers) + walker
        self.idle = walker >= UInt32(walkers) or self.c >= all

    @always_inline
    def filters[taps: Int](self, w: Data[Self.dtype]) -> Shared[Self.dtype]:
        """Copies the filters of the block; all of its threads have to call it.

        Parameters:
            taps: R * S.

        Args:
            w: [C, R, S].

        Returns:
            Those of the thread's channels [R, S, width], a tap `PITCH` behind the one before.
        """
        comptime pitch = PITCH[Self.dtype, Self.width]
        var shared = unsafe_stack_allocation[
            taps * pitch, Self.dtype, address_space=AddressSpace.SHARED, alignment=16
        ]()
        var lying = w.unsafe_offset(self.first * Int32(taps))
        var count = UInt32(self.channels) * UInt32(taps)
        for i in range(UInt32(thread_idx.x), count, UInt32(Self.threads)):
            var channel, tap = divmod(i, UInt32(taps))
            shared[unsafe_offset=tap * UInt32(pitch) + channel] = lying[unsafe_offset=i]
        barrier()
        return shared.unsafe_offset(self.c - self.first)
