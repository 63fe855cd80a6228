"""Runs a program: compiled once, or found in a cache, for any number of inputs and outputs.

    executor = Executor.compile(program, tensors, CPU())
    logits, features = executor(pixels)

The compiled graph holds no weights, so a second checkpoint of the same architecture, and the
second start of the same model, find it in a cache (runtime/cache.py).
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, read
from max.engine import Model as Executable
from max.graph import DeviceRef, Graph, KernelLibrary

from maxvision.common.errors import ArgumentError, ModelError
from maxvision.common.host import python
from maxvision.graphs.layers import bytes_at_once, keeps_images_apart
from maxvision.graphs.lower import lower
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.program import Program
from maxvision.graphs.target import Target
from maxvision.graphs.types import BATCH
from maxvision.runtime import cache
from maxvision.runtime.context import OwnKernels, passing
from maxvision.runtime.replay import IMAGES, Execution, OnDevice, Replays, share_of

log = logging.getLogger("maxvision")


class Watch:
    """Adds up the seconds of steps that follow one another.

    Attributes:
        seconds: Of each step, in the order of their first ends.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Gives the time since the last call, or since the beginning, to ``name``."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class Unchecked(KernelLibrary):
    """Takes every op on trust: for a graph that is built for the names of its weights alone."""

    def verify_custom_op(self, custom_op: Any) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Lowering:
    """How a program becomes a graph.

    Attributes:
        dtype: Of filters; activations have that of the program's values.
        tf32: Whether products of float32 may be rounded to TF32 on a GPU.
        formats: The layers that run sparse, and the format of each.
        off: Passes to leave out (graphs/passes).
    """

    dtype: str = "float32"
    tf32: bool = True
    formats: Mapping[str, str] = field(default_factory=dict)
    off: Collection[str] = ()

    def build(
        self,
        program: Program,
        tensors: Mapping[str, np.ndarray],
        device: DeviceRef,
        kernels: KernelLibrary | None = None,
    ) -> tuple[Graph, Parameters, Program]:
        """Builds the graph of a program; see ``graphs.lower.lower``.

        Without ``kernels`` it is checked against all of maxvision's ops, compiled if need be.
        """
        extensions = [] if kernels else [cache.library(gpu=device.is_gpu())]
        return lower(
            program,
            tensors,
            device,
            formats=self.formats,
            off=self.off,
            dtype=self.dtype,
            tf32=self.tf32,
            kernels=kernels,
            extensions=extensions,
        )


def compiled(
    program: Program,
    tensors: Mapping[str, np.ndarray],
    device: Device,
    lowering: Lowering,
    *,
    target: Target | None = None,
    apart: bool = False,
    watch: Watch | None = None,
    starting: Callable[[], None] = lambda: None,
) -> tuple[bytes, Parameters, Program]:
    """Compiles a program, or finds in the cache what it compiles to.

    Args:
        program: A plain one.
        tensors: Its weights, as the checkpoint stores them.
        device: What it is for; perhaps a virtual one.
        lowering: How it becomes a graph.
        target: What it is for, if the device is virtual.
        apart: Whether to compile in a process of its own, if there is a cache. MAX compiles the
            graphs of one process one after the other, whatever the threads.
        watch: Adds up the time.
        starting: Called before something is compiled.

    Returns:
        The compiled graph, the weights that it asks for, and the program as it was rewritten.
    """
    watch = watch or Watch()
    place = DeviceRef.from_device(device)
    graph, weights, final = lowering.build(program, tensors, place, Unchecked())

    def checked(kernels: KernelLibrary) -> Graph:
        return lowering.build(program, tensors, place, kernels)[0]

    def compile() -> CompiledModel:
        watch.lap("graph")
        starting()
        made = _compiled(checked, graph, device)
        watch.lap("compile")
        return made

    target = target or Target.of(device)
    if apart and cache.lacks(cache.key(graph, target)):
        _tell(program.name, device)
        _compile_apart((program, dict(tensors), device.id, target, lowering))
    mef = cache.compiled(graph, target, compile)
    watch.lap("graph")
    return mef, weights, final


