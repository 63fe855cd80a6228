"""Runs a kernel, block by block: warps in random order, copies as late as can be.

A gang is some warps of a block whose lanes are rows of numpy arrays; where they part, the basic
block that comes first in the program runs first. What a GPU may do late is done late: cp.async and
wgmma at the wait for their group, tensor copies at a random later time, stores of the copy engine
when their group is waited for, or the thread ends. Shared memory and registers begin as NaN. What a
thread has written to shared memory, and not fenced (fence.proxy.async), wgmma reads as NaN; it is
reported if the copy engine stores it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from . import semantics
from .memory import GLOBAL, LOCAL, SHARED, SLOT, AccessError, Buffer, Mask, Memory
from .ptx import Kernel
from .tensormaps import Im2col, Tiled
from .translate import Block, translate

Array = np.ndarray[Any, np.dtype[Any]]
BLOCKED, EXITED = 1 << 32, 1 << 33
BASE = 16
"""Where a block's shared memory begins: no kernel may count on more alignment than this."""
MAP_BYTES = 128
REGISTERS = 65536
"""Of a multiprocessor."""
SHARED_BYTES = 227 << 10
"""Of a block, at most."""
TURNS = 100_000
"""Turns of each gang, of some basic blocks, after which a kernel is said to loop forever."""


class Deadlock(Exception):
    """Every warp that is left waits."""


class Divergence(Exception):
    """A warp came in part to an instruction that takes all of its lanes."""


class LaunchError(Exception):
    """A launch that does not fit the kernel."""


def swizzled(at: Array, row: int) -> Array:
    """Where bytes lie under the swizzle of rows of 128 or 64 bytes (5.5.7), or 16, which has none.

    Sixteenths of 128 bytes change places.
    """
    return at ^ (((at >> 7) & {16: 0, 64: 3, 128: 7}[row]) << 4)


Side = tuple[int, int, int, str, Any]
"""A side of wgmma in shared memory: descriptor, rows, numbers of a row, kind, unfenced words."""


@lru_cache(maxsize=256)
def places(descriptor: int, rows: int, depth: int, kind: str) -> Array:
    """Finds the bytes of [rows, depth] of a stage (9.7.14.5).

    By 8 rows of 16 bytes; or swizzled, by 8 rows of 128 or 64 bytes, and what a row has beyond
    them in the next box.
    """
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    width = (16, 128, 64, 0)[descriptor >> 62]
    if width != 16 and stride != 8 * width:
        raise AccessError(f"wgmma: a descriptor that is not known: {descriptor:#x}")
    size = 4 if kind == "tf32" else 1 if kind in semantics.BYTES else 2
    row, byte = np.arange(rows)[:, None], np.arange(depth * size)
    at = start + row // 8 * stride + row % 8 * width + byte // width * leading + byte % width
    return swizzled(at, width)


