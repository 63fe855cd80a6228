"""What compiles, feeds and runs networks, from pictures to labels."""

import os
from typing import Any

# MAX rounds each tensor up to pages, of 256 MB unless told otherwise: ResNet-50 at batch 256 holds
# 1.2 GB of an H200 with these, and up to 3.2 with those. Read when a GPU is opened.
os.environ.setdefault("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_VMM_PAGE_MB", "2")

__all__ = ["Classifier", "Features", "Prediction", "load"]


def __getattr__(name: str) -> Any:
    """Imports the classifier, and with it MAX, when one of its names is first used."""
    if name in __all__:
        from maxvision.runtime import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
