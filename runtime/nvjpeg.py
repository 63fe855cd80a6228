"""JPEGs become a batch of pixels on a GPU: nvImageCodec decodes, ops/resample.mojo does the rest.

    with decoder([jpeg.read(file, preprocess), pixels]) as batch:
        logits = model(batch)

nvImageCodec is NVIDIA's library over nvJPEG. On data-centre GPUs, from the A100 on, engines of
their own decode whole batches beside the network. It decodes in a queue of its own, into memory of
its own. MAX's queue waits for that by an event, and one launch writes the pixels where the network
reads them. Two batches may be under way, so that one is decoded while the other runs.

A picture that was prepared on the CPU is one of the batch like any other: it has its size already.
"""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
import PIL
from max.driver import Buffer, Device, DeviceEvent, DeviceQueue
from max.dtype import DType
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, TensorType
from PIL import Image

from maxvision.common.console import way_to
from maxvision.common.errors import DeviceError
from maxvision.graphs import nodes
from maxvision.runtime.jpeg import SUPPORT, File, Jpeg, Picture, takes
from maxvision.runtime.preprocess import Pixels, Preprocess
from maxvision.runtime.replay import PINNED, gate

BATCHES = 2
"""That may be under way: one is decoded while the other runs."""
PLACES = 13
"""Numbers that say where a picture lies, see ops/resample.mojo."""
SIZES = 2**14
"""Sizes of pictures whose ``places`` are kept, some MB: many pictures of a folder have the same."""

_ROW = struct.Struct(f"{PLACES - 1}q")

# By EXIF orientation: whether rows and columns change places, and whether rows, then columns, run
# backwards once they have.
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}
_COLUMNS_FIRST = int(PIL.__version__.partition(".")[0]) >= 13


def is_installed() -> bool:
    """Tells whether this Python has nvImageCodec; it is not loaded."""
    with suppress(ModuleNotFoundError):  # there is no package nvidia
        return find_spec("nvidia.nvimgcodec") is not None
    return False


def possible(decode: str, device: str) -> bool:
    """Tells whether a GPU may decode for a model that is still to be read; see ``chosen``."""
    return decode in ("auto", "gpu") and device != "cpu" and is_installed()


def chosen(decode: str, device: str, api: str, preprocess: Preprocess) -> bool:
    """Tells whether JPEGs are decoded on a GPU.

    Args:
        decode: What was asked for, ``auto``, ``cpu``, ``gpu`` or ``fast``.
        device: What the network runs on, ``cpu`` or ``gpu:N``.
        api: The GPU's, such as ``cuda``.
        preprocess: Of the model.

    Raises:
        DeviceError: If it is ``gpu`` and cannot be.
    """
    if decode not in ("auto", "gpu"):
        return False
    problem = ""
    if device == "cpu":
        problem = "an NVIDIA GPU but the model runs on the CPU"
    elif api != "cuda":
        problem = "an NVIDIA GPU but this one is another"
    elif not takes(preprocess):
        problem = "a model that resizes by bicubic or bilinear filters but this one does not"
    elif not is_installed():
        problem = f"the package nvidia-nvimgcodec; {way_to('nvjpeg')}"
    if problem and decode == "gpu":
        raise DeviceError(f"--decode gpu needs {problem}; or use --decode cpu")
    return not problem


class Decoded(NamedTuple):
    """Pixels uint8 [height, width, 3] on the device.

    Attributes:
        address: Of the first.
        height: In px.
        width: In px.
    """

    address: int
    height: int
    width: int


class Library(Protocol):
    """What decodes, in three steps, of which ``decode`` alone is for one thread at a time."""

    def open(self, file: File) -> Any:
        """Reads a header; gives what ``decode`` takes, or None if it is not understood."""

    def decode(self, streams: Sequence[Any], batch: int) -> Sequence[Any]:
        """Decodes what ``open`` gave, as it is stored, whatever its orientation; None too.

        What MAX enqueues on the device afterwards finds the pixels. They stay until ``batch``, a
        number below ``BATCHES``, is used again.

        Returns:
            What ``locate`` takes of each file.
        """

    def locate(self, image: Any, /) -> Decoded | None:
        """Tells where the pixels of a file are; None if they are not to be had."""


