"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..no_gpu import REASON
from ..operands import Data


@doc_hidden
def reduce_gpu[
    dtype: DType, into: DType, //, kind: StaticString
](
    x: Data[dtype],
    y: Data[into],
    outer: Int,
    reduced: Int,
    inner: Int,
    divisor: Float32,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
