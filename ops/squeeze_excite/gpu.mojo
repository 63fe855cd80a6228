"""Squeeze and excitation (Hu et al. 2018, arXiv:1709.01507) by one kernel for Hopper, in 16 bits.

    m[n, c] = mean_p x[n, p, c]
    h[n, k] = act(sum_c squeeze[k, c] m[n, c] + squeeze_bias[k])
    g[n, c] = gate(sum_k excite[k, c] h[n, k] + excite_bias[c])
    y[n, p, c] = epilogue(x[n, p, c] * g[n, c])

    x[N, P, C], y, residual    images of P pixels
    squeeze[K, C]              as torch has it: [out, in]
    excite[K, C]               turned over: [in, out]

A cluster of 8 blocks takes one image, or 2, 4 or 8 of them, each of which is 8, 4, 2 or 1 blocks' work.
A block brings its pixels to shared memory by the copy engine, as far as there is room, and reads the
others twice. Blocks send each other numbers by st.async (hopper/cluster.mojo does the same for
split-K), and wait for a barrier that counts the bytes. There are two ways:

- Weights are few: each block adds up its own pixels and multiplies these sums by all of squeeze, as
  the product of a sum is the sum of the products. Blocks send each other that, K numbers, and each
  computes the gates of all channels.
- Weights are many: a block is responsible for an eighth of the channels of all the cluster's images,
  so that a cluster reads each weight once. Blocks send each other sums of pixels by channels, then
  their part of h, then gates.

In all steps a thread has a vector of 8 channels, 16 bytes, and adds up every so-manieth row: of pixels,
or of excite; threads of the same channels then add up what they have through shared memory. Of the
first product, which adds up channels, a few lanes have a row of squeeze. Sums are float32.

Bound by device memory where images are many (x is read once, y written once), by latency else. Any
number of images and pixels; C is a multiple of 8.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext, Dim
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from ..device import RESERVED, Device
from ..epilogue import Epilogue, Output, activate
from ..hopper.barrier import Barrier
from ..hopper.ptx import (
    cluster_address,
    cluster_arrive,
    cluster_send,
    cluster_wait,
    fence_barrier_init,
    load_bytes,
    prefetch_l2,
)
from ..hopper.shared import WARP
from ..launch import launch
from ..operands import F32, Shared, widened
from .config import BARRIERS, BLOCKS, CHUNKS, WIDTH, Room, SqueezeSizes, SqueezeTensors

comptime THREADS = 256
"""Threads of a block that has few pixels."""
comptime MOST_THREADS = 512
"""Threads of one that has many."""
comptime MANY = 8 * THREADS
"""Vectors of pixels from which on a block has `MOST_THREADS`."""
comptime RESIDENT = 2
"""Blocks that a multiprocessor has room for where images are many; bounds the registers."""
comptime BYTES = Int32(2)
"""Of a number of an image."""
comptime FEW = 64 * 1024
"""Bytes of weights of which each block reads all where clusters leave multiprocessors idle."""
comptime UNROLL = 4
"""Rows that a thread loads at a time."""
comptime LINE = Int32(128)
"""Bytes of a line of the second-level cache."""

comptime Floats = Shared[F32]
"""Numbers in shared memory."""
comptime Vector = SIMD[F32, WIDTH]
"""Neighbouring channels."""


struct Across(TrivialRegisterPassable):
    """How threads divide rows of vectors: neighbours take neighbouring vectors of a row."""

    var vectors: Int32
    """Of a row, at most as many as there are threads."""
    var rows: Int32
    """That all threads take at a time."""
    var row: Int32
    """The thread's first one; `rows` if it has none."""
    var vector: Int32
    """Which of a row the thread takes."""
    var team: Int32
    """Lanes that add up what threads have of 4 channels: 2 to the power of `shift`."""
    var shift: Int32
    """See `team`."""

    @always_inline
    def __init__(out self, vectors: Int32, t: Int32, threads: Int32):
        """Divides them.

        Args:
            vectors: Of a row.
            t: The thread.
            threads: Of the block.
        """
        self.vectors = vectors
        self.rows = _quotient(threads, vectors)
        self.row = _quotient(t, vectors)
        self.vector = t - self.row * vectors
        self.shift = 0
        while self.shift < 5 and (4 * vectors) << self.shift <= threads:
            self.shift += 1
        self.team = 1 << self.shift

    @always_inline
    def total(self, scratch: Floats, quad: Int32, member: Int32) -> SIMD[F32, 4]:
        """Adds up what threads have left of 4 channels; all lanes of a warp have to call this.

        Args:
            scratch: A vector of each thread.
            quad: Which channels; nothing is there beyond the last.
            member: The lane's number in its team.

        Returns:
            The sums, to each of the team.
        """
        var sum = SIMD[F32, 4](0)
        if quad < 2 * self.vectors:
            for row in range(member, self.rows, self.team):
                var at = Int(row * 2 * self.vectors + quad) * 4
                sum += scratch.unsafe_load[width=4, alignment=16](at)
        var distance = Int32(1)
        while distance < self.team:
            comptime for i in range(4):
                sum[i] += warp.shuffle_xor(sum[i], UInt32(distance))
            distance *= 2
        return sum


