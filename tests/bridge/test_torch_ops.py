"""Our kernels as ops of torch: equal to torch both ways, sound for its compilers, clear in errors.

Programs are interpreted, but for a few tests at the end. Gradients are compared with those of the
same function in float64, and checked by torch's gradcheck.
"""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import maxvision
from maxvision import torch_ops
from maxvision.bridge import parts, refusal
from maxvision.common.errors import ArgumentError, ModelError
from tests.graphs.interpret import Interpreted


def n(*shape: int) -> Tensor:
    return torch.randn(*shape)


def scaled(*shape: int) -> Tensor:
    """Draws weights of which products keep their scale."""
    return torch.randn(*shape) / math.sqrt(math.prod(shape[1:]))


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) + 0.5


def drawn(*shape: int) -> Tensor:
    return torch_ops.kept(shape, 0.3, torch.empty(0))


def conv_bn_relu(training: bool) -> dict[str, Any]:
    made = {"x": n(3, 4, 6, 6), "weight": scaled(5, 4, 3, 3), "padding": 1, "training": training}
    norm = {"norm_weight": n(5), "norm_bias": n(5)}
    return {**made, **norm, "running_mean": n(5), "running_var": positive(5)}


CASES: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "conv2d": [
        lambda: {"x": n(3, 4, 7, 6), "weight": scaled(6, 4, 3, 3), "bias": n(6), "padding": 1},
        lambda: {
            "x": n(2, 4, 9, 8).to(memory_format=torch.channels_last),
            "weight": scaled(6, 2, 3, 3),
            "residual": n(2, 6, 4, 3),
            "stride": 2,
            "groups": 2,
            "activation": "relu",
        },
        lambda: {
            "x": n(2, 4, 9, 9),
            "weight": scaled(5, 4, 3, 2),
            "stride": (2, 1),
            "padding": (1, 0),
            "dilation": (1, 2),
            "activation": "silu",
        },
    ],
    "linear": [
        lambda: {"x": n(4, 5, 8), "weight": scaled(6, 8), "bias": n(6), "activation": "gelu"},
        lambda: {"x": n(1, 8), "weight": scaled(6, 8), "activation": "tanh"},
        lambda: {"x": n(6, 4).t(), "weight": scaled(3, 6), "bias": n(3)},
    ],
    "gemm": [
        lambda: {"a": n(5, 4), "b": n(4, 3), "c": n(5, 3), "alpha": 0.5, "beta": -2.0},
        lambda: {"a": n(4, 5), "b": n(3, 4), "transpose_a": True, "transpose_b": True},
    ],
    "gemm_batched": [
        lambda: {
            "a": n(2, 5, 4),
            "b": n(2, 3, 4),
            "c": n(2, 5, 3),
            "alpha": 2.0,
            "transpose_b": True,
        },
    ],
    "bmm": [lambda: {"a": n(3, 5, 4), "b": n(3, 4, 6)}],
    "softmax": [lambda: {"x": n(3, 5, 4)}, lambda: {"x": n(3, 5, 4), "axis": 1}],
    "log_softmax": [lambda: {"x": n(3, 5)}],
    "layer_norm": [
        lambda: {"x": n(3, 5, 8), "weight": n(8), "bias": n(8)},
        lambda: {"x": n(2, 3, 4), "weight": n(3, 4), "activation": "silu"},
    ],
    "layer_norm_relu": [lambda: {"x": n(3, 8), "weight": n(8), "bias": n(8)}],
    "layer_norm_gelu": [lambda: {"x": n(3, 8), "weight": n(8), "bias": n(8)}],
    "rms_norm": [lambda: {"x": n(3, 5, 8), "weight": n(8)}],
    "rms_norm_gelu": [lambda: {"x": n(3, 8), "weight": n(8)}],
    "batch_norm": [
        lambda: {
            "x": n(4, 3, 5, 4),
            "weight": n(3),
            "bias": n(3),
            "running_mean": n(3),
            "running_var": positive(3),
            "training": True,
        },
        lambda: {
            "x": n(4, 3),
            "weight": n(3),
            "bias": n(3),
            "running_mean": n(3),
            "running_var": positive(3),
        },
    ],
    "conv_bn_relu": [lambda: conv_bn_relu(False), lambda: conv_bn_relu(True)],
    "max_pool2d": [lambda: {"x": n(2, 3, 9, 8), "kernel": 3, "stride": 2, "padding": 1}],
    "avg_pool2d": [
        lambda: {
            "x": n(2, 3, 9, 8),
            "kernel": 3,
            "stride": 2,
            "padding": 1,
            "count_include_pad": False,
        }
    ],
    "relu": [lambda: {"x": n(3, 5)}],
    "gelu": [lambda: {"x": n(3, 5)}, lambda: {"x": n(3, 5), "approximate": "tanh"}],
    "add_relu": [lambda: {"x": n(3, 5), "y": n(3, 5)}],
    "mul_relu": [lambda: {"x": n(3, 5), "y": n(3, 5)}],
    "mul_tanh": [lambda: {"x": n(3, 5), "y": n(3, 5)}],
    "add_sigmoid": [lambda: {"x": n(3, 5), "y": n(3, 5)}],
    "bias_gelu": [lambda: {"x": n(3, 5), "bias": n(5)}],
    "swish_multiply": [lambda: {"x": n(3, 5), "gate": n(3, 5)}],
    "mish_scale": [lambda: {"x": n(3, 5), "scale": n(5)}],
    "prelu_bias": [lambda: {"x": n(3, 5), "bias": n(5), "slope": n(5)}],
    "sum_squared": [lambda: {"x": n(3, 5)}],
    "mean_abs": [lambda: {"x": n(3, 5)}],
    "cross_entropy": [
        lambda: {"x": n(4, 5), "target": torch.tensor([1, 0, 4, 2])},
        lambda: {
            "x": n(4, 5),
            "target": torch.tensor([1, 0, 4, 2]),
            "reduction": "none",
            "label_smoothing": 0.1,
        },
    ],
    "mse": [
        lambda: {"x": n(4, 5), "target": n(4, 5)},
        lambda: {"x": n(4, 5), "target": n(4, 5), "reduction": "sum"},
    ],
    "attention": [
        lambda: {"q": n(2, 3, 5, 4), "k": n(2, 3, 5, 4), "v": n(2, 3, 5, 4), "causal": True},
        lambda: {
            "q": n(2, 3, 5, 4),
            "k": n(2, 3, 6, 4),
            "v": n(2, 3, 6, 4),
            "mask": n(1, 1, 5, 6),
            "scale": 0.3,
        },
        lambda: {
            "q": n(2, 3, 5, 4),
            "k": n(2, 3, 6, 4),
            "v": n(2, 3, 6, 4),
            "mask": torch.arange(5)[:, None] > torch.arange(6),  # the first query sees no key
        },
    ],
    "block_sparse_attention": [
        lambda: {
            "q": n(2, 3, 6, 4),
            "k": n(2, 3, 8, 4),
            "v": n(2, 3, 8, 4),
            "blocks": torch.tensor([[True, False], [False, False], [True, True]]),
        },
        lambda: {
            "q": n(2, 3, 6, 4),
            "k": n(2, 3, 8, 4),
            "v": n(2, 3, 8, 5),
            "blocks": torch.rand(3, 2, 4) > 0.5,
            "scale": 0.3,
        },
    ],
    "attention_score": [lambda: {"q": n(2, 3, 5, 4), "k": n(2, 3, 6, 4)}],
    "multi_head_attention": [
        lambda: {
            "x": n(2, 5, 8),
            "in_weight": scaled(24, 8),
            "in_bias": n(24),
            "out_weight": scaled(8, 8),
            "out_bias": n(8),
            "heads": 2,
        },
    ],
    "ffn_block": [
        lambda: {
            "x": n(2, 5, 8),
            "weight1": scaled(12, 8),
            "bias1": n(12),
            "weight2": scaled(8, 12),
            "bias2": n(8),
        },
    ],
    "transformer_layer": [
        lambda: {
            "x": n(2, 5, 8),
            "norm1_weight": n(8),
            "norm1_bias": n(8),
            "in_weight": scaled(24, 8),
            "in_bias": n(24),
            "out_weight": scaled(8, 8),
            "out_bias": n(8),
            "norm2_weight": n(8),
            "norm2_bias": n(8),
            "weight1": scaled(16, 8),
            "bias1": n(16),
            "weight2": scaled(8, 16),
            "bias2": n(8),
            "heads": 2,
            "causal": True,
        },
    ],
    "embedding_position": [
        lambda: {
            "tokens": torch.tensor([[1, 0, 6], [6, 6, 2]]),
            "table": n(7, 4),
            "position": n(5, 4),
        },
    ],
    "rotary_attention": [
        lambda: {
            "q": n(2, 3, 5, 4),
            "k": n(2, 3, 5, 4),
            "v": n(2, 3, 5, 4),
            "cos": n(5, 4),
            "sin": n(5, 4),
        },
    ],
    "depthwise_pointwise": [
        lambda: {
            "x": n(2, 4, 7, 6),
            "depthwise": scaled(4, 1, 3, 3),
            "pointwise": scaled(6, 4, 1, 1),
            "bias": n(6),
            "padding": 1,
            "activation": "relu",
        },
    ],
    "grouped_conv_norm": [
        lambda: {
            "x": n(2, 4, 7, 6),
            "weight": scaled(6, 2, 3, 3),
            "norm_weight": n(6),
            "norm_bias": n(6),
            "groups": 2,
            "norm_groups": 3,
        },
    ],
    "gelu_dropout": [lambda: {"x": n(3, 5), "keep": drawn(3, 5), "p": 0.3}],
    "attention_dropout": [
        lambda: {
            "q": n(2, 3, 5, 4),
            "k": n(2, 3, 5, 4),
            "v": n(2, 3, 5, 4),
            "keep": drawn(2, 3, 5, 5),
            "p": 0.3,
        },
    ],
    "conv_gelu_dropout": [
        lambda: {
            "x": n(2, 4, 5, 5),
            "weight": scaled(6, 4, 3, 3),
            "bias": n(6),
            "keep": drawn(2, 6, 3, 3),
            "p": 0.3,
        },
    ],
}
ALL = [(name, i) for name, cases in CASES.items() for i in range(len(cases))]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    for each in torch_ops.TABLE.values():
        for held in ("made", "ready"):
            monkeypatch.setattr(each, held, {})
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def both(function: Callable[..., Any], given: Mapping[str, Any], dtype: torch.dtype) -> list[Any]:
    """Computes outputs and gradients in a dtype; the slopes of the outputs are drawn by a seed."""
    cast = {
        name: x.detach().to(dtype).requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }  # fmt: skip
    found = function(**cast)
    several = [*found] if isinstance(found, tuple) else [found]
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(y.shape, generator=generator).to(dtype) for y in several]
    asked = [
        x for name, x in cast.items()
        if isinstance(x, Tensor) and x.requires_grad and not name.startswith("running")
    ]  # fmt: skip
    kept = several[:1]  # of a norm, the running statistics are no function of the weights
    return [*several, *torch.autograd.grad(kept, asked, slopes[:1])]


