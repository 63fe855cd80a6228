"""Two matrix products, one after the other, on Hopper's tensor cores (a back-to-back GEMM).

    h[m, k] = act(sum_c x[m, c] w1[k, c] + bias1[k] + residual[m, k])
    z[m, f] = act(sum_k h[m, k] w2[f, k] + bias2[f] + skip[m, f])

    MLP:    x = norm(tokens), act = GELU, nothing; skip = tokens. h is never stored.
    Chain:  act = relu, relu; h is stored, and never read again.

A block computes tiles of `64 * groups` rows, 64 by each consumer, a warpgroup. A consumer goes
through h in chunks of 64 columns: the first product's float32 sums pass the activation in the
registers where they are, which are, rounded to 16 bits, the left side of the second product (as in
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608). Its sums stay in registers until the last
chunk. Tokens are normalised in shared memory, where they lie.

One thread, the producer, has the copy engine (TMA) bring in rows of x, weights and the residual
of each chunk. Weights that fit stay in shared memory for the whole launch; others come through a
ring of stages, chunk after chunk, for all consumers of a block. The chunk of h overwrites its
residual, z its x, and both leave by the copy engine. Consumers wait for one another nowhere else,
so that activations of one overlap products of another.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.math import ceildiv, rsqrt
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, widened
from ..rows import over_lanes
from .old import GROUP, MAP, MATRIX, PROCESSORS, ROW, ROWS, Maps, Ring, tensor_map
from ..hopper.mma import mma_registers
from ..hopper.ptx import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    fence_async,
    fence_barrier_init,
    load_2d,
    prefetch_map,
    registers_give,
    registers_take,
    shared_load2,
    shared_load4,
    shared_load_matrices,
    shared_store_float,
    shared_store_matrices,
    store_2d,
    stores_commit,
    stores_read,
    sync_threads,
)

comptime WIDTH = 64
"""Numbers of 128 bytes: columns of a box, and of a chunk of h."""
comptime BOX = ROWS * ROW
"""Bytes of 64 rows of a box."""
comptime SUMS = 32
"""Sums of a thread, of 64 rows x 64 columns by a warpgroup."""
comptime SHARED = 227 * 1024
"""Bytes of shared memory that a block may have."""
comptime KEPT = 24
"""Registers of a thread of the producer's warpgroup."""


