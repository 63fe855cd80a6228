"""The first layers of the networks in one kernel: pixels to pooled maps, or to tokens."""
from .op import *
