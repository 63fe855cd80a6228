"""Layouts and folding, against torch in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from maxvision.weights.layout import BATCHNORM_PARTS, fold, merge_masks, oihw_to_rscf, unfold


@pytest.mark.parametrize("groups", [1, 6])
def test_folding_equals_convolution_then_batch_norm(groups):
    generator = torch.Generator().manual_seed(0)
    conv = torch.nn.Conv2d(6, 6, 3, groups=groups, bias=False).double()
    norm = torch.nn.BatchNorm2d(6).double().eval()
    for tensor in (conv.weight, norm.weight, norm.bias, norm.running_mean):
        tensor.data.normal_(generator=generator)
    norm.running_var.uniform_(1e-4, 3.0, generator=generator)
    x = torch.randn(2, 6, 9, 9, dtype=torch.float64, generator=generator)

    parts = {
        "conv.filter": oihw_to_rscf(conv.weight.detach().float().numpy()),
        "conv.batchnorm.weight": norm.weight.detach().float().numpy(),
        "conv.batchnorm.bias": norm.bias.detach().float().numpy(),
        "conv.batchnorm.mean": norm.running_mean.float().numpy(),
        "conv.batchnorm.var": norm.running_var.float().numpy(),
    }
    weights = fold(parts)
    assert set(weights) == {"conv.filter", "conv.bias"}
    assert weights["conv.filter"].shape == (3, 3, 6 // groups, 6)

    conv, norm = conv.float().double(), norm.float().double()  # what a float32 checkpoint holds
    expected = norm(conv(x))
    filters = torch.from_numpy(weights["conv.filter"]).permute(3, 2, 0, 1).double()
    folded = F.conv2d(x, filters, torch.from_numpy(weights["conv.bias"]).double(), groups=groups)
    scale = expected.abs().max()
    assert (folded - expected).abs().max() <= 1e-6 * scale  # the folded weights' own rounding


def test_folded_weights_are_float32_contiguous_and_their_own():
    stored = np.ones((4, 3, 5, 5), np.float16)
    weights = fold({"embed.filter": oihw_to_rscf(stored), "norm.bias": np.ones(3, np.float64)})
    for value in weights.values():
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
    assert not np.shares_memory(weights["embed.filter"], stored)


def test_folding_keeps_zeros_and_counts_them():
    rng = np.random.default_rng(0)
    filters = rng.standard_normal((8, 6, 3, 3), np.float32)
    filters[rng.random(filters.shape) < 0.7] = 0
    parts = {f"conv.batchnorm.{part}": np.full(8, 3.0, np.float32) for part in BATCHNORM_PARTS}
    parts["conv.filter"] = oihw_to_rscf(filters)
    parts["head.weight"] = np.eye(4, dtype=np.float32)
    weights = fold(parts)
    assert np.array_equal(weights["conv.filter"] == 0, parts["conv.filter"] == 0)
    for _ in range(2):  # whether it was counted when it was checked, or not
        assert weights.zeros("conv.filter") == pytest.approx(np.mean(filters == 0))
        assert weights.finite("conv.filter")
    assert weights.zeros("head.weight") == 0.75


def test_unfolding_names_the_parts_of_normalised_convolutions_only():
    weights = {"stem.filter": (7, 7, 3, 8), "stem.bias": (8,), "head.bias": (5,)}
    assert unfold(weights, "stem") == {
        "stem.filter": (7, 7, 3, 8),
        **{f"stem.batchnorm.{part}": (8,) for part in ("weight", "bias", "mean", "var")},
        "head.bias": (5,),
    }
    assert unfold(weights, "other") == weights


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
