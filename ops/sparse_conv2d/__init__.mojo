"""Convolution with an unstructured-sparse filter."""
from .op import *
