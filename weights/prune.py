"""Prunes a model by magnitude: the weights that are nearest to zero become zeros.

Filters are looked at as matrices [F, K], as the kernels read them: K = (r * S + s) * C + c, so
that the input channels of one tap lie side by side. Linear weights are [out, in].

| pattern      | what is kept or goes together                                               |
| ------------ | --------------------------------------------------------------------------- |
| unstructured | single weights                                                              |
| 1x8          | eight that follow one another in K, of one filter                           |
| 8x1          | the same place in K of eight filters that follow one another                |
| 64x64        | 64 filters that follow one another by 64 input channels of one tap          |
| 2:4          | of four that follow one another in K the two of the largest magnitude stay  |

A block's score is the mean magnitude of its weights. Groups begin at K = 0 (F = 0); the last one
of a row (column) is shorter where eight, or four, do not divide it: it goes as a whole, and of a
2:4 group at most two stay. Where they divide C, no group reaches into the next tap; those of 64x64
begin anew at every tap.

Magnitudes are those of the stored weights, batch norm not folded, as in training.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maxvision.common.errors import ArgumentError
from maxvision.common.folder import new_folder
from maxvision.graphs.layers import layers as layers_of
from maxvision.weights.checkpoint import Checkpoint, identify, interpret
from maxvision.weights.convert import hugging_face_tensors, write
from maxvision.weights.layout import Array
from maxvision.weights.source import Source

SCOPES = ("global", "layer")
PATTERNS = {  # group: F, K
    "unstructured": (1, 1),
    "2:4": (1, 4),
    "1x8": (1, 8),
    "8x1": (8, 1),
    "64x64": (64, 64),
}
NONE = "none"

Mask = NDArray[np.bool_]
Starts = tuple[NDArray[np.int_], NDArray[np.int_]]


@dataclass(frozen=True)
class Pruned:
    """What became of a layer.

    Attributes:
        name: As the graphs call it.
        weights: How many it has.
        zeros: How many of them are zeros now.
    """

    name: str
    weights: int
    zeros: int


def prune(
    found: Source,
    folder: Path,
    sparsity: float | None = None,
    *,
    scope: str = "global",
    pattern: str = "unstructured",
    skip: Sequence[str] | None = None,
    force: bool = False,
) -> list[Pruned]:
    """Writes a pruned copy of ``found`` as `convert` writes models.

    Zeros that are there already count, and stay. config.json says under ``pruning`` how it was
    made, and that its accuracy is not known. Batch norms, biases and depthwise convolutions stay
    as they are.

    Args:
        found: The model.
        folder: Where to write; it appears when it is complete.
        sparsity: Share of zeros in the layers that are pruned, 0 to 1; 2:4 needs none.
        scope: ``global``: one threshold for all layers, which end at different shares;
            ``layer``: the same share in each.
        pattern: A key of ``PATTERNS``.
        skip: Layers to leave as they are, by name, with * for any part; the family's ``dense`` if
            None.
        force: Replace ``folder`` if it is there.

    Returns:
        The layers that were pruned.

    Raises:
        ArgumentError: If an argument is wrong, or ``folder`` cannot be written.
        ModelError: If the model does not load.
    """
    share = _check(sparsity, scope, pattern)
    checkpoint = interpret(found)
    family, _, _ = identify(found)
    layers = {each: family.formats[0].key(f"{each}.weight") for each in prunable(checkpoint)}
    skipped = family.dense if skip is None else skip
    chosen = {layer: key for layer, key in layers.items() if not _matches(layer, skipped)}
    _check_skip(skipped, list(layers))
    if not chosen:
        raise ArgumentError("--skip names every layer, so none is left to prune; skip fewer")
    tensors = hugging_face_tensors(found)
    masks = keep({layer: tensors[key] for layer, key in chosen.items()}, share, scope, pattern)
    rows = []
    for layer, key in chosen.items():
        tensors[key] = np.where(masks[layer], tensors[key], np.float32(0))
        zeros = tensors[key].size - int(np.count_nonzero(tensors[key]))
        rows.append(Pruned(layer, tensors[key].size, zeros))
    notes = {
        "method": "magnitude, once, not trained after it",
        "of": found.name,
        "sparsity": share,
        "scope": "layer" if pattern == "2:4" else scope,
        "pattern": pattern,
        "dense": sorted(set(layers) - set(chosen)),
        "zeros": round(sum(row.zeros for row in rows) / sum(row.weights for row in rows), 6),
        "accuracy": "not measured",
    }
    with new_folder(folder, "the model", lambda _: force) as new:
        write(new, found, checkpoint, tensors, {"pruning": notes})
    return rows


def prunable(checkpoint: Checkpoint) -> list[str]:
    """Names the layers that may be pruned: convolutions and linear layers but depthwise ones."""
    found = layers_of(checkpoint.program(checkpoint.size))
    return [each.name for each in found if each.groups == 1 or each.groups < each.channels]


def keep(
    tensors: Mapping[str, Array], sparsity: float, scope: str, pattern: str
) -> dict[str, Mask]:
    """Chooses the weights that stay.

    Args:
        tensors: Filters [F, C, R, S] and linear weights [out, in].
        sparsity: Share of zeros; of blocks, as near as whole ones come.
        scope: See `prune`.
        pattern: See `prune`.

    Returns:
        For each tensor True where a weight stays, in its shape.
    """
    rows = {name: as_rows(np.abs(tensor)) for name, tensor in tensors.items()}
    if pattern == "2:4":
        kept = {name: _largest_two(each) for name, each in rows.items()}
    else:
        starts = {name: block_starts(tensor.shape, pattern) for name, tensor in tensors.items()}
        groups = [list(rows)] if scope == "global" else [[name] for name in rows]
        kept = {}
        for names in groups:
            kept |= _largest_blocks({name: rows[name] for name in names}, sparsity, starts)
    return {name: _as_stored(mask, tensors[name].shape) for name, mask in kept.items()}


def as_rows(tensor: Array) -> Array:
    """Lays a filter [F, C, R, S] out as [F, K], K = (r * S + s) * C + c; [out, in] stays."""
    return tensor.transpose(0, 2, 3, 1).reshape(len(tensor), -1) if tensor.ndim == 4 else tensor


def block_starts(shape: tuple[int, ...], pattern: str) -> Starts:
    """Computes where the blocks of a filter [F, C, R, S], or of [out, in], begin in F and in K."""
    filters, columns = PATTERNS[pattern]
    run = shape[1] if pattern == "64x64" else math.prod(shape[1:])
    taps = np.arange(0, math.prod(shape[1:]), run)[:, None]
    return np.arange(0, shape[0], filters), (taps + np.arange(0, run, columns)).reshape(-1)


def spread(blocks: Mask, starts: Starts, shape: tuple[int, int]) -> Mask:
    """Gives each of the weights [F, K] what its block has."""
    for axis in range(2):
        sizes = np.diff(starts[axis], append=shape[axis])
        blocks = blocks.repeat(sizes, axis)
    return blocks


def _as_stored(rows: Mask, shape: tuple[int, ...]) -> Mask:
    if len(shape) == 2:
        return rows
    f, c, r, s = shape
    return rows.reshape(f, r, s, c).transpose(0, 3, 1, 2)


def _largest_two(rows: Array) -> Mask:
    """Keeps two of every four [F, K]; of equal ones the first."""
    f, k = rows.shape
    padded = np.full((f, -(-k // 4) * 4), -1, rows.dtype)
    padded[:, :k] = rows
    order = np.argsort(-padded.reshape(f, -1, 4), axis=2, kind="stable")
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order[:, :, :2], True, axis=2)
    return mask.reshape(f, -1)[:, :k]


def _largest_blocks(
    layers: Mapping[str, Array], sparsity: float, starts: Mapping[str, Starts]
) -> dict[str, Mask]:
    """Keeps the blocks of the largest mean magnitude, of all ``layers`` [F, K] together."""
    ones = {name: np.ones(rows.shape, np.int64) for name, rows in layers.items()}
    sizes = {name: _block_sums(each, starts[name]) for name, each in ones.items()}
    scores = {name: _block_sums(rows, starts[name]) / sizes[name] for name, rows in layers.items()}
    flat = np.concatenate([scores[name].ravel() for name in layers])
    size = np.concatenate([sizes[name].ravel() for name in layers])
    wanted = sparsity * int(size.sum())
    if len(flat) == size.sum():
        count = round(wanted)
        lowest = np.argpartition(flat, count - 1)[:count] if count else np.zeros(0, int)
    else:
        order = np.argsort(flat, kind="stable")
        reached = np.cumsum(size[order])
        lowest = order[: int(np.searchsorted(reached - size[order] / 2, wanted))]
    mask = np.ones(len(flat), bool)
    mask[lowest] = False
    kept, start = {}, 0
    for name, rows in layers.items():
        of_layer = mask[start : start + scores[name].size].reshape(scores[name].shape)
        start += of_layer.size
        kept[name] = spread(of_layer, starts[name], rows.shape)
    return kept


def _block_sums(rows: Array, starts: Starts) -> Array:
    if rows.shape == tuple(map(len, starts)):
        return rows
    sums: Array = np.add.reduceat(np.add.reduceat(rows, starts[0], axis=0), starts[1], axis=1)
    return sums


def _check(sparsity: float | None, scope: str, pattern: str) -> float:
    for name, value, takes in ("scope", scope, SCOPES), ("pattern", pattern, tuple(PATTERNS)):
        if value not in takes:
            raise ArgumentError(f"{name} must be one of {', '.join(takes)} but is {value!r}")
    if pattern == "2:4":
        if sparsity not in (None, 0.5):
            raise ArgumentError(
                f"pattern 2:4 always gives a sparsity of 0.5, not {sparsity:g}; omit the sparsity,"
                " or choose another pattern"
            )
        return 0.5
    if sparsity is None or not 0 <= sparsity < 1:  # NaN is not
        told = "is missing" if sparsity is None else f"is {sparsity:g}"
        raise ArgumentError(
            f"sparsity {told}; give the share of zeros, from 0 to below 1, such as --sparsity 0.9"
        )
    return sparsity


def _matches(layer: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(layer, pattern) for pattern in patterns)


def _check_skip(patterns: Sequence[str], layers: Sequence[str]) -> None:
    for pattern in patterns:
        if pattern != NONE and not any(fnmatchcase(layer, pattern) for layer in layers):
            close = difflib.get_close_matches(pattern, layers, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"they begin with {layers[0]!r}"
            raise ArgumentError(f"--skip {pattern}: the model has no such layer; {hint}")
