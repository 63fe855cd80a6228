"""Image classification on MAX, in Mojo kernels of our own.

from maxvision import load

model = load("microsoft/resnet-50", device="gpu")
model.classify("cat.jpg", top_k=5)
"""

TYPE_CHECKING = False  # typing's, whose import would take longer than all that --help needs
if TYPE_CHECKING:
    from maxvision.common.errors import (
        ArgumentError,
        DeviceError,
        ImageError,
        ModelError,
        UserError,
    )
    from maxvision.runtime.classifier import Classifier, Features, Prediction, load

_ERRORS = ("ArgumentError", "DeviceError", "ImageError", "ModelError", "UserError")
_RUNTIME = ("Classifier", "Features", "Prediction", "load")

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


def __getattr__(name: str) -> object:
    """Imports what the API names when it is first used: MAX takes 0.2 s."""
    if name in _ERRORS:
        from maxvision.common import errors

        return getattr(errors, name)
    if name in _RUNTIME:
        from maxvision.runtime import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
