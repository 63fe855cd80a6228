"""Times every tile of the GEMM on every product of a list; ops/gemm/tune.py runs it.

Reads lines `images side channels filters kernel stride epilogue` (images of side x side) and prints
for each line and tile `row images side channels filters kernel stride epilogue config splits us
error`, or of a tile of turned.mojo `turned` and the same: the time of a launch, with other filters
each time; and the difference from the CUDA-core kernel, relative, in the Frobenius norm. The first
line is `# ` and the GPU.
"""

from max.gpu.host import DeviceBuffer
from std.math import ceildiv

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.window import PixelBox
from ..measure import Bench, launches_of, read_lines, square
from ..operands import F32, Batch, Data, Operands
from .gpu import gemm_portable, gemm_tile
from .tuning import (
    CONFIGS,
    FIRST_PINGPONG,
    FIRST_RESIDENT,
    FIRST_TURNED,
    PINGPONG,
    RESIDENT,
    TURNED,
)
from .turned import turned_tiles

comptime HALF = DType.bfloat16
"""What is timed; float16 takes as long."""
comptime FILTERS = 1 << 24
"""Numbers to draw filters from: 32 MB."""


struct Tuner:
    """Times tiles."""

    var bench: Bench[HALF]
    """A GPU, and buffers for the largest product."""
    var w: DeviceBuffer[HALF]
    """Filters."""
    var residual: DeviceBuffer[HALF]
    """Residual."""

    def __init__(out self, geometries: List[Geometry]) raises:
        """Makes and fills the buffers.

        Args:
            geometries: Of all products.

        Raises:
            If the GPU lacks memory.
        """
        self.bench = Bench[HALF](geometries)
        var numbers = len(self.bench.y)
        self.w = self.bench.ctx.enqueue_create_buffer[HALF](FILTERS)
        self.residual = self.bench.ctx.enqueue_create_buffer[HALF](numbers)
        self.bench.fill(self.w, FILTERS, 2, 0.05)
        self.bench.fill(self.residual, numbers, 3, 1)

    def operands(self, y: DeviceBuffer[HALF], filters: Int) -> Operands[HALF]:
        """Names the tensors.

        Args:
            y: Where the result goes.
            filters: Where the filters begin.

        Returns:
            The operands.
        """
        return Operands[HALF](
            rebind[Data[HALF]](self.bench.x.unsafe_ptr()),
            rebind[Data[HALF]](self.w.unsafe_ptr()).unsafe_offset(filters),
            rebind[Data[F32]](self.bench.bias.unsafe_ptr()),
            rebind[Data[HALF]](self.residual.unsafe_ptr()),
            rebind[Data[HALF]](y.unsafe_ptr()),
        )

    def timed[epilogue: Epilogue, index: Int](self, g: Geometry, splits: Int) raises -> Float64:
        """Times a tile.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile, as a row's `config`.

        Args:
            g: Sizes.
            splits: Blocks that share a tile.

        Returns:
            Microseconds of a launch.

        Raises:
            If a launch or a call of the driver fails.
        """
        var size = g.depth() * g.f
        var launches = launches_of(g)
        self.bench.begin()
        for i in range(launches):
            var o = self.operands(self.bench.y, i % (FILTERS // size) * size)
            gemm_tile[HALF, epilogue, index](g, o, splits, self.bench.ctx)
        return self.bench.end(launches, rounds=1, repeats=5)

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
        gemm_portable[HALF, epilogue, True](
            g, self.operands(self.bench.expected, 0), Batch(), self.bench.ctx
        )
        comptime for i in range(len(CONFIGS)):
            comptime config = CONFIGS[i]
            var blocks = ceildiv(g.pixels(), config.rows()) * ceildiv(g.f, config.columns)
            self.tune_splits[epilogue, i](g, line, blocks, 1, 8 if config.split else 1)
        comptime for i in range(len(RESIDENT)):
            comptime config = RESIDENT[i]
            var blocks = PixelBox[config.rows()](g).tiles(g) * ceildiv(g.f, config.columns)
            comptime least = 2 if config.split else 1
            # Blocks do not go from tile to tile: of many, every one begins anew.
            if blocks <= 1200:
                self.tune_splits[epilogue, FIRST_RESIDENT + i](
                    g, line, blocks, least, 8 if config.split else 1
                )
        comptime if not epilogue.adds:
            comptime for i in range(len(PINGPONG)):
                comptime config = PINGPONG[i]
                if config.takes(g.r * g.s * ceildiv(g.c, 64), epilogue):
                    self.tune_splits[epilogue, FIRST_PINGPONG + i](g, line, 0, 1, 1)
        comptime for i in range(len(TURNED)):
            if turned_tiles[TURNED[i]](g, chunks=ceildiv(g.c, 64)) > 0:
                self.tune_splits[epilogue, FIRST_TURNED + i](g, line, 0, 1, 1)

    def tune_splits[
        epilogue: Epilogue, index: Int
    ](self, g: Geometry, line: String, blocks: Int, least: Int, most: Int) raises:
        """Times a tile, shared by 1, 2, 4, 8 blocks, and prints a row for each.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile, as a row's `config`.

        Args:
            g: Sizes.
            line: What names the product.
            blocks: How many there are if none is shared.
            least: Blocks that share a tile at least.
            most: Blocks that share a tile at most.

        Raises:
            If a launch fails.
        """
        var count = g.pixels() * g.f
        var splits = least
        while splits <= most:
            if splits > g.r * g.s * ceildiv(g.c, 64) or (most > 1 and blocks * splits > 600):
                break
            self.bench.fill(self.bench.y, count, 9, 3)
            gemm_tile[HALF, epilogue, index](
                g, self.operands(self.bench.y, 0), splits, self.bench.ctx
            )
            var error = self.bench.difference(count)
            # ops/gemm/tune.py makes the table of the rows; it has none of TURNED.
            comptime kind = "row" if index < FIRST_TURNED else "turned"
            var us = self.timed[epilogue, index](g, splits)
            print(kind, line, index, splits, us, error, flush=True)
            splits *= 2


def program() raises:
    """Times what the file asks for.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    var lines = read_lines()
    var geometries = [square(line, 0) for line in lines]
    var tuner = Tuner(geometries)
    print("#", tuner.bench.ctx.name())
    for i in range(len(lines)):
        var epilogue = lines[i].split()[6]
        if epilogue == "add_relu":
            tuner.tune[Epilogue("add_relu")](geometries[i], lines[i])
        elif epilogue == "gelu":
            tuner.tune[Epilogue("gelu")](geometries[i], lines[i])
        else:
            tuner.tune[Epilogue("relu")](geometries[i], lines[i])
