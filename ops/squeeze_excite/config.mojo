"""The tensors and sizes of a squeeze and excitation, and what a block's shared memory holds."""

from std.math import ceildiv

from ..division import quotient, reciprocal
from ..kernel_argument import KernelArgument
from ..operands import F32, Data

comptime BLOCKS = 8
"""Blocks of a cluster."""
comptime WIDTH = 8
"""Channels of a vector of 16 bytes."""
comptime CHUNKS = 4
"""Copies that bring a block's pixels."""
comptime BARRIERS = CHUNKS + 3
"""Of a block: one for each copy, and one for each time that blocks send each other numbers."""


@fieldwise_init
struct SqueezeTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors of a squeeze and excitation.

    Parameters:
        dtype: Of all of them but the biases.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Images [N, pixels, C]."""
    var squeeze: Data[Self.dtype]
    """[K, C], the weights of the first product."""
    var squeeze_bias: Data[F32]
    """[K]."""
    var excite: Data[Self.dtype]
    """[K, C], the weights of the second product."""
    var excite_bias: Data[F32]
    """[C]."""
    var residual: Data[Self.dtype]
    """In the shape of x; read by the epilogues that add only."""
    var y: Data[Self.dtype]
    """The result, in the shape of x."""


struct SqueezeSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes, and how they are divided over blocks."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var images: Int32
    """N."""
    var pixels: Int32
    """Of an image."""
    var channels: Int32
    """C, a multiple of `WIDTH`."""
    var hidden: Int32
    """K, the numbers between the products."""
    var shift: Int32
    """A cluster takes 2 images to the power of it: 1, 2, 4 or 8."""
    var split: Int32
    """1 if each block of a cluster computes with weights of some channels; 0 if with all of them, of
    the sums of its own pixels, and the cluster takes one image."""
    var kept: Int32
    """Pixels that a block keeps in shared memory, at most."""
    var slice_factor: UInt32
    """Divides by `slice` (division.mojo); so does the next one."""
    var slice_shift: UInt32
    """See `slice_factor`."""

    def __init__(
        out self,
        *,
        images: Int,
        pixels: Int,
        channels: Int,
        hidden: Int,
        shift: Int,
        split: Bool,
        kept: Int,
    ):
        """Names the sizes.

        Args:
            images: N.
            pixels: Of an image.
            channels: C.
            hidden: K.
            shift: A cluster takes 2 images to the power of it.
            split: Whether each block of a cluster computes with weights of some channels.
            kept: Pixels that a block keeps in shared memory, at most.
        """
        self.images, self.pixels, self.channels = Int32(images), Int32(pixels), Int32(channels)
        self.hidden, self.kept = Int32(hidden), Int32(kept)
        self.shift, self.split = Int32(shift), Int32(1) if split else Int32(0)
        var slice = ceildiv(channels // WIDTH, BLOCKS) if split else channels // WIDTH
        self.slice_factor, self.slice_shift = reciprocal(slice)

    @always_inline
    def together(self) -> Int32:
        """Counts the images of a cluster.

        Returns:
            1, 2, 4 or 8.
        """
        return Int32(1) << self.shift

    @always_inline
    def vectors(self) -> Int32:
        """Counts the vectors of a pixel.

        Returns:
            C / WIDTH.
        """
        return self.channels // WIDTH

    @always_inline
    def slice(self) -> Int32:
        """Counts the vectors of channels whose weights a block computes with, at most.

        Returns:
            A share of them, or all.
        """
        return (self.vectors() + BLOCKS - 1) // BLOCKS if self.split == 1 else self.vectors()

    @always_inline
    def slice_of(self, vector: Int32) -> Int32:
        """Divides by `slice`.

        Args:
            vector: A number of slices, one behind the other.

        Returns:
            Which of them it is in.
        """
        return Int32(quotient(UInt32(vector), self.slice_factor, self.slice_shift))

    @always_inline
    def parts(self) -> Int32:
        """Counts the blocks that share an image.

        Returns:
            Those of the cluster, divided by its images.
        """
        return BLOCKS >> self.shift

    @always_inline
    def share(self) -> Int32:
        """Counts the pixels of a block, at most.

        Returns:
            A part of an image.
        """
        return (self.pixels + self.parts() - 1) >> (3 - self.shift)

    @always_inline
    def rows(self) -> Int32:
        """Counts the hidden numbers of a cluster's images.

        Returns:
            K times as many as there are images.
        """
        return self.hidden << self.shift

    @always_inline
    def product_row(self, row: Int32) -> Int32:
        """Finds which of the first product's numbers one of `rows` is.

        Args:
            row: Of [K, together].

        Returns:
            From 0 to K - 1.
        """
        return row >> self.shift


struct Room(TrivialRegisterPassable):
    """Where things lie in a block's shared memory: bytes from its beginning, multiples of 16."""

    var scratch: Int32
    """A vector of float32 of each thread."""
    var means: Int32
    """[together, slice, WIDTH]."""
    var hidden: Int32
    """[K, together]."""
    var gates: Int32
    """[C], of the block's image."""
    var sums: Int32
    """What blocks send of their pixels: [BLOCKS, slice, WIDTH]; nothing if they are not split."""
    var partial: Int32
    """What they send of the first product: [BLOCKS, K, together]."""
    var pixels: Int32
    """Those of the image that are kept."""

    @always_inline
    def __init__(out self, g: SqueezeSizes, threads: Int32):
        """Lays them out, one behind the other; the barriers come first.

        Args:
            g: Sizes.
            threads: Of a block.
        """
        comptime VECTOR = 4 * WIDTH
        self.scratch = (8 * BARRIERS + 15) // 16 * 16
        self.means = self.scratch + threads * VECTOR
        self.hidden = self.means + g.together() * g.slice() * VECTOR
        self.gates = self.hidden + (4 * g.rows() + 15) // 16 * 16
        self.sums = self.gates + g.vectors() * VECTOR
        self.partial = self.sums + (BLOCKS * g.slice() * VECTOR if g.split == 1 else Int32(0))
        self.pixels = self.partial + BLOCKS * 4 * g.rows()
