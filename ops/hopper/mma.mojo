"""Products by wgmma: matrices in shared memory or registers, dense or 2:4 sparse.

A warpgroup multiplies A[64, K] by B[K, N] and adds to sums that its threads hold (accumulator.mojo
says which thread holds what). B, and mostly A, lie in shared memory as the copy engine leaves them:
rows of 128 bytes of K, swizzled. A stage is one such row for each row of A and column of B: four
instructions of 32 bytes of K. Rows may also be 64 bytes, of two instructions.

    fence, products, commit, ...    wgmma_fence_aligned orders the registers before the products
    wait[n]                         until all but the last n committed groups are done

Sums are float32, of integers of 8 bits int32, which wraps. PTX ISA 8.0, section 9.7.14.
"""

from max.gpu.compute.mma import WGMMADescriptor, wgmma_async
from std.collections.string.string_span import _get_kgen_string
from std.memory import bitcast
from std.sys import _RegisterPackType, size_of
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from .ptx import NOTHING
from .shared import ROW

comptime ROWS = 64
"""The M of wgmma: rows of A."""
comptime BOX = ROWS * ROW
"""Bytes of a box in shared memory: of as many rows."""

comptime SUM[dtype: DType] = DType.int32 if dtype.is_integral() else DType.float32
"""What products of two numbers are summed in.

Parameters:
    dtype: Of the factors.
"""


struct Matrix[row: Int = ROW, *, wide: Bool = False](TrivialRegisterPassable):
    """Describes a matrix in shared memory: rows of 128 or 64 bytes, swizzled, or of 16 bytes.

    Of the descriptor's halves only the lower one, the address, is computed. They are joined as
    integers, not as a vector, so that the compiler folds offsets into the constant half.

    Parameters:
        row: Bytes of a row, which names the swizzle; eight rows of 16 bytes are a core matrix.
        wide: Whether `after` adds to both halves, as one number of 64 bits: fewer instructions
            where one side of the products stays in place for a whole loop.
    """

    comptime SWIZZLE = 1 if Self.row == ROW else 2 if Self.row == ROW // 2 else 0
    """As the descriptor has it: 128 bytes, 64 bytes, or none."""
    comptime HIGH = UInt32(Self.SWIZZLE << 30 | Self.row * 8 >> 4)
    """The swizzle, and sixteenths from eight rows to the next eight."""

    var low: UInt32
    """Sixteenths: the address, and from a box to the next."""

    @always_inline
    def __init__(out self, at: UInt32, pitch: Int = 16):
        """Takes a matrix.

        Args:
            at: Its address in shared memory, a multiple of 16; where it is no multiple of eight
                rows, rows are swizzled as their addresses say.
            pitch: Bytes from a box to the next, where the matrix is read turned over and its rows go
                on in further boxes; of core matrices, from 16 bytes of K to the next 16.
        """
        comptime assert Self.SWIZZLE or Self.row == 16, "wgmma: rows have 128, 64 or 16 bytes"
        self.low = (at >> 4) | UInt32(pitch >> 4 << 16)

    @always_inline
    def after(self, bytes: Int) -> Int64:
        """Describes what lies further on: the next numbers of K, or other rows.

        Args:
            bytes: How far, a multiple of 16.

        Returns:
            The descriptor.
        """
        comptime if Self.wide:
            return (Int64(Self.HIGH) << 32 | Int64(self.low)) + Int64(bytes >> 4)
        else:
            return Int64(Self.HIGH) << 32 | Int64(self.low + UInt32(bytes >> 4))


