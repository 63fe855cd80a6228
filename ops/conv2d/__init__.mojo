"""2-d convolution with a fused epilogue."""
from .chain import *
from .op import *
from .shortcut import *
