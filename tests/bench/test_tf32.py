"""The model of TF32's error rounds what it should, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from maxvision.bench.tf32 import RoundedProducts, rounded

ULP = 2.0**-10
"""Of TF32, at 1."""


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1 + 0.49 * ULP, 1),
        (1 + 0.51 * ULP, 1 + ULP),
        (1 + 0.5 * ULP, 1),  # to even
        (1 + 1.5 * ULP, 1 + 2 * ULP),
        (-1 - 0.51 * ULP, -1 - ULP),
        (2 - 0.1 * ULP, 2),  # into the exponent
        (0.0, 0.0),
        (float("-inf"), float("-inf")),
    ],
)
def test_rounds_to_nearest_even(number: float, expected: float) -> None:
    assert rounded(torch.tensor([number], dtype=torch.float32)).item() == expected
    assert rounded(torch.tensor([number], dtype=torch.float64)).item() == number


def test_rounds_the_operands_of_gradients_but_not_of_depthwise_ones() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 8, 5, 5), torch.randn(2, 8, 3, 3)

    def gradient(x: torch.Tensor, dy: torch.Tensor, groups: int = 1) -> torch.Tensor:
        return torch.nn.grad.conv2d_weight(x, (8, 8 // groups, 3, 3), dy, groups=groups)

    with RoundedProducts():
        found, depthwise = gradient(x, dy), gradient(x, dy, 8)
    torch.testing.assert_close(found, gradient(rounded(x), rounded(dy)), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, gradient(x, dy), rtol=0, atol=1e-6)
    assert torch.equal(depthwise, gradient(x, dy, 8))


def test_rounds_the_operands_of_products_but_not_of_depthwise_ones() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 5, 5), torch.randn(8, 8, 3, 3)
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with RoundedProducts():
        found = [a @ b, torch.matmul(a, b), F.linear(a, b.T), F.conv2d(x, w)]
        depthwise = F.conv2d(x, w[:, :1], groups=8)
        alone = torch.nn.Conv2d(8, 8, 3, groups=8, bias=False)(x)
    expected = [rounded(a) @ rounded(b)] * 3 + [F.conv2d(rounded(x), rounded(w))]
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found[0], a @ b, rtol=0, atol=1e-6)
    assert torch.equal(depthwise, F.conv2d(x, w[:, :1], groups=8))
    assert alone.shape == (2, 8, 3, 3)
