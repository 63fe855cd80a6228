"""What README.md and docs/ show works: Python runs, commands parse, paths exist, the tutorials too.

The default run compiles no graph of its own: of the tutorial's op it builds the package and the
graph. README's first snippet uses graphs of the bundled model that other tests compile, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from max.driver import Device
from max.graph import DeviceRef

import maxvision
from maxvision import run_graph, runtime
from maxvision.commands.main import COMMANDS, main
from maxvision.graphs.program import Program
from maxvision.runtime.executor import Executor, Lowering, Unchecked
from tests import third_family

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
YOURS = {"graphs/foo.py", "weights/families/foo.py", "ops/glu.mojo"}
"""Files that a reader of a tutorial writes."""


class Block(NamedTuple):
    """A fenced block: where, in which language, its text, and the prose before it."""

    path: Path
    language: str
    text: str
    before: str


def blocks(path: Path, *languages: str) -> list[Block]:
    found, end, text = [], 0, path.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```\n", text, re.M | re.S):
        if not languages or match[1] in languages:
            found.append(Block(path, match[1], match[2], text[end : match.start()]))
        end = match.end()
    return found


# --- commands -----------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Splits shell into commands; what is quoted may go over lines, comments are left out."""
    pending = ""
    for line in text.splitlines(keepends=True):
        pending += line
        if pending.endswith("\\\n"):
            pending = pending[:-2]
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote is open
            continue
        pending, command = "", []
        for word in [*words, ";"]:
            if set(word) <= set("|&;"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)
    assert not pending, f"a quote is open: {pending}"


SHOWN = [
    pytest.param(command, id=f"{path.name}: {' '.join(command)}"[:90])
    for path in DOCS
    for block in blocks(path, "sh")
    for command in commands(block.text)
]


class Accepted(BaseException):
    """The parser has taken the arguments; nothing is to run."""


def accept(run: Callable[[], object], argv: list[str]) -> None:
    """Runs a command line up to where its parser has taken the arguments."""

    def stopping(parse: Callable[..., Any]) -> Callable[..., Any]:
        def parsed(*arguments: Any) -> None:
            raise Accepted(parse(*arguments))

        return parsed

    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(sys, "argv", argv)
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(
                argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name))
            )
        try:
            run()
        except Accepted:
            return
        except SystemExit as stop:
            if not stop.code:  # --help
                return
    if missing := re.search(r"needs the package [\w-]+", said.getvalue()):
        pytest.skip(f"NOT PARSED: it {missing[0]}")
    pytest.fail(said.getvalue() or "it did not ask a parser")


@pytest.mark.parametrize("command", SHOWN)
def test_commands_are_accepted(command: list[str]) -> None:
    while re.match(r"\w+=", command[0]):
        command = command[1:]
    if command[:2] == ["taskset", "-c"]:
        command = command[3:]
    for word in command[1:]:
        place = re.sub(r"^\w*=?@", "", word)
        if re.fullmatch(rf"({'|'.join(OURS)})/[\w./*-]+", place) and "DATE" not in place:
            assert list(ROOT.glob(place.rstrip("/"))), f"{place} is not there"
    program, *rest = command
    if program == "maxvision" and rest and rest[0] in COMMANDS:
        accept(lambda: main(rest), [])
    elif program in ("maxvision", "script/run") or command[:2] == ["python", "run_graph.py"]:
        rest = rest[program == "python" :]
        if "--help" not in rest:
            run_graph.parse(rest)  # which checks more than its parser; a mistake is a SystemExit
    elif command[:2] == ["python", "-m"]:
        accept(importlib.import_module(rest[1]).main, rest[1:])
    elif program == "python":
        accept(runpy.run_path(str(ROOT / rest[0]), run_name="shown")["main"], rest)
    elif program == "pip":
        for extras in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(extras.split(",")) <= set(EXTRAS)
    elif program == "script/bootstrap":
        assert set(rest) <= set(EXTRAS)
    elif program.startswith("script/"):
        assert (ROOT / program).is_file()
    else:
        assert program in KNOWN, f"{program}: a command of ours is misspelt, or add it to KNOWN"


