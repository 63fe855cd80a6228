"""The command line: what a server is told, and the defaults.

Every option is also a variable of the environment, ``--max-queue-size`` for example
``MAXVISION_MAX_QUEUE_SIZE``, which is how the plain ``max serve`` takes those that MAX has not.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from maxvision.common.arguments import (
    DEFAULT_MODEL,
    MODEL,
    SHARED,
    Parser,
    number,
    whole,
)
from maxvision.common.pictures import MAX_PIXELS
from maxvision.serve.access import STYLES

HELP = """\
Serves a classifier over HTTP: POST an image to /v1/classify, see /docs for the rest."""

EXAMPLES = """\
examples:
  maxvision serve                                    EfficientNet-Lite0: 1,000 classes
  maxvision serve --model microsoft/resnet-50 --device gpu --dtype bfloat16 --host 0.0.0.0
  MAXVISION_API_KEY=secret maxvision serve --model ./my-cvt
  maxvision serve --model resnet-cifar10 --model microsoft/resnet-50 --max-batch-size 8 \\
    --max-batch-size 32                              two models: a value for all, or one for each
  curl -s localhost:8000/v1/classify -H 'Content-Type: image/jpeg' --data-binary @cat.jpg

Every option may also be set in the environment: --max-queue-size is MAXVISION_MAX_QUEUE_SIZE.

exit codes:
  0  ended by SIGTERM or Ctrl-C, after every request was answered
  1  the model's process failed for good, or requests were still open when the time to drain ended
  2  the model, the device or the arguments are wrong; the message says what to do"""

EACH = (
    "served_model_name",
    "revision",
    "labels",
    "device",
    "dtype",
    "max_batch_size",
    "max_batch_delay_ms",
    "max_queue_size",
    "instances",
)
"""What may be said once for all models, or once for each in their order."""

CONTROL = ("none", "explicit")
"""Who loads and unloads models, in Triton's words: nobody, or whoever asks."""

LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Options:
    """What a server is told; ``parse`` checks it and has the defaults.

    Attributes:
        model: What ``runtime.classifier.load`` takes.
        served_model_name: What clients call the model; by default its name without the folder.
        revision: Branch, tag or commit on the hub.
        labels: A file with a name for each class, in place of the model's (weights.read_labels).
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        grpc_port: Port for KServe's protocol over gRPC; 0 takes a free one, None is none.
        device: ``auto``, ``cpu``, ``gpu`` or ``gpu:N``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        tf32: Whether NVIDIA's tensor cores may round float32 to TF32.
        sparse: What runs pruned layers, as in ``runtime.load``.
        decode: ``auto``, ``cpu``, ``gpu`` or ``fast``, as in ``runtime.load``.
        embeddings: Whether /v1/embeddings answers, whose graph is compiled too.
        max_batch_size: Images that run together; None for 8 on a CPU and 64 on a GPU.
        max_batch_delay_ms: How long the first image of a batch waits for others, if nothing runs.
        max_queue_size: Images that may be under way at once; None for 32 batches.
        max_images_per_request: Images of one request.
        max_connections: Connections that may be open at once.
        max_body_bytes: Bytes of one request's body.
        max_pixels: Pixels of one image, counted before it is decoded.
        instances: Processes that run the model on its device; None for two where a GPU decodes for
            many cores, and one elsewhere.
        front_processes: Processes that decode and speak HTTP; None for a number by the cores.
        decode_threads: Threads of each that decode; None for one a core, together. Of a replica
            of Ray: processes, see ``serve.ray_app.decoding``.
        body_timeout: Seconds that a client may take to send its body.
        drain_timeout: Seconds that requests may take to end after SIGTERM.
        api_key: What a client has to know; None for no check.
        allow_media_domain: Hosts that image URLs may name; none for no URLs.
        forwarded_allow_ips: Addresses and networks of proxies whose X-Forwarded-For is believed.
        access_log: ``text``, ``json`` or ``off``: what goes to standard output, a line a request.
        log_level: Of what goes to standard error.
        model_control_mode: ``explicit`` lets clients load and unload the models that were named.
        others: Of the second model and those behind it: the same but for ``model`` and ``EACH``.
        debug: Whether an error is shown as a traceback.
    """

    model: str = DEFAULT_MODEL
    served_model_name: str | None = None
    revision: str | None = None
    labels: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    tf32: bool = True
    sparse: str = "auto"
    decode: str = "auto"
    embeddings: bool = True
    max_batch_size: int | None = None
    max_batch_delay_ms: float = 0.0
    max_queue_size: int | None = None
    max_images_per_request: int = 32
    max_connections: int = 4096
    max_body_bytes: int = 32 * 2**20
    max_pixels: int = MAX_PIXELS
    instances: int | None = None
    front_processes: int | None = None
    decode_threads: int | None = None
    body_timeout: float = 30.0
    drain_timeout: float = 30.0
    api_key: str | None = None
    allow_media_domain: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    access_log: str = "text"
    log_level: str = "warning"
    model_control_mode: str = "none"
    others: tuple[Options, ...] = ()
    debug: bool = False

    @property
    def models(self) -> tuple[Options, ...]:
        """What is told of each model, the first being the one of requests that name none."""
        return (replace(self, others=()), *self.others)


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(
        prog="maxvision serve", usage="%(prog)s [options]", description=HELP, epilog=EXAMPLES
    )
    add = made.add_argument
    each: dict[str, Any] = {"action": "append"}
    add("--model", **each, metavar="M", help=f"{MODEL} (default: {DEFAULT_MODEL}, which knows"
        " 1,000 classes); may be repeated: then what is said of models is said once for all, or"
        " once for each")  # fmt: skip
    add("--served-model-name", **each, metavar="NAME", help="what clients call it")
    for name in ("revision", "labels", "device", "dtype"):
        add(f"--{name}", **SHARED[name] | each)
    made.add_shared("tf32", "sparse", "decode", "threads")
    add("--model-control-mode", choices=CONTROL, help="explicit: let clients load and unload"
        " models, by Triton's repository API (default: %(default)s)")  # fmt: skip
    add("--host", metavar="H", help="address to listen on (default: %(default)s;"
        " 0.0.0.0 for every network)")  # fmt: skip
    add("--port", type=whole(0, 65535), metavar="P", help="default: %(default)s; 0: a free one")
    add("--grpc-port", type=whole(0, 65535), metavar="P", help="speak KServe's protocol over gRPC"
        " at this port, too; needs the extra grpc (default: do not)")  # fmt: skip
    add("--no-embeddings", dest="embeddings", action="store_false", help="compile and hold no"
        " graph for /v1/embeddings")  # fmt: skip
    add("--max-batch-size", **each, type=whole(1, 4096), metavar="N",
        help="images that run together (default: 8 on a CPU, 64 on a GPU)")  # fmt: skip
    add("--max-batch-delay-ms", **each, type=number(0, 10_000), metavar="MS", help="how long a"
        " batch waits to fill where nothing else runs (default: 0)")  # fmt: skip
    add("--max-queue-size", **each, type=whole(1, 1_000_000), metavar="N",
        help="images under way at once, more are answered 429 (default: 32 batches)")  # fmt: skip
    add("--max-images-per-request", type=whole(1, 10_000), metavar="N", help="%(default)s")
    add("--max-connections", type=whole(1, 1_000_000), metavar="N",
        help="open at once, more are answered 503 (default: %(default)s)")  # fmt: skip
    add("--max-body-bytes", type=whole(1, 2**33), metavar="N", help="%(default)s")
    add("--max-pixels", type=whole(1, MAX_PIXELS), metavar="N",
        help="of one image, counted before it is decoded (default: %(default)s)")  # fmt: skip
    add("--instances", **each, type=whole(1, 64), metavar="N", help="processes that run the model"
        " on its device (default: 2 where a GPU decodes for 8 cores or more, else 1)")  # fmt: skip
    add("--front-processes", type=whole(1, 1024), metavar="N", help="processes that decode and"
        " speak HTTP (default: a quarter of the cores, all but one beside a GPU, two in three where"
        " that decodes)")  # fmt: skip
    add("--decode-threads", type=whole(1, 1024), metavar="N",
        help="of each of them (default: one a core, together)")  # fmt: skip
    add("--body-timeout", type=number(0.1, 3600), metavar="S",
        help="seconds a client has to send its request (default: %(default)s)")  # fmt: skip
    add("--drain-timeout", type=number(0, 3600), metavar="S",
        help="seconds that requests have to end after SIGTERM (default: %(default)s)")  # fmt: skip
    add("--api-key", metavar="KEY", help="ask every client for it, as a bearer token;"
        " better set as MAXVISION_API_KEY, which other users cannot see")  # fmt: skip
    add("--allow-media-domain", action="append", metavar="HOST", help="let clients name images"
        " by URL on this host; may be repeated")  # fmt: skip
    add("--forwarded-allow-ips", action="append", metavar="IP", help="believe X-Forwarded-For of"
        " this proxy, an address, a network such as 10.0.0.0/8, or *; may be repeated")  # fmt: skip
    add("--access-log", choices=STYLES, help="a line a request on standard output"
        " (default: %(default)s)")  # fmt: skip
    add("--log-level", choices=LEVELS, help="of what goes to standard error"
        " (default: %(default)s)")  # fmt: skip
    made.set_defaults(**{f.name: f.default for f in fields(Options) if f.name not in _NO_OPTION})
    made.set_defaults(allow_media_domain=None, forwarded_allow_ips=None)
    made.set_defaults(**dict.fromkeys(("model", *EACH)))
    return made


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Options:
    """Parses the arguments; says in one sentence what is wrong and exits with 2 if they are."""
    environ = os.environ if environ is None else environ
    made = parser()
    given = _from(environ, made)
    made.named = _variable
    made.parse_args(given)  # alone, for a mistake in them to name the variable
    made.named = str
    args = made.parse_args([*given, *argv])
    said = made.parse_args(argv)
    for name in ("model", *EACH):  # the command line's are in the place of the environment's
        if getattr(said, name) is not None:
            setattr(args, name, getattr(said, name))
    if args.api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", args.api_key):
        made.error("--api-key takes visible ASCII characters without spaces")
    hosts = tuple(host.lower() for host in args.allow_media_domain or ())
    for host in hosts:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", host):
            made.error(f"--allow-media-domain takes a host such as example.org, not {host!r}")
    proxies = tuple(args.forwarded_allow_ips or ())
    for proxy in proxies:
        if proxy != "*" and not _is_network(proxy):
            made.error(
                f"--forwarded-allow-ips: {proxy!r} is neither an address nor a network; write"
                " 10.0.0.1, 10.0.0.0/8 or *"
            )
    if (queue := min(args.max_queue_size or (), default=None)) and (
        queue < args.max_images_per_request
    ):
        made.error(
            f"--max-queue-size must be at least --max-images-per-request"
            f" ({args.max_images_per_request}) but is {queue}; change either"
        )
    lists = {"allow_media_domain": hosts, "forwarded_allow_ips": proxies}
    rows = [Options(**{**vars(args), **lists, **row}) for row in _rows(args, made)]
    return replace(rows[0], others=tuple(rows[1:]))


