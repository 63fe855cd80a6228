"""Memory that checks each access: buffers at 4 GiB from one another, in one 64-bit space."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Mask = Any  # True, or a bool for each lane

GLOBAL, SHARED, LOCAL = 1 << 32, 1 << 44, 1 << 48
SLOT = 1 << 32
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class AccessError(Exception):
    """An access outside every buffer, or one that is not aligned."""


class Buffer:
    """Bytes, readable up to the word of 4 that holds the last: allocations are whole words."""

    def __init__(self, size: int, fill: int = 0xFF):
        self.size = -(-size // 4) * 4
        room = np.full((self.size + 31) // 8, fill * 0x0101010101010101, np.uint64)
        self.views = {size: room.view(dtype) for size, dtype in WORDS.items()}
        self.writers: Array | None = None
        """Of shared memory: the thread, from 1 on, that wrote each word and has not fenced it."""

    @property
    def bytes(self) -> Array:
        return self.views[1]


class Memory:
    """What a block sees, by the upper half of an address."""

    def __init__(self, slots: dict[int, Buffer], threads: Array | None = None):
        self.slots, self.threads = slots, threads

    def _find(self, at: Array, bytes: int, kind: str) -> tuple[Buffer, Array]:
        low, high = int(at.min()), int(at.max())
        slot = low // SLOT
        buffer = self.slots.get(slot)
        if buffer is None or high % SLOT + bytes > buffer.size or high // SLOT != slot:
            bad = high if buffer else low
            size = f", {buffer.size} bytes long" if buffer else ""
            raise AccessError(f"{kind} of {bytes} bytes at {bad:#x}: outside every buffer{size}")
        if int(np.bitwise_or.reduce(at)) & (bytes - 1):
            raise AccessError(f"{kind} of {bytes} bytes: an address is not aligned to them")
        return buffer, at % SLOT

    def load(self, at: Array, size: int, count: int, where: Mask) -> Array:
        """Loads `count` neighbours of `size` bytes into each lane: [count, lanes].

        Of an address that all lanes share, one number, it is [count].
        """
        if np.ndim(at) == 0:
            shared: Array = self.load(np.array([at]), size, count, True)[:, 0]
            return shared
        chosen = at if where is True else at[where]
        out = np.zeros((count, len(at)), WORDS[size])
        if len(chosen):
            slots = chosen // SLOT
            if (slots != slots[0]).any():
                for slot in np.unique(slots):
                    part = (at // SLOT == slot) & where
                    out[:, part] = self.load(at, size, count, part)[:, part]
                return out
            buffer, offset = self._find(chosen, size * count, "load")
            index = offset // size + np.arange(count)[:, None]
            if where is True:
                return buffer.views[size][index]
            out[:, where] = buffer.views[size][index]
        return out

    def store(self, at: Array, values: list[Array], size: int, where: Mask) -> None:
        """Stores neighbours of `size` bytes from each lane."""
        chosen = at if where is True else at[where]
        if not len(chosen):
            return
        slots = chosen // SLOT
        if (slots != slots[0]).any():
            for slot in np.unique(slots):
                self.store(at, values, size, (at // SLOT == slot) & where)
            return
        buffer, offset = self._find(chosen, size * len(values), "store")
        view = buffer.views[size]
        for i, value in enumerate(values):
            value = np.broadcast_to(value, len(at))
            view[offset // size + i] = value if where is True else value[where]
        if buffer.writers is not None and self.threads is not None:
            writer = self.threads if where is True else self.threads[where]
            for word in range(0, size * len(values), 4):
                buffer.writers[(offset + word) // 4] = writer
