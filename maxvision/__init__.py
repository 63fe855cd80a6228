"""Image classification on MAX, in Mojo kernels of our own.

from maxvision import load

model = load("microsoft/resnet-50", device="gpu")
model.classify("cat.jpg", top_k=5)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxvision.common.errors import (
        ArgumentError,
        DeviceError,
        ImageError,
        ModelError,
        UserError,
    )
    from maxvision.runtime.classifier import Classifier, Features, Prediction, load

_PLACES = {
    **dict.fromkeys(
        ("ArgumentError", "DeviceError", "ImageError", "ModelError", "UserError"), "common.errors"
    ),
    **dict.fromkeys(("Classifier", "Features", "Prediction", "load"), "runtime.classifier"),
}

__all__ = [
    "ArgumentError",
    "Classifier",
    "DeviceError",
    "Features",
    "ImageError",
    "ModelError",
    "Prediction",
    "UserError",
    "load",
]


def __getattr__(name: str) -> Any:
    """Imports what the API names when it is first used: MAX takes 0.2 s."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"maxvision.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
