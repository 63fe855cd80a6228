"""The command ``python -m weights``: inspect, convert or verify a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from graphs.errors import UserError
from weights.checkpoint import identify, interpret
from weights.source import Source, find

_MODEL = "a bundled model's name, a folder, a .safetensors/.bin/.pth/.pt file, or a hub id"
_FAILED, _WRONG = 1, 2  # exit codes

_HELP = """\
Look into trained ResNet and CvT models, convert them, and check that they run right.

X is one of
  microsoft/resnet-50       an id on the Hugging Face hub, downloaded once into its cache
  ./my-model                a folder in Hugging Face format, or with one checkpoint file
  resnet18-f37072fd.pth     a file of torchvision, timm or the original CvT (.pth needs torch)
  a bundled model's name    see python run_graph.py --list-models
"""

_EXAMPLES = """\
examples:
  python -m weights inspect microsoft/resnet-50
  python -m weights convert resnet18-f37072fd.pth -o resnet18     then: --model ./resnet18
  python -m weights verify ./resnet18 --device gpu:0

exit codes: 0 done; 1 verify found an error beyond the bound; 2 a wrong model or argument
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return _WRONG
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    def command(name: str, summary: str, details: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=f"{summary}. {details}")
        added.add_argument("model", metavar="X", help=_MODEL)
        return added

    parser = argparse.ArgumentParser(
        prog="python -m weights",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = command(
        "inspect",
        "Show a model's tensors",
        "One row for each filter and matrix: its name in the checkpoint, its shape there"
        " (out, in, height, width), stored dtype, share of zeros, and numbers.",
    )
    inspect.add_argument("--all", action="store_true", help="biases, norms and statistics too")
    inspect.set_defaults(run=_inspect)

    convert = command(
        "convert",
        "Write a model as a folder in Hugging Face format",
        "The folder (config.json, model.safetensors, preprocessor_config.json) loads here without"
        " torch, and in transformers. It appears when it is complete.",
    )
    convert.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    convert.add_argument("--force", action="store_true", help="replace DIR if it is there")
    convert.set_defaults(run=_convert)

    verify = command(
        "verify",
        "Compare a model with transformers on random images",
        "Each stage and the logits, in float32; torch and transformers must be installed. An error"
        " is the largest difference over the largest value.",
    )
    verify.add_argument("--device", default="cpu", help="where the graph runs (default: cpu)")
    verify.add_argument("--seed", type=int, default=0, help="of the images (default: 0)")
    verify.set_defaults(run=_verify)
    return parser


def _find(name: str) -> Source:
    return find(name, progress=lambda step: print(step, file=sys.stderr))


def _inspect(options: argparse.Namespace) -> int:
    from weights.catalog import trained

    found = _find(options.model)
    table = Table(title=f"{found.name} ({found.weights.name})", title_justify="left")
    table.add_column("tensor", overflow="fold")
    for name in ("shape", "dtype", "zeros", "numbers"):
        table.add_column(name, justify="right", no_wrap=True)
    zeros = total = 0
    for key, tensor in found.state.tensors.items():
        if tensor.ndim < 2 and not options.all:
            continue
        none = tensor.size - int(np.count_nonzero(tensor))
        zeros, total = zeros + none, total + tensor.size
        shape = " x ".join(map(str, tensor.shape))
        share = f"{none / max(tensor.size, 1):.1%}"
        table.add_row(key, shape, found.state.dtypes[key], share, f"{tensor.size:,}")
    table.add_section()
    table.add_row("total", "", "", f"{zeros / max(total, 1):.1%}", f"{total:,}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(f"{trained(found.state):,} parameters (all tensors but batch norm's statistics)")
    form, spec = identify(found)
    console.print(f"{form.title}: {spec}", highlight=False)
    interpret(found)  # says what is wrong with it, if anything
    return 0


def _convert(options: argparse.Namespace) -> int:
    from weights.convert import convert

    convert(_find(options.model), options.output, options.force)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from weights.verify import BOUND, verify

    rows = verify(options.model, options.device, options.seed)
    table = Table(title=f"{options.model} on {options.device} against transformers, float32")
    for name in ("output", "shape", "largest value", "largest error", "relative", ""):
        table.add_column(name, justify="left" if name == "output" else "right")
    for row in rows:
        table.add_row(
            row.output,
            " x ".join(map(str, row.shape)),
            f"{row.largest:.4g}",
            f"{row.error:.2e}",
            f"{row.relative:.2e}",
            "ok" if row.within else "beyond",
        )
    Console().print(table)
    if all(row.within for row in rows):
        return 0
    sys.stderr.write(f"error: {options.model}: expected relative errors up to {BOUND:g}\n")
    return _FAILED


if __name__ == "__main__":
    sys.exit(main())
