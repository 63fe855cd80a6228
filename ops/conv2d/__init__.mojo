"""2-d convolution with a fused epilogue."""
from .op import *
from .quantized import *
from .shortcut import *
