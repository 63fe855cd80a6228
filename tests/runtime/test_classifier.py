"""The Python API: loading, calling, classifying, and what mistakes get."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from PIL import Image

from maxvision import runtime, weights
from maxvision.common.errors import ArgumentError, DeviceError, ImageError, ModelError
from maxvision.runtime import cache, devices, executor
from maxvision.runtime.classifier import network, weights_of
from maxvision.runtime.devices import find_device, find_dtype
from maxvision.runtime.preprocess import Preprocess
from tests.graphs import goldens, reference
from tests.graphs.interpret import interpret

PREPROCESS = {**reference.PREPROCESS, "size": 32}
SMALL = {
    "layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1],
    "id2label": dict(enumerate(["ant", "bee", "cat", "dog", "eel", "fly"])),
}  # fmt: skip


def normalised(levels: np.ndarray) -> np.ndarray:
    mean, std = (np.array(PREPROCESS[key]) for key in ("image_mean", "image_std"))
    return ((levels / 255 - mean) / std).astype(np.float32)


def levels(count: int, height: int = 32, width: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(levels(1, 48, 56, seed)[0])


def theirs(levels: np.ndarray, seed: int = 0) -> runtime.Features:
    """Runs transformers in float64 on what ``saved`` wrote for the same seed."""
    return reference.run(reference.resnet(seed, **SMALL).double(), normalised(levels))


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Writes a small ResNet whose weights a seed decides."""

    def save(seed: int) -> str:
        folder = tmp_path_factory.mktemp("small")
        return reference.save(reference.resnet(seed, **SMALL), folder, PREPROCESS)

    return save


@pytest.fixture(scope="module")
def model(saved: Callable[[int], str]) -> runtime.Classifier:
    return runtime.load(saved(0), device="cpu", batch_size=2)


def test_a_model_describes_itself(model: runtime.Classifier) -> None:
    assert (model.family, model.device, model.dtype) == ("resnet", "cpu", "float32")
    assert model.labels == ["ant", "bee", "cat", "dog", "eel", "fly"]
    assert (model.preprocess.height, model.preprocess.width) == (32, 32)
    said = f"Classifier({model.name!r}, resnet, 6 classes, 32 x 32 px, float32 on cpu)"
    assert repr(model) == said
    said = (
        r"Executor\('resnet', \w+ uint8\[batch, 32, 32, 3\] -> logits float32\[batch, 6\], \d+ ops"
    )
    assert re.fullmatch(said + r" on cpu\)", repr(model.executor()))


def test_labels_in_place_of_the_models(
    model: runtime.Classifier, saved: Callable[[int], str], tmp_path: Path
) -> None:
    (tmp_path / "labels.txt").write_text("A\nB\nC\nD\nE\nF\n")
    for labels in (tmp_path / "labels.txt", list("ABCDEF")):
        renamed = runtime.load(saved(0), device="cpu", labels=labels)
        ours, theirs = (each.classify(picture(0)) for each in (renamed, model))
        assert [p.label for p in ours] == ["ABCDEF"[p.class_id] for p in theirs]
    with pytest.raises(ArgumentError, match=r"labels: there are 5 but .* has 6 classes; give one"):
        runtime.load(saved(0), device="cpu", labels=list("ABCDE"))
    with pytest.raises(ArgumentError, match=r"labels none\.txt: the file cannot be read .*check"):
        runtime.load("no-such-model", labels="none.txt")
    (tmp_path / "labels.txt").write_text("\n")
    with pytest.raises(ArgumentError, match=r"labels\.txt: the file is empty; write a label on"):
        runtime.load("no-such-model", labels=tmp_path / "labels.txt")


@pytest.mark.parametrize("count", [0, 1, 7])
def test_any_batch_of_levels(model: runtime.Classifier, count: int) -> None:
    pixels = levels(count)
    logits = model(pixels)
    assert logits.shape == (count, 6) and logits.dtype == np.float32
    if count:
        assert close(logits, theirs(pixels).logits)


