"""Filters as the kernels read them: canonical [R, S, C, F] in, one flat array out.

Done once, at load; never per call. C is the channels of one group, and F the filters of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from max.dtype import DType

from maxvision.graphs.constants import bfloat16_bits, e4m3_bits
from maxvision.graphs.shapes import Padding, Pair, pair, sides

PANEL = 64
"""Columns of a packed panel, the same number as in ops/gemm/cpu.mojo."""
STEP = 32
"""Columns of a panel in bfloat16, and numbers of K of a tile, as in ops/gemm/tiles.mojo."""
TILE = 128
"""Filters of a tile of a sparse filter on a GPU, as in ops/sparse_conv2d/gpu.mojo."""
ROW = 128
"""Bytes of channels of a step there."""
CHANNELS = 16
"""Channels of a part of a sparse filter on a CPU are a multiple of it, as in
ops/sparse_conv2d/cpu.mojo."""


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Rounds to ``dtype``, to nearest even, C-contiguous.

    Of bfloat16 and floats of 8 bits it gives the bits, in uint16 and uint8.
    """
    if dtype == DType.bfloat16:
        return bfloat16_bits(np.ascontiguousarray(array, np.float32))
    if dtype == DType.float8_e4m3fn:
        return e4m3_bits(np.ascontiguousarray(array))
    return np.ascontiguousarray(array, dtype.to_numpy())


def is_depthwise(shape: tuple[int, ...], groups: int) -> bool:
    """Tells whether a filter [R, S, C, F] in ``groups`` has the depthwise kernel."""
    return groups > 1 and shape[2] == 1 and shape[3] == groups


SMALL = (4, 8, 16)
"""Channels of a group that the direct kernel for a CPU takes beside 1; vectors are of so many."""


def members(shape: tuple[int, ...], groups: int, on_cpu: bool) -> int:
    """Counts the channels of a group of a filter [R, S, C, F] that has a direct kernel; else 0.

    1 is depthwise; ``on_cpu``, in float32, groups may be small ones with as many filters.
    """
    if is_depthwise(shape, groups):
        return 1
    c, f = shape[2:]
    small = on_cpu and groups > 1 and c in SMALL and f == c * groups and f % max(SMALL) == 0
    return c if small else 0


