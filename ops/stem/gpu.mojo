"""A network's stem on NVIDIA's tensor cores, in one kernel from pixels to maps or tokens.

    v[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c]      uint8 x; other x is v; zero outside
    z[n, p, q, f] = bias[f] + sum_rsc v[n, p * stride - pad + r, q * stride - pad + s, c] w[r, s, c, f]
    y = the maximum of relu(z) over 3x3 windows of stride 2, padding 1        (ResNet), or
    y = (z - mean_f z) / sqrt(var_f z + eps) * gamma + beta                   (CvT), or
    y = act(z)                                                                (EfficientNet)

    x[N, H, W, C]                        uint8, or floats that are normalised; C <= 4
    w[F / 32, K / 16, 2, 32, 4, 2]       filters in the order that the lanes of a warp hold them
    y[N, P', Q', F]                      bfloat16, float16 or uint8 (rounded to nearest even, saturated);
                                         F at most 256, a multiple of 32, or of 8 for act: w is filled
                                         up with zeros to 32

An implicit GEMM (M = F, N pixels, K = R * S * C) whose patches need no building: with C channels
side by side, a row of the window is one run of S * C numbers. The block normalises the input rows
of its tile into shared memory, padding and all; a run begins at an even number there, so each
register of an mma's B is one 32-bit load, free of bank conflicts at stride 2 (where C and the stride
are odd, a pixel takes C + 1 numbers there). Runs are filled up
to a multiple of 8 with zero filters (21 to 24: K is 168). A warp keeps the fragments of its 32
filters in registers and walks over the tile, 4 rows x 8 columns at a time: what it loads of an
input row serves all rows of the convolution that see it. Accumulation in float32.

A lane has two neighbouring columns, so the pool is a maximum within it and one shuffle; z is never
stored. The result is turned over in registers (movmatrix) and stored 8 filters at a time. Layer norm
rounds z once, to y's type, and combines the statistics of warps (Chan et al. 1979, "Updating
formulae"), never E[z^2] - E[z]^2.

ResNet's, batch 256 at 224 px on an H200 (2026-11-21): 202 us, 60 % of the time the tensor cores (mma)
are busy; CvT's: 126 us, bound by the filling of shared memory. docs/kernels.md has the rest. On
Hopper ResNet's stem of images 224 px wide is hopper.mojo's.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.gpu.sync import syncwarp
from std.math import ceildiv, sqrt
from std.memory import bitcast
from std.sys import inlined_assembly, is_nvidia_gpu, llvm_intrinsic, size_of
from std.utils import IndexList, StaticTuple

from ..choice import Cheapest
from ..device import Device
from ..epilogue import activate
from ..hopper.ptx import mma_sync, mma_sync_short, packed
from ..launch import launch
from ..operands import F32, Data, Shared, dtypes, narrowed
from ..rows import over_lanes
from ..target import IS_HOPPER
from .config import GROUP, SHARED, STEP_ROWS, WARP_FILTERS, Stem, StemOperands, Tiling
from .hopper import fits, largest, stem_maxpool_hopper, takes

comptime MOST_THREADS = 384
"""Threads that share a multiprocessor: more than a block has, a bound of 168 registers."""
comptime STEP[stem: Stem] = Int32(STEP_ROWS * stem.stride * stem.pitch() // 2)
"""Words of shared memory from one step of a warp to the next.

Parameters:
    stem: Compile-time sizes.
"""
comptime ACROSS[stem: Stem] = Int32(GROUP * stem.stride * stem.cells() // 2)
"""Words of shared memory from one group of columns to the next.

Parameters:
    stem: Compile-time sizes.
