"""A barrier in shared memory that counts arrivals, and bytes written by the copy engine or by peers.

    init, fence_barrier_init   one thread; the block or cluster meets before others use the barrier
    expect                     the thread that starts copies
    arrive                     threads that have written the data themselves, or have read it
    wait                       threads that need the data, or its place

A phase ends when all arrivals have come and all bytes that were announced; then the next begins.
Pipeline makes a ring of such barriers; a barrier alone serves what comes once.

CUTLASS calls this ClusterTransactionBarrier; PTX ISA 8.0, section 9.7.12.15 (mbarrier).
"""

from std.sys._assembly import inlined_assembly

from .ptx import NOTHING


@fieldwise_init
struct Barrier(TrivialRegisterPassable):
    """An mbarrier object."""

    comptime BYTES = 8
    """Size of the object."""

    var address: UInt32
    """In shared memory; copies are given it, and count their bytes there."""

    @always_inline
    def init(self, arrivals: Int = 1):
        """Prepares the barrier, by one thread; `fence_barrier_init` has to follow.

        Args:
            arrivals: How many of them end a phase.
        """
        inlined_assembly[
            "mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, constraints="r,r,~{memory}"
        ](self.address, UInt32(arrivals))

    @always_inline
    def expect(self, bytes: UInt32):
        """Arrives, and has the phase wait for `bytes` more.

        Args:
            bytes: What copies will bring.
        """
        inlined_assembly[
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
            NOTHING,
            constraints="r,r,~{memory}",
        ](self.address, bytes)

    @always_inline
    def arrive(self):
        """Arrives."""
        inlined_assembly[
            "mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, constraints="r,~{memory}"
        ](self.address)

    @always_inline
    def wait(self, phase: UInt32 = 0):
        """Waits for the end of a phase.

        Args:
            phase: Its parity: 0 for the first one, then 1, 0, ...
        """
        inlined_assembly[
            """{
            .reg .pred done;
            again:
            mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
            @!done bra again;
            }""",
            NOTHING,
            constraints="r,r,~{memory}",
        ](self.address, phase)
