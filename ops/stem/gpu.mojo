"""A network's stem on NVIDIA's tensor cores, in one kernel from pixels to pooled maps or tokens.

    v[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c]      uint8 x; other x is v; zero outside
    z[n, p, q, f] = bias[f] + sum_rsc v[n, p * stride - pad + r, q * stride - pad + s, c] w[r, s, c, f]
    y = the maximum of relu(z) over 3x3 windows of stride 2, padding 1        (ResNet), or
    y = (z - mean_f z) / sqrt(var_f z + eps) * gamma + beta                   (CvT)

    x[N, H, W, C]                        uint8, or floats that are normalised; C <= 4
    w[F / 16, K / 16, 32, 2, 2, 2]       filters in the order that the lanes of a warp hold them
    y[N, P', Q', F]                      bfloat16 or float16; F a multiple of 16, at most 256

An implicit GEMM (M pixels, N = F, K = R * S * C) whose patches need no building: with C channels
side by side, a row of the window is one run of S * C numbers. The block normalises the input rows
of its tile into shared memory, padding and all; a run begins at an even number there, so each
register of an mma's A is one 32-bit load, free of bank conflicts at stride 2. Runs are filled up
to a multiple of 8 with zero filters (21 to 24: K is 168). A warp keeps the fragments of its 16
filters in registers and walks over the tile in steps of 4 rows x 8 columns: rows of the input
that windows share are loaded once for both m-tiles. Accumulation in float32.

An m-tile is 2 rows x 8 columns, so the pool's maximum over rows is within a lane, over columns a
shuffle; z is never stored. Filters are dealt to the lanes so that each stores 4 neighbours. Layer
norm combines the statistics of warps (Chan et al. 1979, "Updating formulae"), never E[z^2] - E[z]^2.

Bound by the tensor cores (mma) for the pool, by memory for layer norm; docs/kernels.md has figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.gpu.sync import syncwarp
from std.math import ceildiv, sqrt
from std.memory import bitcast
from std.sys import _RegisterPackType, inlined_assembly, llvm_intrinsic, size_of
from std.utils import IndexList, StaticTuple

from ..operands import F32, Data
from .config import GROUP, SHARED, STEP_ROWS, WARP_FILTERS, Stem, StemOperands, Tiling

comptime Shared[dtype: DType] = Pointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Shared memory.

Parameters:
    dtype: Of its elements.
"""

comptime MOST_THREADS = 512
"""Threads of a block of 256 filters, and the bound that leaves each 128 registers."""


@always_inline
def _mma[
    dtype: DType, depth: Int
](a: SIMD[DType.uint32, 4], b: SIMD[DType.uint32, 2], c: SIMD[F32, 4]) -> SIMD[F32, 4]:
    """Multiplies a 16 x depth by a depth x 8 tile; a depth of 8 takes the first halves only."""
    comptime kind = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    comptime if depth == 16:
        var d = inlined_assembly[
            "mma.sync.aligned.m16n8k16.row.col.f32."
            + kind
            + ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            _RegisterPackType[Float32, Float32, Float32, Float32],
            constraints="=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            has_side_effect=False,
        ](a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3])
        return SIMD[F32, 4](d[0], d[1], d[2], d[3])
    else:
        var d = inlined_assembly[
            "mma.sync.aligned.m16n8k8.row.col.f32."
            + kind
            + ".f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
            _RegisterPackType[Float32, Float32, Float32, Float32],
            constraints="=f,=f,=f,=f,r,r,r,f,f,f,f",
            has_side_effect=False,
        ](a[0], a[1], b[0], c[0], c[1], c[2], c[3])
        return SIMD[F32, 4](d[0], d[1], d[2], d[3])


@always_inline
def _largest(a: UInt32, b: UInt32) -> UInt32:
    """Compares two pairs of halves that are not negative: their bits sort as integers do."""
    return bitcast[DType.uint32, 1](
        max(bitcast[DType.uint16, 2](a), bitcast[DType.uint16, 2](b))
    )


