"""The backend of torch.compile: cut where an op has no kernel, equal to torch, never silent."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxvision
from maxvision.bridge import dynamo, parts
from maxvision.common.errors import ModelError
from maxvision.graphs.program import Program
from tests.graphs.interpret import Interpreted


class Net(nn.Module):
    """Has convolutions, tokens and a head; ``odd`` is called between them."""

    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).relu().flatten(2).transpose(1, 2)
        if self.odd:
            tokens = self.odd(tokens)
        return self.head(self.norm(tokens).mean(1))


def ordered(x: Tensor) -> Tensor:
    """Needs sorting, which has no kernel here; torch views what it gets."""
    return x.sort(dim=1).values.view(x.shape)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)


def same(model: nn.Module, fast: Any, *inputs: Tensor) -> None:
    with torch.no_grad():
        wanted, found = model(*inputs), fast(*inputs)
    assert found.stride() == wanted.stride() and found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 10, 12)


def test_torch_knows_it() -> None:
    assert "maxvision" in torch.compiler.list_backends(exclude_tags=())


@pytest.mark.usefixtures("interpreted")
def test_a_model_with_kernels_for_all_is_one_program_for_every_batch() -> None:
    model = Net().eval()
    fast = torch.compile(model, backend=dynamo.backend, fullgraph=True)
    for batch in (2, 3, 5, 1):
        same(model, fast, images(batch))
    shapes = [next(iter(each.program.inputs.values())).shape for each in Interpreted.made]
    assert shapes == [("batch", 3, 10, 12), ("batch", 3, 10, 12), (1, 3, 10, 12)]
    assert Interpreted.made[0].program == Interpreted.made[1].program  # compiled once
    assert "stem.0.weight" in Interpreted.made[0].tensors


@pytest.mark.usefixtures("interpreted")
def test_inputs_of_one_batch_have_it_in_common() -> None:
    """Even if one only picks rows of the other, which leaves torch.export two sizes."""

    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            whole = index[:, :, None].expand(-1, -1, x.shape[-1])
            found: Tensor = self.linear(
                torch.zeros_like(x).scatter_add(1, whole, x.gather(1, whole))
            )
            return found

    model = Picked().eval()
    fast = torch.compile(model, backend=dynamo.backend)
    for batch in (2, 3):
        same(model, fast, torch.randn(batch, 5, 6), torch.randint(5, (batch, 9)))
    sizes = [x.shape[0] for each in Interpreted.made for x in each.program.inputs.values()]
    assert sizes == ["batch"] * 4
    ops = [node.op for node in Interpreted.made[0].program.nodes]
    assert "expand" not in ops[ops.index("scatter_add") - 1 : ops.index("scatter_add")]


@pytest.mark.usefixtures("interpreted")
def test_torch_runs_what_has_no_kernel() -> None:
    model = Net(ordered).eval()
    fast = torch.compile(model, backend=dynamo.backend, dynamic=True)
    same(model, fast, images(2))
    same(model, fast, images(4))
    assert len(Interpreted.made) == 2


@pytest.mark.usefixtures("interpreted")
def test_a_part_that_torch_runs_keeps_its_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x).sort(dim=-1).values * self.scale).relu()

    model = Scaled().eval()
    same(model, torch.compile(model, backend=dynamo.backend), torch.randn(2, 6))
    assert len(Interpreted.made) == 1


def test_what_goes_where_is_explained() -> None:
    found = maxvision.explain(Net(ordered).eval(), images(2))
    assert isinstance(found, maxvision.Explanation)
    assert [sorted(each.kernels) for each in found.parts] == [
        ["conv2d"], ["layer_norm", "linear", "mean"],
    ]  # fmt: skip
    assert {each.op for each in found.left} >= {"aten.sort.default"}
    said = str(found)
    assert said.startswith("2 programs on our kernels")
    assert "1 op in torch:\n  aten.sort.default at test_dynamo.py:" in said
    assert not found.whole

    found = maxvision.explain(lambda x: x.sort().values.relu(), images(2))
    assert not found.parts and [each.why for each in found.left] == [
        "there is no such op here", "no layer is beside it",
    ]  # fmt: skip


def test_what_goes_where_in_training_is_explained() -> None:
    model = Net(ordered).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    found = maxvision.explain(model, images(2), training=True)
    assert [each.kernels["conv2d"] for each in found.parts] == [1, 0, 0, 0]  # forward comes first
    assert sum(each.kernels["conv2d_weight_grad"] for each in found.parts) == 2  # the head's, too
    assert {each.op for each in found.left} == {"aten.sort.default", "aten.scatter.src"}
    assert not found.whole
    for name, each in model.state_dict().items():  # statistics are as they were
        assert torch.equal(each, before[name]), name
    assert all(each.grad is None for each in model.parameters())


def test_a_model_of_16_bits_computes_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(1, 1, 8))
            self.place = nn.Parameter(torch.randn(1, 4, 8))
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
            return self.linear(x).float().mean(1).to(x.dtype)

    made = []

    def compile(program: Program, *_: Any, **__: Any) -> Any:
        made.append(program)
        raise ModelError("that is enough")

    monkeypatch.setattr(parts.Executor, "compile", compile)
    model, x = Tokens().eval().bfloat16(), torch.randn(2, 3, 8).bfloat16()
    with torch.no_grad(), pytest.warns(UserWarning, match="that is enough"):
        torch.compile(model, backend=dynamo.backend)(x)
    (program,) = made
    assert {kind.dtype for kind in program.inputs.values()} == {"bfloat16"}
    assert {node.op for node in program.nodes}.isdisjoint({"cast"})
    assert program.types[program.nodes[-1].output].dtype == "bfloat16"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (torch.bfloat16, "a tensor is float32, and programs are bfloat16"),
        (torch.float64, "a tensor is float64, and programs are float32"),
    ],
)
def test_what_is_of_another_dtype_than_most_is_torchs(dtype: torch.dtype, why: str) -> None:
    """A program takes the dtype it was compiled for; a norm in float32 amid bfloat16 cuts it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("scale", torch.rand(8) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x.to(self.first.weight.dtype))
            wide = y.float()
            y = (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(y.dtype)
            return self.second(y * self.scale.to(y.dtype))

    if dtype == torch.bfloat16:
        model, x = Normed().eval().bfloat16(), torch.randn(3, 8).bfloat16()
        model.scale = model.scale.float()  # a weight of another dtype cuts nothing
    else:
        model, x = Normed().eval(), torch.randn(3, 8, dtype=dtype)
    found = maxvision.explain(model, x)
    assert {each.why for each in found.left} == {why}
    assert "aten._to_copy.default" in {each.op for each in found.left}
    assert sum(each.kernels["linear"] for each in found.parts) == 2
    with torch.no_grad():
        y = torch.compile(model, backend=dynamo.backend)(x)
        torch.testing.assert_close(y, model(x))


def test_complex_numbers_are_torchs() -> None:
    model = nn.Linear(4, 3, dtype=torch.complex64).eval()
    found = maxvision.explain(model, torch.randn(2, 4, dtype=torch.complex64))
    assert not found.parts
    assert {each.why for each in found.left} == {"a tensor is complex64, and programs are float32"}


def test_statistics_that_nobody_reads_cut_nothing() -> None:
    """On a GPU those of a batch norm of bfloat16 are float32."""
    graph = torch.fx.Graph()
    norm = graph.call_function(torch.ops.aten._native_batch_norm_legit_no_training.default)
    norm.meta["val"] = (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(0))
    first = graph.call_function(operator.getitem, (norm, 0))
    first.meta["val"] = norm.meta["val"][0]
    graph.output(first)
    dtype = parts.dtype_of(torch.fx.GraphModule(nn.Module(), graph))
    assert dtype == torch.bfloat16
    assert parts._Supported(dtype, (), False).is_node_supported({}, norm)


def test_a_gpu_refuses_float64() -> None:
    graph = torch.fx.Graph()
    relu = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    relu.meta["val"] = torch.zeros(2, dtype=torch.float64)
    graph.output(relu)
    module, gpu = torch.fx.GraphModule(nn.Module(), graph), SimpleNamespace(is_host=False)
    with pytest.raises(ModelError, match="it is float64, which only a CPU computes in; move it to"):
        parts.cut(module, {}, gpu, parts.Explanation())  # type: ignore[arg-type]


def test_tensors_of_two_devices_stay_in_torch() -> None:
    model = nn.Linear(4, 3, device="meta").eval()
    found = maxvision.explain(lambda x: model(x.to("meta")), torch.randn(2, 4))
    assert found.whole == ["its tensors are on cpu and meta; move them to one device"]
    found = maxvision.explain(model, torch.randn(2, 4, device="meta"))
    assert found.whole == ["its tensors are on meta, and it computes on a CPU or a GPU"]


@pytest.mark.usefixtures("interpreted")
def test_weights_that_change_are_packed_anew() -> None:
    model = Net().eval()
    fast = torch.compile(model, backend=dynamo.backend)
    x = images(2)
    same(model, fast, x)
    with torch.no_grad():
        model.head.weight.mul_(-3)
        model.stem[1].running_var.add_(1)  # folded into the convolution
    same(model, fast, x)
    model.load_state_dict(Net().state_dict())
    same(model, fast, x)


@pytest.mark.usefixtures("interpreted")
def test_several_outputs_keep_their_places_and_a_batch_may_be_fixed() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x)
            table = y.new_zeros(x.shape[0], x.shape[0]) + y.sum()  # across the batch
            return {"y": y, "none": None, "pair": (table, [y.relu()])}

    model = Several().eval()
    fast = torch.compile(model, backend=dynamo.backend)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 4)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            wanted, found = model(x), fast(x)
        assert found["none"] is None and len(found["pair"]) == 2
        torch.testing.assert_close(found["y"], wanted["y"], rtol=1e-5, atol=1e-5)
        for one, want in zip(
            (found["pair"][0], found["pair"][1][0]), (wanted["pair"][0], wanted["pair"][1][0]),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_a_model_that_changes_its_buffers_stays_in_torch() -> None:
    model = Net().train()
    with torch.no_grad(), pytest.warns(UserWarning, match="it changes its inputs or buffers"):
        torch.compile(model, backend=dynamo.backend)(images(2))
    assert model.stem[1].num_batches_tracked == 1


@pytest.mark.usefixtures("interpreted")
def test_the_layout_is_torchs() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).permute(0, 3, 1, 2)

    model = Turned().eval()
    fast = torch.compile(model, backend=dynamo.backend)
    same(model, fast, images(2))
    same(model, fast, images(2).to(memory_format=torch.channels_last))


