"""What the GPU that runs has, as its driver says."""

from max.gpu.host import DeviceAttribute, DeviceContext


struct Device(TrivialRegisterPassable):
    """A GPU's sizes, by which the host chooses tiles and grids."""

    var multiprocessors: Int
    """Multiprocessors: 132 of an H100 or H200 (SXM)."""
    var shared: Int
    """Bytes of shared memory that a block may ask for: 227 KB on Hopper."""

    def __init__(out self, ctx: DeviceContext) raises:
        """Asks the driver.

        Args:
            ctx: The GPU.

        Raises:
            If the driver does not answer.
        """
        self.multiprocessors = Int(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT))
        self.shared = Int(ctx.get_attribute(DeviceAttribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