@always_inline
def mma[
    row: Int,
    sum: DType,
    //,
    dtype: DType,
    columns: Int,
    boxes: Int = 1,
    pitch: Int = 0,
    clear: Bool = False,
    pitch_b: Int = pitch,
    turned: Bool = False,
    turned_a: Bool = False,
    right: DType = dtype,
](
    a: Matrix[row, wide=_], b: Matrix[row, wide=_], sums: StaticTuple[Scalar[sum], columns // 2]
) -> StaticTuple[Scalar[sum], columns // 2]:
    """Starts adding A[64, K] B[K, columns], both in shared memory, K a row of each box.

    Parameters:
        row: Bytes of a row.
        sum: Of the sums: `SUM`.
        dtype: Of the factors: bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, uint8, or float32,
            which is multiplied as TF32.
        columns: N, a multiple of 8, at most 256.
        boxes: How many boxes of K follow one another.
        pitch: Bytes from a box to the next, of A and of B.
        clear: Whether the sums begin at 0; then `sums` lends its registers only.
        pitch_b: Those of B, where they differ.
        turned: Whether B lies as rows of its columns, one for each number of K; of 16-bit factors.
        turned_a: Whether A lies as rows of its 64 rows, one for each number of K, likewise.
        right: Of B, where it is not A's: an integer of 8 bits may meet the other.

    Args:
        a: A, row by row unless it is turned.
        b: B, column by column unless it is turned.
        sums: What the products are added to.

    Returns:
        The sums, once the group has been waited for.
    """
    _check[dtype, right, sum, columns]()
    comptime assert row >= 32, "wgmma: an instruction takes 32 bytes of a row"
    comptime assert size_of[dtype]() == 2 or not (
        turned or turned_a
    ), "wgmma: only numbers of 16 bits may lie turned over"
    comptime DEPTH = 32 // size_of[dtype]()
    # MAX names the 32 bits of an integer sum, which wgmma takes as signed, uint32.
    comptime REGISTER = DType.uint32 if dtype.is_integral() else sum
    var total = _as[REGISTER](sums)
    comptime STEPS = row // 32
    comptime for k in range(STEPS * boxes):
        comptime box = k // STEPS
        comptime step = k % STEPS * 32
        comptime step_a = k % STEPS * DEPTH * row if turned_a else step
        comptime step_b = k % STEPS * DEPTH * row if turned else step
        total = wgmma_async[
            ROWS,
            columns,
            DEPTH,
            a_type=dtype,
            b_type=right,
            layout_a="col" if turned_a else "row",
            layout_b="row" if turned else "col",
            scale_d=0 if clear and k == 0 else 1,
        ](
            WGMMADescriptor[dtype](a.after(box * pitch + step_a)),
            WGMMADescriptor[right](b.after(box * pitch_b + step_b)),
            total,
        )
    return _as[sum](total)


@always_inline
def _as[
    dtype: DType, count: Int, //, to: DType
](x: StaticTuple[Scalar[dtype], count]) -> StaticTuple[Scalar[to], count]:
    """Takes the bits of registers as another dtype of 32 bits."""
    comptime if dtype == to:
        return rebind[StaticTuple[Scalar[to], count]](x)
    var y = StaticTuple[Scalar[to], count](fill=0)
    comptime for i in range(count):
        y[i] = bitcast[to, 1](x[i])
    return y


def _numbered(sign: StaticString, first: Int, last: Int) -> String:
    """Lists the operands of an instruction from `first` to `last`, each after a sign."""
    var names = String(sign, first)
    for i in range(first + 1, last + 1):
        names += String(",", sign, i)
    return names


comptime _Registers[dtype: DType, count: Int] = _RegisterPackType[
    *TypeList.splat[Trait=TrivialRegisterPassable, count, Scalar[dtype]]()
]
"""As many sums as assembly takes and gives back, each in a register."""


@always_inline
def _accumulate[
    dtype: DType,
    count: Int,
    //,
    start: StaticString,
    end: StaticString,
    inputs: StaticString,
    *Inputs: AnyType,
](sums: StaticTuple[Scalar[dtype], count], *operands: *Inputs) -> StaticTuple[Scalar[dtype], count]:
    """Runs a wgmma that adds to sums; `inputs` are the constraints of the operands after these.

    `inlined_assembly` wants its operands written one by one. What it calls takes packs.
    """
    comptime assembly = String(start, " {", _numbered("$", 0, count - 1), "}, ", end)
    comptime register = "=r," if dtype.is_integral() else "=f,"
    comptime constraints = String(
        register * count, inputs, _numbered("", 0, count - 1), ",~{memory}"
    )
    var added = __mlir_op.`pop.inline_asm`[
        _type=_Registers[dtype, count],
        assembly=_get_kgen_string[StaticString(assembly)](),
        constraints=_get_kgen_string[StaticString(constraints)](),
        hasSideEffects=True.__mlir_i1__(),
        isStackAligned=False.__mlir_i1__(),
    ](
        operands.get_loaded_kgen_pack(),
        Pointer(to=sums).unsafe_bitcast[_Registers[dtype, count]]()[]._mlir_value,
    )
    return Pointer(to=added).unsafe_bitcast[StaticTuple[Scalar[dtype], count]]()[]


@always_inline
def mma_registers[
    sum: DType, count: Int, //, dtype: DType, turned: Bool = False, right: DType = dtype
](a: SIMD[DType.uint32, 4], b: Int64, acc: StaticTuple[Scalar[sum], count]) -> StaticTuple[
    Scalar[sum], count
]:
    """Starts adding a 64 x K by K x N product, K 32 bytes: wgmma of registers and a matrix.

    Parameters:
        sum: Of the sums: `SUM`.
        count: Sums of the thread: N / 2.
        dtype: Of the factors, as for `mma`.
        turned: Whether the right side lies as K rows of N numbers, not as N of K: of 16 bits.
        right: Of the right side, where it is not the left's, as for `mma`.

    Args:
        a: This thread's part of the left side.
        b: Descriptor of the right side.
        acc: What the product is added to.

    Returns:
        The sums, once the group has been waited for.
    """
    _check[dtype, right, sum, 2 * count]()
    comptime assert (
        size_of[dtype]() == 2 or not turned
    ), "wgmma: only numbers of 16 bits may lie turned over"
    comptime kind = _kind[dtype, right]()
    comptime left = _numbered("$", count, count + 3)
    # Whether sums are added to; the signs of both sides; whether the right one is turned.
    comptime more = ", 1, 1" if dtype.is_floating_point() else ""
    comptime order = "" if size_of[dtype]() != 2 else ", 1" if turned else ", 0"
    comptime depth = 32 // size_of[dtype]()
    return _accumulate[
        start=String(t"wgmma.mma_async.sync.aligned.m64n{2 * count}k{depth}.{kind}"),
        end=String("{", left, "}, $", count + 4, ", 1", more, order, ";"),
        inputs="r,r,r,r,l,",
    ](acc, a[0], a[1], a[2], a[3], b)


@always_inline
def mma_registers[
    count: Int, sum: DType, //, dtype: DType, turned: Bool = False, right: DType = dtype
](a: StaticTuple[UInt32, count], b: Matrix, sums: StaticTuple[Scalar[sum], _]) -> StaticTuple[
    Scalar[sum], sums.size
]:
    """Starts adding a 64 x K by K x N product, K 8 bytes for each of a thread's registers of A.

    Parameters:
        count: Registers of the thread, four for each 32 bytes of K.
        sum: Of the sums: `SUM`.
        dtype: Of the factors, as above.
        turned: Whether B lies as K rows of N numbers, not as N of K: of 16 bits.
        right: Of B, where it is not A's, as above.

    Args:
        a: This thread's part of A: sums of another product, rounded, as they lie.
        b: B.
        sums: What the product is added to.

    Returns:
        The sums, once the group has been waited for.
    """
    var total = sums
    comptime for k in range(count // 4):
        total = mma_registers[dtype, turned, right](
            SIMD[DType.uint32, 4](a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]),
            b.after((16 * b.row if turned else 32) * k),
            total,
        )
    return total


def _kind[dtype: DType, right: DType]() -> String:
    """Names the dtypes of sums and factors as PTX does."""
    return String(t"{_ptx[SUM[dtype]]()}.{_factor[dtype]()}.{_factor[right]()}")


def _factor[dtype: DType]() -> StaticString:
    """Names a factor's dtype as PTX does."""
    return "tf32" if dtype == DType.float32 else _ptx[dtype]()


def _ptx[dtype: DType]() -> StaticString:
    """Names a dtype as PTX does."""
    comptime if dtype == DType.float32:
        return "f32"
    elif dtype == DType.bfloat16:
        return "bf16"
    elif dtype == DType.float16:
        return "f16"
    elif dtype == DType.int32:
        return "s32"
    elif dtype == DType.int8:
        return "s8"
    elif dtype == DType.uint8:
        return "u8"
    elif dtype == DType.float8_e4m3fn:
        return "e4m3"
    else:
        comptime assert dtype == DType.float8_e5m2, "wgmma: has no such dtype"
        return "e5m2"


@always_inline
def _check[dtype: DType, right: DType, sum: DType, columns: Int]():
    """Refuses what no wgmma multiplies."""
    comptime assert columns % 8 == 0 and columns <= 256, "wgmma: N is a multiple of 8, at most 256"
    comptime assert sum == SUM[dtype], "wgmma: sums are float32, of integers int32"
    comptime assert dtype == right or (
        size_of[dtype]() + size_of[right]() == 2 and dtype.is_integral() and right.is_integral()
    ), "wgmma: factors have one dtype, or are integers of 8 bits"


@always_inline
def mma_sparse[
    sum: DType, //, dtype: DType, columns: Int, right: DType = dtype
](
    a: UInt32,
    b: Matrix,
    indices: SIMD[DType.uint32, _],
    sums: StaticTuple[Scalar[sum], columns // 2],
) -> StaticTuple[Scalar[sum], columns // 2]:
    """Starts adding A[64, K] B[K, columns], both in shared memory, A sparse, K 128 bytes of B.

    Of each four numbers of A two are there, of float32 one of each two. Four bits tell which: the two
    places in the four, the lower one first, two bits each; of float32 0b0100 or 0b1110. PTX ISA 8.0,
    section 9.7.14.6.

    Parameters:
        sum: Of the sums: `SUM`.
        dtype: Of the factors, as for `mma`.
        columns: N, a multiple of 8, at most 256.
        right: Of B, where it is not A's, as for `mma`.

    Args:
        a: Address of the numbers of A that are there, in core matrices: 64 rows of 16 bytes, and the
            next 16 bytes of K behind them.
        b: B, column by column.
        indices: Their places, in rows r = lane / 4 and r + 8 of a warp's 16. Of 16 and 32 bits a word
            is for 32 bytes of B, the low half for r and the high half for r + 8; lanes 4 r to 4 r + 3
            hold the four words in order. Of 8 bits there are two words, each for 64 bytes of B: lane 4 r has
            the places in r for the first 32 bytes, 4 r + 1 those in r + 8, and 4 r + 2 and 4 r + 3
            have those for the last 32.
        sums: What the products are added to.

    Returns:
        The sums, once the group has been waited for.
    """
    _check[dtype, right, sum, columns]()
    comptime assert b.row == ROW, "wgmma: rows of sparse products have 128 bytes"
    comptime WORDS = Int(indices.length)
    comptime assert WORDS == (
        2 if size_of[dtype]() == 1 else 1
    ), "wgmma: indices for 128 bytes of B"
    comptime CORES = 16 * ROWS
    comptime depth = 64 // size_of[dtype]()
    comptime kind = _kind[dtype, right]()
    comptime operands = _numbered("$", columns // 2, columns // 2 + 2)
    # Whether sums are added to; the signs of both sides; whether these are turned.
    comptime signs = ", 1, 1" if dtype.is_floating_point() else ""
    comptime order = ", 0, 0" if size_of[dtype]() == 2 else ""
    var values = Matrix[16](a, pitch=CORES)
    var total = sums
    comptime for k in range(2):
        comptime selector = k % (3 - WORDS)  # the lanes whose word it is: of two words all
        total = _accumulate[
            start=String(t"wgmma.mma_async.sp.sync.aligned.m64n{columns}k{depth}.{kind}"),
            end=String(t"{operands}, {selector}, 1{signs}{order};"),
            inputs="l,l,r,",
        ](total, values.after(2 * k * CORES), b.after(k * 64), indices[k % WORDS])
    return total


@always_inline
def hold(word: UInt32, at: UInt32, never: UInt32):
    """Keeps a register as it is until here: wgmma reads indices when it runs, not when it starts.

    Args:
        word: The register.
        at: An address in shared memory, never written.
        never: 0, which the compiler must not know.
    """
    inlined_assembly[
        """{
        .reg .pred any;
        setp.ne.b32 any, $2, 0;
        @any st.shared.b32 [$1], $0;
        }""",
        NOTHING,
        constraints="r,r,r,~{memory}",
    ](word, at, never)


@always_inline
def settled(x: Float32) -> Float32:
    """Marks where a register that wgmma has written may be read: not before the wait above.

    Args:
        x: The register.

    Returns:
        Its number.
    """
    return inlined_assembly["", Float32, constraints="=f,0"](x)


@always_inline
def settled[count: Int, //](x: StaticTuple[Float32, count]) -> StaticTuple[Float32, count]:
    """Marks where registers that wgmma has written may be read, as `settled` of one does.

    Parameters:
        count: How many there are.

    Args:
        x: The registers.

    Returns:
        Their numbers.
    """
    var y = x
    comptime for i in range(count):
        y[i] = settled(x[i])
    return y
