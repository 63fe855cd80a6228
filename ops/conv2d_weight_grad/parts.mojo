"""How blocks of a GPU divide the pixels of a gradient of filters, and what a pixel meets.

The float32 sums of the parts are added up in their order: the result does not depend on which block
was done first.
"""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from ..geometry import Geometry
from ..launch import launch
from ..operands import F32, Data, narrowed
from .tensors import WeightGrad

comptime THREADS = 256
"""Threads of a block."""
comptime SLICES = 16
"""Threads that share the parts of the same numbers, at most."""


struct Part(TrivialRegisterPassable):
    """The block's part of the pixels; the grid's z numbers them."""

    var number: Int
    """Which."""
    var first: Int
    """The first pixel."""
    var end: Int
    """One beyond the last."""

    @always_inline
    def __init__(out self, count: Int):
        """Divides as evenly as it goes.

        Args:
            count: Of all pixels.
        """
        self.number = Int(block_idx.z)
        var parts = Int(grid_dim.z)
        self.first = count * self.number // parts
        self.end = count * (self.number + 1) // parts


struct Place(TrivialRegisterPassable):
    """Where the window of a pixel lies on x, but for the padding."""

    var h: Int32
    """Row."""
    var w: Int32
    """Column."""
    var at: Int
    """Number of x there, of channel 0."""

    @always_inline
    def __init__(out self, g: Geometry, m: Int):
        """Finds it.

        Args:
            g: Sizes of the convolution.
            m: Number of the pixel of dy.
        """
        var line = UInt32(m) // UInt32(g.q)
        var n = line // UInt32(g.p)
        self.h = Int32(line - n * UInt32(g.p)) * Int32(g.stride_h)
        self.w = Int32(UInt32(m) - line * UInt32(g.q)) * Int32(g.stride_w)
        self.at = ((Int(n) * g.h + Int(self.h)) * g.w + Int(self.w)) * g.c


struct Tap(TrivialRegisterPassable):
    """What a column of dw sees of a pixel: a tap of the window, and a channel."""

    comptime NONE = Int32(0x7FFF)
    """A row that is in no image: of columns that dw does not have."""

    var rows: Int32
    """Rows from the window's place to what the tap sees, negative in the padding; 16 bits higher the
    columns."""
    var offset: Int32
    """Numbers of x from the channel 0 at the window's place to what it sees."""

    @always_inline
    def __init__(out self, g: Geometry, group: Int, column: Int):
        """Finds it.

        Args:
            g: Sizes of the convolution.
            group: Of channels.
            column: Of the group's part of dw.
        """
        var tap = UInt32(column) // UInt32(g.group_c())
        var r = tap // UInt32(g.s)
        var h = Int32(r) * Int32(g.dilation_h) - Int32(g.pad_h)
        var w = Int32(tap - r * UInt32(g.s)) * Int32(g.dilation_w) - Int32(g.pad_w)
        var c = column - Int(tap) * g.group_c() + group * g.group_c()
        self.offset = (h * Int32(g.w) + w) * Int32(g.c) + Int32(c)
        if column >= g.depth():
            h = Self.NONE
        self.rows = (w << 16) | (h & 0xFFFF)

    @always_inline
    def load[
        dtype: DType, //, wide: Int
    ](self, g: Geometry, x: Data[dtype], at: Place) -> SIMD[dtype, wide]:
        """Loads what a pixel meets.

        Parameters:
            dtype: Of x.
            wide: Channels.

        Args:
            g: Sizes of the convolution.
            x: Activations.
            at: The pixel's place.

        Returns:
            The numbers; zeros in the padding.
        """
        var h = UInt32(at.h + ((self.rows << 16) >> 16))
        var w = UInt32(at.w + (self.rows >> 16))
        if h >= UInt32(g.h) or w >= UInt32(g.w):
            return 0
        return x.unsafe_load[width=wide, alignment=wide * size_of[dtype]()](
            at.at + Int(self.offset)
        )


def add_parts[
    dtype: DType, //
](o: WeightGrad[dtype], size: Int, parts: Int, ctx: DeviceContext) raises:
    """Enqueues the sum of the parts, rounded into dw.

    Parameters:
        dtype: Of dw.

    Args:
        o: Tensors; the room has the parts.
        size: Numbers of dw.
        parts: How many there are.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    # Of many parts of few numbers, threads of a block share the parts.
    var slices = 1
    while slices < SLICES and 4 * slices < parts:
        slices *= 2
    comptime for width in [4, 1]:
        if width == 1 or size % 4 == 0:
            launch[add_parts_kernel[dtype, width]](
                ctx,
                o,
                Int64(size),
                Int32(parts),
                Int32(slices),
                grid_dim=ceildiv(size // width, THREADS // slices),
                block_dim=THREADS,
            )
            return


@__name(t"conv2d_weight_grad_add_{width}_{dtype}")
def add_parts_kernel[
    dtype: DType, width: Int
](o: WeightGrad[dtype], size: Int64, parts: Int32, slices: Int32):
    """Adds up the parts of a few numbers, in one or several threads.

    Parameters:
        dtype: Of dw.
        width: Numbers of a thread.

    Args:
        o: Tensors.
        size: Numbers of dw.
        parts: How many parts there are.
        slices: Threads that share the parts of the same numbers; a power of two.
    """
    var sums = unsafe_stack_allocation[
        THREADS * width, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var lanes = Int32(THREADS) // slices
    var slice = Int32(thread_idx.x) // lanes
    var lane = Int32(thread_idx.x) - slice * lanes
    var at = (Int(block_idx.x) * Int(lanes) + Int(lane)) * width
    var part = parts * slice // slices
    var end = parts * (slice + 1) // slices
    wait_on_dependent_grids()
    launch_dependent_grids()
    var sum = SIMD[F32, width](0)
    if at < Int(size):
        var source = o.room.unsafe_offset(at)
        while part + 4 <= end:  # on their way at the same time
            var four = Array[SIMD[F32, width], 4](fill=0)
            comptime for i in range(4):
                four[i] = source.unsafe_load[width=width, alignment=4 * width](
                    (Int(part) + i) * Int(size)
                )
            sum += (four[0] + four[1]) + (four[2] + four[3])
            part += 4
        while part < end:
            sum += source.unsafe_load[width=width, alignment=4 * width](Int(part) * Int(size))
            part += 1
    if slices > 1:
        sums.unsafe_store[alignment=4 * width](Int(thread_idx.x) * width, sum)
        barrier()
        if slice == 0:
            for other in range(Int32(1), slices):
                sum += sums.unsafe_load[width=width, alignment=4 * width](
                    Int(other * lanes + lane) * width
                )
    if slice == 0 and at < Int(size):
        o.dw.unsafe_store(at, narrowed[dtype](sum))
