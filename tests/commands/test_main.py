"""The command ``maxvision``: which command line it hands over to, and what a typo gets."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxvision.commands import main as command
from maxvision.commands.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def parsers(name: str) -> dict[str, argparse.ArgumentParser]:
    """Gives the parser of a command, and those of the commands in it, by what is typed."""
    made = command.module(name).parser()
    found = {name: made}
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"{name} {part}": each for part, each in action.choices.items()}
    return found


HELPS = [words for name in COMMANDS for words in parsers(name)]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^  (\w+) +\w", out, re.M) == list(COMMANDS) and not err
    assert main([]) == 2
    assert capsys.readouterr() == ("", out)


@pytest.mark.parametrize("words", HELPS)
def test_every_command_has_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words.split(), "--help"])
    assert not stop.value.code
    name = "maxvision" if words == "classify" else f"maxvision {words}"
    out = capsys.readouterr().out
    assert re.match(rf"usage: {name} (?!.*\b\w+\.py\b)", out)
    assert "--debug" in out
    assert max(map(len, out.splitlines())) <= 100


def test_helps_read_alike() -> None:
    """Options begin with a small letter and end without a full stop; there is something to read."""
    for name in COMMANDS:
        for words, made in parsers(name).items():
            for action in made._actions:
                told = action.help or ""
                assert not re.match(r"[A-Z][a-z]+ ", told), (words, told)
                assert not re.search(r"\w\.$", told), (words, told)
                assert "was expected" not in told
            if words != "bench" and not words.startswith("bench "):
                assert made.description, words


def test_help_takes_no_time() -> None:
    """What takes long to import is imported by no parser."""
    code = (
        "import sys\nfrom maxvision.commands.main import COMMANDS, module\n"
        "for name in COMMANDS: module(name).parser().format_help()\n"
        "heavy = {'max', 'numpy', 'PIL', 'rich', 'torch', 'argcomplete', 'maxvision.graphs'}\n"
        "sys.exit(f'imported {found}' if (found := heavy & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_debug_may_stand_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "inspect", "nothing"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_images_need_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("maxvision.run_graph.main", lambda argv: asked.append(argv) or 0)
    for words in ["cat.jpg"], ["--version"], ["photos", "--json"], ["./serve"], ["srve.jpg"]:
        assert main(words) == 0
        assert main(["classify", *words]) == 0
        assert asked == [words, words]
        asked.clear()


@pytest.mark.parametrize(
    ("word", "meant"),
    [("srve", "serve"), ("wieghts", "weights"), ("Compile", "compile"), ("help", "--help")],
)
def test_a_typo_gets_a_suggestion(
    word: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word, "x"]) == 2
    assert capsys.readouterr().err == (
        f"error: {word} is neither a command nor an image; did you mean maxvision {meant}?\n"
    )
    (tmp_path / word).mkdir()
    monkeypatch.setattr("maxvision.run_graph.main", lambda argv: 0)
    assert main([word, "x"]) == 0  # a folder of images


@pytest.mark.parametrize(
    ("words", "owner", "option"),
    [
        (["--topk", "3", "x.jpg"], "classify", "--top-k"),
        (["x.jpg", "--topk=3"], "classify", "--top-k"),
        (["classify", "--topk", "3", "x.jpg"], "classify", "--top-k"),
        (["serve", "--prot", "1"], "serve", "--port"),
    ],
)
def test_a_mistyped_option_points_to_the_help_that_lists_it(
    words: list[str], owner: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: there is no option ")
    assert first.endswith(f"; did you mean {option}?")
    assert second == f"maxvision {owner} --help lists what it takes"
    with pytest.raises(SystemExit):
        main([owner, "--help"])
    assert f"  {option} " in capsys.readouterr().out


def test_a_script_points_to_its_own_help() -> None:
    argv = [sys.executable, "run_graph.py", "--topk", "3", "x.jpg"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("\nrun_graph.py --help lists what it takes\n")


def test_a_command_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError("No module named 'a.b'", name="a.b")

    monkeypatch.setattr(command.importlib, "import_module", missing)
    assert main(["serve"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: maxvision serve needs the package a, which this Python does not")
    assert main(["serve", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_batch_of_what_is_not_there_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", str(tmp_path / "gone"), "-o", str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/gone: there is no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["maxvision", "serve", "bench"])
def test_modules_run_in_a_checkout(module: str) -> None:
    argv = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: maxvision")
