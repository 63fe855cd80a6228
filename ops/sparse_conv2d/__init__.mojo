"""Convolution with a sparse filter."""
from .op import *
from .packed import *
