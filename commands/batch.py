"""The command ``maxvision batch``: classify folders and Parquet files with Ray."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from maxvision.common.arguments import DEFAULT_MODEL, Parser, device, whole
from maxvision.common.console import complain, exit_code

_HELP = """\
Classifies images with Ray Data: files, folders, and Parquet files with a column of encoded images.
Without a cluster (RAY_ADDRESS) this machine is one. On a cluster every node has to see the images
and the folder of answers at the same path."""

_EXAMPLES = """\
examples:
  maxvision batch photos/ -o answers
  maxvision batch shards/*.parquet -o answers --model microsoft/resnet-50 --device gpu
  RAY_ADDRESS=10.0.0.1:6379 maxvision batch photos/ -o answers --workers 8 --cores 4

answers:
  Columns image, model, error and predictions, as run_graph.py writes them: read the folder as one
  data set. An image that cannot be read is a row with an error. A row of Parquet is called
  FILE#ROW, counted from 0. The same command after a stop goes on with what is not answered.

exit codes:
  0  every image was classified
  1  some images could not be read; the others were answered
  2  the model, the device or the arguments are wrong; the message says what to do
  130  interrupted; what was answered is written"""


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision batch", description=_HELP, epilog=_EXAMPLES)
    add = made.add_argument
    add("images", nargs="+", metavar="IMAGES", help="an image file, a folder or a Parquet file")
    add("-o", "--output", required=True, metavar="DIR", help="the folder of answers")
    add("--model", default=DEFAULT_MODEL, metavar="M", help="a name that --list-models shows,"
        " a hub id, a folder or a file (default: %(default)s)")  # fmt: skip
    made.add_shared("revision", "dtype", "tf32", "decode")
    add("--device", default="auto", type=device, metavar="D", help="cpu, gpu or auto: gpu"
        " if this machine has one")  # fmt: skip
    add("--workers", type=whole(1, 100_000), metavar="N", help="models that run at a time"
        " (default: what the cluster has room for)")  # fmt: skip
    add("--instances", type=whole(1, 64), metavar="N", help="models that share a GPU"
        " (default: 2 where GPUs decode, else 1)")  # fmt: skip
    add("--cores", type=whole(1, 1024), default=1, metavar="N", help="of each; they also decode"
        " (default: %(default)s)")  # fmt: skip
    add("--batch-size", type=whole(1, 4096), metavar="N", help="images that run together")
    add("--top-k", type=whole(1, 100_000), default=5, metavar="K", help="labels an image")
    add("--logits", action="store_true", help="the model's raw output too")
    add("--column", default="image", metavar="NAME", help="of Parquet: bytes, or a struct with"
        " bytes, as data sets of the Hugging Face hub have (default: %(default)s)")  # fmt: skip
    add("--rows", type=whole(1, 1_000_000), default=512, metavar="N", help="images a file of"
        " answers, which a stop may cost (default: %(default)s)")  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; a user's mistake is one line on stderr."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _batch(options), options, "maxvision batch", "ray")


def _batch(options: argparse.Namespace) -> int:
    from maxvision.serve.batch import classify

    try:
        return classify(options)
    except KeyboardInterrupt:
        complain(f"interrupted; the same command goes on with {options.output}", kind="")
        raise
