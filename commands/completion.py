"""The command ``maxvision completion``: what lets a shell complete commands, options and values.

The shell calls the program itself with ``_ARGCOMPLETE`` set, and argcomplete answers from the
parser of the command that is being typed. Nothing of MAX is imported for that.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from maxvision.common.arguments import DEFAULT_MODEL, Parser, device
from maxvision.common.console import exit_code
from maxvision.common.host import HOME

_HELP = """\
Print what makes a shell complete maxvision's commands, options and their values. Put it into the
shell's file, with the environment active in which maxvision is installed:

  bash  maxvision completion bash >> ~/.bashrc
  zsh   maxvision completion zsh >> ~/.zshrc
  fish  maxvision completion fish > ~/.config/fish/completions/maxvision.fish

It needs the package argcomplete, which the extra completion installs."""

PROGRAMS = ("maxvision", "run_graph.py")


def parser() -> Parser:
    """Describes the arguments."""
    made = Parser(prog="maxvision completion", description=_HELP)
    made.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL",
        help="bash, zsh or fish")  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = parser().parse_args(arguments)
    return exit_code(lambda: _print(options), options, "maxvision completion", "completion")


def _print(options: argparse.Namespace) -> int:
    from argcomplete import shellcode

    print(shellcode(PROGRAMS, shell=options.shell).strip())
    return 0


def complete(commands: Collection[str], parser_of: Callable[[str], Parser]) -> None:
    """Answers the shell that called ``maxvision`` to complete a line, and ends the process.

    Args:
        commands: Those that there are.
        parser_of: Gives the parser of one.
    """
    line, point = os.environ.get("COMP_LINE", ""), int(os.environ.get("COMP_POINT", "0"))
    words = line.encode()[:point].decode(errors="ignore").split()
    typed = words[1:] if line[-1:].isspace() or point < len(line) else words[1:-1]
    name = typed[0] if typed and typed[0] in commands else "classify"
    made = parser_of(name)
    if typed and typed[0] in commands:
        os.environ["_ARGCOMPLETE"] = "2"  # the program that is completed is two words long
    elif not typed:
        for action in made._actions:
            if action.dest == "images":
                _complete(action, _words_and_files, commands)
    answer(made)


def answer(made: Parser) -> None:
    """Lets argcomplete answer for a parser, and end the process."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        os._exit(1)  # the shell shows nothing
    for action in _actions(made):
        if action.dest in ("model", "models"):
            _complete(action, _words_and_files, named())
        elif action.type is device:
            _complete(action, _words, ("auto", "cpu", "gpu", "gpu:0"))
    argcomplete.autocomplete(made, always_complete_options=False)


def _actions(made: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Walks over the options and arguments of a parser and of the commands in it."""
    for action in made._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _actions(part)


def _complete(
    action: argparse.Action, completer: Callable[..., list[str]], words: Collection[str]
) -> None:
    action.completer = partial(completer, words)  # type: ignore[attr-defined]


def named() -> list[str]:
    """Lists the models that have a name, without the imports that weights/source.py takes."""
    folder = HOME / "maxvision" / "weights" / "bundled"
    return sorted([DEFAULT_MODEL, *(path.parent.name for path in folder.glob("*/config.json"))])


def _words(words: Collection[str], prefix: str, **_: Any) -> list[str]:
    return list(words)


def _words_and_files(words: Collection[str], prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*words, *FilesCompleter()(prefix)]
