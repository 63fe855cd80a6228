"""A block's shared memory, how a kernel divides it, and the order of 16-byte chunks in rows of 128 bytes.

What a kernel has there is a struct, its storage (CUTLASS's SharedStorage). The struct's `__init__` takes one part
after another from a `SharedAllocator`. The kernel makes its storage at the address that `shared_memory` gives. The host
makes one at address 0, and a launch asks for `bytes_until` its end: the division is written once.
"""

from max.gpu.memory import AddressSpace, external_memory

from ..device import RESERVED
from ..swizzle import chunk_order

comptime ROW = 128
"""Bytes of a row of the 128-byte swizzle: of K for each row and column of a product, in a stage."""
comptime SWIZZLED = 1024
"""Bytes after which the swizzle repeats: a stage of swizzled rows begins at a multiple of them."""
comptime WARP = 32
"""Threads of a warp."""
comptime WARPGROUP = 128
"""Threads of a warpgroup, which issues wgmma together."""


def block_memory(blocks: Int = 1) -> Int:
    """Counts the bytes of shared memory that a block may ask for: sm_90 has 228 KB a multiprocessor.

    CUDA C++ Programming Guide, technical specifications per compute capability; `Device` has those of
    the GPU that runs.

    Args:
        blocks: How many a multiprocessor holds at a time.

    Returns:
        227 KB of one, 113 KB of two.
    """
    return 228 * 1024 // blocks - RESERVED


@always_inline
def shared_memory[name: StaticString]() -> UInt32:
    """Finds the dynamic shared memory of a block.

    Parameters:
        name: Of the symbol.

    Returns:
        Its first address that is a multiple of `SWIZZLED`; a launch asks for as many bytes more.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=SWIZZLED, name=name
    ]()
    return (UInt32(Int(memory)) + UInt32(SWIZZLED - 1)) & ~UInt32(SWIZZLED - 1)


@fieldwise_init
struct SharedAllocator(TrivialRegisterPassable):
    """Divides shared memory into parts that follow one another, without gaps.

    So what is swizzled comes first, in multiples of `SWIZZLED` bytes, and what needs no alignment last.
    """

    var end: UInt32
    """First address behind the parts that were taken."""

    @always_inline
    def take(mut self, bytes: UInt32) -> UInt32:
        """Takes the next part.

        Args:
            bytes: How many.

        Returns:
            Its address.
        """
        var part = self.end
        self.end += bytes
        return part

    @always_inline
    def take(mut self, bytes: Int) -> UInt32:
        """Takes the next part.

        Args:
            bytes: How many.

        Returns:
            Its address.
        """
        return self.take(UInt32(bytes))


def bytes_until(end: UInt32) -> Int:
    """Counts the bytes that a launch asks for.

    Args:
        end: First address behind a storage at address 0.

    Returns:
        As many, and those that `shared_memory` may skip.
    """
    return Int(end) + SWIZZLED


@always_inline
def swizzle[bytes: Int = ROW](byte: UInt32, row: UInt32) -> UInt32:
    """Finds a byte of a row under the swizzle of its length (PTX ISA 8.0, section 5.5.6).

    Parameters:
        bytes: Of a row: 128 or 64.

    Args:
        byte: Of the row.
        row: Counted from a multiple of `SWIZZLED` bytes.

    Returns:
        Where it lies in the row: rows permute their chunks of 16 bytes, eight, or four by pairs of rows.
    """
    comptime assert bytes == ROW or bytes == ROW // 2, "swizzle: rows have 128 or 64 bytes"
    return byte ^ (chunk_order[bytes // 16](row) * 16)
