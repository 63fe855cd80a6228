"""How a tile's sums become the result: y = act(alpha * sum + bias + residual), or with scales.

Sums leave in rows of 128 bytes in shared memory, swizzled, which the copy engine stores:
`finish_rows` where rows of the product are rows of the result, `finish_columns` where they are its
columns, as when filters are the left side of a convolution. What lies there before is the residual, and is
overwritten. Where a cluster shares a tile, `leave_rows` or `leave_columns` leaves each block's sums
in its shared memory, and `reduce_cluster` adds them up and finishes them.

Or they leave the registers straight for the result, pair by pair (`Outputs`, `finish_pairs`), or 8
numbers a thread at a time (`store_rows`): more instructions, but none waits for shared memory or the
copy engine, as suits one small tile a block. `pool_pairs` stores the mean of the tile's rows in place of these.
"""

from max.gpu import thread_idx
from max.gpu.primitives import warp
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Channels, Epilogue, apply
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, Operands, Scales, narrowed, stored, widened
from .accumulator import Fragment, Sums, load_16x16, pair, quad, store_16x16, sums_16x16
from .moments import GROUP, Norm, RowNorm, RowSums
from .pipeline import Pipeline
from .ptx import (
    cluster_load4,
    cluster_sync,
    fence_async,
    shared_load,
    shared_load2,
    shared_load_float,
    shared_load_matrices,
    shared_store,
    shared_store2,
    shared_store_float,
    shared_store_matrices,
    sync_threads,
)
from .scheduler import Share, Start
from .shared import ROW, WARP, WARPGROUP, swizzle


