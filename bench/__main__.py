"""The command ``maxvision bench``: what it measures, and every option."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from maxvision.common.errors import ArgumentError, UserError
from maxvision.runtime.session import DTYPES

_HELP = """\
Measure maxvision beside its peers, on one machine, in one run.

  models    whole networks: model x dtype x batch, beside torch.compile and eager torch
  ops       each distinct layer of a network, beside torch's operator (cuDNN, cuBLAS, oneDNN)
  sparse    a pruned model dense and sparse, layer by layer and whole; break-even tables
  profile   where one run's time goes, kernel by kernel, layer by layer
  compile   graphs for a GPU that is elsewhere: --precompiled takes them where no compiler is
  serve     our server under load, beside LitServe: latency, throughput, what bounds them
  report    docs/performance.md and the curves of docs/sparsity.md, from bench/results/*.json
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
  maxvision bench report

exit codes: 0 done; 1 a result was wrong; 2 a wrong argument, device or model
"""
FAILED, WRONG = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    try:
        options = parser().parse_args(arguments)
        return int(importlib.import_module(f"maxvision.bench.{options.command}").run(options))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return WRONG
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers", "matplotlib", "uvloop"):
            raise
        sys.stderr.write(f"error: bench expects the package {missing.name}; pip install it\n")
        return WRONG
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Describes every option."""
    top = argparse.ArgumentParser(
        prog="maxvision bench",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, dest="command", metavar="COMMAND")

    models = commands.add_parser("models", help="whole networks beside their peers")
    _what(models, batches="1,32,256")
    _threads(models)
    models.add_argument(
        "--sparse",
        default="auto",
        choices=["auto", "always", "never"],
        help="what runs pruned layers of ours (default: auto)",
    )
    models.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    models.add_argument(
        "--against",
        type=_list,
        metavar="A,B",
        help="these peers alone",
    )
    models.add_argument(
        "--autotune", action="store_true", help="torch.compile's max-autotune too: minutes a cell"
    )
    models.add_argument(
        "--seconds", type=_positive, default=2.0, help="of samples, an engine and cell"
    )
    models.add_argument(
        "--together",
        action="store_true",
        help="set the engines of a cell up at once, as on a GPU; they are timed in turn",
    )
    models.add_argument("--energy", action=argparse.BooleanOptionalAction, default=True)
    models.add_argument("--json", type=Path, metavar="FILE", help="write every figure")

    layers = commands.add_parser("ops", help="each distinct layer beside torch's operator")
    _what(layers, batches="1,32,256")
    _threads(layers)
    layers.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    layers.add_argument(
        "--seconds", type=_positive, default=0.2, help="of samples, a layer and side"
    )
    layers.add_argument("--json", type=Path, metavar="FILE", help="write every figure")

    sparse = commands.add_parser("sparse", help="a pruned model dense and sparse")
    _what(sparse, batches="1,16")
    _threads(sparse)
    _batch_size(sparse)
    sparse.add_argument(
        "--densities",
        type=_densities,
        metavar="D,E",
        help="shares of nonzeros to draw layers at, such as 0.5,0.1; the model's own if left out",
    )
    sparse.add_argument(
        "--target", metavar="T", help="cpu:x86-64-v3 or the like: run layers on this CPU as on that"
    )
    sparse.add_argument("--layers", action=argparse.BooleanOptionalAction, default=True)
    sparse.add_argument("--network", action=argparse.BooleanOptionalAction, default=True)
    sparse.add_argument(
        "--table", action="store_true", help="write what --sparse auto looks up on this device"
    )
    sparse.add_argument(
        "--seconds", type=_positive, default=0.3, help="of samples, a layer, density and side"
    )
    sparse.add_argument(
        "--program",
        type=Path,
        metavar="FILE",
        help="ops.sparse_conv2d.measure, built elsewhere, for a GPU without a compiler",
    )
    sparse.add_argument(
        "--data", type=Path, metavar="NPZ", help="pictures that networks classify (bench.accuracy)"
    )
    sparse.add_argument("--json", type=Path, metavar="FILE", help="write every figure")

    profile = commands.add_parser("profile", help="where one run's time goes")
    _what(profile, batches="1")
    profile.add_argument(
        "--engine", default="maxvision", help="maxvision, or a peer: torch-compile, ..."
    )
    profile.add_argument("--rows", type=int, default=40, help="of the table; 0 for all")
    profile.add_argument("--runs", type=int, default=10, help="to average over")
    profile.add_argument("--trace", type=Path, metavar="FILE", help="for Perfetto or Chrome")
    profile.add_argument("--json", type=Path, metavar="FILE", help="write every figure")

    serving = commands.add_parser("serve", help="our server under load, beside LitServe")
    serving.add_argument("--model", default="resnet-50", metavar="M", help="as bench models")
    serving.add_argument("--device", default="cpu", help="cpu, gpu or gpu:N")
    serving.add_argument("--dtype", help="of ours; bfloat16 on a GPU, float32 on a CPU if left out")
    serving.add_argument(
        "--servers",
        type=_list,
        default=["maxvision", "litserve"],
        metavar="A,B",
        help="of these, and ray: serve.ray_app in a cluster of its own",
    )
    serving.add_argument("--url", metavar="URL", help="drive the server of ours that is there")
    serving.add_argument(
        "--bodies", type=_list, default=["bytes", "json"], metavar="A,B",
        help="bytes, json (LitServe takes json only)",
    )  # fmt: skip
    serving.add_argument(
        "--concurrency", type=_batches, default=[1, 8, 32], metavar="N,M", help="closed loops"
    )
    serving.add_argument(
        "--rates", type=_batches, default=[], metavar="N,M", help="open loops, requests/s"
    )
    serving.add_argument("--seconds", type=_positive, default=5.0, help="of each load")
    serving.add_argument("--slo-ms", type=_positive, default=50.0, help="for the goodput")
    serving.add_argument("--size", type=_size, default=(500, 375), metavar="WxH", help="500x375")
    serving.add_argument("--pictures", type=int, default=16, help="different ones")
    serving.add_argument("--senders", type=int, default=1, help="processes that send")
    serving.add_argument(
        "--serve", dest="serve_options", action="append", default=[], metavar="--OPTION=V",
        help="an option of maxvision serve; may be repeated",
    )  # fmt: skip
    serving.add_argument(
        "--replicas", type=_batches, default=[1, 2], metavar="N,M", help="on Ray, a GPU each"
    )
    serving.add_argument("--replica-cores", type=_count, default=1, metavar="N", help="of each")
    serving.add_argument(
        "--bounds", action=argparse.BooleanOptionalAction, default=True,
        help="measure first what senders and decoding alone reach",
    )  # fmt: skip
    serving.add_argument(
        "--litserve", default="{}", metavar="JSON", help="batch, delay_ms, workers, fronts, compile"
    )
    serving.add_argument(
        "--precompiled", type=Path, metavar="DIR", help="graphs that bench compile wrote"
    )
    serving.add_argument("--patience", type=_positive, default=300, help="s for a server's start")
    serving.add_argument("--verbose", action="store_true", help="print what the servers say")
    serving.add_argument("--json", type=Path, metavar="FILE", help="write every figure")

    report = commands.add_parser("report", help="docs/performance.md and its plots")
    report.add_argument(
        "--results", type=Path, default=Path("bench/results"), metavar="DIR", help="bench/results"
    )
    report.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="docs")
    report.add_argument("--no-plots", action="store_true", help="tables only, without matplotlib")

    compiling = commands.add_parser("compile", help="graphs for a GPU that is elsewhere")
    compiling.add_argument(
        "--target", required=True, help="sm_80, sm_90a, gfx942, cpu:sapphirerapids, ..."
    )
    compiling.add_argument("--models", type=_list, default=["resnet-50", "cvt-13"], metavar="A,B")
    compiling.add_argument("--dtypes", type=_list, default=["bfloat16"], metavar="A,B")
    compiling.add_argument(
        "--layers", action="store_true", help="their layers too, which bench ops times"
    )
    compiling.add_argument(
        "--sparse",
        type=_list,
        default=["auto"],
        metavar="A,B",
        help="auto, always, never: graphs for bench sparse, one each (default: auto)",
    )
    _batch_size(compiling)
    _tf32(compiling)
    compiling.add_argument("--out", type=Path, required=True, metavar="DIR")
    return top


def _what(command: argparse.ArgumentParser, batches: str) -> None:
    command.add_argument(
        "--models",
        "--model",
        type=_list,
        default=["resnet-50", "cvt-13"],
        metavar="A,B",
        help="resnet-18 to -152, cvt-13, -21, -w24 (random weights), bundled models, folders",
    )
    command.add_argument(
        "--dtypes",
        type=_list,
        metavar="A,B",
        help="bfloat16 on a GPU, float32 on a CPU if left out",
    )
    command.add_argument(
        "--batches", type=_batches, default=_batches(batches), metavar="N,M", help=batches
    )
    command.add_argument("--device", default="auto", help="auto, cpu, gpu or gpu:N")
    _tf32(command)
    command.add_argument(
        "--precompiled", type=Path, metavar="DIR", help="graphs that bench compile wrote"
    )


def _threads(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--threads", type=_count, metavar="N", help="cores to keep to; all if left out"
    )


def _batch_size(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--batch-size",
        type=_count,
        metavar="N",
        help="images that run together, which --sparse auto chooses for; any if left out",
    )


def _tf32(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="round float32 to TF32 for tensor cores, ours and the peers'",
    )


def dtypes(options: argparse.Namespace, gpu: bool) -> list[str]:
    """Gives the dtypes that were asked for, or the device's usual one.

    Raises:
        ArgumentError: If one is none.
    """
    names: list[str] = options.dtypes or ["bfloat16" if gpu else "float32"]
    for name in names:
        if name not in DTYPES:
            raise ArgumentError(f"dtypes expects {', '.join(DTYPES)} but has {name!r}")
    return names


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _batches(text: str) -> list[int]:
    numbers = [int(part) if part.isdecimal() else 0 for part in _list(text)]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expects numbers of at least 1 but is {text!r}")
    return numbers


def _densities(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in _list(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expects shares above 0 and up to 1 but is {text!r}")
    return numbers


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expects a number of at least 1 but is {text!r}")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"expects a size such as 500x375 but is {text!r}")
    return int(width), int(height)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 3600:
        raise argparse.ArgumentTypeError(f"expects a number of seconds but is {text!r}")
    return number


if __name__ == "__main__":
    sys.exit(main())
