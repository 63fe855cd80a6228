"""GEMM in bfloat16 on a CPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters, as in cpu.mojo; sums are
float32, and a result is rounded once. A block of 32 pixels x 32 filters goes through all of K in
registers, by the best of three kernels that the CPU compiled for has:

    AMX           4 tiles of 16 x 16 sums (tdpbf16ps, 16 x 32 by 32 x 16), if Linux grants them
    AVX-512 BF16  8 pixels x 2 vectors (vdpbf16ps, pairs of K)
    others        the same in float32, each pair widened: right, but slower than float32's kernel

    x[N, H, W, C]                   activations, bfloat16
    b[panel, K / 32, 2, 16, 16, 2]  filters in panels of 32 columns, tiles of 16 pairs of K x 16
                                    columns; K ordered R, S, C, zero-padded (graphs/arrange.py)
    y[N, P, Q, F]                   result, bfloat16

All three want pixels at equal distances in memory, and taps of 32 x n numbers. A 1 x 1 convolution
and a product are so as they lie. For other convolutions of 32 x n channels a task lays out what it
reads in zero-padded planes, one for each phase of the stride: there every tap is a constant away
from its pixel, also where a row of pixels ends. The rest, the stem of 3 channels above all, lay out
patches[m, K].
"""

from max.runtime.asyncrt import parallelism_level
from std.ffi import external_call
from std.math import ceildiv, sqrt
from std.memory import Layout, alloc, bitcast, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.sys.intrinsics import llvm_intrinsic

from ..epilogue import Epilogue, activate
from ..geometry import Geometry
from ..operands import BF16, F32, Data, Operands, narrowed, widened
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


struct _Left(TrivialRegisterPassable):
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

    def __init__(
        out self, x: Data[BF16], pitch: Int, offsets: Data[DType.int64], taps: Int, depth: Int
    ):
        self.x, self.pitch, self.offsets, self.taps, self.depth = x, pitch, offsets, taps, depth

    @always_inline
    def at(self, pixel: Int) -> Data[BF16]:
        """Gives the first tap of a pixel."""
        return self.x.unsafe_offset(pixel * self.pitch)


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

    def __init__(out self, first: Int, count: Int, width: Int, q: Int):
        self.first, self.count, self.width, self.q = first, count, width, q


@always_inline
def _tile_config(memory: Data[DType.uint8]):
    """Configures 8 tiles of 16 rows of 64 bytes; `memory` has room for 64 bytes."""
    for i in range(64):
        memory[unsafe_offset=i] = 0
    memory[unsafe_offset=0] = 1
    comptime for tile in range(8):
        memory[unsafe_offset=16 + 2 * tile] = 64
        memory[unsafe_offset=48 + tile] = 16
    llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](memory)


@always_inline
def _load[tile: Int, dtype: DType](source: Data[dtype], bytes: Int):
    llvm_intrinsic["llvm.x86.tileloadd64", NoneType](Int8(tile), source, Int64(bytes))


@always_inline
def _dot[sums: Int, a: Int, b: Int]():
    llvm_intrinsic["llvm.x86.tdpbf16ps", NoneType](Int8(sums), Int8(a), Int8(b))


