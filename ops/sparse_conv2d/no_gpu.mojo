"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..no_gpu import REASON
from ..operands import Data, Operands


@doc_hidden
def sparse_conv2d_gpu[
    dtype: DType, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype],
    columns: Data[DType.uint8],
    starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
