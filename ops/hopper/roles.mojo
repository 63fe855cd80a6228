"""Which warps of a block do what: some multiply, others bring what is multiplied.

The first warpgroups are the consumers. The producers are the warps behind them; of each, one thread drives the copy
engine. A launch gives every thread as many registers as any other. Where consumers need more, a whole warpgroup is
behind them, which gives its registers to the consumers: one thread of it drives the copy engine, and the others end.

    if Warps.produces(t):
        Warps.give_registers()      or not
        if Warps.drives(t):
            ...
    else:
        Warps.take_registers()      or not
        ...

CUTLASS calls this warp specialization.
"""

from .ptx import registers_give, registers_take
from .shared import WARP, WARPGROUP

comptime GIVING = WARPGROUP // WARP
"""Warps of a producer that gives registers: a warpgroup."""


struct Roles[consumers: Int, producers: Int = 1]:
    """The warps of a block.

    Parameters:
        consumers: Warpgroups that multiply.
        producers: Warps behind them, each a producer; or `GIVING`, which are one together.
    """

    comptime MULTIPLYING = WARPGROUP * Self.consumers
    """Threads of the consumers."""
    comptime THREADS = Self.MULTIPLYING + WARP * Self.producers
    """Threads of the block."""
    comptime KEPT = 24
    """Registers that a thread of a warpgroup keeps that only drives the copy engine."""
    comptime TAKEN = Self._taken()
    """Registers of a consumer's thread: what those that keep `KEPT` leave of those of the launch."""

    @staticmethod
    def _taken() -> Int:
        var each = 65536 // Self.THREADS // 8 * 8
        var left = each * (Self.consumers + 1) - Self.KEPT
        return min(left // Self.consumers // 8 * 8, 240)

    @staticmethod
    @always_inline
    def produces(t: Int32) -> Bool:
        """Tells a producer's threads from consumers'.

        Args:
            t: The thread.

        Returns:
            True behind the consumers.
        """
        comptime if Self.producers == GIVING:
            return t // Int32(WARPGROUP) == Int32(Self.consumers)
        elif Self.producers == 1:
            return t // Int32(WARP) == Int32(Self.MULTIPLYING // WARP)
        else:
            return Self.producer(t) >= 0

    @staticmethod
    @always_inline
    def producer(t: Int32) -> Int32:
        """Numbers the warps of several producers.

        Args:
            t: The thread.

        Returns:
            From 0 on; negative for a consumer.
        """
        return t // Int32(WARP) - Int32(Self.MULTIPLYING // WARP)

    @staticmethod
    @always_inline
    def drives(t: Int32) -> Bool:
        """Finds the thread of a producer that drives the copy engine.

        Args:
            t: A producer's thread.

        Returns:
            True for its first.
        """
        comptime if Self.producers == GIVING:
            return t % Int32(WARPGROUP) == 0
        else:
            return t % Int32(WARP) == 0

    @staticmethod
    @always_inline
    def give_registers():
        """Gives registers to the consumers; the whole producer calls this first."""
        comptime assert Self.producers == GIVING, "Roles: a warpgroup gives registers"
        registers_give[Self.KEPT]()

    @staticmethod
    @always_inline
    def take_registers():
        """Waits for registers that the producer gives; all consumers call this first."""
        comptime assert Self.producers == GIVING, "Roles: a warpgroup gives registers"
        registers_take[Self.TAKEN]()
