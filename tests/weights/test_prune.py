"""``maxvision weights prune``: exact counts, whole patterns, honest metadata, clear mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForImageClassification

from maxvision import weights
from maxvision.commands.weights import main
from maxvision.weights.prune import as_rows, keep, prunable
from tests.weights import models


def drawn(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Makes tensors of rising scale, so that one threshold and one share differ."""
    rng = np.random.default_rng(0)
    return {
        f"layer{i}": (i + 1) * rng.standard_normal(shape, np.float32)
        for i, shape in enumerate(shapes)
    }


LAYERS = drawn((24, 10, 3, 3), (17, 12, 1, 1), (9, 37))
TOTAL = sum(tensor.size for tensor in LAYERS.values())


@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.9, 0.999])
def test_unstructured_zeros_are_counted_exactly_and_are_the_smallest(sparsity: float) -> None:
    masks = keep(LAYERS, sparsity, "global", "unstructured")
    assert sum((~mask).sum() for mask in masks.values()) == round(sparsity * TOTAL)
    gone = [np.abs(LAYERS[name][~mask]) for name, mask in masks.items()]
    left = [np.abs(LAYERS[name][mask]) for name, mask in masks.items()]
    assert np.concatenate(gone).max(initial=0) <= np.concatenate(left).min()


def test_each_layer_gets_its_share_with_scope_layer() -> None:
    for mask in keep(LAYERS, 0.8, "layer", "unstructured").values():
        assert (~mask).sum() == round(0.8 * mask.size)
    of_all = keep(LAYERS, 0.8, "global", "unstructured")
    shares = [mask.mean() for mask in of_all.values()]
    assert shares == sorted(shares) and shares[0] < 0.15 < 0.4 < shares[-1]  # of rising scale


def test_two_of_four_stay_along_the_input_channels() -> None:
    filters = LAYERS["layer1"]  # C = 12: every four are input channels of one tap
    mask = keep({"w": filters}, 0.5, "layer", "2:4")["w"]
    groups = mask.transpose(0, 2, 3, 1).reshape(-1, 4)
    assert (groups.sum(1) == 2).all()
    sizes = np.abs(filters).transpose(0, 2, 3, 1).reshape(-1, 4)
    assert (np.where(groups, sizes, np.inf).min(1) >= np.where(groups, 0, sizes).max(1)).all()
    rest = keep({"w": LAYERS["layer2"]}, 0.5, "layer", "2:4")["w"]  # 37 = 9 groups and one more
    assert (rest[:, :36].reshape(9, 9, 4).sum(2) == 2).all() and rest[:, 36].all()


@pytest.mark.parametrize(("pattern", "block"), [("1x8", (1, 8)), ("8x1", (8, 1))])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_blocks_go_whole(pattern: str, block: tuple[int, int], scope: str) -> None:
    masks = keep(LAYERS, 0.75, scope, pattern)
    for mask in masks.values():
        rows = as_rows(mask)
        for f in range(0, rows.shape[0], block[0]):
            for k in range(0, rows.shape[1], block[1]):
                tile = rows[f : f + block[0], k : k + block[1]]
                assert tile.all() or not tile.any()
        if scope == "layer":
            assert abs((~mask).sum() - 0.75 * mask.size) <= 4  # half a block
    assert abs(sum((~mask).sum() for mask in masks.values()) - 0.75 * TOTAL) <= 4 * len(masks)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_blocks_of_filters_by_channels_stay_within_a_tap(scope: str) -> None:
    layers = drawn((130, 200, 3, 3), (256, 128, 1, 1), (70, 64))
    masks = keep(layers, 0.6, scope, "64x64")
    zeros = total = 0
    for name, mask in masks.items():
        blocks = _blocks_of(mask)
        assert all(block.all() or not block.any() for block in blocks)
        if scope == "layer":
            assert abs((~mask).sum() - 0.6 * mask.size) <= 64 * 64 / 2
            means = np.array([np.abs(b).mean() for b in _blocks_of(layers[name])])
            kept = np.array([block.all() for block in blocks])
            assert means[~kept].max(initial=0) <= means[kept].min(initial=np.inf)
        zeros, total = zeros + (~mask).sum(), total + mask.size
    assert abs(zeros - 0.6 * total) <= 64 * 64 / 2 * len(masks)


