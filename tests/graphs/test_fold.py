"""What is computed when a model loads: batch norms folded into convolutions, against torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from max.dtype import DType

from maxvision.common.errors import ModelError
from maxvision.graphs import passes
from maxvision.graphs.arrange import rounded
from maxvision.graphs.backend import Backend
from maxvision.graphs.constants import EVALUATE, Constants, halves
from maxvision.graphs.net import Net, Value
from maxvision.graphs.passes import fold
from maxvision.graphs.program import Program
from maxvision.graphs.types import BATCH
from maxvision.weights.checkpoint import check_norms
from maxvision.weights.layout import Stored

CPU = Backend("cpu", "float32")
PARTS = ("weight", "bias", "mean", "var")


class Tensors(Mapping[str, np.ndarray]):
    """Weights that note which of them were read."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.read: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def convnet(groups: int = 1, bias: bool = False, eps: float = 1e-5) -> Program:
    """Writes down a convolution of 6 channels and its batch norm, named as in a ResNet."""
    net = Net("convnet")
    x = net.input("x", (BATCH, 6, 9, 9))
    x = net.conv2d(x, "conv", 6, 3, groups=groups, bias=bias)
    net.output("y", net.batch_norm(x, "conv.batchnorm", eps))
    return net.program()


def drawn(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws every weight; variances are positive, and some are near zero."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.uniform(1e-4, 3.0, each.shape).astype(np.float32)
        if name.endswith(".var")
        else rng.standard_normal(each.shape).astype(np.float32)
        for name, each in program.weights.items()
    }


