"""The gradients of attention, without a score matrix in memory."""
from .op import *
