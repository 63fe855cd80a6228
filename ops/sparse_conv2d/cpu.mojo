"""Sparse convolution on a CPU: y[m, f] = act(sum_j values[j] x[m, columns[j]] + bias[f] + residual).

Vectors run along pixels, so that a nonzero is one broadcast number times some vectors of x, which
is the product of Fast Sparse ConvNets (Elsen et al. 2020, arXiv:1911.09723) with the direct
convolution of Park et al. 2017 (arXiv:1608.01409): a tap of a window is an offset into x.

    x[N, H, W, C]        activations, float32
    stream               the nonzeros, by parts of the channels, then by filters (graphs/arrange.py)
    patch[C, S', plane]  a part of x turned over: pixels side by side
    sums[F, vectors]     of a block of pixels, before they are turned back
    y[N, P, Q, F]        result, float32

A task has a block of up to 16 vectors of pixels of one image, and all filters or some. Part by
part of the channels it turns what its pixels need of x over, in squares of vectors, into a patch
that stays in the first-level cache; then it goes through the filters, the sums of one in registers.
Rows of the padded image follow each other in a plane, so that a vector may go on in the next row:
each is `pitch` numbers long, room for its padding, which is shared with the next row's; the few
pixels that lie in the padding are computed and left out. With a stride each of its phases
has a plane of its own (S' of them), and pixels stay side by side. After the last part the sums are
turned back, a vector of filters at a time, and pass through the epilogue in whole vectors.

Bound by loads: one for each multiplication, two where a tap's vectors are not aligned.
docs/kernels.md has the figures.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, iota
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of
from std.sys.intrinsics import PrefetchOptions, prefetch
from std.utils import IndexList

from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..operands import F32, Data, Operands
from ..parallel import over_cores

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""
comptime CHANNELS = 16
"""Channels of a part are a multiple of it, as in graphs/arrange.py."""
comptime VECTORS = 16 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 12
"""Vectors of pixels of a task at most: the sums of a filter are in 16 of 32 registers, or 12 of 16.
"""
comptime FEW = 7
"""Vectors of a task where windows do not overlap: no more are needed to hide latencies."""
comptime LINE = 64
"""Bytes of a cache line."""


@fieldwise_init
struct Stream(TrivialRegisterPassable):
    """The nonzeros of a filter in the order of graphs/arrange.py."""

    var values: Data[F32]
    """The numbers."""
    var columns: Data[DType.int32]
    """(c * R + r) * S + s of each, c the channel in its part; ascending for each filter."""
    var starts: Data[DType.int32]
    """Where those of each filter begin in each part; parts * F + 1."""
    var parts: Int
    """Parts of the channels, even and in multiples of CHANNELS."""


struct _Plan(TrivialRegisterPassable):
    """How a convolution is divided into tasks, and where its pixels lie in them."""

    var g: Geometry
    """Sizes; all pixels are one row where windows are pixels."""
    var phases_h: Int
    """Planes for rows: the stride, or 1 where only one phase is read."""
    var phases_w: Int
    """Planes for columns, likewise."""
    var pitch: Int
    """Numbers from a row of a plane to the next."""
    var reach: Int
    """Numbers of a plane beyond the last pixel that its window reads."""
    var channels: Int
    """Channels of a part; the last one may have fewer."""
    var vectors: Int
    """Vectors of pixels of an image."""
    var blocks: Int
    """Blocks that they are divided into."""
    var split: Int
    """Tasks that share the filters of a block."""

    def __init__(out self, sizes: Geometry, parts: Int):
        var g = sizes
        if g.pointwise():
            g.q = g.w = g.pixels()
            g.n = g.h = g.p = 1
        self.g = g
        self.phases_h = g.stride_h if g.r > 1 else 1
        self.phases_w = g.stride_w if g.s > 1 else 1
        var right = (g.s - 1) * g.dilation_w // g.stride_w
        var down = (g.r - 1) * g.dilation_h // g.stride_h
        var shared = right  # columns of padding at the end of a row and the beginning of the next
        for phase in range(self.phases_w):
            var left = ceildiv(g.pad_w - phase, g.stride_w)
            var inside = ceildiv(g.w + g.pad_w - phase, g.stride_w)
            shared = max(0, min(shared, left, g.q + right - inside))
        self.pitch = g.q + right - shared
        self.reach = down * self.pitch + right
        self.channels = min(ceildiv(ceildiv(g.c, parts), CHANNELS) * CHANNELS, g.c)
        self.vectors = ceildiv((g.p - 1) * self.pitch + g.q, WIDTH)
        # Even blocks, enough for all cores unless they get too small to be worth what a task costs.
        var cores = parallelism_level(None)
        var blocks = ceildiv(self.vectors, FEW if g.r * g.s == 1 else VECTORS)
        if g.n * blocks < 8 * cores:
            blocks = ceildiv(ceildiv(g.n * blocks, cores) * cores, g.n)
        self.blocks = max(min(blocks, self.vectors // (FEW - 1)), ceildiv(self.vectors, VECTORS))
        self.split = min(ceildiv(cores, g.n * self.blocks), ceildiv(g.f, WIDTH))

    def plane(self, vectors: Int) -> Int:
        """Counts the numbers of a plane for a block of so many vectors."""
        return ceildiv(vectors * WIDTH + self.reach, WIDTH) * WIDTH

    def channel(self, vectors: Int) -> Int:
        """Counts the numbers of all planes of a channel."""
        return self.phases_h * self.phases_w * self.plane(vectors)


struct _Scratch(TrivialRegisterPassable):
    """What a task keeps in memory of its own."""

    var patch: Data[F32]
    """The part of x under the pixels: [channels, phases, plane]."""
    var sums: Data[F32]
    """Of each filter [vectors * WIDTH]: of all of the task, or of WIDTH if there is one part."""
    var zeros: Data[F32]
    """What the padding reads [C]."""
    var sources: Data[DType.int64]
    """Where the channels of each pixel of the planes begin in x; -1 in the padding."""
    var places: Data[DType.int64]
    """Where the filters of each pixel of the block begin in y; -1 in the padding."""
    var table: Data[DType.int32]
    """Where the taps of the channels of a part begin in the patch: [channels, R, S]."""

    def __init__(out self, plan: _Plan, memory: Data[F32], vectors: Int, rows: Int):
        self.patch = memory.unsafe_offset(-Int(memory) % LINE // 4)
        self.sums = self.patch.unsafe_offset(plan.channels * plan.channel(vectors))
        self.zeros = self.sums.unsafe_offset(rows * vectors * WIDTH)
        var whole = ceildiv(plan.g.c, WIDTH) * WIDTH
        self.sources = rebind[Data[DType.int64]](
            self.zeros.unsafe_offset(whole).unsafe_bitcast[Int64]()
        )
        self.places = self.sources.unsafe_offset(plan.channel(vectors) + WIDTH)
        self.table = rebind[Data[DType.int32]](
            self.places.unsafe_offset(vectors * WIDTH + WIDTH).unsafe_bitcast[Int32]()
        )

    @staticmethod
    def size(plan: _Plan, vectors: Int, rows: Int) -> Int:
        """Counts its numbers of 4 bytes."""
        return (
            (plan.channels + 2) * plan.channel(vectors)
            + (rows + 2) * vectors * WIDTH
            + ceildiv(plan.g.c, WIDTH) * WIDTH
            + plan.channels * plan.g.r * plan.g.s
            + 4 * WIDTH
            + LINE // 4
        )

    def prepare(self, plan: _Plan, image: Int, first: Int, vectors: Int):
        """Fills all but patch and sums, for the pixels of a plane from `first` on."""
        var g = plan.g
        for c in range(0, g.c, WIDTH):
            self.zeros.unsafe_store(c, SIMD[F32, WIDTH](0))
        var plane = plan.plane(vectors)
        for phase in range(plan.phases_h * plan.phases_w):
            var phase_h, phase_w = divmod(phase, plan.phases_w)
            var row, column = divmod(first, plan.pitch)
            var at = 0
            while at < plane:
                var h = row * g.stride_h + phase_h - g.pad_h
                var size = g.w if h >= 0 and h < g.h else 0
                var w = column * g.stride_w + phase_w - g.pad_w
                var to = self.sources.unsafe_offset(phase * plane + at)
                var count = min(plan.pitch - column, plane - at)
                _list(to, count, w, g.stride_w, size, (image * g.h + h) * g.w, g.c)
                at += count
                row, column = row + 1, 0
        var p, q = divmod(first, plan.pitch)
        var at = 0
        while at < vectors * WIDTH:
            var count = min(plan.pitch - q, vectors * WIDTH - at)
            var size = g.q if p < g.p else 0
            _list(self.places.unsafe_offset(at), count, q, 1, size, (image * g.p + p) * g.q, g.f)
            at += count
            p, q = p + 1, 0
        for r in range(g.r):
            var down, phase_h = divmod(r * g.dilation_h, g.stride_h)
            for s in range(g.s):
                var right, phase_w = divmod(s * g.dilation_w, g.stride_w)
                var at = (phase_h * plan.phases_w + phase_w) * plane
                at += down * plan.pitch + right
                for c in range(plan.channels):
                    self.table[unsafe_offset=(c * g.r + r) * g.s + s] = Int32(at)
                    at += plan.channel(vectors)


@always_inline
def _list(
    to: Data[DType.int64], count: Int, first: Int, step: Int, size: Int, row: Int, channels: Int
):
    """Lists where `count` pixels of a row of an image begin, `step` apart; -1 for those outside.

    Up to WIDTH - 1 more are written.
    """
    for i in range(0, count, WIDTH):
        var column = iota[DType.int64, WIDTH]() * Int64(step) + Int64(first + i * step)
        var inside = column.ge(0) & column.lt(Int64(size))
        to.unsafe_store(i, inside.select((column + Int64(row)) * Int64(channels), -1))


def sparse_conv2d_cpu[epilogue: Epilogue](g: Geometry, o: Operands[F32], stream: Stream):
    """Convolves on all cores.

    Parameters:
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes.
        o: Tensors; `w` is not read.
        stream: The filter.
    """
    var plan = _Plan(g, stream.parts)

    def task(index: Int) {var}:
        var slot, share = divmod(index, plan.split)
        _task[epilogue](plan, o, stream, slot // plan.blocks, slot % plan.blocks, share)

    over_cores(task, plan.g.n * plan.blocks * plan.split)


def _task[
    epilogue: Epilogue
](plan: _Plan, o: Operands[F32], stream: Stream, image: Int, block: Int, share: Int):
    """Computes a share of the filters for a block of pixels of an image."""
    var first = plan.vectors * block // plan.blocks
    var vectors = plan.vectors * (block + 1) // plan.blocks - first
    var groups = ceildiv(plan.g.f, WIDTH)
    var f_first = groups * share // plan.split * WIDTH
    var f_last = min(groups * (share + 1) // plan.split * WIDTH, plan.g.f)
    # Sums wait for the next part of the channels, or else pass on through the same small room.
    var rows = ceildiv(f_last - f_first, WIDTH) * WIDTH if stream.parts > 1 else WIDTH
    var memory = alloc(Layout[Float32](count=_Scratch.size(plan, vectors, rows)))
    var scratch = _Scratch(plan, rebind[Data[F32]](memory.unsafe_ptr()), vectors, rows)
    scratch.prepare(plan, image, first * WIDTH, vectors)
    for part in range(stream.parts):
        _lay_out(plan, o.x, scratch, part * plan.channels, vectors)
        var row = part * plan.g.f
        if part < stream.parts - 1:
            _add(plan, stream, scratch, row + f_first, f_last - f_first, vectors, 0, part == 0)
            continue
        for f in range(f_first, f_last, WIDTH):
            var count = min(WIDTH, f_last - f)
            var at = (f - f_first) % rows * vectors * WIDTH
            _add(plan, stream, scratch, row + f, count, vectors, at, part == 0)
            _finish[epilogue](o, scratch, f, count, vectors, at)
    dealloc(memory^)


def _lay_out(plan: _Plan, x: Data[F32], scratch: _Scratch, channel: Int, vectors: Int):
    """Turns the channels of a part over, from `channel` on, into the patch."""
    var g = plan.g
    var count = min(plan.channels, g.c - channel)
    var pitch = plan.channel(vectors)
    for at in range(0, pitch, WIDTH):
        var sources = Array[Data[F32], WIDTH](fill=scratch.zeros)
        var last = 0
        comptime for i in range(WIDTH):
            var source = Int(scratch.sources[unsafe_offset=at + i])
            if source >= 0:
                sources[i] = x.unsafe_offset(source + channel)
                last = source
        # Sources ascend. Fewer channels are read with what follows them, if x goes on so far.
        var whole = count >= WIDTH or last + channel + WIDTH <= g.n * g.h * g.w * g.c
        _turn_pixels(sources, count, whole, scratch.patch.unsafe_offset(at), pitch)


@no_inline
def _turn_pixels(
    sources: Array[Data[F32], WIDTH], count: Int, whole: Bool, to: Data[F32], pitch: Int
):
    """Turns `count` channels of WIDTH pixels over to to[count, pitch], in vectors if `whole`."""
    if not whole:
        for i in range(WIDTH):
            var source = sources.unsafe_ptr()[unsafe_offset=i]
            for c in range(count):
                to[unsafe_offset=c * pitch + i] = source[unsafe_offset=c]
        return
    for at in range(0, count, WIDTH):
        var c = max(0, min(at, count - WIDTH))
        var rows = Array[SIMD[F32, WIDTH], WIDTH](uninitialized=True)
        comptime for i in range(WIDTH):
            rows[i] = sources[i].unsafe_load[width=WIDTH](c)
        var columns = _turn_over(rows)
        comptime for i in range(WIDTH):
            if c + i < count:
                to.unsafe_store((c + i) * pitch, columns[i])


@always_inline
def _turn_over(rows: Array[SIMD[F32, WIDTH], WIDTH]) -> Array[SIMD[F32, WIDTH], WIDTH]:
    """Transposes: swaps the squares off the diagonal of 2 x 2, 4 x 4 and so on."""
    var now = rows.copy()
    comptime for side in [1, 2, 4, 8]:
        comptime if side < WIDTH:
            var then = now.copy()
            comptime for i in range(WIDTH):
                comptime if i & side == 0:
                    comptime upper = _halves(side, 0)
                    comptime lower = _halves(side, side)
                    then[i] = now[i].shuffle[mask=upper](now[i + side])
                    then[i + side] = now[i].shuffle[mask=lower](now[i + side])
            now = then^
    return now^


def _halves(side: Int, half: Int) -> IndexList[WIDTH]:
    """Lists what joins halves of two vectors: runs of `side` from `half` on, of each in turn."""
    var mask = IndexList[WIDTH]()
    for i in range(WIDTH):
        var run, at = divmod(i, 2 * side)
        mask[i] = run * 2 * side + half + at % side + (WIDTH if at >= side else 0)
    return mask


def _add(
    plan: _Plan,
    stream: Stream,
    scratch: _Scratch,
    row: Int,
    rows: Int,
    vectors: Int,
    at: Int,
    fresh: Bool,
):
    """Adds rows of the stream to their sums from `at` on, or begins them if `fresh`."""
    var step = plan.channel(vectors)
    comptime for count in range(1, VECTORS + 1):
        comptime for single in [False, True]:
            if vectors == count and (plan.g.r * plan.g.s == 1) == single:
                _accumulate[count, single](stream, row, rows, scratch, step, at, fresh)


@no_inline
def _accumulate[
    vectors: Int, single: Bool
](stream: Stream, row: Int, rows: Int, scratch: _Scratch, step: Int, at: Int, fresh: Bool):
    """Does so for blocks of so many vectors, of windows that are a single pixel or not."""
    var patch = scratch.patch
    var starts = stream.starts.unsafe_offset(row)
    for i in range(rows):
        var sums = scratch.sums.unsafe_offset(at + i * vectors * WIDTH)
        var acc = Array[SIMD[F32, WIDTH], vectors](fill=0)
        if not fresh:
            comptime for v in range(vectors):
                acc[v] = sums.unsafe_load[width=WIDTH](v * WIDTH)
        for j in range(Int(starts[unsafe_offset=i]), Int(starts[unsafe_offset=i + 1])):
            var weight = SIMD[F32, WIDTH](stream.values[unsafe_offset=j])
            var offset = Int(stream.columns[unsafe_offset=j])
            comptime if single:
                offset *= step
            else:
                offset = Int(scratch.table[unsafe_offset=offset])
            var source = patch.unsafe_offset(offset)
            comptime for v in range(vectors):
                acc[v] = source.unsafe_load[width=WIDTH](v * WIDTH).fma(weight, acc[v])
        comptime for v in range(vectors):
            sums.unsafe_store(v * WIDTH, acc[v])


comptime READ = PrefetchOptions().for_read().high_locality().to_data_cache()
"""Fetches what will be read."""
comptime WRITE = PrefetchOptions().for_write().high_locality().to_data_cache()
"""Fetches what will be written."""


@no_inline
def _finish[
    epilogue: Epilogue
](o: Operands[F32], scratch: _Scratch, f: Int, count: Int, vectors: Int, at: Int):
    """Takes the sums of `count` filters from `f` on through the epilogue into y.

    What the next filters write and read there is fetched meanwhile.
    """
    var output = Output[epilogue](o)
    var inside = iota[DType.int32, WIDTH]().lt(Int32(count))
    for v in range(vectors):
        var rows = Array[SIMD[F32, WIDTH], WIDTH](uninitialized=True)
        comptime for i in range(WIDTH):
            rows[i] = scratch.sums.unsafe_load[width=WIDTH](at + (i * vectors + v) * WIDTH)
        var columns = _turn_over(rows)
        var places = scratch.places.unsafe_offset(v * WIDTH)
        comptime for masked in [False, True]:
            if (count < WIDTH) == masked:
                var of = output.channels[WIDTH, masked](f, inside)
                comptime for i in range(WIDTH):
                    var to = Int(places[unsafe_offset=i]) + f
                    if to >= f:
                        output.finish[masked](columns[i], of, to, inside)
                        comptime if not masked:
                            comptime if epilogue.joins:
                                prefetch[READ](o.residual.unsafe_offset(to + WIDTH))
                            prefetch[WRITE](o.y.unsafe_offset(to + WIDTH))
