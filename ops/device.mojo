"""What the GPU that runs has, as its driver says."""

from max.gpu.host import DeviceAttribute, DeviceContext
from std.math import ceildiv

from .target import IS_NVIDIA

comptime RESERVED = 1024
"""Bytes of shared memory that a block takes beside what it asks for."""


struct Device(TrivialRegisterPassable):
    """A GPU's sizes, by which the host chooses tiles and grids."""

    var multiprocessors: Int
    """Multiprocessors: 132 of an H100 or H200 (SXM)."""
    var shared: Int
    """Bytes of shared memory that a block may ask for: 227 KB on Hopper."""
    var memory: Int
    """Bytes of shared memory of a multiprocessor: 228 KB on Hopper."""

    def __init__(out self, *, multiprocessors: Int):
        """Describes a Hopper GPU that need not be there.

        Args:
            multiprocessors: How many it has.
        """
        self.multiprocessors = multiprocessors
        self.shared, self.memory = 227 << 10, 228 << 10

    def __init__(out self, ctx: DeviceContext) raises:
        """Asks the driver.

        Args:
            ctx: The GPU.

        Raises:
            If the driver does not answer.
        """
        self.multiprocessors = Int(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT))
        self.shared = Int(ctx.get_attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
        self.memory = self.shared
        comptime if IS_NVIDIA:
            comptime MEMORY = DeviceAttribute.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
            self.memory = Int(ctx.get_attribute(MEMORY))

    def waves(self, blocks: Int, resident: Int = 1) -> Int:
        """Counts the turns in which the multiprocessors work blocks off.

        Args:
            blocks: Of a launch.
            resident: How many a multiprocessor holds at a time.

        Returns:
            The turns, the last one too if it leaves some idle.
        """
        return ceildiv(blocks, self.multiprocessors * resident)

    def holds(self, shared: Int) -> Int:
        """Counts the blocks that the shared memory of a multiprocessor has room for.

        Args:
            shared: Bytes that a block asks for.

        Returns:
            How many.
        """
        return self.memory // (shared + RESERVED)