def _rows(args: argparse.Namespace, made: Parser) -> list[dict[str, Any]]:
    """Gives each model what is said of it: ``model`` and ``EACH``."""
    models = args.model or [DEFAULT_MODEL]  # MAXVISION_MODEL= is none, too
    rows = [{"model": model or DEFAULT_MODEL} for model in models]
    for name in EACH:
        values = getattr(args, name) or [getattr(Options, name)]
        if len(values) not in (1, len(models)):
            made.error(
                f"--{name.replace('_', '-')} is there {len(values)} times and --model"
                f" {len(models)} {'time' if len(models) == 1 else 'times'}; say it once for all, or"
                " once for each in their order"
            )
        for row, value in zip(rows, values * len(models), strict=False):
            row[name] = value
    names = args.served_model_name or []
    if len(names) == 1 < len(models):
        made.error("--served-model-name must be said for each --model; names must differ")
    return rows


_NO_OPTION = ("debug", "others")


def _variable(option: str) -> str:
    return "MAXVISION_" + option[2:].replace("-", "_").upper()


def _from(environ: Mapping[str, str], parser: argparse.ArgumentParser) -> list[str]:
    argv = []
    for action in parser._actions:
        name = action.option_strings[-1]
        value = environ.get(_variable(name))
        if value is None or name in ("--help", "--threads"):  # of threads cores() reads it
            continue
        if isinstance(action, argparse._AppendAction):
            argv += [f"{name}={each}" for each in value.split(",") if each]
        elif action.nargs == 0:
            argv += [name] * (value not in ("", "0", "false"))
        else:
            argv.append(f"{name}={value}")
    return argv


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
