"""Sparse convolution on Hopper's tensor cores: the filters lie compressed in memory only.

    y[m, f] = act(sum_k x[m, k] w[f, k] + bias[f] + residual[m, f])

    x[N, H, W, C]   activations
    words           the nonzeros of w: the number's bits below, its place in a tile above
    starts          where the words of each tile begin: 32 filters x 64 channels of one tap
    y[N, P, Q, F]   result, and the residual

M = N * P * Q output pixels, N = F filters, K = taps of 64 channels after one another. A block
computes `64 * groups` pixels x `columns` filters. Its expanders, a warp for each tile, clear a
stage of w, store the tile's nonzeros in it and so make the dense, swizzled matrix that wgmma reads
(Xia et al. 2023, arXiv:2309.10285, section 4). All of that happens before the kernel in front has
ended (programmatic dependent launch), as far as the stages go. Tiles without nonzeros are skipped,
and so are their pixels.

One thread has the copy engine bring x. Of a window of several taps with stride 1 it brings 64
channels of the pixels once, a box of whole rows with their padding: the output pixels of a row and
S - 1 more are rows of the product, and a tap is a shift of the matrix's first row. Other windows
come tap by tap (im2col), matrices as they are.

A cluster of `splits` blocks shares a tile: each sums a part of K and sends each peer the columns
that the peer adds up and finishes.

Accumulation in float32. C and F have to be multiples of 8. On ResNet-50's layers of 7 x 7 to 28 x
28 pixels at batch 1 it is 1.1 to 1.4 times as fast as the dense kernel (H200, 2026-11-22), with
50 as with 95 % zeros; with two steps of K it is slower. At batch 4 that depends on the layer; at
batch 32 the dense kernel is faster: here every tile of pixels expands the filters anew.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext, Dim, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.gpu.sync import syncwarp
from std.bit import pop_count
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ..epilogue import Epilogue, activate
from ..gemm.old import (
    GROUP,
    MATRIX,
    ROW,
    ROWS,
    Ends,
    Maps,
    Walk,
    im2col_map,
    is_plain,
    takes,
    tensor_map,
)
from ..hopper.ptx import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    ballot,
    cluster_address,
    cluster_arrive,
    cluster_send,
    cluster_wait,
    fence_async,
    fence_barrier_init,
    load_2d,
    load_4d,
    load_im2col,
    prefetch_map,
    shared_clear,
    shared_load,
    shared_load2,
    shared_load4,
    shared_store,
    shared_store_float,
    shared_store_low,
    sync_threads,
)
from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import F32, Data, Operands
from .tuning import CONFIGS, choose

comptime U32 = DType.uint32
"""A nonzero and its place."""
comptime I32 = DType.int32
"""Where words begin."""
comptime WIDTH = 64
"""Channels of a tile: 128 bytes."""
comptime FILTERS = 32
"""Filters of a tile."""
comptime TILE = FILTERS * ROW
"""Bytes of an expanded tile."""
comptime BOX = 384
"""Rows of 128 bytes that a stage of x has at most, where it is a box."""
comptime EXPANDERS = 8
"""Warps that expand tiles."""
comptime AHEAD = 4
"""Words, by fours, that a lane loads before it stores the first."""


struct Config(TrivialRegisterPassable):
    """How a block works: a compile-time value."""

    var groups: Int
    """Consumers, of 64 pixels each: 1 or 2."""
    var columns: Int
    """Filters of a block: 32, 64 or 128."""
    var split: Bool
    """Whether a cluster shares a tile."""

    def __init__(out self, groups: Int, columns: Int, *, split: Bool = False):
        """Names the parts.

        Args:
            groups: Consumers.
            columns: Filters of a block.
            split: Whether a cluster shares a tile.
        """
        self.groups, self.columns, self.split = groups, columns, split

    def label(self) -> String:
        """Names the block for a profiler, as a part of a kernel's symbol.

        Returns:
            Pixels and filters, and how it works.
        """
        return String(t"{self.rows()}x{self.columns}") + ("split" if self.split else "")

    @always_inline
    def rows(self) -> Int:
        """Counts the rows of the product.

        Returns:
            64 for each consumer.
        """
        return ROWS * self.groups

    @always_inline
    def parts(self) -> Int:
        """Counts the tiles of a step.

        Returns:
            One for 32 filters.
        """
        return self.columns // FILTERS

    @always_inline
    def turns(self) -> Int:
        """Counts the steps that are expanded at a time.

        Returns:
            As many as the expanders have warps for the tiles of.
        """
        return EXPANDERS // self.parts()

    @always_inline
    def blocks(self) -> Int:
        """Counts the blocks that a multiprocessor holds at a time; it bounds the registers.

        Returns:
            Two of one consumer, or one of two.
        """
        return 3 - self.groups

    @always_inline
    def room(self) -> Int:
        """Counts the bytes of shared memory that a block may take.

        Returns:
            As many as leave room for the other block.
        """
        return 113 * 1024 if self.groups == 1 else 227 * 1024

    @always_inline
    def threads(self) -> Int:
        """Counts the threads of a block.

        Returns:
            A warpgroup for each consumer, the expanders, and the warp that loads x.
        """
        return GROUP * self.groups + 32 * EXPANDERS + 32

    @always_inline
    def inbox(self) -> Int:
        """Counts the bytes that a cluster's blocks send to one of them.

        Returns:
            As many as a block has sums.
        """
        return self.rows() * self.columns * 4 if self.split else 0


struct Words(KernelArgument, TrivialRegisterPassable):
    """The compressed filters: nothing but pointers, as in `Ends`."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var words: Data[U32]
    """Nonzeros, tile by tile."""
    var starts: Data[I32]
    """Where each tile's begin: by filters, then channels, then taps; and the end."""

    def __init__(out self, words: Data[U32], starts: Data[I32]):
        """Names the parts.

        Args:
            words: Nonzeros.
            starts: Where each tile's begin, and the end.
        """
        self.words, self.starts = words, starts


