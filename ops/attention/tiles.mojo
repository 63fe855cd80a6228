"""Rows of a head in shared memory, as the kernels of mma.sync copy, read and store them.

A row has `depth` channels, the next multiple of 32 above those of a head; what the head lacks is zero.
"""

from max.gpu import thread_idx
from max.gpu.sync import syncwarp
from std.math import ceildiv
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly, size_of

from ..async_copy import copy_async
from ..hopper.ptx import packed
from ..operands import F32, Data, Shared, stored

comptime U32 = DType.uint32
"""A register: two neighbours of a half type."""


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
        copy_async(to, source, Int32(16 if inside else 0))
    else:
        comptime BYTES = 16 if head % 8 == 0 else 8
        comptime EACH = BYTES // 2
        comptime for i in range(8 // EACH):
            var part = chunk * Int32(8 // EACH) + Int32(i)
            var there = inside and part < Int32(head // EACH)
            copy_async[BYTES](
                to.unsafe_offset(i * EACH),
                source.unsafe_offset(i * EACH if there else -Int(chunk * 8)),
                Int32(BYTES if there else 0),
            )


@always_inline
def chunk_place[depth: Int](row: Int32, chunk: Int32) -> Int:
    """Places 8 channels of a row: those of 8 rows, accessed at a time, lie in different banks.

    Parameters:
        depth: Channels of a row, a multiple of 32.

    Args:
        row: The row.
        chunk: Which eight.

    Returns:
        Numbers before them.
    """
    comptime CHUNKS = Int32(depth // 8)
    comptime if depth % 64 == 0:
        return Int((row * CHUNKS + (chunk ^ (row & 7))) * 8)
    else:
        return Int((row * CHUNKS + (chunk ^ ((row >> 1) & 3))) * 8)


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
def matrices[offset: Int, transpose: Bool = False](at: UInt32) -> SIMD[U32, 4]:
    """Loads four 8 x 8 matrices, a row of which lies `offset` bytes from each lane's address on.

    The offset is part of the instruction, so that all loads of a tile share a few addresses.

    Parameters:
        offset: Bytes.
        transpose: Whether each matrix is turned over.

    Args:
        at: The lane's address.

    Returns:
        A register of each matrix.
    """
    comptime kind = ".trans" if transpose else ""
    var r = inlined_assembly[
        "ldmatrix.sync.aligned.m8n8.x4"
        + kind
        + ".shared.b16 {$0, $1, $2, $3}, [$4 + "
        + String(offset)
        + "];",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
        has_side_effect=True,
    ](at)
    return SIMD[U32, 4](r[0], r[1], r[2], r[3])


@always_inline
def reciprocal(x: Float32) -> Float32:
    """Computes 1 / x to an ulp.

    Args:
        x: A number.

    Returns:
        Its reciprocal.
    """
    return inlined_assembly[
        "rcp.approx.ftz.f32 $0, $1;", Float32, constraints="=f,f", has_side_effect=False
    ](x)


@always_inline
def store_rows[
    out: DType, //, dtype: DType, depth: Int, head: Int, rows: Int
](
    y: Data[out],
    left: Int32,
    c: Int32,
    shared: Shared[dtype],
    first: Int32,
    acc: Array[SIMD[F32, 4], rows * (depth // 8)],
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
    syncwarp()
    comptime for r in range(rows):
        comptime if BYTES == 1:
            # Pairs of both rows, each in the first half of its chunk.
            var row = first + Int32(16 * r) + (lane >> 2)
            var low, high = factor[2 * r], factor[2 * r + 1]
            comptime for column in range(OUT):
                var four = acc[r * OUT + column] * SIMD[F32, 4](low, low, high, high)
                var pairs = bitcast[DType.uint16, 2](stored[out](four, zero))
                comptime for h in range(2):
                    var to = shared.unsafe_offset(
                        chunk_place[depth](row + Int32(8 * h), Int32(column))
                    ).unsafe_bitcast[UInt16]()
                    to[unsafe_offset=Int(lane & 3)] = pairs[h]
            continue
        comptime for h in range(2):
            var row = first + Int32(16 * r + 8 * h) + (lane >> 2)
            var scale = factor[2 * r + h]
            comptime for column in range(OUT):
                ref a = acc[r * OUT + column]
                var pair = packed[dtype](a[2 * h] * scale, a[2 * h + 1] * scale)
                var to = shared.unsafe_offset(
                    chunk_place[depth](row, Int32(column))
                ).unsafe_bitcast[UInt32]()
                to[unsafe_offset=Int((lane & 3))] = pair
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
