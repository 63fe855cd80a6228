"""What an op does to its accumulator before the one store: the fused epilogues.

    none      y = alpha * acc + bias
    relu      y = max(alpha * acc + bias, 0)
    gelu      y = g(alpha * acc + bias),  g(v) = v / 2 * (1 + erf(v / sqrt(2)))
    add       y = alpha * acc + bias + residual
    add_relu  y = max(alpha * acc + bias + residual, 0)
    mul       y = (alpha * acc + bias) * residual
    mul_silu  y = (alpha * acc + bias) * silu(residual)

With `scales`, each filter has a scale in the place of alpha, and the residual, and y, a scale and a
zero of their own: so integers of 8 bits are multiplied, added and made (`Scales`, `Affine`). Where it
`rounds` too, on a CPU, scale * acc + bias is rounded to uint8 before the residual is added.
On Hopper x may be normalised by row (`normalizes`), by the moments that the epilogue of the product
before has left (`measures`): see hopper/moments.mojo. Or the mean of the result's rows takes the place of
the result (`pools`): see hopper/direct_store.mojo.

`Output` has all of it for kernels that store from registers or from a CPU's memory: scale and bias
of a channel, residual, activation, rounding, the store. Hopper's tiles leave through shared memory
(hopper/epilogue.mojo), with the arithmetic of `apply`.

In the place of relu and silu may be any op of one value of graphs/elementwise.py, its settings before
it: `silu`, `add_0.0 6.0 clamp`, `mul_gelu_grad`. All of it in the dtype of the sums, which is float32, or float64 on a
CPU; the result is rounded once, to the output's dtype.
"""

from std.math import iota
from std.memory import bitcast
from std.sys import is_gpu, simd_width_of, size_of
from std.sys.intrinsics import masked_store
from std.utils import IndexList

from .dot import U8
from .expression import evaluate_words, is_expression, split
from .functions import gelu, gelu_narrow, relu
from .functions64 import unary64
from .operands import (
    ALIGN,
    ALL,
    BF16,
    F32,
    F64,
    Affine,
    Data,
    Levels,
    Operands,
    Scales,
    narrowed,
    nearest,
    nearest_above,
    packed,
    steps,
    widened_load,
)


