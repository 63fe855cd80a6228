"""The networks stage by stage against transformers, what they are made of, and what they answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

from maxvision import runtime, weights
from maxvision.graphs import nodes, passes
from maxvision.graphs.constants import Constants
from maxvision.graphs.lower import Canonical, backend, emit
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.program import Program
from maxvision.runtime import Features, cache
from maxvision.runtime.classifier import build, network, weights_of
from tests.graphs import reference

BOUND = 1e-5  # of float32: the largest difference over the largest number
PHOTOS = reference.DATA / "photos"


@dataclass(frozen=True)
class Network:
    """A network to compare.

    Attributes:
        make: Makes transformers' model.
        size: Height and width of the images, px: small, and not square.
        config: What differs from the family's default.
        nightly: Whether its stages are compared every night only.
    """

    make: Callable[..., Any]
    size: tuple[int, int]
    config: Mapping[str, Any] = field(default_factory=dict)
    nightly: bool = False


NETWORKS = {  # a compilation takes as long as there are ops in all that run by day
    "resnet-8": Network(
        reference.resnet,
        (64, 80),
        {"layer_type": "basic", "depths": [1, 2], "hidden_sizes": [64, 128]},
        nightly=True,  # tests/runtime/goldens are of such a one
    ),
    "resnet-8 of bottlenecks": Network(
        reference.resnet,
        (64, 80),
        {"depths": [1, 1], "hidden_sizes": [256, 512], "num_labels": 1000},
        nightly=True,
    ),
    "cvt-3": Network(
        reference.cvt,
        (64, 96),
        {
            "depth": [1, 2], "embed_dim": [64, 192], "num_heads": [1, 3],
            "cls_token": [False, True], "num_labels": 1000,
        },
        nightly=True,
    ),
    "resnet-12": Network(
        reference.resnet,
        (64, 80),
        {"layer_type": "basic", "depths": [1, 2, 1, 1], "hidden_sizes": [64, 128, 256, 512]},
        nightly=True,
    ),
    "resnet-14": Network(
        reference.resnet, (64, 80), {"depths": [1, 1, 1, 1], "num_labels": 1000}, nightly=True
    ),
    "cvt-6": Network(
        reference.cvt, (64, 96), {"depth": [1, 2, 3], "num_labels": 1000}, nightly=True
    ),
    "resnet-odd": Network(  # "v1" strides, widths that nothing divides, grey images
        reference.resnet,
        (75, 58),
        {
            "num_channels": 1, "embedding_size": 24, "hidden_sizes": [42, 136], "depths": [1, 2],
            "downsample_in_bottleneck": True, "downsample_in_first_stage": True, "num_labels": 17,
        },
    ),
    "cvt-odd": Network(  # no class token at the end, so the mean of the tokens is classified
        reference.cvt,
        (45, 70),
        {
            "patch_sizes": [5, 3], "patch_stride": [3, 2], "patch_padding": [1, 0],
            "embed_dim": [60, 60], "num_heads": [3, 5], "depth": [1, 2], "mlp_ratio": [2.0, 3.5],
            "qkv_bias": [True, False], "cls_token": [True, False], "kernel_qkv": [5, 3],
            "padding_q": [2, 1], "padding_kv": [2, 0], "stride_kv": [3, 1], "num_labels": 5,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Makes transformers' models, in float32."""
    return {name: n.make(**n.config) for name, n in NETWORKS.items()}