class Branching(Net):
    """Has a graph for each way that the numbers may take it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu().mean((2, 3))
        return self.head(self.norm(y)) if y.sum().item() > 0 else self.head(y)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("make", [Branching, partial(Net, ordered)], ids=["branches", "no rule"])
def test_what_cannot_be_one_program_is_trained_all_the_same(make: Any) -> None:
    model, x = make().train(), images(2)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend maxvision")
        torch.compile(model, backend=dynamo.backend, dynamic=False)(x).square().sum().backward()
    assert len(Interpreted.made) == 4  # of two graphs, each way
    twin(x).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_way_that_does_not_compile_is_torchs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def compile(program: Program, *given: Any, **named: Any) -> Any:
        backward = any(node.op == "conv2d_weight_grad" for node in program.nodes)
        if backward == (way == "backward"):
            raise ModelError("MAX is out of sorts")
        return Interpreted(program, given[0])

    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    monkeypatch.setattr(parts.Executor, "compile", compile)
    model, x = Net().train(), images(2)
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=dynamo.backend, dynamic=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fast(x).square().sum().backward()
    assert [str(each.message) for each in said] == [
        "backend maxvision leaves a graph to torch: MAX is out of sorts"
    ]
    twin(x).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_a_device_that_max_lacks_is_left_to_torch_in_training() -> None:
    model = nn.Linear(4, 3, device="meta")
    found = maxvision.explain(model, torch.randn(2, 4, device="meta"), training=True)
    assert set(found.whole) == {"its tensors are on meta, and it computes on a CPU or a GPU"}


def test_an_option_is_refused() -> None:
    fast = torch.compile(Net().eval(), backend=dynamo.backend, options={"speed": "high"})
    with torch.no_grad(), pytest.raises(Exception, match="has no option speed"):
        fast(images(2))


def test_it_runs_on_our_kernels() -> None:
    """Compiles one graph."""
    model = Net().eval()
    fast = torch.compile(model, backend="maxvision", dynamic=True)
    for batch in (2, 5):
        same(model, fast, images(batch))


@pytest.mark.usefixtures("interpreted")
def test_a_graph_is_cut_wherever_it_has_to_be() -> None:
    """Inputs of a part are called like ops of another one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu().transpose(1, 2)
                x = x + ordered(x).transpose(1, 2).contiguous()
            return x

    model = Twice().eval()
    same(model, torch.compile(model, backend=dynamo.backend), torch.randn(2, 6, 6))
    assert len(Interpreted.made) == 4
