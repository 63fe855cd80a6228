"""How the blocks of a cluster add up a tile that they share: each sends the others its sums.

Each block has summed a part of K (split-K), and finishes a part of the tile's columns. It sends
every peer the sums of the peer's columns from its registers into the peer's inbox (st.async, PTX ISA
8.1), whose barrier tells when all have come. No block waits for the cluster a second time, as in
reduce_cluster of epilogue.mojo: when its inbox is full, nobody sends to it any more.

    init, fence_barrier_init, expect    by one thread
    cluster_arrive, ..., cluster_wait   so that peers do not send before that
    send, receive                       by the consumers

`Exchange` is the same for larger tiles, and as many blocks as are known at compile time.
"""

from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..operands import F32
from .accumulator import Fragment, Sums
from .mma import ROWS
from .ptx import (
    barrier_expect,
    barrier_init,
    barrier_wait,
    cluster_address,
    cluster_send,
    shared_load2,
    shared_load4,
)
from .scheduler import Share
from .shared import WARP, WARPGROUP

comptime PEERS = 8
"""Blocks of a cluster at most."""


@fieldwise_init
struct Inbox[columns: Int, groups: Int](TrivialRegisterPassable):
    """What the blocks of a cluster of 2, 4 or 8 send to one of them, itself among them.

    Parameters:
        columns: Of the tile: 32 or 64.
        groups: Consumers, of 64 rows each.
    """

    comptime UNIT = Self.columns // 16
    """Sums that are sent at a time, of the `PEERS` times as many of a thread."""
    comptime MOST = PEERS // 2
    """Units of a thread that a block finishes at most."""
    comptime PITCH = UInt32(WARPGROUP * Self.groups * 4 * Self.UNIT)
    """Bytes of a unit of all threads."""
    comptime BYTES = ROWS * Self.groups * Self.columns * 4
    """Of the inbox: as many as a block has sums."""

    var data: UInt32
    """Address of the sums in shared memory."""
    var barrier: UInt32
    """Address of the barrier, 8 bytes."""
    var splits: Int32
    """Blocks of the cluster."""
    var rank: Int32
    """Of this block."""

    @always_inline
    def init(self):
        """Prepares the barrier, by one thread; `fence_barrier_init` has to follow."""
        barrier_init(self.barrier, 1)

    @always_inline
    def expect(self, warps: Int32):
        """Announces what will come, by one thread.

        Args:
            warps: Of consumers of each block that send; the same in all blocks.
        """
        comptime WARP_BYTES = WARP * Self.columns // 2 * 4
        barrier_expect(self.barrier, UInt32(warps * Int32(WARP_BYTES)))

    @always_inline
    def units(self) -> Int32:
        """Counts the units of a thread that a block finishes.

        Returns:
            At most `MOST`.
        """
        return Int32(PEERS) // self.splits

    @always_inline
    def pairs(self) -> Share:
        """Finds the sums that this block finishes.

        Returns:
            Pairs of sums of a thread, as accumulator.mojo numbers them.
        """
        comptime PAIRS = Int32(Self.UNIT // 2)
        var units = self.units()
        var begin = self.rank * units * PAIRS
        return Share(begin, begin + units * PAIRS)

    @always_inline
    def send(self, at: Fragment, sums: StaticTuple[Float32, Self.columns // 2]):
        """Sends each block the sums that it finishes.

        Args:
            at: The thread's place.
            sums: Of the thread.
        """
        comptime assert Self.UNIT == 2 or Self.UNIT == 4, "cluster: columns must be 32 or 64"
        var units = self.units()
        var mine = self._mine(at) + UInt32(self.rank * units) * Self.PITCH
        comptime for j in range(PEERS):
            var owner = UInt32(j) * UInt32(self.splits) // UInt32(PEERS)
            var to = mine + UInt32(Int32(j) & (units - 1)) * Self.PITCH
            var unit = SIMD[F32, Self.UNIT](0)
            comptime for k in range(Self.UNIT):
                unit[k] = sums[Self.UNIT * j + k]
            cluster_send[Self.UNIT](
                cluster_address(to, owner), unit, cluster_address(self.barrier, owner)
            )

    @always_inline
    def receive(self, at: Fragment) -> StaticTuple[Float32, Self.MOST * Self.UNIT]:
        """Adds up what has come, when all of it has.

        Args:
            at: The thread's place.

        Returns:
            The thread's sums that this block finishes.
        """
        var units = self.units()
        var mine = self._mine(at)
        var sums = StaticTuple[Float32, Self.MOST * Self.UNIT](fill=0)
        barrier_wait(self.barrier, 0)
        comptime for j in range(Self.MOST):
            if Int32(j) < units:
                var parts = StaticTuple[SIMD[F32, Self.UNIT], PEERS](fill=SIMD[F32, Self.UNIT](0))
                comptime for peer in range(PEERS):
                    if Int32(peer) < self.splits:
                        var at = mine + UInt32(Int32(peer) * units + Int32(j)) * Self.PITCH
                        comptime if Self.UNIT == 2:
                            parts[peer] = rebind[SIMD[F32, Self.UNIT]](shared_load2(at))
                        else:
                            parts[peer] = rebind[SIMD[F32, Self.UNIT]](shared_load4(at))
                var total = SIMD[F32, Self.UNIT](0)
                comptime for peer in range(PEERS):
                    total += parts[peer]
                comptime for k in range(Self.UNIT):
                    sums[Self.UNIT * j + k] = total[k]
        return sums

    @always_inline
    def _mine(self, at: Fragment) -> UInt32:
        """Finds the thread's first unit."""
        return self.data + UInt32(at.t) * UInt32(4 * Self.UNIT)


struct Exchange[columns: Int, groups: Int, peers: Int](TrivialRegisterPassable):
    """What the blocks of a cluster send to one of them: the sums of the columns that it finishes.

    Its own sums of them never leave its registers.

    Parameters:
        columns: Of the tile.
        groups: Consumers, of 64 rows each.
        peers: Blocks of the cluster; columns are a multiple of 8 of each.
    """

    comptime OWN = Self.columns // Self.peers
    """Columns that a block finishes."""
    comptime SUMS = Self.OWN // 2
    """Sums of a thread that a block finishes."""
    comptime PITCH = WARPGROUP * Self.groups * 16
    """Bytes of four sums of all threads."""
    comptime PART = Self.SUMS // 4 * Self.PITCH
    """Bytes that a block sends to each other one."""
    comptime BYTES = (Self.peers - 1) * Self.PART
    """Bytes that come."""

    var data: UInt32
    """Address of `BYTES` bytes in shared memory, the same in all blocks."""
    var barrier: UInt32
    """Address of the barrier, 8 bytes."""

    @always_inline
    def __init__(out self, data: UInt32, barrier: UInt32):
        """Takes a place.

        Args:
            data: Address of `BYTES` bytes in shared memory, the same in all blocks.
            barrier: Address of 8 more.
        """
        comptime assert (
            Self.columns % (8 * Self.peers) == 0
        ), "Exchange: columns are a multiple of 8 of each block"
        self.data, self.barrier = data, barrier

    @always_inline
    def init(self):
        """Prepares the barrier, by one thread; `fence_barrier_init` has to follow."""
        barrier_init(self.barrier, 1)

    @always_inline
    def expect(self):
        """Announces what will come, by one thread."""
        barrier_expect(self.barrier, UInt32(Self.BYTES))

    @always_inline
    def add[dtype: DType, //](self, at: Fragment, rank: Int32, mut sums: Sums[Self.columns, dtype]):
        """Sends each block the sums that it finishes, and adds up what comes.

        Parameters:
            dtype: Of the sums, of 32 bits; they travel as the bits of float32.

        Args:
            at: The thread's place.
            rank: Of the block.
            sums: Of the thread; those of the first `OWN` columns become those that this block finishes.
        """
        comptime assert size_of[dtype]() == 4, "Exchange: sums have 32 bits"
        var mine = self.data + 16 * UInt32(at.t)
        comptime for peer in range(Self.peers):
            if rank != Int32(peer):
                var slot = rank - Int32(1 if rank > Int32(peer) else 0)
                var to = cluster_address(mine + UInt32(slot) * UInt32(Self.PART), UInt32(peer))
                var barrier = cluster_address(self.barrier, UInt32(peer))
                comptime for i in range(Self.SUMS // 4):
                    var four = SIMD[F32, 4](0)
                    comptime for e in range(4):
                        four[e] = bitcast[F32](sums[peer * Self.SUMS + 4 * i + e])
                    cluster_send[4](to + UInt32(i * Self.PITCH), four, barrier)
        comptime for i in range(Self.SUMS):
            comptime for peer in range(1, Self.peers):
                if rank == Int32(peer):
                    sums[i] = sums[peer * Self.SUMS + i]
        barrier_wait(self.barrier, 0)
        comptime for i in range(Self.SUMS // 4):
            comptime for slot in range(Self.peers - 1):
                var four = shared_load4(mine + UInt32(slot * Self.PART + i * Self.PITCH))
                comptime for e in range(4):
                    sums[4 * i + e] += bitcast[dtype](four[e])
