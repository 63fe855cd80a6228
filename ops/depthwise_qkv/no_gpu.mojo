"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..no_gpu import REASON
from .config import QkvOperands, QkvSizes


@doc_hidden
def depthwise_qkv_gpu[
    dtype: DType, kernel: Int, channels: Int = 0
](o: QkvOperands[dtype, _], g: QkvSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON
