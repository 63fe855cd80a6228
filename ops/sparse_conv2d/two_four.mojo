"""2:4 sparse convolution on Hopper: y[m, f] = act(alpha * sum_k w[f, k] x[m, k] + bias + residual).

M = N * P * Q output pixels, K = R * S * C, F filters; of four neighbouring channels of a tap at
most two of w are not zero.

    x[N, H, W, C]                         activations
    values[K / 64, F / 128, 2, 4, 64, 8]  two of each four of w: K by eights, filters, K
    indices[K / 64, F / 128, 2, 128]      which two they are: a word for each thread of a consumer
                                          (PTX ISA 8.2, section 9.7.14.6)
    y[N, P, Q, F]                         result, and the residual

The left side of a sparse wgmma is the sparse one, so D = w x^T is turned over: a consumer, a
warpgroup, has 64 filters, the rows of its sums, and all pixels of a tile. Its results leave the
registers by stmatrix, which turns 8 x 8 of them back. Two warps, the producers, fill a ring of
windows of pixels, 64 channels wide, and one of filters, 64 of K at a time. As in
ops/gemm/hopper.mojo the window after a tile's last one brings the residual and takes the result,
blocks go from tile to tile, and start while the kernel before them still runs.

A window holds the pixels of one tap (im2col), or, for strides of 1, those of all taps: the padding
before a row is also what follows the row before it, and that before an image what follows the last
one, so pixels are walked over with the padding before them, (H + pad) (W + pad) an image. Then a
tap is the same window some rows of shared memory further on, where wgmma's descriptor may begin:
the swizzle is of addresses. Sums of padding are not stored.

Bound by shared memory, of which the tensor cores read a 64 x 32 and a 32 x 256 side in 144 clocks
and multiply them in 128, beside what the copies write; and by power: 0.9 to 1.0 PFLOP/s with the
zeros counted (H200, 2026-11-21). C has to be a multiple of 8, and F one of 8.
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
from std.utils.static_tuple import StaticTuple

from ..choice import NEVER, cheapest
from ..device import Device
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.accumulator import Fragment
from ..hopper.conv import Problem, Step, load_pixels, pixels_map
from ..hopper.epilogue import EpilogueTensors, finish_columns
from ..hopper.mma import ROWS, Matrix, hold, mma_sparse
from ..hopper.pipeline import Pipeline
from ..hopper.pixel_box import Taps
from ..hopper.ptx import (
    fence_barrier_init,
    load_bytes,
    shared_load,
    shared_load4,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.shared import (
    ROW,
    SWIZZLED,
    WARPGROUP,
    SharedAllocator,
    bytes_until,
    shared_memory,
    swizzle,
)
from ..hopper.store import Storing, store_boxes, sync_writes
from ..hopper.tma import TensorMaps, TileLoader, TileStore, im2col_map, matrix_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import Data, Operands

comptime STEP = 64
"""Channels of a stage."""
comptime VALUES = 4096
"""Bytes of values of a stage, for 64 filters."""
comptime INDICES = 512
"""Bytes of indices of a stage, for 64 filters."""


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 filters each."""
    var pixels: Int
    """Pixels of a tile: what mma_sparse takes; a group's share is a multiple of 16."""
    var windows: Int
    """Windows of pixels in shared memory, the ones for the epilogue among them."""
    var steps: Int
    """Steps of filters in shared memory."""
    var blocks: Int
    """Blocks that a multiprocessor holds at a time; bounds the registers."""
    var shares: Bool
    """Whether all taps read one window of 64 channels."""
    var tile_us: Float64
    """What a tile costs beside its steps, us, while all multiprocessors work."""
    var step_us: Float64
    """What a step costs, us; with two blocks, a step of both."""

    def __init__(
        out self,
        groups: Int,
        pixels: Int,
        windows: Int,
        steps: Int,
        blocks: Int,
        *,
        tile_us: Float64,
        step_us: Float64,
        shares: Bool = False,
    ):
        """Names the parts.

        Args:
            groups: Consumers.
            pixels: Pixels of a tile.
            windows: Windows of pixels.
            steps: Steps of filters.
            blocks: Blocks of a multiprocessor.
            tile_us: What a tile costs.
            step_us: What a step costs.
            shares: Whether all taps read one window.
        """
        self.groups, self.pixels, self.windows = groups, pixels, windows
        self.steps, self.blocks, self.shares = steps, blocks, shares
        self.tile_us, self.step_us = tile_us, step_us

    def label(self) -> String:
        """Names the tile for a profiler, as a part of a kernel's symbol.

        Returns:
            Filters, pixels, windows and steps.
        """
        var size = t"{ROWS * self.groups}x{self.pixels}x{self.windows}x{self.steps}"
        return String(size) + ("shares" if self.shares else "")

    @always_inline
    def step(self) -> Int:
        """Counts the bytes of a step's filters.

        Returns:
            Those of values and indices.
        """
        return self.groups * (VALUES + INDICES)

    @always_inline
    def part(self) -> Int:
        """Counts the pixels of a tile whose results fit into a window.

        Returns:
            A part of them for each group.
        """
        return self.pixels // self.groups


