"""Times dense and sparse convolutions on a GPU, each kernel alone; `bench sparse` runs it.

Reads lines `kernel dtype images side channels filters window stride folder` (images of side x side).
The folder holds `dense`, the filter [F, R, S, C] with its zeros, and `0`, `1`, ... what
graphs/arrange.py makes of it for the kernel. Prints for each line `row index us error`: the time of
a launch, with another copy of the filter each time as far as they fit; and the difference from the
CUDA-core kernel, relative, in the Frobenius norm. The first line is `# ` and the GPU.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..conv2d.gpu import conv2d_gpu
from ..epilogue import Epilogue
from ..gemm.gpu import gemm_portable
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..hopper.shared import ROW
from ..measure import Bench, launches_of, read_lines, square
from ..operands import F32, Batch, Data, Operands
from .blocks import FILTERS, blocks_conv2d
from .gpu import sparse_conv2d_gpu
from .tiled import sparse_conv2d_tiled
from .two_four import two_four_conv2d

comptime RELU = Epilogue("relu")
"""What all of them end in."""
comptime WINDOWS = Layer(windows=True)
"""What the compiler knows of the dense ones: windows of any size."""
comptime ROOM = 64 << 20
"""Bytes that the copies of an array may take."""
comptime COPIES = 8
"""Copies of an array at most."""


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


struct Timer[dtype: DType]:
    """Times kernels.

    Parameters:
        dtype: Of activations and filters.
    """

    var bench: Bench[Self.dtype]
    """A GPU, and buffers for the largest convolution."""

    def __init__(out self, geometries: List[Geometry]) raises:
        """Makes and fills the buffers.

        Args:
            geometries: Of all convolutions.

        Raises:
            If the GPU lacks memory.
        """
        self.bench = Bench[Self.dtype](geometries)

    def operands(self, y: DeviceBuffer[Self.dtype], w: Data[Self.dtype]) -> Operands[Self.dtype]:
        """Names the tensors.

        Args:
            y: Where the result goes.
            w: The filter, or its nonzeros.

        Returns:
            The operands.
        """
        var x = rebind[Data[Self.dtype]](self.bench.x.unsafe_ptr())
        return Operands[Self.dtype](
            x,
            w,
            rebind[Data[F32]](self.bench.bias.unsafe_ptr()),
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
        var o = self.operands(self.bench.y, arrays[0].at[Self.dtype](copy))
        if kernel == "dense":
            conv2d_gpu[Self.dtype, RELU, True, WINDOWS](g, o, self.bench.ctx)
        elif kernel == "exact":
            conv2d_gpu[Self.dtype, RELU, False, WINDOWS](g, o, self.bench.ctx)
        elif kernel == "steps":
            sparse_conv2d_gpu[Self.dtype, RELU](
                g,
                o,
                arrays[1].at[DType.uint8](copy),
                arrays[2].at[DType.int32](copy),
                self.bench.ctx,
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
                self.bench.ctx,
            )
        elif kernel == "two_four":
            two_four_conv2d[Self.dtype, RELU](
                g, o, arrays[1].at[DType.uint32](copy), self.bench.ctx
            )
        elif kernel == "blocks":
            blocks_conv2d[Self.dtype, RELU](
                g,
                o,
                arrays[1].at[DType.int32](copy),
                arrays[1].bytes // 4 // ceildiv(g.f, FILTERS),
                arrays[0].bytes // (FILTERS * ROW),
                self.bench.ctx,
            )
        else:
            raise Error("there is no kernel ", kernel)

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
        var dense = Copied(folder + "/dense", self.bench.ctx, COPIES if whole else 1)
        gemm_portable[Self.dtype, RELU, True](
            g, self.operands(self.bench.expected, dense.at[Self.dtype](0)), Batch(), self.bench.ctx
        )
        var arrays = List[Copied]()
        if whole:
            arrays.append(dense^)
        else:
            for i in range(3 if kernel == "steps" else 2):
                arrays.append(Copied(folder + "/" + String(i), self.bench.ctx))
        self.bench.fill(self.bench.y, count, 9, 3)
        self.launch(kernel, g, arrays, 0)
        var error = self.bench.difference(count)

        var launches = launches_of(g)
        self.bench.begin()
        for i in range(launches):
            self.launch(kernel, g, arrays, i)
        print("row", index, self.bench.end(launches, rounds=3, repeats=3), error)


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
    for line in lines:
        if line.split()[1] == name:
            geometries.append(square(line, 2))
    if not geometries:
        return
    var timer = Timer[dtype](geometries)
    for i in range(len(lines)):
        var words = lines[i].split()
        if words[1] == name:
            timer.measure(i, String(words[0]), square(lines[i], 2), String(words[8]))


def program() raises:
    """Times what the file asks for.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    var lines = read_lines()
    print("#", DeviceContext().name())
    measure[DType.bfloat16, "bfloat16"](lines)
    measure[DType.float32, "float32"](lines)
