"""What a convolution or a linear layer of a network looks like: sizes, no weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Convolution:
    """A convolution, or a linear layer over tokens as one of 1 x 1.

    Attributes:
        name: Of its weights, as the graphs call them.
        kernel: R and S.
        stride: Pixels between windows.
        channels: Of the input.
        filters: Channels of the output.
        size: Of the output, P and Q; tokens are a row.
        groups: Groups of channels.
        partner: The convolution whose sum with it is one op, or nothing.
        chain: The convolution before or after it that a GPU computes in the same op, or nothing.
    """

    name: str
    kernel: int
    stride: int
    channels: int
    filters: int
    size: tuple[int, int]
    groups: int = 1
    partner: str = ""
    chain: str = ""

    @property
    def pixels(self) -> int:
        """Counts the pixels of the output."""
        return self.size[0] * self.size[1]

    @property
    def weights(self) -> int:
        """Counts its weights."""
        return self.kernel**2 * self.channels // self.groups * self.filters

    @property
    def macs(self) -> int:
        """Counts the multiply-accumulates of one image."""
        return self.pixels * self.weights

    def title(self) -> str:
        """Describes it as bench/layers.py does: window, channels, pixels."""
        channels = f"{self.channels}-{self.filters}"
        if self.channels == self.filters:
            channels = str(self.channels)
        return f"{self.kernel}x{self.kernel}/{self.stride} {channels} at {self.pixels} px"


def windows(size: tuple[int, int], kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """Counts the windows down and across an image of ``size`` px."""
    h, w = ((side + 2 * padding - kernel) // stride + 1 for side in size)
    return h, w
