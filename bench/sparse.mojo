"""Times dense and sparse convolutions on a GPU; ``maxvision bench sparse`` runs it.

Reads lines `kernel dtype images side channels filters window stride folder` (images of side x side)
from the file named on the command line. The folder holds `dense`, the filter [F, R, S, C] with its
zeros, and `0`, `1`, ... what graphs/arrange.py makes of it for the kernel. Prints for each line `row
index us error`: the time of one of many launches in a CUDA graph, each waiting for the one before,
with another copy of the filter each time as far as they fit; and the difference from the CUDA-core
kernel, relative, in the Frobenius norm. The first line is `# ` and the GPU.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host._nvidia_cuda import CUDA
from std.ffi import OwnedDLHandle
from std.math import ceildiv, sqrt
from std.sys import argv, size_of
from std.time import perf_counter_ns

from ops.conv2d.gpu import conv2d_gpu
from ops.epilogue import Epilogue
from ops.gemm.gpu import gemm_portable
from ops.gemm.hopper import ROW
from ops.geometry import Geometry
from ops.operands import F32, Data, Operands
from ops.sparse_conv2d.blocks import blocks_conv2d
from ops.sparse_conv2d.gpu import sparse_conv2d_gpu
from ops.sparse_conv2d.packed import FILTERS
from ops.sparse_conv2d.tiled import sparse_conv2d_tiled
from ops.sparse_conv2d.two_four import two_four_conv2d

comptime RELU = Epilogue("relu")
"""What all of them end in."""
comptime THREADS = 256
"""Threads of the helpers' blocks."""
comptime SUMS = 512 * THREADS
"""Partial sums of a comparison."""
comptime ROOM = 64 << 20
"""Bytes that the copies of an array may take."""
comptime COPIES = 8
"""Copies of an array at most."""


def fill[dtype: DType](p: Data[dtype], count: Int64, scale: Float32):
    """Fills with pseudo-random numbers in [-scale, scale).

    Parameters:
        dtype: Of the numbers.

    Args:
        p: Where to.
        count: How many.
        scale: The largest.
    """
    var i = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    if i < Int(count):
        var bits = UInt32(i) * 2654435761 + 40503
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