@pytest.fixture(scope="module")
def checkpoints(
    models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, weights.Checkpoint]:
    """Writes the models as checkpoints, and reads them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: weights.load(reference.save(m, folder / name)) for name, m in models.items()}


@pytest.fixture(scope="module")
def chosen(pytestconfig: pytest.Config) -> list[str]:
    """Names the networks that run now."""
    every = pytestconfig.getoption("--all")
    return [name for name, net in NETWORKS.items() if every or not net.nightly]


@pytest.fixture(scope="module")
def programs(checkpoints: dict[str, weights.Checkpoint], chosen: list[str]) -> dict[str, Program]:
    """Writes the networks down, and rewrites them for a CPU."""
    found = {}
    for name in chosen:
        checkpoint, size = checkpoints[name], NETWORKS[name].size
        plain = network(checkpoint, size, "float32", pixels="float32", everything=True)
        found[name] = passes.run(plain, backend(DeviceRef.CPU(), "float32"))
    return found


@pytest.fixture(scope="module")
def pixels() -> dict[str, np.ndarray]:
    """Draws three images for each network."""
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal((3, *n.size, n.config.get("num_channels", 3)), np.float32)
        for name, n in NETWORKS.items()
    }


@pytest.fixture(scope="module")
def expected(
    models: dict[str, Any], pixels: dict[str, np.ndarray], chosen: list[str]
) -> dict[str, Features]:
    """Runs transformers' models in float64."""
    results = {}
    for name in chosen:
        model = models[name]
        results[name] = reference.run(model.double(), pixels[name])
        model.float()
    return results


@pytest.fixture(scope="module", params=[1, 3], ids=["one image", "three images"])
def computed(
    programs: dict[str, Program],
    pixels: dict[str, np.ndarray],
    request: pytest.FixtureRequest,
) -> dict[str, Features]:
    """Runs the networks, all in one graph: five compilations would take a minute more."""
    executable = request.getfixturevalue("executable")
    results = executable.execute(*(pixels[name][: request.param] for name in programs))
    arrays = iter(result.to_numpy() for result in results)
    outputs = {}
    for name, program in programs.items():
        found = {output: next(arrays) for output in program.outputs}
        stages = [found[output] for output in found if output.startswith("stages.")]
        outputs[name] = Features(found["logits"], found["features"], stages)
    assert next(arrays, None) is None
    return outputs


@pytest.fixture(scope="module")
def executable(checkpoints: dict[str, weights.Checkpoint], programs: dict[str, Program]) -> Any:
    """Compiles one graph of all the networks; the batch is symbolic."""
    device = DeviceRef.CPU()
    types = [
        TensorType(
            DType.float32, ["batch", *NETWORKS[name].size, checkpoints[name].spec.channels], device
        )
        for name in programs
    ]
    registry: dict[str, Buffer] = {}
    library = cache.library(gpu=False)
    with Graph("networks", input_types=types, custom_extensions=[library]) as graph:
        outputs = []
        for (name, program), x in zip(programs.items(), graph.inputs, strict=True):
            constants = Canonical(Constants(program, weights_of(checkpoints[name])), program)
            tensors = {f"{name}.{key}": value for key, value in constants.items()}
            parameters = Parameters(tensors, device, DType.float32).at(name)
            outputs += emit(program, [x.tensor], parameters)
            registry |= parameters.registry(CPU())
        graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    return session.init(session.compile(graph), weights_registry=registry)


def compare(ours: Features, theirs: Features) -> None:
    """Raises AssertionError if any output is beyond the bound, or NaN."""
    named = [
        (f"stage {i}", *pair) for i, pair in enumerate(zip(ours.stages, theirs.stages, strict=True))
    ]
    named += [("features", ours.features, theirs.features), ("logits", ours.logits, theirs.logits)]
    for name, our, their in named:
        assert our.shape == their.shape, f"{name}: {our.shape} is not {their.shape}"
        error = np.abs(our - their).max() / np.abs(their).max()
        assert error <= BOUND, f"{name}: the error is {error:.3g}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if net.nightly else [])
        for name, net in NETWORKS.items()
    ],
)
def test_every_stage_equals_transformers(
    computed: dict[str, Features], expected: dict[str, Features], name: str
) -> None:
    ours, theirs = computed[name], expected[name]
    batch = len(ours.logits)
    compare(
        ours,
        Features(
            theirs.logits[:batch], theirs.features[:batch], [s[:batch] for s in theirs.stages]
        ),
    )


