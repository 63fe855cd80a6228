"""Our engine, and what every engine is; no torch, which ``maxvision time`` does without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType

from maxvision.bench.timing import Clock, HostClock, MaxClock
from maxvision.runtime.executor import Executor
from maxvision.runtime.replay import PINNED, Execution, Replay, captures

HOST_RING = 3
"""Batches of the ring in the host's memory."""
L2_UNKNOWN = 64 << 20
"""Bytes of L2 cache to reckon with where they are not known."""


class Engine:
    """Runs batches; all but ``answer`` only enqueue, on a GPU."""

    name: str
    clock: Clock
    memory: int | None = None
    """Bytes that it holds on a GPU: weights, activations, and what its allocator keeps."""

    def feed(self, turn: int) -> None:
        """Puts a batch of the device's ring where ``compute`` reads it."""

    def upload(self, turn: int) -> None:
        """Puts a batch of the host's ring there."""
        self.feed(turn)

    def compute(self) -> None:
        """Runs the network."""

    def download(self) -> None:
        """Brings the logits to the host, if ``compute`` did not."""

    def answer(self, turn: int) -> np.ndarray:
        """A whole request, as a user has it: host array in, host array out."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives memory back."""


def pictures(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    """Draws batches of random images, uint8 [N, H, W, C]; the same at every call."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, shape, np.uint8) for _ in range(count)]


def ring_size(bytes_a_batch: int, cache: int = L2_UNKNOWN) -> int:
    """How many batches a ring on the device has: twice its L2 cache, and at least three."""
    return max(3, -(-2 * cache // bytes_a_batch))


def given_away(device: Device) -> int:
    """Counts the bytes of MAX's pool on a GPU that are in use.

    MAX takes the whole pool from the driver at once, so that the driver's count says nothing.
    """
    return int(device.stats["total_memory"]) - int(device.stats["free_memory"])


class Maxvision(Engine):
    """Our graph: captured on a GPU, executed on a CPU.

    Args:
        executor: Has the compiled graph.
        device: Where it runs.
        host: The host's ring: ``HOST_RING`` batches as the graph takes them.
        ring: Makes the device's ring, on a GPU; of random images if None.
    """

    name = "maxvision"

    def __init__(
        self,
        executor: Executor,
        device: Device,
        host: Sequence[np.ndarray],
        ring: Callable[[], Sequence[Buffer]] | None = None,
    ) -> None:
        self._levels = host
        executable = executor.executable
        plain = Execution(executable, device, share=executor.share)
        self._run: Any = plain
        self._put: Callable[[Any], None] = plain.upload
        self._ring: Sequence[Any] = host
        self._host: Sequence[Any] = host
        if not captures(device):
            self.clock = HostClock()
            return
        self.clock = MaxClock(device)
        plain.upload(host[0])
        plain.run()
        plain.result()  # what a run still holds, the capture would take anew
        dtype = DType.from_numpy(host[0].dtype)
        self._run = Replay(executable, device, [(dtype, host[0].shape)], len(host[0]))
        self._put = self._run.inputs[0].inplace_copy_from
        self.memory = given_away(device)
        if ring is None:
            drawn = pictures(host[0].shape, ring_size(host[0].nbytes))
            self._ring = [Buffer.from_numpy(each).to(device) for each in drawn]
        else:
            self._ring = ring()
        self._host = [Buffer(dtype, x.shape, device, PINNED) for x in host]
        for pinned, levels in zip(self._host, host, strict=True):
            np.copyto(pinned.to_numpy(), levels)
        self.clock.wait()

    def feed(self, turn: int) -> None:
        """See ``Engine``."""
        self._put(self._ring[turn % len(self._ring)])

    def upload(self, turn: int) -> None:
        """See ``Engine``."""
        self._put(self._host[turn % HOST_RING])

    def compute(self) -> None:
        """See ``Engine``."""
        self._run.run()

    def download(self) -> None:
        """See ``Engine``."""
        self._run.download()

    def answer(self, turn: int) -> np.ndarray:
        """See ``Engine``."""
        self._run.upload(self._levels[turn % HOST_RING])
        self._run.run()
        self._run.download()
        return np.asarray(self._run.result()[0])

    def close(self) -> None:
        """See ``Engine``."""
        if isinstance(self._run, Replay):
            self._run.release()