struct ChainConfig(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 rows each."""
    var c: Int
    """Boxes of 64 columns of x."""
    var f: Int
    """Boxes of 64 columns of z."""
    var stages: Int
    """Stages of weights: a chunk has one of w1 and one of w2."""
    var resident: Bool
    """Whether the stages hold all weights."""
    var rows: Int
    """Tiles of x that each consumer has room for."""
    var chunks: Int
    """Chunks of h that each consumer has room for; 0 if h is not stored."""

    def __init__(
        out self,
        *,
        groups: Int,
        c: Int,
        f: Int,
        stages: Int,
        resident: Bool,
        rows: Int,
        chunks: Int = 0,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            c: Boxes of x.
            f: Boxes of z.
            stages: Stages of weights.
            resident: Whether the stages hold all weights.
            rows: Tiles of x.
            chunks: Chunks of h.
        """
        self.groups, self.c, self.f, self.stages = groups, c, f, stages
        self.resident, self.rows, self.chunks = resident, rows, chunks

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Rows, C, F and stages.
        """
        var sizes = t"{ROWS * self.groups}x{WIDTH * self.c}x{WIDTH * self.f}x{self.stages}"
        return String(sizes)

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's.
        """
        return GROUP * (self.groups + 1)

    @always_inline
    def registers(self) -> Int:
        """Counts the registers of a consumer's thread.

        Returns:
            What the producer's threads leave of those that a launch is given.
        """
        var each = 65536 // self.threads() // 8 * 8
        return min((each * (self.groups + 1) - KEPT) // self.groups // 8 * 8, 240)

    @always_inline
    def stage(self, index: Int) -> Int:
        """Finds a stage of weights.

        Args:
            index: Its number.

        Returns:
            Bytes from the first stage; stages of w1 and w2 take turns.
        """
        return (index // 2 * (self.c + self.f) + index % 2 * self.c) * BOX

    @always_inline
    def unit(self) -> Int:
        """Counts the bytes of 64 rows of x, and of z in their place.

        Returns:
            Of the wider.
        """
        return max(self.c, self.f) * BOX

    @always_inline
    def barriers(self) -> Int:
        """Counts the stages that have a pair of barriers.

        Returns:
            Weights, tiles of x and chunks of h.
        """
        return self.stages + self.groups * (self.rows + self.chunks)

    @always_inline
    def buffers(self) -> Int:
        """Counts the bytes of all stages.

        Returns:
            Weights, tiles of x and chunks of h.
        """
        return self.stage(self.stages) + self.groups * (self.rows * self.unit() + self.chunks * BOX)

    @always_inline
    def shared(self, hidden: Int) -> Int:
        """Counts the bytes of shared memory.

        Args:
            hidden: Chunks of h.

        Returns:
            The stages, their barriers, biases and norm, and what aligning them may take.
        """
        var vectors = (2 * hidden + self.f + 2 * self.c) * WIDTH * 4
        return self.buffers() + 16 * self.barriers() + vectors + 1024


comptime LEAST = PROCESSORS // 4
"""Tiles of a launch from which on it pays to keep all weights; with fewer, split-K does better.

H200, 2026-11-21: ResNet-50 at batch 1, 17 to 25 tiles, 0.210 ms and 0.207 by parts.
"""
comptime LEAST_STREAMED = PROCESSORS // 2
"""The same where weights stream in.

H200, 2026-11-21: MLP 192 -> 768 -> 192, 49 tiles 21 µs, as much as its parts; 98 tiles 22 of 37.
"""


@always_inline
def chain_config(mlp: Bool, c: Int, f: Int) -> ChainConfig:
    """Chooses a tile: what fits into 227 KB of shared memory, and was fastest on an H200.

    Args:
        mlp: Whether h is not stored.
        c: C of x.
        f: F of z.

    Returns:
        The tile; `groups` is 0 where there is none.
    """
    if mlp and c == 64 and f == 64:
        return ChainConfig(groups=4, c=1, f=1, stages=8, resident=True, rows=3)
    if mlp and c == 192 and f == 192:
        return ChainConfig(groups=2, c=3, f=3, stages=5, resident=False, rows=2)
    if not mlp and c == 64 and f == 64:
        return ChainConfig(groups=3, c=1, f=1, stages=8, resident=True, rows=2, chunks=4)
    if not mlp and c == 64 and f == 128:
        return ChainConfig(groups=2, c=1, f=2, stages=8, resident=True, rows=2, chunks=3)
    if not mlp and c == 128 and f == 128:
        return ChainConfig(groups=2, c=2, f=2, stages=5, resident=False, rows=2, chunks=4)
    return ChainConfig(groups=0, c=0, f=0, stages=0, resident=False, rows=0)


struct ChainEnds(KernelArgument, TrivialRegisterPassable):
    """The vectors that the sums meet: pointers alone, so that LLVM knows their memory is global."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var bias1: Data[F32]
    """Of h."""
    var bias2: Data[F32]
    """Of z[F]."""
    var weight: Data[F32]
    """Of the layer norm [C]; any pointer if there is none."""
    var bias: Data[F32]
    """Of the layer norm [C]; any pointer if there is none."""

    def __init__(out self, bias1: Data[F32], bias2: Data[F32], weight: Data[F32], bias: Data[F32]):
        """Names them.

        Args:
            bias1: Of h.
            bias2: Of z.
            weight: Of the layer norm.
            bias: Of the layer norm.
        """
        self.bias1, self.bias2, self.weight, self.bias = bias1, bias2, weight, bias


struct ChainSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of a chain."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var tiles: Int32
    """Tiles of rows."""
    var chunks: Int32
    """Chunks of 64 columns of h."""
    var hidden: Int32
    """Columns of h."""
    var eps: Float32
    """Added to the variance of the layer norm."""

    def __init__(out self, *, tiles: Int, hidden: Int, eps: Float32):
        """Names the sizes.

        Args:
            tiles: Tiles of rows.
            hidden: Columns of h.
            eps: Added to the variance.
        """
        self.tiles, self.hidden, self.eps = Int32(tiles), Int32(hidden), eps
        self.chunks = Int32(ceildiv(hidden, WIDTH))


@__name(t"{op}_hopper_{config.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(1),
)
def chain_kernel[
    dtype: DType, op: StaticString, config: ChainConfig
](maps: Maps[6], ends: ChainEnds, sizes: ChainSizes):
    """Computes tiles.

    Parameters:
        dtype: Of x, w1, w2, h and z.
        op: "layernorm_mlp" or "conv2d_chain".
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x, w1[K, C], w2[F, K], z, the residual and h.
        ends: Biases and norm.
        sizes: How many tiles and chunks there are.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="hopper_chain"
    ]()
    var at = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    var barriers = at + UInt32(config.buffers())
    var vectors = barriers + UInt32(16 * config.barriers())
    var t = Int32(thread_idx.x)
    if t == 0:
        comptime for i in range(2 * config.barriers()):
            comptime readers = config.groups if i // config.stages == 1 else 1
            barrier_init(barriers + UInt32(8 * i), UInt32(readers))
        fence_barrier_init()
    for i in range(t, sizes.chunks * Int32(WIDTH), Int32(config.threads())):
        var value = Float32(0)
        if i < sizes.hidden:
            value = ends.bias1[unsafe_offset=Int(i)]
        # Twice, as a thread's sums of two rows have it.
        comptime for row in range(2):
            shared_store_float(vectors + UInt32(i // 2 * 16 + i % 2 * 4 + Int32(8 * row)), value)
    var after = vectors + UInt32(sizes.chunks) * UInt32(WIDTH * 8)
    for i in range(t, Int32(config.f * WIDTH), Int32(config.threads())):
        shared_store_float(after + UInt32(i) * 4, ends.bias2[unsafe_offset=Int(i)])
    comptime if op == "layernorm_mlp":
        for i in range(t, Int32(config.c * WIDTH), Int32(config.threads())):
            var to = after + UInt32(config.f * WIDTH * 4) + UInt32(i) * 4
            shared_store_float(to, ends.weight[unsafe_offset=Int(i)])
            shared_store_float(to + UInt32(config.c * WIDTH * 4), ends.bias[unsafe_offset=Int(i)])
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    if t // Int32(GROUP) == Int32(config.groups):
        registers_give[KEPT]()
        # One thread drives the copy engine.
        if t % Int32(GROUP) == 0:
            _produce[dtype, op, config](UInt64(Int(Pointer(to=maps))), sizes, at, barriers)
    else:
        registers_take[config.registers()]()
        _consume[dtype, op, config](UInt64(Int(Pointer(to=maps))), sizes, at, barriers, vectors, t)


@always_inline
def _ring(at: UInt32, barriers: UInt32, count: Int) -> Ring:
    """Makes a ring whose barriers of filled stages lie before those of read ones."""
    return Ring(at, barriers, barriers + UInt32(8 * count))


@always_inline
def _tiles_of[config: ChainConfig](at: UInt32, barriers: UInt32, group: UInt32) -> Ring:
    """Finds a consumer's tiles of x."""
    comptime first = config.stage(config.stages)
    return _ring(
        at + UInt32(first) + group * UInt32(config.rows * config.unit()),
        barriers + UInt32(16 * config.stages) + group * UInt32(16 * config.rows),
        config.rows,
    )


@always_inline
def _chunks_of[config: ChainConfig](at: UInt32, barriers: UInt32, group: UInt32) -> Ring:
    """Finds a consumer's chunks of h."""
    comptime first = config.stage(config.stages) + config.groups * config.rows * config.unit()
    comptime pairs = config.stages + config.groups * config.rows
    return _ring(
        at + UInt32(first) + group * UInt32(config.chunks * BOX),
        barriers + UInt32(16 * pairs) + group * UInt32(16 * config.chunks),
        config.chunks,
    )


@always_inline
def _load_weights[config: ChainConfig](maps: UInt64, at: UInt32, full: UInt32, stage: Int32):
    """Starts copying the weights of a stage: even ones are of w1, odd ones of w2."""
    var chunk = stage // 2
    if stage % 2 == 0:
        barrier_expect(full, UInt32(config.c * BOX))
        comptime for i in range(config.c):
            load_2d(
                at + UInt32(i * BOX),
                maps + MAP,
                full,
                Int32(i * WIDTH),
                chunk * Int32(WIDTH),
            )
    else:
        barrier_expect(full, UInt32(config.f * BOX))
        load_2d(at, maps + 2 * MAP, full, chunk * Int32(WIDTH), 0)


@always_inline
def _stage[config: ChainConfig](at: UInt32, slot: UInt32) -> UInt32:
    """Finds a stage of weights."""
    comptime if config.c == config.f:
        return at + slot * UInt32(config.c * BOX)
    else:
        comptime assert config.stages % 2 == 0, "chain: stages of two sizes come in pairs"
        var pair = at + slot // 2 * UInt32((config.c + config.f) * BOX)
        return pair + slot % 2 * UInt32(config.c * BOX)


@always_inline
def _produce[
    dtype: DType, op: StaticString, config: ChainConfig
](maps: UInt64, sizes: ChainSizes, at: UInt32, barriers: UInt32):
    """Fills the rings, tile after tile, as stages become free."""
    comptime if op == "conv2d_chain":
        prefetch_map(maps + 4 * MAP)
    prefetch_map(maps)
    var weights = _ring(at, barriers, config.stages)
    # Weights do not depend on the kernel before.
    var early = min(2 * sizes.chunks, Int32(config.stages))
    for i in range(early):
        _load_weights[config](maps, _stage[config](at, UInt32(i)), weights.full + 8 * UInt32(i), i)
    wait_on_dependent_grids()

    var rows = Array[Ring, config.groups](fill=weights)
    var chunks = Array[Ring, config.groups](fill=weights)
    comptime for g in range(config.groups):
        rows[g] = _tiles_of[config](at, barriers, UInt32(g))
        comptime if config.chunks > 0:
            chunks[g] = _chunks_of[config](at, barriers, UInt32(g))
    for tile in range(Int32(block_idx.x), sizes.tiles, Int32(grid_dim.x)):
        var m0 = tile * Int32(ROWS * config.groups)
        comptime for g in range(config.groups):
            var full = rows[g].full + 8 * rows[g].slot
            barrier_wait(rows[g].empty + 8 * rows[g].slot, rows[g].parity ^ 1)
            barrier_expect(full, UInt32(config.c * BOX))
            comptime for i in range(config.c):
                load_2d(
                    rows[g].stages + rows[g].slot * UInt32(config.unit()) + UInt32(i * BOX),
                    maps,
                    full,
                    Int32(i * WIDTH),
                    m0 + Int32(g * ROWS),
                )
            rows[g].advance[config.rows]()
        for chunk in range(sizes.chunks):
            comptime if not config.resident:
                comptime for half in range(2):
                    if early > 0:
                        early -= 1
                    else:
                        barrier_wait(weights.empty + 8 * weights.slot, weights.parity ^ 1)
                        _load_weights[config](
                            maps,
                            _stage[config](at, weights.slot),
                            weights.full + 8 * weights.slot,
                            2 * chunk + Int32(half),
                        )
                    weights.advance[config.stages]()
            comptime if config.chunks > 0:
                comptime for g in range(config.groups):
                    var full = chunks[g].full + 8 * chunks[g].slot
                    barrier_wait(chunks[g].empty + 8 * chunks[g].slot, chunks[g].parity ^ 1)
                    barrier_expect(full, UInt32(BOX))
                    load_2d(
                        chunks[g].stages + chunks[g].slot * UInt32(BOX),
                        maps + 4 * MAP,
                        full,
                        chunk * Int32(WIDTH),
                        m0 + Int32(g * ROWS),
                    )
                    chunks[g].advance[config.chunks]()


@always_inline
def _normalise[
    dtype: DType, config: ChainConfig
](x: UInt32, weight: UInt32, lane: UInt32, eps: Float32):
    """Normalises 16 rows in shared memory; a thread has a quarter of two of them."""
    comptime C = Float32(config.c * WIDTH)
    var mean = SIMD[F32, 2](0)
    comptime for k in range(4 * config.c):
        var v = widened(_load_rows[dtype, k](x, lane))
        mean[0] += v[0] + v[1] + v[4] + v[5]
        mean[1] += v[2] + v[3] + v[6] + v[7]
    comptime for half in range(2):
        mean[half] = over_lanes[4](mean[half]) / C
    var scale = SIMD[F32, 2](0)
    comptime for k in range(4 * config.c):
        var v = widened(_load_rows[dtype, k](x, lane))
        comptime for i in range(8):
            var d = v[i] - mean[i // 2 % 2]
            scale[i // 2 % 2] = d.fma(d, scale[i // 2 % 2])
    comptime for half in range(2):
        scale[half] = rsqrt(over_lanes[4](scale[half]) / C + eps)
    comptime for k in range(4 * config.c):
        var v = widened(_load_rows[dtype, k](x, lane))
        comptime for j in range(2):
            var at = weight + UInt32(4 * (16 * k + 8 * j)) + lane % 4 * 8
            var w = shared_load2(at)
            var b = shared_load2(at + UInt32(config.c * WIDTH * 4))
            comptime for i in range(4):
                comptime n = 4 * j + i
                v[n] = ((v[n] - mean[i // 2]) * scale[i // 2]).fma(w[i % 2], b[i % 2])
        _store_rows[k](x, lane, v.cast[dtype]())


@always_inline
def _place[k: Int](at: UInt32, lane: UInt32) -> UInt32:
    """Finds the row of 16 bytes that a lane names for 16 rows x 16 columns, the k-th of a tile.

    Lanes 0 to 15 name the rows' first eight columns, the others the next eight.
    """
    var row = lane % 16
    var sixteenth = UInt32(k % 4 * 2) + lane // 16
    return at + UInt32(k // 4 * BOX) + row * UInt32(ROW) + (sixteenth ^ row % 8) * 16


@always_inline
def _load_rows[dtype: DType, k: Int](at: UInt32, lane: UInt32) -> SIMD[dtype, 8]:
    """Loads two numbers of two rows, and two that are eight columns on, into each lane."""
    return bitcast[dtype, 8](shared_load_matrices(_place[k](at, lane)))


@always_inline
def _store_rows[k: Int](at: UInt32, lane: UInt32, value: SIMD[_, 8]):
    """Stores what `_load_rows` loads."""
    shared_store_matrices(_place[k](at, lane), bitcast[DType.uint32, 4](value))


@always_inline
def _consume[
    dtype: DType, op: StaticString, config: ChainConfig
](maps: UInt64, sizes: ChainSizes, at: UInt32, barriers: UInt32, vectors: UInt32, t: Int32,):
    """Multiplies tile after tile, 64 rows of each."""
    comptime MLP = op == "layernorm_mlp"
    comptime C = config.c
    comptime F = config.f
    comptime first = Epilogue("gelu" if MLP else "relu")
    comptime second = Epilogue("none" if MLP else "relu")
    var group = UInt32(t // Int32(GROUP))
    var leads = t % Int32(GROUP) == 0
    var lane = UInt32(t % 32)
    # Thread 4 a + b of warp d holds the columns 8 j + 2 b, and one more, of rows 16 d + a and 8 on.
    var warp_rows = UInt32(t % Int32(GROUP) // 32) * UInt32(16 * ROW)
    var pair = lane % 4
    var bias2 = vectors + UInt32(sizes.chunks) * UInt32(WIDTH * 8)

    var weights = _ring(at, barriers, config.stages)
    var rows = _tiles_of[config](at, barriers, group)
    var chunks = rows
    comptime if config.chunks > 0:
        chunks = _chunks_of[config](at, barriers, group)
    var storing = UInt32(0)  # The `empty` of what is being stored.
    for tile in range(Int32(block_idx.x), sizes.tiles, Int32(grid_dim.x)):
        var m0 = tile * Int32(ROWS * config.groups) + Int32(group) * Int32(ROWS)
        barrier_wait(rows.full + 8 * rows.slot, rows.parity)
        var x_at = rows.stages + rows.slot * UInt32(config.unit())
        var sums = Array[StaticTuple[Float32, SUMS], F](fill=StaticTuple[Float32, SUMS](fill=0))
        comptime for f in range(F):
            comptime for j in range(8):
                var bias = shared_load2(bias2 + UInt32((f * WIDTH + 8 * j) * 4) + pair * 8)
                comptime for i in range(4):
                    sums[f][4 * j + i] = bias[i % 2]
        comptime if MLP:
            comptime for k in range(4 * C):
                var v = widened(_load_rows[dtype, k](x_at + warp_rows, lane))
                comptime for i in range(8):
                    sums[k // 4][k % 4 * 8 + i] += v[i]
            _normalise[dtype, config](
                x_at + warp_rows, bias2 + UInt32(F * WIDTH * 4), lane, sizes.eps
            )
            fence_async()
            sync_threads(group + 1, UInt32(GROUP))
        var x = MATRIX | Int64(x_at >> 4)

        for chunk in range(sizes.chunks):
            var hidden = SIMD[F32, SUMS](0)
            comptime for j in range(8):
                var at = vectors + UInt32(chunk) * UInt32(WIDTH * 8) + UInt32(64 * j) + pair * 16
                var bias = shared_load4(at)
                comptime for i in range(4):
                    hidden[4 * j + i] = bias[i]
            var slot = UInt32(2 * chunk) if config.resident else weights.slot
            barrier_wait(weights.full + 8 * slot, weights.parity)
            var w1 = MATRIX | Int64(_stage[config](at, slot) >> 4)
            wgmma_fence_aligned()
            comptime for k in range(4 * C):
                comptime step = Int64((k // 4 * BOX + k % 4 * 32) // 16)
                hidden = wgmma_async[64, WIDTH, 16, a_type=dtype, b_type=dtype](
                    WGMMADescriptor[dtype](x + step), WGMMADescriptor[dtype](w1 + step), hidden
                )
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[0]()
            comptime if not config.resident:
                if leads:
                    barrier_arrive(weights.empty + 8 * slot)
                    if chunk > 0:
                        var before = slot - 1 if slot > 0 else UInt32(config.stages - 1)
                        barrier_arrive(weights.empty + 8 * before)
                weights.advance[config.stages]()

            var h = Array[SIMD[dtype, 8], 4](fill=0)
            var h_at = chunks.stages + chunks.slot * UInt32(BOX)
            comptime if config.chunks > 0:
                barrier_wait(chunks.full + 8 * chunks.slot, chunks.parity)
            comptime for k in range(4):
                var v = hidden.slice[8, offset=8 * k]()
                comptime if config.chunks > 0:
                    v += widened(_load_rows[dtype, k](h_at + warp_rows, lane))
                    h[k] = activate[first, dtype](v).cast[dtype]()
                    _store_rows[k](h_at + warp_rows, lane, h[k])
                else:
                    h[k] = activate[first, dtype](v).cast[dtype]()
            comptime if config.chunks > 0:
                fence_async()
                sync_threads(group + 1, UInt32(GROUP))
                if leads:
                    if storing != 0:
                        stores_read()
                        barrier_arrive(storing)
                    store_2d(maps + 5 * MAP, h_at, chunk * Int32(WIDTH), m0)
                    stores_commit()
                storing = chunks.empty + 8 * chunks.slot
                chunks.advance[config.chunks]()

            slot = UInt32(2 * chunk + 1) if config.resident else weights.slot
            barrier_wait(weights.full + 8 * slot, weights.parity)
            var w2 = MATRIX | Int64(_stage[config](at, slot) >> 4)
            wgmma_fence_aligned()
            comptime for k in range(4):
                comptime for f in range(F):
                    sums[f] = mma_registers[dtype](
                        bitcast[DType.uint32, 4](h[k]),
                        w2 + Int64((f * BOX + k * 32) // 16),
                        sums[f],
                    )
            wgmma_commit_group_sync()
            comptime if not config.resident:
                weights.advance[config.stages]()
        wgmma_wait_group_sync[0]()
        comptime if not config.resident:
            if leads:
                var before = weights.slot - 1 if weights.slot > 0 else UInt32(config.stages - 1)
                barrier_arrive(weights.empty + 8 * before)

        comptime for f in range(F):
            comptime for k in range(4):
                var v = SIMD[F32, 8](0)
                comptime for i in range(8):
                    v[i] = sums[f][8 * k + i]
                v = activate[second, dtype](v)
                _store_rows[4 * f + k](x_at + warp_rows, lane, v.cast[dtype]())
        fence_async()
        sync_threads(group + 1, UInt32(GROUP))
        if leads:
            if storing != 0:
                stores_read()
                barrier_arrive(storing)
            comptime for f in range(F):
                store_2d(maps + 3 * MAP, x_at + UInt32(f * BOX), Int32(f * WIDTH), m0)
            stores_commit()
        storing = rows.empty + 8 * rows.slot
        rows.advance[config.rows]()
    stores_read()


# The host's side


@fieldwise_init
struct ChainTensors[dtype: DType](TrivialRegisterPassable):
    """The tensors of a chain.

    Parameters:
        dtype: Of all of them but the vectors.
    """

    var x: Data[Self.dtype]
    """What is multiplied [M, C]."""
    var w1: Data[Self.dtype]
    """[K, C]."""
    var w2: Data[Self.dtype]
    """[F, K]."""
    var z: Data[Self.dtype]
    """The result [M, F]."""
    var residual: Data[Self.dtype]
    """[M, K]; any pointer if h is not stored."""
    var h: Data[Self.dtype]
    """[M, K]; any pointer if it is not stored."""


def try_chain[
    dtype: DType, op: StaticString, c: Int, f: Int
](
    m: Int,
    hidden: Int,
    o: ChainTensors[dtype],
    ends: ChainEnds,
    ctx: DeviceContext,
    eps: Float32 = 0,
) raises -> Bool:
    """Enqueues a chain if it is faster than its parts.

    Parameters:
        dtype: Of 16 bits.
        op: "layernorm_mlp" or "conv2d_chain".
        c: C of x.
        f: F of z.

    Args:
        m: Rows.
        hidden: Columns of h.
        o: The tensors.
        ends: Biases and norm.
        ctx: The GPU.
        eps: Added to the variance of the layer norm.

    Returns:
        Whether it was enqueued.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime config = chain_config(op == "layernorm_mlp", c, f)
    if hidden % 8 != 0 or config.shared(ceildiv(hidden, WIDTH)) > SHARED:
        return False
    comptime least = LEAST if config.resident else LEAST_STREAMED
    if ceildiv(m, ROWS * config.groups) < least:
        return False
    comptime if config.resident:
        if 2 * ceildiv(hidden, WIDTH) > config.stages:
            return False
    hopper_chain[dtype, op, config](m, hidden, o, ends, ctx, eps)
    return True


def hopper_chain[
    dtype: DType, op: StaticString, config: ChainConfig
](
    m: Int,
    hidden: Int,
    o: ChainTensors[dtype],
    ends: ChainEnds,
    ctx: DeviceContext,
    eps: Float32 = 0,
) raises:
    """Enqueues a chain.

    Parameters:
        dtype: Of 16 bits.
        op: "layernorm_mlp" or "conv2d_chain".
        config: Sizes of the tile.

    Args:
        m: Rows.
        hidden: Columns of h.
        o: The tensors.
        ends: Biases and norm.
        ctx: The GPU.
        eps: Added to the variance of the layer norm.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime C = config.c * WIDTH
    comptime F = config.f * WIDTH
    var maps = Maps[6]()
    var rows = Int64(m)
    var k = Int64(hidden)
    maps.maps[0] = tensor_map[dtype, 2](ctx, o.x, [Int64(C), rows], [Int32(WIDTH), Int32(ROWS)])
    maps.maps[1] = tensor_map[dtype, 2](ctx, o.w1, [Int64(C), k], [Int32(WIDTH), Int32(WIDTH)])
    maps.maps[2] = tensor_map[dtype, 2](ctx, o.w2, [k, Int64(F)], [Int32(WIDTH), Int32(F)])
    maps.maps[3] = tensor_map[dtype, 2](ctx, o.z, [Int64(F), rows], [Int32(WIDTH), Int32(ROWS)])
    comptime if config.chunks > 0:
        maps.maps[4] = tensor_map[dtype, 2](ctx, o.residual, [k, rows], [Int32(WIDTH), Int32(ROWS)])
        maps.maps[5] = tensor_map[dtype, 2](ctx, o.h, [k, rows], [Int32(WIDTH), Int32(ROWS)])
    var tiles = ceildiv(m, ROWS * config.groups)
    var shared = config.shared(ceildiv(hidden, WIDTH))
    ctx.enqueue_function[chain_kernel[dtype, op, config]](
        maps,
        ends,
        ChainSizes(tiles=tiles, hidden=hidden, eps=eps),
        grid_dim=min(tiles, PROCESSORS),
        block_dim=config.threads(),
        shared_mem_bytes=shared,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(shared)),
    )
