"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden
from std.utils.static_tuple import StaticTuple

from ..no_gpu import REASON
from ..operands import Data
from ..pointwise import Sources
from .values import Terms


@doc_hidden
def reduce_gpu[
    into: DType, //, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: StaticTuple[Data[into], len(terms.words)],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
