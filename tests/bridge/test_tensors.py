"""Torch tensors into graphs and out of them: what is recorded, and in which order streams go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType

from maxvision.bridge import tensors
from maxvision.common.errors import ModelError
from maxvision.runtime import replay
from maxvision.runtime.devices import POOL


class Doubling:
    """Captures like a GPU's executable: fixed buffers in and out."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self.released: list[int] = []
        self.made: dict[int, Buffer] = {}

    def capture(self, key: int, given: Buffer) -> list[Buffer]:
        self.captured.append(given.shape[0])
        self.made[key] = Buffer(given.dtype, given.shape, CPU())
        return [self.made[key]]

    def replay(self, key: int, given: Buffer) -> None:
        self.replayed.append(given.shape[0])
        np.copyto(self.made[key].to_numpy(), given.to_numpy() * 2)

    def execute(self, given: Buffer) -> list[Buffer]:
        return [Buffer.from_numpy(given.to_numpy() * 2)]

    def release_captured_graph(self, key: int) -> None:
        self.released.append(key)


def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the CPU be taken for a GPU that records launches."""
    for module in (replay, tensors):
        monkeypatch.setattr(module, "captures", lambda _: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(tensors, "_lent", Buffer.from_dlpack)


def test_a_model_is_recorded_for_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    recording(monkeypatch)
    executable = Doubling()
    run = tensors.OnTensors(executable, CPU())  # type: ignore[arg-type]
    for size in (4, 3):
        for value in (1.0, 2.0, 3.0):
            (found,) = run(torch.full((size,), value))
            assert found.tolist() == [2 * value] * size
    assert executable.captured == [4, 3]


@pytest.mark.parametrize(("most", "sizes"), [(16, [4, 3]), (12, [3]), (0, [])])
def test_an_op_is_recorded_for_places(
    monkeypatch: pytest.MonkeyPatch, most: int, sizes: list[int]
) -> None:
    """If there is little to copy out; one that writes into its inputs never is."""
    recording(monkeypatch)
    executable = Doubling()
    run = tensors.InPlace(executable, CPU(), most=most)  # type: ignore[arg-type]
    for size in (4, 3):
        x, once = torch.empty(size), torch.ones(size)
        assert run(once)[0].tolist() == [2.0] * size
        kept = [run(x.fill_(value))[0] for value in (1.0, 2.0, 3.0, 4.0)]
        assert [each.tolist() for each in kept] == [[2 * v] * size for v in (1.0, 2.0, 3.0, 4.0)]
    assert executable.captured == sizes
    assert executable.replayed == [size for size in sizes for _ in range(2)]


def test_places_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first: launches by the bytes that they hold, others by their number."""
    recording(monkeypatch)
    monkeypatch.setattr(tensors, "HELD", 3 * 16)
    monkeypatch.setattr(tensors, "PLACES", 5)
    executable = Doubling()
    run = tensors.InPlace(executable, CPU(), most=16)  # type: ignore[arg-type]
    given = [torch.full((4,), float(i)) for i in range(8)]
    for x in given[:4]:
        for _ in range(3):
            run(x)
    assert len(executable.captured) == 4 and len(executable.released) == 1
    for x in given[4:]:
        run(x)
    assert len(executable.released) == 3
    for i, x in enumerate(given):
        assert run(x)[0].tolist() == [2.0 * i] * 4


