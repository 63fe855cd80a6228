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
from std.memory import bitcast
from std.sys import _RegisterPackType, size_of
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from .ptx import NOTHING
from .shared import ROW

comptime ROWS = 64
"""The M of wgmma: rows of A."""

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
        right: Of B, where it is not A's: either integer of 8 bits may meet the other.

    Args:
        a: A, row by row.
        b: B, column by column unless it is turned.
        sums: What the products are added to.

    Returns:
        The sums, once the group has been waited for.
    """
    comptime assert columns % 8 == 0 and columns <= 256, "wgmma: N is a multiple of 8, at most 256"
    comptime assert sum == SUM[dtype], "wgmma: sums are float32, of integers int32"
    comptime DEPTH = 32 // size_of[dtype]()
    # MAX names the 32 bits of an integer sum, which wgmma takes as signed, uint32.
    comptime REGISTER = DType.uint32 if dtype.is_integral() else sum
    var total = _as[REGISTER](sums)
    comptime STEPS = row // 32
    comptime for k in range(STEPS * boxes):
        comptime box = k // STEPS
        comptime step = k % STEPS * 32
        comptime step_b = k % STEPS * DEPTH * row if turned else step
        total = wgmma_async[
            ROWS,
            columns,
            DEPTH,
            a_type=dtype,
            b_type=right,
            layout_b="row" if turned else "col",
            scale_d=0 if clear and k == 0 else 1,
        ](
            WGMMADescriptor[dtype](a.after(box * pitch + step)),
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


def _numbered[count: Int](sign: StaticString) -> String:
    """Lists the operands of an instruction from 0 on, each after a sign."""
    var names = String(sign) + "0"
    for i in range(1, count):
        names += String(t",{sign}{i}")
    return names


@always_inline
def mma_registers[
    count: Int, //, dtype: DType, turned: Bool = False
](a: SIMD[DType.uint32, 4], b: Int64, acc: StaticTuple[Float32, count]) -> StaticTuple[
    Float32, count
]:
    """Starts adding a 64 x 16 by 16 x N product: wgmma of registers and a matrix.

    Parameters:
        count: Sums of the thread, N / 2: 16, 32, 48 or 64.
        dtype: Either bfloat16 or float16.
        turned: Whether the right side lies as 16 rows of N numbers, not as N of 16.

    Args:
        a: This thread's part of the left side.
        b: Descriptor of the right side.
        acc: What the product is added to.

    Returns:
        The sums, once the group has been waited for.
    """
    comptime kind = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    comptime start = "wgmma.mma_async.sync.aligned.m64n"
    comptime end = ", 1, 1, 1, 1;" if turned else ", 1, 1, 1, 0;"
    var sums = StaticTuple[Float32, count](fill=0)
    # fmt: off
    comptime assert count % 16 == 0 and count <= 64, "wgmma: registers by 32, 64, 96 or 128 columns"
    comptime if count == 16:
        var r = inlined_assembly[
            start + "32k16.f32." + kind + " {" + _numbered[16]("$") + "}, {$16, $17, $18, $19}, $20" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 16 + "r,r,r,r,l," + _numbered[16]("") + ",~{memory}",
        ](
            a[0], a[1], a[2], a[3], b,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
        )
        comptime for i in range(16):
            sums[i] = r[i]
    elif count == 32:
        var r = inlined_assembly[
            start + "64k16.f32." + kind + " {" + _numbered[32]("$") + "}, {$32, $33, $34, $35}, $36" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 32 + "r,r,r,r,l," + _numbered[32]("") + ",~{memory}",
        ](
            a[0], a[1], a[2], a[3], b,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
        )
        comptime for i in range(32):
            sums[i] = r[i]
    elif count == 48:
        var r = inlined_assembly[
            start + "96k16.f32." + kind + " {" + _numbered[48]("$") + "}, {$48, $49, $50, $51}, $52" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 48 + "r,r,r,r,l," + _numbered[48]("") + ",~{memory}",
        ](
            a[0], a[1], a[2], a[3], b,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
        )
        comptime for i in range(48):
            sums[i] = r[i]
    elif count == 64:
        var r = inlined_assembly[
            start + "128k16.f32." + kind + " {" + _numbered[64]("$") + "}, {$64, $65, $66, $67}, $68" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 64 + "r,r,r,r,l," + _numbered[64]("") + ",~{memory}",
        ](
            a[0], a[1], a[2], a[3], b,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
            acc[48], acc[49], acc[50], acc[51], acc[52], acc[53], acc[54], acc[55],
            acc[56], acc[57], acc[58], acc[59], acc[60], acc[61], acc[62], acc[63],
        )
        comptime for i in range(64):
            sums[i] = r[i]
    # fmt: on
    return sums


@always_inline
def mma_sparse[
    dtype: DType, columns: Int
](
    a: UInt32,
    b: Matrix,
    indices: UInt32,
    sums: StaticTuple[Float32, columns // 2],
) -> StaticTuple[
    Float32, columns // 2
]:
    """Starts adding A[64, K] B[K, columns], both in shared memory, A 2:4 sparse, K 128 bytes of B.

    Parameters:
        dtype: Either bfloat16 or float16.
        columns: N: 96, 192, 208 or 224.

    Args:
        a: Address of the two of each four numbers of A, in core matrices: 64 rows of 16 bytes, and
            the next 16 bytes of K behind them.
        b: B, column by column.
        indices: Which two they are, for eight fours; even pairs of threads hold those of the first
            half of K, odd ones those of the second.
        sums: What the products are added to.

    Returns:
        The sums, once the group has been waited for.
    """
    comptime CORES = 16 * ROWS
    var values = Matrix[16](a, pitch=CORES)
    var total = sums
    comptime for k in range(2):
        total = _mma_sparse[dtype, columns, k == 1](
            values.after(2 * k * CORES), b.after(k * 64), indices, total
        )
    return total


@always_inline
def _mma_sparse[
    dtype: DType, columns: Int, second: Bool
](a: Int64, b: Int64, indices: UInt32, acc: StaticTuple[Float32, columns // 2]) -> StaticTuple[
    Float32, columns // 2
]:
    """Starts adding a 64 x 32 by 32 x columns product; `second` where odd pairs hold the indices."""
    comptime COUNT = columns // 2
    comptime kind = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    comptime start = "wgmma.mma_async.sp.sync.aligned.m64n"
    comptime end = ", 1, 1, 1, 1, 0, 0;" if second else ", 0, 1, 1, 1, 0, 0;"
    var sums = StaticTuple[Float32, COUNT](fill=0)
    # fmt: off
    comptime assert (
        columns == 96 or columns == 192 or columns == 208 or columns == 224
    ), "mma_sparse: columns must be 96, 192, 208 or 224"
    comptime if columns == 96:
        var r = inlined_assembly[
            start + "96k32.f32." + kind + " {" + _numbered[48]("$") + "}, $48, $49, $50" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 48 + "l,l,r," + _numbered[48]("") + ",~{memory}",
        ](
            a, b, indices,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
        )
        comptime for i in range(48):
            sums[i] = r[i]
    elif columns == 192:
        var r = inlined_assembly[
            start + "192k32.f32." + kind + " {" + _numbered[96]("$") + "}, $96, $97, $98" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 96 + "l,l,r," + _numbered[96]("") + ",~{memory}",
        ](
            a, b, indices,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
            acc[48], acc[49], acc[50], acc[51], acc[52], acc[53], acc[54], acc[55],
            acc[56], acc[57], acc[58], acc[59], acc[60], acc[61], acc[62], acc[63],
            acc[64], acc[65], acc[66], acc[67], acc[68], acc[69], acc[70], acc[71],
            acc[72], acc[73], acc[74], acc[75], acc[76], acc[77], acc[78], acc[79],
            acc[80], acc[81], acc[82], acc[83], acc[84], acc[85], acc[86], acc[87],
            acc[88], acc[89], acc[90], acc[91], acc[92], acc[93], acc[94], acc[95],
        )
        comptime for i in range(96):
            sums[i] = r[i]
    elif columns == 208:
        var r = inlined_assembly[
            start + "208k32.f32." + kind + " {" + _numbered[104]("$") + "}, $104, $105, $106" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 104 + "l,l,r," + _numbered[104]("") + ",~{memory}",
        ](
            a, b, indices,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
            acc[48], acc[49], acc[50], acc[51], acc[52], acc[53], acc[54], acc[55],
            acc[56], acc[57], acc[58], acc[59], acc[60], acc[61], acc[62], acc[63],
            acc[64], acc[65], acc[66], acc[67], acc[68], acc[69], acc[70], acc[71],
            acc[72], acc[73], acc[74], acc[75], acc[76], acc[77], acc[78], acc[79],
            acc[80], acc[81], acc[82], acc[83], acc[84], acc[85], acc[86], acc[87],
            acc[88], acc[89], acc[90], acc[91], acc[92], acc[93], acc[94], acc[95],
            acc[96], acc[97], acc[98], acc[99], acc[100], acc[101], acc[102], acc[103],
        )
        comptime for i in range(104):
            sums[i] = r[i]
    elif columns == 224:
        var r = inlined_assembly[
            start + "224k32.f32." + kind + " {" + _numbered[112]("$") + "}, $112, $113, $114" + end,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints="=f," * 112 + "l,l,r," + _numbered[112]("") + ",~{memory}",
        ](
            a, b, indices,
            acc[0], acc[1], acc[2], acc[3], acc[4], acc[5], acc[6], acc[7],
            acc[8], acc[9], acc[10], acc[11], acc[12], acc[13], acc[14], acc[15],
            acc[16], acc[17], acc[18], acc[19], acc[20], acc[21], acc[22], acc[23],
            acc[24], acc[25], acc[26], acc[27], acc[28], acc[29], acc[30], acc[31],
            acc[32], acc[33], acc[34], acc[35], acc[36], acc[37], acc[38], acc[39],
            acc[40], acc[41], acc[42], acc[43], acc[44], acc[45], acc[46], acc[47],
            acc[48], acc[49], acc[50], acc[51], acc[52], acc[53], acc[54], acc[55],
            acc[56], acc[57], acc[58], acc[59], acc[60], acc[61], acc[62], acc[63],
            acc[64], acc[65], acc[66], acc[67], acc[68], acc[69], acc[70], acc[71],
            acc[72], acc[73], acc[74], acc[75], acc[76], acc[77], acc[78], acc[79],
            acc[80], acc[81], acc[82], acc[83], acc[84], acc[85], acc[86], acc[87],
            acc[88], acc[89], acc[90], acc[91], acc[92], acc[93], acc[94], acc[95],
            acc[96], acc[97], acc[98], acc[99], acc[100], acc[101], acc[102], acc[103],
            acc[104], acc[105], acc[106], acc[107], acc[108], acc[109], acc[110], acc[111],
        )
        comptime for i in range(112):
            sums[i] = r[i]
    # fmt: on
    return sums


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
