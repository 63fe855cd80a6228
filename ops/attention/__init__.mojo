"""Attention without a score matrix in memory."""
from .op import *
