"""Trained weights: found, read, checked, and laid out for the graphs.

``maxvision weights --help`` inspects, converts, prunes and verifies them.
"""

from maxvision.weights.checkpoint import Checkpoint, load
from maxvision.weights.source import bundled

__all__ = ["Checkpoint", "bundled", "load"]
