"""ResNet's stem on Hopper's tensor cores: pixels to pooled maps in one kernel, without patches.

    a[n, h, w, c] = (x[n, h, w, c] - mean[c]) * scale[c]      zero outside of the image
    t[n, p, q, f] = bias[f] + sum_rsc a[n, 2 p - 3 + r, 2 q - 3 + s, c] w[r, s, c, f]
    y = the maximum of relu(t) over 3x3 windows of stride 2, padding 1
    z[n, p, q, g] = relu(gamma[g] + sum_f y[n, p, q, f] v[g, f])      in stem_maxpool_conv2d

    x[N, H, 224, 3]                      uint8
    w                                    filters as `stem_fragments` of graphs/arrange.py lays them out
    v[64, 64]                            the filters of the convolution of 1 x 1 behind the pool
    y[N, P', 56, 64], z alike            bfloat16 or float16

An implicit GEMM by wgmma: M = 64 filters, held in registers, N = 112, a row of the convolution,
K = 176. Columns of B are pixels of the convolution, two columns of the image apart. In the layout
without swizzle they lie 16 bytes apart, which is room for two pixels of the image and two numbers more.
So B is the image itself: the windows' numbers lie 16, 32 and 48 bytes behind one another, and core
matrices overlap.

    unit u of a row of the image, 16 bytes: pixels 2 u - 3 and 2 u - 2, and of pixel 2 u + 3 channels
    0 and 1. Units q, q + 1 and q + 2 are a row of window q, all but channel 2 of its last pixel
    unit q of a row of the convolution: channel 2 of the last pixels of the seven rows of window q

These are 22 units for 147 numbers, eight each: 11 steps of wgmma, not the 14 of pixels of 4 channels.

A block has a ring of pairs of rows of the image, which a warpgroup of producers normalises into it,
and with each pair the seven channels of the row of the convolution that it completes. A consumer,
another warpgroup, walks down the rows of the convolution, keeps the maximum of three rows in registers,
and takes that of three columns with a shuffle. The copy engine stores y row by row. Two blocks share
a multiprocessor, and each does its part of all rows of all images: while one pools, the other multiplies.

A row of y, on its way out in shared memory, is the N = 56 of z's product, M = 64 filters, which runs
beside the next row's first convolution. A row of z is stored with the row of y after it.

Batch 256 on an H200 (2026-11-28): 117 us; 11 steps of wgmma for each row should take 75; with z 132 us.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import (
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.memory import bitcast
from std.sys import llvm_intrinsic
from std.utils import IndexList
from std.utils.static_tuple import StaticTuple

from ..device import Device
from ..hopper.accumulator import Fragment, Sums, bias_of_rows
from ..hopper.barrier import Barrier
from ..hopper.mma import Matrix, mma, mma_registers, settled
from ..hopper.pipeline import Pipeline
from ..hopper.ptx import (
    fence_async,
    fence_barrier_init,
    packed,
    registers_give,
    registers_take,
    shared_store4,
    shared_store_matrices,
    stores_commit,
    stores_read,
    sync_threads,
)
from ..hopper.roles import Roles
from ..hopper.shared import (
    ROW,
    WARP,
    WARPGROUP,
    SharedAllocator,
    bytes_until,
    shared_memory,
    swizzle,
)
from ..hopper.store import store_boxes, sync_writes
from ..hopper.tma import TensorMaps, TileLoader, TileStore, matrix_map
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, U32, Data
from .config import Stem, StemOperands

comptime WIDTH = 224
"""Columns of the image."""
comptime COLUMNS = 112
"""Columns of the convolution."""
comptime POOLED = 56
"""Columns of y."""
comptime FILTERS = 64
"""Filters: a row of y has 128 bytes a pixel."""
comptime TAPS = 7
"""Rows and columns of the window."""
comptime UNIT = 16
"""Bytes of a unit: eight numbers."""
comptime UNITS = 114
"""Units of a row of the image."""
comptime LINE = UNITS * UNIT
"""Bytes of a row of the image."""
comptime LAST = 2 * LINE
"""Where the last pixels' channels 2 lie, behind a pair of rows."""
comptime STEPS = 11
"""Steps of K, two units each."""
comptime PAIRS = 4
"""Pairs of rows that a row of the convolution needs; of the last only the first row."""
comptime STAGES = 8
"""Stages of the ring, a pair of rows each; a power of two."""
comptime STAGE = LAST + COLUMNS * UNIT
"""Bytes of a stage."""
comptime OWN = 29
"""Units of a warp of producers: its last three lanes have units of the next warp's, for shuffles."""
comptime BLOCKS = 2
"""Blocks that share a multiprocessor."""
comptime CONSUMER_REGISTERS = 168
"""Of a thread: filters 44, sums 56, the maxima of two rows 56."""
comptime PRODUCER_REGISTERS = 80
"""Of a thread."""
comptime MORE = 16
"""Registers more of a consumer, for sums of z; half of them are the producers', the others were free."""
comptime RESULT = POOLED * ROW
"""Bytes of a row of y."""
comptime RESULTS = 3
"""Rows of y in shared memory, and of z: the copy engine stores one while the next is written."""
comptime WEIGHTS = FILTERS * ROW
"""Bytes of the weights that y is multiplied by."""
comptime NEXT: StaticString = "stem_maxpool_conv2d"
"""The op that has a convolution of 1 x 1 behind the pool."""


