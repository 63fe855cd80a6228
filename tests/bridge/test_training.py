"""Training inside torch.compile: losses, gradients, statistics are torch's; a part each way."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxvision.bridge import aten, parts, training
from maxvision.bridge.dynamo import backend
from maxvision.bridge.parts import Explanation
from maxvision.bridge.training import trained
from maxvision.common.errors import ModelError
from maxvision.graphs import passes
from maxvision.graphs.backend import Backend
from tests.graphs.interpret import Interpreted


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "at_once", lambda: 1)  # parts remain whole, whatever the machine
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)


class Residual(nn.Module):
    """A small ResNet: a stem with a max pool, a block with a shortcut, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.block = nn.Sequential(
            nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        x = self.pool(self.stem(x).relu())
        x = (self.block(x) + self.shortcut(x)).relu()
        return F.cross_entropy(self.head(x.mean((2, 3))), wanted, label_smoothing=0.1)


class Transformer(nn.Module):
    """Tokens by their numbers, a layer of attention, and a loss."""

    def __init__(self, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)
        self.dropout, self.causal = dropout, causal

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        x = self.embed(words)
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(n, t, c)), self.dropout)
        x = x + self.mlp(self.norm2(x))
        return F.mse_loss(self.head(x.mean(1)).tanh(), wanted)


class WrittenOut(nn.Module):
    """Attention in products of its own, in one of the ways in which people write them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.5 if way == "dropped" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        if self.way == "einsum":  # transformers' CvT
            scores = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * 0.4
            y = torch.einsum("bhlt,bhtv->bhlv", [self.drop(F.softmax(scores, dim=-1)), v])
        elif self.way == "turned":
            y = (torch.softmax(q @ k.permute(0, 1, 3, 2) / 3, 3)).matmul(v.mT.mT)
        elif self.way == "masked":
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.4 + torch.ones(t, t).triu(1) * -9.0
            y = torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)
        elif self.way == "counted":
            scores = q @ k.transpose(2, 3) + (torch.ones(t, t).triu(1) > 0)
            y = scores.softmax(-1) @ v
        elif self.way == "other axis":
            y = (q @ k.transpose(-2, -1)).softmax(-2) @ v
        else:  # timm's
            q = q * 0.4
            scores = (q @ k.transpose(-2, -1)).softmax(dim=-1)
            y = self.drop(scores) @ v
            y = y + scores.mean() if self.way == "seen" else y
        return y.transpose(1, 2).reshape(n, t, c)


def images(batch: int = 3, size: int = 17) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(5, (batch,))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (3, 4)), torch.randn(3, 3)


def steps(model: nn.Module, call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """Trains two steps: the losses, then the weights and buffers with their last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(*given)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [each.grad for each in model.parameters()]
    assert all(each is not None for each in gradients)
    return [*losses, *model.state_dict().values(), *gradients]  # type: ignore[list-item]


