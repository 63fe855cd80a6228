"""Convolution on a CPU: the indirect GEMM of ops/gemm, Winograd's algorithm (winograd.mojo) for
3 x 3 with a stride of 1 in float32, and direct kernels for small groups.

Small groups have as many filters as channels, M: 1 (depthwise), or 4, 8 or 16 in float32. The usual
windows go by strips of a row (strips.mojo); this is the kernel for all others, and short rows.

    y[n, p, q, f] = sum_rsc x[n, p * stride + r, q * stride + s, f // M * M + c] w[r, s, c, f]

As the GEMM it is indirect: where the taps of PIXELS neighbouring pixels read is found once for all
channels, and a tap in the padding reads zeros (Dukhan 2019, arXiv:1907.02129), so that one kernel
takes every window, stride and edge. Vectors run over filters; a vector of x has the channels of
their groups, and is shuffled within each group for every c. PIXELS x VECTORS sums stay in registers,
and a tap's weights serve all PIXELS. Depthwise is bound by loads from the first-level cache: one for
each FMA, and a sixth of one for the weights.
"""

from std.math import ceildiv
from std.memory import Layout, alloc, dealloc
from std.sys import CompilationTarget, simd_width_of

from max.runtime.asyncrt import parallelism_level

from ..dot import FILTER, I8, U8
from ..epilogue import Epilogue, Output
from ..gemm.cpu import gemm
from ..gemm.tiles import HAS_AMX, amx_granted
from ..gemm.tiles import gemm as gemm_tiles
from ..geometry import Geometry
from ..operands import BF16, F32, F64, WIDE, Data, Levels, Operands, widened
from ..parallel import over_cores
from .depthwise_bytes import HAS_BYTES, convolve_bytes, takes_bytes
from .strips import convolve_strips, shuffled, takes
from .winograd import convolve_winograd
from .winograd import takes as takes_winograd

comptime WIDTH = simd_width_of[F32]()
"""Lanes of a vector."""


def conv2d_cpu[
    dtype: DType, out: DType, right: DType, //, epilogue: Epilogue, members: Int
](g: Geometry, o: Operands[dtype, out, right, WIDE[dtype]], given: Optional[Levels] = None):
    """Convolves on all cores.

    Parameters:
        dtype: Of the activations: float32, bfloat16, float64 or uint8.
        out: Of the result.
        right: Of the filter.
        epilogue: What the accumulator goes through.
        members: Channels, and filters, of a small group; 0 for other convolutions.

    Args:
        g: Sizes.
        o: Tensors; the filter is w[R, S, members, F], or packed panels if that is 0.
        given: What integers stand for.
    """
    var levels = given.or_else(Levels(o.bias))
    comptime if members > 0:
        comptime if dtype == U8 and HAS_BYTES:
            if takes_bytes(g):
                convolve_bytes[epilogue](g, rebind[Operands[U8, out, I8]](o), levels)
                return
        elif dtype != F64:
            if takes[members](g):
                convolve_strips[epilogue, members](
                    g, rebind[Operands[dtype, out, right]](o), levels
                )
                return
        _direct[epilogue, members](g, o, levels)
    else:
        comptime if dtype == BF16:
            gemm_tiles[epilogue](g, rebind[Operands[BF16, out]](o))
        else:
            comptime if dtype == F32 and out == F32 and not epilogue.scales:
                if takes_winograd(g):
                    convolve_winograd[epilogue](g, rebind[Operands[F32]](o))
                    return
            comptime if dtype == U8 and HAS_AMX[U8]:
                if amx_granted[U8]():
                    gemm_tiles[epilogue](g, rebind[Operands[U8, out, I8]](o), levels)
                    return
            comptime Tensors = Operands[dtype, out, FILTER[dtype], WIDE[dtype]]
            gemm[epilogue](g, rebind[Tensors](o), levels)


comptime PIXELS = 6
"""Pixels that are computed together."""
comptime VECTORS = 4 if CompilationTarget.has_avx512f() or CompilationTarget.has_neon() else 2
"""Vectors of filters that are: 24 sums of 32 registers, or 12 of 16 (AVX2)."""


def _direct[
    dtype: DType, out: DType, right: DType, //, epilogue: Epilogue, members: Int
](g: Geometry, o: Operands[dtype, out, right, WIDE[dtype]], levels: Levels):
    # Eight tasks a core even out their times.
    var tasks = 8 * parallelism_level(None)
    var block = ceildiv(ceildiv(g.pixels(), tasks), PIXELS) * PIXELS

    def task(index: Int) {var}:
        var last = min((index + 1) * block, g.pixels())
        _direct_block[epilogue, members](g, o, levels, index * block, last)

    over_cores(task, ceildiv(g.pixels(), block))


