"""Layer norm (Ba et al. 2016, section 3) and RMS norm (arXiv:1910.07467) over the last axis.

    layernorm        y[..., C] = (x - mean) / sqrt(var + eps) * weight + bias   y of any dtype
    layernorm_first  y[N, C] of the first token of each image of x[N, T, C]
    rms_norm         y[..., C] = x / sqrt(mean(x^2) + eps) * weight

Statistics in float32; the variance is that of x - mean, never E[x^2] - mean^2. A CPU gives each core
a block of rows and runs vectors along them. A GPU reads a row once, 16 bytes a thread at a time, and
keeps it in the registers of 8 to 32 lanes (C up to 1024 in 16 bits, and a multiple of 16 bytes);
other rows take a warp and three passes. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    WARP_SIZE,
    block_idx,
    lane_id,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.primitives import warp
from std.math import ceildiv, rsqrt, sqrt
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .kernel_argument import KernelArgument
from .launch import launch, wait_ahead
from .operands import ALIGN, F32, ON_CPU, Data, data, narrowed, widened
from .rows import WIDTH, over_lanes, over_rows

comptime THREADS = 128
"""Threads of a GPU's block."""
comptime LONGEST = 2048
"""Bytes of a row that a group of lanes keeps in its registers, at most."""
comptime LANES: List[Int] = [8, 8, 16, 32, 32]
"""Threads that normalise a row, in the kernels that are compiled: for 64, 192, 384, 768 and 1024 columns
of 16 bits none is idle."""
comptime VECTORS: List[Int] = [1, 3, 3, 3, 4]
"""Vectors of 16 bytes of each of LANES; the two cover a row."""


def covering(bytes: Int) -> Int:
    """Finds the fewest threads that cover a row.

    Args:
        bytes: Of the row.

    Returns:
        Which of LANES and VECTORS; the last if none cover it.
    """
    comptime for i in range(len(LANES) - 1):
        comptime most = 16 * LANES[i] * VECTORS[i]
        if bytes <= most:
            return i
    return len(materialize[LANES]()) - 1


@fieldwise_init
struct NormTensors[dtype: DType, out: DType = dtype](KernelArgument, TrivialRegisterPassable):
    """The tensors of a layer norm.

    Nothing but pointers: LLVM then knows that a kernel's are global memory.

    Parameters:
        dtype: Of x, and of y unless that is named.
        out: Of y.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var x: Data[Self.dtype]
    """Rows to normalise."""
    var weight: Data[F32]
    """[columns]."""
    var bias: Data[F32]
    """[columns]."""
    var y: Data[Self.out]
    """The result[rows, columns]."""


struct NormSizes(KernelArgument, TrivialRegisterPassable):
    """The sizes of a layer norm."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var rows: Int32
    """Rows to normalise."""
    var columns: Int32
    """Numbers of a row."""
    var stride: Int64
    """Elements from a row of x to the next."""
    var eps: Float32
    """Added to the variance."""

    def __init__(out self, *, rows: Int, columns: Int, stride: Int, eps: Float32):
        """Names the sizes.

        Args:
            rows: Rows to normalise.
            columns: Numbers of a row.
            stride: Elements from a row of x to the next.
            eps: Added to the variance.
        """
        self.rows, self.columns, self.stride = Int32(rows), Int32(columns), Int64(stride)
        self.eps = eps


