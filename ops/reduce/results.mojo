"""What becomes of the numbers that a reduction leaves: they are written, or what is computed of them.

Behind the sums of a batch norm stand a few expressions of as many numbers: its scale and its shift, the
statistics that are kept. The kernel that has the sums computes them, which saves a launch for each.
"""

from std.sys.intrinsics import masked_store

from ..expression import evaluate_words, is_expression
from ..operands import ALIGN, ALL, narrowed, widened_load
from ..pointwise import Sources
from .values import apart

comptime MOST_RESULTS = 6
"""Results of one launch."""
comptime MOST_VECTORS = 6
"""Vectors that they are computed with."""


struct Finish(Copyable):
    """What is computed of what is left; a parameter of kernels.

    The expressions call x0, x1, ... what is left of the terms, and then the vectors: `x0 ; x1 x2 mul`.
    """

    var words: List[List[String]]
    """The expressions of the results, word by word."""
    var dtypes: List[DType]
    """Of the results."""
    var vectors: List[DType]
    """Of the vectors."""
    var evaluates: Bool
    """Whether there are expressions; or else what is left of each term is a result."""

    def __init__(out self, dtype: DType, count: Int):
        """Writes what is left of each term.

        Args:
            dtype: Of the results.
            count: How many there are.
        """
        self.words = List[List[String]]()
        self.dtypes = List[DType]()
        self.vectors = List[DType]()
        self.evaluates = False
        for k in range(count):
            self.words.append([String("x", k)])
            self.dtypes.append(dtype)

    def __init__(
        out self, expressions: StaticString, var dtypes: List[DType], var vectors: List[DType]
    ):
        """Takes expressions apart.

        Args:
            expressions: Of the results.
            dtypes: Of the results, or of more.
            vectors: The dtypes of the vectors.
        """
        self.words = apart(expressions)
        self.dtypes = dtypes^
        self.vectors = vectors^
        self.evaluates = True

    def is_known(self, terms: Int) -> Bool:
        """Tells whether there is an expression for each result.

        Args:
            terms: How many numbers are left.

        Returns:
            Whether there is, of these and of the vectors.
        """
        for words in self.words:
            if not is_expression(words, terms + len(self.vectors)):
                return False
        return len(self.words) <= len(self.dtypes) and len(self.words) <= MOST_RESULTS

    def label(self) -> String:
        """Names what is written, as a part of a kernel's symbol.

        Returns:
            How many results there are; nothing where no expression is evaluated.
        """
        return String("_gives", len(self.words)) if self.evaluates else ""


struct Results[finish: Finish](TrivialRegisterPassable):
    """Where results are written, and the vectors that they are computed with.

    Parameters:
        finish: What is computed.
    """

    comptime COUNT = len(Self.finish.words)
    """Results."""
    comptime VECTORS = len(Self.finish.vectors)
    """Vectors."""
    comptime TENSORS = Self.COUNT + Self.VECTORS
    """All of them."""
    comptime Tensors = Sources[Self.TENSORS]
    """The results, and then the vectors."""

    var tensors: Self.Tensors
    """Results as large as what is left of a term, and vectors of which as much is read."""

    @always_inline
    def __init__(out self, tensors: Self.Tensors):
        """Names the tensors.

        Args:
            tensors: The results, and then the vectors.
        """
        self.tensors = tensors

    @always_inline
    def put[k: Int](self, first: Int, at: Int, value: Float32):
        """Writes what is left of a term, where that is all that is written.

        Parameters:
            k: Which term.

        Args:
            first: The place of a block's first one.
            at: Its place behind that.
            value: The number.
        """
        comptime dtype = Self.finish.dtypes[k]
        var numbers = self.tensors[k].unsafe_bitcast[Scalar[dtype]]().unsafe_offset(first)
        numbers[unsafe_offset=at] = narrowed[dtype](value)

    @always_inline
    def write[
        wide: DType, width: SIMDLength, count: Int, //, *, masked: Bool = False
    ](
        self,
        at: Int,
        left: Array[SIMD[wide, width], count],
        inside: SIMD[DType.bool, width] = ALL[width],
    ):
        """Computes results, and writes them.

        Parameters:
            wide: In which is computed.
            width: Numbers of each result.
            count: How many numbers are left of the terms of each.
            masked: Whether only some are written.

        Args:
            at: The place of the first one.
            left: What is left of the terms.
            inside: Which are written, if it is masked.
        """
        var values = Array[SIMD[wide, width], count + Self.VECTORS](fill=0)
        comptime for k in range(count):
            values[k] = left[k]
        comptime for i in range(Self.VECTORS):
            comptime dtype = Self.finish.vectors[i]
            var numbers = (
                self.tensors[Self.COUNT + i].unsafe_bitcast[Scalar[dtype]]().unsafe_offset(at)
            )
            values[count + i] = widened_load[masked, wide](numbers, inside)
        comptime for k in range(Self.COUNT):
            comptime dtype = Self.finish.dtypes[k]
            comptime words = Self.finish.words[k].copy()
            var value = evaluate_words[words, narrow=dtype.is_half_float()](values)
            var numbers = self.tensors[k].unsafe_bitcast[Scalar[dtype]]().unsafe_offset(at)
            comptime if masked:
                masked_store(narrowed[dtype](value), numbers, inside)
            else:
                numbers.unsafe_store[alignment=ALIGN[dtype, width]](narrowed[dtype](value))
