"""The error that TF32 makes, on any device: torch's float32 with the operands of products rounded.

TF32 keeps float32's exponent and 10 bits of the mantissa; products are exact, sums are float32.
torch's own kernels do so on NVIDIA's tensor cores, but which ones run is their library's choice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

GRADIENT = torch.ops.aten.convolution_backward
"""Computes gradients of filters, of the result's gradient and the activations."""
PRODUCTS = {F.conv2d, F.linear, torch.matmul, torch.Tensor.matmul, GRADIENT}


def allow_tf32(allowed: bool) -> None:
    """Lets torch multiply float32 by TF32 on a GPU, or forbids it."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


class RoundedProducts(TorchFunctionMode):
    """Rounds both operands of float32 products to TF32; depthwise convolutions stay exact."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch."""
        if func in PRODUCTS and not _depthwise(func, *args, **(kwargs or {})):
            args = (rounded(args[0]), rounded(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to TF32, to nearest even; leaves other dtypes as they are."""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def _depthwise(func: Any, x: torch.Tensor, w: torch.Tensor, *more: Any, **named: Any) -> bool:
    if func is GRADIENT:
        groups = more[7]
        return bool(groups > 1 and groups == x.shape[1] == w.shape[1])
    if func is not F.conv2d:
        return False
    groups = named.get("groups", more[4] if len(more) > 4 else 1)
    return bool(groups > 1 and groups == w.shape[0] == x.shape[1])
