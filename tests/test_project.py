"""The project's own files agree with each other, and stand on no particular machine."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxvision import run_graph

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
SCRIPTS = [*sorted((ROOT / "script").iterdir()), ROOT / ".ci/run"]
FLOORS = (  # from the ground up; a folder imports from its own floor and from those below
    {"common", "ops"},
    {"graphs"},
    {"weights"},
    {"runtime"},
    {"bridge"},
    {"serve"},
    {"bench"},
    {"commands", "run_graph", "maxvision"},
)
SHOWN = {".ci", ".github", ".gitignore"}  # the hidden files that are the project's
ELSEWHERE = re.compile(
    r"(?<![\w.\]])/(work|root|home|tmp/[a-z])/"  # paths of one machine
    r"|pypi\.org|pythonhosted|deb\.debian|npmjs"  # where packages come from is the user's choice
)


def files(*suffixes: str) -> Iterator[Path]:
    """Walks over the project's files, not over what tools leave behind."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            n for n in folders if (n[0] != "." or n in SHOWN) and n not in ("__pycache__", "build")
        ]
        names = [n for n in names if n[0] != "." or n in SHOWN]  # a worktree's .git is a file
        for path in (Path(folder, name) for name in names):
            if not suffixes or path.suffix in suffixes:
                yield path


def test_pixi_takes_its_pins_from_pyproject() -> None:
    project = PYPROJECT["project"]
    assert PIXI["dependencies"] == {"python": project["requires-python"]}
    assert PIXI["workspace"]["name"] == project["name"]
    itself = {"path": ".", "editable": True}
    assert PIXI["pypi-dependencies"] == {project["name"]: itself}
    for name, feature in PIXI["feature"].items():
        assert name in PIXI["environments"]
        assert feature["pypi-dependencies"] == {project["name"]: {**itself, "extras": [name]}}
        assert name in project["optional-dependencies"]


def test_pixi_tasks_run_what_exists() -> None:
    tasks = dict(PIXI["tasks"])
    for feature in PIXI["feature"].values():
        tasks |= feature.get("tasks", {})
    assert {"run", "test", "fmt", "lint", "docs"} <= set(tasks)
    for folder in ("serve", "bench"):
        assert (folder in tasks) == (ROOT / folder).is_dir()
    for task in tasks.values():
        for word in task.split():
            if "/" in word or word.endswith(".py"):
                assert (ROOT / word).is_file(), task
        if module := re.match(r"python -m (bench|serve)\.(\w+)", task):
            assert (ROOT / module[1] / f"{module[2]}.py").is_file(), task


def test_the_version_is_one() -> None:
    version = PYPROJECT["project"]["version"]
    assert run_graph.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_the_folders_at_the_top() -> None:
    links = {path.stem: path for path in (ROOT / "maxvision").iterdir() if path.is_symlink()}
    for name, link in links.items():
        assert link.resolve() == ROOT / link.name, f"maxvision/{link.name} leads elsewhere"
        assert name in set().union(*FLOORS), f"{name} has no floor"
    banned = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == set(links), "ruff has to ban the bare names of what maxvision/ links to"


