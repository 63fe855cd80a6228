"""The command ``maxvision``: which command line it hands over to, and what a typo gets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxvision.commands import main as command
from maxvision.commands.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
HELPS = [[name] for name in COMMANDS] + [
    ["weights", "inspect"], ["weights", "convert"], ["weights", "prune"], ["weights", "verify"],
    ["bench", "models"], ["bench", "serve"],
]  # fmt: skip


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^  (\w+) +\w", out, re.M) == list(COMMANDS) and not err
    assert main([]) == 2
    assert capsys.readouterr() == ("", out)


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert not stop.value.code
    name = "maxvision" if words == ["classify"] else f"maxvision {' '.join(words)}"
    assert re.match(rf"usage: {name} (?!.*\b\w+\.py\b)", capsys.readouterr().out)


def test_images_need_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("maxvision.run_graph.main", lambda argv: asked.append(argv) or 0)
    for words in ["cat.jpg"], ["--version"], ["photos", "--json"], ["./serve"], ["srve.jpg"]:
        assert main(words) == 0
        assert main(["classify", *words]) == 0
        assert asked == [words, words]
        asked.clear()


@pytest.mark.parametrize(
    ("word", "meant"), [("srve", "serve"), ("wieghts", "weights"), ("Compile", "compile")]
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


@pytest.mark.parametrize("name", ["serve", "batch", "bench"])
def test_a_missing_extra_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError("No module named 'a.b'", name="a.b")

    monkeypatch.setattr(command.importlib, "import_module", missing)
    assert main([name]) == 2
    extra = COMMANDS[name].extra
    assert capsys.readouterr().err == (
        f"error: maxvision {name} needs the package a, which is not installed;"
        f" run pip install '.[{extra}]' in the checkout\n"
    )


def test_a_mistake_of_ours_is_not_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError("no such module", name="maxvision.gone")

    monkeypatch.setattr(command.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError):
        main(["serve"])


@pytest.mark.parametrize("module", ["maxvision", "serve", "bench"])
def test_modules_run_in_a_checkout(module: str) -> None:
    argv = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: maxvision")
