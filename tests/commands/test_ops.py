"""``maxvision ops``: the package loads without maxvision, in a graph of MAX and from torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from torch.nn import functional as F

from maxvision.commands.main import main
from maxvision.commands.ops import PACKAGE
from maxvision.runtime import cache

WINDOW = [3, 3, 2, 2, 1, 1, 1, 1, 1]
"""Of 3 x 3 at stride 2 with padding 1, as ops/geometry.mojo has it."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "new" / "kernels"
    command = ["ops", "build", "-o", str(folder), "--ops", "softmax,max_pool2d_grad", "--cpu"]
    assert main(command) == main(command) == 0  # it takes the place of the first
    assert [each.name for each in folder.iterdir()] == [PACKAGE]
    return folder / PACKAGE


def test_all_ops_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph's ops are then found among all."""
    made: list[frozenset[str] | None] = []

    def precompiled(draft: Path, name: str, ops: frozenset[str] | None, gpu: bool) -> Path:
        made.append(ops)
        (draft / name).write_bytes(b"ops")
        return draft / name

    monkeypatch.setattr(cache, "_precompiled", precompiled)
    monkeypatch.setattr(cache, "_folder", lambda: tmp_path)
    assert main(["ops", "cache", "--cpu"]) == 0
    found = cache.library(frozenset({"softmax"}), gpu=False)
    assert made == [None] and f"all ops are in {found}, after" in capsys.readouterr().out
    monkeypatch.setattr(cache, "_folder", lambda: None)
    assert main(["ops", "cache", "--cpu"]) == 2


def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws x and dy of a max pool, and computes dx; the last axis is the channels'."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 9, 8, requires_grad=True)
    y = F.max_pool2d(x, 3, 2, 1)
    dy = torch.randn(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    given = (each.detach().permute(0, 2, 3, 1).contiguous() for each in (x, dy, dx))
    return next(given), next(given), next(given)


def test_a_graph_of_max_takes_it(package: Path) -> None:
    x, dy, dx = images()
    here = DeviceRef.CPU()
    types = [TensorType(DType.float32, list(each.shape), here) for each in (x, dy)]
    with Graph("other", input_types=types, custom_extensions=[package]) as graph:
        window = ops.constant(np.array(WINDOW), DType.int64, here)
        values = [*(each.tensor for each in graph.inputs), window]
        outs = [types[0], TensorType(DType.uint8, list(dy.shape), here)]
        found, _ = ops.custom("max_pool2d_grad", here, values, outs)
        graph.output(ops.custom("softmax", here, [found], types[:1])[0])
    session = InferenceSession(devices=[CPU()])
    run = session.init(session.compile(graph))
    (y,) = run.execute(*(Buffer.from_numpy(each.numpy()) for each in (x, dy)))
    torch.testing.assert_close(torch.from_dlpack(y), dx.softmax(-1))


@pytest.mark.nightly
def test_torch_takes_it(package: Path) -> None:
    """Compiles each op when it is called first."""
    from max.experimental.torch import CustomOpLibrary

    library = CustomOpLibrary(package)
    x, dy, dx = images()
    found, y = torch.empty_like(x), torch.empty_like(x)
    places = torch.empty(dy.shape, dtype=torch.uint8)
    library.max_pool2d_grad(found, places, x, dy, torch.tensor(WINDOW))
    torch.testing.assert_close(found, dx)
    library.softmax(y, x)
    torch.testing.assert_close(y, x.softmax(-1))


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ("softmx", "there is no op softmx; did you mean softmax?"),
        ("softmax,token_linear", "token_linear has no kernel for a CPU; leave out --cpu"),
        (",", "no op is named; leave out --ops for all"),
    ],
)
def test_names_that_are_none(
    names: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "build", "-o", str(tmp_path / "a"), "--cpu", "--ops", names]) == 2
    assert wrong in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    wanted = tmp_path / "file" / "kernels"
    assert main(["ops", "build", "-o", str(wanted), "--cpu", "--ops", "softmax"]) == 2
    said = capsys.readouterr().err
    assert f"cannot write {wanted / PACKAGE}: Not a directory" in said


def test_every_op_is_found() -> None:
    from maxvision.runtime.cache import registered

    every, cpu = registered(gpu=True), registered(gpu=False)
    assert {"conv2d", "max_pool2d_grad", "token_linear"} <= set(every) > set(cpu)
    moments = {"row_moments", "linear_moments", "normed_linear", "layernorm_mlp"}
    moments |= {"attention_linear"}
    assert moments | {"conv2d_mean"} <= set(every) - set(cpu)
    assert "log_softmax" in registered(frozenset({"softmax"}), gpu=False)
