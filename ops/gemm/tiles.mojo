"""GEMM by tiles on a CPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters, as in cpu.mojo. In
bfloat16 sums are float32, and a result is rounded once. In 8 bits, uint8 by int8, sums are int32:
`Levels` of operands.mojo says what they stand for. A block of 32 pixels x 32 filters goes through
all of K in registers, by the best kernel that the CPU compiled for has:

    AMX           4 tiles of 16 x 16 sums, if Linux grants them: 16 rows of 64 bytes of K by as many
                  of 16 columns (tdpbf16ps, tdpbusd)
    AVX-512 BF16  8 pixels x 2 vectors (vdpbf16ps, pairs of K)
    others        the same in float32, each pair widened: right, but no faster than float32

In 8 bits only AMX comes here, since cpu.mojo has vpdpbusd; the tests run them by vectors too.

    x[N, H, W, C]                   activations, bfloat16 or uint8
    b[panel, K / 32, 2, 16, 16, 2]  filters in panels of 32 columns, tiles of 16 pairs of K x 16
                                    columns (graphs/arrange.py). K is ordered R, S, C; unless C is
                                    a multiple of 32, each r has its S * C filled up with zeros
    b[panel, 1 + K / 4, 64, 4]      in 8 bits the panels of cpu.mojo, K filled up to a multiple of 64
    y[N, P, Q, F]                   result

All want pixels at equal distances in memory, and taps of 64 x n bytes. A 1 x 1 convolution and a
product are so as they lie. For other convolutions a task lays out what it reads:

    planes  C is a multiple of 64 bytes: a plane for each phase of the stride, with padding around it
            and rows of pixels at equal distances; a tap is a constant away from its pixel
    patches other channels, the stem's 3 above all, and groups: [m, K]
"""

from max.runtime.asyncrt import parallelism_level
from std.ffi import external_call
from std.math import ceildiv, iota
from std.memory import Layout, alloc, bitcast, dealloc
from std.sys import CompilationTarget, simd_width_of, size_of
from std.sys.intrinsics import llvm_intrinsic, masked_load

from ..choice import Cheapest
from ..dot import FILTER, SUM, U8, dot
from ..epilogue import Channels, Epilogue, Output
from ..geometry import Geometry
from ..operands import BF16, F32, Data, Levels, Operands
from ..parallel import over_cores
from .cpu import PANEL

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector of sums."""
comptime SIDE = 16
"""Pixels, and columns, of a tile of sums."""
comptime ROW[dtype: DType] = 64 // size_of[dtype]()
"""Numbers of K of a tile.

Parameters:
    dtype: Of the activations.
"""
comptime STEP = ROW[BF16]
"""Numbers of K of a tile in bfloat16."""
comptime BLOCK = 2 * SIDE
"""Pixels that go through K together, and columns that they go through it with."""
comptime TILE = SIDE * STEP
"""Numbers of a tile in bfloat16."""
comptime COLUMNS[dtype: DType] = BLOCK if dtype == BF16 else PANEL
"""Columns of a packed panel, the same on every CPU.

Parameters:
    dtype: Of the activations.
"""
comptime RIGHT[dtype: DType] = BF16 if dtype == BF16 else FILTER[dtype]
"""The dtype of filters.

Parameters:
    dtype: Of the activations.
"""
comptime TOTAL[dtype: DType] = F32 if dtype == BF16 else SUM[dtype]
"""What products are added up in.

Parameters:
    dtype: Of the activations.
"""
comptime HAS_AMX[dtype: DType] = CompilationTarget.is_x86() and CompilationTarget._has_feature[
    "amx-bf16" if dtype == BF16 else "amx-int8"
]()
"""Whether the CPU compiled for has tiles of a dtype.

Parameters:
    dtype: Of the activations.
"""
comptime HAS_PAIRS = CompilationTarget._has_feature["avx512bf16"]()
"""Whether it has vdpbf16ps."""
comptime ROWS = 8 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 4
"""Pixels of a register tile, without AMX."""
comptime TAPS = 128
"""Taps of a window at most, for planes."""
comptime UNBOUNDED = 1 << 40
"""The width of pixels without rows."""
comptime ROOM = 1 << 19
"""Bytes that a task lays out at most, where it has a choice: a part of the second-level cache."""


def amx_granted[dtype: DType = BF16]() -> Bool:
    """Asks Linux for the registers of AMX, as a process must before it uses them.

    Parameters:
        dtype: What they are to multiply: bfloat16, or uint8 by int8.

    Returns:
        Whether there are any, and the kernel grants them.
    """
    comptime if HAS_AMX[dtype]:
        comptime arch_prctl, request_permission, tile_data = 158, 0x1023, 18
        return external_call["syscall", Int](arch_prctl, request_permission, tile_data) == 0
    else:
        return False


@always_inline
def depth_of[dtype: DType = BF16](g: Geometry) -> Int:
    """Counts the numbers of K that a panel has, those that fill it up too.

    Parameters:
        dtype: Of the activations.

    Args:
        g: Sizes of the convolution, or of the product.

    Returns:
        A multiple of a tile's.
    """
    var c = g.group_c()
    comptime if dtype == BF16:
        return g.depth() if c % STEP == 0 else g.r * ceildiv(g.s * c, STEP) * STEP
    else:
        return ceildiv(g.depth(), ROW[dtype]) * ROW[dtype]


@always_inline
def _columns_at[dtype: DType](column: Int, depth: Int) -> Int:
    """Finds the tiles of 32 columns, from number `column` of packed panels on."""
    comptime if dtype == BF16:
        return column * depth
    else:
        var panel, inside = divmod(column, PANEL)
        return (panel * (depth + 4) + 4) * PANEL + inside * 4


@always_inline
def _begin_sums[
    dtype: DType
](starts: Data[TOTAL[dtype]], panels: Data[RIGHT[dtype]], column: Int, depth: Int, zero: Int32):
    """Writes what the sums of 32 columns begin with in 8 bits: minus x's zero point times theirs."""
    comptime if dtype != BF16:
        var panel, inside = divmod(column, PANEL)
        var at = panels.unsafe_offset(panel * (depth + 4) * PANEL + inside * 4)
        var sums = at.unsafe_bitcast[Scalar[TOTAL[dtype]]]().unsafe_load[width=BLOCK](0)
        starts.unsafe_store(0, sums * -zero.cast[TOTAL[dtype]]())


