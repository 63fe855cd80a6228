"""The operator's files: what they say is what the server takes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")

from maxvision.commands.main import COMMANDS
from maxvision.serve.app import PROBES
from maxvision.serve.options import parse
from maxvision.serve.routes import state
from maxvision.serve.server import GRACE
from maxvision.weights import bundled
from tests.serve.started import ROOT, Server

CONTRIB = ROOT / "contrib"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (CONTRIB / "maxvision.service").read_text()
    assert "ExecStart=/opt/maxvision/bin/maxvision serve\n" in text
    unit = tmp_path / "maxvision.service"
    unit.write_text(text.replace("/opt/maxvision/bin/maxvision", sys.executable))
    argv = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_is_the_options() -> None:
    text = (CONTRIB / "maxvision.env").read_text()
    set_ = dict(re.findall(r"^(MAXVISION_\w+)=(.+)$", text, re.M))
    options = parse([], set_)
    assert (options.model, options.host, options.port) == ("resnet-cifar10", "0.0.0.0", 8000)
    known = {f"MAXVISION_{name.upper()}" for name in vars(options)}
    for path in (CONTRIB / "maxvision.env", CONTRIB / "Containerfile"):
        assert set(re.findall(r"MAXVISION_[A-Z_]+", path.read_text())) <= known


# --- the image --------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Reads the image's recipe: instruction and arguments, continued lines joined."""
    text = (CONTRIB / "Containerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def variables() -> dict[str, str]:
    """Reads what the image sets."""
    set_ = [pair for name, rest in instructions() if name == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in set_)


def only(name: str) -> str:
    """Gives the arguments of an instruction that is there once."""
    (rest,) = [rest for each, rest in instructions() if each == name]
    return rest


def copied() -> list[str]:
    """Lists what is copied from the checkout."""
    given = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    return [source for each in given if "--from" not in each[0] for source in each[:-1]]


def test_the_image_gets_what_is_installed() -> None:
    links = [path for path in (ROOT / "maxvision").iterdir() if path.is_symlink()]
    assert links
    given = copied()
    assert len(set(given)) == len(given)
    assert {os.path.basename(path.readlink()) for path in links} <= set(given)
    assert {"maxvision", "pyproject.toml", "README.md", "LICENSE"} <= set(given)
    assert all((ROOT / name).exists() for name in given)


def test_nothing_is_sent_to_the_builder_that_it_does_not_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())
    last = max(i for i, rule in enumerate(rules) if rule.startswith("!"))
    assert {"**/__pycache__", "bench/results"} <= set(rules[last:]), "the last rule that fits wins"


def test_the_image_is_built_of_what_it_gets(tmp_path: Path) -> None:
    """What is copied, links as links, makes a package that is whole."""
    pytest.importorskip("hatchling", reason="THE PACKAGE IS NOT BUILT: pip install hatchling")
    source, made = tmp_path / "src", tmp_path / "made"
    source.mkdir()
    unsent = shutil.ignore_patterns("results", "__pycache__", "*.mef", "*.mojoc")
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unsent)
        else:
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", made]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = made.iterdir()
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("serve", "graphs", "runtime", "common", "commands", "weights/bundled", "ops"):
        wanted = {
            f"maxvision/{path.relative_to(ROOT)}"
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".mojo", ".json", ".safetensors", ".html", ".js")
        }
        assert wanted and wanted <= packed, folder


def test_the_image_starts_a_server() -> None:
    program, command = json.loads(only("ENTRYPOINT"))
    assert (Path(program).name, command) == ("maxvision", "serve") and command in COMMANDS
    options = parse([], variables())
    assert (options.host, str(options.port)) == ("0.0.0.0", only("EXPOSE"))
    assert options.model in bundled()
    assert only("STOPSIGNAL") == "SIGTERM"
    froms = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert len(set(froms)) == 1, "the environment would lead to another Python"


