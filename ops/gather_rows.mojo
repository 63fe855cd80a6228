"""Rows in another order, as of windows and back, with the sum and the layer norm beside them.

    rows[n, r] = x[n, source(r)]                    of x[N, R, C], whole rows of C
    sum[n, r]  = onto[n, r] + rows[n, r]            if the op adds
    y[n, r]    = layer_norm(sum or rows)[n, r]      if it norms

`source` is a roll of an image of H x W rows (torch's) before or behind a permute of its axes: Swin's
shifted windows (Liu et al. 2021, arXiv:2103.14030), MaxViT's windows and grids. A window's pixels are
read, or written, where they lie, by the op that has to read them anyway.

A CPU gives each core blocks of rows. A GPU keeps a row in the registers of 4 to 32 lanes, which find
its source by products and shifts; C is a multiple of 16 bytes, up to 2 KB. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .division import quotient, reciprocal
from .kernel_argument import KernelArgument
from .launch import launch
from .layernorm import LONGEST, THREADS, load_vectors, normalise_row, normalise_vectors
from .operands import F32, ON_CPU, Data, data, narrowed, widened
from .rows import WIDTH, over_rows

comptime AXES = 4
"""Axes that an image's rows are permuted by, at most."""


struct Divisor(KernelArgument, TrivialRegisterPassable):
    """A size that kernels divide by (division.mojo)."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var size: UInt32
    """What is divided by."""
    var factor: UInt32
    """What is multiplied by instead."""
    var shift: UInt32
    """And shifted by then."""

    def __init__(out self, size: Int):
        """Prepares divisions.

        Args:
            size: From 1 to 2^31.
        """
        self.size = UInt32(size)
        self.factor, self.shift = reciprocal(size)

    @always_inline
    def split(self, number: UInt32) -> Tuple[UInt32, UInt32]:
        """Divides.

        Args:
            number: Less than 2^31.

        Returns:
            The quotient and the rest.
        """
        var whole = quotient(number, self.factor, self.shift)
        return whole, number - whole * self.size


struct RowMap(KernelArgument, TrivialRegisterPassable):
    """Which row of x a row of the result is."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var rows: Divisor
    """Rows of an image."""
    var wide: Divisor
    """W of the image that is rolled."""
    var high: UInt32
    """Its H."""
    var down: UInt32
    """How far it is rolled down; less than H."""
    var right: UInt32
    """How far it is rolled right; less than W."""
    var rolls_first: UInt32
    """1 if the permute comes behind the roll."""
    var sizes: StaticTuple[Divisor, AXES]
    """Of the permute's result, the last axis first."""
    var steps: StaticTuple[UInt32, AXES]
    """From one index of such an axis to the next, in rows of what is permuted."""

    def __init__(out self, given: Data[DType.int64]):
        """Reads the map.

        Args:
            given: H, W, the shifts down and right, of any sign, and whether the roll comes first; then
                the sizes of four axes, the last one first, and their steps.
        """
        var high, wide = Int(given[unsafe_offset=0]), Int(given[unsafe_offset=1])
        self.rows, self.wide, self.high = Divisor(high * wide), Divisor(wide), UInt32(high)
        self.down = UInt32(Int(given[unsafe_offset=2]) % high)
        self.right = UInt32(Int(given[unsafe_offset=3]) % wide)
        self.rolls_first = UInt32(given[unsafe_offset=4])
        self.sizes = StaticTuple[Divisor, AXES](fill=Divisor(1))
        self.steps = StaticTuple[UInt32, AXES](fill=0)
        for axis in range(AXES):
            self.sizes[axis] = Divisor(Int(given[unsafe_offset=5 + axis]))
            self.steps[axis] = UInt32(given[unsafe_offset=5 + AXES + axis])

    @always_inline
    def source(self, row: Int) -> Int:
        """Finds a row's source.

        Args:
            row: Of the result; less than 2^31.

        Returns:
            The number of a row of x.
        """
        var image, at = self.rows.split(UInt32(row))
        if self.rolls_first == 0:
            at = self._rolled(at)
        at = self._permuted(at)
        if self.rolls_first == 1:
            at = self._rolled(at)
        return Int(image * self.rows.size + at)

    @always_inline
    def _rolled(self, pixel: UInt32) -> UInt32:
        """Finds the pixel that a roll has brought here."""
        var p, q = self.wide.split(pixel)
        p = p - self.down if p >= self.down else p + (self.high - self.down)
        q = q - self.right if q >= self.right else q + (self.wide.size - self.right)
        return p * self.wide.size + q

    @always_inline
    def _permuted(self, row: UInt32) -> UInt32:
        """Finds the row that a permute has brought here."""
        var rest = row
        var at = UInt32(0)
        comptime for axis in range(AXES - 1):
            var whole, index = self.sizes[axis].split(rest)
            at += index * self.steps[axis]
            rest = whole
        return at + rest * self.steps[AXES - 1]


