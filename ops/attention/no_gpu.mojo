"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..no_gpu import REASON
from .config import Attention
from .mask import Mask, MaskTensors


@doc_hidden
def attention_gpu[
    out: DType, //, dtype: DType, depth: Int, mask: Mask, keys: Int = 0
](o: Attention[dtype, out], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    comptime assert False, REASON
