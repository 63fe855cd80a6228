"""A family that another package adds has all that ResNet and CvT have (tests/third_family)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from maxvision import runtime, weights
from maxvision.commands.main import main
from maxvision.common.errors import ModelError
from maxvision.weights import family
from maxvision.weights.convert import hugging_face_tensors
from maxvision.weights.prune import prunable
from maxvision.weights.source import find
from tests import third_family
from tests.third_family import LABELS, MEAN, SIDE, STD, WIDTHS, ConvNet

BOUND = 1e-5  # of float32: the largest difference over the largest number


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[third_family.Installed]:
    placed = third_family.install(tmp_path / "installed")
    with third_family.use(placed.site):
        yield placed


@pytest.fixture
def model(installed: third_family.Installed) -> Path:
    return installed.model


@pytest.fixture
def bare(model: Path, tmp_path: Path) -> Path:
    """The tensors alone, with the counters of training that torch keeps."""
    return save(ConvNet().state_dict(), tmp_path / "bare.safetensors")


def save(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(state, path)
    return path


def assert_is_the_model(loaded: weights.Checkpoint) -> None:
    assert (loaded.family, loaded.channels) == ("convnet", 3)
    assert (loaded.spec.widths, loaded.spec.classes) == (WIDTHS, len(LABELS))
    names = {"convs.0.weight": "convs.0.weight", "convs.1.bias": "convs.1.bias"}
    names |= {"convs.2.batchnorm.var": "norms.2.running_var", "head.weight": "fc.weight"}
    state = ConvNet().state_dict()
    assert len(loaded.tensors) == len([key for key in state if "num_batches" not in key])
    for name, key in names.items():
        np.testing.assert_array_equal(loaded.tensors[name], state[key].numpy())


def test_it_is_known_while_it_is_installed(installed: third_family.Installed) -> None:
    assert list(family.known()) == ["cvt", "efficientnet", "resnet", "convnet"]
    assert family.names() == "cvt, efficientnet, resnet and convnet"


def test_without_the_package_it_is_not_known(tmp_path: Path) -> None:
    placed = third_family.install(tmp_path)
    assert list(family.known()) == ["cvt", "efficientnet", "resnet"]
    with pytest.raises(ModelError, match=r"'convnet', but the families .* cvt, efficientnet and"):
        weights.load(placed.model)


def test_a_folder(model: Path) -> None:
    loaded = weights.load(model)
    assert_is_the_model(loaded)
    assert (loaded.name, loaded.labels) == ("convnet", LABELS)
    assert loaded.preprocess["image_mean"] == MEAN


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_bare_tensors(suffix: str, bare: Path) -> None:
    if suffix == "pth":
        torch.save({"state_dict": load_file(bare), "epoch": 3}, bare.with_suffix(".pth"))
    loaded = weights.load(bare.with_suffix(f".{suffix}"))
    assert_is_the_model(loaded)
    assert (loaded.name, loaded.labels[9]) == ("bare", "class 9")
    assert loaded.preprocess["crop_size"] == {"height": 224, "width": 224}


def test_inspect(model: Path, bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = sum(tensor.numel() for tensor in ConvNet().parameters())
    for path, title in (model, "ConvNet"), (bare, "bare ConvNet"):
        assert main(["weights", "inspect", str(path)]) == 0
        out = capsys.readouterr().out
        assert f"{trained:,} parameters" in out
        assert f"\n{title}: widths {' '.join(map(str, WIDTHS))}, channels 3, classes 10" in out
        row = next(line for line in out.splitlines() if "convs.2.weight" in line)
        assert [cell for cell in row.replace("│", " ").split() if cell != "x"] == [
            "convs.2.weight", "64", "32", "3", "3", "float32", "0.0%", "18,432",
        ]  # fmt: skip
        assert "fc.weight" in out and "Pruned layers" not in out


def test_convert(model: Path, bare: Path, tmp_path: Path) -> None:
    for path in model, bare:
        out = tmp_path / "out" / path.stem
        assert main(["weights", "convert", str(path), "-o", str(out)]) == 0
        before, after = weights.load(path), weights.load(out)
        assert_is_the_model(after)
        assert (before.labels, before.preprocess) == (after.labels, after.preprocess)
        config = json.loads((out / "config.json").read_text())
        assert (config["model_type"], config["widths"]) == ("convnet", list(WIDTHS))
        written, state = load_file(out / "model.safetensors"), ConvNet().state_dict()
        assert written.keys() == state.keys()
        assert all(torch.equal(written[key], state[key]) for key in state)


def test_prune(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["weights", "prune", str(model), "--sparsity", "0.9", "-o", str(out)]) == 0
    before, after = weights.load(model), weights.load(out)
    assert prunable(before) == ["convs.0", "convs.1", "convs.2", "head"]
    pruned = {"convs.1.weight", "convs.2.weight"}
    for name, new in after.tensors.items():
        old = before.tensors[name]
        assert np.array_equal(new[new != 0], old[new != 0])
        assert name in pruned or np.array_equal(new, old)
    zeros = sum(int((after.tensors[name] == 0).sum()) for name in pruned)
    total = sum(after.tensors[name].size for name in pruned)
    assert zeros == round(0.9 * total)
    assert f"{zeros:,} of {total:,} weights of 2 layers" in capsys.readouterr().out
    notes = json.loads((out / "config.json").read_text())["pruning"]
    assert notes["dense"] == ["convs.0", "head"] and notes["accuracy"] == "not measured"

    assert main(["weights", "inspect", "--device", "cpu", str(out)]) == 0
    told = capsys.readouterr().out.partition("Pruned layers, and what runs them (cpu, float32)")[2]
    rows = [line for line in told.splitlines() if "unstructured" in line]
    assert [row.replace("│", " ").split()[0] for row in rows] == ["convs.1", "convs.2"]
    assert "3x3/1 32-64 at 64 px" in rows[1]


def test_verify_says_that_there_is_no_reference(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "verify", str(model)]) == 2
    err = capsys.readouterr().err
    assert "convnet: transformers, the reference, has no network of the family convnet" in err


def test_logits_are_torchs_in_float64(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    images = (pixels / 255 - np.array(MEAN)) / np.array(STD)
    with torch.inference_mode():
        expected = ConvNet().double()(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    net = runtime.load(str(model), device="cpu")
    logits = net(pixels)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= BOUND * np.abs(expected).max()

    Image.fromarray(pixels[0]).save(tmp_path / "image.png")
    (answers,) = net.classify([tmp_path / "image.png"], top_k=3)
    assert [each.label for each in answers] == [LABELS[i] for i in np.argsort(-expected[0])[:3]]


def test_another_process_sees_it(installed: third_family.Installed) -> None:
    def inspect(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "maxvision", "weights", "inspect", str(installed.model)],
            env=env,
            cwd=third_family.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    done = inspect(third_family.environment(installed.site))
    assert done.returncode == 0, done.stderr
    assert f"ConvNet: widths {' '.join(map(str, WIDTHS))}, channels 3, classes 10" in done.stdout
    without = inspect(dict(os.environ))
    assert without.returncode == 2
    assert without.stderr == (
        "error: convnet: config.json has the model_type 'convnet', but the families that run here"
        " are cvt, efficientnet and resnet; use a checkpoint of one of them\n"
    )


# --- what is wrong with a model ---------------------------------------------------------------


def test_missing_tensors_are_named(bare: Path, tmp_path: Path) -> None:
    state = load_file(bare)
    state["convs.1.wieght"] = state.pop("convs.1.weight")
    path = save(state, tmp_path / "net.safetensors")
    with pytest.raises(ModelError, match=r"missing: 'convs\.1\.weight' \(did you mean 'convs\.1\."):
        weights.load(path)


def test_a_shape_that_cannot_be_read(bare: Path, tmp_path: Path) -> None:
    state = {key: tensor for key, tensor in load_file(bare).items() if "norms" not in key}
    path = save(state, tmp_path / "net.safetensors")
    with pytest.raises(ModelError, match="the tensors do not have the shapes of a bare ConvNet"):
        weights.load(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [({}, "has no 'widths'"), ({"widths": 3}, "has a value of another kind")],
)
def test_a_configuration_that_cannot_be_read(
    config: dict[str, object], message: str, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "convnet"} | config))
    with pytest.raises(ModelError, match=rf"config\.json .* describe a convnet: it {message}"):
        weights.load(model)


def test_a_negative_variance(bare: Path, tmp_path: Path) -> None:
    state = load_file(bare)
    state["norms.1.running_var"][5] = -1
    path = save(state, tmp_path / "net.safetensors")
    with pytest.raises(ModelError, match=r"the batch norm of convs\.1 gives NaN or infinity"):
        weights.load(path)


def test_bare_tensors_become_the_folders(model: Path, bare: Path) -> None:
    ours, theirs = hugging_face_tensors(find(bare)), hugging_face_tensors(find(model))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


# --- what is wrong with a package -------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:FAMILY", "ModuleNotFoundError"),
        ("convnet_family:NO_SUCH_NAME", "AttributeError"),
        ("convnet_family:RULES", "it is a list, not a Family"),
    ],
)
def test_a_package_that_is_broken_is_named(
    value: str, message: str, installed: third_family.Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    third_family.package(installed.site, value)
    family.known.cache_clear()
    assert main(["weights", "inspect", str(installed.model)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the family convnet ({value}) cannot be loaded: ")
    assert message in line and line.endswith("; repair or uninstall convnet-family")
    assert main(["weights", "inspect", "resnet-cifar10"]) == 0, "our families need no package"


def test_a_package_does_not_replace_our_families(installed: third_family.Installed) -> None:
    module = installed.site / "convnet_family.py"
    module.write_text(module.read_text().replace('name="convnet"', 'name="resnet"'))
    with third_family.use(installed.site):
        assert list(family.known()) == ["cvt", "efficientnet", "resnet"]
        assert weights.load("resnet-cifar10").family == "resnet"


def test_the_first_format_has_a_config() -> None:
    ours = family.known()["resnet"]
    for formats in ours.formats[1:], ():
        with pytest.raises(ValueError, match="x: the first of formats is the one with a config"):
            family.Family("x", ours.read, ours.write, formats)
