"""How the blocks of a cluster add up a tile that they share: each has summed a part of K (split-K).

    Inbox            for a block of one small tile (tile.mojo), in clusters of 2, 4 or 8: each block
                     finishes some columns. From its registers it sends every block the sums of that
                     block's columns (st.async, PTX ISA 8.1), whose barrier tells when all have come
    Exchange         the same for larger tiles, for a number of blocks known at compile time: a block's
                     own sums stay in its registers
    reduce_cluster   for a number of blocks that divides the tile's rows: `leave_rows` or `leave_columns`
                     leaves a block's sums where its ring was, and then each block loads some rows of
                     all blocks and finishes them

reduce_cluster needs no room beside the ring, but the cluster waits twice: before it reads, and before any
block ends. Its loads run one after another. With the other two a block may end without waiting for the
cluster: once its sums have come, no peer accesses its shared memory again. docs/kernels.md has times of
each (Few tiles, Clusters of two, Rejected).

    barrier.init, fence_barrier_init, expect    by one thread
    cluster_arrive, ..., cluster_wait           so that peers do not send before that
    send, receive; or add                       by the consumers
"""

from max.gpu import thread_idx
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, apply
from ..operands import F32
from .accumulator import Fragment, Sums, pair, quad
from .barrier import Barrier
from .epilogue import EpilogueTensors
from .mma import ROWS
from .ptx import (
    cluster_address,
    cluster_load4,
    cluster_send,
    cluster_sync,
    shared_load2,
    shared_load4,
    shared_store2,
    shared_store_float,
)
from .scheduler import Share, Start
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
    var barrier: Barrier
    """Tells that they have come."""
    var splits: Int32
    """Blocks of the cluster."""
    var rank: Int32
    """Of this block."""

    @always_inline
    def expect(self, warps: Int32):
        """Announces what will come, by one thread.

        Args:
            warps: Of consumers of each block that send; the same in all blocks.
        """
        comptime WARP_BYTES = WARP * Self.columns // 2 * 4
        self.barrier.expect(UInt32(warps * Int32(WARP_BYTES)))

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
                cluster_address(to, owner), unit, cluster_address(self.barrier.address, owner)
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
        self.barrier.wait()
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


