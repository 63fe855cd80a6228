"""Times every tile of the GEMM on every product of a list; ops/gemm/tune.py runs it.

Reads lines `images side channels filters kernel stride epilogue beside apart` (images of side x side;
a second source of `beside` channels and stride `apart`) and prints for each line and tile `row`, the
line, `config splits us error`, or of a tile of turned.mojo `turned` and the same: the time of a
launch, with other filters each time; and the difference from the CUDA-core kernel, relative, in the
Frobenius norm. The first line is `# ` and the GPU. `program_of_shortcuts` does so for sums of two
products, with the tiles of hopper.mojo; `program_of_bytes` for products of 8-bit integers, with those
and pingpong.mojo's, and compares them with the smallest of the former.
"""

from max.gpu.host import DeviceBuffer
from std.math import ceildiv

from ..dot import I8, U8
from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.pixel_box import PixelBox
from ..hopper.shared import ROW
from ..measure import Bench, launches_of, read_lines, square
from ..operands import F32, Batch, Data, Operands, Scales
from .gpu import enqueue_tile, gemm_portable
from .hopper import hopper_shortcut
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
"""Numbers to draw filters from."""
comptime PLAIN = 4
"""The tile of CONFIGS that others are compared with in 8 bits."""


struct Product(Copyable):
    """A line of the file."""

    var line: String
    """The line."""
    var g: Geometry
    """Sizes."""
    var beside: Geometry
    """Those of a second source, of windows of 1 x 1; without channels if there is none."""

    def __init__(out self, line: String) raises:
        """Reads a line.

        Args:
            line: Its words.

        Raises:
            If they are no numbers.
        """
        var words = line.split()
        self.line, self.g = line, square(line, 0)
        self.beside = self.g
        self.beside.r = self.beside.s = 1
        self.beside.pad_h = self.beside.pad_w = 0
        self.beside.c, self.beside.stride_h = Int(words[7]), Int(words[8])
        self.beside.stride_w = self.beside.stride_h
        self.beside.h = self.g.p * self.beside.stride_h
        self.beside.w = self.beside.h

    def steps(self, width: Int) -> Int:
        """Counts the steps of K.

        Args:
            width: Channels of a step.

        Returns:
            Those of both sources.
        """
        return self.g.r * self.g.s * ceildiv(self.g.c, width) + ceildiv(self.beside.c, width)

    def filters(self) -> Int:
        """Counts the numbers of the filters.

        Returns:
            Those of both sources.
        """
        return (self.g.depth() + self.beside.c) * self.g.f


