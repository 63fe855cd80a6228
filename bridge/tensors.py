"""A compiled graph for torch tensors, where they lie and in torch's order.

MAX computes in a stream of its own. What torch enqueued before a call, in its current stream, is
done before the graph begins, and the graph is done before what torch enqueues afterwards: the two
streams wait for each other by events, the host for neither. On a CPU nothing is copied. A GPU
records graphs as one launch each (runtime/replay.py), in one of three ways:

    OnTensors   of a model: a launch for each batch size, from its second use on. It has buffers of
                its own, and inputs are copied in: they are pictures, that lie elsewhere each time.
    InPlace     of an op, whose inputs are weights and what other ops made: a launch for the places
                where the inputs lie, from the second time on that they lie there. Nothing is copied
                in; outputs are copied out of the launch's memory.
    Step        of training: one launch, whose inputs lie in the same places from step to step, but
                for some that are copied in. Its outputs, what is kept for the way back above all,
                are lent: the launch is used again once torch has freed them.

On an H100 (one-off) a recorded ResNet-50 takes 60 us of the host, kernel by kernel 2 ms.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from max.driver import Buffer, Device
from max.engine import Model as Executable
from torch import Tensor

from maxvision.common.errors import ModelError
from maxvision.runtime.devices import POOL, find_device
from maxvision.runtime.replay import KEYS, Capture, Replays, captures, gate, zeros

log = logging.getLogger("maxvision")

SHARE = "40"
"""Percent for MAX, unless the user sets another share: torch needs the rest."""
SMALL = 16 << 20
"""Bytes of outputs that are copied in some 10 us."""
HELD = 256 << 20
"""Bytes of outputs that the launches of a graph hold together."""
PLACES = 512
"""Places of inputs that a graph remembers."""
LENT = 1 << 30
"""Bytes of outputs that a step of training copies at most, as they are kept."""
RECORDS = 8
"""How many recordings a step of training gets before it runs kernel by kernel."""
_FULL = ("cannot satisfy allocation", "vmmCreate failed")
"""What MAX says where its share of the GPU's memory, or what others leave of it, is taken."""

Places = tuple[tuple[int, tuple[int, ...]], ...]
"""Addresses and shapes."""


def device_of(place: torch.device) -> Device:
    """Opens the device where torch's tensors lie.

    Raises:
        ModelError: If it is neither a CPU nor a GPU that MAX takes.
        DeviceError: If MAX finds no such GPU.
    """
    if place.type == "cpu":
        return find_device("cpu")
    if place.type != "cuda":
        raise ModelError(f"its tensors are on {place.type}, and it computes on a CPU or a GPU")
    os.environ.setdefault(POOL, SHARE)
    return find_device(f"gpu:{place.index or 0}")


