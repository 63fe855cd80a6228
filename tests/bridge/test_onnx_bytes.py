"""Layers of 8 bits that are awkward, in one ONNX file, beside its meaning in float64 and in others.

Rows of ``LAYERS`` have channels and sizes that fill no vector, uneven padding, strides, groups,
zero points of either sign, and numbers whose products would saturate 16 bits (vpmaddubsw). All are
compiled at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from max.driver import CPU

onnx = pytest.importorskip("onnx", reason="ONNX files are read by the package onnx")

from maxvision.bridge.onnx_file import OnnxReference, evaluator, read  # noqa: E402
from maxvision.runtime.executor import Executor  # noqa: E402
from tests.bridge.test_onnx_integers import File  # noqa: E402

pytestmark = pytest.mark.nightly  # tests/ops/byte_products.mojo checks the products by day

BATCH = 3
SCALE = 0.03
"""What an integer of an input stands for."""


class Input(NamedTuple):
    """What layers read.

    Attributes:
        shape: Of an image: [C, H, W], or [C].
        zero: As uint8 has it; int8's is 128 less, mostly negative.
        kind: What the file stores it as.
        levels: The integers, as uint8 has them: one, or two of which the first is rare; None stands
            for random ones.
    """

    shape: tuple[int, ...]
    zero: int
    kind: str = "int8"
    levels: tuple[int, ...] | None = None


INPUTS = {
    "images": Input((36, 9, 8), 7),
    "odd": Input((7, 9, 8), 200),
    "few": Input((5, 9, 8), 99, "uint8"),
    "many": Input((4200, 2, 2), 131, "uint8"),
    "rows": Input((140,), 64),
    "largest": Input((36, 9, 8), 0, "int8", (255,)),
    "both": Input((36, 9, 8), 255, "int8", (0, 255)),
}


class Layer(NamedTuple):
    """A layer.

    Attributes:
        x: Its input.
        weights: Their shape; of two dimensions for a linear layer.
        given: Attributes of the op.
        joins: Whether its rounded result is added to its input, and that rounded.
        whole: The integers of its weights, as ``levels`` of ``Input``. If they are given the result
            stays a float, so that all of a sum is seen.
        in_bytes: Whether it is multiplied in 8 bits here.
    """

    x: str
    weights: tuple[int, ...]
    given: dict[str, Any]
    joins: bool = False
    whole: tuple[int, ...] | None = None
    in_bytes: bool = True


SAME = {"pads": [1] * 4}
LAYERS = {  # few shapes and inputs: each pair is compiled once
    "3x3": Layer("images", (15, 36, 3, 3), SAME),
    "3x3, dilated": Layer("images", (15, 36, 3, 3), {"dilations": [2, 2], "pads": [2] * 4}),
    "5x3, uneven": Layer("images", (15, 36, 5, 3), {"pads": [3, 0, 1, 2]}),
    "3x3 in groups": Layer("images", (15, 12, 3, 3), {"group": 3, **SAME}),
    "3x3/2, padded behind": Layer("images", (70, 36, 3, 3),
                                  {"strides": [2, 2], "pads": [0, 0, 1, 1]}),
    "residual": Layer("images", (36, 36, 3, 3), SAME, joins=True),
    "depthwise": Layer("images", (36, 1, 3, 3), {"group": 36, **SAME}),
    "depthwise/2, uneven": Layer("images", (36, 1, 5, 5), {"group": 36, "strides": [2, 2],
                                                           "pads": [1, 2, 2, 1]}),
    "of odd channels": Layer("odd", (15, 7, 3, 3), SAME, in_bytes=False),
    "depthwise of few": Layer("few", (5, 1, 3, 3), {"group": 5, **SAME}),
    "1x1 of many": Layer("many", (3, 4200, 1, 1), {}),
    "linear": Layer("rows", (11, 140), {"transB": 1}),
    "3x3 of the largest": Layer("largest", (15, 36, 3, 3), SAME, whole=(127,)),
    "3x3 of the least": Layer("largest", (15, 36, 3, 3), SAME, whole=(-128,)),
    "depthwise of the least": Layer("largest", (36, 1, 5, 5), {"group": 36, "pads": [2] * 4},
                                    whole=(-128,)),
    "3x3 of both": Layer("both", (15, 36, 3, 3), SAME, whole=(127, -128)),
    "depthwise of both": Layer("both", (36, 1, 3, 3), {"group": 36, **SAME}, whole=(127, -128)),
}  # fmt: skip


class Whole(File):
    """A file of many layers, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.images = {name: self.draw(given) for name, given in INPUTS.items()}
        self.steps: dict[str, float] = {}
        self.read: dict[str, str] = {}
        for name, given in INPUTS.items():
            self.activations = given.kind
            self.read[name] = self.rounded(name, SCALE, given.zero)
        self.activations = "int8"

    def draw(self, given: Input) -> np.ndarray:
        """Draws numbers that are near no tie of the rounding to 8 bits, and so round alike."""
        size = (BATCH, *given.shape)
        if given.levels:
            levels = self.random.choice(given.levels, size, p=odds(given.levels))
        else:
            levels = self.random.integers(-9, 265, size)  # some are clipped
        off = self.random.uniform(-0.4, 0.4, size)
        return ((levels - given.zero + off) * SCALE).astype(np.float32)

    def add(self, name: str, layer: Layer) -> str:
        """Adds a layer.

        Returns:
            What it gives.
        """
        x = self.read[layer.x]
        y = self.layer(
            "Gemm" if len(layer.weights) == 2 else "Conv", x, name, layer.weights, **layer.given
        )
        if layer.whole:
            whole = self.random.choice(layer.whole, layer.weights, p=odds(layer.whole))
            at = next(i for i, held in enumerate(self.held) if held.name.startswith(f"{name}.w"))
            held = self.held[at]
            self.held[at] = onnx.numpy_helper.from_array(whole.astype(np.int8), held.name)
            return y
        y = self.rounded(y, 0.11, 128)
        self.steps[y] = 0.11
        if layer.joins:
            y = self.rounded(self.node("Relu", self.node("Add", y, x)), 0.09, 0)
            self.steps[y] = 0.09
        return y

    def write(self, path: Path, outputs: list[str]) -> Path:
        """Writes the file."""
        given = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("n", *each.shape))
            for name, each in INPUTS.items()
        ]
        ends = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = onnx.helper.make_graph(self.nodes, "net", given, ends, self.held)
        opset = [onnx.helper.make_opsetid("", self.opset)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), path)
        return path