def reference(name: str, given: Mapping[str, Any]) -> Callable[..., Any]:
    op = torch_ops.TABLE[name]
    return lambda **cast: op.means(*op.bound((), cast).values())


def twice(name: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """Gives a case with twice as many images; None where no program takes any batch."""
    found = dict(given)
    for each in torch_ops.TABLE[name].batch:
        if (x := given.get(each)) is not None:
            found[each] = torch.cat([x, x.flip(0)])
            if len(x) == 1 or max(x.stride()) != x.stride(0):
                return None
    return None if given.get("transpose_a") else found


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "case"), ALL)
def test_values_and_gradients_are_torchs(name: str, case: int) -> None:
    given = CASES[name][case]()
    equals_torch(name, given)
    made = len(Interpreted.made)
    assert made
    if more := twice(name, given):
        equals_torch(name, more)
        assert len(Interpreted.made) == made, "another batch was compiled anew"


def equals_torch(name: str, given: dict[str, Any]) -> None:
    wanted = both(reference(name, given), given, torch.float64)
    torchs = both(reference(name, given), given, torch.float32)
    found = both(torch_ops.TABLE[name], given, torch.float32)
    for ours, theirs, exact in zip(found, torchs, wanted, strict=True):
        assert ours.dtype == torch.float32 and ours.shape == exact.shape
        bound = 2 * (theirs - exact).abs().max() + 1e-6 * exact.abs().max() + 1e-7
        assert (ours - exact).abs().max() <= bound


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_sixteen_bits_err_no_more_than_twice_as_far_as_torch(name: str) -> None:
    given = CASES[name][0]()
    given = {
        key: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in given.items()
    }
    wanted = both(reference(name, given), given, torch.float64)
    torchs = both(reference(name, given), given, torch.bfloat16)
    found = both(torch_ops.TABLE[name], given, torch.bfloat16)
    for ours, theirs, exact in zip(found, torchs, wanted, strict=True):
        assert ours.dtype == torch.bfloat16 and ours.shape == exact.shape
        bound = 2 * (theirs - exact).abs().max() + 2**-8 * exact.abs().max()
        assert (ours - exact).abs().max() <= bound


