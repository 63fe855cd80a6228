"""The functions of gpu.mojo in a build for a CPU."""

from max.gpu.host import DeviceContext
from std.documentation import doc_hidden

from ..epilogue import Epilogue
from ..no_gpu import REASON
from .config import GroupNormSizes, GroupNormTensors


@doc_hidden
def group_norm_gpu[
    dtype: DType, epilogue: Epilogue
](o: GroupNormTensors[dtype], g: GroupNormSizes, ctx: DeviceContext) raises:
    comptime assert False, REASON
