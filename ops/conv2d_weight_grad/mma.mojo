"""The gradient of a convolution's filters on the tensor cores of Ampere and later GPUs.

    dw[f, j] = sum_m dy[m, f] x[row(m, j)]      j = (r, s, c)

A GEMM as in gpu.mojo, by mma.sync: bfloat16 and float16 by m16n8k16, float32 as TF32 (10 bits of
mantissa, rounded to nearest) by m16n8k8. A block computes 64 filters x 128 columns of a part of the
pixels, or 160 where these are all columns, as in a stem; each of its 8 warps half of the filters and a
quarter of the columns. A stage is 64 bytes of pixels; while it is multiplied, the numbers of the next
are on their way to registers. They lie in shared memory as rows of one pixel, as in memory: 16-bit
fragments are turned over as they are read (ldmatrix.trans).

x and dy are read 16 bytes at a time where C, or F, of a group allows it, else number by number: any C
and F, such as the 3 channels of a stem. It ran on Hopper; on an sm_80 or sm_89 IT HAS NOT RUN YET.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..geometry import Geometry
from ..hopper.accumulator import Fragment
from ..hopper.ptx import mma_sync, shared_load_matrices
from ..gemm.mma import to_tf32
from ..operands import F32, U32, Shared
from .parts import Part, Place, Tap, add_parts
from .tensors import WeightGrad

comptime THREADS = 256
"""Threads of a block."""
comptime WARP = 32
"""Threads of a warp."""
comptime ROWS = 64
"""Filters of a block."""
comptime ACROSS = 4
"""Warps that share the columns of a block; two share its filters."""
comptime PAD = 8
"""Numbers between the rows of shared memory, against conflicts."""
comptime LEAST = 256
"""Pixels of a part at least."""


def pixels[dtype: DType]() -> Int:
    """Counts the pixels of a stage.

    Parameters:
        dtype: Of the tensors.

    Returns:
        32 or 16.
    """
    return 64 // size_of[dtype]()


struct _Lane[dtype: DType, wide: Int, columns: Int](TrivialRegisterPassable):
    """A thread's place as one side of the tile is loaded: a pixel of a stage, and vectors."""

    comptime THREADS = THREADS // pixels[Self.dtype]()
    """Threads of a pixel."""
    comptime COUNT = Self.columns // (Self.THREADS * Self.wide)
    """Vectors of a thread."""
    comptime BYTES = Self.wide * size_of[Self.dtype]()
    """Of a vector."""

    var pixel: Int
    """The pixel."""
    var lane: Int
    """Which of its threads."""

    @always_inline
    def __init__(out self):
        """Finds it by the thread's number."""
        self.pixel, self.lane = divmod(Int(thread_idx.x), Self.THREADS)

    @always_inline
    def column(self, i: Int) -> Int:
        """Finds the first column of a vector."""
        return (self.lane + i * Self.THREADS) * Self.wide

    @always_inline
    def store(self, held: Array[SIMD[Self.dtype, Self.wide], Self.COUNT], to: Shared[Self.dtype]):
        """Stores the vectors in the pixel's row."""
        comptime for i in range(Self.COUNT):
            to.unsafe_store[alignment=Self.BYTES](
                self.pixel * (Self.columns + PAD) + self.column(i), held[i]
            )


