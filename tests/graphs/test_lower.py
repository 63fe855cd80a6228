"""Programs as MAX graphs: any pass may be left out, and the answers on a CPU are torch's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from maxvision.graphs import passes
from maxvision.graphs.constants import Constants
from maxvision.graphs.cvt import CvtStage
from maxvision.graphs.lower import EMIT, OTHERS, Canonical, backend, emit, lower
from maxvision.graphs.net import Net, Value
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.passes import PASSES
from maxvision.graphs.pixels import from_pixels
from maxvision.graphs.program import Program
from maxvision.graphs.shapes import OPS
from maxvision.graphs.types import BATCH
from maxvision.runtime import cache
from maxvision.runtime.executor import Unchecked
from tests.graphs import nets
from tests.graphs.interpret import inputs, interpret, weights

BOUND = 1e-5  # of float32: the largest difference over the largest number
HERE = DeviceRef.CPU()
TINY = {  # a compilation takes as long as there are ops in all variants
    "resnet": from_pixels(
        nets.program(nets.resnet_of("basic", (1,), (6,), 4, 3, False, True, 3), 3, 12, 16).keep(
            ["logits"]
        ),
        "uint8",
        "float32",
    ),
    "cvt": from_pixels(
        nets.program(
            nets.cvt_of(CvtStage(3, 2, 1, 8, 2, 1, cls_token=True), classes=3), 3, 8, 10
        ).keep(["logits"]),
        "uint8",
        "float32",
    ),
}


def shared(net: Net, x: Value) -> None:
    """Uses one filter twice, with a bias and without; adds weights that are filters as well."""
    weight, bias = net.weight("a.weight", 3, 3, 1, 1), net.weight("a.bias", 3)
    net.output("biased", net.op("conv2d", [x, weight, bias]))
    net.output("plain", net.op("conv2d", [x, weight]))
    tokens = net.permute(net.reshape(x, BATCH, 3, x.size(2) * x.size(3)), 0, 2, 1)
    net.output("added", net.op("add", [tokens, net.weight("b", x.size(2) * x.size(3), 3)]))


def strange(net: Net, x: Value) -> None:
    """Calls what no network of ours does."""
    y = net.op("cast", [x], dtype="float32")
    net.output("log", net.op("log_softmax", [y]))
    net.output("soft", net.op("softmax", [net.slice(y, 2, 1, 3)]))
    net.output("product", net.op("matmul", [y, y], alpha=0.5, transpose_b=True))
    net.output("mean", net.avg_pool2d(net.max_pool2d(x, 2, stride=(1, 2)), (2, 1)))
    net.output("raw", net.op("avg_pool2d", [x]))


@dataclass(frozen=True)
class Variant:
    """A program, and the passes that are left out; whether it runs every night alone."""

    name: str
    plain: Program
    off: Collection[str]
    nightly: bool = False

    @property
    def final(self) -> Program:
        return passes.run(self.plain, backend(HERE, "float32"), self.off)


def variants() -> list[Variant]:
    """Lists what runs: each network with all passes, with each left out, and with none.

    The larger network's, without a pass each, take a minute to compile: every day they are
    interpreted, every night they run.
    """
    found = []
    for name, program in TINY.items():
        night = name == "cvt"
        found += [Variant(f"{name} without {off}", program, {off}, night) for off in PASSES]
        found += [Variant(f"{name} with all", program, ())]
        found += [Variant(f"{name} with none", program, set(PASSES))]
    for name, write in {"constants": nets.constants, "gated": nets.gated}.items():
        found += [Variant(name, nets.program(write, 3, 4, 5), ())]
    for name, write in {"shared filter": shared, "strange": strange}.items():
        found += [Variant(name, nets.program(write, 3, 4, 5), set(PASSES))]
    return found


VARIANTS = variants()


@pytest.fixture(scope="module")
def answers(pytestconfig: pytest.Config) -> dict[str, dict[str, np.ndarray]]:
    """Runs the variants in one graph: a compilation each would take minutes; equal ones once."""
    chosen: dict[str, Variant] = {}
    for variant in VARIANTS:
        if not variant.nightly or pytestconfig.getoption("--all"):
            chosen.setdefault(str(variant.final), variant)
    types, given = [], []
    for each in chosen.values():
        ((shape, dtype),) = each.plain.inputs.values()
        types.append(TensorType(DType[dtype], shape, device=HERE))
        given += inputs(each.plain)
    registry: dict[str, Buffer] = {}
    library = cache.library(gpu=False)
    with Graph("variants", input_types=types, custom_extensions=[library]) as graph:
        outputs = []
        for i, (each, x) in enumerate(zip(chosen.values(), graph.inputs, strict=True)):
            final = each.final
            constants = Canonical(Constants(final, weights(each.plain)), final)
            tensors = {f"{i}.{name}": value for name, value in constants.items()}
            parameters = Parameters(tensors, HERE, DType.float32).at(str(i))
            outputs += emit(final, [x.tensor], parameters)
            registry |= parameters.registry(CPU())
        graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    executable: Any = session.init(session.compile(graph), weights_registry=registry)
    results = iter(executable.execute(*given))
    found = {
        key: {output: next(results).to_numpy() for output in each.plain.outputs}
        for key, each in chosen.items()
    }
    assert next(results, None) is None
    return found


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.nightly] if each.nightly else [])
        for each in VARIANTS
    ],
)
def test_the_answers_are_torchs(
    answers: dict[str, dict[str, np.ndarray]], variant: Variant
) -> None:
    wanted = interpret(variant.plain, inputs(variant.plain), weights(variant.plain))
    found = answers[str(variant.final)]
    for name, want in wanted.items():
        assert found[name].shape == want.shape
        error = np.abs(found[name] - want).max() / np.abs(want).max()
        assert error <= BOUND, f"{name}: the error is {error:.3g}"


@pytest.mark.parametrize("variant", VARIANTS, ids=[each.name for each in VARIANTS])
def test_the_rewritten_program_means_the_same(variant: Variant) -> None:
    given, tensors = inputs(variant.plain), weights(variant.plain)
    wanted = interpret(variant.plain, given, tensors)
    found = interpret(variant.final, given, tensors)
    for name, want in wanted.items():
        np.testing.assert_allclose(found[name], want, 1e-6, 1e-7 * np.abs(want).max())


def test_the_variants_run_every_op_of_a_cpu() -> None:
    daily = [each.final for each in VARIANTS if not each.nightly]
    ran = {node.op for final in daily for node in final.nodes if not node.at_load}
    gpu = {"conv2d_chain", "layernorm_mlp", "stem_maxpool", "stem_layernorm"}
    assert ran == set(EMIT) - gpu
    assert set(OTHERS) <= ran


def test_every_op_that_is_no_weights_can_be_lowered() -> None:
    at_load = {"batch_norm_scale", "batch_norm_shift", "scale_filter"}
    assert set(EMIT) == set(OPS) - at_load


@pytest.mark.parametrize("off", [(), set(PASSES)])
def test_lowering_asks_for_the_weights_that_its_program_reads(off: Collection[str]) -> None:
    plain = TINY["cvt"]
    graph, parameters, final = lower(plain, {}, HERE, off=off, kernels=Unchecked())
    assert final == passes.run(plain, backend(HERE, "float32"), off)
    read = {value for node in final.nodes if not node.at_load for value in node.inputs}
    asked = read & final.constants
    zeros = set(parameters.bound) - asked
    assert asked <= set(parameters.bound)
    assert all(name.endswith(".bias") and name not in final.constants for name in zeros)
    assert [list(each.type.shape) for each in graph.inputs] == [[BATCH, 8, 10, 3]]