struct Tuner[dtype: DType, right: DType, sources: Int]:
    """Times tiles.

    Parameters:
        dtype: Of x, the residual and y: `HALF`, or uint8.
        right: Of w: `HALF`, or int8.
        sources: 2 if the product of a second source is added, in 16 bits, else 1.
    """

    comptime BYTES = Self.dtype == U8
    """Whether products are of 8-bit integers."""
    comptime STEP = ROW if Self.BYTES else 64
    """Channels of a step of K."""

    var bench: Bench[Self.dtype]
    """A GPU, and buffers for the largest product."""
    var w: DeviceBuffer[Self.right]
    """Filters."""
    var residual: DeviceBuffer[Self.dtype]
    """Residual, or the second source's x."""
    var scales: DeviceBuffer[F32]
    """Of 8-bit sums."""

    def __init__(out self, products: List[Product]) raises:
        """Makes and fills the buffers.

        Args:
            products: All that are timed.

        Raises:
            If the GPU lacks memory.
        """
        self.bench = Bench[Self.dtype]([product.g for product in products])
        var numbers = len(self.bench.y)
        var most = 0
        for product in products:
            most = max(most, product.g.f)
            ref b = product.beside
            numbers = max(numbers, b.n * b.h * b.w * b.c)
        self.w = self.bench.ctx.enqueue_create_buffer[Self.right](FILTERS)
        self.residual = self.bench.ctx.enqueue_create_buffer[Self.dtype](numbers)
        self.scales = self.bench.ctx.enqueue_create_buffer[F32](most)
        comptime most_w = Float32(127) if Self.BYTES else Float32(0.05)
        comptime most_x = Float32(127) if Self.BYTES else Float32(1)
        comptime if Self.BYTES:  # else it is filled already
            self.bench.fill(self.bench.x, len(self.bench.x), 1, most_x)
        self.bench.fill(self.w, FILTERS, 2, most_w)
        self.bench.fill(self.residual, numbers, 3, most_x)
        self.bench.fill(self.scales, most, 5, 0.001)

    def operands(
        self, y: DeviceBuffer[Self.dtype], filters: Int
    ) -> Operands[Self.dtype, Self.dtype, Self.right]:
        """Names the tensors.

        Args:
            y: Where the result goes.
            filters: Where the filters begin.

        Returns:
            The operands.
        """
        return Operands[Self.dtype, Self.dtype, Self.right](
            rebind[Data[Self.dtype]](self.bench.x.unsafe_ptr()),
            rebind[Data[Self.right]](self.w.unsafe_ptr()).unsafe_offset(filters),
            rebind[Data[F32]](self.bench.bias.unsafe_ptr()),
            rebind[Data[Self.dtype]](self.residual.unsafe_ptr()),
            rebind[Data[Self.dtype]](y.unsafe_ptr()),
        )

    def beside(
        self, product: Product, o: Operands[Self.dtype, Self.dtype, Self.right]
    ) -> Operands[Self.dtype, Self.dtype, Self.right]:
        """Names the tensors of the second source.

        Args:
            product: Both sources.
            o: The tensors of the first.

        Returns:
            Its filters lie behind the first's.
        """
        var w = o.w.unsafe_offset(product.g.depth() * product.g.f)
        return Operands[Self.dtype, Self.dtype, Self.right](o.residual, w, o.bias, o.y, o.y)

    def expect[epilogue: Epilogue](self, product: Product) raises:
        """Computes what the tiles are compared with.

        Parameters:
            epilogue: What the accumulator goes through.

        Args:
            product: What is computed.

        Raises:
            If a launch fails.
        """
        ref g = product.g
        comptime if Self.BYTES:
            self.launch[epilogue, PLAIN](product, self.bench.expected, 0, 1)
            return
        ref ctx = self.bench.ctx
        var all = self.operands(self.bench.expected, 0)
        var o = rebind[Operands[HALF]](all)
        comptime if Self.sources == 2:
            var more = rebind[Operands[HALF]](self.beside(product, all))
            gemm_portable[HALF, Epilogue("none"), True](product.beside, more, Batch(), ctx)
            o.residual = o.y
            gemm_portable[HALF, Epilogue("add_relu"), True](g, o, Batch(), ctx)
        else:
            gemm_portable[HALF, epilogue, True](g, o, Batch(), ctx)

    def launch[
        epilogue: Epilogue, index: Int
    ](self, product: Product, y: DeviceBuffer[Self.dtype], filters: Int, splits: Int) raises:
        """Enqueues a product in a tile.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile, as a row's `config`.

        Args:
            product: What is computed.
            y: Where the result goes.
            filters: Where the filters begin.
            splits: Blocks that share a tile.

        Raises:
            If the launch fails.
        """
        ref g = product.g
        var o = self.operands(y, filters)
        comptime if Self.sources == 2:
            hopper_shortcut[epilogue, CONFIGS[index]](
                g, o, product.beside, self.beside(product, o), splits, self.bench.ctx
            )
        elif Self.BYTES:
            comptime scaled = Epilogue(epilogue.name, scales=True)
            var scales = Scales(rebind[Data[F32]](self.scales.unsafe_ptr()))
            comptime for narrow in [False, True]:
                if narrow == self.is_narrow(g):
                    enqueue_tile[index, scaled, narrow](
                        [g], [o], splits, self.bench.ctx, scales={[scales]}
                    )
        else:
            enqueue_tile[index, epilogue]([g], [o], splits, self.bench.ctx)

    def is_narrow(self, g: Geometry) -> Bool:
        """Tells whether the stages of a product of 8-bit numbers have half of 128 bytes.

        Args:
            g: Sizes.

        Returns:
            False in 16 bits.
        """
        return Self.BYTES and 0 < g.c % ROW and g.c % ROW <= ROW // 2

    def timed[
        epilogue: Epilogue, index: Int
    ](self, product: Product, splits: Int) raises -> Float64:
        """Times a tile.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile, as a row's `config`.

        Args:
            product: What is computed.
            splits: Blocks that share a tile.

        Returns:
            Microseconds of a launch.

        Raises:
            If a launch or a call of the driver fails.
        """
        var size = product.filters()
        var launches = launches_of(product.g)
        self.bench.begin()
        for i in range(launches):
            self.launch[epilogue, index](
                product, self.bench.y, i % (FILTERS // size) * size, splits
            )
        return self.bench.end(launches, rounds=1, repeats=5)

    def tune[epilogue: Epilogue](self, product: Product) raises:
        """Times every tile on one product, and prints a row for each.

        Parameters:
            epilogue: What the accumulator goes through.

        Args:
            product: What is computed.

        Raises:
            If a launch fails.
        """
        ref g = product.g
        self.expect[epilogue](product)
        comptime for i in range(len(CONFIGS)):
            comptime config = CONFIGS[i]
            var blocks = ceildiv(g.pixels(), config.rows()) * ceildiv(g.f, config.columns)
            self.tune_splits[epilogue, i](product, blocks, 1, 8 if config.split else 1)
        comptime if Self.sources == 2:
            return
        comptime if not Self.BYTES:
            comptime for i in range(len(RESIDENT)):
                comptime config = RESIDENT[i]
                var blocks = PixelBox[config.rows()](g).tiles(g) * ceildiv(g.f, config.columns)
                comptime least = 2 if config.split else 1
                # Blocks do not go from tile to tile: of many, every one begins anew.
                if blocks <= 1200:
                    self.tune_splits[epilogue, FIRST_RESIDENT + i](
                        product, blocks, least, 8 if config.split else 1
                    )
        comptime if not epilogue.joins:
            comptime for i in range(len(PINGPONG)):
                comptime config = PINGPONG[i]
                var takes = config.takes(product.steps(Self.STEP), epilogue)
                if takes and not self.is_narrow(g):
                    self.tune_splits[epilogue, FIRST_PINGPONG + i](product, 0, 1, 1)
        comptime if Self.BYTES:
            return
        comptime for i in range(len(TURNED)):
            if turned_tiles[TURNED[i]](g, chunks=ceildiv(g.c, Self.STEP)) > 0:
                self.tune_splits[epilogue, FIRST_TURNED + i](product, 0, 1, 1)

    def tune_splits[
        epilogue: Epilogue, index: Int
    ](self, product: Product, blocks: Int, least: Int, most: Int) raises:
        """Times a tile, shared by 1, 2, 4, 8 blocks, and prints a row for each.

        Parameters:
            epilogue: What the accumulator goes through.
            index: Of the tile, as a row's `config`.

        Args:
            product: What is computed.
            blocks: How many there are if none is shared.
            least: Blocks that share a tile at least.
            most: Blocks that share a tile at most.

        Raises:
            If a launch fails.
        """
        var count = product.g.pixels() * product.g.f
        var splits = least
        while splits <= most:
            if splits > product.steps(Self.STEP) or (most > 1 and blocks * splits > 600):
                break
            self.bench.fill(self.bench.y, count, 9, 3)
            self.launch[epilogue, index](product, self.bench.y, 0, splits)
            var error = self.bench.difference(count)
            # ops/gemm/tune.py makes the table of the rows; it has none of TURNED.
            comptime kind = "row" if index < FIRST_TURNED else "turned"
            var us = self.timed[epilogue, index](product, splits)
            print(kind, product.line, index, splits, us, error, flush=True)
            splits *= 2


def program() raises:
    """Times what the file asks for, in 16 bits.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    _sweep[HALF, HALF]()


def program_of_shortcuts() raises:
    """Times what the file asks for, in 16 bits, with a second source.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    _sweep[HALF, HALF, 2]()


def program_of_bytes() raises:
    """Times what the file asks for, in 8 bits.

    Raises:
        If the file cannot be read, or anything fails on the GPU.
    """
    _sweep[U8, I8]()


def _sweep[dtype: DType, right: DType, sources: Int = 1]() raises:
    """Times every line of the file; results in 8 bits are rectified as they saturate."""
    var products = [Product(line) for line in read_lines()]
    var tuner = Tuner[dtype, right, sources](products)
    print("#", tuner.bench.ctx.name())
    for product in products:
        var epilogue = product.line.split()[6]
        comptime if sources == 1:
            if epilogue == "add_relu":
                comptime adds: StaticString = "add" if dtype == U8 else "add_relu"
                tuner.tune[Epilogue(adds)](product)
                continue
            if epilogue == "gelu":
                tuner.tune[Epilogue("gelu")](product)
                continue
        comptime plain: StaticString = "none" if dtype == U8 else "relu"
        tuner.tune[Epilogue(plain)](product)
