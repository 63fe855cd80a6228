"""Pictures of any sizes become the pixels of a batch: turned, resized and cropped, in one launch.

Pillow's resize to the bit (libImaging/Resample.c), for its bicubic (Keys 1981, a = -0.5) and bilinear
filters. Weights are computed in float64 and rounded to integers, 2^22 standing for 1. A picture is
filtered along one axis, rounded to 8 bits, then filtered along the other:

    h[y, q, c] = level(sum_k across[q, k] x[y, first(q) + k, c])
    y[n, p, q, c] = level(sum_k down[p, k] h[first(p) + k, q, c]),   level(s) = clamp((s + 2^21) >> 22)

The result is the centre of the resized picture; what lies outside it is black. A picture that has its
size already comes through unchanged.

Row n of places[N, 13] says of picture n: the address of its pixel that is at the top left once it is
upright; the address of its result, uint8 [H, W, 3]; 2 for bicubic or 1 for bilinear; then five numbers
of p and five of q: the bytes from one pixel of the picture to the next, how many pixels they are, how
many after the resize, how many in the result, and the bytes from one of its pixels to the next. Bytes
may be negative: a picture that lies on its side or its head is no other case. Nor is one that Pillow
filters along its columns first: there p and q change places.

A block of a GPU computes a tile of the result: it filters `STAGED` rows of the picture at a time into
shared memory, and adds them to the sums of its rows. Bound by the loads of the first pass, of bytes
from L1. Of more than `TAPS` pixels that make one only as many are taken: runtime/nvjpeg.py gives it no
picture that is so large. A CPU computes rows on all cores, each from the picture: there it is for tests.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.utils.static_tuple import StaticTuple

from .launch import launch
from .operands import F32, Data, data
from .parallel import over_cores

comptime BITS = 22
"""Of the weights' fraction."""
comptime TAPS = 64
"""Pixels along an axis that make one of the result, at most; runtime/nvjpeg.py counts with it."""
comptime PLACES = 13
"""Numbers of a row of places."""
comptime SOURCE = 0
"""Which of them is the picture's address."""
comptime RESULT = 1
"""Which is the result's."""
comptime SUPPORT = 2
"""Which is the filter's."""
comptime AXES = 3
"""Where those of p begin."""
comptime AXIS = 5
"""Numbers of an axis."""
comptime ROWS = 16
"""Rows of a tile."""
comptime COLUMNS = 64
"""Columns of a tile."""
comptime STAGED = 64
"""Rows of a picture that are in shared memory at a time."""
comptime THREADS = 256
"""Threads of a block."""
comptime C = 3
"""Channels."""
comptime ROW = COLUMNS * C
"""Numbers of a row of a tile."""
comptime SHARE = ROWS * ROW // THREADS
"""Numbers of a tile that a thread sums."""

comptime Pixels = Pointer[UInt8, MutUntrackedOrigin, address_space=AddressSpace.GLOBAL]
"""Where pixels lie."""
comptime Places = Data[DType.int64]
"""Where pictures lie."""


struct Axis(TrivialRegisterPassable):
    """An axis of a picture and of its result."""

    var step: Int
    """Bytes from one pixel of the picture to the next."""
    var size: Int
    """Pixels of the picture."""
    var scaled: Int
    """Pixels that it is resized to."""
    var length: Int
    """Pixels of the result."""
    var to: Int
    """Bytes from one pixel of the result to the next."""
    var support: Int
    """How far the filter reaches: 2 if it is bicubic, 1 if bilinear."""

    @always_inline
    def __init__(out self, row: Places, axis: Int):
        """Reads it.

        Args:
            row: A row of places.
            axis: 0 for p, 1 for q.
        """
        var at = row.unsafe_offset(AXES + axis * AXIS)
        self.step = Int(at[unsafe_offset=0])
        self.size = Int(at[unsafe_offset=1])
        self.scaled = Int(at[unsafe_offset=2])
        self.length = Int(at[unsafe_offset=3])
        self.to = Int(at[unsafe_offset=4])
        self.support = Int(row[unsafe_offset=SUPPORT])

    @always_inline
    def taps(self, index: Int) -> Taps:
        """Finds what makes a pixel of the result.

        Args:
            index: Of the pixel, along this axis.

        Returns:
            It; nothing outside the resized picture and the result.
        """
        var place = index + ((self.scaled - self.length) >> 1)
        return Taps(self, -1 if index >= self.length else place)


