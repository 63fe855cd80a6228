"""Implicit GEMM on the tensor cores of Ampere and later GPUs, and of CDNA3.

    y[m, f] = act(alpha * sum_k x[m, k] w[f, k] + bias[f] + residual[m, f])

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters; see gemm/gpu.mojo.

    x[N, H, W, C]   activations
    w[F, K]         filters, K ordered R, S, C (or w[K, F] for a product with b not transposed)
    y[N, P, Q, F]   result, and the residual

A block computes a tile of `rows` pixels x `columns` filters, each of its warps a part, in float32
registers. Stages of `chunks` 16-byte chunks of K for each pixel and filter come into shared memory
while earlier ones are multiplied. A thread copies the same chunk of K of some pixels in each
stage, so it walks over taps and channels once for all of them, without a division; what lies in
the padding is filled with zeros. The chunks of a row change places (an exclusive or with the row),
so that neither the copies nor the reads of a fragment meet in a bank. At the end each warp turns
its sums over in shared memory, 16 pixels at a time, and stores 16 bytes a thread.

Three ways to fill a stage:
    16 bytes, asynchronously     NVIDIA, rows of x and w multiples of 16 bytes
    16 bytes, through registers  AMD, the same
    an element at a time         everything else: any C and F

bfloat16 and float16 by mma.sync m16n8k16, or by mfma 16x16x16 on AMD; float32 on NVIDIA as TF32 (10
bits of mantissa, each fragment rounded to nearest) by m16n8k8. Groups and batches are one launch.

mfma: lane l of 64 gives row l % 16 of either operand, at k = 4 (l / 16) to k + 3, and receives rows
4 (l / 16) to + 3 of column l % 16 ("CDNA3 ISA", section 7). A lane reads 8 neighbours of K and
gives 4 to each of two instructions: any order of K will do if it is that of both operands. The
filters are the rows, so that a lane has 4 neighbouring filters of one pixel.
It ran on an H200, at 16 bits and as TF32; on an sm_80, sm_89 or gfx942 IT HAS NOT RUN YET.

Bound by the latency of fragments and copies on Hopper, where mma.sync reaches less of the tensor
cores than the wgmma of gemm/hopper.mojo; short K is bound by device memory. docs/kernels.md has
the figures.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.sync import syncwarp
from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys import inlined_assembly, size_of
from std.utils.static_tuple import StaticTuple

from ..async_copy import commit_copies, copy_async, wait_copies
from ..choice import cheapest
from ..device import Device
from ..epilogue import Channels, Epilogue, Output, apply
from ..geometry import Geometry
from ..hopper.accumulator import Fragment
from ..hopper.conv import Conv, Pixel, Step
from ..hopper.ptx import mma_sync, prefetch_l2
from ..hopper.scheduler import TileScheduler
from ..kernel_argument import KernelArgument
from ..operands import F32, U32, Batch, Data, Operands, Shared
from ..swizzle import chunk_place
from ..target import IS_HOPPER, IS_NVIDIA

comptime WARP = 32 if IS_NVIDIA else 64
"""Threads of a warp."""
comptime TILE_COLUMNS = 8 if IS_NVIDIA else 16
"""Filters of an instruction; it has 16 pixels, and a thread 4 of the sums."""
comptime HINT = ".L2::128B"
"""Copies bring a whole line into the second-level cache."""
comptime OUTSIDE = Int32(-(1 << 29))
"""A row of x that no window's tap brings back into the image."""