struct Epilogue(TrivialRegisterPassable):
    """One of the fused epilogues above, as a compile-time value."""

    var name: StaticString
    """As graphs/nodes.py passes it; see `known`."""
    var joins: Bool
    """Whether there is a residual: it is added, or multiplied by."""
    var multiplies: Bool
    """Whether the sum is multiplied by a function of the residual."""
    var relu: Bool
    """Whether the result is rectified."""
    var gelu: Bool
    """Whether the result goes through a GELU."""
    var scales: Bool
    """Whether each filter's sum, and the residual, have scales."""
    var rounds: Bool
    """Whether scale * acc + bias is rounded to uint8 before the residual is added."""
    var normalizes: Bool
    """Whether the product is one of the normalised rows of x."""
    var measures: Bool
    """Whether moments of the result's rows are stored, too."""
    var pools: Bool
    """Whether the mean of the result's rows is stored, and not the result."""

    def __init__(
        out self,
        name: StaticString,
        *,
        scales: Bool = False,
        rounds: Bool = False,
        normalizes: Bool = False,
        measures: Bool = False,
        pools: Bool = False,
    ):
        """Looks an epilogue up.

        Args:
            name: As graphs/nodes.py passes it; see `known`.
            scales: Whether each filter's sum, and the residual, have scales.
            rounds: Whether what the residual is added to is rounded; it has scales then.
            normalizes: Whether the product is one of the normalised rows of x.
            measures: Whether moments of the result's rows are stored, too.
            pools: Whether the mean of the result's rows is stored, and not the result.
        """
        self.name, self.scales, self.rounds = name, scales, rounds
        self.normalizes, self.measures, self.pools = normalizes, measures, pools
        self.multiplies = name.startswith("mul")
        self.joins = self.multiplies or name.startswith("add")
        self.relu = name == "relu" or name == "add_relu"
        self.gelu = name == "gelu" or name == "add_gelu"

    @staticmethod
    def rectified[dtype: DType, *, adds: Bool = False]() -> Self:
        """Finds the epilogue, with scales, of a ReLU of 8 bits: integers without a sign saturate anyway.

        Parameters:
            dtype: Of the result: uint8, whose zero point is 0, or a float.
            adds: Whether there is a residual.

        Returns:
            The epilogue.
        """
        comptime if dtype.is_integral():
            return Self(StaticString("add") if adds else "none", scales=True)
        else:
            return Self(StaticString("add_relu") if adds else "relu", scales=True)

    def words(self) -> List[String]:
        """Writes the op of one value down as an expression of what it is of, x0.

        Returns:
            Its words; `x0` alone if there is no such op.
        """
        var found: List[String] = ["x0"]
        if self.name != "none" and self.name != "add" and self.name != "mul":
            found.extend(split(self.name))
            if self.joins:
                var first = String(found[1].removeprefix("add_").removeprefix("mul_"))
                found[1] = first^
        return found^

    @always_inline
    def normed(self) -> Bool:
        """Tells whether moments of rows are read or written.

        Returns:
            Whether the epilogue normalises or measures.
        """
        return self.normalizes or self.measures

    def rescales[dtype: DType](self) -> Bool:
        """Tells whether the result is divided by its scale behind the activation, on Hopper.

        A scale commutes with no activation, and with a ReLU where there is no zero point: elsewhere
        the numbers that it would divide are given in steps of the result.

        Parameters:
            dtype: Of the result.

        Returns:
            True behind an activation, of 8 bits.
        """
        var commutes = self.name in ["none", "add"] or (self.relu and dtype.is_floating_point())
        return self.scales and size_of[dtype]() == 1 and not commutes

    def label(self) -> String:
        """Names the epilogue for a profiler, as a part of a kernel's symbol.

        Returns:
            The name without settings: `add_clamp`, `scale_add_clamp`, `norm_gelu`, `add_moments`,
            `add_relu_mean`.
        """
        var words = self.words()
        var before = "scale_" if self.scales else "norm_" if self.normalizes else ""
        var behind = "_moments" if self.measures else "_mean" if self.pools else ""
        if len(words) == 1:
            return String(before, self.name, behind)
        var joined = "mul_" if self.multiplies else "add_" if self.joins else ""
        return String(before, joined, words[len(words) - 1], behind)

    @staticmethod
    def known[name: StaticString]() -> Bool:
        """Tells whether there is an epilogue of that name.

        Parameters:
            name: Any name.

        Returns:
            True for none, add and mul, and for an op of one value, alone or behind `add_` or `mul_`.
        """
        # Reading an expression costs the compiler 1 s, so the usual names are told apart first.
        comptime if Self(name).usual():
            return True
        else:
            return is_expression(Self(name).words(), 1)

    def usual(self) -> Bool:
        """Tells whether the epilogue is one of those in the table above.

        Returns:
            False for the ops of graphs/elementwise.py.
        """
        return self.relu or self.gelu or self.name in ["none", "add", "mul"]


@always_inline
def activate[
    wide: DType, width: SIMDLength, //, epilogue: Epilogue, dtype: DType
](value: SIMD[wide, width], residual: SIMD[wide, width] = 0, residual_scale: Float32 = 1) -> SIMD[
    wide, width
]:
    """Computes act(value + residual), the residual scaled if the epilogue scales; or the product.

    Parameters:
        wide: Of the sums: float32, or float64.
        width: Lanes.
        epilogue: The epilogue.
        dtype: What the result is rounded to.

    Args:
        value: What scale * sum + bias is.
        residual: Of each lane; counts if the epilogue joins it.
        residual_scale: Of the residual; counts if the epilogue scales.

    Returns:
        The result, before it is rounded.
    """
    comptime assert not (epilogue.multiplies and epilogue.scales), "a product has no scales"
    var v = value
    comptime if epilogue.multiplies:
        comptime if epilogue.usual():
            return v * residual
        else:
            return v * evaluate_words[epilogue.words(), narrow=dtype.is_half_float()]([residual])
    elif epilogue.joins and epilogue.scales:
        v = residual.fma(SIMD[wide, width](residual_scale.cast[wide]()), v)
    elif epilogue.joins:
        v += residual
    comptime if (epilogue.relu or epilogue.gelu) and wide == F64:
        comptime op: String = "relu" if epilogue.relu else "gelu"
        return rebind[SIMD[wide, width]](unary64[op](rebind[SIMD[F64, width]](v)))
    elif epilogue.relu or epilogue.gelu:
        var narrow = rebind[SIMD[F32, width]](v)
        comptime if epilogue.relu:
            return rebind[SIMD[wide, width]](relu(narrow))
        elif dtype == BF16 or (is_gpu() and size_of[dtype]() == 1):
            return rebind[SIMD[wide, width]](gelu_narrow(narrow))
        else:
            return rebind[SIMD[wide, width]](gelu(narrow))
    elif epilogue.usual():
        return v
    else:
        return evaluate_words[epilogue.words(), narrow=dtype.is_half_float()]([v])


