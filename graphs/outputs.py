"""What every network gives."""

from __future__ import annotations

from typing import NamedTuple

from max.graph import TensorValue


class Outputs(NamedTuple):
    """The ends of a network.

    Attributes:
        logits: [N, classes].
        features: [N, C], what the classifier reads.
        stages: The feature map [N, P, Q, C] after each stage.
    """

    logits: TensorValue
    features: TensorValue
    stages: list[TensorValue]
