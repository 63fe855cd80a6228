"""One server on each GPU, or each group of cores, of a Ray cluster, behind one port.

    serve run maxvision.serve.ray_app:app model=resnet-cifar10 replicas=2

``serve`` is Ray's command, and this package what it imports. A replica is a whole server of
``maxvision serve``: the same app, with a model's process of its own, and beside a GPU with
processes that decode (``serve.decoders``) in the place of fronts. Ray's HAProxy hands requests
to the replicas and, as contrib/ray.env says, one that a replica left unanswered to another: an
image may be classified twice without harm. See docs/serving.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from maxvision.common.arguments import meant
from maxvision.common.console import way_to
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.serve.cores import claim
from maxvision.serve.options import Options, parse, parser

try:
    from ray import serve as ray_serve
except ImportError as error:
    raise ModelError(
        f"maxvision.serve.ray_app needs the package {error.name}; {way_to('ray')}"
    ) from None

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("maxvision.serve")

PATIENCE = 300.0
"""Seconds for which a replica may have no ready model before Ray puts another in its place."""

OURS = ("replicas", "max_replicas", "replicas_per_gpu", "cores", "surge")
"""Arguments that ``maxvision serve`` has no option for."""

_RAYS = ("--front-processes", "--max-connections", "--grpc-port", "--model-control-mode", "--help")

ROOM = 1024
"""Requests beyond its queue that a replica takes, so that it is the one to refuse them."""


def app(given: Mapping[str, Any]) -> ray_serve.Application:
    """Builds the application of ``serve run``, ``serve deploy`` and ``serve.run``.

    Args:
        given: ``replicas`` (1), ``max_replicas`` (as many: no autoscaling), ``replicas_per_gpu``
            (1), ``cores`` of each replica (1), ``surge`` (percent of replicas that an update may
            add), and every option of ``maxvision serve``, ``max_batch_size=16``, but those of
            connections, which Ray has; ``decode_threads`` says how many processes decode, see
            ``decoding``.

    Raises:
        ArgumentError: If an argument is not right.
    """
    return build(given)


def build(
    given: Mapping[str, Any], load: Callable[..., Any] | None = None
) -> ray_serve.Application:
    """Builds what ``app`` does, with a model that ``load`` makes, as in ``serve.server.run``.

    Raises:
        ArgumentError: If an argument is not right.
        ModelError: If there is no such model.
    """
    long = [
        each for action in parser()._actions for each in action.option_strings if each[1] == "-"
    ]
    known = [*OURS, *(each[2:].replace("-", "_") for each in long)]
    for name in given:
        if name.replace("-", "_") not in known:
            raise ArgumentError(f"there is no argument {name}{meant(name, known)}")
    rest = dict(given)
    replicas = _whole(rest, "replicas", 1)
    most = _whole(rest, "max_replicas", replicas)
    cores = _whole(rest, "cores", 1)
    sharing = _whole(rest, "replicas_per_gpu", 1)
    surge = _whole(rest, "surge", 100 if replicas == 1 < most else 0, low=0)
    if most < replicas:
        raise ArgumentError(
            f"max_replicas must be at least replicas ({replicas}) but is {most}; change either"
        )
    options = read(rest)
    from maxvision.runtime import artifact
    from maxvision.serve.server import batch_size
    from maxvision.weights import source

    if not artifact.is_here(options.model):  # told here, and not out of each replica
        source.find(options.model, options.revision)
    if options.device == "cpu" and sharing > 1:
        raise ArgumentError("replicas_per_gpu is for device=gpu; leave it out, or change device")
    gpus = 0 if options.device == "cpu" else 1 / sharing

    batch = batch_size(options, options.device)
    queue = options.max_queue_size or max(32 * batch, options.max_images_per_request)
    number: dict[str, Any] = {"num_replicas": replicas}
    if most > replicas:
        scaling = {"min_replicas": replicas, "max_replicas": most, "target_ongoing_requests": batch}
        number = {"autoscaling_config": scaling}
    deployment = Replica.options(  # type: ignore[attr-defined]
        ray_actor_options={"num_cpus": cores, "num_gpus": gpus},
        max_ongoing_requests=queue + ROOM,
        max_surge_percent=surge,
        graceful_shutdown_timeout_s=options.drain_timeout,
        logging_config={"enable_access_log": False},
        **number,
    )
    bound: ray_serve.Application = deployment.bind(options, cores, load, sharing)
    return bound


def read(given: Mapping[str, Any]) -> Options:
    """Reads the options of ``maxvision serve`` from arguments by name.

    Raises:
        ArgumentError: If one is not right; it says what ``maxvision serve`` would.
    """
    argv = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if option in ("--host", "--port"):
            raise ArgumentError(f"{name}: address and port are Ray's; use serve start {option}")
        if option in _RAYS:
            raise ArgumentError(
                f"{name}: connections are Ray's, a replica is a process; leave it out"
            )
        if value is True or value == "true":
            argv.append(option)
        elif isinstance(value, (list, tuple)):
            argv += [f"{option}={each}" for each in value]
        elif value is not False and value != "false":
            argv.append(f"{option}={value}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = parse(argv)
    except SystemExit:
        sentence = said.getvalue().partition("error: ")[2].partition("\n")[0]
        raise ArgumentError(sentence) from None
    if options.others:
        raise ArgumentError("model: a replica has one model; deploy an application for each")
    if options.device.startswith("gpu:"):
        raise ArgumentError(
            f"device {options.device}: Ray chooses the GPU of each replica; use gpu or cpu"
        )
    if options.device == "auto":
        from max.driver import accelerator_count

        options = dataclasses.replace(options, device="gpu" if accelerator_count() else "cpu")
    return dataclasses.replace(options, instances=options.instances or 1)


def decoding(options: Options, cores: int) -> int:
    """Chooses how many processes of a replica decode; 0 for threads, as many as it has cores.

    Beside a GPU one core is left to what speaks HTTP; on a CPU the model needs them all.
    """
    if options.decode_threads:
        return options.decode_threads
    return 0 if options.device == "cpu" else cores - 1


def _whole(given: dict[str, Any], name: str, default: int, low: int = 1) -> int:
    value = given.pop(name, default)
    if not str(value).isdecimal() or int(value) < low:
        raise ArgumentError(f"{name} must be a whole number of at least {low} but is {value!r}")
    return int(value)


class Named:
    """Calls a request what Ray calls it, which is what X-Request-ID says of every answer of Ray.

    That is the client's own X-Request-ID if it sent one; no log takes what is not a plain word.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        from maxvision.serve.app import ID

        given = dict(scope.get("headers", ())).get(b"x-request-id", b"")
        scope[ID] = given.decode() if re.fullmatch(rb"[\w.:-]{1,64}", given) else None
        await self._app(scope, receive, send)


