"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..attention.mask import Mask, MaskTensors
from ..no_gpu import REASON
from .tensors import AttentionGrad


@doc_hidden
def attention_grad_gpu[
    dtype: DType, depth: Int, mask: Mask
](o: AttentionGrad[dtype], tensors: MaskTensors[dtype], ctx: DeviceContext) raises:
    comptime assert False, REASON
