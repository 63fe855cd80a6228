"""Trained weights: found, read, checked, and laid out for the graphs.

``python -m weights --help`` inspects, converts, prunes and verifies them.
"""

from weights.checkpoint import Checkpoint, load
from weights.source import bundled

__all__ = ["Checkpoint", "bundled", "load"]
