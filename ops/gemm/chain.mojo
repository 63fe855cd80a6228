"""Two matrix products, one after the other, on Hopper's tensor cores (a back-to-back GEMM).

    h[m, k] = act(sum_c x[m, c] w1[k, c] + bias1[k] + residual[m, k])
    z[m, f] = act(sum_k h[m, k] w2[f, k] + bias2[f] + skip[m, f])

    MLP:    x = norm(tokens), act = GELU, nothing; skip = tokens. h is never stored.
    Chain:  act = relu, relu; h is stored, and never read again.

In the place of the residual there may be a second source, the 1 x 1 of the block's shortcut, as in
`hopper_shortcut`:

    h[m, k] = act(sum_c x[m, c] w1[k, c] + bias1[k] + sum_s source[m, s] v[k, s] + bias[k])

In 16 bits these are more steps of the same sums. A chain may be of 8 bits: then each filter's sum has a
scale, and the residual one, as in hopper.mojo, and the filters of w1 and w2 are in quads (`quad` of
accumulator.mojo).

A block computes tiles of `64 * groups` rows, 64 by each consumer, a warpgroup. A consumer goes
through h in chunks of 128 bytes: the first product's sums pass the activation in the registers where
they are, which are, rounded to 16 or 8 bits, the left side of the second product (as in
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608). Its sums stay in registers until the last
chunk. Tokens are normalised in shared memory, where they lie, by moments of their rows
(hopper/moments.mojo); weight and bias of the norm are part of w1 and bias1.

One thread, the producer, has the copy engine (TMA) fill three kinds of pipelines: one of weights,
which all consumers of a block read, and for each consumer one of tiles of x and one of chunks of
the residual. Weights that fit stay in shared memory for the whole launch; others come chunk after
chunk. The chunk of h overwrites its residual, z its x, and both leave by the copy engine. Consumers
wait for one another nowhere else, so that activations of one overlap products of another.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..choice import NEVER, Cheapest
from ..device import Device
from ..epilogue import Channels, Epilogue, activate, apply
from ..hopper.accumulator import (
    Fragment,
    Sums,
    bias_of_columns,
    load_16x16,
    quad,
    store_16x16,
    sums_16x16,
)
from ..hopper.mma import BOX, ROWS, SUM, Matrix, mma, mma_registers
from ..hopper.moments import Norm, RowMoments
from ..hopper.pipeline import Pipeline
from ..hopper.ptx import (
    fence_barrier_init,
    shared_load,
    shared_load4,
    shared_store,
    shared_store_float,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.scheduler import TileScheduler
from ..hopper.shared import ROW, SharedAllocator, bytes_until, shared_memory, swizzle
from ..hopper.store import StoringStage, store_boxes, sync_writes
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, Scales, dtypes, narrowed, widened

comptime WIDTH = 64
"""Numbers of 128 bytes, of 16 bits: columns of a box, and of a chunk of h."""


struct ChainConfig(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 rows each."""
    var c: Int
    """Boxes of 64 columns of x; in 8 bits one box of 64 columns, or 128."""
    var f: Int
    """Boxes of 64 columns of z, likewise."""
    var w_stages: Int
    """Stages of weights: a chunk has one of w1 and one of w2."""
    var resident: Bool
    """Whether these hold all weights."""
    var x_stages: Int
    """Tiles of x that each consumer has room for."""
    var h_stages: Int
    """Chunks of h that each consumer has room for; 0 if h is not stored."""
    var bytes: Bool
    """Whether numbers have 8 bits, not 16."""
    var s: Int
    """Boxes of 64 columns of a second source; 0 if there is a residual."""
    var near: Bool
    """Whether shared memory has room for the bias of h."""

    def __init__(
        out self,
        *,
        groups: Int,
        c: Int,
        f: Int,
        w_stages: Int,
        resident: Bool,
        x_stages: Int,
        h_stages: Int = 0,
        bytes: Bool = False,
        s: Int = 0,
        near: Bool = True,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            c: Boxes of 64 columns of x.
            f: Boxes of 64 columns of z.
            w_stages: Stages of weights.
            resident: Whether these hold all weights.
            x_stages: Tiles of x.
            h_stages: Chunks of h.
            bytes: Whether numbers have 8 bits.
            s: Boxes of 64 columns of a second source.
            near: Whether shared memory has room for the bias of h.
        """
        self.s, self.near = s, near
        self.groups, self.c, self.f = groups, c, f
        self.w_stages, self.resident = w_stages, resident
        self.x_stages, self.h_stages = x_stages, h_stages
        self.bytes = bytes

    def computes(self, *, mlp: Bool, c: Int, f: Int, bytes: Bool, s: Int) -> Bool:
        """Tells whether the tile is one of a chain.

        Args:
            mlp: Whether h is not stored.
            c: C of x.
            f: F of z.
            bytes: Whether numbers have 8 bits.
            s: Channels of a second source; 0 if there is none.

        Returns:
            Whether it has such channels.
        """
        var channels = WIDTH * self.c == c and WIDTH * self.f == f and WIDTH * self.s == s
        return channels and bytes == self.bytes and mlp == (self.h_stages == 0)

    @always_inline
    def chunk(self) -> Int:
        """Counts the columns of a chunk of h.

        Returns:
            Those of 128 bytes.
        """
        return 2 * WIDTH if self.bytes else WIDTH

    @always_inline
    def row(self, boxes: Int) -> Int:
        """Counts the bytes of a row of a box of x or z.

        Args:
            boxes: `c` or `f`.

        Returns:
            128; 64 of 64 columns in 8 bits.
        """
        return ROW // 2 if self.bytes and boxes == 1 else ROW

    @always_inline
    def copies(self, boxes: Int) -> Int:
        """Counts the boxes of x or z that are copied.

        Args:
            boxes: `c` or `f`.

        Returns:
            As many; one in 8 bits.
        """
        return 1 if self.bytes else boxes

    @always_inline
    def w1(self) -> Int:
        """Counts the bytes of a stage of w1.

        Returns:
            Those of a chunk of its rows, and of v's behind them.
        """
        var x = self.copies(self.c) * self.row(self.c)
        var source = self.copies(self.s) * self.row(self.s) if self.s else 0
        return (x + source) * self.chunk()

    @always_inline
    def w2(self) -> Int:
        """Counts the bytes of a stage of w2.

        Returns:
            128 of each of its rows.
        """
        return self.f * BOX

    @always_inline
    def tile(self, boxes: Int) -> Int:
        """Counts the bytes of 64 rows of x or z.

        Args:
            boxes: `c` or `f`.

        Returns:
            Those of all boxes.
        """
        return self.copies(boxes) * ROWS * self.row(boxes)

    @always_inline
    def read(self) -> Int:
        """Counts the bytes of 64 rows of what is multiplied first.

        Returns:
            Those of x, and of a second source behind it.
        """
        return self.tile(self.c) + (self.tile(self.s) if self.s else 0)

    @always_inline
    def maps(self) -> Int:
        """Counts the tensor maps.

        Returns:
            One more if there is a second source.
        """
        return 7 if self.s else 6

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Rows, C, F and stages.
        """
        var c = String(WIDTH * self.c)
        if self.s:
            c += String("and", WIDTH * self.s)
        return String(t"{self.rows()}x{c}x{WIDTH * self.f}x{self.w_stages}")

    @always_inline
    def rows(self) -> Int:
        """Counts the rows of a tile.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups


comptime Warps[config: ChainConfig] = Roles[config.groups, moves_registers=True]
"""Which warps of a block do what.

Parameters:
    config: Of the kernel.
"""
comptime PER_TILE = 4
"""Multiprocessors a tile, at most, where all weights stay; with fewer tiles, split-K does better.

H200, 2026-11-21: ResNet-50 at batch 1, 17 to 25 tiles, 0.210 ms and 0.207 by parts.
"""
comptime PER_TILE_STREAMED = 2
"""The same where weights stream in.

H200, 2026-11-21: MLP 192 -> 768 -> 192, 49 tiles 21 µs, as much as its parts; 98 tiles 22 of 37.
"""
comptime LAST = Float64(1 << 20)
"""What a tile of 64 rows costs beside its turns: it is for rows that are too few for other tiles."""
comptime FULL = 10
"""Tiles, of 256 channels, to a place in a turn that may stay empty: products bound these chains.

H200, 2026-11-28: 256 -> 1024 -> 256, 392 tiles in 3 turns 104 µs (parts 123), 196 in 2 turns 68 (65).
"""
comptime TILES: List[ChainConfig] = [
    ChainConfig(groups=4, c=1, f=1, w_stages=8, resident=True, x_stages=3),
    ChainConfig(groups=1, c=1, f=1, w_stages=8, resident=True, x_stages=2),
    ChainConfig(groups=2, c=3, f=3, w_stages=5, resident=False, x_stages=2),
    ChainConfig(groups=3, c=1, f=1, w_stages=8, resident=True, x_stages=2, h_stages=4),
    ChainConfig(groups=1, c=1, f=1, w_stages=8, resident=True, x_stages=2, h_stages=4),
    ChainConfig(groups=2, c=1, f=2, w_stages=8, resident=True, x_stages=2, h_stages=3),
    ChainConfig(groups=1, c=1, f=2, w_stages=8, resident=True, x_stages=2, h_stages=4),
    ChainConfig(groups=2, c=2, f=2, w_stages=5, resident=False, x_stages=2, h_stages=4),
    ChainConfig(groups=3, c=2, f=2, w_stages=6, resident=False, x_stages=1, h_stages=3),
    ChainConfig(groups=2, c=4, f=4, w_stages=4, resident=False, x_stages=1, h_stages=2, near=False),
    ChainConfig(groups=2, c=1, f=1, w_stages=8, resident=True, x_stages=2, h_stages=3, s=1),
    ChainConfig(groups=1, c=1, f=1, w_stages=8, resident=True, x_stages=2, h_stages=4, s=1),
    ChainConfig(groups=3, c=1, f=1, w_stages=4, resident=True, x_stages=2, h_stages=2, bytes=True),
    ChainConfig(groups=2, c=1, f=2, w_stages=4, resident=True, x_stages=2, h_stages=4, bytes=True),
    ChainConfig(groups=2, c=2, f=2, w_stages=8, resident=True, x_stages=2, h_stages=3, bytes=True),
    ChainConfig(
        groups=2, c=1, f=1, w_stages=4, resident=True, x_stages=3, h_stages=3, bytes=True, s=1
    ),
]
"""The tiles that are compiled: what fits into 227 KB of shared memory, and was fastest on an H200."""


struct ChainStorage[config: ChainConfig](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        config: Sizes of the tile.
    """

    comptime PAIR = Self.config.w1() + Self.config.w2()
    """Bytes of a stage of w1 and one of w2."""
    comptime TILE = max(Self.config.read(), Self.config.tile(Self.config.f))
    """Bytes of a tile of x, and of z in its place."""

    var weights: Pipeline
    """A stage of w1 and one of w2 for each chunk in turns; `weights_stage` finds their addresses."""
    var x: Pipeline
    """Tiles of x of the first consumer."""
    var h: Pipeline
    """Chunks of h of the first consumer; no stages if h is not stored."""
    var bias2: UInt32
    """Address of the bias of z."""
    var scale2: UInt32
    """Address of the scale of z, in 8 bits."""
    var bias1: UInt32
    """Address of the bias of h: each two columns twice, as a thread's sums of two rows have it; or all biases,
    and all scales behind them."""

    @always_inline
    def __init__(out self, data: UInt32):
        """Divides shared memory.

        Args:
            data: Its address.
        """
        comptime C = Self.config
        var memory = SharedAllocator(data)
        var weights = memory.take(C.w_stages // 2 * Self.PAIR + C.w_stages % 2 * C.w1())
        var x = memory.take(C.groups * C.x_stages * Self.TILE)
        var h = memory.take(C.groups * C.h_stages * BOX)
        self.weights = Pipeline(weights, memory, stages=Int32(C.w_stages), bytes=UInt32(C.w1()))
        self.x = Pipeline(
            x, memory, stages=Int32(C.x_stages), bytes=UInt32(Self.TILE), rings=C.groups
        )
        self.h = Pipeline(h, memory, stages=Int32(C.h_stages), bytes=UInt32(BOX), rings=C.groups)
        self.bias2 = memory.take(C.f * WIDTH * 4)
        self.scale2 = memory.take((C.f if C.bytes else 0) * WIDTH * 4)
        self.bias1 = memory.end

    @staticmethod
    def bytes(chunks: Int) -> Int:
        """Counts the bytes that a launch asks for.

        Args:
            chunks: Of h.

        Returns:
            Of all parts.
        """
        comptime vectors = 3 if Self.config.s and Self.config.bytes else 2 if Self.config.near else 0
        comptime BEFORE = bytes_until(Self(0).bias1)
        return BEFORE + vectors * chunks * Self.config.chunk() * 4

    @always_inline
    def weights_stage(self, index: UInt32) -> UInt32:
        """Gives the address of a stage of weights; those of w1 and w2 have two sizes.

        Args:
            index: Which.

        Returns:
            In shared memory.
        """
        comptime W1 = UInt32(Self.config.w1())
        comptime if Self.config.w1() == Self.config.w2():
            return self.weights.data + index * W1
        else:
            comptime assert Self.config.w_stages % 2 == 0, "chain: w_stages must be even"
            return self.weights.data + index // 2 * UInt32(Self.PAIR) + index % 2 * W1

    @always_inline
    def init(self):
        """Prepares the barriers of all pipelines, by one thread."""
        self.weights.init[Self.config.w_stages](consumers=Self.config.groups)
        comptime for g in range(Self.config.groups):
            self.x.of_consumer(UInt32(g)).init[Self.config.x_stages](consumers=1)
            self.h.of_consumer(UInt32(g)).init[Self.config.h_stages](consumers=1)
        fence_barrier_init()

    @always_inline
    def load_vectors(
        self, vectors: ChainVectors[Self.config.bytes], problem: ChainProblem, t: Int32
    ):
        """Copies biases and scales, by all threads of the block.

        Args:
            vectors: In global memory.
            problem: Sizes.
            t: The thread.
        """
        comptime THREADS = Int32(Warps[Self.config].THREADS)
        comptime if Self.config.bytes or Self.config.near:
            var columns = problem.chunks * Int32(Self.config.chunk())
            for i in range(t, columns, THREADS):
                var bias, scale, source = Float32(0), Float32(0), Float32(0)
                if i < problem.hidden:
                    bias = vectors.bias1[unsafe_offset=Int(i)]
                    comptime if Self.config.s > 0:
                        bias += vectors.bias[unsafe_offset=Int(i)]
                    comptime if Self.config.bytes:
                        scale = vectors.scales[0].product[unsafe_offset=Int(i)]
                        comptime if Self.config.s > 0:
                            source = scale
                            scale *= vectors.scales[0].first[unsafe_offset=Int(i)]
                var at = self.bias1
                comptime if Self.config.bytes:
                    at += UInt32(i) * 4
                    shared_store_float(at, bias)
                    shared_store_float(at + UInt32(columns) * 4, scale)
                    comptime if Self.config.s > 0:
                        shared_store_float(at + UInt32(columns) * 8, source)
                else:
                    at += UInt32(i // 2 * 16 + i % 2 * 4)
                    shared_store_float(at, bias)
                    shared_store_float(at + 8, bias)
        for i in range(t, Int32(Self.config.f * WIDTH), THREADS):
            shared_store_float(self.bias2 + UInt32(i) * 4, vectors.bias2[unsafe_offset=Int(i)])
            comptime if Self.config.bytes:
                var scale = vectors.scales[1].product[unsafe_offset=Int(i)]
                shared_store_float(self.scale2 + UInt32(i) * 4, scale)

    @always_inline
    def channels1(self, column: Int32, problem: ChainProblem) -> Channels[4]:
        """Loads scale and bias of four columns of h.

        Args:
            column: The first, a multiple of 4.
            problem: Sizes.

        Returns:
            Both.
        """
        var at = self.bias1 + UInt32(column) * 4
        var columns = UInt32(problem.chunks) * UInt32(Self.config.chunk())
        return Channels[4](shared_load4(at + columns * 4), shared_load4(at))

    @always_inline
    def source_scale(self, column: Int32, problem: ChainProblem) -> SIMD[F32, 4]:
        """Loads the scale of a second source's sums of four columns of h.

        Args:
            column: The first, a multiple of 4.
            problem: Sizes.

        Returns:
            Of each.
        """
        var columns = UInt32(problem.chunks) * UInt32(Self.config.chunk())
        return shared_load4(self.bias1 + UInt32(column) * 4 + columns * 8)

    @always_inline
    def channels2(self, column: Int32) -> Channels[4]:
        """Loads scale and bias of four columns of z.

        Args:
            column: The first, a multiple of 4.

        Returns:
            Both.
        """
        var at = UInt32(column) * 4
        return Channels[4](shared_load4(self.scale2 + at), shared_load4(self.bias2 + at))


struct ChainVectors[scaled: Bool = False](KernelArgument, TrivialRegisterPassable):
    """Biases, moments and scales of a chain.

    Parameters:
        scaled: Whether there are scales, and no norm.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""
    comptime SCALES = 2 if Self.scaled else 0
    """How many scales there are."""

    var bias1: Data[F32]
    """Of h."""
    var bias2: Data[F32]
    """Of z[F]."""
    var moments: Data[F32]
    """Of the rows of x [M, C / 32, 2]; any pointer if there is no norm."""
    var bias: Data[F32]
    """A second source's, of h; any pointer if there is none."""
    var scales: StaticTuple[Scales, Self.SCALES]
    """Of h and its residual, and of z."""

    def __init__(
        out self,
        bias1: Data[F32],
        bias2: Data[F32],
        moments: Optional[Data[F32]] = None,
        *,
        source: Optional[Data[F32]] = None,
    ):
        """Names the vectors of a chain without scales.

        Args:
            bias1: Of h.
            bias2: Of z[F].
            moments: Of the rows of x, if there is a norm.
            source: The bias of a second source, of h.
        """
        self.bias1, self.bias2, self.bias = bias1, bias2, source.or_else(bias1)
        self.moments = moments.or_else(bias1)
        self.scales = StaticTuple[Scales, Self.SCALES](fill=Scales(bias1))

    def __init__(
        out self,
        bias1: Data[F32],
        bias2: Data[F32],
        first: Scales,
        second: Scales,
        *,
        source: Optional[Data[F32]] = None,
    ):
        """Names the vectors of a chain with scales.

        Args:
            bias1: Of h.
            bias2: Of z[F].
            first: Of h, and of its residual; of a second source's sums, and the first's in these.
            second: Of z.
            source: The bias of a second source, of h.
        """
        self = Self(bias1, bias2, source=source)
        comptime if Self.scaled:
            self.scales[0], self.scales[1] = first, second


struct ChainProblem(KernelArgument, TrivialRegisterPassable):
    """The sizes of a chain."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var schedule: TileScheduler[]
    """The tiles of rows."""
    var chunks: Int32
    """Chunks of h."""
    var hidden: Int32
    """Columns of h."""
    var rows: Int32
    """M."""
    var eps: Float32
    """Added to the variance of the layer norm."""

    def __init__(out self, config: ChainConfig, *, rows: Int, hidden: Int, eps: Float32):
        """Takes the sizes.

        Args:
            config: Sizes of the tile.
            rows: M.
            hidden: Columns of h.
            eps: Added to the variance.
        """
        self.schedule = TileScheduler[]([ceildiv(rows, config.rows())], columns=1)
        self.chunks = Int32(ceildiv(hidden, config.chunk()))
        self.hidden, self.rows, self.eps = Int32(hidden), Int32(rows), eps


struct _Maps:
    """Which tensor map is which; the last is that of a second source's weights."""

    comptime X = 0
    comptime W1 = 1
    comptime W2 = 2
    comptime Z = 3
    comptime RESIDUAL = 4
    comptime H = 5
    comptime V = 6


@__name(t"{op}_hopper_{config.label()}_{dtypes[dtype, dtype, right]()}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(1),
)
def chain_kernel[
    dtype: DType, op: StaticString, config: ChainConfig, right: DType = dtype
](maps: TensorMaps[config.maps()], vectors: ChainVectors[config.bytes], problem: ChainProblem):
    """Computes tiles.

    Parameters:
        dtype: Of x, h and z, and of w1 and w2 unless that is named.
        op: "layernorm_mlp" or "conv2d_chain".
        config: Sizes of the tile.
        right: Of w1 and w2.

    Args:
        maps: Tensor maps of x, w1[K, C], w2[F, K], z, the residual or second source, h, and of v[K, S].
        vectors: Biases, and moments or scales.
        problem: Sizes.
    """
    comptime MLP = op == "layernorm_mlp"
    var storage = ChainStorage[config](shared_memory["hopper_chain"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init()
    storage.load_vectors(vectors, problem, t)
    sync_threads(0, UInt32(Warps[config].THREADS))
    launch_dependent_grids()

    if Warps[config].produces(t):
        Warps[config].give_registers()
        if Warps[config].drives(t):
            _produce[MLP](maps.address(), problem, storage)
    else:
        Warps[config].take_registers()
        comptime if config.bytes:
            _consume_bytes[dtype, right](
                maps.address(), problem, storage, Fragment(t), vectors.scales[0].residual.scale
            )
        else:
            comptime C = config.c * WIDTH
            var norm = Norm(vectors.moments, C, eps=problem.eps)
            _consume[dtype, MLP](maps.address(), problem, storage, norm, vectors.bias1, Fragment(t))


@always_inline
def _produce[
    config: ChainConfig, //, mlp: Bool
](maps: UInt64, problem: ChainProblem, storage: ChainStorage[config]):
    """Fills the pipelines, tile after tile, as stages become free."""
    var x = TileLoader(maps, _Maps.X)
    var residual = TileLoader(maps, _Maps.RESIDUAL)
    comptime if not mlp:
        residual.prefetch_descriptor()
    x.prefetch_descriptor()

    # Weights do not depend on the kernel before.
    var weights = storage.weights
    for stage in range(weights.prefetch(2 * problem.chunks)):
        _load_weights(maps, storage, stage, stage)
    wait_on_dependent_grids()

    var tiles = Array[Pipeline, config.groups](fill=weights)
    var chunks = Array[Pipeline, config.groups](fill=weights)
    comptime for g in range(config.groups):
        tiles[g], chunks[g] = storage.x.of_consumer(UInt32(g)), storage.h.of_consumer(UInt32(g))
    for tile in problem.schedule.turns():
        var m0 = tile * Int32(config.rows())
        comptime for g in range(config.groups):
            var to = tiles[g].stage()
            var full = tiles[g].barrier()
            tiles[g].acquire()
            tiles[g].expect(UInt32(config.read()))
            comptime for i in range(config.copies(config.c)):
                x.load(to + UInt32(i * BOX), full, Int32(i * WIDTH), m0 + Int32(g * ROWS))
            comptime if config.s > 0:
                comptime assert config.s == 1, "chain: a second source has 64 columns"
                residual.load(to + UInt32(config.tile(config.c)), full, 0, m0 + Int32(g * ROWS))
            tiles[g].advance()
        for chunk in range(problem.chunks):
            comptime if not config.resident:
                comptime for half in range(2):
                    if weights.acquire_or_prefetched():
                        _load_weights(maps, storage, Int32(weights.index), 2 * chunk + Int32(half))
                    weights.advance()
            comptime if not mlp:
                comptime for g in range(config.groups):
                    var to = chunks[g].stage()
                    var full = chunks[g].barrier()
                    chunks[g].acquire()
                    comptime if config.s > 0:
                        chunks[g].commit()
                    else:
                        chunks[g].expect(UInt32(BOX))
                        residual.load(to, full, chunk * Int32(config.chunk()), m0 + Int32(g * ROWS))
                    chunks[g].advance()


@always_inline
def _load_weights[
    config: ChainConfig, //
](maps: UInt64, storage: ChainStorage[config], stage: Int32, number: Int32):
    """Fills a stage with weights: even numbers are of w1, odd ones of w2."""
    var weights = storage.weights
    var to = storage.weights_stage(UInt32(stage))
    var full = weights.barrier(stage)
    var column = number // 2 * Int32(config.chunk())
    if number % 2 == 0:
        var w1 = TileLoader(maps, _Maps.W1)
        weights.expect(stage, UInt32(config.w1()))
        comptime for i in range(config.copies(config.c)):
            w1.load(to + UInt32(i * BOX), full, Int32(i * WIDTH), column)
        comptime if config.s > 0:
            comptime BEHIND = UInt32(
                config.copies(config.c) * config.chunk() * config.row(config.c)
            )
            TileLoader(maps, _Maps.V).load(to + BEHIND, full, 0, column)
    else:
        var w2 = TileLoader(maps, _Maps.W2)
        weights.expect(stage, UInt32(config.w2()))
        w2.load(to, full, column, 0)


@always_inline
def _consume[
    config: ChainConfig, //, dtype: DType, mlp: Bool
](
    maps: UInt64,
    problem: ChainProblem,
    storage: ChainStorage[config],
    norm: Norm,
    bias1: Data[F32],
    at: Fragment,
):
    """Multiplies tile after tile, 64 rows of each."""
    comptime C = config.c
    comptime F = config.f
    comptime first = Epilogue("gelu" if mlp else "relu")
    comptime second = Epilogue("none" if mlp else "relu")
    var group = UInt32(at.group())
    var leads = at.leads()
    var z_map = TileStore(maps, _Maps.Z)
    var h_map = TileStore(maps, _Maps.H)

    var weights = storage.weights
    var tiles = storage.x.of_consumer(group)
    var chunks = storage.h.of_consumer(group)
    var storing = StoringStage()
    comptime if mlp:
        wait_on_dependent_grids()  # for the moments, which no copy brings
    for tile in problem.schedule.turns():
        var m0 = tile * Int32(config.rows()) + Int32(group) * Int32(ROWS)
        var moments = RowMoments()
        comptime if mlp:
            moments = RowMoments(norm, at, row=m0 + at.row(), rows=problem.rows)
        tiles.wait()
        var x = tiles.stage()
        var z = Array[Sums[WIDTH], F](fill=Sums[WIDTH](fill=0))
        var bias2 = storage.bias2 + UInt32(at.column()) * 4
        comptime for f in range(F):
            z[f] = bias_of_columns[WIDTH](bias2 + UInt32(f * WIDTH * 4))
        comptime if mlp:
            var of = moments.norm(norm, at)
            comptime for k in range(4 * C):
                var v = widened(load_16x16[dtype, k](x, at))
                comptime for i in range(8):
                    z[k // 4][k % 4 * 8 + i] += v[i]
                    v[i] = v[i].fma(of.scale[i // 2 % 2], of.shift[i // 2 % 2])
                store_16x16[k](x, at, v.cast[dtype]())
            sync_writes(group + 1)

        comptime if config.resident:
            weights.index = 0
        for chunk in range(problem.chunks):
            var sums = Sums[WIDTH](fill=0)
            comptime if config.near:
                var near = storage.bias1 + UInt32(at.column()) * 8
                sums = bias_of_columns[WIDTH, twice=True](
                    near + UInt32(chunk) * UInt32(2 * WIDTH * 4)
                )
            weights.wait()
            wgmma_fence_aligned()
            sums = mma[dtype, WIDTH, C + config.s, BOX, clear=not config.near](
                Matrix[wide=True](x), Matrix[wide=True](storage.weights_stage(weights.index)), sums
            )
            wgmma_commit_group_sync()
            var far = Array[SIMD[F32, 2], WIDTH // 8](fill=0)
            comptime if not config.near:
                var mine = bias1.unsafe_offset(Int(chunk * Int32(WIDTH) + at.column()))
                comptime for j in range(WIDTH // 8):
                    far[j] = mine.unsafe_load[width=2, alignment=8](8 * j)
            wgmma_wait_group_sync[0]()
            comptime if not config.resident:
                if leads:
                    weights.release()
                    if chunk > 0:
                        weights.release(weights.previous())
            _advance[config.resident](weights)

            var h = Array[SIMD[dtype, 8], 4](fill=0)
            comptime if not mlp:
                chunks.wait()
            comptime for k in range(4):
                var v = sums_16x16[k](sums)
                comptime if not config.near:
                    comptime for i in range(8):
                        v[i] += far[2 * k + i // 4][i % 2]
                comptime if not mlp and config.s == 0:
                    v += widened(load_16x16[dtype, k](chunks.stage(), at))
                h[k] = activate[first, dtype](v).cast[dtype]()
                comptime if not mlp:
                    store_16x16[k](chunks.stage(), at, h[k])
            comptime if not mlp:
                store_boxes[dtype, WIDTH](
                    h_map,
                    chunks.stage(),
                    chunk * Int32(WIDTH),
                    m0,
                    barrier=group + 1,
                    leads=leads,
                    before=storing,
                )
                storing.begin(chunks)
                chunks.advance()

            weights.wait()
            var w2 = Matrix[wide=True](storage.weights_stage(weights.index))
            wgmma_fence_aligned()
            comptime for k in range(4):
                comptime for f in range(F):
                    z[f] = mma_registers[dtype](
                        bitcast[DType.uint32, 4](h[k]), w2.after(f * BOX + k * 32), z[f]
                    )
            wgmma_commit_group_sync()
            _advance[config.resident](weights)
        wgmma_wait_group_sync[0]()
        comptime if not config.resident:
            if leads:
                weights.release(weights.previous())

        comptime for k in range(4 * F):
            var v = activate[second, dtype](sums_16x16[k % 4](z[k // 4]))
            store_16x16[k](x, at, v.cast[dtype]())
        store_boxes[dtype, F * WIDTH](
            z_map, x, 0, m0, barrier=group + 1, leads=leads, before=storing
        )
        storing.begin(tiles)
        comptime if config.x_stages == 1:
            # The next tile, before whose first chunk the stage would be released, has no other.
            if leads:
                storing.release()
            storing = StoringStage()
        tiles.advance()
    stores_read()


@always_inline
def _consume_bytes[
    config: ChainConfig, //, dtype: DType, right: DType
](
    maps: UInt64,
    problem: ChainProblem,
    storage: ChainStorage[config],
    at: Fragment,
    residual_scale: Float32,
):
    """Multiplies tile after tile of 8-bit numbers, 64 rows of each; a thread has four neighbours."""
    comptime assert config.resident, "chain: weights of 8 bits stay"
    comptime CHUNK = config.chunk()
    comptime X_ROW = config.row(config.c)
    comptime Z_ROW = config.row(config.f)
    comptime COLUMNS = config.f * WIDTH
    comptime first = Epilogue.rectified[dtype, adds=config.s == 0]()
    comptime second = Epilogue.rectified[dtype]()
    var group = UInt32(at.group())
    var leads = at.leads()
    var mine = at.column() * 2
    var z_map = TileStore(maps, _Maps.Z)
    var h_map = TileStore(maps, _Maps.H)

    var weights = storage.weights
    var tiles = storage.x.of_consumer(group)
    var chunks = storage.h.of_consumer(group)
    var storing = StoringStage()
    weights.wait_first(2 * problem.chunks)
    for tile in problem.schedule.turns():
        var m0 = tile * Int32(config.rows()) + Int32(group) * Int32(ROWS)
        tiles.wait()
        var x = tiles.stage()
        var z = Sums[COLUMNS, SUM[dtype]](fill=0)
        for chunk in range(problem.chunks):
            var w1 = storage.weights_stage(UInt32(2 * chunk))
            var sums = Sums[CHUNK, SUM[dtype]](fill=0)
            wgmma_fence_aligned()
            sums = mma[dtype, CHUNK, right=right](Matrix[X_ROW](x), Matrix[X_ROW](w1), sums)
            var more = Sums[CHUNK, SUM[dtype]](fill=0)
            comptime if config.s > 0:
                comptime ROW_S = config.row(config.s)
                var source = Matrix[ROW_S](x + UInt32(config.tile(config.c)))
                var v = Matrix[ROW_S](w1 + UInt32(CHUNK * X_ROW))
                more = mma[dtype, CHUNK, right=right](source, v, more)
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[0]()

            chunks.wait()
            var h = StaticTuple[UInt32, CHUNK // 8](fill=0)
            var column = chunk * Int32(CHUNK) + mine
            comptime for k in range(CHUNK // 16):
                var of = storage.channels1(column + Int32(16 * k), problem)
                var bias = of.bias
                var scale = SIMD[F32, 4](0)
                comptime if config.s > 0:
                    scale = storage.source_scale(column + Int32(16 * k), problem)
                comptime for half in range(2):
                    comptime if config.s > 0:
                        of.bias = quad[k, half](more).fma(scale, bias)
                    h[2 * k + half] = _finish_quad[dtype, first, k, half](
                        chunks.stage(), at, sums, of, residual_scale
                    )
            store_boxes[dtype, CHUNK](
                h_map,
                chunks.stage(),
                chunk * Int32(CHUNK),
                m0,
                barrier=group + 1,
                leads=leads,
                before=storing,
            )
            storing.begin(chunks)
            chunks.advance()

            var w2 = Matrix[wide=True](storage.weights_stage(UInt32(2 * chunk + 1)))
            wgmma_fence_aligned()
            z = mma_registers[dtype, right=right](h, w2, z)
            wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()

        comptime for k in range(COLUMNS // 16):
            var of = storage.channels2(Int32(16 * k) + mine)
            comptime for half in range(2):
                _ = _finish_quad[dtype, second, k, half, bytes=Z_ROW](x, at, z, of)
        store_boxes[dtype, COLUMNS, bytes=Z_ROW](
            z_map, x, 0, m0, barrier=group + 1, leads=leads, before=storing
        )
        storing.begin(tiles)
        tiles.advance()
    stores_read()


@always_inline
def _finish_quad[
    sum: DType, //, dtype: DType, epilogue: Epilogue, k: Int, half: Int, *, bytes: Int = ROW
](
    rows: UInt32,
    at: Fragment,
    sums: StaticTuple[Scalar[sum], _],
    of: Channels[4],
    residual_scale: Float32 = 1,
) -> UInt32:
    """Finishes a quad of sums in its place in shared memory, and packs it as wgmma takes it."""
    var row = UInt32(at.row())
    var place = rows + (row + UInt32(8 * half)) * UInt32(bytes)
    place += swizzle[bytes](UInt32(16 * k) + UInt32(at.column() * 2), row)
    var residual = SIMD[F32, 4](0)
    comptime if epilogue.joins:
        residual = bitcast[dtype, 4](shared_load(place)).cast[F32]()
    var y = apply[epilogue, dtype](quad[k, half](sums), of, residual, residual_scale)
    var bits = bitcast[DType.uint32, 1](narrowed[dtype](y))
    shared_store(place, bits)
    return bits


@always_inline
def _advance[resident: Bool](mut weights: Pipeline):
    """Goes on to the next weights; resident ones are filled once, and so stay in their phase."""
    comptime if resident:
        weights.index += 1
    else:
        weights.advance()


# The host's side


@fieldwise_init
struct ChainTensors[dtype: DType, right: DType = dtype](TrivialRegisterPassable):
    """The tensors of a chain.

    Parameters:
        dtype: Of all of them but the vectors, and the weights if that is named.
        right: Of the weights.
    """

    var x: Data[Self.dtype]
    """What is multiplied [M, C]."""
    var w1: Data[Self.right]
    """[K, C]."""
    var w2: Data[Self.right]
    """[F, K]."""
    var z: Data[Self.dtype]
    """The result [M, F]."""
    var residual: Data[Self.dtype]
    """[M, K], or a second source [M, S]; any pointer if h is not stored."""
    var h: Data[Self.dtype]
    """[M, K]; any pointer if it is not stored."""
    var v: Data[Self.right]
    """[K, S]; any pointer if there is no second source."""


def try_chain[
    dtype: DType, op: StaticString, c: Int, f: Int, right: DType = dtype, s: Int = 0
](
    m: Int,
    hidden: Int,
    o: ChainTensors[dtype, right],
    vectors: ChainVectors[_],
    ctx: DeviceContext,
    eps: Float32 = 0,
) raises -> Bool:
    """Enqueues a chain if it is faster than its parts.

    Parameters:
        dtype: Of 16 bits; a chain of convolutions may have 8.
        op: "layernorm_mlp" or "conv2d_chain".
        c: C of x.
        f: F of z.
        right: Of the weights, where it is another.
        s: Channels of a second source; 0 if there is none.

    Args:
        m: Rows.
        hidden: Columns of h.
        o: The tensors.
        vectors: Biases, and moments or scales.
        ctx: The GPU.
        eps: Added to the variance of the layer norm.

    Returns:
        Whether it was enqueued.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime MLP = op == "layernorm_mlp"
    comptime BYTES = size_of[dtype]() == 1
    var device = Device(ctx)
    var choice = Cheapest(0)
    comptime for i in range(len(TILES)):
        comptime if TILES[i].computes(mlp=MLP, c=c, f=f, bytes=BYTES, s=s):
            choice.offer(i, _cost[TILES[i]](m, hidden, device))
    if choice.cost == NEVER:
        return False
    comptime for i in range(len(TILES)):
        comptime config = TILES[i]
        comptime if config.computes(mlp=MLP, c=c, f=f, bytes=BYTES, s=s):
            if choice.best == i:
                var problem = ChainProblem(config, rows=m, hidden=hidden, eps=eps)
                var given = rebind[ChainVectors[config.bytes]](vectors)
                _enqueue[dtype, op, config, right](m, problem, o, given, device, ctx)
    return True


def _cost[config: ChainConfig](m: Int, hidden: Int, device: Device) -> Float64:
    """Estimates a chain of m rows in a tile: rows that a multiprocessor multiplies one after the other.

    It is `NEVER` where the tile cannot compute it, or the chain's parts are faster.
    """
    var problem = ChainProblem(config, rows=m, hidden=hidden, eps=0)
    var chunks, tiles = Int(problem.chunks), Int(problem.schedule.tiles)
    if hidden % (16 if config.bytes else 8) != 0:
        return NEVER
    if ChainStorage[config].bytes(chunks) > device.shared:
        return NEVER
    if config.resident and 2 * chunks > config.w_stages:
        return NEVER
    if not config.near and hidden % WIDTH != 0:
        return NEVER
    comptime most = PER_TILE if config.resident else PER_TILE_STREAMED
    var turns = device.waves(tiles)
    var enough = tiles >= device.multiprocessors // most
    comptime if not config.near:
        enough = enough and turns * device.multiprocessors * FULL <= tiles * (FULL + 1)
    if not enough:
        return NEVER
    return Float64(turns * config.rows()) + (LAST if config.groups == 1 else 0)


def _enqueue[
    dtype: DType, op: StaticString, config: ChainConfig, right: DType
](
    m: Int,
    problem: ChainProblem,
    o: ChainTensors[dtype, right],
    vectors: ChainVectors[config.bytes],
    device: Device,
    ctx: DeviceContext,
) raises:
    comptime C = config.c * WIDTH
    comptime F = config.f * WIDTH
    var hidden = Int(problem.hidden)
    var maps = TensorMaps[config.maps()]()
    comptime X_ROW = config.row(config.c)
    comptime Z_ROW = config.row(config.f)
    comptime W1 = config.chunk()
    maps.maps[_Maps.X] = matrix_map[dtype](ctx, o.x, rows=m, columns=C, box=ROWS, bytes=X_ROW)
    maps.maps[_Maps.W1] = matrix_map[right](ctx, o.w1, rows=hidden, columns=C, box=W1, bytes=X_ROW)
    maps.maps[_Maps.W2] = matrix_map[right](ctx, o.w2, rows=F, columns=hidden, box=F)
    maps.maps[_Maps.Z] = matrix_map[dtype](ctx, o.z, rows=m, columns=F, box=ROWS, bytes=Z_ROW)
    comptime if config.s > 0:
        comptime S = config.s * WIDTH
        comptime S_ROW = config.row(config.s)
        maps.maps[_Maps.RESIDUAL] = matrix_map[dtype](
            ctx, o.residual, rows=m, columns=S, box=ROWS, bytes=S_ROW
        )
        maps.maps[_Maps.V] = matrix_map[right](
            ctx, o.v, rows=hidden, columns=S, box=W1, bytes=S_ROW
        )
    elif config.h_stages > 0:
        maps.maps[_Maps.RESIDUAL] = matrix_map[dtype](
            ctx, o.residual, rows=m, columns=hidden, box=ROWS
        )
    comptime if config.h_stages > 0:
        maps.maps[_Maps.H] = matrix_map[dtype](ctx, o.h, rows=m, columns=hidden, box=ROWS)
    var shared = ChainStorage[config].bytes(Int(problem.chunks))
    launch[chain_kernel[dtype, op, config, right]](
        ctx,
        maps,
        vectors,
        problem,
        grid_dim=problem.schedule.blocks(device.multiprocessors),
        block_dim=Warps[config].THREADS,
        shared=shared,
    )
