"""What the stem's kernel knows at compile time, and how an output is cut into tiles."""

from std.math import ceildiv
from std.utils import IndexList

from ..epilogue import Epilogue
from ..kernel_argument import KernelArgument
from ..operands import Data

comptime WARP_FILTERS = 32
"""Filters of a warp: two m-tiles of an mma."""
comptime STEP_ROWS = 4
"""Rows of the convolution that a warp computes at a time: an n-tile of 8 columns each."""
comptime GROUP = 8
"""Columns of the convolution that a warp computes at a time."""
comptime COLUMNS = 232
"""Input columns of a tile, px: a row in shared memory has 232 * C numbers, 8 * C at a time."""
comptime SHARED = 72 * 1024
"""Bytes of shared memory that a block may take: three share a multiprocessor of sm_90."""


struct Stem(TrivialRegisterPassable):
    """What a stem's kernel is compiled for.

    A row of the window is S * C neighbours in memory, filled up with zero filters to a multiple
    of 8: a unit is 8 of them, half of the depth of an mma.
    """

    comptime MAXPOOL: StaticString = "maxpool"
    """What follows the convolution: relu and the 3x3/2 maximum."""
    comptime LAYERNORM: StaticString = "layernorm"
    """What follows the convolution: layer norm over each pixel's F."""
    comptime CONV2D: StaticString = "conv2d"
    """What follows the convolution: its epilogue, and nothing else."""

    var c: Int
    """Input channels, 1 to 4."""
    var r: Int
    """Window height, taps."""
    var s: Int
    """Window width, taps."""
    var stride: Int
    """Input pixels from one window to the next, in both directions."""
    var then: StaticString
    """What follows: MAXPOOL, LAYERNORM or CONV2D; the second half of the op's name."""
    var epilogue: Epilogue
    """Of CONV2D: an activation, or none."""

    def __init__(
        out self,
        c: Int,
        r: Int,
        s: Int,
        stride: Int,
        then: StaticString,
        epilogue: StaticString = "none",
    ):
        """Names the sizes.

        Args:
            c: Input channels.
            r: Window height.
            s: Window width.
            stride: Stride.
            then: What follows.
            epilogue: Of CONV2D.
        """
        self.c, self.r, self.s, self.stride = c, r, s, stride
        self.then, self.epilogue = then, Epilogue(epilogue)

    def label(self) -> String:
        """Names what follows the convolution, as a part of a kernel's symbol.

        Returns:
            The second half of the op's name, and its epilogue.
        """
        if self.then == Self.CONV2D:
            return String(self.then, "_", self.epilogue.label())
        return String(self.then)

    def pools(self) -> Bool:
        """Tells whether the pool follows.

        Returns:
            Whether it does.
        """
        return self.then == Self.MAXPOOL

    def cells(self) -> Int:
        """Counts the numbers of a pixel in shared memory.

        Windows begin at even numbers there, so that two of them are one load.

        Returns:
            C, or C + 1 if the stride and C are odd.
        """
        return self.c + self.stride * self.c % 2

    def row_units(self) -> Int:
        """Counts the units of a row of the window.

        Returns:
            S * C / 8, rounded up.
        """
        return ceildiv(self.s * self.cells(), 8)

    def depths(self) -> Int:
        """Counts the steps of K, 16 deep: pairs of units.

        Pairs lie in one row of the window. If a row has an odd number of units, its last one
        pairs with the next row's, the even row first.

        Returns:
            11 for 7 x 7 x 3.
        """
        var odd = self.row_units() % 2
        return self.r * (self.row_units() // 2) + odd * ceildiv(self.r, 2)

    def pitch(self) -> Int:
        """Gives the numbers from one input row to the next in shared memory.

        Returns:
            A multiple of 8.
        """
        return COLUMNS * self.cells()

    def input_rows(self, rows: Int) -> Int:
        """Counts the input rows under rows of the convolution.

        Args:
            rows: Rows of the convolution.

        Returns:
            Input rows.
        """
        return (rows - 1) * self.stride + self.r

    def chunks(self, groups: Int) -> Int:
        """Counts the chunks of 8 pixels that a tile's input row is read in.

        Args:
            groups: Groups of 8 columns of the tile.

        Returns:
            Chunks, padding of the last units included.
        """
        var reach = (groups * GROUP - 1) * self.stride * self.cells()
        return ceildiv(reach + 8 * self.row_units(), 8 * self.cells())

    def most_groups(self) -> Int:
        """Counts the groups of 8 columns that a row in shared memory has room for.

        Returns:
            14 for the 7x7/2 stem, 7 for the 7x7/4 embedding.
        """
        var step = self.stride * self.cells()
        return ((self.pitch() - 8 * self.row_units()) // step + 1) // GROUP


struct Tiling(KernelArgument, TrivialRegisterPassable):
    """Sizes of the tensors and of a block's tile, at run time.

    A tile is `steps` times 4 rows and `groups` times 8 columns of the convolution. Where a pool
    has more than one tile down, each computes one row of the convolution above its own
    (`lead_p`); where it has more than one across, its first column of outputs belongs to the
    tile to the left (`lead_q`): what the windows of neighbours share is computed twice.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var h: Int32
    """Input height, px."""
    var w: Int32
    """Input width, px."""
    var p: Int32
    """Height of the convolution's output, px."""
    var q: Int32
    """Width of the convolution's output, px."""
    var out_p: Int32
    """Height of the output, px."""
    var out_q: Int32
    """Width of the output, px."""
    var f: Int32
    """Filters."""
    var pad: Int32
    """Zeros on each side of the image, px."""
    var steps: Int32
    """Steps of 4 rows of the convolution in a tile."""
    var groups: Int32
    """Groups of 8 columns of the convolution in a tile."""
    var tiles_p: Int32
    """Tiles of an image, down."""
    var tiles_q: Int32
    """Tiles of an image, across."""
    var lead_p: Int32
    """Rows of the convolution above a tile's own that it computes: 0 or 1."""
    var lead_q: Int32
    """Output columns of a tile that belong to the tile to the left: 0 or 1."""

    def __init__(
        out self,
        stem: Stem,
        x: IndexList[4],
        p: Int,
        q: Int,
        out_p: Int,
        out_q: Int,
        f: Int,
        pad: Int,
        steps: Int,
        groups: Int,
    ):
        """Cuts an output into tiles.

        Args:
            stem: Compile-time sizes.
            x: Shape of x[N, H, W, C].
            p: Height of the convolution's output.
            q: Width of the convolution's output.
            out_p: Height of the output.
            out_q: Width of the output.
            f: Filters.
            pad: Padding.
            steps: Steps of 4 rows in a tile.
            groups: Groups of 8 columns in a tile.
        """
        self.h, self.w = Int32(x[1]), Int32(x[2])
        self.p, self.q, self.out_p, self.out_q = Int32(p), Int32(q), Int32(out_p), Int32(out_q)
        self.f, self.pad = Int32(f), Int32(pad)
        self.steps, self.groups = Int32(steps), Int32(groups)
        var scale = 2 if stem.pools() else 1
        var rows = steps * STEP_ROWS // scale
        var columns = groups * GROUP // scale
        var lead_p = Int(stem.pools() and out_p > rows)
        var lead_q = Int(stem.pools() and out_q > columns)
        self.lead_p, self.lead_q = Int32(lead_p), Int32(lead_q)
        self.tiles_p = Int32(ceildiv(out_p, rows))
        self.tiles_q = Int32(ceildiv(out_q, columns - lead_q))

    def input_rows(self, stem: Stem) -> Int:
        """Counts the input rows of a tile.

        Args:
            stem: Compile-time sizes.

        Returns:
            Rows in shared memory.
        """
        return stem.input_rows(Int(self.steps) * STEP_ROWS + Int(self.lead_p))

    def slices[stem: Stem](self) -> Int:
        """Counts the slices of filters: each is a warp's.

        Parameters:
            stem: Compile-time sizes.

        Returns:
            F / 32; a convolution alone rounds up.
        """
        comptime if stem.then == Stem.CONV2D:
            return ceildiv(Int(self.f), WARP_FILTERS)
        else:
            return Int(self.f) // WARP_FILTERS

    def warps[stem: Stem](self) -> Int:
        """Counts the warps of a block: four or more where the tile has groups for them.

        Parameters:
            stem: Compile-time sizes.

        Returns:
            A multiple of the slices.
        """
        var slices = self.slices[stem]()
        return slices * min(max(1, 4 // slices), Int(self.groups))

    def blocks(self, n: Int) -> Int:
        """Counts the tiles of a batch.

        Args:
            n: Images.

        Returns:
            Blocks of the launch.
        """
        return n * Int(self.tiles_p * self.tiles_q)


@fieldwise_init
struct StemOperands[dtype: DType, pixel: DType, out: DType = dtype](
    KernelArgument, TrivialRegisterPassable
):
    """The tensors of a stem.

    Nothing but pointers: LLVM then knows that a kernel's are global memory.

    Parameters:
        dtype: Of the filter, and of y unless that is named.
        pixel: Of x: uint8 levels are normalised, floats are taken as they are.
        out: Of y: uint8 saturates.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.pixel]
    """Pixels x[N, H, W, C]."""
    var mean: Data[DType.float32]
    """[C], in levels."""
    var scale: Data[DType.float32]
    """[C], one over the deviation in levels."""
    var w: Data[Self.dtype]
    """Filters as `stem_fragments` of graphs/arrange.py lays them out."""
    var bias: Data[DType.float32]
    """[F]."""
    var gamma: Data[DType.float32]
    """[F], layer norm's weight, or the bias of the convolution behind stem_maxpool_conv2d; any pointer
    for other stems."""
    var beta: Data[DType.float32]
    """[F], layer norm's bias; any pointer for other stems."""
    var y: Data[Self.out]
    """The result, NHWC."""