@fieldwise_init
struct Channels[width: SIMDLength, wide: DType = F32](TrivialRegisterPassable):
    """What the sums of neighbouring channels are multiplied by, and what is added to them.

    Parameters:
        width: Channels.
        wide: Of both: float32, or float64.
    """

    var scale: SIMD[Self.wide, Self.width]
    """Of each; the same number unless the epilogue scales."""
    var bias: SIMD[Self.wide, Self.width]
    """Of each."""


@always_inline
def apply[
    wide: DType, width: SIMDLength, //, epilogue: Epilogue, dtype: DType
](
    sum: SIMD[wide, width],
    of: Channels[width, wide],
    residual: SIMD[wide, width] = 0,
    residual_scale: Float32 = 1,
) -> SIMD[wide, width]:
    """Computes act(scale * sum + bias + residual), the residual scaled if the epilogue scales.

    Or, if the epilogue multiplies, (scale * sum + bias) * act(residual).

    Parameters:
        wide: Of the sums: float32, or float64.
        width: Lanes.
        epilogue: The epilogue.
        dtype: What the result is rounded to.

    Args:
        sum: The accumulator.
        of: Scale and bias.
        residual: Of each lane; counts if the epilogue joins it.
        residual_scale: Of the residual; counts if the epilogue scales.

    Returns:
        The result, before it is rounded.
    """
    return activate[epilogue, dtype](sum.fma(of.scale, of.bias), residual, residual_scale)


