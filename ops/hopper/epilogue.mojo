"""How a tile's sums become the result: y = act(alpha * sum + bias + residual), or with scales.

Sums leave in rows of 128 bytes in shared memory, swizzled, which the copy engine stores. What lies there before is
the residual, and is overwritten.

    EpilogueTensors       bias, scales and all else that the copy engine does not bring
    finish_rows           where rows of the product are rows of the result
    finish_columns        where they are its columns, as when filters are the left side of a convolution
    finish_byte_columns   the same of results of 8 bits
    finish_boxes          where the residual alone is added

direct_store.mojo has what leaves the registers straight for the result, cluster.mojo what blocks that share a tile
do first.
"""

from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Channels, Epilogue, apply
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, Operands, Scales, narrowed, widened
from .accumulator import Fragment, Sums, load_16x16, pair, quad, store_16x16, sums_16x16
from .moments import Norm, RowNorm
from .pipeline import Pipeline
from .ptx import (
    shared_load,
    shared_load2,
    shared_load_float,
    shared_load_matrices,
    shared_store,
    shared_store2,
    shared_store_float,
    shared_store_matrices,
)
from .shared import ROW, swizzle
from .store import sync_writes


struct EpilogueTensors[dtype: DType, epilogue: Epilogue = Epilogue("none"), products: Int = 1](
    KernelArgument, TrivialRegisterPassable
):
    """What an epilogue reads and writes without the copy engine, product by product.

    Parameters:
        dtype: Of the residual and y.
        epilogue: Tells whether there are scales, and whether moments of rows are read or written.
        products: Products of the launch.
    """

    comptime SCALES = Self.products if Self.epilogue.scales else 0
    """How many scales there are: kernels without them receive none."""
    comptime NORMS = 1 if Self.epilogue.normed() else 0
    """How many norms there are, likewise."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bias: StaticTuple[Data[F32], Self.products]
    """[F]."""
    var bias2: StaticTuple[Data[F32], Self.products]
    """[F], the bias of a second source; any pointer if there is none."""
    var residual: StaticTuple[Data[Self.dtype], Self.products]
    """[M, F]."""
    var y: StaticTuple[Data[Self.dtype], Self.products]
    """[M, F]."""
    var scales: StaticTuple[Scales, Self.SCALES]
    """[F], and of the residual."""
    var norm: StaticTuple[Norm, Self.NORMS]
    """Moments of the rows of x, or of y."""

    def __init__[
        factors: DType, right: DType, //
    ](
        out self,
        o: Array[Operands[factors, Self.dtype, right], Self.products],
        *,
        scales: Optional[Array[Scales, Self.products]] = None,
        norm: Optional[Norm] = None,
    ) raises:
        """Takes them from the operands.

        Parameters:
            factors: Of x.
            right: Of w.

        Args:
            o: The tensors.
            scales: Of the sums and the residual of each product, if the epilogue scales.
            norm: Moments of the rows of x, or of y, if the epilogue normalises or measures.

        Raises:
            If a residual is added of which another integer than 0 stands for 0.
        """
        self = Self(o[0].bias, o[0].bias, o[0].residual, o[0].y)
        comptime for i in range(1, Self.products):
            self.bias[i], self.residual[i], self.y[i] = o[i].bias, o[i].residual, o[i].y
        comptime if Self.epilogue.scales:
            comptime for i in range(Self.products):
                self.scales[i] = scales.value()[i]
                if Self.epilogue.joins and self.scales[i].residual.zero != 0:
                    raise Error("gemm: the integer 0 of the residual has to stand for 0")
        comptime if Self.epilogue.normed():
            self.norm[0] = norm.value()

    @always_inline
    def __init__(
        out self,
        bias: Data[F32],
        bias2: Data[F32],
        residual: Data[Self.dtype],
        y: Data[Self.dtype],
    ):
        """Names the tensors of one product.

        Args:
            bias: [F].
            bias2: [F], of a second source.
            residual: [M, F].
            y: [M, F].
        """
        self.bias = StaticTuple[Data[F32], Self.products](fill=bias)
        self.bias2 = StaticTuple[Data[F32], Self.products](fill=bias2)
        self.residual = StaticTuple[Data[Self.dtype], Self.products](fill=residual)
        self.y = StaticTuple[Data[Self.dtype], Self.products](fill=y)
        self.scales = StaticTuple[Scales, Self.SCALES](fill=Scales(bias))
        self.norm = StaticTuple[Norm, Self.NORMS](fill=Norm(bias, 0))

    @always_inline
    def of(self, product: Int32) -> EpilogueTensors[Self.dtype, Self.epilogue]:
        """Chooses a product's.

        Args:
            product: Its number.

        Returns:
            Its tensors.
        """
        comptime One = EpilogueTensors[Self.dtype, Self.epilogue]
        comptime assert (
            Self.products == 1 or not Self.epilogue.normed()
        ), "EpilogueTensors: one product is normed"
        var one = One(self.bias[0], self.bias2[0], self.residual[0], self.y[0])
        comptime if Self.epilogue.normed():
            one.norm[0] = self.norm[0]
        comptime if Self.epilogue.scales:
            one.scales[0] = self.scales[0]
        comptime for i in range(1, Self.products):
            if product == Int32(i):
                one = One(self.bias[i], self.bias2[i], self.residual[i], self.y[i])
                comptime if Self.epilogue.scales:
                    one.scales[0] = self.scales[i]
        return one

    @always_inline
    def channels[
        width: SIMDLength, sources: Int = 1
    ](self, alpha: Float32, f: Int32) -> Channels[width]:
        """Loads what belongs to neighbouring filters of the first product.

        Parameters:
            width: Filters.
            sources: 2 if there is a second bias to be added.

        Args:
            alpha: Scale of all of them, unless there are scales.
            f: The first filter, a multiple of `width`.

        Returns:
            Scale and bias.
        """
        var of = Channels[width](alpha, self.bias_of[width, sources](f))
        comptime if Self.epilogue.scales:
            comptime align = min(16, 4 * Int(width))
            of.scale = self.scales[0].product.unsafe_load[width=width, alignment=align](Int(f))
        return of

    @always_inline
    def residual_scale(self) -> Float32:
        """Finds the scale of the first product's residual.

        Returns:
            1 unless there are scales.
        """
        comptime if Self.epilogue.scales:
            return self.scales[0].residual.scale
        else:
            return 1

    @always_inline
    def rounded[width: SIMDLength, //](self, y: SIMD[F32, width]) -> SIMD[Self.dtype, width]:
        """Rounds results of the first product to what is stored.

        Parameters:
            width: How many.

        Args:
            y: The results.

        Returns:
            The nearest; if the epilogue rescales, to what they are in steps of y.
        """
        comptime if Self.epilogue.rescales[Self.dtype]():
            return self.scales[0].result.rounded[Self.dtype](y)
        else:
            return narrowed[Self.dtype](y)

    @always_inline
    def bias_of[width: SIMDLength, sources: Int = 1](self, f: Int32) -> SIMD[F32, width]:
        """Loads the bias of neighbouring filters of the first product.

        Parameters:
            width: Filters.
            sources: 2 if there is a second bias to be added.

        Args:
            f: The first filter, a multiple of `width`.

        Returns:
            Of each filter.
        """
        comptime align = min(16, 4 * Int(width))
        var bias = self.bias[0].unsafe_load[width=width, alignment=align](Int(f))
        comptime if sources == 2:
            bias += self.bias2[0].unsafe_load[width=width, alignment=align](Int(f))
        return bias

    @always_inline
    def row_channels(self, at: Fragment, first: Int32, limit: Int32) -> Channels[2]:
        """Loads what belongs to a thread's rows of the first product, filters in quads.

        Args:
            at: The thread's place.
            first: The warpgroup's first row.
            limit: Rows of the product; scale and bias of others are 0.

        Returns:
            Of the thread's two rows, which are neighbouring filters.
        """
        var f = first + at.warp() * 16 + at.lane() // 4 * 2
        return self.channels[2](1, f) if f < limit else Channels[2](0, 0)

    @always_inline
    def row_biases(self, at: Fragment, first: Int32, limit: Int32) -> SIMD[F32, 2]:
        """Loads the bias of a thread's rows of the first product, where filters are the left side.

        Args:
            at: The thread's place.
            first: The warpgroup's first row.
            limit: Rows of the product; the bias of others is 0.

        Returns:
            Of the thread's two rows.
        """
        var biases = SIMD[F32, 2](0)
        comptime for half in range(2):
            var f = first + at.row() + Int32(8 * half)
            if f < limit:
                biases[half] = self.bias_of[1](f)[0]
        return biases


@always_inline
def finish_rows[
    sum: DType,
    dtype: DType,
    epilogue: Epilogue,
    //,
    columns: Int,
    *,
    first: Int = 0,
    pitch: Int,
    sources: Int = 1,
    by_row: Bool = False,
    bytes: Int = ROW,
](
    to: UInt32,
    at: Fragment,
    sums: StaticTuple[Scalar[sum], _],
    alpha: Float32,
    tensors: EpilogueTensors[dtype, epilogue, 1],
    f0: Int32,
    f: Int32,
    *,
    norm: RowNorm = RowNorm(0, 0),
):
    """Finishes 64 rows x `columns` columns in shared memory, boxes of 64 rows of 128 bytes, or 64.

    Of results of 8 bits the columns are in quads.

    Parameters:
        sum: Of the sums.
        dtype: Of the residual and the result.
        epilogue: What the sums go through.
        columns: How many, a multiple of a row's.
        first: The first of the sums' columns, a multiple of 8.
        pitch: Bytes from a box to the next.
        sources: 2 if there is a second bias.
        by_row: Whether filters are the rows, each with a bias; else they are the columns.
        bytes: Of a box's row.

    Args:
        to: The first box; it holds the residual, and then the result.
        at: The thread's place.
        sums: Of the thread.
        alpha: Scale of the product.
        tensors: Have the bias, and the scales.
        f0: The first filter.
        f: Filters of the result; the bias of others is not read.
        norm: Of the thread's two rows, if the epilogue normalises.
    """
    comptime assert not (by_row and epilogue.scales), "finish_rows: columns have scales, not rows"
    comptime assert size_of[dtype]() > 1 or not by_row, "finish_rows: quads are columns"
    comptime WIDTH = bytes // size_of[dtype]()
    comptime COUNT = 4 if size_of[dtype]() == 1 else 2
    comptime EACH = 4 * COUNT
    comptime assert columns % WIDTH == 0, "finish_rows: rows of boxes are whole"
    comptime assert (
        first % EACH == 0
    ), "finish_rows: columns begin with eight, or with a quad of each"
    var biases = SIMD[F32, 2](0)
    comptime if by_row:
        biases = tensors.row_biases(at, f0, f)
    var mine = at.column() * Int32(COUNT // 2)
    comptime for j in range(columns // EACH):
        comptime column = EACH * j
        var of = Channels[COUNT](alpha, 0)
        comptime if epilogue.scales:
            # Of columns behind the last filter anything is right; a branch would hold loads up.
            of = tensors.channels[COUNT, sources](
                alpha, min(f0 + Int32(column) + mine, f - Int32(COUNT))
            )
        elif not by_row:
            if f0 + Int32(column) + mine < f:
                of = tensors.channels[COUNT, sources](alpha, f0 + Int32(column) + mine)
        comptime for half in range(2):
            comptime if by_row:
                of.bias = SIMD[F32, COUNT](biases[half])
            comptime if epilogue.normalizes:
                of.scale = SIMD[F32, COUNT](norm.scale[half])
            var row = UInt32(at.row()) + UInt32(8 * half)
            var byte = (UInt32(column % WIDTH) + UInt32(mine)) * UInt32(size_of[dtype]())
            var place = to + UInt32(column // WIDTH * pitch) + row * UInt32(bytes)
            # Rows 8 further on are swizzled alike.
            place += swizzle[bytes](byte, UInt32(at.row()))
            var residual = SIMD[F32, COUNT](0)
            comptime if epilogue.joins:
                residual = _load[dtype, COUNT](place)
            var sum = _sums[COUNT, first // EACH + j, half](sums)
            var y = apply[epilogue, dtype](sum, of, residual, tensors.residual_scale())
            _store(place, tensors.rounded(y))


@always_inline
def _sums[
    dtype: DType, all: Int, //, count: Int, j: Int, half: Int
](sums: StaticTuple[Scalar[dtype], all]) -> SIMD[F32, count]:
    """Takes the sums of neighbours: a pair, or four that are in quads."""
    comptime if count == 4:
        return rebind[SIMD[F32, count]](quad[j, half](sums))
    else:
        return rebind[SIMD[F32, count]](pair[j, half](sums))


@always_inline
def _load[dtype: DType, count: Int](at: UInt32) -> SIMD[F32, count]:
    """Loads 4 bytes of numbers from shared memory, or two of float32."""
    comptime if size_of[dtype]() == 4:
        return rebind[SIMD[F32, count]](shared_load2(at))
    else:
        return bitcast[dtype, count](shared_load(at)).cast[F32]()


@always_inline
def _store(at: UInt32, numbers: SIMD):
    """Stores 4 bytes of numbers in shared memory, or two of float32."""
    comptime if size_of[numbers.dtype]() == 4:
        shared_store2(at, numbers[0].cast[F32](), numbers[1].cast[F32]())
    else:
        shared_store(at, bitcast[DType.uint32, 1](numbers))


@always_inline
def finish_columns[
    sum: DType, //, dtype: DType, epilogue: Epilogue, columns: Int, first: Int
](to: UInt32, at: Fragment, sums: StaticTuple[Scalar[sum], _], alpha: Float32, bias: SIMD[F32, 2]):
    """Finishes `columns` columns of 64 rows, turned over: a column becomes a row of shared memory.

    Parameters:
        sum: Of the sums.
        dtype: Of the residual and the result: of 16 bits, when the columns are rows of 128 bytes, or
            float32, when the warps' halves have boxes of their own.
        epilogue: What the sums go through.
        columns: How many, a multiple of 16.
        first: The first of the sums' columns, a multiple of 8.

    Args:
        to: The first box; it holds the residual, and then the result.
        at: The thread's place.
        sums: Of the thread.
        alpha: Scale of the product.
        bias: Of the thread's two rows.
    """
    comptime assert columns % 16 == 0 and first % 8 == 0, "finish_columns: sixteens of columns"
    comptime assert size_of[dtype]() > 1, "finish_columns: 8 bits are finish_byte_columns'"
    comptime assert not epilogue.scales, "finish_columns: no scales"
    comptime if size_of[dtype]() == 2:
        # Eight lanes name the rows of a matrix of stmatrix: 8 columns, 16 bytes of 8 rows.
        var lane = UInt32(at.lane())
        var byte = UInt32(at.warp() * 32) + lane // 8 % 2 * 16
        var mine = to + (lane // 16 * 8 + lane % 8) * UInt32(ROW) + swizzle(byte, lane)
        comptime for j in range(columns // 16):
            var place = mine + UInt32(j * 16 * ROW)
            var bits = SIMD[DType.uint32, 4](0)
            comptime if epilogue.joins:
                bits = shared_load_matrices[turned=True](place)
            comptime for i in range(4):
                var residual = SIMD[F32, 2](0)
                comptime if epilogue.joins:
                    residual = widened(bitcast[dtype, 2](bits[i]))
                var two = pair[first // 8 + 2 * j + i // 2, i % 2](sums)
                var y = apply[epilogue, dtype](two, Channels[2](alpha, bias[i % 2]), residual)
                bits[i] = bitcast[DType.uint32, 1](y.cast[dtype]())
            shared_store_matrices[turned=True](place, bits)
    else:
        var box = to + UInt32(at.warp() // 2 * Int32(columns * ROW))
        var byte = UInt32(at.warp() % 2 * 64 + at.lane() // 4 * 4)
        comptime for j in range(columns // 8):
            comptime for e in range(4):
                var column = UInt32(at.column()) + UInt32(e % 2)
                var place = box + (column + UInt32(8 * j)) * UInt32(ROW)
                place += swizzle(byte + UInt32(e // 2 * 32), column)
                var residual = Float32(0)
                comptime if epilogue.joins:
                    residual = shared_load_float(place)
                var one = sums[first // 2 + 4 * j + e].cast[F32]()
                shared_store_float(
                    place, apply[epilogue, dtype](one, Channels[1](alpha, bias[e // 2]), residual)
                )


@always_inline
def finish_byte_columns[
    sum: DType, dtype: DType, epilogue: Epilogue, //, columns: Int
](
    to: UInt32,
    at: Fragment,
    sums: StaticTuple[Scalar[sum], _],
    of: Channels[2],
    tensors: EpilogueTensors[dtype, epilogue, 1],
):
    """Finishes `columns` columns of 64 rows, turned over: each becomes 64 bytes of shared memory.

    The rows are filters in quads. Two neighbours are moved as one number of 16 bits.

    Parameters:
        sum: Of the sums.
        dtype: Of the residual and the result, of 8 bits.
        epilogue: What the sums go through.
        columns: How many, a multiple of 32.

    Args:
        to: The first row, of 64 bytes, swizzled; it holds the residual, and then the result.
        at: The thread's place.
        sums: Of the thread.
        of: Scale and bias of the thread's two rows.
        tensors: Have the scales of the residual and the result.
    """
    comptime assert size_of[dtype]() == 1, "finish_byte_columns: numbers have 8 bits"
    comptime assert columns % 32 == 0, "finish_byte_columns: a lane has a row of each 32"
    comptime BYTES = ROW // 2
    var lane = UInt32(at.lane())
    var mine = to + lane * UInt32(BYTES) + swizzle[BYTES](UInt32(at.warp() * 16), lane)
    var both = Channels[4](of.scale.join(of.scale), of.bias.join(of.bias))
    comptime for j in range(columns // 32):
        var place = mine + UInt32(j * 32 * BYTES)
        var bits = SIMD[DType.uint32, 4](0)
        comptime if epilogue.joins:
            bits = shared_load_matrices[turned=True](place)
        comptime for i in range(4):
            var residual = SIMD[F32, 4](0)
            comptime if epilogue.joins:
                residual = bitcast[dtype, 4](bits[i]).cast[F32]()
            var four = pair[4 * j + i, 0](sums).interleave(pair[4 * j + i, 1](sums))
            var y = apply[epilogue, dtype](four, both, residual, tensors.residual_scale())
            bits[i] = bitcast[DType.uint32, 1](tensors.rounded(y))
        shared_store_matrices[turned=True](place, bits)


@always_inline
def finish_boxes[
    dtype: DType, boxes: Int
](at_start: Pipeline, step: UInt32, at: Fragment, sums: Sums[_], *, barrier: UInt32) -> Array[
    SIMD[dtype, 8], 4 * boxes
]:
    """Adds a residual of 16 bits to 64 rows of sums, and leaves results in its place.

    They may be stored from there at once. One stage of a ring has 64 columns.

    Parameters:
        dtype: Of the residual and the results.
        boxes: Stages.

    Args:
        at_start: The first stage; the residual need not have come.
        step: From one of the stages to the next.
        at: The thread's place.
        sums: Of the thread, bias included.
        barrier: One at which the warpgroup meets.

    Returns:
        The thread's results, in sixteens of columns, as `sums_16x16` takes them.
    """
    comptime assert sums.size == 32 * boxes, "finish_boxes: a box has 64 columns"
    var tiles = at_start
    var results = Array[SIMD[dtype, 8], 4 * boxes](fill=0)
    comptime for box in range(boxes):
        tiles.wait()
        comptime for k in range(4):
            results[4 * box + k] = load_16x16[dtype, k](tiles.stage(), at)
        tiles.advance(step)
    tiles = at_start
    comptime for box in range(boxes):
        comptime for k in range(4):
            comptime i = 4 * box + k
            results[i] = (sums_16x16[i](sums) + widened(results[i])).cast[dtype]()
            store_16x16[k](tiles.stage(), at, results[i])
        tiles.advance(step)
    sync_writes(barrier)
    return results^