@fieldwise_init
struct Sizes(KernelArgument, TrivialRegisterPassable):
    """The sizes that are known at run time."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var h: Int32
    """Height of the image."""
    var p: Int32
    """Height of the convolution."""
    var out_p: Int32
    """Height of y."""
    var rows: Int32
    """Rows of y of all images."""


comptime Warps = Roles[1, moves_registers=True]
"""Which warps of a block do what: a warpgroup multiplies, and all threads of another one produce."""


struct Storage[op: StaticString](TrivialRegisterPassable):
    """What a block has in its shared memory.

    Parameters:
        op: Of the kernel.
    """

    comptime ROWS = RESULTS * RESULT
    """Bytes of the rows of y."""
    comptime BYTES = bytes_until(Self(0).end)
    """Bytes that a launch asks for."""

    var rows: UInt32
    """Address of the rows of y; those of z lie behind them."""
    var weights: UInt32
    """Address of the weights of z."""
    var ring: Pipeline
    """Pairs of rows of the image."""
    var loaded: Barrier
    """Tells that the weights have come."""
    var end: UInt32
    """First address behind all of these."""

    @always_inline
    def __init__(out self, data: UInt32):
        """Divides shared memory.

        Args:
            data: Its address.
        """
        comptime BOTH = Self.op == NEXT
        var memory = SharedAllocator(data)
        self.rows = memory.take(2 * Self.ROWS if BOTH else Self.ROWS)
        self.weights = memory.take(WEIGHTS if BOTH else 0)
        var stages = memory.take(STAGES * STAGE)
        self.ring = Pipeline(stages, memory, stages=Int32(STAGES), bytes=UInt32(STAGE))
        self.loaded = Barrier(memory.take(Barrier.BYTES if BOTH else 0))
        self.end = memory.end


@fieldwise_init
struct Strip(TrivialRegisterPassable):
    """Rows of y of one image that a block computes."""

    var n: Int32
    """The image."""
    var first: Int32
    """The first of them."""
    var end: Int32
    """The one behind the last."""

    @always_inline
    def start(self) -> Int32:
        """Gives the first row of the convolution, and the first pair of rows of the image.

        Returns:
            The row above the two under `first`, if there is one.
        """
        return max(2 * self.first - 1, 0)

    @always_inline
    def pairs(self) -> Int32:
        """Gives the end of the pairs of rows of the image.

        Returns:
            The pair behind the last.
        """
        return 2 * self.end + Int32(PAIRS - 1)


@fieldwise_init
struct Strips(TrivialRegisterPassable):
    """The strips of a block."""

    var row: Int32
    """The next row of y, of those of all images."""
    var end: Int32
    """The row behind the block's last."""

    @staticmethod
    @always_inline
    def of_block(rows: Int32) -> Self:
        """Divides the rows among the blocks.

        Args:
            rows: Of all images.

        Returns:
            Those of this block.
        """
        var blocks = Int32(grid_dim.x)
        var block = Int32(block_idx.x)
        var each = rows // blocks
        var more = rows % blocks
        var row = block * each + min(block, more)
        return Self(row, row + each + Int32(1 if block < more else 0))

    @always_inline
    def more(self) -> Bool:
        """Tells whether there is a strip.

        Returns:
            Whether there is.
        """
        return self.row < self.end

    @always_inline
    def next(mut self, out_p: Int32) -> Strip:
        """Takes the next strip.

        Args:
            out_p: Rows of y of an image.

        Returns:
            The strip.
        """
        var n = self.row // out_p
        var first = self.row - n * out_p
        var end = min(out_p, first + self.end - self.row)
        self.row += end - first
        return Strip(n, first, end)