def filter_and_bias(program: Program) -> tuple[str, str]:
    """Names what the only convolution reads."""
    (conv,) = (node for node in program.nodes if node.op == "conv2d")
    _, filters, bias = conv.inputs
    return filters, bias


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_folding_equals_convolution_then_batch_norm(groups: int, bias: bool, eps: float) -> None:
    program = convnet(groups, bias, eps)
    tensors = drawn(program)
    exact = {name: torch.from_numpy(value).double() for name, value in tensors.items()}
    x = torch.randn(2, 6, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = F.conv2d(x, exact["conv.weight"], exact.get("conv.bias"), groups=groups)
    weight, shift, mean, var = (exact[f"conv.batchnorm.{part}"] for part in PARTS)
    expected = F.batch_norm(y, mean, var, weight, shift, eps=eps)

    folded = fold.batch_norm(program, CPU)
    assert [node.op for node in folded.nodes if not node.at_load] == ["conv2d"]
    constants = Constants(folded, tensors)
    filters, biases = (torch.from_numpy(constants[n]).double() for n in filter_and_bias(folded))
    assert filters.shape == (6, 6 // groups, 3, 3)
    computed = F.conv2d(x, filters, biases, groups=groups)
    scale = expected.abs().max()
    assert (computed - expected).abs().max() <= 1e-6 * scale  # the folded weights' own rounding


def test_folded_weights_are_rounded_once() -> None:
    program = convnet()
    tensors = drawn(program)
    constants = Constants(fold.batch_norm(program, CPU), tensors)
    filters, bias = filter_and_bias(fold.batch_norm(program, CPU))
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    weight, shift, mean, var = (wide[f"conv.batchnorm.{part}"] for part in PARTS)
    scale = weight / np.sqrt(var + 1e-5)
    exact = wide["conv.weight"] * scale[:, None, None, None]
    np.testing.assert_array_equal(constants[filters], exact.astype(np.float32))
    np.testing.assert_array_equal(constants[bias], (shift - mean * scale).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_folded_weights_are_float32_contiguous_and_their_own(dtype: type) -> None:
    program = convnet()
    tensors = {name: value.astype(dtype) for name, value in drawn(program).items()}
    folded = fold.batch_norm(program, CPU)
    constants = Constants(folded, tensors)
    for name in filter_and_bias(folded):
        value = constants[name]
        assert value.dtype == np.float32
        assert value.flags.c_contiguous
        assert value.shape == folded.types[name].shape
        assert folded.types[name].dtype == "float32"
        assert not any(np.shares_memory(value, stored) for stored in tensors.values())


def test_folding_keeps_zeros() -> None:
    program = convnet()
    tensors = drawn(program)
    tensors["conv.weight"][np.random.default_rng(1).random((6, 6, 3, 3)) < 0.7] = 0
    folded = fold.batch_norm(program, CPU)
    filters, _ = filter_and_bias(folded)
    zeros = Constants(folded, tensors)[filters] == 0
    assert np.array_equal(zeros, tensors["conv.weight"] == 0)


# --- what is folded ---------------------------------------------------------------------------


def test_weights_are_what_a_checkpoint_holds_folded_or_not() -> None:
    net = Net("convnet")
    x = net.input("x", (BATCH, 3, 32, 32))
    x = net.batch_norm(net.conv2d(x, "stem", 8, 7, bias=False), "stem.batchnorm")
    net.output("logits", net.linear(net.flatten(net.avg_pool2d(x)), "head", 5))
    program = net.program()
    shapes = {name: each.shape for name, each in program.weights.items()}
    assert shapes == {
        "stem.weight": (8, 3, 7, 7),
        **{f"stem.batchnorm.{part}": (8,) for part in PARTS},
        "head.weight": (5, 8),
        "head.bias": (5,),
    }
    folded = fold.batch_norm(program, CPU)
    assert folded.weights == program.weights
    assert folded.outputs == program.outputs
    (conv,) = (node for node in folded.nodes if node.op == "conv2d")
    assert conv.layers == ("stem",)
    assert Constants(folded, {}).layer_weight(conv) == "stem.weight"


def _norm_alone(net: Net, x: Value) -> Value:
    return net.batch_norm(net.relu(x), "norm")


def _read_twice(net: Net, x: Value) -> Value:
    y = net.conv2d(x, "conv", 6, 1, bias=False)
    return net.batch_norm(y, "norm") + y


def _norm_of_an_output(net: Net, x: Value) -> Value:
    y = net.conv2d(x, "conv", 6, 1, bias=False)
    net.output("features", y)
    return net.batch_norm(y, "norm")


@pytest.mark.parametrize("write", [_norm_alone, _read_twice, _norm_of_an_output])
def test_other_batch_norms_stay(write: object) -> None:
    net = Net("convnet")
    net.output("y", write(net, net.input("x", (BATCH, 6, 4, 4))))  # type: ignore[operator]
    program = net.program()
    assert fold.batch_norm(program, CPU) is program


def test_a_bias_of_the_name_that_folding_gives_stays_apart() -> None:
    """A convolution with a bias reads ``conv.bias`` to make another one."""
    program = convnet(bias=True)
    folded = fold.batch_norm(program, CPU)
    _, bias = filter_and_bias(folded)
    assert bias != "conv.bias" and "conv.bias" in folded.weights
    tensors = drawn(program)
    moved = Constants(folded, tensors | {"conv.bias": tensors["conv.bias"] + 1})
    assert not np.array_equal(moved[bias], Constants(folded, tensors)[bias])


def test_what_reads_weights_alone_runs_at_load() -> None:
    net = Net("tokens")
    x = net.input("x", (BATCH, 4, 6))
    table = net.permute(net.reshape(net.weight("table", 2, 12), 1, 6, 4), 0, 2, 1)
    token = net.expand(net.weight("token", 1, 1, 6), BATCH, 4, 6)  # of a size that is not known
    net.output("y", (x + net.expand(table, 1, 4, 6)) + token)
    program = fold.constants(net.program(), CPU)
    assert [node.op for node in program.nodes if node.at_load] == ["reshape", "permute", "expand"]
    assert [node.op for node in program.nodes if not node.at_load] == ["expand", "add", "add"]
    tensors = drawn(program)
    (folded,) = (node.output for node in program.nodes if node.op == "expand" and node.at_load)
    expected = tensors["table"].reshape(1, 6, 4).transpose(0, 2, 1)
    np.testing.assert_array_equal(Constants(program, tensors)[folded], expected)


def test_weights_are_padded_at_load() -> None:
    net = Net("padded")
    x = net.input("x", (BATCH, 5, 6))
    table = net.op("pad", [net.weight("table", 2, 6)], pads=(1, 2, 0, 0), value=-1.0)
    net.output("y", x + table)
    program = fold.constants(net.program(), CPU)
    (node,) = (node for node in program.nodes if node.at_load)
    tensors = drawn(program)
    expected = np.full((5, 6), -1, np.float32)
    expected[1:3] = tensors["table"]
    np.testing.assert_array_equal(Constants(program, tensors)[node.output], expected)


def test_every_op_at_load_is_known_to_the_program() -> None:
    from maxvision.graphs.shapes import OPS

    assert set(EVALUATE) <= set(OPS)


# --- norms that are part of linear layers -----------------------------------------------------


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def multiplied(weight: np.ndarray, norm: np.ndarray, to: str) -> np.ndarray:
    """Gives what ``norm_filter`` computes, and checks that it is float32."""
    found = np.asarray(EVALUATE["norm_filter"](weight, norm, to=to))
    assert found.dtype == np.float32 and found.shape == weight.shape
    return found


def bits(array: np.ndarray, to: str) -> np.ndarray:
    """Gives the bits of what a model loads in place of an array."""
    with np.errstate(over="ignore"):
        return np.asarray(rounded(array, DType[to])).view(np.uint16)


@pytest.mark.parametrize("stored", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("to", HALVES)
def test_a_norms_weight_is_multiplied_in_and_filters_add_up_to_0(to: str, stored: type) -> None:
    rng = np.random.default_rng(0)
    weight, norm = rng.standard_normal((70, 96)), rng.standard_normal(96)
    weight, norm = weight.astype(stored), norm.astype(stored)
    found = multiplied(weight, norm, to)
    # It is rounded already: what is loaded is what adds up to 0.
    np.testing.assert_array_equal(torch.from_numpy(found).to(HALVES[to]).float(), found)
    assert np.abs(found.sum(1, dtype=np.float64)).max() < 1e-6
    # Normalised rows see the same weights as before, but for their rounding.
    x = rng.standard_normal((50, 96))
    x -= x.mean(1, keepdims=True)
    exact = weight.astype(np.float64) * norm
    error = np.linalg.norm(x @ (found - exact).T)
    plain = torch.from_numpy(exact).to(HALVES[to]).double().numpy()
    assert error < 1.2 * np.linalg.norm(x @ (plain - exact).T)


@pytest.mark.parametrize("to", HALVES)
def test_halves_go_to_even_and_what_is_too_large_is_infinite(to: str) -> None:
    ulp, least, most = (float(getattr(torch.finfo(HALVES[to]), n)) for n in ("eps", "tiny", "max"))
    numbers = [1 + i * ulp / 2 for i in range(8)]  # every other one a half
    numbers += [0.0, -0.0, least, least / 2, most, most * (1 + ulp / 8), most * (1 + 0.3 * ulp)]
    numbers += [np.inf, 1 + ulp / 2 + 2**-23, 1 + ulp / 2 - 2**-23]
    row = np.array([*numbers, *(-x for x in numbers), np.nan], np.float32)
    with np.errstate(over="ignore"):
        found = halves(row, to)
    wanted = torch.from_numpy(row).to(HALVES[to]).float().numpy()
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[:-1]), np.signbit(wanted[:-1]))
    np.testing.assert_array_equal(bits(found[:-1], to), bits(row[:-1], to))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("to", HALVES)
def test_a_filter_with_a_weight_beyond_float32_is_nan_without_a_warning(to: str) -> None:
    weight = np.array([[1e30, -1e30, 1e30, np.inf], [1, 2, 3, 4]], np.float32)
    found = multiplied(weight, np.array([1e10, 1, 1, 1], np.float32), to)
    assert np.isnan(found[0]).all()
    assert np.isfinite(multiplied(weight[1:], np.ones(4, np.float32), to)).all()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("to", HALVES)
def test_a_norm_in_front_of_a_layer_is_in_its_weights(to: str, bias: bool) -> None:
    net = Net("layers")
    x = net.input("x", (BATCH, 5, 64), to)
    x = x + net.linear(net.relu(x), "before", 64)
    net.output("y", net.linear(net.layer_norm(x, "norm"), "behind", 24, bias=bias))
    program = passes.run(net.program(), Backend("cuda", to, architecture="sm_90a"))
    tensors, constants = drawn(program), Constants(program, drawn(program))
    (node,) = (node for node in program.nodes if node.op == "normed_linear")
    _, _, filters, shift = (constants.get(name) for name in node.inputs)
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    exact = EVALUATE["norm_filter"](wide["behind.weight"], wide["norm.weight"], to=to)
    np.testing.assert_array_equal(filters, exact)
    moved = wide["behind.weight"] @ wide["norm.bias"] + wide.get("behind.bias", 0)
    np.testing.assert_allclose(shift, moved, 1e-6, 1e-6)
    for name, value in zip(node.inputs[2:], (filters, shift), strict=True):
        assert value.dtype == np.float32 and value.shape == program.types[name].shape


# --- when it is computed ----------------------------------------------------------------------


def test_nothing_is_read_before_it_is_asked_for() -> None:
    program = convnet()
    tensors = Tensors(drawn(program))
    folded = passes.run(program, CPU, off=["channels_last"])
    constants = Constants(folded, tensors)
    assert set(constants) == folded.constants and len(constants) == len(folded.constants)
    assert tensors.read == []
    filters, bias = filter_and_bias(folded)
    first = constants[bias]
    assert sorted(tensors.read) == [f"conv.batchnorm.{part}" for part in sorted(PARTS)]
    tensors.read.clear()
    second = constants[filters]
    assert sorted(tensors.read) == ["conv.batchnorm.var", "conv.batchnorm.weight", "conv.weight"]
    tensors.read.clear()
    assert constants[filters] is not second and constants[bias] is not first  # nothing is kept
    assert tensors.read.count("conv.weight") == 1


def test_a_value_that_runs_with_the_images_is_no_constant() -> None:
    folded = fold.batch_norm(convnet(), CPU)
    constants = Constants(folded, drawn(folded))
    assert folded.outputs["y"] not in set(constants)
    for name in (folded.outputs["y"], "nothing"):
        with pytest.raises(KeyError):
            constants[name]


# --- what gives no numbers --------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_negative_variance_gives_nan_without_a_warning() -> None:
    program = convnet()
    tensors = drawn(program)
    tensors["conv.batchnorm.var"][2] = -1
    folded = fold.batch_norm(program, CPU)
    for name in filter_and_bias(folded):
        value = Constants(folded, tensors)[name]
        assert np.isnan(value[2]).all()
        assert np.isfinite(np.delete(value, 2, axis=0)).all()


@pytest.mark.filterwarnings("error")
def test_a_filter_beyond_float32_gives_infinity_without_a_warning() -> None:
    program = convnet()
    tensors = drawn(program)
    tensors["conv.weight"][1, 2, 0, 0] = -1e38
    tensors["conv.batchnorm.weight"][1] = 1e3
    folded = fold.batch_norm(program, CPU)
    filters, _ = filter_and_bias(folded)
    value = Constants(folded, tensors)[filters]
    assert value[1, 2, 0, 0] == -np.inf
    assert np.isinf(value).sum() == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("part", "value"),
    [("batchnorm.var", -1.0), ("weight", 1e38), ("weight", -1e38), ("batchnorm.bias", np.inf)],
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_what_folds_to_no_number_is_told(part: str, value: float, bias: bool) -> None:
    program = convnet(bias=bias)
    tensors = drawn(program)
    tensors["conv.batchnorm.weight"][:] = 100
    check_norms(program, Stored(tensors, nullcontext), "net")
    tensors[f"conv.{part}"].reshape(-1)[3] = value
    with pytest.raises(ModelError, match=r"^net: .* the batch norm of conv gives NaN or inf"):
        check_norms(program, Stored(tensors, nullcontext), "net")


def test_a_batch_norm_that_stays_is_checked_too() -> None:
    net = Net("convnet")
    net.output("y", net.batch_norm(net.relu(net.input("x", (BATCH, 6, 4, 4))), "norm"))
    program = net.program()
    tensors = drawn(program)
    check_norms(program, Stored(tensors), "net")
    tensors["norm.var"][0] = -1
    with pytest.raises(ModelError, match=r"the batch norm of norm gives NaN"):
        check_norms(program, Stored(tensors), "net")


def test_the_filter_itself_is_not_folded_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    program = convnet()

    def fails(*_: object) -> np.ndarray:
        raise AssertionError("a filter was folded")

    monkeypatch.setitem(EVALUATE, "scale_filter", fails)
    check_norms(program, Stored(drawn(program)), "net")


def test_what_is_replaced_keeps_where_it_came_from() -> None:
    program = convnet()
    marked = replace(
        program, nodes=tuple(replace(node, origin="net.py:7") for node in program.nodes)
    )
    folded = fold.batch_norm(marked, CPU)
    assert {node.origin for node in folded.nodes} == {"net.py:7"}
