"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..geometry import Geometry
from ..no_gpu import REASON
from .tensors import WeightGrad


@doc_hidden
def conv2d_weight_grad_gpu[
    dtype: DType, //, tf32: Bool, depthwise: Bool = False
](g: Geometry, o: WeightGrad[dtype], most: Int, ctx: DeviceContext) raises:
    comptime assert False, REASON
