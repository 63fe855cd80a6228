"""What the kernels with a fused epilogue read and write, handed around as one value."""

from extensibility import ManagedTensorSlice
from max.gpu.memory import AddressSpace
from std.memory import bitcast
from std.sys import CompilationTarget, is_gpu, is_nvidia_gpu, size_of
from std.sys._assembly import inlined_assembly
from std.sys.intrinsics import llvm_intrinsic, masked_load
from std.utils.numerics import isnan

from .kernel_argument import KernelArgument

comptime F32 = DType.float32
"""What every kernel accumulates in, but a CPU's of float64."""
comptime F64 = DType.float64
"""What a CPU's kernels take too, to check gradients by."""
comptime BF16 = DType.bfloat16
"""Half as wide, with as many bits of exponent."""
comptime I64 = DType.int64
"""What counters are."""
comptime U32 = DType.uint32
"""What registers are, whatever numbers they hold."""

comptime ON_CPU[dtype: DType] = dtype == F32 or dtype == BF16
"""Whether the kernels of a CPU take a dtype; many take float64 too (`CHECKED`).

Parameters:
    dtype: Any.
"""
comptime CHECKED[dtype: DType] = ON_CPU[dtype] or dtype == F64
"""Whether those kernels of a CPU take a dtype by which gradients are checked.

Parameters:
    dtype: Any.
"""
comptime WIDE[dtype: DType] = F64 if dtype == F64 else F32
"""What a CPU's kernels accumulate in, and the dtype of biases: float64 of float64, else float32.

Parameters:
    dtype: Of the activations.
"""