class Tensors:
    """Global memory: a buffer for each array, none next to another."""

    base: ClassVar[int] = GLOBAL
    """The first one's address."""

    def __init__(self) -> None:
        self.slots: dict[int, Buffer] = {}
        self._late: list[tuple[Buffer, Array]] = []

    def add(self, array: Array, offset: int = 0, late: bool = False) -> int:
        """Copies an array in, `offset` bytes after an aligned address, and gives its address.

        What is ``late`` the kernel ahead writes: it is NaN until a thread waits for that kernel.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        slot = self.base // SLOT + len(self.slots)
        buffer = Buffer(offset + len(data))
        buffer.bytes[offset : offset + len(data)] = 0xFF if late else data
        if late:
            self._late.append((buffer, np.pad(data, (offset, 0))))
        self.slots[slot] = buffer
        return slot * SLOT + offset

    def settle(self) -> None:
        """Ends the kernel ahead."""
        while self._late:
            buffer, data = self._late.pop()
            buffer.bytes[: len(data)] = data

    def array(self, address: int, like: Array) -> Array:
        """Views what lies at an address as an array of this shape and dtype."""
        at = address % SLOT
        return (
            self.slots[address // SLOT]
            .bytes[at : at + like.nbytes]
            .view(like.dtype)
            .reshape(like.shape)
        )


@dataclass
class Copy:
    """A cp.async that has not arrived: of these lanes, each in its group."""

    lanes: Array
    to: Array
    source: Array
    bytes: int
    sizes: Array
    group: Array


class Barrier:
    """An mbarrier (9.7.12.15): a phase ends when all have arrived and all bytes have come."""

    def __init__(self, count: int):
        self.count = self.left = count
        self.bytes = self.phase = 0

    def settle(self) -> None:
        if self.left < 0:
            raise AccessError("mbarrier: more arrivals than it counts")
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count

    def past(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Cluster:
    """Blocks that share their memories; one block if the kernel has no clusters."""

    def __init__(self, launch: Launch, first: int, rng: np.random.Generator):
        self.launch, self.rng = launch, rng
        self.blocks = [ThreadBlock(self, rank, first + rank) for rank in range(launch.cluster)]
        self.arrived = self.turn = 0
        self.waits: dict[tuple[int, int], int] = {}  # for the end of which turn each warp does
        self.copies: list[Callable[[], None]] = []

    def past(self, turn: int) -> bool:
        return self.turn > turn

    def run(self) -> None:
        gangs = [gang for block in self.blocks for gang in block.gangs]
        for turn in itertools.count():
            if not gangs:
                break
            if turn == TURNS:
                raise Deadlock(f"{self.launch.kernel.name}: does not end, {gangs[0].describe()}")
            moved = False
            for i in self.rng.permutation(len(gangs)):
                moved |= gangs[i].run(int(self.rng.integers(1, 40)))
                while self.copies and self.rng.random() < 0.3:
                    self.copies.pop(int(self.rng.integers(len(self.copies))))()
                    moved = True
            if not moved and self.copies:
                self.copies.pop(int(self.rng.integers(len(self.copies))))()
                moved = True
            if not moved:
                where = {gang.describe() for gang in gangs}
                raise Deadlock(f"{self.launch.kernel.name}: all wait at {'; '.join(sorted(where))}")
            gangs = [gang for gang in gangs if not gang.done()]
        for block in self.blocks:
            block.finish()


class ThreadBlock:
    """A block: its shared memory, its barriers and its warps."""

    def __init__(self, cluster: Cluster, rank: int, index: int):
        launch = cluster.launch
        self.cluster, self.rank, self.launch = cluster, rank, launch
        x, y = launch.grid[:2]
        self.index = (index % x, index // x % y, index // (x * y))
        self.shared = Buffer(BASE + launch.kernel.shared_bytes + launch.shared_bytes)
        self.writers = self.shared.writers = np.zeros(self.shared.size // 4, np.int16)
        self.named: dict[int, tuple[int, int]] = {}  # arrived, turn
        self.mbarriers: dict[int, Barrier] = {}
        together = launch.together
        count = launch.threads // 32
        self.committed = np.zeros(count, np.int64)  # wgmma groups, of each warp
        self.free = 0  # registers that warps have given back, of a thread each
        self.products: list[tuple[int, int, Callable[[], None]]] = []
        self.gangs = [
            Gang(self, first, min(together, count - first)) for first in range(0, count, together)
        ]

    def mbarrier(self, address: int) -> Barrier:
        if address not in self.mbarriers:
            raise AccessError(f"mbarrier at {address:#x}: it has not been initialised")
        return self.mbarriers[address]

    def receive(self, at: int, words: Array, barrier: Barrier) -> None:
        """Takes what another block of the cluster has sent."""
        if at + words.nbytes > self.shared.size:
            raise AccessError(f"st.async: bytes at {at:#x} leave shared memory")
        self.shared.bytes[at : at + words.nbytes] = words.view(np.uint8)
        self.writers[at // 4 : (at + words.nbytes) // 4] = 0
        barrier.bytes -= words.nbytes
        barrier.settle()

    def unfenced(self, at: Array) -> Array | None:
        """Tells which words of these bytes a thread has written and not fenced; None if none."""
        if not self.writers.any():
            return None
        written = self.writers.take(at[..., ::4] >> 2, mode="clip") > 0
        return written if written.any() else None

    def finish(self) -> None:
        for gang in self.gangs:
            gang.finish()


class Gang:
    """Some warps of a block: registers as rows of lanes, and where each lane is."""

    def __init__(self, block: ThreadBlock, first: int, count: int):
        kernel, lanes = block.launch.kernel, 32 * count
        self.block, self.first, self.lanes = block, first, lanes
        self.tid = np.arange(lanes) + 32 * first
        self.lane = self.tid % 32
        self.pc = np.zeros(lanes, np.int64)
        self.waits: list[tuple[Array, Callable[[], bool], Callable[[], None]]] = []
        rows: dict[str, list[Any]] = {
            kind: [] for kind in "u16 s16 f16 u32 s32 f32 u64 s64 f64 p".split()
        }
        for size in kernel.registers.values():
            row = np.full(lanes, -1, f"int{8 * size}") if size else np.zeros(lanes, bool)
            for kind, views in rows.items():
                if kind == "p":
                    views.append(None if size else row)
                elif size and int(kind[1:]) == 8 * size:
                    views.append(
                        row.view({"u": "uint", "s": "int", "f": "float"}[kind[0]] + kind[1:])
                    )
                else:
                    views.append(None)
        self.u16, self.s16, self.f16 = rows["u16"], rows["s16"], rows["f16"]
        self.u32, self.s32, self.f32 = rows["u32"], rows["s32"], rows["f32"]
        self.u64, self.s64, self.f64, self.p = (rows[kind] for kind in ("u64", "s64", "f64", "p"))
        slots = dict(block.launch.tensors.slots)
        slots[SHARED // SLOT + block.rank] = block.shared
        self.pitch = kernel.local_bytes
        slots[LOCAL // SLOT] = Buffer(max(self.pitch * lanes, 4))
        self.slots = slots
        self.memory = Memory(slots, self.tid.astype(np.int16) + 1)
        self.copies: list[Copy] = []
        self.group = np.zeros(lanes, np.int64)  # of copies, of each lane
        self.stores: list[tuple[int, int, Callable[[], None]]] = []  # lane, group and store
        self.stored = np.zeros(lanes, np.int64)  # groups of stores, of each lane
        self.held = [block.launch.registers] * count  # by a thread of each warp

    # Scheduling

    def run(self, budget: int) -> bool:
        """Runs some basic blocks; tells whether anything has moved."""
        moved = False
        for _ in range(budget):
            if self.waits:
                moved |= self._release()
            chosen = self._choose()
            if chosen is None:
                break
            block, where = chosen
            block.run(self, where)
            moved = True
        return moved

    def _release(self) -> bool:
        left = []
        for wait in self.waits:
            where, ready, then = wait
            if ready():
                self.pc[where] -= BLOCKED
                then()
            else:
                left.append(wait)
        moved = len(left) < len(self.waits)
        self.waits = left
        return moved

    def _choose(self) -> tuple[Block, Mask] | None:
        blocks = self.block.launch.blocks
        low = int(self.pc.min())
        if low >= BLOCKED:
            return None
        where = self.pc == low
        if where.all():
            return self._end(low, True) or (blocks[low], True)
        for at in np.unique(self.pc):
            if at >= BLOCKED:
                break
            where = self.pc == at
            if ended := self._end(int(at), where):
                return ended
            if not blocks[at].collective:
                return blocks[at], where
            # Whole warps alone, but for lanes that have left.
            whole = (where | (self.pc >= EXITED)).reshape(-1, 32).all(1)
            where &= np.repeat(whole, 32)
            if where.any():
                return blocks[at], where
        if not self.waits:
            raise Divergence(f"{self.block.launch.kernel.name}: {self.describe()}")
        return None

    def _end(self, at: int, where: Mask) -> tuple[Block, Mask] | None:
        if at < len(self.block.launch.blocks):
            return None
        return Block(lambda gang, m: np.copyto(gang.pc, EXITED, where=m), False, 0), where

    def go(self, to: int, where: Mask) -> None:
        np.copyto(self.pc, to, where=where)

    def done(self) -> bool:
        return bool(self.pc.min() >= EXITED)

    def finish(self) -> None:
        for _, _, store in self.stores:
            store()

    def describe(self) -> str:
        kernel, blocks = self.block.launch.kernel, self.block.launch.blocks
        places = []
        for at in np.unique(self.pc[self.pc < EXITED]):
            number = int(at % BLOCKED)
            # A lane that waits is past what it waits for.
            first = blocks[number].first if number < len(blocks) else len(kernel.code)
            instruction = kernel.code[max(first - 1, 0) if at >= BLOCKED else first]
            places.append(f"instruction {first} ({instruction.op} {', '.join(instruction.args)})")
        return ", ".join(places)

    def _mask(self, where: Mask) -> Array:
        return np.ones(self.lanes, bool) if where is True else where

    def _block_until(
        self, where: Array, ready: Callable[[], bool], then: Callable[[], None] = lambda: None
    ) -> None:
        """Has lanes go on once they may, which may be now."""
        if ready():
            then()
            return
        self.pc[where] += BLOCKED
        self.waits.append((where, ready, then))

    def _warps(self, where: Mask) -> list[int]:
        whole = self._mask(where).reshape(-1, 32).any(1)
        return [int(w) for w in np.flatnonzero(whole)]

    def _of_warp(self, warp: int) -> Array:
        where = np.zeros(self.lanes, bool)
        where[32 * warp : 32 * warp + 32] = True
        return where & (self.pc < EXITED)

    # What instructions ask for

    def special(self, name: str) -> Array:
        launch, block = self.block.launch, self.block
        if name == "%tid.x":
            return self.tid
        if name == "%laneid":
            return self.lane
        value = {
            "%ntid.x": launch.threads,
            "%cluster_ctarank": block.rank,
            **{f"%ctaid.{d}": block.index[i] for i, d in enumerate("xyz")},
            **{f"%nctaid.{d}": launch.grid[i] for i, d in enumerate("xyz")},
            **{f"%tid.{d}": 0 for d in "yz"},
            **{f"%ntid.{d}": 1 for d in "yz"},
        }[name]
        return np.full(self.lanes, value)

    def parameter(self, number: int, at: int, dtype: Any) -> Any:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self.block.launch.parameters[number][at : at + size], dtype)[0]

    @property
    def parameters(self) -> Memory:
        return self.block.launch.parameter_memory

    def parameter_address(self, at: Array) -> Array:
        """Finds a parameter's byte in ``parameters``, whose buffers they are, of its address."""
        return (at >> 20) * SLOT + (at & ((1 << 20) - 1))

    def shared_address(self, offset: int, dtype: Any) -> Any:
        return dtype(BASE + offset)

    def in_shared(self, at: Array) -> Array:
        rank = at >> semantics.WINDOW
        rank = np.where(rank > 0, rank - 1, self.block.rank)
        if (rank != self.block.rank).any():
            for peer in self.block.cluster.blocks:
                self.slots[SHARED // SLOT + peer.rank] = peer.shared
        return SHARED + rank * SLOT + (at & ((1 << semantics.WINDOW) - 1))

    def in_local(self, at: Array) -> Array:
        return np.where(at >= LOCAL, at, at + LOCAL + np.arange(self.lanes) * self.pitch)

    def shuffle(self, how: str, x: Array, b: Array, c: Array, where: Mask) -> tuple[Array, Array]:
        """9.7.8.6: the lane that a value comes from, and whether there is one."""
        x = np.broadcast_to(x, self.lanes)
        b, c = np.broadcast_to(b, self.lanes) & 31, np.broadcast_to(c, self.lanes)
        b = b.astype(np.int64)
        clamp, segment = (c & 31).astype(np.int64), ((c >> 8) & 31).astype(np.int64)
        last = (self.lane & segment) | (clamp & ~segment)
        first = self.lane & segment
        source = {
            "up": self.lane - b,
            "down": self.lane + b,
            "bfly": self.lane ^ b,
            "idx": first | (b & ~segment),
        }[how]
        there = source >= last if how == "up" else source <= last
        source = np.where(there, source, self.lane) + np.arange(self.lanes) // 32 * 32
        if where is not True and (where & ~where[np.clip(source, 0, self.lanes - 1)]).any():
            raise Divergence("shfl reads a lane that does not take part")
        return x[source], there

    def ballot(self, vote: Array, where: Mask) -> Array:
        """9.7.8.10: a bit of each lane of the warp; all have to take part."""
        mask = self._mask(where)
        bits = np.zeros(self.lanes, np.uint32)
        for warp in self._warps(where):
            lanes = slice(32 * warp, 32 * warp + 32)
            if not mask[lanes].all():
                raise Divergence("vote.sync waits for a lane that does not take part")
            ones = np.flatnonzero(np.broadcast_to(vote, self.lanes)[lanes])
            bits[lanes] = sum(1 << int(lane) for lane in ones)
        return bits

    def matrices(self, at: Array, count: int, transpose: bool, where: Mask) -> list[Array]:
        """Loads 8 x 8 matrices of halves, the rows of the i-th at lanes 8 i to 8 i + 7."""
        asked = self._mask(where) & (self.lane < 8 * count)
        rows = self.memory.load(at, 8, 2, asked)
        if int(np.bitwise_or.reduce(at[asked], initial=0)) & 15:
            raise AccessError("ldmatrix: a row is not aligned to 16 bytes")
        words = np.ascontiguousarray(rows.T).view(np.uint16).reshape(-1, 4, 8, 8)
        if transpose:
            words = np.ascontiguousarray(words.transpose(0, 1, 3, 2))
        lanes = words.view(np.uint32).reshape(-1, 4, 32)
        return [np.ascontiguousarray(lanes[:, i]).reshape(-1) for i in range(count)]

    def put_matrices(self, at: Array, words: Sequence[Array], transpose: bool, where: Mask) -> None:
        """Stores 8 x 8 matrices of halves, as `matrices` loads them."""
        asked = self._mask(where) & (self.lane < 8 * len(words))
        if int(np.bitwise_or.reduce(at[asked], initial=0)) & 15:
            raise AccessError("stmatrix: a row is not aligned to 16 bytes")
        words = [np.broadcast_to(w, self.lanes) for w in words]
        held = np.stack([semantics.transposed(w) if transpose else w for w in words], 1)
        rows = (
            held.reshape(-1, 8, 4, len(words)).transpose(0, 3, 1, 2).reshape(-1, 8 * len(words), 4)
        )
        padded = np.pad(rows, ((0, 0), (0, 32 - rows.shape[1]), (0, 0))).reshape(-1, 4)
        self.memory.store(at, list(np.ascontiguousarray(padded.T)), 4, asked)

    def fence_async(self, where: Mask) -> None:
        fenced = np.zeros(self.block.launch.threads + 1, bool)
        fenced[self.tid[self._mask(where)] + 1] = True
        self.block.writers[fenced[self.block.writers]] = 0

    # Barriers

    def barrier(self, number: Array, count: Array | None, where: Mask, waits: bool = True) -> None:
        for warp in self._warps(where):
            lanes = self._of_warp(warp)
            at = 32 * warp
            name = int(np.broadcast_to(number, self.lanes)[at])
            warps = self.block.launch.threads // 32
            if count is not None:
                warps = int(np.broadcast_to(count, self.lanes)[at]) // 32
            arrived, turn = self.block.named.get(name, (0, 0))
            if arrived + 1 == warps:
                self.block.named[name] = (0, turn + 1)
            else:
                self.block.named[name] = (arrived + 1, turn)
                if waits:
                    self._block_until(lanes, partial(self._turned, name, turn))

    def _turned(self, number: int, turn: int) -> bool:
        return self.block.named[number][1] > turn

    def dependencies(self, where: Mask) -> None:
        if self._mask(where).any():
            copies = self.block.cluster.copies
            while copies:  # they may have read before the kernel ahead has written
                copies.pop()()
            self.block.launch.tensors.settle()

    def cluster_arrive(self, where: Mask) -> None:
        cluster = self.block.cluster
        for warp in self._warps(where):
            cluster.waits[self.block.rank, self.first + warp] = cluster.turn
            cluster.arrived += 1
            if cluster.arrived == self.block.launch.threads // 32 * len(cluster.blocks):
                cluster.arrived = 0
                cluster.turn += 1

    def cluster_barrier(self, where: Mask) -> None:
        cluster = self.block.cluster
        for warp in self._warps(where):
            turn = cluster.waits[self.block.rank, self.first + warp]
            self._block_until(self._of_warp(warp), partial(cluster.past, turn))

    def mbarrier_init(self, at: Array, count: Array, where: Mask) -> None:
        for lane in np.flatnonzero(self._mask(where)).tolist():
            address = int(np.broadcast_to(at, self.lanes)[lane])
            if address % 8 or address + 8 > self.block.shared.size:
                raise AccessError(
                    f"mbarrier at {address:#x}: outside of shared memory, or not aligned"
                )
            self.block.mbarriers[address] = Barrier(int(np.broadcast_to(count, self.lanes)[lane]))

    def mbarrier_arrive(self, at: Array, bytes: Array | None, where: Mask) -> None:
        for lane in np.flatnonzero(self._mask(where)).tolist():
            barrier = self.block.mbarrier(int(at[lane]))
            if bytes is not None:
                barrier.bytes += int(np.broadcast_to(bytes, self.lanes)[lane])
            barrier.left -= 1
            barrier.settle()

    def mbarrier_wait(self, at: Array, parity: Array, where: Mask) -> None:
        mask = self._mask(where)
        parity = np.broadcast_to(parity, self.lanes)
        for address, phase in set(zip(at[mask].tolist(), parity[mask].tolist(), strict=True)):
            barrier = self.block.mbarrier(address)
            if barrier.phase & 1 == phase:
                lanes = mask & (at == address) & (parity == phase)
                self._block_until(lanes, partial(barrier.past, phase))

    # Copies

    def copy(self, to: Array, source: Array, bytes: int, size: Array | None, where: Mask) -> None:
        """cp.async (9.7.8.22): `size` bytes of the source, then zeros."""
        mask = self._mask(where).copy()
        sizes = np.full(self.lanes, bytes) if size is None else np.broadcast_to(size, self.lanes)
        if not np.isin(sizes[mask], (0, bytes)).all():
            raise NotImplementedError("cp.async of a part of its bytes")
        group = self.group.copy()
        self.copies.append(Copy(mask, to.copy(), source.copy(), bytes, sizes.copy(), group))

    def copies_commit(self, where: Mask) -> None:
        self.group[self._mask(where)] += 1

    def copies_wait(self, left: int, where: Mask) -> None:
        ready = self._mask(where)
        kept = []
        for copy in self.copies:
            now = copy.lanes & ready & (copy.group < self.group - left)
            if now.any():
                size = min(copy.bytes, 8)
                whole = now & (copy.sizes > 0)
                data = self.memory.load(copy.source, size, copy.bytes // size, whole)
                self.memory.store(copy.to, list(data), size, now)
                copy.lanes &= ~now
            if copy.lanes.any():
                kept.append(copy)
        self.copies = kept

    def _map(self, at: Array, lane: int) -> Tiled | Im2col:
        address = int(at[lane]) - int(semantics.PARAMETERS)
        maps = self.block.launch.maps
        if address < 0 or address % MAP_BYTES or address // MAP_BYTES >= len(maps):
            raise AccessError(f"tensor map at {int(at[lane]):#x}: there is none")
        map_ = maps[address // MAP_BYTES]
        if map_ is None:
            raise AccessError(f"tensor map {address // MAP_BYTES}: the launch has not made it")
        return map_

    def _swizzled(self, start: int, box: Tiled | Im2col) -> Array:
        """Addresses of a box's bytes."""
        if start % (8 * box.row):
            raise AccessError(f"copy engine: {start:#x} is not aligned to the swizzle's eight rows")
        if start + box.bytes > self.block.shared.size:
            raise AccessError(f"copy engine: {box.bytes} bytes at {start:#x} leave shared memory")
        return swizzled(start + np.arange(box.bytes), box.row)

    def bulk_load(
        self,
        to: Array,
        map_: Array,
        at: Sequence[Array],
        barrier: Array,
        offsets: Sequence[Array],
        where: Mask,
    ) -> None:
        def number(values: Array, lane: int) -> int:
            return int(np.broadcast_to(values, self.lanes)[lane])

        for lane in np.flatnonzero(self._mask(where)).tolist():
            source = self._map(map_, lane)
            place = [number(c, lane) for c in at]
            taps = [number(c, lane) for c in offsets]
            target = self._swizzled(number(to, lane), source)
            signal = self.block.mbarrier(number(barrier, lane))

            self.block.cluster.copies.append(
                partial(self._arrive, source, place, taps, target, signal)
            )

    def _arrive(
        self,
        source: Tiled | Im2col,
        at: Sequence[int],
        offsets: Sequence[int],
        to: Array,
        barrier: Barrier,
    ) -> None:
        self.block.shared.bytes[to] = source.read(at, offsets).reshape(-1)
        self.block.writers[to >> 2] = 0
        barrier.bytes -= source.bytes
        barrier.settle()

    def send(self, to: Array, values: Sequence[Array], barrier: Array, where: Mask) -> None:
        """st.async (9.7.8.12): into a block of the cluster, some time."""
        offset = (1 << semantics.WINDOW) - 1
        for lane in np.flatnonzero(self._mask(where)).tolist():
            words = np.array([np.broadcast_to(v, self.lanes)[lane] for v in values], np.uint32)
            at, signal = int(to[lane]), int(np.broadcast_to(barrier, self.lanes)[lane])
            peer = self.block.cluster.blocks[(at >> semantics.WINDOW) - 1]
            if signal >> semantics.WINDOW != at >> semantics.WINDOW or at % words.nbytes:
                raise AccessError("st.async: the barrier is in another block, or bytes misaligned")
            copy = partial(peer.receive, at & offset, words, peer.mbarrier(signal & offset))
            self.block.cluster.copies.append(copy)

    def bulk_bytes(
        self, to: Array, source: Array, bytes: Array, barrier: Array, where: Mask
    ) -> None:
        """cp.async.bulk of bytes in a row (9.7.8.24.5)."""
        to, source, bytes, barrier = (
            np.broadcast_to(values, self.lanes).astype(np.int64)
            for values in (to, source, bytes, barrier)
        )
        for lane in np.flatnonzero(self._mask(where)).tolist():
            if (to[lane] | source[lane] | bytes[lane]) & 15:
                raise AccessError("cp.async.bulk: an address or size is no multiple of 16")
            words = np.arange(int(bytes[lane]) // 8) * 8
            signal = self.block.mbarrier(int(barrier[lane]))
            copy = partial(self._arrive_bytes, source[lane] + words, int(to[lane]), signal)
            self.block.cluster.copies.append(copy)

    def _arrive_bytes(self, source: Array, to: int, barrier: Barrier) -> None:
        values = self.memory.load(source, 8, 1, True)[0].view(np.uint8)
        if to + values.size > self.block.shared.size:
            raise AccessError(f"cp.async.bulk: bytes at {to:#x} leave shared memory")
        self.block.shared.bytes[to : to + values.size] = values
        self.block.writers[to // 4 : (to + values.size) // 4] = 0
        barrier.bytes -= values.size
        barrier.settle()

    def bulk_store(self, map_: Array, at: Sequence[Array], source: Array, where: Mask) -> None:
        for lane in np.flatnonzero(self._mask(where)).tolist():
            tensor = self._map(map_, lane)
            place = [int(np.broadcast_to(c, self.lanes)[lane]) for c in at]
            bytes = self._swizzled(int(np.broadcast_to(source, self.lanes)[lane]), tensor)
            if self.block.unfenced(bytes) is not None:
                raise AccessError(
                    f"copy engine: nobody fenced what it stores from {bytes.min():#x}"
                )

            group = int(self.stored[lane])
            self.stores.append((lane, group, partial(self._leave, tensor, place, bytes)))

    def _leave(self, tensor: Tiled | Im2col, at: Sequence[int], source: Array) -> None:
        tensor.write(at, self.block.shared.bytes[source])

    def bulk_commit(self, where: Mask) -> None:
        self.stored[self._mask(where)] += 1

    def bulk_wait(self, left: int, where: Mask) -> None:
        mask, kept = self._mask(where), []
        for lane, group, store in self.stores:
            if mask[lane] and group < self.stored[lane] - left:
                store()
            else:
                kept.append((lane, group, store))
        self.stores = kept

    # Registers

    def set_registers(self, count: int, more: bool, where: Mask) -> None:
        """Gives a warp's registers back, or waits until others have given theirs (9.7.19.5)."""
        for warp in self._warps(where):
            held = self.held[warp]
            if count < held if more else count > held:
                raise AccessError(f"setmaxnreg: {count} registers, where a thread has {held}")
            ready, take = partial(self._free, warp, count), partial(self._take, warp, count)
            self._block_until(self._of_warp(warp), ready, take)

    def _free(self, warp: int, count: int) -> bool:
        return count - self.held[warp] <= self.block.free

    def _take(self, warp: int, count: int) -> None:
        self.block.free -= count - self.held[warp]
        self.held[warp] = count

    # Products of warpgroups

    def wgmma(
        self,
        shape: str,
        kind: str,
        rows: Sequence[int],
        a: Array | list[Array],
        b: Array,
        keep: Any,
        turned: tuple[bool, bool],
        indices: tuple[Array, int] | None,
        where: Mask,
    ) -> None:
        columns, depth = (int(n) for n in shape[1:].split("n")[1].split("k"))
        kinds = kind.split(".")  # integers, of A and of B
        size_a = (depth, 64) if turned[0] else (64, depth // 2 if indices else depth)
        size_b = (depth, columns) if turned[1] else (columns, depth)
        for warp in self._warps(where):
            lanes = slice(32 * warp, 32 * warp + 32)
            left: Side | list[Array]
            right = self._side(b, warp, *size_b, kinds[-1])
            if isinstance(a, list):  # read at the wait, so that registers must not change before
                left = [register[lanes] for register in a]
            else:
                left = self._side(a, warp, *size_a, kinds[0])
            keeps = bool(np.broadcast_to(keep, self.lanes)[32 * warp])
            number = self.first + warp

            chosen = (indices[0][lanes], indices[1]) if indices else None
            group = int(self.block.committed[number])
            task = partial(
                self._multiply, left, right, rows, lanes, number, keeps, turned, chosen, kind
            )
            self.block.products.append((number, group, task))

    def _multiply(
        self,
        left: Side | list[Array],
        right: Side,
        registers: Sequence[int],
        lanes: slice,
        warp: int,
        keeps: bool,
        turned: tuple[bool, bool],
        indices: tuple[Array, int] | None,
        kind: str,
    ) -> None:
        whole = "." in kind
        if isinstance(left, list):
            x = semantics.fragment(left, kind.split(".")[0])[0]
        else:
            x = self._matrix(*left)
            x = (x.T if turned[0] else x)[16 * (warp % 4) :][:16]
            if indices:
                x = semantics.two_four(x, *indices, kind.split(".")[0])
        y = self._matrix(*right)
        columns = y.shape[1] if turned[1] else len(y)
        sums = [(self.s32 if whole else self.f32)[register][lanes] for register in registers]
        # As mma's C, 8 columns after 8 columns (9.7.14.5).
        parts = np.stack(sums).reshape(-1, 2, 2, 8, 4)
        before = parts.transpose(1, 3, 0, 4, 2).reshape(16, columns).astype(np.float64)
        before = before if keeps else np.zeros_like(before)
        if kind in ("e4m3", "e5m2"):
            total = semantics.float8_products(x, y, before, depth=x.shape[1])
        else:
            total = before + x @ (y if turned[1] else y.T)
        if whole:  # they wrap; float64 has added up the products exactly
            total = total.astype(np.int64)
        tiles = total.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, 32)
        for view, tile in zip(sums, tiles, strict=True):
            view[:] = tile.astype(view.dtype)

    def _side(self, descriptors: Array, warp: int, *size: Any) -> Side:
        descriptor = int(np.broadcast_to(descriptors, self.lanes)[32 * warp])
        return descriptor, *size, self.block.unfenced(places(descriptor, *size))

    def _matrix(
        self, descriptor: int, rows: int, depth: int, kind: str, unfenced: Array | None
    ) -> Array:
        """Reads [rows, depth] of a stage; what nobody had fenced is NaN."""
        at = places(descriptor, rows, depth, kind)
        if int(at.max()) >= self.block.shared.size:
            raise AccessError(f"wgmma: a matrix at {int(at.min()):#x} leaves shared memory")
        raw = self.block.shared.bytes[at]
        if unfenced is not None:
            raw.view(np.uint32)[unfenced] = 0xFFFFFFFF
        if kind == "bf16":
            numbers = semantics.from_bf16(raw.view(np.uint16))
        elif kind == "f16":
            numbers = raw.view(np.float16)
        elif kind in semantics.BYTES:
            numbers = semantics.from_bytes(raw, kind)
        else:
            numbers = (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return numbers.astype(np.float64)

    def wgmma_commit(self, where: Mask) -> None:
        for warp in self._warps(where):
            self.block.committed[self.first + warp] += 1

    def wgmma_wait(self, left: int, where: Mask) -> None:
        for warp in self._warps(where):
            number = self.first + warp
            done = int(self.block.committed[number]) - left
            four = slice(number // 4 * 4, number // 4 * 4 + 4)
            ready, finish = partial(self._issued, four, done), partial(self._finish, four, done)
            self._block_until(self._of_warp(warp), ready, finish)

    def _issued(self, warps: slice, groups: int) -> bool:
        return bool(self.block.committed[warps].min() >= groups)

    def _finish(self, warps: slice, groups: int) -> None:
        kept = []
        for warp, group, multiply in self.block.products:
            if warps.start <= warp < warps.stop and group < groups:
                multiply()
            else:
                kept.append((warp, group, multiply))
        self.block.products = kept


class Launch:
    """A kernel, its arguments and its grid."""

    elsewhere: ClassVar[Callable[[Launch], None] | None] = None
    """What runs launches in the interpreter's place: a GPU (gpu.py)."""

    def __init__(
        self,
        kernel: Kernel,
        parameters: Sequence[bytes],
        tensors: Tensors,
        *,
        grid: tuple[int, ...],
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        maps: Sequence[Tiled | Im2col | None] = (),
        together: int = 1,
    ):
        """Checks the launch against the kernel.

        Args:
            kernel: What runs.
            parameters: The bytes of each parameter.
            tensors: Global memory.
            grid: Blocks.
            threads: Threads of a block.
            shared_bytes: Dynamic shared memory of a block.
            cluster: Blocks of a cluster.
            maps: The tensor maps of the first parameter.
            together: Warps of a gang: 1 mixes warps best, all of a block runs fastest.

        Raises:
            LaunchError: If a parameter has not the size that the kernel expects, or a block is
                too large.
        """
        sizes = list(kernel.parameters.values())
        given = [len(parameter) for parameter in parameters]
        if sizes != given:
            raise LaunchError(f"{kernel.name}: parameters of {sizes} bytes, but {given} were given")
        if threads % 32 or (kernel.threads and threads > kernel.threads):
            raise LaunchError(f"{kernel.name}: {threads} threads, at most {kernel.threads}")
        if kernel.shared_bytes + shared_bytes > SHARED_BYTES:
            raise LaunchError(f"{kernel.name}: {shared_bytes} bytes of shared memory are too many")
        self.kernel, self.parameters, self.tensors = kernel, parameters, tensors
        self.grid = (*grid, 1, 1)[:3]
        self.threads, self.shared_bytes, self.cluster = threads, shared_bytes, cluster
        self.maps, self.together = maps, together
        # Where a kernel changes them, ptxas gives a thread its share, up to the most it asks for.
        share = REGISTERS // (kernel.blocks * (kernel.threads or 1024)) // 8 * 8
        asked = [int(i.args[0]) for i in kernel.code if i.op.startswith("setmaxnreg")]
        self.registers = min(share, max(asked, default=0))
        self.blocks = translate(kernel)
        self.parameter_memory = Memory({i: Buffer(len(each)) for i, each in enumerate(parameters)})
        for i, each in enumerate(parameters):
            self.parameter_memory.slots[i].bytes[: len(each)] = np.frombuffer(each, np.uint8)

    def run(self, seed: int = 0) -> None:
        """Runs all blocks, in an order that the seed draws.

        Raises:
            AccessError: If an address is in no buffer, or not aligned.
            Deadlock: If all warps wait.
            Divergence: If a part of a warp comes to what takes all of it.
        """
        if Launch.elsewhere:
            Launch.elsewhere(self)
            return
        rng = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            for first in range(0, int(np.prod(self.grid)), self.cluster):
                Cluster(self, first, rng).run()


def pack(form: str, *values: Any) -> bytes:
    """Packs a parameter, with the padding that C and Mojo put between and after its members."""
    size = struct.calcsize(form)
    aligned = max((struct.calcsize(c) for c in form if c.isalpha()), default=1)
    return struct.pack(form, *values) + bytes(-size % aligned)
