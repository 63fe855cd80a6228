"""The geometry of a window that slides over x[N, H, W, C]: convolutions and pools.

One alphabet everywhere: N H W C come in, R S is the window, P Q F go out.
"""

from std.math import ceildiv
from std.utils import IndexList

from .kernel_argument import KernelArgument
from .operands import Data


struct Geometry(KernelArgument, TrivialRegisterPassable):
    """Sizes of a sliding window, all at run time: one kernel serves every layer."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var n: Int
    """Images."""
    var h: Int
    """Input height, px."""
    var w: Int
    """Input width, px."""
    var c: Int
    """Input channels, of all groups."""
    var r: Int
    """Window height, taps."""
    var s: Int
    """Window width, taps."""
    var p: Int
    """Output height, px."""
    var q: Int
    """Output width, px."""
    var f: Int
    """Output channels (filters), of all groups."""
    var stride_h: Int
    """Input rows from one window to the next."""
    var stride_w: Int
    """Input columns from one window to the next."""
    var pad_h: Int
    """Rows of padding above the image."""
    var pad_w: Int
    """Columns of padding left of the image."""
    var dilation_h: Int
    """Input rows from one tap to the next."""
    var dilation_w: Int
    """Input columns from one tap to the next."""
    var groups: Int
    """Groups of channels that are convolved apart."""

    def __init__(out self, x: IndexList[4], y: IndexList[4], window: Data[DType.int64]):
        """Reads the sizes off the tensors of an op.

        Args:
            x: Shape of x[N, H, W, C].
            y: Shape of y[N, P, Q, F].
            window: Nine numbers in host memory: R, S, stride, padding and dilation (height, then
                width), groups.
        """
        self.n, self.h, self.w, self.c = x[0], x[1], x[2], x[3]
        self.p, self.q, self.f = y[1], y[2], y[3]
        self.r = Int(window[unsafe_offset=0])
        self.s = Int(window[unsafe_offset=1])
        self.stride_h = Int(window[unsafe_offset=2])
        self.stride_w = Int(window[unsafe_offset=3])
        self.pad_h = Int(window[unsafe_offset=4])
        self.pad_w = Int(window[unsafe_offset=5])
        self.dilation_h = Int(window[unsafe_offset=6])
        self.dilation_w = Int(window[unsafe_offset=7])
        self.groups = Int(window[unsafe_offset=8])

    def __init__(out self, *, rows: Int, depth: Int, columns: Int):
        """Describes the product a[rows, depth] b[depth, columns] as a 1x1 convolution.

        Args:
            rows: M.
            depth: K.
            columns: N.
        """
        self.n, self.h, self.w, self.c = 1, rows, 1, depth
        self.p, self.q, self.f = rows, 1, columns
        self.r = self.s = 1
        self.stride_h = self.stride_w = 1
        self.pad_h = self.pad_w = 0
        self.dilation_h = self.dilation_w = 1
        self.groups = 1

    @always_inline
    def place(self, row: Int, column: Int) -> Int:
        """Numbers the pixels that a window covers, those between its taps too.

        Args:
            row: From the window's first, px.
            column: From the window's first, px.

        Returns:
            The number; it tells pixels of one window apart.
        """
        return row * ((self.s - 1) * self.dilation_w + 1) + column

    @always_inline
    def pixels(self) -> Int:
        """Counts the output pixels.

        Returns:
            N * P * Q, the M of the matrix product.
        """
        return self.n * self.p * self.q

    @always_inline
    def depth(self) -> Int:
        """Counts the numbers under a window, in one group.

        Returns:
            R * S * C / groups, the K of the matrix product.
        """
        return self.r * self.s * self.group_c()

    @always_inline
    def group_c(self) -> Int:
        """Counts the input channels of one group.

        Returns:
            C / groups.
        """
        return self.c // self.groups

    @always_inline
    def group_f(self) -> Int:
        """Counts the filters of one group.

        Returns:
            F / groups, the N of the matrix product.
        """
        return self.f // self.groups

    @always_inline
    def tiles(self, rows: Int, columns: Int) -> Int:
        """Counts the tiles of the matrix product, of one group.

        Args:
            rows: Output pixels of a tile.
            columns: Filters of a tile.

        Returns:
            How many, those that are cut off at an edge too.
        """
        return ceildiv(self.pixels(), rows) * ceildiv(self.group_f(), columns)

    @always_inline
    def depthwise(self) -> Bool:
        """Tells whether each channel is convolved by itself, with one filter.

        Returns:
            True if groups, C and F are the same number above 1.
        """
        return self.groups == self.c and self.c == self.f and self.c > 1

    @always_inline
    def pointwise(self) -> Bool:
        """Tells whether each output pixel is a product with the input pixel of the same number.

        Returns:
            True if the window is 1 x 1, with stride 1, no padding and one group.
        """
        return self.plain() and self.groups == 1

    @always_inline
    def plain(self) -> Bool:
        """Tells whether a window is one pixel: the input pixel of the output pixel's number.

        Returns:
            True if it is 1 x 1, with stride 1 and no padding; there may be groups.
        """
        return (
            self.r * self.s * self.stride_h * self.stride_w == 1
            and self.pad_h + self.pad_w == 0
            and self.p == self.h  # no padding on the other side either
            and self.q == self.w
        )

    @always_inline
    def square(self) -> Bool:
        """Tells whether a window is the same down and across.

        Returns:
            True if R = S, the strides are the same, and there is no dilation.
        """
        return (
            self.r == self.s
            and self.stride_h == self.stride_w
            and self.dilation_h * self.dilation_w == 1
        )