def is_aligned(
    shape: tuple[int, ...],
    dtype: DType,
    *,
    groups: int = 1,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
) -> bool:
    """Tells whether Hopper's copy engine takes a filter [R, S, C, F] on images of any size.

    As ``takes`` of ops/hopper/conv.mojo, which knows the image too.
    """
    taps, (c, f) = shape[:2], shape[2:]
    size = dtype.size_in_bytes
    if groups != 1 or c * size % 16 or f % max(8, 16 // size):
        return False
    before, after = sides(padding)[:2], sides(padding)[2:]
    for tap, step, apart, first, last in zip(
        taps, pair(stride), pair(dilation), before, after, strict=True
    ):
        reach = (tap - 1) * apart  # the last window begins up to `step - 1` before its place
        if step > 8 or first > 128 or reach > 255 or last - reach > 127:
            return False
        if last - reach - (step - 1) < -128:
            return False
    return True


def panels(filters: np.ndarray, groups: int = 1) -> np.ndarray:
    """Packs [R, S, C, F] for a CPU: [group, panel, R*S*C, 64], zero-padded in each group."""
    r, s, c, f = filters.shape
    columns = filters.reshape(r * s * c, groups, f // groups)
    count = -(-columns.shape[2] // PANEL)
    packed = np.zeros((groups, count, r * s * c, PANEL), filters.dtype)
    for panel in range(count):
        part = columns[:, :, panel * PANEL : (panel + 1) * PANEL]
        packed[:, panel, :, : part.shape[2]] = part.transpose(1, 0, 2)
    return packed.reshape(-1)


def quads(filters: np.ndarray) -> np.ndarray:
    """Puts [F, ...] in quads for results of 8 bits (ops/hopper/accumulator.mojo); F by sixteens."""
    sixteens = filters.reshape(-1, 8, 2, *filters.shape[1:])
    return np.ascontiguousarray(sixteens.swapaxes(1, 2)).reshape(filters.shape)


def byte_panels(filters: np.ndarray, groups: int) -> np.ndarray:
    """Packs int8 [R, S, C, F] for a CPU: [group, panel, 1 + K / 4, 64, 4], zero-padded.

    The first row of a panel has each filter's sum, as int32. C is a multiple of 4; K is R*S*C,
    filled up to a multiple of 64 as AMX multiplies it.
    """
    depth = math.prod(filters.shape[:3])
    rows = panels(filters, groups).reshape(-1, depth, PANEL)
    packed = np.zeros((len(rows), 1 + _filled(depth) // 4, PANEL, 4), np.int8)
    packed[:, 0] = rows.sum(1, dtype=np.int32)[..., None].view(np.int8)
    fours = rows.reshape(len(rows), depth // 4, 4, PANEL)
    packed[:, 1 : 1 + depth // 4] = fours.transpose(0, 1, 3, 2)
    return packed.reshape(-1)


def byte_panels_size(shape: tuple[int, ...], groups: int = 1) -> int:
    """Counts the numbers of ``byte_panels`` of a filter of this shape."""
    depth = math.prod(shape[:3])
    return panels_size(shape, groups) // depth * (_filled(depth) + 4)


def _filled(depth: int) -> int:
    """Rounds K up to that of a tile of 8 bits, as FULL of ops/gemm/cpu.mojo does."""
    return -(-depth // 64) * 64


def panels_size(shape: tuple[int, ...], groups: int = 1) -> int:
    """Counts the numbers of ``panels`` of a filter of this shape."""
    r, s, c, f = shape
    return groups * -(-(f // groups) // PANEL) * r * s * c * PANEL


def tiles(filters: np.ndarray, groups: int = 1) -> np.ndarray:
    """Packs [R, S, C, F] for a CPU in bfloat16: [group, panel, K / 32, 2, 16, 16, 2], zero-padded.

    A tile is 16 pairs of K beside each other in 16 columns; a panel has 32 columns. K is R*S*C, but
    unless C is a multiple of 32 each row of S*C is filled up to one.
    """
    r, _, c, f = filters.shape
    steps, count = _tile_steps(filters.shape), -(-(f // groups) // STEP)
    rows = filters.reshape(r if c % STEP else 1, -1, f)
    depth = np.zeros((rows.shape[0], steps * STEP // rows.shape[0], f), filters.dtype)
    depth[:, : rows.shape[1]] = rows
    packed = np.zeros((groups, count * STEP, steps * STEP), filters.dtype)
    packed[:, : f // groups] = depth.reshape(-1, groups, f // groups).transpose(1, 2, 0)
    split = packed.reshape(groups, count, 2, 16, steps, 16, 2)
    return np.ascontiguousarray(split.transpose(0, 1, 4, 2, 5, 3, 6)).reshape(-1)


def tiles_size(shape: tuple[int, ...], groups: int = 1) -> int:
    """Counts the numbers of ``tiles`` of a filter of this shape."""
    return groups * -(-(shape[3] // groups) // STEP) * _tile_steps(shape) * STEP * STEP


def _tile_steps(shape: tuple[int, ...]) -> int:
    r, s, c, _ = shape
    return r * -(-s * c // STEP) if c % STEP else r * s * c // STEP


def ungrouped(filters: np.ndarray, groups: int) -> np.ndarray:
    """Writes [R, S, C, F] in groups as one filter of all channels, zero outside of the groups."""
    if groups == 1:
        return filters
    r, s, c, f = filters.shape
    whole = np.zeros((r, s, groups, c, groups, f // groups), filters.dtype)
    apart = filters.reshape(r, s, c, groups, f // groups)
    for group in range(groups):
        whole[:, :, group, :, group] = apart[:, :, :, group]
    return whole.reshape(r, s, groups * c, f)


def filter_major(filters: np.ndarray) -> np.ndarray:
    """Arranges [R, S, C, F] for a GPU: [F, R, S, C], so that K = R*S*C is contiguous."""
    return np.ascontiguousarray(filters.transpose(3, 0, 1, 2)).reshape(-1)


def arrangement(shape: tuple[int, ...], groups: int, on_cpu: bool, dtype: DType) -> tuple[str, int]:
    """Names how a filter [R, S, C, F] lies for a device's kernels, and counts its numbers there.

    The name is a key of ``ARRANGE``, and a form of ops/arrange_filter.mojo.
    """
    if members(shape, groups, on_cpu and dtype == DType.float32):
        return "taps", math.prod(shape)
    if on_cpu and dtype == DType.bfloat16:
        return "tiles", tiles_size(shape, groups)
    if on_cpu:
        return "panels", panels_size(shape, groups)
    return "filter_major", math.prod(shape)


ARRANGE: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "taps": lambda filters, _: filters.ravel(),
    "tiles": tiles,
    "panels": panels,
    "filter_major": lambda filters, _: filter_major(filters),
}
"""What arranges a filter in so many groups."""


def has_stem(shape: tuple[int, ...], stride: int, alone: bool = False) -> bool:
    """Tells whether ops/stem takes a filter [R, S, C, F]: what it needs fits its registers.

    A warp takes 32 filters; ``alone``, without a pool or a norm after it, it may have fewer, of
    which a lane stores 8 at a time.
    """
    r, s, c, f = shape
    return (
        c <= 4
        and stride <= 4
        and f % (8 if alone else 32) == 0
        and 0 < f <= 256
        and max(r, s) <= 11
        and _stem_steps(shape, stride) <= 12
    )


def stem_size(shape: tuple[int, ...], stride: int) -> int:
    """Counts the numbers of ``stem_fragments`` of a filter of this shape."""
    return -(-shape[3] // 32) * 32 * _stem_steps(shape, stride) * 16


def _stem_steps(shape: tuple[int, ...], stride: int) -> int:
    r, s, c, _ = shape
    units = -(-s * (c + stride * c % 2) // 8)
    return r * (units // 2) + units % 2 * -(-r // 2)


def stem_fragments(filters: np.ndarray, stride: int) -> np.ndarray:
    """Arranges [R, S, C, F] for ops/stem: an mma's operand A as the lanes of a warp hold it.

    Windows begin at even numbers: where the stride and C are odd, there is a channel of zeros more.
    A row of the window is filled up to units of 8 numbers; a step of K is a pair of units, of one
    row, or the last of two rows if their number is odd. Filters are filled up to a multiple of 32,
    a warp's. Flat [F / 32, steps, 2, 32 lanes, 4, 2].
    """
    odd = stride * filters.shape[2] % 2
    filters = np.pad(filters, ((0, 0), (0, 0), (0, odd), (0, -filters.shape[3] % 32)))
    r, s, c, f = filters.shape
    count = -(-s * c // 8)
    rows = np.zeros((r + 1, count * 8, f), filters.dtype)
    rows[:r, : s * c] = filters.reshape(r, s * c, f)
    units = rows.reshape(r + 1, count, 8, f)
    steps = [units[row, 2 * i : 2 * i + 2] for row in range(r) for i in range(count // 2)]
    if count % 2:
        steps += [units[row : row + 2, count - 1] for row in range(0, r, 2)]
    # K is (half, lane % 4, 2); a lane holds filters lane // 4 and 8 more of both m-tiles, dealt
    # so that the four that meet in a lane when the result is turned over are neighbours.
    split = np.stack(steps).reshape(len(steps), 2, 4, 2, f // 32, 4, 2, 2, 2)
    return np.ascontiguousarray(split.transpose(4, 0, 6, 5, 8, 2, 1, 7, 3)).reshape(-1)


def has_squeeze(channels: int, hidden: int, on_cpu: bool) -> bool:
    """Tells whether ops/squeeze_excite takes so many channels, and numbers between the products.

    Hopper's shared memory has room for so many. On a CPU one core multiplies for an image; more
    weights are faster multiplied by all cores, in ops of their own.
    """
    fits = channels * hidden <= 2**16 if on_cpu else channels <= 8192 and hidden <= 2048
    return channels % 8 == 0 and fits


CHAINS = ((64, 64), (64, 128), (128, 128))
"""C and F of the chains of convolutions that ops/gemm/chain.mojo has a tile for."""
WIDE_CHAINS = ((256, 256),)
"""Those that it has one for in 16 bits alone."""
SHORTCUT_CHAINS = ((64, 64, 64),)
"""C, S of the shortcut and F of those that begin with a shortcut's sum."""
STEM_CHAIN = (224, (64, 3, 7, 7), (2, 3))
"""Columns of pixels, filter, and stride and padding of the stem that ops/stem/hopper.mojo has with
the 1 x 1 behind it."""
MLPS = (64, 192)
"""C of the MLPs that it has one for."""
PROJECTED = {64: 2**31 - 1, 384: 56}
"""C of attentions that ops/attention/linear.mojo has with the layer behind, and keys at most."""
POOLED = 64
"""Pixels at most of an image whose mean ops/conv2d/mean.mojo gives in one launch."""
PROJECTED_DEPTH = 64
"""Channels of each of their heads."""


def steps(
    filters: np.ndarray, channels: int, groups: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders the nonzeros of [R, S, C, F] for a GPU: by tiles of filters, steps of K, and filters.

    A step is ``channels`` channels of one tap; taps follow one another, their channels within them.

    Returns:
        values [nonzeros]; columns [nonzeros] uint8, the channel in its step; starts int32
        [F / TILE * steps * TILE + 1], where the nonzeros of each filter of a tile begin in a step.
    """
    r, s, c, f = filters.shape
    rows = filters.transpose(3, 0, 1, 2).reshape(f, r * s, c)
    row, tap, channel = np.nonzero(rows)
    values = rows[row, tap, channel]
    channel = row // (f // groups) * c + channel
    count = r * s * math.ceil(c * groups / channels)
    step = tap * (count // (r * s)) + channel // channels
    place = (row // TILE * count + step) * TILE + row % TILE
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place, minlength=math.ceil(f / TILE) * count * TILE)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return values[order], (channel % channels)[order].astype(np.uint8), starts.astype(np.int32)


def coordinate_tiles(filters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lists the nonzeros of [R, S, C, F], of 2 bytes each, for ops/sparse_conv2d/tiled.mojo.

    A tile is 32 filters by 64 channels of one tap, as it lies in shared memory: 128 bytes for each
    filter, whose sixteenths change places (the 128-byte swizzle). A word is a nonzero: its bits
    below, and above them the byte of its place. A tile's words are filled up to a multiple of four
    by repeating the last, and ordered so that 32 lanes which take four neighbours each and store
    the first of theirs, then the second, ... mostly meet 32 different banks.

    Returns:
        words [about nonzeros] uint32; starts [F / 32 * C / 64 * R * S + 1] int32, where each tile's
        words begin, by filters, then channels, then taps.
    """
    r, s, c, f = filters.shape
    rows = np.ascontiguousarray(filters.transpose(3, 2, 0, 1)).reshape(f, c, r * s)
    row, channel, tap = np.nonzero(rows)
    bits = rows[row, channel, tap].view(np.uint16).astype(np.uint32)
    chunks = math.ceil(c / 64)
    tile = (row // 32 * chunks + channel // 64) * (r * s) + tap
    byte = row % 32 * 128 + (channel % 64 * 2 ^ row % 8 * 16)
    bank = byte // 4 % 32
    order = np.argsort(tile * 32 + bank, kind="stable")
    turn = _places((tile * 32 + bank)[order])
    order = order[np.argsort((tile[order] << 16) + turn * 32 + bank[order], kind="stable")]

    counts = np.bincount(tile, minlength=math.ceil(f / 32) * chunks * r * s)
    starts = np.concatenate([[0], np.cumsum((counts + 3) // 4 * 4)])
    tile = tile[order]
    place = _places(tile)
    block, within = np.divmod(place, 128)
    lanes = np.minimum(((counts + 3) // 4)[tile] - block * 32, 32)
    at = starts[tile] + block * 128 + within % lanes * 4 + within // lanes
    words = np.zeros(starts[-1], np.uint32)
    held = np.zeros(starts[-1], bool)
    words[at] = bits[order] | byte[order].astype(np.uint32) << 16
    held[at] = True
    if len(at):
        last = words[at[np.cumsum(counts) - 1]]
        words[~held] = np.repeat(last, np.diff(starts) - counts)
    return words, starts.astype(np.int32)


def _places(keys: np.ndarray) -> np.ndarray:
    """Numbers each of some sorted keys among its equals, from 0."""
    if not len(keys):
        return np.zeros(0, np.int64)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return np.arange(len(keys)) - np.repeat(first, np.diff(np.append(first, len(keys))))


def stream(filters: np.ndarray, groups: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders the nonzeros of [R, S, C, F] for a CPU: by parts of the channels, then by filters.

    Parts are even, and so narrow that what a block of pixels needs of one stays in the first-level
    cache; but 1 x 1 filters of up to 256 channels are one, whose sums need not wait in memory.

    Returns:
        values [nonzeros]; columns [nonzeros] int32, ``(c * R + r) * S + s`` with c the channel in
        its part, ascending for each filter; int32 [parts * F + 1], where the nonzeros of each
        filter begin in each part.
    """
    r, s, c, f = filters.shape
    most = max(1, 288 // (r * s) // CHANNELS) * CHANNELS
    if r * s == 1:
        most = 256 if c * groups <= 256 else 128
    parts = math.ceil(c * groups / most)
    step = math.ceil(c * groups / parts / CHANNELS) * CHANNELS
    rows = filters.transpose(3, 2, 0, 1).reshape(f, c, r * s)
    row, channel, tap = np.nonzero(rows)
    values = rows[row, channel, tap]
    part, channel = np.divmod(row // (f // groups) * c + channel, step)
    order = np.argsort(part, kind="stable")
    counts = np.bincount(part * f + row, minlength=parts * f)
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = (channel * (r * s) + tap)[order]
    return values[order], columns.astype(np.int32), starts.astype(np.int32)


def is_two_four(filters: np.ndarray) -> bool:
    """Tells whether of four neighbouring channels of a tap of [R, S, C, F] at most two are not 0.

    Where C is not a multiple of four, the last ones of a tap are a group of their own.
    """
    return _fits(_fours(filters))


def two_four(filters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compresses [R, S, C, F] for ops/sparse_conv2d/two_four.mojo: two of each four channels.

    Steps of K are 64 channels of a tap, filled up with zeros, as are the filters to pairs of 64.
    A thread of a warpgroup keeps the indices of filter ``warp * 16 + lane // 4`` in the lower half
    of a word, those of the 8th after it in the upper one: 16 channels, ``lane % 4 * 16`` on, of
    each four of them two indices of 2 bits, lowest first (PTX ISA 8.2, section 9.7.14.6).

    Returns:
        values, flat [steps, F / 128, 2, 4, 64, 8]: K / 2 by eights, filters, K / 2 in an eight;
        indices, flat uint32 [steps, F / 128, 2, 4 warps, 32 lanes].

    Raises:
        ValueError: If more than two of four are not zero.
    """
    held = _fours(filters)
    if not _fits(held):
        raise ValueError(
            "two_four: filters expect two of four neighbouring channels to be 0 but some have more"
            " nonzeros; prune them with --pattern 2:4"
        )
    r, s, c, f = filters.shape
    chunks, tiles = -(-c // 64), 2 * -(-f // 128)
    fours = np.zeros((tiles * 64, r * s, chunks * 16, 4), filters.dtype)
    fours[:f, :, : -(-c // 4)] = held
    kept = np.sort(np.argsort(fours == 0, axis=-1, kind="stable")[..., :2], axis=-1)
    values = np.take_along_axis(fours, kept, axis=-1).reshape(tiles, 64, -1, 4, 8)
    pairs = (kept[..., 0] | kept[..., 1] << 2).astype(np.uint32)
    # Filters are (warp, half, lane // 4), steps of 16 fours (lane % 4, four).
    split = pairs.reshape(tiles, 4, 2, 8, -1, 4, 4).transpose(4, 0, 1, 3, 5, 2, 6)
    shifts = np.arange(0, 32, 4, dtype=np.uint32).reshape(2, 4)
    indices = np.bitwise_or.reduce(split << shifts, axis=(-2, -1))
    return np.ascontiguousarray(values.transpose(2, 0, 3, 1, 4)).reshape(-1), indices.reshape(-1)


def _fits(fours: np.ndarray) -> bool:
    """Tells whether of no four more than two are not 0."""
    return bool(np.count_nonzero(fours, axis=-1).max(initial=0) <= 2)


def _fours(filters: np.ndarray) -> np.ndarray:
    """Divides the channels of each tap of [R, S, C, F] into fours: [F, R * S, C / 4, 4]."""
    r, s, c, f = filters.shape
    rows = np.zeros((f, r * s, -(-c // 4) * 4), filters.dtype)
    rows[..., :c] = filters.reshape(r * s, c, f).transpose(2, 0, 1)
    return rows.reshape(f, r * s, -1, 4)


def block_steps(filters: np.ndarray, columns: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the blocks of [R, S, C, F] that hold a nonzero: `columns` filters x `width` channels.

    For a GPU, as ops/sparse_conv2d/blocks.mojo reads them. Edges are filled up with zeros.

    Args:
        filters: Of one group.
        columns: Filters of a block.
        width: Channels of a block, all of one tap: 128 bytes of them.

    Returns:
        The blocks [blocks, columns, width], for one ``columns`` filters after another in the order
        of their lists, at least one; int32 [F / columns, pitch], the lists: the number of the
        first block, how many there are, then of each ``r << 24 | s << 16 | c // width``, ascending,
        and at least one 0 behind them. The pitch is a multiple of 4.
    """
    r, s, c, f = filters.shape
    tiles, chunks = -(-f // columns), -(-c // width)
    padded = np.zeros((r * s, chunks * width, tiles * columns), filters.dtype)
    padded[:, :c, :f] = filters.reshape(r * s, c, f)
    split = padded.reshape(r * s, chunks, width, tiles, columns).transpose(3, 0, 1, 4, 2)
    tile, tap, chunk = np.nonzero(split.any((3, 4)))
    counts = np.bincount(tile, minlength=tiles)
    starts = np.cumsum(counts) - counts
    lists = np.zeros((tiles, -(-(3 + int(counts.max(initial=0))) // 4) * 4), np.int32)
    lists[:, 0], lists[:, 1] = starts, counts
    lists[tile, 2 + np.arange(len(tile)) - starts[tile]] = tap // s << 24 | tap % s << 16 | chunk
    blocks = split[tile, tap, chunk]
    return blocks if len(blocks) else np.zeros((1, columns, width), filters.dtype), lists
