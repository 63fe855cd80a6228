"""Tensors as they are stored, and masks multiplied in; tests/graphs/test_fold.py folds them."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from maxvision.graphs.net import Net
from maxvision.graphs.types import BATCH
from maxvision.weights.checkpoint import check_norms
from maxvision.weights.layout import Stored, is_finite, merge_masks


def test_weights_are_float32_contiguous_and_their_own():
    filters = np.ones((4, 3, 5, 5), np.float16).transpose(1, 0, 3, 2)
    already = np.ones(3, np.float32)
    weights = Stored({"embed.weight": filters, "norm.bias": np.ones(3), "norm.weight": already})
    assert weights.keys() == {"embed.weight", "norm.bias", "norm.weight"}
    assert "embed.weight" in weights and "embed.bias" not in weights and len(weights) == 3
    for value in weights.values():
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
    assert weights["embed.weight"].shape == (3, 4, 5, 5)
    assert not np.shares_memory(weights["embed.weight"], filters)
    assert not np.shares_memory(weights["norm.weight"], already)
    with pytest.raises(KeyError):
        weights["embed.bias"]


def test_tensors_are_read_when_they_are_asked_for_and_inside_the_context():
    log = []

    class Parts(dict):
        def __getitem__(self, name):
            log.append(name)
            return super().__getitem__(name)

    @contextmanager
    def reading():
        log.append("open")
        yield
        log.append("close")

    weights = Stored(Parts({"a.weight": np.eye(4), "b.weight": np.ones((2, 3))}), reading)
    assert list(weights) == ["a.weight", "b.weight"] and len(weights) == 2
    assert log == []
    read = ["open", "a.weight", "close"]
    assert weights["a.weight"].sum() == 4 and log == read
    assert weights["a.weight"].sum() == 4 and log == 2 * read  # nothing is kept
    assert weights.zeros("a.weight") == 0.75 and log == 3 * read
    assert weights.zeros("a.weight") == 0.75 and log == 3 * read  # but for this number
    assert list(weights.largest("a.weight")) == [1, 1, 1, 1] and log == 4 * read


def test_zeros_are_counted_when_norms_are_checked_or_later():
    rng = np.random.default_rng(0)
    filters = rng.standard_normal((8, 6, 3, 3), np.float32)
    filters[rng.random(filters.shape) < 0.7] = 0
    net = Net("convnet")
    x = net.batch_norm(
        net.conv2d(net.input("x", (BATCH, 6, 9, 9)), "conv", 8, 3, bias=False), "norm"
    )
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 8, bias=False))
    program = net.program()
    parts = {f"norm.{part}": np.full(8, 3.0) for part in ("weight", "bias", "mean", "var")}
    parts |= {"conv.weight": filters, "head.weight": np.eye(8)}
    counted, later = Stored(parts), Stored(parts)
    check_norms(program, counted, "x")
    for weights in counted, later:
        for _ in range(2):
            assert weights.zeros("conv.weight") == pytest.approx(np.mean(filters == 0))
            assert weights.zeros("head.weight") == 0.875


def test_the_largest_magnitudes_of_filters():
    filters = np.random.default_rng(0).standard_normal((5, 4, 3, 3), np.float32)
    np.testing.assert_array_equal(
        Stored({"w": filters}).largest("w"), np.abs(filters).max((1, 2, 3))
    )


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([1e38, -1e38], True),
        ([0, np.nan, 0], False),
        ([np.inf, 0], False),
        ([0, -np.inf], False),
        ([0, -1e300], False),  # as float32
    ],
)
def test_finite(values, finite):
    assert is_finite(np.array(values)) == finite


def test_pruning_masks_are_multiplied_in():
    layer = torch.nn.Linear(6, 4)
    from torch.nn.utils import prune

    prune.random_unstructured(layer, "weight", 0.5)
    merged = merge_masks({k: v.numpy() for k, v in layer.state_dict().items()})
    assert set(merged) == {"weight", "bias"}
    np.testing.assert_array_equal(merged["weight"], layer.weight.detach().numpy())


def test_half_a_pruning_pair_stays_for_the_rules_to_report():
    assert set(merge_masks({"a_orig": np.ones(3), "b_orig": np.ones(3), "b_mask": np.ones(2)})) == {
        "a_orig", "b_orig", "b_mask",
    }  # fmt: skip
