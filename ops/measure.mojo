"""What programs share that time kernels alone; ops/measure.py builds and runs them.

A program reads lines from the file named on the command line and prints a row for each. It checks
what a kernel gives against the CUDA cores' and times launches in a CUDA graph, each of which waits
for the one before. No op imports it.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host._nvidia_cuda import CUDA
from std.ffi import OwnedDLHandle
from std.math import ceildiv, sqrt
from std.sys import argv
from std.time import perf_counter_ns

from .geometry import Geometry
from .operands import F32, Data

comptime THREADS = 256
"""Threads of the helpers' blocks."""
comptime SUMS = 512 * THREADS
"""Partial sums of a comparison."""
comptime BIAS = 1 << 14
"""Numbers of the bias."""


def fill[dtype: DType](p: Data[dtype], count: Int64, seed: Int32, scale: Float32):
    """Fills with pseudo-random numbers in [-scale, scale).

    Parameters:
        dtype: Of the numbers.

    Args:
        p: Where to.
        count: How many.
        seed: Other numbers for another seed.
        scale: The largest.
    """
    var i = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    if i < Int(count):
        var bits = UInt32(i) * 2654435761 + UInt32(seed) * 40503
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
        bits ^= bits >> 16
        var value = Float32(Int(bits & 0xFFFF)) / 32768 - 1
        p[unsafe_offset=i] = (value * scale).cast[dtype]()


def compare[dtype: DType](a: Data[dtype], b: Data[dtype], count: Int64, sums: Data[F32]):
    """Sums (a - b)^2 and b^2, a part in each thread.

    Parameters:
        dtype: Of the results.

    Args:
        a: One result.
        b: The other.
        count: Of numbers.
        sums: Two for each thread.
    """
    var me = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var difference = Float32(0)
    var size = Float32(0)
    for i in range(me, Int(count), SUMS):
        var y = b[unsafe_offset=i].cast[F32]()
        var d = a[unsafe_offset=i].cast[F32]() - y
        difference += d * d
        size += y * y
    sums[unsafe_offset=2 * me] = difference
    sums[unsafe_offset=2 * me + 1] = size


