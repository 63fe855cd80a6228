"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..no_gpu import REASON
from .tensors import NormGrad, NormGradSizes


@doc_hidden
def layer_norm_grad_gpu[
    x_dtype: DType, dy_dtype: DType, dx_dtype: DType, //
](o: NormGrad[x_dtype, dy_dtype, dx_dtype], g: NormGradSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON
