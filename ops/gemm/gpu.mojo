"""Implicit GEMM on a GPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters; see gemm/cpu.mojo.

    x[N, H, W, C]   activations
    b[F, K]         filters, K ordered R, S, C (or b[K, F] for a product with b not transposed)
    y[N, P, Q, F]   result

`gemm` chooses: wgmma (hopper.mojo, resident.mojo, pingpong.mojo, turned.mojo) where the GPU has it and
it takes the product, and there gemv.mojo for a row or two; else mma.sync or mfma (mma.mojo) for 16
bits, and for float32 as TF32; else the kernel of this file.

That kernel: a block of 256 threads computes a 64 x 64 tile, each thread 4 x 4, from 16 steps of K
at a time in two alternating stages of shared memory; what the next stage needs is read from device
memory while this one is multiplied. Loads are 4 wide where C (and F) allow it. CUDA cores and
float32 throughout, whatever the dtype of x, b and y, so it runs on every GPU: the reference for the
others. Bound by the FMA units.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from ..device import Device
from ..epilogue import Epilogue, Output
from ..geometry import Geometry
from ..hopper.conv import takes
from ..hopper.moments import Norm
from ..operands import F32, Batch, Data, Operands, Scales
from ..target import HAS_MFMA, HAS_MMA, IS_HOPPER
from .gemv import gemv, has_gemv, takes_gemv
from .hopper import hopper_gemm, hopper_shortcut
from .layer import Layer
from .mma import mma_gemm
from .pingpong import pingpong_gemm
from .resident import resident_gemm
from .tuning import (
    CONFIGS,
    FIRST_PINGPONG,
    FIRST_RESIDENT,
    FIRST_TURNED,
    Family,
    PINGPONG,
    RESIDENT,
    TILES,
    TURNED,
    choose,
    chosen,
    reached,
)
from .turned import turned_gemm

comptime THREADS = 256
"""Threads of a block."""
comptime TILE = 64
"""Pixels, and filters, of a block."""
comptime DEPTH = 16
"""Steps of K in a stage."""
comptime PITCH = TILE + 4
"""Floats from one step of K to the next in shared memory; 4 more than needed, against conflicts."""
comptime STAGE = DEPTH * PITCH
"""Floats of a stage of x, or of w."""
comptime NOT_ALIGNED = "gemm: the copy engine does not take these sizes, though aligned says so"
"""What a product is refused with that graphs/arrange.py should not have called aligned."""
comptime NO_TILE = "gemm: the tile chosen is not compiled: the sizes are not those of the layer"
"""What a product is refused with that is not the layer's."""


@always_inline
def _load4[dtype: DType](at: Data[dtype]) -> SIMD[F32, 4]:
    """Loads four neighbours, aligned to their size, as float32."""
    return at.unsafe_load[width=4, alignment=4 * size_of[dtype]()]().cast[F32]()


@always_inline
def _patch[
    dtype: DType
](
    g: Geometry,
    x: Data[dtype],
    k: Int32,
    inside: Bool,
    h0: Int32,
    w0: Int32,
    vectors: Bool,
) -> SIMD[F32, 4]:
    """Reads x at four steps of K from `k` on, for the pixel whose window begins at h0, w0."""
    var value = SIMD[F32, 4](0)
    if not inside:
        return value
    var c = Int32(g.group_c())
    comptime for j in range(4):
        if j == 0 or not vectors:
            var tap = (k + Int32(j)) // c
            var channel = (k + Int32(j)) - tap * c
            var r = tap // Int32(g.s)
            var s = tap - r * Int32(g.s)
            var h = h0 + r * Int32(g.dilation_h)
            var w = w0 + s * Int32(g.dilation_w)
            if r < Int32(g.r) and h >= 0 and h < Int32(g.h) and w >= 0 and w < Int32(g.w):
                var at = x.unsafe_offset((Int(h) * g.w + Int(w)) * g.c + Int(channel))
                if vectors:
                    value = _load4(at)
                else:
                    value[j] = at[unsafe_offset=0].cast[F32]()
    return value


