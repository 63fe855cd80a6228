"""Patterns of zeros: each is told from the others, and from zeros by chance."""

from __future__ import annotations

import numpy as np
import pytest

from maxvision.weights.patterns import pattern
from maxvision.weights.prune import PATTERNS, keep


def drawn(shape: tuple[int, ...] = (32, 24, 3, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


SMALL, LARGE = [(32, 24, 3, 3), (30, 21, 1, 1), (50, 61)], [(130, 100, 3, 3), (200, 300)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in PATTERNS for shape in (LARGE if name == "64x64" else SMALL)],
)
def test_what_prune_makes_is_found(name: str, shape: tuple[int, ...]) -> None:
    tensor = drawn(shape)
    mask = keep({"w": tensor}, 0.5, "layer", name)["w"]
    assert pattern(tensor * mask).startswith(name)


@pytest.mark.parametrize("shape", [*SMALL, *LARGE])
def test_zeros_by_chance_are_no_pattern(shape: tuple[int, ...]) -> None:
    for share in (0.3, 0.9, 0.98, 0.999):
        mask = keep({"w": drawn(shape)}, share, "layer", "unstructured")["w"]
        assert "2:4" not in pattern(drawn(shape) * mask), share
        if share <= 0.9:
            assert pattern(drawn(shape) * mask) == "unstructured"


def test_two_of_four_is_told_down_to_few_nonzeros() -> None:
    tensor = drawn((64, 64, 3, 3))
    mask = keep({"w": tensor}, 0.5, "layer", "2:4")["w"]
    fewer = keep({"w": tensor * mask}, 0.8, "layer", "unstructured")["w"]
    assert pattern(tensor * mask * fewer) == "2:4"


def test_whole_channels() -> None:
    tensor = drawn()
    tensor[::3] = 0
    tensor[:, 5:12] = 0
    assert pattern(tensor) == "channels"


def test_a_dense_layer_has_none() -> None:
    tensor = drawn()
    assert pattern(tensor) == ""
    tensor.reshape(-1)[:40] = 0
    assert pattern(tensor) == ""
