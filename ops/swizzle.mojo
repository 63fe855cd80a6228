"""The order of the 16-byte chunks of rows in shared memory, so that accesses to eight rows do not collide.

Banks of shared memory repeat after 128 bytes. If the chunks of eight neighbouring rows lay below each
other, eight threads that read or write one chunk of each would wait for one another; so rows permute
their chunks. TMA and wgmma have the same order for rows of 128 and 64 bytes (PTX ISA 8.0, section 5.5.6).
"""


@always_inline
def chunk_order[dtype: DType, //, chunks: Int](row: Scalar[dtype]) -> Scalar[dtype]:
    """Gives the number by which a row permutes its chunks: chunk i lies in place of i xor that number.

    Parameters:
        dtype: Of the number.
        chunks: Of a row, a multiple of 4.

    Args:
        row: The row.

    Returns:
        From 0 to 7, or, as two rows of four chunks have 128 bytes, 0 to 3 by pairs of rows.
    """
    comptime assert chunks % 4 == 0, "swizzle: rows have a multiple of 64 bytes"
    comptime if chunks % 8 == 0:
        return row & 7
    else:
        return (row >> 1) & 3


@always_inline
def chunk_place[depth: Int, width: Int = 8](row: Int32, chunk: Int32) -> Int:
    """Places a chunk of a row.

    Parameters:
        depth: Numbers of a row.
        width: Numbers of a chunk.

    Args:
        row: The row.
        chunk: Which chunk of it.

    Returns:
        Numbers before it.
    """
    comptime chunks = depth // width
    return Int((row * Int32(chunks) + (chunk ^ chunk_order[chunks](row))) * Int32(width))