@always_inline
def _filters[
    dtype: DType, k_major: Bool
](w: Data[dtype], k: Int, f: Int, depth: Int, columns: Int, vectors: Bool) -> SIMD[F32, 4]:
    """Reads w at four steps of K (k_major), or at four filters of one step, from k, f on."""
    var value = SIMD[F32, 4](0)
    comptime for j in range(4):
        if j == 0 or not vectors:
            var at_k = k + j if k_major else k
            var at_f = f if k_major else f + j
            if at_k < depth and at_f < columns:
                var at = w.unsafe_offset(at_f * depth + at_k if k_major else at_k * columns + at_f)
                if vectors:
                    value = _load4(at)
                else:
                    value[j] = at[unsafe_offset=0].cast[F32]()
    return value


@__name(t"gemm_cores_{epilogue.label()}_{dtype}")
def gemm_kernel[
    dtype: DType, epilogue: Epilogue, k_major: Bool
](all: Operands[dtype], g: Geometry, tiles: Int32, batch: Batch,):
    """Computes one 64 x 64 tile of one product; block_idx.y counts tiles of filters.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].

    Args:
        all: The tensors of all products (groups, or a batch).
        g: Sizes of one product.
        tiles: Tiles of pixels of a product; block_idx.x counts them, product after product.
        batch: Where each product's tensors are.
    """
    var t = Int(thread_idx.x)
    var product = Int(block_idx.x) // Int(tiles)
    var m0 = (Int(block_idx.x) - product * Int(tiles)) * TILE
    var f0 = Int(block_idx.y) * TILE
    var o = batch.of(all, product)
    var pixels = g.pixels()
    var columns = g.group_f()
    var depth = g.depth()
    var x_vectors = g.group_c() % 4 == 0
    var w_vectors = (depth if k_major else columns) % 4 == 0

    # What this thread reads: of x, 4 steps of K for one pixel; of w, 4 steps for one filter, or
    # 4 filters for one step.
    var row = t // 4
    var row_k = t % 4 * 4
    var w_f = row if k_major else t % 16 * 4
    var w_k = row_k if k_major else t // 16
    var m = m0 + row
    var image = m // (g.p * g.q)
    var pixel = m - image * (g.p * g.q)
    var p = pixel // g.q
    var h0 = Int32(p * g.stride_h - g.pad_h)
    var w0 = Int32((pixel - p * g.q) * g.stride_w - g.pad_w)
    var x = o.x.unsafe_offset(image * g.h * g.w * g.c)

    var x_tile = unsafe_stack_allocation[
        2 * STAGE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var w_tile = unsafe_stack_allocation[
        2 * STAGE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var acc = Array[SIMD[F32, 4], 4](fill=0)
    var next_x = _patch(g, x, Int32(row_k), m < pixels, h0, w0, x_vectors)
    var next_w = _filters[dtype, k_major](o.w, w_k, f0 + w_f, depth, columns, w_vectors)
    var stage = 0
    for k0 in range(0, depth, DEPTH):
        comptime for j in range(4):
            x_tile[unsafe_offset=stage + (row_k + j) * PITCH + row] = next_x[j]
            comptime if k_major:
                w_tile[unsafe_offset=stage + (w_k + j) * PITCH + w_f] = next_w[j]
            else:
                w_tile[unsafe_offset=stage + w_k * PITCH + w_f + j] = next_w[j]
        barrier()
        if k0 + DEPTH < depth:
            var k = k0 + DEPTH
            next_x = _patch(g, x, Int32(k + row_k), m < pixels, h0, w0, x_vectors)
            next_w = _filters[dtype, k_major](o.w, k + w_k, f0 + w_f, depth, columns, w_vectors)
        comptime for k in range(DEPTH):
            var at = stage + k * PITCH
            var a = x_tile.unsafe_load[width=4, alignment=16](at + t // 16 * 4)
            var b = w_tile.unsafe_load[width=4, alignment=16](at + t % 16 * 4)
            comptime for i in range(4):
                acc[i] = b.fma(a[i], acc[i])
        stage = STAGE - stage

    var output = Output[epilogue](o)
    var f = f0 + t % 16 * 4
    comptime for i in range(4):
        var m_out = m0 + t // 16 * 4 + i
        if m_out < pixels and f < columns:
            var to = m_out * g.f + f
            if g.f % 4 == 0 and columns % 4 == 0:
                output.finish(acc[i], output.channels[4](f), to)
            else:
                for j in range(min(4, columns - f)):
                    output.finish(SIMD[F32, 1](acc[i][j]), output.channels[1](f + j), to + j)


def gemm[
    dtype: DType,
    epilogue: Epilogue,
    k_major: Bool,
    tf32: Bool,
    layer: Layer = Layer(),
](
    g: Geometry,
    o: Operands[dtype],
    batch: Batch,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    norm: Optional[Norm] = None,
) raises:
    """Enqueues the products of a batch, or the groups of a convolution, in one launch.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].
        tf32: Whether tensor cores may round float32 to TF32, where they have it.
        layer: What the graph knows of the product: kernels that it never gets are not compiled.

    Args:
        g: Sizes of one product.
        o: The tensors of the first.
        batch: How many there are, and where.
        ctx: The GPU.
        constant: Whether w is a weight: a kernel may then load it while the one that writes x runs.
        norm: Moments of the rows of x, or of y, if the epilogue normalises or measures: in 16 bits on
            Hopper, of sizes that are aligned.

    Raises:
        If the launch fails, or the product is not aligned though it should be.
    """
    comptime rounds = dtype.is_half_float() or (tf32 and HAS_MMA)
    comptime hopper = IS_HOPPER and rounds and k_major
    comptime if hopper:
        if batch.products == 1 and takes[dtype](g):
            comptime if layer.few and has_gemv[dtype, epilogue]():
                if constant and o.alpha == 1 and takes_gemv(g):
                    gemv[dtype, epilogue](g, o, ctx)
                    return
            comptime bytes = size_of[dtype]()
            comptime family = Family(layer, bytes, epilogue, turns=bytes == 2)

            def tile[index: Int](splits: Int) raises {imm}:
                enqueue_tile[index, epilogue]([g], [o], splits, ctx, constant=constant, norm=norm)

            _in_tile[family](tile, g, ctx)
            return
    comptime assert (
        hopper and layer.aligned
    ) or not epilogue.normed(), "gemm: rows are normalised on Hopper, of aligned sizes"
    comptime if hopper and layer.aligned:
        raise Error(NOT_ALIGNED)
    else:
        _gemm_elsewhere[dtype, epilogue, k_major, tf32](g, o, batch, ctx)


def _gemm_elsewhere[
    dtype: DType, epilogue: Epilogue, k_major: Bool, tf32: Bool
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext) raises:
    """Enqueues products of any sizes: by mma.sync or mfma where the GPU has it, else on its cores."""
    comptime rounds = dtype.is_half_float() or (tf32 and HAS_MMA)
    comptime kernel = (
        mma_gemm[dtype, epilogue, k_major] if rounds
        and (HAS_MMA or HAS_MFMA) else gemm_portable[dtype, epilogue, k_major]
    )
    kernel(g, o, batch, ctx)


@always_inline
def _in_tile[
    Launch: def[index: Int](Int) raises -> None, //, family: Family
](launch: Launch, g: Geometry, ctx: DeviceContext, *, beside: Int = 0) raises:
    """Calls `launch` with the number of the tile that a product gets, and with its splits.

    Compiled are the tiles that the family's products may get.
    """
    comptime rows = reached(family)
    comptime tiles = chosen(rows, family)
    var row = choose[family.turns, family.bytes == 1](
        materialize[rows](), g, materialize[family](), Device(ctx), beside
    )
    comptime for i in range(TILES):
        comptime if tiles >> i & 1:
            if row.config == i:
                launch[i](row.splits)
                return
    raise Error(NO_TILE)


def enqueue_tile[
    dtype: DType,
    out: DType,
    right: DType,
    products: Int,
    //,
    index: Int,
    epilogue: Epilogue,
    narrow: Bool = False,
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype, out, right], products],
    splits: Int,
    ctx: DeviceContext,
    *,
    constant: Bool = True,
    scales: Optional[Array[Scales, products]] = None,
    norm: Optional[Norm] = None,
) raises:
    """Enqueues a product, or several of the same K and F, in one of the tiles that tuning.mojo lists.

    Parameters:
        dtype: Of x.
        out: Of the residual and y.
        right: Of w.
        products: How many there are.
        index: Of the tile, as a row's `config`.
        epilogue: What the accumulator goes through.
        narrow: As `gemm_bytes` has it.

    Args:
        sizes: Of each product; one group.
        operands: The tensors of each.
        splits: Blocks that share a tile.
        ctx: The GPU.
        constant: Whether w of each is a weight, which no kernel writes.
        scales: Of the sums and the residual of each, if the epilogue scales.
        norm: As `gemm` has it.

    Raises:
        If a tensor map cannot be made or the launch fails.
    """
    comptime if index < FIRST_RESIDENT:
        comptime config = CONFIGS[index].halved() if narrow else CONFIGS[index]
        hopper_gemm[epilogue, config](
            sizes, operands, splits, ctx, constant=constant, scales=scales, norm=norm
        )
    elif index < FIRST_PINGPONG:
        comptime config = RESIDENT[index - FIRST_RESIDENT]
        resident_gemm[epilogue, config](
            sizes,
            rebind[Array[Operands[dtype], products]](operands),
            splits,
            ctx,
            constant=constant,
            norm=norm,
        )
    elif index < FIRST_TURNED:
        comptime config = PINGPONG[index - FIRST_PINGPONG]
        pingpong_gemm[epilogue, config](
            sizes, operands, ctx, constant=constant, scales=scales, norm=norm
        )
    else:
        comptime whole = TURNED[index - FIRST_TURNED]
        comptime config = whole.of_bytes(narrow=narrow) if size_of[dtype]() == 1 else whole
        turned_gemm[epilogue, config](
            sizes[0],
            rebind[Operands[dtype, dtype, right]](operands[0]),
            ctx,
            constant=constant,
            scales=rebind[Optional[Array[Scales, 1]]](scales),
        )


def gemm_bytes[
    dtype: DType,
    right: DType,
    out: DType,
    epilogue: Epilogue,
    narrow: Bool,
    layer: Layer = Layer(),
](g: Geometry, o: Operands[dtype, out, right], scales: Scales, ctx: DeviceContext) raises:
    """Enqueues a product of 8-bit numbers, on Hopper.

    Parameters:
        dtype: Of x.
        right: Of w.
        out: Of the residual and y.
        epilogue: What the accumulator goes through; it scales.
        narrow: Whether the channels leave half of a step of 128 bytes empty, and y has 8 bits too.
        layer: As `gemm` has it.

    Args:
        g: Sizes; one group.
        o: The tensors; of y in 8 bits the filters are in quads (`quad` of hopper/accumulator.mojo).
        scales: Of the sums, and of the residual.
        ctx: The GPU.

    Raises:
        If the launch fails, or the copy engine does not take the sizes.
    """
    comptime assert IS_HOPPER, "gemm: 8-bit numbers are multiplied on Hopper (sm_90a)"
    if not takes[dtype, out](g):
        raise Error(NOT_ALIGNED)

    def tile[index: Int](splits: Int) raises {imm}:
        enqueue_tile[index, epilogue, narrow]([g], [o], splits, ctx, scales={[scales]})

    _in_tile[Family(layer, 1, epilogue, narrow=narrow, turns=out == dtype)](tile, g, ctx)


def gemm_group[
    dtype: DType, products: Int, tf32: Bool, layer: Layer = Layer()
](
    sizes: Array[Geometry, products], operands: Array[Operands[dtype], products], ctx: DeviceContext
) raises:
    """Enqueues matrix products x w^T + bias of the same K and F: on Hopper in one launch.

    Parameters:
        dtype: Of x, w and y.
        products: How many there are.
        tf32: Whether tensor cores may round float32 to TF32, where they have it.
        layer: As `gemm` has it, of a product of the rows of all; aligned: each product.

    Args:
        sizes: Of each product.
        operands: The tensors of each; w is [F, K].
        ctx: The GPU.

    Raises:
        If a launch fails, or sizes are not aligned though they should be.
    """
    comptime hopper = IS_HOPPER and (dtype.is_half_float() or tf32)
    comptime none = Epilogue("none")
    comptime if hopper:
        if takes[dtype](sizes[0]):

            def tile[index: Int](splits: Int) raises {imm}:
                enqueue_tile[index, none](sizes, operands, splits, ctx)

            _in_tile[Family(layer, size_of[dtype](), none)](tile, _together(sizes), ctx)
            return
    comptime if hopper and layer.aligned:
        raise Error(NOT_ALIGNED)
    else:
        comptime for i in range(products):
            _gemm_elsewhere[dtype, none, True, tf32](sizes[i], operands[i], Batch(), ctx)


def gemm_bytes_group[
    dtype: DType, right: DType, out: DType, products: Int, layer: Layer = Layer()
](
    sizes: Array[Geometry, products],
    operands: Array[Operands[dtype, out, right], products],
    scales: Array[Scales, products],
    ctx: DeviceContext,
) raises:
    """Enqueues matrix products of 8-bit numbers of the same K and F in one launch, on Hopper.

    Parameters:
        dtype: Of x.
        right: Of w.
        out: Of y: a float.
        products: How many there are.
        layer: As `gemm_group` has it.

    Args:
        sizes: Of each product.
        operands: The tensors of each.
        scales: Of the sums of each.
        ctx: The GPU.

    Raises:
        If the launch fails, or the copy engine does not take the sizes.
    """
    comptime assert IS_HOPPER, "gemm: 8-bit numbers are multiplied on Hopper (sm_90a)"
    comptime epilogue = Epilogue("none", scales=True)
    if not takes[dtype, out](sizes[0]):
        raise Error(NOT_ALIGNED)

    def tile[index: Int](splits: Int) raises {imm}:
        enqueue_tile[index, epilogue](sizes, operands, splits, ctx, scales=scales.copy())

    _in_tile[Family(layer, 1, epilogue)](tile, _together(sizes), ctx)


def _together[products: Int, //](sizes: Array[Geometry, products]) -> Geometry:
    """Gives the sizes of a product of the rows of all, by which a tile is chosen."""
    var rows = 0
    comptime for i in range(products):
        rows += sizes[i].pixels()
    return Geometry(rows=rows, depth=sizes[0].c, columns=sizes[0].f)


def gemm_shortcut[
    dtype: DType, tf32: Bool, layer: Layer = Layer()
](
    g: Geometry, o: Operands[dtype], beside: Geometry, more: Operands[dtype], ctx: DeviceContext
) raises:
    """Enqueues relu(a convolution + a convolution of windows of 1 x 1): on Hopper in one launch.

    Parameters:
        dtype: Of x, w and y.
        tf32: Whether tensor cores may round float32 to TF32, where they have it.
        layer: As `gemm` has it; aligned: both convolutions.

    Args:
        g: Sizes; one group.
        o: The tensors.
        beside: Sizes of the second convolution: the same N, P, Q and F.
        more: Its x, w and bias; o's y.
        ctx: The GPU.

    Raises:
        If a launch fails, or sizes are not aligned though they should be.
    """
    comptime hopper = IS_HOPPER and (dtype.is_half_float() or tf32)
    comptime if hopper:
        if takes[dtype](g) and takes[dtype](beside):
            comptime relu = Epilogue("relu")
            comptime family = Family(layer, size_of[dtype](), relu, sources=2)

            def tile[index: Int](splits: Int) raises {imm}:
                hopper_shortcut[relu, CONFIGS[index]](g, o, beside, more, splits, ctx)

            _in_tile[family](tile, g, ctx, beside=beside.c)
            return
    comptime if hopper and layer.aligned:
        raise Error(NOT_ALIGNED)
    else:
        gemm[dtype, Epilogue("none"), True, tf32](beside, more, Batch(), ctx)
        # A thread reads what it is about to overwrite, and nothing else of y.
        var sum = Operands[dtype](o.x, o.w, o.bias, more.y, o.y)
        gemm[dtype, Epilogue("add_relu"), True, tf32](g, sum, Batch(), ctx)


def gemm_bytes_shortcut[
    dtype: DType, right: DType, epilogue: Epilogue, narrow: Bool, layer: Layer = Layer()
](
    g: Geometry,
    o: Operands[dtype, dtype, right],
    beside: Geometry,
    more: Operands[dtype, dtype, right],
    scales: Scales,
    ctx: DeviceContext,
) raises:
    """Enqueues act(a convolution + a convolution of windows of 1 x 1) of 8-bit numbers, on Hopper.

    Parameters:
        dtype: Of x and y.
        right: Of w.
        epilogue: What the accumulator goes through; it scales, and does not add.
        narrow: Whether the channels of either leave half of a step of 128 bytes empty.
        layer: As `gemm` has it.

    Args:
        g: Sizes; one group.
        o: The tensors; the filters are in quads (`quad` of hopper/accumulator.mojo).
        beside: Sizes of the second convolution: the same N, P, Q and F.
        more: Its x, w and bias; o's y.
        scales: Of the second's sums, and what the first's are multiplied by before.
        ctx: The GPU.

    Raises:
        If the launch fails, or the copy engine does not take the sizes.
    """
    comptime assert IS_HOPPER, "gemm: 8-bit numbers are multiplied on Hopper (sm_90a)"
    if not (takes[dtype](g) and takes[dtype](beside)):
        raise Error(NOT_ALIGNED)

    def tile[index: Int](splits: Int) raises {imm}:
        comptime config = CONFIGS[index].halved() if narrow else CONFIGS[index]
        hopper_shortcut[epilogue, config](g, o, beside, more, splits, ctx, scales={[scales]})

    _in_tile[Family(layer, 1, epilogue, narrow=narrow, sources=2)](tile, g, ctx, beside=beside.c)


def gemm_portable[
    dtype: DType, epilogue: Epilogue, k_major: Bool
](g: Geometry, o: Operands[dtype], batch: Batch, ctx: DeviceContext,) raises:
    """Enqueues products on the CUDA cores, whatever their sizes.

    Parameters:
        dtype: Of x, w and y.
        epilogue: What the accumulator goes through.
        k_major: Whether w is [F, K], or else [K, F].

    Args:
        g: Sizes of one product.
        o: The tensors of the first.
        batch: How many there are, and where.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var tiles = ceildiv(g.pixels(), TILE)
    ctx.enqueue_function[gemm_kernel[dtype, epilogue, k_major]](
        o,
        g,
        Int32(tiles),
        batch,
        grid_dim=(tiles * Int(batch.products), ceildiv(g.group_f(), TILE)),
        block_dim=THREADS,
    )
