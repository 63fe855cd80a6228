"""MAX Serve's worker process and queues. Every use of MAX's private modules is in this file.

What is used, of 26.7: the process with its readiness (``start_model_worker``), its loop
(``ModelWorker.run``), settings and logging, and the command line of ``max serve``. What is not:
its FastAPI app and its lifespan, which know language models and end with their worker; and its
queues, which have one sender each and cost whoever imports them 5 s and 500 MB.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import resource_tracker
from typing import Any, TypeAlias

from max.driver import DeviceSpec
from max.pipelines.lib import ProfilingConfig
from max.serve import process_control
from max.serve.config import MetricRecordingMethod, Settings
from max.serve.pipelines import model_worker
from max.serve.process_control import SubprocessExit
from max.serve.scheduler.base import SchedulerProgress
from max.serve.scheduler.interface import Scheduler
from max.serve.telemetry.common import configure_logging
from max.serve.telemetry.metrics import NoopClient
from max.serve.worker_interface import ModelWorkerInterface, WorkerQueues
from max.serve.worker_interface._zmq_queue import generate_zmq_ipc_path

from maxvision.common.errors import ModelError, UserError
from maxvision.serve import quarantine, torchless
from maxvision.serve.wire import Inbox, forget, new_address
from maxvision.serve.worker import Batcher, Classifier, Runner, end_with_parent

torchless.show()  # whoever has hidden it did so for the imports above

VERSION = "26.7."
"""The versions of MAX that this file is written for."""

Load: TypeAlias = Callable[[], Classifier]


class WorkerEnded(Exception):
    """The model's process has ended.

    Attributes:
        told: Whether it has told the user why, in a sentence.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.told = str(cause) == str(TOLD)


TOLD = 2
"""Exit code of a process that has told the user what is wrong."""


def check_version() -> None:
    """Compares MAX's version with the one this file is written for.

    Raises:
        ModelError: If it is another.
    """
    version = metadata.version("max")
    if not version.startswith(VERSION):
        raise ModelError(
            f"the server needs MAX {VERSION}x but MAX {version} is installed;"
            f" run pip install 'max[serve]=={VERSION}*'"
        )


def settings(log_level: str) -> Settings:
    """Makes MAX's settings: no telemetry, and our logs beside MAX's."""
    os.environ["MAX_SERVE_DISABLE_TELEMETRY"] = "true"  # the process reads them too
    os.environ["OTEL_SDK_DISABLED"] = "true"
    made = Settings(
        MAX_SERVE_LOGS_CONSOLE_LEVEL=log_level.upper(),
        MAX_SERVE_LOGS_ENABLE_COMPONENTS="maxvision",
        MAX_SERVE_METRIC_RECORDING_METHOD=MetricRecordingMethod.NOOP,
        MAX_SERVE_DISABLE_TELEMETRY=True,
    )
    configure_logging(made)
    return made


@dataclass(frozen=True)
class _Runtime:
    pipeline_role: str = "prefill_and_decode"
    device_graph_capture: bool = False
    experimental_device_graph_synthesis: bool = False


@dataclass(frozen=True)
class _Place:
    device_specs: tuple[DeviceSpec, ...]


@dataclass(frozen=True)
class _Config:
    """As much of a ``PipelineConfig`` as the worker asks for; a real one wants a language model."""

    models: dict[str, _Place]
    runtime: _Runtime = _Runtime()
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    lora: None = None

    @property
    def model(self) -> Any:
        """Raises, as MAX's does for what has no language model."""
        raise ValueError("a classifier has no language model")


class _Queue(ModelWorkerInterface[Any, Any]):
    """The place of MAX's queues, which know one sender: the address of ours."""

    def __init__(self, address: str) -> None:
        self._address = address

    @asynccontextmanager
    async def model_worker_queues(self) -> AsyncIterator[WorkerQueues[Any, Any]]:
        """Opens the end of the model's process."""
        inbox: Any = Inbox(self._address)
        yield WorkerQueues(inbox, inbox, inbox)

    @asynccontextmanager
    async def model_worker_proxy(self) -> AsyncIterator[_Started]:
        """Opens nothing: whoever decodes links itself."""
        yield _Started()


