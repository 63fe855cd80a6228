"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..epilogue import Epilogue
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..no_gpu import REASON
from ..operands import Operands


@doc_hidden
def conv2d_gpu[
    dtype: DType,
    epilogue: Epilogue,
    tf32: Bool,
    layer: Layer = Layer(),
    depthwise: Bool = False,
    constant: Bool = True,
](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    comptime assert False, REASON