@no_inline
def _direct_block[
    dtype: DType, out: DType, right: DType, //, epilogue: Epilogue, members: Int
](g: Geometry, o: Operands[dtype, out, right, WIDE[dtype]], levels: Levels, first: Int, last: Int):
    """Computes the pixels `first` to `last`."""
    var taps = g.r * g.s
    var found = alloc(Layout[Data[dtype]](count=taps * PIXELS))
    var used = alloc(Layout[Int](count=taps))
    var memory = alloc(Layout[Scalar[dtype]](count=g.c))
    var zeros = rebind[Data[dtype]](memory.unsafe_ptr())
    for c in range(g.c):
        zeros[unsafe_offset=c] = levels.zero.cast[dtype]()
    var sources = rebind[Sources[dtype]](found.unsafe_ptr())
    var places = rebind[Places](used.unsafe_ptr())
    # Shuffled, x takes registers beside the sums.
    comptime AT_ONCE = VECTORS if members == 1 else VECTORS // 2
    var wide = g.f // (AT_ONCE * WIDTH) * AT_ONCE * WIDTH
    for pixel in range(first, last, PIXELS):
        var pixels = min(PIXELS, last - pixel)
        var count = _find_taps(g, o.x, zeros, pixel, pixels, sources, places)
        var here = o.shifted(y=pixel * g.f)
        for f in range(0, wide, AT_ONCE * WIDTH):
            _direct_tile[epilogue, members, AT_ONCE, WIDTH](
                g, here, levels, sources, places, count, f, pixels
            )
        if g.f < WIDTH:
            comptime if members == 1:
                for f in range(g.f):
                    _direct_tile[epilogue, 1, 1, 1](
                        g, here, levels, sources, places, count, f, pixels
                    )
        else:
            # The last vector ends with the last filter: some results are computed twice.
            for f in range(wide, g.f, WIDTH):
                _direct_tile[epilogue, members, 1, WIDTH](
                    g, here, levels, sources, places, count, min(f, g.f - WIDTH), pixels
                )
    dealloc(memory^)
    dealloc(used^)
    dealloc(found^)


comptime Sources[dtype: DType] = Pointer[Data[dtype], MutUntrackedOrigin]
"""Where pixels read.

Parameters:
    dtype: Of the activations.
"""
comptime Places = Pointer[Int, MutUntrackedOrigin]
"""Numbers of taps."""


@no_inline
def _find_taps[
    dtype: DType
](
    g: Geometry,
    x: Data[dtype],
    zeros: Data[dtype],
    first: Int,
    pixels: Int,
    sources: Sources[dtype],
    places: Places,
) -> Int:
    """Finds where the taps of PIXELS pixels from `first` on read; those beyond `pixels` read zeros.

    Returns:
        How many taps read anything but zeros; `places` has their numbers, `sources` PIXELS of each.
    """
    var h0 = Array[Int, PIXELS](uninitialized=True)
    var w0 = Array[Int, PIXELS](uninitialized=True)
    var image = Array[Int, PIXELS](uninitialized=True)
    var n, pixel = divmod(first, g.p * g.q)
    var p, q = divmod(pixel, g.q)
    comptime for i in range(PIXELS):
        h0[i] = p * g.stride_h - g.pad_h
        w0[i] = q * g.stride_w - g.pad_w
        image[i] = n * g.h
        q += 1
        if q == g.q:
            p, q = p + 1, 0
            if p == g.p:
                n, p = n + 1, 0
    var count = 0
    for r in range(g.r):
        for s in range(g.s):
            var reads = False
            comptime for i in range(PIXELS):
                var h = h0[i] + r * g.dilation_h
                var w = w0[i] + s * g.dilation_w
                var source = zeros
                if i < pixels and 0 <= h < g.h and 0 <= w < g.w:
                    source = x.unsafe_offset(((image[i] + h) * g.w + w) * g.c)
                    reads = True
                sources[unsafe_offset=count * PIXELS + i] = source
            places[unsafe_offset=count] = r * g.s + s
            count += Int(reads)
    return count


@no_inline
def _direct_tile[
    dtype: DType,
    out: DType,
    right: DType,
    //,
    epilogue: Epilogue,
    members: Int,
    vectors: Int,
    width: Int,
](
    g: Geometry,
    o: Operands[dtype, out, right, WIDE[dtype]],
    levels: Levels,
    sources: Sources[dtype],
    places: Places,
    count: Int,
    f: Int,
    pixels: Int,
):
    """Computes `vectors` vectors of filters from `f` on of `pixels` pixels, where `o.y` begins."""
    var output = Output[epilogue](o, levels)
    var sums = Array[SIMD[WIDE[dtype], width], PIXELS * vectors](fill=0)
    comptime if not epilogue.scales:
        comptime for v in range(vectors):
            var bias = o.bias.unsafe_load[width=width](f + v * width)
            comptime for i in range(PIXELS):
                sums[i * vectors + v] = bias
    for tap in range(count):
        var place = places[unsafe_offset=tap] * members * g.f + f
        comptime for c in range(members):
            var weights = Array[SIMD[WIDE[dtype], width], vectors](uninitialized=True)
            comptime for v in range(vectors):
                weights[v] = widened[WIDE[dtype]](
                    o.w.unsafe_load[width=width](place + c * g.f + v * width)
                )
            comptime for i in range(PIXELS):
                var source = sources[unsafe_offset=tap * PIXELS + i]
                comptime for v in range(vectors):
                    var value: SIMD[WIDE[dtype], width]
                    comptime if members > width:  # they are all of one group
                        var first = (f + v * width) // members * members
                        value = levels.widened(source[unsafe_offset=first + c])
                    else:
                        var x = levels.widened(source.unsafe_load[width=width](f + v * width))
                        value = shuffled[members, c](x)
                    sums[i * vectors + v] = value.fma(weights[v], sums[i * vectors + v])
    comptime for i in range(PIXELS):
        if i < pixels:
            comptime for v in range(vectors):
                output.end(sums[i * vectors + v], f + v * width, i * g.f + f + v * width)