class NvImageCodec:
    """NVIDIA's library, for a GPU; or for a CPU, where it has libjpeg-turbo.

    Raises:
        DeviceError: If it cannot be loaded.
    """

    def __init__(self, device: Device) -> None:
        try:
            with _silence():
                from nvidia import nvimgcodec

                kinds = nvimgcodec.BackendKind
                backends = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
                place = device.id
                if device.is_host:
                    place, backends = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, [kinds.CPU_ONLY]
                self._decoder = nvimgcodec.Decoder(
                    device_id=place,
                    backends=[nvimgcodec.Backend(kind) for kind in backends],
                    options=":fancy_upsampling=1",  # as libjpeg-turbo does
                )
        except Exception as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise DeviceError(
                f"nvImageCodec does not start ({why}); {way_to('nvjpeg')}, or use --decode cpu"
            ) from error
        self._open = nvimgcodec.CodeStream
        self._as_stored = nvimgcodec.DecodeParams(apply_exif_orientation=False)
        self._interface = "__array_interface__" if device.is_host else "__cuda_array_interface__"
        self._device = device
        self._queue = DeviceQueue(device)
        self._slots: dict[int, list[_Slot]] = defaultdict(list)

    def open(self, file: File) -> Any:
        """See ``Library``."""
        try:
            return self._open(file)
        except Exception:  # a header that it does not understand
            return None

    def decode(self, streams: Sequence[Any], batch: int) -> Sequence[Any]:
        """See ``Library``; the images of the last batch of this number are used again."""
        slots = self._slots[batch]
        slots += [_Slot() for _ in range(len(streams) - len(slots))]
        found: list[Any] = self._decoder.decode(
            streams,
            images=[slot.image for slot in slots[: len(streams)]],
            params=self._as_stored,
            cuda_stream=self._queue.native_stream_handle,
        )
        if not self._device.is_host:
            self._device.default_queue.wait_for(self._queue)
        decoded: list[_Slot | None] = []
        for slot, image in zip(slots, found, strict=False):
            if image is not None and image is not slot.image:
                slot.image, slot.place = image, None
            decoded.append(None if image is None else slot)
        return decoded

    def locate(self, slot: _Slot | None, /) -> Decoded | None:
        """See ``Library``."""
        if slot is None:
            return None
        image, known = slot.image, slot.place
        if known is None or (known.height, known.width) != (image.height, image.width):
            place = getattr(image, self._interface)  # takes 9 us beside busy threads (H100's host)
            height, width, channels = place["shape"]
            whole = channels == 3 and not place["strides"]
            slot.place = Decoded(place["data"][0], height, width) if whole else None
        return slot.place


class _Slot:
    """A place in a batch, whose image is used again.

    A picture of the size of the one before is decoded into the same memory.

    Attributes:
        image: The library's, once there is one.
        place: Where its pixels are, if that is known.
    """

    def __init__(self) -> None:
        self.image: Any = None
        self.place: Decoded | None = None


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps what a library of C++ says from standard error: which of its parts it did not find."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def graph(device: DeviceRef, edge: int, **settings: Any) -> Graph:
    """Builds the graph that prepares decoded pictures, for ``runtime.executor.load``.

    Args:
        device: Where it runs.
        edge: The longer one of the pixels.
        settings: Of ``Graph``.
    """
    places = TensorType(DType.int64, ["pictures", PLACES], device=device)
    with Graph("resample", input_types=[places], **settings) as made:
        made.output(nodes.resample(made.inputs[0].tensor, edge))
    return made


