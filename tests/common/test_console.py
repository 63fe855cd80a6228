"""How a command ends: its code, and what an error looks like with ``--debug`` and without."""

from __future__ import annotations

import io
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest

from maxvision.common import console
from maxvision.common.console import Unbuffered, complain, exit_code, working
from maxvision.common.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]


def ends(error: BaseException | None, debug: bool = False, **options: object) -> int:
    def work() -> int:
        if error:
            raise error
        return 1

    return exit_code(work, Namespace(debug=debug), "maxvision thing", **options)  # type: ignore


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 1, ""),
        (KeyboardInterrupt(), 130, ""),
        (ModelError("m: there is none; name another"), 2, "m: there is none; name another"),
        (
            RuntimeError("out of memory\nand more"),
            2,
            "internal error: RuntimeError: out of memory; --debug shows where",
        ),
        (
            ModuleNotFoundError("gone", name="maxvision.gone"),
            2,
            "internal error: ModuleNotFoundError: gone; --debug shows where",
        ),
    ],
)
def test_codes_and_sentences(
    error: BaseException | None, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(error) == code
    assert capsys.readouterr().err == (f"error: {said}\n" if said else "")


@pytest.mark.parametrize("error", [ModelError("m: none"), RuntimeError("m: none")])
def test_debug_is_a_traceback_in_place_of_the_sentence(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(error, debug=True) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "error: m: none" not in said
    assert said.rstrip().endswith(f"{type(error).__name__}: m: none")


def test_a_server_fails_with_another_code(capsys: pytest.CaptureFixture[str]) -> None:
    """systemd starts it again after 1, and not after a mistake of the user's."""
    assert ends(RuntimeError("x"), internal=1) == 1
    assert ends(ModelError("x"), internal=1) == 2


@pytest.mark.parametrize(
    ("package", "bootstrap", "prefix", "way"),
    [
        ("rich", True, "elsewhere", "activate the environment that script/run sets up: . .venv/"),
        ("max.driver", True, ".venv", "run script/bootstrap"),
        ("torch", True, ".venv", "run script/bootstrap bench"),
        ("torch", True, "elsewhere", "run pip install '.[bench]' in the checkout"),
        ("torch", False, "elsewhere", "run pip install 'maxvision[bench]'"),
        ("numpy", False, "elsewhere", "install maxvision again"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_way_to_it(
    package: str,
    bootstrap: bool,
    prefix: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if bootstrap:
        (tmp_path / "script").mkdir()
        (tmp_path / "script/bootstrap").touch()
    monkeypatch.setattr(console, "HOME", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / prefix))
    assert ends(ModuleNotFoundError("no", name=package), extra="bench") == 2
    name = package.partition(".")[0]
    assert capsys.readouterr().err.startswith(
        f"error: maxvision thing needs the package {name}, which this Python does not have; {way}"
    )


@pytest.mark.parametrize(
    "argv",
    [["run_graph.py", "x.jpg"], ["-m", "maxvision", "inspect", "x"], ["-m", "serve"]],
)
def test_outside_of_the_environment_there_is_no_traceback(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-S", *argv],  # no site-packages
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "which this Python does not have; " in done.stderr


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full to write to")


@FULL
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("--version >/dev/full", 2, "error: standard output: the disk is full\n"),
        ("nothere.jpg --json >/dev/full", 2, "error: standard output: the disk is full\n"),
        ("serve --help >/dev/full", 2, "error: standard output: the disk is full\n"),
        ("nothere.jpg --json >&-", 2, "error: standard output: it is closed\n"),
        ("--version 2>/dev/full", 0, ""),
        ("--version 2>&-", 0, ""),
        ("nothere.jpg 2>/dev/full", 1, ""),
        ("nothere.jpg 2>&-", 1, ""),
        ("nothere.jpg >&-", 1, "error: nothere.jpg: "),
        ("--version | true", 0, ""),
    ],
)
def test_streams_that_take_nothing(command: str, code: int, said: str) -> None:
    argv = ["bash", "-c", f"{sys.executable} -m maxvision {command}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(said)), done.stderr
    assert done.stderr.startswith(said)


def test_where_no_terminal_is_what_takes_long_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with working("loading m") as say:
        assert capsys.readouterr().err == ""
        say("compiling m; it may take a minute")
        assert capsys.readouterr().err == "compiling m; it may take a minute\n"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_is_answered_while_the_compiler_runs(times: int) -> None:
    """A second one does not wait for the compiler."""
    code = """if True:
        import hashlib, os, signal, sys, threading, time
        from argparse import Namespace
        from maxvision.common import console
        console.PROMPT = 0.05
        times = int(sys.argv[1])
        def press():
            for _ in range(times):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGINT)
        def work():
            with console.working("loading m") as say:
                say("compiling m")
                threading.Thread(target=press, daemon=True).start()
                # Native code, as compiling is.
                hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000 * 20 ** (times - 1))
                print("compiled")
        raise SystemExit(console.exit_code(work, Namespace(), "maxvision thing"))
        """
    argv = [sys.executable, "-c", code, str(times)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    said = "stopping when the compiler returns, within a minute; Ctrl-C again stops at once"
    assert done.stderr.splitlines() == ["compiling m", said]


def test_only_a_terminal_gets_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    complain("a\x1b[2Jb")
    assert terminal.getvalue() == "\x1b[1;31merror: \x1b[0ma\\x1b[2Jb\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    complain("a")
    assert terminal.getvalue() == "error: a\n"


@FULL
def test_a_full_disk_takes_what_it_can() -> None:
    with open("/dev/full", "w") as full:
        stream = Unbuffered.of(full)
        print("lost", file=stream, flush=True)
        with pytest.raises(OSError, match="No space left"):
            print("kept", file=full, flush=True)
        with suppress(OSError):
            full.close()
    assert Unbuffered.of(None) is None


def test_the_log_has_the_encoding_of_the_terminal(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        print("ü", file=Unbuffered.of(file))
    assert (tmp_path / "log").read_bytes() == b"\\xfc\n"
