"""The operator's files: what they say is what the server takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxvision.serve.options import parse
from tests.serve.started import ROOT

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


def test_the_container_gets_what_is_installed() -> None:
    links = [path for path in (ROOT / "maxvision").iterdir() if path.is_symlink()]
    assert links
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (CONTRIB / "Containerfile").read_text(), re.M)
    given = set(" ".join(copied).split())
    assert {os.path.basename(path.readlink()) for path in links} <= given
    assert {"maxvision", "pyproject.toml", "README.md", "LICENSE"} <= given
    assert all((ROOT / name).exists() for name in given)


def test_the_environment_is_the_options() -> None:
    text = (CONTRIB / "maxvision.env").read_text()
    set_ = dict(re.findall(r"^(MAXVISION_\w+)=(.+)$", text, re.M))
    options = parse([], set_)
    assert (options.model, options.host, options.port) == ("resnet-cifar10", "0.0.0.0", 8000)
    known = {f"MAXVISION_{name.upper()}" for name in vars(options)}
    for path in (CONTRIB / "maxvision.env", CONTRIB / "Containerfile"):
        assert set(re.findall(r"MAXVISION_[A-Z_]+", path.read_text())) <= known