comptime Data[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""A tensor's memory, dense and row-major; MAX keeps it alive while the op runs.

Parameters:
    dtype: Of its elements.
"""

comptime Global[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.GLOBAL
]
"""A tensor's memory where a kernel finds its address in a table, and LLVM could not tell.

Parameters:
    dtype: Of its elements.
"""

comptime Shared[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Shared memory of a block of threads.

Parameters:
    dtype: Of its elements.
"""


@always_inline
def data(tensor: ManagedTensorSlice) -> Data[tensor.dtype]:
    """Takes the memory of an op's tensor, which MAX hands over dense and row-major.

    Args:
        tensor: An input or the output.

    Returns:
        Its first element.
    """
    return rebind[Data[tensor.dtype]](tensor.unsafe_ptr())


@always_inline
def widened[
    dtype: DType, width: SIMDLength, //, into: DType = F32
](value: SIMD[dtype, width]) -> SIMD[into, width]:
    """Widens to float32, exactly: as `cast` does, which takes a GPU twice the instructions.

    Parameters:
        dtype: Of the value.
        width: Elements.
        into: Of the result: float32, or float64 (`WIDE`).

    Args:
        value: What is widened.

    Returns:
        The same numbers.
    """
    comptime if dtype == BF16 and is_gpu() and width > 1:
        comptime half = width // 2
        var pairs = bitcast[DType.uint32, half](value)
        var even = bitcast[F32, half](pairs << 16)
        var odd = bitcast[F32, half](pairs & 0xFFFF0000)
        return rebind[SIMD[into, width]](even.interleave(odd))
    return value.cast[into]()


@always_inline
def widened_load[
    dtype: DType, width: SIMDLength, //, masked: Bool, into: DType = F32
](x: Data[dtype], inside: SIMD[DType.bool, width]) -> SIMD[into, width]:
    """Loads a vector and widens it.

    Parameters:
        dtype: Of the elements.
        width: How many they are.
        masked: Whether some of them may be left out.
        into: Of the result, as `widened` has it.

    Args:
        x: The first.
        inside: Which are there, if it is masked; the others are 0.

    Returns:
        The numbers.
    """
    comptime if masked:
        return widened[into](masked_load[width](x, inside, SIMD[dtype, width](0)))
    else:
        return widened[into](x.unsafe_load[width=width, alignment=ALIGN[dtype, width]](0))


comptime ALIGN[dtype: DType, width: SIMDLength] = min(
    16, Int(width) * size_of[dtype]()
) if is_gpu() else size_of[dtype]()
"""Bytes that a vector's place is a multiple of, at least.

Parameters:
    dtype: Of its elements.
    width: How many they are.
"""

comptime ALL[width: SIMDLength] = SIMD[DType.bool, width](fill=True)
"""The mask of whole vectors.

Parameters:
    width: Lanes.
"""


@always_inline
def narrowed[
    wide: DType, width: SIMDLength, //, dtype: DType
](value: SIMD[wide, width]) -> SIMD[dtype, width]:
    """Rounds to nearest even: as `cast` does, which calls a function on x86 without AVX-512 BF16.

    Parameters:
        wide: Of the value, float32 or float64.
        width: Elements.
        dtype: Of the result: of floats, or an integer of 8 bits.

    Args:
        value: What is rounded.

    Returns:
        The nearest numbers, integers at most their largest; NaN for NaN, or 0 as an integer.
    """
    comptime if dtype.is_integral():
        return _nearest[dtype](value.cast[F32]())
    comptime if (
        dtype == BF16
        and wide == F32
        and CompilationTarget.is_x86()
        and not CompilationTarget._has_feature["avx512bf16"]()
    ):
        var bits = bitcast[DType.uint32, width](value)
        var rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        var nan = SIMD[DType.uint32, width](0x7FC0)
        return bitcast[dtype, width](isnan(value).select(nan, rounded).cast[DType.uint16]())
    return value.cast[dtype]()


@always_inline
def stored[
    width: SIMDLength, //, dtype: DType
](steps: SIMD[F32, width], zero: Float32) -> SIMD[dtype, width]:
    """Rounds numbers of steps to 8 bits, saturated: floats as they are, integers before the zero.

    Parameters:
        width: Elements.
        dtype: Floats or integers of 8 bits.

    Args:
        steps: What is stored, divided by what 1 stands for.
        zero: The integer that stands for 0; not added to floats.

    Returns:
        As `narrowed`.
    """
    comptime if dtype.is_integral():
        return narrowed[dtype](round(steps) + zero)
    return narrowed[dtype](steps)


@always_inline
def _nearest[width: SIMDLength, //, dtype: DType](value: SIMD[F32, width]) -> SIMD[dtype, width]:
    """Rounds to integers of 8 bits: to nearest even, at most the largest; 0 for NaN."""
    comptime assert size_of[dtype]() == 1, "narrowed: integers have 8 bits"
    comptime if is_nvidia_gpu() and width % 4 == 0:
        comptime quarter = width // 4
        comptime pack = "cvt.pack.sat.s8" if dtype == DType.int8 else "cvt.pack.sat.u8"
        var quads = SIMD[DType.uint32, quarter](0)
        comptime for i in range(quarter):
            quads[i] = inlined_assembly[
                """{
                .reg .b32 a, b, c, d;
                cvt.rni.s32.f32 a, $1;
                cvt.rni.s32.f32 b, $2;
                cvt.rni.s32.f32 c, $3;
                cvt.rni.s32.f32 d, $4;
                """
                + pack
                + """.s32.b32 c, d, c, 0;
                """
                + pack
                + """.s32.b32 $0, b, a, c;
                }""",
                UInt32,
                constraints="=r,f,f,f,f",
                has_side_effect=False,
            ](value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3])
        return bitcast[dtype, width](quads)
    comptime low = Float32(Int(Scalar[dtype].MIN))
    comptime high = Float32(Int(Scalar[dtype].MAX))
    comptime if is_gpu():
        var inside = isnan(value).select(SIMD[F32, width](0), value).clamp(low, high)
        return inside.__round__().cast[DType.int32]().cast[dtype]()
    return nearest[dtype](value, 1, 0)


comptime WHOLE = Float32(12582912)
"""1.5 x 2^23: floats around it are integers, whose last byte is that of what was added to it."""


@always_inline
def nearest[
    width: SIMDLength, //, dtype: DType
](value: SIMD[F32, width], factor: Float32, zero: Float32) -> SIMD[dtype, width]:
    """Computes round(factor * value) + zero, halves to even numbers, saturated, on a CPU.

    To uint8 in four instructions of AVX-512, where roundings, comparisons and conversions take
    fourteen.

    Parameters:
        width: Elements.
        dtype: An integer of 8 bits.

    Args:
        value: Any; of NaN the result is 0.
        factor: By which it is multiplied.
        zero: An integer of the dtype.

    Returns:
        The integers.
    """
    comptime WIDE = DType.int32 if dtype.is_signed() else DType.uint32
    comptime largest = SIMD[WIDE, width](Int(Scalar[dtype].MAX))
    var above = bitcast[WIDE, width](nearest_above[dtype](value, factor, zero))
    var found = min(above, largest).cast[dtype]()
    comptime if dtype.is_signed():  # of others 0 is the least one, which NaN has become
        found = isnan(value).select(SIMD[dtype, width](0), found)
    return found


@always_inline
def nearest_above[
    width: SIMDLength, //, dtype: DType
](value: SIMD[F32, width], factor: Float32, zero: Float32) -> SIMD[DType.int32, width]:
    """Computes as `nearest`, but what is above the largest integer may be anything that is.

    Parameters:
        width: Elements.
        dtype: An integer of 8 bits.

    Args:
        value: Any; of NaN the result is the least integer.
        factor: By which it is multiplied.
        zero: An integer of the dtype.

    Returns:
        The integers, saturated at the least one only.
    """
    # The bits of positive floats are in the order of the floats, those of infinity too.
    comptime I32 = DType.int32
    var whole = bitcast[I32, width](_whole[dtype](value, factor, zero))
    return whole - (bitcast[I32, 1](WHOLE) - zero.cast[I32]())


@always_inline
def steps[
    width: SIMDLength, //, dtype: DType
](value: SIMD[F32, width], factor: Float32, zero: Float32) -> SIMD[F32, width]:
    """Computes `nearest` less the zero, in float32.

    Parameters:
        width: Elements.
        dtype: An unsigned integer of 8 bits.

    Args:
        value: See `nearest`.
        factor: See `nearest`.
        zero: See `nearest`.

    Returns:
        Integers.
    """
    comptime assert not dtype.is_signed(), "steps: NaN becomes the least integer"
    var high = SIMD[F32, width](WHOLE + Float32(Int(Scalar[dtype].MAX)) - zero)
    var whole = _whole[dtype](value, factor, zero)
    return whole.lt(high).select(whole, high) - WHOLE


@always_inline
def _whole[
    width: SIMDLength, //, dtype: DType
](value: SIMD[F32, width], factor: Float32, zero: Float32) -> SIMD[F32, width]:
    """Computes WHOLE + round(factor * value), which is at least what the least integer gives."""
    var low = SIMD[F32, width](WHOLE + Float32(Int(Scalar[dtype].MIN)) - zero)
    var whole = value.fma(SIMD[F32, width](factor), SIMD[F32, width](WHOLE))
    return whole.gt(low).select(whole, low)  # `max` would look for NaN


comptime PACKS[dtype: DType] = dtype == DType.uint8 and CompilationTarget.is_x86()
"""Whether numbers are saturated to a dtype by `packed`.

Parameters:
    dtype: Of the result.
"""


@always_inline
def packed[
    width: Int, //
](parts: Array[SIMD[DType.int32, width], 4]) -> SIMD[DType.uint8, width * 4]:
    """Saturates numbers to bytes, on x86: of each 128 bits the four of every vector, one after the other.

    Parameters:
        width: Lanes.

    Args:
        parts: The numbers.

    Returns:
        The bytes.
    """
    comptime isa: StaticString = "avx512" if width == 16 else ("avx2" if width == 8 else "sse2")
    comptime bits: StaticString = ".512" if width == 16 else ("" if width == 8 else ".128")
    comptime Words = SIMD[DType.int16, 2 * width]
    comptime pack = "llvm.x86." + isa + ".packssdw" + bits
    var low = llvm_intrinsic[pack, Words](parts[0], parts[1])
    var high = llvm_intrinsic[pack, Words](parts[2], parts[3])
    return llvm_intrinsic["llvm.x86." + isa + ".packuswb" + bits, SIMD[DType.uint8, width * 4]](
        low, high
    )


def dtypes[dtype: DType, out: DType, right: DType = dtype]() -> String:
    """Names the dtypes for a profiler, as a part of a kernel's symbol: `uint8xint8_to_bfloat16`.

    Parameters:
        dtype: Of x.
        out: Of y.
        right: Of w.

    Returns:
        One name if all are the same.
    """
    var factors = String(dtype) if dtype == right else String(t"{dtype}x{right}")
    return factors if out == dtype else factors + "_to_" + String(out)


@fieldwise_init
struct Affine(TrivialRegisterPassable):
    """What integers of 8 bits of one tensor stand for: scale * (integer - zero)."""

    var scale: Float32
    """Positive."""
    var zero: Float32
    """An integer, the one that stands for 0."""

    @always_inline
    def rounded[
        width: SIMDLength, //, dtype: DType
    ](self, value: SIMD[F32, width]) -> SIMD[dtype, width]:
        """Rounds numbers to what stands for them.

        Parameters:
            width: How many.
            dtype: Integers or floats of 8 bits.

        Args:
            value: The numbers.

        Returns:
            The nearest, as `stored` rounds.
        """
        return stored[dtype](value * (1 / self.scale), self.zero)


struct Scales(KernelArgument, TrivialRegisterPassable):
    """What numbers of 8 bits stand for: y = act(product[f] * x w + bias + residual), the latter `Affine`."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var product: Data[F32]
    """One number for each filter."""
    var first: Data[F32]
    """What a first source's sums are multiplied by, one number for each filter, before a second's
    are added (gemm/hopper.mojo); any pointer if there is one source."""
    var residual: Affine
    """Of the whole residual."""
    var result: Affine
    """Of y where the epilogue `rescales`; elsewhere the other numbers are in steps of y."""

    def __init__(
        out self,
        product: Data[F32],
        residual: Affine = Affine(1, 0),
        *,
        result: Affine = Affine(1, 0),
        first: Optional[Data[F32]] = None,
    ):
        """Names the scales.

        Args:
            product: Of each filter's sums.
            residual: Of the residual.
            result: Of y, if the epilogue rescales.
            first: Of a first source's sums, if there are two.
        """
        self.product, self.residual, self.result = product, residual, result
        self.first = first.or_else(product)


struct Levels(TrivialRegisterPassable):
    """What the integers of a convolution's tensors stand for on a CPU."""

    var scales: Scales
    """Of the sums, and of the residual."""
    var rounded: Affine
    """Of what is rounded before the residual is added, if the epilogue does."""
    var result: Affine
    """Of the result, if it is of integers."""
    var zero: Int32
    """What x's 0 is stored as, which the padding reads."""

    def __init__[
        dtype: DType, //
    ](
        out self,
        product: Data[dtype],
        *,
        residual: Affine = Affine(1, 0),
        rounded: Affine = Affine(1, 0),
        result: Affine = Affine(1, 0),
        zero: Int32 = 0,
    ):
        """Says what they stand for.

        Parameters:
            dtype: Of the product: float32 where it is read.

        Args:
            product: By what each filter's sums are multiplied; any pointer in floats.
            residual: Of the residual.
            rounded: Of what is rounded before the residual is added.
            result: Of the result.
            zero: What x's 0 is stored as.
        """
        self.scales = Scales(product.unsafe_bitcast[Float32](), residual)
        self.rounded, self.result, self.zero = rounded, result, zero

    @always_inline
    def widened[
        dtype: DType, width: SIMDLength, //
    ](self, x: SIMD[dtype, width]) -> SIMD[WIDE[dtype], width]:
        """Widens activations, less what their 0 is stored as.

        Parameters:
            dtype: Of the activations.
            width: How many.

        Args:
            x: Floats, or integers.

        Returns:
            The same floats; integers that stand for 0 as 0.
        """
        comptime if dtype.is_integral():
            return widened[WIDE[dtype]](x) - self.zero.cast[WIDE[dtype]]()
        return widened[WIDE[dtype]](x)


struct Operands[dtype: DType, out: DType = dtype, right: DType = dtype, wide: DType = F32](
    KernelArgument, TrivialRegisterPassable
):
    """The tensors of y = act(alpha * x w + bias + residual).

    Parameters:
        dtype: Of x, and of the others but the bias unless they are named.
        out: Of the residual and y.
        right: Of w.
        wide: Of the bias and alpha: float32, or float64 as the others (`WIDE`).
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Activations: x[N, H, W, C], or the left side a[..., M, K] of a product."""
    var w: Data[Self.right]
    """Filters as graphs/arrange.py lays them out, or the right side of a product."""
    var bias: Data[Self.wide]
    """One number for each filter."""
    var residual: Data[Self.out]
    """In the shape of y; read by the epilogues that add only."""
    var y: Data[Self.out]
    """The result: y[N, P, Q, F] or y[..., M, N]."""
    var alpha: Scalar[Self.wide]
    """Scales the product, before bias and residual."""

    def __init__(
        out self,
        x: Data[Self.dtype],
        w: Data[Self.right],
        bias: Data[Self.wide],
        residual: Data[Self.out],
        y: Data[Self.out],
        alpha: Scalar[Self.wide] = 1,
    ):
        """Names the tensors.

        Args:
            x: Activations.
            w: Filters.
            bias: Bias.
            residual: Residual; any pointer if the epilogue does not add.
            y: Result.
            alpha: Scale of the product.
        """
        self.x, self.w, self.bias, self.residual, self.y = x, w, bias, residual, y
        self.alpha = alpha

    @always_inline
    def shifted(self, *, x: Int = 0, w: Int = 0, bias: Int = 0, y: Int = 0) -> Self:
        """Moves on to another product of a batch, or another group.

        Args:
            x: Elements to skip in x.
            w: Elements to skip in w.
            bias: Elements to skip in the bias.
            y: Elements to skip in y and the residual.

        Returns:
            The operands from there on.
        """
        return Self(
            self.x.unsafe_offset(x),
            self.w.unsafe_offset(w),
            self.bias.unsafe_offset(bias),
            self.residual.unsafe_offset(y),
            self.y.unsafe_offset(y),
            self.alpha,
        )


struct Batch(KernelArgument, TrivialRegisterPassable):
    """Products of one launch, such as those of a batch or of a convolution's groups."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var products: Int64
    """How many there are."""
    var x: Int64
    """Elements of x from one product to the next."""
    var w: Int64
    """Elements of w from one product to the next."""
    var bias: Int64
    """Elements of the bias from one product to the next."""
    var y: Int64
    """Elements of y, and of the residual, from one product to the next."""

    def __init__(out self, products: Int = 1, *, x: Int = 0, w: Int = 0, bias: Int = 0, y: Int = 0):
        """Says how far apart the products' tensors are.

        Args:
            products: How many there are.
            x: Elements of x from one product to the next.
            w: Elements of w from one product to the next.
            bias: Elements of the bias from one product to the next.
            y: Elements of y from one product to the next.
        """
        self.products, self.x, self.w = Int64(products), Int64(x), Int64(w)
        self.bias, self.y = Int64(bias), Int64(y)

    @always_inline
    def of[
        dtype: DType, wide: DType, //
    ](self, o: Operands[dtype, wide=wide], product: Int) -> Operands[dtype, wide=wide]:
        """Finds the tensors of a product.

        Parameters:
            dtype: Of the tensors.
            wide: Of the bias and alpha.

        Args:
            o: The tensors of the first product.
            product: Which.

        Returns:
            Its tensors.
        """
        return o.shifted(
            x=product * Int(self.x),
            w=product * Int(self.w),
            bias=product * Int(self.bias),
            y=product * Int(self.y),
        )
