"""Layer norm and three depthwise convolutions of a CvT block's tokens, in one kernel.

    n = (x - mean_c x) / sqrt(var_c x + eps) * weight + norm_bias
    q[i, h, w, c] = q_bias[c] + sum_rs n[i, h - pad_q + r, w - pad_q + s, c] wq[r, s, c]
    k[i, p, q, c] = k_bias[c] + sum_rs n[i, p * stride - pad_kv + r, ..., c] wk[r, s, c], v alike

    x[N, T, C]            tokens, T = H * W, or 1 + H * W with the class token first
    w[R, S, C]            each of the three filters, R = S
    q[N, T, C], k and v[N, T', C]; the normalised class token is the first row of each

On Hopper q, k and v may have 8 bits, each with a scale of its own (config.mojo): their sums are
rounded to these at once, the class token to the tokens' type before.

Outside the map n is zero: the padding comes after the norm. A block owns a tile of tokens. It reads
the tile and its margin once, 16 bytes a thread, computes the statistics of each token in the
registers of 8 to 32 lanes (of x - mean, in float32), and keeps n in shared memory as
n[C / 4, token, 4], rounded once to the tokens' type: neighbours lie at constant distances, and an
odd number of tokens keeps the threads of a warp in different banks. Then each thread convolves a
few channels of one token after another, their taps in registers as float32: for queries 4 channels
of 2 neighbours, which share what they see, for keys and values together 2 channels.

Bound by the instructions of the float32 units at large batches, where hopper.mojo has a kernel for
Hopper, by latency at batch 1; docs/kernels.md has the figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, rsqrt
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..choice import Cheapest
from ..device import Device
from ..launch import launch
from ..layernorm import LANES, VECTORS, covering
from ..operands import F32, Data, Shared, dtypes, widened
from ..rows import over_lanes
from ..target import IS_HOPPER
from .config import QkvOperands, QkvSizes
from .hopper import KERNEL, enqueue_hopper

comptime THREADS = 384
"""Threads of a block: every width of CvT-13 divides into them."""
comptime RESIDENT = 2
"""Blocks that a multiprocessor holds at a time, where there are many; bounds the registers."""
comptime SHARED = 112 * 1024
"""Bytes of shared memory that a block takes at most."""
comptime MOST_IMAGES = 65535
"""Images of a launch: what a grid's second and third axes count."""
comptime QUAD = 4
"""Channels that lie together in shared memory."""


