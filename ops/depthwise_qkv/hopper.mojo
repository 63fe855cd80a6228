"""The convolutional projections on Hopper's tensor cores, in 16 bits with windows of 3.

The formula and the tensors are those of gpu.mojo. A block keeps a tile of tokens and its margin,
clipped to the map, in shared memory: the copy engine brings each token, together with the filters
and biases, and 8 to 32 lanes normalise it where it lies, rounded once to the tokens' type. Then a
warp convolves 16 channels at a time by mma.sync: A[16 tokens, 8 channels of a tap] as `ldmatrix`
reads it, B[8 channels, 8 channels] the tap on its diagonal, sums in float32. One product takes two
taps (m16n8k16), the third of a row m16n8k8. An eighth of the multiplications counts, and still the
float32 units would take longer: a tap costs a warp less than an instruction for 128 outputs.

Queries: the tokens are 16 neighbours of a row. The warp goes down the rows and adds what it has
read to the sums of the three rows that see it. Keys and values: the tokens are those that 4 x 2
neighbouring outputs see, twice; what is read serves both.

In shared memory a token is an odd number of chunks of 16 bytes, so neighbours lie in different
banks, and every second row begins a chunk later, so those of every second token and row do too.
Of 16 channels the pairs 0, 2, 4, 6 are one chunk and 1, 3, 5, 7 another: a thread's sums of both
are 4 channels in a row. The first chunks of all 16s come first.

Bound by shared memory and the issue of instructions; docs/kernels.md has the figures. Few tiles are
faster in gpu.mojo's kernel.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from max.gpu.sync import syncwarp
from std.math import ceildiv, rsqrt
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..choice import NEVER, Cheapest
from ..device import Device
from ..hopper.barrier import Barrier
from ..hopper.ptx import (
    fence_barrier_init,
    load_bytes,
    mma_sync,
    mma_sync_short,
    shared_load_matrices,
)
from ..hopper.shared import block_memory
from ..launch import launch
from ..operands import F32, U32, Data, Shared, dtypes, widened
from ..rows import over_lanes
from .config import QkvOperands, QkvSizes

comptime KERNEL = 3
"""Taps of a side of the window."""
comptime THREADS = 384
"""Threads of a block at most."""
comptime RESIDENT = 2
"""Blocks of that size that a multiprocessor holds at a time; bounds the registers."""
comptime SHARED = block_memory(RESIDENT)
"""Bytes of shared memory that a block takes at most."""
comptime QUAD = 4
"""Channels that a thread reads together."""
comptime BLOCK = 16
"""Channels that a warp convolves at a time."""
comptime STRIP = 16
"""Neighbouring queries that a warp computes at a time."""
comptime RUN = 14
"""Rows of queries that a warp goes down with the same taps."""
comptime PAIRS = 2
"""Pairs of rows of keys that a warp computes with the same taps."""
comptime KEYS = 8
"""Neighbouring keys of a row that a warp computes at a time."""
comptime TOGETHER = 2
"""Tokens that some lanes normalise at a time."""
comptime WEIGHTS = 3 * (KERNEL * KERNEL * 2 + 4)
"""Bytes of filters and biases of a channel."""
comptime ZEROS = 128
"""Bytes before the zeros; first come barriers, of the weights and of each half of the tokens."""

comptime Memory = Shared[DType.uint8]
"""A block's shared memory: barriers, zeros, filters and biases of q, k and v, the tile."""

comptime WEIGHTS_COME = 0
"""The barrier of the weights."""
comptime FIRST_COME = 1
"""That of the first half of the tokens."""
comptime REST_COMES = 2
"""That of the others."""


@always_inline
def _barrier(shared: Memory, number: Int) -> Barrier:
    """Finds a barrier by its number."""
    return Barrier(UInt32(Int(shared)) + UInt32(Barrier.BYTES * number))


@always_inline
def _clipped(g: QkvSizes, begin: Int32, tile: Int32, size: Int32) -> Tuple[Int32, Int32]:
    """Gives where what a tile's windows see begins in the map, and how much of it the map has."""
    var first = max(begin - g.margin(), 0)
    var around = Int32(KERNEL - 1) - min(g.pad_q, g.pad_kv)
    return first, min(begin + tile + around, size) - first


