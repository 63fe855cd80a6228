"""The command ``maxvision bench``: what it measures, and every option."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxvision.common.arguments import (
    DTYPES,
    SPARSE,
    Parser,
    counts,
    device,
    meant,
    names,
    number,
    whole,
)
from maxvision.common.console import exit_code, run_program
from maxvision.common.errors import ArgumentError

_HELP = """\
Measure maxvision beside its peers, on one machine, in one run.

  models    whole networks: model x dtype x batch, beside torch.compile and eager torch
  ops       each distinct layer of a network, beside torch's operator (cuDNN, cuBLAS, oneDNN)
  sparse    a pruned model, dense and sparse: each layer and the whole; break-even tables
  profile   where one run's time goes, kernel by kernel, layer by layer
  compile   graphs for a GPU on another machine, which needs no compiler with --precompiled
  training  steps of training: forward, backward and SGD, beside torch.compile and eager torch
  serve     our server under load, beside LitServe: latency, throughput, what bounds them
  bridge    the ops of torch_ops beside torch's own, forward and backward, called from torch
  levels    the blocks and models of examples/levels, from eager torch to our ops (docs/levels.md)
  universe  the classifiers of timm and torchvision: which convert, and how far from torch
  report    the tables and plots of files that --json wrote, such as bench/results/*.json
"""
_EXAMPLES = """\
examples:
  maxvision bench models --models resnet-50,cvt-13 --dtypes bfloat16 --batches 1,32,256
  maxvision bench models --device cpu --batches 1 --json cpu.json
  maxvision bench ops --models resnet-50 --dtypes bfloat16 --batches 1,256 --json layers.json
  maxvision bench profile --models resnet-50 --dtypes bfloat16 --batches 1 --trace trace.json
  maxvision bench compile --target sm_90a --models resnet-50 --dtypes bfloat16 --out compiled
  maxvision bench serve --model resnet-50 --concurrency 1,16,64 --rates 100,200 --json serve.json
  maxvision bench serve --servers ray --replicas 1,2 --device gpu --replica-cores 12
  maxvision bench sparse --model r50-90 --device cpu
  maxvision bench sparse --model resnet-50 --device cpu --densities 0.5,0.2,0.1,0.05,0.01 --table
  maxvision bench report bench/results/2026-11-24-h200-models.json --plots .

exit codes: 0 done; 1 a result was wrong; 2 a wrong argument, device or model
"""
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _run(options), options, "maxvision bench", "bench")


def _run(options: argparse.Namespace) -> int:
    if options.command == "levels" and options.device == "cpu":  # before triton is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return int(importlib.import_module(f"maxvision.bench.{options.command}").run(options))


def parser() -> Parser:
    """Describes every option."""
    top = Parser(prog="maxvision bench", description=_HELP, epilog=_EXAMPLES)
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def command(name: str, help: str, *shared: str, **defaults: Any) -> Callable[..., Any]:
        """Adds a command with options that others have too; returns what adds its own."""
        made = commands.add_parser(name, help=help)
        for option in shared:
            alias = ["--model"] * (option == "models")
            made.add_argument(f"--{option}", *alias, **_shared(option))
        made.set_defaults(**defaults)
        return made.add_argument

    # fmt: off
    measured = ("models", "dtypes", "batches", "device", "tf32", "precompiled", "json")

    add = command("models", "whole networks beside their peers", *measured, "threads", "peers",
                  "seconds", batches=[1, 32, 256], seconds=2.0)
    add("--sparse", default="auto", choices=SPARSE,
        help="what runs pruned layers of ours (default: auto)")
    add("--against", type=names, metavar="A,B", help="only these peers")
    add("--autotune", action="store_true", help="torch.compile's max-autotune too: minutes a cell")
    add("--together", action="store_true",
        help="set up all engines of a cell at once, as on a GPU; they are timed in turn")
    add("--energy", action=_SWITCH, default=True)

    add = command("training", "steps of training beside torch.compile", "models", "dtypes",
                  "batches", "device", "tf32", "json", "threads", "seconds",
                  batches=[128], seconds=3.0, precompiled=None)
    add("--engines", type=names, default=["maxvision", "torch-compile", "torch"], metavar="A,B",
        help="maxvision, torch-compile and torch, or some of them")
    add("--size", type=whole(8, 4096), metavar="PX",
        help="edge of the images (default: what the model takes)")

    add = command("levels", "the blocks and models of examples/levels at each level", "dtypes",
                  "device", "tf32", "json", "threads", "seconds", seconds=0.5, precompiled=None)
    add("--blocks", type=names, metavar="A,B", help="blocks and models (default: all)")
    add("--levels", type=counts, metavar="N,M", help="levels beside 1 (default: all)")
    add("--backward", action="store_true", help="gradients too")
    add("--size", type=_COUNT, metavar="N",
        help="factor of the batches (default: 1 on a CPU, 16 on a GPU)")

    add = command("bridge", "ops of torch_ops beside torch's own, called from torch", "dtypes",
                  "device", "tf32", "json", "threads", "seconds", seconds=0.5, precompiled=None)
    add("--ops", type=names, metavar="A,B", help="some of them (default: all)")
    add("--size", type=_COUNT, metavar="N", help="images (default: 4 on a CPU, 128 on a GPU)")

    command("ops", "each distinct layer beside torch's operator", *measured, "threads", "peers",
            "seconds", batches=[1, 32, 256], seconds=0.2)

    add = command("sparse", "a pruned model dense and sparse", *measured, "threads", "batch-size",
                  "seconds", batches=[1, 16], seconds=0.3)
    add("--densities", type=_densities, metavar="D,E",
        help="shares of nonzeros to test, such as 0.5,0.1 (default: the model's own)")
    add("--target", metavar="T",
        help="run layers on this CPU with code for another, such as cpu:x86-64-v3")
    add("--layers", action=_SWITCH, default=True)
    add("--network", action=_SWITCH, default=True)
    add("--table", action="store_true", help="write the table for --sparse auto on this device")
    add("--program", type=Path, metavar="FILE",
        help="ops.sparse_conv2d.measure, built elsewhere, for a GPU without a compiler")
    add("--data", type=Path, metavar="NPZ", help="pictures that networks classify (bench.accuracy)")

    add = command("profile", "where one run's time goes", *measured, batches=[1])
    add("--engine", default="maxvision", help="maxvision, or a peer: torch-compile, ...")
    add("--rows", type=int, default=40, help="rows of the table to print; 0 for all")
    add("--runs", type=int, default=10, help="runs to average over")
    add("--trace", type=Path, metavar="FILE", help="for Perfetto or Chrome")

    add = command("serve", "our server under load, beside LitServe", "device", "precompiled",
                  "seconds", "json", device="cpu", seconds=5.0)
    add("--model", default="resnet-50", metavar="M", help="as bench models")
    add("--dtype", help="of our server (default: bfloat16 on a GPU, float32 on a CPU)")
    add("--servers", type=names, default=["maxvision", "litserve"], metavar="A,B",
        help="maxvision, litserve, or ray: serve.ray_app in a cluster of its own")
    add("--url", metavar="URL", help="send requests to our server at this address")
    add("--bodies", type=names, default=["bytes", "json"], metavar="A,B",
        help="bytes, json (LitServe takes json only)")
    add("--concurrency", type=counts, default=[1, 8, 32], metavar="N,M", help="closed loops")
    add("--rates", type=counts, default=[], metavar="N,M", help="open loops, requests/s")
    add("--slo-ms", type=_SECONDS, default=50.0, help="latency limit that counts for the goodput")
    add("--size", type=_size, default=(500, 375), metavar="WxH", help="500x375")
    add("--pictures", type=int, default=16, help="number of different pictures")
    add("--senders", type=int, default=1, help="processes that send requests")
    add("--serve", dest="serve_options", action="append", default=[], metavar="--OPTION=V",
        help="an option of maxvision serve; may be repeated")
    add("--replicas", type=counts, default=[1, 2], metavar="N,M", help="on Ray, a GPU each")
    add("--replica-cores", type=_COUNT, default=1, metavar="N", help="cores of each replica")
    add("--bounds", action=_SWITCH, default=True,
        help="measure first what senders and decoding alone reach")
    add("--stages", action="store_true", help="take a request's CPU time apart, and nothing else")
    add("--litserve", default="{}", metavar="JSON",
        help="batch, delay_ms, workers, fronts, compile, decode")
    add("--patience", type=_SECONDS, default=300, help="seconds that a server may take to start")
    add("--verbose", action="store_true", help="print what the servers say")

    add = command("universe", "which of the world's classifiers convert and agree with torch",
                  "device", "json", device="cpu")
    add("--models", type=names, metavar="A,B", help="as maxvision convert (default: all)")
    add("--compare", action=_SWITCH, default=True, help="compile and compare with torch too")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
        help="what both compute in (default: float32)")
    add("--page", type=Path, metavar="FILE", help="print docs/models.md of what --json wrote")

    add = command("report", "the tables and plots of files of results")
    add("files", type=Path, nargs="+", metavar="FILE",
        help="a file that --json wrote, of maxvision time too")
    add("--plots", type=Path, metavar="DIR", help="also draw SVGs into this folder")

    add = command("compile", "graphs for a GPU that is elsewhere", "models", "dtypes", "batch-size",
                  "tf32", dtypes=["bfloat16"])
    add("--target", required=True, help="sm_80, sm_90a, gfx942, cpu:sapphirerapids, ...")
    add("--layers", action="store_true", help="compile their layers too, for bench ops")
    add("--sparse", type=names, default=["auto"], metavar="A,B",
        help="auto, always, never: graphs for bench sparse, one each (default: auto)")
    add("--out", type=Path, required=True, metavar="DIR")
    # fmt: on
    return top


_SWITCH = argparse.BooleanOptionalAction
_COUNT = whole(1, 1_000_000)
_SECONDS = number(1e-3, 3600)


def _shared(option: str) -> dict[str, Any]:
    """Describes an option that several commands have."""
    described: dict[str, dict[str, Any]] = {
        "models": {
            "type": names,
            "default": ["resnet-50", "cvt-13"],
            "metavar": "A,B",
            "help": "resnet-18 to -152, cvt-13, -21, -w24 (random weights), bundled models,"
            " folders",
        },
        "dtypes": {
            "type": names,
            "metavar": "A,B",
            "help": "dtypes (default: bfloat16 on a GPU, float32 on a CPU)",
        },
        "batches": {"type": counts, "metavar": "N,M", "help": "images that run together"},
        "device": {
            "default": "auto",
            "type": device,
            "metavar": "D",
            "help": "auto, cpu, gpu or gpu:N",
        },
        "tf32": {
            "action": _SWITCH,
            "default": True,
            "help": "round float32 to TF32 for tensor cores, ours and the peers'",
        },
        "precompiled": {
            "type": Path,
            "metavar": "DIR",
            "help": "use the graphs that bench compile wrote",
        },
        "json": {"type": Path, "metavar": "FILE", "help": "write all measurements to FILE"},
        "threads": {
            "type": _COUNT,
            "metavar": "N",
            "help": "number of cores to use (default: all)",
        },
        "peers": {"action": _SWITCH, "default": True, "help": "measure the peers too"},
        "seconds": {"type": _SECONDS, "help": "seconds of samples for each measurement"},
        "batch-size": {
            "type": _COUNT,
            "metavar": "N",
            "help": "batch size that --sparse auto chooses for (default: any)",
        },
    }
    return described[option]


def dtypes(options: argparse.Namespace, gpu: bool) -> list[str]:
    """Gives the dtypes that were asked for, or the device's usual one.

    Raises:
        ArgumentError: If one is none.
    """
    asked: list[str] = options.dtypes or ["bfloat16" if gpu else "float32"]
    known = [name for name in DTYPES if name != "auto"]
    for name in asked:
        if name not in known:
            raise ArgumentError(
                f"--dtypes must be of {', '.join(known)} but has {name!r}{meant(name, known)}"
            )
    return asked


def _densities(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in names(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"takes shares above 0 and up to 1, not {text!r}")
    return numbers


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"takes a size such as 500x375, not {text!r}")
    return int(width), int(height)


if __name__ == "__main__":
    run_program(main)
