"""Runs a server from its first line to its exit code."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from maxvision.common.console import Unbuffered, complain, exit_code, way_to
from maxvision.common.errors import ArgumentError, DeviceError, ModelError, UserError
from maxvision.common.host import cores
from maxvision.runtime.preprocess import Preprocess
from maxvision.serve import torchless
from maxvision.serve.options import Options, parse

if TYPE_CHECKING:
    from maxvision.serve.core import Card
    from maxvision.serve.models import Models
    from maxvision.serve.repository import Repository
    from maxvision.serve.supervisor import Supervisors

log = logging.getLogger("maxvision.serve")

MANY_CORES = 8
"""From which on the processes that speak HTTP can keep more than one model's process busy."""

GRACE = 1.0
"""Seconds after SIGTERM for which new requests are answered 503, so that a balancer notices."""


def run(options: Options, load: Callable[..., Any] | None = None) -> int:
    """Serves until it is told to end.

    Args:
        options: What to serve, and how.
        load: Makes the model, in its process; called as ``runtime.classifier.load`` is, which it is
            if None. It travels by its name.

    Returns:
        The exit code, see ``maxvision serve --help``.
    """
    torchless.hide()

    def serve() -> int:
        try:
            listening = bind(options.host, options.port)
            with bind_grpc(options) as port:
                return _serve(replace(options, grpc_port=port), listening, load)
        except KeyboardInterrupt:  # before its loop takes signals
            return 0

    with redirect_stdout(Unbuffered.of(sys.stdout)), redirect_stderr(Unbuffered.of(sys.stderr)):
        return exit_code(serve, options, "maxvision serve", "serve", internal=1)


def take_over() -> int:
    """Serves in the place of ``max serve``, with what its command line said."""
    from maxvision.serve import engine

    try:
        given = engine.command_line()
        argv = [f"--model={given['model_path']}", "--host=0.0.0.0", *_arguments(given)]
    except UserError as error:
        complain(str(error))
        return 2
    return run(parse(argv))


_SAME = {  # of max serve: of ours
    "host": "--host",
    "port": "--port",
    "max_batch_size": "--max-batch-size",
    "max_queue_size": "--max-queue-size",
    "served_model_name": "--served-model-name",
    "huggingface_model_revision": "--revision",
    "quantization_encoding": "--dtype",
}


def _arguments(given: dict[str, Any]) -> list[str]:
    argv = [f"{ours}={given[theirs]}" for theirs, ours in _SAME.items() if theirs in given]
    devices = given.get("devices")
    if isinstance(devices, (list, tuple)) and len(devices) == 1:
        devices = devices[0]
    if isinstance(devices, int):
        devices = f"gpu:{devices}"
    if devices is not None and not isinstance(devices, str):
        raise DeviceError("--devices takes one device; start a server for each GPU")
    return argv + ([f"--device={devices}"] if devices not in (None, "default") else [])


