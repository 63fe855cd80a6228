"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..no_gpu import REASON
from ..pointwise import Sources
from .results import Finish, Results
from .values import Terms


@doc_hidden
def reduce_gpu[
    finish: Finish, //, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: Results[finish],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
