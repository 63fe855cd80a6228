"""Implicit GEMM on a GPU: y[m, f] = act(alpha * sum_k x[row(m, k)] b[k, f] + bias[f] + residual).

M = N * P * Q output pixels, K = R * S * C taps and channels, N = F filters; see gemm/cpu.mojo.

    x[N, H, W, C]   activations
    b[F, K]         filters, K ordered R, S, C (or b[K, F] for a product with b not transposed)
    y[N, P, Q, F]   result

A block of 256 threads computes a 64 x 64 tile, each thread 4 x 4, from 16 steps of K at a time
in two alternating stages of shared memory; what the next stage needs is read from device memory
while this one is multiplied. Loads are 4 wide where C (and F) allow it. CUDA cores and float32
throughout, whatever the dtype of x, b and y, so it runs on every GPU: the portable baseline.
Bound by the FMA units; the tensor-core kernels that replace it have an issue of their own.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.sys import size_of

from ..epilogue import Epilogue, activate
from ..geometry import Data, Geometry

comptime F32 = DType.float32
comptime THREADS = 256
comptime TILE = 64
"""Pixels, and filters, of a block."""
comptime DEPTH = 16
"""Steps of K in a stage."""
comptime PER_THREAD = 4
comptime PITCH = TILE + 4
"""Floats from one step of K to the next in shared memory; 4 more than needed, against conflicts."""
comptime STAGE = DEPTH * PITCH


@always_inline
def load4[dtype: DType](at: Data[dtype]) -> SIMD[F32, 4]:
    """Loads four neighbours, aligned to their size, as float32."""
    return at.unsafe_load[width=4, alignment = 4 * size_of[dtype]()]().cast[F32]()


@always_inline
def _patch[
    dtype: DType
](g: Geometry, x: Data[dtype], k: Int32, inside: Bool, h0: Int32, w0: Int32, vectors: Bool) -> SIMD[F32, 4]:
    """Reads x at four steps of K from `k` on, for the pixel whose window begins at h0, w0."""
    var value = SIMD[F32, 4](0)
    if not inside:
        return value
    var c = Int32(g.group_c())
    var depth = Int32(g.r * g.s) * c
    comptime for j in range(4):
        if j == 0 or not vectors:
            var tap = (k + Int32(j)) // c
            var channel = (k + Int32(j)) - tap * c
            var r = tap // Int32(g.s)
            var s = tap - r * Int32(g.s)
            var h = h0 + r * Int32(g.dilation_h)
            var w = w0 + s * Int32(g.dilation_w)
            if k + Int32(j) < depth and h >= 0 and h < Int32(g.h) and w >= 0 and w < Int32(g.w):
                var at = x.unsafe_offset((Int(h) * g.w + Int(w)) * g.c + Int(channel))
                if vectors:
                    value = load4(at)
                else:
                    value[j] = at[unsafe_offset=0].cast[F32]()
    return value


@always_inline
def _filters[
    dtype: DType, k_major: Bool
](b: Data[dtype], k: Int, f: Int, depth: Int, columns: Int, vectors: Bool) -> SIMD[F32, 4]:
    """Reads b at four steps of K (k_major), or at four filters of one step, from k, f on."""
    var value = SIMD[F32, 4](0)
    comptime for j in range(4):
        if j == 0 or not vectors:
            var at_k = k + j if k_major else k
            var at_f = f if k_major else f + j
            if at_k < depth and at_f < columns:
                var at = b.unsafe_offset(at_f * depth + at_k if k_major else at_k * columns + at_f)
                if vectors:
                    value = load4(at)
                else:
                    value[j] = at[unsafe_offset=0].cast[F32]()
    return value


def gemm_kernel[
    dtype: DType, epilogue: Epilogue, k_major: Bool
](
    x: Data[dtype],
    b: Data[dtype],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    g: Geometry,
    alpha: Float32,
    tiles: Int32,
    x_step: Int64,
    b_step: Int64,
    y_step: Int64,
    bias_step: Int64,
):
    """Computes one 64 x 64 tile of one product; the products (groups, or a batch) lie `_step`s
    apart, and block_idx.x counts `tiles` tiles of pixels for each of them.
    """
    var t = Int(thread_idx.x)
    var product = Int(block_idx.x) // Int(tiles)
    var m0 = (Int(block_idx.x) - product * Int(tiles)) * TILE
    var f0 = Int(block_idx.y) * TILE
    var a = x.unsafe_offset(product * Int(x_step))
    var w = b.unsafe_offset(product * Int(b_step))
    var to = y.unsafe_offset(product * Int(y_step))
    var plus = residual.unsafe_offset(product * Int(y_step))
    var shift = bias.unsafe_offset(product * Int(bias_step))

    var pixels = g.pixels()
    var columns = g.group_f()
    var depth = g.r * g.s * g.group_c()
    var a_vectors = g.group_c() % 4 == 0
    var b_vectors = (depth if k_major else columns) % 4 == 0

    # Where this thread reads: 4 threads a row, 4 steps of K each (b not transposed: 16 a step).
    var row = t // 4
    var row_k = t % 4 * 4
    var b_f = row if k_major else t % 16 * 4
    var b_k = row_k if k_major else t // 16
    var m = m0 + row
    var image = m // (g.p * g.q)
    var pixel = m - image * (g.p * g.q)
    var p = pixel // g.q
    var h0 = Int32(p * g.stride_h - g.pad_h)
    var w0 = Int32((pixel - p * g.q) * g.stride_w - g.pad_w)
    a = a.unsafe_offset(image * g.h * g.w * g.c)

    var a_tile = unsafe_stack_allocation[
        2 * STAGE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var b_tile = unsafe_stack_allocation[
        2 * STAGE, Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var acc = Array[SIMD[F32, 4], PER_THREAD](fill=0)
    var next_a = _patch(g, a, Int32(row_k), m < pixels, h0, w0, a_vectors)
    var next_b = _filters[dtype, k_major](w, b_k, f0 + b_f, depth, columns, b_vectors)
    var stage = 0
    for k0 in range(0, depth, DEPTH):
        comptime for j in range(4):
            a_tile[unsafe_offset=stage + (row_k + j) * PITCH + row] = next_a[j]
            comptime if k_major:
                b_tile[unsafe_offset=stage + (b_k + j) * PITCH + b_f] = next_b[j]
            else:
                b_tile[unsafe_offset=stage + b_k * PITCH + b_f + j] = next_b[j]
        barrier()
        if k0 + DEPTH < depth:
            next_a = _patch(g, a, Int32(k0 + DEPTH + row_k), m < pixels, h0, w0, a_vectors)
            next_b = _filters[dtype, k_major](
                w, k0 + DEPTH + b_k, f0 + b_f, depth, columns, b_vectors
            )
        comptime for k in range(DEPTH):
            var at = stage + k * PITCH
            var av = a_tile.unsafe_load[width=4, alignment=16](at + t // 16 * 4)
            var bv = b_tile.unsafe_load[width=4, alignment=16](at + t % 16 * 4)
            comptime for i in range(PER_THREAD):
                acc[i] = bv.fma(av[i], acc[i])
        stage = STAGE - stage

    var f = f0 + t % 16 * 4
    comptime for i in range(PER_THREAD):
        var m_out = m0 + t // 16 * 4 + i
        if m_out < pixels and f < columns:
            var at = m_out * g.f + f
            if g.f % 4 == 0 and columns % 4 == 0:
                var value = acc[i].fma(alpha, load4(shift.unsafe_offset(f)))
                comptime if epilogue.adds:
                    value += load4(plus.unsafe_offset(at))
                to.unsafe_store[alignment = 4 * size_of[dtype]()](
                    at, activate[epilogue](value).cast[dtype]()
                )
            else:
                for j in range(min(4, columns - f)):
                    var value = acc[i][j] * alpha + shift[unsafe_offset = f + j]
                    comptime if epilogue.adds:
                        value += plus[unsafe_offset = at + j].cast[F32]()
                    to[unsafe_offset = at + j] = activate[epilogue](value).cast[dtype]()


def gemm[
    dtype: DType, epilogue: Epilogue, k_major: Bool
](
    g: Geometry,
    products: Int,
    x: Data[dtype],
    b: Data[dtype],
    bias: Data[F32],
    residual: Data[dtype],
    y: Data[dtype],
    alpha: Float32,
    steps: Array[Int, 4],
    ctx: DeviceContext,
) raises:
    """Enqueues `products` products that lie `steps` (of x, b, y, bias; in elements) apart."""
    var tiles = ceildiv(g.pixels(), TILE)
    ctx.enqueue_function[gemm_kernel[dtype, epilogue, k_major]](
        x, b, bias, residual, y, g, alpha, Int32(tiles),
        Int64(steps[0]), Int64(steps[1]), Int64(steps[2]), Int64(steps[3]),
        grid_dim=(tiles * products, ceildiv(g.group_f(), TILE)),
        block_dim=THREADS,
    )
