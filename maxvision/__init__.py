"""Image classification on MAX, in Mojo kernels of our own.

from maxvision import load

model = load("microsoft/resnet-50", device="gpu")
model.classify("cat.jpg", top_k=5)

fast = convert(torch_module, example_input, dtype="bfloat16")
fast(x)
"""

TYPE_CHECKING = False  # typing's, whose import would take longer than all that --help needs
if TYPE_CHECKING:
    from maxvision.bridge import torch_ops
    from maxvision.bridge.convert import Converted, convert
    from maxvision.bridge.dynamo import Explanation, explain
    from maxvision.bridge.inject import Injection, inject
    from maxvision.common.errors import (
        ArgumentError,
        DeviceError,
        ImageError,
        ModelError,
        UserError,
    )
    from maxvision.runtime.classifier import Classifier, Features, Prediction, load

_ERRORS = ("ArgumentError", "DeviceError", "ImageError", "ModelError", "UserError")
_BRIDGE = ("Converted", "convert")  # needs torch, but for ONNX files
_DYNAMO = ("Explanation", "explain")  # needs torch
_INJECT = ("Injection", "inject")  # needs torch
_RUNTIME = ("Classifier", "Features", "Prediction", "load")

__all__ = [
    "ArgumentError",
    "Classifier",
    "Converted",
    "DeviceError",
    "Explanation",
    "Features",
    "ImageError",
    "Injection",
    "ModelError",
    "Prediction",
    "UserError",
    "convert",
    "explain",
    "inject",
    "load",
    "torch_ops",
]


def __getattr__(name: str) -> object:
    """Imports what the API names when it is first used: MAX takes 0.2 s."""
    try:
        return _imported(name)
    except ModuleNotFoundError as error:
        from maxvision.common.console import missing

        if why := missing(error, f"maxvision.{name}", "convert"):
            raise ModuleNotFoundError(why, name=error.name) from None
        raise


def _imported(name: str) -> object:
    if name in _ERRORS:
        from maxvision.common import errors

        return getattr(errors, name)
    if name in _BRIDGE:
        from maxvision.bridge import convert

        return getattr(convert, name)
    if name in _DYNAMO:
        from maxvision.bridge import dynamo

        return getattr(dynamo, name)
    if name in _INJECT:
        from maxvision.bridge import inject

        return getattr(inject, name)
    if name == "torch_ops":  # needs torch
        import importlib

        return importlib.import_module("maxvision.bridge.torch_ops")
    if name in _RUNTIME:
        from maxvision.runtime import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