struct _Tile[c: Int](TrivialRegisterPassable):
    """What a block keeps of the map in shared memory."""

    comptime PITCH = 2 * Self.c + 16
    """Bytes of a token."""
    comptime WEIGHTS = 2 * ZEROS + Self.c
    """Bytes before the weights; zeros lie in all banks, and again a block's second chunk further."""
    comptime TOKENS = Self.WEIGHTS + WEIGHTS * Self.c
    """Bytes before the tokens."""

    var h0: Int32
    """First row of the tile."""
    var w0: Int32
    """First column of the tile."""
    var top: Int32
    """First row that is kept."""
    var left: Int32
    """First column that is kept."""
    var high: Int32
    """Rows that are kept."""
    var broad: Int32
    """Columns that are kept."""
    var inverse: UInt32
    """2 ** 20 / broad, rounded up: exact for the few tokens of a tile."""

    @always_inline
    def __init__(out self, g: QkvSizes):
        self.h0 = Int32(block_idx.y) * g.rows
        self.w0 = Int32(UInt32(block_idx.x) // UInt32(g.parts)) * g.columns
        self.top, self.high = _clipped(g, self.h0, g.rows, g.h)
        self.left, self.broad = _clipped(g, self.w0, g.columns, g.w)
        self.inverse = (1 << 20) // UInt32(self.broad) + 1

    @always_inline
    def row(self, token: Int32) -> Int32:
        """Gives the row of a token by its number."""
        return Int32((UInt32(token) * self.inverse) >> 20)

    @always_inline
    def bytes(self, token: Int32, y: Int32) -> Int32:
        """Gives how many bytes before a token lie, by its number and row."""
        return Int32(Self.TOKENS) + token * Int32(Self.PITCH) + (y >> 1) * 16

    @always_inline
    def down(self, y: Int32) -> Int32:
        """Gives how many bytes after the first row a row is."""
        return (y * (self.broad * Int32(Self.PITCH // 16)) + (y >> 1)) * 16


@always_inline
def _fetch[
    dtype: DType, c: Int
](o: QkvOperands[dtype, _], g: QkvSizes, tile: _Tile[c], shared: Memory, count: Int32, half: Int32):
    """Starts copying filters, biases and tokens, and writes the zeros."""
    comptime FILTER = KERNEL * KERNEL * 2 * c
    var t = Int32(thread_idx.x)
    var base = UInt32(Int(shared))
    if t == 0:
        comptime for i in range(3):
            _barrier(shared, i).init()
        fence_barrier_init()
        var weights = _barrier(shared, WEIGHTS_COME)
        weights.expect(UInt32(WEIGHTS * c))
        comptime for f in range(3):
            var filter = o.q_filter if f == 0 else o.k_filter if f == 1 else o.v_filter
            var bias = o.q_bias if f == 0 else o.k_bias if f == 1 else o.v_bias
            var to = base + UInt32(_Tile[c].WEIGHTS + f * FILTER)
            load_bytes(to, filter, UInt32(FILTER), weights.address)
            to = base + UInt32(_Tile[c].WEIGHTS + 3 * FILTER + f * 4 * c)
            load_bytes(to, bias, UInt32(4 * c), weights.address)
    var zeros = shared.unsafe_offset(ZEROS).unsafe_bitcast[UInt32]()
    while t < Int32((_Tile[c].WEIGHTS - ZEROS) // 16):
        zeros.unsafe_store[alignment=16](Int(t * 4), SIMD[U32, 4](0))
        t += Int32(block_dim.x)
    barrier()
    wait_on_dependent_grids()
    launch_dependent_grids()
    t = Int32(thread_idx.x)
    var first, rest = _barrier(shared, FIRST_COME), _barrier(shared, REST_COMES)
    if t == 0:
        first.expect(UInt32(half) * UInt32(2 * c))
        rest.expect(UInt32(count - half) * UInt32(2 * c))
    while t < count:
        var y = tile.row(t)
        var token = g.first + (tile.top + y) * g.w + tile.left + t - y * tile.broad
        load_bytes(
            base + UInt32(tile.bytes(t, y)),
            o.x.unsafe_offset(Int((token if y < tile.high else 0) * Int32(c))),
            UInt32(2 * c),
            first.address if t < half else rest.address,
        )
        t += Int32(block_dim.x)


@always_inline
def _over_lanes[lanes: Int](values: Array[Float32, 2]) -> Array[Float32, 2]:
    """Sums two values over neighbouring lanes; each half of the lanes sums one of them."""
    comptime HALF = lanes // 2
    var upper = Int32(thread_idx.x) & Int32(HALF) != 0
    var sum = values[1] if upper else values[0]
    sum += warp.shuffle_xor(values[0] if upper else values[1], UInt32(HALF))
    sum = over_lanes[HALF](sum)
    var other = warp.shuffle_xor(sum, UInt32(HALF))
    var sums = Array[Float32, 2](fill=sum)
    if upper:
        sums[0] = other
    else:
        sums[1] = other
    return sums^


@always_inline
def _normalize[
    dtype: DType, c: Int, lanes: Int
](o: QkvOperands[dtype, _], g: QkvSizes, tile: _Tile[c], shared: Memory):
    """Fills the tile, and stores the class token in all outputs if the tile is an image's first."""
    comptime QUADS = c // (QUAD * lanes)
    var first = Int32(thread_idx.x) % Int32(lanes) * Int32(QUAD)
    var weights = Array[SIMD[F32, QUAD], QUADS](fill=0)
    var biases = Array[SIMD[F32, QUAD], QUADS](fill=0)
    comptime for v in range(QUADS):
        var at = Int(first) + v * lanes * QUAD
        weights[v] = o.weight.unsafe_load[width=QUAD, alignment=16](at)
        biases[v] = o.norm_bias.unsafe_load[width=QUAD, alignment=16](at)
    # Of 8 tokens a warp has those whose banks differ: 1 apart, or 2 at a distance of 4, or 4 of 2.
    comptime WARPS = lanes // 4
    var slots = Int32(block_dim.x) // Int32(lanes)
    var index = Int32(thread_idx.x) // 32
    var part = Int32(thread_idx.x) % 32 // Int32(lanes)
    var slot = index // Int32(WARPS) * 8 + index % Int32(WARPS)
    slot += part % 2 * 4 + part // 2 * 2
    var tokens = tile.high * tile.broad
    var count = tokens + (g.first if block_idx.x == 0 and block_idx.y == 0 else 0)
    var half = count // 2
    _fetch(o, g, tile, shared, count, half)

    _barrier(shared, FIRST_COME).wait()
    # The lanes of a warp stay together: they exchange sums.
    var start = Int32(0)
    while start < count:
        start += slots * Int32(TOGETHER)
        if start > half:
            _barrier(shared, REST_COMES).wait()
        var values = Array[SIMD[F32, QUAD], TOGETHER * QUADS](fill=0)
        var at = Array[Int32, TOGETHER](fill=0)
        var sums = Array[Float32, TOGETHER](fill=0)
        comptime for i in range(TOGETHER):
            var token = slot + Int32(i) * slots
            at[i] = tile.bytes(token, tile.row(token))
            var source = shared.unsafe_offset(Int(at[i] + first * 2))
            if token < count:
                comptime for v in range(QUADS):
                    values[i * QUADS + v] = widened(
                        source.unsafe_offset(v * lanes * QUAD * 2)
                        .unsafe_bitcast[Scalar[dtype]]()
                        .unsafe_load[width=QUAD, alignment=8]()
                    )
                    sums[i] += values[i * QUADS + v].reduce_add()
        sums = _over_lanes[lanes](sums)
        comptime for i in range(TOGETHER):
            var mean = sums[i] * Float32(1 / Float64(c))
            sums[i] = 0
            comptime for v in range(QUADS):
                values[i * QUADS + v] -= mean
                sums[i] += (values[i * QUADS + v] * values[i * QUADS + v]).reduce_add()
        sums = _over_lanes[lanes](sums)
        comptime for i in range(TOGETHER):
            sums[i] = rsqrt(sums[i] * Float32(1 / Float64(c)) + g.eps)
        syncwarp()  # a lane stores where another has read
        comptime for i in range(TOGETHER):
            var token = slot + Int32(i) * slots
            var rounded = Array[SIMD[dtype, QUAD], QUADS](fill=0)
            comptime for v in range(QUADS):
                var n = (values[i * QUADS + v] * sums[i]).fma(weights[v], biases[v])
                rounded[v] = n.cast[dtype]()
            if token < tokens:
                var to = shared.unsafe_offset(Int(at[i] + first)).unsafe_bitcast[UInt32]()
                comptime for v in range(QUADS):
                    var two = bitcast[U32, 2](rounded[v])
                    to.unsafe_store(v * lanes, two[0])
                    to.unsafe_store(v * lanes + c // 4, two[1])
            elif token < count:
                comptime for v in range(QUADS):
                    o.store_class_token(Int(first) + v * lanes * QUAD, rounded[v])
        slot += slots * Int32(TOGETHER)


struct _Channels[dtype: DType, c: Int](TrivialRegisterPassable):
    """The 16 channels that a warp convolves at a time, and this thread's part of them."""

    comptime TAPS = KERNEL * KERNEL * 2 * Self.c
    """Bytes of a filter."""

    var channel: Int32
    """First of the 4 channels of this thread's sums."""
    var mask: UInt32
    """The half of a pair that is on the diagonal here; none if 0."""
    var weights: Memory
    """Filters and biases."""

    @always_inline
    def __init__(out self, block: Int32, shared: Memory):
        var lane = Int32(thread_idx.x) % 32
        self.channel = block * Int32(BLOCK) + lane % 4 * Int32(QUAD)
        self.mask = 0
        if lane // 8 == lane % 4:
            self.mask = 0xFFFF if lane // 4 % 2 == 0 else 0xFFFF0000
        self.weights = shared.unsafe_offset(_Tile[Self.c].WEIGHTS)

    @always_inline
    def tap[filter: Int, tap: Int](self) -> SIMD[U32, 2]:
        """Loads a tap as diagonals: of the even pairs of channels and of the odd ones."""
        return (
            self.weights.unsafe_offset(Int(self.channel * 2))
            .unsafe_offset(filter * Self.TAPS + tap * 2 * Self.c)
            .unsafe_bitcast[UInt32]()
            .unsafe_load[width=2, alignment=8]()
            & self.mask
        )

    @always_inline
    def bias[filter: Int](self) -> Array[SIMD[F32, 4], 2]:
        """Loads the bias as sums begin with it: of the even pairs, then of the odd ones."""
        var four = (
            self.weights.unsafe_offset(Int(self.channel * 4))
            .unsafe_offset(3 * Self.TAPS + filter * 4 * Self.c)
            .unsafe_bitcast[Float32]()
            .unsafe_load[width=4, alignment=16]()
        )
        return [
            SIMD[F32, 4](four[0], four[1], four[0], four[1]),
            SIMD[F32, 4](four[2], four[3], four[2], four[3]),
        ]

    @always_inline
    def store[
        out: DType, //, i: Int, part: Int, token: Int
    ](self, o: QkvOperands[Self.dtype, out], to: Data[out], even: SIMD[F32, 4], odd: SIMD[F32, 4],):
        """Rounds and stores the sums of the first or second 8 tokens of a product of output i."""
        var n = SIMD[F32, QUAD](
            even[2 * part], even[2 * part + 1], odd[2 * part], odd[2 * part + 1]
        )
        to.unsafe_store[alignment=QUAD * size_of[out]()](token * Self.c, o.stored[i](n))


struct _Sources[c: Int](TrivialRegisterPassable):
    """Where this thread's rows of the matrices lie: of taps 0 and 1 of a row, then of the third."""

    var tile: _Tile[Self.c]
    """The tile."""
    var zeros: UInt32
    """Address of zeros."""
    var first: SIMD[U32, 2]
    """Addresses in the tile's first row, as if nothing were outside."""
    var inside: SIMD[DType.bool, 2]
    """Whether the tile has the columns."""

    @always_inline
    def __init__(out self, tile: _Tile[Self.c], shared: Memory, block: Int32, left: Int32):
        """Finds the columns `left` and `left` + 1, and `left` + 2 of both chunks of a block.

        The upper half of a warp reads tap 1, or the second chunk of the third tap.
        """
        var upper = Int32(thread_idx.x) % 32 // 16
        var base = UInt32(Int(shared))
        self.tile = tile
        self.zeros = base + UInt32(ZEROS)
        base += UInt32(tile.TOKENS) + UInt32(block * 16)
        self.first = SIMD[U32, 2](
            base + UInt32((left + upper) * Int32(tile.PITCH)),
            base + UInt32((left + 2) * Int32(tile.PITCH) + upper * Int32(Self.c)),
        )
        self.inside = SIMD[DType.bool, 2](
            UInt32(left + upper) < UInt32(tile.broad), UInt32(left + 2) < UInt32(tile.broad)
        )

    @always_inline
    def row(self, y: Int32) -> SIMD[U32, 2]:
        """Gives the addresses in a row; outside those of zeros in the same bank."""
        var at = self.first + UInt32(self.tile.down(y))
        var high = UInt32(y) < UInt32(self.tile.high)
        comptime for i in range(2):
            at[i] = at[i] if high and self.inside[i] else self.zeros | (at[i] & 0x70)
        return at


@always_inline
def _products[
    dtype: DType, c: Int, filters: Int
](
    at: SIMD[U32, 2],
    taps: Array[SIMD[U32, 2], filters * KERNEL],
    begin: Array[SIMD[F32, 4], 2 * filters],
) -> Array[SIMD[F32, 4], 2 * filters]:
    """Adds a row of taps of some filters, from a thread's addresses of taps 0 and 1 and of 2."""
    var even = shared_load_matrices(at[0])
    var odd = shared_load_matrices(at[0] + UInt32(c))
    var third = shared_load_matrices(at[1])
    var sums = begin.copy()
    comptime for f in range(filters):
        comptime for j in range(2):
            sums[2 * f + j] = mma_sync[dtype](
                even if j == 0 else odd,
                SIMD[U32, 2](taps[f * KERNEL][j], taps[f * KERNEL + 1][j]),
                sums[2 * f + j],
            )
    comptime for f in range(filters):
        comptime for j in range(2):
            sums[2 * f + j] = mma_sync_short[dtype](
                third.slice[2, offset=2 * j](), taps[f * KERNEL + 2][j], sums[2 * f + j]
            )
    return sums^


@always_inline
def _queries[
    dtype: DType, c: Int
](
    o: QkvOperands[dtype, _],
    g: QkvSizes,
    tile: _Tile[c],
    shared: Memory,
    block: Int32,
    strip: Int32,
    run: Int32,
):
    """Computes 16 channels of up to 14 rows of 16 queries."""
    var lane = Int32(thread_idx.x) % 32
    var channels = _Channels[dtype, c](block, shared)
    var bias = channels.bias[0]()
    var taps = Array[SIMD[U32, 2], KERNEL * KERNEL](fill=0)
    comptime for i in range(KERNEL * KERNEL):
        taps[i] = channels.tap[0, i]()
    var row0 = tile.h0 + run * Int32(RUN)
    var rows = min(min(g.rows + tile.h0, g.h) - row0, Int32(RUN))

    # Matrices are tokens 0 to 7 and 8 to 15, each of taps 0 and 1, or of even and odd pairs.
    var column = tile.w0 + strip * Int32(STRIP)
    var left = column + lane // 8 % 2 * 8 + lane % 8 - g.pad_q - tile.left
    var sources = _Sources[c](tile, shared, block, left)
    var y = row0 - g.pad_q - tile.top

    column += lane // 4
    var end = min(tile.w0 + g.columns, g.w)
    var left_in = column < end
    var right_in = column + 8 < end
    var token = g.first + (row0 - Int32(KERNEL - 1)) * g.w + column
    var to = o.q.unsafe_offset(Int(token * Int32(c) + channels.channel))
    var down = Int(g.w * Int32(c))
    # A row that has been read is tap r of the row of queries r rows further up.
    var sums = Array[SIMD[F32, 4], 2 * KERNEL](fill=0)
    var step = Int32(0)
    while step < rows + Int32(KERNEL - 1):
        comptime for u in range(KERNEL):
            var begin = Array[SIMD[F32, 4], 2 * KERNEL](fill=0)
            comptime for r in range(KERNEL):
                comptime for j in range(2):
                    begin[2 * r + j] = bias[j] if r == 0 else sums[(u - r) % KERNEL * 2 + j]
            var added = begin.copy()
            if UInt32(y) < UInt32(tile.high) and step + Int32(u) < rows + Int32(KERNEL - 1):
                added = _products[dtype, c, KERNEL](sources.row(y), taps, begin)
            comptime for r in range(KERNEL):
                comptime for j in range(2):
                    sums[(u - r) % KERNEL * 2 + j] = added[2 * r + j]
            comptime done = (u - KERNEL + 1) % KERNEL * 2
            var whole = step + Int32(u) >= Int32(KERNEL - 1) and step + Int32(u) < rows + Int32(
                KERNEL - 1
            )
            if whole and left_in:
                channels.store[0, 0, 0](o, to, sums[done], sums[done + 1])
            if whole and right_in:
                channels.store[0, 1, 8](o, to, sums[done], sums[done + 1])
            y += 1
            to = to.unsafe_offset(down)
        step += Int32(KERNEL)


@always_inline
def _keys[
    dtype: DType, c: Int
](
    o: QkvOperands[dtype, _],
    g: QkvSizes,
    tile: _Tile[c],
    shared: Memory,
    block: Int32,
    strip: Int32,
    run: Int32,
    begin: SIMD[DType.int32, 2],
    end: SIMD[DType.int32, 2],
):
    """Computes 16 channels of up to 4 rows of 8 keys and values."""
    var lane = Int32(thread_idx.x) % 32
    var channels = _Channels[dtype, c](block, shared)
    var row = begin[0] + run * Int32(2 * PAIRS)
    var column = begin[1] + strip * Int32(KEYS)

    # A matrix is 4 outputs of a row, and 4 of the next; the second has those to the right.
    var left = (column + lane // 8 % 2 * 4 + lane % 4) * g.stride - g.pad_kv - tile.left
    var sources = _Sources[c](tile, shared, block, left)
    var top = (row + lane % 8 // 4) * g.stride - g.pad_kv - tile.top

    var sums = Array[Array[SIMD[F32, 4], 4], PAIRS](fill=Array[SIMD[F32, 4], 4](fill=0))
    comptime for f in range(2):
        var bias = channels.bias[1 + f]()
        comptime for pair in range(PAIRS):
            comptime for j in range(2):
                sums[pair][2 * f + j] = bias[j]
    comptime for r in range(KERNEL):
        var taps = Array[SIMD[U32, 2], 2 * KERNEL](fill=0)
        comptime for f in range(2):
            comptime for s in range(KERNEL):
                taps[f * KERNEL + s] = channels.tap[1 + f, r * KERNEL + s]()
        comptime for pair in range(PAIRS):
            var at = sources.row(top + Int32(2 * pair) * g.stride + Int32(r))
            sums[pair] = _products[dtype, c, 2](at, taps, sums[pair])

    row += lane // 16
    column += lane // 4 % 4
    var to = Int((g.first + row * g.q + column) * Int32(c) + channels.channel)
    comptime for pair in range(PAIRS):
        comptime for part in range(2):
            if row + Int32(2 * pair) < end[0] and column + Int32(4 * part) < end[1]:
                comptime for f in range(2):
                    channels.store[1 + f, part, 4 * part](
                        o,
                        (o.k if f == 0 else o.v).unsafe_offset(to),
                        sums[pair][2 * f],
                        sums[pair][2 * f + 1],
                    )
        to += Int(2 * g.q * Int32(c))


@always_inline
def _windows(begin: Int32, stride: Int32) -> Int32:
    """Counts the windows that begin before a row or column, padding aside."""
    if stride == 2:
        return (begin + 1) >> 1
    return Int32(UInt32(begin + stride - 1) // UInt32(stride))


@__name(t"depthwise_qkv_hopper_{c}_{dtypes[dtype, out]()}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(RESIDENT),
)
def qkv_hopper_kernel[
    dtype: DType, c: Int, out: DType = dtype
](all: QkvOperands[dtype, out], g: QkvSizes):
    """Computes some channels of a tile; block_idx.z counts images, the others the tiles of one.

    Parameters:
        dtype: Of tokens and filters.
        c: Channels.
        out: Of query, key and value.

    Args:
        all: Tensors.
        g: Sizes.
    """
    var o = all.from_image(Int(block_idx.z), g)
    comptime LANES = 8 if c == 64 else 16 if c == 192 else 32
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=128, name="depthwise_qkv"
    ]()
    var tile = _Tile[c](g)
    _normalize[dtype, c, LANES](o, g, tile, shared)
    _barrier(shared, WEIGHTS_COME).wait()
    barrier()

    var across = (min(g.columns, g.w - tile.w0) + STRIP - 1) // STRIP
    var runs = (min(g.rows, g.h - tile.h0) + RUN - 1) // RUN
    # Keys and values whose windows begin in the tile, padding aside.
    var begin = SIMD[DType.int32, 2](_windows(tile.h0, g.stride), _windows(tile.w0, g.stride))
    var end = SIMD[DType.int32, 2](
        min(_windows(tile.h0 + g.rows, g.stride), g.p),
        min(_windows(tile.w0 + g.columns, g.stride), g.q),
    )
    var keys_across = (max(end[1] - begin[1], 0) + KEYS - 1) // KEYS
    var key_runs = (max(end[0] - begin[0], 0) + 2 * PAIRS - 1) // (2 * PAIRS)
    # A warp's items: blocks of channels first, then strips, then runs; queries, then keys.
    var blocks = Int32(UInt32(c // BLOCK) // UInt32(g.parts))
    var before = Int32(UInt32(block_idx.x) % UInt32(g.parts)) * blocks
    var block = Int32(thread_idx.x) // 32
    var strip = Int32(0)
    var run = Int32(0)
    while True:
        while block >= blocks:
            block -= blocks
            strip += 1
            if strip >= (across if run < runs else keys_across):
                strip = 0
                run += 1
        if run < runs:
            _queries(o, g, tile, shared, before + block, strip, run)
        elif run < runs + key_runs and keys_across > 0:
            _keys(o, g, tile, shared, before + block, strip, run - runs, begin, end)
        else:
            break
        block += Int32(block_dim.x) // 32


def _most(g: QkvSizes, tile: Int32, size: Int32) -> Int:
    """Counts the rows (or columns) that a block keeps at most."""
    var most = Int32(0)
    for i in range(Int((size + tile - 1) // tile)):
        most = max(most, _clipped(g, Int32(i) * tile, tile, size)[1])
    return Int(most)


def _kept(g: QkvSizes) -> Int:
    """Counts the tokens of the map that a block keeps at most."""
    return _most(g, g.rows, g.h) * _most(g, g.columns, g.w)


def _bytes(g: QkvSizes) -> Int:
    """Counts the shared memory of a block."""
    var high = _most(g, g.rows, g.h)
    var tokens = _kept(g) + Int(g.first)
    var weights = 2 * ZEROS + (1 + WEIGHTS) * Int(g.c)
    return weights + tokens * (2 * Int(g.c) + 16) + (high + 1) // 2 * 16


comptime FIXED = 130.0
"""What a block costs beside its tokens, in the time that it takes to normalise one of 384 channels."""
comptime QUERY = 4.5
"""What a query and its share of keys and values cost, in that time."""


def _largest[c: Int](sizes: QkvSizes) -> QkvSizes:
    """Cuts the map into equal tiles, as few as possible (H200, 2026-11-21; docs/kernels.md)."""
    comptime ROWS = 14 if c < 384 else 7
    return _cut[c](sizes, ceildiv(Int(sizes.h), ROWS), 1)


def _cut[c: Int](sizes: QkvSizes, down: Int, parts: Int) -> QkvSizes:
    """Cuts the map into equal tiles, and the channels of each into parts."""
    comptime COLUMNS = 28 if c == 64 else 14
    var g = sizes
    g.rows = Int32(ceildiv(Int(g.h), down))
    g.columns = Int32(ceildiv(Int(g.w), ceildiv(Int(g.w), COLUMNS)))
    g.parts = Int32(parts)
    return g


def _tiled[c: Int](sizes: QkvSizes, device: Device) -> QkvSizes:
    """Cuts the map into the equal tiles, and these into parts, that take the least time.

    Blocks that share a tile's channels normalise all of it.
    """
    var largest = _largest[c](sizes)
    var choice = Cheapest(largest, _cost[c](largest, device))
    comptime for parts in [1, 2, 4]:
        comptime if c // BLOCK % parts == 0:
            for down in range(ceildiv(sizes.h, largest.rows), ceildiv(sizes.h, 3) + 1):
                var g = _cut[c](sizes, Int(down), parts)
                choice.offer(g, _cost[c](g, device))
    return choice.best


def _cost[c: Int](g: QkvSizes, device: Device) -> Float64:
    """Estimates the time of a launch (H200, 2026-11-28)."""
    if _bytes(g) > SHARED:
        return NEVER
    var queries = Float64(Int(g.rows) * Int(g.columns)) / Float64(Int(g.parts))
    var each = FIXED + (Float64(_kept(g)) + QUERY * queries) * Float64(c) / 384
    return Float64(device.waves(_tiles(g) * Int(g.parts), RESIDENT)) * each


def _tiles(g: QkvSizes) -> Int:
    """Counts the tiles of all images."""
    var image = ceildiv(Int(g.h), Int(g.rows)) * ceildiv(Int(g.w), Int(g.columns))
    return image * Int(g.images)


def enqueue_tiles[
    dtype: DType, c: Int
](o: QkvOperands[dtype, _], g: QkvSizes, threads: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel with a tiling of the caller's.

    Parameters:
        dtype: Of tokens and filters.
        c: Channels: 64, 192 or 384.

    Args:
        o: Tensors.
        g: Sizes; the parts divide the 16s of channels.
        threads: Of a block: 128, 256 or 384.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[qkv_hopper_kernel[dtype, c, o.out]](
        ctx,
        o,
        g,
        grid_dim=(
            ceildiv(Int(g.w), Int(g.columns)) * Int(g.parts),
            ceildiv(Int(g.h), Int(g.rows)),
            Int(g.images),
        ),
        block_dim=threads,
        shared=_bytes(g),
        most_shared=SHARED,
    )


def enqueue_hopper[
    dtype: DType, //, channels: Int
](o: QkvOperands[dtype, _], sizes: QkvSizes, ctx: DeviceContext) raises -> Bool:
    """Enqueues the kernel if there is one of as many channels, and it is the faster one.

    Parameters:
        dtype: Of tokens and filters.
        channels: As `depthwise_qkv_gpu` has it.

    Args:
        o: Tensors.
        sizes: Sizes.
        ctx: The GPU.

    Returns:
        Whether it has.

    Raises:
        If the launch fails.
    """
    comptime for c in [64, 192, 384]:
        comptime if channels <= 0 or channels == c:
            if Int(sizes.c) == c:
                # From where on it is the faster one (batch 32 of CvT-13; batch 8 is not yet).
                comptime LEAST = 256 if c == 64 else 128 if c == 192 else 64
                var device = Device(ctx)
                if _tiles(_largest[c](sizes)) < LEAST:
                    return False
                var g = _tiled[c](sizes, device)
                if _bytes(g) > SHARED:
                    return False
                # Three small blocks instead of two, if there are enough to keep them coming.
                var many = _tiles(g) >= 8 * device.multiprocessors
                var small = many and device.holds(_bytes(g)) >= 3
                enqueue_tiles[dtype, c](o, g, 256 if small else THREADS, ctx)
                return True
    return False