@always_inline
def _normalised[
    dtype: DType, pixel: DType, //, stem: Stem
](
    o: StemOperands[dtype, pixel],
    level: SIMD[F32, 8],
    first: Int,
    mean: Array[Float32, 4],
    scale: Array[Float32, 4],
) -> SIMD[dtype, 8]:
    """Normalises 8 neighbours; the channel of the first is `first` modulo C."""
    comptime if pixel != DType.uint8:
        return level.cast[dtype]()
    var value = level
    comptime for i in range(8):
        value[i] = (level[i] - mean[(first + i) % stem.c]) * scale[(first + i) % stem.c]
    return value.cast[dtype]()


@always_inline
def _fill[
    dtype: DType, pixel: DType, //, stem: Stem
](
    o: StemOperands[dtype, pixel],
    t: Tiling,
    n: Int32,
    h0: Int32,
    w0: Int32,
    rows: Int32,
    threads: Int32,
    tile: Shared[dtype],
):
    """Normalises the input rows from h0 on, from column w0 on, into shared memory."""
    comptime CHUNK = Int32(8 * stem.c)
    comptime WORDS = 2 * stem.c
    var mean = Array[Float32, 4](fill=0)
    var scale = Array[Float32, 4](fill=0)
    comptime if pixel == DType.uint8:
        comptime for c in range(stem.c):
            mean[c] = o.mean[unsafe_offset=c]
            scale[c] = o.scale[unsafe_offset=c]
    var chunks = Int32(stem.chunks(Int(t.groups)))
    var row_size = t.w * Int32(stem.c)
    for task in range(Int32(thread_idx.x), rows * chunks, threads):
        var row = task // chunks
        var chunk = task - row * chunks
        var to = tile.unsafe_offset(Int(row * Int32(stem.pitch()) + chunk * CHUNK))
        var h = h0 + row
        var first = w0 * Int32(stem.c) + chunk * CHUNK
        if h < 0 or h >= t.h or first >= row_size or first + CHUNK <= 0:
            comptime for i in range(stem.c):
                to.unsafe_store[alignment=16](8 * i, SIMD[dtype, 8](0))
            continue
        var at = (Int(n) * Int(t.h) + Int(h)) * Int(row_size) + Int(first)
        if first >= 0 and first + CHUNK <= row_size:
            comptime if pixel == DType.uint8:
                # Whole words around the chunk, shifted into place.
                var address = Int(o.x) + at
                var words = Data[DType.uint32](unsafe_from_address=address // 4 * 4)
                var shift = UInt32(address % 4 * 8)
                var word = Array[UInt32, WORDS + 1](uninitialized=True)
                comptime for i in range(WORDS):
                    word[i] = words[unsafe_offset=i]
                word[WORDS] = words[unsafe_offset=(address % 4 + 8 * stem.c - 1) // 4]
                comptime for i in range(stem.c):
                    var low = llvm_intrinsic["llvm.fshr.i32", UInt32, has_side_effect=False](
                        word[2 * i + 1], word[2 * i], shift
                    )
                    var high = llvm_intrinsic["llvm.fshr.i32", UInt32, has_side_effect=False](
                        word[2 * i + 2], word[2 * i + 1], shift
                    )
                    var bytes = bitcast[DType.uint8, 8](SIMD[DType.uint32, 2](low, high))
                    to.unsafe_store[alignment=16](
                        8 * i, _normalised[stem](o, bytes.cast[F32](), 8 * i, mean, scale)
                    )
            else:
                comptime for i in range(stem.c):
                    var value = o.x.unsafe_load[width=8, alignment=size_of[pixel]()](at + 8 * i)
                    to.unsafe_store[alignment=16](
                        8 * i, _normalised[stem](o, value.cast[F32](), 8 * i, mean, scale)
                    )
        else:
            comptime for i in range(stem.c):
                var value = SIMD[F32, 8](0)
                var inside = SIMD[DType.bool, 8](fill=False)
                comptime for j in range(8):
                    var index = first + Int32(8 * i + j)
                    if index >= 0 and index < row_size:
                        value[j] = o.x[unsafe_offset=at + 8 * i + j].cast[F32]()
                        inside[j] = True
                var result = _normalised[stem](o, value, 8 * i, mean, scale)
                to.unsafe_store[alignment=16](8 * i, inside.select(result, SIMD[dtype, 8](0)))


@always_inline
def _multiply[
    dtype: DType, //, stem: Stem
](
    at: Pointer[UInt32, MutUntrackedOrigin, address_space=AddressSpace.SHARED],
    b: Array[UInt32, 4 * stem.depths()],
    mut acc: Array[SIMD[F32, 4], 4],
    tile: Shared[dtype],
):
    """Adds the products of 4 rows x 8 columns to the accumulators [m-tile][n-tile].

    Input row i is under tap r of row j of the four where i = j * stride + r; each is loaded once.
    """
    comptime UNITS = stem.row_units()
    var a = Array[UInt32, stem.input_rows(STEP_ROWS) * UNITS](uninitialized=True)
    comptime for depth in range(stem.depths()):
        comptime for half in range(2):
            comptime unit = 2 * depth + half
            comptime if unit < stem.units():
                comptime r = unit // UNITS
                comptime c = unit % UNITS
                comptime for j in range(STEP_ROWS):
                    comptime i = j * stem.stride + r
                    # The first tap that reads row i does so for the last of the four rows it can.
                    comptime if i - min(STEP_ROWS - 1, i // stem.stride) * stem.stride == r:
                        a[i * UNITS + c] = at[unsafe_offset=(i * stem.pitch() + 8 * c) // 2]
        comptime for m in range(2):
            var operand = SIMD[DType.uint32, 4](0)
            comptime for half in range(2):
                comptime unit = 2 * depth + half
                comptime if unit < stem.units():
                    comptime for row in range(2):
                        comptime i = (2 * m + row) * stem.stride + unit // UNITS
                        operand[2 * half + row] = a[i * UNITS + unit % UNITS]
            comptime for j in range(2):
                acc[2 * m + j] = _mma[dtype, 16 if 2 * depth + 1 < stem.units() else 8](
                    operand,
                    SIMD[DType.uint32, 2](b[4 * depth + 2 * j], b[4 * depth + 2 * j + 1]),
                    acc[2 * m + j],
                )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](MOST_THREADS))
def stem_kernel[
    dtype: DType, pixel: DType, stem: Stem
](o: StemOperands[dtype, pixel], t: Tiling):
    """Computes a tile of the output; a block has F / 16 warps.

    Parameters:
        dtype: Of the filter and y.
        pixel: Of x.
        stem: Compile-time sizes.

    Args:
        o: Tensors.
        t: Sizes and tiling.
    """
    var warps = t.f // WARP_FILTERS
    var slice = Int32(thread_idx.x) // 32
    var lane = Int32(thread_idx.x) % 32
    var g = lane // 4
    var quad = lane % 4
    var channel = Int(slice * WARP_FILTERS + quad * 4)

    # Weights may be read before the grid that this one depends on has ended.
    var b = Array[UInt32, 4 * stem.depths()](uninitialized=True)
    var filters = o.w.unsafe_bitcast[UInt32]()
    comptime for depth in range(stem.depths()):
        var four = filters.unsafe_load[width=4, alignment=16](
            (Int(slice) * stem.depths() + depth) * 128 + Int(lane) * 4
        )
        comptime for i in range(4):
            b[4 * depth + i] = four[i]
    var bias = o.bias.unsafe_load[width=4, alignment=4](channel)
    wait_on_dependent_grids()
    launch_dependent_grids()

    var tile_row = Int32(block_idx.x) // t.tiles_q
    var n = tile_row // t.tiles_p
    comptime scale = Int32(2 if stem.pools else 1)
    var rows = t.steps * STEP_ROWS // scale
    var columns = t.groups * GROUP // scale
    # The first output that the tile computes, whether its own or not.
    var row0 = (tile_row - n * t.tiles_p) * (rows - t.lead_p) - t.lead_p
    var column0 = (Int32(block_idx.x) - tile_row * t.tiles_q) * (columns - t.lead_q) - t.lead_q
    var p0 = row0 * scale
    var q0 = column0 * scale

    var tile = external_memory[Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16]()
    var input_rows = Int32(stem.input_rows(Int(t.steps) * STEP_ROWS))
    _fill[stem](
        o,
        t,
        n,
        p0 * Int32(stem.stride) - t.pad,
        q0 * Int32(stem.stride) - t.pad,
        input_rows,
        warps * 32,
        tile,
    )
    barrier()

    var inside = p0 >= 0 and q0 >= 0 and p0 + t.steps * STEP_ROWS <= t.p
    inside = inside and q0 + t.groups * GROUP <= t.q
    var lanes = tile.unsafe_bitcast[UInt32]().unsafe_offset(
        Int(g * Int32(stem.stride * stem.c // 2) + quad)
    )
    var beyond = tile.unsafe_offset(Int(input_rows) * stem.pitch())
    # Pool: the last column of the group to the left, [warp][output row][16 filters].
    var edge = beyond.unsafe_bitcast[UInt32]().unsafe_offset(Int(slice * rows) * (WARP_FILTERS // 2))
    # Layer norm: mean and squares of 16 filters, [2][row][column][warp][2].
    var partial = beyond.unsafe_bitcast[Float32]()
    var turn = Int32(0)
    var gamma = SIMD[F32, 4](0)
    var beta = SIMD[F32, 4](0)
    comptime if not stem.pools:
        gamma = o.gamma.unsafe_load[width=4, alignment=4](channel)
        beta = o.beta.unsafe_load[width=4, alignment=4](channel)

    for group in range(t.groups):
        var carry = Array[SIMD[F32, 2], 2](fill=SIMD[F32, 2](0))
        var column_inside = q0 + group * GROUP + g >= 0 and q0 + group * GROUP + g < t.q
        for step in range(t.steps):
            var acc = Array[SIMD[F32, 4], 4](uninitialized=True)
            comptime for m in range(2):
                comptime for j in range(2):
                    acc[2 * m + j] = SIMD[F32, 4](
                        bias[2 * j], bias[2 * j + 1], bias[2 * j], bias[2 * j + 1]
                    )
            var at = lanes.unsafe_offset(
                Int(
                    step * Int32(STEP_ROWS * stem.stride * stem.pitch() // 2)
                    + group * Int32(GROUP * stem.stride * stem.c // 2)
                )
            )
            _multiply[stem](at, b, acc, tile)

            comptime if stem.pools:
                var odd = g % 2 != 0
                var own = Array[UInt32, 2](uninitialized=True)
                var left = Array[UInt32, 2](uninitialized=True)
                var last = Array[UInt32, 4](uninitialized=True)
                comptime for j in range(2):
                    # z of the four rows, this lane's column and two of its four filters.
                    var z = Array[SIMD[F32, 2], 4](uninitialized=True)
                    comptime for i in range(4):
                        z[i] = SIMD[F32, 2](
                            acc[i // 2 * 2 + j][i % 2 * 2], acc[i // 2 * 2 + j][i % 2 * 2 + 1]
                        )
                    if not inside:
                        comptime for i in range(4):
                            var p = p0 + step * STEP_ROWS + Int32(i)
                            if not column_inside or p < 0 or p >= t.p:
                                z[i] = 0
                    # The windows of two output rows: the row above, 0, 1 and 1, 2, 3; relu.
                    z[1] = max(z[1], 0)
                    var upper = max(max(carry[j], z[0]), z[1])
                    var lower = max(max(z[1], z[2]), z[3])
                    carry[j] = z[3]
                    var a = bitcast[DType.uint32, 1](upper.cast[dtype]())
                    var c = bitcast[DType.uint32, 1](lower.cast[dtype]())
                    # An even lane finishes the upper row around its column, an odd lane the
                    # lower row around the column to its left.
                    var other = warp.shuffle_xor(a if odd else c, 4)
                    own[j] = _largest(c if odd else a, other)
                    var left_a = warp.shuffle_up(a, 4)
                    var left_c = warp.shuffle_up(c, 8)
                    left[j] = left_c if odd else left_a
                    last[j] = a
                    last[2 + j] = c
                if g < 2:
                    left[0] = 0
                    left[1] = 0
                    if group > 0:
                        var before = edge.unsafe_load[width=2, alignment=8](
                            Int((2 * step + g) * (WARP_FILTERS // 2) + 2 * quad)
                        )
                        left[0] = before[0]
                        left[1] = before[1]
                syncwarp()
                if g == 7:
                    comptime for i in range(2):
                        edge.unsafe_store[alignment=8](
                            Int((2 * step + Int32(i)) * (WARP_FILTERS // 2) + 2 * quad),
                            SIMD[DType.uint32, 2](last[2 * i], last[2 * i + 1]),
                        )
                syncwarp()
                var row = 2 * step + g % 2
                var column = (group * GROUP + g) // 2
                if (
                    row >= t.lead_p
                    and column >= t.lead_q
                    and row0 + row < t.out_p
                    and column0 + column < t.out_q
                ):
                    var pixel_at = (Int(n) * Int(t.out_p) + Int(row0 + row)) * Int(t.out_q)
                    var to = (pixel_at + Int(column0 + column)) * Int(t.f) + channel
                    o.y.unsafe_bitcast[UInt32]().unsafe_store[alignment=8](
                        to // 2,
                        SIMD[DType.uint32, 2](
                            _largest(own[0], left[0]), _largest(own[1], left[1])
                        ),
                    )
            else:
                var z = Array[SIMD[F32, 4], 4](uninitialized=True)
                var mine = SIMD[F32, 2](0)
                comptime for i in range(4):
                    z[i] = SIMD[F32, 4](
                        acc[i // 2 * 2][i % 2 * 2],
                        acc[i // 2 * 2][i % 2 * 2 + 1],
                        acc[i // 2 * 2 + 1][i % 2 * 2],
                        acc[i // 2 * 2 + 1][i % 2 * 2 + 1],
                    )
                    var sum = z[i].reduce_add()
                    sum += warp.shuffle_xor(sum, 1)
                    sum += warp.shuffle_xor(sum, 2)
                    var d = z[i] - sum / WARP_FILTERS
                    var squares = (d * d).reduce_add()
                    squares += warp.shuffle_xor(squares, 1)
                    squares += warp.shuffle_xor(squares, 2)
                    if quad == Int32(i):
                        mine = SIMD[F32, 2](sum / WARP_FILTERS, squares)
                # Lane `quad` of a column keeps the statistics of row `quad`.
                var pixel_at = Int(((turn * 4 + quad) * GROUP + g) * warps) * 2
                turn = 1 - turn
                partial.unsafe_store[alignment=8](pixel_at + Int(slice) * 2, mine)
                barrier()
                var mean = Float32(0)
                for i in range(warps):
                    mean += partial[unsafe_offset=pixel_at + Int(i) * 2]
                mean /= Float32(warps)
                var squares = Float32(0)
                for i in range(warps):
                    var part = partial.unsafe_load[width=2, alignment=8](pixel_at + Int(i) * 2)
                    var d = part[0] - mean
                    squares += part[1] + d * d * WARP_FILTERS
                var deviation = 1 / sqrt(squares / Float32(t.f) + o.eps)
                comptime for i in range(4):
                    var source = UInt32(lane - quad + Int32(i))
                    var centre = warp.shuffle_idx(mean, source)
                    var factor = warp.shuffle_idx(deviation, source)
                    var p = p0 + step * STEP_ROWS + Int32(i)
                    if column_inside and p < t.p:
                        var row_at = (Int(n) * Int(t.p) + Int(p)) * Int(t.q)
                        var to = (row_at + Int(q0 + group * GROUP + g)) * Int(t.f) + channel
                        var y = ((z[i] - centre) * factor).fma(gamma, beta)
                        o.y.unsafe_store[alignment=8](to, y.cast[dtype]())


def shared_bytes[stem: Stem](f: Int, steps: Int) -> Int:
    """Counts the shared memory of a block.

    Parameters:
        stem: Compile-time sizes.

    Args:
        f: Filters.
        steps: Steps of 4 rows in a tile.

    Returns:
        Bytes.
    """
    var tile = stem.input_rows(steps * STEP_ROWS) * stem.pitch() * 2
    comptime if stem.pools:
        return tile + f * 2 * STEP_ROWS // 2 * steps
    else:
        return tile + 2 * STEP_ROWS * GROUP * (f // WARP_FILTERS) * 8


def _cost[stem: Stem](t: Tiling, n: Int, shared: Int, processors: Int) -> Int:
    """Estimates the clocks of a launch, from figures of an H200.

    A multiprocessor is either busy (330 clocks for a step of four warps, 1.5 for each chunk of
    pixels), or waits for the blocks it holds at a time, each by itself twice as slow.
    """
    var warps = Int(t.f) // WARP_FILTERS
    var each = ceildiv(t.blocks(n), processors)
    var resident = max(1, min(16 // warps, 224 * 1024 // (shared + 1024)))
    var steps = Int(t.steps * t.groups)
    var chunks = stem.input_rows(Int(t.steps) * STEP_ROWS) * stem.chunks(Int(t.groups))
    var busy = each * (steps * 330 * max(warps, 4) // 4 + chunks * 3 // 2)
    var waiting = 1500 + steps * 600 + ceildiv(chunks, warps * 32) * 300
    return max(busy, ceildiv(each, resident) * waiting)


def tiling[
    stem: Stem
](n: Int, x: IndexList[4], y: IndexList[4], pad: Int, processors: Int) -> Tiling:
    """Chooses the tile of a launch: large ones share more, small ones fill the device.

    Parameters:
        stem: Compile-time sizes.

    Args:
        n: Images.
        x: Shape of x[N, H, W, C].
        y: Shape of y[N, P', Q', F].
        pad: Zeros on each side.
        processors: Multiprocessors of the device.

    Returns:
        The tiling with the least estimated time.
    """
    var p = (x[1] + 2 * pad - stem.r) // stem.stride + 1
    var q = (x[2] + 2 * pad - stem.s) // stem.stride + 1
    var best = Tiling(stem, x, p, q, y[1], y[2], y[3], pad, 1, min(2, stem.most_groups()))
    var least = Int.MAX
    var steps = 1
    while steps == 1 or shared_bytes[stem](y[3], steps) <= SHARED:
        for groups in range(2, min(stem.most_groups(), max(2, ceildiv(q, GROUP))) + 1):
            var t = Tiling(stem, x, p, q, y[1], y[2], y[3], pad, steps, groups)
            var cost = _cost[stem](t, n, shared_bytes[stem](y[3], steps), processors)
            if cost < least:
                best = t
                least = cost
        if steps * STEP_ROWS >= p:
            break
        steps *= 2
    return best


def stem_gpu[
    dtype: DType, pixel: DType, stem: Stem
](
    o: StemOperands[dtype, pixel], x: IndexList[4], y: IndexList[4], pad: Int, ctx: DeviceContext
) raises:
    """Enqueues a stem.

    Parameters:
        dtype: Of the filter and y.
        pixel: Of x.
        stem: Compile-time sizes.

    Args:
        o: Tensors.
        x: Shape of x[N, H, W, C].
        y: Shape of y[N, P', Q', F].
        pad: Zeros on each side.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var processors = Int(ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT))
    enqueue_stem[dtype, pixel, stem](o, tiling[stem](x[0], x, y, pad, processors), x[0], ctx)


def enqueue_stem[
    dtype: DType, pixel: DType, stem: Stem
](o: StemOperands[dtype, pixel], t: Tiling, n: Int, ctx: DeviceContext) raises:
    """Enqueues a stem with a tiling of the caller's.

    Parameters:
        dtype: Of the filter and y.
        pixel: Of x.
        stem: Compile-time sizes.

    Args:
        o: Tensors.
        t: Sizes and tiling.
        n: Images.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var shared = shared_bytes[stem](Int(t.f), Int(t.steps))
    ctx.enqueue_function[stem_kernel[dtype, pixel, stem]](
        o,
        t,
        grid_dim=t.blocks(n),
        block_dim=Int(t.f) // WARP_FILTERS * 32,
        shared_mem_bytes=shared,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_BEGINNING),
    )
