"""Says why no kernel here takes torch's tensors."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What tensors may be, beside integers and truth values; on a CPU all may be float64, too."""


def refusal(*tensors: Tensor) -> str:
    """Says why no kernel here takes tensors together; nothing if one may."""
    for x in tensors:
        if x.layout is not torch.strided or x.is_quantized:
            kind, way = (x.dtype, "dequantize") if x.is_quantized else (x.layout, "to_dense")
            name = str(kind).removeprefix("torch.").lstrip("_")
            return f"a tensor is {name}, and it computes on dense ones; call {way}()"
    floats = {x.dtype: x.device for x in tensors if x.is_floating_point() or x.is_complex()}
    for dtype, device in floats.items():
        name = str(dtype).removeprefix("torch.")
        if dtype == torch.float64 and device.type == "cpu":
            if len(floats) > 1:
                other = next(str(each).removeprefix("torch.") for each in floats if each != dtype)
                return f"a tensor is float64 and another {other}; make all float64, or none"
        elif dtype == torch.float64:
            return "a tensor is float64, which only a CPU computes in; call float() or cpu()"
        elif dtype not in DTYPES:
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
