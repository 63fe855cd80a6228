"""A linear layer along the tokens, as in MLP-Mixer, on Hopper's tensor cores.

    y[n, f, c] = act(sum_t w[f, t] x[n, t, c] + bias[f] + residual[n, f, c])

    w[F, K]      weights: K is T, filled up with zeros to a multiple of 16 bytes
    x[N, T, C]   tokens
    y[N, F, C]   result, and the residual

One product an image: M = F filters, K = T tokens, N = C channels. Nothing is transposed in memory,
because wgmma reads 16-bit numbers of its right side in either order: a box of 64 tokens x 64 channels
is 64 rows of K, as the copy engine brings it. Tokens and channels that are not there are zeros on the
way in, and filters that are not there are dropped on the way out: T and F are any numbers.

A block computes tiles of `64 * groups` filters x `columns` channels of an image, as that of
gemm/hopper.mojo does: a producer fills a ring of stages, 64 tokens at a time, consumers multiply, the
stage after the last one brings the residual, and the result leaves through it. The tiles of filters
of the same channels follow one another, so that an image is read once. The weights of the first
stages are loaded before the kernel ahead is done.

16-bit floats only. C has to be a multiple of 8.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from .device import Device
from .epilogue import Epilogue
from .gemm.hopper import Config, Warps
from .hopper.accumulator import Fragment, Sums
from .hopper.epilogue import EpilogueTensors, finish_rows
from .hopper.mainloop import multiply_stages
from .hopper.mma import BOX, ROWS
from .hopper.pipeline import Pipeline
from .hopper.ptx import stores_read
from .hopper.scheduler import Tile, TileScheduler
from .hopper.shared import ROW, shared_memory
from .hopper.store import Storing, load_residual, store_boxes
from .hopper.tma import TensorMap, TensorMaps, TileLoader, TileStore, matrix_map, tensor_map
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import F32, Data, Operands, data
from .target import IS_HOPPER

comptime LARGE = Config(groups=2, columns=128, stages=3, blocks=2)
"""The tile where there is one for each multiprocessor."""
comptime SMALL = Config(groups=1, columns=64, stages=6, blocks=2)
"""The tile elsewhere."""
comptime WIDTH = Int32(64)
"""Numbers of 128 bytes: tokens of a stage, and channels of a box."""


struct TokenProblem(KernelArgument, TrivialRegisterPassable):
    """The sizes of a linear layer along the tokens."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var schedule: TileScheduler[]
    """The tiles: rows are channels of all images, columns are filters."""
    var filters: Int32
    """F."""
    var steps: Int32
    """Stages over the tokens."""
    var wide: Int32
    """Tiles of channels of an image."""

    def __init__(out self, n: Int, t: Int, c: Int, f: Int, config: Config):
        """Divides the work.

        Args:
            n: Images.
            t: Tokens.
            c: Channels.
            f: Filters.
            config: The tile.
        """
        var wide = ceildiv(c, config.columns)
        self.schedule = TileScheduler[]([n * wide], columns=ceildiv(f, config.rows()))
        self.filters, self.steps, self.wide = Int32(f), Int32(ceildiv(t, Int(WIDTH))), Int32(wide)

    @always_inline
    def place(self, tile: Tile, config: Config) -> Tuple[Int32, Int32, Int32]:
        """Finds a tile.

        Args:
            tile: Which.
            config: Its sizes.

        Returns:
            The image, the first channel and the first filter.
        """
        var n = Int32(UInt32(tile.row) // UInt32(self.wide))
        var c0 = (tile.row - n * self.wide) * Int32(config.columns)
        return n, c0, tile.column * Int32(config.rows())


@__name(t"token_linear_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps[config].THREADS)),
    `nvvm.minctasm`=SIMDLength(config.blocks),
)
def token_kernel[
    dtype: DType, epilogue: Epilogue, config: Config
](maps: TensorMaps[4], tensors: EpilogueTensors[dtype, epilogue], problem: TokenProblem):
    """Computes tiles.

    Parameters:
        dtype: Of w, x and y.
        epilogue: What the sums go through.
        config: Sizes of the tile.

    Args:
        maps: Tensor maps of w[F, K], x[N, T, C], y[N, F, C] and the residual.
        tensors: Have the bias.
        problem: Sizes.
    """
    var t = Int32(thread_idx.x)
    var pipeline = Pipeline.of_block[config.stages](
        shared_memory["token_linear"](),
        bytes=config.stage(),
        consumers=config.groups,
        threads=Warps[config].THREADS,
    )
    launch_dependent_grids()
    if Warps[config].produces(t):
        if Warps[config].drives(t):
            _produce[dtype, epilogue, config](maps.address(), problem, pipeline)
    else:
        _consume[dtype, epilogue, config](maps.address(), tensors, problem, pipeline, Fragment(t))


@always_inline
def _produce[
    dtype: DType, epilogue: Epilogue, config: Config
](maps: UInt64, problem: TokenProblem, at_start: Pipeline):
    """Fills the stages, tile after tile."""
    comptime STAGE = UInt32(config.stage())
    comptime X_AT = UInt32(config.rows() * ROW)
    comptime BOXES = config.columns // Int(WIDTH)
    var w = TileLoader(maps, 0)
    var x = TileLoader(maps, 1)
    var residual = TileLoader(maps, 3)
    w.prefetch_descriptor()
    x.prefetch_descriptor()
    var pipeline = at_start
    var first = problem.place(problem.schedule.tile(problem.schedule.start().tile), config)
    for i in range(pipeline.prefetch(problem.steps)):
        pipeline.expect(i, STAGE)
        w.load(pipeline.stage(i), pipeline.barrier(i), i * WIDTH, first[2])
    wait_on_dependent_grids()

    for number in problem.schedule.turns():
        var n, c0, f0 = problem.place(problem.schedule.tile(number), config)
        for k in range(problem.steps):
            var to = pipeline.stage()
            var full = pipeline.barrier()
            if pipeline.acquire_or_prefetched():
                pipeline.expect(STAGE)
                w.load(to, full, k * WIDTH, f0)
            comptime for j in range(BOXES):
                x.load(to + X_AT + UInt32(j * BOX), full, c0 + Int32(j) * WIDTH, k * WIDTH, n)
            pipeline.advance()
        load_residual[
            dtype, config.columns, joins=epilogue.joins, groups=config.groups, images=True
        ](pipeline, residual, c0, f0, n)


@always_inline
def _consume[
    dtype: DType, epilogue: Epilogue, config: Config
](
    maps: UInt64,
    tensors: EpilogueTensors[dtype, epilogue],
    problem: TokenProblem,
    at_start: Pipeline,
    at: Fragment,
):
    """Multiplies the stages, and stores the tiles."""
    comptime BOXES = config.columns // Int(WIDTH)
    comptime assert config.part[dtype]() == config.columns, "token_linear: a stage holds a result"
    var y = TileStore(maps, 2)
    var group = UInt32(at.group())
    var pipeline = at_start
    var storing = Storing[1]()
    for number in problem.schedule.turns():
        var n, c0, f0 = problem.place(problem.schedule.tile(number), config)
        var sums = multiply_stages[dtype, config.columns, overlap=config.overlap, turned=True](
            pipeline,
            storing,
            problem.steps,
            a=group * UInt32(BOX),
            b=UInt32(config.rows() * ROW),
            leads=at.leads(),
            start=Sums[config.columns](fill=0),
        )
        storing.begin(pipeline)
        pipeline.wait()
        var to = pipeline.stage() + group * UInt32(BOXES * BOX)
        var row = f0 + Int32(group) * Int32(ROWS)
        finish_rows[config.columns, pitch=BOX, by_row=True](
            to, at, sums, 1, tensors, row, problem.filters
        )
        store_boxes[dtype, config.columns, images=True](
            y, to, c0, row, n, barrier=group + 1, leads=at.leads()
        )
        pipeline.advance()
    stores_read()


def enqueue_token_linear[
    dtype: DType, epilogue: Epilogue, config: Config
](n: Int, t: Int, c: Int, f: Int, o: Operands[dtype], ctx: DeviceContext) raises:
    """Enqueues the kernel with one of the tiles.

    Parameters:
        dtype: Of w, x and y.
        epilogue: What the sums go through.
        config: Sizes of the tile.

    Args:
        n: Images.
        t: Tokens.
        c: Channels.
        f: Filters.
        o: The tensors.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    var maps = TensorMaps[4]()
    maps.maps[0] = matrix_map[dtype](ctx, o.w, rows=f, columns=ceildiv(t, 8) * 8, box=config.rows())
    maps.maps[1] = _tokens_map(ctx, o.x, n, t, c)
    maps.maps[2] = _tokens_map(ctx, o.y, n, f, c)
    comptime if epilogue.joins:
        maps.maps[3] = _tokens_map(ctx, o.residual, n, f, c)
    var problem = TokenProblem(n, t, c, f, config)
    launch[token_kernel[dtype, epilogue, config]](
        ctx,
        maps,
        EpilogueTensors[dtype, epilogue]([o]),
        problem,
        grid_dim=problem.schedule.blocks(Device(ctx).multiprocessors * config.blocks),
        block_dim=Warps[config].THREADS,
        shared=Pipeline.block_bytes(stages=config.stages, bytes=config.stage()),
    )


def _tokens_map[
    dtype: DType, //
](ctx: DeviceContext, x: Data[dtype], n: Int, t: Int, c: Int) raises -> TensorMap:
    """Makes the tensor map of x[N, T, C], of boxes of 64 tokens x 64 channels of an image."""
    return tensor_map[dtype, 3](ctx, x, [Int64(c), Int64(t), Int64(n)], [WIDTH, WIDTH, 1])


@register("token_linear")
struct TokenLinear:
    """Multiplies the tokens of x[N, T, C] by w[F, T] into y[N, F, C]."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString
    ](
        y: OutputTensor[rank=3, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        w: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).

        Args:
            y: Result [N, F, C].
            x: Tokens [N, T, C].
            w: [F, K], flat; K is T rounded up to a multiple of 8.
            bias: [F].
            residual: [N, F, C]; x if the epilogue does not add.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue.known[
            epilogue
        ](), "token_linear: there is no such epilogue; ops/epilogue.mojo says what there is"
        comptime assert (
            target == "gpu" and IS_HOPPER and y.dtype.is_half_float()
        ), "token_linear: expects 16-bit floats on a Hopper GPU; elsewhere tokens are transposed"
        comptime end = Epilogue(epilogue)
        var n, t, c, f = x.shape()[0], x.shape()[1], x.shape()[2], y.shape()[1]
        var o = Operands[y.dtype](data(x), data(w), data(bias), data(residual), data(y))
        if n * t * c * f == 0:
            return
        var large = TokenProblem(n, t, c, f, LARGE).schedule.tiles
        if Int(large) >= Device(ctx).multiprocessors:
            enqueue_token_linear[y.dtype, end, LARGE](n, t, c, f, o, ctx)
        else:
            enqueue_token_linear[y.dtype, end, SMALL](n, t, c, f, o, ctx)
