"""Runs a compiled graph: plainly, or as one captured launch for each batch size.

Launching the kernels of a graph one by one costs the host more than a small batch costs a GPU. A
capture records all of them once, for fixed buffers, and replays them as one launch.

Which sizes get one (``Replays``): exact ones, from their second use on. The first use executes
plainly, which loads the kernels (a capture must not) and keeps a size that never comes back, such
as the last batch of a folder, from costing memory. Nothing is padded to the next bucket: a capture
of the exact size costs one pass of the host over the graph, once, while padding costs its share of
compute every time. What captures hold (each has activations of its own) is bounded in images, and
the least recently used go first; ``IMAGES`` is room for every size from 1 to 32 and one of 256.
ResNet-50's take 4.6 MB an image in bfloat16.

A server cannot wait for a size to come again, as a request would wait for the capture, or for
kernels that only this size needs to be loaded. It prepares sizes (``Replays.prepare``) before it
takes requests; a batch between two of them runs as the larger one, whose last rows nobody reads.

At its first capture MAX takes its whole pool, 90 % of the GPU's memory on an H200; a program that
shares the GPU sets MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT before it opens the device.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
from max.driver import CPU, Buffer, Device, DeviceEvent, Usage
from max.dtype import DType
from max.engine import Model as Executable

from maxvision.common.host import cores

IMAGES = 1024
"""Images that the captures of one graph may hold together."""

NEAR = 4 << 20
"""Bytes that a layer may read and write, of all images that a core takes at a time."""
SHARE = 4
"""Images that it takes at most."""

Shapes = tuple[tuple[int, ...], ...]
KEYS = itertools.count()
"""Numbers of captures: others may record the same graph."""
PINNED = Usage.STAGING | Usage.UNTRACKED


@runtime_checkable
class OnDevice(Protocol):
    """An input that is made where it is read, such as pictures that the device decodes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> Any:
        """As numpy calls it."""

    def __len__(self) -> int:
        """Its first size."""

    def write(self, buffer: Buffer) -> None:
        """Enqueues what fills a buffer, whose first size may be larger, in the device's queue."""


class Run(Protocol):
    """One run of a graph at a time: every step but ``result`` only enqueues, on a GPU."""

    def upload(self, *arrays: Any) -> None:
        """Hands the inputs to the device; they may be overwritten afterwards."""

    def run(self) -> None:
        """Computes."""

    def download(self) -> None:
        """Brings the outputs to the host."""

    def result(self) -> list[Any]:
        """Waits for what was downloaded and returns it, the caller's to keep; floats as float32."""


class Execution:
    """A ``Run`` of any shapes, kernel by kernel; all that a CPU needs.

    A CPU goes through a network with a few images at a time, so that what a layer leaves is in the
    caches when the next one reads it; docs/kernels.md has the figures.

    Args:
        executable: The compiled graph.
        device: Where it runs.
        batched: Whether every input and output begins with the batch.
        share: How many images a core of a CPU takes at a time; see ``share_of``.
    """

    def __init__(
        self, executable: Executable, device: Device, batched: bool = True, share: int = 1
    ) -> None:
        self._executable = executable
        self._device = device
        self._batched = batched
        self._share = share
        self._inputs: list[list[Buffer]] = []
        self._outputs: list[list[Buffer]] = []

    def upload(self, *arrays: np.ndarray | OnDevice) -> None:
        """See ``Run``; on a CPU they are read in place, by ``run``."""
        if self._device.is_host:
            given = [np.ascontiguousarray(self._made(array)) for array in arrays]
            count = len(given[0]) if self._batched and given else 0
            step = cores() * self._share
            parts = [[a[i : i + step] for a in given] for i in range(0, count, step)]
            self._inputs = [[Buffer.from_numpy(a) for a in part] for part in parts or [given]]
            return
        self._inputs = [[self._sent(array) for array in arrays]]

    def _made(self, array: np.ndarray | OnDevice) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        made = np.empty(array.shape, array.dtype)
        array.write(Buffer.from_numpy(made))
        return made

    def _sent(self, array: np.ndarray | OnDevice) -> Buffer:
        if isinstance(array, np.ndarray):
            return Buffer.from_numpy(np.ascontiguousarray(array)).to(self._device)
        made = Buffer(DType.from_numpy(array.dtype), array.shape, self._device)
        array.write(made)
        return made

    def run(self) -> None:
        """See ``Run``."""
        with _patient_threads() if self._device.is_host else nullcontext():
            self._outputs = [self._executable.execute(*part) for part in self._inputs]

    def download(self) -> None:
        """See ``Run``; ``result`` does it."""

    def result(self) -> list[np.ndarray]:
        """See ``Run``; frees the buffers, which must not happen while another thread records."""
        wholes = zip(*self._outputs, strict=True)
        arrays = ([float32(part.to(CPU())) for part in parts] for parts in wholes)
        found = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in arrays]
        self._inputs, self._outputs = [], []
        return found


