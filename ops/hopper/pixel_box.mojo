"""Windows whose taps all read one box of pixels.

A tile is a band of an image: of each 128 or 64 bytes of channels the copy engine brings `height + R - 1`
whole rows once, with their padding. Each row of the image gives Q + S - 1 rows of the product, of which
the last S - 1 are computed in vain. So tap (r, s) is the same box from row r (Q + S - 1) + s on. That
takes several taps, stride and dilation 1, and a box of at most `BOX_ROWS` rows; of other windows the pixels come
tap by tap, as load_pixels of conv.mojo brings them. A box may also be that of some columns of the window, each
group of columns with a box of its own: narrower rows, so more of them in a tile.

    PixelBox   which pixels are a tile's, and what a stage of x holds
    Taps       the taps that read a box, one after another
    box_map    the tensor map that brings it

window.mojo loops over K for such tiles.
"""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import Data
from .conv import Conv, Pixel, pixels_map
from .shared import ROW, SWIZZLED
from .tma import TensorMap, tensor_map

comptime BOX_ROWS = 384
"""Rows of 128 bytes that a stage has at most, where it is a box."""
comptime COPIED = 256
"""Pixels along an axis that a copy brings at most (CUDA's driver API)."""


struct Taps(TrivialRegisterPassable):
    """The taps that read a box, row by row of the window, and where each one's rows begin in it.

    Where is a number that grows from tap to tap, and begins at 0 again with the next box: bytes, or bits of
    `Reads` (window.mojo).
    """

    var count: Int32
    """Taps of a box."""
    var columns: Int32
    """Taps of a row of the window."""
    var tap_step: UInt32
    """What the shift grows by from a tap to the next."""
    var row_step: UInt32
    """What it grows by besides, from the last tap of a row to the first of the next."""
    var tap: Int32
    """The next tap."""
    var column: Int32
    """Its column of the window."""
    var shift: UInt32
    """Where its rows begin."""

    @always_inline
    def __init__(
        out self,
        *,
        count: Int32,
        columns: Int32,
        tap_step: UInt32,
        row_step: UInt32,
        tap: Int32 = 0,
    ):
        """Begins with a tap.

        Args:
            count: Taps of a box.
            columns: Taps of a row of the window.
            tap_step: What the shift grows by from a tap to the next.
            row_step: What it grows by besides, from a row to the next.
            tap: The tap, below `count`.
        """
        self.count, self.columns = count, columns
        self.tap_step, self.row_step = tap_step, row_step
        var r = Int32(UInt32(tap) // UInt32(columns))
        self.tap, self.column = tap, tap - r * columns
        self.shift = UInt32(tap) * tap_step + UInt32(r) * row_step

    @always_inline
    def begins(self) -> Bool:
        """Tells whether the next tap is the first of a box.

        Returns:
            Whether it is.
        """
        return self.tap == 0

    @always_inline
    def advance(mut self):
        """Goes on to the tap after, or to the first of the next box."""
        self.tap += 1
        self.column += 1
        self.shift += self.tap_step
        if self.column == self.columns:
            self.column = 0
            self.shift += self.row_step
        if self.tap == self.count:
            self.tap = 0
            self.shift = 0


struct PixelBox[rows: Int](KernelArgument, TrivialRegisterPassable):
    """How the rows of a product lie on the images, and what a stage of x holds.

    Parameters:
        rows: Of a tile of the product.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bytes: Int32
    """Of a stage."""
    var loads: Int32
    """Bytes of a stage that the copy engine brings."""
    var width: Int32
    """Rows of the product from one row of an image to the next; 0 if x comes tap by tap."""
    var height: Int32
    """Rows of an image in a tile."""
    var bands: Int32
    """Tiles of an image."""

    def __init__(out self, g: Geometry, *, columns: Int = 0, row: Int = ROW):
        """Chooses between a box and tap by tap.

        Args:
            g: Sizes of the convolution.
            columns: Columns of the window whose taps share a box; 0 for all of them.
            row: Bytes of channels of a stage: 128 or 64.
        """
        var s = columns if columns else g.s
        self.bytes = self.loads = Int32(Self.rows * row)
        self.width = self.height = self.bands = 0
        var width = g.q + s - 1
        var last = (g.r - 1) * width + s - 1 + Self.rows
        var near = max(g.stride_h, g.stride_w, g.dilation_h, g.dilation_w) == 1
        if g.r * g.s > 1 and g.r <= 128 and width <= Self.rows and near and last <= BOX_ROWS:
            var most = min(g.p, (Self.rows + s - 1) // width, COPIED - g.r + 1)
            var bands = ceildiv(g.p, most)
            var height = ceildiv(g.p, bands)
            var loads = (height + g.r - 1) * width * row
            self.bytes = Int32(ceildiv(max(loads, last * row), SWIZZLED) * SWIZZLED)
            self.loads = Int32(loads)
            self.width, self.height, self.bands = Int32(width), Int32(height), Int32(bands)

    def tiles(self, g: Geometry) -> Int:
        """Counts the tiles of pixels.

        Args:
            g: Sizes of the convolution.

        Returns:
            Of all images.
        """
        return g.n * Int(self.bands) if self.all_taps() else ceildiv(g.pixels(), Self.rows)

    @always_inline
    def all_taps(self) -> Bool:
        """Tells whether all taps read one box.

        Returns:
            False if x comes tap by tap.
        """
        return self.width != 0

    @always_inline
    def first(self, conv: Conv, tile: Int32) -> Pixel:
        """Finds the first pixel of a tile.

        Args:
            conv: Sizes.
            tile: Number of the tile.

        Returns:
            Its image, row and column.
        """
        if self.all_taps():
            var n = tile // self.bands
            var p = (tile - n * self.bands) * self.height
            return Pixel(n * conv.pq + p * conv.q, n, p, 0)
        return conv.pixel(tile * Int32(Self.rows))

    @always_inline
    def pixel(self, conv: Conv, pixels: Int32, tile: Int32, row: Int32) -> Int32:
        """Finds the output pixel of a row of the product.

        Args:
            conv: Sizes.
            pixels: M.
            tile: Number of the tile.
            row: In the tile.

        Returns:
            Its number; -1 if the row is none.
        """
        if self.all_taps():
            var n = tile // self.bands
            var down = row // self.width
            var q = row - down * self.width
            var p = (tile - n * self.bands) * self.height + down
            if q >= conv.q or down >= self.height or p * conv.q >= conv.pq:
                return -1
            return n * conv.pq + p * conv.q + q
        var m = tile * Int32(Self.rows) + row
        return m if m < pixels else -1

    @always_inline
    def warps(self, pixels: Int32, tile: Int32) -> Int32:
        """Counts the consumers' warps that may have a pixel of the tile.

        Args:
            pixels: M.
            tile: Number of the tile.

        Returns:
            At least one, of 16 rows each.
        """
        var used = self.height * self.width
        if not self.all_taps():
            used = pixels - tile * Int32(Self.rows)
        return min((used + 15) // 16, Int32(Self.rows // 16))


# The host's side


def box_map[
    dtype: DType, rows: Int
](
    ctx: DeviceContext, x: Data[dtype], g: Geometry, box: PixelBox[rows], row: Int = ROW
) raises -> TensorMap:
    """Makes the tensor map of activations that `produce_pixels` reads.

    Parameters:
        dtype: Of x.
        rows: Of a tile of the product.

    Args:
        ctx: The GPU.
        x: Activations [N, H, W, C].
        g: Sizes.
        box: What a stage holds.
        row: Bytes of channels of a stage: 128 or 64.

    Returns:
        The map: of boxes of an image, of windows (im2col), or of a matrix.

    Raises:
        If the driver refuses it.
    """
    if box.all_taps():
        return tensor_map[dtype, 4, True](
            ctx,
            x,
            [Int64(g.c), Int64(g.w), Int64(g.h), Int64(g.n)],
            [Int32(row // size_of[dtype]()), box.width, box.height + Int32(g.r - 1), 1],
        )
    return pixels_map[dtype](ctx, x, g, rows, row)