def same(model: nn.Module, *given: Tensor, seed: int = 1) -> None:
    """Trains a model and its copy, and compares all that they have then."""
    twin = copy.deepcopy(model)
    torch.manual_seed(seed)
    wanted = steps(twin, twin, *given)
    torch.manual_seed(seed)
    found = steps(model, torch.compile(model, backend=backend, dynamic=False), *given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("model", "given"),
    [(Residual, images), (Transformer, words), (partial(Transformer, causal=True), words)],
    ids=["residual", "transformer", "causal"],
)
def test_two_steps_are_torchs_with_one_part_each_way(
    model: Callable[[], nn.Module], given: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend maxvision")
        same(model(), *given())
    assert len(Interpreted.made) == 2


class Attention(nn.Module):
    """Attention of tokens to some of their own, between two linear layers."""

    def __init__(self, mask: Tensor | None, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), dropout
        trained = mask is not None and mask.is_floating_point() and mask.ndim == 3
        self.mask = nn.Parameter(mask) if trained else None  # type: ignore[arg-type]
        self.register_buffer("held", None if trained else mask)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (y.reshape(n, -1, 2, c // 2).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = self.held if self.mask is None else self.mask
        k, v = k[:, :, :-2], v[:, :, :-2]
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, mask is None, scale=0.7)
        return self.out(y.transpose(1, 2).reshape(n, t, c)).square().mean()


T = 37
MASKS: dict[str, Callable[[], Tensor | None]] = {
    "causal": lambda: None,
    "bias": lambda: torch.randn(2, 1, T, T - 2),
    "keys": lambda: torch.arange(T)[:, None] > torch.arange(T - 2),  # the first sees none
    "trained": lambda: torch.randn(2, T, T - 2),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_trained_without_a_matrix_of_scores(mask: str) -> None:
    """But for the gradient of a bias, which is one."""
    same(Attention(MASKS[mask](), 0.0), torch.randn(2, T, 8))
    forward, backward = (each.program for each in Interpreted.made)
    kept = mask != "trained"
    for op, program in {"attention": forward, "attention_grad": backward}.items():
        assert sum(node.op == op for node in program.nodes) == kept
        scores = [
            name for node in program.nodes for name in node.outputs
            if node.op != "attention_bias" and program.types[name].shape[-2:] == (T, T - 2)
            and len(program.types[name].shape) > 3
        ]  # fmt: skip
        assert bool(scores) != kept, scores


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("way", ["einsum", "turned", "masked", "timm"])
def test_attention_that_is_written_out_is_whole(way: str) -> None:
    model, x = WrittenOut(way), torch.randn(2, T, 8, requires_grad=True)
    twin, y = copy.deepcopy(model), x.detach().requires_grad_()
    wants = step(twin, twin, y)
    found = step(model, torch.compile(model, backend=backend, dynamic=False), x)
    torch.testing.assert_close(found, wants, rtol=1e-4, atol=1e-5)
    forward, backward = (each.program for each in Interpreted.made)
    for op, program in {"attention": forward, "attention_grad": backward}.items():
        assert sum(node.op == op for node in program.nodes) == 1
        assert not any(node.op in ("softmax", "exp") for node in program.nodes)


@pytest.mark.parametrize("way", ["dropped", "counted", "other axis", "seen"])
def test_other_products_around_a_softmax_are_no_attention(way: str) -> None:
    """Where scores are dropped or read, or each key's add up to 1, or truth values are added."""
    told = explained(WrittenOut(way), torch.randn(2, T, 8))
    assert not any("attention" in op for each in told.parts for op in each.kernels)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_images_stay_narrow_and_channels_last(layout: torch.memory_format) -> None:
    """Under autocast, from the head's gradient to the first layer's, however the model lies."""
    (x, labels), model = images(4, 32), Residual().to(memory_format=layout)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=layout)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend, dynamic=False)(x, labels).backward()
    hopper = Backend("cuda", "bfloat16", architecture="sm_90a")
    for program in (passes.run(each.program, hopper) for each in Interpreted.made):
        made = [(n.op, program.types[name]) for n in program.nodes for name in n.outputs]
        large = [(op, y) for op, y in made if y.shape[:1] == (4,) and math.prod(y.shape) > 4 * 64]
        assert len(large) > 9 and all(y.dtype in ("bfloat16", "bool") for _, y in large)
        assert sum(op == "permute" for op, _ in large) < 2  # of the mean of the last ones


class Normed(nn.Module):
    """Tokens normed in the middle of an MLP, as autocast on a GPU has it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).float()
        with torch.autocast("cpu", enabled=False):
            y = self.norm(y)
        return self.down(y)


@pytest.mark.usefixtures("interpreted")
def test_layer_norms_keep_nothing() -> None:
    """One op each way, which computes the statistics of a row by itself."""
    same(Transformer(), *words())
    for each, op in zip(Interpreted.made, ("layer_norm", "layer_norm_grad"), strict=True):
        assert sum(node.op == op for node in each.program.nodes) == 2
        assert not any(node.op == "rsqrt" for node in each.program.nodes)
    types = Interpreted.made[0].program.types
    kept = [types[each].shape for each in Interpreted.made[0].program.outputs.values()]
    assert not [shape for shape in kept if shape in ((3, 4), (3, 4, 1))]  # a number for each token


@pytest.mark.usefixtures("interpreted")
def test_layer_norms_read_what_is_narrow() -> None:
    """Under autocast a GPU's torch norms in float32, and that is what it keeps of x."""
    x = torch.randn(2, T, 8)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Normed(), backend=backend, dynamic=False)(x).sum().backward()
    hopper = Backend("cuda", "bfloat16", architecture="sm_90a")
    forward, backward = (passes.run(each.program, hopper) for each in Interpreted.made)
    (norm,) = (node for node in forward.nodes if node.op == "layer_norm")
    (grad,) = (node for node in backward.nodes if node.op == "layer_norm_grad")
    assert forward.types[norm.output].dtype == "bfloat16"
    assert {backward.types[v].dtype for v in (grad.inputs[0], grad.output)} == {"bfloat16"}