@__name(t"{op}_hopper_{dtype}")
@__llvm_arg_metadata(maps, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(Warps.THREADS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def stem_maxpool_kernel[
    op: StaticString, dtype: DType
](maps: TensorMaps[3 if op == NEXT else 1], o: StemOperands[dtype, DType.uint8], sizes: Sizes):
    """Computes the block's rows of y, and of z.

    Parameters:
        op: "stem_maxpool" or "stem_maxpool_conv2d".
        dtype: Either bfloat16 or float16.

    Args:
        maps: Tensor maps of y[N * P' * 56, 64], and of z, alike, and v[64, 64].
        o: Tensors.
        sizes: Sizes.
    """
    var storage = Storage[op](shared_memory["stem_maxpool"]())
    var t = Int32(thread_idx.x)
    if t == 0:
        storage.ring.init[STAGES](consumers=1, producers=WARPGROUP)
        comptime if op == NEXT:
            storage.loaded.init()
        fence_barrier_init()
        comptime if op == NEXT:
            storage.loaded.expect(UInt32(WEIGHTS))
            TileLoader(maps.address(), 2).load(storage.weights, storage.loaded, 0, 0)
    sync_threads(0, UInt32(Warps.THREADS))
    launch_dependent_grids()
    var at = Fragment(t)
    if at.group() == 1:
        registers_give[PRODUCER_REGISTERS - (MORE // 2 if op == NEXT else 0)]()
        wait_on_dependent_grids()
        _produce(o, sizes, storage.ring, t - Int32(WARPGROUP))
    else:
        registers_take[CONSUMER_REGISTERS + (MORE if op == NEXT else 0)]()
        _consume(maps.address(), o, sizes, storage, at)


# Producers


struct Levels(TrivialRegisterPassable):
    """Of two rows of the image, the words that hold a thread's two pixels."""

    var words: SIMD[U32, 8]
    """Three of each row, from 0 and from 4 on."""
    var inside: SIMD[U32, 2]
    """All ones for each row that is in the image, else 0."""

    @always_inline
    def __init__(out self):
        """Begins with rows outside."""
        self.words = 0
        self.inside = 0


struct Source(TrivialRegisterPassable):
    """Where a thread's pixels lie in each row of the image."""

    var words: Data[U32]
    """The image."""
    var offsets: SIMD[DType.int32, 4]
    """The words of a row that hold them; a word of the row where there is none."""

    @always_inline
    def __init__(out self, x: Data[DType.uint8], unit: Int32):
        """Finds a unit's pixels, from byte 6 unit - 9 of a row on.

        Args:
            x: The images.
            unit: The unit.
        """
        comptime WORDS = Int32(WIDTH * 3 // 4)
        self.words = x.unsafe_bitcast[UInt32]()
        self.offsets = 0
        var first = (6 * unit - 9) >> 2
        comptime for i in range(3):
            self.offsets[i] = max(min(first + Int32(i), WORDS - 1), 0)

    @always_inline
    def load(self, n: Int32, k: Int32, h: Int32) -> Levels:
        """Loads the pixels of a pair of rows.

        Args:
            n: The image.
            k: The pair: rows 2 k - 3 and 2 k - 2.
            h: Height of the image.

        Returns:
            Their words.
        """
        comptime WORDS = WIDTH * 3 // 4
        var levels = Levels()
        comptime for i in range(2):
            var row = 2 * k - 3 + Int32(i)
            if row >= 0 and row < h:
                levels.inside[i] = UInt32.MAX
                var line = self.words.unsafe_offset((Int(n) * Int(h) + Int(row)) * WORDS)
                comptime for j in range(3):
                    levels.words[4 * i + j] = line[unsafe_offset=Int(self.offsets[j])]
        return levels


struct Feed(TrivialRegisterPassable):
    """The pairs of rows of the image that a block needs, strip after strip."""

    var sizes: Sizes
    """Sizes."""
    var strips: Strips
    """The strips behind this one."""
    var strip: Strip
    """The strip."""
    var k: Int32
    """The next pair."""

    @always_inline
    def __init__(out self, sizes: Sizes):
        """Begins with the first pair.

        Args:
            sizes: Sizes.
        """
        self.sizes = sizes
        self.strips = Strips.of_block(sizes.rows)
        self.strip = self.strips.next(sizes.out_p)
        self.k = self.strip.start()

    @always_inline
    def count(self) -> Int32:
        """Counts the pairs.

        Returns:
            Of all strips.
        """
        var count = Int32(0)
        var strips = Strips.of_block(self.sizes.rows)
        while strips.more():
            var strip = strips.next(self.sizes.out_p)
            count += strip.pairs() - strip.start()
        return count

    @always_inline
    def load(mut self, source: Source) -> Levels:
        """Loads a thread's pixels of the next pair.

        Args:
            source: Where they are.

        Returns:
            Their words, or none behind the last pair.
        """
        if self.k == self.strip.pairs():
            if not self.strips.more():
                return Levels()
            self.strip = self.strips.next(self.sizes.out_p)
            self.k = self.strip.start()
        self.k += 1
        return source.load(self.strip.n, self.k - 1, self.sizes.h)


@always_inline
def _produce[
    dtype: DType, //
](o: StemOperands[dtype, DType.uint8], sizes: Sizes, at_start: Pipeline, t: Int32):
    """Fills the ring, a unit of each row a thread."""
    var ring = at_start
    var lane = t % Int32(WARP)
    var unit = t // Int32(WARP) * Int32(OWN) + lane
    var mean = Array[Float32, 3](fill=0)
    var scale = Array[Float32, 3](fill=0)
    comptime for c in range(3):
        mean[c] = o.mean[unsafe_offset=c]
        scale[c] = o.scale[unsafe_offset=c]
    # Bytes before the first pixel in its word, in bits.
    var shift = UInt32(24 if unit % 2 == 0 else 8)
    # Pixels that are in the image: numbers 0 to 2, and 3 to 5.
    var first = UInt32.MAX if unit >= 2 and unit <= Int32(UNITS - 1) else UInt32(0)
    var second = UInt32.MAX if unit >= 1 and unit < Int32(UNITS - 1) else UInt32(0)
    var masks = SIMD[U32, 4](first, (first & 0xFFFF) | (second & 0xFFFF0000), second, 0)
    var stores = lane < Int32(OWN) and unit < Int32(UNITS)
    var stores_last = lane < Int32(OWN) and unit < Int32(COLUMNS)
    var source = Source(o.x, unit)
    var to = UInt32(unit) * UInt32(UNIT)

    # Channel 2 of the last pixels of window `unit`: of the rows of the last four pairs.
    var last = SIMD[U32, 4](0)
    var feed = Feed(sizes)
    # Pairs are loaded two ahead.
    var now = feed.load(source)
    var next = feed.load(source)
    for _ in range(feed.count()):
        var later = feed.load(source)
        var halves = Array[SIMD[U32, 4], 2](fill=0)
        comptime for i in range(2):
            var numbers = SIMD[U32, 4](0)
            if now.inside[i] != 0:
                numbers = masks & _normalised[dtype](
                    now.words[4 * i], now.words[4 * i + 1], now.words[4 * i + 2], shift, mean, scale
                )
            halves[i] = numbers
        now = next
        next = later
        comptime for i in range(2):
            halves[i][3] = warp.shuffle_down(halves[i][0], 3)
        var two = (halves[0][1] & 0xFFFF) | (halves[1][1] << 16)
        last = SIMD[U32, 4](last[1], last[2], last[3], warp.shuffle_down(two, 3))
        ring.acquire()
        var stage = ring.stage() + to
        if stores:
            comptime for i in range(2):
                shared_store4(stage + UInt32(i * LINE), halves[i])
        if stores_last:
            shared_store4(stage + UInt32(LAST), last)
        fence_async()
        ring.commit()
        ring.advance()


@always_inline
def _normalised[
    dtype: DType
](
    low: UInt32,
    middle: UInt32,
    high: UInt32,
    shift: UInt32,
    mean: Array[Float32, 3],
    scale: Array[Float32, 3],
) -> SIMD[U32, 4]:
    """Normalises two pixels, which begin `shift` bits into three words."""
    comptime FUNNEL = "llvm.fshr.i32"
    var four = llvm_intrinsic[FUNNEL, UInt32, has_side_effect=False](middle, low, shift)
    var two = llvm_intrinsic[FUNNEL, UInt32, has_side_effect=False](high, middle, shift)
    var value = Array[Float32, 6](fill=0)
    comptime for i in range(6):
        var level = ((four if i < 4 else two) >> UInt32(i % 4 * 8)) & 0xFF
        value[i] = (level.cast[F32]() - mean[i % 3]) * scale[i % 3]
    var pairs = SIMD[U32, 4](0)
    comptime for i in range(3):
        pairs[i] = packed[dtype](value[2 * i], value[2 * i + 1])
    return pairs


# Consumers

comptime Filters = Array[SIMD[U32, 4], STEPS]
"""A thread's part of the filters, for each step of K."""
comptime Row = StaticTuple[UInt32, COLUMNS // 4]
"""A thread's part of a row of the convolution, rectified: pairs of columns, as `pair` has them."""


@always_inline
def _load_filters[dtype: DType](w: Data[dtype], at: Fragment) -> Filters:
    """Loads a thread's filters: rows `at.row()` and 8 more, pairs of numbers of each unit."""
    var words = w.unsafe_bitcast[UInt32]()
    var b = at.lane() % 4
    var filters = Filters(fill=0)

    @always_inline
    def pair(f: Int32, r: Int, n: Int32) {imm} -> UInt32:
        """Loads numbers n and n + 1 of row r of a window, n even."""
        var unit = n // 8
        var step = Int32(r) if unit < 2 else Int32(TAPS + r // 2)
        var half = unit if unit < 2 else Int32(r % 2)
        var place = ((f // 32 * Int32(STEPS) + step) * 2 + f // 4 % 2) * 8
        place = (place + f % 32 // 8 * 2 + f % 2) * 4 + n % 8 // 2
        return words[unsafe_offset=Int(place * 4 + half * 2 + f // 2 % 2)]

    @always_inline
    def numbers[unit: Int](f: Int32, r: Int) {imm} -> UInt32:
        """Loads the thread's two numbers of a unit of row r."""
        comptime if unit == 0:
            return pair(f, r, 2 * b if b < 3 else 18)
        else:
            return pair(f, r, Int32(6 * unit) + 2 * b) if b < 3 else UInt32(0)

    comptime for i in range(2):
        var f = at.row() + Int32(8 * i)
        comptime for r in range(TAPS):
            filters[r][i] = numbers[0](f, r)
            filters[r][2 + i] = numbers[1](f, r)
            filters[TAPS + r // 2][r % 2 * 2 + i] = numbers[2](f, r)
        # Channel 2 of the last pixels, of rows 2 b and 2 b + 1.
        comptime for j in range(4):
            if b == Int32(j):
                var two = pair(f, 2 * j, 20) & 0xFFFF
                comptime if 2 * j + 1 < TAPS:
                    two |= pair(f, 2 * j + 1, 20) << 16
                filters[STEPS - 1][2 + i] = two
    return filters^


@fieldwise_init
struct Follower(TrivialRegisterPassable):
    """The convolution of 1 x 1 behind the pool: z[64, 56] = relu(bias + v y) for each row of y.

    M = 64 filters and N = 56 pixels, as of y, so that few registers hold the sums.
    """

    var weights: UInt32
    """Address of v."""
    var bias: SIMD[F32, 2]
    """Of the thread's two filters."""
    var place: UInt32
    """Where in a row of z the lane's rows of stmatrix are."""
    var row: UInt32
    """Address of the row of y."""

    @staticmethod
    @always_inline
    def of_thread(weights: UInt32, bias: Data[F32], at: Fragment, row: UInt32) -> Self:
        """Finds what a thread multiplies.

        Args:
            weights: Address of v.
            bias: Of z.
            at: The thread's place.
            row: Address of any row.

        Returns:
            A product of the row.
        """
        # A lane names to stmatrix the eight filters of half i % 2 of a pixel, of matrix i = lane / 8.
        var i = at.lane() // 8
        var pixel = UInt32(i // 2 * 8 + at.lane() % 8)
        var place = pixel * UInt32(ROW) + swizzle(UInt32(at.warp() * 32 + i % 2 * 16), pixel)
        var f = Int(at.row())
        return Self(
            weights, SIMD[F32, 2](bias[unsafe_offset=f], bias[unsafe_offset=f + 8]), place, row
        )

    @always_inline
    def start[dtype: DType](self) -> Sums[POOLED]:
        """Starts multiplying the row of y.

        Parameters:
            dtype: Either bfloat16 or float16.

        Returns:
            The sums, once the group has been waited for.
        """
        var sums = bias_of_rows[POOLED](self.bias)
        wgmma_fence_aligned()
        sums = mma[dtype, POOLED](Matrix[ROW](self.weights), Matrix[ROW](self.row), sums)
        wgmma_commit_group_sync()
        return sums

    @always_inline
    def finish[dtype: DType](self, given: Sums[POOLED]):
        """Rectifies the sums and stores them, channels last, in the row of z.

        Parameters:
            dtype: Either bfloat16 or float16.

        Args:
            given: Of the thread.
        """
        comptime GROUPS = POOLED // 8
        var sums = settled(given)
        var words = Array[UInt32, 2 * GROUPS](fill=0)
        comptime for i in range(2 * GROUPS):
            words[i] = packed[dtype, relu=True](sums[2 * i], sums[2 * i + 1])
        comptime for k in range(4):
            comptime j = min(2 * k, GROUPS - 2)
            shared_store_matrices[turned=True](
                self.result() + self.place + UInt32(8 * j * ROW),
                SIMD[U32, 4](words[2 * j], words[2 * j + 1], words[2 * j + 2], words[2 * j + 3]),
            )

    @always_inline
    def result(self) -> UInt32:
        """Finds the row of z.

        Returns:
            Its address.
        """
        return self.row + UInt32(Storage[NEXT].ROWS)


@always_inline
def _consume[
    op: StaticString, dtype: DType, //
](
    maps: UInt64,
    o: StemOperands[dtype, DType.uint8],
    sizes: Sizes,
    storage: Storage[op],
    at: Fragment,
):
    """Convolves and pools the block's rows.

    What follows of a row is multiplied beside the next row's first convolution.
    """
    var ring = storage.ring
    var y = TileStore(maps)
    var filters = _load_filters(o.w, at)
    var bias = SIMD[F32, 2](
        o.bias[unsafe_offset=Int(at.row())], o.bias[unsafe_offset=Int(at.row()) + 8]
    )
    var leads = at.leads()
    # What a lane names to stmatrix: the eight filters of half i % 2 of pixel i / 2, of matrix lane / 8.
    var pixel = at.lane() // 8 * 4 + at.lane() % 8 // 2
    var byte = UInt32(at.warp() * 32 + at.lane() % 2 * 16)
    var place = UInt32(pixel) * UInt32(ROW) + swizzle(byte, UInt32(pixel))
    # The lane to the left in its four, around.
    var left = UInt32((at.lane() & ~3) | ((at.lane() - 1) & 3))
    var first = at.lane() % 4 == 0
    comptime follows = op == NEXT
    var follower: Follower
    comptime if follows:
        # Of no row yet: the first product is of whatever lies there, and is not stored.
        var none = storage.rows + UInt32((RESULTS - 1) * RESULT)
        follower = Follower.of_thread(storage.weights, o.gamma, at, none)
    else:
        follower = Follower(0, 0, 0, 0)
    wait_on_dependent_grids()
    comptime if follows:
        storage.loaded.wait()

    var result = UInt32(0)
    var strips = Strips.of_block(sizes.rows)
    var begin = strips.row
    while strips.more():
        var strip = strips.next(sizes.out_p)
        comptime for _ in range(PAIRS - 1):
            ring.wait()
            ring.advance()
        var above = Row(fill=0)
        if strip.first > 0:
            above = _convolve[dtype](ring, filters, bias, leads, follower)
        for r in range(strip.first, strip.end):
            var most = _convolve[dtype, follows](ring, filters, bias, leads, follower)
            most = _largest_of(above, most)
            above = _convolve[dtype](ring, filters, bias, leads, follower)
            if 2 * r + 1 == sizes.p:
                above = Row(fill=0)
            most = _largest_of(above, most)
            var to = storage.rows + result * UInt32(RESULT) + place
            _pool(most, to, left, first)
            # The copy engine has read the place of the next row, which is that of the row before last.
            if leads:
                stores_read[1]()
            sync_writes(1)
            if leads:
                var row = strip.n * sizes.out_p + r
                y.store(storage.rows + result * UInt32(RESULT), 0, row * Int32(POOLED))
                comptime if follows:
                    if row > begin:
                        TileStore(maps, 1).store(follower.result(), 0, (row - 1) * Int32(POOLED))
                stores_commit()
            comptime if follows:
                follower.row = storage.rows + result * UInt32(RESULT)
            result = result + 1 if result < UInt32(RESULTS - 1) else 0
        if leads:
            comptime for i in range(PAIRS - 1):
                ring.release((ring.index + UInt32(STAGES - PAIRS + 1 + i)) % UInt32(STAGES))
    comptime if follows:
        var z = follower.start[dtype]()
        wgmma_wait_group_sync[0]()
        follower.finish[dtype](z)
        var last = (strips.end - 1) * Int32(POOLED)
        store_boxes[dtype, FILTERS, rows=POOLED](
            TileStore(maps, 1), follower.result(), 0, last, barrier=1, leads=leads
        )
    if leads:
        stores_read()


@always_inline
def _convolve[
    dtype: DType, follows: Bool = False
](mut ring: Pipeline, filters: Filters, bias: SIMD[F32, 2], leads: Bool, follower: Follower) -> Row:
    """Computes a row of the convolution, of the ring's next pair and the three before it.

    And what follows of the row of y before, if it `follows`.
    """
    var z = Sums[POOLED](fill=0)
    comptime if follows:
        z = follower.start[dtype]()
    ring.wait()
    var pairs = Array[UInt32, PAIRS](fill=0)
    comptime for i in range(PAIRS):
        var stage = (ring.index + UInt32(STAGES - PAIRS + 1 + i)) % UInt32(STAGES)
        pairs[i] = ring.stage(Int32(stage))
    var sums = bias_of_rows[COLUMNS](bias)
    wgmma_fence_aligned()
    comptime for k in range(STEPS):
        var units: Matrix[16]
        comptime if k < TAPS:
            units = Matrix[16](pairs[k // 2] + UInt32(k % 2 * LINE))
        elif k < STEPS - 1:
            units = Matrix[16](pairs[k - TAPS] + UInt32(2 * UNIT), pitch=LINE)
        else:
            units = Matrix[16](pairs[PAIRS - 1] + UInt32(2 * UNIT), pitch=LAST - 2 * UNIT)
        sums = mma_registers[dtype](filters[k], units.after(0), sums)
    wgmma_commit_group_sync()
    comptime if follows:
        wgmma_wait_group_sync[1]()
        follower.finish[dtype](z)
    wgmma_wait_group_sync[0]()
    if leads:
        ring.release((ring.index + UInt32(STAGES - PAIRS + 1)) % UInt32(STAGES))
    ring.advance()
    sums = settled(sums)
    var row = Row(fill=0)
    comptime for i in range(COLUMNS // 4):
        row[i] = packed[dtype, relu=True](sums[2 * i], sums[2 * i + 1])
    return row


@always_inline
def largest(a: UInt32, b: UInt32) -> UInt32:
    """Compares two pairs of halves that are not negative: their bits sort as integers do.

    Args:
        a: A pair.
        b: Another.

    Returns:
        The larger half on each side.
    """
    return bitcast[U32, 1](max(bitcast[DType.uint16, 2](a), bitcast[DType.uint16, 2](b)))


@always_inline
def _largest_of(a: Row, b: Row) -> Row:
    """Compares two rows."""
    var most = Row(fill=0)
    comptime for i in range(COLUMNS // 4):
        most[i] = largest(a[i], b[i])
    return most


@always_inline
def _pool(row: Row, to: UInt32, left: UInt32, first: Bool):
    """Takes the maxima of three columns of a row, and stores them channels last.

    A thread has columns 2 c and 2 c + 1 for c = 4 j + lane % 4; column 2 c - 1 is another lane's.
    """
    comptime GROUPS = COLUMNS // 8
    var pooled = Array[UInt32, GROUPS](fill=0)
    var before = UInt32(0)
    comptime for j in range(GROUPS):
        # Of the two rows of filters.
        var even = (row[2 * j] & 0xFFFF) | (row[2 * j + 1] << 16)
        var odd = (row[2 * j] >> 16) | (row[2 * j + 1] & 0xFFFF0000)
        var around = warp.shuffle_idx(odd, left)
        pooled[j] = largest(largest(even, odd), before if first else around)
        before = around
    comptime for k in range(4):
        comptime j = min(4 * k, GROUPS - 4)
        shared_store_matrices[turned=True](
            to + UInt32(4 * j * ROW),
            SIMD[U32, 4](pooled[j], pooled[j + 1], pooled[j + 2], pooled[j + 3]),
        )


# The host's side


def takes(stem: Stem) -> Bool:
    """Tells whether the kernel is compiled for a stem.

    Args:
        stem: Compile-time sizes.

    Returns:
        Whether it is ResNet's.
    """
    return stem.pools() and stem.c == 3 and stem.r == TAPS and stem.s == TAPS and stem.stride == 2


def fits(o: StemOperands[_, DType.uint8, _], x: IndexList[4], y: IndexList[4], pad: Int) -> Bool:
    """Tells whether the kernel takes the tensors.

    Args:
        o: Tensors.
        x: Shape of x[N, H, W, C].
        y: Shape of y[N, P', Q', F].
        pad: Zeros on each side.

    Returns:
        Whether they have its sizes, and x lies where it reads words.
    """
    return x[2] == WIDTH and y[3] == FILTERS and pad == TAPS // 2 and Int(o.x) % 4 == 0


def stem_maxpool_hopper[
    dtype: DType, //
](
    o: StemOperands[dtype, DType.uint8],
    x: IndexList[4],
    y: IndexList[4],
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel.

    Parameters:
        dtype: Either bfloat16 or float16.

    Args:
        o: Tensors that `fits`.
        x: Shape of x[N, H, 224, 3].
        y: Shape of y[N, P', 56, 64].
        ctx: The GPU.

    Raises:
        If the tensor map cannot be made or the launch fails.
    """
    _enqueue["stem_maxpool"](o, o.y, o.y, x, y, ctx)


def stem_maxpool_conv2d_hopper[
    dtype: DType, //
](
    o: StemOperands[dtype, DType.uint8],
    v: Data[dtype],
    z: Data[dtype],
    x: IndexList[4],
    y: IndexList[4],
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel with z = relu(o.gamma + v y).

    Parameters:
        dtype: Either bfloat16 or float16.

    Args:
        o: Tensors that `fits`.
        v: Weights v[64, 64], filter by filter.
        z: The second result, of y's shape.
        x: Shape of x[N, H, 224, 3].
        y: Shape of y[N, P', 56, 64].
        ctx: The GPU.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    _enqueue[NEXT](o, v, z, x, y, ctx)


def _enqueue[
    dtype: DType, //, op: StaticString
](
    o: StemOperands[dtype, DType.uint8],
    v: Data[dtype],
    z: Data[dtype],
    x: IndexList[4],
    y: IndexList[4],
    ctx: DeviceContext,
) raises:
    var rows = y[0] * y[1]
    var blocks = Device(ctx).multiprocessors
    # Two share a multiprocessor where there are rows for all of them.
    if rows >= BLOCKS * blocks:
        blocks *= BLOCKS
    var maps = TensorMaps[3 if op == NEXT else 1]()
    maps.maps[0] = matrix_map[dtype](ctx, o.y, rows=rows * POOLED, columns=FILTERS, box=POOLED)
    comptime if op == NEXT:
        maps.maps[1] = matrix_map[dtype](ctx, z, rows=rows * POOLED, columns=FILTERS, box=POOLED)
        maps.maps[2] = matrix_map[dtype](ctx, v, rows=FILTERS, columns=FILTERS, box=FILTERS)
    launch[stem_maxpool_kernel[op, dtype]](
        ctx,
        maps,
        o,
        Sizes(Int32(x[1]), Int32((x[1] - 1) // 2 + 1), Int32(y[1]), Int32(rows)),
        grid_dim=min(blocks, rows),
        block_dim=Warps.THREADS,
        shared=Storage[op].BYTES,
    )
