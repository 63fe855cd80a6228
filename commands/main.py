# PYTHON_ARGCOMPLETE_OK
"""The command ``maxvision``: it hands over to one of the command lines below."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxvision.common.arguments import meant
from maxvision.common.console import complain, exit_code, run_program


class Command(NamedTuple):
    """Says where a command is.

    Attributes:
        module: The module in ``maxvision`` whose ``parser`` describes the arguments, and whose
            ``main`` takes them.
        help: What it does.
    """

    module: str
    help: str


COMMANDS = {
    "classify": Command("run_graph", "say what is in images; maxvision cat.jpg is short for it"),
    "serve": Command("serve.__main__", "answer over HTTP"),
    "batch": Command("commands.batch", "classify folders and Parquet files with Ray"),
    "compile": Command("commands.compile", "compile a model ahead of time"),
    "convert": Command("commands.convert", "put a torch or ONNX model onto our kernels"),
    "inspect": Command("commands.inspect", "show and check what was compiled"),
    "quantize": Command("commands.quantize", "make a model's layers compute in 8 bits"),
    "weights": Command("commands.weights", "inspect, convert, prune or verify a checkpoint"),
    "ops": Command("commands.ops", "compile our Mojo ops for other programs of MAX"),
    "time": Command("commands.time", "measure a model's latency, throughput and memory"),
    "bench": Command("bench.__main__", "measure beside torch and other engines"),
    "completion": Command("commands.completion", "let the shell complete commands and options"),
}

_HELP = """\
usage: maxvision COMMAND ...
       maxvision IMAGE ...

commands:
{}

maxvision COMMAND --help describes a command, and maxvision classify --help what becomes of images.
maxvision --list-models shows the known models, maxvision --version the versions. --debug shows a
traceback in place of an error's sentence. To classify a folder named like a command, write ./serve.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, else ``classify``; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        from maxvision.commands.completion import complete

        complete(COMMANDS, lambda name: module(name).parser())
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:11} {each.help}" for name, each in COMMANDS.items())
        print(_HELP.format(listed), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--debug" and arguments[1:] and arguments[1] in COMMANDS:
        arguments.append(arguments.pop(0))
    if hint := _meant(arguments[0]):
        complain(f"{arguments[0]} is neither a command nor an image{hint}")
        return 2
    name = arguments.pop(0) if arguments[0] in COMMANDS else "classify"
    options = argparse.Namespace(debug="--debug" in arguments)
    return exit_code(lambda: int(module(name).main(arguments)), options, f"maxvision {name}")


def module(name: str) -> Any:
    """Imports the module of a command."""
    return importlib.import_module(f"maxvision.{COMMANDS[name].module}")


def _meant(word: str) -> str:
    """Tells which command a word seems to misspell, if it is neither a command nor a path."""
    if word in COMMANDS or not word.isalpha() or os.path.exists(word):
        return ""
    if word == "help":
        return "; did you mean maxvision --help?"
    return meant(word, COMMANDS).replace("did you mean ", "did you mean maxvision ")


def command() -> None:
    """Runs the command line as a program."""
    run_program(main)