@fieldwise_init
struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var rows: Int
    """Pixels of a tile."""
    var columns: Int
    """Filters of a tile."""
    var warps_m: Int
    """Warps that share the pixels."""
    var warps_n: Int
    """Warps that share the filters."""
    var chunks: Int
    """16-byte chunks of K in a stage, for each pixel and filter: 4 or 8."""
    var stages: Int
    """Stages in shared memory."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var pace: Int
    """How long a tile takes for its size, 16 for the largest tile; measured."""

    def label(self, wide: Bool) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Args:
            wide: Whether it reads 16 bytes at a time.

        Returns:
            Pixels, filters and 16-byte chunks of K.
        """
        var size = t"{self.rows}x{self.columns}x{self.chunks}"
        return String(size) + ("" if wide else "narrow")

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warp for each part of the tile.
        """
        return self.warps_m * self.warps_n * WARP

    @always_inline
    def shared(self) -> Int:
        """Counts the bytes of shared memory.

        Returns:
            All stages; the epilogue uses them again.
        """
        return self.stages * (self.rows + self.columns) * self.chunks * 16

    @always_inline
    def pitch(self) -> Int:
        """Counts the floats from a row of a warp's sums to the next in shared memory.

        Returns:
            8 more than needed, against conflicts.
        """
        return self.columns // self.warps_n + 8


def _configs() -> List[Config]:
    """Lists tiles from large to small; 48 KB of stages leave two blocks to an sm_89.

    Hopper leaves little to this kernel, and gets one.
    """
    comptime if IS_NVIDIA:
        var small = Config(64, 64, warps_m=2, warps_n=2, chunks=8, stages=3, blocks=4, pace=20)
        comptime if IS_HOPPER:
            return [small]
        return [
            Config(128, 128, warps_m=2, warps_n=4, chunks=4, stages=3, blocks=2, pace=16),
            Config(128, 64, warps_m=2, warps_n=2, chunks=4, stages=4, blocks=3, pace=18),
            small,
        ]
    return [
        Config(128, 128, warps_m=2, warps_n=2, chunks=4, stages=2, blocks=1, pace=16),
        Config(128, 64, warps_m=2, warps_n=2, chunks=4, stages=2, blocks=2, pace=18),
        Config(64, 64, warps_m=2, warps_n=2, chunks=4, stages=2, blocks=2, pace=20),
    ]


comptime CONFIGS = _configs()
"""The tiles that are compiled; `pace` was measured on an H200 (2026-11-21)."""
comptime NARROW = Config(64, 64, warps_m=2, warps_n=2, chunks=4, stages=2, blocks=4, pace=20)
"""The tile of products whose rows are no multiples of 16 bytes."""


struct Problem(KernelArgument, TrivialRegisterPassable):
    """Sizes of a product of a batch, or of a group, as a kernel wants them."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var pixels: Int32
    """M."""
    var columns: Int32
    """F of a group."""
    var depth: Int32
    """K."""
    var all_c: Int32
    """C of all groups."""
    var all_f: Int32
    """F of all groups."""
    var h: Int32
    """Input height, px."""
    var w: Int32
    """Input width, px."""
    var conv: Conv
    """Pixels and taps of x; its steps are channels of a group."""
    var tiles_m: Int32
    """Tiles of pixels of each product."""
    var schedule: TileScheduler[1]
    """The tiles of all products, as one product's with as many rows."""
    var batch: Batch
    """Where each product's tensors are."""

    def __init__(out self, g: Geometry, config: Config, batch: Batch):
        """Takes the sizes of a convolution.

        Args:
            g: Sizes.
            config: The tile.
            batch: Where each product's tensors are.
        """
        self.pixels, self.columns = Int32(g.pixels()), Int32(g.group_f())
        self.depth = Int32(g.depth())
        self.all_c, self.all_f = Int32(g.c), Int32(g.f)
        self.h, self.w = Int32(g.h), Int32(g.w)
        self.conv = Conv(g, chunks=g.group_c())
        self.tiles_m = Int32(ceildiv(g.pixels(), config.rows))
        self.schedule = TileScheduler[1](
            [Int(self.tiles_m) * Int(batch.products)], columns=ceildiv(g.group_f(), config.columns)
        )
        if g.plain():
            # One column of pixels: their places need no division.
            self.h, self.w = self.pixels, 1
        self.batch = batch


# Instructions


@always_inline
def to_tf32[dtype: DType](v: SIMD[U32, 4]) -> SIMD[U32, 4]:
    """Rounds float32 to TF32, to nearest; leaves halves as they are.

    Parameters:
        dtype: Of the numbers.

    Args:
        v: Their bits.

    Returns:
        Their bits.
    """
    var r = v
    comptime if dtype == F32:
        comptime for i in range(4):
            r[i] = inlined_assembly[
                "cvt.rna.tf32.f32 $0, $1;", UInt32, constraints="=r,r", has_side_effect=False
            ](v[i])
    return r


# Filling a stage


@always_inline
def _load[dtype: DType, width: Int](at: Data[dtype]) -> SIMD[dtype, width]:
    """Loads 16 bytes."""
    return at.unsafe_load[width=width, alignment=16]()


