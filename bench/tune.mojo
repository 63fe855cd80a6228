"""Times every tile of ops/gemm on every product of a list; ``maxvision bench tune`` runs it.

Reads lines `pixels side channels filters kernel stride epilogue` (pixels: images of side x side)
from the file named on the command line, and prints for each line and tile
`row images side channels filters kernel stride epilogue config splits us error`: the time of one
of many launches in a CUDA graph, each waiting for the one before, with other filters each time;
and the difference from the CUDA-core kernel, relative, in the Frobenius norm. The first line is
`# ` and the GPU.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host._nvidia_cuda import CUDA
from std.ffi import OwnedDLHandle
from std.math import ceildiv, sqrt
from std.sys import argv
from std.time import perf_counter_ns

from ops.epilogue import Epilogue
from ops.gemm.gpu import gemm_portable
from ops.gemm.hopper import hopper_gemm
from ops.gemm.tuning import CONFIGS
from ops.geometry import Geometry
from ops.operands import F32, Data, Operands

comptime HALF = DType.bfloat16
"""What is timed; float16 takes as long."""
comptime THREADS = 256
"""Threads of the helpers' blocks."""
comptime SUMS = 512 * THREADS
"""Partial sums of a comparison."""
comptime FILTERS = 1 << 24
"""Numbers to draw filters from: 32 MB."""


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