KNOWN = (
    *("curl", "echo", "max", "serve", "ray", "haproxy", "set", "."),
    *("podman", "kubectl", "sed"),
)
"""Programs of others."""
OURS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - {
    "maxvision"
}


@pytest.mark.parametrize(
    "line",
    [
        "maxvision bench models --batchsize 1",
        "maxvision weights prune x",
        "maxvision cat.jpg --topk 3",
        "script/run cat.jpg --resume",
        "python -m tests.gpu --jsn x",
        "python weights/bundled/train.py",
        "maxvison cat.jpg",
        "maxvision cat.jpg --model weights/bundled/no-such",
        "pip install '.[gpu]'",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (command,) = commands(line)
    with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
        test_commands_are_accepted(command)


@functools.cache
def options(*words: str) -> set[str]:
    """Reads the options of a command of maxvision off its help."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert not stop.value.code, words
    return set(re.findall(r"--[a-z0-9-]+", out.getvalue()))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_and_paths_in_the_prose_exist(path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    names = {each.name for folder in (".", *OURS) for each in (ROOT / folder).glob("**/*.[pm]*")}
    wrong = []
    for span in re.findall(r"`([^`]+)`", prose):
        words = span.split()
        if not words:
            continue
        if words[0] == "maxvision" and words[1:2] and words[1] in COMMANDS:
            part = words[2:3] if words[1] in ("weights", "bench", "ops") else []
            asked = set(re.findall(r"(?<!\S)--[a-z0-9-]+", span))
            if not asked <= options(words[1], *(p for p in part if p[0] != "-")):
                wrong.append(span)
        elif words[:2] == ["python", "-m"] and not module(words[2]) and words[2] != "pytest":
            wrong.append(span)
        elif len(words) == 1 and re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", span):
            place = span.rstrip("/")
            if place.partition("/")[0] in OURS and "/" in span:
                there = place in YOURS or [*ROOT.glob(place), *ROOT.glob(f"{place}.*")]
            else:
                there = not re.fullmatch(r"[\w-]+\.(py|mojo)", place) or place in names
            if not there:
                wrong.append(span)
    assert not wrong, f"{path.name} names what is not there: {', '.join(wrong)}"


def module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()


# --- Python -------------------------------------------------------------------------------------


def run_code(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block.text, f"{block.path.name}: {block.text.splitlines()[0]}", "exec"), names)
    return names


LANGUAGES = {"", "sh", "python", "mojo", "json", "toml"}
"""No console or bash, which would be missed above."""


def test_every_block_of_code_is_run() -> None:
    """The tests below run these and no others: a new one needs a test of its own."""
    found = {path.name: len(each) for path in DOCS if (each := blocks(path, "python", "mojo"))}
    assert found == {
        "README.md": 1, "guide.md": 1, "converting.md": 5, "adding-a-model.md": 2,
        "adding-an-op.md": 8, "levels.md": 17,  # by test_levels.py
        "serving.md": 1,  # by serve/test_grpc.py
    }  # fmt: skip
    languages = {block.language for path in DOCS for block in blocks(path)}
    assert languages <= {
        "",
        "sh",
        "python",
        "mojo",
        "json",
        "toml",
        "yaml",
        "ini",
        "caddy",
        "nginx",
    }


def test_the_readmes_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bundled model in place of the hub's, and the CPU in place of the GPU."""
    asked: list[object] = []

    def load(source: str, *, device: str) -> runtime.Classifier:
        asked.append((source, device))
        return real("resnet-cifar10", device="cpu")

    real = runtime.load
    monkeypatch.setattr(maxvision, "load", load, raising=False)
    monkeypatch.chdir(ROOT)
    pixels = np.zeros((2, 128, 128, 3), np.uint8)
    names = run_code(blocks(ROOT / "README.md", "python")[0], {"pixels": pixels})
    assert asked == [("microsoft/resnet-50", "gpu")]
    assert names["logits"].shape == (2, 10)


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["lowered", "run"]
)
def test_the_guides_network(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[Program] = []

    def lower(program: Program, tensors: Any, device: Device) -> Callable[..., list[np.ndarray]]:
        place = DeviceRef.from_device(device)
        graph, _, _ = Lowering().build(program, tensors, place, Unchecked())
        assert "mo.custom" in str(graph)
        lowered.append(program)
        return lambda images: [np.zeros((len(images), 10), np.float32)]

    if not compiling:
        monkeypatch.setattr(Executor, "compile", lower)
    names = run_code(blocks(ROOT / "docs/guide.md", "python")[0], {})
    assert names["logits"].shape == (2, 10) and len(lowered) == (not compiling)
    if compiling:
        import torch
        import torch.nn.functional as F

        w = {name: torch.from_numpy(each) for name, each in names["tensors"].items()}
        random = np.random.default_rng(0).standard_normal
        for each in names["tensors"].values():
            random(each.shape, np.float32)  # drawn before the images
        images = random((2, 3, 32, 32), np.float32)
        x = F.conv2d(torch.from_numpy(images), w["stem.weight"], w["stem.bias"], padding=1).relu()
        logits = F.linear(x.mean((2, 3)), w["head.weight"], w["head.bias"])
        np.testing.assert_allclose(names["logits"], logits.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["interpreted", "run"]
)
def test_a_module_is_converted(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.graphs.interpret import Interpreted

    if not compiling:
        monkeypatch.setattr(Interpreted, "made", [], raising=False)
        monkeypatch.setattr(Executor, "compile", Interpreted.compile)
    names = run_code(blocks(ROOT / "docs/converting.md", "python")[0], {})
    assert names["fast"].report.within and "linear 2" in str(names["fast"].report)


def test_a_model_is_compiled_by_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    from maxvision.bridge import parts
    from tests.graphs.interpret import Interpreted

    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    names = run_code(blocks(ROOT / "docs/converting.md", "python")[1], {})
    assert Interpreted.made and "1 program on our kernels" in capsys.readouterr().out
    x = torch.randn(7, 16)
    with torch.no_grad():
        torch.testing.assert_close(names["fast"](x), names["model"](x), rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


def test_a_model_is_trained_and_injected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    from maxvision.bridge import parts
    from tests.graphs.interpret import Interpreted

    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    training, injection, ops = blocks(ROOT / "docs/converting.md", "python")[2:]
    torch._dynamo.reset()
    first, _, last = run_code(training, {})["losses"]
    assert last < first and len(Interpreted.made) == 2
    assert "2 programs on our kernels" in capsys.readouterr().out
    report = run_code(injection, {})["report"]
    assert sorted(report.replaced) == ["conv2d", "linear"]
    torch._dynamo.reset()
    names = run_code(ops, {})
    assert names["x"].grad is not None


def test_the_tutorials_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files, and the entry point of a package, load a checkpoint."""
    import torch
    from safetensors.torch import save_file

    from maxvision import weights

    network, family = blocks(ROOT / "docs/adding-a-model.md", "python")
    for name, block in (("maxvision.graphs.foo", network), ("my_package.convnet", family)):
        made = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        run_code(block, vars(made))
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    (point,) = blocks(ROOT / "docs/adding-a-model.md", "toml")
    ((group, values),) = tomllib.loads(point.text)["project"]["entry-points"].items()
    assert group == third_family.GROUP
    installed = third_family.install(tmp_path)
    third_family.package(installed.site, values["convnet"])
    shapes = {"classifier.weight": (10, 32), "classifier.bias": (10,)}
    for i, (c, f) in enumerate([(3, 16), (16, 32)]):
        shapes[f"features.{i}.conv.weight"] = (f, c, 3, 3)
        parts = ("weight", "bias", "running_mean", "running_var")
        shapes |= {f"features.{i}.bn.{part}": (f,) for part in parts}
    tensors = {name: torch.rand(shape) + 0.5 for name, shape in shapes.items()}
    tensors["features.0.bn.num_batches_tracked"] = torch.tensor(3)
    save_file(tensors, installed.model / "model.safetensors")
    config = installed.model / "config.json"
    config.write_text(config.read_text().replace("[16, 32, 64]", "[16, 32]"))
    with third_family.use(installed.site):
        found = weights.load(installed.model)
    assert (found.family, found.channels, len(found.labels)) == ("convnet", 3, 10)
    assert set(found.program((32, 32)).outputs) == {"stages.0", "stages.1", "features", "logits"}
    assert np.array_equal(found.tensors["head.weight"], tensors["classifier.weight"])


# --- the tutorial's op --------------------------------------------------------------------------

COPIED = ("common", "graphs", "ops", "runtime", "weights", "bench", "maxvision", "tests/ops")
FOLLOW = """
import numpy as np, torch
import torch.nn.functional as F
from max.driver import CPU
from max.graph import DeviceRef
from maxvision.graphs.net import Net
from maxvision.graphs import nodes, shapes
from maxvision.runtime.executor import Executor, Lowering
from tests.ops.cases import CASES, check, poisoned

case = next(case for case in CASES if case.name == "glu")
assert "glu" in shapes.OPS and nodes.__file__.startswith({root!r})
net = Net("glu")
net.output("y", net.glu(net.input("x", ("batch", *case.inputs[0]))))
graph, _, _ = Lowering().build(net.program(), {{}}, DeviceRef.CPU())
assert 'symbol = "glu"' in str(graph)
if {compiling}:
    run = Executor.compile(net.program(), {{}}, CPU())
    for batch in (0, 1, 3):
        (y,) = run(*case.data(batch)[0])
        assert y.shape == (batch, 3, 33)
        if batch:
            check(case, torch.from_numpy(y), batch, torch.float32)
    poison = poisoned(case)
    (y,) = run(*poison.data(3)[0])
    check(poison, torch.from_numpy(y), 3, torch.float32)
print("followed")
"""


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["built", "run"]
)
def test_the_tutorials_op(compiling: bool, tmp_path: Path) -> None:
    """Follows every step on a copy, builds the op's package, runs it and compares it with torch."""
    for folder in COPIED:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "bundled", "results", "*.mojoc"),
        )  # fmt: skip
    (tmp_path / "tests/__init__.py").touch()
    (tmp_path / "ops/__init__.mojo").write_text('"""The other ops compile elsewhere."""\n')
    for block in blocks(ROOT / "docs/adding-an-op.md", "mojo", "python"):
        follow(tmp_path, block)
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW.format(root=str(tmp_path), compiling=compiling)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "followed\n"), done.stdout + done.stderr


def follow(copy: Path, block: Block) -> None:
    """Writes a block where the prose before it says: into the last file that this names."""
    name = re.findall(r"`((?:ops|graphs|tests)/[\w/]+\.\w+)`", block.before)[-1]
    path = copy / name
    if name == "tests/ptx/page_gemm.mojo":  # which tests/ptx runs
        assert (ROOT / name).read_text() == block.text
        return
    if name in YOURS:
        assert not path.exists()
        path.write_text(block.text)
        return
    text = path.read_text()
    rows = {"graphs/shapes.py": "OPS", "graphs/lower.py": "EMIT", "tests/ops/cases.py": "CASES"}
    if name in rows:
        assert f"`{rows[name]}`" in block.before
        start = re.search(rf"^{rows[name]}\b.*[\[{{]\n", text, re.M)
        assert start, f"{name} has no {rows[name]}"
        row = block.text.rstrip().rstrip(",")
        path.write_text(f"{text[: start.end()]}    {row},\n{text[start.end() :]}")
    elif name == "graphs/net.py":
        method = "".join(f"    {line}" for line in block.text.splitlines(keepends=True))
        before, found, after = text.partition("    def relu(")
        assert found
        path.write_text(f"{before}{method}\n{found}{after}")
    else:
        path.write_text(f"{text}\n\n{block.text}")
