"""Which block computes which tile of a product, and which part of K.

Blocks are persistent: a launch has as many as the GPU holds at a time, and a block goes from tile
to tile, by the number of blocks. The tiles of columns of one tile of rows follow one another: a turn
of all blocks is some rows by all columns. So rows come from memory once, and filters again in every
turn, but from L2 as long as all of them fit there; larger ones would want groups of fewer columns, as
CUTLASS's swizzle makes them. Several products of one launch follow one another.

Or a cluster of `splits` blocks shares a tile: each sums a part of K (split-K), and then finishes a
part of the tile (cluster.mojo).
Or blocks are persistent, and clusters of `peers` share the tiles of the last turn (`Work`).
"""

from max.gpu import block_idx, grid_dim
from std.math import align_up
from std.utils.static_tuple import StaticTuple

from ..kernel_argument import KernelArgument

comptime Turns = type_of(range(Int32(0), Int32(0), Int32(0)))
"""Numbers of the tiles of a block."""


@fieldwise_init
struct Tile(TrivialRegisterPassable):
    """What a tile is of."""

    var product: Int32
    """Number of the product."""
    var row: Int32
    """Tile of rows."""
    var column: Int32
    """Tile of columns."""


@fieldwise_init
struct Start(TrivialRegisterPassable):
    """Where a block begins."""

    var tile: Int32
    """Number of its first tile."""
    var rank: Int32
    """The block's rank in the cluster that shares its tile."""