def compare(a: Data[HALF], b: Data[HALF], count: Int64, sums: Data[F32]):
    """Sums (a - b)^2 and b^2, a part in each thread.

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


struct Bench:
    """Buffers for the largest product, and a GPU."""

    var ctx: DeviceContext
    """The GPU."""
    var cuda: OwnedDLHandle
    """The driver, for CUDA graphs."""
    var x: DeviceBuffer[HALF]
    """Activations."""
    var w: DeviceBuffer[HALF]
    """Filters."""
    var y: DeviceBuffer[HALF]
    """Result."""
    var expected: DeviceBuffer[HALF]
    """Result of the other kernel."""
    var residual: DeviceBuffer[HALF]
    """Residual."""
    var bias: DeviceBuffer[F32]
    """Bias."""
    var sums: DeviceBuffer[F32]
    """Partial sums of a comparison."""

    def __init__(out self, x: Int, y: Int) raises:
        """Makes and fills the buffers.

        Args:
            x: Numbers of the largest activations.
            y: Numbers of the largest result.

        Raises:
            If the GPU lacks memory.
        """
        self.ctx = DeviceContext()
        self.cuda = OwnedDLHandle("libcuda.so.1")
        self.x = self.ctx.enqueue_create_buffer[HALF](x)
        self.w = self.ctx.enqueue_create_buffer[HALF](FILTERS)
        self.y = self.ctx.enqueue_create_buffer[HALF](y)
        self.expected = self.ctx.enqueue_create_buffer[HALF](y)
        self.residual = self.ctx.enqueue_create_buffer[HALF](y)
        self.bias = self.ctx.enqueue_create_buffer[F32](1 << 14)
        self.sums = self.ctx.enqueue_create_buffer[F32](2 * SUMS)
        self.fill(self.x, x, 1, 1)
        self.fill(self.w, FILTERS, 2, 0.05)
        self.fill(self.residual, y, 3, 1)
        self.fill(self.bias, 1 << 14, 4, 1)

    def fill[
        dtype: DType
    ](self, buffer: DeviceBuffer[dtype], count: Int, seed: Int, scale: Float32) raises:
        """Fills a buffer with pseudo-random numbers.

        Parameters:
            dtype: Of the numbers.

        Args:
            buffer: Where to.
            count: How many.
            seed: Other numbers for another seed.
            scale: The largest.

        Raises:
            If the launch fails.
        """
        self.ctx.enqueue_function[fill[dtype]](
            rebind[Data[dtype]](buffer.unsafe_ptr()),
            Int64(count),
            Int32(seed),
            scale,
            grid_dim=ceildiv(count, THREADS),
            block_dim=THREADS,
        )

    def operands(self, y: DeviceBuffer[HALF], filters: Int) -> Operands[HALF]:
        """Names the tensors.

        Args:
            y: Where the result goes.
            filters: Where the filters begin.

        Returns:
            The operands.
        """
        return Operands[HALF](
            rebind[Data[HALF]](self.x.unsafe_ptr()),
            rebind[Data[HALF]](self.w.unsafe_ptr()).unsafe_offset(filters),
            rebind[Data[F32]](self.bias.unsafe_ptr()),
            rebind[Data[HALF]](self.residual.unsafe_ptr()),
            rebind[Data[HALF]](y.unsafe_ptr()),
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
        self.ctx.enqueue_function[compare](
            rebind[Data[HALF]](self.y.unsafe_ptr()),
            rebind[Data[HALF]](self.expected.unsafe_ptr()),
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

    def timed[epilogue: Epilogue, index: Int](self, g: Geometry, splits: Int) raises -> Float64:
        """Times a tile.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile in CONFIGS.

        Args:
            g: Sizes.
            splits: Blocks that share a tile.

        Returns:
            Microseconds of a launch.

        Raises:
            If a launch or a call of the driver fails.
        """
        var size = g.depth() * g.f
        var launches = max(4, min(40, 1600 // max(1, g.pixels() * g.f // 100000)))
        var stream = CUDA(self.ctx.stream())
        _check(self.cuda.call["cuStreamBeginCapture_v2", Int32](stream, Int32(2)))
        for i in range(launches):
            hopper_gemm[HALF, epilogue, CONFIGS[index]](
                g, self.operands(self.y, i % (FILTERS // size) * size), splits, self.ctx
            )
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
        var repeats = 5
        var start = perf_counter_ns()
        for _ in range(repeats):
            _check(self.cuda.call["cuGraphLaunch", Int32](runnable, stream))
        self.ctx.synchronize()
        var time = Float64(perf_counter_ns() - start) / 1000 / Float64(repeats * launches)
        _check(self.cuda.call["cuGraphExecDestroy", Int32](runnable))
        _check(self.cuda.call["cuGraphDestroy", Int32](graph))
        return time

    def tune[epilogue: Epilogue](self, g: Geometry, line: String) raises:
        """Times every tile on one product, and prints a row for each.

        Parameters:
            epilogue: What the accumulator goes through.

        Args:
            g: Sizes.
            line: What names the product.

        Raises:
            If a launch fails.
        """
        var count = g.pixels() * g.f
        gemm_portable[HALF, epilogue, True](
            g,
            self.operands(self.expected, 0),
            1,
            self.ctx,
        )
        var steps = g.r * g.s * ceildiv(g.c, 64)
        comptime for i in range(len(CONFIGS)):
            comptime config = CONFIGS[i]
            var blocks = ceildiv(g.pixels(), config.rows()) * ceildiv(g.f, config.columns)
            var splits = 1
            while splits <= (8 if config.split else 1):
                if splits > steps or (config.split and blocks * splits > 600):
                    break
                self.fill(self.y, count, 9, 3)
                hopper_gemm[HALF, epilogue, config](g, self.operands(self.y, 0), splits, self.ctx)
                var error = self.difference(count)
                print("row", line, i, splits, self.timed[epilogue, i](g, splits), error)
                splits *= 2


def _check(code: Int32) raises:
    """Raises if a call of the driver did not succeed."""
    if code != 0:
        raise Error("the CUDA driver gave error ", code)


def main() raises:
    """Times what the file asks for.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    var lines = List[String]()
    with open(argv()[1], "r") as file:
        for line in file.read().splitlines():
            lines.append(String(line))
    var geometries = List[Geometry]()
    var x = 1
    var y = 1
    for line in lines:
        var words = line.split()
        var k = Int(words[4])
        var g = Geometry(rows=1, depth=Int(words[2]), columns=Int(words[3]))
        g.n, g.h, g.w = Int(words[0]), Int(words[1]), Int(words[1])
        g.r = g.s = k
        g.stride_h = g.stride_w = Int(words[5])
        g.pad_h = g.pad_w = k // 2
        g.p = g.q = (g.h + 2 * (k // 2) - k) // g.stride_h + 1
        x = max(x, g.n * g.h * g.w * g.c)
        y = max(y, g.pixels() * g.f)
        geometries.append(g)
    var bench = Bench(x, y)
    print("#", bench.ctx.name())
    for i in range(len(lines)):
        var epilogue = lines[i].split()[6]
        if epilogue == "add_relu":
            bench.tune[Epilogue("add_relu")](geometries[i], lines[i])
        elif epilogue == "gelu":
            bench.tune[Epilogue("gelu")](geometries[i], lines[i])
        else:
            bench.tune[Epilogue("relu")](geometries[i], lines[i])
