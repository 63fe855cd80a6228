"""Times every tile of the gradient of filters on every convolution of a list.

Reads lines `images side channels filters kernel stride` (images of side x side) and prints for each
line, tile and number of parts `row images side channels filters kernel stride config parts us error`:
the time of a gradient, with the sum of its parts; and the difference from the CUDA-core kernel,
relative, in the Frobenius norm. Config -1 is what the op chooses, -2 the kernel by mma.sync. The first
line is `# ` and the GPU. `ops/measure.py` builds it (`measure.build("conv2d_weight_grad.tune", ...)`).
"""

from max.gpu.host import DeviceBuffer

from ..device import Device
from ..geometry import Geometry
from ..measure import Bench, launches_of, read_lines, square
from ..operands import F32, Data
from .gpu import conv2d_weight_grad_gpu, weight_grad_portable
from ..hopper.conv import takes
from .hopper import CONFIGS, GradProblem, weight_grad_tile
from .mma import weight_grad_mma
from .parts import add_parts
from .tensors import WeightGrad

comptime HALF = DType.bfloat16
"""What is timed; float16 takes as long."""
comptime ROOM = 1 << 23
"""Sums of all parts at most, as in graphs/nodes.py."""
comptime MOST = 264
"""Parts at most, likewise."""


struct Tuner:
    """Times tiles."""

    var bench: Bench[HALF]
    """A GPU, and buffers for the largest convolution."""
    var dy: DeviceBuffer[HALF]
    """Gradient of the result."""
    var room: DeviceBuffer[F32]
    """Sums of the parts."""

    def __init__(out self, geometries: List[Geometry]) raises:
        """Makes and fills the buffers.

        Args:
            geometries: Of all convolutions.

        Raises:
            If the GPU lacks memory.
        """
        self.bench = Bench[HALF](geometries)
        var numbers = len(self.bench.y)
        self.dy = self.bench.ctx.enqueue_create_buffer[HALF](numbers)
        self.room = self.bench.ctx.enqueue_create_buffer[F32](ROOM)
        self.bench.fill(self.dy, numbers, 2, 1)

    def operands(self, dw: DeviceBuffer[HALF]) -> WeightGrad[HALF]:
        """Names the tensors.

        Args:
            dw: Where the result goes.

        Returns:
            The operands.
        """
        return WeightGrad[HALF](
            rebind[Data[HALF]](self.bench.x.unsafe_ptr()),
            rebind[Data[HALF]](self.dy.unsafe_ptr()),
            rebind[Data[HALF]](dw.unsafe_ptr()),
            rebind[Data[F32]](self.room.unsafe_ptr()),
        )

    def launch[index: Int](self, g: Geometry, parts: Int) raises:
        """Enqueues a gradient.

        Parameters:
            index: Of the tile, or as above.

        Args:
            g: Sizes.
            parts: Of the pixels; those for which there is room if they are chosen.

        Raises:
            If a launch fails.
        """
        var o = self.operands(self.bench.y)
        comptime if index == -2:
            weight_grad_mma(g, o, parts, self.bench.ctx)
        elif index == -1:
            conv2d_weight_grad_gpu[False](g, o, parts, self.bench.ctx)
        else:
            weight_grad_tile[CONFIGS[index]](g, o, parts, self.bench.ctx)
            if parts > 1:
                add_parts(o, g.f * g.depth(), parts, self.bench.ctx)

    def tune[index: Int](self, g: Geometry, line: String, parts: Int) raises:
        """Times a tile, and prints a row for it.

        Parameters:
            index: Of the tile, or as above.

        Args:
            g: Sizes.
            line: What names the convolution.
            parts: Of the pixels.

        Raises:
            If a launch fails.
        """
        var count = g.f * g.depth()
        self.bench.fill(self.bench.y, count, 9, 3)
        self.launch[index](g, parts)
        var error = self.bench.difference(count)
        var launches = min(launches_of(g), 10)
        self.bench.begin()
        for _ in range(launches):
            self.launch[index](g, parts)
        print("row", line, index, parts, self.bench.end(launches, rounds=2, repeats=3), error)


def program() raises:
    """Times what the file asks for.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    var lines = read_lines()
    var geometries = [square(line, 0) for line in lines]
    var tuner = Tuner(geometries)
    var multiprocessors = Device(tuner.bench.ctx).multiprocessors
    print("#", tuner.bench.ctx.name())
    for i in range(len(lines)):
        var g = geometries[i]
        var most = max(1, min(ROOM // (g.f * g.depth()), MOST))
        weight_grad_portable(g, tuner.operands(tuner.bench.expected), most, tuner.bench.ctx)
        tuner.tune[-1](g, lines[i], most)
        tuner.tune[-2](g, lines[i], most)
        if not takes[HALF](g):
            continue
        comptime for index in range(len(CONFIGS)):
            comptime config = CONFIGS[index]
            var tiles = Int(GradProblem(g, config, 1).schedule.tiles)
            var seen = 0
            for waves in range(1, 4):
                var parts = max(1, min(most, waves * multiprocessors // tiles))
                if parts != seen:
                    tuner.tune[index](g, lines[i], parts)
                seen = parts