def turned(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permutes a tensor's axes, if need be."""
    return x if order == tuple(range(len(order))) else x.permute(order)


def place_of(device: Device) -> torch.device:
    """Names MAX's device as torch does."""
    return torch.device("cpu") if device.is_host else torch.device("cuda", device.id)


class OnTensors:
    """Runs a compiled graph on dense tensors, which have its dtypes.

    Args:
        executable: It.
        device: Where it runs, and the tensors are.
    """

    def __init__(self, executable: Executable, device: Device) -> None:
        self._replays = Replays(executable, device, batched=False, plain=_Plain, captured=_Recorded)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Computes the outputs.

        Raises:
            ModelError: If torch is recording a CUDA graph, of which MAX's stream is no part.
        """
        _refuse_recording(tensors)
        found: list[Tensor] = self._replays(*tensors)
        return found


class _InTorch:
    """A compiled graph that runs in torch's memory.

    Args:
        executable: It.
        device: Where it runs, and the tensors are.
    """

    def __init__(self, executable: Executable, device: Device) -> None:
        self._executable = executable
        self._device = device
        self._gate = gate(device)
        self._lock = threading.Lock()

    def _plain(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it kernel by kernel."""
        run = _Plain(self._executable, self._device, False)
        with self._gate.running():
            run.upload(*tensors)
            run.run()
        return run.result()


class InPlace(_InTorch):
    """Runs a compiled graph on dense tensors, which have its dtypes, and copies none of them.

    Where it is not recorded, outputs stay in MAX's memory, which no graph but those of this class
    and of ``Step`` may use meanwhile: they wait for what torch has enqueued.

    Args:
        executable: It.
        device: Where it runs, and the tensors are.
        most: Bytes of outputs up to which a GPU records it: to copy more takes longer than a few
            launches. 0 for a graph that is never recorded.
    """

    def __init__(self, executable: Executable, device: Device, *, most: int = SMALL) -> None:
        super().__init__(executable, device)
        self._most = most if captures(device) else 0
        self._launches: OrderedDict[Places, _Launch | None] = OrderedDict()
        self._held = 0  # bytes of their outputs

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Computes the outputs.

        Raises:
            ModelError: If torch is recording a CUDA graph, of which MAX's stream is no part.
        """
        _refuse_recording(tensors)
        if not self._most:
            return self._plain(tensors)
        places = tuple((x.data_ptr(), x.shape) for x in tensors)
        with self._lock:  # a launch writes into the same memory each time
            launch = self._launches.get(places)
            if launch is not None:
                self._launches.move_to_end(places)
                with self._gate.running():
                    launch.follow()
                    launch.run()
                    return launch.copied()
            again = places in self._launches
            self._launches[places] = None
            self._launches.move_to_end(places)
            if len(self._launches) > PLACES:
                with self._gate.running():  # to release one waits for the device
                    self._drop(next(iter(self._launches)))
        found = self._plain(tensors)
        fits = 0 < sum(each.nbytes for each in found) <= self._most
        if again and fits and all(each.nbytes for each in tensors):
            self._record(places, tensors)
        return found

    def _record(self, places: Places, tensors: Sequence[Tensor]) -> None:
        """Records a launch, in the place of the oldest if they hold too much."""
        with self._lock, self._gate.capturing():
            if self._launches.get(places) is None:
                lent = [_lent(each) for each in tensors]
                launch = _Launch(self._executable, self._device, lent, next(KEYS))
                self._drop(places)
                self._launches[places] = launch
                self._held += launch.bytes
                while self._held > HELD:
                    self._drop(next(iter(self._launches)))

    def _drop(self, places: Places) -> None:
        launch = self._launches.pop(places, None)
        if launch is not None:
            self._held -= launch.bytes
            launch.release()


class Step(_InTorch):
    """Runs a step of training, a compiled graph, on dense tensors, which have its dtypes.

    A GPU records it the second time, and its outputs are then the launch's own memory. Those that
    are alive when it is called again, as losses that are collected and gradients that add up, are
    copies from then on. Where that is too much, as of two large steps forward before one back, it
    runs kernel by kernel; and so it does where there is no memory for a recording, whose
    intermediate results no other one shares.

    Args:
        executable: It.
        device: Where it runs, and the tensors are.
        turns: How the axes of each output are permuted then; no number of it moves.
    """

    def __init__(
        self, executable: Executable, device: Device, turns: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(executable, device)
        self._turns = turns
        self._left = RECORDS if captures(device) else 0
        self._ran = False
        self._launch: _Loan | None = None
        self._moving: set[int] = set()
        self._kept: set[int] = set()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Computes the outputs.

        Raises:
            ModelError: If torch is recording a CUDA graph, of which MAX's stream is no part.
        """
        _refuse_recording(tensors)
        if self._left:
            with self._lock:
                if self._ready(tensors):
                    assert self._launch is not None
                    with self._gate.running():
                        return self._launch(tensors)
                self._ran = True
        found = self._plain(tensors)
        return found if self._turns is None else list(map(turned, found, self._turns))

    def _ready(self, tensors: Sequence[Tensor]) -> bool:
        """Tells whether there is a launch that may be used; records one if need be."""
        if not self._ran:  # that loads the kernels
            if not all(each.nbytes for each in tensors):
                self._left = 0
            return False
        if (launch := self._launch) is not None:
            kept, moved = launch.kept(), launch.moved(tensors)
            if launch.size(kept) > LENT:
                return False
            if not kept and moved <= self._moving:
                return True
            self._kept |= kept
            self._moving |= moved
            with self._gate.running():  # to release one waits for the device
                launch.release()
            self._launch = None
            self._left -= 1
        if self._left:
            with self._gate.capturing():
                self._launch = self._recorded(tensors)
        return self._launch is not None

    def _recorded(self, tensors: Sequence[Tensor]) -> _Loan | None:
        """Records a launch; gives None, for good, where there is not the memory."""
        try:
            return _Loan(
                self._executable, self._device, tensors, self._turns, self._moving, self._kept
            )
        except RuntimeError as error:
            if not any(each in str(error) for each in _FULL):
                raise
            self._left = 0
            log.warning(
                "a part of a training step runs kernel by kernel, for which the host takes longer:"
                " there is no memory for its recording. MAX may take %s %% of the GPU's, for which"
                " %s is the setting, before the first step, and others may hold some",
                os.environ.get(POOL, SHARE),
                POOL,
            )
            return None


def _refuse_recording(tensors: Sequence[Tensor]) -> None:
    if tensors and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise ModelError(
            "a graph on maxvision's kernels cannot be part of a CUDA graph that torch records;"
            " call it outside of it, where it is recorded by itself"
        )


class _Order:
    """Puts what MAX enqueues on a device between what torch enqueues before and behind."""

    def __init__(self, device: Device) -> None:
        self.place = place_of(device)
        self._theirs: Any = None
        if not device.is_host:
            handle = device.default_queue.native_stream_handle
            self._theirs = torch.cuda.ExternalStream(handle, device=self.place)

    def __enter__(self) -> None:
        if self._theirs is not None:
            self._torchs = torch.cuda.current_stream(self.place)
            self._theirs.wait_stream(self._torchs)

    def __exit__(self, *_: object) -> None:
        if self._theirs is not None:
            self._torchs.wait_stream(self._theirs)


class _Plain:
    """Runs it kernel by kernel, in torch's memory."""

    def __init__(self, executable: Any, device: Device, _: bool) -> None:
        self._executable = executable
        self._order = _Order(device)
        self._copies = not device.is_host
        self._inputs: list[Buffer] = []
        self._found: list[Tensor] = []

    def upload(self, *tensors: Tensor) -> None:
        self._inputs = [Buffer.from_dlpack(each.detach()) for each in tensors]

    def run(self) -> None:
        with self._order:
            made = self._executable.execute(*self._inputs)
        self._found = [torch.from_dlpack(each) for each in made]

    def download(self) -> None:
        if self._copies:  # MAX's memory must not wait for torch to forget the tensors
            self._found = [each.clone() for each in self._found]
            with self._order:  # nor be used again before it was read
                pass

    def result(self) -> list[Tensor]:
        return self._found


class _Launch(Capture):
    """A launch in torch's order, for one thread at a time.

    Attributes:
        bytes: Of its outputs.
    """

    def __init__(self, executable: Any, device: Device, inputs: Sequence[Buffer], key: int) -> None:
        self._order = _Order(device)
        torch.cuda.synchronize(self._order.place)  # nothing may be under way while it is recorded
        super().__init__(executable, device, inputs, key)
        self._last = torch.cuda.current_stream(self._order.place)
        self._from = [torch.from_dlpack(each) for each in self.outputs]
        self.bytes = sum(each.nbytes for each in self._from)

    def follow(self) -> None:
        """Comes after the call before, whose outputs another stream may still read."""
        stream = torch.cuda.current_stream(self._order.place)
        if stream != self._last:
            stream.wait_stream(self._last)
            self._last = stream

    def run(self) -> None:
        with self._order:
            super().run()

    def copied(self) -> list[Tensor]:
        """Gives the outputs, the caller's to keep."""
        return [each.clone() for each in self._from]

    def release(self) -> None:
        torch.cuda.synchronize(self._order.place)
        self._from.clear()
        super().release()


class _Loan(_Launch):
    """A launch whose outputs are lent.

    Args:
        executable: See ``_Launch``.
        device: See ``_Launch``.
        tensors: The inputs, where most of them lie from now on.
        turns: See ``Step``.
        moving: Which inputs lie elsewhere each time, and are copied in.
        copied: Which outputs are copied rather than lent.
    """

    def __init__(
        self,
        executable: Any,
        device: Device,
        tensors: Sequence[Tensor],
        turns: Sequence[tuple[int, ...]] | None,
        moving: Collection[int],
        copied: Collection[int],
    ) -> None:
        self._own = {i: tensors[i].clone() for i in sorted(moving)}
        self._copied = {*copied}
        self._places = [each.data_ptr() for each in tensors]
        inputs = [_lent(self._own.get(i, each)) for i, each in enumerate(tensors)]
        super().__init__(executable, device, inputs, next(KEYS))
        if turns is not None:
            self._from = list(map(turned, self._from, turns))
        self._storages = [each.untyped_storage() for each in self._from]
        self._owners = [_owners(each) for each in self._storages]

    def moved(self, tensors: Sequence[Tensor]) -> set[int]:
        """Tells which inputs lie elsewhere than when it was recorded."""
        pairs = enumerate(zip(tensors, self._places, strict=True))
        return {i for i, (x, place) in pairs if x.data_ptr() != place}

    def kept(self) -> set[int]:
        """Tells which of the outputs that were lent are alive, or parts of them."""
        pairs = enumerate(zip(self._storages, self._owners, strict=True))
        return {i for i, (storage, count) in pairs if _owners(storage) > count}

    def size(self, outputs: Collection[int]) -> int:
        """Counts the bytes of some outputs."""
        return sum(self._from[i].nbytes for i in outputs)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the outputs."""
        self.follow()
        for i, own in self._own.items():
            own.copy_(tensors[i])
        self.run()
        return [
            each.clone() if i in self._copied else each.detach()
            for i, each in enumerate(self._from)
        ]

    def release(self) -> None:
        self._storages.clear()
        super().release()


def _owners(storage: torch.UntypedStorage) -> int:
    """Counts the tensors, and others, that keep memory; torch's own CUDA graphs ask so, too."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class _Recorded(_Launch):
    """A ``Run`` of a launch with buffers of its own."""

    def __init__(
        self, executable: Any, device: Device, types: Sequence[Any], key: int, _: bool
    ) -> None:
        super().__init__(executable, device, zeros(types, device), key)
        self._into = [torch.from_dlpack(each) for each in self.inputs]
        self._found: list[Tensor] = []

    def upload(self, *tensors: Tensor) -> None:
        self.follow()
        for into, tensor in zip(self._into, tensors, strict=True):
            into.copy_(tensor)

    def download(self) -> None:
        self._found = self.copied()

    def result(self) -> list[Tensor]:
        return self._found

    def release(self) -> None:
        self._into.clear()
        super().release()


class _Lent:
    """A tensor's memory without the tensor: torch may give it to others meanwhile."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _lent(x: Tensor) -> Buffer:
    """Makes a buffer of a tensor's memory, which it does not keep."""
    data = torch.as_tensor(_Lent(x), device=x.device)
    return Buffer.from_dlpack(data.view(x.dtype).view(x.shape))