@always_inline
def _quotient(a: Int32, b: Int32) -> Int32:
    """Divides numbers that are not negative, in fewer instructions than // takes."""
    return Int32(UInt32(a) // UInt32(b))


@always_inline
def _sum_rows[
    dtype: DType, space: AddressSpace, //
](
    column: Pointer[Scalar[dtype], MutUntrackedOrigin, address_space=space],
    pitch: Int32,
    begin: Int32,
    stop: Int32,
    step: Int32,
) -> Vector:
    """Adds up every `step`-th row of a vector of channels."""
    var sum = Vector(0)
    var row = begin
    while row + (UNROLL - 1) * step < stop:
        var some = Array[SIMD[dtype, WIDTH], UNROLL](fill=0)
        comptime for i in range(UNROLL):
            var at = Int((row + Int32(i) * step) * pitch)
            some[i] = column.unsafe_load[width=WIDTH, alignment=16](at)
        sum += (widened(some[0]) + widened(some[1])) + (widened(some[2]) + widened(some[3]))
        row += UNROLL * step
    while row < stop:
        sum += widened(column.unsafe_load[width=WIDTH, alignment=16](Int(row * pitch)))
        row += step
    return sum


@always_inline
def _scale_rows[
    dtype: DType, space: AddressSpace, epilogue: Epilogue, //
](
    column: Pointer[Scalar[dtype], MutUntrackedOrigin, address_space=space],
    output: Output[dtype=dtype, wide=F32, epilogue=epilogue, added=dtype],
    gates: Vector,
    pitch: Int32,
    begin: Int32,
    stop: Int32,
    step: Int32,
):
    """Multiplies every `step`-th row of a vector of channels by its gates."""
    comptime rows = UNROLL // 2 if epilogue.joins else UNROLL
    var row = begin
    while row < stop:
        # What is not there is the first one again: loads do not wait for branches.
        var at = StaticTuple[Int32, rows](fill=row * pitch)
        var some = Array[SIMD[dtype, WIDTH], rows](fill=0)
        var more = Array[SIMD[dtype, WIDTH], rows](fill=0)
        comptime for i in range(rows):
            if row + Int32(i) * step < stop:
                at[i] += Int32(i) * step * pitch
            some[i] = column.unsafe_load[width=WIDTH, alignment=16](Int(at[i]))
            comptime if epilogue.joins:
                more[i] = output.residual.unsafe_load[width=WIDTH, alignment=16](Int(at[i]))
        comptime for i in range(rows):
            var value = widened(some[i]) * gates
            if row + Int32(i) * step < stop:
                output.put(activate[epilogue, dtype](value, widened(more[i])), Int(at[i]))
        row += Int32(rows) * step


struct SqueezeBlock[dtype: DType](TrivialRegisterPassable):
    """A block's place in its cluster, and its shared memory.

    Parameters:
        dtype: Of the images.
    """

    var o: SqueezeTensors[Self.dtype]
    """The tensors, those of images from the block's first pixel on."""
    var g: SqueezeSizes
    """Sizes."""
    var t: Int32
    """The thread."""
    var threads: Int32
    """Of the block."""
    var rank: Int32
    """Of the block in its cluster."""
    var count: Int32
    """Pixels of the block."""
    var kept: Int32
    """The first ones of them, which are in shared memory."""
    var first: Int32
    """The first vector of channels whose weights the block computes with."""
    var mine: Int32
    """How many these are, at most `slice`."""
    var shared: UInt32
    """Address of the shared memory; the barriers come first."""
    var pixels: Shared[Self.dtype]
    """Those that are kept."""
    var scratch: Floats
    """See `Room`; so are the rest."""
    var means: Floats
    """[together, slice, WIDTH]."""
    var hidden: Floats
    """[K, together]."""
    var gates: Floats
    """[C]."""
    var sums: Floats
    """[BLOCKS, slice, WIDTH]."""
    var partial: Floats
    """[BLOCKS, K, together]."""

    comptime SUMS = Int32(CHUNKS)
    """Number of the barrier for `sums`; the first are those of the chunks of pixels."""
    comptime PARTIAL = Self.SUMS + 1
    """Number of the barrier for `partial`."""
    comptime GATES = Self.SUMS + 2
    """Number of the barrier for `gates`."""

    @always_inline
    def __init__(out self, o: SqueezeTensors[Self.dtype], g: SqueezeSizes):
        """Finds the block's place.

        Args:
            o: Tensors.
            g: Sizes.
        """
        var memory = external_memory[
            UInt8, address_space=AddressSpace.SHARED, alignment=16, name="squeeze_excite"
        ]()
        self.t, self.threads = Int32(thread_idx.x), Int32(block_dim.x)
        var number = Int32(block_idx.x)
        self.rank = number % BLOCKS
        var parts = g.parts()
        var of = _quotient(self.rank, parts)
        var image = (number // BLOCKS << g.shift) + of
        var begin = min((self.rank - of * parts) * g.share(), g.pixels)
        self.count = min(g.share(), g.pixels - begin) if image < g.images else Int32(0)
        self.kept = min(self.count, g.kept)
        self.first = self.rank * g.slice() if g.split == 1 else Int32(0)
        self.mine = max(min(g.vectors() - self.first, g.slice()), 0)

        var skipped = (Int(image) * Int(g.pixels) + Int(begin)) * Int(g.channels)
        self.o, self.g = o, g
        self.o.x = o.x.unsafe_offset(skipped)
        self.o.residual = o.residual.unsafe_offset(skipped)
        self.o.y = o.y.unsafe_offset(skipped)

        var room = Room(g, self.threads)
        self.shared = UInt32(Int(memory))
        self.pixels = memory.unsafe_offset(Int(room.pixels)).unsafe_bitcast[Scalar[Self.dtype]]()
        self.scratch = memory.unsafe_offset(Int(room.scratch)).unsafe_bitcast[Float32]()
        self.means = memory.unsafe_offset(Int(room.means)).unsafe_bitcast[Float32]()
        self.hidden = memory.unsafe_offset(Int(room.hidden)).unsafe_bitcast[Float32]()
        self.gates = memory.unsafe_offset(Int(room.gates)).unsafe_bitcast[Float32]()
        self.sums = memory.unsafe_offset(Int(room.sums)).unsafe_bitcast[Float32]()
        self.partial = memory.unsafe_offset(Int(room.partial)).unsafe_bitcast[Float32]()

    @always_inline
    def barrier(self, number: Int32) -> Barrier:
        """Finds a barrier.

        Args:
            number: Of a chunk of pixels, or `SUMS`, `PARTIAL` or `GATES`.

        Returns:
            The barrier.
        """
        return Barrier(self.shared + UInt32(number * Int32(Barrier.BYTES)))

    @always_inline
    def init(self):
        """Prepares the barriers, by one thread, and says what peers will send."""
        comptime for i in range(BARRIERS):
            self.barrier(Int32(i)).init()
        fence_barrier_init()
        comptime VECTOR = 4 * WIDTH
        self.barrier(Self.SUMS).expect(UInt32(BLOCKS * self.mine * VECTOR))
        self.barrier(Self.PARTIAL).expect(UInt32(BLOCKS * self.g.rows() * 4))
        self.barrier(Self.GATES).expect(UInt32(self.g.vectors() * VECTOR))

    @always_inline
    def prefetch(self):
        """Brings the block's weights to the second-level cache."""
        comptime step = LINE // BYTES
        for row in range(self.t // WARP, self.g.hidden, self.threads // WARP):
            for column in range(self.t % WARP * step, self.mine * WIDTH, WARP * step):
                var at = Int(row) * Int(self.g.channels) + Int(self.first * WIDTH + column)
                prefetch_l2(self.o.squeeze.unsafe_offset(at))
                prefetch_l2(self.o.excite.unsafe_offset(at))

    @always_inline
    def chunk(self) -> Int32:
        """Counts the pixels of a copy.

        Returns:
            A part of those that are kept.
        """
        return ceildiv(self.kept, Int32(CHUNKS))

    @always_inline
    def load(self):
        """Starts the copies, by one thread."""
        var length = self.chunk()
        var pitch = self.g.channels * BYTES
        var to = UInt32(Int(self.pixels))
        for i in range(Int32(CHUNKS)):
            var begin = min(i * length, self.kept)
            var bytes = (min(begin + length, self.kept) - begin) * pitch
            self.barrier(i).expect(UInt32(bytes))
            if bytes > 0:
                load_bytes(
                    to + UInt32(begin * pitch),
                    self.o.x.unsafe_offset(Int(begin) * Int(self.g.channels)),
                    UInt32(bytes),
                    self.barrier(i).address,
                )

    @always_inline
    def add_up(self):
        """Adds up the block's pixels: into its means, or if split to who is responsible."""
        var vectors, pitch = self.g.vectors(), self.g.channels
        var length = self.chunk()
        for first in range(Int32(0), vectors, self.threads):
            var across = Across(min(vectors - first, self.threads), self.t, self.threads)
            var sum = Vector(0)
            if across.row < across.rows:
                var column = Int(first + across.vector) * WIDTH
                sum = _sum_rows(
                    self.o.x.unsafe_offset(column),
                    pitch,
                    self.kept + across.row,
                    self.count,
                    across.rows,
                )
                for i in range(Int32(CHUNKS)):
                    var begin = min(i * length, self.kept)
                    self.barrier(i).wait()
                    sum += _sum_rows(
                        self.pixels.unsafe_offset(column),
                        pitch,
                        begin + across.row,
                        min(begin + length, self.kept),
                        across.rows,
                    )
            self.scratch.unsafe_store[alignment=16](Int(self.t) * WIDTH, sum)
            barrier()
            var member = self.t & (across.team - 1)
            for base in range(Int32(0), 2 * across.vectors, self.threads >> across.shift):
                var quad = base + (self.t >> across.shift)
                var total = across.total(self.scratch, quad, member)
                if quad < 2 * across.vectors and member == 0:
                    if self.g.split == 1:
                        var vector = first + (quad >> 1)
                        var owner = self.g.slice_of(vector)
                        var place = (self.rank - owner) * self.g.slice() + vector
                        var to = self.sums.unsafe_offset(Int(2 * place + (quad & 1)) * 4)
                        self.send[4](to, total, Self.SUMS, owner)
                    else:
                        self.means.unsafe_store[alignment=16](
                            Int(2 * first + quad) * 4, total / Float32(self.g.pixels)
                        )
            barrier()

    @always_inline
    def receive_means(self):
        """Adds up what blocks have sent of the channels that this one is responsible for."""
        self.barrier(Self.SUMS).wait()
        var quads, parts = 2 * self.g.slice(), self.g.parts()
        for i in range(self.t, quads << self.g.shift, self.threads):
            var image = self.g.slice_of(i >> 1)
            if i - image * quads < 2 * self.mine:
                var total = SIMD[F32, 4](0)
                for part in range(parts):
                    var place = i + (image * (parts - 1) + part) * quads
                    total += self.sums.unsafe_load[width=4, alignment=16](Int(place) * 4)
                self.means.unsafe_store[alignment=16](Int(i) * 4, total / Float32(self.g.pixels))
        barrier()

    @always_inline
    def squeeze(self):
        """Multiplies means by the first weights, and sends the products to all blocks."""
        var rows, slice = self.g.rows(), self.g.slice()
        var shift = Int32(2)
        while shift < 5 and 1 << shift < slice and rows << shift < self.threads:
            shift += 1
        var lanes = Int32(1) << shift
        var lane = self.t & (lanes - 1)
        var step = self.threads >> shift
        var weights = self.o.squeeze.unsafe_offset(Int(self.first) * WIDTH)
        for base in range(self.t >> shift, rows + (self.t >> shift), UNROLL * step):
            var sums = StaticTuple[Float32, UNROLL](fill=0)
            for vector in range(lane, self.mine, lanes):
                var packed = Array[SIMD[Self.dtype, WIDTH], UNROLL](fill=0)
                comptime for i in range(UNROLL):
                    var row = self.g.product_row(min(base + Int32(i) * step, rows - 1))
                    packed[i] = weights.unsafe_load[width=WIDTH, alignment=16](
                        Int(row) * Int(self.g.channels) + Int(vector) * WIDTH
                    )
                comptime for i in range(UNROLL):
                    var image = min(base + Int32(i) * step, rows - 1) & (self.g.together() - 1)
                    var means = self.means.unsafe_load[width=WIDTH, alignment=16](
                        Int(image * slice + vector) * WIDTH
                    )
                    var w = widened(packed[i])
                    var sum = sums[i]
                    comptime for k in range(WIDTH):
                        sum = w[k].fma(means[k], sum)
                    sums[i] = sum
            var distance = Int32(1)
            while distance < lanes:
                comptime for i in range(UNROLL):
                    sums[i] += warp.shuffle_xor(sums[i], UInt32(distance))
                distance *= 2
            comptime for i in range(UNROLL):
                var row = base + Int32(i) * step
                if row < rows:
                    var to = self.partial.unsafe_offset(Int(self.rank * rows + row))
                    for peer in range(lane, Int32(BLOCKS), lanes):
                        self.send[1](to, sums[i], Self.PARTIAL, peer)

    @always_inline
    def receive_hidden[activation: Epilogue](self):
        """Adds up what blocks have sent of the first product, and activates it.

        Parameters:
            activation: Between the products.
        """
        var rows = self.g.rows()
        self.barrier(Self.PARTIAL).wait()
        for row in range(self.t, rows, self.threads):
            var sum = Float32(0)
            comptime for peer in range(BLOCKS):
                sum += self.partial[unsafe_offset=Int(Int32(peer) * rows + row)]
            sum += self.o.squeeze_bias[unsafe_offset=Int(self.g.product_row(row))]
            self.hidden[unsafe_offset=Int(row)] = activate[activation, Self.dtype](
                SIMD[F32, 1](sum)
            )[0]
        barrier()

    @always_inline
    def excite[gate: Epilogue](self):
        """Computes gates: of all channels, or if split of some, for the blocks of each image.

        Parameters:
            gate: Behind the second product.
        """
        var slice = self.g.slice()
        var across = Across(slice << self.g.shift, self.t, self.threads)
        var image = self.g.slice_of(across.vector)
        var vector = across.vector - image * slice
        var sum = Vector(0)
        if across.row < across.rows and vector < self.mine:
            var weights = self.o.excite.unsafe_offset(Int(self.first + vector) * WIDTH)
            var row = across.row
            while row < self.g.hidden:
                var some = Array[SIMD[Self.dtype, WIDTH], UNROLL](fill=0)
                comptime for i in range(UNROLL):
                    if row + Int32(i) * across.rows < self.g.hidden:
                        some[i] = weights.unsafe_load[width=WIDTH, alignment=16](
                            Int(row + Int32(i) * across.rows) * Int(self.g.channels)
                        )
                comptime for i in range(UNROLL):
                    var place = row + Int32(i) * across.rows
                    if place < self.g.hidden:
                        var h = self.hidden[unsafe_offset=Int((place << self.g.shift) + image)]
                        sum = widened(some[i]).fma(Vector(h), sum)
                row += UNROLL * across.rows
        self.scratch.unsafe_store[alignment=16](Int(self.t) * WIDTH, sum)
        barrier()

        var member = self.t & (across.team - 1)
        for base in range(Int32(0), 2 * across.vectors, self.threads >> across.shift):
            var quad = base + (self.t >> across.shift)
            var total = across.total(self.scratch, quad, member)
            var of = self.g.slice_of(quad >> 1)
            var place = quad - of * 2 * slice
            if of < self.g.together() and place < 2 * self.mine:
                var channel = Int(2 * self.first + place) * 4
                var bias = self.o.excite_bias.unsafe_load[width=4, alignment=16](channel)
                var gates = activate[gate, Self.dtype](total + bias)
                var to = self.gates.unsafe_offset(channel)
                if self.g.split == 1:
                    for part in range(member, self.g.parts(), across.team):
                        self.send[4](to, gates, Self.GATES, of * self.g.parts() + part)
                elif member == 0:
                    to.unsafe_store[alignment=16](0, gates)
        if self.g.split == 1:
            self.barrier(Self.GATES).wait()
        else:
            barrier()

    @always_inline
    def scale[epilogue: Epilogue](self):
        """Multiplies the block's pixels by the gates.

        Parameters:
            epilogue: What the products go through.
        """
        var vectors, pitch = self.g.vectors(), self.g.channels
        for first in range(Int32(0), vectors, self.threads):
            var across = Across(min(vectors - first, self.threads), self.t, self.threads)
            if across.row < across.rows:
                var column = Int(first + across.vector) * WIDTH
                var gates = self.gates.unsafe_load[width=WIDTH, alignment=16](column)
                var output = Output[epilogue](
                    self.o.excite_bias,
                    self.o.residual.unsafe_offset(column),
                    self.o.y.unsafe_offset(column),
                )
                _scale_rows(
                    self.pixels.unsafe_offset(column),
                    output,
                    gates,
                    pitch,
                    across.row,
                    self.kept,
                    across.rows,
                )
                _scale_rows(
                    self.o.x.unsafe_offset(column),
                    output,
                    gates,
                    pitch,
                    self.kept + across.row,
                    self.count,
                    across.rows,
                )

    @always_inline
    def send[width: Int](self, to: Floats, values: SIMD[F32, width], signal: Int32, peer: Int32):
        """Starts storing numbers in a block of the cluster.

        Parameters:
            width: 1, 2 or 4.

        Args:
            to: Where to; the place in this block's memory.
            values: The numbers.
            signal: Number of the barrier there that is told.
            peer: The block's rank.
        """
        cluster_send[width](
            cluster_address(UInt32(Int(to)), UInt32(peer)),
            values,
            cluster_address(self.barrier(signal).address, UInt32(peer)),
        )


@__name(t"squeeze_excite_{activation.label()}_{gate.label()}_{epilogue.label()}_{dtype}")
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(MOST_THREADS)),
    `nvvm.minctasm`=SIMDLength(RESIDENT),
)
def squeeze_excite_kernel[
    dtype: DType, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](o: SqueezeTensors[dtype], g: SqueezeSizes):
    """Gates the images of a cluster.

    Parameters:
        dtype: Of the images.
        activation: Between the products.
        gate: Behind the second product.
        epilogue: What the gated images go through.

    Args:
        o: Tensors.
        g: Sizes.
    """
    launch_dependent_grids()
    var block = SqueezeBlock(o, g)
    if block.t == 0:
        block.init()
    barrier()
    cluster_arrive()
    block.prefetch()
    wait_on_dependent_grids()
    if block.t == 0:
        block.load()
    cluster_wait()
    block.add_up()
    if g.split == 1:
        block.receive_means()
    block.squeeze()
    block.receive_hidden[activation]()
    block.excite[gate]()
    block.scale[epilogue]()


# The host's side


def squeeze_excite_gpu[
    dtype: DType, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](
    o: SqueezeTensors[dtype],
    images: Int,
    pixels: Int,
    channels: Int,
    hidden: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues a squeeze and excitation.

    A cluster takes several images where their weights are more bytes than they are.

    Parameters:
        dtype: Of the images, bfloat16 or float16.
        activation: Between the products.
        gate: Behind the second product.
        epilogue: What the gated images go through.

    Args:
        o: Tensors.
        images: N.
        pixels: Of an image.
        channels: C.
        hidden: K.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var device = Device(ctx)
    var image = pixels * channels * Int(BYTES)
    var weights = 2 * channels * hidden * Int(BYTES)
    var full = images * BLOCKS > device.multiprocessors
    var few = image if full else max(image, BLOCKS * FEW)
    var split = BLOCKS * weights > few or channels > THREADS * WIDTH
    var shift = 0
    while (
        split
        and 1 << shift < BLOCKS
        and weights > image << shift
        and images * BLOCKS >= device.multiprocessors << (shift + 1)
        and _fixed(channels, hidden, shift + 1, THREADS) <= device.shared // RESIDENT
        and ceildiv(channels, BLOCKS * WIDTH) << (shift + 1) <= THREADS
    ):
        shift += 1
    var share = ceildiv(pixels, BLOCKS >> shift)
    var threads = MOST_THREADS if share * channels > MANY * WIDTH else THREADS

    var bytes = channels * Int(BYTES)
    var sizes = SqueezeSizes(
        images=images,
        pixels=pixels,
        channels=channels,
        hidden=hidden,
        shift=shift,
        split=split,
        kept=0,
    )
    var taken = Int(Room(sizes, Int32(threads)).pixels)
    var room = device.memory // (RESIDENT if full else 1) - RESERVED
    var kept = min(share, max(room - taken, 0) // bytes)
    sizes.kept = Int32(kept)
    enqueue_squeeze_excite[dtype, activation, gate, epilogue](o, sizes, threads, ctx)


def _fixed(channels: Int, hidden: Int, shift: Int, threads: Int) -> Int:
    """Counts the bytes of shared memory without pixels, where blocks are split."""
    var sizes = SqueezeSizes(
        images=1,
        pixels=1,
        channels=channels,
        hidden=hidden,
        shift=shift,
        split=True,
        kept=0,
    )
    return Int(Room(sizes, Int32(threads)).pixels)


def enqueue_squeeze_excite[
    dtype: DType, activation: Epilogue, gate: Epilogue, epilogue: Epilogue
](o: SqueezeTensors[dtype], g: SqueezeSizes, threads: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel with a division of the caller's.

    Parameters:
        dtype: Of the images, bfloat16 or float16.
        activation: Between the products.
        gate: Behind the second product.
        epilogue: What the gated images go through.

    Args:
        o: Tensors.
        g: Sizes.
        threads: Of a block.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime assert dtype.is_half_float(), "squeeze_excite: expects bfloat16 or float16"
    var pixels = Int(min(g.kept, g.share())) * Int(g.channels) * Int(BYTES)
    launch[squeeze_excite_kernel[dtype, activation, gate, epilogue]](
        ctx,
        o,
        g,
        grid_dim=ceildiv(Int(g.images), Int(g.together())) * BLOCKS,
        block_dim=threads,
        cluster_dim=Dim(BLOCKS),
        shared=Int(Room(g, Int32(threads)).pixels) + pixels,
        most_shared=Device(ctx).shared,
    )