struct Plan(KernelArgument, TrivialRegisterPassable):
    """How a block's shared memory is divided, and how rows of the product lie on an image."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var w_stages: Int32
    """Stages of expanded filters."""
    var x_stages: Int32
    """Stages of activations."""
    var x_bytes: Int32
    """Bytes of a stage of activations, a multiple of 1024."""
    var x_loads: Int32
    """Bytes of them that the copy engine brings."""
    var width: Int32
    """Rows of the product from one row of an image to the next; 0 if x comes tap by tap."""
    var height: Int32
    """Rows of an image in a tile."""
    var bands: Int32
    """Tiles of an image."""
    var blocks: Int32
    """Tiles of pixels and filters."""
    var lists: Int32
    """Tiles that there are words of."""

    def __init__(out self, g: Geometry, config: Config, splits: Int):
        """Plans a convolution.

        Args:
            g: Sizes.
            config: Sizes of the block.
            splits: Blocks that share a tile.
        """
        var taps = g.r * g.s
        var steps = taps * ceildiv(g.c, WIDTH)
        var share = ceildiv(steps, splits)
        var w_bytes = config.columns * ROW
        var room = config.room() - config.inbox() - 2048 - 4 * (config.parts() + 2) * (share + 2)
        var width = g.q + g.s - 1
        if not _is_box(g, config):
            var x_bytes = config.rows() * ROW
            var stages = max(1, min(share, room // (x_bytes + w_bytes + 32)))
            self.w_stages, self.x_stages = Int32(stages), Int32(stages)
            self.x_bytes, self.x_loads = Int32(x_bytes), Int32(x_bytes)
            self.width, self.height, self.bands = 0, 0, 0
            self.blocks = Int32(ceildiv(g.pixels(), config.rows()))
        else:
            var bands = ceildiv(g.p, min(g.p, config.rows() // width))
            var height = ceildiv(g.p, bands)
            var last = (g.r - 1) * width + g.s - 1 + config.rows()
            var x_loads = (height + g.r - 1) * width * ROW
            var x_bytes = ceildiv(max(x_loads, last * ROW), 1024) * 1024
            var chunks = 1 if splits * taps == steps else min(3, ceildiv(share - 1, taps) + 1)
            while chunks > 1 and chunks * x_bytes + config.turns() * (w_bytes + 32) > room:
                chunks -= 1
            var stages = (room - chunks * (x_bytes + 16)) // (w_bytes + 16)
            self.w_stages, self.x_stages = Int32(max(1, min(share, stages))), Int32(chunks)
            self.x_bytes, self.x_loads = Int32(x_bytes), Int32(x_loads)
            self.width, self.height, self.bands = Int32(width), Int32(height), Int32(bands)
            self.blocks = Int32(g.n * bands)
        self.blocks *= Int32(ceildiv(g.f, config.columns))
        self.lists = Int32(ceildiv(g.f, FILTERS) * steps)

    def shared(self, config: Config, steps: Int, splits: Int) -> Int:
        """Counts the bytes of shared memory.

        Args:
            config: Sizes of the block.
            steps: Of K.
            splits: Blocks that share a tile.

        Returns:
            Stages, what peers send, barriers, where words begin, and what aligning them may take.
        """
        var x = Int(self.x_stages) * (Int(self.x_bytes) + 16)
        var w = Int(self.w_stages) * (config.columns * ROW + 16)
        var starts = 4 * config.parts() * (ceildiv(steps, splits) + 1)
        var list = 4 + 8 * ceildiv(steps, splits)
        return x + w + config.inbox() + 8 + 4 * config.columns + starts + list + 1024


def _is_box(g: Geometry, config: Config) -> Bool:
    """Tells whether whole rows of an image, with their padding, serve all taps of a window."""
    var width = g.q + g.s - 1
    if g.r * g.s == 1 or width > config.rows():
        return False
    var below = (g.r - 1) * width + g.s - 1
    var near = max(g.stride_h, g.stride_w, g.dilation_h, g.dilation_w) == 1
    return near and below + config.rows() <= BOX


@__name(t"sparse_conv2d_tiles_{config.label()}_{epilogue.label()}_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(config.threads())),
    `nvvm.minctasm`=SIMDLength(config.blocks()),
)
def tiled_kernel[
    dtype: DType, epilogue: Epilogue, config: Config
](maps: Maps[1], ends: Ends[dtype, 1], lists: Words, walk: Walk[1], plan: Plan):
    """Computes a tile, or a cluster's share of one.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        config: Sizes of the block.

    Args:
        maps: Tensor map of x: boxes of an image, im2col, or a matrix.
        ends: Bias, residual and y.
        lists: The filters.
        walk: How tiles and steps run over them.
        plan: How shared memory is divided.
    """
    var memory = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024, name="sparse_conv2d"
    ]()
    var base = (UInt32(Int(memory)) + 1023) & ~UInt32(1023)
    launch_dependent_grids()
    var t = Int32(thread_idx.x)
    var rank = Int32(0)
    var tile = Int32(block_idx.x)
    comptime if config.split:
        rank = tile % walk.splits
        tile = tile // walk.splits
    var block = Block[config](base, walk, plan, tile, rank)
    if t == 0:
        for i in range(plan.w_stages):
            barrier_init(block.w_full + 8 * UInt32(i), UInt32(config.parts()))
            barrier_init(block.w_empty + 8 * UInt32(i), UInt32(config.groups))
        for i in range(plan.x_stages):
            barrier_init(block.x_full + 8 * UInt32(i), 1)
            barrier_init(block.x_empty + 8 * UInt32(i), UInt32(config.groups))
        comptime if config.split:
            barrier_init(block.sums, 1)
        fence_barrier_init()
        comptime if config.split:
            barrier_expect(block.sums, UInt32(block.sent(walk, plan)))
    var entries = block.count + 1
    for i in range(t, entries * Int32(config.parts()), Int32(config.threads())):
        var part = i // entries
        var list = (block.column * Int32(config.parts()) + part) * walk.steps()
        var at = min(list + block.first + i - part * entries, plan.lists)
        shared_store(block.starts + 4 * UInt32(i), UInt32(lists.starts[unsafe_offset=Int(at)]))
    # By the last warps: of the first one, which lists the steps, ptxas would make a path with
    # barriers of its own, and synccheck takes those for others.
    var i = t - Int32(config.threads() - config.columns)
    if i >= 0:
        var f = min(block.column * Int32(config.columns) + i, walk.filters - 1)
        shared_store_float(block.bias + 4 * UInt32(i), ends.bias[0][unsafe_offset=Int(f)])
    sync_threads(0, UInt32(config.threads()))
    comptime if config.split:
        cluster_arrive()
    if t < 32:
        block.list_steps(walk, plan)
    sync_threads(0, UInt32(config.threads()))

    if t < Int32(GROUP * config.groups):
        _multiply[dtype, epilogue, config](block, ends, walk, plan, t, rank)
    elif t < Int32(GROUP * config.groups + 32 * EXPANDERS):
        _expand[config](block, lists, plan, t - Int32(GROUP * config.groups))
    elif t % 32 == 0:
        _load[dtype, config](block, UInt64(Int(Pointer(to=maps))), walk, plan)


struct Block[config: Config](TrivialRegisterPassable):
    """What a block computes and where things lie in its shared memory.

    Parameters:
        config: Sizes of the block.
    """

    var row: Int32
    """Tile of pixels."""
    var column: Int32
    """Tile of filters."""
    var first: Int32
    """First step of K."""
    var count: Int32
    """Steps of K."""
    var w: UInt32
    """Stages of filters."""
    var x: UInt32
    """Stages of activations."""
    var inbox: UInt32
    """What the cluster's blocks send."""
    var w_full: UInt32
    """Barriers that tell that filters are expanded."""
    var w_empty: UInt32
    """Barriers that tell that they are read."""
    var x_full: UInt32
    """Barriers that tell that activations have come."""
    var x_empty: UInt32
    """Barriers that tell that they are read."""
    var sums: UInt32
    """The barrier of the inbox."""
    var bias: UInt32
    """Of the block's filters."""
    var starts: UInt32
    """Where the words of the block's tiles begin, and the last one's end, part by part."""
    var list: UInt32
    """How many steps have filters that are not all zeros; for each its number and what it reads."""

    @always_inline
    def __init__(out self, base: UInt32, walk: Walk[1], plan: Plan, tile: Int32, rank: Int32):
        """Divides shared memory.

        Args:
            base: Where it begins.
            walk: How tiles and steps run.
            plan: How many stages there are.
            tile: Number of the tile.
            rank: In the cluster.
        """
        self.row = tile // walk.tiles
        self.column = tile - self.row * walk.tiles
        self.first, self.count = 0, walk.steps()
        comptime if Self.config.split:
            self.first = walk.steps() * rank // walk.splits
            self.count = walk.steps() * (rank + 1) // walk.splits - self.first
        self.w = base
        self.x = self.w + UInt32(plan.w_stages) * UInt32(Self.config.columns * ROW)
        self.inbox = self.x + UInt32(plan.x_stages) * UInt32(plan.x_bytes)
        self.w_full = self.inbox + UInt32(Self.config.inbox())
        self.w_empty = self.w_full + 8 * UInt32(plan.w_stages)
        self.x_full = self.w_empty + 8 * UInt32(plan.w_stages)
        self.x_empty = self.x_full + 8 * UInt32(plan.x_stages)
        self.sums = self.x_empty + 8 * UInt32(plan.x_stages)
        self.bias = self.sums + 8
        self.starts = self.bias + UInt32(4 * Self.config.columns)
        self.list = self.starts + UInt32((self.count + 1) * Int32(4 * Self.config.parts()))

    @always_inline
    def start(self, part: Int32, step: Int32) -> UInt32:
        """Looks up where the words of a tile begin.

        Args:
            part: Which of the step's tiles.
            step: Counted from the block's first.

        Returns:
            The first word.
        """
        return shared_load(self.starts + 4 * UInt32(part * (self.count + 1) + step))

    @always_inline
    def list_steps(self, walk: Walk[1], plan: Plan):
        """Lists the steps whose filters are not all zeros, by one warp.

        Args:
            walk: How steps run.
            plan: How rows lie on an image.
        """
        var lane = Int32(thread_idx.x)
        var first = self.first // walk.taps
        var total = UInt32(0)
        for from_step in range(Int32(0), self.count, Int32(32)):
            var i = from_step + lane
            var bits = UInt32(0)
            if i < self.count:
                comptime for part in range(Self.config.parts()):
                    bits |= self.start(Int32(part), i) ^ self.start(Int32(part), i + 1)
            var live = ballot(bits != 0)
            if bits != 0:
                var c = (self.first + i) // walk.taps
                var tap = self.first + i - c * walk.taps
                var r = tap // walk.s
                var s = tap - r * walk.s
                var reads = c | s << 16 | r << 24
                if plan.width != 0:
                    reads = (c - first) << 16 | (r * plan.width + s) * Int32(ROW // 16)
                var below = live & ((UInt32(1) << UInt32(lane)) - 1)
                var at = self.list + 4 + 8 * (total + UInt32(pop_count(below)))
                shared_store(at, UInt32(i))
                shared_store(at + 4, UInt32(reads))
            total += UInt32(pop_count(live))
        if lane == 0:
            shared_store(self.list, total)

    @always_inline
    def chunks(self) -> Int32:
        """Counts the boxes that the listed steps read, and those between them.

        Returns:
            From the block's first channels to the last that are read.
        """
        var steps = self.steps()
        return Int32(self.reads(steps - 1) >> 16) + 1 if steps > 0 else Int32(0)

    @always_inline
    def steps(self) -> Int32:
        """Counts the steps that are listed.

        Returns:
            How many.
        """
        return Int32(shared_load(self.list))

    @always_inline
    def step(self, k: Int32) -> Int32:
        """Looks a step up.

        Args:
            k: Which of those that are listed.

        Returns:
            Its number, from the block's first.
        """
        return Int32(shared_load(self.list + 4 + 8 * UInt32(k)))

    @always_inline
    def reads(self, k: Int32) -> UInt32:
        """Looks up what a step reads.

        Args:
            k: Which of those that are listed.

        Returns:
            Channels, in steps of 64, and tap: column, row. Of a box: sixteenths of rows of 128
            bytes to the tap, and channels from the block's first.
        """
        return shared_load(self.list + 8 + 8 * UInt32(k))

    @always_inline
    def pixel(self, walk: Walk[1], plan: Plan, row: Int32) -> Int32:
        """Finds the output pixel of a row of the product.

        Args:
            walk: How tiles run.
            plan: How rows lie on an image.
            row: In the tile.

        Returns:
            Its number; -1 if the row is none.
        """
        if plan.width == 0:
            var m = self.row * Int32(Self.config.rows()) + row
            return m if m < walk.pixels[0] else -1
        var image = self.row // plan.bands
        var down = row // plan.width
        var q = row - down * plan.width
        var p = (self.row - image * plan.bands) * plan.height + down
        if q >= walk.q or down >= plan.height or p * walk.q >= walk.pq:
            return -1
        return image * walk.pq + p * walk.q + q

    @always_inline
    def sent(self, walk: Walk[1], plan: Plan) -> Int32:
        """Counts the bytes that come into the inbox: those of warps that have a pixel.

        Args:
            walk: How tiles run.
            plan: How rows lie on an image.

        Returns:
            Of all blocks of the cluster.
        """
        return self.warps(walk, plan) * Int32(32 * 16 * (Self.config.columns // 8))

    @always_inline
    def warps(self, walk: Walk[1], plan: Plan) -> Int32:
        """Counts the warps that have a pixel.

        Args:
            walk: How tiles run.
            plan: How rows lie on an image.

        Returns:
            At least one, of 16 rows each.
        """
        var rows = walk.pixels[0] - self.row * Int32(Self.config.rows())
        if plan.width != 0:
            rows = plan.height * plan.width
        return min((rows + 15) // 16, Int32(Self.config.rows() // 16))


struct Slot(TrivialRegisterPassable):
    """A stage of a ring, and the phase of its `full`; its `empty` is a phase behind."""

    var index: UInt32
    """Of the stage."""
    var parity: UInt32
    """Of the phase."""

    @always_inline
    def __init__(out self):
        """Begins at the first stage."""
        self.index = self.parity = 0

    @always_inline
    def advance(mut self, count: Int32):
        """Goes on to the next stage.

        Args:
            count: Stages of the ring.
        """
        self.index += 1
        if self.index == UInt32(count):
            self.index = 0
            self.parity ^= 1


@always_inline
def _load[
    dtype: DType, config: Config
](block: Block[config], map: UInt64, walk: Walk[1], plan: Plan):
    """Has the copy engine fill the stages of x."""
    prefetch_map(map)
    var image: Int32
    var h0: Int32
    var w0 = -walk.pad_w
    var m0 = block.row * Int32(config.rows())
    if plan.width != 0:
        image = block.row // plan.bands
        h0 = (block.row - image * plan.bands) * plan.height - walk.pad_h
    else:
        image = m0 // walk.pq
        var pixel = m0 - image * walk.pq
        var p = pixel // walk.q
        h0 = p * walk.stride_h - walk.pad_h
        w0 += (pixel - p * walk.q) * walk.stride_w
    var c = block.first // walk.taps
    var loads = block.steps()
    if plan.width != 0:
        loads = block.chunks()
    var early = min(loads, plan.x_stages)
    for i in range(early):
        barrier_expect(block.x_full + 8 * UInt32(i), UInt32(plan.x_loads))
    wait_on_dependent_grids()

    var slot = Slot()
    for i in range(loads):
        var to = block.x + slot.index * UInt32(plan.x_bytes)
        var full = block.x_full + 8 * slot.index
        if i >= early:
            barrier_wait(block.x_empty + 8 * slot.index, slot.parity ^ 1)
            barrier_expect(full, UInt32(plan.x_loads))
        if plan.width != 0:
            load_4d(to, map, full, (c + i) * Int32(WIDTH), w0, h0, image)
        else:
            var reads = block.reads(i)
            var channel = Int32(reads & 0xFFFF) * Int32(WIDTH)
            if walk.plain == 1:
                load_2d(to, map, full, channel, m0)
            else:
                load_im2col(
                    to,
                    map,
                    full,
                    channel,
                    w0,
                    h0,
                    image,
                    UInt16(Int32(reads >> 16 & 0xFF) * walk.dilation_w),
                    UInt16(Int32(reads >> 24) * walk.dilation_h),
                )
        slot.advance(plan.x_stages)


@always_inline
def _expand[config: Config](block: Block[config], lists: Words, plan: Plan, t: Int32):
    """Expands tiles, a part of a step by each warp; the next tile's words come in meanwhile.

    A warp sees one phase of a stage's barrier from the next: unless all steps have a stage of their
    own, there have to be as many stages as steps that are expanded at a time.
    """
    comptime TURNS = Int32(config.turns())
    var lane = t % 32
    var part = t // 32 % Int32(config.parts())
    var first = t // 32 // Int32(config.parts())
    var steps = block.steps()
    var slot = Slot()
    for _ in range(first):
        slot.advance(plan.w_stages)
    var held = Quads()
    var at = Int32(0)
    var end = Int32(0)
    for k in range(first - TURNS, steps, TURNS):
        var next = Quads()
        var next_at = Int32(0)
        var next_end = Int32(0)
        if k + TURNS < steps:
            var step = block.step(k + TURNS)
            next_at = Int32(block.start(part, step)) + 4 * lane
            next_end = Int32(block.start(part, step + 1))
            next.load(lists, next_at, next_end)
        if k >= 0:
            var to = block.w + slot.index * UInt32(config.columns * ROW)
            to += UInt32(part) * UInt32(TILE)
            barrier_wait(block.w_empty + 8 * slot.index, slot.parity ^ 1)
            comptime for j in range(TILE // 512):
                shared_clear(to + UInt32(512 * j) + UInt32(lane) * 16)
            syncwarp()
            held.place(to, at, end)
            while at - 4 * lane + Int32(128 * AHEAD) < end:
                at += Int32(128 * AHEAD)
                held.load(lists, at, end)
                held.place(to, at, end)
            fence_async()
            syncwarp()
            if lane == 0:
                barrier_arrive(block.w_full + 8 * slot.index)
            for _ in range(TURNS):
                slot.advance(plan.w_stages)
        held, at, end = next, next_at, next_end


struct Quads(TrivialRegisterPassable):
    """Words that a lane has loaded and not stored yet, four after one another."""

    var words: StaticTuple[SIMD[U32, 4], AHEAD]
    """The words."""

    @always_inline
    def __init__(out self):
        """Makes room for them."""
        self.words = StaticTuple[SIMD[U32, 4], AHEAD](fill=SIMD[U32, 4](0))

    @always_inline
    def load(mut self, lists: Words, at: Int32, end: Int32):
        """Loads the lane's words of AHEAD times 128.

        Args:
            lists: The filters.
            at: The lane's first word.
            end: Where the tile's end.
        """
        comptime for j in range(AHEAD):
            if at + Int32(128 * j) < end:
                self.words[j] = lists.words.unsafe_load[width=4, alignment=16](Int(at) + 128 * j)

    @always_inline
    def place(self, to: UInt32, at: Int32, end: Int32):
        """Stores the nonzeros at their places in a tile.

        Args:
            to: The tile.
            at: The lane's first word.
            end: Where the tile's end.
        """
        comptime for j in range(AHEAD):
            if at + Int32(128 * j) < end:
                comptime for k in range(4):
                    shared_store_low(to + (self.words[j][k] >> 16), self.words[j][k])


@always_inline
def _products[
    dtype: DType, columns: Int
](left: UInt32, right: UInt32, sums: StaticTuple[Float32, columns // 2]) -> StaticTuple[
    Float32, columns // 2
]:
    """Starts adding the products of a step, of matrices at sixteenths of addresses."""
    comptime HIGH = UInt32(MATRIX >> 32)
    comptime LOW = UInt32(MATRIX & 0xFFFFFFFF)
    var next = sums
    wgmma_fence_aligned()
    comptime for k in range(4):
        var a = SIMD[U32, 2](LOW + left + UInt32(2 * k), HIGH)
        var b = SIMD[U32, 2](LOW + right + UInt32(2 * k), HIGH)
        next = wgmma_async[64, columns, 16, a_type=dtype, b_type=dtype](
            WGMMADescriptor[dtype](bitcast[DType.int64, 1](a)),
            WGMMADescriptor[dtype](bitcast[DType.int64, 1](b)),
            next,
        )
    wgmma_commit_group_sync()
    return next


@always_inline
def _multiply[
    dtype: DType, epilogue: Epilogue, config: Config
](block: Block[config], ends: Ends[dtype, 1], walk: Walk[1], plan: Plan, t: Int32, rank: Int32,):
    """Multiplies the stages, and finishes the tile or what a cluster's block has of it."""
    comptime COLUMNS = config.columns
    var group = t // Int32(GROUP)
    var leads = t % Int32(GROUP) == 0
    # Thread 4 a + b of warp d holds the columns 8 j + 2 b, and one more, of rows 16 d + a and 8 on.
    var row = t // 32 * 16 + t % 32 // 4
    # What a block finishes: units of 8 filters and 16 rows, or 8, UNIT numbers of each thread.
    comptime UNIT = COLUMNS // 16 if config.split else 4
    comptime MOST = 4 if config.split else COLUMNS // 8
    comptime HALVES = UNIT // 2
    var units = Int32(8) // walk.splits if config.split else Int32(MOST)
    var first = rank * units
    var f0 = block.column * Int32(COLUMNS) + t % 4 * 2
    var low = block.pixel(walk, plan, row)
    var high = block.pixel(walk, plan, row + 8)
    comptime if config.split:
        cluster_wait()
    var steps = block.steps()
    var x_row = block.x + UInt32(group * Int32(ROWS * ROW))
    # No stage is filled twice, and all are expanded before x comes.
    var resident = steps <= plan.w_stages
    if resident:
        for i in range(steps):
            barrier_wait(block.w_full + 8 * UInt32(i), 0)
    wait_on_dependent_grids()

    var sums = StaticTuple[Float32, COLUMNS // 2](fill=0)
    var w = Slot()
    var x = Slot()
    var seen = Int32(-1)
    var before = w.index
    for k in range(steps):
        var from_row = UInt32(0)
        if plan.width != 0:
            var reads = block.reads(k)
            from_row = reads & 0xFFFF
            while seen < Int32(reads >> 16):
                if seen >= 0:
                    wgmma_wait_group_sync[0]()
                    if leads:
                        barrier_arrive(block.x_empty + 8 * x.index)
                    x.advance(plan.x_stages)
                seen += 1
                barrier_wait(block.x_full + 8 * x.index, x.parity)
        else:
            x = w
            barrier_wait(block.x_full + 8 * x.index, x.parity)
        if not resident:
            barrier_wait(block.w_full + 8 * w.index, w.parity)
        var left = (x_row + x.index * UInt32(plan.x_bytes)) >> 4
        var right = (block.w + w.index * UInt32(COLUMNS * ROW)) >> 4
        sums = _products[dtype, COLUMNS](left + from_row, right, sums)
        wgmma_wait_group_sync[1]()
        if leads and k > 0 and not resident:
            barrier_arrive(block.w_empty + 8 * before)
            if plan.width == 0:
                barrier_arrive(block.x_empty + 8 * before)
        before = w.index
        w.advance(plan.w_stages)
    var residual = StaticTuple[SIMD[dtype, 2], MOST * HALVES](fill=SIMD[dtype, 2](0))
    comptime if epilogue.adds and not config.split:
        comptime for i in range(MOST * HALVES):
            var unit = first + Int32(i // HALVES)
            var f = f0 + unit * Int32(HALVES) // 2 * 8
            var pixel = high if (i if HALVES == 2 else Int(unit)) % 2 == 1 else low
            if Int32(i // HALVES) < units and pixel >= 0 and f < walk.filters:
                residual[i] = ends.residual[0].unsafe_load[width=2, alignment=4](
                    Int(pixel) * Int(walk.filters) + Int(f)
                )
    wgmma_wait_group_sync[0]()

    comptime if config.split:
        comptime PITCH = UInt32(GROUP * config.groups * 4 * UNIT)
        var mine = block.inbox + UInt32(t) * UInt32(4 * UNIT)
        var slot = mine + UInt32(first) * PITCH
        if t // 32 < block.warps(walk, plan):
            comptime for j in range(8):
                var owner = UInt32(Int32(j) * walk.splits // 8)
                var to = slot + UInt32(Int32(j) & (units - 1)) * PITCH
                var values = SIMD[F32, UNIT](0)
                comptime for k in range(UNIT):
                    values[k] = sums[UNIT * j + k]
                cluster_send[UNIT](
                    cluster_address(to, owner), values, cluster_address(block.sums, owner)
                )
        comptime if epilogue.adds:
            comptime for i in range(MOST * HALVES):
                var unit = first + Int32(i // HALVES)
                var f = f0 + unit * Int32(HALVES) // 2 * 8
                var pixel = high if (i if HALVES == 2 else Int(unit)) % 2 == 1 else low
                if Int32(i // HALVES) < units and pixel >= 0 and f < walk.filters:
                    residual[i] = ends.residual[0].unsafe_load[width=2, alignment=4](
                        Int(pixel) * Int(walk.filters) + Int(f)
                    )
        barrier_wait(block.sums, 0)
        comptime for j in range(MOST):
            if Int32(j) < units:
                var parts = StaticTuple[SIMD[F32, UNIT], 8](fill=SIMD[F32, UNIT](0))
                comptime for peer in range(8):
                    if Int32(peer) < walk.splits:
                        var at = mine + UInt32(Int32(peer) * units + Int32(j)) * PITCH
                        comptime if UNIT == 2:
                            parts[peer] = rebind[SIMD[F32, UNIT]](shared_load2(at))
                        else:
                            parts[peer] = rebind[SIMD[F32, UNIT]](shared_load4(at))
                var total = SIMD[F32, UNIT](0)
                comptime for peer in range(8):
                    total += parts[peer]
                comptime for k in range(UNIT):
                    sums[UNIT * j + k] = total[k]
    comptime for i in range(MOST * HALVES):
        var unit = first + Int32(i // HALVES)
        var f = f0 + unit * Int32(HALVES) // 2 * 8
        var pixel = high if (i if HALVES == 2 else Int(unit)) % 2 == 1 else low
        if Int32(i // HALVES) < units and pixel >= 0 and f < walk.filters:
            var bias = shared_load2(block.bias + 4 * UInt32(f - block.column * Int32(COLUMNS)))
            var value = SIMD[F32, 2](sums[2 * i], sums[2 * i + 1])
            value = value.fma(SIMD[F32, 2](walk.alpha), bias)
            comptime if epilogue.adds:
                value += residual[i].cast[F32]()
            ends.y[0].unsafe_store[alignment=4](
                Int(pixel) * Int(walk.filters) + Int(f),
                activate[epilogue, dtype](value).cast[dtype](),
            )


# The host's side


def takes_tiled[dtype: DType](g: Geometry) -> Bool:
    """Tells whether the kernel takes a convolution.

    Parameters:
        dtype: Of x, w and y.

    Args:
        g: Sizes.

    Returns:
        True for 2 bytes a number, and what the copy engine walks over (gemm/hopper.mojo).
    """
    return size_of[dtype]() == 2 and takes[dtype](g)


def sparse_conv2d_tiled[
    dtype: DType, epilogue: Epilogue
](g: Geometry, o: Operands[dtype], words: Data[U32], starts: Data[I32], ctx: DeviceContext,) raises:
    """Enqueues a convolution, in the block that tuning.mojo chooses.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.

    Args:
        g: Sizes that `takes_tiled` takes.
        o: The tensors; w is not read.
        words: Nonzeros and their places, as graphs/arrange.py lists them.
        starts: Where those of each tile begin, and the end.
        ctx: The GPU.

    Raises:
        If the kernel does not take the sizes, a tensor map cannot be made or the launch fails.
    """
    if not takes_tiled[dtype](g):
        raise Error(
            "sparse_conv2d: tiles expect one group, C and F in multiples of 8, and windows that the"
            " copy engine walks over; choose another kernel"
        )
    var row = choose(g, g.r * g.s * ceildiv(g.c, WIDTH), epilogue)
    comptime for i in range(len(CONFIGS)):
        if row.config == i:
            enqueue_tiled[dtype, epilogue, CONFIGS[i]](g, o, words, starts, row.splits, ctx)


def enqueue_tiled[
    dtype: DType, epilogue: Epilogue, config: Config
](
    g: Geometry,
    o: Operands[dtype],
    words: Data[U32],
    starts: Data[I32],
    splits: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a convolution.

    Parameters:
        dtype: Of x, w and y: bfloat16 or float16.
        epilogue: What the accumulator goes through.
        config: Sizes of the block.

    Args:
        g: Sizes; one group.
        o: The tensors; w is not read.
        words: Nonzeros and their places, as graphs/arrange.py lists them.
        starts: Where those of each tile begin, and the end.
        splits: Blocks that share a tile: 1 unless the config splits; else at most columns / 8.
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime assert size_of[dtype]() == 2, "sparse_conv2d: tiled expects bfloat16 or float16"
    var plan = Plan(g, config, splits)
    var steps = g.r * g.s * ceildiv(g.c, WIDTH)
    if Int(plan.w_stages) < min(config.turns(), ceildiv(steps, splits)):
        raise Error(
            "sparse_conv2d: shared memory has too few stages for K = ", steps, " steps of 64"
        )
    var maps = Maps[1]()
    if plan.width != 0:
        maps.maps[0] = tensor_map[dtype, 4, True](
            ctx,
            o.x,
            [Int64(g.c), Int64(g.w), Int64(g.h), Int64(g.n)],
            [Int32(WIDTH), plan.width, plan.height + Int32(g.r - 1), 1],
        )
    elif is_plain(g):
        maps.maps[0] = tensor_map[dtype, 2, True](
            ctx, o.x, [Int64(g.c), Int64(g.pixels())], [Int32(WIDTH), Int32(config.rows())]
        )
    else:
        maps.maps[0] = im2col_map[dtype](ctx, o.x, g, config.rows())
    var walk = Walk[1](
        [g],
        rows=config.rows(),
        chunks=ceildiv(g.c, WIDTH),
        tiles=ceildiv(g.f, config.columns),
        splits=splits,
        alpha=o.alpha,
    )
    var shared = plan.shared(config, steps, splits)
    ctx.enqueue_function[tiled_kernel[dtype, epilogue, config]](
        maps,
        Ends[dtype, 1]([o]),
        Words(words, starts),
        walk,
        plan,
        grid_dim=Int(plan.blocks) * splits,
        block_dim=config.threads(),
        cluster_dim=Dim(splits),
        shared_mem_bytes=shared,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(config.room())),
    )
