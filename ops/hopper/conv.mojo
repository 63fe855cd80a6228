"""The sizes of an implicit GEMM, and how its tiles of pixels are loaded.

M = N * P * Q output pixels, K = R * S * C: the taps of a window one after the other, and the
channels of a tap in steps of 128 bytes. What a tap sees of a tile's pixels is one copy: TMA's im2col
mode walks over rows and images, steps with the stride and fills the padding with zeros.
"""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import Data
from .barrier import Barrier
from .scheduler import TileScheduler
from .shared import ROW
from .tma import TensorMap, TileLoader, im2col_map, matrix_map


struct Conv(KernelArgument, TrivialRegisterPassable):
    """A convolution, or a product of matrices, as a kernel walks over it."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var q: Int32
    """Output columns of an image."""
    var pq: Int32
    """Output pixels of an image."""
    var s: Int32
    """Taps of a window's row."""
    var taps: Int32
    """Taps of a window."""
    var chunks: Int32
    """Steps of 128 bytes over the channels."""
    var stride_h: Int32
    """Input rows between windows."""
    var stride_w: Int32
    """Input columns between windows."""
    var pad_h: Int32
    """Rows of padding."""
    var pad_w: Int32
    """Columns of padding."""
    var dilation_h: Int32
    """Input rows between taps."""
    var dilation_w: Int32
    """Input columns between taps."""
    var plain: Int32
    """1 if x is a matrix [M, C], read without im2col."""

    def __init__(out self, g: Geometry, *, chunks: Int):
        """Takes the sizes.

        Args:
            g: Of the convolution.
            chunks: Steps over the channels.
        """
        self.q, self.pq = Int32(g.q), Int32(g.p * g.q)
        self.s, self.taps, self.chunks = Int32(g.s), Int32(g.r * g.s), Int32(chunks)
        self.stride_h, self.stride_w = Int32(g.stride_h), Int32(g.stride_w)
        self.pad_h, self.pad_w = Int32(g.pad_h), Int32(g.pad_w)
        self.dilation_h, self.dilation_w = Int32(g.dilation_h), Int32(g.dilation_w)
        self.plain = Int32(1 if g.plain() else 0)

    @always_inline
    def steps(self) -> Int32:
        """Counts the steps of K.

        Returns:
            Those of all taps.
        """
        return self.taps * self.chunks

    @always_inline
    def pixel(self, m: Int32) -> Pixel:
        """Finds an output pixel.

        Args:
            m: Its number.

        Returns:
            Image, row and column.
        """
        var n = Int32(UInt32(m) // UInt32(self.pq))
        var rest = m - n * self.pq
        var p = Int32(UInt32(rest) // UInt32(self.q))
        return Pixel(m, n, p, rest - p * self.q)

    @always_inline
    def corner(self, at: Pixel) -> Corner:
        """Finds the corner of a pixel's window.

        Args:
            at: The pixel.

        Returns:
            Row and column of the input; negative in the padding.
        """
        return Corner(at.p * self.stride_h - self.pad_h, at.q * self.stride_w - self.pad_w)


struct Problem[products: Int = 1](KernelArgument, TrivialRegisterPassable):
    """The sizes of a convolution, or of several products of the same K and F.

    Parameters:
        products: Products of the launch.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var pixels: StaticTuple[Int32, Self.products]
    """M of each product."""
    var schedule: TileScheduler[Self.products]
    """The tiles."""
    var conv: Conv
    """Pixels, taps and channels of x."""
    var filters: Int32
    """F."""
    var alpha: Float32
    """Scale of the product."""
    var steps2: Int32
    """Steps of the second source; 0 if there is none."""
    var stride2_h: Int32
    """Rows of the second source between pixels."""
    var stride2_w: Int32
    """Columns of the second source between pixels."""
    var constant: Int32
    """1 if no kernel writes the filters: they may be loaded before the kernel ahead is done."""

    def __init__(
        out self,
        sizes: Array[Geometry, Self.products],
        *,
        rows: Int,
        columns: Int,
        width: Int,
        splits: Int = 1,
        alpha: Float32,
        constant: Bool = True,
        tiles: Optional[Array[Int, Self.products]] = None,
    ):
        """Takes the sizes.

        Args:
            sizes: Of each product; they differ in M alone.
            rows: Pixels of a tile.
            columns: Filters of a tile.
            width: Channels of a step of K.
            splits: Blocks that share a tile.
            alpha: Scale of the product.
            constant: Whether the filters are weights, which no kernel writes.
            tiles: Tiles of pixels of each product, if they end with an image, as those of a `PixelBox`
                do; else they go on through all images.
        """
        self.pixels = StaticTuple[Int32, Self.products](fill=0)
        var counts = Array[Int, Self.products](fill=0)
        comptime for i in range(Self.products):
            self.pixels[i] = Int32(sizes[i].pixels())
            counts[i] = tiles.value()[i] if tiles else ceildiv(sizes[i].pixels(), rows)
        var g = sizes[0]
        self.schedule = TileScheduler[Self.products](
            counts, columns=ceildiv(g.f, columns), splits=splits
        )
        self.conv = Conv(g, chunks=ceildiv(g.c, width))
        self.filters, self.alpha = Int32(g.f), alpha
        self.steps2, self.stride2_h, self.stride2_w = 0, 1, 1
        self.constant = Int32(1 if constant else 0)

    @always_inline
    def steps(self) -> Int32:
        """Counts the steps of K.

        Returns:
            Those of all taps, and of the second source.
        """
        return self.conv.steps() + self.steps2

    @always_inline
    def rows_of(self, product: Int32) -> Int32:
        """Counts the pixels of a product.

        Args:
            product: Its number.

        Returns:
            M.
        """
        var pixels = self.pixels[0]
        comptime for i in range(1, Self.products):
            if product == Int32(i):
                pixels = self.pixels[i]
        return pixels


@fieldwise_init
struct Pixel(TrivialRegisterPassable):
    """An output pixel."""

    var m: Int32
    """Its number."""
    var n: Int32
    """Image."""
    var p: Int32
    """Row."""
    var q: Int32
    """Column."""


@fieldwise_init
struct Corner(TrivialRegisterPassable):
    """The corner of a window."""

    var h: Int32
    """Input row."""
    var w: Int32
    """Input column."""


struct Step(TrivialRegisterPassable):
    """A step of K: a chunk of the channels of a tap."""

    var tap: Int32
    """Number of the tap."""
    var r: Int32
    """Its row of the window."""
    var s: Int32
    """Its column of the window."""
    var c: Int32
    """Number of the chunk."""

    @always_inline
    def __init__(out self):
        """Begins with the first step."""
        self.tap = self.r = self.s = self.c = 0

    @always_inline
    def __init__(out self, conv: Conv, number: Int32, *, sources: Int = 2):
        """Finds a step; those after the last tap's count as chunks of a tap more.

        Args:
            conv: Sizes.
            number: Of the step.
            sources: 2 if steps of a second source may follow those of the last tap.
        """
        self.tap = Int32(UInt32(number) // UInt32(conv.chunks))
        if sources > 1:
            self.tap = min(self.tap, conv.taps)
        self.c = number - self.tap * conv.chunks
        self.r = Int32(UInt32(self.tap) // UInt32(conv.s))
        self.s = self.tap - self.r * conv.s

    @always_inline
    def advance[sources: Int = 2](mut self, conv: Conv):
        """Goes on to the next step.

        Parameters:
            sources: 2 if steps of a second source may follow those of the last tap.

        Args:
            conv: Sizes.
        """
        self.c += 1
        if self.c == conv.chunks and (sources == 1 or self.tap < conv.taps):
            self.c = 0
            self._next_tap(conv)

    @always_inline
    def advance(mut self, conv: Conv, count: Int32):
        """Goes on by several steps.

        Args:
            conv: Sizes.
            count: Of the steps.
        """
        self.c += count
        while self.c >= conv.chunks:
            self.c -= conv.chunks
            self._next_tap(conv)

    @always_inline
    def _next_tap(mut self, conv: Conv):
        self.tap += 1
        self.s += 1
        if self.s == conv.s:
            self.s = 0
            self.r += 1


@always_inline
def load_pixels(
    x: TileLoader,
    to: UInt32,
    barrier: Barrier,
    conv: Conv,
    at: Pixel,
    corner: Corner,
    *,
    channel: Int32,
    r: Int32,
    s: Int32,
):
    """Starts copying what a tap sees of a run of pixels, 128 bytes of channels of each.

    Args:
        x: The activations, of `pixels_map`.
        to: Where to, in shared memory.
        barrier: Told of the bytes that have come.
        conv: Sizes.
        at: The first pixel.
        corner: Of its window.
        channel: The first channel.
        r: Row of the tap.
        s: Column of the tap.
    """
    if conv.plain == 1:
        x.load(to, barrier, channel, at.m)
    else:
        x.load_im2col(
            to,
            barrier,
            channel,
            corner.w,
            corner.h,
            at.n,
            s * conv.dilation_w,
            r * conv.dilation_h,
        )


# The host's side


def pixels_map[
    dtype: DType
](ctx: DeviceContext, x: Data[dtype], g: Geometry, rows: Int, bytes: Int = ROW) raises -> TensorMap:
    """Makes the tensor map of activations that `load_pixels` reads.

    Parameters:
        dtype: Of x.

    Args:
        ctx: The GPU.
        x: Activations [N, H, W, C].
        g: Sizes.
        rows: Pixels of a copy.
        bytes: Of channels of each of them: 128 or 64.

    Returns:
        The map: of a matrix [M, C] where windows are single pixels, else im2col.

    Raises:
        If the driver refuses it.
    """
    if g.plain():
        return matrix_map[dtype, True](ctx, x, rows=g.pixels(), columns=g.c, box=rows, bytes=bytes)
    return im2col_map[dtype](ctx, x, g, rows, bytes)


def takes[dtype: DType, out: DType = dtype](g: Geometry) -> Bool:
    """Tells whether the copy engine can walk over a convolution's tensors.

    Parameters:
        dtype: Of x and w.
        out: Of y.

    Args:
        g: Sizes.

    Returns:
        True if there is one group, C is a multiple of 16 bytes, F one of 8, in 8 bits 16, and the windows'
        strides, corners and taps are in the range of a tensor map (PTX ISA 8.0, section 5.5.4;
        CUDA's driver API).
    """
    comptime wide = 16 // size_of[dtype]()
    if g.groups != 1 or g.c % wide != 0 or g.f % max(8, 16 // size_of[out]()) != 0:
        return False
    if g.plain():
        return True
    var right = (g.q - 1) * g.stride_w - g.pad_w - (g.w - 1)
    var bottom = (g.p - 1) * g.stride_h - g.pad_h - (g.h - 1)
    return (
        max(g.stride_h, g.stride_w) <= 8
        and max(g.pad_h, g.pad_w) <= 128
        and min(right, bottom) >= -128
        and max(right, bottom) <= 127
        and max((g.s - 1) * g.dilation_w, (g.r - 1) * g.dilation_h) <= 255
    )
