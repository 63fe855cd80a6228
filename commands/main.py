"""The command ``maxvision``: it hands over to one of the command lines below."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {  # name: module, the arguments that go before the user's, what it does
    "classify": ("run_graph", [], "say what is in images (the default: maxvision cat.jpg)"),
    "serve": ("serve.__main__", [], "answer over HTTP"),
    "batch": ("serve.batch", [], "classify folders and Parquet files on a Ray cluster"),
    "compile": ("commands.compile", ["compile"], "compile a model ahead of time"),
    "inspect": ("commands.compile", ["inspect"], "show what was compiled, and check its files"),
    "weights": ("commands.weights", [], "inspect, convert, prune or verify a checkpoint"),
    "bench": ("bench.__main__", [], "measure networks and layers beside their peers"),
}

_HELP = """\
usage: maxvision COMMAND ...

{}

maxvision COMMAND --help says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, else ``classify``; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--help"], ["-h"]):
        listed = (f"  {name:9} {what}" for name, (_, _, what) in COMMANDS.items())
        print(_HELP.format("\n".join(listed)), end="")
        return 0
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "classify"
    module, before, _ = COMMANDS[name]
    try:
        command = importlib.import_module(f"maxvision.{module}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("maxvision"):
            raise
        extra = {"bench": "bench", "batch": "ray"}.get(name, name)
        sys.stderr.write(
            f"error: maxvision {name} needs the package {missing.name};"
            f" pip install 'maxvision[{extra}]'\n"
        )
        return 2
    return int(command.main([*before, *arguments]))


def command() -> None:
    """Runs the command line as a program."""
    code = main()
    from maxvision.common.host import leave

    leave(code)