def passes_gradcheck(name: str, given: Mapping[str, Any], **settings: bool) -> None:
    """Checks the gradients of an op's first result in float64 by differences."""
    cast = {
        key: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in given.items()
    }  # fmt: skip
    asked = [
        key for key, x in cast.items()
        if isinstance(x, Tensor) and x.is_floating_point() and not key.startswith("running")
    ]  # fmt: skip

    def first(*tensors: Tensor) -> Tensor:
        found = torch_ops.TABLE[name](**{**cast, **dict(zip(asked, tensors, strict=True))})
        return found[0] if isinstance(found, tuple) else found

    inputs = [cast[key].requires_grad_() for key in asked]
    assert torch.autograd.gradcheck(first, inputs, fast_mode=True, **settings)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "case"), ALL)
def test_gradcheck(name: str, case: int) -> None:
    passes_gradcheck(name, CASES[name][case]())
    assert {x.dtype for made in Interpreted.made for x in made.program.inputs.values()} <= {
        "float64", "int64", "bool"
    }  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    op = torch_ops.TABLE[name]
    given = op.bound((), CASES[name][0]())
    args = tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in given.values()
    )
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.forward, args, test_utils=utils)
    plain = [x.detach() if isinstance(x, Tensor) else x for x in args]
    with torch.no_grad():
        made = op.means(*plain)
    slopes = [torch.randn_like(y) for y in (made if isinstance(made, tuple) else (made,))]
    wanted = [isinstance(given[key], Tensor) and given[key].requires_grad for key in op.tensors]
    torch.library.opcheck(
        op.backward, (slopes, wanted, *plain), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "case"), ALL)
