"""A class token before the others: y[n, 0] = token, y[n, 1 + t] = x[n, t]. Bound by memory.

A GPU gives each thread 16 bytes of the result, or one number where rows are no multiple of that.
"""

from extensibility import InputTensor, OutputTensor, foreach, register
from layout import Coord
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .launch import launch, wait_ahead
from .operands import Data, data

comptime THREADS = 256
"""Threads of a GPU's block."""


@register("class_token")
struct ClassToken:
    """Puts token[C] before the tokens x[N, T, C] of each image, into y[N, T + 1, C]."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=3, ...],
        x: InputTensor[dtype=y.dtype, rank=3, ...],
        token: InputTensor[dtype=y.dtype, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".

        Args:
            y: Result [N, T + 1, C].
            x: Tokens [N, T, C].
            token: [C].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var tokens = data(x)
        var first = data(token)
        var count = x.shape()[1]
        var channels = x.shape()[2]
        if y.size() == 0:
            return
        comptime if target != "cpu":
            class_token_gpu(
                tokens, first, data(y), tokens=count + 1, channels=channels, size=y.size(), ctx=ctx
            )
            return

        def body[
            width: Int
        ](at: Coord[...]) {var tokens, var first, var count, var channels} -> SIMD[y.dtype, width]:
            var c = Int(at[2].value())
            var t = Int(at[1].value()) - 1
            if t < 0:
                return first.unsafe_load[width=width](c)
            var row = Int(at[0].value()) * count + t
            return tokens.unsafe_load[width=width](row * channels + c)

        foreach[target=target](body, y, ctx)


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
