"""What single instructions compute, on rows of lanes (PTX ISA 8.0, section 9.7)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import copyto

__all__ = ["copyto"]

Array = Any
PARAMETERS = np.uint64(1 << 60)
"""Where kernel parameters lie in the generic space; parameter i begins at i * 2^20."""
WINDOW = 24
"""Bits of an offset in a block's shared memory; above them its rank in the cluster, plus one."""
u32_ = np.uint32
LANES = np.arange(32)
SMALLEST = np.finfo(np.float32).tiny
"""The smallest number of float32 that is not subnormal."""


def from_bf16(bits: Array) -> Array:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """Rounds to nearest even; NaN becomes 0x7FFF."""
    x = np.asarray(x, np.float32)
    b = x.view(np.uint32)
    rounded = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def to_f16(x: Array) -> Array:
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)


def to_tf32(x: Array) -> Array:
    """Rounds to 10 bits of mantissa, nearest with ties away from zero (cvt.rna)."""
    b = np.asarray(x, np.float32).view(np.uint32)
    return (b + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def _float8(exponent: int, mantissa: int, bias: int) -> Array:
    """Lists the finite numbers of 8 bits with so many bits of exponent and mantissa."""
    bits = np.arange(256)
    power = bits >> mantissa & (1 << exponent) - 1
    part = (bits & (1 << mantissa) - 1) / (1 << mantissa)
    size = np.where(power > 0, 1 + part, 2 * part) * 2.0 ** (power - bias)
    return np.where(bits > 127, -size, size)


FLOAT8 = {"float8_e4m3fn": _float8(4, 3, 7), "float8_e5m2": _float8(5, 2, 15)}
"""Each byte's number (PTX ISA 8.0, 5.2.3); e4m3 has no infinity."""
FLOAT8["float8_e4m3fn"][[0x7F, 0xFF]] = np.nan
FLOAT8["float8_e5m2"][[0x7C, 0xFC]] = np.inf, -np.inf
FLOAT8["float8_e5m2"][[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan


def to_float8(x: Array, name: str) -> Array:
    """Rounds to nearest even; what is too large becomes the largest finite number (.satfinite)."""
    x = np.asarray(x, np.float64)
    finite = np.flatnonzero(np.isfinite(FLOAT8[name][:128]))  # they ascend, as their bits do
    middles = (FLOAT8[name][finite[1:]] + FLOAT8[name][finite[:-1]]) / 2
    low = np.searchsorted(middles, np.abs(x))
    even = low + (low & 1) * (middles[np.minimum(low, len(middles) - 1)] == np.abs(x))
    bits = np.where(np.isnan(x), 0x7F, even) | np.signbit(x) << 7
    return bits.astype(np.uint8)


def to_integers(x: Array, name: str) -> Array:
    """Converts whole floats; what is beyond an end becomes that, and NaN 0 (9.7.9.21, cvt)."""
    limits = np.iinfo(name)
    x = np.where(np.isnan(x), 0, np.asarray(x, np.float64))
    inside = (x > limits.min) & (x < limits.max)
    ends = np.where(x > 0, np.array(limits.max, name), np.array(limits.min, name))
    return np.where(inside, np.where(inside, x, 0).astype(name), ends)


def pack_saturated(kind: str, a: Array, b: Array, c: Array) -> Array:
    """Packs two integers of 8 bits, b lower, below the lower half of c (9.7.9.22, cvt.pack)."""
    limits = np.iinfo({"s8": np.int8, "u8": np.uint8}[kind])
    low, high = (np.clip(n, limits.min, limits.max).astype(np.uint32) & u32_(255) for n in (b, a))
    return low | high << u32_(8) | np.asarray(c).astype(np.uint32) << u32_(16)


def bfe(kind: str, x: Array, start: Array, length: Array) -> Array:
    """Takes bits out of a word (9.7.1.19): signed, the highest of them is the sign."""
    rest = u32_(32) - np.asarray(length).astype(np.uint32)
    moved = shl(np.asarray(x).astype(np.uint32), rest - start)
    return shr(moved.view(np.int32), rest).view(np.uint32) if kind == "s32" else shr(moved, rest)


def fma(x: Array, y: Array, z: Array) -> Array:
    """Exact products in float64, so that the sum is rounded once but for rare double rounding.

    Of float64 they are rounded to the 64 bits of x86's long double.
    """
    if np.asarray(x).dtype == np.float64:
        return (np.longdouble(1) * x * y + z).astype(np.float64)
    return (np.float64(1) * x * y + z).astype(np.float32)


def flushed(x: Array) -> Array:
    """Makes subnormal numbers zeros of their sign (.ftz)."""
    return x * (np.abs(x) >= SMALLEST)


UNARY = {
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
    "ex2": lambda x: np.exp2(np.float64(1) * x).astype(np.float32),
    "lg2": lambda x: np.log2(np.float64(1) * x).astype(np.float32),
    "tanh": np.tanh,
}


def widened(x: Array) -> Array:
    kind = {"uint16": np.uint32, "int16": np.int32, "uint32": np.uint64, "int32": np.int64}
    return x.astype(kind[x.dtype.name])


def high(x: Array, y: Array) -> Array:
    """The upper half of a product."""
    bits = x.dtype.itemsize * 8
    if bits < 64:
        return ((widened(x) * widened(y)) >> widened(x.dtype.type(bits))).astype(x.dtype)
    pairs = np.broadcast(x, y)
    mask = (1 << 64) - 1
    words = [((int(a) * int(b)) >> 64) & mask for a, b in pairs]
    return np.array(words, np.uint64).view(x.dtype)


def div_integers(x: Array, y: Array) -> Array:
    """Rounds towards zero; a division by zero gives all ones, as the hardware does."""
    zero = y == 0
    safe = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        return np.where(zero, ~x.dtype.type(0), x // safe)
    quotient = np.abs(x) // np.abs(safe)
    return np.where(zero, x.dtype.type(-1), np.where((x < 0) != (safe < 0), -quotient, quotient))


def rem_integers(x: Array, y: Array) -> Array:
    return x - div_integers(x, y) * y


def shl(x: Array, y: Array) -> Array:
    bits = x.dtype.itemsize * 8
    return np.where(y < bits, x << np.minimum(y, bits - 1).astype(x.dtype), x.dtype.type(0))


def shr(x: Array, y: Array) -> Array:
    bits = x.dtype.itemsize * 8
    moved = x >> np.minimum(y, bits - 1).astype(x.dtype)
    return moved if x.dtype.kind == "i" else np.where(y < bits, moved, x.dtype.type(0))


def packed(values: list[Array], dtype: Any) -> Array:
    """Packs equal parts into a word, the first lowest."""
    bits = np.dtype(dtype).itemsize * 8 // len(values)
    word = np.asarray(values[0]).astype(dtype)
    for i, value in enumerate(values[1:], 1):
        word = word | (np.asarray(value).astype(dtype) << dtype(i * bits))
    return word


def permute(a: Array, b: Array, c: Array, mode: str) -> Array:
    """Chooses bytes of the pair b:a (9.7.8.6): the default mode, and f4e."""
    both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    c = np.asarray(c).astype(np.uint64)
    if mode == "f4e":
        return (both >> ((c & np.uint64(3)) * np.uint64(8))).astype(np.uint32)
    if mode:
        raise NotImplementedError(f"prmt.{mode}")
    word: Array = np.uint64(0)
    for i in range(4):
        selector = (c >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((selector & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte > 127, np.uint64(255), np.uint64(0))
        byte = np.where(selector > 7, sign, byte)
        word = word | (byte << np.uint64(8 * i))
    return word.astype(np.uint32)


def shf(side: str, how: str, a: Array, b: Array, c: Array) -> Array:
    """Shifts the pair b:a (9.7.7.7)."""
    both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    by = (c & np.uint32(31) if how == "wrap" else np.minimum(c, np.uint32(32))).astype(np.uint64)
    moved = both >> by if side == "r" else (both << by) >> np.uint64(32)
    return moved.astype(np.uint32)


def mapped(address: Array, rank: Array) -> Array:
    """Names a block's copy of a shared address (mapa)."""
    return address + ((rank + np.uint32(1)) << np.uint32(WINDOW))


def popc(bits: Array) -> Array:
    """Counts ones (9.7.1.16)."""
    ones = np.unpackbits(np.atleast_1d(bits).astype(np.uint32).view(np.uint8)).reshape(-1, 32)
    return ones.sum(1, dtype=np.uint32)


def transposed(register: Array) -> Array:
    """Transposes the 8 x 8 matrix of halves that each warp holds (movmatrix)."""
    halves = np.ascontiguousarray(register).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1).view(np.uint32)


def _pairs(register: Array, kind: str) -> Array:
    """A register of each lane as [warps, 8, 8] numbers: row lane / 4, columns 2 (lane % 4)."""
    halves = np.ascontiguousarray(register).view(np.uint16)
    numbers = from_bf16(halves) if kind == "bf16" else halves.view(np.float16).astype(np.float32)
    return numbers.reshape(-1, 8, 8)


def _singles(register: Array) -> Array:
    """A register of each lane as [warps, 8, 4] numbers, TF32: the low 13 bits do not count."""
    bits = np.ascontiguousarray(register) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).reshape(-1, 8, 4)


def from_bytes(raw: Array, kind: str) -> Array:
    """Numbers of 8 bits."""
    if kind in ("e4m3", "e5m2"):
        return FLOAT8["float8_e5m2" if kind == "e5m2" else "float8_e4m3fn"][raw]
    return raw.view(np.int8) if kind == "s8" else raw


def float8_products(x: Array, y: Array, sums: Array | float = 0, depth: int = 32) -> Array:
    """Adds x[M, K] y[N, K]^T of 8-bit floats to sums[M, N], as wgmma does: bit by bit as an H200.

    An instruction multiplies ``depth`` numbers of K. A product has the sum of its factors'
    exponents. All products and the sum so far lose, toward zero, what is less than 2^-13 of the
    largest such power of two, and are added up exactly; 13 bits of the result's mantissa stay. The
    PTX manual does not say so; DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) found 14 bits in all.
    """
    total = np.broadcast_to(np.asarray(sums, np.float64), (len(x), len(y)))
    for k in range(0, x.shape[1], depth):
        a, b = x[:, None, k : k + depth], y[None, :, k : k + depth]
        terms = np.concatenate([a * b, total[..., None]], 2)
        exponents = np.frexp(a)[1] + np.frexp(b)[1] - 2
        exponents = np.concatenate([exponents, np.frexp(total)[1][..., None] - 1], 2)
        largest = np.where(terms != 0, exponents, -(1 << 8)).max(2)
        unit = 2.0 ** (largest - 13)
        fraction, power = np.frexp(np.trunc(terms / unit[..., None]).sum(2) * unit)
        total = np.ldexp(np.trunc(fraction * 2**14), power - 14)
    return total


BYTES = ("e4m3", "e5m2", "s8", "u8")
"""Kinds of 8 bits, as PTX names them."""


def _fours(register: Array, kind: str) -> Array:
    """A register of each lane as [warps, 8, 16] numbers: row lane / 4, columns 4 (lane % 4)."""
    return from_bytes(np.ascontiguousarray(register).view(np.uint8), kind).reshape(-1, 8, 16)


def fragment(a: list[Array], kind: str) -> Array:
    """The left side that each warp holds: [warps, 16, K], for mma as for wgmma (9.7.14.5)."""
    wide = _fours if kind in BYTES else _pairs
    part = _singles if kind == "tf32" else lambda r: wide(r, kind)
    # Registers 0 and 1 of A are rows 0 to 7 and 8 to 15; 2 and 3 the same of the next columns.
    columns = [np.concatenate([part(a[i]), part(a[i + 1])], 1) for i in range(0, len(a), 2)]
    return np.concatenate(columns, 2).astype(np.float64)


def two_four(values: Array, words: Array, selector: int, kind: str) -> Array:
    """Spreads 16 x K / 2 numbers over 16 x K, two of each four (9.7.14.6).

    Args:
        values: The left side of a warp's product.
        words: The lanes' indices: of 8 bits those of all lanes, each of one row; else those of two
            of four lanes, each of two rows.
        selector: Which two, or 0.
        kind: Of the numbers, as PTX names it.
    """
    if selector not in ((0,) if kind in BYTES else (0, 1)):
        raise ValueError(f"wgmma.sp: {selector} selects no threads")
    each = 1 if kind == "tf32" else 2  # of a four, which is two numbers of TF32
    fours = values.shape[1] // each
    dense = np.zeros((16, 2 * each * fours))
    for row in range(16):
        for four in range(fours):
            if kind in BYTES:
                lane, shift = row % 8 * 4 + four // 8 * 2 + row // 8, four % 8 * 4
            else:
                lane, shift = row % 8 * 4 + 2 * selector + four // 4, row // 8 * 16 + four % 4 * 4
            indices = int(words[lane]) >> shift
            if kind == "tf32":
                if indices & 15 not in (0b0100, 0b1110):
                    raise ValueError(f"wgmma.sp: {indices & 15:04b} tells no half of a pair")
                dense[row, 2 * four + (indices & 15 == 0b1110)] = values[row, four]
                continue
            first, second = indices & 3, indices >> 2 & 3
            if first >= second:
                raise ValueError(f"wgmma.sp: indices {first}, {second} do not ascend")
            dense[row, 4 * four + first] = values[row, 2 * four]
            dense[row, 4 * four + second] = values[row, 2 * four + 1]
    return dense


def mma(shape: tuple[str, str], a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """Multiplies 16 x K by K x 8 in each warp (9.7.13.4): K = 8, 16 of halves, 4, 8 of TF32."""
    size, kind = shape
    if size not in ("m16n8k16", "m16n8k8", "m16n8k4"):
        raise NotImplementedError(f"mma {size}")
    part = _singles if kind == "tf32" else lambda r: _pairs(r, kind)
    right = np.concatenate([part(r) for r in b], 2).astype(np.float64)
    product = fragment(a, kind) @ right.transpose(0, 2, 1)
    # c0, c1: row lane / 4, columns 2 (lane % 4) and the next; c2, c3: 8 rows further down.
    tiles = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
    return [(tiles[i] + c[i]).astype(np.float32) for i in range(4)]