def test_opcheck_with_sizes_that_change(name: str, case: int) -> None:
    """All that torch checks: it compiles both ways with symbols in the place of sizes, too."""
    op = torch_ops.TABLE[name]
    args = tuple(
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point()
        and not key.startswith("running") else x
        for key, x in op.bound((), CASES[name][case]()).items()
    )  # fmt: skip
    found = torch.library.opcheck(op.forward, args)
    assert set(found.values()) == {"SUCCESS"} and "test_aot_dispatch_dynamic" in found


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(torch_ops.TABLE)


@pytest.mark.usefixtures("interpreted")
def test_forward_is_compiled_once_for_all_batches() -> None:
    weight = n(6, 8)
    for batch in (2, 3, 7):
        x = n(batch, 5, 8)
        torch.testing.assert_close(torch_ops.linear(x, weight), F.linear(x, weight))
    (made,) = Interpreted.made
    assert made.program.inputs["given.arg0_1"].shape == ("batch", 5, 8)
    torch_ops.linear(n(1, 5, 8), weight)
    torch_ops.softmax(n(4, 3), 0)  # across the batch
    shapes = [each.program.inputs["given.arg0_1"].shape for each in Interpreted.made[1:]]
    assert shapes == [(1, 5, 8), (4, 3)]


@pytest.mark.usefixtures("interpreted")
def test_gradients_that_nobody_wants_are_not_computed() -> None:
    x, weight = n(3, 8), n(6, 8).requires_grad_()
    torch_ops.linear(x, weight).sum().backward()
    assert weight.grad is not None and len(Interpreted.made[-1].program.outputs) == 1
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 8))