struct Bench[dtype: DType]:
    """A GPU, and buffers for the largest convolution.

    Parameters:
        dtype: Of activations and filters.
    """

    var ctx: DeviceContext
    """The GPU."""
    var cuda: OwnedDLHandle
    """The driver, for CUDA graphs."""
    var x: DeviceBuffer[Self.dtype]
    """Activations."""
    var y: DeviceBuffer[Self.dtype]
    """Result."""
    var expected: DeviceBuffer[Self.dtype]
    """Result of the other kernel."""
    var bias: DeviceBuffer[F32]
    """Bias."""
    var sums: DeviceBuffer[F32]
    """Partial sums of a comparison."""

    def __init__(out self, geometries: List[Geometry]) raises:
        """Makes and fills the buffers.

        Args:
            geometries: Of all convolutions.

        Raises:
            If the GPU lacks memory.
        """
        var x = 1
        var y = 1
        for g in geometries:
            x = max(x, g.n * g.h * g.w * g.c)
            y = max(y, g.pixels() * g.f)
        self.ctx = DeviceContext()
        self.cuda = OwnedDLHandle("libcuda.so.1")
        self.x = self.ctx.enqueue_create_buffer[Self.dtype](x)
        self.y = self.ctx.enqueue_create_buffer[Self.dtype](y)
        self.expected = self.ctx.enqueue_create_buffer[Self.dtype](y)
        self.bias = self.ctx.enqueue_create_buffer[F32](BIAS)
        self.sums = self.ctx.enqueue_create_buffer[F32](2 * SUMS)
        self.fill(self.x, x, 1, 1)
        self.fill(self.bias, BIAS, 4, 1)

    def fill[
        kind: DType
    ](self, buffer: DeviceBuffer[kind], count: Int, seed: Int, scale: Float32) raises:
        """Fills a buffer with pseudo-random numbers.

        Parameters:
            kind: Of the numbers.

        Args:
            buffer: Where to.
            count: How many.
            seed: Other numbers for another seed.
            scale: The largest.

        Raises:
            If the launch fails.
        """
        self.ctx.enqueue_function[fill[kind]](
            rebind[Data[kind]](buffer.unsafe_ptr()),
            Int64(count),
            Int32(seed),
            scale,
            grid_dim=ceildiv(count, THREADS),
            block_dim=THREADS,
        )

    def difference(self, count: Int) raises -> Float64:
        """Compares the two results.

        Args:
            count: Numbers of each.

        Returns:
            The norm of the difference over that of what was expected.

        Raises:
            If the launch fails.
        """
        self.ctx.enqueue_function[compare[Self.dtype]](
            rebind[Data[Self.dtype]](self.y.unsafe_ptr()),
            rebind[Data[Self.dtype]](self.expected.unsafe_ptr()),
            Int64(count),
            rebind[Data[F32]](self.sums.unsafe_ptr()),
            grid_dim=SUMS // THREADS,
            block_dim=THREADS,
        )
        var difference = Float64(0)
        var size = Float64(0)
        with self.sums.map_to_host() as sums:
            for i in range(SUMS):
                difference += Float64(sums[2 * i])
                size += Float64(sums[2 * i + 1])
        return sqrt(difference / size)

    def begin(self) raises:
        """Begins a CUDA graph: what is launched goes into it.

        Raises:
            If the driver refuses.
        """
        var stream = CUDA(self.ctx.stream())
        _check(self.cuda.call["cuStreamBeginCapture_v2", Int32](stream, Int32(2)))

    def end(self, launches: Int, *, rounds: Int, repeats: Int) raises -> Float64:
        """Ends the CUDA graph and times it.

        Args:
            launches: How many it holds.
            rounds: The least of so many means counts.
            repeats: Runs of a round.

        Returns:
            Microseconds of a launch.

        Raises:
            If a launch or a call of the driver fails.
        """
        var stream = CUDA(self.ctx.stream())
        var graph = UInt64(0)
        var runnable = UInt64(0)
        _check(self.cuda.call["cuStreamEndCapture", Int32](stream, Pointer(to=graph)))
        _check(
            self.cuda.call["cuGraphInstantiateWithFlags", Int32](
                Pointer(to=runnable), graph, UInt64(0)
            )
        )
        _check(self.cuda.call["cuGraphLaunch", Int32](runnable, stream))
        self.ctx.synchronize()
        var least = Float64.MAX
        for _ in range(rounds):
            var start = perf_counter_ns()
            for _ in range(repeats):
                _check(self.cuda.call["cuGraphLaunch", Int32](runnable, stream))
            self.ctx.synchronize()
            var took = Float64(perf_counter_ns() - start) / 1000
            least = min(least, took / Float64(repeats * launches))
        _check(self.cuda.call["cuGraphExecDestroy", Int32](runnable))
        _check(self.cuda.call["cuGraphDestroy", Int32](graph))
        return least


def launches_of(g: Geometry) -> Int:
    """Chooses how many launches a graph holds: more of shorter ones.

    Args:
        g: Sizes.

    Returns:
        From 4 to 40.
    """
    return max(4, min(40, 1600 // max(1, g.pixels() * g.f // 100000)))


def square(line: String, first: Int) raises -> Geometry:
    """Reads `images side channels filters window stride` of a square convolution.

    Args:
        line: Words.
        first: Which of them the images are.

    Returns:
        Sizes.

    Raises:
        If they are no numbers.
    """
    var words = line.split()
    var k = Int(words[first + 4])
    var g = Geometry(rows=1, depth=Int(words[first + 2]), columns=Int(words[first + 3]))
    g.n, g.h = Int(words[first]), Int(words[first + 1])
    g.w = g.h
    g.r = g.s = k
    g.stride_h = g.stride_w = Int(words[first + 5])
    g.pad_h = g.pad_w = k // 2
    g.p = g.q = (g.h + 2 * (k // 2) - k) // g.stride_h + 1
    return g


def read_lines() raises -> List[String]:
    """Reads the file named on the command line.

    Returns:
        Its lines.

    Raises:
        If it cannot be read.
    """
    var lines = List[String]()
    with open(argv()[1], "r") as file:
        for line in file.read().splitlines():
            lines.append(String(line))
    return lines^


def _check(code: Int32) raises:
    """Raises if a call of the driver did not succeed."""
    if code != 0:
        raise Error("the CUDA driver gave error ", code)