@fieldwise_init
struct Share(TrivialRegisterPassable):
    """A block's part of something that several divide, such as a cluster."""

    var begin: Int32
    """The first of the part."""
    var end: Int32
    """The first after the part."""

    @always_inline
    def __init__(out self, *, of: Int32, part: Int32, parts: Int32):
        """Divides as evenly as it goes.

        Args:
            of: How many there are in all, such as the steps of K.
            part: Which part.
            parts: How many parts.
        """
        self.begin = Int32(UInt32(of * part) // UInt32(parts))
        self.end = Int32(UInt32(of * (part + 1)) // UInt32(parts))

    @always_inline
    def count(self) -> Int32:
        """Counts the part.

        Returns:
            How many.
        """
        return self.end - self.begin


@fieldwise_init
struct Unit(TrivialRegisterPassable):
    """What a block does at a time: steps of K of a tile."""

    var tile: Int32
    """Number of the tile."""
    var steps: Share
    """Which steps: all of them, or a cluster's block's part."""
    var shared: Bool
    """Whether the block finishes only some of the tile's columns, and its peers the others."""


@fieldwise_init
struct Stationary(TrivialRegisterPassable):
    """The tiles of a block that keeps to one tile of columns of one product."""

    var first: Int32
    """Number of its first tile."""
    var end: Int32
    """Number of the first tile behind the product's."""
    var step: Int32
    """From one of its tiles to the next."""

    @always_inline
    def turns(self, worker: Int32 = 0, workers: Int32 = 1) -> Turns:
        """Numbers the tiles, or those of one of several workers that take them in turns.

        Args:
            worker: Which.
            workers: How many there are.

        Returns:
            Their numbers, in order.
        """
        return range(self.first + worker * self.step, self.end, workers * self.step)


struct Work[split: Bool, peers: Int](TrivialRegisterPassable):
    """What a block does, unit by unit.

    Without peers that is a tile at a time, all of its steps or, where a cluster shares it, a part of
    them. With peers, a block computes a tile of each whole turn alone, and where there is a cluster
    for each tile of the last turn, its blocks share one. It is the hybrid of data-parallel and
    stream-K of Osama et al. 2023 (arXiv:2301.03598) within clusters, so sums never leave the chip.

    Parameters:
        split: Whether a cluster shares its only tile.
        peers: Blocks of a cluster, which may share its last tile; or 1.
    """

    var start: Start
    """Where the block begins."""
    var share: Share
    """The block's steps of a tile that is shared."""
    var steps: Int32
    """Steps of a tile."""
    var tiles: Int32
    """Of the launch."""
    var alone: Int32
    """With peers: how many tiles the block computes alone."""
    var units: Int32
    """With peers: these, and the one that it shares."""

    @always_inline
    def __init__(out self, schedule: TileScheduler[_], start: Start, steps: Int32):
        """Finds the block's part.

        Args:
            schedule: The tiles.
            start: Where the block begins.
            steps: Of K of a tile.
        """
        comptime assert (
            not Self.split or Self.peers == 1
        ), "Work: a cluster shares its only tile, or its last"
        self.start, self.steps, self.tiles = start, steps, schedule.tiles
        self.share = schedule.share[Self.split or Self.peers > 1](start, steps)
        self.alone = self.units = 0
        comptime if Self.peers > 1:
            var last = LastTurn[Self.peers](schedule.tiles)
            self.units = Int32(UInt32(last.begin) // UInt32(grid_dim.x))
            self.alone = self.units
            if last.begin + last.place() < self.tiles:
                self.units += 1
                self.alone += Int32(0 if last.shared else 1)

    @always_inline
    def first(self) -> Unit:
        """Finds the block's first unit.

        Returns:
            The unit; one of no steps if there is none.
        """
        comptime if Self.peers > 1:
            return self.unit(0) if self.units > 0 else Unit(0, Share(0, 0), False)
        else:
            return self.unit(self.start.tile)

    @always_inline
    def turns(self) -> Turns:
        """Numbers the block's units.

        Returns:
            Their numbers, in order.
        """
        comptime if Self.peers > 1:
            return range(Int32(0), self.units, Int32(1))
        else:
            return range(self.start.tile, self.tiles, Int32(grid_dim.x))

    @always_inline
    def unit(self, number: Int32) -> Unit:
        """Finds a unit.

        Args:
            number: Of the unit.

        Returns:
            What it is.
        """
        comptime if Self.peers > 1:
            var first = number * Int32(grid_dim.x)
            if number == self.alone:
                return Unit(first + cluster_number[Self.peers](), self.share, True)
            return Unit(first + Int32(block_idx.x), Share(0, self.steps), False)
        else:
            return Unit(number, self.share, False)


struct LastTurn[peers: Int](TrivialRegisterPassable):
    """The last turn of tiles, as clusters see it.

    Parameters:
        peers: Blocks of a cluster.
    """

    var begin: Int32
    """The number of its first tile; that of all tiles if the last turn is a whole one."""
    var shared: Bool
    """Whether there is a cluster for each of its tiles, which shares it."""

    @always_inline
    def __init__(out self, tiles: Int32):
        """Finds it.

        Args:
            tiles: Of the launch.
        """
        var blocks = Int32(grid_dim.x)
        self.begin = tiles - Int32(UInt32(tiles) % UInt32(blocks))
        self.shared = (tiles - self.begin) * Int32(Self.peers) <= blocks

    @always_inline
    def place(self) -> Int32:
        """Finds the block's place in the turn.

        Returns:
            Its tile, counted from the first of the turn.
        """
        return cluster_number[Self.peers]() if self.shared else Int32(block_idx.x)


@always_inline
def cluster_number[peers: Int]() -> Int32:
    """Numbers the block's cluster.

    Parameters:
        peers: Blocks of a cluster.

    Returns:
        From 0 on.
    """
    return Int32(UInt32(block_idx.x) // UInt32(peers))


struct TileScheduler[products: Int = 1](KernelArgument, TrivialRegisterPassable):
    """The tiles of a launch.

    Parameters:
        products: Products of the launch.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var first: StaticTuple[Int32, Self.products]
    """The first tile of each product."""
    var columns: Int32
    """Tiles of columns of each product."""
    var tiles: Int32
    """Tiles of all products."""
    var splits: Int32
    """Blocks that share a tile."""

    def __init__(out self, rows: Array[Int, Self.products], *, columns: Int, splits: Int = 1):
        """Counts the tiles.

        Args:
            rows: Tiles of rows of each product.
            columns: Tiles of columns.
            splits: Blocks that share a tile.
        """
        self.first = StaticTuple[Int32, Self.products](fill=0)
        var tiles = 0
        comptime for i in range(Self.products):
            self.first[i] = Int32(tiles)
            tiles += rows[i] * columns
        self.columns, self.tiles, self.splits = Int32(columns), Int32(tiles), Int32(splits)

    def blocks[split: Bool = False, peers: Int = 1](self, resident: Int) -> Int:
        """Counts the blocks of a launch.

        Parameters:
            split: Whether a cluster shares a tile, be it of a single block.
            peers: Blocks of a cluster, which may share its last tile.

        Args:
            resident: Blocks that the GPU holds at a time; each goes from tile to tile, unless a
                cluster shares one.

        Returns:
            The grid's size.
        """
        var tiles, splits = Int(self.tiles), Int(self.splits)
        comptime if peers > 1:
            var most = resident // peers * peers
            return tiles * peers if tiles * peers <= most else min(align_up(tiles, peers), most)
        return tiles * splits if split or splits > 1 else min(tiles, resident)

    @always_inline
    def start[split: Bool = False, peers: Int = 1](self) -> Start:
        """Finds where a block begins.

        Parameters:
            split: Whether a cluster shares a tile.
            peers: Blocks of a cluster, which may share its last tile.

        Returns:
            Its first tile, and its rank in the cluster.
        """
        comptime if split:
            var tile = UInt32(block_idx.x) // UInt32(self.splits)
            return Start(Int32(tile), Int32(UInt32(block_idx.x) - tile * UInt32(self.splits)))
        elif peers > 1:
            var last = LastTurn[peers](self.tiles)
            var rank = Int32(UInt32(block_idx.x) % UInt32(peers))
            return Start(last.place() if last.begin == 0 else Int32(block_idx.x), rank)
        else:
            return Start(Int32(block_idx.x), 0)

    @always_inline
    def turns(self, start: Start) -> Turns:
        """Numbers the block's tiles.

        Args:
            start: Where it begins.

        Returns:
            Their numbers, in order.
        """
        return range(start.tile, self.tiles, Int32(grid_dim.x))

    @always_inline
    def turns(self, worker: Int32 = 0, workers: Int32 = 1) -> Turns:
        """Numbers the block's tiles where no cluster shares one, or those of one of several workers.

        Args:
            worker: Which.
            workers: How many there are.

        Returns:
            Their numbers, in order.
        """
        var tiles = Stationary(Int32(block_idx.x), self.tiles, Int32(grid_dim.x))
        return tiles.turns(worker, workers)

    @always_inline
    def stationary(self) -> Stationary:
        """Finds the tiles of a block that keeps to a tile of columns of a product.

        The grid is a multiple of the tiles of columns, and each product has as many of its parts as its
        share of all tiles; one at least.

        Returns:
            The tiles.
        """
        var parts = UInt32(grid_dim.x) // UInt32(self.columns)
        var part = UInt32(block_idx.x) // UInt32(self.columns)
        var tiles = Stationary(Int32(block_idx.x), self.tiles, Int32(grid_dim.x))
        comptime for i in range(1, Self.products):
            var before = (parts * UInt32(self.first[i]) + UInt32(self.tiles) // 2) // UInt32(
                self.tiles
            )
            before = min(max(before, UInt32(i)), parts - UInt32(Self.products - i))
            if part >= before:
                tiles.first = self.first[i] + Int32(
                    UInt32(block_idx.x) - before * UInt32(self.columns)
                )
                tiles.end = self.tiles
                tiles.step = Int32((parts - before) * UInt32(self.columns))
            elif tiles.end == self.tiles:
                tiles.end = self.first[i]
                tiles.step -= Int32((parts - before) * UInt32(self.columns))
        return tiles

    @always_inline
    def tile(self, number: Int32) -> Tile:
        """Finds what a tile is of.

        Args:
            number: Of the tile.

        Returns:
            Product, tile of rows and tile of columns.
        """
        var product = Int32(0)
        var first = Int32(0)
        comptime for i in range(1, Self.products):
            if number >= self.first[i]:
                product, first = Int32(i), self.first[i]
        var row = Int32(UInt32(number - first) // UInt32(self.columns))
        return Tile(product, row, number - first - row * self.columns)

    @always_inline
    def share[split: Bool](self, start: Start, count: Int32) -> Share:
        """Divides something among the blocks of a cluster.

        Parameters:
            split: Whether a cluster shares a tile.

        Args:
            start: Has the block's rank.
            count: Of all, such as the steps of K.

        Returns:
            This block's part: all of it, unless a cluster shares a tile.
        """
        comptime if split:
            return Share(of=count, part=start.rank, parts=self.splits)
        else:
            return Share(0, count)