@pytest.mark.parametrize("name", ["conv2d", "layer_norm", "softmax"])
def test_gradients_of_a_gpu_are_traced_on_a_cpu(name: str) -> None:
    """The thread that differentiates a GPU's tensors waits meanwhile, and cannot do so here."""
    op = torch_ops.TABLE[name]
    named = op.bound((), CASES[name][0]())
    wanted = [isinstance(named[each], Tensor) for each in op.tensors]
    result = op.meant(list(named.values()))
    with FakeTensorMode():
        dy, *args = (
            torch.empty_strided(x.shape, x.stride(), device="cuda") if isinstance(x, Tensor) else x
            for x in (result, *named.values())
        )

    def computed(whole: list[Any]) -> Any:
        return op.gradients(whole[:1], wanted, whole[1:])

    graph = torch_ops._traced(computed, [dy, *args], [False] * (1 + len(args)))
    values = [node.meta.get("val") for node in graph.graph.nodes]
    assert {x.device.type for x in values if isinstance(x, Tensor)} == {"cpu"}


@pytest.mark.usefixtures("interpreted")
def test_statistics_of_a_batch_norm_go_on() -> None:
    torch.manual_seed(0)
    ours, theirs = torch_ops.BatchNorm2d(3), nn.BatchNorm2d(3)
    for _ in range(2):
        x = n(4, 3, 5, 5)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)
    assert ours.uses_maxvision


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_ops_whole(dynamic: bool) -> None:
    weight, scale = n(6, 8).requires_grad_(), n(6).requires_grad_()

    def net(x: Tensor) -> Tensor:
        y = torch_ops.linear(x, weight, activation="relu")
        return torch_ops.layer_norm(y, scale).sin().sum()

    fast = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (3, 4):
        x = n(batch, 8)
        wanted = torch.autograd.grad(net(x), [weight, scale])
        torch.testing.assert_close(torch.autograd.grad(fast(x), [weight, scale]), wanted)


