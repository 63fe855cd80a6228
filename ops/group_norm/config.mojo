"""The tensors and sizes of a group norm, and how statistics are joined."""

from ..kernel_argument import KernelArgument
from ..operands import F32, Data

comptime PARTIAL = 3
"""Numbers of the statistics of a part of a group: count, mean, sum of (x - mean)^2."""


@fieldwise_init
struct GroupNormTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors of a group norm.

    Parameters:
        dtype: Of x and y.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Images [N, pixels, C]."""
    var weight: Data[F32]
    """[C]."""
    var bias: Data[F32]
    """[C]."""
    var y: Data[Self.dtype]
    """The result, in the shape of x."""
    var partials: Data[F32]
    """Statistics of parts [N, groups, entries, 3], written and read by the op alone."""


struct GroupNormSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of a group norm."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var images: Int32
    """N."""
    var pixels: Int32
    """Of an image."""
    var channels: Int32
    """C."""
    var members: Int32
    """Channels of a group."""
    var entries: Int32
    """Parts of a group that `partials` has room for."""
    var eps: Float32
    """Added to the variance."""

    def __init__(
        out self,
        *,
        images: Int,
        pixels: Int,
        channels: Int,
        groups: Int,
        entries: Int,
        eps: Float32,
    ):
        """Names the sizes.

        Args:
            images: N.
            pixels: Of an image.
            channels: C.
            groups: Divide C.
            entries: Parts of a group that `partials` has room for.
            eps: Added to the variance.
        """
        self.images, self.pixels, self.channels = Int32(images), Int32(pixels), Int32(channels)
        self.members, self.entries, self.eps = Int32(channels // groups), Int32(entries), eps

    @always_inline
    def groups(self) -> Int32:
        """Counts the groups.

        Returns:
            C / members.
        """
        return self.channels // self.members


struct Moments[width: Int](TrivialRegisterPassable):
    """Count, mean and sum of squared distances to it, of several channels side by side.

    Two are joined as Chan et al. 1979 do, so that no small variance is the difference of large sums.

    Parameters:
        width: Channels.
    """

    var count: Float32
    """Numbers of each channel."""
    var mean: SIMD[F32, Self.width]
    """Their means."""
    var squares: SIMD[F32, Self.width]
    """Their sums of (x - mean)^2."""

    @always_inline
    def __init__(
        out self,
        count: Float32 = 0,
        mean: SIMD[F32, Self.width] = 0,
        squares: SIMD[F32, Self.width] = 0,
    ):
        """Begins with no number.

        Args:
            count: Numbers of each channel.
            mean: Their means.
            squares: Their sums of (x - mean)^2.
        """
        self.count, self.mean, self.squares = count, mean, squares

    @always_inline
    def join(mut self, other: Self):
        """Adds what was found of other numbers.

        Args:
            other: Their moments.
        """
        var count = self.count + other.count
        var share = other.count / max(count, 1)
        var d = other.mean - self.mean
        self.mean += d * share
        self.squares += other.squares + d * (d * (self.count * share))
        self.count = count
