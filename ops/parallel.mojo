"""A loop over all cores of a CPU, which take one index after another from a counter.

Whoever is faster does more: where cores are shared with other programs, even tasks end at uneven
times. What does not depend on the closure is in functions that are never inlined: MAX compiles the
rest for each op and shape of a graph.
"""

from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.atomic import Atomic
from std.os import abort
from std.utils.numerics import FlushDenormals


def over_cores[Body: def(Int) -> None](body: Body, count: Int):
    """Calls `body` with each index below `count`, on all cores, in any order.

    Parameters:
        Body: A closure that takes an index.

    Args:
        body: What is called; denormals are flushed to zero in it.
        count: How many indices there are.
    """
    var next = Int64(0)
    var counter = Pointer(to=next)

    def core(index_of_core: Int) {imm body, var counter, var count}:
        with FlushDenormals():
            var index = Int(Atomic.fetch_add(counter, 1))
            while index < count:
                body(index)
                index = Int(Atomic.fetch_add(counter, 1))

    var cores = min(count, parallelism_level(None))
    if cores <= 1:
        core(0)
        return
    try:
        var ctx = _cpu()
        ctx.enqueue_cpu_range(core, count=cores)
        _join(ctx)
    except problem:
        _give_up(problem)


@no_inline
def _cpu() raises -> DeviceContext:
    return DeviceContext(api="cpu")


@no_inline
def _join(ctx: DeviceContext) raises:
    ctx.synchronize()


@no_inline
def _give_up(problem: Error):
    abort(String(problem))
