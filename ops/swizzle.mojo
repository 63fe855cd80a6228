"""The order of the 16-byte chunks of rows in shared memory, so that accesses to eight rows do not collide.

Banks of shared memory repeat after 128 bytes. If rows lay as they are, eight threads that access the same
chunk of eight rows would hit the same banks; so rows permute their chunks. TMA and wgmma have the same
order for rows of 128 and 64 bytes (PTX ISA 8.0, section 5.5.6).
"""


@always_inline
def chunk_order[dtype: DType, //, chunks: Int](row: Scalar[dtype]) -> Scalar[dtype]:
    """Gives the key of a row: its chunk i is stored at position i ^ key.

    Parameters:
        dtype: Of the number.
        chunks: Of a row, a multiple of 4.

    Args:
        row: The row.

    Returns:
        Of eight chunks row % 8; of four row / 2 % 4, since two such rows have 128 bytes.
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
        Its offset in numbers.
    """
    comptime chunks = depth // width
    return Int((row * Int32(chunks) + (chunk ^ chunk_order[chunks](row))) * Int32(width))
