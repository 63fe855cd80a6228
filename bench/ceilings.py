"""The two ceilings of a machine, measured through torch: matrix rate and memory bandwidth."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from maxvision.bench.engines import TORCH
from maxvision.bench.timing import Clock, HostClock, TorchClock, rounded, sample


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at most.

    Attributes:
        flops_per_s: Of a large product of random matrices, at one dtype.
        bytes_per_s: Of a large copy, reads and writes counted.
    """

    flops_per_s: float
    bytes_per_s: float

    def floor(self, flops: float, traffic: float) -> float:
        """The time that no version of the work can beat, ms."""
        return 1e3 * max(flops / self.flops_per_s, traffic / self.bytes_per_s)

    def record(self) -> dict[str, float]:
        """Gives both in round units."""
        return {
            "tflops_per_s": rounded(self.flops_per_s / 1e12),
            "gb_per_s": rounded(self.bytes_per_s / 1e9),
        }


def ceilings(dtype: str, gpu: bool) -> Ceilings:
    """Measures both, for about half a second each."""
    place, clock = ("cuda", TorchClock()) if gpu else ("cpu", HostClock())
    side, length = (8192, 1 << 31) if gpu else (2048, 1 << 28)
    a, b = (torch.randn(side, side, device=place, dtype=TORCH[dtype]) for _ in range(2))
    if gpu or dtype != "float32":
        multiply = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    else:  # oneDNN's: MKL's, which mm is, has half the rate on AMD
        multiply = functools.partial(_linear(b), a.to_mkldnn())
    product = _best(clock, multiply)
    source = torch.randint(0, 256, (length,), device=place, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = _best(clock, functools.partial(target.copy_, source))
    return Ceilings(2e3 * side**3 / product, 2e3 * length / copied)


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    from torch.utils.mkldnn import to_mkldnn

    rows, columns = weight.shape
    made = torch.nn.Linear(columns, rows, bias=False)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return to_mkldnn(made.eval())


def _best(clock: Clock, step: functools.partial[torch.Tensor]) -> float:
    step()
    return min(sample(clock, step, 0.5))
