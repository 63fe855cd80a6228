"""Squeeze and excitation of images in one launch."""
from .op import *