@fieldwise_init
struct Left[dtype: DType](TrivialRegisterPassable):
    """The left side of a product: pixels at equal distances, and their taps.

    Parameters:
        dtype: Of the activations.
    """

    var x: Data[Self.dtype]
    """The first tap of pixel 0."""
    var pitch: Int
    """Numbers from one pixel to the next."""
    var offsets: Data[DType.int64]
    """Numbers from the first tap to each."""
    var taps: Int
    """How many taps there are."""
    var depth: Int
    """Numbers of a tap, a multiple of a tile's."""

    @always_inline
    def at(self, pixel: Int) -> Data[Self.dtype]:
        """Finds a pixel.

        Args:
            pixel: Its number.

        Returns:
            Its first tap.
        """
        return self.x.unsafe_offset(pixel * self.pitch)


@fieldwise_init
struct _Pixels(TrivialRegisterPassable):
    """The pixels of a task: rows of y, between which a few are left out."""

    var first: Int
    """The pixel of y that is the first."""
    var count: Int
    """One beyond the last, what is left out counted."""
    var width: Int
    """Pixels from one row to the next."""
    var q: Int
    """Pixels of a row that are in y."""
    var lowest: Int
    """The lowest that can be read, at most 0."""


@always_inline
def begin_tiles[dtype: DType = BF16](memory: Data[DType.uint8], amx: Bool):
    """Configures AMX's 8 tiles as 16 rows of 64 bytes; `multiply` needs that in each thread.

    Parameters:
        dtype: Of the activations.

    Args:
        memory: Room for 64 bytes.
        amx: Whether AMX is granted; if not, this does nothing.
    """
    comptime if HAS_AMX[dtype]:
        if amx:
            for i in range(64):
                memory[unsafe_offset=i] = 0
            memory[unsafe_offset=0] = 1
            comptime for tile in range(8):
                memory[unsafe_offset=16 + 2 * tile] = 64
                memory[unsafe_offset=48 + tile] = 16
            llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](memory)


@always_inline
def end_tiles[dtype: DType = BF16](amx: Bool):
    """Gives the tiles back, so that the thread's registers are small again.

    Parameters:
        dtype: Of the activations.

    Args:
        amx: Whether AMX is granted.
    """
    comptime if HAS_AMX[dtype]:
        if amx:
            llvm_intrinsic["llvm.x86.tilerelease", NoneType]()


@always_inline
def _load[tile: Int, dtype: DType](source: Data[dtype], bytes: Int):
    llvm_intrinsic["llvm.x86.tileloadd64", NoneType](Int8(tile), source, Int64(bytes))


@always_inline
def _dot[dtype: DType, sums: Int, a: Int, b: Int]():
    comptime name: StaticString = "llvm.x86.tdpbf16ps" if dtype == BF16 else "llvm.x86.tdpbusd"
    llvm_intrinsic[name, NoneType](Int8(sums), Int8(a), Int8(b))


comptime _PITCH[dtype: DType] = STEP if dtype == BF16 else 4 * PANEL
"""Numbers from a row of a tile of filters to the next."""
comptime _BESIDE[dtype: DType] = TILE if dtype == BF16 else 4 * SIDE
"""Numbers from a tile of 16 filters to the next 16."""
comptime _BELOW[dtype: DType] = 2 * TILE if dtype == BF16 else SIDE * 4 * PANEL
"""Numbers from a tile to the one below it."""


@no_inline
def _multiply_tiles[
    dtype: DType, //, halves: Int
](
    left: Left[dtype],
    upper: Int,
    lower: Int,
    columns: Data[RIGHT[dtype]],
    sums: Data[TOTAL[dtype]],
    fresh: Bool,
    starts: Data[TOTAL[dtype]],
):
    """Multiplies the 16 pixels from `upper` on, and those from `lower`, by AMX: see `multiply`."""
    comptime for half in range(halves):
        comptime for side in range(2):
            if not fresh:
                _load[2 * half + side](
                    sums.unsafe_offset(half * SIDE * BLOCK + side * SIDE), BLOCK * 4
                )
            else:
                comptime if dtype == BF16:
                    llvm_intrinsic["llvm.x86.tilezero", NoneType](Int8(2 * half + side))
                else:
                    _load[2 * half + side](starts.unsafe_offset(side * SIDE), 0)
    var above, below = left.at(upper), left.at(lower)
    var pitch = left.pitch * size_of[dtype]()
    comptime row = _PITCH[dtype] * size_of[dtype]()
    var b = columns
    for tap in range(left.taps):
        var start = Int(left.offsets[unsafe_offset=tap])
        for k in range(start, start + left.depth, ROW[dtype]):
            _load[6](b, row)
            _load[4](above.unsafe_offset(k), pitch)
            _dot[dtype, 0, 4, 6]()
            _load[7](b.unsafe_offset(_BESIDE[dtype]), row)
            _dot[dtype, 1, 4, 7]()
            comptime if halves == 2:
                _load[5](below.unsafe_offset(k), pitch)
                _dot[dtype, 2, 5, 6]()
                _dot[dtype, 3, 5, 7]()
            b = b.unsafe_offset(_BELOW[dtype])
    comptime for half in range(halves):
        comptime for side in range(2):
            llvm_intrinsic["llvm.x86.tilestored64", NoneType](
                Int8(2 * half + side),
                sums.unsafe_offset(half * SIDE * BLOCK + side * SIDE),
                Int64(BLOCK * 4),
            )


