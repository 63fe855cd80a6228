"""Which block computes which tile of a product, and which part of K.

Blocks are persistent: a launch has as many as the GPU holds at a time, and a block goes from tile
to tile, by the number of blocks. The tiles of columns of one tile of rows follow one another, so
that blocks at work at the same time share rows. Several products of one launch follow one another.

Or a cluster of `splits` blocks shares a tile: each sums a part of K (split-K), and then
`reduce_cluster` of epilogue.mojo adds up a part of the tile, over the cluster's shared memories.
"""

from max.gpu import block_idx, grid_dim
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
    """A block's part of something that a cluster divides."""

    var begin: Int32
    """The first of the part."""
    var end: Int32
    """The first after the part."""

    @always_inline
    def count(self) -> Int32:
        """Counts the part.

        Returns:
            How many.
        """
        return self.end - self.begin


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

    def blocks[split: Bool = False](self, resident: Int) -> Int:
        """Counts the blocks of a launch.

        Parameters:
            split: Whether a cluster shares a tile, be it of a single block.

        Args:
            resident: Blocks that the GPU holds at a time; each goes from tile to tile, unless a
                cluster shares one.

        Returns:
            The grid's size.
        """
        var tiles, splits = Int(self.tiles), Int(self.splits)
        return tiles * splits if split or splits > 1 else min(tiles, resident)

    @always_inline
    def start[split: Bool = False](self) -> Start:
        """Finds where a block begins.

        Parameters:
            split: Whether a cluster shares a tile.

        Returns:
            Its first tile, and its rank in the cluster.
        """
        comptime if split:
            var tile = UInt32(block_idx.x) // UInt32(self.splits)
            return Start(Int32(tile), Int32(UInt32(block_idx.x) - tile * UInt32(self.splits)))
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
    def turns(self) -> Turns:
        """Numbers the block's tiles, where no cluster shares one.

        Returns:
            Their numbers, in order.
        """
        return self.turns(self.start())

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
            var splits = UInt32(self.splits)
            var begin = UInt32(count * start.rank) // splits
            return Share(Int32(begin), Int32(UInt32(count * (start.rank + 1)) // splits))
        else:
            return Share(0, count)
