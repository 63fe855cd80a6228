"""What every source of models gives: inputs, preprocessing, labels, and a program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maxvision.bridge.importer import Traced
from maxvision.weights.family import MEAN, STD
from maxvision.weights.metadata import cropped


@dataclass
class Model(ABC):
    """A model of another framework, and what is known of its inputs.

    Attributes:
        name: What to call it.
        module: The torch module in eval mode, or the ONNX file.
        example: Inputs of a batch of two, tensors of torch or arrays of numpy.
        inputs: The name of each input.
        preprocess: How a picture becomes the input, as in a ``preprocessor_config.json``; nothing
            if the input is no picture.
        labels: The names of the classes; nothing if they are not known.
        note: What the source does not say and was assumed; perhaps nothing.
    """

    name: str
    module: Any
    example: tuple[Any, ...]
    inputs: tuple[str, ...] = ()
    preprocess: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    note: str = ""

    @abstractmethod
    def trace(self) -> Traced:
        """Makes a program of it.

        Raises:
            ModelError: If its framework cannot say what it computes.
        """


def pictures(
    size: tuple[int, int],
    *,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    resize: int | None = None,
    interpolation: str = "bicubic",
) -> dict[str, Any]:
    """Describes how pictures are prepared: resized, cut to ``size`` px (height, width), normalised.

    Args:
        size: Of the picture that the network takes.
        mean: Of each channel, of levels from 0 to 1, ImageNet's by default; so is std.
        std: See ``mean``.
        resize: What the shorter edge becomes before the cut; ``size`` / 0.875 if None.
        interpolation: nearest, lanczos, bilinear, bicubic, box or hamming.
    """
    edge = resize or round(min(size) / 0.875)
    return cropped(size, edge, interpolation, mean, std)


def pictures_of(inputs: Sequence[Any]) -> dict[str, Any]:
    """Describes pictures of the size of the only input [N, C, H, W]; other inputs are none."""
    if len(inputs) != 1 or len(inputs[0].shape) != 4:
        return {}
    height, width = map(int, inputs[0].shape[2:])
    return pictures((height, width))