def test_imports_run_one_way() -> None:
    """A folder imports from lower floors, and files of one folder not in circles."""
    floors = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    paths = [path for name in floors for path in (ROOT / name).rglob("*.py")]
    modules = {_module(path): path for path in [*paths, ROOT / "run_graph.py"]}
    uses = {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}

    def floor(module: str) -> int:
        return floors.get(module.removeprefix("maxvision.").partition(".")[0], len(FLOORS) - 1)

    up = [f"{one} -> {two}" for one in uses for two in uses[one] if floor(one) < floor(two)]
    assert not up, "\n".join(sorted(up))
    graphlib.TopologicalSorter(uses).prepare()  # its error names a circle


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "maxvision" else ("maxvision", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write the whole name of what is imported"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:  # the last part is a module's, or a name in one
            yield from [part for part in (name, name.rpartition(".")[0]) if part in modules][:1]


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "exec script/test\n" in (ROOT / ".ci/run").read_text()
    assert "script/test" in (ROOT / "README.md").read_text()
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert "run: script/test --all\n" in nightly


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_run(path: Path) -> None:
    assert os.access(path, os.X_OK), f"{path} is not executable"
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize("python", ["no-such-python", "bash"])
def test_set_up_says_what_is_missing(tmp_path: Path, python: str) -> None:
    shutil.copytree(ROOT / "script", tmp_path / "script")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run(
        [tmp_path / "script/run", "cat.jpg"],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no Python 3.10 to 3.13 was found" in done.stderr
    assert "apt install python3-pip" in done.stderr
    assert not (tmp_path / ".venv").exists()


EXTRAS = [
    "serve",
    "grpc",
    "nvjpeg",
    "ray",
    "torch",
    "onnx",
    "convert",
    "bench",
    "peers",
    "triton",
    "parquet",
    "completion",
    "test",
]
PYTHON = """#!/bin/bash
# Takes the place of Python, in .venv too: what pip does is up to $PIP.
case $1$2 in
  -mvenv) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  */__pip-runner__.py*)
    case $PIP in
      stopped) trap - INT; kill -INT $PPID; sleep 0.1; exit 2 ;;
      interrupted) kill -TERM $PPID; exit 1 ;;
      *) echo "pip ${@: -2:1}" >>log ;;
    esac ;;
  -c*) [[ $2 != *"import maxvision"* || ! $BROKEN ]] ;;
  --version) echo Python ;;
esac
"""


INSIDE = """#!/bin/bash
# Takes the place of .venv's own Python, which runs the pip of another one.
case $1$2 in
  */__pip-runner__.py*) echo "pip ${@: -2:1}" >>log ;;
  -mpip | -c*"import pip"*) exit 1 ;;
esac
"""


def test_a_set_up_that_is_interrupted_leaves_what_was_there(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "script", tmp_path / "script")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def bootstrap(*extra: str, **environ: str) -> tuple[int, list[str], str]:
        """Returns the exit code, what pip installed, and what was said."""
        log.write_text("")
        done = subprocess.run(
            [tmp_path / "script/bootstrap", *extra],
            env={**os.environ, "PYTHON": str(python), **environ},
            capture_output=True,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored under nohup
        )
        return done.returncode, log.read_text().splitlines(), done.stderr

    assert bootstrap(PIP="interrupted")[0] and not (tmp_path / ".venv/ready").exists()
    code, _, said = bootstrap(PIP="stopped")
    assert code == 130 and said.splitlines()[1:] == [
        "maxvision: interrupted; the same command begins again"
    ]
    (tmp_path / ".venv/half").touch()
    code, installed, said = bootstrap()
    assert (code, installed) == (0, ["pip ."])
    assert ". .venv/bin/activate gives this shell the command maxvision" in said
    assert not (tmp_path / ".venv/half").exists(), "what was half there is begun anew"
    assert bootstrap() == (0, [], "")
    (tmp_path / ".venv/kept").touch()
    assert bootstrap("test", PIP="interrupted")[0]
    assert bootstrap() == (0, [], ""), "without the tests it is as it was"
    assert bootstrap("test", PIP="interrupted")[0]
    assert bootstrap(BROKEN="1")[:2] == (0, ["pip ."]), "it is mended"
    assert bootstrap("test")[:2] == (0, ["pip .[test]"])
    assert bootstrap("test") == bootstrap() == (0, [], "")
    assert (tmp_path / ".venv/kept").exists(), "and never thrown away"


def test_set_up_passes_over_the_environments_own_python(tmp_path: Path) -> None:
    """Which comes first on PATH where it is active, and has no pip."""
    shutil.copytree(ROOT / "script", tmp_path / "script")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    outside, inside = tmp_path / "outside", tmp_path / ".venv/bin"
    for folder, text in ((outside, PYTHON), (inside, INSIDE)):
        folder.mkdir(parents=True)
        (folder / "python3.11").write_text(text)
        (folder / "python3.11").chmod(0o755)
    sum = subprocess.run(["cksum"], input=(tmp_path / "pyproject.toml").read_bytes(), stdout=-1)
    (inside / "python").symlink_to("python3.11")
    (inside.parent / "ready").write_text(f"{sum.stdout.decode().strip()} in {tmp_path} \n")

    def bootstrap(*extras: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{inside}:{outside}:/usr/bin:/bin", "HOME": str(tmp_path)}
        argv = [tmp_path / "script/bootstrap", *extras]
        return subprocess.run(argv, env=environ, capture_output=True, text=True)

    def installed() -> list[str]:
        return (tmp_path / "log").read_text().split()

    done = bootstrap("serve")
    assert done.returncode == 0, done.stderr
    assert installed() == ["pip", ".[serve]"]
    assert bootstrap("bench", "peers").returncode == 0
    assert installed()[2:] == ["pip", ".[bench,peers,serve]"], "what was added stays"
    done = bootstrap("srve")
    assert done.returncode == 2
    assert f"there is no extra srve; the extras are {' '.join(EXTRAS)}\n" in done.stderr
    done = bootstrap("--help")
    assert done.returncode == 0 and f"of: {' '.join(EXTRAS)}\n" in done.stdout


@pytest.mark.parametrize("name", ["lint", "format"])
def test_a_script_says_how_to_get_its_tools(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "script", tmp_path / "script")
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([tmp_path / "script" / name], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r"the \w+ are missing; run script/bootstrap test\n", done.stderr)


def test_nothing_names_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text("utf-8", "ignore").splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert not found, "\n".join(found)


def test_links_lead_somewhere() -> None:
    for path in files(".md"):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_example_has_its_source() -> None:
    text = (ROOT / "examples/README.md").read_text()
    given = {path.name for path in (ROOT / "examples").iterdir()}
    pictures = given - {"README.md", "tour.ipynb", "levels.ipynb", "levels", "__pycache__"}
    assert pictures
    assert set(re.findall(r"`(\w+\.\w+)` \|", text)) == pictures