@pytest.mark.usefixtures("interpreted")
def test_modules_have_torchs_weights_and_values() -> None:
    def net(of: Any) -> nn.Sequential:
        return nn.Sequential(
            of.Conv2d(3, 4, 3, 2, 1), of.BatchNorm2d(4), of.ReLU(), of.MaxPool2d(2), nn.Flatten(2),
            of.LayerNorm(4), of.GELU(), of.Linear(4, 5), of.Softmax(-1),
        )  # fmt: skip

    ours, theirs = net(torch_ops), net(nn)
    ours.load_state_dict(theirs.state_dict())
    x = n(2, 3, 8, 8)
    wanted, found = theirs(x), ours(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    names = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for (_, one), other in names:
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert all(each.uses_maxvision for each in ours if not isinstance(each, nn.Flatten))


def test_a_module_that_torch_has_to_run_warns_once() -> None:
    layer = torch_ops.Linear(4, 3, dtype=torch.complex64)
    x = n(2, 4).to(torch.complex64)
    with pytest.warns(UserWarning, match="Linear is left to torch: a tensor is complex64, and it"):
        y = layer(x)
    assert y.equal(F.linear(x, layer.weight, layer.bias)) and not layer.uses_maxvision
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
    padded = torch_ops.Conv2d(3, 4, 3, padding="same")
    with pytest.warns(UserWarning, match="there is no padding 'same' of zeros"):
        assert padded(n(1, 3, 5, 5)).shape == (1, 4, 5, 5)


@pytest.mark.usefixtures("interpreted")
def test_autocast_decides_the_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = torch_ops.linear(n(3, 8), n(6, 8).requires_grad_())
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert torch_ops.relu(n(3, 8).double()).dtype == torch.float64


@pytest.mark.usefixtures("interpreted")
def test_mistakes_are_told_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="a tensor is complex64, and it computes in"):
        torch_ops.relu(n(2, 3).to(torch.complex64))
    with pytest.raises(TypeError, match="is float64 and another float32; make all float64"):
        torch_ops.linear(n(2, 3).double(), n(4, 3))
    why = torch_ops.refusal(torch.empty(2, 3, dtype=torch.float64, device="meta"))  # as a GPU's
    assert why == "a tensor is float64, which only a CPU computes in; call float() or cpu()"
    why = torch_ops.refusal(n(2, 3), torch.empty(4, 3, device="meta"))
    assert why == "its tensors are on cpu and meta; move them to one device"
    with pytest.raises(TypeError, match=r"relu: a tensor is int64, and .*; call float\(\)"):
        torch_ops.relu(torch.arange(4))
    with pytest.raises(TypeError, match="is bfloat16 and another float32, which are multiplied"):
        torch_ops.linear(n(2, 3).bfloat16(), n(4, 3))
    with pytest.raises(TypeError, match=r"torch_ops\.relu: x is a ndarray; give a tensor of to"):
        torch_ops.relu(n(2, 3).numpy())
    with pytest.raises(TypeError, match=r"is sparse_coo, and it computes on dense .*to_dense\(\)"):
        torch_ops.relu(n(2, 3).to_sparse())
    with pytest.raises(ArgumentError, match=r"torch_ops\.softmax: there is no axis 2 of 2"):
        torch_ops.softmax(n(2, 3), 2)
    with pytest.raises(ArgumentError, match=r"target is torch\.float32; give the numbers of cl"):
        torch_ops.cross_entropy(n(2, 3), n(2))
    assert torch_ops.relu(torch.empty(2, 3, device="meta")).shape == (2, 3)  # as ops of torch
    with pytest.raises(ArgumentError, match=r"torch_ops\.linear: .*\[2, 3\] X \[5, 4\]"):
        torch_ops.linear(n(2, 3), n(4, 5))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    with pytest.raises(ArgumentError, match="activation 'swish' is none of none, relu"):
        torch_ops.linear(n(2, 3), n(4, 3), activation="swish")
    with pytest.raises(ArgumentError, match="reduction 'max' is none of none, mean, sum"):
        torch_ops.mse(n(2, 3), n(2, 3), reduction="max")


def test_without_max_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "without_max", lambda: "MAX is not installed")
    with pytest.raises(ModelError, match=r"torch_ops\.relu: MAX is not installed"):
        torch_ops.relu(n(2, 3))


@pytest.mark.parametrize(
    ("package", "name"), [("torch", "torch_ops"), ("torch", "inject"), ("max", "explain")]
)
def test_the_api_says_which_package_is_missing(package: str, name: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import maxvision\n"
        f"try: maxvision.{name}\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = f"maxvision.{name} needs the package {package}, which this Python does not have; "
    assert done.stdout.startswith(wanted), done.stderr


def test_the_api_names_them() -> None:
    assert maxvision.torch_ops is torch_ops


def test_they_run_on_our_kernels() -> None:
    """Compiles two graphs: a layer forward, and its gradients, each for any batch."""
    torch.manual_seed(0)
    weight, bias = n(6, 8).requires_grad_(), n(6).requires_grad_()
    torch_ops.linear.made.clear()
    torch_ops.linear.ready.clear()
    for batch in (3, 5):
        x, slope = n(batch, 4, 8).requires_grad_(), n(batch, 4, 6)
        y = torch_ops.linear(x, weight, bias, activation="relu")
        wanted = F.linear(x, weight, bias).relu()
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(y, [x, weight, bias], slope)
        wants = torch.autograd.grad(wanted, [x, weight, bias], slope)
        torch.testing.assert_close(found, wants, rtol=1e-5, atol=1e-5)
        assert len(torch_ops.linear.made) == 2