@always_inline
def normalise_row[
    x_dtype: DType, y_dtype: DType, //, norm: StaticString = "layernorm"
](
    x: Data[x_dtype],
    y: Data[y_dtype],
    weight: Data[F32],
    bias: Data[F32],
    columns: Int,
    eps: Float32,
):
    """Normalises a row on a CPU.

    Parameters:
        x_dtype: Of x.
        y_dtype: Of y.
        norm: Which one: layernorm or rms_norm.

    Args:
        x: [columns].
        y: The result[columns].
        weight: [columns].
        bias: [columns]; nobody reads that of an rms_norm.
        columns: Numbers of the row.
        eps: Added to the variance.
    """
    var whole = columns // WIDTH * WIDTH
    var sums = SIMD[F32, WIDTH](0)
    var mean = Float32(0)
    comptime if norm == "layernorm":
        for c in range(0, whole, WIDTH):
            sums += widened(x.unsafe_load[width=WIDTH](c))
        var sum = sums.reduce_add()
        for c in range(whole, columns):
            sum += widened(x[unsafe_offset=c])
        mean = sum / Float32(columns)

    sums = 0
    for c in range(0, whole, WIDTH):
        var d = widened(x.unsafe_load[width=WIDTH](c)) - mean
        sums = d.fma(d, sums)
    var squares = sums.reduce_add()
    for c in range(whole, columns):
        var d = widened(x[unsafe_offset=c]) - mean
        squares += d * d
    var scale = 1 / sqrt(squares / Float32(columns) + eps)

    for c in range(0, whole, WIDTH):
        var value = (widened(x.unsafe_load[width=WIDTH](c)) - mean) * scale
        var shift = SIMD[F32, WIDTH](0)
        comptime if norm == "layernorm":
            shift = bias.unsafe_load[width=WIDTH](c)
        value = value.fma(weight.unsafe_load[width=WIDTH](c), shift)
        y.unsafe_store(c, narrowed[y_dtype](value))
    for c in range(whole, columns):
        var value = (widened(x[unsafe_offset=c]) - mean) * scale
        value *= weight[unsafe_offset=c]
        comptime if norm == "layernorm":
            value += bias[unsafe_offset=c]
        y[unsafe_offset=c] = narrowed[y_dtype](value)


def layernorm_cpu[
    dtype: DType, y_dtype: DType, //, norm: StaticString
](o: NormTensors[dtype, y_dtype], g: NormSizes):
    """Normalises each row on all cores.

    Parameters:
        dtype: Of x, float32 or bfloat16.
        y_dtype: Of y, likewise.
        norm: Which one: layernorm or rms_norm.

    Args:
        o: Tensors.
        g: Sizes.
    """

    def row(index: Int) {var}:
        normalise_row[norm](
            o.x.unsafe_offset(index * Int(g.stride)),
            o.y.unsafe_offset(index * Int(g.columns)),
            o.weight,
            o.bias,
            Int(g.columns),
            g.eps,
        )

    over_rows(row, Int(g.rows))


@__name(t"{norm}_{dtype}_{out}")
def layernorm_kernel[
    dtype: DType, out: DType, norm: StaticString
](o: NormTensors[dtype, out], g: NormSizes):
    """Normalises one row in each warp.

    Parameters:
        dtype: Of x.
        out: Of y.
        norm: Which one: layernorm or rms_norm.

    Args:
        o: Tensors.
        g: Sizes.
    """
    var index = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) // WARP_SIZE
    if index >= Int(g.rows):
        return
    var source = o.x.unsafe_offset(index * Int(g.stride))
    var columns = Int(g.columns)
    var to = o.y.unsafe_offset(index * columns)
    var mean = Float32(0)
    comptime if norm == "layernorm":
        var sum = Float32(0)
        for c in range(Int(lane_id()), columns, WARP_SIZE):
            sum += source[unsafe_offset=c].cast[F32]()
        mean = warp.sum(sum) / Float32(columns)
    var squares = Float32(0)
    for c in range(Int(lane_id()), columns, WARP_SIZE):
        var d = source[unsafe_offset=c].cast[F32]() - mean
        squares += d * d
    var scale = 1 / sqrt(warp.sum(squares) / Float32(columns) + g.eps)
    for c in range(Int(lane_id()), columns, WARP_SIZE):
        var value = (source[unsafe_offset=c].cast[F32]() - mean) * scale
        comptime if norm == "layernorm":
            value = value * o.weight[unsafe_offset=c] + o.bias[unsafe_offset=c]
        else:
            value *= o.weight[unsafe_offset=c]
        to[unsafe_offset=c] = narrowed[out](value)