struct Taps(TrivialRegisterPassable):
    """Pixels along an axis, and how much of each is in one of the result."""

    var first: Int
    """The first of them."""
    var count: Int
    """How many they are."""
    var centre: Float64
    """Where the result's pixel is in the picture, less a half."""
    var shrunk: Float64
    """What distances are multiplied by."""
    var support: Int
    """How far the filter reaches, in shrunk distances."""
    var total: Float64
    """Of the filter's values."""

    @always_inline
    def __init__(out self, axis: Axis, place: Int):
        """Finds them.

        Args:
            axis: Of the picture.
            place: In the resized picture; it may lie outside.
        """
        var scale = Float64(axis.size) / Float64(axis.scaled)
        var wide = max(scale, 1.0)
        var reach = Float64(axis.support) * wide
        var centre = (Float64(place) + 0.5) * scale
        self.shrunk = 1.0 / wide
        self.support = axis.support
        self.centre = centre
        self.first = max(Int(centre - reach + 0.5), 0)
        self.count = min(Int(centre + reach + 0.5), axis.size) - self.first
        if place < 0 or place >= axis.scaled:
            self.first, self.count = 0, 0
        self.total = 0.0
        for k in range(self.count):
            self.total += self.value(k)

    @always_inline
    def value(self, k: Int) -> Float64:
        """Computes the filter, in Pillow's order of operations.

        Args:
            k: Of which pixel, from the first on.

        Returns:
            What the pixel counts, of `total`.
        """
        var x = abs((Float64(k + self.first) - self.centre + 0.5) * self.shrunk)
        if self.support == 1:
            return max(1.0 - x, 0.0)
        if x < 1.0:
            return ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1.0
        if x < 2.0:
            return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
        return 0.0

    @always_inline
    def weight(self, k: Int) -> Int32:
        """Rounds a weight.

        Args:
            k: Of which pixel, from the first on.

        Returns:
            The weight, 2^22 standing for 1.
        """
        var weight = self.value(k) / self.total * Float64(1 << BITS)
        return Int32(weight - 0.5) if weight < 0 else Int32(weight + 0.5)

    def weights(self) -> List[Int32]:
        """Rounds all weights.

        Returns:
            As many as there are pixels.
        """
        var found = List[Int32](capacity=self.count)
        for k in range(self.count):
            found.append(self.weight(k))
        return found^


@always_inline
def level(sum: Int32) -> UInt8:
    """Rounds a sum of weighted levels.

    Args:
        sum: With 2^21 added.

    Returns:
        The level.
    """
    return UInt8((sum >> BITS).clamp(0, 255))


@always_inline
def pixels_at(row: Places, index: Int) -> Pixels:
    """Finds pixels.

    Args:
        row: A row of places.
        index: Of the number that is their address.

    Returns:
        The first of them.
    """
    return Pixels(unsafe_from_address=Int(row[unsafe_offset=index]))


# GPU


