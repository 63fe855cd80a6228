"""What the command lines print: messages, and what is going on meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from maxvision.common.text import utf8


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # and not rich's SystemExit(1)


def console(stream: Any) -> Console:
    """Makes a console that prints plain text to a stream, as wide as the terminal."""
    # Not a terminal: nothing wraps or is cut short, whoever reads it wants the lines whole.
    width = None if stream.isatty() else 10_000
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def clean(text: str) -> str:
    r"""Writes control characters as \x.. too: a terminal would obey them."""
    text = utf8(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def complain(message: str, kind: str = "error: ") -> None:
    """Writes one line to standard error, if that takes it: the disk may be full."""
    text = Text(kind, style="bold red").append(clean(message), style="default not bold")
    with contextlib.suppress(OSError):
        console(sys.stderr).print(text, soft_wrap=True)


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, and for how long, while standard error is a terminal.

    Yields:
        A function that changes the message.
    """
    if not sys.stderr.isatty():  # rich alone would also obey FORCE_COLOR
        yield lambda _: None
        return
    text = TextColumn("{task.description}", markup=False)
    with progress_bar(SpinnerColumn(), text, TimeElapsedColumn()) as progress:
        task = progress.add_task(clean(message), total=None)
        yield lambda text: progress.reset(task, description=clean(text))


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Makes a display of progress on standard error that goes when it is done."""
    return Progress(
        *columns,
        console=console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