class Capture:
    """A graph that was recorded for one set of shapes: one launch, for one thread at a time.

    Args:
        executable: The compiled graph; it has run at these shapes before.
        device: A GPU.
        inputs: The device's buffers, which a launch reads.
        key: A number that no other live capture of ``executable`` has, of ``KEYS``.

    Attributes:
        inputs: See above.
        outputs: The buffers that a launch fills.
        shapes: Those of the inputs.
        images: What it counts for among captures: the batch.
    """

    def __init__(
        self,
        executable: Executable,
        device: Device,
        inputs: Sequence[Buffer],
        key: int,
    ) -> None:
        self.shapes = tuple(tuple(each.shape) for each in inputs)
        self.images = images_of(self.shapes)
        self.inputs = inputs
        self._executable = executable
        self._key = key
        self.outputs = executable.capture(key, *self.inputs)

    def run(self) -> None:
        """Computes the outputs of what is in the inputs."""
        self._executable.replay(self._key, *self.inputs)

    def release(self) -> None:
        """Gives the memory back; nothing else may be called afterwards."""
        self.outputs.clear()
        self._executable.release_captured_graph(self._key)


class Replay(Capture):
    """A ``Run`` of a capture; smaller batches fit in.

    It holds a pinned host buffer for each input and output too.

    Args:
        executable: See ``Capture``.
        device: A GPU.
        types: The dtype and the shape of each input.
        key: See ``Capture``.
        batched: Whether every input and output begins with the batch.
    """

    def __init__(
        self,
        executable: Executable,
        device: Device,
        types: Sequence[tuple[DType, tuple[int, ...]]],
        key: int,
        batched: bool = True,
    ) -> None:
        super().__init__(executable, device, zeros(types, device), key)
        self._count = self.images if batched else None
        self._queue = device.default_queue
        self._staged = [Buffer(dtype, shape, device, PINNED) for dtype, shape in types]
        self._arrays = [staged.to_numpy() for staged in self._staged]
        for array in self._arrays:
            array.fill(0)
        self._fetched = [Buffer(o.dtype, o.shape, device, PINNED) for o in self.outputs]
        self._uploaded: DeviceEvent = self._queue.record_event()
        self._downloaded: DeviceEvent = self._uploaded

    def upload(self, *arrays: np.ndarray | OnDevice) -> None:
        """See ``Run``."""
        self._uploaded.synchronize()
        if self._count is not None:
            self._count = len(arrays[0])
        for given, array, staged, buffer in zip(
            arrays, self._arrays, self._staged, self.inputs, strict=True
        ):
            if not isinstance(given, np.ndarray):
                given.write(buffer)
                continue
            np.copyto(array[: self._count], given)
            buffer.inplace_copy_from(staged)
        self._uploaded = self._queue.record_event()

    def download(self) -> None:
        """See ``Run``."""
        for fetched, output in zip(self._fetched, self.outputs, strict=True):
            fetched.inplace_copy_from(output)
        self._downloaded = self._queue.record_event()

    def result(self) -> list[np.ndarray]:
        """See ``Run``."""
        self._downloaded.synchronize()
        return [float32(fetched)[: self._count] for fetched in self._fetched]


