"""Weights of a graph: how much each arrangement holds, and that none is read before it is bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef, Graph

from maxvision.graphs import arrange, parameters
from maxvision.graphs.parameters import ALIGNMENT, Parameters
from maxvision.runtime.executor import Unchecked


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 1, 5, 1), 1), ((3, 3, 8, 64), 1), ((3, 3, 8, 65), 1), ((7, 5, 3, 130), 2),
     ((1, 1, 2, 96), 3)],
)  # fmt: skip
def test_sizes_are_those_of_the_arrangements(shape: tuple[int, ...], groups: int) -> None:
    filters = np.ones(shape, np.float32)
    assert arrange.panels_size(shape, groups) == arrange.panels(filters, groups).size
    assert arrange.tiles_size(shape, groups) == arrange.tiles(filters, groups).size


@pytest.mark.parametrize(
    ("shape", "groups", "parts"),
    [((1, 1, 256, 9), 1, 1), ((1, 1, 257, 9), 1, 3), ((3, 3, 65, 5), 1, 3), ((3, 5, 40, 6), 2, 5)],
)
def test_a_stream_holds_every_nonzero(
    shape: tuple[int, int, int, int], groups: int, parts: int
) -> None:
    r, s, c, f = shape
    rng = np.random.default_rng(0)
    filters = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
    values, columns, starts = arrange.stream(filters, groups)
    assert starts.size == parts * f + 1 and starts[-1] == values.size == columns.size
    step = -(-c * groups // parts)
    step += -step % arrange.CHANNELS
    found = np.zeros((groups, c, r, s, f))
    for row in range(parts * f):
        part, filter = divmod(row, f)
        mine = slice(starts[row], starts[row + 1])
        assert (np.diff(columns[mine]) > 0).all()
        channel, tap = np.divmod(columns[mine], r * s)
        assert (channel < step).all()
        group, channel = np.divmod(part * step + channel, c)
        assert (group == filter // (f // groups)).all()
        found[group, channel, tap // s, tap % s, filter] = values[mine]
    np.testing.assert_array_equal(found.sum(axis=0).transpose(1, 2, 0, 3), filters)


@pytest.mark.parametrize("shape", [(1, 1, 64, 128), (3, 3, 65, 5), (1, 1, 130, 129), (3, 5, 40, 6)])
@pytest.mark.parametrize(("channels", "groups"), [(64, 1), (32, 1), (32, 2)])
@pytest.mark.parametrize("density", [0, 0.3, 1])
def test_steps_hold_every_nonzero(
    shape: tuple[int, int, int, int], channels: int, groups: int, density: float
) -> None:
    r, s, c, f = shape
    f += f % groups
    rng = np.random.default_rng(0)
    filters = rng.standard_normal((r, s, c, f)) * (rng.random((r, s, c, f)) < density)
    values, columns, starts = arrange.steps(filters, channels, groups)
    chunks = -(-c * groups // channels)
    assert starts[0] == 0 and starts[-1] == values.size == columns.size
    assert starts.size == -(-f // arrange.TILE) * r * s * chunks * arrange.TILE + 1
    found = np.zeros((r, s, chunks * channels, f))
    for row in range(starts.size - 1):
        mine = slice(starts[row], starts[row + 1])
        if mine.start < mine.stop:
            (tile, step), filter = divmod(row // arrange.TILE, r * s * chunks), row % arrange.TILE
            tap, chunk = divmod(step, chunks)
            assert (np.diff(columns[mine].astype(int)) > 0).all()
            channel = chunk * channels + columns[mine].astype(int)
            found[tap // s, tap % s, channel, tile * arrange.TILE + filter] = values[mine]
    for group in range(groups):
        of_group = slice(group * (f // groups), (group + 1) * (f // groups))
        mine = found[:, :, group * c : (group + 1) * c, of_group]
        np.testing.assert_array_equal(mine, filters[..., of_group])
    assert np.count_nonzero(found) == np.count_nonzero(filters)


@pytest.mark.parametrize("density", [0, 1e-4, 0.05, 0.3, 1])
@pytest.mark.parametrize("shape", [(1, 1, 64, 32), (1, 1, 8, 1), (3, 3, 72, 40), (1, 2, 192, 96)])
def test_coordinate_tiles_hold_every_nonzero(
    shape: tuple[int, int, int, int], density: float
) -> None:
    r, s, c, f = shape
    rng = np.random.default_rng(0)
    filters = (rng.standard_normal(shape) + 8) * (rng.random(shape) < density)
    if density:
        filters[-1, -1, -1, -1] = 3  # one nonzero at least, in the last tile
    filters[:, :, 64:128] *= c < 192  # tiles without any
    filters = filters.astype(np.float16)
    words, starts = arrange.coordinate_tiles(filters)
    chunks, bands = -(-c // 64), -(-f // 32)
    assert words.dtype == np.uint32 and starts.dtype == np.int32
    assert starts.size == bands * chunks * r * s + 1
    assert starts[0] == 0 and starts[-1] == words.size and not (starts % 4).any()
    expanded = np.zeros((bands, chunks, r, s, 32 * 64), np.uint16)
    flat = expanded.reshape(-1, 32 * 64)
    for tile in range(starts.size - 1):
        mine = words[starts[tile] : starts[tile + 1]]
        assert (mine >> 16 < 4096).all() and not (mine >> 16 & 1).any()
        assert mine.size - 4 < np.unique(mine).size <= mine.size
        flat[tile, mine >> 17] = mine & 0xFFFF
    # Rows of 128 bytes, whose sixteenths change places.
    sixteenth = np.arange(8) ^ np.arange(32)[:, None] % 8
    split = expanded.reshape(bands, chunks, r, s, 32, 8, 8)
    plain = np.take_along_axis(split, sixteenth[:, :, None][None, None, None, None], 5)
    found = plain.reshape(bands, chunks, r, s, 32, 64).transpose(2, 3, 1, 5, 0, 4)
    found = found.reshape(r, s, chunks * 64, bands * 32)
    assert not found[:, :, c:].any() and not found[..., f:].any()
    np.testing.assert_array_equal(found[:, :, :c, :f].view(np.float16), filters)


def test_coordinate_tiles_spread_over_the_banks() -> None:
    rng = np.random.default_rng(0)
    filters = (rng.random((1, 1, 64, 32)) < 0.25).astype(np.float16)
    words, _ = arrange.coordinate_tiles(filters)
    whole = words[: words.size // 128 * 128].reshape(-1, 32, 4)
    meetings = [
        np.bincount(store >> 18 & 31, minlength=32).max() for block in whole for store in block.T
    ]
    assert np.mean(meetings) < 2  # of 32 at random, 3.5 meet


@pytest.mark.parametrize(("c", "steps"), [(5, 3), (14, 6), (32, 9)])
def test_tiles_are_pairs_of_depth_in_panels_of_32_columns(c: int, steps: int) -> None:
    filters = np.arange(1.0, 9 * c * 70 + 1).reshape(3, 3, c, 70)
    packed = arrange.tiles(filters, groups=2).reshape(2, 2, steps, 2, 16, 16, 2)
    for r, k, f in itertools.product(range(3), range(3 * c), range(70)):
        group, column = divmod(f, 35)
        depth = r * (steps // 3 * 32) + k
        at = (depth // 32, column % 32 // 16, depth % 32 // 2, column % 16, depth % 2)
        assert packed[(group, column // 32, *at)] == filters[r].reshape(-1, 70)[k, f]
    assert np.count_nonzero(packed) == filters.size  # the rest is zeros


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(5, 5, 3, 64), (3, 3, 3, 16), (5, 4, 2, 96), (1, 1, 4, 256)])
def test_the_stems_size(shape: tuple[int, ...], stride: int) -> None:
    assert arrange.has_stem(shape, stride, alone=True)
    fragments = arrange.stem_fragments(np.ones(shape, np.float32), stride)
    assert arrange.stem_size(shape, stride) == fragments.size


class Late(Mapping[str, np.ndarray]):
    """Weights that may be read when ``open`` only."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.open = False

    def __getitem__(self, name: str) -> np.ndarray:
        assert self.open, f"{name} was read while the graph was built"
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("device", [DeviceRef.CPU(), DeviceRef.GPU()])
def test_a_graph_reads_no_weight(device: DeviceRef) -> None:
    rng = np.random.default_rng(0)
    shapes = {
        "stem.filter": (7, 7, 3, 64),
        "stem.bias": (64,),
        "conv.filter": (3, 3, 6, 70),
        "depthwise.filter": (3, 3, 1, 8),
        "head.weight": (9, 10),
        "head.bias": (10,),
        "norm.weight": (5,),
    }
    tensors = Late({name: rng.standard_normal(s, np.float32) for name, s in shapes.items()})
    with Graph("weights", kernel_library=Unchecked()) as graph:
        w = Parameters(tensors, device, DType.float32, shapes=shapes)
        w.fragments("stem.filter", "stem.bias", stride=2)
        w.filter("conv")
        w.filter("depthwise", groups=8)
        w.filter("head")
        w.vector("norm.weight")
        graph.output()
    tensors.open = True
    registry = w.registry(CPU())
    assert set(registry) == {*shapes, "conv.bias", "depthwise.bias"}
    for name, bound in w.bound.items():
        assert tuple(registry[name].shape) == bound.shape == bound.array().shape
        assert registry[name].to_numpy().ctypes.data % ALIGNMENT == 0
        assert np.array_equal(registry[name].to_numpy(), bound.array())
        assert bound.bytes == bound.array().nbytes
    assert not registry["conv.bias"].to_numpy().any()
    assert np.array_equal(registry["norm.weight"].to_numpy(), tensors["norm.weight"])


