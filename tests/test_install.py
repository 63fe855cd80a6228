"""What is installed: ``maxvision`` alone, the same in every way, and it runs anywhere.

Nothing is downloaded: environments borrow what maxvision depends on from the one that runs the
tests, and what builds it is of the extra ``test``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.name for path in (ROOT / "maxvision").iterdir() if path.is_symlink())
CAT = ROOT / "examples/cat.jpg"
PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]
INSTALL = ["install", "--no-deps", "--no-build-isolation", "--no-index"]
ALONE = ["--ignore-installed"]  # never touch what the environment of the tests has


def run(argv: Sequence[str | Path], folder: Path = ROOT) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, argv))}\n{done.stdout}{done.stderr}"
    return done.stdout


def files(folder: Path) -> set[str]:
    """Lists what is below a folder, but for what tools leave behind."""
    return {
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if os.path.basename(place) != "__pycache__" and not name.endswith((".mojoc", ".mef"))
    }


def environment(folder: Path) -> Path:
    """Makes a virtual environment with everything but maxvision, and returns its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # One of the .pth files there leads to the checkout; those of a borrowed folder do not count.
    Path(site.strip(), "dependencies.pth").write_text("\n".join(borrowed))
    code = "import importlib.util as u; print(u.find_spec('maxvision'))"
    assert run([python, "-c", code], folder) == "None\n", "the checkout is still found"
    return python


def place(python: Path, folder: Path) -> Path:
    """Tells where an interpreter that runs in a folder finds maxvision."""
    code = "import maxvision, os; print(os.path.dirname(maxvision.__file__))"
    return Path(run([python, "-c", code], folder).strip())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pip install .``: the Python of an environment with it."""
    python = environment(tmp_path_factory.mktemp("installed"))
    run([sys.executable, *PIP, "--python", python, *INSTALL, *ALONE, ROOT])
    return python


@pytest.fixture(scope="module")
def package(installed: Path) -> Path:
    """The folder of the installed package."""
    return place(installed, installed.parent)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder])
    (path,) = folder.iterdir()
    return path


def test_the_package_holds_what_it_needs(package: Path) -> None:
    there = files(package)
    folders = {name.partition("/")[0] for name in there if "/" in name}
    assert folders | {"run_graph.py"} == set(FOLDERS)
    for pattern in ("ops/**/*.mojo", "graphs/breakeven/*.json", "serve/page/*", "weights/*.txt"):
        here = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
        assert here and here <= there, pattern
    for path in (ROOT / "weights/bundled").glob("*/config.json"):
        bundled = {f"weights/bundled/{path.parent.name}/{name}" for name in os.listdir(path.parent)}
        assert bundled <= there
    assert not [name for name in there if name.startswith("bench/results")]
    assert not [name for name in there if "test" in Path(name).parts]


def test_a_wheel_holds_maxvision_alone_and_nothing_twice(package: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path])
    (path,) = tmp_path.iterdir()
    names = zipfile.ZipFile(path).namelist()
    assert len(names) == len(set(names))
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"maxvision"}
    packed = {name.removeprefix("maxvision/") for name in names if name.startswith("maxvision/")}
    assert packed == files(package)


def test_an_sdist_holds_everything_once(sdist: Path, package: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as tar:
        members = [(each.name.partition("/")[2], each) for each in tar]
    names = [name for name, _ in members]
    assert len(names) == len(set(names))
    assert {name.removeprefix("maxvision/") for name in names if name.startswith("maxvision/")} == (
        files(package)
    )
    assert not {name.partition("/")[0] for name in names if "/" in name} - {"maxvision"}
    assert [name for name, each in members if not each.isfile()] == ["maxvision/run_graph.py"]
    run([sys.executable, *PIP, *INSTALL, "--target", tmp_path, sdist])
    assert files(tmp_path / "maxvision") == files(package)
    assert "def main" in (tmp_path / "maxvision/run_graph.py").read_text()


def test_uv_installs_the_same(installed: Path, package: Path, tmp_path: Path) -> None:
    uv = pytest.importorskip("uv", reason="UV IS NOT TESTED: pip install uv").find_uv_bin()
    target = tmp_path / "target"
    argv = [uv, "--no-cache", "-q", "pip", *INSTALL, "--python", installed, "--target", target]
    run([*argv, ROOT], tmp_path)
    assert files(target / "maxvision") == files(package)


def test_an_editable_install_is_the_checkout(package: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "editable")
    run([sys.executable, *PIP, "--python", python, *INSTALL, *ALONE, "-e", ROOT])
    there = place(python, tmp_path)
    assert there == ROOT / "maxvision"
    assert {name for name in files(there) if not name.startswith("bench/results/")} == (
        files(package)
    )
    assert run([python.with_name("maxvision"), "--version"], tmp_path).startswith("maxvision ")


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's own folder, with files that are called like ours."""
    for name in FOLDERS:
        path = tmp_path / f"{name.removesuffix('.py')}.py"
        path.write_text("raise SystemExit('the file of the user was imported')\n")
    return tmp_path


def test_it_runs_elsewhere(installed: Path, package: Path, user: Path) -> None:
    program = installed.with_name("maxvision")
    assert run([program, "--version"], user).startswith("maxvision ")
    listed = run([program, "--list-models", "--json"], user)
    models = [json.loads(line) for line in listed.splitlines()]
    bundled = {path.parent.name for path in (ROOT / "weights/bundled").glob("*/config.json")}
    assert {each["name"] for each in models if each["bundled"]} == bundled
    code = """if True:
        import sys
        from maxvision.commands.main import main
        from maxvision.common.host import HOME
        assert str(HOME / "maxvision") == sys.argv[1], HOME  # from where servers start processes
        code = main(sys.argv[2:])
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if name.partition(".")[0] == "maxvision":
                assert path.startswith(sys.argv[1]), path
        sys.exit(code)
        """
    argv = [CAT, "--json", "--device", "cpu"]
    answer = json.loads(run([installed, "-c", code, package, *argv], user))
    assert answer["predictions"][0]["label"] == "tiger cat"
    assert json.loads(run([installed, "-m", "maxvision", *argv], user)) == answer


@pytest.mark.nightly  # by day tests/serve/test_start.py serves the checkout so
def test_max_serve_finds_it(installed: Path, package: Path, user: Path) -> None:
    pytest.importorskip("fastapi", reason="MAX SERVE IS NOT TESTED: pip install '.[serve]'")
    from tests.serve.started import serving

    argv = [
        str(Path(sys.executable).with_name("max")), "serve",
        "--custom-architectures", "maxvision.serve",
        "--model", str(package / "weights/bundled/resnet-cifar10"), "--devices", "cpu",
        "--host", "127.0.0.1", "--port", "0", "--max-batch-size", "2",
    ]  # fmt: skip
    environ = {"MAXVISION_FRONT_PROCESSES": "1", "MAX_SERVE_DISABLE_TELEMETRY": "1"}
    log = user / "log"
    with serving(argv, log, None, installed, user, PYTHONPATH="", **environ) as server:
        headers = {"Content-Type": "image/jpeg"}
        answer = server.client.post("/v1/classify", content=CAT.read_bytes(), headers=headers)
        assert answer.json()["data"][0]["predictions"][0]["label"] == "cat"
        assert server.stop() == 0