def _blocks_of(tensor: np.ndarray) -> list[np.ndarray]:
    tensor = tensor.reshape(*tensor.shape, 1, 1) if tensor.ndim == 2 else tensor
    return [
        tensor[f : f + 64, c : c + 64, r, s]
        for f in range(0, tensor.shape[0], 64)
        for c in range(0, tensor.shape[1], 64)
        for r, s in np.ndindex(tensor.shape[2:])
    ]


def test_zeros_that_are_there_stay_and_count() -> None:
    tensor = LAYERS["layer0"].copy()
    tensor[:12] = 0
    mask = keep({"w": tensor}, 0.6, "global", "unstructured")["w"]
    assert (~mask).sum() == round(0.6 * mask.size) and not mask[:12].any()


@pytest.fixture(params=["resnet", "cvt"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    net = models.resnet("bottleneck") if request.param == "resnet" else models.cvt()
    return models.save(net, tmp_path / "net")


def test_a_pruned_folder_loads_here_and_in_transformers(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["prune", str(saved), "--sparsity", "0.9", "-o", str(out)]) == 0
    before, after, layers = weights.load(saved), weights.load(out), prunable(weights.load(saved))
    dense = {"head", "stem" if before.family == "resnet" else "stages.0.embed"}
    assert dense < set(layers)
    zeros = total = 0
    for name, new in after.tensors.items():
        layer, _, kind = name.rpartition(".")
        old = before.tensors[name]
        if layer in dense or layer not in layers or kind == "bias":
            np.testing.assert_array_equal(old, new)
            continue
        assert np.array_equal(new[new != 0], old[new != 0])
        zeros, total = zeros + (new == 0).sum(), total + new.size
    assert zeros == round(0.9 * total)
    said = capsys.readouterr().out
    assert f"{zeros:,} of {total:,} weights" in said and "accuracy was not measured" in said

    notes = json.loads((out / "config.json").read_text())["pruning"]
    assert notes["accuracy"] == "not measured" and notes["of"] == "net"
    assert (notes["pattern"], notes["scope"], notes["sparsity"]) == ("unstructured", "global", 0.9)
    assert set(notes["dense"]) == dense and notes["zeros"] == pytest.approx(0.9, abs=1e-4)
    _, info = AutoModelForImageClassification.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_layers_to_skip_are_named_with_wildcards(saved: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    kept = "head,stages.1.*"
    assert main(["prune", str(saved), "--pattern", "2:4", "--skip", kept, "-o", out]) == 0
    for name, new in weights.load(out).tensors.items():
        is_filter = new.ndim == 4 and new.shape[1] > 1
        if is_filter and not name.startswith("stages.1"):
            assert np.mean(new == 0) >= 0.33  # a stem of three channels: two of each four, or three
        elif name.startswith(("stages.1", "head")):
            assert new.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1"], "sparsity is 1; give the share of zeros, from 0 to below 1"),
        (["--sparsity", "nan"], "sparsity is nan; give the share"),
        ([], "sparsity is missing; give the share"),
        (
            ["--pattern", "2:4", "--sparsity", "0.9"],
            "pattern 2:4 always gives a sparsity of 0.5, not 0.9",
        ),
        (
            ["--sparsity", "0.5", "--skip", "haed"],
            "--skip haed: the model has no such layer; did you mean 'head'?",
        ),
        (["--sparsity", "0.5", "--skip", "*"], "--skip names every layer"),
    ],
)
def test_mistakes_get_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["prune", "resnet-cifar10", *arguments, "-o", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_pattern_is_no_sparsity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prune", "resnet-cifar10", "--sparsity", "2:4", "-o", str(tmp_path / "out")])
    assert "not '2:4'; did you mean --pattern 2:4?" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maxvision.weights.convert.save_file", full)
    where = tmp_path / "out" / "net"
    assert main(["prune", "resnet-cifar10", "--sparsity", "0.5", "-o", str(where)]) == 2
    assert "the disk is full; nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
