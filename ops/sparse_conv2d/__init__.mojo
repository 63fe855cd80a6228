"""Convolution with a sparse filter."""
from .op import *