def bind(host: str, port: int) -> socket.socket:
    """Takes the port, before anything that takes long.

    Raises:
        UserError: If it is not to be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, proto)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(2048)
    except OSError as error:
        raise UserError(_not_bound(host, port, error)) from None
    taken.setblocking(False)
    return taken


@contextmanager
def bind_grpc(options: Options) -> Iterator[int | None]:
    """Takes the port for gRPC while the block runs, if one is wanted; gives its number.

    Raises:
        UserError: If it is not to be had, or the package is missing.
    """
    if options.grpc_port is None:
        yield None
        return
    try:
        from maxvision.serve import rpc
    except ImportError as error:
        raise ModelError(f"--grpc-port needs the package {error.name}; {way_to('grpc')}") from None
    try:
        taken = rpc.reserve(options.host, options.grpc_port)
    except OSError as error:
        told = _not_bound(options.host, options.grpc_port, error)
        raise UserError(told.replace("--port", "--grpc-port")) from None
    with taken:
        yield taken.getsockname()[1]


def _not_bound(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--host {host}: this machine has no such address ({error.strerror}); choose another,"
            " or 0.0.0.0 for every network"
        )
    used = error.errno == errno.EADDRINUSE
    problem = "is in use" if used else f"cannot be opened ({error.strerror or error})"
    return (
        f"--port {port}: port {port} of {host} {problem}; choose another with --port, or 0 for any"
    )


def _serve(options: Options, listening: socket.socket, load: Callable[..., Any] | None) -> int:
    import uvloop

    from maxvision.runtime.devices import share_gpu
    from maxvision.serve.limits import Board
    from maxvision.serve.repository import Repository

    made = [make_supervisors(each, load) for each in options.models]
    cards, supervisors = [card for card, _ in made], [each for _, each in made]
    devices = [card.device for card, kept in made for _ in kept.members]
    share_gpu(max((devices.count(each) for each in {*devices} if each != "cpu"), default=0))
    names = [card.name for card in cards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ArgumentError(
            f"two models are called {twice[0]}; say --served-model-name for each to name them"
        )

    def busy(name: str) -> int:
        return sum(face.board.all(Board.IMAGES + names.index(name)))

    kept = dict(zip(names, supervisors, strict=True))
    repository = Repository(kept, busy, options.drain_timeout)
    count = max(front_count(options, card) for card in cards)
    face: _One | _Many
    if count > 1:
        face = _Many(cards, options, kept, listening, count, repository)
    else:
        face = _One(_decoding(cards, options, supervisors, repository), listening)
    try:
        return uvloop.run(_Server(cards, options, repository, listening, face).run())
    finally:
        face.close()
        gc.collect()  # lets go of semaphores, which end with their objects and are told as leaked


def make_supervisors(
    options: Options, load: Callable[..., Any] | None = None
) -> tuple[Card, Supervisors]:
    """Reads a model's card, and makes what runs its processes once its ``run`` is awaited.

    Raises:
        ModelError: If the model cannot be found or read.
        DeviceError: If the device is not to be had.
    """
    from maxvision.runtime import classifier
    from maxvision.serve import engine
    from maxvision.serve.supervisor import Supervisor, Supervisors

    engine.check_version()
    settings = engine.settings(options.log_level)
    card = read_card(options)
    make = functools.partial(
        load or classifier.load,
        options.model,
        device=card.device,
        dtype=options.dtype,
        tf32=options.tf32,
        sparse=options.sparse,
        decode="gpu" if card.decodes else "cpu",
        revision=options.revision,
        progress=functools.partial(complain, kind=""),
    )
    delay = options.max_batch_delay_ms / 1e3
    batch = batch_size(options, card.device)
    blank = np.zeros((card.preprocess.height, card.preprocess.width, 3), np.uint8)
    members = [
        Supervisor(engine.Spec(make, card.device, batch, delay, card.embeds), settings, blank)
        for _ in range(instance_count(options, card))
    ]
    return card, Supervisors(members)


def _decoding(
    cards: Sequence[Card],
    options: Options,
    supervisors: Sequence[Supervisors],
    repository: Repository,
) -> Models:
    from maxvision.serve.images import Decoder
    from maxvision.serve.models import Models

    models, decoder = Models(options), None
    threads = options.decode_threads or cores()
    for card, each, supervisor in zip(cards, options.models, supervisors, strict=True):
        decoder = Decoder(card.preprocess, options.max_pixels, threads, decoder, card.decodes)
        models.add(card, each, supervisor, decoder, queue_size(each, card.device))
    if options.model_control_mode == "explicit":
        models.change = repository.change
    return models


def batch_size(options: Options, device: str) -> int:
    """Chooses how many images run together at most."""
    return options.max_batch_size or (8 if device == "cpu" else 64)


def queue_size(options: Options, device: str) -> int:
    """Chooses how many images may be under way."""
    batches = 32 * batch_size(options, device)
    return options.max_queue_size or max(batches, options.max_images_per_request)


def instance_count(options: Options, card: Card) -> int:
    """Chooses how many processes run a model: two where one cannot keep up with a GPU's decoder."""
    return options.instances or (2 if card.decodes and cores() >= MANY_CORES else 1)