comptime Warps[config: Config] = Roles[config.groups, 2]
"""Which warps of a block do what: the producers bring windows, and filters.

Parameters:
    config: Of the kernel.
"""
comptime BARRIERS = SWIZZLED
"""Bytes before the stages, for the barriers of both rings."""
comptime TILES: List[Config] = [
    # H200, 2026-11-21, fitted to the 3x3 and 1x1 layers of ResNet-50 at batch 32 to 128
    Config(2, 192, 6, 6, 1, tile_us=2.86, step_us=0.351),
    Config(2, 96, 9, 9, 1, tile_us=1.20, step_us=0.234),
    Config(1, 208, 2, 5, 2, tile_us=2.27, step_us=0.331, shares=True),
    Config(1, 224, 2, 4, 2, tile_us=2.26, step_us=0.356, shares=True),
]
"""The tiles that are compiled."""


struct WindowLayout(KernelArgument, TrivialRegisterPassable):
    """How windows lie in shared memory, and which of their sums are stored."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var window: Int32
    """Bytes from a window to the next."""
    var pixels: Int32
    """Pixels of a window."""
    var row: Int32
    """Bytes from a row of taps to the next."""
    var tap: Int32
    """Bytes from a tap to the next in a row."""
    var never: Int32
    """0, unknown to the compiler."""
    var n: Int32
    """Images."""
    var p: Int32
    """Output rows that are stored."""
    var q: Int32
    """Output columns that are stored."""

    def __init__(out self, g: Geometry, config: Config):
        """Takes the sizes.

        Args:
            g: Of the convolution.
            config: Of the tile.
        """
        self.n, self.p, self.q = Int32(g.n), Int32(g.p), Int32(g.q)
        var row = g.dilation_h * (g.w + g.pad_w)
        self.row, self.tap = Int32(row * ROW), Int32(g.dilation_w * ROW)
        var pixels = config.pixels
        if config.shares:
            pixels += (g.r - 1) * row + (g.s - 1) * g.dilation_w
        self.pixels, self.window = Int32(pixels), Int32(ceildiv(pixels, 8) * 8 * ROW)
        self.never = 0


struct Storage(TrivialRegisterPassable):
    """What a block has in its shared memory."""

    var windows: Pipeline
    """Windows of pixels, the ones for the epilogue among them."""
    var steps: Pipeline
    """Filters, a stage a step."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32, config: Config, layout: WindowLayout):
        """Divides shared memory.

        Args:
            data: Its address.
            config: How many stages there are.
            layout: How large a window is.
        """
        var memory = SharedAllocator(data)
        var barriers = SharedAllocator(memory.take(BARRIERS))
        var window = UInt32(layout.window)
        var step = UInt32(config.step())
        var windows = memory.take(UInt32(config.windows) * window)
        var steps = memory.take(UInt32(config.steps) * step)
        self.windows = Pipeline(windows, barriers, stages=Int32(config.windows), bytes=window)
        self.steps = Pipeline(steps, barriers, stages=Int32(config.steps), bytes=step)
        self.end = memory.end