struct Copied(Movable):
    """An array from a file, several times over."""

    var buffer: DeviceBuffer[DType.uint8]
    """All copies."""
    var pitch: Int
    """Bytes from one to the next."""
    var copies: Int
    """How many there are."""
    var bytes: Int
    """Bytes of one."""

    def __init__(out self, path: String, ctx: DeviceContext, copies: Int = COPIES) raises:
        """Reads the file.

        Args:
            path: Its name.
            ctx: The GPU.
            copies: Copies at most.

        Raises:
            If it cannot be read.
        """
        var bytes: List[UInt8]
        with open(path, "r") as file:
            bytes = file.read_bytes()
        self.bytes = len(bytes)
        self.pitch = ceildiv(max(1, len(bytes)), 256) * 256
        self.copies = max(1, min(copies, ROOM // self.pitch))
        self.buffer = ctx.enqueue_create_buffer[DType.uint8](self.pitch * self.copies)
        for copy in range(self.copies):
            var to = self.buffer.create_sub_buffer[DType.uint8](copy * self.pitch, len(bytes))
            ctx.enqueue_copy(to, bytes.unsafe_ptr())
        ctx.synchronize()

    def at[dtype: DType](self, launch: Int) -> Data[dtype]:
        """Chooses a copy.

        Parameters:
            dtype: Of the array.

        Args:
            launch: Any number.

        Returns:
            Its first element.
        """
        var first = rebind[Data[DType.uint8]](self.buffer.unsafe_ptr())
        return first.unsafe_offset(launch % self.copies * self.pitch).unsafe_bitcast[
            Scalar[dtype]
        ]()


struct Bench[dtype: DType]:
    """Buffers for the largest convolution, and a GPU.

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
        self.x = self.ctx.enqueue_create_buffer[Self.dtype](x)
        self.y = self.ctx.enqueue_create_buffer[Self.dtype](y)
        self.expected = self.ctx.enqueue_create_buffer[Self.dtype](y)
        self.bias = self.ctx.enqueue_create_buffer[F32](1 << 14)
        self.sums = self.ctx.enqueue_create_buffer[F32](2 * SUMS)
        self.fill(self.x, x, 1)
        self.fill(self.bias, 1 << 14, 1)

    def fill[kind: DType](self, buffer: DeviceBuffer[kind], count: Int, scale: Float32) raises:
        """Fills a buffer with pseudo-random numbers.

        Parameters:
            kind: Of the numbers.

        Args:
            buffer: Where to.
            count: How many.
            scale: The largest.

        Raises:
            If the launch fails.
        """
        self.ctx.enqueue_function[fill[kind]](
            rebind[Data[kind]](buffer.unsafe_ptr()),
            Int64(count),
            scale,
            grid_dim=ceildiv(count, THREADS),
            block_dim=THREADS,
        )

    def operands(self, y: DeviceBuffer[Self.dtype], w: Data[Self.dtype]) -> Operands[Self.dtype]:
        """Names the tensors.

        Args:
            y: Where the result goes.
            w: The filter, or its nonzeros.

        Returns:
            The operands.
        """
        var x = rebind[Data[Self.dtype]](self.x.unsafe_ptr())
        return Operands[Self.dtype](
            x,
            w,
            rebind[Data[F32]](self.bias.unsafe_ptr()),
            x,
            rebind[Data[Self.dtype]](y.unsafe_ptr()),
        )

    def launch(self, kernel: String, g: Geometry, arrays: List[Copied], copy: Int) raises:
        """Enqueues a convolution.

        Args:
            kernel: Which one.
            g: Sizes.
            arrays: What it reads.
            copy: Which copies of them.

        Raises:
            If there is no such kernel, or the launch fails.
        """
        var o = self.operands(self.y, arrays[0].at[Self.dtype](copy))
        if kernel == "dense":
            conv2d_gpu[Self.dtype, RELU, True](g, o, self.ctx)
        elif kernel == "exact":
            conv2d_gpu[Self.dtype, RELU, False](g, o, self.ctx)
        elif kernel == "steps":
            sparse_conv2d_gpu[Self.dtype, RELU](
                g, o, arrays[1].at[DType.uint8](copy), arrays[2].at[DType.int32](copy), self.ctx
            )
        else:
            comptime if size_of[Self.dtype]() == 2:
                self.launch_packed(kernel, g, o, arrays, copy)
            else:
                raise Error("there is no kernel ", kernel, " of float32")

    def launch_packed(
        self,
        kernel: String,
        g: Geometry,
        o: Operands[Self.dtype],
        arrays: List[Copied],
        copy: Int,
    ) raises:
        """Enqueues a convolution of a filter that is packed for Hopper.

        Args:
            kernel: Which one.
            g: Sizes.
            o: The tensors.
            arrays: The packed filter, and where its parts belong.
            copy: Which copies of them.

        Raises:
            If there is no such kernel, or the launch fails.
        """
        if kernel == "tiles":
            sparse_conv2d_tiled[Self.dtype, RELU](
                g,
                o,
                arrays[0].at[DType.uint32](copy),
                arrays[1].at[DType.int32](copy),
                self.ctx,
            )
        elif kernel == "two_four":
            two_four_conv2d[Self.dtype, RELU](g, o, arrays[1].at[DType.uint32](copy), self.ctx)
        elif kernel == "blocks":
            blocks_conv2d[Self.dtype, RELU, FILTERS](
                g,
                o,
                arrays[1].at[DType.int32](copy),
                arrays[1].bytes // 4 // ceildiv(g.f, FILTERS),
                arrays[0].bytes // (FILTERS * ROW),
                self.ctx,
            )
        else:
            raise Error("there is no kernel ", kernel)

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

    def measure(self, index: Int, kernel: String, g: Geometry, folder: String) raises:
        """Checks and times a convolution, and prints its row.

        Args:
            index: Of the row.
            kernel: Which one.
            g: Sizes.
            folder: Of its arrays.

        Raises:
            If anything fails.
        """
        var count = g.pixels() * g.f
        var whole = kernel == "dense" or kernel == "exact"
        var dense = Copied(folder + "/dense", self.ctx, COPIES if whole else 1)
        gemm_portable[Self.dtype, RELU, True](
            g, self.operands(self.expected, dense.at[Self.dtype](0)), 1, self.ctx
        )
        var arrays = List[Copied]()
        if whole:
            arrays.append(dense^)
        else:
            for i in range(3 if kernel == "steps" else 2):
                arrays.append(Copied(folder + "/" + String(i), self.ctx))
        self.fill(self.y, count, 3)
        self.launch(kernel, g, arrays, 0)
        var error = self.difference(count)

        var launches = max(4, min(40, 1600 // max(1, count // 100000)))
        var stream = CUDA(self.ctx.stream())
        _check(self.cuda.call["cuStreamBeginCapture_v2", Int32](stream, Int32(2)))
        for i in range(launches):
            self.launch(kernel, g, arrays, i)
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
        for _ in range(3):
            var start = perf_counter_ns()
            for _ in range(3):
                _check(self.cuda.call["cuGraphLaunch", Int32](runnable, stream))
            self.ctx.synchronize()
            least = min(least, Float64(perf_counter_ns() - start) / 1000 / Float64(3 * launches))
        _check(self.cuda.call["cuGraphExecDestroy", Int32](runnable))
        _check(self.cuda.call["cuGraphDestroy", Int32](graph))
        print("row", index, least, error)


def _check(code: Int32) raises:
    """Raises if a call of the driver did not succeed."""
    if code != 0:
        raise Error("the CUDA driver gave error ", code)


def measure[dtype: DType, name: StaticString](lines: List[String]) raises:
    """Measures the lines of one dtype.

    Parameters:
        dtype: Of activations and filters.
        name: What the lines call it.

    Args:
        lines: All lines.

    Raises:
        If anything fails.
    """
    var geometries = List[Geometry]()
    var x = 0
    var y = 0
    for line in lines:
        var words = line.split()
        var k = Int(words[6])
        var g = Geometry(rows=1, depth=Int(words[4]), columns=Int(words[5]))
        g.n, g.h, g.w = Int(words[2]), Int(words[3]), Int(words[3])
        g.r = g.s = k
        g.stride_h = g.stride_w = Int(words[7])
        g.pad_h = g.pad_w = k // 2
        g.p = g.q = (g.h + 2 * (k // 2) - k) // g.stride_h + 1
        geometries.append(g)
        if words[1] == name:
            x = max(x, g.n * g.h * g.w * g.c)
            y = max(y, g.pixels() * g.f)
    if x == 0:
        return
    var bench = Bench[dtype](x, y)
    for i in range(len(lines)):
        var words = lines[i].split()
        if words[1] == name:
            bench.measure(i, String(words[0]), geometries[i], String(words[8]))


def main() raises:
    """Times what the file asks for.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    var lines = List[String]()
    with open(argv()[1], "r") as file:
        for line in file.read().splitlines():
            lines.append(String(line))
    print("#", DeviceContext().name())
    measure[DType.bfloat16, "bfloat16"](lines)
    measure[DType.float32, "float32"](lines)