def front_count(options: Options, card: Card) -> int:
    """Chooses how many processes speak HTTP and decode.

    A model on a CPU needs most of the cores. Beside a GPU all decode but one, which feeds it; where
    the GPU decodes, two in three are enough to speak HTTP.
    """
    if options.front_processes:
        return options.front_processes
    if card.device == "cpu":
        return max(1, cores() // 4)
    return max(1, 2 * cores() // 3 if card.decodes else cores() - 1)


def read_card(options: Options) -> Card:
    """Reads what is known of a model without running it.

    Raises:
        ModelError: If it cannot be found or read.
        DeviceError: If the device is not to be had.
    """
    from max.driver import CPU, accelerator_api, accelerator_count

    from maxvision import weights
    from maxvision.runtime import artifact as package
    from maxvision.runtime import devices, nvjpeg
    from maxvision.serve.core import Card

    device, dtype = options.device, options.dtype.replace("auto", "float32")
    source: package.Package | weights.Checkpoint
    packed = package.is_here(options.model)
    if packed:
        source = package.read(options.model)
        device = "cpu" if source.target.api == "cpu" else device.replace("auto", "gpu")
        dtype = source.dtype
    else:
        source = weights.load(
            options.model, revision=options.revision, progress=functools.partial(complain, kind="")
        )
        if device == "auto":
            device = "gpu" if accelerator_count() else "cpu"
    if device == "cpu":
        devices.find_dtype(dtype, CPU())
    elif int(device.partition(":")[2] or 0) >= accelerator_count():
        devices.find_device(device)  # which says what is wrong; a GPU that is there stays closed
    if source.channels != 3:
        raise ModelError(
            f"{source.name}: the model takes pictures with {source.channels} channels but the"
            " server decodes them to 3; use another model"
        )
    name = options.served_model_name or source.name
    if options.served_model_name is None and os.path.exists(options.model):
        name = os.path.basename(os.path.abspath(options.model))  # the folder is nobody's business
    labels = source.labels
    if options.labels is not None:
        labels = weights.match_labels(weights.read_labels(options.labels), labels, name)
    preprocess = replace(Preprocess.from_config(source.preprocess), fast=options.decode == "fast")
    device = "gpu:0" if device == "gpu" else device
    api = "cpu" if device == "cpu" else accelerator_api()
    return Card(
        name=name,
        labels=labels,
        preprocess=preprocess,
        embeds=options.embeddings and not packed,
        family=source.family,
        device=device,
        dtype=dtype,
        decodes=nvjpeg.chosen(options.decode, device, api, preprocess),
    )


Told: TypeAlias = Callable[[int, "FrameType | None"], None]


class _One:
    """Speaks HTTP in the server's own process."""

    def __init__(self, models: Models, listening: socket.socket) -> None:
        from maxvision.serve.app import make_app
        from maxvision.serve.protocol import http_server

        self.board = models.board
        self._models = models
        self._socket = listening
        self._uvicorn = http_server(make_app(models))

    @property
    def ready(self) -> bool:
        """Whether a picture would be classified, by any model."""
        return self._models.ready

    async def run(self, told: Told) -> None:
        """Serves until ``end``; signals go to ``told``."""
        from maxvision.serve.protocol import over_grpc

        self._uvicorn.handle_exit = told
        async with over_grpc(self._models):
            await self._uvicorn.serve(sockets=[self._socket])

    def drain(self) -> None:
        """Refuses what is new."""
        self._models.draining = True

    def end(self, force: bool) -> None:
        """Ends, with ``force`` without waiting for anything."""
        self._uvicorn.force_exit = force
        self._uvicorn.should_exit = True

    def close(self) -> None:
        """Lets the threads that decode end."""
        self._models.close()


class _Many:
    """Speaks HTTP in processes of their own."""

    def __init__(
        self,
        cards: Sequence[Card],
        options: Options,
        supervisors: Mapping[str, Supervisors],
        listening: socket.socket,
        count: int,
        repository: Repository,
    ) -> None:
        from maxvision.serve.front import Hello
        from maxvision.serve.fronts import Fronts

        threads = options.decode_threads or max(2, -(-cores() // count))
        queues = tuple(
            queue_size(each, card.device) for each, card in zip(options.models, cards, strict=True)
        )
        instances = tuple(len(each.members) for each in supervisors.values())
        hello = Hello(tuple(cards), options, queues, instances, count, 0, threads)
        self._fronts = Fronts(hello, listening, repository.change)
        self.board = self._fronts.board
        self._supervisors = supervisors
        for each in supervisors.values():
            each.on_change(self._changed)

    @property
    def ready(self) -> bool:
        """Whether a picture would be classified, by any model and whichever process it comes to."""
        return all(each.ready for each in self._supervisors.values()) and self._fronts.up

    async def run(self, told: Told) -> None:
        """Serves until ``end``; signals go to ``told``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told, number, None)
        await self._fronts.run()

    def drain(self) -> None:
        """Refuses what is new."""
        self._fronts.tell(draining=True)

    def end(self, force: bool) -> None:
        """Ends, with ``force`` without waiting for anything."""
        self._fronts.end(force)

    def close(self) -> None:
        """Does nothing: nothing decodes in this process."""

    def _changed(self) -> None:
        from maxvision.serve.front import ModelState, ProcessState

        self._fronts.tell(
            models={
                name: ModelState(
                    known.loaded,
                    tuple(
                        ProcessState(
                            each.address if each.ready else None,
                            each.starts,
                            each.batch_limit,
                            each.busy,
                            each.decoding,
                        )
                        for each in known.members
                    ),
                )
                for name, known in self._supervisors.items()
            }
        )


class _Server:
    """What speaks HTTP, beside what keeps the models' processes."""

    def __init__(
        self,
        cards: Sequence[Card],
        options: Options,
        repository: Repository,
        listening: socket.socket,
        face: _One | _Many,
    ) -> None:
        self._cards = cards
        self._options = options
        self._repository = repository
        self._socket = listening
        self._face = face
        self._signals = 0
        self._code = 0
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serves until a signal comes or the model cannot be run; returns the exit code."""
        for card in self._cards:
            self._announce(
                f"loading {card.name}, which knows {len(card.labels):,} classes; {self._url()}"
                " answers 503 until then"
            )
        self._repository.start(self._ended)
        saying = asyncio.ensure_future(self._say_ready())
        try:
            await self._face.run(self._told)
        finally:
            saying.cancel()
            await self._repository.close()
        return self._code

    def _told(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain at the first signal, and ends at once at the second."""
        self._signals += 1
        if self._signals > 1:
            self._code = 1
            self._face.end(force=True)
            return
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain(GRACE if sig == signal.SIGTERM else 0))

    async def _drain(self, grace: float) -> None:
        self._face.drain()
        board = self._face.board
        clock = asyncio.get_running_loop().time
        begun = clock()
        while clock() - begun < grace or any(board.all(board.REQUESTS)):
            if clock() - begun > max(grace, self._options.drain_timeout):
                self._code = 1
                break
            await asyncio.sleep(0.02)
        self._face.end(force=False)

    def _ended(self, keeping: asyncio.Future[None]) -> None:
        if keeping.cancelled():
            return
        error = keeping.exception()
        self._code = 2 if getattr(error, "told", False) else 1
        if self._code == 1:
            log.critical("the model's process cannot be kept: %s", error)
        self._face.end(force=False)

    async def _say_ready(self) -> None:
        while not self._face.ready:
            await asyncio.sleep(0.05)
        url = self._url()
        every = ", on every network" if self._options.host in ("0.0.0.0", "::", "") else ""
        for card in self._cards:
            self._announce(
                f"{card.name} on {card.device}, {card.dtype}: {url}{every}, Ctrl-C ends it"
            )
        if self._options.grpc_port is not None:
            self._announce(f"  gRPC (KServe v2) at port {self._options.grpc_port}")
        key = "-H 'Authorization: Bearer KEY' " if self._options.api_key else ""
        self._announce(
            f"  curl -s {url}/v1/classify {key}-H 'Content-Type: image/jpeg'"
            " --data-binary @examples/cat.jpg"
        )

    def _url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @staticmethod
    def _announce(line: str) -> None:
        sys.stderr.write(f"{line}\n")  # at once: threads write there, too; stdout is the log's