struct EpilogueTensors[dtype: DType, products: Int = 1, scaled: Bool = False, normed: Bool = False](
    KernelArgument, TrivialRegisterPassable
):
    """What an epilogue reads and writes without the copy engine, product by product.

    Parameters:
        dtype: Of the residual and y.
        products: Products of the launch.
        scaled: Whether there are scales.
        normed: Whether moments of rows are read or written; of one product.
    """

    comptime SCALES = Self.products if Self.scaled else 0
    """How many scales there are: kernels without them receive none."""
    comptime NORMS = 1 if Self.normed else 0
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
    ](out self, o: Array[Operands[factors, Self.dtype, right], Self.products]):
        """Takes them from the operands; scales and norm are set later.

        Parameters:
            factors: Of x.
            right: Of w.

        Args:
            o: The tensors.
        """
        self.scales = StaticTuple[Scales, Self.SCALES](fill=Scales(o[0].bias))
        self.norm = StaticTuple[Norm, Self.NORMS](fill=Norm(o[0].bias, 0))
        self.bias = StaticTuple[Data[F32], Self.products](fill=o[0].bias)
        self.bias2 = self.bias
        self.residual = StaticTuple[Data[Self.dtype], Self.products](fill=o[0].residual)
        self.y = StaticTuple[Data[Self.dtype], Self.products](fill=o[0].y)
        comptime for i in range(1, Self.products):
            self.bias[i], self.residual[i], self.y[i] = o[i].bias, o[i].residual, o[i].y

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
    def of(self, product: Int32) -> EpilogueTensors[Self.dtype, 1, Self.scaled, Self.normed]:
        """Chooses a product's.

        Args:
            product: Its number.

        Returns:
            Its tensors.
        """
        comptime One = EpilogueTensors[Self.dtype, 1, Self.scaled, Self.normed]
        comptime assert (
            Self.products == 1 or not Self.normed
        ), "EpilogueTensors: one product is normed"
        var one = One(self.bias[0], self.bias2[0], self.residual[0], self.y[0])
        comptime if Self.normed:
            one.norm[0] = self.norm[0]
        comptime if Self.scaled:
            one.scales[0] = self.scales[0]
        comptime for i in range(1, Self.products):
            if product == Int32(i):
                one = One(self.bias[i], self.bias2[i], self.residual[i], self.y[i])
                comptime if Self.scaled:
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
        comptime if Self.scaled:
            comptime align = min(16, 4 * Int(width))
            of.scale = self.scales[0].product.unsafe_load[width=width, alignment=align](Int(f))
        return of

    @always_inline
    def residual_scale(self) -> Float32:
        """Finds the scale of the first product's residual.

        Returns:
            1 unless there are scales.
        """
        comptime if Self.scaled:
            return self.scales[0].residual.scale
        else:
            return 1

    @always_inline
    def rounded[
        width: SIMDLength, //, epilogue: Epilogue
    ](self, y: SIMD[F32, width]) -> SIMD[Self.dtype, width]:
        """Rounds results of the first product to what is stored.

        Parameters:
            width: How many.
            epilogue: What gave them.

        Args:
            y: The results.

        Returns:
            The nearest; if the epilogue rescales, to what they are in steps of y.
        """
        comptime if epilogue.rescales[Self.dtype]():
            var result = self.scales[0].result
            return stored[Self.dtype](y * (1 / result.scale), result.zero)
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
    //,
    dtype: DType,
    epilogue: Epilogue,
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
    tensors: EpilogueTensors[dtype, 1, _, _],
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
    comptime assert tensors.scaled == epilogue.scales, "finish_rows: the scales of the epilogue"
    comptime assert tensors.normed == epilogue.normed(), "finish_rows: the norm of the epilogue"
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
            _store(place, tensors.rounded[epilogue](y))


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
    sum: DType, //, dtype: DType, epilogue: Epilogue, columns: Int
](
    to: UInt32,
    at: Fragment,
    sums: StaticTuple[Scalar[sum], _],
    of: Channels[2],
    tensors: EpilogueTensors[dtype, 1, _, _],
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
    comptime assert (
        tensors.scaled == epilogue.scales
    ), "finish_byte_columns: the scales of the epilogue"
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
            bits[i] = bitcast[DType.uint32, 1](tensors.rounded[epilogue](y))
        shared_store_matrices[turned=True](place, bits)


comptime PAD = 8
"""Numbers that follow a row of sums in shared memory, so that rows begin in different banks."""


@always_inline
def leave_rows[
    dtype: DType, //, columns: Int, quads: Bool = False
](data: UInt32, at: Fragment, sums: StaticTuple[Scalar[dtype], columns // 2]):
    """Stores 64 rows of sums in shared memory, as `reduce_cluster` reads them: as float32.

    Parameters:
        dtype: Of the sums.
        columns: Of the product.
        quads: Whether the columns are in quads.

    Args:
        data: Where to.
        at: The thread's place.
        sums: Of the thread.
    """
    comptime PITCH = (columns + PAD) * 4
    var to = data + UInt32(at.row()) * UInt32(PITCH)
    to += UInt32(at.column()) * UInt32(8 if quads else 4)
    comptime for j in range(columns // 8):
        comptime for half in range(2):
            comptime byte = j // 2 * 64 + j % 2 * 8 if quads else j * 32
            var v = pair[j, half](sums)
            comptime if quads:
                v = quad[j // 2, half](sums).slice[2, offset=j % 2 * 2]()
            shared_store2(to + UInt32(half * 8 * PITCH + byte), v[0], v[1])


@always_inline
def leave_columns[
    dtype: DType, //, rows: Int, columns: Int
](data: UInt32, at: Fragment, sums: StaticTuple[Scalar[dtype], columns // 2]):
    """Stores the sums of 64 rows of each warpgroup turned over, as `reduce_cluster` reads them.

    Parameters:
        dtype: Of the sums.
        rows: Of the product, of all warpgroups: columns of what is stored.
        columns: Of the product.

    Args:
        data: Where to.
        at: The thread's place.
        sums: Of the thread.
    """
    comptime PITCH = (rows + PAD // 2) * 4
    var row = at.group() * 64 + at.row()
    var to = data + UInt32(at.column() * Int32(PITCH) + row * 4)
    comptime for j in range(columns // 8):
        comptime for e in range(4):
            shared_store_float(
                to + UInt32((8 * j + e % 2) * PITCH + e // 2 * 32), sums[4 * j + e].cast[F32]()
            )


@always_inline
def reduce_cluster[
    dtype: DType,
    epilogue: Epilogue,
    *,
    rows: Int,
    columns: Int,
    pad: Int,
    threads: Int,
    sources: Int = 1,
](
    tensors: EpilogueTensors[dtype, 1, _, _],
    data: UInt32,
    start: Start,
    splits: Int32,
    *,
    m0: Int32,
    m: Int32,
    f0: Int32,
    f: Int32,
    alpha: Float32,
):
    """Adds up a cluster's sums: each block some rows of the tile, 8 columns a thread at a time.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        rows: Of the tile.
        columns: Of the tile.
        pad: Numbers that follow a row of sums.
        threads: Of a block; all of them call this.
        sources: 2 if there is a second bias.

    Args:
        tensors: Of the tile's product.
        data: Where each block has left its sums.
        start: Has the block's rank in the cluster.
        splits: How many blocks share the tile.
        m0: The tile's first row.
        m: Rows of the product.
        f0: The tile's first column.
        f: Columns of the product.
        alpha: Scale of the product.
    """
    comptime assert tensors.scaled == epilogue.scales, "reduce_cluster: the scales of the epilogue"
    comptime assert columns % 8 == 0, "reduce_cluster: a thread takes 8 columns"
    comptime ALIGN = min(16, 8 * size_of[dtype]())
    comptime PITCH = (columns + pad) * 4
    comptime EIGHTS = Int32(columns // 8)
    cluster_sync()
    var part = Int32(UInt32(rows) // UInt32(splits))
    for unit in range(Int32(thread_idx.x), part * EIGHTS, Int32(threads)):
        var row = start.rank * part + unit // EIGHTS
        var column = unit % EIGHTS * 8
        if m0 + row < m and f0 + column < f:
            var at = data + UInt32(row) * UInt32(PITCH) + UInt32(column) * 4
            var low = SIMD[F32, 4](0)
            var high = SIMD[F32, 4](0)
            for peer in range(splits):
                low += cluster_load4(at, UInt32(peer))
                high += cluster_load4(at + 16, UInt32(peer))
            var of = tensors.channels[8, sources](alpha, f0 + column)
            var to = Int(m0 + row) * Int(f) + Int(f0 + column)
            var residual = SIMD[F32, 8](0)
            comptime if epilogue.joins:
                residual = tensors.residual[0].unsafe_load[width=8, alignment=ALIGN](to).cast[F32]()
            var y = apply[epilogue, dtype](low.join(high), of, residual, tensors.residual_scale())
            tensors.y[0].unsafe_store[alignment=ALIGN](to, tensors.rounded[epilogue](y))
    cluster_sync()


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
    fence_async()
    sync_threads(barrier, UInt32(WARPGROUP))
    return results^


@always_inline
def store_rows[
    dtype: DType, columns: Int
](
    y: Data[dtype],
    at: Fragment,
    sums: StaticTuple[Float32, _],
    scale: SIMD[F32, 2],
    *,
    row: Int32,
    rows: Int32,
    column: Int32,
    pitch: Int32,
    zero: Float32 = 0,
):
    """Stores 64 rows of sums in global memory, 8 numbers a thread at a time.

    Of every 32 columns the four threads of a row hold 2 of each eight; they exchange them, so that
    each stores 8 neighbours: those of both rows at once if numbers have 8 bits.

    Parameters:
        dtype: Of the result, 16 bits or 8.
        columns: How many, a multiple of 32.

    Args:
        y: The result, a matrix.
        at: The thread's place.
        sums: Of the thread.
        scale: Of each of the thread's two rows.
        row: The first row of y.
        rows: How many rows are to be stored; all if 64 or more.
        column: The first column of y, a multiple of 8.
        pitch: Columns of y, a multiple of 8.
        zero: The integer that stands for 0; of floats none is.
    """
    comptime assert (
        size_of[dtype]() <= 2 and columns % 32 == 0
    ), "store_rows: 32 of 16 bits, or of 8"
    var b = at.t % 4
    comptime if size_of[dtype]() == 1:
        comptime for k in range(columns // 32):
            var r = SIMD[DType.uint32, 4](0)
            comptime for j in range(4):
                var low = pair[4 * k + j, 0](sums) * scale[0]
                var high = pair[4 * k + j, 1](sums) * scale[1]
                r[j] = bitcast[DType.uint32, 1](stored[dtype](low.join(high), zero))
            var eights = bitcast[DType.uint16, 8](_turned(r, b)).deinterleave()
            comptime for half in range(2):
                if at.row() + Int32(8 * half) < rows:
                    var to = (
                        Int(row + at.row() + Int32(8 * half)) * Int(pitch)
                        + Int(column)
                        + Int(32 * k)
                        + Int(8 * b)
                    )
                    y.unsafe_offset(to).unsafe_bitcast[UInt16]().unsafe_store[alignment=8](
                        0, eights[half]
                    )
        return
    comptime for half in range(2):
        comptime for k in range(columns // 32):
            var r = SIMD[DType.uint32, 4](0)
            comptime for j in range(4):
                var scaled = pair[4 * k + j, half](sums) * scale[half]
                r[j] = bitcast[DType.uint32, 1](scaled.cast[dtype]())
            r = _turned(r, b)
            if at.row() + Int32(8 * half) < rows:
                var to = (
                    Int(row + at.row() + Int32(8 * half)) * Int(pitch)
                    + Int(column)
                    + Int(32 * k)
                    + Int(8 * b)
                )
                y.unsafe_offset(to).unsafe_bitcast[UInt32]().unsafe_store[alignment=16](0, r)


@always_inline
def _turned(square: SIMD[DType.uint32, 4], b: Int32) -> SIMD[DType.uint32, 4]:
    """Turns over a 4 x 4 square: four neighbouring threads, this one the b-th, hold a row each."""
    var r = square
    var odd = b & 1 != 0
    var upper = b & 2 != 0
    comptime for j in range(0, 4, 2):
        var got = warp.shuffle_xor(r[j] if odd else r[j + 1], 1)
        if odd:
            r[j] = got
        else:
            r[j + 1] = got
    comptime for j in range(2):
        var got = warp.shuffle_xor(r[j] if upper else r[j + 2], 2)
        if upper:
            r[j] = got
        else:
            r[j + 2] = got
    return r


struct Outputs[count: Int](TrivialRegisterPassable):
    """Where in y[M, F] the pairs of sums belong that a thread stores straight from its registers.

    Parameters:
        count: Pairs at most.
    """

    var low: Int32
    """The pixel of the thread's first row; -1 if there is none."""
    var high: Int32
    """The pixel of its second row, likewise."""
    var f0: Int32
    """The tile's first filter."""
    var filters: Int32
    """F."""
    var column: Int32
    """The thread's first column."""
    var pairs: Share
    """Those that the thread stores, as accumulator.mojo numbers them."""

    @always_inline
    def __init__(
        out self,
        at: Fragment,
        *,
        low: Int32,
        high: Int32,
        f0: Int32,
        filters: Int32,
        pairs: Share,
    ):
        """Takes the thread's place.

        Args:
            at: The place.
            low: Pixel of its first row; -1 if there is none.
            high: Pixel of its second row, likewise.
            f0: The tile's first filter.
            filters: F.
            pairs: Those that the thread stores: all, or a block's part of those of a cluster.
        """
        self.low, self.high, self.f0, self.filters = low, high, f0, filters
        self.column, self.pairs = at.column(), pairs

    @always_inline
    def column_of(self, i: Int) -> Int32:
        """Finds the first column of a pair.

        Args:
            i: Which of those that the thread stores.

        Returns:
            In the tile.
        """
        return ((self.pairs.begin + Int32(i)) & ~1) * 4 + self.column

    @always_inline
    def is_high(self, i: Int) -> Bool:
        """Tells in which of the thread's two rows a pair is.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Whether it is in the second.
        """
        return (self.pairs.begin + Int32(i)) & 1 == 1

    @always_inline
    def pixel_of(self, i: Int) -> Int32:
        """Finds the pixel of a pair.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Its number; -1 if there is none.
        """
        return self.high if self.is_high(i) else self.low

    @always_inline
    def stores(self, i: Int) -> Bool:
        """Tells whether a pair is one of y.

        Args:
            i: Which, below `count`.

        Returns:
            False beyond its edges, and beyond the pairs that the thread stores.
        """
        return (
            Int32(i) < self.pairs.count()
            and self.pixel_of(i) >= 0
            and self.f0 + self.column_of(i) < self.filters
        )

    @always_inline
    def place(self, i: Int) -> Int:
        """Finds a pair in y.

        Args:
            i: Which of those that the thread stores.

        Returns:
            Where it begins.
        """
        return Int(self.pixel_of(i)) * Int(self.filters) + Int(self.f0 + self.column_of(i))

    @always_inline
    def load_residual[
        dtype: DType, epilogue: Epilogue
    ](self, tensors: EpilogueTensors[dtype, 1, _, _]) -> StaticTuple[SIMD[dtype, 2], Self.count]:
        """Reads the residual ahead: before its sums are there.

        Parameters:
            dtype: Of the residual.
            epilogue: What the sums go through; without a residual nothing is read.

        Args:
            tensors: Of the product.

        Returns:
            Of each pair.
        """
        var residual = StaticTuple[SIMD[dtype, 2], Self.count](fill=SIMD[dtype, 2](0))
        comptime if epilogue.joins:
            comptime for i in range(Self.count):
                if self.stores(i):
                    residual[i] = tensors.residual[0].unsafe_load[
                        width=2, alignment=2 * size_of[dtype]()
                    ](self.place(i))
        return residual


@always_inline
def finish_pairs[
    dtype: DType, epilogue: Epilogue, count: Int
](
    to: Outputs[count],
    at: Fragment,
    tensors: EpilogueTensors[dtype, 1, _, _],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: StaticTuple[SIMD[dtype, 2], count],
    norm: RowNorm,
):
    """Finishes pairs of sums and stores them in y.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        count: Pairs at most.

    Args:
        to: Where they belong.
        at: The thread's place.
        tensors: Of the product.
        sums: Of the pairs.
        alpha: Scale of the product.
        bias: Address in shared memory of the bias of the tile's first filter.
        residual: What `Outputs.load_residual` has read.
        norm: Of the thread's two rows, if the epilogue normalises.
    """
    comptime PAIRS = 2 * GROUP // 8
    """Pairs of a thread in a group of columns."""
    comptime assert (
        not epilogue.measures or count % PAIRS == 0
    ), "finish_pairs: moments are those of whole groups of columns"
    var group = StaticTuple[SIMD[dtype, 2], PAIRS](fill=SIMD[dtype, 2](0))
    var row_sums = RowSums()
    comptime for i in range(count):
        var stores = to.stores(i)
        if stores or epilogue.measures:  # whose threads meet
            var y = _finished[epilogue, i](to, sums, alpha, bias, residual[i], norm)
            if stores:
                tensors.y[0].unsafe_store[alignment=2 * size_of[dtype]()](to.place(i), y)
            comptime if epilogue.measures:
                group[i % PAIRS] = y
                comptime if i % PAIRS == PAIRS - 1:
                    comptime n = i // PAIRS
                    row_sums.add[n](
                        at,
                        group[0].join(group[1]).join(group[2].join(group[3])),
                        group[4].join(group[5]).join(group[6].join(group[7])),
                    )
                    comptime if n % 4 == 3 or i == count - 1:
                        # Rows that are not there are below 0.
                        row_sums.store[n](
                            tensors.norm[0],
                            at,
                            low=to.low,
                            high=to.high,
                            f0=to.f0 + to.column_of(0) - to.column,
                        )


@always_inline
def _finished[
    dtype: DType, //, epilogue: Epilogue, i: Int
](
    to: Outputs[_],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: SIMD[dtype, 2],
    norm: RowNorm,
) -> SIMD[dtype, 2]:
    """Takes a pair of sums through the epilogue, as `finish_pairs` names things."""
    var of = Channels[2](alpha, shared_load2(bias + 4 * UInt32(to.column_of(i))))
    comptime if epilogue.normalizes:
        of.scale = SIMD[F32, 2](norm.scale[1] if to.is_high(i) else norm.scale[0])
    return apply[epilogue, dtype](
        SIMD[F32, 2](sums[2 * i], sums[2 * i + 1]), of, residual.cast[F32]()
    ).cast[dtype]()


@always_inline
def pool_pairs[
    dtype: DType, epilogue: Epilogue, count: Int
](
    to: Outputs[count],
    at: Fragment,
    tensors: EpilogueTensors[dtype, 1, _, _],
    sums: StaticTuple[Float32, _],
    alpha: Float32,
    bias: UInt32,
    residual: StaticTuple[SIMD[dtype, 2], count],
    room: UInt32,
    rows: Int32,
):
    """Finishes pairs of sums, as `finish_pairs` does, and stores the mean of their rows: y[F].

    Each result is rounded to the dtype first, as if it were stored and read again. A warp adds up its 16 rows:
    at each of three steps its lanes halve both the rows and the columns that they have. Then the warps
    meet in shared memory. All threads of one warpgroup call this; it has all rows of the product.

    Parameters:
        dtype: Of the residual and y.
        epilogue: What the sums go through.
        count: Pairs of a thread: all of its tile.

    Args:
        to: Which of them are in the result; its first row is that of the product.
        at: The thread's place.
        tensors: Of the product.
        sums: Of the pairs.
        alpha: Scale of the product.
        bias: Address in shared memory of the bias of the tile's first filter.
        residual: What `Outputs.load_residual` has read.
        room: Address in shared memory of 4 floats for each column.
        rows: Of the product, 64 at most.
    """
    comptime COLUMNS = 4 * count
    comptime LEFT = count // 8
    """Columns of a lane in the end."""
    comptime assert COLUMNS <= WARPGROUP, "pool_pairs: a thread stores a column"
    comptime assert count % 8 == 0, "pool_pairs: each of 8 lanes has some of the columns in the end"
    var found = StaticTuple[Float32, count](fill=0)
    comptime for j in range(count // 2):
        var pair = SIMD[F32, 2](0)
        comptime for i in range(2 * j, 2 * j + 2):
            var y = _finished[epilogue, i](to, sums, alpha, bias, residual[i], RowNorm(0, 0))
            pair += y.cast[F32]() if to.stores(i) else SIMD[F32, 2](0)
        found[2 * j], found[2 * j + 1] = pair[0], pair[1]
    comptime for step in range(3):
        comptime half = count >> (step + 1)
        comptime distance = 16 >> step
        var upper = at.lane() & Int32(distance) != 0
        comptime for i in range(half):
            var low, high = found[i], found[i + half]
            var other = warp.shuffle_xor(low if upper else high, UInt32(distance))
            found[i] = (high if upper else low) + other
    comptime for i in range(LEFT):
        var n = at.lane() // 4 * Int32(LEFT) + Int32(i)  # of the thread's columns, as they began
        var column = n // 2 * 8 + to.column + n % 2
        shared_store_float(room + 4 * UInt32(at.warp() * Int32(COLUMNS) + column), found[i])
    sync_threads(1, UInt32(WARPGROUP))
    if at.t < Int32(COLUMNS) and to.f0 + at.t < to.filters:
        var sum = Float32(0)
        comptime for i in range(WARPGROUP // WARP):
            sum += shared_load_float(room + 4 * UInt32(Int32(i * COLUMNS) + at.t))
        var mean = narrowed[dtype](sum / Float32(rows))
        tensors.y[0].unsafe_store(Int(to.f0 + at.t), mean)