class Batch:
    """Pictures that are decoded, on the way into a network; an input of ``Replays``.

    Attributes:
        refused: The pictures that could not be decoded; ``replace`` them.
        dtype: Of the pixels.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: _Memory,
        pictures: Sequence[Picture],
        decoded: Sequence[Decoded | None],
    ) -> None:
        self.dtype = np.dtype(np.uint8)
        self._decoder = decoder
        self._memory: _Memory | None = memory
        self._pictures: list[Picture | None] = list(pictures)
        self._decoded = decoded
        self.refused = [
            i
            for i, (picture, found) in enumerate(zip(pictures, decoded, strict=True))
            if isinstance(picture, Jpeg)
            and (found is None or (found.height, found.width) != (picture.height, picture.width))
        ]

    def replace(self, index: int, pixels: Pixels | None) -> None:
        """Puts pixels in the place of a picture; None leaves it out, and others move up."""
        self._pictures[index] = pixels

    def __len__(self) -> int:
        return sum(picture is not None for picture in self._pictures)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the pixels [N, H, W, 3]."""
        return (len(self), *self._decoder.shape)

    def write(self, pixels: Buffer) -> None:
        """Enqueues what writes the pixels into a buffer [at least N, H, W, 3]."""
        assert self._memory is not None, "a batch is used within its block"
        self._decoder.write(self._memory, self._pictures, self._decoded, pixels)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._decoder.give_back(memory)


class _Memory:
    """What a batch needs beside what the library keeps for it.

    Attributes:
        number: Below ``BATCHES``.
        read: Comes when the device has read all of it.
    """

    def __init__(self, number: int, device: Device, shape: tuple[int, ...]) -> None:
        self.number = number
        self.read: DeviceEvent = device.default_queue.record_event()
        self._device = device
        self._shape = shape
        self._places: _Sent | None = None
        self._pixels: list[_Sent] = []

    def places(self, rows: Sequence[bytes], sources: Sequence[int], result: int) -> Buffer:
        """Enqueues a copy of rows for ops/resample.mojo; rows of zeros behind them say nothing.

        Args:
            rows: ``places`` of each picture, as int64.
            sources: The pictures' addresses.
            result: The first result's address; the others follow.
        """
        count = len(rows)
        if self._places is None or len(self._places.array) < count:
            whole = 1 << (count - 1).bit_length(), PLACES
            self._places = _Sent(DType.int64, whole, self._device)
        array = self._places.array
        found = np.frombuffer(b"".join(rows), np.int64).reshape(count, PLACES - 1)
        array[:count, 0] = found[:, 0] + sources
        array[:count, 1] = result + np.arange(count) * math.prod(self._shape)
        array[:count, 2:] = found[:, 1:]
        array[count:] = 0
        return self._places.send()

    def pixels(self, index: int, pixels: Pixels) -> int:
        """Enqueues a copy of a picture's pixels, the first, second, ... of the batch.

        Returns:
            Their address.
        """
        if index == len(self._pixels):
            self._pixels.append(_Sent(DType.uint8, self._shape, self._device))
        np.copyto(self._pixels[index].array, pixels)
        return self._pixels[index].send()._data_ptr()


class _Sent:
    """A tensor that the host writes and the device reads.

    Attributes:
        array: What the host writes.
    """

    def __init__(self, dtype: DType, shape: tuple[int, ...], device: Device) -> None:
        self._there = self._staged = Buffer(dtype, shape, device)
        if not device.is_host:  # where nothing would wait for the copy
            self._staged = Buffer(dtype, shape, device, PINNED)
        self.array = self._staged.to_numpy()

    def send(self) -> Buffer:
        """Enqueues the copy, for a GPU; gives what it is copied to."""
        if self._there is not self._staged:
            self._there.inplace_copy_from(self._staged)
        return self._there


