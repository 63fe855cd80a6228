"""What engines run on: random batches of one size, in every form that an engine wants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from maxvision.bench.ours import HOST_RING, L2_UNKNOWN, pictures, ring_size
from maxvision.graphs.program import Program
from maxvision.runtime.preprocess import Preprocess


class Inputs(Protocol):
    """Batches of one size; the same at every call."""

    batch: int
    """Images, or texts, of a batch."""
    gpu: bool
    """Whether rings lie on a GPU."""

    @property
    def host(self) -> list[np.ndarray]:
        """The host's ring, as ours takes it."""

    def fresh(self) -> Inputs:
        """Gives the same without its rings, for a process that makes them itself."""

    def host_ring_on_gpu(self) -> list[torch.Tensor]:
        """A ring on the GPU, as ours takes it; it begins as the host's does."""

    def tensor(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """A batch of the host's ring, as a torch module of ``dtype`` takes it."""

    def tensor_ring(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """A ring on the GPU of such batches; it begins as the host's does."""


def _count(bytes_a_batch: int) -> int:
    """How many batches a ring on the GPU has: twice its L2 cache, and at least three."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or L2_UNKNOWN
    return ring_size(bytes_a_batch, cache)


@dataclass
class Images:
    """Random pictures of one batch size.

    Ours takes uint8 and normalises in its graph; peers take pixels that are normalised and in the
    model's dtype already.

    Attributes:
        batch: Images in a batch.
        size: Height and width, px.
        mean: Of each channel, as levels.
        std: Of each channel, as levels.
        gpu: Whether rings lie on a GPU.
    """

    batch: int
    size: tuple[int, int]
    mean: np.ndarray
    std: np.ndarray
    gpu: bool

    @classmethod
    def of(cls, prepare: Preprocess, batch: int, gpu: bool) -> Images:
        """Makes images of the size and normalisation that ``prepare`` has."""
        mean, std = (np.array(values, np.float32) for values in (prepare.mean, prepare.std))
        return cls(batch, (prepare.height, prepare.width), mean, std, gpu)

    @cached_property
    def host(self) -> list[np.ndarray]:
        """See ``Inputs``: uint8 [N, H, W, C]."""
        return pictures((self.batch, *self.size, len(self.mean)), HOST_RING)

    def fresh(self) -> Inputs:
        """See ``Inputs``."""
        return replace(self)

    def host_ring_on_gpu(self) -> list[torch.Tensor]:
        """See ``Inputs``: uint8 [N, H, W, C]."""
        first = torch.from_numpy(self.host[0])
        count = _count(first.numel())
        ring = torch.randint(0, 256, (count, *first.shape), dtype=torch.uint8, device="cuda")
        ring[0].copy_(first)
        return list(ring)

    def tensor_ring(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """See ``Inputs``."""
        first = self.tensor(0, dtype)
        count = _count(first.numel() * first.element_size())
        n, c, h, w = first.shape
        ring = torch.randn((count, n, h, w, c), device="cuda", dtype=dtype)
        ring[0].copy_(first.permute(0, 2, 3, 1))
        return [each.permute(0, 3, 1, 2) for each in ring]

    def tensor(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Inputs``: normalised, [N, C, H, W], channels last."""
        levels = torch.from_numpy(self.host[turn % HOST_RING]).float()
        mean, std = torch.from_numpy(self.mean), torch.from_numpy(self.std)
        return ((levels - mean) / std).to(dtype).permute(0, 3, 1, 2)


@dataclass
class Tokens:
    """Random texts of one batch size: int64 [N, T], for ours and for the peers.

    Attributes:
        batch: Texts in a batch.
        length: T.
        vocabulary: Tokens that there are.
        gpu: Whether rings lie on a GPU.
    """

    batch: int
    length: int
    vocabulary: int
    gpu: bool

    @classmethod
    def of(cls, program: Program, batch: int, gpu: bool) -> Tokens:
        """Makes texts for a program whose only input is tokens, which it looks up in a table."""
        ((name, given),) = program.inputs.items()
        tables = [
            program.shape(node.inputs[0])[0]
            for node in program.users[name]
            if node.op == "gather" and node.inputs[0] in program.weights
        ]
        return cls(batch, int(given.shape[1]), min(tables), gpu)

    @cached_property
    def host(self) -> list[np.ndarray]:
        """See ``Inputs``."""
        rng = np.random.default_rng(0)
        shape = (self.batch, self.length)
        return [rng.integers(0, self.vocabulary, shape) for _ in range(HOST_RING)]

    def fresh(self) -> Inputs:
        """See ``Inputs``."""
        return replace(self)

    def host_ring_on_gpu(self) -> list[torch.Tensor]:
        """See ``Inputs``."""
        shape = (_count(self.host[0].nbytes), self.batch, self.length)
        ring = torch.randint(0, self.vocabulary, shape, device="cuda")
        ring[0].copy_(torch.from_numpy(self.host[0]))
        return list(ring)

    def tensor(self, turn: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Inputs``; numbers of tokens have no other dtype."""
        return torch.from_numpy(self.host[turn % HOST_RING])

    def tensor_ring(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """See ``Inputs``."""
        return self.host_ring_on_gpu()
