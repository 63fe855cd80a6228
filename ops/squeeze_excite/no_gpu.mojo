"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..epilogue import Epilogue
from ..no_gpu import REASON
from .config import SqueezeTensors


@doc_hidden
def squeeze_excite_gpu[
    dtype: DType, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](
    o: SqueezeTensors[dtype],
    images: Int,
    pixels: Int,
    channels: Int,
    hidden: Int,
    ctx: DeviceContext,
) raises:
    comptime assert False, REASON
