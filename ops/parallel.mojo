"""A loop over all cores of a CPU, each of which takes the indices of its share, then those of others.

The same core takes the same share of every loop: what it wrote in the layer before it finds in its
own cache. Who is done first takes what is left: where cores are shared with other programs, even
tasks end at uneven times. The caller takes part from the first moment on; MAX's other threads help,
and get the work by the task group of Mojo's runtime, which is quicker than a device context for each
loop (docs/kernels.md).

What does not depend on the closure is in functions that are never inlined: MAX compiles the rest for
each op and shape of a graph.
"""

from max.runtime.asyncrt import parallelism_level
from std.atomic import Atomic
from std.ffi import external_call
from std.runtime._asyncrt import TaskGroup
from std.sys import CompilationTarget
from std.utils.numerics import FlushDenormals

comptime Shares = Pointer[Int64, MutUntrackedOrigin]
"""The next index of each share, a cache line apart."""
comptime LINE = 8
"""Numbers of a cache line."""


def over_cores[Body: def(Int) -> None](body: Body, count: Int):
    """Calls `body` with each index below `count`, on all cores, in any order.

    Parameters:
        Body: A closure that takes an index.

    Args:
        body: What is called; denormals are flushed to zero in it.
        count: How many indices there are.
    """
    var shared = Pointer(to=body).unsafe_origin_cast[ImmUntrackedOrigin]()
    var cores = min(count, parallelism_level(None))
    if cores <= 1:
        with FlushDenormals():
            for index in range(count):
                body(index)
        return
    var memory = List[Int64](length=cores * LINE, fill=0)
    var shares = memory.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    for share in range(cores):
        shares[unsafe_offset=share * LINE] = Int64(count * share // cores)
    _lead(shared, shares, cores, cores, count)
    _ = memory^  # which they read until now


__async def _help[
    Body: def(Int) -> None, //
](body: Pointer[Body, ImmUntrackedOrigin], shares: Shares, threads: Int, cores: Int, count: Int):
    _lead(body, shares, threads, cores, count)


@always_inline
def _lead[
    Body: def(Int) -> None, //
](body: Pointer[Body, ImmUntrackedOrigin], shares: Shares, threads: Int, cores: Int, count: Int):
    """Works with `threads` threads, this one and others that it calls, each of which calls half of the rest."""
    if threads == 1:
        _work(body, shares, cores, count)
        return
    var helpers = TaskGroup()
    var rest = threads
    while rest > 1:
        helpers.create_task(_help(body, shares, rest // 2, cores, count))
        rest -= rest // 2
    _work(body, shares, cores, count)
    helpers.wait()


@always_inline
def _work[
    Body: def(Int) -> None, //
](body: Pointer[Body, ImmUntrackedOrigin], shares: Shares, cores: Int, count: Int):
    """Takes the indices of this core's share, then what is left of others."""
    with FlushDenormals():
        var own = _core()
        for turn in range(cores):
            var share = (own + turn) % cores
            var end = count * (share + 1) // cores
            var next = shares.unsafe_offset(share * LINE)
            var index = Int(Atomic.fetch_add(next, 1))
            while index < end:
                body[](index)
                index = Int(Atomic.fetch_add(next, 1))


@no_inline
def _core() -> Int:
    """Numbers the core that this thread runs on; 0 where the system does not tell."""
    comptime if CompilationTarget.is_linux():
        return max(0, Int(external_call["sched_getcpu", Int32]()))
    else:
        return 0
