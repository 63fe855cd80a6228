"""A loop over all cores of a CPU that waits for no thread but those at work on it.

The caller takes part: it and its helpers take one index after another from a counter, so whoever is
faster does more. A helper that comes after the last index leaves at once, and is not waited for:
where cores are shared with other programs that is often. `sync_parallelize` of MAX waits for every
task, spinning: 8 empty ones take 500 us on two busy cores, this loop 40; on idle ones both take 9
(2026-11-21, two Zen 5 cores; a program that was not kept).
"""

from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.atomic import Atomic
from std.ffi import external_call
from std.os import abort
from std.utils.numerics import FlushDenormals

comptime Counter = Pointer[Int64, MutUntrackedOrigin]
"""A number that threads count with."""
comptime CLOSED = Int64(1 << 32)
"""Added to the helpers that have come when no more are welcome."""
comptime LINE = 16
"""Counters of 8 bytes from one to the next, so that each has two cache lines to itself."""


struct _Loop(TrivialRegisterPassable):
    """The counters of a loop, in memory that the last of its threads gives back."""

    var next: Counter
    """The index that is taken next."""
    var entered: Counter
    """Helpers that have come, and CLOSED."""
    var finished: Counter
    """Helpers that have gone."""
    var owners: Counter
    """Threads that still know of this memory."""

    def __init__(out self, owners: Int):
        self.next = external_call["malloc", Counter](4 * LINE * 8)
        self.entered = self.next.unsafe_offset(LINE)
        self.finished = self.next.unsafe_offset(2 * LINE)
        self.owners = self.next.unsafe_offset(3 * LINE)
        self.next[], self.entered[], self.finished[], self.owners[] = 0, 0, 0, Int64(owners)

    def take(self) -> Int:
        """Takes an index."""
        return Int(Atomic.fetch_add(self.next, 1))

    def enter(self) -> Bool:
        """Lets a helper in, unless the loop has ended."""
        return Atomic.fetch_add(self.entered, 1) < CLOSED

    def finish(self):
        """Says that a helper will touch the loop's body no more."""
        _ = Atomic.fetch_add(self.finished, 1)

    def close(self):
        """Lets no more helpers in, and waits for those that are."""
        var entered = Atomic.fetch_add(self.entered, CLOSED)
        while Atomic.load(self.finished) < entered:
            _ = external_call["sched_yield", Int32]()

    def leave(self):
        """Forgets the memory."""
        if Atomic.fetch_add(self.owners, -1) == 1:
            external_call["free", NoneType](self.next)


def over_cores[Body: def(Int) -> None](body: Body, count: Int):
    """Calls `body` with each index below `count`, on all cores, in any order.

    Parameters:
        Body: A closure that takes an index.

    Args:
        body: What is called; denormals are flushed to zero in it.
        count: How many indices there are.
    """
    var cores = parallelism_level(None)
    if count <= 1 or cores == 1:
        with FlushDenormals():
            for index in range(count):
                body(index)
        return
    # One for each core, the caller's too: MAX puts off what is enqueued for one alone.
    var loop = _Loop(owners=cores + 1)

    def help(core: Int) {imm body, var loop, var count}:
        if loop.enter():
            with FlushDenormals():
                var index = loop.take()
                while index < count:
                    body(index)
                    index = loop.take()
            loop.finish()
        loop.leave()

    try:
        DeviceContext(api="cpu").enqueue_cpu_range(help, count=cores)
    except problem:
        abort(String(problem))
    with FlushDenormals():
        var index = loop.take()
        while index < count:
            body(index)
            index = loop.take()
    loop.close()
    loop.leave()