@always_inline
def load_vectors[
    dtype: DType, //, lanes: Int, vectors: Int
](row: Data[dtype], columns: Int, *, first: Int, inside: Bool) -> Array[
    SIMD[dtype, 16 // size_of[dtype]()], vectors
]:
    """Loads a row into the registers of a group of lanes, on a GPU.

    Parameters:
        dtype: Of the row.
        lanes: Threads of the row.
        vectors: Vectors of 16 bytes of a thread.

    Args:
        row: The row.
        columns: Its numbers, a multiple of 16 bytes.
        first: Where the thread's first vector begins.
        inside: Whether there is such a row.

    Returns:
        The thread's vectors, `lanes` vectors apart; zeros behind the columns.
    """
    comptime WIDE = 16 // size_of[dtype]()
    var packed = Array[SIMD[dtype, WIDE], vectors](fill=0)
    comptime for v in range(vectors):
        var c = first + v * lanes * WIDE
        if inside and c < columns:
            packed[v] = row.unsafe_load[width=WIDE, alignment=16](c)
    return packed^


@always_inline
def normalise_vectors[
    dtype: DType, out: DType, width: SIMDLength, vectors: Int, //, lanes: Int, norm: StaticString
](
    packed: Array[SIMD[dtype, width], vectors],
    to: Data[out],
    weight: Data[F32],
    bias: Data[F32],
    columns: Int,
    *,
    first: Int,
    inside: Bool,
    eps: Float32,
):
    """Normalises a row that a group of lanes holds, on a GPU.

    Parameters:
        dtype: Of the row.
        out: Of the result.
        width: Numbers of a vector: 16 bytes of the row.
        vectors: Vectors of a thread.
        lanes: Threads of the row.
        norm: Which one: layernorm or rms_norm.

    Args:
        packed: The thread's vectors, as `load_vectors` gives them.
        to: The result[columns].
        weight: [columns].
        bias: [columns]; nobody reads that of an rms_norm.
        columns: Numbers of the row.
        first: Where the thread's first vector begins.
        inside: Whether there is such a row; all lanes of a warp call this.
        eps: Added to the variance.
    """
    comptime WIDE = Int(width)
    var values = Array[SIMD[F32, width], vectors](fill=0)
    var share = 1 / Float32(columns)
    var sum = Float32(0)
    comptime for v in range(vectors):
        values[v] = widened(packed[v])
        sum += values[v].reduce_add()
    comptime if norm == "layernorm":
        var mean = over_lanes[lanes](sum) * share
        comptime for v in range(vectors):
            values[v] -= mean
    var squares = Float32(0)
    comptime for v in range(vectors):
        if first + v * lanes * WIDE < columns:
            squares += (values[v] * values[v]).reduce_add()
    var scale = rsqrt(over_lanes[lanes](squares) * share + eps)
    comptime for v in range(vectors):
        var c = first + v * lanes * WIDE
        if inside and c < columns:
            var shift = SIMD[F32, width](0)
            comptime if norm == "layernorm":
                shift = bias.unsafe_load[width=width, alignment=16](c)
            var value = (values[v] * scale).fma(
                weight.unsafe_load[width=width, alignment=16](c), shift
            )
            to.unsafe_store[alignment=ALIGN[out, width]](c, narrowed[out](value))


@__name(t"{norm}_{lanes}x{vectors}_{dtype}_{out}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)))
def layernorm_vector_kernel[
    dtype: DType, out: DType, lanes: Int, vectors: Int, norm: StaticString
](o: NormTensors[dtype, out], g: NormSizes):
    """Normalises one row in each group of lanes, in one pass: the row stays in registers.

    Parameters:
        dtype: Of x.
        out: Of y.
        lanes: Threads of a row: 8, 16 or 32.
        vectors: Vectors of 16 bytes of a thread; they cover the columns.
        norm: Which one: layernorm or rms_norm.

    Args:
        o: Tensors.
        g: Sizes; the columns are a multiple of 16 bytes.
    """
    comptime WIDE = 16 // size_of[dtype]()
    var columns = Int(g.columns)
    var first = Int(thread_idx.x) % lanes * WIDE
    var index = (Int(block_idx.x) * THREADS + Int(thread_idx.x)) // lanes
    wait_ahead()
    var inside = index < Int(g.rows)
    var source = o.x.unsafe_offset(index * Int(g.stride))
    var to = o.y.unsafe_offset(index * columns)
    var packed = load_vectors[lanes, vectors](source, columns, first=first, inside=inside)
    normalise_vectors[lanes, norm](
        packed, to, o.weight, o.bias, columns, first=first, inside=inside, eps=g.eps
    )


def layernorm_gpu[
    dtype: DType, out: DType, //, norm: StaticString = "layernorm"
](o: NormTensors[dtype, out], g: NormSizes, ctx: DeviceContext) raises:
    """Enqueues the kernel that holds a row in registers, or the one that takes any row.

    Parameters:
        dtype: Of x.
        out: Of y.
        norm: Which one: layernorm or rms_norm.

    Args:
        o: Tensors.
        g: Sizes.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var bytes = Int(g.columns) * size_of[dtype]()
    if bytes % 16 != 0 or bytes > LONGEST:
        ctx.enqueue_function[layernorm_kernel[dtype, out, norm]](
            o,
            g,
            grid_dim=ceildiv(Int(g.rows), THREADS // WARP_SIZE),
            block_dim=THREADS,
        )
        return
    comptime for i in range(len(LANES)):
        comptime lanes = LANES[i]
        if covering(bytes) == i:
            launch[layernorm_vector_kernel[dtype, out, lanes, VECTORS[i], norm]](
                ctx,
                o,
                g,
                grid_dim=ceildiv(Int(g.rows), THREADS // lanes),
                block_dim=THREADS,
            )


@always_inline
def _run[
    dtype: DType,
    out: DType,
    //,
    target: StaticString,
    name: StaticString,
    norm: StaticString = "layernorm",
](o: NormTensors[dtype, out], g: NormSizes, ctx: DeviceContext) raises:
    comptime if target == "cpu":
        comptime assert ON_CPU[dtype] and ON_CPU[out], name + ": a CPU expects float32 or bfloat16"
        layernorm_cpu[norm](o, g)
    else:
        layernorm_gpu[norm](o, g, ctx)


@register("layernorm")
struct LayerNorm:
    """Normalises each row of x[..., C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[rank=y.rank, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: [..., C], of any dtype.
            weight: [C].
            bias: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if x.size() == 0:
            return
        var columns = x.shape()[x.rank - 1]
        var o = NormTensors[x.dtype, y.dtype](
            x=data(x), weight=data(weight), bias=data(bias), y=data(y)
        )
        var g = NormSizes(
            rows=x.size() // columns,
            columns=columns,
            stride=columns,
            eps=data(eps)[unsafe_offset=0],
        )
        _run[target, "layernorm"](o, g, ctx)


@register("layernorm_first")
struct LayerNormFirst:
    """Normalises the first token of each image of x[N, T, C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, C].
            x: Tokens [N, T, C].
            weight: [C].
            bias: [C].
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if x.size() == 0:
            return
        var columns = x.shape()[2]
        var o = NormTensors[y.dtype](x=data(x), weight=data(weight), bias=data(bias), y=data(y))
        var g = NormSizes(
            rows=x.shape()[0],
            columns=columns,
            stride=x.shape()[1] * columns,
            eps=data(eps)[unsafe_offset=0],
        )
        _run[target, "layernorm_first"](o, g, ctx)


@register("rms_norm")
struct RmsNorm:
    """Divides each row of x[..., C] by its root mean square."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor,
        x: InputTensor[dtype=y.dtype, rank=y.rank, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result, in the shape of x.
            x: [..., C].
            weight: [C].
            eps: Added to the mean of the squares: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if x.size() == 0:
            return
        var columns = x.shape()[x.rank - 1]
        var vector = data(weight)  # stands for the bias, which nobody reads
        var o = NormTensors[y.dtype](x=data(x), weight=vector, bias=vector, y=data(y))
        var g = NormSizes(
            rows=x.size() // columns,
            columns=columns,
            stride=columns,
            eps=data(eps)[unsafe_offset=0],
        )
        _run[target, "rms_norm", "rms_norm"](o, g, ctx)
