"""What passes know of the device that a program is rewritten for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from maxvision.graphs.target import base


@dataclass(frozen=True)
class Backend:
    """A device, and what was chosen for it.

    Attributes:
        api: ``cpu``, ``cuda`` or ``hip``.
        dtype: Of activations and filters.
        formats: The layers that run sparse, and the format of each (graphs/formats.py).
        architecture: Of a GPU: ``sm_90a``, ``gfx942``, ...
    """

    api: str
    dtype: str
    formats: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.api != "cpu"

    @property
    def is_hopper(self) -> bool:
        """Whether it has Hopper's tensor cores and copy engine."""
        return base(self.architecture) == "sm_90"
