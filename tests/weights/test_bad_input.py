"""A mistake is told in one clear sentence: `ModelError`, never another exception."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from maxvision.common.errors import ArgumentError, ModelError
from maxvision.weights import load
from tests.weights import models


@pytest.fixture
def folder(tmp_path):
    return models.save(models.resnet(), tmp_path / "net")


def edit(folder, **config):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | config
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


STEM = "resnet.embedder.embedder.convolution.weight"


def test_missing_extra_and_misshapen_tensors_are_reported_together(folder):
    def change(tensors):
        tensors["resnet.embedder.embedder.convolution.wieght"] = tensors.pop(STEM)
        tensors["classifier.1.bias"] = np.zeros(6, np.float32)
        tensors["resnet.encoder.stages.0.layers.0.layer.0.normalization.running_var"][0] = np.nan

    rewrite(folder, change)
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert f"1 missing: {STEM!r} (did you mean 'resnet.embedder.embedder.convolution.w" in message
    assert "1 unexpected: 'resnet.embedder.embedder.convolution.wieght'" in message
    assert "1 misshapen: 'classifier.1.bias' expects [5] but is [6]" in message
    assert "1 with NaN or infinity: 'resnet.encoder.stages.0" in message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(folder, value):
    rewrite(folder, lambda tensors: tensors[STEM].__setitem__((0, 0, 0, 0), value))
    with pytest.raises(ModelError, match=r"with NaN or infinity: 'resnet\.embedder"):
        load(folder)


def test_a_negative_variance(folder):
    key = "resnet.embedder.embedder.normalization.running_var"
    rewrite(folder, lambda tensors: tensors[key].__setitem__(0, -1.0))
    with pytest.raises(ModelError, match="folding the batch norm of stem gives NaN or infinity"):
        load(folder)


def test_a_batch_norm_beyond_float32(folder):
    part = "resnet.encoder.stages.0.layers.0.layer.0"
    rewrite(folder, lambda t: t[f"{part}.convolution.weight"].__setitem__((3, 1, 1, 1), 1e38))
    rewrite(folder, lambda t: t[f"{part}.normalization.weight"].__setitem__(3, 100))
    rewrite(folder, lambda t: t[f"{part}.normalization.running_mean"].__setitem__(3, 0))
    with pytest.raises(ModelError, match=r"of stages\.0\.0\.conv1 gives NaN or infinity"):
        load(folder)


@pytest.mark.parametrize("count", [3, 6])
def test_labels_must_fit_the_classifier(folder, count):
    edit(folder, id2label={str(i): f"label {i}" for i in range(count)})
    with pytest.raises(
        ModelError, match=f"id2label in config.json has {count} labels but .* has 5"
    ):
        load(folder)


def test_labels_with_a_gap(folder):
    edit(folder, id2label={"0": "a", "1": "b", "2": "c", "3": "d", "7": "e"})
    with pytest.raises(ModelError, match="without a gap"):
        load(folder)


def test_without_labels_classes_are_numbered(folder):
    edit(folder, id2label=..., label2id=...)
    assert load(folder).labels == [f"class {i}" for i in range(5)]


def test_imagenet_has_its_names():
    from maxvision.weights.metadata import imagenet

    names = imagenet()
    assert len(names) == 1000
    assert (names[0], names[281], names[999]) == ("tench", "tabby", "toilet tissue")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vit"}, "has the model_type 'vit', but .* cvt, efficientnet and resnet;"),
        ({"model_type": ...}, "has no model_type, but .* cvt, efficientnet and resnet;"),
        (
            {"model_type": ["resnet"]},
            r"the model_type \['resnet'\], but .* cvt, efficientnet and resnet;",
        ),
        ({"hidden_act": "silu"}, "hidden_act must be 'relu' but is 'silu'"),
        ({"depths": 3}, r"config\.json does not describe a resnet: it has a value of another kind"),
        ({"depths": [1, 2]}, "one entry a stage"),
        ({"depths": [1.5, 2, 1, 1]}, r"config\.json does not describe a resnet \(.*correct it"),
        ({"num_channels": "a"}, r"config\.json does not describe a resnet \(.*correct it"),
        ({"model_type": ..., "architecture": "resnet50d"}, "'resnet50d', but .* resnet18, "),
        (
            {"model_type": ..., "architecture": "resnet50", "model_args": {"act_layer": "silu"}},
            "changes act_layer",
        ),
    ],
)
def test_configurations_that_do_not_run(folder, config, message):
    edit(folder, **config)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_backbone_without_a_classifier(tmp_path):
    models.save(models.resnet().resnet, tmp_path / "net")
    with pytest.raises(ModelError, match=r"there is no classifier, 'classifier\.1\.weight'"):
        load(tmp_path / "net")


def test_hugging_face_tensors_without_a_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"a Hugging Face ResNet .*needs a config\.json beside it"):
        load(folder)


def test_another_architecture(tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "net.pth")
    with pytest.raises(ModelError, match="its tensors are 'weight', 'bias'"):
        load(tmp_path / "net.pth")


@pytest.mark.parametrize("key", ["conv1.weight", "layer1.0.conv1.weight"])
@pytest.mark.parametrize("shape", [(8,), (8, 3, 7), (8, 3, 7, 7, 1), ()])
def test_a_tensor_of_another_rank(key, shape, tmp_path):
    state = models.torchvision_names(models.resnet())
    state[key] = torch.zeros(shape)
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(ModelError, match=rf"misshapen: .*{key!r} expects \[.*\] but is \["):
        load(tmp_path / "net.pth")


def test_a_cvt_tensor_of_another_rank(tmp_path):
    state = models.original_cvt_names(models.cvt())
    state["stage1.patch_embed.proj.weight"] = torch.zeros(64, 9)
    state["stage0.blocks.0.attn.conv_proj_q.conv.weight"] = torch.zeros(64)
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(ModelError, match=r"misshapen: .*'stage1.patch_embed.proj.weight' expects"):
        load(tmp_path / "net.pth")


def relative(names):
    """Makes the tensors of a bottleneck ResNet under torchvision's names, some of them changed."""
    state = models.torchvision_names(models.resnet("bottleneck"))
    for key, shape in names.items():
        if shape is None:
            state = {name: each for name, each in state.items() if not re.fullmatch(key, name)}
        else:
            state[key] = torch.ones(shape)
    return state


