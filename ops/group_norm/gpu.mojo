"""Group norm on a GPU, in two launches: moments of parts of each group, then what follows of them.

Both divide an image alike: a block takes some rows of a slab of channels, which is whole groups or a
piece of a large one, 16 bytes in each of up to 32 threads; its other threads take other rows. So a
group of a whole image is many blocks' work. The first launch joins the moments of channels over
threads, warps and the channels of a group; the second joins those of the blocks again.
"""

from max.gpu import WARP_SIZE, barrier, block_dim, block_idx, lane_id, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.bit import next_power_of_two
from std.math import ceildiv, gcd, rsqrt
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from ..device import Device
from ..epilogue import Epilogue, Output
from ..kernel_argument import KernelArgument
from ..launch import launch
from ..operands import F32, widened
from .config import PARTIAL, GroupNormSizes, GroupNormTensors, Moments

comptime SLICE = 32
"""Threads of a block along channels, at most."""
comptime THREADS = 256
"""Threads of a block."""
comptime UNROLL = 4
"""Rows that a thread loads at a time."""


struct Division(KernelArgument, TrivialRegisterPassable):
    """How images are divided over blocks."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var slabs: Int32
    """Blocks along the channels."""
    var pieces: Int32
    """Slabs of a group, if it is larger than one."""
    var slab: Int32
    """Channels of a slab."""
    var slice: Int32
    """Threads along them; a power of two."""
    var parts: Int32
    """Blocks along the rows."""
    var length: Int32
    """Rows of each."""

    def __init__(
        out self,
        *,
        slabs: Int,
        pieces: Int,
        slab: Int,
        slice: Int,
        parts: Int,
        length: Int,
    ):
        """Names the numbers.

        Args:
            slabs: Blocks along the channels.
            pieces: Slabs of a group, if it is larger than one.
            slab: Channels of a slab.
            slice: Threads along them; a power of two.
            parts: Blocks along the rows.
            length: Rows of each.
        """
        self.slabs, self.pieces, self.slab = Int32(slabs), Int32(pieces), Int32(slab)
        self.slice, self.parts, self.length = Int32(slice), Int32(parts), Int32(length)


struct Place(TrivialRegisterPassable):
    """What a block works on."""

    var image: Int32
    """Of the batch."""
    var part: Int32
    """Of the image's rows."""
    var piece: Int32
    """Of the group."""
    var channel: Int32
    """The first one."""
    var channels: Int32
    """How many there are."""
    var group: Int32
    """The first one."""
    var groups: Int32
    """How many there are, or parts of one."""
    var row: Int32
    """The first one."""
    var stop: Int32
    """Behind the last row."""

    @always_inline
    def __init__(out self, block: Int32, g: GroupNormSizes, d: Division):
        """Finds the place of a block.

        Args:
            block: Its number.
            g: Sizes.
            d: How images are divided.
        """
        var rest = block // d.slabs
        var slab = block - rest * d.slabs
        self.image = rest // d.parts
        self.part = rest - self.image * d.parts
        if d.pieces > 1:
            self.group = slab // d.pieces
            self.piece = slab - self.group * d.pieces
            self.channel = self.group * g.members + self.piece * d.slab
            self.channels = min(d.slab, g.members - self.piece * d.slab)
            self.groups = 1
        else:
            self.piece = 0
            self.channel = slab * d.slab
            self.channels = min(d.slab, g.channels - self.channel)
            self.group = self.channel // g.members
            self.groups = self.channels // g.members
        self.row = self.part * d.length
        self.stop = min(self.row + d.length, g.pixels)


@always_inline
def _over(value: Float32, lanes: Int32) -> Float32:
    """Sums over neighbouring lanes of a warp, a power of two of them."""
    var sum = value
    var distance = Int32(1)
    while distance < lanes:
        sum += warp.shuffle_xor(sum, UInt32(distance))
        distance *= 2
    return sum


@always_inline
def _lanes(count: Int32) -> Int32:
    """Gives each of several sums so many lanes of a warp, a power of two."""
    var lanes = Int32(1)
    while lanes < count and lanes < Int32(WARP_SIZE):
        lanes *= 2
    return lanes


