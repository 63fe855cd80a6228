"""A compiled graph for torch tensors, where they lie and in torch's order.

MAX computes in a stream of its own. What torch enqueued before a call, in its current stream, is
done before the graph begins, and the graph is done before what torch enqueues afterwards: the two
streams wait for each other by events, the host for neither. On a CPU nothing is copied. On a GPU
the second call with the same shapes records the graph as one launch (runtime/replay.py), and from
then on inputs are copied into the buffers of that launch, and outputs out of them. Where there is
more to copy than launches cost, as in training, a graph is not recorded, and nothing is copied.
On an H100 (one-off) a recorded ResNet-50 takes 60 us of the host, kernel by kernel 2 ms.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from max.driver import Buffer, Device
from max.engine import Model as Executable
from torch import Tensor

from maxvision.common.errors import ModelError
from maxvision.runtime.devices import find_device
from maxvision.runtime.replay import Capture, Replays

POOL = "MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT"
"""MAX's setting of the share of a GPU's memory that it takes at the first recording."""
SHARE = "40"
"""Percent for MAX, unless the user sets another share: torch needs the rest."""
SMALL = 16 << 20
"""Bytes of inputs that are copied in some 10 us, less than the launches of a few kernels take."""


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


class OnTensors:
    """Runs a compiled graph.

    Args:
        executable: It.
        device: Where it runs, and the tensors are.
        most: Bytes of inputs up to which a GPU records it; 0 for a graph that writes into its
            inputs, None for any. If a graph need not be recorded, outputs stay in MAX's memory
            where it is not, which no graph but those of this class may use meanwhile: they wait for
            what torch has enqueued.
    """

    def __init__(self, executable: Executable, device: Device, *, most: int | None = None) -> None:
        plain = _Plain if most is None else _Kept
        made = partial(Replays, executable, device, batched=False, plain=plain)
        self._most = most
        self._recorded = made(captured=_Recorded)
        self._plain = made(0)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Computes the outputs of dense tensors, which have the graph's dtypes.

        Raises:
            ModelError: If torch is recording a CUDA graph, of which MAX's stream is no part.
        """
        if tensors and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise ModelError(
                "a graph on maxvision's kernels cannot be part of a CUDA graph that torch records;"
                " call it outside of it, where it is recorded by itself"
            )
        most = self._most
        records = most is None or 0 < sum(each.nbytes for each in tensors) <= most
        found: list[Tensor] = (self._recorded if records else self._plain)(*tensors)
        return found


class _Order:
    """Puts what MAX enqueues on a device between what torch enqueues before and behind."""

    def __init__(self, device: Device) -> None:
        self.place = torch.device("cuda", device.id)
        self._theirs: Any = None
        if not device.is_host:
            handle = device.default_queue.native_stream_handle
            self._theirs = torch.cuda.ExternalStream(handle, device=self.place)

    def __enter__(self) -> None:
        if self._theirs is not None:
            self._theirs.wait_stream(torch.cuda.current_stream(self.place))

    def __exit__(self, *_: object) -> None:
        if self._theirs is not None:
            torch.cuda.current_stream(self.place).wait_stream(self._theirs)


class _Plain:
    """Runs it kernel by kernel, in torch's memory."""

    def __init__(self, executable: Any, device: Device, _: bool) -> None:
        self._executable = executable
        self._order = _Order(device)
        self._copies = not device.is_host
        self._inputs: list[Buffer] = []
        self._found: list[Tensor] = []

    def upload(self, *tensors: Tensor) -> None:
        self._inputs = [Buffer.from_dlpack(each) for each in tensors]

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


class _Kept(_Plain):
    """Runs it kernel by kernel, and gives the outputs as they lie in MAX's memory."""

    def download(self) -> None:
        pass


class _Recorded(Capture):
    """Runs what was recorded."""

    def __init__(
        self, executable: Any, device: Device, types: Sequence[Any], key: int, _: bool
    ) -> None:
        self._order = _Order(device)
        torch.cuda.synchronize(self._order.place)  # nothing may be under way while it is recorded
        super().__init__(executable, device, types, key)
        self._last = torch.cuda.current_stream(self._order.place)
        self._into = [torch.from_dlpack(each) for each in self.inputs]
        self._from = [torch.from_dlpack(each) for each in self.outputs]
        self._found: list[Tensor] = []

    def upload(self, *tensors: Tensor) -> None:
        stream = torch.cuda.current_stream(self._order.place)
        if stream != self._last:  # where the outputs before are read, once they are there
            stream.wait_stream(self._last)
            self._last = stream
        for into, tensor in zip(self._into, tensors, strict=True):
            into.copy_(tensor)

    def run(self) -> None:
        with self._order:
            super().run()

    def download(self) -> None:
        self._found = [each.clone() for each in self._from]

    def result(self) -> list[Tensor]:
        return self._found

    def release(self) -> None:
        torch.cuda.synchronize(self._order.place)
        self._into.clear()
        self._from.clear()
        super().release()
