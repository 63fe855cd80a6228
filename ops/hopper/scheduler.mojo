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


@fieldwise_init
struct Unit(TrivialRegisterPassable):
    """What a block does at a time: steps of K of a tile."""

    var tile: Int32
    """Number of the tile."""
    var steps: Share
    """Which steps: all of them, or a part."""


struct Work[split: Bool, stream: Bool](TrivialRegisterPassable):
    """The units of a block.

    With `stream`, the steps of the last tiles, at most two turns of them, are divided evenly over
    the blocks (stream-K), and a block goes from its last tile backwards: the steps that begin a
    tile, which another block ends, come first, so that nobody waits long. The block of a tile's last
    step finishes it; it waits for blocks of lower numbers only, which have begun before it.

    Parameters:
        split: Whether a cluster shares a tile.
        stream: Whether blocks share tiles by their steps.
    """

    var start: Start
    """Where the block begins."""
    var steps: Int32
    """Steps of K of a tile."""
    var share: Share
    """The block's part of them; with `stream`, of those of all tiles that are divided."""
    var tiles: Int32
    """Tiles of the launch."""
    var divided: Int32
    """With `stream`: how many of them are divided, the first ones."""

    @always_inline
    def __init__(out self, schedule: TileScheduler[_], steps: Int32):
        """Finds the block's part.

        Args:
            schedule: The tiles.
            steps: Of K of a tile.
        """
        self.start = schedule.start[Self.split]()
        self.steps, self.tiles, self.divided = steps, schedule.tiles, 0
        self.share = schedule.share[Self.split](self.start, steps)
        comptime if Self.stream:
            var blocks = Int32(grid_dim.x)
            var whole = Int32(UInt32(self.tiles) // UInt32(blocks))
            var rest = self.tiles - whole * blocks
            if rest > 0:
                self.divided = rest if whole == 0 else rest + blocks
            var block = self.start.tile
            self.share = Share(self._begin(block), self._begin(block + 1))

    @always_inline
    def _begin(self, block: Int32) -> Int32:
        """Finds the first step of a block, of those of all tiles that are divided."""
        return Int32(UInt32(self.divided * self.steps * block) // UInt32(grid_dim.x))

    @always_inline
    def _last(self) -> Int32:
        """Finds the last tile of the block's part."""
        return Int32(UInt32(self.share.end - 1) // UInt32(self.steps))

    @always_inline
    def _shares(self) -> Int32:
        """Counts the units of tiles that are divided."""
        if self.share.end <= self.share.begin:
            return 0
        return self._last() - Int32(UInt32(self.share.begin) // UInt32(self.steps)) + 1

    @always_inline
    def turns(self) -> Turns:
        """Numbers the block's units.

        Returns:
            Their numbers, in order.
        """
        comptime if Self.stream:
            var whole = Int32(UInt32(self.tiles - self.divided) // UInt32(grid_dim.x))
            return range(Int32(0), self._shares() + whole, Int32(1))
        else:
            return range(self.start.tile, self.tiles, Int32(grid_dim.x))

    @always_inline
    def first(self) -> Int32:
        """Numbers the block's first unit.

        Returns:
            Its number.
        """
        comptime if Self.stream:
            return 0
        else:
            return self.start.tile

    @always_inline
    def unit(self, number: Int32) -> Unit:
        """Finds what a unit is.

        Args:
            number: Of the unit.

        Returns:
            The tile and its steps.
        """
        comptime if Self.stream:
            var shares = self._shares()
            if number >= shares:
                var turn = number - shares
                var tile = self.divided + self.start.tile + turn * Int32(grid_dim.x)
                return Unit(tile, Share(0, self.steps))
            var tile = self._last() - number
            var origin = tile * self.steps
            var begin = max(self.share.begin - origin, 0)
            return Unit(tile, Share(begin, min(self.share.end - origin, self.steps)))
        else:
            return Unit(number, self.share)

    @always_inline
    def finishes(self, unit: Unit) -> Bool:
        """Tells whether the block finishes the tile of a unit.

        Args:
            unit: With `stream`.

        Returns:
            Whether it has the last step.
        """
        return unit.steps.end == self.steps

    @always_inline
    def helpers(self, unit: Unit) -> Share:
        """Finds the blocks that have the steps of a tile before a unit's.

        Args:
            unit: With `stream`.

        Returns:
            Their numbers; none if the unit has all steps.
        """
        var block = self.start.tile
        var first = block
        if unit.steps.begin > 0:
            first -= 1
            while self._begin(first) > unit.tile * self.steps:
                first -= 1
        return Share(first, block)


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
