"""Values added to rows that indices name: y = x, then y[n, index[n, e], c] += values[n, e, c].

    x[N, R, C]         rows
    index[N, E]        the row of each value of E, or [N, E, C]: of each number
    values[N, E, C]    what is added, in the order of e
    y[N, R, C]         in float32, or float64: sums are rounded by whom they are given to

It is torch's scatter_add, and what a gather's gradient is. Each number of y is summed by one core or
thread, in the order of the values, so that the result is the same each time, which that of atomics
is not. A CPU gives each core images and blocks of columns. A GPU gives each thread a column of some
rows: it reads all indices of its image, and adds what is of its rows. So the time grows with E, and
the rows are divided until every multiprocessor has work.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from .device import Device
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import CHECKED, WIDE, Data, data, widened
from .parallel import over_cores

comptime THREADS = 128
"""Threads of a GPU's block."""
comptime WAVES = 4
"""Blocks that each multiprocessor gets, as long as there are rows to divide."""
comptime BLOCK = 64
"""Columns that a core computes at a time."""
comptime VECTOR = 16
"""Numbers of a vector on a CPU."""


@fieldwise_init
struct ScatterTensors[dtype: DType, integer: DType](KernelArgument, TrivialRegisterPassable):
    """The tensors of the op.

    Parameters:
        dtype: Of x and the values.
        integer: Of the indices.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """[N, R, C]."""
    var index: Data[Self.integer]
    """[N, E], or [N, E, C]."""
    var values: Data[Self.dtype]
    """[N, E, C]."""
    var y: Data[WIDE[Self.dtype]]
    """[N, R, C]."""


@fieldwise_init
struct ScatterSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of the op."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var r: Int64
    """R."""
    var c: Int64
    """C."""
    var e: Int64
    """E."""
    var each: UInt32
    """1 if each number has an index of its own, and not each row."""

    @always_inline
    def rows(self) -> Int:
        """Counts the rows.

        Returns:
            R.
        """
        return Int(self.r)

    @always_inline
    def columns(self) -> Int:
        """Counts the columns.

        Returns:
            C.
        """
        return Int(self.c)

    @always_inline
    def values(self) -> Int:
        """Counts the values.

        Returns:
            E.
        """
        return Int(self.e)

    @always_inline
    def at(self, image: Int, e: Int, c: Int) -> Int:
        """Finds an index.

        Args:
            image: Its number.
            e: Which value.
            c: Its column.

        Returns:
            Its place.
        """
        var row = image * self.values() + e
        return row * self.columns() + c if self.each == 1 else row

    @always_inline
    def row(self, index: Int) -> Int:
        """Finds the row that an index names; one below 0 counts from the end.

        Args:
            index: Any.

        Returns:
            The row; none of 0 to R - 1 if there is none.
        """
        return index + self.rows() if index < 0 else index


def scatter_add_cpu[
    dtype: DType, integer: DType, //
](o: ScatterTensors[dtype, integer], sizes: ScatterSizes, images: Int) -> Bool:
    """Adds on all cores.

    Parameters:
        dtype: Of x and the values.
        integer: Of the indices.

    Args:
        o: Tensors.
        sizes: Sizes.
        images: N.

    Returns:
        Whether every index is that of a row; values of others are left out.
    """
    comptime SUM = WIDE[dtype]
    var wrong = List[UInt8](length=1, fill=0)
    var outside = wrong.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()
    var blocks = ceildiv(sizes.columns(), BLOCK)

    def task(number: Int) {var}:
        var image, block = number // blocks, number % blocks
        var first = block * BLOCK
        var count = min(BLOCK, sizes.columns() - first)
        var whole = count // VECTOR * VECTOR
        for row in range(sizes.rows()):
            var at = (image * sizes.rows() + row) * sizes.columns() + first
            for c in range(0, whole, VECTOR):
                o.y.unsafe_store(at + c, widened[SUM](o.x.unsafe_load[width=VECTOR](at + c)))
            for c in range(whole, count):
                o.y[unsafe_offset=at + c] = widened[SUM](o.x[unsafe_offset=at + c])
        for e in range(sizes.values()):
            var given = o.values.unsafe_offset(
                (image * sizes.values() + e) * sizes.columns() + first
            )
            var step = 1 if sizes.each == 1 else count
            for begin in range(0, count, step):
                var row = sizes.row(Int(o.index[unsafe_offset=sizes.at(image, e, first + begin)]))
                if row < 0 or row >= sizes.rows():
                    outside[] = 1
                    continue
                var to = o.y.unsafe_offset(
                    (image * sizes.rows() + row) * sizes.columns() + first + begin
                )
                if sizes.each == 1:
                    to[] += widened[SUM](given[unsafe_offset=begin])
                    continue
                for c in range(0, whole, VECTOR):
                    var sum = to.unsafe_load[width=VECTOR](c)
                    sum += widened[SUM](given.unsafe_load[width=VECTOR](c))
                    to.unsafe_store(c, sum)
                for c in range(whole, count):
                    to[unsafe_offset=c] += widened[SUM](given[unsafe_offset=c])

    over_cores(task, images * blocks)
    return wrong[0] == 0


@__name(t"scatter_add_{dtype}_{integer}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def scatter_add_kernel[
    dtype: DType, integer: DType
](o: ScatterTensors[dtype, integer], sizes: ScatterSizes, columns: Int64, rows: Int64):
    """Adds what is of a thread's rows to a column of them.

    Parameters:
        dtype: Of x and the values.
        integer: Of the indices.

    Args:
        o: Tensors; an index that is that of no row is left out.
        sizes: Sizes.
        columns: Of all images.
        rows: Of a block.
    """
    var column = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    wait_on_dependent_grids()
    launch_dependent_grids()
    if column >= Int(columns):
        return
    var image = column // sizes.columns()
    var c = column - image * sizes.columns()
    var begin = Int(block_idx.y) * Int(rows)
    var end = min(begin + Int(rows), sizes.rows())
    var y = o.y.unsafe_offset(image * sizes.rows() * sizes.columns() + c)
    var x = o.x.unsafe_offset(image * sizes.rows() * sizes.columns() + c)
    for row in range(begin, end):
        var at = row * sizes.columns()
        y[unsafe_offset=at] = widened[WIDE[dtype]](x[unsafe_offset=at])
    var values = o.values.unsafe_offset(image * sizes.values() * sizes.columns() + c)
    for e in range(sizes.values()):
        var row = sizes.row(Int(o.index[unsafe_offset=sizes.at(image, e, c)]))
        if row >= begin and row < end:
            var given = values[unsafe_offset=e * sizes.columns()]
            y[unsafe_offset=row * sizes.columns()] += widened[WIDE[dtype]](given)


def scatter_add_gpu[
    dtype: DType, integer: DType, //
](o: ScatterTensors[dtype, integer], sizes: ScatterSizes, images: Int, ctx: DeviceContext) raises:
    """Enqueues the kernel, with as many blocks of rows as keep the GPU busy.

    Parameters:
        dtype: Of x and the values.
        integer: Of the indices.

    Args:
        o: Tensors.
        sizes: Sizes.
        images: N.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var columns = images * sizes.columns()
    var blocks = ceildiv(columns, THREADS)
    var parts = min(sizes.rows(), ceildiv(WAVES * Device(ctx).multiprocessors, blocks))
    var rows = ceildiv(sizes.rows(), parts)
    launch[scatter_add_kernel[dtype, integer]](
        ctx,
        o,
        sizes,
        Int64(columns),
        Int64(rows),
        grid_dim=(blocks, ceildiv(sizes.rows(), rows)),
        block_dim=THREADS,
    )