class Beside(nn.Module):
    """A linear layer beside what it reads, which autocast leaves in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x)
        return x + self.two(x)


@pytest.mark.usefixtures("interpreted")
def test_sums_of_float32_and_bfloat16_stay_wide() -> None:
    """As torch's do: a stream of tokens is not rounded by each layer that adds to it."""
    model, x = Beside(), torch.randn(2, T, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
        found = torch.compile(model, backend=backend, dynamic=False)(x)
    assert found.dtype == want.dtype == torch.float32
    assert not found.equal(found.bfloat16().float())
    (program, *_) = (each.program for each in Interpreted.made)
    sums = [node for node in program.nodes if node.op == "add" and len(node.inputs) == 2]
    streams = [node for node in sums if program.types[node.output].shape == x.shape]
    assert {program.types[node.output].dtype for node in streams} == {"float32"}


def test_torch_finds_statistics_of_layer_norms_again() -> None:
    """No layer of the kinds that are asked for is beside them, so torch computes the way back."""
    model, x = nn.Sequential(nn.LayerNorm(8), nn.Sigmoid()), torch.randn(2, T, 8)
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    only = partial(trained, told=Explanation(), run=True, only=("sigmoid",))
    torch.compile(model, backend=only, dynamic=False)(x).sum().backward()
    for each, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(each.grad, want.grad)


def test_attention_with_dropout_is_taken_apart() -> None:
    told = explained(Attention(None, 0.1), torch.randn(2, T, 8))
    assert not any("attention" in op for each in told.parts for op in each.kernels)
    assert sum(each.kernels["softmax"] + each.kernels["matmul"] for each in told.parts) > 2


@pytest.mark.parametrize("mask", ["causal", "bias", "keys"])
def test_torch_trains_attention_that_was_kept_whole(
    monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    def compile(*_: Any, **__: Any) -> Any:
        raise ModelError("MAX is out of sorts")

    monkeypatch.setattr(parts.Executor, "compile", compile)
    with pytest.warns(UserWarning, match="leaves a graph to torch: MAX is out of sorts"):
        same(Attention(MASKS[mask](), 0.0), torch.randn(2, T, 8))


@pytest.mark.usefixtures("interpreted")
def test_dropout_stays_in_torch_with_one_mask_both_ways() -> None:
    same(Transformer(dropout=0.4), *words())
    assert len(Interpreted.made) > 2


@pytest.mark.usefixtures("interpreted")
def test_sizes_that_change_give_one_warning_and_run_in_torch() -> None:
    model = Residual()
    twin = copy.deepcopy(model)
    fast = torch.compile(model, backend=backend, dynamic=True)
    with pytest.warns(UserWarning, match="leaves a graph to torch: sizes change") as caught:
        for batch in (2, 3, 4):
            given = images(batch)
            torch.testing.assert_close(fast(*given), twin(*given))
    assert sum("maxvision" in str(each.message) for each in caught) == 1
    assert not Interpreted.made


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("model", [Residual, Transformer])
def test_large_parts_are_compiled_in_pieces(
    monkeypatch: pytest.MonkeyPatch, model: type[nn.Module]
) -> None:
    monkeypatch.setattr(training, "at_once", lambda: 4)
    monkeypatch.setattr(parts, "_LEAST", 3)
    same(model(), *(images() if model is Residual else words()))
    made = [each.program for each in Interpreted.made]
    assert 4 <= len(made) <= 8
    products = {"conv2d", "conv2d_input_grad", "conv2d_weight_grad", "matmul", "linear"}
    products |= {"attention", "attention_grad"}
    assert all(products & {node.op for node in each.nodes} for each in made)
    for each in made:  # a program for a GPU cannot give what no input decides
        decided = set(each.inputs)
        for node in each.nodes:
            if decided & {*node.inputs}:
                decided |= {*node.outputs}
        assert decided >= {*each.outputs.values()}


def explained(model: nn.Module, *given: Tensor) -> Explanation:
    """Says what became of a step, which runs in torch."""
    told = Explanation()

    def look(graph: Any, example: Any) -> Any:
        return trained(graph, example, told, run=False)

    torch.compile(model, backend=look, dynamic=False)(*given).sum().backward()
    return told


def test_a_step_that_is_only_looked_at_is_explained_and_runs_in_torch() -> None:
    model, given = Residual(), images()
    told = explained(model, *given)
    forward, backward = told.parts
    assert forward.kernels["max_pool2d"] == backward.kernels["max_pool2d_grad"] == 1
    assert backward.kernels["conv2d_weight_grad"] == 4 + 1  # the head's, too
    assert backward.kernels["conv2d_input_grad"] == 3
    assert str(told).startswith("2 programs on our kernels") and not told.left and not told.whole
    assert all(each.grad is not None for each in model.parameters())


def test_torch_finds_maxima_again_where_it_pools() -> None:
    """No layer is beside the way back of a pool whose convolution wants no gradients."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d((x * self.scale).sin(), 3, 2, 1).sum()

    model, (x, _) = Pooled(), images()
    twin = copy.deepcopy(model)
    twin(x).backward()
    found = torch.compile(model, backend=backend, dynamic=False)(x)
    found.backward()
    torch.testing.assert_close(model.scale.grad, twin.scale.grad)


def test_torch_reads_images_as_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs the way back of what a program computed, or part of it."""
    model, given = Residual(), images()
    twin = copy.deepcopy(model)
    monkeypatch.setattr(training, "at_once", lambda: 1)
    monkeypatch.setattr(parts, "Executor", Interpreted)
    monkeypatch.setattr(Interpreted, "made", [], raising=False)
    monkeypatch.delitem(aten.RULES, torch.ops.aten.where.self)
    wanted = steps(twin, twin, *given)
    found = steps(model, torch.compile(model, backend=backend, dynamic=False), *given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(Interpreted.made) > 2


@pytest.mark.usefixtures("interpreted")
def test_a_relu_behind_a_batch_norm_is_not_read_again() -> None:
    """The way back finds where it is 0 from what was normed."""
    model = nn.Sequential(behind(nn.BatchNorm2d(8), nn.ReLU()), nn.AvgPool2d(8))
    same(Loss(lambda y, wanted: (y.sum((1, 2, 3)) - wanted).square().mean(), model),
         torch.randn(PICTURES), torch.randn(2))  # fmt: skip
    _, backward = (each.program for each in Interpreted.made)
    (mask,) = (node for node in backward.nodes if node.op == "le")
    assert backward.producers[mask.inputs[0]].op == "add"


def behind(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


class Loss(nn.Module):
    """A layer and a loss."""

    def __init__(self, loss: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.loss = layer or nn.Linear(8, 5), loss

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return self.loss(self.linear(x), wanted)


class Pairs(nn.Module):
    """Products of tokens with a bias by places of a table, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(9, 2))
        self.register_buffer("places", torch.randint(9, (16,)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).reshape(2, 4, 2, 4).transpose(1, 2)
        bias = self.table[self.places].view(4, 4, 2).permute(2, 0, 1)
        return ((y @ y.mT + bias).softmax(-1) @ y).roll(1, 1)


class Weighted(nn.Module):
    """A layer whose outputs are weighted by numbers that its code has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25])


class Shifted(nn.Module):
    """Images far from 0, by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.linspace(-30, 10, x.shape[1])[:, None, None]


class Antialiased(nn.Module):
    """Makes images smaller."""

    def __init__(self, mode: str, size: int) -> None:
        super().__init__()
        self.mode, self.size = mode, size

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, size=self.size, mode=self.mode, antialias=True)


PICTURES, TOKENS, VECTORS = (2, 3, 8, 8), (2, 4, 8), (4, 8)
ACTIVATIONS = (
    nn.Hardswish, nn.SiLU, nn.GELU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Mish,
    nn.Softplus, nn.Hardsigmoid, nn.PReLU, nn.Hardtanh, partial(nn.GELU, "tanh"),
    partial(nn.GLU, 1),
)  # fmt: skip
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "numbers of the code": (Weighted, TOKENS),
    "activations": (lambda: behind(*(each() for each in ACTIVATIONS)), PICTURES),
    "group norm": (lambda: behind(nn.GroupNorm(2, 8)), PICTURES),
    "instance norm": (lambda: behind(nn.InstanceNorm2d(8, affine=True)), PICTURES),
    "batch norm of lines": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, 2, 1), nn.BatchNorm1d(6)), TOKENS,
    ),
    "batch norm far from 0": (lambda: behind(Shifted(), nn.BatchNorm2d(8)), PICTURES),
    "batch norm alone": (lambda: behind(nn.BatchNorm2d(8, affine=False), Shifted()), PICTURES),
    "batch norm in eval mode": (lambda: behind(nn.BatchNorm2d(8).eval()), PICTURES),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), TOKENS),
    "adaptive pool to 1": (lambda: behind(nn.AdaptiveAvgPool2d(1)), PICTURES),
    "adaptive pool to 2": (lambda: behind(nn.AdaptiveAvgPool2d(2)), PICTURES),
    "adaptive pool to 3": (lambda: behind(nn.AdaptiveAvgPool2d(3)), PICTURES),
    "average pool": (lambda: behind(nn.AvgPool2d(3, 2, 1)), PICTURES),
    "average pool inside": (
        lambda: behind(nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)), PICTURES,
    ),
    "average pool by a divisor": (
        lambda: behind(nn.AvgPool2d(2, divisor_override=3), nn.AvgPool2d(3, 2, ceil_mode=True)),
        PICTURES,
    ),
    "max pool": (lambda: behind(nn.MaxPool2d((2, 3), (1, 2), (1, 1), (2, 1), ceil_mode=True)),
                 PICTURES),
    "adaptive max pool": (lambda: behind(nn.AdaptiveMaxPool2d(2)), PICTURES),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 8, 3, 2, 1, 1), nn.ConvTranspose2d(8, 4, 2, 2, groups=2)
        ),
        PICTURES,
    ),
    "depthwise": (lambda: behind(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)), PICTURES),
    "lines": (lambda: nn.Conv1d(4, 6, 3, dilation=2, groups=2), TOKENS),
    "adaptive max pool of unlike windows": (lambda: behind(nn.AdaptiveMaxPool2d(3)), PICTURES),
    "resized": (
        lambda: behind(
            nn.Upsample(scale_factor=(2, 3)), nn.Upsample((9, 31)),
            nn.Upsample((7, 13), mode="nearest-exact"),
            nn.Upsample(scale_factor=1.7, mode="bilinear"),
            nn.Upsample((8, 9), mode="bilinear", align_corners=True),
            nn.Upsample(scale_factor=1.5, mode="bicubic"), Antialiased("bilinear", 9),
            Antialiased("bicubic", 5),
        ),
        PICTURES,
    ),
    "layer norm of images": (lambda: behind(nn.LayerNorm((8, 8))), PICTURES),
    "layer norm without weights": (
        lambda: behind(nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, bias=False)),
        PICTURES,
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), TOKENS,
    ),
    "a table": (Pairs, TOKENS),
}  # fmt: skip
TARGETS: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor]]] = {
    "cross entropy": (F.cross_entropy, lambda: torch.tensor([1, 2, -100, 4])),
    "cross entropy of parts": (F.cross_entropy, lambda: torch.rand(4, 5)),
    "nll": (
        lambda y, wanted: F.nll_loss(y.log_softmax(-1), wanted, reduction="sum"),
        lambda: torch.tensor([0, 4, 1, 1]),
    ),
    "mse": (F.mse_loss, lambda: torch.randn(4, 5)),
    "l1": (F.l1_loss, lambda: torch.randn(4, 5)),
    "smooth l1": (F.smooth_l1_loss, lambda: torch.randn(4, 5)),
    "bce": (F.binary_cross_entropy_with_logits, lambda: torch.rand(4, 5)),
    "bce of shares": (
        lambda y, wanted: F.binary_cross_entropy(y.sigmoid(), wanted), lambda: torch.rand(4, 5),
    ),
    "kl": (
        lambda y, wanted: F.kl_div(y.log_softmax(-1), wanted, reduction="batchmean"),
        lambda: torch.rand(4, 5),
    ),
    "moments": (
        lambda y, wanted: (y.logsumexp(-1) + y.std(-1) + y.var(-1)).sum() + y.max() * y.min(),
        lambda: torch.rand(1),
    ),
}  # fmt: skip
LEFT = {
    "adaptive max pool of unlike windows": {
        "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool2d_backward.default",
    },
}  # fmt: skip
"""What torch runs of a layer."""


def step(model: nn.Module, call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    y = call(*given)
    (y * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
    floats = (*given[:1], *model.parameters())
    return [y.detach(), *(each.grad for each in floats if each.grad is not None)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", [*LAYERS, *TARGETS])
def test_gradients_are_torchs(name: str) -> None:
    if name in LAYERS:
        model, given = LAYERS[name][0](), [torch.randn(LAYERS[name][1], requires_grad=True)]
    else:
        loss, wanted = TARGETS[name]
        model, given = Loss(loss), [torch.randn(VECTORS, requires_grad=True), wanted()]
    twin, others = copy.deepcopy(model), [copy.deepcopy(each) for each in given]
    wants = step(twin, twin, *others)
    told = explained(copy.deepcopy(model), *(each.detach() for each in given[:1]), *given[1:])
    assert {each.op for each in told.left} == LEFT.get(name, set())
    torch._dynamo.reset()
    found = step(model, torch.compile(model, backend=backend, dynamic=False), *given)
    assert len(found) == len(wants) and Interpreted.made
    torch.testing.assert_close(found, wants, rtol=1e-4, atol=1e-4)


def test_a_step_runs_on_our_kernels() -> None:
    """Compiles two graphs."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.max_pool2d(self.conv(x).relu(), 2).flatten(2).mT.unsqueeze(1)
            y = F.scaled_dot_product_attention(y, y.sin(), y, is_causal=True)
            return self.linear(y.amax((1, 2))).square().sum()

    same(Small(), torch.randn(2, 3, 7, 6))