@ray_serve.deployment(name="maxvision")
@ray_serve.ingress()
class Replica:
    """A server without a port: Ray has one, and calls the app.

    Args:
        options: What to serve.
        cores: How many to run on.
        load: Makes the model.
        sharing: Replicas that a GPU is for.
    """

    async def __init__(  # type: ignore[misc]
        self,
        options: Options,
        cores: int,
        load: Callable[..., Any] | None = None,
        sharing: int = 1,
    ) -> None:
        from maxvision.runtime.devices import share_gpu
        from maxvision.serve.decoders import Decoders
        from maxvision.serve.images import Decoder
        from maxvision.serve.models import Models
        from maxvision.serve.server import make_supervisors, queue_size

        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
            log.warning("RAY_SERVE_ENABLE_HA_PROXY=1 is not set: clients get errors when a replica"
                " ends; set it as contrib/ray.env does")  # fmt: skip
        if options.device == "cpu":
            claim(cores)
        card, supervisors = make_supervisors(options, load)
        if card.device != "cpu":
            share_gpu(sharing * len(supervisors.members))
        keeping = [supervisors.run()]
        decoder: Decoder
        if count := decoding(options, cores):
            decoder = processes = Decoders(card.preprocess, options.max_pixels, count)
            decoder.on_gpu = card.decodes
            keeping.append(processes.keep())
        else:
            decoder = Decoder(card.preprocess, options.max_pixels, cores, None, card.decodes)
        self._models = Models(options)
        self._models.add(card, options, supervisors, decoder, queue_size(options, card.device))
        self._seen = time.monotonic()
        self._keeping = asyncio.gather(*keeping)
        while not self._models.ready:
            if self._keeping.done():
                self._keeping.result()
            await asyncio.sleep(0.05)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Makes the app, once the model is ready."""
        from maxvision.serve.app import make_app

        made = make_app(self._models)
        made.add_middleware(Named)
        return made

    async def check_health(self) -> None:
        """Says whether this replica is worth keeping; a model's process may be started anew.

        Raises:
            ModelError: If there is none that is ready for ``PATIENCE``.
        """
        now = time.monotonic()
        if self._models.ready:
            self._seen = now
        if self._keeping.done() or now - self._seen > PATIENCE:
            raise ModelError("the model is not ready; the replica's log says why")

    async def __del__(self) -> None:
        """Ends its processes; Ray calls and awaits this when every request is answered."""
        if keeping := getattr(self, "_keeping", None):  # or __init__ has raised
            keeping.cancel()
            await asyncio.wait({keeping})
            self._models.close()