DEEP_STEM = {"conv1.weight": None, "conv1.0.weight": (4, 3, 3, 3), "conv1.3.weight": (8, 4, 3, 3)}
POOLED = {r"layer1\.0\.downsample\..*": None, "layer1.0.downsample.1.weight": (16, 8, 1, 1)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"layer1.0.conv2.weight": (4, 1, 3, 3)},
            "a ResNeXt, whose grouped convolutions of 4 groups ('layer1.0.conv2.weight')",
        ),
        (
            DEEP_STEM | POOLED,
            "a ResNet-D, whose average pooling in shortcuts ('layer1.0.downsample.1.weight') and"
            " stem of several convolutions ('conv1.0.weight')",
        ),
        (DEEP_STEM, "a ResNet-C, whose stem of several convolutions ('conv1.0.weight')"),
        (
            {"layer1.0.se.fc1.weight": (4, 16, 1, 1), "layer1.0.conv2.weight": (4, 2, 3, 3)},
            "an SE-ResNet and a ResNeXt, whose squeeze-and-excitation ('layer1.0.se.fc1.weight')"
            " and grouped convolutions of 2 groups ('layer1.0.conv2.weight')",
        ),
        (
            {"layer1.0.se.conv.weight": (1, 1, 3)},
            "an ECA-ResNet, whose channel attention ('layer1.0.se.conv.weight')",
        ),
        (
            {"layer1.0.conv2.fc1.weight": (4, 2, 1, 1)},
            "a ResNeSt, whose split attention ('layer1.0.conv2.fc1.weight')",
        ),
        (
            {"layer1.0.convs.0.weight": (4, 2, 3, 3)},
            "a Res2Net, whose 3x3 convolutions in steps ('layer1.0.convs.0.weight')",
        ),
        (
            {"conv1.weight": (8, 3, 3, 3)},
            "a ResNet for small images, whose stem of one 3x3 ('conv1.weight')",
        ),
        (
            {".*running_.*": None},
            "a ResNet without batch norms, whose norms without running_mean ('bn1.weight')",
        ),
        (
            {
                f"layer{i + 1}.{j}.conv{k}.weight": shape
                for i, j in [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
                for k, shape in {
                    1: (8 * (i + 1), 8, 1, 1),
                    2: (8 * (i + 1), 8 * (i + 1), 3, 3),
                    3: (16 * (i + 1), 8 * (i + 1), 1, 1),
                }.items()
            },
            "a Wide ResNet, whose 3x3 convolutions 2 times as wide as a ResNet's"
            " ('layer1.0.conv2.weight')",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_relative_of_resnet(names, message, suffix, tmp_path):
    state, path = relative(names), tmp_path / f"net.{suffix}"
    if suffix == "pth":
        torch.save(state, path)
    else:
        save_file({key: value.numpy() for key, value in state.items()}, path)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(caught.value) == f"net: this is {message} cannot run here; use another checkpoint"


def test_a_file_without_a_config_is_not_told_to_correct_it(tmp_path):
    torch.save(relative({"layer2.0.bn1.bias": None}), tmp_path / "net.pth")
    with pytest.raises(ModelError, match=r"'layer2.0.bn1.bias'; give .* of this architecture$"):
        load(tmp_path / "net.pth")


def test_a_folder_with_a_config_is(folder):
    rewrite(folder, lambda tensors: tensors.pop(STEM))
    with pytest.raises(ModelError, match=r"of this architecture, or correct its config\.json$"):
        load(folder)


# --- files ------------------------------------------------------------------------------------


class Anything:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "holds a list"),
        ({"state_dict": {"a": 3}}, "'a' in it is an int"),
        ({}, "holds an empty dict"),
        ({"state_dict": {}}, "'state_dict' in it is an empty dict"),
        ({"a": torch.ones(2), 3: torch.ones(2)}, "a key that is no text in it is a tensor"),
        (torch.nn.Linear(2, 2), r"it holds torch\.nn\.modules\.linear\.Linear, which .* run code"),
        (Anything(), r"it holds .*test_bad_input\.Anything, which .* could run code"),
    ],
)
def test_a_pickle_that_is_no_state_dict(tmp_path, content, message):
    torch.save(content, tmp_path / "net.pth")
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "net.pth")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04", b"PK\x03\x04 no zip"])
@pytest.mark.parametrize("suffix", ["pth", "bin", "safetensors"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_files(tmp_path, content, suffix):
    (tmp_path / f"net.{suffix}").write_bytes(content)
    path = tmp_path / f"net.{suffix}"
    with pytest.raises(ModelError, match=rf"^{re.escape(str(path))}: this cannot be read as a "):
        load(path)


@pytest.mark.parametrize("kept", [4, 100, 5000, -1])
def test_truncated_safetensors(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"/model\.safetensors: .*cut off"):
        load(folder)


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F8", "shape": []}}'])
def test_strange_safetensors(tmp_path, header):
    path = tmp_path / "net.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        ModelError, match=r"/net\.safetensors: (this cannot be read as|a tensor has the dtype)"
    ):
        load(path)


def test_an_index_without_its_shards(tmp_path):
    folder = models.save(models.cvt(), tmp_path / "net", max_shard_size="300KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        load(folder)


def test_damaged_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(
        ModelError, match=r"config\.json: this cannot be read as JSON \(.* at line 1\)"
    ):
        load(folder)


def test_a_folder_without_a_model(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"the folder has no checkpoint .* but holds notes\.txt"):
        load(tmp_path)


def test_a_folder_with_several_models(tmp_path):
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"several checkpoints, a\.pth, b\.pth"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["net.pth", "a/net.pth", "./net", "/no/net", "~/net"])
def test_a_path_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"^{name}: there is no such file or folder; check the"):
        load(name)


