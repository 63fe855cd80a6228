"""2-d convolution with a fused epilogue."""
from .op import *
