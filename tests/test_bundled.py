"""The accuracy of the default model and of the bundled ones, through our own graph."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType

from maxvision import weights
from maxvision.bench.accuracy import correct
from maxvision.commands.models import bundled
from maxvision.common.arguments import DEFAULT_MODEL
from maxvision.graphs import sparsity
from maxvision.graphs.layers import layers
from maxvision.graphs.target import Target
from maxvision.runtime import load
from maxvision.runtime.classifier import choose_sparse
from tests.graphs.reference import DATA

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.jpg"))

PHOTOS = sorted((DATA / "photos").glob("*.JPEG"))
TEST = DATA / "cifar10" / "test.npz"


@pytest.mark.skipif(not TEST.exists(), reason=f"NO CIFAR-10 at {TEST}: accuracy is not tested")
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "resnet-cifar10" else pytest.mark.nightly)
        for name in weights.bundled()
    ],
)
def test_accuracy(name: str, count: int) -> None:
    """It is the card's, which is of all 10,000 pictures, less three standard deviations."""
    right = list(itertools.chain.from_iterable(correct(load(name), TEST, count)))
    (whole,) = (row.top1 for row in bundled() if row.name == name)
    assert whole and len(right) == count
    assert np.mean(right) >= whole - 3 * math.sqrt(whole * (1 - whole) / count)


@pytest.mark.skipif(not PHOTOS, reason=f"NO photos in {DATA}: the default model is not tested")
def test_the_default_model_names_photos() -> None:
    """One photo each of 62 classes of ImageNet; torch answers 49 and 62 in float32."""
    model = load(DEFAULT_MODEL, device="cpu")
    answers = model.classify(list(PHOTOS), top_k=5)
    wanted = [path.stem.partition("_")[2].replace("_", " ").lower() for path in PHOTOS]
    named = [[each.label.lower() for each in answer] for answer in answers]
    assert len(wanted) == 62
    assert sum(labels[0] == want for labels, want in zip(named, wanted, strict=True)) >= 48
    assert sum(want in labels for labels, want in zip(named, wanted, strict=True)) >= 61


def test_the_pruned_model_has_its_zeros() -> None:
    model = weights.load("resnet-cifar10-p80")
    named = [each.name for each in layers(model.program((128, 128)))]
    filters = [model.tensors[f"{name}.weight"] for name in named if name not in ("stem", "head")]
    zeros = sum(each.size - np.count_nonzero(each) for each in filters)
    assert zeros / sum(each.size for each in filters) == pytest.approx(0.8, abs=1e-3)
    top1 = {row.name: row.top1 for row in bundled()}
    dense, pruned = top1["resnet-cifar10"], top1["resnet-cifar10-p80"]
    assert dense and pruned and dense - pruned < 0.01


@pytest.mark.parametrize(
    ("vectors", "size", "measured"),
    [("avx512f", 128, True), ("avx2", 224, True), ("asimd", 224, False)],
)
def test_the_pruned_model_runs_sparse(vectors: str, size: int, measured: bool) -> None:
    """On each CPU that has a break-even table, whichever this one is, and on no other."""
    model = weights.load("resnet-cifar10-p80")
    target = Target(vectors, "cpu", "", (vectors,))
    table = sparsity.TABLES / sparsity.table_name(target, "float32")
    chosen = choose_sparse(model, "auto", target, DType.float32, (size, size)).layers
    assert bool(chosen) == table.exists() == measured


@pytest.mark.nightly
@pytest.mark.parametrize("name", weights.bundled())
def test_bfloat16_gives_the_labels_of_float32(name: str) -> None:
    assert len(EXAMPLES) == 4
    exact, rounded = (
        load(name, device="cpu", dtype=dtype).classify(list(EXAMPLES), top_k=10)
        for dtype in ("float32", "bfloat16")
    )
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours[0].label == theirs[0].label
        scores = {prediction.label: prediction.score for prediction in theirs}
        assert all(abs(p.score - scores[p.label]) < 0.02 for p in ours)