def _compile_apart(job: tuple[Any, ...]) -> None:
    """Has a process compile into the cache; where it fails the caller compiles, and says why."""
    done = subprocess.run(
        **python("maxvision.runtime.compile_worker"),
        input=pickle.dumps(job, protocol=5),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        log.debug("a process that compiles ended with %d: %s", done.returncode, said)


def _compiled(
    checked: Callable[[KernelLibrary], Graph], graph: Graph, device: Device
) -> CompiledModel:
    """Compiles a graph, which ``checked`` builds once more with the ops that it calls."""
    _tell(graph.name, device)
    library = cache.library(cache.called(str(graph)), gpu=not device.is_host)
    with passing():
        kernels = OwnKernels()
        kernels.load_paths([library])
        return InferenceSession(devices=[device]).compile(checked(kernels))


def _tell(name: str, device: Device) -> None:
    log.info("compiling %s for %s, which may take a minute", name, DeviceRef.from_device(device))


def compiled_ops(
    build: Callable[..., Graph], device: Device, target: Target | None = None
) -> bytes:
    """Compiles a graph of our ops that is no program's, or finds it in the cache.

    Args:
        build: Makes the graph, which has no weights, with these settings of ``Graph``.
        device: What it is for; perhaps a virtual one.
        target: What it is for, if the device is virtual.
    """
    graph = build(kernel_library=Unchecked())

    def checked(kernels: KernelLibrary) -> Graph:
        return build(kernel_library=kernels)

    target = target or Target.of(device)
    return cache.compiled(graph, target, lambda: _compiled(checked, graph, device))


def load(build: Callable[..., Graph], device: Device) -> Executable:
    """Compiles such a graph for a device of this machine, see ``compiled_ops``, and loads it."""
    return initialised(compiled_ops(build, device), device)


def initialised(mef: bytes, device: Device) -> Executable:
    """Loads a compiled graph that has no weights."""
    return InferenceSession(devices=[device]).init(read(io.BytesIO(mef)))


class Executor:
    """Runs a program on a device; any thread may call.

    On a GPU shapes are captured when they come for the second time (runtime/replay.py), or by
    ``prepare``.

    Args:
        mef: The compiled graph.
        weights: What it asks for, on the device.
        device: Where it runs.
        program: What it was compiled from, as it was rewritten; only the types of its inputs and
            outputs count here.
        images: How many images captures may hold together; 0 captures nothing.

    Attributes:
        program: See above.
        executable: The compiled graph.
        share: How many images a core takes at a time, where it runs on a CPU.
    """

    def __init__(
        self,
        mef: bytes,
        weights: Mapping[str, Buffer],
        device: Device,
        program: Program,
        images: int = IMAGES,
    ) -> None:
        self.program = program
        self._place = "cpu" if device.is_host else f"gpu:{device.id}"
        self._session = InferenceSession(devices=[device])
        self.executable: Executable = self._session.init(
            read(io.BytesIO(mef)), weights_registry=dict(weights)
        )
        ends = [*program.inputs.values(), *(program.types[v] for v in program.outputs.values())]
        batched = all(each.shape[:1] == (BATCH,) for each in ends) and keeps_images_apart(program)
        self.share = share_of(bytes_at_once(program))
        plain = partial(Execution, share=self.share)
        self._replays = Replays(self.executable, device, images, batched, plain=plain)

    @classmethod
    def compile(
        cls,
        program: Program,
        tensors: Mapping[str, np.ndarray],
        device: Device,
        lowering: Lowering | None = None,
        *,
        images: int = IMAGES,
        apart: bool = False,
        watch: Watch | None = None,
        starting: Callable[[], None] = lambda: None,
    ) -> Executor:
        """Compiles a plain program and loads its weights; see ``compiled``.

        Raises:
            ArgumentError: If weights are missing, or not of the program's shapes.
        """
        _check_weights(program, tensors)
        watch = watch or Watch()
        mef, weights, final = compiled(
            program, tensors, device, lowering or Lowering(),
            apart=apart, watch=watch, starting=starting,
        )  # fmt: skip
        executor = cls(mef, weights.registry(device), device, final, images)
        watch.lap("load")
        return executor

    @classmethod
    def adopt(
        cls,
        path: str | os.PathLike[str],
        program: Program,
        tensors: Mapping[str, np.ndarray],
        device: Device,
        lowering: Lowering,
        images: int = IMAGES,
    ) -> Executor:
        """Takes what a plain program was compiled to for this device from a file; see ``compiled``.

        Raises:
            ModelError: If the file cannot be read.
        """
        place = DeviceRef.from_device(device)
        _, weights, final = lowering.build(program, tensors, place, Unchecked())
        try:
            return cls(Path(path).read_bytes(), weights.registry(device), device, final, images)
        except (OSError, RuntimeError) as problem:
            raise ModelError(
                f"{path} is not a compiled graph that runs here ({problem})"
            ) from problem

    def __repr__(self) -> str:
        return f"Executor({self.program.signature} on {self._place})"

    def __call__(self, *arrays: np.ndarray | OnDevice) -> list[np.ndarray]:
        """Computes the outputs; what is bfloat16 or float16 comes as float32.

        Args:
            arrays: The inputs, in the program's order; some may be made on the device.

        Raises:
            ArgumentError: If they are not of the program's types.
        """
        self._check(arrays)
        return self._replays(*arrays)

    def prepare(self, *arrays: np.ndarray) -> None:
        """Captures, on a GPU, batches up to that of ``arrays``, so that none to come waits."""
        self._check(arrays)
        self._replays.prepare(*arrays)

    def _check(self, arrays: tuple[np.ndarray | OnDevice, ...]) -> None:
        types = self.program.inputs
        if len(arrays) != len(types):
            raise ArgumentError(
                f"{self.program.name} takes {len(types)} inputs ({', '.join(types)}) but got"
                f" {len(arrays)}"
            )
        named: dict[str, int] = {}
        for array, (name, wanted) in zip(arrays, types.items(), strict=True):
            if not isinstance(array, (np.ndarray, OnDevice)):
                raise ArgumentError(
                    f"{self.program.name}: {name} has to be a numpy array of {wanted}, not"
                    f" {type(array).__name__}"
                )
            if (
                not _fits(array.shape, wanted.shape, named)
                or DType.from_numpy(array.dtype) != DType[wanted.dtype]
            ):
                shape = ", ".join(map(str, array.shape))
                raise ArgumentError(
                    f"{self.program.name}: {name} is {array.dtype}[{shape}] but has to be {wanted}"
                )


def _check_weights(program: Program, tensors: Mapping[str, np.ndarray]) -> None:
    wrong = []
    for name, wanted in program.weights.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} {wanted} is missing")
        elif not isinstance(tensor, np.ndarray):
            wrong.append(f"{name} has to be a numpy array, not {type(tensor).__name__}")
        elif tensor.shape != wanted.shape:
            shape = ", ".join(map(str, tensor.shape))
            wrong.append(f"{name} is {tensor.dtype}[{shape}] but has to be {wanted}")
    if wrong:
        raise ArgumentError(f"{program.name}: {'; '.join(wrong)}")


def _fits(given: tuple[int, ...], wanted: tuple[int | str, ...], named: dict[str, int]) -> bool:
    """Compares a shape; sizes that are named have to be equal wherever the name stands."""
    if len(given) != len(wanted):
        return False
    return all(
        size == (named.setdefault(want, size) if isinstance(want, str) else want)
        for size, want in zip(given, wanted, strict=True)
    )
