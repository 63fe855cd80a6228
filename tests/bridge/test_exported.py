"""What tracing gives besides numbers: names, origins, inputs, outputs, and what is missing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maxvision.bridge.convert import missing_error
from maxvision.bridge.exported import Traced, trace
from maxvision.common.errors import ArgumentError, ModelError
from maxvision.graphs.program import Program
from maxvision.graphs.types import BATCH
from tests.graphs.interpret import interpret

IMAGES = torch.randn(2, 3, 8, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.stem(x) * self.scale).mean((2, 3)))


def program(traced: Traced) -> Program:
    assert traced.program is not None, traced.missing
    return traced.program


def test_weights_and_layers_have_the_names_of_the_module() -> None:
    module = Net()
    traced = trace(module, (IMAGES,))
    found = program(traced)
    counters = {name for name in module.state_dict() if name.endswith("num_batches_tracked")}
    assert set(found.weights) == set(module.state_dict()) - counters
    assert set(traced.tensors) == set(found.weights)
    layers = [(node.op, *node.layers) for node in found.nodes if node.layers]
    assert layers == [("conv2d", "stem.0"), ("batch_norm", "stem.1"), ("linear", "head")]
    for name, tensor in traced.tensors.items():
        np.testing.assert_array_equal(tensor, module.state_dict()[name].numpy())
    assert found.name == "Net" and list(found.inputs) == ["x"]
    assert found.inputs["x"].shape == (BATCH, 3, 8, 6)


def test_every_op_says_which_line_it_is_from() -> None:
    found = program(trace(Net(), (IMAGES,)))
    origins = {node.op: node.origin for node in found.nodes}
    assert re.fullmatch(r"stem\.0 \(conv\.py:\d+\)", origins["conv2d"])
    line = Net.forward.__code__.co_firstlineno + 1
    assert origins["mul"] == f"test_exported.py:{line}"


def test_points_are_the_ends_of_modules() -> None:
    traced = trace(Net(), (IMAGES,))
    found = program(traced)
    assert traced.points["stem"] == found.producers[traced.points["stem.2"]].output
    assert traced.points["head"] == found.outputs["logits"]


def test_weights_that_are_shared_are_there_once_and_computed_ones_are_constants() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = self.a
            self.register_buffer("table", torch.arange(6.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.table.exp() + torch.arange(6.0).exp()

    traced = trace(Shared(), (IMAGES,))
    found = program(traced)
    linears = [node for node in found.nodes if node.op == "linear"]
    assert linears[0].inputs[1:] == linears[1].inputs[1:]
    made = [name for name in found.weights if name.startswith("constants.")]
    assert len(made) == 1, "equal constants are one"
    np.testing.assert_allclose(traced.tensors[made[0]], np.exp(np.arange(6.0)), 1e-6)


class Several(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, image: Tensor, weights: Tensor) -> Any:
        both = (image * weights[:, :, None, None]).sum((2, 3)), weights * 2
        if self.how == "dict":
            return {"scores": both[0], "inner": {"doubled": both[1]}}
        return both if self.how == "tuple" else both[0]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("one", ["logits"]),
        ("tuple", ["output_0", "output_1"]),
        ("dict", ["scores", "inner.doubled"]),
    ],
)
def test_several_inputs_and_outputs(how: str, names: list[str]) -> None:
    traced = trace(Several(how), (IMAGES, torch.randn(2, 3)))
    found = program(traced)
    assert list(found.inputs) == ["image", "weights"]
    assert list(found.outputs) == traced.outputs == names
    given = np.random.default_rng(0)
    image, weights = (given.standard_normal(s).astype(np.float32) for s in ((5, 3, 8, 6), (5, 3)))
    made = interpret(found, [image, weights], traced.tensors)
    wanted = (image.astype(np.float64) * weights[:, :, None, None]).sum((2, 3))
    np.testing.assert_allclose(made[names[0]], wanted, 1e-12, 1e-12)
    if len(names) > 1:
        np.testing.assert_allclose(made[names[1]], 2.0 * weights)


def test_inputs_can_be_named() -> None:
    found = program(trace(Several("one"), (IMAGES, torch.randn(2, 3)), "mine", ["a", "b"]))
    assert (found.name, list(found.inputs)) == ("mine", ["a", "b"])


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1) + len(x) * 0


def test_a_batch_that_python_counts() -> None:
    assert program(trace(Counting(), (IMAGES,))).outputs.keys() == {"logits"}


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1)


@pytest.mark.parametrize("module", [Branching(), Fixed()], ids=["branches", "fixed batch"])
def test_what_cannot_be_exported_is_told_in_one_sentence(module: nn.Module) -> None:
    name = type(module).__name__
    with pytest.raises(ModelError, match=f"^{name}: torch.export cannot trace it ") as caught:
        trace(module, (IMAGES,))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_inputs_need_one_batch() -> None:
    with pytest.raises(ArgumentError, match="expect one batch, their first axis, for all"):
        trace(Several("one"), (IMAGES, torch.randn(3, 3)))


class Lacking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sort(-1).values + x.prod(-1, keepdim=True)
        z = x[torch.arange(x.shape[0]), :, 2]  # each image's own row
        return y.mean(-1).sum(-1) + z.sort(-1).values.sum(-1) + x.sort(1)[0].sum((2, 3))


def test_all_that_is_missing_is_listed_at_once_with_its_line() -> None:
    traced = trace(Lacking(), (IMAGES,))
    assert traced.program is None
    first = Lacking.forward.__code__.co_firstlineno
    found = {(each.op, each.origin) for each in traced.missing}
    assert ("aten.prod.dim_int", f"test_exported.py:{first + 1}") in found
    assert ("aten.index.Tensor", f"test_exported.py:{first + 2}") in found
    message = str(missing_error("lacking", traced.missing))
    assert message.startswith("lacking cannot be converted: ")
    sort = "aten.sort.default (there is no such op here), 3 times, first at test_exported.py"
    assert f"{sort}:{first + 1}" in message
    assert "aten.index.Tensor (axis 0 of float32[batch, 3, 6] is the batch), 1 times" in message
    assert message.endswith("; replace these ops in the model")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.gather(0, (x > 0).long()), "is the batch"),
        (lambda x: x.scatter_add(0, (x > 0).long(), x), "is the batch"),
        (lambda x: x.index_put((torch.tensor([0]),), x[:, :1, :1, :1].mean((1, 2))), ""),
        (lambda x: x[1:], ""),
        (lambda x: x[0], "one image of the batch"),
        (lambda x: x.sum(0), "a reduction over the batch"),
        (lambda x: x / torch.ones(len(x)).sum(), "a constant that differs from batch to batch"),
        (lambda x: torch.cat([x, x]), "batches put together"),
        (lambda x: x.flip(0), "is the batch"),
        (lambda x: x.roll(1, 0), "is the batch"),
        (lambda x: x.cumsum(0), "axis 0"),
        (lambda x: x[:, torch.tensor([0, 1]), :, torch.tensor([1, 2])], "not neighbours"),
        (lambda x: x[x.sum((1, 2, 3)) > 0], ""),
    ],
)
def test_what_images_do_to_each_other_is_not_taken(function: Any, why: str) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    try:
        traced = trace(Module(), (IMAGES,))
    except ModelError as error:
        assert "torch.export cannot trace it" in str(error) and not why
        return
    assert traced.program is None
    assert why in " ".join(each.why for each in traced.missing)


class Norm(nn.Module):
    """Computes a norm in float32 whatever comes, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        square = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.linear(x * torch.rsqrt(square + 1e-6))


def test_the_reference_computes_in_other_dtypes_where_the_module_names_float32() -> None:
    torch.manual_seed(0)
    module = Norm().eval()
    x = torch.randn(3, 8)
    reference = trace(module, (x,)).reference
    assert reference is not None
    exact = module.linear.double()(
        x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    )
    (found,) = reference((x,), [], "float64").values()
    assert found.dtype == np.float64 and np.abs(found - exact.detach().numpy()).max() < 1e-14
    (rounded,) = reference((x,), [], "bfloat16").values()
    assert 1e-5 < np.abs(rounded - found).max() < 0.05
