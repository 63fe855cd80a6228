"""Sums, means, largest and smallest numbers over an axis."""

from .op import *