@__name("resample")
def resample_kernel(places: Places, edge: Int32):
    """Computes a tile of a picture in each block.

    Args:
        places: Where pictures lie [N, 13].
        edge: The longer one of the result.
    """
    var across = unsafe_stack_allocation[TAPS * COLUMNS, Int32, address_space=AddressSpace.SHARED]()
    var down = unsafe_stack_allocation[TAPS * ROWS, Int32, address_space=AddressSpace.SHARED]()
    var begins = unsafe_stack_allocation[COLUMNS + ROWS, Int32, address_space=AddressSpace.SHARED]()
    var ends = unsafe_stack_allocation[COLUMNS + ROWS, Int32, address_space=AddressSpace.SHARED]()
    var staged = unsafe_stack_allocation[STAGED * ROW, UInt8, address_space=AddressSpace.SHARED]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var row = places.unsafe_offset(Int(block_idx.y) * PLACES)
    var rows, columns = Axis(row, 0), Axis(row, 1)
    var tiles = ceildiv(Int(edge), COLUMNS)
    var p0 = Int(block_idx.x) // tiles * ROWS
    var q0 = Int(block_idx.x) % tiles * COLUMNS
    var t = Int(thread_idx.x)
    if p0 >= rows.length or q0 >= columns.length:
        return

    if t < COLUMNS + ROWS:
        var is_row = t >= COLUMNS
        var taps = rows.taps(p0 + t - COLUMNS) if is_row else columns.taps(q0 + t)
        var count = min(taps.count, TAPS)
        begins[unsafe_offset=t] = Int32(taps.first)
        ends[unsafe_offset=t] = Int32(taps.first + count)
        for k in range(count):
            if is_row:
                down[unsafe_offset=k * ROWS + t - COLUMNS] = taps.weight(k)
            else:
                across[unsafe_offset=k * COLUMNS + t] = taps.weight(k)
    barrier()

    var low, high = rows.size, 0
    for r in range(COLUMNS, COLUMNS + ROWS):
        if ends[unsafe_offset=r] > begins[unsafe_offset=r]:
            low = min(low, Int(begins[unsafe_offset=r]))
            high = max(high, Int(ends[unsafe_offset=r]))
    var source = pixels_at(row, SOURCE)
    var sums = StaticTuple[Int32, SHARE](fill=1 << (BITS - 1))
    for base in range(low, high, STAGED):
        var count = min(STAGED, high - base)
        for i in range(t, count * COLUMNS, THREADS):
            var q = i % COLUMNS
            var first = Int(begins[unsafe_offset=q])
            var place = (base + i // COLUMNS) * rows.step + first * columns.step
            var pixel = StaticTuple[Int32, C](fill=1 << (BITS - 1))
            for k in range(Int(ends[unsafe_offset=q]) - first):
                var weight = across[unsafe_offset=k * COLUMNS + q]
                comptime for c in range(C):
                    pixel[c] += weight * Int32(source[unsafe_offset=place + c])
                place += columns.step
            comptime for c in range(C):
                staged[unsafe_offset=i * C + c] = level(pixel[c])
        barrier()
        comptime for share in range(SHARE):
            var p = (share * THREADS + t) // ROW
            var at = (share * THREADS + t) % ROW
            var first = Int(begins[unsafe_offset=COLUMNS + p])
            var end = min(Int(ends[unsafe_offset=COLUMNS + p]), base + count)
            for y in range(max(first, base), end):
                var weight = down[unsafe_offset=(y - first) * ROWS + p]
                sums[share] += weight * Int32(staged[unsafe_offset=(y - base) * ROW + at])
        barrier()

    var result = pixels_at(row, RESULT)
    comptime for share in range(SHARE):
        var p = p0 + (share * THREADS + t) // ROW
        var at = (share * THREADS + t) % ROW
        var q = q0 + at // C
        if p < rows.length and q < columns.length:
            result[unsafe_offset=p * rows.to + q * columns.to + at % C] = level(sums[share])


def resample_gpu(places: Places, pictures: Int, edge: Int, ctx: DeviceContext) raises:
    """Enqueues the op.

    Args:
        places: Where the pictures lie [N, 13].
        pictures: How many there are; at least one, and at most 65,535.
        edge: The longer one of the result.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[resample_kernel](
        ctx,
        places,
        Int32(edge),
        grid_dim=(ceildiv(edge, ROWS) * ceildiv(edge, COLUMNS), pictures),
        block_dim=THREADS,
    )


# CPU


def resample_cpu(places: Places, pictures: Int, edge: Int):
    """Computes rows of the results on all cores.

    Args:
        places: Where the pictures lie [N, 13].
        pictures: How many there are.
        edge: The longer one of the result.
    """

    def task(index: Int) {imm}:
        var row = places.unsafe_offset(index // edge * PLACES)
        var p = index % edge
        var rows, columns = Axis(row, 0), Axis(row, 1)
        if p >= rows.length:
            return
        var source, result = pixels_at(row, SOURCE), pixels_at(row, RESULT)
        var taps = rows.taps(p)
        var down = taps.weights()
        for q in range(columns.length):
            var inner = columns.taps(q)
            var across = inner.weights()
            var sums = StaticTuple[Int32, C](fill=1 << (BITS - 1))
            for i in range(taps.count):
                var pixel = StaticTuple[Int32, C](fill=1 << (BITS - 1))
                var place = (taps.first + i) * rows.step + inner.first * columns.step
                for k in range(inner.count):
                    comptime for c in range(C):
                        pixel[c] += across[k] * Int32(source[unsafe_offset=place + c])
                    place += columns.step
                comptime for c in range(C):
                    sums[c] += down[i] * Int32(level(pixel[c]))
            comptime for c in range(C):
                result[unsafe_offset=p * rows.to + q * columns.to + c] = level(sums[c])

    over_cores(task, pictures * edge)


@register("resample")
struct Resample:
    """Turns, resizes and crops pictures; see above."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        done: OutputTensor[dtype=F32, rank=1, ...],
        places: InputTensor[dtype=DType.int64, rank=2, ...],
        edge: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            done: Nothing: a graph has to give something.
            places: Where the pictures lie [N, 13].
            edge: The longer one of the result, in host memory.
            ctx: The device.

        Raises:
            If the launch fails.
        """
        var pictures = places.shape()[0]
        if pictures == 0:
            return
        var longer = Int(data(edge)[unsafe_offset=0])
        comptime if target == "cpu":
            resample_cpu(data(places), pictures, longer)
        else:
            resample_gpu(data(places), pictures, longer, ctx)
