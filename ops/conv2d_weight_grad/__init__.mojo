"""The gradient of a convolution's filters."""
from .op import *
