"""The tensors and sizes of the gradients of a layer norm."""

from ..kernel_argument import KernelArgument
from ..operands import F32, Data


@fieldwise_init
struct NormGrad[x_dtype: DType, dy_dtype: DType, dx_dtype: DType](
    KernelArgument, TrivialRegisterPassable
):
    """The tensors of the gradients of a layer norm.

    Parameters:
        x_dtype: Of x.
        dy_dtype: Of dy.
        dx_dtype: Of dx.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.x_dtype]
    """Rows that were normalised [rows, columns]."""
    var dy: Data[Self.dy_dtype]
    """Gradient of the result [rows, columns]."""
    var weight: Data[F32]
    """[columns]."""
    var dx: Data[Self.dx_dtype]
    """Gradient of x [rows, columns]."""
    var dweight: Data[F32]
    """Gradient of the weight [columns]."""
    var dbias: Data[F32]
    """Gradient of the bias [columns]."""
    var room: Data[F32]
    """Sums of each part of the rows, of dweight and of dbias [parts, 2, columns]."""


struct NormGradSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of the gradients of a layer norm."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var rows: Int32
    """Rows that were normalised."""
    var columns: Int32
    """Numbers of a row."""
    var parts: Int32
    """Parts into which the rows are divided."""
    var eps: Float32
    """Added to the variance."""

    def __init__(out self, *, rows: Int, columns: Int, parts: Int, eps: Float32):
        """Names the sizes.

        Args:
            rows: Rows that were normalised.
            columns: Numbers of a row.
            parts: Parts for which the room has a place.
            eps: Added to the variance.
        """
        self.rows, self.columns, self.parts = Int32(rows), Int32(columns), Int32(parts)
        self.eps = eps
