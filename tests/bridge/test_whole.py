"""Whole models of three libraries inside torch, injected and compiled, beside eager torch.

They are small, but have all kinds of layers of their families; all ops of each are in one program.
timm's and torchvision's need ``script/bootstrap convert``, and are skipped where these are missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxvision
from maxvision.bridge import sources
from maxvision.common.errors import ModelError

BOUND = 1e-5
"""The largest error of float32, as a share of the largest value; or twice torch's own."""
PX = 64


def configured(kind: str, **config: Any) -> Callable[[], nn.Module]:
    """Makes one of transformers' classifiers of pictures."""

    def make() -> nn.Module:
        transformers = sources._library("transformers")
        made = transformers.AutoConfig.for_model(kind, **config)
        return transformers.AutoModelForImageClassification.from_config(made)

    return make


def named(source: str, size: int | None = None) -> Callable[[], nn.Module]:
    """Makes a model of timm or torchvision; ``size`` is for one that takes a single size."""

    def make() -> nn.Module:
        return sources.find(source, random=True, size=size).module

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm/resnet10t": named("timm/resnet10t"),
    "timm/mobilenetv3_small_050": named("timm/mobilenetv3_small_050"),
    "timm/test_vit": named("timm/test_vit", PX),
    "torchvision/squeezenet1_1": named("torchvision/squeezenet1_1"),
    "transformers/resnet": configured("resnet", depths=[1, 1], hidden_sizes=[64, 128]),
    "transformers/cvt": configured(
        "cvt", depth=[1, 2], embed_dim=[64, 192], num_heads=[1, 3], cls_token=[False, True],
        patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1],
    ),
    "transformers/vit": configured(
        "vit", image_size=PX, num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
        intermediate_size=128,
    ),
    "transformers/swin": configured(
        "swin", image_size=PX, window_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4]
    ),
    "transformers/convnext": configured(
        "convnext", hidden_sizes=[32, 64], depths=[1, 1], num_stages=2
    ),
    "transformers/mobilenet_v2": configured("mobilenet_v2", image_size=PX, depth_multiplier=0.35),
}  # fmt: skip


def logits(given: Any) -> Tensor:
    return given if isinstance(given, Tensor) else given.logits


def error(found: Tensor, exact: Tensor) -> float:
    """Gives the largest difference, as a share of the largest value."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def names(model: nn.Module, *kinds: type[nn.Module]) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, kinds)}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_runs_injected_and_compiled(name: str) -> None:
    """Compiles one graph."""
    torch.manual_seed(0)
    try:
        made = MODELS[name]()
    except ModelError as absent:
        pytest.skip(f"{name} IS NOT TESTED: {absent}")
    from tests.graphs.reference import randomise  # after sources made torchvision importable

    model: Any = randomise(made, seed=0)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    x = torch.randn(2, 3, PX, PX)
    with torch.no_grad():
        eager = logits(model(x))
        exact = logits(copy.deepcopy(model).double()(x.double()))
    assert exact.std(0).max() > 1e-4 * exact.abs().max()  # the pictures make a difference

    said = maxvision.explain(model, x)
    assert (len(said.parts), said.left, said.whole) == (1, [], [])
    assert {module for kind, module in said.ours if kind == "conv2d"} >= names(model, nn.Conv2d)
    assert {module for kind, module in said.ours if kind == "linear"} >= names(model, nn.Linear)

    report = maxvision.inject(model, validate=x)
    print(f"{name}\n{said}\n{report}")
    assert not report.left and not report.whole and report.programs == 1
    assert set(report.replaced["conv2d"]) >= names(model, nn.Conv2d)
    with torch.no_grad():
        injected = logits(model(x))
        report.undo()
        assert torch.equal(logits(model(x)), eager)
        compiled = logits(torch.compile(model, backend="maxvision")(x))
    errors = [error(each, exact) for each in (eager, injected, compiled)]
    print("errors: torch {:.1e}, injected {:.1e}, compiled {:.1e}".format(*errors))
    assert not torch.equal(compiled, eager)  # else torch ran it
    assert all(each <= max(BOUND, 2 * errors[0]) for each in errors)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