@__name(t"conv2d_weight_grad_mma_{columns}_{wide}x{wide_dy}_{dtype}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def mma_kernel[
    dtype: DType, columns: Int, wide: Int, wide_dy: Int
](o: WeightGrad[dtype], g: Geometry):
    """Sums a part of the pixels for a tile of dw, into the room.

    Parameters:
        dtype: Of the tensors; float32 is rounded to TF32.
        columns: Of the tile.
        wide: Numbers of x that are loaded together: 16 bytes, or 1.
        wide_dy: Numbers of dy, likewise.

    Args:
        o: Tensors.
        g: Sizes of the convolution; `wide` divides C of a group, and `wide_dy` F.
    """
    comptime PIXELS = pixels[dtype]()
    comptime STAGE = PIXELS * (ROWS + columns + 2 * PAD)
    comptime Left = _Lane[dtype, wide_dy, ROWS]
    comptime Right = _Lane[dtype, wide, columns]
    var stages = unsafe_stack_allocation[
        2 * STAGE, Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var group, tile = divmod(Int(block_idx.y), ceildiv(g.group_f(), ROWS))
    var f0 = tile * ROWS
    var j0 = Int(block_idx.x) * columns
    var part = Part(g.pixels())
    var dy = Left()
    var x = Right()
    var gradient = o.dy.unsafe_offset(group * g.group_f() + f0)
    var taps = Array[Tap, Right.COUNT](uninitialized=True)
    comptime for i in range(Right.COUNT):
        taps[i] = Tap(g, group, j0 + x.column(i))
    var left = Array[SIMD[dtype, wide_dy], Left.COUNT](fill=0)
    var right = Array[SIMD[dtype, wide], Right.COUNT](fill=0)

    @always_inline
    def load(first: Int) {imm, mut left, mut right}:
        comptime for i in range(Left.COUNT):
            left[i] = 0
        comptime for i in range(Right.COUNT):
            right[i] = 0
        var m = first + dy.pixel
        if m < part.end:
            comptime for i in range(Left.COUNT):
                if f0 + dy.column(i) < g.group_f():
                    left[i] = gradient.unsafe_load[width=wide_dy, alignment=Left.BYTES](
                        m * g.f + dy.column(i)
                    )
        m = first + x.pixel
        if m < part.end:
            var at = Place(g, m)
            comptime for i in range(Right.COUNT):
                right[i] = taps[i].load[wide](g, o.x, at)

    @always_inline
    def store(number: Int) {imm}:
        var to = stages.unsafe_offset(number * STAGE)
        dy.store(left, to)
        x.store(right, to.unsafe_offset(PIXELS * (ROWS + PAD)))

    var warp, thread = divmod(Int(thread_idx.x), WARP)
    comptime PRODUCTS = columns // ACROSS // 8
    var row, column = divmod(warp, ACROSS)
    row, column = row * 32, column * 8 * PRODUCTS
    var sums = Array[SIMD[F32, 4], 2 * PRODUCTS](fill=0)
    load(part.first)
    store(0)
    barrier()
    var turn = 0
    for first in range(part.first, part.end, PIXELS):
        var more = first + PIXELS < part.end
        if more:
            load(first + PIXELS)
        var rows = stages.unsafe_offset(turn * STAGE)
        multiply[dtype, columns](
            rows.unsafe_offset(row),
            rows.unsafe_offset(PIXELS * (ROWS + PAD) + column),
            thread,
            sums,
        )
        turn = 1 - turn
        if more:
            store(turn)
        barrier()

    var to = o.room.unsafe_offset(part.number * g.f * g.depth())
    var at = Fragment(lane=Int32(thread))
    comptime for i in range(2 * PRODUCTS):
        comptime for e in range(4):
            var f = f0 + row + i // PRODUCTS * 16 + e // 2 * 8 + Int(at.row())
            var j = j0 + column + i % PRODUCTS * 8 + Int(at.column()) + e % 2
            if f < g.group_f() and j < g.depth():
                to[unsafe_offset=(group * g.group_f() + f) * g.depth() + j] = sums[i][e]


@always_inline
def multiply[
    products: Int, //, dtype: DType, columns: Int
](left: Shared[dtype], right: Shared[dtype], lane: Int, mut sums: Array[SIMD[F32, 4], products],):
    """Adds a stage to the sums of a warp: two rows of products of 16 x 8.

    Parameters:
        products: How many there are.
        dtype: Of the factors.
        columns: Of the tile.

    Args:
        left: The warp's filters of the first pixel.
        right: Its columns.
        lane: The thread's number in the warp.
        sums: Of the thread.
    """
    comptime A = ROWS + PAD
    comptime B = columns + PAD
    comptime LINE = products // 2
    comptime DEPTH = 32 // size_of[dtype]()
    comptime for k in range(0, pixels[dtype](), DEPTH):
        var a = Array[SIMD[U32, 4], 2](fill=0)
        var b = Array[SIMD[U32, 2], LINE + LINE % 2](fill=0)
        comptime if dtype == F32:
            var pixel = k + lane % 4
            var place = lane // 4
            comptime for i in range(2):
                comptime for e in range(4):
                    a[i][e] = bitcast[U32, 1](
                        left[unsafe_offset=(pixel + e // 2 * 4) * A + place + 16 * i + e % 2 * 8]
                    )
                a[i] = to_tf32[dtype](a[i])
            comptime for j in range(LINE):
                var two = SIMD[U32, 4](0)
                comptime for e in range(2):
                    two[e] = bitcast[U32, 1](
                        right[unsafe_offset=(pixel + 4 * e) * B + place + 8 * j]
                    )
                two = to_tf32[dtype](two)
                b[j] = SIMD[U32, 2](two[0], two[1])
        else:
            # Matrices of 8 pixels x 8 numbers, turned over: each lane names a row of one.
            var matrix, line = divmod(lane, 8)
            var pixel = k + matrix // 2 * 8 + line
            comptime for i in range(2):
                var at = left.unsafe_offset(pixel * A + 16 * i + matrix % 2 * 8)
                a[i] = shared_load_matrices[turned=True](UInt32(Int(at)))
            pixel = k + matrix % 2 * 8 + line
            comptime for j in range(ceildiv(LINE, 2)):  # of an odd number, the pad's too
                var at = right.unsafe_offset(pixel * B + 16 * j + matrix // 2 * 8)
                var four = shared_load_matrices[turned=True](UInt32(Int(at)))
                b[2 * j] = SIMD[U32, 2](four[0], four[1])
                b[2 * j + 1] = SIMD[U32, 2](four[2], four[3])
        comptime for i in range(2):
            comptime for j in range(LINE):
                sums[LINE * i + j] = mma_sync[dtype](a[i], b[j], sums[LINE * i + j])


def weight_grad_mma[
    dtype: DType, //
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    """Enqueues the gradient.

    Parameters:
        dtype: Of the tensors.

    Args:
        g: Sizes of the convolution.
        o: Tensors.
        most: Parts of the pixels for which there is room.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    comptime WIDE = 16 // size_of[dtype]()
    var wide = g.group_c() % WIDE == 0
    var wide_dy = g.group_f() % WIDE == 0
    if wide_dy and 128 < g.depth() <= 160:
        _enqueue[160, 1, WIDE](g, o, most, ctx)
    elif wide and wide_dy:
        _enqueue[128, WIDE, WIDE](g, o, most, ctx)
    else:
        _enqueue[128, 1, 1](g, o, most, ctx)


def _enqueue[
    dtype: DType, //, columns: Int, wide: Int, wide_dy: Int
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    var across = ceildiv(g.depth(), columns)
    var down = ceildiv(g.group_f(), ROWS) * g.groups
    var wanted = ceildiv(4 * Device(ctx).multiprocessors, across * down)
    var parts = max(1, min(min(wanted, most), ceildiv(g.pixels(), LEAST)))
    ctx.enqueue_function[mma_kernel[dtype, columns, wide, wide_dy]](
        o, g, grid_dim=(across, down, parts), block_dim=THREADS
    )
    add_parts(o, g.f * g.depth(), parts, ctx)
