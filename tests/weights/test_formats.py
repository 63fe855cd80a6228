"""Every format and every kind of file gives the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maxvision.common.errors import ModelError
from maxvision.graphs.resnet import RESNETS, ResNetSpec
from maxvision.weights import load
from maxvision.weights.family import known
from maxvision.weights.formats import specify
from tests.weights import models


def assert_same(one, other):
    assert one.spec == other.spec
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(value, other.tensors[name], err_msg=name)


@pytest.fixture(params=["basic", "bottleneck"])
def resnet(request):
    return models.resnet(request.param)


@pytest.fixture
def cvt():
    return models.cvt()


def test_hugging_face_resnet(resnet, tmp_path):
    loaded = load(models.save(resnet, tmp_path / "net"))
    assert (loaded.name, loaded.family) == ("net", "resnet")
    assert loaded.labels == [f"label {i}" for i in range(5)]
    assert_weights(loaded)


def test_hugging_face_cvt(cvt, tmp_path):
    loaded = load(models.save(cvt, tmp_path / "net"))
    assert loaded.family == "cvt"
    assert_weights(loaded)


def assert_weights(loaded):
    weights = known()[loaded.family].program(loaded.spec, (64, 96)).weights
    expected = {name: each.shape for name, each in weights.items()}
    assert {name: value.shape for name, value in loaded.tensors.items()} == expected
    for value in loaded.tensors.values():
        assert value.dtype == np.float32
        assert value.flags.c_contiguous


def test_torchvision_and_timm(resnet, tmp_path):
    torch.save(models.torchvision_names(resnet), tmp_path / "net.pth")
    loaded = load(tmp_path / "net.pth")
    assert_same(loaded, load(models.save(resnet, tmp_path / "hf")))
    assert loaded.preprocess["resample"] == 2
    assert loaded.labels[4] == "class 4"


def test_timm_folder(tmp_path):
    net = models.resnet("bottleneck")
    folder = tmp_path / "timm"
    folder.mkdir()
    state = {k: v.contiguous() for k, v in models.torchvision_names(net).items()}
    save_file(state, folder / "model.safetensors")
    config = {
        "architecture": "resnet50",
        "num_classes": 5,
        "global_pool": "avg",
        "model_args": {"num_classes": 5, "in_chans": 3, "global_pool": "avg"},
        "label_names": ["a", "b", "c", "d", "e"],
        "pretrained_cfg": {
            "input_size": [3, 176, 176],
            "interpolation": "bicubic",
            "crop_pct": 0.95,
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder)
    assert_same(loaded, load(models.save(net, tmp_path / "hf")))
    assert loaded.labels == ["a", "b", "c", "d", "e"]
    assert loaded.preprocess["size"] == {"shortest_edge": 185}
    assert loaded.preprocess["crop_size"] == {"height": 176, "width": 176}
    assert loaded.preprocess["resample"] == 3
    assert loaded.preprocess["image_std"] == [0.25, 0.25, 0.25]


def test_original_cvt(cvt, tmp_path):
    torch.save(models.original_cvt_names(cvt), tmp_path / "CvT.pth")
    assert_same(load(tmp_path / "CvT.pth"), load(models.save(cvt, tmp_path / "hf")))


@pytest.mark.parametrize(
    "spec",
    [
        ResNetSpec("basic", (1, 1, 1, 1), (8, 8, 8, 8), 4, channels=1, classes=3),
        RESNETS["resnet18"],
        RESNETS["resnet50"],
    ],
)
@pytest.mark.parametrize("title", ["torchvision or timm ResNet", "SparseML ResNet"])
def test_the_spec_is_read_off_the_tensors(title, spec):
    family = known()["resnet"]
    form = next(each for each in family.formats if each.title == title)
    tensors = {
        form.key(name): np.broadcast_to(np.float32(0), each.shape)
        for name, each in family.program(spec, (224, 224)).weights.items()
    }
    assert specify(family, form, tensors, None, "x") == spec


# --- files ------------------------------------------------------------------------------------


def test_sharded(cvt, tmp_path):
    whole = load(models.save(cvt, tmp_path / "whole"))
    folder = models.save(cvt, tmp_path / "shards", max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert_same(load(folder), whole)


def test_pickle_in_a_folder(resnet, tmp_path):
    folder = models.save(resnet, tmp_path / "net")
    whole = load(folder)
    (folder / "model.safetensors").unlink()
    torch.save(resnet.state_dict(), folder / "pytorch_model.bin")
    assert_same(load(folder), whole)
    (folder / "pytorch_model.bin").rename(folder / "best.pt")
    assert_same(load(folder), whole)


def test_sharded_pickles(resnet, tmp_path):
    folder = models.save(resnet, tmp_path / "net")
    whole = load(folder)
    (folder / "model.safetensors").unlink()
    state = resnet.state_dict()
    weight_map = {key: f"pytorch_model-{i % 2}.bin" for i, key in enumerate(state)}
    for name in set(weight_map.values()):
        torch.save({k: v for k, v in state.items() if weight_map[k] == name}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load(folder), whole)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("nest", [None, "state_dict", "model"])
def test_training_checkpoints_are_unwrapped(nest, legacy, tmp_path):
    net = models.resnet()
    state = {f"module.{k}": v for k, v in models.torchvision_names(net).items()}
    content = state if nest is None else {nest: state, "epoch": 3, "optimizer": {}}
    torch.save(content, tmp_path / "net.pth", _use_new_zipfile_serialization=not legacy)
    assert_same(load(tmp_path / "net.pth"), load(models.save(net, tmp_path / "hf")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_half_precision_is_widened(dtype, suffix, tmp_path):
    net = models.resnet().to(dtype)
    state = {k: v.contiguous() for k, v in models.torchvision_names(net).items()}
    path = tmp_path / f"net.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(state, path)
    assert_same(load(path), load(models.save(net.float(), tmp_path / "hf")))


def test_sparseml(resnet, tmp_path):
    with torch.no_grad():
        for module in resnet.modules():
            if isinstance(module, torch.nn.Conv2d):  # masks are applied before it writes
                module.weight *= torch.rand_like(module.weight) > 0.8
    state = {key: tensor.float() for key, tensor in models.sparseml_names(resnet).items()}
    optimizer = torch.optim.SGD(resnet.parameters(), 0.1).state_dict()
    recipe = "modifiers:\n  - !GMPruningModifier\n"
    content = {"state_dict": state, "optimizer": optimizer, "recipe": recipe, "epoch": 9}
    torch.save(content, tmp_path / "model.pth")
    loaded = load(tmp_path / "model.pth")
    assert_same(loaded, load(models.save(resnet, tmp_path / "hf")))
    assert 0.7 < np.mean(loaded.tensors["stages.1.0.conv1.weight"] == 0) < 0.9


def test_pruned(tmp_path):
    from torch.nn.utils import prune

    net = models.resnet()
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            prune.l1_unstructured(module, "weight", 0.75)
    state = net.state_dict()
    assert any(key.endswith("weight_mask") for key in state)
    torch.save(models.torchvision_names(net), tmp_path / "net.pth")
    loaded = load(tmp_path / "net.pth")
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            prune.remove(module, "weight")
    assert_same(loaded, load(models.save(net, tmp_path / "hf")))
    assert np.mean(loaded.tensors["stages.0.0.conv1.weight"] == 0) == 0.75


def test_weights_outlive_their_file(tmp_path):
    loaded = load(models.save(models.resnet(), tmp_path / "net"))
    Path(tmp_path / "net" / "model.safetensors").unlink()
    assert all(np.isfinite(value).all() for value in loaded.tensors.values())


@pytest.mark.parametrize("content", [b"", b"other"])
def test_weights_of_a_file_that_is_overwritten(tmp_path, content):
    loaded = load(models.save(models.resnet(), tmp_path / "net"))
    Path(tmp_path / "net" / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: .* overwritten .*; load the model ag"
    ):
        loaded.tensors["stem.weight"]