"""


@always_inline
def _normalised[
    dtype: DType, pixel: DType, stem: Stem, first: Int
](level: SIMD[F32, 8], mean: Array[Float32, 4], scale: Array[Float32, 4]) -> SIMD[dtype, 8]:
    """Normalises numbers `first` to `first + 7` of 8 pixels in shared memory."""
    comptime if pixel != DType.uint8:
        return level.cast[dtype]()
    var value = level
    comptime for i in range(8):
        comptime cell = (first + i) % stem.cells()
        value[i] = (level[i] - mean[cell]) * scale[cell]
    return value.cast[dtype]()


@always_inline
def _spread[
    pixel: DType, size: Int, //, stem: Stem, first: Int
](level: Array[SIMD[pixel, 8], size], start: Int) -> SIMD[F32, 8]:
    """Gives numbers `first` to `first + 7` of 8 pixels in shared memory, from C vectors of them."""
    comptime if stem.cells() == stem.c:
        return level[start + first // 8].cast[F32]()
    var value = SIMD[F32, 8](0)
    comptime for i in range(8):
        comptime at = (first + i) // stem.cells()
        comptime c = (first + i) % stem.cells()
        comptime if c < stem.c:
            comptime source = at * stem.c + c
            value[i] = level[start + source // 8][source % 8].cast[F32]()
    return value


@always_inline
def _load[
    pixel: DType, size: Int, //, stem: Stem
](x: Data[pixel], at: Int, mut level: Array[SIMD[pixel, 8], size], to: Int):
    """Reads 8 pixels from x[at] on into C vectors."""
    comptime if pixel == DType.uint8:
        # Whole words around the chunk, shifted into place.
        var address = Int(x) + at
        var words = Data[DType.uint32](unsafe_from_address=address // 4 * 4)
        var shift = UInt32(address % 4 * 8)
        var word = Array[UInt32, 2 * stem.c + 1](uninitialized=True)
        comptime for i in range(2 * stem.c):
            word[i] = words[unsafe_offset=i]
        word[2 * stem.c] = words[unsafe_offset=(address % 4 + 8 * stem.c - 1) // 4]
        comptime for i in range(stem.c):
            var low = llvm_intrinsic["llvm.fshr.i32", UInt32, has_side_effect=False](
                word[2 * i + 1], word[2 * i], shift
            )
            var high = llvm_intrinsic["llvm.fshr.i32", UInt32, has_side_effect=False](
                word[2 * i + 2], word[2 * i + 1], shift
            )
            level[to + i] = bitcast[pixel, 8](SIMD[DType.uint32, 2](low, high))
    else:
        comptime for i in range(stem.c):
            level[to + i] = x.unsafe_load[width=8, alignment=size_of[pixel]()](at + 8 * i)


@always_inline
def _fill[
    dtype: DType, pixel: DType, //, stem: Stem
](
    o: StemOperands[dtype, pixel, _],
    t: Tiling,
    n: Int32,
    h0: Int32,
    w0: Int32,
    rows: Int32,
    tile: Shared[dtype],
):
    """Normalises the input rows from h0 on, from column w0 on, into shared memory."""
    comptime CHUNK = Int32(8 * stem.c)
    comptime STORED = Int32(8 * stem.cells())
    # Chunks that a thread has on their way from memory at a time.
    comptime BATCH = 3 if pixel == DType.uint8 else 1
    var mean = Array[Float32, 4](fill=0)
    var scale = Array[Float32, 4](fill=0)
    comptime if pixel == DType.uint8:
        comptime for c in range(stem.c):
            mean[c] = o.mean[unsafe_offset=c]
            scale[c] = o.scale[unsafe_offset=c]
    var chunks = Int32(stem.chunks(Int(t.groups)))
    var row_size = t.w * Int32(stem.c)
    var start = w0 * Int32(stem.c)
    # Chunks that lie in the image; the others are padding, or partly so.
    var low = min(max(ceildiv(-start, CHUNK), 0), chunks)
    # Whole words are read, and behind an image that ends within one there may be no memory of ours.
    var rest_of_word = Int32(0)
    comptime if pixel == DType.uint8:
        rest_of_word = 3 if t.h * row_size % 4 != 0 else 0
    var high = min(max((row_size - start - rest_of_word) // CHUNK, low), chunks)
    var span = high - low
    var threads = Int32(block_dim.x)
    var image = Int(n) * Int(t.h)

    # This thread's next chunk, and how far apart its chunks are.
    var width = UInt32(max(span, 1))
    var at_row = Int32(UInt32(thread_idx.x) // width)
    var at_chunk = Int32(UInt32(thread_idx.x) % width)
    var down = Int32(UInt32(threads) // width)
    var across = Int32(UInt32(threads) % width)
    while at_row < rows and span > 0:
        var row = Array[Int32, BATCH](fill=-1)
        var chunk = Array[Int32, BATCH](fill=0)
        var level = Array[SIMD[pixel, 8], BATCH * stem.c](fill=SIMD[pixel, 8](0))
        comptime for b in range(BATCH):
            if at_row < rows:
                row[b] = at_row
                chunk[b] = low + at_chunk
                var h = h0 + at_row
                if h >= 0 and h < t.h:
                    var at = (image + Int(h)) * Int(row_size) + Int(start + chunk[b] * CHUNK)
                    _load[stem](o.x, at, level, b * stem.c)
            at_row += down
            at_chunk += across
            if at_chunk >= span:
                at_chunk -= span
                at_row += 1
        comptime for b in range(BATCH):
            if row[b] >= 0:
                var h = h0 + row[b]
                var to = tile.unsafe_offset(Int(row[b] * Int32(stem.pitch()) + chunk[b] * STORED))
                comptime for i in range(stem.cells()):
                    var value = _normalised[dtype, pixel, stem, 8 * i](
                        _spread[stem, 8 * i](level, b * stem.c), mean, scale
                    )
                    if h < 0 or h >= t.h:
                        value = 0
                    to.unsafe_store[alignment=16](8 * i, value)

    var rest = chunks - span
    for edge in range(Int32(thread_idx.x), rows * rest, threads):
        var row = Int32(UInt32(edge) // UInt32(rest))
        var chunk = edge - row * rest
        if chunk >= low:
            chunk += span
        var to = tile.unsafe_offset(Int(row * Int32(stem.pitch()) + chunk * STORED))
        var h = h0 + row
        var first = start + chunk * CHUNK
        var at = (image + Int(h)) * Int(row_size) + Int(first)
        comptime for i in range(stem.cells()):
            var value = SIMD[F32, 8](0)
            var inside = SIMD[DType.bool, 8](fill=False)
            comptime for j in range(8):
                comptime c = (8 * i + j) % stem.cells()
                comptime source = (8 * i + j) // stem.cells() * stem.c + c
                var index = first + Int32(source)
                if c < stem.c and h >= 0 and h < t.h and index >= 0 and index < row_size:
                    value[j] = o.x[unsafe_offset=at + source].cast[F32]()
                    inside[j] = True
            var result = _normalised[dtype, pixel, stem, 8 * i](value, mean, scale)
            to.unsafe_store[alignment=16](8 * i, inside.select(result, SIMD[dtype, 8](0)))


@always_inline
def _halves[out: DType](z: SIMD[F32, 4]) -> SIMD[DType.uint32, 2]:
    """Rounds two pairs to halves.

    Bytes fill the lower parts of the first pair's halves and the upper ones of the second's, with
    zeros beside: they sort as halves do, and `|` puts both pairs together.
    """
    comptime if size_of[out]() == 2:
        return bitcast[DType.uint32, 2](narrowed[out](z))
    else:
        var four = bitcast[DType.uint32, 1](narrowed[out](z.shuffle[0, 2, 1, 3]()))
        return SIMD[DType.uint32, 2](four & 0x00FF00FF, four & 0xFF00FF00)


@always_inline
def _rectified[out: DType](z: SIMD[F32, 4]) -> SIMD[DType.uint32, 2]:
    """Rounds two pairs to halves; what is below zero becomes zero, as it does in uint8 anyway."""
    comptime if size_of[out]() == 2:
        return SIMD[DType.uint32, 2](
            packed[out, relu=True](z[0], z[1]), packed[out, relu=True](z[2], z[3])
        )
    else:
        return _halves[out](z)


@always_inline
def _turned[out: DType](pairs: SIMD[DType.uint32, 2]) -> SIMD[out, 4]:
    """Turns over two pairs of columns of a filter each: gives four filters of a column."""
    comptime if size_of[out]() == 2:
        return bitcast[out, 4](SIMD[DType.uint32, 2](_transposed(pairs[0]), _transposed(pairs[1])))
    else:
        return bitcast[out, 4](_transposed(pairs[0] | pairs[1])).shuffle[0, 2, 1, 3]()


@always_inline
def _transposed(a: UInt32) -> UInt32:
    """Turns over an 8 x 8 matrix of halves, two of row `lane / 4` in each lane."""
    return inlined_assembly[
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        UInt32,
        constraints="=r,r",
        has_side_effect=False,
    ](a)


@always_inline
def _multiply[
    dtype: DType, pixel: DType, stem: Stem, rows: Int
](
    at: Shared[DType.uint32],
    w: Array[UInt32, 8 * stem.depths()],
    bias: Array[SIMD[F32, 4], 2],
) -> Array[SIMD[F32, 4], 2 * rows]:
    """Multiplies 32 filters by 8 columns of each of some rows, into [row][m-tile].

    Input row i is under tap r of row j where i = j * stride + r. Numbers that fill a run up meet
    zeros; those that may be infinite or NaN, which uint8 cannot, are set to 0 before.
    """
    comptime UNITS = stem.row_units()
    comptime LEFT = stem.s * stem.cells() - 8 * (UNITS - 1)
    var first = Int(thread_idx.x) % 4 * 2
    var mask = UInt32(0xFFFF if first < LEFT else 0) | UInt32(0xFFFF0000 if first + 1 < LEFT else 0)
    comptime PAIRS = UNITS // 2
    comptime PITCH = stem.pitch() // 2
    var acc = Array[SIMD[F32, 4], 2 * rows](uninitialized=True)
    comptime for j in range(rows):
        comptime for m in range(2):
            acc[2 * j + m] = bias[m]
    # In rounds of input rows i, i + R, i + 2 R: together they are under one tap of every row, so
    # that each round has products for all accumulators.
    comptime WRAPS = ceildiv(stem.input_rows(rows), stem.r)
    comptime for turn in range(stem.r * WRAPS):
        comptime i = turn // WRAPS + turn % WRAPS * stem.r
        comptime if i >= stem.input_rows(rows):
            continue
        comptime for pair in range(PAIRS):
            var b = SIMD[DType.uint32, 2](
                at[unsafe_offset=i * PITCH + 8 * pair], at[unsafe_offset=i * PITCH + 8 * pair + 4]
            )
            comptime if pixel != DType.uint8 and UNITS % 2 == 0 and pair == PAIRS - 1:
                b[1] &= mask
            comptime for j in range(rows):
                comptime r = i - j * stem.stride
                comptime if r >= 0 and r < stem.r:
                    comptime for m in range(2):
                        comptime k = 8 * (r * PAIRS + pair) + 4 * m
                        var a = SIMD[DType.uint32, 4](w[k], w[k + 1], w[k + 2], w[k + 3])
                        acc[2 * j + m] = mma_sync[dtype](a, b, acc[2 * j + m])
        # The last units of this row and the next, for the rows that see this one under an even tap.
        comptime if UNITS % 2 == 1 and (stem.stride % 2 == 1 or i % 2 == 0):
            var b = SIMD[DType.uint32, 2](at[unsafe_offset=i * PITCH + 8 * PAIRS], 0)
            comptime if i + 1 < stem.input_rows(rows):
                b[1] = at[unsafe_offset=(i + 1) * PITCH + 8 * PAIRS]
            comptime if pixel != DType.uint8:
                b &= mask
            comptime for j in range(rows):
                comptime r = i - j * stem.stride
                comptime if r >= 0 and r < stem.r and r % 2 == 0:
                    comptime for m in range(2):
                        comptime k = 8 * (stem.r * PAIRS + r // 2) + 4 * m
                        var a = SIMD[DType.uint32, 4](w[k], w[k + 1], w[k + 2], w[k + 3])
                        ref sum = acc[2 * j + m]
                        comptime if r + 1 < stem.r:
                            sum = mma_sync[dtype](a, b, sum)
                        else:  # the first halves only
                            sum = mma_sync_short[dtype](a.slice[2](), b[0], sum)
    return acc^


@always_inline
def _pool[
    dtype: DType, pixel: DType, stem: Stem, out: DType
](
    o: Data[out],
    t: Tiling,
    n: Int32,
    row0: Int32,
    column0: Int32,
    w: Array[UInt32, 8 * stem.depths()],
    bias: Array[SIMD[F32, 4], 2],
    lanes: Shared[DType.uint32],
    beyond: Shared[DType.uint32],
):
    """Convolves the tile, rectifies and pools; the warps of a slice share its groups."""
    var slices = Int32(t.slices[stem]())
    var splits = Int32(t.warps[stem]()) // slices
    var warp_index = Int32(thread_idx.x) // 32
    var lane = Int32(thread_idx.x) % 32
    var g = lane // 4
    var quad = lane % 4
    var split = warp_index // slices
    var channel = Int((warp_index - split * slices) * WARP_FILTERS + quad * 8)
    var p0 = row0 * 2
    var q0 = column0 * 2
    var inside = q0 >= 0 and p0 + t.steps * STEP_ROWS <= t.p and q0 + t.groups * GROUP <= t.q
    # For each warp and step, a column of two output rows: the last of the group to the left,
    # and the first of the warp's first group, which waits for another warp's last.
    var edge = beyond.unsafe_offset(Int((warp_index * t.steps) * 32 + g * 4))
    var before = beyond.unsafe_offset(Int(((warp_index - slices) * t.steps) * 32 + g * 4))
    var waiting = edge.unsafe_offset(Int(slices * splits * t.steps * 32))
    var begin = split * t.groups // splits
    var end = (split + 1) * t.groups // splits

    @always_inline
    def store(pooled: Array[UInt32, 4], step: Int32, group: Int32, first: Int32, last: Int32) {var}:
        """Stores two output rows of a group's 4 columns, from column `first` to before `last`."""
        var low = _turned[out](SIMD[DType.uint32, 2](pooled[0], pooled[1]))
        var high = _turned[out](SIMD[DType.uint32, 2](pooled[2], pooled[3]))
        var row = row0 + 2 * step + g % 2
        var column = group * (GROUP // 2) + g // 2
        if column >= first and column < last and row < t.out_p:
            var pixel = (Int(n) * Int(t.out_p) + Int(row)) * Int(t.out_q) + Int(column0 + column)
            o.unsafe_store[alignment=8 * size_of[out]()](pixel * Int(t.f) + channel, low.join(high))

    for group in range(begin, end):
        var at = lanes.unsafe_offset(Int(group * ACROSS[stem]))
        var column = q0 + group * GROUP + 2 * quad
        var kept = UInt32(0xFFFF if column >= 0 and column < t.q else 0)
        kept |= UInt32(0xFFFF0000 if column + 1 >= 0 and column + 1 < t.q else 0)
        # The row above, rectified: pairs of columns, [m-tile][filters g, g + 8].
        var carry = Array[UInt32, 4](fill=0)
        if t.lead_p > 0:
            if p0 > 0:
                var z = _multiply[dtype, pixel, stem, 1](at, w, bias)
                comptime for m in range(2):
                    var two = _rectified[out](z[m])
                    carry[2 * m] = kept & two[0]
                    carry[2 * m + 1] = kept & two[1]
            at = at.unsafe_offset(stem.stride * stem.pitch() // 2)
        for step in range(t.steps):
            var z = _multiply[dtype, pixel, stem, STEP_ROWS](at, w, bias)
            at = at.unsafe_offset(Int(STEP[stem]))
            var pairs = Array[UInt32, 4 * STEP_ROWS](uninitialized=True)
            comptime for j in range(STEP_ROWS):
                comptime for m in range(2):
                    var two = _rectified[out](z[2 * j + m])
                    pairs[4 * j + 2 * m], pairs[4 * j + 2 * m + 1] = two[0], two[1]
            if not inside:
                comptime for j in range(STEP_ROWS):
                    var mask = kept if p0 + step * STEP_ROWS + Int32(j) < t.p else 0
                    comptime for i in range(4):
                        pairs[4 * j + i] &= mask
            # The windows of two output rows: the row above, 0, 1 and 1, 2, 3.
            var both = Array[UInt32, 4](uninitialized=True)
            var right = Array[UInt32, 4](uninitialized=True)
            comptime for i in range(4):
                var upper = largest(largest(carry[i], pairs[i]), pairs[4 + i])
                var lower = largest(largest(pairs[4 + i], pairs[8 + i]), pairs[12 + i])
                carry[i] = pairs[12 + i]
                right[i] = upper >> 16 | lower & 0xFFFF0000
                both[i] = largest(upper & 0xFFFF | lower << 16, right[i])
            var left = Array[UInt32, 4](uninitialized=True)
            comptime for i in range(4):
                left[i] = warp.shuffle_up(right[i], 1)
            var here = edge.unsafe_offset(Int(step * 32))
            if quad == 0:
                var outer = SIMD[DType.uint32, 4](0)
                if group > begin:
                    outer = here.unsafe_load[width=4, alignment=16]()
                comptime for i in range(4):
                    left[i] = outer[i]
            syncwarp()
            if quad == 3:
                here.unsafe_store[alignment=16](
                    0, SIMD[DType.uint32, 4](right[0], right[1], right[2], right[3])
                )
            comptime for i in range(4):
                both[i] = largest(both[i], left[i])
            var first = t.lead_q
            if group == begin and begin > 0:
                if quad == 0:
                    waiting.unsafe_store[alignment=16](
                        Int(step * 32), SIMD[DType.uint32, 4](both[0], both[1], both[2], both[3])
                    )
                first = begin * (GROUP // 2) + 1
            store(both, step, group, first, t.out_q - column0)
            syncwarp()

    barrier()
    if begin > 0:
        var first = begin * (GROUP // 2)
        for step in range(t.steps):
            var one = waiting.unsafe_load[width=4, alignment=16](Int(step * 32))
            var other = before.unsafe_load[width=4, alignment=16](Int(step * 32))
            var both = Array[UInt32, 4](uninitialized=True)
            comptime for i in range(4):
                both[i] = largest(one[i], other[i])
            store(both, step, begin, first, min(first + 1, t.out_q - column0))


@always_inline
def _layernorm[
    dtype: DType, pixel: DType, stem: Stem, out: DType
](
    o: StemOperands[dtype, pixel, out],
    t: Tiling,
    n: Int32,
    p0: Int32,
    q0: Int32,
    w: Array[UInt32, 8 * stem.depths()],
    bias: Array[SIMD[F32, 4], 2],
    lanes: Shared[DType.uint32],
    beyond: Shared[DType.uint32],
    eps: Float32,
):
    """Convolves the tile and normalises its pixels; the warps of a slice share its steps."""
    var slices = Int32(t.slices[stem]())
    var splits = Int32(t.warps[stem]()) // slices
    var warp_index = Int32(thread_idx.x) // 32
    var lane = Int32(thread_idx.x) % 32
    var quad = lane % 4
    var split = warp_index // slices
    var channel = Int((warp_index - split * slices) * WARP_FILTERS + quad * 8)
    var gamma = o.gamma.unsafe_load[width=8, alignment=4](channel)
    var beta = o.beta.unsafe_load[width=8, alignment=4](channel)
    # Mean and squares of 32 filters, [2][warp][lane][2]; lane `quad` of a column has row `quad`.
    var partial = beyond.unsafe_bitcast[Float32]()
    var turn = Int32(0)
    var total = t.steps * t.groups
    for round in range(ceildiv(total, splits)):
        var index = min(round * splits + split, total - 1)
        var group = Int32(UInt32(index) // UInt32(t.steps))
        var step = index - group * t.steps
        var at = lanes.unsafe_offset(Int(step * STEP[stem] + group * ACROSS[stem]))
        var z = _multiply[dtype, pixel, stem, STEP_ROWS](at, w, bias)
        # Turned over: a lane has 8 filters of column lane / 4 in each row.
        var tokens = Array[SIMD[dtype, 8], STEP_ROWS](uninitialized=True)
        var mine = SIMD[F32, 2](0)
        comptime for j in range(STEP_ROWS):
            var eight = SIMD[DType.uint32, 4](0)
            comptime for m in range(2):
                comptime for i in range(2):
                    var two = SIMD[F32, 2](z[2 * j + m][2 * i], z[2 * j + m][2 * i + 1])
                    eight[2 * m + i] = _transposed(bitcast[DType.uint32, 1](two.cast[dtype]()))
            tokens[j] = bitcast[dtype, 8](eight)
            var value = tokens[j].cast[F32]()
            var sum = over_lanes[4](value.reduce_add())
            var d = value - sum / WARP_FILTERS
            var squares = over_lanes[4]((d * d).reduce_add())
            if quad == Int32(j):
                mine = SIMD[F32, 2](sum / WARP_FILTERS, squares)
        var here = partial.unsafe_offset(
            Int((turn * Int32(t.warps[stem]()) + split * slices) * 64 + lane * 2)
        )
        turn = 1 - turn
        here.unsafe_store[alignment=8](Int((warp_index - split * slices) * 64), mine)
        barrier()
        # Sums of the slices' means and squares about this slice's mean.
        var sum = Float32(0)
        var squares = Float32(0)
        var spread = Float32(0)
        var mean = mine[0]
        for i in range(slices):
            var part = here.unsafe_load[width=2, alignment=8](Int(i * 64))
            var d = part[0] - mean
            sum += d
            spread += d * d
            squares += part[1]
        squares += (spread - sum * sum / Float32(slices)) * WARP_FILTERS
        mean += sum / Float32(slices)
        var deviation = 1 / sqrt(squares / Float32(t.f) + eps)
        var q = q0 + group * GROUP + lane // 4
        var p = p0 + step * STEP_ROWS
        var inside = q < t.q and round * splits + split < total
        var to = o.y.unsafe_offset(
            ((Int(n) * Int(t.p) + Int(p)) * Int(t.q) + Int(q)) * Int(t.f) + channel
        )
        comptime for j in range(STEP_ROWS):
            var source = UInt32(lane - quad + Int32(j))
            var centre = warp.shuffle_idx(mean, source)
            var factor = warp.shuffle_idx(deviation, source)
            if inside and p + Int32(j) < t.p:
                var y = ((tokens[j].cast[F32]() - centre) * factor).fma(gamma, beta)
                to.unsafe_store[alignment=8 * size_of[out]()](0, narrowed[out](y))
            to = to.unsafe_offset(Int(t.q * t.f))


@always_inline
def _activated[
    dtype: DType, pixel: DType, stem: Stem, out: DType
](
    y: Data[out],
    t: Tiling,
    n: Int32,
    p0: Int32,
    q0: Int32,
    w: Array[UInt32, 8 * stem.depths()],
    bias: Array[SIMD[F32, 4], 2],
    lanes: Shared[DType.uint32],
):
    """Convolves the tile and applies the epilogue; the warps of a slice share its steps."""
    var slices = Int32(t.slices[stem]())
    var splits = Int32(t.warps[stem]()) // slices
    var warp_index = Int32(thread_idx.x) // 32
    var lane = Int32(thread_idx.x) % 32
    var split = warp_index // slices
    var channel = (warp_index - split * slices) * WARP_FILTERS + lane % 4 * 8
    for index in range(split, t.steps * t.groups, splits):
        var group = Int32(UInt32(index) // UInt32(t.steps))
        var step = index - group * t.steps
        var at = lanes.unsafe_offset(Int(step * STEP[stem] + group * ACROSS[stem]))
        var z = _multiply[dtype, pixel, stem, STEP_ROWS](at, w, bias)
        var q = q0 + group * GROUP + lane // 4
        var p = p0 + step * STEP_ROWS
        var inside = q < t.q and channel < t.f
        var to = y.unsafe_offset(
            ((Int(n) * Int(t.p) + Int(p)) * Int(t.q) + Int(q)) * Int(t.f) + Int(channel)
        )
        comptime for j in range(STEP_ROWS):
            var eight = SIMD[out, 8](0)
            comptime for m in range(2):
                var pairs = _halves[out](activate[stem.epilogue, out](z[2 * j + m]))
                eight = eight.insert[offset=4 * m](_turned[out](pairs))
            if inside and p + Int32(j) < t.p:
                to.unsafe_store[alignment=8 * size_of[out]()](0, eight)
            to = to.unsafe_offset(Int(t.q * t.f))


@__name(t"stem_{stem.label()}_{dtypes[dtype, out]()}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](MOST_THREADS))
def stem_kernel[
    dtype: DType, pixel: DType, stem: Stem, out: DType
](o: StemOperands[dtype, pixel, out], t: Tiling, eps: Float32):
    """Computes a tile of the output.

    Parameters:
        dtype: Of the filter.
        pixel: Of x.
        stem: Compile-time sizes.
        out: Of y.

    Args:
        o: Tensors.
        t: Sizes and tiling.
        eps: Layer norm's, added to the variance.
    """
    comptime assert is_nvidia_gpu(), "stem: expects an NVIDIA GPU; others run separate ops"
    var slice = Int32(thread_idx.x) // 32 % Int32(t.slices[stem]())
    var lane = Int32(thread_idx.x) % 32
    var g = lane // 4

    # Weights may be read before the grid that this one depends on has ended.
    var w = Array[UInt32, 8 * stem.depths()](uninitialized=True)
    var filters = o.w.unsafe_bitcast[UInt32]().unsafe_offset(
        Int(slice) * stem.depths() * 256 + Int(lane) * 4
    )
    comptime for i in range(2 * stem.depths()):
        var four = filters.unsafe_load[width=4, alignment=16](i * 128)
        comptime for j in range(4):
            w[4 * i + j] = four[j]
    var bias = Array[SIMD[F32, 4], 2](uninitialized=True)
    comptime for m in range(2):
        var at = Int(slice * WARP_FILTERS + g // 2 * 8 + g % 2) + 4 * m
        var after = at + 2
        comptime if stem.then == Stem.CONV2D:  # there may be fewer filters than the warps take
            at, after = min(at, Int(t.f) - 1), min(after, Int(t.f) - 1)
        var low, high = o.bias[unsafe_offset=at], o.bias[unsafe_offset=after]
        bias[m] = SIMD[F32, 4](low, low, high, high)
    wait_on_dependent_grids()
    launch_dependent_grids()

    var tile_row = Int32(block_idx.x) // t.tiles_q
    var n = tile_row // t.tiles_p
    comptime scale = Int32(2 if stem.pools() else 1)
    # The first output that the tile computes, whether its own or not.
    var row0 = (tile_row - n * t.tiles_p) * (t.steps * STEP_ROWS // scale)
    var column0 = Int32(block_idx.x) - tile_row * t.tiles_q
    column0 = column0 * (t.groups * GROUP // scale - t.lead_q) - t.lead_q
    var tile = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16]()
    var rows = Int32(t.input_rows(stem))
    _fill[stem](
        o,
        t,
        n,
        (row0 * scale - t.lead_p) * Int32(stem.stride) - t.pad,
        column0 * scale * Int32(stem.stride) - t.pad,
        rows,
        tile,
    )
    barrier()

    var lanes = tile.unsafe_bitcast[UInt32]().unsafe_offset(
        Int(g * Int32(stem.stride * stem.cells() // 2) + lane % 4)
    )
    var beyond = tile.unsafe_offset(Int(rows) * stem.pitch()).unsafe_bitcast[UInt32]()
    comptime if stem.pools():
        _pool[dtype, pixel, stem, out](o.y, t, n, row0, column0, w, bias, lanes, beyond)
    elif stem.then == Stem.CONV2D:
        _activated[dtype, pixel, stem, out](o.y, t, n, row0, column0, w, bias, lanes)
    else:
        _layernorm[dtype, pixel, stem, out](o, t, n, row0, column0, w, bias, lanes, beyond, eps)


def shared_bytes[stem: Stem](t: Tiling) -> Int:
    """Counts the shared memory of a block.

    Parameters:
        stem: Compile-time sizes.

    Args:
        t: Sizes and tiling.

    Returns:
        Bytes.
    """
    var tile = t.input_rows(stem) * stem.pitch() * 2
    comptime if stem.pools():
        return tile + 2 * t.warps[stem]() * Int(t.steps) * 128
    elif stem.then == Stem.LAYERNORM:
        return tile + 2 * t.warps[stem]() * 256
    else:
        return tile


def _cost[stem: Stem](t: Tiling, n: Int, shared: Int, device: Device) -> Int:
    """Estimates the clocks of a launch; the figures are fitted to an H200 (2026-11-21).

    A multiprocessor is either busy (160 clocks for a step of a warp, 1.5 for each chunk of
    pixels), or waits for the few blocks that it holds at a time. Each block costs it 2,000 to begin.
    """
    var warps = t.warps[stem]()
    var splits = warps // t.slices[stem]()
    var steps = Int(t.steps)
    var groups = Int(t.groups)
    var resident = max(1, min(12 // warps, device.holds(shared)))
    var each = device.waves(t.blocks(n))
    var chunks = t.input_rows(stem) * stem.chunks(groups)
    comptime alone = stem.then == Stem.CONV2D
    comptime step = 15 * stem.depths() + 60 if alone else 160
    var busy = each * (steps * groups * t.slices[stem]() * step + chunks * 3 // 2)
    var waiting = 1500 + ceildiv(chunks, warps * 32) * 1000
    comptime if stem.pools():
        waiting += ceildiv(groups, splits) * (steps * 1900 + Int(t.lead_p) * 800)
    else:
        comptime each_step = 150 * stem.depths() + 250 if alone else 1900
        waiting += ceildiv(groups * steps, splits) * each_step
    # From two rounds of blocks on, one starts where another ends.
    var rounds = device.waves(t.blocks(n), resident)
    if rounds > 2:
        waiting = waiting * t.blocks(n) // (device.multiprocessors * resident)
    else:
        waiting *= rounds
    return max(busy, waiting) + each * 2000


def tiling[
    stem: Stem
](n: Int, x: IndexList[4], y: IndexList[4], pad: Int, device: Device) -> Tiling:
    """Chooses the tile of a launch: large ones share more, small ones fill the device.

    Parameters:
        stem: Compile-time sizes.

    Args:
        n: Images.
        x: Shape of x[N, H, W, C].
        y: Shape of y[N, P', Q', F].
        pad: Zeros on each side.
        device: The GPU.

    Returns:
        The tiling with the least estimated time.
    """
    var p = (x[1] + 2 * pad - stem.r) // stem.stride + 1
    var q = (x[2] + 2 * pad - stem.s) // stem.stride + 1
    var choice = Cheapest(Tiling(stem, x, p, q, y[1], y[2], y[3], pad, 1, 2))
    for steps in range(1, min(4, ceildiv(p, STEP_ROWS)) + 1):
        for groups in range(2, min(stem.most_groups(), max(2, ceildiv(q, GROUP))) + 1):
            var t = Tiling(stem, x, p, q, y[1], y[2], y[3], pad, steps, groups)
            var shared = shared_bytes[stem](t)
            if shared <= SHARED:
                choice.offer(t, Float64(_cost[stem](t, n, shared, device)))
    return choice.best


def stem_gpu[
    dtype: DType, pixel: DType, stem: Stem, out: DType
](
    o: StemOperands[dtype, pixel, out],
    x: IndexList[4],
    y: IndexList[4],
    pad: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues a stem.

    Parameters:
        dtype: Of the filter.
        pixel: Of x.
        stem: Compile-time sizes.
        out: Of y.

    Args:
        o: Tensors.
        x: Shape of x[N, H, W, C].
        y: Shape of y[N, P', Q', F].
        pad: Zeros on each side.
        eps: Layer norm's, added to the variance; any number for other stems.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime if IS_HOPPER and takes(stem) and pixel == DType.uint8 and out == dtype:
        var same = rebind[StemOperands[dtype, DType.uint8]](o)
        if fits(same, x, y, pad):
            stem_maxpool_hopper(same, x, y, ctx)
            return
    var t = tiling[stem](x[0], x, y, pad, Device(ctx))
    enqueue_stem[dtype, pixel, stem, out](o, t, x[0], eps, ctx)


def enqueue_stem[
    dtype: DType, pixel: DType, stem: Stem, out: DType = dtype
](o: StemOperands[dtype, pixel, out], t: Tiling, n: Int, eps: Float32, ctx: DeviceContext) raises:
    """Enqueues a stem with a tiling of the caller's.

    Parameters:
        dtype: Of the filter, and of y unless that is named.
        pixel: Of x.
        stem: Compile-time sizes.
        out: Of y.

    Args:
        o: Tensors.
        t: Sizes and tiling.
        n: Images.
        eps: Layer norm's.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var shared = shared_bytes[stem](t)
    launch[stem_kernel[dtype, pixel, stem, out]](
        ctx,
        o,
        t,
        eps,
        grid_dim=t.blocks(n),
        block_dim=t.warps[stem]() * 32,
        shared=shared,
    )
