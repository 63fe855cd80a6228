"""A loop over all cores of a CPU, which take one index after another from a counter.

Whoever is faster does more: where cores are shared with other programs, even tasks end at uneven
times. The caller takes part from the first moment on, and MAX's other threads help. They get the
work by the task group of Mojo's runtime: in a device context for each loop, as
`enqueue_cpu_range` needs, the first index waits 4 us longer (docs/kernels.md).

What does not depend on the closure is in functions that are never inlined: MAX compiles the rest for
each op and shape of a graph.
"""

from max.runtime.asyncrt import parallelism_level
from std.atomic import Atomic
from std.runtime._asyncrt import TaskGroup
from std.utils.numerics import FlushDenormals

comptime Counter = Pointer[Int64, MutUntrackedOrigin]
"""The next index, which threads share."""


def over_cores[Body: def(Int) -> None](body: Body, count: Int):
    """Calls `body` with each index below `count`, on all cores, in any order.

    Parameters:
        Body: A closure that takes an index.

    Args:
        body: What is called; denormals are flushed to zero in it.
        count: How many indices there are.
    """
    var next = Int64(0)
    var counter = Pointer(to=next).unsafe_origin_cast[MutUntrackedOrigin]()
    var shared = Pointer(to=body).unsafe_origin_cast[ImmUntrackedOrigin]()
    var cores = min(count, parallelism_level(None))
    if cores <= 1:
        _work(shared, counter, count)
        return
    var helpers = TaskGroup()
    for _ in range(cores - 1):
        helpers.create_task(_help(shared, counter, count))
    _work(shared, counter, count)
    helpers.wait()
    _ = next  # which they read until now


__async def _help[
    Body: def(Int) -> None, //
](body: Pointer[Body, ImmUntrackedOrigin], counter: Counter, count: Int):
    _work(body, counter, count)


@always_inline
def _work[
    Body: def(Int) -> None, //
](body: Pointer[Body, ImmUntrackedOrigin], counter: Counter, count: Int):
    """Takes indices until there are no more."""
    with FlushDenormals():
        var index = Int(Atomic.fetch_add(counter, 1))
        while index < count:
            body[](index)
            index = Int(Atomic.fetch_add(counter, 1))
