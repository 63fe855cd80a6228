"""Which warps of a block do what: some multiply, others bring what is multiplied (warp specialization).

The first warpgroups are the consumers. Behind them come the producers, a warp each; the first thread of a warp drives
the copy engine. A launch gives all threads the same number of registers. Where the consumers need more, the producer is
a whole warpgroup, which gives them its own (setmaxnreg of the PTX manual).

    if Warps.produces(t):
        if Warps.drives(t):
            ...
    else:
        ...

In some kernels other threads of a producer work too: they expand tiles (sparse_conv2d/tiled.mojo), or convert
pixels (stem/hopper.mojo).
"""

from .ptx import registers_give, registers_take
from .shared import WARP, WARPGROUP


struct Roles[consumers: Int, producers: Int = 1, *, moves_registers: Bool = False]:
    """The warps of a block.

    Parameters:
        consumers: Warpgroups that multiply.
        producers: Warps behind them.
        moves_registers: Whether the only producer is a warpgroup, which gives registers to the consumers.
    """

    comptime CONSUMER_THREADS = WARPGROUP * Self.consumers
    """Threads that multiply."""
    comptime PRODUCER = WARPGROUP if Self.moves_registers else WARP
    """Threads of a producer."""
    comptime THREADS = Self.CONSUMER_THREADS + Self.PRODUCER * Self.producers
    """Threads of the block."""
    comptime PRODUCER_REGISTERS = 24
    """Registers that each thread of the producer keeps: enough to drive the copy engine."""
    comptime CONSUMER_REGISTERS = Self._consumer_registers()
    """Registers of each consumer's thread afterwards, if the block has a multiprocessor of its own."""

    @staticmethod
    def _consumer_registers() -> Int:
        """Divides what the producer leaves of those of the launch, which come in eights."""
        var launched = 65536 // Self.THREADS // 8 * 8
        var left = launched * (Self.consumers + 1) - Self.PRODUCER_REGISTERS
        return min(left // Self.consumers // 8 * 8, 240)

    @staticmethod
    @always_inline
    def produces(t: Int32) -> Bool:
        """Tells whether a thread is the only producer's.

        Args:
            t: The thread.

        Returns:
            False if it is a consumer's.
        """
        comptime assert Self.producers == 1, "Roles: `producer` numbers several"
        return t // Int32(Self.PRODUCER) == Int32(Self.CONSUMER_THREADS // Self.PRODUCER)

    @staticmethod
    @always_inline
    def producer(t: Int32) -> Int32:
        """Numbers the producers' warps.

        Args:
            t: The thread.

        Returns:
            From 0 on; negative for a consumer.
        """
        return t // Int32(WARP) - Int32(Self.CONSUMER_THREADS // WARP)

    @staticmethod
    @always_inline
    def drives(t: Int32) -> Bool:
        """Tells whether a producer's thread is the one that drives the copy engine.

        Args:
            t: The thread.

        Returns:
            True of the producer's first.
        """
        return t % Int32(Self.PRODUCER) == 0

    @staticmethod
    @always_inline
    def give_registers():
        """Gives registers to the consumers; the whole producer calls this first."""
        comptime assert Self.moves_registers, "Roles: a warpgroup gives registers"
        registers_give[Self.PRODUCER_REGISTERS]()

    @staticmethod
    @always_inline
    def take_registers():
        """Waits for registers that the producer gives; all consumers call this first."""
        comptime assert Self.moves_registers, "Roles: a warpgroup gives registers"
        registers_take[Self.CONSUMER_REGISTERS]()
