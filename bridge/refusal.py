"""Says why no kernel here takes torch's tensors."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What tensors may be, beside integers and truth values."""


def refusal(*tensors: Tensor) -> str:
    """Says why no kernel here takes tensors together; nothing if one may."""
    for x in tensors:
        if (x.is_floating_point() or x.is_complex()) and x.dtype not in DTYPES:
            name = str(x.dtype).removeprefix("torch.")
            return f"a tensor is {name}, and it computes in float32, bfloat16 and float16"
    return misplaced(tensors[0].device if tensors else None, *tensors)


def misplaced(place: torch.device | None, *tensors: Tensor) -> str:
    """Says why no kernel here takes tensors that lie where they do; nothing if one may."""
    places = sorted({str(x.device) for x in tensors})
    if len(places) > 1:
        return f"its tensors are on {' and '.join(places)}; move them to one device"
    if place is not None and place.type not in ("cpu", "cuda"):
        return f"its tensors are on {place}, and it computes on a CPU or a GPU"
    return without_max()


@functools.cache
def without_max() -> str:
    """Says that MAX is missing, if it is."""
    found = importlib.util.find_spec("max.engine") if importlib.util.find_spec("max") else None
    return "" if found else "MAX is not installed; pip install modular"