def test_the_image_is_not_roots() -> None:
    (user,) = re.findall(r"useradd --uid (\d+) --home-dir (\S+)", str(instructions()))
    assert (only("USER"), variables()["HOME"]) == user
    assert only("WORKDIR") == only("VOLUME") == user[1]
    order = [name for name, _ in instructions()]
    assert order.index("RUN", order.index("RUN") + 1) < order.index("USER") < order.index("VOLUME")


def test_the_image_asks_for_its_health(plain: Server) -> None:
    """The very command of HEALTHCHECK, on a server that is ready and on a port that nobody has."""
    _, _, command = only("HEALTHCHECK").partition("CMD ")
    argv = [sys.executable, *json.loads(command)[1:]]
    for port, code in ((plain.url.rpartition(":")[2], 0), ("1", 1)):
        environ = {**os.environ, "MAXVISION_PORT": port}
        assert subprocess.run(argv, env=environ, capture_output=True).returncode == code


def builder() -> str | None:
    """Finds a program that builds images, and can."""
    for name in ("podman", "docker", "buildah"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "info"], capture_output=True).returncode
        ):
            return name
    return None


@pytest.mark.nightly
def test_the_image_is_built_and_answers(tmp_path: Path) -> None:
    program = builder()
    if program is None:
        pytest.skip("THE IMAGE IS NOT BUILT: neither podman nor docker nor buildah works here")
    build = [program, "build", "-f", "contrib/Containerfile", "-t", "maxvision-test", "."]
    subprocess.run(build, cwd=ROOT, check=True)
    if program == "buildah":
        return
    run = [program, "run", "--rm", "-d", "-p", "127.0.0.1::8000", "maxvision-test"]
    name = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    try:
        argv = [program, "port", name, "8000"]
        port = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        url = f"http://127.0.0.1:{port.strip().splitlines()[0].rpartition(':')[2]}"
        end = time.monotonic() + 300
        while True:
            with suppress(OSError):
                if urllib.request.urlopen(f"{url}/ping", timeout=5).status == 200:
                    break
            assert time.monotonic() < end, "it is never ready"
            time.sleep(1)
        body = (ROOT / "examples/cat.jpg").read_bytes()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/", body)) as answer:
            assert json.load(answer)[0]["label"] == "cat"
    finally:
        subprocess.run([program, "stop", "-t", "40", name], check=True)


# --- Kubernetes -------------------------------------------------------------------------------


def manifest(variant: str) -> tuple[dict, dict]:
    """Reads the Deployment and the Service, as the manifest's own command makes a GPU's of them."""
    yaml = pytest.importorskip("yaml", reason="THE MANIFEST IS NOT READ: pip install pyyaml")
    text = (CONTRIB / "kubernetes.yaml").read_text()
    if variant == "gpu":
        (script,) = re.findall(r"^#     sed '(.*)' contrib/kubernetes.yaml", text, re.M)
        done = subprocess.run(["sed", script], input=text, capture_output=True, text=True)
        text = done.stdout
    deployment, service = yaml.safe_load_all(text)
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    return deployment["spec"], service["spec"]


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_kubernetes_gets_what_the_server_has(variant: str) -> None:
    deployment, service = manifest(variant)
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    options = parse(container["args"], {})
    assert options.device == ("gpu" if variant == "gpu" else "auto")
    assert options.model in bundled()
    assert {each["name"] for each in container["env"]} == {"MAXVISION_API_KEY"}

    (port,) = container["ports"]
    assert port["containerPort"] == options.port == int(only("EXPOSE"))
    assert options.host == "0.0.0.0"
    assert [each["targetPort"] for each in service["ports"]] == [port["name"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == port["name"]
        assert get["path"] in PROBES, "asks for a key, or is answered 503 while the server drains"
        assert get["path"] in {getattr(route, "path", None) for route in state.router.routes}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "a model's end would end it"

    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(pause) + GRACE + options.drain_timeout
    limits = container["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (1 if variant == "gpu" else None)
    assert str(pod["securityContext"]["runAsUser"]) == only("USER")
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert {each["name"] for each in pod["volumes"]} == set(mounts)
    assert only("VOLUME") in mounts.values() and "/tmp" in mounts.values()
