"""The gradients of a layer norm."""
from .op import *