def odds(levels: tuple[int, ...]) -> list[float]:
    return [1.0] if len(levels) == 1 else [0.1, 0.9]


@pytest.fixture(scope="module")
def file() -> tuple[Whole, list[str]]:
    """Makes the file of all layers; gives what they give, too."""
    made = Whole()
    return made, [made.add(*each) for each in LAYERS.items()]


@pytest.fixture(scope="module")
def path(file: tuple[Whole, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole, outputs = file
    return whole.write(tmp_path_factory.mktemp("bytes") / "net.onnx", outputs)


@pytest.fixture(scope="module")
def found(file: tuple[Whole, list[str]], path: Path) -> list[np.ndarray]:
    """Compiles all layers and runs them, and checks which ones run in 8 bits."""
    traced = read(path).trace()
    assert traced.program is not None
    executor = Executor.compile(traced.program.keep(traced.outputs), traced.tensors, CPU())
    assert executor.program.in_bytes == sum(layer.in_bytes for layer in LAYERS.values())
    return [np.asarray(y) for y in executor(*file[0].images.values())]


def compare(
    whole: Whole, outputs: list[str], got: list[np.ndarray], want: list[np.ndarray]
) -> list[str]:
    """Says which layers are off: by more than float32 is, or if rounded, by more than rare ties."""
    off = []
    for name, output, mine, theirs in zip(LAYERS, outputs, got, want, strict=True):
        assert mine.shape == theirs.shape, name
        step = whole.steps.get(output)
        apart = np.abs(mine.astype(np.float64) - theirs)
        if step is None:
            fine = apart.max() <= 5e-6 * np.abs(theirs).max()
        else:
            fine = apart.max() <= 1.001 * step and (apart < 1e-3 * step).mean() > 0.995
            assert len(np.unique(np.rint(theirs / step))) > 10, f"{name} has few levels"
        if not fine:
            off.append(f"{name}: {apart.max():.3g} of {np.abs(theirs).max():.3g}")
    return off


def test_layers_equal_float64(
    file: tuple[Whole, list[str]], path: Path, found: list[np.ndarray]
) -> None:
    model, (whole, outputs) = read(path), file
    wide = OnnxReference(model.module, outputs, {})([*whole.images.values()], [], "float64")
    assert not compare(whole, outputs, found, [wide[name] for name in outputs])


def test_layers_equal_the_evaluator_of_onnx(
    file: tuple[Whole, list[str]], path: Path, found: list[np.ndarray]
) -> None:
    whole, outputs = file
    want = evaluator(onnx.load(path)).run(None, whole.images)
    assert not compare(whole, outputs, found, want)


def test_layers_equal_onnxruntime(
    file: tuple[Whole, list[str]], path: Path, found: list[np.ndarray]
) -> None:
    """In its integers, which are exact on every CPU if it is told to be."""
    runtime = pytest.importorskip("onnxruntime", reason="pip install '.[peers]'")
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    whole, outputs = file
    want = session.run(None, whole.images)
    assert not compare(whole, outputs, found, want)
