"""What a reduction joins: expressions of tensors, each of which moves along some axes of the whole.

The whole is [outer, reduced, inner]. A tensor lies dense along the axes that it moves along, and repeats
along the others: an image `ori`, a number by channel `i`, a number by row `o` or `or`.
"""

from std.sys import align_of, is_gpu, size_of
from std.sys.intrinsics import masked_load

from ..expression import evaluate_words, is_expression, split
from ..operands import F32, F64, widened
from ..pointwise import BYTE, Sources

comptime MOST_TERMS = 3
"""Expressions that are reduced in one launch."""


def apart(expressions: StaticString) -> List[List[String]]:
    """Takes expressions apart, between which `;` stands.

    Args:
        expressions: Any text.

    Returns:
        The words of each.
    """
    var found: List[List[String]] = [List[String]()]
    for word in split(expressions):
        if word == ";":
            found.append(List[String]())
        else:
            found[len(found) - 1].append(word)
    return found^


struct Terms(Copyable):
    """What a reduction computes of what; a parameter of its kernels.

    The results are told apart by `;`, as the tensors by spaces: `x0 x1 mul ; x0` of `ori o`.
    """

    var dtypes: List[DType]
    """Of the tensors: floats, or uint8 for masks."""
    var lies: List[String]
    """The axes along which each moves: of the letters o, r and i."""
    var words: List[List[String]]
    """The expressions of the results, word by word."""

    def __init__(out self, dtype: DType):
        """Takes a tensor of the whole as it is.

        Args:
            dtype: Of the tensor.
        """
        self = Self("x0", "ori", [dtype])

    def __init__(out self, expressions: StaticString, lies: StaticString, var dtypes: List[DType]):
        """Takes expressions apart.

        Args:
            expressions: Of the results.
            lies: The axes along which each tensor moves.
            dtypes: Of the tensors.
        """
        self.dtypes = dtypes^
        self.lies = split(lies)
        self.words = apart(expressions)

    def moves(self, i: Int, axis: String) -> Bool:
        """Tells whether a tensor moves along an axis.

        Args:
            i: Which one.
            axis: One of o, r and i.

        Returns:
            Whether it does.
        """
        return axis in self.lies[i]

    def is_known(self, most: Int) -> Bool:
        """Tells whether the expressions are some, and say of each tensor how it lies.

        Args:
            most: Tensors that there may be.

        Returns:
            Whether they do.
        """
        for words in self.words:
            if not is_expression(words, len(self.dtypes)):
                return False
        return len(self.lies) == len(self.dtypes) <= most and len(self.words) <= MOST_TERMS

    def label(self) -> String:
        """Names what is reduced, as a part of a kernel's symbol.

        Returns:
            The dtype of a tensor, or also how many tensors and results there are.
        """
        var dtype = String(self.narrowest())
        if self.is_plain():
            return dtype
        return String(len(self.dtypes), "to", len(self.words), "_", dtype)

    def is_plain(self) -> Bool:
        """Tells whether a tensor is reduced as it is.

        Returns:
            Whether it is.
        """
        return len(self.words) == 1 and len(self.words[0]) == 1

    def widest(self) -> DType:
        """Gives the dtype in which a CPU computes.

        Returns:
            Float64 if a tensor has it, or else float32.
        """
        return F64 if F64 in self.dtypes else F32

    def narrowest(self) -> DType:
        """Gives the dtype by whose vectors all are loaded.

        Returns:
            That of 16 bits if there is one, or else float32.
        """
        var found = F32
        for dtype in self.dtypes:
            if dtype != BYTE and dtype != F32:
                found = dtype
        return found


struct Values[terms: Terms, folded: Bool](TrivialRegisterPassable):
    """Where the tensors of a reduction are read.

    Parameters:
        terms: What is computed of them.
        folded: Whether vectors lie along `reduced`, where inner is 1, rather than along inner.
    """

    comptime COUNT = len(Self.terms.dtypes)
    """Tensors."""
    comptime RESULTS = len(Self.terms.words)
    """Results."""
    comptime LANES: String = "r" if Self.folded else "i"
    """The axis of the vectors."""

    var sources: Sources[Self.COUNT]
    """The tensors, from a place on."""
    var rows: Int
    """Rows of a whole one."""
    var columns: Int
    """Numbers of a row."""

    @always_inline
    def __init__(out self, sources: Sources[Self.COUNT], rows: Int, columns: Int):
        """Begins at the first number.

        Args:
            sources: The tensors.
            rows: Rows of each [outer, rows, columns].
            columns: Numbers of a row.
        """
        self.sources, self.rows, self.columns = sources, rows, columns

    @always_inline
    def at(self, outer: Int, row: Int, column: Int) -> Self:
        """Moves on.

        Args:
            outer: So far along the first axis.
            row: So far along the second one.
            column: And along the last one.

        Returns:
            The tensors from there on.
        """
        var found = self
        comptime for i in range(Self.COUNT):
            comptime lanes = Self.terms.moves(i, Self.LANES)
            var width = self.columns if lanes else 1
            var skip = column if lanes else 0
            comptime if Self.terms.moves(i, "r"):
                skip += row * width
                width *= self.rows
            comptime if Self.terms.moves(i, "o"):
                skip += outer * width
            found.sources[i] = self.sources[i].unsafe_offset(skip * size_of[Self.terms.dtypes[i]]())
        return found

    @always_inline
    def of_columns(self, columns: Int) -> Self:
        """Takes what lies from here on for rows of another length.

        Args:
            columns: Numbers of a row.

        Returns:
            The tensors.
        """
        var found = self
        found.columns = columns
        return found

    @always_inline
    def load[
        wide: DType, //, width: Int, *, still: Bool, masked: Bool = False
    ](
        self,
        mut values: Array[SIMD[wide, width], Self.COUNT],
        inside: SIMD[DType.bool, width] = SIMD[DType.bool, width](fill=True),
    ):
        """Loads a vector of each tensor that moves along rows, or of each that does not.

        Parameters:
            wide: In which is computed.
            width: Numbers of a vector.
            still: Whether those are loaded that do not.
            masked: Whether only part of a vector is there.

        Args:
            values: Where to; those of the other tensors stay.
            inside: Which part, if it is masked.
        """
        comptime for i in range(Self.COUNT):
            comptime dtype = Self.terms.dtypes[i]
            comptime if Self.terms.moves(i, "r") != still:
                var numbers = self.sources[i].unsafe_bitcast[Scalar[dtype]]()
                comptime if not Self.terms.moves(i, Self.LANES):
                    values[i] = widened[wide](SIMD[dtype, width](numbers[unsafe_offset=0]))
                elif masked:
                    var none = SIMD[dtype, width](0)
                    values[i] = widened[wide](masked_load[width](numbers, inside, none))
                else:
                    comptime bytes = min(16, width * size_of[dtype]())
                    comptime aligned = bytes if is_gpu() else align_of[Scalar[dtype]]()
                    values[i] = widened[wide](
                        numbers.unsafe_load[width=width, alignment=aligned](0)
                    )

    @always_inline
    @staticmethod
    def term[
        wide: DType, width: SIMDLength, //, number: Int
    ](values: Array[SIMD[wide, width], Self.COUNT]) -> SIMD[wide, width]:
        """Computes what is joined to a result.

        Parameters:
            wide: In which is computed.
            width: Lanes.
            number: Of the result.

        Args:
            values: Of the tensors.

        Returns:
            The expression of them.
        """
        comptime words = Self.terms.words[number].copy()
        return evaluate_words[words](values)