@no_inline
def _multiply_tiles[
    halves: Int
](left: _Left, upper: Int, lower: Int, panel: Data[BF16], sums: Data[F32], fresh: Bool):
    """Multiplies the 16 pixels from `upper` on, and those from `lower`, by AMX: see `_multiply`."""
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
    left: _Left, first: Int, panel: Data[BF16], column: Int, sums: Data[F32], fresh: Bool
):
    """Multiplies ROWS pixels by 2 vectors of columns: see `_multiply`."""
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
def _multiply(
    left: _Left,
    upper: Int,
    lower: Int,
    halves: Int,
    panel: Data[BF16],
    sums: Data[F32],
    fresh: Bool,
    amx: Bool,
):
    """Multiplies 16 pixels from `upper` on, and 16 from `lower` on if `halves` is 2, by a panel.

    Adds to sums[32, 32], or begins them if `fresh`.
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


@always_inline
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
    var begin = start + skip
    var p, q = divmod(begin, m.width)
    var to = (m.first + p * m.q + min(q, m.q)) * f + column
    for i in range(skip, min(SIDE, m.count - start)):
        if q < m.q:
            var row = sums.unsafe_offset(i * BLOCK)
            var whole = columns // WIDTH * WIDTH
            for j in range(0, whole, WIDTH):
                var value = row.unsafe_load[width=WIDTH](j).fma(
                    o.alpha, bias.unsafe_load[width=WIDTH](j)
                )
                comptime if epilogue.adds:
                    value += widened(o.residual.unsafe_load[width=WIDTH](to + j))
                o.y.unsafe_store(to + j, narrowed[BF16](activate[epilogue](value)))
            for j in range(whole, columns):
                var value = row[unsafe_offset=j] * o.alpha + bias[unsafe_offset=j]
                comptime if epilogue.adds:
                    value += widened(o.residual[unsafe_offset=to + j])
                o.y[unsafe_offset=to + j] = narrowed[BF16](activate[epilogue](value))
            to += f
        q += 1
        if q == m.width:
            q = 0


@always_inline
def _fill(to: Data[BF16], count: Int):
    """Writes zeros, a whole number of steps of them."""
    for i in range(0, count, STEP):
        to.unsafe_store(i, SIMD[BF16, STEP](0))


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
        """Chooses about eight tasks a core, of as many as share `work` results evenly.

        What a task reads of x is read by as many tasks as the panels are divided among, and each
        panel once for each block of pixels: the two are balanced.

        Args:
            g: Sizes of the convolution, or of the product.
            work: Results of all that is computed together.
        """
        var whole = g.group_c() % STEP == 0 and g.groups == 1
        self.kind = Self.PATCHES
        if g.pointwise() and whole and g.pixels() >= SIDE:
            self.kind = Self.AS_IT_LIES
        elif whole and g.r * g.s <= TAPS:
            self.kind = Self.PLANES
        var panels = ceildiv(g.group_f(), BLOCK)
        var wanted = ceildiv(g.pixels() * g.f * 8 * parallelism_level(None), work)
        # The depth of what a task keeps of a pixel while it goes through the panels.
        var depth = g.c if self.kind != Self.PATCHES else ceildiv(g.depth(), STEP) * STEP
        var ratio = Float64(g.pixels()) / Float64(g.f)
        var blocks = Int(sqrt(Float64(wanted) * ratio) + 0.5)
        var size = g.pixels() * depth
        if self.kind == Self.PLANES:
            size *= g.stride_h * g.stride_w
        blocks = max(blocks, ceildiv(size, ROOM), 1)
        self.images = 1
        if self.kind == Self.PLANES:
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


@always_inline
def _as_it_lies(g: Geometry, o: Operands[BF16], first: Int, offsets: Data[DType.int64]) -> _Left:
    offsets[unsafe_offset=0] = 0
    return _Left(o.x.unsafe_offset(first * g.c), g.c, offsets, 1, g.c)


def _lay_planes(
    g: Geometry,
    o: Operands[BF16],
    n: Int,
    p: Int,
    rows: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> _Left:
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
                _fill(to, width * g.c)
                continue
            _fill(to, left * g.c)
            _fill(to.unsafe_offset(right * g.c), (width - right) * g.c)
            var w = (left + along.low) * g.stride_w + phase_w
            var source = o.x.unsafe_offset(((n * g.h + h) * g.w + w) * g.c)
            if g.stride_w == 1:
                _copy(to.unsafe_offset(left * g.c), source, (right - left) * g.c)
            else:
                for j in range(left, right):
                    _copy(to.unsafe_offset(j * g.c), source, g.c)
                    source = source.unsafe_offset(g.stride_w * g.c)
    return _Left(room, g.c, offsets, g.r * g.s, g.c)


def _lay_patches(
    g: Geometry,
    o: Operands[BF16],
    first: Int,
    count: Int,
    channel: Int,
    offsets: Data[DType.int64],
    room: Data[BF16],
) -> _Left:
    """Lays out the patches of `count` pixels from `first` on: [count, K], zero-padded."""
    var depth = ceildiv(g.depth(), STEP) * STEP
    var c = g.group_c()
    var end = o.x.unsafe_offset(g.n * g.h * g.w * g.c - STEP)
    var n, pixel = divmod(first, g.p * g.q)
    var p, q = divmod(pixel, g.q)
    for i in range(count):
        var to = room.unsafe_offset(i * depth)
        var h0, w0 = p * g.stride_h - g.pad_h, q * g.stride_w - g.pad_w
        var inside = w0 >= 0 and w0 + g.s <= g.w and g.dilation_w == 1 and g.groups == 1
        for r in range(g.r):
            var h = h0 + r * g.dilation_h
            var row = o.x.unsafe_offset((n * g.h + h) * g.w * g.c + channel)
            if h >= 0 and h < g.h and inside:
                var source = row.unsafe_offset(w0 * g.c)
                for k in range(0, g.s * c, STEP):  # beyond the run the next one is to come
                    if source.unsafe_offset(k) <= end:
                        to.unsafe_store(k, source.unsafe_load[width=STEP](k))
                    else:
                        for j in range(k, min(k + STEP, g.s * c)):
                            to[unsafe_offset=j] = source[unsafe_offset=j]
                to = to.unsafe_offset(g.s * c)
                continue
            for s in range(g.s):
                var w = w0 + s * g.dilation_w
                var given = h >= 0 and h < g.h and w >= 0 and w < g.w
                for j in range(c):
                    to[unsafe_offset=j] = row[unsafe_offset=w * g.c + j] if given else 0
                to = to.unsafe_offset(c)
        for j in range(depth - g.depth()):
            to[unsafe_offset=j] = 0
        q += 1
        if q == g.q:
            p, q = p + 1, 0
            if p == g.p:
                n, p = n + 1, 0
    offsets[unsafe_offset=0] = 0
    return _Left(room, depth, offsets, 1, depth)


@no_inline
def _columns[
    epilogue: Epilogue, sources: Int
](
    left: Array[_Left, sources],
    panels: Array[Data[BF16], sources],
    biases: Array[Data[F32], sources],
    o: Operands[BF16],
    m: _Pixels,
    lowest: Int,
    f: Int,
    column: Int,
    last: Int,
    s: _Scratch,
    amx: Bool,
):
    """Multiplies the pixels of a task by the panels of columns `column` to `last`, and stores them.

    The last of 16 pixels overlap those before, down to pixel `lowest`, rather than go beyond.
    """
    comptime if HAS_AMX:
        if amx:
            _tile_config(s.config)
    var halves = ceildiv(m.count, SIDE)
    var panel = panels.copy()
    for at in range(column, last, BLOCK):
        var columns = min(BLOCK, last - at)
        for j in range(columns):
            var sum = Float32(0)
            comptime for i in range(sources):
                sum += biases[i][unsafe_offset=at + j]
            s.bias[unsafe_offset=j] = sum
        for half in range(0, halves, 2):
            var count = min(2, halves - half)
            var upper = max(lowest, min(half * SIDE, m.count - SIDE))
            var lower = max(lowest, min(half * SIDE + SIDE, m.count - SIDE))
            comptime for i in range(sources):
                _multiply(left[i], upper, lower, count, panel[i], s.sums, i == 0, amx)
            _store[epilogue](o, s.sums, s.bias, m, upper, half * SIDE - upper, at, columns, f)
            if count == 2:
                var sums = s.sums.unsafe_offset(SIDE * BLOCK)
                var skip = half * SIDE + SIDE - lower
                _store[epilogue](o, sums, s.bias, m, lower, skip, at, columns, f)
        comptime for i in range(sources):
            panel[i] = panel[i].unsafe_offset(left[i].taps * left[i].depth * BLOCK)
    comptime if HAS_AMX:
        if amx:
            llvm_intrinsic["llvm.x86.tilerelease", NoneType]()


comptime UNBOUNDED = 1 << 40
"""The width of pixels without rows."""


def gemm_block[
    epilogue: Epilogue
](
    g: Geometry,
    o: Operands[BF16],
    first: Int,
    last: Int,
    channel: Int,
    column: Int,
    end: Int,
    amx: Bool,
    planes: Bool = False,
):
    """Computes the pixels `first` to `last` for the filters `column` to `end` of a group.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes of the convolution, or of the product.
        o: Its tensors; `w` begins with the panel of the first filter.
        first: The first pixel.
        last: One beyond the last pixel.
        channel: The first input channel of the group.
        column: The first filter.
        end: One beyond the last filter.
        amx: Whether AMX is granted.
        planes: Whether to lay planes out; then the pixels are whole rows of one image.
    """
    var count = last - first
    var m = _Pixels(first, count, UNBOUNDED, UNBOUNDED)
    var rows = count // g.q
    var depth = ceildiv(g.depth(), STEP) * STEP
    var whole = g.pointwise() and g.c % STEP == 0 and g.pixels() >= SIDE
    var room = 0
    if planes:
        var down = _Reach(g.r, g.stride_h, g.pad_h, g.dilation_h)
        var along = _Reach(g.s, g.stride_w, g.pad_w, g.dilation_w)
        var width = g.q + along.extra()
        m = _Pixels(first, (rows - 1) * width + g.q, width, g.q)
        room = (g.stride_h * g.stride_w * (rows + down.extra()) * width + SIDE) * g.c
    elif not whole:
        room = (max(count, SIDE) + 1) * depth
    var memory = alloc(Layout[UInt8](count=_Scratch.FIXED + 64 + 2 * room))
    var s = _Scratch(rebind[Data[DType.uint8]](memory.unsafe_ptr()))
    var left: _Left
    if planes:
        var n, pixel = divmod(first, g.p * g.q)
        left = _lay_planes(g, o, n, pixel // g.q, rows, s.offsets, s.room)
    elif whole:
        left = _as_it_lies(g, o, first, s.offsets)
    else:
        left = _lay_patches(g, o, first, count, channel, s.offsets, s.room)
    _columns[epilogue, 1](
        [left], [o.w], [o.bias], o, m, -first if whole else 0, g.f, column, end, s, amx
    )
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
    var first: Int
    var last: Int
    if plan.kind == Plan.PLANES:
        var n, block = divmod(part, plan.blocks)
        first = (n * g.p + g.p * block // plan.blocks) * g.q
        last = (n * g.p + g.p * (block + 1) // plan.blocks) * g.q
    else:
        var units = ceildiv(g.pixels(), BLOCK)
        first = units * part // plan.blocks * BLOCK
        last = min(units * (part + 1) // plan.blocks * BLOCK, g.pixels())
    var panels = ceildiv(g.group_f(), BLOCK)
    var steps = ceildiv(g.depth(), STEP)
    var column = share * plan.share * BLOCK
    gemm_block[epilogue](
        g,
        o.shifted(w=(group * panels + share * plan.share) * steps * 2 * TILE),
        first,
        last,
        group * g.group_c(),
        group * g.group_f() + column,
        group * g.group_f() + min(column + plan.share * BLOCK, g.group_f()),
        amx,
        plan.kind == Plan.PLANES,
    )


def gemm_shortcut(g: Geometry, o: Operands[BF16], side: Geometry, beside: Operands[BF16]):
    """Computes relu of the sum of two convolutions into one y, on all cores.

    Args:
        g: Sizes of the first.
        o: Its tensors.
        side: Sizes of the second, which gives as many pixels and filters; neither has groups.
        beside: Its tensors; y is the first's.
    """
    gemm[Epilogue("none")](side, beside)
    var joined = o
    joined.residual = o.y
    gemm[Epilogue("add_relu")](g, joined)
