"""What a graph knows of a layer's product: all its sizes but how many images there are.

Only the kernels that the product gets at some number of images are compiled.
"""

from extensibility import StaticTensorSpec
from layout import IntTuple
from std.math import ceildiv


struct Layer(TrivialRegisterPassable):
    """Sizes of the product of one image, all 0 if one is not known, and what else picks its kernels."""

    var pixels: Int
    """M: pixels or tokens of an image."""
    var filters: Int
    """F."""
    var channels: Int
    """C: K is taps C."""
    var taps: Int
    """Taps of the window."""
    var beside: Int
    """Channels of a second source, whose product is added."""
    var aligned: Bool
    """Whether it is one product, of sizes that Hopper's copy engine takes (graphs/arrange.py): the
    kernels for all others are then not compiled, and such sizes are refused."""
    var windows: Bool
    """Whether it has windows of several taps, one pixel apart: turned.mojo is for nothing else."""
    var few: Bool
    """Whether M is small, as where an image has one row: gemv.mojo is then compiled, and tiles of more
    than 64 rows are not. Any M is computed."""

    def __init__(out self, *, aligned: Bool = False, windows: Bool = False, few: Bool = False):
        """Knows no sizes.

        Args:
            aligned: As the member; so are the next two.
            windows: See `aligned`.
            few: See `aligned`.
        """
        self.pixels = self.filters = self.channels = self.taps = self.beside = 0
        self.aligned, self.windows, self.few = aligned, windows, few

    def __init__(
        out self,
        y: StaticTensorSpec,
        x: StaticTensorSpec,
        w: StaticTensorSpec,
        *,
        aligned: Bool = False,
        windows: Bool = False,
        few: Bool = False,
    ):
        """Reads the sizes off what the compiler knows of an op's tensors.

        Args:
            y: The result [N, ..., F].
            x: The activations [..., C].
            w: The filter or matrix: F, C and the taps are all its sizes, in whatever order.
            aligned: As the member; so are the next two.
            windows: See `aligned`.
            few: See `aligned`.
        """
        self = Self(aligned=aligned, windows=windows, few=few)
        var filters, channels = _last(y.shape_tuple), _last(x.shape_tuple)
        var pixels = _product(y.shape_tuple, 1, len(y.shape_tuple) - 1)
        var weights = _product(w.shape_tuple, 0, len(w.shape_tuple))
        if pixels * filters * channels > 0 and weights % (filters * channels) == 0:
            self.pixels, self.filters, self.channels = pixels, filters, channels
            self.taps = weights // (filters * channels)

    def with_source(self, source: StaticTensorSpec) -> Self:
        """Adds the product of a second source.

        Args:
            source: Its activations [..., C].

        Returns:
            The layer; no sizes are known if the channels are not.
        """
        var layer = self
        layer.beside = _last(source.shape_tuple)
        return layer if layer.beside > 0 else self._without_sizes()

    def with_rows(self, other: Self, times: Int) -> Self:
        """Adds the rows of other products with the same K and F.

        Args:
            other: One of them.
            times: How many there are.

        Returns:
            The layer; no sizes are known if the other's rows are not.
        """
        var layer = self
        layer.pixels += times * other.pixels
        return layer if other.is_known() else self._without_sizes()

    def _without_sizes(self) -> Self:
        return Self(aligned=self.aligned, windows=self.windows, few=self.few)

    def is_known(self) -> Bool:
        """Tells whether the sizes are known.

        Returns:
            Whether they are.
        """
        return self.pixels * self.taps > 0

    def steps(self, width: Int) -> Int:
        """Counts the steps of K.

        Args:
            width: Channels of a step.

        Returns:
            How many there are.
        """
        return self.taps * ceildiv(self.channels, width) + ceildiv(self.beside, width)


def _last(sizes: IntTuple) -> Int:
    """Gives the last size, or 0 if it is not known."""
    return max(Int(sizes[len(sizes) - 1]), 0)


def _product(sizes: IntTuple, first: Int, end: Int) -> Int:
    """Multiplies the sizes from `first` up to `end`; 0 if one is not known."""
    var product = 1
    for i in range(first, end):
        product *= max(Int(sizes[i]), 0)
    return product