def test_the_comparison_can_fail(expected: dict[str, Features]) -> None:
    right = expected["cvt-odd"]
    compare(right, right)
    for logits in (right.logits * (1 + 2e-5), right.logits[::-1], right.logits * np.nan):
        with pytest.raises(AssertionError, match="logits: the error is"):
            compare(Features(logits, right.features, right.stages), right)
    with pytest.raises(AssertionError, match=r"stage 1: .* is not"):
        stages = [s if i != 1 else s.swapaxes(1, 2) for i, s in enumerate(right.stages)]
        compare(Features(right.logits, right.features, stages), right)


# --- what a graph is made of -------------------------------------------------------------------

OURS = set(
    re.findall(r'@register\("(\w+)"\)', "".join(p.read_text() for p in nodes.OPS.rglob("*.mojo")))
)
MOVES = {  # MAX's own that compute nothing
    "mo.graph", "mo.chain.create", "mo.output", "mo.constant", "mo.constant.external", "mo.cast",
    "rmo.reshape", "rmo.mo.transpose", "rmo.concat", "rmo.slice",
}  # fmt: skip


def operations(operation: Any) -> Iterator[str]:
    """Names every operation inside an MLIR operation; a custom op by its own name."""
    name = operation.name
    yield operation.attributes["symbol"].value if name == "mo.custom" else name
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from operations(inner.operation)


def strangers(graph: Graph) -> set[str]:
    return set(operations(graph._mlir_op)) - OURS - MOVES


@pytest.mark.parametrize("name", ["resnet-14", "cvt-6"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [(DeviceRef.CPU(), DType.float32), (DeviceRef.GPU(), DType.bfloat16)],
    ids=["cpu", "gpu"],
)
def test_every_node_is_ours(
    checkpoints: dict[str, weights.Checkpoint], name: str, device: DeviceRef, dtype: DType
) -> None:
    graph, _ = build(checkpoints[name], device, dtype, size=(224, 224), everything=True)
    assert strangers(graph) == set()
    assert {"conv2d", "bmm", "normalize"} <= set(operations(graph._mlir_op)) & OURS


def test_other_nodes_are_noticed() -> None:
    image = TensorType(DType.float32, ["batch", 4], DeviceRef.CPU())
    library = cache.library(gpu=False)
    with Graph("strange", input_types=[image], custom_extensions=[library]) as graph:
        x = nodes.relu(graph.inputs[0].tensor)
        graph.output(ops.softmax(ops.relu(x + x)))
    assert strangers(graph) == {"rmo.add", "rmo.mo.relu", "rmo.mo.reduce.softmax"}


# --- what a model answers ----------------------------------------------------------------------


@pytest.mark.nightly  # by day tests/test_bundled.py has photos for the default model
@pytest.mark.skipif(not PHOTOS.is_dir(), reason=f"NO PHOTOS at {PHOTOS}; set MAXVISION_TEST_DATA")
@pytest.mark.parametrize(
    "net",
    [
        NETWORKS["cvt-6"],
        Network(reference.resnet, (224, 224)),
        Network(reference.cvt, (224, 224)),
    ],
    ids=["cvt-6", "resnet-50", "cvt-13"],
)
def test_photos_get_the_answers_of_transformers(net: Network, tmp_path: Path) -> None:
    photos = sorted(PHOTOS.iterdir())
    assert len(photos) == 62
    theirs = net.make(**{**net.config, "num_labels": 1000})
    prepared = reference.processed(photos)
    reference.spread(theirs, prepared[:16])
    logits = [reference.run(theirs, batch).logits for batch in np.array_split(prepared, 8)]
    scores, classes = torch.from_numpy(np.concatenate(logits)).double().softmax(1).topk(5)
    assert len(classes[:, 0].unique()) > 10, "the pictures look alike to this model"

    ours = runtime.load(reference.save(theirs, tmp_path)).classify([str(photo) for photo in photos])
    assert [[p.class_id for p in answer] for answer in ours] == classes.tolist()
    assert [[p.label for p in answer] for answer in ours] == [
        [theirs.config.id2label[i] for i in row] for row in classes.tolist()
    ]
    error = np.abs(np.array([[p.score for p in answer] for answer in ours]) - scores.numpy()).max()
    assert error <= 1e-4