def test_a_step_lends_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is used again once they are freed; until then it runs kernel by kernel."""
    recording(monkeypatch)
    monkeypatch.setattr(tensors, "LENT", 0)
    executable = Doubling()
    run = tensors.Step(executable, CPU())  # type: ignore[arg-type]
    x = torch.empty(4)

    def call(value: float) -> torch.Tensor:
        (found,) = run(x.fill_(value))
        assert found.tolist() == [2 * value] * 4
        return found

    call(1.0)
    assert not executable.captured
    lent = call(2.0)
    (memory,) = executable.made.values()
    assert lent.data_ptr() == memory.to_numpy().ctypes.data
    apart = call(3.0)
    assert lent.tolist() == [4.0] * 4 and apart.tolist() == [6.0] * 4
    part = lent[1:].detach()
    del lent
    call(4.0)
    assert part.tolist() == [4.0] * 3 and len(executable.replayed) == 1
    del part
    for value in (5.0, 6.0):
        call(value)
    assert executable.captured == [4] and len(executable.replayed) == 3


def test_a_step_that_does_not_fit_runs_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording(monkeypatch)

    class Full(Doubling):
        def capture(self, key: int, given: Buffer) -> list[Buffer]:
            super().capture(key, given)
            raise RuntimeError(self.problem)

        problem = "Memory manager cannot satisfy allocation (out of memory): cuda[0]"

    executable = Full()
    run = tensors.Step(executable, CPU())  # type: ignore[arg-type]
    x = torch.ones(3)
    assert [run(x)[0].tolist() for _ in range(4)] == [[2.0] * 3] * 4
    assert executable.captured == [3] and not executable.replayed
    assert POOL in caplog.text
    executable.problem = "something else"
    run = tensors.Step(executable, CPU())  # type: ignore[arg-type]
    run(x)
    with pytest.raises(RuntimeError, match="something else"):
        run(x)


def test_outputs_that_are_kept_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As losses that are collected, and gradients that are added up over several steps."""
    recording(monkeypatch)
    executable = Doubling()
    run = tensors.Step(executable, CPU())  # type: ignore[arg-type]
    x = torch.ones(4)
    kept = [run(x.fill_(float(i)))[0] for i in range(6)]
    assert [each.tolist() for each in kept] == [[2.0 * i] * 4 for i in range(6)]
    assert executable.captured == [4, 4] and len(executable.released) == 1
    assert len(executable.replayed) == 5


def test_inputs_that_move_are_copied_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one more recording."""
    recording(monkeypatch)
    executable = Doubling()
    run = tensors.Step(executable, CPU())  # type: ignore[arg-type]
    given = [torch.full((4,), float(i)) for i in range(6)]
    for x in given:
        assert run(x)[0].tolist() == [2 * float(x[0])] * 4
    assert executable.captured == [4, 4] and len(executable.released) == 1
    assert len(executable.replayed) == 5


class Stream:
    """Notes what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)


def test_a_cpu_computes_in_torchs_memory() -> None:
    run = tensors.OnTensors(Doubling(), CPU())  # type: ignore[arg-type]
    for value in (1.0, 2.0, 3.0):
        (found,) = run(torch.full((2, 3), value))
        assert found.tolist() == [[2 * value] * 3] * 2


def test_a_recording_serves_one_stream_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stream(), Stream()
    current = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    executable = Doubling()
    run = tensors._Recorded(executable, CPU(), [(DType.float32, (3,))], 7, False)

    def call(value: float) -> torch.Tensor:
        run.upload(torch.full((3,), value))
        run.run()
        run.download()
        return run.result()[0]

    one = call(1.0)
    two = call(2.0)
    assert one.tolist() == [2.0] * 3 and two.tolist() == [4.0] * 3
    assert not first.waits
    current[0] = second
    three, four = call(3.0), call(4.0)
    assert three.tolist() == [6.0] * 3 and four.tolist() == [8.0] * 3
    assert second.waits == [first]
    run.release()
    assert executable.released == [7]


def test_torchs_own_recording_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tensors.OnTensors(Doubling(), CPU())  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    given: Any = SimpleNamespace(is_cuda=True)
    with pytest.raises(ModelError, match="cannot be part of a CUDA graph that torch records"):
        run(given)


def test_devices_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tensors, "find_device", asked.append)
    monkeypatch.setenv(POOL, "")  # which is undone to what it was
    monkeypatch.delenv(POOL)
    tensors.device_of(torch.device("cpu"))
    assert POOL not in tensors.os.environ
    tensors.device_of(torch.device("cuda", 1))
    assert tensors.os.environ[POOL] == tensors.SHARE
    assert asked == ["cpu", "gpu:1"]
    with pytest.raises(ModelError, match="its tensors are on meta, and it computes on a CPU or a"):
        tensors.device_of(torch.device("meta"))