@no_inline
def _multiply_rows[
    dtype: DType, //
](
    left: Left[dtype],
    first: Int,
    columns: Data[RIGHT[dtype]],
    column: Int,
    sums: Data[TOTAL[dtype]],
    fresh: Bool,
    starts: Data[TOTAL[dtype]],
):
    """Multiplies ROWS pixels by 2 vectors of columns: see `multiply`."""
    comptime many = 4 // size_of[dtype]()  # numbers that are multiplied at once
    var tile = Array[SIMD[TOTAL[dtype], WIDTH], ROWS * 2](fill=0)
    if not fresh:
        comptime for i in range(ROWS * 2):
            tile[i] = sums.unsafe_load[width=WIDTH](i // 2 * BLOCK + column + i % 2 * WIDTH)
    elif dtype != BF16:
        comptime for i in range(ROWS * 2):
            tile[i] = starts.unsafe_load[width=WIDTH](column + i % 2 * WIDTH)
    var places = Array[Int, 2](uninitialized=True)  # where the columns of a vector are in a tile
    comptime for v in range(2):
        var at = column + v * WIDTH
        places[v] = at // SIDE * _BESIDE[dtype] + at % SIDE * many
    var b = columns
    for tap in range(left.taps):
        var source = Array[Data[dtype], ROWS](uninitialized=True)
        comptime for i in range(ROWS):
            source[i] = left.at(first + i).unsafe_offset(Int(left.offsets[unsafe_offset=tap]))
        for k in range(0, left.depth, ROW[dtype]):
            for at in range(ROW[dtype] // many):
                var w = Array[SIMD[RIGHT[dtype], many * WIDTH], 2](uninitialized=True)
                comptime for v in range(2):
                    w[v] = b.unsafe_load[width=many * WIDTH](places[v] + at * _PITCH[dtype])
                comptime for i in range(ROWS):
                    var word = bitcast[DType.uint32, 1](
                        source[i].unsafe_load[width=many](k + many * at)
                    )
                    var a = bitcast[dtype, many * WIDTH](SIMD[DType.uint32, WIDTH](word))
                    comptime for v in range(2):
                        tile[2 * i + v] = _add_products(tile[2 * i + v], a, w[v])
            b = b.unsafe_offset(_BELOW[dtype])
    comptime for i in range(ROWS * 2):
        sums.unsafe_store(i // 2 * BLOCK + column + i % 2 * WIDTH, tile[i])


@always_inline
def _add_products[
    dtype: DType, right: DType, total: DType, many: SIMDLength, width: SIMDLength, //
](sum: SIMD[total, width], a: SIMD[dtype, many], w: SIMD[right, many]) -> SIMD[total, width]:
    """Adds the products of 4 bytes of K to a sum in each lane."""
    comptime if dtype == U8:
        comptime Wide = SIMD[SUM[U8], WIDTH]
        var bytes = rebind[SIMD[U8, 4 * WIDTH]](a)
        var filters = rebind[SIMD[FILTER[U8], 4 * WIDTH]](w)
        return rebind[SIMD[total, width]](dot[U8, WIDTH](rebind[Wide](sum), bytes, filters))
    elif HAS_PAIRS and WIDTH == SIDE:
        return llvm_intrinsic["llvm.x86.avx512bf16.dpbf16ps.512", SIMD[total, width]](sum, a, w)
    else:
        var left, right_ = bitcast[DType.uint32, width](a), bitcast[DType.uint32, width](w)
        var even = bitcast[total, width](left << 16).fma(bitcast[total, width](right_ << 16), sum)
        comptime odd: UInt32 = 0xFFFF0000
        return bitcast[total, width](left & odd).fma(bitcast[total, width](right_ & odd), even)


@always_inline
def multiply[
    dtype: DType, //
](
    left: Left[dtype],
    upper: Int,
    lower: Int,
    halves: Int,
    columns: Data[RIGHT[dtype]],
    sums: Data[TOTAL[dtype]],
    fresh: Bool,
    amx: Bool,
    starts: Optional[Data[TOTAL[dtype]]] = None,
):
    """Multiplies 32 pixels, or 16, by 32 columns: sums[32, 32] (+)= left b.

    Parameters:
        dtype: Of the activations.

    Args:
        left: The pixels.
        upper: The first of 16 of them.
        lower: The first of 16 others, if `halves` is 2.
        halves: 1 or 2.
        columns: The first tiles of b, as above.
        sums: The sums.
        fresh: Whether they begin with `starts`, or 0.
        amx: Whether AMX is granted, and `begin_tiles` was called.
        starts: What the sums of each column begin with in 8 bits.
    """
    var begin = starts.or_else(sums)
    comptime if HAS_AMX[dtype]:
        if amx:
            if halves == 2:
                _multiply_tiles[2](left, upper, lower, columns, sums, fresh, begin)
            else:
                _multiply_tiles[1](left, upper, lower, columns, sums, fresh, begin)
            return
    for half in range(halves):
        for row in range(0, SIDE, ROWS):
            var to = sums.unsafe_offset((half * SIDE + row) * BLOCK)
            var first = (lower if half else upper) + row
            for column in range(0, BLOCK, 2 * WIDTH):
                _multiply_rows(left, first, columns, column, to, fresh, begin)


@fieldwise_init
struct _Block(TrivialRegisterPassable):
    """32 pixels of a task, in two halves, and 32 columns."""

    var first: Int
    """The first pixel."""
    var upper: Int
    """The first of 16 that are multiplied."""
    var lower: Int
    """The first of 16 others that are, if there are two halves."""
    var halves: Int
    """1 or 2."""
    var column: Int
    """The first column."""
    var columns: Int
    """How many of them are in y."""

    def __init__(out self, m: _Pixels, row: Int, column: Int, last: Int):
        """Finds block number `row`.

        The last 16 pixels overlap those before, where there are any, rather than go beyond.
        """
        self.first = row * BLOCK
        self.halves = min(2, ceildiv(m.count, SIDE) - 2 * row)
        self.upper = max(m.lowest, min(row * BLOCK, m.count - SIDE))
        self.lower = max(m.lowest, min(row * BLOCK + SIDE, m.count - SIDE))
        self.column, self.columns = column, min(BLOCK, last - column)


@no_inline
def _store[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    o: Operands[dtype, out, RIGHT[dtype]],
    levels: Levels,
    sums: Data[TOTAL[dtype]],
    m: _Pixels,
    block: _Block,
    f: Int,
):
    """Takes the sums of a block through the epilogue into y."""
    comptime VECTORS = BLOCK // WIDTH
    var output = Output[epilogue](o, levels)
    var of = Array[Channels[WIDTH], VECTORS](uninitialized=True)
    if block.columns == BLOCK:
        comptime for v in range(VECTORS):
            of[v] = output.channels[WIDTH](block.column + v * WIDTH)
    for half in range(block.halves):
        var start = block.lower if half else block.upper
        var i = block.first + half * SIDE - start  # what comes before is another half's
        var end = min(SIDE, m.count - start)
        var p, q = divmod(start + i, m.width) if m.width < UNBOUNDED else (0, start + i)
        while i < end:
            # As many pixels as follow one another in y.
            var stop = min(end, i + m.q - q)
            var to = (m.first + p * m.q + q) * f + block.column
            for row in range(i, stop):
                var source = sums.unsafe_offset((half * SIDE + row) * BLOCK)
                if block.columns == BLOCK:
                    comptime for v in range(VECTORS):
                        var at = v * WIDTH
                        output.finish(source.unsafe_load[width=WIDTH](at), of[v], to + at)
                else:
                    output.finish_row(source, block.column, to, block.columns)
                to += f
            i += max(0, stop - i) + m.width - max(q, m.q) if m.width < UNBOUNDED else SIDE
            p, q = p + 1, 0


@always_inline
def _fill[dtype: DType](to: Data[dtype], begin: Int, end: Int, value: Scalar[dtype]):
    """Writes a number from `begin` to `end`."""
    comptime step = ROW[dtype]
    var whole = begin + (end - begin) // step * step
    for i in range(begin, whole, step):
        to.unsafe_store(i, SIMD[dtype, step](value))
    for i in range(whole, end):
        to[unsafe_offset=i] = value


@always_inline
def _copy[dtype: DType](to: Data[dtype], source: Data[dtype], count: Int):
    """Copies numbers, and writes zeros behind them where they end within a row of a tile."""
    comptime step = ROW[dtype]
    var whole = count // step * step
    for i in range(0, whole, step):
        to.unsafe_store(i, source.unsafe_load[width=step](i))
    if whole < count:
        comptime if CompilationTarget.has_avx512f():
            comptime bits = DType.uint16 if size_of[dtype]() == 2 else DType.uint8
            var inside = iota[bits, step]().lt(Scalar[bits](count - whole))
            var last = source.unsafe_offset(whole).unsafe_bitcast[Scalar[bits]]()
            var value = masked_load[step](last, inside, SIMD[bits, step](0))
            to.unsafe_store(whole, bitcast[dtype, step](value))
        else:
            to.unsafe_store(whole, SIMD[dtype, step](0))
            for i in range(whole, count):
                to[unsafe_offset=i] = source[unsafe_offset=i]


struct _Reach(TrivialRegisterPassable):
    """How far the taps of a window reach, in steps of the stride: along rows, or along columns."""

    var low: Int
    """From the output pixel to the first tap."""
    var high: Int
    """To the last."""

    def __init__(out self, taps: Int, stride: Int, pad: Int, dilation: Int):
        self.low = (-pad) // stride
        self.high = ((taps - 1) * dilation - pad) // stride

    @always_inline
    def extra(self) -> Int:
        """Counts the rows, or columns, that a plane has beside those of the output."""
        return self.high - self.low


struct Plan[dtype: DType](TrivialRegisterPassable):
    """How a convolution or a product is divided into tasks.

    Parameters:
        dtype: Of the activations.
    """

    var kind: Int
    """AS_IT_LIES, PLANES or PATCHES."""
    var blocks: Int
    """Blocks of pixels: of all, or of each image where planes are laid out."""
    var images: Int
    """Images that are divided so; 1 if blocks are of all pixels."""
    var share: Int
    """Panels of a task."""
    var shares: Int
    """Tasks that the panels of a group are shared among."""

    comptime AS_IT_LIES = 0
    """The task reads x where it is."""
    comptime PLANES = 1
    """It lays out planes."""
    comptime PATCHES = 2
    """It lays out patches."""

    def __init__(out self, g: Geometry, work: Int):
        """Chooses the division that should be done first, where `work` results share all cores.

        Args:
            g: Sizes of the convolution, or of the product.
            work: Results of all that is computed together.
        """
        self.kind = Self.kind_of(g)
        self.images = g.n if self.kind == Self.PLANES else 1
        var units = g.p if self.kind == Self.PLANES else ceildiv(g.pixels(), BLOCK)
        var panels = ceildiv(g.group_f(), COLUMNS[Self.dtype])
        var cores = Float64(parallelism_level(None)) * Float64(g.pixels() * g.f) / Float64(work)
        var of_a_unit = g.q if self.kind == Self.PLANES else BLOCK
        self.blocks, self.share, self.shares = 1, panels, 1
        var choice = Cheapest(self)
        var blocks = 1
        while True:
            var each = ceildiv(units, blocks)
            var room = _room[Self.dtype](g, self.kind, each * of_a_unit) * size_of[Self.dtype]()
            var share = panels
            while room <= ROOM or blocks == units:
                var tasks = ceildiv(units, each) * self.images * ceildiv(panels, share) * g.groups
                var cost = self._cost(g, each * of_a_unit, share)
                # What is begun last ends last: half a task more.
                var all = (Float64(ceildiv(tasks, max(1, Int(cores)))) + 0.5) * cost
                self.blocks, self.share, self.shares = blocks, share, ceildiv(panels, share)
                choice.offer(self, all)
                if share == 1:
                    break
                share = ceildiv(share, 2)
            if blocks == units:
                break
            blocks = min(units, blocks + max(1, blocks // 2))
        self = choice.best

    @staticmethod
    def kind_of(g: Geometry) -> Int:
        """Tells how a task lays out what it reads.

        Args:
            g: Sizes of the convolution, or of the product.

        Returns:
            AS_IT_LIES, PLANES or PATCHES.
        """
        if (
            g.groups > 1
            or g.c % ROW[Self.dtype] != 0
            or g.r * g.s > TAPS
            or g.stride_h * g.stride_w > 256
        ):
            return Self.PATCHES
        return Self.AS_IT_LIES if g.pointwise() and g.pixels() >= SIDE else Self.PLANES

    def _cost(self, g: Geometry, pixels: Int, share: Int) -> Float64:
        """Estimates a task in cycles.

        A multiplication of tiles takes 16; to store 16 x 32 sums some 300, which the epilogue needs;
        a line of 64 bytes 4 to read, 6 to lay out; to begin 2,000.
        """
        comptime size = size_of[Self.dtype]()
        var depth = depth_of[Self.dtype](g)
        var count = pixels
        if self.kind == Self.PLANES:
            var along = _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w)
            count += (pixels // g.q - 1) * along.extra()
        var sides = ceildiv(count, SIDE) * share * (COLUMNS[Self.dtype] // BLOCK)
        var cost = Float64(sides) * (2 * SIDE * Float64(depth // ROW[Self.dtype]) + 300)
        var laid = _room[Self.dtype](g, self.kind, pixels) * size // 64
        var read = pixels * g.group_c() * size // 64
        var filters = share * COLUMNS[Self.dtype] * depth * size // 64
        return cost + 6 * Float64(laid) + 4 * Float64(read + filters) + 2000

    def pixels(self, g: Geometry, part: Int) -> Tuple[Int, Int]:
        """Finds a block.

        Args:
            g: As above.
            part: Its number.

        Returns:
            Its first pixel, and one beyond its last.
        """
        if self.kind == Self.PLANES:
            var n, block = divmod(part, self.blocks)
            return (
                (n * g.p + g.p * block // self.blocks) * g.q,
                (n * g.p + g.p * (block + 1) // self.blocks) * g.q,
            )
        var units = ceildiv(g.pixels(), BLOCK)
        return (
            units * part // self.blocks * BLOCK,
            min(units * (part + 1) // self.blocks * BLOCK, g.pixels()),
        )

    @always_inline
    def tasks(self, g: Geometry) -> Int:
        """Counts the tasks.

        Args:
            g: As above.

        Returns:
            How many there are.
        """
        return self.blocks * self.images * self.shares * g.groups


struct _Scratch[dtype: DType](TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    var sums: Data[TOTAL[Self.dtype]]
    """Sums [32, 32]."""
    var starts: Data[TOTAL[Self.dtype]]
    """What those of each column begin with, in 8 bits."""
    var bias: Data[F32]
    """Of a block, where two products are added."""
    var config: Data[DType.uint8]
    """Of AMX's tiles."""
    var offsets: Data[DType.int64]
    """Of the taps of two sources."""
    var room: Data[Self.dtype]
    """What is laid out."""

    comptime FIXED = 4 * BLOCK * (BLOCK + 2) + 64 + 8 * 2 * TAPS
    """Bytes of all but the room, and of the alignment to cache lines."""

    def __init__(out self, memory: Data[DType.uint8]):
        var start = memory.unsafe_offset(-Int(memory) % 64)
        self.sums = start.unsafe_bitcast[Scalar[TOTAL[Self.dtype]]]()
        self.starts = self.sums.unsafe_offset(BLOCK * BLOCK)
        self.bias = self.starts.unsafe_offset(BLOCK).unsafe_bitcast[Float32]()
        self.config = self.bias.unsafe_offset(BLOCK).unsafe_bitcast[UInt8]()
        self.offsets = self.config.unsafe_offset(64).unsafe_bitcast[Int64]()
        self.room = self.offsets.unsafe_offset(2 * TAPS).unsafe_bitcast[Scalar[Self.dtype]]()

    @staticmethod
    def bytes(room: Int) -> Int:
        """Counts the bytes of it all, with `room` numbers laid out."""
        return Self.FIXED + 64 + size_of[Self.dtype]() * room


def _lay_planes[
    dtype: DType, //
](
    g: Geometry,
    x: Data[dtype],
    n: Int,
    p: Int,
    rows: Int,
    offsets: Data[DType.int64],
    room: Data[dtype],
    blank: Scalar[dtype],
) -> Left[dtype]:
    """Lays out what `rows` of output from (n, p) on read: [phase, rows + extra, Q + extra, C].

    Numbers of the image are in the plane of the phases (h % stride, w % stride), at (h, w) // stride
    less the row and the column that the first window begins in. Around it lies `blank`.
    """
    var down = _Reach(g.r, g.stride_h, g.pad_h, g.dilation_h)
    var along = _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w)
    var height, width = rows + down.extra(), g.q + along.extra()
    var used = Array[Bool, 256](fill=False)
    for r in range(g.r):
        var at_h, phase_h = divmod(r * g.dilation_h - g.pad_h, g.stride_h)
        for s in range(g.s):
            var at_w, phase_w = divmod(s * g.dilation_w - g.pad_w, g.stride_w)
            var plane = phase_h * g.stride_w + phase_w
            used[plane] = True
            offsets[unsafe_offset=r * g.s + s] = Int64(
                ((plane * height + at_h - down.low) * width + at_w - along.low) * g.c
            )
    for plane in range(g.stride_h * g.stride_w):
        if not used[plane]:
            continue
        var phase_h, phase_w = divmod(plane, g.stride_w)
        # Columns of the plane that lie in the image.
        var left = max(0, min(width, ceildiv(-phase_w, g.stride_w) - along.low))
        var right = max(left, min(width, ceildiv(g.w - phase_w, g.stride_w) - along.low))
        for i in range(height):
            var to = room.unsafe_offset((plane * height + i) * width * g.c)
            var h = (p + down.low + i) * g.stride_h + phase_h
            if h < 0 or h >= g.h:
                _fill(to, 0, width * g.c, blank)
                continue
            _fill(to, 0, left * g.c, blank)
            _fill(to, right * g.c, width * g.c, blank)
            var w = (left + along.low) * g.stride_w + phase_w
            var source = x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c)
            if g.stride_w == 1:
                _copy(to.unsafe_offset(left * g.c), source, (right - left) * g.c)
            else:
                for j in range(left, right):
                    _copy(to.unsafe_offset(j * g.c), source, g.c)
                    source = source.unsafe_offset(g.stride_w * g.c)
    return Left(room, g.c, offsets, g.r * g.s, g.c)


def _lay_patches[
    dtype: DType, //
](
    g: Geometry,
    x: Data[dtype],
    first: Int,
    count: Int,
    channel: Int,
    offsets: Data[DType.int64],
    room: Data[dtype],
    blank: Scalar[dtype],
) -> Left[dtype]:
    """Lays out the patches of `count` pixels from `first` on: [count, K].

    They are written in order, so that what `_copy` writes behind a run is written over by the next.
    """
    var depth = depth_of[dtype](g)
    var c = g.group_c()
    var run = g.s * c
    var row = depth // g.r if dtype == BF16 else run
    comptime step = ROW[dtype]
    for i in range(count):
        var n, pixel = divmod(first + i, g.p * g.q)
        var p, q = divmod(pixel, g.q)
        var left = q * g.stride_w - g.pad_w
        var whole = g.dilation_w == 1 and g.groups == 1 and left >= 0 and left + g.s <= g.w
        var patch = room.unsafe_offset(i * depth)
        patch.unsafe_store(depth - step, SIMD[dtype, step](0))
        for r in range(g.r):
            var to = patch.unsafe_offset(r * row)
            comptime if dtype == BF16:
                to.unsafe_store(row - step, SIMD[dtype, step](0))
            var h = p * g.stride_h - g.pad_h + r * g.dilation_h
            if h < 0 or h >= g.h:
                _fill(to, 0, run, blank)
                continue
            var source = x.unsafe_offset((n * g.h + h) * g.w * g.c + channel)
            if whole:
                _copy(to, source.unsafe_offset(left * g.c), run)
                continue
            for s in range(g.s):
                var w = left + s * g.dilation_w
                if w >= 0 and w < g.w:
                    _copy(to.unsafe_offset(s * c), source.unsafe_offset(w * g.c), c)
                else:
                    _fill(to, s * c, s * c + c, blank)
    offsets[unsafe_offset=0] = 0
    return Left(room, depth, offsets, 1, depth)


@no_inline
def _columns[
    dtype: DType, out: DType, //, epilogue: Epilogue, sources: Int
](
    left: Array[Left[dtype], sources],
    filters: Array[Data[RIGHT[dtype]], sources],
    biases: Array[Data[F32], sources],
    o: Operands[dtype, out, RIGHT[dtype]],
    levels: Levels,
    m: _Pixels,
    f: Int,
    column: Int,
    last: Int,
    s: _Scratch[dtype],
    amx: Bool,
):
    """Multiplies the pixels of a task by the panels of columns `column` to `last`, and stores them.

    `filters` begin with filter `column`. Panels that stay in the second-level cache together are
    gone through for each 32 pixels, so that y and the residual are gone through in the order of
    memory; of others each stays there for all.
    """
    begin_tiles[dtype](s.config, amx)
    var rows, columns = ceildiv(m.count, BLOCK), ceildiv(last - column, BLOCK)
    var depth = 0
    comptime for i in range(sources):
        depth += left[i].taps * left[i].depth
    var by_rows = (last - column) * depth * size_of[dtype]() <= ROOM
    var here = o
    for index in range(rows * columns):
        var row, at = divmod(index, columns) if by_rows else divmod(index, rows)
        if not by_rows:
            row, at = at, row
        var block = _Block(m, row, column + at * BLOCK, last)
        comptime for i in range(sources):
            var k = left[i].taps * left[i].depth
            var tiles = filters[i].unsafe_offset(_columns_at[dtype](at * BLOCK, k))
            _begin_sums[dtype](s.starts, filters[i], at * BLOCK, k, levels.zero)
            multiply(
                left[i],
                block.upper,
                block.lower,
                block.halves,
                tiles,
                s.sums,
                i == 0,
                amx,
                s.starts,
            )
        comptime if sources > 1:
            for j in range(block.columns):
                var bias = biases[0][unsafe_offset=block.column + j]
                comptime for i in range(1, sources):
                    bias += biases[i][unsafe_offset=block.column + j]
                s.bias[unsafe_offset=j] = bias
            here.bias = s.bias.unsafe_offset(-block.column)
        _store[epilogue](here, levels, s.sums, m, block, f)
    end_tiles[dtype](amx)


def _room[dtype: DType](g: Geometry, kind: Int, count: Int) -> Int:
    """Counts the numbers that are laid out for `count` pixels."""
    if kind == Plan[dtype].AS_IT_LIES:
        return 0
    if kind == Plan[dtype].PATCHES:
        return max(count, SIDE) * depth_of[dtype](g) + ROW[dtype]
    var height = count // g.q + _Reach(g.r, g.stride_h, g.pad_h, g.dilation_h).extra()
    var width = g.q + _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w).extra()
    return (g.stride_h * g.stride_w * height * width + SIDE) * g.c


def _lay[
    dtype: DType, //
](
    g: Geometry,
    x: Data[dtype],
    kind: Int,
    first: Int,
    count: Int,
    channel: Int,
    offsets: Data[DType.int64],
    room: Data[dtype],
    blank: Scalar[dtype] = 0,
) -> Tuple[Left[dtype], _Pixels]:
    """Lays out what `count` pixels from `first` on read, if need be."""
    if kind == Plan[dtype].AS_IT_LIES:
        offsets[unsafe_offset=0] = 0
        var left = Left(x.unsafe_offset(first * g.c), g.c, offsets, 1, g.c)
        return left, _Pixels(first, count, UNBOUNDED, UNBOUNDED, -first)
    if kind == Plan[dtype].PATCHES:
        var left = _lay_patches(g, x, first, count, channel, offsets, room, blank)
        return left, _Pixels(first, count, UNBOUNDED, UNBOUNDED, 0)
    var n, pixel = divmod(first, g.p * g.q)
    var p, rows = pixel // g.q, count // g.q
    var left = _lay_planes(g, x, n, p, rows, offsets, room, blank)
    var width = g.q + _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w).extra()
    return left, _Pixels(first, (rows - 1) * width + g.q, width, g.q, 0)


def gemm_block[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, RIGHT[dtype]],
    levels: Levels,
    kind: Int,
    first: Int,
    last: Int,
    channel: Int,
    column: Int,
    end: Int,
    amx: Bool,
):
    """Computes the pixels `first` to `last` for the filters `column` to `end` of a group.

    Parameters:
        dtype: Of the activations: bfloat16 or uint8.
        out: Of the result.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors; `w` begins with the panel of the first filter.
        levels: What they stand for in 8 bits.
        kind: How the left side is laid out, as Plan says.
        first: The first pixel.
        last: One beyond the last pixel.
        channel: The first input channel of the group.
        column: The first filter.
        end: One beyond the last filter.
        amx: Whether AMX is granted.
    """
    var room = _room[dtype](g, kind, last - first)
    var memory = alloc(Layout[UInt8](count=_Scratch[dtype].bytes(room)))
    var s = _Scratch[dtype](rebind[Data[DType.uint8]](memory.unsafe_ptr()))
    var blank = levels.zero.cast[dtype]()
    var left, m = _lay(g, o.x, kind, first, last - first, channel, s.offsets, s.room, blank)
    _columns[epilogue, 1]([left], [o.w], [o.bias], o, levels, m, g.f, column, end, s, amx)
    dealloc(memory^)


def gemm[
    dtype: DType, out: DType, //, epilogue: Epilogue
](g: Geometry, o: Operands[dtype, out, RIGHT[dtype]], levels: Optional[Levels] = None):
    """Computes a whole convolution or product on all cores, `o.w` packed in panels.

    Parameters:
        dtype: Of the activations: bfloat16 or uint8.
        out: Of the result.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors.
        levels: What they stand for in 8 bits.
    """
    var of_one = Array[Levels, 1](fill=levels.or_else(Levels(o.bias)))
    gemm_group[epilogue, 1]([g], [o], of_one^)


def gemm_group[
    dtype: DType, out: DType, //, epilogue: Epilogue, count: Int
](
    g: Array[Geometry, count],
    o: Array[Operands[dtype, out, RIGHT[dtype]], count],
    levels: Optional[Array[Levels, count]] = None,
):
    """Computes convolutions or products that do not read each other, in one loop over all cores.

    Parameters:
        dtype: Of the activations: bfloat16 or uint8.
        out: Of the results.
        epilogue: What the accumulators go through.
        count: How many there are.

    Args:
        g: Sizes of each.
        o: Tensors of each; `w` is packed in panels.
        levels: What they stand for in 8 bits.
    """
    var work = 0
    comptime for i in range(count):
        work += g[i].pixels() * g[i].f
    var ends = Array[Int, count](fill=0)
    var plans = Array[Plan[dtype], count](uninitialized=True)
    var tasks = 0
    comptime for i in range(count):
        plans[i] = Plan[dtype](g[i], work)
        tasks += plans[i].tasks(g[i])
        ends[i] = tasks
    var amx = amx_granted[dtype]()
    var given = levels.copy().or_else(Array[Levels, count](fill=Levels(o[0].bias)))

    def task(index: Int) {imm}:
        comptime for i in range(count):
            var start = ends[i - 1] if i > 0 else 0
            if start <= index < ends[i]:
                _task[epilogue](g[i], o[i], given[i], plans[i], index - start, amx)

    over_cores(task, tasks)


def _task[
    dtype: DType, out: DType, //, epilogue: Epilogue
](
    g: Geometry,
    o: Operands[dtype, out, RIGHT[dtype]],
    levels: Levels,
    plan: Plan[dtype],
    index: Int,
    amx: Bool,
):
    """Computes a share of the panels of a group at one block of pixels."""
    # All filters of a block of pixels follow one another: a core keeps to its pixels (parallel.mojo).
    var part, slot = divmod(index, plan.shares * g.groups)
    var group, share = divmod(slot, plan.shares)
    var first, last = plan.pixels(g, part)
    var begin = group * g.group_f()
    var column = share * plan.share * COLUMNS[dtype]
    var panel = group * ceildiv(g.group_f(), COLUMNS[dtype]) + share * plan.share
    var numbers = depth_of[dtype](g) if dtype == BF16 else depth_of[dtype](g) + 4
    gemm_block[epilogue](
        g,
        o.shifted(w=panel * numbers * COLUMNS[dtype]),
        levels,
        plan.kind,
        first,
        last,
        group * g.group_c(),
        begin + column,
        begin + min(column + plan.share * COLUMNS[dtype], g.group_f()),
        amx,
    )


def gemm_shortcut(g: Geometry, o: Operands[BF16], side: Geometry, beside: Operands[BF16]):
    """Computes relu of the sum of two convolutions into one y, on all cores.

    Args:
        g: Sizes of the first.
        o: Its tensors.
        side: Sizes of the second, which gives as many pixels and filters; neither has groups.
        beside: Its tensors; y is the first's.
    """
    comptime Kinds = Plan[BF16]
    var plan = Kinds(side, g.pixels() * g.f)
    var least = g.pixels() if plan.kind == Kinds.AS_IT_LIES else g.p // plan.blocks * g.q
    var lies = Kinds.kind_of(g) == Kinds.AS_IT_LIES
    if not lies or plan.kind > Kinds.PLANES or side.s > 1 or least < SIDE:
        gemm[Epilogue("none")](side, beside)
        var joined = o
        joined.residual = o.y
        gemm[Epilogue("add_relu")](g, joined)
        return
    var amx = amx_granted()

    def task(index: Int) {var}:
        var part, share = divmod(index, plan.shares)
        var first, last = plan.pixels(g, part)
        var room = _room[BF16](side, plan.kind, last - first)
        var memory = alloc(Layout[UInt8](count=_Scratch[BF16].bytes(room)))
        var s = _Scratch[BF16](rebind[Data[DType.uint8]](memory.unsafe_ptr()))
        var left, _ = _lay(g, o.x, Kinds.AS_IT_LIES, first, last - first, 0, s.offsets, s.room)
        var offsets = s.offsets.unsafe_offset(TAPS)
        var right, m = _lay(side, beside.x, plan.kind, first, last - first, 0, offsets, s.room)
        var column = share * plan.share * BLOCK
        _columns[Epilogue("relu"), 2](
            [left, right],
            [o.w.unsafe_offset(column * g.c), beside.w.unsafe_offset(column * side.c)],
            [o.bias, beside.bias],
            o,
            Levels(o.bias),
            m,
            g.f,
            column,
            min(column + plan.share * BLOCK, g.f),
            s,
            amx,
        )
        dealloc(memory^)

    over_cores(task, plan.tasks(side))
