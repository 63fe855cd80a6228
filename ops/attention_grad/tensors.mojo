"""The tensors of the gradients of attention."""

from ..attention.config import Attention
from ..kernel_argument import KernelArgument
from ..operands import F32, Data


@fieldwise_init
struct AttentionGrad[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """What the gradients of y = softmax(scale * q k^T + bias) v are computed of, and where they go.

    Parameters:
        dtype: Of all tensors but logsumexp and delta.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var forward: Attention[Self.dtype]
    """Queries, keys and values, the result y, and their sizes."""
    var dy: Data[Self.dtype]
    """Gradient of y [N, T, C]."""
    var logsumexp: Data[F32]
    """Logarithms of the sums of exponentials of scores [N, heads, T]."""
    var dq: Data[Self.dtype]
    """Gradient of the queries [N, T, C]."""
    var dk: Data[Self.dtype]
    """Gradient of the keys [N, S, C]."""
    var dv: Data[Self.dtype]
    """Gradient of the values [N, S, C]."""
    var delta: Data[F32]
    """Room for the sums of dy * y over a head [N, heads, T], on a GPU."""
