"""Trained weights: found, read and checked.

``maxvision weights --help`` inspects, converts, prunes and verifies them.
"""

from maxvision.weights.checkpoint import Checkpoint, load
from maxvision.weights.metadata import match_labels, read_labels
from maxvision.weights.source import bundled, named

__all__ = ["Checkpoint", "bundled", "load", "match_labels", "named", "read_labels"]
