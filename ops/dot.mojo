"""What a CPU multiplies with: a step of K of one pixel and a vector of filters.

In float32, and float64, a step is one number, and a multiply-add. In 8 bits it is four: x86 adds
their products up by vpdpbusd (AVX-512 VNNI, AVX-VNNI), and before that by vpmaddwd of pairs of 16
bits. The sums are exact: none saturates.
"""

from std.memory import bitcast
from std.sys import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

from .operands import F32, F64, Data

comptime U8 = DType.uint8
"""Of activations."""
comptime I8 = DType.int8
"""Of filters."""
comptime I32 = DType.int32
"""Of their sums."""

comptime FLOATS[dtype: DType] = dtype == F32 or dtype == F64
"""Whether numbers are multiplied as they are.

Parameters:
    dtype: Of the activations, float32, float64 or uint8.
"""
comptime SUM[dtype: DType] = dtype if FLOATS[dtype] else I32
"""What products are added up in.

Parameters:
    dtype: Of the activations.
"""
comptime FILTER[dtype: DType] = dtype if FLOATS[dtype] else I8
"""The dtype of filters.

Parameters:
    dtype: Of the activations.
"""
comptime STEP[dtype: DType] = 1 if FLOATS[dtype] else 4
"""Numbers of K that are multiplied at once; they lie beside each other for each filter.

Parameters:
    dtype: Of the activations.
"""
comptime HAS_VNNI[width: Int] = _has["avx512vnni"]() and (
    width == 16 or _has["avx512vl"]() and width in (4, 8)
) or _has["avxvnni"]() and width in (4, 8)
"""Whether the CPU that is compiled for has vpdpbusd.

Parameters:
    width: Lanes of the sums.
"""


@always_inline
def spread[dtype: DType, //, width: Int](x: Data[dtype]) -> SIMD[dtype, width * STEP[dtype]]:
    """Loads a step of K into all lanes.

    Parameters:
        dtype: Of the activations.
        width: Lanes of the sums.

    Args:
        x: The step's first number.

    Returns:
        The step, `width` times.
    """
    comptime if FLOATS[dtype]:
        return SIMD[dtype, width * STEP[dtype]](x[unsafe_offset=0])
    else:
        var step = bitcast[I32, 1](x.unsafe_load[width=4](0))
        return bitcast[dtype, width * STEP[dtype]](SIMD[I32, width](step))


@always_inline
def dot[
    dtype: DType, width: Int
](
    sum: SIMD[SUM[dtype], width],
    x: SIMD[dtype, width * STEP[dtype]],
    w: SIMD[FILTER[dtype], width * STEP[dtype]],
) -> SIMD[SUM[dtype], width]:
    """Adds the products of a step of K to a sum in each lane.

    Parameters:
        dtype: Of the activations.
        width: Lanes of the sums.

    Args:
        sum: The sums.
        x: Activations.
        w: Filters.

    Returns:
        The new sums.
    """
    comptime Sums = SIMD[SUM[dtype], width]
    comptime if FLOATS[dtype]:
        var a, b = rebind[Sums](x), rebind[Sums](w)
        return a.fma(b, sum)
    elif HAS_VNNI[width]:
        comptime bits: StaticString = "512" if width == 16 else ("256" if width == 8 else "128")
        return llvm_intrinsic["llvm.x86.avx512.vpdpbusd." + bits, Sums](sum, x, w)
    else:
        comptime I16 = DType.int16
        var left, right = bitcast[I16, 2 * width](x), bitcast[I16, 2 * width](w)
        var upper = bitcast[I16, 2 * width](bitcast[DType.uint16, 2 * width](x) >> 8)
        var even = _pairs[width](left & 0xFF, (right << 8) >> 8)
        return sum + rebind[Sums](even + _pairs[width](upper, right >> 8))


@always_inline
def _pairs[
    width: Int
](a: SIMD[DType.int16, 2 * width], b: SIMD[DType.int16, 2 * width]) -> SIMD[I32, width]:
    """Adds up the products of neighbours."""
    comptime if width == 8 and _has["avx2"]():
        return llvm_intrinsic["llvm.x86.avx2.pmadd.wd", SIMD[I32, width]](a, b)
    elif width == 16 and _has["avx512bw"]():
        return llvm_intrinsic["llvm.x86.avx512.pmaddw.d.512", SIMD[I32, width]](a, b)
    else:
        var even, odd = (a.cast[I32]() * b.cast[I32]()).deinterleave()
        return rebind[SIMD[I32, width]](even + odd)


def _has[feature: StaticString]() -> Bool:
    return CompilationTarget.is_x86() and CompilationTarget._has_feature[feature]()