def test_what_is_compiled_is_said_once(
    model: runtime.Classifier, saved: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, kept = cache.find, {}
    monkeypatch.setattr(cache, "find", kept.get)
    monkeypatch.setattr(executor.InferenceSession, "compile", lambda *_: "by the fixture")
    monkeypatch.setattr(cache, "store", lambda name, _: kept.setdefault(name, find(name)))
    folder, pixels = saved(2), levels(1)
    said: list[str] = []
    for _ in range(2):
        other = runtime.load(folder, device="cpu", progress=said.append)
        assert said == [f"compiling {other.name} for cpu, this time only; it may take a minute"]
        assert close(other(pixels), theirs(pixels, seed=2).logits)


def test_pixels_need_not_be_contiguous(model: runtime.Classifier) -> None:
    pixels = levels(4)
    assert np.array_equal(model(pixels[::-1, :, ::-1]), model(pixels[::-1, :, ::-1].copy()))


@pytest.mark.nightly
def test_two_threads_ask_first_for_another_size_in_float32(model: runtime.Classifier) -> None:
    batches = [levels(n, 24, 40, seed=n) for n in (1, 3)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(model.features, map(normalised, batches)))
    for batch, ours in zip(batches, results, strict=True):
        expected = theirs(batch)
        assert close(ours.logits, expected.logits)
        assert close(ours.features, expected.features)
        assert len(ours.stages) == 2 and all(map(close, ours.stages, expected.stages))
    assert len(model.stages(normalised(batches[0]))) == 2


def test_threads_do_not_mix_their_images(model: runtime.Classifier) -> None:
    batches = [levels(n % 5 + 1, seed=n) for n in range(40)]
    alone = [model(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(model, batches))
    assert all(map(np.array_equal, alone, together))


def test_weights_are_not_part_of_the_compilation(
    model: runtime.Classifier, saved: Callable[[int], str]
) -> None:
    other = runtime.load(saved(1), device="cpu")
    pixels = levels(2)
    assert close(other(pixels), theirs(pixels, seed=1).logits)
    assert close(model(pixels), theirs(pixels, seed=0).logits)
    assert not np.allclose(other(pixels), model(pixels), rtol=0.1)


def test_classify_takes_one_image_or_a_list(model: runtime.Classifier, tmp_path: Path) -> None:
    pictures = [picture(seed) for seed in range(5)]  # three batches: two, two and one
    answers = model.classify(pictures, top_k=3)
    assert [len(answer) for answer in answers] == [3] * 5
    assert len({answer[0].score for answer in answers}) == 5
    pictures[4].save(tmp_path / "4.png")
    one = model.classify(str(tmp_path / "4.png"), top_k=3)
    assert [p.label for p in one] == [p.label for p in answers[4]]
    assert [p.score for p in one] == pytest.approx([p.score for p in answers[4]], abs=1e-6)
    assert model.classify([]) == []


def test_classify_names_the_likeliest_first(model: runtime.Classifier) -> None:
    answer = model.classify(picture(0), top_k=100)  # more than there are
    assert sorted(p.class_id for p in answer) == list(range(6))
    assert all(p.label == model.labels[p.class_id] for p in answer)
    scores = [p.score for p in answer]
    assert scores == sorted(scores, reverse=True) and sum(scores) == pytest.approx(1)
    assert len(model.classify(picture(0))) == 5
    logits = theirs(model.preprocess(picture(0))[None]).logits[0]
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert scores == pytest.approx(sorted(softmax, reverse=True), abs=1e-6)


def test_predictions_of_large_logits_are_finite(model: runtime.Classifier) -> None:
    (answer,) = model.predictions(np.array([[1e4, -1e4, 0, 1e4, 0, 0]], np.float32), 2)
    assert [(p.class_id, p.score) for p in answer] == [(0, 0.5), (3, 0.5)]


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_at_least_one(model: runtime.Classifier, top_k: int) -> None:
    with pytest.raises(ArgumentError, match=f"top_k must be at least 1 but is {top_k}"):
        model.classify(picture(0), top_k=top_k)


def test_a_bad_image_in_a_list_is_named(model: runtime.Classifier, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"missing\.jpg"):
        model.classify([picture(0), str(tmp_path / "missing.jpg")])


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((32, 32, 3), np.uint8), r"shape \[N, H, W, 3\] but have \[32, 32, 3\]"),
        (np.zeros((1, 3, 32, 32), np.uint8), r"shape \[N, H, W, 3\] but have \[1, 3, 32, 32\]"),
        (np.zeros((1, 32, 32, 1), np.uint8), r"shape \[N, H, W, 3\] but have \[1, 32, 32, 1\]"),
        (np.zeros((1, 32, 32, 3)), "uint8 or float32 but are float64"),
        (np.zeros((1, 32, 32, 3), np.int64), "uint8 or float32 but are int64"),
        (np.zeros((1, 32, 32, 3), ">f4"), "uint8 or float32 but are >f4"),
        (np.zeros((1, 0, 32, 3), np.uint8), "at least 1 px but has 0"),
    ],
)
def test_pixels_that_do_not_fit(
    model: runtime.Classifier, pixels: np.ndarray, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        model(pixels)
    assert model(levels(1)).shape == (1, 6), "a mistake must not harm the next call"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="NO /proc to read memory from")
def test_calls_keep_no_memory(model: runtime.Classifier) -> None:
    def resident() -> float:
        """Reads this process's memory, in MB."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    pixels = levels(64)  # 0.2 MB: 70 calls that kept it would hold 14 MB
    for _ in range(20):
        model(pixels)
    before = resident()
    for _ in range(70):
        model(pixels)
    assert resident() - before < 10


LOADING = """
import sys
from maxvision import weights
from maxvision.common import memory
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef
from max.engine import InferenceSession
from maxvision.runtime.executor import Unchecked
from maxvision.runtime.classifier import build

