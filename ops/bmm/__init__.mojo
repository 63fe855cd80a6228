"""Batched matrix product with a fused epilogue; linear layers too."""
from .op import *
from .qkv import *
