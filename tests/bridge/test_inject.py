"""Injection: the model stays what it is, its ops change hands, and an error undoes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import maxvision
from maxvision.bridge import parts
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs.program import Program
from tests.bridge.test_dynamo import Net, images, ordered
from tests.graphs.interpret import Interpreted


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ops() -> list[str]:
    """Names what the programs compute; moves are left out."""
    nodes = (node for each in Interpreted.made for node in each.program.nodes)
    return sorted(node.op for node in nodes if node.op not in ("permute", "reshape"))


def test_a_model_stays_what_it_is_and_can_be_had_back() -> None:
    model, x = Net(ordered).eval(), images(2)
    before, wanted = copy.deepcopy(model.state_dict()), model(x)
    report = maxvision.inject(model, validate=x)
    assert isinstance(report, maxvision.Injection)
    assert ops() == ["batch_norm", "conv2d", "layer_norm", "linear", "mean", "relu"]
    assert report.replaced == {
        "conv2d": ["stem.0"], "batch_norm": ["stem.1"], "relu": [""], "layer_norm": ["norm"],
        "mean": [""], "linear": ["head"],
    }  # fmt: skip
    assert report.left == {("aten.sort.default", "there is no such op here"): 1}
    assert report.programs == 2 and not report.whole
    assert 0 < report.error < 1e-5 < report.rtol and report.before > 0 < report.after
    said = str(report)
    assert said.startswith("6 ops replaced, in 2 programs\n  batch_norm 1 (stem.1)\n")
    assert "\n1 op in torch:\n  aten.sort.default 1: there is no such op here\n" in said

    assert type(model) is Net and list(model.state_dict()) == list(before)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    calls: list[Any] = []
    for each in Interpreted.made:
        each.execute = lambda *given, run=each.execute: calls.append(0) or run(*given)  # type: ignore
    with torch.no_grad():
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
        assert len(calls) == 2
        copy.deepcopy(model)(x)
        report.undo()
        assert torch.equal(model(x), wanted) and len(calls) == 2


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("conv2d",), ["conv2d"]),
        (("batch_norm", "conv2d", "linear"), ["batch_norm", "conv2d", "linear"]),
        (("layer_norm", "softmax"), ["layer_norm"]),  # without a layer beside it
        (("bmm",), []),
    ],
)
def test_only_what_is_asked_for_is_replaced(asked: tuple[str, ...], found: list[str]) -> None:
    model, x = Net().eval(), images(2)
    report = maxvision.inject(model, asked, validate=(x,))
    assert ops() == found == sorted(report.replaced)
    left = {op for op, why in report.left if why == "it is not among the ops asked for"}
    assert "aten.relu.default" in left
    assert (model._compiled_call_impl is None) == (not found)  # else calls cost more for nothing


def test_an_injected_model_is_trained() -> None:
    model, x = Net().eval(), images(2)
    twin = copy.deepcopy(model).train()
    maxvision.inject(model, ("conv2d", "linear"), validate=x)
    Interpreted.made.clear()
    model.train()
    model(x).square().sum().backward()
    assert {"conv2d", "conv2d_weight_grad", "matmul"} <= set(ops())
    assert {"rsqrt", "mean", "relu"}.isdisjoint(ops())  # norms are torch's
    twin(x).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert model.stem[1].num_batches_tracked == 1


def test_an_error_beyond_the_bound_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0

    def wrong(program: Program, tensors: Mapping[str, np.ndarray], *_: Any, **__: Any) -> Any:
        return Interpreted(program, {name: each * scale for name, each in tensors.items()})

    monkeypatch.setattr(parts.Executor, "compile", wrong)
    model, x = Net().eval(), images(2)
    for scale in (1.01, float("nan")):  # noqa: B007, which ``wrong`` reads
        torch._dynamo.reset()
        with pytest.raises(ModelError, match=r"outputs differ by .*, more than rtol 1e-03; the mo"):
            maxvision.inject(model, validate=x)
        assert model._compiled_call_impl is None
    scale = 1.01
    torch._dynamo.reset()
    assert 1e-3 < maxvision.inject(model, validate=x, rtol=0.5).error < 0.5


def test_what_is_not_to_be_injected_is_told() -> None:
    model, x = Net().eval(), images(2)
    with pytest.raises(ArgumentError, match=r"there is no op 'conv2'; did you mean conv2d\?"):
        maxvision.inject(model, ("conv2",), validate=x)
    with pytest.raises(ArgumentError, match="the model is a str; give a torch module"):
        maxvision.inject("resnet50", validate=x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"call model.eval\(\) first"):
        maxvision.inject(model.train(), validate=x)
    with pytest.raises(ModelError, match="the model gives none"):
        maxvision.inject(nn.Module.eval(Labels()), validate=x)


class Labels(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).argmax(1)