@fieldwise_init
struct Filters[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The filters, which are read without tensor maps.

    Parameters:
        dtype: Of the values.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var values: Data[Self.dtype]
    """[K / 64, F / 128, 2, 4, 64, 8]."""
    var indices: Data[DType.uint32]
    """[K / 64, F / 128, 2, 128]."""


@__name(t"sparse_conv2d_two_four_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def two_four_kernel[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: TensorMaps[3],
    filters: Filters[dtype],
    tensors: EpilogueTensors[dtype, epilogue],
    problem: Problem[1],
    layout: WindowLayout,
):
    """Computes tiles.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of x (im2col, or a matrix), y[M, F] and the residual.
        filters: Values and indices.
        tensors: Bias, residual and y.
        problem: Sizes.
        layout: How windows lie in shared memory.
    """
    var storage = Storage(shared_memory["two_four"](), config, layout)
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.windows.init[config.windows](consumers=config.groups)
        storage.steps.init[config.steps](consumers=config.groups)
        fence_barrier_init()
    sync_threads(0, UInt32(Warps[config].THREADS))
    launch_dependent_grids()

    var producer = Warps[config].producer(t)
    if producer < 0:
        _consume[dtype, epilogue, config](
            maps.address(), tensors, problem, layout, storage, Fragment(t)
        )
    elif Warps[config].drives(t):
        if producer == 0:
            _produce_windows[epilogue, config](maps.address(), problem, layout, storage.windows)
        else:
            _produce_steps[dtype, config](filters, problem, storage.steps)


@always_inline
def _produce_steps[
    dtype: DType, config: Config
](filters: Filters[dtype], problem: Problem[1], at_start: Pipeline):
    """Fills the ring of filters, tile after tile; they do not depend on the kernel before."""
    var conv = problem.conv
    # Filters are arranged by pairs of 64.
    var groups = (problem.filters + Int32(2 * ROWS - 1)) // Int32(2 * ROWS) * 2
    var pipeline = at_start
    for number in problem.schedule.turns():
        var first = problem.schedule.tile(number).column * Int32(config.groups)
        var k = Int32(0)
        for _ in range(conv.steps()):
            var to = pipeline.stage()
            pipeline.acquire()
            pipeline.expect(UInt32(config.step()))
            var at = Int(k * groups + first)
            load_bytes(
                to,
                filters.values.unsafe_offset(at * (VALUES // 2)),
                UInt32(config.groups * VALUES),
                pipeline.barrier().address,
            )
            load_bytes(
                to + UInt32(config.groups * VALUES),
                filters.indices.unsafe_offset(at * (INDICES // 4)),
                UInt32(config.groups * INDICES),
                pipeline.barrier().address,
            )
            pipeline.advance()
            comptime if config.shares:
                # All taps of 64 channels, and then those of the next.
                k += conv.chunks
                if k >= conv.steps():
                    k -= conv.steps() - 1
            else:
                k += 1


@always_inline
def _produce_windows[
    epilogue: Epilogue, config: Config
](maps: UInt64, problem: Problem[1], layout: WindowLayout, at_start: Pipeline):
    """Fills the ring of windows, tile after tile, and brings the residual."""
    comptime PART = config.part()
    var x = TileLoader(maps, 0)
    var residual = TileLoader(maps, 2)
    x.prefetch_descriptor()
    wait_on_dependent_grids()
    var conv = problem.conv
    var loads = conv.chunks if config.shares else conv.steps()
    var pipeline = at_start
    for number in problem.schedule.turns():
        var tile = problem.schedule.tile(number)
        var m0 = tile.row * Int32(config.pixels)
        var pixel = conv.pixel(m0)
        var corner = conv.corner(pixel)
        var k = Step()
        for _ in range(loads):
            pipeline.acquire()
            pipeline.expect(UInt32(layout.pixels) * UInt32(ROW))
            load_pixels(
                x,
                pipeline.stage(),
                pipeline.barrier(),
                conv,
                pixel,
                corner,
                channel=k.c * Int32(STEP),
                r=k.r,
                s=k.s,
            )
            pipeline.advance()
            comptime if config.shares:
                k.c += 1
            else:
                k.advance[sources=1](conv)
        comptime for part in range(config.groups):
            pipeline.acquire()
            var m = m0 + Int32(part * PART)
            if epilogue.joins and m < problem.rows_of(0):
                pipeline.expect(UInt32(config.groups * PART * ROW))
                var begin = conv.pixel(m)
                comptime for i in range(config.groups):
                    var to = pipeline.stage() + UInt32(i * PART * ROW)
                    var f = (tile.column * Int32(config.groups) + Int32(i)) * Int32(ROWS)
                    comptime if config.shares:
                        residual.load_im2col(
                            to, pipeline.barrier(), f, begin.q, begin.p, begin.n, 0, 0
                        )
                    else:
                        residual.load(to, pipeline.barrier(), f, m)
            else:
                pipeline.commit()
            pipeline.advance()


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: UInt64,
    tensors: EpilogueTensors[dtype, epilogue],
    problem: Problem[1],
    layout: WindowLayout,
    storage: Storage,
    at: Fragment,
):
    """Multiplies the stages of the tiles, and finishes each."""
    comptime PART = config.part()
    var conv = problem.conv
    var group = UInt32(at.group())
    var leads = at.leads()
    var y = TileStore(maps, 1)

    var windows = storage.windows
    var steps = storage.steps
    var storing = Storing[config.groups]()
    for number in problem.schedule.turns():
        var tile = problem.schedule.tile(number)
        var m0 = tile.row * Int32(config.pixels)
        var f0 = (tile.column * Int32(config.groups) + at.group()) * Int32(ROWS)
        var sums = StaticTuple[Float32, config.pixels // 2](fill=0)
        var step_before = steps.index
        var window_before = windows.index
        var indices = StaticTuple[UInt32, 2](fill=0)
        var taps = Taps(
            count=conv.taps,
            columns=conv.s,
            tap_step=UInt32(layout.tap),
            row_step=UInt32(layout.row - conv.s * layout.tap),
        )
        # By twos: products that still run read their register of indices, so two steps have two.
        for i in range(Int32(0), conv.steps(), Int32(2)):
            comptime for odd in range(2):
                if i + Int32(odd) < conv.steps():
                    var begins = not config.shares or taps.begins()
                    if begins:
                        windows.wait()
                    steps.wait()
                    var pixels = windows.stage()
                    comptime if config.shares:
                        pixels += taps.shift
                    var x = Matrix(pixels)
                    var w = steps.stage() + group * UInt32(VALUES)
                    indices[odd] = shared_load(
                        steps.stage() + UInt32(config.groups * VALUES) + UInt32(at.t) * 4
                    )
                    wgmma_fence_aligned()
                    sums = mma_sparse[dtype, config.pixels](w, x, indices[odd], sums)
                    wgmma_commit_group_sync()
                    if odd == 0 and i == 0 and leads:
                        storing.release(windows)
                    wgmma_wait_group_sync[1]()
                    hold(indices[1 - odd], windows.full, UInt32(layout.never))
                    # The copy engine may overwrite what is released, and ordinary loads read the
                    # indices of that step: racecheck wants a proxy fence. But they had come when
                    # the wgmma began that is done now.
                    if (odd == 1 or i > 0) and leads:
                        steps.release(step_before)
                        if begins:
                            windows.release(window_before)
                    step_before = steps.index
                    window_before = windows.index
                    steps.advance()
                    comptime if config.shares:
                        taps.advance()
                        if taps.begins():
                            windows.advance()
                    else:
                        windows.advance()
        wgmma_wait_group_sync[0]()
        comptime for odd in range(2):
            hold(indices[odd], windows.full, UInt32(layout.never))
        if leads:
            steps.release(step_before)
            windows.release(window_before)

        var bias = tensors.row_biases(at, f0, problem.filters)
        comptime if not config.shares:
            storing.begin(windows)
        comptime for part in range(config.groups):
            windows.wait()
            var to = windows.stage() + group * UInt32(PART * ROW)
            finish_columns[dtype, epilogue, PART, part * PART](to, at, sums, problem.alpha, bias)
            var m = m0 + Int32(part * PART)
            comptime if config.shares:
                sync_threads(group + 1, UInt32(WARPGROUP))
                _store[dtype, PART](tensors, problem, layout, to, m, f0, at)
                sync_writes(group + 1)
                if leads:
                    windows.release()
            else:
                var stores = leads and m < problem.rows_of(0)
                store_boxes[dtype, ROWS, rows=PART](y, to, f0, m, barrier=group + 1, leads=stores)
            windows.advance()
    stores_read()


@always_inline
def _store[
    dtype: DType, count: Int
](
    tensors: EpilogueTensors[dtype, ...],
    problem: Problem[1],
    layout: WindowLayout,
    source: UInt32,
    m: Int32,
    f0: Int32,
    at: Fragment,
):
    """Stores pixels that are not padding, 16 bytes a thread at a time: 8 threads a pixel."""
    var conv = problem.conv
    var t = at.t % Int32(WARPGROUP)
    var row = UInt32(t // 8)
    var pixel = conv.pixel(m + t // 8)
    var f = f0 + t % 8 * 8
    var mine = source + row * UInt32(ROW) + swizzle(UInt32(t % 8 * 16), row)
    comptime for i in range(count // 16):
        var inside = pixel.q < layout.q and pixel.p < layout.p and pixel.n < layout.n
        if inside and f < problem.filters:
            var to = (pixel.n * layout.p + pixel.p) * layout.q + pixel.q
            var bits = shared_load4(mine + UInt32(i * 16 * ROW))
            tensors.y[0].unsafe_store[alignment=16](
                Int(to) * Int(problem.filters) + Int(f), bitcast[dtype, 8](bits)
            )
        pixel.q += 16
        while pixel.q >= conv.q:
            pixel.q -= conv.q
            pixel.p += 1
            if pixel.p * conv.q == conv.pq:
                pixel.p = 0
                pixel.n += 1


# The host's side


def _padded(g: Geometry) -> Geometry:
    """Counts the padding before rows and images as pixels: then all taps are at one distance."""
    var walked = g
    walked.p, walked.q = g.h + g.pad_h, g.w + g.pad_w
    return walked


def _stored(g: Geometry) -> Geometry:
    """Describes the residual [N, P, Q, F] as im2col walks over it, padding and all."""
    var y = _padded(g)
    y.h, y.w, y.c = g.p, g.q, g.f
    y.pad_h = y.pad_w = 0
    return y


def fits(g: Geometry, config: Config, device: Device) -> Bool:
    """Tells whether a tile can compute a convolution.

    Args:
        g: Sizes; `takes` of ops/hopper/conv.mojo is true of them.
        config: Of the tile.
        device: The GPU.

    Returns:
        True for tiles whose taps have windows of their own; for others if strides are 1, there is
        no more padding after rows and images than before them, and the windows fit into memory.
    """
    if not config.shares:
        return True
    var right = g.q - 1 + (g.s - 1) * g.dilation_w - g.pad_w - (g.w - 1)
    var bottom = g.p - 1 + (g.r - 1) * g.dilation_h - g.pad_h - (g.h - 1)
    var shared = bytes_until(Storage(0, config, WindowLayout(g, config)).end)
    return (
        g.r * g.s > 1
        and g.stride_h * g.stride_w == 1
        and right <= g.pad_w
        and bottom <= g.pad_h
        and g.q <= g.w + g.pad_w
        and g.p <= g.h + g.pad_h
        and config.blocks <= device.holds(shared)
    )


def choose_two_four(g: Geometry, device: Device) -> Int:
    """Chooses the tile of a convolution, by what its waves of tiles cost.

    Args:
        g: Sizes.
        device: The GPU.

    Returns:
        An index in TILES.
    """
    var steps = Float64(g.r * g.s * ceildiv(g.c, STEP))

    def cost(config: Config) {imm} -> Float64:
        if not fits(g, config, device):
            return NEVER
        var walked = _padded(g) if config.shares else g
        var tiles = walked.tiles(config.pixels, ROWS * config.groups)
        var waves = Float64(device.waves(tiles, config.blocks))
        return waves * (config.tile_us + config.step_us * steps)

    return cheapest[TILES](cost)


def two_four_conv2d[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes; `takes` of ops/hopper/conv.mojo is true of them.
        o: The tensors; w holds the values as `two_four` of graphs/arrange.py orders them.
        indices: Which two of each four the values are, from there, too.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var tile = choose_two_four(g, Device(ctx))
    comptime for i in range(len(TILES)):
        if tile == i:
            two_four_tile[dtype, epilogue, TILES[i]](g, o, indices, ctx)


def two_four_tile[
    dtype: DType, epilogue: Epilogue, config: Config
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    """Enqueues a convolution with a tile.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.
        config: Of the tile; it `fits`.

    Args:
        g: Sizes; `takes` of ops/hopper/conv.mojo is true of them.
        o: The tensors; w holds the values as `two_four` of graphs/arrange.py orders them.
        indices: Which two of each four the values are, from there, too.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime PART = config.part()
    comptime assert PART % 16 == 0, "two_four: stmatrix stores 16 pixels at a time"
    comptime assert config.groups < config.windows, "two_four: a tile's results fill the ring"
    comptime assert config.groups <= 2, "two_four: filters are arranged by pairs of 64"
    var layout = WindowLayout(g, config)
    var walked = g
    var maps = TensorMaps[3]()
    comptime if config.shares:
        walked = _padded(g)
        comptime if epilogue.joins:
            maps.maps[2] = im2col_map[dtype](ctx, o.residual, _stored(g), PART)
    else:
        maps.maps[1] = matrix_map[dtype](ctx, o.y, rows=g.pixels(), columns=g.f, box=PART)
        comptime if epilogue.joins:
            maps.maps[2] = matrix_map[dtype](
                ctx, o.residual, rows=g.pixels(), columns=g.f, box=PART
            )
    maps.maps[0] = pixels_map[dtype](ctx, o.x, walked, Int(layout.pixels))
    var problem = Problem[1](
        [walked],
        rows=config.pixels,
        columns=ROWS * config.groups,
        width=STEP,
        splits=1,
        alpha=o.alpha,
    )
    var resident = Device(ctx).multiprocessors * config.blocks
    launch[two_four_kernel[dtype, epilogue, config]](
        ctx,
        maps,
        Filters[dtype](o.w, indices),
        EpilogueTensors[dtype, epilogue]([o]),
        problem,
        layout,
        grid_dim=problem.schedule.blocks(resident),
        block_dim=Warps[config].THREADS,
        shared=bytes_until(Storage(0, config, layout).end),
    )
