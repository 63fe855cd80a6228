"""The end of a residual block and the begin of the next: two convolutions of 1 x 1, one launch.

    h[n, p, q, k] = relu(bias[k] + residual[n, p, q, k] + sum_c x[n, p, q, c] w[c, k])
    z[n, p, q, f] = relu(next_bias[f] + sum_k h[n, p, q, k] v[k, f])

He et al. 2015, figure 5, right. The second convolution takes h from shared memory. In the place of the
residual there may be the block's shortcut, a convolution of 1 x 1 in the same sum.

In 8 bits numbers are stored as quantized.mojo says, and no zero point is known.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.chain import ChainTensors, ChainVectors, try_chain
from ..gemm.gpu import gemm_bytes, gemm_bytes_shortcut, gemm_shortcut
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import F32, Affine, Operands, Scales, data
from ..target import IS_HOPPER
from .gpu import conv2d_gpu


@register("conv2d_chain")
struct Conv2dChain:
    """Convolves x[N, P, Q, C] into h[N, P, Q, K], adds and rectifies, and h into z[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool, c: Int, f: Int
    ](
        h: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=h.dtype, rank=4, ...],
        x: InputTensor[dtype=h.dtype, rank=4, ...],
        filter: InputTensor[dtype=h.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=h.dtype, rank=4, ...],
        next: InputTensor[dtype=h.dtype, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            tf32: Whether it may round float32 to TF32 for the products.
            aligned: As of conv2d, for both convolutions.
            c: C.
            f: F.

        Args:
            h: What the block gives [N, P, Q, K].
            z: The next block's first activations [N, P, Q, F].
            x: Activations [N, P, Q, C].
            filter: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for the device.
            bias: [K].
            residual: What came into the block [N, P, Q, K].
            next: The next block's 1 x 1 filter, flat, laid out alike.
            next_bias: [F].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "conv2d_chain: a CPU runs two convolutions"
        if h.size() == 0:
            return
        var k = h.shape()[3]
        var m = h.size() // k
        comptime if IS_HOPPER and h.dtype.is_half_float():
            if try_chain[h.dtype, "conv2d_chain", c, f](
                m,
                k,
                ChainTensors[h.dtype](
                    data(x),
                    data(filter),
                    data(next),
                    data(z),
                    data(residual),
                    data(h),
                    data(filter),
                ),
                ChainVectors[](data(bias), data(next_bias)),
                ctx,
            ):
                return
        comptime of_h = Layer(h.static_spec, x.static_spec, filter.static_spec, aligned=aligned)
        comptime of_z = Layer(z.static_spec, h.static_spec, next.static_spec, aligned=aligned)
        conv2d_gpu[h.dtype, Epilogue("add_relu"), tf32, of_h](
            Geometry(rows=m, depth=c, columns=k),
            Operands[h.dtype](data(x), data(filter), data(bias), data(residual), data(h)),
            ctx,
        )
        conv2d_gpu[h.dtype, Epilogue("relu"), tf32, of_z](
            Geometry(rows=m, depth=k, columns=f),
            Operands[h.dtype](data(h), data(next), data(next_bias), data(h), data(z)),
            ctx,
        )


@register("conv2d_shortcut_chain")
struct Conv2dShortcutChain:
    """Convolves x[N, P, Q, C] and source[N, P, Q, S] into h[N, P, Q, K], and that into z[N, P, Q, F]."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool, c: Int, s: Int, f: Int
    ](
        h: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=h.dtype, rank=4, ...],
        x: InputTensor[dtype=h.dtype, rank=4, ...],
        filter: InputTensor[dtype=h.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        source: InputTensor[dtype=h.dtype, rank=4, ...],
        shortcut: InputTensor[dtype=h.dtype, rank=1, ...],
        shortcut_bias: InputTensor[dtype=F32, rank=1, ...],
        next: InputTensor[dtype=h.dtype, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            tf32: Whether it may round float32 to TF32 for the products.
            aligned: As of conv2d, for all convolutions.
            c: C.
            s: S.
            f: F.

        Args:
            h: What the block gives [N, P, Q, K].
            z: The next block's first activations [N, P, Q, F].
            x: Activations [N, P, Q, C].
            filter: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for the device.
            bias: [K].
            source: What came into the block [N, P, Q, S].
            shortcut: Its 1 x 1 filter, flat, laid out alike.
            shortcut_bias: [K].
            next: The next block's 1 x 1 filter, likewise.
            next_bias: [F].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "conv2d_shortcut_chain: a CPU runs convolutions"
        if h.size() == 0:
            return
        var k = h.shape()[3]
        var m = h.size() // k
        comptime if IS_HOPPER and h.dtype.is_half_float():
            if try_chain[h.dtype, "conv2d_chain", c, f, s=s](
                m,
                k,
                ChainTensors[h.dtype](
                    data(x),
                    data(filter),
                    data(next),
                    data(z),
                    data(source),
                    data(h),
                    data(shortcut),
                ),
                ChainVectors[](data(bias), data(next_bias), source=data(shortcut_bias)),
                ctx,
            ):
                return
        comptime of_h = Layer(
            h.static_spec, x.static_spec, filter.static_spec, aligned=aligned
        ).with_source(source.static_spec)
        comptime of_z = Layer(z.static_spec, h.static_spec, next.static_spec, aligned=aligned)
        gemm_shortcut[h.dtype, tf32, of_h](
            Geometry(rows=m, depth=c, columns=k),
            Operands[h.dtype](data(x), data(filter), data(bias), data(x), data(h)),
            Geometry(rows=m, depth=s, columns=k),
            Operands[h.dtype](
                data(source), data(shortcut), data(shortcut_bias), data(source), data(h)
            ),
            ctx,
        )
        conv2d_gpu[h.dtype, Epilogue("relu"), tf32, of_z](
            Geometry(rows=m, depth=k, columns=f),
            Operands[h.dtype](data(h), data(next), data(next_bias), data(h), data(z)),
            ctx,
        )


@register("quantized_conv2d_chain")
struct QuantizedConv2dChain:
    """Convolves x[N, P, Q, C] into h[N, P, Q, K], adds, and h into z[N, P, Q, F], in 8 bits."""

    @staticmethod
    def execute[
        target: StaticString, narrow: Bool, c: Int, f: Int
    ](
        h: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=h.dtype, rank=4, ...],
        x: InputTensor[dtype=h.dtype, rank=4, ...],
        filter: InputTensor[rank=1, ...],
        product: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=h.dtype, rank=4, ...],
        next: InputTensor[dtype=filter.dtype, rank=1, ...],
        next_product: InputTensor[dtype=F32, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        residual_scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu": Hopper.
            narrow: Whether C leaves half of a step of 128 bytes empty.
            c: C.
            f: F.

        Args:
            h: What the block gives [N, P, Q, K], of uint8 or float8_e4m3fn.
            z: The next block's first activations [N, P, Q, F].
            x: Activations [N, P, Q, C].
            filter: The 1 x 1 filter, flat, as graphs/arrange.py lays it out for results of 8 bits;
                int8 or float8_e4m3fn.
            product: What a sum of each of its filters stands for, in steps of h [K].
            bias: [K], in steps of h, with all zero points.
            residual: What came into the block [N, P, Q, K].
            next: The next block's 1 x 1 filter, flat, laid out alike.
            next_product: Likewise, in steps of z [F].
            next_bias: [F], in steps of z, likewise.
            residual_scale: What a step of the residual is in those of h: in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "quantized_conv2d_chain: a CPU runs two convolutions"
        if h.size() == 0:
            return
        var k = h.shape()[3]
        var m = h.size() // k
        var added = Affine(data(residual_scale)[unsafe_offset=0], 0)
        var first, second = Scales(data(product), added), Scales(data(next_product))
        comptime right = filter.dtype
        var chained = False
        comptime if IS_HOPPER:
            chained = try_chain[h.dtype, "conv2d_chain", c, f, right](
                m,
                k,
                ChainTensors[h.dtype, right](
                    data(x),
                    data(filter),
                    data(next),
                    data(z),
                    data(residual),
                    data(h),
                    data(filter),
                ),
                ChainVectors[True](data(bias), data(next_bias), first, second),
                ctx,
            )
        if chained:
            return
        comptime Bytes = Operands[h.dtype, h.dtype, right]
        comptime add = Epilogue.rectified[h.dtype, adds=True]()
        comptime end = Epilogue.rectified[h.dtype]()
        comptime of_h = Layer(h.static_spec, x.static_spec, filter.static_spec)
        comptime of_z = Layer(z.static_spec, h.static_spec, next.static_spec)
        gemm_bytes[h.dtype, right, h.dtype, add, narrow, of_h](
            Geometry(rows=m, depth=c, columns=k),
            Bytes(data(x), data(filter), data(bias), data(residual), data(h)),
            first,
            ctx,
        )
        gemm_bytes[h.dtype, right, h.dtype, end, False, of_z](
            Geometry(rows=m, depth=k, columns=f),
            Bytes(data(h), data(next), data(next_bias), data(h), data(z)),
            second,
            ctx,
        )


@register("quantized_conv2d_shortcut_chain")
struct QuantizedConv2dShortcutChain:
    """Convolves x[N, P, Q, C] and source[N, P, Q, S] into h[N, P, Q, K], and that into z, in 8 bits."""

    @staticmethod
    def execute[
        target: StaticString, narrow: Bool, c: Int, s: Int, f: Int
    ](
        h: OutputTensor[rank=4, ...],
        z: OutputTensor[dtype=h.dtype, rank=4, ...],
        x: InputTensor[dtype=h.dtype, rank=4, ...],
        filter: InputTensor[rank=1, ...],
        source: InputTensor[dtype=h.dtype, rank=4, ...],
        shortcut: InputTensor[dtype=filter.dtype, rank=1, ...],
        product: InputTensor[dtype=F32, rank=1, ...],
        first: InputTensor[dtype=F32, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        shortcut_bias: InputTensor[dtype=F32, rank=1, ...],
        next: InputTensor[dtype=filter.dtype, rank=1, ...],
        next_product: InputTensor[dtype=F32, rank=1, ...],
        next_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu": Hopper.
            narrow: Whether C and S leave half of a step of 128 bytes empty.
            c: C.
            s: S.
            f: F.

        Args:
            h: What the block gives [N, P, Q, K], of uint8 or float8_e4m3fn.
            z: The next block's first activations [N, P, Q, F].
            x: Activations [N, P, Q, C].
            filter: As quantized_conv2d_shortcut has it (shortcut.mojo); so are the next six.
            source: What came into the block [N, P, Q, S].
            shortcut: See `filter`.
            product: See `filter`.
            first: See `filter`.
            bias: See `filter`.
            shortcut_bias: See `filter`.
            next: As quantized_conv2d_chain has it; so are the next two.
            next_product: See `next`.
            next_bias: See `next`.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert target != "cpu", "quantized_conv2d_chain: a CPU runs convolutions"
        if h.size() == 0:
            return
        comptime right = filter.dtype
        var k = h.shape()[3]
        var m = h.size() // k
        var both = Scales(data(product), first=data(first))
        var second = Scales(data(next_product))
        var chained = False
        comptime if IS_HOPPER:
            chained = try_chain[h.dtype, "conv2d_chain", c, f, right, s](
                m,
                k,
                ChainTensors[h.dtype, right](
                    data(x),
                    data(filter),
                    data(next),
                    data(z),
                    data(source),
                    data(h),
                    data(shortcut),
                ),
                ChainVectors[True](
                    data(bias), data(next_bias), both, second, source=data(shortcut_bias)
                ),
                ctx,
            )
        if chained:
            return
        comptime Bytes = Operands[h.dtype, h.dtype, right]
        comptime end = Epilogue.rectified[h.dtype]()
        comptime of_h = Layer(h.static_spec, x.static_spec, filter.static_spec).with_source(
            source.static_spec
        )
        comptime of_z = Layer(z.static_spec, h.static_spec, next.static_spec)
        gemm_bytes_shortcut[h.dtype, right, end, narrow, of_h](
            Geometry(rows=m, depth=c, columns=k),
            Bytes(data(x), data(filter), data(bias), data(x), data(h)),
            Geometry(rows=m, depth=s, columns=k),
            Bytes(data(source), data(shortcut), data(shortcut_bias), data(x), data(h)),
            both,
            ctx,
        )
        gemm_bytes[h.dtype, right, h.dtype, end, False, of_z](
            Geometry(rows=m, depth=k, columns=f),
            Bytes(data(h), data(next), data(next_bias), data(h), data(z)),
            second,
            ctx,
        )