@__name(t"group_norm_moments_{width}_{dtype}")
def moments_kernel[
    dtype: DType, width: Int
](o: GroupNormTensors[dtype], g: GroupNormSizes, d: Division):
    """Finds the moments of a part of each group, in each block.

    Parameters:
        dtype: Of x.
        width: Channels of a vector: 16 bytes, or 1.

    Args:
        o: Tensors.
        g: Sizes.
        d: How images are divided.
    """
    comptime bytes = min(16, width * size_of[dtype]())
    comptime WARPS = THREADS // WARP_SIZE
    comptime ROOM = WARPS * SLICE * width
    var counts = unsafe_stack_allocation[WARPS, Float32, address_space=AddressSpace.SHARED]()
    var means = unsafe_stack_allocation[
        ROOM, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var squares = unsafe_stack_allocation[
        ROOM, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var place = Place(Int32(block_idx.x), g, d)
    var t = Int32(thread_idx.x)
    var lane = t & (d.slice - 1)
    var step = Int32(THREADS) // d.slice
    var row = place.row + t // d.slice
    var stride = Int(g.channels)
    var at = o.x.unsafe_offset(
        (Int(place.image) * Int(g.pixels) + Int(row)) * stride
        + Int(place.channel + lane * Int32(width))
    )
    wait_on_dependent_grids()
    launch_dependent_grids()
    var found = Moments[width]()
    if lane * Int32(width) < place.channels:
        while row + (UNROLL - 1) * step < place.stop:
            var packed = Array[SIMD[dtype, width], UNROLL](fill=0)
            comptime for i in range(UNROLL):
                packed[i] = at.unsafe_load[width=width, alignment=bytes](i * Int(step) * stride)
            var mean = SIMD[F32, width](0)
            comptime for i in range(UNROLL):
                mean += widened(packed[i])
            mean /= UNROLL
            var square = SIMD[F32, width](0)
            comptime for i in range(UNROLL):
                var distance = widened(packed[i]) - mean
                square = distance.fma(distance, square)
            found.join(Moments[width](UNROLL, mean, square))
            row += UNROLL * step
            at = at.unsafe_offset(UNROLL * Int(step) * stride)
        while row < place.stop:
            var value = widened(at.unsafe_load[width=width, alignment=bytes](0))
            found.join(Moments[width](1, value, value - value))
            row += step
            at = at.unsafe_offset(Int(step) * stride)

    var distance = d.slice
    while distance < Int32(WARP_SIZE):
        var other = Moments[width](warp.shuffle_xor(found.count, UInt32(distance)))
        comptime for i in range(width):
            other.mean[i] = warp.shuffle_xor(found.mean[i], UInt32(distance))
            other.squares[i] = warp.shuffle_xor(found.squares[i], UInt32(distance))
        found.join(other)
        distance *= 2
    # Channels of warps: [warp, channel of the slice].
    var across = min(d.slice, Int32(WARP_SIZE))
    var number = t // Int32(WARP_SIZE)
    var pitch = across * Int32(width)
    if Int32(lane_id()) < across:
        comptime aligned = min(16, 4 * width)
        var to = Int(number * pitch + lane * Int32(width))
        means.unsafe_store[alignment=aligned](to, found.mean)
        squares.unsafe_store[alignment=aligned](to, found.squares)
    if lane_id() == 0:
        counts[unsafe_offset=Int(number)] = found.count
    barrier()
    var all = Moments[1]()
    if t < place.channels:
        for w in range(WARPS):
            var from_ = w * Int(pitch) + Int(t)
            all.join(
                Moments[1](
                    counts[unsafe_offset=w],
                    means[unsafe_offset=from_],
                    squares[unsafe_offset=from_],
                )
            )
    barrier()
    if t < place.channels:
        means[unsafe_offset=Int(t)] = all.mean[0]
        squares[unsafe_offset=Int(t)] = all.squares[0]
    barrier()
    # Groups: some lanes each.
    var members = place.channels // place.groups
    var lanes = _lanes(members)
    var mine = t & (lanes - 1)
    var rows = Float32(place.stop - place.row)
    for base in range(Int32(0), place.groups, Int32(THREADS) // lanes):
        var group = base + t // lanes
        var inside = group < place.groups
        var sum = Float32(0)
        if inside:
            for c in range(mine, members, lanes):
                sum += means[unsafe_offset=Int(group * members + c)]
        var mean = _over(sum, lanes) / Float32(members)
        sum = 0
        if inside:
            for c in range(mine, members, lanes):
                var far = means[unsafe_offset=Int(group * members + c)] - mean
                sum += squares[unsafe_offset=Int(group * members + c)] + rows * far * far
        sum = _over(sum, lanes)
        if inside and mine == 0:
            var entry = (place.image * g.groups() + place.group + group) * g.entries
            entry += place.part * d.pieces + place.piece
            var to = o.partials.unsafe_offset(Int(entry) * PARTIAL)
            to[unsafe_offset=0] = rows * Float32(members)
            to[unsafe_offset=1] = mean
            to[unsafe_offset=2] = sum


@__name(t"group_norm_{epilogue.label()}_{width}_{dtype}")
def normalise_kernel[
    dtype: DType, epilogue: Epilogue, width: Int
](o: GroupNormTensors[dtype], g: GroupNormSizes, d: Division):
    """Normalises rows of a slab of channels, in each block.

    Parameters:
        dtype: Of x and y.
        epilogue: What follows the norm.
        width: Channels of a vector: 16 bytes, or 1.

    Args:
        o: Tensors.
        g: Sizes.
        d: How images are divided.
    """
    comptime bytes = min(16, width * size_of[dtype]())
    comptime ROOM = SLICE * width
    var means = unsafe_stack_allocation[ROOM, Float32, address_space=AddressSpace.SHARED]()
    var scales = unsafe_stack_allocation[ROOM, Float32, address_space=AddressSpace.SHARED]()
    var place = Place(Int32(block_idx.x), g, d)
    var t = Int32(thread_idx.x)
    wait_on_dependent_grids()
    launch_dependent_grids()
    var entries = d.parts * d.pieces
    var lanes = _lanes(entries)
    var mine = t & (lanes - 1)
    for base in range(Int32(0), place.groups, Int32(THREADS) // lanes):
        var group = base + t // lanes
        var inside = group < place.groups
        var entry = (place.image * g.groups() + place.group + group) * g.entries
        var from_ = o.partials.unsafe_offset(Int(entry) * PARTIAL)
        var count, sum = Float32(0), Float32(0)
        if inside:
            for i in range(Int(mine), Int(entries), Int(lanes)):
                var some = from_[unsafe_offset=i * PARTIAL]
                count += some
                sum += some * from_[unsafe_offset=i * PARTIAL + 1]
        count = _over(count, lanes)
        var mean = _over(sum, lanes) / count
        sum = 0
        if inside:
            for i in range(Int(mine), Int(entries), Int(lanes)):
                var far = from_[unsafe_offset=i * PARTIAL + 1] - mean
                sum += from_[unsafe_offset=i * PARTIAL + 2]
                sum += from_[unsafe_offset=i * PARTIAL] * far * far
        sum = _over(sum, lanes)
        if inside and mine == 0:
            means[unsafe_offset=Int(group)] = mean
            scales[unsafe_offset=Int(group)] = rsqrt(sum / count + g.eps)
    barrier()
    var lane = t & (d.slice - 1)
    if lane * Int32(width) >= place.channels:
        return
    var channel = place.channel + lane * Int32(width)
    var mean, scale = SIMD[F32, width](0), SIMD[F32, width](0)
    comptime for i in range(width):
        var group = Int((channel + Int32(i)) // g.members - place.group)
        mean[i] = means[unsafe_offset=group]
        scale[i] = scales[unsafe_offset=group]
    comptime aligned = min(16, 4 * width)
    scale *= o.weight.unsafe_load[width=width, alignment=aligned](Int(channel))
    var bias = o.bias.unsafe_load[width=width, alignment=aligned](Int(channel))
    var step = Int32(THREADS) // d.slice
    var row = place.row + t // d.slice
    var stride = Int(step) * Int(g.channels)
    var at = (Int(place.image) * Int(g.pixels) + Int(row)) * Int(g.channels) + Int(channel)
    var output = Output[epilogue](o.bias, o.y, o.y)
    while row < place.stop:
        var packed = Array[SIMD[dtype, width], UNROLL](fill=0)
        comptime for i in range(UNROLL):
            if row + Int32(i) * step < place.stop:
                packed[i] = o.x.unsafe_load[width=width, alignment=bytes](at + i * stride)
        comptime for i in range(UNROLL):
            if row + Int32(i) * step < place.stop:
                var value = (widened(packed[i]) - mean).fma(scale, bias)
                output.store(value, at + i * stride)
        row += UNROLL * step
        at += UNROLL * stride


def group_norm_gpu[
    dtype: DType, epilogue: Epilogue
](o: GroupNormTensors[dtype], g: GroupNormSizes, ctx: DeviceContext) raises:
    """Enqueues both launches.

    Parameters:
        dtype: Of x and y.
        epilogue: What follows the norm.

    Args:
        o: Tensors.
        g: Sizes.
        ctx: The GPU.

    Raises:
        If a launch fails.
    """
    comptime wide = 16 // size_of[dtype]()
    var members = Int(g.members)
    # Vectors may lie in two groups, but no slab may end in a vector.
    var fits = members % wide == 0 or members // gcd(members, wide) <= SLICE
    if fits and Int(g.channels) % wide == 0:
        _enqueue[dtype, epilogue, wide](o, g, ctx)
    else:
        _enqueue[dtype, epilogue, 1](o, g, ctx)


def _enqueue[
    dtype: DType, epilogue: Epilogue, width: Int
](o: GroupNormTensors[dtype], g: GroupNormSizes, ctx: DeviceContext) raises:
    comptime most = SLICE * width
    var members, channels, pixels = Int(g.members), Int(g.channels), Int(g.pixels)
    var pieces, slab = ceildiv(members, most), most
    var slabs = Int(g.groups()) * pieces
    if pieces == 1:
        var unit = members * width // gcd(members, width)
        slab = min(most // unit * unit, channels)
        slabs = ceildiv(channels, slab)
    var slice = next_power_of_two(ceildiv(slab, width))
    var images = Int(g.images)
    var parts = 2 * Device(ctx).multiprocessors // (images * slabs)
    parts = min(parts, ceildiv(pixels, UNROLL * THREADS // slice))
    parts = max(1, min(parts, Int(g.entries) // pieces))
    var length = ceildiv(pixels, parts)
    parts = ceildiv(pixels, length)
    var division = Division(
        slabs=slabs, pieces=pieces, slab=slab, slice=slice, parts=parts, length=length
    )
    launch[moments_kernel[dtype, width]](
        ctx,
        o,
        g,
        division,
        grid_dim=images * slabs * parts,
        block_dim=THREADS,
    )
    launch[normalise_kernel[dtype, epilogue, width]](
        ctx,
        o,
        g,
        division,
        grid_dim=images * slabs * parts,
        block_dim=THREADS,
    )
