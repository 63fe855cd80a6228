"""Image classification on MAX, in Mojo kernels of our own.

from maxvision import load

model = load("microsoft/resnet-50", device="gpu")
model.classify("cat.jpg", top_k=5)
"""

from graphs.errors import ArgumentError, DeviceError, ImageError, ModelError, UserError
from graphs.session import Features, Model, Prediction, load

__all__ = [
    "ArgumentError",
    "DeviceError",
    "Features",
    "ImageError",
    "Model",
    "ModelError",
    "Prediction",
    "UserError",
    "load",
]