class _Started:
    async def wait_until_connected(self, timeout_s: float | None) -> None:
        """Returns: the first picture shows whether there is a connection."""


class _Scheduler(Scheduler):
    """Lets a ``Batcher`` run in MAX's loop."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def run_iteration(self) -> SchedulerProgress:
        """Runs a step. There is always progress: the step itself waits, MAX need not."""
        self._batcher.step()
        return SchedulerProgress.MADE_PROGRESS


@dataclass(frozen=True)
class Spec:
    """What a model's process has to know.

    Attributes:
        load: Makes the model; it travels to the process by its name.
        device: ``cpu`` or ``gpu:N``.
        max_batch_size: Images that run together at most.
        delay: Seconds that the first image of a batch waits for others.
        embeds: Whether features will be asked for.
        memory: Of what runs, which outlives a process.
    """

    load: Load
    device: str
    max_batch_size: int
    delay: float
    embeds: bool
    memory: Any = field(default_factory=quarantine.memory)

    def __call__(self) -> Any:
        """Loads the model, in its process, and puts the batcher in the place of MAX's schedulers.

        Signals are the server's to act upon: it lets the requests end first.
        """
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            runner = Runner(self.load(), self.embeds)
            seconds = runner.warm(self.max_batch_size)
        except UserError as error:
            from maxvision.common.console import complain

            complain(str(error))
            raise SystemExit(TOLD) from None
        gc.collect()  # what loading left behind must not stay
        gc.freeze()  # or passes over MAX's modules would hold up batches

        def scheduler(_: Any, __: Any, ___: Any, queues: WorkerQueues[Any, Any], ____: Any) -> Any:
            inbox: Any = queues.request_queue
            guard = quarantine.Quarantine(self.memory)
            batcher = Batcher(runner, inbox, self.max_batch_size, self.delay, seconds, guard)
            return _Scheduler(batcher)

        model_worker.load_scheduler = scheduler
        return runner


class _Process(process_control._DebugSpawnProcess):
    """A model's process, which Ctrl-C never reaches, not even while its Python starts."""

    def start(self) -> None:
        """Starts it with SIGINT blocked, which it inherits."""
        resource_tracker.ensure_running()  # to start that unblocks it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def terminate(self) -> None:
        """Kills it: it ignores SIGTERM, and nobody waits for its answers when this is called."""
        self.kill()


process_control._DebugSpawnProcess = _Process


@asynccontextmanager
async def worker(spec: Spec, settings: Settings) -> AsyncIterator[str]:
    """Starts a process that runs a model, and ends it.

    Yields:
        The address that it listens at, once the model has run a picture.

    Raises:
        WorkerEnded: As soon as the process ends by itself, also within the block.
    """
    kind, _, index = spec.device.partition(":")
    place = DeviceSpec.cpu() if kind == "cpu" else DeviceSpec.accelerator(int(index or 0))
    address = new_address()
    started: AbstractAsyncContextManager[Any] = model_worker.start_model_worker(
        spec,
        _Config({"main": _Place((place,))}),
        settings,
        NoopClient(),
        _Queue(address),
        generate_zmq_ipc_path(),
        None,
    )
    try:
        async with AsyncExitStack() as stack:
            with torchless.hidden_in_children():
                await stack.enter_async_context(started)
            yield address
    except SubprocessExit as error:
        raise WorkerEnded(error) from None
    except RuntimeError as error:
        if isinstance(error.__cause__, SubprocessExit):  # before it was ready
            raise WorkerEnded(error.__cause__) from None
        raise
    finally:
        forget(address)


def command_line() -> dict[str, Any]:
    """Reads what ``max serve`` was told, within it: the options that were given, by name.

    Raises:
        ModelError: If this program is not ``max serve``.
    """
    import click
    from click.core import ParameterSource

    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "serve":
        raise ModelError("serve: this architecture is for max serve; use run_graph.py otherwise")
    return {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