@register("scatter_add")
struct ScatterAdd:
    """Adds values[N, E, C] to those rows of x[N, R, C] that index names."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[rank=y.rank, ...],
        index: InputTensor,
        values: InputTensor[dtype=x.dtype, rank=y.rank, ...],
        sizes: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: The sums [N, R, C], float32; float64 of float64.
            x: Rows [N, R, C].
            index: Integers [N, E], or [N, E, C].
            values: What is added [N, E, C].
            sizes: In host memory: R, C, E, and whether index has C.
            ctx: The device.

        Raises:
            If a CPU finds an index that is that of no row, or a launch fails.
        """
        comptime assert y.dtype == WIDE[x.dtype], "scatter_add: sums are float32, or float64"
        if y.size() == 0:
            return
        var o = ScatterTensors[x.dtype, index.dtype](
            x=data(x),
            index=data(index),
            values=data(values),
            y=rebind[Data[WIDE[x.dtype]]](data(y)),
        )
        var given = data(sizes)
        var shape = ScatterSizes(
            r=given[unsafe_offset=0],
            c=given[unsafe_offset=1],
            e=given[unsafe_offset=2],
            each=UInt32(given[unsafe_offset=3]),
        )
        var images = y.size() // (shape.rows() * shape.columns())
        comptime if target == "cpu":
            comptime assert CHECKED[
                x.dtype
            ], "scatter_add: a CPU expects float32, bfloat16, float64"
            if not scatter_add_cpu(o, shape, images):
                raise Error("scatter_add: expects indices from ", -shape.r, " to ", shape.r - 1)
        else:
            scatter_add_gpu(o, shape, images, ctx)
