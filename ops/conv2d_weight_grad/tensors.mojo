"""The tensors of the gradient of a convolution's filters."""

from ..kernel_argument import KernelArgument
from ..operands import F32, Data


@fieldwise_init
struct WeightGrad[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors of dw = sum over pixels of dy x.

    Parameters:
        dtype: Of all of them but the room.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Activations [N, H, W, C]."""
    var dy: Data[Self.dtype]
    """Gradient of the convolution's result [N, P, Q, F]."""
    var dw: Data[Self.dtype]
    """Gradient of its filters [F, R, S, C / groups]."""
    var room: Data[F32]
    """On a GPU the sums of each part of the pixels [parts, F R S C / groups]."""
