"""Sparse convolution of filters that are packed for Hopper: registration and the choice of a kernel.

A format is two arrays, which graphs/arrange.py makes and the kernel's own file describes.

tiles: nonzeros with their places in a tile, and where each tile's begin (tiled.mojo).
two_four: values, and which two of each four they are (two_four.mojo).
blocks: blocks of 64 filters x 128 bytes of channels, and where they belong (blocks.mojo).
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ..epilogue import Epilogue
from ..geometry import Geometry
from ..hopper.shared import ROW
from ..operands import F32, Data, Operands, data
from ..target import IS_HOPPER
from .blocks import FILTERS, blocks_conv2d
from .tiled import sparse_conv2d_tiled
from .two_four import two_four_conv2d


@register("sparse_conv2d_packed")
struct SparseConv2dPacked:
    """Convolves x[N, H, W, C] into y[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, epilogue: StaticString, format: StaticString
    ](
        y: OutputTensor[rank=4, ...],
        x: InputTensor[dtype=y.dtype, rank=4, ...],
        packed: InputTensor[rank=1, ...],
        places: InputTensor[rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=4, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            epilogue: What the sums go through (ops/epilogue.mojo).
            format: How the filter is packed.

        Args:
            y: Result [N, P, Q, F].
            x: Activations [N, H, W, C].
            packed: What is left of the filter, in the format's order.
            places: Where that belongs.
            bias: [F].
            residual: [N, P, Q, F]; x if the epilogue does not add.
            window: The nine numbers of geometry.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert Epilogue.known[
            epilogue
        ](), "sparse_conv2d_packed: there is no such epilogue; ops/epilogue.mojo says what there is"
        comptime assert (
            target == "gpu" and IS_HOPPER
        ), "sparse_conv2d_packed: expects a Hopper GPU; others take sparse_conv2d"
        comptime end = Epilogue(epilogue)
        var g = Geometry(x.shape(), y.shape(), data(window))
        var w = data(packed).unsafe_bitcast[Scalar[y.dtype]]()
        var o = Operands[y.dtype](data(x), w, data(bias), data(residual), data(y))
        if g.pixels() == 0:
            return
        comptime if format == "tiles":
            sparse_conv2d_tiled[y.dtype, end](
                g,
                o,
                rebind[Data[DType.uint32]](data(packed)),
                rebind[Data[DType.int32]](data(places)),
                ctx,
            )
        elif format == "two_four":
            two_four_conv2d[y.dtype, end](g, o, rebind[Data[DType.uint32]](data(places)), ctx)
        elif format == "blocks":
            blocks_conv2d[y.dtype, end](
                g,
                o,
                rebind[Data[DType.int32]](data(places)),
                places.size() // ceildiv(g.f, FILTERS),
                packed.size() * size_of[y.dtype]() // (FILTERS * ROW),
                ctx,
            )
        else:
            comptime assert False, "sparse_conv2d_packed: format expects tiles, two_four or blocks"
