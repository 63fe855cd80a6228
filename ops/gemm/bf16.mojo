"""GEMM in bfloat16 on a CPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters, as in cpu.mojo; sums are
float32, and a result is rounded once. A block of 32 pixels x 32 filters goes through all of K in
registers, by the best of three kernels that the CPU compiled for has:

    AMX           4 tiles of 16 x 16 sums (tdpbf16ps, 16 x 32 by 32 x 16), if Linux grants them
    AVX-512 BF16  8 pixels x 2 vectors (vdpbf16ps, pairs of K)
    others        the same in float32, each pair widened: right, but no faster than float32

    x[N, H, W, C]                   activations, bfloat16
    b[panel, K / 32, 2, 16, 16, 2]  filters in panels of 32 columns, tiles of 16 pairs of K x 16
                                    columns (graphs/arrange.py). K is ordered R, S, C; unless C is
                                    a multiple of 32, each r has its S * C filled up with zeros
    y[N, P, Q, F]                   result, bfloat16

All three want pixels at equal distances in memory, and taps of 32 x n numbers. A 1 x 1 convolution
and a product are so as they lie. For other convolutions a task lays out what it reads, with zeros
around it, so that a row of pixels is followed by the next at the same distance:

    planes  C is a multiple of 32: a plane for each phase of the stride; a tap is a constant away
            from its pixel
    rows    other channels, the stem's 3 above all: a tap is a row of the window, S * C numbers; those
            that fill it up are multiplied by zeros
    patches groups, rows with holes, and rows with NaN or infinity, which zeros would spread: [m, K]
"""

from max.runtime.asyncrt import parallelism_level
from std.ffi import external_call
from std.math import ceildiv, sqrt
from std.memory import Layout, alloc, bitcast, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.sys.intrinsics import llvm_intrinsic