struct _Reader[dtype: DType, lanes: Int, vectors: Int](TrivialRegisterPassable):
    """Reads the tokens of a tile, `lanes` threads each, one token after another."""

    comptime WIDE = 16 // size_of[Self.dtype]()
    comptime SLOTS = Int32(THREADS // Self.lanes)

    var x: Data[Self.dtype]
    """The image's tokens."""
    var channel: Int32
    """First channel of this thread."""
    var i: Int32
    """Token of the tile."""
    var h0: Int32
    """Row of the map where the tile begins."""
    var w0: Int32
    """Column of the map where the tile begins."""
    var first: Int32
    """The token's first element in the image."""
    var inside: Bool
    """Whether the token is in the map, or is the class token."""

    @always_inline
    def __init__(out self, x: Data[Self.dtype], h0: Int32, w0: Int32):
        self.x, self.h0, self.w0 = x, h0, w0
        self.channel = Int32(thread_idx.x) % Int32(Self.lanes) * Int32(Self.WIDE)
        self.i = Int32(thread_idx.x) // Int32(Self.lanes)
        self.inside = False
        self.first = 0

    @always_inline
    def locate(mut self, g: QkvSizes, count: Int32):
        """Finds the token; `count` is the class token's number."""
        var h = Int32(UInt32(self.i) // UInt32(g.tile_width()))
        var w = self.i - h * g.tile_width() + self.w0
        h += self.h0
        self.inside = self.i < count and h >= 0 and h < g.h and w >= 0 and w < g.w
        self.first = (g.first + h * g.w + w if self.inside else 0) * g.c
        self.inside = self.inside or self.i == count

    @always_inline
    def read(self, g: QkvSizes) -> Array[SIMD[Self.dtype, Self.WIDE], Self.vectors]:
        """Reads the token, or anything where there is none."""
        var values = Array[SIMD[Self.dtype, Self.WIDE], Self.vectors](fill=0)
        comptime for v in range(Self.vectors):
            var at = self.channel + Int32(v * Self.lanes * Self.WIDE)
            values[v] = self.x.unsafe_load[width=Self.WIDE, alignment=16](
                Int(self.first + (at if at < g.c else 0))
            )
        return values^


struct _Norm[dtype: DType, out: DType, lanes: Int, vectors: Int, held: Bool]:
    """Weight and bias of the channels that a thread normalises.

    Parameters:
        dtype: Of the tokens.
        out: Of query, key and value.
        lanes: Threads that normalise a token.
        vectors: Vectors of 16 bytes of each.
        held: Whether registers hold them.
    """

    comptime WIDE = 16 // size_of[Self.dtype]()
    comptime HELD = Self.vectors if Self.held else 0

    var o: QkvOperands[Self.dtype, Self.out]
    """Where both are, if registers do not hold them."""
    var weight: Array[SIMD[F32, Self.WIDE], Self.HELD]
    """The norm's weight, vector by vector."""
    var bias: Array[SIMD[F32, Self.WIDE], Self.HELD]
    """The norm's bias, likewise."""

    @always_inline
    def __init__(out self, o: QkvOperands[Self.dtype, Self.out], g: QkvSizes, first: Int32):
        """Loads both if they are held; `first` is the first vector's channel."""
        self.o = o
        self.weight = Array[SIMD[F32, Self.WIDE], Self.HELD](fill=0)
        self.bias = Array[SIMD[F32, Self.WIDE], Self.HELD](fill=0)
        comptime for v in range(Self.HELD):
            var at = first + Int32(v * Self.lanes * Self.WIDE)
            var channel = at if at < g.c else 0
            self.weight[v] = self.load(o.weight, channel)
            self.bias[v] = self.load(o.norm_bias, channel)

    @always_inline
    def load(self, vector: Data[F32], channel: Int32) -> SIMD[F32, Self.WIDE]:
        """Loads numbers of a vector's channels."""
        return vector.unsafe_load[width=Self.WIDE, alignment=16](Int(channel))

    @always_inline
    def apply[v: Int](self, n: SIMD[F32, Self.WIDE], channel: Int32) -> SIMD[F32, Self.WIDE]:
        """Scales and shifts normalised numbers."""
        comptime if Self.held:
            return n.fma(self.weight[v], self.bias[v])
        else:
            return n.fma(self.load(self.o.weight, channel), self.load(self.o.norm_bias, channel))


@always_inline
def _normalize[
    dtype: DType, lanes: Int, vectors: Int, //
](
    first: _Reader[dtype, lanes, vectors],
    norm: _Norm[dtype, _, lanes, vectors, _],
    g: QkvSizes,
    tile: Shared[dtype],
    extra: Int32,
):
    """Fills the tile from the reader's token on, and then the class token if `extra` is 1."""
    comptime WIDE = 16 // size_of[dtype]()
    comptime ALIGNMENT = QUAD * size_of[dtype]()
    var c = g.c
    var share = 1 / Float32(c)
    var pitch = g.pitch() * Int32(QUAD)
    var count = g.tile_height() * g.tile_width()
    var reader = first
    var ahead = reader.read(g)
    # The lanes of a warp stay together: they exchange sums.
    var turns = (count + extra + reader.SLOTS - 1) // reader.SLOTS
    for turn in range(turns):
        var values = ahead.copy()
        var inside = reader.inside
        var i = reader.i
        if turn + 1 < turns:
            reader.i += reader.SLOTS
            reader.locate(g, count)
            ahead = reader.read(g)
        var sum = Float32(0)
        comptime for v in range(vectors):
            var part = widened(values[v]).reduce_add()
            sum += part if reader.channel + Int32(v * lanes * WIDE) < c else 0
        var mean = over_lanes[lanes](sum) * share
        var squares = Float32(0)
        comptime for v in range(vectors):
            var d = widened(values[v]) - mean
            var part = (d * d).reduce_add()
            squares += part if reader.channel + Int32(v * lanes * WIDE) < c else 0
        var scale = rsqrt(over_lanes[lanes](squares) * share + g.eps)
        var shift = SIMD[F32, WIDE](-mean * scale)
        comptime for v in range(vectors):
            var at = reader.channel + Int32(v * lanes * WIDE)
            if at < c and i < count + extra:
                var n = widened(values[v]).fma(SIMD[F32, WIDE](scale), shift)
                var rounded = norm.apply[v](n, at).cast[dtype]()
                if not inside:
                    rounded = 0
                var to = at // Int32(QUAD) * pitch + i * Int32(QUAD)
                comptime for part in range(WIDE // QUAD):
                    tile.unsafe_store[alignment=ALIGNMENT](
                        Int(to + Int32(part) * pitch), rounded.slice[QUAD, offset=part * QUAD]()
                    )


@always_inline
def _pass_by[dtype: DType](o: QkvOperands[dtype, _], g: QkvSizes, tile: Shared[dtype]):
    """Stores the class token, which lies behind the tile and its margin, in all outputs."""
    var token = g.tile_height() * g.tile_width()
    var quad = Int32(thread_idx.x)
    if quad * Int32(QUAD) < g.c:
        var n = tile.unsafe_load[width=QUAD, alignment=QUAD * size_of[dtype]()](
            Int((quad * g.pitch() + token) * Int32(QUAD))
        )
        o.store_class_token(Int(quad * Int32(QUAD)), n)


@fieldwise_init
struct _Area(TrivialRegisterPassable):
    """The outputs whose windows begin in a tile."""

    var corner: Int32
    """Token of the tile where the first window begins."""
    var stride: Int32
    """Tokens between windows; 1 if outputs come in strips."""
    var high: Int32
    """Rows of outputs; 0 or less if there are none, as for `broad`."""
    var broad: Int32
    """Outputs of a row."""
    var first: Int32
    """Where the first output goes, in tokens."""
    var width: Int32
    """Outputs of a row of the map."""


struct _Convolutions[
    dtype: DType, out: DType, kernel: Int, count: Int, channels: Int, strip: Int, held: Bool
]:
    """Convolves a tile with `count` filters, some channels and neighbouring outputs at a time.

    Parameters:
        dtype: Of tokens and filters.
        out: Of the outputs.
        kernel: Taps of a side of the window.
        count: Filters: the query's, or the key's and the value's.
        channels: Channels that a thread computes at a time.
        strip: Neighbouring outputs that a thread computes at a time.
        held: Whether the taps of the thread's first channels are loaded when this is made.
    """

    comptime TAPS = Self.kernel * Self.kernel

    var filters: Array[Data[Self.dtype], Self.count]
    """[R, S, C] each."""
    var biases: Array[Data[F32], Self.count]
    """[C] each."""
    var outputs: Array[Data[Self.out], Self.count]
    """The image's, from the first token of the map on."""
    var c: Int32
    """C."""
    var group: Int32
    """The thread's first channels, in groups."""
    var groups: Int32
    """Groups of channels that threads have side by side."""
    var part: Int32
    """The thread's first strip of outputs."""
    var parts: Int32
    """Threads that share a group's outputs; the others of the block have none."""
    var taps: Array[SIMD[Self.dtype, Self.channels], Self.count * Self.TAPS]
    """Of the group that was loaded last."""
    var bias: Array[SIMD[F32, Self.channels], Self.count]
    """Of the same."""

    @always_inline
    def __init__(
        out self,
        filters: Array[Data[Self.dtype], Self.count],
        biases: Array[Data[F32], Self.count],
        outputs: Array[Data[Self.out], Self.count],
        c: Int32,
        t: Int32,
    ):
        """Takes the tensors, and divides the work by the thread's number: small ones have some first."""
        self.filters = filters.copy()
        self.biases = biases.copy()
        self.outputs = outputs.copy()
        self.c = c
        self.groups = min(c // Int32(Self.channels), Int32(THREADS))
        self.part = Int32(UInt32(t) // UInt32(self.groups))
        self.parts = Int32(UInt32(THREADS) // UInt32(self.groups))
        self.group = t - self.part * self.groups
        self.taps = Array[SIMD[Self.dtype, Self.channels], Self.count * Self.TAPS](fill=0)
        self.bias = Array[SIMD[F32, Self.channels], Self.count](fill=0)
        comptime if Self.held:
            self.load(self.group)

    @always_inline
    def load(mut self, group: Int32):
        """Loads the taps and biases of some channels of all filters."""
        comptime ALIGNMENT = Self.channels * size_of[Self.dtype]()
        var channel = group * Int32(Self.channels)
        comptime for f in range(Self.count):
            comptime for i in range(Self.TAPS):
                self.taps[f * Self.TAPS + i] = self.filters[f].unsafe_load[
                    width=Self.channels, alignment=ALIGNMENT
                ](Int(Int32(i) * self.c + channel))
            self.bias[f] = self.biases[f].unsafe_load[
                width=Self.channels, alignment=Self.channels * 4
            ](Int(channel))

    @always_inline
    def convolve(
        mut self,
        tile: Shared[Self.dtype],
        g: QkvSizes,
        area: _Area,
        o: QkvOperands[Self.dtype, Self.out],
    ):
        """Computes the outputs of an area."""
        comptime ALIGNMENT = Self.channels * size_of[Self.dtype]()
        comptime SEEN = Self.strip + Self.kernel - 1
        if self.part >= self.parts:
            return
        var strips = (area.broad + Int32(Self.strip) - 1) // Int32(Self.strip)
        var outputs = max(area.high, 0) * max(strips, 0)
        var group = self.group
        comptime if not Self.held:
            self.load(group)
        while True:
            var channel = group * Int32(Self.channels)
            var taps = Array[SIMD[F32, Self.channels], Self.count * Self.TAPS](fill=0)
            comptime for i in range(Self.count * Self.TAPS):
                taps[i] = widened(self.taps[i])
            var quad = channel // Int32(QUAD) * g.pitch() * Int32(QUAD) + channel % Int32(QUAD)
            var i = self.part
            while i < outputs:
                var row = Int32(UInt32(i) // UInt32(strips))
                var column = (i - row * strips) * Int32(Self.strip)
                var sums = Array[SIMD[F32, Self.channels], Self.count * Self.strip](fill=0)
                comptime for j in range(Self.count * Self.strip):
                    sums[j] = self.bias[j // Self.strip]
                var at = area.corner + (row * g.tile_width() + column) * area.stride
                comptime for r in range(Self.kernel):
                    var seen = tile.unsafe_offset(
                        Int(quad + (at + Int32(r) * g.tile_width()) * Int32(QUAD))
                    )
                    comptime for s in range(SEEN):
                        var n = widened(
                            seen.unsafe_load[width=Self.channels, alignment=ALIGNMENT](s * QUAD)
                        )
                        comptime for f in range(Self.count):
                            comptime for j in range(Self.strip):
                                comptime if 0 <= s - j < Self.kernel:
                                    sums[f * Self.strip + j] = n.fma(
                                        taps[f * Self.TAPS + r * Self.kernel + s - j],
                                        sums[f * Self.strip + j],
                                    )
                var to = (area.first + row * area.width + column) * self.c + channel
                comptime for f in range(Self.count):
                    comptime for j in range(Self.strip):
                        # Past the row's end the last output is stored again: no branch.
                        comptime if j > 0:
                            if column + Int32(j) >= area.broad:
                                sums[f * Self.strip + j] = sums[f * Self.strip + j - 1]
                        self.outputs[f].unsafe_store[alignment=Self.channels * size_of[Self.out]()](
                            Int(to + min(Int32(j), area.broad - 1 - column) * self.c),
                            o.stored[Self.count - 1 + f](sums[f * Self.strip + j]),
                        )
                i += self.parts
            group += self.groups
            if group >= self.c // Int32(Self.channels):
                break
            self.load(group)


@__name(t"depthwise_qkv_{'few_' if few else ''}{kernel}_{lanes}x{vectors}_{dtypes[dtype, out]()}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(1 if few else RESIDENT),
)
def qkv_kernel[
    dtype: DType, kernel: Int, lanes: Int, vectors: Int, few: Bool, out: DType = dtype
](all: QkvOperands[dtype, out], g: QkvSizes):
    """Computes a tile; block_idx.x counts tiles of an image, block_idx.y images.

    With few tiles only what a block does after the kernel ahead adds to the time. So it loads its filters
    and norm, which no kernel writes, into registers before.

    Parameters:
        dtype: Of tokens and filters.
        kernel: Taps of a side of the window.
        lanes: Threads that normalise a token: 8, 16 or 32.
        vectors: Vectors of 16 bytes of each; they cover the channels.
        few: Whether there is at most one tile a multiprocessor.
        out: Of query, key and value.

    Args:
        all: Tensors.
        g: Sizes.
    """
    var o = all.from_image(Int(block_idx.y), g)
    var t = Int32(thread_idx.x)
    var across = UInt32(g.w + g.columns - 1) // UInt32(g.columns)
    var down = UInt32(block_idx.x) // across
    var h0 = Int32(down) * g.rows
    var w0 = Int32(UInt32(block_idx.x) - down * across) * g.columns
    var tile = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16, name="depthwise_qkv"
    ]()
    var margin = g.margin()
    var extra = g.first if block_idx.x == 0 else 0
    var skipped = Int(g.first * g.c)
    var reader = _Reader[dtype, lanes, vectors](o.x, h0 - margin, w0 - margin)
    reader.locate(g, g.tile_height() * g.tile_width())
    var norm = _Norm[dtype, out, lanes, vectors, few](o, g, reader.channel)

    var q = _Convolutions[dtype, out, kernel, 1, 4, 2, few](
        [o.q_filter],
        [o.q_bias],
        [o.q.unsafe_offset(skipped)],
        g.c,
        t,
    )
    var queries = _Area(
        corner=(margin - g.pad_q) * (g.tile_width() + 1),
        stride=1,
        high=min(g.rows, g.h - h0),
        broad=min(g.columns, g.w - w0),
        first=h0 * g.w + w0,
        width=g.w,
    )
    var kv = _Convolutions[dtype, out, kernel, 2, 2, 1, few](
        [o.k_filter, o.v_filter],
        [o.k_bias, o.v_bias],
        [o.k.unsafe_offset(skipped), o.v.unsafe_offset(skipped)],
        g.c,
        Int32(THREADS - 1) - t,  # from the last thread on: not the warps that have queries
    )
    # Those whose windows begin in the tile, padding aside.
    var stride = UInt32(g.stride)
    var p0 = Int32(UInt32(h0 + g.stride - 1) // stride)
    var q0 = Int32(UInt32(w0 + g.stride - 1) // stride)
    var keys = _Area(
        corner=(p0 * g.stride - h0 + margin - g.pad_kv) * g.tile_width()
        + (q0 * g.stride - w0 + margin - g.pad_kv),
        stride=g.stride,
        high=min(Int32(UInt32(h0 + g.rows + g.stride - 1) // stride), g.p) - p0,
        broad=min(Int32(UInt32(w0 + g.columns + g.stride - 1) // stride), g.q) - q0,
        first=p0 * g.q + q0,
        width=g.q,
    )

    wait_on_dependent_grids()
    launch_dependent_grids()
    _normalize(reader, norm, g, tile, extra)
    barrier()
    if extra == 1:
        _pass_by(o, g, tile)
    q.convolve(tile, g, queries, o)
    kv.convolve(tile, g, keys, o)


def _blocks(g: QkvSizes) -> Int:
    """Counts the tiles of an image."""
    return ceildiv(Int(g.h), Int(g.rows)) * ceildiv(Int(g.w), Int(g.columns))


def _bytes[dtype: DType](g: QkvSizes) -> Int:
    """Counts the bytes of a tile and its margin."""
    return Int(g.pitch() * g.c) * size_of[dtype]()


def _cost(g: QkvSizes, device: Device) -> Float64:
    """Estimates the clocks that all tiles take: latency a wave, then the instructions.

    Counted for 8 channels of a token: 100 to normalise it, 190 for its query, 410 for a key and
    value; a multiprocessor issues 2.8 of 32 threads a clock.
    """
    var tokens = Float64(Int(g.rows) * Int(g.columns))
    var work = (
        100 * Float64(Int(g.tile_height()) * Int(g.tile_width()))
        + 190 * tokens
        + 410 * tokens / Float64(Int(g.stride) ** 2)
    )
    var blocks = Int(g.images) * _blocks(g)
    var turns = Float64(device.waves(blocks))
    var waves = Float64(device.waves(blocks, RESIDENT))
    return waves * 4000 + turns * work * Float64(Int(g.c)) / (8 * 32 * 2.8)


def _room(device: Device) -> Int:
    """Counts the bytes of shared memory that a block may take: sm_86 and sm_89 give it 99 KB."""
    return min(SHARED, device.shared)


def _tiled[dtype: DType](sizes: QkvSizes, device: Device) -> QkvSizes:
    """Chooses the tile: the least estimate of those that fit into shared memory."""
    var g = sizes
    g.rows = g.columns = 1
    var choice = Cheapest(g, _cost(g, device))
    g.rows = 0
    for down in range(1, Int(g.h) + 1):
        var rows = Int32(ceildiv(Int(g.h), down))
        if rows == g.rows:
            continue
        g.rows = rows
        g.columns = 0
        for across in range(1, Int(g.w) + 1):
            var columns = Int32(ceildiv(Int(g.w), across))
            if columns == g.columns:
                continue
            g.columns = columns
            if _bytes[dtype](g) <= _room(device):
                choice.offer(g, _cost(g, device))
    return choice.best


def _enqueue[
    dtype: DType, kernel: Int, lanes: Int, vectors: Int
](o: QkvOperands[dtype, _], sizes: QkvSizes, ctx: DeviceContext) raises:
    var device = Device(ctx)
    var g = _tiled[dtype](sizes, device)
    comptime for few in [False, True]:
        if few == (_blocks(g) * Int(g.images) <= device.multiprocessors):
            launch[qkv_kernel[dtype, kernel, lanes, vectors, few, o.out]](
                ctx,
                o,
                g,
                grid_dim=(_blocks(g), Int(g.images)),
                block_dim=THREADS,
                shared=_bytes[dtype](g),
                most_shared=_room(device),
            )


def depthwise_qkv_gpu[
    dtype: DType, kernel: Int, channels: Int = 0
](o: QkvOperands[dtype, _], g: QkvSizes, ctx: DeviceContext) raises:
    """Enqueues the projections of all images: hopper.mojo's kernel where it is faster, or this file's.

    Parameters:
        dtype: Of tokens and filters.
        kernel: Taps of a side of the window.
        channels: C if it is known at compile time, else not positive: only kernels that can serve C are
            compiled.

    Args:
        o: Tensors.
        g: Sizes; graphs/nodes.py sends only those that fit.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    for first in range(0, Int(g.images), MOST_IMAGES):
        var some = g
        some.images = Int32(min(MOST_IMAGES, Int(g.images) - first))
        _enqueue_some[dtype, kernel, channels](o.from_image(first, g), some, ctx)


def _enqueue_some[
    dtype: DType, kernel: Int, channels: Int
](o: QkvOperands[dtype, _], g: QkvSizes, ctx: DeviceContext) raises:
    """Enqueues the projections of as many images as a grid can count."""
    comptime if IS_HOPPER and kernel == KERNEL and size_of[dtype]() == 2:
        if enqueue_hopper[channels=channels](o, g, ctx):
            return
    comptime for i in range(len(LANES)):
        comptime lanes = LANES[i]
        comptime vectors = VECTORS[i]
        comptime if channels <= 0 or covering(channels * size_of[dtype]()) == i:
            if covering(Int(g.c) * size_of[dtype]()) == i:
                _enqueue[dtype, kernel, lanes, vectors](o, g, ctx)
