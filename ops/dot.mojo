"""What a CPU multiplies with: a step of K of one pixel and a vector of filters.

In float32, and float64, a step is one number, and a multiply-add. In 8 bits it is four. The sums are
exact: none saturates.

| CPU                     | adds the products of a step by                                   |
| ----------------------- | ---------------------------------------------------------------- |
| AVX-512 VNNI, AVX-VNNI  | vpdpbusd                                                         |
| other x86               | vpmaddwd of pairs of 16 bits                                     |
| Arm with i8mm           | usdot                                                            |
| Arm with dotprod        | sdot: of activations less 128 (`SHIFT`)                          |
| other Arm               | smull and additions of neighbours, of activations less 128 too   |
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
comptime SHIFT = 128 if CompilationTarget.has_neon() and not _arm_has["i8mm"]() else 0
"""What `spread` takes from activations of 8 bits: 128 where the CPU multiplies signed bytes alone.

Whoever adds products up begins with as many times the sum of the filter.
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
    """Loads a step of K into all lanes, in 8 bits less `SHIFT`.

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
        return bitcast[dtype, width * STEP[dtype]](SIMD[I32, width](step)) ^ Scalar[dtype](SHIFT)


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
        x: Activations, as `spread` gives them.
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
    elif CompilationTarget.has_neon() and width == 4:
        comptime if _arm_has["i8mm"]():
            return llvm_intrinsic["llvm.aarch64.neon.usdot.v4i32.v16i8", Sums](sum, x, w)
        elif _arm_has["dotprod"]():
            return llvm_intrinsic["llvm.aarch64.neon.sdot.v4i32.v16i8", Sums](sum, x, w)
        else:
            return sum + rebind[Sums](_quads(bitcast[I8, 16](x), rebind[SIMD[I8, 16]](w)))
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


@always_inline
def _quads(a: SIMD[I8, 16], b: SIMD[I8, 16]) -> SIMD[I32, 4]:
    """Adds up the products of each four neighbours on Arm."""
    comptime I16 = DType.int16
    comptime pairs = "llvm.aarch64.neon.saddlp.v4i32.v8i16"
    var low = a.slice[8]().cast[I16]() * b.slice[8]().cast[I16]()
    var high = a.slice[8, offset=8]().cast[I16]() * b.slice[8, offset=8]().cast[I16]()
    return llvm_intrinsic["llvm.aarch64.neon.addp.v4i32", SIMD[I32, 4]](
        llvm_intrinsic[pairs, SIMD[I32, 4]](low), llvm_intrinsic[pairs, SIMD[I32, 4]](high)
    )


def _arm_has[feature: StaticString]() -> Bool:
    return CompilationTarget.has_neon() and CompilationTarget._has_feature[feature]()


def _has[feature: StaticString]() -> Bool:
    return CompilationTarget.is_x86() and CompilationTarget._has_feature[feature]()