def test_layers_are_asked_for_by_the_names_of_their_weights() -> None:
    rng = np.random.default_rng(0)
    sizes = {"stem": (7, 7, 3, 64), "a.weight": (3, 3, 8, 40), "a.bias": (40,), "w": (9, 10)}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in sizes.items()}
    with Graph("layers", kernel_library=Unchecked()) as graph:
        w = Parameters(tensors, DeviceRef.CPU(), DType.float32)
        biased, plain = w.layer("a.weight", "a.bias", 1), w.layer("a.weight")
        sparse = w.layer("w", format="stream")
        stem = w.fragments("stem", stride=2)
        graph.output()
    assert biased.shape == plain.shape == (3, 3, 8, 40) and biased.groups == 1
    assert (sparse.dense, sparse.format, stem.dense, stem.rows) == (None, "stream", None, None)
    assert set(w.bound) == {
        "stem", "stem.bias", "a.weight", "a.bias", "a.weight.zeros", "w.bias",
        "w.values", "w.columns", "w.starts",
    }  # fmt: skip
    assert np.array_equal(w.bound["a.bias"].array(), tensors["a.bias"])
    for zeros in ("a.weight.zeros", "w.bias", "stem.bias"):
        assert not w.bound[zeros].array().any()
    assert np.array_equal(w.bound["stem"].array(), arrange.stem_fragments(tensors["stem"], 2))


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    assert [hex(x) for x in parameters.rounded(bits.view(np.float32), DType.bfloat16)] == [
        "0x3f80", "0x3f82", "0x3f81", "0xbf80",
    ]  # fmt: skip