struct Output[dtype: DType, wide: DType, //, epilogue: Epilogue, added: DType = dtype](
    TrivialRegisterPassable
):
    """Where sums go: y[M, F], and what the epilogue reads beside it.

    A kernel loads the `channels` of a column once, and takes the sums of each row through `finish`.
    One that begins its sums with the bias takes them through `store`, and one that has the result
    of `apply` or `activate` through `put`. Vectors beyond an edge in part are masked. On a GPU they
    lie at a multiple of their size, or of 16 bytes.

    Parameters:
        dtype: Of y: a float, or an integer of 8 bits if the epilogue scales.
        wide: Of the bias: float32, or float64 as y.
        epilogue: What the sums go through.
        added: Of the residual, likewise.
    """

    var bias: Data[Self.wide]
    """[F]."""
    var residual: Data[Self.added]
    """[M, F]; read by the epilogues that join it only."""
    var y: Data[Self.dtype]
    """[M, F]."""
    var alpha: Scalar[Self.wide]
    """The scale of all channels, unless the epilogue scales."""
    var scales: Scales
    """That of each channel, and what the residual stands for, if the epilogue scales."""
    var rounded_is: Affine
    """What integers of scale * acc + bias stand for, if the epilogue rounds these."""
    var y_is: Affine
    """What y stands for, if it is of integers."""

    @always_inline
    def __init__(
        out self,
        bias: Data[Self.wide],
        residual: Data[Self.added],
        y: Data[Self.dtype],
        alpha: Scalar[Self.wide] = 1,
        *,
        scales: Optional[Scales] = None,
        rounded_is: Affine = Affine(1, 0),
        y_is: Affine = Affine(1, 0),
    ):
        """Names the tensors.

        Args:
            bias: [F]; any pointer if there are no `channels`.
            residual: [M, F]; any pointer if the epilogue does not join it.
            y: [M, F].
            alpha: Scale of the sums, unless the epilogue scales.
            scales: Of the sums, and what the residual stands for, if the epilogue scales.
            rounded_is: What the residual is added to stands for, if the epilogue rounds that.
            y_is: What y stands for, if it is of integers.
        """
        self.bias, self.residual, self.y, self.alpha = bias, residual, y, alpha
        self.scales, self.y_is = Scales(bias.unsafe_bitcast[Float32]()), y_is
        self.rounded_is = rounded_is
        comptime if Self.epilogue.scales:
            self.scales = scales.value()

    @always_inline
    def __init__(out self, o: Operands[_, Self.dtype, _, Self.wide], levels: Levels):
        """Takes the tensors of a CPU's kernel, of floats or of integers.

        Args:
            o: They are among these.
            levels: What integers stand for.
        """
        var residual = rebind[Data[Self.added]](o.residual)
        self = Self(
            o.bias,
            residual,
            o.y,
            o.alpha,
            scales=levels.scales,
            rounded_is=levels.rounded,
            y_is=levels.result,
        )

    @always_inline
    def __init__(out self, o: Operands[_, Self.dtype, _, Self.wide]):
        """Takes the tensors of an epilogue without scales.

        Args:
            o: They are among these.
        """
        self = Self(o.bias, rebind[Data[Self.added]](o.residual), o.y, o.alpha)

    @always_inline
    def channels[
        width: SIMDLength, masked: Bool = False
    ](self, f: Int, inside: SIMD[DType.bool, width] = ALL[width]) -> Channels[width, Self.wide]:
        """Loads what belongs to neighbouring channels.

        Parameters:
            width: Channels.
            masked: Whether some of them may be left out.

        Args:
            f: The first channel.
            inside: Which are there, if it is masked.

        Returns:
            Scale and bias.
        """
        var bias = widened_load[masked, Self.wide](self.bias.unsafe_offset(f), inside)
        var scale = SIMD[Self.wide, width](self.alpha)
        comptime if Self.epilogue.scales:
            scale = widened_load[masked, Self.wide](self.scales.product.unsafe_offset(f), inside)
        return Channels(scale, bias)

    @always_inline
    def finish[
        sum: DType, width: SIMDLength, //, masked: Bool = False
    ](
        self,
        sums: SIMD[sum, width],
        of: Channels[width, Self.wide],
        to: Int,
        inside: SIMD[DType.bool, width] = ALL[width],
    ):
        """Takes sums through the epilogue into y.

        Parameters:
            sum: Of the sums: a float, or int32.
            width: Channels.
            masked: Whether some of them may be left out.

        Args:
            sums: Of neighbouring channels of a row.
            of: Their scale and bias.
            to: Where they belong in y: row * F + channel.
            inside: Which are there, if it is masked.
        """
        self.store[masked](sums.cast[Self.wide]().fma(of.scale, of.bias), to, inside)

    @always_inline
    def end[width: SIMDLength, //](self, sums: SIMD[Self.wide, width], f: Int, to: Int):
        """Takes sums into y that began with the bias, or with 0 if the epilogue scales.

        Parameters:
            width: Channels.

        Args:
            sums: Of neighbouring channels of a row.
            f: The first channel.
            to: As `finish` has it.
        """
        comptime if Self.epilogue.scales:
            self.finish(sums, self.channels[width](f), to)
        else:
            self.store(sums, to)

    @always_inline
    def store[
        width: SIMDLength, //, masked: Bool = False
    ](self, value: SIMD[Self.wide, width], to: Int, inside: SIMD[DType.bool, width] = ALL[width]):
        """Adds the residual, to what is rounded first if the epilogue does, activates and stores.

        Parameters:
            width: Channels.
            masked: Whether some of them may be left out.

        Args:
            value: What scale * sum + bias is of neighbouring channels of a row.
            to: As `finish` has it.
            inside: Which are there, if it is masked.
        """
        self.put[masked](self.result[masked](value, to, inside), to, inside)

    @always_inline
    def result[
        width: SIMDLength, //, masked: Bool = False
    ](
        self, value: SIMD[Self.wide, width], to: Int, inside: SIMD[DType.bool, width] = ALL[width]
    ) -> SIMD[Self.wide, width]:
        """Computes what `store` puts into y.

        Parameters:
            width: Channels.
            masked: Whether some of them may be left out.

        Args:
            value: As `store` has it.
            to: As `finish` has it.
            inside: Which are there, if it is masked.

        Returns:
            The results, before they are rounded.
        """
        var residual = SIMD[Self.wide, width](0)
        comptime if Self.epilogue.joins:
            residual = widened_load[masked, Self.wide](self.residual.unsafe_offset(to), inside)
            comptime if Self.added.is_integral():
                residual -= self.scales.residual.zero.cast[Self.wide]()
        var v, more, scale = value, residual, self.scales.residual.scale
        comptime if Self.epilogue.rounds:
            # In the order in which a launch of its own would compute the sum: the same to the bit.
            v = residual * scale.cast[Self.wide]()
            scale = self.rounded_is.scale
            more = steps[U8](value.cast[F32](), 1 / scale, self.rounded_is.zero).cast[Self.wide]()
        return activate[Self.epilogue, Self.dtype](v, more, scale)

    @always_inline
    def put[
        width: SIMDLength, //, masked: Bool = False
    ](self, value: SIMD[Self.wide, width], to: Int, inside: SIMD[DType.bool, width] = ALL[width]):
        """Rounds and stores.

        Parameters:
            width: Channels.
            masked: Whether some of them may be left out.

        Args:
            value: The results of neighbouring channels of a row.
            to: As `finish` has it.
            inside: Which are there, if it is masked.
        """
        # Rounded before the zero is added, as ONNX and torch do: halves become even numbers.
        var y: SIMD[Self.dtype, width]
        comptime if not Self.dtype.is_integral():
            y = narrowed[Self.dtype](value)
        elif is_gpu():
            y = self.y_is.rounded[Self.dtype](value.cast[F32]())
        else:
            var v, factor = self._scaled(value)
            y = nearest[Self.dtype](v, factor, self.y_is.zero)
        comptime if masked:
            masked_store(y, self.y.unsafe_offset(to), inside)
        else:
            comptime align = ALIGN[Self.dtype, width]
            self.y.unsafe_store[alignment=align](to, y)

    @always_inline
    def _scaled[
        width: SIMDLength, //
    ](self, value: SIMD[Self.wide, width]) -> Tuple[SIMD[F32, width], Float32]:
        """Gives the factors of what is rounded to integers, on a CPU."""
        var v, factor = value.cast[F32](), 1 / self.y_is.scale
        comptime if Self.epilogue.rounds:  # as `result` says; a product would become a part of a sum
            v, factor = v.fma(factor, 0), Float32(1)
        return v, factor

    @always_inline
    def finish_packed[
        sum: DType, width: Int, size: Int, //
    ](self, sums: Array[SIMD[sum, width], size], f: Int, to: Int, pitch: Int):
        """Takes rows of four vectors of sums through the epilogue, and each into y as one of bytes.

        Parameters:
            sum: Of the sums: int32.
            width: Channels of a vector.
            size: Vectors of all rows.

        Args:
            sums: Of neighbouring channels, row by row.
            f: The first channel.
            to: Where the first row belongs in y, as `finish` has it.
            pitch: F.
        """
        var integers = Array[SIMD[DType.int32, width], size](uninitialized=True)
        comptime for v in range(4):
            var of = self.channels[width](f + v * width)
            comptime for i in range(0, size, 4):
                var value = sums[i + v].cast[Self.wide]().fma(of.scale, of.bias)
                var result = self.result(value, to + i // 4 * pitch + v * width)
                var scaled, factor = self._scaled(result)
                integers[i + v] = nearest_above[U8](scaled, factor, self.y_is.zero)
        comptime across = _across[width]()
        comptime for i in range(0, size, 4):
            var row = Array[SIMD[DType.int32, width], 4](uninitialized=True)
            comptime for v in range(4):
                row[v] = integers[i + v]
            # Of each 128 bits there are four bytes of every vector.
            var bytes = bitcast[DType.int32, width](packed(row)).shuffle[mask=across]()
            var y = rebind[Data[U8]](self.y).unsafe_offset(to + i // 4 * pitch)
            y.unsafe_store(0, bitcast[U8, width * 4](bytes))

    @always_inline
    def finish_row[sum: DType](self, sums: Data[sum], f: Int, to: Int, count: Int):
        """Takes sums that a CPU has in memory through the epilogue, the last vector masked.

        Parameters:
            sum: Of the sums: a float, or int32.

        Args:
            sums: Of channels of a row.
            f: The first channel.
            to: As `finish` has it.
            count: How many channels.
        """
        comptime WIDTH = simd_width_of[F32]()
        var whole = count // WIDTH * WIDTH
        var inside = iota[DType.int32, WIDTH]().lt(Int32(count - whole))
        comptime for masked in [False, True]:
            for j in range(whole if masked else 0, count if masked else whole, WIDTH):
                var some = widened_load[masked, Self.wide](sums.unsafe_offset(j), inside)
                self.finish[masked](
                    some, self.channels[WIDTH, masked](f + j, inside), to + j, inside
                )


def _across[width: Int]() -> IndexList[width]:
    """Finds the quads of bytes of four vectors one after the other in what `packed` gives."""
    var found = IndexList[width]()
    for i in range(width):
        found[i] = i % (width // 4) * 4 + i // (width // 4)
    return found
