#!/usr/bin/env python3
"""Classifies images with a ResNet or CvT: parses the command line, calls `commands.classify`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from maxvision.common import __version__
from maxvision.common.arguments import DTYPES, SPARSE, device

STARTED = time.perf_counter()
"""When this program began, but for Python's own start."""

PROGRAM = "run_graph.py" if __name__ == "__main__" else "maxvision"
"""What the user has called."""

HELP = """\
Says what is in an image, with a ResNet or CvT that runs on Modular MAX.

Without --model a small bundled model answers; it needs no network and knows ten kinds of
things. A model of the Hugging Face hub is downloaded once and then read from the cache."""

EXAMPLES = """\
examples:
  run_graph.py cat.jpg                             the bundled model
  run_graph.py cat.jpg --model microsoft/resnet-50 a model of the Hugging Face hub
  run_graph.py cat.jpg --model ./my-cvt            a folder: config.json, model.safetensors
  run_graph.py cat.jpg --model resnet18.pth        a torchvision or timm checkpoint
  run_graph.py cat.jpg --model ./compiled          what maxvision compile wrote
  run_graph.py photos/ --device gpu --batch-size 32 --json > answers.jsonl
  run_graph.py photos/ --output answers.csv        also .jsonl and .parquet; --resume goes on
  curl -s https://example.org/cat.jpg | run_graph.py -
  run_graph.py --list-models

images:
  JPEG, PNG, WebP, GIF, BMP and TIFF, up to 100 megapixels. A folder is read with all that is
  in it, in name order, but for hidden files and other extensions. - reads standard input.

--json writes one line an image to standard output and everything else to standard error:
  {"image": "cat.jpg", "model": "...", "predictions": [{"label": "tabby", "class_id": 281,
   "score": 0.91}, ...]}        with --logits also "logits": [...]
  {"image": "x.jpg", "error": "..."}

exit codes:
  0  every image was classified
  1  some images could not be read; the others were answered
  2  the model, the device or the arguments are wrong; the message says what to do
  130  interrupted; what was answered is written"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = parse(argv)
    try:
        if args.version:
            print(_version(), flush=True)
            return 0
        # Nothing heavy is imported before the arguments are known to be right.
        if args.list_models:
            from maxvision.commands.models import list_models

            code = list_models(args.json)
        else:
            from maxvision.commands.classify import classify

            code = classify(args, STARTED)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # the reader, say `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports SIGPIPE
    except Exception as error:
        return _report(error, args.debug)


def command() -> None:
    """Runs the command line as a program."""
    code = main()
    from maxvision.common.host import leave

    leave(code)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments; exits with 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=HELP,
        epilog=EXAMPLES.replace("run_graph.py", PROGRAM),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGE", help="an image file, a folder, or - for stdin")
    add("--model", metavar="M", help="a bundled model's name, a hub id, a folder or a file"
        " (default: the bundled ResNet)")  # fmt: skip
    add("--revision", metavar="R", help="branch, tag or commit of a hub model")
    add("--labels", metavar="FILE", help="names for the classes: a text file with one a line, or a"
        " .json file with a list or with id2label (default: the model's own)")  # fmt: skip
    add("--device", default="auto", type=device, metavar="D",
        help="auto, cpu, gpu or gpu:N (default: auto, a GPU if there is one)")  # fmt: skip
    add("--dtype", default="auto", choices=DTYPES,
        help="precision of the model (default: auto, what suits the device)")  # fmt: skip
    add("--no-tf32", dest="tf32", action="store_false", help="multiply float32 exactly on a GPU;"
        " else NVIDIA's tensor cores round it to TF32")  # fmt: skip
    add("--sparse", default="auto", choices=SPARSE,
        help="what runs a pruned model's layers: sparse convolutions where they were measured to be"
        " faster (auto), always, or never")  # fmt: skip
    add("--passes", default="all", metavar="P", help="how the network is rewritten: all, none,"
        " -stem,-chain or qkv,mlp; finds the one to blame (docs/architecture.md)")  # fmt: skip
    add("--batch-size", type=_count, metavar="N",
        help="images that run together (default: 8 on a CPU, 32 on a GPU)")  # fmt: skip
    add("--top-k", type=_count, default=5, metavar="K", help="labels an image (default: 5)")
    add("--json", action="store_true", help="write JSON Lines")
    add("--output", metavar="FILE", help="write the answers to a .csv, .jsonl or .parquet file")
    add("--resume", action="store_true", help="go on with FILE where an earlier run stopped")
    add("--logits", action="store_true",
        help="with --json, .jsonl or .parquet: the model's raw output too")  # fmt: skip
    add("--list-models", action="store_true", help="show the models that are known, and leave")
    add("--timing", action="store_true", help="say what the start took, part by part")
    add("--debug", action="store_true", help="show the traceback of an internal error")
    add("--version", action="store_true", help="show the version, and leave")
    args = parser.parse_intermixed_args(argv)
    if not (args.images or args.list_models or args.version):
        parser.error("an image, a folder or - was expected but none came; try examples/")
    if args.images.count("-") > 1:
        parser.error("- was expected once but came twice; standard input holds one image")
    ending = os.path.splitext(args.output or "")[1].lower()
    if args.output and ending not in (".csv", ".jsonl", ".parquet"):
        parser.error(
            f"--output expects a name that ends in .csv, .jsonl or .parquet but is {args.output!r}"
        )
    if args.output and args.json:
        parser.error("--json was expected without --output; FILE.jsonl holds the same lines")
    if args.resume and not args.output:
        parser.error("--resume was expected with --output but came alone; name the file")
    if args.logits and not (args.json or ending in (".jsonl", ".parquet")):
        parser.error(
            "--logits was expected with --json or an --output of .jsonl or .parquet but came"
            " without; add one"
        )
    return args


def _count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,5}", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"a whole number from 1 to 999999 was expected but {text!r} came"
        )
    return int(text)


def _version() -> str:
    from importlib import metadata

    try:
        return f"maxvision {__version__} (MAX {metadata.version('max')})"
    except metadata.PackageNotFoundError:
        return f"maxvision {__version__} (MAX is not installed)"


def _report(error: Exception, debug: bool) -> int:
    import traceback

    from maxvision.common.console import complain
    from maxvision.common.errors import UserError

    message = str(error)
    if not isinstance(error, UserError):
        if debug:
            traceback.print_exception(error)
        first = message.strip().partition("\n")[0] or "no message"
        message = f"internal error: {type(error).__name__}: {first}; --debug shows where"
    complain(message)
    return 2


if __name__ == "__main__":
    command()