class Replays:
    """Runs a graph on inputs of any shapes from any thread, captured where that pays.

    Args:
        executable: The compiled graph.
        device: Where it runs.
        images: How many images its captures may hold together; 0 captures nothing.
        batched: Whether every input and output begins with the batch.
        plain: Makes what runs kernel by kernel; ``Execution`` if None.
        captured: Makes what runs a capture; ``Replay`` if None. Both take the arguments of these.
    """

    def __init__(
        self,
        executable: Executable,
        device: Device,
        images: int = IMAGES,
        batched: bool = True,
        *,
        plain: Callable[..., Run] | None = None,
        captured: Callable[..., Any] | None = None,
    ) -> None:
        self._plain = plain or Execution
        self._captured = captured or Replay
        self._executable = executable
        self._device = device
        self._images = images if captures(device) else 0
        self._batched = batched
        self._gate = gate(device)
        self._lock = threading.Lock()
        self._seen: set[Shapes] = set()
        self._sizes: list[int] = []  # that were prepared, ascending
        self._idle: list[Any] = []  # the least recently used first
        self._held = 0  # images of the idle ones and of those in use

    def __call__(self, *arrays: Any) -> list[Any]:
        """Computes the outputs of arrays, such as pixels [N, H, W, C]."""
        with self.take(*arrays) as run, self._gate.running():
            run.upload(*arrays)
            run.run()
            run.download()
            return run.result()

    def prepare(self, *arrays: np.ndarray) -> None:
        """Captures the batch sizes of ``sizes`` up to that of ``arrays``, as far as they fit.

        From then on others run as the next larger one. Still larger ones are executed: their
        kernels take longer than the launches. If it raises, for want of memory, what it has
        captured is used: that begins with the largest, as what all others of them can run.
        """
        asked = sizes(len(arrays[0]))
        images = itertools.accumulate(asked)
        fitting = [size for size, held in zip(asked, images, strict=True) if held <= self._images]
        prepared: list[int] = []
        self._sizes = []
        try:
            for size in reversed(fitting):
                for _ in range(2):  # the second time it is captured
                    self(*(array[:size] for array in arrays))
                prepared.insert(0, size)
        finally:
            self._sizes = prepared

    @contextmanager
    def take(self, *arrays: Any) -> Iterator[Run]:
        """Lends the run for inputs such as ``arrays``: the captured one if there is one."""
        shapes = tuple(tuple(array.shape) for array in arrays)
        if self._sizes and self._batched:
            count = len(arrays[0])
            size = next((size for size in self._sizes if size >= count > 0), count)
            shapes = tuple((size, *shape[1:]) for shape in shapes)
        run = self._find(shapes)
        if run is None:
            yield self._plain(self._executable, self._device, self._batched)
            return
        if isinstance(run, list):
            kinds = (DType[str(array.dtype).removeprefix("torch.")] for array in arrays)
            run = self._capture(list(zip(kinds, shapes, strict=True)), run)
        try:
            yield run
        finally:
            with self._lock:
                self._idle.append(run)

    def _find(self, shapes: Shapes) -> Any | list[Any] | None:
        """Finds an idle capture; None if there shall be none.

        If a capture shall be made, ``_held`` counts it from here on, and those whose place it takes
        are given, which nobody else finds any more.
        """
        images = images_of(shapes)
        with self._lock:
            for replay in reversed(self._idle):
                if replay.shapes == shapes:
                    self._idle.remove(replay)
                    return replay
            busy = self._held - sum(replay.images for replay in self._idle)
            again = shapes in self._seen
            self._seen.add(shapes)
            larger = bool(self._sizes) and images > self._sizes[-1]
            if not images or not again or larger or busy + images > self._images:
                return None
            self._held += images
            replaced = []
            while self._held > self._images:
                replaced.append(self._idle.pop(0))
                self._held -= replaced[-1].images
            return replaced

    def _capture(
        self, types: Sequence[tuple[DType, tuple[int, ...]]], replaced: Sequence[Any]
    ) -> Any:
        """Captures shapes in the place of others, which are released."""
        with self._gate.capturing():
            for oldest in replaced:
                oldest.release()
            key = next(KEYS)
            try:
                return self._captured(self._executable, self._device, types, key, self._batched)
            except BaseException:
                with self._lock:
                    self._held -= images_of(tuple(shape for _, shape in types))
                raise