@fieldwise_init
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
    var barrier: Barrier
    """Tells that they have come."""

    @always_inline
    def expect(self):
        """Announces what will come, by one thread."""
        comptime assert (
            Self.columns % (8 * Self.peers) == 0
        ), "Exchange: columns are a multiple of 8 of each block"
        self.barrier.expect(UInt32(Self.BYTES))

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
                var barrier = cluster_address(self.barrier.address, UInt32(peer))
                comptime for i in range(Self.SUMS // 4):
                    var four = SIMD[F32, 4](0)
                    comptime for e in range(4):
                        four[e] = bitcast[F32](sums[peer * Self.SUMS + 4 * i + e])
                    cluster_send[4](to + UInt32(i * Self.PITCH), four, barrier)
        comptime for i in range(Self.SUMS):
            comptime for peer in range(1, Self.peers):
                if rank == Int32(peer):
                    sums[i] = sums[peer * Self.SUMS + i]
        self.barrier.wait()
        comptime for i in range(Self.SUMS // 4):
            comptime for slot in range(Self.peers - 1):
                var four = shared_load4(mine + UInt32(slot * Self.PART + i * Self.PITCH))
                comptime for e in range(4):
                    sums[4 * i + e] += bitcast[dtype](four[e])


comptime PAD = 8
"""Numbers that follow a row of sums in shared memory, so that rows begin in different banks."""


@always_inline
def leave_rows[
    dtype: DType, //, columns: Int, quads: Bool = False
](data: UInt32, at: Fragment, sums: StaticTuple[Scalar[dtype], columns // 2]):
    """Stores 64 rows of sums in shared memory, as `reduce_cluster` reads them: as float32.

    Parameters:
        dtype: Of the sums.
        columns: Of the product.
        quads: Whether the columns are in quads.

    Args:
        data: Where to.
        at: The thread's place.
        sums: Of the thread.
    """
    comptime PITCH = (columns + PAD) * 4
    var to = data + UInt32(at.row()) * UInt32(PITCH)
    to += UInt32(at.column()) * UInt32(8 if quads else 4)
    comptime for j in range(columns // 8):
        comptime for half in range(2):
            comptime byte = j // 2 * 64 + j % 2 * 8 if quads else j * 32
            var v = pair[j, half](sums)
            comptime if quads:
                v = quad[j // 2, half](sums).slice[2, offset=j % 2 * 2]()
            shared_store2(to + UInt32(half * 8 * PITCH + byte), v[0], v[1])


@always_inline
def leave_columns[
    dtype: DType, //, rows: Int, columns: Int
](data: UInt32, at: Fragment, sums: StaticTuple[Scalar[dtype], columns // 2]):
    """Stores the sums of 64 rows of each warpgroup turned over, as `reduce_cluster` reads them.

    Parameters:
        dtype: Of the sums.
        rows: Of the product, of all warpgroups: columns of what is stored.
        columns: Of the product.

    Args:
        data: Where to.
        at: The thread's place.
        sums: Of the thread.
    """
    comptime PITCH = (rows + PAD // 2) * 4
    var row = at.group() * 64 + at.row()
    var to = data + UInt32(at.column() * Int32(PITCH) + row * 4)
    comptime for j in range(columns // 8):
        comptime for e in range(4):
            shared_store_float(
                to + UInt32((8 * j + e % 2) * PITCH + e // 2 * 32), sums[4 * j + e].cast[F32]()
            )


@always_inline
def reduce_cluster[
    dtype: DType,
    epilogue: Epilogue,
    //,
    *,
    rows: Int,
    columns: Int,
    pad: Int,
    threads: Int,
    sources: Int = 1,
](
    tensors: EpilogueTensors[dtype, epilogue, 1],
    data: UInt32,
    start: Start,
    splits: Int32,
    *,
    m0: Int32,
    m: Int32,
    f0: Int32,
    f: Int32,
    alpha: Float32,
):
    """Adds up a cluster's sums: each block some rows of the tile, 8 columns a thread at a time.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        rows: Of the tile.
        columns: Of the tile.
        pad: Numbers that follow a row of sums.
        threads: Of a block; all of them call this.
        sources: 2 if there is a second bias.

    Args:
        tensors: Of the tile's product.
        data: Where each block has left its sums.
        start: Has the block's rank in the cluster.
        splits: How many blocks share the tile.
        m0: The tile's first row.
        m: Rows of the product.
        f0: The tile's first column.
        f: Columns of the product.
        alpha: Scale of the product.
    """
    comptime assert columns % 8 == 0, "reduce_cluster: a thread takes 8 columns"
    comptime ALIGN = min(16, 8 * size_of[dtype]())
    comptime PITCH = (columns + pad) * 4
    comptime EIGHTS = Int32(columns // 8)
    cluster_sync()
    var part = Int32(UInt32(rows) // UInt32(splits))
    for unit in range(Int32(thread_idx.x), part * EIGHTS, Int32(threads)):
        var row = start.rank * part + unit // EIGHTS
        var column = unit % EIGHTS * 8
        if m0 + row < m and f0 + column < f:
            var at = data + UInt32(row) * UInt32(PITCH) + UInt32(column) * 4
            var low = SIMD[F32, 4](0)
            var high = SIMD[F32, 4](0)
            for peer in range(splits):
                low += cluster_load4(at, UInt32(peer))
                high += cluster_load4(at + 16, UInt32(peer))
            var of = tensors.channels[8, sources](alpha, f0 + column)
            var to = Int(m0 + row) * Int(f) + Int(f0 + column)
            var residual = SIMD[F32, 8](0)
            comptime if epilogue.joins:
                residual = tensors.residual[0].unsafe_load[width=8, alignment=ALIGN](to).cast[F32]()
            var y = apply[epilogue, dtype](low.join(high), of, residual, tensors.residual_scale())
            tensors.y[0].unsafe_store[alignment=ALIGN](to, tensors.rounded(y))
    cluster_sync()