def test_a_folder_without_a_model_is_named_as_it_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", "/", str(tmp_path)):
        with pytest.raises(ModelError, match=f"^{re.escape(name)}: the folder has no checkpoint"):
            load(name)


def test_an_empty_name():
    with pytest.raises(ModelError, match="the model's name is empty"):
        load("")


@pytest.mark.parametrize("name", ["resnet50", "no/such/folder"])
def test_an_unknown_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match=r"there is no bundled model \(.*hub id \(owner/name\) of that name; "
    ):
        load(name)


def test_an_unknown_name_suggests_a_hub_id():
    with pytest.raises(ModelError, match="did you mean 'microsoft/resnet-50'"):
        load("resnet-50")


# --- the hub ----------------------------------------------------------------------------------


def python(code, **environment):
    """Runs code in a fresh interpreter: the hub reads its environment when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_only_the_hub_has_revisions(folder):
    for source, what in [("resnet-cifar10", "bundled"), (folder, "a file or a folder")]:
        with pytest.raises(ArgumentError, match=f"is {what}, and only models of the Hugging Face"):
            load(source, revision="v1")


def test_an_unknown_id_offline(tmp_path):
    code = "from maxvision.commands.weights import main; exit(main(['inspect', 'no/such-model']))"
    done = python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: no/such-model: HF_HUB_OFFLINE is set and the model is not in the cache; unset"
        " it once"
    )
    assert "Traceback" not in done.stderr


def test_no_network(tmp_path):
    code = "from maxvision.weights import load; load('no/such-model')"
    dead = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = python(code, **dead)
    assert re.search(r"the Hugging Face hub cannot be reached \([A-Z][\w ]+\); check", done.stderr)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_cached_model_needs_no_network(tmp_path, folder, offline):
    repo = tmp_path / "hub" / "models--someone--net"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / ("0" * 40))
    code = "from maxvision.weights import load; print(load('someone/net').name)"
    done = python(
        code, HF_HUB_OFFLINE=offline, HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert done.stdout == "someone/net\n", done.stderr


def test_pickles_need_no_torch(tmp_path):
    torch.save(models.torchvision_names(models.resnet()), tmp_path / "net.pth")
    code = f"""
import sys
sys.modules["torch"] = None
from maxvision.weights import load
print(load({str(tmp_path / "net.pth")!r}).family)
"""
    done = python(code)
    assert done.stdout == "resnet\n", done.stderr


def test_importing_is_cheap():
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'PIL', 'rich', 'pickletools'}"
    done = python(
        f"import sys; from maxvision import weights; print(sorted({heavy} & sys.modules.keys()))"
    )
    assert done.stdout == "[]\n", done.stderr
