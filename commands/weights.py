"""The command ``maxvision weights``: inspect, convert, prune or verify a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxvision.common.arguments import Parser, device, names
from maxvision.common.console import complain, exit_code, working

if TYPE_CHECKING:
    from rich.console import Console

    from maxvision.weights.checkpoint import Checkpoint
    from maxvision.weights.source import Source

_MODEL = "a bundled model's name, a folder, a checkpoint file, or a hub id"
PATTERNS = ("unstructured", "2:4", "1x8", "8x1", "64x64")
SCOPES = ("global", "layer")
"""What weights/prune.py takes; to import it takes too long for --help."""
_FAILED = 1  # exit code

_HELP = """\
Look into trained models, convert and prune them, and check that they run right.

X is one of
  microsoft/resnet-50       an id on the Hugging Face hub, downloaded once into its cache
  ./my-model                a folder in Hugging Face format, or with one checkpoint file
  resnet18-f37072fd.pth     a file of torchvision, timm or the original CvT: .safetensors,
                            .pth, .pt, .bin, .ckpt or .pth.tar
  a bundled model's name    see maxvision --list-models
"""

_EXAMPLES = """\
examples:
  maxvision weights inspect microsoft/resnet-50
  maxvision weights convert resnet18-f37072fd.pth -o resnet18     then: --model ./resnet18
  maxvision weights verify ./resnet18 --device gpu:0
  maxvision weights prune microsoft/resnet-50 --sparsity 0.9 -o r50-90
  maxvision weights prune ./resnet18 --pattern 2:4 --skip 'stem,stages.0.*,head' -o r18-24

exit codes: 0 done; 1 verify found an error beyond the bound; 2 a wrong model or argument
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: options.run(options), options, "maxvision weights", "torch")


def parser() -> Parser:
    """Describes the arguments."""

    def command(name: str, summary: str, details: str) -> Any:
        added = commands.add_parser(name, help=summary, description=f"{summary}. {details}")
        added.add_argument("model", metavar="X", help=_MODEL)
        return added

    made = Parser(prog="maxvision weights", description=_HELP, epilog=_EXAMPLES)
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    inspect = command(
        "inspect",
        "Show a model's tensors",
        "One row for each filter and matrix: its name and shape (out, in, height, width) in the"
        " checkpoint, stored dtype, share of zeros, and number of weights. For a pruned model also"
        " its pruned layers: the pattern of their zeros, and what runs them on a device.",
    )
    inspect.add_shared("device", "dtype")
    inspect.add_argument("--all", action="store_true", help="biases, norms and statistics too")
    inspect.set_defaults(run=_inspect)

    convert = command(
        "convert",
        "Write a model as a folder in Hugging Face format",
        "The folder (config.json, model.safetensors, preprocessor_config.json) loads here and"
        " in transformers. It appears when it is complete.",
    )
    convert.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    convert.add_argument("--force", action="store_true", help="replace DIR if it is there")
    convert.set_defaults(run=_convert)

    prune = command(
        "prune",
        "Set the smallest weights to zero, and write the model as convert does",
        "Filters are matrices [F, K] with K = (r * S + s) * C + c: the input channels of a tap are"
        " adjacent. The model is not trained afterwards: expect to lose accuracy, and measure it.",
    )
    prune.add_argument(
        "--sparsity",
        type=_share,
        metavar="S",
        help="share of zeros in the layers that are pruned, such as 0.9 (2:4 is always 0.5)",
    )
    prune.add_argument(
        "--scope",
        choices=SCOPES,
        default="global",
        help="one threshold for all layers, or the same share in each layer (default: global)",
    )
    prune.add_argument(
        "--pattern",
        choices=PATTERNS,
        default="unstructured",
        help="single weights; two of four along K; blocks of eight along K (1x8), of eight filters"
        " (8x1), or of 64 filters by 64 input channels of a tap (64x64); the last block of a row"
        " may be shorter (default: unstructured)",
    )
    prune.add_argument(
        "--skip",
        type=names,
        metavar="A,B",
        help="layers that stay dense, with * as a wildcard, or none (default: the first convolution"
        " and the classifier; inspect lists the layers' names)",
    )
    prune.add_argument("-o", "--output", metavar="DIR", type=Path, required=True)
    prune.add_argument("--force", action="store_true", help="replace DIR if it is there")
    prune.set_defaults(run=_prune)

    verify = command(
        "verify",
        "Compare a model with transformers on random images",
        "Each stage and the logits, in float32; torch and transformers must be installed. An error"
        " is the largest difference over the largest value.",
    )
    verify.add_argument(
        "--device",
        default="cpu",
        type=device,
        metavar="D",
        help="where the graph runs (default: cpu)",
    )
    verify.add_argument("--seed", type=int, default=0, help="of the images (default: 0)")
    verify.set_defaults(run=_verify)
    return made


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes a share such as 0.9, not {text!r}"
            f"{f'; did you mean --pattern {text}?' if text in PATTERNS else ''}"
        ) from None


def _find(options: argparse.Namespace) -> Source:
    from maxvision.weights.source import find

    _refuse_compiled(options)
    return find(options.model, progress=lambda step: print(step, file=sys.stderr))


def _refuse_compiled(options: argparse.Namespace) -> None:
    """Says what to do with the folder of a compiled model, whose weights are arranged.

    Raises:
        ModelError: If the model is one.
    """
    from maxvision.common.errors import ModelError
    from maxvision.runtime.artifact import is_here

    if not is_here(options.model):
        return
    if options.run is _inspect:
        what = f"look into it with maxvision inspect {options.model}"
    else:
        what = "name the checkpoint that it was compiled from"
    raise ModelError(f"{options.model} is a compiled model and not a checkpoint; {what}")