@fieldwise_init
struct GatherTensors[dtype: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors of the op.

    Nothing but pointers: LLVM then knows that a kernel's are global memory.

    Parameters:
        dtype: Of all but the norm's.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """[N, R, C]."""
    var onto: Data[Self.dtype]
    """What is added to [N, R, C]; any pointer if the op does not add."""
    var weight: Data[F32]
    """[C], of the norm; any pointer if the op does not norm."""
    var bias: Data[F32]
    """Likewise."""
    var sum: Data[Self.dtype]
    """The sum [N, R, C]; written by an op that adds and norms."""
    var y: Data[Self.dtype]
    """The result [N, R, C]."""


@always_inline
def _add_row[dtype: DType, //](a: Data[dtype], b: Data[dtype], to: Data[dtype], columns: Int):
    """Adds two rows on a CPU."""
    var whole = columns // WIDTH * WIDTH
    for c in range(0, whole, WIDTH):
        var sum = widened(a.unsafe_load[width=WIDTH](c)) + widened(b.unsafe_load[width=WIDTH](c))
        to.unsafe_store(c, narrowed[dtype](sum))
    for c in range(whole, columns):
        var sum = widened(a[unsafe_offset=c]) + widened(b[unsafe_offset=c])
        to[unsafe_offset=c] = narrowed[dtype](sum)


def gather_rows_cpu[
    dtype: DType, //, adds: Bool, norms: Bool
](o: GatherTensors[dtype], map: RowMap, rows: Int, columns: Int, eps: Float32):
    """Goes through the rows on all cores.

    Parameters:
        dtype: Of the tensors, float32 or bfloat16.
        adds: Whether the op adds.
        norms: Whether it norms.

    Args:
        o: Tensors.
        map: Which row is which.
        rows: Rows of all images.
        columns: C.
        eps: Added to the variance.
    """

    def row(index: Int) {var}:
        var source = o.x.unsafe_offset(map.source(index) * columns)
        var to = o.y.unsafe_offset(index * columns)
        comptime if adds:
            var sum = o.sum.unsafe_offset(index * columns) if norms else to
            _add_row(o.onto.unsafe_offset(index * columns), source, sum, columns)
            source = sum
        comptime if norms:
            normalise_row(source, to, o.weight, o.bias, columns, eps)
        elif not adds:
            unsafe_memcpy(dest=to, src=source, count=columns)

    over_rows(row, rows)


def _label(adds: Bool, norms: Bool) -> StaticString:
    """Names what the op does for a profiler."""
    if adds:
        return "add_layernorm" if norms else "add"
    return "layernorm" if norms else "copy"


@__name(t"gather_rows_{_label(adds, norms)}_{lanes}x{vectors}_{dtype}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def gather_rows_kernel[
    dtype: DType, lanes: Int, vectors: Int, adds: Bool, norms: Bool
](o: GatherTensors[dtype], map: RowMap, rows: Int32, columns: Int32, eps: Float32):
    """Takes one row in each group of lanes, which stays in their registers.

    Parameters:
        dtype: Of the tensors.
        lanes: Threads of a row: 4, 8, 16 or 32.
        vectors: Vectors of 16 bytes of a thread; they cover the columns.
        adds: Whether the op adds.
        norms: Whether it norms.

    Args:
        o: Tensors.
        map: Which row is which.
        rows: Rows of all images.
        columns: C, a multiple of 16 bytes.
        eps: Added to the variance.
    """
    comptime WIDE = 16 // size_of[dtype]()
    var first = Int(thread_idx.x) % lanes * WIDE
    var index = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) // lanes
    var inside = index < Int(rows)
    var at = index * Int(columns)
    var source = o.x.unsafe_offset(map.source(index if inside else 0) * Int(columns))
    wait_on_dependent_grids()
    launch_dependent_grids()
    var packed = load_vectors[lanes, vectors](source, Int(columns), first=first, inside=inside)
    comptime if adds:
        var to = o.sum.unsafe_offset(at) if norms else o.y.unsafe_offset(at)
        var onto = load_vectors[lanes, vectors](
            o.onto.unsafe_offset(at), Int(columns), first=first, inside=inside
        )
        comptime for v in range(vectors):
            var c = first + v * lanes * WIDE
            if inside and c < Int(columns):
                packed[v] = (widened(onto[v]) + widened(packed[v])).cast[dtype]()
                to.unsafe_store[alignment=16](c, packed[v])
    comptime if norms:
        normalise_vectors[lanes, "layernorm"](
            packed,
            o.y.unsafe_offset(at),
            o.weight,
            o.bias,
            Int(columns),
            first=first,
            inside=inside,
            eps=eps,
        )
    elif not adds:
        comptime for v in range(vectors):
            var c = first + v * lanes * WIDE
            if inside and c < Int(columns):
                o.y.unsafe_store[alignment=16](at + c, packed[v])


def gather_rows_gpu[
    dtype: DType, //, adds: Bool, norms: Bool
](
    o: GatherTensors[dtype],
    map: RowMap,
    rows: Int,
    columns: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel whose threads cover a row.

    Parameters:
        dtype: Of the tensors.
        adds: Whether the op adds.
        norms: Whether it norms.

    Args:
        o: Tensors.
        map: Which row is which.
        rows: Rows of all images.
        columns: C.
        eps: Added to the variance.
        ctx: The GPU.

    Raises:
        If a row is no multiple of 16 bytes or too long, there are 2^31 rows, or the launch fails.
    """
    var bytes = columns * size_of[dtype]()
    if bytes % 16 != 0 or bytes > LONGEST:
        raise Error("gather_rows: expects rows of a multiple of 16 bytes up to 2 KB")
    if rows > Int(Int32.MAX):
        raise Error("gather_rows: expects fewer than 2^31 rows but has ", rows)
    comptime for lanes in [4, 8, 16, 32]:
        comptime EACH = 4 if lanes == 32 else 3
        if bytes <= 16 * lanes * EACH:
            launch[gather_rows_kernel[dtype, lanes, EACH, adds, norms]](
                ctx,
                o,
                map,
                Int32(rows),
                Int32(columns),
                eps,
                grid_dim=ceildiv(rows, THREADS // lanes),
                block_dim=THREADS,
            )
            return


@register("gather_rows")
struct GatherRows:
    """Gives rows of x[N, R, C] another order; adds them to others, norms them, or both."""

    @staticmethod
    def execute[
        target: StaticString, adds: Bool, norms: Bool
    ](
        y: OutputTensor[rank=3, ...],
        sum: OutputTensor[dtype=y.dtype, rank=3, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        onto: InputTensor[dtype=y.dtype, rank=3, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        map: InputTensor[dtype=DType.int64, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            adds: Whether the op adds.
            norms: Whether it norms.

        Args:
            y: The result [N, R, C].
            sum: The sum [N, R, C] if the op adds and norms; else nobody writes it.
            x: Rows [N, R, C].
            onto: What is added to [N, R, C]; any tensor if the op does not add.
            weight: [C], of the norm; any vector if the op does not norm.
            bias: Likewise.
            map: In host memory, the numbers of `RowMap`.
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If the rows do not fit the kernels, or a launch fails.
        """
        if y.size() == 0:
            return
        var columns = y.shape()[2]
        var rows = y.size() // columns
        var epsilon = data(eps)[unsafe_offset=0]
        var o = GatherTensors[y.dtype](
            x=data(x),
            onto=data(onto),
            weight=data(weight),
            bias=data(bias),
            sum=data(sum),
            y=data(y),
        )
        comptime if target == "cpu":
            comptime assert ON_CPU[y.dtype], "gather_rows: a CPU expects float32 or bfloat16"
            gather_rows_cpu[adds, norms](o, RowMap(data(map)), rows, columns, epsilon)
        else:
            gather_rows_gpu[adds, norms](o, RowMap(data(map)), rows, columns, epsilon, ctx)
