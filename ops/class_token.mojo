"""A class token before the others, which a layer norm may be part of.

    y[n, 0]     = token
    y[n, 1 + t] = x[n, t], or layer_norm(x[n, t])   of x[N, T, C]

A CPU gives each core blocks of rows. A GPU copies 16 bytes a thread, or one number where rows are no
multiple of that; to norm, it keeps a row in the registers of 8 to 32 lanes, and C is a multiple of 16
bytes, up to 2 KB. Bound by memory.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.memory import unsafe_memcpy
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from .launch import launch, wait_ahead
from .layernorm import LONGEST, NormTensors, load_vectors, normalise_row, normalise_vectors
from .layernorm import THREADS as NORM_THREADS
from .operands import F32, ON_CPU, Data, data
from .rows import over_rows

comptime THREADS = 256
"""Threads of a GPU's block that copies."""


@register("class_token")
struct ClassToken:
    """Puts token[C] before the tokens x[N, T, C] of each image, or before their layer norm."""

    @staticmethod
    def execute[
        target: StaticString, norms: Bool
    ](
        y: OutputTensor[rank=3, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        token: InputTensor[dtype=y.dtype, rank=1, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            norms: Whether the op norms the tokens.

        Args:
            y: Result [N, T + 1, C].
            x: Tokens [N, T, C].
            token: [C].
            weight: [C], of the norm; any vector if the op does not norm.
            bias: Likewise.
            eps: Added to the variance: one number in host memory.
            ctx: The device.

        Raises:
            If the rows do not fit the kernels, or a launch fails.
        """
        if y.size() == 0:
            return
        var o = NormTensors[y.dtype](x=data(x), weight=data(weight), bias=data(bias), y=data(y))
        var tokens = y.shape()[1]
        var columns = y.shape()[2]
        var epsilon = data(eps)[unsafe_offset=0]
        comptime if target == "cpu":
            comptime assert (
                ON_CPU[y.dtype] or not norms
            ), "class_token: a CPU norms float32 or bfloat16"
            class_token_cpu[norms](o, data(token), tokens, y.size() // columns, columns, epsilon)
        elif norms:
            class_token_layernorm_gpu(
                o,
                data(token),
                tokens=tokens,
                rows=y.size() // columns,
                columns=columns,
                eps=epsilon,
                ctx=ctx,
            )
        else:
            class_token_gpu(
                o.x, data(token), o.y, tokens=tokens, channels=columns, size=y.size(), ctx=ctx
            )


def class_token_cpu[
    dtype: DType, //, norms: Bool
](o: NormTensors[dtype], token: Data[dtype], tokens: Int, rows: Int, columns: Int, eps: Float32,):
    """Copies or norms each row on all cores.

    Parameters:
        dtype: Of the tokens; float32 or bfloat16 to norm them.
        norms: Whether the op norms the tokens.

    Args:
        o: Tensors.
        token: [columns].
        tokens: T + 1.
        rows: Of the result.
        columns: C.
        eps: Added to the variance.
    """

    def row(index: Int) {var}:
        var image = index // tokens
        var source = o.x.unsafe_offset((index - image - 1) * columns)
        var to = o.y.unsafe_offset(index * columns)
        if index == image * tokens:
            unsafe_memcpy(dest=to, src=token, count=columns)
        else:
            comptime if norms:
                normalise_row(source, to, o.weight, o.bias, columns, eps)
            else:
                unsafe_memcpy(dest=to, src=source, count=columns)

    over_rows(row, rows)


def class_token_gpu[
    dtype: DType
](
    x: Data[dtype],
    token: Data[dtype],
    y: Data[dtype],
    *,
    tokens: Int,
    channels: Int,
    size: Int,
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel, with vectors if rows are a multiple of 16 bytes.

    Parameters:
        dtype: Of the tokens.

    Args:
        x: Tokens [N, T, C].
        token: [C].
        y: Result [N, T + 1, C].
        tokens: T + 1.
        channels: C.
        size: Numbers of the result.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    comptime WIDE = 16 // size_of[dtype]()
    comptime for width in [WIDE, 1]:
        if (channels % WIDE == 0) == (width == WIDE):
            launch[class_token_kernel[dtype, width]](
                ctx,
                x,
                token,
                y,
                UInt32(tokens),
                UInt32(channels // width),
                Int64(size // width),
                grid_dim=ceildiv(size // width, THREADS),
                block_dim=THREADS,
            )


@__name(t"class_token_{width}_{dtype}")
def class_token_kernel[
    dtype: DType, width: Int
](
    x: Data[dtype],
    token: Data[dtype],
    y: Data[dtype],
    tokens: UInt32,
    vectors: UInt32,
    count: Int64,
):
    """Copies a vector a thread.

    Parameters:
        dtype: Of the tokens.
        width: Numbers of a vector.

    Args:
        x: Tokens [N, T, C].
        token: [C].
        y: Result [N, T + 1, C].
        tokens: T + 1.
        vectors: Of a row.
        count: Vectors of the result.
    """
    comptime ALIGN = width * size_of[dtype]()
    var i = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    var row = i // Int(vectors)
    var image = row // Int(tokens)
    var from_token = row == image * Int(tokens)
    var source = token.unsafe_offset((i - row * Int(vectors)) * width)
    if not from_token:
        source = x.unsafe_offset((i - (image + 1) * Int(vectors)) * width)
    wait_ahead()
    if i < Int(count):
        var value = source.unsafe_load[width=width, alignment=ALIGN]()
        y.unsafe_store[alignment=ALIGN](i * width, value)


def class_token_layernorm_gpu[
    dtype: DType, //
](
    o: NormTensors[dtype],
    token: Data[dtype],
    *,
    tokens: Int,
    rows: Int,
    columns: Int,
    eps: Float32,
    ctx: DeviceContext,
) raises:
    """Enqueues the kernel whose threads cover a row.

    Parameters:
        dtype: Of the tokens.

    Args:
        o: Tensors.
        token: [columns].
        tokens: T + 1.
        rows: Of the result.
        columns: C.
        eps: Added to the variance.
        ctx: The GPU.

    Raises:
        If a row is no multiple of 16 bytes or too long, or the launch fails.
    """
    var bytes = columns * size_of[dtype]()
    if bytes % 16 != 0 or bytes > LONGEST:
        raise Error("class_token: expects to norm rows of a multiple of 16 bytes up to 2 KB")
    comptime for lanes in [8, 16, 32]:
        comptime EACH = 4 if lanes == 32 else 3
        if bytes <= 16 * lanes * EACH:
            launch[class_token_layernorm_kernel[dtype, lanes, EACH]](
                ctx,
                o,
                token,
                UInt32(tokens),
                Int64(rows),
                Int32(columns),
                eps,
                grid_dim=ceildiv(rows * lanes, NORM_THREADS),
                block_dim=NORM_THREADS,
            )
            return


@__name(t"class_token_layernorm_{lanes}x{vectors}_{dtype}")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(NORM_THREADS)))
def class_token_layernorm_kernel[
    dtype: DType, lanes: Int, vectors: Int
](
    o: NormTensors[dtype],
    token: Data[dtype],
    tokens: UInt32,
    rows: Int64,
    columns: Int32,
    eps: Float32,
):
    """Norms or copies one row in each group of lanes, which stays in their registers.

    Parameters:
        dtype: Of the tokens.
        lanes: Threads of a row: 8, 16 or 32.
        vectors: Vectors of 16 bytes of a thread; they cover the columns.

    Args:
        o: Tensors.
        token: [columns].
        tokens: T + 1.
        rows: Of the result.
        columns: C, a multiple of 16 bytes.
        eps: Added to the variance.
    """
    comptime WIDE = 16 // size_of[dtype]()
    var first = Int(thread_idx.x) % lanes * WIDE
    var index = (Int(block_idx.x) * NORM_THREADS + Int(thread_idx.x)) // lanes
    var image = index // Int(tokens)
    var from_token = index == image * Int(tokens)
    var source = token
    if not from_token:
        source = o.x.unsafe_offset((index - image - 1) * Int(columns))
    var to = o.y.unsafe_offset(index * Int(columns))
    var inside = index < Int(rows)
    wait_ahead()
    var packed = load_vectors[lanes, vectors](source, Int(columns), first=first, inside=inside)
    normalise_vectors[lanes, "layernorm"](
        packed,
        to,
        o.weight,
        o.bias,
        Int(columns),
        first=first,
        inside=inside and not from_token,
        eps=eps,
    )
    comptime for v in range(vectors):
        var c = first + v * lanes * WIDE
        if inside and from_token and c < Int(columns):
            to.unsafe_store[alignment=16](c, packed[v])
