"""Converting: the folder that is written, the report, and what is told where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import maxvision
from maxvision.bridge import check, sources
from maxvision.bridge.check import Difference
from maxvision.bridge.convert import Report, convert, report, translated, write
from maxvision.bridge.model import pictures
from maxvision.commands.convert import main
from maxvision.common import console, memory
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.weights.family import MEAN, STD

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "examples/cat.jpg"


class Net(nn.Module):
    """A classifier of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def scores() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """No classifier of pictures."""
    return nn.Sequential(nn.Linear(4, 5), nn.GELU()), (torch.randn(2, 7, 4),)


class Lacking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values.mean((2, 3))


def lacking() -> nn.Module:
    return Lacking()


HERE = "tests.bridge.test_convert"
SMALL = torch.randn(2, 3, 32, 32)


def test_a_module_is_converted_and_saved(tmp_path: Path) -> None:
    """Compiles to compare and to run: once each."""
    steps: list[str] = []
    module = net()
    made = convert(module, SMALL, device="cpu", progress=steps.append)
    assert steps[0] == "tracing it" and any("compiling" in step for step in steps)
    assert isinstance(made, maxvision.Converted) and repr(made).startswith("Converted('Net', x ")
    images = torch.randn(5, 3, 32, 32)
    found = made(images)
    assert isinstance(found, Tensor) and isinstance(made(images.numpy()), np.ndarray)
    with torch.no_grad():
        torch.testing.assert_close(found, module(images), rtol=1e-5, atol=1e-6)
    assert made.report.within
    assert made.report.cost and set(made.report.cost.seconds) == {"torch", "compile", "maxvision"}
    if memory.resident() is not None:
        assert set(made.report.cost.memory) == {"torch", "maxvision"}
        assert "memory that it took: torch " in str(made.report)
    names = [each.name for each in made.report.differences]
    assert {"logits", "at stem"} <= set(names)
    made.save(tmp_path / "net")
    with pytest.raises(ArgumentError, match="exists already and is not empty"):
        made.save(tmp_path / "net")
    made.save(tmp_path / "net", force=True)
    assert {path.name for path in (tmp_path / "net").iterdir()} == {
        "config.json", "preprocessor_config.json", "program.json", "model.safetensors",
    }  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Gives a converted model that was not compared."""
    assert main([f"{HERE}:net", "--size", "32", "-o", str(tmp_path / "net"), "--no-check"]) == 0
    return tmp_path / "net"


@pytest.mark.nightly  # by day test_onnx_file.py loads and runs what convert wrote
def test_a_converted_folder_classifies(written: Path) -> None:
    model = maxvision.load(written, device="cpu")
    (best, *_) = model.classify(CAT, top_k=3)
    levels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    pixels = (levels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    with torch.no_grad():
        wanted = net()(pixels.permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(model(levels.numpy()), wanted, 1e-4, 1e-5)
    assert 0 <= best.class_id < 3


def test_the_converted_folder_needs_no_torch(written: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from maxvision.weights import load\n"
        f"found = load({str(written)!r})\n"
        "print(found.program((32, 32)).signature)\n"
        "assert not any(name.startswith('maxvision.bridge') for name in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "float32[batch, 3]" in done.stdout


def test_layers_stay_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "net")
    arguments = [f"{HERE}:net", "--size", "32", "-o", folder, "--no-check"]
    assert main([*arguments, "--keep", "stem=float32", "--keep", "h*=float32"]) == 0
    assert "in float32      4 ops" in capsys.readouterr().out
    nodes = json.loads(Path(folder, "program.json").read_text())["nodes"]
    assert sum(node.get("dtype") == "float32" for node in nodes) == 4

    assert main([*arguments, "--force", "--keep", "stm=float32"]) == 2
    assert "no layer 'stm' to keep; did you mean stem?" in capsys.readouterr().err
    for given, told in (("stem=float16", "not 'float16'"), ("stem", "not 'stem'")):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, "--force", "--keep", given])
        assert told in capsys.readouterr().err


@pytest.mark.nightly  # by day tests/graphs/test_program.py has the casts around what is kept
def test_of_layers_in_float32_the_result_alone_is_rounded() -> None:
    module, x = net(), SMALL.bfloat16()
    made = convert(module, SMALL, dtype="bfloat16", device="cpu", check_it=False, keep=["*"])
    with torch.no_grad():
        once = module(x.float()).bfloat16().float()  # the result alone is rounded
        assert not torch.equal(module.bfloat16()(x).float(), once)
    assert torch.equal(torch.from_numpy(made(x.float().numpy())), once)


def test_a_converted_network_has_one_size(written: Path) -> None:
    from maxvision.weights import load

    with pytest.raises(ModelError, match="32") as caught:
        load(written).program((64, 64))
    assert "\n" not in str(caught.value)


def test_what_is_no_classifier_is_not_run_on_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from maxvision.weights import load

    folder = tmp_path / "scores"
    assert main([f"{HERE}:scores", "-o", str(folder), "--no-check"]) == 0
    assert not (folder / "preprocessor_config.json").exists()
    with pytest.raises(ModelError, match=r"batch, 7, 4.*; run it with maxvision.Converted.load"):
        load(folder)
    from maxvision.run_graph import main as run_graph

    capsys.readouterr()
    assert run_graph([str(CAT), "--model", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "does not classify pictures" in told and told.count("\n") == 1


def test_labels_are_kept(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\nowl\n")
    arguments = ["--labels", str(tmp_path / "labels.txt"), "--no-check", "--size", "32"]
    assert main([f"{HERE}:net", "-o", str(tmp_path / "net"), *arguments]) == 0
    config = json.loads((tmp_path / "net/config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}


def test_a_dry_run_reports_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "net"
    assert main([f"{HERE}:net", "--size", "32", "--dry-run", "-o", str(folder)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("net: 0.00 GMAC, 0.0 MB of weights\n  our kernels     ")
    assert "  MAX's kernels   none\n" in told and "fused away" in told
    assert not folder.exists() and not list(tmp_path.iterdir())


def test_an_error_beyond_the_bound_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Difference("logits", (2, 3), 1e-3, 1e-7, 1e-5)]
    cost = check.Cost({"torch": 0.1}, {"torch": 3_000_000})
    monkeypatch.setattr(check, "compare", lambda *_, **__: (found, cost))
    assert main([f"{HERE}:net", "--size", "32", "-o", str(tmp_path / "net")]) == 1
    streams = capsys.readouterr()
    assert " 1.0e-03  logits  beyond the bound of 1e-05" in streams.out
    assert "one run of the batch: torch 0.10 s" in streams.out
    assert "memory that it took: torch 3 MB" in streams.out
    assert "an error is beyond its bound, and nothing was written" in streams.err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match=r"logits differs from the source's by 1\.0e-03 of the"):
        convert(net(), SMALL, device="cpu")


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_beyond_any_bound(error: float) -> None:
    assert not Difference("logits", (2, 3), error, 0.0, 1.0).within


def test_of_several_the_bad_one_is_told_and_the_others_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = f"{HERE}:net,{HERE}:lacking,{HERE}:scores"
    assert main(["--models", models, "--size", "32", "-o", str(tmp_path), "--no-check"]) == 2
    told = capsys.readouterr().err
    assert "lacking cannot be converted: aten.sort.default" in told
    assert "test_convert.py:" in told and "Traceback" not in told
    assert {path.name for path in tmp_path.iterdir()} == {f"{HERE}:net", f"{HERE}:scores"}


def test_a_folder_that_is_there_stays(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (written / "config.json").read_bytes()
    arguments = [f"{HERE}:scores", "-o", str(written), "--no-check"]
    assert main(arguments) == 2
    assert "exists already and is not empty" in capsys.readouterr().err
    assert (written / "config.json").read_bytes() == before
    assert main([*arguments, "--force"]) == 0
    assert json.loads((written / "config.json").read_text())["name"] == "scores"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "convert takes one SOURCE, or --models A,B"),
        (["a:b", "--models", "c"], "convert takes one SOURCE, or --models A,B"),
        ([f"{HERE}:net"], "convert needs -o DIR, or --dry-run to write nothing"),
        (["no such thing!", "--dry-run"], "this is no model to convert; give timm/NAME"),
        (["nowhere.at.all:f", "--dry-run"], "give an importable module and its function"),
        ([f"{HERE}:nothing", "--dry-run"], "has no attribute 'nothing'"),
        ([f"{HERE}:ROOT", "--dry-run"], "calling it without arguments failed"),
        ([f"{HERE}:Path", "--dry-run"], "expects a torch module, or a function that gives one"),
        (["gone.pt2", "--dry-run"], "this is not what torch.export.save writes"),
        ([f"{HERE}:net", "--dry-run", "--passes", "stam"], "did you mean stem?"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


@pytest.mark.parametrize("example", [(), torch.randn(1, 3, 32, 32)])
def test_an_example_needs_a_batch_of_two(example: Any) -> None:
    with pytest.raises(ArgumentError, match="expect a batch of at least 2"):
        convert(net(), example, device="cpu")


class Library:
    """Takes the place of timm, which is not installed with the tests."""

    __version__ = "1.0"

    @staticmethod
    def is_model(name: str) -> bool:
        return name == "convnext_tiny"

    @staticmethod
    def list_models() -> list[str]:
        return ["convnext_tiny", "vit_base"]


def test_an_unknown_name_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Library)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"no such model; did you mean timm/convnext_tiny\?"):
        sources.find("timm/convnext_tyni")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(sys, "prefix", str(console.HOME / ".venv"))
    with pytest.raises(
        ModelError, match=r"timm cannot be imported .*; run script/bootstrap convert"
    ):
        sources.find("timm/convnext_tiny")


@pytest.mark.skipif(hasattr(torch.ops.torchvision, "nms"), reason="torchvision fits torch here")
def test_a_torchvision_of_another_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> str:
        if not hasattr(torch.ops.torchvision, "nms"):
            raise RuntimeError("operator torchvision::nms does not exist")
        return name

    monkeypatch.setattr(sources, "_TORCHVISION", [])
    monkeypatch.setattr(sources.importlib, "import_module", import_module)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: name)
    assert sources._library("timm") == "timm"


def test_an_import_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise RuntimeError("CUDA is not there")

    monkeypatch.setattr(sources.importlib, "import_module", import_module)
    with pytest.raises(ModelError, match=r"timm cannot be imported \(CUDA is not there\)"):
        sources._library("timm")


@pytest.mark.skipif(
    find_spec("timm") is None, reason="timm is not installed: its models are not converted here"
)
def test_random_weights_of_a_timm_model() -> None:
    model = sources.find("timm/resnet10t", random=True, size=64)
    assert model.example[0].shape == (2, 3, 64, 64)
    assert translated(model).program is not None


def test_what_torch_saved_is_read(tmp_path: Path) -> None:
    batch = torch.export.Dim("n", min=1, max=64)
    whole = torch.export.export(net(), (SMALL,), dynamic_shapes=({0: batch},))
    torch.export.save(whole, tmp_path / "net.pt2")
    model = sources.find(str(tmp_path / "net.pt2"))
    program = translated(model).program
    assert program is not None and model.name == "net"
    assert program.types[program.outputs["logits"]].shape == ("batch", 3)


def test_the_report_counts_what_runs_it() -> None:
    model = sources.TorchModel("net", net(), (SMALL,), ("x",))
    found = report(model, translated(model), "cpu", "float32").coverage
    assert found.macs == 4 * 27 * 15 * 15 + 12
    assert found.kernels == {"conv2d": 1, "avg_pool2d": 1, "linear": 1}
    assert not found.others and found.fused == 2
    worse = Report("net", found, [Difference("a", (2,), 2.0, 0.0, 1.0)], {}, 2_000_000)
    assert not worse.within and "beyond the bound of 1e+00" in str(worse)


def test_what_is_written_must_fit(tmp_path: Path) -> None:
    model = sources.TorchModel("net", net(), (SMALL,), ("x",), pictures((32, 32)), ["a", "b"])
    traced = translated(model)
    assert traced.program is not None
    (tmp_path / "net").mkdir()
    write(tmp_path / "net", model, traced)
    from maxvision.weights import load

    with pytest.raises(ModelError, match="label"):
        load(tmp_path / "net")