def _inspect(options: argparse.Namespace) -> int:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from maxvision.weights.catalog import trained
    from maxvision.weights.checkpoint import identify, interpret

    found = _find(options)
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
    _, form, spec = identify(found)
    console.print(f"{form.title}: {_settings(spec)}", highlight=False, markup=False)
    checkpoint = interpret(found)  # says what is wrong with it, if anything
    _inspect_pruned(found, checkpoint, options, console)
    return 0


def _settings(spec: Any) -> str:
    """Writes a network's settings as text; those of stages are lines of their own."""
    if not dataclasses.is_dataclass(spec):
        return str(spec)
    told, stages = [], ""
    for field in dataclasses.fields(spec):
        name, value = field.name.replace("_", " "), getattr(spec, field.name)
        if isinstance(value, bool):
            told.append(f"{'' if value else 'no '}{name}")
        elif not isinstance(value, tuple):
            told.append(f"{name} {value}")
        elif value and dataclasses.is_dataclass(value[0]):
            stages += "".join(f"\n  {name} {i}: {_settings(v)}" for i, v in enumerate(value))
        else:
            told.append(f"{name} {' '.join(map(str, value))}")
    return ", ".join(told) + stages


def _inspect_pruned(
    found: Source, checkpoint: Checkpoint, options: argparse.Namespace, console: Console
) -> None:
    """Prints the pruned layers, how they are pruned, and what would run them."""
    from rich.table import Table

    from maxvision.graphs.sparsity import load_table
    from maxvision.graphs.target import Target
    from maxvision.runtime.classifier import choose_sparse
    from maxvision.runtime.devices import find_device, find_dtype
    from maxvision.runtime.preprocess import Preprocess
    from maxvision.weights.checkpoint import identify
    from maxvision.weights.patterns import pattern
    from maxvision.weights.prune import prunable

    device = find_device(options.device)
    dtype = find_dtype(options.dtype, device)
    target, prepare = Target.of(device), Preprocess.from_config(checkpoint.preprocess)
    size = (prepare.height, prepare.width)
    choice = choose_sparse(checkpoint, "auto", target, dtype, size)
    pruned = [each for each in choice.verdicts if each.pruned]
    if not pruned:
        return
    where = f"{'cpu' if device.is_host else target.name}, {dtype.name}"
    table = Table(title=f"Pruned layers, and what runs them ({where})", title_justify="left")
    table.add_column("layer", overflow="fold")
    for name in ("convolution", "zeros", "pattern", "runs", "gain"):
        table.add_column(name, justify="left" if name in ("pattern", "runs") else "right")
    _, form, _ = identify(found)
    stored = {layer: form.key(f"{layer}.weight") for layer in prunable(checkpoint)}
    for each in pruned:
        layer = each.layer
        tensor = found.state.tensors.get(stored.get(layer.name, ""))
        table.add_row(
            layer.name,
            layer.title(),
            f"{each.zeros:.1%}",
            "" if tensor is None else pattern(tensor),
            "sparse" if each.sparse else f"dense: {each.why}" if each.why else "dense",
            f"{each.gain:.2f} x" if each.gain else "",
        )
    console.print(table)
    console.print(f"{found.name}: {choice.short.told}", highlight=False)
    measured = load_table(target, dtype.name)
    if measured is None:
        return
    for batch in sorted({row.batch for row in measured.rows}):
        dense, chosen = measured.estimate(choice.verdicts, batch)
        if dense:
            console.print(
                f"estimated at batch {batch}: convolutions and linear layers in {chosen / 1e3:.3g}"
                f" ms, dense {dense / 1e3:.3g} ms: {dense / chosen:.2f} x",
                highlight=False,
            )
    told = measured.measured
    machine = told["cpu"] if device.is_host else told["gpu"]
    console.print(f"by the table of {told['date']}, {machine}", highlight=False)


def _convert(options: argparse.Namespace) -> int:
    from maxvision.weights.convert import convert

    convert(_find(options), options.output, options.force)
    print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _prune(options: argparse.Namespace) -> int:
    from maxvision.weights.prune import prune

    rows = prune(
        _find(options),
        options.output,
        options.sparsity,
        scope=options.scope,
        pattern=options.pattern,
        skip=options.skip,
        force=options.force,
    )
    weights, zeros = (sum(getattr(row, part) for row in rows) for part in ("weights", "zeros"))
    least, most = (choose(rows, key=lambda row: row.zeros / row.weights) for choose in (min, max))
    low, high = (f"{row.zeros / row.weights:.1%}" for row in (least, most))
    spread = f"from {low} in {least.name} to {high} in {most.name}"
    print(
        f"wrote {options.output}: {zeros:,} of {weights:,} weights of {len(rows)} layers are zeros"
        f" ({zeros / weights:.1%}), {'the same share in each' if low == high else spread}; its"
        " accuracy was not measured"
    )
    empty = [row.name for row in rows if row.zeros == row.weights]
    if empty:
        print(f"warning: all weights of {', '.join(empty)} are zeros; prune less", file=sys.stderr)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from maxvision.commands.verify import BOUND, verify

    _refuse_compiled(options)
    with working(f"comparing {options.model} with transformers") as say:
        rows = verify(options.model, options.device, options.seed, say)
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
    complain(f"{options.model}: a relative error is above {BOUND:g}")
    return _FAILED
