"""The command ``maxvision convert``: put a torch or ONNX model onto our kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxvision.common.arguments import Parser, device, names
from maxvision.common.console import complain, exit_code, way_to, working
from maxvision.common.errors import ArgumentError, UserError

_BEYOND = 1  # exit code

_HELP = """\
Convert a torch module or an ONNX file: trace it, compare outputs and stages with the source, and
write a folder that classify, serve, compile, time and bench take as a model. torch is needed here
only, and not for ONNX files.

SOURCE is one of
  timm/convnext_tiny            a model of timm; torchvision/vgg16 one of torchvision
  google/vit-base-patch16-224   a Hugging Face id, or a folder, for transformers
  mypkg.models:make             a function of yours that gives a module, or (module, inputs)
  model.onnx, model.pt2         a file"""

_EXAMPLES = """\
examples:
  maxvision convert timm/convnext_tiny -o cx
  maxvision convert timm/swin_tiny_patch4_window7_224 --dry-run
  maxvision convert --models resnet50,densenet121,efficientnet_b0 -o out/
  maxvision cat.jpg --model ./cx

exit codes: 0 done; 1 an error beyond the bound; 2 a wrong model or argument"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision convert", description=_HELP, epilog=_EXAMPLES)
    made.add_argument("source", metavar="SOURCE", nargs="?", help="the model, see above")
    made.add_argument(
        "--models", type=names, metavar="A,B", help="several, each into a folder of its name"
    )
    made.add_argument("--list-models", action="store_true", help="name timm's and torchvision's")
    made.add_argument("-o", "--output", metavar="DIR", type=Path, help="to write")
    made.add_argument("--force", action="store_true", help="replace DIR if it is there")
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="say what would run it: ops, multiplications, what is missing; write nothing",
    )
    made.add_argument("--random", action="store_true", help="random weights, no download")
    made.add_argument("--size", type=int, metavar="PX", help="edge of the pictures")
    made.add_argument(
        "--no-check", dest="check", action="store_false", help="do not compare it with the source"
    )
    made.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="the largest relative error that passes (default: 1e-5, or twice the source's own)",
    )
    made.add_argument(
        "--keep",
        type=_layer,
        action="append",
        default=[],
        metavar="NAME=float32",
        help="a layer, or a module with all in it, that stays in float32 where the model runs in 16"
        " bits; * stands for anything; may be repeated",
    )
    made.add_argument(
        "--device", default="cpu", type=device, metavar="D",
        help="where it is compared: cpu, gpu or gpu:N (default: cpu)",
    )  # fmt: skip
    made.add_shared("labels", "passes")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _run(options), options, "maxvision convert", "convert")


def _run(options: argparse.Namespace) -> int:
    if options.list_models:
        return _list()
    if (options.source is None) == (options.models is None):
        raise ArgumentError("convert takes one SOURCE, or --models A,B")
    if options.output is None and not options.dry_run:
        raise ArgumentError("convert needs -o DIR, or --dry-run to write nothing")
    if options.models is None:
        return _one(options.source, options.output, options)
    code = 0
    for source in options.models:
        folder = options.output / source.replace("/", "-") if options.output else None
        try:
            code = max(code, _one(source, folder, options))
        except UserError as error:  # the others go on
            complain(str(error))
            code = 2
    return code


def _one(source: str, folder: Path | None, options: argparse.Namespace) -> int:
    with working(f"converting {source}") as say:
        from maxvision.bridge.convert import compared, find, report, translated, write
        from maxvision.common.folder import new_folder
        from maxvision.graphs import passes

        off = passes.parse(options.passes)
        model = find(source, random=options.random, size=options.size)
        _relabel(model, options)
        say("tracing it")
        traced = translated(model, options.keep)
        assert traced.program is not None
        told = report(model, traced, options.device, "float32", off)
        if options.check and not options.dry_run:
            told = compared(
                told, model, traced, options.device, off, tolerance=options.tolerance, progress=say
            )
        if folder is not None and told.within and not options.dry_run:
            with new_folder(folder, "the model", lambda _: bool(options.force)) as new:
                write(new, model, traced)
    print(told)
    if options.keep:
        kept = sum(bool(node.dtype) for node in traced.program.nodes)
        print(f"  in float32      {kept} ops, whatever the others compute in")
    for note in [*traced.notes, *([model.note] if model.note else [])]:
        print(f"  {note}")
    if not told.within:
        complain(
            f"{source}: an error is beyond its bound, and nothing was written; find the guilty pass"
            " with --passes, or raise --tolerance"
        )
        return _BEYOND
    if folder is not None and not options.dry_run:
        print(f"wrote {folder}")
    return 0


def _layer(text: str) -> str:
    """Reads NAME=float32."""
    name, equals, dtype = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"takes NAME=float32, such as head=float32, not {text!r}")
    if dtype != "float32":
        raise argparse.ArgumentTypeError(
            f"takes NAME=float32, not {dtype!r}: all else has the dtype that the model runs in"
        )
    return name


def _relabel(model: Any, options: argparse.Namespace) -> None:
    if options.labels:
        from maxvision.weights import read_labels

        model.labels = read_labels(options.labels)


def _list() -> int:
    import importlib.util

    found = False
    for library in ("timm", "torchvision"):
        if importlib.util.find_spec(library):
            module = importlib.import_module(library)
            listed = module.list_models() if library == "timm" else module.models.list_models()
            print("\n".join(f"{library}/{name}" for name in listed))
            found = True
    if not found:
        raise ArgumentError(f"neither timm nor torchvision is installed; {way_to('convert')}")
    sys.stdout.flush()
    return 0