from ..epilogue import Channels, Epilogue, Output
from ..geometry import Geometry
from ..operands import BF16, F32, Data, Operands, widened
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector of sums."""
comptime SIDE = 16
"""Pixels, and columns, of a tile of sums."""
comptime STEP = 32
"""Numbers of K of a tile."""
comptime BLOCK = 2 * SIDE
"""Pixels that go through K together, and columns of a packed panel, the same on every CPU."""
comptime TILE = SIDE * STEP
"""Numbers of a tile."""
comptime HAS_AMX = CompilationTarget._has_feature["amx-bf16"]()
"""Whether the CPU compiled for has tiles of bfloat16."""
comptime HAS_PAIRS = CompilationTarget._has_feature["avx512bf16"]()
"""Whether it has vdpbf16ps."""
comptime ROWS = 8 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 4
"""Pixels of a register tile, without AMX."""
comptime TAPS = 128
"""Taps of a window at most, for planes."""
comptime UNBOUNDED = 1 << 40
"""The width of pixels without rows."""
comptime ROOM = 1 << 18
"""Numbers that a task lays out at most, where it has a choice: 512 KB, of the second-level cache."""


def amx_granted() -> Bool:
    """Asks Linux for the registers of AMX, as a process must before it uses them.

    Returns:
        Whether there are any, and the kernel grants them.
    """
    comptime if HAS_AMX:
        comptime arch_prctl, request_permission, tile_data = 158, 0x1023, 18
        return external_call["syscall", Int](arch_prctl, request_permission, tile_data) == 0
    else:
        return False


@always_inline
def depth_of(g: Geometry) -> Int:
    """Counts the numbers of K that a panel has, those that fill it up too.

    Args:
        g: Sizes of the convolution, or of the product.

    Returns:
        A multiple of STEP.
    """
    var c = g.group_c()
    return g.depth() if c % STEP == 0 else g.r * ceildiv(g.s * c, STEP) * STEP


@fieldwise_init
struct Left(TrivialRegisterPassable):
    """The left side of a product: pixels at equal distances, and their taps."""

    var x: Data[BF16]
    """The first tap of pixel 0."""
    var pitch: Int
    """Numbers from one pixel to the next."""
    var offsets: Data[DType.int64]
    """Numbers from the first tap to each."""
    var taps: Int
    """How many taps there are."""
    var depth: Int
    """Numbers of a tap, a multiple of STEP."""

    @always_inline
    def at(self, pixel: Int) -> Data[BF16]:
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
def begin_tiles(memory: Data[DType.uint8], amx: Bool):
    """Configures AMX's 8 tiles as 16 rows of 64 bytes; `multiply` needs that in each thread.

    Args:
        memory: Room for 64 bytes.
        amx: Whether AMX is granted; if not, this does nothing.
    """
    comptime if HAS_AMX:
        if amx:
            for i in range(64):
                memory[unsafe_offset=i] = 0
            memory[unsafe_offset=0] = 1
            comptime for tile in range(8):
                memory[unsafe_offset=16 + 2 * tile] = 64
                memory[unsafe_offset=48 + tile] = 16
            llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](memory)


@always_inline
def end_tiles(amx: Bool):
    """Gives the tiles back, so that the thread's registers are small again.

    Args:
        amx: Whether AMX is granted.
    """
    comptime if HAS_AMX:
        if amx:
            llvm_intrinsic["llvm.x86.tilerelease", NoneType]()


@always_inline
def _load[tile: Int, dtype: DType](source: Data[dtype], bytes: Int):
    llvm_intrinsic["llvm.x86.tileloadd64", NoneType](Int8(tile), source, Int64(bytes))


@always_inline
def _dot[sums: Int, a: Int, b: Int]():
    llvm_intrinsic["llvm.x86.tdpbf16ps", NoneType](Int8(sums), Int8(a), Int8(b))


@no_inline
def _multiply_tiles[
    halves: Int
](left: Left, upper: Int, lower: Int, panel: Data[BF16], sums: Data[F32], fresh: Bool):
    """Multiplies the 16 pixels from `upper` on, and those from `lower`, by AMX: see `multiply`."""
    comptime for half in range(halves):
        comptime for side in range(2):
            if fresh:
                llvm_intrinsic["llvm.x86.tilezero", NoneType](Int8(2 * half + side))
            else:
                _load[2 * half + side](
                    sums.unsafe_offset(half * SIDE * BLOCK + side * SIDE), BLOCK * 4
                )
    var above, below = left.at(upper), left.at(lower)
    var pitch = left.pitch * 2
    var b = panel
    for tap in range(left.taps):
        var start = Int(left.offsets[unsafe_offset=tap])
        for k in range(start, start + left.depth, STEP):
            _load[6](b, STEP * 2)
            _load[4](above.unsafe_offset(k), pitch)
            _dot[0, 4, 6]()
            _load[7](b.unsafe_offset(TILE), STEP * 2)
            _dot[1, 4, 7]()
            comptime if halves == 2:
                _load[5](below.unsafe_offset(k), pitch)
                _dot[2, 5, 6]()
                _dot[3, 5, 7]()
            b = b.unsafe_offset(2 * TILE)
    comptime for half in range(halves):
        comptime for side in range(2):
            llvm_intrinsic["llvm.x86.tilestored64", NoneType](
                Int8(2 * half + side),
                sums.unsafe_offset(half * SIDE * BLOCK + side * SIDE),
                Int64(BLOCK * 4),
            )


@no_inline
def _multiply_rows(
    left: Left, first: Int, panel: Data[BF16], column: Int, sums: Data[F32], fresh: Bool
):
    """Multiplies ROWS pixels by 2 vectors of columns: see `multiply`."""
    var tile = Array[SIMD[F32, WIDTH], ROWS * 2](fill=0)
    if not fresh:
        comptime for i in range(ROWS * 2):
            tile[i] = sums.unsafe_load[width=WIDTH](i // 2 * BLOCK + column + i % 2 * WIDTH)
    var starts = Array[Int, 2](uninitialized=True)  # where the columns of a vector are in a tile
    comptime for v in range(2):
        var at = column + v * WIDTH
        starts[v] = at // SIDE * TILE + at % SIDE * 2
    var b = panel
    for tap in range(left.taps):
        var source = Array[Data[BF16], ROWS](uninitialized=True)
        comptime for i in range(ROWS):
            source[i] = left.at(first + i).unsafe_offset(Int(left.offsets[unsafe_offset=tap]))
        for k in range(0, left.depth, STEP):
            for pair in range(STEP // 2):
                var columns = Array[SIMD[BF16, 2 * WIDTH], 2](uninitialized=True)
                comptime for v in range(2):
                    columns[v] = b.unsafe_load[width=2 * WIDTH](starts[v] + pair * STEP)
                comptime if HAS_PAIRS and WIDTH == SIDE:
                    comptime for i in range(ROWS):
                        var a = bitcast[BF16, 2 * WIDTH](
                            SIMD[DType.uint32, WIDTH](
                                bitcast[DType.uint32, 1](
                                    source[i].unsafe_load[width=2](k + 2 * pair)
                                )
                            )
                        )
                        comptime for v in range(2):
                            tile[2 * i + v] = llvm_intrinsic[
                                "llvm.x86.avx512bf16.dpbf16ps.512", SIMD[F32, WIDTH]
                            ](tile[2 * i + v], a, columns[v])
                else:
                    comptime for odd in range(2):
                        comptime for i in range(ROWS):
                            var a = SIMD[F32, WIDTH](
                                widened(source[i][unsafe_offset=k + 2 * pair + odd])
                            )
                            comptime for v in range(2):
                                var bits = bitcast[DType.uint32, WIDTH](columns[v])
                                var wide = bits & 0xFFFF0000 if odd else bits << 16
                                tile[2 * i + v] = a.fma(bitcast[F32, WIDTH](wide), tile[2 * i + v])
            b = b.unsafe_offset(2 * TILE)
    comptime for i in range(ROWS * 2):
        sums.unsafe_store(i // 2 * BLOCK + column + i % 2 * WIDTH, tile[i])


@always_inline
def multiply(
    left: Left,
    upper: Int,
    lower: Int,
    halves: Int,
    panel: Data[BF16],
    sums: Data[F32],
    fresh: Bool,
    amx: Bool,
):
    """Multiplies 32 pixels, or 16, by a panel: sums[32, 32] (+)= left b.

    Args:
        left: The pixels.
        upper: The first of 16 of them.
        lower: The first of 16 others, if `halves` is 2.
        halves: 1 or 2.
        panel: 32 columns of b, as above.
        sums: The sums.
        fresh: Whether they begin with 0.
        amx: Whether AMX is granted, and `begin_tiles` was called.
    """
    comptime if HAS_AMX:
        if amx:
            if halves == 2:
                _multiply_tiles[2](left, upper, lower, panel, sums, fresh)
            else:
                _multiply_tiles[1](left, upper, lower, panel, sums, fresh)
            return
    for half in range(halves):
        for row in range(0, SIDE, ROWS):
            var to = sums.unsafe_offset((half * SIDE + row) * BLOCK)
            for column in range(0, BLOCK, 2 * WIDTH):
                _multiply_rows(left, (lower if half else upper) + row, panel, column, to, fresh)


@no_inline
def _store[
    epilogue: Epilogue
](
    o: Operands[BF16],
    sums: Data[F32],
    bias: Data[F32],
    m: _Pixels,
    start: Int,
    skip: Int,
    column: Int,
    columns: Int,
    f: Int,
):
    """Takes 16 pixels from `start` on through the epilogue into y, all but the first `skip`."""
    comptime VECTORS = BLOCK // WIDTH
    var output = Output[epilogue](bias, o.residual, o.y, o.alpha)
    var of = Array[Channels[WIDTH], VECTORS](fill=output.channels[WIDTH](0))
    comptime for v in range(1, VECTORS):
        of[v] = output.channels[WIDTH](v * WIDTH)
    var i = skip
    var end = min(SIDE, m.count - start)
    var p, q = divmod(start + skip, m.width) if m.width < UNBOUNDED else (0, start + skip)
    while i < end:
        # As many pixels as follow one another in y.
        var stop = min(end, i + m.q - q)
        var to = (m.first + p * m.q + q) * f + column
        for row in range(i, stop):
            var source = sums.unsafe_offset(row * BLOCK)
            if columns == BLOCK:
                comptime for v in range(VECTORS):
                    var at = v * WIDTH
                    output.finish(source.unsafe_load[width=WIDTH](at), of[v], to + at)
            else:
                output.finish_row(source, 0, to, columns)
            to += f
        i += max(0, stop - i) + m.width - max(q, m.q) if m.width < UNBOUNDED else SIDE
        p, q = p + 1, 0


@always_inline
def _zero(to: Data[BF16], begin: Int, end: Int):
    """Writes zeros from `begin` to `end`."""
    var whole = begin + (end - begin) // STEP * STEP
    for i in range(begin, whole, STEP):
        to.unsafe_store(i, SIMD[BF16, STEP](0))
    for i in range(whole, end):
        to[unsafe_offset=i] = 0


@always_inline
def _copy(to: Data[BF16], source: Data[BF16], count: Int):
    """Copies a whole number of steps."""
    for i in range(0, count, STEP):
        to.unsafe_store(i, source.unsafe_load[width=STEP](i))


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


struct Plan(TrivialRegisterPassable):
    """How a convolution or a product is divided into tasks."""

    var kind: Int
    """AS_IT_LIES, PLANES, ROWS or PATCHES."""
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
    comptime ROWS = 2
    """It lays out rows."""
    comptime PATCHES = 3
    """It lays out patches."""

    def __init__(out self, g: Geometry, work: Int):
        """Chooses about eight tasks a core, of as many as share `work` results evenly.

        What a task reads of x is read by as many tasks as the panels are divided among, and each
        panel once for each block of pixels: the two are balanced.

        Args:
            g: Sizes of the convolution, or of the product.
            work: Results of all that is computed together.
        """
        self.kind = Self.PATCHES
        if (
            g.groups == 1
            and g.c % STEP == 0
            and g.r * g.s <= TAPS
            and g.stride_h * g.stride_w <= 256
        ):
            self.kind = Self.AS_IT_LIES if g.pointwise() and g.pixels() >= SIDE else Self.PLANES
        elif g.groups == 1 and g.c % STEP > 0 and g.dilation_w == 1 and g.r <= TAPS:
            self.kind = Self.ROWS
        var panels = ceildiv(g.group_f(), BLOCK)
        var wanted = ceildiv(g.pixels() * g.f * 8 * parallelism_level(None), work)
        var ratio = Float64(g.pixels()) / Float64(g.f)
        var blocks = Int(sqrt(Float64(wanted) * ratio) + 0.5)
        # What a task lays out, or reads once for each panel, stays in the second-level cache.
        var size = g.pixels() * g.c
        if self.kind == Self.PATCHES:
            size = g.pixels() * depth_of(g)
        elif self.kind != Self.AS_IT_LIES:
            size *= g.stride_h * g.stride_w
        blocks = max(blocks, ceildiv(size, ROOM), 1)
        self.images = 1
        if self.kind == Self.PLANES or self.kind == Self.ROWS:
            self.images = g.n
            blocks = min(ceildiv(blocks, g.n), max(1, g.p * g.q // (4 * BLOCK)), g.p)
        else:
            blocks = min(blocks, ceildiv(g.pixels(), BLOCK))
        self.blocks = blocks
        var parts = ceildiv(wanted, blocks * self.images * g.groups)
        # Laying a window out costs about as much as two panels take to go through it.
        var least = 1 if self.kind == Self.AS_IT_LIES else 4
        self.share = min(panels, max(least, panels // max(1, parts)))
        self.shares = ceildiv(panels, self.share)

    @always_inline
    def by_rows(self) -> Bool:
        """Tells whether blocks are whole rows of an image.

        Returns:
            Whether planes or rows are laid out.
        """
        return self.kind == Self.PLANES or self.kind == Self.ROWS

    def pixels(self, g: Geometry, part: Int) -> Tuple[Int, Int]:
        """Finds a block.

        Args:
            g: As above.
            part: Its number.

        Returns:
            Its first pixel, and one beyond its last.
        """
        if self.by_rows():
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


struct _Scratch(TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    var sums: Data[F32]
    """Sums [32, 32]."""
    var bias: Data[F32]
    """Of a panel."""
    var config: Data[DType.uint8]
    """Of AMX's tiles."""
    var offsets: Data[DType.int64]
    """Of the taps of two sources."""
    var room: Data[BF16]
    """What is laid out."""

    comptime FIXED = 4 * BLOCK * (BLOCK + 1) + 64 + 8 * 2 * TAPS
    """Bytes of all but the room, and of the alignment to cache lines."""

    def __init__(out self, memory: Data[DType.uint8]):
        var start = memory.unsafe_offset(-Int(memory) % 64)
        self.sums = rebind[Data[F32]](start.unsafe_bitcast[Float32]())
        self.bias = self.sums.unsafe_offset(BLOCK * BLOCK)
        self.config = rebind[Data[DType.uint8]](
            self.bias.unsafe_offset(BLOCK).unsafe_bitcast[UInt8]()
        )
        self.offsets = rebind[Data[DType.int64]](
            self.config.unsafe_offset(64).unsafe_bitcast[Int64]()
        )
        self.room = rebind[Data[BF16]](
            self.offsets.unsafe_offset(2 * TAPS).unsafe_bitcast[BFloat16]()
        )


