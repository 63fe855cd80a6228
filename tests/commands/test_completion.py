"""What the shell completes: the program is called as bash calls it, with argcomplete."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxvision import weights
from maxvision.commands import completion
from maxvision.commands.completion import PROGRAMS, main

ROOT = Path(__file__).resolve().parents[2]
argcomplete = pytest.importorskip(
    "argcomplete", reason="COMPLETION IS NOT TESTED: pip install argcomplete"
)


def completed(line: str, folder: Path = ROOT) -> set[str]:
    """Asks for what could end ``line``, with the cursor behind it."""
    program = "from maxvision.commands.main import main; main()"
    if line.startswith("run_graph.py"):
        program = f"import runpy; runpy.run_path({str(ROOT / 'run_graph.py')!r}, None, '__main__')"
    # argcomplete answers on descriptor 8.
    code = f"import os; os.dup2(1, 8); {program}\nassert 'max' not in __import__('sys').modules"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(argcomplete.__file__).parents[1])]),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
        "_ARGCOMPLETE_SHELL": "fish",  # bash splits words at : and =
    }
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {each.partition("\t")[0].strip() for each in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize(
    ("line", "among"),
    [
        ("maxvision insp", {"inspect"}),
        ("maxvision weights ins", {"inspect"}),
        ("maxvision weights inspect x --d", {"--device", "--dtype", "--debug"}),
        ("maxvision compile x --dtype b", {"bfloat16"}),
        ("maxvision bench models --ener", {"--energy"}),
        ("maxvision x.jpg --top", {"--top-k"}),
        ("maxvision weights inspect x --device ", {"auto", "cpu", "gpu", "gpu:0"}),
        ("maxvision serve --model resnet-cifar10-", {"resnet-cifar10-p80"}),
        ("maxvision time cvt-c", {"cvt-cifar10"}),
        ("run_graph.py x.jpg --sparse ", {"auto", "always", "never"}),
    ],
)
def test_what_comes_next(line: str, among: set[str]) -> None:
    assert completed(line) == among


def test_the_first_word_is_a_command_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").touch()
    assert {"serve", "weights", "completion", "cat.jpg"} <= completed("maxvision ", tmp_path)
    assert completed("maxvision --li", tmp_path) == {"--list-models"}


def test_the_models_are_those_that_load() -> None:
    assert completion.named() == weights.named()


def test_it_takes_no_time() -> None:
    """MAX alone would take as long; the best of five, as others use the machine."""

    def seconds() -> float:
        start = time.perf_counter()
        completed("maxvision serve --max-b")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_code_names_the_programs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    code = capsys.readouterr().out
    assert all(program in code for program in PROGRAMS) and "_ARGCOMPLETE" in code


def test_programs_are_marked_for_the_global_completion() -> None:
    for path in ("run_graph.py", "commands/main.py"):
        assert "PYTHON_ARGCOMPLETE_OK" in (ROOT / path).read_text()[:1024]
