"""The command ``maxvision``: it hands over to one of the command lines below."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """Says where a command is.

    Attributes:
        module: The module in ``maxvision`` whose ``main`` takes the arguments.
        help: What it does.
        before: Arguments that go before the user's.
        extra: The extra of pyproject.toml that installs what it needs beyond the rest.
    """

    module: str
    help: str
    before: tuple[str, ...] = ()
    extra: str = "test"


COMMANDS = {
    "classify": Command("run_graph", "say what is in images; maxvision cat.jpg is short for it"),
    "serve": Command("serve.__main__", "answer over HTTP", extra="serve"),
    "batch": Command("serve.batch", "classify folders and Parquet files with Ray", extra="ray"),
    "compile": Command("commands.compile", "compile a model ahead of time", ("compile",)),
    "inspect": Command("commands.compile", "show and check what was compiled", ("inspect",)),
    "weights": Command("commands.weights", "inspect, convert, prune or verify a checkpoint"),
    "bench": Command("bench.__main__", "measure beside torch and other engines", extra="bench"),
}

_HELP = """\
usage: maxvision COMMAND ...
       maxvision IMAGE ...

commands:
{}

maxvision COMMAND --help describes a command. maxvision --list-models shows the known models,
maxvision --version the versions. To classify a folder named like a command, write ./serve.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, else ``classify``; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:9} {each.help}" for name, each in COMMANDS.items())
        print(_HELP.format(listed), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if meant := _meant(arguments[0]):
        return _wrong(
            f"{arguments[0]} is neither a command nor an image; did you mean maxvision {meant}?"
        )
    name = arguments.pop(0) if arguments[0] in COMMANDS else "classify"
    command = COMMANDS[name]
    try:
        module = importlib.import_module(f"maxvision.{command.module}")
        return int(module.main([*command.before, *arguments]))
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "maxvision"):
            raise
        return _wrong(
            f"maxvision {name} needs the package {package}, which is not installed; run"
            f" pip install '.[{command.extra}]' in the checkout"
        )
    except KeyboardInterrupt:  # while a command is imported; it answers for itself after that
        return 130


def _meant(word: str) -> str | None:
    """Tells which command a word seems to misspell, if it is neither a command nor a path."""
    if word in COMMANDS or not word.isalpha() or os.path.exists(word):
        return None
    close = difflib.get_close_matches(word.lower(), COMMANDS, n=1, cutoff=0.7)
    return close[0] if close else None


def _wrong(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


def command() -> None:
    """Runs the command line as a program."""
    code = main()
    from maxvision.common.host import leave

    leave(code)