def _lay_planes(
    g: Geometry,
    o: Operands[BF16],
    n: Int,
    p: Int,
    rows: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> Left:
    """Lays out what `rows` of output from (n, p) on read: [phase, rows + extra, Q + extra, C].

    Numbers of the image are in the plane of the phases (h % stride, w % stride), at (h, w) // stride
    less the row and the column that the first window begins in.
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
                _zero(to, 0, width * g.c)
                continue
            _zero(to, 0, left * g.c)
            _zero(to, right * g.c, width * g.c)
            var w = (left + along.low) * g.stride_w + phase_w
            var source = o.x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c)
            if g.stride_w == 1:
                _copy(to.unsafe_offset(left * g.c), source, (right - left) * g.c)
            else:
                for j in range(left, right):
                    _copy(to.unsafe_offset(j * g.c), source, g.c)
                    source = source.unsafe_offset(g.stride_w * g.c)
    return Left(room, g.c, offsets, g.r * g.s, g.c)


def _lay_rows(
    g: Geometry,
    o: Operands[BF16],
    n: Int,
    p: Int,
    rows: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> Left:
    """Lays out what `rows` of output from (n, p) on read: [h % stride, rows + extra, W + padding, C]."""
    var down = _Reach(g.r, g.stride_h, g.pad_h, g.dilation_h)
    var height = rows + down.extra()
    var pitch = g.stride_w * g.c
    var wide = _row_width(g) * pitch
    var depth = ceildiv(g.s * g.c, STEP) * STEP
    # Numbers of a row that lie in the image.
    var left = min(g.pad_w * g.c, wide)
    var right = min(left + g.w * g.c, wide)
    for r in range(g.r):
        var at, phase = divmod(r * g.dilation_h - g.pad_h, g.stride_h)
        offsets[unsafe_offset=r] = Int64((phase * height + at - down.low) * wide)
    for phase in range(g.stride_h):
        for i in range(height):
            var to = room.unsafe_offset((phase * height + i) * wide)
            var h = (p + down.low + i) * g.stride_h + phase
            if h < 0 or h >= g.h:
                _zero(to, 0, wide)
                continue
            _zero(to, 0, left)
            var source = o.x.unsafe_offset((n * g.h + h) * g.w * g.c)
            var whole = (right - left) // STEP * STEP
            _copy(to.unsafe_offset(left), source, whole)
            for j in range(whole, right - left):
                to[unsafe_offset=left + j] = source[unsafe_offset=j]
            _zero(to, right, wide)
    _zero(room, g.stride_h * height * wide, g.stride_h * height * wide + SIDE * pitch + depth)
    return Left(room, pitch, offsets, g.r, depth)


@always_inline
def _row_width(g: Geometry) -> Int:
    """Counts the pixels from one row of output to the next, where rows are laid out."""
    return g.q - 1 + ceildiv(g.s, g.stride_w)


def _lay_patches(
    g: Geometry,
    o: Operands[BF16],
    first: Int,
    count: Int,
    channel: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> Left:
    """Lays out the patches of `count` pixels from `first` on: [count, K]."""
    var depth = depth_of(g)
    var c = g.group_c()
    for i in range(count):
        var n, pixel = divmod(first + i, g.p * g.q)
        var p, q = divmod(pixel, g.q)
        for r in range(g.r):
            var h = p * g.stride_h - g.pad_h + r * g.dilation_h
            var to = room.unsafe_offset(i * depth + r * (depth // g.r))
            for s in range(g.s):
                var w = q * g.stride_w - g.pad_w + s * g.dilation_w
                if h >= 0 and h < g.h and w >= 0 and w < g.w:
                    var source = o.x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c + channel)
                    for j in range(c):
                        to[unsafe_offset=s * c + j] = source[unsafe_offset=j]
                else:
                    _zero(to, s * c, s * c + c)
            _zero(to, g.s * c, depth // g.r)
    offsets[unsafe_offset=0] = 0
    return Left(room, depth, offsets, 1, depth)


@always_inline
def _square[
    epilogue: Epilogue, sources: Int
](
    left: Array[Left, sources],
    panels: Array[Data[BF16], sources],
    biases: Array[Data[F32], sources],
    o: Operands[BF16],
    m: _Pixels,
    f: Int,
    half: Int,
    column: Int,
    at: Int,
    last: Int,
    s: _Scratch,
    amx: Bool,
):
    """Computes 32 pixels, from the 16 of number `half` on, for 32 filters, from number `at` on.

    `panels` begin with filter `column`. The last 16 pixels overlap those before, where there are
    any, rather than go beyond.
    """
    var columns = min(BLOCK, last - at)
    if columns == BLOCK:
        comptime for v in range(0, BLOCK, WIDTH):
            var bias = biases[0].unsafe_load[width=WIDTH](at + v)
            comptime for i in range(1, sources):
                bias += biases[i].unsafe_load[width=WIDTH](at + v)
            s.bias.unsafe_store(v, bias)
    else:
        for j in range(columns):
            var bias = biases[0][unsafe_offset=at + j]
            comptime for i in range(1, sources):
                bias += biases[i][unsafe_offset=at + j]
            s.bias[unsafe_offset=j] = bias
    var halves = min(2, ceildiv(m.count, SIDE) - half)
    var upper = max(m.lowest, min(half * SIDE, m.count - SIDE))
    var lower = max(m.lowest, min(half * SIDE + SIDE, m.count - SIDE))
    comptime for i in range(sources):
        var panel = panels[i].unsafe_offset((at - column) * left[i].taps * left[i].depth)
        multiply(left[i], upper, lower, halves, panel, s.sums, i == 0, amx)
    _store[epilogue](o, s.sums, s.bias, m, upper, half * SIDE - upper, at, columns, f)
    if halves == 2:
        var sums = s.sums.unsafe_offset(SIDE * BLOCK)
        _store[epilogue](o, sums, s.bias, m, lower, half * SIDE + SIDE - lower, at, columns, f)


@no_inline
def _columns[
    epilogue: Epilogue, sources: Int
](
    left: Array[Left, sources],
    panels: Array[Data[BF16], sources],
    biases: Array[Data[F32], sources],
    o: Operands[BF16],
    m: _Pixels,
    f: Int,
    column: Int,
    last: Int,
    s: _Scratch,
    amx: Bool,
):
    """Multiplies the pixels of a task by the panels of columns `column` to `last`, and stores them.

    Panels that stay in the second-level cache together are gone through for each 32 pixels, so that
    y and the residual are gone through in the order of memory; of others each stays there for all.
    """
    begin_tiles(s.config, amx)
    var halves = ceildiv(m.count, SIDE)
    var depth = 0
    comptime for i in range(sources):
        depth += left[i].taps * left[i].depth
    if (last - column) * depth <= ROOM:
        for half in range(0, halves, 2):
            for at in range(column, last, BLOCK):
                _square[epilogue](left, panels, biases, o, m, f, half, column, at, last, s, amx)
    else:
        for at in range(column, last, BLOCK):
            for half in range(0, halves, 2):
                _square[epilogue](left, panels, biases, o, m, f, half, column, at, last, s, amx)
    end_tiles(amx)


def _room(g: Geometry, kind: Int, count: Int) -> Int:
    """Counts the numbers that are laid out for `count` pixels."""
    if kind == Plan.AS_IT_LIES:
        return 0
    if kind == Plan.PATCHES:
        return max(count, SIDE) * depth_of(g)
    var height = count // g.q + _Reach(g.r, g.stride_h, g.pad_h, g.dilation_h).extra()
    if kind == Plan.PLANES:
        var width = g.q + _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w).extra()
        return (g.stride_h * g.stride_w * height * width + SIDE) * g.c
    var pixels = g.stride_h * height * _row_width(g) + SIDE
    return pixels * g.stride_w * g.c + depth_of(g) // g.r


def _lay(
    g: Geometry,
    o: Operands[BF16],
    kind: Int,
    first: Int,
    count: Int,
    channel: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> Tuple[Left, _Pixels]:
    """Lays out what `count` pixels from `first` on read, if need be."""
    if kind == Plan.AS_IT_LIES:
        offsets[unsafe_offset=0] = 0
        var left = Left(o.x.unsafe_offset(first * g.c), g.c, offsets, 1, g.c)
        return left, _Pixels(first, count, UNBOUNDED, UNBOUNDED, -first)
    if kind == Plan.PATCHES:
        var left = _lay_patches(g, o, first, count, channel, offsets, room)
        return left, _Pixels(first, count, UNBOUNDED, UNBOUNDED, 0)
    var n, pixel = divmod(first, g.p * g.q)
    var p, rows = pixel // g.q, count // g.q
    var left: Left
    var width: Int
    if kind == Plan.PLANES:
        left = _lay_planes(g, o, n, p, rows, offsets, room)
        width = g.q + _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w).extra()
    else:
        left = _lay_rows(g, o, n, p, rows, offsets, room)
        width = _row_width(g)
    return left, _Pixels(first, (rows - 1) * width + g.q, width, g.q, 0)


def _are_finite(g: Geometry, x: Data[BF16], first: Int, last: Int) -> Bool:
    """Tells whether the rows of x that whole rows of pixels read hold neither NaN nor infinity."""
    var n, pixel = divmod(first, g.p * g.q)
    var p, rows = pixel // g.q, (last - first) // g.q
    var top = max(p * g.stride_h - g.pad_h, 0)
    var bottom = min((p + rows - 1) * g.stride_h - g.pad_h + (g.r - 1) * g.dilation_h + 1, g.h)
    var at = x.unsafe_offset((n * g.h + top) * g.w * g.c)
    var count = max(bottom - top, 0) * g.w * g.c
    var whole = count // STEP * STEP
    var most = SIMD[DType.uint16, STEP](0)
    for i in range(0, whole, STEP):
        most = max(most, bitcast[DType.uint16, STEP](at.unsafe_load[width=STEP](i)) & 0x7FFF)
    var highest = most.reduce_max()
    for i in range(whole, count):
        highest = max(highest, bitcast[DType.uint16, 1](at[unsafe_offset=i]) & 0x7FFF)
    return highest < 0x7F80


def gemm_block[
    epilogue: Epilogue
](
    g: Geometry,
    o: Operands[BF16],
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
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors; `w` begins with the panel of the first filter.
        kind: How the left side is laid out, as Plan says.
        first: The first pixel.
        last: One beyond the last pixel.
        channel: The first input channel of the group.
        column: The first filter.
        end: One beyond the last filter.
        amx: Whether AMX is granted.
    """
    var way = kind
    if kind == Plan.ROWS and not _are_finite(g, o.x, first, last):
        way = Plan.PATCHES
    var room = _room(g, way, last - first)
    var memory = alloc(Layout[UInt8](count=_Scratch.FIXED + 64 + 2 * room))
    var s = _Scratch(rebind[Data[DType.uint8]](memory.unsafe_ptr()))
    var left, m = _lay(g, o, way, first, last - first, channel, s.offsets, s.room)
    _columns[epilogue, 1]([left], [o.w], [o.bias], o, m, g.f, column, end, s, amx)
    dealloc(memory^)


def gemm[epilogue: Epilogue](g: Geometry, o: Operands[BF16]):
    """Computes a whole convolution or product on all cores, `o.w` packed in panels.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors.
    """
    gemm_group[epilogue, 1]([g], [o])


def gemm_group[
    epilogue: Epilogue, count: Int
](g: Array[Geometry, count], o: Array[Operands[BF16], count]):
    """Computes convolutions or products that do not read each other, in one loop over all cores.

    Parameters:
        epilogue: What the accumulators go through.
        count: How many there are.

    Args:
        g: Sizes of each.
        o: Tensors of each; `w` is packed in panels.
    """
    var work = 0
    comptime for i in range(count):
        work += g[i].pixels() * g[i].f
    var ends = Array[Int, count](fill=0)
    var plans = Array[Plan, count](fill=Plan(g[0], work))
    var tasks = 0
    comptime for i in range(count):
        plans[i] = Plan(g[i], work)
        tasks += plans[i].tasks(g[i])
        ends[i] = tasks
    var amx = amx_granted()

    def task(index: Int) {imm}:
        comptime for i in range(count):
            var start = ends[i - 1] if i > 0 else 0
            if start <= index < ends[i]:
                _task[epilogue](g[i], o[i], plans[i], index - start, amx)

    over_cores(task, tasks)


def _task[epilogue: Epilogue](g: Geometry, o: Operands[BF16], plan: Plan, index: Int, amx: Bool):
    """Computes a share of the panels of a group at one block of pixels."""
    var slot, part = divmod(index, plan.blocks * plan.images)
    var group, share = divmod(slot, plan.shares)
    var first, last = plan.pixels(g, part)
    var begin = group * g.group_f()
    var column = share * plan.share * BLOCK
    var panel = group * ceildiv(g.group_f(), BLOCK) + share * plan.share
    gemm_block[epilogue](
        g,
        o.shifted(w=panel * depth_of(g) * BLOCK),
        plan.kind,
        first,
        last,
        group * g.group_c(),
        begin + column,
        begin + min(column + plan.share * BLOCK, g.group_f()),
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
    var plan = Plan(side, g.pixels() * g.f)
    var least = g.pixels() if plan.kind == Plan.AS_IT_LIES else g.p // plan.blocks * g.q
    var lies = Plan(g, g.pixels() * g.f).kind == Plan.AS_IT_LIES
    if not lies or plan.kind > Plan.PLANES or side.s > 1 or least < SIDE:
        gemm[Epilogue("none")](side, beside)
        var joined = o
        joined.residual = o.y
        gemm[Epilogue("add_relu")](g, joined)
        return
    var amx = amx_granted()

    def task(index: Int) {var}:
        var share, part = divmod(index, plan.blocks * plan.images)
        var first, last = plan.pixels(g, part)
        var room = _room(side, plan.kind, last - first)
        var memory = alloc(Layout[UInt8](count=_Scratch.FIXED + 64 + 2 * room))
        var s = _Scratch(rebind[Data[DType.uint8]](memory.unsafe_ptr()))
        var left, _ = _lay(g, o, Plan.AS_IT_LIES, first, last - first, 0, s.offsets, s.room)
        var right, m = _lay(
            side, beside, plan.kind, first, last - first, 0, s.offsets.unsafe_offset(TAPS), s.room
        )
        var column = share * plan.share * BLOCK
        _columns[Epilogue("relu"), 2](
            [left, right],
            [o.w.unsafe_offset(column * g.c), beside.w.unsafe_offset(column * side.c)],
            [o.bias, beside.bias],
            o,
            m,
            g.f,
            column,
            min(column + plan.share * BLOCK, g.f),
            s,
            amx,
        )
        dealloc(memory^)

    over_cores(task, plan.tasks(side))
