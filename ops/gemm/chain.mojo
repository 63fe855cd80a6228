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
from std.math import ceildiv, rsqrt
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..epilogue import Epilogue, activate
from ..hopper.accumulator import Fragment, Sums, load_16x16, store_16x16, sums_16x16
from ..hopper.mma import ROWS, Matrix, mma, mma_registers
from ..hopper.pipeline import Pipeline, StoringStage
from ..hopper.ptx import (
    fence_async,
    fence_barrier_init,
    registers_give,
    registers_take,
    shared_load2,
    shared_load4,
    shared_store_float,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..hopper.scheduler import TileScheduler
from ..hopper.shared import ROW, SWIZZLED, WARPGROUP, shared_memory
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, Data, widened
from ..rows import over_lanes

comptime WIDTH = 64
"""Numbers of 128 bytes: columns of a box, and of a chunk of h."""
comptime BOX = ROWS * ROW
"""Bytes of 64 rows of a box."""
comptime PRODUCER_REGISTERS = 24
"""Registers of a thread of the producer's warpgroup."""


struct ChainConfig(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 rows each."""
    var c: Int
    """Boxes of 64 columns of x."""
    var f: Int
    """Boxes of 64 columns of z."""
    var w_stages: Int
    """Stages of weights: a chunk has one of w1 and one of w2."""
    var resident: Bool
    """Whether these hold all weights."""
    var x_stages: Int
    """Tiles of x that each consumer has room for."""
    var h_stages: Int
    """Chunks of h that each consumer has room for; 0 if h is not stored."""

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
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            c: Boxes of x.
            f: Boxes of z.
            w_stages: Stages of weights.
            resident: Whether these hold all weights.
            x_stages: Tiles of x.
            h_stages: Chunks of h.
        """
        self.groups, self.c, self.f = groups, c, f
        self.w_stages, self.resident = w_stages, resident
        self.x_stages, self.h_stages = x_stages, h_stages

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Rows, C, F and stages.
        """
        var sizes = t"{self.rows()}x{WIDTH * self.c}x{WIDTH * self.f}x{self.w_stages}"
        return String(sizes)

    @always_inline
    def rows(self) -> Int:
        """Counts the rows of a tile.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, and the producer's.
        """
        return WARPGROUP * (self.groups + 1)

    @always_inline
    def registers(self) -> Int:
        """Counts the registers of a consumer's thread.

        Returns:
            What the producer's threads leave of those that a launch is given.
        """
        var each = 65536 // self.threads() // 8 * 8
        return min((each * (self.groups + 1) - PRODUCER_REGISTERS) // self.groups // 8 * 8, 240)


comptime PER_TILE = 4
"""Multiprocessors a tile, at most, where all weights stay; with fewer tiles, split-K does better.

H200, 2026-11-21: ResNet-50 at batch 1, 17 to 25 tiles, 0.210 ms and 0.207 by parts.
"""
comptime PER_TILE_STREAMED = 2
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
        return ChainConfig(groups=4, c=1, f=1, w_stages=8, resident=True, x_stages=3)
    if mlp and c == 192 and f == 192:
        return ChainConfig(groups=2, c=3, f=3, w_stages=5, resident=False, x_stages=2)
    if not mlp and c == 64 and f == 64:
        return ChainConfig(groups=3, c=1, f=1, w_stages=8, resident=True, x_stages=2, h_stages=4)
    if not mlp and c == 64 and f == 128:
        return ChainConfig(groups=2, c=1, f=2, w_stages=8, resident=True, x_stages=2, h_stages=3)
    if not mlp and c == 128 and f == 128:
        return ChainConfig(groups=2, c=2, f=2, w_stages=5, resident=False, x_stages=2, h_stages=4)
    return ChainConfig(groups=0, c=0, f=0, w_stages=0, resident=False, x_stages=0)


@fieldwise_init
struct ChainStorage[config: ChainConfig](TrivialRegisterPassable):
    """A block's shared memory: stages of the pipelines, their barriers, then vectors.

    Parameters:
        config: Sizes of the tile.
    """

    comptime PAIR = (Self.config.c + Self.config.f) * BOX
    """Bytes of a stage of w1 and one of w2."""
    comptime TILE = max(Self.config.c, Self.config.f) * BOX
    """Bytes of a tile of x, and of z in its place."""
    comptime X = Self.config.w_stages // 2 * Self.PAIR + (
        Self.config.w_stages % 2 * Self.config.c * BOX
    )
    """Where tiles of x lie, behind the weights."""
    comptime H = Self.X + Self.config.groups * Self.config.x_stages * Self.TILE
    """Where chunks of h lie."""
    comptime W_BARRIERS = Self.H + Self.config.groups * Self.config.h_stages * BOX
    """Where the barriers of the weights lie."""
    comptime X_BARRIERS = Self.W_BARRIERS + Self.config.w_stages * Pipeline.BARRIERS
    """Where those of tiles of x lie."""
    comptime H_BARRIERS = Self.X_BARRIERS + (
        Self.config.groups * Self.config.x_stages * Pipeline.BARRIERS
    )
    """Where those of chunks of h lie."""
    comptime BIAS2 = Self.H_BARRIERS + (
        Self.config.groups * Self.config.h_stages * Pipeline.BARRIERS
    )
    """Where the bias of z lies."""
    comptime NORM = Self.BIAS2 + Self.config.f * WIDTH * 4
    """Where the layer norm's weight lies, and its bias behind it."""
    comptime BIAS1 = Self.NORM + 2 * Self.config.c * WIDTH * 4
    """Where the bias of h lies: each two columns twice, as a thread's sums of two rows have it."""

    var data: UInt32
    """Its address."""

    @staticmethod
    def bytes(chunks: Int) -> Int:
        """Counts the bytes.

        Args:
            chunks: Of h.

        Returns:
            Of all parts, and what aligning them may take.
        """
        return Self.BIAS1 + 2 * chunks * WIDTH * 4 + SWIZZLED

    @always_inline
    def weights(self) -> Pipeline:
        """Begins the pipeline of weights: w1 and w2 have a stage of each chunk in turns.

        Returns:
            At the first stage; `weights_stage` finds their addresses.
        """
        return self._pipeline(0, Self.W_BARRIERS, 0, Self.config.w_stages, Self.config.c * BOX)

    @always_inline
    def weights_stage(self, index: UInt32) -> UInt32:
        """Gives the address of a stage of weights; those of w1 and w2 have two sizes.

        Args:
            index: Which.

        Returns:
            In shared memory.
        """
        comptime W1 = UInt32(Self.config.c * BOX)
        comptime if Self.config.c == Self.config.f:
            return self.data + index * W1
        else:
            comptime assert Self.config.w_stages % 2 == 0, "chain: w_stages must be even"
            return self.data + index // 2 * UInt32(Self.PAIR) + index % 2 * W1

    @always_inline
    def x(self, group: UInt32) -> Pipeline:
        """Begins a consumer's pipeline of tiles of x.

        Args:
            group: The consumer.

        Returns:
            At the first stage.
        """
        return self._pipeline(Self.X, Self.X_BARRIERS, group, Self.config.x_stages, Self.TILE)

    @always_inline
    def h(self, group: UInt32) -> Pipeline:
        """Begins a consumer's pipeline of chunks of h.

        Args:
            group: The consumer.

        Returns:
            At the first stage; there are none if h is not stored.
        """
        return self._pipeline(Self.H, Self.H_BARRIERS, group, Self.config.h_stages, BOX)

    @always_inline
    def _pipeline(
        self, data: Int, barriers: Int, group: UInt32, stages: Int, bytes: Int
    ) -> Pipeline:
        """Finds a consumer's pipeline among those of its kind."""
        return Pipeline(
            self.data + UInt32(data) + group * UInt32(stages * bytes),
            self.data + UInt32(barriers) + group * UInt32(stages * Pipeline.BARRIERS),
            stages=Int32(stages),
            bytes=UInt32(bytes),
        )

    @always_inline
    def init_barriers(self):
        """Prepares the barriers of all pipelines, by one thread."""
        self.weights().init[Self.config.w_stages](consumers=Self.config.groups)
        comptime for g in range(Self.config.groups):
            self.x(UInt32(g)).init[Self.config.x_stages](consumers=1)
            self.h(UInt32(g)).init[Self.config.h_stages](consumers=1)
        fence_barrier_init()

    @always_inline
    def load_vectors[norm: Bool](self, vectors: ChainVectors, problem: ChainProblem, t: Int32):
        """Copies the vectors, by all threads of the block.

        Parameters:
            norm: Whether there is a layer norm.

        Args:
            vectors: In global memory.
            problem: Sizes.
            t: The thread.
        """
        comptime THREADS = Int32(Self.config.threads())
        comptime C = Self.config.c * WIDTH
        for i in range(t, problem.chunks * Int32(WIDTH), THREADS):
            var value = Float32(0)
            if i < problem.hidden:
                value = vectors.bias1[unsafe_offset=Int(i)]
            var at = self.data + UInt32(Self.BIAS1) + UInt32(i // 2 * 16 + i % 2 * 4)
            shared_store_float(at, value)
            shared_store_float(at + 8, value)
        for i in range(t, Int32(Self.config.f * WIDTH), THREADS):
            var at = self.data + UInt32(Self.BIAS2) + UInt32(i) * 4
            shared_store_float(at, vectors.bias2[unsafe_offset=Int(i)])
        comptime if norm:
            for i in range(t, Int32(C), THREADS):
                var at = self.data + UInt32(Self.NORM) + UInt32(i) * 4
                shared_store_float(at, vectors.weight[unsafe_offset=Int(i)])
                shared_store_float(at + UInt32(C * 4), vectors.bias[unsafe_offset=Int(i)])

    @always_inline
    def bias1(self, chunk: Int32, at: Fragment) -> Sums[WIDTH]:
        """Begins the sums of a chunk of h.

        Args:
            chunk: Its number.
            at: The thread's place.

        Returns:
            The bias of each.
        """
        var sums = Sums[WIDTH](fill=0)
        var mine = self.data + UInt32(Self.BIAS1) + UInt32(at.column()) * 8
        comptime for j in range(WIDTH // 8):
            var bias = shared_load4(mine + UInt32(chunk) * UInt32(2 * WIDTH * 4) + UInt32(64 * j))
            comptime for i in range(4):
                sums[4 * j + i] = bias[i]
        return sums

    @always_inline
    def bias2[box: Int](self, at: Fragment) -> Sums[WIDTH]:
        """Begins the sums of a box of z.

        Parameters:
            box: Its number.

        Args:
            at: The thread's place.

        Returns:
            The bias of each.
        """
        var sums = Sums[WIDTH](fill=0)
        var mine = self.data + UInt32(Self.BIAS2) + UInt32(at.column()) * 4
        comptime for j in range(WIDTH // 8):
            var bias = shared_load2(mine + UInt32((box * WIDTH + 8 * j) * 4))
            comptime for i in range(4):
                sums[4 * j + i] = bias[i % 2]
        return sums


@fieldwise_init
struct ChainVectors(KernelArgument, TrivialRegisterPassable):
    """Biases and norm of a chain: pointers alone, so that LLVM knows their memory is global."""

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


struct ChainProblem(KernelArgument, TrivialRegisterPassable):
    """The sizes of a chain."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var schedule: TileScheduler[]
    """The tiles of rows."""
    var chunks: Int32
    """Chunks of 64 columns of h."""
    var hidden: Int32
    """Columns of h."""
    var eps: Float32
    """Added to the variance of the layer norm."""

    def __init__(out self, *, tiles: Int, hidden: Int, eps: Float32):
        """Takes the sizes.

        Args:
            tiles: Tiles of rows.
            hidden: Columns of h.
            eps: Added to the variance.
        """
        self.schedule = TileScheduler[]([tiles], columns=1)
        self.chunks = Int32(ceildiv(hidden, WIDTH))
        self.hidden, self.eps = Int32(hidden), eps


@__name(t"{op}_hopper_{config.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(1),
)
def chain_kernel[
    dtype: DType, op: StaticString, config: ChainConfig
](maps: TensorMaps[6], vectors: ChainVectors, problem: ChainProblem):
    """Computes tiles.

    Parameters:
        dtype: Of x, w1, w2, h and z.
        op: "layernorm_mlp" or "conv2d_chain".
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x, w1[K, C], w2[F, K], z, the residual and h.
        vectors: Biases and norm.
        problem: Sizes.
    """
    comptime MLP = op == "layernorm_mlp"
    var storage = ChainStorage[config](shared_memory["hopper_chain"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.init_barriers()
    storage.load_vectors[MLP](vectors, problem, t)
    sync_threads(0, UInt32(config.threads()))
    launch_dependent_grids()

    if t // Int32(WARPGROUP) == Int32(config.groups):
        registers_give[PRODUCER_REGISTERS]()
        # One thread drives the copy engine.
        if t % Int32(WARPGROUP) == 0:
            _produce[MLP](maps.address(), problem, storage)
    else:
        registers_take[config.registers()]()
        _consume[dtype, MLP](maps.address(), problem, storage, Fragment(t))


@always_inline
def _produce[
    config: ChainConfig, //, mlp: Bool
](maps: UInt64, problem: ChainProblem, storage: ChainStorage[config]):
    """Fills the pipelines, tile after tile, as stages become free."""
    var x = TileLoader(maps)
    var residual = TileLoader(maps, 4)
    comptime if not mlp:
        residual.prefetch_descriptor()
    x.prefetch_descriptor()

    # Weights do not depend on the kernel before.
    var weights = storage.weights()
    for stage in range(weights.prefetch(2 * problem.chunks)):
        _load_weights(maps, storage, stage, stage)
    wait_on_dependent_grids()

    var tiles = Array[Pipeline, config.groups](fill=weights)
    var chunks = Array[Pipeline, config.groups](fill=weights)
    comptime for g in range(config.groups):
        tiles[g], chunks[g] = storage.x(UInt32(g)), storage.h(UInt32(g))
    for tile in problem.schedule.turns():
        var m0 = tile * Int32(config.rows())
        comptime for g in range(config.groups):
            var to = tiles[g].stage()
            var full = tiles[g].barrier()
            tiles[g].acquire()
            tiles[g].expect(UInt32(config.c * BOX))
            comptime for i in range(config.c):
                x.load(to + UInt32(i * BOX), full, Int32(i * WIDTH), m0 + Int32(g * ROWS))
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
                    chunks[g].expect(UInt32(BOX))
                    residual.load(to, full, chunk * Int32(WIDTH), m0 + Int32(g * ROWS))
                    chunks[g].advance()


@always_inline
def _load_weights[
    config: ChainConfig, //
](maps: UInt64, storage: ChainStorage[config], stage: Int32, number: Int32):
    """Fills a stage with weights: even numbers are of w1, odd ones of w2."""
    var weights = storage.weights()
    var to = storage.weights_stage(UInt32(stage))
    var full = weights.barrier(stage)
    var column = number // 2 * Int32(WIDTH)
    if number % 2 == 0:
        var w1 = TileLoader(maps, 1)
        weights.expect(stage, UInt32(config.c * BOX))
        comptime for i in range(config.c):
            w1.load(to + UInt32(i * BOX), full, Int32(i * WIDTH), column)
    else:
        var w2 = TileLoader(maps, 2)
        weights.expect(stage, UInt32(config.f * BOX))
        w2.load(to, full, column, 0)


@always_inline
def _consume[
    config: ChainConfig, //, dtype: DType, mlp: Bool
](maps: UInt64, problem: ChainProblem, storage: ChainStorage[config], at: Fragment):
    """Multiplies tile after tile, 64 rows of each."""
    comptime C = config.c
    comptime F = config.f
    comptime first = Epilogue("gelu" if mlp else "relu")
    comptime second = Epilogue("none" if mlp else "relu")
    var group = UInt32(at.group())
    var leads = at.leads()
    var z_map = TileStore(maps, 3)
    var h_map = TileStore(maps, 5)

    var weights = storage.weights()
    var tiles = storage.x(group)
    var chunks = storage.h(group)
    var storing = StoringStage()
    for tile in problem.schedule.turns():
        var m0 = tile * Int32(config.rows()) + Int32(group) * Int32(ROWS)
        tiles.wait()
        var x = tiles.stage()
        var z = Array[Sums[WIDTH], F](fill=Sums[WIDTH](fill=0))
        comptime for f in range(F):
            z[f] = storage.bias2[f](at)
        comptime if mlp:
            comptime for k in range(4 * C):
                var v = widened(load_16x16[dtype, k](x, at))
                comptime for i in range(8):
                    z[k // 4][k % 4 * 8 + i] += v[i]
            _normalise[dtype](x, storage, at, problem.eps)
            fence_async()
            sync_threads(group + 1, UInt32(WARPGROUP))

        comptime if config.resident:
            weights.index = 0
        for chunk in range(problem.chunks):
            var sums = storage.bias1(chunk, at)
            weights.wait()
            wgmma_fence_aligned()
            sums = mma[dtype, WIDTH, C, BOX](
                Matrix[wide=True](x), Matrix[wide=True](storage.weights_stage(weights.index)), sums
            )
            wgmma_commit_group_sync()
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
                comptime if not mlp:
                    v += widened(load_16x16[dtype, k](chunks.stage(), at))
                h[k] = activate[first, dtype](v).cast[dtype]()
                comptime if not mlp:
                    store_16x16[k](chunks.stage(), at, h[k])
            comptime if not mlp:
                fence_async()
                sync_threads(group + 1, UInt32(WARPGROUP))
                if leads:
                    storing.release()
                    h_map.store(chunks.stage(), chunk * Int32(WIDTH), m0)
                    stores_commit()
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
        fence_async()
        sync_threads(group + 1, UInt32(WARPGROUP))
        if leads:
            storing.release()
            comptime for f in range(F):
                z_map.store(x + UInt32(f * BOX), Int32(f * WIDTH), m0)
            stores_commit()
        storing.begin(tiles)
        tiles.advance()
    stores_read()


@always_inline
def _advance[resident: Bool](mut weights: Pipeline):
    """Goes on to the next weights; resident ones are filled once, and so stay in their phase."""
    comptime if resident:
        weights.index += 1
    else:
        weights.advance()


@always_inline
def _normalise[
    config: ChainConfig, //, dtype: DType
](x: UInt32, storage: ChainStorage[config], at: Fragment, eps: Float32):
    """Normalises 64 rows in shared memory, 16 a warp; a thread has a quarter of two of them."""
    comptime C = Float32(config.c * WIDTH)
    var mean = SIMD[F32, 2](0)
    comptime for k in range(4 * config.c):
        var v = widened(load_16x16[dtype, k](x, at))
        mean[0] += v[0] + v[1] + v[4] + v[5]
        mean[1] += v[2] + v[3] + v[6] + v[7]
    comptime for half in range(2):
        mean[half] = over_lanes[4](mean[half]) / C
    var scale = SIMD[F32, 2](0)
    comptime for k in range(4 * config.c):
        var v = widened(load_16x16[dtype, k](x, at))
        comptime for i in range(8):
            var d = v[i] - mean[i // 2 % 2]
            scale[i // 2 % 2] = d.fma(d, scale[i // 2 % 2])
    comptime for half in range(2):
        scale[half] = rsqrt(over_lanes[4](scale[half]) / C + eps)
    var mine = storage.data + UInt32(storage.NORM) + UInt32(at.column()) * 4
    comptime for k in range(4 * config.c):
        var v = widened(load_16x16[dtype, k](x, at))
        comptime for j in range(2):
            var weight = mine + UInt32((16 * k + 8 * j) * 4)
            var w = shared_load2(weight)
            var b = shared_load2(weight + UInt32(config.c * WIDTH * 4))
            comptime for i in range(4):
                comptime n = 4 * j + i
                v[n] = ((v[n] - mean[i // 2]) * scale[i // 2]).fma(w[i % 2], b[i % 2])
        store_16x16[k](x, at, v.cast[dtype]())


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
    vectors: ChainVectors,
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
        vectors: Biases and norm.
        ctx: The GPU.
        eps: Added to the variance of the layer norm.

    Returns:
        Whether it was enqueued.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime config = chain_config(op == "layernorm_mlp", c, f)
    comptime if config.groups == 0:
        return False
    else:
        comptime most = PER_TILE if config.resident else PER_TILE_STREAMED
        var device = Device(ctx)
        var problem = ChainProblem(tiles=ceildiv(m, config.rows()), hidden=hidden, eps=eps)
        var chunks = Int(problem.chunks)
        var fits = ChainStorage[config].bytes(chunks) <= device.shared
        comptime if config.resident:
            fits = fits and 2 * chunks <= config.w_stages
        var enough = Int(problem.schedule.tiles) >= device.multiprocessors // most
        if hidden % 8 != 0 or not fits or not enough:
            return False
        _enqueue[dtype, op, config](m, problem, o, vectors, device, ctx)
        return True


def _enqueue[
    dtype: DType, op: StaticString, config: ChainConfig
](
    m: Int,
    problem: ChainProblem,
    o: ChainTensors[dtype],
    vectors: ChainVectors,
    device: Device,
    ctx: DeviceContext,
) raises:
    comptime C = config.c * WIDTH
    comptime F = config.f * WIDTH
    var hidden = Int(problem.hidden)
    var maps = TensorMaps[6]()
    maps.maps[0] = matrix_map[dtype](ctx, o.x, rows=m, columns=C, box=ROWS)
    maps.maps[1] = matrix_map[dtype](ctx, o.w1, rows=hidden, columns=C, box=WIDTH)
    maps.maps[2] = matrix_map[dtype](ctx, o.w2, rows=F, columns=hidden, box=F)
    maps.maps[3] = matrix_map[dtype](ctx, o.z, rows=m, columns=F, box=ROWS)
    comptime if config.h_stages > 0:
        maps.maps[4] = matrix_map[dtype](ctx, o.residual, rows=m, columns=hidden, box=ROWS)
        maps.maps[5] = matrix_map[dtype](ctx, o.h, rows=m, columns=hidden, box=ROWS)
    var shared = ChainStorage[config].bytes(Int(problem.chunks))
    launch[chain_kernel[dtype, op, config]](
        ctx,
        maps,
        vectors,
        problem,
        grid_dim=problem.schedule.blocks(device.multiprocessors),
        block_dim=config.threads(),
        shared=shared,
    )