session = InferenceSession(devices=[CPU()])
memory.give_back()
memory.forget_peak()
before = memory.resident()
checkpoint = weights.load(sys.argv[1])
_, w = build(checkpoint, DeviceRef.CPU(), DType.float32, size=(224, 224), kernels=Unchecked())
registry = w.registry(CPU())
print((memory.peak() - before) / sum(each.bytes for each in w.bound.values()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="NO /proc to read memory from")
def test_loading_peaks_little_above_the_weights(tmp_path: Path) -> None:
    folder = reference.save(reference.resnet(0, num_labels=1000), tmp_path)  # ResNet-50
    done = subprocess.run(
        [sys.executable, "-c", LOADING, folder],
        cwd=reference.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) <= 1.15


# --- device, dtype and other arguments ---------------------------------------------------------


@pytest.mark.parametrize("name", ["tpu", "", "GPU", "gpu:x", "gpu:-1", "cpu:0", "auto:0", "0"])
def test_devices_that_are_none(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=f"device must be auto, cpu, gpu or gpu:N but is '{name}'"
    ):
        find_device(name)


@pytest.mark.parametrize(
    ("gpus", "name", "message"),
    [
        (0, "gpu", "MAX finds no GPU that it supports on this machine; use cpu"),
        (0, "gpu:0", "MAX finds no GPU that it supports on this machine; use cpu"),
        (1, "gpu:1", "device gpu:1: this machine has 1 GPU only; use gpu:0$"),
        (2, "gpu:7", "device gpu:7: this machine has 2 GPUs only; use gpu:0 to gpu:1$"),
    ],
)
def test_gpus_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, message: str
) -> None:
    monkeypatch.setattr(devices, "accelerator_count", lambda: gpus)
    with pytest.raises(DeviceError, match=message):
        find_device(name)


def test_auto_is_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_count", lambda: 0)
    assert find_device("auto").is_host and find_device("cpu").is_host


def test_dtypes() -> None:
    assert find_dtype("auto", CPU()) == find_dtype("float32", CPU()) == DType.float32
    for name in ("int3", "float64", "fp32", ""):
        with pytest.raises(ArgumentError, match=f"must be auto, float32, .* but is '{name}'"):
            find_dtype(name, CPU())
    assert find_dtype("bfloat16", CPU()) == DType.bfloat16
    with pytest.raises(DeviceError, match="float16 runs on a GPU only; use float32 or bfloat16"):
        find_dtype("float16", CPU())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "tpu"}, ArgumentError, "device must be .* but is 'tpu'"),
        ({"dtype": "int3", "device": "cpu"}, ArgumentError, "dtype must be .* but is 'int3'"),
        ({"dtype": "float16", "device": "cpu"}, DeviceError, "runs on a GPU only"),
        ({"batch_size": 0, "device": "cpu"}, ArgumentError, "batch_size must be .* but is 0"),
        ({"device": "cpu"}, ModelError, "no-such-model: there is no bundled model"),
    ],
)
def test_load_checks_its_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runtime.load("no-such-model", **arguments)


# --- the models that ship ----------------------------------------------------------------------


def compare(name: str, run: Callable[[np.ndarray], np.ndarray]) -> None:
    """Raises AssertionError if the logits of the examples are not a bundled model's goldens."""
    golden = json.loads(goldens.FILE.read_text())["models"].get(name)
    assert golden and golden["sha256"] == goldens.digest(name), (
        f"{name} is not what goldens.json was made with: run python -m tests.graphs.goldens"
    )
    checkpoint = weights.load(name)
    preprocess = Preprocess.from_config(checkpoint.preprocess)
    for picture, expected in golden["logits"].items():
        logits = run(preprocess(goldens.EXAMPLES / picture)[None])[0]
        best = (-logits).argsort()[:5]
        assert [checkpoint.labels[i] for i in best] == list(expected), picture
        assert logits[best] == pytest.approx(list(expected.values()), abs=1e-4), picture


@pytest.mark.parametrize("name", weights.bundled())
def test_bundled_programs_mean_their_goldens(name: str) -> None:
    checkpoint = weights.load(name)
    program = network(checkpoint, checkpoint.size, "float32")
    compare(name, lambda x: interpret(program, [x], weights_of(checkpoint))["logits"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "resnet-cifar10" else pytest.mark.nightly)
        for name in weights.bundled()
    ],
)
def test_bundled_models_give_their_goldens(name: str) -> None:
    model = runtime.load(name, device="cpu")
    compare(name, model)
    assert model.classify(goldens.EXAMPLES / "cat.jpg")[0].label == "cat"