class Decoder:
    """Decodes and prepares pictures on a device; any thread may call.

    Args:
        device: Where, an NVIDIA GPU; or a CPU, for tests.
        preprocess: Of the model.
        executable: Makes what ``graph`` describes, for the longer edge of the model's pixels.
        library: Decodes; nvImageCodec if None.

    Attributes:
        preprocess: See above.
        shape: Of a picture's pixels [H, W, 3].

    Raises:
        DeviceError: If the library cannot be loaded.
    """

    def __init__(
        self,
        device: Device,
        preprocess: Preprocess,
        executable: Executable,
        library: Library | None = None,
    ) -> None:
        self.preprocess = preprocess
        self.shape = (preprocess.height, preprocess.width, 3)
        self._device = device
        self._executable = executable
        self._gate = gate(device)
        self._library = library or NvImageCodec(device)
        self._row = functools.lru_cache(SIZES)(functools.partial(_row, preprocess))
        self._ready = _row(replace(preprocess, resize=None), *self.shape[:2], orientation=1)
        self._decoding = threading.Lock()
        self._free: SimpleQueue[_Memory] = SimpleQueue()
        for number in range(BATCHES):
            self._free.put(_Memory(number, device, self.shape))

    def __call__(self, pictures: Sequence[Picture]) -> Batch:
        """Decodes pictures; waits while ``BATCHES`` are under way."""
        streams = [self._library.open(each.file) for each in pictures if isinstance(each, Jpeg)]
        memory = self._free.get()
        try:
            images: Sequence[Any] = ()
            with self._decoding, self._gate.running():
                memory.read.synchronize()
                if streams:
                    images = self._library.decode(streams, memory.number)
            found = map(self._library.locate, images)
            decoded = [next(found) if isinstance(p, Jpeg) else None for p in pictures]
            return Batch(self, memory, pictures, decoded)
        except BaseException:
            self._free.put(memory)
            raise

    def warm(self, count: int) -> None:
        """Decodes batches of ``count`` pictures, so that none to come waits for memory or a kernel.

        Raises:
            DeviceError: If they cannot be decoded.
        """
        file = io.BytesIO()
        Image.new("RGB", (500, 375), "grey").save(file, "JPEG")
        pixels = Buffer(DType.uint8, (count, *self.shape), self._device)
        for _ in range(BATCHES):
            with self([Jpeg(file.getvalue(), 375, 500)] * count) as batch:
                if batch.refused:
                    decoded = count - len(batch.refused)
                    raise DeviceError(
                        f"nvImageCodec decodes {decoded} of {count} JPEGs here; use --decode cpu"
                    )
                batch.write(pixels)

    def give_back(self, memory: _Memory) -> None:
        """Lets another batch have the memory, once the device has read it."""
        self._free.put(memory)

    def write(
        self,
        memory: _Memory,
        pictures: Sequence[Picture | None],
        decoded: Sequence[Decoded | None],
        pixels: Buffer,
    ) -> None:
        """Enqueues what writes the pixels of a batch, see ``Batch.write``."""
        rows: list[bytes] = []
        sources: list[int] = []
        prepared = 0
        for picture, found in zip(pictures, decoded, strict=True):
            if isinstance(picture, Jpeg):
                assert found is not None, "a picture that could not be decoded is replaced"
                rows.append(self._row(picture.height, picture.width, picture.orientation))
                sources.append(found.address)
            elif picture is not None:
                rows.append(self._ready)
                sources.append(memory.pixels(prepared, picture))
                prepared += 1
        if rows:
            self._executable.execute(memory.places(rows, sources, pixels._data_ptr()))
        memory.read = self._device.default_queue.record_event()


def _row(preprocess: Preprocess, height: int, width: int, orientation: int) -> bytes:
    """Computes ``places`` as int64."""
    return _ROW.pack(*places(height, width, orientation, preprocess))


def places(height: int, width: int, orientation: int, preprocess: Preprocess) -> tuple[int, ...]:
    """Computes what ops/resample.mojo reads of a picture as it is stored, but for addresses.

    Returns:
        The bytes before the pixel that is at the top left once the picture is upright; the filter's
        support; and five numbers of each axis.
    """
    turned, from_bottom, from_right = _TURNS[orientation]
    rows, columns, down, right = height, width, 3 * width, 3
    if turned:
        rows, columns, down, right = columns, rows, right, down
    skipped = 0
    if from_bottom:
        skipped += (rows - 1) * down
        down = -down
    if from_right:
        skipped += (columns - 1) * right
        right = -right
    new_rows, new_columns = preprocess.scaled(rows, columns)
    first = down, rows, new_rows, preprocess.height, 3 * preprocess.width
    second = right, columns, new_columns, preprocess.width, 3
    if _begins_with_columns(rows - new_rows, columns - new_columns):
        first, second = second, first
    return skipped, SUPPORT[preprocess.resample], *first, *second


def _begins_with_columns(rows: int, columns: int) -> bool:
    """Tells whether Pillow filters along the columns first, where it takes away rows and columns.

    From 13.0 on it does where the rows are more than twice as many as the columns: found by
    comparing 600 sizes with both orders (tests/runtime/test_nvjpeg.py does so with some).
    """
    return _COLUMNS_FIRST and rows > 0 and rows > 2 * columns