struct _Filler[dtype: DType, k_major: Bool, config: Config, wide: Bool]:
    """What a thread copies: a chunk of K of some pixels, and some chunks of filters."""

    comptime WIDTH = 16 // size_of[Self.dtype]()
    comptime CHUNKS = Self.config.chunks
    comptime DEPTH = Self.CHUNKS * Self.WIDTH
    comptime THREADS = Self.config.threads()
    comptime ASYNC = IS_NVIDIA and Self.wide
    comptime X_STEP = Self.THREADS // Self.CHUNKS
    comptime X_COUNT = Self.config.rows // Self.X_STEP
    # Chunks of a row of w in shared memory: along K, or along F.
    comptime W_CHUNKS = Self.CHUNKS if Self.k_major else Self.config.columns // Self.WIDTH
    comptime W_STEP = Self.THREADS // Self.W_CHUNKS
    comptime W_COUNT = (Self.config.columns if Self.k_major else Self.DEPTH) // Self.W_STEP
    comptime X_SIZE = Self.config.rows * Self.DEPTH
    comptime STAGE = Self.X_SIZE + Self.config.columns * Self.DEPTH

    var tap: Step
    """Where in K this thread's chunk of x is."""
    var k: Int32
    """Where in K the stage begins."""
    var x: Array[Data[Self.dtype], Self.X_COUNT]
    """The windows' corners in x."""
    var x_h: Array[Int32, Self.X_COUNT]
    """Rows of the windows' corners."""
    var x_w: Array[Int32, Self.X_COUNT]
    """Columns of the windows' corners."""
    var w: Data[Self.dtype]
    """This thread's first chunk of w in the stage."""
    var w_row: Int32
    """Its row in the stage: a filter, or a step of K."""
    var w_column: Int32
    """Its first column: a step of K, or a filter, counted from the first of all."""
    var w_left: Int32
    """Filters from the tile's first on."""
    var x_held: Array[SIMD[Self.dtype, Self.WIDTH], Self.X_COUNT]
    """Chunks of x on their way through registers."""
    var w_held: Array[SIMD[Self.dtype, Self.WIDTH], Self.W_COUNT]
    """Chunks of w on their way through registers."""

    @always_inline
    def __init__(out self, o: Operands[Self.dtype], p: Problem, m0: Int32, f0: Int32):
        comptime assert (
            Self.X_STEP * Self.X_COUNT == Self.config.rows and Self.X_STEP % 8 == 0
        ), "mma: threads must copy the same chunk of whole rows of x"
        comptime assert Self.W_STEP * Self.W_COUNT == (
            Self.config.columns if Self.k_major else Self.DEPTH
        ), "mma: threads must copy whole rows of w"
        comptime assert (
            Self.CHUNKS == 4 or Self.CHUNKS == 8
        ), "mma: a stage must have 4 or 8 chunks of K"
        comptime assert (
            Self.config.shared() <= (99 if IS_NVIDIA else 64) * 1024
        ), "mma: sm_89 gives a block 99 KB of shared memory, gfx942 64 KB"
        comptime assert (
            Self.config.warps_m * Self.config.warps_n * 64 * Self.config.pitch()
            <= Self.config.shared()
        ), "mma: the epilogue's sums must fit into the stages"
        var t = Int32(thread_idx.x)
        self.k = 0
        self.tap = Step(p.conv, t % Int32(Self.CHUNKS) * Int32(Self.WIDTH))
        self.x = Array[Data[Self.dtype], Self.X_COUNT](fill=o.x)
        self.x_h = Array[Int32, Self.X_COUNT](fill=OUTSIDE)
        self.x_w = Array[Int32, Self.X_COUNT](fill=0)
        self.x_held = Array[SIMD[Self.dtype, Self.WIDTH], Self.X_COUNT](fill=0)
        self.w_held = Array[SIMD[Self.dtype, Self.WIDTH], Self.W_COUNT](fill=0)
        comptime for i in range(Self.X_COUNT):
            var m = m0 + t // Int32(Self.CHUNKS) + Int32(i * Self.X_STEP)
            if m < p.pixels:
                var at = Pixel(m, 0, m, 0) if p.conv.plain == 1 else p.conv.pixel(m)
                var corner = p.conv.corner(at)
                self.x_h[i], self.x_w[i] = corner.h, corner.w
                self.x[i] = o.x.unsafe_offset(
                    ((Int(at.n) * Int(p.h) + Int(corner.h)) * Int(p.w) + Int(corner.w))
                    * Int(p.all_c)
                )
        self.w_row = t // Int32(Self.W_CHUNKS)
        self.w_column = t % Int32(Self.W_CHUNKS) * Int32(Self.WIDTH)
        self.w_left = p.columns - f0
        comptime if Self.k_major:
            self.w = o.w.unsafe_offset(Int(f0 + self.w_row) * Int(p.depth) + Int(self.w_column))
        else:
            self.w = o.w.unsafe_offset(Int(self.w_row) * Int(p.columns) + Int(f0 + self.w_column))

    @always_inline
    def fetch(mut self, p: Problem, stage: Shared[Self.dtype]):
        """Starts copying a stage, or reads it into registers, and goes on to the next."""
        var row = self.tap.r * p.conv.dilation_h
        var column = self.tap.s * p.conv.dilation_w
        var t = Int32(thread_idx.x)
        var to = self._x_place(stage)
        comptime if Self.wide:
            var from_ = Int((row * p.w + column) * p.all_c + self.tap.c)
            var more = self.tap.tap < p.conv.taps
            comptime for i in range(Self.X_COUNT):
                var inside = (
                    more
                    and UInt32(self.x_h[i] + row) < UInt32(p.h)
                    and UInt32(self.x_w[i] + column) < UInt32(p.w)
                )
                var source = self.x[i].unsafe_offset(from_)
                comptime if Self.ASYNC:
                    copy_async[hint=HINT](
                        to.unsafe_offset(i * Self.X_STEP * Self.DEPTH), source, inside
                    )
                else:
                    self.x_held[i] = 0
                    if inside:
                        self.x_held[i] = _load[Self.dtype, Self.WIDTH](source)
        else:
            var tap = self.tap
            comptime for j in range(Self.WIDTH):
                row, column = tap.r * p.conv.dilation_h, tap.s * p.conv.dilation_w
                var from_ = Int((row * p.w + column) * p.all_c + tap.c)
                comptime for i in range(Self.X_COUNT):
                    self.x_held[i][j] = 0
                    if (
                        tap.tap < p.conv.taps
                        and UInt32(self.x_h[i] + row) < UInt32(p.h)
                        and UInt32(self.x_w[i] + column) < UInt32(p.w)
                    ):
                        self.x_held[i][j] = self.x[i][unsafe_offset=from_]
                tap.advance[1](p.conv)
        self._fetch_w(p, stage.unsafe_offset(Self.X_SIZE))

        self.k += Int32(Self.DEPTH)
        comptime if Self.wide:
            self.tap.advance(p.conv, Int32(Self.DEPTH))
        else:
            self.tap = Step(p.conv, self.k + t % Int32(Self.CHUNKS) * Int32(Self.WIDTH))

    @always_inline
    def _fetch_w(mut self, p: Problem, stage: Shared[Self.dtype]):
        """Does the same for w."""
        comptime for i in range(Self.W_COUNT):
            var row = self.w_row + Int32(i * Self.W_STEP)
            var k = self.k + (self.w_column if Self.k_major else row)
            var f = row if Self.k_major else self.w_column
            var source = self.w.unsafe_offset(
                i * Self.W_STEP * (Int(p.depth) if Self.k_major else Int(p.columns))
            )
            var inside = k < p.depth and f < self.w_left
            comptime if Self.ASYNC:
                copy_async[hint=HINT](self._w_place(stage, row), source, inside)
            elif Self.wide:
                self.w_held[i] = 0
                if inside:
                    self.w_held[i] = _load[Self.dtype, Self.WIDTH](source)
            else:
                comptime for j in range(Self.WIDTH):
                    self.w_held[i][j] = 0
                    var k_j = k + Int32(j if Self.k_major else 0)
                    var f_j = f + Int32(0 if Self.k_major else j)
                    if k_j < p.depth and f_j < self.w_left:
                        self.w_held[i][j] = source[unsafe_offset=j]
        self.w = self.w.unsafe_offset(Self.DEPTH if Self.k_major else Self.DEPTH * Int(p.columns))

    @always_inline
    def _x_place(self, stage: Shared[Self.dtype]) -> Shared[Self.dtype]:
        """Finds the place of this thread's first chunk of x."""
        var t = Int32(thread_idx.x)
        return stage.unsafe_offset(
            chunk_place[Self.DEPTH, Self.WIDTH](t // Int32(Self.CHUNKS), t % Int32(Self.CHUNKS))
        )

    @always_inline
    def _w_place(self, stage: Shared[Self.dtype], row: Int32) -> Shared[Self.dtype]:
        """Finds the place of this thread's chunk of a row of w."""
        var chunk = Int32(thread_idx.x) % Int32(Self.W_CHUNKS)
        return stage.unsafe_offset(chunk_place[Self.W_CHUNKS * Self.WIDTH, Self.WIDTH](row, chunk))

    @always_inline
    def store(self, stage: Shared[Self.dtype]):
        """Writes what `fetch` read into registers to shared memory."""
        var to = self._x_place(stage)
        comptime for i in range(Self.X_COUNT):
            to.unsafe_store[alignment=16](i * Self.X_STEP * Self.DEPTH, self.x_held[i])
        comptime for i in range(Self.W_COUNT):
            self._w_place(
                stage.unsafe_offset(Self.X_SIZE), self.w_row + Int32(i * Self.W_STEP)
            ).unsafe_store[alignment=16](0, self.w_held[i])


# Multiplying a stage


@always_inline
def _filters_by_k[
    dtype: DType, columns: Int, count: Int
](w: Shared[dtype], k: Int32, f: Int32) -> SIMD[dtype, count]:
    """Reads neighbours in K of a filter from w[K, F] in shared memory, one by one."""
    comptime WIDTH = 16 // size_of[dtype]()
    var value = SIMD[dtype, count](0)
    comptime for j in range(count):
        var place = chunk_place[columns, WIDTH](k + Int32(j), f // Int32(WIDTH))
        value[j] = w[unsafe_offset=place + Int(f % Int32(WIDTH))]
    return value


@always_inline
def _matrices[dtype: DType, //, turned: Bool = False](at: Shared[dtype]) -> SIMD[U32, 4]:
    """Reads a fragment: four matrices, whose rows the lanes name, for NVIDIA."""
    return bitcast[U32, 4](ld_matrix[16 // size_of[dtype](), transpose=turned](at))


struct _Warp[dtype: DType, k_major: Bool, config: Config]:
    """A warp's part of a tile: its sums, and what it multiplies now and next."""

    comptime WIDTH = 16 // size_of[Self.dtype]()
    comptime CHUNKS = Self.config.chunks
    comptime DEPTH = Self.CHUNKS * Self.WIDTH
    comptime ROWS = Self.config.rows // Self.config.warps_m // 16
    comptime COLUMNS = Self.config.columns // Self.config.warps_n // TILE_COLUMNS
    comptime SUMS = Self.ROWS * Self.COLUMNS
    # A vector of b is two instructions' on NVIDIA; on AMD it is one filter's, for two instructions.
    comptime VECTORS = Self.COLUMNS // 2 if IS_NVIDIA else Self.COLUMNS
    comptime STEPS = Self.CHUNKS // 2 if IS_NVIDIA else Self.CHUNKS // 4

    var lane: Int32
    """Thread of the warp."""
    var row: Int32
    """First pixel of the tile."""
    var column: Int32
    """First filter of the tile."""
    var a: Array[SIMD[U32, 4], 2]
    """Fragments of 16 pixels, and of the next 16."""
    var b: Array[SIMD[U32, 4], 2 * Self.VECTORS]
    """Fragments of all filters at a step of K, and at the next."""
    var acc: Array[SIMD[F32, 4], Self.SUMS]
    """The sums."""

    @always_inline
    def __init__(out self):
        comptime assert (
            Self.ROWS * 16 * Self.config.warps_m == Self.config.rows
            and Self.COLUMNS * TILE_COLUMNS * Self.config.warps_n == Self.config.columns
            and Self.COLUMNS % 2 == 0
        ), "mma: a warp must have whole fragments, and pairs of them along F"
        comptime assert Self.ROWS % 2 == 0 and (
            not IS_NVIDIA or Self.STEPS % 2 == 0
        ), "mma: a stage must end with the second of two fragments"
        self.lane = Int32(thread_idx.x) % Int32(WARP)
        var warp = Int32(thread_idx.x) // Int32(WARP)
        self.row = warp % Int32(Self.config.warps_m) * Int32(Self.ROWS * 16)
        self.column = warp // Int32(Self.config.warps_m) * Int32(Self.COLUMNS * TILE_COLUMNS)
        self.a = Array[SIMD[U32, 4], 2](fill=0)
        self.b = Array[SIMD[U32, 4], 2 * Self.VECTORS](fill=0)
        self.acc = Array[SIMD[F32, 4], Self.SUMS](fill=0)

    @always_inline
    def read_x[step: Int, i: Int](mut self, stage: Shared[Self.dtype]):
        """Reads the fragments of 16 pixels.

        Parameters:
            step: Which step of K of the stage.
            i: Which pixels.
        """
        var chunk = Int32(step * (2 if IS_NVIDIA else 4)) + self.lane // 16
        var at = chunk_place[Self.DEPTH, Self.WIDTH](self.row + self.lane % 16, chunk)
        var rows = stage.unsafe_offset(at + i * 16 * Self.DEPTH)
        comptime if IS_NVIDIA:
            self.a[i % 2] = to_tf32[Self.dtype](_matrices(rows))
        else:
            self.a[i % 2] = bitcast[U32, 4](rows.unsafe_load[width=8, alignment=16]())

    @always_inline
    def read_w[step: Int](mut self, stage: Shared[Self.dtype]):
        """Reads the fragments of all filters.

        Parameters:
            step: Which step of K of the stage.
        """
        var w = stage.unsafe_offset(Self.config.rows * Self.CHUNKS * Self.WIDTH)
        comptime half = step % 2 * Self.VECTORS
        comptime for j in range(Self.VECTORS):
            comptime if IS_NVIDIA:
                self.b[half + j] = to_tf32[Self.dtype](self._filters[step, j](w))
            else:
                var chunk = Int32(4 * step) + self.lane // 16
                var f = self.column + Int32(j * 16) + self.lane % 16
                comptime if Self.k_major:
                    self.b[half + j] = bitcast[U32, 4](
                        w.unsafe_load[width=8, alignment=16](
                            chunk_place[Self.DEPTH, Self.WIDTH](f, chunk)
                        )
                    )
                else:
                    self.b[half + j] = bitcast[U32, 4](
                        _filters_by_k[Self.dtype, Self.config.columns, 8](w, chunk * 8, f)
                    )

    @always_inline
    def _filters[step: Int, j: Int](self, w: Shared[Self.dtype]) -> SIMD[U32, 4]:
        """Reads the fragments of 16 filters, for NVIDIA."""
        comptime if Self.k_major:
            var at = chunk_place[Self.DEPTH, Self.WIDTH](
                self.column + self.lane % 8 + self.lane // 16 * 8,
                Int32(2 * step) + self.lane // 8 % 2,
            )
            return _matrices(w.unsafe_offset(at + j * 16 * Self.DEPTH))
        elif Self.dtype == F32:
            # Matrices of 32-bit numbers cannot be transposed on the way.
            var r = SIMD[U32, 4](0)
            var k = Int32(step * 8) + self.lane % 4
            var f = self.column + Int32(j * 16) + self.lane // 4
            comptime for i in range(4):
                r[i] = bitcast[U32, 1](
                    _filters_by_k[Self.dtype, Self.config.columns, 1](
                        w, k + Int32(i % 2 * 4), f + Int32(i // 2 * 8)
                    ).cast[F32]()
                )
            return r
        else:
            var at = chunk_place[Self.config.columns, Self.WIDTH](
                Int32(step * 16) + self.lane % 16,
                self.column // Int32(Self.WIDTH) + Int32(2 * j) + self.lane // 16,
            )
            return _matrices[turned=True](w.unsafe_offset(at))

    @always_inline
    def multiply[step: Int, i: Int](mut self):
        """Adds the products of 16 pixels and all filters to the sums.

        Parameters:
            step: Which step of K of the stage.
            i: Which pixels.
        """
        var a = self.a[i % 2]
        comptime for j in range(Self.COLUMNS):
            comptime at = i * Self.COLUMNS + j
            comptime if IS_NVIDIA:
                var b = self.b[step % 2 * Self.VECTORS + j // 2]
                self.acc[at] = mma_sync[Self.dtype](a, b.slice[2, offset=j % 2 * 2](), self.acc[at])
            else:
                var x = bitcast[Self.dtype, 8](a)
                var w = bitcast[Self.dtype, 8](self.b[step % 2 * Self.VECTORS + j])
                var sum = self.acc[at]
                mma(sum, w.slice[4, offset=0](), x.slice[4, offset=0](), sum)
                mma(sum, w.slice[4, offset=4](), x.slice[4, offset=4](), sum)
                self.acc[at] = sum


@always_inline
def _sync_warp():
    """Makes what a warp's threads wrote to shared memory visible to its others."""
    comptime if IS_NVIDIA:
        syncwarp()
    else:
        barrier()


@always_inline
def _finish[
    dtype: DType, //, epilogue: Epilogue, k_major: Bool, config: Config
](
    o: Operands[dtype],
    p: Problem,
    m0: Int32,
    f0: Int32,
    memory: Shared[F32],
    warp: _Warp[dtype, k_major, config],
):
    """Turns a warp's sums over in shared memory, 16 pixels at a time; stores 8 filters a thread."""
    comptime Sums = _Warp[dtype, k_major, config]
    comptime EIGHTS = Sums.COLUMNS * TILE_COLUMNS // 8
    comptime PARTS = 16 * EIGHTS // WARP
    comptime PITCH = config.pitch()
    var lane = warp.lane
    var row0 = m0 + warp.row + lane // Int32(EIGHTS)
    var f = f0 + warp.column + lane % Int32(EIGHTS) * 8
    var to = Int(row0) * Int(p.all_f) + Int(f)
    var mine = memory.unsafe_offset(Int(thread_idx.x) // WARP * 16 * PITCH)
    var from_ = Int(lane // Int32(EIGHTS) * Int32(PITCH) + lane % Int32(EIGHTS) * 8)
    comptime STEP = WARP // EIGHTS
    var vectors = p.all_f % 8 == 0 and p.columns % 8 == 0

    # Of the residual, 16 pixels are on their way while those before them are finished.
    var added = Array[SIMD[dtype, 8], 2 * PARTS](fill=0)
    comptime if epilogue.joins:
        comptime for part in range(PARTS):
            if vectors and row0 + Int32(part * STEP) < p.pixels and f < p.columns:
                added[part] = o.residual.unsafe_load[width=8, alignment=16](
                    to + part * STEP * Int(p.all_f)
                )
    var bias = SIMD[F32, 8](0)
    if vectors and f < p.columns:
        bias = o.bias.unsafe_load[width=8, alignment=16](Int(f))
    comptime for i in range(Sums.ROWS):
        comptime for j in range(Sums.COLUMNS):
            var sum = warp.acc[i * Sums.COLUMNS + j]
            comptime if IS_NVIDIA:
                var thread = Fragment(lane=lane)
                var at = Int(thread.row() * Int32(PITCH) + thread.column()) + j * 8
                mine.unsafe_store[alignment=8](at, sum.slice[2, offset=0]())
                mine.unsafe_store[alignment=8](at + 8 * PITCH, sum.slice[2, offset=2]())
            else:
                var at = Int(lane % 16 * Int32(PITCH) + lane // 16 * 4) + j * 16
                mine.unsafe_store[alignment=16](at, sum)
        comptime if epilogue.joins and i + 1 < Sums.ROWS:
            comptime for part in range(PARTS):
                comptime next = (i + 1) * PARTS + part
                if vectors and row0 + Int32(next * STEP) < p.pixels and f < p.columns:
                    added[next % (2 * PARTS)] = o.residual.unsafe_load[width=8, alignment=16](
                        to + next * STEP * Int(p.all_f)
                    )
        _sync_warp()
        comptime for part in range(PARTS):
            comptime index = i * PARTS + part
            if row0 + Int32(index * STEP) < p.pixels and f < p.columns:
                var value = mine.unsafe_load[width=8, alignment=16](from_ + part * STEP * PITCH)
                var here = to + index * STEP * Int(p.all_f)
                var output = Output[epilogue](o)
                if vectors:
                    var of = Channels(SIMD[F32, 8](o.alpha), bias)
                    var residual = added[index % (2 * PARTS)].cast[F32]()
                    output.put(apply[epilogue, dtype](value, of, residual), here)
                else:
                    comptime for e in range(8):
                        if f + Int32(e) < p.columns:
                            output.finish(
                                SIMD[F32, 1](value[e]), output.channels[1](Int(f) + e), here + e
                            )
        _sync_warp()


@__name(t"gemm_mma_{config.label(wide)}_{epilogue.label()}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def mma_kernel[
    dtype: DType, epilogue: Epilogue, k_major: Bool, config: Config, wide: Bool
](all: Operands[dtype], p: Problem):
    """Computes one tile of one product.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].
        config: Sizes of the tile.
        wide: Whether C and F of a group, and so all rows, are multiples of 16 bytes.

    Args:
        all: The tensors of all products.
        p: Sizes of one of them.
    """
    comptime Filler = _Filler[dtype, k_major, config, wide]
    comptime STAGE = Filler.STAGE
    comptime STAGES = config.stages if Filler.ASYNC else 2
    var memory: Shared[dtype]
    comptime if IS_NVIDIA:
        memory = rebind[Shared[dtype]](
            external_memory[
                Scalar[dtype], address_space=AddressSpace.SHARED, alignment=16, name="mma_gemm"
            ]()
        )
    else:
        memory = rebind[Shared[dtype]](
            unsafe_stack_allocation[
                config.shared() // size_of[dtype](),
                Scalar[dtype],
                address_space=AddressSpace.SHARED,
                alignment=16,
            ]()
        )
    var tile = p.schedule.tile(Int32(block_idx.x))
    var product = tile.row // p.tiles_m
    var m0 = (tile.row - product * p.tiles_m) * Int32(config.rows)
    var f0 = tile.column * Int32(config.columns)
    var o = p.batch.of(all, Int(product))
    comptime if IS_NVIDIA and epilogue.joins:
        # The residual is wanted last, but comes from far.
        comptime LINE = 128 // size_of[dtype]()
        comptime LINES = config.columns // LINE
        for i in range(Int32(thread_idx.x), Int32(config.rows * LINES), Int32(config.threads())):
            var m = m0 + i // Int32(LINES)
            var f = f0 + i % Int32(LINES) * Int32(LINE)
            if m < p.pixels and f < p.columns:
                prefetch_l2(o.residual.unsafe_offset(Int(m) * Int(p.all_f) + Int(f)))
    var steps = ceildiv(p.depth, Int32(Filler.DEPTH))
    var filler = Filler(o, p, m0, f0)
    var warp = _Warp[dtype, k_major, config]()
    comptime ROWS = type_of(warp).ROWS
    comptime K_STEPS = type_of(warp).STEPS
    comptime if Filler.ASYNC:
        comptime for i in range(STAGES - 1):
            if Int32(i) < steps:
                filler.fetch(p, memory.unsafe_offset(i * STAGE))
            commit_copies()
        wait_copies[STAGES - 2]()
        barrier()
        warp.read_w[0](memory)
        warp.read_x[0, 0](memory)
        var slot = 0
        var free = (STAGES - 1) * STAGE
        for step in range(steps):
            var here = memory.unsafe_offset(slot)
            comptime for k in range(K_STEPS):
                comptime for i in range(ROWS):
                    # What is multiplied next is read first.
                    comptime if i == 0 and k + 1 < K_STEPS:
                        warp.read_w[k + 1](here)
                    comptime if i + 1 < ROWS:
                        warp.read_x[k, i + 1](here)
                    elif k + 1 < K_STEPS:
                        warp.read_x[k + 1, 0](here)
                    else:
                        free = slot
                        slot = 0 if slot == (STAGES - 1) * STAGE else slot + STAGE
                        wait_copies[STAGES - 2]()
                        barrier()
                        warp.read_w[0](memory.unsafe_offset(slot))
                        warp.read_x[0, 0](memory.unsafe_offset(slot))
                    comptime if k == 0 and i == 0:
                        if step + Int32(STAGES - 1) < steps:
                            filler.fetch(p, memory.unsafe_offset(free))
                        commit_copies()
                    warp.multiply[k, i]()
        wait_copies[0]()
        barrier()
    else:
        var slot = 0
        if steps > 0:
            filler.fetch(p, memory)
            filler.store(memory)
        barrier()
        for step in range(steps):
            if step + 1 < steps:
                filler.fetch(p, memory)
            comptime for k in range(K_STEPS):
                warp.read_w[k](memory.unsafe_offset(slot))
                comptime for i in range(ROWS):
                    warp.read_x[k, i](memory.unsafe_offset(slot))
                    warp.multiply[k, i]()
            slot = STAGE - slot
            if step + 1 < steps:
                filler.store(memory.unsafe_offset(slot))
            barrier()
    _finish[epilogue](o, p, m0, f0, memory.unsafe_bitcast[Float32](), warp)


# The host's side


def mma_gemm[
    dtype: DType, epilogue: Epilogue, k_major: Bool
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext,) raises:
    """Enqueues the products of a batch, or the groups of a convolution, in one launch.

    Parameters:
        dtype: Of x, w and y; float32 is rounded to TF32.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].

    Args:
        g: Sizes of one product.
        o: The tensors of the first.
        batch: How many there are, and where.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime WIDTH = 16 // size_of[dtype]()
    if g.group_c() % WIDTH == 0 and (k_major or g.group_f() % WIDTH == 0):
        var config = _choose(g, Int(batch.products), Device(ctx))
        comptime for i in range(len(CONFIGS)):
            if config == i:
                mma_enqueue[dtype, epilogue, k_major, CONFIGS[i], True](g, o, batch, ctx)
        return
    mma_enqueue[dtype, epilogue, k_major, NARROW, False](g, o, batch, ctx)


def _choose(g: Geometry, products: Int, device: Device) -> Int:
    """Chooses the tile whose waves over the multiprocessors take least."""

    def cost(config: Config) {imm} -> Float64:
        var waves = device.waves(g.tiles(config.rows, config.columns) * products)
        return Float64(waves * config.rows * config.columns * config.pace)

    return cheapest[CONFIGS](cost)


def mma_enqueue[
    dtype: DType, epilogue: Epilogue, k_major: Bool, config: Config, wide: Bool
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext,) raises:
    """Enqueues products with tiles of one size.

    Parameters:
        dtype: Of x, w and y; float32 is rounded to TF32.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].
        config: Sizes of the tile.
        wide: Whether rows of x and w are multiples of 16 bytes.

    Args:
        g: Sizes of one product.
        o: The tensors of the first.
        batch: How many there are, and where.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var p = Problem(g, config, batch)
    comptime if IS_NVIDIA:
        ctx.enqueue_function[mma_kernel[dtype, epilogue, k_major, config, wide]](
            o,
            p,
            grid_dim=Int(p.schedule.tiles),
            block_dim=config.threads(),
            shared_mem_bytes=config.shared(),
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.shared())),
        )
    else:
        ctx.enqueue_function[mma_kernel[dtype, epilogue, k_major, config, wide]](
            o, p, grid_dim=Int(p.schedule.tiles), block_dim=config.threads()
        )
