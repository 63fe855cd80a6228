"""What command lines take, checked before anything heavy is imported."""

from __future__ import annotations

import argparse
import re

DTYPES = ("auto", "float32", "bfloat16", "float16")
SPARSE = ("auto", "always", "never")
"""What runs pruned layers: sparse convolutions where they are faster, always, or never."""


def device(text: str) -> str:
    """Takes the name of a device: auto, cpu, gpu or gpu:N."""
    if not re.fullmatch(r"auto|cpu|gpu(:\d{1,4})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"auto, cpu, gpu or gpu:N was expected but {text!r} came")
    return text