def zeros(types: Sequence[tuple[DType, tuple[int, ...]]], device: Device) -> list[Buffer]:
    """Makes buffers for inputs."""
    return [Buffer.zeros(shape, dtype, device) for dtype, shape in types]


def share_of(image: int) -> int:
    """Chooses how many images a core of a CPU takes at a time.

    More of them read the weights less often, and fill tiles and cores better where a layer has few
    pixels. Fewer find what the layer before left in a cache.

    Args:
        image: Bytes that a layer reads and writes of one image, at most.
    """
    return max(1, min(SHARE, NEAR // max(image, 1)))


def images_of(shapes: Shapes) -> int:
    """Tells what inputs count for among captures: the first size of the first of them."""
    return shapes[0][0] if shapes and shapes[0] else 1


def sizes(most: int) -> list[int]:
    """Lists batch sizes to prepare: all up to 8, four between powers of two from there, ``most``.

    A batch between two of them runs with less than a quarter more.
    """
    steps = ((size, 1 << max(0, (size - 1).bit_length() - 3)) for size in range(1, most + 1))
    return [size for size, step in steps if size % step == 0 or size == most]


def float32(buffer: Buffer) -> np.ndarray:
    """Copies a host buffer; bfloat16 and float16 become float32, exactly.

    The host widens the few logits of a batch; on the GPU it would be a kernel of its own.
    """
    if buffer.dtype == DType.bfloat16:
        bits = buffer.view(DType.uint16).to_numpy().astype(np.uint32)
        return (bits << 16).view(np.float32)
    array = buffer.to_numpy()
    return array.astype(np.float32 if buffer.dtype == DType.float16 else array.dtype)


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Lets the threads that are started within wake up to 10 ms late, on Linux.

    In its first run MAX starts one that asks for events 5,000 times a second from then on. On a CPU
    nobody waits for them, and it would cost 5 % of a core (two Zen 5 cores, 2026-11-21).
    """
    if _ran.is_set() or sys.platform != "linux":
        yield
        return
    pr_set_timerslack = 29  # inherited by threads; 0 is the default again
    prctl = ctypes.CDLL(None).prctl
    prctl(pr_set_timerslack, ctypes.c_ulong(10_000_000))
    try:
        yield
        _ran.set()
    finally:
        prctl(pr_set_timerslack, ctypes.c_ulong(0))


_ran = threading.Event()
"""Set once a graph has run on a CPU in this process."""


def captures(device: Device) -> bool:
    """Tells whether the device records launches into graphs."""
    return device.api in ("cuda", "hip")


class Gate:
    """Lets many threads run on a device, or one capture: while it records, nobody may wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._capturing = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Holds captures off; waits for the one that is under way or asked for."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Keeps the device to itself."""
        with self._changed:
            self._capturing += 1
            self._changed.wait_for(lambda: not self._running)
            try:
                yield
            finally:
                self._capturing -= 1
                self._changed.notify_all()


_gates: dict[Any, Gate] = defaultdict(Gate)


def gate(device: Device) -> Gate:
    """Gives the gate of a device."""
    return _gates[device.id, device.is_host]
