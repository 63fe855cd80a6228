"""What the command lines print, what is going on meanwhile, and how they end.

rich, which draws tables and progress, is imported where something is drawn.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from maxvision.common.errors import UserError
from maxvision.common.host import HOME, leave, reason
from maxvision.common.text import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

_REQUIRED = ("max", "mojo", "numpy", "PIL", "huggingface_hub", "safetensors", "rich")
"""Packages that maxvision always needs, by the names they are imported by."""


PROMPT = 0.5
"""Seconds in which Ctrl-C should end what is going on."""


def console(stream: Any) -> Console:
    """Makes a console that prints plain text to a stream, as wide as the terminal."""
    # Not a terminal: nothing wraps or is cut short, whoever reads it wants the lines whole.
    width = None if stream.isatty() else 10_000
    return _plain()(file=stream, width=width, markup=False, highlight=False, emoji=False)


@cache
def _plain() -> type[Console]:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError  # and not rich's SystemExit(1)

    return Plain


class Unbuffered(io.TextIOBase):
    """Writes text to a file descriptor at once; what a full disk, or nobody, takes is lost.

    Python's own streams keep it and raise at the next flush, which every start of a process does.

    Args:
        fd: The file descriptor.
        encoding: Of the text; what it has no character for is written as an escape.
    """

    encoding = "utf-8"

    def __init__(self, fd: int, encoding: str = "utf-8") -> None:
        self._fd = fd
        self.encoding = encoding

    @classmethod
    def of(cls, stream: Any) -> Any:
        """Makes one for a stream's file; returns the stream if it has none."""
        try:
            return cls(stream.fileno(), stream.encoding)
        except (OSError, ValueError, AttributeError):  # a test's, or None
            return stream

    def fileno(self) -> int:
        """Returns the file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Tells whether it is a terminal's."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Tells that it takes text."""
        return True

    def write(self, text: str) -> int:
        """Writes text, as far as that goes."""
        data = memoryview(text.encode(self.encoding, errors="backslashreplace"))
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._fd, data) :]
        return len(text)


def complain(message: str, kind: str = "error: ") -> None:
    """Writes one line to standard error, if that takes it: the disk may be full."""
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        kind = kind and f"\x1b[1;31m{kind}\x1b[0m"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{kind}{clean(message)}\n")
        sys.stderr.flush()


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs a command line as a program, and ends the process with its exit code.

    A standard stream may be closed, or its disk full. What standard error does not take is lost,
    and the work goes on; what standard output does not take is an error, code 2.
    """
    if sys.stdout is None:  # take its number, or a file of ours gets it; to write to it fails
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.stdout = _Output.of(sys.stdout)
    sys.stderr = Unbuffered.of(sys.stderr)
    try:
        code = main()
    except SystemExit as stop:  # of a parser
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    leave(2 if _refused() else code)


class _Output(io.FileIO):
    """Is the file of standard output, and keeps the error that a write to it had."""

    error: OSError | None = None

    @classmethod
    def of(cls, stream: Any) -> Any:
        """Makes a text stream on the file of another one."""
        return io.TextIOWrapper(
            io.BufferedWriter(cls(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering or stream.write_through,
        )

    def write(self, data: Any) -> int:
        """Writes what the file takes."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _refused() -> bool:
    """Tells whether standard output does not take what was printed, and says why."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(file, _Output) or file.error is None:  # or of whoever has called main
        return False
    error, file.error = file.error, None
    _discard()
    if isinstance(error, BrokenPipeError):  # the reader, say `head`, has what it wanted
        return False
    closed = error.errno == errno.EBADF
    complain(f"standard output: {'it is closed' if closed else reason(error)}")
    return True


def _discard() -> None:
    """Lets what is still to be printed go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(
    work: Callable[[], int], options: Any, program: str, extra: str = "", internal: int = 2
) -> int:
    """Runs a command, tells what goes wrong in a sentence, and returns the exit code.

    Args:
        work: The command; it returns its exit code.
        options: The command line; with ``debug`` an error is a traceback.
        program: What the user has called.
        extra: The extra of pyproject.toml that holds what the command needs beyond the rest.
        internal: The code of an error that is no mistake of the user's.

    Returns:
        What ``work`` returns; 2 for a mistake, 130 for Ctrl-C, 141 if nobody reads any more.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # the reader, say `head`, has what it wanted
        _discard()
        return 141  # as a shell reports SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and _refused():  # a buffer keeps what it could not write
            return 2
        told = str(error) if isinstance(error, UserError) else missing(error, program, extra)
        if getattr(options, "debug", False):
            import traceback

            traceback.print_exception(error)
        elif told:
            complain(told)
        else:
            first = str(error).strip().partition("\n")[0] or "no message"
            complain(f"internal error: {type(error).__name__}: {first}; --debug shows where")
        return 2 if told else internal


def way_to(extra: str) -> str:
    """Says how to install an extra of pyproject.toml, or what maxvision always needs if empty."""
    checkout = (HOME / "script" / "bootstrap").is_file()
    if checkout and os.path.realpath(sys.prefix) == os.path.realpath(HOME / ".venv"):
        return f"run script/bootstrap {extra}".strip()  # no pip is in there
    if checkout and not extra:
        return "activate the environment that script/run sets up: . .venv/bin/activate"
    if checkout:
        return f"run pip install '.[{extra}]' in the checkout"
    return f"run pip install 'maxvision[{extra}]'" if extra else "install maxvision again"


def missing(error: Exception, program: str, extra: str) -> str:
    """Says how to get a package that an import did not find; nothing if that is not the error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    package = (error.name or "").partition(".")[0]
    if package in ("", "maxvision"):
        return ""
    way = way_to("" if package in _REQUIRED else extra)
    return f"{program} needs the package {package}, which this Python does not have; {way}"


@contextlib.contextmanager
def working(message: str) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, and for how long.

    On a terminal that is a line that goes when it is done. Elsewhere what is said meanwhile, which
    is what takes long, is a line each on standard error.

    Yields:
        A function that changes the message.
    """
    if not sys.stderr.isatty():  # rich alone would also obey FORCE_COLOR
        with _stopping(lambda text: complain(text, kind="")) as say:
            yield say
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with progress_bar(SpinnerColumn(), text, TimeElapsedColumn()) as progress:
        task = progress.add_task(clean(message), total=None)
        with _stopping(lambda text: progress.reset(task, description=clean(text))) as say:
            yield say


@contextlib.contextmanager
def _stopping(say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Lets Ctrl-C be answered at once: Python waits with it until the compiler returns.

    A second Ctrl-C, after that was said, ends the process there and then, as SIGKILL would.
    """
    if threading.current_thread() is not threading.main_thread():
        yield say
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    done = threading.Event()

    def answer() -> None:
        said = False
        while signals := ours.recv(1):
            if signals[0] != signal.SIGINT or done.wait(0 if said else PROMPT):
                continue
            if said:
                if sys.stderr.isatty():
                    sys.stderr.write("\x1b[?25h\n")  # the cursor, which a progress bar hides
                leave(130)
            say("stopping when the compiler returns, within a minute; Ctrl-C again stops at once")
            said = True

    before = signal.set_wakeup_fd(theirs.fileno())
    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    try:
        yield say
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        theirs.close()
        answering.join()
        ours.close()


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Makes a display of progress on standard error that goes when it is done."""
    from rich.progress import Progress

    return Progress(
        *columns,
        console=console(sys.stderr),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
