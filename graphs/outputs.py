"""What every network gives."""

from __future__ import annotations

from typing import NamedTuple

from max.graph import TensorValue


class Outputs(NamedTuple):
    """The ends of a network: logits [N, classes], features [N, C] that the classifier reads,
    and the feature map [N, P, Q, C] after each stage.
    """

    logits: TensorValue
    features: TensorValue
    stages: list[TensorValue]
