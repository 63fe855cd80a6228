"""``maxvision weights``, its converted folders, and the catalogue."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification, BitImageProcessorPil

from maxvision.commands import models as commands
from maxvision.commands.weights import _settings, main
from maxvision.graphs.cvt import CVTS
from maxvision.graphs.layers import macs
from maxvision.graphs.resnet import RESNETS, ResNetSpec
from maxvision.weights import bundled, convert, load
from maxvision.weights.catalog import HUB
from maxvision.weights.family import known
from tests.weights import models
from tests.weights.test_formats import assert_same


@pytest.fixture(params=["hugging face", "torchvision", "original cvt"])
def model(request, tmp_path):
    """Writes a model in one of the formats; gives its path and torch's model."""
    if request.param == "hugging face":
        net = models.resnet("bottleneck", downsample_in_bottleneck=True)
        return models.save(net, tmp_path / "net"), net
    net = models.resnet() if request.param == "torchvision" else models.cvt()
    names = (
        models.torchvision_names if request.param == "torchvision" else models.original_cvt_names
    )
    torch.save(names(net), tmp_path / "net.pth")
    return tmp_path / "net.pth", net


def test_converted_folders_load_here_and_in_transformers(model, tmp_path):
    path, net = model
    target = tmp_path / "out" / "converted"
    assert main(["convert", str(path), "-o", str(target)]) == 0
    before, after = load(path), load(target)
    assert_same(before, after)
    assert (before.labels, before.preprocess) == (after.labels, after.preprocess)
    assert [p.name for p in target.parent.iterdir()] == ["converted"]

    theirs, info = AutoModelForImageClassification.from_pretrained(target, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[key]), key


@pytest.mark.parametrize("name", ["my nets/model_best.pth.tar", "last.ckpt"])
def test_training_checkpoints_convert(name, tmp_path):
    net = models.resnet()
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    state = {f"model.{key}": value for key, value in models.torchvision_names(net).items()}
    torch.save({"epoch": 3, "state_dict": state}, path)
    assert main(["convert", str(path), "-o", str(tmp_path / "out")]) == 0
    assert_same(load(tmp_path / "out"), load(models.save(net, tmp_path / "hf")))


def test_convert_does_not_overwrite_unless_forced(model, tmp_path, capsys):
    path, _ = model
    target = tmp_path / "there"
    target.mkdir()
    (target / "mine").touch()
    assert main(["convert", str(path), "-o", str(target)]) == 2
    assert "pass --force" in capsys.readouterr().err
    assert [p.name for p in target.iterdir()] == ["mine"]
    assert main(["convert", str(path), "-o", str(target), "--force"]) == 0
    assert "mine" not in [p.name for p in target.iterdir()]


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch, capsys):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    path, _ = model
    monkeypatch.setattr(convert, "save_file", full)
    assert main(["convert", str(path), "-o", str(tmp_path / "out" / "net")]) == 2
    assert "the disk is full; nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_inspect(tmp_path, capsys):
    net = models.resnet()
    with torch.no_grad():
        net.classifier[1].weight[:, :16] = 0
    assert main(["inspect", str(models.save(net, tmp_path / "net"))]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "classifier.1.weight" in line)
    assert [cell for cell in row.replace("│", " ").split() if cell != "x"] == [
        "classifier.1.weight", "5", "32", "float32", "50.0%", "160",
    ]  # fmt: skip
    assert f"{sum(p.numel() for p in net.parameters()):,} parameters" in out


def test_inspect_shows_a_broken_model_and_says_why(tmp_path, capsys):
    folder = models.save(models.resnet(), tmp_path / "net")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"depths": [1, 1, 1, 1]}))
    assert main(["inspect", str(folder)]) == 2
    captured = capsys.readouterr()
    assert "classifier.1.weight" in captured.out
    assert "error: net: the tensors are not those of this architecture" in captured.err


class Echo:
    """Stands in for a graph: answers with transformers' own outputs, each changed a little."""

    def __init__(self, net, change):
        self.net, self.change = net, change

    def _run(self, pixels):
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        with torch.inference_mode():
            return self.net(images, output_hidden_states=True)

    def stages(self, pixels):
        kept = self._run(pixels).hidden_states[-3:]
        return [stage.permute(0, 2, 3, 1).numpy() for stage in kept]

    def __call__(self, pixels):
        return self._run(pixels).logits.numpy() + np.float32(self.change)


@pytest.mark.parametrize(
    ("change", "code"), [(0, 0), (1e-3, 1), (np.nan, 1)], ids=["same", "off", "nan"]
)
def test_verify(change, code, tmp_path, monkeypatch, capsys):
    net = models.cvt()
    torch.save(models.original_cvt_names(net), tmp_path / "net.pth")
    monkeypatch.setattr("maxvision.runtime.load", lambda *_, **__: Echo(net, change), raising=False)
    assert main(["verify", str(tmp_path / "net.pth")]) == code
    out = capsys.readouterr().out
    assert [name for name in ("stage 1", "stage 2", "stage 3", "logits") if name in out] == [
        "stage 1", "stage 2", "stage 3", "logits",
    ]  # fmt: skip
    assert ("beyond" in out) == (code == 1)


def test_settings_of_a_network_read_as_text() -> None:
    resnet = _settings(ResNetSpec(depths=(3, 4), widths=(8, 16), stride_on_1x1=True))
    assert resnet.startswith("block bottleneck, depths 3 4, widths 8 16, stem width 64")
    assert ", stride on 1x1, no downsample first stage, " in resnet
    first, *stages = _settings(CVTS["cvt-13"]).splitlines()
    assert first == "channels 3, classes 1000, eps 1e-05"
    assert len(stages) == 3 and stages[0].startswith(
        "  stages 0: patch 7, stride 4, padding 2, width"
    )


def test_wrong_arguments_exit_with_2(capsys):
    for arguments in (["inspect"], ["convert", "x"], ["nonsense", "x"], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert main(["inspect", "no/such/model"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_default_preprocessing_is_imagenets(tmp_path):
    folder = models.save(models.cvt(), tmp_path / "net")
    main(["convert", str(folder), "-o", str(tmp_path / "out")])
    settings = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert settings["image_mean"] == [0.485, 0.456, 0.406]
    processor = BitImageProcessorPil.from_pretrained(tmp_path / "out")
    assert processor(np.zeros((300, 400, 3), np.uint8))["pixel_values"][0].shape == (3, 224, 224)


# --- the catalogue ----------------------------------------------------------------------------


@pytest.mark.parametrize("row", HUB, ids=lambda row: row.name)
def test_counted_multiplications_are_torchs(row):
    name = row.name.removeprefix("microsoft/")
    spec = RESNETS.get(name.replace("-", "")) or CVTS["-".join(name.split("-")[:2])]
    program = known()[row.family].program(spec, (row.size, row.size))
    assert macs(program) == pytest.approx(row.flops, rel=3e-4)


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_counting_an_odd_network(block):
    from torch.utils.flop_counter import FlopCounterMode

    net = models.resnet(block, downsample_in_bottleneck=True, downsample_in_first_stage=True)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 70, 70))
    spec = ResNetSpec.from_config(net.config.to_dict(), 5)
    program = known()["resnet"].program(spec, (70, 70))
    assert 2 * macs(program) == counter.get_total_flops()


def test_bundled_models_have_rows():
    assert [row.name for row in commands.bundled()] == bundled()
