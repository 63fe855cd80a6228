"""Rows of a head in shared memory, as the kernels of mma.sync copy, read and store them.

A row has `depth` channels, the next multiple of 32 above those of a head; what the head lacks is zero.
"""

from max.gpu import thread_idx
from max.gpu.sync import syncwarp
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..async_copy import copy_async
from ..hopper.accumulator import Fragment, Sums, pair
from ..hopper.ptx import mma_sync, packed, shared_load_matrices
from ..operands import F32, U32, Data, Shared, stored
from ..swizzle import chunk_place


def padded(head: Int) -> Int:
    """Says how many channels a head takes in shared memory.

    Args:
        head: Channels of a head.

    Returns:
        The next multiple of 32.
    """
    return ceildiv(head, 32) * 32


@always_inline
def copy_chunk[
    dtype: DType, //, head: Int
](to: Shared[dtype], source: Data[dtype], chunk: Int32, inside: Bool):
    """Starts copying 8 channels of a head; those that it lacks, or all of a row outside, are zeros.

    Parameters:
        dtype: Of the numbers.
        head: Channels of a head, a multiple of 4.

    Args:
        to: Where they go.
        source: The first of them.
        chunk: Which eight of the head they are.
        inside: Whether the row is there.
    """
    comptime if head == padded(head):
        copy_async(to, source, inside)
    else:
        comptime BYTES = 16 if head % 8 == 0 else 8
        comptime EACH = BYTES // 2
        comptime for i in range(8 // EACH):
            var part = chunk * Int32(8 // EACH) + Int32(i)
            var there = inside and part < Int32(head // EACH)
            copy_async[BYTES](
                to.unsafe_offset(i * EACH),
                source.unsafe_offset(i * EACH if there else -Int(chunk * 8)),
                there,
            )


@always_inline
def chunk_bytes[depth: Int](row: Int32, chunk: Int32) -> UInt32:
    """Says how many bytes are before 8 channels of a row.

    Parameters:
        depth: Channels of a row.

    Args:
        row: The row.
        chunk: Which eight.

    Returns:
        Bytes.
    """
    return UInt32(2 * chunk_place[depth](row, chunk))


@always_inline
def left_side[
    dtype: DType, //, depth: Int, step: Int, row: Int = 0
](rows: Shared[dtype], first: Int32) -> SIMD[U32, 4]:
    """Reads 16 channels of 16 rows, as the left side of a product.

    Parameters:
        dtype: Either bfloat16 or float16.
        depth: Channels of a row.
        step: Which sixteen channels.
        row: Rows from the first to these, a multiple of 16.

    Args:
        rows: Rows in shared memory.
        first: The first of them.

    Returns:
        This thread's part.
    """
    var lane = Int32(thread_idx.x) & 31
    var at = chunk_bytes[depth](first + (lane & 15), Int32(2 * step) + (lane >> 4))
    return shared_load_matrices[offset=2 * depth * row](UInt32(Int(rows)) + at)


@always_inline
def four[count: Int, //, j: Int](sums: StaticTuple[Float32, count]) -> SIMD[F32, 4]:
    """Takes the sums of eight columns, as `mma_sync` has them.

    Parameters:
        count: Sums of the thread.
        j: Which eight columns.

    Args:
        sums: Of the thread.

    Returns:
        Two of the thread's first row, and two of the other.
    """
    return SIMD[F32, 4](sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3])


@always_inline
def _add[
    count: Int, //, dtype: DType, j: Int
](mut sums: StaticTuple[Float32, count], a: SIMD[U32, 4], b: SIMD[U32, 2]):
    """Adds a product to the sums of eight columns."""
    var sum = mma_sync[dtype](a, b, four[j](sums))
    comptime for i in range(4):
        sums[4 * j + i] = sum[i]


@always_inline
def add_scores[
    dtype: DType, columns: Int, rows: Int, size: Int, //, depth: Int, half: Int, first: Int
](left: Array[SIMD[U32, 4], size], tile: Shared[dtype], mut scores: Array[Sums[columns], rows]):
    """Adds the products of 32 channels of a warp's rows and of a tile's: left tile^T.

    Parameters:
        dtype: Either bfloat16 or float16.
        columns: Rows of the tile.
        rows: The warp's rows, in units of 16.
        size: Of `left`.
        depth: Channels of a row.
        half: Which 32 channels.
        first: Where `left` has them, a `left_side` of 16 channels after the other.

    Args:
        left: The warp's rows.
        tile: Rows in shared memory.
        scores: What the products are added to.
    """
    var lane = Int32(thread_idx.x) & 31
    var at = UInt32(Int(tile)) + chunk_bytes[depth](lane & 7, Int32(4 * half) + (lane >> 3))
    comptime for j in range(columns // 8):
        var b = shared_load_matrices[offset=j * 16 * depth](at)
        comptime for r in range(rows):
            _add[dtype, j](scores[r], left[first + 2 * r], b.slice[2]())
            _add[dtype, j](scores[r], left[first + 2 * r + 1], b.slice[2, offset=2]())


@always_inline
def add_values[
    dtype: DType, columns: Int, rows: Int, //, depth: Int
](left: Array[Sums[columns], rows], tile: Shared[dtype], mut sums: Array[Sums[depth], rows]):
    """Adds the products of a warp's numbers for a tile's rows, rounded, and those rows: left tile.

    Parameters:
        dtype: Either bfloat16 or float16.
        columns: Rows of the tile.
        rows: The warp's rows, in units of 16.
        depth: Channels of a row.

    Args:
        left: The numbers, such as probabilities.
        tile: Rows in shared memory.
        sums: What the products are added to.
    """
    var lane = Int32(thread_idx.x) & 31
    comptime for step in range(columns // 16):
        var p = Array[SIMD[U32, 4], rows](uninitialized=True)
        comptime for r in range(rows):
            comptime for i in range(4):
                var two = pair[2 * step + i // 2, i % 2](left[r])
                p[r][i] = packed[dtype](two[0], two[1])
        comptime for j in range(depth // 16):
            var at = UInt32(Int(tile)) + chunk_bytes[depth](lane & 15, Int32(2 * j) + (lane >> 4))
            var b = shared_load_matrices[turned=True, offset=step * 32 * depth](at)
            comptime for r in range(rows):
                _add[dtype, 2 * j](sums[r], p[r], b.slice[2]())
                _add[dtype, 2 * j + 1](sums[r], p[r], b.slice[2, offset=2]())


@always_inline
def store_rows[
    out: DType, //, dtype: DType, depth: Int, head: Int, rows: Int
](
    y: Data[out],
    left: Int32,
    c: Int32,
    shared: Shared[dtype],
    first: Int32,
    acc: Array[Sums[depth], rows],
    factor: Array[Float32, 2 * rows],
    zero: Float32 = 0,
):
    """Stores a warp's sums of rows of a head, times a factor each, as far as rows are there.

    They pass through shared memory, where rows of the same sizes lie that nobody needs any more.

    Parameters:
        out: Of the result: that of the rows in shared memory, or of 8 bits.
        dtype: Either bfloat16 or float16.
        depth: Channels of a row in shared memory.
        head: Channels of a head.
        rows: Rows, in units of 16.

    Args:
        y: The first row.
        left: How many rows there are.
        c: Channels of all heads.
        shared: Rows in shared memory.
        first: The warp's first row there.
        acc: The sums.
        factor: Of each of the thread's rows.
        zero: The integer that stands for 0.
    """
    comptime OUT = depth // 8
    comptime BYTES = size_of[out]()
    var lane = Int32(thread_idx.x) & 31
    var at = Fragment(lane=lane)
    syncwarp()
    comptime for r in range(rows):
        comptime if BYTES == 1:
            # Pairs of both rows, each in the first half of its chunk.
            var row = first + Int32(16 * r) + at.row()
            var low, high = factor[2 * r], factor[2 * r + 1]
            comptime for column in range(OUT):
                var scaled = four[column](acc[r]) * SIMD[F32, 4](low, low, high, high)
                var pairs = bitcast[DType.uint16, 2](stored[out](scaled, zero))
                comptime for h in range(2):
                    var to = shared.unsafe_offset(
                        chunk_place[depth](row + Int32(8 * h), Int32(column))
                    ).unsafe_bitcast[UInt16]()
                    to[unsafe_offset=Int(at.column() // 2)] = pairs[h]
            continue
        comptime for h in range(2):
            var row = first + Int32(16 * r + 8 * h) + at.row()
            var scale = factor[2 * r + h]
            comptime for column in range(OUT):
                var two = pair[column, h](acc[r]) * scale
                var to = shared.unsafe_offset(
                    chunk_place[depth](row, Int32(column))
                ).unsafe_bitcast[UInt32]()
                to[unsafe_offset=Int(at.column() // 2)] = packed[dtype](two[0], two[1])
    syncwarp()
    comptime for i in range(rows * OUT // 2):
        var row = (lane + Int32(32 * i)) // Int32(OUT)
        var chunk = (lane + Int32(32 * i)) % Int32(OUT)
        if row < left:
            var from_ = shared.unsafe_offset(chunk_place[depth](first + row, chunk))
            var eight = from_.unsafe_bitcast[Scalar[out]]().unsafe_load[
                width=8, alignment=8 * BYTES
            ](0)
            var to = y.unsafe_offset(Int(row) * Int(c) + Int(chunk * 8))
            comptime if head == depth:
                to.unsafe_store[alignment=8 * BYTES](0, eight)
            elif head % 8 == 0:
                if chunk < Int32(head // 8):
                    to.unsafe_store[alignment=8 * BYTES](0, eight)
            else:
                comptime for i in range(2):
                    if 2 * chunk + Int32(i) < Int32(head // 4):
                        to.unsafe_store[alignment=4 * BYTES](4 * i, eight.slice[4, offset=4 * i]())
